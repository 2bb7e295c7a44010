"""Steps for tests of engines: of a corpus, failing, or losing their worker."""

from __future__ import annotations

import errno
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support.small_corpus import one_second

from packcorpus.pipeline.engines import Engine
from packcorpus.tasks.core.errors import DataError
from packcorpus.tasks.recipe import Recipe
from packcorpus.tasks.storage.files import atomic_file, has_artifact, write_receipt
from packcorpus.tasks.work import Plan, Publish, TokenizePart, TrainTokenizer, Work, WriteShard


def steps_of(recipe: Recipe) -> list[Work]:
    """Return all steps of a corpus, in order."""
    return [work.decided() for kind in (TokenizePart, WriteShard) for work in kind.all_of(recipe)]


def pack_on(engine: Engine, recipe: Recipe) -> Path:
    """Do all work with an engine, and return the published manifest."""
    for training in TrainTokenizer.all_of(recipe):
        training.run()
    for kind, then in ((TokenizePart, Plan(recipe)), (WriteShard, Publish(recipe, one_second))):
        steps = [work.decided() for work in kind.all_of(recipe)]
        assert sorted(index for index, _ in engine.map(steps)) == list(range(len(steps)))
        then.run()
    return recipe.published


@dataclass(frozen=True)
class Marked(Work):
    """A step that writes its number, and one line to FOLDER/NUMBER for each attempt."""

    recipe: Path  # its folder
    number: int

    are_steps = True

    @property
    def folder(self) -> Path:
        return self.recipe

    @property
    def place(self) -> str:
        return f"chat.jsonl:{self.number + 1}"

    @property
    def attempts(self) -> int:
        mark = self.folder / str(self.number)
        return len(mark.read_bytes()) if mark.exists() else 0

    def outputs(self) -> tuple[Path, Path]:
        return self.folder / f"{self.number}.out", self.folder / f"{self.number}.json"

    def is_done(self, check_content: bool = False) -> bool:
        return has_artifact(*self.outputs())

    def run(self) -> dict[str, Any]:
        with (self.folder / str(self.number)).open("ab") as file:
            file.write(b"x")
        self.do()
        self.outputs()[0].write_bytes(b"1")
        write_receipt(self.outputs()[1], {"bytes": 1, "tokens": self.number})
        return {"tokens": self.number}

    def do(self) -> None:
        pass


@dataclass(frozen=True)
class Failing(Marked):
    fails: bool

    def outputs(self) -> tuple[Path, Path]:
        # Outside the folder that counts attempts.
        return self.folder.parent / f"{self.number}.out", self.folder.parent / f"{self.number}.json"

    def do(self) -> None:
        if self.fails:
            raise DataError("empty_source", f"{self.place}: is bad", line=3)
        time.sleep(0.1)  # the error of another process arrives in the meantime


@dataclass(frozen=True)
class Dying(Marked):
    """A step that kills its process in the first `deaths` attempts."""

    deaths: int

    def do(self) -> None:
        if self.attempts <= self.deaths:
            os.kill(os.getpid(), signal.SIGKILL)


@dataclass(frozen=True)
class Slow(Marked):
    seconds: float

    def do(self) -> None:
        (self.folder / f"{self.number}.pid").write_text(str(os.getpid()))
        time.sleep(self.seconds)


@dataclass(frozen=True)
class Deaf(Slow):
    """A step that blocks signals, like a step that waits for a lock in C."""

    def do(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT, signal.SIGTERM])
        super().do()


@dataclass(frozen=True)
class Meeting(Marked):
    """A step that waits until `count` steps of its folder have begun."""

    count: int

    def do(self) -> None:
        deadline = time.monotonic() + 300
        while not all((self.folder / str(number)).exists() for number in range(self.count)):
            assert time.monotonic() < deadline, "another step does not begin"
            time.sleep(0.01)


@dataclass(frozen=True)
class Writing(Marked):
    """A step that takes `seconds` in the middle of writing its output."""

    seconds: float

    def run(self) -> dict[str, Any]:
        with (self.folder / str(self.number)).open("ab") as file:
            file.write(b"x")
        with atomic_file(self.outputs()[0]) as out:
            out.write(b"1")
            out.flush()
            time.sleep(self.seconds)
        write_receipt(self.outputs()[1], {"bytes": 1, "tokens": self.number})
        return {"tokens": self.number}


@dataclass(frozen=True)
class Canceled(Marked):
    """A step that does not end by itself, and notes the exception that stops it."""

    def do(self) -> None:
        try:
            while True:
                time.sleep(0.01)
        except BaseException as error:
            (self.folder / f"{self.number}.stopped").write_text(type(error).__name__)
            raise


@dataclass(frozen=True)
class DiskFull(Marked):
    """A step that finds the disk of its worker full."""

    def do(self) -> None:
        with atomic_file(self.outputs()[0]) as out:
            out.write(b"1")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
