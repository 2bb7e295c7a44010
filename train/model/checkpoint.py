"""Find out what a checkpoint is, what loads it, and why it cannot be trained.

    config ─auto_class─▶ AutoModelForCausalLM, or AutoModelForMultimodalLM: the one that has the checkpoint's own class
    folder, error of a library ─obstacle─▶ the reason behind the error, and what to do instead
    loaded model ─require_causal_text─▶ it runs on text alone, and no token sees later tokens

A checkpoint is loaded with the class that wrote it, also if it has towers for images or sound. Its adapter has the
names of that class, so that PEFT and servers load it on the checkpoint as it is.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import CONFIG_MAPPING, AutoModel, AutoModelForCausalLM, AutoModelForMultimodalLM

from packcorpus.tasks.core.errors import DataError, PackError, StorageError
from packcorpus.tasks.storage.files import read_json

# How a file starts that Git LFS has not downloaded.
POINTER = b"version https://git-lfs"
SAFETENSORS = ("*.safetensors", "*.safetensors.index.json")
SHARDS = ("model-*-of-*.safetensors",)
PICKLES = ("*.bin", "*.bin.index.json", "*.pt", "*.pth", "*.ckpt")
OTHER_WEIGHTS = {
    PICKLES: "pickles, which can run code when they are opened",
    ("*.gguf",): "files of llama.cpp",
    ("*.h5",): "files of TensorFlow",
    ("*.msgpack",): "files of Flax",
}
CONVERT = "use a copy of the model with safetensors files, or convert it"
REMOTE_CODE = (
    "needs code from its repository, which is never run",
    "use a model that transformers has its own code for",
)
USE_ANOTHER = "use a model that generates text"

# Classes with a head for the next token, or without a head. A repository may have its own name for a class.
CAUSAL = re.compile(r"(?:ForCausalLM|LMHeadModel|Model)$")
# Rounding moves the logits of earlier tokens at most by this share of the effect that a token has on its own.
ROUNDING = 0.05
# Models that train only if each token is marked as text or as a part of an image.
MARKED = ("molmo2",)


# -- before a model is loaded ------------------------------------------------------------------------------------------


def classes_of(config: Any) -> dict[Any, Any]:
    """Return the auto classes that know a config, with the class that each loads."""
    loaded = {}
    for auto in (AutoModelForCausalLM, AutoModelForMultimodalLM):
        kinds = auto._model_mapping.get(type(config), None)
        if isinstance(kinds, tuple):
            kinds = next((kind for kind in kinds if kind.__name__ in (config.architectures or ())), kinds[0])
        if kinds is not None:
            loaded[auto] = kinds
    return loaded


def towers_of(config: Any) -> list[Any]:
    """Return the classes of the parts of a model that have a config of their own."""
    kinds = []
    for name in config.sub_configs:
        with suppress(ValueError):  # transformers names some classes that it does not have
            kinds.append(AutoModel._model_mapping.get(type(getattr(config, name, None)), None))
    return [kind for kind in kinds if isinstance(kind, type)]


def auto_class(base: Path | str, config: Any) -> Any:
    """Return the auto class that loads a checkpoint with its own class.

    Raises DataError if the checkpoint is not a causal language model.
    """
    classes, written_by = classes_of(config), config.architectures or []
    name = next(iter(written_by), f"a {config.model_type} model")
    own = next((auto for auto, kind in classes.items() if kind.__name__ in written_by), None)
    is_other = bool(written_by) and hasattr(transformers, name) and not CAUSAL.search(name)
    if not classes or (own is None and is_other):
        raise not_causal(base, name)
    # The class for several modalities is the last one.
    auto = own or [*classes][-1]
    kind = classes[auto]
    reads = (config, config.get_text_config())
    if auto is AutoModelForMultimodalLM and any(part.is_encoder_decoder for part in reads):
        raise not_causal(base, f"{kind.__name__} reads its input with an encoder")
    if kind.forward is torch.nn.Module.forward:
        raise not_causal(base, f"{kind.__name__} combines several models, and has no pass of its own to train")
    if not hasattr(kind, "prepare_inputs_for_generation"):
        raise not_causal(base, f"{kind.__name__} does not predict one token after another")
    return auto


def not_causal(base: Path | str, why: str) -> DataError:
    return DataError("unfit_model", f"base_model: {base}: is not a causal language model: {why}; {USE_ANOTHER}")


def without_head(base: Path | str, model: Any) -> DataError | None:
    """Return the error for weights that another class than the model's wrote."""
    written_by = (model.config.architectures or [type(model).__name__])[0]
    if written_by == type(model).__name__:
        return None
    return not_causal(base, f"it was saved as {written_by}, without the head of {type(model).__name__}")


def use_inner_head(base: Path | str, model: Any) -> None:
    """Make a model that wraps a causal language model return the head of that one.

    Raises DataError if the model has no embeddings or no head for tokens.
    """
    inner = model.get_decoder()
    if model.get_output_embeddings() is None and inner is not model:
        model.get_output_embeddings = inner.get_output_embeddings
    if not all(hasattr(part, "weight") for part in (model.get_input_embeddings(), model.get_output_embeddings())):
        raise not_causal(base, f"{type(model).__name__} reads or writes more than the tokens of a text")


def mark_as_text(model: Any) -> None:
    """Make a model take all tokens for text if it refuses to train otherwise."""

    def mark(_model: Any, args: tuple[Any, ...], named: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return args, named | {"mm_token_type_ids": torch.zeros_like(named["input_ids"])}

    if model.config.model_type in MARKED:
        model.register_forward_pre_hook(mark, with_kwargs=True)


# -- after an error ----------------------------------------------------------------------------------------------------


def obstacle(base: Path | str, error: Exception) -> tuple[str, str] | None:
    """Return why a checkpoint cannot be loaded, and the fix; None if it is damaged."""
    text = str(error)
    if isinstance(base, Path):
        if pointer := next(filter(is_pointer, _files(base, ("*.json", *SAFETENSORS))), None):
            return f"{pointer.name} is a Git LFS pointer, not the file itself", f"run `git lfs pull` in {base}"
        if _has_remote_code(base):
            return REMOTE_CODE
    if kind := re.search(r"model type `(.+?)` but Transformers does not recognize", text):
        version = f"transformers {transformers.__version__}"
        return f"is a {kind[1]} model, which {version} does not know", "install a version that does"
    if isinstance(base, Path):
        found = _files(base, SAFETENSORS)
        if found and not any(path.name.startswith("model.safetensors") for path in found):
            if any(_files(base, SHARDS)):
                return "lacks model.safetensors.index.json", "copy it as well"
            return f"has weights only as {found[0].name}, in the layout of another library", CONVERT
        if not found:
            for patterns, what in OTHER_WEIGHTS.items():
                if any(_files(base, patterns)):
                    return f"has weights only as {what}", CONVERT
            return "has no weights", "copy its *.safetensors files as well"
    if package := re.search(r"requires the (\S+) library", text):
        return f"needs the package {package[1]}, which is not installed", f"pip install {package[1]}"
    if "trust_remote_code" in text:
        return REMOTE_CODE
    if "ignore_mismatched_sizes" in text:
        return "the shapes of its weights do not match its config.json", "copy both from the same model"
    if "Unrecognized configuration class" in text:  # two model types have the same config
        return f"cannot be loaded by the auto classes of transformers {transformers.__version__}", USE_ANOTHER
    if "does not appear to have a file named model.safetensors" in text:
        return "has no weights as safetensors files", CONVERT
    return None


def is_pointer(path: Path) -> bool:
    """Return whether a file is a Git LFS pointer."""
    with path.open("rb") as file:
        return file.read(len(POINTER)) == POINTER


def _files(folder: Path, patterns: Sequence[str]) -> list[Path]:
    return [path for pattern in patterns for path in sorted(folder.glob(pattern)) if path.is_file()]


def _has_remote_code(folder: Path) -> bool:
    """Return whether a model needs code that transformers lacks."""
    try:
        config = read_json(folder / "config.json")
    except StorageError:
        return False
    return isinstance(config, dict) and "auto_map" in config and config.get("model_type") not in CONFIG_MAPPING


# -- after a model is loaded -------------------------------------------------------------------------------------------


@torch.no_grad()
def require_causal_text(base: Path | str, model: Any, collate: Callable[..., dict[str, Any]]) -> None:
    """Raise DataError if a model needs more than text, or its tokens see later ones.

    A model that cannot run at all is left to the proof of isolation, which names what is missing.
    """
    ids = torch.arange(8) + model.get_input_embeddings().num_embeddings // 2
    other = torch.cat([ids[:-1], ids[:1]])
    mode, logits = model.training, []
    model.eval()
    try:
        for tokens in (ids, other):
            batch = collate([{"input_ids": tokens, "labels": tokens, "position_ids": torch.arange(len(ids))}])
            batch = {name: x.to(model.device) if torch.is_tensor(x) else x for name, x in batch.items()}
            logits.append(model(**batch)["logits"][0].float())
    except (PackError, ImportError, RuntimeError):
        return
    except Exception as error:  # each model has its own way to miss its images
        reason = (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
        raise DataError(
            "unfit_model",
            f"base_model: {base}: a {model.config.model_type} model cannot read text alone ({reason}); {USE_ANOTHER}",
        ) from None
    finally:
        model.train(mode)
    *earlier, last = (logits[0] - logits[1]).abs().amax(-1).tolist()
    if max(earlier) > ROUNDING * last:
        raise not_causal(base, f"the tokens of a {model.config.model_type} model see later tokens")
