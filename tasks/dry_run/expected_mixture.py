"""Estimate the share of conversations that a mixture packs.

    Pieces of a sample, number of conversations that each represents ─limit─▶ ─weight─▶ Shares

A share is the fraction of the conversations that one conversation of the sample represents. If a conversation has
several samples (storage/token_files.py), each of them has its own share. If everything was sampled, `packing.mixture`
decides, and the conversation is either packed or not.
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
    """Shares of each conversation, float64[conversations].

    They are 0 if filters or the overlong policy removed the conversation. `empty` names the sources that have no
    trained token for their share, which makes the run fail.
    """

    within: np.ndarray  # within the limit of its source
    packed: np.ndarray  # within the limit, and packed according to the weight of its source
    copies: np.ndarray  # mean number of times that it is packed in a pass
    empty: str = ""


def expected_shares(pieces: Pieces, tokens: TokenColumns, recipe: Recipe, weights: np.ndarray) -> Shares:
    """Estimate the shares from a sample.

    `weights` is the number of conversations that each conversation represents, float64[conversations].
    """
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
    """Return the shares of each conversation.

    `weights` is None if everything was sampled. Then the shares are those of a run, and UsageError is raised if there
    are too many copies.
    """
    if weights is not None:
        return expected_shares(pieces, tokens, recipe, weights)
    reasons, before = pieces.accepted.reason, pieces.accepted.reason.copy()
    try:
        mixed = mix(pieces, tokens, recipe)
    except DataError:  # a source is empty; the shares of the other sources can be estimated
        reasons[:] = before
        return expected_shares(pieces, tokens, recipe, np.ones(len(reasons)))
    packed = (reasons == 0).astype(np.float64)
    copies = packed if mixed.copies is None else mixed.copies * packed
    return Shares(packed + (reasons == drop_code("weight")), packed, copies)


def entries_of(pieces: Pieces, recipe: Recipe) -> np.ndarray:
    """Return each conversation's index into `sources`, int64[conversations]."""
    entries = np.array([part.file.entry for part in recipe.parts])
    return np.repeat(entries, np.diff(pieces.accepted.edges))
