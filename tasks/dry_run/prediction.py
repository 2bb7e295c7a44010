"""Define the result of a dry run: figures of its manifest, costs, and warnings."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from packcorpus.tasks.inspection.rows import Span
from packcorpus.tasks.packing.balance import Waiting
from packcorpus.tasks.recipe import Recipe
from packcorpus.tasks.storage.facts import HeldOutFacts, Ledger, MixtureFacts
from packcorpus.tasks.storage.layout import kind_of


@dataclass(frozen=True)
class Tokenizer:
    """The tokenizer of the run."""

    name: str
    kind: str
    vocab_size: int
    trained_here: bool


@dataclass(frozen=True)
class Example:
    """A conversation, or one sample of it, as the run will render it."""

    place: str
    tokens: int
    trained_tokens: int
    spans: list[Span]


@dataclass(frozen=True)
class Source:
    """One sampled file.

    Its figures cover `stands_for` similar files. `conversations` is exact if `counted` and `stands_for` is 1. `reach`
    is the fraction of the file that can be sampled. `whole` is whether every record was read. `other_samples` are the
    further samples of the conversation in `shown`, if it has several.
    """

    path: str
    format: str
    bytes: int
    looked_at: int
    reach: float
    conversations: int
    counted: bool
    rejected: int
    tokens: int
    trained_tokens: int
    shown: Example | None
    other_samples: list[Example]
    stands_for: float
    whole: bool
    split: str = ""  # of all its conversations, if one is set


@dataclass(frozen=True)
class Rejected:
    """The rejects with one reason.

    `looked_at` is their number in the sample, and `expected` is their estimated number in the run. `place` and
    `message` describe the first of them. `cut_off` of `expected` lost their last trained token to the overlong policy;
    `in_data` of `looked_at` did not.
    """

    code: str
    reason: str
    looked_at: int
    expected: int
    place: str
    message: str
    cut_off: int
    in_data: int


@dataclass(frozen=True)
class Steps:
    """The optimizer steps of one epoch at a number of rows per step."""

    rows_per_step: int
    steps: int
    trained_tokens_per_step: int
    conversations_per_step: int


@dataclass(frozen=True)
class Prediction:
    """The result of `packcorpus check`.

    Figures that a manifest also has have the same names there. Unless `whole`, they are scaled from the sample, except
    for `noticed`, which counts the sample itself. `failures` are the reasons why the run will fail. `warnings` starts
    with them. Fields with repr=False are not part of the JSON.
    """

    config: Path | None
    settings: dict[str, Any]
    tokenizer: Tokenizer
    markers_as_text: list[str]
    whole: bool
    files: int
    bytes: int
    engine: str
    sources: list[Source]
    rejects: list[Rejected]
    noticed: dict[str, int | dict[str, dict[str, int]]]
    ledger: Ledger
    too_long: int  # conversations that the overlong policy decides about
    mixture: list[MixtureFacts]
    held_out: HeldOutFacts | None  # None if nothing is held out; prompts are compared within the sample
    share_all_tokens: int | None  # packed tokens with `share: all`; None if it is set, or cannot be
    rows: dict[str, int]
    packing_efficiency: float | None
    bytes_on_disk: dict[str, int]  # by kind of file
    disk_free_bytes: int | None  # where the root is; None in a bucket
    peak_memory_bytes: int  # of the largest process
    memory_limit_bytes: int | None  # what this process may use
    seconds: float  # with `workers` on idle `cores`, those that this process may use
    workers: int
    cores: int
    steps: list[Steps]
    waiting: list[Waiting]
    run_fails: bool
    failures: list[str]
    warnings: list[str]
    recipe: Recipe = field(repr=False)
    lengths: np.ndarray = field(repr=False)  # int[conversations] of the sample: tokens of their longest samples

    @property
    def looked_at(self) -> int:
        """Return the number of records in the sample."""
        return sum(source.looked_at for source in self.sources)

    @property
    def train_rows(self) -> int:
        """Return the rows of the training split, of all lengths."""
        return sum(count for split, count in self.rows.items() if kind_of(split) == "train")

    @property
    def per_row(self) -> float:
        """Return the mean number of pieces per row, or per row of the longest length."""
        layout = self.recipe.config.rows
        places = sum(count * layout.length_of(split) for split, count in self.rows.items())
        return self.ledger.pieces.packed / max(places / layout.length, 1)

    def about(self, count: float) -> str:
        """Format a number, marked as an estimate unless everything was read."""
        return f"{count:,.0f}" if self.whole else f"about {count:,.0f}"
