"""Run commands in forks of one process that has imported the libraries.

    tests/support/commands.py ─{"words", "folder", "environment", "stdout", "stderr"}─▶ stdin ─fork─▶ the command
                              ◀──────── process ID; [exit code, seconds, bytes] ──────── stdout

A command starts in milliseconds. Every command runs in its own fork, so no state remains. The fork ends as the
interpreter does, except that it frees no memory: tests/pipeline/test_commands.py compares it with a process. The fork
imports the modules that install hooks on import (`pipeline`, `tasks.cli.app`), as the real command does. If packcorpus
replaces itself by luigi, another fork replaces it.

The argument names the libraries to import: `tasks` for luigi and packcorpus, `train` for packcorpus train (torch takes
seconds) and for a luigi whose training runs in a fork, too (support/servers/forked_training.py).
"""

from __future__ import annotations

import atexit
import importlib
import json
import logging
import os
import pkgutil
import runpy
import signal
import sys
import tempfile
import threading
import weakref
from collections.abc import Iterator
from typing import Any, NoReturn

from pydantic import BaseModel

LIBRARIES = {
    "tasks": (
        "luigi",
        "luigi.cmdline",
        "gigatoken",
        "pandas",
        "pyarrow.compute",
        "pydantic",
        "rich.console",
        "rich.progress",
        "sentencepiece.sentencepiece_model_pb2",
        "typer",
    ),
    "train": (
        "luigi",
        "luigi.cmdline",
        "matplotlib.backends.backend_svg",
        "matplotlib.pyplot",
        "peft.tuners.lora.bnb",
        "torch.distributed.launcher.api",
        "transformers.conversion_mapping",
        "transformers.integrations.bitsandbytes",
        "transformers.models.llama.modeling_llama",
    ),
}
HOOKED = ("packcorpus.tasks.cli.app", "packcorpus.train.__main__")


def preload(package: str) -> None:
    logging.getLogger("bitsandbytes").setLevel(logging.CRITICAL)  # it logs while it is imported
    ours = f"packcorpus.{package}"
    for name in (*LIBRARIES[package], ours):
        importlib.import_module(name)
    for found in pkgutil.walk_packages(sys.modules[ours].__path__, f"{ours}."):
        if found.name not in HOOKED:
            importlib.import_module(found.name)
    for model in models(BaseModel):
        if model.__module__.startswith("packcorpus.tasks."):
            model.model_rebuild()  # which would otherwise wait until a fork needs it
    if package == "train":
        warm()


def models(base: type[BaseModel]) -> Iterator[type[BaseModel]]:
    """Yield all models that are loaded."""
    for model in base.__subclasses__():
        yield model
        yield from models(model)


def warm() -> None:
    """Fill the caches of libraries, and turn off a slow log.

    Libraries fill the caches, tables of models, fonts, and patterns, at their first call.
    """
    from io import BytesIO

    from matplotlib.figure import Figure
    from torch.distributed.elastic.rendezvous import dynamic_rendezvous
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    from packcorpus.train.loop.record import versions

    versions()
    get_checkpoint_conversion_mapping("llama")
    figure = Figure(layout="constrained")
    figure.subplots().plot([1, 2], label="a")
    figure.legend()
    figure.savefig(BytesIO(), format="svg")
    # For the names of events that nobody records, torch's launcher reads the sources of all callers, at 0.1 s each.
    dynamic_rendezvous.get_method_name = lambda depth=2: ""  # type: ignore[assignment]


def next_request() -> dict[str, Any]:
    """Answer requests from stdin; return only in a fork, with its request.

    The fork then runs the request.
    """
    for line in iter(sys.stdin.readline, ""):
        request: dict[str, Any] = json.loads(line)
        child = os.fork()
        if not child:
            os.setpgid(0, 0)  # so that a test can send a signal to the command and all its processes
            return request
        print(child, flush=True)
        end = wait_for(child)
        if changes := _taken():
            request |= changes
            child = os.fork()
            if not child:
                return request
            end = wait_for(child)
        print(json.dumps(end), flush=True)
    sys.exit()


def wait_for(child: int) -> tuple[int, float, int]:
    """Wait for the end of a fork, and return its exit code, seconds, and bytes.

    The seconds are the CPU time of the fork and of all processes that it has waited for. The bytes are the memory of
    the largest of them, with what the fork shares with this process. The system measures both, so no peak is missed.
    """
    _, status, used = os.wait4(child, 0)
    return os.waitstatus_to_exitcode(status), used.ru_utime + used.ru_stime, used.ru_maxrss << 10


# The successor of a command: the words and the environment that the command would pass to os.execv.
SUCCESSOR = tempfile.TemporaryFile()  # noqa: SIM115 - for as long as the server runs
execv = os.execv


def hand_over(path: str, words: list[str]) -> NoReturn:
    """Replace os.execv in packcorpus, and hand `luigi` over to a new fork.

    A new interpreter would take a second to import the libraries.
    """
    if words[1:4] != ["-P", "-m", "luigi"]:
        execv(path, words)
    words = [os.path.join(os.path.dirname(sys.executable), "luigi"), *words[4:]]
    SUCCESSOR.write(json.dumps({"words": words, "environment": dict(os.environ)}).encode())
    SUCCESSOR.flush()
    os._exit(0)


def _taken() -> dict[str, Any]:
    SUCCESSOR.seek(0)
    found = SUCCESSOR.read()
    SUCCESSOR.seek(0)
    SUCCESSOR.truncate()
    return json.loads(found) if found else {}


def become(request: dict[str, Any]) -> None:
    """Change to the folder of the request and open its files."""
    os.chdir(request["folder"])
    for number, path, flags in (
        (0, os.devnull, os.O_RDONLY),
        (1, request["stdout"], os.O_WRONLY | os.O_APPEND),
        (2, request["stderr"], os.O_WRONLY | os.O_APPEND),
    ):
        file = os.open(path, flags)
        os.dup2(file, number)
        os.close(file)


def run(words: list[str]) -> None:
    """Run luigi, packcorpus, or python with these arguments."""
    if "torch" in sys.modules and "TEST_WITHOUT_PICTURE" in os.environ:  # NO_PICTURE of tests/support/commands.py
        from packcorpus.train.loop import record

        record.picture = lambda *_: b""
    program, *words = words
    if os.path.basename(program) == "luigi":
        if "torch" in sys.modules:
            import forked_training

            forked_training.install()
        sys.argv = [program, *words]
        sys.path[0] = os.path.dirname(program)
        from luigi.cmdline import luigi_run

        sys.exit(luigi_run(words))
    elif os.path.basename(program) == "packcorpus":
        sys.argv = [program, *words]
        sys.path[0] = os.path.dirname(program)
        from packcorpus.tasks.cli import app

        os.execv = hand_over  # type: ignore[assignment]
        sys.exit(app.main())
    if words[0] == "-c":
        sys.argv = ["-c", *words[2:]]
        exec(compile(words[1], "-c", "exec"), {"__name__": "__main__"})  # noqa: S102 - the code of a test
        return
    options = [word for word in words[:2] if word in ("-P", "-u")]
    words = words[len(options) :]
    if words[0] == "-m":
        sys.argv = words[1:]
        sys.path[:1] = [] if "-P" in options else [os.getcwd()]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = words
        sys.path[0] = os.path.dirname(words[0])
        runpy.run_path(words[0], run_name="__main__")


def ranks_of(words: list[str]) -> int:
    """Return the number of processes that torch's launcher will start."""
    given = [int(words[at + 1]) for at, word in enumerate(words) if word in ("--gpus", "--nproc-per-node")]
    return sum(count for count in given if count > 1)


def main() -> None:
    preload(sys.argv[1])
    for finalizer in [*weakref.finalize._registry]:  # type: ignore[attr-defined]
        finalizer.atexit = False  # torch's 250 only free memory, which takes a tenth of a short run
    signal.signal(signal.SIGINT, signal.default_int_handler)
    request = next_request()
    become(request)
    if ranks := ranks_of(request["words"]):
        from forked_ranks import prepare

        request = prepare(ranks) or request
    os.environ.clear()
    os.environ.update(request["environment"])
    try:
        run(request["words"])
    except SystemExit as end:
        if not isinstance(end.code, int | None):
            raise
        leave(end.code or 0)
    leave(0)


def leave(code: int) -> NoReturn:
    """Wait for threads, run the exit handlers, flush, and end the process.

    The interpreter would also free everything that the parent has loaded. A fork copies each page that it writes to,
    which takes 0.4 s with torch.
    """
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
