"""Remote sources give the same rows as equal local files.

They are fetched once, verified, and named by their URLs.
"""

from __future__ import annotations

import glob
import gzip
import os
import re
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from support.commands import luigi, packcorpus
from support.containers import as_arrow
from support.servers.remote import (
    SECRET,
    HubStandIn,
    environment,
    hub_stand_in,
    in_folder,
    needs_remote,
    new_bucket,
    s3,
    use,
)
from support.small_corpus import conversations, pack_corpus, write_project

from packcorpus.tasks.config import load_config
from packcorpus.tasks.core.errors import DataError, InputMissing, PackError, StorageError
from packcorpus.tasks.core.messages import as_text
from packcorpus.tasks.recipe import Recipe, resolve
from packcorpus.tasks.sources.locate import _Listing, find_paths
from packcorpus.tasks.sources.model import Source
from packcorpus.tasks.sources.source_files import find_files
from packcorpus.tasks.storage.layout import Layout
from packcorpus.tasks.storage.manifest import load_manifest
from packcorpus.tasks.stores.bucket import Bucket, open_store
from packcorpus.tasks.stores.store import Facts, Reading
from packcorpus.tasks.stores.urls import split_dataset
from packcorpus.tasks.verification.rebuild import rebuild

needs_remote()

from packcorpus.tasks.stores import hub as hub_store  # noqa: E402

CHATS = b"".join(orjson.dumps(record) + b"\n" for record in conversations(60))
MORE = b"".join(orjson.dumps(record) + b"\n" for record in conversations(40, seed=1))


def parquet(seed: int) -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_pylist(conversations(30, seed=seed)), sink)
    return bytes(sink.getvalue())


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Bucket:
    use(monkeypatch, s3())
    return open_store(f"s3://{new_bucket()}")


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[HubStandIn]:
    with hub_stand_in() as stand_in:
        monkeypatch.setenv("HF_ENDPOINT", stand_in.url)
        hub_store._commit.cache_clear()
        yield stand_in
    hub_store._commit.cache_clear()


def recipe_from(folder: Path, *paths: str, **settings: Any) -> Recipe:
    return resolve(write_project(folder, [], sources=[{"path": path} for path in paths], **settings), folder)


# -- same result as local files ----------------------------------------------------------------------------------------


def test_the_same_bytes_give_the_same_keys_and_shards_as_local_files(bucket: Bucket, tmp_path: Path) -> None:
    files = {"a.jsonl": CHATS, "b.jsonl.gz": gzip.compress(MORE, mtime=0), "c/d.parquet": parquet(2)}
    for name, content in files.items():
        bucket.put(f"chats/{name}", content)
        path = tmp_path / "here" / "chats" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    here = recipe_from(tmp_path / "here", "chats")
    there = recipe_from(tmp_path / "there", bucket.url_of("chats"))
    assert [file.name for file in there.files] == [bucket.url_of(f"chats/{name}") for name in files]
    assert [there.tokens_key(part) for part in there.parts] == [here.tokens_key(part) for part in here.parts]
    assert there.corpus_key == here.corpus_key
    manifests = [load_manifest(pack_corpus(recipe)) for recipe in (here, there)]
    shards = [[shard.sha256 for shard in manifest.splits["train"].shards] for manifest in manifests]
    assert shards[0] == shards[1]
    assert [source.path for source in manifests[1].sources] == [file.name for file in there.files]
    assert not any("revision" in source.model_dump() for source in manifests[1].sources)


@pytest.mark.slow
def test_a_run_with_urls_as_a_user_starts_it(bucket: Bucket, tmp_path: Path) -> None:
    """A run with URLs works from the command line.

    The parent fetches, and its forks tokenize. A second run is a no-op. No file and no output contains a secret.
    """
    bucket.put("a.jsonl", CHATS)
    config = write_project(tmp_path, [], sources=[bucket.url_of("*.jsonl"), f"file://{tmp_path}/more.jsonl"])
    (tmp_path / "more.jsonl").write_bytes(MORE)
    given = environment(s3())
    checked = packcorpus(tmp_path, "check", config, **given)
    assert checked.returncode == 0, checked.stderr
    assert bucket.url_of("a.jsonl") in checked.stdout.replace("\n", "")
    outputs = []
    for _ in range(2):
        done = luigi(tmp_path, "--config", config.name, "--workers", "2", **given)
        assert done.returncode == 0, done.stderr
        outputs.append(done)
    manifest = tmp_path / outputs[0].stdout.splitlines()[-1]
    assert outputs[1].stdout.splitlines()[-1] == outputs[0].stdout.splitlines()[-1]
    assert load_manifest(manifest).ledger.conversations.read == 100
    shown = packcorpus(tmp_path, "inspect", str(manifest), "--at", f"{bucket.url_of('a.jsonl')}:3", **given)
    assert shown.returncode == 0, shown.stderr
    listed = packcorpus(tmp_path, "inspect", str(config), **given)
    assert listed.returncode == 0, listed.stderr
    assert bucket.url_of("a.jsonl") in listed.stdout.replace("\n", "")
    written = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    shown_to_user = "".join(each.stdout + each.stderr for each in (checked, *outputs, shown, listed))
    assert SECRET.encode() not in written
    assert SECRET not in shown_to_user


def test_an_error_in_a_remote_record_names_its_url_and_line(bucket: Bucket, tmp_path: Path) -> None:
    bucket.put("a.jsonl", CHATS + b'{"messages": [{"role": "king", "content": "x"}]}\n')
    with pytest.raises(PackError) as caught:
        pack_corpus(recipe_from(tmp_path, bucket.url_of("a.jsonl")))
    assert f"{bucket.url_of('a.jsonl')}:61" in str(caught.value)


# -- objects that a URL names ------------------------------------------------------------------------------------------

NAMES = st.sampled_from(["a.tsv", "b.jsonl", "x1.jsonl", "x2.jsonl", "[y].csv", ".hidden", "z.csv"])
TREES = st.sets(st.lists(NAMES, min_size=1, max_size=3).map("/".join), max_size=8)
PATTERNS = (
    st.lists(
        st.sampled_from(["*", "**", "*.jsonl", "x?.jsonl", "[bx]*", "a.tsv", "b.jsonl", "[[]y].csv", "*[!1].jsonl"]),
        min_size=1,
        max_size=3,
    )
    .filter(lambda parts: glob.has_magic("/".join(parts)))
    .map("/".join)
)


@given(tree=TREES, pattern=PATTERNS)
def test_a_glob_matches_objects_as_it_matches_files(
    tmp_path_factory: pytest.TempPathFactory, tree: set[str], pattern: str
) -> None:
    folder = tmp_path_factory.mktemp("tree")
    for name in tree:
        with suppress(OSError):  # a path cannot be a file and a folder
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(b"{}")
    # For a pattern that ends with **, glob sometimes returns a file with a slash at its end.
    found = {name for name in glob.iglob(pattern, root_dir=folder, recursive=True) if not name.endswith("/")}
    expected = sorted((name for name in found if (folder / name).is_file()), key=os.fsencode)
    listing = _Listing(in_folder(folder), pattern)
    if expected:
        assert list(listing.find()) == expected
    else:
        with pytest.raises(InputMissing, match="the glob matches no object"):
            listing.find()


@pytest.mark.parametrize(
    ("keys", "path", "reason", "words"),
    [
        ([], "chats", "object_missing", "no such object, and none below it"),
        ([], "chats/*.jsonl", "no_match", "the glob matches no object"),
        (["chats/a.txt"], "chats", "unknown_container", "unknown extension: s3://"),
        (["chats/a.txt"], "chats/a.txt", "unknown_container", "unknown extension; known are"),
        (["chats/a.jsonl", "chats/dataset_dict.json"], "chats", "bad_saved_data", "is not JSON"),
    ],
)
def test_urls_that_name_nothing_that_can_be_read(
    bucket: Bucket, tmp_path: Path, keys: list[str], path: str, reason: str, words: str
) -> None:
    for key in keys:
        bucket.put(key, b"x")
    with pytest.raises(PackError) as caught:
        find_paths(bucket.url_of(path), tmp_path, tmp_path / "copies")
    assert caught.value.reason == reason
    assert str(caught.value).startswith(bucket.url_of(path.partition("/*")[0]))
    assert words in str(caught.value)


def test_an_object_whose_key_looks_like_a_glob_is_found(bucket: Bucket, tmp_path: Path) -> None:
    for key in ("a[1].jsonl", "a1.jsonl"):
        bucket.put(key, key.encode())
    [found] = find_paths(bucket.url_of("a[1].jsonl"), tmp_path, tmp_path / "copies")
    assert found.path.read_bytes() == b"a[1].jsonl"
    bucket.delete("a[1].jsonl")
    [found] = find_paths(bucket.url_of("a[1].jsonl"), tmp_path, tmp_path / "copies")
    assert found.path.read_bytes() == b"a1.jsonl", "else it is one"


@pytest.mark.parametrize("bad", ["chats//b.jsonl", "chats/./b.jsonl", "chats/../b.jsonl", "chats/old//"])
def test_a_key_that_cannot_be_read_is_named(bad: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The library lists no object next to it, but reads each of them."""
    use(monkeypatch, s3())
    name = new_bucket()
    for key in ("chats/a.jsonl", bad, "others/c.jsonl"):
        headers = {"Content-Type": "text/plain"}
        request = urllib.request.Request(f"{s3()}/{name}/{key}", CHATS, headers, method="PUT")  # noqa: S310
        urllib.request.urlopen(request).close()  # noqa: S310
    for url in (f"s3://{name}/chats", f"s3://{name}/chats/*.jsonl"):
        with pytest.raises(
            DataError, match=re.escape(f's3://{name}/chats: the object "{bad}" cannot be read')
        ) as caught:
            find_paths(url, tmp_path, tmp_path / "copies")
        assert caught.value.code == "E696"
    for key in ("chats/a.jsonl", "others"):
        [file] = find_paths(f"s3://{name}/{key}", tmp_path, tmp_path / "copies")
        assert file.path.read_bytes() == CHATS


def test_a_saved_dataset_keeps_its_own_order_and_hidden_and_empty_objects_are_left_out(
    bucket: Bucket, tmp_path: Path
) -> None:
    state = {"_data_files": [{"filename": "data-1.arrow"}, {"filename": "data-0.arrow"}]}
    objects = {"b/state.json": orjson.dumps(state), "b/dataset_info.json": b"{}", "a.jsonl": CHATS, "c/x.jsonl": MORE}
    objects |= {"b/data-0.arrow": b"0", "b/data-1.arrow": b"1", "folder": b"", ".hidden/x.jsonl": b"x", "c/.y.md": b"y"}
    for key, content in objects.items():
        bucket.put(f"all/{key}", content)
    found = find_paths(f"{bucket.url_of('all')}/", tmp_path, tmp_path / "copies")
    expected = ["a.jsonl", "b/data-1.arrow", "b/data-0.arrow", "c/x.jsonl"]
    assert [each.name for each in found] == [bucket.url_of(f"all/{name}") for name in expected]
    assert [each.path.read_bytes() for each in found] == [objects[name] for name in expected]
    bucket.put("all/b/dataset_info.json", b'{"splits": {"train": {"num_examples": 3}}}')
    for number in (0, 1):
        bucket.put(f"all/b/data-{number}.arrow", as_arrow([{"text": "a"}]))
    notes = [each.note for each in find_paths(bucket.url_of("all"), tmp_path, tmp_path / "copies")]
    assert notes[0] == notes[3] == ""
    assert notes[1] == notes[2]
    assert "all/b: all 2 rows are read; its dataset_info.json says 3" in notes[1]


def test_credentials_in_a_url_are_refused_before_anything_shows_it(tmp_path: Path) -> None:
    for url in (f"s3://key:{SECRET}@bucket/a.jsonl", f"s3://bucket/a.jsonl?X-Amz-Signature={SECRET}"):
        config = tmp_path / "corpus.yaml"
        config.write_text(yaml.safe_dump({"sources": [{"path": url, "weight": 2}], "weighting": "subsample"}))
        with pytest.raises(PackError) as caught:
            load_config(config)
        assert caught.value.reason == "url_with_secret"
        assert SECRET not in as_text(caught.value)


@pytest.mark.parametrize("command", ["init", "inspect", "report", "verify", "repair", "diff x"])
def test_commands_refuse_a_url_with_credentials_and_do_not_show_them(tmp_path: Path, command: str) -> None:
    done = packcorpus(tmp_path, *command.split(), f"s3://user:{SECRET}@bucket/a.jsonl")
    assert done.returncode == 64, done.stderr
    assert "a URL must contain no user info" in done.stderr
    assert SECRET not in done.stderr


@pytest.mark.parametrize("command", ["init chats.jsonl", "report small", "export small --to trl"])
def test_commands_that_write_local_files_make_no_path_of_a_url(tmp_path: Path, command: str) -> None:
    pack_corpus(resolve(write_project(tmp_path, conversations(20)), tmp_path))
    (tmp_path / "chats.jsonl").write_bytes(b'{"messages": [{"role": "user", "content": "hello"}]}\n')
    done = packcorpus(tmp_path, *command.split(), "--output", "az://container/name")
    assert done.returncode == 64, done.stderr
    assert "az://container/name: this command writes local files only" in done.stderr
    assert not (tmp_path / "az:").exists()


# -- copies ------------------------------------------------------------------------------------------------------------


class Counting:
    """Record the keys that are fetched from a store.

    Tests replace `fetch` to make it fail.
    """

    def __init__(self, store: Reading):
        self.store: Any = store
        self.fetched: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)

    def fetch(self, key: str, *rest: Any) -> str:
        self.fetched.append(key)
        return self.store.fetch(key, *rest)


@pytest.fixture
def counted(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> Counting:
    """Return the bucket that every search opens."""
    counting = Counting(bucket)
    monkeypatch.setattr("packcorpus.tasks.sources.locate.open_store", lambda _: counting)
    return counting


def test_an_object_is_fetched_once_and_again_if_it_has_changed(counted: Counting, tmp_path: Path) -> None:
    store, url, layout = counted.store, counted.url_of("*.jsonl"), Layout(tmp_path)
    store.put("a.jsonl", CHATS)
    store.put("b.jsonl", CHATS.replace(b"the", b"teh"))  # the same length
    for _ in range(2):
        files = find_files([Source(path=url), Source(path=counted.url_of("a.jsonl"))], tmp_path, layout)
        assert [file.name for file in files] == [counted.url_of("a.jsonl"), counted.url_of("b.jsonl")]
        contents = [CHATS, CHATS.replace(b"the", b"teh")]
        assert [file.path.read_bytes() for file in files] == contents
    assert sorted(counted.fetched) == ["a.jsonl", "b.jsonl"]
    store.put("a.jsonl", CHATS.replace(b"train", b"brain"))
    [changed, _] = find_files([Source(path=url)], tmp_path, layout)
    assert changed.path.read_bytes() == CHATS.replace(b"train", b"brain")
    assert sorted(counted.fetched) == ["a.jsonl", "a.jsonl", "b.jsonl"]
    store.delete("b.jsonl")
    assert len(find_files([Source(path=url)], tmp_path, layout)) == 1, "a removed object is gone, copy or not"


def test_concurrent_runs_fetch_an_object_once(counted: Counting, tmp_path: Path) -> None:
    counted.store.put("a.jsonl", CHATS)
    start, found = threading.Barrier(6), list[bytes]()

    def find() -> None:
        start.wait()
        [each] = find_paths(counted.url_of("a.jsonl"), tmp_path, tmp_path / "copies")
        found.append(each.path.read_bytes())

    threads = [threading.Thread(target=find) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [CHATS] * 6
    assert counted.fetched == ["a.jsonl"]
    assert not list((tmp_path / "copies").rglob("*.lock"))


def test_an_object_that_changes_while_it_is_fetched_is_an_error(
    counted: Counting, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store: Any = counted.store
    store.put("a.jsonl", CHATS)

    def changing(key: str, target: Path, expected: Facts, progress: Any = None) -> str:
        store.put(key, MORE)
        return str(type(store).fetch(store, key, target, expected, progress))

    monkeypatch.setattr(counted, "fetch", changing)
    with pytest.raises(DataError) as caught:
        find_paths(counted.url_of("a.jsonl"), tmp_path, tmp_path / "copies")
    assert caught.value.reason == "object_changed"
    assert counted.url_of("a.jsonl") in str(caught.value)
    assert not [path for path in (tmp_path / "copies").rglob("*") if path.is_file()]


def test_a_failure_keeps_what_has_arrived(counted: Counting, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a", "b", "c"):
        counted.store.put(f"{name}.jsonl", CHATS + name.encode())
    whole = counted.fetch

    def failing(key: str, *rest: Any) -> str:
        if key == "c.jsonl":
            raise StorageError("store_failed", f"{counted.url_of(key)}: HTTP 500")
        return whole(key, *rest)

    monkeypatch.setattr(counted, "fetch", failing)
    monkeypatch.setattr(
        "packcorpus.tasks.stores.store.DOWNLOADS", 1
    )  # download in order, so that the failure comes last
    with pytest.raises(StorageError):
        find_paths(counted.url_of("*.jsonl"), tmp_path, tmp_path / "copies")
    monkeypatch.setattr(counted, "fetch", whole)
    assert len(find_paths(counted.url_of("*.jsonl"), tmp_path, tmp_path / "copies")) == 3
    assert counted.fetched == ["a.jsonl", "b.jsonl", "c.jsonl"]


def test_a_damaged_copy_is_an_error_that_names_both(bucket: Bucket, tmp_path: Path) -> None:
    bucket.put("a.jsonl", CHATS)
    [file] = recipe_from(tmp_path, bucket.url_of("a.jsonl")).files
    file.path.write_bytes(CHATS.replace(b"train", b"brain"))
    with pytest.raises(StorageError) as caught:
        recipe_from(tmp_path, bucket.url_of("a.jsonl"))
    assert caught.value.reason == "copy_damaged"
    assert str(file.path) in str(caught.value)
    assert bucket.url_of("a.jsonl") in str(caught.value)
    file.path.unlink()
    assert recipe_from(tmp_path, bucket.url_of("a.jsonl")).files[0].sha256 == file.sha256


def test_a_disk_without_room_is_an_error_before_anything_is_fetched(
    counted: Counting, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted.store.put("a.jsonl", CHATS)
    monkeypatch.setattr("packcorpus.tasks.stores.store.shutil.disk_usage", lambda _: SimpleNamespace(free=10))
    with pytest.raises(StorageError) as caught:
        find_paths(counted.url_of("a.jsonl"), tmp_path, tmp_path / "copies")
    assert caught.value.reason == "scratch_full"
    assert counted.fetched == []


def test_copies_are_outputs_that_no_source_may_name(bucket: Bucket, tmp_path: Path) -> None:
    bucket.put("a.jsonl", CHATS)
    recipe_from(tmp_path, bucket.url_of("a.jsonl"))
    with pytest.raises(PackError) as caught:
        recipe_from(tmp_path, "data/remote/*/*.jsonl")
    assert caught.value.reason == "own_output"


# -- the Hub -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("hf://datasets/o/n", ("o/n", "", "")),
        ("hf://datasets/o/n/", ("o/n", "", "")),
        ("hf://datasets/o/n/a/*.parquet", ("o/n", "", "a/*.parquet")),
        ("hf://datasets/o/n@v1/a.jsonl", ("o/n", "v1", "a.jsonl")),
        (
            "hf://datasets/o/n@refs/convert/parquet/default/x.parquet",
            ("o/n", "refs/convert/parquet", "default/x.parquet"),
        ),
        ("hf://datasets/o/n@refs/pr/7", ("o/n", "refs/pr/7", "")),
        ("hf://datasets/o/n@feature%2Fx/a.jsonl", ("o/n", "feature/x", "a.jsonl")),
    ],
)
def test_urls_of_the_hub_are_split_as_its_own_library_does(url: str, expected: tuple[str, str, str]) -> None:
    from huggingface_hub import HfFileSystem

    assert tuple(split_dataset(url)) == expected
    parse = getattr(__import__("huggingface_hub.utils", fromlist=["x"]), "parse_hf_uri", None)
    if parse:
        theirs = parse(url)
        assert (theirs.id, theirs.revision or "", theirs.path_in_repo.strip("/")) == expected
    assert HfFileSystem.protocol == "hf"


@pytest.mark.parametrize(
    "url", ["hf://models/o/n", "hf://o/n", "hf://datasets/n", "hf://datasets/", "hf://datasets/o/n@/x"]
)
def test_urls_of_the_hub_that_are_refused(url: str) -> None:
    with pytest.raises(PackError, match="expected hf://datasets/OWNER/NAME@REVISION/PATH"):
        split_dataset(url)


def test_a_dataset_is_read_at_one_commit_that_the_manifest_records(hub: HubStandIn, tmp_path: Path) -> None:
    files = {"data/train-0.parquet": parquet(1), "data/train-1.parquet": parquet(2), "README.md": b"# x"}
    commit = hub.publish("owner/name", files)
    recipe = recipe_from(tmp_path, "hf://datasets/owner/name/data/*.parquet")
    assert [file.name for file in recipe.files] == [
        f"hf://datasets/owner/name/data/train-{number}.parquet" for number in (0, 1)
    ]
    hub.publish("owner/name", {"data/train-0.parquet": parquet(3)})
    assert recipe_from(tmp_path, "hf://datasets/owner/name/data/*.parquet").corpus_key == recipe.corpus_key, (
        "a run is a process, which resolves main once"
    )
    manifest = pack_corpus(recipe)
    assert [source.revision for source in load_manifest(manifest).sources] == [commit] * 2
    hub_store._commit.cache_clear()
    later = recipe_from(tmp_path, "hf://datasets/owner/name/data/*.parquet")
    assert later.corpus_key != recipe.corpus_key, "the next run packs what main has by then"
    assert ": identical" in rebuild(manifest), "a rebuild reads the recorded commit"


def test_an_unchanged_file_of_a_new_commit_is_not_fetched_again(hub: HubStandIn, tmp_path: Path) -> None:
    for number in range(2):
        hub.publish("owner/name", {"a.jsonl": CHATS, "b.jsonl": MORE + b"\n" * number})
        hub_store._commit.cache_clear()
        hub.requests.clear()
        find_paths("hf://datasets/owner/name/*.jsonl", tmp_path, tmp_path / "copies")
        fetched = [request.rpartition("/")[2] for request in hub.requests if "/resolve/" in request]
        assert sorted(fetched) == (["b.jsonl"] if number else ["a.jsonl", "b.jsonl"])


def test_a_named_revision_is_that_revision(hub: HubStandIn, tmp_path: Path) -> None:
    old = hub.publish("owner/name", {"a.jsonl": CHATS}, revision="v1")
    hub.publish("owner/name", {"a.jsonl": MORE})
    [found] = find_paths("hf://datasets/owner/name@v1/a.jsonl", tmp_path, tmp_path / "copies")
    assert (found.revision, found.path.read_bytes()) == (old, CHATS)
    assert found.name == "hf://datasets/owner/name@v1/a.jsonl"
    [pinned] = find_paths(f"hf://datasets/owner/name@{old}/a.jsonl", tmp_path, tmp_path / "copies")
    assert pinned.revision == old


def test_a_bare_name_is_a_dataset_if_no_such_path_exists(hub: HubStandIn, tmp_path: Path) -> None:
    hub.publish("owner/name", {"data/train-00000-of-00002.parquet": parquet(1), "README.md": b"#", "x.py": b""})
    [found] = find_paths("owner/name", tmp_path, tmp_path / "copies")
    assert found.name == "hf://datasets/owner/name/data/train-00000-of-00002.parquet"
    (tmp_path / "owner" / "name").mkdir(parents=True)
    (tmp_path / "owner" / "name" / "a.jsonl").write_bytes(CHATS)
    hub.requests.clear()
    [here] = find_paths("owner/name", tmp_path, tmp_path / "copies")
    assert (here.name, hub.requests) == ("owner/name/a.jsonl", [])


def test_a_path_that_is_neither_here_nor_on_the_hub_names_both_readings(hub: HubStandIn, tmp_path: Path) -> None:
    with pytest.raises(PackError) as caught:
        find_paths("owner/name", tmp_path, tmp_path / "copies")
    assert caught.value.reason == "source_missing"
    assert "owner/name: no such file or folder" in str(caught.value)
    assert "as the name of a dataset on the Hub: no such dataset on the Hub, or a private one" in str(caught.value)
    hub.requests.clear()
    for path in ("./owner/name", "owner/name.jsonl", "name", "a/b/c", "owner/*"):
        with pytest.raises(PackError) as caught:
            find_paths(path, tmp_path, tmp_path / "copies")
        assert "Hub" not in str(caught.value)
    assert hub.requests == [], "these can only be local paths"


def test_a_whole_dataset_with_several_groups_of_files_is_refused(hub: HubStandIn, tmp_path: Path) -> None:
    names = [
        "main/train-00000-of-00002.parquet",
        "main/train-00001-of-00002.parquet",
        "main/test-00000-of-00001.parquet",
    ]
    hub.publish("owner/name", dict.fromkeys(names, b"x"))
    with pytest.raises(DataError) as caught:
        find_paths("owner/name", tmp_path, tmp_path / "copies")
    assert caught.value.reason == "several_groups"
    assert "has 2 groups of files: main/test-*.parquet, main/train-*.parquet" in str(caught.value)
    proposed = re.search(r"such as (\S+)", str(caught.value))
    assert proposed
    found = find_paths(proposed[1], tmp_path, tmp_path / "copies")
    assert [each.name.rpartition("name/")[2] for each in found] == names[:2], "the advice works"


@pytest.mark.parametrize(
    ("status", "reason"), [(401, "store_denied"), (403, "store_denied"), (429, "store_busy"), (500, "store_failed")]
)
def test_errors_of_the_hub(hub: HubStandIn, tmp_path: Path, status: int, reason: str) -> None:
    hub.publish("owner/name", {"a.jsonl": CHATS})
    hub.status = status
    with pytest.raises(PackError) as caught:
        find_paths("hf://datasets/owner/name/a.jsonl", tmp_path, tmp_path / "copies")
    assert (caught.value.reason, f"HTTP {status}" in str(caught.value)) == (reason, True)
    assert str(caught.value).startswith("hf://datasets/owner/name: ")


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("hf://datasets/owner/other/a.jsonl", "no such dataset on the Hub, or a private one; for that, set HF_TOKEN"),
        ("hf://datasets/owner/name@v9/a.jsonl", "no such file or revision in the dataset"),
        ("hf://datasets/owner/name/b.jsonl", "no such object, and none below it"),
    ],
)
def test_what_the_hub_does_not_have(hub: HubStandIn, tmp_path: Path, url: str, words: str) -> None:
    hub.publish("owner/name", {"a.jsonl": CHATS})
    with pytest.raises(PackError, match=words) as caught:
        find_paths(url, tmp_path, tmp_path / "copies")
    assert caught.value.reason == "object_missing"
    assert SECRET not in as_text(caught.value)


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet"])
def test_a_file_of_the_hub_that_arrives_incomplete_is_an_error(hub: HubStandIn, tmp_path: Path, name: str) -> None:
    hub.publish("owner/name", {name: CHATS})
    hub.cut.add(name)
    with pytest.raises(PackError) as caught:
        find_paths(f"hf://datasets/owner/name/{name}", tmp_path, tmp_path / "copies")
    assert caught.value.reason == "object_cut"
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_a_file_of_the_hub_with_another_checksum_is_an_error(
    hub: HubStandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.publish("owner/name", {"a.parquet": CHATS})
    answer = hub.answer

    def damaged(path: str, body: bytes) -> tuple[int, bytes, dict[str, str]]:
        status, content, headers = answer(path, body)
        return status, content.replace(b"train", b"brain") if "/resolve/" in path else content, headers

    monkeypatch.setattr(hub, "answer", damaged)
    with pytest.raises(PackError, match="its SHA-256 differs from the recorded one") as caught:
        find_paths("hf://datasets/owner/name/a.parquet", tmp_path, tmp_path / "copies")
    assert caught.value.reason == "object_cut"
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
