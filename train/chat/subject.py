"""Find what a user wants to talk to.

    a run, by folder, name, or key ─┐
    a checkpoint of a run ──────────┼─find_subject─▶ Subject: folder of the weights, base model, facts of the corpus
    a merged model, or any model ───┘

This module does not load torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packcorpus.tasks.core.errors import DataError, PackError
from packcorpus.tasks.storage.files import read_json
from packcorpus.train.config import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from packcorpus.train.loop.run_folder import COMPLETE
from packcorpus.train.merge.find_run import Base, Run, base_of, find_run

MERGE = "merge.json"


@dataclass(frozen=True, slots=True)
class Subject:
    """A model to talk to: `folder` has an adapter for `base`, or else a whole model."""

    folder: Path
    run: Run | None  # None for a model that no run is known of
    base: Base | None  # None for a whole model

    def __str__(self) -> str:
        return f"{self.folder} on {self.base.name}" if self.base else str(self.folder)


def find_subject(text: str, root: Path) -> Subject:
    """Return what a user names: a run, a checkpoint, or the folder of a model."""
    path = Path(text).expanduser()
    if (path / ADAPTER_WEIGHTS).is_file() and (path.parent / "run.json").is_file():
        run = _started(path)
        return Subject(path, run, base_of(run))
    if (path / "config.json").is_file() and not (path / ADAPTER_CONFIG).is_file():
        return Subject(path, _merged_from(path, root), None)
    run = find_run(text, root)
    return Subject(run.folder, run, base_of(run))


def _started(checkpoint: Path) -> Run:
    """Return the run of a checkpoint, which may not be finished."""
    if not (checkpoint / COMPLETE).is_file():
        raise DataError(
            "damaged_adapter", f"{checkpoint}: is not complete; use another checkpoint of {checkpoint.parent}"
        )
    started, adapter = read_json(checkpoint.parent / "run.json"), read_json(checkpoint / ADAPTER_CONFIG)
    named = str(adapter.get("base_model_name_or_path"))
    record: dict[str, Any] = {
        "key": started["key"],
        "corpus": {"name": checkpoint.parent.name.rpartition("-")[0], "key": started["corpus"]},
        "base_model": str(Path(named).resolve()) if Path(named).is_dir() else named,
        "base_digest": started["base_model"] if Path(named).is_dir() else None,
        "config": started["settings"],
    }
    return Run(checkpoint.parent, record)


def _merged_from(folder: Path, root: Path) -> Run | None:
    merge = read_json(folder / MERGE) if (folder / MERGE).is_file() else None
    try:
        return find_run(str(merge["run"]), root) if isinstance(merge, dict) and "run" in merge else None
    except PackError:  # it was deleted, or is elsewhere
        return None
