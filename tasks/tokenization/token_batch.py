"""Conversations on their way into one encode call, and out of it as one record batch of a token file.

    add_framed(records, framed) ─────────┐
    add(record, conversation, segments) ─┴▶ texts, tokens, trained ── encode() ──▶ token_files.SCHEMA

Ids, labels and offsets are made a batch at a time, from what the few shapes of its conversations have in common.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import repeat
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from tasks.conversations.content import content_digest, said
from tasks.conversations.model import Conversation, turns_of, usual_order
from tasks.conversations.openai import tools_json, turns_json
from tasks.encoders.encoder import Encoded, Encoder
from tasks.storage.arrow import offsets_of, to_arrow
from tasks.templates.spans import TEXT
from tasks.tokenization.frames import Frame, Framed
from tasks.tokenization.segments import Segments

# Characters gathered for one encode call: large enough to spread its overhead, small enough to stay in the cache.
BATCH_CHARACTERS = 1 << 21


# Handled, but a user may want to know: conversations with a control string as text, with a character that comes back
# as another, unknown tokens, conversations whose turns stand in an unusual order.
NOTICED = ("control_text_seen", "not_round_trip", "unknown_tokens", "unusual_order")


COUNTS = ("accepted", "tokens", *NOTICED)


class _Written(NamedTuple):
    """What a Frame says of all conversations of a shape, of one that has none."""

    tokens: np.ndarray
    trained: np.ndarray
    separator: bool
    usual: bool
    turns: int


class _Shapes:
    """The distinct shapes of a batch, and which of them each conversation has (`which`, int64)."""

    def __init__(self, shapes: Sequence[Frame | _Written]):
        keys = list(map(id, shapes))
        self._distinct = dict(zip(keys, shapes, strict=True))
        numbers = dict(zip(self._distinct, range(len(self._distinct)), strict=True))
        self.which = np.fromiter(map(numbers.__getitem__, keys), np.int64, len(keys))

    def of_each(self, name: str, dtype: type) -> np.ndarray:
        """A field of each conversation's shape."""
        return np.array([getattr(shape, name) for shape in self._distinct.values()], dtype)[self.which]

    def segments(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Tokens and flags of all segments, and where those of each conversation begin and end."""
        distinct = self._distinct.values()
        begins = offsets_of([len(shape.tokens) for shape in distinct])
        ends = offsets_of(np.diff(begins)[self.which])
        places = np.arange(ends[-1]) + np.repeat(begins[self.which] - ends[:-1], np.diff(ends))
        tokens = np.concatenate([shape.tokens for shape in distinct])[places]
        return tokens, np.concatenate([shape.trained for shape in distinct])[places], ends


class Batch:
    """What `encode` counts (COUNTS) it adds to `receipt`. Lists over the conversations, and over their texts."""

    def __init__(self, encoder: Encoder, receipt: dict[str, Any]):
        self.encoder = encoder
        self.receipt = receipt
        self.characters = 0
        self.records: list[int] = []
        self._shapes: list[Frame | _Written] = []
        self._contents: list[Sequence[str]] = []
        self._digests: list[int] = []
        self._texts: list[str] = []
        self._whole: list[tuple[str, str | None, str]] = []  # what format 2.0 has besides

    def add_framed(self, records: Sequence[int], framed: Framed) -> None:
        self.records += records
        self._shapes += framed.frames
        self._contents += framed.contents
        self._digests += framed.digests
        self._texts += framed.texts
        self.characters += sum(map(len, framed.texts))

    def add(self, record: int, conversation: Conversation, segments: Segments, rendered: str | None = None) -> None:
        """`rendered`, where the schema that is encoded to is that of format 2.0."""
        roles = [message.role for message in conversation.messages]
        tokens, trained = np.array(segments.tokens, np.int32), np.array(segments.trained)
        self.records.append(record)
        self._shapes.append(_Written(tokens, trained, segments.separator, usual_order(roles), turns_of(roles)))
        what_is_said = said(conversation)
        self._contents.append(what_is_said.split("\0"))
        self._digests.append(content_digest(what_is_said.encode()))
        self._texts += segments.texts
        self.characters += len(what_is_said)
        if rendered is not None:
            self._whole.append((turns_json(conversation), tools_json(conversation), rendered))

    def encode(self, schema: pa.Schema) -> pa.RecordBatch:
        """All of the batch as one record batch of the token file."""
        holding = self.encoder.holding(self._texts)
        encoded = self.encoder.encode(self._texts, holding)
        shapes = _Shapes(self._shapes)
        tokens, trained, segments = shapes.segments()
        values, offsets, counts = _labelled(encoded, tokens, trained, segments)
        self._notice(encoded, holding, offsets_of(np.diff(offsets_of(tokens == TEXT)[segments])))
        self.receipt["unusual_order"] += int(np.count_nonzero(~shapes.of_each("usual", bool)))
        self.receipt["accepted"] += len(self.records)
        separators = shapes.of_each("separator", bool)
        self.receipt["tokens"] += len(values) - int(np.count_nonzero(separators))
        columns = [
            to_arrow(np.array(self.records, np.int64)),
            to_arrow(np.array(self._digests, np.uint64)),
            to_arrow(shapes.of_each("turns", np.int32)),
            to_arrow(counts.astype(np.int32)),
            to_arrow(separators),
            pa.LargeListArray.from_arrays(to_arrow(offsets), to_arrow(values)),
        ]
        if len(schema) > len(columns):
            columns += [pa.array(column, pa.large_string()) for column in zip(*self._whole, strict=True)]
        return pa.record_batch(columns, schema=schema)

    def _notice(self, encoded: Encoded, holding: list[int], texts: np.ndarray) -> None:
        """Count what a user may want to know; `holding` are the texts with a control string or the like in them, and
        `texts` says where those of each conversation begin and end."""
        receipt, encoder = self.receipt, self.encoder
        if encoder.unk_id is not None:
            receipt["unknown_tokens"] += int(np.count_nonzero(encoded.ids == encoder.unk_id))
        if encoder.underline_is_space:
            underlined = np.fromiter(map(str.__contains__, self._texts, repeat("▁")), bool, len(self._texts))
            receipt["not_round_trip"] += np.unique(np.searchsorted(texts, np.flatnonzero(underlined), "right")).size
        # What the messages say, and not what the template writes: a marker that it writes as text is no one's attempt.
        # Of a frame all that is said is in its texts; another template may leave a part out.
        likely = set((np.searchsorted(texts, holding, side="right") - 1).tolist())
        written = [number for number, shape in enumerate(self._shapes) if isinstance(shape, _Written)]
        likely |= {written[n] for n in encoder.holding(["\0".join(self._contents[number]) for number in written])}
        receipt["control_text_seen"] += sum(encoder.count_controls(self._contents[number]) > 0 for number in likely)


def _labelled(
    encoded: Encoded, tokens: np.ndarray, trained: np.ndarray, segments: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Tokens as a token file has them, where each conversation begins and ends, its trained tokens; of segments."""
    is_text = tokens == TEXT
    lengths = np.ones(len(tokens), np.int64)
    lengths[is_text] = np.diff(encoded.offsets)
    ends = offsets_of(lengths)
    # Texts stand in the order of their segments, so their ids fill what the control tokens leave free.
    of_text = np.ones(ends[-1], bool)
    controls = np.flatnonzero(~is_text)
    of_text[ends[controls]] = False
    values = np.empty(ends[-1], np.int32)
    values[of_text] = encoded.ids
    values[ends[controls]] = tokens[controls]
    # ~id is id ^ -1.
    flips = np.repeat(trained.astype(np.int32) - 1, lengths)
    offsets = ends[segments]
    counts = np.diff(offsets_of(lengths * trained)[segments]) - (flips[offsets[:-1]] == 0)
    flips[offsets[:-1]] = -1
    values ^= flips
    return values, offsets, counts
