"""Errors of the API: codes and fixes in tracebacks, and missing extras."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from importlib.util import find_spec
from typing import ParamSpec, TypeVar

from packcorpus.tasks.core.errors import PackError, PartMissing
from packcorpus.tasks.core.messages import advice

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def explained(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Make a traceback of an error end with its code, cause, and fix."""

    @wraps(function)
    def run(*arguments: Arguments.args, **named: Arguments.kwargs) -> Result:
        try:
            return function(*arguments, **named)
        except PackError as error:
            note = f"{error.code}: {advice(error)}".removesuffix(": ")
            if note not in getattr(error, "__notes__", ()):
                error.add_note(note)
            raise

    return run


def needs_extra(library: str, extra: str = "train") -> None:
    """Raise PartMissing if a library of an extra is not installed."""
    if find_spec(library) is None:
        raise library_missing(library, extra)


def library_missing(library: str, extra: str = "train") -> PartMissing:
    return PartMissing("library_missing", f"{library} is not installed; run: pip install 'packcorpus[{extra}]'")
