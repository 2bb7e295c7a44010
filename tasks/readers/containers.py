"""List the containers and compressions of files, by file extension.

To add a container, write one file next to this one, and add one item to CONTAINERS.
"""

from __future__ import annotations

from pathlib import PurePath

from packcorpus.tasks.readers.arrow_ipc import ArrowIpc
from packcorpus.tasks.readers.container import Container
from packcorpus.tasks.readers.csv_file import Csv, Tsv
from packcorpus.tasks.readers.json_array import JsonArray
from packcorpus.tasks.readers.json_files import Jsonl, Session
from packcorpus.tasks.readers.parquet import Parquet

CONTAINERS: tuple[Container, ...] = (Jsonl(), JsonArray(), Parquet(), ArrowIpc(), Csv(), Tsv())

COMPRESSIONS = {".gz": "gz", ".zst": "zst"}
EXTENSIONS = {extension: container for container in CONTAINERS for extension in container.extensions}

# A session is a JSONL file by its extension.
_BY_NAME: dict[str, Container] = {container.name: container for container in (*CONTAINERS, Session())}


def container_named(name: str) -> Container:
    """Return the container that a source file or a manifest names."""
    return _BY_NAME[name]


def container_by_extension(name: str) -> tuple[Container, str] | None:
    """Return (container, compression) by the extensions of a file name.

    The compression is "" for an uncompressed file. Returns None if the name has no known extension.
    """
    stem, compression = name.lower(), ""
    for extension, known in COMPRESSIONS.items():
        if stem.endswith(extension):
            stem, compression = stem.removesuffix(extension), known
    container = EXTENSIONS.get(PurePath(stem).suffix)
    return None if container is None else (container, compression)
