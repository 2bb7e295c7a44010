"""Predict the manifest of a run from a bounded sample of every source.

    config ─find_files─▶ files ─sample_files─▶ records ─tokenize_records, as in a run─▶ token files, rejects
                                                       │ each conversation represents total / read of its file
       select_pieces, as in a run; shares of a mixture ┤
                                                       ▼
                           Selection ─lengths, scaled─▶ bin_packing.solve, as in a run ─▶ rows
                                     └─sums, scaled───▶ Ledger, mixture ─▶ Prediction, with costs and warnings

The prediction takes seconds and writes nothing. If all data was read, every figure equals the figure of the run.
Otherwise, figures are estimates. The number of conversations in a file follows from its size and the bytes that were
read of it. The histogram of lengths is scaled to this number and packed by the code that a run uses. Duplicates are
counted only within the sample.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tasks.config import Config
from tasks.core.error_codes import CODES
from tasks.corpus.summary import BATCH_ROWS, steps_of
from tasks.dry_run.cost_model import estimate_costs
from tasks.dry_run.prediction import Example, Prediction, Rejected, Source, Steps, Tokenizer
from tasks.dry_run.sample import SampleTokens, Selection, open_samples, select, tokenize_sample
from tasks.dry_run.warnings import find_failures, find_warnings
from tasks.encoders.encoder import Encoder
from tasks.inspection.rows import spans_of
from tasks.packing import bin_packing, several_lengths
from tasks.packing.balance import MOST_ROWS, forecast
from tasks.packing.column_generation import rows_of
from tasks.packing.ledger import apart, left_out, repeated_prompt_tokens
from tasks.recipe import Recipe
from tasks.sources.digests import DigestCache
from tasks.sources.source_files import find_files
from tasks.storage.facts import Ledger, MixtureFacts
from tasks.storage.layout import SPLITS, Layout, kind_of
from tasks.storage.schemas import DROP_REASONS, IGNORED, REJECTED, SAMPLE_DROP_REASONS, drop_code
from tasks.tokenization.checks import check_first_conversations
from tasks.tokenization.tokenize_part import APART, LEFT_OUT, noticed_in

BUDGET = 8 << 20  # bytes of the sources to sample, which take 0.7 s with gigatoken


class Placed(NamedTuple):
    """Columns of the pieces of a Selection, one entry for each."""

    conversation: np.ndarray  # int32, index into the Selection
    length: np.ndarray  # int32, places in its row
    separator: np.ndarray  # bool
    trained: np.ndarray  # int32
    held_out: np.ndarray  # bool
    once: np.ndarray  # float64, the number of pieces that it represents, without copies
    copies: np.ndarray  # float64, with copies, in one packing of its split
    total: np.ndarray  # float64, in all rows


def predict(
    config: Config, folder: Path, root: Path, workers: int = 2, budget: int = BUDGET, batches: Sequence[int] = ()
) -> Prediction:
    """Predict the result of a run from about `budget` bytes of its sources.

    `folder` is the folder of the config. `batches` are numbers of rows per step to show steps and warnings for; by
    default, BATCH_ROWS are shown. Raises the errors that a run would raise about the config, sources, tokenizer, and
    template.
    """
    layout = Layout(root)
    cache = DigestCache(layout.digests(), only_read=True)
    files = find_files(config.sources, folder, layout, cache=cache)
    with tempfile.TemporaryDirectory(prefix="packcorpus-") as scratch:
        recipe = Recipe(config, folder, layout, tuple(files), ())
        recipe, encoder, samples, unlike = open_samples(recipe, budget, Path(scratch))
        check_first_conversations(recipe)
        sampled = [tokenize_sample(sample, recipe, encoder) for sample in samples]
        whole = all(sample.whole for sample in samples) and len(samples) == len(files)
        chosen = select(sampled, recipe, whole)
        placed = _placed(chosen)
        rows, squares = _rows(placed, config)
        places = sum(count * config.rows.length_of(split) for split, count in rows.items())
        rejects = _rejects(chosen)
        ledger = _ledger(chosen, placed, rejects, places)
        costs = estimate_costs(chosen, ledger, places, workers)
    in_train, longest = placed.copies * ~placed.held_out, config.sequence_length
    full, trained = 100 * ledger.tokens.packed / max(places, 1), float(placed.trained @ in_train)
    noticed = noticed_in([each.counts for each in sampled])
    if unused := {each.sample.file.name: each.unused_keys for each in sampled if each.unused_keys}:
        noticed["unused_keys"] = unused
    # Conversations that the overlong policy applied to.
    is_too_long = np.isin(chosen.reason, (0, drop_code("too_long"), REJECTED))
    is_too_long &= chosen.pieces.accepted.length > longest
    found = Prediction(
        config=None,
        settings=config.model_dump(mode="json"),
        tokenizer=Tokenizer(
            "" if config.tokenizer is None else recipe.tokenizer_files.main.name,
            encoder.kind,
            encoder.vocab_size,
            trained_here=config.tokenizer is None,
        ),
        markers_as_text=list(recipe.template.markers_as_text),
        whole=whole,
        files=len(files),
        bytes=sum(file.bytes for file in files),
        engine=encoder.engine,
        sources=_sources(chosen, placed, encoder),
        rejects=rejects,
        noticed=noticed,
        ledger=ledger,
        too_long=round(float(chosen.pieces.accepted.samples.most(is_too_long) @ chosen.weights)),
        mixture=_mixture(chosen, placed.length * in_train, placed.trained * in_train),
        rows=rows,
        packing_efficiency=min(100.0, round(full, 4)) if config.packing else None,
        **costs,
        steps=[],
        waiting=forecast(squares, np.zeros(len(squares), np.int32), config.row_lengths[0]),
        run_fails=False,
        failures=[],
        warnings=[],
        recipe=recipe,
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


def _placed(chosen: Selection) -> Placed:
    pieces, every = chosen.pieces, slice(None)
    columns, epochs = pieces.columns(every), chosen.recipe.config.epochs
    of = columns.conversation
    held_out = pieces.accepted.held_out[of]
    once, copies = ((chosen.weights * share)[of] for share in (chosen.packed, chosen.copies))
    trained, total = pieces.trained(every, chosen.tokens), copies * np.where(held_out, 1, epochs)
    return Placed(of, columns.length, columns.separator, trained, held_out, once, copies, total)


# -- rows --------------------------------------------------------------------------------------------------------------


def _rows(placed: Placed, config: Config) -> tuple[dict[str, int], np.ndarray]:
    rows: dict[str, int] = {}
    squares = np.zeros(0, np.int64)
    for kind in dict.fromkeys(map(kind_of, config.rows.split_names(config.epochs))):
        # A later epoch packs the pieces of the first epoch into the same number of rows.
        counts = [rows[name] for name in config.rows.splits("train")] if kind not in SPLITS else []
        if kind in SPLITS:
            own = placed.held_out if kind == "validation" else ~placed.held_out
            counts, of_rows = _packed_rows(placed.length[own], placed.copies[own], config)
            squares = of_rows if kind == "train" else squares
        rows |= zip(config.rows.splits(kind), counts, strict=True)
    return rows, squares


def _packed_rows(lengths: np.ndarray, weights: np.ndarray, config: Config) -> tuple[list[int], np.ndarray]:
    """Return the number of rows of each length, and Σn² of rows.

    There is Σn² only for rows of one length with padding. If there are more than MOST_ROWS rows, it is that of evenly
    spaced rows.
    """
    nothing = np.zeros(0, np.int64)
    if not config.packing:
        return [round(float(weights.sum()))], nothing
    counts = scaled(config.rows.multiples(lengths), weights, config.rows.capacity)
    if not counts.any():
        return [0] * len(config.row_lengths), nothing
    if len(config.row_lengths) > 1:
        return [rows_of(rows) for rows in several_lengths.solve(counts, config.row_lengths).rows], nothing
    rows, _ = bin_packing.solve(counts, config.rows.capacity)
    count = rows_of(rows)
    if config.padding == "none":
        return [count], nothing
    every = np.arange(min(count, MOST_ROWS)) * count // max(1, min(count, MOST_ROWS))
    number = np.searchsorted(np.cumsum([copies for _, copies in rows]), every, "right")
    squares = [sum(times * (length * config.align) ** 2 for length, times in row) for row, _ in rows]
    return [count], np.array(squares, np.int64)[number]


def scaled(lengths: np.ndarray, weights: np.ndarray, capacity: int) -> np.ndarray:
    """Scale the lengths of a sample to a histogram of all lengths.

    The result is int64[capacity + 1]. Running sums are rounded, so the count of all lengths up to any length is right
    to within one half.
    """
    counts = np.bincount(lengths, weights, capacity + 1)
    return np.diff(np.rint(np.cumsum(counts)), prepend=0).astype(np.int64)


# -- sums --------------------------------------------------------------------------------------------------------------


def _ledger(chosen: Selection, placed: Placed, rejects: Sequence[Rejected], places: int) -> Ledger:
    config, accepted, weights = chosen.recipe.config, chosen.pieces.accepted, chosen.weights
    samples, share, stays = accepted.samples, chosen.packed, chosen.reason != REJECTED
    encoded, conversations = accepted.encoded(slice(None)) * weights, samples.most(share)
    of_pieces = (placed.length - placed.separator) @ placed.once  # tokens in rows, without separators and copies
    packed, separators = placed.length @ placed.total, placed.separator @ placed.total
    trained = placed.trained @ placed.total
    # Conversations that are cut, and the tokens and pieces that they lose.
    several = np.unique(chosen.pieces.cut_of)
    cut, is_split = np.unique(samples.first_of(several)), config.overlong == "split"
    is_cut, gone = conversations[cut] @ weights[cut], (encoded * stays) @ share - of_pieces
    pieces_of_each = np.maximum(1, -(-(accepted.length[several] - 1) // (config.sequence_length - 1)))
    pieces = (weights * share)[several] @ pieces_of_each
    lost_pieces = pieces - placed.once[chosen.pieces.of >= len(accepted.length)].sum()
    alignment = (-placed.length % config.align) @ placed.total if config.align > 1 else None
    padding = (alignment or 0) if config.padding == "none" else max(0.0, places - packed)
    receipts = [_scaled_counts(each) for each in chosen.sampled]
    values: dict[str, Any] = {
        "conversations": {
            "read": sum(each.sample.expected for each in chosen.sampled),
            "packed": conversations @ weights,
            "rejected": {reject.reason: reject.expected for reject in rejects},
            "dropped": _dropped(chosen),
            "truncated": 0 if is_split else is_cut,
            "split": is_cut if is_split else 0,
        },
        "pieces": {"packed": placed.total.sum(), "dropped": lost_pieces if is_split else 0},
        "tokens": {
            "encoded": (encoded * stays).sum(),
            "separators": separators,
            "repeated": packed - separators - of_pieces,
            "truncated": 0 if is_split else gone,
            "dropped": (encoded * stays) @ (1 - share) + gone * is_split,
            "rejected": (encoded * ~stays).sum(),
            "packed": packed,
            "padding": padding if config.packing else 0,
            "trained": trained,
            "alignment": alignment,
        },
        "context": {"tokens": packed - trained, "left_out": left_out(receipts)},
    }
    if config.overlong == "turns":
        whole = chosen.tokens.column("trained") * weights
        values["tokens"]["trained_truncated"] = whole @ (share * stays) - placed.trained @ placed.once
    if samples.several:
        repeated = repeated_prompt_tokens(chosen.pieces, chosen.tokens)
        dropped = {reason: weights[chosen.reason == drop_code(reason)].sum() for reason in SAMPLE_DROP_REASONS}
        dropped["limit"] += ((chosen.reason == 0) - chosen.within) @ weights
        dropped["weight"] += (chosen.within - share) @ weights
        values["samples"] = {
            "read": weights.sum(),
            "packed": share @ weights,
            "rejected": weights[~stays].sum(),
            "dropped": {reason: count for reason, count in dropped.items() if count >= 0.5},
            "repeated_prompt_tokens": repeated @ (share * weights),
            "apart": apart(receipts, float(weights.sum()), float((encoded * stays).sum())),
        }
    return Ledger.model_validate(_rounded(values))


def _rounded(values: dict[str, Any]) -> dict[str, Any]:
    return {
        name: _rounded(value) if isinstance(value, dict) else None if value is None else round(float(value))
        for name, value in values.items()
    }


def _scaled_counts(sampled: SampleTokens) -> dict[str, float]:
    represents = float(sampled.sample.weights.mean()) if len(sampled.sample.weights) else 0.0
    return {name: represents * sampled.counts.get(name, 0) for name in (*APART, *LEFT_OUT)}


def _dropped(chosen: Selection) -> dict[str, float]:
    accepted, weights = replace(chosen.pieces.accepted, reason=chosen.reason), chosen.weights
    outcomes, most = accepted.outcomes(), accepted.samples.most
    represents = weights if accepted.samples.firsts is None else weights[accepted.samples.firsts]
    dropped = {reason: float(represents[outcomes == drop_code(reason)].sum()) for reason in DROP_REASONS}
    dropped["limit"] = float((accepted.left() - most(chosen.within)) @ weights)
    dropped["weight"] = float((most(chosen.within) - most(chosen.packed)) @ weights)
    return {reason: count for reason, count in dropped.items() if count >= 0.5 or reason == "too_long"}


def _rejects(chosen: Selection) -> list[Rejected]:
    config, is_late = chosen.recipe.config, chosen.cut_off
    late = f"no trained token is left within {config.sequence_length:,} tokens (overlong: {config.overlong})"
    found: dict[str, list[tuple[str, str, float, bool]]] = {}  # place, message, weight, whether it was cut off
    for is_cut_off in (False, True):
        for each, inside in zip(chosen.sampled, chosen.parts, strict=True):
            rejects = each.rejects
            if is_cut_off:
                records = chosen.tokens.column("record", inside.start, inside.stop)[is_late[inside]]
                rejects = [(record, "no_trained_tokens", late) for record in records.tolist()]
            for record, reason, message in rejects:
                weight, place = float(each.sample.weights[record]), each.sample.records[record].place
                found.setdefault(reason, []).append((place, message, weight, is_cut_off))
    return [
        Rejected(
            code=CODES[reason].code,
            reason=reason,
            looked_at=len(rejects),
            expected=round(sum(weight for _, _, weight, _ in rejects)),
            place=rejects[0][0],
            message=rejects[0][1],
            cut_off=round(sum(weight for _, _, weight, is_cut_off in rejects if is_cut_off)),
            in_data=sum(not is_cut_off for _, _, _, is_cut_off in rejects),
        )
        for reason, rejects in sorted(found.items())
    ]


def _mixture(chosen: Selection, tokens: np.ndarray, trained: np.ndarray) -> list[MixtureFacts]:
    """Return the contribution of each entry of `sources` to a pass."""
    pieces, sources = chosen.pieces, chosen.recipe.config.sources
    most, in_train = pieces.accepted.samples.most, chosen.weights * ~pieces.accepted.held_out
    of_pieces = chosen.entries[pieces.conversations(slice(None))]
    sums = {
        name: np.bincount(of, values, len(sources))
        for name, of, values in (
            ("conversations", chosen.entries, most(chosen.packed) * in_train),
            ("copies", chosen.entries, most(chosen.copies) * in_train),
            ("tokens", of_pieces, tokens),
            ("trained_tokens", of_pieces, trained),
        )
    }
    found = []
    for entry, source in enumerate(sources):
        values: dict[str, Any] = {name: round(float(of_entry[entry])) for name, of_entry in sums.items()}
        for name in ("tokens", "trained_tokens"):
            total = max(1.0, float(sums[name].sum()))
            values[f"{name}_percent"] = round(100 * float(sums[name][entry]) / total, 4)
        found.append(MixtureFacts(path=source.path, weight=source.weight, limit=source.limit, **values))
    return found


def _sources(chosen: Selection, placed: Placed, encoder: Encoder) -> list[Source]:
    accepted, is_late = chosen.pieces.accepted, chosen.cut_off
    encoded = accepted.encoded(slice(None)) * (chosen.reason != REJECTED) * chosen.weights
    parts = len(chosen.sampled)
    trained = np.bincount(accepted.part(placed.conversation), placed.trained * placed.total, parts).tolist()
    found = []
    for each, inside, of_file in zip(chosen.sampled, chosen.parts, trained, strict=True):
        sample, file = each.sample, each.sample.file
        examples = [_example(chosen, number, each, encoder) for number in chosen.first_samples(inside)]
        rejected = sum(float(sample.weights[record]) for record, _, _ in each.rejects)
        rejected += float(chosen.weights[inside][is_late[inside]].sum())
        found.append(
            Source(
                path=file.name,
                format=file.format,
                bytes=file.bytes,
                looked_at=len(sample.records),
                reach=round(sample.reach, 4),
                conversations=round(sample.expected),
                counted=sample.counted,
                rejected=round(rejected),
                tokens=round(float(encoded[inside].sum())),
                trained_tokens=round(of_file),
                shown=next(iter(examples), None),
                other_samples=examples[1:],
                stands_for=sample.stands_for,
                whole=sample.whole,
            )
        )
    return found


def _example(chosen: Selection, number: int, sampled: SampleTokens, encoder: Encoder) -> Example:
    record, turn = (int(chosen.tokens.column(name, number, number + 1)[0]) for name in ("record", "turn"))
    values, place = chosen.tokens.tokens(number), sampled.sample.records[record].place
    ids = values ^ (values >> 31)
    spans = spans_of(encoder, ids, np.where(values >= 0, ids, IGNORED))
    return Example(place + (f" turn {turn}" if turn >= 0 else ""), len(ids), int((values >= 0).sum()), spans)
