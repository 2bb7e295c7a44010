"""Start the ranks of torch's launcher as forks of a process with torch.

    prepare(2) ─fork─▶ two processes that wait ◀─words, environment─ the launcher's SubprocessHandler

Loading torch in each rank would take seconds. The ranks are forked before the launcher runs, because a fork of a
process with threads may wait for a lock forever. The launcher handles the ranks as its own processes: it waits for
them, sends signals, and reads exit codes.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from typing import Any


class Rank:
    """The part of subprocess.Popen that the launcher uses."""

    def __init__(self, pid: int):
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            ended, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if ended else None
        return self.returncode

    def wait(self, timeout: float) -> int:
        end = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired("rank", timeout)
            time.sleep(0.01)
        return code


def prepare(count: int) -> dict[str, Any] | None:
    """Fork `count` ranks and return None; in a rank, return its request.

    The request has words and an environment. A rank waits until the launcher starts it, or ends with the launcher.
    """
    waiting: list[tuple[int, int]] = []
    for _ in range(count):
        read, write = os.pipe()
        pid = os.fork()
        if not pid:
            for file in (write, *(file for _, file in waiting)):
                os.close(file)
            with os.fdopen(read) as request:
                text = request.read()
            if not text:  # the launcher has ended
                os._exit(0)
            os.setsid()
            return dict(json.loads(text))
        os.close(read)
        waiting.append((pid, write))

    def start(_: Any, words: tuple[str, ...], environment: dict[str, str]) -> Rank:
        pid, write = waiting.pop(0)
        with os.fdopen(write, "w") as request:
            json.dump({"words": words, "environment": environment}, request)
        return Rank(pid)

    from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

    SubprocessHandler._popen = start
    return None
