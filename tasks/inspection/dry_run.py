"""Summarize a dry run: the figures of its manifest, resources, and warnings.

Prediction ─summarize─▶ DryRun
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tasks.core.error_codes import CODES
from tasks.core.printable import counted
from tasks.dry_run.model import Prediction, conversations_per_row, steps, train_rows
from tasks.dry_run.model import Source as PredictedSource
from tasks.inspection.labels import BATCH_ROWS, FEW_STEPS
from tasks.inspection.token_runs import Span, spans_of
from tasks.packing.balance import Waiting, forecast
from tasks.storage.facts import MixtureFacts
from tasks.storage.schemas import IGNORED

# With fewer trained tokens in a step, its gradient comes from a handful of answers. A usual step has 65,536 tokens, a
# third of them trained.
FEW_TRAINED = 1000
# The most epochs that a warning suggests for more steps.
MOST_EPOCHS = 10


@dataclass(frozen=True)
class Tokenizer:
    """The tokenizer of the run.

    If the run will train a tokenizer (`trained_here`), this one was trained on the sample.
    """

    name: str
    kind: str
    vocab_size: int
    trained_here: bool


@dataclass(frozen=True)
class Example:
    """One conversation as the run will render it."""

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
    `message` describe the first of them.
    """

    code: str
    reason: str
    looked_at: int
    expected: int
    place: str
    message: str


@dataclass(frozen=True)
class Steps:
    """The optimizer steps of one epoch at a number of rows per step."""

    rows_per_step: int
    steps: int
    trained_tokens_per_step: int
    conversations_per_step: int


@dataclass(frozen=True)
class DryRun:
    """The result of `packcorpus check`.

    Figures that a manifest also has have the same names there. Unless `whole`, figures are estimates from a sample.
    `failures` are the reasons why the run will fail. `warnings` starts with them.
    """

    config: Path
    settings: dict[str, Any]
    tokenizer: Tokenizer
    markers_as_text: list[str]
    whole: bool
    files: int
    bytes: int
    engine: str
    sources: list[Source]
    rejects: list[Rejected]
    noticed_in_sample: dict[str, int | dict[str, dict[str, int]]]
    unused_keys_in_sample: dict[str, dict[str, int]]
    ledger: dict[str, dict[str, Any]]
    mixture: list[MixtureFacts]
    rows: dict[str, int]
    packing_efficiency: float | None
    bytes_on_disk: dict[str, int]
    peak_memory_bytes: int
    seconds: float
    workers: int
    steps: list[Steps]
    waiting: list[Waiting]
    run_fails: bool
    failures: list[str]
    warnings: list[str]


def summarize(found: Prediction, config_file: Path, batches: list[int]) -> DryRun:
    """Summarize a prediction.

    `batches` are numbers of rows per step to show steps and warnings for; by default, BATCH_ROWS are shown.
    """
    recipe, encoder = found.recipe, found.encoder
    trained_here = found.config.tokenizer is None
    name = "" if trained_here else recipe.tokenizer_files.main.name
    return DryRun(
        config=config_file,
        settings=found.config.model_dump(mode="json"),
        tokenizer=Tokenizer(name, encoder.kind, encoder.vocab_size, trained_here),
        markers_as_text=list(recipe.template.markers_as_text),
        whole=found.whole,
        files=found.files,
        bytes=found.bytes,
        engine=found.engine,
        sources=[_source(found, source) for source in found.sources],
        rejects=[
            Rejected(**asdict(reject) | {"code": CODES[name].code, "reason": name, "expected": round(reject.expected)})
            for name, reject in sorted(found.rejects.items())
        ],
        noticed_in_sample=found.noticed,
        unused_keys_in_sample=found.unused_keys,
        ledger=_ledger(found),
        mixture=found.mixture,
        rows=found.rows,
        packing_efficiency=None if found.efficiency is None else round(found.efficiency, 4),
        bytes_on_disk={name: round(value) for name, value in found.disk.items()},
        peak_memory_bytes=round(found.memory),
        seconds=round(found.seconds, 1),
        workers=found.workers,
        steps=[_steps(found, rows) for rows in batches or BATCH_ROWS],
        waiting=forecast(found.squares, np.zeros(len(found.squares), np.int32), found.config.row_lengths[0]),
        run_fails=bool(found.failures),
        failures=found.failures,
        warnings=found.failures + found.warnings + step_warnings(found, batches),
    )


def _ledger(found: Prediction) -> dict[str, dict[str, Any]]:
    ledger: dict[str, dict[str, Any]] = {
        "conversations": {
            "read": round(sum(source.conversations for source in found.sources)),
            "packed": round(found.packed),
            "rejected": {reason: round(reject.expected) for reason, reject in found.rejects.items()},
            "dropped": {reason: round(count) for reason, count in found.dropped.items()},
            "truncated_or_split": round(found.cut),
        },
        "pieces": {"packed": round(found.pieces)},
        "tokens": _rounded(found.tokens),
        "context": {
            "tokens": round(found.tokens["packed"] - found.tokens["trained"]),
            "left_out": found.left_out,
        },
    }
    if found.samples:
        ledger["samples"] = _rounded(found.samples)
    return ledger


def _rounded(values: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: _rounded(value) if isinstance(value, dict) else value if value is None else round(value)
        for name, value in values.items()
    }


def _source(found: Prediction, source: PredictedSource) -> Source:
    sample, file = source.sample, source.sample.file
    examples = []
    for one in source.shown:
        labels = one.ids.copy()
        labels[~one.trained] = IGNORED
        spans = spans_of(found.encoder, one.ids, labels)
        examples.append(Example(one.place, len(one.ids), int(one.trained.sum()), spans))
    return Source(
        path=file.name,
        format=file.format,
        bytes=file.bytes,
        looked_at=len(sample.records),
        reach=round(sample.reach, 4),
        conversations=round(source.conversations),
        counted=sample.counted,
        rejected=round(source.rejected),
        tokens=round(source.tokens),
        trained_tokens=round(source.trained),
        shown=next(iter(examples), None),
        other_samples=examples[1:],
        stands_for=sample.stands_for,
        whole=sample.whole,
    )


def _steps(found: Prediction, rows: int) -> Steps:
    count, trained = steps(found, rows)
    conversations = conversations_per_row(found) * min(rows, train_rows(found))
    return Steps(rows, count, round(trained), round(conversations))


def step_warnings(found: Prediction, batches: list[int]) -> list[str]:
    """Return warnings about numbers of rows per step.

    Without `batches`, only the middle number of BATCH_ROWS is checked.
    """
    warnings = []
    held = conversations_per_row(found)
    for rows in batches or BATCH_ROWS[1:2]:
        count, trained = steps(found, rows)
        if 0 < count < FEW_STEPS:
            alone = math.ceil(held * train_rows(found) / rows)
            noun = "sample" if found.samples else "conversation"
            apart = f" With one {noun} per row, it would have {alone:,}." if held > 1.05 and alone > count else ""
            fewer, epochs = train_rows(found) // FEW_STEPS, -(-FEW_STEPS // count)
            ways = [f"{counted(fewer, 'row')} per step"] * (fewer > 0) + [f"{epochs} epochs"] * (epochs <= MOST_EPOCHS)
            advice = f"Use {', or '.join(ways)}." if ways else "Only more conversations can change that."
            warnings.append(
                f"At {counted(rows, 'row')} per step, an epoch has {counted(count, 'step')}, fewer than {FEW_STEPS}."
                f"{apart} {advice}"
            )
        if 0 < trained < FEW_TRAINED:
            more = -(-rows * FEW_TRAINED // max(1, round(trained)))
            advice = f" Use {more:,} rows per step." if more < train_rows(found) else ""
            warnings.append(
                f"At {counted(rows, 'row')} per step, a step has {trained:,.0f} trained tokens, fewer than "
                f"{FEW_TRAINED:,}. Its gradient comes from a few answers.{advice}"
            )
    return warnings
