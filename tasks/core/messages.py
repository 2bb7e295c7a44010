"""Format errors, two lines for people or one JSON object, and show notes.

PackError ─┬─as_text─▶ E310 error: chats/a.jsonl: is empty
           │             cause: …; fix: …
           └─as_json─▶ {"error": {"code": "E310", "reason": "empty_source", "message": …, "exit_code": 65, …}}

    with noted(lambda: f"{count} files found so far"): …   a note after 3 seconds, and every 10 seconds from then on
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from threading import Event, Thread
from typing import Self

from packcorpus.tasks.core.error_codes import CODES
from packcorpus.tasks.core.errors import Bug, Interrupted, PackError, StorageError
from packcorpus.tasks.core.printable import from_here, printable, printable_lines, with_urls
from packcorpus.tasks.core.process import limit_reached

FIRST_AFTER, EVERY = 3.0, 10.0  # seconds between notes
# Set to 1, they act like --json and --debug, also for the luigi command, which lacks these options.
JSON, DEBUG = "PACKCORPUS_JSON", "PACKCORPUS_DEBUG"


class Note(str):
    """A line for a person, with a kind and figures for a machine.

    Its prefix "note: " is only for the person.
    """

    __slots__ = ("kind", "values")

    kind: str
    values: Mapping[str, object]

    def __new__(cls, text: str, kind: str, **values: object) -> Self:
        note = super().__new__(cls, text)
        note.kind, note.values = kind, values
        return note


def note_as_json(text: str) -> str:
    """Return one line of JSON: the text, its kind, and its figures, if it has some."""
    kind, values = (text.kind, text.values) if isinstance(text, Note) else ("other", {})
    return json.dumps({"note": text.removeprefix("note: "), "kind": kind, "values": values}, default=str)


def is_on(name: str, environment: Mapping[str, str] = os.environ) -> bool:
    return environment.get(name, "") not in ("", "0")


def as_text(error: PackError) -> str:
    """Return the code and the message, then cause and fix if the code has them.

    An interrupt is not an error, so it has only the first line.
    """
    code = CODES[error.reason]
    rank = f"rank {error.facts['rank']}: " if "rank" in error.facts else ""
    message = rank + printable_lines(from_here(with_urls(str(error))))
    if isinstance(error, Interrupted):
        return f"{code.code} {message}"
    line = advice(error)
    return f"{code.code} error: {message}" + (f"\n  {line}" if line else "")


def advice(error: PackError) -> str:
    """Return the cause and the fix of an error, or "" if its code has neither."""
    known = {"cause": CODES[error.reason].cause, "fix": CODES[error.reason].fix}
    return "; ".join(f"{name}: {text}" for name, text in known.items() if text)


def as_json(error: PackError) -> str:
    """Return one line of JSON, with the `facts` of the error as additional keys."""
    code = CODES[error.reason]
    values = {"code": code.code, "reason": code.reason, "message": with_urls(str(error))}
    advice = {"cause": code.cause, "fix": code.fix, "exit_code": error.exit_code}
    # ASCII only, and not orjson: file names that are not UTF-8 contain lone surrogates.
    return json.dumps({"error": values | advice | error.facts}, default=str)


def format_error(error: PackError) -> str:
    """Return the error as JSON or text, as PACKCORPUS_JSON selects."""
    return as_json(error) if is_on(JSON) else as_text(error)


def to_pack_error(error: Exception) -> PackError:
    """Return a PackError as is; convert any other exception to a PackError.

    An error that a limit of the system caused becomes E705. The message of an unexpected exception names its type,
    text, and place.
    """
    if limit := limit_reached(error):
        return limit
    if isinstance(error, PackError):
        return error
    if "KeyboardInterrupt" in str(error):  # libraries written in Rust convert it to their own errors
        return Interrupted("interrupted", "interrupted; run the same command again to resume")
    if isinstance(error, OSError):
        return StorageError("disk_failed", f"{error.filename}: {error.strerror}" if error.filename else str(error))
    place = traceback.extract_tb(error.__traceback__)[-1:]
    where = "".join(f" ({os.path.basename(frame.filename)}:{frame.lineno})" for frame in place)
    text = " ".join(str(error).split())[:300]
    return Bug("bug", f"{type(error).__name__}{': ' if text else ''}{text}{where}")


_show: Callable[[str], None] = lambda note: print(printable(note), file=sys.stderr, flush=True)  # noqa: E731


def show_notes_with(show: Callable[[str], None]) -> None:
    """Pass the notes of this process to `show` instead of printing them to stderr."""
    global _show
    _show = show


def show_note(text: str) -> None:
    """Show a note at once, like a note about a long operation."""
    _show(Note(f"note: {text}", "waiting"))


@contextmanager
def noted(describe: Callable[[], str]) -> Iterator[None]:
    """Show `describe()` from time to time while the block runs."""
    done = Event()

    def run() -> None:
        is_over = done.wait(FIRST_AFTER)
        while not is_over:
            show_note(describe())
            is_over = done.wait(EVERY)

    thread = Thread(target=run, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
