"""StreamedRows yields each row of PackedDataset once, from checked shards.

This holds on any number of ranks.
"""

from __future__ import annotations

import fcntl
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from accelerate.data_loader import BatchSamplerShard, SkipBatchSampler
from support.damage.kinds import flip
from support.packed_rows import LENGTH, random_rows, shards_of, write_rows
from support.servers import remote
from support.small_corpus import conversations, make_recipe, pack_corpus
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler

from tasks import recipe
from tasks.core.errors import Busy, DataError, InputMissing, PackError, StorageError, UsageError
from tasks.corpus import shards
from tasks.stores.scratch import SCRATCH
from tasks.stores.store import open_store
from train.data import stream as module
from train.data.corpus import Corpus, open_corpus
from train.data.dataset import PackedDataset
from train.data.dealt_rows import DealtRows, empty_row
from train.data.shard_files import LOCK, ShardCache, copy_from
from train.data.stream import StreamedRows

Copy = Callable[[str, Path], None]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A corpus with five shards, and two packings of its training rows."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shards, "BATCH_TOKENS", 5 * LENGTH)
        patch.setattr(recipe, "SOURCE_BYTES_PER_SHARD", 6_000)
        settings = {"sequence_length": LENGTH, "validation": 0.2, "epochs": 2}
        return pack_corpus(make_recipe(tmp_path_factory.mktemp("made"), conversations(120), **settings))


@pytest.fixture(scope="module")
def corpus(made: Path) -> Corpus:
    found = open_corpus(made)
    assert len(found.splits["train"]) >= 4
    return found


@pytest.fixture
def copy(made: Path, tmp_path: Path) -> Path:
    """The manifest of a copy that tests may damage."""
    root = made.parent.parent
    shutil.copytree(root, tmp_path / "copy")
    return tmp_path / "copy" / made.relative_to(root)


@pytest.fixture(autouse=True)
def _no_thread_stays() -> Any:
    yield
    assert not [thread for thread in threading.enumerate() if thread.name == "shards"]


def names_of(rows: Any) -> list[bytes]:
    return [row["input_ids"].numpy().tobytes() for row in rows]


def batches_of(corpus: Corpus, ranks: int, steps: int, state: dict[str, Any] | None = None, **how: Any) -> list[Any]:
    """Return the rows of the next steps over all ranks, and the state after them.

    The state is that of the first rank.
    """
    found: list[list[bytes]] = [[] for _ in range(steps)]
    for rank in range(ranks):
        rows = StreamedRows(corpus, 8, rank=rank, ranks=ranks, **how)
        if state:
            rows.load_state_dict(state)
        reading = iter(rows)
        for step in found:
            step += names_of(row for _, row in zip(range(8 // ranks), reading, strict=False))
        if rank == 0:
            after = rows.state_dict()
        reading.close()  # type: ignore[attr-defined]
    return [found, after]


# -- rows and states -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cached", [False, True])
def test_each_epoch_has_the_rows_of_its_packing_once(corpus: Corpus, tmp_path: Path, cached: bool) -> None:
    cache = {"cache": tmp_path / "cache"} if cached else {}
    rows = StreamedRows(corpus, 8, splits=("train", "train_epoch_2"), **cache)  # type: ignore[arg-type]
    found = []
    for epoch in range(3):
        assert rows.state_dict() | {"epoch": epoch, "step": 0} == rows.state_dict()
        found.append(list(rows))
    whole = [PackedDataset(corpus, name) for name in ("train", "train_epoch_2")]
    for epoch, read in enumerate(found):
        assert len(read) == len(rows)
        assert sorted(names_of(read)) == sorted(names_of(whole[epoch % 2]))
    assert names_of(found[0]) != names_of(found[2])
    by_ids = {row["input_ids"].numpy().tobytes(): row for row in whole[0]}
    for row in found[0]:
        same = by_ids[row["input_ids"].numpy().tobytes()]
        assert {name: values.tolist() for name, values in row.items()} == {n: x.tolist() for n, x in same.items()}


def test_a_state_continues_on_another_number_of_ranks(corpus: Corpus) -> None:
    whole, _ = batches_of(corpus, 1, 6)
    before, state = batches_of(corpus, 8, 2)
    middle, later = batches_of(corpus, 2, 3, state)
    after, _ = batches_of(corpus, 4, 1, later)
    assert state["step"] == 2
    assert [*before, *middle, *after] == whole


def test_a_step_of_which_a_part_was_read_is_repeated(corpus: Corpus) -> None:
    rows = StreamedRows(corpus, 8)
    reading = iter(rows)
    first = names_of(row for _, row in zip(range(11), reading, strict=False))
    reading.close()  # type: ignore[attr-defined]
    assert rows.state_dict()["step"] == 1
    assert names_of(row for _, row in zip(range(3), rows, strict=False)) == first[8:]
    list(rows)


@pytest.mark.parametrize(
    ("ranks", "micro_batch", "skipped"), [(1, 1, 0), (1, 3, 0), (2, 1, 3), (2, 4, 0), (4, 2, 1), (8, 1, 2)]
)
def test_the_loader_of_the_trainer_deals_each_rank_its_own_rows(
    corpus: Corpus, ranks: int, micro_batch: int, skipped: int
) -> None:
    """accelerate deals batches in turn, and skips batches when a run is resumed."""
    rows_per_step = 24
    streamed = [StreamedRows(corpus, rows_per_step, rank=rank, ranks=ranks) for rank in range(ranks)]
    batches = []
    for rank, rows in enumerate(streamed):
        dealt = DealtRows(rows, micro_batch, empty_row(corpus))
        dealt.start_pass(1)
        sampler = BatchSampler(SequentialSampler(dealt), micro_batch, drop_last=False)
        mine = SkipBatchSampler(BatchSamplerShard(sampler, ranks, rank), skipped)
        batches.append(list(DataLoader(dealt, batch_sampler=mine, collate_fn=list)))
        second = list(mine)[1]
        assert names_of(dealt.__getitems__(second)) == names_of(batches[-1][1]), "it may go back, too"
        assert names_of(dealt.__getitems__(second)) == names_of(batches[-1][1])
        dealt.close()
    assert len({len(of_rank) for of_rank in batches}) == 1
    assert {len(batch) for of_rank in batches for batch in of_rank} == {micro_batch}
    for rank, rows in enumerate(streamed):
        rows.load_state_dict(rows.state_dict() | {"epoch": 1})
        found = [row for batch in batches[rank] for row in batch]
        own, fillers = names_of(rows)[skipped * micro_batch :], found[len(rows) - skipped * micro_batch :]
        assert names_of(found)[: len(own)] == own
        assert all((row["labels"] == -100).all() for row in fillers)


# -- what cannot be streamed -----------------------------------------------------------------------------------------


def test_what_cannot_be_streamed_is_rejected(corpus: Corpus, tmp_path: Path) -> None:
    write_rows(tmp_path / "bare" / "train-00000-of-00001.arrow", random_rows(4))
    with pytest.raises(UsageError, match="has no packcorpus manifest"):
        StreamedRows(tmp_path / "bare", 4)
    with pytest.raises(UsageError, match="contains conversations"):
        StreamedRows(replace(corpus, format_version="2.0"), 4)
    with pytest.raises(UsageError, match="3 ranks cannot divide steps of 8 rows"):
        StreamedRows(corpus, 8, rank=0, ranks=3)
    with pytest.raises(UsageError, match="128 ranks cannot divide steps of 128 rows, which are streamed to 64 ranks"):
        StreamedRows(corpus, 128, rank=0, ranks=128)
    with pytest.raises(RuntimeError, match=r"UsageError: .* set num_workers=0"):
        list(DataLoader(StreamedRows(corpus, 8), num_workers=1, multiprocessing_context="fork"))
    for other in (StreamedRows(corpus, 16), StreamedRows(corpus, 8, seed=1)):
        with pytest.raises(DataError, match="the state belongs to different rows"):
            StreamedRows(corpus, 8).load_state_dict(other.state_dict())


# -- damage ------------------------------------------------------------------------------------------------------------


def rejected(rows: StreamedRows, kind: type[PackError] = DataError) -> str:
    with pytest.raises(kind) as caught:
        list(rows)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("damage", ["flipped", "truncated", "missing"])
def test_a_damaged_shard_is_named_before_its_first_row(copy: Path, tmp_path: Path, damage: str, cached: bool) -> None:
    rows = StreamedRows(copy, 1, cache=tmp_path / "cache" if cached else None)
    shard = shards_of(copy)[1]
    own = names_of(PackedDataset(copy))
    other = own[: rows.corpus.splits["train"][0].rows]
    own = own[len(other) : len(other) + rows.corpus.splits["train"][1].rows]
    if damage == "flipped":
        flip(shard)
    elif damage == "truncated":
        shard.write_bytes(shard.read_bytes()[:-100])
    else:
        shard.unlink()
    seen: list[bytes] = []
    with pytest.raises((DataError, InputMissing)) as caught:
        seen.extend(names_of([row])[0] for row in rows)
    assert str(caught.value).startswith(f"{shard}: ")
    assert "packcorpus repair" in str(caught.value)
    assert not set(seen) & set(own)


def test_rows_with_ids_beyond_the_tokenizer_are_rejected(corpus: Corpus) -> None:
    assert corpus.manifest
    tokenizer = corpus.manifest.tokenizer.model_copy(update={"vocab_size": 4})
    small = replace(corpus, manifest=corpus.manifest.model_copy(update={"tokenizer": tokenizer}))
    assert "the last ID of the manifest's tokenizer is 3" in rejected(StreamedRows(small, 8))


# -- the cache ---------------------------------------------------------------------------------------------------------


def with_copy(rows: StreamedRows, folder: Path, copy: Copy, limit: int = 10**9) -> StreamedRows:
    rows._files = ShardCache(copy, folder, limit)
    return rows


def test_a_damaged_copy_is_fetched_once_again(corpus: Corpus, tmp_path: Path) -> None:
    plain, copied = copy_from(corpus.folder), []

    def damaging(times: int) -> Copy:
        def copy(name: str, to: Path) -> None:
            plain(name, to)
            copied.append(name)
            if copied.count(name) <= times:
                flip(to)

        return copy

    rows = with_copy(StreamedRows(corpus, 8), tmp_path / "once", damaging(1))
    assert len(list(rows)) == corpus.rows("train")
    assert copied.count(copied[0]) == 2
    copied.clear()
    message = rejected(with_copy(StreamedRows(corpus, 8), tmp_path / "twice", damaging(2)), StorageError)
    assert f"{tmp_path / 'twice'}/train-" in message
    assert "the original is intact" in message
    assert "packcorpus repair" not in message


def test_the_cache_is_bounded_read_ahead_and_empty_at_the_end(
    corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("train.data.streamed_order.MIXED", 2)
    sizes = sorted((shard.bytes for shard in corpus.splits["train"]), reverse=True)
    least = sum(sizes[:2])  # two streams, each in a window of one shard
    with pytest.raises(
        UsageError, match=f"is too small: 1 rank .* may use 2 shards each at a time; set it to {least:,}"
    ):
        StreamedRows(corpus, 2, cache=tmp_path / "cache", cache_bytes=least - 1)
    (tmp_path / "cache" / f"{corpus.key[:12]}-0").mkdir(parents=True)
    left = tmp_path / "cache" / f"{corpus.key[:12]}-0" / "train-00000-of-00009.arrow"
    left.write_bytes(b"of a killed run")
    for limit in (least, sum(sizes)):
        rows = StreamedRows(corpus, 2, cache=tmp_path / "cache", cache_bytes=limit)
        assert not left.exists()
        most = 0
        for number, _ in enumerate(rows):
            if number == 0 and limit > least:  # the next shards arrive while the first are used
                until = time.monotonic() + 120
                while len(files := shards_in(tmp_path / "cache")) < 4 and time.monotonic() < until:
                    time.sleep(0.01)
                assert len(files) == 4
            most = max(most, sum(shards_in(tmp_path / "cache")))
        assert max(sizes) <= most <= limit
        assert not shards_in(tmp_path / "cache")


def shards_in(folder: Path) -> list[int]:
    """Return the sizes of the files in a cache; threads may rename them meanwhile."""
    found = []
    for path in folder.rglob("*.arrow*"):
        try:
            found.append(path.stat().st_size)
        except FileNotFoundError:
            continue
    return found


def test_every_shard_is_fetched_once_in_an_epoch_by_the_ranks_that_read_it(corpus: Corpus, tmp_path: Path) -> None:
    plain, copied = copy_from(corpus.folder), []

    def copy(name: str, to: Path) -> None:
        copied.append(name)
        plain(name, to)

    for rank in range(2):
        assert list(with_copy(StreamedRows(corpus, 2, rank=rank, ranks=2), tmp_path / str(rank), copy))
    names = [shard.path for shard in corpus.splits["train"]]
    assert set(copied) == set(names)
    assert len(copied) <= len(names) + 1


def test_a_cache_that_cannot_be_written_is_reported(corpus: Corpus, tmp_path: Path) -> None:
    def full(name: str, to: Path) -> None:
        to.write_bytes(b"a part")
        raise OSError(28, "No space left on device")

    rows = with_copy(StreamedRows(corpus, 8), tmp_path / "cache", full)
    message = rejected(rows, StorageError)
    assert "No space left on device; free space there, or set another `cache`" in message
    assert not shards_in(tmp_path / "cache")


def test_a_cache_that_another_run_uses_is_refused(corpus: Corpus, tmp_path: Path) -> None:
    folder = tmp_path / f"{corpus.key[:12]}-0"
    folder.mkdir()
    with (folder / LOCK).open("wb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(Busy, match="another run is using this cache"):
            StreamedRows(corpus, 2, cache=tmp_path)


def test_processes_of_a_machine_share_the_cache(
    corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    size = sum(shard.bytes for shard in corpus.splits["train"])
    with pytest.raises(UsageError, match="2 ranks of this machine"):
        StreamedRows(corpus, 2, rank=0, ranks=2, cache=tmp_path, cache_bytes=2 * size - 2)
    rows = StreamedRows(corpus, 2, rank=0, ranks=2, cache=tmp_path, cache_bytes=2 * size)
    assert rows._files.limit == size
    monkeypatch.setattr(module, "THREADS", 1)
    assert list(rows)


# -- from a bucket -----------------------------------------------------------------------------------------------------


def test_rows_are_streamed_from_a_bucket(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    remote.needs_remote()
    remote.use(monkeypatch, remote.s3())
    monkeypatch.setenv(SCRATCH, str(tmp_path))
    root, store = made.parent.parent, open_store(url := f"s3://{remote.new_bucket()}/root")
    for key, _ in open_store(root).list():
        if key.startswith(("data/corpora/", "manifests/")):
            store.put(key, root / key)
    corpus = open_corpus(f"{url}/manifests/{made.name}")
    assert len(list(corpus.folder.glob("train-*"))) == 1, "the first shard alone is fetched before it is needed"
    local, rows = StreamedRows(open_corpus(made), 8), StreamedRows(corpus, 8)
    assert names_of(rows) == names_of(local)
    assert not list((tmp_path / "shards").rglob("*.arrow")), "no shard is kept"
    assert len(list(corpus.folder.glob("train-*"))) == 1
    assert sorted(names_of(PackedDataset(corpus, "train"))) == sorted(names_of(local))
    name = corpus.splits["train"][1].path
    (corpus.folder / name).unlink()
    content = bytearray(store.get(f"{corpus.manifest.corpus}/{name}"))  # type: ignore[union-attr]
    content[-100] ^= 1
    store.put(f"{corpus.manifest.corpus}/{name}", bytes(content))  # type: ignore[union-attr]
    with pytest.raises(PackError, match=f"{name}: "):
        list(StreamedRows(corpus, 8))
