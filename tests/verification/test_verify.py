"""`verify` accepts a valid corpus and refuses each broken invariant.

Each test breaks only one invariant and signs the manifest again, so that only the check in question can find the error.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.damage.kinds import DAMAGES, flip, swap, undo
from support.profiles import examples
from support.small_corpus import conversations, make_recipe, pack_corpus

from packcorpus.tasks import recipe as recipe_module
from packcorpus.tasks.core.errors import DataError, InputMissing, PackError
from packcorpus.tasks.corpus import shards
from packcorpus.tasks.storage.corpus_folder import reading
from packcorpus.tasks.storage.files import sha256_of, to_json
from packcorpus.tasks.storage.layout import RowLayout
from packcorpus.tasks.storage.manifest import manifest_digest
from packcorpus.tasks.storage.schemas import INDEX_SCHEMA, index_schema, row_schema
from packcorpus.tasks.verification import check_index, partitions
from packcorpus.tasks.verification.verify import verify

LENGTH = 128
BAD = {"messages": [{"role": "assistent", "content": "x"}]}
LONG = [
    {"messages": [{"role": "user", "content": f"{i}"}, {"role": "assistant", "content": "the train leaves " * 40}]}
    for i in range(6)
]

SHORT = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]


def make(root: Path, **values: Any) -> Path:
    records = [*conversations(40, longest=5), BAD, *LONG, *conversations(values.pop("again", 0), longest=5)]
    records += values.pop("more", [])
    settings = {"sequence_length": LENGTH, "validation": 0.2, "max_rejects": 1.0} | values
    return pack_corpus(make_recipe(root, records, **settings))


KINDS: dict[str, dict[str, Any]] = {
    "truncate": {"overlong": "truncate"},
    "drop": {"overlong": "drop", "validation": 0.0},
    "split": {"overlong": "split", "train_on": "all"},
    "turns": {"overlong": "turns", "epochs": 2, "more": [{"messages": SHORT + one["messages"]} for one in LONG * 3]},
    "whole": {"packing": False},
    "aligned": {"align": 16, "seed": 1},
    "lists": {"padding": "none", "overlong": "truncate"},
    "prompts": {"validation": 0.3, "validation_by": "prompt", "overlong": "truncate"},
    "mixed": {
        "sources": [{"path": "chat.jsonl", "weight": 1.5, "limit": 25}], "duplicates": "exact", "max_turns": 2,
        "epochs": 2, "again": 3,
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Pack a corpus of each kind, in several batches and shards."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shards, "BATCH_TOKENS", 5 * LENGTH)
        patch.setattr(recipe_module, "SOURCE_BYTES_PER_SHARD", 3000)
        return {kind: make(tmp_path_factory.mktemp(kind), **values) for kind, values in KINDS.items()}


@pytest.fixture(autouse=True)
def tiny_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read every index in many blocks and partitions.

    Each error must also be found across their boundaries.
    """
    monkeypatch.setattr(check_index, "ENTRIES", 3)
    monkeypatch.setattr(check_index, "RANGE", 600)
    monkeypatch.setattr(partitions, "IN_MEMORY", 100)


@dataclass
class Tampered:
    """A copy of a corpus can be changed and signed again.

    `rows` are the columns of the first shard, int64[R, L]. `write_rows` and `write_index` write changes, and `sign`
    updates the manifest.
    """

    path: Path
    manifest: dict[str, Any]
    index: list[dict[str, Any]]
    rows: dict[str, np.ndarray]

    @property
    def folder(self) -> Path:
        return self.path.parent.parent / str(self.manifest["corpus"])

    @property
    def shard(self) -> Path:
        return self.folder / self.manifest["splits"]["train"]["shards"][0]["path"]

    def pieces(self, row: int | None = None) -> list[dict[str, Any]]:
        """Return the index entries of the first shard, by row and start."""
        own = [r for r in self.index if (r["split"], r["shard"]) == ("train", 0) and row in (None, r["row"])]
        return sorted(own, key=lambda r: (r["row"], r["start"]))

    def filled(self, row: int) -> int:
        return int(self.rows["attention_mask"][row].sum())

    def write_rows(self, schema: pa.Schema | None = None) -> None:
        schema = schema or row_schema(RowLayout.of(self.manifest["config"]), LENGTH, self.manifest["key"])
        arrays = []
        for field in schema:
            values = self.rows[field.name].reshape(-1).astype(field.type.value_type.to_pandas_dtype())
            arrays.append(pa.FixedSizeListArray.from_arrays(pa.array(values), type=field.type))
        with pa.OSFile(str(self.shard), "w") as file, pa.ipc.new_stream(file, schema) as writer:
            writer.write_batch(pa.record_batch(arrays, schema=schema))

    def write_index(self, schema: pa.Schema | None = None) -> None:
        splits_at_turns, has_groups = (any(name in entry for entry in self.index) for name in ("repeated", "group"))
        schema = schema or index_schema(False, splits_at_turns, has_groups)
        with pa.OSFile(str(self.folder / "index.arrow"), "w") as file, pa.ipc.new_stream(file, schema) as writer:
            writer.write_table(pa.Table.from_pylist(self.index, schema=schema))

    def sign(self) -> None:
        """Update the size and checksum of every file in the manifest, and its own digest."""
        listed = [shard for split in self.manifest["splits"].values() for shard in split["shards"]]
        for entry in (*listed, *self.manifest["files"]):
            where = self.folder / entry["path"]
            entry |= {"bytes": where.stat().st_size, "sha256": sha256_of(where)}
        self.manifest["digest"] = manifest_digest(self.manifest)
        for copy in (self.path, self.folder / "manifest.json"):
            copy.write_bytes(to_json(self.manifest))

    def refused(self) -> str:
        with pytest.raises(DataError) as caught:
            verify(self.path)
        return str(caught.value)


def copy_of(made: dict[str, Path], kind: str, folder: Path) -> Tampered:
    root = made[kind].parent.parent
    shutil.copytree(root, folder / kind)
    path = folder / kind / made[kind].relative_to(root)
    manifest = orjson.loads(path.read_bytes())
    with pa.OSFile(str(folder / kind / manifest["corpus"] / "index.arrow")) as file:
        index = pa.ipc.open_stream(file).read_all().to_pylist()
    copy = Tampered(path, manifest, index, {})
    if manifest["packing_metadata"]["enabled"] and "padding" not in manifest["config"]:
        with pa.OSFile(str(copy.shard)) as file:
            table = pa.ipc.open_stream(file).read_all().combine_chunks()
        for name in table.schema.names:
            copy.rows[name] = np.array(table[name].to_pylist(), np.int64)
    return copy


@pytest.fixture
def truncated(made: dict[str, Path], tmp_path: Path) -> Tampered:
    return copy_of(made, "truncate", tmp_path)


# -- valid corpora ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_a_corpus_is_accepted(kind: str, made: dict[str, Path], tmp_path: Path) -> None:
    checks = verify(made[kind])
    assert [check.name for check in checks] == ["manifest", "files", "rows", "index", "ledger"] + ["samples"] * (
        kind != "whole"
    )
    manifest = orjson.loads(made[kind].read_bytes())
    ledger = manifest["ledger"]
    assert ledger["conversations"]["read"] == 47 + KINDS[kind].get("again", 0) + len(KINDS[kind].get("more", []))
    assert sum(ledger["conversations"]["rejected"].values()) >= 1
    counts = {"truncate": "truncated", "split": "split"}
    if kind in counts:
        assert ledger["conversations"][counts[kind]] == 6, "the corpus of this test lacks what it is for"
    if kind == "turns":
        assert ledger["conversations"]["truncated"] == 18
        assert ledger["conversations"]["dropped"] == {"too_long": 6}
    if kind == "drop":
        assert ledger["conversations"]["dropped"] == {"too_long": 6}
    assert f"{ledger['pieces']['packed']} pieces" in {check.name: check.found for check in checks}["index"]
    assert len(manifest["splits"]["train"]["shards"]) > 1

    moved = tmp_path / "moved"
    shutil.copytree(made[kind].parent.parent / manifest["corpus"], moved)
    assert verify(moved / "manifest.json")[:5] == checks[:5]


@pytest.mark.parametrize("kind", KINDS)
def test_re_signing_an_unchanged_corpus_is_accepted(kind: str, made: dict[str, Path], tmp_path: Path) -> None:
    """Rewriting and signing an unchanged corpus breaks nothing."""
    copy = copy_of(made, kind, tmp_path)
    copy.write_index()
    if copy.rows:
        copy.write_rows()
    copy.sign()
    verify(copy.path)


@pytest.mark.slow
def test_a_shard_without_rows_is_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for kind, values in KINDS.items():
        # Each conversation of "whole" has a row, so only more shards than conversations are empty.
        monkeypatch.setattr(recipe_module, "SOURCE_BYTES_PER_SHARD", 200 if kind == "whole" else 700)
        path = make(tmp_path / kind, **values | {"sequence_length": 512})
        assert 0 in [shard["rows"] for shard in orjson.loads(path.read_bytes())["splits"]["train"]["shards"]]
        verify(path)


# -- rows ------------------------------------------------------------------------------------------------------------


def with_pads(t: Tampered) -> int:
    return next(row for row in range(len(t.rows["labels"])) if t.filled(row) < LENGTH)


def second(t: Tampered) -> tuple[int, int]:
    """Return (row, start) of a piece that is not the first of its row."""
    piece = next(p for p in t.pieces() if p["start"] > 0)
    return piece["row"], piece["start"]


def mask_value(t: Tampered) -> None:
    t.rows["attention_mask"][0, 0] = 2


def mask_hole(t: Tampered) -> None:
    t.rows["attention_mask"][1, 3] = 0


def empty_row(t: Tampered) -> None:
    t.rows["attention_mask"][1] = 0


def id_beyond(t: Tampered) -> None:
    row, start = second(t)
    untrained = start + int(np.flatnonzero(t.rows["labels"][row, start:] == -100)[0])
    t.rows["input_ids"][row, untrained] = t.manifest["tokenizer"]["vocab_size"]


def id_negative(t: Tampered) -> None:
    t.rows["input_ids"][0, 0] = -1


def other_pad(t: Tampered) -> None:
    t.rows["input_ids"][with_pads(t), -1] = 5


def other_label(t: Tampered) -> None:
    row, at = np.argwhere(t.rows["labels"] != -100)[0]
    t.rows["labels"][row, at] += 1


def other_ignored(t: Tampered) -> None:
    row, at = np.argwhere(t.rows["labels"] == -100)[0]
    t.rows["labels"][row, at] = -1


def trained_pad(t: Tampered) -> None:
    t.rows["labels"][with_pads(t), -1] = t.manifest["tokenizer"]["pad_token_id"]


def nothing_trained(t: Tampered) -> None:
    t.rows["labels"][2] = -100


def position_runs_on(t: Tampered) -> None:
    row, start = second(t)
    t.rows["position_ids"][row, start:] += start


def position_of_the_pads(t: Tampered) -> None:
    row = with_pads(t)
    t.rows["position_ids"][row, t.filled(row) :] += 1


def position_of_one(t: Tampered) -> None:
    t.rows["position_ids"][0, 2] = 0


def trained_head(t: Tampered) -> None:
    row, start = second(t)
    t.rows["labels"][row, start] = t.rows["input_ids"][row, start]


def no_separator(t: Tampered) -> None:
    piece = next(p for p in t.pieces() if p["separator"])
    at = piece["row"], piece["start"] + piece["length"] - 1
    t.rows["input_ids"][at] += 1
    if t.rows["labels"][at] != -100:
        t.rows["labels"][at] += 1


def one_label_less(t: Tampered) -> None:
    row = next(row for row in range(9) if (t.rows["labels"][row] != -100).sum() > 1)
    at = np.flatnonzero(t.rows["labels"][row] != -100)[0]
    t.rows["labels"][row, at] = -100


ROWS: list[tuple[Callable[[Tampered], None], str]] = [
    (mask_value, "attention_mask has values other than 0 and 1"),
    (mask_hole, "attention_mask has padding among the tokens"),
    (empty_row, "the row is empty"),
    (id_beyond, "a token id is outside the vocabulary"),
    (id_negative, "a token id is outside the vocabulary"),
    (other_pad, "padding is not the pad token"),
    (other_label, "a label is neither -100 nor the token itself"),
    (other_ignored, "a label is neither -100 nor the token itself"),
    (trained_pad, "padding is trained on"),
    (nothing_trained, "no token of the row is trained on"),
    (position_runs_on, "position_ids do not restart at 0 at every conversation"),
    (position_of_the_pads, "position_ids do not restart at 0 at every conversation"),
    (position_of_one, "position_ids do not restart at 0 at every conversation"),
    (trained_head, "the first token of a conversation is trained on"),
    (no_separator, "a conversation does not end with the EOS separator"),
    (one_label_less, "the index and the labels disagree about trained tokens"),
]


@pytest.mark.parametrize(("tamper", "said"), ROWS, ids=[tamper.__name__ for tamper, _ in ROWS])
def test_a_row_that_breaks_one_invariant(tamper: Callable[[Tampered], None], said: str, truncated: Tampered) -> None:
    tamper(truncated)
    truncated.write_rows()
    truncated.sign()
    message = truncated.refused()
    assert message.endswith(said)
    assert message.startswith(f"{truncated.shard}: row 0")


# -- rows with gaps --------------------------------------------------------------------------------------------------


def gap(t: Tampered) -> tuple[int, int, int]:
    """Return (row, start, end) of padding before another piece.

    The padding has two or more tokens.
    """
    for piece, following in pairwise(t.pieces()):
        end = piece["start"] + piece["length"]
        if piece["row"] == following["row"] and end + 1 < following["start"]:
            return piece["row"], end, following["start"]
    raise AssertionError("no row has a gap")


def token_in_the_gap(t: Tampered) -> None:
    row, start, _ = gap(t)
    t.rows["input_ids"][row, start] = 9


def label_in_the_gap(t: Tampered) -> None:
    row, start, _ = gap(t)
    t.rows["labels"][row, start] = t.rows["input_ids"][row, start]


def mask_in_the_gap(t: Tampered) -> None:
    row, start, _ = gap(t)
    t.rows["attention_mask"][row, start : start + 1] = 1


def other_place_in_the_mask(t: Tampered) -> None:
    row, start, end = gap(t)
    t.rows["attention_mask"][row, [start - 1, end - 1]] = 0, 1
    t.rows["labels"][row, start - 1] = -100
    t.rows["input_ids"][row, start - 1] = t.manifest["tokenizer"]["pad_token_id"]


def positions_of_the_gap(t: Tampered) -> None:
    row, start, end = gap(t)
    t.rows["position_ids"][row, start:end] += t.rows["position_ids"][row, start - 1] + 1


GAPS = [
    (token_in_the_gap, "padding is not the pad token"),
    (label_in_the_gap, "padding is trained on"),
    (mask_in_the_gap, "the index covers a different number of tokens"),
    (other_place_in_the_mask, "attention_mask is not 1 on exactly the pieces of the index"),
    (positions_of_the_gap, "position_ids do not restart at 0 at every conversation"),
]


@pytest.mark.parametrize(("tamper", "said"), GAPS, ids=[tamper.__name__ for tamper, _ in GAPS])
def test_a_gap_that_breaks_one_invariant(
    tamper: Callable[[Tampered], None], said: str, made: dict[str, Path], tmp_path: Path
) -> None:
    t = copy_of(made, "aligned", tmp_path)
    tamper(t)
    t.write_rows()
    t.sign()
    assert t.refused().endswith(said)


def test_an_index_with_pieces_beside_the_multiples(made: dict[str, Path], tmp_path: Path) -> None:
    t = copy_of(made, "aligned", tmp_path)
    row, end, _ = gap(t)
    piece = next(p for p in t.pieces(row) if p["start"] >= end)
    piece["start"] = end
    t.write_index()
    t.sign()
    assert t.refused().endswith("the index's pieces do not follow one another at multiples of 16")


def test_a_piece_beyond_the_end_of_its_row(made: dict[str, Path], tmp_path: Path) -> None:
    """A piece beyond the end of its row is refused, even if token counts are correct.

    The first piece takes one more multiple, and the last piece extends beyond the end.
    """
    t = copy_of(made, "aligned", tmp_path)
    for row in sorted({piece["row"] for piece in t.pieces()}):
        first, *others = t.pieces(row)
        more = -first["length"] % 16 + 1
        if others and others[-1]["start"] + 16 + others[-1]["length"] - more > LENGTH:
            break
    first["length"] += more
    others[-1]["length"] -= more
    for piece in others:
        piece["start"] += 16
    t.write_index()
    t.sign()
    assert t.refused().endswith("a piece in the index extends beyond the end of the row")


def longer(row: dict[str, Any]) -> None:
    for name, value in (("input_ids", 0), ("labels", -100), ("position_ids", 0)):
        row[name].append(value)


def without_a_length(row: dict[str, Any]) -> None:
    row["seq_lens"].pop()


def other_length(row: dict[str, Any]) -> None:
    row["seq_lens"][-1] -= 1


def other_longest(row: dict[str, Any]) -> None:
    row["max_seqlen"] += 1


def fewer_labels(row: dict[str, Any]) -> None:
    row["labels"].pop()


def too_long(row: dict[str, Any]) -> None:
    for _ in range(LENGTH):
        longer(row)


def no_tokens(row: dict[str, Any]) -> None:
    for name in ("input_ids", "labels", "position_ids"):
        row[name] = []


def joined_positions(row: dict[str, Any]) -> None:
    row["position_ids"] = list(range(len(row["position_ids"])))


LISTS = [
    (longer, "the index covers a different number of tokens"),
    (without_a_length, "seq_lens and the index have different numbers of pieces"),
    (other_length, "seq_lens differ from the index"),
    (other_longest, "max_seqlen is not the longest of seq_lens"),
    (fewer_labels, "a row has more or fewer labels than input_ids"),
    (too_long, f"tokens, expected 1 to {LENGTH}"),
    (no_tokens, f"tokens, expected 1 to {LENGTH}"),
    (joined_positions, "position_ids do not restart at 0 at every conversation"),
]


@pytest.mark.parametrize(("tamper", "said"), LISTS, ids=[tamper.__name__ for tamper, _ in LISTS])
def test_a_row_without_padding_that_breaks_one_invariant(
    tamper: Callable[[dict[str, Any]], None], said: str, made: dict[str, Path], tmp_path: Path
) -> None:
    t = copy_of(made, "lists", tmp_path)
    with pa.OSFile(str(t.shard)) as file:
        table = pa.ipc.open_stream(file).read_all()
    rows = table.to_pylist()
    tamper(next(row for row in rows if len(row["seq_lens"]) > 1))
    with pa.OSFile(str(t.shard), "w") as file, pa.ipc.new_stream(file, table.schema) as writer:
        writer.write_batch(pa.RecordBatch.from_pylist(rows, schema=table.schema))
    t.sign()
    assert said in t.refused()


def test_another_count_of_alignment(made: dict[str, Path], tmp_path: Path) -> None:
    t = copy_of(made, "aligned", tmp_path)
    t.manifest["ledger"]["tokens"]["alignment"] -= 1
    t.sign()
    assert "alignment is recorded as" in t.refused()
    del t.manifest["ledger"]["tokens"]["alignment"]
    t.sign()
    assert "was edited (alignment is False in one place and True in another)" in t.refused()
    del t.manifest["shape"]
    t.sign()
    assert "was edited (shape is None in one place" in t.refused()


def test_a_trained_separator_after_a_truncated_conversation(truncated: Tampered) -> None:
    t = truncated
    piece = next(p for p in t.pieces() if p["truncated"])
    at = piece["row"], piece["start"] + piece["length"] - 1
    t.rows["labels"][at] = t.rows["input_ids"][at]
    t.write_rows()
    t.sign()
    assert "the separator after a truncated conversation is trained on" in t.refused()


def test_a_conversation_that_is_not_cut_after_a_turn(made: dict[str, Path], tmp_path: Path) -> None:
    t = copy_of(made, "turns", tmp_path)
    piece = next(p for p in t.pieces() if p["truncated"])
    row, end = piece["row"], piece["start"] + piece["length"]
    assert piece["closed"]
    piece["closed"] = piece["separator"] = False
    t.write_index()
    t.sign()
    assert "a truncated conversation does not end with a turn that is trained on" in t.refused()
    piece["closed"] = piece["separator"] = True
    labels = t.rows["labels"]
    labels[row, end - 2] = -100
    t.write_index()
    t.write_rows()
    t.sign()
    assert "a truncated conversation does not end with a turn that is trained on" in t.refused()


def test_a_turn_that_is_not_closed_with_eos(made: dict[str, Path], tmp_path: Path) -> None:
    t = copy_of(made, "turns", tmp_path)
    piece = next(p for p in t.pieces() if p["truncated"])
    row, end = piece["row"], piece["start"] + piece["length"] - 1
    piece["closed"] = piece["separator"] = False
    t.rows["labels"][row, end] = t.rows["input_ids"][row, end] = t.rows["input_ids"][row, end] + 5
    t.write_index()
    t.write_rows()
    t.sign()
    assert "a truncated conversation does not end with EOS" in t.refused()


def test_trained_tokens_of_the_truncated_ones(made: dict[str, Path], tmp_path: Path) -> None:
    t = copy_of(made, "turns", tmp_path)
    tokens = t.manifest["ledger"]["tokens"]
    assert 0 < tokens["trained_truncated"] < tokens["truncated"]
    tokens["trained_truncated"] = tokens["truncated"] + 1
    t.sign()
    assert "trained tokens are truncated, but only" in t.refused()
    del tokens["trained_truncated"]
    t.sign()
    assert "was edited (trained_truncated is False in one place and True in another)" in t.refused()


def test_an_extra_or_missing_row(truncated: Tampered) -> None:
    t = truncated
    original = dict(t.rows)
    t.rows = {name: values[:-1] for name, values in original.items()}
    t.write_rows()
    t.sign()
    assert re.search(r"arrow: holds \d+ rows, but \d+ are recorded; run: packcorpus repair ", t.refused())
    t.rows = {name: np.concatenate([values, values[-1:]]) for name, values in original.items()}
    t.write_rows()
    t.sign()
    assert "the index covers a different number of tokens" in t.refused()


def test_a_shard_of_another_corpus_or_schema(truncated: Tampered) -> None:
    t = truncated
    right = row_schema(RowLayout((LENGTH,)), LENGTH, t.manifest["key"])
    wide = pa.list_(pa.field("item", pa.int64(), nullable=False), LENGTH)
    for schema in (
        row_schema(RowLayout((LENGTH,)), LENGTH, "0" * 64),
        right.with_metadata({**right.metadata, b"format_version": b"2.0"}),
        right.remove_metadata(),
        right.set(2, pa.field("labels", wide, nullable=False)),
        right.remove(3),
        right.set(0, right.field(0).with_nullable(True)),
    ):
        t.write_rows(schema)
        t.sign()
        assert "does not belong to this corpus (" in t.refused()


def test_a_shard_that_is_not_an_arrow_file(truncated: Tampered) -> None:
    t = truncated
    for path in (t.shard, t.folder / "index.arrow", t.folder / "rejects.jsonl"):
        data = path.read_bytes()
        for damaged in (b"", b"PAR1 no arrow file", data[: len(data) // 2], data[100:], b"\0" * len(data)):
            if path.suffix == ".jsonl" and not damaged:
                continue
            path.write_bytes(damaged)
            t.sign()
            assert path.name in t.refused()
        path.write_bytes(data)
    t.sign()
    verify(t.path)


# -- index -----------------------------------------------------------------------------------------------------------


def move_a_border(t: Tampered) -> None:
    piece = next(p for p in t.pieces() if p["start"] > 0)
    before = next(p for p in t.pieces(piece["row"]) if p["start"] + p["length"] == piece["start"])
    before["length"] -= 1
    piece["start"] -= 1
    piece["length"] += 1


def leave_a_gap(t: Tampered) -> None:
    piece = next(p for p in t.pieces() if p["start"] > 0)
    before = next(p for p in t.pieces(piece["row"]) if p["start"] + p["length"] == piece["start"])
    before["length"] -= 1
    piece["length"] += 1


def drop_an_entry(t: Tampered) -> None:
    t.index.remove(t.pieces()[0])


def add_an_entry(t: Tampered) -> None:
    t.index.append(t.pieces()[0] | {"record": 999})


def no_length(t: Tampered) -> None:
    t.index.append(t.pieces()[0] | {"record": 999, "length": 0})


def in_no_shard(t: Tampered) -> None:
    t.index.append(t.pieces()[0] | {"record": 999, "shard": 99})


def in_no_row(t: Tampered) -> None:
    t.index.append(t.pieces()[0] | {"record": 999, "row": 9999})


def in_a_row_below(t: Tampered) -> None:
    t.index.append(t.pieces()[0] | {"record": 999, "row": -1})


def a_null(t: Tampered) -> None:
    t.pieces()[0]["start"] = None


def a_null_trained(t: Tampered) -> None:
    t.pieces()[0]["trained"] = None


def other_trained(t: Tampered) -> None:
    t.pieces()[0]["trained"] += 1


INDEX: list[tuple[Callable[[Tampered], None], str]] = [
    (move_a_border, "position_ids do not restart at 0 at every conversation"),
    (leave_a_gap, "the index's pieces leave a gap or overlap"),
    (drop_an_entry, "the index covers a different number of tokens"),
    (add_an_entry, "the index covers a different number of tokens"),
    (no_length, "an entry has an invalid length"),
    (in_no_shard, "refers to shards or rows that do not exist"),
    (in_no_row, "refers to shards or rows that do not exist"),
    (in_a_row_below, "refers to shards or rows that do not exist"),
    (a_null, "start has null values that are not allowed"),
    (a_null_trained, "trained has null values that are not allowed"),
    (other_trained, "the index and the labels disagree about trained tokens"),
]


@pytest.mark.parametrize(("tamper", "said"), INDEX, ids=[tamper.__name__ for tamper, _ in INDEX])
def test_an_index_that_breaks_one_invariant(tamper: Callable[[Tampered], None], said: str, truncated: Tampered) -> None:
    tamper(truncated)
    truncated.write_index()
    truncated.sign()
    assert truncated.refused().endswith(said)


def of_split(t: Tampered, split: str | None) -> list[dict[str, Any]]:
    return [entry for entry in t.index if entry["split"] == split]


def one_conversation(t: Tampered, entry: dict[str, Any], **changes: Any) -> None:
    """Change all entries of a conversation."""
    for other in t.index:
        if other["record"] == entry["record"]:
            other |= changes


def too_many_turns(t: Tampered) -> None:
    one_conversation(t, of_split(t, "train")[0], turns=3)


def few_turns_for_a_drop(t: Tampered) -> None:
    next(entry for entry in t.index if entry["dropped"] == "max_turns")["turns"] = 2


def on_both_sides(t: Tampered) -> None:
    one_conversation(t, of_split(t, "validation")[0], digest=of_split(t, "train")[0]["digest"])


def twice_the_same(t: Tampered) -> None:
    by_length: dict[int, dict[str, Any]] = {}
    for entry in of_split(t, "train"):
        other = by_length.setdefault(entry["length"], entry)
        if other["record"] != entry["record"]:
            return one_conversation(t, entry, digest=other["digest"])
    raise AssertionError("no two are as long")


def others_in_an_epoch(t: Tampered) -> None:
    one = of_split(t, "train_epoch_2")[0]
    other = next(entry for entry in of_split(t, "train_epoch_2") if entry["length"] != one["length"])
    for name in ("record", "digest", "turns"):
        one[name], other[name] = other[name], one[name]


def another_reason(t: Tampered) -> None:
    next(entry for entry in t.index if entry["dropped"] == "duplicate")["dropped"] = "limit"


MIXED: list[tuple[Callable[[Tampered], None], str]] = [
    (too_many_turns, "is packed, but max_turns is 2"),
    (few_turns_for_a_drop, "was dropped by max_turns, but is within it"),
    (on_both_sides, "is in the validation split, and the same content is in the training split"),
    (twice_the_same, "is packed, although another packed conversation has the same content"),
    (others_in_an_epoch, "train_epoch_2 has different pieces from train"),
    (another_reason, "dropped is recorded as"),
]


@pytest.mark.parametrize(("tamper", "said"), MIXED, ids=[tamper.__name__ for tamper, _ in MIXED])
def test_a_choice_that_contradicts_the_settings(
    tamper: Callable[[Tampered], None], said: str, made: dict[str, Path], tmp_path: Path
) -> None:
    t = copy_of(made, "mixed", tmp_path)
    tamper(t)
    t.write_index()
    t.sign()
    assert said in t.refused()


def test_an_index_of_another_schema(truncated: Tampered) -> None:
    truncated.write_index(INDEX_SCHEMA.set(1, pa.field("record", pa.int32())))
    truncated.sign()
    assert "index.arrow: is not an index (columns source: int32, record: int32" in truncated.refused()


def test_rows_of_format_2_are_counted(made: dict[str, Path], tmp_path: Path) -> None:
    t = copy_of(made, "whole", tmp_path)
    first, another = (p for p in t.index if p["row"] in (0, 1) and (p["split"], p["shard"]) == ("train", 0))
    first["row"] = another["row"]
    t.write_index()
    t.sign()
    assert t.refused().endswith("the index does not have one conversation per row")
    t.index.remove(first)
    t.write_index()
    t.sign()
    assert t.refused().endswith("the index does not have one conversation per row")


# -- the ledger ------------------------------------------------------------------------------------------------------

# Numbers that cannot be derived from the rest of the corpus folder.
NOT_RECOUNTED = {
    "digest", "noticed", "sources.bytes", "ledger.pieces.dropped", "ledger.pieces.inside", "ledger.tokens.rejected",
    "ledger.conversations.split", "ledger.tokens.trained_truncated", "texts_version",
    "held_out.near",
}  # fmt: skip
# The index has the hashes of prompts only with `validation_by: prompt`.
OF_PROMPTS = {"held_out.prompts", "held_out.shared"}


def numbers(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield from numbers(inner, (*path, key))
    if isinstance(value, int | float) and not isinstance(value, bool):
        yield path


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_every_number_of_the_manifest_is_recounted(
    kind: str, made: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    t = copy_of(made, kind, tmp_path)
    # Fewer blocks and ranges take half the time, and there are still several to sum over.
    monkeypatch.setattr(check_index, "ENTRIES", 12)
    monkeypatch.setattr(check_index, "RANGE", 1000)
    assert len(t.index) > 2 * 20
    original = orjson.dumps(t.manifest)
    checked = 0
    for where in numbers(t.manifest):
        name = ".".join(str(key) for key in where if not isinstance(key, int))
        not_recounted = NOT_RECOUNTED if kind == "prompts" else NOT_RECOUNTED | OF_PROMPTS
        if any(name == known or name.startswith(f"{known}.") for known in not_recounted):
            continue
        changed = orjson.loads(original)
        inner = changed
        for key in where[:-1]:
            inner = inner[key]
        inner[where[-1]] += 1
        changed["digest"] = manifest_digest(changed)
        for copy in (t.path, t.folder / "manifest.json"):
            copy.write_bytes(to_json(changed))
        try:
            verify(t.path)
        except DataError:
            checked += 1
        else:
            pytest.fail(f"{name} is not counted again")
    assert checked > 30


PACKED = {"tokens.packed": 1, "tokens.dropped": -1, "context.tokens": 1}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"ledger.conversations.packed": 1, "ledger.conversations.dropped.too_long": -1}, "packed conversations is"),
        ({"ledger.conversations.read": 1, "ledger.conversations.dropped.too_long": 1}, "dropped is"),
        ({"ledger.tokens.encoded": 1, "ledger.tokens.dropped": 1}, "tokens of all sources is"),
        ({"ledger.tokens.separators": 1, "ledger.tokens.dropped": 1}, "separators is"),
        ({f"ledger.{name}": change for name, change in PACKED.items()}, "packed tokens is"),
        ({"packing_metadata.rows": 1, "packing_metadata.lower_bound_rows": 1}, "rows is"),
        ({"packing_metadata.compression_ratio": 1}, "compression_ratio is"),
        ({"sources.0.accepted": 1, "sources.0.rejected": -1}, "chat.jsonl: accepted is"),
        ({"splits.train.rows": 1, "splits.validation.rows": -1}, "rows of train is"),
    ],
)
def test_a_balanced_but_wrong_ledger(changes: dict[str, int], said: str, made: dict[str, Path], tmp_path: Path) -> None:
    t = copy_of(made, "drop", tmp_path)
    for where, change in changes.items():
        *above, last = where.split(".")
        inner: Any = t.manifest
        for key in above:
            inner = inner[int(key) if key.isdigit() else key]
        inner[last] += change
    t.sign()
    assert f"manifest.json: {said} recorded as" in t.refused()


def test_fewer_rows_than_the_lower_bound(truncated: Tampered) -> None:
    packing = truncated.manifest["packing_metadata"]
    packing["lower_bound_rows"] = packing["rows"] + 1
    packing["above_lower_bound_percent"] = round(100 * (packing["rows"] / (packing["rows"] + 1) - 1), 4)
    truncated.sign()
    assert "rows are fewer than the lower bound" in truncated.refused()


def test_a_split_with_another_name(truncated: Tampered) -> None:
    truncated.manifest["splits"]["test"] = {"rows": 0, "shards": []}
    truncated.sign()
    assert "splits is recorded as" in truncated.refused()


def test_a_conversation_without_a_source(truncated: Tampered) -> None:
    t = truncated
    facts, entry = t.manifest["sources"][0], t.pieces()[0]
    entry["source"] = 9
    for name, change in (("accepted", 1), ("conversations", 1), ("trained_tokens", entry["trained"])):
        facts[name] -= change
    t.write_index()
    t.sign()
    assert "conversations of all sources is recorded as 47, counted 46" in t.refused()


def test_more_rejects_than_counted(truncated: Tampered) -> None:
    path = truncated.folder / "rejects.jsonl"
    original = path.read_bytes()
    for changed in (b"", original * 2, original.replace(b"bad_role", b"good_role"), original.replace(b"chat", b"shat")):
        path.write_bytes(changed)
        truncated.sign()
        assert " is recorded as " in truncated.refused()


def test_a_corpus_without_rows(truncated: Tampered) -> None:
    t = truncated
    for split in t.manifest["splits"].values():
        for shard in split["shards"]:
            (t.folder / shard["path"]).unlink()
        split |= {"rows": 0, "shards": []}
        del split["statistics"]
    t.manifest["files"] = [file for file in t.manifest["files"] if file["path"] != "rows.arrow"]
    (t.folder / "rows.arrow").unlink()
    t.index = []
    t.write_index()
    t.sign()
    assert t.refused().endswith("the corpus has no rows")


# -- files -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def flipped(made: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Tampered:
    return copy_of(made, "truncate", tmp_path_factory.mktemp("flipped"))


@settings(max_examples=examples(200), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_a_flipped_bit_is_found_wherever_it_is(flipped: Tampered, data: st.DataObject) -> None:
    found = sorted(p for p in flipped.folder.rglob("*") if p.is_file() and p.name != "run.json")
    path = data.draw(st.sampled_from([*found, flipped.path]), label="file")
    original = path.read_bytes()
    bit = data.draw(st.integers(0, 8 * max(len(original), 1) - 1), label="bit")
    if not original:
        return
    damaged = bytearray(original)
    damaged[bit // 8] ^= 1 << bit % 8
    try:
        path.write_bytes(damaged)
        with pytest.raises(PackError) as caught:
            verify(flipped.path)
        assert str(path) in str(caught.value)
    finally:
        path.write_bytes(original)


def test_an_error_says_what_is_wrong_with_a_file(truncated: Tampered) -> None:
    path = truncated.shard
    data = path.read_bytes()
    for damage, change in DAMAGES.items():
        change(path)
        message = f"{path}: "
        if damage in ("missing", "folder"):
            message += "is missing" if damage == "folder" else f"is missing; run: packcorpus repair {truncated.folder}"
        elif "link" in damage:
            message += "is a symbolic link, but the files of a corpus must not be links"
        elif path.stat().st_size != len(data):
            message += f"has {path.stat().st_size:,} bytes, but {len(data):,} are recorded; run"
        else:
            message += "does not have the recorded SHA-256; run"
        with pytest.raises((DataError, InputMissing), match=re.escape(message)):
            verify(truncated.path)
        undo(path, data)
    verify(truncated.path)


def test_swapped_shards(truncated: Tampered) -> None:
    first, other = (truncated.folder / s["path"] for s in truncated.manifest["splits"]["train"]["shards"][:2])
    swap(first, other)
    assert str(first) in truncated.refused()
    truncated.sign()
    assert str(first) in truncated.refused(), "swapped, and the manifest re-signed"


def test_files_that_do_not_belong(truncated: Tampered, tmp_path: Path) -> None:
    t = truncated
    extra = t.folder / "train-00009-of-00009.arrow"
    extra.touch()
    assert t.refused() == f"{extra}: does not belong to this corpus; move it elsewhere"
    extra.unlink()
    inside = t.folder / "tokenizer" / ".hidden"
    inside.touch()
    assert t.refused() == f"{inside}: does not belong to this corpus; move it elsewhere"
    inside.unlink()
    for target in (tmp_path, tmp_path / "nothing", t.shard):
        extra.symlink_to(target)
        assert t.refused() == f"{extra}: does not belong to this corpus; move it elsewhere"
        extra.unlink()
    verify(t.path)


def test_a_folder_that_is_a_link(truncated: Tampered, tmp_path: Path) -> None:
    folder = truncated.folder / "tokenizer"
    shutil.move(folder, tmp_path / "outside")
    folder.symlink_to(tmp_path / "outside")
    assert "is a symbolic link, but the files of a corpus must not be links" in truncated.refused()


def test_all_wrong_files_are_reported_at_once(truncated: Tampered) -> None:
    """All wrong files are reported at once, and their contents are not checked."""
    t = truncated
    lost, stray, copy = t.folder / "index.arrow", t.folder / "mine.txt", t.folder / "manifest.json"
    flip(t.shard)
    lost.unlink()
    stray.write_text("mine")
    copy.write_bytes(copy.read_bytes().replace(b"small", b"large"))
    with pytest.raises(DataError) as caught:
        verify(t.path)
    head, *reported = str(caught.value).splitlines()
    assert head == (f"{t.folder}: 4 files do not match the manifest; run: packcorpus repair {t.folder}")
    assert reported[0].startswith(f"  {copy}: ")
    assert reported[1:] == [
        f"  {t.shard}: does not have the recorded SHA-256",
        f"  {lost}: is missing",
        f"  {stray}: does not belong to this corpus; move it elsewhere",
    ]
    assert [file["code"] for file in caught.value.facts["files"]] == ["E503", "E510", "E508", "E511"]


def test_twenty_of_many_foreign_files_are_named(truncated: Tampered) -> None:
    for number in range(25):
        (truncated.folder / f"x{number:02}").write_text("")
    head, *reported = truncated.refused().splitlines()
    assert head == f"{truncated.folder}: 25 files do not match the manifest"
    assert len(reported) == 21
    assert reported[0] == f"  {truncated.folder}/x00: does not belong to this corpus; move it elsewhere"
    assert reported[-1] == "  … and 5 more"


def test_a_linked_folder_is_reported_for_its_files(truncated: Tampered, tmp_path: Path) -> None:
    inside = truncated.folder / "tokenizer"
    inside.rename(tmp_path / "outside")
    inside.symlink_to(tmp_path / "outside")
    assert truncated.refused().startswith(f"{inside / 'tiny.model'}: is a symbolic link, ")


def test_a_corpus_folder_has_a_second_manifest_only_where_it_was_published(truncated: Tampered, tmp_path: Path) -> None:
    own = truncated.folder / "manifest.json"
    for elsewhere in (tmp_path / "elsewhere", tmp_path / "data" / "corpora" / truncated.folder.name):
        shutil.copytree(truncated.folder, elsewhere)
        verify(elsewhere / "manifest.json")
    renamed = truncated.folder.with_name("backup")
    shutil.copytree(truncated.folder, renamed)
    verify(renamed / "manifest.json")
    truncated.path.unlink()
    with pytest.raises(InputMissing, match=rf"{truncated.path}: is missing; run: packcorpus repair {truncated.folder}"):
        verify(own)
    truncated.path.parent.rmdir()
    verify(own)


def test_two_manifests_that_differ(truncated: Tampered) -> None:
    copy = truncated.folder / "manifest.json"
    copy.write_bytes(copy.read_bytes() + b"\n")
    assert truncated.refused().startswith(f"{copy}: was edited or damaged")


@pytest.mark.parametrize(
    "error", [pa.ArrowNotImplementedError, pa.ArrowInvalid, OSError, ValueError, KeyError, TypeError]
)
def test_any_error_while_reading_names_the_file(error: type[Exception]) -> None:
    with (
        pytest.raises(DataError, match=r"x\.arrow: cannot be read: .*odd"),
        reading(Path("x.arrow")),
    ):
        raise error("odd")
