"""Run one training, from the corpus to the adapter, on every rank.

    corpus + settings ─prepare─▶ rows, collator, model with adapter; attention, options, and micro-batch are measured,
                                 and isolation is proven ─▶ Run
    Run ─train─▶ steps, from the newest complete checkpoint ─record─▶ adapter, tokenizer, picture, training.json

The first start writes its measurements (attention, options, micro-batch) to run.json, and later starts reuse them. A
resumed run therefore runs the same steps as an uninterrupted run.
"""

from __future__ import annotations

import math
import os
import sys
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

import torch
from accelerate import PartialState
from transformers import PrinterCallback, TrainerState

from packcorpus.tasks.core.errors import Interrupted, PartMissing
from packcorpus.tasks.core.printable import counted, printable
from packcorpus.tasks.encoders.tokenizer_files import TokenizerFiles, find_tokenizer_files
from packcorpus.tasks.storage.schemas import LOSS_WEIGHT
from packcorpus.train import measures
from packcorpus.train.config import TrainingConfig
from packcorpus.train.data.corpus import Corpus
from packcorpus.train.evaluation import Decisions, Sample, Samples, history, outcome, samples_of
from packcorpus.train.loop import micro_batch, record
from packcorpus.train.loop.callbacks import Deadline, Interruption, Profile, ProgressLine, RankClock, slow_ranks
from packcorpus.train.loop.checkpoints import Checkpoints, Disk, best_complete, find_disk, newest_of_all
from packcorpus.train.loop.feed import Feed, open_feed
from packcorpus.train.loop.run_folder import UNTIL, Choices, RunFolder, largest_divisor, step_of
from packcorpus.train.loop.trainer import arguments
from packcorpus.train.machine import devices, process, ranks
from packcorpus.train.machine.process import LAUNCHED, SignalGuard, is_one_of_several, is_rank, or_stop_all
from packcorpus.train.machine.ranks import fail_alike, gather, together
from packcorpus.train.model import attention, base_model, first_pass, isolation, options, qlora, quantization
from packcorpus.train.model.attention import autocast, batch_of
from packcorpus.train.model.checkpoint import require_causal_text
from packcorpus.train.model.checkpointing import Checkpointing, described, usable, use_checkpointing
from packcorpus.train.model.refusal import named


@dataclass(frozen=True)
class Run:
    """Run that is ready for its first step, or for the step after `checkpoint`."""

    corpus: Corpus
    config: TrainingConfig
    folder: RunFolder
    disk: Disk
    device: devices.Device
    feed: Feed
    tokenizer: TokenizerFiles | None
    base: Path | str
    model: Any
    choices: Choices
    isolation: isolation.Isolation | None  # None if no row has two conversations
    checkpoint: Path | None  # None at the first start
    flops_per_token: float
    notes: list[str]
    warnings: list[str]  # about the base model, or a run that is resumed on another machine

    @property
    def steps_done(self) -> int:
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
        """Return the choices of an earlier start on such a device, on any number of ranks."""
        found = self.before
        return found if found and (found.device, found.precision) == self.place[:2] else None

    def wants(self, option: str, config: TrainingConfig) -> bool:
        """Return whether to turn an option on, as at the first start of the run."""
        setting, known = getattr(config, option, "auto"), self.known
        if setting and known and known.options is not None:
            return known.options.get(option, False)
        if setting == "auto":
            # A run of an earlier version started without the option.
            on_gpu = self.place[0] == "cuda" and config.sharding != "full"  # never tried with shards
            has = option == "fused_loss" or on_gpu
            return has and not (self.before and self.before.options is None)
        return bool(setting)

    def checkpointing(self, config: TrainingConfig) -> Any:
        """Return the activation checkpointing; `auto` if it is not measured yet."""
        setting, known = config.activation_checkpointing, self.known
        if setting != "auto":
            return setting
        if known:  # in runs of an earlier version, all layers had it
            return True if known.checkpointing is None else known.checkpointing
        # With divided weights, a rank that has no memory would leave the others waiting.
        return True if config.sharding == "full" else "auto"

    def rows_of_step(self, feed: Feed, config: TrainingConfig) -> int:
        """Return the rows of a step over all ranks, which never change in a run."""
        if self.before:
            return self.before.rows_per_step
        ranks = self.place[2]
        most = math.ceil(feed.rows / ranks)
        return ranks * micro_batch.rows_per_step(config.tokens_per_step / ranks, feed.padded_tokens / feed.rows, most)


def prepare(
    corpus: Corpus, config: TrainingConfig, folder: RunFolder, root: Path, device: devices.Device, state: PartialState
) -> Run:
    """Prepare a run."""
    disk = find_disk(folder.path)
    with together():
        devices.check_reporting(config)
        qlora.check_ranks(config)
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
                notes.append(base_model.check_rows(corpus.manifest, corpus.folder, path))
        return base

    base = ranks.main_first(state.is_local_main_process, find_base)
    with together():
        before = folder.choices()
    # A machine that is new to the run has no choices. A machine that ran out of memory has a smaller micro-batch.
    before = min(filter(None, gather(before)), key=lambda choices: choices.micro_batch, default=None)
    start, tried = _Start((state.device.type, device.precision, state.num_processes), before), []
    with together():
        backend, note = attention.backend_to_load(base_model.read_config(base), config.attention)
        # On a CPU, and without conversations to keep apart, no backend is worth a trial.
        tries = config.attention == "auto" and device.kind != "cpu" and feed.isolated
        if tries and not start.known:
            tried = isolation.try_apart(base, config, state.device, device.dtype, feed.train, 2)
        # transformers would report a missing package while it loads the model.
        attention.require_available(backend, state.device, device.dtype)
        model = qlora.load_model(base, config, state.device, device.dtype, backend)
    loaded = quantization.described(base, model, config)
    notes += loaded[0]
    if state.num_processes > 1:
        commit = None if isinstance(base, Path) else f"{base} {base_model.commit_of(base)}"
        ranks.require_same("the base model", commit or folder.base_digest(Path(base))[:16])
    if config.sharding == "full":
        with together():
            qlora.shard(model, state.device)
    if note:
        notes.append(note)
    with together(waiting=qlora.is_sharded(model)), named(model), autocast(state.device, device.dtype):
        require_causal_text(base, model, attention.Collator(backend))
    if corpus.weighted:
        by = corpus.manifest.config[LOSS_WEIGHT] if corpus.manifest else "a column of the rows"
        notes.append(f"{LOSS_WEIGHT}: {by}; the loss of a step is the weighted mean of its trained tokens")
    checkpoint = newest_of_all(folder.path, corpus.key, disk)
    choices = _choose(model, feed, config, start, "auto" if tries else backend, tried, device.dtype)
    proof = None
    if feed.isolated:
        collator = feed.collator(choices.attention)
        with together(waiting=qlora.is_sharded(model)), named(model), autocast(state.device, device.dtype):
            proof = isolation.require_isolation(
                model, feed.train, collator, choices.micro_batch, attention=choices.attention, seed=config.seed
            )
    return Run(
        corpus=corpus, config=config, folder=folder, disk=disk, device=device, feed=feed, tokenizer=tokenizer,
        base=base, model=model, choices=choices, isolation=proof, checkpoint=checkpoint,
        flops_per_token=measures.flops_per_token(model, feed.positions()), notes=[*notes, *choices.notes],
        warnings=[
            *loaded[1],
            *folder.warnings(),
            *(_changes(before, choices, model) if checkpoint and before else ()),
        ],
    )  # fmt: skip


def _changes(before: Choices, now: Choices, model: Any) -> list[str]:
    """Return warnings about a run that continues with other losses than uninterrupted."""
    names = dict.fromkeys(("device", "precision"), "its losses will differ slightly")
    # Steps have the same rows on any number of ranks and with any micro-batch.
    if any(rate for _, _, rate in options.dropouts_of(model)):
        random = "steps have the same rows, but other random numbers of dropout"
        names |= dict.fromkeys(("ranks", "micro_batch"), random)
    return [
        f"{name} is {new}, but was {old} when this run started: {text}"
        for name, text in names.items()
        if (new := getattr(now, name)) != (old := getattr(before, name))
    ]


def _choose(
    model: Any,
    feed: Feed,
    config: TrainingConfig,
    start: _Start,
    backend: str,
    tried: list[isolation.Trial],
    dtype: torch.dtype,
) -> Choices:
    # The choices of an earlier start with the same device and precision are reused, so that results differ only by the
    # order of sums. Only the micro-batch depends on the number of ranks.
    known, table = start.known, list[str]()
    backend = known.attention if known else backend
    with autocast(model.device, dtype):
        if backend == "auto":
            backend, trials = isolation.fastest(model, feed.train, 2, seed=config.seed, tried=tried)
            table = [f"{t.attention:>8} {t.reason or f'{t.tokens_per_second:,.0f} tokens/s'}" for t in trials]
        elif feed.isolated:
            with together(waiting=qlora.is_sharded(model)), named(model):
                try:
                    isolation.try_backend(model, feed.train, 1, backend, seed=config.seed)
                except torch.OutOfMemoryError as error:  # micro_batch reports it
                    fail_alike(model, error)
        else:
            attention.use_attention(model, backend)
    collator = feed.collator(backend)
    batch = batch_of([options.comparable(feed.longest[0])], range(1), collator, model.device)
    with together(waiting=qlora.is_sharded(model)), named(model):
        notes = first_pass.learn(model, batch, dtype, config.seed, backend)
    notes += first_pass.drop_unused(model)
    used = {}
    if start.wants("fused_loss", config):
        fused = options.try_fused_loss(model, batch, dtype, config.seed)
        used["fused_loss"] = fused.used
        notes.append(fused.note)
    size, accumulation, speed, measured, how = _choose_size(model, feed, config, start, collator, dtype, notes)
    speed = _use_faster(model, feed, config, start, collator, dtype, size, used, notes) or speed
    kept = known.options if known else None
    kept = dict.fromkeys(("fused_loss", "compile", "liger"), False) | used if kept is None else kept
    table = [*table, *measured] or (known.table if known else [])
    reduced = start.before.reduced if start.before else []
    rows = start.rows_of_step(feed, config)
    return Choices(*start.place, backend, size, accumulation, speed, table, notes, kept, reduced, rows, how)


def _use_faster(
    model: Any,
    feed: Feed,
    config: TrainingConfig,
    start: _Start,
    collator: Any,
    dtype: torch.dtype,
    size: int,
    used: dict[str, bool],
    notes: list[str],
) -> float:
    """Compile the layers, or else use Liger's; return tokens/s, or 0; adds notes."""
    wanted = [name for name in ("compile", "liger") if start.wants(name, config)]
    if "compile" in wanted and not feed.equal:
        notes.append("compile: not used: rows without padding have different lengths")
        wanted.remove("compile")
    for name in wanted:
        batches = [batch_of(feed.longest, range(n * size, (n + 1) * size), collator, model.device) for n in range(3)]
        attempt = {"compile": options.try_compile, "liger": options.try_liger}[name]
        found = attempt(model, batches, dtype, config.seed, timed=not start.known)
        used[name] = found.used
        notes.append(found.note)
        if found.used:
            return 0.0 if start.known else batches[0]["input_ids"].numel() / found.seconds
    return 0.0


def _choose_size(
    model: Any, feed: Feed, config: TrainingConfig, start: _Start, collator: Any, dtype: torch.dtype, notes: list[str]
) -> tuple[int, int, float, list[str], Checkpointing]:
    """Return rows per pass, passes per step, tokens/s, measurements, checkpointing."""
    known, (_, _, ranks) = start.known, start.place
    rows, wanted = math.ceil(start.rows_of_step(feed, config) / ranks), start.checkpointing(config)
    if known and known.ranks == ranks and rows == known.micro_batch * known.accumulation:
        size = known.micro_batch if config.micro_batch == "auto" else largest_divisor(rows, config.micro_batch)
        if size == known.micro_batch or (known.reduced and size > known.micro_batch):
            way, why = usable(model, wanted)
            use_checkpointing(model, way)
            notes += [f"activation_checkpointing: {described(way)}, because {why}"] * bool(why)
            return known.micro_batch, known.accumulation, known.tokens_per_second, [], way

    def measure(checked: bool) -> micro_batch.Choice:
        return micro_batch.micro_batch(model, feed.longest, collator, config, rows, ranks, dtype, checked=checked)

    way, measured, lines = micro_batch.with_checkpointing(model, wanted, measure)
    notes += lines
    speed = measured.chosen.tokens_per_second
    return measured.micro_batch, measured.accumulation, speed, measured.lines(), way


def train(corpus: Corpus, config: TrainingConfig, folder: RunFolder, root: Path, guard: SignalGuard) -> None:
    """Train, and write everything to `folder`."""
    interruption = Interruption(guard)
    base_model.silence_libraries()
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
    console = record.open_console(quiet=not state.is_main_process)
    run = prepare(corpus, config, folder, root, device, state)
    line, clock = ProgressLine(console), RankClock(state.device, device.name)
    callbacks = [line, interruption, clock, Decisions(config, run.feed.validation is not None)]
    if until := os.environ.get(UNTIL):
        callbacks.append(Deadline(until))
    if config.samples:
        callbacks += [Samples(corpus, run.feed.validation, run.model, config.samples, folder.path, console)]
    with redirect_stdout(sys.stderr):  # experiment trackers print
        trainer = _trainer(run, *callbacks)
    steps = record.count_steps(trainer, config)
    with ranks.together():
        if run.disk.writes:
            folder.write(run.choices)
    in_effect, lacking = record.in_effect(run, steps), unavailable(device)
    record.show_effect(console, run.notes, run.choices.table, in_effect, record.warnings(run, steps))

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
        line.on_train_end()
    if interruption.stopped:
        text = f"interrupted after step {trainer.state.global_step}; run the same command to resume"
        raise Interrupted("interrupted", text)
    if run.choices.options and run.choices.options["compile"] and options.gave_up():
        console.print("warning: compile: torch stopped compiling during this run", style="yellow")
    waited = record.data_wait(record.summary(trainer.state.log_history))
    speeds = clock.speeds(state.process_index, waited)
    log, *_ = ranks.gather(trainer.state.log_history if state.is_main_process else [])
    decided = outcome(log, config, trainer.state.global_step >= steps.total)
    samples: list[Sample] = []
    if config.samples:  # only the first rank generates
        samples, *_ = ranks.gather(samples_of(folder.path, decided["kept_step"]) if state.is_main_process else [])
    result = record.summary(log) | decided
    measured = record.advice_of(result, speeds, config)
    advice = [*measures.advise(record.figures(run, steps)), *measured]
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
    record.show_result(console, result, samples, folder.path, run.tokenizer is not None, slow_ranks(speeds))
    for one in measured:  # all other advice was printed as warnings before the first step
        record.say(console, f"advice: {one}", "yellow")
    if state.is_local_main_process:
        print(printable(str(folder.record)))


def reduce_micro_batch(run: Run, step: int, error: RuntimeError) -> NoReturn:
    """Write a smaller micro-batch to run.json, and raise Restart."""
    choices, happened = run.choices, process.described(error)
    why = f"step {step} {happened} with {counted(choices.micro_batch, 'row')} per pass"
    smaller = choices.halved(why)
    # A step needs more memory than the passes that were measured.
    if (
        smaller is None
        and run.config.activation_checkpointing == "auto"
        and usable(run.model, True)[0] != (choices.checkpointing)
    ):
        way = described(choices.checkpointing or False)
        smaller = replace(choices, checkpointing=True, reduced=[*choices.reduced, f"{why}, checkpointing {way}"])
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
    choices, device = run.choices, run.device
    given = arguments(
        run.config, str(run.folder.path), choices.micro_batch, choices.accumulation, device.kind, device.precision
    )
    given["save_on_each_node"] = not run.disk.shared
    given["ddp_find_unused_parameters"] = first_pass.has_listed_experts(run.model)
    trainer = run.feed.trainer(run.model, given, run.feed.collator(choices.attention), choices.rows_per_step)
    peak = measures.peak_flops(device.name, device.dtype)
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
    return {"attention": attention.unavailable_backends(torch.device(device.kind), device.dtype)}


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
        "in_16_bits": run.model.get_base_model().in_16_bits,
        "config": run.config.model_dump(),
        "choices": asdict(run.choices),
        "isolation": asdict(run.isolation) if run.isolation else None,
    }
