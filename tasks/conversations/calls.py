"""Read calls of tools: from keys of a message, or from the content of a call turn.

The keys are `tool_calls` and the older `function_call`. The role of a call turn is one of CALL_ROLES.

{"id": "a", "type": "function", "function": {"name": "weather", "arguments": "{\\"city\\": \\"Oslo\\"}"}}
{"name": "weather", "arguments": {"city": "Oslo"}}
    → ToolCall("weather", '{"city":"Oslo"}')

Turns of one answer are joined, and calls are paired with their results: by ID, or else by name, or in order. The calls
of the last message may be open, because a conversation may end with them.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

import orjson

from tasks.conversations.fields import json_of, parsed, text_of
from tasks.conversations.lists import list_of, object_of
from tasks.conversations.model import Conversation, Message, ToolCall
from tasks.conversations.reasoning import without_front
from tasks.core.errors import Reject
from tasks.core.printable import kind, shown

# Names of the role of a turn that is a call, in lower case.
CALL_ROLES = ("function_call", "tool_call", "tool_calls")

# Names of the arguments of a call; the first is the usual one.
ARGUMENTS = ("arguments", "parameters", "args", "input")

# Values of a key without a call; in tables and CSV, null may be text.
_ABSENT = (None, "", "null")

_TAGGED = re.compile(r"\s*<tool_call>(.*?)</tool_call>\s*", re.DOTALL)


def tool_calls_of(item: dict[str, object], where: str) -> tuple[ToolCall, ...]:
    """Read `tool_calls` and the older `function_call` of a message."""
    if "tool_calls" not in item and "function_call" not in item:
        return ()
    calls = []
    value = item.get("tool_calls")
    if value not in _ABSENT:
        for index, call in enumerate(list_of(value, f"{where}.tool_calls", "bad_tool_call")):
            calls.append(call_of(call, f"{where}.tool_calls[{index}]"))
    value = item.get("function_call")
    if value not in _ABSENT:
        calls.append(_function(value, f"{where}.function_call", None))
    return tuple(calls)


def call_of(value: object, where: str) -> ToolCall:
    """Read one call.

    In published data, name and arguments are often not within a `function`.
    """
    call = object_of(value, where, "bad_tool_call")
    if call.get("type") not in (None, "function"):
        raise Reject("bad_tool_call", f'{where}.type is {shown(call["type"])}; only "function" is known')
    call_id = call.get("id")
    if call_id is not None and not isinstance(call_id, str):
        raise Reject("bad_tool_call", f"{where}.id: expected a string, found {kind(call_id)}")
    call_id = None if call_id is None else text_of(call_id, f"{where}.id")
    if call.get("function") is None:
        return _function(call, where, call_id)
    return _function(call["function"], f"{where}.function", call_id)


def _function(value: object, where: str, call_id: str | None) -> ToolCall:
    """Read {"name": …, "arguments": JSON text or object}.

    Missing or empty arguments become {}.
    """
    function = object_of(value, where, "bad_tool_call")
    name = function.get("name")
    if not isinstance(name, str) or not name:
        found = "an empty string" if name == "" else kind(name)
        raise Reject("bad_tool_call", f"{where}.name: expected a string, found {found}")
    key = next((key for key in ARGUMENTS if function.get(key) is not None), ARGUMENTS[0])
    arguments = arguments_of(function.get(key), f"{where}.{key}")
    return ToolCall(text_of(name, f"{where}.name"), arguments, call_id)


def arguments_of(value: object, where: str) -> str:
    """Return the arguments of a call as JSON text."""
    if value is None or value == "":
        return "{}"
    if isinstance(value, str):
        parsed(text_of(value, where), where, "bad_tool_call")
        return value
    if isinstance(value, list) and value and all(_is_entry(item) for item in value):
        keys = [item["key"] for item in value]
        if len({*keys}) < len(keys):
            raise Reject("bad_tool_call", f"{where}: two entries have the same key")
        value = {item["key"]: item.get("value") for item in value}
    if isinstance(value, dict):
        return json_of(value, where, "bad_tool_call")
    raise Reject("bad_tool_call", f"{where}: expected a JSON text or an object, found {kind(value)}")


def _is_entry(item: object) -> bool:
    """Return whether an object is an entry of a map, as tables without maps write it."""
    return isinstance(item, dict) and isinstance(item.get("key"), str) and item.keys() <= {"key", "value"}


def calls_of_turn(value: object, where: str) -> tuple[str, str, tuple[ToolCall, ...]]:
    """Return the reasoning, the content, and the calls of a call turn.

    The value is a call or a list of calls, or their text: JSON, or JSON in <tool_call> tags after a content. Reasoning
    may precede it. Raises Reject if it holds no call.
    """
    if not isinstance(value, str):
        return "", "", _calls_in(value, where)
    reasoning, text = without_front(text_of(value, where))
    if text.lstrip()[:1] in ("{", "["):
        return reasoning, "", _calls_in(text, where)
    content, tag, _ = text.partition("<tool_call>")
    tagged = text[len(content) :]
    if not tag or _TAGGED.sub("", tagged):
        raise Reject("bad_tool_call", f"{where}: the role says that this is a call, but found no JSON text of a call")
    calls = [call for body in _TAGGED.findall(tagged) for call in _calls_in(body, where)]
    return reasoning, content.rstrip(), tuple(calls)


def _calls_in(value: object, where: str) -> tuple[ToolCall, ...]:
    if isinstance(value, str):
        value = parsed(value, where, "bad_tool_call")
    if not isinstance(value, list):
        return (call_of(value, where),)
    if not value:
        raise Reject("bad_tool_call", f"{where}: the role says that this is a call, but the list of calls is empty")
    return tuple(call_of(call, f"{where}[{index}]") for index, call in enumerate(value))


def may_follow(role: object, after_call: bool) -> bool:
    """Return whether a call turn may belong to the same answer as the turn before it.

    `role` is its role in the data. The call of ShareGPT is a turn of its own, or one of several calls.
    """
    return after_call or not (isinstance(role, str) and role.lower() == CALL_ROLES[0])


def joined(before: Message, after: Message) -> Message | None:
    """Return two turns of the assistant as one message.

    Returns None if that would change their order or their training: a message is reasoning, then content, then calls.
    """
    both = (before, after)
    if any(message.role != "assistant" for message in both):
        return None
    if before.train != after.train or before.loss_weight != after.loss_weight or before.name != after.name:
        return None
    has_text, has_calls = bool(before.content), bool(before.tool_calls)
    if (after.reasoning and (before.reasoning or has_text or has_calls)) or (after.content and (has_text or has_calls)):
        return None
    said = before if has_text else after
    return replace(
        before,
        content=said.content,
        parts=said.parts,
        reasoning=before.reasoning or after.reasoning,
        tool_calls=before.tool_calls + after.tool_calls,
    )


# Calls that a template of Hermes models writes may be in the content as text.
_CALL_AS_TEXT = "<tool_call>"


class Unpaired(NamedTuple):
    """Counts of what has no partner in a conversation.

    `undefined_tools` is 1 if a called tool has no definition.
    """

    calls_without_result: int = 0
    results_without_call: int = 0
    undefined_tools: int = 0


def unpaired_in(conversation: Conversation) -> Unpaired | None:
    """Return the calls and results without a partner, or None if there are none."""
    messages = conversation.messages
    if not any(message.tool_calls or message.role == "tool" for message in messages):
        return None
    open_calls: list[ToolCall] = []
    results = 0
    may_have_text_calls = False
    for message in messages:
        open_calls += message.tool_calls
        may_have_text_calls |= message.role == "assistant" and _CALL_AS_TEXT in message.content
        if message.role == "tool":
            if (call := _call_of(message, open_calls)) is not None:
                open_calls.remove(call)
            elif not may_have_text_calls:
                results += 1
    # The calls of the last message are open, because no result follows.
    found = Unpaired(len(open_calls) - len(messages[-1].tool_calls), results, int(_calls_undefined(conversation)))
    return found if any(found) else None


def _call_of(result: Message, calls: Sequence[ToolCall]) -> ToolCall | None:
    """Return the open call that a result belongs to."""
    if result.tool_call_id is not None and any(call.id is not None for call in calls):
        return next((call for call in calls if call.id == result.tool_call_id), None)
    named = [call for call in calls if call.name == result.name] if result.name else []
    return next(iter(named or calls), None)


def _calls_undefined(conversation: Conversation) -> bool:
    names = {call.name for message in conversation.messages for call in message.tool_calls}
    return bool(names) and not names.issubset(_names_of(conversation.tools))


@lru_cache(maxsize=512)
def _names_of(tools: tuple[str, ...]) -> Collection[str]:
    """Return the names of the tools with these schemas."""
    found = set()
    for tool in tools:
        schema = orjson.loads(tool)
        function = schema.get("function") if isinstance(schema.get("function"), dict) else schema
        if isinstance(function.get("name"), str):
            found.add(function["name"])
    return found


def unpaired_in_contents(roles: Sequence[str], contents: Sequence[str]) -> Unpaired | None:
    """Return the results without a call in a plain conversation.

    Returns None if there are none.
    """
    return unpaired_in(Conversation(tuple(map(Message, roles, contents))))
