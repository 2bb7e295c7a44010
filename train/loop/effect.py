"""Describe the settings that are in effect in a run, and warn about problems.

The facts are read from the model and the rows, not from the settings.

Run + Steps ─in_effect─▶ {"attention": "sdpa; …", …}: the table before the first step, and `in_effect` of the record
            └─warnings─▶ one short text each
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tasks.core.printable import counted, duration
from train.config import TrainingConfig
from train.data.balanced_rows import why_unbalanced
from train.evaluation.history import described, unused
from train.loop.display import si
from train.loop.prepare import Run
from train.machine import devices
from train.machine.rank_speed import RankSpeed
from train.measures.advice import Advice, advise
from train.model import flops, qlora, sharding, states
from train.model.adapters.adapter import left_out


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
    total, trainable = flops.parameters(run.model)
    trained = run.tokens_per_step * feed.trained / feed.padded_tokens
    ranks, passes = choices.ranks, choices.accumulation
    factors = (
        counted(choices.micro_batch, "row"),
        f"{passes} pass{'es' * (passes > 1)}",
        counted(ranks, "rank"),
    )
    apart = states.SUMMARIES[states.separation(run.model).way]
    seconds = (steps.total - run.steps_done) * run.tokens_per_step / (choices.tokens_per_second * ranks)
    return {
        "corpus": f"{corpus.name} {corpus.key[:12]}, format {corpus.format_version}",
        "device": f"{run.device.name}{f' × {ranks}' if ranks > 1 else ''}, {run.device.precision}",
        "model": f"{si(total)} parameters, {si(trainable)} trainable ({100 * trainable / total:.2f} %)",
        "frozen weights": _frozen(run.model),
        "adapter": _adapter(run.model),
        "attention": f"{choices.attention}; {run.isolation or 'no row has two conversations to keep apart'}",
        **({"conversations": apart} if apart else {}),
        "optimizer": f"{config.optimizer}, learning rate {config.rate:g}, {config.schedule}",
        "checkpointing": "on" if run.model.is_gradient_checkpointing else "off",
        "rows": f"{feed.described}{f'; validation {len(feed.validation):,}' if feed.validation is not None else ''}",
        "a step": f"{' × '.join(factors)} = {si(run.tokens_per_step)} tokens, {si(trained)} trained on",
        "steps": f"{steps.total:,}, {steps.per_epoch:,} per epoch",
        "evaluation": described(config, len(feed.validation) if feed.validation is not None else 0),
        "folder": str(run.folder.path),
        "starts": f"from {run.checkpoint.name if run.checkpoint else config.adapter or 'the beginning'}",
        "expected time": duration(seconds),
    }


def _frozen(model: Any) -> str:
    text = f"{model.dtype}, not quantized"
    if qlora.quantized(model):
        text = f"{100 * flops.share_in_4_bits(model):.0f} % in NF4, double quantization"
    if sharding.is_sharded(model):
        text += f"; sharded: {100 * sharding.share_of_rank(model):.0f} % of the bytes on each rank"
    return text


def _adapter(model: Any) -> str:
    lora = model.peft_config["default"]
    variant = "DoRA" if lora.use_dora else "rank-stabilized LoRA" if lora.use_rslora else "LoRA"
    # The adapter of another tool may name its layers by a regular expression.
    names = [lora.target_modules] if isinstance(lora.target_modules, str) else lora.target_modules or ()
    layers = {name.rpartition(".")[2] for name in names} | {*(lora.target_parameters or ())}
    whole = f"; as a whole, {', '.join(sorted(wholes))}" if (wholes := _whole(model)) else ""
    return f"{variant} of rank {lora.r}, dropout {lora.lora_dropout:g}, on {', '.join(sorted(layers))}{whole}"


def _whole(model: Any) -> dict[str, int]:
    """Return the modules that are trained as a whole, and their numbers of weights."""
    found = (
        (name.split(".modules_to_save.")[0].rpartition(".")[2], weights.numel())
        for name, weights in model.named_parameters()
        if ".modules_to_save." in name
    )
    return dict(found)


def figures(run: Run, steps: Steps) -> dict[str, float]:
    """Return the figures of a run that are known before its first step, for advice."""
    feed, config = run.feed, run.config
    found: dict[str, float] = {"steps": steps.total, "wsl": devices.is_wsl()}
    # Most weights of the small Llama are embeddings, which are not quantized.
    if config.base_model and config.quantization == "nf4":
        found["share_in_4_bits"] = flops.share_in_4_bits(run.model)
    if run.corpus.packed:
        found["padding"] = 1 - feed.tokens / feed.padded_tokens
        if feed.in_memory:
            found["workers"] = config.loader_workers
    return found


def advice_of(result: dict[str, Any], speeds: Sequence[RankSpeed], config: TrainingConfig) -> list[Advice]:
    """Return advice from the measurements of a run, some of which exist only on a GPU.

    All ranks wait for the rank whose batches are late, so the advice about data is about that rank.
    """
    late = max(speeds, key=lambda speed: speed.data_wait)
    found = {"data": late.data_wait, "optimizer": result["phases"]["optimizer"]}
    if "gpu_share" in result:
        memory = result["memory_share"]
        found |= {"gpu": result["gpu_share"], "memory_high": memory}
        # A measured micro-batch leaves memory free if larger ones are not faster.
        if config.activation_checkpointing:
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
