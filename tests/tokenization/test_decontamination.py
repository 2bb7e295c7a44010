"""Overlaps with an evaluation set are found in any case and punctuation."""

from __future__ import annotations

import pickle
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.inspected import shown
from support.packed_rows import folder_of
from support.profiles import examples
from support.small_corpus import conversations, make_recipe, pack_corpus

from packcorpus.tasks.config import load_config
from packcorpus.tasks.core.errors import DataError, PackError
from packcorpus.tasks.dry_run import dry_run
from packcorpus.tasks.recipe import resolve
from packcorpus.tasks.sources.evaluation_files import Item, find_evaluation_files, read_items
from packcorpus.tasks.storage.layout import Layout
from packcorpus.tasks.storage.manifest import load_manifest
from packcorpus.tasks.tokenization import decontamination
from packcorpus.tasks.tokenization.decontamination import LONG, SHORT, Evaluation, words_of
from packcorpus.tasks.verification.verify import verify

WORDS = [f"w{number}x" for number in range(3000)]


def text_of(seed: int, count: int) -> str:
    return " ".join(random.Random(seed).choices(WORDS, k=count))


def evaluation_of(*files: Sequence[str]) -> Evaluation:
    """Return evaluation sets whose items are one question each."""
    return Evaluation([[Item(n, (text,), (text,)) for n, text in enumerate(texts, 1)] for texts in files])


def places(evaluation: Evaluation, *texts: str) -> list[tuple[int, int] | None]:
    found = evaluation.overlaps([[text] for text in texts])
    return [found[n][:2] if n in found else None for n in range(len(texts))]


LONG_ITEM, ITEM, QUESTION = text_of(1, 40), text_of(2, SHORT + 1), "What is 3 × 4?"
ONE = [LONG_ITEM, ITEM, QUESTION]


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (f"so {LONG_ITEM} it is", 1),
        (" ".join(LONG_ITEM.split()[7 : 7 + LONG]), 1),
        (" ".join(LONG_ITEM.split()[7 : 6 + LONG]), None),
        (LONG_ITEM.upper().replace(" ", " -- ").replace("W", "\uff37"), 1),
        (f"**{ITEM.replace(' ', ', ')}**!", 2),
        (f"say {ITEM} please", 2),
        (" ".join(ITEM.split()[:SHORT]), None),
        ("  what is 3 × 4", 3),
        ("What is 3 × 5?", None),
        ("What is 3 + 4?", None),
        ("Please: What is 3 × 4? Thanks", None),
    ],
)
def test_an_overlap_is_found(text: str, line: int | None) -> None:
    assert places(evaluation_of(ONE), text) == [line and (0, line)]
    assert places(evaluation_of(["other words"], ONE), "nothing", text)[1] == (line and (1, line))


def test_questions_with_other_operators_or_without_words_are_others() -> None:
    evaluation = evaluation_of(["3 - 4?", "a well-known word", "Hi!", "Go on"])
    assert places(evaluation, "3 / 4", "3-4", "A well known word.", "Hi!", "Go on") == [
        None,
        (0, 1),
        (0, 2),
        None,
        None,
    ]
    assert evaluation.counts == [[4, 2]]


def test_what_many_items_share_does_not_count() -> None:
    for count in (2, 5, 300):
        for size in (7, 12, 13, 40):
            line = text_of(3, size)
            evaluation = evaluation_of([f"{line}: {text_of(100 + n, 6)}" for n in range(count)])
            others = [f"{line}: {text_of(5000 + n, 6)}" for n in range(50)]
            assert places(evaluation, *others) == [None] * 50
            same = [f"{line}: {text_of(100 + n, 6)}" for n in range(count)]
            assert places(evaluation, *same) == [(0, n + 1) for n in range(count)]
            assert evaluation.counts == [[count, 0]]


def test_a_passage_that_some_items_share_counts() -> None:
    passage = text_of(4, 60)
    evaluation = evaluation_of(
        [*(f"{passage} {text_of(200 + n, 9)}" for n in range(5)), *(text_of(n, 20) for n in range(30))]
    )
    assert places(evaluation, f"so: {passage}") == [(0, 1)]


def test_items_that_occur_twice_count_and_the_first_is_named() -> None:
    item = text_of(5, 30)
    assert places(evaluation_of([item, item], [item]), item) == [(0, 1)]
    assert evaluation_of([item, item], [item]).counts == [[2, 0], [1, 0]]
    assert evaluation_of([], ["a"]).counts == [[0, 0], [1, 1]]
    assert places(evaluation_of([]), item) == [None]


@settings(max_examples=examples(100), deadline=None)
@given(
    sizes=st.lists(st.integers(3, 40), min_size=1, max_size=12),
    before=st.integers(0, 30),
    seed=st.integers(0, 1 << 30),
    shared=st.integers(0, 30),
)
def test_all_planted_overlaps_are_found(sizes: list[int], before: int, seed: int, shared: int) -> None:
    line, source = text_of(seed + 1, shared), random.Random(seed)
    items = [f"{line} {text_of(seed + 10 + n, size)}" for n, size in enumerate(sizes)]
    evaluation = evaluation_of(items)
    assert evaluation.counts[0][1] == 0

    def disguised(text: str) -> str:
        changes = str.upper, str.title, str
        return " ".join(source.choice(changes)(word) + source.choice([*",.;!? ", "--"]) for word in text.split())

    for number, item in enumerate(items, 1):
        is_short = len(words_of(item)) < SHORT
        text = disguised(item) if is_short else f"{text_of(seed + 5, before)} {disguised(item)} {text_of(seed + 6, 5)}"
        assert places(evaluation, text) == [(0, number)]
    # Other words never overlap, even with the same beginning, unless that is of one item only.
    found = (0, 1) if len(items) == 1 and shared >= LONG else None
    assert places(evaluation, f"{line} {text_of(seed + 900, 60)}") == [found]


def test_words_are_compared_if_hashes_are_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decontamination, "_hashed", lambda words, count: np.ones(count, np.uint64))
    evaluation = evaluation_of([LONG_ITEM])
    assert places(evaluation, text_of(6, 40), " ".join(LONG_ITEM.split()[:LONG])) == [None, (0, 1)]


@pytest.mark.parametrize("text", ["今日は天気がとても良いので散歩に行きましょう", "สวัสดีชาวโลกวันนี้อากาศดีมาก"])
def test_scripts_without_spaces_have_a_word_for_each_character(text: str) -> None:
    assert places(evaluation_of([text]), f"abc{text}def", text[:9]) == [(0, 1), None]


# -- the corpus --------------------------------------------------------------------------------------------------------

GSM = {"question": text_of(11, 30), "answer": text_of(12, 20), "id": 7}
CHAT = {"messages": [{"role": "system", "content": text_of(20, 30)}, {"role": "user", "content": text_of(21, 30)}]}
CHAT["messages"].append({"role": "assistant", "content": "yes"})


def write_sets(folder: Path) -> list[str]:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "gsm.jsonl").write_bytes(orjson.dumps(GSM) + b"\n")
    (folder / "sets").mkdir()
    (folder / "sets" / "chat.json").write_bytes(orjson.dumps([CHAT]))
    pq.write_table(pa.table({"prompt": [text_of(31, 30)], "completion": ["no"]}), folder / "sets" / "pairs.parquet")
    (folder / "lines.txt").write_text(f"\n{text_of(41, 30)}\nWhat is this here?\n", encoding="utf-8")
    return ["gsm.jsonl", "sets/*", "lines.txt"]


def planted() -> list[dict[str, Any]]:
    def chat(question: str, answer: str = "so it is") -> dict[str, Any]:
        return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}

    records = conversations(30)
    for line, record in (
        (4, chat(f"Now: {GSM['question'].upper()}")),
        (9, chat("Why?", f"Because {GSM['answer']}.")),
        (12, chat(CHAT["messages"][1]["content"])),
        (17, chat(text_of(20, 30))),  # only a system message has it
        (20, chat(f"{text_of(31, 30)}")),
        (23, chat(text_of(41, 30))),
        (28, chat("what is THIS here")),
    ):
        records[line - 1] = record
    return records


FOUND = [
    (4, "gsm.jsonl", 1), (9, "gsm.jsonl", 1), (12, "sets/chat.json", 1), (20, "sets/pairs.parquet", 1),
    (23, "lines.txt", 2), (28, "lines.txt", 3),
]  # fmt: skip


@pytest.mark.parametrize(
    "given",
    [{}, {"turns": "apart"}, {"packing": False}, {"part_size": 1024}, {"duplicates": "near", "validation": 0.3}],
)
def test_a_corpus_lists_every_overlap_with_both_places(given: dict[str, Any], tmp_path: Path) -> None:
    files = write_sets(tmp_path)
    recipe = make_recipe(tmp_path, planted(), decontaminate=files, sequence_length=1024, **given)
    path = pack_corpus(recipe)
    lines = (folder_of(path) / "dropped.jsonl").read_bytes().splitlines()
    listed = [line for line in map(orjson.loads, lines) if line["reason"] == "contaminated"]
    found = [
        (line["line"], line["item"]["source"], line["item"].get("line") or line["item"]["record"]) for line in listed
    ]
    assert found == FOUND
    assert listed[0]["text"] == " ".join(words_of(GSM["question"])[:LONG])[:100]
    manifest = load_manifest(path)
    assert manifest.ledger.conversations.dropped["contaminated"] == len(FOUND)
    assert [(file.items, file.unmatched, file.conversations) for file in manifest.evaluation] == [
        (1, 0, 2), (1, 0, 1), (1, 0, 1), (2, 0, 2),
    ]  # fmt: skip
    verify(path)
    said = " ".join(shown(path, at="chat.jsonl:4").split())
    assert f"overlaps with gsm.jsonl:1 of an evaluation set: {listed[0]['text'][:20]}" in said
    view = shown(path, width=300)
    assert f"{len(FOUND)} overlap with an evaluation set" in view
    assert "decontaminate: 2 conversations left out for an overlap with gsm.jsonl (1 item)" in view
    run = dry_run.predict(load_config(tmp_path / "corpus.yaml"), tmp_path, tmp_path)
    assert run.ledger.conversations == manifest.ledger.conversations


@pytest.mark.parametrize(
    ("name", "content", "texts", "questions"),
    [
        ("a.csv", "question,choices,answer\nWhich one?,a,B\n", ["Which one?", "B"], ["Which one?"]),
        ("b.csv", "id;frage;loesung\n1;Welche?;B\n", ["1", "Welche?", "B"], []),
        ("c.jsonl", '{"question": "So?", "choices": ["0", "4"], "answer": 1}\n', ["So?", "0", "4"], ["So?"]),
        ("d.json", '[{"q": {"Question": "So?"}}]', ["So?"], ["So?"]),
        ("e.jsonl", '"a text"\n', ["a text"], []),
        ("f.jsonl", '{"prompt": "So?", "chosen": "a", "rejected": "b"}\n', ["So?", "a", "b"], ["So?"]),
        ("h.jsonl", '{"prompt": "So?", "completions": ["a"], "by": "b"}\n', ["So?", "a", "b"], ["So?"]),
        ("g.jsonl", '{"instruction": "Add", "input": "1, 2", "output": "3"}\n', ["Add\n1, 2", "3"], ["Add\n1, 2"]),
    ],
)
def test_items_have_any_keys(name: str, content: str, texts: list[str], questions: list[str], tmp_path: Path) -> None:
    (tmp_path / name).write_text(content, encoding="utf-8")
    [file] = find_evaluation_files([name], tmp_path, Layout(tmp_path / "root"))
    assert file.format not in ("completions", "preference"), "all strings of such records are read, as of other keys"
    [item] = read_items(file, tmp_path)
    assert item.line == 1
    assert [text.strip() for text in item.texts] == texts
    assert [text.strip() for text in item.questions] == questions


def test_another_evaluation_set_makes_another_corpus(tmp_path: Path) -> None:
    files = write_sets(tmp_path)
    without = make_recipe(tmp_path, planted())
    recipe = make_recipe(tmp_path, planted(), decontaminate=files)
    again = resolve(tmp_path / "corpus.yaml", tmp_path)
    assert again.corpus_key == recipe.corpus_key != without.corpus_key
    assert again.token_keys == recipe.token_keys != without.token_keys
    sent = pickle.loads(pickle.dumps(recipe))  # noqa: S301 - to another process
    assert sent.tokens_key(recipe.parts[0]) == recipe.token_keys[0]
    (tmp_path / "lines.txt").write_text("another question for the model", encoding="utf-8")
    other = resolve(tmp_path / "corpus.yaml", tmp_path)
    assert other.corpus_key != recipe.corpus_key
    (tmp_path / "moved.txt").write_text("another question for the model", encoding="utf-8")
    moved = make_recipe(tmp_path, planted(), decontaminate=[*files[:-1], "moved.txt"])
    assert moved.corpus_key == other.corpus_key, "the name has no effect"
    assert moved.plan_key != other.plan_key, "but it is in the list"


def test_a_missing_or_changed_evaluation_set_is_named(tmp_path: Path) -> None:
    for name in ("none.txt", "none.jsonl"):
        with pytest.raises(PackError, match=f"{name}: "):
            make_recipe(tmp_path, planted(), decontaminate=[name])
    files = write_sets(tmp_path)
    recipe = make_recipe(tmp_path, planted(), decontaminate=files)
    (tmp_path / "lines.txt").write_text("other", encoding="utf-8")
    with pytest.raises(DataError, match=r"lines.txt: changed while it was read"):
        pack_corpus(recipe)


def test_other_conversations_are_not_duplicates_of_one_that_overlaps(tmp_path: Path) -> None:
    records = planted()
    records.append(records[3])
    path = pack_corpus(make_recipe(tmp_path, records, decontaminate=write_sets(tmp_path), duplicates="exact"))
    assert load_manifest(path).ledger.conversations.dropped == {"contaminated": len(FOUND) + 1, "too_long": 0}
