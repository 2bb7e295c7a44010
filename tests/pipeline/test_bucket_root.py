"""A root in a bucket has the same corpus as a folder, whoever makes it.

The tests also check the files that are left if a run ends early.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import luigi
import pytest
from support.bucket_roots import WAYS, Tree, own_scratch, tree_of
from support.commands import packcorpus
from support.servers.remote import SECRET, environment, failing_store, faulty_s3, needs_remote, new_bucket, s3, use
from support.small_corpus import conversations, pack_corpus, write_project

from packcorpus.pipeline.engines import start_method
from packcorpus.pipeline.graph import PackCorpus
from packcorpus.tasks.core.errors import Busy, PackError, StorageError
from packcorpus.tasks.core.messages import as_text
from packcorpus.tasks.recipe import Recipe, resolve
from packcorpus.tasks.sources.parts import WHOLE, Share
from packcorpus.tasks.storage.files import atomic_file, locked
from packcorpus.tasks.stores import mirror
from packcorpus.tasks.stores.bucket import Bucket, open_bucket, open_store
from packcorpus.tasks.stores.mirror import mirror_of
from packcorpus.tasks.stores.urls import local_path_of, root_of, url_of
from packcorpus.tasks.work import KINDS, Plan, Publish, TokenizePart, refresh, run_stage

needs_remote()

RECORDS = conversations(60)
STAGES = {kind.stage: kind for kind in KINDS}
SETTINGS: dict[str, Any] = {"part_size": 3000, "tokenizer": None, "vocab_size": 400, "epochs": 2}


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the URL of a root in an empty bucket."""
    use(monkeypatch, s3())
    own_scratch(monkeypatch, tmp_path / "scratch")
    return f"s3://{new_bucket()}/some/where"


def recipe_of(tmp_path: Path, root: str | Path) -> Recipe:
    config = write_project(tmp_path / "project", RECORDS, **SETTINGS)
    return resolve(config, root_of(root))


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Tree:
    """Return the outputs of the same corpus in a folder."""
    folder = tmp_path_factory.mktemp("expected")
    recipe = recipe_of(folder, folder / "root")
    assert len(recipe.parts) > 3, "some of three machines have several"
    pack_corpus(recipe)
    return tree_of(folder / "root")


# -- whoever makes it ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_a_bucket_gets_what_a_folder_gets(
    tmp_path: Path, root: str, monkeypatch: pytest.MonkeyPatch, expected: Tree, way: Callable[..., None]
) -> None:
    recipe = recipe_of(tmp_path, root)
    machines = iter(range(100))
    way(recipe, lambda: own_scratch(monkeypatch, tmp_path / f"machine-{next(machines)}"))
    assert tree_of(root) == expected
    own_scratch(monkeypatch, tmp_path / "another")
    assert Publish(recipe_of(tmp_path, root)).is_done(), "on a machine that has nothing of it, too"


def test_the_commands_take_urls(tmp_path: Path, root: str, expected: Tree) -> None:
    write_project(tmp_path / "project", RECORDS, **SETTINGS)
    values = environment(s3())

    def command(*words: str, scratch: str = "looks") -> str:
        done = packcorpus(tmp_path / "project", *words, PACKCORPUS_SCRATCH=str(tmp_path / scratch), **values)
        assert done.returncode == 0, done.stderr
        assert SECRET not in done.stdout + done.stderr
        return done.stdout

    url = command("pack", "corpus.yaml", "--root", root, "--workers", "2", "--quiet", scratch="run").strip()
    assert tree_of(root) == expected
    [name] = [key for key in expected if key.startswith("manifests/")]
    assert url == f"{root}/{name}"
    assert command("pack", "corpus.yaml", "--root", root, "--quiet").strip() == url
    corpus = f"{root}/data/corpora/{Path(name).stem}"

    def fetched() -> set[str]:
        return {path.name for path in (tmp_path / "looks").rglob("data/corpora/**/*.arrow")}

    assert "row 0 of" in command("inspect", url, "--row", "0")
    assert fetched() == {"index.arrow", "train-00000-of-00001.arrow"}, "and no other shard"
    assert "all 6 checks passed" in command("verify", corpus)
    assert f"{root}/" in command("verify", url)
    assert "same sources" in command("diff", url, "small", "--root", root)
    assert (tmp_path / "project" / command("report", url).strip()).is_file()
    assert json.loads(command("list", "--root", root, "--json"))["manifests"][0]["name"] == "small"
    exported = command("export", "small", "--root", root, "--to", "trl").partition(": written")[0]
    assert exported == f"data/exports/{Path(name).stem}-trl"
    assert (tmp_path / "project" / exported / "export.json").is_file(), "not in the scratch folder"
    assert not (tmp_path / "project" / "s3:").exists()


# -- stages that are started too early, or one after the other on any machine -----------------------------------------


def test_a_stage_that_is_started_too_early_says_what_is_missing(
    tmp_path: Path, root: str, monkeypatch: pytest.MonkeyPatch, expected: Tree
) -> None:
    """The machine exits with the code of Busy and writes nothing."""
    store, machines = open_store(root), iter(range(100))

    def start(stage: str, share: Share = WHOLE) -> None:
        own_scratch(monkeypatch, tmp_path / f"machine-{next(machines)}")
        run_stage(recipe_of(tmp_path, root), STAGES[stage], share)

    def too_early(stage: str, share: Share, message: str) -> None:
        before = [key for key, _ in store.list()]
        with pytest.raises(Busy, match=message) as found:
            start(stage, share)
        assert (found.value.code, found.value.exit_code) == ("E716", 75)
        assert [key for key, _ in store.list()] == before

    parts = len(recipe_of(tmp_path, root).parts)
    for stage in ("tokenize", "plan", "write", "publish"):
        too_early(stage, WHOLE, "the tokenizer is not trained yet; run packcorpus part --stage prepare first")
    start("prepare")
    start("tokenize", Share(1, 2))
    done = sum(key.endswith(".arrow") for key, _ in store.list("data/tokens"))
    assert 0 < done < parts
    too_early(
        "plan", WHOLE, f"{parts - done} of {parts} parts are not tokenized yet; run .* --stage tokenize for every"
    )
    too_early("write", Share(1, 2), "the corpus is not planned yet; run packcorpus part --stage plan first")
    start("tokenize", Share(2, 2))
    start("plan")
    start("write", Share(1, 2))
    too_early(
        "publish", WHOLE, r"\d of \d shards are not written yet; run packcorpus part --stage write for every share"
    )
    start("write", Share(2, 2))
    start("publish")
    assert tree_of(root) == expected
    for stage in ("prepare", "tokenize", "plan", "write", "publish"):
        start(stage)
    assert tree_of(root) == expected


def test_a_stage_makes_again_what_the_bucket_has_lost(
    tmp_path: Path, root: str, monkeypatch: pytest.MonkeyPatch, expected: Tree
) -> None:
    pack_corpus(recipe_of(tmp_path, root))
    store = open_store(root)
    for lost, stage in (("tokenizer.model", "prepare"), ("plan.arrow", "plan"), ("plan.json", "plan")):
        for key in expected:
            if (key.endswith(lost) and "corpora" not in key) or "train-00000" in key:
                store.delete(key)
        own_scratch(monkeypatch, tmp_path / lost)
        with pytest.raises(Busy, match=f"--stage {stage} first"):
            run_stage(recipe_of(tmp_path, root), STAGES["write"])
        for each in (stage, "write"):
            run_stage(recipe_of(tmp_path, root), STAGES[each])
        assert tree_of(root) == expected


def test_workers_of_a_process_that_has_used_a_bucket_are_new_processes(tmp_path: Path, root: str) -> None:
    """obstore does not work in a fork of such a process."""
    open_store(root).head("k")
    assert start_method().get_start_method() == "spawn"


def test_a_run_with_several_workers(tmp_path: Path, root: str, expected: Tree) -> None:
    config = write_project(tmp_path / "project", RECORDS, **SETTINGS)
    run = PackCorpus(config=str(config), root=root)
    assert luigi.build([run], workers=2, local_scheduler=True, log_level="CRITICAL")
    assert tree_of(root) == expected


# -- what ends early, and what was damaged -----------------------------------------------------------------------


def test_a_run_that_ended_between_data_and_receipt_is_continued(
    tmp_path: Path, root: str, monkeypatch: pytest.MonkeyPatch, expected: Tree
) -> None:
    recipe = recipe_of(tmp_path, root)
    put, receipts, stops = Bucket.put, 0, 0

    def stop(self: Bucket, key: str, *rest: Any, **options: Any) -> bool:
        nonlocal receipts
        receipts += key.endswith(".json")
        if receipts == 4:  # publishing puts three
            raise KeyboardInterrupt
        return put(self, key, *rest, **options)

    monkeypatch.setattr(Bucket, "put", stop)
    while stops < 20:
        try:
            pack_corpus(recipe)
            break
        except KeyboardInterrupt:
            stops, receipts = stops + 1, 0
            assert not Publish(recipe).is_done()
    assert stops > 2
    assert tree_of(root) == expected


def test_what_the_bucket_has_lost_is_made_again(tmp_path: Path, root: str, expected: Tree) -> None:
    recipe = recipe_of(tmp_path, root)
    pack_corpus(recipe)
    store = open_store(root)
    for lost in ("plan.arrow|of-00001.arrow", "tokens/.*json|plans/", "tokens/.*arrow|plan.json", "of-00001.arrow", ""):
        for key in expected:
            if re.search(lost, key) or key.startswith("manifests/"):
                store.delete(key)
        assert not Publish(recipe).is_done()
        pack_corpus(recipe)
        assert tree_of(root) == expected, lost
    store.delete(next(key for key in expected if key.endswith("of-00001.arrow")))
    assert not Publish(recipe).is_done(), "also if only a shard is gone"


def test_a_plan_that_arrives_leaves_alone_what_is_being_written(
    tmp_path: Path, root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plan that arrives leaves shard receipts and locks in its folder alone.

    Receipts of shards arrive at the same time in the same folder, and another process may hold a lock there.
    """
    pack_corpus(recipe_of(tmp_path, root))
    own_scratch(monkeypatch, tmp_path / "another")
    recipe = recipe_of(tmp_path, root)
    lock, damaged = recipe.plan_folder / ".plan.json.lock", recipe.plan_folder / "plan.arrow"
    with locked(lock), atomic_file(recipe.plan_folder / "shard-00099.json") as out:
        out.write(b"{}")
        damaged.write_bytes(b"of a plan whose receipt is gone")
        refresh(recipe)
        assert lock.is_file()
    assert (recipe.plan_folder / "shard-00099.json").is_file()
    assert (recipe.plan_folder / "plan.json").is_file()
    assert not damaged.exists()


def test_a_damaged_object_is_found_when_it_is_fetched(
    tmp_path: Path, root: str, monkeypatch: pytest.MonkeyPatch, expected: Tree
) -> None:
    recipe = recipe_of(tmp_path, root)
    for stage in Plan(recipe).requires():
        stage.run()
    step = next(stage for stage in Plan(recipe).requires() if isinstance(stage, TokenizePart))
    file = step.outputs()[0]
    store, key = open_store(root), file.relative_to(recipe.layout.root).as_posix()
    content = bytearray(store.get(key))
    content[-100] ^= 1
    store.put(key, bytes(content))
    own_scratch(monkeypatch, tmp_path / "another")
    other = recipe_of(tmp_path, root)
    with pytest.raises(StorageError, match="it differs from its receipt") as found:
        pack_corpus(other)
    assert f"{root}/{key}" in str(found.value)
    assert found.value.code == "E703"
    pack_corpus(other)
    assert tree_of(root) == expected


def test_another_manifest_is_never_replaced(tmp_path: Path, root: str, expected: Tree) -> None:
    recipe = recipe_of(tmp_path, root)
    pack_corpus(recipe)
    store, [key] = open_store(root), [key for key in expected if key.startswith("manifests/")]
    store.put(key, b"{}")
    card = next(key for key in expected if key.endswith("README.md"))
    store.put(card, b"of the other run")
    for _ in range(2):
        with pytest.raises(Busy, match="published a different manifest for this corpus, and it was kept") as found:
            pack_corpus(recipe)
        assert found.value.exit_code == 75
        assert (store.get(key), store.get(card)) == (b"{}", b"of the other run"), "nothing is replaced"
        assert not recipe.published.exists()
    store.delete(key)
    pack_corpus(recipe)
    assert tree_of(root) == expected


@pytest.mark.parametrize("fault", ["500", "late"])
def test_a_manifest_that_the_store_answers_with_an_error_is_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, expected: Tree, fault: str
) -> None:
    """The run publishes its manifest even if the error follows the write.

    The second attempt then finds the manifest and does not take it for the manifest of another run.
    """
    own_scratch(monkeypatch, tmp_path / "scratch")
    with faulty_s3() as store:
        use(monkeypatch, store.address)
        root = f"s3://{new_bucket()}/some/where"
        recipe = recipe_of(tmp_path, root)
        store.fails("PUT", "/manifests/", fault, times=1)
        pack_corpus(recipe)
        assert store.met == 1
        assert tree_of(root) == expected


@pytest.mark.parametrize(("mode", "code"), [("403", "E687"), ("429", "E689"), ("503", "E689"), ("500", "E690")])
def test_errors_of_the_store_end_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str, code: str) -> None:
    own_scratch(monkeypatch, tmp_path / "scratch")
    with failing_store() as (address, _):
        use(monkeypatch, address)
        monkeypatch.setattr(mirror, "open_store", lambda url: open_bucket(url, retries=0))
        recipe = recipe_of(tmp_path, f"s3://bucket/{mode}/x")
        for ask in (Publish(recipe).is_done, lambda: pack_corpus(recipe), lambda: refresh(recipe)):
            with pytest.raises(PackError) as found:
                ask()
            assert found.value.code == code
            assert SECRET not in as_text(found.value)
            assert f"s3://bucket/{mode}/x/" in as_text(found.value)
            assert str(tmp_path) not in as_text(found.value)
    assert not [path for path in tmp_path.rglob("scratch/**/data/[tpc]*/**") if path.suffix == ".json"]


# -- the scratch folder ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "below"),
    [
        ("s3://b/x/y/manifests/mix-01.json", "manifests/mix-01.json"),
        ("s3://b/x/y/data/corpora/mix-01/manifest.json", "data/corpora/mix-01/manifest.json"),
        ("s3://b/x/y/data/corpora/mix-01/", "data/corpora/mix-01"),
        ("s3://b/x/y/manifest.json", "manifest.json"),
        ("s3://b/x/y/", ""),
    ],
)
def test_a_url_of_an_object_is_a_path_in_the_scratch_folder_of_its_root(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, below: str
) -> None:
    own_scratch(monkeypatch, tmp_path)
    folder = root_of("s3://b/x/y")
    assert local_path_of(text) == folder / below
    assert url_of(folder) == "s3://b/x/y"
    found = mirror_of(folder)
    assert found.url
    assert f"{found.url}/{found.key(folder / 'manifests' / 'a.json')}" == "s3://b/x/y/manifests/a.json"
    assert url_of(tmp_path / "elsewhere") == ""


def test_a_shard_is_not_kept_in_the_scratch_folder(tmp_path: Path, root: str) -> None:
    recipe = recipe_of(tmp_path, root)
    pack_corpus(recipe)
    assert not list(recipe.layout.root.rglob("train*.arrow"))
    assert list(recipe.layout.root.rglob("tokens/*/*.arrow")), "token files are read again"
