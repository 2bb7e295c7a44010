"""Find a tokenizer near the source files."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from tasks.core.errors import PackError
from tasks.encoders.tokenizer_files import find_tokenizer, open_encoder
from tasks.storage.paths import Layout

# How far below the folders of the sources and the current one a tokenizer is looked for, and files that may be one.
DEPTH, MOST_FOLDERS, LARGEST = 2, 500, 64 << 20


OTHERS = 4  # further tokenizers that are named


def tokenizer_near(folders: Sequence[Path]) -> tuple[Path | None, list[Path]]:
    """The nearest that can be loaded, and the next ones: in the folders of the sources and here, and below these.

    Never beside or above them: what lies there is of another project, maybe of another person.
    """
    found: list[Path] = []
    for start in dict.fromkeys(folder.resolve() for folder in (*folders, Path())):
        found += [candidate for candidate in _candidates(start) if candidate not in found]
    outputs = Layout(Path()).outputs()
    found = [path for path in found if not any(path.resolve().is_relative_to(output) for output in outputs)]
    for number, candidate in enumerate(found):
        try:
            open_encoder(find_tokenizer(candidate))
        except PackError:
            continue
        return candidate, found[number + 1 :][:OTHERS]
    return None, []


def _candidates(start: Path) -> Iterator[Path]:
    """Folders and files that may be a tokenizer, the nearest first."""
    level, seen = [start], 0
    for _ in range(DEPTH + 1):
        below = []
        for folder in level:
            seen += 1
            if seen > MOST_FOLDERS:
                return
            try:
                entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
            except OSError:
                continue
            names = {entry.name for entry in entries}
            if names & {"manifest.json", "index.arrow"}:  # a corpus: its tokenizer is a copy of its own
                continue
            if names & {"tokenizer.json", "tokenizer.model"}:
                yield folder
            else:
                yield from (
                    Path(entry.path)
                    for entry in entries
                    if entry.name.endswith(".model") and entry.is_file() and 0 < entry.stat().st_size <= LARGEST
                )
            below += [
                Path(entry.path) for entry in entries if entry.is_dir() and not entry.name.startswith((".", "__"))
            ]
        level = below
