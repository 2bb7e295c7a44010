"""Prove before training that conversations in a row do not see each other.

`fastest` chooses the fastest attention backend that passes.

    dataset ─choose_rows─▶ rows with two or more conversations ─collator─▶ batch, as in training
    model(batch) ─────────────────────────────────▶ logits ┐
    model(batch) once more ───────────────────────▶ logits ┤ noise: the difference of equal passes (usually 0)
    model(batch, conversations 0, 2, 4, … replaced) logits ┤ of 1, 3, 5, …: must not move by more
    model(batch, conversations 1, 3, 5, … replaced) logits ┴ of 0, 2, 4, …: must not move by more
                                                             of replaced conversations: must move, or the check is blind

Conversations are numbered over the whole batch, so each one is compared while its neighbors are replaced, including
neighbors in other rows. The check costs four forward passes per batch. It detects every known kind of leak: an
attention mask that is passed on, dropped positions, lost boundaries, a cache, or a backend that ignores segments. With
each of these leaks, the loss looks healthy.

If rows store shared tokens once, replaced tokens must move the logits of all that see them and of nothing else, and a
sample must have the states that it has alone. This costs up to eleven passes; see train.model.trees.
"""

from __future__ import annotations

import logging
import math
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import orjson
import torch

from packcorpus.tasks.core.errors import DataError, PackError, PartMissing
from packcorpus.tasks.core.printable import counted
from packcorpus.tasks.storage.schemas import END, LOSS_WEIGHT
from packcorpus.train.config import TrainingConfig
from packcorpus.train.machine.process import may_be_shortage
from packcorpus.train.machine.ranks import fail_alike, largest
from packcorpus.train.model import states
from packcorpus.train.model.attention import (
    APART,
    BACKENDS,
    Collator,
    autocast,
    backend_to_load,
    batch_of,
    decoder_of,
    missing_backends,
    precision_of,
    run_pass,
    unavailable_reason,
    use_attention,
)
from packcorpus.train.model.base_model import read_config, silence_libraries
from packcorpus.train.model.qlora import infinite_weights, is_sharded, keep_random, load_model, quantized, set_random
from packcorpus.train.model.quantization import unpacked_layers
from packcorpus.train.model.trees import Replacement, TreesOfRows, use_trees

OF_LOSS = ("labels", LOSS_WEIGHT)  # columns of a batch that do not affect logits
# Number of logits compared at a time: 2 × 256 MiB in fp32.
LOGITS = 1 << 26
# Number of rows to check. By chance, a single row may show less than others.
ROWS = 4
LOOKED_AT = 2000  # number of rows among which these are chosen
# Replaced tokens go to other experts, so sums over the tokens of an expert round differently. Logits may move this far,
# relative to the logits of the replaced conversations. In fp32, rounding moved logits by up to 7e-7, and the weakest
# observed leak moved them by 0.23.
ROUNDING = {torch.float32: 1e-4, torch.float16: 0.02, torch.bfloat16: 0.05}
# The states of a sample in its tree may differ this far from those alone, relative to their size. Other kernels round
# differently; positions or windows that do not follow the path make a difference of 0.3 or more.
SAME_STATES = {torch.float32: 1e-3, torch.float16: 0.05, torch.bfloat16: 0.15}
# Speeds that differ by less are equal; see also train.loop.micro_batch.
NEAR = 0.03
# Errors of kernels and of the code of models that do not support a device or packed rows.
FAILURES = (
    AssertionError, AttributeError, ImportError, LookupError, NotImplementedError, RuntimeError, TypeError, ValueError,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Isolation:
    """Result of the check, with the largest differences of logits, perhaps NaN."""

    rows: int
    conversations: int  # each was replaced once, and compared once while its neighbors were replaced
    moved: float  # logits of conversations that were not replaced
    own_moved: float  # logits of the replaced conversation that moved least
    noise: float  # between two passes of the same input, anywhere
    rounding: float = 0.0  # how far logits may move because of rounding, relative to `own_moved`
    # If tokens are shared, the relative difference of states of a sample in its tree and alone, and how large it may be
    differs: float = 0.0
    may_differ: float = 0.0

    @property
    def allowed(self) -> float:
        """Return how far logits may move without a leak."""
        return max(self.noise, self.rounding * self.own_moved)

    @property
    def sees(self) -> bool:
        """Return whether the effect is far above the noise; if not, nothing is proven."""
        return self.own_moved > 10 * self.noise

    @property
    def passed(self) -> bool:
        return self.moved <= self.allowed and self.sees and self.own_moved < math.inf and self.is_as_alone

    @property
    def is_as_alone(self) -> bool:
        """Return whether a sample of a tree has the states that it has alone."""
        return self.differs <= self.may_differ

    @property
    def finite(self) -> bool:
        return all(map(math.isfinite, (self.moved, self.own_moved, self.noise, self.differs)))

    @property
    def leaks(self) -> bool:
        """Return True only if a leak was seen, and False if nothing is proven."""
        return self.sees and self.finite and not self.passed

    def __str__(self) -> str:
        if self.may_differ:
            return (
                f"of {self.conversations} samples in {counted(self.rows, 'row')}, replaced tokens moved logits of the "
                f"tokens that see them by {self.own_moved:.3g} or more, and others by {self.moved:.3g} or less"
            )
        return (
            f"after replacing every second of {self.conversations} conversations in {counted(self.rows, 'row')}, their "
            f"logits moved by {self.own_moved:.3g} or more, those of the others by {self.moved:.3g} or less"
        )


def count_conversations(row: dict[str, Any]) -> int:
    """Count the conversations of a row that are trained on, without padding."""
    return TreesOfRows([row]).samples if END in row else int(number_conversations([row]).max()) + 1


def number_conversations(rows: Sequence[dict[str, Any]]) -> torch.Tensor:
    """Return the number of the conversation of each token in a batch, int64[B, L].

    Only conversations that are trained on are numbered, from 0 over all rows. Other tokens, such as padding, have the
    number of the conversation before them, or -1. Rows of different lengths count as one row, because the Collator
    joins them.
    """
    trained = torch.cat([torch.as_tensor(row["labels"]) for row in rows]) >= 0
    starts = torch.cat([torch.as_tensor(row["position_ids"]) for row in rows]) == 0
    firsts = torch.tensor([0, *(len(row["labels"]) for row in rows)]).cumsum(0)[:-1]
    starts[firsts] = True
    runs = starts.cumsum(0)
    equal = len({len(row["labels"]) for row in rows}) == 1
    return (torch.searchsorted(runs[trained].unique(), runs, right=True) - 1).reshape(len(rows) if equal else 1, -1)


def choose_rows(dataset: Any, count: int) -> list[int]:
    """Return the `count` rows with the most conversations, perhaps repeated."""
    several: list[tuple[int, int]] = []
    for number in range(len(dataset)):
        if (conversations := count_conversations(dataset[number])) >= 2:
            several.append((-conversations, number))
        # Rows are in random order, so the first ones are like all others.
        if number >= LOOKED_AT and len(several) >= count:
            break
    return list(islice(cycle(number for _, number in sorted(several)[:count]), count))


def has_experts(model: Any) -> bool:
    """Return whether the model routes tokens to experts."""
    return any(name.rpartition(".")[2] == "experts" for name, _ in model.named_modules())


def check_isolation(model: Any, batch: dict[str, Any], rows: Sequence[dict[str, Any]], *, seed: int) -> Isolation:
    """Replace every second conversation, then the others, and measure the effect.

    The effect is how far the logits of the other conversations move. `batch` is the model's input in training, built
    from `rows`, from which the starts of conversations are read, so that lost positions are detected. The model, with
    or without an adapter, runs as in training: same mode, dropout, cache setting, and keywords; call this inside the
    autocast of the training, if it has one.

    Returns the differences of logits: `moved` of conversations that were not replaced, and `allowed`, by how much they
    may move because of rounding.

        four = [rows[n] for n in range(4)]
        isolation = packcorpus.check_isolation(model, collate(four), four, seed=0)
        assert isolation.moved <= isolation.allowed
    """
    # The whole forward pass runs, with logits only for the last token. The last hidden states, [B, L, hidden], pass
    # through the model's own head in slices of at most LOGITS logits, because the logits of 8 rows of 4096 tokens over
    # 128k IDs would take 17 GB in fp32.
    device = model.device
    batch = {name: x.to(device) if torch.is_tensor(x) else x for name, x in batch.items() if name not in OF_LOSS}
    count, replacements, path = _replacements(rows)
    ids, vocabulary = batch["input_ids"], model.get_input_embeddings().num_embeddings
    # A shift by 1 … V - 1 changes every token.
    shift = torch.randint(1, vocabulary, ids.shape, generator=torch.Generator().manual_seed(seed)).to(ids)
    changed = (ids + shift) % vocabulary

    mode = model.training
    model.train()
    try:
        with torch.no_grad(), keep_random(device):
            once = _hidden(model, batch, seed)
            noise = _moved(model, once, _hidden(model, batch, seed), torch.ones_like(ids, dtype=torch.bool))
            moved, own = [], []
            for one in replacements:
                replaced, reached = one.replaced.to(device), one.reached.to(device)
                other = _hidden(model, batch | {"input_ids": torch.where(replaced, changed, ids)}, seed)
                moved.append(_moved(model, once, other, ~reached))
                own += [_moved(model, once, other, unit.to(device)) for unit in one.units]
            model.eval()  # dropout would differ
            differs = 0.0 if path is None else _differs(model, batch, path.to(device), seed)
    finally:
        model.train(mode)
    # Kernels of scans subtract sums over several conversations, which also rounds differently.
    rounds = has_experts(model) or states.separation(model).way == states.KERNELS
    rounding = ROUNDING[precision_of(model)] if rounds else 0.0
    # Python's max() may drop a NaN, but torch's never does.
    most, least = float(torch.tensor(moved).max()), float(torch.tensor(own).min())
    may_differ = 0.0 if path is None else SAME_STATES[precision_of(model)]
    return Isolation(len(rows), count, most, least, noise, rounding, differs, may_differ)


def _replacements(rows: Sequence[dict[str, Any]]) -> tuple[int, list[Replacement], torch.Tensor | None]:
    """Return the number of conversations or samples, what to replace, and a path."""
    if END in rows[0]:
        trees = TreesOfRows(rows)
        return trees.samples, trees.replacements(), trees.path()
    numbers, found = number_conversations(rows), []
    for parity in (0, 1):
        replaced = numbers % 2 == parity
        found.append(Replacement(replaced, replaced, [numbers == number for number in numbers[replaced].unique()]))
    return int(numbers.max()) + 1, found, None


def _differs(model: Any, batch: dict[str, Any], path: torch.Tensor, seed: int) -> float:
    """Return the relative difference of the states of a sample in its rows and alone."""
    ids = batch["input_ids"].flatten()[path]
    collate = Collator("varlen" if "cu_seq_lens_q" in batch else "sdpa")
    # As in use, the model counts positions itself, from 2 in some models.
    alone = batch_of([{"input_ids": ids}], range(1), collate, ids.device)
    row = _hidden(model, batch, seed).flatten(0, 1)[path].float()
    return float((row - _hidden(model, alone, seed)[0].float()).norm() / row.norm())


def _hidden(model: Any, batch: dict[str, Any], seed: int) -> torch.Tensor:
    """Return the hidden states that the head reads, [B, L, hidden]."""
    seen: list[torch.Tensor] = []

    def keep(_head: Any, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        seen.append(inputs[0])
        return (inputs[0][:, -1:],)  # `logits_to_keep` would also cut the hidden states of some decoders

    hook = model.get_output_embeddings().register_forward_pre_hook(keep)
    set_random(model.device, seed)
    try:
        model(**batch)
    finally:
        hook.remove()
    if len(seen) != 1 or seen[0].shape[:2] != batch["input_ids"].shape:
        shapes = ", ".join(str(tuple(hidden.shape)) for hidden in seen)
        raise NotImplementedError(f"its head does not read the hidden states of each token once (shapes: {shapes})")
    return seen[0]


def _moved(model: Any, one: torch.Tensor, other: torch.Tensor, where: torch.Tensor) -> float:
    """Return the largest difference of logits of the tokens in `where`, bool[B, L]."""
    head = model.get_output_embeddings()
    step = max(1, LOGITS // model.get_input_embeddings().num_embeddings)
    pairs = zip(one[where].split(step), other[where].split(step), strict=True)
    found = [(head(a).float() - head(b).float()).abs().max() for a, b in pairs if len(a)]
    return float(torch.stack(found).max()) if found else 0.0


def require_isolation(
    model: Any, dataset: Any, collator: Any, count: int, *, attention: str, seed: int
) -> Isolation | None:
    """Check that the conversations of a row do not see each other.

    Every second conversation of at least four real rows is replaced, then the others: the logits of the unchanged ones
    must stay the same. `collator` makes a batch of `count` rows of `dataset` as in training, and `attention` is the
    backend, as for `Collator`. The model keeps the first of its ways to separate conversations that passes, and from
    then on follows the column `end` of its batches, if rows have it. Returns the result of `check_isolation`, or None
    if no batch has two conversations. Raises DataError if conversations see each other or the check is blind,
    PartMissing if the backend does not run.

        packcorpus.require_isolation(model, rows, collate, 4, attention="sdpa", seed=0)
    """
    checked = count * math.ceil(ROWS / count)
    rows = [dataset[number] for number in choose_rows(dataset, checked)]
    if END in dataset[0]:
        use_trees(model)
        if states.layers_with_state(model):
            raise DataError(
                "unfit_model",
                f"a {model.config.model_type} model passes a state from each token to the next, but rows with shared "
                "tokens have branches; pack the corpus with share: none, or use another model",
            )
    if not rows:
        if count == 1:
            return None
        # The only bounds are between rows. A kernel that sees the batch as one sequence could lose them.
        rows = [dataset[number % len(dataset)] for number in range(checked)]
    batches = [rows[start : start + count] for start in range(0, len(rows), count)]
    failure: PackError = DataError("leak", "")
    reason = states.missing(model)
    for way in [states.ATTENTION] if END in rows[0] else states.ways(model, attention):
        states.use_way(model, way, reason)
        try:
            parts = [check_isolation(model, collator(batch), batch, seed=seed) for batch in batches]
        except FAILURES as error:
            if isinstance(error, torch.OutOfMemoryError):
                raise
            fail_alike(model, error)
            reason = states.cause(model, error)
            only_in_4_bits = _fails_only_in_4_bits(model, collator, batches[0], seed)
            failure = PartMissing("no_attention", _failure(model, attention, error, only_in_4_bits))
            continue
        figures = torch.tensor(
            [(part.moved, -part.own_moved, part.noise, part.differs, part.may_differ) for part in parts],
            dtype=torch.float64,
        )
        moved, own_moved, noise, differs, may_differ = figures.amax(0).tolist()  # the worst of each; keeps a NaN
        conversations = sum(part.conversations for part in parts)
        result = Isolation(checked, conversations, moved, -own_moved, noise, parts[0].rounding, differs, may_differ)
        if result.passed:
            return result
        reason = states.LEAKS[way]
        failure = DataError("leak", _leak(model, result, attention)) if result.finite else not_finite(model, attention)
        if result.finite and END in rows[0]:
            failure = DataError("leak", _off_path(model, result, attention))
        if not result.leaks:
            break
    raise failure


def not_finite(model: Any, attention: str) -> DataError:
    """Describe why the logits of a model are not finite."""
    fault = f"the logits of this {model.config.model_type} model are not finite with attention `{attention}`"
    if damaged := infinite_weights(model):
        fix = (
            f"The base model has NaN or infinity in {counted(len(damaged), 'weight')}, such as {damaged[0]}: copy the "
            "model again, or use another model"
        )
    elif precision_of(model) == torch.float16:  # models that were made in bf16 may exceed its largest number, 65504
        fix = "Set precision: fp32"
    else:
        fix = f"All weights are finite, so its code or the backend fails: {_fix(attention)}, or use another model"
    return DataError("unfit_model", f"{fault}; training was not started. {fix}")


def _leak(model: Any, result: Isolation, attention: str) -> str:
    """Describe a result that is not a proof, and the fix."""
    fix = f"{_fix(attention).capitalize()}"
    if attention in states.ALONE:
        fix = (
            f"The code of {model.config.model_type} models mixes tokens of different conversations, even if each "
            "conversation has its own row; use another model"
        )
    fault = (
        f"conversations see each other with attention `{attention}` (logits moved by {result.moved:.3g} after other "
        f"conversations were replaced; rounding explains at most {result.allowed:.3g})"
    )
    if not result.sees:
        fault = (
            f"isolation cannot be checked with attention `{attention}`: replacing a conversation moved its own logits "
            f"by only {result.own_moved:.3g}, while two equal passes differ by {result.noise:.3g}"
        )
    return f"{fault}; training was not started. {fix}"


def _off_path(model: Any, result: Isolation, attention: str) -> str:
    """Describe why tokens of a tree do not see what they see alone, and the fix."""
    if result.leaks and result.moved > result.allowed:
        fault = (
            f"tokens see more than their path with attention `{attention}` (logits moved by {result.moved:.3g} after "
            f"other samples were replaced; rounding explains at most {result.allowed:.3g})"
        )
    elif not result.sees:
        fault = (
            f"tokens do not see all of their path with attention `{attention}`: replacing it moved logits by only "
            f"{result.own_moved:.3g}, while two equal passes differ by {result.noise:.3g}"
        )
    else:
        fault = (
            f"the states of a sample differ by {result.differs:.1g} (relative) from those alone with attention "
            f"`{attention}`, so a {model.config.model_type} model counts positions or windows by the places of a row"
        )
    return f"{fault}; training was not started. Pack the corpus with share: none, or use another model"


def _fails_only_in_4_bits(model: Any, collator: Any, rows: Sequence[dict[str, Any]], seed: int) -> bool:
    """Return whether a pass that failed runs with the same weights in 16 bits."""
    if not quantized(model) or is_sharded(model):
        return False
    try:
        with unpacked_layers(model):
            check_isolation(model, collator(rows), rows, seed=seed)
    except FAILURES:
        return False
    return True


def _failure(model: Any, attention: str, error: Exception, only_in_4_bits: bool = False) -> str:
    fix = _fix(attention)
    if attention == "eager" and not getattr(decoder_of(model), "_supports_sdpa", True):  # it has no other backend
        fix = "use another model"
    if attention in states.ALONE and states.layers_with_state(model):
        # Its scans have kernels of their own, which all backends use.
        fix = f"if this names a package with kernels, update or uninstall it, or else {fix}"
    if only_in_4_bits:
        fix = "set `quantization: none`, because the same pass runs if no layer is in 4 bits"
    return f"attention `{attention}` does not run here: {states.cause(model, error)}; {fix}"


def _fix(attention: str) -> str:
    return "try `attention: eager`" if attention == "sdpa" else "try `attention: sdpa`"


# -- the fastest -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Trial:
    """Speed of a backend in forward and backward passes, or why it is excluded."""

    attention: str
    tokens_per_second: float  # 0 if it is excluded
    reason: str = ""


def fastest(
    model: Any, dataset: Any, count: int, *, seed: int, passes: int = 3, tried: Sequence[Trial] = ()
) -> tuple[str, list[Trial]]:
    """Return the fastest backend that passes the check, and all trials.

    Each backend runs the same `count` rows: one pass to warm up, then the median of `passes`. Backends in `tried` ran
    in separate processes and are not run again. Backends that the model lacks are not run. The model keeps the returned
    backend, without gradients, and the state of the random number generators is restored. With several ranks, the
    slowest rank counts, so that all choose the same backend. Among those within 3 % of the fastest, the first in
    BACKENDS is chosen, because eager, the last, needs the most memory. Raises PartMissing if no backend passes.
    """
    config = model.config
    known = {name: Trial(name, 0.0, f"{config.model_type} models lack it") for name in missing_backends(config)}
    known |= {trial.attention: trial for trial in tried}
    for name in BACKENDS:
        if name in known:
            continue
        try:
            known[name] = try_backend(model, dataset, count, name, seed=seed, passes=passes)
        except (PackError, torch.OutOfMemoryError) as error:
            fail_alike(model, error)
            known[name] = Trial(name, 0.0, str(error) if isinstance(error, PackError) else "ran out of memory")
    trials = [known[name] for name in BACKENDS]
    if torch.distributed.is_initialized():
        slowest = [-x for x in largest([-trial.tokens_per_second for trial in trials], model.device)]
        pairs = zip(trials, slowest, strict=True)
        trials = [Trial(t.attention, s, t.reason or "excluded on another rank" * (not s)) for t, s in pairs]
    most = max(trial.tokens_per_second for trial in trials)
    best = next(trial for trial in trials if trial.tokens_per_second >= (1 - NEAR) * most)
    if not most:
        reasons = "; ".join(f"{trial.attention}: {trial.reason}" for trial in trials)
        raise PartMissing("no_attention", f"no attention backend can train this model here ({reasons})")
    use_attention(model, best.attention)
    return best.attention, trials


def try_backend(model: Any, dataset: Any, count: int, backend: str, *, seed: int, passes: int = 1) -> Trial:
    """Use a backend, check the isolation of `count` rows, and time passes."""
    collate, device = Collator(backend), model.device
    mode = model.training
    model.train()
    try:
        use_attention(model, backend)
        require_isolation(model, dataset, collate, count, attention=backend, seed=seed)
        batch = batch_of(dataset, range(count), collate, device)
        batch.pop(LOSS_WEIGHT, None)  # the model may not accept it
        with keep_random(device):
            # The precision is that of the caller's autocast.
            seconds = [run_pass(model, batch, torch.float32) for _ in range(1 + passes)]
        return Trial(backend, batch["input_ids"].numel() / statistics.median(seconds[1:]))
    except FAILURES as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        raise PartMissing("no_attention", _failure(model, backend, error)) from None
    finally:
        model.zero_grad(set_to_none=True)
        model.train(mode)


# -- backends that may crash -------------------------------------------------------------------------------------------

LIMIT = 900.0  # seconds for checking, compiling, and timing one backend
LOADED = "loaded"  # name of the file that signals that the model is loaded
TRIALS = "trials.jsonl"  # name of the file with a line for each backend that was tried
COMMAND = (sys.executable, "-P", "-m", "packcorpus.train.model.isolation")


def try_apart(
    base: Path | str, config: TrainingConfig, device: torch.device, dtype: torch.dtype, dataset: Any, count: int
) -> list[Trial]:
    """Try every backend whose kernel may end its process or make the GPU unusable.

    They are tried in a separate process, which loads its own copy of the model, so the caller must not have loaded the
    model yet. Backends that the machine or the model lacks are not tried. See `fastest`.
    """
    if config.sharding == "full":  # a separate process would need the whole model
        return [Trial(backend, 0.0, "not tried with sharding: full") for backend in APART]
    lacking = missing_backends(read_config(base))
    backends = [name for name in APART if name not in lacking and not unavailable_reason(name, device, dtype)]
    if not backends:
        return []
    numbers = [*range(count), *choose_rows(dataset, ROWS)]
    rows = [{name: column.tolist() for name, column in dataset[n % len(dataset)].items()} for n in numbers]
    return in_processes({
        "base": str(base), "is_folder": isinstance(base, Path), "config": config.model_dump(), "device": str(device),
        "dtype": str(dtype).removeprefix("torch."), "rows": rows, "count": count, "backends": backends,
    })  # fmt: skip


def in_processes(request: dict[str, Any], command: Sequence[str] = COMMAND, limit: float = LIMIT) -> list[Trial]:
    """Try the backends one after another in a process, and after a crash in another."""
    found: list[Trial] = []
    while remaining := request["backends"][len(found) :]:
        trials, is_loaded, reason = _in_process(request | {"backends": remaining}, command, limit)
        found += trials
        if reason or not trials:
            # Without a model, no other backend could be tried either.
            blamed = remaining[len(trials) :][: 1 if is_loaded else None]
            found += [Trial(backend, 0.0, reason or "its process failed (no message)") for backend in blamed]
    return found


def _in_process(request: dict[str, Any], command: Sequence[str], limit: float) -> tuple[list[Trial], bool, str]:
    """Return the trials of a process, whether it had a model, and why it failed."""
    of_ranks = re.compile("TORCHELASTIC_.*|MASTER_.*|RANK|LOCAL_RANK|WORLD_SIZE")  # it is not a rank
    env = {name: text for name, text in os.environ.items() if not of_ranks.fullmatch(name)}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "request.json").write_bytes(orjson.dumps(request))
        (folder / TRIALS).touch()
        with (folder / "stderr").open("wb") as errors:
            process = subprocess.Popen(  # noqa: S603 - this Python, and a path
                [*command, name], env=env, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=errors
            )
            steps, until, reason, code = 0, math.inf, "", None
            while not reason and (code := process.poll()) is None:
                done = (folder / LOADED).exists() + (folder / TRIALS).read_bytes().count(b"\n")
                if done > steps:  # the next backend begins
                    steps, until = done, time.monotonic() + limit
                if time.monotonic() > until:
                    process.kill()
                    process.wait()
                    reason = f"took longer than {limit:.0f} s"
                time.sleep(0.05)
        lines = [line for line in (folder / TRIALS).read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]
        trials, is_loaded = [Trial(**orjson.loads(line)) for line in lines], (folder / LOADED).exists()
        errors_of = (folder / "stderr").read_text(encoding="utf-8", errors="replace").strip().splitlines()
    if code and len(trials) < len(request["backends"]):
        reason = reason or f"its process failed ({(errors_of or ['no message'])[-1][:160]})"
        reason = f"its process was killed by {signal.Signals(-code).name}" if code < 0 else reason
    return trials, is_loaded, reason


def run(request: dict[str, Any], folder: Path) -> Iterator[Trial]:
    """Load the model as for training, and try the backends until the GPU fails."""
    backends, config = request["backends"], TrainingConfig(**request["config"])
    base = Path(request["base"]) if request["is_folder"] else request["base"]
    device, dtype = torch.device(request["device"]), getattr(torch, request["dtype"])
    kinds = {"input_ids": torch.int32, "labels": torch.int64, "position_ids": torch.int32, END: torch.int32}
    rows = [
        {name: torch.tensor(row[name], dtype=kind) for name, kind in kinds.items() if name in row}
        for row in request["rows"]
    ]
    try:
        loaded_with, _ = backend_to_load(read_config(base), "auto")
        if device.index is not None:  # one of several GPUs; torch refuses "cuda" here
            torch.cuda.set_device(device)  # Triton kernels run on the current device
        model = load_model(base, config, device, dtype, loaded_with)
    except (PackError, RuntimeError) as error:
        yield from (Trial(backend, 0.0, _reason(error)) for backend in backends)
        return
    (folder / LOADED).touch()
    for backend in backends:
        try:
            with autocast(device, dtype):
                yield try_backend(model, rows, request["count"], backend, seed=config.seed, passes=3)
        except (PackError, RuntimeError) as error:
            yield Trial(backend, 0.0, _reason(error))
        try:
            if device.type == "cuda":
                torch.cuda.empty_cache()
                torch.cuda.synchronize(device)
        except RuntimeError:  # after an illegal access, the other backends need a new process
            return


def _reason(error: PackError | RuntimeError) -> str:
    """Return why a backend is excluded; raises errors of other kinds."""
    if not isinstance(error, PackError) and not may_be_shortage(error):
        raise error
    return str(error) if isinstance(error, PackError) else str(error).splitlines()[0][:160]


def _end_with(parent: int) -> None:
    """End this process when its parent ends, so that it does not keep the GPU busy."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


def main(folder: Path) -> None:
    """Run the trials that request.json in a folder describes, and write their results."""
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    logging.getLogger("bitsandbytes").setLevel(logging.CRITICAL)
    silence_libraries()
    with (folder / TRIALS).open("ab", buffering=0) as file:
        for trial in run(orjson.loads((folder / "request.json").read_bytes()), folder):
            file.write(orjson.dumps(asdict(trial)) + b"\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
