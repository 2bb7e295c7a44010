"""A root in a bucket has the same corpus as a folder, whoever makes it.

The tests also check the files that are left if a run ends early.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import luigi
import pytest
from support.bucket_roots import WAYS, Tree, own_scratch, tree_of
from support.commands import ROOT, packcorpus
from support.servers.remote import SECRET, environment, failing_store, faulty_s3, needs_remote, new_bucket, s3, use
from support.small_corpus import conversations, pack_corpus, write_project

from pipeline.graph import PackCorpus, guard
from tasks import stages
from tasks.core.error_messages import as_text
from tasks.core.errors import Busy, PackError, StorageError
from tasks.recipe import Recipe, resolve
from tasks.sources.remote_blocks import open_holes
from tasks.sources.shares import WHOLE, Share
from tasks.stages import Plan, Publish, TokenizePart, refresh, run_share
from tasks.storage.files import atomic_file, locked, read_receipt
from tasks.stores import claims, mirror
from tasks.stores.bucket import Bucket, open_bucket
from tasks.stores.mirror import Remote, mirror_of
from tasks.stores.scratch import local_path_of, root_of, url_of
from tasks.stores.store import Facts, open_store

needs_remote()

RECORDS = conversations(60)
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
    assert not list(tmp_path.rglob(".staged/*")), "nothing is left"


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
    assert "all 5 checks passed" in command("verify", corpus)
    assert f"{root}/" in command("verify", url)
    assert "same sources" in command("diff", url, "small", "--root", root)
    assert (tmp_path / "project" / command("report", url).strip()).is_file()
    assert json.loads(command("list", "--root", root, "--json"))["manifests"][0]["name"] == "small"
    exported = command("export", "small", "--root", root, "--to", "trl").partition(": written")[0]
    assert exported == f"data/exports/{Path(name).stem}-trl"
    assert (tmp_path / "project" / exported / "export.json").is_file(), "not in the scratch folder, which is trimmed"
    assert not (tmp_path / "project" / "s3:").exists()


# -- machines that start together --------------------------------------------------------------------------------------

MAKERS = ["train_tokenizer", "make_plan"]


def notice_waits(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return an event that is set when a process waits for another one."""
    waits = multiprocessing.get_context("fork").Event()

    def pause(_: float) -> None:
        waits.set()
        time.sleep(0.05)

    monkeypatch.setattr(claims, "time", SimpleNamespace(sleep=pause, monotonic=time.monotonic))
    return waits


def test_machines_that_start_together_make_each_thing_once(
    tmp_path: Path, root: str, monkeypatch: pytest.MonkeyPatch, expected: Tree
) -> None:
    """Two processes with separate scratch folders make each output once.

    Every step takes long enough that both processes want its output.
    """
    context, made = multiprocessing.get_context("fork"), tmp_path / "made"
    barrier, waits = context.Barrier(2, timeout=120), notice_waits(monkeypatch)

    def slowly(make: Callable[..., Any], *args: Any) -> Any:
        waits.clear()
        with made.open("a") as out:
            out.write(f"{make.__name__}\n")
        assert waits.wait(60), "the other one waits for it"
        return make(*args)

    for name in MAKERS:
        monkeypatch.setattr(stages, name, partial(slowly, getattr(stages, name)))

    def machine(number: int) -> None:
        own_scratch(monkeypatch, tmp_path / f"machine-{number}")
        recipe = recipe_of(tmp_path / str(number), root)
        for stage in ("tokenize", "pack"):
            barrier.wait()
            run_share(recipe, stage, Share(number, 2))

    running = [context.Process(target=machine, args=(number,)) for number in (1, 2)]
    for each in running:
        each.start()
    for each in running:
        each.join()
    assert [each.exitcode for each in running] == [0, 0]
    assert sorted(made.read_text().split()) == ["make_plan", "train_tokenizer"]
    pack_corpus(recipe_of(tmp_path, root))
    assert tree_of(root) == expected


@pytest.mark.parametrize("workers", [1, 2])
def test_runs_that_start_together_make_once_what_takes_one_machine(
    tmp_path: Path, root: str, monkeypatch: pytest.MonkeyPatch, workers: int, expected: Tree
) -> None:
    """Two drivers make the tokenizer and the plan only once.

    The steps run in the process of a driver or in its forks.
    """
    context, made = multiprocessing.get_context("fork"), tmp_path / "made"
    barrier, waits = context.Barrier(2, timeout=120), notice_waits(monkeypatch)

    def slowly(make: Callable[..., Any], *args: Any) -> Any:
        waits.clear()
        with made.open("a") as out:
            out.write(f"{make.__name__}\n")
        assert waits.wait(60), "the other driver waits for it"
        return make(*args)

    for name in MAKERS:
        monkeypatch.setattr(stages, name, partial(slowly, getattr(stages, name)))

    def driver(number: int) -> None:
        own_scratch(monkeypatch, tmp_path / f"machine-{number}")
        config = write_project(tmp_path / str(number) / "project", RECORDS, **SETTINGS)
        barrier.wait()
        run = PackCorpus(config=str(config), root=root, on="workers")
        sys.exit(not luigi.build([run], workers=workers, local_scheduler=True, log_level="CRITICAL"))

    running = [context.Process(target=driver, args=(number,)) for number in (1, 2)]
    for each in running:
        each.start()
    for each in running:
        each.join()
    assert [each.exitcode for each in running] == [0, 0]
    assert sorted(made.read_text().split()) == ["make_plan", "train_tokenizer"]
    assert tree_of(root) == expected


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("ends", [signal.SIGINT, signal.SIGTERM], ids=["ctrl-c", "sigterm"])
def test_a_run_that_is_stopped_leaves_no_claim(
    tmp_path: Path, root: str, monkeypatch: pytest.MonkeyPatch, workers: int, ends: int
) -> None:
    """The next run does not have to wait until the claim expires."""
    config, planning = write_project(tmp_path / "project", RECORDS, **SETTINGS), tmp_path / "planning"

    def plan_forever(*_: Any) -> Any:
        planning.touch()
        time.sleep(120)
        raise AssertionError("not stopped")

    def driver() -> None:
        guard.install()
        run = PackCorpus(config=str(config), root=root, on="workers")
        luigi.build([run], workers=workers, local_scheduler=True, log_level="CRITICAL")

    monkeypatch.setattr(stages, "make_plan", plan_forever)
    running = multiprocessing.get_context("fork").Process(target=driver)
    running.start()
    deadline = time.monotonic() + 60
    while not planning.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    store = open_store(root)

    def claimed() -> list[str]:
        return [key for key, _ in store.list() if key.endswith(".claim")]

    assert [Path(key).name for key in claimed()] == ["plan.claim"]
    os.kill(running.pid or 0, ends)
    running.join(60)
    assert running.exitcode
    assert not claimed()


OF_PLAN = r"plans/.*/(plan|index|rows|rejects)\.\w+"
WAITED = [  # the file that another machine makes, its objects, and the maker
    ("tokenizers/*/receipt.json", "tokenizers/.*", "train_tokenizer"),
    ("plans/*/plan.json", OF_PLAN, "make_plan"),
]


@pytest.mark.parametrize(("file", "objects", "maker"), WAITED, ids=[each[2] for each in WAITED])
def test_a_machine_that_waits_reads_what_the_other_one_has_made(
    tmp_path: Path, root: str, monkeypatch: pytest.MonkeyPatch, expected: Tree, file: str, objects: str, maker: str
) -> None:
    """The machine first does all work that no other machine does.

    Damaged files of an earlier plan in its scratch folder do no harm.
    """
    recipe, store = recipe_of(tmp_path, root), open_store(root)
    [commit] = [key for key in expected if Path(key).match(f"data/{file}")]
    claim, waits = commit.replace(".json", ".claim"), 0
    if maker != "train_tokenizer":
        run_share(recipe, "tokenize", WHOLE)
    for key in [key for key in expected if maker == "make_plan" and re.search(OF_PLAN, key) and key != commit]:
        (recipe.layout.root / key).parent.mkdir(parents=True, exist_ok=True)
        (recipe.layout.root / key).write_bytes(bytes(len(expected[key])))
    store.put(claim, b"theirs")

    def finish(_: float) -> None:
        nonlocal waits
        waits += 1
        for key in sorted(expected, key=lambda key: key.endswith(".json")):
            if re.search(objects, key):
                store.put(key, expected[key])
        store.delete(claim)

    monkeypatch.setattr(claims, "time", SimpleNamespace(sleep=finish, monotonic=time.monotonic))
    make = getattr(stages, maker)

    def not_again(*_: Any) -> Any:
        raise AssertionError("made again")

    monkeypatch.setattr(stages, maker, not_again)
    run_share(recipe, "pack" if maker != "train_tokenizer" else "tokenize", WHOLE)
    assert waits == 1
    monkeypatch.setattr(stages, maker, make)
    pack_corpus(recipe)
    assert tree_of(root) == expected


def test_what_a_machine_that_was_lost_has_claimed_is_made_by_another_one(
    tmp_path: Path, root: str, monkeypatch: pytest.MonkeyPatch, expected: Tree
) -> None:
    recipe, store, now = recipe_of(tmp_path, root), open_store(root), 0.0
    of_plan = recipe.plan_folder.relative_to(recipe.layout.root).as_posix()
    store.put(f"data/tokenizers/{str(recipe.tokenizer_key)[:12]}/receipt.claim", b"lost")
    store.put(f"{of_plan}/plan.claim", b"lost")

    def pause(seconds: float) -> None:
        nonlocal now
        now += seconds
        assert now < 3 * claims.EXPIRY, "waits forever"

    monkeypatch.setattr(claims, "time", SimpleNamespace(sleep=pause, monotonic=lambda: now))
    for number, stage in enumerate(("tokenize", "pack"), start=1):
        run_share(recipe, stage, WHOLE)
        assert number * claims.EXPIRY <= now < number * (claims.EXPIRY + 2 * claims.LONGEST)
    pack_corpus(recipe)
    assert tree_of(root) == expected, "without claims"


def test_a_share_makes_again_what_the_bucket_has_lost_of_a_plan(
    tmp_path: Path, root: str, monkeypatch: pytest.MonkeyPatch, expected: Tree
) -> None:
    pack_corpus(recipe_of(tmp_path, root))
    store = open_store(root)
    for lost in ("plan.arrow", "tokenizer.model", "plan.json"):
        for key in expected:
            if key.endswith(lost) and "corpora" not in key:
                store.delete(key)
        own_scratch(monkeypatch, tmp_path / lost)
        run_share(recipe_of(tmp_path, root), "pack", WHOLE)
        assert tree_of(root) == expected


# -- what ends early, and what was damaged -----------------------------------------------------------------------


def test_a_run_that_ended_between_data_and_receipt_is_continued(
    tmp_path: Path, root: str, monkeypatch: pytest.MonkeyPatch, expected: Tree
) -> None:
    recipe = recipe_of(tmp_path, root)
    put, receipts, stops = Remote._put, 0, 0

    def stop(self: Remote, path: Path, key: str) -> None:
        nonlocal receipts
        receipts += key.endswith(".json")
        if receipts == 3:
            raise KeyboardInterrupt
        put(self, path, key)

    monkeypatch.setattr(Remote, "_put", stop)
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


def test_an_object_that_is_written_again_while_it_is_fetched(
    tmp_path: Path, root: str, monkeypatch: pytest.MonkeyPatch, expected: Tree
) -> None:
    """A fetch succeeds if another machine writes the same bytes meanwhile.

    In some stores, the new object has another ETag.
    """
    recipe, head = recipe_of(tmp_path, root), Bucket.head
    pack_corpus(recipe)
    [key] = [key for key in expected if key.endswith("plan.arrow")]
    own_scratch(monkeypatch, tmp_path / "another")
    remote, asked, always = mirror_of(root_of(root)), 0, False

    def before_it_is_written(store: Bucket, key: str) -> Facts | None:
        nonlocal asked
        asked += 1
        facts = head(store, key)
        return facts and (facts._replace(identity='"another"') if asked == 1 or always else facts)

    monkeypatch.setattr(Bucket, "head", before_it_is_written)
    remote.fetch_file(root_of(root) / key)
    assert (root_of(root) / key).read_bytes() == expected[key]
    assert asked == 2
    always = True
    with pytest.raises(PackError, match="changed since it was listed"):
        remote.fetch_file(root_of(root) / key.replace("plan.arrow", "index.arrow"))


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
    assert isinstance(found, Remote)
    assert found.shown(folder / "manifests" / "a.json") == "s3://b/x/y/manifests/a.json"
    assert url_of(tmp_path / "elsewhere") == ""


def test_what_a_killed_writer_has_left_is_removed_by_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next writer may be a node of a cluster, which starts no run."""
    own_scratch(monkeypatch, tmp_path)
    folder = root_of("s3://b/abandoned")
    script = """
import os, sys
from pathlib import Path
from tasks.stores.mirror import Remote
folder = Path(sys.argv[1])
with Remote(folder, "s3://b/abandoned").writing(folder / "data" / "a", folder / "data" / "a.json") as (file, _):
    file.parent.mkdir(parents=True)
    file.write_bytes(b"a part")
    print("writes", flush=True)
    sys.stdin.read()
    os._exit(9)
"""
    words = [sys.executable, "-c", script, str(folder)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT) as writer:
        assert writer.stdin
        assert writer.stdout
        assert writer.stdout.readline() == b"writes\n"
        monkeypatch.setattr(os, "kill", no_such_process)
        mirror_of(folder)
        assert [path.read_bytes() for path in (folder / ".staged").rglob("a")] == [b"a part"]
        writer.stdin.close()
    Remote(folder, "s3://b/abandoned")
    assert not [*(folder / ".staged").iterdir()]


def no_such_process(*_: int) -> None:
    """Raise the error of a process ID that is on another machine.

    The machines share the scratch folder.
    """
    raise ProcessLookupError


def test_a_file_is_marked_as_used_only_from_time_to_time(tmp_path: Path, root: str, expected: Tree) -> None:
    recipe = recipe_of(tmp_path, root)
    pack_corpus(recipe)
    file, remote = recipe.layout.token_file(recipe.token_keys[0]), mirror_of(recipe.layout.root)
    for age, is_marked in ((mirror.MARK_EVERY / 2, False), (2 * mirror.MARK_EVERY, True)):
        os.utime(file, (time.time() - age, time.time() - age))
        before = file.stat().st_mtime_ns
        remote.fetch_file(file)
        assert (file.stat().st_mtime_ns != before) == is_marked


def test_the_scratch_folder_is_bounded(tmp_path: Path, root: str, expected: Tree) -> None:
    recipe = recipe_of(tmp_path, root)
    pack_corpus(recipe)
    folder = recipe.layout.root
    assert not list(folder.rglob("train*.arrow")), "a shard that is in the bucket is not kept"
    remote = mirror_of(folder)
    assert isinstance(remote, Remote)
    holes = folder / "data" / "remote" / "large" / "chat.jsonl"
    open_holes(holes, 1 << 40).close()
    remote.trim(most=1 << 30, young=0)
    assert list(folder.rglob("tokens/*/*.arrow")), "a hole takes no room"
    holes.unlink()
    remote.trim(most=0)
    assert list(folder.rglob("tokens/*/*.arrow")), "what was used a moment ago may be in use"
    remote.trim(most=0, young=0)
    left = {path.suffix for path in folder.joinpath("data").rglob("*") if path.is_file()}
    assert left <= {".json", ".lock"}
    assert Publish(recipe).is_done()
    assert read_receipt(recipe.plan_folder / "plan.json")
    open_store(root).delete(next(key for key in expected if key.startswith("manifests/")))
    pack_corpus(recipe)
    assert tree_of(root) == expected
