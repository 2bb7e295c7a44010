"""Measure how fast each rank computes, without its waiting for other ranks.

    forward: from the model's call to its return        ┐ of every pass: seconds and tokens of this rank
    backward: from the loss to the rank's last gradient ┘
      ─gather─▶ one RankSpeed per rank ─slow_ranks─▶ a warning

All ranks finish a step at the same time, because an early rank waits in the exchange of the gradients. A rank starts to
wait once its last gradient is ready, so its clock stops there. On a GPU, times are events in its queue. They are read
after the GPU has passed them, so that nothing waits for them.
"""

from __future__ import annotations

import re
import socket
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import TrainerCallback

from tasks.core.printable import counted
from train.machine.clock import Clock
from train.machine.ranks import gather

# A rank below this share of the median speed is reported.
SLOW = 0.95
# Passes of each rank that are not measured, rounded up to steps, because the first passes load libraries and kernels.
WARM_UP = 2


@dataclass(frozen=True, slots=True)
class RankSpeed:
    """Speed of a rank, without the time that it waits for other ranks.

    Tokens include padding. `step_seconds` is for one optimizer step. `data_wait` is the share of the rank's time in
    which it waited for its own batches.
    """

    rank: int
    host: str
    device: str
    steps: int
    tokens_per_second: float | None  # None if too few passes were measured, or the model is sharded
    step_seconds: float | None
    data_wait: float


class RankClock(TrainerCallback):
    """Callback that measures the passes of this rank's model during training."""

    def __init__(self, device: torch.device, name: str):
        self._clock = Clock(device)
        self._device = f"{device}, {name}" if device.type == "cuda" else name
        self._handles: list[Any] = []
        self._spans: list[tuple[Any, Any, int]] = []  # (start, end, tokens) that have not been read
        self._start: Any = None
        self._last_gradient: Any = None
        self._backward: Any = None
        self._passes = self._steps = self.tokens = 0
        self._is_warm = False
        self.seconds = 0.0

    # -- the clock -----------------------------------------------------------------------------------------------------

    def _read(self, wait: bool = False) -> None:
        """Add up the spans whose end has passed."""
        left = []
        for start, end, tokens in self._spans:
            if wait:
                self._clock.wait_for(end)
            if not self._clock.has_passed(end):
                left.append((start, end, tokens))
                continue
            self.seconds += self._clock.seconds(start, end)
            self.tokens += tokens
        self._spans = left

    # -- the model -----------------------------------------------------------------------------------------------------

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **others: Any) -> None:
        model = getattr(model, "module", model)  # within DistributedDataParallel
        if getattr(model, "shards_frozen_weights", False):
            return  # its ranks wait for each other in every layer, so that none has its own speed
        self._handles = [
            model.register_forward_pre_hook(self._before_forward, with_kwargs=True),
            model.register_forward_hook(self._after_forward),
            *(weights.register_post_accumulate_grad_hook(self._after_gradient) for weights in last_weights(model)),
        ]

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self._end_pass()
        self._steps += self._is_warm
        self._is_warm = self._is_warm or self._passes >= WARM_UP
        self._read()

    def on_substep_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self._end_pass()

    def on_train_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _before_forward(self, model: Any, args: Any, batch: dict[str, Any]) -> None:
        self._start = self._clock.now()
        self._tokens = batch["input_ids"].numel()

    def _after_forward(self, model: Any, args: Any, out: Any) -> None:
        self._forward = (self._start, self._clock.now())
        # A result is the loss, or an input of TRL's loss. The gradient of one of them is the first of the backward
        # pass.
        for result in out.values():
            if torch.is_tensor(result) and result.requires_grad:
                result.register_hook(self._before_backward)

    def _before_backward(self, gradient: torch.Tensor) -> None:
        if self._backward is None:
            self._backward = self._clock.now()

    def _after_gradient(self, weights: torch.Tensor) -> None:
        self._last_gradient = self._clock.now()

    def _end_pass(self) -> None:
        """Store the times of the pass that has ended."""
        if self._backward is None or self._last_gradient is None:
            return
        self._passes += 1
        if self._is_warm:
            self._spans += [(*self._forward, self._tokens), (self._backward, self._last_gradient, 0)]
        self._backward = self._last_gradient = None

    # -- the ranks -----------------------------------------------------------------------------------------------------

    def speeds(self, rank: int, data_wait: float) -> list[RankSpeed]:
        """Return the speed of every rank.

        All ranks call this once, after the last step.
        """
        self._read(wait=True)
        own = RankSpeed(
            rank,
            socket.gethostname(),
            self._device,
            self._steps,
            round(self.tokens / self.seconds, 3) if self.seconds else None,
            round(self.seconds / self._steps, 6) if self._steps else None,
            data_wait,
        )
        return gather(own)


def last_weights(model: Any) -> list[Any]:
    """Return the trained weights whose gradients come last.

    They belong to the first layer that has trained weights.
    """
    trained = [(name, weights) for name, weights in model.named_parameters() if weights.requires_grad]
    numbers = [int(found[1]) if (found := re.search(r"\.(\d+)\.", name)) else -1 for name, _ in trained]
    return [weights for (_, weights), number in zip(trained, numbers, strict=True) if number == min(numbers)]


def slow_ranks(speeds: Sequence[RankSpeed]) -> str | None:
    """Return a warning about ranks that are more than 5 % slower than the median.

    Returns None if there are none, or if fewer than two speeds are known.
    """
    known = {speed: speed.tokens_per_second for speed in speeds if speed.tokens_per_second}
    if len(known) < 2:
        return None
    median = statistics.median(known.values())
    slow = [(speed, rate) for speed, rate in known.items() if rate < SLOW * median]
    if not slow:
        return None
    names = ", ".join(
        f"rank {speed.rank} ({speed.host}, {speed.device}) by {100 * (1 - rate / median):.0f} %" for speed, rate in slow
    )
    return (
        f"{counted(len(slow), 'rank')} computed more slowly than the median of {median:,.0f} tokens/s, and the others "
        f"waited: {names}. See whether other processes run there, and whether the device is throttled"
    )
