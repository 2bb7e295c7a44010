"""`python -m train`: a manifest in, an adapter out.

    python -m train --manifest MANIFEST [--config FILE] [--learning-rate 1e-4 …]
    python -m train doctor                     the other commands are in COMMANDS

Everything that can be checked without torch is checked before torch is loaded, and slow imports come after the signal
handlers are installed. The last line of standard output is the path of the training record.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import traceback
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, NoReturn, get_args, get_origin

from tasks.core.error_messages import DEBUG, format_error, is_on, to_pack_error
from tasks.core.errors import Interrupted, UsageError
from train.machine import meeting
from train.machine.signals import SignalGuard, reports

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo

# Commands besides training, by name: a module with `main(arguments) -> exit code`, imported when it is called.
COMMANDS = {"doctor": "train.doctor"}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError("bad_command_line", f"{message}; see python -m train --help")


def parser() -> argparse.ArgumentParser:
    """Build a parser with one option per setting of TrainingConfig, named after it."""
    from train.config import DEFAULT, TrainingConfig

    ours = _Parser(
        prog="python -m train",
        description="Train a QLoRA adapter on a corpus. To check this machine instead, run `python -m train doctor`.",
        allow_abbrev=False,
    )
    ours.add_argument(
        "--manifest",
        type=Path,
        required=True,
        help="a manifest (file, name, or key), a corpus folder, or a folder of shards",
    )
    ours.add_argument(
        "--config", type=Path, metavar="FILE", default=DEFAULT, help="YAML file of settings (default: train/qlora.yaml)"
    )
    ours.add_argument(
        "--root", type=Path, metavar="FOLDER", default=Path(), help="folder that contains data/ (default: this folder)"
    )
    ours.add_argument("--where", action="store_true", help="print the path of the run's record and exit")
    ours.add_argument("--debug", action="store_true", help="print a traceback if an error occurs")
    settings = ours.add_argument_group("settings (override those of the file)")
    for name, field in TrainingConfig.model_fields.items():
        text = (field.description or "").replace("%", "%%")
        if field.default is not None:
            default = str(field.default).lower() if isinstance(field.default, bool) else field.default
            text += f" (default: {default})"
        settings.add_argument(f"--{name.replace('_', '-')}", dest=f"set_{name}", metavar=_values(field), help=text)
    return ours


def _values(field: FieldInfo) -> str:
    """Return the values a setting accepts, as `auto|N`."""
    kinds = get_args(field.annotation) or (field.annotation,)
    words: list[str] = []
    for kind in kinds:
        words += [str(word) for word in get_args(kind)] if get_origin(kind) is Literal else []
        words += [kind] if isinstance(kind, str) else []
    names = {int: "N", float: "X", bool: "true|false", str: "TEXT"}
    bare = [get_args(kind)[0] if get_origin(kind) is Annotated else kind for kind in kinds]
    words += [names[kind] for kind in bare if kind in names]
    return "|".join(words)


def main(arguments: list[str], guard: SignalGuard | None = None) -> int:
    """Run the command, with the caller's guard if any; return the exit code."""
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
        return failed.exit_code
    guard.leave(0)
    return 0


def _run(arguments: list[str], guard: SignalGuard) -> None:
    from train.config import TrainingConfig, load_training_config
    from train.data.corpus import open_corpus
    from train.loop.run_folder import RunFolder
    from train.machine import devices

    with meeting.or_stop_all():
        options = parser().parse_args(arguments)
        given = {name: getattr(options, f"set_{name}") for name in TrainingConfig.model_fields}
        config = load_training_config(options.config, {name: text for name, text in given.items() if text is not None})
        corpus = open_corpus(options.manifest, config.allow_unisolated)
        folder = RunFolder(options.root, config, corpus)
        folder.check()
        if options.where:
            print(folder.record)
            return
        if folder.record.exists() and not meeting.is_one_of_several():  # several ranks first ask whether all have it
            folder.report_finished()
            return
        devices.check_libraries()
    logging.getLogger("bitsandbytes").setLevel(logging.CRITICAL)  # it logs while it is imported
    if reports():
        action = f"resuming after step {done}" if (done := folder.steps_done()) else "starting training"
        print(f"{action}; loading torch and the model", file=sys.stderr, flush=True)
    # Under torchrun, WORLD_SIZE is the number of ranks.
    if "RANK" not in os.environ and (ranks := devices.ranks(config)) > 1:
        from train.machine import launch

        launch.launch(ranks, arguments)
        return
    from train.loop import run
    from train.machine.ranks import leave, of_lost_rank

    try:
        run.train(corpus, config, folder, options.root, guard)
        leave(together=True)
    except Interrupted:
        leave(together=False)
        raise
    except Exception as error:
        if (known := of_lost_rank(error)) is not error:
            raise known from error
        raise


if __name__ == "__main__":
    guard = SignalGuard()
    guard.install()
    sys.exit(main(sys.argv[1:], guard))
