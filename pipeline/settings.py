"""Luigi's settings where nobody has set them.

Luigi finds a luigi.cfg in the current folder only. In any other folder it would look for a server for a minute, and a
failed task would exit with 0. So what no config of the user's has set is as in the project's own luigi.cfg.
"""

from __future__ import annotations

import sys
from configparser import ConfigParser
from pathlib import Path

from luigi.configuration import get_config
from luigi.interface import core

from tasks.core.errors import UsageError

OURS = Path(__file__).resolve().parent.parent / "luigi.cfg"
CENTRAL = ("scheduler_host", "scheduler_url", "default_scheduler_host", "default_scheduler_url")
CENTRAL_OPTIONS = ("--scheduler-host", "--scheduler-port", "--scheduler-url")


def apply() -> None:
    """Set what is unset; whoever names a central scheduler gets it, also from the command line.

    And --help shows --workers.
    """
    core.workers.always_in_help = True
    theirs, ours = get_config(), ConfigParser(interpolation=None)
    ours.read(OURS)
    if any(word.partition("=")[0] in CENTRAL_OPTIONS for word in sys.argv[1:]):
        # Luigi would take the local one without a word, where luigi.cfg asks for it.
        theirs.set("core", "local_scheduler", "false")
    central = any(theirs.has_option("core", option) for option in CENTRAL)
    for section in ours.sections():
        for option, value in ours[section].items():
            if not theirs.has_option(section, option) and not (central and option == "local_scheduler"):
                theirs.set(section, option, value)


def check_workers() -> None:
    """Raises UsageError: Luigi would do nothing, without a word."""
    workers = core().workers
    if workers < 1:
        raise UsageError("bad_command_line", f"--workers {workers}: at least 1 has to do the work")
