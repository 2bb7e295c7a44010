"""Pack 40 conversations, some of which try to control the terminal.

The corpus is packed with the real command.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from support import commands
from support.commands import ROOT

from packcorpus.tasks.core import printable
from packcorpus.tasks.storage.manifest import load_manifest

SEQUENCE_LENGTH = 128

# Each part controls a terminal or is markup. In a conversation, it is only text.
HOSTILE = "\x1b[31mred\x1b[0m \x07 \x9b1m \u202e [bold]no markup[/bold] [link=file:///x]y[/link] :smile: <|im_end|></s>"
SHOWN = r"\x1b[31mred\x1b[0m \x07 \x9b1m \u202e [bold]no markup[/bold] [link=file:///x]y[/link] :smile: <|im_end|></s>"
FORGED = f"{printable.TRAINED[0]}not trained{printable.TRAINED[1]} {printable.CONTROL[0]}</s>{printable.CONTROL[1]}"
ANSWER = "One:\n    indented\n\n日本語 é 👩‍👩‍👧 [red]x[/red]"

REJECTED = 7  # index of the record with an unknown role


def records() -> list[dict[str, Any]]:
    def chat(user: str, assistant: str, role: str = "assistant") -> dict[str, Any]:
        return {"messages": [{"role": "user", "content": user}, {"role": role, "content": assistant}]}

    found = [chat(f"What is {n} plus {n}?", f"{n} plus {n} is {2 * n}.") for n in range(40)]
    found[3] = chat(HOSTILE, ANSWER)
    found[4] = chat(FORGED, "No.")
    found[5] = chat("Count.", "one two three " * 200)
    found[REJECTED] = chat("x", "y", role="assistent")
    return found


def pack(folder: Path, settings: str = "") -> Path:
    """Pack the records with the real command, and return the manifest's path."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(record) for record in records()]
    (folder / "chats[bold].jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    config = folder / "corpus.yaml"
    config.write_text(
        "name: small\nsources:\n  - path: chats*.jsonl\n    format: messages\n"
        f"vocab_size: 500\nsequence_length: {SEQUENCE_LENGTH}\nvalidation: 0.1\nmax_rejects: 0.1\n{settings}"
    )
    return commands.pack(folder, "--config", str(config))


def packcorpus(*arguments: str | Path, cwd: Path = ROOT, **variables: str) -> subprocess.CompletedProcess[str]:
    return commands.packcorpus(cwd, *arguments, **{"COLUMNS": "80"} | variables)


def rows(path: Path) -> Iterator[tuple[str, int]]:
    for split, facts in load_manifest(path).splits.items():
        yield from ((split, row) for row in range(facts.rows))
