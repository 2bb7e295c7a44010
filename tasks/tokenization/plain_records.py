"""Decode records that contain only turns, by the type that their format declares.

    b'{"messages": [{"role": "user", "content": "2+2?"}]}'    a line ─decode─▶ Plain(messages=[Turn("user", "2+2?")])
    {"prompt": "6 × 7?", "completion": "42", "system": None}  a row  ─of─────▶ Plain(prompt="6 × 7?", completion="42")

msgspec checks a record against the type (`Format.plain`) while decoding it. Any other record is decoded to a dict and
read by `Format.read`, which defines the meaning of a record.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from msgspec import DecodeError, ValidationError, convert, defstruct, to_builtins
from msgspec.json import Decoder, encode

from tasks.conversations.formats import FORMAT_OF
from tasks.conversations.model import PlainRecord
from tasks.readers.strict_json import as_array, decode_block, same_strings

# Keys that are common in published data and that no format uses. Strings under these keys are decoded and ignored.
IGNORED = ("id", "source", "category")


class PlainRecords:
    """A decoder for the plain records of a format.

    If the format is "", no record is plain.
    """

    def __init__(self, format: str):
        self._plain = FORMAT_OF[format].plain if format else None
        # JSON records may only have declared keys, because msgspec does not check the values of other keys.
        self._decode = self._plain and _decoder(self._plain).decode

    def decode(self, lines: list[bytes]) -> list[Any] | None:
        """Decode JSON records, each as a PlainRecord if it is plain.

        Returns None if a record has to be examined separately.
        """
        if self._decode is None:
            return decode_block(lines)
        records: list[Any] = []
        others: list[int] = []
        decoded = map(self._decode, lines)
        while len(records) < len(lines):
            try:
                records.extend(decoded)  # until a record is not plain; the next call continues after it
            except (DecodeError, UnicodeDecodeError, RecursionError):
                if not records:  # if the first record is not plain, most records are not
                    return decode_block(lines)
                others.append(len(records))
                records.append(None)
        plain, plain_lines = records, lines
        if others:
            plain = [record for record in records if record]
            plain_lines = [line for line, record in zip(lines, records, strict=True) if record]
        # msgspec silently keeps the last of two equal keys.
        if not same_strings(as_array(plain_lines), encode(plain)):
            return decode_block(lines)
        found = decode_block([lines[number] for number in others])
        if found is None:
            return None
        for number, record in zip(others, found, strict=True):
            records[number] = record
        return records

    def of(self, record: object) -> PlainRecord | None:
        """Return a table row or a decoded record as a PlainRecord.

        Returns None if it is not plain.
        """
        if self._plain is None or type(record) is not dict:
            return None
        try:
            return convert(record, self._plain)
        except ValidationError:
            return None


def as_dict(record: object) -> object:
    """Return a PlainRecord as the dict that it was decoded from.

    Any other record is returned unchanged.
    """
    return to_builtins(record) if isinstance(record, PlainRecord) else record


@lru_cache(maxsize=32)
def _decoder(plain: type[PlainRecord]) -> Decoder[Any]:
    """Return a decoder that accepts no other keys; a process needs it for every part."""
    keys = [(key, str | None, None) for key in IGNORED if key not in plain.__struct_fields__]
    strict = defstruct(plain.__name__, keys, bases=(plain,), forbid_unknown_fields=True, gc=False, omit_defaults=True)
    return Decoder(strict)
