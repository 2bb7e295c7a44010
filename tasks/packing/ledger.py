"""Account for every conversation and token; an unbalanced ledger fails the run.

Accepted, Pieces ─tally─▶ sums per source and split, first copies and further copies apart ─▶ figures
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np

from tasks.config import Config
from tasks.conversations.keys.unused import sum_counts
from tasks.packing.pieces import CHUNK, Accepted, Pieces, piece_counts
from tasks.packing.placement import Placed
from tasks.packing.rejects import Rejected
from tasks.recipe import Recipe
from tasks.storage.manifest import Ledger
from tasks.storage.schemas import DROP_REASONS, REJECTED, SAMPLE_DROP_REASONS
from tasks.storage.token_files import TokenColumns


@dataclass(slots=True)
class Tally:
    """Sums over the pieces of one packing of the training split.

    Each is int64[sources, 2, 2]: by source, held out (1) or not (0), further copy (1) or first (0). Multiply by
    `times` for all packings.
    """

    pieces: np.ndarray
    places: np.ndarray  # tokens, separators included
    trained: np.ndarray
    separators: np.ndarray
    times: np.ndarray  # int64[2], packings of the training split and of the held-out split

    def total(self, name: str) -> int:
        """Sum over all rows of all splits."""
        return int((getattr(self, name).sum(axis=(0, 2)) * self.times).sum())

    def once(self, name: str) -> int:
        """Sum over the first copies."""
        return int(getattr(self, name)[:, :, 0].sum())

    def of_sources(self, name: str) -> np.ndarray:
        """Sum over all rows of all splits, per source: int64[sources]."""
        found: np.ndarray = getattr(self, name).sum(axis=2) @ self.times
        return found


def tally(pieces: Pieces, tokens: TokenColumns, recipe: Recipe) -> Tally:
    """Sum up the pieces of each source, in constant memory."""
    accepted, numbers = pieces.accepted, source_numbers(recipe)
    sums = np.zeros((4, 4 * len(recipe.files)))
    for further, (top, bottom) in enumerate(((0, pieces.once), (pieces.once, len(pieces)))):
        for chunk in pieces.chunks(top, bottom):
            found = pieces.columns(chunk)
            group = 4 * numbers[accepted.part(found.conversation)]
            group += 2 * accepted.held_out[found.conversation] + further
            for at, values in enumerate((None, found.length, pieces.trained(chunk, tokens), found.separator)):
                sums[at] += np.bincount(group, values, minlength=sums.shape[1])
    count, places, trained, separators = sums.astype(np.int64).reshape(4, -1, 2, 2)
    return Tally(count, places, trained, separators, np.array([recipe.config.epochs, 1]))


@dataclass(slots=True)
class Losses:
    """What conversations lost that are not packed as they are.

    Tokens do not include separators.
    """

    dropped: dict[str, int]  # conversations, by reason
    truncated: int = 0  # conversations
    split: int = 0  # conversations
    pieces: int = 0  # pieces of split conversations without a trained token
    tokens_dropped: int = 0
    tokens_truncated: int = 0
    tokens_rejected: int = 0


def count_losses(pieces: Pieces, config: Config) -> Losses:
    """Count what limits, filters, and the overlong policy removed.

    A conversation counts once, however often it is packed.
    """
    accepted, outcomes = pieces.accepted, pieces.accepted.outcomes()
    lost, ends = Losses({}), np.zeros(REJECTED + 1, np.int64)
    for top in range(0, len(accepted.length), CHUNK):
        chunk = slice(top, top + CHUNK)
        encoded, reasons = accepted.encoded(chunk), accepted.reason[chunk]
        ends += np.bincount(outcomes[chunk], minlength=len(ends))
        lost.tokens_rejected += int(encoded[reasons == REJECTED].sum())
        lost.tokens_dropped += int(encoded[(reasons > 0) & (reasons != REJECTED)].sum())
    dropped = dict(zip(DROP_REASONS, ends[1:].tolist(), strict=False))
    lost.dropped = {reason: count for reason, count in dropped.items() if count or reason == "too_long"}
    stays = accepted.reason[pieces.cut_of] == 0
    of, (first, taken, closed, _) = pieces.cut_of[stays], pieces.cuts[stays].T
    cut = np.unique(of)
    separators = accepted.separator[of] & (first + taken == accepted.length[of])
    gone = int(accepted.encoded(cut).sum()) - int(taken.sum()) + int(separators.sum())
    if config.overlong == "split":
        lost.split, lost.tokens_dropped = _conversations(cut, accepted), lost.tokens_dropped + gone
        lost.pieces = int(piece_counts(accepted.length[cut], config.sequence_length).sum()) - len(of)
    else:
        lost.truncated, lost.tokens_truncated = _conversations(of[closed == 1], accepted), gone
    return lost


def _conversations(samples: np.ndarray, accepted: Accepted) -> int:
    """Count the conversations of some samples."""
    return len(np.unique(accepted.samples.first_of(samples)))


def count_samples(pieces: Pieces, tokens: TokenColumns) -> dict[str, Any] | None:
    """Count the samples and the prompt tokens that they repeat; None if every conversation is one sample."""
    accepted = pieces.accepted
    if not accepted.samples.several:
        return None
    counts = np.bincount(accepted.reason, minlength=REJECTED + 1).tolist()
    dropped = zip(SAMPLE_DROP_REASONS, counts[1:], strict=False)
    return {
        "read": len(accepted.reason),
        "packed": counts[0],
        "rejected": counts[REJECTED],
        "dropped": {reason: count for reason, count in dropped if count},
        "repeated_prompt_tokens": int(repeated_prompt_tokens(pieces, tokens).sum()),
    }


def repeated_prompt_tokens(pieces: Pieces, tokens: TokenColumns) -> np.ndarray:
    """Count the prompt tokens of each sample that its conversation's packed sample before it has, too: int64[samples].

    These are its untrained tokens, at most as many as that sample has tokens: an upper bound if the template leaves out
    something of the history. Further copies do not count.
    """
    accepted = pieces.accepted
    length, untrained = np.zeros(len(accepted.length), np.int64), np.zeros(len(accepted.length), np.int64)
    for chunk in pieces.chunks(0, pieces.once):
        found = pieces.columns(chunk)
        np.add.at(length, found.conversation, found.length)
        np.add.at(untrained, found.conversation, found.length - pieces.trained(chunk, tokens))
    packed = np.flatnonzero(accepted.reason == 0)
    first = accepted.samples.first_of(packed)
    repeated = np.zeros(len(accepted.length), np.int64)
    repeated[packed[1:]] = np.minimum(untrained[packed[1:]], length[packed[:-1]]) * (first[1:] == first[:-1])
    return repeated


def make_ledger(
    receipts: list[dict[str, Any]],
    pieces: Pieces,
    sums: Tally,
    lost: Losses,
    rejects: list[Rejected],
    places: int,
    samples: dict[str, Any] | None = None,
) -> Ledger:
    """Build the manifest's ledger.

    `places` is rows × sequence_length, or 0 without packing. Raises DataError if it does not balance.
    """
    packed = sums.total("places")
    repeated = packed - sums.total("separators") - (sums.once("places") - sums.once("separators"))
    values = {
        "conversations": {
            "read": sum(receipt["conversations"] for receipt in receipts),
            "packed": int(np.count_nonzero(pieces.accepted.left())),
            "rejected": dict(sorted(Counter(reject.reason for reject in rejects).items())),
            "dropped": lost.dropped,
            "truncated": lost.truncated,
            "split": lost.split,
        },
        "pieces": {"packed": sums.total("pieces"), "dropped": lost.pieces},
        "tokens": {
            "encoded": sum(receipt["tokens"] for receipt in receipts) - lost.tokens_rejected,
            "separators": sums.total("separators"),
            "repeated": repeated,
            "truncated": lost.tokens_truncated,
            "dropped": lost.tokens_dropped,
            "rejected": lost.tokens_rejected,
            "packed": packed,
            "padding": places - packed if places else 0,
            "trained": sums.total("trained"),
        },
    }
    ledger = Ledger.model_validate(values | ({"samples": samples} if samples else {}))
    ledger.check(places)
    return ledger


def packing_metadata(config: Config, sums: Tally, placed: list[Placed], algorithm: str) -> dict[str, Any]:
    """Compute how full the rows are, and compare their number with the lower bound.

    The figures are summed over the splits.
    """
    rows = sum(block.rows for block in placed)
    bounds = [bound for block in placed for bound in block.lower_bounds]
    bound = sum(rows for rows, _ in bounds)
    places = rows * config.sequence_length
    per_row = round(sums.total("pieces") / rows, 4)
    return {
        "enabled": config.packing,
        "algorithm": algorithm,
        "rows": rows,
        "lower_bound_rows": bound,
        "lower_bound": ", ".join(sorted({name for _, name in bounds if name})),
        "above_lower_bound_percent": round(100 * (rows / bound - 1), 4),
        "packing_efficiency": round(100 * sums.total("places") / places, 4) if config.packing else None,
        "avg_conversations_per_sequence": per_row,
        "compression_ratio": per_row,
    }


def source_facts(recipe: Recipe, receipts: list[dict[str, Any]], pieces: Pieces, sums: Tally) -> list[dict[str, Any]]:
    """Summarize what each source file contributed."""
    accepted, numbers = pieces.accepted, source_numbers(recipe)
    trained, edges = sums.of_sources("trained"), _source_edges(recipe, accepted)
    found = []
    for index, file in enumerate(recipe.files):
        own = [receipt for receipt, number in zip(receipts, numbers, strict=True) if number == index]
        late = np.flatnonzero(accepted.reason[edges[index] : edges[index + 1]] == REJECTED) + edges[index]
        read = sum(receipt["conversations"] for receipt in own)
        taken = sum(receipt["accepted"] for receipt in own) - _conversations(late, accepted)
        tokens = sum(receipt["tokens"] for receipt in own) - int(accepted.encoded(late).sum())
        found.append(
            {
                "path": file.name,
                "format": file.format,
                "entry": file.entry,
                "bytes": file.bytes,
                "sha256": file.sha256,
                "conversations": read,
                "accepted": taken,
                "rejected": read - taken,
                "tokens": tokens,
                "trained_tokens": int(trained[index]),
            }
        )
    return found


def unused_keys(recipe: Recipe, receipts: list[dict[str, Any]]) -> dict[str, dict[str, int]]:
    """Return how often each unused key occurred, by source, for sources that have some.

    The receipts of an earlier version do not count them.
    """
    parts: dict[str, list[dict[str, int]]] = {file.name: [] for file in recipe.files}
    for receipt, number in zip(receipts, source_numbers(recipe), strict=True):
        parts[recipe.files[number].name].append(receipt.get("unused_keys", {}))
    return {name: counts for name, own in parts.items() if (counts := sum_counts(own))}


def mixture_facts(recipe: Recipe, pieces: Pieces, sums: Tally) -> list[dict[str, Any]]:
    """Summarize what each entry of `sources` contributes to a pass over `train`."""
    accepted, edges, left = pieces.accepted, _source_edges(recipe, pieces.accepted), pieces.accepted.left()
    facts: list[dict[str, Any]] = [
        {"path": source.path, "weight": source.weight, "limit": source.limit}
        | dict.fromkeys(("conversations", "copies", "tokens", "trained_tokens"), 0)
        for source in recipe.config.sources
    ]
    for number, file in enumerate(recipe.files):
        inside = slice(edges[number], edges[number + 1])
        chosen = left[inside] & ~accepted.held_out[inside]
        fact, count = facts[file.entry], int(np.count_nonzero(chosen))
        fact["conversations"] += count
        fact["copies"] += count if pieces.copies is None else int(pieces.copies[inside][chosen].sum(dtype=np.int64))
        fact["tokens"] += int(sums.places[number, 0].sum())
        fact["trained_tokens"] += int(sums.trained[number, 0].sum())
    for name in ("tokens", "trained_tokens"):
        total = max(1, sum(fact[name] for fact in facts))
        for fact in facts:
            fact[f"{name}_percent"] = round(100 * fact[name] / total, 4)
    return facts


def _source_edges(recipe: Recipe, accepted: Accepted) -> list[int]:
    """Return the number of conversations before each source, and the total."""
    firsts = np.searchsorted(source_numbers(recipe), np.arange(len(recipe.files) + 1))
    return accepted.edges[firsts].tolist()


def source_numbers(recipe: Recipe) -> np.ndarray:
    """Return the index in recipe.files of the file of each part: int32[parts]."""
    places = {id(file): index for index, file in enumerate(recipe.files)}
    return np.array([places[id(part.file)] for part in recipe.parts], np.int32)
