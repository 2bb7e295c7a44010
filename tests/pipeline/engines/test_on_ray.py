"""Ray: the same corpus on two nodes, and a node that is lost in the middle of the run."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.commands import ROOT, corpus_bytes
from support.small_corpus import conversations, make_recipe, pack_corpus
from support.steps import Failing, Slow, pack_on

from pipeline.engines.on_ray import OnRay
from tasks.core.errors import DataError, InputMissing

ray = pytest.importorskip("ray", reason="Ray is not installed; run: pip install 'packcorpus[ray]'")

LIMIT = 60.0  # seconds for a node to start


class Node:
    """A node of a cluster on this machine, in a process group of its own."""

    def __init__(self, log: Path, *options: str):
        words = [str(Path(sys.executable).parent / "ray"), "start", "--block", "--num-cpus=1", *options]
        environment = os.environ | {
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_health_check_period_ms": "500",  # a node is lost after 5 checks that fail
            "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}",
        }
        with log.open("wb") as out:
            self.process = subprocess.Popen(
                [*words, "--object-store-memory=80000000"], stdout=out, stderr=out, env=environment,
                stdin=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip

    def kill(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@pytest.fixture(scope="module")
def second_node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    """The second node of a cluster of two."""
    folder, port = tmp_path_factory.mktemp("ray"), free_port()
    options = ["--include-dashboard=false", f"--ray-client-server-port={free_port()}", f"--port={port}"]
    head = Node(folder / "head.log", "--head", *options)
    second = None
    try:
        address, deadline = f"127.0.0.1:{port}", time.monotonic() + LIMIT
        while "GCS" not in (folder / "head.log").read_text() and "started" not in (folder / "head.log").read_text():
            assert head.process.poll() is None, (folder / "head.log").read_text()
            assert time.monotonic() < deadline
            time.sleep(0.2)
        second = Node(folder / "second.log", f"--address={address}")
        os.environ["RAY_ADDRESS"] = address  # of this cluster, also if others run on this machine
        with OnRay("ray://auto"):
            while len([node for node in ray.nodes() if node["Alive"]]) < 2:
                assert time.monotonic() < deadline, (folder / "second.log").read_text()
                time.sleep(0.2)
        yield second
    finally:
        os.environ.pop("RAY_ADDRESS", None)
        for node in (head, second):
            if node:
                node.kill()


def test_two_nodes_make_the_same_corpus(tmp_path: Path, second_node: Node) -> None:
    settings = {"part_size": 2048, "tokenizer": None, "vocab_size": 400}
    expected = corpus_bytes(pack_corpus(make_recipe(tmp_path / "stages", conversations(80), **settings)))
    with OnRay("ray://auto") as engine:
        assert corpus_bytes(pack_on(engine, make_recipe(tmp_path / "ray", conversations(80), **settings))) == expected


def test_an_error_on_a_node_arrives_whole(tmp_path: Path, second_node: Node) -> None:
    with OnRay("ray://auto") as engine, pytest.raises(DataError) as found:
        list(engine.map([Failing(tmp_path, number, fails=number == 2) for number in range(20)]))
    assert (found.value.code, str(found.value), found.value.facts) == ("E310", "chat.jsonl:3: is bad", {"line": 3})


def test_a_lost_node_costs_only_what_it_was_doing(tmp_path: Path, second_node: Node) -> None:
    steps = [Slow(tmp_path, number, 0.5) for number in range(12)]
    with OnRay("ray://auto") as engine:
        found = {}
        for index, outcome in engine.map(steps):
            found[index] = outcome.tokens
            if len(found) == 3:
                second_node.kill()
    assert found == {number: number for number in range(12)}
    assert sum(step.attempts for step in steps) <= 13, "one step per CPU of the node, again"


def test_no_cluster_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**_: object) -> None:
        raise ConnectionError("nobody there\nand more lines")

    monkeypatch.setattr(ray, "init", refuse)
    message = "--on ray://far:10001: no Ray cluster answers: nobody there$"
    with pytest.raises(InputMissing, match=message) as found, OnRay("ray://far:10001"):
        pass
    assert found.value.code == "E715"
