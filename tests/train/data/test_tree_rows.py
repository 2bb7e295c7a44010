"""Rows of format 3.2 are read, and rows that would train wrongly are refused.

The rows are laid out by support.training.tree_rows, which is proven here: `end` says who sees whom.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from support.packed_rows import write_rows
from support.training.tiny_training import LENGTH
from support.training.tree_rows import Tree, alone, columns_of, lay_out, random_trees, tree_rows, write_trees

from packcorpus.rows import joined
from packcorpus.tasks.core.errors import DataError
from packcorpus.tasks.storage.layout import RowLayout
from packcorpus.tasks.storage.schemas import row_schema
from packcorpus.train.config import TrainingConfig
from packcorpus.train.data.corpus import open_corpus
from packcorpus.train.data.dataset import PackedDataset
from packcorpus.train.data.paths import paths_of
from packcorpus.train.evaluation import Prompt, find_prompts
from packcorpus.train.loop.feed import empty_row, open_feed
from packcorpus.train.merge.losses import pieces_of
from packcorpus.train.model.isolation import choose_rows, count_conversations

NAME = "train-00000-of-00001.arrow"

Columns = dict[str, np.ndarray]


def write(folder: Path, columns: Columns) -> Path:
    return write_trees(folder / NAME, columns)


def seen_by_each(trees: list[Tree], length: int) -> np.ndarray:
    """Return which place sees which, from the samples alone, and check the tokens."""
    row, sees, places = lay_out(trees, length), np.zeros((length, length), bool), 0
    for tree in trees:
        path: list[int] = []
        before: list[int] = []
        for sample in tree:
            alike = 0
            while alike < min(len(before), sample.first) and before[alike] == sample.ids[alike]:
                alike += 1
            path = path[: max(0, alike - 1)]
            for position in range(len(path), len(sample.ids)):
                path.append(places)
                sees[places, path] = True
                assert row["input_ids"][places] == sample.ids[position]
                assert row["position_ids"][places] == position
                places += 1
            before = sample.ids
    sees[range(places, length), range(places, length)] = True
    return sees


# -- the helper --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(12))
def test_an_end_says_who_sees_whom(seed: int) -> None:
    trees = random_trees(seed)
    row, place = lay_out(trees), np.arange(LENGTH)
    ends = row["end"].numpy()
    sees = (place[None] <= place[:, None]) & (place[:, None] < ends[None])
    assert (sees == seen_by_each(trees, LENGTH)).all()
    apart = alone(trees)
    assert sum(int((other["labels"] >= 0).sum()) for other in apart) == int((row["labels"] >= 0).sum())
    assert sum(len(other["labels"]) for other in apart) > int((row["input_ids"] > 0).sum()), "something is shared"


@pytest.mark.parametrize("seed", range(6))
def test_a_path_is_its_sample(seed: int) -> None:
    trees = random_trees(seed)
    row = {name: values.numpy() for name, values in lay_out(trees).items()}
    samples = [sample for tree in trees for sample in tree]
    paths = [*paths_of(row)]
    assert len(paths) - len(samples) in (0, 1), "the last one is padding"
    for (places, shared), sample in zip(paths, samples, strict=False):
        assert row["input_ids"][places].tolist() == sample.ids
        assert row["position_ids"][places].tolist() == [*range(len(sample.ids))]
        assert (row["labels"][places[shared:]] >= 0).sum() == len(sample.ids) - sample.first
    assert count_conversations(lay_out(trees)) == len(samples)


# -- read --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("load", ["memory", "mmap"])
def test_rows_are_those_of_the_shard(tmp_path: Path, load: Any, weighted: bool) -> None:
    columns = columns_of(tree_rows(5))
    if not weighted:
        del columns["loss_weight"]
    rows = PackedDataset(write(tmp_path, columns), load=load)
    assert [*rows[0]] == ["input_ids", "labels", "position_ids", "end", *["loss_weight"] * weighted]
    assert rows[0]["end"].dtype == torch.int32
    for number in range(5):
        assert all(values.tolist() == columns[name][number].tolist() for name, values in rows[number].items())
    assert rows.conversations == sum(len(tree) for seed in range(5) for tree in random_trees(seed))
    assert rows.tokens == columns["attention_mask"].sum()
    assert rows.longest_segment == columns["position_ids"].max() + 1
    assert open_corpus(tmp_path).layout.is_shared
    filler = empty_row(rows)
    assert filler.keys() == rows[0].keys()
    assert filler["end"].tolist() == [LENGTH] * LENGTH


def test_the_columns_are_those_of_the_schema(tmp_path: Path) -> None:
    layout = RowLayout((LENGTH,), share="conversation", loss_weight="data")
    schema = row_schema(layout, LENGTH, "0" * 64)
    assert schema.names[3:] == ["position_ids", "end", "loss_weight"]
    columns = columns_of(tree_rows(2))
    write(tmp_path, {name: columns[name] for name in schema.names})
    table = pa.ipc.open_stream((tmp_path / NAME).read_bytes()).read_all().cast(schema)
    with pa.OSFile(str(tmp_path / NAME), "w") as file, pa.ipc.new_stream(file, schema) as writer:
        writer.write_table(table)
    assert PackedDataset(tmp_path)[1]["end"].tolist() == columns["end"][1].tolist()


def test_batches_have_the_column() -> None:
    rows = [{name: values.numpy() for name, values in row.items()} for row in tree_rows(3)]
    assert joined(rows)["end"].tolist() == [row["end"].tolist() for row in rows]


def test_a_feed_counts_samples_and_pairs(tmp_path: Path) -> None:
    columns = columns_of(tree_rows(5))
    feed = open_feed(open_corpus(write(tmp_path, columns)), TrainingConfig(base_model=None))
    assert feed.isolated
    # The cost of attention: as many pairs as tokens see tokens.
    seen = sum(seen_by_each(random_trees(seed), LENGTH).sum() for seed in range(5))
    is_real = columns["attention_mask"] == 1
    assert (columns["position_ids"] + 1)[is_real].sum() == seen - (~is_real).sum()
    assert torch.equal(feed.positions()[0], torch.from_numpy(columns["position_ids"].reshape(-1)))


def test_prompts_and_pieces_follow_the_path(tmp_path: Path) -> None:
    rows = PackedDataset(write(tmp_path, columns_of(tree_rows(3))))
    samples = [sample for seed in range(3) for tree in random_trees(seed) for sample in tree]
    expected = [Prompt(sample.ids[: sample.first], sample.ids[sample.first :]) for sample in samples]
    assert find_prompts(rows, 1000) == expected
    pieces = pieces_of(open_corpus(tmp_path), 10**6)
    assert [ids.tolist() for ids, _ in pieces.pieces] == [sample.ids for sample in samples]
    for (_, labels), sample in zip(pieces.pieces, samples, strict=True):
        assert labels.tolist() == [-100] * sample.first + sample.ids[sample.first :]
    assert pieces.trained == rows.trained_tokens


# -- refused -----------------------------------------------------------------------------------------------------------


def branch_of(columns: Columns, row: int = 1) -> int:
    """Return the place where a sample branches off another."""
    positions = columns["position_ids"][row]
    return int(np.flatnonzero((np.diff(positions, prepend=-1) != 1) & (positions > 0))[0])


def seen_too_long(columns: Columns) -> None:
    columns["end"][1, branch_of(columns) - 1] += 1


def seen_too_short(columns: Columns) -> None:
    columns["end"][1, 0] -= 1


def seen_by_none(columns: Columns) -> None:
    columns["end"][1, 3] = 3


def seen_after_the_row(columns: Columns) -> None:
    columns["end"][1, 0] = LENGTH + 1


def other_branch_point(columns: Columns) -> None:
    start = branch_of(columns)
    stop = int(np.flatnonzero(np.diff(columns["position_ids"][1])[start:] != 1)[0]) + start + 1
    columns["position_ids"][1, start:stop] -= 1


def jump(columns: Columns) -> None:
    start = branch_of(columns)
    columns["position_ids"][1, start] = columns["position_ids"][1, start - 1] + 2


def below_zero(columns: Columns) -> None:
    columns["position_ids"][1, branch_of(columns)] = -1


def trained_copy(columns: Columns) -> None:
    start = branch_of(columns)
    columns["labels"][1, start] = columns["input_ids"][1, start]
    columns["loss_weight"][1, start] = 1


def seen_padding(columns: Columns) -> None:
    columns["end"][1, -2] = LENGTH
    assert not columns["attention_mask"][1, -2]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (seen_too_long, "row 1: an `end` is not the next place of the same or a lower position"),
        (seen_too_short, "row 1: an `end` is not the next place of the same or a lower position"),
        (other_branch_point, "row 1: an `end` is not the next place of the same or a lower position"),
        (seen_by_none, "row 1: an `end` is not after its token, or is after the row"),
        (seen_after_the_row, "row 1: an `end` is not after its token, or is after the row"),
        (jump, "row 1: position_ids grow by more than 1"),
        (below_zero, "row 1: a position is negative"),
        (trained_copy, "row 1: the first token of a conversation is trained on"),
        (seen_padding, "row 1: the `end` of padding is not the next place"),
    ],
)
def test_rows_that_would_train_wrongly_are_refused(
    damage: Callable[[Columns], None], message: str, tmp_path: Path
) -> None:
    columns = columns_of(tree_rows(3))
    assert len(PackedDataset(write(tmp_path / "right", columns))) == 3
    damage(columns)
    with pytest.raises(DataError, match=message) as error:
        PackedDataset(write(tmp_path / "wrong", columns))
    assert error.value.code == "E514"


def test_any_other_end_is_refused(tmp_path: Path) -> None:
    source, columns = Random(1), columns_of(tree_rows(3))
    for _ in range(60):
        row, place = source.randrange(3), source.randrange(LENGTH)
        other = source.randrange(place + 1, LENGTH + 1)
        damaged = columns | {"end": columns["end"].copy()}
        damaged["end"][row, place] = other
        if other == columns["end"][row, place]:
            continue
        with pytest.raises(DataError, match=rf"row {row}: "):
            PackedDataset(write(tmp_path, damaged))


@pytest.mark.parametrize("lacking", ["end", "position_ids"])
def test_rows_without_the_column_are_refused(tmp_path: Path, lacking: str) -> None:
    columns = columns_of(tree_rows(2))
    del columns[lacking]
    with pytest.raises(DataError, match=rf"has no {lacking}; columns") as error:
        open_corpus(write(tmp_path, columns), allow_unisolated=True)
    assert error.value.code == "E601"


def test_without_its_setting_a_row_has_no_column(tmp_path: Path) -> None:
    # Such a row is refused as well, because its positions do not restart at 0.
    metadata = {"format_version": "3.0", "sequence_length": str(LENGTH)}
    write_rows(tmp_path / NAME, columns_of(tree_rows(2)), metadata)
    with pytest.raises(DataError, match="position_ids neither increase by 1 nor restart at 0"):
        PackedDataset(tmp_path)


def test_rows_with_the_most_samples_are_chosen() -> None:
    rows = tree_rows(6)
    counts = [count_conversations(row) for row in rows]
    assert [counts[number] for number in choose_rows(rows, 3)] == sorted(counts, reverse=True)[:3]
