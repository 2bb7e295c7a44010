"""How an error is told: to a person in two lines, to a machine as one JSON object.

PackError ─┬─as_text─▶ E310 error: chats/a.jsonl: is empty
           │             cause: …; fix: …
           └─as_json─▶ {"error": {"code": "E310", "reason": "empty_source", "message": …, "exit_code": 65, …}}
"""

from __future__ import annotations

import json
import os
import traceback
from collections.abc import Mapping

from tasks.core.error_codes import CODES
from tasks.core.errors import Bug, Interrupted, PackError, StorageError
from tasks.core.printable import printable

# Set to 1 they do what --json and --debug do, also where the command is Luigi's and has no options of ours.
JSON, DEBUG = "PACKCORPUS_JSON", "PACKCORPUS_DEBUG"


def is_on(name: str, environment: Mapping[str, str] = os.environ) -> bool:
    return environment.get(name, "") not in ("", "0")


def as_text(error: PackError) -> str:
    """The message behind its code, then cause and fix. Whoever interrupts a run need not be told of an error."""
    code = CODES[error.reason]
    rank = f"rank {error.facts['rank']}: " if "rank" in error.facts else ""
    message = rank + printable(str(error))
    if isinstance(error, Interrupted):
        return f"{code.code} {message}"
    return f"{code.code} error: {message}\n  cause: {code.cause}; fix: {code.fix}"


def as_json(error: PackError) -> str:
    """One line. What the error knows besides (`facts`) stands beside the keys that all have."""
    code = CODES[error.reason]
    told = {
        "code": code.code,
        "reason": code.reason,
        "message": str(error),
        "cause": code.cause,
        "fix": code.fix,
        "exit_code": error.exit_code,
    }
    # ASCII alone, and not orjson: names of files that are not UTF-8 have lone surrogates in them.
    return json.dumps({"error": told | error.facts}, default=str)


def told(error: PackError) -> str:
    """As the environment asks for it."""
    return as_json(error) if is_on(JSON) else as_text(error)


def foreseen(error: Exception) -> PackError:
    """The error itself, or one line on what nobody foresaw: its kind, what it says, and where it was raised."""
    if isinstance(error, PackError):
        return error
    if "KeyboardInterrupt" in str(error):  # libraries in Rust make an error of their own of it
        return Interrupted("interrupted", "interrupted; the same command goes on from here")
    if isinstance(error, OSError):
        return StorageError("disk_failed", f"{error.filename}: {error.strerror}" if error.filename else str(error))
    place = traceback.extract_tb(error.__traceback__)[-1:]
    where = "".join(f" ({os.path.basename(frame.filename)}:{frame.lineno})" for frame in place)
    said = " ".join(str(error).split())[:300]
    return Bug("bug", f"{type(error).__name__}{': ' if said else ''}{said}{where}")
