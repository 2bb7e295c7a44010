"""Estimate how often each conversation of a sample is packed, as a share of the conversations that it represents.

Of a conversation with several samples (storage/samples.py), each has a share of its own.

    Pieces of a sample, how many each conversation represents ─limit─▶ ─weight─▶ Shares

If the sample is everything, `packing.mixture` itself decides, and every share is 0 or 1.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tasks.core.errors import DataError
from tasks.packing.mixture import is_mixed, mix
from tasks.packing.pieces import Pieces
from tasks.recipe import Recipe
from tasks.storage.schemas import drop_code
from tasks.storage.token_files import TokenColumns


@dataclass(frozen=True, slots=True)
class Shares:
    """Shares of each conversation, float64[conversations]; 0 if filters or the overlong policy removed it.

    `empty` names the sources that have no trained token for their share: the run will fail.
    """

    within: np.ndarray  # within the limit of its source
    packed: np.ndarray  # of those, packed by the weight of its source
    copies: np.ndarray  # mean number of times it is packed in a pass
    empty: str = ""


def exact_shares(pieces: Pieces, tokens: TokenColumns, recipe: Recipe) -> Shares:
    """Decide as a run does. Raises DataError or UsageError as `mix` does."""
    mixed, reasons = mix(pieces, tokens, recipe), pieces.accepted.reason
    packed = (reasons == 0).astype(np.float64)
    copies = packed if mixed.copies is None else mixed.copies * packed
    return Shares(packed + (reasons == drop_code("weight")), packed, copies)


def expected_shares(pieces: Pieces, tokens: TokenColumns, recipe: Recipe, weights: np.ndarray) -> Shares:
    """Estimate shares from conversations that represent `weights` (float64) conversations each."""
    config, accepted = recipe.config, pieces.accepted
    within = (accepted.reason == 0).astype(np.float64)
    if not is_mixed(config):
        return Shares(within, within, within)
    entries = entries_of(pieces, recipe)
    counts = np.bincount(entries, weights * accepted.left(), len(config.sources))
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
    """Return the shares; `weights` is None if the sample is everything."""
    if weights is not None:
        return expected_shares(pieces, tokens, recipe, weights)
    reasons = pieces.accepted.reason.copy()
    try:
        return exact_shares(pieces, tokens, recipe)
    except DataError:  # a source is empty; the shares of the others can be estimated
        pieces.accepted.reason[:] = reasons
        return expected_shares(pieces, tokens, recipe, np.ones(len(reasons)))


def entries_of(pieces: Pieces, recipe: Recipe) -> np.ndarray:
    """Return the index in the config's `sources` of each conversation, int64[conversations]."""
    entries = np.array([part.file.entry for part in recipe.parts])
    return np.repeat(entries, np.diff(pieces.accepted.edges))
