"""Several runs of Luigi in one process each read the sources once.

A run reads the sources as they are when it starts.
"""

from __future__ import annotations

import multiprocessing
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import luigi
import pytest
from support.small_corpus import conversations, write_project

from packcorpus.pipeline import graph
from packcorpus.pipeline.graph import PackCorpus, TrainAdapter
from packcorpus.tasks import work as work_module
from packcorpus.tasks.recipe import resolve
from packcorpus.tasks.storage.manifest import load_manifest
from packcorpus.tasks.stores import mirror


def in_a_fork(work: Callable[[], None]) -> None:
    """Run `work` in a fork, because Luigi and the guard leave signal handlers."""
    child = multiprocessing.get_context("fork").Process(target=work)
    child.start()
    child.join(300)
    assert child.exitcode == 0


def build(*tasks: luigi.Task, workers: int = 1) -> bool:
    return bool(luigi.build(tasks, workers=workers, local_scheduler=True, log_level="WARNING"))


@pytest.mark.parametrize(("on", "workers"), [("here", 1), ("workers:2", 2)])
def test_a_second_run_sees_changed_sources(tmp_path: Path, on: str, workers: int) -> None:
    config = write_project(tmp_path, conversations(20))

    def work() -> None:
        task = PackCorpus(config=str(config), root=str(tmp_path), on=on)
        assert build(task, workers=workers)
        assert build(task, workers=workers), "nothing to do"
        write_project(tmp_path, conversations(30))
        assert build(task, workers=workers)

    in_a_fork(work)
    found = [load_manifest(path) for path in (tmp_path / "manifests").glob("*.json")]
    assert sorted(manifest.ledger.conversations.read for manifest in found) == [20, 30]


def test_a_run_hashes_its_sources_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Luigi asks for the corpus of an adapter several times."""
    config = write_project(tmp_path, conversations(20))
    record, hashed = tmp_path / "training.json", []
    monkeypatch.setattr(graph, "record_of", lambda words: record)
    monkeypatch.setattr(graph, "train", lambda words: record.touch())
    monkeypatch.setattr(graph, "resolve", lambda *given, **more: hashed.append(given) or resolve(*given, **more))

    def work() -> None:
        assert build(TrainAdapter(config=str(config), root=str(tmp_path), check_sources=True))
        assert len(hashed) == 1
        assert build(TrainAdapter(config=str(config), root=str(tmp_path), check_sources=True))
        assert len(hashed) == 2

    in_a_fork(work)
    assert record.exists()


def test_each_part_is_looked_at_a_few_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each look opens a receipt, and there may be thousands of parts."""
    config = write_project(tmp_path, conversations(60), part_size=1024)
    looks: Counter[Path] = Counter()
    has_artifact = mirror.has_artifact

    def counted(file: Path, *rest: Any, **more: Any) -> bool:
        looks[file] += file.parent.parent.name == "tokens"
        return has_artifact(file, *rest, **more)

    for module in (mirror, work_module):
        monkeypatch.setattr(module, "has_artifact", counted)

    def work() -> None:
        assert build(PackCorpus(config=str(config), root=str(tmp_path), on="here"))
        assert len(+looks) > 10
        # A part is looked at when it is scheduled, before and after its step, when it is planned, and when the corpus
        # is published. The first part is also looked at to find out that not all parts are done.
        assert max(looks.values()) <= 7, looks
        assert sorted(looks.values())[-2] <= 5

    in_a_fork(work)
