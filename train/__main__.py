"""Run `python -m train`: train an adapter on the corpus of a manifest.

    python -m train --manifest MANIFEST [--config FILE] [--learning-rate 1e-4 …]
    python -m train doctor                     COMMANDS lists the other commands

Everything that can be checked without torch is checked before torch is loaded, and slow imports come after the signal
handlers are installed. The last line of standard output is the path of the training record.
"""

from __future__ import annotations

import logging
import os
import sys
import traceback
from importlib import import_module
from typing import TYPE_CHECKING

from tasks.core.errors import Interrupted, UsageError
from tasks.core.messages import DEBUG, format_error, is_on, to_pack_error
from tasks.core.printable import printable
from train.machine import meeting
from train.machine.signals import SignalGuard, reports

if TYPE_CHECKING:
    from train.options import Parser

# Modules of the commands other than training, imported on use. Each has `main(arguments) -> exit code`.
COMMANDS = {"doctor": "train.doctor", "diagnose": "train.diagnose.command", "merge": "train.merge.command"}


def parser() -> Parser:
    """Build the parser of the training command."""
    from train.options import settings_parser

    return settings_parser(
        "python -m train",
        f"Train a QLoRA adapter on a corpus. Other commands: python -m train {', '.join(COMMANDS)}.",
    )


def main(arguments: list[str], guard: SignalGuard | None = None) -> int:
    """Run the command and return its exit code.

    `guard` is the caller's signal guard, if it has one.
    """
    guard = guard or SignalGuard()
    try:
        if arguments and not arguments[0].startswith("-"):
            if arguments[0] not in COMMANDS:
                raise UsageError(
                    "bad_command_line",
                    f"{arguments[0]!r}: expected options, or one of {', '.join(COMMANDS)}; see python -m train --help",
                )
            code: int = import_module(COMMANDS[arguments[0]]).main(arguments[1:])
            guard.leave(code)
            return code
        _run(arguments, guard)
    except Exception as error:
        if "--debug" in arguments or is_on(DEBUG):
            traceback.print_exc()
        failed = to_pack_error(error)
        guard.leave(failed.exit_code)
        rank = os.environ.get("RANK", "0")
        failed.facts = ({"rank": int(rank)} if rank != "0" else {}) | failed.facts
        if str(failed) and (reports() or not isinstance(failed, Interrupted)):
            print(format_error(failed), file=sys.stderr)
        if meeting.store() is not None:
            from train.machine import alarm

            alarm.end_if_rung(failed.exit_code)
        return failed.exit_code
    guard.leave(0)
    return 0


def _run(arguments: list[str], guard: SignalGuard) -> None:
    from train.data.corpus import open_corpus
    from train.evaluation.requirements import check_evaluation
    from train.loop.run_folder import RunFolder
    from train.machine import devices, out_of_memory
    from train.options import config_of

    with meeting.or_stop_all():
        options = parser().parse_args(arguments)
        config = config_of(options)
        corpus = open_corpus(options.manifest, config.allow_unisolated, options.root)
        check_evaluation(config, corpus)
        folder = RunFolder(options.root, config, corpus)
        folder.check()
        if options.where:
            print(folder.record)
            return
        if folder.record.exists() and not meeting.is_one_of_several():  # several ranks first check that all have it
            folder.report_finished()
            return
        devices.check_libraries()
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # torch's profiler reads it when torch is loaded
    logging.getLogger("bitsandbytes").setLevel(logging.CRITICAL)  # it logs on import
    if reports():
        action = f"resuming after step {done}" if (done := folder.steps_done()) else "starting training"
        print(printable(f"{action}; loading torch and the model"), file=sys.stderr, flush=True)
    ranks = 1 if "RANK" in os.environ else devices.ranks(config)  # under torchrun, WORLD_SIZE is the number of them
    if ranks > 1:
        from train.machine import launch

        while launch.launch(ranks, arguments):
            print(folder.last_reduction(), file=sys.stderr, flush=True)
        return
    with meeting.or_stop_all():
        from train.loop import run
        from train.machine import alarm
        from train.machine.ranks import leave

    try:
        run.train(corpus, config, folder, options.root, guard)
        leave(together=True)
        alarm.stop()
    except Interrupted:
        leave(together=False)
        alarm.stop()
        raise
    except out_of_memory.Restart:
        out_of_memory.restart(arguments, folder.last_reduction())
    except Exception as error:
        if (known := alarm.ring(error)) is not error:
            raise known from error
        raise


if __name__ == "__main__":
    guard = SignalGuard()
    guard.install()
    sys.exit(main(sys.argv[1:], guard))
