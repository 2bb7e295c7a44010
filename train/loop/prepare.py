"""Open, check, and measure everything that a run needs before its first step.

    corpus + settings ─feed─▶ rows, collator ─▶ model with adapter ─▶ attention, options, micro-batch: measured
      ─▶ isolation, proven ─▶ Run

The first start writes its measurements (attention, options, micro-batch) to run.json, and later starts reuse them. A
resumed run therefore runs the same steps as an uninterrupted run.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState

from tasks.core.printable import counted
from tasks.encoders.tokenizer_files import TokenizerFiles, find_tokenizer_files
from tasks.storage.schemas import LOSS_WEIGHT
from train.config import TrainingConfig
from train.data.corpus import Corpus
from train.loop import micro_batch
from train.loop.checkpoints import Disk, find_disk, newest_of_all
from train.loop.feed import Feed, open_feed
from train.loop.run_folder import Choices, RunFolder, largest_divisor, step_of
from train.machine.devices import Device, check_reporting
from train.machine.ranks import fail_alike, gather, main_first, require_same, together
from train.model import attention_trial, base_model, flops, isolation, options, qlora
from train.model.attention import autocast, backend_to_load, batch_of, require_available, use_attention
from train.model.qlora import check_ranks, is_sharded, shard
from train.model.same_tokenizer import check_rows


@dataclass(frozen=True)
class Run:
    """Run that is ready for its first step, or for the step after `checkpoint`."""

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
    warnings: list[str]  # about a run that is resumed on another machine

    @property
    def steps_done(self) -> int:
        """Return the number of optimizer steps of the checkpoint."""
        return step_of(self.checkpoint) if self.checkpoint else 0

    @property
    def tokens_per_step(self) -> float:
        """Return the number of tokens of one step, with padding, over all ranks."""
        return self.choices.rows_per_step * self.feed.padded_tokens / self.feed.rows


@dataclass(frozen=True)
class _Start:
    """Start of a run: device, precision, and ranks, and the choices of a start before."""

    place: tuple[str, str, int]
    before: Choices | None

    @property
    def known(self) -> Choices | None:
        """Return the choices of an earlier start at the same place."""
        found = self.before
        return found if found and (found.device, found.precision, found.ranks) == self.place else None

    def wants(self, option: str, config: TrainingConfig) -> bool:
        """Return whether to turn an option on, as at the first start of the run."""
        setting, known = getattr(config, option), self.known
        if setting and known and known.options is not None:
            return known.options.get(option, False)
        if setting == "auto":
            # A run of an earlier version started without the option.
            return self.place[0] == "cuda" and not (self.before and self.before.options is None)
        return bool(setting)

    def rows_of_step(self, feed: Feed, config: TrainingConfig) -> int:
        """Return the rows of a step over all ranks, which never change in a run."""
        if self.before:
            return self.before.rows_per_step
        ranks = self.place[2]
        most = math.ceil(feed.rows / ranks)
        return ranks * micro_batch.rows_per_step(config.tokens_per_step / ranks, feed.padded_tokens / feed.rows, most)


def prepare(
    corpus: Corpus, config: TrainingConfig, folder: RunFolder, root: Path, device: Device, state: PartialState
) -> Run:
    """Prepare a run."""
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
        """Build the small Llama or find the base model, and check that it fits."""
        base = base_model.base_model(config, vocab_size, corpus.sequence_length, root / "data" / "models")
        base_model.check_model(base, base_model.read_config(base), feed.max_id, corpus.sequence_length)
        if corpus.manifest and tokenizer and (config.base_model or config.tokenizer):
            notes.append(base_model.check_tokenizer(corpus.manifest, tokenizer, config, base))
            path = base_model.tokenizer_path(config, base)
            if path.is_dir() and base_model.has_tokenizer(path):
                notes.append(check_rows(corpus.manifest, corpus.folder, path))
        return base

    base = main_first(state.is_local_main_process, find_base)
    with together():
        before = folder.choices()
    # A machine that is new to the run has no choices. A machine that ran out of memory has a smaller micro-batch.
    before = min((found for found in gather(before) if found), key=lambda found: found.micro_batch, default=None)
    start, tried = _Start((state.device.type, device.precision, state.num_processes), before), []
    with together():
        attention, note = backend_to_load(base_model.read_config(base), config.attention)
        if config.attention == "auto" and feed.isolated and not start.known:
            tried = attention_trial.try_apart(base, config, state.device, device.dtype, feed.train, 2)
        # transformers would report a missing package while it loads the model.
        require_available(attention, state.device, device.dtype)
        model = qlora.load_model(base, config, state.device, device.dtype, attention)
    if state.num_processes > 1:
        commit = None if isinstance(base, Path) else f"{base} {base_model.commit_of(base)}"
        require_same("the base model", commit or folder.base_digest(Path(base))[:16])
    if config.sharding == "full":
        with together():
            shard(model, state.device)
    if note:
        notes.append(note)
        config = config.model_copy(update={"attention": attention})
    if corpus.weighted:
        options.weigh_loss(model)
        batch = batch_of([options.comparable(feed.longest[0])], range(1), feed.collator(attention), state.device)
        with together(waiting=is_sharded(model)):
            options.require_same_loss(model, batch, device.dtype)
        by = corpus.manifest.config[LOSS_WEIGHT] if corpus.manifest else "a column of the rows"
        notes.append(f"{LOSS_WEIGHT}: {by}; the loss of a step is the weighted mean of its trained tokens")
    checkpoint = newest_of_all(folder.path, corpus.key, disk)
    choices = _choose(model, feed, config, start, tried, device.dtype)
    proof = None
    if feed.isolated:
        with together(waiting=is_sharded(model)), autocast(state.device, device.dtype):
            proof = isolation.require_isolation(
                model,
                feed.train,
                feed.collator(choices.attention),
                choices.micro_batch,
                attention=choices.attention,
                seed=config.seed,
            )
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
        warnings=_resumed_elsewhere(checkpoint, before, choices),
    )


def _choose(
    model: Any, feed: Feed, config: TrainingConfig, start: _Start, tried: list[isolation.Trial], dtype: torch.dtype
) -> Choices:
    """Choose attention, options, and micro-batch."""
    # The choices of an earlier start with the same device, precision, and number of ranks are reused.
    known = start.known
    with autocast(model.device, dtype):
        attention, table = _choose_attention(
            model, feed, known.attention if known else config.attention, config.seed, tried
        )
    collator = feed.collator(attention)
    used, notes = {}, []
    if start.wants("fused_loss", config) and feed.own_loss:
        batch = batch_of([options.comparable(feed.longest[0])], range(1), collator, model.device)
        fused = options.try_fused_loss(model, batch, dtype, config.seed)
        used["fused_loss"] = fused.used
        notes.append(fused.note)
    elif config.fused_loss is True and not feed.own_loss:
        notes.append("fused_loss: not used: TRL computes the loss of format 2.0 itself")
    size, accumulation, speed, measured = _choose_size(model, feed, config, start, collator, dtype)
    if not feed.equal and config.compile:
        notes.append("compile: not used: rows without padding have different lengths")
    elif start.wants("compile", config):
        batch = batch_of(feed.longest, range(size), collator, model.device)
        compiled = options.try_compile(model, batch, dtype, config.seed, timed=not known)
        used["compile"] = compiled.used
        notes.append(compiled.note)
        if compiled.used and not known:
            speed = batch["input_ids"].numel() / compiled.seconds
    kept = known.options if known and known.options is not None else {"fused_loss": False, "compile": False} | used
    table = known.table if known else [*table, *measured]
    reduced = start.before.reduced if start.before else []
    rows = start.rows_of_step(feed, config)
    return Choices(*start.place, attention, size, accumulation, speed, table, notes, kept, reduced, rows)


def _choose_size(
    model: Any, feed: Feed, config: TrainingConfig, start: _Start, collator: Any, dtype: torch.dtype
) -> tuple[int, int, float, list[str]]:
    """Return rows per pass, passes per step, tokens/s, and the measurements."""
    known, (_, _, ranks) = start.known, start.place
    rows = math.ceil(start.rows_of_step(feed, config) / ranks)
    if known and rows == known.micro_batch * known.accumulation:
        wanted = known.micro_batch if config.micro_batch == "auto" else largest_divisor(rows, config.micro_batch)
        if wanted == known.micro_batch or (known.reduced and wanted > known.micro_batch):
            return known.micro_batch, known.accumulation, known.tokens_per_second, []
    measured = micro_batch.micro_batch(model, feed.longest, collator, config, rows, ranks, dtype)
    size = measured.micro_batch
    speed = max(trial.tokens_per_second for trial in measured.trials if trial.rows == size)
    return size, measured.accumulation, speed, measured.lines()


def _choose_attention(
    model: Any, feed: Feed, attention: str, seed: int, tried: list[isolation.Trial]
) -> tuple[str, list[str]]:
    """Set an attention backend, and return its name and a table of measurements."""
    if attention == "auto":
        if not feed.isolated:
            return "sdpa", []
        attention, trials = isolation.fastest(model, feed.train, 2, seed=seed, tried=tried)
        return attention, [f"{t.attention:>8} {t.reason or f'{t.tokens_per_second:,.0f} tokens/s'}" for t in trials]
    if feed.isolated:
        with together(waiting=is_sharded(model)):
            try:
                isolation.try_backend(model, feed.train, 1, attention, seed=seed)
            except torch.OutOfMemoryError as error:  # micro_batch reports it
                fail_alike(model, error)
    else:
        use_attention(model, attention)
    return attention, []


def _resumed_elsewhere(checkpoint: Path | None, before: Choices | None, now: Choices) -> list[str]:
    """Return warnings if a run is resumed on a different machine."""
    if checkpoint is None or before is None:
        return []
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
