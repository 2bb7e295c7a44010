"""Convert columns of numbers and flags between numpy and Arrow.

Numbers are not copied. pyarrow's own `pa.array` and `to_numpy` do the same, but their first call in a process imports
pandas if it is installed, which takes 0.2 s in every worker.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import xxhash


def to_arrow(values: np.ndarray, null: np.ndarray | None = None) -> pa.Array:
    """Return an Arrow column over the memory of an array; flags are copied.

    The column has the type of the array. It is null where `null` (bool) is true.
    """
    valid = None if null is None or not null.any() else pa.py_buffer(np.packbits(~null, bitorder="little"))
    stored = np.packbits(values, bitorder="little") if values.dtype == np.bool_ else np.ascontiguousarray(values)
    return pa.Array.from_buffers(pa.from_numpy_dtype(values.dtype), len(values), [valid, pa.py_buffer(stored)])


def strings(texts: Sequence[str]) -> pa.Array:
    data = [text.encode() for text in texts]
    offsets = np.cumsum([0, *map(len, data)], dtype=np.int32)
    return pa.StringArray.from_buffers(len(texts), pa.py_buffer(offsets), pa.py_buffer(b"".join(data)))


def offsets_of(lengths: Sequence[int] | np.ndarray) -> np.ndarray:
    """Return the running sum of lengths, from 0: int64[len(lengths) + 1]."""
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def to_numpy(column: pa.Array) -> np.ndarray:
    """Return a read-only array over the memory of a column; flags are copied."""
    assert not column.null_count, f"{column.type}: {column.null_count} of {len(column)} are null"
    data, start, end = column.buffers()[1], column.offset, column.offset + len(column)
    if data is None or start == end:
        return np.empty(0, str(column.type))
    if column.type == pa.bool_():
        bits = np.frombuffer(data, np.uint8)[start // 8 : (end + 7) // 8]
        return np.unpackbits(bits, bitorder="little")[start % 8 :][: end - start].astype(bool)
    return np.frombuffer(data, str(column.type))[start:end]


def xxh3_of(batch: pa.RecordBatch) -> str:
    """Return the XXH3 hash of the numbers and flags of a record batch without nulls."""
    digest = xxhash.xxh3_128()
    for column in batch.columns:
        digest.update(np.ascontiguousarray(to_numpy(column)).data)
    return str(digest.hexdigest())
