"""One process a GPU, by torch's own launcher, within the same command.

    python -m train … ─(gpus > 1)─▶ this process watches ─▶ rank 0 … rank N-1, each `python -m train …`

A signal goes on to every rank, and the ranks may take as long as a step and a checkpoint need.
"""

from __future__ import annotations

import os
import signal
import sys
import uuid

from tasks.core.errors import Interrupted, PackError

# Seconds that the ranks have for the step at hand and a checkpoint.
PATIENCE = 3600


class RankFailed(PackError):
    """A rank ended with an error, which it has told, or was killed; the exit code is that of the first that failed."""


def launch(ranks: int, arguments: list[str]) -> None:
    """Run `python -m train arguments` as `ranks` processes. Raises RankFailed or Interrupted."""
    # Its loggers take their level from here alone, and say in four lines that they were told to stop.
    os.environ.setdefault("LOGLEVEL", "CRITICAL")
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
        raise Interrupted("interrupted", "interrupted; the same command goes on from here") from None
    except ChildFailedError as error:
        rank, first = error.get_first_failure()
        why = "" if first.exitcode > 0 else f"rank {rank} was killed by {signal.Signals(-first.exitcode).name}"
        if first.exitcode == -signal.SIGKILL:
            why += ", as a machine does that runs out of memory"
        failed = RankFailed("rank_failed", f"{why}; the same command goes on from the newest checkpoint" if why else "")
        failed.exit_code = max(first.exitcode, 1)
        raise failed from None
