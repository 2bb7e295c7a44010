"""Servers on this machine that stand in for S3, for a store that fails, and for the Hugging Face Hub.

s3() ─▶ moto's S3, one per process of the tests          environment() ─▶ what makes obstore use a server
Failing ─▶ answers each key as its first part says: 403, 429, cut, …
HubStandIn ─▶ datasets, each with its commits, as the Hub's API shows them
"""

from __future__ import annotations

import functools
import hashlib
import logging
import threading
import urllib.request
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

import orjson
import pytest

SECRET = "SECRET-that-must-never-be-shown"
NAMES = ("AWS_PROFILE", "AWS_DEFAULT_REGION", "AWS_SESSION_TOKEN", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT", "HTTP_PROXY")


def needs_remote() -> None:
    """Skip a test without what the extra `remote` and the tests of it need."""
    for module in ("obstore", "moto.server", "huggingface_hub"):
        pytest.importorskip(module, reason=f"needs the extra remote ({module})")


@functools.cache
def s3() -> str:
    """Start moto's S3 once in this process and return its address."""
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    return f"http://{host}:{port}"


def new_bucket() -> str:
    """Make an empty bucket in moto's S3 and return its name."""
    name = f"bucket-{uuid.uuid4().hex[:12]}"
    urllib.request.urlopen(urllib.request.Request(f"{s3()}/{name}", method="PUT")).close()  # noqa: S310
    return name


def environment(endpoint: str) -> dict[str, str]:
    """Return the environment in which S3 is the server at `endpoint`, whatever this machine has configured."""
    keys = {"AWS_ACCESS_KEY_ID": "testing", "AWS_SECRET_ACCESS_KEY": SECRET, "AWS_REGION": "us-east-1"}
    files = {"AWS_CONFIG_FILE": "/dev/null", "AWS_SHARED_CREDENTIALS_FILE": "/dev/null"}
    return {**keys, **files, "AWS_ENDPOINT_URL": endpoint}


def use(monkeypatch: pytest.MonkeyPatch, endpoint: str) -> None:
    """Make S3 the server at `endpoint` in this process."""
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    for name, value in environment(endpoint).items():
        monkeypatch.setenv(name, value)


class Answers(BaseHTTPRequestHandler):
    """A handler with keep-alive that writes no log."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def answer(self, status: int, body: bytes, promised: int | None = None, **headers: str) -> None:
        """Send an answer; with `promised` it announces more bytes than it sends, then hangs up."""
        self.send_response(status)
        for name, value in {"Content-Length": str(promised or len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)
        self.close_connection = self.close_connection or promised is not None


class _Failing(Answers):
    def do_GET(self) -> None:
        self.server.requests.append(f"{self.command} {self.path} {self.headers.get('If-Match', '')}")  # type: ignore[attr-defined]
        query, [_, _, *key] = urlsplit(self.path).query, urlsplit(self.path).path.split("/")
        mode = "list" if "list-type" in query else key[0]
        facts = {"ETag": '"one"', "Last_Modified": "Wed, 21 Oct 2015 07:28:00 GMT"}
        if mode.isdigit() and mode != "200":
            # As S3 answers a wrong signature: with the key, and what was signed.
            body = f"<Error><Code>Code{mode}</Code><AWSAccessKeyId>{SECRET}</AWSAccessKeyId></Error>".encode()
            self.answer(int(mode), body)
        elif mode == "cut":
            self.answer(200, b"x" * 100, promised=1000, **facts)
        elif mode == "short":
            self.answer(200, b"x" * 100, **facts)
        elif mode == "other":
            self.answer(200, b"x" * 1000, **facts | {"ETag": '"two"'})
        else:
            self.answer(200, b"x" * 1000, **facts)

    do_HEAD = do_PUT = do_POST = do_DELETE = do_GET


@contextmanager
def failing_store() -> Iterator[tuple[str, list[str]]]:
    """Serve a store that fails as the key says; gives its address and the requests that it has received."""
    with _served(_Failing) as server:
        server.requests = []
        yield f"http://127.0.0.1:{server.server_address[1]}", server.requests


class _Hub(Answers):
    def do_GET(self) -> None:
        hub: HubStandIn = self.server.hub  # type: ignore[attr-defined]
        hub.requests.append(f"{self.command} {self.path}")
        size = int(self.headers.get("Content-Length") or 0)
        body = self.rfile.read(size)
        if hub.status:
            self.answer(hub.status, b"{}")
            return
        status, answer, headers = hub.answer(unquote(urlsplit(self.path).path), body)
        self.answer(status, answer, **headers)

    do_HEAD = do_POST = do_GET


class HubStandIn:
    """The Hub: {dataset: {commit: {path: content}}}, and {dataset: {revision: commit}}."""

    def __init__(self) -> None:
        self.commits: dict[str, dict[str, dict[str, bytes]]] = {}
        self.revisions: dict[str, dict[str, str]] = {}
        self.requests: list[str] = []
        self.status = 0  # of every answer, if it is not 0
        self.cut: set[str] = set()  # paths whose body ends early
        self.url = ""

    def publish(self, name: str, files: dict[str, bytes], revision: str = "main") -> str:
        """Add a commit to a dataset and return it."""
        commit = hashlib.sha1(repr((name, sorted(files.items()))).encode(), usedforsecurity=False).hexdigest()
        self.commits.setdefault(name, {})[commit] = files
        self.revisions.setdefault(name, {})[revision] = commit
        return commit

    def answer(self, path: str, body: bytes) -> tuple[int, bytes, dict[str, str]]:
        api = path.startswith("/api/datasets/")
        _, owner, name, what, revision, *rest = [*path.removeprefix("/api").split("/")[1:], "", "", ""]
        dataset, key = f"{owner}/{name}", "/".join(rest).strip("/")
        if dataset not in self.commits:
            return 401, b"{}", {"X_Error_Code": "RepoNotFound", "X_Error_Message": f"Repository not found {SECRET}"}
        commit = self.revisions[dataset].get(revision or "main", revision)
        files = self.commits[dataset].get(commit)
        if files is None:
            return 404, b"{}", {"X_Error_Code": "RevisionNotFound"}
        if api and what in ("", "revision"):
            return 200, orjson.dumps({"id": dataset, "sha": commit, "private": False, "tags": []}), {}
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
        if what == "resolve" and key in files:
            content = files[key][: len(files[key]) // 2] if key in self.cut else files[key]
            return 200, content, {"ETag": f'"{hashlib.sha256(files[key]).hexdigest()}"', "X_Repo_Commit": commit}
        return 404, b"{}", {"X_Error_Code": "EntryNotFound"}


def _entry(path: str, content: bytes) -> dict[str, Any]:
    """Describe a file as the Hub does: Parquet files are in its large storage, with their SHA-256."""
    git = hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()
    entry: dict[str, Any] = {"type": "file", "path": path, "size": len(content), "oid": git}
    if path.endswith(".parquet"):
        entry["lfs"] = {"oid": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 130}
    return entry


@contextmanager
def hub_stand_in() -> Iterator[HubStandIn]:
    """Serve a Hub without datasets."""
    hub = HubStandIn()
    with _served(_Hub) as server:
        server.hub, hub.url = hub, f"http://127.0.0.1:{server.server_address[1]}"
        yield hub


@contextmanager
def _served(handler: type[BaseHTTPRequestHandler]) -> Iterator[Any]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
