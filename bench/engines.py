"""Compare engines: pack the same corpus with each engine, and compare all files.

    python bench/engines.py CONFIG [--times 40] [--rounds 3] [--only here ray-2] [--part-size 524288]

    here, workers:2                 luigi --module pipeline PackCorpus --workers 2 --on …, in a new root each time
    ray-1, ray-2                    one and two nodes of one CPU each, on this machine, new for each run
                                    CPU seconds include the command and all processes of the nodes

Engines take turns. Every second round is in the opposite order. "× here" compares with `here` of the same round. With
--part-size, all engines are also measured with parts of that size, and the last column is the CPU time of one more
part. Exits with 1 if files differ that must be equal. Ray is part of packcorpus[ray].
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from statistics import median
from typing import NamedTuple

import psutil
import yaml
from enlarge import enlarge

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent
ENGINES = {"here": 0, "workers:2": 0, "ray-1": 1, "ray-2": 2}  # nodes of Ray
EVERY = 0.2  # seconds between two readings of the CPU time of the nodes
LISTED = 2.0  # seconds between two lists of their processes; a list reads all processes of the machine
STARTED = 60.0  # seconds for a node to start
IDLE = 0.3  # CPU seconds of idle nodes in three seconds


class Run(NamedTuple):
    seconds: float
    cpu: float
    parts: int
    digest: str


class Nodes:
    """Nodes of a Ray cluster on this machine, and the CPU time of all their processes."""

    def __init__(self, count: int, folder: Path):
        self._nodes: list[subprocess.Popen[bytes]] = []
        self._cpu: dict[int, float] = {}  # by process id; processes that have ended are kept
        self._processes: list[psutil.Process] = []
        self._listed = 0.0
        self._end = threading.Event()
        self.environment: dict[str, str] = {}
        try:
            ports = free_port(), free_port()
            for number in range(count):
                head = ["--head", f"--port={ports[0]}", f"--ray-client-server-port={ports[1]}"]
                first = [*head, "--include-dashboard=false"] if number == 0 else [f"--address=127.0.0.1:{ports[0]}"]
                self._start(first, folder / f"node-{number}.log")
                self.environment = {"RAY_ADDRESS": f"127.0.0.1:{ports[0]}"}
        except BaseException:
            self.stop()
            raise
        self._wait_until_idle()
        self._before = sum(self._cpu.values())
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _wait_until_idle(self) -> None:
        """Wait until the nodes have started.

        Their agents load libraries for some more seconds.
        """
        deadline, used = time.monotonic() + STARTED, [-1.0]
        while self._nodes and time.monotonic() < deadline and (len(used) < 4 or used[-1] - used[-4] > IDLE):
            time.sleep(1)
            self._look()
            used.append(sum(self._cpu.values()))

    def _start(self, options: Sequence[str], log: Path) -> None:
        words = [str(BIN / "ray"), "start", "--block", "--num-cpus=1", "--object-store-memory=100000000", *options]
        environment = os.environ | {"PYTHONPATH": str(ROOT), "RAY_USAGE_STATS_ENABLED": "0"}
        with log.open("wb") as out:  # not a pipe: the daemons keep it open
            self._nodes.append(
                subprocess.Popen(
                    words, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=environment, start_new_session=True
                )
            )
        deadline = time.monotonic() + STARTED
        while "started" not in log.read_text():
            if self._nodes[-1].poll() is not None or time.monotonic() > deadline:
                sys.exit(f"a node of Ray does not start: {log.read_text()}")
            time.sleep(EVERY)

    def _watch(self) -> None:
        while not self._end.wait(EVERY):
            self._look()

    def _look(self) -> None:
        if time.monotonic() - self._listed >= LISTED:
            self._list()
        for process in self._processes:
            with suppress(psutil.Error):
                times = process.cpu_times()
                self._cpu[process.pid] = times.user + times.system

    def _list(self) -> None:
        found: list[psutil.Process] = []
        for node in self._nodes:
            with suppress(psutil.Error):
                root = psutil.Process(node.pid)
                found += [root, *root.children(recursive=True)]
        self._processes, self._listed = found, time.monotonic()  # at once, because another thread may be looking

    def cpu(self) -> float:
        """Return the CPU seconds since the nodes started."""
        self._list()
        self._look()
        return sum(self._cpu.values()) - self._before

    def stop(self) -> None:
        self._end.set()
        for node in self._nodes:
            with suppress(ProcessLookupError):
                os.killpg(node.pid, signal.SIGKILL)
            node.wait()


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@contextmanager
def nodes_of(engine: str, folder: Path) -> Iterator[Nodes]:
    nodes = Nodes(ENGINES[engine], folder)
    try:
        yield nodes
    finally:
        nodes.stop()


def run(engine: str, config: Path) -> Run:
    """Pack the corpus of a config with an engine, in a temporary root."""
    folder = Path(tempfile.mkdtemp())
    try:
        with nodes_of(engine, folder) as nodes:
            on = "ray://auto" if ENGINES[engine] else engine
            words = [str(BIN / "luigi"), "--module", "pipeline", "PackCorpus", "--config", str(config), "--quiet"]
            words += ["--root", str(folder / "root"), "--workers", "2", "--on", on]
            environment = os.environ | {"LUIGI_CONFIG_PATH": str(ROOT / "luigi.cfg"), "PYTHONPATH": str(ROOT)}
            before, start = os.times(), time.perf_counter()
            done = subprocess.run(
                words, stdout=subprocess.PIPE, env=environment | nodes.environment, text=True, check=False
            )
            seconds, after = time.perf_counter() - start, os.times()
            if done.returncode:
                sys.exit(f"{engine}: luigi has failed with {done.returncode}")
            cpu = after.children_user - before.children_user + after.children_system - before.children_system
            cpu += nodes.cpu()
        parts = len(list((folder / "root").glob("data/tokens/*/*.arrow")))
        return Run(seconds, cpu, parts, digest_of(folder / "root"))
    finally:
        shutil.rmtree(folder)


def digest_of(root: Path) -> str:
    """Return the digest of all files that must be the same with every engine.

    It includes the names of the files.
    """
    total = hashlib.sha256()
    for folder in ("data/corpora", "data/tokens", "manifests"):
        for path in sorted((root / folder).rglob("*")):
            if path.is_file() and path.name != "run.json":
                with path.open("rb") as file:
                    digest = hashlib.file_digest(file, "sha256").hexdigest()
                total.update(f"{path.relative_to(root)}\0{digest}\n".encode())
    return total.hexdigest()


def measure(engines: Sequence[str], config: Path, rounds: int) -> dict[str, list[Run]]:
    found: dict[str, list[Run]] = {engine: [] for engine in engines}
    for number in range(rounds):
        for engine in engines if number % 2 == 0 else reversed(engines):
            found[engine].append(run(engine, config))
            print(f"round {number + 1}, {engine}: {found[engine][-1]}", file=sys.stderr, flush=True)
    return found


def table(found: dict[str, list[Run]], small: dict[str, list[Run]]) -> Iterator[str]:
    yield "| engine | parts | seconds | × here | CPU seconds | × here | CPU ms, one more part |"
    yield "|---|---:|---:|---:|---:|---:|---:|"
    for engine, runs in found.items():
        cells = [engine, str(runs[0].parts)]
        for name in ("seconds", "cpu"):
            values = [getattr(one, name) for one in runs]
            cells.append(f"{median(values):.1f} ({min(values):.1f}–{max(values):.1f})")
            here = [getattr(one, name) for one in found.get("here", ())]
            ratios = [value / base for value, base in zip(values, here, strict=False)]
            cells.append(f"{median(ratios):.2f}" if ratios else "")
        more = [(b.cpu - a.cpu) / (b.parts - a.parts) for a, b in zip(runs, small.get(engine, ()), strict=False)]
        cells.append(f"{1000 * median(more):.1f}" if more else "")
        yield f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path)
    parser.add_argument("--times", type=int, default=1, help="enlarge the sources first (bench/enlarge.py)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="+", choices=ENGINES, default=list(ENGINES))
    parser.add_argument("--part-size", type=int, help="also measure with parts of this many bytes")
    options = parser.parse_args()
    config = options.config.resolve()
    with tempfile.TemporaryDirectory() as name:
        if options.times > 1:
            enlarge(config, Path(name), options.times)
            config = Path(name) / "config.yaml"
        found, small = measure(options.only, config, options.rounds), {}
        if options.part_size:
            values = yaml.safe_load(config.read_text()) | {"part_size": options.part_size}
            with tempfile.NamedTemporaryFile("w", dir=config.parent, suffix=".yaml") as parts:
                parts.write(yaml.safe_dump(values))
                parts.flush()
                small = measure(options.only, Path(parts.name), options.rounds)
    print("\n".join(table(found, small)))
    for runs in (found, small):
        if len({one.digest for of_engine in runs.values() for one in of_engine}) > 1:
            sys.exit("the files of the corpus are not the same with every engine")
    print("\nThe files of the corpus and all token files are the same with every engine.")


if __name__ == "__main__":
    main()
