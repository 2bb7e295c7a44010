"""Local servers that replace S3, a store that fails, and the Hugging Face Hub.

s3() ─▶ moto's S3, one per process of the tests          environment() ─▶ variables that direct obstore to a server
Failing ─▶ answers each key as its first part says: 403, 429, cut, …
FaultyS3 ─▶ moto's S3, which fails when a test says so
HubStandIn ─▶ datasets, each with its commits, as the Hub's API returns and accepts them
"""

from __future__ import annotations

import base64
import functools
import hashlib
import threading
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import orjson
import pytest

SECRET = "SECRET-that-must-never-be-shown"
NAMES = ("AWS_PROFILE", "AWS_DEFAULT_REGION", "AWS_SESSION_TOKEN", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT", "HTTP_PROXY")


def needs_remote() -> None:
    """Skip a test if the extra `remote` or a package of its tests is missing."""
    for module in ("obstore", "moto.server", "huggingface_hub"):
        pytest.importorskip(module, reason=f"needs the extra remote ({module})")


@functools.cache
def s3() -> str:
    """Start moto's S3 once in this process and return its address."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _S3)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return f"http://127.0.0.1:{server.server_address[1]}"


@functools.cache
def _moto() -> Any:
    """Return moto's S3 as a WSGI application.

    moto's own server looks through the folders of all its services for each request, which takes a third of its time.
    """
    from moto.moto_server.werkzeug_app import create_backend_app

    return create_backend_app("s3")


def new_bucket() -> str:
    """Make an empty bucket in moto's S3 and return its name."""
    name = f"bucket-{uuid.uuid4().hex[:12]}"
    urllib.request.urlopen(urllib.request.Request(f"{s3()}/{name}", method="PUT")).close()  # noqa: S310
    return name


def in_folder(folder: Path) -> Any:
    """Return a store whose objects are the files of a local folder."""
    from obstore.store import LocalStore

    from packcorpus.tasks.stores.bucket import Bucket

    folder.mkdir(parents=True, exist_ok=True)
    return Bucket(f"file://{folder}", LocalStore(folder))


def environment(endpoint: str) -> dict[str, str]:
    """Return environment variables that make the server at `endpoint` the S3.

    They take precedence over the configuration of this machine. obstore loads all certificates of the machine for each
    store, which takes more time than most requests. No test needs them, so there is only one.
    """
    keys = {"AWS_ACCESS_KEY_ID": "testing", "AWS_SECRET_ACCESS_KEY": SECRET, "AWS_REGION": "us-east-1"}
    files = {"AWS_CONFIG_FILE": "/dev/null", "AWS_SHARED_CREDENTIALS_FILE": "/dev/null"}
    trusted = {"SSL_CERT_FILE": str(Path(__file__).with_name("no_authority.pem")), "SSL_CERT_DIR": "/dev/null"}
    return {**keys, **files, **trusted, "AWS_ENDPOINT_URL": endpoint}


def use(monkeypatch: pytest.MonkeyPatch, endpoint: str) -> None:
    """Make the server at `endpoint` the S3 of this process."""
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    for name, value in environment(endpoint).items():
        monkeypatch.setenv(name, value)


class Answers(BaseHTTPRequestHandler):
    """A handler with keep-alive that writes no log."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # headers and body are two writes, and each answer would wait 40 ms

    def log_message(self, *_: object) -> None:
        pass

    def answer(self, status: int, body: bytes, promised: int | None = None, **headers: str) -> None:
        """Send an answer; with `promised`, announce that many bytes and hang up.

        An answer to HEAD is complete without them.
        """
        self.send_response(status)
        for name, value in {"Content-Length": str(promised or len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)
        self.close_connection = self.close_connection or (promised is not None and self.command != "HEAD")


class _S3(Answers):
    """Passes requests on to moto's S3.

    werkzeug's server closes a connection after each answer, and then needs a connection and a thread for each request.
    """

    def do_GET(self) -> None:
        status, content, promised, headers = self.moto()
        self.answer(status, content, promised, **headers)

    def moto(self) -> tuple[int, bytes, int | None, dict[str, str]]:
        """Return moto's status, body, size of a body without its bytes, and headers."""
        from werkzeug.test import create_environ, run_wsgi_app

        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        where = f"http://{self.headers['Host']}"
        environ = create_environ(self.path, where, method=self.command, data=body, headers=[*self.headers.items()])
        parts, status, found = run_wsgi_app(_moto(), environ)
        size = found.pop("Content-Length", None)
        promised = int(size or 0) if self.command == "HEAD" else None
        headers = {name.replace("-", "_"): value for name, value in found}
        return int(status.split()[0]), b"".join(parts), promised, headers

    do_HEAD = do_PUT = do_POST = do_DELETE = do_GET


class _Failing(Answers):
    def do_GET(self) -> None:
        self.server.requests.append(f"{self.command} {self.path} {self.headers.get('If-Match', '')}")  # type: ignore[attr-defined]
        query, [_, _, *key] = urlsplit(self.path).query, urlsplit(self.path).path.split("/")
        mode = "list" if "list-type" in query else key[0]
        facts = {"ETag": '"one"', "Last_Modified": "Wed, 21 Oct 2015 07:28:00 GMT"}
        if mode.isdigit() and mode != "200":
            # S3 answers a wrong signature with the key and the signed text.
            body = f"<Error><Code>Code{mode}</Code><AWSAccessKeyId>{SECRET}</AWSAccessKeyId></Error>".encode()
            self.answer(int(mode), body)
        elif mode == "cut":
            self.answer(200, b"x" * 100, promised=1000, **facts)
        elif mode == "short":
            self.answer(200, b"x" * 100, **facts)
        elif mode == "otherrange":
            self.answer(206, b"x" * 10, **facts | {"ETag": '"two"', "Content_Range": "bytes 0-9/1000"})
        elif mode == "other":
            self.answer(200, b"x" * 1000, **facts | {"ETag": '"two"'})
        else:
            self.answer(200, b"x" * 1000, **facts)

    do_HEAD = do_PUT = do_POST = do_DELETE = do_GET


@contextmanager
def failing_store() -> Iterator[tuple[str, list[str]]]:
    """Serve a store that fails as the key says.

    Yields its address and the list of requests that it has received.
    """
    with served(_Failing) as server:
        server.requests = []
        yield f"http://127.0.0.1:{server.server_address[1]}", server.requests


class _Faulty(_S3):
    """Passes requests on to moto's S3, unless a fault applies to them."""

    def do_GET(self) -> None:
        store: FaultyS3 = self.server.store  # type: ignore[attr-defined]
        fault = store.fault_of(self.command, unquote(self.path))
        if fault.isdigit():
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            self.answer(int(fault), f"<Error><Code>Code{fault}</Code></Error>".encode())
            return
        status, content, promised, headers = self.moto()
        if fault == "late":
            self.answer(500, b"<Error><Code>InternalError</Code></Error>")
        elif fault == "cut":
            self.answer(status, content[: len(content) // 2], len(content), **headers)
        else:
            self.answer(status, content, promised, **headers)

    do_HEAD = do_PUT = do_POST = do_DELETE = do_GET


class FaultyS3:
    """moto's S3 behind a proxy that can fail."""

    def __init__(self, address: str):
        self.address = address
        self.met = 0  # how many requests had a fault
        self._rule, self._left = ("", "", ""), 0

    def fails(self, method: str, what: str, fault: str, times: int = 1 << 30) -> None:
        """Make the next `times` requests fail that have `what` in their path.

        Only requests with `method` fail. `fault` is a status of HTTP; "cut", which sends half of the body; or "late",
        which carries out the request and then answers with status 500.
        """
        self._rule, self._left, self.met = (method, what, fault), times, 0

    def recovers(self) -> None:
        self._left = 0

    def fault_of(self, method: str, path: str) -> str:
        wanted, what, fault = self._rule
        if not self._left or method != wanted or what not in path:
            return ""
        self._left -= 1
        self.met += 1
        return fault


@contextmanager
def faulty_s3() -> Iterator[FaultyS3]:
    """Serve moto's S3 through a proxy that can fail."""
    with served(_Faulty) as server:
        server.store = FaultyS3(f"http://127.0.0.1:{server.server_address[1]}")
        yield server.store


class _Hub(Answers):
    def do_GET(self) -> None:
        hub: HubStandIn = self.server.hub  # type: ignore[attr-defined]
        hub.requests.append(f"{self.command} {self.path}")
        size = int(self.headers.get("Content-Length") or 0)
        body = self.rfile.read(size)
        if hub.status or (hub.fails and hub.fails(hub.requests[-1])):
            self.answer(hub.status or 500, b"{}")
            return
        path = unquote(urlsplit(self.path).path)
        token = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
        status, answer, headers = hub.write(self.command, path, body, token) or hub.answer(path, body)
        self.answer(status, answer, **headers)

    do_HEAD = do_POST = do_PUT = do_GET


class HubStandIn:
    """A Hub with datasets and models.

    `commits` is {dataset: {commit: {path: content}}}, and `revisions` is {dataset: {revision: commit}}.
    """

    def __init__(self) -> None:
        self.commits: dict[str, dict[str, dict[str, bytes]]] = {}
        self.revisions: dict[str, dict[str, str]] = {}
        self.requests: list[str] = []
        self.private: dict[str, bool] = {}
        self.stored: dict[str, bytes] = {}  # large files, by SHA-256, committed or not
        self.sent: list[str] = []  # the SHA-256 of each large file that was uploaded
        self.history: list[tuple[str, list[str]]] = []  # the message and the paths of each commit of a client
        self.ignored: set[str] = set()  # paths that a .gitignore leaves out
        self.token = ""  # the token that may write
        self.status = 0  # of every answer, if it is not 0
        self.fails: Callable[[str], bool] | None = None  # whether to answer a request with 500
        self.gated: set[str] = set()  # whose files need a permission
        self.cut: set[str] = set()  # paths whose body ends early
        self.url = ""

    def publish(self, name: str, files: dict[str, bytes], revision: str = "main") -> str:
        """Add a commit to a dataset and return it."""
        commit = hashlib.sha1(repr((name, sorted(files.items()))).encode(), usedforsecurity=False).hexdigest()
        self.commits.setdefault(name, {})[commit] = files
        self.revisions.setdefault(name, {})[revision] = commit
        return commit

    def answer(self, path: str, body: bytes) -> tuple[int, bytes, dict[str, str]]:
        api = path.startswith("/api/")
        if not path.startswith(("/api/", "/datasets/")):  # files of models
            path = f"/models{path}"
        _, owner, name, what, revision, *rest = [*path.removeprefix("/api").split("/")[1:], *[""] * 4]
        dataset, key = f"{owner}/{name}", "/".join(rest).strip("/")
        if dataset not in self.commits:
            return 401, b"{}", {"X_Error_Code": "RepoNotFound", "X_Error_Message": f"Repository not found {SECRET}"}
        commit = self.revisions[dataset].get(revision or "main", revision)
        files = self.commits[dataset].get(commit)
        if files is None:
            return 404, b"{}", {"X_Error_Code": "RevisionNotFound"}
        if api and what in ("", "revision"):
            private = self.private.get(dataset, False)
            return 200, orjson.dumps({"id": dataset, "sha": commit, "private": private, "tags": []}), {}
        if api and what == "tree":
            below = [path for path in files if path.startswith(f"{key}/" if key else "")]
            if not below:
                return 404, b"{}", {"X_Error_Code": "EntryNotFound"}
            return 200, orjson.dumps([_entry(path, files[path]) for path in below]), {}
        if api and what == "paths-info":
            wanted = unquote(body.decode()).replace("+", " ")
            wanted_paths = [part.partition("=")[2] for part in wanted.split("&") if part.startswith("paths=")]
            if body.startswith(b"{"):
                wanted_paths = orjson.loads(body)["paths"]
            return 200, orjson.dumps([_entry(path, files[path]) for path in wanted_paths if path in files]), {}
        if what == "resolve" and dataset in self.gated:
            return 403, b"{}", {"X_Error_Code": "GatedRepo", "X_Error_Message": f"Access is restricted {SECRET}"}
        if what == "resolve" and key in files:
            content = files[key][: len(files[key]) // 2] if key in self.cut else files[key]
            return 200, content, {"ETag": f'"{hashlib.sha256(files[key]).hexdigest()}"', "X_Repo_Commit": commit}
        return 404, b"{}", {"X_Error_Code": "EntryNotFound"}

    def write(self, method: str, path: str, body: bytes, token: str) -> tuple[int, bytes, dict[str, str]] | None:
        """Answer a request of a client that writes; return None for other requests."""
        parts = path.strip("/").split("/")
        if path.startswith("/large/"):  # the storage of large files: its URLs need no token
            self.stored[parts[1]] = body
            self.sent.append(parts[1])
            return 200, b"", {"ETag": '"stored"'}
        if path == "/api/validate-yaml":
            return 200, orjson.dumps({"errors": [], "warnings": []}), {}
        writes = parts[4:5] in (["preupload"], ["commit"], ["branch"]) or path.endswith("/objects/batch")
        if method != "POST" or not (writes or path == "/api/repos/create"):
            return self._refs("/".join(parts[2:4])) if parts[4:] == ["refs"] else None
        if not self.token or token != self.token:
            return 403, orjson.dumps({"error": f"{token} has no permission"}), {}
        if path == "/api/repos/create":
            facts = orjson.loads(body)
            name = f"{facts['organization']}/{facts['name']}"
            self.publish(name, {".gitattributes": b"*.arrow filter=lfs\n"})
            self.private[name] = facts.get("visibility") == "private" or facts.get("private") is True
            return 200, orjson.dumps({"url": f"{self.url}/datasets/{name}"}), {}
        if path.endswith("/objects/batch"):
            objects = orjson.loads(body)["objects"]
            return 200, orjson.dumps({"transfer": "basic", "objects": [self._upload(each) for each in objects]}), {}
        dataset, revision = "/".join(parts[2:4]), "/".join(parts[5:])
        if parts[4] == "branch":
            start = orjson.loads(body)["startingPoint"]
            self.revisions[dataset][revision] = start
            return 200, b"", {}
        if revision not in self.revisions.get(dataset, {}):
            return 404, b"{}", {"X_Error_Code": "RevisionNotFound"}
        if parts[4] == "preupload":
            return 200, orjson.dumps({"files": [self._mode(each["path"]) for each in orjson.loads(body)["files"]]}), {}
        return self._commit(dataset, revision, [orjson.loads(line) for line in body.splitlines()])

    def _refs(self, dataset: str) -> tuple[int, bytes, dict[str, str]] | None:
        if dataset not in self.revisions:
            return None
        heads = [
            {"name": name, "ref": f"refs/heads/{name}", "targetCommit": commit}
            for name, commit in self.revisions[dataset].items()
            if not name.startswith(("refs/", "tag-"))
        ]
        tags = [
            {"name": name, "ref": f"refs/tags/{name}", "targetCommit": commit}
            for name, commit in self.revisions[dataset].items()
            if name.startswith("tag-")
        ]
        return 200, orjson.dumps({"branches": heads, "tags": tags, "converts": []}), {}

    def _mode(self, path: str) -> dict[str, Any]:
        large = path.endswith(LARGE)
        return {"path": path, "uploadMode": "lfs" if large else "regular", "shouldIgnore": path in self.ignored}

    def _upload(self, wanted: dict[str, Any]) -> dict[str, Any]:
        facts = {"oid": wanted["oid"], "size": wanted["size"]}
        url = f"{self.url}/large/{wanted['oid']}"
        return facts if wanted["oid"] in self.stored else facts | {"actions": {"upload": {"href": url}}}

    def _commit(self, dataset: str, revision: str, lines: list[Any]) -> tuple[int, bytes, dict[str, str]]:
        head = self.revisions[dataset][revision]
        files = dict(self.commits[dataset][head])
        for line in lines:
            value = line["value"]
            if line["key"] == "header" and value.get("parentCommit") != head:
                return 412, b"{}", {}
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.stored[value["oid"]]
            elif line["key"] == "deletedFile":
                del files[value["path"]]
        commit = self.publish(dataset, files, revision)
        self.history.append((lines[0]["value"]["summary"], sorted(line["value"].get("path", "") for line in lines[1:])))
        url = f"{self.url}/datasets/{dataset}/commit/{commit}"
        return 200, orjson.dumps({"success": True, "commitOid": commit, "commitUrl": url}), {}


LARGE = (".parquet", ".arrow")


def _entry(path: str, content: bytes) -> dict[str, Any]:
    """Describe a file as the Hub does.

    Parquet and Arrow files are in its large storage, with their SHA-256.
    """
    git = hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()
    entry: dict[str, Any] = {"type": "file", "path": path, "size": len(content), "oid": git}
    if path.endswith(LARGE):
        entry["lfs"] = {"oid": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 130}
    return entry


@contextmanager
def hub_stand_in() -> Iterator[HubStandIn]:
    """Serve a Hub that has no datasets."""
    hub = HubStandIn()
    with served(_Hub) as server:
        server.hub, hub.url = hub, f"http://127.0.0.1:{server.server_address[1]}"
        yield hub


@contextmanager
def served(handler: type[BaseHTTPRequestHandler]) -> Iterator[Any]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
