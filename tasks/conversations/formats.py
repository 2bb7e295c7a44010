"""Record formats → `Conversation`. (record: one JSON object or table row)

    {"messages": [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]}    one record
    {"instruction": "2+2?", "output": "4"}                                                        another record
        → Conversation((Message("user", "2+2?"), Message("assistant", "4")))                      the same conversation

`detect` tells the format from a record's keys; the first line of this table that fits wins. A key whose value is
null counts as absent, because a table has every column in every row.

| told by the keys                              | format            | read as well, where present            |
|-----------------------------------------------|-------------------|----------------------------------------|
| messages                                      | messages          | tools                                  |
| conversations, or conversation                | sharegpt          | system, tools                          |
| prompt that is an object                      | oasst             |                                        |
| instruction and output                        | alpaca            | input (else context), system, history  |
| instruction and response and context          | dolly             | system                                 |
| instruction and response                      | alpaca            | input, system, history                 |
| prompt and completion, or prompt and response | prompt_completion | system, tools                          |
| question and answer, or question and response | prompt_completion | system, tools                          |
| text                                          | text              |                                        |

Other keys are ignored. A record that does not fit its format raises `Reject` with one of these codes:
not_an_object, missing_key, bad_type, bad_role, bad_content, bad_weight, bad_tool_call, bad_tools, big_integer, empty,
nul, lone_surrogate, too_many_turns. The message names the place within the record, the value and, where there is one,
the fix.

Cost: 1 µs a message. It runs for every one of millions of records, hence plain code and no schema library, and hence
values that are not frozen, though nobody changes one: frozen, a message takes five times as long to make.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import pairwise
from typing import NoReturn

from xxhash import xxh3_64_intdigest

from tasks.conversations.fields import (
    json_of,
    kind,
    list_of,
    missing,
    optional_text,
    parsed,
    required,
    required_text,
    shown,
    text_of,
)
from tasks.core.errors import Reject


@dataclass(slots=True)
class ToolCall:
    """One call of a tool by the assistant. `arguments` is JSON text (normally an object)."""

    name: str
    arguments: str
    id: str | None = None


@dataclass(slots=True)
class Message:
    """One turn. `role` is one of `ROLES`.

    `context` is what Alpaca calls input and Dolly context: it belongs to `content`, but a template may set it apart.
    `weight` 0 means that the turn is never trained on.
    """

    role: str
    content: str
    context: str = ""
    name: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    weight: int = 1


@dataclass(slots=True)
class Conversation:
    """A list of messages. `tools` holds the schemas of the tools on offer, each as JSON text."""

    messages: tuple[Message, ...]
    tools: tuple[str, ...] = ()


ROLES = ("system", "user", "assistant", "tool", "text")

# Of one conversation. A message takes 30 µs and 3.5 KB until it is tokens, so these take 3 s and 350 MB.
MOST_MESSAGES = 100_000

FORMATS: tuple[str, ...] = ("messages", "sharegpt", "alpaca", "dolly", "oasst", "prompt_completion", "text")

COLUMNS: tuple[str, ...] = (
    *("messages", "conversations", "conversation", "tools", "system", "instruction", "input", "context", "output"),
    *("response", "history", "prompt", "completion", "question", "answer", "text"),
)
"""The names that a `columns` mapping may give to a record's keys."""

_ROLES = {
    **{role: role for role in ("system", "user", "assistant", "tool")},
    **{"developer": "system", "function": "tool"},
}
_SHAREGPT_ROLES = {
    **_ROLES,
    **{"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bing": "assistant", "bard": "assistant"},
    **{"model": "assistant", "observation": "tool", "function_response": "tool", "function_call": "function_call"},
}


# What the records of a format call the roles; a call of a function is no turn of its own.
ROLES_OF = {
    "messages": _ROLES,
    "sharegpt": {name: role for name, role in _SHAREGPT_ROLES.items() if role in ROLES},
}

_OASST_ROLES = {"prompter": "user", "assistant": "assistant"}


def detect(record: object, columns: Mapping[str, str] = {}) -> str | None:
    """The format of `record` by its keys (the table above), or None if it cannot be told.

    `columns` maps our column names to the record's, such as {"instruction": "frage"}.
    """
    if not isinstance(record, dict):
        return None
    if columns:
        record = _rename(record, columns)
    keys = {key for key, value in record.items() if value is not None}
    if "messages" in keys:
        return "messages"
    if "conversations" in keys or "conversation" in keys:
        return "sharegpt"
    if "prompt" in keys and isinstance(record["prompt"], dict):
        return "oasst"
    if "instruction" in keys:
        if "output" in keys:
            return "alpaca"
        if "response" in keys:
            return "dolly" if "context" in keys else "alpaca"
    if ("prompt" in keys and not keys.isdisjoint(("completion", "response"))) or (
        "question" in keys and not keys.isdisjoint(("answer", "response"))
    ):
        return "prompt_completion"
    return "text" if "text" in keys else None


def read_record(record: object, format: str, columns: Mapping[str, str] = {}) -> Conversation:
    """The conversation in `record`, which is of the given format, one of `FORMATS`.

    `columns` maps our column names to the record's. Raises Reject if the record is not of this format, and KeyError
    for an unknown format.
    """
    reader = _READERS[format]
    if not isinstance(record, dict):
        raise Reject("not_an_object", f"the record is {kind(record)}; expected an object with keys")
    if columns:
        record = _rename(record, columns)
    conversation = reader(record)
    if not conversation.messages:
        raise Reject("empty", "the record holds no messages")
    if len(conversation.messages) > MOST_MESSAGES:
        found = f"the record holds {len(conversation.messages):,} messages"
        raise Reject("too_many_turns", f"{found}, more than {MOST_MESSAGES:,}; split it")
    return conversation


def said(conversation: Conversation) -> str:
    """All that the conversation says: first which strings there are, then the strings, with NUL between them, which
    none holds. No two conversations say the same.

    What comes first is made of control characters, so that it is none of a tokenizer's control strings.
    """
    strings = []
    for message in conversation.messages:
        known = (message.content, message.context or None, message.name, message.tool_call_id)
        strings += [text for text in known if text is not None]
        strings += [text for c in message.tool_calls for text in (c.name, c.arguments, c.id) if text is not None]
    return "\0".join((said_of(conversation), *strings, *conversation.tools))


def said_of(conversation: Conversation) -> str:
    """Which strings `said` goes on with: a character for each message, and one for each thing that it may have."""
    marks = []
    for message in conversation.messages:
        known = (message.context or None, message.name, message.tool_call_id)
        marks += [chr(1 + ROLES.index(message.role))]
        marks += [mark for mark, text in zip("\x06\x07\x08", known, strict=True) if text is not None]
        marks += ["\x0e" if call.id is None else "\x0f" for call in message.tool_calls]
    return "".join(marks) + "\x10" * len(conversation.tools)


def turns_of(roles: Sequence[str]) -> int:
    """Messages that are no system ones."""
    return sum(role != "system" for role in roles)


def content_digest(said: bytes) -> int:
    """64 bits, unsigned, of what a conversation says (`said` as UTF-8): XXH3 (Collet, 2019).

    Neither the format that it was read from nor the weights count, so that the same conversation falls on the same
    side of a split however it is stored and trained. The same for ever: a golden test holds it. No secret is in it:
    who wants two conversations with one digest can find them.
    """
    return int(xxh3_64_intdigest(said))


def usual_order(roles: Sequence[str]) -> bool:
    """System first, if at all; then user and assistant in turn, tools answering the assistant."""
    turns = [role for role in roles if role != "text"]
    if turns[:1] == ["system"]:
        turns = turns[1:]
    follows = {"user": ("assistant",), "assistant": ("user", "tool"), "tool": ("tool", "assistant")}
    return turns[:1] in ([], ["user"]) and all(b in follows.get(a, ()) for a, b in pairwise(turns))


# -- one reader a format --------------------------------------------------------------------------------------------


def _read_messages(record: dict[str, object]) -> Conversation:
    return Conversation(tuple(_messages(required(record, "messages"), "messages", _ROLES)), _tools(record))


def _read_sharegpt(record: dict[str, object]) -> Conversation:
    key = "conversation" if record.get("conversations") is None and "conversation" in record else "conversations"
    messages = _messages(required(record, key), key, _SHAREGPT_ROLES)
    system = optional_text(record, "system")
    if system and not (messages and messages[0].role == "system" and messages[0].content == system):
        messages.insert(0, Message("system", system))
    return Conversation(tuple(messages), _tools(record))


def _read_alpaca(record: dict[str, object]) -> Conversation:
    messages = _system(record)
    history = record.get("history")
    if history is not None and history != "":
        for index, pair in enumerate(list_of(history, "history")):
            where = f"history[{index}]"
            turns = list_of(pair, where)
            if len(turns) != 2:
                raise Reject("bad_type", f"{where}: expected [user, assistant], found a list of {len(turns)}")
            messages.append(Message("user", text_of(turns[0], f"{where}[0]")))
            messages.append(Message("assistant", text_of(turns[1], f"{where}[1]")))
    context = optional_text(record, "input") or optional_text(record, "context")
    messages.append(Message("user", required_text(record, "instruction"), context))
    answer = "response" if record.get("output") is None and record.get("response") is not None else "output"
    messages.append(Message("assistant", required_text(record, answer)))
    return Conversation(tuple(messages))


def _read_dolly(record: dict[str, object]) -> Conversation:
    messages = _system(record)
    instruction = required_text(record, "instruction")
    messages.append(Message("user", instruction, optional_text(record, "context")))
    messages.append(Message("assistant", required_text(record, "response")))
    return Conversation(tuple(messages))


def _read_oasst(record: dict[str, object]) -> Conversation:
    """The best-ranked path: at every node the reply of the lowest rank, unranked ones last, then the first.

    A loop and not a recursion: the depth of a tree is the data's choice.
    """
    messages: list[Message] = []
    path: list[str] = []
    node = required(record, "prompt")
    place = "prompt"
    try:
        while node is not None:
            if not isinstance(node, dict):
                raise Reject("bad_type", f"{place}: expected an object, found {kind(node)}")
            if node.get("deleted"):
                break
            path.append(place)
            raw_role = node.get("role")
            role = _OASST_ROLES.get(raw_role) if isinstance(raw_role, str) else None
            if role is None:
                _bad_role(raw_role, "role", _OASST_ROLES)
            messages.append(Message(role, required_text(node, "text")))
            node, place = _best_reply(node)
    except Reject as error:  # the place is put together here alone: at every node it would cost the square of the depth
        raise Reject(error.reason, ".".join((*path, error.message))) from None
    while messages and messages[-1].role == "user":
        messages.pop()
    if not messages:
        raise Reject("empty", "prompt: no reply of an assistant is left in the tree")
    return Conversation(tuple(messages))


def _best_reply(node: dict[str, object]) -> tuple[object, str]:
    """The reply that the path goes on with, and its place in `node`; None where there is none that is not deleted."""
    best: object = None
    place = ""
    best_order = (True, float("inf"))
    replies = node.get("replies")
    for index, reply in enumerate(() if replies is None else list_of(replies, "replies")):
        if not isinstance(reply, dict):
            raise Reject("bad_type", f"replies[{index}]: expected an object, found {kind(reply)}")
        rank = reply.get("rank")
        if rank is not None and (isinstance(rank, bool) or not isinstance(rank, (int, float))):
            raise Reject("bad_type", f"replies[{index}].rank: expected a number, found {kind(rank)}")
        order = (rank is None, 0.0 if rank is None else rank)
        if not reply.get("deleted") and order < best_order:
            best, place, best_order = reply, f"replies[{index}]", order
    return best, place


def _read_prompt_completion(record: dict[str, object]) -> Conversation:
    ask = "question" if record.get("prompt") is None and record.get("question") is not None else "prompt"
    answers = ("completion", "response") if ask == "prompt" else ("answer", "response")
    answer = next((key for key in answers if record.get(key) is not None), answers[0])
    prompt, completion = required(record, ask), required(record, answer)
    messages = _system(record)
    if isinstance(prompt, str) and isinstance(completion, str):
        messages += (Message("user", text_of(prompt, ask)), Message("assistant", text_of(completion, answer)))
    elif isinstance(prompt, list) and isinstance(completion, list):
        messages += _messages(prompt, ask, _ROLES)
        messages += _messages(completion, answer, _ROLES)
    else:
        found = f"found {kind(prompt)} and {kind(completion)}"
        raise Reject("bad_type", f"{ask} and {answer}: expected two strings or two lists of messages, {found}")
    return Conversation(tuple(messages), _tools(record))


def _read_text(record: dict[str, object]) -> Conversation:
    text = required_text(record, "text")
    return Conversation((Message("text", text),) if text else ())


_READERS = {
    "messages": _read_messages,
    "sharegpt": _read_sharegpt,
    "alpaca": _read_alpaca,
    "dolly": _read_dolly,
    "oasst": _read_oasst,
    "prompt_completion": _read_prompt_completion,
    "text": _read_text,
}


# -- messages and their fields --------------------------------------------------------------------------------------


def _messages(value: object, where: str, roles: Mapping[str, str]) -> list[Message]:
    """A list of {role, content, …} or {from, value, …}; `where` is its place in the record."""
    messages = []
    for index, item in enumerate(list_of(value, where)):
        if type(item) is not dict:
            raise Reject("bad_type", f"{where}[{index}]: expected an object, found {kind(item)}")
        if roles is _SHAREGPT_ROLES and item.get("from") is not None:
            role_key, content_key = "from", "value"
        else:
            role_key, content_key = "role", "content"
        raw_role = item.get(role_key)
        role = roles.get(raw_role) if type(raw_role) is str else None
        if role is None:
            if raw_role is None:
                missing(item, role_key, f"{where}[{index}]")
            _bad_role(raw_role, f"{where}[{index}].{role_key}", roles)
        content = item.get(content_key)
        if len(item) == 2 and type(content) is str and role != "function_call":  # nearly every message
            messages.append(Message(role, text_of(content, where, index, content_key)))
        else:
            messages.append(_message(item, role, content_key, f"{where}[{index}]"))
    return messages


def _message(item: dict[str, object], role: str, content_key: str, where: str) -> Message:
    """One message that has more than a role and a string."""
    tool_calls = _tool_calls(item, where)
    content = item.get(content_key)
    text = ""
    if content is not None:
        text = _content(content, f"{where}.{content_key}")
    elif not tool_calls:
        if content_key not in item:
            missing(item, content_key, where)
        raise Reject("bad_content", f"{where}.{content_key} is null; that is allowed only beside tool_calls")
    if role == "function_call":
        role = "assistant"
        calls = _sharegpt_calls(text)
        if calls:
            tool_calls, text = tool_calls + calls, ""
    if tool_calls and role != "assistant":
        raise Reject("bad_tool_call", f"{where}.tool_calls: only the assistant calls tools, not {role}")
    weight = item.get("weight")
    if weight is None:
        weight = 1
    elif isinstance(weight, bool) or not isinstance(weight, (int, float)) or weight not in (0, 1):
        found = repr(weight)[:40] if type(weight) in (int, float) else kind(weight)
        raise Reject("bad_weight", f"{where}.weight is {found}; expected 0 or 1")
    name, call_id = item.get("name"), item.get("tool_call_id")
    return Message(
        role,
        text,
        name=None if name is None else text_of(name, f"{where}.name"),
        tool_calls=tool_calls,
        tool_call_id=None if call_id is None else text_of(call_id, f"{where}.tool_call_id"),
        weight=int(weight),
    )


def _content(value: object, where: str) -> str:
    """A string, or a list of text parts, which are joined."""
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
    """`tool_calls`, and the older `function_call`."""
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
            # name and arguments without `function` around them are common in published data
            function = call if call.get("function") is None else call["function"]
            function_place = place if function is call else f"{place}.function"
            call_id = None if call_id is None else text_of(call_id, f"{place}.id")
            calls.append(_tool_call(function, function_place, call_id))
    value = item.get("function_call")
    if value is not None:
        calls.append(_tool_call(value, f"{where}.function_call", None))
    return tuple(calls)


def _tool_call(function: object, where: str, call_id: str | None) -> ToolCall:
    """{"name": …, "arguments": JSON text or object}. No arguments, or empty ones, are {}."""
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
    """The calls in the value of a function_call turn; none where it is not the JSON of a call or of a list of calls."""
    try:
        calls = parsed(value, "", "")
        return tuple(_tool_call(call, "", None) for call in (calls if isinstance(calls, list) else [calls]))
    except Reject:
        return ()


def _tools(record: dict[str, object]) -> tuple[str, ...]:
    """`tools`: a list of schemas, or the JSON text of such a list; each schema as JSON text."""
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
        tools.append(json_of(tool, where, "bad_tools"))
    return tuple(tools)


def _system(record: dict[str, object]) -> list[Message]:
    system = optional_text(record, "system")
    return [Message("system", system)] if system else []


def _bad_role(role: object, where: str, roles: Mapping[str, str]) -> NoReturn:
    if not isinstance(role, str):
        raise Reject("bad_role", f"{where}: expected a string, found {kind(role)}")
    near = get_close_matches(role.lower()[:100], roles, n=1)
    advice = f'did you mean "{near[0]}"?' if near else f"known are {', '.join(roles)}"
    raise Reject("bad_role", f"{where} {shown(role)} is not a role; {advice}")


def _rename(record: dict[str, object], columns: Mapping[str, str]) -> dict[str, object]:
    """The record under our names. A name that is mapped means the mapped key and no other."""
    taken = {*columns, *columns.values()}
    renamed = {key: value for key, value in record.items() if key not in taken}
    for ours, theirs in columns.items():
        if theirs in record:
            renamed[ours] = record[theirs]
    return renamed
