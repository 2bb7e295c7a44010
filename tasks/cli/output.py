"""Print the result of a command as one JSON object, with a view, or as lines."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import Any


def print_view(value: Any, view: Callable[[Any, Any], None], json_output: bool) -> None:
    """Print a value as JSON, or with a view on a console."""
    if json_output:
        print(value_as_json(value))
        return
    from tasks.cli.views.console import open_console

    view(value, open_console())


def print_lines(value: Any, lines: Callable[[Any], list[str]], json_output: bool) -> None:
    """Print a value as JSON, or as lines of text."""
    if json_output:
        print(value_as_json(value))
        return
    from tasks.core.printable import printable

    for line in lines(value):
        print(printable(line))


def value_as_json(value: Any) -> str:
    """Return a value of tasks.inspection or tasks.dry_run as one line of JSON.

    Fields with repr=False are left out. The line is ASCII, because file names may contain lone surrogates.
    """
    return json.dumps(value, default=_plain)


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value) if field.repr}
    return value.model_dump(mode="json") if hasattr(value, "model_dump") else str(value)
