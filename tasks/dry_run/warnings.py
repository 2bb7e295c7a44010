"""Find the failures and warnings that a dry run shows."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from packcorpus.tasks.conversations.turn_weights import flag_hints, loss_weight_hints
from packcorpus.tasks.core.printable import counted, in_bytes
from packcorpus.tasks.corpus.summary import (
    BATCH_ROWS,
    FEW_STEPS,
    content_notes,
    explain_limits,
    explain_overlong,
    held_out_notes,
    percent,
)
from packcorpus.tasks.dry_run.expected_mixture import explain_mixture, sizes_of
from packcorpus.tasks.dry_run.prediction import Prediction, Steps
from packcorpus.tasks.dry_run.sample import Selection
from packcorpus.tasks.encoders.encoder import Encoder, is_blank
from packcorpus.tasks.packing.ledger import SAVES
from packcorpus.tasks.packing.mixture import is_mixed
from packcorpus.tasks.packing.pieces import MOST_CONVERSATIONS
from packcorpus.tasks.packing.rejects import suggest_settings
from packcorpus.tasks.templates.adjust import explain_undefined
from packcorpus.tasks.templates.sections import explain_empty_blocks

# If a larger share of the tokens repeats a prompt, a warning explains the reason.
NOTEWORTHY = 0.2

# If a larger share of the conversations has an answer to an empty prompt, a warning says so.
MOST_EMPTY_PROMPTS = 0.01

# With fewer trained tokens in a step, its gradient comes from a handful of answers. A usual step has 65,536 tokens, a
# third of them trained.
FEW_TRAINED = 1000
# A prediction of the disk may be this much too high.
DISK_CLEARLY = 1.25
# The most epochs that a warning suggests for more steps.
MOST_EPOCHS = 10


def find_failures(found: Prediction, chosen: Selection) -> list[str]:
    """Return the reasons why the run will fail, as far as the sample shows."""
    config = found.recipe.config
    read = found.ledger.conversations.read
    counts = {reject.reason: reject.expected for reject in found.rejects}
    rejected = sum(source.rejected for source in found.sources)
    failures: list[str] = []
    if rejected and rejected / max(read, 1) > config.max_rejects:
        cut_off = sum(reject.cut_off for reject in found.rejects)
        failures.append(
            f"The run will fail: {100 * rejected / read:.2f} % of the conversations are rejected, but max_rejects "
            f"allows {100 * config.max_rejects:.2f} %. Rejects shows the first of each reason; "
            + "; ".join(suggest_settings(counts, cut_off, read))
        )
    if read - rejected > MOST_CONVERSATIONS:
        failures.append(
            f"The run will fail: {found.about(read - rejected)} conversations are more than a corpus can have "
            f"({MOST_CONVERSATIONS:,}); divide the sources into several corpora, each with its own config"
        )
    if config.overlong == "error" and found.too_long:
        failures.append(
            f"The run will fail: {found.about(found.too_long)} conversations are longer than a row, and overlong is "
            "error; use truncate, turns, drop, or split (figures below are for truncate)"
        )
    if (free := found.disk_free_bytes) is not None and (
        needed := sum(found.bytes_on_disk.values())
    ) > DISK_CLEARLY * free:
        failures.append(
            f"The run will fail: it needs about {in_bytes(needed)} on disk, and {in_bytes(free)} are free where the "
            "root is; make room, name another disk with --root, or run packcorpus clean"
        )
    if not found.train_rows:
        failures.append("The run will fail: no conversation of the sample is left to train on")
    elif chosen.empty:
        where = "" if found.whole else "in the sample; "
        failures.append(f"The run will fail: {chosen.empty} ({where}figures are without the weights)")
    return failures


def find_warnings(found: Prediction, chosen: Selection, unlike: str, batches: Sequence[int]) -> Iterator[str]:
    """Yield facts that a user may want to change or know.

    `unlike` is how tokens differ from those of AutoTokenizer, or "". `batches` are the numbers of rows per step that
    the user gave.
    """
    config, counts, tokens = found.recipe.config, found.ledger.conversations, found.ledger.tokens
    free, needed = found.disk_free_bytes, sum(found.bytes_on_disk.values())
    if free is not None and free < needed <= DISK_CLEARLY * free:
        yield f"disk: the run needs about {in_bytes(needed)}, and {in_bytes(free)} are free where the root is"
    if (limit := found.memory_limit_bytes) and found.peak_memory_bytes * found.workers > limit:
        yield (
            f"memory: {counted(found.workers, 'worker')} with up to {in_bytes(found.peak_memory_bytes)} each may need "
            f"more than the {in_bytes(limit)} that this process may use; run with fewer --workers"
        )
    sizes = sizes_of([each.sample for each in chosen.sampled])
    if is_mixed(config) and config.weighting != "token_share":
        copies = {entry: facts.copies / max(1, facts.conversations) for entry, facts in enumerate(found.mixture)}
        yield from explain_mixture(config, sizes, "" if found.whole else "about ", copies)
    if limited := explain_limits(chosen.giving_all(), counts.dropped.get("weight", 0), counts.packed):
        yield limited
    yield from content_notes(found.ledger, found.settings, is_sample=not found.whole)
    yield from held_out_notes(found.held_out, found.ledger, found.settings, is_sample=not found.whole)
    yield from (*found.recipe.notes, *explain_undefined(found.recipe.undefined))
    unused = found.noticed.get("unused_keys", {})
    if isinstance(unused, dict):
        yield from (*flag_hints(unused), *loss_weight_hints(unused))
    if unlike:
        yield f"tokenizer: {unlike}; inference may read other tokens than the model learned"
    if config.reads_loss_weights and _weighs_alike(chosen):
        instead = "none" if config.loss_weight == "data" else "conversation"
        yield (
            f"loss_weight: {config.loss_weight}: no record of the sample has a weight other than 1, so the "
            f"setting has the same effect as loss_weight: {instead}; if the key has another name, map it "
            "with columns: {loss_weight: KEY}"
        )
    if config.overlong != "error":
        yield from explain_overlong(found.ledger, found.settings, "will be ")
    balance = config.balance
    if balance and found.train_rows < balance.ranks * balance.rows_per_rank:
        yield (
            f"balance: {found.about(found.train_rows)} rows are too few for one step of {balance.ranks:,} ranks × "
            f"{balance.rows_per_rank:,} rows, so it has no effect; lower ranks or rows_per_rank"
        )
    samples = found.ledger.samples
    repeated = samples.repeated_prompt_tokens / max(1, tokens.packed) if samples else 0.0
    if samples and samples.ways_out and config.turns == "auto" and repeated >= NOTEWORTHY:
        yield (
            "turns: auto: the template writes earlier turns differently once another turn follows, so conversations "
            f'have several samples; {100 * repeated:.0f} % of all tokens are repeated. "To pay less" above lists the '
            "settings that avoid it"
        )
    if found.share_all_tokens is not None and found.share_all_tokens < (1 - SAVES) * tokens.packed:
        yield (
            f"share: all stores {found.about(found.share_all_tokens)} tokens instead of {tokens.packed:,} "
            f"({percent(tokens.packed - found.share_all_tokens, tokens.packed)} less): once what samples of all "
            "conversations begin with, such as their system prompt and tools"
        )
    empty = found.noticed["empty_prompts"]
    if isinstance(empty, int) and empty > MOST_EMPTY_PROMPTS * found.looked_at:
        yield (
            f"{100 * empty / found.looked_at:.1f} % of the conversations have an answer to an empty prompt: the user "
            "message before it is blank, so the model learns to answer without a request; check `columns`, or remove "
            "these records"
        )
    yield from explain_empty_blocks(found.noticed, config.sections, " of the sample")
    if markers := _markers_in_content(chosen, found.recipe.encoder):
        setting = ", ".join(f"'-{name}'" for name in markers)
        yield (
            f"{' and '.join(markers)} frame turns, but the tokenizer does not mark them as special, so a message can "
            f"write them, as at inference; to prevent this, set  advanced: {{content_tokens: [{setting}]}}"
        )
    if short := [source.path for source in found.sources if source.reach < 1]:
        names = ", ".join(short[:3]) + " and others" * (len(short) > 3)
        yield f"{names}: compressed and too large to read completely; only the beginning was sampled"
    shown = [steps for steps in found.steps if batches or steps.rows_per_step == BATCH_ROWS[1]]
    yield from step_warnings(found, shown)


def _weighs_alike(chosen: Selection) -> bool:
    return all((chunk.flatten().to_numpy() == 1).all() for _, chunk in chosen.tokens.chunks("weights"))


def _markers_in_content(chosen: Selection, encoder: Encoder) -> list[str]:
    """Return the tokens that begin or end turns and that messages can write.

    If a tokenizer does not mark such tokens as special, they are matched in messages, as at inference.
    """
    names = {token: name for name, token in encoder.content_tokens.items() if not is_blank(name)}
    markers: dict[int, None] = {}
    for file in range(len(chosen.sampled)) if names else ():
        for number in chosen.first_samples(file):
            values = chosen.tokens.tokens(number)
            ids = (values ^ (values >> 31)).tolist()
            first = 1 if ids[0] == encoder.bos_id and len(ids) > 1 else 0
            if ids[first] in names:
                markers[ids[first]] = None
                for place in range(first + 1, len(ids)):
                    if ids[place] == ids[first]:
                        before = [id for id in ids[max(0, place - 3) : place] if encoder.token_bytes(id).strip()]
                        markers |= dict.fromkeys(token for token in before[-1:] if token in names)
    return [names[token] for token in markers]


def step_warnings(found: Prediction, shown: Sequence[Steps]) -> Iterator[str]:
    """Yield warnings about the optimizer steps of an epoch, one of each kind.

    `shown` are the steps at each number of rows per step.
    """
    few = [steps for steps in shown if 0 < steps.steps < FEW_STEPS]
    if few:
        counts = ", ".join(f"{counted(steps.steps, 'step')} at {counted(steps.rows_per_step, 'row')}" for steps in few)
        alone = math.ceil(found.per_row * found.train_rows / few[0].rows_per_step)
        noun = "sample" if found.ledger.samples else "conversation"
        apart = ""
        if found.per_row > 1.05 and alone > few[0].steps:
            apart = f" With one {noun} per row, it would have {alone:,} at {counted(few[0].rows_per_step, 'row')}."
        yield f"An epoch has {counts} per step, fewer than {FEW_STEPS}.{apart} {_advice(found, few)}"
    noisy = [steps for steps in shown if 0 < steps.trained_tokens_per_step < FEW_TRAINED]
    if noisy:
        counts = ", ".join(
            f"{steps.trained_tokens_per_step:,} at {counted(steps.rows_per_step, 'row')}" for steps in noisy
        )
        first = noisy[0]
        more = -(-first.rows_per_step * FEW_TRAINED // first.trained_tokens_per_step)
        advice = f" Use {more:,} rows per step." if more < found.train_rows else ""
        yield (
            f"A step has few trained tokens ({counts} per step), fewer than {FEW_TRAINED:,}. Its gradient comes from a "
            f"few answers.{advice}"
        )


def _advice(found: Prediction, few: Sequence[Steps]) -> str:
    """Say how to train for more steps: with fewer rows per step, or for more epochs.

    Rows are few enough if a step still has FEW_TRAINED trained tokens.
    """
    rows, ways = found.train_rows // FEW_STEPS, []
    per_row = max(steps.trained_tokens_per_step / steps.rows_per_step for steps in few)
    if rows > 1 and rows * per_row >= FEW_TRAINED and rows not in {steps.rows_per_step for steps in few}:
        ways.append(f"{rows:,} rows per step")
    best = min(few, key=lambda steps: -steps.steps)
    if (epochs := -(-FEW_STEPS // best.steps)) <= MOST_EPOCHS:
        ways.append(f"{epochs} epochs" + f" at {counted(best.rows_per_step, 'row')}" * (len(few) > 1))
    return f"Use {', or '.join(ways)}." if ways else "Only more conversations can change that."
