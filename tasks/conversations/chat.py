"""Read a list of turns, with or without tools, for all formats that have one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NoReturn, Protocol

from tasks.conversations.fields import json_of, list_of, missing, optional_text, parsed, text_of
from tasks.conversations.keys.training_flags import training_flag
from tasks.conversations.model import ROLES, Message, Record, ToolCall, role_named
from tasks.core.errors import Reject
from tasks.core.printable import kind, shown
from tasks.core.suggest import closest

# Names of the roles in published data, in lower case. A source's `roles` adds further names.
ROLE_NAMES = {
    **{role: role for role in ("system", "user", "assistant", "tool")},
    **dict.fromkeys(("developer",), "system"),
    **dict.fromkeys(("human", "prompter"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "bing", "bard", "model", "bot", "chatbot", "ai"), "assistant"),
    **dict.fromkeys(("function", "observation", "function_response", "tool_response", "ipython"), "tool"),
}


# Names of the reasoning of an answer in published data.
REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")


SHAREGPT_ROLE_NAMES = {**ROLE_NAMES, "function_call": "function_call"}


class PlainTurn(Protocol):
    """A turn of a plain record."""

    role: str
    content: str


def names_and_contents(turns: Iterable[PlainTurn]) -> tuple[tuple[str, ...], list[str]]:
    """Return the names of the roles of plain turns, and their contents."""
    names, contents = [], []
    for turn in turns:  # faster than two comprehensions
        names.append(turn.role)
        contents.append(turn.content)
    return tuple(names), contents


def with_system(record: Record, messages: list[Message]) -> tuple[Message, ...]:
    """Return messages after the `system` of their record.

    It is a text or a list of text parts, and left out if the messages begin with it.
    """
    value = record.get("system")
    system = _content(value, "system") if isinstance(value, list) else optional_text(record, "system")
    if system and not (messages and messages[0].role == "system" and messages[0].content == system):
        return Message("system", system), *messages
    return tuple(messages)


def messages_of(value: object, where: str, roles: Mapping[str, str]) -> list[Message]:
    """Read a list of {role, content, …} or {from, value, …}.

    `where` is the place of the list in the record.
    """
    messages = []
    for index, item in enumerate(list_of(value, where)):
        if type(item) is not dict:
            raise Reject("bad_type", f"{where}[{index}]: expected an object, found {kind(item)}")
        if roles is SHAREGPT_ROLE_NAMES and item.get("from") is not None:
            role_key, content_key = "from", "value"
        else:
            role_key, content_key = "role", "content"
        raw_role = item.get(role_key)
        role = role_named(raw_role, roles)
        if role is None:
            if raw_role is None and role_key in item:
                raise Reject("missing_key", f"{where}[{index}].{role_key} is null")
            if raw_role is None:
                missing(item, role_key, f"{where}[{index}]")
            refuse_role(raw_role, f"{where}[{index}].{role_key}", roles)
        content = item.get(content_key)
        if len(item) == 2 and type(content) is str and role != "function_call":  # nearly every message
            messages.append(Message(role, text_of(content, where, index, content_key)))
        else:
            messages.append(_message(item, role, content_key, f"{where}[{index}]"))
    return messages


def _message(item: dict[str, object], role: str, content_key: str, where: str) -> Message:
    """Read a message that has more than a role and a string."""
    tool_calls = _tool_calls(item, where)
    content = item.get(content_key)
    text = ""
    if content is not None:
        text = _content(content, f"{where}.{content_key}")
    elif not tool_calls:
        if any(item.get(key) for key in REASONING_KEYS):
            raise Reject("bad_content", f"{where} has reasoning, but no content; that is allowed only with tool_calls")
        if content_key not in item:
            missing(item, content_key, where)
        raise Reject("bad_content", f"{where}.{content_key} is null; that is allowed only with tool_calls")
    if role == "function_call":
        role = "assistant"
        calls = _sharegpt_calls(text)
        if calls:
            tool_calls, text = tool_calls + calls, ""
    if tool_calls and role != "assistant":
        raise Reject(
            "bad_tool_call", f"{where}.tool_calls: only assistant messages may have tool calls, but the role is {role}"
        )
    name, call_id = item.get("name"), item.get("tool_call_id")
    reasoning = reasoning_in(item, f"{where}.")
    if reasoning and role != "assistant":
        raise Reject("bad_content", f"{where}: only assistant messages may have reasoning, but the role is {role}")
    return Message(
        role,
        text,
        name=None if name is None else text_of(name, f"{where}.name"),
        tool_calls=tool_calls,
        tool_call_id=None if call_id is None else text_of(call_id, f"{where}.tool_call_id"),
        train=training_flag(item, where),
        reasoning=reasoning,
        loss_weight=item.get("loss_weight"),
    )


def reasoning_in(item: dict[str, object], where: str = "") -> str:
    """Return the reasoning in an object.

    Any of REASONING_KEYS may hold it. It is "" if there is none. `where` is the place of the keys.
    """
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


def _content(value: object, where: str) -> str:
    """Read a string, or join a list of text parts."""
    if isinstance(value, str):
        return text_of(value, where)
    if not isinstance(value, list):
        raise Reject("bad_content", f"{where}: expected a string, found {kind(value)}")
    texts = []
    for index, part in enumerate(value):
        if not isinstance(part, dict):
            raise Reject("bad_content", f"{where}[{index}]: expected a part with a type, found {kind(part)}")
        if part.get("type") != "text":
            found = shown(part.get("type"))
            raise Reject("bad_content", f"{where}[{index}].type is {found}; only text parts can be packed")
        if not isinstance(part.get("text"), str):
            raise Reject("bad_content", f"{where}[{index}].text: expected a string, found {kind(part.get('text'))}")
        texts.append(text_of(part["text"], f"{where}[{index}].text"))
    return "".join(texts)


def _tool_calls(item: dict[str, object], where: str) -> tuple[ToolCall, ...]:
    """Read `tool_calls` and the older `function_call`."""
    calls = []
    value = item.get("tool_calls")
    if value is not None:
        if not isinstance(value, list):
            raise Reject("bad_tool_call", f"{where}.tool_calls: expected a list, found {kind(value)}")
        for index, call in enumerate(value):
            place = f"{where}.tool_calls[{index}]"
            if not isinstance(call, dict):
                raise Reject("bad_tool_call", f"{place}: expected an object, found {kind(call)}")
            if call.get("type") not in (None, "function"):
                raise Reject("bad_tool_call", f'{place}.type is {shown(call["type"])}; only "function" is known')
            call_id = call.get("id")
            if call_id is not None and not isinstance(call_id, str):
                raise Reject("bad_tool_call", f"{place}.id: expected a string, found {kind(call_id)}")
            # in published data, name and arguments are often not within a `function`
            function = call if call.get("function") is None else call["function"]
            function_place = place if function is call else f"{place}.function"
            call_id = None if call_id is None else text_of(call_id, f"{place}.id")
            calls.append(_tool_call(function, function_place, call_id))
    value = item.get("function_call")
    if value is not None:
        calls.append(_tool_call(value, f"{where}.function_call", None))
    return tuple(calls)


def _tool_call(function: object, where: str, call_id: str | None) -> ToolCall:
    """Read {"name": …, "arguments": JSON text or object}.

    Missing or empty arguments become {}.
    """
    if not isinstance(function, dict):
        raise Reject("bad_tool_call", f"{where}: expected an object, found {kind(function)}")
    name, arguments = function.get("name"), function.get("arguments")
    if not isinstance(name, str) or not name:
        found = "an empty string" if name == "" else kind(name)
        raise Reject("bad_tool_call", f"{where}.name: expected a string, found {found}")
    if arguments is None or arguments == "":
        text = "{}"
    elif isinstance(arguments, str):
        text = text_of(arguments, f"{where}.arguments")
        parsed(text, f"{where}.arguments", "bad_tool_call")
    elif isinstance(arguments, dict):
        text = json_of(arguments, f"{where}.arguments", "bad_tool_call")
    else:
        raise Reject("bad_tool_call", f"{where}.arguments: expected a JSON text or an object, found {kind(arguments)}")
    return ToolCall(text_of(name, f"{where}.name"), text, call_id)


def _sharegpt_calls(value: str) -> tuple[ToolCall, ...]:
    """Return the calls in the value of a function_call turn.

    Returns () if the value is not the JSON text of a call or of a list of calls.
    """
    try:
        calls = parsed(value, "", "")
        return tuple(_tool_call(call, "", None) for call in (calls if isinstance(calls, list) else [calls]))
    except Reject:
        return ()


def tools_of(record: dict[str, object]) -> tuple[str, ...]:
    """Return each schema in `tools` as JSON text.

    `tools` is a list of schemas, or the JSON text of such a list.
    """
    value = record.get("tools")
    if value is None or value == "":
        return ()
    if isinstance(value, str):
        value = parsed(text_of(value, "tools"), "tools", "bad_tools")
        if value is None:
            return ()
    if not isinstance(value, list):
        raise Reject("bad_tools", f"tools: expected a list, found {kind(value)}")
    tools = []
    for index, tool in enumerate(value):
        where = f"tools[{index}]"
        if isinstance(tool, str):
            tool = parsed(text_of(tool, where), where, "bad_tools")
        if not isinstance(tool, dict):
            raise Reject("bad_tools", f"{where}: expected an object, found {kind(tool)}")
        tools.append(json_of(_as_function(tool), where, "bad_tools"))
    return tuple(tools)


def _as_function(tool: dict[str, object]) -> dict[str, object]:
    """Return a schema as the `function` of a tool.

    Templates and models expect this form. Some data has only the function, and OpenAI's Responses API has the type next
    to the name.
    """
    if "function" in tool or not isinstance(tool.get("name"), str) or tool.get("type") not in (None, "function"):
        return tool
    return {"type": "function", "function": {key: value for key, value in tool.items() if key != "type"}}


def refuse_role(role: object, where: str, roles: Mapping[str, str]) -> NoReturn:
    """Raise Reject with a message that shows how to map this name with `roles`."""
    if not isinstance(role, str):
        raise Reject("bad_role", f"{where}: expected a string, found {kind(role)}")
    near = closest(role, roles)
    name = role if role.isidentifier() and len(role) <= 60 else shown(role)
    meant = roles[near[0]] if near else "user"
    example = f"roles: {{{meant if meant in ROLES else 'user'}: [{name}]}}"
    known = "; map it to system, user, assistant, or tool, such as"
    advice = f"; did you mean {near[0]}? Or map it with {example}" if near else f"{known} {example}"
    raise Reject("bad_role", f"{where} {shown(role)} is not a role{advice}")
