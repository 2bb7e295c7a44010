"""Pieces to place in rows: whole conversations, and cuts of overlong ones.

If a conversation has several samples (storage/token_files.py), "conversation" means one of its samples here, in
placement.py, and in plan.py. Filters by content, limits, and weights apply to all samples of a conversation
together.

    Accepted (one column per attribute) ─cut_overlong─▶ Pieces; `reason` is set if a conversation is not packed

A conversation that fits in a row is one piece. The `overlong` setting decides about longer conversations: truncate
keeps the first piece, turns keeps everything up to the last trained turn that fits whole, split keeps every piece with
a trained token, drop keeps none, and error stops the run.

    split_at: turns    [system user 1 ▓answer 1▓ user 2 ▓answer 2▓] [system user 3 ▓answer 3▓ …    cut_between_turns
    split_at: tokens   [system user 1 ▓answer 1▓ user 2 ▓ans] [wer 2▓ user 3 ▓answer 3▓ …          cut_conversation

There are millions of conversations, so columns are as narrow as possible. A column of the token files that is needed
only once is read when it is needed, and is not held in memory.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from packcorpus.tasks.config import Config
from packcorpus.tasks.core.errors import DataError
from packcorpus.tasks.core.numbers import as_int32, check_number
from packcorpus.tasks.packing.held_out import HeldOut, is_of_validation
from packcorpus.tasks.packing.near_duplicates import find_near_duplicates
from packcorpus.tasks.packing.turn_marks import TurnMarks, marks_of
from packcorpus.tasks.recipe import Recipe
from packcorpus.tasks.storage.schemas import REJECTED, drop_code
from packcorpus.tasks.storage.token_files import Samples, TokenColumns

CHUNK = 1 << 18  # conversations or pieces processed at a time

# Beyond this, one plan would take more than about ten seconds and 3 GB. No data set for fine-tuning is larger.
MOST_CONVERSATIONS = 100_000_000


@dataclass(slots=True)
class Accepted:
    """Columns of all accepted conversations, in source order."""

    edges: np.ndarray  # int64[parts + 1], conversations before each part
    length: np.ndarray  # int32, tokens, including the separator
    separator: np.ndarray  # bool
    held_out: np.ndarray  # bool
    reason: np.ndarray  # uint8, reason why it is not packed; 0 if it is packed
    samples: Samples = field(default_factory=Samples)
    fixed: np.ndarray | None = None  # bool, it cannot change sides; None if all can
    contaminated: np.ndarray | None = None  # bool, whether its conversation overlaps with an evaluation set
    near: np.ndarray | None = None  # near_duplicates.NEAR[n], what is left out; only with duplicates: near

    def part(self, conversations: np.ndarray) -> np.ndarray:
        """Return the part of each conversation, int64."""
        return np.searchsorted(self.edges, conversations, side="right") - 1

    def encoded(self, chosen: slice | np.ndarray) -> np.ndarray:
        """Return the tokens without the separator, int32."""
        return self.length[chosen] - self.separator[chosen]

    def left(self) -> np.ndarray:
        """Return whether a sample of each conversation is left: bool[samples].

        The flag is at the first sample of the conversation, and False at the other samples.
        """
        return self.samples.most(self.reason == 0)

    def drop(self, conversations: np.ndarray, reason: str) -> None:
        """Drop the remaining samples of conversations, given by their first samples."""
        if self.samples.several:
            chosen = np.zeros(len(self.reason), np.bool_)
            chosen[conversations] = True
            conversations = self.samples.of_each(chosen) & (self.reason == 0)
        self.reason[conversations] = drop_code(reason)

    def outcomes(self) -> np.ndarray:
        """Return the reason why each conversation is not packed: uint8[conversations].

        The reason is 0 if a sample of the conversation is packed. If samples have different reasons, the last one in
        DROP_REASONS counts, because it removed the last samples.
        """
        if self.samples.firsts is None:
            return self.reason
        ranked = np.where(self.reason == drop_code("no_trained_tokens"), np.uint8(0), self.reason)
        outcomes = np.maximum.reduceat(ranked, self.samples.firsts) if len(ranked) else ranked
        outcomes[self.left()[self.samples.firsts]] = 0
        return outcomes


def accepted_of(tokens: TokenColumns, held: HeldOut) -> Accepted:
    """Read the columns of all conversations."""
    length = tokens.column("length")
    edges, reason = np.array(tokens.edges, np.int64), np.zeros(len(length), np.uint8)
    return Accepted(edges, length, tokens.column("separator"), held.flags, reason, Samples.of(tokens), held.fixed)


def filter_conversations(accepted: Accepted, tokens: TokenColumns, recipe: Recipe) -> None:
    """Set `accepted.reason` of conversations that the filters remove.

    Token limits apply to each sample. Turn limits and duplicates apply to a conversation, so all its samples are
    dropped. No filter depends on the sequence length, so the same conversations remain at every sequence length.
    """
    config = recipe.config
    if accepted.contaminated is not None:  # first, so that no other conversation is left out because of them
        accepted.drop(np.flatnonzero(accepted.samples.only_first(accepted.contaminated)), "contaminated")
    for name in ("tokens", "turns"):
        least, most = getattr(config, f"min_{name}"), getattr(config, f"max_{name}")
        if least is None and most is None:
            continue
        values = accepted.length if name == "tokens" else tokens.column("turns")
        if least is not None:
            accepted.reason[(values < least) & (accepted.reason == 0)] = drop_code(f"min_{name}")
        if most is not None:
            accepted.reason[(values > most) & (accepted.reason == 0)] = drop_code(f"max_{name}")
    if config.duplicates != "keep":
        # Lengths are compared, too, because two different conversations may share a 64-bit hash. Among 10 million
        # conversations, this happens in 3 of a million corpora. The held-out split is chosen by the same hash, so equal
        # contents are always in the same split. The first of the remaining conversations stays, but one of a source
        # for validation is before the others.
        digests, length = tokens.column("digest"), accepted.samples.total(accepted.length)
        first = () if accepted.fixed is None else (~is_of_validation(tokens, recipe),)
        order = np.lexsort((*first, length, digests))  # stable: equal contents stay in source order
        order = order[accepted.left()[order]]
        same = (digests[order[1:]] == digests[order[:-1]]) & (length[order[1:]] == length[order[:-1]])
        accepted.drop(order[1:][same], "duplicate")
    if config.duplicates == "near":
        _drop_near_duplicates(accepted, tokens, recipe)


def _drop_near_duplicates(accepted: Accepted, tokens: TokenColumns, recipe: Recipe) -> None:
    """Set `accepted.reason` of near-duplicates, and `accepted.near`."""
    stays, samples = accepted.left(), accepted.samples
    once, rows = tokens.distinct()
    if rows is not None:  # a conversation is not a near-duplicate of its repetition
        is_left = np.zeros(once.edges[-1], np.bool_)
        is_left[rows[stays]] = True
        stays, samples = is_left, Samples.of(once)
    accepted.near = find_near_duplicates(once, stays, samples, recipe.encoder)
    near = accepted.near["conversation"]
    accepted.drop(near if rows is None else np.flatnonzero(np.isin(rows, near)), "near_duplicate")


class Cut(NamedTuple):
    """A piece of an overlong conversation.

    The first `repeated` tokens of the conversation precede it, untrained. It is `inside` if it begins within a turn.
    """

    first: int
    taken: int
    closed: bool
    trained: int
    repeated: int = 0
    inside: bool = False


class Columns(NamedTuple):
    """Columns of pieces, from which the rows of a plan are made."""

    conversation: np.ndarray  # int32, index into Accepted
    first: np.ndarray  # int32, offset of the piece's first token within the conversation
    taken: np.ndarray  # int32, number of the conversation's tokens in the piece
    closed: np.ndarray  # bool, the conversation is cut here and an untrained EOS follows
    repeated: np.ndarray  # int32, number of the conversation's first tokens that precede the piece again
    shared: np.ndarray  # int32, number of the conversation's first tokens that its tree has before the piece
    length: np.ndarray  # int32, places in the row
    separator: np.ndarray  # bool, the last place is an EOS added after the template's tokens


@dataclass(slots=True)
class Pieces:
    """Pieces to place in rows.

    The first `once` pieces are the first copy of each conversation, in source order. Further copies follow, pass by
    pass. `of` is the number of a conversation if the piece is all of the conversation. Values from len(accepted.length)
    on are numbers of cuts. `copies` is the number of copies of each conversation, or None if each is packed once.
    Without trees, `shared` and `order` are None, and without a bound, `least` is.
    """

    accepted: Accepted
    of: np.ndarray  # int32[pieces]
    once: int
    cut_of: np.ndarray  # int32[cuts], conversation
    cuts: np.ndarray  # int32[cuts, 6], the columns of Cut
    copies: np.ndarray | None = None  # uint16[conversations]
    shared: np.ndarray | None = None  # int32[pieces], tokens of the conversation that its tree has before the piece
    order: np.ndarray | None = None  # int32[pieces], in which the pieces of each tree follow one another
    least: np.ndarray | None = None  # int64[2], tokens that any trees of the training and the held-out split store

    def __len__(self) -> int:
        return len(self.of)

    def conversations(self, chosen: slice | np.ndarray) -> np.ndarray:
        """Return the conversation of each chosen piece, as indexes into Accepted: int32."""
        of = self.of[chosen]
        cut = of >= len(self.accepted.length)
        if cut.any():
            of = of.copy()
            of[cut] = self.cut_of[of[cut] - len(self.accepted.length)]
        return of

    def columns(self, chosen: slice | np.ndarray) -> Columns:
        """Compute the columns of the chosen pieces."""
        accepted = self.accepted
        of, conversation = self.of[chosen], self.conversations(chosen)
        first, taken, repeated = np.zeros_like(of), accepted.length[conversation], np.zeros_like(of)
        shared = np.zeros_like(of) if self.shared is None else self.shared[chosen]
        closed = np.zeros(len(of), np.bool_)
        cut = np.flatnonzero(of >= len(accepted.length))
        if len(cut):
            first[cut], taken[cut], closed[cut], _, repeated[cut], _ = self.cuts[of[cut] - len(accepted.length)].T
        first, taken = first + shared, taken - shared
        ends_here = first + taken == accepted.length[conversation]
        separator = closed | (accepted.separator[conversation] & ends_here)
        return Columns(conversation, first, taken, closed, repeated, shared, repeated + taken + closed, separator)

    def trained(self, chosen: slice, tokens: TokenColumns) -> np.ndarray:
        """Return the number of trained tokens of each chosen piece, int32.

        They are read from the token files.
        """
        conversation = self.conversations(chosen)
        first, last = (int(conversation.min()), int(conversation.max()) + 1) if len(conversation) else (0, 0)
        trained = tokens.column("trained", first, last)[conversation - first]
        cut = np.flatnonzero(self.of[chosen] >= len(self.accepted.length))
        trained[cut] = self.cuts[self.of[chosen][cut] - len(self.accepted.length), 3]
        return trained

    def chunks(self, first: int = 0, last: int | None = None) -> Iterator[slice]:
        """Iterate over the pieces [first, last) in slices of CHUNK."""
        last = len(self.of) if last is None else last
        for top in range(first, last, CHUNK):
            yield slice(top, min(top + CHUNK, last))

    def lengths(self) -> np.ndarray:
        """Return the places that each piece takes in its row: int32[pieces]."""
        is_whole = self.shared is None and self.copies is None and not len(self.cut_of)
        if is_whole and len(self.of) == len(self.accepted.length):
            return self.accepted.length
        lengths = np.empty(len(self.of), np.int32)
        for chunk in self.chunks():
            lengths[chunk] = self.columns(chunk).length
        return lengths

    def is_whole(self) -> np.ndarray:
        """Return whether each piece is all of a conversation: bool[pieces]."""
        return self.of < len(self.accepted.length)

    def in_training(self) -> Pieces:
        """Return the pieces of the training split."""
        chosen, order = ~self.held_out(), self.order
        shared = None if self.shared is None else self.shared[chosen]
        if order is not None:
            numbers = np.cumsum(chosen, dtype=np.int32) - np.int32(1)
            order = numbers[order[chosen[order]]]
        return replace(self, of=self.of[chosen], shared=shared, order=order)

    def held_out(self) -> np.ndarray:
        """Return whether each piece is in the held-out split: bool[pieces]."""
        held_out = np.empty(len(self.of), np.bool_)
        for chunk in self.chunks():
            held_out[chunk] = self.accepted.held_out[self.conversations(chunk)]
        return held_out

    def trained_of_conversations(self, tokens: TokenColumns) -> np.ndarray:
        """Return the packed trained tokens of each sample's conversation: int32[samples].

        The number includes all pieces and all samples of the conversation, in one copy.
        """
        trained = np.zeros(len(self.accepted.length), np.int64)
        for chunk in self.chunks(0, self.once):
            np.add.at(trained, self.conversations(chunk), self.trained(chunk, tokens))
        samples = self.accepted.samples
        return as_int32(samples.of_each(samples.total(trained)), "trained tokens of a conversation")


def check_conversations(count: int, config: Config) -> None:
    """Raise DataError if a corpus has too many conversations for one plan."""
    if count > MOST_CONVERSATIONS:
        raise DataError(
            "too_many_conversations",
            f"{config.name}: has {count:,} conversations, but a corpus can have at most {MOST_CONVERSATIONS:,}; divide "
            "the sources into several corpora, each with its own config",
        )


def cut_overlong(accepted: Accepted, tokens: TokenColumns, recipe: Recipe) -> Pieces:
    """Apply the overlong policy and return the pieces of the remaining conversations.

    Sets `accepted.reason` to REJECTED if no trained token is left, and to `too_long` if the policy is turns and no
    trained turn fits. Without packing, a row is a whole conversation, and overlong conversations stay intact, because
    the trainer that tokenizes them cuts them. Raises DataError if the policy is error and a conversation is overlong.
    """
    config = recipe.config
    stays = accepted.reason == 0
    is_long = stays & (accepted.length > config.sequence_length)
    if config.overlong == "error" and is_long.any():
        first = int(np.flatnonzero(is_long)[0])
        file = recipe.parts[int(accepted.part(np.array([first]))[0])].file
        record, turn = (int(tokens.column(name, first, first + 1)[0]) for name in ("record", "turn"))
        where = f"{file.name}:{record + 1}" + (f" turn {turn}" if turn >= 0 else "")
        conversations = int(np.count_nonzero(accepted.samples.most(is_long)))
        raise DataError(
            "too_long_conversation",
            f"{where}: {accepted.length[first]:,} tokens exceed sequence_length {config.sequence_length:,} (as in "
            f"{conversations:,} conversations); set overlong to truncate, turns, drop, or split",
        )
    if config.overlong == "drop":
        accepted.reason[is_long] = drop_code("too_long")
    elif not config.packing:
        is_long[:] = False
    # The first token is never trained, so an answer at the very start may leave nothing to train on; so may an
    # empty answer.
    for top in range(0, len(stays), CHUNK):
        chunk = slice(top, min(top + CHUNK, len(stays)))
        untrained = tokens.column("trained", chunk.start, chunk.stop) == 0
        accepted.reason[chunk][stays[chunk] & ~is_long[chunk] & untrained] = REJECTED
    owners, cuts = array("i"), array("i")
    marks = None
    if config.splits_at_turns and is_long.any():
        marks = marks_of(recipe.template, recipe.encoder, config.train_on == "all")
    for conversation in np.flatnonzero(is_long).tolist() if config.overlong in ("truncate", "turns", "split") else ():
        values = tokens.tokens(conversation)
        if config.overlong == "turns":
            pieces = cut_after_turns(values, config.sequence_length, recipe.encoder.eos_id)
        elif marks:
            pieces = cut_between_turns(values, config.sequence_length, marks)
        else:
            pieces = cut_conversation(values, config.sequence_length, config.overlong == "split")
        kept = [cut for cut in pieces if cut.trained]
        if not kept:
            accepted.reason[conversation] = drop_code("too_long") if config.overlong == "turns" else REJECTED
        owners.extend([conversation] * len(kept))
        for cut in kept:
            cuts.extend(cut)
    if accepted.samples.several:
        # A conversation is a reject only if none of its samples has a trained token.
        others = accepted.samples.of_each(accepted.samples.most(accepted.reason != REJECTED))
        accepted.reason[others & (accepted.reason == REJECTED)] = drop_code("no_trained_tokens")
    check_number(len(accepted.length) + len(owners), f"{config.name}: conversations, and pieces of overlong ones")
    cut_of = np.array(owners, np.int32)
    of = whole = indexes_where(lambda part: (accepted.reason[part] == 0) & ~is_long[part], len(accepted.reason))
    if len(cut_of):
        of = np.insert(whole, np.searchsorted(whole, cut_of), len(accepted.length) + np.arange(len(cut_of)))
    of = as_int32(of, "conversations and pieces of split ones")
    return Pieces(accepted, of, len(of), cut_of, np.array(cuts, np.int32).reshape(-1, len(Cut._fields)))


def indexes_where(is_chosen: Callable[[slice], np.ndarray], count: int) -> np.ndarray:
    """Return the numbers below `count` for which `is_chosen` is true, int32.

    `is_chosen` gets slices of CHUNK numbers, because np.flatnonzero takes 8 bytes per index.
    """
    slices = [slice(top, min(top + CHUNK, count)) for top in range(0, count, CHUNK)]
    numbers, end = np.empty(sum(int(np.count_nonzero(is_chosen(part))) for part in slices), np.int32), 0
    for part in slices:
        chosen = np.flatnonzero(is_chosen(part)) + part.start
        numbers[end : end + len(chosen)] = as_int32(chosen, "conversations or pieces")
        end += len(chosen)
    return numbers


def cut_conversation(values: np.ndarray, length: int, split: bool) -> list[Cut]:
    """Cut the tokens of a conversation into pieces of at most `length` places.

    `values` are int32, ~id if untrained. A piece that is cut off has one token less than a row and is closed by an
    untrained EOS, because a model must not learn to stop in mid-sentence. The first token of every piece has no
    context and is not trained. If `split` is false, only the first piece is returned.
    """
    cuts, first = list[Cut](), 0
    while first < len(values) and (split or not cuts):
        closed = len(values) - first > length
        taken = length - 1 if closed else len(values) - first
        cuts.append(Cut(first, taken, closed, int((values[first + 1 : first + taken] >= 0).sum())))
        first += taken
    return cuts


def cut_after_turns(values: np.ndarray, length: int, eos: int) -> list[Cut]:
    """Keep the tokens of a conversation through its last trained turn that fits.

    `values` are int32, ~id if untrained, and more than `length`. A turn is a run of trained tokens, and it fits if it
    ends within `length` places. Like every conversation in a row, the piece ends with EOS: if the turn does not, an
    untrained EOS closes it and takes one of the places. Returns nothing if no turn fits.
    """
    inside = values[: length + 1]
    ends = np.flatnonzero((inside[:-1] >= 0) & (inside[1:] < 0)) + 1
    closed = inside[ends - 1] != eos
    fits = np.flatnonzero(ends + closed <= length)
    if not len(fits):
        return []
    taken = int(ends[fits[-1]])
    return [Cut(0, taken, bool(closed[fits[-1]]), int((values[1:taken] >= 0).sum()))]


class _Stretch(NamedTuple):
    """The tokens [first, end) of a conversation, which stay in one piece."""

    first: int
    end: int
    inside: bool = False  # it begins within a turn


def cut_between_turns(values: np.ndarray, length: int, marks: TurnMarks) -> list[Cut]:
    """Cut a conversation between its turns, into pieces of at most `length` places.

    `values` are int32, ~id if untrained. A piece begins with a message of the user. If all up to the next one is longer
    than a row, it begins after a trained turn, and if one turn is longer than a row, within it. Later pieces repeat the
    tokens before the first message of the user, such as the system message and the tools, if these take at most half of
    a row, and otherwise BOS. Like every conversation in a row, a piece ends with EOS: if its last turn does not, an
    untrained EOS closes it.

    A piece holds as many turns as fit. Turns that are not trained on are only context, so a piece without a trained
    turn is left out, and the next piece begins as early as it can.
    """
    starts, count = marks.starts(values), len(values)
    trained = np.append(0, np.cumsum(values >= 0))
    repeated = starts[0] if starts else 0
    if repeated > length // 2 or (trained[repeated] and not marks.trains_all):
        repeated = 0
    if not repeated and marks.encoder.bos_id is not None:
        repeated = int(values[0] in (marks.encoder.bos_id, ~marks.encoder.bos_id))
    # Messages before the first one of the user that are not repeated are a stretch of their own.
    starts = [start for start in starts if start > repeated]
    stretches = _stretches(values, starts, length, length - repeated - 1, marks)
    closes: dict[int, bool] = {}

    def is_closed(end: int) -> bool:
        """Return whether a piece with this end needs an EOS."""
        if end not in closes:
            last = end - 1
            while last and marks.is_blank(int(values[last])):
                last -= 1
            closes[end] = end < count and values[last] not in (marks.encoder.eos_id, ~marks.encoder.eos_id)
        return closes[end]

    def fits(first: int, last: int) -> bool:
        begin, end = stretches[first].first, stretches[last].end
        return end - begin + is_closed(end) + repeated * (begin > 0) <= length

    cuts, first, at = list[Cut](), 0, 0
    firsts, ends = (np.array(edges) for edges in zip(*((own.first, own.end) for own in stretches), strict=True))
    answers = np.flatnonzero(trained[ends] - trained[firsts] > (values[firsts] >= 0)).tolist()
    while at < len(answers):
        begin, last = first, answers[at]
        while not fits(begin, last):
            begin += 1
        at += 1
        while at < len(answers) and fits(begin, answers[at]):
            last = answers[at]
            at += 1
        if at == len(answers) and fits(begin, len(stretches) - 1):
            last = len(stretches) - 1
        whole = _Stretch(stretches[begin].first, stretches[last].end)
        cuts.append(
            Cut(
                whole.first,
                whole.end - whole.first,
                is_closed(whole.end),
                # Its first token has no context.
                int(trained[whole.end] - trained[whole.first]) - int(values[whole.first] >= 0),
                repeated * (whole.first > 0),
                stretches[begin].inside,
            )
        )
        first = last + 1
    return cuts


def _stretches(values: np.ndarray, starts: list[int], length: int, room: int, marks: TurnMarks) -> list[_Stretch]:
    """Divide a conversation into stretches that each fit in a row.

    `room` is the number of tokens that fit in a later piece, without the repeated ones.
    A stretch is all from one message of the user to the next; if that is too long, it is a turn with its prompt; and if
    that is too long, too, it is as much of the turn as fits.
    """
    is_trained = values >= 0
    ends = np.flatnonzero(is_trained[:-1] & ~is_trained[1:]) + 1
    stretches: list[_Stretch] = []
    for first, end in pairwise([0, *starts, len(values)]):
        if end - first <= (room if first else length - 1):
            stretches.append(_Stretch(first, end))
            continue
        edges = [first]
        for edge in ends[slice(*np.searchsorted(ends, [first, end], "right"))].tolist():
            while edge < end and marks.is_blank(int(values[edge])):  # the line break after a turn
                edge += 1
            edges += [edge] * (edges[-1] < edge < end)
        for begin, stop in pairwise([*edges, end]):
            stretches += _within_turn(is_trained, begin, stop, room if begin else length - 1, room)
    return stretches


def _within_turn(is_trained: np.ndarray, first: int, end: int, here: int, room: int) -> Iterator[_Stretch]:
    """Yield the stretches of a turn.

    It is one if it fits in `here`. Otherwise, each is as much as fits in `room`.
    An answer that fits stays whole, with as much of its prompt as fits before it.
    """
    if end - first <= here:
        yield _Stretch(first, end)
        return
    answer = first + int(np.argmax(is_trained[first:end]))
    last = end - room if is_trained[answer] and end - answer < room else end
    edges = [*range(first, last, room), last, *[end] * (last < end)]
    is_alone = len(edges) > 2 and is_trained[edges[-2]] and not is_trained[edges[-2] + 1 : end].any()
    if is_alone and end - edges[-2] < room:
        edges[-2] -= 1  # the first token of a piece is not trained, so it must not be EOS alone
    for begin, stop in pairwise(edges):
        yield _Stretch(begin, stop, inside=begin > first)
