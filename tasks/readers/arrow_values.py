"""Convert an Arrow array to Python values, column by column.

struct     a dict without the fields that are null: a table gives every struct the keys of all rows
map        a dict with all its keys
JSON       the value of the text, parsed strictly
float32    the float with the shortest text that means it: 0.1, not 0.10000000149011612
date, time, decimal    a `Written`, which has the text of the value
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import pyarrow as pa

from tasks.core.errors import Reject
from tasks.core.printable import shown
from tasks.readers.strict_json import parse_record


@dataclass(frozen=True, slots=True)
class Written:
    """A value that JSON has no type for, and its text."""

    text: str


class Date(Written): ...


class Time(Written): ...


class Decimal(Written): ...


def text_of_written(value: object) -> str:
    """Return the text of a `Written`, for an encoder of JSON.

    Raises TypeError for any other value.
    """
    if isinstance(value, Written):
        return value.text
    raise TypeError(f"Type is not JSON serializable: {type(value).__name__}")


_LISTS = (pa.types.is_list, pa.types.is_large_list)
_OTHER_LISTS = (pa.types.is_fixed_size_list, pa.types.is_list_view, pa.types.is_large_list_view)

_WRITTEN = {
    Date: pa.types.is_date,
    Time: lambda kind: pa.types.is_timestamp(kind) or pa.types.is_time(kind),
    Decimal: pa.types.is_decimal,
}


class Converter:
    """Convert arrays, and count the null fields of structs that are left out."""

    def __init__(self) -> None:
        self.left_out = 0

    def values(self, array: Any) -> list[Any]:
        """Return the values of an array.

        Raises ValueError for two fields or keys of one name, and Reject for text that is not JSON.
        """
        if is_usual(array):
            values: list[Any] = array.to_pylist()
            return values
        kind = array.type
        if pa.types.is_dictionary(kind):
            array, kind = array.dictionary_decode(), kind.value_type
        if isinstance(kind, pa.JsonType):
            return list(map(_parsed, self.values(array.storage)))
        if pa.types.is_struct(kind):
            return self._objects(array)
        if pa.types.is_map(kind):
            return self._maps(array)
        if any(is_list(kind) for is_list in _LISTS):
            return _sliced(self.values(_inner(array)), array.offsets.to_pylist(), _valid(array))
        if any(is_list(kind) for is_list in _OTHER_LISTS):
            rest = iter(self.values(array.flatten()))
            lengths = array.value_lengths().to_pylist()
            return [None if length is None else list(islice(rest, length)) for length in lengths]
        if pa.types.is_float32(kind) or pa.types.is_float16(kind):
            return _shortest(array)
        for written, is_written in _WRITTEN.items():
            if is_written(kind):
                return [None if text is None else written(text) for text in array.cast(pa.string()).to_pylist()]
        values = array.to_pylist()
        return values

    def _objects(self, array: Any) -> list[Any]:
        names = [field.name for field in array.type]
        if len({*names}) < len(names):  # pyarrow's message does not name it
            twice = next(name for name in names if names.count(name) > 1)
            raise ValueError(f"two fields of a struct are named {shown(twice)}")
        children = array.flatten()  # a field of a null struct is null
        absent = sum(child.null_count - array.null_count for child in children)
        self.left_out += absent
        rows = zip(*map(self.values, children), strict=True) if names else iter([()] * len(array))
        if absent or array.null_count:
            found: list[Any] = [
                {name: value for name, value in zip(names, row, strict=True) if value is not None} for row in rows
            ]
        else:
            found = [dict(zip(names, row, strict=True)) for row in rows]
        if array.null_count:
            found = [value if valid else None for value, valid in zip(found, _valid(array), strict=True)]
        return found

    def _maps(self, array: Any) -> list[Any]:
        offsets = array.offsets.to_pylist()
        first, count = offsets[0], offsets[-1] - offsets[0]
        keys, items = (self.values(column.slice(first, count)) for column in (array.keys, array.items))
        found = _sliced(list(zip(keys, items, strict=True)), offsets, _valid(array))
        return [None if pairs is None else _object(pairs) for pairs in found]


def is_usual(array: Any) -> bool:
    """Return whether pyarrow converts an array in the same way, which is faster."""
    kind = array.type
    if pa.types.is_struct(kind):
        children = array.flatten()
        is_full = all(child.null_count == array.null_count for child in children)
        return is_full and len({field.name for field in kind}) == len(children) and all(map(is_usual, children))
    if any(is_list(kind) for is_list in _LISTS):
        return is_usual(_inner(array))
    return not (
        pa.types.is_nested(kind)
        or pa.types.is_dictionary(kind)
        or pa.types.is_float32(kind)
        or pa.types.is_float16(kind)
        or isinstance(kind, pa.JsonType)
        or any(is_written(kind) for is_written in _WRITTEN.values())
    )


def _inner(array: Any) -> Any:
    """Return the values of all lists of an array, one after another."""
    first, last = array.offsets[0].as_py(), array.offsets[-1].as_py()
    return array.values.slice(first, last - first)


def _object(pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"a map has the key {shown(next(key for key in keys if keys.count(key) > 1))} twice")
    return found


def _sliced(inner: list[Any], offsets: list[int], valid: Iterator[bool]) -> list[Any]:
    """Cut values into lists; an invalid list is None."""
    first = offsets[0]
    bounds = zip(offsets, offsets[1:], valid, strict=False)
    return [inner[start - first : stop - first] if is_valid else None for start, stop, is_valid in bounds]


def _valid(array: Any) -> Iterator[bool]:
    """Return which elements of an array are not null."""
    # Arrow computes the flags with a module that takes 30 ms to import.
    return iter(array.is_valid().to_pylist()) if array.null_count else iter([True] * len(array))


def _shortest(array: Any) -> list[float | None]:
    """Return short floats as the floats of 64 bits with the same shortest text."""
    numbers = array.to_numpy(zero_copy_only=False)
    return [float(str(x)) if ok else None for x, ok in zip(numbers, _valid(array), strict=True)]


def _parsed(text: str | None) -> Any:
    if text is None:
        return None
    found = parse_record(text.encode(), False)
    if isinstance(found, Reject):
        raise Reject(found.reason, f"a value of the type JSON: {found.message}")
    return found
