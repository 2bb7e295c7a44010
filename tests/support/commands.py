"""Run commands as a user does, in the folder of a test.

packcorpus(folder, "verify") ─┐
luigi(folder, …), pack(…) ────┴▶ command ─▶ a fork of support/servers/command_server.py, or a separate process
started(folder, "-m", "packcorpus.train", …) ─▶ a fork of that server whose stderr can be read while it runs
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import orjson
import pytest

ROOT = Path(__file__).resolve().parents[2]
SHARED = ROOT.parent / "shared"
BIN = Path(sys.executable).parent
LIMIT = 300  # seconds

# For runs of training whose picture no test reads: drawing it takes half of the CPU time of a run of a few steps.
NO_PICTURE = {"TEST_WITHOUT_PICTURE": "1"}

needs_shared = pytest.mark.skipif(not (SHARED / "corpora").is_dir(), reason="needs ../shared/corpora")

Done = subprocess.CompletedProcess[str]


def luigi(folder: Path, *arguments: str, **environment: str) -> Done:
    """Run `luigi --module pipeline PackCorpus …` with the project's luigi.cfg."""
    return command(folder, str(BIN / "luigi"), "--module", "pipeline", "PackCorpus", *arguments, **environment)


def packcorpus(folder: Path, *words: str | Path, **environment: str) -> Done:
    """Run `packcorpus …` in `folder`."""
    return command(folder, str(BIN / "packcorpus"), *map(str, words), **environment)


def command(folder: Path, *words: str, **environment: str) -> Done:
    """Run a command, in a fork of the command server if possible.

    Commands of other programs and commands with a changed interpreter run in a separate process.
    """
    changes_start = any(name.startswith(("PYTHON", "LUIGI", "LD_", "OMP_")) for name in environment)
    ours = words[0] in (str(BIN / "luigi"), str(BIN / "packcorpus"))
    module = words[2].removeprefix("packcorpus.").partition(".")[0] if words[:2] == (sys.executable, "-m") else ""
    if changes_start or not (ours or module in ("luigi", "tasks", "torch", "train")):
        return process(folder, *words, **environment)
    if module in ("torch", "train"):
        return in_fork_with_torch(folder, *words[1:], **environment)
    return _server("tasks").run(folder, words, _environment(environment))


def in_fork_with_torch(folder: Path, *words: str, **environment: str) -> Done:
    """Run `python WORDS` or `luigi WORDS` in a fork of a process with torch.

    The process has loaded torch and all modules of `train`.
    """
    return _server("train").run(folder, _with_program(words), _environment(environment))


def _with_program(words: tuple[str, ...]) -> tuple[str, ...]:
    return words if words[0] == str(BIN / "luigi") else (sys.executable, *words)


class End(NamedTuple):
    """How a command ended: `wait_for` of support/servers/command_server.py."""

    code: int
    seconds: float
    memory: int


class Started(NamedTuple):
    """A running command.

    `pid` is its process id, `stderr` is its standard error, and `end` waits for its end.
    """

    pid: int
    stderr: TextIO
    end: Callable[[], End]

    def wait(self) -> int:
        """Wait for the end of the command and return its exit code."""
        return self.end().code


@contextmanager
def started(folder: Path, *words: str, package: str = "train", **environment: str) -> Iterator[Started]:
    """Start `python WORDS` or `luigi WORDS` in a fork, without waiting for its end.

    The fork is the leader of a process group, and its parent has loaded `package`. The caller must wait for it. With
    `train`, which loads torch, the training that `luigi` starts is a fork, too.
    """
    server = _server(package)
    with tempfile.TemporaryDirectory() as name:
        pipe = Path(name) / "stderr"
        os.mkfifo(pipe)
        try:
            pid = server.start(folder, _with_program(words), _environment(environment), os.devnull, str(pipe))
            with pipe.open() as stderr:
                yield Started(pid, stderr, server.end)
        except BaseException:
            server.stop()
            raise


def process(folder: Path, *words: str, **environment: str) -> Done:
    """Run a command in a separate process."""
    env = _environment(environment)
    return subprocess.run(words, cwd=folder, env=env, capture_output=True, encoding="utf-8", timeout=LIMIT, check=False)


def _environment(changes: dict[str, str]) -> dict[str, str]:
    return os.environ | {"LUIGI_CONFIG_PATH": str(ROOT / "luigi.cfg")} | changes


class _Server:
    """Client of support/servers/command_server.py.

    Each process of the tests has its own.
    """

    def __init__(self, package: str) -> None:
        self._changes: dict[str, str] = {}
        self._command = 0  # the process group of the command that runs
        if package == "train":  # a fork has no threads of its parent, and cannot use a GPU that its parent has seen
            self._changes = {
                "OMP_NUM_THREADS": "1",
                "CUDA_VISIBLE_DEVICES": "",
                "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}",
            }
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("servers") / "command_server.py"), package],
            cwd=tempfile.gettempdir(), env=_environment(self._changes), stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            bufsize=0, start_new_session=True,
        )  # fmt: skip
        atexit.register(self.stop)

    def run(self, folder: Path, words: tuple[str, ...], environment: dict[str, str]) -> Done:
        with tempfile.NamedTemporaryFile() as out, tempfile.NamedTemporaryFile() as err:
            self.start(folder, words, environment, out.name, err.name)
            return subprocess.CompletedProcess(words, self.end().code, out.read().decode(), err.read().decode())

    def start(self, folder: Path, words: tuple[str, ...], environment: dict[str, str], stdout: str, stderr: str) -> int:
        """Start a command and return its process id."""
        request = {"words": words, "folder": str(folder), "environment": environment | self._changes}
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request | {"stdout": stdout, "stderr": stderr}).encode() + b"\n")
        self._command = self._answer()
        return self._command

    def end(self) -> End:
        """Wait for the end of the command that was started."""
        end, self._command = End(*self._answer()), 0
        return end

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], LIMIT)[0]:
            self.stop()
            raise subprocess.TimeoutExpired(self._process.args, LIMIT)
        return json.loads(self._process.stdout.readline())

    def stop(self) -> None:
        _server.cache_clear()
        for group in filter(None, (self._process.pid, self._command)):
            with suppress(ProcessLookupError):
                os.killpg(group, signal.SIGKILL)
        self._process.wait()


@functools.cache
def _server(package: str) -> _Server:
    return _Server(package)


def pack(folder: Path, *arguments: str, **environment: str) -> Path:
    """Run PackCorpus, which must succeed, and return its manifest."""
    done = luigi(folder, *arguments, **environment)
    assert done.returncode == 0, done.stderr
    return folder / done.stdout.splitlines()[-1]


def corpus_bytes(manifest: Path) -> dict[str, bytes]:
    """Return the manifest and every file of the corpus, by name.

    They must be the same for the same input. run.json differs between runs and is left out.
    """
    root = manifest.parent.parent
    corpus = root / orjson.loads(manifest.read_bytes())["corpus"]
    found = {p.relative_to(corpus).as_posix(): p.read_bytes() for p in sorted(corpus.rglob("*")) if p.is_file()}
    del found["run.json"]
    return found | {"published": manifest.read_bytes()}


def write_chats(path: Path, count: int, start: int = 0) -> None:
    """Write `count` different short chats, one JSON object per line."""
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
