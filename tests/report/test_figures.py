"""The figures of a report equal a plain count of the index.

The order of the index and its batches do not matter.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.profiles import examples

from packcorpus.tasks.report import figures
from packcorpus.tasks.report.figures import Histogram
from packcorpus.tasks.storage.schemas import index_schema

Entry = dict[str, Any]
LENGTH = {
    "train-8": 8,
    "train-16": 16,
    "validation-8": 8,
    "validation-16": 16,
    "train_epoch_2-8": 8,
    "train_epoch_2-16": 16,
}


# -- a histogram -----------------------------------------------------------------------------------------------------


@given(st.lists(st.lists(st.integers(-3, 40), max_size=30), max_size=5), st.floats(0, 1))
def test_a_histogram_knows_what_the_numbers_know(parts: list[list[int]], share: float) -> None:
    found = Histogram()
    for part in parts:
        found.add(np.array(part, np.int32))
    numbers = sorted(number for part in parts for number in part)
    assert np.repeat(found.values, found.counts).tolist() == numbers
    assert len(found) == len(numbers)
    assert found.above(7) == sum(number > 7 for number in numbers)
    if numbers:
        assert found.mean() == pytest.approx(np.mean(numbers))
        shares = [0, share, 0.5, 0.9, 0.99, 1]
        assert found.quantiles(shares) == np.quantile(numbers, shares, method="inverted_cdf").tolist()


# -- an index --------------------------------------------------------------------------------------------------------


def plain(
    entries: list[Entry], first_rows: dict[tuple[str, int], int], rooms: list[int], packed: bool
) -> dict[str, Any]:
    """Count an index in plain Python."""
    samples: dict[tuple[int, ...], dict[int, int]] = defaultdict(dict)
    pieces: dict[int, list[Any]] = defaultdict(list)
    for one in entries:
        samples[one["source"], one["record"], one["turn"]][one["first"] or 0] = one["length"]
        if one["row"] is not None:
            names = ("start", "length", "trained", "truncated", "source", "record", "turn")
            pieces[first_rows[one["split"], one["shard"]] + one["row"]].append(tuple(one[name] for name in names))
    count = min((first for (split, _), first in first_rows.items() if "epoch" in split), default=len(rooms))
    first_packing = range(count if packed else 0)
    return {
        "lengths": sorted(sum(found.values()) for found in samples.values()),
        "padding": sorted(rooms[row] - sum(piece[1] for piece in pieces[row]) for row in first_packing),
        "conversations": sorted(len(pieces[row]) for row in first_packing),
        "drawn": {row: sorted(pieces[row]) for row in range(len(rooms))},
    }


def simulated(source: random.Random, packed: bool) -> tuple[list[Entry], dict[str, list[int]], bool, int]:
    """Draw an index and the rows of its shards.

    Returns the entries, the rows of each shard by split, whether samples were copied, and the number of samples
    that were cut.
    """
    rows: dict[str, list[list[Entry]]] = {split: [] for split in LENGTH}
    dropped, copied, cut = [], False, 0
    rules = source.randrange(4)  # neither, copies, pieces, both
    for record in range(1, source.randint(1, 25)):
        of: Entry = {"source": source.randrange(2), "record": record // 2 * 7, "dropped": None}
        of["turn"] = source.choice((0, 2)) + record % 2
        of |= {"separator": True, "closed": False, "turns": 2, "digest": record, "truncated": source.random() < 0.2}
        if source.random() < 0.2:
            where = dict.fromkeys(("split", "shard", "row", "start", "first"))
            dropped.append(of | where | {"length": source.randint(1, 40), "trained": 0, "dropped": "limit"})
            continue
        lengths = [source.randint(1, 8) for _ in range(source.choice((1, 3)) if rules & 2 else 1)]
        cut += len(lengths) > 1
        is_held_out = source.random() < 0.3
        copies = source.choice((1, 2)) if rules & 1 and not is_held_out else 1
        copied |= copies > 1
        for kind in ("validation",) if is_held_out else ("train", "train_epoch_2"):
            for first, length in [*zip(np.cumsum([0, *lengths[:-1]]).tolist(), lengths, strict=True)] * copies:
                split = f"{kind}-{source.choice((8, 16))}"
                start = sum(piece["length"] for piece in rows[split][-1]) if rows[split] else 0
                if not packed or not rows[split] or source.random() < 0.5 or start + length > LENGTH[split]:
                    rows[split].append([])
                    start = 0
                trained = source.randint(1, length)
                rows[split][-1].append(of | {"first": first, "length": length, "trained": trained, "start": start})
    shards, entries = dict[str, list[int]](), dropped
    for split, own in rows.items():
        edge = source.randint(0, len(own))
        shards[split] = [edge, len(own) - edge]
        for number, row in enumerate(own):
            shard = int(number >= edge)
            entries += [piece | {"split": split, "shard": shard, "row": number - shard * edge} for piece in row]
    source.shuffle(entries)
    return entries, shards, copied, cut


@settings(max_examples=examples(15), deadline=None)
@given(st.integers(0, 1 << 32), st.integers(1, 30), st.integers(1, 9), st.booleans())
def test_figures_are_those_of_a_plain_count(seed: int, batch: int, size: int, packed: bool) -> None:
    entries, shards, copied, cut = simulated(random.Random(seed), packed)
    manifest = manifest_of(shards, len(entries), copied, cut, packed)
    first_rows, rooms = {}, list[int]()
    for split, own in shards.items():
        for number, rows in enumerate(own):
            first_rows[split, number] = len(rooms)
            rooms += [LENGTH[split]] * rows
    table = pa.Table.from_pylist(entries, index_schema(True)).unify_dictionaries()
    with (
        mock.patch.object(figures, "open_index", opened(table.to_batches(batch))),
        mock.patch.object(figures, "RANGE", size),
    ):
        found = figures.read_figures(manifest, Path(), range(len(rooms)))
    expected = plain(entries, first_rows, rooms, packed)
    for name in ("lengths", "padding", "conversations"):
        histogram = getattr(found, name)
        assert np.repeat(histogram.values, histogram.counts).tolist() == expected[name], name
    assert found.drawn == expected["drawn"]


def opened(batches: list[pa.RecordBatch]) -> Callable[..., Any]:
    @contextmanager
    def open_index(*_: object) -> Iterator[list[pa.RecordBatch]]:
        yield batches

    return open_index


def manifest_of(shards: dict[str, list[int]], entries: int, copied: bool, cut: int, packed: bool) -> Any:
    return SimpleNamespace(
        splits={
            name: SimpleNamespace(shards=[SimpleNamespace(rows=rows) for rows in own]) for name, own in shards.items()
        },
        length_of_split=LENGTH.__getitem__,
        packing_metadata=SimpleNamespace(enabled=packed),
        ledger=SimpleNamespace(
            pieces=SimpleNamespace(packed=entries), conversations=SimpleNamespace(read=entries, split=cut)
        ),
        mixture=[SimpleNamespace(copies=2 if copied else 1, conversations=1)],
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"row": 2}, "refers to rows that the manifest does not have"),
        ({"row": -1}, "refers to rows that the manifest does not have"),
        ({"shard": 1}, "refers to rows that the manifest does not have"),
        ({"shard": None}, "refers to rows that the manifest does not have"),
        ({"split": "train-16"}, "refers to rows that the manifest does not have"),
        ({"split": "other"}, "refers to rows that the manifest does not have"),
        ({"split": None}, "refers to rows that the manifest does not have"),
        ({"start": 1}, "refers to tokens beyond the end of a row"),
        ({"start": -1}, "refers to tokens beyond the end of a row"),
        ({"length": 0}, "refers to tokens beyond the end of a row"),
        ({"row": 1}, "refers to tokens beyond the end of a row"),  # the row has two pieces
        ({"length": None}, "a place lacks its length"),
        ({"trained": None}, "a place lacks its trained"),
        ({"turn": None}, "a place lacks its turn"),
    ],
)
def test_an_index_that_cannot_be_is_refused(change: Entry, message: str) -> None:
    entry = {"source": 0, "record": 1, "split": "train-8", "shard": 0, "row": 0, "start": 0, "length": 8, "first": 0}
    entry |= {"trained": 1, "separator": True, "truncated": False, "closed": False, "turns": 2, "digest": 0, "turn": -1}
    entries = [entry | change, entry | {"row": 1}]
    manifest = manifest_of({"train-8": [2], "train-16": [], "validation-8": [2]}, 2, False, 0, True)
    batches = pa.Table.from_pylist(entries, index_schema(True)).to_batches()
    with mock.patch.object(figures, "open_index", opened(batches)), pytest.raises(ValueError, match=message):
        figures.read_figures(manifest, Path(), [0])
