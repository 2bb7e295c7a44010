"""Compare token files with the reference, ID by ID and label by label.

records ─┬─tokenize_part──▶ token file ─┐
         └─reference──────▶ samples ────┴─▶ Tally: counts, and how each wrong conversation differs
"""

from __future__ import annotations

import functools
import gzip
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from itertools import pairwise, zip_longest
from typing import Any, get_args

from reference.corpus import expected
from reference.tokens import Encoded, HuggingFace, Library, SentencePiece
from support.commands import SHARED
from support.differential.unusual_conversations import unusual
from support.tokenizer_kinds import SENTENCEPIECE, kind_path, open_kind, tokenize

from tasks.templates.spans import TrainOn

CORPORA = {
    "fastchat_dummy.json": "sharegpt",
    "gpteacher_roleplay.json": "alpaca",
    "gsm8k_train.jsonl": "prompt_completion",
    "llamafactory_alpaca_en_demo.json": "alpaca",
    "llamafactory_glaive_toolcall_en_demo.json": "sharegpt",
    "t0_prompts.jsonl.gz": "prompt_completion",
}
AT_ONCE = 1000  # conversations
REAL = 30_000

Sourced = tuple[str, Any]  # format, record


@dataclass
class Tally:
    """Counts of a comparison, and the differences found."""

    conversations: int = 0
    rejected: int = 0
    samples: int = 0
    tokens: int = 0
    trained: int = 0
    wrong: list[str] = field(default_factory=list)

    def __add__(self, other: Tally) -> Tally:
        return Tally(*(getattr(self, each.name) + getattr(other, each.name) for each in fields(Tally)))


@functools.cache
def library_of(kind: str) -> Library:
    return SentencePiece(kind_path(kind)) if kind in SENTENCEPIECE else HuggingFace(kind_path(kind))


def compare_pair(
    template: str, kind: str, real_count: int, unusual_count: int, seed: int, real_seed: int | None = None
) -> Tally:
    """Compare real conversations and unusual ones.

    Real conversations are trained as usual, unusual ones in every way. With `real_seed`, the real conversations are
    drawn from the first REAL ones; without it, they are the first `real_count`.
    """
    chosen = real(REAL if real_seed is not None else real_count) if real_count else []
    if real_seed is not None and chosen:
        chosen = random.Random(real_seed).sample(chosen, real_count)
    tally = compare(chosen, template, kind)
    odd = unusual(kind, seed, unusual_count) if unusual_count else []
    for train_on in get_args(TrainOn):
        tally += compare(odd, template, kind, train_on)
    return tally


def compare(records: Sequence[Sourced], template: str, kind: str, train_on: TrainOn = "assistant") -> Tally:
    """Compare records of all formats, with one tokenizer and one template."""
    tally = Tally()
    for format in dict.fromkeys(format for format, _ in records):
        own = [record for each, record in records if each == format]
        for start in range(0, len(own), AT_ONCE):
            some = own[start : start + AT_ONCE]
            found = written(some, format, template, kind, train_on)
            said = expected(some, format, template, library_of(kind), train_on)
            for record, here, there in zip(some, found, said, strict=True):
                add(tally, record, here, there)
    return tally


def written(
    records: Sequence[Any], format: str, template: str, kind: str, train_on: TrainOn
) -> list[list[Encoded] | None]:
    """Return the samples of each record in the token file, or None if it was rejected."""
    rows, receipt = tokenize(records, open_kind(kind), template, train_on, format)
    found: list[list[Encoded] | None] = [[] for _ in records]
    for row in rows:
        samples = found[row.record]
        assert samples is not None
        samples.append((row.ids.tolist(), row.trained.tolist()))
    for number, *_ in receipt["rejects"]:
        assert not found[number], f"record {number} is in the token file, and rejected"
        found[number] = None
    return found


def add(tally: Tally, record: Any, here: list[Encoded] | None, there: list[Encoded] | None) -> None:
    tally.conversations += 1
    tally.rejected += there is None
    for ids, trained in there or ():
        tally.samples += 1
        tally.tokens += len(ids)
        tally.trained += sum(trained)
    if here != there:
        tally.wrong.append(f"{difference(here, there)}: {json.dumps(record, ensure_ascii=False)[:2000]}")


def difference(here: list[Encoded] | None, there: list[Encoded] | None) -> str:
    if here is None or there is None:
        return "rejected by the reference only" if there is None else "rejected by the code only"
    if len(here) != len(there):
        return f"{len(here)} samples, {len(there)} in the reference"
    for number, (ours, theirs) in enumerate(zip(here, there, strict=True)):
        for place, (one, other) in enumerate(zip_longest(zip(*ours, strict=True), zip(*theirs, strict=True))):
            if one != other:
                return f"sample {number}, token {place}: (id, trained on) is {one}, {other} in the reference"
    return "nothing"


@functools.cache
def real(count: int) -> list[Sourced]:
    """Return the first `count` real conversations.

    They come from the public corpora, and then from pairs of GSM8K problems: each conversation asks two of them.
    """
    found: list[Sourced] = []
    problems: list[Any] = []
    for name, format in CORPORA.items():
        data = (SHARED / "corpora" / name).read_bytes()
        data = gzip.decompress(data) if name.endswith(".gz") else data
        lines = [line for line in data.split(b"\n") if line.strip()]
        records = json.loads(data) if name.endswith(".json") else list(map(json.loads, lines))
        problems = records if name.startswith("gsm8k") else problems
        found += [(format, record) for record in records]
    made = ({"messages": [*turns(one), *turns(other)]} for one, other in pairwise(problems))
    return (found + [("messages", record) for record in made])[:count]


def turns(problem: dict[str, str]) -> Iterator[dict[str, str]]:
    yield {"role": "user", "content": problem["question"]}
    yield {"role": "assistant", "content": problem["answer"]}
