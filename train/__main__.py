"""Run `packcorpus train`: train an adapter on a corpus.

    packcorpus train [CORPUS] --base-model MODEL [--config FILE] [--learning-rate 1e-4 …]
    packcorpus train doctor                    COMMANDS lists the other commands

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

from packcorpus.tasks.core.errors import InputMissing, Interrupted, PackError, UsageError
from packcorpus.tasks.core.messages import DEBUG, format_error, is_on, to_pack_error
from packcorpus.tasks.core.printable import printable, suggest
from packcorpus.train.machine import process
from packcorpus.train.machine.process import LAUNCHED, SignalGuard, is_one_of_several, or_stop_all, reports

if TYPE_CHECKING:
    from packcorpus.train.config import Parser

# Modules of the commands other than training, imported on use. Each has `main(arguments) -> exit code`.
COMMANDS = {
    "doctor": "packcorpus.train.doctor",
    "diagnose": "packcorpus.train.diagnose.command",
    "merge": "packcorpus.train.merge.command",
    "chat": "packcorpus.train.chat.command",
    "certify": "packcorpus.train.certify.command",
}
# Those that take a run. Without one, a corpus of this name is meant, such as that of chat.jsonl.
OF_RUNS = ("merge", "chat", "certify")

# Variables with the settings of torch's allocator: torch knows the first in all versions, the second since 2.9.
ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")


def parser() -> Parser:
    """Build the parser of the training command."""
    from packcorpus.train.config import settings_parser

    return settings_parser("packcorpus train", "Train a QLoRA adapter on a corpus.")


def main(arguments: list[str], guard: SignalGuard | None = None) -> int:
    """Run the command and return its exit code.

    `guard` is the caller's signal guard, if it has one.
    """
    guard, code = guard or SignalGuard(), 0
    logging.getLogger("bitsandbytes").setLevel(logging.CRITICAL)  # our messages say what it lacks
    try:
        if arguments and arguments[0] in COMMANDS and not _names_corpus(arguments):
            code = import_module(COMMANDS[arguments[0]]).main(arguments[1:])
        else:
            _train(arguments, guard)
    except Exception as error:
        if "--debug" in arguments or is_on(DEBUG):
            traceback.print_exc()
        failed = to_pack_error(error)
        guard.leave(failed.exit_code)
        rank = os.environ.get("RANK", "0")
        failed.facts = ({"rank": int(rank)} if rank != "0" else {}) | failed.facts
        if str(failed) and (reports() or not isinstance(failed, Interrupted)):
            print(format_error(failed), file=sys.stderr)
        if is_one_of_several():
            from packcorpus.train.machine.ranks import end_if_rung

            end_if_rung(failed.exit_code)
        return failed.exit_code
    guard.leave(code)
    return code


def _names_corpus(arguments: list[str]) -> bool:
    """Return whether the first argument, which is also a command, names a corpus."""
    command, *others = arguments
    if command not in OF_RUNS or {*others} & {"--help", "-h"} or (others and not others[0].startswith("-")):
        return False
    from packcorpus.train.data.corpus import locate

    try:
        locate(command, parser().parse_known_args(others)[0].root)
    except PackError:
        return False
    return True


def _set_environment() -> None:
    """Set what torch reads when it is loaded, also in ranks and other children."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # of the profiler
    # Rows without padding, conversations that run alone, and evaluations differ in size, and would fragment the memory.
    if not any(name in os.environ for name in ALLOCATOR):
        os.environ[ALLOCATOR[0]] = "expandable_segments:True"


def _train(arguments: list[str], guard: SignalGuard) -> None:
    from packcorpus.train.config import config_of, words_of
    from packcorpus.train.data.corpus import open_corpus, use_corpus
    from packcorpus.train.loop.run_folder import RunFolder
    from packcorpus.train.machine import devices

    with or_stop_all():
        try:
            options = parser().parse_args(arguments)
            use_corpus(options)
        except (InputMissing, UsageError):
            _check_command(arguments)
            raise
        config = config_of(options)
        corpus = open_corpus(options.manifest, config.allow_unisolated, options.root)
        config.check_evaluation(corpus.name, corpus.rows("validation"))
        folder = RunFolder(options.root, config, corpus)
        folder.check()
        if options.where:
            print(folder.record)
            return
        if folder.record.exists() and not is_one_of_several():  # several ranks first check that all have it
            folder.report_finished()
            return
        devices.check_libraries()
    _set_environment()
    if reports():
        action = f"resuming after step {done}" if (done := folder.steps_done()) else "starting training"
        print(printable(f"{action}; loading torch and the model"), file=sys.stderr, flush=True)
    count = 1 if "RANK" in os.environ else devices.ranks(config)  # under torchrun, WORLD_SIZE is the number of them
    if count > 1:
        while process.launch(count, words_of(options)):
            print(folder.last_reduction(), file=sys.stderr, flush=True)
        return
    with or_stop_all():
        from packcorpus.train.loop import run
        from packcorpus.train.machine import ranks

    try:
        run.train(corpus, config, folder, options.root, guard)
        ranks.leave(together=True)
    except Interrupted:
        ranks.leave(together=False)
        raise
    except Exception as error:
        if isinstance(error, process.Restart) and LAUNCHED not in os.environ:
            process.restart(words_of(options), folder.last_reduction())
        if (known := ranks.ring(error)) is not error:
            raise known from error
        raise


def _check_command(arguments: list[str]) -> None:
    """Raise UsageError if the first argument is a misspelled command and no corpus."""
    from packcorpus.train.data.corpus import locate

    if arguments and (hint := suggest(arguments[0], COMMANDS)):
        try:
            locate(arguments[0])
        except InputMissing:
            raise UsageError("bad_command_line", f"{arguments[0]}: no such command or corpus{hint}") from None


if __name__ == "__main__":
    guard = SignalGuard()
    guard.install()
    sys.exit(main(sys.argv[1:], guard))
