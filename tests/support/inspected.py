"""Output of `packcorpus inspect` and `report`, without starting a process.

It is returned as text, or as the object that --json prints.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from packcorpus.tasks.cli.options import value_as_json
from packcorpus.tasks.cli.questions import Question, answer, render
from packcorpus.tasks.report import report


def rendered(value: Any, renderer: Callable[[Any, Console], None], width: int = 100, terminal: bool = False) -> str:
    """Return the text that a view prints, in colors if `terminal` is set."""
    file = StringIO()
    console = Console(
        file=file, width=width, force_terminal=terminal, color_system="standard" if terminal else None,
        markup=False, emoji=False, highlight=False,
    )  # fmt: skip
    renderer(value, console)
    return file.getvalue()


def shown(path: Path, width: int = 100, terminal: bool = False, **asked: Any) -> str:
    return rendered(answer(path, Question(**asked), _root_of(path)), render, width, terminal)


def as_object(path: Path, **asked: Any) -> dict[str, Any]:
    return dict(json.loads(value_as_json(answer(path, Question(**asked), _root_of(path)))))


def _root_of(path: Path) -> Path:
    """Return the root of a config (its folder) or of a manifest (one folder above)."""
    return path.parent if path.suffix == ".yaml" else path.parent.parent


def page_of(path: Path, output: Path) -> str:
    """Write the report of a corpus without its plots, and return the page.

    Plots take most of the time of a report.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(report, "_plots", lambda *_: defaultdict(str))
        return report.write_report(path, output)[0].read_text(encoding="utf-8")
