"""Config → what a run would give, from a bounded sample of every source, in seconds and without writing anything.

    config ─find_files─▶ files ─sample_files─▶ records ─as a run does─▶ tokens, labels, rejects
                                                           │ each stands for total / looked at
        filters, over-long policy, shares of a mixture ────────┤ by the functions of a run
                                     lengths, scaled ──────────┴─▶ its planner ─▶ rows, efficiency

Where the sample is all there is, every figure is that of the run. Else they are estimates: the bytes of a file over the
bytes of what was read of it say how many conversations there are, and the histogram of lengths, scaled by that, is
packed by the code that packs in a run. Duplicates are told within the sample alone.
"""

from __future__ import annotations

import tempfile
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np

from tasks.config import Config
from tasks.core.errors import Reject
from tasks.dry_run.expected_mixture import entries_of, shares
from tasks.dry_run.model import Prediction, Shown, Source, Tokens
from tasks.dry_run.resources import add_costs
from tasks.dry_run.sample_tokens import count_reject, equal, fast_encoder, thinned, tokenize_sample, train_on_sample
from tasks.dry_run.warnings import add_warnings
from tasks.packing import bin_packing
from tasks.packing.filters import filter_conversations
from tasks.packing.pieces import Pieces, cut_overlong
from tasks.packing.placement import hold_out_at_least_one
from tasks.packing.plan import read_columns
from tasks.recipe import Recipe
from tasks.sources.model import Part
from tasks.sources.sample_files import sample_files
from tasks.sources.source_files import find_files
from tasks.storage.manifest import MixtureFacts
from tasks.storage.paths import Layout
from tasks.storage.schemas import DROPS, REJECTED, why
from tasks.storage.splits import SPLITS, split_names
from tasks.storage.token_files import TokenColumns
from tasks.templates.jinja_template import JinjaTemplate

BUDGET = 8 << 20  # bytes of the sources; gigatoken and all around it take 0.7 s for them


SLOWER = 4  # times less, where the tokenizer's own library encodes: 1 to 2 s


JINJA_RECORDS = 1000  # a Jinja template takes 0.3 to 1 ms for a conversation


def predict(config: Config, folder: Path, root: Path, workers: int = 2, budget: int = BUDGET) -> Prediction:
    """What PackCorpus would give for a config that lies in `folder`, from about `budget` bytes of its sources.

    Raises what a run would raise of config, sources, tokenizer and template.
    """
    layout = Layout(root)
    files = find_files(config.sources, folder, layout.outputs())
    recipe = Recipe(config, folder, layout, tuple(files), ())
    with tempfile.TemporaryDirectory(prefix="packcorpus-") as scratch:
        if config.tokenizer is None:
            samples = sample_files(files, budget // SLOWER, config.max_record_bytes)
            recipe = train_on_sample(recipe, samples, Path(scratch))
        reference = recipe.encoder
        encoder = fast_encoder(reference, config)
        budget //= 1 if encoder is not reference else SLOWER
        if config.tokenizer is not None or encoder is not reference:
            samples = sample_files(files, budget, config.max_record_bytes)
        if encoder is not reference and not equal(encoder, reference, recipe, samples):
            encoder, samples = reference, [thinned(sample, SLOWER) for sample in samples]
        if isinstance(recipe.template, JinjaTemplate):
            every = -(-sum(len(sample.records) for sample in samples) // JINJA_RECORDS)
            samples = [thinned(sample, every) for sample in samples]
        whole = all(sample.whole for sample in samples) and len(samples) == len(files)
        found = Prediction(
            *(config, recipe, encoder, encoder.engine, [], len(files), sum(file.bytes for file in files), whole),
            tokenizer_bytes=sum(file.stat().st_size for file in recipe.tokenizer_files.files),
            workers=workers,
        )
        tokens = [tokenize_sample(sample, recipe, encoder, found) for sample in samples]
    add_costs(found, tokens, _plan(found, tokens))
    add_warnings(found)
    return found


def _plan(found: Prediction, made: list[Tokens]) -> np.ndarray:
    """As tasks.packing.plan, by its functions. Returns how often each conversation is packed in a pass, float64."""
    recipe = found.recipe
    config = recipe.config
    if config.overlong == "error":  # figures are those of truncate
        config = config.model_copy(update={"overlong": "truncate"})
    parts = tuple(Part(source.sample.file, 0, source.sample.file.bytes, "") for source in found.sources)
    recipe = replace(recipe, config=config, parts=parts)
    tokens = TokenColumns([each.file for each in made], [0] * len(made))
    accepted = read_columns(tokens, config.validation)
    weights = _weights(found, tokens)
    filter_conversations(accepted, tokens, config)
    found.too_long = float(weights[(accepted.why == 0) & (accepted.length > config.sequence_length)].sum())
    pieces = cut_overlong(accepted, tokens, recipe)
    late = accepted.why == REJECTED
    encoded = accepted.encoded(slice(None)) * ~late
    for number, source in enumerate(found.sources):
        inside = slice(*tokens.edges[number : number + 2])
        source.tokens = float(encoded[inside] @ weights[inside])
        _show_and_reject(found, source, inside, late, tokens)
    if found.whole:
        hold_out_at_least_one(accepted.held_out, accepted.why == 0, lambda: tokens.column("digest"), config.validation)
    dropped = {reason: float(weights[accepted.why == why(reason)].sum()) for reason in DROPS}
    stays = accepted.why == 0
    chosen = shares(pieces, tokens, recipe, None if found.whole else weights)
    found.empty_shares = chosen.empty
    dropped["limit"] = float((stays - chosen.within) @ weights)
    dropped["weight"] = float((chosen.within - chosen.packed) @ weights)
    if config.weighting == "token_share":
        entries, sources = entries_of(pieces, recipe), config.sources
        within, packed = (np.bincount(entries, each, len(sources)) for each in (chosen.within, chosen.packed))
        found.giving_all = [sources[e].path for e in np.flatnonzero((within > 0) & np.isclose(within, packed))]
    found.dropped = {reason: count for reason, count in dropped.items() if count >= 0.5 or reason == "too_long"}
    found.packed = float(chosen.packed @ weights)
    cut = np.unique(pieces.cut_of)
    found.cut = float(chosen.packed[cut] @ weights[cut])
    _count(found, pieces, tokens, recipe, weights * chosen.packed, weights * chosen.copies)
    return chosen.copies


def _weights(found: Prediction, tokens: TokenColumns) -> np.ndarray:
    """float64, what each conversation stands for."""
    record = tokens.column("record")
    inside = [slice(*edges) for edges in pairwise(tokens.edges)]
    weights = [source.sample.weights[record[own]] for source, own in zip(found.sources, inside, strict=True)]
    return np.concatenate([np.empty(0), *weights])


def _show_and_reject(found: Prediction, source: Source, inside: slice, late: np.ndarray, tokens: TokenColumns) -> None:
    """The first conversation of a source, and those that the over-long policy left without a trained token."""
    records = tokens.column("record", inside.start, inside.stop)
    if len(records):
        values = tokens.tokens(inside.start)
        source.shown = Shown(source.sample.records[records[0]].place, values ^ (values >> 31), values >= 0)
    config = found.recipe.config
    message = f"no trained token is left within {config.sequence_length:,} tokens (overlong: {config.overlong})"
    for record in records[late[inside]].tolist():
        count_reject(found, source, Reject("no_trained_tokens", message), record)
        found.cut_off.looked_at += 1
        found.cut_off.expected += float(source.sample.weights[record])


def _count(
    found: Prediction, pieces: Pieces, tokens: TokenColumns, recipe: Recipe, packed: np.ndarray, copies: np.ndarray
) -> None:
    """Rows and tokens of conversations that stand for `packed` others, which are packed `copies` times in a pass."""
    config, every = recipe.config, slice(None)
    accepted, conversation = pieces.accepted, pieces.conversations(every)
    held_out, weight = accepted.held_out[conversation], copies[conversation]
    length, trained = pieces.columns(every).length, pieces.trained(every, tokens)
    # Each further packing has the same pieces as the first, in as many rows.
    passes = {split: held_out if split == "validation" else ~held_out for split in split_names(config.epochs)}
    for split, own in passes.items():
        again = found.rows.get("train") if split not in SPLITS else None
        found.rows[split] = _rows(length[own], weight[own], config) if again is None else again
        found.trained[split] = float(trained[own] @ weight[own])
    total = weight * np.where(held_out, 1, config.epochs)
    found.pieces = float(total.sum())
    found.tokens = {
        "encoded": sum(source.tokens for source in found.sources),
        "packed": float(length @ total),
        "trained": float(trained @ total),
    }
    of_sources = np.bincount(accepted.part(conversation), trained * total, len(found.sources))
    for source, of_source in zip(found.sources, of_sources.tolist(), strict=True):
        source.trained = of_source
    if config.packing:
        places = sum(found.rows.values()) * config.sequence_length
        found.tokens["padding"] = max(0.0, places - found.tokens["packed"])
        found.efficiency = min(100.0, 100 * found.tokens["packed"] / max(places, 1))
    entries, in_train = entries_of(pieces, recipe), ~accepted.held_out
    of, own = entries[conversation], weight * ~held_out
    tokens_of, trained_of = (np.bincount(of, values * own, len(config.sources)) for values in (length, trained))
    there, copied = (np.bincount(entries, values * in_train, len(config.sources)) for values in (packed, copies))
    found.mixture = [
        MixtureFacts(
            path=source.path,
            weight=source.weight,
            limit=source.limit,
            conversations=round(there[entry]),
            copies=round(copied[entry]),
            tokens=round(tokens_of[entry]),
            trained_tokens=round(trained_of[entry]),
            tokens_percent=_percent(tokens_of, entry),
            trained_tokens_percent=_percent(trained_of, entry),
        )
        for entry, source in enumerate(config.sources)
    ]


def _percent(values: np.ndarray, entry: int) -> float:
    return round(100 * float(values[entry]) / max(1.0, float(values.sum())), 4)


def _rows(lengths: np.ndarray, weights: np.ndarray, config: Config) -> int:
    if not config.packing or not len(lengths):
        return round(float(weights.sum()))
    return bin_packing.pack(scaled(lengths, weights, config.sequence_length), config.sequence_length).rows


def scaled(lengths: np.ndarray, weights: np.ndarray, capacity: int) -> np.ndarray:
    """The histogram of all conversations, of those of a sample and how many each stands for; int64[capacity + 1].

    Rounded over the sum from the shortest on, so that all of them, and those of every range of lengths, are as many.
    """
    counts = np.bincount(lengths, weights, capacity + 1)
    return np.diff(np.rint(np.cumsum(counts)), prepend=0).astype(np.int64)
