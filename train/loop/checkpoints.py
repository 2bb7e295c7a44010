"""Checkpoints: only complete ones are used.

    Trainer writes checkpoint-N/ ─seal─▶ complete.json: every file with size and SHA-256, written last
    run folder ─newest_complete─▶ checkpoint-N, its files checked; incomplete ones are removed

A process killed during a save leaves a folder without complete.json; the next start resumes from the checkpoint before.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from tasks.core.errors import DataError
from tasks.storage.files import read_json, sha256_of, to_json, write_bytes
from train.loop.run_folder import COMPLETE, checkpoints_of


class Checkpoints(TrainerCallback):
    """Seals every saved checkpoint, then removes all but the newest `keep`."""

    def __init__(self, facts: dict[str, Any], keep: int):
        self._facts, self._keep = facts, keep

    def on_save(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        if torch.distributed.is_initialized():
            torch.distributed.barrier()  # until every rank has written its random state
        if args.process_index == 0:
            folder = Path(args.output_dir)
            seal(folder / f"checkpoint-{state.global_step}", self._facts | {"step": state.global_step})
            for old in checkpoints_of(folder)[: -self._keep]:
                shutil.rmtree(old)


def seal(checkpoint: Path, facts: dict[str, Any]) -> None:
    """Write complete.json once every other file is on disk."""
    for name in ("training_args.bin", "README.md"):  # an unused pickle, and a model card of placeholders
        (checkpoint / name).unlink(missing_ok=True)
    files = {}
    for path in sorted(p for p in checkpoint.rglob("*") if p.is_file() and p.name != COMPLETE):
        with path.open("rb") as file:
            os.fsync(file.fileno())
        files[path.relative_to(checkpoint).as_posix()] = {"bytes": path.stat().st_size, "sha256": sha256_of(path)}
    write_bytes(checkpoint / COMPLETE, to_json(facts | {"files": files}))


def newest_complete(folder: Path, corpus_key: str) -> Path | None:
    """Return the checkpoint to resume from, or None. Removes incomplete checkpoints.

    Raises DataError if a file of the checkpoint changed since it was written, or if it belongs to another corpus.
    """
    for checkpoint in reversed(checkpoints_of(folder)):
        if not (checkpoint / COMPLETE).exists():
            shutil.rmtree(checkpoint)
            continue
        facts = read_json(checkpoint / COMPLETE)
        if facts["corpus"] != corpus_key:
            raise DataError(
                "foreign_checkpoint",
                f"{checkpoint}: was made on corpus {facts['corpus'][:12]}, this is corpus {corpus_key[:12]}; "
                "delete it, or set another `output`",
            )
        for name, expected in facts["files"].items():
            path = checkpoint / name
            if not path.is_file() or path.stat().st_size != expected["bytes"] or sha256_of(path) != expected["sha256"]:
                raise DataError(
                    "bad_checkpoint",
                    f"{path}: changed since it was written; delete {checkpoint} to resume from the one before",
                )
        return checkpoint
    return None
