"""Unused keys from every container, part, and column reach the manifest.

Other data stops the run at its first record.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.containers import WRITERS, as_arrow, as_parquet
from support.small_corpus import conversations, make_recipe, pack_corpus

from packcorpus.tasks.core.errors import DataError, UsageError
from packcorpus.tasks.corpus.summary import MOST_KEYS, unused_keys
from packcorpus.tasks.dry_run.dry_run import predict
from packcorpus.tasks.recipe import Recipe
from packcorpus.tasks.sources.model import Source
from packcorpus.tasks.storage.manifest import Manifest, load_manifest
from packcorpus.tasks.verification.rebuild import rebuild

NOTES: tuple[str | None, ...] = ("x", "", None)
ANSWERED = [
    {"prompt": f"{n} + 1?", "completion": f"{n + 1}", "response": "", "id": str(n), "note": NOTES[n % 3], "none": None}
    for n in range(60)
]
CHATS = [chat | {"id": "a", "score": n % 2, "images": []} for n, chat in enumerate(conversations(60))]


def recipe_for(folder: Path, name: str, data: bytes, source: dict[str, Any] | None = None, **settings: Any) -> Recipe:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(data)
    return make_recipe(folder, [], sources=[{"path": name} | (source or {})], **settings)


def packed(*given: Any, **settings: Any) -> Manifest:
    return load_manifest(pack_corpus(recipe_for(*given, **settings)))


@pytest.mark.parametrize("container", WRITERS)
def test_the_counts_are_those_of_the_records_in_every_container(container: str, tmp_path: Path) -> None:
    name, data = f"a.{container}", WRITERS[container](ANSWERED)
    for part_size in (1024, 1 << 20):
        made = recipe_for(tmp_path / str(part_size), name, data, part_size=part_size)
        if container == "jsonl":
            assert (len(made.parts) > 1) == (part_size == 1024)
        manifest = load_manifest(pack_corpus(made))
        assert manifest.unused_keys == {name: {"id": 60, "note": 20}}
        found = predict(made.config, made.folder, tmp_path)
        # In tables, every record of the sample counts for a column that is not read.
        tables = {"id": 60, "note": 60, "none": 60}
        assert found.noticed["unused_keys"] == {
            name: tables if container in ("parquet", "arrow") else {"id": 60, "note": 20}
        }


def test_what_has_no_unused_keys_has_the_manifest_of_before(tmp_path: Path) -> None:
    manifest = load_manifest(pack_corpus(make_recipe(tmp_path, conversations(60))))
    assert "unused_keys" not in manifest.noticed
    assert manifest.unused_keys == {}
    assert "ignore" not in manifest.config["sources"][0]
    assert unused_keys(manifest.unused_keys) == []


@pytest.mark.parametrize("part_size", [2000, 1 << 20])
def test_other_data_stops_the_run_at_its_first_record_and_ignored_it_is_counted(part_size: int, tmp_path: Path) -> None:
    records = [*CHATS[:40], CHATS[40] | {"images": ["cat.png"], "kto_tag": True}, *CHATS[41:]]
    made = make_recipe(tmp_path / "a", records, part_size=part_size)
    for work in (pack_corpus, lambda made: predict(made.config, made.folder, tmp_path)):
        with pytest.raises(DataError, match=r"^chat.jsonl:41: the record has images: .* ignore: \[images\]") as caught:
            work(made)
        assert caught.value.reason == "media_data"
    half = make_recipe(tmp_path / "a", records, sources=[{"path": "chat.jsonl", "ignore": ["images"]}])
    with pytest.raises(DataError, match=r"^chat.jsonl:41: the record has kto_tag: this is preference data"):
        pack_corpus(half)
    source = {"path": "chat.jsonl", "ignore": ["kto_tag", "images"]}
    decided = make_recipe(tmp_path / "b", records, part_size=part_size, sources=[source])
    assert decided.corpus_key != made.corpus_key
    assert {*map(decided.tokens_key, decided.parts)}.isdisjoint(map(made.tokens_key, made.parts))
    manifest = load_manifest(pack_corpus(decided))
    assert manifest.unused_keys == {"chat.jsonl": {"id": 60, "score": 60, "images": 1, "kto_tag": 1}}
    assert manifest.ledger.conversations.packed == 60
    assert ": identical" in rebuild(decided.published)
    assert predict(decided.config, decided.folder, tmp_path).noticed["unused_keys"] == manifest.unused_keys


def test_parts_of_messages_that_are_ignored_leave_the_text(tmp_path: Path) -> None:
    plain = conversations(30)
    records = json.loads(json.dumps(plain))
    for record in records:
        text = record["messages"][0]["content"]
        record["messages"][0]["content"] = [
            {"type": "image_url", "image_url": {"url": "x"}},
            {"type": "text", "text": text},
        ]
    with pytest.raises(DataError, match=r"chat.jsonl:1: a content part has type image_url: this is data with images"):
        pack_corpus(make_recipe(tmp_path / "a", records))
    trained = make_recipe(tmp_path / "d", records, tokenizer=None)
    for work in (pack_corpus, lambda made: predict(made.config, made.folder, tmp_path)):
        with pytest.raises(DataError, match=r"chat.jsonl:1: a content part has type image_url"):
            work(trained)
    source = {"path": "chat.jsonl", "ignore": ["image_url"]}
    manifest = load_manifest(pack_corpus(make_recipe(tmp_path / "b", records, sources=[source])))
    assert manifest.unused_keys == {"chat.jsonl": {"messages[].content[].image_url": 30}}
    without = load_manifest(pack_corpus(make_recipe(tmp_path / "c", plain)))
    assert manifest.ledger == without.ledger
    shards = [[shard.sha256 for split in one.splits.values() for shard in split.shards] for one in (manifest, without)]
    assert len(shards[0]) == len(shards[1])


def as_feather(records: list[dict[str, Any]]) -> bytes:
    return as_arrow(records, pa.ipc.new_file, rows=7)


@pytest.mark.parametrize("write", [lambda records: as_parquet(records, rows=7), as_feather, as_arrow])
def test_columns_that_are_not_read_are_counted(write: Any, tmp_path: Path) -> None:
    values: list[dict[str, Any]] = [
        {"number": 0, "flag": False, "words": [], "text_of_it": "", "bytes": b"", "map": {"a": None}, "late": None},
        {"number": None, "flag": None, "words": ["a"], "text_of_it": "a", "bytes": b"a", "map": None, "late": 1},
        {"number": 1, "flag": True, "words": None, "text_of_it": None, "bytes": None, "map": {"a": 1}, "late": None},
    ]
    records = [chat | values[n % 3] for n, chat in enumerate(conversations(30))]
    name = "a.parquet" if write(records).startswith(b"PAR1") else "a.arrow"
    counts = {"number": 20, "flag": 20, "map": 20, "words": 10, "text_of_it": 10, "bytes": 10, "late": 10}
    assert packed(tmp_path, name, write(records)).unused_keys == {name: counts}


def test_a_column_of_other_data_counts_only_where_it_has_a_value(tmp_path: Path) -> None:
    records = [chat | {"images": ["x"] if n == 25 else [], "chosen": None} for n, chat in enumerate(conversations(30))]
    with pytest.raises(DataError, match=r"^a.parquet:26: the record has images"):
        packed(tmp_path / "a", "a.parquet", as_parquet(records, rows=7), part_size=1024)
    manifest = packed(tmp_path / "b", "a.parquet", as_parquet(records, rows=7), {"ignore": ["images"]})
    assert manifest.unused_keys == {"a.parquet": {"images": 1}}
    dictionary = pa.table({"text": ["a b c"] * 9, "kind": pa.array(["x", "", None] * 3).dictionary_encode()})
    pq.write_table(dictionary, tmp_path / "c.parquet")
    assert packed(tmp_path / "c", "c.parquet", (tmp_path / "c.parquet").read_bytes()).unused_keys == {
        "c.parquet": {"kind": 3}
    }


@pytest.mark.parametrize(
    ("record", "columns"),
    [
        (
            {"question": "a", "chosen_response": "b", "rejected_response": "c"},
            {"prompt": "question", "completion": "chosen_response"},
        ),
        ({"chosen": "b", "rejected": "c"}, {"text": "chosen"}),
        (
            dict.fromkeys(("chosen_messages", "rejected_messages"), conversations(1)[0]["messages"]),
            {"messages": "chosen_messages"},
        ),
    ],
)
def test_preference_data_without_a_format_is_named_and_its_fix_works(
    record: dict[str, Any], columns: dict[str, str], tmp_path: Path
) -> None:
    mapped = ", ".join(f"{ours}: {theirs}" for ours, theirs in columns.items())
    rejected = next(key for key in record if key.startswith("rejected"))
    paste = f"columns: {{{mapped}}}  and  ignore: [{rejected}]"
    with pytest.raises(DataError, match="preference data") as caught:
        make_recipe(tmp_path / "a", [record] * 20)
    assert paste in str(caught.value)
    source = {"path": "chat.jsonl", "columns": columns, "ignore": [rejected]}
    manifest = load_manifest(pack_corpus(make_recipe(tmp_path / "b", [record] * 20, sources=[source])))
    assert manifest.unused_keys == {"chat.jsonl": {rejected: 20}}


def test_ignore_names_only_what_would_stop_the_run(tmp_path: Path) -> None:
    for names, message in (
        (["system"], "only these keys and content parts can be: image, "),
        (["imagse"], "did you mean image"),
    ):
        with pytest.raises(UsageError, match=message):
            make_recipe(tmp_path, CHATS, sources=[{"path": "chat.jsonl", "ignore": names}])
    assert Source(path="a", ignore=["label", "images", "label"]).ignore == ["images", "label"]


def test_a_list_of_many_keys_and_sources_is_short() -> None:
    lines = unused_keys({f"data/{n}.jsonl": {f"key{m}": m for m in range(1, 20)} | {"(others)": 99} for n in range(9)})
    assert lines[0] == f"0.jsonl: {', '.join(f'key{n} {n}' for n in range(19, 19 - MOST_KEYS, -1))}, and 12 more"
    assert lines[-1] == "and in 4 more sources"
    assert unused_keys({"a\n\x1b": {"b": 1}}) == ["a\\n\\x1b: b 1"]
