"""Read JSON arrays, and cut them between elements.

    [{"text": "a"}, {"text": "b"}, {"text": "c"}]
                  ╰ a comma and the first key of an element: perhaps a cut ─ the elements before it are JSON ─▶ a cut

A parser in C checks a possible cut: if the bytes before it are the elements of an array, it is not within an element.
Where this fails, for example because an element is damaged, brackets and strings are counted, which is 15 times as
slow. A .json file that holds one object per line is read as JSON Lines.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import islice
from pathlib import PurePath
from typing import BinaryIO, NamedTuple

import msgspec
import orjson

from packcorpus.tasks.core.errors import DataError, Reject
from packcorpus.tasks.core.printable import shown
from packcorpus.tasks.readers.container import Container, File, Record, RecordReader, Rows, Window
from packcorpus.tasks.readers.json_files import Jsonl
from packcorpus.tasks.readers.lines import BOM, CHUNK, TOO_LONG, WINDOW, Range, Read, line_blocks
from packcorpus.tasks.readers.strict_json import parse_record

ARRAY_LIMIT = 2 << 30  # bytes of one element, or of a JSON text that is something else
_SEARCHED = 16 << 20  # bytes of an array that are searched for the separator of its elements
_AHEAD = 1 << 20  # bytes that are searched for a possible cut
_JSON_TOKEN = re.compile(rb'"(?:[^"\\]++|\\.)*+"|[\[\]{},"]', re.DOTALL)
_FIRST_KEY = re.compile(rb'\s*\{\s*("(?:[^"\\]++|\\.){1,200}+")\s*:', re.DOTALL)
_OPENING = re.compile(rb"(?:%s)?\s*\[" % BOM)
_SPACE = 64  # bytes of white space at each place of a possible cut


class JsonArray(Container):
    name = "json"
    extensions = (".json",)
    record = "an element of the top-level array"
    is_text = is_cut = True

    def read(self, reader: RecordReader) -> Iterator[Rows]:
        number = 0
        for block in _blocks_of(reader):
            elements = [bytes(element) for element in block.elements]
            records = reader.decode(elements)
            if records is None:
                records = [parse_record(element, False) for element in elements]
            yield range(number, number + len(records)), records, len(block.text)
            number += len(records)

    def split_text(self, file: File, part_size: int, chunks: Iterable[bytes]) -> tuple[str, list[Range]]:
        whole, ranges, start, position, piece = hashlib.sha256(), list[Range](), 0, 0, hashlib.sha256()
        with ThreadPoolExecutor(1) as thread:  # hashing releases the GIL
            passing = _hashed(chunks, whole.update, thread)
            # Blocks are as small as for reading, so that they take little memory.
            for block in array_blocks(lambda size: next(passing, b""), file.name, min(CHUNK, part_size)):
                piece.update(block.text)
                position += len(block.text)
                if position >= (start // part_size + 1) * part_size:
                    ranges.append(Range(start, position, piece.hexdigest()))
                    start, piece = position, hashlib.sha256()
        if position > start:
            ranges.append(Range(start, position, piece.hexdigest()))
        return whole.hexdigest(), ranges

    def records_before(self, file: File, start: int) -> int:
        return sum(len(block.elements) for block in _blocks_of(RecordReader(self, file, 0, start)))

    def resolve(self, file: File, prefix: bytes, is_record: Callable[[dict[str, object]], bool]) -> str:
        """Return json for an array, or jsonl for one object per line.

        Raises DataError if the file starts with neither, or if it is one object that is not one record on one line.
        """
        if prefix.startswith(b"["):
            return self.name
        if not prefix.startswith(b"{"):
            begins = shown(prefix[:20].decode("utf-8", "replace"))
            problem = f"is neither a JSON array nor one JSON object per line; it starts with {begins}"
            raise DataError("unknown_json", f"{file.name}: {problem}")
        reader = RecordReader(self, file)
        with reader.open_text() as read:
            blocks = line_blocks(read, reader.max_record_bytes)
            filled = (line for lines, _ in blocks for line in lines if line == TOO_LONG or line.strip())
            lines = list(islice(filled, 2))
        if len(lines) == 2 and _object(lines[0]) is not None:
            return Jsonl.name
        with reader.open_text() as read:
            value = _object(read_whole(read, file.name))
        if value is None:
            return Jsonl.name
        lists = [key for key, item in value.items() if isinstance(item, list)]
        if lists and not is_record(value):
            command = f"jq -c '.{lists[0]}[]' {file.name} > {PurePath(file.name).stem}.jsonl"
            raise DataError(
                "unknown_json",
                f"{file.name}: is one JSON object, not a list of records; its lists: {', '.join(map(shown, lists))}; "
                f"extract one of them with  {command}",
            )
        if len(lines) == 2:
            advice = "put [ and ] around it, or write one object per line"
            raise DataError("unknown_json", f"{file.name}: is one JSON object over several lines; {advice}")
        return Jsonl.name

    def window(self, file: File, max_record_bytes: int) -> Window | None:
        """Return a function that reads elements from the middle of the array.

        It finds elements by the bytes that separate the first two elements. Returns None if they cannot be found.
        """
        with RecordReader(self, file).open_text() as read:
            _, separator = find_separator(read, file.name)
        if not separator:
            return None

        def window(source: BinaryIO, start: int, stop: int) -> tuple[list[Record], int]:
            source.seek(start)
            text = source.read(stop - start + len(separator) - 1)
            # An element belongs to the window in which the previous element ends.
            first = text.find(separator) if start else 0
            if first < 0:
                return [], 0
            last = -1
            while last < 0 and len(text) <= max_record_bytes + stop - start and (chunk := source.read(WINDOW)):
                searched = max(stop - start, len(text) - len(separator) + 1)
                text += chunk
                last = text.find(separator, searched)
            end = last + 1 if last >= 0 else len(text)
            block = b"[" + text[first + 1 : end].lstrip().removeprefix(b",") if start else text[:end]
            origin = f"{file.name}, from byte {start + first:,} record " if start else f"{file.name}:"
            try:
                elements = array_elements(block.removeprefix(BOM) + b"]" * (last >= 0), file.name)
                values = [parse_record(element, False) for element in elements]
            except DataError:  # the separator was inside an element
                return [], 0
            if sum(isinstance(value, Reject) for value in values) > len(values) / 2:
                return [], 0
            size = (last if last >= 0 else len(text)) - first
            return [Record(f"{origin}{number}", value) for number, value in enumerate(values, 1)], size

        return window


def _object(text: bytes) -> dict[str, object] | None:
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError:
        return None
    return value if isinstance(value, dict) else None


def read_whole(read: Read, name: str) -> bytes:
    """Return all bytes of a JSON text. Raises DataError beyond ARRAY_LIMIT."""
    chunks, size = list[bytes](), 0
    while size <= ARRAY_LIMIT and (chunk := read(CHUNK)):
        chunks.append(chunk)
        size += len(chunk)
    if size > ARRAY_LIMIT:
        raise _too_large(name)
    return b"".join(chunks).removeprefix(BOM)


def _too_large(name: str) -> DataError:
    problem = f"JSON that is not one record per line must fit in memory, but over {ARRAY_LIMIT:,} bytes are one record"
    advice = "convert it to one record per line with  jq -c '.[]' FILE.json > FILE.jsonl"
    return DataError("too_large_json", f"{name}: {problem}; {advice}")


# -- cuts --------------------------------------------------------------------------------------------------------------


class ArrayBlock(NamedTuple):
    """Neighboring elements, and their text, with the comma or bracket after them."""

    text: bytes
    elements: list[bytes] | list[msgspec.Raw]


def array_blocks(read: Read, name: str, size: int, start: int = 0, may_continue: bool = False) -> Iterator[ArrayBlock]:
    """Yield the elements of an array in blocks of about `size` bytes.

    `read` reads from byte `start` of the file: its start, or the start of an element. A block ends with an element that
    ends soon after the next multiple of `size`; its end depends only on the bytes before it. With `may_continue`, the
    text may end with the comma after an element. Raises DataError if the array is not closed, or is followed by
    something else; the elements before are yielded first.
    """
    buffer, count, begin = _Buffer(read, name), 0, 0
    if not start:
        while not (opening := _OPENING.match(buffer.text)) and buffer.grow():
            pass
        begin = opening.end() if opening else 0
    while True:
        stop = (start // size + 1) * size - start
        while len(buffer.text) < stop and buffer.grow():
            pass
        elements: list[bytes] | list[msgspec.Raw]
        cut, elements, problem = 0, [], ""
        if start or begin:
            cut, elements = _likely_cut(buffer, begin, stop, may_continue)
        if not elements:
            cut, elements, problem = _exact_cut(buffer, begin, stop, start, count, may_continue)
        count, start, begin = count + len(elements), start + cut, 0
        block = ArrayBlock(buffer.take(cut), elements)
        if elements or not problem:
            yield block
        if not (problem or buffer.text or buffer.grow()):
            if may_continue or not block.text.endswith(b","):
                return
            problem = _not_closed(count)
        if problem:
            raise DataError("bad_json_array", f"{name}: {problem}")


def _likely_cut(buffer: _Buffer, begin: int, stop: int, may_continue: bool) -> tuple[int, list[msgspec.Raw]]:
    """Return a cut and the elements before it, or no elements if it is not clear.

    The cut is after a comma, or at the end of the file. The first element begins at `begin`.
    """
    first = _FIRST_KEY.match(buffer.text, begin)
    if not first:
        return 0, []
    longest = len(first[1]) + 4 * _SPACE + 4
    space = rb"\s{0,%d}" % _SPACE
    possible = re.compile(rb"\}%s(,)%s\{%s%s%s:" % (space, space, space, re.escape(first[1]), space))
    searched = stop
    while not (match := possible.search(buffer.text, searched, stop + _AHEAD)) and len(buffer.text) < stop + _AHEAD:
        searched = max(stop, len(buffer.text) - longest)
        if not buffer.grow():
            break
    if match:
        cut, last, closing = match.end(1), match.start(1), b"]"
    elif buffer.ended and len(buffer.text) <= stop + _AHEAD:
        cut = len(buffer.text)
        last, closing = (cut - 1, b"]") if may_continue and buffer.text.endswith(b",") else (cut, b"")
    else:
        return 0, []
    try:
        array = b"".join((b"[", memoryview(buffer.text)[begin:last], closing))
        return cut, msgspec.json.decode(array, type=list[msgspec.Raw])
    except (msgspec.DecodeError, RecursionError):
        return 0, []


def _exact_cut(
    buffer: _Buffer, begin: int, stop: int, start: int, count: int, may_continue: bool
) -> tuple[int, list[bytes], str]:
    """Return the first cut at or after `stop`, the elements before it, and a problem.

    Elements are found only by brackets, commas, and strings, so a bad element costs one record and not the file.
    """
    elements, at, depth = list[bytes](), begin, 1
    if not begin and not start:  # no bracket opens it
        depth = 0
    while True:
        for token in _JSON_TOKEN.finditer(buffer.text, at):
            byte = token[0][:1]
            if byte == b'"' and len(token[0]) == 1:
                break  # the string ends later
            at = token.end()
            depth += (byte in b"[{") - (byte in b"]}")
            if byte == b"," and depth == 1:
                elements.append(buffer.text[begin : at - 1].strip())
                begin = at
                if at >= stop:
                    return at, elements, ""
            elif depth <= 0 and byte in b"]}":
                last = buffer.text[begin : at - 1].strip()
                elements += [last] * bool(last or elements or count)
                while not buffer.text[at:].strip() and buffer.grow():
                    pass
                rest = buffer.text[at:].lstrip()
                place = start + len(buffer.text) - len(rest)
                problem = f"byte {place:,}: the JSON array is followed by something else" if rest else ""
                return len(buffer.text), elements, problem
        if not buffer.grow():
            if may_continue and begin == at == len(buffer.text):
                return at, elements, ""
            return begin, elements, _not_closed(count + len(elements))


def _not_closed(count: int) -> str:
    return f"the JSON array is not closed after the start of record {count + 1:,}: truncated?"


class _Buffer:
    """The bytes of a file that were read and not yet taken."""

    def __init__(self, read: Read, name: str):
        self._read, self._name = read, name
        self.text, self.ended = b"", False

    def grow(self) -> bool:
        """Read more; return whether there is more. A long element takes linear time."""
        more = self._read(max(CHUNK, len(self.text)))
        self.ended = not more
        self.text += more
        if len(self.text) > ARRAY_LIMIT:
            raise _too_large(self._name)
        return not self.ended

    def take(self, size: int) -> bytes:
        taken, self.text = self.text[:size], self.text[size:]
        return taken


def _blocks_of(reader: RecordReader) -> Iterator[ArrayBlock]:
    with reader.open_text() as read:
        yield from array_blocks(read, reader.file.name, CHUNK, reader.start, reader.stop is not None)


def _hashed(chunks: Iterable[bytes], update: Callable[[bytes], None], thread: ThreadPoolExecutor) -> Iterator[bytes]:
    """Yield chunks, each while it is hashed."""
    hashing = None
    for chunk in chunks:
        if hashing:
            hashing.result()  # no chunk waits in memory
        hashing = thread.submit(update, chunk)
        yield chunk


def find_separator(read: Read, name: str) -> tuple[bytes, bytes]:
    """Return the start of an array and the separator of its first two elements.

    The separator runs from the last byte of the first element through the first string of the second. It is b"" if
    there is no second element.
    """
    text = separator = b""
    while not separator and len(text) < _SEARCHED and (chunk := read(max(CHUNK, 3 * len(text)))):
        text = (text + chunk).removeprefix(BOM).lstrip()
        with suppress(DataError, ValueError):
            first, second = islice(array_elements(text, name), 2)
            begin = text.index(first) + len(first)
            string = second.find(b'"', second.find(b'"') + 1) + 1
            separator = text[begin - 1 : text.index(second, begin) + string]
    return text, separator


def array_elements(data: bytes, name: str) -> Iterator[bytes]:
    """Yield the text of each element of a JSON array.

    Elements are found only by brackets, commas, and strings, so a bad element costs one record and not the file. Raises
    DataError if the array is not closed, or is followed by something else.
    """
    depth, begin, count = 0, 0, 0
    for token in _JSON_TOKEN.finditer(data):
        at = token.start()
        byte = data[at : at + 1]
        if byte == b'"':
            if token.end() == at + 1:
                break
        elif byte in b"[{":
            depth += 1
            if depth == 1:
                begin = at + 1
        elif byte == b"," and depth == 1:
            yield data[begin:at].strip()
            begin, count = at + 1, count + 1
        elif byte in b"]}":
            depth -= 1
            if depth == 0:
                last = data[begin:at].strip()
                if count or last:
                    yield last
                rest = data[at + 1 :].lstrip()
                if rest:
                    place = f"byte {len(data) - len(rest):,}"
                    raise DataError("bad_json_array", f"{name}: {place}: the JSON array is followed by something else")
                return
    problem = f"the JSON array is not closed after the start of record {count + 1:,}: truncated?"
    raise DataError("bad_json_array", f"{name}: {problem}")
