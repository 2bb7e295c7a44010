"""What is placed in rows: conversations that fit, and the pieces of those that do not.

    Accepted (a column for each fact) ─cut_overlong─▶ Pieces; `why` of those that go

A conversation that fits is one piece. What becomes of an over-long one is the config's `overlong`: truncate keeps
its first piece, split every piece that has a trained token, drop none; error stops the run.

Columns are as narrow as they can be, since there are millions of conversations: what a token file says, and nothing
else needs at once, is read again where it is written.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from tasks.core.errors import DataError
from tasks.recipe import Recipe
from tasks.storage.schemas import REJECTED, why
from tasks.storage.token_files import TokenColumns

CHUNK = 1 << 18  # conversations or pieces that are handled at a time


@dataclass(slots=True)
class Accepted:
    """Columns over all accepted conversations, in source order."""

    edges: np.ndarray  # int64[parts + 1], conversations before each part
    length: np.ndarray  # int32, tokens, the separator included
    separator: np.ndarray  # bool
    held_out: np.ndarray  # bool
    why: np.ndarray  # uint8, 0 where it is packed

    def part(self, conversations: np.ndarray) -> np.ndarray:
        """int64, the parts that conversations are of."""
        return np.searchsorted(self.edges, conversations, side="right") - 1

    def encoded(self, chosen: slice | np.ndarray) -> np.ndarray:
        """int32, tokens without the separator."""
        return self.length[chosen] - self.separator[chosen]


class Cut(NamedTuple):
    """A piece of an over-long conversation."""

    first: int
    taken: int
    closed: bool
    trained: int


class Columns(NamedTuple):
    """What a row of a plan needs to know of pieces."""

    conversation: np.ndarray  # int32, into Accepted
    first: np.ndarray  # int32, first token of the conversation that stands here
    taken: np.ndarray  # int32, how many stand here
    closed: np.ndarray  # bool, cut off here: an untrained EOS follows
    length: np.ndarray  # int32, places in the row
    separator: np.ndarray  # bool, the last place is an EOS that was added behind the template's tokens


@dataclass(slots=True)
class Pieces:
    """The pieces that are placed in rows: each conversation once, in source order, then further copies, pass by pass.

    `of` is the number of the conversation where a piece is all of it; from len(accepted.length) on, the number of a
    cut. `once` pieces are the first copies; `copies` is for each conversation, None where each is packed once.
    """

    accepted: Accepted
    of: np.ndarray  # int32[pieces]
    once: int
    cut_of: np.ndarray  # int32[cuts], conversation
    cuts: np.ndarray  # int32[cuts, 4], first, taken, closed, trained
    copies: np.ndarray | None = None  # uint16[conversations]

    def __len__(self) -> int:
        return len(self.of)

    def conversation(self, piece: int) -> int:
        """Of one piece, into Accepted."""
        return int(self.conversations(slice(piece, piece + 1))[0])

    def conversations(self, chosen: slice | np.ndarray) -> np.ndarray:
        """int32, into Accepted."""
        of = self.of[chosen]
        cut = of >= len(self.accepted.length)
        if cut.any():
            of = of.copy()
            of[cut] = self.cut_of[of[cut] - len(self.accepted.length)]
        return of

    def columns(self, chosen: slice | np.ndarray) -> Columns:
        accepted = self.accepted
        of, conversation = self.of[chosen], self.conversations(chosen)
        first, taken = np.zeros_like(of), accepted.length[conversation]
        closed = np.zeros(len(of), np.bool_)
        cut = np.flatnonzero(of >= len(accepted.length))
        if len(cut):
            first[cut], taken[cut], closed[cut], _ = self.cuts[of[cut] - len(accepted.length)].T
        ends_here = first + taken == accepted.length[conversation]
        separator = closed | (accepted.separator[conversation] & ends_here)
        return Columns(conversation, first, taken, closed, taken + closed, separator)

    def trained(self, chosen: slice, tokens: TokenColumns) -> np.ndarray:
        """int32, trained tokens of each piece; read anew from the token files."""
        conversation = self.conversations(chosen)
        first, last = (int(conversation.min()), int(conversation.max()) + 1) if len(conversation) else (0, 0)
        found = tokens.column("trained", first, last)[conversation - first]
        cut = np.flatnonzero(self.of[chosen] >= len(self.accepted.length))
        found[cut] = self.cuts[self.of[chosen][cut] - len(self.accepted.length), 3]
        return found

    def chunks(self, first: int = 0, last: int | None = None) -> Iterator[slice]:
        """The pieces [first, last) in slices of CHUNK."""
        last = len(self.of) if last is None else last
        for top in range(first, last, CHUNK):
            yield slice(top, min(top + CHUNK, last))

    def lengths(self) -> np.ndarray:
        """int32[pieces], places in the rows."""
        if self.copies is None and not len(self.cut_of) and len(self.of) == len(self.accepted.length):
            return self.accepted.length
        found = np.empty(len(self.of), np.int32)
        for chunk in self.chunks():
            found[chunk] = self.columns(chunk).length
        return found

    def held_out(self) -> np.ndarray:
        """bool[pieces]"""
        found = np.empty(len(self.of), np.bool_)
        for chunk in self.chunks():
            found[chunk] = self.accepted.held_out[self.conversations(chunk)]
        return found


def cut_overlong(accepted: Accepted, tokens: TokenColumns, recipe: Recipe) -> Pieces:
    """Pieces of the conversations that stay. `accepted.why` becomes REJECTED where no trained token is left.

    Raises DataError where the policy is error and a conversation is over-long. Without packing a row is a whole
    conversation, and what is over-long stays whole: the trainer that tokenises it cuts it.
    """
    config = recipe.config
    stays = accepted.why == 0
    is_long = stays & (accepted.length > config.sequence_length)
    if config.overlong == "error" and is_long.any():
        raise DataError("too_long_conversation", _too_long(accepted, is_long, tokens, recipe))
    if config.overlong == "drop":
        accepted.why[is_long] = why("too_long")
    elif not config.packing:
        is_long[:] = False
    # An answer that became the conversation's first token, or none, leaves nothing to train on.
    for top in range(0, len(stays), CHUNK):
        chunk = slice(top, min(top + CHUNK, len(stays)))
        untrained = tokens.column("trained", chunk.start, chunk.stop) == 0
        accepted.why[chunk][stays[chunk] & ~is_long[chunk] & untrained] = REJECTED
    owners, cuts = array("i"), array("i")
    for conversation in np.flatnonzero(is_long).tolist() if config.overlong in ("truncate", "split") else ():
        found = cut_conversation(tokens.tokens(conversation), config.sequence_length, config.overlong == "split")
        kept = [cut for cut in found if cut.trained]
        if not kept:
            accepted.why[conversation] = REJECTED
        owners.extend([conversation] * len(kept))
        for cut in kept:
            cuts.extend(cut)
    cut_of = np.array(owners, np.int32)
    of = whole = numbers_where((accepted.why == 0) & ~is_long)
    if len(cut_of):
        of = np.insert(whole, np.searchsorted(whole, cut_of), len(accepted.length) + np.arange(len(cut_of)))
    return Pieces(accepted, of.astype(np.int32, copy=False), len(of), cut_of, np.array(cuts, np.int32).reshape(-1, 4))


def numbers_where(chosen: np.ndarray) -> np.ndarray:
    """int32, where `chosen` is true. numpy's own would take 8 bytes for each."""
    parts = (np.flatnonzero(chosen[top : top + CHUNK]) + top for top in range(0, len(chosen), CHUNK))
    found, end = np.empty(np.count_nonzero(chosen), np.int32), 0
    for part in parts:
        found[end : end + len(part)] = part
        end += len(part)
    return found


def cut_conversation(values: np.ndarray, length: int, split: bool) -> list[Cut]:
    """Cut the tokens of a conversation (int32, ~id where untrained) into pieces of at most `length` places.

    A piece that is cut off takes one token less than a row and is closed by an untrained EOS: a model must not learn
    to stop in mid-sentence. Its first token has nothing before it and is not trained.
    """
    cuts: list[Cut] = []
    first = 0
    while first < len(values):
        rest = len(values) - first
        closed = rest > length
        taken = length - 1 if closed else rest
        trained = int((values[first + 1 : first + taken] >= 0).sum())
        cuts.append(Cut(first, taken, closed, trained))
        first += taken
        if not split:
            break
    return cuts


def pieces_of(length: np.ndarray, row: int) -> np.ndarray:
    """How many pieces `cut_conversation` makes of conversations of so many tokens, when it splits them."""
    return np.maximum(1, -(-(length - 1) // (row - 1)))


def _too_long(accepted: Accepted, is_long: np.ndarray, tokens: TokenColumns, recipe: Recipe) -> str:
    first = int(np.flatnonzero(is_long)[0])
    part = int(accepted.part(np.array([first]))[0])
    record = int(tokens.column("record", first, first + 1)[0])
    return (
        f"{recipe.parts[part].file.name}:{record + 1}: {accepted.length[first]:,} tokens are more than sequence_length "
        f"{recipe.config.sequence_length:,} ({int(is_long.sum()):,} conversations are); overlong: truncate, drop or "
        "split says what to do with them"
    )
