"""A worker that is lost is replaced, and no worker is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.commands import ROOT
from support.steps import Deaf, Dying, Marked, Slow

from packcorpus.pipeline.engines import Workers
from packcorpus.tasks.core.errors import Busy


def is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{process}/stat").read_text().split(") ")[1][0] != "Z"


def gone_within(seconds: float, processes: list[int]) -> bool:
    deadline = time.monotonic() + seconds
    while any(map(is_alive, processes)):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def test_a_step_whose_worker_died_is_taken_again(tmp_path: Path) -> None:
    steps = [Dying(tmp_path, number, deaths=3 if number == 1 else 0) for number in range(6)]
    with Workers(2) as engine:
        found = dict(engine.map(steps))
    assert [found[number].tokens for number in range(6)] == list(range(6))
    assert [step.attempts for step in steps] == [1, 4, 1, 1, 1, 1]


def test_a_step_that_loses_every_worker_is_named(tmp_path: Path) -> None:
    steps = [Dying(tmp_path, number, deaths=99 if number == 1 else 0) for number in range(6)]
    lost = r"chat\.jsonl:2: lost its worker 4 times: .* signal 9"
    with Workers(2) as engine, pytest.raises(Busy, match=lost) as found:
        list(engine.map(steps))
    assert found.value.code == "E714"
    assert steps[1].attempts == 4


def test_workers_stay_for_all_steps_and_leave_with_the_block(tmp_path: Path) -> None:
    with Workers(2) as engine:
        list(engine.map([Slow(tmp_path, number, 0.05) for number in range(8)]))
        list(engine.map([Slow(tmp_path, number, 0.05) for number in range(8, 16)]))
        processes = {int((tmp_path / f"{number}.pid").read_text()) for number in range(16)}
        assert len(processes) == 2
    assert not any(map(is_alive, processes))


@pytest.mark.parametrize("kind", [Slow, Deaf])
def test_an_interrupt_does_not_wait_for_steps(tmp_path: Path, kind: type[Slow]) -> None:
    started = time.monotonic()

    def interrupted() -> None:
        with Workers(2) as engine:
            for _ in engine.map([Marked(tmp_path, 0), kind(tmp_path, 1, 60)]):
                while not (tmp_path / "1.pid").exists():
                    time.sleep(0.01)
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert time.monotonic() - started < 30, "it waits for the step, which takes 60 s"
    assert gone_within(20, [int((tmp_path / "1.pid").read_text())])


def test_workers_leave_when_their_parent_was_killed(tmp_path: Path) -> None:
    """Each worker finishes its step, and starts no other step."""
    code = (
        "import sys; from pathlib import Path\n"
        "from support.steps import Slow; from packcorpus.pipeline.engines import Workers\n"
        "folder = Path(sys.argv[1])\n"
        "with Workers(2) as engine: list(engine.map([Slow(folder, number, 1.0) for number in range(9)]))"
    )
    environment = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"}
    parent = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], env=environment)
    files = [tmp_path / "0.pid", tmp_path / "1.pid"]
    while not all(file.exists() and file.read_text() for file in files):
        assert parent.poll() is None
        time.sleep(0.02)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    assert gone_within(120, [int(file.read_text()) for file in files])
    done = sorted(file.name for file in tmp_path.glob("*.json"))
    assert done == ["0.json", "1.json"]
