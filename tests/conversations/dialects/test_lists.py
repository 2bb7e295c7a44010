"""A list of messages may be JSON text or a struct of lists."""

from __future__ import annotations

import json
from typing import Any

import pytest

from packcorpus.tasks.conversations.formats import detect, read_record
from packcorpus.tasks.conversations.model import Conversation, Message
from packcorpus.tasks.conversations.other_data import without_parts
from packcorpus.tasks.conversations.unused_keys import UnusedKeys
from packcorpus.tasks.core.errors import DataError, Reject
from packcorpus.tasks.sources.model import Source
from packcorpus.tasks.tokenization.prepare import PlainRecords

USER, ASSISTANT = {"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}
FROM = [{"from": "human", "value": "2+2?"}, {"from": "gpt", "value": "4"}]
CHAT = Conversation((Message("user", "2+2?"), Message("assistant", "4")))


@pytest.mark.parametrize(
    ("format", "record"),
    [
        ("messages", {"messages": json.dumps([USER, ASSISTANT])}),
        ("messages", {"messages": f" {json.dumps([USER, ASSISTANT])}\n"}),
        ("messages", {"messages": [json.dumps(USER), json.dumps(ASSISTANT)]}),
        ("messages", {"messages": {"role": ["user", "assistant"], "content": ["2+2?", "4"]}}),
        ("messages", {"messages": {"role": ["user", "assistant"], "content": ["2+2?", "4"], "name": [None, None]}}),
        ("messages", {"messages": json.dumps({"role": ["user", "assistant"], "content": ["2+2?", "4"]})}),
        ("sharegpt", {"conversations": json.dumps(FROM)}),
        ("sharegpt", {"conversation": {"from": ["human", "gpt"], "value": ["2+2?", "4"]}}),
        ("prompt_completion", {"prompt": json.dumps([USER]), "completion": json.dumps([ASSISTANT])}),
        ("prompt_completion", {"prompt": json.dumps([USER]), "completion": [ASSISTANT]}),
        ("prompt_completion", {"prompt": [USER], "completion": json.dumps([ASSISTANT])}),
        ("prompt_completion", {"prompt": json.dumps([USER]), "completion": "4"}),
        ("prompt_completion", {"question": [USER], "response": "4"}),
        ("prompt_completion", {"prompt": {"role": ["user"], "content": ["2+2?"]}, "completion": [ASSISTANT]}),
        ("alpaca", {"instruction": "2+2?", "output": "4", "history": "[]"}),
        (
            "oasst",
            {"prompt": json.dumps({"role": "user", "text": "2+2?", "replies": [{"role": "assistant", "text": "4"}]})},
        ),
    ],
)
def test_a_list_in_another_form(format: str, record: dict[str, Any]) -> None:
    assert detect(record) == format
    assert PlainRecords(format).of(record) is None
    assert read_record(record, format) == CHAT


def test_a_text_that_is_no_list_of_messages_stays_text() -> None:
    for text in (
        json.dumps([USER, {"city": "Oslo"}]),
        "[1, 2]",
        '[{"role": "admin", "content": "x"}]',
        '[{"role": "user"}]',
        "[]",
        "[x",
        '{"role": ["user"]}',
    ):
        made = read_record({"prompt": text, "completion": json.dumps([ASSISTANT])}, "prompt_completion")
        assert made.messages == (Message("user", text), Message("assistant", json.dumps([ASSISTANT])))


@pytest.mark.parametrize(
    ("value", "reason", "message"),
    [
        ("[{]", "bad_type", "messages is not JSON: "),
        ('[{"role": "user", "role": "user", "content": "a"}]', "duplicate_key", 'messages: duplicate key "role"'),
        ('[{"role": "user", "content": 36893488147419103232}]', "big_integer", "does not fit in 64 bits"),
        ({"role": ["user"], "content": ["a", "b"]}, "bad_type", "different lengths: role 1 item, content 2 items"),
        ({"role": ["user"], "content": "a"}, "bad_type", "messages: expected a list, found an object"),
        ({}, "bad_type", "messages: expected a list, found an object"),
        ('"hi"', "bad_type", "messages: expected a list, found a string"),
    ],
)
def test_json_text_is_parsed_strictly(value: object, reason: str, message: str) -> None:
    with pytest.raises(Reject) as caught:
        read_record({"messages": value}, "messages")
    assert caught.value.reason == reason
    assert message in caught.value.message


def test_columns_and_roles_are_mapped_within_text_and_structs() -> None:
    turns = [{"speaker": "Kunde", "say": "2+2?"}, {"speaker": "gpt", "say": "4"}]
    lists = {key: [turn[key] for turn in turns] for key in ("speaker", "say")}
    columns = {"messages": "dialog", "role": "speaker", "content": "say"}
    for value in (json.dumps(turns), lists, json.dumps(lists)):
        assert read_record({"dialog": value}, "messages", columns, {"kunde": "user"}) == CHAT


def counted(record: dict[str, Any], format: str, **source: Any) -> dict[str, int]:
    made = Source(path="a", **source)
    keys = UnusedKeys(format, made.columns, made.ignore)
    keys.add([0, 1], [record, {"x": 1}], "a:{}".format)
    return keys.found()


def test_unused_keys_within_text_and_structs_are_counted() -> None:
    turns = [USER | {"mood": "good"}, ASSISTANT]
    for value in (
        turns,
        json.dumps(turns),
        list(map(json.dumps, turns)),
        {"role": ["user"], "content": ["a"], "mood": ["good"]},
    ):
        assert counted({"messages": value}, "messages") == {"x": 1, "messages[].mood": 1}
    assert counted({"messages": "[broken"}, "messages") == {"x": 1}
    both = {"prompt": json.dumps(turns[:1]), "completion": "4"}
    assert counted(both, "prompt_completion") == {"x": 1, "prompt[].mood": 1}


def test_unused_keys_of_parts_and_calls_are_counted() -> None:
    parts = [
        {"type": "thinking", "thinking": "a", "signature": "b"},
        {"type": "tool_use", "id": "a", "name": "f", "input": {}, "caller": "c"},
        {
            "type": "tool_result",
            "tool_use_id": "a",
            "content": [{"type": "text", "text": "d", "citations": ["e"]}],
            "is_error": True,
        },
    ]
    found = counted({"messages": [ASSISTANT | {"content": parts}]}, "messages")
    of_parts = dict.fromkeys(("signature", "caller", "is_error", "content[].citations"), 1)
    assert found == {"x": 1, **{f"messages[].content[].{key}": 1 for key in of_parts}}
    calls = json.dumps([{"id": "a", "index": 0, "function": {"name": "f", "arguments": {}, "strict": True}}])
    found = counted({"messages": [ASSISTANT | {"tool_calls": calls}]}, "messages")
    assert found == {"x": 1, "messages[].tool_calls[].index": 1, "messages[].tool_calls[].function.strict": 1}
    item = {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}", "status": "completed"}
    assert counted({"messages": [item]}, "messages") == {"x": 1, "messages[].status": 1}


def test_only_weights_and_losses_that_are_read_count_as_used() -> None:
    used = [ASSISTANT | keys for keys in ({"loss": True}, {"loss_weight": 0.0}, {"loss_scale": 1})]
    assert counted({"messages": used}, "messages") == {"x": 1}
    unused = [ASSISTANT | keys for keys in ({"loss": 0.37}, {"loss_weight": 0.5}, {"loss_scale": 2})]
    paths = {f"messages[].{key}": 1 for key in ("loss", "loss_weight", "loss_scale")}
    assert counted({"messages": unused}, "messages") == {"x": 1, **paths}


def test_names_of_tools_and_options_are_used_keys() -> None:
    keys = {"tool_defs": [{"name": "f"}], "functions": [{"name": "f"}], "chat_template_kwargs": {"a": 1}}
    assert counted({"messages": [USER], **keys}, "messages") == {"x": 1}
    assert counted({"instruction": "a", "output": "b", "chat_template_kwargs": {"a": 1}}, "alpaca") == {"x": 1}


@pytest.mark.parametrize("as_text", [False, True])
def test_media_within_text_and_results_stop_the_run_unless_ignored(as_text: bool) -> None:
    image = {"type": "image", "source": {}}
    turns: Any = [
        {"role": "user", "content": [{"type": "tool_result", "content": [image]}, {"type": "text", "text": "2+2?"}]}
    ]
    record = {"messages": json.dumps(turns) if as_text else turns}
    with pytest.raises(DataError, match="a content part has type image"):
        counted(record, "messages")
    assert counted(record, "messages", ignore=["image"]) == {"x": 1, "messages[].content[].content[].image": 1}
    read = read_record(without_parts(record, ["image"]), "messages").messages
    assert read == (Message("tool", ""), Message("user", "2+2?"))
