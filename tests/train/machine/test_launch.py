"""A rank that fails reports its error itself, and nothing else is printed.

Neither torch's launcher nor files of the user add lines.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.commands import ROOT

from packcorpus.train.machine.process import LAUNCHED, RankFailed, launch


@pytest.fixture(autouse=True)
def _restored(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Restore the state that the launcher changes in its process."""
    monkeypatch.setenv(LAUNCHED, "")
    yield
    logging.disable(logging.NOTSET)


def test_a_rank_that_fails_is_reported_by_itself_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    python = tmp_path / "python"  # the first rank fails, the others wait for it
    python.write_text('#!/bin/sh\nif [ $RANK = 0 ]; then echo "E617 error: …" >&2; exit 65; fi\nexec sleep 60\n')
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    with pytest.raises(RankFailed) as caught:
        launch(2, [])
    assert (caught.value.exit_code, str(caught.value)) == (65, "")
    assert capfd.readouterr().err == "E617 error: …\n"


def test_ranks_ignore_modules_of_the_user_with_our_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    # The rank, which is a new process, reports the unknown option with exit code 64. The files of the user would end it
    # with exit code 3.
    for name in ("train", "tasks", "pipeline"):
        (tmp_path / f"{name}.py").write_text("import os\nprint('a module of the user', flush=True)\nos._exit(3)\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    with pytest.raises(RankFailed) as caught:
        launch(1, ["--manifest", "none", "--no-such-option"])
    output = capfd.readouterr()
    assert (caught.value.exit_code, output.out) == (64, "")
    assert "--no-such-option" in output.err
