"""Apply the defaults of pipeline/luigi.cfg to Luigi.

Luigi reads luigi.cfg only from the working directory. In any other directory, it would try to reach a server for a
minute, and a failed task would exit with 0. Options that the user's config sets are left alone.
"""

from __future__ import annotations

import sys
from configparser import ConfigParser
from pathlib import Path

from luigi.configuration import get_config
from luigi.interface import core

from pipeline.engines.engine import workers_of
from tasks.core.errors import UsageError

OURS = Path(__file__).with_name("luigi.cfg")
CENTRAL = ("scheduler_host", "scheduler_url", "default_scheduler_host", "default_scheduler_url")
CENTRAL_OPTIONS = ("--scheduler-host", "--scheduler-port", "--scheduler-url")


def apply() -> None:
    """Set the options that the user has not set, and list --workers in --help.

    The option `local_scheduler` is not set if a config or the command line names a central scheduler.
    """
    core.workers.always_in_help = True
    theirs, ours = get_config(), ConfigParser(interpolation=None)
    ours.read(OURS)
    if any(word.partition("=")[0] in CENTRAL_OPTIONS for word in sys.argv[1:]):
        # Luigi would silently use the local scheduler if luigi.cfg asks for it.
        theirs.set("core", "local_scheduler", "false")
    central = any(theirs.has_option("core", option) for option in CENTRAL)
    for section in ours.sections():
        for option, value in ours[section].items():
            if not theirs.has_option(section, option) and not (central and option == "local_scheduler"):
                theirs.set(section, option, value)


def workers() -> int:
    """Return the number of worker processes."""
    return int(core().workers)


def check_workers(on: str) -> None:
    """Raise UsageError if --workers is below 1 or `on` does not name an engine.

    With fewer than one worker, Luigi silently does nothing.
    """
    if workers() < 1:
        raise UsageError("bad_command_line", f"--workers {workers()}: must be at least 1")
    workers_of(on, workers())
