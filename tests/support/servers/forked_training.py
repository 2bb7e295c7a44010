"""Run the training that the pipeline starts in a fork of a process with torch.

    pipeline.graph.train ─Popen(words)─▶ fork ─▶ the training command

Loading torch in a new process would take seconds. The pipeline handles the fork as it handles a process: it waits for
it, sends signals, and reads the exit code. tests/pipeline/test_train_adapter.py starts a new process where only that
shows the behavior.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
import traceback
from collections.abc import Sequence


class Training:
    """The part of subprocess.Popen that the pipeline uses."""

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
    """Make the pipeline start its training in a fork.

    Other short processes of the pipeline remain processes.
    """

    from packcorpus.pipeline import graph

    class Subprocess:
        Popen, run = Training, graph.subprocess.run

    graph.subprocess = Subprocess  # type: ignore[assignment]


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
