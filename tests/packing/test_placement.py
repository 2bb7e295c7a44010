"""Placement puts each piece in one row of one shard, in a fixed order.

Each epoch has different rows.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from support.profiles import examples

from packcorpus.tasks.config import Config
from packcorpus.tasks.packing.held_out import hold_out_at_least_one
from packcorpus.tasks.packing.neighbors import EarlierRows
from packcorpus.tasks.packing.placement import Placed, pack_split, place
from packcorpus.tasks.sources.model import Source
from packcorpus.tasks.storage.layout import SPLITS

Stands = list[tuple[int, int, int]]  # shard, row within it, start


def config(**values: Any) -> Config:
    return Config(sources=[Source(path="x")], **values)


def placed_of(lengths: list[int], held_out: list[bool], settings: Config, shards: dict[str, int]) -> Placed:
    return place(np.array(lengths, np.int32), np.array(held_out, bool), settings, shards)


def stands_of(placed: Placed) -> Stands:
    shard = placed.shard(slice(None))
    row = placed.row - placed.edges[shard]
    return list(zip(shard.tolist(), row.tolist(), placed.start.tolist(), strict=True))


def check(placed: Placed, lengths: list[int], held_out: list[bool], settings: Config, shards: dict[str, int]) -> None:
    """Check every invariant of a plan, one row at a time."""
    assert placed.row.dtype == placed.start.dtype == np.int32
    rows: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for (shard, row, start), length, validation in zip(stands_of(placed), lengths, held_out, strict=True):
        assert (shard >= shards["train"]) == validation, "in a shard of the other split"
        rows.setdefault((shard, row), []).append((start, length))
    for places in rows.values():
        end = 0
        for start, length in sorted(places):
            assert start == end, "a gap or an overlap"
            end += -(-length // settings.align) * settings.align
        assert end <= settings.sequence_length or not settings.packing
        assert len(places) == 1 or settings.packing
    counts = np.diff(placed.edges).tolist()
    assert len(counts) == sum(shards.values())
    assert sorted(rows) == [(shard, row) for shard, count in enumerate(counts) for row in range(count)]
    assert placed.rows == sum(counts) == len(rows)
    first = 0
    for split, (bound, _) in zip(SPLITS, placed.lower_bounds, strict=True):
        own = counts[first : first + shards[split]]
        first += shards[split]
        assert sum(own) == placed.rows_of_splits[split] >= bound
        assert max(own, default=0) - min(own, default=0) <= 1, "rows must be dealt evenly"


@settings(max_examples=examples(300), deadline=None)
@given(data=st.data())
def test_a_plan_is_valid(data: st.DataObject) -> None:
    packing = data.draw(st.booleans())
    align = data.draw(st.sampled_from([1, 1, 2, 3, 8])) if packing else 1
    length = data.draw(st.integers(-(-8 // align), 40 // align)) * align
    validation = data.draw(st.booleans())
    lengths = data.draw(st.lists(st.integers(2, length), min_size=1, max_size=60))
    held_out = [validation and data.draw(st.booleans()) for _ in lengths]
    shards = {"train": data.draw(st.integers(1, 7)), "validation": data.draw(st.integers(1, 3)) if validation else 0}
    settings = config(sequence_length=length, align=align, packing=packing, seed=3)
    placed = placed_of(lengths, held_out, settings, shards)
    check(placed, lengths, held_out, settings, shards)
    assert stands_of(placed) == stands_of(placed_of(lengths, held_out, settings, shards))


@settings(max_examples=examples(200), deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.booleans(), st.integers(0, 3)), min_size=1, max_size=8))
def test_holding_out(given: list[tuple[bool, bool, int]]) -> None:
    """Conversations of equal content move together, and only if one side is empty.

    Each example is (held out, stays, content).
    """
    flags, stays = (np.array([row[column] for row in given]) for column in (0, 1))
    contents = np.array([row[2] for row in given], np.uint64)
    before = flags.copy()
    hold_out_at_least_one(flags, stays, lambda: contents, 0.0)
    assert (flags == before).all(), "a corpus without validation is left alone"
    hold_out_at_least_one(flags, stays, lambda: contents, 0.5)
    assert len(set(contents[flags != before].tolist())) <= 1
    if len(set(contents[stays].tolist())) > 1:
        assert set(flags[stays].tolist()) == {True, False}
    elif stays.any() and (before[stays].all() or not before[stays].any()):
        assert not flags[stays].any(), "a single content is trained on"
    if before[stays].any() and not before[stays].all():
        assert (flags == before).all()
    for content in set(contents[flags != before].tolist()):
        assert len(set(flags[contents == content].tolist())) == 1, "the same content on both sides"


# -- epochs ----------------------------------------------------------------------------------------------------------


def sets_of(placed: Placed, of: np.ndarray) -> Counter[frozenset[int]]:
    """Count the rows of two or more pieces, as sets."""
    rows: dict[int, set[int]] = {}
    sizes = Counter(placed.row.tolist())
    for row, piece in zip(placed.row.tolist(), of.tolist(), strict=True):
        rows.setdefault(row, set()).add(piece)
    return Counter(frozenset(pieces) for row, pieces in rows.items() if sizes[row] > 1)


@settings(max_examples=examples(200), deadline=None)
@given(st.lists(st.integers(2, 24), min_size=2, max_size=50), st.integers(0, 5))
def test_an_epoch_has_all_pieces_in_as_many_rows_and_parts_who_can_be_parted(lengths: list[int], seed: int) -> None:
    settings, shards = config(sequence_length=24, seed=seed), {"train": 2, "validation": 0}
    sizes, of = np.array(lengths, np.int32), np.arange(len(lengths), dtype=np.int32)
    first = place(sizes, np.zeros(len(lengths), bool), settings, shards)
    earlier = EarlierRows()
    earlier.remember(first.row, of, first.rows)
    second = pack_split(sizes, settings, "train_epoch_2", 2, {"train_epoch_2": 2})
    earlier.separate(second.row, second.start, of, sizes, second.rows)
    splits, bounds = {"train": second.rows, "validation": 0}, [*second.lower_bounds, (0, "")]
    as_first = Placed(second.row, second.start, second.edges, splits, bounds)
    check(as_first, lengths, [False] * len(lengths), settings, shards)
    assert second.rows == first.rows, "training has as many steps in every pass"
    for pieces in sets_of(first, of).keys() & sets_of(second, of).keys():
        inside = Counter(lengths[piece] for piece in pieces)
        assert all(lengths.count(length) == times for length, times in inside.items()), "could have been parted"


def test_real_lengths_meet_again_in_next_to_no_row() -> None:
    lengths = (20 + np.exp(np.random.default_rng(0).normal(4.6, 0.6, 3000))).astype(np.int32).clip(max=512)
    of = np.arange(len(lengths), dtype=np.int32)
    settings, earlier, seen = config(sequence_length=512), EarlierRows(), Counter[frozenset[int]]()
    placed = place(lengths, np.zeros(len(of), bool), settings, {"train": 1, "validation": 0})
    for epoch in range(2, 6):
        earlier.remember(placed.row, of, placed.rows)
        seen |= sets_of(placed, of)
        split = f"train_epoch_{epoch}"
        placed = pack_split(lengths, settings, split, epoch, {split: 1})
        earlier.separate(placed.row, placed.start, of, lengths, placed.rows)
        found = sets_of(placed, of)
        assert len(found.keys() & seen.keys()) <= 0.05 * len(found)


def test_a_plan_is_the_same_for_ever() -> None:
    why = "the plan changed: raise VERSIONS['corpus'] in tasks/storage/keys.py, then this test"
    lengths = [(37 * i * i + 11 * i) % 29 + 3 for i in range(16)]
    settings, shards = config(sequence_length=32), {"train": 2, "validation": 1}
    found = stands_of(placed_of(lengths, [i % 5 == 4 for i in range(16)], settings, shards))
    assert found == [
        (1, 3, 28),
        (0, 0, 0),
        (1, 3, 0),
        (0, 3, 0),
        (2, 0, 0),
        (0, 2, 0),
        (0, 1, 23),
        (0, 0, 22),
        (0, 1, 0),
        (2, 2, 0),
        (1, 0, 0),
        (1, 2, 0),
        (0, 3, 21),
        (1, 1, 0),
        (2, 1, 0),
        (1, 4, 0),
    ], why
