"""The folder of one training run, and what makes it the same run tomorrow.

    data/adapters/<name>-<key12>/
        run.json             what the run is: corpus, settings, and what was measured and chosen at its first start
        checkpoint-N/        with complete.json, the list of its files, written last
        adapter_model.safetensors, adapter_config.json, the tokenizer, training.svg
        training.json        the record, written last: the run is done
        run.lock             held while the run is at work

The key is a digest of the corpus's key, every setting that can change the adapter, and the base model. A changed
setting is another run in another folder; the same command goes on where the last one stopped.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import orjson

from tasks.core.errors import Busy, DataError, UsageError
from tasks.storage.files import lock, read_json, to_json, write_bytes
from train.config import TrainingConfig
from train.data.corpus import Corpus

VERSION = 1
LOCK = "run.lock"
COMPLETE = "complete.json"


class RunFolder:
    """Paths of a run, and its `run.json`."""

    def __init__(self, root: Path, config: TrainingConfig, corpus: Corpus):
        self.identity: dict[str, Any] = {
            "version": VERSION,
            "corpus": corpus.key,
            "settings": config.settings(),
            "base_model": _digest_of_model(config.base_model),
        }
        self.key = hashlib.sha256(orjson.dumps(self.identity, option=orjson.OPT_SORT_KEYS)).hexdigest()
        default = root / "data" / "adapters" / f"{corpus.name}-{self.key[:12]}"
        self.path = Path(config.output) if config.output else default
        self.record = self.path / "training.json"
        self._run = self.path / "run.json"

    def check(self) -> None:
        """Refuse a folder that holds a run of another corpus or of other settings. Raises DataError or UsageError."""
        if not self._run.exists():
            # A run that was ended while it wrote run.json leaves that half-written.
            half = f".{self._run.name}."
            if self.path.is_dir() and any(p.name != LOCK and not p.name.startswith(half) for p in self.path.iterdir()):
                raise UsageError(
                    "run_folder_taken", f"{self.path}: holds other files than a training run's; name another `output`"
                )
            return
        found = read_json(self._run)
        if found.get("corpus") != self.identity["corpus"]:
            raise DataError(
                "foreign_run",
                f"{self.path}: was trained on corpus {str(found.get('corpus'))[:12]}, this is corpus "
                f"{self.identity['corpus'][:12]}; name another `output`, or delete the folder to start anew",
            )
        if found.get("key") != self.key:
            before, now = found.get("settings", {}), self.identity["settings"]
            changed = sorted(name for name in {*before, *now} if before.get(name) != now.get(name))
            what = ", ".join(f"{name} {before.get(name)} → {now.get(name)}" for name in changed) or "the base model"
            raise UsageError(
                "run_folder_taken",
                f"{self.path}: was trained with other settings ({what}); name another `output`, or delete the folder",
            )

    def claim(self) -> None:
        """Make sure that no other process trains in this folder, for as long as this one lives. Raises Busy."""
        if not lock(self.path / LOCK):
            raise Busy("busy", f"{self.path}: another run is at work in it; wait for it, then run again")

    def choices(self) -> dict[str, Any]:
        """What an earlier start of this run measured and chose; {} at the first."""
        return read_json(self._run).get("choices", {}) if self._run.exists() else {}

    def steps_done(self) -> int:
        """Optimizer steps that this run need not make again; 0 where it is the first start."""
        sealed = [path for path in by_step(self.path) if (path / COMPLETE).exists()]
        return step_of(sealed[-1]) if sealed else 0

    def begin(self, choices: dict[str, Any]) -> None:
        """Write what the run is. A resumed run then takes the same choices, and its losses are the same."""
        self.path.mkdir(parents=True, exist_ok=True)
        write_bytes(self._run, to_json({"key": self.key, **self.identity, "choices": choices}))


def by_step(folder: Path) -> list[Path]:
    """The checkpoints of a run, sealed or not, the newest last."""
    found = [p for p in folder.glob("checkpoint-*") if p.name.removeprefix("checkpoint-").isdecimal() and p.is_dir()]
    return sorted(found, key=step_of)


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("checkpoint-"))


def _digest_of_model(base_model: str | None) -> str | None:
    """Of a local folder: its small files by content, its weights by name and size (to read them takes minutes)."""
    if base_model is None or not Path(base_model).is_dir():
        return base_model
    digest = hashlib.sha256()
    for path in sorted(Path(base_model).rglob("*")):
        if path.is_file():
            size = path.stat().st_size
            digest.update(f"{path.relative_to(base_model).as_posix()}\0{size}\0".encode())
            if size < 1 << 20:
                digest.update(path.read_bytes())
    return digest.hexdigest()
