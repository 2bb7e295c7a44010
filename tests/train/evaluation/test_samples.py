"""Samples continue the text before the first trained turn of a conversation.

They are generated from validation conversations, and each is written once.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.small_corpus import conversations, make_recipe, pack_corpus
from support.training.tiny_training import LENGTH, Row, tiny_model

from packcorpus.tasks.encoders.tokenizer_files import open_tokenizer
from packcorpus.train import evaluation
from packcorpus.train.data.corpus import Corpus, open_corpus
from packcorpus.train.data.dataset import PackedDataset
from packcorpus.train.evaluation import (
    NAME,
    Prompt,
    Samples,
    find_prompts,
    generating,
    greedy,
    lines_of,
    read_samples,
    samples_of,
    stop_tokens,
)
from packcorpus.train.loop.record import open_console


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    values = {"validation": 0.3, "sequence_length": LENGTH}
    return open_corpus(pack_corpus(make_recipe(tmp_path_factory.mktemp("corpus"), conversations(40), **values)))


@pytest.fixture(scope="module")
def rows(corpus: Corpus) -> PackedDataset:
    return PackedDataset(corpus, "validation")


# Turns: their numbers of untrained and of trained tokens.
TURNS = st.lists(st.tuples(st.integers(1, 4), st.integers(1, 4)), max_size=3)


@given(st.lists(st.lists(st.tuples(TURNS, st.integers(0, 3)), min_size=1, max_size=3), max_size=3), st.integers(0, 5))
def test_prompts_are_what_precedes_the_first_trained_turn(drawn: Any, count: int) -> None:
    rows, expected, token = [], [], 0
    for row in drawn:
        ids: list[int] = []
        labels: list[int] = []
        positions: list[int] = []
        for turns, rest in row:
            conversation: list[tuple[int, bool]] = []
            for untrained, trained in turns:
                conversation += [(token + n, n >= untrained) for n in range(untrained + trained)]
                token += untrained + trained
            conversation += [(token + n, False) for n in range(rest)]
            token += rest
            ids += [number for number, _ in conversation]
            labels += [number if trained else -100 for number, trained in conversation]
            positions += range(len(conversation))
            if turns:
                first, length = turns[0]
                numbers = [number for number, _ in conversation]
                expected.append(Prompt(numbers[:first], numbers[first : first + length]))
        if ids:
            columns = {"input_ids": ids, "labels": labels, "position_ids": positions}
            rows.append({name: torch.tensor(column) for name, column in columns.items()})
    assert find_prompts(rows, count) == expected[:count]


def test_a_row_of_format_2_is_one_conversation() -> None:
    rows = [{"input_ids": [5, 6, 7, 8], "labels": [-100, -100, 7, -100]}]
    assert find_prompts(rows, 3) == [Prompt([5, 6], [7])]
    # Nothing predicts the first token: it is the prompt even if it is trained on.
    assert find_prompts([{"input_ids": [5, 6], "labels": [5, 6]}], 3) == [Prompt([5], [6])]


def test_prompts_of_a_corpus_end_where_the_answer_begins(corpus: Corpus, rows: PackedDataset) -> None:
    assert corpus.manifest is not None
    decode = open_tokenizer(corpus.manifest, corpus.folder).decode
    found = find_prompts(rows, 1000)
    assert len(found) == rows.conversations > 2 * len(rows), "several in each row"
    for prompt in found:
        assert decode(prompt.ids).startswith("<|im_start|>user\n")
        assert decode(prompt.ids).endswith("<|im_end|>\n<|im_start|>assistant\n")
        assert decode(prompt.expected).removesuffix("</s>").endswith("<|im_end|>")
        assert decode(prompt.expected).count("<|im_end|>") == 1


def evaluated(callback: Samples, step: int, is_first: bool = True) -> None:
    state = SimpleNamespace(global_step=step, is_world_process_zero=is_first)
    callback.on_evaluate(SimpleNamespace(bf16=False, fp16=False), state, None)


def test_samples_are_written_as_text(
    corpus: Corpus, rows: PackedDataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evaluation, "LIMIT", 12)
    model = tiny_model()
    evaluated(Samples(corpus, rows, model, 3, tmp_path, open_console(quiet=True)), 7)
    assert corpus.manifest is not None
    encoder = open_tokenizer(corpus.manifest, corpus.folder)
    stops = {encoder.eos_id, encoder.controls["<|im_end|>"]}
    found = [json.loads(line) for line in (tmp_path / NAME).read_text().splitlines()]
    assert [(sample["step"], sample["sample"]) for sample in found] == [(7, 0), (7, 1), (7, 2)]
    for sample, prompt in zip(found, find_prompts(rows, 3), strict=True):
        with generating(model, torch.float32):
            ids = greedy(model, prompt.ids, 12, stops)
        assert sample["prompt"] == encoder.decode(prompt.ids)
        assert sample["expected"] == encoder.decode(prompt.expected)
        assert sample["generated"] == encoder.decode(ids)
        assert sample["ended"] == (ids[-1] in stops)
    assert samples_of(tmp_path, 7) == found
    assert samples_of(tmp_path, 8) == []


def test_an_answer_ends_with_eos_or_a_control_token_that_ends_an_expected_one(corpus: Corpus) -> None:
    assert corpus.manifest is not None
    encoder = open_tokenizer(corpus.manifest, corpus.folder)
    end, word = encoder.controls["<|im_end|>"], 70
    assert word not in encoder.controls.values()
    # The last token of a truncated answer is a word, which may follow anything.
    assert stop_tokens([Prompt([5], [6, word]), Prompt([5], [6, end])], encoder) == {end, encoder.eos_id}
    assert stop_tokens([Prompt([5], [6, word])], encoder) == {encoder.eos_id}
    assert stop_tokens([Prompt([5], [6, word]), Prompt([5], [end])], None) == {word, end}


def test_without_a_tokenizer_samples_are_ids(
    corpus: Corpus, rows: PackedDataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evaluation, "LIMIT", 3)
    shards = tmp_path / "shards"
    shards.mkdir()
    for path in corpus.folder.glob("*-of-*.arrow"):
        (shards / path.name).write_bytes(path.read_bytes())
    bare = open_corpus(shards)
    assert bare.manifest is None
    evaluated(Samples(bare, rows, tiny_model(), 1, tmp_path, open_console(quiet=True)), 2)
    [sample] = read_samples(tmp_path / NAME)
    [prompt] = find_prompts(rows, 1)
    assert (sample["prompt"], sample["expected"]) == (prompt.ids, prompt.expected)
    assert all(isinstance(token, int) for token in sample["generated"])


def test_a_resumed_run_replaces_what_follows_its_checkpoint(
    corpus: Corpus, rows: PackedDataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evaluation, "LIMIT", 3)
    callback = Samples(corpus, rows, tiny_model(), 2, tmp_path, open_console(quiet=True))
    for step in (2, 4):
        evaluated(callback, step)
    once = (tmp_path / NAME).read_bytes()
    evaluated(callback, 6)
    evaluated(callback, 4)  # resumed after step 2 or 3
    assert (tmp_path / NAME).read_bytes() == once


def test_only_the_first_rank_generates(corpus: Corpus, rows: PackedDataset, tmp_path: Path) -> None:
    callback = Samples(corpus, rows, None, 2, tmp_path, open_console(quiet=True))
    evaluated(callback, 2, is_first=False)
    assert not (tmp_path / NAME).exists()


def test_an_answer_ends_at_the_last_position_of_the_model(corpus: Corpus, tmp_path: Path) -> None:
    model = tiny_model(max_position_embeddings=20)
    ids = torch.arange(3, 20)
    row: Row = {"input_ids": ids, "labels": torch.where(ids > 17, ids, -100), "position_ids": ids - 3}
    callback = Samples(corpus, [row], model, 1, tmp_path, open_console(quiet=True))
    callback._stops, callback._encoder = set(), None
    evaluated(callback, 2)
    [sample] = read_samples(tmp_path / NAME)
    assert len(sample["prompt"]) == 15
    assert (len(sample["generated"]), sample["ended"]) == (5, False)


def test_a_few_samples_are_printed_without_what_a_terminal_obeys() -> None:
    sample = {"step": 4, "prompt": "x" * 99 + "\x1b[2J", "expected": "yes", "generated": "y" * 99, "ended": True}
    lines = lines_of([sample | {"sample": number} for number in range(5)])
    assert len(lines) == 6
    assert lines[0].startswith('sample 0, step 4: "xxx')
    assert lines[0].endswith('x\\u001b[2J"')
    assert lines[1] == f'  generated "{"y" * 60}…", expected "yes"'
