"""Read a list or an object that is written as JSON text, or as a struct of lists.

'[{"role": "user", "content": "2+2?"}]'      JSON text, in a table or in CSV
{"role": ["user"], "content": ["2+2?"]}      a struct of lists, as `datasets` writes Sequence({…})
    → [{"role": "user", "content": "2+2?"}]
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from tasks.conversations.fields import parsed, text_of
from tasks.conversations.model import role_named
from tasks.core.errors import Reject
from tasks.core.printable import counted, kind

# Keys that hold a list of messages or the text of one message. The completion is a list only if the prompt is one.
_PROMPTS, _COMPLETIONS = ("prompt", "question"), ("completion", "answer", "response")

# Keys of a record that hold a list of messages in some format.
MESSAGE_LISTS = ("messages", "conversations", "conversation", *_PROMPTS, *_COMPLETIONS)


# The first characters of a JSON text of a list or an object.
MAY_OPEN = "[{ \t\r\n"


def list_of(value: object, where: str, code: str = "bad_type") -> list[object]:
    """Return a value as a list, or raise Reject."""
    if type(value) is list:
        return value
    value = _decoded(value, where, code)
    if isinstance(value, dict):
        value = _transposed(value, where, code)
    if isinstance(value, list):
        return value
    raise Reject(code, f"{where}: expected a list, found {kind(value)}")


def object_of(value: object, where: str, code: str = "bad_type") -> dict[str, object]:
    """Return a value as an object, or raise Reject."""
    if type(value) is dict:
        return value
    value = _decoded(value, where, code)
    if isinstance(value, dict):
        return value
    raise Reject(code, f"{where}: expected an object, found {kind(value)}")


def found_list(value: object) -> list[object] | None:
    """Return a value as a list, or None if it is something else."""
    if type(value) is list:
        return value
    try:
        return list_of(value, "")
    except Reject:
        return None


def found_object(value: object) -> dict[str, object] | None:
    """Return a value as an object, or None if it is something else."""
    try:
        return object_of(value, "")
    except Reject:
        return None


def messages_in(text: object, roles: Mapping[str, str]) -> list[object] | None:
    """Return the messages in a value that may also be the text of one message.

    Returns None unless it is a JSON list or a struct of messages: objects with a known role, and content or calls.
    """
    if not is_struct_of_lists(text) and not (isinstance(text, str) and text.lstrip().startswith("[")):
        return None
    found = found_list(text)
    return found if found and all(_is_message(item, roles) for item in found) else None


def with_lists(record: dict[str, object], keys: Collection[str], roles: Mapping[str, str]) -> dict[str, object]:
    """Return a record with its lists of messages as lists.

    `keys` may hold them. A value that is not a list in another form stays as it is. The given record is not changed.
    """
    found = {}
    for key in keys:
        value = record.get(key)
        kind_of = type(value)
        if kind_of is dict or kind_of is str:
            # A text under some of these keys is a message and not a list, so it must look like one.
            turns = messages_in(value, roles) if key in (*_PROMPTS, *_COMPLETIONS) else found_list(value)
            if turns is not None:
                found[key] = turns
    return {**record, **found} if found else record


def may_need_lists(records: Iterable[dict[str, object]], keys: Collection[str]) -> bool:
    """Return whether `with_lists` may change one of the records."""
    for key in keys:
        if key in _COMPLETIONS:
            continue
        for record in records:
            value = record.get(key)
            if type(value) is str:
                if value[:1] in MAY_OPEN and value.lstrip()[:1] in ("[", "{"):
                    return True
            elif type(value) is dict:
                return True
    return False


def is_struct_of_lists(value: object) -> bool:
    """Return whether a value is an object with nothing but lists."""
    return isinstance(value, dict) and bool(value) and all(isinstance(item, list) for item in value.values())


def _is_message(item: object, roles: Mapping[str, str]) -> bool:
    return (
        isinstance(item, dict)
        and role_named(item.get("role"), roles) is not None
        and not (item.get("content") is None and item.get("tool_calls") is None)
    )


def _decoded(value: object, where: str, code: str) -> object:
    """Return the value of a JSON text of a list or an object.

    Any other value is returned unchanged.
    """
    if isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):
        return parsed(text_of(value, where), where, code)
    return value


def _transposed(value: dict[str, object], where: str, code: str) -> object:
    """Return a struct of lists as a list of objects, without nulls.

    Any other object is returned unchanged.
    """
    columns = {key: column for key, column in value.items() if column is not None}
    lists = [column for column in columns.values() if isinstance(column, list)]
    if not lists or len(lists) < len(columns):
        return value
    if len({*map(len, lists)}) > 1:
        lengths = ", ".join(f"{key} {counted(len(column), 'item')}" for key, column in zip(columns, lists, strict=True))
        raise Reject(code, f"{where}: expected a list, found an object whose lists have different lengths: {lengths}")
    rows = (zip(columns, row, strict=True) for row in zip(*lists, strict=True))
    return [{key: item for key, item in row if item is not None} for row in rows]
