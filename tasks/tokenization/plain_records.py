"""Decode records that contain turns and nothing else, by the type that their format declares.

    b'{"messages": [{"role": "user", "content": "2+2?"}]}'    a line ─decode─▶ Plain(messages=[Turn("user", "2+2?")])
    {"prompt": "6 × 7?", "completion": "42", "system": None}  a row  ─of─────▶ Plain(prompt="6 × 7?", completion="42")

msgspec checks a record against the type (`Format.plain`) while decoding it. A record that does not fit is decoded
with care, which defines what a record means.
"""

from __future__ import annotations

from typing import Any

from msgspec import DecodeError, Struct, ValidationError, convert, defstruct, to_builtins
from msgspec.json import Decoder, encode

from tasks.conversations.formats import FORMAT_OF
from tasks.conversations.model import PlainRecord
from tasks.readers.strict_json import as_array, decode_block, same_strings

# Keys that are common in published data and that no format uses. A string under one of them is decoded and ignored.
IGNORED = ("id", "source", "category")


class PlainRecords:
    """The plain records of a format. For "" no record is plain."""

    def __init__(self, format: str):
        self._plain = FORMAT_OF[format].plain if format else None
        # Of JSON, only declared keys: msgspec does not check the values of others.
        self._decode = self._plain and Decoder(_strict(self._plain)).decode

    def decode(self, lines: list[bytes]) -> list[Any] | None:
        """Decode JSON records, each as a PlainRecord if it is plain; None if one has to be examined by itself."""
        if self._decode is None:
            return decode_block(lines)
        records: list[Any] = []
        others: list[int] = []
        for line in lines:
            try:
                records.append(self._decode(line))
            except (DecodeError, UnicodeDecodeError, RecursionError):
                if not records:  # if the first one is not plain, most are not
                    return decode_block(lines)
                others.append(len(records))
                records.append(None)
        plain, plain_lines = records, lines
        if others:
            plain = [record for record in records if record]
            plain_lines = [line for line, record in zip(lines, records, strict=True) if record]
        # Of two equal keys, msgspec keeps the last one silently.
        if not same_strings(as_array(plain_lines), encode(plain)):
            return decode_block(lines)
        found = decode_block([lines[number] for number in others])
        if found is None:
            return None
        for number, record in zip(others, found, strict=True):
            records[number] = record
        return records

    def of(self, record: object) -> PlainRecord | None:
        """Return a row of a table, or a decoded record, as a PlainRecord; None if it is not plain."""
        if self._plain is None or type(record) is not dict:
            return None
        try:
            return convert(record, self._plain)
        except ValidationError:
            return None


def as_dict(record: object) -> object:
    """Return a PlainRecord as the dict that it was decoded from; any other record as it is."""
    return to_builtins(record) if isinstance(record, PlainRecord) else record


def _strict(plain: type[PlainRecord]) -> type[Struct]:
    keys = [(key, str | None, None) for key in IGNORED if key not in plain.__struct_fields__]
    return defstruct(plain.__name__, keys, bases=(plain,), forbid_unknown_fields=True, gc=False, omit_defaults=True)
