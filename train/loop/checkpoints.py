"""Write checkpoints, and resume only from complete checkpoints.

    Trainer writes checkpoint-N/ ─seal─▶ complete.json: every file with size and SHA-256, written last
    run folder ─newest_complete─▶ checkpoint-N, its files checked; incomplete checkpoints are removed
    run folders of all machines ─newest_of_all─▶ the newest checkpoint that all machines have

A process that is killed during a save leaves a folder without complete.json. The next start then resumes from the
previous checkpoint.

If the machines of a run do not share a file system, each machine writes the checkpoint, with the random states of all
ranks. A lost checkpoint can therefore be replaced by a copy from any machine.
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
from train.evaluation.history import history
from train.loop.run_folder import COMPLETE, checkpoints_of, step_of
from train.machine.disk import Disk
from train.machine.ranks import gather, main_first, together

ADAPTER = "adapter_model.safetensors"


class Checkpoints(TrainerCallback):
    """Callback that seals every saved checkpoint and removes old checkpoints.

    It keeps the newest `keep` checkpoints and, with `keep_best`, the best.
    """

    def __init__(self, facts: dict[str, Any], keep: int, keep_best: bool = False):
        self._facts, self._keep, self._keep_best = facts, keep, keep_best

    def on_save(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        folder = Path(args.output_dir)
        checkpoint = folder / f"checkpoint-{state.global_step}"
        if args.save_on_each_node:
            exchange_random_states(checkpoint, args.process_index, args.should_save)
        elif torch.distributed.is_initialized():
            torch.distributed.barrier()  # until every rank has written its random state
        with together():
            if args.should_save:
                seal(checkpoint, self._facts | {"step": state.global_step})
                best = history(state.log_history).best if self._keep_best else None
                for old in checkpoints_of(folder)[: -self._keep]:
                    if not (best and step_of(old) == best.step):
                        shutil.rmtree(old)


def exchange_random_states(checkpoint: Path, rank: int, writes: bool) -> None:
    """Write the random states of the ranks on other machines.

    Each rank has already written its own state.
    """
    name = f"rng_state_{rank}.pth"
    with together():
        own = (name, (checkpoint / name).read_bytes())
    states = gather(own)
    with together():
        for name, state in states if writes else []:
            if not (checkpoint / name).exists():
                (checkpoint / name).write_bytes(state)


def seal(checkpoint: Path, facts: dict[str, Any]) -> None:
    """Write complete.json once every other file is on disk."""
    (checkpoint / "training_args.bin").unlink(missing_ok=True)  # an unused pickle
    files = {}
    for path in sorted(p for p in checkpoint.rglob("*") if p.is_file() and p.name != COMPLETE):
        with path.open("rb") as file:
            os.fsync(file.fileno())
        files[path.relative_to(checkpoint).as_posix()] = {"bytes": path.stat().st_size, "sha256": sha256_of(path)}
    write_bytes(checkpoint / COMPLETE, to_json(facts | {"files": files}))


def newest_complete(folder: Path, corpus_key: str) -> Path | None:
    """Return the newest complete checkpoint, or None.

    Raises DataError if a file of the checkpoint changed since it was written, or if the checkpoint belongs to another
    corpus.
    """
    newest = next((one for one in reversed(checkpoints_of(folder)) if (one / COMPLETE).exists()), None)
    if newest and (path := _changed(newest, corpus_key)):
        raise DataError(
            "bad_checkpoint",
            f"{path}: changed since it was written; delete {newest} to resume from the previous checkpoint",
        )
    return newest


def best_complete(folder: Path, step: int, corpus_key: str) -> Path:
    """Return the checkpoint of the step with the lowest validation loss.

    Raises DataError if it is missing, changed, or belongs to another corpus.
    """
    checkpoint = folder / f"checkpoint-{step}"
    fault, path = "is missing or incomplete", checkpoint
    if (checkpoint / COMPLETE).exists():
        changed = _changed(checkpoint, corpus_key)
        if changed is None:
            return checkpoint
        fault, path = "changed since it was written", changed
    raise DataError(
        "no_best_checkpoint",
        f"{path}: {fault}, but the adapter of step {step} has the lowest validation loss (keep: best); restore "
        f"{checkpoint}, or delete {folder} to start over",
    )


def _changed(checkpoint: Path, corpus_key: str) -> Path | None:
    """Return a file that changed since it was written, or None.

    Raises DataError if the checkpoint belongs to another corpus.
    """
    facts = read_json(checkpoint / COMPLETE)
    if facts["corpus"] != corpus_key:
        raise DataError(
            "foreign_checkpoint",
            f"{checkpoint}: belongs to corpus {facts['corpus'][:12]}, but this is corpus {corpus_key[:12]}; delete it, "
            "or set another `output`",
        )
    for name, expected in facts["files"].items():
        path = checkpoint / name
        if not path.is_file() or path.stat().st_size != expected["bytes"] or sha256_of(path) != expected["sha256"]:
            return path
    return None


def newest_of_all(folder: Path, corpus_key: str, disk: Disk) -> Path | None:
    """Return the checkpoint that all ranks resume from, or None.

    Removes incomplete checkpoints, and newer ones that some machines lack. Raises DataError if a file of the checkpoint
    changed, if the checkpoint belongs to another corpus, or if the machines have no checkpoint in common.
    """
    steps = None
    with together():
        if disk.writes:
            for checkpoint in checkpoints_of(folder):
                if not (checkpoint / COMPLETE).exists():
                    shutil.rmtree(checkpoint)
            files = {step_of(path): read_json(path / COMPLETE)["files"] for path in checkpoints_of(folder)}
            steps = {step: str(listed.get(ADAPTER, {}).get("sha256", "")) for step, listed in files.items()}
    found = {rank: steps for rank, steps in enumerate(gather(steps)) if steps is not None}
    with together():
        newest = _newest_common(folder, found)
        if disk.writes:
            for checkpoint in checkpoints_of(folder):
                if newest is None or step_of(checkpoint) > newest:
                    shutil.rmtree(checkpoint)
    # The ranks that write check the files first, so that a change is reported once.
    return main_first(disk.writes, lambda: newest_complete(folder, corpus_key))


def _newest_common(folder: Path, found: dict[int, dict[int, str]]) -> int | None:
    """Return the newest step with the same checkpoint on all machines.

    `found` maps a rank to the digest of the checkpoint of each step. Returns None if there are no checkpoints. Raises
    DataError if there is no common checkpoint.
    """
    if not any(found.values()):
        return None
    common = set.intersection(*(set(steps) for steps in found.values()))
    step = max(common, default=None)
    if step is None or len({steps[step] for steps in found.values()}) > 1:
        having = "; ".join(f"rank {rank} has {_listed(steps)}" for rank, steps in found.items())
        raise DataError(
            "folders_differ",
            f"{folder}: the machines have no checkpoint in common: {having}; copy the folder to the machines that lack "
            "it, or delete it on all of them to start over",
        )
    return step


def _listed(steps: dict[int, str]) -> str:
    return ", ".join(f"checkpoint-{step} ({digest[:8]})" for step, digest in sorted(steps.items())) or "none"
