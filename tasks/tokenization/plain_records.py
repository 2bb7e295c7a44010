"""Read records that hold turns and nothing else, by the type that their format declares for them.

    b'{"messages": [{"role": "user", "content": "2+2?"}]}'    a line ─decode─▶ Plain(messages=[Turn("user", "2+2?")])
    {"prompt": "6 × 7?", "completion": "42", "system": None}  a row  ─of─────▶ Plain(prompt="6 × 7?", completion="42")

msgspec checks a record against the type (`Format.plain`) while it decodes it. A record that does not fit is decoded
with care, which defines what a record means.
"""

from __future__ import annotations

from msgspec import DecodeError, Struct, ValidationError, convert, defstruct, to_builtins
from msgspec.json import Decoder, encode

from tasks.conversations.formats import FORMAT_OF
from tasks.conversations.model import PlainRecord
from tasks.readers.strict_json import decode_block, same_strings

# Keys that are common in published data and that no format uses. A string under one of them is decoded and ignored.
IGNORED = ("id", "source", "category")


class PlainRecords:
    """The plain records of one format. If `mapped`, the records have other keys than the format, and none is plain."""

    def __init__(self, format: str, mapped: bool = False):
        self._plain = None if mapped else FORMAT_OF[format].plain
        # Of JSON, only declared keys: msgspec does not check the values of others.
        self._decode = self._plain and Decoder(_strict(self._plain)).decode

    def decode(self, lines: list[bytes]) -> list[object] | None:
        """Decode JSON records: PlainRecords if all are plain, else what `decode_block` returns."""
        if self._decode:
            try:
                records: list[object] = list(map(self._decode, lines))
            except (DecodeError, UnicodeDecodeError, RecursionError):
                return decode_block(lines)
            # Of two equal keys, msgspec keeps the last one silently.
            if same_strings(b"\n".join(lines), encode(records)):
                return records
        return decode_block(lines)

    def of(self, record: object) -> PlainRecord | None:
        """Return a record as a PlainRecord, or None if it is not plain."""
        if isinstance(record, PlainRecord):
            return record
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
