"""Judge the figures of a run and recommend changes.

    {"data": 0.11, "steps": 40, …} ─advise─▶ [Advice("time spent waiting for data", "11 %", "5 % or less", …), …]

`doctor`, `diagnose`, and the end of every run use one table of rules. Missing figures are not judged.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Rule:
    """Target range of a figure, and the action if the figure is outside of it.

    A bound that is None does not apply.
    """

    figure: str
    name: str
    action: str
    at_least: float | None = None
    at_most: float | None = None
    is_share: bool = True

    @property
    def target(self) -> str:
        low, high = (None if bound is None else self.shown(bound) for bound in (self.at_least, self.at_most))
        if low and high:
            return f"{low} to {high}"
        return f"{low} or more" if low else f"{high} or less"

    def shown(self, value: float) -> str:
        return f"{100 * value:.3g} %" if self.is_share else f"{value:,.0f}"

    def holds(self, value: float) -> bool:
        return (self.at_least is None or value >= self.at_least) and (self.at_most is None or value <= self.at_most)


@dataclass(frozen=True, slots=True)
class Advice:
    """Figure that misses its target."""

    name: str
    found: str
    target: str
    action: str

    def __str__(self) -> str:
        return f"{self.name}: {self.found}, should be {self.target}; {self.action}"


RULES = (
    Rule("data", "time spent waiting for data", "set load: memory, or loader_workers: 2 if rows are mapped",
         at_most=0.05),
    Rule("gpu", "time in the model and the optimizer", "batches are loaded or copied too slowly; set load: memory and "
         "pin_memory: true", at_least=0.85),
    Rule("optimizer", "time in the optimizer", "raise tokens_per_step, so that there are fewer steps",
         at_most=0.10),
    Rule("padding", "padding in the rows", "pack the conversations (packing: true), or use another sequence_length",
         at_most=0.03),
    Rule("memory_high", "memory of the GPU", "little is left: one longer batch may not fit; halve micro_batch, or set "
         "fused_loss: true", at_most=0.95),
    Rule("checkpointed", "memory of the GPU", "set activation_checkpointing: false, which is faster if it fits",
         at_least=0.70),
    Rule("small_batch", "memory of the GPU", "raise micro_batch, or set it to auto", at_least=0.70),
    Rule("steps", "optimizer steps", "a model learns little in so few steps; raise max_steps or epochs, or "
         "lower tokens_per_step", at_least=100, is_share=False),
    Rule("share_in_4_bits", "frozen weights in 4 bits", "the other weights, such as experts and embeddings, take "
         "four times the memory", at_least=0.80),
    Rule("wsl", "Linux inside Windows (WSL)", "keep corpora in the Linux file system (~), not below "
         "/mnt/c, and give WSL more memory in .wslconfig",
         at_most=0, is_share=False),
    Rule("workers", "loader workers for rows in memory", "set loader_workers: 0; a worker would only copy the rows "
         "again", at_most=0, is_share=False),
)  # fmt: skip


def advise(figures: Mapping[str, float], whose: Mapping[str, str] | None = None) -> list[Advice]:
    """Return advice for the figures that miss their targets, in the order of RULES.

    `whose` maps a figure of a single rank to a suffix for its name.
    """
    return [
        Advice(
            rule.name + (whose or {}).get(rule.figure, ""), rule.shown(figures[rule.figure]), rule.target, rule.action
        )
        for rule in RULES
        if rule.figure in figures and not rule.holds(figures[rule.figure])
    ]
