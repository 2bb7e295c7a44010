"""`packcorpus pack` and `packcorpus train` start the right commands."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from support.commands import BIN, command
from support.small_corpus import conversations, write_project
from typer.testing import CliRunner

from packcorpus.tasks.cli import start
from packcorpus.tasks.cli.app import app
from packcorpus.tasks.core.errors import InputMissing

PACKCORPUS = str(BIN / "packcorpus")


class _Started(Exception):
    """This error is raised instead of starting a process."""


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the words of the command that was started, without Python's own."""
    words: list[str] = []

    def execv(path: str, arguments: list[str]) -> None:
        assert path == arguments[0] == sys.executable
        assert arguments[1:3] == ["-P", "-m"]
        words.extend(arguments[3:])
        raise _Started

    monkeypatch.setattr(start.os, "execv", execv)
    monkeypatch.setenv("PACKCORPUS_JSON", "0")
    return words


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("pack c.yaml", "luigi --module packcorpus.pipeline PackCorpus --config c.yaml --root ."),
        (
            "pack c.yaml --sequence-length 512 --workers 3 --root x --quiet --json",
            "luigi --module packcorpus.pipeline PackCorpus --config c.yaml --root x"
            " --sequence-length=512 --workers=3 --quiet --json",
        ),
        ("train", "packcorpus.train"),
        ("train small --base-model toy", "packcorpus.train small --base-model toy"),
        ("train --max-steps 5 small --json --root x", "packcorpus.train --max-steps 5 small --root x"),
        ("train --help", "packcorpus.train --help"),
        ("train doctor --help", "packcorpus.train doctor --help"),
        ("train diagnose small --only compile", "packcorpus.train diagnose small --only compile"),
        ("train chat run", "packcorpus.train chat run"),
        ("train merge run --dtype fp16", "packcorpus.train merge run --dtype fp16"),
        ("certify run --merged x", "packcorpus.train certify run --merged x"),
        ("certify --help", "packcorpus.train certify --help"),
    ],
)
def test_each_command_starts_what_it_stands_for(started: list[str], words: str, expected: str) -> None:
    result = CliRunner().invoke(app, words.split())
    assert isinstance(result.exception, _Started), result.output
    assert started == expected.split()
    if words.startswith("train"):
        assert start.os.environ["PACKCORPUS_JSON"] == ("1" if "--json" in words else "0")


def test_packing_needs_a_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    error = CliRunner().invoke(app, ["pack"]).exception
    assert isinstance(error, InputMissing)
    assert "packcorpus init PATH" in str(error)


@pytest.mark.slow
def test_modules_of_the_user_do_not_replace_ours(tmp_path: Path) -> None:
    """Modules in the folder of the user do not replace ours.

    The folder has a train.py, a tasks.py, a pipeline.py, and a luigi.py, which must not run.
    """
    write_project(tmp_path, conversations(20))
    for name in ("train", "tasks", "pipeline", "luigi"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('a module of the user was run')\n")
    packed = command(tmp_path, PACKCORPUS, "pack", "corpus.yaml", "--quiet")
    assert packed.returncode == 0, packed.stderr
    manifest = packed.stdout.splitlines()[-1]
    assert (tmp_path / manifest).is_file()
    verified = command(tmp_path, PACKCORPUS, "verify", "--json")
    assert verified.returncode == 0, verified.stderr
    assert json.loads(verified.stdout)["manifest"] == manifest
    training = command(tmp_path, PACKCORPUS, "train", "--base-model", "toy", "--where")
    assert training.returncode == 0, training.stderr
    assert training.stdout.startswith("data/adapters/small-")
    helped = command(tmp_path, PACKCORPUS, "train", "--help")
    assert helped.returncode == 0
    assert "--learning-rate" in helped.stdout
    wrong = command(tmp_path, PACKCORPUS, "pack", "nope.yaml", "--json")
    assert wrong.returncode == 66
    assert '"E102"' in wrong.stderr + wrong.stdout
    elsewhere = command(tmp_path, PACKCORPUS, "merge", "small")
    assert elsewhere.returncode == 64
    assert "No such command 'merge'; did you mean packcorpus train merge?" in elsewhere.stderr
    config = command(tmp_path, PACKCORPUS, "train", "corpus.yaml", "--base-model", "toy")
    assert config.returncode == 65
    assert f"corpus.yaml: is a config, not a manifest; its corpora: {manifest}" in config.stderr
