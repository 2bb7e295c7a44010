"""rows.arrow and the order of rows in whole corpora, in each packing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from support.packed_rows import sign
from support.small_corpus import conversations, make_recipe, make_shards_small, once, pack_corpus
from support.training.waiting import idle_of_steps

from packcorpus.tasks.core.errors import DataError
from packcorpus.tasks.recipe import Recipe
from packcorpus.tasks.storage.corpus_folder import corpus_folder
from packcorpus.tasks.storage.files import to_json
from packcorpus.tasks.storage.manifest import Manifest, load_manifest, manifest_digest
from packcorpus.tasks.storage.shards import ROWS, RowStatistics, open_index, read_statistics, statistics_of_split
from packcorpus.tasks.verification.rebuild import rebuild
from packcorpus.tasks.verification.repair import repair
from packcorpus.tasks.verification.verify import verify

RECORDS = conversations(240, longest=30)
SETTINGS: dict[str, Any] = {"sequence_length": 64, "validation": 0.3, "epochs": 2, "overlong": "split"}
BALANCE = {"ranks": 4, "rows_per_rank": 2}

Rows = dict[str, list[dict[str, np.ndarray]]]  # by split: the columns of each shard, [rows, sequence_length]


@pytest.fixture(autouse=True)
def _small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    make_shards_small(monkeypatch)


Packed = tuple[Recipe, Manifest, Path]


def packed(folder: Path, **changes: Any) -> Packed:
    recipe = make_recipe(folder, RECORDS, **SETTINGS | changes)
    published = pack_corpus(recipe)
    return recipe, load_manifest(published), published


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Packed]:
    """Pack a corpus with these changes, once for all tests that only read it."""

    def make(**changes: Any) -> Packed:
        with pytest.MonkeyPatch.context() as patch:
            make_shards_small(patch)
            return packed(tmp_path_factory.mktemp("made"), **changes)

    return once(make)


def rows_of(manifest: Manifest, path: Path) -> Rows:
    folder, found = corpus_folder(manifest, path), {}
    for name, split in manifest.splits.items():
        tables = [pa.ipc.open_stream((folder / shard.path).read_bytes()).read_all() for shard in split.shards]
        found[name] = [
            {c: table[c].combine_chunks().flatten().to_numpy().reshape(-1, 64) for c in table.schema.names}
            for table in tables
        ]
    return found


def counted(shard: dict[str, np.ndarray]) -> list[tuple[int, int, int, int]]:
    """Count each row of a shard by its position_ids."""
    found = []
    for positions, mask, labels in zip(shard["position_ids"], shard["attention_mask"], shard["labels"], strict=True):
        filled = int(mask.sum())
        lengths = [b - a for a, b in pairwise([*np.flatnonzero(positions[:filled] == 0).tolist(), filled])]
        trained = int((labels != -100).sum())
        found.append((sum(length * length for length in lengths), max(lengths), len(lengths), trained))
    return found


@pytest.mark.parametrize("changes", [{}, {"balance": BALANCE}])
def test_the_statistics_are_those_of_the_rows(changes: dict[str, Any], made: Callable[..., Packed]) -> None:
    _, manifest, published = made(**changes)
    folder = corpus_folder(manifest, published)
    assert (folder / ROWS).stat().st_size < 30 * manifest.packing_metadata.rows + 1000 * len(manifest.listed())
    expected = {name: [counted(shard) for shard in shards] for name, shards in rows_of(manifest, published).items()}
    shards = read_statistics(manifest, folder)
    found = [list(zip(*(column.tolist() for column in each.columns()), strict=True)) for _, each in shards]
    assert found == [shard for split in expected.values() for shard in split]
    for name, split in manifest.splits.items():
        every = [row for shard in expected[name] for row in shard]
        sums = [sum(column) for column in zip(*every, strict=True)]
        assert split.statistics
        assert [*split.statistics.model_dump().values()] == [sums[0], max(row[1] for row in every), *sums[2:]]
        [some] = [statistics_of_split(manifest, folder, name, 3)]
        assert some
        assert list(zip(*(column.tolist() for column in some.columns()), strict=True)) == every[:3]
    verify(published)


def test_balance_changes_the_order_of_rows_and_nothing_else(made: Callable[..., Packed], tmp_path: Path) -> None:
    plain, without, path = made()
    recipe, manifest, published = made(balance=BALANCE)
    assert without.config.get("balance") is None
    assert "balance" not in without.config
    assert manifest.config["balance"] == BALANCE
    assert recipe.corpus_key != plain.corpus_key
    assert recipe.token_keys == plain.token_keys, "no conversation is tokenized again"
    before, after = rows_of(without, path), rows_of(manifest, published)
    for name in manifest.splits:
        bytes_of = [
            [
                tuple(shard[c][row].tobytes() for c in shard)
                for shard in rows[name]
                for row in range(len(shard["labels"]))
            ]
            for rows in (before, after)
        ]
        assert Counter(bytes_of[0]) == Counter(bytes_of[1]), name
        assert bytes_of[0] != bytes_of[1], name
        assert manifest.splits[name].statistics == without.splits[name].statistics
        assert [shard.rows for shard in manifest.splits[name].shards] == [s.rows for s in without.splits[name].shards]
    assert manifest.ledger == without.ledger
    assert manifest.packing_metadata == without.packing_metadata
    verify(published)
    assert rebuild(published)
    # The same bytes for any part size.
    *_, again = packed(tmp_path / "c", balance=BALANCE, part_size=2000)
    assert again.read_bytes() == published.read_bytes()


def test_the_ranks_of_a_step_have_equal_work(made: Callable[..., Packed]) -> None:
    """Ranks have equal work in every packing, also with half the ranks."""
    _, manifest, published = made(balance=BALANCE)
    folder = corpus_folder(manifest, published)
    for name, split in manifest.splits.items():
        found = statistics_of_split(manifest, folder, name)
        assert found
        order = np.arange(split.rows // 8 * 8)
        for ranks in (4, 2):
            # In a model this small, nearly all work is attention.
            after = idle_of_steps(found.squares[order], ranks, 8 // ranks, 6 * 64)
            shuffled = np.random.default_rng(0).permutation(found.squares)
            before = idle_of_steps(shuffled, ranks, 8 // ranks, 6 * 64)
            assert after < (0.5 if ranks == 4 else 0.7) * before, (name, ranks, before, after)


@pytest.mark.parametrize("changes", [{}, {"duplicates": "drop"}, {"weight": 2}])
def test_rows_follow_the_order_of_the_data(
    changes: dict[str, Any], made: Callable[..., Packed], tmp_path: Path
) -> None:
    """The first conversations of rows are in order; the plan is that of random order."""
    changes = {"sequence_length": 256, "epochs": 1} | changes
    if weight := changes.pop("weight", None):
        changes["sources"] = [{"path": "chat.jsonl", "weight": weight}]
    _, without, path = made(**changes)
    _, manifest, published = packed(tmp_path, order="source", **changes)
    assert "order" not in without.config
    assert manifest.config["order"] == "source"
    assert (manifest.ledger, manifest.packing_metadata) == (without.ledger, without.packing_metadata)
    spreads = []
    for each, where in ((without, path), (manifest, published)):
        rows: dict[tuple[str, int, int], list[int]] = {}
        passes, last = Counter[str](), dict[str, int]()
        with open_index(each, corpus_folder(each, where)) as index:
            for entry in index.read_all().to_pylist():
                if entry["row"] is not None:
                    # Second copies come after the first ones of all conversations.
                    passes[entry["split"]] += entry["record"] < last.get(entry["split"], 0)
                    last[entry["split"]] = entry["record"]
                    place = 1000 * passes[entry["split"]] + entry["record"]
                    rows.setdefault((entry["split"], entry["shard"], entry["row"]), []).append(place)
        firsts = [(split, min(rows[split, shard, row])) for split, shard, row in sorted(rows)]
        assert (firsts == sorted(firsts)) == (each is manifest)
        spreads.append(np.mean([max(places) - min(places) for places in rows.values()]))
    assert spreads[1] < 0.8 * spreads[0], "conversations that are near each other share rows"
    verify(published)
    assert rebuild(published).endswith("identical")


def test_a_corpus_of_an_earlier_version_has_no_statistics(tmp_path: Path) -> None:
    _, manifest, published = packed(tmp_path)
    folder = corpus_folder(manifest, published)
    values = manifest.model_dump()
    values["files"] = [file for file in values["files"] if file["path"] != ROWS]
    for split in values["splits"].values():
        del split["statistics"]
    values["digest"] = manifest_digest(values)
    (folder / ROWS).unlink()
    for copy in (published, folder / "manifest.json"):
        copy.write_bytes(to_json(values))
    verify(published)
    assert rebuild(published)
    assert list(repair(published)) == []
    assert statistics_of_split(load_manifest(published), folder, "train") is None


def test_wrong_statistics_are_found(tmp_path: Path) -> None:
    _, manifest, published = packed(tmp_path)
    file = corpus_folder(manifest, published) / ROWS
    whole = file.read_bytes()
    found = [of_shard for _, of_shard in read_statistics(manifest, file.parent)]

    def write(changed: list[RowStatistics]) -> None:
        with pa.OSFile(str(file), "w") as out, pa.ipc.new_stream(out, found[0].batch().schema) as writer:
            for each in changed:
                writer.write_batch(each.batch())
        sign(published)

    write(found)
    assert file.read_bytes() == whole
    verify(published)
    for number, column in enumerate(RowStatistics.__slots__):
        columns = [values.copy() for values in found[1].columns()]
        columns[number][2] += 1
        write([found[0], RowStatistics(*columns), *found[2:]])
        with pytest.raises(
            DataError, match=rf"rows.arrow: {column} of row 2 of train-00001.* is recorded as .*, count"
        ):
            verify(published)
    for changed, message in (
        (found[:-1], "no record batch for the"),
        ([*found, found[0]], "more record batches than the corpus has shards"),
        ([found[0].take(slice(1, None)), *found[1:]], r"has \d+ records for the \d+ rows of train-00000"),
    ):
        write(changed)
        with pytest.raises(DataError, match=message):
            verify(published)
    write(found)

    def more(values: dict[str, Any]) -> None:
        values["splits"]["train"]["statistics"]["longest"] += 1

    sign(published, more)
    with pytest.raises(DataError, match="statistics of train are recorded as"):
        verify(published)


def test_damaged_statistics_are_restored(tmp_path: Path) -> None:
    _, manifest, published = packed(tmp_path, balance=BALANCE)
    file = corpus_folder(manifest, published) / ROWS
    whole = file.read_bytes()
    file.write_bytes(whole[:-9])
    assert [each.path for each in repair(published)] == [file]
    assert file.read_bytes() == whole


def test_without_packing_there_are_no_statistics(tmp_path: Path) -> None:
    _, manifest, published = packed(tmp_path, packing=False, epochs=1, overlong="drop")
    assert not any(file.path == ROWS for file in manifest.files)
    assert all(split.statistics is None for split in manifest.splits.values())
    verify(published)
