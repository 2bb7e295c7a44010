"""Merge a run, from its base model and adapter to the finished folder.

    run, base ─▶ adapter checked ─▶ weights, each layer compared ─▶ config ─▶ logits, losses compared ─▶ card ─▶ renamed

    .NAME.merging/   locked while the model is written and checked; the next merge of the same run clears it
    NAME/            renamed from it at the end; merge.json names the run, and every file with its size and SHA-256

Comparisons are printed to standard error. Of these, the card has the losses, to four decimals. All others may depend on
the machine.
"""

from __future__ import annotations

import gc
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoConfig

from packcorpus.tasks.core.errors import Busy, DataError, StorageError, UsageError
from packcorpus.tasks.core.printable import counted, in_bytes, printable
from packcorpus.tasks.core.process import free_disk
from packcorpus.tasks.storage.files import (
    acquire_lock,
    make_folder,
    read_json,
    sha256_of,
    sync_folder,
    to_json,
    write_bytes,
)
from packcorpus.train.machine import devices, process
from packcorpus.train.machine.devices import called, free_memory
from packcorpus.train.measures import ROUTING
from packcorpus.train.merge.dequantized import Dequantized, dequantized_of
from packcorpus.train.merge.find_run import Base, Run
from packcorpus.train.merge.losses import Losses, Pieces, mean_loss, pieces_of
from packcorpus.train.merge.other_files import CARD, Facts, Onto, find_facts, model_card, write_other_files
from packcorpus.train.merge.tensors import PRECISIONS, Tensors, tensors_of_model
from packcorpus.train.merge.weights import (
    FILE,
    FIX,
    NAME,
    Adapter,
    Merging,
    find_ties,
    load_merged,
    read_config,
    write_weights,
)
from packcorpus.train.model import base_model
from packcorpus.train.model.checkpoint import auto_class
from packcorpus.train.model.qlora import load_exactly
from packcorpus.train.model.quantization import how_to_load

VERSION = 1
NAMES = {dtype: name for name, dtype in PRECISIONS.items()}
RECORD, LOCK = "merge.json", "merge.lock"
# Bytes of disk space for the tokenizer, configs, and card.
OTHER_FILES = 100_000_000


def _say(line: str) -> None:
    print(printable(line), file=sys.stderr, flush=True)


def merge(
    run: Run, base: Base, wanted: str | None, output: Path | None, root: Path, base_weights: Onto | None = None
) -> Path:
    """Merge a run into `output` unless this is already done, and return the folder.

    `base_weights` are those that the adapter is added to: by default those that the run computed with.
    """
    base_model.silence_libraries()
    tensors = tensors_of_model(base.folder)
    if not wanted and tensors.precision not in NAMES:
        raise DataError("bad_model", f"base_model: {base.folder}: is stored in {tensors.precision}; choose a --dtype")
    dtype = wanted or NAMES[tensors.precision]
    path = run.folder / FILE
    if not path.is_file():
        raise DataError("damaged_adapter", f"{path}: is missing; {FIX}")
    digest = sha256_of(path)
    if run.record.get("adapter_sha256") not in (None, digest):
        text = f"{path}: differs from the file that the run wrote (SHA-256 {digest[:12]}); {FIX}"
        raise DataError("damaged_adapter", text)
    usual: Onto = "dequantized" if run.record["config"].get("quantization") == "nf4" else "original"
    onto = base_weights or usual
    if onto == "dequantized" != usual:
        text = f"--base dequantized: {run.folder} was trained with quantization: none; use --base original"
        raise UsageError("bad_command_line", text)
    name = f"{run.folder.resolve().name}-{dtype}" + f"-{onto}" * (onto != usual)
    folder = output or root / "data" / "merged" / name
    identity = {
        "version": VERSION,
        "run": run.key,
        "adapter": digest,
        "base": base.digest or f"{base.name}@{base.commit}",
        "dtype": dtype,
        "base_weights": onto,
    }
    if is_merged(folder, identity):
        _say("already merged, nothing to do")
        return folder
    _check_disk(folder, tensors, PRECISIONS[dtype])
    try:
        with being_written(folder) as temporary:
            _write(temporary, run, base, tensors, dtype, onto, root)
            write_record(temporary, identity)
    except OSError as error:  # a library cannot write, for example to a full disk
        raise StorageError("cannot_write", f"{folder}: cannot be written: {error.strerror or error}") from error
    return folder


def _check_disk(folder: Path, tensors: Tensors, dtype: torch.dtype, added: int = 0) -> None:
    """Raise StorageError if the weights and `added` bytes do not fit on the disk."""
    main = tensors.precision
    changed = added + sum(place.bytes for place in tensors.places.values() if place.dtype == main)
    needed = tensors.bytes + added - changed + changed * dtype.itemsize // main.itemsize + OTHER_FILES
    if (free := free_disk(folder)) is not None and free < needed:
        raise StorageError(
            "cannot_write",
            f"{folder}: needs {in_bytes(needed)}, but only {in_bytes(free)} are free; free some space, or choose "
            "another --output",
        )


def without_weights(base: Base) -> Any:
    """Return the base model on the device `meta`."""
    try:
        config = AutoConfig.from_pretrained(base.folder, trust_remote_code=False)
        with torch.device("meta"):
            return auto_class(base.folder, config).from_config(config, trust_remote_code=False)
    except (OSError, ValueError, KeyError, RuntimeError, ImportError) as error:
        raise base_model.unreadable(base.folder, error) from None


def _write(folder: Path, run: Run, base: Base, tensors: Tensors, dtype: str, onto: Onto, root: Path) -> None:
    """Write and check everything in `folder`."""
    precision = PRECISIONS[dtype]
    model = without_weights(base)
    adapter = Adapter(run.folder, model)
    zero = adapter.is_zero()
    ties = find_ties(model, tensors, adapter)
    nf4 = dequantized_of(run, base, model)
    merging = Merging(adapter, ties, precision, nf4 if onto == "dequantized" else None)
    merged_as = str(adapter)
    weights = "dequantized " * bool(merging.nf4) + "weights"
    _say(f"merging {merged_as} into the {weights} of {base.name} ({in_bytes(tensors.bytes)}), in {dtype}")
    if tensors.packed:
        _say(f"weights: experts that are stored in MXFP4 are written in {dtype}")
    if apart := str(ties):
        added = sum(tensors.places[source].bytes for source in ties.copies.values())
        _check_disk(folder.parent, tensors, precision, added)
        _say(f"weights: {apart}, because the adapter changes them differently")
        merged_as += f"; {apart}"
    write_weights(folder, base.folder, model, tensors, merging)
    how = f"the whole model in memory, because {merging.whole}" if merging.whole else "one layer in memory at a time"
    _say(f"weights: written with {how}")
    _say(f"layers: each compared with the unmerged adapter; the largest difference is {merging.largest:.1e}")
    facts, note = find_facts(run.record, root)
    if note:
        _say(f"note: {note}; the check uses random tokens, and the card has less information")
    in_config = str(precision).removeprefix("torch.")
    others = write_other_files(folder, base, run, facts, in_config, ties.settings)
    _say(f"chat template: {others.template}")
    if facts and facts.corpus and base_model.has_tokenizer(folder):
        _say(base_model.described(base_model.compare_rows(facts.manifest, facts.corpus.folder, folder)))
    losses = _compare(folder, run, base, tensors, facts, merging, nf4, zero)
    card = model_card(run, base, facts, others, dtype, merged_as, bool(merging.whole), zero, onto, losses)
    write_bytes(folder / CARD, card)


def _compare(
    folder: Path,
    run: Run,
    base: Base,
    tensors: Tensors,
    facts: Facts | None,
    merging: Merging,
    nf4: Dequantized | None,
    zero: bool,
) -> Losses | None:
    """Compare the logits and the losses, print the result, and return the losses."""
    adapter, dtype = merging.adapter, NAMES[merging.dtype]
    config = AutoConfig.from_pretrained(base.folder, trust_remote_code=False)
    rows = facts.rows(ROWS, TOKENS) if facts else []
    ids = inputs(rows, config)
    weights = sum(place.bytes // place.dtype.itemsize for place in tensors.places.values())
    pieces = pieces_of(facts.corpus, weights) if facts and facts.corpus else None
    places = places_that_fit(tensors_of_model(folder), adapter.whole_size(), merging.dtype)
    pieces = pieces if pieces and pieces.trained else None
    losses: Losses | None = None
    # An error may leave the GPU unusable, so it is used only if it is the first place.
    for place in [*places[:1], *(other for other in places[1:] if other.device == "cpu")]:
        kind, in_precision = called(place.device), NAMES[place.dtype]
        try:
            expected, alone = logits_of_base(base.folder, run.folder, ids, place, merging.nf4)
            found = logits_of(folder, ids, place)
            losses = _losses(folder, run, base, tensors, merging, nf4, pieces, place) if pieces else None
        except RuntimeError as error:
            if place.device == "cpu":
                raise
            _say(f"logits: the {kind} {process.described(error)} in {in_precision}")
        else:
            break
    else:
        _say(f"logits: not compared: the model does not fit into the {in_bytes(free_memory())} of free main memory")
        return None
    result = compare(expected, alone, found, merging.dtype)
    _say(
        f"logits: {counted(result.tokens, 'token')} {'of the corpus' if rows else 'drawn at random'}, computed in "
        f"{in_precision} on the {kind}: the largest relative difference to base plus adapter is {result.largest:.1e} "
        f"(allowed: {result.limit:g}); the most likely token is the same for {result.agreement:.1%}"
    )
    if zero:
        _say(f"adapter: every B is zero, so the merged model is the {'dequantized ' * bool(merging.nf4)}base model")
    else:
        _say(f"adapter: changes the logits by {result.effect:.1e}; rounding hides {result.lost:.1%} of that")
    _say(f"loss: {losses}" if losses else "loss: not measured, because the rows of the corpus are missing")
    if losses and losses.is_other_lower():
        _say("note: the loss is lower with the original weights of the base model: merge with --base original")
    require_same(result, has_experts(config), dtype)
    return losses


def _losses(
    folder: Path,
    run: Run,
    base: Base,
    tensors: Tensors,
    merging: Merging,
    nf4: Dequantized | None,
    pieces: Pieces,
    place: Place,
) -> Losses:
    """Return the losses of the training, of the merged model, and of the other merge."""
    # One model is in memory at a time.
    model = _load(base.folder, place)
    if nf4:
        nf4.apply(model)
    training = mean_loss(_with_adapter(model, run.folder, place), pieces)
    del model
    written, other = mean_loss(_load(folder, place), pieces), None
    if nf4:
        others = replace(merging, nf4=None if merging.nf4 else nf4)
        gc.collect()
        other = mean_loss(load_merged(base.folder, tensors, others).to(place.device, place.dtype).eval(), pieces)
    return Losses(pieces.trained, pieces.kind, training, written, other, bool(merging.nf4))


# -- the folder --------------------------------------------------------------------------------------------------------


def is_merged(folder: Path, identity: dict[str, Any]) -> bool:
    """Return whether `folder` contains this merge, complete; False if it is empty."""
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return False
    try:
        found = read_json(folder / RECORD)
    except StorageError:
        found = None
    fault = ""
    earlier = {"base_weights": "original"}  # of a version that had no other
    if isinstance(found, dict):
        found = earlier | found
    if not isinstance(found, dict) or not isinstance(found.get("files"), dict):
        fault = f"{folder}: exists and is not a merged model; choose another --output, or delete it"
    elif changed := [name for name, value in identity.items() if found.get(name) != value]:
        wanted = ", ".join(f"{name} {str(found.get(name))[:12]}, now {str(identity[name])[:12]}" for name in changed)
        fault = f"{folder}: contains a different merge ({wanted}); choose another --output, or delete it"
    else:
        for name, facts in found["files"].items():
            path = folder / name
            if not path.is_file() or path.stat().st_size != facts["bytes"]:
                fault = f"{path}: is missing or truncated; delete {folder}, then merge again"
    if fault:
        raise UsageError("merge_folder_taken", fault)
    return True


@contextmanager
def being_written(folder: Path) -> Iterator[Path]:
    """Yield an empty folder that becomes `folder`, or is removed on an error."""
    folder = folder.absolute()
    temporary = folder.with_name(f".{folder.name}.merging")
    make_folder(temporary)
    if not acquire_lock(temporary / LOCK):
        raise Busy("busy", f"{temporary}: another merge is writing this model; wait until it ends, then retry")
    for path in temporary.iterdir():  # of an interrupted merge
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name != LOCK:
            path.unlink()
    try:
        yield temporary
        sync_folder(temporary)
        os.rename(temporary, folder)  # the lock moves along, so no process takes the folder for abandoned
        (folder / LOCK).unlink(missing_ok=True)
        sync_folder(folder)
        sync_folder(folder.parent)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def write_record(folder: Path, identity: dict[str, Any]) -> None:
    """Write merge.json once every other file is on disk."""
    files = {}
    for path in sorted(path for path in folder.iterdir() if path.is_file() and path.name not in (LOCK, RECORD)):
        with path.open("rb") as file:
            os.fsync(file.fileno())
        files[path.name] = {"bytes": path.stat().st_size, "sha256": sha256_of(path)}
    write_bytes(folder / RECORD, to_json(identity | {"files": files}))


ROWS, TOKENS = 2, 256

# Largest relative difference of a token's logits that rounding can explain, by the precision of the merged weights. The
# limits are more than twice the differences in tiny models of 38 architectures with random weights and no experts:
# 2e-5, 4e-2, and 2.3e-1. Trained models are less sensitive. LOST limits the change of an adapter's effect, and
# LAYER_LIMITS the change of each layer.
LIMITS = {torch.float32: 1e-3, torch.float16: 1e-1, torch.bfloat16: 5e-1}
# Share of the tokens that may exceed the limit if the model has experts: rounding sends some tokens to other experts.
BEYOND = 0.2
# Share of the adapter's effect that rounding may hide.
LOST = 0.5
# An adapter that changes the logits by less has not learned anything that could be lost.
NO_EFFECT = 1e-4

# A model needs at most this multiple of the size of its weights.
ROOM = 1.25


@dataclass(frozen=True, slots=True)
class Comparison:
    """Differences of logits, relative to their size without their mean."""

    tokens: int
    largest: float
    limit: float
    beyond: float  # share of the tokens above the limit
    agreement: float  # share of the tokens with the same most likely next token
    effect: float  # of the adapter on the logits of the base model
    lost: float  # difference, as a share of the effect


@dataclass(frozen=True, slots=True)
class Place:
    """Device and precision in which logits are computed."""

    device: Literal["cuda", "cpu"]
    dtype: torch.dtype


def places_that_fit(tensors: Tensors, whole: int, dtype: torch.dtype) -> list[Place]:
    """Return the places where a model fits into the free memory, the best first.

    The precision is fp32, or else `dtype`, the precision of the merged weights. A GPU is faster, but never a reason for
    a lower precision, which would hide more of the differences. `whole` is the number of weights that the adapter has
    in addition to the weights of the base model.
    """
    weights = whole + sum(place.bytes // place.dtype.itemsize for place in tensors.places.values())
    places = [Place(device, one) for one in dict.fromkeys((torch.float32, dtype)) for device in ("cuda", "cpu")]
    free = {"cuda": free_on_gpu(), "cpu": free_memory()}
    return [place for place in places if ROOM * weights * place.dtype.itemsize <= free[place.device]]


def free_on_gpu() -> int:
    """Return the free bytes of the GPU; 0 without a GPU that torch can use."""
    try:
        if not devices.gpu_count() or devices.no_code_reason():
            return 0
        return int(torch.cuda.mem_get_info()[0])
    except RuntimeError:  # it has no memory left for a context, or its driver fails
        return 0


def inputs(rows: Sequence[Sequence[int]], config: Any) -> torch.Tensor:
    """Return token IDs [rows, tokens] of the corpus, or random IDs without `rows`."""
    config = config.get_text_config()
    length = min([TOKENS, *map(len, rows), base_model.positions(config) or TOKENS])
    if rows:
        return torch.tensor([row[:length] for row in rows])
    return torch.randint(config.vocab_size, (ROWS, length), generator=torch.Generator().manual_seed(0))


@torch.inference_mode()
def logits_of_base(
    base: Path, adapter: Path, ids: torch.Tensor, place: Place, nf4: Dequantized | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the logits of the base model with the unmerged adapter, and without it."""
    model = _load(base, place)
    if nf4:
        nf4.apply(model)
    alone = logits_of_model(model, ids)  # before PEFT, which replaces some tied weights of the base model
    return logits_of_model(_with_adapter(model, adapter, place), ids), alone


def _with_adapter(model: Any, adapter: Path, place: Place) -> Any:
    # Without torch_device, PEFT reads an adapter to the GPU if there is one.
    found = PeftModel.from_pretrained(
        model, str(adapter), adapter_name=NAME, config=read_config(adapter), torch_device=place.device
    )
    load_exactly(found, load_file(adapter / FILE), NAME)
    return found.eval()


@torch.inference_mode()
def logits_of(folder: Path, ids: torch.Tensor, place: Place) -> torch.Tensor:
    """Return the logits of a model."""
    return logits_of_model(_load(folder, place), ids)


def _load(folder: Path, place: Place) -> Any:
    where: dict[str, Any] = {}
    gc.collect()  # the previous model is part of reference cycles
    if place.device == "cuda":
        where["device_map"] = {"": place.device}  # each weight directly, without a copy of the model in main memory
        torch.cuda.empty_cache()
        # TF32 would round to 10 bits, and the limit for fp32 is 1e-3. Some containers turn it on.
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    auto = auto_class(folder, base_model.read_config(folder))
    model = auto.from_pretrained(
        folder, **how_to_load(folder, None), dtype=place.dtype, use_safetensors=True, trust_remote_code=False, **where
    )
    return model.eval()


def logits_of_model(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Return the logits [tokens, vocabulary] in fp32, minus the mean of each token."""
    # softmax ignores the mean. The logits are on the CPU.
    rows = ids.to(model.device)
    logits = torch.cat([model(input_ids=row[None], use_cache=False).logits[0].float().cpu() for row in rows])
    return logits - logits.mean(-1, keepdim=True)


def compare(expected: torch.Tensor, alone: torch.Tensor, found: torch.Tensor, weights: torch.dtype) -> Comparison:
    """Compare the logits of the merged model (`found`) with base plus adapter."""
    # `alone` are the logits of the base model, and `weights` is the precision of the merged weights.
    limit = LIMITS[weights]
    size = expected.norm(dim=-1).clamp_min(torch.finfo(torch.float32).tiny)
    off = (found - expected).norm(dim=-1) / size
    effect = float((expected - alone).norm() / expected.norm())
    return Comparison(
        tokens=len(off),
        largest=float(off.max()),
        limit=limit,
        beyond=float((~(off <= limit)).float().mean()),
        agreement=float((found.argmax(-1) == expected.argmax(-1)).float().mean()),
        effect=effect,
        lost=float((found - expected).norm() / (expected - alone).norm()) if effect else 0.0,
    )


def has_experts(config: Any) -> bool:
    """Return whether a model routes tokens to experts."""
    return any((getattr(config.get_text_config(), name, None) or 0) > 1 for name in ROUTING[1])


def require_same(comparison: Comparison, experts: bool, precision: str) -> None:
    """Raise DataError unless the merged model equals base plus adapter."""
    # Rounding may send some tokens to other experts.
    fix = "report this with your training.json" if precision == "fp32" else "merge with --dtype fp32"
    if not comparison.beyond <= (BEYOND if experts else 0):
        raise DataError(
            "merge_differs",
            f"the logits of the merged model differ by up to {comparison.largest:.1e} from those of base plus adapter, "
            f"for {comparison.beyond:.1%} of {comparison.tokens} tokens by more than {comparison.limit:g} (relative); "
            f"{fix}",
        )
    if comparison.effect > NO_EFFECT and not comparison.lost <= LOST:
        raise DataError(
            "merge_differs",
            f"rounding to {precision} hides {min(comparison.lost, 1):.0%} of what the adapter changes in the logits "
            f"({comparison.effect:.1e}, relative); {fix}",
        )
