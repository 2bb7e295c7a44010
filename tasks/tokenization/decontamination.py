"""Find conversations that overlap with an item of an evaluation set.

With the setting `decontaminate`:

    items ─words─▶ windows of LONG words, or a shorter text as a whole ─▶ Evaluation: hashes of windows
    conversations ─words─▶ windows of the same lengths ─overlaps─▶ the item, and where the overlap is

As in the reports of large models, an overlap is LONG words in a row (GPT-3: Language Models are Few-Shot Learners,
2020, appendix C), or all words of a text that has at least SHORT (its shortest window, too). A shorter question only
counts if a message consists of it. Words are letters and digits, without case and punctuation (NFKC, casefold), so
tokenizer and template have no effect. In a script without spaces, each character is a word.

What many items share does not count, such as an instruction that begins all of them. Words in a window of
SHORT words that more than MANY items share, or more than half of the items of a file, are not an item's own. A window
counts only if SHORT of its words are its item's own, or as many as any window of this text has.

Hashes only find places to look at; the words are then compared. Python's hashes of words differ between processes, but
nothing else depends on them.
"""

from __future__ import annotations

import re
import unicodedata
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import cached_property, lru_cache
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import numpy as np

from packcorpus.tasks.recipe import Recipe
from packcorpus.tasks.sources.evaluation_files import Item, read_items
from packcorpus.tasks.sources.model import SourceFile
from packcorpus.tasks.storage.schemas import offsets_of

LONG, SHORT = 13, 8
# A shorter question is too common to be a sign of an overlap, such as "Go on".
FEWEST = 3
MANY = 10
# Characters of a message that is compared as a whole, and of the overlap that is listed.
SHORTEST, SHOWN = 120, 100
# Hashes have one bit in a table of this many times their number, at most MOST_BITS.
SPARSE, MOST_BITS = 16, 1 << 26

# Scripts without spaces between words: Thai to Lao, Myanmar, Khmer, Japanese and Chinese.
_ALONE = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
_WORD = rf"[{_ALONE}]|[^\W_{_ALONE}]+"
_WORDS = re.compile(_WORD)
# In a short question, operators count: 3 - 4 and 3 / 4 are different, but a hyphen is punctuation.
_WITH_SYMBOLS = re.compile(rf"{_WORD}|(?<=[\d)\s])[-*/](?=[\s\d(])|[^\w\s\-*/]")
_FACTOR = np.uint64(0x9E3779B97F4A7C15)


class Overlap(NamedTuple):
    """An overlap of a conversation with an item of an evaluation set."""

    file: int  # index into the evaluation files
    line: int  # of the item
    text: str  # the beginning of the overlap, as words


def words_of(text: str) -> list[str]:
    """Return the words of a text, without case and punctuation."""
    return _WORDS.findall(unicodedata.normalize("NFKC", text).casefold())


def _whole(text: str) -> tuple[str, ...]:
    """Return the words and operators of a short text."""
    found = _WITH_SYMBOLS.findall(unicodedata.normalize("NFKC", text).casefold())
    return tuple(part for part in found if part.isalnum() or part in "-*/" or unicodedata.category(part[0])[0] == "S")


def evaluation_of(recipe: Recipe) -> Evaluation | None:
    """Return the evaluation sets of a recipe, read once per process, or None."""
    return _read_once(recipe.evaluation, recipe.layout.remote()) if recipe.evaluation else None


@lru_cache(maxsize=2)
def _read_once(files: tuple[SourceFile, ...], copies: Path) -> Evaluation:
    return Evaluation([[*read_items(file, copies)] for file in files])


class Evaluation:
    """The items of evaluation sets, by file."""

    def __init__(self, files: Sequence[Sequence[Item]]):
        self.items = [(number, item) for number, items in enumerate(files) for item in items]
        distinct: dict[tuple[tuple[str, ...], ...], int] = {}
        same_as = [
            distinct.setdefault(tuple(tuple(words_of(text)) for text in item.texts), at)
            for at, (_, item) in enumerate(self.items)
        ]
        self._first = [at for at, first in enumerate(same_as) if at == first]
        own = [self.items[at][0] for at in self._first]
        counts = np.bincount(own, minlength=len(files))
        self._limits = np.minimum(MANY, np.maximum(1, counts // 2))  # items of each file that share what is their own
        self._file_of = np.array(own, np.int64)
        texts = [(n, text) for n, at in enumerate(self._first) for text in dict.fromkeys(self.items[at][1].texts)]
        self._texts = [text for _, text in texts]
        item_of = np.array([n for n, _ in texts], np.int64)
        self._hashes, self._items, self._starts, self._text_of = self._windows(item_of)
        self._whole = self._short_questions()
        found = {*self._items.tolist(), *(n for n, _ in self._whole.values())}
        has_own = [n in found for n in range(len(self._first))]
        place = {at: n for n, at in enumerate(self._first)}
        self.unmatched = [0] * len(files)
        for at, (number, _) in enumerate(self.items):
            self.unmatched[number] += not has_own[place[same_as[at]]]
        self.counts = [[len(items), missed] for items, missed in zip(files, self.unmatched, strict=True)]

    # -- items --

    def _windows(self, item_of: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Return the hash, item, first word, and text of each window that counts.

        They are sorted by hash, and each hash is of the first item that has it. Sets the lengths of windows.
        """
        listed = [words_of(text) for text in self._texts]
        lengths = np.array([len(words) for words in listed], np.int64)
        offsets = offsets_of(lengths)
        hashed = _hashed(chain.from_iterable(listed), int(offsets[-1]))
        text_of = np.repeat(np.arange(len(listed)), lengths)
        at = np.arange(len(hashed))
        own = ~self._covered(hashed, text_of, item_of)
        sums = offsets_of(own)
        size = np.where(lengths >= LONG, LONG, lengths)[text_of] if len(listed) else at
        is_window = (size >= SHORT) & (at + size <= offsets[1:][text_of] if len(listed) else at < 0)
        starts, size = at[is_window], size[is_window]
        texts, counts = text_of[starts], sums[starts + size] - sums[starts]
        most = np.zeros(len(listed), np.int64)
        np.maximum.at(most, texts, counts)
        counting = (counts > 0) & (counts >= np.minimum(SHORT, most[texts]))
        starts, size, texts = starts[counting], size[counting], texts[counting]
        self.lengths = sorted({*size.tolist()})
        hashes = np.zeros(len(starts), np.uint64)
        for length, of_length in _windows_of(hashed):
            chosen = size == length
            hashes[chosen] = of_length[starts[chosen]]
        hashes, first = np.unique(hashes, return_index=True)
        texts = texts[first]
        return hashes, item_of[texts] if len(item_of) else texts, starts[first] - offsets[texts], texts

    def _covered(self, hashed: np.ndarray, text_of: np.ndarray, item_of: np.ndarray) -> np.ndarray:
        """Return the words in windows of SHORT words that many items share: bool[words]."""
        covered = np.zeros(len(hashed), np.bool_)
        if len(hashed) < SHORT:
            return covered
        windows = next(of_length for length, of_length in _windows_of(hashed) if length == SHORT)
        places = np.flatnonzero(text_of[: len(windows)] == text_of[SHORT - 1 :])
        windows, items = windows[places], item_of[text_of[places]]
        _, number = np.unique(windows, return_inverse=True)
        is_common = self._is_common(number, items)[number]
        for shift in range(SHORT):
            covered[places[is_common] + shift] = True
        return covered

    def _is_common(self, number: np.ndarray, items: np.ndarray) -> np.ndarray:
        """Return whether too many items share a thing: bool[things].

        `number` and `items` are the number of the thing and the item that has it, int64[pairs].
        """
        pairs = np.unique(number * len(self._first) + items)
        number, items = pairs // len(self._first), pairs % len(self._first)
        is_common = np.bincount(number) > MANY
        of_files, counts = np.unique(number * len(self._limits) + self._file_of[items], return_counts=True)
        is_common[of_files[counts > self._limits[of_files % len(self._limits)]] // len(self._limits)] = True
        return is_common

    def _short_questions(self) -> dict[tuple[str, ...], tuple[int, str]]:
        """Return the items of questions of fewer than SHORT words, by their words."""
        found: dict[tuple[str, ...], list[tuple[int, str]]] = defaultdict(list)
        for n, at in enumerate(self._first):
            for text in self.items[at][1].questions:
                if len(whole := _whole(text)) >= FEWEST and len(words_of(text)) < SHORT and len(text) <= SHORTEST:
                    found[whole].append((n, text))
        number = np.repeat(np.arange(len(found)), [len(items) for items in found.values()])
        items = np.array([n for items in found.values() for n, _ in items], np.int64)
        is_common = self._is_common(number, items) if len(items) else np.empty(0, np.bool_)
        return {whole: items[0] for (whole, items), common in zip(found.items(), is_common, strict=True) if not common}

    @cached_property
    def _table(self) -> np.ndarray:
        size = min(max(1 << 10, 1 << (SPARSE * len(self._hashes)).bit_length()), MOST_BITS)
        table = np.zeros(size, np.bool_)
        table[(self._hashes & np.uint64(size - 1)).view(np.int64)] = True
        return table

    # -- conversations --

    def overlaps(self, conversations: Sequence[Sequence[str]]) -> dict[int, Overlap]:
        """Return the first overlap of each conversation that has one, by its number.

        A conversation is given by its texts.
        """
        listed = [words_of("\n".join(texts)) for texts in conversations]
        offsets = offsets_of([len(words) for words in listed])
        hashed = _hashed(chain.from_iterable(listed), int(offsets[-1]))
        found: dict[int, tuple[int, int, str]] = {}  # first word, item, text
        mask = np.uint64(len(self._table) - 1)
        for length, windows in _windows_of(hashed, self.lengths):
            places = np.flatnonzero(self._table[(windows & mask).view(np.int64)])
            at = np.searchsorted(self._hashes, windows[places])
            at[at == len(self._hashes)] = 0
            same = self._hashes[at] == windows[places]
            places, at = places[same], at[same]
            owners = np.searchsorted(offsets, places, side="right") - 1
            for place, owner, window in zip(places.tolist(), owners.tolist(), at.tolist(), strict=True):
                first = place - int(offsets[owner])
                words = listed[owner][first : first + length]
                if owner in found and found[owner][0] <= first:
                    continue
                start = int(self._starts[window])
                if words == self._words(int(self._text_of[window]))[start : start + length]:
                    found[owner] = first, int(self._items[window]), " ".join(words)
        for number, texts in enumerate(conversations if self._whole else ()):
            if number not in found:
                short = (self._whole.get(_whole(text)) for text in texts if len(text) <= SHORTEST)
                item, text = next(filter(None, short), (-1, ""))
                if item >= 0:
                    found[number] = 0, item, text
        return {
            number: Overlap(self._place(item)[0], self._place(item)[1], text[:SHOWN])
            for number, (_, item, text) in sorted(found.items())
        }

    def _words(self, text: int) -> list[str]:
        return _cached_words(self._texts[text])

    def _place(self, item: int) -> tuple[int, int]:
        number, of_file = self.items[self._first[item]]
        return number, of_file.line


@lru_cache(maxsize=1 << 10)
def _cached_words(text: str) -> list[str]:
    return words_of(text)


def _hashed(words: Iterator[str], count: int) -> np.ndarray:
    """Return a hash of each word, uint64, which is valid in this process."""
    return np.fromiter(map(hash, words), np.int64, count).view(np.uint64)


def _windows_of(
    hashed: np.ndarray, lengths: Sequence[int] = range(SHORT, LONG + 1)
) -> Iterator[tuple[int, np.ndarray]]:
    """Yield each length, and the hash of each window of so many words, uint64."""
    windows = hashed
    for length in range(2, max(lengths, default=0) + 1):
        count = max(0, len(hashed) - length + 1)
        windows = windows[:count] * _FACTOR
        windows += hashed[length - 1 :][:count]
        if length in lengths:
            yield length, windows
