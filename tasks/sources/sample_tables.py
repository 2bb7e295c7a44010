"""Sample Parquet and Arrow tables."""

from __future__ import annotations

import math
import random
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tasks.conversations.formats import COLUMNS
from tasks.core.errors import DataError
from tasks.readers.tables import first_line, rows_of
from tasks.sources.model import SourceFile
from tasks.sources.sample import ALMOST, PASSED, WINDOW, Record, Sample, draw_of


def _drawn(count: int, most: int, draw: random.Random) -> list[tuple[int, float]]:
    """Up to `most` numbers of range(count), one of each stretch, and how many each stands for."""
    most = min(count, most)
    edges = [count * number // most for number in range(most + 1)]
    return [(top + int(draw.random() * (bottom - top)), float(bottom - top)) for top, bottom in pairwise(edges)]


def parquet_sample(file: SourceFile, budget: int) -> Sample:
    records, weights = list[Record](), list[float]()
    draw = draw_of(file)
    try:
        with pq.ParquetFile(file.path, pre_buffer=False) as table:
            metadata = table.metadata
            groups = [metadata.row_group(group) for group in range(metadata.num_row_groups)]
            rows = [group.num_rows for group in groups]
            row_bytes = sum(group.total_byte_size for group in groups) / max(sum(rows), 1)
            share = min(1.0, budget / max(row_bytes * sum(rows), 1))
            chosen = _drawn(len(rows), len(rows) if share == 1 else max(8, budget // (4 * WINDOW)), draw)
            names = [name for name in table.schema_arrow.names if name in _wanted(file)] or None
            for group, stands_for in chosen:
                batches: list[tuple[int, Any]] = []
                first = number = sum(rows[:group])
                passed = 0
                for batch in table.iter_batches(1000, row_groups=[group], columns=names, use_threads=False):
                    batches.append((number, batch))
                    number += batch.num_rows
                    passed += batch.nbytes
                    if share < 1 and passed > PASSED / len(chosen):
                        break
                own = _slices(file, batches, share * stands_for * rows[group] / max(number - first, 1), draw)
                weight = stands_for * rows[group]
                records += own
                weights += [weight / max(len(own), 1)] * len(own)
    except MemoryError:
        raise
    except (pa.ArrowException, OSError) as error:
        raise DataError("unreadable_source", f"{file.name}: cannot be read as parquet: {first_line(error)}") from None
    return Sample(file, records, np.array(weights), sum(rows), counted=True)


def arrow_sample(file: SourceFile, budget: int) -> Sample:
    """Mapped: of a batch that is not chosen only its header is read."""
    try:
        with pa.memory_map(str(file.path)) as source:
            is_file = source.read(6) == b"ARROW1"
            source.seek(0)
            reader = pa.ipc.open_file(source) if is_file else pa.ipc.open_stream(source)
            names = [name for name in reader.schema.names if name in _wanted(file)] or reader.schema.names
            before = pa.total_allocated_bytes()
            batches: list[tuple[int, Any]] = []
            number = size = 0
            ended = True
            for batch in map(reader.get_batch, range(reader.num_record_batches)) if is_file else reader:
                batches.append((number, batch.select(names)))
                number += batch.num_rows
                size += batches[-1][1].nbytes
                ended = pa.total_allocated_bytes() - before <= PASSED
                if not ended:  # what is packed inside is unpacked, and no map
                    break
            reach = 1.0 if ended else min(ALMOST, source.tell() / file.bytes)
            records = _slices(file, batches, min(1.0, budget / max(size, 1)), draw_of(file))
    except MemoryError:
        raise
    except (pa.ArrowException, OSError) as error:
        raise DataError("unreadable_source", f"{file.name}: cannot be read as arrow: {first_line(error)}") from None
    return Sample(file, records, np.ones(len(records)), number / reach, counted=ended, reach=reach)


def _wanted(file: SourceFile) -> set[str]:
    return {*COLUMNS, *(theirs for _, theirs in file.columns)}


def _slices(file: SourceFile, batches: list[tuple[int, Any]], share: float, draw: random.Random) -> list[Record]:
    """A share of the rows of each batch, from a place that is drawn; all of them where it is 1 or more."""
    found = []
    for number, batch in batches:
        count = min(batch.num_rows, math.ceil(batch.num_rows * share))
        start = int(draw.random() * (batch.num_rows - count + 1))
        for place, value in enumerate(rows_of(batch.slice(start, count)), number + start + 1):
            found.append(Record(f"{file.name}:{place}", value))
    return found
