"""Samples of one corpus → the pieces in its rows, and their weights in the loss.

    ids, trained, in rows of 64 ─pieces_of─▶ [(0, ids, trained)], or several with overlong: split, or none

- A sample that fits in a row is one piece. `truncate` keeps the first piece of a longer one, `split` all, `drop` none.
- A piece that is cut has one token less than a row, and an EOS after it that is not trained on.
- `turns` keeps a longer sample up to the end of the last trained turn with which it fits in a row. Each run of trained
  tokens is a turn. If its last token is not EOS, an EOS that is not trained on follows and has to fit, too. If no turn
  fits, nothing is kept.
- The first token of a piece is not trained on. A piece without a trained token is left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from reference.tokens import Encoded

Place = tuple[int, int]  # source, record


class Piece(NamedTuple):
    """The portion of a sample in one row; `first` is its offset in the sample."""

    first: int
    ids: list[int]
    trained: list[bool]


def pieces_of(sample: Encoded, length: int, overlong: str, eos: int) -> list[Piece]:
    """Return the pieces of a sample in rows of at most `length` tokens."""
    ids, trained = sample
    if len(ids) <= length:
        return [Piece(0, ids, trained)] * any(trained)
    if overlong == "drop":
        return []
    if overlong == "turns":
        ends = [at for at in range(1, len(ids)) if trained[at - 1] and not trained[at]]
        closed = [([*ids[:end], eos], True) if ids[end - 1] != eos else (ids[:end], False) for end in ends]
        fitting = [(own, added, end) for end, (own, added) in zip(ends, closed, strict=True) if len(own) <= length]
        return [Piece(0, own, trained[:end] + [False] * added) for own, added, end in fitting[-1:]]
    found, first = [], 0
    while first < len(ids):
        is_last = len(ids) - first <= length
        taken = len(ids) - first if is_last else length - 1
        flags = [False, *trained[first + 1 : first + taken], *[False] * (not is_last)]
        found.append(Piece(first, ids[first : first + taken] + [eos] * (not is_last), flags))
        first += taken
    return [piece for piece in found[: None if overlong == "split" else 1] if any(piece.trained)]


def weights_of(
    pieces: Mapping[Place, Sequence[Piece]], copies: Mapping[Place, int], of_data: Mapping[Place, float], mode: str
) -> dict[Place, float]:
    """Return the weight of each trained token, by the place of its conversation.

    `pieces` has the pieces of the conversations of one split, and `copies` how often each is packed.
    """
    trained = {place: sum(sum(piece.trained) for piece in of_place) for place, of_place in pieces.items()}
    mean = sum(trained[place] * copies[place] for place in pieces) / max(1, sum(copies[place] for place in pieces))
    of_length = {place: mean / count if mode in ("conversation", "both") else 1.0 for place, count in trained.items()}
    return {place: of_length[place] * (of_data[place] if mode in ("data", "both") else 1.0) for place in trained}
