"""Read a list of turns, with or without tools, for all formats that have one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import NoReturn, Protocol

from tasks.conversations.calls import CALL_ROLES, joined, may_follow, tool_calls_of
from tasks.conversations.fields import missing, optional_text, text_of
from tasks.conversations.lists import is_struct_of_lists, list_of, object_of
from tasks.conversations.model import DEVELOPER, ROLES, Message, Record, ToolCall, message_of, role_named
from tasks.conversations.openai import OPENAI_ROLES
from tasks.conversations.parts import (
    Content,
    answer_of,
    content_of_call,
    is_item,
    is_reasoning_item,
    message_of_item,
    read_parts,
    text_and_parts,
)
from tasks.conversations.reasoning import reasoning_in
from tasks.conversations.turn_weights import is_zero, training_flag, weight_of
from tasks.core.errors import Reject
from tasks.core.printable import closest, kind, shown

# Names of the roles in published data, in lower case, each with its role in OpenAI's form. A source's `roles` adds
# further names.
ROLE_NAMES = {
    **{role: role for role in OPENAI_ROLES},
    **dict.fromkeys(("human", "prompter"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "bing", "bard", "model", "bot", "chatbot", "ai"), "assistant"),
    **dict.fromkeys(("function", "observation", "function_response", "tool_response", "ipython"), "tool"),
}

# The role of a turn that is a call of the assistant.
CALL = "call"

TURN_NAMES = {**ROLE_NAMES, **dict.fromkeys(CALL_ROLES, CALL)}


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
    is_list = isinstance(value, (list, dict))
    system, parts = text_and_parts(value, "system") if is_list else (optional_text(record, "system"), ())
    if system and not (messages and messages[0].role == "system" and messages[0].content == system):
        return Message("system", system, parts=parts), *messages
    return tuple(messages)


def messages_of(value: object, where: str, sharegpt: bool = False) -> list[Message]:
    """Read a list of {role, content, …} or, with `sharegpt`, of {from, value, …}.

    `where` is the place of the list in the record.
    """
    messages: list[Message] = []
    role_before, is_reasoning = "", False  # of the turn before
    for index, item in enumerate(list_of(value, where)):
        if type(item) is not dict:
            item = object_of(item, f"{where}[{index}]")
        if sharegpt and item.get("from") is not None:
            role_key, content_key = "from", "value"
        else:
            role_key, content_key = "role", "content"
        raw_role = item.get(role_key)
        role = role_named(raw_role, TURN_NAMES)
        content = item.get(content_key)
        if len(item) == 2 and type(content) is str and role in ROLES and not is_reasoning:  # nearly every message
            messages.append(Message(role, text_of(content, where, index, content_key)))
        else:
            found = _messages(item, role, role_key, content_key, f"{where}[{index}]")
            follows = is_reasoning or role is None or (role == CALL and may_follow(raw_role, role_before == CALL))
            if follows and messages and (one := joined(messages[-1], found[0])):
                messages[-1:], found = [one], found[1:]
            messages += found
            is_reasoning = role is None and is_reasoning_item(item)
        role_before = role or ""
    return messages


def _messages(item: dict[str, object], role: str | None, role_key: str, content_key: str, where: str) -> list[Message]:
    """Read a turn that has more than a role and a string.

    It is one message, or several if it has results of calls among its parts.
    """
    if role is None:
        if is_item(item):
            return [message_of_item(item, where)]
        raw_role = item.get(role_key)
        if raw_role is None and role_key in item:
            raise Reject("missing_key", f"{where}.{role_key} is null")
        if raw_role is None:
            missing(item, role_key, where)
        refuse_role(raw_role, f"{where}.{role_key}", TURN_NAMES)
    calls, reasoning = tool_calls_of(item, where), reasoning_in(item, f"{where}.")
    value = item.get(content_key)
    if type(value) is str and role != CALL:
        return [_message(item, role, where, text_of(value, where, -1, content_key), reasoning, calls)]
    if value is None and calls:
        return [_message(item, "assistant" if role == CALL else role, where, "", reasoning, calls)]
    found = []
    pieces = _pieces(item, role, content_key, where, bool(calls), bool(reasoning))
    for piece in pieces:
        if isinstance(piece, Message):
            found.append(_result(item, role, where, piece))
        elif len(pieces) == 1 or piece.texts or piece.calls or piece.reasoning:
            thought, called = answer_of(piece, where, reasoning, calls)
            said = _message(item, "assistant" if role == CALL else role, where, piece.text, thought, called)
            said.parts = piece.parts
            if piece.has_values and said.train is None and said.role != "assistant" and said.loss_weight == 1:
                said.train = True  # a label of LLaMA-Factory
            found.append(said)
    return found


def _message(
    item: dict[str, object], role: str, where: str, content: str, reasoning: str, calls: tuple[ToolCall, ...]
) -> Message:
    """Return a message with the flags and the other keys of its turn."""
    if role != "assistant":
        if calls:
            only = f"only assistant messages may have tool calls, but the role is {role}"
            raise Reject("bad_tool_call", f"{where}.tool_calls: {only}")
        if reasoning:
            only = f"only assistant messages may have reasoning, but the role is {role}"
            raise Reject("bad_content", f"{where}: {only}")
    name, call_id = item.get("name"), item.get("tool_call_id")
    weight, train = weight_of(item, where), training_flag(item, where)
    return Message(
        "system" if role == DEVELOPER else role,
        content,
        name=None if name is None else text_of(name, f"{where}.name"),
        tool_calls=calls,
        tool_call_id=None if call_id is None else text_of(call_id, f"{where}.tool_call_id"),
        train=False if is_zero(weight) else train,
        reasoning=reasoning,
        loss_weight=weight,
        developer=role == DEVELOPER,
    )


def _result(item: dict[str, object], role: str, where: str, result: Message) -> Message:
    """Return a result among the parts of a turn, with the flags of the turn."""
    if role not in ("user", "tool"):
        only = f"only user and tool messages may have results of calls, but the role is {role}"
        raise Reject("bad_content", f"{where}: {only}")
    said = _message(item, role, where, "", "", ())
    return replace(result, train=said.train, loss_weight=said.loss_weight)


def _pieces(
    item: dict[str, object], role: str, content_key: str, where: str, has_calls: bool, has_reasoning: bool
) -> list[Content | Message]:
    """Read a content that is not a string, or that holds calls."""
    value, place = item.get(content_key), f"{where}.{content_key}"
    only_reasoning = f"{where} has reasoning, but no content; that is allowed only with tool_calls"
    if value is None:
        if has_reasoning:
            raise Reject("bad_content", only_reasoning)
        if content_key not in item:
            missing(item, content_key, where)
        if role == CALL:
            raise Reject("bad_tool_call", f"{place} is null, but the role says that this is a call")
        raise Reject("bad_content", f"{place} is null; that is allowed only with tool_calls")
    if role == CALL:
        return [content_of_call(value, place)]
    if not isinstance(value, list) and not is_struct_of_lists(value):
        raise Reject("bad_content", f"{place}: expected a string, found {kind(value)}")
    pieces = read_parts(value, place)
    for piece in pieces:
        if isinstance(piece, Content) and piece.reasoning and not (piece.texts or piece.calls or has_calls):
            raise Reject("bad_content", only_reasoning)
    return pieces


def refuse_role(role: object, where: str, roles: Mapping[str, str]) -> NoReturn:
    """Raise Reject with a message that shows how to map this name with `roles`."""
    if not isinstance(role, str):
        raise Reject("bad_role", f"{where}: expected a string, found {kind(role)}")
    near = closest(role, roles)
    name = role if role.isidentifier() and len(role) <= 60 else shown(role)
    meant = message_of(roles[near[0]], "").role if near else "user"
    example = f"roles: {{{meant if meant in ROLES else 'user'}: [{name}]}}"
    known = "; map it to system, user, assistant, or tool, such as"
    advice = f"; did you mean {near[0]}? Or map it with {example}" if near else f"{known} {example}"
    raise Reject("bad_role", f"{where} {shown(role)} is not a role{advice}")
