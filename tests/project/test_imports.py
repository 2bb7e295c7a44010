"""Imports follow `pipeline → tasks ← train`, and load nothing heavy.

Imports are tried in a fresh Python, because this Python has loaded everything already.
"""

from __future__ import annotations

import ast
import pkgutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.commands import ROOT, in_fork_with_torch

from packcorpus import tasks, train

MODULES = {
    package.__name__.removeprefix("packcorpus."): [
        package.__name__,
        *(m.name for m in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")),
    ]
    for package in (tasks, train)
}
HEAVY = ("luigi", "pandas", "torch", "transformers")
# Prints the packages that are loaded: ours by their name in packcorpus.
LOADED = "print(*sorted({name.removeprefix('packcorpus.').partition('.')[0] for name in sys.modules}), sep='\\n')\n"


def fresh(code: str, *words: str) -> list[str]:
    """Return the lines that `code` prints in a separate Python.

    `words` are its sys.argv[1:].
    """
    words = (sys.executable, "-c", code, *words)
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_tasks_loads_nothing_heavy() -> None:
    assert len(MODULES["tasks"]) > 20, "the modules of tasks were not found"
    code = "import importlib, sys\nfor name in sys.argv[1:]:\n    importlib.import_module(name)\n" + LOADED
    loaded = fresh(code, *MODULES["tasks"])
    assert {"pyarrow", "tasks"} <= set(loaded)
    assert {*HEAVY, "pipeline", "train"} & set(loaded) == set()


def test_any_module_of_tasks_can_be_imported_first() -> None:
    """An import cycle shows only from some of its modules.

    Libraries stay loaded, and `tasks` is reloaded each time, from code that is read only once.
    """
    code = (
        "import functools, gc, importlib, sys, traceback\n"
        "from importlib.machinery import SourceFileLoader\n"
        "SourceFileLoader.get_code = functools.cache(SourceFileLoader.get_code)\n"  # loaders of a module are equal
        "gc.set_threshold(50_000, 50, 50)\n"  # a third of the time
        "for first in sys.argv[1:]:\n"
        "    for name in [name for name in sys.modules if name.startswith('packcorpus')]:\n"
        "        del sys.modules[name]\n"
        "    try:\n"
        "        importlib.import_module(first)\n"
        "    except Exception:\n"
        "        print(first, traceback.format_exc().splitlines()[-1])\n"
    )
    assert fresh(code, *MODULES["tasks"]) == []


def test_train_loads_no_luigi_and_no_pipeline() -> None:
    """No module of `train` loads luigi or pipeline.

    A module may be refused if the extra `train` is missing. Another test reads the source of that module.
    """
    code = (
        "import importlib, sys\n"
        "own = ('luigi', 'packcorpus')\n"
        "for name in [name for name in sys.modules if name.partition('.')[0] in own]:\n"
        "    del sys.modules[name]\n"
        "for name in sys.argv[1:]:\n"
        "    try:\n"
        "        importlib.import_module(name)\n"
        "    except ModuleNotFoundError as error:\n"
        "        if error.name.partition('.')[0] in own:\n"
        "            raise\n" + LOADED
    )
    # The fork has torch loaded, because loading it takes seconds, and nothing else.
    done = in_fork_with_torch(ROOT, "-c", code, *MODULES["train"])
    assert done.returncode == 0, done.stderr
    loaded = done.stdout.splitlines()
    assert "train" in loaded
    assert {"luigi", "pipeline"} & set(loaded) == set()


def imported(path: Path) -> Iterator[tuple[int, str]]:
    """Yield (line, package) for every import, including imports in functions."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, _package(alias.name)) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield from ((node.lineno, _package(f"{node.module}.{alias.name}")) for alias in node.names)


def _package(module: str) -> str:
    return module.removeprefix("packcorpus.").partition(".")[0]


@pytest.mark.parametrize(
    ("package", "forbidden"),
    [("tasks", {"luigi", "pipeline", "train"}), ("train", {"luigi", "pipeline"}), ("pipeline", {"train"})],
)
def test_imports_run_one_way(package: str, forbidden: set[str]) -> None:
    sources = sorted((ROOT / package).rglob("*.py"))
    assert sources
    found = [f"{path.relative_to(ROOT)}:{line} {name}" for path in sources for line, name in imported(path)]
    assert [place for place in found if place.split()[1] in forbidden] == []


def test_importing_pipeline_registers_the_tasks() -> None:
    stages = ("PackCorpus", "PlanPacking", "TokenizePart", "WriteShard", "TrainTokenizer")
    names = (*stages, "TrainAdapter", "DiagnoseTraining")
    code = (
        "import luigi, pipeline\n"
        "from luigi.task_register import Register\n"
        f"for name in {names}:\n"
        "    task = Register.get_task_cls(name)\n"
        "    print(task.__name__, task.__module__, task is getattr(pipeline, name))\n"
    )
    assert fresh(code) == [f"{name} packcorpus.pipeline.graph True" for name in names]
