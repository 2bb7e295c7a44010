"""Objects that are read in blocks have the same bytes as the whole object.

The contents of the local file do not matter, and few bytes are fetched twice.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from packcorpus.tasks.core.errors import PackError
from packcorpus.tasks.sources import blocks
from packcorpus.tasks.sources.blocks import AHEAD, HashedBlocks, fetch_all, open_blocks, open_holes
from packcorpus.tasks.sources.parts import Share
from packcorpus.tasks.stores.store import Facts

BLOCK = 16


class Object:
    """Record the requests for an object."""

    def __init__(self, content: bytes, monkeypatch: pytest.MonkeyPatch):
        self.content, self.asked = content, list[tuple[int, int]]()
        self.facts = Facts(len(content), "etag")
        self.digests = HashedBlocks(BLOCK)
        for _ in self.digests.passing([content]):
            pass
        monkeypatch.setattr(blocks, "BLOCK", BLOCK)
        monkeypatch.setattr(blocks, "read_object", self.read)
        blocks._read_before.clear()

    def read(self, url: str, facts: Facts, start: int, length: int) -> bytes:
        assert 0 < length <= AHEAD * BLOCK
        assert facts == self.facts
        self.asked.append((start, start + length))
        return self.content[start : start + length]

    @property
    def bytes_read(self) -> int:
        return sum(stop - start for start, stop in self.asked)


READS = st.lists(st.tuples(st.integers(0, 700), st.integers(0, 300)), min_size=1, max_size=6)


@given(
    content=st.binary(min_size=1, max_size=700),
    damage=st.lists(st.tuples(st.integers(0, 699), st.integers(1, 255)), max_size=5),
    filled=st.booleans(),
    hashed=st.booleans(),
    reads=READS,
)
def test_what_is_read_is_the_object(
    tmp_path_factory: pytest.TempPathFactory,
    content: bytes,
    damage: list[tuple[int, int]],
    filled: bool,
    hashed: bool,
    reads: list[tuple[int, int]],
) -> None:
    """Reading returns the bytes of the object.

    If the local file has holes or damaged bytes, they are fetched again.
    """
    path = tmp_path_factory.mktemp("blocks") / "object"
    with pytest.MonkeyPatch.context() as patch:
        found = Object(content, patch)
        local = bytearray(content if filled else bytes(len(content)))
        for place, flip in damage:
            local[place % len(local)] ^= flip
        path.write_bytes(local)
        with open_blocks(path, "s3://b/k", found.facts, found.digests.digests if hashed else None, None) as file:
            for start, length in reads:
                file.seek(start)
                assert file.read(length) == content[start : start + length]
        if hashed and filled and not damage:
            assert not found.asked, "what is there is not fetched"
        with open_blocks(path, "s3://b/k", found.facts, found.digests.digests, None) as file:
            assert file.read() == content
        assert path.read_bytes() == content, "and is kept"


@given(start=st.integers(0, 900), length=st.integers(1, 400))
def test_a_range_costs_its_blocks_and_no_others(
    tmp_path_factory: pytest.TempPathFactory, start: int, length: int
) -> None:
    path, stop = tmp_path_factory.mktemp("blocks") / "object", min(1000, start + length)
    with pytest.MonkeyPatch.context() as patch:
        found = Object(bytes(range(250)) * 4, patch)
        for _ in range(2):
            with open_blocks(path, "s3://b/k", found.facts, found.digests.digests, stop) as file:
                file.seek(start)
                assert file.read(stop - start) == found.content[start:stop]
        first, last = start // BLOCK, -(-stop // BLOCK)
        assert found.bytes_read == min(1000, last * BLOCK) - first * BLOCK


def test_a_file_that_is_read_to_its_end_takes_few_requests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = Object(bytes(100 * BLOCK), monkeypatch)
    with open_blocks(tmp_path / "zeros", "s3://b/k", found.facts, found.digests.digests, None) as file:
        assert file.read() == found.content
    assert not found.asked, "a hole is what it reads as"
    found = Object(bytes(range(1, 101)) * BLOCK, monkeypatch)
    with open_blocks(tmp_path / "object", "s3://b/k", found.facts, found.digests.digests, None) as file:
        assert file.read() == found.content
    assert found.asked[0] == (0, BLOCK), "the start may be all that is wanted"
    assert len(found.asked) < 5 + 100 // AHEAD
    assert found.bytes_read == len(found.content)


def test_another_object_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An object that does not match its digests is refused.

    The server may ignore If-Match, or the digests may belong to another object.
    """
    found = Object(b"a" * 40, monkeypatch)
    found.content = b"b" * 40
    with (
        open_blocks(tmp_path / "object", "s3://b/k", found.facts, found.digests.digests, None) as file,
        pytest.raises(PackError, match="s3://b/k: changed") as caught,
    ):
        file.read()
    assert caught.value.code == "E692"
    assert (tmp_path / "object").read_bytes() == bytes(40), "nothing of it is kept"


def test_a_whole_object_is_kept_while_it_is_hashed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = Object(bytes(range(256)) * 3, monkeypatch)
    assert b"".join(fetch_all(tmp_path / "object", "s3://b/k", found.facts, lambda: None)) == found.content
    assert (tmp_path / "object").read_bytes() == found.content


@given(damage=st.lists(st.integers(0, 767), max_size=3), start=st.integers(1, 5))
def test_what_was_read_before_is_not_fetched_again_to_be_hashed(
    tmp_path_factory: pytest.TempPathFactory, damage: list[int], start: int
) -> None:
    """Blocks that were read before are not fetched again for hashing.

    Reading the start of an object detects its format. Bytes that were damaged on disk since then are fetched again.
    """
    path = tmp_path_factory.mktemp("blocks") / "object"
    with pytest.MonkeyPatch.context() as patch:
        found = Object(bytes(range(256)) * 3, patch)
        for _ in range(2):
            with open_blocks(path, "s3://b/k", found.facts, None, None) as file:
                assert file.read(start * BLOCK) == found.content[: start * BLOCK]
        before = found.bytes_read
        assert before >= start * BLOCK
        local = bytearray(path.read_bytes())
        for place in damage:
            local[place] ^= 1
        path.write_bytes(local)
        assert b"".join(fetch_all(path, "s3://b/k", found.facts, lambda: None)) == found.content
        assert path.read_bytes() == found.content
        if not damage:
            assert found.bytes_read == len(found.content)


def test_holes_take_no_room(tmp_path: Path) -> None:
    open_holes(tmp_path / "folder" / "object", 1 << 30).close()
    stat = (tmp_path / "folder" / "object").stat()
    assert (stat.st_size, stat.st_blocks) == (1 << 30, 0)


@given(costs=st.lists(st.integers(0, 50), max_size=30), shares=st.integers(1, 8))
@example(costs=[1, 0], shares=1)
@example(costs=[0, 0], shares=3)
def test_every_piece_is_in_one_share_and_shares_are_alike(costs: list[int], shares: int) -> None:
    found = [Share(number, shares).of(costs) for number in range(1, shares + 1)]
    assert [index for share in found for index in share] == list(range(len(costs))), "neighbors, in their order"
    for share in found:
        # A share exceeds its part of the sum by at most one piece.
        assert sum(costs[index] for index in share) <= sum(costs) / shares + max(costs, default=0)
