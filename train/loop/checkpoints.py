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
import secrets
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from packcorpus.tasks.core.errors import DataError, StorageError
from packcorpus.tasks.storage.files import make_folder, read_json, sha256_of, to_json, write_bytes
from packcorpus.train.evaluation import history
from packcorpus.train.loop.run_folder import COMPLETE, MARK, checkpoints_of, step_of
from packcorpus.train.machine.ranks import gather, main_first, place, together

ADAPTER = "adapter_model.safetensors"
KEPT = 2  # newest checkpoints that are kept


@dataclass(frozen=True, slots=True)
class Disk:
    """File system of a run, as seen by this rank."""

    shared: bool  # by all ranks
    writes: bool  # this rank writes, for all ranks that see the same files


def find_disk(folder: Path) -> Disk:
    """Determine which ranks write to a folder.

    All ranks must call this. If there are several, the folder is created. A folder that merely has the same name on
    every machine is not mistaken for a shared folder, because the first rank of each machine writes a file. Raises
    DataError if some machines share the folder and others do not, StorageError if it cannot be written.
    """
    here = place()
    if not torch.distributed.is_initialized():
        return Disk(shared=True, writes=True)
    places = gather(here)
    [run, *_] = gather(secrets.token_hex(8))
    marks = {where.rank: folder / f"{MARK}{run}-{where.rank}" for where in places if where.local_rank == 0}
    mine = marks.get(here.rank)
    with together():
        if mine:
            try:
                make_folder(folder)
                mine.touch()
            except OSError as error:
                text = f"{mine}: cannot be written: {error.strerror or error}"
                raise StorageError("cannot_write", text) from error
    try:
        with together():
            seen = [rank for rank, mark in marks.items() if mark.exists()]
        views = gather(seen)
    finally:
        if mine:
            mine.unlink(missing_ok=True)
    if all(0 in view for view in views):
        return Disk(shared=True, writes=here.rank == 0)
    firsts = {where.node: where.rank for where in places if where.local_rank == 0}
    if all(view == [firsts.get(where.node)] for where, view in zip(places, views, strict=True)):
        return Disk(shared=False, writes=here.local_rank == 0)
    with_first, without = (
        ", ".join(str(where) for where, view in zip(places, views, strict=True) if (0 in view) == sees)
        for sees in (True, False)
    )
    with together():
        raise DataError(
            "folders_differ",
            f"{folder}: {with_first} share it, but {without} cannot see their files; set `output` to a folder that "
            "all machines share, or to a separate local folder on each machine",
        )


class Checkpoints(TrainerCallback):
    """Callback that seals checkpoints, and keeps the newest and perhaps the best."""

    def __init__(self, facts: dict[str, Any], keep_best: bool = False):
        self._facts, self._keep_best = facts, keep_best

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
                for old in checkpoints_of(folder)[:-KEPT]:
                    if not (best and step_of(old) == best.step):
                        shutil.rmtree(old)


def exchange_random_states(checkpoint: Path, rank: int, writes: bool) -> None:
    """Write the random states of the ranks on other machines."""
    name = f"rng_state_{rank}.pth"
    with together():
        state = (checkpoint / name).read_bytes()
    states = gather((name, state))
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
    """Return the newest complete checkpoint, or None."""
    newest = next((path for path in reversed(checkpoints_of(folder)) if (path / COMPLETE).exists()), None)
    if newest and (path := _changed(newest, corpus_key)):
        text = f"{path}: changed since it was written; delete {newest} to resume from the previous checkpoint"
        raise DataError("bad_checkpoint", text)
    return newest


def best_complete(folder: Path, step: int, corpus_key: str) -> Path:
    """Return the checkpoint of the step with the lowest validation loss."""
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
    """Return the checkpoint that all ranks resume from, or None; remove others."""
    steps = None
    with together():
        if disk.writes:
            for checkpoint in checkpoints_of(folder):
                if not (checkpoint / COMPLETE).exists():
                    shutil.rmtree(checkpoint)
            files = {step_of(path): read_json(path / COMPLETE)["files"] for path in checkpoints_of(folder)}
            steps = {step: str(listed.get(ADAPTER, {}).get("sha256", "")) for step, listed in files.items()}
    # Of the ranks that write: {step: digest of its checkpoint}.
    steps_of = {rank: steps for rank, steps in enumerate(gather(steps)) if steps is not None}
    with together():
        newest = max(set.intersection(*map(set, steps_of.values())), default=None)
        is_same = newest is not None and len({digests[newest] for digests in steps_of.values()}) == 1
        if any(steps_of.values()) and not is_same:
            having = []
            for rank, digests in steps_of.items():
                names = [f"checkpoint-{step} ({digest[:8]})" for step, digest in sorted(digests.items())]
                having.append(f"rank {rank} has {', '.join(names) or 'none'}")
            raise DataError(
                "folders_differ",
                f"{folder}: the machines have no checkpoint in common: {'; '.join(having)}; copy the folder to the "
                "machines that lack it, or delete it on all of them to start over",
            )
        if disk.writes:
            for checkpoint in checkpoints_of(folder):
                if newest is None or step_of(checkpoint) > newest:
                    shutil.rmtree(checkpoint)
    # The ranks that write check the files first, so that a change is reported once.
    return main_first(disk.writes, lambda: newest_complete(folder, corpus_key))
