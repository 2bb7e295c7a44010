"""Serve a bucket on this machine with moto, and count the bytes read and written."""

from __future__ import annotations

import logging
import os
import threading
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import orjson

BUCKET = "bucket"


class MotoBucket:
    """A bucket that counts the bytes read and written of each object.

    `read` counts the bytes sent, by key; listings count under an empty key. `written` counts the bytes received.
    """

    def __init__(self, address: str):
        self.address, self.read, self.written = address, Counter[str](), Counter[str]()
        with urllib.request.urlopen(urllib.request.Request(f"{address}/{BUCKET}", method="PUT")):  # noqa: S310
            pass

    @property
    def environment(self) -> dict[str, str]:
        """Return the environment variables with which S3 clients use this bucket."""
        keys = {"AWS_ACCESS_KEY_ID": "testing", "AWS_SECRET_ACCESS_KEY": "testing", "AWS_REGION": "us-east-1"}
        files = {"AWS_CONFIG_FILE": "/dev/null", "AWS_SHARED_CREDENTIALS_FILE": "/dev/null"}
        return os.environ | keys | files | {"AWS_ENDPOINT_URL": self.address}

    def put(self, key: str, file: Path) -> None:
        """Upload a file."""
        url, headers = f"{self.address}/{BUCKET}/{key}", {"Content-Type": "application/octet-stream"}  # not a form
        request = urllib.request.Request(url, file.read_bytes(), headers, method="PUT")  # noqa: S310
        with urllib.request.urlopen(request):  # noqa: S310
            pass

    def take_sources(self, config: Path, megabytes: float | None = None) -> None:
        """Move the sources of a config to the bucket, and update the config.

        With `megabytes`, a source is cut at line ends into objects of about that size.
        """
        settings = orjson.loads(config.read_bytes())
        piece = config.with_name("piece")
        for name in settings["sources"]:
            source = config.with_name(name)
            with source.open("rb") as lines:
                for number in count():
                    data = lines.read(int(megabytes * 1e6) if megabytes else -1) + lines.readline()
                    if not data:
                        break
                    piece.write_bytes(data)
                    self.put(f"sources/{source.stem}-{number:03}.jsonl", piece)
            source.unlink()
        config.write_bytes(orjson.dumps(settings | {"sources": [f"s3://{BUCKET}/sources/*.jsonl"]}))

    def get(self, key: str) -> bytes:
        return bytes(self._held().keys[key].value)

    def size(self) -> dict[str, int]:
        """Return the sizes of all objects by their keys."""
        return {key: found.size for key, found in [*self._held().keys.items()]}

    def unfinished(self) -> list[str]:
        """Return the keys of multipart uploads that were neither completed nor aborted."""
        return [upload.key_name for upload in self._held().multiparts.values()]

    @staticmethod
    def _held() -> Any:
        from moto.s3.models import s3_backends

        [backend] = [found for found in s3_backends["123456789012"].values() if BUCKET in found.buckets]
        return backend.buckets[BUCKET]


@contextmanager
def moto_bucket() -> Iterator[MotoBucket]:
    """Start the server in threads of this process."""
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import make_server

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    counts: list[MotoBucket] = []

    def counted(application: Callable[..., Iterable[bytes]]) -> Callable[..., Iterable[bytes]]:
        def answer(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
            key = environ["PATH_INFO"].removeprefix(f"/{BUCKET}").strip("/")
            if environ["REQUEST_METHOD"] == "PUT" and counts:
                counts[0].written[key] += int(environ.get("CONTENT_LENGTH") or 0)

            def start(status: str, headers: list[tuple[str, str]], *rest: Any) -> Any:
                if environ["REQUEST_METHOD"] == "GET" and counts:
                    counts[0].read[key] += int(dict(headers).get("Content-Length", 0))
                return start_response(status, headers, *rest)

            return application(environ, start)

        return answer

    server = make_server("127.0.0.1", 0, counted(DomainDispatcherApplication(create_backend_app)), threaded=True)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        counts.append(MotoBucket(f"http://127.0.0.1:{server.server_port}"))
        yield counts[0]
    finally:
        server.shutdown()
        server.server_close()
