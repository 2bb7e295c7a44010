"""List the containers and compressions that a file name can have."""

from __future__ import annotations

from pathlib import Path

EXTENSIONS = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "json",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".feather": "arrow",
    ".csv": "csv",
    ".tsv": "tsv",
}


COMPRESSIONS = {".gz": "gz", ".zst": "zst"}


TEXT_CONTAINERS = ("jsonl", "json", "csv", "tsv")


def container_of(name: str) -> tuple[str, str] | None:
    """(container, compression) by the extension of `name`, compression "" for none; None if it is not known."""
    stem, compression = name.lower(), ""
    for extension, known in COMPRESSIONS.items():
        if stem.endswith(extension):
            stem, compression = stem.removesuffix(extension), known
    container = EXTENSIONS.get(Path(stem).suffix)
    return None if container is None else (container, compression)
