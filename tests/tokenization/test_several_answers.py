"""Each of several answers has the samples of the record with this answer alone.

prompt, answers ─┬─▶ {"prompt": …, "completions": [a, b]} ──────────────▶ samples of one conversation ─┐
                 └─▶ {"prompt": …, "completion": a}, {…, b, untrained} ─▶ samples of two ──────────────┴─▶ equal
"""

from __future__ import annotations

from collections import Counter
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.profiles import examples
from support.templates.agent_templates import AGENTS
from support.tokenizer_kinds import Row, open_kind, tokenize

from packcorpus.tasks.conversations.formats import read_record
from packcorpus.tasks.conversations.model import content_digest, layout_of, whole_text
from packcorpus.tasks.core.errors import Reject
from packcorpus.tasks.sources.model import SourceFile
from packcorpus.tasks.templates.adjust import Adjust
from packcorpus.tasks.templates.built_in import BuiltIn
from packcorpus.tasks.templates.jinja.template import JinjaTemplate
from packcorpus.tasks.templates.spans import Template
from packcorpus.tasks.tokenization.prepare import Preparer
from packcorpus.tasks.tokenization.samples import Prepared, roles_of

KIND, TODAY = "hf_byte_level", "2026-01-01"
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": 2}}}

Record = dict[str, Any]
Turns = list[dict[str, Any]]


def turn(role: str, content: str, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


texts = st.sampled_from(["4", "Four.", "2 + 2?", " Und nun?\n", "<|im_end|>", "x" * 40])
reasoning = st.sampled_from([{}, {}, {"reasoning_content": "Two and two."}])
flags = st.sampled_from([{}, {}, {}, {"train": False}, {"loss_weight": 0}])
asked = st.builds(turn, st.just("user"), texts)
said = st.builds(lambda text, more, flag: turn("assistant", text, **more, **flag), texts, reasoning, flags)
blank = st.just(turn("assistant", ""))
called = st.tuples(
    st.just(turn("assistant", "", tool_calls=[CALL])), st.builds(turn, st.just("tool"), texts), said
).map(list)
answers = st.one_of(
    st.lists(said, min_size=1, max_size=1),
    st.lists(st.one_of(said, said, said, blank), min_size=1, max_size=1),
    st.tuples(said, asked, said).map(list),
    called,
)
rounds = st.one_of(st.tuples(asked, said).map(list), st.builds(lambda one, more: [one, *more], asked, called))


@st.composite
def records(draw: st.DrawFn) -> Record:
    system = [turn("system", "Be brief.")] * draw(st.booleans())
    history = [message for messages in draw(st.lists(rounds, max_size=2)) for message in messages]
    return {"prompt": [*system, *history, draw(asked)], "completions": draw(st.lists(answers, min_size=1, max_size=4))}


Sample = tuple[list[int], list[bool], int]


def samples_of(rows: list[Row], count: int) -> list[list[Sample]]:
    found: list[list[Sample]] = [[] for _ in range(count)]
    for row in rows:
        found[row.record].append((row.ids.tolist(), row.trained.tolist(), row.turn))
    return found


def apart(record: Record, template: Template, train_on: str) -> list[Sample] | None:
    """Return the samples of all answers, each read alone.

    Returns None if the record must be rejected.
    """
    prompt, completions = record["prompt"], record["completions"]
    untrained = [message | {"train": False} for message in prompt]
    branches = [{"prompt": before, "completion": answer} for answer in completions for before in (prompt, untrained)]
    rows, receipt = tokenize(branches, template.encoder, template, train_on, "prompt_completion")
    samples = samples_of(rows, len(branches))
    rejects = {number: reason for number, reason, _ in receipt["rejects"]}
    first = accumulate(map(len, completions), initial=0)
    found: list[Sample] = []
    for n, (answer, offset) in enumerate(zip(completions, first, strict=False)):
        with_prompt, alone = 2 * n, 2 * n + 1
        is_flagged = any(message.get("train") is False or message.get("loss_weight") == 0 for message in answer)
        if rejects.get(alone) == "no_trained_tokens" and not is_flagged:
            return None
        chosen = alone if found else with_prompt
        if rejects.get(chosen) == "no_trained_tokens":
            continue
        if chosen in rejects:
            return None
        last = len(prompt) + len(answer) - 1
        for ids, trained, end in samples[chosen]:
            end = last if end < 0 else end
            found.append((ids, trained, end + offset if end >= len(prompt) else end))
    return found or None


def test_each_string_of_an_answer_has_its_role() -> None:
    layout = layout_of(read_record({"prompt": "a", "completions": ["b", "c"]}, "completions"))
    assert roles_of(layout, 3) == ["user", "assistant", "assistant"]


def prepared(format: str, record: Record) -> list[Prepared]:
    encoder = open_kind(KIND)
    file = SourceFile(Path("a.jsonl"), "a.jsonl", "jsonl", "", format, (), 0, "", 0)
    return Preparer(file, BuiltIn("chatml", encoder, "assistant"), encoder, "assistant").prepare(record)


def test_facts_of_the_conversation_are_those_of_all_answers() -> None:
    user, said, empty = turn("user", "2+2?"), turn("assistant", "4"), turn("user", "")
    record = {"prompt": [user], "completions": [[said], [said, said, empty, said]]}
    samples = prepared("completions", record)
    assert [sample.layout.turn for sample in samples] == [1, 5]
    whole = whole_text(read_record(record, "completions"))
    for sample in samples:
        layout = sample.layout
        assert (layout.turns, layout.usual, layout.empty_prompt, layout.conversation) == (5, False, True, "")
        assert sample.strings == whole.split("\0")
        assert sample.digest == content_digest(whole.encode())
    [alone] = prepared("prompt_completion", {"prompt": "2+2?", "completion": "Four."})
    later = prepared("completions", {"prompt": [user], "completions": [[said | {"train": False}, user, said], "4"]})
    assert {sample.prompt for sample in (*samples, *later)} == {alone.prompt}, "no part of an answer belongs to it"


def test_an_empty_answer_is_a_reject_although_the_prompt_has_one_that_is_trained_on() -> None:
    history = [turn("user", "1+1?"), turn("assistant", "2"), turn("user", "2+2?")]
    with pytest.raises(Reject, match=r"^completions\[0\]: none of its turns is trained on"):
        prepared("completions", {"prompt": history, "completions": ["", "4"]})
    flagged = [turn("assistant", "4", train=False)]
    first, second = prepared("completions", {"prompt": history, "completions": [flagged, "4"]})
    of_prompt, own = (sample.layout.trained.tolist().index(True) for sample in (first, second))
    assert of_prompt < own, "the answer of the prompt is trained on once"


def template_of(name: str, train_on: Any, turns: Any) -> Template:
    encoder = open_kind(KIND)
    if name in AGENTS:
        return JinjaTemplate("t.jinja", AGENTS[name], encoder, train_on, TODAY, turns)
    return BuiltIn(name, encoder, train_on, turns, Adjust(drop_reasoning=True))


@pytest.mark.parametrize("train_on", ["assistant", "all", "last", "rounds"])
@pytest.mark.parametrize(
    ("name", "turns"),
    [
        ("chatml", "auto"),
        ("kept", "apart"),
        ("after the last user message", "auto"),
        ("in the last turn", "auto"),
        ("kept", "as_rendered"),
    ],
)
def test_each_answer_has_the_samples_of_its_own_record(name: str, turns: str, train_on: str) -> None:
    template, seen = template_of(name, train_on, turns), Counter[str]()

    @settings(max_examples=examples(60), deadline=None)
    @given(st.lists(records(), min_size=1, max_size=3))
    def check(given_records: list[Record]) -> None:
        rows, receipt = tokenize(given_records, template.encoder, template, train_on, "completions")
        found = samples_of(rows, len(given_records))
        rejected = {number for number, *_ in receipt["rejects"]}
        for number, record in enumerate(given_records):
            if len(record["completions"]) == 1:  # the record of before
                one = {"prompt": record["prompt"], "completion": record["completions"][0]}
                alone, _ = tokenize([one], template.encoder, template, train_on, "prompt_completion")
                assert found[number] == samples_of(alone, 1)[0]
                seen["one"] += 1
                continue
            expected = apart(record, template, train_on)
            assert found[number] == (expected or [])
            assert (number in rejected) == (expected is None)
            turns_of_samples = [end for *_, end in found[number]]
            assert turns_of_samples == sorted({*turns_of_samples}), "record and turn identify a sample"
            seen["rejected" if expected is None else "several"] += 1
        assert receipt["accepted"] == len(given_records) - len(rejected)

    check()
    assert min(seen["one"], seen["several"], seen["rejected"]) > 0, seen
