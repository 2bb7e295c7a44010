"""numpy ⇄ Arrow, for columns of numbers and flags; numbers are not copied.

pyarrow's own `pa.array` and `to_numpy` do the same, but the first call of one of them in a process imports pandas,
where that is installed: 0.2 s, in every worker.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa


def to_arrow(values: np.ndarray, null: np.ndarray | None = None) -> pa.Array:
    """A column of the array's own type, over the array's own memory, with nulls where `null` (bool) says so."""
    valid = None if null is None or not null.any() else _bits(~null)
    data = _bits(values) if values.dtype == np.bool_ else pa.py_buffer(np.ascontiguousarray(values))
    return pa.Array.from_buffers(pa.from_numpy_dtype(values.dtype), len(values), [valid, data])


def _bits(flags: np.ndarray) -> pa.Buffer:
    return pa.py_buffer(np.packbits(flags, bitorder="little"))


def strings(texts: Sequence[str]) -> pa.Array:
    data = [text.encode() for text in texts]
    offsets = np.cumsum([0, *map(len, data)], dtype=np.int32)
    return pa.StringArray.from_buffers(len(texts), pa.py_buffer(offsets), pa.py_buffer(b"".join(data)))


def offsets_of(lengths: Sequence[int] | np.ndarray) -> np.ndarray:
    """int64: where each of things of these lengths, one behind the other, begins, and where the last one ends."""
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def to_numpy(column: pa.Array) -> np.ndarray:
    """An array over the column's own memory (read-only), of flags a copy."""
    assert not column.null_count, f"{column.type}: {column.null_count} of {len(column)} are null"
    data, begin, end = column.buffers()[1], column.offset, column.offset + len(column)
    if data is None or begin == end:
        return np.empty(0, str(column.type))
    if column.type == pa.bool_():
        bits = np.frombuffer(data, np.uint8)[begin // 8 : (end + 7) // 8]
        return np.unpackbits(bits, bitorder="little")[begin % 8 :][: end - begin].astype(bool)
    return np.frombuffer(data, str(column.type))[begin:end]
