"""Modules of a user that are called train, tasks, or pipeline are never ours."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from support.commands import BIN
from support.own_modules import CLONE, RAISING, Install, ok, wheel_of, write_data, write_modules

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
LOAD = "import packcorpus, packcorpus.pipeline\npackcorpus.pack, packcorpus.open, packcorpus.Rows, packcorpus.check\n"


@pytest.fixture(scope="module", params=["clone", "wheel"])
def install(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Install:
    if request.param == "clone":
        return CLONE
    return wheel_of(tmp_path_factory.mktemp("wheel"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_data(tmp_path)


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


def test_the_commands_never_import_them(install: Install, folder: Path) -> None:
    write_modules(folder, RAISING)
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
    ok(install.run(folder, str(BIN / "luigi"), "--module", "pipeline", "PackCorpus", "--config", "my.yaml"))


def test_the_workers_of_ray_never_import_them(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    pytest.importorskip("ray", reason="Ray is not installed; run: pip install 'packcorpus[ray]'")
    from support.servers.ray_cluster import cluster_in

    write_modules(folder, RAISING)
    with cluster_in(tmp_path_factory.mktemp("ray")):
        ok(CLONE.run(folder, "packcorpus", "pack", "my.yaml", "--on", "ray://auto"))
