"""Check that servers apply an adapter: its names, its settings, and its weights.

    adapter_model.safetensors ─names─▶ modules of the class in `architectures`, which servers load
                              ├values▶ finite, and not all zero
    adapter_config.json ──────┴────▶ as trained; nothing that vLLM refuses or ignores

Servers load the class that config.json names, which may wrap the model that was trained: Gemma3ForConditionalGeneration
has `model.language_model.layers`, and Gemma3ForCausalLM has `model.layers`. vLLM skips the names that it does not know,
without an error, and serves the base model.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import transformers
from peft import get_peft_model, set_peft_model_state_dict
from transformers import AutoConfig

from packcorpus.tasks.core.errors import DataError
from packcorpus.tasks.core.printable import counted
from packcorpus.tasks.storage.files import read_json, sha256_of
from packcorpus.train.certify.finding import Finding, Subject
from packcorpus.train.merge.merge_run import without_weights
from packcorpus.train.merge.tensors import Tensors, tensors_of_model
from packcorpus.train.merge.weights import CONFIG, FILE, FIX, NAME, PREFIX, Adapter, read_config

# The ranks that vLLM accepts as --max-lora-rank, and its default.
RANKS = (16, 32, 64, 128, 256, 320, 512)
MERGE = "serve the merged model"


def check_adapter(subject: Subject) -> Iterator[Finding]:
    """Check the weights of the adapter, and its settings against those of the run."""
    folder, found = subject.run.folder, list(_weights(subject.run.folder))
    if subject.run.record.get("adapter_sha256") not in (None, sha256_of(folder / FILE)):
        text = f"{folder / FILE}: differs from the file that the run wrote; {FIX}"
        found.append(Finding("adapter", "run", "FAULT", text))
    found += _settings(subject)
    if not found:
        try:
            adapter = Adapter(folder, without_weights(subject.base))
        except DataError as error:
            found = [Finding("adapter", "run", "FAULT", str(error))]
        else:
            found = [Finding("adapter", "run", "ok", f"{adapter}; all names are those of the base model")]
    yield from found


def _weights(folder: Path) -> Iterator[Finding]:
    tensors = Tensors([folder / FILE], "damaged_adapter", FIX)
    if foreign := [name for name in tensors.places if not name.startswith(PREFIX) or name.count(PREFIX) > 1]:
        yield Finding(
            "adapter",
            "run",
            "FAULT",
            f"{folder / FILE}: {foreign[0]} does not begin with `{PREFIX}` once, so PEFT ignores it; {FIX}",
        )
    zero, parts = 0, [name for name in tensors.places if ".lora_B" in name]
    for name in tensors.places:
        value = tensors.read(name)
        if not value.sum(dtype=torch.float64).isfinite():
            yield Finding("adapter", "run", "FAULT", f"{folder / FILE}: {name} is not finite; {FIX}")
            return
        zero += ".lora_B" in name and not value.any()
    others = any(".lora_" not in name for name in tensors.places)
    if zero == len(parts) and not others:
        yield Finding(
            "adapter", "run", "FAULT", f"{folder / FILE}: every B is zero, so nothing was trained; train again"
        )
    elif zero:
        yield Finding(
            "adapter", "run", "note", f"{zero} of {counted(len(parts), 'B')} are zero: these layers are as in the base"
        )


def _settings(subject: Subject) -> Iterator[Finding]:
    path, trained = subject.run.folder / CONFIG, subject.run.record["config"]
    values = read_json(path) if path.is_file() else {}
    if trained.get("adapter"):  # these settings are those of the adapter that the run started from
        return
    wanted = {"r": trained.get("lora_r"), "lora_alpha": trained.get("lora_alpha")}
    if (variant := trained.get("lora_variant")) is not None:
        wanted |= {"use_rslora": variant == "rslora", "use_dora": variant == "dora"}
    for name, value in wanted.items():
        if value is not None and (values.get(name) or False) != value:
            found = values.get(name, "missing")
            yield Finding("adapter", "run", "FAULT", f"{path}: {name} is {found}, but {value} was trained; {FIX}")


def check_names(subject: Subject) -> Iterator[Finding]:
    """Check the names and settings of the adapter against what servers apply."""
    places = Tensors([subject.run.folder / FILE], "damaged_adapter", FIX).places
    path = subject.run.folder / CONFIG
    config: dict[str, Any] = read_json(path) if path.is_file() else {}
    found = [Finding("names", "adapter", "FAULT", f"{text}; {MERGE}") for text in _refused(config, [*places])]
    modules = sorted({_module(name) for name in places})
    architecture, known, problem = _served(subject)
    if problem:
        found.append(Finding("names", "adapter", "skipped", problem))
    elif unknown := [name for name in modules if name not in known]:
        text = f"{len(unknown)} of {counted(len(modules), 'name')}, such as {unknown[0]}, are of no module of"
        text += f" {architecture}, which servers load: vLLM ignores them without an error; {MERGE}"
        found.append(Finding("names", "adapter", "FAULT", text))
    elif lost := lost_by_peft(subject.run.folder, without_weights(subject.base)):
        text = f"PEFT renames weights of a {architecture}, and then leaves out {counted(len(lost), 'weight')}, such as"
        found.append(Finding("names", "adapter", "FAULT", f"{text} {lost[0]}; {MERGE}"))
    rank = int(config.get("r") or 0)
    if RANKS[0] < rank <= RANKS[-1]:
        enough = next(one for one in RANKS if one >= rank)
        found.append(Finding("names", "adapter", "note", f"rank {rank}: vLLM needs --max-lora-rank {enough}"))
    if not any(finding.result in ("FAULT", "skipped") for finding in found):
        text = f"{counted(len(modules), 'name')} are of modules of {architecture}, which servers load"
        found.append(Finding("names", "adapter", "ok", text))
    yield from found


def lost_by_peft(folder: Path, model: Any) -> list[str]:
    """Return the weights that PEFT leaves out when it loads an adapter.

    `model` is the base model without weights.
    """
    with torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT repeats the names
        try:
            wrapped = get_peft_model(model, read_config(folder), NAME)
        except ValueError:  # it names layers that the model lacks, which `check_adapter` reports
            return []
        places = Tensors([folder / FILE], "damaged_adapter", FIX).places
        weights = {name: torch.empty(place.shape) for name, place in places.items()}
        missing = set_peft_model_state_dict(wrapped, weights, NAME).missing_keys
    return sorted(name for name in missing if ".lora_" in name or ".modules_to_save." in name)


def _module(name: str) -> str:
    """Return the module that a tensor of an adapter belongs to."""
    inner, is_lora, _ = name.removeprefix(PREFIX).partition(".lora_")
    return inner.removesuffix(".base_layer") if is_lora else inner.rpartition(".")[0]


def _served(subject: Subject) -> tuple[str, set[str], str]:
    """Return the class that servers load, the names that it knows, and a problem."""
    config = AutoConfig.from_pretrained(subject.base.folder, trust_remote_code=False)
    architecture = (config.architectures or [""])[0]
    kind = getattr(transformers, architecture, None)
    if kind is None:
        return architecture, set(), f"Transformers has no class {architecture or 'in `architectures` of config.json'}"
    try:
        with torch.device("meta"):
            model = kind(config)
    except Exception as error:  # it may need another package, such as timm
        reason = " ".join(str(error).split())[:160]
        return architecture, set(), f"{architecture} cannot be built here: {type(error).__name__}: {reason}"
    # vLLM also knows the names of the checkpoint, which it maps to its own.
    stored = set[str]()
    with suppress(DataError):  # a precision that cannot be merged
        stored = {name.rpartition(".")[0] for name in tensors_of_model(subject.base.folder).places}
    return architecture, {name for name, _ in model.named_modules()} | stored, ""


def _refused(config: dict[str, Any], names: list[str]) -> Iterator[str]:
    """Yield what vLLM or SGLang refuses, or does not apply as PEFT does."""
    if config.get("use_dora"):
        yield "vLLM refuses DoRA (use_dora)"
    if config.get("modules_to_save"):
        yield f"vLLM refuses modules that were trained as a whole (modules_to_save: {config['modules_to_save']})"
    if config.get("bias", "none") != "none":
        yield f"vLLM refuses biases (bias: {config['bias']})"
    for name in ("rank_pattern", "alpha_pattern"):
        if config.get(name):
            yield f"vLLM scales all layers by lora_alpha / r, and ignores {name}"
    if int(config.get("r") or 0) > RANKS[-1]:
        yield f"vLLM refuses a rank above {RANKS[-1]} (r: {config['r']})"
    if config.get("target_parameters") or any(".experts.base_layer.lora_" in name for name in names):
        yield "stacked experts (target_parameters): vLLM and SGLang drop, refuse, or transpose them, by release"
