"""Read the settings of a training run from `qlora.yaml` and the command line.

train/qlora.yaml ─┐
                  ├─load_training_config─▶ TrainingConfig
--learning-rate … ┘   (the command line wins)
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from tasks.core.yaml_settings import Removed, check_settings, parse_settings, read_settings

DEFAULT = Path(__file__).with_name("qlora.yaml")

# Settings that cannot change the adapter, so a run may be resumed with other values. A different micro_batch changes
# only rounding and the random numbers of dropout.
WITHOUT_EFFECT = {
    "output", "load", "gpus", "loader_workers", "pin_memory", "micro_batch", "save_every", "keep_checkpoints",
    "samples", "report_to", "profile",
}  # fmt: skip

# Settings of earlier versions, and what to use instead.
REMOVED: Removed = {
    "load: stream": "use load: mmap, which reads more rows than memory holds",
    "cache": "leave it out: rows are read in place, or from the scratch folder if the corpus is in a bucket",
    "cache_bytes": "leave it out: there is no cache",
}

# Settings that the key of a run omits at their defaults, so that runs of earlier versions keep their keys.
LATER = ("lora_variant", "modules_to_save", "adapter", "keep", "early_stopping", "sharding")

# Values in the key of every run, because earlier versions included them.
EARLIER = {"micro_batch": "auto"}

AutoOrCount = Literal["auto"] | Annotated[int, Field(ge=1)]
# Experiment trackers, by the name of their package.
Tracker = Literal["tensorboard", "wandb", "trackio"]
Attention = Literal["auto", "sdpa", "eager", "flex", "flash2", "flash3", "varlen"]


class TrainingConfig(BaseModel):
    """All settings of a training run except the corpus."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    base_model: str | None = Field(
        None,
        min_length=1,
        description="A local folder or a Hugging Face name. Absent: a small Llama built from the seed.",
    )
    tokenizer: str | None = Field(
        None,
        min_length=1,
        description="The tokenizer the model will be used with; it must be the same as the corpus's. Absent: the "
        "base model's, or else the corpus's own copy.",
    )
    output: str | None = Field(
        None,
        min_length=1,
        description="Folder of the run. Absent: data/adapters/<corpus>-<key of corpus and settings>.",
    )
    load: Literal["auto", "memory", "mmap"] = Field(
        "auto",
        description="Where to keep the rows. auto: in memory if they fit in half of the free memory, or else mmap.",
    )
    allow_unisolated: bool = Field(
        False, description="Train on rows without position_ids, although conversations in a row then see each other."
    )
    device: Literal["auto", "cuda", "cpu"] = Field("auto", description="auto: a GPU if there is one.")
    gpus: AutoOrCount = Field("auto", description="Number of GPUs; auto: all that are visible.")
    loader_workers: int = Field(
        0, ge=0, le=64, description="Processes that build batches; for rows in memory, none are needed."
    )
    pin_memory: bool = Field(True, description="Build batches in pinned memory, from which a GPU copies faster.")
    precision: Literal["auto", "bf16", "fp16", "fp32"] = Field(
        "auto",
        description="auto: bf16 on a GPU, or fp16 with loss scaling if it has no bf16; fp32 on a CPU.",
    )
    attention: Attention = Field(
        "sdpa", description="Attention backend; auto: the fastest that keeps conversations apart."
    )
    quantization: Literal["nf4", "none"] = Field("nf4", description="Quantization of the frozen weights.")
    sharding: Literal["none", "full"] = Field(
        "none", description="full: every rank keeps a part of the frozen weights, for models larger than one GPU."
    )
    lora_r: int = Field(16, ge=1, le=1024, description="Rank of the adapter.")
    lora_alpha: float = Field(32, gt=0, description="The adapter is scaled by lora_alpha / lora_r.")
    lora_dropout: float = Field(0.05, ge=0, lt=1, description="Dropout of the adapter.")
    lora_targets: Literal["all", "attention"] | Annotated[list[str], Field(min_length=1)] = Field(
        "all",
        description="all: every linear layer of the decoder, and its experts; attention: q, k, v, and o; or a list of "
        "names of layers, such as [q_proj, v_proj].",
    )
    lora_variant: Literal["lora", "rslora", "dora"] = Field(
        "lora", description="rslora: scaled by lora_alpha / √lora_r; dora: with a trained magnitude, slower."
    )
    modules_to_save: Annotated[list[str], Field(min_length=1)] | None = Field(
        None,
        description="Train these modules as a whole in addition to the adapter, for new tokens: [embed_tokens, "
        "lm_head].",
    )
    adapter: str | None = Field(
        None,
        min_length=1,
        description="Folder of an adapter to start from. Its rank, alpha, variant, and targets are used.",
    )
    activation_checkpointing: bool = Field(True, description="Use less memory for a third more compute.")
    compile: bool = Field(
        False, description="Use torch.compile, if one step with it gives the same loss and passes are faster."
    )
    fused_loss: Literal["auto"] | bool = Field(
        "auto",
        description="Compute the loss without all logits in memory, if one step with it gives the same loss; "
        "auto: on a GPU.",
    )
    optimizer: Literal["adamw_torch_fused", "paged_adamw_8bit"] = Field(
        "adamw_torch_fused", description="The 8-bit optimizer uses less memory."
    )
    learning_rate: Literal["auto"] | Annotated[float, Field(gt=0, lt=1)] = Field(
        "auto", description="Peak learning rate; auto: 2e-4, or 2e-3 for the small Llama, whose weights are random."
    )
    schedule: Literal["cosine", "linear", "constant"] = Field("cosine", description="Learning-rate schedule.")
    warmup: float = Field(0.03, ge=0, lt=1, description="Share of the steps in which the learning rate rises.")
    weight_decay: float = Field(0.0, ge=0, lt=1, description="Weight decay of the optimizer.")
    max_grad_norm: float = Field(1.0, ge=0, description="Clip gradients to this norm; 0: no clipping.")
    epochs: float = Field(1.0, gt=0, description="Passes over the training rows.")
    max_steps: int | None = Field(None, ge=1, description="Number of optimizer steps; overrides epochs.")
    tokens_per_step: int = Field(16384, ge=1, description="Tokens per optimizer step, over all GPUs.")
    micro_batch: AutoOrCount = Field(
        "auto",
        description="Rows per forward pass on one GPU, rounded down to a divisor of the rows of a step. auto: "
        "measured, or 1 with sharding: full.",
    )
    eval_every: int | None = Field(None, ge=1, description="Steps between evaluations. Absent: only at the end.")
    keep: Literal["last", "best"] = Field(
        "last",
        description="Adapter to write at the end. best: the adapter with the lowest validation loss; requires "
        "eval_every.",
    )
    early_stopping: int | None = Field(
        None,
        ge=1,
        description="Stop after this number of evaluations without a lower validation loss; requires eval_every. "
        "Absent: never.",
    )
    samples: int = Field(
        0,
        ge=0,
        le=64,  # the other ranks wait while the first rank generates
        description="Number of validation conversations for which the model generates an answer at each evaluation, "
        "written to samples.jsonl.",
    )
    save_every: int = Field(200, ge=1, description="Steps between checkpoints.")
    keep_checkpoints: int = Field(
        2, ge=1, description="Number of newest checkpoints to keep. keep: best also keeps the best checkpoint."
    )
    report_to: Literal["none"] | Tracker | Annotated[list[Tracker], Field(min_length=1)] = Field(
        "none", description="Experiment tracker to log to, or a list such as [tensorboard, trackio]."
    )
    profile: int | None = Field(
        None,
        ge=1,
        le=100,
        description="Number of steps to trace with torch's profiler, written to trace.json.gz in the run folder.",
    )
    seed: int = Field(42, ge=0, lt=1 << 31, description="Seed of weights, order, and dropout.")

    @field_validator("base_model", "tokenizer", "output", "adapter")
    @classmethod
    def _home(cls, path: str | None) -> str | None:
        return os.path.expanduser(path) if path else path

    @property
    def rate(self) -> float:
        """Return the learning rate in effect."""
        if self.learning_rate == "auto":
            return 2e-4 if self.base_model else 2e-3
        return self.learning_rate

    @property
    def trackers(self) -> list[str]:
        """Return the experiment trackers to log to."""
        named = [self.report_to] if isinstance(self.report_to, str) else list(dict.fromkeys(self.report_to))
        return [name for name in named if name != "none"]

    def settings(self) -> dict[str, Any]:
        """Return every setting that can change the adapter.

        Settings in LATER are included only if they differ from their defaults.
        """
        later = {name for name in LATER if getattr(self, name) == type(self).model_fields[name].default}
        values = self.model_dump(exclude=WITHOUT_EFFECT | later) | EARLIER
        # The default of earlier versions. `auto` is off on a CPU, and on a GPU its results differ only by rounding.
        return values | ({"fused_loss": False} if self.fused_loss == "auto" else {})


def load_training_config(path: Path = DEFAULT, overrides: dict[str, str] | None = None) -> TrainingConfig:
    """Read and check a training config.

    `overrides` maps keys to YAML texts and takes precedence over the file. Raises InputMissing if the file does not
    exist, and UsageError if a setting is unknown or invalid. The error names the key and the closest known key.
    """
    values = read_settings(path, REMOVED)
    for key, text in (overrides or {}).items():
        values |= parse_settings(f"{key}: {text}", f"--{key.replace('_', '-')} {text}", REMOVED)
    place = str(path)
    if overrides:
        place = "the command line" if path == DEFAULT else f"{path} with the command line"
    return check_settings(TrainingConfig, values, place)
