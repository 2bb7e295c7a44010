"""Conversations on their way into one encode call, and out of it as one record batch of a token file.

    add_framed(record, frame, contents) ─┐
    add(record, conversation, segments) ─┴▶ texts, tokens, trained ── encode() ──▶ token_files.SCHEMA

What is a step a conversation is Python and takes about 3 µs of it; ids, labels and offsets are made a batch at a time.
"""

from __future__ import annotations

from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import orjson
import pyarrow as pa

from tasks.columns import to_arrow
from tasks.conversations import Conversation, content_digest, said, turns_of, usual_order
from tasks.encoders import Encoded, Encoder
from tasks.frames import Frame
from tasks.segments import Segments
from tasks.templates import TEXT, full_text

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


class Batch:
    """What `encode` counts (COUNTS) it adds to `receipt`. Lists over the conversations, and over their texts."""

    def __init__(self, encoder: Encoder, receipt: dict[str, Any]):
        self.encoder = encoder
        self.receipt = receipt
        self.characters = 0
        self.records: list[int] = []
        self._frames: list[Frame | _Written] = []
        self._said: list[bytes] = []
        self._counts: list[int] = []  # how many texts
        self._texts: list[str] = []
        self._whole: list[tuple[str, str | None, str]] = []  # what format 2.0 has besides

    def add_framed(self, record: int, frame: Frame, contents: list[str]) -> None:
        self._add(record, frame, frame.said(contents), frame.fill(contents))

    def add(self, record: int, conversation: Conversation, segments: Segments, rendered: str | None = None) -> None:
        """`rendered`, where the schema that is encoded to is that of format 2.0."""
        roles = [message.role for message in conversation.messages]
        tokens, trained = np.array(segments.tokens, np.int32), np.array(segments.trained)
        written = _Written(tokens, trained, segments.separator, usual_order(roles), turns_of(roles))
        self._add(record, written, said(conversation), segments.texts)
        if rendered is not None:
            self._whole.append((_turns_json(conversation), _tools_json(conversation), rendered))

    def _add(self, record: int, frame: Frame | _Written, what_is_said: str, texts: list[str]) -> None:
        self.records.append(record)
        self._frames.append(frame)
        self._said.append(what_is_said.encode())
        self._counts.append(len(texts))
        self._texts += texts
        self.characters += len(what_is_said)

    def encode(self, schema: pa.Schema) -> pa.RecordBatch:
        """All of the batch as one record batch of the token file."""
        holding = self.encoder.holding(self._texts)
        encoded = self.encoder.encode(self._texts, holding)
        values, offsets, counts = self._labelled(encoded)
        self._notice(encoded, holding)
        self.receipt["accepted"] += len(self.records)
        separators = [frame.separator for frame in self._frames]
        self.receipt["tokens"] += len(values) - sum(separators)
        columns = [
            to_arrow(np.array(self.records, np.int64)),
            to_arrow(np.fromiter(map(content_digest, self._said), np.uint64, len(self._said))),
            to_arrow(np.array([frame.turns for frame in self._frames], np.int32)),
            to_arrow(counts.astype(np.int32)),
            to_arrow(np.array(separators, bool)),
            pa.LargeListArray.from_arrays(to_arrow(offsets), to_arrow(values)),
        ]
        if len(schema) > len(columns):
            columns += [pa.array(column, pa.large_string()) for column in zip(*self._whole, strict=True)]
        return pa.record_batch(columns, schema=schema)

    def _labelled(self, encoded: Encoded) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Tokens as a token file has them, where each conversation begins and ends, its trained tokens."""
        tokens = np.concatenate([frame.tokens for frame in self._frames])
        trained = np.concatenate([frame.trained for frame in self._frames])
        is_text = tokens == TEXT
        lengths = np.ones(len(tokens), np.int64)
        lengths[is_text] = np.diff(encoded.offsets)
        ends = np.zeros(len(tokens) + 1, np.int64)
        np.cumsum(lengths, out=ends[1:])
        # Texts stand in the order of their segments, so their ids fill what the control tokens leave free.
        of_text = np.ones(ends[-1], bool)
        controls = np.flatnonzero(~is_text)
        of_text[ends[controls]] = False
        values = np.empty(ends[-1], np.int32)
        values[of_text] = encoded.ids
        values[ends[controls]] = tokens[controls]
        # ~id is id ^ -1.
        flips = np.repeat(trained.astype(np.int32) - 1, lengths)
        segments = np.zeros(len(self._frames) + 1, np.int64)
        np.cumsum([len(frame.tokens) for frame in self._frames], out=segments[1:])
        offsets = ends[segments]
        before = np.concatenate([[0], np.cumsum(lengths * trained)])
        counts = np.diff(before[segments]) - (flips[offsets[:-1]] == 0)
        flips[offsets[:-1]] = -1
        values ^= flips
        return values, offsets, counts

    def _notice(self, encoded: Encoded, holding: list[int]) -> None:
        """Count what a user may want to know; `holding` are the texts with a control string or the like in them."""
        receipt, encoder = self.receipt, self.encoder
        receipt["unusual_order"] += sum(not frame.usual for frame in self._frames)
        if encoder.unk_id is not None:
            receipt["unknown_tokens"] += int(np.count_nonzero(encoded.ids == encoder.unk_id))
        if encoder.underline_is_space and any("▁" in text for text in self._texts):
            texts = iter(self._texts)
            receipt["not_round_trip"] += sum("▁" in "".join(islice(texts, count)) for count in self._counts)
        # What the messages say, and not what the template writes: a marker that it writes as text is no one's attempt.
        # Of a frame all that is said is in its texts; another template may leave a part out.
        likely = set(np.searchsorted(np.cumsum(self._counts), holding, side="right").tolist())
        written = [number for number, frame in enumerate(self._frames) if isinstance(frame, _Written)]
        likely |= {written[place] for place in encoder.holding([self._said[number].decode() for number in written])}
        receipt["control_text_seen"] += sum(
            encoder.count_controls(self._said[number].decode().split("\0")) > 0 for number in likely
        )


def _turns_json(conversation: Conversation) -> str:
    """The messages as format 2.0 has them; null for the format `text`, which has no turns."""
    plain = conversation.messages[0].role == "text"
    return orjson.dumps(None if plain else [as_row(message) for message in conversation.messages]).decode()


def _tools_json(conversation: Conversation) -> str | None:
    return f"[{','.join(conversation.tools)}]" if conversation.tools else None


def as_row(message: Any) -> dict[str, Any]:
    """A message as format 2.0 has it: OpenAI's form, tool arguments as JSON text."""
    calls = [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in message.tool_calls
    ]
    return {
        "role": message.role,
        "content": full_text(message),
        "name": message.name,
        "tool_calls": calls or None,
        "tool_call_id": message.tool_call_id,
        "weight": message.weight,
    }
