"""Runs the real commands, as a user does, in a folder of the test's own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import orjson
import pytest

ROOT = Path(__file__).resolve().parents[2]
SHARED = ROOT.parent / "shared"
BIN = Path(sys.executable).parent

needs_shared = pytest.mark.skipif(
    not (SHARED / "corpora").is_dir(), reason="the corpora that are measured on (../shared) are not on this machine"
)


def luigi(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """`luigi --module pipeline PackCorpus …` in `folder`, with the project's luigi.cfg."""
    return command(folder, str(BIN / "luigi"), "--module", "pipeline", "PackCorpus", *arguments, **environment)


def command(folder: Path, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"LUIGI_CONFIG_PATH": str(ROOT / "luigi.cfg")} | environment
    return subprocess.run(words, cwd=folder, env=env, capture_output=True, text=True, timeout=300, check=False)


def pack(folder: Path, *arguments: str, **environment: str) -> Path:
    """Run PackCorpus, which must succeed; the manifest that it names."""
    done = luigi(folder, *arguments, **environment)
    assert done.returncode == 0, done.stderr
    return folder / done.stdout.splitlines()[-1]


def corpus_bytes(manifest: Path) -> dict[str, bytes]:
    """Every file of the corpus that must be the same for the same input, and the manifest."""
    root = manifest.parent.parent
    corpus = root / orjson.loads(manifest.read_bytes())["corpus"]
    found = {p.relative_to(corpus).as_posix(): p.read_bytes() for p in sorted(corpus.rglob("*")) if p.is_file()}
    del found["run.json"]
    return found | {"published": manifest.read_bytes()}


def write_chats(path: Path, count: int, start: int = 0) -> None:
    """`count` short chats, all different, one JSON object a line."""
    with path.open("wb") as file:
        for number in range(start, start + count):
            turns = [
                {"role": "user", "content": f"What is {number} + {number % 7}?" + " Think first." * (number % 5)},
                {
                    "role": "assistant",
                    "content": f"{number} + {number % 7} = {number + number % 7}." * (1 + number % 3),
                },
            ] * (1 + number % 2)
            file.write(orjson.dumps({"messages": turns}) + b"\n")
