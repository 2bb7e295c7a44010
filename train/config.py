"""The settings of a training run: `qlora.yaml` and the command line → `TrainingConfig`.

train/qlora.yaml ─┐
                  ├─load_training_config─▶ TrainingConfig
--learning-rate … ┘   (the command line wins)
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from tasks.core.yaml_settings import check_settings, parse_settings, read_settings

DEFAULT = Path(__file__).with_name("qlora.yaml")

# Settings that do not change what is learned: a run may be resumed with others.
WITHOUT_EFFECT = {"output", "load", "gpus", "save_every", "keep_checkpoints", "report_to"}

AutoOrCount = Literal["auto"] | Annotated[int, Field(ge=1)]
Attention = Literal["auto", "sdpa", "eager", "flex", "flash2", "flash3", "varlen"]


class TrainingConfig(BaseModel):
    """Everything that a training run is told, the corpus aside."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    base_model: str | None = Field(
        None, min_length=1, description="A local folder or a hub name. Absent: a small Llama is built from the seed."
    )
    tokenizer: str | None = Field(
        None,
        min_length=1,
        description="The tokenizer that the model will be used with; its digest must be the manifest's. Absent: the "
        "base model's, or else the corpus's own copy.",
    )
    output: str | None = Field(
        None,
        min_length=1,
        description="Folder of the run. Absent: data/adapters/<corpus>-<key of corpus and settings>.",
    )
    load: Literal["auto", "memory", "mmap"] = Field(
        "auto", description="Where rows live; auto: in memory, if they fit in half of what is free."
    )
    allow_unisolated: bool = Field(
        False, description="Train on rows without position_ids, in which conversations see each other."
    )
    device: Literal["auto", "cuda", "cpu"] = Field("auto", description="auto: a GPU where there is one.")
    gpus: AutoOrCount = Field("auto", description="How many GPUs; auto: all that are visible.")
    precision: Literal["auto", "bf16", "fp32"] = Field("auto", description="auto: bf16 on a GPU, fp32 on a CPU.")
    attention: Attention = Field("sdpa", description="auto: the fastest that keeps conversations apart.")
    quantization: Literal["nf4", "none"] = Field("nf4", description="Of the frozen weights.")
    lora_r: int = Field(16, ge=1, le=1024, description="Rank of the adapter.")
    lora_alpha: float = Field(32, gt=0, description="Scale of the adapter: lora_alpha / lora_r.")
    lora_dropout: float = Field(0.05, ge=0, lt=1)
    lora_targets: Literal["all", "attention"] = Field(
        "all", description="all: every linear layer but the head; attention: q, k, v and o."
    )
    activation_checkpointing: bool = Field(True, description="Less memory, a third more compute.")
    compile: bool = Field(False, description="torch.compile, if a step with it gives the same loss.")
    fused_loss: bool = Field(False, description="Loss without logits in memory, if a step with it gives the same.")
    optimizer: Literal["adamw_torch_fused", "paged_adamw_8bit"] = "adamw_torch_fused"
    learning_rate: Literal["auto"] | Annotated[float, Field(gt=0, lt=1)] = Field(
        "auto", description="auto: 2e-4, or 2e-3 for the small Llama, which has random weights."
    )
    schedule: Literal["cosine", "linear", "constant"] = Field("cosine", description="Of the learning rate.")
    warmup: float = Field(0.03, ge=0, lt=1, description="Share of the steps in which the learning rate rises.")
    weight_decay: float = Field(0.0, ge=0, lt=1)
    max_grad_norm: float = Field(1.0, ge=0, description="0: gradients are not clipped.")
    epochs: float = Field(1.0, gt=0)
    max_steps: int | None = Field(None, ge=1, description="Optimizer steps, in place of epochs.")
    tokens_per_step: int = Field(16384, ge=1, description="Tokens of one optimizer step, over all GPUs.")
    micro_batch: AutoOrCount = Field("auto", description="Rows of one pass on one GPU; auto: measured.")
    eval_every: int | None = Field(None, ge=1, description="Steps between evaluations. Absent: at the end only.")
    save_every: int = Field(200, ge=1, description="Steps between checkpoints.")
    keep_checkpoints: int = Field(2, ge=1)
    report_to: Literal["none", "tensorboard", "wandb"] = "none"
    seed: int = Field(42, ge=0, lt=1 << 31)

    @field_validator("base_model", "tokenizer", "output")
    @classmethod
    def _home(cls, path: str | None) -> str | None:
        return os.path.expanduser(path) if path else path

    @property
    def rate(self) -> float:
        """The learning rate in effect."""
        if self.learning_rate == "auto":
            return 2e-4 if self.base_model else 2e-3
        return self.learning_rate

    def settings(self) -> dict[str, Any]:
        """Every setting that can change the adapter."""
        return self.model_dump(exclude=WITHOUT_EFFECT)


def load_training_config(path: Path = DEFAULT, overrides: dict[str, str] | None = None) -> TrainingConfig:
    """Read and check a training config; `overrides` are YAML texts by key and win over the file.

    Raises UsageError or InputMissing, naming the key and the nearest known one.
    """
    values = read_settings(path)
    for key, text in (overrides or {}).items():
        values |= parse_settings(f"{key}: {text}", f"--{key.replace('_', '-')} {text}")
    said = "the command line"
    where = str(path) if not overrides else said if path == DEFAULT else f"{path} with {said}"
    return check_settings(TrainingConfig, values, where)
