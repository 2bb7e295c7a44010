"""Rename keys and roles in a record, and use the names of the file in messages.

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

from tasks.conversations.lists import MESSAGE_LISTS
from tasks.conversations.model import role_named
from tasks.core.printable import shown

# The names that `columns` may give to keys of a message.
MESSAGE_KEYS: tuple[str, ...] = ("role", "content", "reasoning", "train", "loss_weight")

# The names of MESSAGE_KEYS that a record may have, too.
OF_BOTH: tuple[str, ...] = ("reasoning", "loss_weight")

# Other names that formats use for these keys.
_SAME = {"from": "role", "value": "content", "text": "content"}


def rename(record: dict[str, object], columns: Mapping[str, str]) -> dict[str, object]:
    """Return the record with packcorpus names of its keys.

    The keys of its messages keep their names.
    """
    return _renamed(record, {ours: theirs for ours, theirs in columns.items() if is_of_record(ours)})


def is_of_record(name: str) -> bool:
    """Return whether a name in `columns` is the name of a key of a record."""
    return name not in MESSAGE_KEYS or name in OF_BOTH


def rename_messages(
    record: dict[str, object], format: str, columns: Mapping[str, str], roles: Mapping[str, str]
) -> dict[str, object]:
    """Return the record with packcorpus names of keys and roles in its messages."""
    keys = {ours: theirs for ours, theirs in columns.items() if ours in MESSAGE_KEYS}
    if not keys and not roles:
        return record
    if format == "oasst":
        return {key: _rename_tree(value, keys, roles) if key == "prompt" else value for key, value in record.items()}
    return {
        key: [_rename_message(item, format, keys, roles) if type(item) is dict else item for item in value]
        if key in MESSAGE_LISTS and isinstance(value, list)
        else value
        for key, value in record.items()
    }


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


def _rename_message(
    item: dict[str, object], format: str, keys: Mapping[str, str], roles: Mapping[str, str]
) -> dict[str, object]:
    by_from = format == "sharegpt" and item.get("from") is not None
    if keys:
        # ShareGPT has two keys; `columns` may map one of them while the other keeps its name.
        others = {"role": "from", "content": "value"} if by_from else {}
        if format == "sharegpt" and "content" not in item:
            others["content"] = "value"
        item = _renamed(item, {**others, **keys})
        if by_from:
            item.pop("from", None)
    return _with_role(item, "from" if by_from and not keys else "role", roles)


def _with_role(item: dict[str, object], key: str, roles: Mapping[str, str]) -> dict[str, object]:
    role = role_named(item.get(key), roles) if roles else None
    return {**item, key: role} if role else item


def _renamed(values: dict[str, object], keys: Mapping[str, str]) -> dict[str, object]:
    """Return an object with packcorpus names of its keys.

    If a name is mapped, only the mapped key has this meaning.
    """
    taken = {*keys, *keys.values()}
    renamed = {key: value for key, value in values.items() if key not in taken}
    for ours, theirs in keys.items():
        if theirs in values:
            renamed[ours] = values[theirs]
    return renamed


def in_own_names(message: str, columns: Mapping[str, str]) -> str:
    """Return the message of a Reject with the names that the file uses.

    The place and the keys that were found are renamed.
    """
    place = re.match(r"[A-Za-z_]+(?:\[\d+\])?(?:\.[A-Za-z_]+|\.replies\[\d+\])*", message)
    if place is None:
        return message
    first, *inner = re.split(r"(?=[.\[])", place[0])
    keys = {ours: theirs for ours, theirs in columns.items() if ours in MESSAGE_KEYS}
    keys |= {same: keys[ours] for same, ours in _SAME.items() if ours in keys}
    names = [columns.get(first, first)]
    names += ["." + keys.get(part[1:], part[1:]) if part[0] == "." else part for part in inner]
    if not inner:
        keys = {ours: theirs for ours, theirs in columns.items() if ours not in MESSAGE_KEYS}
    head, found, tail = message[place.end() :].partition("the keys found are: ")
    listed, semicolon, advice = tail.partition(";")
    listed = ", ".join(keys.get(key, key) for key in listed.split(", "))
    return "".join(names) + head + found + listed + semicolon + advice


Role = Literal["system", "user", "assistant", "tool"]


def _as_list(names: Any) -> Any:
    return [names] if isinstance(names, str) else names


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
Names = Annotated[list[Name], BeforeValidator(_as_list, json_schema_input_type=Name | list[Name])]
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
