"""Compare the stop tokens, the weights, and the logits of the merged model.

    rows of the corpus, its template ─▶ tokens that end an answer ─▶ eos_token_id of generation_config.json
    tensors of base and merged folder ─▶ names, shapes, precision, tied and vocabulary-sized weights
    base + adapter, base in NF4 + adapter as in training, merged: one model in memory at a time ─▶ logits

Rounding limits the difference between merged and unmerged (`train.merge.merge_run.LIMITS`). NF4 changes the base
itself, so a run in NF4 is allowed twice the difference that NF4 makes to the base without the adapter.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from packcorpus.tasks.core.errors import DataError
from packcorpus.tasks.core.printable import counted, in_bytes, shown
from packcorpus.tasks.storage.files import read_json, sha256_of
from packcorpus.train.certify.finding import Finding, Of, Subject
from packcorpus.train.config import TrainingConfig
from packcorpus.train.machine.devices import called, free_memory
from packcorpus.train.merge.find_run import Base
from packcorpus.train.merge.merge_run import (
    NAMES,
    NO_EFFECT,
    RECORD,
    ROWS,
    TOKENS,
    Comparison,
    Place,
    compare,
    has_experts,
    inputs,
    logits_of,
    logits_of_base,
    logits_of_model,
    places_that_fit,
    require_same,
    without_weights,
)
from packcorpus.train.merge.tensors import PRECISIONS, tensors_of_model
from packcorpus.train.merge.weights import FILE
from packcorpus.train.model.qlora import load_model

ANSWERS = 256  # rows whose answers are searched for stop tokens
# NF4 changes base and adapted base alike, up to this factor.
ALIKE = 2.0


def check_stops(subject: Subject) -> Iterator[Finding]:
    """Compare the tokens that end a generation with those that training taught."""
    facts = subject.facts
    for of, folder in subject.folders.items():
        if facts is None or facts.encoder is None:
            yield Finding("stops", of, "skipped", "the corpus is missing")
            continue
        *ends, eos = facts.stop_tokens()
        stops = _stops(folder)
        names = {token: shown(facts.encoder.control_strings.get(token, str(token))) for token in (*ends, eos, *stops)}
        place = folder / "generation_config.json"
        if lost := [token for token in ends or [eos] if token not in stops]:
            ours = ", ".join(names[token] for token in stops) or "nothing"
            text = f"{place}: generation stops at {ours}, but an answer ends with {names[lost[0]]} ({lost[0]}), so it"
            yield Finding("stops", of, "FAULT", f"{text} does not stop; add {lost[0]} to eos_token_id")
        elif early := _early(subject, stops):
            text = f"{place}: {names[early]} ({early}) stops generation, but answers have it in the middle"
            yield Finding("stops", of, "FAULT", f"{text}; remove {early} from eos_token_id")
        else:
            taught = ", ".join(names[token] for token in ends or [eos])
            yield Finding("stops", of, "ok", f"generation stops at {taught}, as training taught")


def _stops(folder: Path) -> list[int]:
    """Return the tokens at which Transformers and vLLM stop."""
    for name in ("generation_config.json", "config.json"):
        values = read_json(folder / name) if (folder / name).is_file() else {}
        found = values.get("eos_token_id", (values.get("text_config") or {}).get("eos_token_id"))
        if found is not None:
            return found if isinstance(found, list) else [found]
    return []


def _early(subject: Subject, stops: list[int]) -> int | None:
    """Return a stop token that is followed by other tokens of its answer."""
    facts = subject.facts
    if facts is None or facts.encoder is None or facts.manifest.train_on == "all":
        return None
    encoder = facts.encoder
    for ids, labels in facts.labeled_rows(ANSWERS):
        for here, following, label, next_label in zip(ids, ids[1:], labels, labels[1:], strict=False):
            is_inside = label >= 0 and next_label >= 0 and here in stops and following not in stops
            if is_inside and encoder.decode([following]).strip():
                return here
    return None


# -- the folder --------------------------------------------------------------------------------------------------------


def check_weights(subject: Subject) -> Iterator[Finding]:
    """Check record, names, shapes, precision, and shared weights of the merge."""
    if subject.merged is None:
        yield Finding("weights", "merged", "skipped", "there is no merged model")
        return
    found = [*_of_run(subject, subject.merged), *_tensors(subject.base, subject.merged)]
    found += _embeddings(subject, subject.merged)
    for text in found:
        yield Finding("weights", "merged", "FAULT", f"{text}; merge again: packcorpus train merge {subject.run.folder}")
    if not found:
        text = "names, shapes, precision, and shared weights fit config.json and the base model"
        yield Finding("weights", "merged", "ok", text)


def _of_run(subject: Subject, folder: Path) -> Iterator[str]:
    record = read_json(folder / RECORD) if (folder / RECORD).is_file() else {}
    if not record:
        return
    wanted = {"run": subject.run.key, "adapter": sha256_of(subject.run.folder / FILE)}
    for name, value in wanted.items():
        if record.get(name) != value:
            yield f"{folder / RECORD}: {name} is {str(record.get(name))[:12]}, but that of the run is {value[:12]}"
    for name, facts in record.get("files", {}).items():
        path = folder / name
        if name.endswith(".safetensors") and (not path.is_file() or path.stat().st_size != facts["bytes"]):
            yield f"{path}: is missing or truncated"


def _tensors(base: Base, folder: Path) -> Iterator[str]:
    before, after = tensors_of_model(base.folder), tensors_of_model(folder)
    config = read_json(folder / "config.json")
    for part in (config, config.get("text_config") or {}):
        named = part.get("dtype") or part.get("torch_dtype")
        if named is not None and PRECISIONS.get(NAMES.get(after.precision, "")) != getattr(torch, str(named), None):
            yield f"{folder}: config.json has dtype {named}, but most weights are {after.precision}"
    shared = set(without_weights(base).all_tied_weights_keys)
    if lost := sorted(before.places.keys() - after.places.keys() - shared):
        yield f"{folder}: lacks {counted(len(lost), 'tensor')} of the base model, such as {lost[0]}"
    for name in sorted(before.places.keys() & after.places.keys()):
        one, other = before.places[name].shape, after.places[name].shape
        if one != other:
            yield f"{folder}: {name} has {list(other)}, and the base model has {list(one)}"


def _embeddings(subject: Subject, folder: Path) -> Iterator[str]:
    model = without_weights(Base(folder, folder.name, None, None))
    tensors, config = tensors_of_model(folder), model.config.get_text_config()
    names = [_name_of(model, module) for module in (model.get_input_embeddings(), model.get_output_embeddings())]
    for name in names:
        if name in tensors.places and tensors.places[name].shape[0] != config.vocab_size:
            rows = tensors.places[name].shape[0]
            yield f"{folder}: {name} has {rows} rows, but vocab_size in config.json is {config.vocab_size}"
    if subject.facts and subject.facts.manifest.tokenizer.vocab_size > config.vocab_size:
        yield f"{folder}: the tokenizer has {subject.facts.manifest.tokenizer.vocab_size} ids, the model fewer"
    embeddings, head = names
    if not getattr(model.config, "tie_word_embeddings", False) or not head or embeddings == head:
        return
    is_stored = head in tensors.places and embeddings in tensors.places
    if is_stored and not torch.equal(tensors.read(head), tensors.read(embeddings)):
        yield f"{folder}: config.json has tie_word_embeddings, but {head} and {embeddings} differ"


def _name_of(model: Any, module: Any) -> str:
    weight = getattr(module, "weight", None)
    return next((f"{name}.weight" for name, one in model.named_modules() if one is module and weight is not None), "")


# -- logits ------------------------------------------------------------------------------------------------------------


def check_logits(subject: Subject) -> Iterator[Finding]:
    """Compare the logits of merged and unmerged, with the base as stored and in NF4."""
    base, run = subject.base, subject.run
    of: Of = "merged" if subject.merged else "adapter"
    config = AutoConfig.from_pretrained(base.folder, trust_remote_code=False)
    if stored := getattr(config, "quantization_config", None):
        method = stored.get("quant_method") if isinstance(stored, dict) else stored.quant_method
        yield Finding("logits", of, "skipped", f"the base model is stored in low precision ({method})")
        return
    tensors = tensors_of_model(subject.merged or base.folder)
    precision = tensors.precision if tensors.precision in NAMES else torch.bfloat16
    places = places_that_fit(tensors_of_model(base.folder), 0, precision)
    if not places:
        size = in_bytes(free_memory())
        yield Finding("logits", of, "skipped", f"the model does not fit into the {size} of free main memory")
        return
    place = places[0]
    ids = inputs(subject.facts.rows(ROWS, TOKENS) if subject.facts else [], config)
    expected, alone = logits_of_base(base.folder, run.folder, ids, place)
    how = f"{counted(len(expected), 'token')}, in {NAMES[place.dtype]} on the {called(place.device)}"
    if not expected.isfinite().all():
        yield Finding("logits", "run", "FAULT", f"those of base plus adapter are not finite ({how}); train again")
        return
    if subject.merged is None:
        effect = _off(alone, expected)
        text = f"the adapter changes the logits by {effect:.1e} ({how})"
        yield Finding("logits", of, "ok" if effect > NO_EFFECT else "FAULT", text)
        return
    found = logits_of(subject.merged, ids, place)
    compared, is_moe = compare(expected, alone, found, precision), has_experts(config)
    problem = _problem(compared, is_moe, precision)
    trained, quantized = _in_nf4(subject, ids, place)
    if trained is not None and quantized is not None:
        if not _problem(compare(trained, quantized, found, precision), is_moe, precision):
            problem = ""  # the merge is into the dequantized weights
        off, error = _off(found, trained), _off(quantized, alone)
        limit = ALIKE * error + compared.limit
        text = f"to base in NF4 plus adapter, as in training: {off:.1e} (allowed: {limit:.1e}, because NF4 alone"
        text += f" changes the base by {error:.1e})"
        yield Finding("logits", of, "ok" if off <= limit else "FAULT", text)
        how = f"for rounding, to this one or to the one in NF4; {how}"
    else:
        how = f"for rounding; {how}"
    text = f"to base plus adapter: {compared.largest:.1e} (allowed: {compared.limit:g}, {how})"
    yield Finding("logits", of, "FAULT" if problem else "ok", problem or text)


def _problem(compared: Comparison, is_moe: bool, precision: torch.dtype) -> str:
    """Return why the merged model is not the unmerged one; "" if it is."""
    try:
        require_same(compared, is_moe, NAMES[precision])
    except DataError as error:
        return str(error)
    return ""


def _off(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the relative difference of all logits."""
    return float((found - expected).norm() / expected.norm())


def _in_nf4(subject: Subject, ids: torch.Tensor, place: Place) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return the logits of the model as it was trained, with and without its adapter."""
    # None if the base was not quantized.
    settings = subject.run.record["config"]
    if settings.get("quantization") != "nf4":
        return None, None
    known = {name: value for name, value in settings.items() if name in TrainingConfig.model_fields}
    changed = {"adapter": str(subject.run.folder), "activation_checkpointing": False, "sharding": "none"}
    config = TrainingConfig(**known | changed)
    model = load_model(subject.base.folder, config, place.device, place.dtype).eval()
    with torch.inference_mode():
        trained = logits_of_model(model, ids)
        with model.disable_adapter():
            return trained, logits_of_model(model, ids)
