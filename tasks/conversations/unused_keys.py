"""Count the unused keys of records by their path.

    {"id": 7, "messages": [{"role": "user", "content": "2+2?", "id": 1}, …]}  → {"id": 1, "messages[].id": 2}

A value that is null, or an empty string, list, or object, counts as absent. The counts of a source's parts add up to
the counts of the source, because they do not depend on where a part starts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain, repeat
from operator import attrgetter
from typing import Any

from packcorpus.tasks.conversations.answers import REASONING_KEYS
from packcorpus.tasks.conversations.formats import FORMAT_OF
from packcorpus.tasks.conversations.model import PlainRecord, Record
from packcorpus.tasks.conversations.names import MESSAGE_KEYS, rename
from packcorpus.tasks.conversations.other_data import (
    MEDIA_KEYS,
    OTHER_KEYS,
    is_other_data,
    other_data,
    part_of_other_data,
)
from packcorpus.tasks.conversations.parts import PartKeys
from packcorpus.tasks.core.printable import printable

# Maximum number of paths that are counted for a source; if keys are data, there may be any number of paths.
MOST_PATHS = 50
OTHERS = "(others)"

_REASONING = frozenset(REASONING_KEYS)

MOST_SHAPES = 16  # maximum number of different sets of keys in a block that is counted at once

LONGEST_KEY = 60  # maximum number of characters that are shown


def sum_counts(parts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Add up the counts of several parts of a source.

    The highest is first, and the count of all other paths last. Only the first `MOST_PATHS` paths are kept, by length
    and then alphabetically: a path that is among the first paths of all records is also among those of any subset.
    """
    total = Counter[str]()
    for part in parts:
        total.update(part)
    others = total.pop(OTHERS, 0)
    paths = sorted(total, key=lambda path: (len(path), path))
    others += sum(total[path] for path in paths[MOST_PATHS:])
    kept = sorted(paths[:MOST_PATHS], key=lambda path: -total[path])
    return {path: total[path] for path in kept} | ({OTHERS: others} if others else {})


class UnusedKeys:
    """Count the unused keys in the records of one source file.

    `columns` and `ignore` are the settings in the config. Raises DataError for a record of other data.
    """

    def __init__(
        self,
        format: str,
        columns: Mapping[str, str],
        ignore: Collection[str],
        further: Collection[str] = (),
        own: Collection[str] = (),
        unread: Collection[str] = (),
    ):
        """Set up the counts of a file.

        `further` are packcorpus names that are read in addition to the keys of the format, and `own` names in the data.
        `unread` are names in the data of keys that settings leave out.
        """
        self._own, self._unread = frozenset(own), frozenset(unread)
        self._format, self._columns, self._ignore = FORMAT_OF[format], columns, frozenset(ignore)
        self._further = frozenset(further)
        self._of_messages = frozenset(columns.get(name, name) for name in self._further.intersection(MESSAGE_KEYS))
        self._keys = frozenset(self._format.keys) | self._further
        self._counts = Counter[str]()
        # The unused keys of records by all their keys, or None if they depend on values.
        self._shapes: dict[tuple[str, ...], tuple[str, ...] | None] = {}

    def add(self, numbers: Sequence[int], records: Sequence[object], place: Callable[[int], str]) -> None:
        """Count the keys of a block of records.

        `place` returns the file and line of a record number.
        """
        kinds = set(map(type, records))
        for kind in kinds:
            if issubclass(kind, PlainRecord):
                self._add_plain(kind, [record for record in records if type(record) is kind])
        if dict in kinds and not self._add_alike([record for record in records if type(record) is dict]):
            for number, record in zip(numbers, records, strict=True):
                if type(record) is dict:
                    self._add_record(record, number, place)
        if len(self._counts) > 10 * MOST_PATHS:
            self._counts = Counter(self.found())

    def add_column(self, name: str, count: int) -> None:
        """Count the values of a table's column that is not read."""
        self._counts[_safe(name)] += count

    def found(self) -> dict[str, int]:
        """Return how often each key occurred."""
        return sum_counts([self._counts])

    def _add_plain(self, kind: Any, records: Sequence[Any]) -> None:
        """Count the unused keys of plain records, in C.

        In a plain record, only keys that its format does not have are unused.
        """
        for field, name in zip(kind.__struct_fields__, kind.__struct_encode_fields__, strict=True):
            if name not in self._keys:
                values = list(map(attrgetter(field), records))
                if count := len(values) - values.count(None) - values.count(""):
                    self._counts[name] += count

    def _add_alike(self, records: Sequence[Record]) -> bool:
        """Count the keys of records that have few different sets of keys, in C.

        Returns False, without counting anything, if a record has to be examined.
        """
        shapes = set(map(tuple, records))
        unused = [self._unused_of(shape) for shape in shapes] if len(shapes) <= MOST_SHAPES else [None]
        keys = set(chain.from_iterable(shape_unused or () for shape_unused in unused))
        if None in unused or self._format.left_out:
            return False
        objects = self._format.objects
        if objects and any(True for _ in chain.from_iterable(map(objects, records, repeat(self._columns)))):
            return False
        counts: dict[str, int] = {}
        for key in keys:
            values = [record[key] for record in records if key in record]
            if key in OTHER_KEYS and any(self._is_other("", key, value) for value in values if not is_absent(value)):
                return False
            if set(map(type, values)) <= {str, type(None)}:
                count = len(values) - values.count(None) - values.count("")
            else:
                count = sum(not is_absent(value) for value in values)
            if count:
                counts[key] = count
        for key, count in counts.items():
            self._counts[_safe(key)] += count
        return True

    def _unused_of(self, shape: tuple[str, ...]) -> tuple[str, ...] | None:
        if shape not in self._shapes:
            if len(self._shapes) > MOST_SHAPES:
                self._shapes.clear()
            unused = self._unused_keys(dict.fromkeys(shape, "x"))
            known = self._keys.difference(self._unread)
            depends = self._columns or not known.isdisjoint(unused) or not _REASONING.isdisjoint(shape)
            self._shapes[shape] = None if depends else unused
        return self._shapes[shape]

    def _add_record(self, record: Record, number: int, place: Callable[[int], str]) -> None:
        if self._format.left_out:
            for path, count in self._format.left_out(rename(record, self._columns)).items():
                where, _, key = path.rpartition("[].")
                self._counts[f"{where}[].{_safe(key)}"] += count
        keys, parts = set[str](), set[str]()
        for path, key, value in self.unused(record):
            part = part_of_other_data(value) if path and not key and isinstance(value, dict) else ""
            if part and part not in self._ignore:
                parts.add(part)
            if self._is_other(path, key, value):
                keys.add(key)
            self._counts[f"{path}.{part or _safe(key)}" if path else _safe(key)] += 1
        if keys or parts:
            raise other_data(keys, place(number), parts)

    def _is_other(self, path: str, key: str, value: object) -> bool:
        """Return whether a value means other data that the config does not ignore."""
        if key not in OTHER_KEYS or key in self._ignore or (not path and key in self._unread):
            return False
        # Some data sets keep the media of a message next to its content. All objects of oasst are messages of a tree.
        is_message = path.endswith("[]") and _depth(path) == 1 and path != "tools[]"
        if path and not (key in MEDIA_KEYS and (is_message or self._format.name == "oasst")):
            return False
        return is_other_data(key, value, self._format.name)

    def unused(self, record: Record) -> Iterator[tuple[str, str, object]]:
        """Yield (path of the object, key, value) for each unused key of a record.

        A content part that is an image, audio, or video is unused as a whole; its key is then "".
        """
        for key in self._unused_keys(record):
            if not is_absent(record[key]):
                yield "", key, record[key]
        if self._format.objects:
            for path, item, known in self._format.objects(rename(record, self._columns), self._columns):
                is_part = isinstance(known, PartKeys)
                if is_part and part_of_other_data(item):
                    yield path, "", item
                    continue
                read = frozenset() if is_part or _depth(path) != 1 else self._of_messages
                for key in item.keys() - known - read:
                    if not is_absent(item[key]):
                        yield path, key, item[key]

    def _unused_keys(self, record: Record) -> tuple[str, ...]:
        named = rename(record, self._columns)
        used = {*self._format.used(named), *self._further} if self._format.used else self._keys
        if self._columns:
            used = {self._columns.get(key, key) for key in used if key in named}
        return tuple(key for key in record if key in self._unread or key not in used | self._own)


def _depth(path: str) -> int:
    """Return how many lists a path leads through.

    A list of answers is not one of them: completions[][] is a list of messages, like messages[].
    """
    return path.replace("[][]", "[]").count("[]")


def is_absent(value: object) -> bool:
    """Return whether a value is null or empty; 0 and false are neither."""
    return not value and not isinstance(value, (bool, int, float))


def _safe(key: str) -> str:
    """Return a key in a form that can be shown in one line."""
    if key.isidentifier() and len(key) <= LONGEST_KEY:
        return key
    return printable(key[:LONGEST_KEY]) + "…" * (len(key) > LONGEST_KEY)
