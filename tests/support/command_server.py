"""Runs commands in forks of one process that has imported the libraries, so that a command starts in milliseconds.

    tests/support/commands.py ─{"words", "folder", "environment", "stdout", "stderr"}─▶ stdin ─fork─▶ the command
                              ◀──────────────────── exit code ────────────────────────── stdout

Every command runs in a fork of its own, which leaves through the interpreter's usual shutdown: no state remains. The
modules that install hooks on import (`pipeline`, `tasks.cli.app`) are imported by the fork, as by the real command.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import pkgutil
import runpy
import signal
import sys
from typing import Any

LIBRARIES = (
    "luigi",
    "luigi.cmdline",
    "pandas",
    "pyarrow.compute",
    "pydantic",
    "rich.console",
    "rich.progress",
    "typer",
)
HOOKED = ("tasks.cli.app",)


def preload() -> None:
    for name in LIBRARIES:
        importlib.import_module(name)
    import tasks

    for found in pkgutil.walk_packages(tasks.__path__, "tasks."):
        if found.name not in HOOKED:
            importlib.import_module(found.name)


def next_request() -> dict[str, Any]:
    """Answer requests from stdin. Returns in a fork, with the request that the fork is to run."""
    for line in iter(sys.stdin.readline, ""):
        request: dict[str, Any] = json.loads(line)
        child = os.fork()
        if not child:
            return request
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)
    sys.exit()


def become(request: dict[str, Any]) -> None:
    """Take the folder, the environment, the arguments, and the files of the request."""
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    for number, path, flags in (
        (0, os.devnull, os.O_RDONLY),
        (1, request["stdout"], os.O_WRONLY),
        (2, request["stderr"], os.O_WRONLY),
    ):
        file = os.open(path, flags)
        os.dup2(file, number)
        os.close(file)
    sys.argv = request["words"]


def main() -> None:
    preload()
    gc.freeze()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    become(next_request())
    program, *words = sys.argv
    if os.path.basename(program) == "luigi":
        sys.path[0] = os.path.dirname(program)
        from luigi.cmdline import luigi_run

        sys.exit(luigi_run(words))
    elif os.path.basename(program) == "packcorpus":
        sys.path[0] = os.path.dirname(program)
        from tasks.cli import app

        sys.exit(app.main())
    else:  # python -m MODULE
        sys.argv = words[1:]
        sys.path[0] = os.getcwd()
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
