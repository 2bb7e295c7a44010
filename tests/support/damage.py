"""Ways to damage a file, and the files that each reader of a corpus refuses when they are damaged.

DAMAGES[how](file) ─▶ reader(manifest) ─▶ an error that names the file        repair(manifest) ─▶ the old bytes
"""

from __future__ import annotations

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


def link(path: Path) -> None:
    """Replace a file by a link to its bytes, which are outside the corpus."""
    outside = path.parents[4] / f"outside-{path.name}"
    path.rename(outside)
    path.symlink_to(outside)


def swap(path: Path, other: Path) -> None:
    data = path.read_bytes(), other.read_bytes()
    path.write_bytes(data[1])
    other.write_bytes(data[0])


# A reader of one file is given these.
DAMAGES: dict[str, Callable[[Path], Any]] = {
    "flipped": flip,
    "truncated": lambda path: os.truncate(path, path.stat().st_size - 1),
    "without its end mark": lambda path: os.truncate(path, path.stat().st_size - 8),
    "emptied": lambda path: os.truncate(path, 0),
    "extended": lambda path: path.write_bytes(path.read_bytes() + b"\0"),
    "overwritten": lambda path: path.write_bytes(b"\xff" * path.stat().st_size),
    "missing": Path.unlink,
    "folder": lambda path: (path.unlink(), path.mkdir()),
    "link": link,
    "broken link": lambda path: (path.unlink(), path.symlink_to("nowhere")),
}


def undo(path: Path, data: bytes) -> None:
    """Put a file back, whatever is in its place."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    path.write_bytes(data)
