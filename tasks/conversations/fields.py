"""Check single values of a record.

A wrong value raises Reject with its place in the record::

text_of({"from": 5}["from"], "conversations", 2, "from")
    → Reject("bad_type", "conversations[2].from: expected a string, found a number")
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import isfinite
from typing import NoReturn

import orjson

from tasks.conversations.model import Message
from tasks.core.errors import Reject
from tasks.core.printable import kind, shown
from tasks.readers.strict_json import big_integer, duplicate_key, is_exact
from tasks.readers.tables import text_of_written

# Keys of a message, and their names in the `columns` of a source.
_IN_MESSAGES = {"role": "role", "from": "role", "content": "content", "value": "content"}

# orjson writes a datetime as a string; here it is an error, like every value that JSON cannot represent
_STRICT = orjson.OPT_PASSTHROUGH_DATETIME


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
                code, found, offset = "lone_surrogate", "a lone surrogate", error.start
        else:
            code, found, offset = "nul", "a NUL character", value.index("\0")
        raise Reject(code, f"{_place(where, index, key)} holds {found} at character {offset}")
    raise Reject("bad_type", f"{_place(where, index, key)}: expected a string, found {kind(value)}")


def _place(where: str, index: int, key: str) -> str:
    return where if index < 0 else f"{where}[{index}].{key}"


def required(record: dict[str, object], key: str) -> object:
    value = record.get(key)
    if value is None:
        if key in record:
            raise Reject("missing_key", f"{key} is null")
        missing(record, key, "")
    return value


def required_text(record: dict[str, object], key: str) -> str:
    return text_of(required(record, key), key)


def optional_text(record: dict[str, object], key: str) -> str:
    value = record.get(key)
    return "" if value is None else text_of(value, key)


def system_of(record: dict[str, object]) -> list[Message]:
    """Return a list with the system message of a record.

    The list is empty if the key `system` is absent or empty.
    """
    system = optional_text(record, "system")
    return [Message("system", system)] if system else []


def json_of(value: object, where: str, code: str) -> str:
    """Return `value` as compact JSON text, with its keys in their order."""
    try:
        text = orjson.dumps(value, text_of_written, _STRICT).decode()
    except orjson.JSONEncodeError as error:
        raise Reject(code, f"{where} cannot be written as JSON: {error}") from None
    if "null" in text and _has_nan(value):
        raise Reject(code, f"{where} cannot be written as JSON: a number in it is NaN or infinite")
    return text


def _has_nan(value: object) -> bool:
    """Return whether a value holds NaN or an infinite number.

    orjson writes it as null.
    """
    left = [value]
    while left:
        item = left.pop()
        if isinstance(item, dict):
            left += item.values()
        elif isinstance(item, list):
            left += item
        elif isinstance(item, float) and not isfinite(item):
            return True
    return False


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


def missing(record: Mapping[str, object], key: str, where: str) -> NoReturn:
    found = ", ".join(_some_keys(record)) or "none"
    ours = _IN_MESSAGES.get(key) if where else None
    advice = f"; if one of them is the {ours}, map it with columns: {{{ours}: …}}" if ours and record else ""
    raise Reject("missing_key", f"{where}{'.' if where else ''}{key} is missing; the keys found are: {found}{advice}")


def _some_keys(record: Mapping[str, object]) -> Iterator[str]:
    for index, key in enumerate(record):
        if index == 12:
            yield "…"
            return
        yield shown(key)[1:-1]
