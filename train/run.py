"""One training run, from what was given to what is left behind. Every rank runs this.

    corpus + config ─feed─▶ rows, collator ─▶ model with adapter ─▶ attention, options, micro-batch: measured
      ─▶ isolation, proven ─▶ what is in effect, shown ─▶ steps, from the newest complete checkpoint
      ─▶ adapter, tokenizer, picture, record

What is measured at the first start (attention, micro-batch) is written to run.json and taken from there by later
starts, so that a run that was interrupted makes the steps that it would have made.
"""

from __future__ import annotations

import math
import time
import warnings
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate import PartialState
from transformers import PrinterCallback

from train import batch, flops, isolation, machine, models, qlora, record
from train.attention import use_attention
from train.checkpoints import Checkpoints, newest_complete
from train.config import TrainingConfig
from train.corpus import PACKED, Corpus
from train.display import ProgressLine, duration, open_console, show_effect, show_result, si
from train.feed import Feed, batch_of, open_feed
from train.interruption import Interrupted, Interruption
from train.run_folder import RunFolder
from train.trainer import arguments

# Fewer optimizer steps than this leave a model that has hardly learned, however full the rows are.
FEW_STEPS = 100


def train(corpus: Corpus, config: TrainingConfig, folder: RunFolder, root: Path) -> None:
    """Train, and write everything to `folder`. Raises PackError where something is refused, Interrupted on a signal."""
    interruption = Interruption()
    _quiet()
    device = machine.resolve(config)
    ranks = PartialState(cpu=device.kind == "cpu")
    console = open_console(quiet=not ranks.is_main_process)
    if ranks.is_main_process:
        folder.claim()

    feed = open_feed(corpus, config)
    vocab_size = corpus.manifest.tokenizer.vocab_size if corpus.manifest else feed.max_id + 1
    with ranks.main_process_first():  # a small one is built, one of a hub is fetched
        base = models.base_model(config, vocab_size, corpus.sequence_length, root / "data" / "models")
        models.check_model(base, models.read_config(base), feed.max_id, corpus.sequence_length)
    notes = [*corpus.notes, *feed.notes]
    if corpus.manifest and (config.base_model or config.tokenizer):
        notes.append(models.check_tokenizer(corpus.manifest, config, base))

    model = qlora.load_model(base, config, ranks.device, device.bf16)
    autocast = partial(torch.autocast, ranks.device.type, torch.bfloat16, enabled=device.bf16)
    choices = _choose(model, feed, config, folder.choices(), ranks, autocast, device.bf16)
    notes += choices["notes"]
    collator, size = feed.collator(choices["attention"]), choices["micro_batch"]
    seen = None
    if feed.isolated:
        with autocast():
            seen = isolation.require_isolation(
                model, feed.train, collator, size, attention=choices["attention"], seed=config.seed
            )

    trainer = feed.trainer(model, arguments(config, str(folder.path), choices, device.kind, device.bf16), collator)
    peak = flops.peak_flops(device.name) if device.bf16 else None
    work = flops.flops_per_token(model, feed.positions())
    trainer.measure(feed.tokens / len(feed.train), work, peak and peak * ranks.num_processes)
    line = ProgressLine(console)
    for callback in (
        line,
        Checkpoints({"corpus": corpus.key, "run": folder.key}, config.keep_checkpoints),
        interruption,
    ):
        trainer.add_callback(callback)
    trainer.remove_callback(PrinterCallback)

    with ranks.main_process_first():
        resume = newest_complete(folder.path, corpus.key)
        if ranks.is_main_process:
            folder.begin(choices)
    steps = _steps(trainer, config)
    effect = _effect(corpus, feed, model, config, device, choices, ranks.num_processes, steps, seen)
    effect |= {"folder": str(folder.path), "begins": f"after {resume.name}" if resume else "at step 0"}
    show_effect(console, notes, choices["table"], effect, _warnings(feed, steps, config, corpus, ranks.num_processes))

    start = time.time()
    try:
        trainer.train(resume_from_checkpoint=str(resume) if resume else None)
    finally:
        line.close()
    if interruption.stopped:
        raise Interrupted(f"interrupted after step {trainer.state.global_step}; the same command goes on from there")
    if feed.validation is not None:
        trainer.evaluate()
    if not ranks.is_main_process:
        return
    log = trainer.state.log_history
    result = record.summary(log)
    written = {
        "key": folder.key,
        "corpus": {"name": corpus.name, "key": corpus.key, "sequence_length": corpus.sequence_length},
        "format_version": corpus.format_version,
        "base_model": str(base),
        "config": config.model_dump(),
        "choices": choices,
        "isolation": asdict(seen) if seen else None,
        "in_effect": effect,
        "flops_per_token": work,
        "result": result,
        "seconds": round(time.time() - start, 3),
        "versions": record.versions(),
    }
    record.write_results(folder.path, model, corpus, written, log)
    show_result(console, result, folder.path)
    print(folder.record)


def _quiet() -> None:
    """What libraries say of themselves does not help the person who trains; what matters is said by us."""
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    for category in (FutureWarning, DeprecationWarning, UserWarning):
        warnings.filterwarnings("ignore", category=category)


def _choose(
    model: Any, feed: Feed, config: TrainingConfig, before: dict[str, Any], ranks: Any, autocast: Any, bf16: bool
) -> dict[str, Any]:
    """Attention, options, micro-batch: as an earlier start of this run chose them, or measured now."""
    known = before if before.get("ranks") == ranks.num_processes and before.get("device") == str(ranks.device) else {}
    table: list[str] = known.get("table", [])
    speed = known.get("tokens_per_second")
    attention = known.get("attention") or config.attention
    if attention == "auto":
        attention = "sdpa"
        if feed.isolated:
            with autocast():
                attention, trials = isolation.fastest(model, feed.train, 2, seed=config.seed)
            table = [f"{t.attention:>8} {t.reason or f'{t.tokens_per_second:,.0f} tokens/s'}" for t in trials]
    else:
        with autocast():
            use_attention(model, attention)
    collator = feed.collator(attention)
    notes = qlora.apply_options(model, config, batch_of(feed.longest, range(1), collator, ranks.device), bf16)
    if "micro_batch" in known:
        size, accumulation = known["micro_batch"], known["accumulation"]
    else:
        rows = max(1, round(config.tokens_per_step * len(feed.train) / feed.places / ranks.num_processes))
        chosen = batch.micro_batch(model, feed.longest, collator, config, rows, ranks.num_processes, bf16)
        size, accumulation = chosen.micro_batch, chosen.accumulation
        table = [*table, *chosen.lines()]
        speed = max((trial.tokens_per_second for trial in chosen.trials if trial.rows == size), default=None)
    return {
        "device": str(ranks.device), "ranks": ranks.num_processes, "attention": attention, "micro_batch": size,
        "accumulation": accumulation, "tokens_per_second": speed, "table": table, "notes": notes,
    }  # fmt: skip


@dataclass(frozen=True, slots=True)
class Steps:
    """Optimizer steps: of one epoch, and of the whole run."""

    per_epoch: int
    total: int


def _steps(trainer: Any, config: TrainingConfig) -> Steps:
    per_epoch = math.ceil(len(trainer.get_train_dataloader()) / trainer.args.gradient_accumulation_steps)
    return Steps(per_epoch, config.max_steps or math.ceil(config.epochs * per_epoch))


def _effect(
    corpus: Corpus,
    feed: Feed,
    model: Any,
    config: TrainingConfig,
    device: machine.Device,
    choices: dict[str, Any],
    ranks: int,
    steps: Steps,
    seen: isolation.Isolation | None,
) -> dict[str, str]:
    """What is really in effect, for people: read from the model and the rows, not from the settings."""
    everything, trainable = flops.parameters(model)
    rows, places = len(feed.train), feed.places
    size, accumulation = choices["micro_batch"], choices["accumulation"]
    per_step = size * accumulation * ranks * places / rows
    speed = choices["tokens_per_second"]
    guess = duration(steps.total * per_step / (speed * ranks)) if speed else "not measured"
    return {
        "corpus": f"{corpus.name} {corpus.key[:12]}, format {corpus.format_version}",
        "device": f"{device.name}{f' × {ranks}' if ranks > 1 else ''}, {device.precision}",
        "model": f"{si(everything)} parameters, {si(trainable)} trainable ({100 * trainable / everything:.2f} %)",
        "frozen weights": "NF4, double quantisation" if qlora.quantised(model) else f"{model.dtype}, not quantised",
        "attention": f"{choices['attention']}; {seen or 'no row has two conversations to keep apart'}",
        "optimizer": f"{config.optimizer}, learning rate {config.rate:g}, {config.schedule}",
        "checkpointing": "on" if model.is_gradient_checkpointing else "off",
        "rows": f"{feed.described}{f'; validation {len(feed.validation):,}' if feed.validation is not None else ''}",
        "a step": f"{size} rows × {accumulation} passes × {ranks} ranks = {si(per_step)} tokens, "
        f"{si(per_step * feed.trained / places)} trained on",
        "steps": f"{steps.total:,}, {steps.per_epoch:,} an epoch",
        "expected time": guess,
    }


def _warnings(feed: Feed, steps: Steps, config: TrainingConfig, corpus: Corpus, ranks: int) -> list[str]:
    found = []
    if steps.total < FEW_STEPS:
        found.append(
            f"only {steps.total} optimizer steps: packing leaves few on a small corpus, and a model learns little in "
            f"fewer than {FEW_STEPS}. Lower tokens_per_step ({config.tokens_per_step:,}) or raise epochs"
        )
    if corpus.format_version == PACKED and not corpus.isolated:
        found.append("rows have no position_ids: the conversations of a row see each other (allow_unisolated)")
    if repeated := -len(feed.train) % ranks:
        found.append(f"{repeated} rows are seen twice in an epoch, so that all {ranks} ranks have as many")
    return found
