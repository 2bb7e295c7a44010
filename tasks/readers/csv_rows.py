"""Turn one CSV row into a record."""

from __future__ import annotations

from tasks.core.errors import Reject


def csv_record(header: list[str], row: list[str], damaged: list[int]) -> object:
    if len(row) > len(header):
        return Reject("bad_csv", f"the row has {len(row)} cells, the header has {len(header)}")
    if damaged:
        return Reject("bad_utf8", f"a byte at offset {damaged[0]} of its line is not UTF-8")
    row += [""] * (len(header) - len(row))
    return dict(zip(header, row, strict=True))
