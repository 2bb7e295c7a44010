"""Find the objects within a record that a format reads, with their used keys.

{"messages": [{"role": "user", "content": "2+2?", "id": 7}]}
    → ("messages[]", {"role": "user", "content": "2+2?", "id": 7}, {"role", "content", "name", "tool_calls", …})
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from tasks.conversations.chat import REASONING_KEYS
from tasks.conversations.keys.renaming import MESSAGE_KEYS
from tasks.conversations.keys.training_flags import TRAINING_FLAGS
from tasks.conversations.model import Record

Object = tuple[str, dict[str, object], Collection[str]]
"""The path of an object, such as messages[].tool_calls[]; the object; its used keys."""

_OF_MESSAGES = (*TRAINING_FLAGS, *REASONING_KEYS, "name", "tool_calls", "tool_call_id", "function_call")

PART = frozenset(("type", "text"))

_FUNCTION = frozenset(("name", "arguments"))
_CALL = frozenset(("id", "type", "function"))
_CALL_WITHOUT_FUNCTION = _FUNCTION | {"id", "type"}


def objects_in_messages(
    record: Record, key: str, columns: Mapping[str, str], sharegpt: bool = False
) -> Iterator[Object]:
    """Yield the messages under `key`, and their content parts and tool calls.

    A message that has only a role and a string is left out, which applies to nearly every message.
    """
    messages = record.get(key)
    if type(messages) is not list:
        return
    where = f"{columns.get(key, key)}[]"
    for item in messages:
        if type(item) is dict:
            role, content = _keys_of(item, columns, sharegpt)
            if len(item) != 2 or role not in item or type(item.get(content)) is not str:
                names = (columns.get(name, name) for name in _OF_MESSAGES) if columns else _OF_MESSAGES
                yield from _in_message(item, where, {*names, role, content}, content)


def _keys_of(item: dict[str, object], columns: Mapping[str, str], sharegpt: bool) -> tuple[str, str]:
    """Return the keys that hold the role and the content of a message.

    `columns` may map both keys; see `read_record`.
    """
    role, content = ("from", "value") if sharegpt and item.get("from") is not None else ("role", "content")
    if sharegpt and not columns.keys().isdisjoint(MESSAGE_KEYS) and "content" not in item:
        content = "value"
    return columns.get("role", role), columns.get("content", content)


def _in_message(item: dict[str, object], where: str, used: Collection[str], content: str) -> Iterator[Object]:
    yield where, item, used
    parts = item.get(content)
    for part in parts if type(parts) is list else ():
        if type(part) is dict:
            yield f"{where}.{content}[]", part, PART
    calls = item.get("tool_calls")
    for call in calls if type(calls) is list else ():
        if type(call) is dict:
            function = call.get("function")
            yield f"{where}.tool_calls[]", call, _CALL_WITHOUT_FUNCTION if function is None else _CALL
            if type(function) is dict:
                yield f"{where}.tool_calls[].function", function, _FUNCTION
    function = item.get("function_call")
    if type(function) is dict:
        yield f"{where}.function_call", function, _FUNCTION


def objects_in_tree(
    record: Record, key: str, columns: Mapping[str, str], used: Collection[str], replies: str
) -> Iterator[Object]:
    """Yield the nodes of the tree under `key`.

    All nodes below the root have the same path. This is a loop and not a recursion, because the data decides how deep
    the tree is.
    """
    root, where = record.get(key), columns.get(key, key)
    mapped = {"role": columns.get("role", "role"), "text": columns.get("content", "text")}
    used = {mapped.get(name, name) for name in used}
    open_nodes = [root] if type(root) is dict else []
    while open_nodes:
        node = open_nodes.pop()
        yield where if node is root else f"{where}.{replies}[]", node, used
        below = node.get(replies)
        open_nodes += [reply for reply in below if type(reply) is dict] if type(below) is list else []
