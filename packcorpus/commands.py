"""Pack, check, and verify in a process of their own, with results as values.

    pack(config, or settings) ─python -P -m packcorpus pack --json─▶ progress, notes ─▶ stderr
                                                                  ├▶ path of the manifest ─▶ Corpus
                                                                  └▶ {"error": …} ─▶ an exception of packcorpus

A run needs a process without threads, because it forks, and it limits the memory of its process. The caller's process,
perhaps a notebook with a model on a GPU, is left alone.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from signal import Signals
from typing import Any

from packcorpus.corpus import Corpus, open
from packcorpus.failures import explained
from packcorpus.predict import fields_from
from packcorpus.tasks.cli.check_view import show_prediction
from packcorpus.tasks.cli.options import default_config
from packcorpus.tasks.config import load_config
from packcorpus.tasks.core.error_codes import CODES
from packcorpus.tasks.core.errors import (
    Bug,
    Busy,
    DataError,
    InputMissing,
    Interrupted,
    NotReproducible,
    PackError,
    PartMissing,
    StorageError,
    UsageError,
)
from packcorpus.tasks.core.printable import counted, duration, printable
from packcorpus.tasks.dry_run.prediction import Prediction
from packcorpus.tasks.recipe import Recipe
from packcorpus.tasks.storage.layout import Layout
from packcorpus.tasks.stores.urls import root_of
from packcorpus.tasks.verification.verify import Check
from packcorpus.views import as_html, as_text

AnyPath = str | os.PathLike[str]

PYTHON = (sys.executable, "-P", "-m")  # -P keeps the working directory, with the user's own modules, off sys.path
EVERY = {True: 0.5, False: 5.0}  # seconds between two lines of progress: on a terminal, elsewhere
ERRORS = (Bug, Busy, DataError, InputMissing, NotReproducible, PartMissing, StorageError, UsageError)
BY_EXIT_CODE = {error.exit_code: error for error in ERRORS}


@explained
def pack(
    config: AnyPath | None = None,
    *,
    root: AnyPath = ".",
    workers: int | None = None,
    on: str | None = None,
    check_sources: bool = False,
    progress: bool = True,
    **settings: Any,
) -> Corpus:
    """Pack a corpus, and return it.

    `config` is the path of a config. Instead, all [settings](config.md#corpus) can be passed as keywords, with
    `advanced` as a dict; those that are left out have the defaults of a config, and paths are relative to the working
    directory. `root` is the folder, or the URL in a bucket, that gets `data/` and `manifests/`. `workers`, `on`, and
    `check_sources` are options of `packcorpus pack`. Progress and notes go to standard error unless `progress` is
    False.

    The work runs in a process of its own. If the corpus exists, nothing is done; Ctrl-C stops the run, and the same
    call resumes it. Raises UsageError for a wrong setting, InputMissing for a missing file, DataError for data that
    cannot be used, StorageError for a disk or a bucket that fails, and Busy if another run makes the same corpus.

        corpus = packcorpus.pack(sources="chats.jsonl", tokenizer="path/to/model", sequence_length=512, name="mine")
        print(corpus.splits, corpus.manifest.packing_metadata.packing_efficiency)
    """
    options = ["--root", os.fspath(root)]
    options += [] if workers is None else ["--workers", str(workers)]
    options += [] if on is None else ["--on", on]
    options += ["--check-sources"] * check_sources
    with _config_file(config, settings) as path:
        output = _run([*PYTHON, "packcorpus", "pack", str(path), *options, "--json"], progress)
    return open(output.decode().splitlines()[-1], root=root)


@dataclass(frozen=True, repr=False)
class DryRun(Prediction):
    """The prediction of a run, as `packcorpus check` makes it.

    A terminal and a notebook show it as `packcorpus check` does.

    rows, ledger, packing_efficiency        as in the manifest; estimates unless `whole`
    sources, rejects, noticed               of the sampled records
    seconds, bytes_on_disk                  of the run; bytes by kind of file
    run_fails, failures, warnings           bool, and lists of sentences

        dry_run = packcorpus.check(sources="chats.jsonl", tokenizer="path/to/model", sequence_length=512)
        print(dry_run.rows, dry_run.ledger.tokens.trained, dry_run.warnings)
    """

    def __repr__(self) -> str:
        return as_text(show_prediction, self)

    def _repr_html_(self) -> str:
        return as_html(show_prediction, self)


@explained
def check(
    config: AnyPath | None = None,
    *,
    root: AnyPath = ".",
    workers: int = 2,
    batch_sizes: Sequence[int] = (),
    progress: bool = True,
    **settings: Any,
) -> DryRun:
    """Predict the result of `pack` from a sample of every source.

    It takes seconds and writes nothing. Arguments are those of `pack`; the time is predicted for `workers` processes,
    and steps for `batch_sizes` rows per step. Raises the errors of `pack` about settings, sources, tokenizer, and
    template; other reasons why the run would fail are in `failures` of the `DryRun`.

        dry_run = packcorpus.check(sources="chats.jsonl", tokenizer="path/to/model", batch_sizes=[8])
        assert not dry_run.run_fails, dry_run.failures
    """
    with _config_file(config, settings) as path:
        given = json.dumps([str(path), os.fspath(root), workers, list(batch_sizes)])
        values = fields_from(_run([*PYTHON, "packcorpus.predict", given], progress))
        recipe = Recipe(load_config(path), path.parent, Layout(root_of(os.fspath(root))), (), ())
    return DryRun(**values, recipe=recipe, config=Path("settings") if settings else path)


@explained
def verify(corpus: AnyPath | None = None, *, rebuild: bool = False, root: AnyPath = ".") -> list[Check]:
    """Recompute every checksum of a corpus and check every row.

    `corpus` is a Corpus, or anything that `open` takes. With `rebuild`, it is also built again in a temporary folder,
    and every byte is compared. Returns the checks that passed, each with a `name` and a sentence, `found`. Raises
    DataError, InputMissing, or StorageError if the corpus is not as it was made, and NotReproducible if it was rebuilt
    differently.

        for check in packcorpus.verify("mine"):
            print(check.name, check.found)
    """
    named = [] if corpus is None else [os.fspath(corpus)]
    words = ["verify", *named, *["--rebuild"] * rebuild, "--root", os.fspath(root), "--json"]
    return [Check(**values) for values in json.loads(_run([*PYTHON, "packcorpus", *words]))["checks"]]


@contextmanager
def _config_file(config: AnyPath | None, settings: Mapping[str, Any]) -> Iterator[Path]:
    """Yield the path of a config: the given one, or a temporary file of settings."""
    if config is not None and settings:
        raise UsageError("bad_setting", f"pass a config or settings, not both: {config}, and {', '.join(settings)}")
    if not settings:
        yield default_config() if config is None else Path(config)
        return
    if "sources" not in settings:
        raise UsageError("bad_setting", f"sources: missing; the settings are {', '.join(settings)}")
    text = json.dumps(_plain(settings))
    try:
        # In the working directory, because paths in a config are relative to its folder.
        file = tempfile.NamedTemporaryFile("w", dir=".", prefix=".packcorpus-", suffix=".yaml")  # noqa: SIM115
    except OSError as error:
        raise StorageError("cannot_write", f"{Path.cwd()}: settings cannot be written here: {error.strerror}") from None
    with file:
        file.write(text)
        file.flush()
        try:
            yield Path(Path(file.name).name)
        except PackError as error:
            error.message = error.message.replace(Path(file.name).name, "settings")
            raise


def _plain(value: Any) -> Any:
    """Return a value as in a config: paths are strings, and tuples are lists."""
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if not isinstance(value, str | int | float | None):
        raise UsageError("bad_setting", f"{value!r:.80}: is not a value of a setting")
    return value


# -- the other process -------------------------------------------------------------------------------------------------


def _run(words: Sequence[str], progress: bool = False) -> bytes:
    """Run a command and return its standard output. Raises its error."""
    shown, error, others = _Progress(progress), None, list[str]()
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(  # noqa: S603 - this Python, and words that no shell sees
            words, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.PIPE, encoding="utf-8", errors="replace"
        )
        assert process.stderr is not None
        try:
            for line in process.stderr:
                values = _object_in(line)
                error = values.get("error", error)
                if not values:
                    others.append(line.rstrip())
                shown.show(values, line.rstrip())
            code = process.wait()
        except BaseException:  # a notebook stops a cell with KeyboardInterrupt
            process.terminate()
            process.wait()
            raise
        finally:
            shown.end()
            process.stderr.close()
        output.seek(0)
        content = output.read()
    if code:
        last = "".join(content.decode(errors="replace").splitlines()[-1:])
        raise _error_of(code, error or _object_in(last).get("error"), others)
    return content


def _object_in(line: str) -> dict[str, Any]:
    """Return the JSON object of a line, or {} for any other text."""
    with suppress(ValueError):
        values = json.loads(line)
        return values if isinstance(values, dict) else {}
    return {}


def _error_of(code: int, values: Any, others: Sequence[str]) -> PackError:
    """Return the error that a process printed, or how it ended."""
    if not isinstance(values, dict) or values.get("reason") not in CODES:
        if code < 0:
            return Busy("worker_lost", f"the run was killed by {Signals(-code).name}; run it again to resume it")
        return Bug("bug", f"the run ended with exit code {code}: {' / '.join(others[-3:])}")
    kind = Interrupted if values["reason"] == "interrupted" else BY_EXIT_CODE.get(values["exit_code"], PackError)
    named = ("code", "reason", "message", "cause", "fix", "exit_code")
    facts = {name: value for name, value in values.items() if name not in named}
    return kind(values["reason"], values["message"].split("\n"), **facts)


class _Progress:
    """Progress and notes of a run on standard error."""

    def __init__(self, is_on: bool):
        self._is_on, self._shown_at = is_on, time.monotonic()
        self._is_terminal = sys.stderr is not None and sys.stderr.isatty()

    def show(self, values: dict[str, Any], line: str) -> None:
        if not self._is_on or "error" in values:
            return
        if now := values.get("progress"):
            if time.monotonic() - self._shown_at >= EVERY[self._is_terminal]:
                self._shown_at = time.monotonic()
                self._write(_sentence(now), "" if self._is_terminal else "\n")
        elif done := values.get("done"):
            full = f", {done['fill']:.2f} % full" if done.get("fill") else ""
            self._write(f"{counted(done['rows'], 'row')}{full}")
        elif note := values.get("note") or (line if line.startswith("note: ") else ""):
            self._write(str(note))

    def end(self) -> None:
        if self._is_on and self._is_terminal:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()

    def _write(self, text: str, end: str = "\n") -> None:
        start = "\r\x1b[K" if self._is_terminal else ""
        sys.stderr.write(f"{start}{printable(text)}{end}")
        sys.stderr.flush()


def _sentence(now: Mapping[str, Any]) -> str:
    stages = [f"{stage['name']} {stage['done']:,}/{stage['tasks']:,}" for stage in now["stages"]]
    left = [f"{duration(now['seconds_left'])} left"] if now["seconds_left"] is not None else []
    return "  ".join(
        [f"{now['name']}: {duration(now['seconds'])}", *stages, f"{now['tokens'] / 1e6:,.1f} M tokens", *left]
    )
