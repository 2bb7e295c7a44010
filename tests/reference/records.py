"""Records → messages in OpenAI's form, by the published rules of each format.

    {"conversations": [{"from": "human", "value": "2+2?"}, …]}  ─▶  [{"role": "user", "content": "2+2?"}, …], []

A message has `role` and `content`, and may have `context` (Alpaca's input), `reasoning_content`, `tool_calls`,
`tool_call_id`, and `train`. Arguments of calls are values. docs/reference/formats.md lists the keys and the names of
roles. `Rejected` is raised if a record does not fit.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, NoReturn

Record = dict[str, Any]
Messages = list[dict[str, Any]]

NAMES = {
    "system": ("system", "developer"),
    "user": ("user", "human", "prompter"),
    "assistant": ("assistant", "gpt", "chatgpt", "bing", "bard", "model", "bot", "chatbot", "ai"),
    "tool": ("tool", "function", "observation", "function_response", "tool_response", "ipython"),
}
REASONING = ("reasoning_content", "reasoning", "thinking")
CALL_ROLES = ("function_call", "tool_call", "tool_calls")
ROLES = {name: role for role, names in NAMES.items() for name in names}


class Rejected(Exception):
    """A record that must be rejected."""


def read(record: Any, format: str) -> tuple[Messages, list[Any]]:
    """Return the messages and the tools of a record. Raises Rejected."""
    if not isinstance(record, dict):
        raise Rejected("not an object")
    # In a table every column is in every row, so null means absent.
    messages, tools = FORMATS[format]({key: value for key, value in record.items() if value is not None})
    if not messages:
        raise Rejected("no messages")
    return messages, tools


# -- formats ----------------------------------------------------------------------------------------------------------


def messages(record: Record) -> tuple[Messages, list[Any]]:
    return after_system(record, turns(record.get("messages"))), tools_of(record)


def sharegpt(record: Record) -> tuple[Messages, list[Any]]:
    found = turns(record["conversations"] if "conversations" in record else record.get("conversation"), "sharegpt")
    return after_system(record, found), tools_of(record)


def alpaca(record: Record) -> tuple[Messages, list[Any]]:
    found = system_of(record)
    history = record.get("history", "")
    for pair in objects([] if history == "" else history, list):  # CSV has an empty cell
        if len(pair) != 2:
            raise Rejected("history has pairs")
        found += exchange(*pair)
    context = text(record.get("input", "")) or text(record.get("context", ""))
    answer = record["output"] if "output" in record else record.get("response")
    found += exchange(record.get("instruction"), answer, context)
    return found, []


def dolly(record: Record) -> tuple[Messages, list[Any]]:
    asked = exchange(record.get("instruction"), record.get("response"), text(record.get("context", "")))
    return system_of(record) + asked, []


def prompt_completion(record: Record) -> tuple[Messages, list[Any]]:
    names = ("prompt", "completion") if "prompt" in record or "question" not in record else ("question", "answer")
    asked, answer = record.get(names[0]), record.get(names[1], record.get("response"))
    if isinstance(asked, list):
        said = turns(answer) if isinstance(answer, list) else [{"role": "assistant", "content": text(answer)}]
        return system_of(record) + turns(asked) + said, tools_of(record)
    return system_of(record) + exchange(asked, answer), tools_of(record)


def plain_text(record: Record) -> tuple[Messages, list[Any]]:
    written = text(record.get("text"))
    return [{"role": "text", "content": written}] if written else [], []


def oasst(record: Record) -> tuple[Messages, list[Any]]:
    """Follow the best-ranked reply that is not deleted, down the tree.

    The lowest rank is the best. Replies without a rank come last.
    """
    found: Messages = []
    replies = [record.get("prompt")]
    while replies:
        [node] = objects(replies[:1], dict)
        if node.get("deleted"):
            break
        found.append({"role": role_of(node.get("role")), "content": text(node.get("text"))})
        given = node.get("replies")
        replies = [] if given is None else objects(given, dict)
        for reply in replies:
            if type(reply.get("rank")) not in (type(None), int, float):
                raise Rejected("a rank is a number")
        replies = [reply for reply in replies if not reply.get("deleted")]
        replies.sort(key=lambda reply: (reply.get("rank") is None, reply.get("rank") or 0))
    while found and found[-1]["role"] == "user":
        found.pop()
    return found, []


FORMATS: dict[str, Callable[[Record], tuple[Messages, list[Any]]]] = {
    "messages": messages,
    "sharegpt": sharegpt,
    "alpaca": alpaca,
    "dolly": dolly,
    "oasst": oasst,
    "prompt_completion": prompt_completion,
    "text": plain_text,
}


# -- parts of records -------------------------------------------------------------------------------------------------


def exchange(asked: Any, answer: Any, context: str = "") -> Messages:
    user = {"role": "user", "content": text(asked)} | ({"context": context} if context else {})
    return [user, {"role": "assistant", "content": text(answer)}]


def after_system(record: Record, found: Messages) -> Messages:
    given = record.get("system", "")
    system = content_of(given) if isinstance(given, list) else text(given)
    first = [(message["role"], message["content"]) for message in found[:1]]
    return found if not system or first == [("system", system)] else [{"role": "system", "content": system}, *found]


def system_of(record: Record) -> Messages:
    system = text(record.get("system", ""))
    return [{"role": "system", "content": system}] if system else []


def text(value: Any) -> str:
    if not isinstance(value, str):
        raise Rejected("not a string")
    if "\0" in value:
        raise Rejected("NUL")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise Rejected("half of a surrogate pair") from None
    return value


def objects(values: Any, kind: type) -> list[Any]:
    if not isinstance(values, list) or not all(isinstance(value, kind) for value in values):
        raise Rejected(f"not a list of {kind.__name__}")
    return values


def role_of(name: Any) -> str:
    if not isinstance(name, str) or name.lower() not in ROLES:
        raise Rejected(f"not a role: {name!r}")
    return ROLES[name.lower()]


def turns(values: Any, format: str = "") -> Messages:
    """Read turns. Calls in a row are parallel calls of one turn."""
    found: Messages = []
    was_call = False
    for value in objects(values, dict):
        is_call = any(isinstance(value.get(key), str) and value[key].lower() in CALL_ROLES for key in ("from", "role"))
        read = turn(value, format == "sharegpt")
        same = is_call and was_call and found[-1].get("train") == read.get("train")
        if same:
            found[-1]["tool_calls"] += read["tool_calls"]
        else:
            found.append(read)
        was_call = is_call
    return found


def turn(value: Record, is_sharegpt: bool) -> dict[str, Any]:
    """Read a turn in OpenAI's form or in ShareGPT's, whose keys differ."""
    given = {key: item for key, item in value.items() if item is not None}
    role_key, content_key = ("from", "value") if is_sharegpt and "from" in given else ("role", "content")
    name = given.get(role_key)
    is_call = isinstance(name, str) and name.lower() in CALL_ROLES
    role = "assistant" if is_call else role_of(name)
    calls = [call(each) for each in objects(given.get("tool_calls", []), dict)]
    if "function_call" in given:
        calls.append(function(given["function_call"]))
    if content_key not in given and not calls:
        raise Rejected("no content")
    content = content_of(given.get(content_key, ""))
    if is_call:
        calls, content = calls + called_in(content), ""
    if calls and role != "assistant":
        raise Rejected("only the assistant calls tools")
    found: dict[str, Any] = {"role": role, "content": content}
    if calls:
        found["tool_calls"] = calls
    reasoning = [text(given[key]) for key in REASONING if key in given]
    if any(reasoning):
        found["reasoning_content"] = next(filter(None, reasoning))
    text(given.get("name", ""))
    if "tool_call_id" in given:
        found["tool_call_id"] = text(given["tool_call_id"])
    flags = {key: given[key] for key in ("weight", "train", "training") if key in given}
    if any(not isinstance(flag, (bool, int, float)) or flag not in (0, 1) for flag in flags.values()):
        raise Rejected("not a weight of 0 or 1")
    if flags.get("weight") == 1:
        del flags["weight"]
    if len(set(flags.values())) > 1:
        raise Rejected("flags that disagree")
    for flag in flags.values():
        found["train"] = bool(flag)
    return found


def content_of(value: Any) -> str:
    if isinstance(value, str):
        return text(value)
    parts = objects(value, dict)
    if any(part.get("type") != "text" for part in parts):
        raise Rejected("a part that is not text")
    return "\n".join(text(part.get("text")) for part in parts)


def call(value: Record) -> dict[str, Any]:
    if value.get("type") not in (None, "function"):
        raise Rejected("not a call of a function")
    found = function(value if value.get("function") is None else value["function"])
    return found if value.get("id") is None else {"id": text(value["id"]), **found}


def function(value: Any) -> dict[str, Any]:
    """Read {"name": …, "arguments": …}; arguments are an object, JSON, or missing."""
    if not isinstance(value, dict) or not value.get("name"):
        raise Rejected("not a function with a name")
    arguments = value.get("arguments")
    if arguments is None or arguments == "":
        arguments = {}
    elif isinstance(arguments, str):
        arguments = parsed(text(arguments))
    elif isinstance(arguments, dict):
        text(json.dumps(arguments, ensure_ascii=False, default=refuse))
    else:
        raise Rejected("arguments are an object, or JSON")
    return {"function": {"name": text(value["name"]), "arguments": arguments}}


def called_in(content: str) -> list[dict[str, Any]]:
    """Return the calls in a turn whose role says that it is a call.

    The turn is the JSON of one call or of a list of calls. Any other text must be rejected.
    """
    value = parsed(content)
    calls = [function(each) for each in (value if isinstance(value, list) else [value])]
    if not calls:
        raise Rejected("a call without a call")
    return calls


def tools_of(record: Record) -> list[Any]:
    """Read the list of tools.

    The list, or each of its tools, may be JSON. A function alone is wrapped as a tool.
    """
    values = record.get("tools", [])
    values = parsed(text(values)) if isinstance(values, str) and values else values
    if values is None or values == "":
        return []
    if not isinstance(values, list):
        raise Rejected("tools are a list")
    tools = objects([parsed(text(each)) if isinstance(each, str) else each for each in values], dict)
    text(json.dumps(tools, ensure_ascii=False, default=refuse))
    return list(map(framed, tools))


def framed(tool: Record) -> Record:
    if "function" in tool or not isinstance(tool.get("name"), str) or tool.get("type") not in (None, "function"):
        return tool
    return {"type": "function", "function": {key: value for key, value in tool.items() if key != "type"}}


def parsed(written: str) -> Any:
    """Parse strict JSON (RFC 8259).

    Duplicate keys and integers beyond 64 bits are rejected (docs/reference/errors.md).
    """
    try:
        return json.loads(written, object_pairs_hook=unique, parse_int=integer, parse_constant=refuse)
    except (ValueError, RecursionError) as error:
        raise Rejected(str(error)) from None


def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    for key, _ in pairs:
        text(key)
    if len(dict(pairs)) < len(pairs):
        raise ValueError("a key twice")
    return dict(pairs)


def integer(digits: str) -> int:
    if not -(2**63) <= int(digits) < 2**64:
        raise ValueError("an integer beyond 64 bits")
    return int(digits)


def refuse(value: Any) -> NoReturn:
    raise Rejected(f"not JSON: {value!r}")
