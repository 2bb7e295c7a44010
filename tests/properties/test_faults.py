"""A few of the faults of bench/reliability/faults.py, from a fixed seed.

`make faults` tests hundreds of each kind.
"""

from __future__ import annotations

import importlib.util
import os
import random
import re
import signal
import sys
import time
from pathlib import Path

import pytest
from support.commands import ROOT, luigi, write_chats

from packcorpus.tasks.verification.verify import verify

_spec = importlib.util.spec_from_file_location("faults", ROOT / "bench" / "reliability" / "faults.py")
assert _spec is not None
assert _spec.loader is not None
faults = sys.modules["faults"] = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(faults)
# Only a run with a fault needs its own interpreter.
faults.undisturbed_run = lambda folder, config: luigi(folder, "--config", f"{config}.yaml", "--workers", "1")

needs_strace = pytest.mark.skipif(not faults.can_trace(), reason="needs strace, and the right to trace")


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> faults.Project:
    return faults.make_project(tmp_path_factory.mktemp("faults") / "whole", 250)


@pytest.fixture(scope="module")
def cases(project: faults.Project, tmp_path_factory: pytest.TempPathFactory) -> list[faults.Case]:
    """Return a fault for each call of the commit."""
    commit = faults.before_commit(project, tmp_path_factory.mktemp("faults") / "commit")
    return list(faults.call_cases("commit", commit))


@pytest.fixture(scope="module")
def calls(project: faults.Project, tmp_path_factory: pytest.TempPathFactory) -> list[tuple[str, int, str]]:
    nothing = faults.from_nothing(project, tmp_path_factory.mktemp("faults") / "nothing")
    return faults.calls_of(nothing.start)


@needs_strace
def test_all_is_synced_before_the_manifest_is_there(calls: list[tuple[str, int, str]]) -> None:
    assert faults.unsynced(calls) == []


@needs_strace
def test_a_missing_sync_is_seen(calls: list[tuple[str, int, str]]) -> None:
    synced = {path for call, _, line in calls if call == "fsync" for path in faults.paths_of(line)}
    needed = {path for path in synced if re.match(r"data/corpora|manifests|data$|\.$", path)}
    assert len(needed) > 10
    for path in needed:
        without = [entry for entry in calls if not (entry[0] == "fsync" and path in faults.paths_of(entry[2]))]
        assert faults.unsynced(without), path


FAULTS = {
    "killed": "signal=KILL at ",
    "a write is lost": "retval=.* at write .*tokenizer",
    "a file cannot be read": 'error=EIO at openat .*plans.*/index.arrow"',
    "what was made cannot be read back": 'error=EIO at openat .*manifests/[^.].*json", O_RDONLY',
}


@needs_strace
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_in_a_call_of_the_commit(cases: list[faults.Case], name: str) -> None:
    such = [case for case in cases if re.match(FAULTS[name], case.what)]
    assert faults.survive(random.Random(0).choice(such))


def test_a_short_write(project: faults.Project) -> None:
    assert faults.survive(faults.Case("short writes", "", project, faults.with_small_files(project, 20_000)))


def test_two_runs_of_one_corpus(project: faults.Project) -> None:
    assert faults.survive(faults.Case("two runs", "", project, faults.two_at_once(project, "corpus", "corpus")))


def test_two_runs_that_share_their_sources(project: faults.Project) -> None:
    both = faults.undisturbed(project.start, "corpus", "longer")
    assert faults.survive(faults.Case("two runs", "", both, faults.two_at_once(both, "corpus", "longer")))


def test_a_worker_that_is_killed_is_replaced(tmp_path: Path) -> None:
    """The kernel kills a worker if memory runs out."""
    write_chats(tmp_path / "chats.jsonl", 20_000)
    (tmp_path / "corpus.yaml").write_text(faults.CONFIG)
    run = faults.start(tmp_path, faults.words(workers=2))
    deadline = time.monotonic() + 300
    children: list[int] = []
    while not children:
        assert time.monotonic() < deadline, "no worker starts"
        time.sleep(0.005)
        children = [int(child) for child in Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split()]
    os.kill(children[0], signal.SIGKILL)
    done = faults.finish(run)
    assert done.returncode == 0, done.stderr
    verify(tmp_path / done.stdout.strip())
