"""Hash the sources of a run on the cluster that also runs its other steps.

    files that the digest cache does not know ─HashFile, one step each─▶ entries of the cache ─▶ the recipe of the run

The keys of all other steps contain the digests of the sources, so these steps run before the graph is built.
"""

from __future__ import annotations

from collections.abc import Sequence

from pipeline.engines.engine import open_engine
from tasks.core.notes import noted
from tasks.core.printable import in_bytes
from tasks.recipe import Recipe
from tasks.sources.digests.digest_cache import DigestCache
from tasks.sources.model import SourceFile
from tasks.steps import HashFile

# Bytes that the command hashes itself. From a local disk, that takes seconds, like the start of a cluster's workers.
HASHED_HERE = 8_000_000_000


def hash_sources(on: str, bare: Recipe, files: Sequence[SourceFile], part_size: int, cache: DigestCache) -> None:
    """Hash the files that `cache` does not know, unless they are small together.

    They are hashed on the engine that `on` names. `bare` is the recipe of the run without its sources. Raises
    PackError.
    """
    if _size(files) < HASHED_HERE or _size(missing := cache.missing(files, part_size)) < HASHED_HERE:
        return
    if bare.config.tokenizer is not None:
        _ = bare.template  # starts the process of a Jinja template, before a cluster's threads exist here
    largest_first = sorted(missing, key=lambda file: file.bytes, reverse=True)
    steps, done = [HashFile(bare.layout.root, file, part_size) for file in largest_first], 0
    size = in_bytes(_size(missing))
    with (
        noted(lambda: f"hashing the sources on the cluster, {size}: {done:,} of {len(steps):,} files done"),
        open_engine(on, 1) as engine,
    ):
        for _ in engine.map(steps):
            done += 1


def _size(files: Sequence[SourceFile]) -> int:
    return sum(file.bytes for file in files)
