"""One part → one token file: every conversation of the part as tokens with their labels.

records ─read_record─▶ Conversation ─spans─▶ texts and control ids ─encode, a batch at a time─▶ token file
              └─ Reject ──────────┴──────────────────────────────────────────▶ the receipt beside it
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pyarrow as pa

from tasks.config import Config
from tasks.conversations import Conversation, content_digest, read_record
from tasks.encoders import Encoder
from tasks.errors import PackError, Reject
from tasks.files import atomic_file, to_json, write_bytes
from tasks.sources import Part, read_part
from tasks.templates import TEXT, Span, Template, full_text, trained_turns
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
    on_batch: Callable[[int, int, int, int], None] = lambda conversations, rejected, tokens, characters: None,
) -> dict[str, Any]:
    """Write the token file, then its receipt (the commit), and return the receipt.

    `on_batch` is told of conversations, rejects, tokens and characters since it was last called.

    Raises PackError where the run must stop: the source changed or is damaged, or labels cannot be located.
    """
    receipt: dict[str, Any] = dict.fromkeys(COUNTS, 0)
    rejects: list[list[Any]] = []
    columns = dict(part.file.columns)
    schema = SCHEMA if config.packing else WHOLE_SCHEMA
    with atomic_file(token_file) as out:
        with pa.ipc.new_file(pa.PythonFile(out, "w"), schema) as writer:
            batch = Batch(encoder, receipt)
            reader = read_part(part, config.max_record_bytes)
            told = (0, 0, 0)

            def flush(batch: Batch) -> None:
                nonlocal told
                if batch.records:
                    writer.write_batch(batch.encode(schema))
                now = (receipt["conversations"], len(rejects), receipt["tokens"])
                conversations, rejected, tokens = (new - old for new, old in zip(now, told, strict=True))
                on_batch(conversations, rejected, tokens, batch.characters)
                told = now

            for record, value in reader:
                receipt["conversations"] += 1
                try:
                    if isinstance(value, Reject):
                        raise value
                    conversation = read_record(value, part.file.format, columns)
                    trained = trained_turns(conversation, config.train_on)
                    if not any(trained):
                        raise Reject("no_trained_tokens", f"no turn of it is trained on (train_on: {config.train_on})")
                    spans = template.spans(conversation, trained)
                    if not any(span.trained for span in spans):
                        raise Reject("no_trained_tokens", "the template writes nothing of its answers")
                    batch.add(record, conversation, spans, whole=not config.packing)
                except Reject as reject:
                    rejects.append([record, reject.code, reject.message])
                except PackError as error:
                    raise type(error)(f"{part.file.name}: record {record + 1} of the part: {error}") from None
                if batch.characters >= BATCH_CHARACTERS:
                    flush(batch)
                    batch = Batch(encoder, receipt)
            flush(batch)
        receipt |= {"records": reader.records, "bytes": out.size, "sha256": out.sha256(), "rejects": rejects}
        receipt["engine"] = encoder.engine
    write_bytes(receipt_file, to_json(receipt))
    return receipt


# Handled, but a user may want to know: conversations with a control string as text, with a character that comes back
# as another, unknown tokens, conversations whose turns stand in an unusual order.
NOTICED = ("control_text_seen", "not_round_trip", "unknown_tokens", "unusual_order")
COUNTS = ("conversations", "accepted", "tokens", *NOTICED)


class Batch:
    """Conversations on their way into one encode call. A segment is one control token or one text."""

    def __init__(self, encoder: Encoder, receipt: dict[str, Any]):
        self.encoder = encoder
        self.receipt = receipt
        self.characters = 0
        self.texts: list[str] = []
        self.segment_tokens: list[int] = []
        self.segment_trained: list[bool] = []
        self.segments: list[int] = [0]
        self.records: list[int] = []
        self.digests: list[int] = []
        self.separators: list[bool] = []
        self.messages: list[str] = []
        self.tools: list[str | None] = []
        self.rendered: list[str] = []

    def add(self, record: int, conversation: Conversation, spans: Sequence[Span], whole: bool = False) -> None:
        first_text = len(self.texts)
        behind = "start"
        pending: list[str] = []
        pending_trained = leading = False
        for span in spans:
            if span.token == TEXT and pending and pending_trained == span.trained:
                pending.append(span.text)
                continue
            if pending:
                self._text(pending, pending_trained, leading)
                pending = []
                behind = "text"
            if span.token == TEXT:
                pending, pending_trained = [span.text], span.trained
                leading = self._has_leading_space(behind, span.start)
            else:
                self.segment_tokens.append(span.token)
                self.segment_trained.append(span.trained)
                behind = "control"
        if pending:
            self._text(pending, pending_trained, leading)
        closing = _closing(spans)
        separator = closing.token != self.encoder.eos_id
        if separator:
            self.segment_tokens.append(self.encoder.eos_id)
            self.segment_trained.append(closing.trained)
        self.segments.append(len(self.segment_tokens))
        self.separators.append(separator)
        self.records.append(record)
        self.digests.append(content_digest(conversation))
        texts = self.texts[first_text:]
        self.characters += sum(map(len, texts))
        if not _usual_order(conversation):
            self.receipt["unusual_order"] += 1
        if self.encoder.underline_is_space and any("▁" in text for text in texts):
            self.receipt["not_round_trip"] += 1
        # What the messages say, and not what the template writes: a marker that it writes as text is no one's attempt.
        if self.encoder.count_controls(_said(conversation)):
            self.receipt["control_text_seen"] += 1
        if whole:
            plain = conversation.messages[0].role == "text"  # it has no turns, only `text`
            turns = None if plain else [_as_row(message) for message in conversation.messages]
            self.messages.append(orjson.dumps(turns).decode())
            self.tools.append(f"[{','.join(conversation.tools)}]" if conversation.tools else None)
            self.rendered.append("".join(span.text for span in spans))

    def _text(self, pending: list[str], trained: bool, leading: bool) -> None:
        text = "".join(pending)
        self.texts.append(self.encoder.with_leading_space(text) if leading else text)
        self.segment_tokens.append(TEXT)
        self.segment_trained.append(trained)

    def _has_leading_space(self, behind: str, start: bool) -> bool:
        rule = self.encoder.leading_space
        if behind == "start":
            return rule != "none"
        return behind == "control" and (rule == "each" or (rule == "template" and start))

    def encode(self, schema: pa.Schema) -> pa.RecordBatch:
        """All of the batch as one record batch of the token file."""
        encoded = self.encoder.encode(self.texts)
        tokens = np.array(self.segment_tokens, np.int32)
        is_text = tokens == TEXT
        lengths = np.ones(len(tokens), np.int64)
        lengths[is_text] = np.diff(encoded.offsets)
        # Texts stand in the order of their segments, so their ids fill what the control tokens leave free.
        of_text = np.repeat(is_text, lengths)
        values = np.empty(len(of_text), np.int32)
        values[of_text] = encoded.ids
        values[~of_text] = tokens[~is_text]
        trained = np.repeat(np.array(self.segment_trained, bool), lengths)
        ends = np.concatenate([[0], np.cumsum(lengths)])
        offsets = ends[np.array(self.segments)]
        trained[offsets[:-1]] = False
        if self.encoder.unk_id is not None:
            self.receipt["unknown_tokens"] += int((encoded.ids == self.encoder.unk_id).sum())
        values[~trained] = ~values[~trained]
        before = np.concatenate([[0], np.cumsum(trained)])
        counts = (before[offsets[1:]] - before[offsets[:-1]]).astype(np.int32)
        self.receipt["accepted"] += len(self.records)
        self.receipt["tokens"] += len(values) - sum(self.separators)
        columns = [
            pa.array(self.records, pa.int64()),
            pa.array(self.digests, pa.uint64()),
            pa.array(counts),
            pa.array(self.separators, pa.bool_()),
            pa.LargeListArray.from_arrays(pa.array(offsets), pa.array(values)),
        ]
        if len(schema) > len(columns):
            columns += [pa.array(column, pa.large_string()) for column in (self.messages, self.tools, self.rendered)]
        return pa.record_batch(columns, schema=schema)


def _closing(spans: Sequence[Span]) -> Span:
    """The last span that is more than white space: what the separator stands behind."""
    return next((span for span in reversed(spans) if span.token != TEXT or span.text.strip()), spans[-1])


def _said(conversation: Conversation) -> list[str]:
    """All strings of a conversation."""
    texts = list(conversation.tools)
    for message in conversation.messages:
        texts += [message.content, message.context, message.name or "", message.tool_call_id or ""]
        texts += [text for call in message.tool_calls for text in (call.name, call.arguments, call.id or "")]
    return texts


def _usual_order(conversation: Conversation) -> bool:
    """System first, if at all; then user and assistant in turn, tools answering the assistant."""
    roles = [message.role for message in conversation.messages if message.role != "text"]
    if roles[:1] == ["system"]:
        roles = roles[1:]
    follows = {"user": ("assistant",), "assistant": ("user", "tool"), "tool": ("tool", "assistant")}
    return roles[:1] in ([], ["user"]) and all(b in follows.get(a, ()) for a, b in pairwise(roles))


def _as_row(message: Any) -> dict[str, Any]:
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
