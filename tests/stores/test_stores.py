"""All buckets behave alike.

An object arrives whole or not at all, and errors name the cause.
"""

from __future__ import annotations

import errno
import hashlib
import os
import socket
import subprocess
import sys
import uuid
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.servers.remote import SECRET, failing_store, faulty_s3, needs_remote, new_bucket, s3, use

from packcorpus.tasks.core.errors import DataError, InputMissing, PackError, UsageError
from packcorpus.tasks.core.messages import as_text
from packcorpus.tasks.stores import store as receiving
from packcorpus.tasks.stores.store import Facts
from packcorpus.tasks.stores.urls import root_of

needs_remote()

from packcorpus.tasks.stores import bucket  # noqa: E402
from packcorpus.tasks.stores.bucket import Bucket, explained, open_bucket, open_store  # noqa: E402


def in_memory() -> Bucket:
    from obstore.store import MemoryStore

    return Bucket("memory://bucket", MemoryStore(), "below")


@pytest.fixture(params=["memory", "s3", "named"])
def store(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Bucket:
    """Return an empty store of each kind.

    `named` is a bucket of any cloud or emulator, which the environment also configures.
    """
    if request.param == "named":
        if not (url := os.environ.get("PACKCORPUS_TEST_STORE")):
            pytest.skip("needs PACKCORPUS_TEST_STORE, the URL of a bucket to write to, such as az://container")
        return open_store(f"{url}/a prefix/{uuid.uuid4().hex}")
    if request.param == "s3":
        use(monkeypatch, s3())
        return open_store(f"s3://{new_bucket()}/a prefix")
    return in_memory()


# -- all buckets behave alike -----------------------------------------------------------------------------------------

KEYS = st.sampled_from(["a", "b.jsonl", "b/c", "b/d e.txt", "b/ä#%41.jsonl", "b.d/x", "c/d/e"])
CONTENT = st.binary(max_size=40)
STEPS = st.one_of(
    st.tuples(st.just("put"), KEYS, CONTENT, st.booleans()),
    st.tuples(st.just("delete"), KEYS),
    st.tuples(st.sampled_from(["head", "get", "fetch", "fetch_old"]), KEYS),
    st.tuples(st.just("list"), st.sampled_from(["", "b", "b/c", "c", "c/d", "no"])),
)


class Plain:
    """A bucket as a dictionary of contents, each with the number of its write."""

    def __init__(self) -> None:
        self._kept: dict[str, tuple[bytes, int]] = {}
        self._writes = 0

    def put(self, key: str, content: bytes, absent: bool) -> bool:
        if absent and key in self._kept:
            return False
        self._writes += 1
        self._kept[key] = content, self._writes
        return True

    def delete(self, key: str) -> None:
        self._kept.pop(key, None)

    def head(self, key: str) -> Facts | None:
        return self._facts(key) if key in self._kept else None

    def _facts(self, key: str) -> Facts:
        content, number = self._kept[key]
        return Facts(len(content), str(number))

    def get(self, key: str) -> bytes:
        if key not in self._kept:
            raise InputMissing("object_missing", key)
        return self._kept[key][0]

    def fetch(self, key: str, target: Path, expected: Facts) -> str:
        content = self.get(key)
        if self._facts(key) != expected:
            raise DataError("object_changed", key)
        target.write_bytes(content)
        return hashlib.sha256(content).hexdigest()

    def list(self, prefix: str) -> Iterator[tuple[str, Facts]]:
        for key in sorted(self._kept, key=str.encode):
            if not prefix or key.startswith(f"{prefix}/"):
                yield key, self._facts(key)


def outcome(store: Bucket | Plain, step: Any, old: dict[str, Facts], folder: Path) -> object:
    """Run a step and return its outcome in terms that all stores share."""
    name, key, *rest = step
    try:
        if name == "put":
            return store.put(key, *rest)
        if name == "head":
            found = store.head(key)
            return found and found.size
        if name.startswith("fetch"):
            expected = old.get(key) if name == "fetch_old" else store.head(key)
            if expected is None:
                return None
            target = folder / "fetched"
            digest = store.fetch(key, target, expected)
            content = target.read_bytes()
            assert digest == hashlib.sha256(content).hexdigest()
            return content
        if name == "list":
            return [(key, facts.size) for key, facts in store.list(key)]
        return getattr(store, name)(key, *rest)
    except PackError as error:
        return error.reason


@given(steps=st.lists(STEPS, max_size=12))
def test_a_bucket_does_what_a_dictionary_does(tmp_path_factory: pytest.TempPathFactory, steps: list[Any]) -> None:
    folder = tmp_path_factory.mktemp("steps")
    stores: list[Bucket | Plain] = [Plain(), in_memory()]
    old: list[dict[str, Facts]] = [{}, {}]
    for step in steps:
        one, other = (outcome(store, step, facts, folder) for store, facts in zip(stores, old, strict=True))
        assert one == other, step
        for store, facts in zip(stores, old, strict=True):
            if step[0] == "put" and step[1] not in facts and (found := store.head(step[1])):
                facts[step[1]] = found  # of the first content, which later content replaces


def test_what_every_store_does(store: Bucket, tmp_path: Path) -> None:
    """Every store, also S3, follows one table of operations.

    The random steps above cover only memory.
    """
    assert store.head("x/a") is None
    assert list(store.list()) == []
    assert store.put("x/a", b"hello") is True
    assert store.put("x/a", b"other", absent=True) is False
    assert store.get("x/a") == b"hello"
    assert store.put("n", b"", absent=True) is True
    facts = store.head("x/a")
    assert facts
    assert facts.size == 5
    assert [key for key, _ in store.list()] == ["n", "x/a"]
    assert list(store.list("x")) == [("x/a", facts)], "a listing has the facts that head has"
    assert store.read("x/a", facts, 1, 3) == b"ell"
    arrived: list[int] = []
    assert store.fetch("x/a", tmp_path / "t", facts, arrived.append) == hashlib.sha256(b"hello").hexdigest()
    assert (tmp_path / "t").read_bytes() == b"hello"
    assert sum(arrived) == 5
    store.put("x/a", b"HELLO")
    with pytest.raises(PackError) as caught:
        store.fetch("x/a", tmp_path / "u", facts)
    assert caught.value.reason == "object_changed"
    assert not (tmp_path / "u").exists()
    with pytest.raises(PackError) as caught:
        store.read("x/a", facts, 1, 3)
    assert caught.value.reason == "object_changed"
    store.delete("x/a")
    store.delete("x/a")
    assert store.head("x/a") is None
    with pytest.raises(PackError) as caught:
        store.get("x/a")
    assert caught.value.reason == "object_missing"
    with pytest.raises(PackError) as caught:
        store.fetch("x/a", tmp_path / "v", facts)
    # An emulator of Azure compares before it checks whether the object exists.
    assert caught.value.reason in ("object_missing", "object_changed")


def test_a_large_file_is_put_and_fetched_whole(store: Bucket, tmp_path: Path) -> None:
    content = os.urandom(17 << 20)  # several parts of an upload
    (tmp_path / "large").write_bytes(content)
    assert store.put("large", tmp_path / "large")
    facts = store.head("large")
    assert facts
    assert store.fetch("large", tmp_path / "back", facts) == hashlib.sha256(content).hexdigest()
    assert store.read("large", facts, 16 << 20, 100) == content[16 << 20 :][:100]
    assert (tmp_path / "back").read_bytes() == content


def test_only_one_of_several_writers_puts_what_is_absent(store: Bucket) -> None:
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(8) as threads:
        done = list(threads.map(lambda number: store.put("manifest", b"%d" % number, absent=True), range(16)))
    assert done.count(True) == 1
    assert store.get("manifest") == b"%d" % done.index(True)


@pytest.mark.parametrize("fault", ["500", "503", "late"])
def test_what_is_absent_is_put_again_after_an_error_of_the_server(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    """The store recognizes its own content if the error followed the write.

    The second attempt finds an object, and only its content shows who wrote it.
    """
    with faulty_s3() as s3_that_fails:
        use(monkeypatch, s3_that_fails.address)
        store = open_store(f"s3://{new_bucket()}")
        s3_that_fails.fails("PUT", "manifest", fault, times=1)
        assert store.put("manifest", b"ours", absent=True) is (fault != "late")
        assert s3_that_fails.met == 1
        assert store.get("manifest") == b"ours"
        s3_that_fails.fails("PUT", "manifest", fault, times=1)
        assert store.put("manifest", b"theirs", absent=True) is False
        assert store.get("manifest") == b"ours"


# -- errors ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def failing() -> Iterator[tuple[str, list[str]]]:
    with failing_store() as (address, requests):
        yield address, requests


EXPECTED = Facts(1000, '"one"')


@pytest.mark.parametrize(
    ("key", "reason", "words"),
    [
        ("401/k", "store_denied", "HTTP 401"),
        ("403/k", "store_denied", "HTTP 403 Code403"),
        ("404/k", "object_missing", "does not exist"),
        ("412/k", "object_changed", "changed since it was listed"),
        ("429/k", "store_busy", "HTTP 429 Code429"),
        ("500/k", "store_failed", "HTTP 500 Code500"),
        ("503/k", "store_busy", "HTTP 503 Code503"),
        ("301/k", "store_failed", "set AWS_REGION"),
        ("cut/k", "object_cut", "of 1,000 bytes"),
        ("short/k", "object_changed", "changed since it was listed"),
        ("other/k", "object_changed", "changed since it was listed"),
    ],
)
def test_errors_name_the_url_and_the_cause_and_no_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: tuple[str, list[str]], key: str, reason: str, words: str
) -> None:
    address, requests = failing
    use(monkeypatch, address)
    requests.clear()
    store = open_bucket("s3://bucket", retries=1)
    with pytest.raises(PackError) as caught:
        store.fetch(key, tmp_path / "folder" / "target", EXPECTED)
    text = as_text(caught.value)
    assert caught.value.reason == reason
    assert f"s3://bucket/{key}: " in text
    assert words in text
    assert "fix: " in text
    assert SECRET not in text + repr(caught.value) + repr(caught.value.__cause__)
    assert not list(tmp_path.rglob("*target*")), "nothing is left of an object that did not arrive"
    assert all(request.endswith(f" {EXPECTED.identity}") for request in requests), "an object that changed is not sent"
    assert len(requests) == (2 if key[:3] in ("429", "500", "503", "cut") else 1), "what may pass is tried again"


@pytest.mark.parametrize(
    ("status", "reason"),
    [(403, "denied"), (404, "missing"), (412, "changed"), (429, "busy"), (500, "failed"), (503, "busy")],
)
def test_a_range_that_is_refused_is_the_same_error(
    monkeypatch: pytest.MonkeyPatch, failing: tuple[str, list[str]], status: int, reason: str
) -> None:
    use(monkeypatch, failing[0])
    with pytest.raises(PackError, match=f"^s3://bucket/{status}/k: ") as caught:
        open_bucket("s3://bucket", retries=0).read(f"{status}/k", EXPECTED, 0, 10)
    assert caught.value.reason.endswith(reason)
    assert SECRET not in as_text(caught.value)
    assert failing[1][-1].endswith(f" {EXPECTED.identity}")


def test_a_range_of_another_object_is_refused(monkeypatch: pytest.MonkeyPatch, failing: tuple[str, list[str]]) -> None:
    """The server ignores If-Match."""
    use(monkeypatch, failing[0])
    with pytest.raises(PackError, match="changed since it was listed") as caught:
        open_bucket("s3://bucket", retries=0).read("otherrange/k", EXPECTED, 0, 10)
    assert caught.value.reason == "object_changed"


def test_an_object_that_arrives_has_its_size_and_identity(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: tuple[str, list[str]]
) -> None:
    """The server of the table above, without a fault, raises no error."""
    use(monkeypatch, failing[0])
    open_bucket("s3://bucket", retries=1).fetch("200/k", tmp_path / "target", EXPECTED)
    assert (tmp_path / "target").read_bytes() == b"x" * 1000


@pytest.mark.parametrize("operation", ["list", "put", "get", "delete", "read", "head"])
def test_every_operation_converts_errors(
    monkeypatch: pytest.MonkeyPatch, failing: tuple[str, list[str]], operation: str
) -> None:
    use(monkeypatch, failing[0])
    store = open_bucket("s3://bucket/403", retries=0)
    given: dict[str, tuple[Any, ...]] = {"put": (b"x",), "read": (EXPECTED, 0, 1)}
    if operation in ("list", "delete"):  # their requests do not have the key in the path
        monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
        store = open_bucket("s3://bucket", retries=0)

    def operate() -> None:
        list(getattr(store, operation)("k", *given.get(operation, ())) or ())

    with pytest.raises(PackError) as caught:
        operate()
    assert caught.value.reason == ("store_failed" if operation in ("list", "delete") else "store_denied")
    assert SECRET not in as_text(caught.value)


def test_a_server_that_cannot_be_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, "http://127.0.0.1:1")
    with pytest.raises(PackError, match="s3://bucket/key: the server cannot be reached") as caught:
        open_bucket("s3://bucket", retries=0).get("key")
    assert caught.value.reason == "store_failed"


def test_a_server_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(bucket.TIMEOUTS, "read_timeout", timedelta(seconds=0.3))
    with socket.create_server(("127.0.0.1", 0)) as silent:
        use(monkeypatch, f"http://127.0.0.1:{silent.getsockname()[1]}")
        with pytest.raises(PackError, match="s3://bucket/key: no answer in time") as caught:
            open_bucket("s3://bucket", retries=0).get("key")
    assert caught.value.reason == "store_failed"


def test_missing_credentials_are_named() -> None:
    """obstore reports this text on a machine without credentials.

    The machine has no instance metadata either.
    """
    text = "Generic S3 error: Error performing PUT http://169.254.169.254/latest/api/token in 1s - HTTP error"
    error = explained("s3://bucket/key", text)
    assert (error.reason, str(error)) == ("store_denied", "s3://bucket/key: no credentials were found")


def test_a_full_disk_names_the_url_and_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = in_memory()
    store.put("k", b"x" * 100)
    facts = store.head("k")
    assert facts

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("packcorpus.tasks.storage.files.HashingWriter.write", full)
    with pytest.raises(PackError) as caught:
        store.fetch("k", tmp_path / "t", facts)
    assert caught.value.reason == "scratch_full"
    assert f"memory://bucket/k: the disk of {tmp_path} has no room for 100 B" in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_another_error_of_the_disk_is_not_called_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr("packcorpus.tasks.storage.files.HashingWriter.write", broken)
    with pytest.raises(PackError) as caught:
        receiving.receive([b"x"], tmp_path / "t", Facts(1, ""), "s3://b/k", None)
    assert caught.value.reason == "cannot_write"


def test_a_fork_of_a_process_that_has_used_a_store_gets_an_error_and_does_not_hang(tmp_path: Path) -> None:
    """A fork lacks the threads of obstore, and would wait for them forever."""
    script = """
import os, signal, sys
from obstore.store import MemoryStore
from packcorpus.tasks.stores.bucket import Bucket
store = Bucket("memory://", MemoryStore())
store.put("k", b"x")
if os.fork() == 0:
    signal.alarm(120)
    try:
        store.get("k")
    except Exception as error:
        os._exit(0 if "before the process was forked" in str(error) else 1)
    os._exit(2)
print(os.waitstatus_to_exitcode(os.wait()[1]))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300, check=True)
    assert done.stdout == "0\n", done.stderr


# -- what opens them ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("https://host/a", "url_not_supported"),
        ("s4://bucket/a", "url_not_supported"),
        ("s3:///a", "url_not_supported"),
        ("s3://*/a", "url_not_supported"),
        ("s3://bucket//a", "url_not_supported"),
        ("s3://bucket/a//b", "url_not_supported"),
        ("s3://bucket/a/../b", "url_not_supported"),
        ("hf://datasets/o/n", "url_not_supported"),
        ("file://relative", "url_not_supported"),
        (f"s3://user:{SECRET}@bucket/a", "url_with_secret"),
        (f"s3://{SECRET}@bucket/a", "url_with_secret"),
        (f"https://user:{SECRET}@host/a", "url_with_secret"),
        (f"hf://{SECRET}@datasets/o/n", "url_with_secret"),
        (f"az://container/a?sv=1&sig={SECRET}", "url_with_secret"),
    ],
)
def test_urls_that_are_refused_as_a_root(url: str, reason: str) -> None:
    with pytest.raises(UsageError) as caught:
        root_of(url)
    assert caught.value.reason == reason
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, {"aws_access_key_id": "D", "aws_secret_access_key": "E", "aws_region": "eu-1"}),
        ({"AWS_PROFILE": "work"}, {"aws_access_key_id": "W", "aws_secret_access_key": "X", "aws_region": "us-2"}),
        ({"AWS_PROFILE": "gone"}, {}),
        ({"AWS_ACCESS_KEY_ID": "env"}, {"aws_region": "eu-1"}),
        ({"AWS_REGION": "env", "AWS_ACCESS_KEY_ID": "env"}, {}),
    ],
)
def test_the_files_of_aws_are_read(tmp_path: Path, environment: dict[str, str], expected: dict[str, str]) -> None:
    (tmp_path / "config").write_text("[default]\nregion = eu-1\n[profile work]\nregion = us-2\n")
    (tmp_path / "credentials").write_text(
        "[default]\naws_access_key_id = D\naws_secret_access_key = E\n"
        "[work]\naws_access_key_id = W\naws_secret_access_key = X\n"
    )
    files = {"AWS_CONFIG_FILE": tmp_path / "config", "AWS_SHARED_CREDENTIALS_FILE": tmp_path / "credentials"}
    assert bucket._aws_config(environment | {name: str(path) for name, path in files.items()}) == expected


def test_a_broken_file_of_aws_is_named_and_not_quoted(tmp_path: Path) -> None:
    (tmp_path / "credentials").write_text(f"aws_secret_access_key = {SECRET}\n")
    files = {"AWS_CONFIG_FILE": "/dev/null", "AWS_SHARED_CREDENTIALS_FILE": str(tmp_path / "credentials")}
    with pytest.raises(PackError, match="credentials: cannot be read") as caught:
        bucket._aws_config(files)
    assert SECRET not in as_text(caught.value)


@pytest.mark.parametrize("url", ["gs://bucket/a", "az://container/a"])
def test_other_clouds_open_without_a_request(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "account")
    assert open_bucket(url).url_of("b") == f"{url}/b"


def test_azure_without_its_account(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_NAME", raising=False)
    with pytest.raises(PackError, match="set AZURE_STORAGE_ACCOUNT_NAME"):
        open_bucket("az://container/a")


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(PackError, match="run: pip install obstore") as caught:
        open_bucket("s3://bucket")
    assert caught.value.reason == "library_missing"
