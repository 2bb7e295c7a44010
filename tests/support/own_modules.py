"""Modules of a user that have our names, and installed copies of packcorpus.

RAISING   prints and raises if it is imported
CLONE     the editable install of this environment
wheel_of  the wheel, built from a copy and installed in a folder
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from support.commands import BIN, ROOT, Done
from support.tokenizer_kinds import kind_path

RAISING = "print('MINE', __name__)\nraise RuntimeError('a module of the user was imported')\n"
CONFIG = '{"sources": "chats.jsonl", "tokenizer": "model", "name": "mine"}'


@dataclass(frozen=True)
class Install:
    """An installed packcorpus: `path` is on sys.path, and `bin` has its command."""

    path: Path
    bin: Path

    def run(self, folder: Path, *words: str, **environment: str) -> Done:
        """Run a command in a folder that is on sys.path, too."""
        changes = {"PYTHONPATH": f".{os.pathsep}{self.path}", "OMP_NUM_THREADS": "1"} | environment
        command = [str(self.bin / words[0]) if words[0] == "packcorpus" else words[0], *words[1:]]
        return subprocess.run(
            command, cwd=folder, env=os.environ | changes, capture_output=True, text=True, timeout=600, check=False
        )


CLONE = Install(ROOT / "src", BIN)


def wheel_of(folder: Path) -> Install:
    """Build the wheel from a copy, as of a clean clone, and install it in a folder."""
    copy, installed = folder / "clone", folder / "installed"
    copy.mkdir()
    for name in ("packcorpus", "pipeline", "src", "tasks", "train"):
        shutil.copytree(
            ROOT / name, copy / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info")
        )
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    offline = ["--no-deps", "--no-index"]
    for words in (
        ["wheel", "--no-build-isolation", *offline, "--wheel-dir", str(folder), str(copy)],
        ["install", *offline, "--target", str(installed), "--find-links", str(folder), "packcorpus"],
    ):
        done = subprocess.run([*pip, *words], cwd=folder, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    return Install(installed, installed / "bin")


def write_data(folder: Path) -> Path:
    """Write chats.jsonl, the tokenizer `model`, and my.yaml, and return the folder."""
    shutil.copy(ROOT / "data" / "sample" / "chat.jsonl", folder / "chats.jsonl")
    shutil.copytree(kind_path("hf_byte_level"), folder / "model")
    (folder / "my.yaml").write_text(CONFIG)
    (folder / "packcorpus").mkdir()  # a folder of data, or the clone itself
    return folder


def write_modules(folder: Path, text: str) -> None:
    """Write train.py, tasks.py, and the package pipeline with the module steps."""
    (folder / "pipeline").mkdir()
    package = folder / "pipeline"
    for file in (folder / "train.py", folder / "tasks.py", package / "__init__.py", package / "steps.py"):
        file.write_text(text)


def ok(done: Done) -> str:
    assert done.returncode == 0, done.stdout + done.stderr
    assert "MINE" not in done.stdout + done.stderr
    return done.stdout
