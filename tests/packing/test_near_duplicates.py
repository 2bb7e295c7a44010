"""Only conversations that are nearly the same as one that stays are left out."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.inspected import shown
from support.packed_rows import folder_of
from support.profiles import examples
from support.small_corpus import conversations, make_recipe, pack_corpus, token_file, write_project

from packcorpus.tasks.config import load_config
from packcorpus.tasks.core.errors import DataError
from packcorpus.tasks.dry_run import dry_run
from packcorpus.tasks.packing import near_duplicates
from packcorpus.tasks.packing.near_duplicates import FEWEST, SIMILAR, SKETCH, _pairs, find_near_duplicates
from packcorpus.tasks.recipe import Recipe
from packcorpus.tasks.storage.manifest import load_manifest
from packcorpus.tasks.storage.shards import open_index
from packcorpus.tasks.storage.token_files import Samples, TokenColumns
from packcorpus.tasks.verification import check_dropped
from packcorpus.tasks.verification.check_dropped import DroppedCheck
from packcorpus.tasks.verification.verify import verify

Text = tuple[list[int], list[int]]  # ids of the prompt and of the answer
DIGITS = range(90, 100)  # ids of the digits 0 to 9


class Numbers:
    """An encoder for which some ids are digits."""

    def token_bytes(self, token: int) -> bytes:
        return str(token - DIGITS.start).encode() if token in DIGITS else b" word"


def found_in(folder: Path, texts: list[Text], parts: int = 1) -> dict[int, tuple[int, float]]:
    """Return what is left out: what stays in its place, and the similarity."""
    rows = [([~token for token in prompt] + answer, False) for prompt, answer in texts]
    paths, edges = [folder / f"{number}.arrow" for number in range(parts)], np.linspace(0, len(rows), parts + 1)
    for path, first, last in zip(paths, edges[:-1].astype(int), edges[1:].astype(int), strict=True):
        token_file(path, rows[first:last])
    tokens = TokenColumns(paths, [0] * parts)
    encoder: Any = Numbers()
    found = find_near_duplicates(tokens, np.ones(len(rows), bool), Samples.of(tokens), encoder)
    return {int(near["conversation"]): (int(near["kept"]), float(near["similarity"])) for near in found}


def words(seed: int, count: int) -> list[int]:
    return random.Random(seed).choices(range(100, 4000), k=count)


def with_changes(text: list[int], *places: int, by: int = 5000) -> list[int]:
    return [by + place if place in places else token for place, token in enumerate(text)]


PROMPT, ANSWER = words(1, 60), words(2, 60)


@pytest.mark.parametrize(
    ("other", "is_near"),
    [
        ((with_changes(PROMPT, 30), ANSWER), True),
        ((PROMPT, with_changes(ANSWER, 30)), True),
        ((PROMPT, words(3, 60)), False),
        ((PROMPT, with_changes(ANSWER, *range(5, 55, 5))), False),
        ((words(3, 60), ANSWER), False),
        ((with_changes(PROMPT, 10, 20, 30, 40), with_changes(ANSWER, 10, 20, 30, 40)), False),
        # The question has another number, and the answer has it, too.
        ((with_changes(PROMPT, 30, by=DIGITS[3] - 30), with_changes(ANSWER, 30, by=DIGITS[3] - 30)), True),
    ],
)
def test_prompts_and_answers_are_nearly_the_same(other: Text, is_near: bool, tmp_path: Path) -> None:
    found = found_in(tmp_path, [(PROMPT, ANSWER), (words(8, 40), words(9, 40)), other])
    assert list(found) == [2] * is_near
    assert all(kept == 0 and SIMILAR <= similarity < 1 for kept, similarity in found.values())


def test_other_numbers_make_another_conversation(tmp_path: Path) -> None:
    def text(*numbers: int) -> Text:
        prompt, answer = (list(words) for words in (PROMPT, ANSWER))
        for place, number in zip((20, 40), numbers, strict=False):
            digits = [DIGITS[int(digit)] for digit in str(number)]
            prompt[place : place + len(digits)] = digits
        return prompt, answer

    # 34 and 43 have the same digits, and 34 is a part of 340.
    assert found_in(tmp_path, [text(34), text(43), text(340), text(34, 5)]) == {3: (0, pytest.approx(0.9, abs=0.1))}
    assert not found_in(tmp_path, [text(34, 5), text(34, 6)])
    # The number of a beginning that many share does not count.
    dated = [([*words(7, 30), DIGITS[number % 2], *words(7, 10), *words(number, 60)], ANSWER) for number in range(120)]
    again = [*words(7, 30), DIGITS[1], *words(7, 10), *with_changes(words(0, 60), 30)]
    assert list(found_in(tmp_path, [*dated, (again, ANSWER)])) == [120]


def test_short_answers_are_the_same(tmp_path: Path) -> None:
    yes, no = [20, 21, 22], [20, 23, 22]
    found = found_in(tmp_path, [(PROMPT, yes), (with_changes(PROMPT, 30), yes), (with_changes(PROMPT, 20), no)])
    assert list(found) == [1]


def test_short_conversations_and_common_beginnings_are_not_alike(tmp_path: Path) -> None:
    short = words(4, FEWEST // 2)
    assert not found_in(tmp_path, [(short, words(5, 8)), (short, words(5, 8))]), "only equal contents are dropped"
    refrain = words(4, FEWEST // 4) * 20  # many runs, but few distinct ones
    assert not found_in(tmp_path, [(refrain, words(5, 8)), (refrain, words(5, 8))])
    system, answer = words(6, 300), words(7, 30)
    texts = [(system + words(number + 10, 30), answer) for number in range(200)]
    assert not found_in(tmp_path, texts)
    assert list(found_in(tmp_path, [*texts, (with_changes(texts[3][0], 310), answer)])) == [200]


def test_of_a_chain_those_stay_that_are_not_like_each_other(tmp_path: Path) -> None:
    places = [*range(5, 60, 10)]
    chain = [(with_changes(PROMPT, *places[:count]), ANSWER) for count in range(7)]
    assert found_in(tmp_path, chain[:2])[1][0] == 0
    found = found_in(tmp_path, chain)
    assert 0 not in found
    assert found.keys().isdisjoint(kept for kept, _ in found.values())
    assert 0 < len(found) < 6
    turned = found_in(tmp_path, chain[::-1])
    assert 0 not in turned, "the first one stays"


@settings(max_examples=examples(60), deadline=None)
@given(
    edits=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 59), st.integers(0, 9)), min_size=2, max_size=30),
    parts=st.integers(1, 4),
)
def test_what_is_left_out_is_like_one_that_stays(
    edits: list[tuple[int, int, int]], parts: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    texts = []
    for base, place, changes in edits:
        prompt = with_changes(words(base, 60), *range(place, place + 7 * changes, 7))
        texts.append((prompt, with_changes(words(base + 50, 40), *[place] * (changes > 5))))
    found = found_in(tmp_path_factory.mktemp("t"), texts)
    assert found == found_in(tmp_path_factory.mktemp("t"), texts, min(parts, len(texts))), "parts have no effect"

    def runs(text: Text) -> set[tuple[int, ...]]:
        ids = [*text[0], *text[1]]
        return {tuple(ids[at : at + 5]) for at in range(len(ids) - 4)}

    def similarity(a: int, b: int) -> float:
        return len(runs(texts[a]) & runs(texts[b])) / len(runs(texts[a]) | runs(texts[b]))

    for number, (kept, recorded) in found.items():
        assert kept < number
        assert kept not in found
        assert recorded == similarity(kept, number) >= SIMILAR
    stay = [number for number in range(len(texts)) if number not in found]
    for at, a in enumerate(stay):
        assert all(similarity(a, b) < 0.95 or texts[a][1] != texts[b][1] for b in stay[at + 1 :])


@pytest.mark.parametrize("alike", [1, 5, 3000])
def test_pairs_are_few_however_many_are_alike(alike: int) -> None:
    sketches = np.repeat(np.random.default_rng(0).integers(0, 1 << 16, (3000 // alike, SKETCH)), alike, axis=0)
    pairs = _pairs(sketches.astype(np.uint16), np.ones(3000, bool))
    assert len(pairs) <= 2 * 3000
    assert len({pair >> 32 for pair in pairs.tolist()}) == 3000 - 3000 // alike


def near_corpus(folder: Path, **given: Any) -> tuple[Path, list[dict[str, Any]], Recipe]:
    """Pack a corpus with four near-duplicates and two duplicates."""
    records = conversations(40, longest=80)
    for number in range(10):
        records[number]["messages"][0]["content"] += f" {'xyz' * (number + 1)} again and again it is so as it was"
    for number in (20, 3, 5, 3):
        messages = [dict(message) for message in records[number]["messages"]]
        messages[0]["content"] = messages[0]["content"] + " indeed" * (number != 20)
        records.append({"messages": messages})
    recipe = make_recipe(folder, records, **{"duplicates": "near", "sequence_length": 1024} | given)
    path = pack_corpus(recipe)
    dropped = (folder_of(path) / "dropped.jsonl").read_bytes().splitlines()
    return path, [orjson.loads(line) for line in dropped], recipe


@pytest.mark.parametrize(
    "given", [{}, {"turns": "apart"}, {"packing": False}, {"validation": 0.3}, {"part_size": 2000}]
)
def test_a_corpus_lists_what_is_left_out(given: dict[str, Any], tmp_path: Path) -> None:
    path, listed, _ = near_corpus(tmp_path, **given)
    places = [(near["line"], near["kept"]["line"]) for near in listed]
    assert places == [(42, 4), (43, 6)]
    manifest = load_manifest(path)
    assert manifest.ledger.conversations.dropped == {"too_long": 0, "duplicate": 2, "near_duplicate": 2}
    verify(path)
    said = shown(path, at="chat.jsonl:42")
    assert f"near-duplicate of chat.jsonl:4: {100 * listed[0]['similarity']:.0f} % of their runs" in " ".join(
        said.split()
    )
    assert "2 duplicate of another conversation; 2 near-duplicate of another conversation" in shown(path, width=300)
    run = dry_run.predict(load_config(tmp_path / "corpus.yaml"), tmp_path, tmp_path)
    assert run.whole
    assert run.ledger.conversations == manifest.ledger.conversations


def test_only_this_setting_changes_the_files(tmp_path: Path) -> None:
    paths = [pack_corpus(make_recipe(tmp_path, conversations(9), duplicates=value)) for value in ("exact", "keep")]
    for path in paths:
        assert not (folder_of(path) / "dropped.jsonl").exists()
        with open_index(load_manifest(path), folder_of(path)) as index:
            assert "near_duplicate" not in index.read_all()["dropped"].chunk(0).dictionary.to_pylist()


def another_place(lines: list[dict[str, Any]]) -> None:
    lines[0]["line"] = 9


def one_less(lines: list[dict[str, Any]]) -> None:
    lines.pop()


def one_twice(lines: list[dict[str, Any]]) -> None:
    lines.append(lines[0])


def not_similar(lines: list[dict[str, Any]]) -> None:
    lines[0]["similarity"] = 0.5


def kept_later(lines: list[dict[str, Any]]) -> None:
    lines[0]["kept"]["line"] = 44


def kept_is_gone(lines: list[dict[str, Any]]) -> None:
    lines[1]["kept"]["line"] = 42


def other_reason(lines: list[dict[str, Any]]) -> None:
    lines[0]["reason"] = "duplicate"


@pytest.mark.parametrize(
    ("tamper", "said"),
    [
        (another_place, "does not list the conversations that the index has as near_duplicate"),
        (one_less, "does not list the conversations that the index has as near_duplicate"),
        (one_twice, "does not list the conversations that the index has as near_duplicate"),
        (not_similar, "chat.jsonl:42 names no earlier conversation like it"),
        (kept_later, "chat.jsonl:42 names no earlier conversation like it"),
        (kept_is_gone, "names a conversation that does not stay"),
        (other_reason, "unknown reason 'duplicate'"),
    ],
)
def test_a_list_that_differs_from_the_index_is_refused(
    tamper: Callable[[list[dict[str, Any]]], None], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check_dropped, "BLOCK", 1)
    path, lines, _ = near_corpus(tmp_path)
    manifest, folder = load_manifest(path), folder_of(path)

    def check() -> None:
        checked = DroppedCheck(manifest, folder)
        with open_index(manifest, folder) as index:
            table = index.read_all()
        reasons = [
            -1 if name is None else check_dropped.ALL_DROP_REASONS.index(name) for name in table["dropped"].to_pylist()
        ]
        checked.add(table["source"].to_numpy(), table["record"].to_numpy(), np.array(reasons))
        checked.check()

    check()
    tamper(lines)
    (folder / "dropped.jsonl").write_bytes(b"".join(orjson.dumps(line) + b"\n" for line in lines))
    with pytest.raises(DataError, match=said):
        check()


def test_small_blocks_give_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, wanted, _ = near_corpus(tmp_path / "one")
    for name, value in (("CACHED", 50), ("COMPARED", 100), ("PAIRS", 2)):
        monkeypatch.setattr(near_duplicates, name, value)
    _, found, _ = near_corpus(tmp_path / "other")
    assert found == wanted


def test_a_sample_finds_near_duplicates_within_it(tmp_path: Path) -> None:
    records = conversations(400, longest=60)
    config = write_project(tmp_path, [*records, *records], duplicates="near", sequence_length=1024)
    run = dry_run.predict(load_config(config), tmp_path, tmp_path, budget=60_000)
    assert not run.whole
    assert run.ledger.conversations.packed > 0.5 * run.ledger.conversations.read
    assert "near_duplicate" not in run.ledger.conversations.dropped, "a sampled record is repeated"
