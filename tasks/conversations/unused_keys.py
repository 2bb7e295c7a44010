"""Count the unused keys of records by their path.

    {"id": 7, "messages": [{"role": "user", "content": "2+2?", "id": 1}, …]}  → {"id": 1, "messages[].id": 2}

A value that is null, or an empty string, list, or object, counts as absent. The counts of a source's parts add up to
the counts of the source, because they do not depend on where a part starts.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import chain, repeat
from operator import attrgetter, itemgetter
from typing import Any

from tasks.conversations.chat import TURN_NAMES
from tasks.conversations.formats import FORMAT_OF
from tasks.conversations.lists import MESSAGE_LISTS, may_need_lists, with_lists
from tasks.conversations.model import PlainRecord, Record
from tasks.conversations.names import MESSAGE_KEYS, rename
from tasks.conversations.other_data import MEDIA_KEYS, OTHER_KEYS, is_other_data, other_data, part_of_other_data
from tasks.conversations.parts import PartKeys
from tasks.conversations.reasoning import REASONING_KEYS
from tasks.core.printable import printable

# Maximum number of paths that are counted for a source; if keys are data, there may be any number of paths.
MOST_PATHS = 50
OTHERS = "(others)"

MOST_SHAPES = 16  # maximum number of different sets of keys in a block that is counted at once

LONGEST_KEY = 60  # maximum number of characters that are shown


class PathCounts:
    """Counts of the first `MOST_PATHS` paths, and of all other paths together.

    Paths are ordered by length, and then alphabetically. The result does not depend on the order of `add`: a path that
    is among the first paths of all records is also among the first paths of any subset of records.
    """

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}
        self._others = 0
        self._last = ""  # the last of the counted paths, which an earlier path replaces; "" if unknown

    def add(self, path: str, count: int) -> None:
        counts = self._counts
        if path in counts:
            counts[path] += count
        elif path == OTHERS:
            self._others += count
        elif len(counts) < MOST_PATHS:
            counts[path] = count
            self._last = ""
        else:
            self._last = self._last or max(counts, key=_order)
            if _order(path) < _order(self._last):
                self._others += counts.pop(self._last)
                counts[path] = count
                self._last = ""
            else:
                self._others += count

    def found(self) -> dict[str, int]:
        """Return the counts, highest first, with the count of all other paths last."""
        known = dict(sorted(self._counts.items(), key=lambda item: (-item[1], _order(item[0]))))
        return known | ({OTHERS: self._others} if self._others else {})


def _order(path: str) -> tuple[int, str]:
    return len(path), path


def sum_counts(parts: Collection[Mapping[str, int]]) -> dict[str, int]:
    """Add up the counts of several parts of a source."""
    total = PathCounts()
    for part in parts:
        for path, count in part.items():
            total.add(path, count)
    return total.found()


class UnusedKeys:
    """Count the unused keys in the records of one source file.

    `columns` and `ignore` are the settings in the config. Raises DataError for a record of other data.
    """

    def __init__(self, format: str, columns: Mapping[str, str], ignore: Collection[str], further: Collection[str] = ()):
        """Set up the counts of a file.

        `further` are packcorpus names that are read in addition to the keys of the format.
        """
        self._format, self._columns, self._ignore = FORMAT_OF[format], columns, frozenset(ignore)
        self._further = frozenset(further)
        self._of_messages = frozenset(columns.get(name, name) for name in self._further.intersection(MESSAGE_KEYS))
        self._keys = frozenset(self._format.keys) | self._further
        self._lists = [columns.get(key, key) for key in MESSAGE_LISTS if key in self._format.keys]
        self._counts = PathCounts()
        self._shapes: dict[tuple[str, ...], tuple[str, ...] | None] = {}

    def add(self, numbers: Sequence[int], records: Sequence[object], place: Callable[[int], str]) -> None:
        """Count the keys of a block of records.

        `place` returns the file and line of a record number.
        """
        kinds = set(map(type, records))
        for kind in kinds:
            own: Any = records if len(kinds) == 1 else [record for record in records if type(record) is kind]
            if issubclass(kind, PlainRecord):
                self._add_plain(kind, own)
            elif kind is dict:
                if may_need_lists(own, self._lists):
                    records = [self._with_lists(record) for record in records]
                    own = [record for record in records if type(record) is dict]
                if not self._add_alike(own):
                    for number, record in zip(numbers, records, strict=True):
                        if type(record) is dict:
                            self._add_record(record, number, place)

    def add_column(self, name: str, count: int) -> None:
        """Count the values of a table's column that is not read."""
        self._counts.add(_safe(name), count)

    def found(self) -> dict[str, int]:
        """Return how often each key occurred."""
        return self._counts.found()

    def _with_lists(self, record: object) -> object:
        return with_lists(record, self._lists, TURN_NAMES) if type(record) is dict else record

    def _add_plain(self, kind: Any, records: Sequence[Any]) -> None:
        """Count the unused keys of plain records, in C.

        In a plain record, only keys that its format does not have are unused.
        """
        for field, name in zip(kind.__struct_fields__, kind.__struct_encode_fields__, strict=True):
            if name not in self._keys:
                values = list(map(attrgetter(field), records))
                if count := len(values) - values.count(None) - values.count(""):
                    self._counts.add(name, count)

    def _add_alike(self, records: Sequence[Record]) -> bool:
        """Count the keys of records that have few different sets of keys, in C.

        Returns False, without counting anything, if this is impossible.
        """
        shapes = list(map(tuple, records))
        distinct = set(shapes)
        unused = [self._unused_of(shape) for shape in distinct]
        if len(distinct) > MOST_SHAPES or None in unused or not self._are_plain(records):
            return False
        found = []
        for shape, keys in zip(distinct, unused, strict=True):
            for key in keys or ():
                own = records if len(distinct) == 1 else [r for r, s in zip(records, shapes, strict=True) if s == shape]
                values = list(map(itemgetter(key), own))
                count = _present(values)
                if count and key in OTHER_KEYS and any(self._is_other(key, value) for value in values):
                    return False  # the error has to name the first such record
                found.append((key, count))
        for key, count in found:
            if count:
                self._counts.add(_safe(key), count)
        return True

    def _unused_of(self, shape: tuple[str, ...]) -> tuple[str, ...] | None:
        """Return the unused keys of records with these keys.

        Returns None if they depend on the values.
        """
        if shape not in self._shapes:
            named: Record = dict.fromkeys(shape, "x")
            used = {*self._format.used(named), *self._further} if self._format.used else self._keys
            unused = tuple(key for key in shape if key not in used)
            depends = self._columns or not self._keys.isdisjoint(unused) or not used.isdisjoint(REASONING_KEYS)
            if len(self._shapes) > MOST_SHAPES:
                self._shapes.clear()
            self._shapes[shape] = None if depends else unused
        return self._shapes[shape]

    def _are_plain(self, records: Sequence[Record]) -> bool:
        """Return whether no record holds an object that has to be examined."""
        objects = self._format.objects
        if self._format.left_out:
            return False
        if not objects:
            return True
        return next(chain.from_iterable(map(objects, records, repeat(self._columns))), None) is None

    def _is_other(self, key: str, value: object) -> bool:
        """Return whether a value means other data that the config does not ignore."""
        if key not in OTHER_KEYS or key in self._ignore or is_absent(value):
            return False
        return is_other_data(key, value, self._format.name)

    def _is_message(self, path: str) -> bool:
        """Return whether the object at a path of a record is a message.

        In the format oasst, all objects are nodes of a tree of messages.
        """
        return self._format.name == "oasst" or (path.endswith("[]") and path.count("[]") == 1 and path != "tools[]")

    def _add_record(self, record: Record, number: int, place: Callable[[int], str]) -> None:
        if self._format.left_out:
            for path, count in self._format.left_out(rename(record, self._columns)).items():
                self._counts.add(_safe_path(path), count)
        other: list[str] = []
        parts: list[str] = []
        for path, key, value in self.unused(record):
            if path:
                part = part_of_other_data(value) if key == "" and isinstance(value, dict) else ""
                if part and part not in self._ignore:
                    parts.append(part)
                # Some data sets keep the media of a message next to its content.
                if key in MEDIA_KEYS and self._is_message(path) and self._is_other(key, value):
                    other.append(key)
                self._counts.add(f"{path}.{part or _safe(key)}", 1)
            else:
                if self._is_other(key, value):
                    other.append(key)
                self._counts.add(_safe(key), 1)
        if other or parts:
            raise other_data(sorted(set(other)), place(number), sorted(set(parts)))

    def unused(self, record: Record) -> Iterator[tuple[str, str, object]]:
        """Yield (path of the object, key, value) for each unused key of a record.

        A content part that is an image, audio, or video is unused as a whole; its key is then "".
        """
        format, columns = self._format, self._columns
        named = rename(record, columns) if columns else record
        used = {*format.used(named), *self._further} if format.used else self._keys
        if columns:
            used = {columns.get(key, key) for key in used if key in named}
        for key in record.keys() - used:
            if not is_absent(record[key]):
                yield "", key, record[key]
        if format.objects:
            for path, item, known in format.objects(named, columns):
                if isinstance(known, PartKeys) and part_of_other_data(item):
                    yield path, "", item
                    continue
                read = self._of_messages if path.count("[]") == 1 and not isinstance(known, PartKeys) else frozenset()
                for key in item.keys() - known - read:
                    if not is_absent(item[key]):
                        yield path, key, item[key]


def is_absent(value: object) -> bool:
    """Return whether a value is null or empty; 0 and false are neither."""
    return not value and not isinstance(value, (bool, int, float))


def _present(values: list[object]) -> int:
    if set(map(type, values)) <= {str, type(None)}:
        return len(values) - values.count(None) - values.count("")
    return sum(not is_absent(value) for value in values)


def _safe_path(path: str) -> str:
    where, _, key = path.rpartition("[].")
    return f"{where}[].{_safe(key)}"


def _safe(key: str) -> str:
    """Return a key in a form that can be shown in one line."""
    if key.isidentifier() and len(key) <= LONGEST_KEY:
        return key
    return printable(key[:LONGEST_KEY]) + "…" * (len(key) > LONGEST_KEY)
