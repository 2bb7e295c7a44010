"""Work is done only if its outputs are complete.

It writes the same bytes in any process, and one run at a time makes a corpus.
"""

from __future__ import annotations

import fcntl
import multiprocessing
import shutil
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import pytest
from support.commands import corpus_bytes
from support.damage.kinds import flip
from support.small_corpus import conversations, make_recipe, pack_corpus

from packcorpus.tasks import work as work_module
from packcorpus.tasks.core.errors import Busy
from packcorpus.tasks.recipe import Recipe
from packcorpus.tasks.storage.files import digest_of, has_artifact, has_listed, to_json, write_receipt
from packcorpus.tasks.storage.layout import Layout
from packcorpus.tasks.verification.verify import verify
from packcorpus.tasks.work import KINDS, Plan, Publish, TokenizePart, Work, WriteShard, claim, run_all

WRONG: list[Any] = [{}, [], None, 5, "bytes", {"bytes": "4"}, {"bytes": 3}, {"bytes": None}]


def test_an_artifact_exists_if_its_receipt_has_its_size_and_checksum(tmp_path: Path) -> None:
    file, receipt = tmp_path / "tokens.arrow", tmp_path / "tokens.json"
    assert not has_artifact(file, receipt)
    file.write_bytes(b"1234")
    assert not has_artifact(file, receipt)
    for wrong in WRONG:
        write_receipt(receipt, wrong) if isinstance(wrong, dict) else receipt.write_bytes(to_json(wrong))
        assert not has_artifact(file, receipt), wrong
    receipt.write_bytes(b"{")
    assert not has_artifact(file, receipt)
    write_receipt(receipt, {"bytes": 4, "engine": "gigatoken"})
    assert has_artifact(file, receipt)
    assert has_artifact(file, receipt, refused={"reference"})
    assert not has_artifact(file, receipt, refused={"gigatoken"})
    assert not has_artifact(file, receipt, checksum="xxh3"), "the receipt has none"
    write_receipt(receipt, {"bytes": 4, "sha256": digest_of(file, "sha256")})
    assert has_artifact(file, receipt, checksum="sha256")
    file.write_bytes(b"1235")
    assert has_artifact(file, receipt)
    assert not has_artifact(file, receipt, checksum="sha256")
    file.unlink()
    assert not has_artifact(file, receipt)


def test_a_plan_exists_if_each_of_its_files_has_its_size(tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    assert not has_listed(tmp_path / "plan.json")
    for name in ("plan.arrow", "index.arrow"):
        (tmp_path / name).write_bytes(b"1234")
    wrong = [{}, [], None, {"files": []}, {"files": {"plan.arrow": 3}}, {"files": {"gone.arrow": 4}}]
    for value in [*wrong, {"files": {"plan.arrow": 4, "index.arrow": 5}}]:
        write_receipt(plan, value) if isinstance(value, dict) else plan.write_bytes(to_json(value))
        assert not has_listed(tmp_path / "plan.json"), value
    plan.write_bytes(b"{")
    assert not has_listed(tmp_path / "plan.json")
    write_receipt(plan, {"files": {"plan.arrow": 4, "index.arrow": 4}})
    assert has_listed(tmp_path / "plan.json")


def test_a_corpus_is_made_by_one_run_at_a_time(tmp_path: Path) -> None:
    recipe = make_recipe(tmp_path, conversations(3))
    path = recipe.layout.lock(recipe.config.name, recipe.corpus_key)
    path.parent.mkdir(parents=True)
    with path.open("ab") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(Busy, match=rf"{recipe.corpus_folder}: another run is packing this corpus; wait for it"):
            claim(recipe)
    claim(recipe)
    with path.open("ab") as other, pytest.raises(BlockingIOError):
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_a_manifest_that_a_killed_run_published_is_synced_before_it_counts_as_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = make_recipe(tmp_path, conversations(3))
    pack_corpus(recipe)
    synced: list[Path] = []
    monkeypatch.setattr(work_module, "sync_folder", synced.append)
    assert Publish(recipe).is_done()
    assert synced == [recipe.published.parent]


# -- the graph --------------------------------------------------------------------------------------------------------


def all_work(recipe: Recipe) -> list[Work]:
    """Return all work of a corpus, requirements first."""
    return [work for kind in KINDS for work in kind.all_of(recipe)]


@pytest.fixture
def trained(tmp_path: Path) -> Recipe:
    return make_recipe(tmp_path, conversations(60), tokenizer=None, vocab_size=320, part_size=4096, validation=0.2)


def test_work_is_done_once_it_has_run_and_not_before(trained: Recipe) -> None:
    order = all_work(trained)
    kinds = [type(stage) for stage in order]
    assert kinds.count(TokenizePart) == len(trained.parts) > 1
    assert kinds.count(WriteShard) == len(trained.shard_names) > 1
    for number, stage in enumerate(order):
        assert not any(later.is_done() for later in order[number:]), stage
        assert {type(required) for required in stage.requires()} <= {*kinds[:number]}
        stage.run()
        assert all(earlier.is_done() for earlier in order[: number + 1]), stage
        assert all(path.is_file() for path in stage.outputs())
    verify(trained.published)


def test_work_is_not_done_if_an_output_is_missing_or_has_other_content(trained: Recipe) -> None:
    pack_corpus(trained)
    for stage in all_work(trained):
        for path in stage.outputs():
            content = path.read_bytes()
            path.unlink()
            assert not stage.is_done(), path
            path.write_bytes(content)
            assert stage.is_done(), path
        # A plan is never trusted by content, and the key of a tokenizer determines its content.
        assert stage.is_done(check_content=True) is not isinstance(stage, Plan)
    for stage, path in (
        (TokenizePart.all_of(trained)[1], TokenizePart.all_of(trained)[1].outputs()[0]),
        (WriteShard(trained, 0), WriteShard(trained, 0).outputs()[0]),
        (Publish(trained), WriteShard(trained, 0).outputs()[0]),
    ):
        content = path.read_bytes()
        flip(path)
        assert stage.is_done()
        assert not stage.is_done(check_content=True)
        path.write_bytes(content)


def test_a_lost_tokenizer_is_trained_again_though_its_tokens_are_kept(trained: Recipe) -> None:
    before = corpus_bytes(pack_corpus(trained))
    trained.layout.tokenizer(str(trained.tokenizer_key)).unlink()
    shutil.rmtree(trained.corpus_folder)
    run_all(Publish(trained))
    assert corpus_bytes(trained.published) == before


@pytest.mark.slow
def test_steps_run_in_other_processes_and_write_the_same_bytes(trained: Recipe, tmp_path: Path) -> None:
    """Steps are small values, and an open tokenizer stays in its process."""
    before = corpus_bytes(pack_corpus(trained))
    assert trained.encoder is not None
    here = replace(trained, layout=Layout(tmp_path / "elsewhere"))
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as other:
        for step in all_work(here):
            if not step.are_steps:
                step.run()
                continue
            step = step.decided()
            assert len(ForkingPickler.dumps(step)) < 4096
            other.submit(step.run).result()
            assert step.is_done()
    assert corpus_bytes(here.published) == before
