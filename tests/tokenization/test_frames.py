"""A frame that is filled is what the template writes of its own accord, whatever is said, for every tokenizer."""

from __future__ import annotations

from ast import literal_eval
from collections import Counter
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from support.profiles import examples
from support.tokenizer_kinds import BUILT, hostile, open_kind

from tasks.conversations.content import content_digest, said
from tasks.conversations.formats import COLUMNS, read_record
from tasks.conversations.model import Conversation, Message, turns_of, usual_order
from tasks.core.errors import Reject
from tasks.templates.built_in import BUILT_IN, BuiltIn
from tasks.templates.spans import TrainOn, trained_turns
from tasks.tokenization.frames import Framed, Frames
from tasks.tokenization.segments import Segments, segments_of

FEW = settings(max_examples=examples(40), deadline=None, suppress_health_check=[HealthCheck.too_slow])

USUAL = Conversation((Message("user", "100 %s"), Message("assistant", " %d\n")))
ROLES = st.sampled_from(["system", "user", "user", "assistant", "assistant", "tool"])
TRAIN_ON: tuple[TrainOn, ...] = ("assistant", "all", "last")


def check_same(framed: Framed, conversations: list[Conversation], segments: list[Segments]) -> None:
    """What the frames give is what the conversations themselves give."""
    assert framed.texts == [text for one in segments for text in one.texts]
    assert framed.digests == [content_digest(said(conversation).encode()) for conversation in conversations]
    for frame, contents, conversation, own in zip(framed.frames, framed.contents, conversations, segments, strict=True):
        assert list(contents) == [message.content for message in conversation.messages]
        assert (frame.tokens.tolist(), frame.trained.tolist()) == (own.tokens, own.trained)
        assert frame.separator == own.separator
        roles = [message.role for message in conversation.messages]
        assert (frame.usual, frame.turns) == (usual_order(roles), turns_of(roles))


@pytest.mark.parametrize("kind", BUILT)
@pytest.mark.parametrize("name", BUILT_IN)
def test_a_filled_frame_is_what_the_template_writes(kind: str, name: str) -> None:
    encoder = open_kind(kind)
    frames = {on: Frames(BuiltIn(name, encoder, on), encoder, on) for on in TRAIN_ON}
    texts = st.sampled_from(["", " ", "\n", "\v", "%", "%%s", " a ", "\x1cb", "▁"]) | hostile(kind)
    turns = st.builds(Message, ROLES, texts, st.sampled_from(["", "", "", " c"]), weight=st.sampled_from([1, 1, 1, 0]))
    conversations = st.lists(turns, min_size=1, max_size=5).map(lambda m: Conversation(tuple(m)))
    plain = texts.filter(bool).map(lambda text: Conversation((Message("text", text),)))

    @FEW
    @given(conversations | plain, st.sampled_from(TRAIN_ON))
    @example(USUAL, "assistant")
    @example(USUAL, "all")
    @example(Conversation((Message("text", " a\n"),)), "assistant")
    def check(conversation: Conversation, train_on: TrainOn) -> None:
        trained = trained_turns(conversation, train_on)
        if found := frames[train_on].of_conversation(conversation, trained):
            spans = BuiltIn(name, encoder, train_on).spans(conversation, trained)
            check_same(found, [conversation], [segments_of(spans, encoder)])

    check()
    assert encoder.has_space or frames["all"].of_conversation(USUAL, [True, True])


odd = st.none() | st.booleans() | st.integers() | st.just([]) | st.just({})
text = st.text(max_size=5) | st.sampled_from(["a", "so", "\0", "\udc00", "é", " "])


def turn(role: str, content: str) -> st.SearchStrategy[Any]:
    roles = st.sampled_from(["system", "user", "human", "assistant", "gpt", "tool", "function_call", "none"])
    usual = st.fixed_dictionaries({role: roles | roles | odd, content: text | text | odd})
    more = st.dictionaries(st.sampled_from(["weight", "name", "tool_calls", role]), odd | text, max_size=1)
    return st.builds(lambda a, b: a | b, usual, st.just({}) | st.just({}) | more) | odd


def often(usual: st.SearchStrategy[Any], *others: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Nine times of ten `usual`: `|` would make its parts one of many."""
    return st.sampled_from([usual] * 9 + [st.one_of(others)]).flatmap(lambda chosen: chosen)


def records(format: str) -> st.SearchStrategy[Any]:
    """Mostly such as hold turns and nothing else."""
    said = often(st.sampled_from(["a", "so", "é", " b\n", "%s"]), text)
    anything = odd | text | st.just(Reject("bad_json", "")) | st.lists(text, min_size=1)
    if format in NAMES:
        key, role, content = NAMES[format]
        roles = st.sampled_from(["user", "assistant"])
        usual = st.lists(st.fixed_dictionaries({role: roles, content: said}), max_size=2).map(
            lambda turns: [*turns, {role: "assistant", content: "yes"}]
        )
        turns = often(usual, st.lists(turn(role, content), max_size=4), odd)
        others = st.dictionaries(st.sampled_from(["tools", "system", "id", "conversation"]), odd | text, max_size=1)
        found = st.builds(lambda found, more: {key: found} | more, turns, often(st.just({}), others))
        return often(found, anything)
    keys = st.sampled_from(KEYS[format])
    usual = keys.flatmap(lambda keys: st.fixed_dictionaries(dict.fromkeys(keys, said)))
    others = st.dictionaries(st.sampled_from([*COLUMNS, "id"]), odd | text, max_size=1)
    return often(st.builds(lambda found, more: found | more, usual, often(st.just({}), others)), anything)


NAMES = {"messages": ("messages", "role", "content"), "sharegpt": ("conversations", "from", "value")}
KEYS = {
    "alpaca": [("instruction", "output"), ("instruction", "response"), ("instruction", "input", "output", "system")],
    "dolly": [("instruction", "response"), ("instruction", "context", "response")],
    "prompt_completion": [
        *[("prompt", "completion"), ("prompt", "response"), ("question", "answer"), ("question", "response")],
        *[("prompt", "completion", "response"), ("prompt", "question", "answer"), ("question", "answer", "response")],
    ],
    "text": [("text",)],
}


@pytest.mark.parametrize("format", [*NAMES, *KEYS])
@pytest.mark.parametrize("template", ["chatml", "llama3"])
def test_records_that_are_taken_at_once_are_what_is_read_with_care(format: str, template: str) -> None:
    encoder = open_kind("sp_bpe_chatml")
    frames = {on: Frames(BuiltIn(template, encoder, on), encoder, on, format) for on in TRAIN_ON}
    seen = Counter[str]()

    @settings(FEW, max_examples=examples(300))
    @given(st.lists(records(format), min_size=1, max_size=6), st.sampled_from(TRAIN_ON))
    def check(found: list[object], train_on: TrainOn) -> None:
        framed, taken = frames[train_on].of_records(found)
        some = [record for record, is_taken in zip(found, taken, strict=True) if is_taken]
        conversations = [read_record(record, format) for record in some]
        trained = [trained_turns(conversation, train_on) for conversation in conversations]
        template_of = BuiltIn(template, encoder, train_on)
        spans = [template_of.spans(*both) for both in zip(conversations, trained, strict=True)]
        check_same(framed, conversations, [segments_of(each, encoder) for each in spans])
        runs = list(framed.runs(taken))
        assert [is_taken for start, stop, run in runs for is_taken in [run is not None] * (stop - start)] == taken
        assert [text for *_, run in runs if run for text in run.texts] == framed.texts
        seen["all"] += all(taken) and len(taken) > 1
        seen["some"] += any(taken) and not all(taken)

    check()
    assert seen["all"] > 10, seen
    assert seen["some"] > 30, seen


@pytest.mark.parametrize("format", [*NAMES, *KEYS])
def test_usual_records_are_taken_at_once(format: str) -> None:
    encoder = open_kind("sp_bpe_chatml")
    frames = Frames(BuiltIn("chatml", encoder, "all"), encoder, "all", format)
    if format in NAMES:
        key, role, content = NAMES[format]
        turns = [{role: "user", content: "6 × 7?"}, {role: "assistant", content: "42"}]
        found: list[Any] = [{key: turns, "id": 7}, {key: turns * 2, "tools": None}, {key: turns[1:], "tools": ""}]
    else:
        found = [{key: f"{key} {n}" for key in KEYS[format][0]} | {"system": None} for n in range(3)]
    framed, taken = frames.of_records(found)
    assert len(framed.frames) == 3
    assert taken == [True] * 3
    bad = [str(found[0]).replace("6 × 7?", text).replace(" 0", text) for text in (r"\x00", r"\udc00")]
    for strange in (
        *map(literal_eval, bad),
        {"text": ""},
        [1],
        None,
        "x",
        5,
        Reject("bad_json", ""),
        [turns] if format in NAMES else {},
    ):
        for at in range(4):
            mixed = [*found[:at], strange, *found[at:]]
            assert frames.of_records(mixed) == (framed, [True] * at + [False] + [True] * (3 - at))
    assert frames.of_records([])[1] == []


@pytest.mark.parametrize(
    "record",
    [
        {"messages": [{"role": "user", "content": "a\0"}, {"role": "assistant", "content": "b"}]},
        {"messages": [{"role": "user", "content": "\udc00"}, {"role": "assistant", "content": "b"}]},
        {"messages": [{"role": "user", "content": 5}, {"role": "assistant", "content": "b"}]},
        {"messages": [{"role": "assistent", "content": "a"}]},
        {"messages": [{"role": ["user"], "content": "a"}]},
        {"messages": [{"role": "user", "content": "a"}]},  # nothing is trained on
        {"messages": []},
        {"messages": [{"role": "assistant", "content": " "}]},
        {"messages": [{"role": "assistant", "content": "a", "weight": 0}]},
        {"messages": [{"role": "assistant", "content": "a"}], "tools": []},
        {"messages": "user"},
        Reject("bad_json", ""),
    ],
)
def test_what_may_be_rejected_or_is_unusual_is_read_with_care(record: object) -> None:
    encoder = open_kind("sp_bpe_chatml")
    assert Frames(BuiltIn("chatml", encoder, "assistant"), encoder, "assistant", "messages").of_records([record])[
        1
    ] == [False]


def test_a_frame_is_written_once(monkeypatch: pytest.MonkeyPatch) -> None:
    encoder = open_kind("sp_bpe_chatml")
    template = BuiltIn("chatml", encoder, "assistant")
    frames = Frames(template, encoder, "assistant", "messages")
    first = frames.of_conversation(USUAL, [False, True])
    assert first
    monkeypatch.setattr(template, "spans", None)
    others = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]
    found, taken = frames.of_records([{"messages": others}])
    assert taken == [True]
    assert found.frames[0] is first.frames[0]
    assert "".join(found.texts) == "user\n2+2?\nassistant\n4"


def test_shapes_beyond_the_bound_go_the_longer_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tasks.tokenization.frames._MOST", 2)
    encoder = open_kind("sp_bpe_chatml")
    frames = Frames(BuiltIn("chatml", encoder, "assistant"), encoder, "assistant", "messages")
    told = [
        frames.of_records([{"messages": [{"role": role, "content": "a"} for role in roles]}])[1]
        for roles in (["assistant"], ["user", "assistant"], ["system", "assistant"], ["assistant"], ["assistant"] * 3)
    ]
    assert told == [[True], [True], [False], [True], [False]]


def test_a_mapping_of_columns_is_read_with_care() -> None:
    encoder = open_kind("sp_bpe_chatml")
    record = {"messages": [{"role": "assistant", "content": "a"}]}
    for renamed in (False, True):
        frames = Frames(BuiltIn("chatml", encoder, "assistant"), encoder, "assistant", "messages", renamed)
        assert frames.of_records([record])[1] == [not renamed]
