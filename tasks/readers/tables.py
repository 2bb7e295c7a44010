"""Read rows and metadata of Parquet and Arrow tables."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tasks.core.errors import DataError, Reject


def rows_of(batch: Any) -> list[object]:
    """The rows of an Arrow batch; one that Python cannot hold is a Reject.

    Times become text: as values they would depend on whether pandas is installed (Python has no nanoseconds).
    """
    for index, field in enumerate(batch.schema):
        if pa.types.is_timestamp(field.type) or pa.types.is_time(field.type):
            batch = batch.set_column(index, field.name, batch.column(index).cast(pa.string()))
    try:
        rows: list[object] = batch.to_pylist()
        return rows
    except UnicodeDecodeError as error:
        reject = Reject("bad_utf8", f"a string is not UTF-8 at byte {error.start}")
    except (ValueError, OverflowError) as error:
        reject = Reject("bad_value", first_line(error))
    if batch.num_rows == 1:
        return [reject]
    return [row for index in range(batch.num_rows) for row in rows_of(batch.slice(index, 1))]


def first_line(error: BaseException) -> str:
    """What a library says, without the lines of advice that follow."""
    return (str(error).splitlines() or [type(error).__name__])[0]


def parquet_metadata(path: Path, name: str) -> pq.FileMetaData:
    try:
        metadata = pq.read_metadata(path)
    except (pa.ArrowException, OSError) as error:
        raise DataError("unreadable_source", f"{name}: cannot be read as parquet: {first_line(error)}") from None
    if not metadata.num_rows:
        raise DataError("empty_source", f"{name}: holds no records")
    return metadata
