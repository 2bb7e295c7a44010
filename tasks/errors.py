"""What can go wrong: a run that stops (`PackError`) and a conversation that is set aside (`Reject`).

Every message names the place (file and line), the value and the fix; a user never sees a traceback for
something that they can mend.
"""

from __future__ import annotations


class PackError(Exception):
    """The run stops. The message is one that a user can act on; `exit_code` follows sysexits.h.

    It is what the commands exit with.
    """

    exit_code = 65


class UsageError(PackError):
    """The config or the command line is wrong."""

    exit_code = 64


class DataError(PackError):
    """The data cannot be used as it is."""

    exit_code = 65


class InputMissing(PackError):
    """A file that is named is not there."""

    exit_code = 66


class PartMissing(PackError):
    """A library or a part of the machine that is needed is not there."""

    exit_code = 69


class StorageError(PackError):
    """Reading or writing a file failed."""

    exit_code = 74


class Busy(PackError):
    """Another run is at the same work."""

    exit_code = 75


class Interrupted(PackError):
    """The run was told to stop; the same command goes on."""

    exit_code = 75


class NotReproducible(PackError):
    """Made again, a corpus is not the same bytes."""

    exit_code = 104


class Reject(Exception):
    """One conversation cannot be used; it goes to rejects.jsonl and the run goes on.

    `code` is stable and counted in the ledger (such as "bad_role"), `message` says what was found and where
    within the record (such as 'messages[2].role "assistent" is not a role; did you mean "assistant"?').
    """

    def __init__(self, code: str, message: str):
        super().__init__(message)
        self.code = code
        self.message = message
