"""Count the prompts that the training split and the validation split share.

    prompts of held-out conversations ─┐
    prompts of trained conversations ──┴─ the same hash ─▶ shared

A model that has seen an answer to a prompt is not tested by another answer to it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from packcorpus.tasks.packing.held_out import is_in
from packcorpus.tasks.packing.pieces import CHUNK, Pieces
from packcorpus.tasks.storage.token_files import TokenColumns


def count_leaks(pieces: Pieces, tokens: TokenColumns) -> dict[str, Any] | None:
    """Return how many conversations are held out, and counts of their prompts.

    The result is HeldOutFacts (storage/facts.py), or None if nothing is held out. A hash that is that of the content
    says that there is no prompt. Memory is bounded by the held-out conversations.
    """
    accepted = pieces.accepted
    left = accepted.left()
    held = int(np.count_nonzero(left & accepted.held_out))
    if not held:
        return None
    prompts = np.unique(np.concatenate([*_prompts(left & accepted.held_out, tokens)]))
    shared = np.zeros(len(prompts), np.bool_)
    for values in _prompts(left & ~accepted.held_out, tokens) if len(prompts) else ():
        found = values[is_in(values, prompts)]
        shared[np.searchsorted(prompts, found)] = True
    return {
        "conversations": held,
        "percent": round(100 * held / int(np.count_nonzero(left)), 4),
        "prompts": len(prompts),
        "shared": int(np.count_nonzero(shared)),
    }


def _prompts(chosen: np.ndarray, tokens: TokenColumns) -> Iterator[np.ndarray]:
    """Yield the prompts of chosen conversations (bool[samples]), uint64."""
    for top in range(0, len(chosen), CHUNK):
        inside = chosen[top : top + CHUNK]
        prompts, contents = (tokens.column(name, top, top + len(inside))[inside] for name in ("prompt", "digest"))
        yield prompts[prompts != contents]
