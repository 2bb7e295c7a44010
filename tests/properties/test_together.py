"""Any combination of settings is refused by name, or gives the right corpus.

settings ─┬─ refused: the message names the settings that exclude each other
          └─ packed, twice ─▶ rows, ledger, weights as tests/reference has them; the same bytes; verified; repaired
"""

from __future__ import annotations

import json
import re
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from reference.corpus import expected
from reference.rows import Piece, pieces_of, weights_of
from reference.tokens import Encoded
from support.differential.comparison import library_of
from support.packed_rows import folder_of
from support.profiles import examples
from support.row_shapes import IGNORED, Shaped, check_corpus, read_corpus
from support.small_corpus import conversations, make_recipe, make_shards_small, pack_corpus

from tasks.config import load_config
from tasks.core.errors import UsageError
from tasks.storage.manifest import Manifest, load_manifest
from tasks.verification.repair import repair
from tasks.verification.verify import verify

Given = dict[str, Any]
Message = dict[str, str]

OPTIONS: Given = {
    "sequence_length": st.sampled_from([64, 96, [64], [48, 96], [32, 64, 128]]),
    "mix": st.sampled_from(["tokens", "blocks"]),
    "align": st.sampled_from([1, 4, 16]),
    "padding": st.sampled_from(["row", "none"]),
    "loss_weight": st.sampled_from(["none", "data", "conversation", "both"]),
    "balance": st.fixed_dictionaries({"ranks": st.sampled_from([2, 3])}, optional={"rows_per_rank": st.just(2)}),
    "neighbors": st.sampled_from(["random", "similar", "distinct"]),
    "overlong": st.sampled_from(["truncate", "turns", "split", "drop"]),
    "packing": st.sampled_from([True, True, False]),
    "validation": st.sampled_from([0.0, 0.3]),
    "epochs": st.sampled_from([1, 2]),
    "duplicates": st.sampled_from(["keep", "drop"]),
    "seed": st.integers(0, 9),
    "train_on": st.sampled_from(["assistant", "last", "rounds", "all"]),
    "turns": st.sampled_from(["auto", "apart"]),
    "sources": st.sampled_from([[{"path": "chat.jsonl"}], [{"path": "chat.jsonl", "weight": 2}]]),
}
UNUSUAL: Given = {
    "sequence_length": [48, 96], "mix": "blocks", "align": 16, "padding": "none", "loss_weight": "both",
    "balance": {"ranks": 2}, "neighbors": "distinct", "overlong": "split", "packing": False,
    "validation": 0.3, "epochs": 2, "duplicates": "drop", "seed": 1,
    "train_on": "last", "turns": "apart", "sources": [{"path": "chat.jsonl", "weight": 2}],
}  # fmt: skip
TOGETHER = st.fixed_dictionaries({}, optional=OPTIONS)


def refusals(chosen: Given) -> dict[str, str]:
    """Return the settings that the config must refuse, with their messages.

    The messages are regular expressions.
    """
    lengths = chosen.get("sequence_length", 64)
    several = isinstance(lengths, list) and len(lengths) > 1
    usual = {"mix": "tokens", "align": 1, "padding": "row", "loss_weight": "none", "neighbors": "random"}
    is_set = {name for name in (*usual, "balance") if name in chosen and chosen[name] != usual.get(name)}
    found = {}
    if not chosen.get("packing", True):
        further = [("epochs", chosen.get("epochs", 1) > 1), ("overlong", chosen.get("overlong") in ("split", "turns"))]
        needy = [*sorted(is_set - {"mix"}), *[name for name, matters in further if matters]]
        found |= {name: f"{name}.* requires packing: true" for name in needy}
        if several:
            found["sequence_length"] = "sequence_length.* requires packing: true"
    if (chosen.get("overlong"), chosen.get("train_on")) == ("turns", "all"):
        found.setdefault("overlong", "overlong: turns and train_on: all cannot be combined")
    if several:
        for name in is_set & {"align", "balance", "padding"}:
            found.setdefault(name, f"sequence_length.* and {name} cannot be combined")
    if "padding" in is_set:
        for name in is_set & {"loss_weight", "balance"}:
            found.setdefault(name, f"padding and {name} cannot be set together")
    if "mix" in is_set and not several:
        found["mix"] = "mix: blocks requires several lengths"
    return found


@settings(max_examples=examples(80), deadline=None)
@given(chosen=TOGETHER)
def test_a_config_is_read_or_refused_by_name(chosen: Given, tmp_path_factory: pytest.TempPathFactory) -> None:
    check_config(tmp_path_factory.getbasetemp() / "together.yaml", chosen)


def test_every_pair_of_settings_is_read_or_refused_by_name(tmp_path: Path) -> None:
    for pair in combinations(UNUSUAL.items(), 2):
        check_config(tmp_path / "pair.yaml", dict(pair))


def check_config(file: Path, chosen: Given) -> None:
    file.write_text(yaml.safe_dump({"sources": [{"path": "x.jsonl"}], "sequence_length": 64, **chosen}))
    refused = refusals(chosen)
    if not refused:
        load_config(file)
        return
    with pytest.raises(UsageError) as caught:
        load_config(file)
    assert any(re.search(said, str(caught.value)) for said in refused.values())


# -- corpora -----------------------------------------------------------------------------------------------------------


def records_of(count: int) -> list[Given]:
    """Return conversations with weights.

    Some are too long for a row, and four are in the list twice.
    """
    records = conversations(count - 4, seed=3, longest=16)
    for number, record in enumerate(records):
        record["loss_weight"] = number % 4 / 2 + 0.5
    return [*records, *records[:4]]


RECORDS = records_of(40)
READ = [(number, record) for number, record in enumerate(RECORDS, 1)]
EOS = library_of("sp_bpe_chatml").eos


@st.composite
def packed_settings(draw: st.DrawFn) -> Given:
    """Draw settings that can be combined; refused settings are left out."""
    chosen: Given = {"sequence_length": 64} | draw(TOGETHER)
    while refused := refusals(chosen):
        for name in refused:
            del chosen[name]
        chosen.setdefault("sequence_length", 64)
    if chosen.get("train_on") == "all":  # each turn of a user would have a sample, too
        chosen.pop("turns", None)
    return chosen


@cache
def samples_of(train_on: str, apart: bool) -> list[list[tuple[list[Message], Encoded]]]:
    """Return the samples of each record, as messages and encoded tokens.

    With `apart`, each sample ends with a trained turn, which is the only turn of the sample that is trained on.
    """
    found = []
    for record in RECORDS:
        messages = record["messages"]
        ends = [len(messages)]
        if apart and train_on == "assistant":
            ends = [at for at, message in enumerate(messages, 1) if message["role"] == "assistant"]
        found.append([messages[:end] for end in ends])
    trained = "last" if apart else train_on
    flat = [{"messages": messages} for own in found for messages in own]
    encoded = iter(expected(flat, "messages", "chatml", library_of("sp_bpe_chatml"), trained))
    return [[(messages, sample) for messages in own for sample in next(encoded) or [([], [])]] for own in found]


def samples_for(chosen: Given) -> list[list[tuple[list[Message], Encoded]]]:
    return samples_of(chosen.get("train_on", "assistant"), chosen.get("turns") == "apart")


def copies(chosen: Given) -> int:
    return int(chosen.get("sources", [{}])[0].get("weight", 1))


def pack(folder: Path, chosen: Given, **other: Any) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        make_shards_small(patch, shard=4000)
        return pack_corpus(make_recipe(folder, RECORDS, max_rejects=1, **chosen, **other))


@settings(max_examples=examples(24), deadline=None)
@given(chosen=packed_settings(), which=st.integers(0, 99), damage=st.sampled_from(["delete", "cut", "flip"]))
def test_a_corpus_is_what_the_reference_says_and_repaired(
    chosen: Given, which: int, damage: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    one, other = (tmp_path_factory.mktemp("corpus") for _ in range(2))
    path = pack(one, chosen)
    assert verify(path)
    manifest = load_manifest(path)
    if manifest.format_version == "2.0":
        check_conversations(path, chosen)
    else:
        found = read_corpus(path)
        check_corpus(found)
        check_pieces(found, chosen)
    check_ledger(manifest)
    again = pack(other, chosen, part_size=1 << 11)
    assert again.read_bytes() == path.read_bytes(), "the manifest has the checksums of all shards"

    names = [shard.path for split in manifest.splits.values() for shard in split.shards]
    shard = folder_of(path) / names[which % len(names)]
    whole = shard.read_bytes()
    shard.unlink()
    if damage != "delete":
        shard.write_bytes(whole[: len(whole) // 2] + (b"" if damage == "cut" else flipped(whole[len(whole) // 2 :])))
    with pytest.MonkeyPatch.context() as patch:
        make_shards_small(patch, shard=4000)
        assert [file.path for file in repair(path)] == [shard]
    assert shard.read_bytes() == whole


def flipped(data: bytes) -> bytes:
    return bytes([data[0] ^ 1]) + data[1:]


def kept(chosen: Given) -> list[int]:
    """Return the numbers of the records, from 1, without dropped duplicates."""
    seen: set[str] = set()
    found = []
    for number, record in READ:
        content = json.dumps(record["messages"])
        if content not in seen or chosen.get("duplicates") != "drop":
            found.append(number)
        seen.add(content)
    return found


def wanted_pieces(chosen: Given) -> dict[int, list[Piece]]:
    lengths = chosen["sequence_length"]
    longest = max(lengths) if isinstance(lengths, list) else lengths
    found = {}
    for number in kept(chosen):
        pieces = [
            piece
            for _, sample in samples_for(chosen)[number - 1]
            for piece in pieces_of(sample, longest, chosen.get("overlong", "truncate"), EOS)
        ]
        found[number] = sorted(pieces)
    return {number: pieces for number, pieces in found.items() if pieces}


def check_pieces(found: Shaped, chosen: Given) -> None:
    """Compare the pieces of each conversation, in each packing, with the reference."""
    wanted, mode = wanted_pieces(chosen), chosen.get("loss_weight", "none")
    of_data = {number: record["loss_weight"] for number, record in READ}
    packings: dict[str, dict[int, list[tuple[Piece, list[float]]]]] = {}
    for split, rows in found.rows.items():
        own = packings.setdefault(re.sub(r"-\d+$", "", split), {})
        for row in rows:
            assert ("loss_weight" in row.columns) == (mode != "none")
            for entry in row.entries:
                place = slice(entry["start"], entry["start"] + entry["length"])
                ids, labels = row.columns["input_ids"][place], row.columns["labels"][place]
                assert all(label in (IGNORED, token) for token, label in zip(ids, labels, strict=True))
                piece = Piece(entry["first"], ids, [label != IGNORED for label in labels])
                weights = row.columns.get("loss_weight", [])
                assert not any(weights[at] for at in range(len(weights)) if row.columns["labels"][at] == IGNORED)
                own.setdefault(entry["record"], []).append((piece, weights[place]))
    held_out = packings.get("validation", {})
    assert bool(held_out) == bool(chosen.get("validation"))
    assert not {*held_out} & {*packings["train"]}
    assert {*held_out} | {*packings["train"]} == {*wanted}
    for name, own in packings.items():
        assert name == "validation" or {*own} == {*packings["train"]}, "every packing has the same conversations"
        often = 1 if name == "validation" else copies(chosen)
        there = {number: sorted(wanted[number] * often) for number in own}
        weights_there = weights_of(there, of_data, mode)
        for number, pieces in own.items():
            assert [piece for piece, _ in sorted(pieces)] == there[number]
            for piece, weights in pieces:
                trained = [weight for weight, flag in zip(weights, piece.trained, strict=False) if flag]
                assert trained == pytest.approx([weights_there[number]] * len(trained), rel=1e-6)
    assert [name for name in packings if name.startswith("train")] == ["train", "train_epoch_2"][
        : chosen.get("epochs", 1)
    ]


def check_conversations(path: Path, chosen: Given) -> None:
    """Check a corpus of format 2.0: each row is a whole conversation."""
    longest = chosen["sequence_length"] if chosen.get("overlong") == "drop" else 1 << 20
    longest = longest[0] if isinstance(longest, list) else longest
    samples = [sample for number in kept(chosen) for sample in samples_for(chosen)[number - 1]]
    wanted = [messages for messages, (ids, _) in samples if len(ids) <= longest]
    found: dict[str, list[list[Message]]] = {}
    for name, split in load_manifest(path).splits.items():
        found[name] = []
        for shard in split.shards:
            rows = pa.ipc.open_stream((folder_of(path) / shard.path).read_bytes()).read_all().to_pylist()
            found[name] += [
                [{key: each[key] for key in ("role", "content")} for each in row["messages"]] for row in rows
            ]
    held_out = [messages for messages in wanted if messages in found["validation"]]
    in_train = [messages for messages in wanted if messages not in held_out] * copies(chosen)
    assert bool(held_out) == bool(chosen.get("validation"))
    for name, expected_there in (("validation", held_out), ("train", in_train)):
        assert sorted(map(json.dumps, found[name])) == sorted(map(json.dumps, expected_there))


def check_ledger(manifest: Manifest) -> None:
    counts, tokens = manifest.ledger.conversations, manifest.ledger.tokens
    assert counts.read == len(RECORDS)
    assert counts.read == counts.packed + sum(counts.rejected.values()) + sum(counts.dropped.values())
    encoded = tokens.encoded + tokens.separators + tokens.repeated
    assert encoded == tokens.packed + tokens.truncated + tokens.dropped
    assert sum(split.rows for split in manifest.splits.values()) == manifest.packing_metadata.rows
