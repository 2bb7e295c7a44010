"""Compare token files with the reference, ID by ID and label by label.

records ─┬─tokenize_part──▶ token file ─┐
         └─reference──────▶ samples ────┴─▶ Tally: counts, and how each wrong conversation differs

`compare` is for built-in templates, and `compare_rendered` for chat templates, which may make several samples.
"""

from __future__ import annotations

import functools
import gzip
import json
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from itertools import pairwise, zip_longest
from typing import Any, get_args

from reference.corpus import expected
from reference.families import trained_turns
from reference.records import read
from reference.renderings import Rendered
from reference.tokens import Encoded, HuggingFace, Library, SentencePiece, encoded
from support.commands import SHARED
from support.differential.unusual_conversations import unusual
from support.tokenizer_kinds import SENTENCEPIECE, Row, kind_path, open_kind, reference, tokenize

from packcorpus.tasks.templates.jinja.template import JinjaTemplate
from packcorpus.tasks.templates.spans import TrainOn, Turns

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
TODAY = "2026-01-01"

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


def compare_rendered(records: Sequence[Any], source: str, kind: str, turns: Turns = "auto") -> Tally:
    """Compare records of the format `messages`, with the source of a chat template."""
    encoder, tally = open_kind(kind), Tally()
    rows, receipt = tokenize(records, encoder, JinjaTemplate("t.jinja", source, encoder, "assistant", TODAY, turns))
    rejects = {number: (reason, message) for number, reason, message in receipt["rejects"]}
    for number, record in enumerate(records):
        conversation = rendered(record, source, kind)
        own = [row for row in rows if row.record == number]
        tally.conversations += 1
        tally.rejected += number in rejects
        tally.samples += len(own)
        tally.tokens += sum(len(row.ids) for row in own)
        tally.trained += sum(row.trained_count for row in own)
        if wrong := difference_of_samples(conversation, own, rejects.get(number), turns):
            tally.wrong.append(f"{wrong}: {json.dumps(record, ensure_ascii=False)[:2000]}")
    return tally


def rendered(record: Any, source: str, kind: str) -> Rendered:
    """Return a conversation of the reference, which Transformers renders."""
    messages, tools = read(record, "messages")
    answers = [k for k, flag in enumerate(trained_turns(messages)) if flag]
    tokenizer = reference(kind)

    def render(messages: Any, tools: Any, prompt: bool) -> str:
        given = {"tools": tools or None, "chat_template": source, "add_generation_prompt": prompt}
        return str(tokenizer.apply_chat_template(messages, tokenize=False, **given))

    return Rendered(messages, tools, answers, render, library_of(kind))


def difference_of_samples(
    conversation: Rendered, rows: Sequence[Row], reject: tuple[str, str] | None, turns: Turns
) -> str:
    """Return how the samples of a chat template differ from what the reference allows."""
    lost = conversation.lost()
    if reject:
        named = re.search(r"messages\[(\d+)\]", reject[1])
        place = int(named[1]) if named else -1
        return "" if place in lost else f"rejected by the code ({reject}), the reference misses {lost}"
    if lost:
        return f"packed, but the reference misses {lost}"
    done: list[int] = []
    for row in rows:
        own = [k for k in conversation.turns if k not in done and (row.turn < 0 or k <= row.turn)]
        text = conversation.text(len(conversation.messages))
        if row.turn >= 0:
            text = conversation.prompt(row.turn) + conversation.answer(row.turn)
        if not own or not conversation.holds(text, own):
            return f"the sample {row.turn} does not hold {own} after their prompts"
        here = (row.ids.tolist(), row.trained.tolist())
        [there] = encoded([conversation.pieces(text, own)], conversation.library)
        if here != there:
            return f"turn {row.turn}: {difference([here], [there])}"
        done += own
    count = len(conversation.turns) if turns == "apart" else conversation.least()
    if done != conversation.turns or len(rows) != count:
        return f"{len(rows)} samples hold {done}, {count} in the reference hold {conversation.turns}"
    return ""


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
