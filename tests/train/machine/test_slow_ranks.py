"""Ranks wait for each other: for hours while one prepares, but not in a step.

Run as a script under torch.distributed, this file is one rank of several.
"""

from __future__ import annotations

import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from support.commands import ROOT, command
from torch.distributed import launcher
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from packcorpus.train.machine import process, ranks
from packcorpus.train.machine.process import LAUNCHED, RESTART


def test_a_slow_first_rank_is_waited_for_but_not_in_a_step(tmp_path: Path) -> None:
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = command(ROOT, *run, str(Path(__file__)), str(tmp_path))
    assert done.returncode == 0, done.stderr[-2000:]
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {
        "0": "main first, largest [3.0, 1.0], step: waited in vain",
        "1": "main first, largest [3.0, 1.0], step: waited in vain",
    }


def rank(folder: Path) -> None:
    """Run one of two ranks."""
    # A step may take one second here, and the first rank prepares for longer. It does not take part in the step before
    # the other rank has waited in vain.
    ranks.STEP = timedelta(seconds=1)
    state = ranks.start(cpu=True)
    began = time.monotonic()
    ranks.main_first(state.is_main_process, lambda: time.sleep(1.5 * state.is_main_process))
    assert time.monotonic() - began >= 1.5
    found = ranks.largest([3.0 * state.process_index, 1.0 - state.process_index], torch.device("cpu"))
    step = ""
    if state.is_main_process:
        end = time.monotonic() + 10
        while not (folder / "1").exists() and time.monotonic() < end:
            time.sleep(0.02)
        step = "waited in vain" if time.monotonic() < end else "nobody waited in vain"
    else:
        began = time.monotonic()
        try:
            torch.distributed.barrier()
        except RuntimeError:
            step = "waited in vain" if time.monotonic() - began < 2 else "ended with the other"
    (folder / str(state.process_index)).write_text(f"main first, largest {found}, step: {step}")
    ranks.leave(together=False)


class Launched:
    """A stand-in for torch's launcher that fails with these codes, then succeeds."""

    def __init__(self, *codes: int):
        self.codes = list(codes)

    def __call__(self, config: Any, program: str) -> Any:
        def run(*words: str) -> None:
            if self.codes:
                failure = ProcessFailure(0, 1, self.codes.pop(0), "no file")
                raise ChildFailedError("train", {0: failure})

        return run


def test_ranks_that_ran_out_of_memory_are_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LAUNCHED, "0")
    monkeypatch.setattr(process.logging, "disable", lambda level: None)
    monkeypatch.setattr(launcher.api, "elastic_launch", Launched(RESTART, 65))
    assert process.launch(2, [])
    with pytest.raises(process.RankFailed) as failed:
        process.launch(2, [])
    assert failed.value.exit_code == 65
    assert not process.launch(2, [])


if __name__ == "__main__":
    rank(Path(sys.argv[1]))
