"""Write records as a file of each container."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Sequence
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.parquet as pq


def as_lines(records: Sequence[object]) -> bytes:
    return b"".join(orjson.dumps(record) + b"\n" for record in records)


def as_csv(records: Sequence[dict[str, Any]], delimiter: str = ",") -> bytes:
    out = io.StringIO()
    writer = csv.DictWriter(out, list(records[0]), delimiter=delimiter, lineterminator="\n")
    writer.writeheader()
    writer.writerows(records)
    return out.getvalue().encode()


def as_parquet(records: Sequence[dict[str, Any]], rows: int = 1000) -> bytes:
    out = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(list(records)), out, row_group_size=rows)
    return out.getvalue()


def as_arrow(records: Sequence[dict[str, Any]], new: Callable[..., Any] = pa.ipc.new_stream, rows: int = 1000) -> bytes:
    out = io.BytesIO()
    table = pa.Table.from_pylist(list(records))
    with new(out, table.schema) as writer:
        writer.write_table(table, max_chunksize=rows)
    return out.getvalue()


# A new container needs an item here: the tests in tests/readers/test_containers.py run for each.
WRITERS: dict[str, Callable[[Sequence[dict[str, Any]]], bytes]] = {
    "jsonl": as_lines,
    "json": orjson.dumps,
    "parquet": lambda records: as_parquet(records, rows=30),
    "arrow": as_arrow,
    "csv": as_csv,
    "tsv": lambda records: as_csv(records, "\t"),
}
