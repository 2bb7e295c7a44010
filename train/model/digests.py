"""Identify models and adapters by their content, without loading them.

Both digests are part of the key of a run.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from tasks.core.errors import DataError
from tasks.storage.files import sha256_of

ADAPTER_WEIGHTS, ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"
# Number of samples that are hashed in each file of a base model, and the bytes of a sample. A file of up to 1 MiB is
# hashed as a whole.
SAMPLES, SAMPLE = 256, 4096


def folder_digest(folder: Path) -> str:
    """Identify a local model by its small files and by samples of its large files."""
    # Reading all weights would take minutes. Training changes most weights, so samples reveal it.
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            size = path.stat().st_size
            digest.update(f"{path.relative_to(folder).as_posix()}\0{size}\0".encode())
            with path.open("rb") as file:
                for start in range(0, size, max(SAMPLE, size // SAMPLES)):
                    file.seek(start)
                    digest.update(file.read(SAMPLE))
    return digest.hexdigest()


def adapter_digest(folder: Path) -> str:
    """Identify an adapter by its weights and its settings."""
    return hashlib.sha256("".join(sha256_of(path) for path in adapter_files(folder)).encode()).hexdigest()


def adapter_files(folder: Path) -> tuple[Path, Path]:
    """Return the files with the weights and the settings of an adapter."""
    found = folder / ADAPTER_WEIGHTS, folder / ADAPTER_CONFIG
    if not folder.is_dir():
        raise DataError("bad_adapter", f"adapter: {folder}: no such folder; use one that contains {ADAPTER_WEIGHTS}")
    if not found[0].is_file() and (folder / "adapter_model.bin").is_file():
        raise DataError(
            "bad_adapter",
            f"adapter: {folder}: contains adapter_model.bin, a pickle, which can run any code when it is read; save "
            f"the adapter as {ADAPTER_WEIGHTS}",
        )
    for path in found:
        if not path.is_file():
            raise DataError(
                "bad_adapter", f"adapter: {folder}: contains no {path.name}; use a folder written by save_pretrained"
            )
    return found
