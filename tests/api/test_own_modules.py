"""Modules of a user that are called train, tasks, or pipeline are never ours.

The clone is the editable install of this environment; the wheel is built from a copy and installed in a folder.

    RAISING   each module prints and raises if it is imported: nothing may import it
    OWN       a package, imported by the script itself, before or after packcorpus
    FOLDERS   folders without an __init__.py
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.commands import BIN, ROOT, Done
from support.tokenizer_kinds import kind_path

NAMES = ("train", "tasks", "pipeline")
RAISING = "print('MINE', __name__)\nraise RuntimeError('a module of the user was imported')\n"
USE = "import train, tasks, pipeline.steps\nassert (train.MINE, tasks.MINE, pipeline.steps.MINE) == (1, 1, 1)\n"
API = """
import packcorpus
corpus = packcorpus.pack(sources="chats.jsonl", tokenizer="model", sequence_length=256, name="api", progress=False)
assert len(corpus.rows()) == corpus.splits["train"] > 4
assert corpus.conversation("chats.jsonl:3").messages[0]["role"] == "system"
assert next(iter(corpus.batches(4)))["input_ids"].shape == (4, 256)
assert [check.name for check in packcorpus.verify(corpus)]
assert packcorpus.check(sources="chats.jsonl", tokenizer="model", sequence_length=256).rows
assert packcorpus.open("api").key == corpus.key
print(packcorpus.__file__)
"""
# Loads the modules that pack, read, and order rows, without starting a process.
LOAD = (
    "import packcorpus, packcorpus.pipeline\npackcorpus.pack, packcorpus.open, packcorpus.Collator, packcorpus.check\n"
)


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


@pytest.fixture(scope="module", params=["clone", "wheel"])
def install(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Install:
    if request.param == "clone":
        return CLONE
    return wheel_of(tmp_path_factory.mktemp("wheel"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    shutil.copy(ROOT / "data" / "sample" / "chat.jsonl", tmp_path / "chats.jsonl")
    shutil.copytree(kind_path("hf_byte_level"), tmp_path / "model")
    (tmp_path / "packcorpus").mkdir()  # a folder of data, or the clone itself
    return tmp_path


def write_modules(folder: Path, text: str) -> None:
    """Write train.py, tasks.py, and the package pipeline with the module steps."""
    (folder / "pipeline").mkdir()
    for name in ("train.py", "tasks.py", "pipeline/__init__.py", "pipeline/steps.py"):
        (folder / name).write_text(text)


def ok(done: Done) -> str:
    assert done.returncode == 0, done.stdout + done.stderr
    assert "MINE" not in done.stdout + done.stderr
    return done.stdout


def test_the_api_never_imports_them(install: Install, folder: Path) -> None:
    write_modules(folder, RAISING)
    (folder / "script.py").write_text(API)
    loaded = ok(install.run(folder, sys.executable, "script.py")).splitlines()[-1]
    assert Path(loaded).parent.parent == install.path


@pytest.mark.parametrize("kind", ["modules", "folders"])
def test_a_script_imports_its_own(install: Install, folder: Path, kind: str) -> None:
    """It imports them before packcorpus, in another process after it, and is train.py."""
    write_modules(folder, "MINE = 1\n")
    use = USE
    if kind == "folders":  # namespace packages
        (folder / "pipeline" / "__init__.py").unlink()
        for name in ("train", "tasks"):
            (folder / name).mkdir()
            (folder / f"{name}.py").rename(folder / name / "inner.py")
            use = use.replace(f"{name},", f"{name}.inner,").replace(f"{name}.MINE", f"{name}.inner.MINE")
    (folder / "before.py").write_text(use + LOAD)
    (folder / "after.py").write_text(LOAD + use)
    ok(install.run(folder, sys.executable, "before.py"))
    ok(install.run(folder, sys.executable, "after.py"))
    (folder / "train.py").write_text(LOAD)
    ok(install.run(folder, sys.executable, "train.py"))


def test_cells_of_a_notebook(folder: Path) -> None:
    """A kernel runs cells in one namespace, with "" first on sys.path."""
    write_modules(folder, RAISING)
    call = 'corpus = packcorpus.pack(sources="chats.jsonl", tokenizer="model", name="api")'
    cells = ["import packcorpus", call, "corpus._repr_html_()", "corpus.conversation(0)._repr_html_()"]
    kernel = (
        "import json, sys\n"
        "sys.path.insert(0, '')\n"
        "cells = {}\n"
        "for cell in json.loads(sys.argv[1]):\n"
        "    exec(compile(cell, '<cell>', 'single'), cells)\n"
    )
    assert "<pre" in ok(CLONE.run(folder, sys.executable, "-P", "-c", kernel, json.dumps(cells)))


def test_children_of_multiprocessing(folder: Path) -> None:
    """A run with two workers, and processes that get rows and import the main module."""
    write_modules(folder, RAISING)
    (folder / "main.py").write_text(
        "import multiprocessing, packcorpus\n"
        "def length(rows):\n"
        "    return len(rows), int(rows[0]['input_ids'][0])\n"
        "if __name__ == '__main__':\n"
        "    corpus = packcorpus.pack(sources='chats.jsonl', tokenizer='model', name='api', workers=2)\n"
        "    for way in ('spawn', 'fork'):\n"
        "        with multiprocessing.get_context(way).Pool(1) as pool:\n"
        "            assert pool.map(length, [corpus.rows()]) == [length(corpus.rows())]\n"
    )
    ok(CLONE.run(folder, sys.executable, "main.py"))


CONFIG = '{"sources": "chats.jsonl", "tokenizer": "model", "name": "mine"}'


def test_the_commands_never_import_them(install: Install, folder: Path) -> None:
    write_modules(folder, RAISING)
    (folder / "my.yaml").write_text(CONFIG)
    manifest = ok(install.run(folder, "packcorpus", "pack", "my.yaml")).strip()
    luigi = [str(BIN / "luigi"), "--module", "packcorpus.pipeline", "PackCorpus", "--config", "my.yaml"]
    assert ok(install.run(folder, *luigi)).strip() == manifest
    # By the name `pipeline`, luigi would find the package of the user if the folder were on sys.path.
    luigi[2] = "pipeline"
    assert ok(install.run(folder, *luigi, PYTHONPATH=str(install.path))).strip() == manifest
    ok(install.run(folder, sys.executable, "-m", "packcorpus", "train", "--help"))
    if install is not CLONE:
        return
    for words in (
        ("init", "chats.jsonl"), ("check", "my.yaml"), ("inspect", "--at", "chats.jsonl:3"), ("list",), ("report",),
        ("verify",), ("repair",), ("export", "--to", "trl"), ("certify", "--help"), ("diff", "mine", "mine"),
    ):  # fmt: skip
        ok(install.run(folder, "packcorpus", *words))


def test_luigi_finds_ours_next_to_a_folder_without_an_init_file(install: Install, folder: Path) -> None:
    (folder / "pipeline").mkdir()
    (folder / "pipeline" / "steps.py").write_text(RAISING)
    (folder / "my.yaml").write_text(CONFIG)
    ok(install.run(folder, str(BIN / "luigi"), "--module", "pipeline", "PackCorpus", "--config", "my.yaml"))
