"""One value of a record → the value, checked, or `Reject` with its place in the record.

A value that is wrong comes out as an error that names its place::

    text_of({"from": 5}["from"], "conversations", 2, "from")
        → Reject("bad_type", "conversations[2].from: expected a string, found a number")
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import NoReturn

import numpy as np
import orjson

from tasks.core.errors import Reject

# orjson writes a datetime as a string; here it is an error like every other value that JSON does not have
_STRICT = orjson.OPT_PASSTHROUGH_DATETIME

_NINETEEN = b"0" * 19
_UPPER_HALVES, _OF_DIGITS = np.uint64(0xF0F0F0F0F0F0F0F0), np.uint64(0x3030303030303030)  # of eight bytes
_DIGITS = bytes(48 if 48 <= byte < 58 else 32 for byte in range(256))  # every digit → 0, all else → a space
_KEY_OR_BRACKET = re.compile(rb'("(?:[^"\\]++|\\.)*+")(\s*:)?|[\[\]{}]', re.DOTALL)
_STRING_OR_NUMBER = re.compile(rb'"(?:[^"\\]++|\\.)*+"|(-?[0-9][0-9.eE+-]*)', re.DOTALL)

_KINDS: dict[type, str] = {
    **{str: "a string", int: "a number", float: "a number", bool: "a boolean", type(None): "null"},
    **{list: "a list", dict: "an object"},
}


def text_of(value: object, where: str, index: int = -1, key: str = "") -> str:
    """`value` if it is a string that can be encoded. The place is `where`, or `where[index].key`, put together only
    for an error."""
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


def list_of(value: object, where: str) -> list[object]:
    if isinstance(value, list):
        return value
    raise Reject("bad_type", f"{where}: expected a list, found {kind(value)}")


def json_of(value: object, where: str, code: str) -> str:
    """Compact JSON text of `value`, its keys in their order."""
    try:
        return orjson.dumps(value, option=_STRICT).decode()
    except orjson.JSONEncodeError as error:
        raise Reject(code, f"{where} cannot be written as JSON: {error}") from None


def parsed(text: str, where: str, code: str) -> object:
    """The value of a JSON text within a record."""
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise Reject(code, f"{where} is not JSON: {error.msg} at column {error.colno}") from None
    data = text.encode()
    if big := big_integer(data):
        raise Reject("big_integer", f"{where}: {big}")
    # As for whole records (containers): a lost key shows in the count of what stands behind keys.
    if data.count(b'":') != _key_ends(value) and (twice := duplicate_key(data)):
        raise Reject("duplicate_key", f"{where}: {twice}")
    return value


def _key_ends(value: object) -> int:
    try:
        return orjson.dumps(value).count(b'":')
    except orjson.JSONEncodeError:  # nested deeper than orjson writes
        return -1


def duplicate_key(text: bytes) -> str:
    """What to say of the first key that stands twice in one object of a JSON text; "" where there is none.

    A loop over strings and brackets and not json's object_pairs_hook, whose recursion fails at a depth that depends on
    the caller's.
    """
    levels: list[set[str]] = []  # the keys of every object that is open, and an empty set for every list
    for token in _KEY_OR_BRACKET.finditer(text):
        byte = text[token.start() : token.start() + 1]
        if byte in b"{[":
            levels.append(set())
        elif byte in b"}]":
            levels.pop()
        elif token.group(2):
            key = orjson.loads(token.group(1))
            if key in levels[-1]:
                return f"the key {shown(key)} stands twice in one object"
            levels[-1].add(key)
    return ""


def big_integer(text: bytes) -> str:
    """What to say of the first integer in a JSON text that 64 bits do not hold; "" where there is none.

    orjson reads it as a floating-point number, without a word. Of 19 digits in a row eight fill a place that eight
    divides; to look there first costs a tenth of parsing.
    """
    if not _may_hold_nineteen(text) or _NINETEEN not in text.translate(_DIGITS):
        return ""
    for token in _STRING_OR_NUMBER.finditer(text):
        number = token.group(1)
        if number and len(number) > 18 and number.removeprefix(b"-").isdigit():
            digits = number.decode()
            if len(digits) > 20 or not -(1 << 63) <= int(digits) < 1 << 64:
                some = digits if len(digits) <= 40 else f"{digits[:20]}… of {len(digits):,} digits"
                return f"the integer {some} is beyond 64 bits and would be rounded; write it as a string"
    return ""


def _may_hold_nineteen(text: bytes) -> bool:
    """Whether digits (or one of ":;<=>?", which share their upper half) stand at eight places in a row, the first of
    which eight divides."""
    eights = np.frombuffer(text, np.uint64, len(text) // 8)
    return bool(((eights & _UPPER_HALVES) == _OF_DIGITS).any())


def missing(record: Mapping[str, object], key: str, where: str) -> NoReturn:
    found = ", ".join(_some_keys(record)) or "none"
    raise Reject("missing_key", f"{where}{'.' if where else ''}{key} is missing; the keys found are: {found}")


def _some_keys(record: Mapping[str, object]) -> Iterator[str]:
    for index, key in enumerate(record):
        if index == 12:
            yield "…"
            return
        yield shown(key)[1:-1]


def kind(value: object) -> str:
    """What a value is, in JSON's words."""
    return _KINDS.get(type(value)) or f"a value of type {type(value).__name__}"


def shown(value: object) -> str:
    """A value of the data within a message: short, and with every character that a terminal could obey escaped."""
    if not isinstance(value, str):
        return kind(value)
    return json.dumps(value if len(value) <= 60 else value[:60] + "…")
