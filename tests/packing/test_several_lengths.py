"""Rows of several lengths take few places and keep all invariants of a corpus.

lengths ─solve─▶ rows of each length ┬ each conversation once, no row too full
                                     ├ the lower bound holds: compared with the optimum of small cases
                                     └ at most a thousandth more places than any one length needs
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
import pytest
from datasets import Dataset
from hypothesis import given, settings
from hypothesis import strategies as st
from support.profiles import examples
from support.small_corpus import conversations, make_recipe, pack_corpus

from packcorpus.tasks.config import Config
from packcorpus.tasks.core.errors import DataError, UsageError
from packcorpus.tasks.exports.export import EXPORTS, export_corpus, notes_of
from packcorpus.tasks.inspection.rows import row_of_split
from packcorpus.tasks.inspection.search import find_conversations
from packcorpus.tasks.packing import bin_packing, several_lengths
from packcorpus.tasks.packing.column_generation import Rows, rows_of, tokens_of
from packcorpus.tasks.packing.placement import Placed, pack_split, place
from packcorpus.tasks.sources.model import Source
from packcorpus.tasks.storage.files import to_json
from packcorpus.tasks.storage.layout import RowLayout, kind_of
from packcorpus.tasks.storage.manifest import Manifest, _repeated_values, load_manifest, manifest_digest
from packcorpus.tasks.storage.shards import RowStatistics, read_statistics
from packcorpus.tasks.verification.rebuild import rebuild
from packcorpus.tasks.verification.verify import verify

SEVERAL = st.lists(st.integers(8, 40), min_size=2, max_size=4, unique=True).map(sorted)


def places_of(rows: list[Rows], lengths: list[int]) -> int:
    return sum(rows_of(of_length) * length for of_length, length in zip(rows, lengths, strict=True))


def fewest_places(pieces: tuple[int, ...], lengths: tuple[int, ...]) -> int:
    """Return the optimum, by trying all sets that can share a row with a piece."""

    @cache
    def best(left: tuple[int, ...]) -> int:
        if not left:
            return 0
        found = []
        for chosen in range(1 << (len(left) - 1)):
            inside = [left[0], *(piece for at, piece in enumerate(left[1:]) if chosen >> at & 1)]
            if (tokens := sum(inside)) <= lengths[-1]:
                rest = tuple(piece for at, piece in enumerate(left[1:]) if not chosen >> at & 1)
                found.append(next(length for length in lengths if length >= tokens) + best(rest))
        return min(found)

    return best(tuple(sorted(pieces)))


@settings(max_examples=examples(150), deadline=None)
@given(SEVERAL, st.data())
def test_rows_hold_every_conversation_in_few_places(lengths: list[int], data: st.DataObject) -> None:
    pieces = data.draw(st.lists(st.integers(1, lengths[-1]), min_size=1, max_size=60))
    counts = bin_packing.histogram(np.array(pieces), lengths[-1])
    found = several_lengths.solve(counts, lengths)
    packed = sum(bin_packing.counts_of(rows, lengths[-1]) for rows in found.rows)
    assert np.array_equal(packed, counts)
    for rows, length in zip(found.rows, lengths, strict=True):
        assert all(tokens_of(row) <= length for row, _ in rows)
    places = places_of(found.rows, lengths)
    assert found.places is None or found.places[0] <= places
    for length in lengths:
        if length >= max(pieces):
            alone = rows_of(bin_packing.solve(counts[: length + 1], length).rows) * length
            assert several_lengths.NEAR * places <= (several_lengths.NEAR + 1) * alone, f"{length} alone is fuller"


@settings(max_examples=examples(100), deadline=None)
@given(st.lists(st.integers(8, 24), min_size=2, max_size=3, unique=True).map(sorted), st.data())
def test_the_bound_is_one(lengths: list[int], data: st.DataObject) -> None:
    pieces = tuple(data.draw(st.lists(st.integers(1, lengths[-1]), min_size=1, max_size=7)))
    found = several_lengths.solve(bin_packing.histogram(np.array(pieces), lengths[-1]), lengths)
    assert found.places
    assert found.places[0] <= fewest_places(pieces, tuple(lengths)) <= places_of(found.rows, lengths)


def test_conversations_are_in_short_rows_where_that_takes_no_more_places() -> None:
    counts = bin_packing.histogram(np.array([512] * 10 + [256] * 20 + [700] * 3 + [324] * 3), 1024)
    short, long = several_lengths.solve(counts, [512, 1024]).rows
    assert (rows_of(short), rows_of(long)) == (20, 3)
    assert {length for row, _ in long for length, _ in row} == {700, 324}


def test_conversations_that_waste_short_rows_are_in_long_ones() -> None:
    """Three of 300 waste 124 of 1024, but one of 300 wastes 212 of 512."""
    counts = bin_packing.histogram(np.array([300] * 300), 1024)
    short, long = several_lengths.solve(counts, [512, 1024]).rows
    assert (rows_of(short), rows_of(long)) == (0, 100)


# -- placement ---------------------------------------------------------------------------------------------------------


def config(**values: Any) -> Config:
    return Config.model_validate({"sources": [Source(path="x")]} | values)


def check(placed: Placed, pieces: np.ndarray, settings: Config) -> None:
    """Check that each row is filled without gaps and fits the rows of its split."""
    tops, names = np.cumsum([0, *placed.rows_of_splits.values()]), list(placed.rows_of_splits)
    rows: dict[int, list[tuple[int, int]]] = {}
    for row, start, length in zip(placed.row.tolist(), placed.start.tolist(), pieces.tolist(), strict=True):
        rows.setdefault(row, []).append((start, length))
    assert sorted(rows) == list(range(placed.rows))
    for row, places in rows.items():
        end = 0
        for start, length in sorted(places):
            assert start == end, "a gap or an overlap"
            end += length
        split = names[int(np.searchsorted(tops, row, side="right")) - 1]
        assert end <= int(split.rpartition("-")[2])
    assert placed.edges[-1] == placed.rows
    for (bound, _), count in zip(placed.lower_bounds, placed.rows_of_splits.values(), strict=True):
        assert bound <= count


@settings(max_examples=examples(100), deadline=None)
@given(SEVERAL, st.data())
def test_every_packing_is_valid_and_reproducible(lengths: list[int], data: st.DataObject) -> None:
    drawn = data.draw(st.lists(st.integers(2, lengths[-1]), min_size=1, max_size=60))
    pieces, settings = np.array(drawn, np.int32), config(sequence_length=lengths, epochs=3, validation=0.1)
    held_out = np.array([data.draw(st.booleans()) for _ in pieces])
    shards = dict.fromkeys(RowLayout(tuple(lengths)).split_names(3), 2)
    placed = place(pieces, held_out, settings, shards)
    check(placed, pieces, settings)
    again = place(pieces, held_out, settings, shards)
    assert (placed.row == again.row).all()
    assert (placed.start == again.start).all()
    numbers = [list(placed.rows_of_splits)[number // 2] for number in placed.shard(slice(None)).tolist()]
    assert [kind_of(split) == "validation" for split in numbers] == held_out.tolist()
    own = pieces[~held_out]
    for epoch in (2, 3):
        more = pack_split(own, settings, f"train_epoch_{epoch}", epoch, shards)
        check(more, own, settings)
        assert list(more.rows_of_splits.values()) == list(placed.rows_of_splits.values())[: len(lengths)]


def test_conversations_of_equal_length_are_divided_evenly_among_the_rows() -> None:
    """Rows of each length take equal shares of the beginning of the corpus.

    No source is packed into rows of one length alone.
    """
    pieces = np.array([200] * 4000 + [824] * 2000, np.int32)
    settings = config(sequence_length=[400, 1024])
    placed = place(
        pieces,
        np.zeros(6000, bool),
        settings,
        {"train-400": 1, "train-1024": 1} | dict.fromkeys(("validation-400", "validation-1024"), 0),
    )
    long = placed.row[:4000] >= placed.rows_of_splits["train-400"]
    assert long.sum() == 2000
    assert abs(int(long[:2000].sum()) - 1000) < 150


# -- whole corpora -----------------------------------------------------------------------------------------------------

RECORDS = [*conversations(70, seed=1), *conversations(30, seed=2, longest=60)]
LENGTHS = [32, 96]


def made(folder: Path, records: Sequence[Any] = RECORDS, **values: Any) -> tuple[Path, Manifest]:
    recipe = make_recipe(folder, records, **{"sequence_length": LENGTHS, "max_rejects": 0.5} | values)
    path = pack_corpus(recipe)
    return path, load_manifest(path)


def pieces_of(path: Path) -> list[dict[str, Any]]:
    """Return the index entries of all packed conversations."""
    folder = path.parent.parent / load_manifest(path).corpus
    with pa.OSFile(str(folder / "index.arrow")) as source, pa.ipc.open_stream(source) as index:
        return [piece for piece in index.read_all().unify_dictionaries().to_pylist() if piece["split"]]


@pytest.mark.parametrize("overlong", ["truncate", "turns", "drop", "split"])
def test_a_corpus_of_several_lengths(tmp_path: Path, overlong: str) -> None:
    path, manifest = made(tmp_path, overlong=overlong, validation=0.2, epochs=2)
    verify(path)
    assert rebuild(path)
    assert (manifest.format_version, manifest.sequence_length, manifest.row_lengths) == ("3.1", 96, (32, 96))
    assert manifest.shape is not None
    assert manifest.shape.mix == "tokens"
    assert list(manifest.splits) == [
        f"{kind}-{length}" for kind in ("train", "validation", "train_epoch_2") for length in LENGTHS
    ]
    folder, read = path.parent.parent / manifest.corpus, Counter[str]()
    for name, split in manifest.splits.items():
        assert split.sequence_length == int(name.rpartition("-")[2])
        assert split.tokens is not None
        assert split.tokens <= split.rows * split.sequence_length
        for shard in split.shards:
            rows = Dataset.from_file(str(folder / shard.path))
            assert len(rows) == shard.rows
            assert all(len(row["input_ids"]) == split.sequence_length for row in rows)
            read[name] += sum(sum(row["attention_mask"]) for row in rows)
    assert +read == {name: split.tokens for name, split in manifest.splits.items() if split.tokens}
    tokens, packing = manifest.ledger.tokens, manifest.packing_metadata
    assert manifest.places == packing.places == tokens.packed + tokens.padding
    assert packing.lower_bound_places is not None
    assert packing.lower_bound_places <= manifest.places


def test_a_list_of_one_length_is_the_length(tmp_path: Path) -> None:
    listed, _ = made(tmp_path / "a", sequence_length=[96])
    plain, manifest = made(tmp_path / "b", sequence_length=96)
    assert listed.name == plain.name
    assert listed.read_bytes() == plain.read_bytes()
    assert manifest.format_version == "3.0"
    assert b'"shape"' not in plain.read_bytes()


def test_edited_lengths_are_noticed(tmp_path: Path) -> None:
    path, _ = made(tmp_path)
    values = orjson.loads(path.read_bytes())
    for name, value in (("lengths", [64, 96]), ("mix", "blocks")):
        edited = Manifest.model_validate(values | {"shape": values["shape"] | {name: value}})
        assert any(once != again for _, once, again in _repeated_values(edited)), name


# -- with other settings -----------------------------------------------------------------------------------------------


BOTH = [48, 96]  # the conversations below use both lengths


def records_of(path: Path, manifest: Manifest) -> dict[str, list[dict[str, Any]]]:
    folder = path.parent.parent / manifest.corpus
    return {
        name: [row for shard in split.shards for row in Dataset.from_file(str(folder / shard.path))]
        for name, split in manifest.splits.items()
    }


@pytest.mark.parametrize("neighbors", ["similar", "distinct"])
def test_neighbors_change_who_shares_a_row_and_not_which_rows_there_are(tmp_path: Path, neighbors: str) -> None:
    records = conversations(300, seed=3, longest=5)  # many of the same length
    values = {"sequence_length": BOTH, "validation": 0.2, "epochs": 2, "records": records}
    other, plain = made(tmp_path / "random", **values)
    path, manifest = made(tmp_path / neighbors, **values, neighbors=neighbors)
    verify(path)
    assert rebuild(path)
    kinds = [{(piece["record"], kind_of(piece["split"])) for piece in pieces_of(each)} for each in (other, path)]
    assert kinds[0] == kinds[1], "none moves between the training and the held-out rows"
    for name, split in manifest.splits.items():
        before = plain.splits[name]
        assert (split.rows, split.tokens) == (before.rows, before.tokens)
        assert split.statistics is not None
        assert before.statistics is not None
        assert (split.statistics.squares, split.statistics.longest) == (
            before.statistics.squares,
            before.statistics.longest,
        )
    if neighbors == "similar":
        assert manifest.splits["train-96"].shards[0].sha256 != plain.splits["train-96"].shards[0].sha256


@pytest.mark.parametrize("overlong", ["truncate", "turns", "split"])
def test_weights_are_those_of_all_training_rows_together(tmp_path: Path, overlong: str) -> None:
    """Each conversation counts equally in the loss, whatever its row's length."""
    path, manifest = made(
        tmp_path, sequence_length=BOTH, loss_weight="conversation", overlong=overlong, validation=0.2, epochs=2
    )
    verify(path)
    assert rebuild(path)
    assert manifest.loss_weight is not None
    assert [*manifest.loss_weight] == ["train", "validation", "train_epoch_2"]
    rows = records_of(path, manifest)
    assert all(rows[f"train-{length}"] for length in BOTH)
    for kind, sums in manifest.loss_weight.items():
        of_conversations = Counter[tuple[int, int]]()
        for piece in pieces_of(path):
            if kind_of(piece["split"]) == kind:
                row = rows[piece["split"]][piece["row"]]
                own = slice(piece["start"], piece["start"] + piece["length"])
                of_conversations[piece["source"], piece["record"]] += sum(row["loss_weight"][own])
        assert len(of_conversations) == sums.conversations
        each = sums.trained / sums.conversations
        assert list(of_conversations.values()) == pytest.approx([each] * sums.conversations, rel=1e-5)


def test_statistics_are_those_of_the_rows_of_each_length(tmp_path: Path) -> None:
    path, manifest = made(tmp_path, sequence_length=BOTH, validation=0.2, epochs=2)
    rows = records_of(path, manifest)
    shards = read_statistics(manifest, path.parent.parent / manifest.corpus)
    for name, split in manifest.splits.items():
        recorded = RowStatistics.joined([next(shards)[1] for _ in split.shards])
        assert recorded.trained.tolist() == [sum(label != -100 for label in row["labels"]) for row in rows[name]]
        assert recorded.longest.max(initial=0) <= int(name.rpartition("-")[2])
        assert split.statistics is not None
        assert recorded.sums() == split.statistics.model_dump()


def test_wrong_statistics_of_a_length_are_found(tmp_path: Path) -> None:
    path, _ = made(tmp_path, sequence_length=BOTH)
    values = orjson.loads(path.read_bytes())
    values["splits"]["train-48"]["statistics"]["squares"] += 1
    data = to_json(values | {"digest": manifest_digest(values)})
    path.write_bytes(data)
    (path.parent.parent / values["corpus"] / "manifest.json").write_bytes(data)
    with pytest.raises(DataError, match="statistics of train-48 are recorded as"):
        verify(path)


@pytest.mark.parametrize("format", [format.name for format in EXPORTS])
def test_exports_have_a_folder_for_each_length(tmp_path: Path, format: str) -> None:
    path, manifest = made(tmp_path, sequence_length=BOTH, validation=0.2)
    export = export_corpus(path, format, tmp_path / "out", tmp_path)
    assert {file["path"].split("/")[0] for file in export.record["files"]} == {str(length) for length in BOTH}
    written = {name: figures["rows"] for name, figures in export.record["splits"].items()}
    assert written == {name: split.rows for name, split in manifest.splits.items() if name in written}
    assert sum(written.values()) == manifest.packing_metadata.rows
    notes = [note["text"] for note in export.record["notes"]]
    assert len(notes) == len({*notes})
    [mix] = [note for note in export.record["notes"] if note["name"] == "mix"]
    assert mix["text"].startswith("the order of the steps (mix: tokens) is lost: ")


def test_a_note_that_is_not_about_all_lengths_names_its_own() -> None:
    same, one, other = ({"name": name, "text": text} for name, text in (("a", "x"), ("b", "3 of them"), ("b", "5")))
    found = [(note["name"], note["text"]) for note in notes_of({"48": [same, one], "96": [same, other]})]
    assert found == [("a", "x"), ("b", "48: 3 of them"), ("b", "96: 5")]


def test_a_row_needs_the_length_in_the_name_of_its_split(tmp_path: Path) -> None:
    path, _ = made(tmp_path, sequence_length=BOTH)
    with pytest.raises(UsageError, match=r"rows of train have several lengths here, .*--split train-48, or train-96"):
        row_of_split(path, 0, "train")
    assert row_of_split(path, 0, "train-48").conversations


def test_a_text_is_found_in_the_rows_of_every_length(tmp_path: Path) -> None:
    path, manifest = made(tmp_path, sequence_length=BOTH)
    found = find_conversations(path, "the", 1000).conversations
    assert {piece["split"] for piece in found} == {name for name, split in manifest.splits.items() if split.rows}
    for piece in found:
        row = row_of_split(path, piece["row_of_split"], piece["split"])
        [spans] = [one["spans"] for one in row.conversations if one["origin"] == piece["origin"]]
        assert "the" in "".join(span.text for span in spans)
