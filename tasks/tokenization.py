"""One part → one token file: every conversation of the part as tokens with their labels.

records ─read_record─▶ Conversation ─segments─▶ texts and control ids ─encode, a batch at a time─▶ token file
              └─ Reject ──────────┴─────────────────────────────────────────────▶ the receipt beside it

What is a step a conversation is Python and takes about 9 µs of it; ids, labels and offsets are made a batch at a time.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pyarrow as pa

from tasks.config import Config
from tasks.conversations import Conversation, content_digest, read_record, said_json
from tasks.encoders import Encoder
from tasks.errors import PackError, Reject
from tasks.files import atomic_file, to_json, write_bytes
from tasks.needles import Needles
from tasks.segments import Segmenter, Segments, segments_of
from tasks.sources import Part, read_part
from tasks.templates import TEXT, Template, full_text, trained_turns
from tasks.token_files import SCHEMA, WHOLE_SCHEMA

# Characters gathered for one encode call: large enough to spread its overhead, small enough to stay in the cache.
BATCH_CHARACTERS = 1 << 21


def tokenize_part(
    part: Part,
    encoder: Encoder,
    template: Template,
    config: Config,
    token_file: Path,
    receipt_file: Path,
    on_batch: Callable[[int, int, int, float], None] = lambda conversations, rejected, tokens, share: None,
) -> dict[str, Any]:
    """Write the token file, then its receipt (the commit), and return the receipt.

    `on_batch` is told of conversations, rejects and tokens so far, and of the share of the part that is read.

    Raises PackError where the run must stop: the source changed or is damaged, or labels cannot be located.
    """
    receipt: dict[str, Any] = dict.fromkeys(COUNTS, 0)
    rejects: list[list[Any]] = []
    columns = dict(part.file.columns)
    schema = SCHEMA if config.packing else WHOLE_SCHEMA
    with atomic_file(token_file) as out, _rare_collections():
        with pa.ipc.new_file(pa.PythonFile(out, "w"), schema) as writer:
            batch = Batch(encoder, receipt)
            segmenter = Segmenter(template, encoder)
            reader = read_part(part, config.max_record_bytes)

            def flush(batch: Batch) -> None:
                if batch.records:
                    writer.write_batch(batch.encode(schema))
                on_batch(receipt["conversations"], len(rejects), receipt["tokens"], reader.share)

            for record, value in reader:
                receipt["conversations"] += 1
                try:
                    if isinstance(value, Reject):
                        raise value
                    conversation = read_record(value, part.file.format, columns)
                    trained = trained_turns(conversation, config.train_on)
                    if not any(trained):
                        raise Reject("no_trained_tokens", f"no turn of it is trained on (train_on: {config.train_on})")
                    if config.packing:
                        segments = segmenter.segments(conversation, trained)
                    else:
                        spans = template.spans(conversation, trained)
                        segments = segments_of(spans, encoder)
                    if True not in segments.trained:
                        raise Reject("no_trained_tokens", "the template writes nothing of its answers")
                    batch.add(record, conversation, segments)
                    if not config.packing:
                        batch.rendered.append("".join(span.text for span in spans))
                except Reject as reject:
                    rejects.append([record, reject.reason, reject.message])
                except PackError as error:
                    raise type(error)(
                        error.reason, f"{part.file.name}: record {record + 1} of the part: {error}"
                    ) from None
                if batch.characters >= BATCH_CHARACTERS:
                    flush(batch)
                    batch = Batch(encoder, receipt)
            flush(batch)
        receipt |= {"records": reader.records, "bytes": out.size, "sha256": out.sha256(), "rejects": rejects}
        receipt["engine"] = encoder.engine
    write_bytes(receipt_file, to_json(receipt))
    return receipt


@contextmanager
def _rare_collections() -> Iterator[None]:
    """Python looks for cycles of garbage after every 700 new objects. Here are a million objects and no cycle, and
    looking took a fifth of the time."""
    before = gc.get_threshold()
    gc.set_threshold(100_000)
    try:
        yield
    finally:
        gc.set_threshold(*before)


# Handled, but a user may want to know: conversations with a control string as text, with a character that comes back
# as another, unknown tokens, conversations whose turns stand in an unusual order.
NOTICED = ("control_text_seen", "not_round_trip", "unknown_tokens", "unusual_order")
COUNTS = ("conversations", "accepted", "tokens", *NOTICED)


class Batch:
    """Conversations on their way into one encode call."""

    def __init__(self, encoder: Encoder, receipt: dict[str, Any]):
        self.encoder = encoder
        self.receipt = receipt
        self.characters = 0
        self.records: list[int] = []
        self.conversations: list[Conversation] = []
        self.segments: list[Segments] = []
        self.rendered: list[str] = []

    def add(self, record: int, conversation: Conversation, segments: Segments) -> None:
        self.records.append(record)
        self.conversations.append(conversation)
        self.segments.append(segments)
        self.characters += sum(map(len, segments.texts))

    def encode(self, schema: pa.Schema) -> pa.RecordBatch:
        """All of the batch as one record batch of the token file."""
        said = list(map(said_json, self.conversations))
        tokens_of, trained_of, texts_of, separator = zip(*self.segments, strict=True)
        texts = list(chain.from_iterable(texts_of))
        self._notice(said, texts_of, texts)
        encoded = self.encoder.encode(texts)
        tokens = np.array(list(chain.from_iterable(tokens_of)), np.int32)
        trained = np.array(list(chain.from_iterable(trained_of)), bool)
        lengths = np.ones(len(tokens), np.int64)
        lengths[tokens == TEXT] = np.diff(encoded.offsets)
        ends = np.concatenate([[0], np.cumsum(lengths)])
        # Texts stand in the order of their segments, so their ids fill what the control tokens leave free.
        of_text = np.ones(ends[-1], bool)
        controls = np.flatnonzero(tokens != TEXT)
        of_text[ends[controls]] = False
        values = np.empty(ends[-1], np.int32)
        values[of_text] = encoded.ids
        values[ends[controls]] = tokens[controls]
        # ~id is id ^ -1.
        flips = np.repeat(trained.astype(np.int32) - 1, lengths)
        segments = np.cumsum([0, *map(len, tokens_of)])
        offsets = ends[segments]
        before = np.concatenate([[0], np.cumsum(lengths * trained)])
        counts = np.diff(before[segments]) - (flips[offsets[:-1]] == 0)
        flips[offsets[:-1]] = -1
        values ^= flips
        if self.encoder.unk_id is not None:
            self.receipt["unknown_tokens"] += int(np.count_nonzero(encoded.ids == self.encoder.unk_id))
        self.receipt["accepted"] += len(self.records)
        self.receipt["tokens"] += len(values) - sum(separator)
        columns = [
            pa.array(self.records, pa.int64()),
            pa.array(map(content_digest, said), pa.uint64()),
            pa.array(counts.astype(np.int32)),
            pa.array(separator, pa.bool_()),
            pa.LargeListArray.from_arrays(pa.array(offsets), pa.array(values)),
        ]
        if len(schema) > len(columns):
            whole = (map(_turns_json, self.conversations), map(_tools_json, self.conversations), self.rendered)
            columns += [pa.array(column, pa.large_string()) for column in whole]
        return pa.record_batch(columns, schema=schema)

    def _notice(self, said: list[bytes], texts_of: Sequence[list[str]], texts: list[str]) -> None:
        """Count what a user may want to know. What is rare is looked for in the whole batch first."""
        orders = (_usual_order(tuple([message.role for message in found.messages])) for found in self.conversations)
        self.receipt["unusual_order"] += sum(not usual for usual in orders)
        if self.encoder.underline_is_space and "▁" in "".join(texts):
            self.receipt["not_round_trip"] += sum("▁" in "".join(of_one) for of_one in texts_of)
        # What the messages say, and not what the template writes: a marker that it writes as text is no one's attempt.
        controls = _controls_in_json(self.encoder)
        if controls.occur(b"\n".join(said)):
            self.receipt["control_text_seen"] += sum(
                controls.occur(json) and self.encoder.count_controls(strings_of(conversation)) > 0
                for json, conversation in zip(said, self.conversations, strict=True)
            )


@lru_cache(maxsize=4)
def _controls_in_json(encoder: Encoder) -> Needles:
    """Finds the control strings in what is written as JSON, which a quote or a backslash among them changes too."""
    return Needles(orjson.dumps(string)[1:-1] for string in encoder.controls)


def strings_of(conversation: Conversation) -> list[str]:
    """All strings of a conversation."""
    texts = list(conversation.tools)
    for message in conversation.messages:
        texts += [message.content, message.context, message.name or "", message.tool_call_id or ""]
        texts += [text for call in message.tool_calls for text in (call.name, call.arguments, call.id or "")]
    return texts


@lru_cache(maxsize=1024)
def _usual_order(roles: tuple[str, ...]) -> bool:
    """System first, if at all; then user and assistant in turn, tools answering the assistant."""
    turns = [role for role in roles if role != "text"]
    if turns[:1] == ["system"]:
        turns = turns[1:]
    follows = {"user": ("assistant",), "assistant": ("user", "tool"), "tool": ("tool", "assistant")}
    return turns[:1] in ([], ["user"]) and all(b in follows.get(a, ()) for a, b in pairwise(turns))


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
