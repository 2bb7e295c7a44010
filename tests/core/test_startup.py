"""A command collects no garbage while it loads its modules."""

from __future__ import annotations

import gc
import subprocess
import sys

import pytest
from support.commands import ROOT

from tasks.core import startup

# Prints whether garbage is collected when LIBRARY is loaded, and at the end, with whether that leaves out the objects
# so far.
PROGRAM = """
import gc, sys
sys.argv[0] = "PROGRAM"
def find(name, *_):
    if name == "LIBRARY":
        print(gc.isenabled())
def state(**_):
    print(gc.isenabled(), gc.get_freeze_count() > 20_000)
sys.meta_path.insert(0, type("Finder", (), {"find_spec": staticmethod(find)}))
if "LIBRARY" == "typer":
    import tasks.cli.app
    tasks.cli.app.app = state
    tasks.cli.app.main()
else:
    import pipeline
    state()
"""


@pytest.mark.parametrize(
    ("program", "library", "expected"),
    [
        ("luigi", "numpy", "False\nTrue True\n"),
        ("packcorpus", "typer", "False\nTrue True\n"),
        ("notebook", "numpy", "True\nTrue False\n"),  # a program that imports the package collects as before
    ],
)
def test_a_command_collects_no_garbage_while_it_loads(program: str, library: str, expected: str) -> None:
    words = PROGRAM.replace("PROGRAM", program).replace("LIBRARY", library)
    assert subprocess.check_output([sys.executable, "-c", words], cwd=ROOT, text=True) == expected


@pytest.mark.parametrize("did_collect", [True, False])
def test_loading_restores_what_was_in_effect(did_collect: bool) -> None:
    states = []
    was = gc.isenabled()
    (gc.enable if did_collect else gc.disable)()
    try:
        with startup.loading():
            states.append(gc.isenabled())
        states.append(gc.isenabled())
    finally:
        (gc.enable if was else gc.disable)()
    assert states == [False, did_collect]
