"""Start one process per GPU with torch's own launcher, within the same command.

    python -m train … ─(gpus > 1)─▶ this process waits ─▶ rank 0 … rank N-1, each `python -P -m train …`

Signals are forwarded to every rank. The ranks may take as long as a step and a checkpoint need.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import uuid

from tasks.core.errors import Interrupted, PackError
from train.machine.out_of_memory import LAUNCHED, RESTART

# Seconds the ranks have to finish their step and write a checkpoint.
PATIENCE = 3600


class RankFailed(PackError):
    """A rank reported an error or was killed; has the exit code of the first."""


def launch(ranks: int, arguments: list[str]) -> bool:
    """Run `python -m train` as several processes. Returns whether they must be started again, with a smaller
    micro-batch. Raises RankFailed or Interrupted.
    """
    os.environ[LAUNCHED] = "1"
    # A rank reports its error itself; torch's loggers would add lines of their own. Some follow only this variable,
    # which they read when they are imported, the others only their parent.
    os.environ.setdefault("LOGLEVEL", "CRITICAL")
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

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
        # -P keeps the working directory off sys.path: a user's own train.py or tasks.py must not replace ours.
        elastic_launch(config, sys.executable)("-P", "-m", "train", *arguments)
    except SignalException:
        raise Interrupted("interrupted", "interrupted; run the same command to resume") from None
    except ChildFailedError as error:
        rank, first = error.get_first_failure()
        if first.exitcode == RESTART:
            return True
        message = ""  # a rank that was not killed has reported its error itself
        if first.exitcode <= 0:
            message = f"rank {rank} was killed by {signal.Signals(-first.exitcode).name}"
            if first.exitcode == -signal.SIGKILL:
                message += ", which is what the system does when memory runs out"
            message += "; run the same command to resume from the newest checkpoint"
        failed = RankFailed("rank_failed", message)
        failed.exit_code = max(first.exitcode, 1)
        raise failed from None
    return False
