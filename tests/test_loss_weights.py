"""Each trained token has the weight of its conversation and its turn.

The tests follow loss weights from the data to the rows.
"""

from __future__ import annotations

import json
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyarrow import parquet
from support.commands import SHARED, needs_shared, packcorpus
from support.packed_rows import LENGTH, folder_of, pack_small, shards_of, sign
from support.small_corpus import conversations, make_recipe, make_shards_small, pack_corpus

from packcorpus.tasks.conversations.formats import read_record
from packcorpus.tasks.conversations.turn_weights import flag_hints, loss_weight_hints, with_loss_weights
from packcorpus.tasks.core.errors import DataError, Reject, UsageError
from packcorpus.tasks.corpus.shards import sum_of_weights
from packcorpus.tasks.inspection.rows import row_of_split
from packcorpus.tasks.storage.manifest import load_manifest
from packcorpus.tasks.storage.token_files import TokenFiles
from packcorpus.tasks.verification.rebuild import rebuild
from packcorpus.tasks.verification.repair import repair
from packcorpus.tasks.verification.verify import verify

IGNORED = -100
Row = dict[str, Any]
Place = tuple[str, int, int, int, str, int]  # split, shard, row, and start of each piece; source and record


def weighed(count: int = 60, seed: int = 0) -> list[dict[str, Any]]:
    """Return conversations; some of them, and some of their turns, have a weight."""
    records = conversations(count, seed)
    for number, record in enumerate(records):
        if number % 3 == 0:
            record["loss_weight"] = number % 5 + 0.5
        for index, message in enumerate(record["messages"]):
            if message["role"] == "assistant" and (number + index) % 4 == 0:
                message["loss_weight"] = 0.125 * (index + 1)
    return records


def rows_of(manifest: Path, split: str = "train") -> dict[str, np.ndarray]:
    tables = [pa.ipc.open_stream(shard).read_all() for shard in shards_of(manifest, split)]
    table = pa.concat_tables(tables)
    names = table.schema.names
    return {name: np.array(table.column(name).to_pylist()).reshape(table.num_rows, -1) for name in names}


def pieces_of(manifest: Path, split: str = "train") -> dict[int, list[tuple[np.ndarray, np.ndarray, np.ndarray]]]:
    """Return the IDs, labels, and weights of each piece, by record number."""
    index = pa.ipc.open_stream(folder_of(manifest) / "index.arrow").read_all().to_pylist()
    shards = [pa.ipc.open_stream(shard).read_all() for shard in shards_of(manifest, split)]
    found = defaultdict(list)
    for entry in index:
        if entry["split"] == split and entry["row"] is not None:
            row, inside = entry["row"], slice(entry["start"], entry["start"] + entry["length"])
            columns = (shards[entry["shard"]][name][row].as_py() for name in ("input_ids", "labels", "loss_weight"))
            found[entry["record"]].append(tuple(np.array(column)[inside] for column in columns))
    return found


# -- what always holds -------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=10, suppress_health_check=list(HealthCheck))
@given(
    mode=st.sampled_from(["data", "conversation", "both"]),
    seed=st.integers(0, 9),
    given_=st.fixed_dictionaries(
        {},
        optional={
            "overlong": st.sampled_from(["truncate", "turns", "split", "drop"]),
            "sequence_length": st.sampled_from([40, 64]),
            "turns": st.sampled_from(["apart", "together"]),
            "validation": st.just(0.25),
            "epochs": st.just(2),
            "duplicates": st.just("exact"),
            "train_on": st.sampled_from(["assistant", "last"]),
            "sources": st.sampled_from(
                [[{"path": "chat.jsonl", "weight": 2.5}], [{"path": "chat.jsonl", "limit": 20}]]
            ),
        },
    ),
)
def test_weights_change_no_row_and_are_those_of_the_data(
    tmp_path_factory: pytest.TempPathFactory, mode: str, seed: int, given_: dict[str, Any]
) -> None:
    records = weighed(40, seed)
    plain, path = (
        pack_corpus(make_recipe(tmp_path_factory.mktemp("corpus"), records, loss_weight=each, max_rejects=1, **given_))
        for each in ("none", mode)
    )
    manifest = load_manifest(path)
    assert verify(path)
    assert manifest.loss_weight is not None
    for split in manifest.splits:
        if not manifest.splits[split].rows:
            continue
        without, rows = rows_of(plain, split), rows_of(path, split)
        weights = rows.pop("loss_weight").astype(np.float32)
        assert all((rows[name] == without[name]).all() for name in rows), "the rows are the same"
        assert ((weights > 0) == (rows["labels"] != IGNORED)).all()
        trained = int((rows["labels"] != IGNORED).sum())
        facts = manifest.loss_weight[split]
        assert facts.trained == trained
        assert facts.loss_weight == pytest.approx(float(weights.astype(np.float64).sum()), rel=1e-12)
        by_record = pieces_of(path, split)
        copies = given_.get("sources", [{}])[0].get("weight", 1)
        if mode == "conversation":
            assert facts.loss_weight == pytest.approx(trained, rel=1e-6), "the mean weight is 1"
        for record, pieces in by_record.items():
            own = [weight for _, labels, weight in pieces for weight in weight[labels != IGNORED]]
            wanted = weights_of_tokens(records[record - 1], mode)
            if mode == "data":
                assert set(own) <= wanted
            if mode == "conversation" and copies == 1:
                assert sum(own) == pytest.approx(trained / len(by_record), rel=1e-5), (
                    "each conversation counts the same"
                )


def weights_of_tokens(record: dict[str, Any], mode: str) -> set[np.float32]:
    of_record = record.get("loss_weight", 1)
    turns = [m.get("loss_weight", 1) for m in record["messages"] if m["role"] == "assistant"]
    return {np.float32(of_record * weight) for weight in turns}


def test_each_turn_has_its_own_weight(tmp_path: Path) -> None:
    """The text of a turn, its end, and an added EOS have the weight of the turn."""
    turns = [("user", "the", None), ("assistant", "train leaves", 0.5), ("user", "at", 3), ("assistant", "40", 2)]
    messages = [{"role": role, "content": text, **({"loss_weight": w} if w else {})} for role, text, w in turns]
    for turns_setting in ("together", "apart"):
        recipe = make_recipe(
            tmp_path / turns_setting,
            [{"messages": messages, "loss_weight": 4}, *conversations(3)],
            loss_weight="data",
            turns=turns_setting,
        )
        path = pack_corpus(recipe)
        pieces = pieces_of(path)[1]
        runs = []
        for ids, labels, weights in pieces:
            edges = [0, *(np.flatnonzero(np.diff(weights)) + 1), len(weights)]
            runs += [
                (float(weights[a]), recipe.encoder.decode(labels[a:b].tolist()))
                for a, b in pairwise(edges)
                if weights[a]
            ]
            assert len(ids) == len(labels)
        assert [weight for weight, _ in runs] == [2.0, 8.0]
        assert ["train leaves" in runs[0][1], "40" in runs[1][1]] == [True, True]


def test_a_split_conversation_keeps_the_weights_of_its_turns(tmp_path: Path) -> None:
    records = conversations(40, longest=20)
    for record in records:
        for index, message in enumerate(record["messages"]):
            message["loss_weight"] = 0.25 * (index + 1)
    whole = pack_corpus(make_recipe(tmp_path / "whole", records, loss_weight="data", sequence_length=512))
    split = pack_corpus(
        make_recipe(tmp_path / "split", records, loss_weight="data", sequence_length=64, split_at="tokens")
    )
    expected = {record: weights for record, [(_, _, weights)] in pieces_of(whole).items()}
    index = pa.ipc.open_stream(folder_of(split) / "index.arrow").read_all().to_pylist()
    firsts = defaultdict(list)
    for entry in index:
        firsts[entry["record"]].append(entry["first"])
    several = 0
    for record, pieces in pieces_of(split).items():
        for first, (_, _, weights) in zip(firsts[record], pieces, strict=True):
            trained = np.flatnonzero(weights)
            assert (weights[trained] == expected[record][first + trained]).all()
            several += first > 0 and len(set(weights[trained])) > 1
    assert several, "a later piece has turns of several weights"


@pytest.mark.parametrize("copies", [1, 2, 2.5])
def test_copies_count_and_each_split_has_its_own_mean(tmp_path: Path, copies: float) -> None:
    sources = [{"path": "chat.jsonl", "weight": copies}]
    recipe = make_recipe(tmp_path, weighed(60), sources=sources, loss_weight="conversation", validation=0.3)
    path = pack_corpus(recipe)
    assert verify(path)
    for split, facts in (load_manifest(path).loss_weight or {}).items():
        found = pieces_of(path, split)
        assert facts.conversations == sum(map(len, found.values()))
        sums = [float(weights.sum()) for pieces in found.values() for *_, weights in pieces]
        assert sums == pytest.approx([facts.trained / facts.conversations] * len(sums), rel=1e-5)


def test_conversation_mean_is_that_of_all_pieces_and_samples(tmp_path: Path) -> None:
    """Each conversation counts as one, whatever its length.

    This also holds if it is split, or if each turn is a sample.
    """
    for given_ in ({"overlong": "split", "sequence_length": 24}, {"turns": "apart"}, {"epochs": 2}):
        path = pack_corpus(
            make_recipe(
                tmp_path / str(len(given_)) / next(iter(given_)),
                conversations(30),
                loss_weight="conversation",
                **given_,
            )
        )
        manifest = load_manifest(path)
        for split in manifest.splits:
            if manifest.splits[split].rows:
                sums = [sum(float(w.sum()) for *_, w in pieces) for pieces in pieces_of(path, split).values()]
                assert sums == pytest.approx([manifest.loss_weight[split].trained / len(sums)] * len(sums), rel=1e-5)  # type: ignore[index]


def test_weights_are_computed_alike_for_parts_and_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    records, found = weighed(90), []
    for name, part_size, several in (("one", 1 << 20, False), ("parts", 1 << 10, False), ("shards", 1 << 10, True)):
        if several:
            make_shards_small(monkeypatch, shard=4000)
        recipe = make_recipe(tmp_path / name, records, loss_weight="both", part_size=part_size, sequence_length=64)
        assert (len(recipe.shard_names) > 1) == several
        path = pack_corpus(recipe)
        assert verify(path)
        pieces = pieces_of(path)
        found.append({n: [w.tolist() for *_, w in pieces[n]] for n in sorted(pieces)})
        if not several:
            shards = [shard.read_bytes() for shard in shards_of(path)]
            found[-1]["shards"] = shards  # type: ignore[index]
    assert found[0] == found[1], "the same bytes for any part size"
    del found[1]["shards"]  # type: ignore[attr-defined]
    assert found[1] == found[2], "the same weights in several shards"


@needs_shared
def test_real_conversations(tmp_path: Path) -> None:
    """Weighted answers count the same, whatever their length.

    The answers have 20 to 400 tokens. Unweighted, a longer answer counts more, in proportion to its length.
    """
    lines = (SHARED / "corpora" / "gsm8k_train.jsonl").read_bytes().splitlines()[:300]
    recipe = make_recipe(
        tmp_path, [json.loads(line) for line in lines], loss_weight="conversation", sequence_length=2048
    )
    path = pack_corpus(recipe)
    assert verify(path)
    pieces = [own for pieces in pieces_of(path).values() for own in pieces]
    tokens = [int((labels != IGNORED).sum()) for _, labels, _ in pieces]
    sums = [float(weights.astype(np.float64).sum()) for *_, weights in pieces]
    assert max(tokens) > 4 * min(tokens)
    assert max(sums) == pytest.approx(min(sums), rel=1e-5)


# -- the setting -------------------------------------------------------------------------------------------------------


def test_without_the_setting_nothing_has_weights_and_a_hint_names_it(tmp_path: Path) -> None:
    records = weighed()
    path = pack_corpus(make_recipe(tmp_path / "a", records))
    assert "loss_weight" not in path.read_text().partition('"noticed"')[0]
    manifest = load_manifest(path)
    assert set(manifest.unused_keys["chat.jsonl"]) == {"messages[].loss_weight", "loss_weight"}
    hints = loss_weight_hints(manifest.unused_keys)
    assert len(hints) == 2
    assert all(hint.endswith("set  advanced: {loss_weight: data}") for hint in hints)
    assert flag_hints(manifest.unused_keys) == []
    plain = pack_corpus(make_recipe(tmp_path / "b", conversations(60)))
    assert [s.read_bytes()[512:] for s in shards_of(path)] != []
    assert not load_manifest(plain).unused_keys
    weighted = pack_corpus(make_recipe(tmp_path / "c", records, loss_weight="both"))
    assert not load_manifest(weighted).unused_keys


def test_token_files_are_shared_by_what_does_not_read_weights(tmp_path: Path) -> None:
    keys = {
        mode: make_recipe(tmp_path / mode, weighed(), loss_weight=mode)
        for mode in ("none", "data", "conversation", "both")
    }
    tokens = {mode: recipe.token_keys for mode, recipe in keys.items()}
    assert tokens["none"] == tokens["conversation"] != tokens["data"] == tokens["both"]
    assert len({recipe.corpus_key for recipe in keys.values()}) == 4
    assert "loss_weight" not in keys["none"].config.settings()


def test_it_requires_packing(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="loss_weight: data requires packing: true"):
        make_recipe(tmp_path, conversations(3), loss_weight="data", packing=False)


# -- values in the data ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", ["0.5", True, [], {}, -1, -0.5, 1e-9, 1e9, float("inf"), float("-inf"), float("nan")])
def test_another_value_is_a_reject_that_names_place_and_value(value: Any) -> None:
    record = conversations(1)[0]
    for where, name in ((record, "loss_weight"), (record["messages"][1], "messages[1].loss_weight")):
        where["loss_weight"] = value
        with pytest.raises(Reject) as caught:
            with_loss_weights(read_record(record, "messages"), False)
        assert (caught.value.code, caught.value.message.startswith(f"{name} is ")) == ("E206", True)
        del where["loss_weight"]


def test_a_turn_that_a_flag_adds_has_the_weight_of_all_trained_turns(tmp_path: Path) -> None:
    """A template may write it after a turn that follows it in the data."""
    records = conversations(3)
    for record, weight in zip(records, (2, 3, 1), strict=True):
        record["messages"] = [
            {"role": "user", "content": f"{weight}?", "train": True, "loss_weight": weight},
            {"role": "assistant", "content": "Yes.", "loss_weight": 2},
        ]
    path = pack_corpus(make_recipe(tmp_path, records, loss_weight="data", max_rejects=1.0))
    assert load_manifest(path).ledger.conversations.packed == 1
    rejects = (folder_of(path) / "rejects.jsonl").read_text()
    assert [json.loads(line)["code"] for line in rejects.splitlines()] == ["E206", "E206"]
    assert "a flag adds one that is not an answer" in rejects


def test_a_flag_that_adds_nothing_needs_no_equal_weights(tmp_path: Path) -> None:
    turns = [("user", True, 0.5), ("assistant", False, 1), ("user", False, 1), ("assistant", None, 2)]
    messages = [{"role": role, "content": "a", "train": flag, "loss_weight": weight} for role, flag, weight in turns]
    path = pack_corpus(make_recipe(tmp_path, [{"messages": messages}], loss_weight="data", train_on="all"))
    assert load_manifest(path).ledger.conversations.packed == 1


@pytest.mark.parametrize("value", [0, 0.0, 1, 2, 1e-6, 1e6, None])
def test_a_number_is_a_weight_and_0_leaves_a_turn_out(value: Any) -> None:
    record = conversations(1)[0]
    record["messages"][1]["loss_weight"] = value
    record["loss_weight"] = 2
    found = with_loss_weights(read_record(record, "messages"), False).messages[1]
    assert (found.loss_weight, found.train) == (2.0 * (1 if value is None else value), False if value == 0 else None)


def test_rejects_name_the_line_and_weight_0_leaves_out(tmp_path: Path) -> None:
    records = [*conversations(6), *conversations(2, 1)]
    records[1]["loss_weight"] = -1
    records[3]["messages"][1]["loss_weight"] = "much"
    records[5]["loss_weight"] = 0
    path = pack_corpus(make_recipe(tmp_path, records, loss_weight="data", max_rejects=1))
    rejects = [json.loads(line) for line in (folder_of(path) / "rejects.jsonl").read_text().splitlines()]
    assert [(each["line"], each["code"]) for each in rejects] == [(2, "E206"), (4, "E206"), (6, "E236")]
    assert "loss_weight is -1; expected 0, or a number from 1e-06 to 1,000,000" in rejects[0]["message"]
    assert "messages[1].loss_weight is a string; expected a number" in rejects[1]["message"]
    assert "loss_weight is 0" in rejects[2]["message"]
    assert verify(path)


def test_turns_that_the_template_does_not_keep_apart_need_one_weight(tmp_path: Path) -> None:
    records = conversations(4)
    for message in records[0]["messages"]:
        message["loss_weight"] = 2
    records[1]["messages"][0]["loss_weight"] = 2
    path = pack_corpus(make_recipe(tmp_path, records, loss_weight="data", train_on="all", max_rejects=1))
    (reject,) = [json.loads(line) for line in (folder_of(path) / "rejects.jsonl").read_text().splitlines()]
    assert (reject["line"], reject["code"]) == (2, "E206")
    assert "give them the same weight" in reject["message"]


@pytest.mark.parametrize("container", ["csv", "parquet", "mapped", "alpaca"])
def test_weights_of_other_records(tmp_path: Path, container: str) -> None:
    """Weights are also read from other containers, formats, and names.

    They are a column of a table, text in CSV, a key with another name, or part of a record without messages.
    """
    name = "importance" if container == "mapped" else "loss_weight"
    rows = [{"instruction": f"What is {n}?", "output": f"It is {n}.", name: 0.5 * n + 1} for n in range(9)]
    source: dict[str, Any] = {"path": f"data.{container if container in ('csv', 'parquet') else 'jsonl'}"}
    if container == "mapped":
        source["columns"] = {"loss_weight": name}
    tmp_path.mkdir(exist_ok=True)
    file = tmp_path / source["path"]
    if container == "csv":
        lines = [",".join(map(str, row.values())) for row in rows]
        file.write_text("\n".join([",".join(rows[0]), *lines, "What?,That.,"]) + "\n")
    elif container == "parquet":
        parquet.write_table(pa.Table.from_pylist(rows), file)
    else:
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    path = pack_corpus(make_recipe(tmp_path, [], sources=[source], loss_weight="data", sequence_length=64))
    found = [float(w.max()) for _, pieces in sorted(pieces_of(path).items()) for *_, w in pieces]
    assert found == [0.5 * n + 1 for n in range(9)] + [1.0] * (container == "csv")
    assert not load_manifest(path).unused_keys


# -- what is on disk ---------------------------------------------------------------------------------------------------


def test_the_schema_and_the_token_files(tmp_path: Path) -> None:
    recipe = make_recipe(tmp_path, weighed(), loss_weight="data")
    path = pack_corpus(recipe)
    schema = pa.ipc.open_stream(shards_of(path)[0]).schema
    assert schema.names[-1] == "loss_weight"
    assert schema.field("loss_weight").type == pa.list_(pa.field("item", pa.float32(), nullable=False), 128)
    assert schema.metadata[b"format_version"] == b"3.0"
    table = TokenFiles([recipe.layout.token_file(key) for key in recipe.token_keys]).table(0)
    for tokens, ends, weights in zip(
        *(table[name].to_pylist() for name in ("tokens", "weight_ends", "weights")), strict=True
    ):
        assert ends[-1] == len(tokens)
        assert ends == sorted(set(ends))
        assert len(ends) == len(weights) <= 2, "a run for each turn, not a number for each token"


@pytest.mark.parametrize("mode", ["conversation", "both"])
def test_rebuild_and_repair(tmp_path: Path, mode: str) -> None:
    path = pack_corpus(make_recipe(tmp_path, weighed(), loss_weight=mode, validation=0.2))
    assert rebuild(path)
    for split in ("train", "validation"):
        shard = shards_of(path, split)[0]
        whole = shard.read_bytes()
        shard.write_bytes(whole[:-100] + bytes(100))
        assert [each.path for each in repair(path)] == [shard]
        assert shard.read_bytes() == whole


def damaged(path: Path, change: Any) -> str:
    """Return the error of `verify` after changed weights are signed again.

    The first shard is changed.
    """
    shard = shards_of(path)[0]
    reader = pa.ipc.open_stream(shard.read_bytes())
    table = reader.read_all()
    weights = table["loss_weight"].combine_chunks().flatten().to_numpy().copy()
    labels = table["labels"].combine_chunks().flatten().to_numpy()
    change(weights, labels)
    kind = table.schema.field("loss_weight").type
    table = table.set_column(
        4, table.schema.field("loss_weight"), pa.FixedSizeListArray.from_arrays(pa.array(weights), type=kind)
    )
    with pa.OSFile(str(shard), "w") as file, pa.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=5)
    sign(path)
    with pytest.raises(DataError) as caught:
        verify(path)
    return str(caught.value)


def set_first(weights: np.ndarray, where: np.ndarray, value: float) -> None:
    weights[np.flatnonzero(where)[0]] = value


DAMAGE = {
    "untrained": (lambda w, y: set_first(w, y == IGNORED, 1), "a token that is not trained on has a loss_weight"),
    "trained": (lambda w, y: set_first(w, y != IGNORED, 0), "a token that is trained on has no loss_weight"),
    "nan": (lambda w, y: set_first(w, y != IGNORED, np.nan), "a loss_weight is not a number"),
    "negative": (lambda w, y: set_first(w, y != IGNORED, -1), "a token that is trained on has no loss_weight"),
}


@pytest.mark.parametrize("kind", [*DAMAGE, "one", "all"])
def test_verify_finds_wrong_weights(tmp_path: Path, kind: str) -> None:
    if kind in DAMAGE:
        change, said = DAMAGE[kind]
        assert said in damaged(pack_small(tmp_path, loss_weight="both"), change)
    elif kind == "one":
        change = lambda w, y: set_first(w, (w > 0) & (np.roll(w, 1) > 0), 0.5)  # noqa: E731
        assert "a conversation has several values of loss_weight" in damaged(
            pack_small(tmp_path, loss_weight="conversation"), change
        )
        assert "loss_weight of train is recorded as" in damaged(pack_small(tmp_path / "b", loss_weight="both"), change)
    else:
        said = damaged(pack_small(tmp_path, loss_weight="conversation"), lambda w, y: np.multiply(w, 2, out=w))
        assert "does not match the number of trained tokens of its conversation" in said


@pytest.mark.parametrize("field", ["trained", "conversations", "loss_weight"])
def test_verify_finds_wrong_sums(tmp_path: Path, field: str) -> None:
    path = pack_small(tmp_path, loss_weight="both")

    def change(values: dict[str, Any]) -> None:
        values["loss_weight"]["train"][field] += 1

    sign(path, change)
    with pytest.raises(DataError, match="of train is recorded as"):
        verify(path)


def test_the_card_the_row_and_the_overview_name_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    path = pack_small(tmp_path, loss_weight="conversation")
    folder = folder_of(path)
    card = (folder / "README.md").read_text()
    assert "| `loss_weight` | float32[64] |" in card
    assert 'weights, labels = batch.pop("loss_weight")[:, 1:], batch.pop("labels")[:, 1:]' in card
    found = datasets.load_dataset(str(folder), split="train", cache_dir=str(tmp_path / "cache"))
    assert np.array_equal(np.array(found["loss_weight"]), rows_of(path)["loss_weight"])
    shown = packcorpus(tmp_path, "inspect", path, "--row", "0").stdout
    least, most = (float(weight) for weight in row_of_split(path, 0, "train").conversations[0]["loss_weight"])
    assert least == most > 0
    assert f"weight {least:.4g}" in shown
    assert "loss weight" in packcorpus(tmp_path, "inspect", path).stdout
    check = packcorpus(tmp_path, "check", tmp_path / "corpus.yaml").stdout
    assert "the same total for every conversation" in check


def test_check_predicts_rejects_of_weights(tmp_path: Path) -> None:
    records = weighed(20)
    records[4]["loss_weight"] = -1
    make_recipe(tmp_path, records, loss_weight="both", max_rejects=1)
    found = json.loads(packcorpus(tmp_path, "check", "corpus.yaml", "--json").stdout)
    assert "bad_weight" in json.dumps(found)
    make_recipe(tmp_path, records)
    said = packcorpus(tmp_path, "check", "corpus.yaml").stdout
    assert "loss_weight: data" in " ".join(said.split())


@pytest.mark.parametrize(("mode", "instead"), [("data", "none"), ("both", "conversation"), ("conversation", "")])
def test_check_names_data_without_weights(mode: str, instead: str, tmp_path: Path) -> None:
    """The data has weights under another name, so the setting has no effect."""
    records: list[dict[str, Any]] = [{**record, "importance": 2} for record in conversations(20)]
    own = [{"path": "chat.jsonl", "columns": {"loss_weight": "importance"}}]
    for settings_of_source, warns in (({}, bool(instead)), ({"sources": own}, False)):
        make_recipe(tmp_path, records, loss_weight=mode, **(settings_of_source if instead else {}))
        said = " ".join(packcorpus(tmp_path, "check", "corpus.yaml").stdout.split())
        assert (f"loss_weight: {mode}: no record of the sample has a weight other than 1" in said) == warns
        assert (f"the setting has the same effect as loss_weight: {instead};" in said) == warns


@given(st.lists(st.floats(0, 1e6, width=32), max_size=50))
def test_a_sum_does_not_depend_on_the_order(values: list[float]) -> None:
    weights = np.array(values, np.float32)
    assert sum_of_weights(weights) == sum_of_weights(weights[::-1])


def test_rows_have_the_usual_length(tmp_path: Path) -> None:
    rows = rows_of(pack_small(tmp_path, loss_weight="both"))
    assert {values.shape[1] for values in rows.values()} == {LENGTH}
