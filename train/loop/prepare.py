"""Open, check, and measure everything that a run needs before its first step.

    corpus + settings ─feed─▶ rows, collator ─▶ model with adapter ─▶ attention, options, micro-batch: measured
      ─▶ isolation, proven ─▶ Run

What the first start measures (attention, micro-batch) is written to run.json and reused by later starts, so that a
resumed run takes the same steps as an uninterrupted one.
"""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState

from tasks.core.errors import UsageError
from tasks.core.printable import counted
from tasks.encoders.corpus_tokenizer import find_tokenizer_files
from tasks.encoders.tokenizer_files import TokenizerFiles
from train.config import TrainingConfig
from train.data.corpus import Corpus
from train.loop import micro_batch
from train.loop.checkpoints import newest_of_all
from train.loop.feed import Feed, open_feed
from train.loop.run_folder import Choices, RunFolder, model_digest, step_of
from train.machine.devices import Device, check_reporting
from train.machine.disk import Disk, find_disk
from train.machine.meeting import require_same
from train.machine.ranks import gather, main_first, together
from train.model import base_model, flops, isolation, qlora
from train.model.attention import backend_to_load, batch_of, use_attention
from train.model.sharding import check_ranks, shard


@dataclass(frozen=True)
class Run:
    """A run that is ready for its first step, or for the step after `checkpoint`."""

    corpus: Corpus
    config: TrainingConfig
    folder: RunFolder
    disk: Disk
    device: Device
    feed: Feed
    tokenizer: TokenizerFiles | None
    base: Path | str
    model: Any
    choices: Choices
    isolation: isolation.Isolation | None  # None if no row has two conversations
    checkpoint: Path | None  # None at the first start
    flops_per_token: float
    notes: list[str]
    warnings: list[str]  # of a run that is resumed on another machine

    @property
    def steps_done(self) -> int:
        """Return the optimizer steps of the checkpoint."""
        return step_of(self.checkpoint) if self.checkpoint else 0

    @property
    def tokens_per_step(self) -> float:
        """Return the tokens of one optimizer step, with padding, over all ranks."""
        return self.choices.rows_per_step * self.feed.padded_tokens / len(self.feed.train)


def prepare(
    corpus: Corpus, config: TrainingConfig, folder: RunFolder, root: Path, device: Device, state: PartialState
) -> Run:
    """Prepare a run. Raises PackError."""
    disk = find_disk(folder.path)
    with together():
        check_reporting(config)
        check_ranks(config)
        if disk.writes:
            folder.claim()
        feed = open_feed(corpus, config)
        tokenizer = find_tokenizer_files(corpus.manifest, corpus.folder) if corpus.manifest else None
    vocab_size = corpus.manifest.tokenizer.vocab_size if corpus.manifest else feed.max_id + 1
    notes = [*corpus.notes, *feed.notes]
    if config.gpus not in ("auto", state.num_processes):
        notes.append(f"gpus: {config.gpus} has no effect: torchrun started {counted(state.num_processes, 'rank')}")

    def find_base() -> Path | str:
        """Build the small model, or download one of the Hub."""
        base = base_model.base_model(config, vocab_size, corpus.sequence_length, root / "data" / "models")
        base_model.check_model(base, base_model.read_config(base), feed.max_id, corpus.sequence_length)
        if corpus.manifest and tokenizer and (config.base_model or config.tokenizer):
            notes.append(base_model.check_tokenizer(corpus.manifest, tokenizer, config, base))
        return base

    base = main_first(state.is_local_main_process, find_base)
    with together():
        attention, note = backend_to_load(base_model.read_config(base), config.attention)
        model = qlora.load_model(base, config, state.device, device.bf16, attention)
    require_same("the base model", _identity(base, model))
    if config.sharding == "full":
        shard(model, state.device)
    if note:
        notes.append(note)
        config = config.model_copy(update={"attention": attention})
    checkpoint = newest_of_all(folder.path, corpus.key, disk)
    with together():
        before = folder.choices()
    # A machine that is new to the run has none.
    before = next((choices for choices in gather(before) if choices), None)
    autocast = partial(torch.autocast, state.device.type, torch.bfloat16, enabled=device.bf16)
    choices = _choose(model, feed, config, before, device, state, autocast)
    proof = None
    if feed.isolated:
        with together(), autocast():
            proof = isolation.require_isolation(
                model,
                feed.train,
                feed.collator(choices.attention),
                choices.micro_batch,
                attention=choices.attention,
                seed=config.seed,
            )
    with together():
        warnings = _check_resumed(checkpoint, before, choices)
    return Run(
        corpus=corpus,
        config=config,
        folder=folder,
        disk=disk,
        device=device,
        feed=feed,
        tokenizer=tokenizer,
        base=base,
        model=model,
        choices=choices,
        isolation=proof,
        checkpoint=checkpoint,
        flops_per_token=flops.flops_per_token(model, feed.positions()),
        notes=[*notes, *choices.notes],
        warnings=warnings,
    )


def _identity(base: Path | str, model: Any) -> str:
    """Identify the weights of a base model: by samples of its files, or by the commit on the Hub."""
    if isinstance(base, Path):
        return str(model_digest(str(base)))[:16]
    return f"{base} {getattr(model.config, '_commit_hash', None)}"


def _choose(
    model: Any,
    feed: Feed,
    config: TrainingConfig,
    before: Choices | None,
    device: Device,
    state: PartialState,
    autocast: Any,
) -> Choices:
    """Choose attention, options, and micro-batch; reuse an earlier start's choices."""
    place = (state.device.type, device.precision, state.num_processes)
    known = before if before and (before.device, before.precision, before.ranks) == place else None
    with autocast():
        attention, table = _choose_attention(model, feed, known.attention if known else config.attention, config.seed)
    collator = feed.collator(attention)
    options = config if feed.own_loss else config.model_copy(update={"fused_loss": False})
    notes = qlora.apply_options(model, options, batch_of(feed.longest, range(1), collator, state.device), device.bf16)
    if options.fused_loss != config.fused_loss:
        notes.append("fused_loss: not used: TRL computes the loss of format 2.0 itself")
    if known:
        size, accumulation, speed, table = known.micro_batch, known.accumulation, known.tokens_per_second, known.table
    else:
        # At most the rows that a rank can take without repeating one.
        most = math.ceil(len(feed.train) / state.num_processes)
        rows = micro_batch.rows_per_step(
            config.tokens_per_step / state.num_processes, feed.padded_tokens / len(feed.train), most
        )
        measured = micro_batch.micro_batch(
            model, feed.longest, collator, config, rows, state.num_processes, device.bf16
        )
        size, accumulation = measured.micro_batch, measured.accumulation
        speed = max(trial.tokens_per_second for trial in measured.trials if trial.rows == size)
        table = [*table, *measured.lines()]
    return Choices(*place, attention, size, accumulation, speed, table, notes)


def _choose_attention(model: Any, feed: Feed, attention: str, seed: int) -> tuple[str, list[str]]:
    """Set an attention backend; `auto` measures all. Returns its name and a table."""
    if attention == "auto":
        if not feed.isolated:
            return "sdpa", []
        attention, trials = isolation.fastest(model, feed.train, 2, seed=seed)
        return attention, [f"{t.attention:>8} {t.reason or f'{t.tokens_per_second:,.0f} tokens/s'}" for t in trials]
    if feed.isolated:
        with together(), suppress(torch.OutOfMemoryError):  # micro_batch reports it
            isolation.try_backend(model, feed.train, 1, attention, seed=seed)
    else:
        use_attention(model, attention)
    return attention, []


def _check_resumed(checkpoint: Path | None, before: Choices | None, now: Choices) -> list[str]:
    """Return warnings about another machine. Raises UsageError for other rows."""
    if checkpoint is None or before is None:
        return []
    if before.rows_per_step != now.rows_per_step:
        raise UsageError(
            "other_ranks",
            f"{checkpoint}: was made with {before.rows_per_step} rows per step ({before.ranks} ranks), now there are "
            f"{now.rows_per_step} ({now.ranks} ranks): some rows would be seen twice and others never; train with "
            f"gpus: {before.ranks}, or set another `output`",
        )
    changes = {
        "ranks": (before.ranks, now.ranks),
        "device": (before.device, now.device),
        "precision": (before.precision, now.precision),
    }
    return [
        f"{name} is {new}, but was {old} when this run started: its losses will differ slightly"
        for name, (old, new) in changes.items()
        if old != new
    ]
