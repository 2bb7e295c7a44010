"""Choose the conversations of the samples that a run packs, and how often.

    token files of the samples ─select_pieces, as in a run─▶ Pieces ─limits, weights─▶ Selection

Each conversation of a sample represents several conversations, so it has a share: the fraction of these that a run
packs. If a conversation has several samples, each of them has its own share. If everything was read,
`packing.mixture` decides, and the conversation is either packed or not.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from tasks.core.errors import DataError
from tasks.dry_run.sample_tokens import SampleTokens
from tasks.packing.mixture import is_mixed, mix
from tasks.packing.pieces import Pieces
from tasks.packing.plan import select_pieces
from tasks.recipe import Recipe
from tasks.sources.model import Part
from tasks.storage.schemas import REJECTED, drop_code
from tasks.storage.token_files import TokenColumns

MOST_SAMPLES = 8  # samples of a conversation to show


@dataclass(frozen=True, slots=True)
class Selection:
    """The conversations of the samples, in columns.

    A column has one entry for each sample of a conversation.
    `packed` and `copies` are 0 if filters or the overlong policy removed the conversation. `empty` names the sources
    that have no trained token for their share, which makes the run fail.
    """

    sampled: list[SampleTokens]
    recipe: Recipe  # the sample of each file is a part
    tokens: TokenColumns
    pieces: Pieces
    weights: np.ndarray  # float64, the number of conversations that it represents
    entries: np.ndarray  # int64, index into `sources`
    reason: np.ndarray  # uint8, Accepted.reason before the mixture
    within: np.ndarray  # float64, share within the limit of its source
    packed: np.ndarray  # float64, share within the limit that is packed according to the weight of its source
    copies: np.ndarray  # float64, mean number of times that it is packed in a pass
    empty: str = ""

    @property
    def parts(self) -> list[slice]:
        """Return the conversations of each file."""
        return [slice(*edges) for edges in pairwise(self.tokens.edges)]

    @property
    def cut_off(self) -> np.ndarray:
        """Return whether each conversation lost all trained tokens to its length.

        The flag is at its first sample.
        """
        return self.pieces.accepted.samples.only_first(self.reason == REJECTED)

    def first_samples(self, part: slice) -> list[int]:
        """Return the first samples of the first conversation of a file."""
        records = self.tokens.column("record", part.start, min(part.stop, part.start + MOST_SAMPLES))
        return [part.start + at for at in np.flatnonzero(records == records[:1]).tolist()]

    def giving_all(self) -> list[str]:
        """Return the paths of the sources that token_share takes completely."""
        sources = self.recipe.config.sources
        if self.recipe.config.weighting != "token_share":
            return []
        within, packed = (np.bincount(self.entries, each, len(sources)) for each in (self.within, self.packed))
        return [sources[entry].path for entry in np.flatnonzero((within > 0) & np.isclose(within, packed))]


def select(sampled: list[SampleTokens], recipe: Recipe, whole: bool) -> Selection:
    """Select conversations; `whole` is true if the samples are all of the sources."""
    config = recipe.config
    if config.overlong == "error":  # the figures are for truncate
        config = config.model_copy(update={"overlong": "truncate"})
    parts = tuple(Part(each.sample.file, 0, each.sample.file.bytes, "") for each in sampled)
    recipe = replace(recipe, config=config, parts=parts)
    tokens = TokenColumns([each.file for each in sampled], [0] * len(sampled))
    record, edges = tokens.column("record"), pairwise(tokens.edges)
    weights = [each.sample.weights[record[slice(*inside)]] for each, inside in zip(sampled, edges, strict=True)]
    pieces = select_pieces(tokens, recipe, is_sample=not whole)
    entries = np.repeat(np.array([part.file.entry for part in parts]), np.diff(pieces.accepted.edges))
    before = pieces.accepted.reason.copy()
    share = (before == 0).astype(np.float64)
    represents = np.concatenate([np.empty(0), *weights])
    chosen = Selection(sampled, recipe, tokens, pieces, represents, entries, before, share, share, share)
    if not is_mixed(config):
        return chosen
    if whole:
        try:
            mixed = mix(pieces, tokens, recipe)
        except DataError:  # a source is empty; the shares of the other sources can be estimated
            pieces.accepted.reason[:] = before
        else:
            reasons = pieces.accepted.reason
            packed = (reasons == 0).astype(np.float64)
            copies = packed if mixed.copies is None else mixed.copies * packed
            return replace(chosen, within=packed + (reasons == drop_code("weight")), packed=packed, copies=copies)
    return _with_shares(chosen)


def _with_shares(chosen: Selection) -> Selection:
    """Estimate the shares of a mixture from a sample."""
    config, accepted, entries = chosen.recipe.config, chosen.pieces.accepted, chosen.entries
    counts = np.bincount(entries, chosen.weights * accepted.left(), len(config.sources))
    limits = np.array([source.limit or np.inf for source in config.sources])
    within = chosen.within * np.minimum(1, limits / np.maximum(counts, 1e-9))[entries]
    factors, empty = np.array([source.weight for source in config.sources]), ""
    if config.weighting == "token_share":
        conversation = chosen.pieces.conversations(slice(None))
        in_train = (chosen.weights * within * ~accepted.held_out)[conversation]
        trained_of = chosen.pieces.trained(slice(None), chosen.tokens) * in_train
        trained = np.bincount(entries[conversation], trained_of, len(factors))
        empty = ", ".join(config.sources[entry].path for entry in np.flatnonzero(trained == 0).tolist())
        there = trained > 0
        scale = (trained / factors)[there].min(initial=np.inf)
        factors[there] *= scale / trained[there]
        factors[~there] = 0
    factor = factors[entries]
    packed = within * np.minimum(factor, 1)
    copies = np.where(accepted.held_out, packed, within * factor)
    return replace(chosen, within=within, packed=packed, copies=copies, empty=empty)
