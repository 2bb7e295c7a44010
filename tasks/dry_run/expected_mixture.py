"""How often each conversation of a sample is packed: what `mixture` decides for each, as a share of what it stands for.

    Pieces of a sample, what each conversation stands for ─limit─▶ ─weight─▶ Shares

Where a sample is all there is, mixture itself decides and every share is 0 or 1.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tasks.core.errors import DataError
from tasks.packing.mixture import is_mixed, mix
from tasks.packing.pieces import Pieces
from tasks.recipe import Recipe
from tasks.storage.schemas import why
from tasks.storage.token_files import TokenColumns


@dataclass(frozen=True, slots=True)
class Shares:
    """float64[conversations] each, 0 where filters and the over-long policy took it.

    `empty` says which sources have no trained token for their share of them: the run will stop there.
    """

    within: np.ndarray  # the limit of its source
    packed: np.ndarray  # of those, by its weight
    copies: np.ndarray  # how often it is packed in a pass, on average
    empty: str = ""


def exact_shares(pieces: Pieces, tokens: TokenColumns, recipe: Recipe) -> Shares:
    """As in a run. Raises DataError, UsageError as `mix` does."""
    mixed, reasons = mix(pieces, tokens, recipe), pieces.accepted.why
    packed = (reasons == 0).astype(np.float64)
    copies = packed if mixed.copies is None else mixed.copies * packed
    return Shares(packed + (reasons == why("weight")), packed, copies)


def expected_shares(pieces: Pieces, tokens: TokenColumns, recipe: Recipe, weights: np.ndarray) -> Shares:
    """From conversations that stand for `weights` (float64) of their like each."""
    config, accepted = recipe.config, pieces.accepted
    within = (accepted.why == 0).astype(np.float64)
    if not is_mixed(config):
        return Shares(within, within, within)
    entries = entries_of(pieces, recipe)
    counts = np.bincount(entries, weights * within, len(config.sources))
    limits = np.array([source.limit or np.inf for source in config.sources])
    within *= np.minimum(1, limits / np.maximum(counts, 1e-9))[entries]
    factors, empty = np.array([source.weight for source in config.sources]), ""
    if config.weighting == "token_share":
        every = slice(None)
        conversation = pieces.conversations(every)
        chosen = (weights * within * ~accepted.held_out)[conversation]
        trained = np.bincount(entries[conversation], pieces.trained(every, tokens) * chosen, len(factors))
        empty = ", ".join(config.sources[entry].path for entry in np.flatnonzero(trained == 0).tolist())
        there = trained > 0
        scale = (trained / factors)[there].min(initial=np.inf)
        factors[there] *= scale / trained[there]
        factors[~there] = 0
    factor = factors[entries]
    packed = within * np.minimum(factor, 1)
    return Shares(within, packed, np.where(accepted.held_out, packed, within * factor), empty)


def shares(pieces: Pieces, tokens: TokenColumns, recipe: Recipe, weights: np.ndarray | None) -> Shares:
    """`weights` are None where the sample is all there is."""
    if weights is not None:
        return expected_shares(pieces, tokens, recipe, weights)
    reasons = pieces.accepted.why.copy()
    try:
        return exact_shares(pieces, tokens, recipe)
    except DataError:  # a source has nothing to give; the others can be told
        pieces.accepted.why[:] = reasons
        return expected_shares(pieces, tokens, recipe, np.ones(len(reasons)))


def entries_of(pieces: Pieces, recipe: Recipe) -> np.ndarray:
    """int64[conversations], the place in the config's sources of each."""
    entries = np.array([part.file.entry for part in recipe.parts])
    return np.repeat(entries, np.diff(pieces.accepted.edges))
