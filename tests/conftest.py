"""Choose, order, and mark all tests, and list what was skipped.

    pytest                   the quick tests (`make quick` runs them in parallel)
    pytest tests/pipeline    all tests of that folder, slow ones too
    pytest -m ""             all tests (`make test` runs them in parallel, in two parts)

By default, property tests draw a quarter of their examples, at most 25. With --hypothesis-profile=ci, as in
`make test`, they draw half. Both profiles draw the same examples each time. --hypothesis-profile=fresh, as in
`make fuzz`, draws all, and new ones each time.
"""

from __future__ import annotations

import ctypes
import gc
import os
import resource
import shutil
import signal
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from functools import lru_cache
from pathlib import Path

import pytest
from hypothesis import settings
from support import profiles  # noqa: F401 - registers the profiles
from support.templates.shared_processes import shared_processes

# Nearly all objects that are made while libraries and tests are imported remain. Looking for garbage among them takes
# over a quarter of that time.
gc.disable()

TESTS = Path(__file__).parent
QUICK = "not slow and not training"
# By folder or file, so that a new test there needs no marker. Single slow tests elsewhere have their own marker.
SLOW = (
    "api/test_commands.py",
    "api/test_own_modules.py",
    "cli/test_inspect.py",
    "cli/test_rows.py",
    "corpus/test_push.py",
    "corpus/test_unused_keys.py",
    "dry_run",
    "exports",
    "inspection/test_diff.py",
    "inspection/test_manifests.py",
    "packing/test_row_order.py",
    "packing/test_neighbors.py",
    "packing/test_several_lengths.py",
    "pipeline",
    "properties",
    "readers/test_bounded.py",
    "report",
    "sources/test_sampling.py",
    "stores/test_threads.py",
    "templates/jinja/test_rendering.py",
    "test_corpora.py",
    "test_loss_weights.py",
    "verification/test_repair.py",
)
# All tests that load torch, in their process or in a command server (support/servers/command_server.py): that takes
# seconds, and a process with torch takes longer to fork.
TRAINING = (
    "api/test_corpus.py",
    "api/test_examples.py",
    "api/test_training.py",
    "pipeline/test_train_adapter.py",
    "project/test_docs.py",
    "project/test_imports.py",
    "properties/test_damage.py",
    "test_recipes.py",
    "train",
)

# First a test that compiles C++ for up to half a minute. Then the tests in forks of a process that has loaded torch
# (support/servers/command_server.py), the longest first. One worker gets all of them, so that no other one needs such a
# process. Then other long tests.
FIRST = (
    "test_options.py",
    "test_training.py", "test_elastic.py", "test_train_adapter.py", "test_several_machines.py", "test_diagnosis.py",
    "test_sharding.py", "test_weighted_loss.py", "test_interruption.py", "test_reduction.py", "test_ranks.py",
    "test_ring.py", "test_gradients.py", "test_slow_ranks.py", "test_mixed_training.py", "test_balanced_rows.py",
    "test_rank_speed.py", "test_attention_trial.py", "test_checkpoints.py", "test_merge_command.py", "test_docs.py",
    "test_imports.py", "test_whole_modules.py",
)  # fmt: skip

# Then tests that fork their process, which grows: a fork takes 9 ms at first and 30 ms at the end.
FORKING = ("templates/jinja", "pipeline/test_engines.py", "pipeline/test_on_ray.py", "pipeline/test_workers.py")

# What a machine may lack: a word in the reason of a skipped test, and how to get it.
NEEDS = {
    "chromium": "apt-get install chromium",
    "strace": "apt-get install strace",
    "../shared": "corpora and tokenizers of the benchmarks, next to this checkout",
    "C++ compiler": "apt-get install g++",
}

# A script ignores SIGINT in its background jobs, and so would all commands that the tests start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


# The tests write very many small files. In memory, that takes a twentieth of the system time and no wait for a disk. A
# container often has only 64 MB there, which is too little.
MEMORY = Path("/dev/shm")  # noqa: S108 - used as a folder of temporary files
os.environ["PYTHON_CPU_COUNT"] = "2"  # the number of workers, and what `check` shows, on any machine
if "TMPDIR" not in os.environ and MEMORY.is_dir() and shutil.disk_usage(MEMORY).free >= 6 << 30:
    os.environ["TMPDIR"] = str(MEMORY)  # for the commands that the tests start, too
    tempfile.tempdir = None


def pytest_configure(config: pytest.Config) -> None:
    whole = config.args_source == config.ArgsSource.TESTPATHS
    if whole and "-m" not in config.invocation_params.args:
        config.option.markexpr = QUICK
    if config.option.collectonly:
        config.option.warn_unused_snapshots = True  # no test runs, so no snapshot is used
    if not config.getoption("--hypothesis-profile"):
        settings.load_profile("dev")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out whole files before they are imported."""
    if config.option.markexpr == "training":
        return None if collection_path.is_dir() or is_in(collection_path, TRAINING) else True
    left_out = (SLOW if "not slow" in config.option.markexpr else ()) + (
        TRAINING if "not training" in config.option.markexpr else ()
    )
    return True if is_in(collection_path, left_out) else None


@lru_cache(None)
def is_in(path: Path, places: tuple[str, ...]) -> bool:
    return any(f"{path}/".startswith(f"{TESTS}/{place}/") for place in places)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if is_in(item.path, SLOW):
            item.add_marker(pytest.mark.slow)
        if is_in(item.path, TRAINING):
            item.add_marker(pytest.mark.training)
    items.sort(key=order)


def order(item: pytest.Item) -> int:
    if item.path.name in FIRST:
        return FIRST.index(item.path.name)
    return len(FIRST) + (not is_in(item.path, FORKING))


def pytest_collection_finish() -> None:
    """Exclude all objects that are loaded by now from garbage collection.

    Collection stays off if `pytest_runtest_teardown` can see how much memory the process has. Forks collect, but not
    among the objects of their parent, because that would write to all of them.
    """
    gc.freeze()
    if not STATM.exists():
        gc.enable()
    os.register_at_fork(after_in_child=collect_from_now)


def collect_from_now() -> None:
    gc.freeze()
    gc.enable()


# Tests of what the process of a template remembers. Each of their templates has its own.
OWN_PROCESSES = ("templates/jinja/test_traced.py",)


@pytest.fixture(autouse=True, scope="module")
def _shared_processes(request: pytest.FixtureRequest) -> Iterator[None]:
    with nullcontext() if is_in(request.path, OWN_PROCESSES) else shared_processes():
        yield


MUCH = 128 << 20  # bytes
STATM = Path("/proc/self/statm")
TRIM = getattr(ctypes.CDLL(None), "malloc_trim", lambda _: 0)  # only glibc has it
kept = 0  # bytes that were in use after the last collection of garbage


@pytest.hookimpl(trylast=True)  # after the fixtures of the file
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Collect garbage if the process has grown, and free memory after each file.

    A fork copies the table of all pages of its parent, and every page that one of the two writes to afterwards.
    """
    global kept
    if nextitem is None or not STATM.exists():
        return
    has_grown = resident() > kept + MUCH
    if has_grown:
        gc.collect()
        gc.freeze()
    if has_grown or nextitem.path != item.path:
        TRIM(0)
        kept = resident() if has_grown else min(kept, resident())


def resident() -> int:
    return int(STATM.read_text().split()[1]) * resource.getpagesize()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    skipped = Counter[str]()
    for report in terminalreporter.stats.get("skipped", []):
        reason = str(report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr)
        need = next((need for need in NEEDS if need in reason), None)
        skipped[f"needs {need} ({NEEDS[need]})" if need else reason.removeprefix("Skipped: ")] += 1
    if skipped:
        terminalreporter.write_line("skipped: " + "; ".join(f"{count} × {why}" for why, count in skipped.items()))
