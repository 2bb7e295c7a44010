"""`neighbors` decides which conversations share a row.

The rows stay as they are. Conversations of equal length trade places.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.packed_rows import folder_of, pack_small
from support.profiles import examples
from support.small_corpus import conversations, make_recipe, once, token_file

from packcorpus.tasks.config import Config
from packcorpus.tasks.core.errors import UsageError
from packcorpus.tasks.packing.neighbors import (
    AXES,
    assign_by_topic,
    bring_together,
    directions_of,
    labels_of,
    meetings,
    order_by_topic,
    part_duplicates,
    swap_similar,
)
from packcorpus.tasks.packing.placement import pack_split
from packcorpus.tasks.sources.model import Source
from packcorpus.tasks.storage.manifest import load_manifest
from packcorpus.tasks.storage.shards import open_index
from packcorpus.tasks.storage.token_files import TokenColumns
from packcorpus.tasks.verification.verify import verify


def packed(lengths: np.ndarray, length: int = 64) -> tuple[np.ndarray, np.ndarray]:
    found = pack_split(lengths, Config(sources=[Source(path="x")], sequence_length=length), "train", 1, {"train": 1})
    return found.row, found.start


def similarity(row: np.ndarray, topics: np.ndarray) -> int:
    sums = np.stack([np.bincount(row, column) for column in topics.T])
    return int((sums**2).sum())


@settings(max_examples=examples(100), deadline=None)
@given(st.lists(st.integers(2, 40), max_size=60), st.integers(0, 9), st.sampled_from(["similar", "distinct", "source"]))
def test_pieces_take_the_places_of_others_of_their_kind(lengths: list[int], seed: int, neighbors: str) -> None:
    kind, random = np.array(lengths, np.int32), np.random.default_rng(seed)
    row, start = packed(kind)
    before = row.copy(), start.copy()
    if neighbors == "similar":
        topics = random.integers(-127, 128, (len(kind), AXES)).astype(np.int8)
        assign_by_topic(row, start, kind, order_by_topic(topics))
        dealt = similarity(row, topics) if len(row) else 0
        swap_similar(row, start, kind, topics)
        assert not len(row) or similarity(row, topics) >= dealt
    elif neighbors == "source":
        bring_together(row, start, kind)
    else:
        labels = random.integers(0, 8, (len(kind), 2)).astype(np.uint64)
        met = len(meetings(row, labels))
        part_duplicates(row, start, kind, labels, seed)
        assert len(meetings(row, labels)) <= met
    assert Counter(zip(row, start, kind, strict=True)) == Counter(zip(*before, kind, strict=True))
    assert (row.dtype, start.dtype) == (np.int32, np.int32)


def test_conversations_about_the_same_share_rows() -> None:
    """Rows of four are on one topic: 400 conversations on each of four topics.

    All conversations have one length.
    """
    random = np.random.default_rng(0)
    centers = random.integers(-90, 91, (4, AXES))
    topic = np.arange(1600) % 4
    topics = (centers[topic] + random.integers(-30, 31, (1600, AXES))).astype(np.int8)
    kind = np.full(1600, 16, np.int32)
    row, start = packed(kind)
    assign_by_topic(row, start, kind, order_by_topic(topics))
    swap_similar(row, start, kind, topics)
    assert np.mean([len(set(topic[row == number])) == 1 for number in range(400)]) > 0.95


def test_rows_of_many_alike_pieces_stay_together() -> None:
    """A swap with a loss beyond 32 bits must not appear as a gain."""
    topics = np.repeat(np.array([[127], [-127]], np.int8), 1500, axis=0).repeat(AXES, axis=1)
    topics[:, 0] = np.repeat([-127, 127, -126, -126], 750)  # by this axis, some are nearer to the other row
    row, start = np.repeat(np.arange(2, dtype=np.int32), 1500), np.tile(np.arange(1500, dtype=np.int32), 2)
    before = row.copy()
    swap_similar(row, start, np.ones(3000, np.int32), topics)
    assert (row == before).all()


def test_near_duplicates_part_if_others_have_their_length() -> None:
    kind = np.repeat([16, 20, 28], 200).astype(np.int32)
    row, start = packed(kind)
    labels = np.stack([np.arange(600), row // 2], axis=1).astype(np.uint64)  # two rows share the second label
    assert len(meetings(row, labels)) > 200
    part_duplicates(row, start, kind, labels, 1)
    assert not len(meetings(row, labels))


@pytest.fixture
def texts(tmp_path: Path) -> TokenColumns:
    """Twelve conversations in two files, all with the same beginning.

    0 and 7 are nearly equal. Conversations with even numbers share words, and so do those with odd numbers.
    """
    random = np.random.default_rng(0)
    words = [random.integers(100 + 50 * (number % 2), 110 + 50 * (number % 2), 60) for number in range(12)]
    words[7] = np.where(np.arange(60) == 30, 99, words[0])
    rows = [([~5] * 20 + [60] * 40 + own.tolist(), False) for own in words]
    for number, own in enumerate((rows[:5], rows[5:])):
        token_file(tmp_path / f"{number}.arrow", own)
    return TokenColumns([tmp_path / "0.arrow", tmp_path / "1.arrow"], [0, 0])


def test_near_duplicates_have_a_label_in_common(texts: TokenColumns, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("packcorpus.tasks.packing.neighbors.FEW", 2)  # a beginning that three share is not a copy
    labels = labels_of(texts)
    alike = [(a, b) for a in range(12) for b in range(a) if (labels[a] == labels[b]).any()]
    assert alike == [(7, 0)]


def test_the_direction_is_that_of_the_words(texts: TokenColumns, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("packcorpus.tasks.packing.neighbors.COMMON", 10)
    found = directions_of(texts).astype(int)
    even, odd = found[[0, 2, 4, 6, 8, 10]], found[[1, 3, 5, 9, 11]]
    within = min((even @ even.T).min(), (odd @ odd.T).min())
    assert within > 2 * (even @ odd.T).max(), "not by what all begin with"
    assert np.abs(np.sqrt((found**2).sum(axis=1)) - 127).max() < 3


def read_index(path: Path) -> list[dict[str, Any]]:
    with open_index(load_manifest(path), folder_of(path)) as index:
        return index.read_all().to_pylist()


def place_facts(path: Path) -> Counter[tuple[Any, ...]]:
    """Count the rows by their split and the lengths of their conversations."""
    index = read_index(path)
    rows: dict[Any, list[int]] = {}
    for entry in index:
        rows.setdefault((entry["split"], entry["shard"], entry["row"]), []).append(entry["length"])
    return Counter((split, *sorted(lengths)) for (split, *_), lengths in rows.items())


@pytest.fixture(scope="module")
def usual_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Pack a corpus without `neighbors`, once for both values of it."""
    return once(lambda **given: pack_small(tmp_path_factory.mktemp("usual"), **given))


@pytest.mark.parametrize("neighbors", ["similar", "distinct"])
@pytest.mark.parametrize("given", [{}, {"epochs": 2}, {"validation": 0.3}, {"overlong": "split"}])
def test_a_corpus_is_as_full_and_verified(
    given: dict[str, Any], neighbors: str, usual_of: Callable[..., Path], tmp_path: Path
) -> None:
    usual = usual_of(**given)
    other = pack_small(tmp_path / "b", **given, neighbors=neighbors)
    again = pack_small(tmp_path / "c", **given, neighbors=neighbors, part_size=3000)
    one, two = load_manifest(usual), load_manifest(other)
    assert one.key != two.key
    assert "neighbors" not in one.config
    assert two.config["neighbors"] == neighbors
    assert (one.ledger, one.packing_metadata) == (two.ledger, two.packing_metadata)
    if "epochs" not in given:
        assert place_facts(usual) == place_facts(other)
    assert other.read_bytes() == again.read_bytes()
    verify(other)


def test_without_packing_no_row_is_shared(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="neighbors: similar requires packing: true"):
        make_recipe(tmp_path, conversations(3), neighbors="similar", packing=False)


def test_neighbors_in_a_source_do_not_share_rows() -> None:
    row, _ = packed(np.full(1000, 16, np.int32))
    assert np.mean(row[1:] == row[:-1]) < 0.02
