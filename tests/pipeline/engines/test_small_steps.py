"""Steps of large sources are small values.

The digests of blocks are in a record that each process reads for itself.
"""

from __future__ import annotations

import gzip
import os
import pickle
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from support.bucket_roots import on_other_machines, own_scratch
from support.commands import corpus_bytes
from support.servers.remote import needs_remote, new_bucket, s3, use
from support.small_corpus import conversations, make_recipe, pack_corpus, write_project
from support.steps import pack_on, steps_of

from pipeline.engines.here import Here
from tasks.config import load_config
from tasks.core.errors import DataError
from tasks.readers.container import Range
from tasks.readers.hashed_blocks import BLOCK, DIGEST, BlockDigests, KeptDigests
from tasks.recipe import Recipe, resolve
from tasks.sources.digests import digest_cache, sent_digests
from tasks.sources.digests.digest_cache import DigestCache, Hashed
from tasks.sources.parts import MOST_PARTS
from tasks.sources.source_files import find_files
from tasks.steps import HashFile, Outcome, Step, Tokenize, run
from tasks.storage.paths import Layout
from tasks.stores.scratch import root_of
from tasks.stores.store import Store, open_store

GB = 1 << 30


def large_source(folder: Path, name: str, size: int, part_size: int) -> None:
    """Write a file that starts with records and continues with a hole.

    Also write a record of its digests, as if the file had been hashed.
    """
    lines = 3 * (b'{"text": "%s"}\n' % (b"x" * BLOCK))  # more than the bytes that are read to find the format
    (folder / name).write_bytes(gzip.compress(lines) if name.endswith("gz") else lines)
    os.truncate(folder / name, size)
    config = load_config(folder / "corpus.yaml")
    [file] = find_files(config.sources, folder)
    ends = [size] if file.compression else [*range(part_size, size, part_size), size]
    ranges = [Range(start, end, f"{end:064x}") for start, end in zip([0, *ends], ends, strict=False)]
    blocks = BlockDigests(BLOCK, random.Random(1).randbytes(DIGEST * -(-size // BLOCK)))
    cache = DigestCache(Layout(folder).digests())
    assert cache.keep(file, part_size, cache.start(file), Hashed("0" * 64, ranges, blocks)).record


@pytest.mark.parametrize("name", ["chat.jsonl", "chat.jsonl.gz"])
def test_every_step_of_a_source_of_100_gb_is_small(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The digests of the source take 6.5 MB.

    A compressed file is one part, which has all digests.
    """
    monkeypatch.setattr(digest_cache, "RACY_NS", -(10**15))
    config = write_project(tmp_path, [], sources=[{"path": name}], engine="reference", plan_group=1_000_000)
    part_size = load_config(config).part_size
    while part_size * MOST_PARTS < 100 * GB:
        part_size *= 2
    large_source(tmp_path, name, 100 * GB, part_size)
    recipe = resolve(config, tmp_path)
    [file] = find_files(recipe.config.sources, tmp_path)
    steps = [HashFile(tmp_path, file, part_size), *steps_of(recipe)]
    assert len(recipe.parts) == (1 if name.endswith("gz") else 1600)
    assert {type(step).__name__ for step in steps} == {"HashFile", "Tokenize", "PlanGroup", "Pack"}
    assert max(len(pickle.dumps(step)) for step in steps) < 4096


class Elsewhere(Here):
    """Runs steps as they arrive in another process."""

    def map(self, steps: Sequence[Step]) -> Iterator[tuple[int, Outcome]]:
        yield from super().map(sent(steps))


def sent(steps: Sequence[Step]) -> list[Step]:
    arrived: list[Step] = pickle.loads(pickle.dumps(list(steps)))  # noqa: S301 - our own
    sent_digests._kept_blocks.cache_clear()
    kept = [isinstance(step.part.file.blocks, KeptDigests) for step in arrived if isinstance(step, Tokenize)]
    assert all(kept), "none has the digests themselves"
    return arrived


@pytest.fixture
def every_file_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sent_digests, "SENT", 0)


def small_recipe(folder: Path) -> Recipe:
    folder.mkdir(exist_ok=True)
    return make_recipe(folder, conversations(60), part_size=2048)


@pytest.mark.usefixtures("every_file_is_large")
def test_digests_in_a_record_give_the_same_corpus(tmp_path: Path) -> None:
    """The files were just written, so no other run trusts their digests."""
    expected = corpus_bytes(pack_corpus(small_recipe(tmp_path / "one")))
    assert corpus_bytes(pack_on(Elsewhere(), small_recipe(tmp_path / "other"))) == expected


@pytest.mark.usefixtures("every_file_is_large")
def test_digests_in_a_record_show_a_change(tmp_path: Path) -> None:
    recipe = small_recipe(tmp_path)
    path = recipe.files[0].path
    stat, content = path.stat(), path.read_bytes()
    path.write_bytes(content.replace(b"the", b"tha"))
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    with pytest.raises(DataError, match=r"jsonl: changed while it was read; run again"):
        run(sent(steps_of(recipe))[0])


@pytest.mark.usefixtures("every_file_is_large")
@pytest.mark.parametrize("how", ["removed", "damaged", "replaced"])
def test_a_record_that_is_lost_is_made_by_the_next_run(tmp_path: Path, how: str) -> None:
    recipe = small_recipe(tmp_path)
    step = sent(steps_of(recipe))[0]
    [record] = recipe.layout.digests().glob("*.json")
    if how == "replaced":  # by a run that has found another file in this place
        recipe.files[0].path.write_bytes(recipe.files[0].path.read_bytes().replace(b"the", b"tha"))
        resolve(tmp_path / "corpus.yaml", tmp_path)
    else:
        record.unlink() if how == "removed" else record.write_bytes(record.read_bytes()[:-9])
    with pytest.raises(
        DataError, match=r"jsonl: the file with its digests, .*, was removed or replaced; run again"
    ) as found:
        run(step)
    assert found.value.code == "E321"
    pack_on(Elsewhere(), resolve(tmp_path / "corpus.yaml", tmp_path))


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Store:
    needs_remote()
    use(monkeypatch, s3())
    own_scratch(monkeypatch, tmp_path / "scratch")
    return open_store(f"s3://{new_bucket()}/root")


@pytest.mark.usefixtures("every_file_is_large")
def test_other_machines_find_the_record_in_the_bucket(
    tmp_path: Path, bucket: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other machines find the record of a local file that all of them see.

    They find it even if somebody has deleted the record in the bucket meanwhile.
    """
    monkeypatch.setattr(digest_cache, "RACY_NS", -(10**15))
    expected = pack_corpus(small_recipe(tmp_path)).read_bytes()
    resolve(tmp_path / "corpus.yaml", root_of(bucket.url_of("")))
    for key, _ in bucket.list("data/digests"):
        bucket.delete(key)
    recipe = resolve(tmp_path / "corpus.yaml", root_of(bucket.url_of("")))
    on_other_machines(recipe, lambda: None)
    assert recipe.published.read_bytes() == expected


@pytest.mark.usefixtures("every_file_is_large")
def test_a_record_that_is_damaged_on_one_machine_is_fetched_again(
    tmp_path: Path, bucket: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_recipe(tmp_path)
    [part, *_] = resolve(tmp_path / "corpus.yaml", root_of(bucket.url_of(""))).parts
    own_scratch(monkeypatch, tmp_path / "another")
    folder, small = Layout(root_of(bucket.url_of(""))).digests(), sent_digests.without_digests(part)
    folder.mkdir(parents=True)
    (folder / part.file.record).write_bytes(bytes(len(bucket.get(f"data/digests/{part.file.record}"))))
    with pytest.raises(DataError, match="run again"):
        sent_digests.with_digests(small, folder)
    assert sent_digests.with_digests(small, folder).file.blocks == part.file.blocks
