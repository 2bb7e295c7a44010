"""Show values of the API as text in a terminal, and as HTML in a notebook.

value ─the view of a command─▶ console ─as_text─▶ repr, in color if standard output is a terminal
                                       └─as_html─▶ _repr_html_
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from io import StringIO
from typing import Any

from rich.console import Console

from packcorpus.tasks.cli.console import UNBOUNDED

View = Callable[[Any, Console], None]

HTML_COLUMNS = 110
_HTML = '<pre style="white-space:pre-wrap;overflow-wrap:anywhere;line-height:1.35;font-size:90%">{code}</pre>'


def as_text(view: View, value: Any) -> str:
    """Return what a view prints: in color and wrapped if stdout is a terminal."""
    is_terminal = sys.stdout.isatty() and os.environ.get("TERM") != "dumb"
    width = shutil.get_terminal_size().columns if is_terminal else UNBOUNDED
    return _printed(view, value, is_terminal, width).file.getvalue().rstrip("\n")  # type: ignore[attr-defined]


def as_html(view: View, value: Any) -> str:
    """Return what a view prints as HTML; all content is escaped."""
    return _printed(view, value, True, HTML_COLUMNS).export_html(inline_styles=True, code_format=_HTML)


def _printed(view: View, value: Any, in_color: bool, width: int) -> Console:
    # Without force_jupyter=False, rich displays its output in a notebook instead of returning it.
    console = Console(
        file=StringIO(), record=True, force_terminal=in_color, force_jupyter=False, width=width, markup=False,
        emoji=False, highlight=False,
    )  # fmt: skip
    view(value, console)
    return console
