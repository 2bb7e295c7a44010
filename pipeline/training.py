"""Start `python -P -m train` and wait for it, without importing it.

manifest ─command─▶ python -P -m train --manifest … ─train─▶ data/adapters/<name>-<key12>/training.json
                    python -P -m train diagnose …   ─train─▶ data/diagnoses/<name>-<key12>/diagnosis.json
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from functools import lru_cache
from pathlib import Path
from types import FrameType

import orjson

from pipeline.patches import ReportedInterrupt
from tasks.core.error_codes import EXITS
from tasks.core.errors import Interrupted, PackError
from tasks.core.messages import JSON
from tasks.stores.urls import root_of, url_of


class TrainingFailed(PackError):
    """The training process ended with an error that it has reported.

    The exit code of the process is kept if packcorpus defines it.
    """

    def __init__(self, reason: str, message: str, exit_code: int):
        super().__init__(reason, message)
        self.exit_code = exit_code if exit_code in EXITS else PackError.exit_code


def command(verb: str, manifest: str, root: str, settings: str, options: str) -> tuple[str, ...]:
    """Return the words of a command of `train`.

    `verb` is empty for training itself. `options` is split as in a shell. -P keeps the working directory out of
    sys.path, so that a user's own train.py or tasks.py there is not imported.
    """
    config = ("--config", settings) if settings else ()
    named = (verb,) if verb else ()
    # Checkpoints are never written to a bucket, but to the working directory.
    where = ("--manifest", manifest, "--root", "." if url_of(root_of(root)) else root)
    return (sys.executable, "-P", "-m", "train", *named, *where, *config, *shlex.split(options))


@lru_cache(maxsize=16)
def record_of(words: tuple[str, ...]) -> Path:
    """Return the path of this run's record, which may not exist yet.

    Raises TrainingFailed if a setting is invalid.
    """
    environment = os.environ | {JSON: "1"}
    done = subprocess.run(  # noqa: S603 - this Python, and words that no shell sees
        [*words, "--where"], capture_output=True, text=True, check=False, env=environment
    )
    if done.returncode:
        try:
            error = orjson.loads(done.stderr.strip().rpartition("\n")[2])["error"]
        except (ValueError, LookupError, TypeError):
            error = {"reason": "training_failed", "message": done.stderr.strip()}
        raise TrainingFailed(error["reason"], error["message"].split("\n"), done.returncode)
    return Path(done.stdout.splitlines()[-1])


def train(words: tuple[str, ...]) -> None:
    """Run the training, and forward signals to it.

    After a signal, the training saves a checkpoint before it ends. Raises KeyboardInterrupt if the training was stopped
    by a signal. Raises TrainingFailed if it failed.
    """
    received: list[int] = []
    process: subprocess.Popen[bytes] | None = None

    def forward(number: int, frame: FrameType | None) -> None:
        received.append(number)
        if process:
            process.terminate()  # a terminal sends SIGINT to all its processes, and a second SIGINT would cut a step

    handlers = {number: signal.signal(number, forward) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        # The new process starts with both signals blocked, until it can report that it was stopped.
        signal.pthread_sigmask(signal.SIG_BLOCK, handlers)
        try:
            process = subprocess.Popen(words)  # noqa: S603 - the same words
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, handlers)
        if received:
            process.terminate()
        code = process.wait()
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    if received and (code == Interrupted.exit_code or (code and code not in EXITS)):
        raise ReportedInterrupt if code == Interrupted.exit_code else KeyboardInterrupt
    if code:
        # With one of our exit codes, the training has already reported its error.
        message = "" if code in EXITS else f"the training ended with exit code {code} and printed no error"
        raise TrainingFailed("training_failed", message, code)
