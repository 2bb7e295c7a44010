"""A rank that fails reports its error itself: torch's launcher adds no lines of its own."""

from __future__ import annotations

import logging
import signal
import sys
from pathlib import Path

import pytest

from train.machine.launch import RankFailed, launch
from train.machine.signals import LAUNCHED


def test_a_rank_that_fails_is_reported_by_itself_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    python = tmp_path / "python"  # the first rank fails, the others wait for it
    python.write_text('#!/bin/sh\nif [ $RANK = 0 ]; then echo "E617 error: …" >&2; exit 65; fi\nexec sleep 60\n')
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.setenv(LAUNCHED, "")  # restored afterwards
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        with pytest.raises(RankFailed) as caught:
            launch(2, [])
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        logging.disable(logging.NOTSET)
    assert (caught.value.exit_code, str(caught.value)) == (65, "")
    assert capfd.readouterr().err == "E617 error: …\n"
