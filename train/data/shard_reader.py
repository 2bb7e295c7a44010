"""Read the windows of a rank's streams in order; threads open the next windows.

    windows, by first use ─threads: fetch, digest, checks─▶ mapped columns ─steps─▶ (columns, row), one after the other
                                                            a shard that no other window needs is dropped

Only the main thread decides which shards are opened and dropped, so no locks are needed. In addition to the windows in
use, it opens at most two windows per stream ahead, and never more bytes than `ShardFiles.limit`. An error in a thread
is raised when the rows are needed.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from tasks.core.errors import DataError, StorageError
from tasks.storage.manifest import without_repair_hint
from tasks.storage.shards import read_verified
from train.data.corpus import Corpus, Shard
from train.data.dataset import Columns, read_rows
from train.data.shard_files import ShardFiles
from train.data.streamed_order import Stream, Window, steps, uses

CLOSING = 30.0  # seconds to wait for a thread; the next start deletes files that the thread leaves in a cache

Place = tuple[Columns, int]


class Threads:
    """Daemon threads that run calls in order.

    A call that hangs does not keep the process from ending.
    """

    def __init__(self, count: int):
        self._calls: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._threads = [threading.Thread(target=self._work, name="shards", daemon=True) for _ in range(count)]
        for thread in self._threads:
            thread.start()

    def submit(self, call: Callable[[], Any]) -> Future[Any]:
        future: Future[Any] = Future()
        self._calls.put((future, call))
        return future

    def _work(self) -> None:
        while (item := self._calls.get()) is not None:
            future, call = item
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(call())
                except BaseException as error:
                    future.set_exception(error)

    def close(self) -> None:
        """End the threads after their current calls.

        Waiting calls must have been canceled before.
        """
        for _ in self._threads:
            self._calls.put(None)
        for thread in self._threads:
            thread.join(CLOSING)


@dataclass(slots=True)
class OpenShard:
    """Shard that is open, or is being opened, for `users` windows."""

    future: Future[tuple[np.ndarray, list[Columns]]]
    users: int = 0


@dataclass(slots=True)
class ShardReader:
    """Reader for the shards of a split."""

    corpus: Corpus
    shards: Sequence[Shard]
    files: ShardFiles
    names: Sequence[str]
    threads: int
    opened: dict[int, OpenShard] = field(default_factory=dict)

    def places(self, streams: Sequence[Stream], per_stream: int, start: int) -> Generator[Place]:
        """Yield the place of each row, from step `start` on.

        Raises DataError or StorageError, which name the file.
        """
        threads = Threads(self.threads)
        waiting = [streams[stream][window] for stream, window in uses(streams, per_stream, start)]
        waiting.reverse()
        ahead = 0  # windows that are opened but not used yet
        current: dict[int, tuple[int, list[Columns], np.ndarray, np.ndarray]] = {}

        def open_ahead() -> int:
            count = ahead
            while waiting and count < 2 * len(streams) and self._fits(waiting[-1]):
                self._open(waiting.pop(), threads)
                count += 1
            return count

        try:
            ahead = open_ahead()
            for runs in steps(streams, per_stream, start):
                for run in runs:
                    window = streams[run.stream][run.window]
                    if current.get(run.stream, (-1,))[0] != run.window:
                        current[run.stream] = (run.window, *self._columns(window))
                        ahead -= 1
                    _, blocks, numbers, rows = current[run.stream]
                    part = slice(run.first, run.last)
                    for number, row in zip(numbers[part].tolist(), rows[part].tolist(), strict=True):
                        yield blocks[number], row
                    if run.last == window.rows:
                        del current[run.stream]
                        self._release(window)
                        ahead = open_ahead()
        finally:
            for shard in self.opened.values():
                shard.future.cancel()
            threads.close()
            for number in self.opened:
                self.files.drop(self.shards[number].path)
            self.opened.clear()

    def _fits(self, window: Window) -> bool:
        """Return whether the limit allows opening the shards of a window."""
        limit = self.files.limit
        return limit is None or sum(self.shards[n].bytes for n in self.opened.keys() | window.shards) <= limit

    def _open(self, window: Window, threads: Threads) -> None:
        for number in sorted(window.shards):
            if number not in self.opened:
                shard = self.shards[number]
                self.opened[number] = OpenShard(threads.submit(partial(self._read, shard)))
            self.opened[number].users += 1

    def _release(self, window: Window) -> None:
        for number in window.shards:
            self.opened[number].users -= 1
            if not self.opened[number].users:
                del self.opened[number]
                self.files.drop(self.shards[number].path)

    def _columns(self, window: Window) -> tuple[list[Columns], np.ndarray, np.ndarray]:
        """Return the blocks of a window's shards, and the place of each row.

        The places are the number of the block, int64[rows], and the row within the block, int32[rows].
        """
        shards, rows = window.places()
        blocks: list[Columns] = []
        numbers = np.empty(len(rows), np.int64)
        for shard in sorted(window.shards):
            first_rows, own = self.opened[shard].future.result()
            of_shard = np.flatnonzero(shards == shard)
            block = np.searchsorted(first_rows, rows[of_shard], "right") - 1
            numbers[of_shard] = block + len(blocks)
            rows[of_shard] -= first_rows[block]
            blocks += own
        return blocks, numbers, rows

    def _read(self, shard: Shard) -> tuple[np.ndarray, list[Columns]]:
        """Fetch and check a shard; a damaged copy is fetched once more."""
        try:
            return self._mapped(shard)
        except DataError:
            if not self.files.copies:
                raise
            self.files.drop(shard.path)
        try:
            return self._mapped(shard)
        except DataError as error:
            read_verified(self.corpus.folder, shard, mapped=True)  # raises if the original is damaged
            raise StorageError(
                "bad_cache",
                f"{without_repair_hint(error)}; the first copy was also damaged, but the original is intact: check the "
                "disk of the cache, or set another `cache`",
            ) from error

    def _mapped(self, shard: Shard) -> tuple[np.ndarray, list[Columns]]:
        """Map a shard and check its digest and its rows."""
        folder, most = self.files.fetch(shard.path), last_id(self.corpus)
        first_rows, blocks = [], []
        length, shape = self.corpus.sequence_length, self.corpus.shape
        for first, columns, (largest, *_) in read_rows(folder, shard, self.names, length, True, shape):
            if largest > most:
                raise DataError(
                    "bad_row",
                    f"{folder / shard.path}: has the ID {largest}, but the last ID of the manifest's tokenizer is "
                    f"{most}; pack the corpus again",
                )
            first_rows.append(first)
            blocks.append(columns)
        return np.array(first_rows), blocks


def last_id(corpus: Corpus) -> int:
    """Return the largest ID that a corpus may have, the last of its tokenizer."""
    assert corpus.manifest is not None, "streamed rows have one"
    return corpus.manifest.tokenizer.vocab_size - 1
