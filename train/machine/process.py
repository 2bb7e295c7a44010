"""Start, end, and replace the processes of a run. This module does not load torch.

    packcorpus train ─install─▶ libraries, model, proof ─▶ steps (Interruption) ─▶ results ─leave─▶ exit
                     └(gpus > 1) launch─▶ this process waits ─▶ rank 0 … rank N-1, each the same command

Outside the training steps there is nothing to save, so on Ctrl-C or SIGTERM one line and the exit code are enough. The
handler raises no exception. A library that is being imported or tried would take an exception for its own failure, and
nothing catches one during exit. Python runs a handler only between two bytecode instructions. A thread therefore ends a
process that waits within a library, for example for a rank that has ended.

After a GPU error, the memory of the GPU cannot be trusted or freed. A step that runs out of memory is therefore retried
by a new process, with a smaller micro-batch. If there are several ranks, all end, and the launcher starts them again.
"""

from __future__ import annotations

import atexit
import logging
import os
import re
import signal
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import NoReturn

from packcorpus.tasks.core.errors import Interrupted, PackError
from packcorpus.tasks.core.messages import format_error

NUMBERS = (signal.SIGTERM, signal.SIGINT)

# Seconds within which the main thread handles a signal, unless it is waiting within a library.
GRACE = 2.0

# Environment variable that our launcher sets for its ranks, because it can restart them. torchrun does not set it.
LAUNCHED = "PACKCORPUS_LAUNCHED"

RESTART = 90  # exit code of a rank, only for the launcher
FIRST = 3  # first file descriptor after standard input, output, and error


def is_rank() -> bool:
    """Return whether a launcher started this process: ours or torchrun."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def is_one_of_several() -> bool:
    """Return whether this process is one of several ranks."""
    return "RANK" in os.environ and int(os.environ.get("WORLD_SIZE", "1")) > 1


def reports() -> bool:
    """Return whether this process prints messages that concern all ranks."""
    # Our launcher prints them for its ranks; torchrun does not know them, so the first rank of each machine does.
    return not is_rank() or (LAUNCHED not in os.environ and os.environ.get("LOCAL_RANK", "0") == "0")


@contextmanager
def or_stop_all() -> Iterator[None]:
    """Stop the other ranks if this block fails, because they would wait for this rank."""
    try:
        yield
    except Exception as error:
        if is_one_of_several():
            from packcorpus.train.machine.ranks import meet

            meet({}, error)
        raise


# -- signals -----------------------------------------------------------------------------------------------------------


class SignalGuard:
    """Handler that ends the process on a signal; after `leave`, with the final code."""

    def __init__(self) -> None:
        self._exit_code: int | None = None  # set once the result has been reported
        self._is_ending = False
        self.in_steps = False  # set by Interruption, which then handles signals

    def install(self) -> None:
        reading, writing = os.pipe()
        os.set_blocking(writing, False)
        signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
        threading.Thread(target=self._watch, args=(reading,), daemon=True).start()
        for number in NUMBERS:
            signal.signal(number, self.end_at_once)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, NUMBERS)  # pipeline.graph blocks them until here
        # During exit, Python has restored the default handlers. What is registered first is called last.
        atexit.register(lambda: [signal.signal(number, signal.SIG_IGN) for number in NUMBERS])

    def leave(self, exit_code: int) -> None:
        """Set the final exit code; later signals change neither the code nor the output."""
        sys.stdout.flush()
        self._exit_code = exit_code

    def _watch(self, signals: int) -> None:
        """End the process if its main thread does not handle a signal."""
        while os.read(signals, 1):
            if not self.in_steps:
                time.sleep(GRACE)
                self.end_at_once(signal.SIGTERM, None)

    def end_at_once(self, number: int, frame: FrameType | None) -> None:
        if self._exit_code is not None:
            os._exit(self._exit_code)
        if self._is_ending:  # Ctrl-C and SIGTERM came together
            return
        self._is_ending = True
        if reports():
            error = Interrupted("interrupted", "interrupted outside the steps; run the same command to resume")
            os.write(2, f"{format_error(error)}\n".encode())  # print fails if it was itself interrupted
        os._exit(Interrupted.exit_code)


# -- memory ------------------------------------------------------------------------------------------------------------


class Restart(PackError):
    """Request to run the command again, with the smaller micro-batch in run.json."""

    exit_code = RESTART

    def __init__(self) -> None:
        super().__init__("out_of_memory", "")


def is_shortage(error: BaseException) -> bool:
    """Return whether an error means that an allocation failed."""
    import torch

    text = re.compile(r"out of memory|ALLOC\w*_FAILED|can't allocate memory", re.IGNORECASE)
    is_named = isinstance(error, RuntimeError) and bool(text.search(str(error)))
    return is_named or isinstance(error, torch.OutOfMemoryError)


def may_be_shortage(error: BaseException) -> bool:
    """Return whether an allocation failed or a GPU reported an error."""
    # A GPU may report a failed allocation as an error of a later operation.
    import torch

    return is_shortage(error) or isinstance(error, torch.AcceleratorError)


def described(error: BaseException) -> str:
    return "ran out of memory" if is_shortage(error) else f"failed ({first_line(error)})"


def first_line(error: BaseException) -> str:
    """Return the first line of an error, or the name of its class."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines or [type(error).__name__])[0][:160].rstrip(".")


def restart(arguments: list[str], why: str) -> NoReturn:
    """Replace this process with the training command with other arguments."""
    print(why, file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    signal.pthread_sigmask(signal.SIG_BLOCK, NUMBERS)  # until the new process can report that it was stopped
    # The driver keeps GPU memory as long as its files are open, so the new process must not inherit them.
    for name in os.listdir("/proc/self/fd") if Path("/proc/self/fd").is_dir() else ():
        with suppress(OSError):
            os.set_inheritable(int(name), int(name) < FIRST)
    os.execv(sys.executable, [sys.executable, "-P", "-m", "packcorpus.train", *arguments])  # noqa: S606 - no shell is wanted


# -- several ranks -----------------------------------------------------------------------------------------------------


class RankFailed(PackError):
    """Error of a rank that failed or was killed, with its exit code."""


def launch(ranks: int, arguments: list[str]) -> bool:
    """Run the training command as several ranks; return whether to start them again."""
    # Torch's own launcher forwards signals to every rank.
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    logging.disable(logging.CRITICAL)  # torch would log every signal and exit code
    os.environ[LAUNCHED] = "1"
    signal.set_wakeup_fd(-1)  # so that SignalGuard does not end this process before the ranks have stopped
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        run_id=str(uuid.uuid4()),
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        monitor_interval=0.1,
        shutdown_timeout=3600,  # seconds that ranks have to finish their step and write a checkpoint
    )
    try:
        # -P keeps the working directory off sys.path, so that a user's train.py or tasks.py does not replace ours.
        elastic_launch(config, sys.executable)("-P", "-m", "packcorpus.train", *arguments)
    except SignalException:
        raise _failed({0: Interrupted.exit_code}) from None
    except ChildFailedError as error:
        codes = {rank: failure.exitcode for rank, failure in sorted(error.failures.items())}
        if RESTART in codes.values():
            return True
        raise _failed(codes) from None
    return False


def _failed(codes: dict[int, int]) -> PackError:
    """Return the error of a killed rank, or else of the first that failed."""
    # The others were stopped, or lost their connection to it. A rank that was not killed has reported its error itself.
    stopped = (-signal.SIGTERM, Interrupted.exit_code)
    rank, code = min(codes.items(), key=lambda pair: (pair[1] in stopped, pair[1] > 0))
    if code == Interrupted.exit_code:
        return Interrupted("interrupted", "interrupted; run the same command to resume")
    message = ""
    if code <= 0:
        memory = ", which the system sends when memory runs out" * (code == -signal.SIGKILL)
        message = f"rank {rank} was killed by {signal.Signals(-code).name}{memory}; run the same command to resume "
        message += "from the newest checkpoint"
    failed = RankFailed("rank_failed", message)
    failed.exit_code = max(code, 1)
    return failed
