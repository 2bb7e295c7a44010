"""What can go wrong: a run that stops (`PackError`) and a conversation that is set aside (`Reject`).

Every message names the place (file and line), the value and the fix; a user never sees a traceback for
something that they can mend. Both are raised with a reason of `codes.CODES`, which gives the message its code.
"""

from __future__ import annotations

from typing import Any

from tasks.core.error_codes import BUG, BUSY, CODES, DATA, DIFFERS, MISSING, PART, STORAGE, USAGE


class _Coded(Exception):
    """`reason` is stable ("bad_role"), and so is its `code` (E207); `message` is one that a user can act on."""

    def __init__(self, reason: str, message: str):
        super().__init__(reason, message)
        self.reason = reason
        self.message = message

    def __str__(self) -> str:
        return self.message

    @property
    def code(self) -> str:
        return CODES[self.reason].code


class PackError(_Coded):
    """The run stops. `exit_code` is what the commands exit with, and `facts` what a machine is told besides."""

    exit_code: int = DATA

    def __init__(self, reason: str, message: str, **facts: Any):
        super().__init__(reason, message)
        self.facts = facts


class UsageError(PackError):
    """The config or the command line is wrong."""

    exit_code = USAGE


class DataError(PackError):
    """The data cannot be used as it is."""

    exit_code = DATA


class InputMissing(PackError):
    """A file that is named is not there."""

    exit_code = MISSING


class PartMissing(PackError):
    """A library or a part of the machine that is needed is not there."""

    exit_code = PART


class StorageError(PackError):
    """Reading or writing a file failed."""

    exit_code = STORAGE


class Busy(PackError):
    """Another run is at the same work, or a part of this one was killed."""

    exit_code = BUSY


class Interrupted(PackError):
    """The run was told to stop; the same command goes on."""

    exit_code = BUSY


class NotReproducible(PackError):
    """Made again, a corpus is not the same bytes."""

    exit_code = DIFFERS


class Bug(PackError):
    """What nobody foresaw: an exception that is none of these."""

    exit_code = BUG


class Reject(_Coded):
    """One conversation cannot be used; it goes to rejects.jsonl and the run goes on.

    `reason` is counted in the ledger, `message` says what was found and where within the record (such as
    'messages[2].role "assistent" is not a role; did you mean assistant?').
    """
