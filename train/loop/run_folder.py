"""Folder of one training run, and the key that identifies the run.

    data/adapters/<name>-<key12>/
        run.json             the run: corpus, settings, and the measurements of its first start
        checkpoint-N/        with complete.json, the list of its files, written last
        adapter_model.safetensors, adapter_config.json, the tokenizer, training.svg
        training.json        the record, written last: the run is finished
        run.lock             held while the run is in progress

The key is a digest of the corpus's key, every setting that can change the adapter, the base model, and the adapter that
the run starts from, if any. A changed setting makes another run in another folder. The same command resumes the run.
"""

from __future__ import annotations

import hashlib
import sys
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import orjson

from packcorpus.tasks.core.errors import Busy, DataError, UsageError
from packcorpus.tasks.core.printable import printable
from packcorpus.tasks.storage.files import acquire_lock, read_json, to_json, write_bytes
from packcorpus.train.config import EARLIER, FORMER, TrainingConfig, adapter_digest, folder_digest
from packcorpus.train.data.corpus import Corpus

# Settings that may differ between ranks: they name files on a machine, or do not change the joint work of the ranks.
OWN = {"base_model", "tokenizer", "adapter", "output", "load", "gpus"}
LOCK = "run.lock"
# Prefix of the files that show whether machines share the folder. A killed run may leave some behind.
MARK = ".rank-"
# Environment variable that `diagnose` sets for its trials, which are only timed.
WITHOUT_VALIDATION = "PACKCORPUS_WITHOUT_VALIDATION"
# The same for two times by time.monotonic(), as "SOON LATEST": a trial ends with the steps that it has made before the
# first, or before the second if these would be too few.
UNTIL = "PACKCORPUS_UNTIL"
# Steps of a trial that are enough: the first of them is not timed.
ENOUGH = 3
COMPLETE = "complete.json"


@dataclass(frozen=True, slots=True)
class Choices:
    """Machine of a run, and the measurements of its first start there."""

    device: str
    precision: str
    ranks: int
    attention: str
    micro_batch: int  # rows per forward pass
    accumulation: int  # passes per optimizer step
    tokens_per_second: float  # of one rank
    table: list[str]  # the measurements, for display
    notes: list[str]
    options: dict[str, bool] | None = None  # whether each option is used; None if an earlier version wrote this
    reduced: list[str] = field(default_factory=list)  # each reduction of the micro-batch, in words
    step: int | None = None  # rows of one optimizer step, over all ranks; None: all passes of all ranks are full
    checkpointing: bool | int | Literal["offload"] | None = (
        None  # see train.model.checkpointing; None: an earlier version wrote this
    )

    @property
    def rows_per_step(self) -> int:
        """Return the number of rows of one optimizer step, over all ranks."""
        return self.step or self.micro_batch * self.accumulation * self.ranks

    def halved(self, why: str) -> Choices | None:
        """Return these choices with at most half the micro-batch; None if it is 1."""
        if self.micro_batch == 1:
            return None
        rows = self.micro_batch * self.accumulation
        size = largest_divisor(rows, self.micro_batch // 2)
        table = [*self.table, f"micro-batch {size} × accumulation {rows // size}: {why}"]
        return replace(self, micro_batch=size, accumulation=rows // size, reduced=[*self.reduced, why], table=table)


def largest_divisor(rows: int, most: int) -> int:
    """Return the largest divisor of `rows` up to `most`."""
    return next(size for size in range(min(rows, most), 0, -1) if rows % size == 0)


class RunFolder:
    """Paths of a run, and its `run.json`."""

    def __init__(self, root: Path, config: TrainingConfig, corpus: Corpus):
        digest = model_digest(config.base_model)
        self._base_digests = {Path(config.base_model): digest} if config.base_model and digest else {}
        settings = config.settings()
        self.identity: dict[str, Any] = {"version": 1, "corpus": corpus.key, "settings": settings, "base_model": digest}
        if config.adapter:
            self.identity["adapter"] = adapter_digest(Path(config.adapter))
        self.key = _key(self.identity)
        default = root / "data" / "adapters" / f"{corpus.name}-{self.key[:12]}"
        self.path = Path(config.output) if config.output else default
        former = self.identity | {"settings": config.as_before().settings()}
        self._former = root / "data" / "adapters" / f"{corpus.name}-{_key(former)[:12]}"
        corpus_digest = corpus.manifest.digest if corpus.manifest else corpus.key
        # Facts that all ranks of a run must share. Paths may differ. The base model is compared after it is loaded.
        self.facts = {"corpus": f"{corpus.name} {corpus.key[:12]}", "manifest digest": corpus_digest[:16]} | {
            name: str(value) for name, value in config.model_dump(exclude=OWN).items()
        }
        if config.adapter:
            self.facts["adapter"] = self.identity["adapter"][:16]
        self.record = self.path / "training.json"
        self._run = self.path / "run.json"

    def base_digest(self, base: Path) -> str:
        """Return the digest of a local base model, computed only once."""
        if base not in self._base_digests:
            self._base_digests[base] = folder_digest(base)
        return self._base_digests[base]

    def report_finished(self) -> None:
        """Print the path of the record of a run that is already finished."""
        print("already trained, nothing to do", file=sys.stderr)
        print(printable(str(self.record)))

    def check(self) -> None:
        """Raise DataError or UsageError if the folder does not belong to this run."""
        if not self._run.exists():
            # A run that was killed while it wrote run.json leaves a partial file.
            left = (f".{self._run.name}.", MARK)
            if self.path.is_dir() and any(p.name != LOCK and not p.name.startswith(left) for p in self.path.iterdir()):
                text = f"{self.path}: contains files that do not belong to a training run; set another `output`"
                raise UsageError("run_folder_taken", text)
            return
        found = read_json(self._run)
        if found.get("corpus") != self.identity["corpus"]:
            raise DataError(
                "foreign_run",
                f"{self.path}: was trained on corpus {str(found.get('corpus'))[:12]}, but this is corpus "
                f"{self.identity['corpus'][:12]}; set another `output`, or delete the folder to start over",
            )
        # In earlier versions, micro_batch was a setting like all others.
        earlier = {name: found.get(name) for name in self.identity} | {"settings": found.get("settings", {}) | EARLIER}
        if self.key not in (found.get("key"), _key(earlier)):
            before, now = found.get("settings", {}), self.identity["settings"]
            if str(before.get("load", "")).startswith("stream"):
                raise UsageError(
                    "run_folder_taken",
                    f"{self.path}: was trained with load: stream, which was removed with its order of rows; set "
                    "another `output`, or finish the run with the version that started it",
                )
            names = sorted(name for name in {*before, *now} if before.get(name) != now.get(name))
            changes = ", ".join(f"{name} {before.get(name)} → {now.get(name)}" for name in names) or "the base model"
            raise UsageError(
                "run_folder_taken",
                f"{self.path}: was trained with other settings ({changes}); set another `output`, or delete the folder",
            )

    def warnings(self) -> list[str]:
        """Return a warning if an earlier version started the same command elsewhere."""
        if self._former == self.path or self._run.exists() or not (self._former / self._run.name).exists():
            return []
        old = ", ".join(f"{name}: {value}" for name, value in FORMER.items())
        return [
            f"{self._former}: an earlier version, with the defaults {old}, started this command there; this is another "
            "run. To resume that one, set these values"
        ]

    def claim(self) -> None:
        """Lock the folder until this process ends; raises Busy if it is locked."""
        if not acquire_lock(self.path / LOCK):
            raise Busy("busy", f"{self.path}: another run is using this folder; wait until it ends, then retry")

    def choices(self) -> Choices | None:
        """Return the choices of an earlier start of this run; None at the first start."""
        return Choices(**read_json(self._run)["choices"]) if self._run.exists() else None

    def steps_done(self) -> int:
        """Return the number of steps that a resumed run skips; 0 at the first start."""
        complete = [path for path in checkpoints_of(self.path) if (path / COMPLETE).exists()]
        return step_of(complete[-1]) if complete else 0

    def last_reduction(self) -> str:
        """Describe the last reduction of the micro-batch, and where the run continues."""
        choices, done = self.choices(), self.steps_done()
        if not (choices and choices.reduced):
            return "the micro-batch was reduced"
        start = f"from checkpoint-{done}" if done else "from the beginning"
        return f"{choices.reduced[-1]}: continuing {start} with {choices.micro_batch}"

    def write(self, choices: Choices) -> None:
        """Write run.json; a resumed run reuses the choices, so its losses are the same."""
        self.path.mkdir(parents=True, exist_ok=True)
        write_bytes(self._run, to_json({"key": self.key, **self.identity, "choices": asdict(choices)}))


def _key(identity: dict[str, Any]) -> str:
    return hashlib.sha256(orjson.dumps(identity, option=orjson.OPT_SORT_KEYS)).hexdigest()


def checkpoints_of(folder: Path) -> list[Path]:
    """Return the checkpoints of a run, complete or not, the newest last."""
    found = [p for p in folder.glob("checkpoint-*") if p.name.removeprefix("checkpoint-").isdecimal() and p.is_dir()]
    return sorted(found, key=step_of)


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("checkpoint-"))


def model_digest(base_model: str | None) -> str | None:
    """Identify a local model by its content, and a model on the Hub by its name."""
    return folder_digest(Path(base_model)) if base_model and Path(base_model).is_dir() else base_model
