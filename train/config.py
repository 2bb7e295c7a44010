"""Read the command line and the settings of a run; identify model and adapter.

train/qlora.yaml ─┐
                  ├─load_training_config─▶ TrainingConfig
--learning-rate … ┘   (the command line wins; settings_parser defines one option for each setting)

The digests of a model and of an adapter are part of the key of a run.
"""

from __future__ import annotations

import argparse
import hashlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, NoReturn, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, field_validator

from packcorpus.tasks.core.errors import DataError, UsageError
from packcorpus.tasks.core.other_tools import Place, where_to_set
from packcorpus.tasks.core.yaml_settings import Removed, check_settings, parse_settings, read_settings
from packcorpus.tasks.storage.files import sha256_of
from packcorpus.tasks.stores.urls import local_path_of, root_of

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo

# Name of the small Llama that is built from the seed, and of a real model for messages.
TOY, EXAMPLE = "toy", "Qwen/Qwen3-8B"
DEFAULT = Path(__file__).with_name("qlora.yaml")

# Settings that cannot change the adapter, so a run may be resumed with other values. A different micro_batch changes
# only rounding and the random numbers of dropout.
WITHOUT_EFFECT = {
    "output", "load", "gpus", "loader_workers", "micro_batch", "save_every", "samples", "report_to", "profile",
}  # fmt: skip

# Settings of earlier versions, and what to use instead.
REMOVED: Removed = {
    "load: stream": "use load: mmap, which reads more rows than memory holds",
    "cache": "leave it out: rows are read in place, or from the scratch folder if the corpus is in a bucket",
    "cache_bytes": "leave it out: there is no cache",
    "pin_memory": "leave it out: batches are always built in pinned memory",
    "keep_checkpoints": "leave it out: the newest two checkpoints are kept, and the best with keep: best",
}

# Settings that the key of a run omits at their defaults, so that runs of earlier versions keep their keys.
LATER = ("lora_variant", "modules_to_save", "adapter", "keep", "early_stopping", "sharding")

# Values in the key of every run, because earlier versions included them.
EARLIER = {"micro_batch": "auto"}

# Values in the key of a run for `auto`: the defaults before there was `auto`. Its results differ only by rounding.
BEFORE_AUTO = {"fused_loss": False, "compile": False, "activation_checkpointing": True}

# Defaults of earlier versions that are in the key of a run and have changed.
FORMER = {"attention": "sdpa", "lora_dropout": 0.05}

# Settings that the help lists first.
BASIC = (
    "base_model", "output", "epochs", "max_steps", "learning_rate", "tokens_per_step", "lora_r", "eval_every",
)  # fmt: skip

EPILOG = (
    "Other commands: packcorpus train doctor, diagnose, merge, and chat, each with --help, and packcorpus certify. "
    "Several machines or ranks: torchrun --nproc-per-node N -m packcorpus train CORPUS …"
)

# Options of removed settings lead to the error that says what to use.
REMOVED_OPTIONS = [name for name in REMOVED if ":" not in name]

AutoOrCount = Literal["auto"] | Annotated[int, Field(ge=1)]
# Experiment trackers, by the name of their package.
Tracker = Literal["tensorboard", "wandb", "trackio"]
Text = Annotated[str, Field(min_length=1)]
Names = Annotated[list[str], Field(min_length=1)]
Attention = Literal["auto", "sdpa", "eager", "flex", "flash2", "flash3", "varlen"]


class TrainingConfig(BaseModel):
    """All settings of a training run except the corpus."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    place: ClassVar[Place] = "training"

    base_model: Text | None = Field(
        None,
        description="A local folder, a Hugging Face name, or toy: a small Llama with random weights, to try things "
        "out. Required.",
    )
    tokenizer: Text | None = Field(
        None,
        description="The tokenizer the model will be used with; it must be the same as the corpus's. Absent: the "
        "base model's, or else the corpus's own copy.",
    )
    output: Text | None = Field(
        None, description="Folder of the run. Absent: data/adapters/<corpus>-<key of corpus and settings>."
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
    precision: Literal["auto", "bf16", "fp16", "fp32"] = Field(
        "auto", description="auto: bf16 on a GPU, or fp16 with loss scaling if it has no bf16; fp32 on a CPU."
    )
    attention: Attention = Field(
        "auto",
        description="Attention backend; auto: the fastest that keeps conversations apart, or sdpa on a CPU.",
    )
    quantization: Literal["nf4", "none"] = Field("nf4", description="Quantization of the frozen weights.")
    sharding: Literal["none", "full"] = Field(
        "none", description="full: every rank keeps a part of the frozen weights, for models larger than one GPU."
    )
    lora_r: int = Field(16, ge=1, le=1024, description="Rank of the adapter.")
    lora_alpha: float = Field(32, gt=0, description="The adapter is scaled by lora_alpha / lora_r.")
    lora_dropout: float = Field(0.0, ge=0, lt=1, description="Dropout of the adapter.")
    lora_targets: Literal["all", "attention"] | Names = Field(
        "all",
        description="all: every linear layer of the decoder, and its experts; attention: q, k, v, and o; or a list of "
        "names of layers, such as [q_proj, v_proj].",
    )
    lora_variant: Literal["lora", "rslora", "dora"] = Field(
        "lora", description="rslora: scaled by lora_alpha / √lora_r; dora: with a trained magnitude, slower."
    )
    modules_to_save: Names | None = Field(
        None,
        description="Train these modules as a whole in addition to the adapter, for new tokens: [embed_tokens, "
        "lm_head].",
    )
    adapter: Text | None = Field(
        None, description="Folder of an adapter to start from. Its rank, alpha, variant, and targets are used."
    )
    activation_checkpointing: Literal["auto", "offload"] | bool | Annotated[int, Field(ge=1)] = Field(
        "auto",
        description="Use less memory for up to a third more compute: true, a number N for every N-th layer, or "
        "offload to main memory. auto: measured, as little as the memory allows.",
    )
    compile: Literal["auto"] | bool = Field(
        "auto",
        description="Use torch.compile, if steps with it give the same loss and passes are faster; auto: on a GPU.",
    )
    fused_loss: Literal["auto"] | bool = Field(
        "auto",
        description="Compute logits only for trained tokens, in chunks, if one step with it gives the same loss; "
        "auto: true, except in runs of an earlier version.",
    )
    optimizer: Literal["adamw_torch_fused", "paged_adamw_8bit"] = Field(
        "adamw_torch_fused", description="The 8-bit optimizer uses less memory."
    )
    learning_rate: Literal["auto"] | Annotated[float, Field(gt=0, lt=1)] = Field(
        "auto", description="Peak learning rate; auto: 2e-4, or 2e-3 for toy, whose weights are random."
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

    @field_validator("base_model")
    @classmethod
    def _toy(cls, name: str | None) -> str | None:
        # Here and in records and keys, None is the toy: earlier versions trained it if no model was named.
        return None if name == TOY else name

    @property
    def rate(self) -> float:
        """Return the learning rate in effect."""
        usual = 2e-4 if self.base_model else 2e-3
        return usual if self.learning_rate == "auto" else self.learning_rate

    @property
    def trackers(self) -> list[str]:
        """Return the experiment trackers to log to."""
        named = [self.report_to] if isinstance(self.report_to, str) else list(dict.fromkeys(self.report_to))
        return [name for name in named if name != "none"]

    def settings(self) -> dict[str, Any]:
        """Return every setting that can change the adapter, except defaults in LATER."""
        later = {name for name in LATER if getattr(self, name) == type(self).model_fields[name].default}
        values = self.model_dump(exclude=WITHOUT_EFFECT | later) | EARLIER
        return values | {name: value for name, value in BEFORE_AUTO.items() if values[name] == "auto"}

    def as_before(self) -> TrainingConfig:
        """Return the settings with defaults of an earlier version instead of today's."""
        fields = type(self).model_fields
        return self.model_copy(update={n: old for n, old in FORMER.items() if getattr(self, n) == fields[n].default})

    def check_evaluation(self, corpus: str, validation_rows: int) -> None:
        """Check that settings have the validation split and `eval_every` that they need."""
        deciding: dict[str, Any] = {
            "keep: best": self.keep == "best",
            f"early_stopping: {self.early_stopping}": self.early_stopping,
        }
        asked = deciding | {f"{name}: {getattr(self, name)}": getattr(self, name) for name in ("eval_every", "samples")}
        if not validation_rows and (setting := next((name for name, is_set in asked.items() if is_set), None)):
            raise DataError(
                "no_validation",
                f"{setting} requires a validation split, which the corpus {corpus} does not have; add a line such as "
                "`validation: 0.05` to the corpus config and pack again, or leave the setting out",
            )
        if not self.eval_every and (setting := next((name for name, is_set in deciding.items() if is_set), None)):
            raise UsageError(
                "needs_eval_every",
                f"{setting} compares evaluations, but there is only one, at the end; set the steps between "
                "evaluations, such as eval_every: 50",
            )


def load_training_config(
    path: Path = DEFAULT, overrides: dict[str, str] | None = None, *, needs_model: bool = False
) -> TrainingConfig:
    """Read and check a training config; `overrides` maps keys to YAML texts.

    With `needs_model`, settings that name no base model are a UsageError.
    """
    values = read_settings(path, REMOVED)
    for key, text in (overrides or {}).items():
        values |= parse_settings(f"{key}: {text}", f"--{key.replace('_', '-')} {text}", REMOVED)
    place = str(path)
    if overrides:
        place = "the command line" if path == DEFAULT else f"{path} with the command line"
    if needs_model and values.get("base_model") is None:
        raise UsageError(
            "no_base_model",
            f"base_model: is not set; name the model to train, such as --base-model {EXAMPLE}, or try everything with "
            f"the tiny random model: --base-model {TOY}",
        )
    return check_settings(TrainingConfig, values, place)


UNKNOWN = "unrecognized arguments: "  # in messages of argparse


class Parser(argparse.ArgumentParser):
    """ArgumentParser that raises UsageError instead of ending the process."""

    def error(self, message: str) -> NoReturn:
        option = message.removeprefix(UNKNOWN).split()[0] if message.startswith(f"{UNKNOWN}-") else ""
        if elsewhere := where_to_set(option, "training"):
            message = f"{message}; {elsewhere}"
        raise UsageError("bad_command_line", f"{message}; see {self.prog} --help")


def settings_parser(prog: str, description: str) -> Parser:
    """Build a parser with the options shared by all commands that take a corpus."""
    usage = f"{prog} [CORPUS] --base-model MODEL [OPTION…]"
    ours = Parser(prog=prog, usage=usage, description=description, epilog=EPILOG, allow_abbrev=False)
    text = "a manifest (file, URL, name, or key), a corpus folder, or a folder of shards (default: the latest corpus)"
    ours.add_argument("corpus", nargs="?", metavar="CORPUS", type=local_path_of, help=text)
    ours.add_argument("--manifest", type=local_path_of, help=argparse.SUPPRESS)  # the same, for programs
    text = "YAML file of settings (default: train/qlora.yaml)"
    ours.add_argument("--config", type=Path, metavar="FILE", default=DEFAULT, help=text)
    text = "folder that contains data/ and manifests/ (default: this folder)"
    ours.add_argument("--root", type=root_of, metavar="FOLDER", default=Path(), help=text)
    ours.add_argument("--where", action="store_true", help="print the path of the run's record and exit")
    ours.add_argument("--debug", action="store_true", help="print a traceback if an error occurs")
    basic = ours.add_argument_group("basic settings (override those of the file)")
    expert = ours.add_argument_group("expert settings")
    for name in (*BASIC, *(name for name in TrainingConfig.model_fields if name not in BASIC)):
        field = TrainingConfig.model_fields[name]
        text = (field.description or "").replace("%", "%%")
        if field.default is not None:
            default = str(field.default).lower() if isinstance(field.default, bool) else field.default
            text += f" (default: {default})"
        values = "MODEL" if name == "base_model" else _values(field)
        group = basic if name in BASIC else expert
        group.add_argument(_option(name), dest=f"set_{name}", metavar=values, help=text)
    for name in REMOVED_OPTIONS:
        expert.add_argument(_option(name), dest=f"set_{name}", help=argparse.SUPPRESS)
    return ours


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def config_of(options: argparse.Namespace) -> TrainingConfig:
    """Return the settings of the config file, overridden by the options."""
    return load_training_config(options.config, overrides(options), needs_model=True)


def words_of(options: argparse.Namespace) -> list[str]:
    """Return the command line of a process that does the same."""
    words = ["--manifest", str(options.manifest), "--root", str(options.root), *["--debug"] * options.debug]
    words += [] if options.config == DEFAULT else ["--config", str(options.config)]
    return [*words, *(f"{_option(name)}={text}" for name, text in overrides(options).items())]


def overrides(options: argparse.Namespace) -> dict[str, str]:
    """Return the settings given as options: {name: YAML text}."""
    given = {name: getattr(options, f"set_{name}") for name in (*TrainingConfig.model_fields, *REMOVED_OPTIONS)}
    return {name: text for name, text in given.items() if text is not None}


def _values(field: FieldInfo) -> str:
    """Return the values that a setting accepts, such as `auto|N`."""
    kinds = get_args(field.annotation) or (field.annotation,)
    words: list[str] = []
    for kind in kinds:
        words += [str(word) for word in get_args(kind)] if get_origin(kind) is Literal else []
        words += [kind] if isinstance(kind, str) else []
    names = {int: "N", float: "X", bool: "true|false", str: "TEXT"}
    bare = [get_args(kind)[0] if get_origin(kind) is Annotated else kind for kind in kinds]
    words += [names[kind] for kind in bare if kind in names]
    words += ["[NAME,…]" for kind in bare if get_origin(kind) is list]
    return "|".join(words)


# -- digests -----------------------------------------------------------------------------------------------------------

ADAPTER_WEIGHTS, ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"
# Number of samples that are hashed in each file of a base model, and the bytes of a sample. A file of up to 1 MiB is
# hashed as a whole.
SAMPLES, SAMPLE = 256, 4096


def folder_digest(folder: Path) -> str:
    """Identify a local model by its small files and by samples of its large files."""
    # Reading all weights would take minutes. Training changes most weights, so samples reveal it.
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            size = path.stat().st_size
            digest.update(f"{path.relative_to(folder).as_posix()}\0{size}\0".encode())
            with path.open("rb") as file:
                for start in range(0, size, max(SAMPLE, size // SAMPLES)):
                    file.seek(start)
                    digest.update(file.read(SAMPLE))
    return digest.hexdigest()


def adapter_digest(folder: Path) -> str:
    """Identify an adapter by its weights and its settings."""
    return hashlib.sha256("".join(sha256_of(path) for path in adapter_files(folder)).encode()).hexdigest()


def adapter_files(folder: Path) -> tuple[Path, Path]:
    """Return the files with the weights and the settings of an adapter."""
    files = folder / ADAPTER_WEIGHTS, folder / ADAPTER_CONFIG
    if not folder.is_dir():
        raise DataError("bad_adapter", f"adapter: {folder}: no such folder; use one that contains {ADAPTER_WEIGHTS}")
    if not files[0].is_file() and (folder / "adapter_model.bin").is_file():
        raise DataError(
            "bad_adapter",
            f"adapter: {folder}: contains adapter_model.bin, a pickle, which can run any code when it is read; save "
            f"the adapter as {ADAPTER_WEIGHTS}",
        )
    if missing := next((path.name for path in files if not path.is_file()), None):
        text = f"adapter: {folder}: contains no {missing}; use a folder written by save_pretrained"
        raise DataError("bad_adapter", text)
    return files
