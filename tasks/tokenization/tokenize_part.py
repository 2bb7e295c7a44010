"""One part → one token file: every conversation of the part as tokens with their labels.

records ─┬──────── frames, some hundreds at once ─┬─▶ texts and control ids ─encode, a batch at a time─▶ token file
         └─read_record─▶ Conversation ─segments───┘
                 └─ Reject ─┴────────────────────────────────────────────────▶ the receipt beside it
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa

from tasks.config import Config
from tasks.conversations.formats import read_record
from tasks.core.errors import PackError, Reject
from tasks.encoders.encoder import Encoder
from tasks.sources.model import Part, SourceFile
from tasks.sources.parts import place_of, read_part
from tasks.storage.files import atomic_file, to_json, write_bytes
from tasks.storage.schemas import SCHEMA, WHOLE_SCHEMA
from tasks.templates.spans import Template, trained_turns
from tasks.tokenization.frames import Framed, Frames
from tasks.tokenization.segments import segments_of
from tasks.tokenization.token_batch import BATCH_CHARACTERS, COUNTS, Batch


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
    receipt: dict[str, Any] = dict.fromkeys(("conversations", *COUNTS), 0)
    rejects: list[list[Any]] = []
    columns = dict(part.file.columns)
    schema = SCHEMA if config.packing else WHOLE_SCHEMA
    with atomic_file(token_file, "xxh3") as out, _rare_collections():
        with pa.ipc.new_file(pa.PythonFile(out, "w"), schema) as writer:
            batch = Batch(encoder, receipt)
            frames = Frames(template, encoder, config.train_on, part.file.format, bool(columns))
            reader = read_part(part, config.max_record_bytes)

            def flush(batch: Batch) -> None:
                if batch.records:
                    writer.write_batch(batch.encode(schema))
                on_batch(receipt["accepted"] + len(rejects), len(rejects), receipt["tokens"], reader.share)

            for numbers, records in reader.blocks():
                for record, reject in add_records(
                    batch, numbers, records, part.file, template, config, frames, partial(place_of, part)
                ):
                    rejects.append([record, reject.reason, reject.message])
                if batch.characters >= BATCH_CHARACTERS:
                    flush(batch)
                    batch = Batch(encoder, receipt)
            flush(batch)
        receipt["conversations"] = receipt["accepted"] + len(rejects)
        receipt |= {"records": reader.records, "bytes": out.size, "xxh3": out.digest(), "rejects": rejects}
        receipt["engine"] = encoder.engine
    write_bytes(receipt_file, to_json(receipt))
    return receipt


def add_records(
    batch: Batch,
    numbers: Sequence[int],
    records: Sequence[Any],
    file: SourceFile,
    template: Template,
    config: Config,
    frames: Frames,
    place: Callable[[int], str],
) -> Iterator[tuple[int, Reject]]:
    """The conversations of records of `file` into the batch, and why there are none of the others.

    Raises PackError, whose message begins with the place of the record's number.
    """
    framed, taken = frames.of_records(records) if config.packing else (Framed([], [], [], []), [False] * len(records))
    if all(taken):
        batch.add_framed(numbers, framed)
        return
    for start, stop, run in framed.runs(taken):
        if run:
            batch.add_framed(numbers[start:stop], run)
            continue
        for number, record in zip(numbers[start:stop], records[start:stop], strict=True):
            try:
                _add_record(batch, number, record, file, template, config, frames)
            except Reject as reject:
                yield number, reject
            except PackError as error:
                raise type(error)(error.reason, f"{place(number)}: {error}") from None


def _add_record(
    batch: Batch, record: int, value: object, file: SourceFile, template: Template, config: Config, frames: Frames
) -> None:
    """Raises Reject and PackError."""
    if isinstance(value, Reject):
        raise value
    conversation = read_record(value, file.format, dict(file.columns))
    trained = trained_turns(conversation, config.train_on)
    if not any(trained):
        raise Reject("no_trained_tokens", f"no turn of it is trained on (train_on: {config.train_on})")
    if config.packing and (framed := frames.of_conversation(conversation, trained)):
        batch.add_framed([record], framed)
        return
    spans = template.spans(conversation, trained)
    segments = segments_of(spans, batch.encoder)
    if True not in segments.trained:
        raise Reject("no_trained_tokens", "the template writes nothing of its answers")
    batch.add(record, conversation, segments, None if config.packing else "".join(span.text for span in spans))


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
