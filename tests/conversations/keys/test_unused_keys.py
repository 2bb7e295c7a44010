"""Every key is used or counted, regardless of order and parts.

Training flags and other data are recognized.
"""

from __future__ import annotations

import copy
import json
import re
from collections import Counter
from itertools import pairwise
from random import Random
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.profiles import examples

from packcorpus.tasks.conversations.formats import FORMAT_OF, FORMATS, read_record
from packcorpus.tasks.conversations.model import Format, Message
from packcorpus.tasks.conversations.other_data import IGNORABLE, without_parts
from packcorpus.tasks.conversations.unused_keys import (
    LONGEST_KEY,
    MOST_PATHS,
    OTHERS,
    UnusedKeys,
    is_absent,
    sum_counts,
)
from packcorpus.tasks.core.errors import DataError, Reject
from packcorpus.tasks.templates.spans import TrainOn, trained_turns
from packcorpus.tasks.tokenization.prepare import PlainRecords

VALUES = (
    None,
    "",
    [],
    {},
    0,
    False,
    True,
    7,
    "x",
    "x",
    ["a"],
    {"a": {"b": "c"}},
    [{"type": "text", "text": "x", "y": 1}],
)
KEYS = (
    *(
        "id",
        "extra",
        "source",
        "weight",
        "train",
        "train_detail",
        "name",
        "reasoning",
        "function_call",
        "role",
        "value",
    ),
    *("content", "text", "response", "completion", "answer", "question", "context", "conversation", "lang", "system"),
)
CALL = {"id": "c", "type": "function", "index": 0, "function": {"name": "f", "arguments": "{}", "strict": True}}
REPLY = {"role": "prompter", "text": "c", "lang": "en"}
RICH = {
    "messages": {"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {"t": 1}}]},
                              {"role": "assistant", "content": None, "tool_calls": [CALL]}]},
    "sharegpt": {"conversations": [{"from": "human", "value": "a", "role": "b"},
                                   {"role": "assistant", "content": "", "function_call": {"name": "f", "x": 1}}]},
    "oasst": {"prompt": {"role": "prompter", "text": "a", "lang": "en", "replies": [
        {"role": "assistant", "text": "b", "lang": "en", "rank": 0, "replies": [REPLY]}]}},
}  # fmt: skip


def more(random: Random, value: Any) -> Any:
    """Return a copy of a value whose objects have more keys or other values."""
    if isinstance(value, list):
        return [more(random, item) for item in value]
    if not isinstance(value, dict):
        return random.choice((value, value, value, "x", None))
    found = {key: more(random, item) for key, item in value.items()}
    for _ in range(random.choice((0, 1, 1, 3))):
        found[random.choice(KEYS)] = copy.deepcopy(random.choice(VALUES))
    return found


def reading(record: object, format: Format) -> object:
    try:
        return read_record(record, format.name)
    except Reject as reject:
        return reject.reason


def reduced(record: dict[str, Any], format: Format) -> dict[str, Any]:
    """Return a copy of the record without its unused keys."""
    copied = copy.deepcopy(record)
    for _, item, known in list(format.objects(copied, {})) if format.objects else []:
        for key in item.keys() - known:
            del item[key]
    used = format.used(copied) if format.used else format.keys
    return {key: value for key, value in copied.items() if key in used}


@pytest.mark.parametrize("format", FORMATS, ids=[format.name for format in FORMATS])
def test_what_is_not_used_can_be_removed_and_all_of_it_is_counted(format: Format) -> None:
    changed = set()

    @settings(max_examples=examples(300))
    @given(st.randoms(use_true_random=True))
    def check(random: Random) -> None:
        base: Any = random.choice((json.loads(format.example), RICH.get(format.name, json.loads(format.example))))
        record = more(random, base)
        before = copy.deepcopy(record)
        unused = list(UnusedKeys(format.name, {}, ()).unused(record))
        assert record == before
        without = reduced(record, format)
        assert reading(without, format) == reading(record, format)
        assert not list(UnusedKeys(format.name, {}, ()).unused(without))
        assert not any(is_absent(value) for _, _, value in unused)
        changed.add(bool(unused))

    check()
    assert True in changed


@pytest.mark.parametrize("format", FORMATS, ids=[format.name for format in FORMATS])
def test_a_block_of_records_has_the_counts_of_each(format: Format) -> None:
    @settings(max_examples=examples(300))
    @given(st.randoms(use_true_random=True))
    def check(random: Random) -> None:
        example = json.loads(format.example)
        names = random.choices((*format.keys, "id", "label", "extra"), k=3)
        records = [example | {name: random.choice(("", None, "y", 0)) for name in names} for _ in range(5)]
        records += [more(random, example)] * random.choice((0, 0, 1))
        expected: Counter[str] = Counter()
        for record in records:
            found = UnusedKeys(format.name, {}, ()).unused(record)
            expected.update(".".join(filter(None, place[:2])) for place in found)
            expected.update(format.left_out(record) if format.left_out else {})
        unused = UnusedKeys(format.name, {}, ())
        unused.add(range(len(records)), records, str)
        assert unused.found() == expected

    check()


def test_the_paths_of_unused_keys() -> None:
    def paths(format: str, record: dict[str, Any], columns: dict[str, str] | None = None) -> list[str]:
        return sorted(
            ".".join(filter(None, found[:2])) for found in UnusedKeys(format, columns or {}, ()).unused(record)
        )

    inside = "messages[].tool_calls[]"
    assert paths("messages", RICH["messages"]) == [
        "messages[].content[].cache_control", f"{inside}.function.strict", f"{inside}.index",
    ]  # fmt: skip
    assert paths("sharegpt", RICH["sharegpt"]) == ["conversations[].function_call.x", "conversations[].role"]
    assert paths("oasst", RICH["oasst"]) == ["prompt.lang", "prompt.replies[].lang", "prompt.replies[].lang"]
    assert paths("alpaca", {"instruction": "a", "output": "b", "response": "c", "input": "d", "context": "e"}) == [
        "context", "response",
    ]  # fmt: skip
    assert paths("alpaca", {"instruction": "a", "output": "b", "input": "", "context": "e"}) == []
    both = {"prompt": "a", "question": "b", "completion": "c", "answer": "d", "response": "e"}
    assert paths("prompt_completion", both) == ["answer", "question", "response"]
    turns = {"chat": [{"role": "user", "content": "a", "id": 1}], "messages": [], "tools": [{"name": "f"}], "id": 0}
    assert paths("messages", turns, {"messages": "chat"}) == ["chat[].id", "id"]
    said = {"messages": [{"speaker": "user", "said": "a", "role": "b", "id": 1}], "id": 1}
    assert paths("messages", said, {"role": "speaker", "content": "said"}) == ["id", "messages[].id", "messages[].role"]
    half = {"conversations": [{"from": "human", "said": "a", "value": "b"}, {"from": "gpt", "said": "b", "role": "c"}]}
    assert paths("sharegpt", half, {"content": "said"}) == ["conversations[].role", "conversations[].value"]
    apart = {"conversations": [{"from": "human", "value": [{"type": "text", "text": "a", "id": 1}]}]}
    assert paths("sharegpt", apart) == ["conversations[].value[].id"]
    apart = {"messages": [{"role": "user", "said": [{"type": "text", "text": "a", "id": 1}]}]}
    assert paths("messages", apart, {"content": "said"}) == ["messages[].said[].id"]
    assert read_record(half, "sharegpt", {"content": "said"}).messages[1] == Message("assistant", "b")
    assert paths("messages", {"messages": [{"role": "user", "content": "a", "reasoning": "b", "train": False}]}) == []


KINDS = (*(f"k{number:02}" for number in range(70)), "a\nb", "\x1b[0m", "long" * 40, "\ud800", OTHERS)


@given(st.randoms(use_true_random=True))
@settings(max_examples=examples(100))
def test_counts_of_parts_add_up_to_those_of_the_whole(random: Random) -> None:
    def counts(some: list[dict[str, Any]]) -> dict[str, int]:
        unused = UnusedKeys("text", {}, ())
        unused.add(range(len(some)), some, str)
        return unused.found()

    names = random.sample(KINDS, random.choice((3, 49, 52, len(KINDS))))
    records = [
        {name: random.choice((1, 1, "", None)) for name in random.choices(names, k=9)}
        for _ in range(random.choice((0, 9, 40)))
    ]
    whole = counts(records)
    cuts = [0, *sorted(random.choices(range(len(records) + 1), k=3)), len(records)]
    parts = [counts(records[first:last]) for first, last in pairwise(cuts)]
    assert sum_counts(parts) == whole == sum_counts(random.sample(parts, len(parts)))
    assert sum(whole.values()) == sum(value == 1 for record in records for value in record.values())
    assert len(whole) <= MOST_PATHS + 1
    numbered = sorted({key for record in records for key, value in record.items() if value == 1 and key[0] == "k"})
    kept = sorted(path for path in whole if path[0] == "k")
    assert kept == numbered[: len(kept)], "the first of the alphabet"
    assert len(whole) >= min(MOST_PATHS, len(numbered))
    assert all(path.isprintable() and len(path) < LONGEST_KEY * 2 for path in whole)


@pytest.mark.parametrize("format", [format for format in FORMATS if format.plain], ids=lambda format: str(format.name))
def test_plain_records_have_the_counts_of_their_objects(format: Format) -> None:
    @settings(max_examples=examples(200))
    @given(st.randoms(use_true_random=True))
    def check(random: Random) -> None:
        base = {key: value for key, value in json.loads(format.example).items() if key not in ("input", "context")}
        records = []
        for _ in range(4):
            names = random.choices(("id", "source", "category", *format.keys), k=random.choice((0, 1, 3)))
            records.append({name: random.choice(("", None, "y")) for name in names} | base)
        lines = [orjson.dumps(record) for record in records]
        found = []
        for some in (PlainRecords(format.name).decode(lines), records):
            unused = UnusedKeys(format.name, {}, ())
            unused.add(range(4), some or [], str)
            found.append(unused.found())
        assert found[0] == found[1]

    check()


@pytest.mark.parametrize(
    ("format", "record", "unused"),
    [
        ("alpaca", {"instruction": "a", "output": "b", "response": "c"}, "response"),
        ("prompt_completion", {"prompt": "a", "response": "b", "completion": "c"}, "response"),
        ("prompt_completion", {"prompt": "a", "question": "b", "completion": "c"}, "question"),
        ("messages", {"messages": [], "category": "c"}, "category"),
    ],
)
def test_plain_records_hold_no_second_answer(format: str, record: dict[str, Any], unused: str) -> None:
    found = UnusedKeys(format, {}, ())
    found.add(range(2), PlainRecords(format).decode([orjson.dumps(record)] * 2) or [], str)
    assert found.found() == {unused: 2}


# -- training flags ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "train"),
    [
        ({}, None), ({"weight": 0.0}, False), ({"weight": 1.0}, None), ({"weight": False}, False),
        ({"weight": True}, None), ({"train": False}, False), ({"train": True}, True), ({"training": False}, False),
        ({"training": 0}, False), ({"training": 1, "weight": 1}, True), ({"weight": 0, "train": False}, False),
        ({"weight": 1, "train": False}, False),
        ({"train": None, "weight": None}, None), ({"train_detail": [1]}, None),
    ],
)  # fmt: skip
def test_flags_decide_whether_a_message_is_trained_on(flags: dict[str, Any], train: bool | None) -> None:
    record = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"} | flags]}
    assert read_record(record, "messages").messages[1] == Message("assistant", "b", train=train)
    turns = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"} | flags]
    assert read_record({"conversations": turns}, "sharegpt").messages[1].train is train


@pytest.mark.parametrize("flag", [{"train": True}, {"training": True}, {"weight": 1}, {"train": False}, {"weight": 0}])
@pytest.mark.parametrize("train_on", ["assistant", "last", "all"])
def test_a_flag_decides_instead_of_train_on(flag: dict[str, Any], train_on: TrainOn) -> None:
    """`weight: 1` decides nothing: it is the default of OpenAI's format."""
    turns = [("user", "a"), ("assistant", "b"), ("user", "c"), ("tool", " "), ("assistant", "d")]
    messages = [{"role": role, "content": content} for role, content in turns]
    chosen = trained_turns(read_record({"messages": messages}, "messages"), train_on)
    for index in range(len(messages)):
        flagged = [{**message, **(flag if index == k else {})} for k, message in enumerate(messages)]
        expected = chosen.copy()
        if flag != {"weight": 1} and messages[index]["content"].strip():
            expected[index] = bool(next(iter(flag.values())))
        assert trained_turns(read_record({"messages": flagged}, "messages"), train_on) == expected


# -- other data -------------------------------------------------------------------------------------------------------

PARTS = "messages[].content[]"
ANSWERED: dict[str, Any] = {"prompt": "a", "completion": "b"}
TURNS: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}


def with_part(**part: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, part]}, TURNS["messages"][1]]}


@pytest.mark.parametrize(
    ("format", "record", "reason", "message"),
    [
        ("prompt_completion", ANSWERED | {"label": True}, "preference_data", "has label: this is preference data"),
        ("prompt_completion", ANSWERED | {"label": "False"}, "preference_data", "ignore: [label]"),
        ("messages", TURNS | {"label": False}, "preference_data", "has label"),
        ("messages", TURNS | {"kto_tag": False}, "preference_data", "has kto_tag"),
        ("messages", TURNS | {"rejected": "x", "chosen": ["y"]}, "preference_data", "ignore: [chosen, rejected]"),
        ("messages", TURNS | {"rejected_response": "x"}, "preference_data", "not supervised fine-tuning data"),
        ("messages", TURNS | {"images": ["x.png"]}, "media_data", "has images: this is data with images, not"),
        ("alpaca", {"instruction": "a", "output": "b", "audio": {"path": "x"}}, "media_data", "data with audio"),
        ("text", {"text": "a", "image": "x.png", "videos": ["y"]}, "media_data", "with images and video, not"),
        ("messages", with_part(type="image_url", image_url={"url": "x"}), "media_data", "part has type image_url"),
        (
            "messages",
            with_part(type="image_url") | {"images": ["x"], "video": "y"},
            "media_data",
            "the record has images and video and a content part has type image_url: ",
        ),
        ("messages", with_part(type="input_audio"), "media_data", "ignore: [input_audio]"),
        ("messages", with_part(type="video", video="x"), "media_data", "not supervised fine-tuning data"),
    ],
)  # fmt: skip
def test_other_data_is_an_error_until_it_is_ignored(
    format: str, record: dict[str, Any], reason: str, message: str
) -> None:
    plain = {"id": "1"} | (TURNS if format == "messages" else json.loads(FORMAT_OF[format].example))
    with pytest.raises(DataError, match=r"^chat.jsonl:9: ") as caught:
        UnusedKeys(format, {}, ()).add([7, 9], [plain, record], lambda number: f"chat.jsonl:{number}")
    assert caught.value.reason == reason
    assert message in str(caught.value)
    unused = UnusedKeys(format, {}, IGNORABLE)
    unused.add([7, 9], [plain, record], str)
    named = re.search(r"ignore: \[(.*)\]", str(caught.value))
    assert named is not None
    expected = {
        f"{PARTS}.{name}" if record.get("messages") and name not in record else name for name in named[1].split(", ")
    }
    assert unused.found() == dict.fromkeys((*expected, "id"), 1)
    assert read_record(without_parts(record, IGNORABLE), format)


@pytest.mark.parametrize(
    ("format", "record"),
    [
        ("text", {"text": "a", "label": True}),
        ("prompt_completion", ANSWERED | {"label": "sports"}),
        ("prompt_completion", ANSWERED | {"label": 1}),
        ("messages", TURNS | {"rejected": False, "images": [], "chosen": None, "audio": "", "video": 0}),
        ("messages", {"messages": [{"role": "user", "content": "look: <image>"}, TURNS["messages"][1]]}),
    ],
)
def test_remarks_are_not_other_data(format: str, record: dict[str, Any]) -> None:
    UnusedKeys(format, {}, ()).add([0], [record], str)


def test_media_next_to_the_content_of_a_message_are_other_data() -> None:
    record = {"messages": [{"role": "user", "content": "a", "images": ["x.png"]}, TURNS["messages"][1]]}
    with pytest.raises(DataError, match=r"3: the record has images: .*ignore: \[images\]") as caught:
        UnusedKeys("messages", {}, ()).add([3], [record], str)
    assert caught.value.reason == "media_data"
    unused = UnusedKeys("messages", {}, ("images",))
    unused.add([3], [record], str)
    assert unused.found() == {"messages[].images": 1}
    root = {"text": "q", "role": "prompter", "images": ["x"], "replies": [{"text": "a", "role": "assistant"}]}
    with pytest.raises(DataError, match="the record has images"):
        UnusedKeys("oasst", {}, ()).add([3], [{"message_tree_id": "x", "prompt": root}], str)
    call = {"role": "assistant", "content": "a", "function_call": {"name": "f", "arguments": "{}", "image": "x"}}
    UnusedKeys("messages", {}, ()).add([3], [{"messages": [call]}], str)
    described = {"messages": TURNS["messages"], "tools": [{"name": "f", "images": ["icon.png"]}]}
    UnusedKeys("messages", {}, ()).add([3], [described], str)


@pytest.mark.parametrize("format", ["alpaca", "dolly", "prompt_completion"])
def test_a_flag_is_no_reasoning_and_is_counted(format: str) -> None:
    plain = json.loads(FORMAT_OF[format].example)
    records = [plain | {"thinking": value} for value in (False, True, 7, ["a"], {"a": 1}, "", None, "why", [])]
    unused = UnusedKeys(format, {}, ())
    unused.add(range(9), records, str)
    assert unused.found() == {"thinking": 5}
    answers = [read_record(record, format).messages[-1].reasoning for record in records]
    assert answers == [""] * 7 + ["why", ""]


def test_a_mapped_key_is_used() -> None:
    columns = {"prompt": "prompt", "completion": "chosen"}
    unused = UnusedKeys("prompt_completion", columns, ("rejected",))
    unused.add([0], [{"prompt": "a", "chosen": "b", "rejected": "c"}], str)
    assert unused.found() == {"rejected": 1}


def test_ignored_parts_are_left_out_and_counted_once() -> None:
    record = with_part(type="image_url", image_url={"url": "x"})
    unused = UnusedKeys("messages", {}, ("image_url",))
    unused.add([0], [record], str)
    assert unused.found() == {"messages[].content[].image_url": 1}
    assert read_record(without_parts(record, ("image_url",)), "messages") == read_record(TURNS, "messages")
