"""Choose how often conversations are packed, by `limit` and `weight`.

    Pieces ─limit─▶ a seeded choice from each entry of `sources` ─weight─▶ zero, one, or more copies ─▶ Pieces

    proportions   the entry that is largest for its share is packed once, and the others as often as their shares need
    token_share   the entry that is smallest for its share is packed once, and the others in part

An entry is a path of the config with all its files. The choice depends only on the seed and the content of
conversations. It is the same for any order of lines and any part size, and a larger share extends a smaller one. The
held-out split is subsampled like the training split, but contains no conversation twice. An entry with
`split: validation` is packed once, and has no share. All samples of a conversation are packed equally often; the first
sample represents the conversation.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import groupby

import numpy as np

from packcorpus.tasks.config import Config
from packcorpus.tasks.core.errors import DataError, UsageError
from packcorpus.tasks.core.numbers import MOST, as_int32, order_of_contents
from packcorpus.tasks.core.printable import counted
from packcorpus.tasks.packing.held_out import hold_out_at_least_one
from packcorpus.tasks.packing.pieces import Accepted, Pieces
from packcorpus.tasks.recipe import Recipe
from packcorpus.tasks.storage.keys import RELATIVE
from packcorpus.tasks.storage.schemas import drop_code
from packcorpus.tasks.storage.token_files import TokenColumns

MOST_COPIES = 1000  # of a conversation, as with the largest weight


def mix(pieces: Pieces, tokens: TokenColumns, recipe: Recipe) -> Pieces:
    """Select pieces by limit and weight, and add further copies.

    Sets `accepted.reason` of the conversations left out.

    Raises DataError if a source has no conversation left to share (token_share), UsageError if there are too many
    copies.
    """
    config, accepted = recipe.config, pieces.accepted
    if not is_mixed(config):
        return pieces
    is_whole = config.weighting not in RELATIVE
    is_whole &= not any(source.weight % 1 or source.limit for source in config.sources)
    if is_whole:  # this needs neither an order nor the other conversations
        weights = np.array([int(config.sources[part.file.entry].weight) for part in recipe.parts], np.uint16)
        copies = np.repeat(weights, np.diff(accepted.edges))
        copies[accepted.held_out] = 1
        return _copied(pieces, copies)
    orders = _orders(pieces, tokens, recipe)
    # A limit may have left all conversations in one split.
    stays, groups = accepted.reason == 0, partial(tokens.column, config.grouped_by)
    hold_out_at_least_one(accepted.held_out, stays, groups, config.validation, accepted.fixed)
    copies = np.zeros(len(accepted.length), np.uint16)
    for entry in [entry for entry in orders if config.sources[entry].split == "validation"]:
        copies[orders.pop(entry)] = 1
    counts = {}
    if config.weighting in RELATIVE:
        sizes = _training_sizes(orders, accepted, config)
        in_proportion = config.weighting == "proportions"
        counts = _proportions(sizes, config) if in_proportion else _token_shares(orders, pieces, tokens, config)
    for entry, order in orders.items():
        train, validation = (order[accepted.held_out[order] == held_out] for held_out in (False, True))
        whole, rest = divmod(config.sources[entry].weight, 1)
        if counts:
            whole, further = divmod(counts[entry], len(train))
            rest = further / len(train)
        copies[train] = whole
        copies[validation] = min(whole, 1)
        if rest:
            copies[train[: _share(rest, len(train))]] += 1
            copies[validation[: _share(rest, len(validation))]] = 1
    copies = accepted.samples.of_each(copies)
    accepted.reason[(accepted.reason == 0) & (copies == 0)] = drop_code("weight")
    return _copied(pieces, copies)


def is_mixed(config: Config) -> bool:
    """Return whether any conversation may be packed other than exactly once."""
    return config.weighting in RELATIVE or any(source.weight != 1 or source.limit for source in config.sources)


def _orders(pieces: Pieces, tokens: TokenColumns, recipe: Recipe) -> dict[int, np.ndarray]:
    """Return the conversations of each entry within its limit, in seeded order."""
    accepted, config, orders = pieces.accepted, recipe.config, {}
    left = accepted.left()
    for entry, parts in groupby(range(len(recipe.parts)), key=lambda part: recipe.parts[part].file.entry):
        numbers = list(parts)
        first, last = int(accepted.edges[numbers[0]]), int(accepted.edges[numbers[-1] + 1])
        order = order_of_contents(tokens.column("digest", first, last), config.seed)
        order = as_int32(order + first, "conversations")
        order = order[left[order]]
        limit = config.sources[entry].limit or len(order)
        accepted.drop(order[limit:], "limit")
        orders[entry] = order[:limit]
    return orders


def _share(share: float, count: int) -> int:
    """Round a share of a count; the result is at least 1 if the count is not 0."""
    return min(count, max(1, int(share * count + 0.5)))


def _training_sizes(orders: dict[int, np.ndarray], accepted: Accepted, config: Config) -> dict[int, int]:
    """Count the conversations of each entry of `sources` in the training split.

    Raises DataError if an entry has none, so that it cannot have its share.
    """
    sizes = {entry: int(np.count_nonzero(~accepted.held_out[order])) for entry, order in orders.items()}
    for entry, source in enumerate(config.sources):
        if source.split != "validation" and not sizes.get(entry):
            raise DataError(
                "empty_share",
                f"sources[{entry}] {source.path}: has no conversation left in the training split, so weighting: "
                f"{config.weighting} cannot give it a share; remove the source, or check filters and rejects",
            )
    return sizes


def _proportions(sizes: dict[int, int], config: Config) -> dict[int, int]:
    """Count the copies of conversations so that their numbers match the weights.

    `sizes` are the conversations of each entry. None is left out: the entry that is largest for its weight is packed
    once. Raises UsageError if a conversation would be packed more than MOST_COPIES times.
    """
    weights = [source.weight for source in config.sources]
    scale = max(size / weights[entry] for entry, size in sizes.items())
    counts = {entry: max(size, int(weights[entry] * scale + 0.5)) for entry, size in sizes.items()}
    for entry, size in sizes.items():
        if counts[entry] > MOST_COPIES * size:
            raise UsageError(
                "bad_setting",
                f"sources[{entry}] {config.sources[entry].path}: weighting: proportions would pack its "
                f"{counted(size, 'conversation')} {counts[entry] / size:,.0f} times; lower its weight "
                f"({weights[entry]:g})",
            )
    return counts


def _token_shares(
    orders: dict[int, np.ndarray], pieces: Pieces, tokens: TokenColumns, config: Config
) -> dict[int, int]:
    """Count the conversations to take so that trained tokens match the weights.

    The counts are per entry of `sources`, for the training split. The scarcest source is used in full; the others are
    off by at most half a conversation.
    """
    accepted = pieces.accepted
    trained = tokens.column("trained")
    trained[pieces.cut_of] = 0
    np.add.at(trained, pieces.cut_of, pieces.cuts[:, 3])
    if accepted.samples.several:
        trained = accepted.samples.total(trained * (accepted.reason == 0))
    sums = {}
    for entry, order in orders.items():
        in_train = order[~accepted.held_out[order]]
        sums[entry] = np.cumsum(trained[in_train], dtype=np.int64)
    scale = min(int(total[-1]) / config.sources[entry].weight for entry, total in sums.items())
    counts = {}
    for entry, total in sums.items():
        target = config.sources[entry].weight * scale
        above = min(int(np.searchsorted(total, target)), len(total) - 1)
        below = total[above - 1] if above else 0
        counts[entry] = max(1, above + int(total[above] - target <= target - below))
    return counts


def _copied(pieces: Pieces, copies: np.ndarray) -> Pieces:
    """Repeat the pieces of each conversation `copies` times, pass by pass.

    Copies of a conversation are therefore far apart among conversations of equal length, and rarely share a row.
    """
    times = np.empty(len(pieces), np.uint16)
    for chunk in pieces.chunks():
        times[chunk] = copies[pieces.conversations(chunk)]
    total = int(times.sum(dtype=np.int64))
    if total > MOST:
        raise UsageError(
            "bad_setting", f"weights: {total:,} copies exceed the limit of a plan ({MOST:,}); lower the weights"
        )
    passes = [pieces.of[times > number] for number in range(max(1, times.max(initial=0)))]
    return replace(pieces, of=np.concatenate(passes), once=len(passes[0]), copies=copies)
