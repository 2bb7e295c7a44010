"""Any combination of settings is refused by name, or gives the right corpus.

settings ─┬─ refused: the message names the settings that exclude each other
          └─ packed, twice ─▶ rows, ledger, weights as tests/reference has them; the same bytes; verified; repaired
"""

from __future__ import annotations

import json
import math
import re
import tempfile
from collections.abc import Mapping
from fractions import Fraction
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st
from reference.corpus import expected
from reference.rows import Piece, pieces_of, weights_of
from reference.tokens import Encoded
from support.differential.comparison import library_of
from support.packed_rows import folder_of
from support.profiles import examples
from support.row_shapes import IGNORED, Shaped, check_corpus, read_corpus
from support.small_corpus import conversations, make_shards_small, pack_corpus, write_project

from packcorpus.tasks.config import load_config
from packcorpus.tasks.core.errors import DataError, UsageError
from packcorpus.tasks.recipe import resolve
from packcorpus.tasks.storage.manifest import Manifest, load_manifest
from packcorpus.tasks.verification.repair import repair
from packcorpus.tasks.verification.verify import verify

Given = dict[str, Any]

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
    "duplicates": st.sampled_from(["keep", "exact"]),
    "seed": st.integers(0, 9),
    "train_on": st.sampled_from(["assistant", "last", "rounds", "all"]),
    "turns": st.sampled_from(["auto", "apart"]),
    "template": st.sampled_from(["chatml", "zephyr", "llama2", "alpaca", "plain"]),
    "default_system": st.just("Be brief."),
    "min_tokens": st.sampled_from([12, 20]),
    "max_tokens": st.sampled_from([40, 80]),
    "min_turns": st.sampled_from([2, 3]),
    "max_turns": st.sampled_from([3, 4]),
    "weighting": st.sampled_from(["repeat", "subsample", "proportions", "token_share"]),
    "sources": st.lists(
        st.fixed_dictionaries(
            {}, optional={"weight": st.sampled_from([0.3, 0.75, 1, 1.5, 2]), "limit": st.integers(9, 30)}
        ),
        min_size=1,
        max_size=2,
    ),
}
UNUSUAL: Given = {
    "sequence_length": [48, 96], "mix": "blocks", "align": 16, "padding": "none", "loss_weight": "both",
    "balance": {"ranks": 2}, "neighbors": "distinct", "overlong": "split", "packing": False,
    "validation": 0.3, "epochs": 2, "duplicates": "exact", "seed": 1,
    "train_on": "last", "turns": "apart", "template": "plain", "default_system": "x", "min_tokens": 9, "max_tokens": 99,
    "min_turns": 2, "max_turns": 9, "weighting": "subsample", "sources": [{"weight": 2}],
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
    found: dict[str, str] = {}
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
    if chosen.get("weighting") == "subsample" and any(
        entry.get("weight", 1) > 1 for entry in chosen.get("sources", [])
    ):
        found["weighting"] = r"sources\[\d\]\.weight: .* is above 1"
    return found


@settings(max_examples=examples(80), deadline=None)
@given(chosen=TOGETHER)
def test_a_config_is_read_or_refused_by_name(chosen: Given, tmp_path_factory: pytest.TempPathFactory) -> None:
    check_config(tmp_path_factory.getbasetemp() / "together.yaml", chosen)


def test_every_pair_of_settings_is_read_or_refused_by_name(tmp_path: Path) -> None:
    for pair in combinations(UNUSUAL.items(), 2):
        check_config(tmp_path / "pair.yaml", dict(pair))


def check_config(file: Path, chosen: Given) -> None:
    file.write_text(yaml.safe_dump({"sequence_length": 64, **chosen, "sources": entries(chosen)}))
    refused = refusals(chosen)
    if not refused:
        load_config(file)
        return
    with pytest.raises(UsageError) as caught:
        load_config(file)
    assert any(re.search(said, str(caught.value)) for said in refused.values())


# -- corpora -----------------------------------------------------------------------------------------------------------

Place = tuple[int, int]  # number of the entry of `sources`, and of the record in its file, from 1
Copies = Mapping[Place, int]


def records_of(seed: int, count: int) -> list[Given]:
    """Return conversations with weights.

    Some are too long for a row, and four are in the list twice.
    """
    records = conversations(count - 4, seed=seed, longest=16)
    for number, record in enumerate(records):
        record["loss_weight"] = number % 4 / 2 + 0.5
    return [*records, *records[:4]]


# The second file has a conversation of the first, one with a system message, and two rejects.
CHAT, MORE = records_of(3, 40), records_of(4, 20)
MORE[5:5] = [CHAT[7], {"messages": [{"role": "system", "content": "Be kind."}, *CHAT[8]["messages"]], "loss_weight": 2}]
MORE[9:9] = [{"messages": [{"role": "user", "content": "2+2?"}]}, {"messages": [{"role": "nobody", "content": "4"}]}]
FILES = {"chat.jsonl": CHAT, "more.jsonl": MORE}
EOS = library_of("sp_bpe_chatml").eos


def entries(chosen: Given) -> list[Given]:
    """Return the entries of `sources`, each with the path of its file."""
    return [{"path": path} | entry for path, entry in zip(FILES, chosen.get("sources", [{}]), strict=False)]


def read_of(chosen: Given) -> dict[Place, Given]:
    """Return the records that a run reads."""
    return {
        (entry, number): record
        for entry, given in enumerate(entries(chosen))
        for number, record in enumerate(FILES[given["path"]], 1)
    }


@st.composite
def packed_settings(draw: st.DrawFn) -> Given:
    """Draw settings that can be combined; refused settings are left out."""
    chosen: Given = {"sequence_length": 64} | draw(TOGETHER)
    while refused := refusals(chosen):
        for name in refused:
            del chosen[name]
        chosen.setdefault("sequence_length", 64)
    if chosen.get("train_on") == "all":
        chosen.pop("turns", None)  # each turn of a user would have a sample, too
        chosen.pop("default_system", None)  # which is never trained on
    if chosen.get("turns") == "apart":
        chosen.pop("template", None)
    if chosen.get("weighting") == "token_share":
        for entry in chosen.get("sources", []):
            entry.pop("limit", None)
    return chosen


@cache
def samples_of(train_on: str, apart: bool, template: str, system: str) -> dict[str, list[list[tuple[Any, Encoded]]]]:
    """Return the samples of each record of each file, as messages and encoded tokens.

    A rejected record has none. With `apart`, each sample ends with a trained turn, which is the only turn of the sample
    that is trained on.
    """
    samples: dict[str, list[list[tuple[Any, Encoded]]]] = {}
    for path, records in FILES.items():
        prompts = []
        for record in records:
            messages = record["messages"]
            if system and messages[0]["role"] != "system":
                messages = [{"role": "system", "content": system}, *messages]
            ends = [len(messages)]
            if apart and train_on == "assistant":
                ends = [at for at, message in enumerate(messages, 1) if message["role"] == "assistant"] or ends
            prompts.append([messages[:end] for end in ends])
        flat = [{"messages": messages} for prompt in prompts for messages in prompt]
        trained = "last" if apart else train_on
        encoded = iter(expected(flat, "messages", template, library_of("sp_bpe_chatml"), trained))
        samples[path] = [
            [(messages, sample) for messages in prompt for sample in next(encoded) or []] for prompt in prompts
        ]
    return samples


def samples_for(chosen: Given) -> dict[Place, list[tuple[Any, Encoded]]]:
    """Return the samples that pass the filters, of each conversation that has any."""
    apart = chosen.get("turns") == "apart"
    way = (chosen.get("train_on", "assistant"), apart, chosen.get("template", "chatml"))
    samples = samples_of(*way, chosen.get("default_system", ""))
    least, most = chosen.get("min_tokens", 0), chosen.get("max_tokens", 1 << 20)
    fewest, maximum = chosen.get("min_turns", 0), chosen.get("max_turns", 1 << 20)
    kept: dict[Place, list[tuple[Any, Encoded]]] = {}
    contents = set()
    for place, record in read_of(chosen).items():
        turns = sum(message["role"] != "system" for message in record["messages"])
        of_record = samples[entries(chosen)[place[0]]["path"]][place[1] - 1]
        fitting = [(messages, sample) for messages, sample in of_record if least <= len(sample[0]) <= most]
        if not fitting or not fewest <= turns <= maximum:
            continue
        content = json.dumps(fitting[0][0]), json.dumps(record["messages"])
        if content not in contents or chosen.get("duplicates") != "exact":
            kept[place] = fitting
        contents.add(content)
    return kept


def pack(folder: Path, chosen: Given, **other: Any) -> Path:
    """Pack a corpus in a new folder, and return its manifest."""
    # The reference cuts at any token. tests/packing/test_between_turns.py is about cuts between turns.
    cut = {"overlong": "truncate", "split_at": "tokens"}
    config = write_project(folder, CHAT, max_rejects=1, **cut | chosen | {"sources": entries(chosen)} | other)
    (folder / "more.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in MORE))
    return pack_corpus(resolve(config, folder))


def check(case: tuple[Given, int, str]) -> str:
    """Check settings against the reference, twice, and the repair of a damaged shard.

    A case is settings, the number of a shard, and its damage. Returns the outcome.
    """
    chosen, which, damage = case
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        make_shards_small(patch, shard=4000)
        if not enough(chosen):
            with pytest.raises(DataError, match="no conversation"):
                pack(Path(folder) / "one", chosen)
            return "nothing left"
        path = pack(Path(folder) / "one", chosen)
        assert verify(path)
        check_corpus_of(path, chosen)
        again = pack(Path(folder) / "other", chosen, part_size=1 << 11)
        assert again.read_bytes() == path.read_bytes(), "the manifest has the checksums of all shards"

        names = [shard.path for split in load_manifest(path).splits.values() for shard in split.shards]
        shard = folder_of(path) / names[which % len(names)]
        whole = shard.read_bytes()
        shard.unlink()
        if damage != "delete":
            half = len(whole) // 2
            shard.write_bytes(whole[:half] + (b"" if damage == "cut" else bytes([whole[half] ^ 1]) + whole[half + 1 :]))
        assert [file.path for file in repair(path)] == [shard]
        assert shard.read_bytes() == whole
    return "packed"


def cases() -> st.SearchStrategy[tuple[Given, int, str]]:
    return st.tuples(packed_settings(), st.integers(0, 99), st.sampled_from(["delete", "cut", "flip"]))


# The first piece of a conversation has no trained token, and the others have fewer tokens than the conversation.
SPLIT: Given = {"sequence_length": 64, "overlong": "split", "template": "alpaca", "min_tokens": 20}
ONE_LEFT: Given = {"max_turns": 3, "min_turns": 2, "max_tokens": 40, "validation": 0.3, "default_system": "Be brief."}


@settings(max_examples=examples(24), deadline=None)
@example((SPLIT, 0, "delete"))
@example(({"sequence_length": 64} | ONE_LEFT, 0, "delete"))
@given(cases())
def test_a_corpus_is_what_the_reference_says_and_repaired(case: tuple[Given, int, str]) -> None:
    check(case)


def enough(chosen: Given) -> bool:
    """Return whether any conversation is left, with token_share in each entry."""
    wanted = wanted_pieces(chosen)
    counts = [sum(place[0] == entry for place in wanted) for entry in range(len(entries(chosen)))]
    return min(counts) > 0 if chosen.get("weighting") == "token_share" else len(wanted) > 0


def check_corpus_of(path: Path, chosen: Given) -> None:
    """Compare a corpus with the reference."""
    manifest = load_manifest(path)
    if manifest.format_version == "2.0":
        packed = check_conversations(read_corpus(path), chosen)
    else:
        corpus = read_corpus(path)
        check_corpus(corpus)
        packed = check_pieces(corpus, chosen)
    check_ledger(manifest, chosen, packed)


def flipped(data: bytes) -> bytes:
    return bytes([data[0] ^ 1]) + data[1:]


def wanted_pieces(chosen: Given) -> dict[Place, list[Piece]]:
    """Return the pieces of each conversation that limits and weights may choose."""
    lengths, overlong = chosen["sequence_length"], chosen.get("overlong", "truncate")
    longest = max(lengths) if isinstance(lengths, list) else lengths
    pieces = {
        place: sorted(piece for _, sample in samples for piece in pieces_of(sample, longest, overlong, EOS))
        for place, samples in samples_for(chosen).items()
    }
    return {place: of_place for place, of_place in pieces.items() if of_place}


def check_pieces(corpus: Shaped, chosen: Given) -> int:
    """Compare the pieces of each conversation, in each packing, with the reference.

    Returns the number of packed conversations.
    """
    wanted, mode = wanted_pieces(chosen), chosen.get("loss_weight", "none")
    of_data = {place: record.get("loss_weight", 1.0) for place, record in read_of(chosen).items()}
    packings: dict[str, dict[Place, list[tuple[Piece, list[float]]]]] = {}
    for split, rows in corpus.rows.items():
        packing = packings.setdefault(re.sub(r"-\d+$", "", split), {})
        for row in rows:
            assert ("loss_weight" in row.columns) == (mode != "none")
            for entry in row.entries:
                inside = slice(entry["start"], entry["start"] + entry["length"])
                ids, labels = row.columns["input_ids"][inside], row.columns["labels"][inside]
                assert all(label in (IGNORED, token) for token, label in zip(ids, labels, strict=True))
                piece = Piece(entry["first"], ids, [label != IGNORED for label in labels])
                weights = row.columns.get("loss_weight", [])
                assert not any(weights[at] for at in range(len(weights)) if row.columns["labels"][at] == IGNORED)
                packing.setdefault((entry["source"], entry["record"]), []).append((piece, weights[inside]))
    copies: dict[str, dict[Place, int]] = {}
    for name, packing in packings.items():
        copies[name] = {place: len(pieces) // len(wanted[place]) for place, pieces in packing.items()}
        often = copies[name]
        weights_there = weights_of({place: wanted[place] for place in packing}, often, of_data, mode)
        for place, pieces in packing.items():
            assert [piece for piece, _ in sorted(pieces)] == sorted(wanted[place] * often[place])
            for piece, weights in pieces:
                trained = [weight for weight, flag in zip(weights, piece.trained, strict=False) if flag]
                assert trained == pytest.approx([weights_there[place]] * len(trained), rel=1e-6)
    assert [name for name in packings if name.startswith("train")] == ["train", "train_epoch_2"][
        : chosen.get("epochs", 1)
    ]
    assert copies.get("train_epoch_2", copies["train"]) == copies["train"]
    trained = {place: sum(sum(piece.trained) for piece in pieces) for place, pieces in wanted.items()}
    check_selection(chosen, trained, copies["train"], copies.get("validation", {}))
    return len(copies["train"]) + len(copies.get("validation", {}))


def check_selection(chosen: Given, trained: Mapping[Place, int], train: Copies, validation: Copies) -> None:
    """Check how often limits and weights choose the conversations of each entry.

    `trained` has the trained tokens of each conversation that they may choose.
    """
    records = read_of(chosen)
    contents = {json.dumps(records[place]["messages"]) for place in trained}
    assert bool(validation) == (chosen.get("validation", 0.0) > 0 and len(contents) > 1)
    assert not {*train} & {*validation}
    assert set(validation.values()) <= {1}, "no conversation is held out twice"
    copies: dict[int, tuple[int, int]] = {}  # conversations and copies of each entry
    shares: dict[int, tuple[float, float]] = {}  # trained tokens for a weight of 1: in rows, and at most
    for entry, setting in enumerate(entries(chosen)):
        weight, total = setting.get("weight", 1), sum(place[0] == entry for place in trained)
        of_train = [often for place, often in train.items() if place[0] == entry]
        held_out = sum(place[0] == entry for place in validation)
        left = min(total, setting.get("limit", total))
        if chosen.get("weighting") == "token_share":
            assert set(of_train) == {1}
            tokens = sum(trained[place] for place in train if place[0] == entry)
            shares[entry] = tokens / weight, max(size for place, size in trained.items() if place[0] == entry) / weight
            continue
        if chosen.get("weighting") == "proportions":
            assert len(of_train) + held_out == left, "none is left out"
            assert max(of_train) - min(of_train) <= 1
            copies[entry] = len(of_train), sum(of_train)
            continue
        # How many of the chosen ones are held out is known only from the rows.
        assert (sorted(of_train), held_out) in [chosen_of(weight, count, left - count) for count in range(left + 1)]
    weights = [Fraction(setting.get("weight", 1)) for setting in entries(chosen)]
    for entry, (count, packed) in copies.items():
        scale = max(Fraction(one) / weights[other] for other, (one, _) in copies.items())
        assert packed == max(count, math.floor(weights[entry] * scale + Fraction(1, 2)))
    if shares:
        scarcest = min(tokens for tokens, _ in shares.values())
        largest = max(tokens for tokens, _ in shares.values())
        assert largest - scarcest <= max(most for _, most in shares.values())


def chosen_of(weight: float, train: int, validation: int) -> tuple[list[int], int]:
    """Return the copies of each chosen conversation, and the number of held-out ones."""
    whole, rest = int(weight), weight % 1
    more = share(rest, train)
    copies = [whole + 1] * more + [whole] * (train - more)
    return sorted(filter(None, copies)), validation if whole else share(rest, validation)


def share(part: float, count: int) -> int:
    """Round a part of a count; the result is at least 1 if neither is 0."""
    return min(count, max(1, int(part * count + 0.5))) if part else 0


def check_conversations(corpus: Shaped, chosen: Given) -> int:
    """Check a corpus of format 2.0: each row is a whole conversation.

    Returns the number of packed conversations.
    """
    longest = chosen["sequence_length"] if chosen.get("overlong") == "drop" else 1 << 20
    longest = longest[0] if isinstance(longest, list) else longest
    wanted, trained = {}, {}
    for place, samples in samples_for(chosen).items():
        if fitting := [(messages, flags) for messages, (ids, flags) in samples if len(ids) <= longest]:
            wanted[place] = sorted(json.dumps(messages) for messages, _ in fitting)
            trained[place] = sum(sum(flags) for _, flags in fitting)
    copies: dict[str, dict[Place, int]] = {}
    for name, rows in corpus.rows.items():
        texts: dict[Place, list[str]] = {}
        for row in rows:
            [entry] = row.entries
            messages = [{key: message[key] for key in ("role", "content")} for message in row.columns["messages"]]
            texts.setdefault((entry["source"], entry["record"]), []).append(json.dumps(messages))
        copies[name] = {place: len(of_place) // len(wanted[place]) for place, of_place in texts.items()}
        for place, of_place in texts.items():
            assert sorted(of_place) == sorted(wanted[place] * copies[name][place])
    check_selection(chosen, trained, copies["train"], copies["validation"])
    return len(copies["train"]) + len(copies["validation"])


def check_ledger(manifest: Manifest, chosen: Given, packed: int) -> None:
    counts, tokens = manifest.ledger.conversations, manifest.ledger.tokens
    assert (counts.read, counts.packed) == (len(read_of(chosen)), packed)
    assert counts.read == counts.packed + sum(counts.rejected.values()) + sum(counts.dropped.values())
    encoded = tokens.encoded + tokens.separators + tokens.repeated
    assert encoded == tokens.packed + tokens.truncated + tokens.dropped
    assert sum(split.rows for split in manifest.splits.values()) == manifest.packing_metadata.rows
