"""Run commands in forks of one process, and measure their CPU time and memory.

    a request of command_server.py on stdin ──▶ a fork runs it ──▶ [exit code, seconds, bytes] on stdout

The seconds are those of the command and of all processes that it has waited for. The bytes are those of the largest of
them, with what the fork shares with this process. The system measures both, so no peak is missed.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
from typing import Any

from command_server import become, leave, preload, run


def next_request() -> dict[str, Any]:
    """Answer requests from stdin; return only in a fork, with its request."""
    for line in iter(sys.stdin.readline, ""):
        child = os.fork()
        if not child:
            return json.loads(line)
        _, status, used = os.wait4(child, 0)
        answer = os.waitstatus_to_exitcode(status), used.ru_utime + used.ru_stime, used.ru_maxrss << 10
        print(json.dumps(answer), flush=True)
    sys.exit()


def main() -> None:
    preload("tasks")
    gc.freeze()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    request = next_request()
    become(request)
    os.environ.clear()
    os.environ.update(request["environment"])
    try:
        run(request["words"])
    except SystemExit as end:
        if not isinstance(end.code, int | None):
            raise
        leave(end.code or 0)
    leave(0)


if __name__ == "__main__":
    main()
