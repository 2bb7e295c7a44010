"""Define every column that is written to disk."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from tasks.storage.facts.row_shape import RowShape
from tasks.storage.keys import PACKED, SHAPE_SETTINGS, SHAPED, WHOLE

INDEX_SCHEMA = pa.schema(
    [
        ("source", pa.int32()),  # index in the manifest's sources
        ("record", pa.int64()),  # line or record number within the source, from 1
        ("split", pa.dictionary(pa.int8(), pa.string())),
        ("shard", pa.int32()),  # number within the split
        ("row", pa.int32()),  # within the shard
        ("start", pa.int32()),  # offset within the row, a multiple of `align`
        ("length", pa.int32()),  # tokens in the row, including the separator, without padding
        ("first", pa.int32()),  # offset within the conversation; above 0 only if it was split
        ("trained", pa.int32()),  # tokens
        ("separator", pa.bool_()),  # the last token is an EOS that was added after the template's tokens
        ("truncated", pa.bool_()),
        ("closed", pa.bool_()),  # cut here, truncated or split: the EOS after it is not trained
        ("turns", pa.int32()),  # messages of the conversation, without system messages
        ("digest", pa.uint64()),  # hash of the content of the conversation
        ("dropped", pa.dictionary(pa.int8(), pa.string())),  # reason why it is in no row
    ]
)


# The index of a corpus in which a conversation has several samples, each with rows of its own. `turn` is the index of
# the message that a sample trains on, -1 if it is the whole conversation. The samples of a conversation have the same
# source and record, and the prompt of a turn is the conversation before it: `record` and `turn` identify the prompt,
# and a sample begins with the prompt of the sample before it, as far as the template renders that the same.
_INDEX_OF_SAMPLES_SCHEMA = INDEX_SCHEMA.append(pa.field("turn", pa.int32()))


def index_schema(with_turns: bool) -> pa.Schema:
    """Return the schema of an index, with a column `turn` if a conversation of the corpus has several samples."""
    return _INDEX_OF_SAMPLES_SCHEMA if with_turns else INDEX_SCHEMA


# Reasons why an accepted conversation is in no row: names in the ledger and in the index.
DROP_REASONS = ("too_long", "min_tokens", "max_tokens", "min_turns", "max_turns", "duplicate", "limit", "weight")


# Reasons for samples: another sample of the conversation may be packed, so that dropping this one rejects nothing.
SAMPLE_DROP_REASONS = (*DROP_REASONS, "no_trained_tokens")


REJECTED = 255  # in Accepted.why: no trained token is left


def drop_code(reason: str) -> int:
    """Return the number in Accepted.reason for a reason; 0 is a sample that stays."""
    return SAMPLE_DROP_REASONS.index(reason) + 1


IGNORED = -100

LOSS_WEIGHT = "loss_weight"  # the column of rows


# One row per piece of a conversation; a conversation that fits a row is one piece.
PLAN_SCHEMA = pa.schema(
    [
        ("row", pa.int32()),  # within the shard
        ("start", pa.int32()),  # offset within the row
        ("part", pa.int32()),  # number of the token file
        ("conversation", pa.int32()),  # row of the token file
        ("first", pa.int32()),  # offset within the conversation
        ("taken", pa.int32()),  # tokens
        ("closed", pa.bool_()),  # an untrained EOS follows, because the conversation was cut
    ]
)


# In a plan of a corpus whose conversations have the same weight each: the trained tokens of the conversation that a
# piece is of, in all of its pieces and samples.
TRAINED_OF_ALL = pa.field("trained_of_all", pa.int32())


def plan_schema(weighs_conversations: bool) -> pa.Schema:
    """Return the schema of a plan; `weighs_conversations` as in Config."""
    return PLAN_SCHEMA.append(TRAINED_OF_ALL) if weighs_conversations else PLAN_SCHEMA


# One row per row of the corpus, by split, shard, and row; one record batch per shard.
ROWS_SCHEMA = pa.schema(
    [
        ("squares", pa.int64()),  # sum of the squared lengths of the segments: what attention costs
        ("longest", pa.int32()),  # tokens of the longest segment
        ("segments", pa.int32()),  # conversations, or pieces of them
        ("trained", pa.int32()),  # tokens
    ]
)


def is_weighted(settings: dict[str, Any]) -> bool:
    """Return whether rows have a column `loss_weight`; `settings` are those of a manifest."""
    return settings.get("loss_weight", "none") != "none"


def row_schema(sequence_length: int, key: str, shape: RowShape | None = None, weighted: bool = False) -> pa.Schema:
    """Return the schema of a shard of format 3.0 or, with a shape, of format 3.1, with its metadata."""

    def fixed(value: pa.DataType) -> pa.DataType:
        return pa.list_(pa.field("item", value, nullable=False), sequence_length)

    fields = [
        pa.field("input_ids", fixed(pa.int32()), nullable=False),
        pa.field("attention_mask", fixed(pa.int8()), nullable=False),
        pa.field("labels", fixed(pa.int32()), nullable=False),
        pa.field("position_ids", fixed(pa.int32()), nullable=False),
        *[pa.field(LOSS_WEIGHT, fixed(pa.float32()), nullable=False)] * weighted,
    ]
    if shape and shape.padding == "none":
        numbers = pa.list_(pa.field("item", pa.int32(), nullable=False))
        names = ("input_ids", "labels", "position_ids", "seq_lens")
        fields = [pa.field(name, numbers, nullable=False) for name in names]
        fields.append(pa.field("max_seqlen", pa.int32(), nullable=False))
    settings = shape.model_dump() if shape else {}
    facts = {name: str(settings[name]) for name in SHAPE_SETTINGS if name in settings}
    return pa.schema(fields, metadata(sequence_length, key, SHAPED if shape else PACKED) | facts)


def metadata(sequence_length: int, key: str, format_version: str) -> dict[str, str]:
    return {"format_version": format_version, "manifest_key": key, "sequence_length": str(sequence_length)}


MESSAGE = pa.struct(
    [
        ("role", pa.string()),
        ("content", pa.string()),
        ("name", pa.string()),
        (
            "tool_calls",
            pa.list_(
                pa.struct(
                    [
                        ("id", pa.string()),
                        ("type", pa.string()),
                        ("function", pa.struct([("name", pa.string()), ("arguments", pa.string())])),
                    ]
                )
            ),
        ),
        ("tool_call_id", pa.string()),
        ("weight", pa.int8()),
    ]
)


def conversation_schema(sequence_length: int, key: str) -> pa.Schema:
    """Return the schema of format 2.0: one conversation per row, for a trainer that tokenizes itself."""
    fields = [("messages", pa.list_(MESSAGE)), ("tools", pa.string()), ("text", pa.large_string())]
    return pa.schema(fields, metadata(sequence_length, key, WHOLE))


TOKENS_SCHEMA = pa.schema(
    [
        ("record", pa.int64()),
        ("digest", pa.uint64()),
        ("turns", pa.int32()),
        ("turn", pa.int32()),
        ("trained", pa.int32()),
        ("separator", pa.bool_()),
        ("tokens", pa.large_list(pa.int32())),
    ]
)


TOKENS_AND_TEXT_SCHEMA = pa.schema(
    [*TOKENS_SCHEMA, *(pa.field(name, pa.large_string()) for name in ("messages", "tools", "text"))]
)


# Token files with the weights that the data has: weights[i] is that of the trained tokens from weight_ends[i - 1], or
# from the first, to weight_ends[i]. The last end is the number of tokens.
WEIGHTED_TOKENS_SCHEMA = pa.schema(
    [*TOKENS_SCHEMA, ("weight_ends", pa.list_(pa.int32())), ("weights", pa.list_(pa.float32()))]
)


# Numbers of the direction of a conversation, and of the sketch of its embedding. Random projections keep angles to
# about 1/√AXES (Achlioptas 2003).
AXES = 32

# In token files with sketches of the embeddings that the data has: those of samples of a conversation are the same.
SKETCH = pa.field("sketch", pa.list_(pa.int16(), AXES))


def tokens_schema(packing: bool, weighted: bool, embedded: bool = False) -> pa.Schema:
    """Return the schema of token files.

    `weighted` and `embedded` are Config.reads_loss_weights and reads_embeddings, and only with `packing`.
    """
    if not packing:
        return TOKENS_AND_TEXT_SCHEMA
    schema = WEIGHTED_TOKENS_SCHEMA if weighted else TOKENS_SCHEMA
    return schema.append(SKETCH) if embedded else schema
