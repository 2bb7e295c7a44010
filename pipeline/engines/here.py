"""Run one step after another in this process."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Self

from tasks.steps import Outcome, Step, attempt


class Here:
    """Engine without workers: takes the least memory and CPU time."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Do nothing: no step is running."""

    def map(self, steps: Sequence[Step]) -> Iterator[tuple[int, Outcome]]:
        for index, step in enumerate(steps):
            outcome = attempt(step)
            if outcome.error:
                raise outcome.error
            yield index, outcome
