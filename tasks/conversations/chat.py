"""Read a list of turns, with or without tools, for all formats that have one.

The objects in it are found with the keys that are read:

{"role": "user", "content": "2+2?", "id": 7}  ─objects_in_messages─▶ ("messages[]", {…}, {"role", "content", "name", …})
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from typing import NoReturn

from packcorpus.tasks.conversations.answers import ARGUMENTS, REASONING_KEYS, joined, reasoning_in, tool_calls_of
from packcorpus.tasks.conversations.model import DEVELOPER, ROLES, Message, Record, ToolCall, message_of, role_named
from packcorpus.tasks.conversations.names import CALL, CALL_ROLES, MESSAGE_KEYS, TURN_NAMES
from packcorpus.tasks.conversations.parts import (
    Content,
    answer_of,
    content_of_call,
    keys_of_item,
    kind_of_part,
    message_of_item,
    read_parts,
    text_and_parts,
)
from packcorpus.tasks.conversations.turn_weights import (
    LOSS,
    OF_MESSAGES,
    TRAINING_FLAGS,
    is_number,
    training_flag,
    weight_of,
)
from packcorpus.tasks.conversations.values import (
    found_list,
    is_struct_of_lists,
    list_of,
    missing,
    object_of,
    optional_text,
    text_of,
)
from packcorpus.tasks.core.errors import Reject
from packcorpus.tasks.core.printable import closest, kind, shown


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
            of_turn = _messages(item, role, role_key, content_key, f"{where}[{index}]")
            # A call may belong to the answer before it, but the call of ShareGPT is a turn, or one of several calls.
            may_follow = role == CALL and (role_before == CALL or str(raw_role).lower() != CALL_ROLES[0])
            follows = bool(messages) and (is_reasoning or role is None or may_follow)
            if follows and (one_message := joined(messages[-1], of_turn[0])):
                messages[-1:], of_turn = [one_message], of_turn[1:]
            messages += of_turn
            is_reasoning = role is None and item.get("type") == "reasoning"
        role_before = role or ""
    return messages


def _messages(item: Record, role: str | None, role_key: str, content_key: str, where: str) -> list[Message]:
    """Read a turn that has more than a role and a string.

    It is one message, or several if it has results of calls among its parts.
    """
    if role is None:
        if keys_of_item(item):
            return [message_of_item(item, where)]
        if role_key not in item:
            missing(item, role_key, where)
        if item[role_key] is None:
            raise Reject("missing_key", f"{where}.{role_key} is null")
        refuse_role(item[role_key], f"{where}.{role_key}", TURN_NAMES)
    calls, reasoning = tool_calls_of(item, where), reasoning_in(item, f"{where}.")
    value, place, speaker = item.get(content_key), f"{where}.{content_key}", "assistant" if role == CALL else role
    if type(value) is str and role != CALL:
        return [_message(item, role, where, text_of(value, where), reasoning, calls)]
    if value is None and calls:
        return [_message(item, speaker, where, "", reasoning, calls)]
    only_reasoning = f"{where} has reasoning, but no content; that is allowed only with tool_calls"
    if value is None:
        if reasoning:
            raise Reject("bad_content", only_reasoning)
        if content_key not in item:
            missing(item, content_key, where)
        if role == CALL:
            raise Reject("bad_tool_call", f"{place} is null, but the role says that this is a call")
        raise Reject("bad_content", f"{place} is null; that is allowed only with tool_calls")
    pieces: list[Content | Message]
    if role == CALL:
        pieces = [content_of_call(value, place)]
    elif isinstance(value, list) or is_struct_of_lists(value):
        pieces = read_parts(value, place)
    else:
        raise Reject("bad_content", f"{place}: expected a string, found {kind(value)}")
    if not calls and any(isinstance(p, Content) and p.reasoning and not (p.texts or p.calls) for p in pieces):
        raise Reject("bad_content", only_reasoning)
    messages = []
    for piece in pieces:
        if isinstance(piece, Message):
            if role not in ("user", "tool"):
                only = f"only user and tool messages may have results of calls, but the role is {role}"
                raise Reject("bad_content", f"{where}: {only}")
            said = _message(item, role, where, "", "", ())
            messages.append(replace(piece, train=said.train, loss_weight=said.loss_weight))
        elif len(pieces) == 1 or piece.texts or piece.calls or piece.reasoning:
            said = _message(item, speaker, where, piece.text, *answer_of(piece, where, reasoning, calls))
            said.parts = piece.parts
            if piece.has_values and said.train is None and said.role != "assistant" and said.loss_weight == 1:
                said.train = True  # a label of LLaMA-Factory
            messages.append(said)
    return messages


def _message(item: Record, role: str, where: str, content: str, reasoning: str, calls: tuple[ToolCall, ...]) -> Message:
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
        train=False if is_number(weight) and weight == 0 else train,
        reasoning=reasoning,
        loss_weight=weight,
        developer=role == DEVELOPER,
    )


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


# -- the keys that are read -------------------------------------------------------------------------------------------

Object = tuple[str, Record, Collection[str]]
"""The path of an object, such as messages[].tool_calls[]; the object; its used keys."""

_IN_MESSAGE = (*TRAINING_FLAGS, *REASONING_KEYS, "name", "tool_calls", "tool_call_id", "function_call")
_WEIGHTS = frozenset((LOSS, *OF_MESSAGES))
_FUNCTION = frozenset(("name", *ARGUMENTS))
_CALL = frozenset(("id", "type", "function"))
_CALL_WITHOUT_FUNCTION = _FUNCTION | {"id", "type"}


def objects_in_messages(
    value: object, where: str, columns: Mapping[str, str], sharegpt: bool = False
) -> Iterator[Object]:
    """Yield the messages of a list, and their content parts and tool calls.

    `where` is the path of a message. `columns` may map its keys; see `read_record`. A message that has only a role and
    a string is left out, which applies to nearly every message.
    """
    names = [columns.get(name, name) for name in _IN_MESSAGE] if columns else _IN_MESSAGE
    is_mapped = sharegpt and not columns.keys().isdisjoint(MESSAGE_KEYS)
    for item in value if type(value) is list else found_list(value) or ():
        if type(item) is str:
            try:
                item = object_of(item, "")
            except Reject:
                continue
        if type(item) is not dict:
            continue
        role, content = ("from", "value") if sharegpt and item.get("from") is not None else ("role", "content")
        if is_mapped and "content" not in item:
            content = "value"
        if columns:
            role, content = columns.get("role", role), columns.get("content", content)
        if len(item) == 2 and role in item and type(item.get(content)) is str:
            continue
        if role not in item and (keys := keys_of_item(item)):
            yield where, item, {*keys}
        else:
            used = {*names, role, content}
            if not _WEIGHTS.isdisjoint(item):
                used.update([LOSS] * isinstance(item.get(LOSS), bool))
                # Without `loss_weight: data`, only weights of 0 and 1 have a meaning.
                used.update(key for key in OF_MESSAGES if is_number(item.get(key)) and item[key] in (0, 1))
            yield where, item, used
        yield from _in_parts(item.get(content), f"{where}.{content}[]")
        calls = item.get("tool_calls")
        for call in (found_list(calls) or ()) if calls else ():
            if type(call) is dict:
                function = call.get("function")
                yield f"{where}.tool_calls[]", call, _CALL_WITHOUT_FUNCTION if function is None else _CALL
                if type(function) is dict:
                    yield f"{where}.tool_calls[].function", function, _FUNCTION
        function = item.get("function_call")
        if type(function) is dict:
            yield f"{where}.function_call", function, _FUNCTION


def _in_parts(parts: object, where: str) -> Iterator[Object]:
    for part in (found_list(parts) or ()) if type(parts) in (list, dict) else ():
        if type(part) is dict:
            part_kind, keys = kind_of_part(part)
            yield where, part, keys
            if part_kind == "result":
                yield from _in_parts(part.get("content"), f"{where}.content[]")
