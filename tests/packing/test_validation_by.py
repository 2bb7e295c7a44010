"""Conversations that are held out together, by prompt or by the value of a key.

The test's own code reads prompts and values from the records of the sources, and the sides from the index.
"""

from __future__ import annotations

import csv
import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.profiles import examples
from support.small_corpus import pack_corpus, write_project

from packcorpus.tasks.core.errors import DataError, PackError, UsageError
from packcorpus.tasks.corpus.summary import notes, percent
from packcorpus.tasks.dry_run.dry_run import predict
from packcorpus.tasks.inspection.diff import compare
from packcorpus.tasks.packing import plan
from packcorpus.tasks.packing.held_out import HeldOut
from packcorpus.tasks.recipe import Recipe, resolve
from packcorpus.tasks.report.report import write_report
from packcorpus.tasks.sources.source_files import identify_file
from packcorpus.tasks.storage.manifest import Manifest, load_manifest
from packcorpus.tasks.storage.token_files import TokenColumns
from packcorpus.tasks.tokenization.prepare import Preparer, group_in
from packcorpus.tasks.verification.rebuild import rebuild
from packcorpus.tasks.verification.verify import verify

Records = Sequence[Mapping[str, Any]]


def answers(prompts: int, of_each: int, seed: int = 0) -> list[dict[str, Any]]:
    """Return records with several answers to each prompt, in any order."""
    source = random.Random(seed)
    records = [
        {
            "messages": [
                {"role": "user", "content": f"How far is {number} miles?"},
                {"role": "assistant", "content": f"It is {number} miles, answer {k}."},
            ],
            "id": f"q{number}",
            "user": {"id": number % 7},
        }
        for number in range(prompts)
        for k in range(of_each)
    ]
    source.shuffle(records)
    return records


def write(path: Path, records: Records) -> None:
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist([*records]), path, row_group_size=20)
    elif path.suffix == ".csv":
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, [*records[0]])
            writer.writeheader()
            writer.writerows(records)
    else:
        lines = [json.dumps(record) for record in records]
        path.write_text("".join(f"{line}\n" for line in lines) if path.suffix == ".jsonl" else json.dumps(records))


def project(folder: Path, files: Mapping[str, Records], entries: Sequence[Mapping[str, Any]], **values: Any) -> Recipe:
    config = write_project(folder, [])
    for name, records in files.items():
        write(folder / name, records)
    given_settings = {"name": "small", "tokenizer": "tiny.model", "sequence_length": 128, "sources": [*entries]}
    config.write_text(yaml.safe_dump(given_settings | values))
    return resolve(config, folder)


def packed(recipe: Recipe) -> tuple[Manifest, list[dict[str, Any]]]:
    path = pack_corpus(recipe)
    verify(path)
    with pa.memory_map(str(recipe.corpus_folder / "index.arrow")) as file:
        return load_manifest(path), pa.ipc.open_stream(file).read_all().to_pylist()


def sides_of(index: list[dict[str, Any]], said: Sequence[Sequence[str]]) -> dict[str, set[str]]:
    """Return what is on each side; `said` has a value for each record of each source."""
    sides: dict[str, set[str]] = {"train": set(), "validation": set()}
    for entry in index:
        if entry["split"]:
            kind = "validation" if entry["split"].startswith("validation") else "train"
            sides[kind].add(said[entry["source"]][entry["record"] - 1])
    return sides


def check_leaks(manifest: Manifest, index: list[dict[str, Any]], records: Sequence[Records]) -> None:
    """Recount the prompts that both sides share, from the records."""
    sides = sides_of(index, [[record["messages"][0]["content"].strip() for record in own] for own in records])
    held = {(e["source"], e["record"]) for e in index if e["split"] and e["split"].startswith("validation")}
    packed_ones = {(e["source"], e["record"]) for e in index if e["split"]}
    if not held:
        assert manifest.held_out is None
        return
    facts = manifest.held_out
    assert facts is not None
    assert (facts.conversations, facts.percent) == (len(held), round(100 * len(held) / len(packed_ones), 4))
    assert (facts.prompts, facts.shared) == (len(sides["validation"]), len(sides["train"] & sides["validation"]))


# -- the prompt ------------------------------------------------------------------------------------------------------


def prompt_of(folder: Path, recipe: Recipe, record: Mapping[str, Any], train_on: Any = "assistant") -> tuple[int, int]:
    """Return the digests of the prompt and of the content of a record."""
    (folder / "one.jsonl").write_text(json.dumps(record))
    file = identify_file(folder / "one.jsonl")
    fast = Preparer(file, recipe.template, recipe.encoder, train_on).prepare(dict(record))
    slow = Preparer(file, recipe.template, recipe.encoder, train_on, packing=False).prepare(dict(record))
    assert fast[0].prompt == slow[0].prompt
    return fast[0].prompt, fast[0].digest


USER, ANSWER = {"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}
SYSTEM = {"role": "system", "content": "Be brief."}


def test_what_a_prompt_is(tmp_path: Path) -> None:
    recipe = resolve(write_project(tmp_path, answers(1, 1)), tmp_path)

    def prompt(record: Mapping[str, Any], train_on: str = "assistant") -> int:
        return prompt_of(tmp_path, recipe, record, train_on)[0]

    def chat(*messages: Mapping[str, Any], **others: Any) -> dict[str, Any]:
        return {"messages": [*messages], **others}

    plain = prompt(chat(USER, ANSWER))
    assert plain == prompt({"conversations": [{"from": "human", "value": "2+2?"}, {"from": "gpt", "value": "Four"}]})
    assert plain == prompt({"instruction": "2+2?", "output": "Four"})
    assert plain == prompt({"prompt": " 2+2?\n", "completion": "Four"}), "white space at the ends"
    assert plain == prompt(chat(USER, ANSWER | {"content": "Four"}, USER, ANSWER)), "only up to the first answer"
    assert plain == prompt(chat(USER, ANSWER), "all")
    both = "Add.\n\n2 and 2"
    assert prompt({"instruction": "Add.", "input": "2 and 2", "output": "4"}) == prompt(
        chat(USER | {"content": both}, ANSWER)
    )
    assert plain != prompt(chat(SYSTEM, USER, ANSWER)) == prompt(chat(SYSTEM, USER, ANSWER | {"content": "x"}))
    example = (USER | {"content": "1+1?"}, ANSWER | {"content": "2", "train": False})
    assert len({prompt(chat(*example, USER | {"content": text}, ANSWER)) for text in ("a", "b", "b ")}) == 2
    assert prompt(chat(*example, USER, ANSWER)) != plain, "an answer that is not trained on is part of the prompt"
    long = [chat(USER, ANSWER, USER | {"content": text}, ANSWER) for text in ("a", "b")]
    assert prompt(long[0]) == prompt(long[1])
    assert prompt(long[0], "last") != prompt(long[1], "last")
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    assert prompt(chat(USER, ANSWER, tools=tools)) != plain


@pytest.mark.parametrize(
    "record", [{"text": "Once."}, {"messages": [SYSTEM, ANSWER]}, {"messages": [ANSWER, USER, ANSWER]}]
)
def test_without_a_message_of_the_user_the_content_decides(record: dict[str, Any], tmp_path: Path) -> None:
    recipe = resolve(write_project(tmp_path, answers(1, 1)), tmp_path)
    prompt, content = prompt_of(tmp_path, recipe, record)
    assert prompt == content


# -- no prompt on both sides -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("by", ["conversation", "prompt", "id", "user.id"])
def test_no_prompt_is_on_both_sides(by: str, tmp_path: Path) -> None:
    records = answers(80, 4)
    recipe = project(tmp_path, {"a.jsonl": records}, [{"path": "a.jsonl"}], validation=0.2, validation_by=by)
    manifest, index = packed(recipe)
    check_leaks(manifest, index, [records])
    values = {"prompt": [r["messages"][0]["content"] for r in records], "id": [r["id"] for r in records]}
    values |= {"user.id": [str(r["user"]["id"]) for r in records], "conversation": values["prompt"]}
    sides = sides_of(index, [values[by]])
    shared = sides["train"] & sides["validation"]
    assert sides["validation"]
    if by == "conversation":
        assert len(shared) > 0.9 * len(sides["validation"]), "the answers to a prompt straddle"
        assert "group" not in index[0]
        return
    assert not shared
    assert len({entry["group"] for entry in index}) == len(set(values[by]))
    assert manifest.config["validation_by"] == by
    assert rebuild(recipe.published)
    unused = manifest.unused_keys.get("a.jsonl", {})
    assert by.partition(".")[0] not in unused


KINDS: list[dict[str, Any]] = [
    {"packing": False},
    {"sequence_length": [32, 128], "epochs": 2},
    {"turns": "apart", "train_on": "assistant"},
    {"part_size": 1 << 10},
]


@settings(max_examples=examples(25), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_no_prompt_is_on_both_sides_of_a_mixture(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    by = data.draw(st.sampled_from(["conversation", "prompt", "prompt", "id"]))
    records = [answers(data.draw(st.integers(2, 12)), data.draw(st.integers(1, 4)), seed) for seed in range(3)]
    splits = [data.draw(st.sampled_from([None, None, None, "train", "validation"])) for _ in records]
    entries = [
        {"path": f"{n}.jsonl"}
        | ({"split": split} if split else {})
        | ({} if split == "validation" else {"weight": data.draw(st.sampled_from([1, 1, 0.5, 2.5]))})
        | data.draw(st.sampled_from([{}, {}, {"limit": 5}]))
        for n, split in enumerate(splits)
    ]
    given_settings = data.draw(st.sampled_from(KINDS)) | {
        "validation": data.draw(st.sampled_from([0, 0.1, 0.5])),
        "duplicates": data.draw(st.sampled_from(["keep", "drop"])),
        "weighting": data.draw(st.sampled_from(["repeat", "proportions", "token_share"])),
    }
    folder = tmp_path_factory.mktemp("mixture")
    advanced = {name: given_settings.pop(name) for name in ("turns", "part_size") if name in given_settings}
    try:
        files = {f"{n}.jsonl": own for n, own in enumerate(records)}
        recipe = project(folder, files, entries, validation_by=by, advanced=advanced, **given_settings)
        manifest, index = packed(recipe)
    except PackError as error:
        assert error.reason in ("bad_setting", "both_splits", "nothing_to_pack", "empty_share")  # noqa: PT017 - or none
        return
    check_leaks(manifest, index, records)
    values = {"prompt": lambda r: r["messages"][0]["content"], "id": lambda r: r["id"]}
    value = values.get(by, lambda r: json.dumps(r["messages"]))
    sides = sides_of(index, [[value(r) for r in own] for own in records])
    assert not sides["train"] & sides["validation"]
    for entry in index:
        if entry["split"] and splits[entry["source"]]:
            assert entry["split"].startswith(str(splits[entry["source"]]))


def test_the_choice_depends_on_nothing_else(tmp_path: Path) -> None:
    records, held = answers(60, 3), []
    for number, values in enumerate([{}, {"sequence_length": 64}, {"seed": 7, "advanced": {"part_size": 1 << 10}}]):
        own = records[::-1] if number else records
        recipe = project(tmp_path / str(number), {"a.jsonl": own}, [{"path": "a.jsonl"}], validation=0.3,
                         validation_by="prompt", **values)  # fmt: skip
        _, index = packed(recipe)
        held.append(sides_of(index, [[r["messages"][0]["content"] for r in own]])["validation"])
    assert held[0] == held[1] == held[2]
    plain = project(tmp_path / "plain", {"a.jsonl": records}, [{"path": "a.jsonl"}], validation=0.3)
    grouped = project(tmp_path / "grouped", {"a.jsonl": records}, [{"path": "a.jsonl"}], validation=0.3,
                      validation_by="prompt")  # fmt: skip
    assert plain.token_keys == grouped.token_keys
    assert plain.corpus_key != grouped.corpus_key


def test_verify_recounts_the_sides_of_prompts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def choose_others(tokens: TokenColumns, recipe: Recipe) -> HeldOut:
        return HeldOut(np.arange(tokens.edges[-1]) % 2 == 0)

    monkeypatch.setattr(plan, "hold_out", choose_others)
    recipe = project(
        tmp_path, {"a.jsonl": answers(9, 4)}, [{"path": "a.jsonl"}], validation=0.5, validation_by="prompt"
    )
    with pytest.raises(
        DataError, match=r"a\.jsonl:1 is in the validation split, and the same prompt is in the training"
    ):
        packed(recipe)


# -- keys ------------------------------------------------------------------------------------------------------------


def test_values_of_a_key() -> None:
    record = {"id": 1, "user": {"id": "1", "name": ""}, "a.b": "dotted", "a": {"b": "nested"}, "list": [1, {"x": 2}]}
    assert group_in(record, "id") == group_in(record, "user.id") == group_in({"id": 1.0}, "id") is not None
    assert group_in({"id": True}, "id") != group_in({"id": 1}, "id")
    assert group_in(record, "a.b") == group_in({"v": "dotted"}, "v")
    assert group_in(record, "list") is not None
    for key in ("missing", "user.name", "id.x", "user.id.x"):
        assert group_in(record, key) is None
    assert group_in(None, "id") is group_in([record], "id") is group_in({"id": None}, "id") is None


@pytest.mark.parametrize("ending", [".parquet", ".csv", ".json"])
def test_every_kind_of_file_is_grouped_alike(ending: str, tmp_path: Path) -> None:
    """Cells and columns of the key are read, although the format has no such key."""
    records = [{"instruction": f"Say {n}.", "output": f"It is {n}.", "group": n // 5, "more": "x"} for n in range(100)]
    held = []
    for name in ("a.jsonl", f"a{ending}"):
        recipe = project(tmp_path / name, {name: records}, [{"path": name}], validation=0.3, validation_by="group")
        manifest, index = packed(recipe)
        held.append(sides_of(index, [[str(record["group"]) for record in records]]))
        assert [*manifest.unused_keys[name]] == ["more"]
        assert "without_key" not in manifest.noticed
    assert held[0] == held[1]
    assert not held[0]["train"] & held[0]["validation"]


def test_records_without_the_key_are_held_out_by_content_and_counted(tmp_path: Path) -> None:
    records = [r if n % 3 else {"messages": r["messages"]} for n, r in enumerate(answers(40, 3))]
    recipe = project(tmp_path, {"a.jsonl": records}, [{"path": "a.jsonl"}], validation=0.3, validation_by="user.id")
    manifest, index = packed(recipe)
    assert manifest.noticed["without_key"] == 40
    lacking = [entry for entry in index if entry["record"] % 3 == 1]
    assert {entry["split"] for entry in lacking} == {"train", "validation"}
    assert all(entry["group"] == entry["digest"] for entry in lacking)
    values = [[str(r["user"]["id"]) if "user" in r else f"own {n}" for n, r in enumerate(records)]]
    sides = sides_of(index, values)
    assert not sides["train"] & sides["validation"]
    assert predict(recipe.config, recipe.folder, tmp_path).noticed["without_key"] == 40


def test_a_key_that_no_record_has(tmp_path: Path) -> None:
    recipe = project(tmp_path, {"a.jsonl": answers(9, 2)}, [{"path": "a.jsonl"}], validation=0.3, validation_by="promt")
    message = (
        "validation_by: promt is neither conversation nor prompt nor a key of the records: none of 18 conv.*prompt"
    )
    with pytest.raises(UsageError, match=message):
        packed(recipe)
    with pytest.raises(UsageError, match=message):
        predict(recipe.config, recipe.folder, tmp_path)


def test_nothing_is_held_out(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="validation_by: prompt has no effect, because nothing is held out; set valid"):
        project(tmp_path, {"a.jsonl": answers(9, 2)}, [{"path": "a.jsonl"}], validation_by="prompt")


# -- the count -------------------------------------------------------------------------------------------------------


def test_a_run_and_check_say_how_many_prompts_are_shared(tmp_path: Path) -> None:
    files, entries = {"a.jsonl": answers(80, 4)}, [{"path": "a.jsonl"}]
    recipe = project(tmp_path, files, entries, validation=0.2)
    manifest, _ = packed(recipe)
    facts = manifest.held_out
    assert facts is not None
    nearly = f" and {facts.near} nearly" * bool(facts.near)
    start = f"validation: {facts.conversations} of 320 conversations ("
    end = (
        f" %), with {facts.prompts} prompts, {facts.shared} of which are also in train{nearly}; to keep all "
        "conversations with the same prompt on one side, set  validation_by: prompt"
    )
    said = [note for note in notes(manifest) if note.startswith(start)]
    assert [note.endswith(end) for note in said] == [True]
    assert (said[0].kind, said[0].values["shared"]) == ("held_out", facts.shared)
    run = predict(recipe.config, recipe.folder, tmp_path)
    assert run.held_out == facts
    assert said[0] in run.warnings
    page, _ = write_report(recipe.published, tmp_path / "report.html")
    assert f"{facts.shared} of which are also in train" in page.read_text()
    grouped = project(tmp_path / "grouped", files, entries, validation=0.2, validation_by="prompt")
    manifest, _ = packed(grouped)
    assert any("prompts, none of them in train" in note for note in notes(manifest))
    assert predict(grouped.config, grouped.folder, tmp_path / "grouped").held_out == manifest.held_out
    changes = {
        change.name: (change.before, change.after) for change in compare(recipe.published, grouped.published).figures
    }
    assert changes["held_out.shared"] == (facts.shared, 0)


def test_a_part_of_the_data_shows_a_part_of_what_is_shared(tmp_path: Path) -> None:
    recipe = project(tmp_path, {"a.jsonl": answers(800, 4)}, [{"path": "a.jsonl"}], validation=0.2)
    run = predict(recipe.config, recipe.folder, tmp_path, budget=1 << 16)
    assert not run.whole
    [line] = [line for line in run.warnings if line.startswith("validation: about")]
    assert line.endswith("(prompts are only compared within the sample)")


def test_texts_have_no_prompt(tmp_path: Path) -> None:
    records = [{"text": f"Once there were {n} cats."} for n in range(40)]
    manifest, _ = packed(project(tmp_path, {"a.jsonl": records}, [{"path": "a.jsonl"}], validation=0.5))
    facts = manifest.held_out
    assert facts is not None
    assert (facts.prompts, facts.shared, facts.near) == (0, 0, 0)
    assert [note for note in notes(manifest) if note.kind == "held_out"] == [
        f"validation: {facts.conversations} of 40 conversations ({percent(facts.conversations, 40)})"
    ]
