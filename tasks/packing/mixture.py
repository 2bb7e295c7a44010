"""How often each conversation is packed, by `limit` and `weight` of its source.

    Pieces ─limit─▶ a seeded choice of each entry of `sources` ─weight─▶ none, one or more copies ─▶ Pieces

An entry is a path of the config, with all its files. Who is chosen follows from the seed and from what the
conversation says: the same ones for any order of the lines and any part size; a larger share adds to a smaller one.
Validation is thinned as training is, and holds no conversation twice.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import groupby

import numpy as np

from tasks.config import Config
from tasks.core.errors import DataError, UsageError
from tasks.packing.pieces import Pieces
from tasks.packing.placement import hold_out_at_least_one
from tasks.packing.seeded_order import order_of_contents
from tasks.recipe import Recipe
from tasks.storage.schemas import why
from tasks.storage.token_files import TokenColumns

MOST_PIECES = (1 << 31) - 1


def mix(pieces: Pieces, tokens: TokenColumns, recipe: Recipe) -> Pieces:
    """Pieces of the conversations that are chosen, with their further copies; `accepted.why` of the others is set.

    Raises DataError where token_share meets a source without a trained token, UsageError where copies are too many.
    """
    config, accepted = recipe.config, pieces.accepted
    if not is_mixed(config):
        return pieces
    orders = _orders(pieces, tokens, recipe)
    # A limit may have left all on one side.
    hold_out_at_least_one(accepted.held_out, accepted.why == 0, lambda: tokens.column("digest"), config.validation)
    counts = _token_shares(orders, pieces, tokens, config) if config.weighting == "token_share" else {}
    copies = np.zeros(len(accepted.length), np.uint16)
    for entry, order in orders.items():
        train, validation = (order[accepted.held_out[order] == held_out] for held_out in (False, True))
        whole, rest = divmod(config.sources[entry].weight, 1)
        if counts:
            whole, rest = 0, counts[entry] / len(train)
        copies[train] = whole
        copies[validation] = min(whole, 1)
        if rest:
            copies[train[: _share(rest, len(train))]] += 1
            copies[validation[: _share(rest, len(validation))]] = 1
    accepted.why[(accepted.why == 0) & (copies == 0)] = why("weight")
    return _copied(pieces, copies)


def is_mixed(config: Config) -> bool:
    """Whether a conversation may be packed more or less often than once."""
    return config.weighting == "token_share" or any(source.weight != 1 or source.limit for source in config.sources)


def _orders(pieces: Pieces, tokens: TokenColumns, recipe: Recipe) -> dict[int, np.ndarray]:
    """The conversations of each entry that are not over its limit, in the order in which they are chosen."""
    accepted, config, found = pieces.accepted, recipe.config, {}
    for entry, parts in groupby(range(len(recipe.parts)), key=lambda part: recipe.parts[part].file.entry):
        numbers = list(parts)
        first, last = int(accepted.edges[numbers[0]]), int(accepted.edges[numbers[-1] + 1])
        order = order_of_contents(tokens.column("digest", first, last), config.seed).astype(np.int32) + first
        order = order[accepted.why[order] == 0]
        limit = config.sources[entry].limit or len(order)
        accepted.why[order[limit:]] = why("limit")
        found[entry] = order[:limit]
    return found


def _share(share: float, count: int) -> int:
    """A share of a count, to the next whole number; at least one, where there is any."""
    return min(count, max(1, int(share * count + 0.5)))


def _token_shares(
    orders: dict[int, np.ndarray], pieces: Pieces, tokens: TokenColumns, config: Config
) -> dict[int, int]:
    """How many conversations of the training split each entry gives, so that trained tokens stand as the weights.

    The source that is smallest beside its weight gives all; each other is off by half a conversation at most.
    """
    accepted = pieces.accepted
    trained = tokens.column("trained")
    trained[pieces.cut_of] = 0
    np.add.at(trained, pieces.cut_of, pieces.cuts[:, 3])
    sums = {}
    for entry, order in orders.items():
        in_train = order[~accepted.held_out[order]]
        sums[entry] = np.cumsum(trained[in_train], dtype=np.int64)
    for entry, source in enumerate(config.sources):
        if entry not in sums or not len(sums[entry]):
            raise DataError(
                "empty_share",
                f"sources[{entry}] {source.path}: no conversation of it is left in the training split, so that it can "
                "have no share of the tokens (weighting: token_share); take it out, or look at filters and rejects",
            )
    scale = min(int(total[-1]) / config.sources[entry].weight for entry, total in sums.items())
    counts = {}
    for entry, total in sums.items():
        target = config.sources[entry].weight * scale
        above = min(int(np.searchsorted(total, target)), len(total) - 1)
        below = total[above - 1] if above else 0
        counts[entry] = max(1, above + int(total[above] - target <= target - below))
    return counts


def _copied(pieces: Pieces, copies: np.ndarray) -> Pieces:
    """The pieces of each conversation as often as `copies` says: a first pass over all, then a second, and so on.

    So copies of a conversation lie far apart among those of its length, and seldom in one row.
    """
    times = np.empty(len(pieces), np.uint16)
    for chunk in pieces.chunks():
        times[chunk] = copies[pieces.conversations(chunk)]
    total = int(times.sum(dtype=np.int64))
    if total > MOST_PIECES:
        raise UsageError(
            "bad_setting", f"weights: {total:,} copies are more than a plan can hold ({MOST_PIECES:,}); lower them"
        )
    passes = [pieces.of[times > number] for number in range(max(1, times.max(initial=0)))]
    return replace(pieces, of=np.concatenate(passes), once=len(passes[0]), copies=copies)
