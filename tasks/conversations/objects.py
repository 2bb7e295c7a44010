"""Find the objects within a record that a format reads, with their used keys.

{"messages": [{"role": "user", "content": "2+2?", "id": 7}]}
    → ("messages[]", {"role": "user", "content": "2+2?", "id": 7}, {"role", "content", "name", "tool_calls", …})
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from tasks.conversations.calls import ARGUMENTS
from tasks.conversations.lists import found_list, found_object
from tasks.conversations.model import Record
from tasks.conversations.names import MESSAGE_KEYS
from tasks.conversations.parts import RESULT_PARTS, is_item, keys_of_item, keys_of_part
from tasks.conversations.reasoning import REASONING_KEYS
from tasks.conversations.turn_weights import LOSS, OF_MESSAGES, TRAINING_FLAGS, is_number

Object = tuple[str, dict[str, object], Collection[str]]
"""The path of an object, such as messages[].tool_calls[]; the object; its used keys."""

_OF_MESSAGES = (*TRAINING_FLAGS, *REASONING_KEYS, "name", "tool_calls", "tool_call_id", "function_call")

# Keys that have a meaning only with some values.
_BY_VALUE = frozenset((LOSS, *OF_MESSAGES))

_FUNCTION = frozenset(("name", *ARGUMENTS))
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
        if type(item) is str:
            item = found_object(item)
        if type(item) is dict:
            role, content = _keys_of(item, columns, sharegpt)
            if len(item) != 2 or role not in item or type(item.get(content)) is not str:
                names = (columns.get(name, name) for name in _OF_MESSAGES) if columns else _OF_MESSAGES
                used = {*names, role, content}
                if role not in item and is_item(item):
                    used = {*keys_of_item(item)}
                elif not _BY_VALUE.isdisjoint(item):
                    used.update(_used_by_value(item))
                yield from _in_message(item, where, used, content)


def _keys_of(item: dict[str, object], columns: Mapping[str, str], sharegpt: bool) -> tuple[str, str]:
    """Return the keys that hold the role and the content of a message.

    `columns` may map both keys; see `read_record`.
    """
    role, content = ("from", "value") if sharegpt and item.get("from") is not None else ("role", "content")
    if sharegpt and not columns.keys().isdisjoint(MESSAGE_KEYS) and "content" not in item:
        content = "value"
    return columns.get("role", role), columns.get("content", content)


def _used_by_value(item: Mapping[str, object]) -> Iterator[str]:
    """Yield the keys of a message that have a meaning only with some values."""
    if isinstance(item.get(LOSS), bool):
        yield LOSS
    for key in OF_MESSAGES:  # without `loss_weight: data`, only 0 and 1 have a meaning
        if is_number(item.get(key)) and item[key] in (0, 1):
            yield key


def _in_message(item: dict[str, object], where: str, used: Collection[str], content: str) -> Iterator[Object]:
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
            yield where, part, keys_of_part(part)
            if part.get("type") in RESULT_PARTS:
                yield from _in_parts(part.get("content"), f"{where}.content[]")


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
