"""Define the trials of a diagnosis, each of which changes one setting in effect.

settings + measurements of the baseline ─trials_of─▶ [Trial("attention", {"attention": "eager"}), …]

The most promising trials are first, because a time budget may end before the last.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

from packcorpus.train.config import TrainingConfig
from packcorpus.train.data.corpus import Corpus

# Factors that change the training itself. They are never part of the recommended options.
LEARNS_OTHERWISE = ("precision", "quantization", "optimizer", "lora_r", "lora_targets")

# In the order of the trials. `sequence_length` and `packing` change the corpus. The last two load the model again.
FACTORS = (
    "sequence_length", "attention", "activation_checkpointing", "micro_batch", "fused_loss", "packing", "compile",
    "lora_targets", "optimizer", "lora_r", "loader_workers", "quantization", "precision",
)  # fmt: skip

# Factors that change the memory of a pass, so the best number of rows per pass is another one.
CHANGES_MEMORY = (
    "attention", "activation_checkpointing", "fused_loss", "compile", "lora_targets", "optimizer", "lora_r",
    "quantization", "precision",
)  # fmt: skip

# The factors of trials that change none of these factors, or several of them.
BASELINE, COMBINED = "baseline", "combined"

SHORTEST = 128  # tokens of a row

# The settings against which rounding is measured.
REFERENCE = {"precision": "fp32", "attention": "eager", "compile": False, "fused_loss": False}


@dataclass(frozen=True, slots=True)
class Trial:
    """Run with some settings changed, perhaps on a corpus that is packed again."""

    name: str
    factor: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    corpus: Mapping[str, Any] = field(default_factory=dict)
    loses: bool = False  # whether it lacks conversations that do not fit into its rows

    @property
    def same_training(self) -> bool:
        """Return whether the same conversations are learned with the same precision."""
        return not self.loses and self.factor not in LEARNS_OTHERWISE

    @property
    def changes(self) -> Mapping[str, Any]:
        """Return all changed settings of the run and of the corpus."""
        return {**self.settings, **self.corpus}


@dataclass(frozen=True, slots=True)
class InEffect:
    """Settings in effect in the baseline."""

    device: str  # cpu or cuda
    precision: str
    attention: str
    micro_batch: int
    rows_per_step: int  # of one rank
    sequence_length: int
    packed: bool
    has_fused_loss: bool
    compiled: bool
    checkpointing: bool | int | str

    @classmethod
    def of(cls, record: dict[str, Any], corpus: Corpus) -> InEffect:
        """Return the settings in effect in a finished run, by its training.json."""
        choices = record["choices"]
        options = choices["options"] or {}
        return cls(
            device=choices["device"],
            precision=choices["precision"],
            attention=choices["attention"],
            micro_batch=choices["micro_batch"],
            rows_per_step=choices["micro_batch"] * choices["accumulation"],
            sequence_length=corpus.sequence_length,
            packed=corpus.packed,
            has_fused_loss=bool(options.get("fused_loss")),
            compiled=bool(options.get("compile")),
            checkpointing=choices["checkpointing"],
        )

    def measured(self) -> dict[str, Any]:
        """Return the values of settings that can be `auto`."""
        return {
            "device": self.device, "precision": self.precision, "attention": self.attention,
            "micro_batch": self.micro_batch, "fused_loss": self.has_fused_loss, "compile": self.compiled,
            "activation_checkpointing": self.checkpointing,
        }  # fmt: skip


def trials_of(config: TrainingConfig, now: InEffect) -> list[Trial]:
    """Return the trials that apply here, the best of each factor first."""
    on_gpu = now.device == "cuda"
    backends = ("flash3", "flash2", "varlen", "flex", "sdpa", "eager") if on_gpu else ("sdpa", "eager")
    options: dict[str, list[Any]] = {
        "attention": [name for name in backends if name != now.attention],
        "activation_checkpointing": [way for way in (False, 2, True) if way != now.checkpointing],
        "micro_batch": [
            size
            for size in (2 * now.micro_batch, now.micro_batch // 2)
            if size and now.rows_per_step % size == 0 and size <= now.rows_per_step
        ],
        "fused_loss": [not now.has_fused_loss],
        "compile": [not now.compiled],
        "precision": [name for name in ("bf16", "fp16", "fp32") if name != now.precision] if on_gpu else [],
        "quantization": ["none" if config.quantization == "nf4" else "nf4"],
        "lora_targets": ["attention" if config.lora_targets == "all" else "all"],
        "optimizer": ["paged_adamw_8bit" if config.optimizer == "adamw_torch_fused" else "adamw_torch_fused"],
        "lora_r": [rank for rank in (config.lora_r // 2, 2 * config.lora_r) if rank],
        "loader_workers": [0 if config.loader_workers else 2],
    }
    # Some other backends do not compute in fp32.
    also = {} if now.attention in ("sdpa", "eager") else {"attention": "sdpa"}
    trials = []
    for factor, values in options.items():
        # A number of rows per pass that the user has set is kept.
        measured = {"micro_batch": "auto"} if factor in CHANGES_MEMORY and config.micro_batch == "auto" else {}
        for value in values:
            settings = {factor: value} | measured | (also if value == "fp32" else {})
            trials.append(Trial(f"{factor}: {as_word(value)}", factor, settings))
    if not now.packed:
        return trials
    for length in (now.sequence_length // 2, 2 * now.sequence_length, now.sequence_length // 4):
        if length >= SHORTEST:  # the number of tokens per pass stays the same
            size = {"micro_batch": max(1, now.micro_batch * now.sequence_length // length)}
            trials.append(Trial(f"sequence_length: {length}", "sequence_length", size, {"sequence_length": length}))
    return [*trials, Trial("packing: false", "packing", {"micro_batch": "auto"}, {"packing": False})]


def in_order(trials: list[Trial]) -> list[Trial]:
    """Return the first trial of each factor, then the second ones, and so on."""
    # FACTORS has the most promising first. Eager attention is never faster, but the others are compared with it.
    of_factor = {factor: [trial for trial in trials if trial.factor == factor] for factor in FACTORS}
    turns = [trial for turn in zip_longest(*of_factor.values()) for trial in turn if trial]
    return sorted(turns, key=lambda trial: trial.settings.get("attention") == "eager")


def refusal(trial: Trial, unavailable: Mapping[str, Mapping[str, str]]) -> str:
    """Return why this machine cannot run a trial; "" if it may be able to."""
    # `unavailable` is from training.json of the baseline: {setting: {value: reason}}.
    found = (unavailable.get(name, {}).get(as_word(value), "") for name, value in trial.settings.items())
    return next(filter(None, found), "")


def combined(winners: list[Trial]) -> Trial:
    """Return one trial that combines all winners."""
    # If two winners set the micro-batch, it is measured.
    settings: dict[str, Any] = {}
    corpus: dict[str, Any] = {}
    for trial in winners:
        settings |= {name: "auto" if name in settings else value for name, value in trial.settings.items()}
        corpus |= trial.corpus
    return Trial(" + ".join(trial.name for trial in winners), COMBINED, settings, corpus)


def option(name: str, value: Any) -> tuple[str, str]:
    """Return a setting as an option of the command line."""
    return f"--{name.replace('_', '-')}", as_word(value)


def as_word(value: Any) -> str:
    """Return the value of a setting, written as in YAML."""
    return str(value).lower() if isinstance(value, bool) else str(value)
