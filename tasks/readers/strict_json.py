"""Parse a JSON record, and reject input that JSON parsers interpret differently."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import orjson

from packcorpus.tasks.core.errors import Reject
from packcorpus.tasks.core.printable import shown
from packcorpus.tasks.readers.lines import BOM

# Bytes compared at a time: small enough that temporary arrays stay in the cache.
_WINDOW = 1 << 17


def contains(text: bytes, part: bytes) -> bool:
    """Return whether a text contains a part of at least two bytes."""
    each = np.frombuffer(text, np.uint8)
    first, second = part[:2]
    for start in range(0, len(text), _WINDOW):
        window = each[start : start + _WINDOW + 1]
        if ((window[:-1] == first) & (window[1:] == second)).any():
            return part in text
    return False


_NINETEEN = b"0" * 19
_UPPER_HALVES, _OF_DIGITS = np.uint64(0xF0F0F0F0F0F0F0F0), np.uint64(0x3030303030303030)  # for words of eight bytes
_DIGITS = bytes(48 if 48 <= byte < 58 else 32 for byte in range(256))  # every digit → 0, all else → a space
_KEY_OR_BRACKET = re.compile(rb'("(?:[^"\\]++|\\.)*+")(\s*:)?|[\[\]{}]', re.DOTALL)
_STRING_OR_NUMBER = re.compile(rb'"(?:[^"\\]++|\\.)*+"|(-?[0-9][0-9.eE+-]*)', re.DOTALL)


def duplicate_key(text: bytes) -> str:
    """Describe the first duplicate key in an object of a JSON text, or return "".

    This is a loop over strings and brackets. The recursion of json's object_pairs_hook would fail at a depth that
    depends on the depth of the caller.
    """
    levels: list[set[str]] = []  # the keys of each open object, and an empty set for each open list
    for token in _KEY_OR_BRACKET.finditer(text):
        byte = text[token.start() : token.start() + 1]
        if byte in b"{[":
            levels.append(set())
        elif byte in b"}]":
            levels.pop()
        elif token.group(2):
            key = orjson.loads(token.group(1))
            if key in levels[-1]:
                return f"duplicate key {shown(key)} in an object"
            levels[-1].add(key)
    return ""


def big_integer(text: bytes) -> str:
    """Describe the first integer that does not fit in 64 bits, or return "".

    orjson silently reads such an integer as a floating-point number.
    """
    # Any 19 consecutive digits fill an aligned word of eight bytes. Checking these first takes a tenth of the time
    # of parsing. The check also accepts ":;<=>?", which have the same upper half-byte as digits.
    eights = np.frombuffer(text, np.uint64, len(text) // 8)
    if not ((eights & _UPPER_HALVES) == _OF_DIGITS).any() or _NINETEEN not in text.translate(_DIGITS):
        return ""
    for token in _STRING_OR_NUMBER.finditer(text):
        number = token.group(1)
        if number and len(number) > 18 and number.removeprefix(b"-").isdigit():
            digits = number.decode()
            if len(digits) > 20 or not -(1 << 63) <= int(digits) < 1 << 64:
                some = digits if len(digits) <= 40 else f"{digits[:20]}… of {len(digits):,} digits"
                return f"the integer {some} does not fit in 64 bits and would be rounded; write it as a string"
    return ""


_NOT_A_NUMBER = re.compile(r"-?(?:NaN|Infinity|inf)\b", re.IGNORECASE)


def decode_block(texts: list[bytes]) -> list[Any] | None:
    """Decode the records of a block, or return None if one needs `parse_record`."""
    try:
        records = list(map(orjson.loads, texts))
    except orjson.JSONDecodeError:
        return None
    block = as_array(texts)
    return records if is_exact(block, records) and not big_integer(block) else None


def parse_record(text: bytes, unterminated: bool) -> object:
    """Parse one record, or return the Reject that explains why it cannot be parsed.

    `unterminated` means that the file ends with this record, without a line end. A byte order mark is skipped on every
    line, as in concatenated files. If it was skipped on the first line only, the result would depend on where a part
    starts.
    """
    text = text.removeprefix(BOM)
    try:
        record = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        return _reject(text, error, unterminated)
    if big := big_integer(text):
        return Reject("big_integer", big)
    twice = "" if is_exact(text, record) else duplicate_key(text)
    return Reject("duplicate_key", twice) if twice else record


def is_exact(text: bytes, value: object) -> bool:
    """Return whether a decoded value certainly has all the strings of its JSON text."""
    try:
        return same_strings(text, orjson.dumps(value))
    except orjson.JSONEncodeError:  # nested more deeply than orjson can write
        return False


def same_strings(text: bytes, rewritten: bytes) -> bool:
    """Return whether a JSON text has as many strings as its decoded value.

    `rewritten` is the value, encoded again. Decoders silently keep the last of two equal keys; then strings are
    missing. Counting quotation marks detects this at a tenth of the cost of decoding, while a decoder that reports
    equal keys takes five times as long. Inside a string, encoders write a quotation mark as \\", which counts on both
    sides. A text that may write it as \\u0022 cannot be compared, so the result is False.
    """
    return text == rewritten or (not contains(text, b"u0022") and _quotes(text) == _quotes(rewritten))


def as_array(texts: list[bytes]) -> bytes:
    """Return JSON texts as one array, like encoders write it: without white space."""
    return b"[%s]" % b",".join(texts)


def _quotes(text: bytes) -> int:
    return int(np.count_nonzero(np.frombuffer(text, np.uint8) == ord('"')))  # three times as fast as bytes.count


def _reject(text: bytes, error: orjson.JSONDecodeError, unterminated: bool) -> Reject:
    """Explain why `text` is not valid JSON."""
    try:
        decoded = text.decode()
    except UnicodeDecodeError as bad:
        return Reject("bad_utf8", f"byte 0x{text[bad.start]:02x} at offset {bad.start} of the record is not UTF-8")
    if b"\0" in text:
        return Reject("nul", f"the record contains a NUL byte at offset {text.index(0)}")
    place = f"column {error.colno}" if error.lineno == 1 else f"line {error.lineno} of the record, column {error.colno}"
    if "surrogate" in error.msg:
        return Reject("lone_surrogate", f"{place}: half of a surrogate pair is not a character ({error.msg})")
    if "depth" in error.msg or "recursion" in error.msg.lower():
        return Reject("too_deep", f"{place}: the record is nested too deeply")
    if match := _NOT_A_NUMBER.match(decoded, error.pos):
        return Reject("bad_json", f"{place}: {match.group()} is not JSON")
    if "infinity" in error.msg:
        return Reject("bad_json", f"{place}: the number is too large; write it as a string")
    if unterminated:
        return Reject("bad_json", f"{place}: {error.msg}; the last line ends early: truncated?")
    return Reject("bad_json", f"{place}: {error.msg}")
