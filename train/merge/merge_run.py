"""Merge a run, from its base model and adapter to the finished folder.

    run, base ─▶ adapter checked ─▶ weights, each layer compared ─▶ config, card ─▶ logits compared ─▶ renamed

Comparisons are printed to standard error. They are not written, because they may depend on the machine.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tasks.core.errors import DataError, StorageError
from tasks.core.printable import counted, in_bytes, printable
from tasks.storage.files import sha256_of, write_bytes
from train.machine import out_of_memory
from train.machine.devices import free_disk, free_memory
from train.merge import compare
from train.merge.companions import write_companions
from train.merge.corpus_facts import Facts, find_facts
from train.merge.find_run import Base, Run
from train.merge.model_card import CARD, model_card
from train.merge.output_folder import being_written, is_merged, write_record
from train.merge.weights.adapter import FILE, FIX, Adapter, described
from train.merge.weights.tensor_files import Tensors, tensors_of_model
from train.merge.weights.ties import find_ties
from train.merge.weights.write import PRECISIONS, main_precision, write_weights
from train.model import same_tokenizer
from train.model.base_model import has_tokenizer, silence_libraries, unreadable

VERSION = 1
NAMES = {dtype: name for name, dtype in PRECISIONS.items()}
# Bytes of disk space for the tokenizer, configs, and card.
OTHER_FILES = 100_000_000


def merge(run: Run, base: Base, wanted: str | None, output: Path | None, root: Path) -> Path:
    """Merge a run into `output` unless this is already done, and return the folder."""
    silence_libraries()
    tensors = tensors_of_model(base.folder)
    own = main_precision(tensors)
    if not wanted and own not in NAMES:
        raise DataError("bad_model", f"base_model: {base.folder}: is stored in {own}; choose a --dtype")
    dtype = wanted or NAMES[own]
    folder = output or root / "data" / "merged" / f"{run.folder.resolve().name}-{dtype}"
    identity = {
        "version": VERSION,
        "run": run.key,
        "adapter": _check_adapter(run),
        "base": base.digest or f"{base.name}@{base.commit}",
        "dtype": dtype,
    }
    if is_merged(folder, identity):
        _say("already merged, nothing to do")
        return folder
    _check_disk(folder, tensors, PRECISIONS[dtype])
    try:
        with being_written(folder) as temporary:
            _write(temporary, run, base, tensors, dtype, root)
            write_record(temporary, identity)
    except OSError as error:  # a library cannot write, for example to a full disk
        raise StorageError("cannot_write", f"{folder}: cannot be written: {error.strerror or error}") from error
    return folder


def _say(line: str) -> None:
    print(printable(line), file=sys.stderr, flush=True)


# -- before --------------------------------------------------------------------------------------------------------


def _check_adapter(run: Run) -> str:
    """Return the digest of the adapter's file.

    Raises DataError if the file is missing or differs from the file that the run wrote.
    """
    path = run.folder / FILE
    if not path.is_file():
        raise DataError("damaged_adapter", f"{path}: is missing; {FIX}")
    digest, expected = sha256_of(path), run.record.get("adapter_sha256")
    if expected not in (None, digest):
        raise DataError(
            "damaged_adapter", f"{path}: differs from the file that the run wrote (SHA-256 {digest[:12]}); {FIX}"
        )
    return digest


def _check_disk(folder: Path, tensors: Tensors, dtype: torch.dtype, added: int = 0) -> None:
    """Raise StorageError if the weights do not fit on the disk.

    `added` is the number of bytes of weights that the base model does not store.
    """
    main = main_precision(tensors)
    weights = sum(
        place.bytes * dtype.itemsize // main.itemsize if place.dtype == main else place.bytes
        for place in tensors.places.values()
    )
    weights += added * dtype.itemsize // main.itemsize
    if (free := free_disk(folder)) < weights + OTHER_FILES:
        raise StorageError(
            "cannot_write",
            f"{folder}: needs {in_bytes(weights + OTHER_FILES)}, but only {in_bytes(free)} are free; free some space, "
            "or choose another --output",
        )


# -- the merge -----------------------------------------------------------------------------------------------------


def _write(folder: Path, run: Run, base: Base, tensors: Tensors, dtype: str, root: Path) -> None:
    """Write and check everything in `folder`."""
    model = _without_weights(base)
    adapter = Adapter(run.folder, model)
    zero = adapter.is_zero()
    ties = find_ties(model, tensors, adapter)
    size = sum(place.bytes for place in tensors.places.values())
    _say(f"merging {described(adapter)} into {base.name} ({in_bytes(size)}), in {dtype}")
    if apart := ties.described():
        _check_disk(folder.parent, tensors, PRECISIONS[dtype], ties.added(tensors))
        _say(f"weights: {apart}, because the adapter changes them differently")
    written = write_weights(folder, base.folder, model, tensors, adapter, ties, PRECISIONS[dtype])
    how = f"the whole model in memory, because {written.whole}" if written.whole else "one layer in memory at a time"
    _say(f"weights: written with {how}")
    _say(f"layers: each compared with the unmerged adapter; the largest difference is {written.largest:.1e}")
    facts, note = find_facts(run.record, root)
    if note:
        _say(f"note: {note}; the check uses random tokens, and the card has less information")
    in_config = str(PRECISIONS[dtype]).removeprefix("torch.")
    companions = write_companions(folder, base, run, facts, in_config, ties.settings)
    _say(f"chat template: {companions.template}")
    if facts and facts.corpus and has_tokenizer(folder):
        _say(same_tokenizer.described(same_tokenizer.compare_rows(facts.manifest, facts.corpus.folder, folder)))
    merged_as = f"{described(adapter)}; {apart}" if apart else described(adapter)
    card = model_card(run, base, facts, companions, dtype, merged_as, bool(written.whole), zero)
    write_bytes(folder / CARD, card)
    _compare(folder, run, base, facts, model.config, adapter, dtype, zero)


def _without_weights(base: Base) -> Any:
    try:
        config = AutoConfig.from_pretrained(base.folder, trust_remote_code=False)
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise unreadable(base.folder, error) from None


def _compare(
    folder: Path, run: Run, base: Base, facts: Facts | None, config: Any, adapter: Adapter, dtype: str, zero: bool
) -> None:
    """Compare the logits and print the result.

    Raises DataError if they differ.
    """
    weights = PRECISIONS[dtype]
    rows = facts.rows(compare.ROWS, compare.TOKENS) if facts else []
    ids = compare.inputs(rows, config)
    places = compare.places_that_fit(tensors_of_model(folder), adapter.whole_size(), weights)
    # An error may leave the GPU unusable, so it is used only if it is the first place.
    for place in [*places[:1], *(other for other in places[1:] if other.device == "cpu")]:
        try:
            expected, alone = compare.logits_of_base(base.folder, run.folder, ids, place)
            found = compare.logits_of(folder, ids, place)
        except RuntimeError as error:
            if place.device == "cpu":
                raise
            _say(f"logits: the GPU {out_of_memory.described(error)} in {NAMES[place.dtype]}")
        else:
            break
    else:
        _say(f"logits: not compared: the model does not fit into the {in_bytes(free_memory())} of free main memory")
        return
    result = compare.compare(expected, alone, found, weights)
    source = "of the corpus" if rows else "drawn at random"
    _say(
        f"logits: {counted(result.tokens, 'token')} {source}, computed in {NAMES[place.dtype]} on the "
        f"{'GPU' if place.device == 'cuda' else 'CPU'}: the largest relative difference to base plus adapter is "
        f"{result.largest:.1e} (allowed: {result.limit:g}); the most likely token is the same for "
        f"{result.agreement:.1%}"
    )
    if zero:
        _say("adapter: every B is zero, so the merged model is the base model")
    else:
        _say(f"adapter: changes the logits by {result.effect:.1e}; rounding hides {result.lost:.1%} of that")
    compare.require_same(result, compare.has_experts(config), dtype)
