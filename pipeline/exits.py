"""How a run ends: the exit code of what went wrong, one message for it and no traceback.

PackError in a task ─reporting─▶ one message, its exit code ─▶ kept in the counters ─▶ what luigi exits with
what Luigi raises at a command line that it cannot read ─▶ the same, as E101
Ctrl-C, SIGTERM ─signals─▶ KeyboardInterrupt, in the parent alone ─▶ one message, when all children have left
"""

from __future__ import annotations

import argparse
import logging
import os
import re
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, NoReturn
from zlib import crc32

import luigi
import luigi.parameter
import luigi.retcodes
from luigi.cmdline_parser import CmdlineParser
from luigi.parameter import ParameterException
from luigi.task_register import TaskClassException

from pipeline import signals
from pipeline.progress import counters, display
from tasks.core.error_messages import DEBUG, foreseen, is_on, told
from tasks.core.errors import Interrupted, PackError, StorageError, UsageError
from tasks.core.suggest import suggest

_told: set[str] = set()


def begin() -> None:
    """Forget an earlier run of this process."""
    signals.begin()
    _told.clear()


# What went wrong is said once


@contextmanager
def reporting() -> Iterator[None]:
    """Tell an error, once, as a message and before Luigi gets to see it: Luigi would show a traceback."""
    try:
        yield
    except Exception as error:
        failed = foreseen(error)
        if not str(failed):  # told by another process
            counters.put(exit_code=failed.exit_code)
        elif str(failed) not in _told:
            _told.add(str(failed))
            before, said = counters.of_run("exit_code"), float(crc32(str(failed).encode()))
            # A disk that is full refuses every worker, each another file: the first says it for all. So it is with a
            # source that changed, of which there are many parts.
            again = said == counters.of_run("told") or before == failed.exit_code == StorageError.exit_code
            counters.put(exit_code=failed.exit_code, told=said)
            if not again:
                display.write(told(failed))
        raise failed from error.__cause__ if failed is error else error


def tell(error: PackError) -> None:
    display.write(told(error))
    counters.put(exit_code=error.exit_code)


class _ExitCode(int):
    """Luigi multiplies each of its codes with whether it applies, when all has ended; a PackError has its own."""

    def __mul__(self, applies: int) -> int:
        return (int(counters.of_run("exit_code")) or int(self)) * applies


def use_own_exit_codes() -> None:
    codes = luigi.retcodes.retcode()  # Luigi has one of each config
    for name, _ in codes.get_params():
        setattr(codes, name, _ExitCode(getattr(codes, name)))


# Mistakes on the command line of Luigi, and what else would be a traceback


def _on_uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    display.stop()
    if issubclass(kind, KeyboardInterrupt):
        signals.end_children()
        if counters.of_run("exit_code") != Interrupted.exit_code:  # a training has said so, with the step
            tell(Interrupted("interrupted", "interrupted; the same command goes on from here"))
        os._exit(Interrupted.exit_code)
    elif is_on(DEBUG) or not isinstance(error, Exception):
        sys.__excepthook__(kind, error, trace)
    else:
        failed = _of_luigi(error)
        tell(failed)
        # Python would end with 1; nothing runs and nothing is held while the command line is read.
        sys.stdout.flush()
        os._exit(failed.exit_code)


def _of_luigi(error: Exception) -> PackError:
    """What Luigi raises at a command line that it cannot read, as a message of ours."""
    said = " ".join(str(error).split())
    parsing = re.search(r"Error when parsing the default value of '(\w+)'", said)
    if parsing:
        said = f"--{parsing[1].replace('_', '-')}: {error.__cause__}"
    elif not isinstance(error, (ParameterException, TaskClassException)) and not _while_parsing(error):
        return foreseen(error)
    return UsageError("bad_command_line", f"{said}; see luigi --module pipeline PackCorpus --help")


def _while_parsing(error: Exception) -> bool:
    """Whether it was Luigi that could not read the value of an option."""
    frames = traceback.walk_tb(error.__traceback__)
    return isinstance(error, ValueError) and any(
        frame.f_code.co_filename == luigi.parameter.__file__ for frame, _ in frames
    )


def tell_unknown_options() -> None:
    """argparse would show all options of Luigi and exit with 2. The parser is Luigi's own; it is made anew after this
    package was loaded, and again once the task is known."""
    build = CmdlineParser._build_parser

    def with_our_errors(*given: Any, **named: Any) -> argparse.ArgumentParser:
        parser: argparse.ArgumentParser = build(*given, **named)

        def refuse(message: str) -> NoReturn:
            wrong = re.search(r"unrecognized arguments: (--[^ =]+)", message)
            hint = suggest(wrong[1], parser._option_string_actions) if wrong else ""
            raise UsageError("bad_command_line", f"{message}{hint}; see luigi --module pipeline PackCorpus --help")

        parser.error = refuse  # type: ignore[method-assign]
        return parser

    CmdlineParser._build_parser = staticmethod(with_our_errors)


sys.excepthook = _on_uncaught


class _WithoutOurErrors(logging.Filter):
    """Luigi logs a failing task with its traceback; a PackError has said what a user needs to know, and who pressed
    Ctrl-C knows it. What ends Luigi itself is told here."""

    def filter(self, record: logging.LogRecord) -> bool:
        if is_on(DEBUG):
            return True
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, (PackError, SystemExit)):
            return False
        if isinstance(error, Exception) and record.getMessage() == "Uncaught exception in luigi":
            failed = _of_luigi(error)
            tell(failed)
            luigi.retcodes.retcode().unhandled_exception = failed.exit_code
            return False
        message = record.getMessage()
        if "Traceback" in message and any(text in message for text in _told):
            return False
        display.make_room()
        return True


logging.getLogger("luigi-interface").addFilter(_WithoutOurErrors())
