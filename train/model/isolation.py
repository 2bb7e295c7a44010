"""Prove before training that conversations in a row do not see each other.

`fastest` chooses the fastest attention backend that passes.

    dataset ─choose_rows─▶ rows with two or more conversations ─collator─▶ batch, as in training
    model(batch) ──────────────────────────────────────▶ logits ┐
    model(batch) once more ────────────────────────────▶ logits ┤ noise: the difference of equal passes (usually 0)
    model(batch, first conversation of each row replaced) logits ┴▶ of later conversations: must not move by more
                                                                  of the first one: must move, or the check is blind

The check costs three forward passes per batch. It detects every known kind of leak (an attention mask that is passed
on, positions that are dropped, a cache, a backend that ignores segments). With each of them the loss looks healthy.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tasks.core.errors import DataError, PackError, PartMissing
from tasks.core.printable import counted
from train.model.attention import BACKENDS, Collator, batch_of, use_attention
from train.model.qlora import keep_random

# Logits compared at a time: 2 × 256 MiB in fp32.
LOGITS = 1 << 26
# By chance, a single row may show less than others.
ROWS = 4
# What kernels raise if they do not support a model or a device.
FAILURES = (ImportError, NotImplementedError, RuntimeError, ValueError)


@dataclass(frozen=True, slots=True)
class Isolation:
    """The result of the check.

    Differences are the largest absolute ones between logits; they may be NaN.
    """

    rows: int
    conversations: int  # after the first of their row: their logits must not move
    moved: float  # how far these moved
    first_moved: float  # logits of the replaced conversations
    noise: float  # between two passes of the same input, anywhere

    @property
    def passed(self) -> bool:
        return self.moved <= self.noise and self.sees and self.first_moved < math.inf

    @property
    def sees(self) -> bool:
        """Return whether the effect is far above the noise; if not, nothing is proven."""
        return self.first_moved > 10 * self.noise

    def __str__(self) -> str:
        return (
            f"after replacing the first conversation of {counted(self.rows, 'row')}, its logits moved by "
            f"{self.first_moved:.3g}, those of the {self.conversations} after it by {self.moved:.3g}"
        )


def count_conversations(row: dict[str, Any]) -> int:
    """Count the conversations of a row that are trained on; padding is not one."""
    runs = (torch.as_tensor(row["position_ids"]) == 0).cumsum(0)
    return len(runs[torch.as_tensor(row["labels"]) >= 0].unique())


def choose_rows(dataset: Any, count: int) -> list[int]:
    """Return the first `count` rows with at least two conversations.

    They are repeated if there are fewer. Empty if no row has two: then there is nothing to isolate. `dataset` is like
    PackedDataset.
    """
    found: list[int] = []
    for number in range(len(dataset)):
        if count_conversations(dataset[number]) >= 2:
            found.append(number)
        if len(found) == count:
            break
    return [found[i % len(found)] for i in range(count)] if found else []


def check_isolation(model: Any, batch: dict[str, Any], rows: Sequence[dict[str, Any]], *, seed: int) -> Isolation:
    """Replace the first conversation of every row; measure the effect on others.

    The effect is how far their logits move. `batch` is the model's input in training (without its `labels`), built from
    `rows`. The starts of conversations are read from the rows, so a batch that lost its positions is detected. The
    model runs as in training: same mode, dropout (with the same random numbers in every pass), cache setting, and
    keywords. Call it inside the autocast context of training, if there is one.

    The model's whole forward runs, with logits only for the last token. The last hidden states, [B, L, hidden], are
    captured where the decoder returns them, and pass through the model's own head in slices of at most LOGITS logits:
    the logits of 8 rows of 4096 tokens over 128k ids would take 17 GB in fp32. Works for models wrapped by PEFT.
    """
    device = model.device
    batch = {name: x.to(device) if torch.is_tensor(x) else x for name, x in batch.items() if name != "labels"}
    positions = torch.stack([torch.as_tensor(row["position_ids"]) for row in rows])
    first = ((positions == 0).cumsum(1) == 1).to(device)
    ids, vocabulary = batch["input_ids"], model.get_input_embeddings().num_embeddings
    # A shift by 1 … V - 1 changes every token.
    shift = torch.randint(1, vocabulary, ids.shape, generator=torch.Generator().manual_seed(seed)).to(ids)
    changed = torch.where(first, (ids + shift) % vocabulary, ids)

    mode = model.training
    model.train()
    try:
        with torch.no_grad(), keep_random(device):
            once, twice, other = (_hidden(model, batch | {"input_ids": x}, seed) for x in (ids, ids, changed))
            noise = _moved(model, once, twice, torch.ones_like(first))
            moved, first_moved = (_moved(model, once, other, where) for where in (~first, first))
    finally:
        model.train(mode)
    later = sum(count_conversations(row) - 1 for row in rows)
    return Isolation(len(rows), later, moved, first_moved, noise)


def _hidden(model: Any, batch: dict[str, Any], seed: int) -> torch.Tensor:
    """Return the hidden states that the decoder passes to the head, [B, L, hidden]."""
    seen: list[torch.Tensor] = []
    hook = model.get_decoder().register_forward_hook(lambda _module, _inputs, out: seen.append(out[0]))
    torch.manual_seed(seed)
    try:
        model(**batch, logits_to_keep=1)
    finally:
        hook.remove()
    (hidden,) = seen
    return hidden


def _moved(model: Any, one: torch.Tensor, other: torch.Tensor, where: torch.Tensor) -> float:
    """Return the largest difference between the logits of two passes.

    Only tokens in `where`, bool[B, L], are compared. The result may be NaN.
    """
    head = model.get_output_embeddings()
    step = max(1, LOGITS // model.get_input_embeddings().num_embeddings)
    pairs = zip(one[where].split(step), other[where].split(step), strict=True)
    # Python's max() may drop a NaN, torch's never does.
    found = [(head(a).float() - head(b).float()).abs().max() for a, b in pairs]
    return float(torch.stack(found).max()) if found else 0.0


def require_isolation(
    model: Any, dataset: Any, collator: Any, count: int, *, attention: str, seed: int
) -> Isolation | None:
    """Check the isolation of at least ROWS real rows, in batches of `count`.

    Returns None if no row has two conversations. Raises DataError if conversations see each other or the check is
    blind, PartMissing if the backend does not run.
    """
    rows = [dataset[number] for number in choose_rows(dataset, count * math.ceil(ROWS / count))]
    if not rows:
        return None
    batches = [rows[start : start + count] for start in range(0, len(rows), count)]
    try:
        result = _worst([check_isolation(model, collator(batch), batch, seed=seed) for batch in batches])
    except FAILURES as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        raise PartMissing("no_attention", _failure(attention, error)) from None
    if not result.passed:
        raise DataError(
            "leak", f"{_fault(result, attention)}; training was not started. {_fix(attention).capitalize()}"
        )
    return result


def _worst(batches: Sequence[Isolation]) -> Isolation:
    """Combine the results of several batches, the worst figure of each."""
    figures = torch.tensor([(batch.moved, -batch.first_moved, batch.noise) for batch in batches], dtype=torch.float64)
    moved, first_moved, noise = figures.amax(0).tolist()  # keeps a NaN
    return Isolation(
        sum(batch.rows for batch in batches), sum(batch.conversations for batch in batches), moved, -first_moved, noise
    )


def _fault(result: Isolation, attention: str) -> str:
    numbers = (result.moved, result.first_moved, result.noise)
    if not all(map(math.isfinite, numbers)):
        return f"the model's logits are not finite with attention `{attention}`, so isolation cannot be checked"
    if not result.sees:
        return (
            f"isolation cannot be checked with attention `{attention}`: replacing a conversation moved its own logits "
            f"by only {result.first_moved:.3g}, while two equal passes differ by {result.noise:.3g}"
        )
    return (
        f"conversations in a row see each other with attention `{attention}` (logits moved by {result.moved:.3g}, "
        f"but only by {result.noise:.3g} between equal passes)"
    )


def _failure(attention: str, error: Exception) -> str:
    cause = next(iter(str(error).splitlines()), type(error).__name__)
    return f"attention `{attention}` does not run here: {cause}; {_fix(attention)}"


def _fix(attention: str) -> str:
    return "try `attention: eager`" if attention == "sdpa" else "try `attention: sdpa`"


# -- the fastest -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Trial:
    """One backend: its speed in forward and backward passes, or why it is excluded."""

    attention: str
    tokens_per_second: float  # 0 if it is excluded
    reason: str = ""


def fastest(model: Any, dataset: Any, count: int, *, seed: int, passes: int = 3) -> tuple[str, list[Trial]]:
    """Return the fastest backend that passes the check, and all trials.

    Each backend runs the same `count` rows: one pass to warm up, then the median of `passes`. The model keeps the
    returned backend, without gradients; the state of the random number generators is restored. With several ranks the
    slowest counts, so that all choose the same. Raises PartMissing if no backend passes.
    """
    trials = [_try(model, dataset, count, backend, seed, passes) for backend in BACKENDS]
    if torch.distributed.is_initialized():
        speeds = torch.tensor([trial.tokens_per_second for trial in trials], device=model.device)
        torch.distributed.all_reduce(speeds, torch.distributed.ReduceOp.MIN)
        pairs = zip(trials, speeds.tolist(), strict=True)
        trials = [Trial(t.attention, s, t.reason or "excluded on another rank" * (not s)) for t, s in pairs]
    best = max(trials, key=lambda trial: trial.tokens_per_second)
    if not best.tokens_per_second:
        reasons = "; ".join(f"{trial.attention}: {trial.reason}" for trial in trials)
        raise PartMissing("no_attention", f"no attention backend can train this model here ({reasons})")
    use_attention(model, best.attention)
    return best.attention, trials


def _try(model: Any, dataset: Any, count: int, backend: str, seed: int, passes: int) -> Trial:
    try:
        return try_backend(model, dataset, count, backend, seed=seed, passes=passes)
    except (PackError, torch.OutOfMemoryError) as error:
        return Trial(backend, 0.0, str(error))


def try_backend(
    model: Any, dataset: Any, count: int, backend: str, *, seed: int, isolated: bool = True, passes: int = 1
) -> Trial:
    """Use a backend, check the isolation of `count` rows, and time passes.

    Raises DataError if conversations see each other, PartMissing if the backend does not run here.
    """
    collate, device = Collator(backend), model.device
    mode = model.training
    model.train()
    try:
        use_attention(model, backend)
        if isolated:
            require_isolation(model, dataset, collate, count, attention=backend, seed=seed)
        batch = batch_of(dataset, range(count), collate, device)
        seconds = []
        with keep_random(device):
            for _ in range(1 + passes):
                start = time.perf_counter()
                model(**batch).loss.backward()
                if device.type == "cuda":
                    torch.cuda.synchronize(device)
                seconds.append(time.perf_counter() - start)
        return Trial(backend, batch["input_ids"].numel() / statistics.median(seconds[1:]))
    except FAILURES as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        raise PartMissing("no_attention", _failure(backend, error)) from None
    finally:
        model.zero_grad(set_to_none=True)
        model.train(mode)
