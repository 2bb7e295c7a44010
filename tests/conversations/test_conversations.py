"""Every record format gives its conversation.

Errors have a code and a position.
"""

from __future__ import annotations

import datetime
import decimal
import json
from dataclasses import replace

import pytest
from conversations.record_keys import RECORD_KEYS
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.profiles import examples

from packcorpus.tasks.conversations.formats import COLUMNS, FORMAT_NAMES, detect, read_record
from packcorpus.tasks.conversations.model import ROLES, Conversation, Message, ToolCall, content_digest, whole_text
from packcorpus.tasks.core.errors import Reject

SYSTEM, USER, ASSISTANT = Message("system", "Be brief."), Message("user", "2+2?"), Message("assistant", "4")
REASONED = Message("assistant", "4", reasoning="Two more than two.")
WEATHER = '{"type":"function","function":{"name":"weather","parameters":{"type":"object"}}}'

# format, record, conversation
GOLDEN: list[tuple[str, dict[str, object], Conversation]] = [
    (
        "messages",
        {
            "messages": [
                {"role": "developer", "content": "Be brief."},
                {"role": "user", "content": [{"type": "text", "text": "2+2?"}]},
                {"role": "assistant", "content": "4", "weight": 0},
                {"role": "user", "content": "And the weather?", "name": "Ada"},
                {
                    "role": "assistant",
                    "content": None,
                    "weight": 1,
                    "tool_calls": [
                        {
                            "id": "call_1",
                            "type": "function",
                            "function": {"name": "weather", "arguments": {"town": "Köln", "days": 1}},
                        },
                        {"function": {"name": "weather", "arguments": '{"town": "Bonn"}'}},
                    ],
                },
                {"role": "tool", "content": "rain", "tool_call_id": "call_1"},
                {"role": "assistant", "content": "", "function_call": {"name": "clock", "arguments": ""}},
                {"role": "function", "name": "clock", "content": "noon"},
            ],
            "tools": [{"name": "weather", "parameters": {"type": "object"}}],
            "id": 5,
        },
        Conversation(
            (
                replace(SYSTEM, developer=True),
                USER,
                Message("assistant", "4", train=False),
                Message("user", "And the weather?", name="Ada"),
                Message(
                    "assistant",
                    "",
                    tool_calls=(
                        ToolCall("weather", '{"town":"Köln","days":1}', "call_1"),
                        ToolCall("weather", '{"town": "Bonn"}'),
                    ),
                ),
                Message("tool", "rain", tool_call_id="call_1"),
                Message("assistant", "", tool_calls=(ToolCall("clock", "{}"),)),
                Message("tool", "noon", name="clock"),
            ),
            (WEATHER,),
        ),
    ),
    (
        "messages",  # a table row has every column and every field, and nulls for missing values
        {
            "messages": [{"role": "user", "content": "2+2?", "tool_calls": None, "name": None, "weight": None}],
            "text": None,
        },
        Conversation((USER,)),
    ),
    (
        "messages",
        {"system": "Be brief.", "messages": [{"role": "user", "content": "2+2?"}]},
        Conversation((SYSTEM, USER)),
    ),
    (
        "messages",
        {
            "system": [{"type": "text", "text": "Be brief."}, {"type": "text", "text": "Be kind."}],
            "messages": [{"role": "user", "content": "2+2?"}],
        },
        Conversation((Message("system", "Be brief.\nBe kind.", parts=("Be brief.", "Be kind.")), USER)),
    ),
    *(
        (format, {**record, key: "Two more than two."}, Conversation((USER, REASONED)))
        for key in ("reasoning_content", "reasoning", "thinking")
        for format, record in (
            ("alpaca", {"instruction": "2+2?", "output": "4"}),
            ("dolly", {"instruction": "2+2?", "context": "", "response": "4"}),
            ("prompt_completion", {"prompt": "2+2?", "completion": "4"}),
            ("prompt_completion", {"question": "2+2?", "answer": "4"}),
        )
    ),
    (
        "sharegpt",
        {
            "system": "Be brief.",
            "conversations": [
                {"from": "human", "value": "2+2?"},
                {"from": "gpt", "value": "4", "weight": 0},
                {"from": "human", "value": "Rain?"},
                {"from": "function_call", "value": '{"name": "weather", "arguments": {"town": "Köln"}}'},
                {"from": "observation", "value": "rain"},
                {"from": "function_call", "value": '[{"name": "a", "arguments": "{}"}, {"name": "b"}]'},
                {"from": "function_response", "value": "done"},
                {"role": "assistant", "content": "Yes."},
            ],
            "tools": f"[{WEATHER}]",
        },
        Conversation(
            (
                SYSTEM,
                USER,
                Message("assistant", "4", train=False),
                Message("user", "Rain?"),
                Message("assistant", "", tool_calls=(ToolCall("weather", '{"town":"Köln"}'),)),
                Message("tool", "rain"),
                Message("assistant", "", tool_calls=(ToolCall("a", "{}"), ToolCall("b", "{}"))),
                Message("tool", "done"),
                Message("assistant", "Yes."),
            ),
            (WEATHER,),
        ),
    ),
    (
        "sharegpt",
        {
            "conversation": [{"from": "user", "value": "2+2?"}, {"from": "bard", "value": "4"}],
            "tools": "",
            "system": "",
        },
        Conversation((USER, ASSISTANT)),
    ),
    (
        "sharegpt",  # two equal system texts become one
        {
            "conversations": [{"from": "system", "value": "Be brief."}, {"from": "model", "value": "4"}],
            "system": "Be brief.",
        },
        Conversation((SYSTEM, ASSISTANT)),
    ),
    (
        "alpaca",
        {
            "instruction": "Translate.",
            "input": "Guten Tag",
            "output": "Good day",
            "system": "Be brief.",
            "history": [["2+2?", "4"]],
        },
        Conversation(
            (
                SYSTEM,
                USER,
                ASSISTANT,
                Message("user", "Translate.", context="Guten Tag"),
                Message("assistant", "Good day"),
            )
        ),
    ),
    ("alpaca", {"instruction": "2+2?", "input": "", "output": "4", "history": ""}, Conversation((USER, ASSISTANT))),
    ("alpaca", {"instruction": "2+2?", "response": "4"}, Conversation((USER, ASSISTANT))),
    (
        "alpaca",
        {"instruction": "Add.", "context": "2+2", "output": "4"},
        Conversation((Message("user", "Add.", context="2+2"), ASSISTANT)),
    ),
    (
        "dolly",
        {"instruction": "Add.", "context": "2+2", "response": "4", "category": "closed_qa"},
        Conversation((Message("user", "Add.", context="2+2"), ASSISTANT)),
    ),
    ("dolly", {"instruction": "2+2?", "context": "", "response": "4"}, Conversation((USER, ASSISTANT))),
    (
        "oasst",
        {
            "message_tree_id": "t",
            "prompt": {
                "role": "prompter",
                "text": "2+2?",
                "replies": [
                    {"role": "assistant", "text": "unranked", "replies": []},
                    {"role": "assistant", "text": "5", "rank": 1, "replies": []},
                    {"role": "assistant", "text": "gone", "rank": -1, "deleted": True, "replies": []},
                    {
                        "role": "assistant",
                        "text": "4",
                        "rank": 0,
                        "replies": [
                            {
                                "role": "prompter",
                                "text": "Sure?",
                                "replies": [
                                    {"role": "assistant", "text": "Yes.", "rank": None, "replies": []},
                                    {"role": "assistant", "text": "No.", "rank": None},
                                ],
                            },
                            {"role": "prompter", "text": "Second."},
                        ],
                    },
                ],
            },
        },
        Conversation((USER, ASSISTANT, Message("user", "Sure?"), Message("assistant", "Yes."))),
    ),
    (
        "oasst",  # a final question without an answer is dropped
        {
            "prompt": {
                "role": "prompter",
                "text": "2+2?",
                "replies": [{"role": "assistant", "text": "4", "replies": [{"role": "prompter", "text": "Thanks"}]}],
            }
        },
        Conversation((USER, ASSISTANT)),
    ),
    ("prompt_completion", {"prompt": "2+2?", "completion": "4"}, Conversation((USER, ASSISTANT))),
    ("prompt_completion", {"prompt": "2+2?", "response": "4"}, Conversation((USER, ASSISTANT))),
    ("prompt_completion", {"question": "2+2?", "answer": "4"}, Conversation((USER, ASSISTANT))),
    (
        "prompt_completion",
        {"question": "2+2?", "response": "4", "system": "Be brief."},
        Conversation((SYSTEM, USER, ASSISTANT)),
    ),
    (
        "prompt_completion",
        {
            "prompt": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+2?"}],
            "completion": [{"role": "assistant", "content": "4"}],
        },
        Conversation((SYSTEM, USER, ASSISTANT)),
    ),
    ("text", {"text": "Once upon\u2028a time."}, Conversation((Message("text", "Once upon\u2028a time."),))),
]


@pytest.mark.parametrize(("format", "record", "expected"), GOLDEN)
def test_golden(format: str, record: dict[str, object], expected: Conversation) -> None:
    assert detect(record) == format
    assert read_record(record, format) == expected
    assert {message.role for message in expected.messages} <= set(ROLES)


def test_every_format_has_a_golden_record() -> None:
    elsewhere = {"session", "tokens", "completions", "preference"}
    assert {format for format, _, _ in GOLDEN} == set(FORMAT_NAMES) - elsewhere


@pytest.mark.parametrize(
    ("record", "format"),
    [
        ({"messages": [], "text": "", "instruction": "", "output": ""}, "messages"),
        ({"conversations": [], "text": "", "prompt": "", "completion": ""}, "sharegpt"),
        ({"messages": None, "conversations": []}, "sharegpt"),
        ({"instruction": "", "context": "", "response": "", "output": ""}, "alpaca"),
        ({"instruction": "", "context": None, "response": ""}, "alpaca"),
        ({"prompt": "", "completion": "", "text": ""}, "prompt_completion"),
        ({"prompt": {}, "instruction": "", "output": ""}, "oasst"),
        ({"prompt": "", "chosen": "", "rejected": ""}, "preference"),
        ({"chosen": "", "rejected": ""}, None),
        ({"instruction": ""}, None),
        ({}, None),
        ([], None),
        ("text", None),
        (None, None),
    ],
)
def test_detection_of_overlaps(record: object, format: str | None) -> None:
    assert detect(record) == format


def test_columns_are_applied_first() -> None:
    columns = {"instruction": "frage", "output": "antwort"}
    record = {"frage": "2+2?", "antwort": "4", "prompt": "x", "completion": "y"}
    assert detect(record, columns) == "alpaca"
    assert read_record(record, "alpaca", columns) == Conversation((USER, ASSISTANT))
    swapped = {"prompt": "4", "completion": "2+2?"}
    crossed = {"prompt": "completion", "completion": "prompt"}
    assert read_record(swapped, "prompt_completion", crossed) == Conversation((USER, ASSISTANT))
    # A mapped key does not count as itself, and a mapped name means only the mapped key.
    assert detect({"text": "2+2?", "label": "4"}, {"prompt": "text", "completion": "label"}) == "prompt_completion"
    with pytest.raises(Reject, match="antwort is missing; the keys found are: frage"):
        read_record({"frage": "2+2?", "output": "4"}, "alpaca", columns)
    assert record == {"frage": "2+2?", "antwort": "4", "prompt": "x", "completion": "y"}
    assert set(columns) <= set(COLUMNS)


def _message(**fields: object) -> dict[str, object]:
    return {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", **fields}]}


def _tree(node: object) -> dict[str, object]:
    return {"prompt": {"role": "prompter", "text": "a", "replies": [node]}}


def _calls(call: object) -> dict[str, object]:
    return _message(tool_calls=[call])


BAD: list[tuple[str, object, str, str]] = [
    ("messages", [1], "not_an_object", "the record is a list; expected an object with keys"),
    ("messages", None, "not_an_object", "the record is null; expected an object with keys"),
    ("messages", {"text": "a"}, "missing_key", "messages is missing; the keys found are: text"),
    ("messages", {"messages": None}, "missing_key", "messages is null"),
    ("messages", {"messages": "hi"}, "bad_type", "messages: expected a list, found a string"),
    ("messages", {"messages": []}, "empty", "the record holds no messages"),
    ("messages", {"messages": ["hi"]}, "bad_type", "messages[0]: expected an object, found a string"),
    (
        "messages",
        _message(role="assistent"),
        "bad_role",
        'messages[1].role "assistent" is not a role; did you mean assistant? Or map it with roles',
    ),
    (
        "messages",
        _message(role="<|im_end|>"),
        "bad_role",
        'messages[1].role "<|im_end|>" is not a role; map it to system, user, assistant, or tool, '
        'such as roles: {user: ["<|im_end|>"]}',
    ),
    (
        "messages",
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "thinking": "b"}]},
        "bad_content",
        "messages[1] has reasoning, but no content; that is allowed only with tool_calls",
    ),
    (
        "messages",
        {"messages": [{"role": None, "content": "a"}]},
        "missing_key",
        "messages[0].role is null",
    ),
    (
        "prompt_completion",
        {
            "prompt": [{"role": "user", "content": "a"}],
            "completion": [{"role": "assistant", "content": "b"}],
            "thinking": "c",
        },
        "bad_content",
        "the record has reasoning next to lists of messages; move it into completion",
    ),
    (
        "alpaca",
        {"instruction": "a", "output": "b", "thinking": "c", "reasoning": "d"},
        "bad_content",
        "the record: reasoning and thinking differ; keep one",
    ),
    ("messages", _message(role="text"), "bad_role", 'messages[1].role "text" is not a role; map it to'),
    ("messages", _message(role="\x1b[2Jx\x9b\ud800"), "bad_role", '"\\u001b[2Jx\\u009b\\ud800" is not a role'),
    ("messages", _message(role=["user"]), "bad_role", "messages[1].role: expected a string, found a list"),
    (
        "messages",
        {"messages": [{"content": "a"}]},
        "missing_key",
        "messages[0].role is missing; the keys found are: content",
    ),
    (
        "messages",
        {"messages": [{"from": "gpt", "value": "a"}]},
        "missing_key",
        "messages[0].role is missing; the keys found are: from, value",
    ),
    (
        "messages",
        {"messages": [{"role": "user"}]},
        "missing_key",
        "messages[0].content is missing; the keys found are: role",
    ),
    (
        "messages",
        _message(content=None),
        "bad_content",
        "messages[1].content is null; that is allowed only with tool_calls",
    ),
    ("messages", _message(content=None, tool_calls=[]), "bad_content", "messages[1].content is null"),
    ("messages", _message(content=5), "bad_content", "messages[1].content: expected a string, found a number"),
    ("messages", _message(content=True), "bad_content", "messages[1].content: expected a string, found a boolean"),
    ("messages", _message(content={"a": 1}), "bad_content", "messages[1].content: expected a string, found an object"),
    (
        "messages",
        _message(content=b"raw"),
        "bad_content",
        "messages[1].content: expected a string, found a value of type bytes",
    ),
    (
        "messages",
        _message(content=[{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {}}]),
        "bad_content",
        'messages[1].content[1].type is "image_url"; only text parts can be packed',
    ),
    (
        "messages",
        _message(content=["a"]),
        "bad_content",
        "messages[1].content[0]: expected a part with a type, found a string",
    ),
    (
        "messages",
        _message(content=[{"type": "text"}]),
        "bad_content",
        "messages[1].content[0].text: expected a string, found null",
    ),
    ("messages", _message(content="a\0b"), "nul", "messages[1].content holds a NUL character at character 1"),
    (
        "messages",
        _message(content="äb\ud800"),
        "lone_surrogate",
        "messages[1].content holds a lone surrogate at character 2",
    ),
    ("messages", _message(name="a\ud800"), "lone_surrogate", "messages[1].name holds a lone surrogate at character 1"),
    ("messages", _message(name=5), "bad_type", "messages[1].name: expected a string, found a number"),
    ("messages", _message(tool_call_id=5), "bad_type", "messages[1].tool_call_id: expected a string, found a number"),
    ("messages", _message(weight=2), "bad_weight", "messages[1].weight is 2; expected 0 or 1"),
    ("messages", _message(weight=0.5), "bad_weight", "messages[1].weight is 0.5; expected 0 or 1"),
    ("messages", _message(train="no"), "bad_weight", "messages[1].train is a string; expected true or false"),
    ("messages", _message(training=2), "bad_weight", "messages[1].training is 2; expected true or false"),
    (
        "messages",
        _message(weight=0, train=True),
        "bad_weight",
        "messages[1]: weight is 0 and train is true; keep one of them",
    ),
    ("messages", _message(weight="0"), "bad_weight", "messages[1].weight is a string; expected 0 or 1"),
    ("messages", _message(tool_calls={}), "bad_tool_call", "messages[1].tool_calls: expected a list, found an object"),
    ("messages", _calls("x"), "bad_tool_call", "messages[1].tool_calls[0]: expected an object, found a string"),
    ("messages", _calls({"function": "x"}), "bad_tool_call", "messages[1].tool_calls[0].function: expected an object"),
    ("messages", _calls({"type": "custom"}), "bad_tool_call", 'messages[1].tool_calls[0].type is "custom"; only'),
    ("messages", _calls({"id": 5}), "bad_tool_call", "messages[1].tool_calls[0].id: expected a string, found a number"),
    (
        "messages",
        _calls({"function": {"arguments": {}}}),
        "bad_tool_call",
        "function.name: expected a string, found null",
    ),
    (
        "messages",
        _calls({"name": "f", "arguments": [1]}),
        "bad_tool_call",
        "arguments: expected a JSON text or an object",
    ),
    (
        "messages",
        _calls({"name": "f", "arguments": "{x"}),
        "bad_tool_call",
        "messages[1].tool_calls[0].arguments is not JSON",
    ),
    (
        "messages",
        _calls({"name": "f", "arguments": {"a": "\ud800"}}),
        "bad_tool_call",
        "arguments cannot be written as JSON",
    ),
    (
        "messages",
        _calls({"name": "f", "arguments": {"a": datetime.date(2020, 1, 1)}}),
        "bad_tool_call",
        "arguments cannot be written as JSON",
    ),
    (
        "messages",
        _message(function_call="f"),
        "bad_tool_call",
        "messages[1].function_call: expected an object, found a string",
    ),
    (
        "messages",
        {"messages": [{"role": "user", "content": "a", "tool_calls": [{"name": "f"}]}]},
        "bad_tool_call",
        "messages[0].tool_calls: only assistant messages may have tool calls, but the role is user",
    ),
    ("messages", {**_message(), "tools": 5}, "bad_tools", "tools: expected a list, found a number"),
    ("messages", {**_message(), "tools": "{"}, "bad_tools", "tools is not JSON: "),
    ("messages", {**_message(), "tools": '[{"a":{"b":1,"b":2}}]'}, "duplicate_key", 'tools: duplicate key "b"'),
    (
        "messages",
        {**_message(), "tools": ['{"a":1,"\\u0061":2}']},
        "duplicate_key",
        'tools[0]: duplicate key "a"',
    ),
    (
        "messages",
        _calls({"name": "f", "arguments": '{"a":1,"a":2}'}),
        "duplicate_key",
        '.arguments: duplicate key "a"',
    ),
    ("messages", {**_message(), "tools": '{"a":1}'}, "bad_tools", "tools: expected a list, found an object"),
    ("messages", {**_message(), "tools": [5]}, "bad_tools", "tools[0]: expected an object, found a number"),
    (
        "messages",
        {**_message(), "tools": [{"a": decimal.Decimal(1)}]},
        "bad_tools",
        "tools[0] cannot be written as JSON",
    ),
    ("sharegpt", {"conversations": []}, "empty", "the record holds no messages"),
    ("sharegpt", {"conversations": "hi"}, "bad_type", "conversations: expected a list, found a string"),
    (
        "sharegpt",
        {"conversation": [{"from": "humen", "value": "a"}]},
        "bad_role",
        'conversation[0].from "humen" is not a role; did you mean human?',
    ),
    ("sharegpt", {"conversations": [{"from": "gpt"}]}, "missing_key", "conversations[0].value is missing"),
    (
        "sharegpt",
        {"conversations": [{"from": "gpt", "value": 1}]},
        "bad_content",
        "conversations[0].value: expected a string",
    ),
    ("sharegpt", {"conversations": [], "system": 5}, "bad_type", "system: expected a string, found a number"),
    ("alpaca", {"instruction": "a"}, "missing_key", "output is missing; the keys found are: instruction"),
    ("alpaca", {"instruction": 5, "output": "b"}, "bad_type", "instruction: expected a string, found a number"),
    ("alpaca", {"instruction": "a", "output": ["b"]}, "bad_type", "output: expected a string, found a list"),
    (
        "alpaca",
        {"instruction": "a", "output": "b", "history": "x"},
        "bad_type",
        "history: expected a list, found a string",
    ),
    (
        "alpaca",
        {"instruction": "a", "output": "b", "history": ["x"]},
        "bad_type",
        "history[0]: expected a list, found a string",
    ),
    (
        "alpaca",
        {"instruction": "a", "output": "b", "history": [["x"]]},
        "bad_type",
        "history[0]: expected [user, assistant]",
    ),
    (
        "alpaca",
        {"instruction": "a", "output": "b", "history": [["x", 1]]},
        "bad_type",
        "history[0][1]: expected a string",
    ),
    (
        "dolly",
        {"instruction": "a", "context": [], "response": "b"},
        "bad_type",
        "context: expected a string, found a list",
    ),
    (
        "dolly",
        {"instruction": "a", "response": datetime.datetime(2020, 1, 1)},
        "bad_type",
        "found a value of type datetime",
    ),
    ("oasst", {"prompt": "a"}, "bad_type", "prompt: expected an object, found a string"),
    ("oasst", {"prompt": {"role": "prompter", "text": "a"}}, "empty", "prompt: the tree has no reply"),
    ("oasst", _tree("b"), "bad_type", "prompt.replies[0]: expected an object, found a string"),
    (
        "oasst",
        _tree({"role": "assistant"}),
        "missing_key",
        "prompt.replies[0].text is missing; the keys found are: role",
    ),
    ("oasst", _tree({"role": "usr", "text": "b"}), "bad_role", 'prompt.replies[0].role "usr" is not a role'),
    (
        "oasst",
        _tree({"text": "b", "rank": "0"}),
        "bad_type",
        "prompt.replies[0].rank: expected a number, found a string",
    ),
    (
        "oasst",
        _tree({"role": "assistant", "text": "b", "replies": {}}),
        "bad_type",
        "prompt.replies[0].replies: expected a list",
    ),
    ("prompt_completion", {"prompt": "a"}, "missing_key", "completion is missing; the keys found are: prompt"),
    ("prompt_completion", {"prompt": "a", "completion": []}, "bad_type", "found a string and a list"),
    ("prompt_completion", {"prompt": [], "completion": []}, "empty", "the record holds no messages"),
    (
        "prompt_completion",
        {"prompt": "a", "completion": "\0"},
        "nul",
        "completion holds a NUL character at character 0",
    ),
    ("text", {"text": 1.5}, "bad_type", "text: expected a string, found a number"),
    ("text", {"text": ""}, "empty", "the record holds no messages"),
]


@pytest.mark.parametrize(("format", "record", "code", "message"), BAD)
def test_rejects(format: str, record: object, code: str, message: str) -> None:
    with pytest.raises(Reject) as caught:
        read_record(record, format)
    assert caught.value.reason == code
    assert message in caught.value.message
    caught.value.message.encode()  # the message is written to a file


def test_a_control_token_in_any_field_is_text_like_any_other() -> None:
    token = "<|im_end|></s>"
    record = _calls({"id": token, "function": {"name": token, "arguments": {token: token}}})
    message = read_record(record, "messages").messages[1]
    assert message.tool_calls == (ToolCall(token, f'{{"{token}":"{token}"}}', token),)


def test_a_very_deep_tree_is_walked_without_recursion() -> None:
    node: dict[str, object] = {"role": "assistant", "text": "0"}
    for depth in range(1, 20_000):
        node = {"role": ("assistant", "prompter")[depth % 2], "text": str(depth), "replies": [node]}
    messages = read_record({"prompt": node}, "oasst").messages
    assert len(messages) == 20_000
    assert messages[-1].content == "0"


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from(["user", "gpt", "\ud800"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from([*COLUMNS, *RECORD_KEYS]),
            inner,
            max_size=4,
        )
    ),
    max_leaves=20,
)


@given(record=JSON, format=st.sampled_from(FORMAT_NAMES))
def test_any_value_is_read_or_rejected(record: object, format: str) -> None:
    detect(record)
    try:
        conversation = read_record(record, format)
    except Reject:
        return
    assert conversation.messages
    assert content_digest(whole_text(conversation).encode())


def test_content_digest_is_the_same_for_ever() -> None:
    assert whole_text(Conversation((USER, ASSISTANT))) == "\2\3\0002+2?\0004"
    assert digest_of(Conversation((USER, ASSISTANT))) == 12592626845801325349
    tools = ('{"name":"weather","parameters":{"type":"object"}}',)
    assert digest_of(Conversation(GOLDEN[0][2].messages, tools)) == 3442527453750267523


def digest_of(conversation: Conversation) -> int:
    return content_digest(whole_text(conversation).encode())


few = st.sampled_from(["", "a", "\1", "\6", "\x10"])
maybe = st.none() | few
calls = st.lists(st.builds(ToolCall, few, few, maybe), max_size=2).map(tuple)
message = st.builds(Message, st.sampled_from(ROLES), few, few, maybe, calls, maybe)
conversation = st.builds(
    Conversation, st.lists(message, min_size=1, max_size=2).map(tuple), st.lists(few, max_size=2).map(tuple)
)


@settings(deadline=None, max_examples=examples(1000))
@given(conversation, conversation)
@example(Conversation((Message("user", "", name=""),)), Conversation((Message("user", "", tool_call_id=""),)))
@example(Conversation((Message("user", "a"),), ("a",)), Conversation((Message("user", "a", name="a"),)))
def test_no_two_conversations_say_the_same(one: Conversation, other: Conversation) -> None:
    assert (whole_text(one) == whole_text(other)) == (one == other)


def test_content_digest_is_of_what_is_said() -> None:
    base = Conversation((USER, replace(ASSISTANT, tool_calls=(ToolCall("f", "{}"),))), (WEATHER,))
    user, assistant = base.messages
    others = [
        Conversation(base.messages[:1], base.tools),
        Conversation(base.messages),
        Conversation((replace(user, role="system"), assistant), base.tools),
        Conversation((replace(user, content="2+2"), assistant), base.tools),
        Conversation((replace(user, context="x"), assistant), base.tools),
        Conversation((replace(user, name="x"), assistant), base.tools),
        Conversation((replace(user, tool_call_id="x"), assistant), base.tools),
        Conversation((user, replace(assistant, tool_calls=(ToolCall("g", "{}"),))), base.tools),
        Conversation((user, replace(assistant, tool_calls=(ToolCall("f", "[]"),))), base.tools),
        Conversation((user, replace(assistant, tool_calls=(ToolCall("f", "{}", "1"),))), base.tools),
    ]
    digests = {digest_of(conversation) for conversation in (base, *others)}
    assert len(digests) == 1 + len(others)
    assert all(0 <= digest < 2**64 for digest in digests)
    assert digest_of(Conversation((user, replace(assistant, train=False)), base.tools)) == digest_of(base)
    same = [
        ({"prompt": "2+2?", "completion": "4"}, "prompt_completion"),
        ({"instruction": "2+2?", "output": "4"}, "alpaca"),
    ]
    assert len({digest_of(read_record(record, format)) for record, format in same}) == 1


@pytest.mark.parametrize(
    "place",
    [
        {"tools": '[{"name": "f", "maximum": NUMBER}]'},
        {"tools": ['{"name": "f", "maximum": NUMBER}']},
        {"messages": [{"role": "assistant", "tool_calls": [{"name": "f", "arguments": '{"id": NUMBER}'}]}]},
    ],
)
def test_an_integer_in_a_json_text_within_a_record_is_not_rounded(place: dict[str, object]) -> None:
    def record(number: str) -> dict[str, object]:
        filled = json.loads(json.dumps({"messages": [{"role": "user", "content": "a"}], **place}))
        return json.loads(json.dumps(filled).replace("NUMBER", number))

    read_record(record(str(2**64 - 1)), "messages")
    with pytest.raises(Reject, match="36893488147419103232 does not fit in 64 bits") as reject:
        read_record(record(str(2**65)), "messages")
    assert reject.value.reason == "big_integer"


def test_the_key_of_the_reasoning_can_be_mapped() -> None:
    record = {"instruction": "2+2?", "output": "4", "cot": "Two more than two."}
    assert read_record(record, "alpaca", {"reasoning": "cot"}).messages == (USER, REASONED)
