"""Sessions of agents: JSON Lines, of which the whole file is one record.

{"type": "session_meta", …}\\n{"type": "response_item", …}\\n…   ─▶   {"trace": [{…}, {…}, …]}, record 1
"""

from __future__ import annotations

from collections.abc import Iterator

from tasks.core.errors import Reject
from tasks.readers.container import Container, RecordReader, Rows, too_long_record
from tasks.readers.lines import TOO_LONG, line_blocks
from tasks.readers.strict_json import parse_record

TRACE = "trace"


class Session(Container):
    """A file is found to be a session by its content, never by its extension."""

    name = "session"
    extensions = ()
    is_text = True
    record = "the whole file"

    def read(self, reader: RecordReader) -> Iterator[Rows]:
        records: list[object] = []
        number = size = 0
        with reader.open_text() as read:
            for lines, unterminated in line_blocks(read, reader.max_record_bytes):
                for line in lines:
                    number += 1
                    size += len(line) + 1
                    if line == TOO_LONG or size > reader.max_record_bytes + 1:
                        yield range(1), [_too_long(reader)], size
                        return
                    if not line or line.isspace():
                        continue
                    record = parse_record(line, unterminated)
                    if isinstance(record, Reject):
                        yield range(1), [Reject(record.reason, f"line {number}: {record.message}")], size
                        return
                    records.append(record)
        yield range(1), [{TRACE: records}], size


def _too_long(reader: RecordReader) -> Reject:
    message = too_long_record(reader).message.replace("the line", "the session, which is one record,")
    return Reject("too_long_record", message)
