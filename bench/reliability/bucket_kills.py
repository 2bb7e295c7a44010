"""Kill workers, nodes, and the driver of a run on Ray with its root in a bucket.

    python bench/reliability/bucket_kills.py CONFIG [--times 10] [--kills 10] [--nodes 2] [--seed 0]

    sources ─▶ moto's S3 ◀─▶ packcorpus pack --on ray://auto, with SIGKILL to one process at a time ─▶ verify
    the same sources ─▶ packcorpus pack, undisturbed, in a folder ─────────────────────────────────▶ the same files?

The sources are in the bucket, too. Each node has its own scratch folder, which it keeps when it restarts. The kills are
spread over the steps of the run; the seed decides the step, the process, and the node of each kill. A node whose raylet
was killed is restarted; if it is the first node, the whole cluster is restarted. If the driver ends early, the same
command is started again. Prints the outcome, and exits with 1 if a file differs or is left over.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "bench")]

from enlarge import enlarge  # noqa: E402
from moto_bucket import BUCKET, MotoBucket, moto_bucket  # noqa: E402
from support.servers.ray_cluster import Node, free_port  # noqa: E402

BIN = Path(sys.executable).parent
URL = f"s3://{BUCKET}/root"
COMPARED = ("data/corpora/", "data/tokens/", "data/tokenizers/", "manifests/")
SHARED = ("data/plans/", "data/digests/", "data/engines/")  # also in the bucket
FILE_MB = 8  # megabytes of a source
STARTED = 90.0  # seconds for a node to start
PATIENCE = 20.0  # seconds for a driver to notice that the first node is gone
LAST = 1800.0  # seconds for the whole benchmark
VICTIMS = ("worker", "raylet", "driver")


class Nodes:
    """Nodes of a cluster on this machine; the first node is its head."""

    def __init__(self, count: int, folder: Path):
        self._folder, self._count = folder, count
        self.nodes: list[Node] = []
        self._start_all()

    def _start_all(self) -> None:
        self._port = free_port()
        os.environ["RAY_ADDRESS"] = f"127.0.0.1:{self._port}"
        ports = [f"--port={self._port}", f"--ray-client-server-port={free_port()}"]
        self.nodes = [self._start(0, "--head", "--include-dashboard=false", *ports)]
        self.nodes += [self._start(number, f"--address=127.0.0.1:{self._port}") for number in range(1, self._count)]

    def _start(self, number: int, *options: str) -> Node:
        log = self._folder / f"node-{number}.log"
        node, deadline = Node(log, *options), time.monotonic() + STARTED
        while "started" not in log.read_text():
            if node.process.poll() is not None or time.monotonic() > deadline:
                sys.exit(f"a node of Ray does not start: {log.read_text()}")
            time.sleep(0.2)
        return node

    def processes(self, number: int, *titles: str) -> list[psutil.Process]:
        """Return the processes of a node that have one of these titles, sorted by id.

        A title is the start of the command's name.
        """
        found = []
        for process in psutil.Process(self.nodes[number].process.pid).children(recursive=True):
            try:
                title = " ".join(process.cmdline())
            except psutil.Error:
                continue
            if any(Path(title.split(" ")[0]).name.startswith(word) for word in titles):
                found.append(process)
        return sorted(found, key=lambda process: process.pid)

    def restart(self, number: int) -> None:
        """Restart a node whose raylet is dead; for the first node, restart all nodes."""
        for node in self.nodes if number == 0 else [self.nodes[number]]:
            node.kill()
        if number == 0:
            self._start_all()
        else:
            self.nodes[number] = self._start(number, f"--address=127.0.0.1:{self._port}")

    def stop(self) -> None:
        for node in reversed(self.nodes):
            node.kill()


class Run:
    """The command, which is started again until it succeeds."""

    def __init__(self, folder: Path):
        self._folder, self.codes = folder, list[int]()
        self._log = (folder / "driver.log").open("ab")
        self.start()

    def start(self) -> None:
        words = [str(BIN / "packcorpus"), "pack", "config.yaml", "--root", URL, "--on", "ray://auto", "--quiet"]
        self.process = subprocess.Popen(
            words, cwd=self._folder, stdout=self._log, stderr=self._log, start_new_session=True
        )

    def lose(self) -> str:
        """End a driver whose cluster is gone, and return a description of its end.

        Ray would try for minutes to reach the cluster.
        """
        try:
            return f"whose driver has ended with {self.process.wait(timeout=PATIENCE)}"
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            return f"whose driver was killed after {PATIENCE:.0f} s"

    def is_done(self) -> bool:
        """Return whether the command has succeeded; if it has failed, start it again."""
        code = self.process.poll()
        if code is None:
            return False
        self.codes.append(code)
        if code:
            self.start()
        return code == 0


def kill(rng: random.Random, nodes: Nodes, run: Run) -> str:
    """Kill one process, and return a description of it."""
    victim, number = rng.choice(VICTIMS), rng.randrange(len(nodes.nodes))
    if victim == "driver":
        os.killpg(run.process.pid, signal.SIGKILL)
        return "driver"
    found = nodes.processes(number, "ray::attempt") or nodes.processes(number, "ray::")
    if victim == "worker" and found:
        found[rng.randrange(len(found))].kill()
        return f"worker of node {number}"
    for raylet in nodes.processes(number, "raylet"):
        raylet.kill()
    nodes.restart(number)
    return f"raylet of node {number}" + (f", {run.lose()}" if number == 0 else "")


def steps_in(bucket: MotoBucket) -> int:
    """Return the number of steps whose receipts are in the bucket."""
    keys = [key for key in bucket.size() if key.endswith(".json")]
    return sum(key.startswith("root/data/tokens/") or "/shard-" in key for key in keys)


def disturbed(bucket: MotoBucket, folder: Path, options: Any, steps: int) -> list[str]:
    """Run the command on a cluster, and kill processes at seeded steps.

    Returns a line for each kill.
    """
    rng = random.Random(options.seed)
    moments = sorted(rng.randrange(steps) for _ in range(options.kills))
    lines, deadline = list[str](), time.monotonic() + LAST
    nodes = Nodes(options.nodes, folder)
    try:
        run = Run(folder)
        while not run.is_done():
            if time.monotonic() > deadline:
                sys.exit(f"the run has not ended after {LAST:.0f} seconds, with {lines}")
            if moments and steps_in(bucket) >= moments[0]:
                time.sleep(rng.random())
                done = steps_in(bucket)
                lines.append(f"{kill(rng, nodes, run)}, after {done} of {steps} steps")
                print(lines[-1], file=sys.stderr, flush=True)
                del moments[0]
            time.sleep(0.05)
        lines.append(f"exit codes of the driver: {', '.join(map(str, run.codes))}")
        lines += [f"not killed, because the run was over: {len(moments)}"] * bool(moments)
    finally:
        nodes.stop()
    return lines


def digests_in(bucket: MotoBucket) -> dict[str, str]:
    """Return the SHA-256 of all files to compare, by path below the root."""
    found = {}
    for key in bucket.size():
        path = key.removeprefix("root/")
        if key.startswith("root/") and path.startswith(COMPARED) and not path.endswith("run.json"):
            found[path] = hashlib.sha256(bucket.get(key)).hexdigest()
    return found


def digests_below(root: Path) -> dict[str, str]:
    found = {}
    for path in root.rglob("*"):
        name = path.relative_to(root).as_posix()
        hidden = path.name.startswith(".") or path.name == "run.json"
        if path.is_file() and name.startswith(COMPARED) and not hidden:
            with path.open("rb") as file:
                found[name] = hashlib.file_digest(file, "sha256").hexdigest()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path)
    parser.add_argument("--times", type=int, default=10)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, moto_bucket() as bucket:
        folder = Path(name)
        os.environ.update(bucket.environment | {"PACKCORPUS_SCRATCH": str(folder / "driver")})
        enlarge(options.config.resolve(), folder, options.times)
        bucket.take_sources(folder / "config.yaml", FILE_MB)
        pack = [str(BIN / "packcorpus"), "pack", "config.yaml", "--root", "root", "--quiet", "--workers", "2"]
        subprocess.run(pack, cwd=folder, check=True, stdout=subprocess.DEVNULL)
        expected = digests_below(folder / "root")
        steps = sum(path.endswith(".json") for path in expected if path.startswith("data/tokens/"))
        steps += len(list((folder / "root").glob("data/plans/*/shard-*.json")))
        start = time.monotonic()
        lines = disturbed(bucket, folder, options, steps)
        seconds, found = time.monotonic() - start, digests_in(bucket)
        [manifest] = [path for path in found if path.startswith("manifests/")]
        verified = subprocess.run([str(BIN / "packcorpus"), "verify", f"{URL}/{manifest}"], check=False).returncode
        known = tuple(f"root/{start}" for start in (*COMPARED, *SHARED))
        left = [key for key in bucket.size() if not key.startswith((*known, "sources/"))]
        unfinished, left_here = len(bucket.unfinished()), len(list(folder.rglob("data/**/.*.tmp")))
    print("\n".join(lines))
    differ = sorted(path for path in expected.keys() | found.keys() if expected.get(path) != found.get(path))
    print(f"{seconds:.0f} s; {len(found)} files compared, {len(differ)} differ, {len(left)} left over; ", end="")
    print(f"verify has ended with {verified}")
    print(f"not ended: {unfinished} uploads in parts; unfinished files of killed writers in scratch: {left_here}")
    if differ or left or verified:
        sys.exit("\n".join([*differ, *left]) or "verify has failed")


if __name__ == "__main__":
    main()
