"""Find conversations that are nearly the same as an earlier one.

    token files ─▶ runs of RUN ids ─▶ SKETCH minima of each conversation ─▶ pairs that share a label ─▶ confirmed pairs

Conversations are compared by token ids, like in neighbors.py. Two are near-duplicates if

    1. the Jaccard index of their runs is at least SIMILAR. Runs that are frequent in the corpus do not count: markers
       of the template, system prompts, phrases that everybody uses;
    2. so is that of the runs that end in a trained token, frequent ones included, because other answers to the same
       prompt are not duplicates; short answers are the same;
    3. not each of them has a number that the other one lacks: "3 × 4" and "3 × 5" are different. Numbers in frequent
       runs do not count.

In source order, a conversation is left out if it is a near-duplicate of an earlier one that stays. So each one that is
left out has one that stays, and of a chain (a like b, b like c, c not like a), a and c stay. A conversation with fewer
than FEWEST runs that count is never left out; only equal contents are.

The sketch only chooses which pairs are compared; the runs themselves decide. Within a label, a conversation is compared
with the first one and with the one before it, so time and memory are linear, however many conversations are alike.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby

import numpy as np

from packcorpus.tasks.core.numbers import hashes
from packcorpus.tasks.encoders.encoder import Encoder
from packcorpus.tasks.packing.neighbors import FEW, RUN, SPREAD, ids_of
from packcorpus.tasks.storage.token_files import Samples, TokenColumns

# The least Jaccard index of near-duplicates.
SIMILAR = 0.7
# Distinct runs that a conversation needs. Another word changes RUN runs of each of two texts, so two texts of fewer
# runs that differ in one word are below SIMILAR anyway.
FEWEST = 20

# Minima in the sketch of a conversation. Two consecutive ones are a label. Of the pairs with a Jaccard index of 0.7,
# 1 - (1 - 0.7²)⁸ = 99.5 % share one of the eight labels (Broder 1997; Leskovec, Rajaraman, Ullman: Mining of Massive
# Datasets, section 3.4).
SKETCH = 16
# Minima that a compared pair has in common. Pairs of SIMILAR have fewer in 1 of 500 cases.
ALIKE = 6
# Tokens processed at a time, which fit in a cache, and tokens that are compared at a time: 8 bytes each, several times.
CACHED, COMPARED = 1 << 15, 1 << 21
# Pairs whose sketches are compared at a time.
PAIRS = 1 << 16
# Slots in which runs are counted: a power of 2 between these, with about TOKENS_PER_SLOT tokens for each.
LEAST_SLOTS, MOST_SLOTS, TOKENS_PER_SLOT = 1 << 20, 1 << 24, 128

# A conversation that is left out, the one that stays, and their similarity. Both are given by their first samples.
NEAR = np.dtype([("conversation", "i4"), ("kept", "i4"), ("similarity", "f8")])

_FACTOR = np.uint64(0x9E3779B97F4A7C15)
# An exclusive-or with random bits permutes the hashes, so the least result picks a random run. The first bits differ.
_MASKS = hashes(np.arange(SKETCH)) >> np.uint64(4) | np.arange(SKETCH, dtype=np.uint64) << np.uint64(60)


def find_near_duplicates(tokens: TokenColumns, stays: np.ndarray, samples: Samples, encoder: Encoder) -> np.ndarray:
    """Return the near-duplicates among the conversations that stay: NEAR[n].

    `stays` is true at the first sample of each of them, bool[samples]. Memory is about 80 bytes per sample, and 100 MB.
    """
    texts = _Texts(tokens, stays, samples, encoder)
    return np.fromiter(_left_out(texts, _pairs(*_sketches(texts))), NEAR)


def runs_of(ids: np.ndarray) -> np.ndarray:
    """Return the hash of each run of RUN ids, across all texts: uint64."""
    count = max(0, len(ids) - RUN + 1)
    # A polynomial of hashed ids takes a third of the time of hashing an id after the other.
    hashed, runs = hashes(ids), np.zeros(count, np.uint64)
    for number in range(RUN):
        runs *= _FACTOR
        runs += hashed[number : number + count]
    runs ^= runs >> np.uint64(29)
    return runs


def counts_of(found: Iterable[np.ndarray], slots: int) -> np.ndarray:
    """Count how often each slot is found, int64[slots], many at a time."""
    counts, gathered, size = np.zeros(slots, np.int64), [np.empty(0, np.int64)], 0
    for some in found:
        gathered.append(some)
        size += len(some)
        if size >= slots:
            counts += np.bincount(np.concatenate(gathered), minlength=slots)
            gathered, size = [], 0
    counts += np.bincount(np.concatenate([*gathered, np.empty(0, np.int64)]), minlength=slots)
    return counts


class _Runs:
    """The runs of some consecutive rows of token files.

    `rows` are the first samples of their conversations, ascending; a run belongs to one of them. A run is within one
    row.
    """

    def __init__(self, values: np.ndarray, offsets: np.ndarray, rows: np.ndarray):
        owners = np.repeat(rows, np.diff(offsets))
        runs = runs_of(ids_of(values))
        count = len(runs)
        row = np.repeat(np.arange(len(rows)), np.diff(offsets))
        inside = row[:count] == row[len(row) - count :]
        self.runs, self.owners = runs[inside], owners[:count][inside]
        self.trained = values[len(values) - count :][inside] >= 0


class _Texts:
    """The conversations to compare, and which of their runs are frequent."""

    def __init__(self, tokens: TokenColumns, stays: np.ndarray, samples: Samples, encoder: Encoder):
        self.tokens, self.stays, self._samples, self._encoder = tokens, stays, samples, encoder
        self._digits_of: dict[int, str] = {}
        self.lengths = samples.total(tokens.column("length"))  # of all samples of a conversation
        wanted = int(self.lengths.sum(dtype=np.int64)) // TOKENS_PER_SLOT
        slots = min(max(LEAST_SLOTS, 1 << wanted.bit_length()), MOST_SLOTS)
        self._mask = np.uint64(slots - 1)
        counts = counts_of((self._slot(found.runs[stays[found.owners]]) for found in self.slices()), slots)
        self._is_frequent = counts > max(FEW, int(np.count_nonzero(stays)) // SPREAD)

    def _slot(self, runs: np.ndarray) -> np.ndarray:
        return (runs & self._mask).view(np.int64)

    def counts(self, runs: np.ndarray) -> np.ndarray:
        """Return whether each run counts, because it is not frequent: bool."""
        return ~self._is_frequent[self._slot(runs)]

    def slices(self) -> Iterator[_Runs]:
        """Yield the runs of all conversations, about CACHED tokens at a time."""
        for first, offsets, values in self.tokens.contents():
            rows = self._samples.first_of(np.arange(first, first + len(offsets) - 1))
            begins = np.flatnonzero(np.append(True, rows[1:] != rows[:-1]))  # samples stay together
            edges = np.unique(np.searchsorted(offsets[begins], np.arange(0, offsets[-1], CACHED)))
            edges = np.append(begins[edges[edges < len(begins)]], len(rows))
            for top, bottom in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
                own = offsets[top : bottom + 1]
                yield _Runs(values[own[0] : own[-1]], own - own[0], rows[top:bottom])

    def rows(self, conversations: np.ndarray) -> np.ndarray:
        """Return the samples of conversations, given by their first samples in order."""
        firsts = self._samples.firsts
        if firsts is None:
            return conversations
        at = np.searchsorted(firsts, conversations)
        ends = np.append(firsts, len(self.stays))[at + 1]
        return np.concatenate([np.arange(*each) for each in zip(conversations, ends, strict=True)])

    def read(self, conversations: Sequence[int]) -> dict[int, _Text]:
        """Return what is compared of some conversations, in any order."""
        wanted = np.unique(np.array(conversations, np.int64))
        rows = self.rows(wanted)
        offsets, values = self.tokens.contents_of(rows)
        firsts = self._samples.first_of(rows)
        found = _Runs(values, offsets, firsts)
        counting, trained = self.counts(found.runs), found.trained
        parts = [_split(found.runs[chosen], found.owners[chosen], wanted) for chosen in (counting, trained)]
        edges = np.append(np.searchsorted(firsts, wanted), len(rows))
        lasts = [values[offsets[edge - 1] : offsets[edge]] for edge in edges[1:].tolist()]
        return {number: _Text(*text) for number, *text in zip(wanted.tolist(), *parts, lasts, strict=True)}

    def similarity(self, one: _Text, other: _Text) -> float:
        """Return the Jaccard index of the runs of near-duplicates, and 0.0 of others."""
        least = min(len(one.runs), len(other.runs))
        similarity = _jaccard(one.runs, other.runs) if least >= FEWEST else 0.0
        same = min(len(one.trained), len(other.trained)) < FEWEST  # short answers are the same or not
        if similarity < SIMILAR or _jaccard(one.trained, other.trained) < (1 if same else SIMILAR):
            return 0.0
        own, others = self._numbers(one), self._numbers(other)
        return 0.0 if own - others and others - own else similarity

    def _numbers(self, text: _Text) -> Counter[str]:
        """Return the numbers of a text: the digits of consecutive tokens with digits.

        A token counts if most of the runs that it is in do: the date in a system prompt does not.
        """
        if text.numbers is not None:
            return text.numbers
        values = text.last
        counting = self.counts(_Runs(values, np.array([0, len(values)]), np.zeros(1, np.int64)).runs)
        within = np.ones(RUN, np.int64)
        counts = 2 * np.convolve(counting, within) > np.convolve(np.ones(len(counting), np.int64), within)
        digits = (self._digits(token) if counts[at] else "" for at, token in enumerate(ids_of(values).tolist()))
        text.numbers = Counter("".join(own) for has_digits, own in groupby(digits, bool) if has_digits)
        return text.numbers

    def _digits(self, token: int) -> str:
        if token not in self._digits_of:
            text = self._encoder.token_bytes(token).decode(errors="ignore")
            self._digits_of[token] = "".join(filter(str.isdecimal, text))
        return self._digits_of[token]


class _Text:
    """What is compared of a conversation."""

    __slots__ = ("last", "numbers", "runs", "trained")

    def __init__(self, runs: np.ndarray, trained: np.ndarray, last: np.ndarray):
        self.runs, self.trained = runs, trained  # distinct, sorted: those that count, and those of trained tokens
        self.last = last  # the values of its last sample, which has all of it
        self.numbers: Counter[str] | None = None  # not counted yet


def _split(runs: np.ndarray, owners: np.ndarray, conversations: np.ndarray) -> list[np.ndarray]:
    """Return the distinct runs of each conversation, sorted."""
    order = np.lexsort((runs, owners))
    runs, owners = runs[order], owners[order]
    is_new = np.append(True, (runs[1:] != runs[:-1]) | (owners[1:] != owners[:-1]))[: len(runs)]
    runs, owners = runs[is_new], owners[is_new]
    return np.split(runs, np.searchsorted(owners, conversations[1:]))


def _jaccard(one: np.ndarray, other: np.ndarray) -> float:
    both = np.concatenate([one, other])
    both.sort()
    common = int(np.count_nonzero(both[1:] == both[:-1]))
    return common / max(1, len(both) - common)


def _sketches(texts: _Texts) -> tuple[np.ndarray, np.ndarray]:
    """Return the sketch of each conversation, and which are compared.

    The first are uint16[samples, SKETCH], and the second bool[samples], true at first samples.
    """
    sketches = np.zeros((len(texts.stays), SKETCH), np.uint16)
    compared = np.zeros(len(texts.stays), np.bool_)
    for found in texts.slices():
        chosen = texts.counts(found.runs)
        chosen &= texts.stays[found.owners]
        runs, owners = found.runs[chosen], found.owners[chosen]
        starts = np.flatnonzero(np.append(True, owners[1:] != owners[:-1])[: len(owners)])
        if not len(starts):
            continue
        present = owners[starts]
        compared[present] = np.diff(starts, append=len(runs)) >= FEWEST
        for number, mask in enumerate(_MASKS):
            least = np.minimum.reduceat(runs ^ mask, starts)
            least *= _FACTOR
            sketches[present, number] = least >> np.uint64(48)
    return sketches, compared


def _pairs(sketches: np.ndarray, compared: np.ndarray) -> np.ndarray:
    """Return the pairs to compare as numbers: later << 32 | earlier, ascending."""
    numbers = np.flatnonzero(compared).astype(np.int32)
    labels = sketches.view(np.uint32)  # of two minima each
    found = [np.empty(0, np.int64)]
    for label in labels.T:
        own = label[numbers]
        order = np.argsort(own, kind="stable")
        own, ranked = own[order], numbers[order]
        begins = np.flatnonzero(np.append(True, own[1:] != own[:-1])[: len(own)])
        first = np.repeat(begins, np.diff(begins, append=len(own)))
        at = np.flatnonzero(first != np.arange(len(own)))
        for top in range(0, len(at), PAIRS):
            place = at[top : top + PAIRS]
            for earlier in (first[place], place - 1):
                pair = ranked[earlier], ranked[place]
                alike = np.count_nonzero(sketches[pair[0]] == sketches[pair[1]], axis=1) >= ALIKE
                found.append(pair[1][alike].astype(np.int64) << 32 | pair[0][alike])
        found = [np.unique(np.concatenate(found))]
    return found[0]


def _left_out(texts: _Texts, pairs: np.ndarray) -> Iterator[tuple[int, int, float]]:
    """Yield what is left out, what stays in its place, and their similarity."""
    kept_of = np.arange(len(texts.stays), dtype=np.int32)  # itself, or the one that stays in its place
    for some in _chunks(texts, pairs):
        read = texts.read([each for later, earlier in some.items() for each in (later, *earlier)])
        for later, earlier in some.items():
            for kept in dict.fromkeys(kept_of[earlier].tolist()):
                if kept not in read:
                    read |= texts.read([kept])
                if similarity := texts.similarity(read[kept], read[later]):
                    kept_of[later] = kept
                    yield later, kept, similarity
                    break


def _chunks(texts: _Texts, pairs: np.ndarray) -> Iterator[Mapping[int, list[int]]]:
    """Yield later conversations, each with the earlier ones.

    They have about COMPARED tokens, or are one conversation.
    """
    chunk: dict[int, list[int]] = {}
    size = 0
    for pair in pairs.tolist():
        later, earlier = pair >> 32, pair & 0xFFFFFFFF
        if later not in chunk:
            if size >= COMPARED:
                yield chunk
                chunk, size = {}, 0
            size += int(texts.lengths[later])
            chunk[later] = []
        size += int(texts.lengths[earlier])
        chunk[later].append(earlier)
    if chunk:
        yield chunk
