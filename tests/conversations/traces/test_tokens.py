"""Recorded token ids are packed as they are, with their mask."""

from __future__ import annotations

import random
import shutil
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from conversations.traces.session_records import write
from support.commands import packcorpus
from support.containers import as_parquet
from support.packed_rows import folder_of, shards_of
from support.small_corpus import EOS, conversations, make_recipe, pack_corpus
from support.tokenizer_kinds import kind_path, open_kind

from packcorpus.tasks.conversations.formats import detect, read_record
from packcorpus.tasks.conversations.model import RecordedTokens, content_digest, whole_text
from packcorpus.tasks.core.errors import Reject, UsageError
from packcorpus.tasks.dry_run.dry_run import predict
from packcorpus.tasks.encoders.tokenizer_files import find_tokenizer, open_encoder
from packcorpus.tasks.storage.files import sha256_of
from packcorpus.tasks.storage.manifest import load_manifest
from packcorpus.tasks.verification.rebuild import rebuild
from packcorpus.tasks.verification.verify import verify

IGNORED = -100
Record = dict[str, Any]
Piece = tuple[list[int], list[int]]  # ids and labels

OURS = sha256_of(kind_path("sp_bpe_chatml"))
OTHER = "0" * 64


def read(record: Record) -> RecordedTokens:
    found = read_record(record, "tokens").recorded
    assert found
    return found


GOLDEN: list[tuple[Record, tuple[int, ...], tuple[bool, ...]]] = [
    ({"input_ids": [5, 6, 7], "labels": [-100, 6, 7]}, (5, 6, 7), (False, True, True)),
    ({"input_ids": [5, 6, 7], "loss_mask": [0, 1, 0]}, (5, 6, 7), (False, True, False)),
    ({"input_ids": [5, 6, 7], "completion_mask": [0, 0, 1]}, (5, 6, 7), (False, False, True)),
    ({"input_ids": [5, 6], "assistant_masks": [False, True], "attention_mask": [1, 1]}, (5, 6), (False, True)),
    ({"token_ids": [5, 6], "mask": [0.0, 1.0], "logprobs": [0.0, -1.5]}, (5, 6), (False, True)),
    ({"token_ids": [5, 6], "sampled_mask": [False, True]}, (5, 6), (False, True)),
    ({"input_ids": [5, 6], "labels": [-100, 6], "loss_mask": [0, 1]}, (5, 6), (False, True)),
    ({"prompt_ids": [5], "completion_ids": [6, 7]}, (5, 6, 7), (False, True, True)),
    (
        {"prompt_ids": [5, 8], "prompt_mask": [0, 1], "completion_ids": [6, 7], "completion_mask": [1, 0]},
        (5, 8, 6, 7),
        (False, True, True, False),
    ),
    ({"prompt_ids": [5], "completion_ids": [6, 7], "env_mask": [1, 0]}, (5, 6, 7), (False, True, False)),
    ({"prompt_ids": [], "completion_ids": [6, 7]}, (6, 7), (True, True)),
    ({"input_ids": "[5, 6]", "labels": "[-100, 6]"}, (5, 6), (False, True)),
]


@pytest.mark.parametrize(("record", "ids", "trained"), GOLDEN)
def test_golden(record: Record, ids: tuple[int, ...], trained: tuple[bool, ...]) -> None:
    assert detect(record) == "tokens"
    assert read(record) == RecordedTokens(ids, trained)
    assert read(record | {"tokenizer_sha256": OURS}) == RecordedTokens(ids, trained, OURS)


def test_a_record_with_messages_or_without_a_mask_is_not_one_with_ids() -> None:
    ids = {"input_ids": [5, 6], "labels": [-100, 6]}
    assert detect(ids | {"messages": []}) == "messages"
    assert detect(ids | {"text": "a"}) == "text"
    assert detect({"input_ids": [5, 6], "attention_mask": [1, 1]}) is None
    assert detect({"prompt_ids": [5]}) is None


BAD: list[tuple[Record, str, str]] = [
    ({"input_ids": [5, 6]}, "missing_key", "labels is missing"),
    ({"labels": [5]}, "missing_key", "input_ids is missing"),
    ({"input_ids": [], "labels": []}, "empty", "the record holds no ids"),
    ({"input_ids": 5, "labels": []}, "bad_ids", "input_ids: expected a list of numbers, found a number"),
    ({"input_ids": "[5", "labels": []}, "bad_ids", "input_ids is not JSON"),
    ({"input_ids": [5, -1], "labels": [5, 5]}, "bad_ids", "input_ids[1] is -1; expected an id of 0 or more"),
    ({"input_ids": [5, True], "labels": [5, 1]}, "bad_ids", "input_ids[1] is True; expected an id"),
    ({"input_ids": [5, "6"], "labels": [5, 6]}, "bad_ids", "input_ids[1] is a string; expected an id"),
    ({"input_ids": [5, 1.0], "labels": [5, 1]}, "bad_ids", "input_ids[1] is 1.0; expected an id"),
    ({"input_ids": [5, 6], "labels": [-100]}, "bad_ids", "labels has 1 values, but input_ids has 2; one is needed"),
    (
        {"input_ids": [5, 6, 7], "labels": [6, 7, -100]},
        "bad_ids",
        "labels[0] is 6; expected 5, the id at its place, or -100; labels must not be shifted",
    ),
    ({"input_ids": [5, 6], "loss_mask": [0, 2]}, "bad_ids", "loss_mask[1] is 2; expected 0 or 1"),
    ({"input_ids": [5, 6], "loss_mask": [0, None]}, "bad_ids", "loss_mask[1] is null; expected 0 or 1"),
    ({"input_ids": [5, 6], "loss_mask": [0, 0.5]}, "bad_ids", "loss_mask[1] is 0.5; expected 0 or 1"),
    ({"input_ids": [5, 6], "loss_mask": [0, 1], "labels": [5, 6]}, "bad_ids", "loss_mask and labels differ; keep one"),
    (
        {"input_ids": [5, 0], "loss_mask": [1, 0], "attention_mask": [1, 0]},
        "bad_ids",
        "attention_mask leaves ids out; remove this padding from input_ids and its mask",
    ),
    ({"prompt_ids": [5], "completion_ids": None}, "missing_key", "completion_ids is null"),
    ({"prompt_ids": [5], "completion_ids": [6], "completion_mask": []}, "bad_ids", "completion_mask has 0 values"),
    (
        {"prompt_ids": [5], "completion_ids": [6], "completion_mask": [1], "env_mask": [1]},
        "bad_ids",
        "the record has completion_mask and env_mask; keep one",
    ),
    ({"input_ids": [5], "labels": [5], "tokenizer_sha256": "abc"}, "bad_ids", 'tokenizer_sha256 is "abc"; expected'),
]


@pytest.mark.parametrize(("record", "code", "message"), BAD)
def test_a_bad_record_is_rejected_with_its_value(record: Record, code: str, message: str) -> None:
    with pytest.raises(Reject) as caught:
        read_record(record, "tokens")
    assert caught.value.reason == code
    assert message in caught.value.message


def test_the_digest_is_of_the_ids_alone() -> None:
    def digest(record: Record) -> int:
        return content_digest(whole_text(read_record(record, "tokens")).encode())

    assert digest({"input_ids": [5, 6], "labels": [-100, 6]}) == digest({"prompt_ids": [5], "completion_ids": [6]})
    assert digest({"input_ids": [5, 6], "labels": [-100, 6]}) != digest({"input_ids": [56], "labels": [56]})


# -- in a corpus -------------------------------------------------------------------------------------------------------


def packed(folder: Path, records: list[Record], source: Record | None = None, **given: Any) -> Path:
    folder.mkdir(exist_ok=True)
    write(folder / "ids.jsonl", records)
    settings = {"validation": 0, "sequence_length": 64} | given
    return pack_corpus(make_recipe(folder, [], sources=[{"path": "ids.jsonl"} | (source or {})], **settings))


def pieces_of(path: Path) -> dict[int, list[Piece]]:
    """Return the ids and labels of the pieces of each record, counted from 0."""
    index = pa.ipc.open_stream(folder_of(path) / "index.arrow").read_all().to_pylist()
    shards = [pa.ipc.open_stream(shard).read_all() for shard in shards_of(path)]
    found = defaultdict(list)
    for each in index:
        if each["row"] is not None:
            inside = slice(each["start"], each["start"] + each["length"])
            ids, labels = (shards[each["shard"]][name][each["row"]].as_py() for name in ("input_ids", "labels"))
            found[each["record"] - 1].append((ids[inside], labels[inside]))
    return dict(found)


def test_the_rows_have_the_ids_and_the_mask_as_they_are(tmp_path: Path) -> None:
    source = random.Random(0)
    records: list[Record] = []
    for number in range(40):
        ids = source.choices(range(5, 99), k=source.randint(2, 20))
        ids[-1] = EOS if number % 2 else ids[-1]
        records.append({"input_ids": ids, "loss_mask": [*source.choices((0, 1), k=len(ids) - 1), 1]})
    records[0] |= {"loss_mask": [1] + [0] * (len(records[0]["input_ids"]) - 1)}  # nothing comes before the first token
    records[1] |= {"loss_mask": [0] * len(records[1]["input_ids"])}
    path = packed(tmp_path, records, max_rejects=0.5)
    verify(path)
    assert load_manifest(path).ledger.conversations.rejected == {"no_trained_tokens": 2}
    found = pieces_of(path)
    assert sorted(found) == list(range(2, 40))
    for number, pieces in found.items():
        ids, mask = records[number]["input_ids"], records[number]["loss_mask"]
        labels = [token if flag else IGNORED for token, flag in zip(ids, mask, strict=True)]
        labels[0] = IGNORED
        separator = [EOS] * (number % 2 == 0)
        assert pieces == [(ids + separator, labels + [IGNORED] * len(separator))]


def test_the_ids_of_a_corpus_make_the_same_rows(tmp_path: Path) -> None:
    """Recorded tokens give the same pieces as their conversations."""
    texts = pack_corpus(make_recipe(tmp_path / "texts", conversations(60), validation=0, sequence_length=128))
    pieces = pieces_of(texts)
    records: list[Record] = [{"input_ids": ids, "labels": labels} for _, [(ids, labels)] in sorted(pieces.items())]
    again = packed(tmp_path / "ids", records, sequence_length=128)
    assert pieces_of(again) == {n: piece for n, (_, piece) in enumerate(sorted(pieces.items()))}
    verify(again)
    tokens = [load_manifest(path).ledger.tokens for path in (texts, again)]
    assert tokens[0].packed == tokens[1].packed
    assert tokens[0].trained == tokens[1].trained


@pytest.mark.parametrize("overlong", ["truncate", "split", "drop"])
def test_plan_verify_rebuild_and_export_are_as_usual(overlong: str, tmp_path: Path) -> None:
    source = np.random.default_rng(0)
    records = []
    for size in source.integers(3, 100, 40).tolist():
        ids = source.integers(5, 99, size).tolist()
        records.append({"prompt_ids": ids[: size // 2], "completion_ids": [*ids[size // 2 :], EOS]})
    (tmp_path / "ids.parquet").write_bytes(as_parquet(records))
    made = make_recipe(tmp_path, [], sources=["ids.parquet"], sequence_length=64, overlong=overlong, validation=0.2)
    predicted = predict(made.config, made.folder, tmp_path)
    path = pack_corpus(made)
    verify(path)
    manifest = load_manifest(path)
    assert predicted.ledger.conversations.packed == manifest.ledger.conversations.packed
    assert ": identical" in rebuild(path)
    done = packcorpus(tmp_path, "export", path, "--to", "trl")
    assert done.returncode == 0, done.stderr


def test_weights_of_records_are_read(tmp_path: Path) -> None:
    records = [
        {"input_ids": [5, 6, EOS], "labels": [-100, 6, EOS], "loss_weight": 0.5},
        {"input_ids": [7, 8, EOS], "labels": [-100, 8, EOS]},
        {"input_ids": [9, 9, EOS], "labels": [-100, 9, EOS], "loss_weight": 0},
    ]
    path = packed(tmp_path, records, loss_weight="data", max_rejects=0.5)
    verify(path)
    [shard] = [pa.ipc.open_stream(each).read_all() for each in shards_of(path)]
    assert sorted(set(shard["loss_weight"].to_pylist()[0])) == [0.0, 0.5, 1.0]
    assert load_manifest(path).ledger.conversations.rejected == {"no_trained_tokens": 1}


# -- the tokenizer -----------------------------------------------------------------------------------------------------


def test_ids_of_another_tokenizer_are_rejected(tmp_path: Path) -> None:
    good = {"input_ids": [5, 6, EOS], "labels": [-100, 6, EOS]}
    size = open_kind("sp_bpe_chatml").vocab_size
    records = [
        good | {"tokenizer_sha256": OURS},
        good | {"tokenizer_sha256": OTHER},
        {"input_ids": [5, size], "labels": [-100, size]},
        {"input_ids": [5, size - 1], "labels": [-100, size - 1]},
    ]
    path = packed(tmp_path, records, max_rejects=0.5)
    assert load_manifest(path).ledger.conversations.rejected == {"bad_ids": 2}
    rejects = (folder_of(path) / "rejects.jsonl").read_text()
    assert f"tokenizer_sha256 is {OTHER}, but the tokenizer of the config has {OURS}" in rejects
    assert f"id {size} at place 1 is not in the vocabulary of {size} ids" in rejects


def test_a_source_can_name_the_tokenizer(tmp_path: Path) -> None:
    good = [{"input_ids": [5, 6, EOS], "labels": [-100, 6, EOS]}]
    path = packed(tmp_path, good, {"tokenizer_sha256": OURS})
    assert load_manifest(path).config["sources"][0]["tokenizer_sha256"] == OURS
    with pytest.raises(UsageError, match=rf"ids.jsonl: tokenizer_sha256 is {OTHER}, but the tokenizer of the config"):
        packed(tmp_path, good, {"tokenizer_sha256": OTHER})
    with pytest.raises(UsageError, match="applies only to format tokens"):
        make_recipe(tmp_path, conversations(3), sources=[{"path": "chat.jsonl", "tokenizer_sha256": OURS}])


def test_a_tokenizer_of_several_files_has_two_digests() -> None:
    for kind in ("sp_bpe_chatml", "hf_byte_level"):
        files = find_tokenizer(kind_path(kind))
        encoder = open_encoder(files)
        assert encoder.digests() == {files.sha256(), sha256_of(files.main)}


@pytest.mark.parametrize(
    ("setting", "message"),
    [({"packing": False}, "with packing: false a row holds text"), ({"tokenizer": None}, "set tokenizer to the one")],
)
def test_a_config_that_cannot_have_ids_is_refused(setting: Record, message: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=f"ids.jsonl: has recorded token ids.*{message}"):
        packed(tmp_path, [{"input_ids": [5, 6], "labels": [-100, 6]}], **setting)


def test_inspect_and_init_know_the_format(tmp_path: Path) -> None:
    write(tmp_path / "ids.jsonl", [{"input_ids": [5, 6, EOS], "labels": [-100, 6, EOS]}] * 3)
    done = packcorpus(tmp_path, "inspect", "ids.jsonl")
    assert "3 recorded token ids, 2 of them trained on" in done.stdout
    done = packcorpus(tmp_path, "init", "ids.jsonl")
    assert "ids.jsonl: has recorded token ids, and there is no tokenizer near it" in done.stderr
    shutil.copy(kind_path("sp_bpe_chatml"), tmp_path / "tiny.model")  # init finds it
    done = packcorpus(tmp_path, "init", "ids.jsonl", "--output", "c.yaml")
    assert done.returncode == 0, done.stderr
    assert "# 3 conversations, tokens" in (tmp_path / "c.yaml").read_text()
    assert packcorpus(tmp_path, "check", "c.yaml").returncode == 0


def test_a_turn_is_a_run_of_the_mask(tmp_path: Path) -> None:
    ids = [5, 6, 7, 8, 9, EOS]
    records = [{"input_ids": ids, "loss_mask": mask} for mask in ([0, 0, 1, 1, 0, 1], [0, 0, 0, 1, 1, 1])]
    path = packed(tmp_path, records, min_turns=4)
    assert load_manifest(path).ledger.conversations.dropped["min_turns"] == 1
