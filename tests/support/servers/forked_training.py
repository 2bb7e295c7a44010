"""Make the training that the pipeline starts a fork of its own process, which has loaded torch, which takes seconds.

    pipeline.training.train ─Popen(words)─▶ fork ─▶ python -P -m train …

The pipeline sees a process as it would otherwise: it waits for it, sends signals, and reads the exit code. What only a
new process has is tested with one: tests/pipeline/test_train_adapter.py.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
import traceback
from collections.abc import Sequence


class Training:
    """What the pipeline uses of subprocess.Popen."""

    def __init__(self, words: Sequence[str]):
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if not self.pid:
            os._exit(_run(words))

    def terminate(self) -> None:
        os.kill(self.pid, signal.SIGTERM)

    def wait(self) -> int:
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def install() -> None:
    """Let the pipeline start its training so; the short processes that it starts besides stay as they are."""
    import pipeline.training

    class Subprocess:
        Popen, run = Training, pipeline.training.subprocess.run

    pipeline.training.subprocess = Subprocess  # type: ignore[assignment]


def _run(words: Sequence[str]) -> int:
    """Run the module as a new interpreter would, and return the exit code."""
    _, *options, module = words[: words.index("-m") + 2]
    assert options == ["-P", "-m"], words
    signal.set_wakeup_fd(-1)
    for number, handler in ((signal.SIGTERM, signal.SIG_DFL), (signal.SIGINT, signal.default_int_handler)):
        signal.signal(number, handler)
    sys.argv = list(words[words.index("-m") + 1 :])
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 0
    except BaseException:  # as an interpreter would
        traceback.print_exc()
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return 0
