"""Write the same records as one file of any kind, and make its recipe.

one_file(folder, ".jsonl.gz", records) ─▶ a recipe with parts of 1 KiB of the text
"""

from __future__ import annotations

import gzip
import io
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import zstandard
from support.containers import as_lines
from support.small_corpus import write_project

from packcorpus.tasks.recipe import Recipe, resolve

COMPRESS: dict[str, Callable[[bytes], bytes]] = {".gz": partial(gzip.compress, mtime=0), ".zst": zstandard.compress}


def write_parquet(table: pa.Table, out: io.BytesIO, rows: int) -> None:
    pq.write_table(table, out, row_group_size=rows, compression="zstd")


def write_arrow(new: Callable[..., Any], compression: str | None) -> Callable[[pa.Table, io.BytesIO, int], None]:
    def write(table: pa.Table, out: io.BytesIO, rows: int) -> None:
        with new(out, table.schema, options=pa.ipc.IpcWriteOptions(compression=compression)) as writer:
            writer.write_table(table, rows)

    return write


def written_as(kind: str, records: list[dict[str, Any]]) -> bytes:
    text = json.dumps(records).encode() if ".json." in f"{kind}." else as_lines(records)
    if kind in (".parquet", ".arrow"):
        write = write_parquet if kind == ".parquet" else write_arrow(pa.ipc.new_stream, "lz4")
        write(pa.Table.from_pylist(records), out := io.BytesIO(), len(records))
        return out.getvalue()
    return COMPRESS.get(Path(kind).suffix, bytes)(text)


def one_file(folder: Path, kind: str, records: list[dict[str, Any]]) -> Recipe:
    config = write_project(folder, records, part_size=1024)
    (folder / f"data{kind}").write_bytes(written_as(kind, records))
    config.write_text(config.read_text().replace("chat.jsonl", f"data{kind}"))
    return resolve(config, folder)
