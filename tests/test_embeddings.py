"""Embeddings in the data determine which conversations share a row.

The tests follow them from a record, through sketches in token files, to the rows.
"""

from __future__ import annotations

import csv
import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from pyarrow import parquet
from support.packed_rows import folder_of, shards_of
from support.profiles import examples
from support.small_corpus import conversations, make_recipe, pack_corpus

from tasks import recipe as recipe_module
from tasks.conversations.keys.embeddings import MOST_NUMBERS, Sketch, sketch_of
from tasks.core.errors import DataError, Reject, UsageError
from tasks.dry_run.dry_run import predict
from tasks.packing.company.embeddings import embedded_directions, embedded_duplicates
from tasks.packing.company.sketches import FEW
from tasks.storage.manifest import load_manifest
from tasks.storage.schemas import AXES
from tasks.storage.tokens.token_files import TokenColumns
from tasks.verification.rebuild import rebuild
from tasks.verification.repair import repair
from tasks.verification.verify import verify

BY = {"company": "similar", "company_by": "embedding"}
TOPICS = 4


def embedded(count: int = 160, size: int = 24, key: str = "embedding") -> list[dict[str, Any]]:
    """Return conversations of a few words, with embeddings of TOPICS topics in turn.

    Each embedding is near the center of its topic.
    """
    random = np.random.default_rng(1)
    common, centers = 3 * random.normal(size=size), random.normal(size=(TOPICS, size))
    vectors = common + centers[np.arange(count) % TOPICS] + 0.2 * random.normal(size=(count, size))
    records = conversations(count, longest=5)
    return [{**record, key: vector.tolist()} for record, vector in zip(records, vectors, strict=True)]


def axes_of(sketch: Sketch) -> np.ndarray:
    return np.frombuffer(sketch.axes, "<i2").astype(np.float64)


def index_of(path: Path) -> list[dict[str, Any]]:
    return [dict(each) for each in pa.ipc.open_stream(folder_of(path) / "index.arrow").read_all().to_pylist()]


def of_one_topic(path: Path) -> float:
    """Return the share of pairs in a row that have the same topic."""
    rows: dict[Any, list[int]] = {}
    for each in index_of(path):
        rows.setdefault((each["split"], each["shard"], each["row"]), []).append(each["record"] % TOPICS)
    counts = [Counter(topics) for topics in rows.values()]
    same = sum(n * (n - 1) for found in counts for n in found.values())
    return same / sum(found.total() * (found.total() - 1) for found in counts)


# -- what always holds -------------------------------------------------------------------------------------------------

VECTORS = arrays.arrays(np.float64, st.integers(1, 80), elements=st.floats(-1e6, 1e6)).filter(lambda v: v.any())


@settings(max_examples=examples(100), deadline=None)
@given(vector=VECTORS, power=st.integers(-30, 30))
def test_a_sketch_is_that_of_the_direction(vector: np.ndarray, power: int) -> None:
    """A sketch equals a computation in plain Python with whole numbers.

    Each axis is the sum of the numbers with the signs of a hash. Only the direction of an embedding counts.
    """
    found = sketch_of(vector.tolist(), "embedding", False)
    assert sketch_of((vector * 2.0**power).tolist(), "embedding", False) == found
    assert sketch_of(json.dumps(vector.tolist()), "embedding", True) == found
    assert found.numbers == len(vector)
    assert (axes_of(sketch_of((-vector).tolist(), "embedding", False)) == -axes_of(found)).all()
    assert np.abs(axes_of(found)).max() > 0, "all zero is: no embedding"
    whole = [round(value / max(map(abs, vector.tolist())) * (1 << 15)) for value in vector.tolist()]
    length = sum(number * number for number in whole) ** 0.5
    for axis in range(AXES):
        total = sum(number * sign_of(at, axis) for at, number in enumerate(whole))
        assert axes_of(found)[axis] == max(-32767, min(32767, round(total * 1024 / length)))


def sign_of(number: int, bit: int) -> int:
    """Return 1 or -1, by a bit of splitmix64."""
    z = (number * 0x9E3779B97F4A7C15 + 0xD1B54A32D192ED03) % 2**64
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
        z = (z ^ z >> shift) * factor % 2**64
    return -1 if z >> bit & 1 else 1


def test_sketches_keep_angles() -> None:
    random = np.random.default_rng(0)
    one = random.normal(size=(300, 256))
    other = one + random.uniform(0, 3, (300, 1)) * random.normal(size=one.shape)
    pairs = [(v, w, *(axes_of(sketch_of(each.tolist(), "e", False)) for each in (v, w)))
             for v, w in zip(one, other, strict=True)]  # fmt: skip
    cosines = np.array([[cosine(v, w), cosine(a, b)] for v, w, a, b in pairs])
    assert np.abs(cosines[:, 0] - cosines[:, 1]).mean() < 0.1
    close = cosines[:, 0] > 0.98
    assert close.any()
    assert np.abs(cosines[close, 0] - cosines[close, 1]).max() < 0.02


def cosine(v: np.ndarray, w: np.ndarray) -> float:
    return float(v @ w / np.sqrt((v @ v) * (w @ w)))


# -- rows --------------------------------------------------------------------------------------------------------------


def test_conversations_with_similar_embeddings_share_rows_and_nothing_else_changes(tmp_path: Path) -> None:
    usual, by_text, path = (
        pack_corpus(make_recipe(tmp_path / str(number), embedded(), sequence_length=64, **given_))
        for number, given_ in enumerate(({}, {"company": "similar"}, BY))
    )
    assert of_one_topic(usual) < 0.35
    assert of_one_topic(by_text) < 0.35, "the words say nothing about the topic"
    assert of_one_topic(path) > 0.6
    one, two = load_manifest(usual), load_manifest(path)
    assert one.ledger == two.ledger
    assert one.packing_metadata == two.packing_metadata
    assert one.unused_keys == {"chat.jsonl": {"embedding": 160}}
    assert not two.unused_keys
    for shard in shards_of(path):
        assert "embedding" not in (names := pa.ipc.open_stream(shard).schema.names)
        assert "sketch" not in names
    assert verify(path)


def test_bytes_are_the_same_for_any_cut_and_container_and_repaired(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recipe_module, "SOURCE_BYTES_PER_SHARD", 20_000)
    records, kept = embedded(), []
    given_ = {**BY, "sequence_length": 64, "validation": 0.2, "epochs": 2}
    for part_size in (1 << 20, 1 << 12):
        path = pack_corpus(make_recipe(tmp_path / str(part_size), records, part_size=part_size, **given_))
        kept.append([shard.read_bytes() for shard in shards_of(path)])
    assert len(kept[0]) > 1
    assert kept[0] == kept[1]
    assert rebuild(path)
    for missing in (True, False):
        shard = shards_of(path)[-1]
        shard.unlink() if missing else shard.write_bytes(bytes(1000))
        assert [each.path for each in repair(path)] == [shard]
        assert [each.read_bytes() for each in shards_of(path)] == kept[0]


@pytest.mark.parametrize("container", ["parquet", "halves", "csv", "mapped"])
def test_embeddings_of_other_records(tmp_path: Path, container: str) -> None:
    """Other containers and names of the embedding give the same rows as JSON Lines.

    The embedding is a column of a table, 16-bit numbers, JSON in a cell, or a column with another name.
    """
    rows = [{"instruction": f"What is {n}?", "output": f"It is {n}.", "embedding": [n % 4, 1.5 - n % 3, 0.25]}
            for n in range(99)]  # fmt: skip
    found = []
    for name in ("usual", container):
        folder = tmp_path / name
        folder.mkdir()
        extension = {"parquet": "parquet", "halves": "parquet", "csv": "csv"}.get(name, "jsonl")
        source: dict[str, Any] = {"path": f"x.{extension}"}
        file = folder / source["path"]
        if name in ("parquet", "halves"):
            kind = pa.float16() if name == "halves" else pa.float32()
            vectors = pa.array([[np.float16(x) for x in row["embedding"]] for row in rows], pa.list_(kind))  # type: ignore[attr-defined]
            table = pa.Table.from_pylist(rows)
            parquet.write_table(table.set_column(2, "embedding", vectors), file)
        elif name == "csv":
            with file.open("w", newline="") as out:
                writer = csv.writer(out)
                writer.writerows([rows[0].keys(), *([*row.values()] for row in rows)])
        elif name == "mapped":
            source["columns"] = {"embedding": "vector"}
            lines = [{("vector" if key == "embedding" else key): value for key, value in row.items()} for row in rows]
            file.write_text("".join(json.dumps(line) + "\n" for line in lines))
        else:
            file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        path = pack_corpus(make_recipe(folder, [], sources=[source], sequence_length=64, **BY))
        assert not load_manifest(path).unused_keys
        found.append([(each["record"], each["shard"], each["row"]) for each in index_of(path)])
    assert found[0] == found[1]


def test_near_duplicates_have_a_label_in_common_unless_many_have_it(tmp_path: Path) -> None:
    records = embedded(8 + 2 * FEW, size=64)
    random = np.random.default_rng(3)
    for number, record in enumerate(records):
        vector = random.normal(size=64) if number < 8 else np.ones(64)
        record["embedding"] = vector.tolist()
    records[7]["embedding"] = (np.array(records[2]["embedding"]) * 1.001).tolist()
    records[5]["embedding"] = records[6]["embedding"] = None
    recipe = make_recipe(tmp_path, records, company="apart", company_by="embedding")
    path = pack_corpus(recipe)
    tokens = TokenColumns([recipe.layout.token_file(key) for key in recipe.token_keys], [0])
    labels = embedded_duplicates(tokens)
    alike = [(a, b) for a in range(len(records)) for b in range(a) if (labels[a] == labels[b]).any()]
    assert alike == [(7, 2)]
    axes = embedded_directions(tokens).astype(int)
    assert not axes[5:7].any()
    lengths = np.sqrt((axes**2).sum(axis=1))
    assert np.abs(np.delete(lengths, [5, 6]) - 127).max() < 3
    assert verify(path)


def test_what_all_embeddings_have_in_common_does_not_count(tmp_path: Path) -> None:
    recipe = make_recipe(tmp_path, embedded(), **BY)
    pack_corpus(recipe)
    axes = embedded_directions(TokenColumns([recipe.layout.token_file(key) for key in recipe.token_keys], [0]))
    cosines = axes.astype(int) @ axes.T.astype(int) / 127**2
    topic = np.arange(len(axes)) % TOPICS
    same = topic[:, None] == topic
    assert cosines[same].mean() > 0.8
    assert cosines[~same].mean() < 0, "without the mean they point away from each other"


# -- the setting -------------------------------------------------------------------------------------------------------


def test_only_a_corpus_that_compares_embeddings_reads_them(tmp_path: Path) -> None:
    given_ = ({}, {"company": "apart"}, {"company": "apart", "company_by": "embedding"}, BY)
    recipes = [make_recipe(tmp_path / str(n), embedded(9), **each) for n, each in enumerate(given_)]
    keys = [recipe.token_keys for recipe in recipes]
    assert keys[0] == keys[1] != keys[2] == keys[3]
    assert len({recipe.corpus_key for recipe in recipes}) == 4
    assert "company_by" not in recipes[1].settings()
    assert ["embedding" in recipe.files[0].wanted_columns for recipe in recipes] == [False, False, True, True]


@pytest.mark.parametrize(("given_", "said"), [
    ({"company_by": "embedding"}, "company_by: embedding requires company: similar or apart"),
    ({**BY, "packing": False}, "company: similar requires packing: true"),
])  # fmt: skip
def test_it_is_refused_where_nothing_is_compared(given_: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=said):
        make_recipe(tmp_path, conversations(3), **given_)


# -- values in the data ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("[1]", "is a string; expected a list of numbers"),
        ([], "has 0 numbers; expected 1 to 65,536"),
        ([0.0] * (MOST_NUMBERS + 1), "has 65,537 numbers"),
        ([0, 0.0], "holds only 0"),
        ([1, None], "holds null; expected numbers only"),
        ([1, True], "holds a boolean"),
        ([0.5, float("nan")], "holds nan; expected finite numbers only"),
        ([0.5, float("-inf")], "holds -inf"),
        ([[1]], "holds a list"),
    ],
)
def test_another_value_is_a_reject_that_says_why(value: Any, said: str) -> None:
    with pytest.raises(Reject) as caught:
        sketch_of(value, "vector", False)
    assert caught.value.code == "E241"
    assert caught.value.message.startswith(f"vector {said}")


def test_a_cell_that_is_not_json_is_a_reject() -> None:
    with pytest.raises(Reject, match="is not JSON"):
        sketch_of("[1, 2", "vector", True)
    assert sketch_of("", "vector", True) == sketch_of(None, "vector", False) == Sketch()


def test_rejects_name_the_line_and_missing_ones_are_counted(tmp_path: Path) -> None:
    records = embedded(20)
    records[3]["embedding"] = "near"
    del records[5]["embedding"]
    records[7]["embedding"] = None
    recipe = make_recipe(tmp_path, records, max_rejects=1, turns="apart", **BY)
    path = pack_corpus(recipe)
    [reject] = [json.loads(line) for line in (folder_of(path) / "rejects.jsonl").read_text().splitlines()]
    assert (reject["line"], reject["code"]) == (4, "E241")
    assert load_manifest(path).noticed["without_embedding"] == 2
    assert predict(recipe.config, tmp_path, tmp_path).noticed["without_embedding"] == 2
    assert verify(path)


@pytest.mark.parametrize("part_size", [1 << 20, 1 << 12])
def test_two_sizes_are_an_error_that_names_both_places(part_size: int, tmp_path: Path) -> None:
    records = embedded(40)
    records[30]["embedding"] = [1, 2, 3]
    recipe = make_recipe(tmp_path, records, part_size=part_size, **BY)
    said = r"chat.jsonl:31: the embedding has 3 numbers, but the embedding of chat.jsonl:\d+ has 24; compute all"
    with pytest.raises(DataError, match=said) as caught:
        pack_corpus(recipe)
    assert caught.value.code == "E257"
    with pytest.raises(DataError, match=said):
        predict(recipe.config, tmp_path, tmp_path)


def test_a_corpus_without_embeddings_is_an_error_that_names_the_fix(tmp_path: Path) -> None:
    recipe = make_recipe(tmp_path, embedded(9, key="vector"), **BY)
    for run in (lambda: pack_corpus(recipe), lambda: predict(recipe.config, tmp_path, tmp_path)):
        with pytest.raises(DataError, match=r"no conversation has an embedding; map its key with columns") as caught:
            run()
        assert caught.value.code == "E258"
