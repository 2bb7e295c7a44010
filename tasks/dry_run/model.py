"""Define the result of a dry run."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa

from tasks.config import Config
from tasks.encoders.encoder import Encoder
from tasks.recipe import Recipe
from tasks.sources.sample import Sample
from tasks.storage.manifest import MixtureFacts


@dataclass(frozen=True, slots=True)
class Shown:
    """One conversation as tokens: ids int32, trained bool; `place` is its file and line."""

    place: str
    ids: np.ndarray
    trained: np.ndarray


@dataclass(slots=True)
class Source:
    """What was found in one file, and what it will be: sums over all that its sample stands for."""

    sample: Sample
    conversations: float
    rejected: float = 0.0
    tokens: float = 0.0
    trained: float = 0.0
    shown: Shown | None = None


@dataclass(slots=True)
class Rejects:
    """Those of one reason: how many of the sample, how many they stand for, and the first of them."""

    looked_at: int
    expected: float
    place: str
    message: str


@dataclass(slots=True)
class Prediction:
    """Figures as the manifest has them; floats, since each conversation of the sample stands for several.

    `config` is the one that was asked about; `recipe` has a tokenizer in any case.
    """

    config: Config
    recipe: Recipe
    encoder: Encoder
    engine: str
    sources: list[Source]
    files: int
    bytes: int
    whole: bool
    rejects: dict[str, Rejects] = field(default_factory=dict)
    # Of these, those that the over-long policy left without a trained token.
    cut_off: Rejects = field(default_factory=lambda: Rejects(0, 0.0, "", ""))
    noticed: dict[str, int] = field(default_factory=dict)
    packed: float = 0.0  # conversations
    too_long: float = 0.0  # than a row
    dropped: dict[str, float] = field(default_factory=dict)  # by reason
    cut: float = 0.0  # truncated or split
    tokens: dict[str, float] = field(default_factory=dict)
    rows: dict[str, int] = field(default_factory=dict)  # of each split
    trained: dict[str, float] = field(default_factory=dict)  # tokens of each split
    tokenizer_bytes: int = 0
    pieces: float = 0.0
    mixture: list[MixtureFacts] = field(default_factory=list)
    empty_shares: str = ""  # sources without a token for their share
    giving_all: list[str] = field(default_factory=list)  # sources that limit the others, by token_share
    efficiency: float | None = None
    disk: dict[str, float] = field(default_factory=dict)
    memory: float = 0.0
    seconds: float = 0.0
    workers: int = 1
    failures: list[str] = field(default_factory=list)  # why the run will fail, by what was looked at
    warnings: list[str] = field(default_factory=list)

    @property
    def fails(self) -> bool:
        return bool(self.failures)


@dataclass(slots=True)
class Tokens:
    """The token file of the sample of one file; `record` in it is the place in sample.records."""

    file: pa.Buffer
    seconds: float
    text: np.ndarray  # int64[conversations], bytes, as rendered; in format 2.0 alone


def about(count: float, found: Prediction) -> str:
    """A number, and whether it is an estimate."""
    return f"{count:,.0f}" if found.whole else f"about {count:,.0f}"


def in_a_row(found: Prediction) -> float:
    """Conversations in a row, pieces counted as such."""
    return found.pieces / max(sum(found.rows.values()), 1)


def steps(found: Prediction, batch_rows: int) -> tuple[int, float]:
    """Optimizer steps in an epoch at `batch_rows` rows a step, and trained tokens of each."""
    rows = found.rows.get("train", 0)
    count = -(-rows // batch_rows)
    return count, found.trained.get("train", 0.0) / max(count, 1)
