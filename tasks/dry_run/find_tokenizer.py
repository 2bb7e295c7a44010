"""Find a tokenizer near the source files."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from tasks.core.errors import PackError
from tasks.encoders.tokenizer_files import find_tokenizer, open_encoder
from tasks.storage.layout import Layout

# Limits of the search: levels below a start folder, folders per start folder, and bytes of a tokenizer file.
DEPTH, MOST_FOLDERS, LARGEST = 2, 500, 64 << 20

OTHERS = 4  # further tokenizers to mention


def tokenizer_near(folders: Sequence[Path]) -> tuple[Path | None, list[Path]]:
    """Return the nearest tokenizer that loads, and the next candidates.

    Searches the folders of the sources, the working directory, and the folders below them. Does not search the folders
    above, because their files may belong to another project or person.
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
    """Yield folders and files that may be tokenizers, the nearest first."""
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
            if names & {"manifest.json", "index.arrow"}:  # a corpus, with its own copy of a tokenizer
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
