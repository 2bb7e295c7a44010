"""Find the tokenizers near the data, and the files of models among data."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import orjson

from packcorpus.tasks.core.errors import PackError
from packcorpus.tasks.encoders.tokenizer_files import TokenizerFiles, find_tokenizer, open_encoder
from packcorpus.tasks.readers.containers import container_by_extension
from packcorpus.tasks.storage.layout import Layout

# Limits of the search for a tokenizer: levels below a start folder, folders per start folder, and bytes of a file.
DEPTH, MOST_FOLDERS, LARGEST = 2, 500, 64 << 20
MOST = 8  # tokenizers to open; each may take a second

# Files of a model that have an extension of data.
OF_TOKENIZER = frozenset(("tokenizer.json", "tokenizer.model", "tokenizer_config.json"))
OF_MODEL = OF_TOKENIZER | {
    "added_tokens.json", "adapter_config.json", "chat_template.json", "config.json", "generation_config.json",
    "preprocessor_config.json", "processor_config.json", "quantize_config.json", "special_tokens_map.json",
    "trainer_state.json", "vocab.json",
}  # fmt: skip
WEIGHTS = (".safetensors", ".gguf")
LONGEST_CONTEXT = 1 << 30  # Transformers writes 1e30 for a tokenizer that knows no limit


def model_files(names: Collection[str]) -> set[str]:
    """Return the files of a folder that belong to a model and look like data."""
    has_model = "config.json" in names and any(name.endswith(WEIGHTS) for name in names)
    if not (has_model or OF_TOKENIZER.intersection(names)):
        return set()
    return {name for name in names if name in OF_MODEL or name.endswith(".index.json")}


def is_model(path: Path) -> bool:
    """Return whether a path is a tokenizer, or a folder of a model without data."""
    if path.is_file():
        return path.suffix == ".model" or path.name in OF_TOKENIZER
    if not path.is_dir():
        return False
    names = {entry.name for entry in os.scandir(path) if entry.is_file() and not entry.name.startswith(".")}
    belong = model_files(names) | {name for name in names if name.endswith(".model")}
    return bool(belong) and not any(container_by_extension(name) for name in names - belong)


def context_of(files: TokenizerFiles) -> int | None:
    """Return how many tokens the model of a tokenizer can read, or None if unknown."""
    limits: list[Any] = []
    with suppress(PackError, OSError):
        limits.append(files.settings().get("model_max_length"))
    with suppress(OSError, ValueError, AttributeError):
        values = orjson.loads((files.main.parent / "config.json").read_bytes())
        values = values.get("text_config") or values
        limits.append(values.get("max_position_embeddings"))
        scaling = values.get("rope_parameters") or values.get("rope_scaling") or {}
        if isinstance(original := scaling.get("original_max_position_embeddings"), int):
            limits[-1] = max(limits[-1], int(original * scaling.get("factor", 1)))  # the other may be before scaling
    return min((limit for limit in limits if isinstance(limit, int) and 0 < limit < LONGEST_CONTEXT), default=None)


def tokenizers_near(folders: Sequence[Path]) -> list[Path]:
    """Return the different tokenizers that load, the nearest first, up to MOST.

    Searches the folders of the sources, the working directory, and the folders below them. Does not search the folders
    above, because their files may belong to another project or person. A copy of a tokenizer is left out.
    """
    starts = dict.fromkeys(folder.resolve() for folder in (*folders, Path()))
    candidates = [*dict.fromkeys(candidate for start in starts for candidate in _candidates(start))]
    outputs = Layout(Path()).outputs()
    found: dict[str, Path] = {}
    for candidate in candidates:
        if len(found) < MOST and not any(candidate.resolve().is_relative_to(output) for output in outputs):
            with suppress(PackError, OSError):
                files = find_tokenizer(candidate)
                if (digest := files.sha256()) not in found:
                    open_encoder(files)
                    found[digest] = candidate
    return [*found.values()]


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
