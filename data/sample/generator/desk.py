"""The source of chance, and what makers make of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import date, timedelta
from random import Random
from typing import Any, TypeVar

T = TypeVar("T")
Record = dict[str, Any]
Turns = list[tuple[str, str]]


class Desk:
    """The only source of random choices.

    `deal` returns all items of a list in a shuffled order before it repeats an item.
    """

    def __init__(self, seed: int) -> None:
        self._random = Random(seed).random
        self._decks: dict[str, list[int]] = {}

    def between(self, low: int, high: int) -> int:
        """Return an integer from `low` to `high`, both included."""
        return low + int(self._random() * (high - low + 1))

    def chance(self, share: float) -> bool:
        return self._random() < share

    def pick(self, items: Sequence[T]) -> T:
        return items[self.between(0, len(items) - 1)]

    def shuffled(self, items: Iterable[T]) -> list[T]:
        out = list(items)
        for i in range(len(out) - 1, 0, -1):
            j = self.between(0, i)
            out[i], out[j] = out[j], out[i]
        return out

    def some(self, items: Sequence[T], n: int) -> list[T]:
        return self.shuffled(items)[:n]

    def deal(self, name: str, items: Sequence[T]) -> T:
        if not self._decks.get(name):
            self._decks[name] = self.shuffled(range(len(items)))
        return items[self._decks[name].pop()]

    def day(self, first: int = 1950, last: int = 2060) -> date:
        return date(first, 1, 1) + timedelta(self.between(0, (date(last, 12, 31) - date(first, 1, 1)).days))


@dataclass(frozen=True, slots=True)
class Dialogue:
    """Pairs of a question and an answer.

    `brief` is the shortest correct answer to the first question.
    """

    turns: Turns
    brief: str
    lang: str = "en"


Maker = Callable[[Desk], Dialogue]
