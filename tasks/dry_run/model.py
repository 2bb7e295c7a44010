"""Define the result of a dry run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from tasks.config import Config
from tasks.core.errors import Reject
from tasks.encoders.encoder import Encoder
from tasks.packing.balance.waiting import RowsOfLength
from tasks.recipe import Recipe
from tasks.sources.sampling.sample import Sample
from tasks.storage.facts.inputs import MixtureFacts
from tasks.storage.splits import kind_of, length_in


@dataclass(frozen=True, slots=True)
class SampleTokens:
    """The tokenized sample of one file. Records are numbered by their index in `sample.records`."""

    sample: Sample
    file: pa.Buffer  # a token file
    rejects: list[tuple[int, Reject]]  # record and reason
    noticed: dict[str, Any]
    unused_keys: dict[str, int]
    seconds: float
    text: np.ndarray  # int64[conversations], rendered bytes; in format 2.0 only


@dataclass(frozen=True, slots=True)
class Example:
    """One conversation as tokens: ids int32, trained bool. `place` is its file and line."""

    place: str
    ids: np.ndarray
    trained: np.ndarray


@dataclass(frozen=True, slots=True)
class Source:
    """The prediction for one file: sums over everything that its sample represents."""

    sample: Sample
    conversations: float
    rejected: float
    tokens: float
    trained: float
    shown: list[Example]  # the samples of its first conversation


@dataclass(slots=True)
class Rejects:
    """Rejects with one reason: how many in the sample, how many they represent, and the first of them."""

    looked_at: int = 0
    expected: float = 0.0
    place: str = ""
    message: str = ""

    def add(self, sample: Sample, record: int, reject: Reject) -> None:
        if not self.looked_at:
            self.place, self.message = sample.records[record].place, reject.message
        self.looked_at += 1
        self.expected += float(sample.weights[record])


@dataclass(frozen=True, slots=True)
class Packed:
    """Rows and tokens. Each conversation of the sample represents several, so that sums are floats."""

    rows: dict[str, int]  # by split
    costs: list[RowsOfLength]  # of the training split, by length; without trained tokens
    trained: dict[str, float]  # tokens, by split
    trained_of_sources: list[float]
    pieces: float
    tokens: dict[str, float]  # encoded, packed, trained, and padding, as in the ledger
    efficiency: float | None
    mixture: list[MixtureFacts]


@dataclass(frozen=True, slots=True)
class Costs:
    """Bytes on disk by kind, peak memory in bytes of the largest process, and time."""

    disk: dict[str, float]
    memory: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Prediction:
    """The figures that a run would record in its manifest, and what the run would cost.

    `config` is the given one; `recipe` always has a tokenizer.
    """

    config: Config
    recipe: Recipe
    encoder: Encoder
    engine: str
    workers: int
    sources: list[Source]
    files: int
    bytes: int
    whole: bool  # everything was read, so that the figures are exact
    rejects: dict[str, Rejects]
    cut_off: Rejects  # those of `rejects` that the overlong policy left without a trained token
    noticed: dict[str, Any]
    unused_keys: dict[str, dict[str, int]]  # of the sample, by source
    weighs_alike: bool  # loss_weight reads the data, and all weights of the sample are 1
    packed: float  # conversations
    too_long: float  # conversations longer than a row
    dropped: dict[str, float]  # by reason
    cut: float  # conversations, truncated or split
    empty_shares: str  # sources without a token for their share
    giving_all: list[str]  # sources that limit the others, by token_share
    pieces: float
    rows: dict[str, int]  # by split
    costs: list[RowsOfLength]  # of the training split, by length; without trained tokens
    trained: dict[str, float]  # tokens, by split
    tokens: dict[str, float]
    efficiency: float | None
    mixture: list[MixtureFacts]
    samples: dict[str, float] | None  # as in the ledger; None if every conversation is one sample
    disk: dict[str, float]
    memory: float
    seconds: float
    failures: list[str] = field(default_factory=list)  # reasons why the run will fail, as far as the sample shows
    warnings: list[str] = field(default_factory=list)

    @property
    def fails(self) -> bool:
        return bool(self.failures)


def about(count: float, found: Prediction) -> str:
    """Format a number, marked as an estimate unless everything was read."""
    return f"{count:,.0f}" if found.whole else f"about {count:,.0f}"


def conversations_per_row(found: Prediction) -> float:
    """Return the mean number of conversations (or pieces of them) in the tokens of a row, the longest if several."""
    longest = found.config.sequence_length
    places = sum(count * length_in(split, longest) for split, count in found.rows.items())
    return found.pieces / max(places / longest, 1)


def train_rows(rows: Mapping[str, int]) -> dict[str, int]:
    """Return the rows of the training split by its name; of each of its splits, if rows have several lengths."""
    return {split: count for split, count in rows.items() if kind_of(split) == "train"}


def steps(found: Prediction, batch_rows: int) -> tuple[int, float]:
    """Return the optimizer steps per epoch at `batch_rows` rows per step, and trained tokens per step.

    If rows have several lengths, rows per step are those of the longest; a step has more of the shorter ones.
    """
    longest, count = found.config.sequence_length, 0
    for split, rows in train_rows(found.rows).items():
        count += -(-rows * length_in(split, longest) // (batch_rows * longest))
    return count, found.trained.get("train", 0.0) / max(count, 1)
