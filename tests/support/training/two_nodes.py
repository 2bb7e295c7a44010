"""Run `torchrun --nnodes 2` twice on this machine, as two nodes.

two_nodes(folders, *arguments) ─▶ a fork of the process with torch ─┬─fork─▶ torchrun, node 0, in its folder ─▶ rank 0
                                                                    └─fork─▶ torchrun, node 1, in its folder ─▶ rank 1

The nodes reach each other over loopback. Nodes with the same folder have a shared file system, and nodes with different
folders have separate file systems.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from support.commands import NO_PICTURE, in_fork_with_torch

LIMIT = 250  # seconds, with other processes; less than that of the command that runs both


@dataclass(frozen=True)
class Node:
    """The result of one torchrun.

    It has its exit code, and the text that torchrun and its rank wrote.
    """

    code: int
    stdout: str
    stderr: str


def two_nodes(folders: Sequence[Path], arguments: Sequence[Sequence[str]], stop: str = "") -> list[Node]:
    """Run torchrun in each folder, until both have ended.

    `arguments` has the arguments of each node. `stop` names a node and a signal, such as "1 TERM": the torchrun of that
    node receives the signal after the first step.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as name:
        outputs = [[str(Path(name) / f"{node}.{stream}") for stream in ("out", "err")] for node in range(2)]
        plan = {"folders": list(map(str, folders)), "arguments": arguments, "port": port, "outputs": outputs}
        code = "import json, sys; from support.training.two_nodes import run; run(json.loads(sys.argv[1]))"
        done = in_fork_with_torch(folders[0], "-c", code, json.dumps(plan | {"stop": stop}), **NO_PICTURE)
        assert done.returncode == 0, done.stderr
        codes = json.loads(done.stdout.splitlines()[-1])
        return [
            Node(code, *(Path(path).read_text() for path in paths)) for code, paths in zip(codes, outputs, strict=True)
        ]


def run(plan: dict) -> None:  # type: ignore[type-arg]
    """Run both nodes in forks of this process, and print their exit codes."""
    for paths in plan["outputs"]:
        for path in paths:
            Path(path).touch()
    pids = []
    for node in range(2):
        pid = os.fork()
        if not pid:
            _become(plan, node)
            return
        pids.append(pid)
    if plan["stop"]:
        node, name = plan["stop"].split()
        errors, end = Path(plan["outputs"][0][1]), time.monotonic() + LIMIT
        while "\nstep 1/" not in errors.read_text() and time.monotonic() < end:
            time.sleep(0.01)
        os.kill(pids[int(node)], signal.Signals[f"SIG{name}"])
    print(json.dumps([os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]))


def _become(plan: dict, node: int) -> None:  # type: ignore[type-arg]
    """Run torchrun, or the rank that it starts, in this process."""
    import command_server
    import forked_ranks

    command_server.become(
        {"folder": plan["folders"][node], "stdout": plan["outputs"][node][0], "stderr": plan["outputs"][node][1]}
    )
    signal.alarm(LIMIT)
    if request := forked_ranks.prepare(1):
        os.environ.clear()
        os.environ.update(request["environment"])
        command_server.run(request["words"])
        return
    words = ["--nnodes", "2", "--nproc-per-node", "1", "--node-rank", str(node), "--master-addr", "127.0.0.1"]
    words += ["--master-port", str(plan["port"]), "--shutdown-timeout", "600", "-m", "packcorpus.train"]
    sys.argv = ["torchrun", *words, *plan["arguments"][node]]
    from torch.distributed.run import main

    main()
