"""Ways to damage a file, and wrong facts that a manifest can record.

DAMAGES[how](file) ─▶ reader(manifest) ─▶ an error that names the file        undo(file, data) ─▶ as before
SIGNED[how](values of a manifest, file)

support/damage/matrix.py applies them to every reader.
"""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any


def flip(path: Path, bit: int | None = None) -> None:
    """Flip one bit, by default the lowest of the byte in the middle."""
    data = bytearray(path.read_bytes())
    bit = 8 * (len(data) // 2) if bit is None else bit % (8 * len(data))
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)


def zero(path: Path) -> None:
    """Overwrite 512 bytes, from the first nonzero byte after the middle."""
    data = path.read_bytes()
    at = next(at for at in range(len(data) // 2, len(data)) if data[at])
    path.write_bytes(data[:at] + bytes(len(data[at : at + 512])) + data[at + 512 :])


def link(path: Path) -> None:
    """Replace a file by a link to its bytes, which are moved outside the corpus."""
    root = next((above.parent for above in path.parents if above.name in ("data", "manifests")), path.parents[2])
    outside = root / f"outside-{path.name}"
    path.rename(outside)
    path.symlink_to(outside)


def swap(path: Path, other: Path) -> None:
    data = path.read_bytes(), other.read_bytes()
    path.write_bytes(data[1])
    other.write_bytes(data[0])


# Damages of one file.
DAMAGES: dict[str, Callable[[Path], Any]] = {
    "flipped": flip,
    "truncated": lambda path: os.truncate(path, path.stat().st_size - 1),
    "without its end mark": lambda path: os.truncate(path, path.stat().st_size - 8),
    "emptied": lambda path: os.truncate(path, 0),
    "extended": lambda path: path.write_bytes(path.read_bytes() + b"\0"),
    "doubled": lambda path: path.write_bytes(2 * path.read_bytes()),
    "512 bytes zeroed": zero,
    "overwritten": lambda path: path.write_bytes(b"\xff" * path.stat().st_size),
    "missing": Path.unlink,
    "folder": lambda path: (path.unlink(), path.mkdir()),
    "link": link,
    "broken link": lambda path: (path.unlink(), path.symlink_to("nowhere")),
}


def _recorded(values: dict[str, Any], name: str) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return the list of a manifest that contains a file, and the file's entry."""
    lists = [*(split["shards"] for split in values["splits"].values()), values["files"]]
    return next((files, file) for files in lists for file in files if file["path"] == name)


def change_size(values: dict[str, Any], name: str) -> None:
    _recorded(values, name)[1]["bytes"] += 1


def list_twice(values: dict[str, Any], name: str) -> None:
    files, file = _recorded(values, name)
    files.append(file)


def spell_otherwise(values: dict[str, Any], name: str) -> None:
    files, file = _recorded(values, name)
    files.append(file | {"path": name.replace("/", "//") if "/" in name else f"./{name}"})


def list_elsewhere(values: dict[str, Any], name: str) -> None:
    """List a shard in another split, too, and any other file as a shard."""
    files, file = _recorded(values, name)
    split = next(split for split in reversed(values["splits"].values()) if split["shards"] is not files)
    split["shards"].append({"path": name, "rows": 1, "bytes": file["bytes"], "sha256": file["sha256"]})


# Wrong facts about a file in a manifest whose digest is right.
SIGNED: dict[str, Callable[[dict[str, Any], str], Any]] = {
    "recorded with another size": change_size,
    "listed twice": list_twice,
    "listed twice, spelled otherwise": spell_otherwise,
    "listed in another place, too": list_elsewhere,
}


def undo(path: Path, data: bytes) -> None:
    """Restore a file, whatever has replaced it."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    touch(path)


_seconds = itertools.count(2_000_000_000)


def touch(path: Path) -> None:
    """Give a file a modification time that no other file has.

    The clock of a file system is too coarse to distinguish two writes of a test.
    """
    if path.is_file():
        os.utime(path, (next(_seconds),) * 2)
