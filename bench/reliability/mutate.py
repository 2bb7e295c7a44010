"""Count the mutants that the tests notice, for modules that handle corpora.

    make mutants         (or: python bench/reliability/mutate.py [MODULE …] [--most N] [--seed 0] [--jobs 2])

    a copy of the project ─all tests once, under coverage─▶ line ─▶ the tests that run it, the fastest first
    module ─one change─▶ mutant ─these tests, in a fork─▶ killed: a test fails, or does not end
                                                         survived: no test fails; printed with its line

The modules write, check, and repair corpora. A change inverts a comparison, `and`, `or`, or an operator; negates a
condition; changes a constant; or removes a statement, an argument, or a caught exception. Texts of messages do not
change. A test that fails without a change would kill every mutant, so the script stops if there is one. Prints a table.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import coverage
import orjson
import pytest
from hypothesis import Phase
from hypothesis import settings as hypothesis_settings

ROOT = Path(__file__).resolve().parents[2]
# Modules with their own tests, which run before all other tests of a line.
MODULES = {
    "storage/files": ("storage/test_files",),
    "storage/keys": ("test_recipe", "properties/test_never_stale"),
    "storage/manifest": ("storage/test_manifest",),
    "storage/facts": ("storage/test_manifest",),
    "storage/corpus_folder": ("properties/test_damage",),
    "verification/verify": ("verification/test_verify",),
    "verification/check_rows": ("verification/test_verify",),
    "verification/check_index": ("verification/test_verify",),
    "verification/repair": ("verification/test_repair",),
    "verification/rebuild": ("verification/test_repair",),
    "corpus/publish": ("test_stages", "storage/test_manifest"),
}
TESTS = (
    "storage/test_files",
    "storage/test_manifest",
    "test_stages",
    "verification/test_verify",
    "properties/test_damage",
    "verification/test_repair",
    "properties/test_never_stale",
    "test_recipe",
    "corpus/test_shards",
    "packing/test_plan",
    "pipeline/test_pipeline",
)
# Imported once, and forked into every run of the tests. The project's own modules are not, because they change.
LIBRARIES = (
    "hypothesis",
    "luigi",
    "numpy",
    "pandas",
    "pyarrow.compute",
    "pydantic",
    "rich",
    "sentencepiece",
    "tokenizers",
)
CPU, WALL = 100, 1200  # seconds for the tests of one mutant, in case it loops or waits
ELSEWHERE = ["tests/pipeline/test_pipeline.py"]  # the tests of lines that only other processes run

SWAPS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.And: ast.Or, ast.Or: ast.And,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.Div: ast.Mult, ast.BitOr: ast.BitAnd,
    ast.BitAnd: ast.BitOr, ast.LShift: ast.RShift, ast.FloorDiv: ast.Mult,
}  # fmt: skip


@dataclass(frozen=True)
class Mutant:
    module: str
    line: int
    what: str
    text: str


# -- changes ---------------------------------------------------------------------------------------------------------


def mutants_of(module: str) -> Iterator[Mutant]:
    source = (ROOT / "tasks" / f"{module}.py").read_text()
    tree = ast.parse(source)
    for number, node in enumerate(_nodes(tree)):
        for what in range(len(list(_changes(node)))):
            changed = deepcopy(tree)
            copy = list(_nodes(changed))[number]
            line, said, change = list(_changes(copy))[what]
            change()
            yield Mutant(module, line, said, ast.unparse(ast.fix_missing_locations(changed)))


def _nodes(tree: ast.AST) -> Iterator[Any]:
    """Yield the nodes of functions, without annotations, docstrings, and messages."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ClassDef):
            yield from _nodes(node)
        elif isinstance(node, ast.FunctionDef):
            yield from _inside(node)


def _inside(node: ast.AST) -> Iterator[Any]:
    is_text = isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))
    if is_text or isinstance(node, ast.Raise):  # the words of an error stay; its block may remove the whole statement
        return
    if hasattr(node, "lineno"):
        yield node
    for name, value in ast.iter_fields(node):
        if name not in ("annotation", "returns", "decorator_list"):
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from _inside(child)


def _changes(node: Any) -> Iterator[tuple[int, str, Callable[[], None]]]:
    """Yield the possible changes of a node: (line, description, function)."""
    line = getattr(node, "lineno", 0)

    def put(name: str, value: Any) -> Callable[[], None]:
        return partial(setattr, node, name, value)

    if isinstance(node, ast.Compare):
        for place, operator in enumerate(node.ops):
            if swap := SWAPS.get(type(operator)):
                ops = [*node.ops[:place], swap(), *node.ops[place + 1 :]]
                yield line, f"{type(operator).__name__} → {swap.__name__}", put("ops", ops)
    elif isinstance(node, ast.BoolOp | ast.BinOp | ast.AugAssign):
        if swap := SWAPS.get(type(node.op)):
            yield line, f"{type(node.op).__name__} → {swap.__name__}", put("op", swap())
    elif isinstance(node, ast.Constant) and isinstance(node.value, str | bytes | int | float):
        value = node.value
        if isinstance(value, str) and " " in value:
            return  # a text of a message
        other = not value if isinstance(value, bool) else value + 1 if isinstance(value, int | float) else None
        if other is None:
            other = value + (b"X" if isinstance(value, bytes) else "X")
        yield line, f"{value!r} → {other!r}", put("value", other)
    elif isinstance(node, ast.ExceptHandler) and node.type is not None:
        caught = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
        for place, one in enumerate(caught):
            kept: list[ast.expr] = [*caught[:place], *caught[place + 1 :]]
            yield line, f"{ast.unparse(one)} is not caught", put("type", ast.Tuple(kept, ast.Load()))
    elif isinstance(node, ast.Return) and node.value is not None:
        yield line, "returns None", put("value", ast.Constant(None))
    if isinstance(node, ast.If | ast.While | ast.IfExp | ast.Assert):
        yield line, "condition negated", put("test", ast.UnaryOp(ast.Not(), node.test))
    for name in ("body", "orelse", "finalbody"):
        block = getattr(node, name, None)
        for place, statement in enumerate(block if isinstance(block, list) else []):
            if isinstance(statement, ast.Expr | ast.Raise | ast.AugAssign | ast.Continue | ast.Break) and not (
                isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant | ast.Yield)
            ):
                rest = [*block[:place], ast.Pass(), *block[place + 1 :]]
                yield statement.lineno, f"without {ast.unparse(statement)[:60]}", put(name, rest)
    for filters in (
        [node.generators] if isinstance(node, ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp) else []
    ):
        for loop in filters:
            for place in range(len(loop.ifs)):
                rest = [*loop.ifs[:place], *loop.ifs[place + 1 :]]
                yield line, "filter left out", partial(setattr, loop, "ifs", rest)
    if isinstance(node, ast.Call):
        for place, keyword in enumerate(node.keywords):
            yield (
                line,
                f"without {keyword.arg}=",
                put("keywords", [*node.keywords[:place], *node.keywords[place + 1 :]]),
            )


# -- tests -----------------------------------------------------------------------------------------------------------


class Contexts:
    """Pytest plugin that sets the test as context of coverage, and records times."""

    def __init__(self, measure: coverage.Coverage):
        self.measure = measure
        self.seconds: dict[str, float] = defaultdict(float)

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        self.measure.switch_context(f"{item.nodeid}|setup")

    def pytest_runtest_call(self, item: pytest.Item) -> None:
        self.measure.switch_context(f"{item.nodeid}|call")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[report.nodeid] += report.duration


def run_tests(names: list[str], plugins: tuple[Any, ...] = ()) -> int:
    hypothesis_settings.register_profile("mutants", database=None, derandomize=True, phases=[Phase.generate])
    words = ["-m", "", "-x", "-q", "-p", "no:cacheprovider", "--tb=no", "--hypothesis-profile=mutants", *names]
    return int(pytest.main(words, plugins=list(plugins)))


def measure(folder: Path, found: Path) -> int:
    """Write {"module:line": tests, the fastest first}.

    If a fixture runs a line, all tests of its file count as tests of the line.
    """
    coverage_of = coverage.Coverage(data_file=None, include=[str(folder / "packcorpus" / "tasks" / "*")])
    contexts = Contexts(coverage_of)
    coverage_of.start()
    failed = run_tests([f"tests/{name}.py" for name in TESTS], (contexts,))
    coverage_of.stop()
    tests: dict[str, list[str]] = {}
    for module in MODULES:
        for line, names in (
            coverage_of.get_data().contexts_by_lineno(str(folder / "packcorpus" / "tasks" / f"{module}.py")).items()
        ):
            called = {name.partition("|")[0] for name in names if name.endswith("|call")}
            files = {name.partition("::")[0] for name in names if name.endswith("|setup")}
            others = {test for test in contexts.seconds if test.partition("::")[0] in files} - called
            tests[f"{module}:{line}"] = [
                *sorted(called, key=lambda test: contexts.seconds[test]),
                *sorted(others, key=lambda test: contexts.seconds[test]),
            ]
    found.write_bytes(orjson.dumps(tests))
    return failed


# -- runs ------------------------------------------------------------------------------------------------------------


def in_fork(folder: Path, work: Callable[[], int], bounded: bool = True) -> int:
    """Do `work` in a fork, in a copy of the project, and return the exit code.

    If the fork does not end in time, the exit code is the code of the signal that killed it.
    """
    child = os.fork()
    if not child:
        os.setpgid(0, 0)
        signal.alarm(WALL if bounded else 0)
        resource.setrlimit(resource.RLIMIT_CPU, (CPU if bounded else resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        os.chdir(folder)
        os.environ |= {"PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
        sys.dont_write_bytecode = True
        sys.path[:0] = [str(folder), str(folder / "tests")]
        with (folder.parent / "log").open("wb") as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
        code = 70
        with suppress(BaseException):
            code = work()
        os._exit(code)
    status = os.waitpid(child, 0)[1]
    with suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)  # processes that a test left running
    return os.waitstatus_to_exitcode(status)


def survives(mutant: Mutant, tests: list[str], folder: Path) -> bool:
    path = folder / "tasks" / f"{mutant.module}.py"
    path.write_text(mutant.text)
    own = [test for test in tests if test.startswith(tuple(f"tests/{name}.py" for name in MODULES[mutant.module]))]
    others = [test for test in tests if test not in own]
    code = 0
    for some in (own, others):
        if some and not code:
            code = in_fork(folder, partial(run_tests, some))
    shutil.copy2(ROOT / "tasks" / f"{mutant.module}.py", path)
    return code == 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("modules", nargs="*", default=[*MODULES], help=f"of {', '.join(MODULES)}; absent: all")
    parser.add_argument("--most", type=int, default=1 << 30, help="mutants of each module, drawn by the seed")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2, help="mutants side by side")
    parser.add_argument("--tests", type=Path, help="where to keep which line has which tests, or to find it")
    options = parser.parse_args()
    for library in LIBRARIES:
        importlib.import_module(library)
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(options.jobs) as pool:
        folders: SimpleQueue[Path] = SimpleQueue()
        kept = shutil.ignore_patterns(".*", "corpora", "tokens", "plans", "adapters", "*.egg-info")
        for number in range(options.jobs):
            folder = Path(name) / str(number) / "main"
            shutil.copytree(ROOT, folder, ignore=kept)
            (folder.parent / "shared").symlink_to(ROOT.parent / "shared")
            folders.put(folder)
        found = options.tests or Path(name) / "tests.json"
        if not found.exists() and in_fork(folder, lambda: measure(folder, found), bounded=False):
            print((folder.parent / "log").read_text(), "the tests fail without a change", file=sys.stderr)
            return 1
        tests = orjson.loads(found.read_bytes())

        def lives(mutant: Mutant) -> bool:
            folder = folders.get()
            lived = survives(mutant, tests.get(f"{mutant.module}:{mutant.line}") or ELSEWHERE, folder)
            folders.put(folder)
            if lived:
                print(f"survived: tasks/{mutant.module}.py:{mutant.line}: {mutant.what}", file=sys.stderr, flush=True)
            return lived

        print("| module | mutants | killed | per cent | seconds |\n|---|---:|---:|---:|---:|", flush=True)
        for module in options.modules:
            begin = time.perf_counter()
            mutants = list(mutants_of(module))
            mutants = random.Random(options.seed).sample(mutants, min(options.most, len(mutants)))
            killed = [*pool.map(lives, mutants)].count(False)
            seconds = time.perf_counter() - begin
            share = 100 * killed / len(mutants)
            print(f"| `tasks/{module}.py` | {len(mutants)} | {killed} | {share:.1f} | {seconds:.0f} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
