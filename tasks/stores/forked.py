"""Use a bucket in a process whose parent had used a bucket before the fork.

obstore's threads do not survive a fork, and obstore cannot restart them. Luigi and the engine `workers` fork such
processes. Each of them starts a helper: a new Python process that only serves the bucket, and ends with its parent.

    forked process ─(method, arguments)─▶ python -m tasks.stores.forked URL ─▶ Bucket
                   ◀─result, PackError──
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import lru_cache
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tasks.core.error_messages import to_pack_error
from tasks.core.errors import PackError, StorageError
from tasks.stores.store import Facts, Progress


class Forked:
    """A store whose calls are made by a helper, one at a time."""

    def __init__(self, url: str):
        self.url, self._lock = url.rstrip("/"), threading.Lock()
        self._start()

    def _start(self) -> None:
        ours, theirs = os.pipe(), os.pipe()
        # The helper has its own session: Ctrl-C ends this process, which closes the pipe, which ends the helper.
        self._process = subprocess.Popen(  # noqa: S603 - this Python, and words that no shell sees
            [sys.executable, "-P", "-m", "tasks.stores.forked", self.url, str(theirs[0]), str(ours[1])],
            env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},  # the same version of this package
            pass_fds=(theirs[0], ours[1]),
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )
        os.close(theirs[0])
        os.close(ours[1])
        self._answers, self._calls = Connection(ours[0], writable=False), Connection(theirs[1], readable=False)

    def _call(self, method: str, *arguments: Any) -> Any:
        with self._lock:
            try:
                if self._calls.closed:
                    self._start()
                self._calls.send((method, arguments))
                answer = self._answers.recv()
            except (EOFError, OSError):
                raise StorageError("store_failed", f"{self.url}: the process that reads it ended; run again") from None
            except BaseException:
                # The answer to this call must not be read as the answer to the next call, such as a claim's release.
                self._calls.close()
                self._answers.close()
                raise
        if isinstance(answer, PackError):
            raise answer
        return answer

    def url_of(self, key: str) -> str:
        return f"{self.url}/{key}".rstrip("/")

    def head(self, key: str) -> Facts | None:
        found: Facts | None = self._call("head", key)
        return found

    def get(self, key: str) -> bytes:
        return bytes(self._call("get", key))

    def fetch(self, key: str, target: Path, expected: Facts, progress: Progress | None = None) -> str:
        digest = str(self._call("fetch", key, target.absolute(), expected))
        if progress:
            progress(expected.size)
        return digest

    def ranges(self, key: str, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        return list(self._call("ranges", key, ranges))

    def read(self, key: str, expected: Facts, start: int, length: int) -> bytes:
        return bytes(self._call("read", key, expected, start, length))

    def put(self, key: str, source: Path | bytes, absent: bool = False, expected: Facts | None = None) -> bool:
        content = source if isinstance(source, bytes) else source.absolute()
        return bool(self._call("put", key, content, absent, expected))

    def list(self, prefix: str = "") -> Iterator[tuple[str, Facts]]:
        yield from self._call("list", prefix)

    def delete(self, key: str) -> None:
        self._call("delete", key)


def open_forked(url: str) -> Forked:
    """Open a bucket through the helper of this process."""
    return _helper(url, os.getpid())


@lru_cache(maxsize=8)
def _helper(url: str, process: int) -> Forked:
    return Forked(url)


def serve(url: str, calls: Connection, answers: Connection) -> None:
    """Answer calls until the other end of the pipe is closed."""
    from tasks.stores.bucket import open_bucket

    store: Any = None
    with suppress(EOFError, OSError):
        while True:
            method, arguments = calls.recv()
            try:
                store = store or open_bucket(url)
                found = getattr(store, method)(*arguments)
                answer = list(found) if method == "list" else found
            except Exception as error:
                answer = to_pack_error(error)
            answers.send(answer)


if __name__ == "__main__":
    serve(sys.argv[1], Connection(int(sys.argv[2]), writable=False), Connection(int(sys.argv[3]), readable=False))
