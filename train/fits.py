"""Report which rows of a model fit on which card, from its config alone.

config.json, lengths of the corpus ─Estimator─▶ bytes of 1 and of more rows ─▶ most rows per pass on each card
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from packcorpus.tasks.core.printable import counted
from packcorpus.train.config import TrainingConfig
from packcorpus.train.data.corpus import Corpus
from packcorpus.train.memory import ACTIVATIONS, LOGITS, MASKS, OTHER, WEIGHTS, Estimate, Estimator
from packcorpus.train.model import base_model
from packcorpus.train.model.attention import backend_to_load

CARDS = (8, 12, 16, 24, 32, 40, 48, 80, 96, 141)  # GB, as they are sold
USUAL, LENGTHS = 2048, (1024, 2048, 4096, 8192, 16384)  # tokens of a row
# Share of a card that passes can use, which leaves room for fragmentation and for cards that report less than they are
# sold with. CUDA and its libraries need some memory themselves.
SHARE, CONTEXT = 0.92, 0.6e9
PROBES = 1, 8  # rows for which a pass is traced
# Passes with fewer tokens are slow, because 4-bit weights are unpacked once per pass; more of them need checkpointing.
ENOUGH = 4096


def usable_bytes(card: int) -> float:
    """Return the bytes that the tensors of a run may need on a card."""
    return SHARE * card * 2**30 - CONTEXT


@dataclass(frozen=True)
class Fits:
    """What fits for one model and the settings of a run."""

    name: str
    settings: TrainingConfig
    lengths: tuple[int, ...]  # first the one whose parts are shown
    estimators: dict[bool, Estimator]  # by activation checkpointing

    def __post_init__(self) -> None:
        object.__setattr__(self, "estimate", cache(self.estimate))

    def estimate(self, checkpointing: bool, rows: int, length: int) -> Estimate:
        """Return the memory of a pass; traced for few rows, and linear in between."""
        if rows in PROBES:
            return self.estimators[checkpointing].estimate(rows, length)
        few, many = (self.estimate(checkpointing, size, length).parts for size in PROBES)
        share = (rows - PROBES[0]) / (PROBES[1] - PROBES[0])
        parts = {name: few.get(name, 0) + share * (many.get(name, 0) - few.get(name, 0)) for name in {**few, **many}}
        return Estimate(rows, length, parts)

    def rows(self, card: int, checkpointing: bool, length: int) -> int:
        """Return the most rows per pass that fit on a card, a power of 2, or 0."""
        size = 0
        most = max(1, self.settings.tokens_per_step // length)
        while (more := max(1, 2 * size)) <= most and self.estimate(checkpointing, more, length).total <= usable_bytes(
            card
        ):
            size = more
        return size


def fits_of(name: str, settings: TrainingConfig, corpus: Corpus | None) -> Fits:
    """Return what fits for a model; `corpus` adds its lengths and its trained tokens."""
    import torch

    base_model.silence_libraries()
    base = base_model.base_model(settings, 1, 1, Path())
    config = base_model.read_config(base)
    own = tuple(reversed(corpus.lengths)) if corpus else (USUAL,)
    longest = base_model.positions(config.get_text_config())
    if corpus:
        base_model.check_model(base, config, 0, corpus.sequence_length)
    lengths = tuple(length for length in dict.fromkeys((*own, *LENGTHS)) if length <= (longest or length))
    lengths = lengths or ((longest,) if longest else own)
    trained = 1.0
    if corpus and corpus.manifest:
        ledger = corpus.manifest.ledger
        trained = ledger.tokens.trained / max(1, ledger.tokens.packed)
    fastest = "sdpa" if corpus and corpus.layout.is_shared else "varlen"  # a mask may be the fastest for trees
    wanted = fastest if settings.attention == "auto" else settings.attention
    backend = backend_to_load(config, wanted if wanted in ("sdpa", "eager") else "auto")[0]
    attention = wanted if backend == "sdpa" or wanted == "eager" else backend
    estimators = {
        how: Estimator(
            base,
            settings.model_copy(update={"activation_checkpointing": how}),
            torch.bfloat16,
            attention,
            fused=settings.fused_loss is not False,
            trained=trained,
        )
        for how in (True, False)
    }
    return Fits(name, settings, lengths, estimators)


def show(found: Fits, console: Console) -> None:
    """Print the rows that fit by card and length, and the parts for the first length."""
    static = found.estimators[True].static
    lengths = sorted(found.lengths[:6])
    for line in _head(found, static):
        console.print(line, soft_wrap=True)
    table = _table("card", *(f"{length:,}" for length in lengths))
    for card in CARDS:
        cells = ((found.rows(card, how, length) for how in (True, False)) for length in lengths)
        table.add_row(f"{card} GB", *(" | ".join(str(rows) if rows else "–" for rows in cell) for cell in cells))
    console.print(table)
    length = found.lengths[0]
    console.print(f"\nGB for rows of {length:,} tokens, with the settings that are probably faster:", soft_wrap=True)
    table = _table("card", "rows", "checkpointing", "weights", "adapter", "activations", "loss", "total")
    missing = []
    for card in CARDS:
        sizes = {how: found.rows(card, how, length) for how in (False, True)}
        how = sizes[False] * length < ENOUGH
        if not sizes[how]:
            missing.append(f"{card} GB: {_why(found, card, length)}")
            continue
        parts = _groups(found.estimate(how, sizes[how], length))
        table.add_row(f"{card} GB", str(sizes[how]), str(how).lower(), *(f"{size / 1e9:.1f}" for size in parts))
    console.print(table)
    for line in missing:
        console.print(line)


def _head(found: Fits, static: dict[str, float]) -> Iterator[str]:
    weights = f"{static.get(WEIGHTS, 0) / 1e9:.1f} GB in 4 bits, {static[OTHER] / 1e9:.1f} GB in 16 bits"
    yield f"{found.name}: frozen weights {weights}; estimated from config.json alone"
    loss = "fused loss" if found.settings.fused_loss is not False else "the loss from all logits"
    yield f"bf16, attention: {found.settings.attention}, {loss}, optimizer: {found.settings.optimizer}"
    yield f"Most rows per pass by length, at most {counted(found.settings.tokens_per_step, 'token')} per step,"
    yield "with activation_checkpointing: true | false\n"


def _groups(estimate: Estimate) -> list[float]:
    """Return the bytes of the columns of the second table."""
    parts = {name: estimate.parts.get(name, 0.0) for name in (WEIGHTS, OTHER, MASKS, ACTIVATIONS, LOGITS)}
    weights, activations = parts[WEIGHTS] + parts[OTHER], parts[MASKS] + parts[ACTIVATIONS]
    adapter = estimate.total - sum(parts.values())
    return [weights, adapter, activations, parts[LOGITS], estimate.total]


def _why(found: Fits, card: int, length: int) -> str:
    """Return why one row does not fit, and what to change first."""
    usable = usable_bytes(card) / 1e9
    weights, adapter, activations, loss, total = (size / 1e9 for size in _groups(found.estimate(True, 1, length)))
    if weights + adapter > usable:
        return (
            f"does not fit: weights, adapter, and optimizer alone need {weights + adapter:.1f} GB of {usable:.1f}; use "
            "a smaller model, or several GPUs with sharding: full"
        )
    shorter = max((size for size in found.lengths if size < length and found.rows(card, True, size)), default=0)
    fix = f"pack rows of {shorter:,} tokens, which fit" if shorter else "pack rows of fewer tokens"
    return (
        f"does not fit: one row needs {total:.1f} GB of {usable:.1f}, of which {activations:.1f} GB for activations "
        f"and {loss:.1f} GB for the loss; first {fix}, or else set activation_checkpointing: offload"
    )


def _table(*heads: Any) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for number, head in enumerate(heads):
        table.add_column(head, justify="right" if number else "left", no_wrap=True)
    return table
