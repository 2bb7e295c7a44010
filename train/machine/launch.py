"""Start one process per GPU with torch's own launcher, within the same command.

    python -m train … ─(gpus > 1)─▶ this process waits ─▶ rank 0 … rank N-1, each `python -P -m train …`

Signals are forwarded to every rank. The ranks have enough time to finish their step and write a checkpoint.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import uuid
from typing import Any

from tasks.core.errors import Interrupted, PackError
from train.machine.out_of_memory import RESTART
from train.machine.signals import LAUNCHED

# Seconds the ranks have to finish their step and write a checkpoint.
PATIENCE = 3600


class RankFailed(PackError):
    """Error of a rank that failed or was killed, with the exit code of that rank."""


def launch(ranks: int, arguments: list[str]) -> bool:
    """Run `python -m train` as several processes.

    Returns whether they must be started again, with a smaller micro-batch. Raises RankFailed or Interrupted.
    """
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
        shutdown_timeout=PATIENCE,
    )
    try:
        # -P keeps the working directory off sys.path, so that a user's train.py or tasks.py does not replace ours.
        elastic_launch(config, sys.executable)("-P", "-m", "train", *arguments)
    except SignalException:
        raise _interrupted() from None
    except ChildFailedError as error:
        if RESTART in [failure.exitcode for failure in error.failures.values()]:
            return True
        raise _failed(error.failures) from None
    return False


def _interrupted() -> Interrupted:
    return Interrupted("interrupted", "interrupted; run the same command to resume")


def _failed(failures: dict[int, Any]) -> PackError:
    """Return the error of a killed rank, or else of the first rank with an error.

    The other ranks were stopped, or lost their connection to that rank. A rank that was not killed has reported its
    error itself.
    """
    codes = {rank: failure.exitcode for rank, failure in sorted(failures.items())}
    stopped = (-signal.SIGTERM, Interrupted.exit_code)
    first = min(codes, key=lambda rank: (codes[rank] in stopped, codes[rank] > 0))
    if codes[first] == Interrupted.exit_code:
        return _interrupted()
    message = ""
    if codes[first] <= 0:
        message = f"rank {first} was killed by {signal.Signals(-codes[first]).name}"
        if codes[first] == -signal.SIGKILL:
            message += ", which the system sends when memory runs out"
        message += "; run the same command to resume from the newest checkpoint"
    failed = RankFailed("rank_failed", message)
    failed.exit_code = max(codes[first], 1)
    return failed
