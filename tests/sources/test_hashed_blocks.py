"""A file with hashed blocks is read with the hashed bytes, or not at all."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.profiles import examples

from packcorpus.tasks.core.errors import DataError
from packcorpus.tasks.sources.blocks import BlockDigests, HashedBlocks, open_checked

MANY = settings(max_examples=examples(200), deadline=None)
CHUNK = 4  # in blocks


def hashed(data: bytes, size: int) -> BlockDigests:
    blocks = HashedBlocks(size)
    chunks = [data[start : start + CHUNK * size] for start in range(0, len(data), CHUNK * size)]
    assert b"".join(blocks.passing(chunks)) == data
    return blocks.digests


@MANY
@given(
    st.binary(min_size=1, max_size=200),
    st.integers(1, 50),
    st.lists(st.tuples(st.integers(0, 220), st.integers(0, 2), st.integers(-1, 100)), max_size=6),
)
def test_a_file_reads_as_other_files_do(data: bytes, size: int, places: list[tuple[int, int, int]]) -> None:
    with tempfile.NamedTemporaryFile() as file:
        Path(file.name).write_bytes(data)
        with (
            Path(file.name).open("rb") as plain,
            open_checked(Path(file.name), "a", len(data), hashed(data, size)) as own,
        ):
            for place, origin, count in places:
                offset = -min(place, len(data)) if origin == 2 else place
                assert own.seek(offset, origin) == plain.seek(offset, origin)
                assert own.read(count) == plain.read(count)
                assert own.tell() == plain.tell()


@MANY
@given(st.binary(min_size=1, max_size=200), st.integers(1, 50), st.data())
def test_what_was_not_hashed_is_not_read(data: bytes, size: int, draw: st.DataObject) -> None:
    at = draw.draw(st.integers(0, len(data) - 1))
    changed = draw.draw(
        st.sampled_from(
            [data[:at], data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :], data[:at] + data[at + 1 :] + b"."]
        )
    )
    with tempfile.NamedTemporaryFile() as file:
        Path(file.name).write_bytes(changed)
        with open_checked(Path(file.name), "a.jsonl", len(data), hashed(data, size)) as own:
            read: list[bytes] = []
            if changed == data:
                assert own.read() == data
                return
            with pytest.raises(DataError, match=r"^a\.jsonl: changed while it was read; run again$"):
                read.extend(iter(lambda: own.read(7), b""))
            assert data.startswith(b"".join(read))


def test_a_file_that_grew_reads_as_it_was(tmp_path: Path) -> None:
    path, data = tmp_path / "a", b"abcdef" * 10
    path.write_bytes(data + b"more")
    with open_checked(path, "a", len(data), hashed(data, 16)) as file:
        assert file.read() == data
        file.seek(-3, 2)
        assert file.read(10) == b"def"
    with pytest.raises(ValueError, match="closed"):
        file.tell()
