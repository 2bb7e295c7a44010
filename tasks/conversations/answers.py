"""Read the reasoning and the calls of an answer, and the definitions of tools.

Reasoning is in a key next to the content, or at the front of the text:

{"content": "4", "thinking": "Two and two."}               → "Two and two."
"<think>\\nTwo and two.\\n</think>\\n{\\"name\\": …}"   → "Two and two.", '{"name": …}'

Calls are in `tool_calls`, in the older `function_call`, or in the content of a turn with the role "call":

{"id": "a", "type": "function", "function": {"name": "weather", "arguments": "{\\"city\\": \\"Oslo\\"}"}}
{"name": "weather", "arguments": {"city": "Oslo"}}
    → ToolCall("weather", '{"city":"Oslo"}')

Turns of one answer are joined, and calls are paired with their results: by ID, or else by name, or in order. The calls
of the last message may be open, because a conversation may end with them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

import orjson

from packcorpus.tasks.conversations.model import Conversation, Message, Record, ToolCall
from packcorpus.tasks.conversations.values import json_of, list_of, object_of, parsed, text_of
from packcorpus.tasks.core.errors import Reject
from packcorpus.tasks.core.printable import kind, shown

# Names of the reasoning of an answer in published data.
REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")

_REASONING = frozenset(REASONING_KEYS)

# Names of the arguments of a call; the first is the usual one.
ARGUMENTS = ("arguments", "parameters", "args", "input")

# Names of the definitions of tools in a record; the last is OpenAI's older one.
TOOL_KEYS = ("tools", "tool_defs", "functions")

OPTIONS = "chat_template_kwargs"  # the options that a record gives its template

# Values of a key without calls or definitions; in tables and CSV, they may be text.
_NO_CALLS: tuple[object, ...] = (None, "", "null")
_NO_TOOLS: tuple[object, ...] = (*_NO_CALLS, [], "[]")

_TAGGED = re.compile(r"\s*<tool_call>(.*?)</tool_call>\s*", re.DOTALL)


# -- reasoning --------------------------------------------------------------------------------------------------------


def reasoning_in(item: Record, where: str = "") -> str:
    """Return the reasoning in an object, which any of REASONING_KEYS may hold, or "".

    `where` is the place of the keys.
    """
    if _REASONING.isdisjoint(item):
        return ""
    found = {key: item[key] for key in REASONING_KEYS if item.get(key) not in (None, "")}
    texts = {text_of(value, where + key) for key, value in found.items()}
    if len(texts) > 1:
        raise Reject("bad_content", f"{where.rstrip('.') or 'the record'}: {' and '.join(found)} differ; keep one")
    return texts.pop() if texts else ""


def reasoning_keys(record: Record) -> list[str]:
    """Return the keys of a record with one answer that hold its reasoning.

    A flag, a number, or a list under one of these names is a remark.
    """
    return [key for key in REASONING_KEYS if isinstance(record.get(key), str)]


def reasoning_of_record(record: Record) -> str:
    """Return the reasoning of a record with one answer, or ""."""
    return reasoning_in({key: record[key] for key in reasoning_keys(record)})


# -- calls ------------------------------------------------------------------------------------------------------------


def tool_calls_of(item: Record, where: str) -> tuple[ToolCall, ...]:
    """Read `tool_calls` and the older `function_call` of a message."""
    calls = []
    if (value := item.get("tool_calls")) not in _NO_CALLS:
        for index, call in enumerate(list_of(value, f"{where}.tool_calls", "bad_tool_call")):
            calls.append(call_of(call, f"{where}.tool_calls[{index}]"))
    if (value := item.get("function_call")) not in _NO_CALLS:
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
    arguments, place = function.get(key), f"{where}.{key}"
    if arguments is None or arguments == "":
        text = "{}"
    elif isinstance(arguments, str):
        parsed(text := text_of(arguments, place), place, "bad_tool_call")
    else:
        if isinstance(arguments, list) and arguments and all(map(_is_entry, arguments)):
            keys = {item["key"] for item in arguments}
            if len(keys) < len(arguments):
                raise Reject("bad_tool_call", f"{place}: two entries have the same key")
            arguments = {item["key"]: item.get("value") for item in arguments}
        if not isinstance(arguments, dict):
            raise Reject("bad_tool_call", f"{place}: expected a JSON text or an object, found {kind(arguments)}")
        text = json_of(arguments, place, "bad_tool_call")
    return ToolCall(text_of(name, f"{where}.name"), text, call_id)


def _is_entry(item: object) -> bool:
    """Return whether an object is an entry of a map, as tables without maps write it."""
    return isinstance(item, dict) and isinstance(item.get("key"), str) and item.keys() <= {"key", "value"}


def calls_of_turn(value: object, where: str) -> tuple[str, str, tuple[ToolCall, ...]]:
    """Return the reasoning, the content, and the calls of a call turn.

    The value is a call or a list of calls, or their text: JSON, or JSON in <tool_call> tags after a content. Reasoning
    may precede it; a marker of reasoning within the JSON is a text of the call. Raises Reject if it holds no call.
    """
    if not isinstance(value, str):
        return "", "", _calls_in(value, where)
    # Some data lacks the first marker, because the prompt of the model ends with it.
    before, marker, after = text_of(value, where).partition("</think>")
    reasoning, text = before.strip().removeprefix("<think>"), after.lstrip()
    if not marker or "<think>" in reasoning or (reasoning.strip() and _is_json(value)):
        reasoning, text = "", value
    reasoning = reasoning.strip()
    if text.lstrip()[:1] in ("{", "["):
        return reasoning, "", _calls_in(text, where)
    content, tag, _ = text.partition("<tool_call>")
    tagged = text[len(content) :]
    if not tag or _TAGGED.sub("", tagged):
        raise Reject("bad_tool_call", f"{where}: the role says that this is a call, but found no JSON text of a call")
    calls = [call for body in _TAGGED.findall(tagged) for call in _calls_in(body, where)]
    return reasoning, content.rstrip(), tuple(calls)


def _is_json(text: str) -> bool:
    try:
        orjson.loads(text)
    except orjson.JSONDecodeError:
        return False
    return True


def _calls_in(value: object, where: str) -> tuple[ToolCall, ...]:
    if isinstance(value, str):
        value = parsed(value, where, "bad_tool_call")
    if not isinstance(value, list):
        return (call_of(value, where),)
    if not value:
        raise Reject("bad_tool_call", f"{where}: the role says that this is a call, but the list of calls is empty")
    return tuple(call_of(call, f"{where}[{index}]") for index, call in enumerate(value))


def joined(before: Message, after: Message) -> Message | None:
    """Return two turns of the assistant as one message.

    Returns None if that would change their order or their training: a message is reasoning, then content, then calls.
    """
    if before.role != "assistant" or after.role != "assistant":
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


class Unpaired(NamedTuple):
    """Counts of what has no partner in a conversation.

    `undefined_tools` is 1 if a called tool has no definition.
    """

    calls_without_result: int = 0
    results_without_call: int = 0
    undefined_tools: int = 0


def unpaired_in(conversation: Conversation, start: int = 0) -> Unpaired | None:
    """Return the calls and results without a partner, or None if there are none.

    Those of the messages before index `start` are not counted.
    """
    messages = conversation.messages
    if not any(message.tool_calls or message.role == "tool" for message in messages[start:]):
        return None
    open_calls: list[ToolCall] = []
    called, results, may_have_text_calls, earlier = set[str](), 0, False, 0
    for k, message in enumerate(messages):
        earlier = len(open_calls) if k == start else earlier
        open_calls += message.tool_calls
        called.update(call.name for call in message.tool_calls)
        # Calls that a template of Hermes models writes may be in the content as text.
        may_have_text_calls |= message.role == "assistant" and "<tool_call>" in message.content
        if message.role == "tool":
            if message.tool_call_id is not None and any(call.id is not None for call in open_calls):
                partners = [call for call in open_calls if call.id == message.tool_call_id]
            else:
                named = [call for call in open_calls if call.name == message.name] if message.name else []
                partners = named or open_calls
            if partners:
                open_calls.remove(partners[0])
            elif not may_have_text_calls:
                results += k >= start
    # The calls of the last message are open, because no result follows.
    calls = max(0, len(open_calls) - earlier - len(messages[-1].tool_calls))
    unpaired = Unpaired(calls, results, int(not called <= _names_of(conversation.tools)) if called else 0)
    return unpaired if any(unpaired) else None


def sum_unpaired(counts: Iterable[Unpaired]) -> Unpaired | None:
    """Add up the counts of parts of one conversation; None if there are none."""
    found = [*counts]
    if not found:
        return None
    calls, results, undefined = (sum(column) for column in zip(*found, strict=True))
    return Unpaired(calls, results, min(1, undefined))


@lru_cache(maxsize=512)
def _names_of(tools: tuple[str, ...]) -> set[str]:
    """Return the names of the tools with these schemas."""
    names = set()
    for tool in tools:
        schema = orjson.loads(tool)
        function = schema.get("function") if isinstance(schema.get("function"), dict) else schema
        if isinstance(function.get("name"), str):
            names.add(function["name"])
    return names


# -- tools ------------------------------------------------------------------------------------------------------------


def options_of(record: Record) -> dict[str, Any] | None:
    """Return the variables that a record gives its template, or None if it sets none."""
    value = record.get(OPTIONS)
    if value is None or value == "" or value == {}:
        return None
    options: Any = parsed(json_of(object_of(value, OPTIONS), OPTIONS, "bad_type"), OPTIONS, "bad_type")
    return options or None


def tools_of(record: Record) -> tuple[str, ...]:
    """Return the schema of each tool as JSON text.

    The definitions are a list of schemas, or the JSON text of such a list.
    """
    found: dict[str, tuple[str, ...]] = {}
    for key in TOOL_KEYS:
        value = record.get(key)
        if value in _NO_TOOLS:
            continue
        if isinstance(value, str):
            value = parsed(text_of(value, key), key, "bad_tools")
            value = [] if value is None else value
        tools = []
        for index, item in enumerate(list_of(value, key, "bad_tools")):
            where = f"{key}[{index}]"
            tool = parsed(text_of(item, where), where, "bad_tools") if isinstance(item, str) else item
            tools.append(json_of(_as_function(object_of(tool, where, "bad_tools")), where, "bad_tools"))
        found[key] = tuple(tools)
    if len({*found.values()}) > 1:
        raise Reject("bad_tools", f"the record: {' and '.join(found)} differ; keep one")
    return next(iter(found.values()), ())


def _as_function(tool: Record) -> Record:
    """Return a schema as the `function` of a tool.

    Templates and models expect this form. Some data has only the function, OpenAI's Responses API has the type next to
    the name, and Anthropic's API calls the parameters `input_schema`.
    """
    if "function" in tool or not isinstance(tool.get("name"), str):
        return tool
    is_anthropic = tool.get("parameters") is None and isinstance(tool.get("input_schema"), dict)
    if tool.get("type") not in (None, "function", *["custom"] * is_anthropic):
        return tool
    names = {"input_schema": "parameters"} if is_anthropic else {}
    kept = {names.get(key, key): value for key, value in tool.items() if key not in ("type", *names.values())}
    return {"type": "function", "function": kept}
