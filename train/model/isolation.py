"""The proof, before training, that conversations of a row do not see each other; and the fastest backend that has it.

    dataset ─choose_rows─▶ rows with two or more conversations ─collator─▶ batch, as in training
    model(batch) ──────────────────────────────────────▶ logits ┐
    model(batch) once more ────────────────────────────▶ logits ┤ noise: what equal passes differ by (0 as a rule)
    model(batch, first conversation of each row replaced) logits ┴▶ of the later conversations: must not move by more
                                                                  of the first one: must move, or the check is blind

It costs three forward passes a batch. It catches every way in which rows were seen to leak (an attention mask that is
passed on, positions that are dropped, a cache, a backend that ignores segments), all of which leave the loss looking
healthy.
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

# Logits that are compared at a time: 2 × 256 MiB in fp32.
LOGITS = 1 << 26
# A single row may by chance show less than others.
ROWS = 4
# How a kernel says that it cannot do what it is asked for.
FAILURES = (ImportError, NotImplementedError, RuntimeError, ValueError)


@dataclass(frozen=True, slots=True)
class Isolation:
    """What the check saw. Differences are the largest absolute ones between logits; they may be NaN."""

    rows: int
    conversations: int  # later than the first of their row: those that must not move
    moved: float  # their logits
    first_moved: float  # logits of the replaced conversations
    noise: float  # between two passes of the same input, anywhere

    @property
    def passed(self) -> bool:
        return self.moved <= self.noise and self.sees and self.first_moved < math.inf

    @property
    def sees(self) -> bool:
        """A change shows, far above what may come by chance; otherwise the check proves nothing."""
        return self.first_moved > 10 * self.noise

    def __str__(self) -> str:
        replaced = f"the first conversation of {counted(self.rows, 'row')} replaced"
        moved = (
            f"its logits moved by {self.first_moved:.3g}, those of the {self.conversations} behind by {self.moved:.3g}"
        )
        return f"{replaced}: {moved}"


def count_conversations(row: dict[str, Any]) -> int:
    """Conversations of a row that are trained on; the pad tail is none."""
    runs = (torch.as_tensor(row["position_ids"]) == 0).cumsum(0)
    return len(runs[torch.as_tensor(row["labels"]) >= 0].unique())


def choose_rows(dataset: Any, count: int) -> list[int]:
    """The first `count` rows with two or more conversations, in order, and again from the first if they are fewer.

    Empty where no row has two: then there is nothing to keep apart. `dataset` is as PackedDataset.
    """
    found: list[int] = []
    for number in range(len(dataset)):
        if count_conversations(dataset[number]) >= 2:
            found.append(number)
        if len(found) == count:
            break
    return [found[i % len(found)] for i in range(count)] if found else []


def check_isolation(model: Any, batch: dict[str, Any], rows: Sequence[dict[str, Any]], *, seed: int) -> Isolation:
    """Replace the first conversation of every row, and see whether the logits of the later ones move.

    `batch` is what the model is given in training (its `labels` are left out of the passes), made of `rows`; where
    conversations begin is read from the rows, so that a batch that lost its positions is found out. The model runs as
    in training: same mode, dropout (with the same random numbers in every pass), cache setting and keywords. Call it
    inside the autocast context of training, if there is one.

    The whole forward of the model runs, with logits for the last token alone. The last hidden states, [B, L, hidden],
    are taken where the decoder returns them, and go through the model's own head in slices of at most LOGITS logits:
    the logits of 8 rows of 4096 tokens over 128 k ids would take 17 GB in fp32. Works for models wrapped by PEFT.
    """
    device = model.device
    batch = {name: x.to(device) if torch.is_tensor(x) else x for name, x in batch.items() if name != "labels"}
    positions = torch.stack([torch.as_tensor(row["position_ids"]) for row in rows])
    first = ((positions == 0).cumsum(1) == 1).to(device)
    ids, vocabulary = batch["input_ids"], model.get_input_embeddings().num_embeddings
    # A shift by 1 … V - 1 leaves no token as it was.
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
    """What the decoder gives to the head, [B, L, hidden]."""
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
    """The largest difference between the logits of two passes at the places in `where`, bool[B, L]; may be NaN."""
    head = model.get_output_embeddings()
    step = max(1, LOGITS // model.get_input_embeddings().num_embeddings)
    pairs = zip(one[where].split(step), other[where].split(step), strict=True)
    # max() of Python may drop a NaN, that of torch never does.
    found = [(head(a).float() - head(b).float()).abs().max() for a, b in pairs]
    return float(torch.stack(found).max()) if found else 0.0


def require_isolation(
    model: Any, dataset: Any, collator: Any, count: int, *, attention: str, seed: int
) -> Isolation | None:
    """Check the isolation of real data in batches of `count` rows, of at least ROWS rows; None where no row has two
    conversations.

    Raises DataError where conversations see each other or the check sees nothing, PartMissing where the backend does
    not run.
    """
    rows = [dataset[number] for number in choose_rows(dataset, count * math.ceil(ROWS / count))]
    if not rows:
        return None
    batches = [rows[top : top + count] for top in range(0, len(rows), count)]
    try:
        seen = _together([check_isolation(model, collator(batch), batch, seed=seed) for batch in batches])
    except FAILURES as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        raise PartMissing("no_attention", _why_not_here(attention, error)) from None
    if not seen.passed:
        raise DataError(
            "leak", f"{_complaint(seen, attention)}; nothing is trained. {_instead(attention).capitalize()}"
        )
    return seen


def _together(batches: Sequence[Isolation]) -> Isolation:
    """What several batches showed, the worst of each."""
    worst = torch.tensor([(seen.moved, -seen.first_moved, seen.noise) for seen in batches], dtype=torch.float64)
    moved, first_moved, noise = worst.amax(0).tolist()  # keeps a NaN
    return Isolation(
        sum(seen.rows for seen in batches), sum(seen.conversations for seen in batches), moved, -first_moved, noise
    )


def _complaint(seen: Isolation, attention: str) -> str:
    numbers = (seen.moved, seen.first_moved, seen.noise)
    if not all(map(math.isfinite, numbers)):
        return f"the model's logits are not finite with attention `{attention}`, so isolation cannot be checked"
    if not seen.sees:
        return (
            f"the check of isolation cannot see anything with attention `{attention}`: a replaced conversation moved "
            f"its own logits by {seen.first_moved:.3g}, two equal passes differ by {seen.noise:.3g}"
        )
    return (
        f"conversations in a row see each other with attention `{attention}` (logits moved by {seen.moved:.3g}, "
        f"by {seen.noise:.3g} where nothing changed)"
    )


def _why_not_here(attention: str, error: Exception) -> str:
    cause = next(iter(str(error).splitlines()), type(error).__name__)
    return f"attention `{attention}` does not run here: {cause}; {_instead(attention)}"


def _instead(attention: str) -> str:
    return "try `attention: eager`" if attention == "sdpa" else "try `attention: sdpa`"


# -- the fastest -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Trial:
    """One backend: its speed in forward and backward passes, or why it is out."""

    attention: str
    tokens_per_second: float  # 0 where it is out
    reason: str = ""


def fastest(model: Any, dataset: Any, count: int, *, seed: int, passes: int = 3) -> tuple[str, list[Trial]]:
    """The backend with the most tokens a second of those that pass the check, and the trials of all that there are.

    Every one gets the same `count` rows, one pass to warm up, and the median of `passes`. The model is left with the
    backend that is returned, with no gradients, and the random numbers as they were. With several ranks the slowest
    counts, so that all choose the same. Raises PartMissing where none is left.
    """
    trials = [_try(model, dataset, count, backend, seed, passes) for backend in BACKENDS]
    if torch.distributed.is_initialized():
        speeds = torch.tensor([trial.tokens_per_second for trial in trials], device=model.device)
        torch.distributed.all_reduce(speeds, torch.distributed.ReduceOp.MIN)
        pairs = zip(trials, speeds.tolist(), strict=True)
        trials = [Trial(t.attention, s, t.reason or "is out on another rank" * (not s)) for t, s in pairs]
    best = max(trials, key=lambda trial: trial.tokens_per_second)
    if not best.tokens_per_second:
        reasons = "; ".join(f"{trial.attention}: {trial.reason}" for trial in trials)
        raise PartMissing("no_attention", f"no attention backend trains this model here ({reasons})")
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
    """Attend with a backend, check the isolation of `count` rows, and run forward and backward.

    Raises DataError where conversations see each other, PartMissing where the backend does not run here.
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
                begin = time.perf_counter()
                model(**batch).loss.backward()
                if device.type == "cuda":
                    torch.cuda.synchronize(device)
                seconds.append(time.perf_counter() - begin)
        return Trial(backend, batch["input_ids"].numel() / statistics.median(seconds[1:]))
    except FAILURES as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        raise PartMissing("no_attention", _why_not_here(backend, error)) from None
    finally:
        model.zero_grad(set_to_none=True)
        model.train(mode)
