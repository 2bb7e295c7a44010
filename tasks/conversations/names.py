"""Rename keys and roles in a record, and use the names of the file in errors.

{"dialog": [{"speaker": "Agent", "text": "Hi"}]}  ─rename…─▶  {"messages": [{"role": "assistant", "content": "Hi"}]}
messages[0].role is null                          ─in_own_names─▶  dialog[0].speaker is null

The setting `roles` has the names of each role in the data: {"user": "customer", "assistant": ["agent", "bot"]}.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, BeforeValidator, Field, TypeAdapter, ValidationError

from packcorpus.tasks.conversations.model import OPENAI_ROLES, Record, role_named
from packcorpus.tasks.conversations.values import found_list, messages_in
from packcorpus.tasks.core.printable import shown

# Names of the roles in published data, in lower case, each with its role in OpenAI's form. A source's `roles` adds
# further names.
ROLE_NAMES = {
    **{role: role for role in OPENAI_ROLES},
    **dict.fromkeys(("human", "prompter"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "bing", "bard", "model", "bot", "chatbot", "ai"), "assistant"),
    **dict.fromkeys(("function", "observation", "function_response", "tool_response", "ipython"), "tool"),
}

# Names of a turn that is a call of the assistant, in lower case, and its role.
CALL_ROLES, CALL = ("function_call", "tool_call", "tool_calls"), "call"

TURN_NAMES = {**ROLE_NAMES, **dict.fromkeys(CALL_ROLES, CALL)}

# The names that `columns` may give to keys of a message.
MESSAGE_KEYS: tuple[str, ...] = ("role", "content", "reasoning", "train", "loss_weight")

# Keys of a record that hold a list of messages, or for those of two sides perhaps the text of one message.
_SIDES = ("prompt", "question", "completion", "answer", "response", "chosen", "rejected")
_MESSAGE_LISTS = ("messages", "conversations", "conversation", *_SIDES)
_ANSWERS = "completions"  # a list of texts or of lists of messages


def is_of_record(name: str) -> bool:
    """Return whether a name in `columns` is the name of a key of a record."""
    return name not in MESSAGE_KEYS or name in ("reasoning", "loss_weight")


def rename(record: Record, columns: Mapping[str, str]) -> Record:
    """Return the record with packcorpus names of its keys.

    The keys of its messages keep their names.
    """
    if not columns:
        return record
    return _renamed(record, {ours: theirs for ours, theirs in columns.items() if is_of_record(ours)})


def rename_messages(record: Record, format: str, columns: Mapping[str, str], roles: Mapping[str, str]) -> Record:
    """Return the record with packcorpus names of keys and roles in its messages.

    Lists of messages in another form become lists. The given record is not changed.
    """
    keys = {ours: theirs for ours, theirs in columns.items() if ours in MESSAGE_KEYS}
    renamed = dict(record)

    def renamed_in(value: object, is_side: bool) -> object:
        if isinstance(value, (str, dict)):
            value = messages_in(value, {**TURN_NAMES, **roles}) if is_side else found_list(value)
        if isinstance(value, list) and (keys or roles) and format != "oasst":
            return [_rename_message(item, format, keys, roles) if type(item) is dict else item for item in value]
        return value

    for key in _MESSAGE_LISTS:
        if (value := renamed_in(record.get(key), key in _SIDES)) is not None:
            renamed[key] = value
    if format == _ANSWERS and (answers := found_list(record.get(_ANSWERS))):
        renamed[_ANSWERS] = [renamed_in(answer, is_side=True) or answer for answer in answers]
    if format == "oasst" and "prompt" in renamed and (keys or roles):
        renamed["prompt"] = _rename_tree(renamed["prompt"], keys, roles)
    return renamed


def _rename_tree(root: object, keys: Mapping[str, str], roles: Mapping[str, str]) -> object:
    """Rename keys and roles in every node of a tree.

    This is a loop and not a recursion, because the data decides how deep the tree is.
    """
    keys = {"text" if ours == "content" else ours: theirs for ours, theirs in keys.items()}
    top: list[object] = [root]
    open_lists = [top]
    while open_lists:
        nodes = open_lists.pop()
        for index, node in enumerate(nodes):
            if type(node) is dict:
                nodes[index] = item = _with_role(_renamed(node, keys), "role", roles)
                replies = item.get("replies")
                if type(replies) is list:
                    item["replies"] = replies = list(replies)
                    open_lists.append(replies)
    return top[0]


def _rename_message(item: Record, format: str, keys: Mapping[str, str], roles: Mapping[str, str]) -> Record:
    by_from = format == "sharegpt" and item.get("from") is not None
    if not keys:
        return _with_role(item, "from" if by_from else "role", roles)
    # ShareGPT has two keys; `columns` may map one of them while the other keeps its name.
    others = {"role": "from", "content": "value"} if by_from else {}
    if format == "sharegpt" and "content" not in item:
        others["content"] = "value"
    item = _renamed(item, {**others, **keys})
    if by_from:
        item.pop("from", None)
    return _with_role(item, "role", roles)


def _with_role(item: Record, key: str, roles: Mapping[str, str]) -> Record:
    role = role_named(item.get(key), roles) if roles else None
    return {**item, key: role} if role else item


def _renamed(values: Record, keys: Mapping[str, str]) -> Record:
    """Return an object with packcorpus names of its keys.

    If a name is mapped, only the mapped key has this meaning.
    """
    taken = {*keys, *keys.values()}
    renamed = {key: value for key, value in values.items() if key not in taken}
    return renamed | {ours: values[theirs] for ours, theirs in keys.items() if theirs in values}


def in_own_names(message: str, columns: Mapping[str, str]) -> str:
    """Return the message of a Reject with the names that the file uses.

    The place and the keys that were found are renamed.
    """
    place = re.match(r"[A-Za-z_]+(?:\[\d+\])*(?:\.[A-Za-z_]+|\.replies\[\d+\])*", message)
    if place is None:
        return message
    first, *inner = re.split(r"(?=[.\[])", place[0])
    keys = {ours: theirs for ours, theirs in columns.items() if ours in MESSAGE_KEYS}
    same = {"from": "role", "value": "content", "text": "content"}  # other names that formats use for these keys
    keys |= {name: keys[ours] for name, ours in same.items() if ours in keys}
    names = [columns.get(first, first)]
    names += ["." + keys.get(part[1:], part[1:]) if part[0] == "." else part for part in inner]
    if not inner:
        keys = {ours: theirs for ours, theirs in columns.items() if ours not in MESSAGE_KEYS}
    head, found, tail = message[place.end() :].partition("the keys found are: ")
    listed, semicolon, advice = tail.partition(";")
    listed = ", ".join(keys.get(key, key) for key in listed.split(", "))
    return "".join(names) + head + found + listed + semicolon + advice


# -- the setting `roles` ----------------------------------------------------------------------------------------------

Role = Literal["system", "user", "assistant", "tool"]


def _refuse_swapped(roles: Any) -> Any:
    """Refuse {name: role}, the form that some tools write."""
    if isinstance(roles, dict):
        for name, role in roles.items():
            if name not in get_args(Role) and isinstance(role, str) and role in get_args(Role):
                raise ValueError(
                    f"{shown(name)} is not a role; roles go on the left, and their names in the data on the right: "
                    f"roles: {{{role}: [{name}]}}"
                )
    return roles


def _refuse_twice(roles: dict[Role, list[str]]) -> dict[Role, list[str]]:
    """Refuse a name that two roles have."""
    seen: dict[str, str] = {}
    for role, names in roles.items():
        for name in names:
            if seen.setdefault(name.lower(), role) != role:
                raise ValueError(f"{shown(name)} is a name of {seen[name.lower()]} and of {role}; case is ignored")
    return roles


Name = Annotated[str, Field(min_length=1)]
_OneOrMore = BeforeValidator(lambda names: [names] if isinstance(names, str) else names, Name | list[Name])
Names = Annotated[list[Name], _OneOrMore]
Roles = Annotated[dict[Role, Names], BeforeValidator(_refuse_swapped), AfterValidator(_refuse_twice)]


@cache
def _roles() -> TypeAdapter[dict[Role, list[str]]]:
    return TypeAdapter(Roles)


def with_roles(source: Any, roles: Any) -> Any:
    """Return an entry of `sources` with the roles of the config.

    The entry's own names come first. Invalid values are left unchanged, because the checks of their settings report
    them.
    """
    if not isinstance(source, Mapping):
        return source
    try:
        own, further = _roles().validate_python(source.get("roles", {})), _roles().validate_python(roles)
    except ValidationError:
        return source
    taken = {name.lower() for names in own.values() for name in names}
    for role, names in further.items():
        own[role] = own.get(role, []) + [name for name in names if name.lower() not in taken]
    return {**source, "roles": {role: names for role, names in own.items() if names}}
