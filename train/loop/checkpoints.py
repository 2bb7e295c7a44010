"""Checkpoints that are complete or do not count.

    Trainer writes checkpoint-N/ ─seal─▶ complete.json: every file with size and SHA-256, written last
    run folder ─newest_complete─▶ checkpoint-N, its files checked; what is not complete is removed

A kill in the middle of a save leaves a folder without complete.json, and the next start goes on from the one before.
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
from train.loop.run_folder import COMPLETE, by_step


class Checkpoints(TrainerCallback):
    """Seals every checkpoint that the Trainer saves, then removes all but the newest `keep`."""

    def __init__(self, facts: dict[str, Any], keep: int):
        self._facts, self._keep = facts, keep

    def on_save(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        if torch.distributed.is_initialized():
            torch.distributed.barrier()  # every rank has written its random state
        if args.process_index == 0:
            folder = Path(args.output_dir)
            seal(folder / f"checkpoint-{state.global_step}", self._facts | {"step": state.global_step})
            for old in by_step(folder)[: -self._keep]:
                shutil.rmtree(old)


def seal(checkpoint: Path, facts: dict[str, Any]) -> None:
    """Write complete.json, after every file is on the disk."""
    for name in ("training_args.bin", "README.md"):  # a pickle, which nobody reads; a model card of placeholders
        (checkpoint / name).unlink(missing_ok=True)
    files = {}
    for path in sorted(p for p in checkpoint.rglob("*") if p.is_file() and p.name != COMPLETE):
        with path.open("rb") as file:
            os.fsync(file.fileno())
        files[path.relative_to(checkpoint).as_posix()] = {"bytes": path.stat().st_size, "sha256": sha256_of(path)}
    write_bytes(checkpoint / COMPLETE, to_json(facts | {"files": files}))


def newest_complete(folder: Path, corpus_key: str) -> Path | None:
    """The checkpoint to go on from; None where there is none. Removes what a kill left half-written.

    Raises DataError where a file of the checkpoint is not what was written, or where it was made on another corpus.
    """
    for checkpoint in reversed(by_step(folder)):
        if not (checkpoint / COMPLETE).exists():
            shutil.rmtree(checkpoint)
            continue
        facts = read_json(checkpoint / COMPLETE)
        if facts["corpus"] != corpus_key:
            raise DataError(
                "foreign_checkpoint",
                f"{checkpoint}: was made on corpus {facts['corpus'][:12]}, this is corpus {corpus_key[:12]}; "
                "delete it, or name another `output`",
            )
        for name, expected in facts["files"].items():
            path = checkpoint / name
            if not path.is_file() or path.stat().st_size != expected["bytes"] or sha256_of(path) != expected["sha256"]:
                raise DataError(
                    "bad_checkpoint",
                    f"{path}: is not what was written; delete {checkpoint} to go on from the one before",
                )
        return checkpoint
    return None
