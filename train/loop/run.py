"""Run one training, from the corpus to the adapter, on every rank.

corpus + settings ─prepare─▶ Run ─trainer─▶ steps, from the newest complete checkpoint
  ─record─▶ adapter, tokenizer, picture, training.json
"""

from __future__ import annotations

import os
import sys
import warnings
from contextlib import redirect_stdout
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

import torch
from transformers import PrinterCallback, TrainerState

from tasks.core.errors import Interrupted, PartMissing
from tasks.core.printable import counted, printable
from train.config import TrainingConfig
from train.data.corpus import Corpus
from train.evaluation import Decisions, Sample, Samples, history, outcome, samples_of
from train.loop import record
from train.loop.callbacks import Interruption, Profile, RankClock, slow_ranks
from train.loop.checkpoints import Checkpoints, best_complete
from train.loop.display import ProgressLine, open_console, say, show_effect, show_result
from train.loop.prepare import Run, prepare
from train.loop.run_folder import RunFolder
from train.loop.trainer import arguments
from train.machine import devices, process, ranks
from train.machine.process import LAUNCHED, SignalGuard, is_one_of_several, is_rank, or_stop_all
from train.measures import advise
from train.model import base_model, flops
from train.model.attention import unavailable_backends
from train.model.options import gave_up, no_fused_loss_reason


def train(corpus: Corpus, config: TrainingConfig, folder: RunFolder, root: Path, guard: SignalGuard) -> None:
    """Train, and write everything to `folder`."""
    interruption = Interruption(guard)
    base_model.silence_libraries()
    # An existing adapter may have a rank for experts. PEFT applies it, but warns because no layer matches it.
    warnings.filterwarnings("ignore", category=RuntimeWarning, module=r"peft\.")
    with or_stop_all():
        device = devices.resolve(config)
    if is_one_of_several():
        libraries = {name: version.partition("+")[0] for name, version in record.versions().items()}
        facts = {**folder.facts, "device in effect": f"{device.kind} {device.precision}", **libraries}
        if ranks.meet(facts, finished=folder.record.exists()):
            if os.environ.get("LOCAL_RANK") == "0":
                folder.report_finished()
            return
    state = ranks.start(cpu=device.kind == "cpu")
    console = open_console(quiet=not state.is_main_process)
    run = prepare(corpus, config, folder, root, device, state)
    line = ProgressLine(console)
    clock = RankClock(state.device, device.name)
    callbacks = [line, interruption, clock, Decisions(config, run.feed.validation is not None)]
    if config.samples:
        callbacks += [Samples(corpus, run.feed.validation, run.model, config.samples, folder.path, console)]
    with redirect_stdout(sys.stderr):  # experiment trackers print
        trainer = _trainer(run, *callbacks)
    steps = record.count_steps(trainer, config)
    with ranks.together():
        if run.disk.writes:
            folder.write(run.choices)
    in_effect, lacking = record.in_effect(run, steps), unavailable(device)
    show_effect(console, run.notes, run.choices.table, in_effect, record.warnings(run, steps))

    if device.kind == "cuda":
        torch.cuda.reset_peak_memory_stats()  # the isolation check needs more memory than a step
    try:
        with redirect_stdout(sys.stderr):
            _take_steps(trainer, run, steps)
            evaluated = [entry["step"] for entry in trainer.state.log_history if "eval_loss" in entry]
            done = interruption.stopped or trainer.state.global_step in evaluated
            if run.feed.validation is not None and not done:
                trainer.evaluate()  # the run was killed before it evaluated this step
    except RuntimeError as error:
        if process.may_be_shortage(error):
            reduce_micro_batch(run, trainer.state.global_step + 1, error)
        raise
    finally:
        line.close()
    if interruption.stopped:
        text = f"interrupted after step {trainer.state.global_step}; run the same command to resume"
        raise Interrupted("interrupted", text)
    if run.choices.options and run.choices.options["compile"] and gave_up():
        console.print("warning: compile: torch stopped compiling during this run", style="yellow")
    waited = record.data_wait(record.summary(trainer.state.log_history))
    speeds = clock.speeds(state.process_index, waited)
    log, *_ = ranks.gather(trainer.state.log_history if state.is_main_process else [])
    decided = outcome(log, config, trainer.state.global_step >= steps.total)
    samples: list[Sample] = []
    if config.samples:  # only the first rank generates
        samples, *_ = ranks.gather(samples_of(folder.path, decided["kept_step"]) if state.is_main_process else [])
    result = record.summary(log) | decided
    # All other advice was printed as warnings before the first step.
    measured = record.advice_of(result, speeds, config)
    advice = [*advise(record.figures(run, steps)), *measured]
    with ranks.together():
        if run.disk.writes:
            if decided["kept_step"] < trainer.state.global_step:
                trainer._load_from_checkpoint(str(best_complete(folder.path, decided["kept_step"], corpus.key)))
            written = _record(run) | {
                "in_effect": in_effect,
                "unavailable": lacking,
                "flops_per_token": run.flops_per_token,
                "result": result,
                "advice": [asdict(one) for one in advice],
                "samples": samples,
                "ranks": [asdict(speed) for speed in speeds],
                "versions": record.versions(),
            }
            record.write_results(folder.path, run.model, run.tokenizer, written, log)
    show_result(console, result, samples, folder.path, run.tokenizer is not None, slow_ranks(speeds))
    for one in measured:  # makes the next run faster or better
        say(console, f"advice: {one}", "yellow")
    if state.is_local_main_process:
        print(printable(str(folder.record)))


def reduce_micro_batch(run: Run, step: int, error: RuntimeError) -> NoReturn:
    """Write a smaller micro-batch to run.json, and raise Restart."""
    choices, happened = run.choices, process.described(error)
    smaller = choices.halved(f"step {step} {happened} with {counted(choices.micro_batch, 'row')} per pass")
    if smaller is None:
        length = run.feed.padded_tokens / run.feed.rows
        raise PartMissing(
            "out_of_memory",
            f"step {step} {happened} with one row of about {length:.0f} tokens per pass; pack shorter rows, set "
            "activation_checkpointing: true, or use a smaller base_model. The same command resumes the run",
        ) from None
    run.folder.write(smaller)
    if is_rank() and LAUNCHED not in os.environ:  # torchrun would not start the ranks again
        message = f"{run.folder.last_reduction()}, if you run the same command again"
        raise PartMissing("out_of_memory", message) from None
    raise process.Restart from None


def _trainer(run: Run, *callbacks: Any) -> Any:
    """Build the Trainer for the corpus's format, without its own output."""
    choices, device = run.choices, run.device
    given = arguments(
        run.config, str(run.folder.path), choices.micro_batch, choices.accumulation, device.kind, device.precision
    )
    given["save_on_each_node"] = not run.disk.shared
    trainer = run.feed.trainer(run.model, given, run.feed.collator(choices.attention), choices.rows_per_step)
    peak = flops.peak_flops(device.name, device.dtype)
    trainer.measure(run.feed.tokens / run.feed.padded_tokens, run.flops_per_token, peak and peak * choices.ranks)
    if run.config.profile and trainer.is_world_process_zero():
        callbacks = (*callbacks, Profile(run.config.profile, run.folder.path))
    for callback in (*callbacks, Checkpoints({"corpus": run.corpus.key}, run.config.keep == "best")):
        trainer.add_callback(callback)
    trainer.remove_callback(PrinterCallback)
    return trainer


def _take_steps(trainer: Any, run: Run, steps: record.Steps) -> None:
    if run.checkpoint is None:
        trainer.train()
        return
    checkpoint = str(run.checkpoint)
    state = TrainerState.load_from_json(f"{checkpoint}/trainer_state.json")
    found = history(state.log_history)
    with ranks.together():
        if run.config.keep == "best" and found.best:  # a missing checkpoint is an error before the first step
            best_complete(run.folder.path, found.best.step, run.corpus.key)
    # A run that was killed between its last step and its record has no step left.
    if run.steps_done >= steps.total or found.is_over(run.config):
        trainer._load_from_checkpoint(checkpoint)
        trainer.state = state
    else:
        trainer.train(resume_from_checkpoint=checkpoint)


def unavailable(device: devices.Device) -> dict[str, dict[str, str]]:
    """Return the values of settings that cannot be used on this machine, with reasons."""
    # `diagnose` reads them from training.json, because it does not load torch itself. A value is written as in YAML.
    fused_loss = no_fused_loss_reason()
    return {
        "attention": unavailable_backends(torch.device(device.kind), device.dtype),
        "fused_loss": {"true": fused_loss} if fused_loss else {},
    }


def _record(run: Run) -> dict[str, Any]:
    """Return what training.json says about a run, without its results."""
    corpus, feed = run.corpus, run.feed
    return {
        "key": run.folder.key,
        "corpus": {
            "name": corpus.name,
            "key": corpus.key,
            "sequence_length": corpus.sequence_length,
            **({"lengths": list(corpus.lengths)} if len(corpus.lengths) > 1 else {}),
            "rows": feed.rows,
            "tokens": feed.tokens,
            "trained": feed.trained,
        },
        "format_version": corpus.format_version,
        "base_model": str(run.base.resolve() if isinstance(run.base, Path) else run.base),
        "base_digest": run.folder.base_digest(run.base) if isinstance(run.base, Path) else None,
        "base_commit": base_model.commit_of(run.base),
        "config": run.config.model_dump(),
        "choices": asdict(run.choices),
        "isolation": asdict(run.isolation) if run.isolation else None,
    }
