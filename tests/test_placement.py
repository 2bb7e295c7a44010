"""Placing: each piece in one row of one shard, each row in one order for ever."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks.config import Config, Source
from tasks.pieces import Accepted, Pieces
from tasks.placement import SPLITS, Placed, hold_out_at_least_one, place, shuffle


def columns(lengths: list[int], held_out: list[bool], owners: list[int] | None = None) -> tuple[Pieces, Accepted]:
    owner = np.array(owners if owners is not None else range(len(lengths)), np.int64)
    count = len(held_out)
    nothing = np.zeros(count, np.int32)
    accepted = Accepted(nothing, nothing, nothing, nothing, nothing, nothing.astype(bool), np.array(held_out, bool))
    zeros = np.zeros(len(lengths), np.int32)
    return Pieces(owner, zeros, np.array(lengths, np.int32), zeros.astype(bool), zeros), accepted


def config(**values: Any) -> Config:
    return Config(sources=[Source(path="x")], **values)


def check(placed: Placed, pieces: Pieces, accepted: Accepted, settings: Config, shards: dict[str, int]) -> None:
    """Every invariant of a plan, one row at a time."""
    rows: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for shard, row, start, length, owner in zip(
        placed.shard.tolist(), placed.row.tolist(), placed.start.tolist(), pieces.lengths.tolist(),
        pieces.conversation.tolist(), strict=True,
    ):  # fmt: skip
        assert (shard >= shards["train"]) == bool(accepted.held_out[owner]), "in a shard of the other split"
        rows.setdefault((shard, row), []).append((start, length))
    for stands in rows.values():
        end = 0
        for start, length in sorted(stands):
            assert start == end, "a gap or an overlap"
            end += length
        assert end <= settings.sequence_length or not settings.packing
        assert len(stands) == 1 or settings.packing
    counts = placed.rows_of_shards.tolist()
    assert len(counts) == sum(shards.values())
    assert sorted(rows) == [(shard, row) for shard, count in enumerate(counts) for row in range(count)]
    assert placed.rows == sum(counts) == len(rows)
    first = 0
    for split, (bound, _) in zip(SPLITS, placed.lower_bounds, strict=True):
        own = counts[first : first + shards[split]]
        first += shards[split]
        assert sum(own) == placed.rows_of_splits[split] >= bound
        assert max(own, default=0) - min(own, default=0) <= 1, "rows must be dealt evenly"


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_a_plan_is_valid(data: st.DataObject) -> None:
    length = data.draw(st.integers(8, 40))
    packing = data.draw(st.booleans())
    validation = data.draw(st.sampled_from([0.0, 0.001, 0.5]))
    lengths = data.draw(st.lists(st.integers(2, length), min_size=1, max_size=60))
    held_out = [validation > 0 and data.draw(st.booleans()) for _ in lengths]
    shards = {"train": data.draw(st.integers(1, 7)), "validation": data.draw(st.integers(1, 3)) if validation else 0}
    group = data.draw(st.sampled_from([1, 2, 7, 100]))
    settings = config(sequence_length=length, packing=packing, validation=validation, plan_group=group, seed=3)
    pieces, accepted = columns(lengths, held_out)
    placed = place(pieces, accepted, settings, shards)
    check(placed, pieces, accepted, settings, shards)
    if validation == 0:
        assert placed.rows_of_splits["validation"] == 0
    elif len(lengths) > 1:
        assert all(placed.rows_of_splits.values()), "each side of a split has a row"
    again = place(*columns(lengths, held_out), settings, shards)
    for name in ("shard", "row", "start"):
        assert (getattr(placed, name) == getattr(again, name)).all()


def test_groups_do_not_share_rows() -> None:
    pieces, accepted = columns([4] * 10, [False] * 10)
    settings = config(sequence_length=8, plan_group=5)
    placed = place(pieces, accepted, settings, {"train": 1, "validation": 0})
    assert placed.rows == 6
    assert set(placed.row[:5]).isdisjoint(placed.row[5:])
    assert placed.lower_bounds[0][0] == 5


def test_one_conversation() -> None:
    for held_out in (False, True):
        for validation in (0.0, 0.9):
            pieces, accepted = columns([5], [held_out and validation > 0])
            placed = place(pieces, accepted, config(validation=validation), {"train": 2, "validation": 1})
            assert placed.rows_of_splits == {"train": 1, "validation": 0}
            assert (placed.shard.tolist(), placed.row.tolist(), placed.start.tolist()) == ([1], [0], [0])


def test_pieces_of_a_conversation_stay_on_one_side() -> None:
    pieces, accepted = columns([8] * 6, [False, False, False], owners=[0, 0, 1, 1, 2, 2])
    placed = place(pieces, accepted, config(sequence_length=8, validation=0.1), {"train": 1, "validation": 1})
    assert placed.shard.tolist() == [0, 0, 0, 0, 1, 1]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.booleans(), min_size=1, max_size=8), st.data())
def test_holding_out(held_out: list[bool], data: st.DataObject) -> None:
    chosen = data.draw(st.sets(st.integers(0, len(held_out) - 1)))
    conversations = np.array(sorted(chosen), np.int64)
    flags = np.array(held_out)
    hold_out_at_least_one(flags, conversations, 0.0)
    assert flags.tolist() == held_out, "a corpus without validation is left alone"
    hold_out_at_least_one(flags, conversations, 0.5)
    assert (flags != np.array(held_out)).sum() <= 1
    if len(chosen) > 1:
        assert set(flags[conversations].tolist()) == {True, False}
    elif chosen:
        assert not flags[conversations].any(), "a single conversation is trained on"


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 500), st.integers(0, (1 << 63) - 1), st.integers(0, 1))
def test_a_shuffle_is_a_permutation(count: int, seed: int, stream: int) -> None:
    order = shuffle(count, seed, stream)
    assert order.dtype == np.int64
    assert sorted(order.tolist()) == list(range(count))
    assert (order == shuffle(count, seed, stream)).all()


def test_a_shuffle_is_the_same_for_ever() -> None:
    why = "the order of rows changed: raise VERSIONS['corpus'] in tasks/keys.py, then this test"
    assert shuffle(12, 42, 0).tolist() == [10, 2, 11, 1, 0, 3, 8, 9, 4, 7, 5, 6], why
    assert shuffle(12, 42, 1).tolist() == [3, 11, 10, 7, 5, 9, 2, 8, 4, 1, 0, 6], why
    assert shuffle(8, (1 << 63) - 1, 0).tolist() == [5, 7, 4, 2, 6, 1, 3, 0], why


def test_each_seed_and_stream_has_an_order_of_its_own() -> None:
    orders = {tuple(shuffle(50, seed, stream).tolist()) for seed in (0, 1, 2, 42, 1 << 40) for stream in (0, 1)}
    assert len(orders) == 10


@pytest.mark.parametrize("seed", [0, 42])
def test_a_shuffle_moves_every_region_everywhere(seed: int) -> None:
    """A shard is a stretch of the new order: each tenth of the old one must be spread over all ten."""
    tenths = np.histogram2d(np.arange(10_000) // 1000, shuffle(10_000, seed, 0) // 1000, bins=10)[0]
    assert tenths.min() > 60
    assert tenths.max() < 140


def test_a_plan_is_the_same_for_ever() -> None:
    why = "the plan changed: raise VERSIONS['corpus'] in tasks/keys.py, then this test"
    lengths = [(37 * i * i + 11 * i) % 29 + 3 for i in range(16)]
    pieces, accepted = columns(lengths, [i % 5 == 4 for i in range(16)])
    placed = place(pieces, accepted, config(sequence_length=32, validation=0.2), {"train": 2, "validation": 1})
    found = list(zip(placed.shard.tolist(), placed.row.tolist(), placed.start.tolist(), strict=True))
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
        (1, 1, 0),
        (0, 3, 21),
        (1, 2, 0),
        (2, 1, 0),
        (1, 4, 0),
    ], why
