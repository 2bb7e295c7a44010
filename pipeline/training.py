"""Starts `python -m train` and waits for it; never imports it.

manifest ─command─▶ python -m train --manifest … ─train─▶ data/adapters/<name>-<key12>/training.json
"""

from __future__ import annotations

import multiprocessing
import os
import shlex
import signal
import subprocess
import sys
from functools import lru_cache
from pathlib import Path
from types import FrameType

import orjson

from pipeline.progress import counters
from tasks.core.error_codes import EXITS
from tasks.core.error_messages import JSON
from tasks.core.errors import Interrupted, PackError


class TrainingFailed(PackError):
    """The training process ended with an error, which it has told; the exit code is its own."""

    def __init__(self, reason: str, message: str, exit_code: int):
        super().__init__(reason, message)
        self.exit_code = exit_code if exit_code in EXITS else PackError.exit_code


def command(manifest: str, root: str, settings: str, options: str) -> tuple[str, ...]:
    """The words of the command; `options` are split as a shell does."""
    config = ("--config", settings) if settings else ()
    return (sys.executable, "-P", "-m", "train", "--manifest", manifest, "--root", root, *config, *shlex.split(options))


@lru_cache(maxsize=16)
def record_of(words: tuple[str, ...]) -> Path:
    """Where the record of this run lies, or will lie. Raises TrainingFailed where the settings are wrong."""
    environment = os.environ | {JSON: "1"}
    asked = subprocess.run(  # noqa: S603 - this Python, and words that no shell sees
        [*words, "--where"], capture_output=True, text=True, check=False, env=environment
    )
    if asked.returncode:
        try:
            error = orjson.loads(asked.stderr.strip().rpartition("\n")[2])["error"]
        except (ValueError, LookupError, TypeError):
            error = {"reason": "training_failed", "message": asked.stderr.strip()}
        raise TrainingFailed(error["reason"], error["message"], asked.returncode)
    return Path(asked.stdout.splitlines()[-1])


def train(words: tuple[str, ...]) -> None:
    """Run the training. A signal to this process goes on to it, and we wait until it has saved what it has.

    Raises KeyboardInterrupt where the training was told to stop, TrainingFailed where it failed.
    """
    told: list[int] = []
    process: subprocess.Popen[bytes] | None = None

    def tell(number: int, frame: FrameType | None) -> None:
        told.append(number)
        if process:
            process.terminate()  # not SIGINT: a terminal sends that to all its processes, and the second ends a step

    handlers = {number: signal.signal(number, tell) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        # The new process begins with both held back, until it can say that it was told to stop.
        signal.pthread_sigmask(signal.SIG_BLOCK, handlers)
        try:
            process = subprocess.Popen(words)  # noqa: S603 - the same words
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, handlers)
        if told:
            process.terminate()
        code = process.wait()
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    if told and (code == Interrupted.exit_code or (code and code not in EXITS)):
        if code == Interrupted.exit_code:
            counters.put(exit_code=code)  # the training has said so, and nobody says it again
        # A worker would show a KeyboardInterrupt with its traceback.
        raise SystemExit(Interrupted.exit_code) if multiprocessing.parent_process() else KeyboardInterrupt
    if code:
        # One of our codes: the training has told its error, and there is one message for one error.
        said = "" if code in EXITS else f"the training ended with exit code {code}, without a message of its own"
        raise TrainingFailed("training_failed", said, code)
