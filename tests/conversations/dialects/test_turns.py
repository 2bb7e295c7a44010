"""Reasoning, calls, and results have several forms.

All of them mean the same conversation.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from packcorpus.tasks.conversations.formats import detect, read_record
from packcorpus.tasks.conversations.model import Conversation, Message, ToolCall
from packcorpus.tasks.core.errors import Reject

CALL = {"name": "weather", "arguments": {"city": "Oslo"}}
AS_TEXT = json.dumps(CALL)
WEATHER = ToolCall("weather", '{"city":"Oslo"}')
ASKED, FOUND, SAID = Message("user", "Oslo?"), Message("tool", "3"), Message("assistant", "3 degrees")
CALLED = Message("assistant", "", tool_calls=(WEATHER,))
THOUGHT = Message("assistant", "", reasoning="Look it up.", tool_calls=(WEATHER,))


def user(content: Any, **keys: Any) -> dict[str, Any]:
    return {"role": "user", "content": content, **keys}


def answer(content: Any, **keys: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **keys}


def read(*turns: Any, **keys: Any) -> tuple[Message, ...]:
    record = {"messages": list(turns), **keys}
    assert detect(record) == "messages"
    return read_record(record, "messages").messages


def shared(role: str, value: Any) -> tuple[Message, ...]:
    turns = [{"from": "human", "value": "Oslo?"}, {"from": role, "value": value}]
    return read_record({"conversations": turns}, "sharegpt").messages


def refused(reason: str, message: str, *turns: Any, **keys: Any) -> None:
    with pytest.raises(Reject) as caught:
        read(*turns, **keys)
    assert caught.value.reason == reason
    assert message in caught.value.message


# -- roles that say "call" --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("role", ["function_call", "tool_call", "Tool_Calls"])
@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (AS_TEXT, CALLED),
        (f"[{AS_TEXT}]", CALLED),
        (f"\n{AS_TEXT}\n", CALLED),
        (
            json.dumps({"id": "a", "function": CALL}),
            Message("assistant", "", tool_calls=(ToolCall("weather", '{"city":"Oslo"}', "a"),)),
        ),
        (json.dumps({"name": "weather", "parameters": {"city": "Oslo"}}), CALLED),
        (f"<think>\nLook it up.\n</think>\n{AS_TEXT}", THOUGHT),
        (f"Look it up.</think>{AS_TEXT}", THOUGHT),
        (f"<think>\n\n</think>\n\n{AS_TEXT}", CALLED),
        (
            json.dumps({"name": "weather", "arguments": {"city": "Os</think>lo"}}),
            Message("assistant", "", tool_calls=(ToolCall("weather", '{"city":"Os</think>lo"}'),)),
        ),
        (f"<tool_call>\n{AS_TEXT}\n</tool_call>", CALLED),
        (
            f"<think>Look it up.</think>Wait.\n<tool_call>{AS_TEXT}</tool_call>\n<tool_call>{AS_TEXT}</tool_call>",
            Message("assistant", "Wait.", reasoning="Look it up.", tool_calls=(WEATHER, WEATHER)),
        ),
        (CALL, CALLED),
        ([CALL, CALL], Message("assistant", "", tool_calls=(WEATHER, WEATHER))),
        ([{"type": "text", "text": AS_TEXT}], CALLED),
    ],
)
def test_a_role_that_says_call_is_a_call(role: str, value: Any, expected: Message) -> None:
    assert shared(role, value) == (ASKED, expected)
    assert read(user("Oslo?"), {"role": role, "content": value}) == (ASKED, expected)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("weather(Oslo)", "messages[1].content: the role says that this is a call, but found no JSON text of a call"),
        ("", "messages[1].content: the role says that this is a call"),
        ("[]", "messages[1].content: the role says that this is a call, but the list of calls is empty"),
        ("{broken", "messages[1].content is not JSON: "),
        ("[5]", "messages[1].content[0]: expected an object, found a number"),
        ('{"arguments": {}}', "messages[1].content.name: expected a string, found null"),
        (f"<think>Look.</think><tool_call>{AS_TEXT}</tool_call> and more", "found no JSON text of a call"),
        (f"<think>a<think>b</think>{AS_TEXT}", "found no JSON text of a call"),
    ],
)
@pytest.mark.parametrize("role", ["function_call", "tool_call"])
def test_a_role_that_says_call_and_holds_none_is_a_reject(role: str, value: str, message: str) -> None:
    refused("bad_tool_call", message, user("Oslo?"), {"role": role, "content": value})
    refused("bad_tool_call", "content is null, but the role says", user("Oslo?"), {"role": role, "content": None})


def test_calls_in_a_row_are_parallel_calls_of_one_turn() -> None:
    call, result = {"role": "tool_call", "content": AS_TEXT}, {"role": "tool_response", "content": "3"}
    both = Message("assistant", "", tool_calls=(WEATHER, WEATHER))
    assert read(user("Oslo?"), call, call, result, result, answer("3 degrees")) == (ASKED, both, FOUND, FOUND, SAID)
    assert read(user("Oslo?"), call, result, call, result) == (ASKED, CALLED, FOUND, CALLED, FOUND)
    older = {"role": "function_call", "content": AS_TEXT}
    assert read(user("Oslo?"), older, older) == (ASKED, both)
    # What the assistant says before a call of ms-swift belongs to the turn of the call.
    said = Message("assistant", "Wait.", tool_calls=(WEATHER,))
    assert read(user("Oslo?"), answer("Wait."), call) == (ASKED, said)
    assert read(user("Oslo?"), answer("Wait."), older) == (ASKED, Message("assistant", "Wait."), CALLED)


def test_turns_are_not_joined_if_their_order_or_training_would_change() -> None:
    call = {"role": "tool_call", "content": AS_TEXT}
    thought = {"role": "tool_call", "content": f"<think>Look it up.</think>{AS_TEXT}"}
    assert read(user("Oslo?"), call, thought) == (ASKED, CALLED, THOUGHT)
    assert read(user("Oslo?"), answer("Wait."), thought) == (ASKED, Message("assistant", "Wait."), THOUGHT)
    kept = read(user("Oslo?"), answer("Wait.", loss=False), call)
    assert kept == (ASKED, Message("assistant", "Wait.", train=False), CALLED)


# -- calls ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "calls",
    [
        [{"function": CALL}],
        json.dumps([{"function": CALL}]),
        [json.dumps({"function": CALL})],
        [{"function": json.dumps(CALL)}],
        {"function": [CALL]},
        {"type": ["function"], "function": [CALL], "id": [None]},
        {"name": ["weather"], "arguments": [{"city": "Oslo"}]},
        [{"name": "weather", "arguments": [{"key": "city", "value": "Oslo"}]}],
        [{"name": "weather", "input": {"city": "Oslo"}}],
    ],
)
def test_a_list_of_calls_may_be_text_or_a_struct_of_lists(calls: object) -> None:
    assert read(user("Oslo?"), answer(None, tool_calls=calls)) == (ASKED, CALLED)


def test_the_older_call_of_a_function_is_read_from_an_object_or_its_text() -> None:
    for call in (CALL, AS_TEXT):
        assert read(user("Oslo?"), answer("", function_call=call)) == (ASKED, CALLED)
    result = {"role": "function", "name": "weather", "content": "3"}
    assert read(user("Oslo?"), answer("", function_call=CALL), result)[2] == Message("tool", "3", name="weather")


@pytest.mark.parametrize("absent", [None, "", "null", []])
def test_a_message_may_have_a_key_without_calls(absent: object) -> None:
    assert read(user("Oslo?"), answer("3 degrees", tool_calls=absent, function_call=absent or None))[1] == SAID


def test_nulls_in_arguments_of_json_stay() -> None:
    for arguments in ({"city": None}, '{"city":null}'):
        [_, called] = read(user("Oslo?"), answer("", tool_calls=[{"name": "f", "arguments": arguments}]))
        assert called.tool_calls == (ToolCall("f", '{"city":null}'),)


@pytest.mark.parametrize(
    ("calls", "message"),
    [
        ('[{"name": "f"}, {"name": "f",]', "messages[1].tool_calls is not JSON: "),
        ('[{"name": "f", "name": "g"}]', 'messages[1].tool_calls: duplicate key "name"'),
        ({"name": ["f", "g"], "arguments": ["{}"]}, "lists have different lengths: name 2 items, arguments 1 item"),
        ({"name": "f"}, "messages[1].tool_calls: expected a list, found an object"),
        ([{"name": "f", "arguments": {"a": float("nan")}}], "a number in it is NaN or infinite"),
        ([{"name": "f", "arguments": [{"key": "a", "value": 1}] * 2}], "two entries have the same key"),
    ],
)
def test_an_unclear_list_of_calls_is_a_reject(calls: object, message: str) -> None:
    with pytest.raises(Reject) as caught:
        read(user("Oslo?"), answer("", tool_calls=calls))
    assert caught.value.reason in ("bad_tool_call", "duplicate_key")
    assert message in caught.value.message


# -- content parts ----------------------------------------------------------------------------------------------------

TEXT = {"type": "text", "text": "Wait."}
USE = {"type": "tool_use", "id": "a", "name": "weather", "input": {"city": "Oslo"}}
OF_A = ToolCall("weather", '{"city":"Oslo"}', "a")


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ([{"type": "thinking", "thinking": "Why."}, TEXT], Message("assistant", "Wait.", reasoning="Why.")),
        (
            [{"type": "thinking", "thinking": "Why.", "signature": "x"}, USE],
            Message("assistant", "", reasoning="Why.", tool_calls=(OF_A,)),
        ),
        (
            [{"type": "reasoning", "reasoning": "Why."}, TEXT, USE],
            Message("assistant", "Wait.", reasoning="Why.", tool_calls=(OF_A,)),
        ),
        ([{"type": "reasoning", "text": "Why."}, TEXT], Message("assistant", "Wait.", reasoning="Why.")),
        (
            [{"type": "reasoning", "value": "Why."}, {"type": "text", "value": "Wait."}],
            Message("assistant", "Wait.", reasoning="Why."),
        ),
        (
            [
                {
                    "type": "reasoning",
                    "summary": [{"type": "summary_text", "text": "Why."}, {"type": "summary_text", "text": "How."}],
                },
                TEXT,
            ],
            Message("assistant", "Wait.", reasoning="Why.\n\nHow."),
        ),
        ([{"type": "output_text", "text": "Wait."}], Message("assistant", "Wait.")),
        (
            [TEXT, USE, {**USE, "id": "b"}],
            Message("assistant", "Wait.", tool_calls=(OF_A, ToolCall("weather", '{"city":"Oslo"}', "b"))),
        ),
        ([{"type": "tool_call", "value": AS_TEXT}], CALLED),
        (
            [{"type": "tool_call", "value": f"[{AS_TEXT}, {AS_TEXT}]"}],
            Message("assistant", "", tool_calls=(WEATHER, WEATHER)),
        ),
        (
            [{"type": "tool_call", "id": "a", "name": "weather", "args": {"city": "Oslo"}}],
            Message("assistant", "", tool_calls=(OF_A,)),
        ),
        ([TEXT, {"type": "text", "text": "Now."}], Message("assistant", "Wait.\nNow.", parts=("Wait.", "Now."))),
        (
            {"type": ["text", "text"], "text": ["Wait.", "Now."]},
            Message("assistant", "Wait.\nNow.", parts=("Wait.", "Now.")),
        ),
        ([json.dumps(TEXT)], Message("assistant", "Wait.")),
        ([], Message("assistant", "")),
    ],
)
def test_parts_of_an_answer(parts: object, expected: Message) -> None:
    assert read(user("Oslo?"), answer(parts)) == (ASKED, expected)


def test_the_text_of_several_parts_has_a_line_break_between_them() -> None:
    asked = [{"type": "input_text", "text": "What is 2+2?"}, {"type": "text", "text": "Answer briefly."}]
    both = ("What is 2+2?", "Answer briefly.")
    assert read(user(asked), answer("4"))[0] == Message("user", "\n".join(both), parts=both)
    assert read(user(asked[:1]), answer("4"))[0] == Message("user", both[0])


def test_results_among_the_parts_of_a_user_are_messages_in_their_order() -> None:
    result = {"type": "tool_result", "tool_use_id": "a", "content": "3"}
    lines = {
        "type": "tool_result",
        "tool_use_id": "b",
        "content": [{"type": "text", "text": "4"}, {"type": "text", "text": "5"}],
    }
    of_a, of_b = Message("tool", "3", tool_call_id="a"), Message("tool", "4\n5", tool_call_id="b", parts=("4", "5"))
    wait = Message("user", "Wait.")
    assert read(user([result, lines, TEXT]), answer("")) == (of_a, of_b, wait, Message("assistant", ""))
    assert read(user([TEXT, result]))[:2] == (wait, of_a)
    assert read(user([{"type": "tool_result", "tool_use_id": "a"}])) == (Message("tool", "", tool_call_id="a"),)
    assert read({"role": "tool", "content": [result]}) == (of_a,)


@pytest.mark.parametrize(
    ("turn", "reason", "message"),
    [
        (
            answer([TEXT, {"type": "thinking", "thinking": "Why."}]),
            "bad_content",
            "content[1] is reasoning after a text",
        ),
        (answer([USE, TEXT]), "bad_content", "content[1] is text after a call; an answer is reasoning, then text"),
        (
            answer([{"type": "redacted_thinking", "data": "x"}]),
            "bad_content",
            'type is "redacted_thinking"; only text parts',
        ),
        (answer([{"type": "thinking", "thinking": "Why."}]), "bad_content", "has reasoning, but no content"),
        (
            answer([{"type": "thinking", "thinking": 5}, TEXT]),
            "bad_content",
            "content[0].thinking: expected a string, found a number",
        ),
        (answer([{"type": "tool_call", "value": "weather"}]), "bad_tool_call", "content[0].value: the role says"),
        (
            answer([{"type": "tool_use", "input": {}}]),
            "bad_tool_call",
            "content[0].name: expected a string, found null",
        ),
        (
            answer([{"type": "tool_result", "content": "3"}]),
            "bad_content",
            "only user and tool messages may have results",
        ),
        (answer([{"type": "thinking", "thinking": "Why."}, TEXT], thinking="How."), "bad_content", "differ; keep one"),
        (answer([TEXT, USE], tool_calls=[{"function": CALL}]), "bad_tool_call", "differ; keep one"),
        (user([USE]), "bad_tool_call", "only assistant messages may have tool calls, but the role is user"),
        (
            user([{"type": "thinking", "thinking": "Why."}, TEXT]),
            "bad_content",
            "only assistant messages may have reasoning",
        ),
        (
            user([{"type": "tool_result", "content": [{"type": "image"}]}]),
            "bad_content",
            'content[0].content[0].type is "image"',
        ),
    ],
)
def test_what_a_conversation_cannot_hold_is_a_reject(turn: dict[str, Any], reason: str, message: str) -> None:
    refused(reason, message, user("Oslo?"), turn)


def test_items_of_the_responses_api_are_turns() -> None:
    turns = [
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Oslo?"}]},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Look it up."}]},
        {"type": "function_call", "call_id": "a", "name": "weather", "arguments": '{"city": "Oslo"}'},
        {"type": "function_call", "call_id": "b", "name": "weather", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "a", "output": "3"},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "3 degrees"}]},
    ]
    calls = (ToolCall("weather", '{"city": "Oslo"}', "a"), ToolCall("weather", "{}", "b"))
    called = Message("assistant", "", reasoning="Look it up.", tool_calls=calls)
    assert read(*turns) == (ASKED, called, Message("tool", "3", tool_call_id="a"), SAID)
    thought = Message("assistant", "3 degrees", reasoning="Look it up.")
    assert read(turns[0], turns[1], turns[5]) == (ASKED, thought)
    assert read(user("Oslo?"), turns[1], answer("3 degrees")) == (ASKED, thought)
    refused("bad_content", "messages[0]: an item of reasoning without a text", {"type": "reasoning", "summary": []})
    refused("missing_key", "messages[0].role is missing", {"type": "web_search_call", "id": "x"})


# -- labels and weights of turns --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keys", "train", "weight"),
    [
        ({"loss": True}, True, None),
        ({"loss": False}, False, None),
        ({"loss": 0.37}, None, None),  # a recorded loss
        ({"loss_scale": 2.0}, None, 2.0),
        ({"loss_scale": 0.0}, False, 0.0),
        ({"loss_weight": 0.0}, False, 0.0),
        ({"loss_weight": 0, "loss": True}, False, 0),
        ({"loss_weight": 1.0}, None, 1.0),
        ({"loss_weight": 0.5, "loss_scale": 0.5}, None, 0.5),
        ({"loss_scale": "last_round"}, None, None),
    ],
)
def test_labels_and_weights_of_a_turn(keys: dict[str, Any], train: bool | None, weight: float | None) -> None:
    assert read(user("Oslo?"), answer("3 degrees", **keys))[1] == Message(
        "assistant", "3 degrees", train=train, loss_weight=weight
    )


def test_a_weight_of_llama_factory_is_a_label_of_any_turn() -> None:
    def turn(role: str, weight: float) -> dict[str, Any]:
        return {"role": role, "content": [{"type": "text", "value": "a"}], "loss_weight": weight}

    trained = [message.train for message in read(turn("user", 1.0), turn("assistant", 1.0), turn("user", 0.0))]
    assert trained == [True, None, False]
    assert read(user("a", loss_weight=1.0))[0].train is None


def test_labels_that_disagree_are_a_reject() -> None:
    refused("bad_weight", "loss is false and train is true; keep one", user("a", loss=False, train=True))
    refused("bad_weight", "loss_weight and loss_scale differ", user("a", loss_weight=1.0, loss_scale=2.0))


# -- tools and options ------------------------------------------------------------------------------------------------

DEFINED = '{"type":"function","function":{"name":"weather","parameters":{"type":"object"}}}'
SCHEMA = {"name": "weather", "parameters": {"type": "object"}}


@pytest.mark.parametrize(
    "keys",
    [
        {"tools": [SCHEMA]},
        {"tool_defs": [SCHEMA]},
        {"functions": [SCHEMA]},
        {"tools": None, "tool_defs": [SCHEMA]},
        {"tools": [], "functions": json.dumps([SCHEMA])},
        {"tools": "", "tool_defs": [json.dumps(SCHEMA)]},
        {"tools": "[]", "tool_defs": {"name": ["weather"], "parameters": [{"type": "object"}]}},
        {"tools": [SCHEMA], "tool_defs": [SCHEMA]},
        {"tools": {"name": ["weather"], "description": [None], "parameters": [{"type": "object"}]}},
        {"tools": [{"name": "weather", "input_schema": {"type": "object"}}]},
        {"tools": [{"type": "custom", "name": "weather", "input_schema": {"type": "object"}}]},
    ],
)
@pytest.mark.parametrize("format", ["messages", "sharegpt", "prompt_completion"])
def test_definitions_of_tools_have_several_names(keys: dict[str, Any], format: str) -> None:
    turns: dict[str, Any] = {
        "messages": {"messages": [user("Oslo?"), answer("3 degrees")]},
        "sharegpt": {"conversations": [{"from": "human", "value": "Oslo?"}, {"from": "gpt", "value": "3 degrees"}]},
        "prompt_completion": {"prompt": "Oslo?", "completion": "3 degrees"},
    }
    record = turns[format] | keys
    assert detect(record) == format
    assert read_record(record, format) == Conversation((ASKED, SAID), (DEFINED,))


def test_definitions_that_differ_are_a_reject() -> None:
    refused("bad_tools", "tools and functions differ; keep one", user("a"), tools=[SCHEMA], functions=[{"name": "f"}])
    refused("bad_tools", "tool_defs: expected a list, found a number", user("a"), tool_defs=5)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ({"enable_thinking": False}, {"enable_thinking": False}),
        ('{"enable_thinking": false, "effort": null}', {"enable_thinking": False, "effort": None}),
        (None, None),
        ("", None),
        ({}, None),
    ],
)
@pytest.mark.parametrize(
    ("format", "record"),
    [
        ("messages", {"messages": [user("2+2?"), answer("4")]}),
        ("sharegpt", {"conversations": [{"from": "human", "value": "2+2?"}, {"from": "gpt", "value": "4"}]}),
        ("alpaca", {"instruction": "2+2?", "output": "4"}),
        ("dolly", {"instruction": "2+2?", "context": "", "response": "4"}),
        ("prompt_completion", {"prompt": "2+2?", "completion": "4"}),
    ],
)
def test_options_of_a_record(format: str, record: dict[str, Any], value: Any, expected: Any) -> None:
    made = read_record({**record, "chat_template_kwargs": value}, format)
    assert made.template_options == expected
    assert made.messages == (Message("user", "2+2?"), Message("assistant", "4"))


def test_options_are_an_object() -> None:
    refused(
        "bad_type", "chat_template_kwargs: expected an object, found a boolean", user("a"), chat_template_kwargs=True
    )
    refused("bad_type", "chat_template_kwargs: expected an object, found a string", user("a"), chat_template_kwargs="x")
