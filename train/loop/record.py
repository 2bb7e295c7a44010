"""Describe a run: what is printed around its steps, and the files of its results.

    before   a table of the settings that are actually in effect, and warnings
    after    the result, in two lines
    model, log of the steps ─write_results─▶ adapter_model.safetensors, tokenizer, training.svg, then training.json

All output goes to standard error. Standard output has only the path of the record.
"""

from __future__ import annotations

import io
import math
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from packcorpus.tasks.core.printable import counted, duration
from packcorpus.tasks.encoders.tokenizer_files import TokenizerFiles
from packcorpus.tasks.storage.files import give_usual_mode, sha256_of, to_json, write_bytes
from packcorpus.train import measures
from packcorpus.train.config import TOY, TrainingConfig
from packcorpus.train.data.steps import why_unbalanced
from packcorpus.train.evaluation import Sample, described, lines_of, unused
from packcorpus.train.loop.callbacks import RankSpeed, accuracy_of
from packcorpus.train.machine import devices
from packcorpus.train.measures import PHASES, Advice, advise, si
from packcorpus.train.model import checkpointing, qlora, states
from packcorpus.train.model.qlora import left_out

if TYPE_CHECKING:
    from packcorpus.train.loop.run import Run

# Colors of the phases in the picture: two for data, two for the model, and one for the optimizer.
COLORS = ("#b8500f", "#e8a871", "#1f5fa8", "#8fb4dc", "#7a7a7a")
# Steps whose losses are averaged, at least. A picture of fewer steps has only the single losses.
SMOOTHED = 5
LIBRARIES = ("packcorpus", "torch", "transformers", "peft", "bitsandbytes", "accelerate", "datasets", "trl", "numpy")


def summary(log: list[dict[str, Any]]) -> dict[str, Any]:
    """Summarize the log of a run; rates are means weighted by the time of a step.

    `phases` are shares of the time. The phase `data` includes `data_wait` and the exchange of the number of trained
    tokens with the other ranks; see train.measures. The losses of single steps are noisy, so the first and the
    last loss are means over `loss_steps` steps, a tenth of all steps.
    """
    steps = [entry for entry in log if "step_seconds" in entry]
    seconds = sum(entry["step_seconds"] for entry in steps)
    names = ("tokens_per_second", "non_pad_tokens_per_second", "trained_tokens_per_second", "mfu", "gpu_share")
    shares = [entry["memory_share"] for entry in steps if "memory_share" in entry]
    losses, averaged = [entry["loss"] for entry in steps], max(1, len(steps) // 10)
    return {
        "steps": len(steps),
        "loss_steps": averaged,
        "first_loss": fmean(losses[:averaged]),
        "last_loss": fmean(losses[-averaged:]),
        "seconds": round(seconds, 3),
        "data_wait": round(sum(entry["data_wait"] * entry["step_seconds"] for entry in steps) / seconds, 6),
        # Steps that an earlier version logged may lack phases.
        "phases": {
            phase: round(sum(entry.get(f"{phase}_seconds", 0.0) for entry in steps) / seconds, 6) for phase in PHASES
        },
        "peak_memory_bytes": int(max(entry["memory_bytes"] for entry in steps)),
        **({"memory_share": max(shares)} if len(shares) == len(steps) else {}),
        "skipped_steps": int(sum(entry.get("skipped", 0) for entry in steps)),
    } | {
        name: round(sum(entry[name] * entry["step_seconds"] for entry in steps) / seconds, 4)
        for name in names
        if all(name in entry for entry in steps)  # a run may continue on another device
    }


def data_wait(result: dict[str, Any]) -> float:
    """Return the share of the time in which a rank waited for its own batches."""
    # The phase `data` may include waiting for other ranks, and `data_wait` time in which the GPU still computes.
    return float(min(result["data_wait"], result["phases"]["data"]))


@cache  # reading them takes as long as a few steps of a small model
def versions() -> dict[str, str]:
    """Return the versions of the libraries that affect training."""
    return {name: metadata.version(name) for name in LIBRARIES}


def write_results(
    folder: Path, model: Any, tokenizer: TokenizerFiles | None, record: dict[str, Any], log: list[dict[str, Any]]
) -> None:
    """Write all results; `training.json` is last, because it marks the end of the run."""
    for adapter in model.peft_config.values():
        adapter.base_model_name_or_path = record["base_model"]
    model.save_pretrained(folder, safe_serialization=True)
    give_usual_mode(folder / "adapter_model.safetensors")
    for file in tokenizer.files if tokenizer else ():
        if file.name != "config.json":  # of a model, which an adapter is not
            shutil.copyfile(file, folder / file.name)
    write_bytes(folder / "training.svg", picture(log, record["corpus"]["name"], record["result"]["kept_step"]))
    record = record | {"adapter_sha256": sha256_of(folder / "adapter_model.safetensors"), "log": log}
    write_bytes(folder / "training.json", to_json(record))


def smooth(losses: Sequence[float], wide: int) -> list[float]:
    """Return the mean of the `wide` losses around each loss, of fewer at both ends."""
    half = wide // 2
    return [fmean(losses[max(0, at - half) : at + wide - half]) for at in range(len(losses))]


def picture(log: list[dict[str, Any]], title: str, kept_step: int) -> bytes:
    """Return an SVG plot of loss, tokens/s, and phases, with the kept step."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    steps = [entry for entry in log if "step_seconds" in entry]
    evaluations = [entry for entry in log if "eval_loss" in entry]
    with mpl.rc_context({"svg.hashsalt": title, "svg.fonttype": "path"}):
        figure, (above, below, last) = plt.subplots(3, 1, figsize=(8, 8), sharex=True, layout="constrained")
        at, losses = [entry["step"] for entry in steps], [entry["loss"] for entry in steps]
        above.plot(at, losses, color="#8fb4dc", linewidth=0.8, label="each step")
        if len(losses) > SMOOTHED:
            wide = max(SMOOTHED, len(losses) // 20)
            above.plot(at, smooth(losses, wide), color="#1f5fa8", linewidth=2, label=f"mean of {wide} steps")
        if evaluations:
            points = [entry["step"] for entry in evaluations], [entry["eval_loss"] for entry in evaluations]
            above.plot(*points, "o--", color="#b8500f", label="validation", zorder=3)
            if kept_step < at[-1]:
                above.axvline(kept_step, color="#b8500f", linestyle=":", label=f"kept: step {kept_step}")
        above.set_ylabel("loss")
        for name, label, style in (
            ("tokens_per_second", "all", "-"),
            ("non_pad_tokens_per_second", "without padding", "--"),
            ("trained_tokens_per_second", "trained on", ":"),
        ):
            if name in steps[0]:
                below.plot(at, [entry[name] for entry in steps], style, color="#333333", label=label)
        below.set_ylim(bottom=0)
        below.set_ylabel("tokens/s")
        spent = [[entry.get(f"{phase}_seconds", 0.0) for entry in steps] for phase in PHASES]
        last.stackplot(at, spent, labels=PHASES, colors=COLORS)
        last.set_ylabel("seconds per step")
        last.set_xlabel("optimizer step")
        shares = [(entry["step"], 100 * entry["gpu_share"]) for entry in steps if "gpu_share" in entry]
        if shares:
            share = last.twinx()
            share.plot(*zip(*shares, strict=True), ":", color="#000000")
            share.set_ylim(0, 105)
            share.set_ylabel("% of time on GPU (dotted)")
            share.spines["top"].set_visible(False)
        for axes in (above, below, last):
            # Above the panel, where it hides no data and no color of the data hides it.
            axes.legend(frameon=False, loc="lower left", bbox_to_anchor=(0, 1), ncols=len(PHASES), borderaxespad=0)
            axes.spines[["top", "right"]].set_visible(False)
            axes.grid(alpha=0.25)
        figure.suptitle(title)
        out = io.BytesIO()
        figure.savefig(out, format="svg", metadata={"Date": None})
        plt.close(figure)
    return out.getvalue()


@dataclass(frozen=True, slots=True)
class Steps:
    """Numbers of optimizer steps in one epoch and in the whole run."""

    per_epoch: int
    total: int


def count_steps(trainer: Any, config: TrainingConfig) -> Steps:
    per_epoch = math.ceil(len(trainer.get_train_dataloader()) / trainer.args.gradient_accumulation_steps)
    return Steps(per_epoch, config.max_steps or math.ceil(config.epochs * per_epoch))


def in_effect(run: Run, steps: Steps) -> dict[str, str]:
    """Return the settings in effect as {name: text}, for display."""
    corpus, feed, config, choices = run.corpus, run.feed, run.config, run.choices
    model = run.model
    total, trainable = measures.parameters(model)
    trained = run.tokens_per_step * feed.trained / feed.padded_tokens
    ranks, passes = choices.ranks, choices.accumulation
    factors = (counted(choices.micro_batch, "row"), f"{passes} pass{'es' * (passes > 1)}", counted(ranks, "rank"))
    apart = states.SUMMARIES[states.separation(model).way]
    frozen = f"{model.dtype}, not quantized"
    if qlora.quantized(model):
        frozen = f"{100 * measures.share_in_4_bits(model):.0f} % in NF4, double quantization"
    if qlora.is_sharded(model):
        frozen += f"; sharded: {100 * qlora.share_of_rank(model):.0f} % of the bytes on each rank"
    seconds = (steps.total - run.steps_done) * run.tokens_per_step / (choices.tokens_per_second * ranks)
    return {
        "corpus": f"{corpus.name} {corpus.key[:12]}, format {corpus.format_version}",
        "device": f"{run.device.name}{f' × {ranks}' if ranks > 1 else ''}, {run.device.precision}",
        "model": f"{_base(run)}: {si(total)} parameters, {si(trainable)} trainable ({100 * trainable / total:.2f} %)",
        "frozen weights": frozen,
        "adapter": _adapter(model),
        "attention": f"{choices.attention}; {run.isolation or 'no row has two conversations to keep apart'}",
        **({"conversations": apart} if apart else {}),
        "optimizer": f"{config.optimizer}, learning rate {config.rate:g}, {config.schedule}",
        "checkpointing": checkpointing.described(choices.checkpointing or False),
        "rows": f"{feed.described}{f'; validation {len(feed.validation):,}' if feed.validation is not None else ''}",
        "a step": f"{' × '.join(factors)} = {si(run.tokens_per_step)} tokens, {si(trained)} trained on",
        "steps": f"{steps.total:,}, {steps.per_epoch:,} per epoch",
        "evaluation": described(config, len(feed.validation) if feed.validation is not None else 0),
        "folder": str(run.folder.path),
        "starts": f"from {run.checkpoint.name if run.checkpoint else config.adapter or 'the beginning'}",
        "expected time": duration(seconds),
    }


def _base(run: Run) -> str:
    return run.config.base_model or f"{TOY}, with RANDOM weights, only to try things out"


def _adapter(model: Any) -> str:
    lora = model.peft_config["default"]
    variant = "DoRA" if lora.use_dora else "rank-stabilized LoRA" if lora.use_rslora else "LoRA"
    # The adapter of another tool may name its layers by a regular expression.
    names = [lora.target_modules] if isinstance(lora.target_modules, str) else lora.target_modules or ()
    layers = {name.rpartition(".")[2] for name in names} | {*(lora.target_parameters or ())}
    whole = f"; as a whole, {', '.join(sorted(wholes))}" if (wholes := _whole(model)) else ""
    others = sorted({*lora.rank_pattern.values()} - {lora.r})
    ranks = f"{lora.r} ({others[0]} on experts)" if len(others) == 1 and lora.target_parameters else str(lora.r)
    return f"{variant} of rank {ranks}, dropout {lora.lora_dropout:g}, on {', '.join(sorted(layers))}{whole}"


def _whole(model: Any) -> dict[str, int]:
    """Return the modules that are trained as a whole, and their numbers of weights."""
    return {
        name.split(".modules_to_save.")[0].rpartition(".")[2]: weights.numel()
        for name, weights in model.named_parameters()
        if ".modules_to_save." in name
    }


def figures(run: Run, steps: Steps) -> dict[str, float]:
    """Return the figures of a run that are known before its first step, for advice."""
    feed, config = run.feed, run.config
    found: dict[str, float] = {"steps": steps.total, "wsl": devices.is_wsl()}
    # Most weights of the small Llama are embeddings, which are not quantized.
    if config.base_model and config.quantization == "nf4":
        found["share_in_4_bits"] = measures.share_in_4_bits(run.model)
    if run.corpus.packed:
        found["padding"] = 1 - feed.tokens / feed.padded_tokens
        if feed.in_memory:
            found["workers"] = config.loader_workers
    return found


def advice_of(result: dict[str, Any], speeds: Sequence[RankSpeed], config: TrainingConfig) -> list[Advice]:
    """Return advice from the measurements of a run, some of which exist only on a GPU."""
    # All ranks wait for the rank whose batches are late, so the advice about data is about that rank.
    late = max(speeds, key=lambda speed: speed.data_wait)
    found = {"data": late.data_wait, "optimizer": result["phases"]["optimizer"]}
    if "gpu_share" in result:
        memory = result["memory_share"]
        found |= {"gpu": result["gpu_share"], "memory_high": memory}
        # A measured micro-batch leaves memory free if larger ones are not faster.
        if config.activation_checkpointing not in (False, "auto"):
            found["checkpointed"] = memory
        elif config.micro_batch != "auto":
            found["small_batch"] = memory
    return advise(found, {"data": f" by rank {late.rank} ({late.host})"} if len(speeds) > 1 else {})


def warnings(run: Run, steps: Steps) -> list[str]:
    """Return short texts about problems that make a run useless, slow, or wrong."""
    feed, config, choices = run.feed, run.config, run.choices
    found = list(run.warnings)
    found += map(str, advise(figures(run, steps)))
    apart = states.separation(run.model)
    # On a CPU, running the layers on each conversation is the fastest way.
    if apart.way == states.MODEL or (apart.way == states.LAYERS and choices.device == "cuda"):
        found.append(f"{states.SUMMARIES[apart.way]}, which is slower: {apart.reason}")
    dropout = run.model.peft_config["default"].lora_dropout
    if dropout != config.lora_dropout:
        found.append(
            f"lora_dropout is {dropout:g}, not {config.lora_dropout:g}: adapters of experts cannot have dropout"
        )
    if config.lora_targets == "all" and not config.adapter and (bare := left_out(run.model)):
        names = ", ".join(sorted({name.rpartition(".")[2] for name in bare}))
        found.append(
            f"lora_targets: all leaves out {counted(len(bare), 'layer')} ({names}), which PEFT confuses with the "
            f"experts of a {run.model.config.model_type} model"
        )
    if whole := _whole(run.model):
        # Bytes per weight of the copy, its gradient, and the two moments of the optimizer, all in fp32.
        size = f"{16 * sum(whole.values()) / 1e9:,.1f} GB"
        found.append(
            f"modules_to_save: {' and '.join(whole)} need {size} with their gradients and the optimizer; without new "
            "tokens, leave modules_to_save out"
        )
    if not 0.9 < run.tokens_per_step / config.tokens_per_step < 1.1:
        found.append(
            f"a step has {si(run.tokens_per_step)} tokens, but tokens_per_step is {si(config.tokens_per_step)}. Steps "
            f"take whole rows: {choices.micro_batch} at a time on {counted(choices.ranks, 'rank')}, of "
            f"{counted(feed.rows, 'row')} in the corpus"
        )
    if note := unused(config, steps.total):
        found.append(note)
    if steps.total <= (feed.packings - 1) * steps.per_epoch:
        found.append(
            f"the corpus has {feed.packings} packings, one for each epoch, but {counted(steps.total, 'step')} use only "
            f"{math.ceil(steps.total / steps.per_epoch)}. Raise epochs to {feed.packings} to use all of them"
        )
    if run.corpus.packed and not run.corpus.isolated:
        found.append("rows have no position_ids: the conversations of a row see each other (allow_unisolated)")
    balance = feed.balance
    if choices.ranks > 1 and balance and (why := why_unbalanced(balance, choices.ranks, choices.rows_per_step)):
        found.append(
            f"rows are ordered for {balance.ranks} ranks × {balance.rows_per_rank} rows, but {why}: ranks may wait "
            "for each other"
        )
    if choices.rows_per_step % choices.ranks:
        found.append(
            f"the {counted(choices.rows_per_step, 'row')} of a step are not a multiple of {choices.ranks} ranks: some "
            "ranks have a row less and wait for the others"
        )
    return found


# -- output -----------------------------------------------------------------------------------------------------------


def open_console(quiet: bool = False) -> Console:
    """Open standard error, wide enough for a table if it is not a terminal."""
    return Console(stderr=True, highlight=False, quiet=quiet, width=None if sys.stderr.isatty() else 110)


def say(console: Console, line: str, style: str | None = None) -> None:
    """Print a line that is neither markup nor wrapped."""
    console.print(line, style=style, markup=False, soft_wrap=True)


def show_effect(
    console: Console, notes: list[str], table: list[str], effect: dict[str, str], warnings: list[str]
) -> None:
    """Print notes, measurements, the settings in effect, and warnings."""
    for line in (*notes, *table):
        say(console, line, "dim")
    width = 2 + max(map(len, effect))
    for name, text in effect.items():
        console.print(Text.assemble((f"{name:<{width}}", "bold"), text), soft_wrap=not console.is_terminal)
    for warning in warnings:
        say(console, f"warning: {warning}", "yellow")


def show_result(
    console: Console, result: dict[str, Any], samples: list[Sample], folder: Path, tokenizer: bool, warning: str | None
) -> None:
    """Print the result of a run, its phases, the decisions of evaluation, and samples."""
    of_steps = f" (means of {counted(result['loss_steps'], 'step')})" if result["loss_steps"] > 1 else ""
    phases = ", ".join(f"{name} {100 * share:.3g} %" for name, share in result["phases"].items())
    validation = ""
    if result["validation_loss"] is not None:
        validation = f", validation {result['validation_loss']:.4f}{accuracy_of(result['token_accuracy'])}"
        validation += f" with the adapter of step {result['kept_step']}" * (result["kept_step"] < result["steps"])
    lines = [
        f"trained {counted(result['steps'], 'step')} in {duration(result['seconds'])}: "
        f"loss {result['first_loss']:.4f} → {result['last_loss']:.4f}{of_steps}{validation}; "
        f"{100 * result['data_wait']:.2f} % of the time spent waiting for data",
        f"a step: {phases}",
    ]
    if stopped := result["stopped_early"]:
        best, without = result["best"], counted(stopped["evaluations"], "evaluation")
        lowest = f"; best {best['validation_loss']:.4f} after step {best['step']}" if best else ""
        lines.append(f"stopped early after step {stopped['step']}: {without} without a lower validation loss{lowest}")
    lines += lines_of(samples)
    if result["skipped_steps"]:
        lines.append(
            f"{counted(result['skipped_steps'], 'step')} skipped, because gradients exceeded the range of fp16; the "
            "loss scale was then reduced"
        )
    for line in lines:
        say(console, line)
    if warning:
        say(console, f"warning: {warning}", "yellow")
    files = "adapter, tokenizer" if tokenizer else "adapter (the corpus has no tokenizer)"
    say(console, f"{files}, and training.svg: {folder}; to talk to it: packcorpus train chat {folder}")
