"""Tokenize one part of a source file.

reader ──▶ record ──Preparer──▶ texts and control tokens ──Batch.encode──▶ token file
                      └─ Reject ─────────────────────────────────────────▶ receipt

The token file has the tokens and labels of every conversation.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

import pyarrow as pa

from tasks.config import Config
from tasks.core.errors import Reject
from tasks.encoders.encoder import Encoder
from tasks.sources.model import Part
from tasks.sources.parts import PartReader, place_of
from tasks.storage.files import atomic_file, write_receipt
from tasks.storage.schemas import tokens_schema
from tasks.templates.spans import Template
from tasks.tokenization.prepare import Preparer, unused_keys_of
from tasks.tokenization.token_batch import COUNTS, Batch


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

    `on_batch` receives the numbers of conversations, rejects, and tokens so far, and the share of the part that has
    been read. Raises PackError if the run must stop: the source changed or is damaged, or labels cannot be located.
    """
    engines = template.engines
    starts_fast = engines is not None and engines.are_fast
    receipt: dict[str, Any] = dict.fromkeys(("conversations", *COUNTS), 0)
    weighted = config.reads_loss_weights
    schema = tokens_schema(config.packing, weighted)
    preparer = Preparer(part.file, template, encoder, config.train_on, config.packing, weighted)
    unused = unused_keys_of(part.file, weighted)
    reader = PartReader(part, config.max_record_bytes, preparer.decode)
    with atomic_file(token_file, "xxh3") as out, _rare_collections():
        with pa.ipc.new_file(pa.PythonFile(out, "w"), schema) as writer:

            def blocks() -> Iterator[tuple[Sequence[int], Iterable[Any]]]:
                for numbers, records in reader.blocks():
                    unused.add(numbers, records, partial(place_of, part))
                    yield numbers, records

            def report(rejected: int) -> None:
                on_batch(receipt["accepted"] + rejected, rejected, receipt["tokens"], reader.share)

            where = partial(place_of, part)
            rejects = tokenize_records(blocks(), preparer, encoder, schema, writer.write_batch, receipt, where, report)
        for name, count in reader.unread.items():
            unused.add_column(name, count)
        receipt["conversations"] = receipt["accepted"] + len(rejects)
        receipt |= {
            "records": reader.records,
            "bytes": out.size,
            "xxh3": out.digest(),
            "rejects": [*map(list, rejects)],
        }
        receipt["engine"] = encoder.engine
        if starts_fast:
            receipt["rendering"] = "minijinja"
        if engines and engines.differs:
            receipt["rendering_differs"] = engines.differs
        if reader.null_fields:
            receipt["null_fields"] = reader.null_fields
        receipt |= preparer.left_out
        if counts := unused.found():
            receipt["unused_keys"] = counts
    write_receipt(receipt_file, receipt)
    return receipt


def tokenize_records(
    blocks: Iterable[tuple[Sequence[int], Iterable[Any]]],
    preparer: Preparer,
    encoder: Encoder,
    schema: pa.Schema,
    write: Callable[[pa.RecordBatch], None],
    receipt: dict[str, Any],
    place: Callable[[int], str],
    on_batch: Callable[[int], None] = lambda rejected: None,
) -> list[tuple[int, str, str]]:
    """Tokenize records, and return the number, reason, and message of each reject.

    `blocks` are the numbers and the values of records. The counts of `receipt` are increased, and `on_batch` is called
    with the number of rejects after each batch. Raises PackError, which names the place of the record.
    """
    rejects: list[tuple[int, str, str]] = []

    def flush(batch: Batch) -> None:
        if batch.records and (encoded := batch.encode(schema)):
            write(encoded)
        rejects.extend((number, reject.reason, reject.message) for number, reject in batch.rejects)
        on_batch(len(rejects))

    batch = Batch(encoder, receipt, place)
    for numbers, records in blocks:
        for number, found in zip(numbers, preparer.prepare_all(records), strict=False):
            if isinstance(found, list):  # first, because it is nearly always true
                batch.add(number, found)
            elif isinstance(found, Reject):
                rejects.append((number, found.reason, found.message))
            else:
                raise type(found)(found.reason, f"{place(number)}: {found}")
            if batch.is_full:
                flush(batch)
                batch = Batch(encoder, receipt, place)
    flush(batch)
    return sorted(rejects, key=itemgetter(0))  # some rejects were found when their batch was encoded


@contextmanager
def _rare_collections() -> Iterator[None]:
    """Collect garbage less often.

    Python searches for cycles after every 700 new objects. A part creates a million objects without a cycle, and the
    search took a fifth of the time.
    """
    before = gc.get_threshold()
    gc.set_threshold(100_000)
    try:
        yield
    finally:
        gc.set_threshold(*before)
