"""Every stage and command handles records with several answers to a prompt."""

from __future__ import annotations

import json
import random
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from support.commands import packcorpus
from support.containers import as_csv, as_parquet
from support.inspected import as_object, rendered, shown
from support.packed_rows import folder_of, shards_of
from support.small_corpus import WORDS, make_recipe, pack_corpus
from support.templates.agent_templates import AGENTS
from support.tokenizer_kinds import kind_path

from packcorpus.corpus import open as open_corpus
from packcorpus.tasks.cli.check_view import show_prediction
from packcorpus.tasks.core.errors import DataError, UsageError
from packcorpus.tasks.corpus.summary import explain_samples
from packcorpus.tasks.dry_run.dry_run import predict
from packcorpus.tasks.inspection.lookup import read_rejects
from packcorpus.tasks.storage.manifest import Manifest, load_manifest
from packcorpus.tasks.verification.rebuild import rebuild
from packcorpus.tasks.verification.verify import verify
from packcorpus.train.certify.prompts import conversations_of

Record = dict[str, Any]


def words(source: random.Random) -> str:
    return " ".join(source.choices(WORDS, k=source.randint(1, 9)))


def answered(count: int, seed: int = 0) -> list[Record]:
    """Return records with one to four answers, each with another prompt."""
    source = random.Random(seed)
    return [
        {"prompt": f"{n} {words(source)}", "completions": [words(source) for _ in range(source.randint(1, 4))], "id": n}
        for n in range(count)
    ]


def alone(records: Sequence[Record]) -> list[Record]:
    return [
        {"prompt": record["prompt"], "completion": answer} for record in records for answer in record["completions"]
    ]


def index_of(path: Path) -> list[dict[str, Any]]:
    return list(pa.ipc.open_stream((folder_of(path) / "index.arrow").read_bytes()).read_all().to_pylist())


def packed(folder: Path, records: Sequence[Record], **settings: Any) -> tuple[Path, Manifest]:
    """Pack records, and check that a run balances, and that `check` predicts it."""
    recipe = make_recipe(folder, records, **settings)
    path = pack_corpus(recipe)
    verify(path)
    manifest = load_manifest(path)
    run = predict(recipe.config, folder, folder)
    assert run.ledger == manifest.ledger
    assert run.rows == {name: split.rows for name, split in manifest.splits.items()}
    return path, manifest


def samples_of(path: Path, records: int, name: str = "chat.jsonl") -> list[tuple[list[int], list[int]]]:
    """Return the ids and labels of all samples, ordered by record and turn."""
    corpus = open_corpus(path)
    found = [corpus.conversation(f"{name}:{n + 1}").samples for n in range(records)]
    return [(sample.tokens.tolist(), sample.labels.tolist()) for samples in found for sample in samples]


def test_a_corpus_has_one_sample_for_each_answer(tmp_path: Path) -> None:
    records = answered(30)
    path, manifest = packed(tmp_path / "a", records)
    single, other = packed(tmp_path / "b", alone(records))
    assert samples_of(path, 30) == samples_of(single, len(alone(records)))
    samples, conversations = manifest.ledger.samples, manifest.ledger.conversations
    assert samples is not None
    assert (conversations.read, conversations.packed) == (30, 30)
    assert samples.read == samples.packed == len(alone(records)) == other.ledger.conversations.packed
    assert manifest.ledger.tokens.trained == other.ledger.tokens.trained
    assert samples.ways_out == {}
    assert manifest.sources[0].format == "completions"
    assert manifest.unused_keys == {"chat.jsonl": {"id": 30}}
    turns = defaultdict(list)
    for entry in index_of(path):
        turns[entry["record"]].append(entry["turn"])
    for number, record in enumerate(records, 1):
        count = len(record["completions"])
        assert sorted(turns[number]) == ([-1] if count == 1 else [*range(1, 1 + count)])
    assert rebuild(path).endswith(": identical")


def test_a_single_answer_gives_the_rows_of_before(tmp_path: Path) -> None:
    records = [record | {"completions": record["completions"][:1]} for record in answered(40)]
    settings = {"validation": 0.2, "duplicates": "exact", "validation_by": "prompt"}
    again = [*records, *records[:5]]
    found = [packed(tmp_path / name, some, **settings) for name, some in (("a", again), ("b", alone(again)))]
    paths, (listed, before) = zip(*found, strict=True)
    rows, rows_before = ([pa.ipc.open_stream(shard.read_bytes()).read_all() for shard in shards_of(p)] for p in paths)
    assert [table.to_pydict() for table in rows] == [table.to_pydict() for table in rows_before]
    assert listed.ledger.conversations == before.ledger.conversations
    assert listed.ledger.samples is None


def test_a_pair_is_the_chosen_answer_or_both(tmp_path: Path) -> None:
    source = random.Random(1)
    turns = [
        [{"role": role, "content": words(source)} for role in ("user", "assistant", "user", "assistant", "assistant")]
        for _ in range(20)
    ]
    records = [{"chosen": [*four[:3], four[3]], "rejected": [*four[:3], four[4]]} for four in turns]
    path, manifest = packed(tmp_path / "chosen", records)
    single, _ = packed(tmp_path / "single", [{"messages": four[:4]} for four in turns])
    assert samples_of(path, 20) == samples_of(single, 20)
    assert manifest.unused_keys == {"chat.jsonl": {"rejected": 20}}
    assert "pairs" not in manifest.config
    both, found = packed(tmp_path / "both", records, pairs="both")
    assert found.config["pairs"] == "both"
    assert found.unused_keys == {}
    untrained = [[turn | {"train": False} for turn in four[:3]] for four in turns]
    expected = [{"messages": [*before, four[4]]} for before, four in zip(untrained, turns, strict=True)]
    rejected, _ = packed(tmp_path / "rejected", expected)
    assert samples_of(both, 20)[::2] == samples_of(single, 20)
    assert samples_of(both, 20)[1::2] == samples_of(rejected, 20)
    for by in (path, both):
        messages = open_corpus(by).conversation("chat.jsonl:3").messages
        assert [message["content"] for message in messages] == [
            turn["content"] for turn in turns[2][: 4 + (by == both)]
        ]
    assert rebuild(both).endswith(": identical")
    ignored = [{"path": "chat.jsonl", "ignore": ["rejected"]}]
    left, _ = packed(tmp_path / "ignored", records, pairs="both", sources=ignored)
    assert samples_of(left, 20) == samples_of(path, 20)
    settings = {"tokenizer": None, "vocab_size": 300}
    trained = [make_recipe(tmp_path / name, records * 9, pairs=name, **settings) for name in ("chosen", "both")]
    assert trained[0].tokenizer_key != trained[1].tokenizer_key
    recipes = [make_recipe(tmp_path / name, records, pairs=name) for name in ("chosen", "both")]
    assert recipes[0].token_keys != recipes[1].token_keys


def test_answers_in_a_table_are_those_of_lines(tmp_path: Path) -> None:
    """A table has nulls for the keys that a message lacks, and answers as text."""
    turns = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add", "arguments": "{}"}}]}
    lists = [{"prompt": turns[:1], "completions": [turns[1:], [call, {"role": "tool", "content": "4"}, turns[1]]]}] * 3
    texts = [{"question": "2+2?", "completions": ["4", "Four."], "loss_weight": [1.0, 0.5]}] * 3
    pairs = [{"chosen": turns, "rejected": [turns[0], {"role": "assistant", "content": "5"}]}] * 3
    given = {
        "pairs": "both",
        "loss_weight": "data",
        "template": "t.jinja",
        "tokenizer": str(kind_path("hf_byte_level")),
    }
    for number, records in enumerate((lists, texts, pairs)):
        folders = [tmp_path / f"{number}{kind}" for kind in ("lines", "table", "cells")]
        cells = [{key: value if type(value) is str else json.dumps(value) for key, value in r.items()} for r in records]
        found = []
        for folder, data in zip(folders, (None, as_parquet(records), as_csv(cells)), strict=True):
            folder.mkdir()
            (folder / "t.jinja").write_text(AGENTS["kept"])
            name = "chat.jsonl" if data is None else "a.parquet" if data.startswith(b"PAR1") else "a.csv"
            if data is not None:
                (folder / name).write_bytes(data)
            path, _ = packed(folder, records, sources=[{"path": name}], **given)
            found.append(samples_of(path, 3, name))
        assert found[0] == found[1] == found[2]
        assert len(found[0]) == 6


def test_settings_of_a_source_apply_to_each_answer(tmp_path: Path) -> None:
    image = {"type": "image_url", "image_url": {"url": "x"}}
    user = {"role": "user", "content": [image, {"type": "text", "text": "2+2?"}]}
    said = {"role": "assistant", "content": "4"}
    result = {"role": "tool", "content": "4 it is"}
    wrong = {"role": "assistant", "content": [image, {"type": "text", "text": "5"}]}
    record = {"prompt": [user, result], "completions": [[said], [result, wrong]]}
    with pytest.raises(DataError, match=r"chat\.jsonl:1: a content part has type image_url"):
        pack_corpus(make_recipe(tmp_path / "a", [record] * 3))
    sources = [{"path": "chat.jsonl", "ignore": ["image_url"], "drop_roles": ["tool"]}]
    path, manifest = packed(tmp_path / "b", [record] * 3, sources=sources)
    plain, _ = packed(tmp_path / "c", [{"prompt": "2+2?", "completions": ["4", "5"]}] * 3)
    assert samples_of(path, 3) == samples_of(plain, 3)
    places = {"prompt[].content[].image_url": 3, "completions[][].content[].image_url": 3}
    assert manifest.unused_keys == {"chat.jsonl": places}
    assert manifest.ledger.context is not None
    assert manifest.ledger.context.left_out == {"tool": 6}
    emptied = [record | {"completions": [[said], [result]]}, record]
    _, manifest = packed(tmp_path / "d", emptied, sources=sources, max_rejects=1.0)
    [reject] = read_rejects(manifest, folder_of(tmp_path / "d" / "manifests" / f"small-{manifest.key[:12]}.json"))
    assert reject["message"] == "completions[1]: all of its messages have a role of `drop_roles`: tool"


def test_prompts_for_certify_are_those_of_each_answer(tmp_path: Path) -> None:
    path, manifest = packed(tmp_path, answered(10))
    found = conversations_of(manifest, folder_of(path), tmp_path)
    assert [tuple(message.content for message in one.messages) for one in found] == [
        tuple(record.values()) for record in alone(answered(10))
    ]


def test_equal_answers_and_prompts_stay_together(tmp_path: Path) -> None:
    records = answered(30, seed=2)
    other = [{"prompt": record["prompt"], "completion": "another answer"} for record in records]
    (tmp_path / "other.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in other))
    again = [*records, *records[:4], records[5] | {"completions": records[5]["completions"] + ["more"]}]
    sources = [{"path": "chat.jsonl"}, {"path": "other.jsonl"}]
    settings = {"validation": 0.3, "validation_by": "prompt", "duplicates": "exact"}
    path, manifest = packed(tmp_path, again, sources=sources, **settings)
    assert manifest.ledger.conversations.dropped["duplicate"] == 4
    sides = defaultdict(set)
    for entry in index_of(path):
        if entry["split"]:
            prompt = (again, other)[entry["source"]][entry["record"] - 1]["prompt"]
            sides[prompt].add(entry["split"])
    assert {len(splits) for splits in sides.values()} == {1}
    assert {split for splits in sides.values() for split in splits} == {"train", "validation"}


def test_a_record_is_rejected_as_a_whole_with_the_place_of_the_answer(tmp_path: Path) -> None:
    records = answered(12)
    records[3] = {"prompt": "a", "completions": ["b", "c", " "]}
    records[5] = {"prompt": "a", "completions": []}
    records[7] = {"prompt": "a", "completions": ["b", 5]}
    path, manifest = packed(tmp_path, records, max_rejects=1.0)
    assert manifest.ledger.conversations.rejected == {"bad_type": 1, "empty": 1, "no_trained_tokens": 1}
    found = {reject["line"]: reject["message"] for reject in read_rejects(manifest, folder_of(path))}
    assert found[4].startswith("completions[2]: none of its turns is trained on")
    assert found[6] == "completions is an empty list"
    assert found[8].startswith("prompt and completions[1]: expected two strings")
    with pytest.raises(UsageError, match=r"chat.jsonl:4: was rejected with E236: completions\[2\]: none of its turns"):
        as_object(path, at="chat.jsonl:4")


def test_weights_of_answers(tmp_path: Path) -> None:
    said = {"role": "assistant", "content": "Four."}
    records = [
        {"prompt": "2+2?", "completions": ["4", "Four."], "loss_weight": [1, 0.25]},
        {"prompt": [{"role": "user", "content": "2+2?"}], "completions": [[said], [said | {"loss_weight": 0.5}]]},
        {"prompt": "3+3?", "completions": ["6", "5", "Six."], "loss_weight": [0.5, 0, 2]},
    ]
    path, manifest = packed(tmp_path, records, loss_weight="data")
    corpus = open_corpus(path)
    weights = []
    for line in (1, 2, 3):
        samples = corpus.conversation(f"chat.jsonl:{line}").samples
        assert all(sample.weights is not None for sample in samples)
        weights.append(
            {(s.turn, *np.unique(s.weights[s.labels >= 0]).tolist()) for s in samples if s.weights is not None}
        )
    assert weights == [{(1, 1.0), (2, 0.25)}, {(1, 1.0), (2, 0.5)}, {(1, 0.5), (3, 2.0)}]
    assert manifest.ledger.context is not None
    assert manifest.ledger.context.left_out == {"answers": 1}
    assert "1 answer (its flag, or a weight of 0)" in " ".join(shown(path).split())
    equal, _ = packed(tmp_path / "equal", records, loss_weight="both")
    total = [
        sum(
            float(sample.weights[sample.labels >= 0].sum())
            for sample in conversation.samples
            if sample.weights is not None
        )
        for conversation in map(open_corpus(equal).conversation, ("chat.jsonl:1", "chat.jsonl:2"))
    ]
    assert all(np.isfinite(total))


def conversations_with_calls(count: int) -> list[Record]:
    """Return records with several rounds, reasoning, and calls without a result."""
    source, records = random.Random(3), []
    for number in range(count):

        def said(**more: Any) -> Record:
            return {"role": "assistant", "content": words(source), "reasoning_content": words(source), **more}

        asked = {"role": "user", "content": f"{number} {words(source)}"}
        call = {"tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
        history = [asked, said(**call), asked, said()] * (number % 3)
        answers = [[said()], [said(**call), {"role": "tool", "content": "x"}, said()], [said(), asked, said()]]
        records.append({"prompt": [*history, asked], "completions": answers[: 1 + number % 4]})
    return records


def test_what_is_counted_is_that_of_the_answers_alone(tmp_path: Path) -> None:
    """Reasoning and calls of a prompt count once."""
    (tmp_path / "t.jinja").write_text(AGENTS["after the last user message"])
    settings = {"template": str(tmp_path / "t.jinja"), "tokenizer": str(kind_path("hf_byte_level"))}
    settings |= {"sequence_length": 512, "max_rejects": 1.0}
    records = [record for record in conversations_with_calls(12) if len(record["completions"]) > 1]
    single = []
    for record in records:
        first, *others = record["completions"]
        single.append({"prompt": record["prompt"], "completion": first})
        untrained = [
            {key: value for key, value in turn.items() if key not in ("reasoning_content", "tool_calls")}
            | {"train": False}
            for turn in record["prompt"]
        ]
        single += [{"prompt": untrained, "completion": answer} for answer in others]
    for reasoning in ("drop", "keep"):
        _, several = packed(tmp_path / reasoning / "a", records, reasoning=reasoning, **settings)
        _, apart = packed(tmp_path / reasoning / "b", single, reasoning=reasoning, **settings)
        assert several.ledger.reasoning == apart.ledger.reasoning
        assert several.noticed["calls_without_result"] == apart.noticed["calls_without_result"] > 0
        assert several.noticed["undefined_tools"] == len(records)
        assert several.ledger.tokens.trained == apart.ledger.tokens.trained
        assert several.noticed.get("reasoned_answers") == apart.noticed.get("reasoned_answers")


def test_the_ledger_knows_what_other_settings_would_make(tmp_path: Path) -> None:
    (tmp_path / "t.jinja").write_text(AGENTS["after the last user message"])
    settings = {"template": str(tmp_path / "t.jinja"), "tokenizer": str(kind_path("hf_byte_level"))}
    settings |= {"sequence_length": 512, "max_rejects": 1.0}
    records = conversations_with_calls(16)
    _, auto = packed(tmp_path / "auto", records, **settings)
    _, apart = packed(tmp_path / "apart", records, turns="apart", **settings)
    found, of_apart = auto.ledger.samples, apart.ledger.samples
    assert found is not None
    assert of_apart is not None
    assert found.apart is not None
    assert found.apart.samples == of_apart.read > found.read
    assert found.apart.repeated_prompt_tokens == of_apart.repeated_prompt_tokens
    assert {*found.ways_out} >= {"train_on: last", "turns: as_rendered"}
    for setting, way in found.ways_out.items():
        name, _, value = setting.partition(": ")
        _, other = packed(tmp_path / value, records, **settings, **{name: value})
        assert other.ledger.samples is not None
        assert way.samples == other.ledger.samples.read
        stored = other.ledger.tokens.encoded - (other.ledger.tokens.shared or 0)
        if name == "share":  # some trees are longer than a row, so what they cut is stored again
            assert 0.9 * stored < way.tokens <= stored
            continue
        assert way.tokens == pytest.approx(stored, abs=3 * len(records))
    assert any("to pay less" in line for line in explain_samples(auto.ledger))


def test_every_command_shows_samples_of_answers(tmp_path: Path) -> None:
    records = answered(20)
    several = next(n for n, record in enumerate(records, 1) if len(record["completions"]) == 3)
    path, _ = packed(tmp_path, records)
    answers = records[several - 1]["completions"]
    for turn, answer in enumerate(answers, 1):
        [piece] = as_object(path, at=f"chat.jsonl:{several} turn {turn}")["pieces"]
        assert "".join(span["text"] for span in piece["spans"] if span["trained"]).startswith(answer)
    [value] = as_object(tmp_path / "chat.jsonl", line=several)["records"]
    assert value["answers"] == [[f"completions[{n}]", n + 1] for n in range(3)]
    assert [message["content"] for message in value["messages"][1:]] == answers
    page = shown(tmp_path / "chat.jsonl", line=several)
    assert page.index("completions[0]") < page.index("completions[1]") < page.index("completions[2]")
    recipe = make_recipe(tmp_path, records)
    run = predict(recipe.config, tmp_path, tmp_path)
    page = rendered(run, show_prediction)
    assert "completions" in page
    assert "turns: auto" not in page


def test_init_names_the_format_and_check_reads_it(tmp_path: Path) -> None:
    lines = {"a": answered(30), "b": [{"prompt": str(n), "chosen": "a", "rejected": "b"} for n in range(30)]}
    for name, records in lines.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in records))
    packcorpus(tmp_path, "init", "a.jsonl", "b.jsonl")
    config = (tmp_path / "corpus.yaml").read_text()
    assert "30 conversations, completions" in config
    assert "30 conversations, preference" in config


def test_a_file_with_messages_and_pairs_names_the_format_that_reads_them(tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    records = [{"messages": turns, "chosen": turns, "rejected": [turns[0], turns[1] | {"content": "c"}]}] * 3
    with pytest.raises(DataError, match="to train on its pair, set  format: preference; to train on the conversation"):
        pack_corpus(make_recipe(tmp_path, records))
    sources = [{"path": "chat.jsonl", "format": "preference"}]
    _, manifest = packed(tmp_path, records, sources=sources, pairs="both")
    assert manifest.unused_keys == {"chat.jsonl": {"messages": 3}}
    assert manifest.ledger.samples is not None
    assert manifest.ledger.samples.packed == 6
