"""A Ray cluster of two nodes on this machine.

Each node has one CPU and its own process group.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from support.commands import ROOT

from packcorpus.tasks.stores.urls import SCRATCH

LIMIT = 300.0  # seconds for a node to start, with other processes; it takes five
# A node is lost after five checks that fail at once. A node that is only slow has 10 s to answer each check.
SETTINGS = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_health_check_period_ms": "100"}


class Node:
    def __init__(self, log: Path, *options: str):
        words = [str(Path(sys.executable).parent / "ray"), "start", "--block", "--num-cpus=1", *options]
        paths = {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}", SCRATCH: str(log.with_suffix(".scratch"))}
        with log.open("wb") as out:  # not a pipe: the daemons keep it open
            self.process = subprocess.Popen(
                [*words, "--include-log-monitor=false", "--object-store-memory=80000000"], stdin=subprocess.DEVNULL,
                stdout=out, stderr=out,
                env=os.environ | paths | SETTINGS, start_new_session=True,
            )  # fmt: skip

    def kill(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


class Cluster:
    """Two nodes, `head` and `second`; `address` is the address of `head`."""

    def __init__(self, folder: Path, port: int):
        self.address = f"127.0.0.1:{port}"
        options = ["--include-dashboard=false", f"--ray-client-server-port={free_port()}", f"--port={port}"]
        self.head, self.log = Node(folder / "head.log", "--head", *options), folder / "head.log"
        self.second: Node | None = None
        self._folder, self._port, self.logs = folder, port, [self.log]

    def wait(self) -> None:
        """Add the second node as soon as the first one listens, and wait for both.

        The second one takes as long to load Ray as the first one takes to start the rest.
        """
        self._wait_until(self._listens)
        self.log = self._folder / "second.log"
        self.logs.append(self.log)
        self.second = Node(self.log, f"--address={self.address}")
        self._wait_until(lambda: all("started" in log.read_text() for log in self.logs))

    def _listens(self) -> bool:
        with suppress(OSError), socket.create_connection(("127.0.0.1", self._port), timeout=1):
            return True
        return False

    def _wait_until(self, is_true: Callable[[], bool]) -> None:
        deadline = time.monotonic() + LIMIT
        while not is_true():
            nodes = (self.head, self.second) if self.second else (self.head,)
            assert all(node.process.poll() is None for node in nodes), [log.read_text() for log in self.logs]
            assert time.monotonic() < deadline, [log.read_text() for log in self.logs]
            time.sleep(0.05)

    def kill(self) -> None:
        for node in (self.head, self.second):
            if node:
                node.kill()


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@contextmanager
def cluster_in(folder: Path) -> Iterator[Cluster]:
    """Start a cluster that `ray://auto` finds, even if this machine has others."""
    cluster = Cluster(folder, free_port())
    try:
        cluster.wait()
        os.environ["RAY_ADDRESS"] = cluster.address
        yield cluster
    finally:
        os.environ.pop("RAY_ADDRESS", None)
        cluster.kill()
