"""Predict the result of a run from a bounded sample of every source.

    config ─find_files─▶ files ─sample_files─▶ records ─tokenize_sample─▶ SampleTokens: tokens, labels, rejects
                                                       │ each conversation represents total / read of its file
       select_pieces, as in a run; shares of a mixture ┤
                                                       ▼
                                  Selection ─lengths, scaled─▶ bin_packing.pack, as in a run ─▶ Packed: rows, efficiency
                                                       └──────────▶ Costs, failures, warnings ─▶ Prediction

The prediction takes seconds and writes nothing. If all data was read, every figure equals the figure of the run.
Otherwise, figures are estimates. The number of conversations in a file follows from its size and the bytes that were
read of it. The histogram of lengths is scaled to this number and packed by the code that a run uses. Duplicates are
counted only within the sample.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from tasks.config import Config
from tasks.core.errors import Reject
from tasks.dry_run.expected_mixture import Shares, entries_of, shares
from tasks.dry_run.model import Example, Packed, Prediction, Rejects, SampleTokens, Source
from tasks.dry_run.resources import estimate_costs
from tasks.dry_run.sample_tokens import (
    encodes_equally,
    fast_encoder,
    some_texts,
    thinned,
    tokenize_sample,
    train_on_sample,
    unlike_transformers,
)
from tasks.dry_run.warnings import find_failures, find_warnings
from tasks.encoders.encoder import Encoder
from tasks.packing import bin_packing, several_lengths
from tasks.packing.balance import MOST_ROWS
from tasks.packing.ledger import apart, left_out, repeated_prompt_tokens
from tasks.packing.pieces import Pieces
from tasks.packing.plan import select_pieces
from tasks.recipe import Recipe
from tasks.sources.digests import DigestCache
from tasks.sources.model import Part
from tasks.sources.sample_files import Sample, sample_files
from tasks.sources.source_files import find_files
from tasks.storage.facts import MixtureFacts
from tasks.storage.layout import SPLITS, Layout, kind_of
from tasks.storage.schemas import DROP_REASONS, REJECTED, drop_code
from tasks.storage.token_files import TokenColumns
from tasks.tokenization.first_conversations import check_first_conversations
from tasks.tokenization.token_batch import APART, LEFT_OUT, noticed_in

BUDGET = 8 << 20  # bytes of the sources to sample, which take 0.7 s with gigatoken
SLOWER = 4  # divides the budget if the tokenizer's own library encodes, which takes 1 to 2 s
MOST_SAMPLES = 8  # samples of a conversation to show
JINJA_RECORDS = 1000  # conversations to render with a Jinja template, which takes 0.3 to 1 ms for each


def predict(config: Config, folder: Path, root: Path, workers: int = 2, budget: int = BUDGET) -> Prediction:
    """Predict the result of a run from about `budget` bytes of its sources.

    `folder` is the folder of the config. Raises the errors that a run would raise about the config, sources, tokenizer,
    and template.
    """
    layout = Layout(root)
    cache = DigestCache(layout.digests(), only_read=True)
    files = find_files(config.sources, folder, layout, cache=cache)
    with tempfile.TemporaryDirectory(prefix="packcorpus-") as scratch:
        recipe, encoder, samples, texts = _sample(
            Recipe(config, folder, layout, tuple(files), ()), budget, Path(scratch)
        )
        check_first_conversations(recipe)
        sampled = [tokenize_sample(sample, recipe, encoder) for sample in samples]
        unlike = unlike_transformers(recipe, texts)
        whole = all(sample.whole for sample in samples) and len(samples) == len(files)
        selection = _select(sampled, recipe, whole)
        packed, dropped = _pack(selection), _dropped(selection)
        rejects, cut_off = _count_rejects(sampled, selection)
        costs = estimate_costs(recipe, sampled, packed, selection.shares.copies, sum(dropped.values()), workers)
    counts = [_scaled(each) for each in sampled]
    group, weights = selection.pieces.accepted.samples, selection.weights
    # Conversations that the overlong policy applied to.
    is_too_long = np.isin(selection.reason, (0, drop_code("too_long"), REJECTED))
    is_too_long &= selection.pieces.accepted.length > selection.recipe.config.sequence_length
    chosen, cut = group.most(selection.shares.packed), np.unique(group.first_of(selection.pieces.cut_of))
    found = Prediction(
        **vars(packed),
        **vars(costs),
        config=config,
        recipe=recipe,
        encoder=encoder,
        engine=encoder.engine,
        workers=workers,
        sources=_sources(sampled, selection, packed),
        files=len(files),
        bytes=sum(file.bytes for file in files),
        whole=whole,
        rejects=rejects,
        cut_off=cut_off,
        noticed=noticed_in([each.counts for each in sampled]),
        unused_keys={each.sample.file.name: each.unused_keys for each in sampled if each.unused_keys},
        unlike_transformers=unlike,
        weighs_alike=_weighs_alike(selection),
        packed=float(chosen @ weights),
        too_long=float(group.most(is_too_long) @ weights),
        dropped=dropped,
        cut=float(chosen[cut] @ weights[cut]),
        empty_shares=selection.shares.empty,
        giving_all=_giving_all(selection),
        samples=_samples(selection, counts, packed.tokens["encoded"]),
        left_out={role: round(count) for role, count in left_out(counts).items()},
    )
    return replace(found, failures=find_failures(found), warnings=find_warnings(found))


def _sample(
    recipe: Recipe, budget: int, scratch: Path
) -> tuple[Recipe, Encoder, list[Sample], Callable[[], list[str]]]:
    """Choose the encoder, and sample the sources.

    The last value returns some texts of the samples, which are rendered once.
    Samples are smaller for a slow encoder or template. If the config names no tokenizer, one is trained on the samples.
    """
    config, files = recipe.config, recipe.files
    if config.tokenizer is None:
        samples = sample_files(files, budget // SLOWER, config.max_record_bytes)
        recipe = train_on_sample(recipe, samples, scratch)
    reference = recipe.encoder
    encoder = fast_encoder(reference, config)
    budget //= 1 if encoder is not reference else SLOWER
    if config.tokenizer is not None or encoder is not reference:
        samples = sample_files(files, budget, config.max_record_bytes)
    texts = cache(lambda: some_texts(recipe, samples))
    if encoder is not reference and not encodes_equally(encoder, reference, texts()):
        encoder, samples = reference, [thinned(sample, SLOWER) for sample in samples]
    if recipe.template.engines:
        every = -(-sum(len(sample.records) for sample in samples) // JINJA_RECORDS)
        samples = [thinned(sample, every) for sample in samples]
    return recipe, encoder, samples, texts


# -- which conversations are packed ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Selection:
    """The conversations of the samples, and which of them a run packs."""

    recipe: Recipe  # the sample of each file is a part
    tokens: TokenColumns
    weights: np.ndarray  # float64[conversations], the number of conversations that each represents
    pieces: Pieces
    reason: np.ndarray  # uint8[conversations], Accepted.reason before the mixture
    shares: Shares

    @property
    def parts(self) -> list[slice]:
        """Return the conversations of each file, as a slice."""
        return [slice(*edges) for edges in pairwise(self.tokens.edges)]


def _select(sampled: list[SampleTokens], recipe: Recipe, whole: bool) -> Selection:
    config = recipe.config
    if config.overlong == "error":  # the figures are for truncate
        config = config.model_copy(update={"overlong": "truncate"})
    parts = tuple(Part(each.sample.file, 0, each.sample.file.bytes, "") for each in sampled)
    recipe = replace(recipe, config=config, parts=parts)
    tokens = TokenColumns([each.file for each in sampled], [0] * len(sampled))
    record, edges = tokens.column("record"), pairwise(tokens.edges)
    weights = [each.sample.weights[record[slice(*inside)]] for each, inside in zip(sampled, edges, strict=True)]
    represents = np.concatenate([np.empty(0), *weights])
    pieces = select_pieces(tokens, recipe, is_sample=not whole)
    before = pieces.accepted.reason.copy()
    chosen = shares(pieces, tokens, recipe, None if whole else represents)
    return Selection(recipe, tokens, represents, pieces, before, chosen)


def _dropped(selection: Selection) -> dict[str, float]:
    """Count the dropped conversations by reason."""
    accepted = replace(selection.pieces.accepted, reason=selection.reason)
    weights, chosen = selection.weights, selection.shares
    outcomes, most = accepted.outcomes(), accepted.samples.most
    represents = weights if accepted.samples.firsts is None else weights[accepted.samples.firsts]
    dropped = {reason: float(represents[outcomes == drop_code(reason)].sum()) for reason in DROP_REASONS}
    dropped["limit"] = float((accepted.left() - most(chosen.within)) @ weights)
    dropped["weight"] = float((most(chosen.within) - most(chosen.packed)) @ weights)
    return {reason: count for reason, count in dropped.items() if count >= 0.5 or reason == "too_long"}


def _scaled(sampled: SampleTokens) -> dict[str, float]:
    """Return what some counts of a sample represent."""
    represents = float(sampled.sample.weights.mean()) if len(sampled.sample.weights) else 0.0
    return {name: represents * sampled.counts.get(name, 0) for name in (*APART, *LEFT_OUT)}


def _samples(selection: Selection, found: Sequence[dict[str, float]], encoded: float) -> dict[str, Any] | None:
    """Count the samples, as in the ledger.

    `found` has the scaled counts of each file, and `encoded` is the number of tokens.

    Returns None if every conversation is one sample.
    """
    if not selection.pieces.accepted.samples.several:
        return None
    packed, weights = selection.shares.packed, selection.weights
    repeated = repeated_prompt_tokens(selection.pieces, selection.tokens)
    counts = {
        "read": weights.sum(),
        "packed": packed @ weights,
        "repeated_prompt_tokens": repeated @ (packed * weights),
    }
    samples: dict[str, Any] = {name: float(count) for name, count in counts.items()}
    return samples | {"apart": apart(found, samples["read"], encoded)}


def _giving_all(selection: Selection) -> list[str]:
    """Return the paths of the sources that token_share takes completely.

    These sources limit the others.
    """
    sources, chosen = selection.recipe.config.sources, selection.shares
    if selection.recipe.config.weighting != "token_share":
        return []
    entries = entries_of(selection.pieces, selection.recipe)
    within, packed = (np.bincount(entries, each, len(sources)) for each in (chosen.within, chosen.packed))
    return [sources[entry].path for entry in np.flatnonzero((within > 0) & np.isclose(within, packed))]


def _count_rejects(sampled: list[SampleTokens], selection: Selection) -> tuple[dict[str, Rejects], Rejects]:
    """Count all rejects by reason, and the rejects due to the overlong policy.

    The overlong policy rejects a conversation if it leaves no trained token.
    """
    rejects: dict[str, Rejects] = {}
    cut_off = Rejects()
    for each in sampled:
        for record, reject in each.rejects:
            rejects.setdefault(reject.reason, Rejects()).add(each.sample, record, reject)
    config = selection.recipe.config
    message = f"no trained token is left within {config.sequence_length:,} tokens (overlong: {config.overlong})"
    late = Reject("no_trained_tokens", message)
    is_late = _is_rejected(selection)
    for each, inside in zip(sampled, selection.parts, strict=True):
        records = selection.tokens.column("record", inside.start, inside.stop)
        for record in records[is_late[inside]].tolist():
            rejects.setdefault(late.reason, Rejects()).add(each.sample, record, late)
            cut_off.add(each.sample, record, late)
    return rejects, cut_off


def _is_rejected(selection: Selection) -> np.ndarray:
    """Return whether each conversation was left without a trained token.

    The result is bool[samples]. Only the first sample of a conversation is marked.
    """
    return selection.pieces.accepted.samples.only_first(selection.reason == REJECTED)


def _weighs_alike(selection: Selection) -> bool:
    """Return whether loss weights are read from the data and all of them are 1."""
    if not selection.recipe.config.reads_loss_weights:
        return False
    return all((chunk.flatten().to_numpy() == 1).all() for _, chunk in selection.tokens.chunks("weights"))


def _sources(sampled: list[SampleTokens], selection: Selection, packed: Packed) -> list[Source]:
    """Sum up each file and show its first conversation."""
    found, is_late = [], _is_rejected(selection)
    for each, inside, encoded, trained in zip(
        sampled, selection.parts, _encoded(selection), packed.trained_of_sources, strict=True
    ):
        sample = each.sample
        records = selection.tokens.column("record", inside.start, min(inside.stop, inside.start + MOST_SAMPLES))
        shown = [_example(selection, inside.start + at, sample) for at in np.flatnonzero(records == records[:1])]
        rejected = sum(float(sample.weights[record]) for record, _ in each.rejects)
        rejected += float(selection.weights[inside][is_late[inside]].sum())
        found.append(Source(sample, sample.expected, rejected, encoded, trained, shown))
    return found


def _example(selection: Selection, number: int, sample: Sample) -> Example:
    """Return one sample of a conversation."""
    record, turn = (int(selection.tokens.column(name, number, number + 1)[0]) for name in ("record", "turn"))
    values, place = selection.tokens.tokens(number), sample.records[record].place
    return Example(place + (f" turn {turn}" if turn >= 0 else ""), values ^ (values >> 31), values >= 0)


def _encoded(selection: Selection) -> list[float]:
    """Return the number of encoded tokens of each file.

    Separators and rejected conversations are not included.
    """
    encoded = selection.pieces.accepted.encoded(slice(None)) * (selection.reason != REJECTED)
    return [float(encoded[inside] @ selection.weights[inside]) for inside in selection.parts]


# -- the rows of these conversations ---------------------------------------------------------------------------------


def _pack(selection: Selection) -> Packed:
    """Pack the pieces of all represented conversations, and count rows and tokens."""
    recipe, pieces, every = selection.recipe, selection.pieces, slice(None)
    config, accepted, conversation = recipe.config, pieces.accepted, pieces.conversations(every)
    held_out, weight = accepted.held_out[conversation], (selection.weights * selection.shares.copies)[conversation]
    length, trained = pieces.columns(every).length, pieces.trained(every, selection.tokens)
    rows: dict[str, int] = {}
    squares = np.zeros(0, np.int64)
    trained_of_splits: dict[str, float] = {}
    for kind in dict.fromkeys(map(kind_of, config.rows.split_names(config.epochs))):
        own = held_out if kind == "validation" else ~held_out
        names = config.rows.splits(kind)
        # A later epoch packs the pieces of the first epoch into the same number of rows.
        if kind in SPLITS:
            counts, of_rows = _rows(length[own], weight[own], config)
            squares = of_rows if kind == "train" else squares
        else:
            counts = [rows[name] for name in config.rows.splits("train")]
        rows |= zip(names, counts, strict=True)
        trained_of_splits[kind] = float(trained[own] @ weight[own])
    total = weight * np.where(held_out, 1, config.epochs)
    trained_of_sources = np.bincount(accepted.part(conversation), trained * total, len(recipe.parts))
    tokens = {
        "encoded": sum(_encoded(selection)),
        "packed": float(length @ total),
        "trained": float(trained @ total),
    }
    efficiency = None
    if config.packing:
        places = sum(count * config.rows.length_of(split) for split, count in rows.items())
        tokens["padding"] = max(0.0, places - tokens["packed"])
        if config.padding == "none":
            tokens["padding"] = float((-length % config.align) @ total)
        efficiency = min(100.0, 100 * tokens["packed"] / max(places, 1))
    return Packed(
        rows=rows,
        squares=squares,
        trained=trained_of_splits,
        trained_of_sources=trained_of_sources.tolist(),
        pieces=float(total.sum()),
        tokens=tokens,
        efficiency=efficiency,
        mixture=_mixture(selection, length * weight * ~held_out, trained * weight * ~held_out),
    )


def _mixture(selection: Selection, tokens: np.ndarray, trained: np.ndarray) -> list[MixtureFacts]:
    """Return the contribution of each entry of `sources` to a pass.

    `tokens` and `trained` are float64[pieces].
    """
    pieces, chosen, sources = selection.pieces, selection.shares, selection.recipe.config.sources
    most = pieces.accepted.samples.most
    entries = entries_of(pieces, selection.recipe)
    in_train = selection.weights * ~pieces.accepted.held_out

    def by_entry(of: np.ndarray, values: np.ndarray) -> np.ndarray:
        return np.bincount(of, values, len(sources))

    packed, copies = (by_entry(entries, most(each) * in_train) for each in (chosen.packed, chosen.copies))
    of = entries[pieces.conversations(slice(None))]
    tokens_of, trained_of = by_entry(of, tokens), by_entry(of, trained)
    return [
        MixtureFacts(
            path=source.path,
            weight=source.weight,
            limit=source.limit,
            conversations=round(packed[entry]),
            copies=round(copies[entry]),
            tokens=round(tokens_of[entry]),
            trained_tokens=round(trained_of[entry]),
            tokens_percent=_percent(tokens_of, entry),
            trained_tokens_percent=_percent(trained_of, entry),
        )
        for entry, source in enumerate(sources)
    ]


def _percent(values: np.ndarray, entry: int) -> float:
    return round(100 * float(values[entry]) / max(1.0, float(values.sum())), 4)


def _rows(lengths: np.ndarray, weights: np.ndarray, config: Config) -> tuple[list[int], np.ndarray]:
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
        return [each.rows for each in several_lengths.solve(counts, config.row_lengths).patterns], nothing
    found = bin_packing.pack(counts, config.rows.capacity)
    if config.padding == "none":
        return [found.rows], nothing
    every = np.arange(min(found.rows, MOST_ROWS)) * found.rows // max(1, min(found.rows, MOST_ROWS))
    pattern = np.searchsorted(np.cumsum(found.copies), every, "right")
    squares = np.add.reduceat((found.lengths.astype(np.int64) * config.align) ** 2, found.offsets[:-1])
    return [found.rows], squares[pattern]


def scaled(lengths: np.ndarray, weights: np.ndarray, capacity: int) -> np.ndarray:
    """Scale the lengths of a sample to a histogram of all lengths.

    The result is int64[capacity + 1]. Running sums are rounded, so the count of all lengths up to any length is right
    to within one half.
    """
    counts = np.bincount(lengths, weights, capacity + 1)
    return np.diff(np.rint(np.cumsum(counts)), prepend=0).astype(np.int64)
