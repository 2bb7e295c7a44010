"""One training run, from what was given to what is left behind. Every rank runs this.

    corpus + config ─feed─▶ rows, collator ─▶ model with adapter ─▶ attention, options, micro-batch: measured
      ─▶ isolation, proven ─▶ what is in effect, shown ─▶ steps, from the newest complete checkpoint
      ─▶ adapter, tokenizer, picture, record

What is measured at the first start (attention, micro-batch) is written to run.json and taken from there by later
starts, so that a run that was interrupted makes the steps that it would have made.
"""

from __future__ import annotations

import logging
import math
import warnings
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate import PartialState
from transformers import PrinterCallback, TrainerState

from tasks.core.errors import Interrupted, UsageError
from tasks.core.printable import counted, duration
from tasks.encoders.corpus_tokenizer import find_tokenizer_files
from train.config import TrainingConfig
from train.data.corpus import PACKED, Corpus
from train.loop import micro_batch, record
from train.loop.checkpoints import Checkpoints, newest_complete
from train.loop.display import ProgressLine, open_console, show_effect, show_result, si
from train.loop.feed import Feed, open_feed
from train.loop.interruption import Interruption
from train.loop.run_folder import RunFolder, step_of
from train.loop.trainer import arguments
from train.machine import devices
from train.machine.devices import check_reporting
from train.machine.ranks import main_first, together
from train.model import base_model, flops, isolation, qlora
from train.model.attention import batch_of, use_attention

# Fewer optimizer steps than this leave a model that has hardly learned, however full the rows are.
FEW_STEPS = 100


def train(corpus: Corpus, config: TrainingConfig, folder: RunFolder, root: Path) -> None:
    """Train, and write everything to `folder`. Raises PackError where something is refused, Interrupted on a signal."""
    interruption = Interruption()
    _quiet()
    device = devices.resolve(config)
    ranks = PartialState(cpu=device.kind == "cpu")
    main = ranks.is_main_process
    console = open_console(quiet=not main)
    with together():
        check_reporting(config)
        if main:
            folder.claim()
        feed = open_feed(corpus, config)
        tokenizer = find_tokenizer_files(corpus.manifest, corpus.folder) if corpus.manifest else None
    vocab_size = corpus.manifest.tokenizer.vocab_size if corpus.manifest else feed.max_id + 1
    notes = [*corpus.notes, *feed.notes]

    def find_base() -> Path | str:
        """A small model is built, one of a hub is fetched."""
        base = base_model.base_model(config, vocab_size, corpus.sequence_length, root / "data" / "models")
        base_model.check_model(base, base_model.read_config(base), feed.max_id, corpus.sequence_length)
        if corpus.manifest and (config.base_model or config.tokenizer):
            notes.append(base_model.check_tokenizer(corpus.manifest, config, base))
        return base

    base = main_first(main, find_base)
    with together():
        model = qlora.load_model(base, config, ranks.device, device.bf16)
    # What is not complete is removed by the first rank, before others look.
    resume = main_first(main, lambda: newest_complete(folder.path, corpus.key))
    autocast = partial(torch.autocast, ranks.device.type, torch.bfloat16, enabled=device.bf16)
    choices = _choose(model, feed, config, folder.choices(), ranks, autocast, device)
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
    for callback in (line, Checkpoints({"corpus": corpus.key}, config.keep_checkpoints), interruption):
        trainer.add_callback(callback)
    trainer.remove_callback(PrinterCallback)

    steps = _steps(trainer, config)
    done = step_of(resume) if resume else 0
    with together():
        changed = _check_resumed(resume, folder.choices(), choices)
    if main:
        folder.begin(choices)
    effect = _effect(corpus, feed, model, config, device, choices, steps, seen)
    effect |= {"folder": str(folder.path), "begins": f"after {resume.name}" if resume else "at the first step"}
    effect["expected time"] = _expected(steps.total - done, feed, choices)
    warnings = [*changed, *_warnings(feed, steps, config, corpus, choices)]
    show_effect(console, notes, choices["table"], effect, warnings)

    if device.kind == "cuda":
        torch.cuda.reset_peak_memory_stats()  # the proof needs more than a step
    if resume and done >= steps.total:  # it was ended between its last step and its record
        trainer._load_from_checkpoint(str(resume))
        trainer.state = TrainerState.load_from_json(str(resume / "trainer_state.json"))
    else:
        try:
            trainer.train(resume_from_checkpoint=str(resume) if resume else None)
        finally:
            line.close()
    if interruption.stopped:
        raise Interrupted(
            "interrupted", f"interrupted after step {trainer.state.global_step}; the same command goes on from there"
        )
    if feed.validation is not None:
        trainer.evaluate()
    if not main:
        return
    log = trainer.state.log_history
    result = record.summary(log)
    written = {
        "key": folder.key,
        "corpus": {"name": corpus.name, "key": corpus.key, "sequence_length": corpus.sequence_length},
        "format_version": corpus.format_version,
        "base_model": str(base.resolve() if isinstance(base, Path) else base),
        "config": config.model_dump(),
        "choices": choices,
        "isolation": asdict(seen) if seen else None,
        "in_effect": effect,
        "flops_per_token": work,
        "result": result,
        "versions": record.versions(),
    }
    record.write_results(folder.path, model, tokenizer, written, log)
    show_result(console, result, folder.path, tokenizer is not None)
    print(folder.record)


def _quiet() -> None:
    """What libraries say of themselves does not help the person who trains; what matters is said by us."""
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    logging.getLogger("huggingface_hub").setLevel(logging.CRITICAL)  # it tells of each try to reach a network
    for category in (FutureWarning, DeprecationWarning, UserWarning):
        warnings.filterwarnings("ignore", category=category)


def _check_resumed(resume: Path | None, before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Warnings, where a run goes on otherwise than it began. Raises UsageError where it would see other rows."""
    if resume is None:
        return []
    rows = [choices["ranks"] * choices["micro_batch"] * choices["accumulation"] for choices in (before, now)]
    if rows[0] != rows[1]:
        raise UsageError(
            "other_ranks",
            f"{resume}: was made with {rows[0]} rows a step ({before['ranks']} ranks), now there are {rows[1]} "
            f"({now['ranks']} ranks): some rows would be seen twice and others never; train with gpus: "
            f"{before['ranks']}, or name another `output`",
        )
    return [
        f"{what} is {now[what]}, and was {before[what]} when this run began: its losses will differ a little"
        for what in ("ranks", "device", "precision")
        if before[what] != now[what]
    ]


def _choose(
    model: Any,
    feed: Feed,
    config: TrainingConfig,
    before: dict[str, Any],
    ranks: PartialState,
    autocast: Any,
    device: devices.Device,
) -> dict[str, Any]:
    """Attention, options, micro-batch: as an earlier start of this run chose them, or measured now."""
    place = {"device": ranks.device.type, "precision": device.precision, "ranks": ranks.num_processes}
    known = before if all(before.get(name) == value for name, value in place.items()) else {}
    table: list[str] = known.get("table", [])
    speed = known.get("tokens_per_second")
    attention = known.get("attention") or config.attention
    with autocast():
        if attention == "auto":
            attention = "sdpa"
            if feed.isolated:
                attention, trials = isolation.fastest(model, feed.train, 2, seed=config.seed)
                table = [f"{t.attention:>8} {t.reason or f'{t.tokens_per_second:,.0f} tokens/s'}" for t in trials]
        elif feed.isolated:
            with suppress(torch.OutOfMemoryError):  # said below
                isolation.try_backend(model, feed.train, 1, attention, seed=config.seed)
        else:
            use_attention(model, attention)
    collator = feed.collator(attention)
    options = config if feed.own_loss else config.model_copy(update={"fused_loss": False})
    notes = qlora.apply_options(model, options, batch_of(feed.longest, range(1), collator, ranks.device), device.bf16)
    if options.fused_loss != config.fused_loss:
        notes.append("fused_loss: not used: TRL computes the loss of format 2.0 itself")
    if "micro_batch" in known:
        size, accumulation = known["micro_batch"], known["accumulation"]
    else:
        # The most that a rank can see without a row that it has seen.
        rows = math.ceil(len(feed.train) / ranks.num_processes)
        wanted = micro_batch.rows_per_step(
            config.tokens_per_step / ranks.num_processes, feed.places / len(feed.train), rows
        )
        chosen = micro_batch.micro_batch(
            model, feed.longest, collator, config, wanted, ranks.num_processes, device.bf16
        )
        size, accumulation = chosen.micro_batch, chosen.accumulation
        table = [*table, *chosen.lines()]
        speed = max(trial.tokens_per_second for trial in chosen.trials if trial.rows == size)
    return place | {
        "attention": attention, "micro_batch": size, "accumulation": accumulation,
        "tokens_per_second": speed, "table": table, "notes": notes,
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
    device: devices.Device,
    choices: dict[str, Any],
    steps: Steps,
    seen: isolation.Isolation | None,
) -> dict[str, str]:
    """What is really in effect, for people: read from the model and the rows, not from the settings."""
    everything, trainable = flops.parameters(model)
    size, accumulation, ranks = choices["micro_batch"], choices["accumulation"], choices["ranks"]
    per_step = _tokens_per_step(feed, choices)
    trained = per_step * feed.trained / feed.places
    parts = (counted(size, "row"), f"{accumulation} pass{'es' * (accumulation > 1)}", counted(ranks, "rank"))
    return {
        "corpus": f"{corpus.name} {corpus.key[:12]}, format {corpus.format_version}",
        "device": f"{device.name}{f' × {ranks}' if ranks > 1 else ''}, {device.precision}",
        "model": f"{si(everything)} parameters, {si(trainable)} trainable ({100 * trainable / everything:.2f} %)",
        "frozen weights": "NF4, double quantisation" if qlora.quantised(model) else f"{model.dtype}, not quantised",
        "attention": f"{choices['attention']}; {seen or 'no row has two conversations to keep apart'}",
        "optimizer": f"{config.optimizer}, learning rate {config.rate:g}, {config.schedule}",
        "checkpointing": "on" if model.is_gradient_checkpointing else "off",
        "rows": f"{feed.described}{f'; validation {len(feed.validation):,}' if feed.validation is not None else ''}",
        "a step": f"{' × '.join(parts)} = {si(per_step)} tokens, {si(trained)} trained on",
        "steps": f"{steps.total:,}, {steps.per_epoch:,} an epoch",
    }


def _tokens_per_step(feed: Feed, choices: dict[str, Any]) -> float:
    """With pads, over all ranks."""
    rows = choices["micro_batch"] * choices["accumulation"] * choices["ranks"]
    return rows * feed.places / len(feed.train)


def _expected(steps: int, feed: Feed, choices: dict[str, Any]) -> str:
    return duration(steps * _tokens_per_step(feed, choices) / (choices["tokens_per_second"] * choices["ranks"]))


def _warnings(feed: Feed, steps: Steps, config: TrainingConfig, corpus: Corpus, choices: dict[str, Any]) -> list[str]:
    found = []
    per_step, ranks = _tokens_per_step(feed, choices), choices["ranks"]
    if not 0.9 < per_step / config.tokens_per_step < 1.1:
        found.append(
            f"a step has {si(per_step)} tokens, tokens_per_step asks for {si(config.tokens_per_step)}: rows are taken "
            f"whole, {choices['micro_batch']} at a time on {counted(ranks, 'rank')}, and a corpus of "
            f"{counted(len(feed.train), 'row')} has no more than all"
        )
    if steps.total < FEW_STEPS:
        fewer = f"lower tokens_per_step ({config.tokens_per_step:,}) or raise epochs"
        mend = "raise max_steps" if config.max_steps else fewer
        found.append(
            f"only {counted(steps.total, 'optimizer step')}: full rows leave few on a small corpus, and a model learns "
            f"little in fewer than {FEW_STEPS}; {mend}"
        )
    if steps.total <= (feed.packings - 1) * steps.per_epoch:
        found.append(
            f"the corpus has {feed.packings} packings, one for each epoch, and {counted(steps.total, 'step')} use the "
            f"first {math.ceil(steps.total / steps.per_epoch)}; raise epochs to {feed.packings} to use all of them"
        )
    if corpus.format_version == PACKED and not corpus.isolated:
        found.append("rows have no position_ids: the conversations of a row see each other (allow_unisolated)")
    if repeated := -len(feed.train) % ranks:
        found.append(f"{counted(repeated, 'row')} seen twice in an epoch, so that all {ranks} ranks have as many")
    return found
