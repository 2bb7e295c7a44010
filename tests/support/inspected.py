"""What `packcorpus inspect` shows, without starting a process: as text, or as the object that --json prints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rich.console import Console

from tasks.cli.inspect_command import Asked, view


def shown(path: Path, width: int = 100, **asked: Any) -> str:
    console = Console(width=width, markup=False, emoji=False, highlight=False)
    with console.capture() as capture:
        view(path, Asked(**asked), path.parent).show(console)
    return capture.get()


def as_object(path: Path, **asked: Any) -> dict[str, Any]:
    found = view(path, Asked(**asked), path.parent).as_object()
    return dict(json.loads(json.dumps(found, default=str)))
