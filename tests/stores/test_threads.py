"""Threads that wait for servers work on every item once.

The first error ends all of them, and Ctrl-C ends any wait.
"""

from __future__ import annotations

import subprocess
import sys
import threading
import time

import pytest
from support.commands import ROOT
from support.servers.remote import environment, needs_remote

from packcorpus.tasks.stores.store import interruptible, run_all


@pytest.mark.parametrize("count", [1, 3, 50])
def test_every_item_is_worked_on_once(count: int) -> None:
    done: list[int] = []
    run_all(done.append, range(20), count, lambda: None)
    assert sorted(done) == list(range(20))
    assert count > 1 or done == list(range(20)), "in their order"


def test_nothing_to_do_takes_no_thread() -> None:
    run_all(lambda _: pytest.fail("called"), [], 4, lambda: None)


def test_the_first_error_stops_the_others_and_is_raised() -> None:
    stopped, finished = threading.Event(), list[int]()

    def work(item: int) -> None:
        if item == 1:
            raise ValueError("one")
        assert stopped.wait(120), "stop was not called"
        finished.append(item)
        raise InterruptedError

    with pytest.raises(ValueError, match="one"):
        run_all(work, range(8), 3, stopped.set)
    assert sorted(finished) == [0, 2], "those at work have ended, and no other was begun"


def test_a_call_returns_and_raises_as_it_does_without_a_thread() -> None:
    assert interruptible(divmod, 7, 2) == (3, 1)
    assert interruptible(int, "11", base=2) == 3
    with pytest.raises(ZeroDivisionError):
        interruptible(divmod, 7, 0)


def test_ctrl_c_ends_the_wait_for_a_server_that_never_answers() -> None:
    """obstore alone would continue for minutes."""
    needs_remote()
    script = """
import os, signal, socket, threading, time
from pathlib import Path
silent = socket.socket()
silent.bind(("127.0.0.1", 0))
silent.listen(9)
os.environ["AWS_ENDPOINT_URL"] = "http://127.0.0.1:%d" % silent.getsockname()[1]
from packcorpus.tasks.sources.locate import find_paths
from packcorpus.tasks.stores.bucket import open_store
signal.signal(signal.SIGINT, signal.default_int_handler)
connections = []
def interrupt():
    connections.append(silent.accept())
    time.sleep(0.1)
    os.kill(os.getpid(), signal.SIGINT)
for call in (
    lambda: open_store("s3://b").head("k"),
    lambda: list(open_store("s3://b").list()),
    lambda: find_paths("s3://b/k", Path(), Path("c")),
):
    interrupter = threading.Thread(target=interrupt)
    interrupter.start()
    try:
        call()
    except KeyboardInterrupt:
        print("interrupted")
    interrupter.join()
"""
    start = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**environment(""), "PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=50,
        check=True,
    )
    assert done.stdout == "interrupted\n" * 3, done.stderr
    assert time.monotonic() - start < 20
