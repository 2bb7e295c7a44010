"""Define the result of a dry run: figures of its manifest, costs, and warnings."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tasks.inspection.rows import Span
from tasks.packing.balance import Waiting
from tasks.recipe import Recipe
from tasks.sources.parts import HASH_THREADS
from tasks.storage.facts import Ledger, MixtureFacts
from tasks.storage.layout import kind_of

if TYPE_CHECKING:
    from tasks.dry_run.sample import Selection


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
    rows: dict[str, int]
    packing_efficiency: float | None
    bytes_on_disk: dict[str, int]  # by kind of file
    peak_memory_bytes: int  # of the largest process
    seconds: float  # with `workers` on idle cores
    workers: int
    steps: list[Steps]
    waiting: list[Waiting]
    run_fails: bool
    failures: list[str]
    warnings: list[str]
    recipe: Recipe = field(repr=False)

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


# Measured seconds of one idle core; the cost of encoding is measured on the sample, or during the run. `bench/eta.py
# CONFIG` compares the first ones with a run (not with one worker, which forks no process), with --times 10 the others.
START = 1.2  # interpreter, libraries and the graph
HASHED_BYTE = 1.0e-9  # of a source, per thread: hashed once as a file and once as a part
TASK = 0.03  # a fork, page faults, Luigi, syncs
STEP = 0.007  # per part and shard, in a worker that stays: two files, two lists of all parts
WRITTEN_BYTE = 2.7e-9  # of a shard
COMMIT = 0.1

# Bytes per token in a shard: int32 + int8 + int32 + int32.
ROW_BYTES = 13

LIST_BYTES = 12.0  # per token of rows without padding, for three columns; the lengths take little
TOKEN_BYTES = 4  # mean bytes of text per token

# Bytes on disk per piece: in index.arrow, of which the plan has a copy, and in plan.arrow.
INDEX_BYTES, PLAN_BYTES = 50.5, 25

# Memory of the largest process: BASE_MEMORY for the interpreter and libraries, and the larger of two terms. A worker
# takes TEXT_MEMORY each time its text doubles, from TEXT_START bytes on, for the words that gigatoken has seen: in
# total 130 MB at 1 MB of text, 157 at 13, and 175 at 64. The plan takes PLAN_MEMORY bytes per conversation
# (bench/packing/planning.py: 19 to 28).
BASE_MEMORY, TEXT_MEMORY, TEXT_START, PLAN_MEMORY = 105e6, 7.5e6, 100_000, 28


def plan_seconds(pieces: float, tokens: float, epochs: int = 1) -> float:
    """Return the seconds of the plan, without its TASK.

    A conversation of 200 tokens takes 0.9 µs. Filling rows takes the same time for any number of pieces. Token files
    are hashed, 4 bytes per token.
    """
    return 0.06 * epochs + 0.7e-6 * pieces + 1.2e-9 * tokens


def estimate_costs(chosen: Selection, ledger: Ledger, places: int, workers: int) -> dict[str, Any]:
    """Return the costs of a Prediction whose rows have `places` places."""
    recipe, config, tokens, cores = chosen.recipe, chosen.recipe.config, ledger.tokens, os.cpu_count() or 1
    conversations, pieces = ledger.conversations.read, ledger.pieces.packed
    weights = [each.sample.expected / max(len(each.sample.records), 1) for each in chosen.sampled]
    if not config.packing:  # all text is written twice: as messages, and rendered
        text = np.concatenate([np.empty(0, np.int64), *(each.text for each in chosen.sampled)])[chosen.repeated.rows]
        is_packed, copies = chosen.pieces.accepted.reason == 0, chosen.pieces.copies
        shards = 2 * chosen.scale * float(text @ (is_packed * (1 if copies is None else copies)))
    elif config.padding == "none":
        shards = (tokens.packed + tokens.padding) * LIST_BYTES
    else:
        shards = places * float(ROW_BYTES + 4 * (config.loss_weight != "none"))
    listed = pieces + sum(ledger.conversations.dropped.values())
    disk = {
        "shards": shards,
        "index": listed * INDEX_BYTES,
        "token_files": sum(each.file.size * weight for each, weight in zip(chosen.sampled, weights, strict=True)),
        "plan": listed * INDEX_BYTES + pieces * PLAN_BYTES,
        "tokenizer": sum(file.stat().st_size for file in recipe.tokenizer_files.files),
    }
    at_once = max(1, min(workers, cores))
    text_bytes = tokens.encoded * TOKEN_BYTES / at_once
    planned = max(conversations, pieces / config.epochs)
    memory = BASE_MEMORY + max(TEXT_MEMORY * np.log2(1 + text_bytes / TEXT_START), PLAN_MEMORY * planned)
    encoding = sum(each.seconds * weight for each, weight in zip(chosen.sampled, weights, strict=True))
    size = sum(file.bytes for file in recipe.files)
    parts = max(len(recipe.files), size // config.part_size)
    plan = TASK + plan_seconds(max(conversations, pieces), tokens.encoded, config.epochs)
    steps = STEP * (parts + sum(recipe.shards.values()))
    hashing = size * HASHED_BYTE / min(HASH_THREADS, cores, len(recipe.files))
    seconds = START + hashing + plan + (encoding + steps + shards * WRITTEN_BYTE) / at_once + COMMIT
    return {
        "bytes_on_disk": {name: round(size) for name, size in disk.items()},
        "peak_memory_bytes": round(float(memory)),
        "seconds": round(seconds, 1),
        "workers": workers,
    }
