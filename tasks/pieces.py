"""What is placed in rows: conversations that fit, and the pieces of those that do not.

    Accepted (a column for each fact) ─cut_overlong─▶ Pieces, what was lost, and who has no trained token left

A conversation that fits is one piece. What becomes of an over-long one is the config's `overlong`: truncate keeps
its first piece, split every piece that has a trained token, drop none; error stops the run.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import NamedTuple

import numpy as np

from tasks.config import Config
from tasks.errors import DataError
from tasks.recipe import Recipe
from tasks.token_files import TokenFiles


@dataclass(slots=True)
class Accepted:
    """Columns over all accepted conversations, in source order."""

    part: np.ndarray  # int32
    place: np.ndarray  # int32, row of the token file
    record: np.ndarray  # int64, within the source, from 0
    length: np.ndarray  # int32, tokens, the separator included
    trained: np.ndarray  # int32
    separator: np.ndarray  # bool
    held_out: np.ndarray  # bool

    @property
    def encoded(self) -> np.ndarray:
        """int32, tokens without the separator."""
        return self.length - self.separator


@dataclass(slots=True)
class Pieces:
    """Columns over the pieces that are placed in rows, in source order."""

    conversation: np.ndarray  # int64, into Accepted
    first: np.ndarray  # int32, first token of the conversation that stands here
    taken: np.ndarray  # int32, how many stand here
    closed: np.ndarray  # bool, cut off here: an untrained EOS follows
    trained: np.ndarray  # int32

    def __getitem__(self, chosen: slice | np.ndarray) -> Pieces:
        return Pieces(*(getattr(self, field.name)[chosen] for field in fields(self)))

    @property
    def lengths(self) -> np.ndarray:
        """int32, places that the piece takes in a row."""
        return self.taken + self.closed

    def separators(self, accepted: Accepted) -> np.ndarray:
        """bool, whether the piece's last place is an EOS that was added behind the template's tokens."""
        ends_here = self.first + self.taken == accepted.length[self.conversation]
        return self.closed | (accepted.separator[self.conversation] & ends_here)


@dataclass(slots=True)
class Lost:
    """What the policy took away. Tokens do not count separators."""

    dropped: int = 0  # conversations
    truncated: int = 0  # conversations
    split: int = 0  # conversations
    pieces: int = 0  # pieces of split conversations without a trained token
    tokens_dropped: int = 0
    tokens_truncated: int = 0
    tokens_rejected: int = 0


class Cut(NamedTuple):
    first: int
    taken: int
    closed: bool
    trained: int


def cut_overlong(accepted: Accepted, tokens: TokenFiles, recipe: Recipe) -> tuple[Pieces, Lost, np.ndarray]:
    """Pieces to place, what was lost, and the conversations with no trained token left (int64, into Accepted).

    Raises DataError where the policy is error and a conversation is over-long. Without packing a row is a whole
    conversation, and what is over-long stays whole: the trainer that tokenises it cuts it.
    """
    config = recipe.config
    lost = Lost()
    is_long = accepted.length > config.sequence_length
    if config.overlong == "error" and is_long.any():
        raise DataError("too_long_conversation", _too_long(accepted, is_long, recipe))
    if config.overlong == "drop":
        lost.dropped = int(is_long.sum())
        lost.tokens_dropped = int(accepted.encoded[is_long].sum())
    elif not config.packing:
        is_long[:] = False
    # An answer that became the conversation's first token, or none, leaves nothing to train on.
    without: list[int] = np.flatnonzero(~is_long & (accepted.trained == 0)).tolist()
    lost.tokens_rejected += int(accepted.encoded[without].sum())
    whole = np.flatnonzero(~is_long & (accepted.trained > 0))
    owners: list[int] = []
    cuts: list[Cut] = []
    for conversation in np.flatnonzero(is_long).tolist() if config.overlong in ("truncate", "split") else ():
        kept = _cut_one(conversation, accepted, tokens, config, lost)
        if not kept:
            without.append(conversation)
        owners += [conversation] * len(kept)
        cuts += kept
    columns = np.array(cuts, np.int64).reshape(-1, 4).T
    places = np.searchsorted(whole, owners)
    nothing = np.zeros(len(whole), np.int32)
    pieces = Pieces(
        conversation=np.insert(whole, places, owners),
        first=np.insert(nothing, places, columns[0]),
        taken=np.insert(accepted.length[whole], places, columns[1]),
        closed=np.insert(nothing.astype(np.bool_), places, columns[2]),
        trained=np.insert(accepted.trained[whole], places, columns[3]),
    )
    return pieces, lost, np.sort(np.array(without, np.int64))


def _cut_one(conversation: int, accepted: Accepted, tokens: TokenFiles, config: Config, lost: Lost) -> list[Cut]:
    """Pieces of one over-long conversation that have a trained token; what goes is added to `lost`."""
    values = tokens.tokens(int(accepted.part[conversation]), int(accepted.place[conversation]))
    separator = bool(accepted.separator[conversation])
    cuts = cut_conversation(values, config.sequence_length, split=config.overlong == "split")
    kept = [cut for cut in cuts if cut.trained]
    encoded = len(values) - separator
    if not kept:
        lost.tokens_rejected += encoded
        return kept
    stays = sum(cut.taken - (separator and cut.first + cut.taken == len(values)) for cut in kept)
    if config.overlong == "truncate":
        lost.truncated += 1
        lost.tokens_truncated += encoded - stays
    else:
        lost.split += 1
        lost.pieces += len(cuts) - len(kept)
        lost.tokens_dropped += encoded - stays
    return kept


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


def _too_long(accepted: Accepted, is_long: np.ndarray, recipe: Recipe) -> str:
    first = int(np.flatnonzero(is_long)[0])
    file = recipe.parts[accepted.part[first]].file
    return (
        f"{file.name}:{accepted.record[first] + 1}: {accepted.length[first]:,} tokens are more than sequence_length "
        f"{recipe.config.sequence_length:,} ({int(is_long.sum()):,} conversations are); overlong: truncate, drop or "
        "split says what to do with them"
    )
