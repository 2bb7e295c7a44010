"""Hash source files, objects in buckets, and their parts, each in one pass.

    SourceFile ─hash_file─▶ Hashed: SHA-256, ranges of parts with their digests, digests of blocks

The result is an entry of the digest cache, where later runs find it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from tasks.readers.containers import container_named
from tasks.readers.hashed_blocks import BLOCK, HashedBlocks
from tasks.sources.digests.digest_cache import DigestCache, Hashed
from tasks.sources.model import SourceFile
from tasks.sources.remote_blocks import fetch_all

HASH_CHUNK = 1 << 20  # bytes hashed at once


def hash_file(
    file: SourceFile,
    part_size: int,
    cache: DigestCache | None = None,
    check: Callable[[], None] = lambda: None,
) -> Hashed:
    """Hash a file and its parts, and write an entry of `cache`.

    `part_size` is in bytes. The blocks of an object in
    a bucket are kept at its path. `check` is called before each read and can end the work by raising an error. Raises
    DataError if the file changes meanwhile or cannot be split, OSError if it cannot be read, and the errors of stores.
    """
    started = cache.start(file) if cache else []
    hashed = HashedBlocks(min(BLOCK, HASH_CHUNK))
    read = fetch_all(file.path, file.name, file.facts, check) if file.identity else _chunks(file.path, check)
    container = container_named(file.container)
    found = Hashed(*container.split(file, part_size, hashed.passing(read)), hashed.digests)
    file.check_unchanged()
    if cache:
        cache.keep(file, part_size, started, found)
    return found


def _chunks(path: Path, check: Callable[[], None]) -> Iterator[bytes]:
    with path.open("rb") as file:
        while data := file.read(HASH_CHUNK):
            check()
            yield data
