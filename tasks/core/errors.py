"""Define the errors that stop a run or reject one conversation.

A `PackError` stops the run, a `Reject` rejects a conversation. Both are raised with a reason from `error_codes.CODES`,
which determines the code of the message. Every message names the place (file and line), the value, and the fix. Users
never see a traceback for something that they can fix.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from packcorpus.tasks.core.error_codes import BUG, BUSY, CODES, DATA, DIFFERS, MISSING, PART, STORAGE, USAGE
from packcorpus.tasks.core.printable import one_line


class _Coded(Exception):
    """An error with a stable `reason`, such as "bad_role", and its `code` (E207).

    Users can act on its `message`: one line, or a list of lines. Names of files and keys may contain line feeds and
    control characters, so these are escaped.
    """

    def __init__(self, reason: str, message: str | Sequence[str]):
        super().__init__(reason, message)
        self.reason = reason
        self.message = "\n".join(map(one_line, [message] if isinstance(message, str) else message))

    def __str__(self) -> str:
        return self.message

    @property
    def code(self) -> str:
        return CODES[self.reason].code


class PackError(_Coded):
    """An error that stops the run.

    `exit_code` is the exit code of the command. `facts` are added to the error in JSON.
    """

    exit_code: int = DATA

    def __init__(self, reason: str, message: str | Sequence[str], **facts: Any):
        super().__init__(reason, message)
        self.facts = facts


class UsageError(PackError):
    """The config or the command line is invalid."""

    exit_code = USAGE


class DataError(PackError):
    """The data cannot be used."""

    exit_code = DATA


class InputMissing(PackError):
    """A named file does not exist."""

    exit_code = MISSING


class PartMissing(PackError):
    """A required library or device is missing."""

    exit_code = PART


class StorageError(PackError):
    """Reading or writing a file failed."""

    exit_code = STORAGE


class Busy(PackError):
    """Another run is making the same corpus, or a worker of this run was killed."""

    exit_code = BUSY


class Interrupted(PackError):
    """The run was interrupted; the same command resumes it."""

    exit_code = BUSY


class NotReproducible(PackError):
    """A rebuilt corpus differs."""

    exit_code = DIFFERS


class Bug(PackError):
    """An unexpected exception: a bug in packcorpus."""

    exit_code = BUG


class Reject(_Coded):
    """An error that rejects one conversation.

    The conversation is written to rejects.jsonl, and the run continues. The ledger counts `reason`. `message` names the
    value and its place in the record, for example 'messages[2].role "assistent" is not a role; did you mean
    assistant?'.
    """
