"""Define a source file and its parts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class SourceSpec:
    """One entry of the config: a file, glob or folder, relative to the config's folder or absolute."""

    path: str
    format: str = "auto"
    columns: tuple[tuple[str, str], ...] = ()
    weight: float = 1.0
    limit: int | None = None


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A file that is read. `path` is absolute; `name` is the path as the config has it, with /.

    `container` and `format` are resolved: what the file is, and no longer what was asked for. `bytes` and `mtime_ns`
    are those at the time when `sha256` was taken. `entry` is the first spec that reaches it.
    """

    path: Path
    name: str
    container: str
    compression: str
    format: str
    columns: tuple[tuple[str, str], ...]
    bytes: int
    sha256: str
    mtime_ns: int
    entry: int = 0


@dataclass(frozen=True, slots=True)
class Part:
    """What one task reads: bytes [start, stop) of the file, or row groups [start, stop) of a Parquet file.

    `sha256` is the digest of the bytes; for row groups, of the file's digest, start and stop. It says nothing of
    container, compression, format and columns.
    """

    file: SourceFile
    start: int
    stop: int
    sha256: str
