"""Turn on options that save memory or time, after a trial on real rows.

model + rows ─try_fused_loss─▶ used if loss and gradient stay the same
            ├try_compile─────▶ used if both stay the same, torch really compiled, and passes are faster
            └try_liger───────▶ used if both stay the same, and passes are faster
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch._dynamo.utils import counters

from packcorpus.tasks.core.printable import counted
from packcorpus.tasks.storage.schemas import END
from packcorpus.train.machine.ranks import fail_alike, largest
from packcorpus.train.model import liger
from packcorpus.train.model.attention import autocast, decoder_of, run_pass
from packcorpus.train.model.qlora import keep_random, set_random
from packcorpus.train.model.token_loss import Undo, fuse_loss

# Relative difference of loss and gradient norm up to which two steps count as equal.
SAME = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 1e-2}

# Number of tokens of a row on which losses are compared. All logits of a row might fit only with the fused loss.
COMPARED = 2048

# Compiled passes must be faster by this share: less is noise, and compiling takes minutes at every start.
FASTER = 0.03


@dataclass(frozen=True, slots=True)
class Tried:
    """Whether an option is used, a note, and the seconds of a pass if timed."""

    used: bool
    note: str
    seconds: float = math.nan


def try_fused_loss(model: Any, batch: dict[str, torch.Tensor], dtype: torch.dtype, seed: int) -> Tried:
    """Use the fused loss if a step with it gives the same loss and gradient."""
    undo, off, reason = _try(model, fuse_loss, [batch], dtype, seed)
    if reason:
        undo()
        return Tried(False, f"fused_loss: not used: {reason}")
    return Tried(True, f"fused_loss: used (a step with it differs by {off:.1e})")


def try_compile(
    model: Any, batches: Sequence[dict[str, Any]], dtype: torch.dtype, seed: int, *, timed: bool = True
) -> Tried:
    """Compile the layers if loss and gradient stay the same and passes are faster.

    torch compiles for the number of rows in a batch. The second of three `batches` shows it what differs between them,
    and the third shows whether it would compile again for each batch. Without `timed`, as in a resumed run, the speed
    does not matter.
    """
    before = _compiled()
    return _try_faster(model, "compile", compile_layers, batches, dtype, seed, timed, lambda: _flaws(before))


def try_liger(
    model: Any, batches: Sequence[dict[str, Any]], dtype: torch.dtype, seed: int, *, timed: bool = True
) -> Tried:
    """Use Liger's kernels if loss and gradient stay the same and passes are faster."""
    if reason := liger.missing_reason():
        return Tried(False, f"liger: not used: {reason}")
    return _try_faster(model, "liger", liger.use_liger, batches, dtype, seed, timed, lambda: ("", ""))


def _try_faster(
    model: Any,
    name: str,
    turn_on: Callable[[Any], Undo],
    batches: Sequence[dict[str, Any]],
    dtype: torch.dtype,
    seed: int,
    timed: bool,
    flaws_of: Callable[[], tuple[str, str]],
) -> Tried:
    plain, _ = _seconds(model, batches, dtype) if timed else (math.nan, False)
    undo, off, reason = _try(model, turn_on, batches[:2], dtype, seed)
    seconds, flaws = math.nan, ""
    if not reason:
        again = False
        if timed:
            seconds, again = _seconds(model, batches, dtype)
        plain, seconds = largest([plain, seconds], model.device)
        times = f"a pass takes {seconds:.3g} s with it and {plain:.3g} s without"
        reason, flaws = flaws_of()
        reason = reason or "torch compiled the layers again for another batch" * again
        if largest([float(bool(reason))], model.device)[0]:
            reason = reason or "another rank could not"
        elif timed and seconds > (1 - FASTER) * plain:
            reason = f"{times}{flaws}"
    if reason:
        undo()
        return Tried(False, f"{name}: not used: {reason}")
    detail = times if timed else "as at the first start"
    return Tried(True, f"{name}: used: {detail} (a step differs by {off:.1e}){flaws}", seconds)


def _try(
    model: Any, turn_on: Callable[[Any], Undo], batches: Sequence[dict[str, Any]], dtype: torch.dtype, seed: int
) -> tuple[Undo, float, str]:
    """Turn on an option: how to undo it, its difference, why not to use it."""
    undo: Undo = lambda: None  # noqa: E731
    off, reason = math.nan, ""
    # The zero weights of a new adapter hide most gradients.
    with _adapter_with_gradients(model, seed), keep_random(model.device):
        try:
            set_random(model.device, seed)  # some routers add noise
            plain = [figure for batch in batches for figure in loss_and_gradient(model, batch, dtype)]
            undo = turn_on(model)
            set_random(model.device, seed)
            other = [figure for batch in batches for figure in loss_and_gradient(model, batch, dtype)]
            off = float(torch.tensor([abs(b - a) / abs(a) for a, b in zip(plain, other, strict=True)]).max())
            reason = "" if off <= SAME[dtype] else f"loss or gradient differs by {off:.1e} (relative)"
        except Exception as error:  # a missing compiler and an untraceable model raise different classes
            fail_alike(model, error)
            reason = f"{type(error).__name__}: {[*str(error).strip().splitlines(), ''][0][:160].strip()}"
    model.zero_grad()
    if largest([float(bool(reason))], model.device)[0]:  # all ranks use it, or none
        reason = reason or "another rank could not"
    return undo, off, reason


def loss_and_gradient(model: Any, batch: dict[str, torch.Tensor], dtype: torch.dtype) -> tuple[float, float]:
    """Return the mean loss of the trained tokens and the gradient norm of one step."""
    # Dropout is off, because compiled code draws different random numbers.
    dropouts = dropouts_of(model)
    for module, name, _ in dropouts:
        setattr(module, name, 0.0)
    # As in training, the loss is scaled in fp16, because small gradients would vanish. If large ones overflow, the
    # scale is reduced.
    scale = 2.0**16 if dtype == torch.float16 else 1.0
    try:
        while True:
            model.zero_grad()
            with autocast(model.device, dtype):
                loss = model(**batch)["loss"]
            (scale * loss).backward()
            gradients = [weights.grad for weights in model.parameters() if weights.grad is not None]
            norm = torch.nn.utils.get_total_norm(gradients).item() / scale
            if math.isfinite(norm) or scale == 1:
                return loss.item(), norm
            scale /= 16
    finally:
        model.zero_grad()
        for module, name, p in dropouts:
            setattr(module, name, p)


def dropouts_of(model: Any) -> list[tuple[Any, str, float]]:
    """Return the rates of dropout of a model: module, name, and rate."""
    # Some models, such as OPT and BioGPT, call the dropout function with their own rate.
    return [
        (module, name, p)
        for module in model.modules()
        for name, p in vars(module).items()
        if isinstance(p, float) and ("drop" in name or (name == "p" and isinstance(module, torch.nn.Dropout)))
    ]


@contextmanager
def _adapter_with_gradients(model: Any, seed: int) -> Iterator[None]:
    """Make LoRA's B non-zero in this context, so that A has a gradient too."""
    weights = [weights for name, weights in model.named_parameters() if "lora_B" in name]
    kept = [tensor.detach().clone() for tensor in weights]
    with keep_random(model.device), torch.no_grad():
        set_random(model.device, seed)
        for tensor in weights:
            tensor.normal_(std=0.02)
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, old in zip(weights, kept, strict=True):
                tensor.copy_(old)


# -- compile -----------------------------------------------------------------------------------------------------------


def compile_layers(model: Any) -> Undo:
    """Compile each decoder layer in place."""
    # All layers share one graph per batch size. Activation checkpointing is compiled with them.
    layers = decoder_of(model).layers
    for layer in layers:
        layer.compile()

    def undo() -> None:
        for layer in layers:
            layer._compiled_call_impl = None

    return undo


def _seconds(model: Any, batches: Sequence[dict[str, Any]], dtype: torch.dtype) -> tuple[float, bool]:
    """Return the median seconds of a pass, and whether torch compiled in timed passes."""
    # Infinity if a pass fails. The last batch is new to compiled layers, and is timed.
    try:
        with keep_random(model.device):
            for batch in batches[:-1] or batches:
                run_pass(model, batch, dtype)
            graphs, *_ = _compiled()
            seconds = [run_pass(model, batch, dtype) for batch in ([*batches] * 3)[-3:]]
            return statistics.median(seconds), _compiled()[0] > graphs
    except RuntimeError as error:
        fail_alike(model, error)
        return math.inf, False
    finally:
        model.zero_grad()


def _compiled() -> tuple[int, int, int, int]:
    """Count torch's compilations in this process so far.

    Returns graphs, graph breaks, and the functions that run uncompiled: because they could not be compiled, and because
    they were compiled too often.
    """
    limits = sum(n for text, n in counters["unimplemented"].items() if "recompile limit exceeded" in text)
    failed = counters["frames"]["total"] - counters["frames"]["ok"]
    return counters["stats"]["unique_graphs"], counters["graph_break"].total(), failed, limits


def _flaws(before: tuple[int, int, int, int]) -> tuple[str, str]:
    """Return why the layers are not compiled, or which parts of them are not."""
    graphs, breaks, failed, refused = (now - then for now, then in zip(_compiled(), before, strict=True))
    settings = torch._dynamo.config
    if not graphs:
        cause = " (torch._dynamo.config.suppress_errors hides the error)" * settings.suppress_errors
        cause = " (TORCHDYNAMO_DISABLE is set)" if settings.disable else cause
        return f"torch compiled nothing and ran the layers as they are{cause}", ""
    if refused:
        return f"torch compiled a layer {settings.recompile_limit} times, its limit, and then ran it as it is", ""
    parts = [counted(breaks, "graph break")] * bool(breaks)
    parts += [f"{counted(failed, 'function')} not compiled"] * bool(failed)
    return "", f"; {', '.join(parts)}" if parts else ""


def gave_up() -> bool:
    """Return whether torch stopped compiling in this process, without reporting it."""
    return bool(_compiled()[-1])


# -- the fused loss ----------------------------------------------------------------------------------------------------


def comparable(row: dict[str, Any]) -> dict[str, Any]:
    """Return COMPARED tokens of a row, including the first that is trained on."""
    trained = (torch.as_tensor(row["labels"]) >= 0).nonzero()
    first = int(trained[0]) if len(trained) else 0
    start = max(0, min(first - 1, len(row["labels"]) - COMPARED))
    part = {name: column[start : start + COMPARED] for name, column in row.items()}
    return part | {END: part[END] - start} if END in part else part
