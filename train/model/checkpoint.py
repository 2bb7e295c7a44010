"""Tell what a checkpoint is, and which class of transformers loads it.

config ─auto_class─▶ AutoModelForCausalLM, or AutoModelForMultimodalLM if the checkpoint has towers: its own class
folder, config ─obstacle─▶ why it cannot be trained, and what to do instead; None if nothing is known to prevent it
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import transformers
from transformers import AutoModelForCausalLM, AutoModelForMultimodalLM

from tasks.core.errors import DataError
from tasks.storage.files import read_json

# The first bytes of a file of Git LFS that was not downloaded.
POINTER = b"version https://git-lfs"
WEIGHTS = ("*.safetensors", "*.safetensors.index.json")
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.bin.index.json")
OTHER_FORMATS = {"*.gguf": "llama.cpp", "*.h5": "TensorFlow", "*.msgpack": "Flax", "*.onnx": "ONNX"}


def classes_of(config: Any) -> dict[Any, Any]:
    """Return the auto classes that load a causal language model, with its classes."""
    found = {}
    for auto in (AutoModelForCausalLM, AutoModelForMultimodalLM):
        known = auto._model_mapping.get(type(config), None)
        if known is not None:
            found[auto] = known if isinstance(known, tuple) else (known,)
    return found


def auto_class(base: Path | str, config: Any) -> Any:
    """Return the auto class that loads a checkpoint with its own class.

    Raises DataError if the checkpoint is not a causal language model.
    """
    classes, wanted = classes_of(config), config.architectures or ()
    for auto, known in classes.items():
        if any(kind.__name__ in wanted for kind in known):
            return auto
    if not classes:
        raise not_causal(base, config)
    return next(iter(classes))


def not_causal(base: Path | str, config: Any) -> DataError:
    """Return the error for a checkpoint that does not predict the next token."""
    name = next(iter(config.architectures or ()), f"a {config.model_type} model")
    return DataError(
        "bad_model", f"base_model: {base}: is not a causal language model: {name}; use a model that generates text"
    )


def obstacle(folder: Path) -> tuple[str, str] | None:
    """Return why a folder has no weights to train, and the fix; None if it has."""
    pointers = [path for path in sorted(folder.iterdir()) if path.is_file() and is_pointer(path)]
    if pointers:
        return f"{pointers[0].name} is a Git LFS pointer, not the file itself", "run `git lfs pull` in this folder"
    config = read_json(folder / "config.json")
    if isinstance(config, dict) and config.get("auto_map") and not is_known(config.get("model_type")):
        return (
            "it needs code from its repository, which is never run",
            "use a model that transformers has its own code for",
        )
    if not any(any(folder.glob(pattern)) for pattern in WEIGHTS):
        for pattern, tool in OTHER_FORMATS.items():
            if any(folder.glob(pattern)):
                return f"its weights are files of {tool}", "use the original model, with safetensors files"
        if any(any(folder.glob(pattern)) for pattern in PICKLES):
            return (
                "its weights are pickles, which can run code and are never opened",
                "convert them to safetensors, or use a copy of the model that has them",
            )
        return "it has no weights", "copy the *.safetensors files as well"
    return None


def is_pointer(path: Path) -> bool:
    """Return whether a file is a Git LFS pointer."""
    with path.open("rb") as file:
        return file.read(len(POINTER)) == POINTER


def is_known(model_type: Any) -> bool:
    """Return whether transformers has its own code for a type of models."""
    return model_type in transformers.CONFIG_MAPPING
