"""Report invalid Luigi command lines as E101: one message and no traceback."""

from __future__ import annotations

import argparse
import functools
import re
import traceback
from collections.abc import Callable
from typing import Any, NoReturn

import luigi.parameter
from luigi.parameter import ParameterException
from luigi.task_register import Register, TaskClassException

from tasks.core.errors import PackError, UsageError
from tasks.core.messages import to_pack_error
from tasks.core.printable import suggest

HELP = "see luigi --module pipeline PackCorpus --help"


def as_pack_error(error: Exception) -> PackError:
    """Return the error to report for an exception that ended Luigi.

    It is E101 if the exception is about the command line.
    """
    message = " ".join(str(error).split())
    parsing = re.search(r"Error when parsing the default value of '(\w+)'", message)
    if parsing:
        message = f"--{parsing[1].replace('_', '-')}: {error.__cause__}"
    elif not isinstance(error, (ParameterException, TaskClassException)):
        files = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__)]
        # Otherwise, Luigi failed to parse the value of an option.
        if not isinstance(error, ValueError) or luigi.parameter.__file__ not in files:
            return to_pack_error(error)
    return UsageError("bad_command_line", f"{message}; {HELP}")


def with_pack_errors(build: Callable[..., argparse.ArgumentParser]) -> Callable[..., argparse.ArgumentParser]:
    """Make the parsers that Luigi's `build` returns raise UsageError.

    The message suggests the closest known option. Luigi builds a parser after it has loaded this package, and a second
    parser once the task is known. It reads the command line three times and would build both parsers each time, which
    takes 50 ms. Both parsers are therefore cached.
    """

    @functools.cache
    def built(tasks: int, *given: Any, **named: Any) -> argparse.ArgumentParser:
        parser = build(*given, **named)

        def refuse(message: str) -> NoReturn:
            unknown = re.search(r"unrecognized arguments: (--[^ =]+)", message)
            hint = suggest(unknown[1], parser._option_string_actions) if unknown else ""
            raise UsageError("bad_command_line", f"{message}{hint}; {HELP}")

        parser.error = refuse  # type: ignore[method-assign]
        return parser

    return lambda *given, **named: built(len(Register._get_reg()), *given, **named)
