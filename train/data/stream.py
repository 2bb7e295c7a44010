"""Stream packed rows of corpora larger than the memory or the disk of a machine.

    manifest ─order(epoch)─▶ streams ─share of this rank─▶ ShardReader ─▶ rows, one after the other
                                                                          state: {key, epoch, step}

`train.data.streamed_order` defines the order. If a state is loaded on a different number of ranks, the ranks continue
with the same batches over all ranks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from tasks.core.errors import DataError, UsageError
from tasks.core.printable import counted, lengths_in_words
from tasks.stores.mirror import remote_with
from tasks.stores.scratch import home
from train.config import STREAM_VERSION
from train.data.corpus import Corpus, open_corpus
from train.data.dataset import column_names, copy_rows
from train.data.shard_files import Local, ShardCache, ShardFiles, copy_from
from train.data.shard_reader import Place, ShardReader
from train.data.streamed_order import bounds, order, shards_of_window, share, stream_count
from train.machine.devices import cpus, processes_here

CACHE_BYTES = 20 * 10**9
CACHE = "shards"  # the default cache of a corpus in a bucket, next to the scratch folders
THREADS = 4  # to fetch and check shards; more threads would take CPU time from the training

Row = dict[str, torch.Tensor]


class StreamedRows(torch.utils.data.IterableDataset):
    """Packed rows (format 3.0) in random order; a rank yields its share of them.

        rows = StreamedRows("manifests/sample-0123456789ab.json", rows_per_step=64)
        for row in rows: …          from the current state to the end of the epoch
        rows.state_dict()           {"key": …, "epoch": …, "step": …}

    Rows have the same form as in PackedDataset. Over all ranks, step k has the same rows for every number of ranks up
    to 64 that divides `rows_per_step`. The last step of an epoch has the remaining rows, and no row occurs twice.
    Shards are mapped in place or copied to `cache`, a folder for at most `cache_bytes` bytes from all processes of this
    machine (LOCAL_WORLD_SIZE). Shards in a bucket are always copied.

    splits   the packings of the corpus, all with the same number of rows; each epoch reads the next

    Raises UsageError, DataError, InputMissing, or StorageError. Do not change the files while they are in use.
    """

    def __init__(
        self,
        given: Corpus | Path | str,
        rows_per_step: int,
        *,
        rank: int | None = None,
        ranks: int | None = None,
        seed: int = 42,
        splits: Sequence[str] = ("train",),
        cache: Path | str | None = None,
        cache_bytes: int = CACHE_BYTES,
    ):
        corpus = given if isinstance(given, Corpus) else open_corpus(given)
        check_streamable(corpus)
        if rank is None or ranks is None:
            rank, ranks = _place()
        self.corpus, self.rank, self.ranks = corpus, rank, ranks
        self.names = column_names(corpus)
        self.rows_per_step, self._seed, self._splits = rows_per_step, seed, tuple(splits)
        self._streams = stream_count(rows_per_step)
        if rows_per_step % ranks or self._streams % ranks:
            raise UsageError(
                "cannot_divide",
                f"{counted(ranks, 'rank')} cannot divide steps of {counted(rows_per_step, 'row')}, which are streamed "
                f"to {self._streams} ranks or to a divisor of {self._streams}; use one of these numbers of ranks, or "
                "set tokens_per_step",
            )
        self.rows = corpus.rows(self._splits[0])
        facts = (STREAM_VERSION, corpus.key, self._splits, seed, rows_per_step)
        self._key = hashlib.sha256(repr(facts).encode()).hexdigest()
        self._epoch = self._step = 0
        cuts = bounds(self.rows, ranks)
        self._rows_of_rank = cuts[rank + 1] - cuts[rank]
        if cache is None and remote_with(corpus.folder):
            cache = home() / CACHE
        self._files = self._open_files(Path(cache), cache_bytes) if cache else Local(corpus.folder)

    def _open_files(self, cache: Path, cache_bytes: int) -> ShardFiles:
        """Open the cache of this rank.

        Raises UsageError if the shards of one step may not fit into the cache.
        """
        processes = processes_here()
        at_a_time = self._streams // self.ranks * shards_of_window(self._streams)
        sizes = [sorted((shard.bytes for shard in self.corpus.splits[name]), reverse=True) for name in self._splits]
        needed = max(sum(largest[:at_a_time]) for largest in sizes)
        if needed * processes > cache_bytes:
            raise UsageError(
                "cache_too_small",
                f"cache_bytes: {cache_bytes:,} is too small: {counted(processes, 'rank')} of this machine may use "
                f"{counted(min(at_a_time, len(sizes[0])), 'shard')} each at a time; set it to {needed * processes:,}, "
                "or to twice that, so that the next shards are copied in the meantime",
            )
        folder = cache / f"{self.corpus.key[:12]}-{self.rank}"
        return ShardCache(copy_from(self.corpus.folder), folder, cache_bytes // processes)

    def __len__(self) -> int:
        """Return the number of rows of this rank in an epoch."""
        return self._rows_of_rank

    def __iter__(self) -> Iterator[Row]:
        """Yield the rows of this rank from the current state to the end of the epoch.

        The state then moves to the start of the next epoch.
        """
        if torch.utils.data.get_worker_info() is not None:
            raise UsageError(
                "cannot_divide",
                "streamed rows are read by one process of each rank: set num_workers=0; threads read ahead",
            )
        of_step = self.rows_per_step // self.ranks
        for number, place in enumerate(self.places(self._epoch, self._step), self._step * of_step + 1):
            [row] = self.copy([place])
            self._step = number // of_step
            yield row
        self._epoch, self._step = self._epoch + 1, 0

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the next row.

        A step that this rank has yielded only in part will be repeated.
        """
        return {"key": self._key, "epoch": self._epoch, "step": self._step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at a state, which may be from a different number of ranks.

        Raises DataError if the state is from a different order.
        """
        if state["key"] != self._key:
            raise DataError(
                "foreign_state",
                f"the state belongs to different rows ({state['key'][:12]}, not {self._key[:12]}): corpus, splits, "
                "seed, and rows_per_step must be the same",
            )
        self._epoch, self._step = state["epoch"], state["step"]

    def places(self, epoch: int, step: int) -> Generator[Place]:
        """Yield the place of each row of this rank, from a step to the end of its epoch."""
        split = self._splits[epoch % len(self._splits)]
        shards = self.corpus.splits[split]
        streams = order(epoch, [shard.rows for shard in shards], self._seed, self._streams)
        processes = processes_here()
        threads = max(1, min(THREADS, cpus() // processes))
        reader = ShardReader(self.corpus, shards, self._files, self.names, threads)
        return reader.places(share(streams, self.rank, self.ranks), self.rows_per_step // self._streams, step)

    def copy(self, places: Sequence[Place]) -> list[Row]:
        return copy_rows(places, self.names, self.corpus.sequence_length)


def check_streamable(corpus: Corpus) -> None:
    """Raise UsageError if a corpus cannot be streamed.

    Streaming needs packed rows of one length in random order, and a digest of each shard.
    """
    if not corpus.packed:
        fault = (
            f"contains conversations (format {corpus.format_version}), not packed rows; pack them with packing: true"
        )
    elif corpus.manifest is not None and (balance := corpus.manifest.config.get("balance")):
        fault = (
            f"has its rows in the order of balance: {{ranks: {balance.get('ranks')}}}, but streaming uses its own "
            "random order; pack it without balance"
        )
    elif len(corpus.lengths) > 1:
        fault = (
            f"has rows of several lengths ({lengths_in_words(corpus.lengths)}), which load: stream cannot read; "
            "pack it with one length"
        )
    elif corpus.manifest is None:
        fault = "has no packcorpus manifest, so no shard could be checked when it is read"
    else:
        return
    raise UsageError("cannot_stream", f"{corpus.folder}: {fault}, or set load: auto")


def _place() -> tuple[int, int]:
    """Return this rank and the number of ranks."""
    if torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    return 0, 1
