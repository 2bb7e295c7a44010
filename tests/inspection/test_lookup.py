"""All rows of a conversation are found, or the reason why it has none.

A conversation may have copies, pieces, and several packings. Damage is an error.
"""

from __future__ import annotations

import json
import shutil
from collections import defaultdict
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from support.inspected import as_object, shown
from support.mixtures import EVERYTHING, FEW, MANY, TWICE, project
from support.packed_rows import folder_of
from support.small_corpus import make_recipe, pack_corpus

from packcorpus.tasks.core.errors import PackError, UsageError
from packcorpus.tasks.inspection import lookup, rows, search
from packcorpus.tasks.report.figures import read_figures
from packcorpus.tasks.storage import shards
from packcorpus.tasks.storage.manifest import load_manifest

RECORDS = (FEW, MANY, TWICE)
SOURCES = ("few.jsonl", "many.jsonl", "twice.jsonl")


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pack a corpus with copies, two packings, and dropped conversations.

    Conversations are dropped by filters, as duplicates, by limits, and by weights.
    """
    sources = [{"path": "few.jsonl", "weight": 2.5}, {"path": "many.jsonl", "limit": 30, "weight": 0.5}]
    settings = EVERYTHING | {"sequence_length": 40}
    return pack_corpus(project(tmp_path_factory.mktemp("mixed"), [*sources, {"path": "twice.jsonl"}], **settings))


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pack plain texts in format 2.0, so `messages` is null."""
    folder = tmp_path_factory.mktemp("texts")
    recipe = make_recipe(folder, [{"text": f"All of [red]text {n}\x1b[0m"} for n in range(12)], packing=False)
    return pack_corpus(recipe)


def index_of(path: Path) -> list[dict[str, Any]]:
    return list(pa.ipc.open_stream((folder_of(path) / "index.arrow").read_bytes()).read_all().to_pylist())


@pytest.mark.slow
def test_every_place_of_a_conversation_is_found_and_leads_to_its_row(mixed: Path) -> None:
    places = defaultdict(list)
    for number, place in enumerate(index_of(mixed)):
        places[place["source"], place["record"]].append((place["split"], place["shard"], place["row"], number))
    assert max(map(len, places.values())) > 5, "copies, pieces and packings"
    rows: dict[tuple[str, int], Any] = {}
    for (source, record), wanted in places.items():
        found = as_object(mixed, at=f"{SOURCES[source]}:{record}")
        assert [(p["split"], p["shard"], p["row"], p["number"]) for p in found["pieces"]] == wanted
        assert as_object(mixed, conversation=wanted[-1][-1]) == found, "from any of its places"
        for piece in found["pieces"]:
            if piece["row"] is None:
                continue
            key = piece["split"], piece["row_of_split"]
            rows[key] = rows.get(key) or as_object(mixed, row=key[1], split=key[0])
            assert piece["number"] in {place["number"] for place in rows[key]["conversations"]}
            inside = slice(piece["start"], piece["start"] + piece["length"])
            assert rows[key]["columns"]["input_ids"][inside] == piece["input_ids"]
    assert {split for split, _ in rows} == {"train", "validation", "train_epoch_2"}


def test_a_conversation_is_shown_once_with_all_its_rows(mixed: Path) -> None:
    index = index_of(mixed)
    copied = next(p for p in index if p["split"] == "train_epoch_2" and p["source"] == 0)
    same = [p for p in index if (p["source"], p["record"]) == (0, copied["record"])]
    page = shown(mixed, width=400, at=f"few.jsonl:{copied['record']}")
    pieces = {place["first"] for place in same}
    assert f"packed {len(same) // len(pieces)} times" in page
    assert page.count("━━ ") == len(pieces)
    also = [line for line in page.splitlines() if "also in row" in line]
    assert sum(line.count("row ") for line in also) == len(same) - len(pieces)
    assert all("of train_epoch_2 from token" in line for line in also)


def test_a_dropped_conversation_has_a_reason_with_its_numbers(mixed: Path) -> None:
    reasons: dict[str, Any] = {}
    for place in index_of(mixed):
        reasons.setdefault(place["dropped"], place)
    messages = {
        "duplicate": "duplicate of few.jsonl:",
        "limit": "over the limit of its source (many.jsonl: 30)",
        "weight": "by the weight of its source (many.jsonl: 0.5, weighting: repeat)",
        "max_turns": "it has 4 turns, max_turns is 3",
        "min_tokens": "min_tokens is 12",
    }
    assert {*messages, None} >= reasons.keys() >= {None, "duplicate", "limit", "weight", "max_turns"}
    for reason, place in reasons.items():
        if reason:
            at = f"{SOURCES[place['source']]}:{place['record']}"
            page = shown(mixed, width=300, at=at)
            assert "dropped: " in page
            assert messages[reason] in page
            assert f"packcorpus inspect {at.replace(':', ' --line ')}" in page
            [piece] = as_object(mixed, at=at)["pieces"]
            assert messages[reason] in piece["why"]


def test_a_duplicate_names_the_conversation_that_is_kept(mixed: Path) -> None:
    """A duplicate names the conversation that is kept.

    twice.jsonl has the first five conversations of few.jsonl in reverse order.
    """
    for line in range(1, 6):
        place = next(p for p in index_of(mixed) if (p["source"], p["record"]) == (2, line))
        if place["dropped"] != "max_turns":
            assert f"duplicate of few.jsonl:{6 - line} (#" in shown(mixed, width=300, at=f"twice.jsonl:{line}")


def test_a_duplicate_of_a_rejected_conversation_is_described(tmp_path: Path) -> None:
    same = {"messages": [{"role": "user", "content": "at " * 200}, {"role": "assistant", "content": "nine"}]}
    settings: dict[str, Any] = {"duplicates": "exact", "max_rejects": 1.0, "sequence_length": 64}
    settings |= {"overlong": "truncate"}
    path = pack_corpus(make_recipe(tmp_path, [FEW[0], same, same], **settings))
    assert "duplicate of an earlier conversation, which was rejected" in shown(path, width=200, at="chat.jsonl:3")


def test_a_split_of_several_lengths_is_named(tmp_path: Path) -> None:
    path = pack_corpus(make_recipe(tmp_path, FEW, sequence_length=[64, 128], validation=0.5))
    names = [name for name, split in load_manifest(path).splits.items() if split.rows]
    assert shown(path, row=0, split=names[0])
    for question, message in (
        ({}, f"--row 0: rows of train have several lengths here, each in its own split; use --split {names[0]}"),
        ({"split": "test"}, f"--split test: is not a split of this corpus; choose one of {', '.join(names)}"),
    ):
        with pytest.raises(UsageError) as error:
            shown(path, row=0, **question)
        others = ", ".join(name for name in names[1:] if name.startswith("train"))
        assert str(error.value) == message + f", or {others}" * bool(others and not question)
        assert error.value.code == "E108"


@pytest.mark.usefixtures("believed")
@pytest.mark.parametrize(("column", "message"), [("source", "source 99"), ("shard", "rows that"), ("row", "rows that")])
def test_an_index_that_refers_to_nothing_is_an_error(mixed: Path, tmp_path: Path, column: str, message: str) -> None:
    shutil.copytree(mixed.parent.parent, tmp_path / "copy")
    path = tmp_path / "copy" / "manifests" / mixed.name
    file = folder_of(path) / "index.arrow"
    whole = file.read_bytes()
    with pa.ipc.open_stream(whole) as reader, pa.ipc.new_stream(str(file), reader.schema) as out:
        for batch in reader:
            at = batch.schema.get_field_index(column)
            values = [value if value is None else 99 for value in batch.column(at).to_pylist()]
            out.write_batch(batch.set_column(at, batch.schema.field(at), pa.array(values, batch.schema.field(at).type)))
    assert file.stat().st_size == len(whole)
    with pytest.raises(PackError, match=rf"index\.arrow: .*refers to {message}"):
        shown(path, conversation=0)


def test_too_long_for_a_row_names_both_lengths(tmp_path: Path) -> None:
    path = pack_corpus(project(tmp_path, [{"path": "many.jsonl"}], overlong="drop", sequence_length=64))
    place = next(p for p in index_of(path) if p["dropped"])
    page = shown(path, width=300, at=f"many.jsonl:{place['record']}")
    assert f"dropped: its {place['length']} tokens exceed a row of 64" in page


def test_a_conversation_without_a_turn_that_fits_is_explained(tmp_path: Path) -> None:
    path = pack_corpus(project(tmp_path, [{"path": "many.jsonl"}], overlong="turns", sequence_length=40))
    place = next(p for p in index_of(path) if p["dropped"])
    page = shown(path, width=300, at=f"many.jsonl:{place['record']}")
    assert f"dropped: no trained turn of its {place['length']} tokens ends within a row of 40 (overlong: turns)" in page


def test_text_is_found_once_however_often_it_is_packed(mixed: Path) -> None:
    packed = {(p["source"], p["record"]) for p in index_of(mixed) if p["row"] is not None}
    for word in ("train", "eleven"):
        found = as_object(mixed, search=word, limit=1000)["conversations"]
        pieces = [(p["source"], p["record"], p["first"]) for p in found]
        assert len(pieces) == len({*pieces}) > 10
        holding = {
            (source, line)
            for source, records in enumerate(RECORDS)
            for line, record in enumerate(records, 1)
            if word in json.dumps(record) and (source, line) in packed
        }
        assert {piece[:2] for piece in pieces} <= holding


def test_lengths_count_a_conversation_once(mixed: Path) -> None:
    index, manifest = index_of(mixed), load_manifest(mixed)
    pieces = {(p["source"], p["record"], p["first"] or 0): p["length"] for p in index}
    lengths: dict[tuple[int, int], int] = defaultdict(int)
    for (source, record, _), length in pieces.items():
        lengths[source, record] += length
    found = read_figures(manifest, folder_of(mixed))
    assert np.repeat(found.lengths.values, found.lengths.counts).tolist() == sorted(lengths.values())
    assert len(index) > 1.5 * len(lengths)
    again = sum(split.rows for name, split in manifest.splits.items() if name.startswith("train_epoch"))
    assert manifest.packing_metadata.rows - len(found.padding) == again > 0


@pytest.mark.parametrize("asked", [{"row": 3}, {"conversation": 3}, {"at": "chat.jsonl:4"}])
def test_a_row_of_plain_text_is_shown(texts: Path, asked: dict[str, Any]) -> None:
    assert r"[red]text" in (page := shown(texts, **asked))
    assert r"\x1b[0m" in page
    assert "▐text▌" in page


@pytest.fixture
def believed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip the check of digests, as if a shard was damaged before it was signed."""
    for module in (lookup, rows, search, shards):
        monkeypatch.setattr(module, "check_unchanged", lambda folder, shard: None)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["mixed", "texts"])
@pytest.mark.usefixtures("believed")
def test_a_flipped_bit_is_an_error_and_not_a_crash(kind: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    path: Path = request.getfixturevalue(kind)
    shutil.copytree(path.parent.parent, tmp_path / "copy")
    path = tmp_path / "copy" / "manifests" / path.name
    name = SOURCES[0] if kind == "mixed" else "chat.jsonl"
    errors = 0
    for file in sorted(folder_of(path).glob("*.arrow")):
        whole = file.read_bytes()
        asked: list[dict[str, Any]] = [{"row": 1}, {"conversation": 2}, {"at": f"{name}:1"}, {"search": "ra"}]
        for step, place in enumerate(range(5, 8 * len(whole), 8 * len(whole) // 13)):
            damaged = bytearray(whole)
            damaged[place // 8] ^= 1 << place % 8
            file.write_bytes(damaged)
            with suppress(PackError):
                errors += 1
                shown(path, **asked[step % len(asked)])
                errors -= 1
        file.write_bytes(whole)
    assert errors


@pytest.mark.usefixtures("believed")
@pytest.mark.parametrize("asked", [{"row": 0}, {"row": 11}, {"search": "All"}])
def test_damaged_offsets_of_texts_are_errors(texts: Path, tmp_path: Path, asked: dict[str, Any]) -> None:
    shutil.copytree(texts.parent.parent, tmp_path / "copy")
    path = tmp_path / "copy" / "manifests" / texts.name
    for file in folder_of(path).glob("train-*.arrow"):
        with pa.memory_map(str(file)) as mapped:
            batch = next(iter(pa.ipc.open_stream(mapped)))
            offsets = batch.column("text").buffers()[1]
            at, size = offsets.address, offsets.size
            start = file.read_bytes().find(offsets.to_pybytes())
        assert at
        data = bytearray(file.read_bytes())
        data[start : start + size] = b"\xff\xff\xff\x7f" * (size // 4)
        file.write_bytes(data)
    with pytest.raises(PackError, match="cannot be read"):
        shown(path, **asked)
