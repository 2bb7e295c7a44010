"""Send a part to another process without the digests of its file.

Part with the digests of all blocks ─without_digests─▶ Part with the name of their record, and their own digest
data/digests/NAME.json, here or in the bucket ─with_digests─▶ the first part again, in the process that reads it

The digests of a file take 64 KB per GB.
"""

from __future__ import annotations

from base64 import b64decode
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from xxhash import xxh3_128_digest

from tasks.core.errors import DataError, StorageError
from tasks.readers.hashed_blocks import BlockDigests, KeptDigests
from tasks.sources.model import Part
from tasks.storage.files import read_receipt
from tasks.stores.mirror import mirror_of

SENT = 1024  # bytes of digests that are sent with a part, enough for a file of 16 MB


def is_large(blocks: BlockDigests) -> bool:
    """Return whether a file's digests are too large to send with each part."""
    return len(blocks.joined) > SENT


def blocks_in(entry: dict[str, Any]) -> BlockDigests:
    """Return the digests of blocks in an entry of the digest cache."""
    return BlockDigests(entry["block"], b64decode(entry["blocks"], validate=True))


def without_digests(part: Part) -> Part:
    """Return a part with the name of the record that has the digests of its file.

    A part keeps digests that are few or have no record.
    """
    blocks, record = part.file.blocks, part.file.record
    if not record or not isinstance(blocks, BlockDigests) or not is_large(blocks):
        return part
    return replace(part, file=replace(part.file, blocks=KeptDigests(record, _digest_of(blocks.joined))))


def with_digests(part: Part, folder: Path) -> Part:
    """Return a part with the digests of its file, read from the cache in `folder`.

    Raises PackError if the digests were removed or replaced.
    """
    kept = part.file.blocks
    if not isinstance(kept, KeptDigests):
        return part
    try:
        blocks = _kept_blocks(folder / kept.record, kept.digest)
    except ValueError:
        message = (
            f"{part.file.name}: the file with its digests, {folder / kept.record}, was removed or replaced; run again"
        )
        raise DataError("input_changed", message) from None
    return replace(part, file=replace(part.file, blocks=blocks))


@lru_cache(maxsize=4)
def _digest_of(joined: bytes) -> bytes:
    return xxh3_128_digest(joined)


@lru_cache(maxsize=4)
def _kept_blocks(path: Path, digest: bytes) -> BlockDigests:
    """Return the digests of a large file, cached because several parts need them.

    Raises ValueError if they were removed or replaced.
    """
    mirror_of(path.parents[2]).adopt(path)
    try:
        blocks = blocks_in(read_receipt(path))
    except (StorageError, LookupError, TypeError):
        path.unlink(missing_ok=True)  # a damaged record is fetched or written again
        raise ValueError from None
    if _digest_of(blocks.joined) != digest:
        raise ValueError
    return blocks
