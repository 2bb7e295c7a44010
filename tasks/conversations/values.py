"""Check the values of a record, and read lists and objects in any form.

A wrong value raises Reject with its place in the record::

text_of({"from": 5}["from"], "conversations", 2, "from")
    → Reject("bad_type", "conversations[2].from: expected a string, found a number")

'[{"role": "user", "content": "2+2?"}]'      JSON text, in a table or in CSV
{"role": ["user"], "content": ["2+2?"]}      a struct of lists, as `datasets` writes Sequence({…})
    → [{"role": "user", "content": "2+2?"}]
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice
from math import isfinite
from typing import NoReturn

import orjson

from packcorpus.tasks.conversations.model import Message, Record, role_named
from packcorpus.tasks.core.errors import Reject
from packcorpus.tasks.core.printable import counted, kind, shown
from packcorpus.tasks.readers.strict_json import big_integer, duplicate_key, is_exact
from packcorpus.tasks.readers.tables import text_of_written

# Keys of a message, and their names in the `columns` of a source.
_IN_MESSAGES = {"role": "role", "from": "role", "content": "content", "value": "content"}

MOST_SHOWN = 12  # maximum number of keys that a message lists


def text_of(value: object, where: str, index: int = -1, key: str = "") -> str:
    """Return `value` if it is a string that can be encoded, or raise Reject.

    The place in the message is `where`, or `where[index].key`, which is joined only for an error.
    """
    if type(value) is str:
        if "\0" not in value:
            if value.isascii():
                return value
            try:
                value.encode()
                return value
            except UnicodeEncodeError as error:
                code, what, offset = "lone_surrogate", "a lone surrogate", error.start
        else:
            code, what, offset = "nul", "a NUL character", value.index("\0")
        problem = f" holds {what} at character {offset}"
    else:
        code, problem = "bad_type", f": expected a string, found {kind(value)}"
    raise Reject(code, (where if index < 0 else f"{where}[{index}].{key}") + problem)


def required(record: Record, key: str) -> object:
    value = record.get(key)
    if value is None:
        if key in record:
            raise Reject("missing_key", f"{key} is null")
        missing(record, key, "")
    return value


def required_text(record: Record, key: str) -> str:
    return text_of(required(record, key), key)


def optional_text(record: Record, key: str) -> str:
    value = record.get(key)
    return "" if value is None else text_of(value, key)


def system_of(record: Record) -> list[Message]:
    """Return a list with the system message of a record.

    The list is empty if the key `system` is absent or empty.
    """
    system = optional_text(record, "system")
    return [Message("system", system)] if system else []


def missing(record: Mapping[str, object], key: str, where: str) -> NoReturn:
    """Raise Reject for a key that is missing in the object at `where`."""
    keys = [shown(name)[1:-1] for name in islice(record, MOST_SHOWN)] + ["…"] * (len(record) > MOST_SHOWN)
    ours = _IN_MESSAGES.get(key) if where else None
    advice = f"; if one of them is the {ours}, map it with columns: {{{ours}: …}}" if ours and record else ""
    place = f"{where}.{key}" if where else key
    raise Reject("missing_key", f"{place} is missing; the keys found are: {', '.join(keys) or 'none'}{advice}")


# -- JSON -------------------------------------------------------------------------------------------------------------


def json_of(value: object, where: str, code: str) -> str:
    """Return `value` as compact JSON text, with its keys in their order."""
    try:
        # orjson writes a datetime as a string; here it is an error, like every value that JSON cannot represent
        text = orjson.dumps(value, text_of_written, orjson.OPT_PASSTHROUGH_DATETIME).decode()
    except orjson.JSONEncodeError as error:
        raise Reject(code, f"{where} cannot be written as JSON: {error}") from None
    open_values = [value] if "null" in text else []  # orjson writes NaN as null
    while open_values:
        item = open_values.pop()
        if isinstance(item, dict):
            open_values += item.values()
        elif isinstance(item, list):
            open_values += item
        elif isinstance(item, float) and not isfinite(item):
            raise Reject(code, f"{where} cannot be written as JSON: a number in it is NaN or infinite")
    return text


def parsed(text: str, where: str, code: str) -> object:
    """Return the value of a JSON text within a record."""
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise Reject(code, f"{where} is not JSON: {error.msg} at column {error.colno}") from None
    data = text.encode()
    if big := big_integer(data):
        raise Reject("big_integer", f"{where}: {big}")
    if not is_exact(data, value) and (twice := duplicate_key(data)):
        raise Reject("duplicate_key", f"{where}: {twice}")
    return value


# -- lists and objects ------------------------------------------------------------------------------------------------


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


def object_of(value: object, where: str, code: str = "bad_type") -> Record:
    """Return a value as an object, or raise Reject."""
    if type(value) is dict:
        return value
    value = _decoded(value, where, code)
    if isinstance(value, dict):
        return value
    raise Reject(code, f"{where}: expected an object, found {kind(value)}")


def found_list(value: object) -> list[object] | None:
    """Return a value as a list, or None if it is something else."""
    try:
        return list_of(value, "")
    except Reject:
        return None


def messages_in(text: object, roles: Mapping[str, str]) -> list[object] | None:
    """Return the messages in a value that may also be the text of one message.

    Returns None unless it is a JSON list or a struct of messages: objects with a known role, and content or calls.
    """
    if not is_struct_of_lists(text) and not (isinstance(text, str) and text.lstrip().startswith("[")):
        return None
    messages = found_list(text)
    are_messages = messages and all(
        isinstance(item, dict)
        and role_named(item.get("role"), roles) is not None
        and not (item.get("content") is None and item.get("tool_calls") is None)
        for item in messages
    )
    return messages if are_messages else None


def is_struct_of_lists(value: object) -> bool:
    """Return whether a value is an object with nothing but lists."""
    return isinstance(value, dict) and bool(value) and all(isinstance(item, list) for item in value.values())


def _decoded(value: object, where: str, code: str) -> object:
    """Return the value of a JSON text of a list or an object.

    Any other value is returned unchanged.
    """
    if isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):
        return parsed(text_of(value, where), where, code)
    return value


def _transposed(value: Record, where: str, code: str) -> object:
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
