"""Define the columns that are written to disk, and convert them from and to numpy.

Numbers are not copied. pyarrow's own `pa.array` and `to_numpy` do the same, but their first call in a process imports
pandas if it is installed, which takes 0.2 s in every worker.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import xxhash

from packcorpus.tasks.storage.keys import SHAPE_SETTINGS, WHOLE, WHOLE_MESSAGES
from packcorpus.tasks.storage.layout import RowLayout


def to_arrow(values: np.ndarray, null: np.ndarray | None = None) -> pa.Array:
    """Return an Arrow column over the memory of an array; flags are copied.

    The column has the type of the array. It is null where `null` (bool) is true.
    """
    valid = None if null is None or not null.any() else pa.py_buffer(np.packbits(~null, bitorder="little"))
    stored = np.packbits(values, bitorder="little") if values.dtype == np.bool_ else np.ascontiguousarray(values)
    return pa.Array.from_buffers(pa.from_numpy_dtype(values.dtype), len(values), [valid, pa.py_buffer(stored)])


def strings(texts: Sequence[str]) -> pa.Array:
    data = [text.encode() for text in texts]
    offsets = np.cumsum([0, *map(len, data)], dtype=np.int32)
    return pa.StringArray.from_buffers(len(texts), pa.py_buffer(offsets), pa.py_buffer(b"".join(data)))


def offsets_of(lengths: Sequence[int] | np.ndarray) -> np.ndarray:
    """Return the running sum of lengths, from 0: int64[len(lengths) + 1]."""
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def to_numpy(column: pa.Array) -> np.ndarray:
    """Return a read-only array over the memory of a column; flags are copied."""
    assert not column.null_count, f"{column.type}: {column.null_count} of {len(column)} are null"
    data, start, end = column.buffers()[1], column.offset, column.offset + len(column)
    if data is None or start == end:
        return np.empty(0, str(column.type))
    if column.type == pa.bool_():
        bits = np.frombuffer(data, np.uint8)[start // 8 : (end + 7) // 8]
        return np.unpackbits(bits, bitorder="little")[start % 8 :][: end - start].astype(bool)
    return np.frombuffer(data, str(column.type))[start:end]


def xxh3_of(batch: pa.RecordBatch) -> str:
    """Return the XXH3 hash of the numbers and flags of a record batch without nulls."""
    digest = xxhash.xxh3_128()
    for column in batch.columns:
        digest.update(np.ascontiguousarray(to_numpy(column)).data)
    return str(digest.hexdigest())


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
        ("closed", pa.bool_()),  # the conversation was cut here (truncated or split): the EOS after it is not trained
        ("turns", pa.int32()),  # messages of the conversation, without system messages
        ("digest", pa.uint64()),  # hash of the content of the conversation
        ("dropped", pa.dictionary(pa.int8(), pa.string())),  # reason why it is in no row
    ]
)


# In an index of samples, each sample of a conversation has its own index rows, with a column `turn`: the index of the
# message that the sample trains on, or -1 if the sample is the whole conversation. All samples of a conversation have
# the same source and record. The prompt of a turn is the conversation before the turn, so `record` and `turn` identify
# the prompt. A sample begins with the prompt of the previous sample, as far as the template renders both prompts alike.
def index_schema(with_turns: bool, with_repeated: bool = False, with_group: bool = False) -> pa.Schema:
    """Return the schema of an index.

    `with_turns` if it is an index of samples, `with_repeated` if conversations are split between turns, and
    `with_group` if `validation_by` is not `conversation`.
    """
    # The number of the conversation's first tokens that the piece repeats before its own, which begin at `first`. They
    # are part of `length`.
    fields = [pa.field("turn", pa.int32())] * with_turns + [pa.field("repeated", pa.int32())] * with_repeated
    # The hash that decides the split of the conversation: of its prompt, or of the value of a key.
    fields += [pa.field("group", pa.uint64())] * with_group
    return pa.schema([*INDEX_SCHEMA, *fields])


# Reasons why an accepted conversation is in no row, as the ledger and the index name them.
DROP_REASONS = ("too_long", "min_tokens", "max_tokens", "min_turns", "max_turns", "duplicate", "limit", "weight")

# Reasons for samples. A sample without trained tokens is dropped, not rejected, if its conversation has other samples
# with trained tokens.
SAMPLE_DROP_REASONS = (*DROP_REASONS, "no_trained_tokens")

# All reasons, in the order of their codes. Only an index of a corpus that is cleaned names the last two, so the index
# of any other corpus stays the same.
ALL_DROP_REASONS = (*SAMPLE_DROP_REASONS, "near_duplicate", "contaminated")

REJECTED = 255  # in Accepted.reason: no trained token is left


def drop_code(reason: str) -> int:
    """Return the number of a reason in Accepted.reason; 0 is a sample that stays."""
    return ALL_DROP_REASONS.index(reason) + 1


IGNORED = -100

LOSS_WEIGHT, END = "loss_weight", "end"  # columns of rows

# One row per piece of a conversation. A conversation that fits in a row is one piece.
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


def plan_schema(weighs_conversations: bool, splits_at_turns: bool = False) -> pa.Schema:
    """Return the schema of a plan; the arguments are defined in Config."""
    # The trained tokens of a piece's conversation, in all of its pieces and samples.
    fields = [pa.field("trained_of_all", pa.int32())] * weighs_conversations
    # The number of the conversation's first tokens that the piece repeats before its own, untrained.
    fields += [pa.field("repeated", pa.int32())] * splits_at_turns
    return pa.schema([*PLAN_SCHEMA, *fields])


# One record per row of the corpus, ordered by split, shard, and row; one record batch per shard.
ROWS_SCHEMA = pa.schema(
    [
        ("squares", pa.int64()),  # sum of the squared lengths of the segments, proportional to the cost of attention
        ("longest", pa.int32()),  # tokens of the longest segment
        ("segments", pa.int32()),  # conversations, or pieces of them
        ("trained", pa.int32()),  # tokens
    ]
)


def row_schema(layout: RowLayout, length: int, key: str, format_version: str = "") -> pa.Schema:
    """Return schema and metadata of a shard; `format_version` replaces the layout's."""

    def fixed(value: pa.DataType) -> pa.DataType:
        return pa.list_(pa.field("item", value, nullable=False), length)

    fields = [
        pa.field("input_ids", fixed(pa.int32()), nullable=False),
        pa.field("attention_mask", fixed(pa.int8()), nullable=False),
        pa.field("labels", fixed(pa.int32()), nullable=False),
        pa.field("position_ids", fixed(pa.int32()), nullable=False),
        *[pa.field(END, fixed(pa.int32()), nullable=False)] * layout.is_shared,
        *[pa.field(LOSS_WEIGHT, fixed(pa.float32()), nullable=False)] * layout.is_weighted,
    ]
    if layout.padding == "none":
        numbers = pa.list_(pa.field("item", pa.int32(), nullable=False))
        names = ("input_ids", "labels", "position_ids", "seq_lens")
        fields = [pa.field(name, numbers, nullable=False) for name in names]
        fields.append(pa.field("max_seqlen", pa.int32(), nullable=False))
    facts = {name: str(value) for name, value in layout.recorded.items() if name in SHAPE_SETTINGS}
    return pa.schema(fields, metadata(length, key, format_version or layout.format_version) | facts)


def metadata(sequence_length: int, key: str, format_version: str) -> dict[str, str]:
    return {"format_version": format_version, "manifest_key": key, "sequence_length": str(sequence_length)}


_FUNCTION = pa.struct([("name", pa.string()), ("arguments", pa.string())])
_CALL = pa.struct([("id", pa.string()), ("type", pa.string()), ("function", _FUNCTION)])
MESSAGE = pa.struct(
    [
        ("role", pa.string()),
        ("content", pa.string()),
        ("name", pa.string()),
        ("tool_calls", pa.list_(_CALL)),
        ("tool_call_id", pa.string()),
        ("weight", pa.int8()),
        ("reasoning_content", pa.string()),
        ("train", pa.bool_()),
    ]
)


def conversation_schema(sequence_length: int, key: str, key_version: int = WHOLE_MESSAGES) -> pa.Schema:
    """Return schema and metadata of a shard of conversations: format 2.0."""
    # Earlier versions wrote fewer keys of a message.
    message = MESSAGE if key_version >= WHOLE_MESSAGES else pa.struct([*MESSAGE][:-2])
    fields = [("messages", pa.list_(message)), ("tools", pa.string()), ("text", pa.large_string())]
    return pa.schema(fields, metadata(sequence_length, key, WHOLE))


TOKENS_SCHEMA = pa.schema(
    [
        ("record", pa.int64()),
        ("digest", pa.uint64()),
        ("prompt", pa.uint64()),
        ("turns", pa.int32()),
        ("turn", pa.int32()),
        ("trained", pa.int32()),
        ("separator", pa.bool_()),
        ("tokens", pa.large_list(pa.int32())),
    ]
)

# Token files with loss weights from the data. weights[i] is the weight of the trained tokens from weight_ends[i - 1],
# or from 0 for the first weight, to weight_ends[i]. The last end is the number of tokens.
WEIGHTED_TOKENS_SCHEMA = pa.schema(
    [*TOKENS_SCHEMA, ("weight_ends", pa.list_(pa.int32())), ("weights", pa.list_(pa.float32()))]
)


def tokens_schema(packing: bool, weighted: bool, grouped: bool = False) -> pa.Schema:
    """Return the schema of token files; `weighted` has no effect without `packing`.

    If they are `grouped`, they have a hash of the value that `validation_by` names.
    """
    schema = WEIGHTED_TOKENS_SCHEMA if weighted else TOKENS_SCHEMA
    if not packing:
        schema = pa.schema([*TOKENS_SCHEMA, *((name, pa.large_string()) for name in ("messages", "tools", "text"))])
    return schema.append(pa.field("group", pa.uint64())) if grouped else schema
