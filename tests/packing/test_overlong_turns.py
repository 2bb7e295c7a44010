"""`overlong: turns` cuts a conversation after its last trained turn that fits."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from reference.corpus import expected
from reference.rows import Piece, pieces_of
from support.differential.comparison import library_of
from support.inspected import as_object, shown
from support.packed_rows import folder_of
from support.row_shapes import IGNORED, check_corpus, read_corpus
from support.small_corpus import WORDS, make_recipe, pack_corpus
from support.templates.modern_templates import STRIPS
from support.tokenizer_kinds import kind_path

from packcorpus.tasks.storage.manifest import load_manifest
from packcorpus.tasks.verification.rebuild import rebuild
from packcorpus.tasks.verification.repair import repair
from packcorpus.tasks.verification.verify import verify

Record = dict[str, Any]

LENGTH = 96
PAIRS = [("chatml", "sp_bpe_chatml"), ("llama2", "hf_legacy"), ("mistral", "hf_metaspace"), ("zephyr", "hf_unigram")]


def say(role: str, number: int, words: int) -> Record:
    return {"role": role, "content": " ".join(WORDS[(number + at) % len(WORDS)] for at in range(words))}


def session(number: int, words: int) -> Record:
    """Return a conversation of up to seven exchanges.

    One of the first three answers has `words` words.
    """
    sizes = [
        (3 + (number + at) % 5, words if at == (number // 4) % 3 else 2 + (number * at) % 7)
        for at in range(1 + number % 7)
    ]
    messages = [
        say(role, number + at, size)
        for at, both in enumerate(sizes)
        for role, size in zip(("user", "assistant"), both, strict=True)
    ]
    return {"messages": messages}


RECORDS = [session(number, words) for number, words in zip(range(60), [4, 20, 40, 90] * 15, strict=True)]


@pytest.mark.parametrize("train_on", ["assistant", "last"])
@pytest.mark.parametrize(("template", "kind"), PAIRS)
def test_rows_have_the_turns_that_the_reference_keeps(template: str, kind: str, train_on: str, tmp_path: Path) -> None:
    settings = {"template": template, "tokenizer": str(kind_path(kind)), "train_on": train_on, "max_rejects": 1.0}
    settings |= {"unknown_markers": "text"}
    path = pack_corpus(make_recipe(tmp_path, RECORDS, sequence_length=LENGTH, overlong="turns", **settings))
    verify(path)
    found, library = read_corpus(path), library_of(kind)
    check_corpus(found)
    samples = expected(RECORDS, "messages", template, library, train_on)
    wanted, cut = {}, 0
    for record, own in enumerate(samples, 1):
        [(ids, trained)] = own or [([], [])]
        wanted[record] = pieces_of((ids, trained), LENGTH, "turns", library.eos)
        cut += bool(wanted[record]) and len(ids) > LENGTH
    there: dict[int, list[Piece]] = {record: [] for record in wanted}
    for row in found.rows["train"]:
        for entry in row.entries:
            place = slice(entry["start"], entry["start"] + entry["length"])
            ids, labels = row.columns["input_ids"][place], row.columns["labels"][place]
            there[entry["record"]].append(Piece(entry["first"], ids, [label != IGNORED for label in labels]))
    assert there == wanted
    dropped = [record for record, pieces in wanted.items() if not pieces]
    assert [entry["record"] for entry in found.index if entry["dropped"] == "too_long"] == dropped
    counts = load_manifest(path).ledger.conversations
    assert (counts.truncated, counts.dropped, counts.rejected) == (cut, {"too_long": len(dropped)}, {})
    if train_on == "assistant":
        assert min(cut, len(dropped)) > 5, "the corpus lacks what it is for"


def test_a_corpus_is_rebuilt_repaired_and_inspected(tmp_path: Path) -> None:
    settings = {"overlong": "turns", "sequence_length": LENGTH, "validation": 0.2, "loss_weight": "conversation"}
    path = pack_corpus(make_recipe(tmp_path, RECORDS, **settings))
    assert rebuild(path).endswith(": identical")
    shard = next(file for file in folder_of(path).iterdir() if file.name.startswith("train-"))
    whole = shard.read_bytes()
    shard.unlink()
    assert [restored.path for restored in repair(path)] == [shard]
    assert shard.read_bytes() == whole
    index = [entry for entry in read_corpus(path).index if entry["row"] is not None]
    number = next(entry["record"] for entry in index if entry["truncated"])
    [piece] = as_object(path, at=f"chat.jsonl:{number}")["pieces"]
    assert piece["truncated"]
    tokens = load_manifest(path).ledger.tokens
    assert f"of them trained {tokens.trained_truncated:,}" in " ".join(shown(path).split())


def test_a_question_or_a_tool_result_never_ends_a_row(tmp_path: Path) -> None:
    """Calls, results, and answers are packed up to the last turn that fits whole."""
    call = {"id": "a", "type": "function", "function": {"name": "train", "arguments": {"at": 9}}}
    task = [
        {"role": "user", "content": "the train"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a", "content": "eleven minutes " * 3},
        {"role": "assistant", "content": "it leaves at 9"},
    ]
    results = [{**task[2], "content": "eleven minutes " * size} for size in range(1, 40)]
    records = [{"messages": [*task, task[0], task[1], result, task[3]]} for result in results]
    path = pack_corpus(make_recipe(tmp_path, records, overlong="turns", sequence_length=288))
    ends = set()
    for at in range(1, len(records) + 1):
        [piece] = as_object(path, at=f"chat.jsonl:{at}")["pieces"]
        trained = "".join(span["text"] for span in piece["spans"] if span["trained"]).removesuffix("</s>")
        assert trained.endswith("<|im_end|>")
        assert piece["text"].endswith("<|im_end|></s>"), "a result or a question follows the last turn"
        whole = trained.removesuffix("<|im_end|>").endswith(task[3]["content"])
        ends.add((piece["truncated"], "an answer" if whole else "a call"))
        assert whole or trained.endswith("</tool_call><|im_end|>")
    assert ends == {(True, "a call"), (False, "an answer")}


def test_samples_with_several_trained_turns_are_cut_after_one_of_them(tmp_path: Path) -> None:
    """A template that strips reasoning makes two samples of two tasks.

    Each sample is cut on its own.
    """
    (tmp_path / "strips.jinja").write_text(STRIPS)
    number = iter(range(1000))

    def task(turns: int) -> list[Record]:
        asked = {"role": "user", "content": "the train"}
        steps = [
            {
                "role": role,
                "content": f"{WORDS[next(number) % 14]} at 9",
                **({"reasoning_content": "so"} if own else {}),
            }
            for _ in range(turns)
            for role, own in (("assistant", True), ("tool", False))
        ]
        return [asked, *steps[:-1]]

    records = [{"messages": [*task(3 + at % 3), *task(4 + at % 5)]} for at in range(8)]
    settings = {"template": "strips.jinja", "tokenizer": str(kind_path("hf_byte_level")), "max_rejects": 1.0}
    whole, cut = (
        read_corpus(pack_corpus(make_recipe(tmp_path, records, sequence_length=length, overlong="turns", **settings)))
        for length in (4096, 160)
    )
    pieces = [
        {
            (entry["record"], entry["turn"]): (row.columns["input_ids"][place], row.columns["labels"][place], entry)
            for row in corpus.rows["train"]
            for entry in row.entries
            for place in [slice(entry["start"], entry["start"] + entry["length"])]
        }
        for corpus in (whole, cut)
    ]
    assert {*pieces[1]} < {*pieces[0]} or {*pieces[1]} == {*pieces[0]}
    lost = 0
    for place, (ids, labels, entry) in pieces[1].items():
        own, trained, _ = pieces[0][place]
        end = entry["length"] - entry["closed"]
        assert (ids[:end], labels[:end]) == (own[:end], trained[:end])
        ends = [at for at, (one, then) in enumerate(pairwise([*trained, IGNORED]), 1) if one != IGNORED == then]
        assert end in ends
        assert not any(after <= 160 - (own[after - 1] != own[-1]) for after in ends if after > end)
        lost += sum(label != IGNORED for label in trained[end:])
    ledger = cut.manifest.ledger
    assert ledger.samples is not None
    assert ledger.conversations.truncated > 3
    assert ledger.tokens.trained_truncated == lost > 0
    assert max(sum(1 for a, b in pairwise(labels) if a == IGNORED != b) for _, labels, _ in pieces[1].values()) > 1
