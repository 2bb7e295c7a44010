"""Refresh the command output in README.md and in the pages of docs/.

    python docs/capture.py [--check] [FILE…]

A block is captured if a marker comment precedes it. The marker selects lines of output per command, separated by `|`.
Without a selection all lines are kept; 0 keeps none. A gap between kept lines is shown as an ellipsis:

    <!-- capture: 1..4,-1 -->
    ```console
    $ packcorpus check my.yaml
    …
    ```

The commands of one page run in order in one temporary folder that holds a copy of the bundled sample. A comment
`<!-- capture setup: COMMAND -->` runs a command whose output is not shown. Run times and versions differ between
machines, so this is not part of the build: run it after a change of wording and review the diff.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent
MARKER = re.compile(
    r"<!-- capture setup: ([^\n]*?) -->|<!-- capture(?:: ([^>\n]*?))? -->\n( *)```console\n(.*?)\n *```", re.S
)
# A slow machine prints lines of progress, which a fast one does not.
PROGRESS = re.compile(r"[\d.]+ s  .*parts \d+/\d+")
ENVIRONMENT = {"COLUMNS": "80", "NO_COLOR": "1", "TERM": "dumb", "OMP_NUM_THREADS": "1"}


def run(command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run one command line in `folder`; stdout has all of its output."""
    environment = os.environ | ENVIRONMENT | {"PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}"}
    return subprocess.run(  # noqa: S602 - the commands of our own pages
        command, shell=True, cwd=folder, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )


def lines_of(command: str, folder: Path) -> list[str]:
    """Return what a command prints, without progress, and with relative paths."""
    lines = run(command, folder).stdout.replace(f"{folder}/", "").rstrip().splitlines()
    return [line.rstrip() for line in lines if not PROGRESS.match(line)]


def select(lines: list[str], selection: str) -> list[str]:
    """Return the selected lines, with an ellipsis in each gap.

    A selection such as "1..4,-1" counts lines from 1, or from the end if a number is negative.
    """
    if selection.strip() == "0":
        return []
    chosen: set[int] = set()
    for part in filter(None, selection.replace(" ", "").split(",")):
        first, _, last = part.partition("..")
        start, stop = int(first), int(last or first)
        start, stop = (n if n > 0 else len(lines) + 1 + n for n in (start, stop))
        chosen.update(range(start, stop + 1))
    if not chosen:
        return lines
    kept: list[str] = []
    for number, line in enumerate(lines, start=1):
        if number in chosen:
            kept.append(line)
        elif kept and kept[-1] != "…" and number < max(chosen):
            kept.append("…")
    return kept


def refresh(page: Path) -> str:
    """Run the commands of all captured blocks of a page, and return its new text."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name).resolve()
        shutil.copytree(ROOT / "data" / "sample", folder / "data" / "sample")
        shutil.copy(ROOT / "luigi.cfg", folder)

        def block(found: re.Match[str]) -> str:
            setup, selection, indent, body = found.groups()
            if setup is not None:
                run(setup, folder)
                return found[0]
            commands = [line.strip()[2:] for line in body.splitlines() if line.strip().startswith("$ ")]
            selections = [*(selection or "").split("|"), *([""] * len(commands))]
            lines: list[str] = []
            for command, chosen in zip(commands, selections, strict=False):
                lines += [f"$ {command}", *select(lines_of(command, folder), chosen)]
            text = "\n".join(f"{indent}{line}".rstrip() for line in lines)
            marker = f"<!-- capture: {selection} -->" if selection else "<!-- capture -->"
            return f"{marker}\n{indent}```console\n{text}\n{indent}```"

        return MARKER.sub(block, page.read_text(encoding="utf-8"))


def main() -> int:
    names = [word for word in sys.argv[1:] if not word.startswith("--")]
    pages = [Path(name) for name in names] or [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    changed = 0
    for page in pages:
        if "<!-- capture" not in page.read_text(encoding="utf-8"):
            continue
        text = refresh(page)
        if text != page.read_text(encoding="utf-8"):
            changed += 1
            print(shlex.quote(str(page)), "changed")
            if "--check" not in sys.argv:
                page.write_text(text, encoding="utf-8")
    return changed if "--check" in sys.argv else 0


if __name__ == "__main__":
    sys.exit(main())
