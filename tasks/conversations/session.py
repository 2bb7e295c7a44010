"""The format `session`: what Claude Code, Codex, and Pi record of a session.

    a file of records, one per line          ─┐
    a row of the Hub with `trace`            ─┴─▶  {"trace": [{"type": "session_meta", …}, …]}  ─▶  Conversation

One file is one conversation. A row of the Hub has the same records as a list or as JSON text. The conversation is what
the model has at the end of the session: the branch that ends last, after its last summary. Each
agent has a file here with its rules. Records that are not part of it are counted by their type, like unused keys.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

from packcorpus.tasks.conversations.answers import tools_of
from packcorpus.tasks.conversations.chat import Object
from packcorpus.tasks.conversations.claude_code import is_claude_code, read_claude_code
from packcorpus.tasks.conversations.codex import is_codex, is_old_codex, read_codex
from packcorpus.tasks.conversations.model import Conversation, Format, Record
from packcorpus.tasks.conversations.other_data import MEDIA_PARTS, part_of_other_data
from packcorpus.tasks.conversations.parts import PartKeys
from packcorpus.tasks.conversations.pi import is_pi, read_pi
from packcorpus.tasks.conversations.session_turns import Turns, place_of
from packcorpus.tasks.conversations.values import list_of, missing, parsed, text_of
from packcorpus.tasks.core.errors import Reject
from packcorpus.tasks.core.printable import kind

KEYS = ("trace", "traces")

FIRST = 100  # records that show which agent wrote a session

Reader = Callable[[Sequence[Record]], Turns]


def read(record: Record) -> Conversation:
    turns = _read_turns(record)
    return Conversation(turns.finished(), tools_of(record) or tuple(turns.tools))


def reader_of(records: Sequence[object]) -> Reader | None:
    """Return the function that reads these records.

    Returns None if no known agent writes such records.
    """
    if records and isinstance(records[0], dict):
        if is_pi(records[0]):
            return read_pi
        if is_old_codex(records[0]):
            return read_codex
    for record in records[:FIRST]:
        if isinstance(record, dict):
            if is_codex(record):
                return read_codex
            if is_claude_code(record):
                return read_claude_code
    return None


def _read_turns(record: Record) -> Turns:
    """Return the messages of a session, and the counts of what is left out."""
    records = _records(record)
    reader = reader_of(records)
    if reader is None:
        raise Reject(
            "bad_session",
            f"{_key(record)}: none of its first {FIRST} records is one of Claude Code, Codex, or Pi; if another agent "
            "wrote the session, convert it to `messages`",
        )
    return reader(records)


def _key(record: Record) -> str:
    return "traces" if record.get("trace") is None and record.get("traces") is not None else "trace"


def _records(record: Record) -> list[Record]:
    """Return the records of a session.

    In tables, the list or each of its records may be JSON text.
    """
    key = _key(record)
    value = record.get(key)
    if value is None:
        missing(record, key, "")
    if isinstance(value, str):
        value = parsed(text_of(value, key), key, "bad_session")
    found = []
    for index, item in enumerate(list_of(value, key)):
        if isinstance(item, str):
            item = parsed(text_of(item, place_of(index)), place_of(index), "bad_session")
        if not isinstance(item, dict):
            raise Reject("bad_session", f"{place_of(index)}: expected an object, found {kind(item)}")
        found.append(item)
    return found


def _matches(record: Mapping[str, object]) -> bool:
    if not any(key in record for key in KEYS):
        return False
    try:
        return reader_of(_records(dict(record))) is not None
    except Reject:
        return any(record.get(key) == "" for key in KEYS)  # the header of a CSV file


def _left_out(record: Record) -> Mapping[str, int]:
    """Count the records that are left out.

    The names are paths, like those of unused keys.
    """
    try:
        turns = _read_turns(record)
        turns.finished()
    except Reject:
        return {}
    return {f"{_key(record)}[].{name}": count for name, count in turns.left_out.items() if count}


def _objects(record: Record, columns: Mapping[str, str]) -> Iterator[Object]:
    """Yield the content parts that are images, audio, or video."""
    try:
        _, media = _without(_records(record), ())
    except Reject:
        return
    where = columns.get(_key(record), _key(record))
    for path, name in media:
        yield f"{where}[].{path}", {"type": name}, PartKeys(("type",))


def without_media(record: Record, ignored: Collection[str]) -> Record:
    """Return a session without the content parts of the ignored types.

    The given record is not changed.
    """
    types = MEDIA_PARTS.intersection(ignored)
    if not types:
        return record
    try:
        kept, _ = _without(_records(record), types)
    except Reject:
        return record  # reading it raises the error
    return record | {_key(record): kept}


def _without(records: Sequence[Record], types: Collection[str]) -> tuple[list[Record], list[tuple[str, str]]]:
    """Return records without the content parts of some types.

    The second result has the path and the type of each part that is an image, audio, or video.
    """
    media: list[tuple[str, str]] = []

    def kept(body: Record, where: str, depth: int) -> Record:
        found = dict(body)
        for key in ("content", "output", "prompt"):
            if isinstance(parts := body.get(key), list) and depth:
                place = f"{where}.{key}[]"
                names = [part_of_other_data(part) if isinstance(part, dict) else "" for part in parts]
                media.extend((place, name) for name in names if name)
                found[key] = [
                    kept(part, place, depth - 1) if isinstance(part, dict) and not name else part
                    for part, name in zip(parts, names, strict=True)
                    if name not in types
                ]
        return found

    found = [dict(record) for record in records]
    for record in found:
        for key in ("message", "payload", "attachment"):
            if isinstance(body := record.get(key), dict):
                # A message or an item has parts, and a result among them has parts of its own.
                record[key] = body = kept(body, key, 2)
                if isinstance(history := body.get("replacement_history"), list):
                    place = f"{key}.replacement_history[]"
                    body["replacement_history"] = [
                        kept(item, place, 2) if isinstance(item, dict) else item for item in history
                    ]
    return found, media


SESSION = Format(
    name="session",
    keys=(*KEYS, "tools"),
    matches=_matches,
    read=read,
    summary="a session of Claude Code, Codex, or Pi: a JSONL file of its records, or rows with `trace` (or `traces`), "
    "a list of its records; optionally `tools`",
    example='{"trace": [{"type": "response_item", "payload": {"type": "message", "role": "user", "content": "2+2?"}}, '
    '{"type": "response_item", "payload": {"type": "message", "role": "assistant", "content": "4"}}]}',
    used=lambda record: (_key(record), "tools"),
    objects=_objects,
    left_out=_left_out,
)
