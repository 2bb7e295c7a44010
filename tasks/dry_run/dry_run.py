"""Predict the manifest of a run from a bounded sample of every source.

    config ─find_files─▶ files ─sample_files─▶ records ─tokenize_records─▶ token files, rejects
                                                  │ each record is repeated total / read times
                     select_pieces, mix, take_account
                                                  ▼
              Selection ─lengths─▶ bin_packing.solve ─▶ rows
                        └─sums───▶ make_ledger ─▶ Ledger, mixture ─▶ Prediction, with costs and warnings

All of these are the functions of a run. The prediction takes seconds and writes nothing. If all data was read, every
figure equals the figure of the run. Otherwise, figures are estimates: the number of conversations in a file follows
from its size and the bytes that were read of it, and duplicates are counted only within the sample.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from packcorpus.tasks.config import Config
from packcorpus.tasks.core.error_codes import CODES
from packcorpus.tasks.core.process import cores
from packcorpus.tasks.corpus.summary import BATCH_ROWS, steps_of
from packcorpus.tasks.dry_run.cost_model import estimate_costs
from packcorpus.tasks.dry_run.prediction import Example, Prediction, Rejected, Source, Steps, Tokenizer
from packcorpus.tasks.dry_run.sample import SampleTokens, Selection, open_samples, select, tokenize_sample
from packcorpus.tasks.dry_run.warnings import find_failures, find_warnings
from packcorpus.tasks.encoders.encoder import Encoder
from packcorpus.tasks.inspection.rows import spans_of
from packcorpus.tasks.packing import bin_packing, several_lengths
from packcorpus.tasks.packing.balance import MOST_ROWS, forecast
from packcorpus.tasks.packing.column_generation import LITTLE_WORK, MOST_WORK, rows_of
from packcorpus.tasks.packing.held_out import check_group_key
from packcorpus.tasks.packing.ledger import make_ledger, mixture_facts, source_facts
from packcorpus.tasks.packing.trees import Units
from packcorpus.tasks.recipe import Recipe
from packcorpus.tasks.sources.digests import DigestCache
from packcorpus.tasks.sources.evaluation_files import find_evaluation_files
from packcorpus.tasks.sources.source_files import find_files
from packcorpus.tasks.storage.facts import HeldOutFacts, Ledger, MixtureFacts
from packcorpus.tasks.storage.layout import SPLITS, Layout, kind_of
from packcorpus.tasks.storage.schemas import IGNORED, REJECTED, drop_code
from packcorpus.tasks.tokenization.checks import check_first_conversations
from packcorpus.tasks.tokenization.tokenize_part import APART, AS_RENDERED, LEFT_OUT, PRICE, REASONING, noticed_in

COUNTED = (*APART, *LEFT_OUT, *PRICE, *REASONING, *AS_RENDERED)  # counts of receipts that a ledger sums up
BUDGET = 8 << 20  # bytes of the sources to sample, which take 0.7 s with gigatoken


def predict(
    config: Config, folder: Path, root: Path, workers: int = 0, budget: int = BUDGET, batches: Sequence[int] = ()
) -> Prediction:
    """Predict the result of a run from about `budget` bytes of its sources.

    `folder` is the folder of the config. By default, there is a worker per core. `batches` are numbers of rows per step
    to show steps and warnings for; by default, BATCH_ROWS are shown. Raises the errors that a run would raise about the
    config, sources, tokenizer, and template.
    """
    layout = Layout(root)
    cache = DigestCache(layout.digests(), only_read=True)
    files = find_files(config.sources, folder, layout, None, cache, config.group_key, config.pairs)
    with tempfile.TemporaryDirectory(prefix="packcorpus-") as scratch:
        evaluation = find_evaluation_files(config.decontaminate, folder, layout)
        recipe = Recipe(config, folder, layout, tuple(files), (), evaluation=evaluation)
        recipe, encoder, samples, unlike = open_samples(recipe, budget, Path(scratch))
        check_first_conversations(recipe)
        sampled = [tokenize_sample(sample, recipe, encoder) for sample in samples]
        whole = all(sample.whole for sample in samples) and len(samples) == len(files)
        if whole:
            counts = [sum(each.counts.get(name, 0) for each in sampled) for name in ("accepted", "without_key")]
            check_group_key(config, *counts)
        chosen = select(sampled, recipe, whole)
        rows, squares = _rows(chosen, MOST_WORK if whole else LITTLE_WORK)
        places = sum(count * config.rows.length_of(split) for split, count in rows.items())
        rejects = _rejects(chosen)
        ledger = _ledger(chosen, rejects, places, sum(rows.values()))
        costs = estimate_costs(chosen, ledger, places, workers or cores())
    longest, accepted = config.sequence_length, chosen.pieces.accepted
    full = 100 * ledger.tokens.packed / max(places, 1)
    trained = chosen.scale * int(chosen.account.of("trained")[:, 0].sum())
    noticed = noticed_in([each.counts for each in sampled])
    if unused := {each.sample.file.name: each.unused_keys for each in sampled if each.unused_keys}:
        noticed["unused_keys"] = unused
    # Conversations that the overlong policy applied to.
    is_too_long = np.isin(chosen.reason, (0, drop_code("too_long"), REJECTED))
    is_too_long &= accepted.length > longest
    longest_samples = accepted.samples.most(accepted.length)
    found = Prediction(
        config=None,
        settings=config.model_dump(mode="json"),
        tokenizer=Tokenizer(
            "" if config.tokenizer is None else recipe.tokenizer_name,
            encoder.kind,
            encoder.vocab_size,
            trained_here=config.tokenizer is None,
        ),
        markers_as_text=list(recipe.template.markers_as_text),
        whole=whole,
        files=len(files),
        bytes=sum(file.bytes for file in files),
        engine=encoder.engine,
        sources=_sources(chosen, encoder),
        rejects=rejects,
        noticed=noticed,
        ledger=ledger,
        too_long=round(chosen.scale * np.count_nonzero(accepted.samples.most(is_too_long))),
        mixture=_mixture(chosen, config),
        held_out=_held_out(chosen),
        share_all_tokens=_joined_tokens(chosen, ledger),
        rows=rows,
        packing_efficiency=min(100.0, round(full, 4)) if config.packing else None,
        **costs,
        steps=[],
        waiting=forecast(squares, np.zeros(len(squares), np.int32), config.row_lengths[0]),
        run_fails=False,
        failures=[],
        warnings=[],
        recipe=recipe,
        lengths=longest_samples[longest_samples > 0],
    )
    for batch in batches or BATCH_ROWS:
        of_splits = (
            steps_of(count, config.rows.length_of(split), batch, longest)
            for split, count in rows.items()
            if kind_of(split) == "train"
        )
        count, held = sum(of_splits), round(found.per_row * min(batch, found.train_rows))
        found.steps.append(Steps(batch, count, round(trained / max(count, 1)), held))
    failures = find_failures(found, chosen)
    warnings = [*failures, *find_warnings(found, chosen, unlike, batches)]
    return replace(found, run_fails=bool(failures), failures=failures, warnings=warnings)


# -- rows --------------------------------------------------------------------------------------------------------------


def _rows(chosen: Selection, work: int) -> tuple[dict[str, int], np.ndarray]:
    rows: dict[str, int] = {}
    config, units = chosen.recipe.config, Units.of(chosen.pieces)
    squares = np.zeros(0, np.int64)
    for kind in dict.fromkeys(map(kind_of, config.rows.split_names(config.epochs))):
        # A later epoch packs the pieces of the first epoch into the same number of rows.
        counts = [rows[name] for name in config.rows.splits("train")] if kind not in SPLITS else []
        if kind in SPLITS:
            own = units.lengths[units.held_out == (kind == "validation")]
            counts, of_rows = _packed_rows(own, chosen.scale, config, work)
            squares = of_rows if kind == "train" else squares
        rows |= zip(config.rows.splits(kind), counts, strict=True)
    return rows, squares


def _packed_rows(lengths: np.ndarray, scale: float, config: Config, work: int) -> tuple[list[int], np.ndarray]:
    """Return the number of rows of each length, and Σn² of rows.

    `work` limits the search for the fewest rows of one length.
    There is Σn² only for rows of one length with padding. If there are more than MOST_ROWS rows, it is that of evenly
    spaced rows.
    """
    nothing = np.zeros(0, np.int64)
    if not config.packing:
        return [round(len(lengths) * scale)], nothing
    sums = np.cumsum(np.bincount(config.rows.multiples(lengths), minlength=config.rows.capacity + 1)) * scale
    counts = np.diff(np.rint(sums), prepend=0).astype(np.int64)
    if not counts.any():
        return [0] * len(config.row_lengths), nothing
    if len(config.row_lengths) > 1:
        return [rows_of(rows) for rows in several_lengths.solve(counts, config.row_lengths).rows], nothing
    rows, _ = bin_packing.solve(counts, config.rows.capacity, work)
    count = rows_of(rows)
    if config.padding == "none":
        return [count], nothing
    every = np.arange(min(count, MOST_ROWS)) * count // max(1, min(count, MOST_ROWS))
    number = np.searchsorted(np.cumsum([copies for _, copies in rows]), every, "right")
    squares = [sum(times * (length * config.align) ** 2 for length, times in row) for row, _ in rows]
    return [count], np.array(squares, np.int64)[number]


# -- sums --------------------------------------------------------------------------------------------------------------


def _ledger(chosen: Selection, rejects: Sequence[Rejected], places: int, rows: int) -> Ledger:
    config, account = chosen.recipe.config, chosen.account
    least = account.total("places") + (account.alignment or 0) if config.packing else 0
    rejected = {reject.reason: round(reject.expected / chosen.scale) for reject in rejects}
    found = make_ledger(_receipts(chosen), account, rejected, least, rows / chosen.scale, chosen.recipe)
    values = scaled_by(found.model_dump(), chosen.scale)
    tokens = values["tokens"]
    if config.packing and config.padding == "row":
        tokens["padding"] = max(0, places - tokens["packed"])
    return Ledger.model_validate(values)


def scaled_by(values: Any, scale: float) -> Any:
    """Scale all integers of a JSON value; other numbers are shares."""
    if isinstance(values, dict):
        return {name: scaled_by(value, scale) for name, value in values.items()}
    is_count = isinstance(values, int) and not isinstance(values, bool)
    return round(values * scale) if is_count else values


def _joined_tokens(chosen: Selection, ledger: Ledger) -> int | None:
    """Return the packed tokens if samples of all conversations shared tokens."""
    if chosen.joined is chosen.pieces:
        return None
    now, joined = (int(pieces.lengths().sum(dtype=np.int64)) for pieces in (chosen.pieces, chosen.joined))
    return round(ledger.tokens.packed * joined / max(now, 1))


def _receipts(chosen: Selection) -> list[dict[str, Any]]:
    """Return the receipts that a run would have of the repeated samples."""
    accepted, receipts = chosen.pieces.accepted, []
    for each, times, edges in zip(chosen.sampled, chosen.times, pairwise(accepted.edges.tolist()), strict=True):
        rejected = sum(int(times[record]) for record, *_ in each.rejects)
        counts = {
            "conversations": int(times.sum()),
            "accepted": int(times.sum()) - rejected,
            "tokens": int(accepted.encoded(slice(*edges)).sum()),
        }
        share = times.sum() / max(len(times), 1)
        receipts.append({name: round(share * each.counts.get(name, 0)) for name in COUNTED} | counts)
    return receipts


def _rejects(chosen: Selection) -> list[Rejected]:
    config = chosen.recipe.config
    message = f"no trained token is left within {config.sequence_length:,} tokens (overlong: {config.overlong})"
    late = [np.zeros(len(times), np.int64) for times in chosen.times]  # repetitions of each record
    rows, records = chosen.repeated.rows[chosen.late], chosen.tokens.column("record")
    for row, file in zip(rows.tolist(), chosen.pieces.accepted.part(chosen.late).tolist(), strict=True):
        late[file][records[row]] += 1
    found: dict[str, list[tuple[str, str, int, bool]]] = {}  # place, message, repetitions, whether it was cut off
    for each, times in zip(chosen.sampled, chosen.times, strict=True):
        for record, reason, text in each.rejects:
            place = each.sample.records[record].place
            found.setdefault(reason, []).append((place, text, int(times[record]), False))
    for each, of_record in zip(chosen.sampled, late, strict=True):
        for record in np.flatnonzero(of_record).tolist():
            place = each.sample.records[record].place
            found.setdefault("no_trained_tokens", []).append((place, message, int(of_record[record]), True))
    return [
        Rejected(
            code=CODES[reason].code,
            reason=reason,
            looked_at=len(rejects),
            expected=round(chosen.scale * sum(count for _, _, count, _ in rejects)),
            place=rejects[0][0],
            message=rejects[0][1],
            cut_off=round(chosen.scale * sum(count for _, _, count, is_cut_off in rejects if is_cut_off)),
            in_data=sum(not is_cut_off for *_, is_cut_off in rejects),
        )
        for reason, rejects in sorted(found.items())
    ]


def _held_out(chosen: Selection) -> HeldOutFacts | None:
    facts = scaled_by(chosen.held_out, chosen.scale)
    return HeldOutFacts.model_validate(facts) if facts else None


def _mixture(chosen: Selection, config: Config) -> list[MixtureFacts]:
    return [
        MixtureFacts.model_validate(
            facts
            | {"limit": source.limit}
            | {
                name: round(chosen.scale * facts[name])
                for name in ("conversations", "copies", "tokens", "trained_tokens")
            }
        )
        for facts, source in zip(mixture_facts(chosen.recipe, chosen.account), config.sources, strict=True)
    ]


def _sources(chosen: Selection, encoder: Encoder) -> list[Source]:
    facts = source_facts(chosen.recipe, _receipts(chosen), chosen.account)
    found = []
    for number, (each, figures) in enumerate(zip(chosen.sampled, facts, strict=True)):
        sample, file = each.sample, each.sample.file
        examples = [_example(chosen, row, each, encoder) for row in chosen.first_samples(number)]
        found.append(
            Source(
                path=file.name,
                format=file.format,
                bytes=file.bytes,
                looked_at=len(sample.records),
                reach=round(sample.reach, 4),
                conversations=round(sample.expected),
                counted=sample.counted,
                rejected=round(chosen.scale * figures["rejected"]),
                tokens=round(chosen.scale * figures["tokens"]),
                trained_tokens=round(chosen.scale * figures["trained_tokens"]),
                shown=next(iter(examples), None),
                other_samples=examples[1:],
                stands_for=sample.stands_for,
                whole=sample.whole,
                split=figures.get("split", ""),
            )
        )
    return found


def _example(chosen: Selection, number: int, sampled: SampleTokens, encoder: Encoder) -> Example:
    record, turn = (int(chosen.tokens.column(name, number, number + 1)[0]) for name in ("record", "turn"))
    values, place = chosen.tokens.tokens(number), sampled.sample.records[record].place
    ids = values ^ (values >> 31)
    spans = spans_of(encoder, ids, np.where(values >= 0, ids, IGNORED))
    return Example(place + (f" turn {turn}" if turn >= 0 else ""), len(ids), int((values >= 0).sum()), spans)
