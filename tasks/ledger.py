"""The ledger: where every conversation and every token went. Where it does not close, the run fails."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np

from tasks.errors import DataError
from tasks.pieces import Accepted, Lost, Pieces
from tasks.placement import Placed
from tasks.recipe import Recipe
from tasks.rejects import Rejected


def make_ledger(
    receipts: list[dict[str, Any]], accepted: Accepted, pieces: Pieces, lost: Lost, rejects: list[Rejected], places: int
) -> dict[str, Any]:
    """The manifest's ledger; `places` is rows × sequence_length, or 0 without packing. Raises DataError."""
    packed = int(pieces.lengths.sum())
    ledger = {
        "conversations": {
            "read": sum(receipt["conversations"] for receipt in receipts),
            "packed": int(np.count_nonzero(np.diff(pieces.conversation, prepend=-1))),
            "rejected": dict(sorted(Counter(reject.reason for reject in rejects).items())),
            "dropped": {"too_long": lost.dropped},
            "truncated": lost.truncated,
            "split": lost.split,
        },
        "pieces": {"packed": len(pieces.conversation), "dropped": lost.pieces},
        "tokens": {
            "encoded": sum(receipt["tokens"] for receipt in receipts) - lost.tokens_rejected,
            "separators": int(pieces.separators(accepted).sum()),
            "truncated": lost.tokens_truncated,
            "dropped": lost.tokens_dropped,
            "rejected": lost.tokens_rejected,
            "packed": packed,
            "padding": places - packed if places else 0,
            "trained": int(pieces.trained.sum()),
        },
    }
    check_ledger(ledger)
    return ledger


def check_ledger(ledger: dict[str, Any]) -> None:
    """Raises DataError where conversations or tokens do not add up: something was lost, and the run must not pass."""
    conversations, tokens = ledger["conversations"], ledger["tokens"]
    ended = conversations["packed"] + sum(conversations["rejected"].values()) + sum(conversations["dropped"].values())
    if conversations["read"] != ended:
        raise DataError(
            "open_ledger", f"the ledger does not close: {conversations['read']:,} conversations read, {ended:,} ended"
        )
    gone_in = tokens["encoded"] + tokens["separators"]
    come_out = tokens["packed"] + tokens["truncated"] + tokens["dropped"]
    if gone_in != come_out:
        raise DataError("open_ledger", f"the ledger does not close: {gone_in:,} tokens went in, {come_out:,} came out")


def packing_metadata(recipe: Recipe, pieces: Pieces, placed: Placed, algorithm: str) -> dict[str, Any]:
    """How full the rows are, beside the rows that no packing can go below (summed over the splits)."""
    config = recipe.config
    bound = sum(rows for rows, _ in placed.lower_bounds)
    places = placed.rows * config.sequence_length
    per_row = round(len(pieces.conversation) / placed.rows, 4)
    return {
        "enabled": config.packing,
        "algorithm": algorithm,
        "rows": placed.rows,
        "lower_bound_rows": bound,
        "lower_bound": ", ".join(sorted({name for _, name in placed.lower_bounds if name})),
        "above_lower_bound_percent": round(100 * (placed.rows / bound - 1), 4),
        "packing_efficiency": round(100 * int(pieces.lengths.sum()) / places, 4) if config.packing else None,
        "avg_conversations_per_sequence": per_row,
        "compression_ratio": per_row,
    }


def source_facts(
    recipe: Recipe, receipts: list[dict[str, Any]], accepted: Accepted, pieces: Pieces, late: np.ndarray
) -> list[dict[str, Any]]:
    """What each source file contributed. `late` are the conversations that were rejected after encoding."""
    numbers = source_numbers(recipe)

    def total(conversations: np.ndarray, weights: np.ndarray | None = None) -> np.ndarray:
        """Sum over the conversations of each source; int64[sources]."""
        of_source = numbers[accepted.part[conversations]]
        return np.bincount(of_source, weights=weights, minlength=len(recipe.files)).astype(np.int64)

    trained = total(pieces.conversation, pieces.trained)
    late_count, late_tokens = total(late), total(late, accepted.encoded[late])
    found = []
    for index, file in enumerate(recipe.files):
        own = [receipt for receipt, number in zip(receipts, numbers, strict=True) if number == index]
        read = sum(receipt["conversations"] for receipt in own)
        taken = sum(receipt["accepted"] for receipt in own) - int(late_count[index])
        tokens = sum(receipt["tokens"] for receipt in own) - int(late_tokens[index])
        found.append(
            {
                "path": file.name,
                "format": file.format,
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


def source_numbers(recipe: Recipe) -> np.ndarray:
    """Place in recipe.files of each part; int32[parts]."""
    places = {id(file): index for index, file in enumerate(recipe.files)}
    return np.array([places[id(part.file)] for part in recipe.parts], np.int32)
