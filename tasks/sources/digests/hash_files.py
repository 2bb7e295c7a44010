"""Hash source files, objects in buckets, and their parts, each in one pass.

    SourceFile ─hash_file─▶ Hashed: SHA-256, ranges of parts with their digests, digests of blocks, name of the entry

Any process on any machine can hash a file: the command in threads, a share of a machine (`hash_objects`), or a step on
a cluster (tasks/steps.py). The result is an entry of the digest cache, where the others find it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from tasks.core.notes import noted
from tasks.readers.containers import container_named
from tasks.readers.hashed_blocks import BLOCK, HashedBlocks
from tasks.sources.digests.digest_cache import DigestCache, Hashed
from tasks.sources.model import SourceFile
from tasks.sources.remote_blocks import fetch_all
from tasks.sources.shares import Share
from tasks.stores.threads import Stop, run_all

HASH_CHUNK = 1 << 20  # bytes hashed at once

HASH_OBJECTS = 8  # objects of this machine's share that are fetched and hashed at once

HASH_OF_OTHERS = 2  # other objects hashed at once; another machine may be hashing them, too


def hash_file(
    file: SourceFile,
    part_size: int,
    cache: DigestCache | None = None,
    check: Callable[[], None] = lambda: None,
    chunk: int = HASH_CHUNK,
) -> Hashed:
    """Hash a file and its parts, and write an entry of `cache`.

    `part_size` is in bytes, and `chunk` is the number of bytes to read at once from a file. The blocks of an object in
    a bucket are kept at its path. `check` is called before each read and can end the work by raising an error. Raises
    DataError if the file changes meanwhile or cannot be split, OSError if it cannot be read, and the errors of stores.
    """
    started = cache.start(file) if cache else []
    hashed = HashedBlocks(min(BLOCK, chunk))
    read = fetch_all(file.path, file.name, file.facts, check) if file.identity else _chunks(file.path, chunk, check)
    container = container_named(file.container)
    found = Hashed(*container.split(file, part_size, hashed.passing(read)), hashed.digests)
    file.check_unchanged()
    return cache.keep(file, part_size, started, found) if cache else found


def hash_objects(
    objects: Sequence[SourceFile], part_size: int, cache: DigestCache | None, share: Share
) -> dict[str, Hashed]:
    """Return the digests of objects that are read in blocks, by name.

    This machine hashes the objects of its share first, so machines that start together hash different objects. It then
    hashes objects that no other machine has claimed. Finally, it waits for the other machines, and hashes the objects
    of machines that were lost.
    """
    if not objects:
        return {}
    own = share.of([file.bytes for file in objects])
    found, stop = dict[str, Hashed](), Stop()

    def find(number: int, wait: bool = False) -> None:
        stop.check()
        file = objects[number]
        hashed = partial(hash_file, file, part_size, cache, stop.check)
        known = cache.find_once(file, part_size, hashed, wait, stop.check) if cache else hashed()
        if known:
            found[file.name] = known

    with noted(lambda: f"hashing the sources in buckets: {len(found):,} of {len(objects):,} files done"):
        run_all(find, own, HASH_OBJECTS, stop.set)
        # From the end, because the machines with these shares begin at the start.
        run_all(find, sorted({*range(len(objects))}.difference(own), reverse=True), HASH_OF_OTHERS, stop.set)
        left = [number for number, file in enumerate(objects) if file.name not in found]
        run_all(partial(find, wait=True), left, HASH_OF_OTHERS, stop.set)
    return found


def _chunks(path: Path, size: int, check: Callable[[], None]) -> Iterator[bytes]:
    with path.open("rb") as file:
        while data := file.read(size):
            check()
            yield data
