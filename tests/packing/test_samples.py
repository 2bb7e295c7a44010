"""Conversations with several samples, from token files to plan and ledger.

A second count in plain Python checks the plan, the index, and the ledger.
"""

from __future__ import annotations

import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import orjson
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.profiles import examples
from support.small_corpus import EOS, TRUNCATED, Tokens, token_file, tokens_of, write_receipt

from packcorpus.tasks.config import Config
from packcorpus.tasks.core.errors import DataError
from packcorpus.tasks.packing.plan import make_plan
from packcorpus.tasks.recipe import Recipe
from packcorpus.tasks.sources.model import Part, Source, SourceFile
from packcorpus.tasks.storage.layout import Layout
from packcorpus.tasks.storage.schemas import INDEX_SCHEMA, index_schema


class Said(NamedTuple):
    """A conversation: content hash, turns, and samples by their trained message."""

    digest: int
    turns: int
    samples: dict[int, Tokens]


Corpus = list[list[Said]]  # the conversations of each source
Place = tuple[int, int, int]  # source, record, turn


@st.composite
def corpora(draw: st.DrawFn, longest: int) -> Corpus:
    """Draw sources of conversations that have few distinct contents.

    Some conversations have one sample, and some of these samples are whole conversations (turn -1).
    """
    contents = []
    for number in range(draw(st.integers(1, 6))):
        turns = draw(st.sampled_from([[-1], [1], [1, 3], [1, 3, 5], [3, 5]]))
        samples = {turn: draw(tokens_of(longest)) for turn in turns}
        digest = int.from_bytes(blake2b(bytes([number]), digest_size=8).digest(), "big")
        contents.append(Said(digest, draw(st.integers(1, 6)), samples))
    source = st.lists(st.sampled_from(contents), min_size=1, max_size=7)
    return draw(st.lists(source, min_size=1, max_size=3))


@st.composite
def cases(draw: st.DrawFn) -> tuple[Corpus, dict[str, Any]]:
    length = draw(st.integers(8, 24))
    corpus = draw(corpora(2 * length))
    weights, limits = st.sampled_from([0.3, 1.0, 2.5]), st.sampled_from([None, None, 1, 3])
    entries = [Source(path=f"s{n}.x", weight=draw(weights), limit=draw(limits)) for n in range(len(corpus))]
    mixed = {"sources": entries, "weighting": draw(st.sampled_from(["repeat", "token_share"]))}
    return corpus, (mixed if draw(st.booleans()) else {}) | {
        "sequence_length": length,
        "overlong": draw(st.sampled_from(["truncate", "turns", "drop", "split"])),
        "validation": draw(st.sampled_from([0.0, 0.4])),
        "duplicates": draw(st.sampled_from(["keep", "exact"])),
        "min_tokens": draw(st.sampled_from([None, None, 4])),
        "max_tokens": draw(st.sampled_from([None, None, length + 2])),
        "min_turns": draw(st.sampled_from([None, None, 2])),
        "max_turns": draw(st.sampled_from([None, None, 5])),
        "epochs": draw(st.sampled_from([1, 1, 2])),
        "max_rejects": 1.0,
        "seed": draw(st.integers(0, 3)),
    }


@contextmanager
def recipe_of(corpus: Corpus, per_part: int, **values: Any) -> Iterator[Recipe]:
    """Return a recipe whose token files hold `per_part` conversations each."""
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        (root / "any.model").write_bytes(b"never opened here")
        without_file: dict[str, Any] = {"tokenizer": "any.model", "unknown_markers": "text"}
        config = Config(**{"sources": [Source(path="x")]} | without_file | TRUNCATED | values)
        files, parts, contents = [], [], []
        for number, own in enumerate(corpus):
            entry = min(number, len(config.sources) - 1)
            file = SourceFile(
                root / f"s{number}", f"s{number}.x", "jsonl", "", "messages", (), 10, f"{number:064x}", 0, entry
            )
            files.append(file)
            for at in range(0, len(own), per_part):
                parts.append(Part(file, at, at + 1, f"{number:032x}{at:032x}"))
                contents.append(own[at : at + per_part])
        recipe = Recipe(config, root, Layout(root), tuple(files), tuple(parts))
        vars(recipe)["encoder"] = SimpleNamespace(eos_id=EOS)
        for part, said in zip(parts, contents, strict=True):
            key = recipe.tokens_key(part)
            rows = [(n, one, turn, one.samples[turn]) for n, one in enumerate(said) for turn in one.samples]
            receipt = token_file(
                recipe.layout.token_file(key),
                [tokens for *_, tokens in rows],
                [number for number, *_ in rows],
                [one.digest for _, one, *_ in rows],
                [one.turns for _, one, *_ in rows],
                [turn for *_, turn, _ in rows],
            )
            receipt |= dict.fromkeys(("conversations", "accepted", "records"), len(said))
            write_receipt(recipe.layout.token_receipt(key), receipt)
        yield recipe


def planned(recipe: Recipe) -> tuple[dict[str, Any], list[dict[str, Any]], list[dict[str, Any]], bytes]:
    """Plan a corpus; return the receipt, index rows, rejects, and index bytes."""
    receipt = make_plan(recipe, recipe.plan_folder)
    index = (recipe.plan_folder / "index.arrow").read_bytes()
    rejects = (recipe.plan_folder / "rejects.jsonl").read_bytes().splitlines()
    return receipt, pa.ipc.open_stream(index).read_all().to_pylist(), [orjson.loads(line) for line in rejects], index


@settings(max_examples=examples(120), deadline=None)
@given(cases())
def test_every_sample_is_packed_or_accounted_for_and_conversations_stay_together(
    case: tuple[Corpus, dict[str, Any]],
) -> None:
    corpus, values = case
    with recipe_of(corpus, 2, **values) as recipe:
        try:
            receipt, index, rejects, written = planned(recipe)
        except DataError as error:
            assert error.reason in ("nothing_to_pack", "empty_share")  # noqa: PT017 - or no error
            return
        check_index(corpus, recipe.config, index, rejects)
        check_ledger(corpus, recipe.config, receipt, index, rejects)
        several = any(turn >= 0 for own in corpus for said in own for turn in said.samples)
        assert pa.ipc.open_stream(written).schema.equals(index_schema(several))
    with recipe_of(corpus, 100, **values) as recipe:
        again = planned(recipe)
        assert again[3] == written, "the parts of a source change the index"
        assert again[0]["ledger"] == receipt["ledger"]


def check_index(corpus: Corpus, config: Config, index: list[dict[str, Any]], rejects: list[dict[str, Any]]) -> None:
    places: dict[Place, list[dict[str, Any]]] = defaultdict(list)
    for entry in index:
        places[entry["source"], entry["record"], entry.get("turn", -1)].append(entry)
    rejected = {(int(reject["source"][1]), reject["line"]) for reject in rejects}
    assert len(rejected) == len(rejects), "a conversation is rejected twice"
    seen: set[int] = set()
    sides: dict[int, set[bool]] = defaultdict(set)
    taken: Counter[int] = Counter()
    limited: Counter[int] = Counter()
    for source, own in enumerate(corpus):
        for record, said in enumerate(own, 1):
            of = {turn: places.get((source, record, turn), []) for turn in said.samples}
            if (source, record) in rejected:
                seen.add(said.digest)  # duplicates are dropped before conversations are cut
                assert not any(of.values())
                assert all(is_cut_off(tokens, config) for tokens in said.samples.values())
                continue
            assert all(of.values()), "a sample is lost"
            packed = {turn: entries for turn, entries in of.items() if entries[0]["row"] is not None}
            reasons = {turn: entries[0]["dropped"] for turn, entries in of.items() if turn not in packed}
            copies = {tuple(sorted(Counter(e["split"] for e in first_pieces(es)).items())) for es in packed.values()}
            assert len(copies) <= 1, "samples are packed in other splits, or more often than others"
            sides[said.digest] |= {entry["split"] == "validation" for es in packed.values() for entry in es}
            check_reasons(said, reasons, config, duplicate=config.duplicates == "exact" and said.digest in seen)
            assert not (packed and {*reasons.values()} & {"limit", "weight", "duplicate", "min_turns", "max_turns"})
            if not all(reason.startswith(("min_", "max_")) for reason in (*reasons.values(), *map(str, packed))):
                seen.add(said.digest)
            entry = min(source, len(config.sources) - 1)
            taken[entry] += bool(packed) or "weight" in reasons.values()
            limited[entry] += "limit" in reasons.values()
    assert all(len(side) <= 1 for side in sides.values()), "a content is on both sides of the split"
    for number, entry in enumerate(config.sources):
        assert entry.limit is None or taken[number] <= entry.limit
        assert not limited[number] or taken[number] == entry.limit


def first_pieces(entries: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    least = min(entry["first"] for entry in entries)
    return [entry for entry in entries if entry["first"] == least]


def is_cut_off(tokens: Tokens, config: Config) -> bool:
    """Return whether a sample has lost all of its trained tokens."""
    values, length = tokens[0], config.sequence_length
    if len(values) <= length:
        return not any(value >= 0 for value in values[1:])
    return config.overlong in ("truncate", "split") and not any(value >= 0 for value in values[1 : length - 1])


def is_too_long(values: list[int], config: Config) -> bool:
    """Return whether `overlong` drops a sample."""
    length = config.sequence_length
    ends = [end for end in range(2, length) if len(values) > length and values[end - 1] >= 0 > values[end]]
    return len(values) > length and (config.overlong == "drop" or (config.overlong == "turns" and not ends))


def check_reasons(said: Said, reasons: dict[int, str], config: Config, duplicate: bool) -> None:
    """Check that each dropped sample has the first reason that holds.

    Samples for which a reason holds are not packed.
    """
    for turn, (values, _) in said.samples.items():
        bounds = {
            "min_tokens": config.min_tokens is not None and len(values) < config.min_tokens,
            "max_tokens": config.max_tokens is not None and len(values) > config.max_tokens,
            "min_turns": config.min_turns is not None and said.turns < config.min_turns,
            "max_turns": config.max_turns is not None and said.turns > config.max_turns,
            "duplicate": duplicate,
            "too_long": is_too_long(values, config),
        }
        expected = next((name for name, holds in bounds.items() if holds), None)
        if expected:
            assert reasons.get(turn) == expected
        elif turn in reasons:
            assert reasons[turn] in ("limit", "weight", "no_trained_tokens")
            if reasons[turn] == "no_trained_tokens":
                assert config.overlong == "split" or is_cut_off(said.samples[turn], config)


def check_ledger(
    corpus: Corpus, config: Config, receipt: dict[str, Any], index: list[dict[str, Any]], rejects: list[dict[str, Any]]
) -> None:
    ledger, conversations = receipt["ledger"], receipt["ledger"]["conversations"]
    every = [said for own in corpus for said in own]
    packed = {(entry["source"], entry["record"]) for entry in index if entry["row"] is not None}
    assert conversations["read"] == len(every)
    assert conversations["packed"] == len(packed)
    assert conversations["rejected"] == Counter(reject["reason"] for reject in rejects)
    assert conversations["read"] == len(packed) + len(rejects) + sum(conversations["dropped"].values())
    for name in ("truncated", "split"):
        assert conversations[name] <= len(packed)
    for source, facts in enumerate(receipt["sources"]):
        own = [entry for entry in index if entry["source"] == source]
        assert facts["accepted"] == len({entry["record"] for entry in own})
        assert facts["trained_tokens"] == sum(entry["trained"] for entry in own)
    for number, facts in enumerate(receipt["mixture"]):
        own = [e for e in index if e["split"] == "train" and min(e["source"], len(config.sources) - 1) == number]
        assert facts["conversations"] == len({(entry["source"], entry["record"]) for entry in own})
        first = [e for e in own if e["first"] == 0 or config.overlong == "split"]
        assert facts["copies"] <= len(first)
    several = any(turn >= 0 for said in every for turn in said.samples)
    assert several == ("samples" in ledger)
    if several:
        counts = counted_samples(corpus, index, rejects)
        share = counts["repeated_prompt_tokens"] / max(1, ledger["tokens"]["packed"])
        rows = receipt["packing_metadata"]["rows"]
        price = {"repeated_percent": round(100 * share, 1), "repeated_rows": round(share * rows)}
        assert ledger["samples"] == counts | price


def counted_samples(corpus: Corpus, index: list[dict[str, Any]], rejects: list[dict[str, Any]]) -> dict[str, Any]:
    pieces: dict[Place, dict[int, dict[str, Any]]] = defaultdict(dict)
    for entry in index:
        if entry["row"] is not None:
            pieces[entry["source"], entry["record"], entry["turn"]].setdefault(entry["first"], entry)
    repeated, before = 0, None
    for place in sorted(pieces):
        length = sum(entry["length"] for entry in pieces[place].values())
        untrained = length - sum(entry["trained"] for entry in pieces[place].values())
        if before and before[0] == place[:2]:
            repeated += min(untrained, before[1])
        before = place[:2], length
    return {
        "read": sum(len(said.samples) for own in corpus for said in own),
        "packed": len(pieces),
        "rejected": sum(len(corpus[int(reject["source"][1])][reject["line"] - 1].samples) for reject in rejects),
        "dropped": Counter(entry["dropped"] for entry in index if entry["row"] is None),
        "repeated_prompt_tokens": repeated,
    }


SHORT: Tokens = ([~5, 6, 7], False)
CUT_OFF: Tokens = ([~5] * 20 + [6], False)


def test_a_turn_that_is_cut_off_is_dropped_and_a_conversation_of_which_all_are_is_rejected() -> None:
    corpus = [[Said(1, 4, {1: SHORT, 3: CUT_OFF}), Said(2, 4, {1: CUT_OFF, 3: CUT_OFF})]]
    with recipe_of(corpus, 9, sequence_length=8, max_rejects=0.5) as recipe:
        receipt, index, rejects, _ = planned(recipe)
    assert [(e["record"], e["turn"], e["dropped"]) for e in index] == [(1, 1, None), (1, 3, "no_trained_tokens")]
    assert [(reject["line"], reject["reason"]) for reject in rejects] == [(2, "no_trained_tokens")]
    ledger = receipt["ledger"]
    assert ledger["conversations"]["rejected"] == {"no_trained_tokens": 1}
    assert (ledger["samples"]["read"], ledger["samples"]["rejected"], ledger["samples"]["packed"]) == (4, 2, 1)
    assert ledger["tokens"]["rejected"] == 42
    assert (receipt["sources"][0]["accepted"], receipt["sources"][0]["rejected"]) == (1, 1)


def test_limits_and_duplicates_count_conversations() -> None:
    def said(digest: int) -> Said:
        return Said(digest, 4, {1: SHORT, 3: ([*SHORT[0], ~8, 9], False)})

    corpus = [[said(1), said(2), said(1), said(3)]]
    with recipe_of(corpus, 9, sequence_length=8, duplicates="exact", sources=[Source(path="x", limit=2)]) as recipe:
        receipt, index, _, _ = planned(recipe)
    assert receipt["ledger"]["conversations"]["dropped"] == {"too_long": 0, "duplicate": 1, "limit": 1}
    assert receipt["ledger"]["samples"]["dropped"] == {"duplicate": 2, "limit": 2}
    assert [entry["dropped"] for entry in index if entry["record"] == 3] == ["duplicate"] * 2
    assert receipt["ledger"]["samples"]["repeated_prompt_tokens"] == 2 * 2, "~5 and ~8 of two conversations"


def test_a_corpus_of_whole_conversations_has_no_samples() -> None:
    with recipe_of([[Said(1, 2, {-1: SHORT})]], 9, sequence_length=8) as recipe:
        receipt, index, _, written = planned(recipe)
    assert pa.ipc.open_stream(written).schema.equals(INDEX_SCHEMA)
    assert "samples" not in receipt["ledger"]
    assert "turn" not in index[0]


@pytest.mark.parametrize("weighting", ["repeat", "token_share"])
def test_all_samples_of_a_conversation_are_copied_together(weighting: str) -> None:
    corpus = [
        [Said(10 * source + n, 4, {1: SHORT, 3: SHORT, 5: SHORT}) for n in range(source + 2)] for source in range(2)
    ]
    sources = [Source(path="a", weight=2.0), Source(path="b")]
    with recipe_of(corpus, 9, sequence_length=8, sources=sources, weighting=weighting) as recipe:
        receipt, index, _, _ = planned(recipe)
    copies = Counter((entry["source"], entry["record"], entry["turn"]) for entry in index if entry["row"] is not None)
    per_conversation = {
        place: {copies[(*place, turn)] for turn in (1, 3, 5)} for place in {(s, r) for s, r, _ in copies}
    }
    assert all(len(found) == 1 for found in per_conversation.values())
    assert [facts["copies"] for facts in receipt["mixture"]] == ([4, 3] if weighting == "repeat" else [2, 1])


def test_a_conversation_is_dropped_for_the_reason_that_removed_what_others_had_left() -> None:
    corpus = [[Said(1, 4, {1: SHORT, 3: CUT_OFF}), Said(2, 4, {1: ([~5, 6, 7, 8], False)})]]
    with recipe_of(corpus, 9, sequence_length=8, min_tokens=4) as recipe:
        receipt, index, rejects, _ = planned(recipe)
    assert [entry["dropped"] for entry in index] == ["min_tokens", "no_trained_tokens", None]
    assert not rejects
    assert receipt["ledger"]["conversations"]["dropped"] == {"too_long": 0, "min_tokens": 1}


def test_conversations_with_one_hash_are_duplicates_only_if_all_samples_are_as_long() -> None:
    corpus = [[Said(1, 4, {1: SHORT, 3: SHORT}), Said(1, 4, {1: SHORT, 3: ([~5, 6, 7, 8], False)})]]
    with recipe_of(corpus, 9, sequence_length=8, duplicates="exact") as recipe:
        assert planned(recipe)[0]["ledger"]["conversations"]["packed"] == 2


def test_a_share_of_the_tokens_counts_those_of_samples_that_are_packed() -> None:
    long: Tokens = ([~5, *range(6, 16)], False)  # 10 trained tokens, and dropped
    corpus = [[Said(n, 4, {1: SHORT, 3: long}) for n in range(2)], [Said(n, 4, {1: SHORT}) for n in range(2, 8)]]
    sources = [Source(path="a"), Source(path="b")]
    with recipe_of(corpus, 9, sequence_length=16, sources=sources, weighting="token_share", max_tokens=5) as recipe:
        receipt, _, _, _ = planned(recipe)
    assert [facts["trained_tokens"] for facts in receipt["mixture"]] == [4, 4]


def test_a_sample_that_is_too_long_is_named_by_its_turn() -> None:
    corpus = [[Said(1, 4, {1: SHORT, 3: CUT_OFF, 5: CUT_OFF})]]
    expected = pytest.raises(DataError, match=r"^s0.x:1 turn 3: 21 tokens exceed .* \(as in 1 conversations\)")
    with recipe_of(corpus, 9, sequence_length=8, overlong="error") as recipe, expected:
        planned(recipe)


def test_the_first_conversations_of_two_sources_are_two() -> None:
    corpus = [[Said(n, 4, {1: SHORT, 3: SHORT})] for n in range(2)]
    with recipe_of(corpus, 9, sequence_length=8) as recipe:
        ledger = planned(recipe)[0]["ledger"]
    assert (ledger["conversations"]["packed"], ledger["samples"]["repeated_prompt_tokens"]) == (2, 2)
