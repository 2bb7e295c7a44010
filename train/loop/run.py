"""One training run, from the corpus to the adapter. Every rank runs this.

corpus + settings ─prepare─▶ Run ─trainer─▶ steps, from the newest complete checkpoint
  ─record─▶ adapter, tokenizer, picture, training.json
"""

from __future__ import annotations

import logging
import os
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate import PartialState
from transformers import PrinterCallback, TrainerState

from tasks.core.errors import Interrupted
from train.config import TrainingConfig
from train.data.corpus import Corpus
from train.loop import effect, record
from train.loop.checkpoints import Checkpoints
from train.loop.display import ProgressLine, open_console, show_effect, show_result
from train.loop.prepare import Run, prepare
from train.loop.run_folder import RunFolder
from train.loop.trainer import arguments
from train.machine import devices, meeting
from train.machine.interruption import Interruption
from train.machine.rank_speed import RankClock, RankSpeed, slow_ranks
from train.machine.ranks import gather, together
from train.machine.signals import SignalGuard
from train.model import flops


def train(corpus: Corpus, config: TrainingConfig, folder: RunFolder, root: Path, guard: SignalGuard) -> None:
    """Train, and write everything to `folder`. Raises PackError or Interrupted."""
    interruption = Interruption(guard)
    _silence_libraries()
    device = _meet(config, folder)
    if device is None:
        return
    state = PartialState(cpu=device.kind == "cpu")
    console = open_console(quiet=not state.is_main_process)
    run = prepare(corpus, config, folder, root, device, state)
    line = ProgressLine(console)
    clock = RankClock(state.device, device.name)
    trainer = _trainer(run, line, interruption, clock)
    steps = effect.count_steps(trainer, config)
    with together():
        if run.disk.writes:
            folder.write(run.choices)
    in_effect = effect.in_effect(run, steps)
    show_effect(console, run.notes, run.choices.table, in_effect, effect.warnings(run, steps))

    if device.kind == "cuda":
        torch.cuda.reset_peak_memory_stats()  # the isolation check needs more memory than a step
    try:
        _take_steps(trainer, run, steps)
    finally:
        line.close()
    if interruption.stopped:
        raise Interrupted(
            "interrupted", f"interrupted after step {trainer.state.global_step}; run the same command to resume"
        )
    if run.feed.validation is not None and not _is_evaluated(trainer.state):
        trainer.evaluate()
    speeds = clock.speeds(state.process_index)
    log, *_ = gather(trainer.state.log_history if state.is_main_process else [])
    result = record.summary(log)
    with together():
        if run.disk.writes:
            record.write_results(folder.path, run.model, run.tokenizer, _record(run, in_effect, result, speeds), log)
    show_result(console, result, folder.path, run.tokenizer is not None, slow_ranks(speeds))
    if state.is_local_main_process:
        print(folder.record)


def _meet(config: TrainingConfig, folder: RunFolder) -> devices.Device | None:
    """Return the device of this rank, once all ranks have one; None if the run has finished on all machines.

    Raises DataError if the ranks do not have the same corpus, settings, and libraries.
    """
    with meeting.or_stop_all():
        device = devices.resolve(config)
    if not meeting.is_one_of_several():
        return device
    libraries = {name: version.partition("+")[0] for name, version in record.versions().items()}
    facts = {**folder.facts, "device in effect": f"{device.kind} {device.precision}", **libraries}
    if not meeting.meet(facts, finished=folder.record.exists()):
        return device
    if os.environ.get("LOCAL_RANK") == "0":
        folder.report_finished()
    return None


def _is_evaluated(state: TrainerState) -> bool:
    """Return whether the last step was evaluated, as `eval_every` may require."""
    return any("eval_loss" in entry and entry["step"] == state.global_step for entry in state.log_history)


def _silence_libraries() -> None:
    """Silence the libraries; what matters to the user is reported by us."""
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    logging.getLogger("huggingface_hub").setLevel(logging.CRITICAL)  # it logs every attempt to reach a network
    for category in (FutureWarning, DeprecationWarning, UserWarning):
        warnings.filterwarnings("ignore", category=category)


def _trainer(run: Run, *callbacks: Any) -> Any:
    """Build the Trainer for the corpus's format, with our output only."""
    choices, device = run.choices, run.device
    given = arguments(
        run.config, str(run.folder.path), choices.micro_batch, choices.accumulation, device.kind, device.bf16
    )
    given["save_on_each_node"] = not run.disk.shared
    trainer = run.feed.trainer(run.model, given, run.feed.collator(choices.attention))
    peak = flops.peak_flops(device.name) if device.bf16 else None
    trainer.measure(run.feed.tokens / len(run.feed.train), run.flops_per_token, peak and peak * choices.ranks)
    for callback in (*callbacks, Checkpoints({"corpus": run.corpus.key}, run.config.keep_checkpoints)):
        trainer.add_callback(callback)
    trainer.remove_callback(PrinterCallback)
    return trainer


def _take_steps(trainer: Any, run: Run, steps: effect.Steps) -> None:
    checkpoint = str(run.checkpoint) if run.checkpoint else None
    if checkpoint and run.steps_done >= steps.total:  # the run was killed between its last step and its record
        trainer._load_from_checkpoint(checkpoint)
        trainer.state = TrainerState.load_from_json(f"{checkpoint}/trainer_state.json")
    else:
        trainer.train(resume_from_checkpoint=checkpoint)


def _record(run: Run, in_effect: dict[str, str], result: dict[str, Any], speeds: list[RankSpeed]) -> dict[str, Any]:
    """Return the content of training.json, without its log."""
    corpus = run.corpus
    return {
        "key": run.folder.key,
        "corpus": {"name": corpus.name, "key": corpus.key, "sequence_length": corpus.sequence_length},
        "format_version": corpus.format_version,
        "base_model": str(run.base.resolve() if isinstance(run.base, Path) else run.base),
        "config": run.config.model_dump(),
        "choices": asdict(run.choices),
        "isolation": asdict(run.isolation) if run.isolation else None,
        "in_effect": in_effect,
        "flops_per_token": run.flops_per_token,
        "result": result,
        "ranks": [asdict(speed) for speed in speeds],
        "versions": record.versions(),
    }
