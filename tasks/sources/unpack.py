"""Unpack a file that can only be read from its start, once for all of its parts.

    chats.jsonl.gz ─the first process that needs a part─▶ data/unpacked/KEY/0-4194410, 4194410-8388802, … ─▶ parts
                                                          └ each is read once it exists, then removed

The other processes tokenize a part as soon as it is unpacked. If the process that unpacks ends early, another one
continues.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import orjson

from packcorpus.tasks.core.errors import DataError
from packcorpus.tasks.readers.containers import container_named
from packcorpus.tasks.sources.model import Part, SourceFile
from packcorpus.tasks.storage.files import locked, scratch_file


class _Unpacked(Exception):
    """Another process has unpacked the part."""


def may_be_far(file: SourceFile) -> bool:
    """Return whether parts of a file may be far."""
    return bool(file.compression or container_named(file.container).unpacked_as)


def is_far(part: Part) -> bool:
    """Return whether a part is reached only by reading what is before it."""
    container = container_named(part.file.container)
    return may_be_far(part.file) and not part.is_whole and container.is_far(part.file, part.start, part.stop)


def packed(parts: Iterable[Part]) -> bytes:
    """Return the ranges of parts for `unpacked`, as bytes: there may be thousands."""
    return orjson.dumps([(part.start, part.stop, part.sha256) for part in parts])


@contextmanager
def unpacked(part: Part, ranges: bytes, folder: Path, is_needed: Callable[[Part], bool]) -> Iterator[Part]:
    """Yield a part that can be read at once; remove its copy after the block.

    Copies are in `folder`. `ranges` are those of all parts of the file, `packed`. `is_needed` returns whether another
    part is still to be read. Raises DataError if the file cannot be read or has changed, and StorageError if a copy
    cannot be written.
    """
    if not is_far(part):
        yield part
        return

    def check() -> None:
        if _has_copy(part, folder):
            raise _Unpacked

    with suppress(_Unpacked):
        check()
        with locked(folder.with_name(f"{folder.name}.lock"), check):
            check()
            parts = [Part(part.file, *values) for values in orjson.loads(ranges)]
            _unpack([one for one in parts if one == part or (is_needed(one) and not _has_copy(one, folder))], folder)
    yield replace(part, unpacked=_copy_of(part, folder))
    _copy_of(part, folder).unlink(missing_ok=True)
    with suppress(OSError):  # others follow
        folder.rmdir()


def _unpack(parts: list[Part], folder: Path) -> None:
    file = parts[0].file
    file.check_unchanged()
    try:
        ranges = [(part.start, part.stop, _copy_of(part, folder)) for part in parts]
        container_named(file.container).unpack(file, ranges, scratch_file)
    except OSError as error:
        file.check_unchanged()
        raise file.cannot_read(error) from None
    except DataError:
        file.check_unchanged()
        raise
    file.check_unchanged()


def _copy_of(part: Part, folder: Path) -> Path:
    return folder / f"{part.start}-{part.stop}"


def _has_copy(part: Part, folder: Path) -> bool:
    """Return whether there is a copy that no power failure has cut."""
    with suppress(OSError):
        size = _copy_of(part, folder).stat().st_size
        return size > 0 if container_named(part.file.container).unpacked_as else size == part.stop
    return False
