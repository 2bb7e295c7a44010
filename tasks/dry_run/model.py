"""Define the result of a dry run."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from tasks.config import Config
from tasks.core.errors import Reject
from tasks.encoders.encoder import Encoder
from tasks.recipe import Recipe
from tasks.sources.sample_files import Sample
from tasks.storage.facts import MixtureFacts
from tasks.storage.layout import kind_of


@dataclass(frozen=True, slots=True)
class SampleTokens:
    """The tokenized sample of one file.

    The number of a record is its index in `sample.records`.
    """

    sample: Sample
    file: pa.Buffer  # a token file
    rejects: list[tuple[int, Reject]]  # record and reason
    counts: dict[str, Any]  # as in the receipt of a token file
    unused_keys: dict[str, int]
    seconds: float
    text: np.ndarray  # int64[conversations], rendered bytes; in format 2.0 only


@dataclass(frozen=True, slots=True)
class Example:
    """One conversation, or one sample of it, as tokens.

    `place` is its file and line, and the turn if it is one of several samples. `ids` is int32, and `trained` is bool.
    """

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
    """The rejects with one reason.

    `looked_at` is their number in the sample, and `expected` is the number of records that they represent. `place` and
    `message` describe the first of them.
    """

    looked_at: int = 0
    expected: float = 0.0
    place: str = ""
    message: str = ""

    def add(self, sample: Sample, record: int, reject: Reject) -> None:
        if not self.looked_at:
            self.place, self.message = sample.records[record].place, reject.message
        self.looked_at += 1
        self.expected += float(sample.weights[record])


@dataclass(frozen=True)
class Packed:
    """Predicted rows and tokens.

    Sums are floats, because each conversation of the sample represents several conversations.
    """

    rows: dict[str, int]  # by split
    squares: np.ndarray  # Σn² of rows of the training split, for rows of one length with padding
    trained: dict[str, float]  # tokens, by split
    trained_of_sources: list[float]
    pieces: float
    tokens: dict[str, float]  # encoded, packed, trained, and padding, as in the ledger
    efficiency: float | None
    mixture: list[MixtureFacts]


@dataclass(frozen=True)
class Costs:
    """Predicted resources: disk space, memory, and time.

    `disk` is bytes by kind of file, and `memory` is the peak of the largest process in bytes.
    """

    disk: dict[str, float]
    memory: float
    seconds: float


@dataclass(frozen=True)
class Prediction(Packed, Costs):
    """The predicted manifest figures and resources of a run.

    `config` is the given config. `recipe` always has a tokenizer.
    """

    config: Config
    recipe: Recipe
    encoder: Encoder
    engine: str
    workers: int
    sources: list[Source]
    files: int
    bytes: int
    whole: bool  # everything was read, so the figures are exact
    rejects: dict[str, Rejects]
    cut_off: Rejects  # the part of `rejects` that the overlong policy left without a trained token
    noticed: dict[str, Any]
    unused_keys: dict[str, dict[str, int]]  # of the sample, by source
    unlike_transformers: str  # the first difference from the tokens of AutoTokenizer; "" if there is none
    weighs_alike: bool  # loss_weight reads weights from the data, and all weights of the sample are 1
    packed: float  # conversations
    too_long: float  # conversations longer than a row
    dropped: dict[str, float]  # by reason
    cut: float  # conversations, truncated or split
    empty_shares: str  # sources without a token for their share
    giving_all: list[str]  # sources that token_share takes completely, so that they limit the others
    samples: dict[str, Any] | None  # as in the ledger; None if every conversation is one sample
    left_out: dict[str, int]  # as in the ledger
    failures: list[str] = field(default_factory=list)  # reasons why the run will fail, as far as the sample shows
    warnings: list[str] = field(default_factory=list)


def about(count: float, found: Prediction) -> str:
    """Format a number, marked as an estimate unless everything was read."""
    return f"{count:,.0f}" if found.whole else f"about {count:,.0f}"


def conversations_per_row(found: Prediction) -> float:
    """Return the mean number of conversations, or pieces of them, per row.

    If rows have several lengths, the mean is per row of the longest length.
    """
    layout = found.config.rows
    places = sum(count * layout.length_of(split) for split, count in found.rows.items())
    return found.pieces / max(places / layout.length, 1)


def train_rows(found: Prediction) -> int:
    """Return the number of rows of the training split, of all lengths."""
    return sum(count for split, count in found.rows.items() if kind_of(split) == "train")


def steps(found: Prediction, batch_rows: int) -> tuple[int, float]:
    """Return the optimizer steps per epoch, and the trained tokens per step.

    `batch_rows` is the number of rows per step. If rows have several lengths, it is the number of the longest rows; a
    step of shorter rows has more rows.
    """
    layout = found.config.rows
    places = [rows * layout.length_of(split) for split, rows in found.rows.items() if kind_of(split) == "train"]
    count = sum(-(-own // (batch_rows * layout.length)) for own in places)
    return count, found.trained.get("train", 0.0) / max(count, 1)
