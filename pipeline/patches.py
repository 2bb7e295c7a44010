"""How Luigi runs here: in one process, with our messages and exit codes.

    PackError in a task ─reporting─▶ one message, its exit code ─▶ the command exits with this code
    command line that Luigi cannot parse ─▶ one message, E101
    Ctrl-C, SIGTERM ─▶ KeyboardInterrupt ─▶ one message, E713

`install` replaces these three attributes (for Luigi 3.8; pinned to <3.9). With the handlers of signals and
sys.unraisablehook (signals.py), there are five patches of Luigi and Python in all:

    patched                                | why                                             | upstream
    ---------------------------------------|-------------------------------------------------|-------------------------
    CmdlineParser._build_parser            | argparse prints all options of Luigi and exits  | no issue; no hook
                                           | with 2; building three parsers twice takes 50 ms|
    interface._run                         | the exit code is one per kind of failure instead| spotify/luigi#3038
                                           | of one per error; errors end in a traceback     |
    interface._WorkerSchedulerFactory      | `luigi` cannot name a worker of its own: ours   | only luigi.build can
                                           | runs tasks in this process, because the engine  |
                                           | owns all processes, and knows the run's ends    |
"""

from __future__ import annotations

import argparse
import functools
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator
from configparser import ConfigParser
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import luigi.interface
import luigi.parameter
from luigi.cmdline_parser import CmdlineParser
from luigi.configuration import get_config
from luigi.parameter import ParameterException
from luigi.scheduler import Scheduler
from luigi.task_register import Register, TaskClassException
from luigi.worker import DequeQueue, Worker

from packcorpus.pipeline import display
from packcorpus.pipeline.engines import leave
from packcorpus.pipeline.progress import run
from packcorpus.pipeline.signals import signals
from packcorpus.tasks.core.errors import Interrupted, PackError, UsageError
from packcorpus.tasks.core.messages import DEBUG, format_error, is_on, show_notes_with, to_pack_error
from packcorpus.tasks.core.printable import suggest
from packcorpus.tasks.core.process import cores

HELP = "see luigi --module pipeline PackCorpus --help"


class ReportedInterrupt(KeyboardInterrupt):
    """An interrupt that another process has reported."""


@contextmanager
def reporting() -> Iterator[None]:
    """Report an error as one message; the run exits with its code."""
    try:
        yield
    except Exception as error:
        failed = to_pack_error(error)
        run.exit_code = run.exit_code or failed.exit_code
        if str(failed) and run.first(str(failed)):  # else another process has reported it
            display.write(format_error(failed))
        raise failed from error.__cause__ if failed is error else error


# -- the command line -------------------------------------------------------------------------------------------------


def _parsers(build: Callable[..., argparse.ArgumentParser]) -> Callable[..., argparse.ArgumentParser]:
    """Make the parsers that Luigi's `build` returns report errors as E101.

    The message suggests the closest known option. Luigi reads the command line three times, and builds a parser to find
    the task and a second one for its options each time, at 20 ms each. Only one is built here.
    """

    @functools.cache
    def built(tasks: int, root_task: str | None, help_all: bool) -> argparse.ArgumentParser:
        parser = build(root_task, help_all)

        def refuse(message: str) -> NoReturn:
            unknown = re.search(r"unrecognized arguments: (--[^ =]+)", message)
            hint = suggest(unknown[1], parser._option_string_actions) if unknown else ""
            _fail(UsageError("bad_command_line", f"{message}{hint}; {HELP}"))

        parser.error = refuse  # type: ignore[method-assign]
        if root_task:
            try:
                Register.get_task_cls(root_task)
            except TaskClassException as error:
                _fail(_as_pack_error(error))
        return parser

    def parser_of(root_task: str | None = None, help_all: bool = False) -> argparse.ArgumentParser:
        known = Register._get_reg()
        named = next((word for word in sys.argv[1:] if word in known), None)
        return built(len(known), root_task or named, bool(help_all))

    return parser_of


def _as_pack_error(error: Exception) -> PackError:
    message = " ".join(str(error).split())
    parsing = re.search(r"Error when parsing the default value of '(\w+)'", message)
    if parsing:
        message = f"--{parsing[1].replace('_', '-')}: {error.__cause__}"
    elif not isinstance(error, (ParameterException, TaskClassException)):
        files = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__)]
        # Otherwise, Luigi failed to parse the value of an option.
        if not isinstance(error, ValueError) or luigi.parameter.__file__ not in files:
            return to_pack_error(error)
    return UsageError("bad_command_line", f"{message}; {HELP}")


def _fail(error: PackError) -> NoReturn:
    display.write(format_error(error))
    sys.exit(error.exit_code)


def _command(run_luigi: Callable[..., Any]) -> Callable[..., Any]:

    def command(*given: Any, **named: Any) -> Any:
        try:
            result = run_luigi(*given, **named)
        except KeyboardInterrupt as interrupt:
            if not isinstance(interrupt, ReportedInterrupt):
                again = Interrupted("interrupted", "interrupted; run the same command again to resume")
                display.write(format_error(again))
            sys.stdout.flush()
            os._exit(Interrupted.exit_code)  # without waiting for threads of libraries
        except Exception as error:
            if is_on(DEBUG):
                traceback.print_exc()
            _fail(_as_pack_error(error))
        if run.exit_code:
            sys.exit(run.exit_code)
        return result

    return command


# -- the worker -------------------------------------------------------------------------------------------------------


class _Results(DequeQueue):
    def close(self) -> None:
        """Do nothing; Luigi closes its queue between processes."""


class _InProcess(Worker):
    """Luigi's worker, which runs all tasks in this process, whatever --workers is."""

    def __init__(self, workers: int, **given: Any):
        super().__init__(worker_processes=1, **given)
        self._workers = workers
        self._task_result_queue = _Results()

    def __enter__(self) -> Any:
        signals.begin()
        run.begin(self._workers)
        display.begin()
        show_notes_with(display.show)
        if self._workers < 1:  # Luigi would silently do nothing
            raise UsageError("bad_command_line", f"--workers {self._workers}: must be at least 1")
        return super().__enter__()

    def __exit__(self, *error: Any) -> bool:
        is_command = CmdlineParser.get_instance() is not None
        try:
            return bool(super().__exit__(*error))
        finally:
            leave()
            display.stop()
            signals.end(ignore=is_command)

    def _create_task_process(self, task: luigi.Task) -> Any:
        process = super()._create_task_process(task)
        process.use_multiprocessing = False

        def fail(error: BaseException) -> Any:
            task.trigger_event(luigi.Event.FAILURE, task, error)
            return task.on_failure(error)

        if not is_on(DEBUG):
            process._handle_run_exception = fail  # Luigi's own also logs a traceback
        return process

    def _log_complete_error(self, task: luigi.Task, trace: str) -> None:
        if is_on(DEBUG):
            super()._log_complete_error(task, trace)

    def _log_dependency_error(self, task: luigi.Task, trace: str) -> None:
        if is_on(DEBUG):
            super()._log_dependency_error(task, trace)


class _LocalScheduler(Scheduler):
    def _update_task_history(self, *_: Any, **__: Any) -> None:
        """Do nothing: Luigi also records nothing, but drops KeyboardInterrupt here."""


class _Factory:
    """Creates what Luigi runs tasks with."""

    create_remote_scheduler = staticmethod(luigi.interface._WorkerSchedulerFactory().create_remote_scheduler)

    def create_local_scheduler(self) -> Scheduler:
        return _LocalScheduler(prune_on_get_work=True, record_task_history=False)

    def create_worker(self, scheduler: Any, worker_processes: int, assistant: bool = False) -> Worker:
        return _InProcess(int(worker_processes), scheduler=scheduler, assistant=assistant)


# -- the defaults -----------------------------------------------------------------------------------------------------

OURS = Path(__file__).with_name("luigi.cfg")
CENTRAL = ("scheduler_host", "scheduler_url", "default_scheduler_host", "default_scheduler_url")
CENTRAL_OPTIONS = ("--scheduler-host", "--scheduler-port", "--scheduler-url")


def _set_defaults() -> None:
    """Set the options of pipeline/luigi.cfg that the user has not set.

    Luigi reads luigi.cfg only from the working directory. In any other directory, it would try to reach a server for a
    minute, and a failed task would exit with 0. The option `local_scheduler` is not set if a config or the command line
    names a central scheduler. --help lists --workers, too; its default is one per core.
    """
    luigi.interface.core.workers.always_in_help = True
    theirs, ours = get_config(), ConfigParser(interpolation=None)
    ours.read(OURS)
    if any(word.partition("=")[0] in CENTRAL_OPTIONS for word in sys.argv[1:]):
        # Luigi would silently use the local scheduler if luigi.cfg asks for it.
        theirs.set("core", "local_scheduler", "false")
    # In a container, os.cpu_count() counts the cores of the host.
    ours.set("core", "workers", str(cores()))
    central = any(theirs.has_option("core", option) for option in CENTRAL)
    for section in ours.sections():
        for option, value in ours[section].items():
            if not theirs.has_option(section, option) and not (central and option == "local_scheduler"):
                theirs.set(section, option, value)


def install() -> None:
    """Patch Luigi as listed above, and set our defaults, once."""
    if luigi.interface._WorkerSchedulerFactory is not _Factory:
        CmdlineParser._build_parser = staticmethod(_parsers(CmdlineParser._build_parser))
        luigi.interface._run = _command(luigi.interface._run)
        luigi.interface._WorkerSchedulerFactory = _Factory
        _set_defaults()
