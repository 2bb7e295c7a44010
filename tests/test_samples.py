"""Every stage and command handles conversations with several samples."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from support.commands import packcorpus
from support.inspected import as_object, rendered, shown
from support.packed_rows import folder_of, sign
from support.small_corpus import conversations, make_recipe, pack_corpus, write_project
from support.templates.modern_templates import STRIPS
from support.templates.several_samples import stripping_template
from support.tokenizer_kinds import kind_path

from packcorpus.tasks.cli.check_view import show_prediction
from packcorpus.tasks.config import load_config
from packcorpus.tasks.core.errors import DataError, UsageError
from packcorpus.tasks.corpus.summary import explain_samples
from packcorpus.tasks.dry_run.dry_run import predict
from packcorpus.tasks.inspection.diff import compare
from packcorpus.tasks.inspection.search import find_conversations
from packcorpus.tasks.recipe import resolve
from packcorpus.tasks.report.figures import read_figures
from packcorpus.tasks.report.report import write_report
from packcorpus.tasks.storage.manifest import load_manifest
from packcorpus.tasks.verification.rebuild import rebuild
from packcorpus.tasks.verification.repair import repair
from packcorpus.tasks.verification.verify import verify

RECORDS = conversations(60, seed=3, longest=6)
RECORDS += RECORDS[:6]
SETTINGS: dict[str, Any] = {
    "validation": 0.2, "duplicates": "exact", "sequence_length": 48, "max_rejects": 1.0, "epochs": 2,
    "sources": [{"path": "chat.jsonl", "weight": 1.5, "limit": 50}],
}  # fmt: skip
ROLES = ("user", "assistant")


def index_of(path: Path) -> list[dict[str, Any]]:
    return list(pa.ipc.open_stream((folder_of(path) / "index.arrow").read_bytes()).read_all().to_pylist())


@pytest.fixture(scope="module")
def apart(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a corpus of `turns: apart` with a built-in template."""
    return pack_corpus(make_recipe(tmp_path_factory.mktemp("apart"), RECORDS, turns="apart", **SETTINGS))


@pytest.mark.slow
def test_the_same_bytes_for_every_part_size_and_rebuilt(tmp_path: Path) -> None:
    """The template makes several samples of some conversations."""
    found = []
    with stripping_template():
        for part_size in (1 << 10, 5000, 1 << 26):
            recipe = make_recipe(tmp_path / str(part_size), RECORDS, **SETTINGS, part_size=part_size)
            path = pack_corpus(recipe)
            verify(path)
            found.append({file.path: file.sha256 for file in load_manifest(path).listed()})
        assert found[0] == found[1] == found[2]
        assert len(recipe.parts) == 1
        assert rebuild(path).endswith(": identical")
    turns = {entry["turn"] for entry in index_of(path)}
    assert turns >= {-1, 1, 3}
    samples = load_manifest(path).ledger.samples
    assert samples is not None
    assert samples.repeated_prompt_tokens > 0


def test_a_sample_is_a_prompt_of_what_came_before_and_its_turn(tmp_path: Path) -> None:
    record = {"messages": [{"role": role, "content": text} for role, text in (
        ("user", "a"), ("assistant", "b c"), ("user", "d"), ("assistant", "e f"), ("user", "g"))]}  # fmt: skip
    with stripping_template():
        path = pack_corpus(make_recipe(tmp_path, [record]))
    first, second = as_object(path, at="chat.jsonl:1")["pieces"]
    assert (first["turn"], second["turn"]) == (1, 3)
    user, assistant = "<|im_start|>user\n", "<|im_start|>assistant\n"
    assert first["text"] == f"{user}a<|im_end|>\n{assistant}b c<|im_end|></s>"
    earlier = f"{user}a<|im_end|>\n{assistant}c<|im_end|>\n{user}d<|im_end|>\n{assistant}"
    assert second["text"] == f"{earlier}e f<|im_end|></s>"
    trained = ["".join(span["text"] for span in piece["spans"] if span["trained"]) for piece in (first, second)]
    assert trained == ["b c<|im_end|></s>", "e f<|im_end|></s>"]


def test_what_is_noticed_counts_conversations(tmp_path: Path) -> None:
    say = [{"role": role, "content": f"{role} <|im_end|> ▁"} for role in ("assistant", "user", "assistant")]
    counts = []
    for turns in ("together", "apart"):
        path = pack_corpus(make_recipe(tmp_path / turns, [{"messages": say}] * 3, turns=turns))
        counts.append(load_manifest(path).noticed)
    assert counts[0] == counts[1]
    assert counts[0]["control_text_seen"] == counts[0]["unusual_order"] == counts[0]["not_round_trip"] == 3


def tasks_with_reasoning(number: int) -> dict[str, Any]:
    """Return a conversation of one to three tasks.

    Each has up to four answers with reasoning.
    """
    messages: list[dict[str, Any]] = []
    for task in range(1 + number % 3):
        messages.append({"role": "user", "content": f"a {number} b {task}"})
        for step in range(1 + (number + task) % 4):
            reasoning = f"c {number} d {step}"
            messages.append({"role": "assistant", "content": f"e {step}", "reasoning_content": reasoning})
            messages.append({"role": "tool", "content": f"f {step}"})
        messages.pop()
    return {"messages": messages}


def test_the_ledger_knows_what_turns_apart_would_make(tmp_path: Path) -> None:
    (tmp_path / "t.jinja").write_text(STRIPS)
    settings = {
        "template": str(tmp_path / "t.jinja"),
        "sequence_length": 512,
        "tokenizer": str(kind_path("hf_byte_level")),
    }
    records = [tasks_with_reasoning(number) for number in range(12)]
    ledgers, paths = {}, {}
    for turns in ("auto", "apart"):
        config = write_project(tmp_path / turns, records, turns=turns, **settings)
        recipe = resolve(config, tmp_path / turns)
        paths[turns] = pack_corpus(recipe)
        ledgers[turns] = load_manifest(paths[turns]).ledger
        predicted = predict(recipe.config, tmp_path / turns, tmp_path / turns).ledger
        assert predicted == ledgers[turns]
    found, apart = ledgers["auto"].samples, ledgers["apart"].samples
    assert found is not None
    assert apart is not None
    assert found.read < apart.read
    assert apart.apart is None
    assert found.apart is not None
    assert found.apart.samples == apart.read
    # What the template writes after the last answer is in the samples of whole conversations only: a line break here.
    whole = sum(entry["turn"] == -1 for entry in index_of(paths["auto"]))
    assert found.apart.tokens == ledgers["apart"].tokens.encoded + whole
    assert found.apart.repeated_prompt_tokens == apart.repeated_prompt_tokens
    line, ways_out = explain_samples(ledgers["auto"])
    assert f"{apart.read / 12:.1f} with turns: apart" in line
    assert f"({found.repeated_percent:.1f} % of the compute, about {found.repeated_rows} row" in line
    assert "to pay less: share: conversation (about " in ways_out
    assert "train_on: rounds (about " in ways_out
    assert "turns: as_rendered (about " in ways_out
    assert [*explain_samples(ledgers["apart"])][1].startswith("to pay less: turns: auto in as few samples as")
    for setting, way in found.ways_out.items():
        name, _, value = setting.partition(": ")
        path = pack_corpus(make_recipe(tmp_path / value, records, **settings, **{name: value}))
        ledger = load_manifest(path).ledger
        assert way.samples == (ledger.samples.read if ledger.samples else ledger.conversations.packed)
        stored = ledger.tokens.encoded - (ledger.tokens.shared or 0)
        assert way.tokens == pytest.approx(stored, abs=len(records)), "a line break may follow an answer"
        assert way.rows is not None


def test_the_ledger_counts_what_settings_leave_out(tmp_path: Path) -> None:
    roles = ("system", "user", "assistant", "tool", "assistant")
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    record = {"messages": [{"role": role, "content": f"{role} text"} for role in roles], "tools": tools}
    sources = [{"path": "chat.jsonl", "drop_roles": ["system", "tool"], "ignore": ["tools"]}]
    config = write_project(tmp_path, [record] * 3, sources=sources)
    path = pack_corpus(resolve(config, tmp_path))
    verify(path)
    context = load_manifest(path).ledger.context
    assert context is not None
    assert context.left_out == {"system": 3, "tool": 3, "tools": 3}
    line = "left out of the context: 3 system messages (drop_roles), 3 results (drop_roles), the tools of 3 "
    assert line in " ".join(shown(path).split())
    run = predict(resolve(config, tmp_path).config, tmp_path, tmp_path)
    assert run.ledger.context == context
    assert f"will be {line}" in " ".join(rendered(run, show_prediction).split())


def test_check_predicts_the_ledger_of_the_run(apart: Path, tmp_path: Path) -> None:
    config = write_project(tmp_path, RECORDS, turns="apart", **SETTINGS)
    recipe = resolve(config, tmp_path)
    run = predict(recipe.config, tmp_path, tmp_path)
    manifest = load_manifest(apart)
    assert run.ledger == manifest.ledger
    assert run.mixture == manifest.mixture
    assert run.sources[0].shown is not None
    assert run.sources[0].shown.place.endswith("chat.jsonl:1 turn 1")
    assert run.rows == {name: split.rows for name, split in manifest.splits.items()}


def test_check_shows_each_sample_of_a_conversation(tmp_path: Path) -> None:
    turns = [{"role": ("user", "assistant")[n % 2], "content": f"{n}."} for n in range(20)]
    config = write_project(tmp_path, [{"messages": turns[:4]}, *RECORDS], turns="apart")
    run = predict(load_config(config), tmp_path, tmp_path)
    places = [sample.place for sample in run.sources[0].other_samples]
    assert [place.removeprefix(f"{tmp_path}/") for place in places] == ["chat.jsonl:1 turn 3"]
    page = rendered(run, show_prediction)
    for place in ("chat.jsonl:1 turn 1", "chat.jsonl:1 turn 3"):
        number = 1 if place.endswith("1") else 2
        assert re.search(rf"{re.escape(place)} .* sample {number} of 2", page)
    assert re.search(r"trained tokens +samples", page), "a step has samples, not conversations"
    config = write_project(tmp_path, [{"messages": turns}], turns="apart")
    run = predict(load_config(config), tmp_path, tmp_path)
    assert len(run.sources[0].other_samples) == 7, "the first eight are shown"


def test_samples_of_a_row_are_called_samples(apart: Path) -> None:
    assert re.search(r"^\d+ samples?, ", shown(apart, row=0), re.M)
    assert "samples per row" in shown(apart)
    page = write_report(apart, apart.parent / "report.html")[0].read_text()
    assert "by number of samples; the mean is" in page
    assert re.search(r">\d+ samples? · ", page)


def test_every_sample_leads_to_its_row_and_back(apart: Path) -> None:
    places = defaultdict(list)
    for number, entry in enumerate(index_of(apart)):
        if entry["dropped"] is None:
            places[entry["record"]].append((entry["turn"], number))
    [*_, several] = [record for record, found in places.items() if len({turn for turn, _ in found}) > 1]
    found = as_object(apart, at=f"chat.jsonl:{several}")
    assert [(piece["turn"], piece["number"]) for piece in found["pieces"]] == sorted(places[several])
    assert as_object(apart, conversation=places[several][-1][1]) == found
    text = shown(apart, at=f"chat.jsonl:{several}")
    assert f"chat.jsonl:{several} turn 1" in text
    assert f"chat.jsonl:{several} turn 3" in text
    assert "  2 samples" in text
    one = next(piece for piece in found["pieces"] if piece["row"] is not None)
    row = shown(apart, row=one["row_of_split"], split=one["split"])
    assert f"chat.jsonl:{several} turn {one['turn']}" in row


def test_a_sample_is_found_by_its_turn(apart: Path, tmp_path: Path) -> None:
    pieces = as_object(apart, at="chat.jsonl:2 turn 1")["pieces"]
    assert {piece["turn"] for piece in pieces} == {1}
    with pytest.raises(UsageError, match=r"--at chat.jsonl:2 turn 7: this conversation has samples of the turns 1"):
        as_object(apart, at="chat.jsonl:2 turn 7")
    whole = pack_corpus(make_recipe(tmp_path, RECORDS[:2]))
    with pytest.raises(UsageError, match="this conversation is one sample; omit the turn"):
        as_object(whole, at="chat.jsonl:2 turn 1")


def test_pieces_of_a_sample_are_counted_by_sample(tmp_path: Path) -> None:
    long = [{"role": role, "content": "the train leaves " * 4} for role in ("user", "assistant") * 2]
    path = pack_corpus(make_recipe(tmp_path, [{"messages": long}], turns="apart", overlong="split", sequence_length=32))
    found = as_object(path, at="chat.jsonl:1")["pieces"]
    by_turn = defaultdict(list)
    for piece in found:
        by_turn[piece["turn"]].append((piece["piece"], piece["pieces"]))
    assert all(counts == [(n + 1, len(counts)) for n in range(len(counts))] for counts in by_turn.values())
    assert {*by_turn} == {1, 3}
    verify(path)


def test_a_text_of_a_repeated_prompt_is_found_in_each_sample(tmp_path: Path) -> None:
    record = {
        "messages": [{"role": role, "content": f"{role} {n}"} for n in range(2) for role in ("user", "assistant")]
    }
    path = pack_corpus(make_recipe(tmp_path, [record], turns="apart"))
    found = find_conversations(path, "user 0", 9).conversations
    assert sorted(piece["turn"] for piece in found) == [1, 3]
    assert "chat.jsonl:1 turn 3" in shown(path, search="user 1")


def test_a_sample_that_is_cut_off_is_explained(tmp_path: Path) -> None:
    long = [{"role": role, "content": "the train leaves"} for role in ("user", "assistant") * 2]
    short = {"turns": "apart", "overlong": "truncate", "sequence_length": 24}
    path = pack_corpus(make_recipe(tmp_path, [{"messages": long}], **short))
    assert "turn 3 dropped: this turn has no trained token in a row of 24 tokens" in shown(path, at="chat.jsonl:1")
    assert "1 of 2 samples packed (1 no token to train on)" in shown(path)
    verify(path)


def test_diff_compares_conversations_and_not_samples(apart: Path, tmp_path: Path) -> None:
    together = pack_corpus(make_recipe(tmp_path / "a", RECORDS, **SETTINGS | {"sequence_length": 200}))
    long = pack_corpus(make_recipe(tmp_path / "b", RECORDS, turns="apart", **SETTINGS | {"sequence_length": 200}))
    found = compare(together, long)
    assert (found.conversations.went, found.conversations.came) == ([], [])
    assert {change.name for change in found.settings} == {"turns"}
    assert "ledger.samples.packed" in {change.name for change in found.figures}


def test_repair_restores_the_index(tmp_path: Path) -> None:
    path = pack_corpus(make_recipe(tmp_path, RECORDS[:20], turns="apart", max_rejects=1.0))
    index = folder_of(path) / "index.arrow"
    before = index.read_bytes()
    index.unlink()
    assert [restored.path for restored in repair(path)] == [index]
    assert index.read_bytes() == before


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda samples: samples | {"repeated_prompt_tokens": 1}, "repeated_prompt_tokens"),
        (lambda samples: samples | {"packed": samples["packed"] - 1, "rejected": samples["rejected"] + 1}, "packed"),
        (lambda samples: samples | {"read": samples["read"] + 1}, "does not balance"),
    ],
)
def test_verify_detects_wrong_figures_of_samples(tmp_path: Path, change: Any, reason: str) -> None:
    path = pack_corpus(make_recipe(tmp_path, RECORDS[:20], turns="apart", max_rejects=1.0))
    sign(path, lambda values: values["ledger"].update(samples=change(values["ledger"]["samples"])))
    with pytest.raises(DataError, match=reason):
        verify(path)


@pytest.mark.parametrize("given", [{"turns": "apart"}, {"turns": "together", "epochs": 2}])
def test_verify_detects_an_entry_that_left_its_conversation(given: dict[str, Any], tmp_path: Path) -> None:
    path = pack_corpus(make_recipe(tmp_path, RECORDS[:20], max_rejects=1.0, **given))
    file = folder_of(path) / "index.arrow"
    table = pa.ipc.open_stream(file.read_bytes()).read_all()
    digests = table["digest"].to_pylist()
    at = table["turn"].to_pylist().index(3) if "turn" in table.schema.names else len(digests) - 1
    digests[at] += 1
    changed = table.set_column(table.schema.get_field_index("digest"), "digest", pa.array(digests, pa.uint64()))
    with pa.ipc.new_stream(str(file), table.schema) as writer:
        writer.write_table(changed)
    sign(path)
    with pytest.raises(DataError, match="entries that differ in digest"):
        verify(path)


def test_an_index_without_a_turn_is_an_error(tmp_path: Path) -> None:
    path = pack_corpus(make_recipe(tmp_path, RECORDS[:20], turns="apart", max_rejects=1.0))
    file = folder_of(path) / "index.arrow"
    table = pa.ipc.open_stream(file.read_bytes()).read_all()
    turns = pa.array([None, *table["turn"].to_pylist()[1:]], pa.int32())
    with pa.ipc.new_stream(str(file), table.schema) as writer:
        writer.write_table(table.set_column(table.schema.get_field_index("turn"), "turn", turns))
    sign(path)
    manifest = load_manifest(path)
    for read in (verify, lambda path: shown(path, at="chat.jsonl:1"), lambda path: shown(path, conversation=0)):
        with pytest.raises(DataError, match=r"index.arrow: .*turn"):
            read(path)
    with pytest.raises(DataError, match=r"index.arrow: .*turn"):
        read_figures(manifest, folder_of(path))


def test_the_dataset_card_counts_samples(apart: Path) -> None:
    samples = load_manifest(apart).ledger.samples
    assert samples is not None
    card = (folder_of(apart) / "README.md").read_text()
    assert f"| samples | {samples.packed:,}; some conversations have several samples; " in card


def test_format_2_has_a_row_for_each_sample(tmp_path: Path) -> None:
    record = {
        "messages": [{"role": role, "content": f"{role} {n}"} for n in range(2) for role in ("user", "assistant")]
    }
    path = pack_corpus(make_recipe(tmp_path, [record], turns="apart", packing=False))
    verify(path)
    found = as_object(path, at="chat.jsonl:1")["pieces"]
    assert [len(piece["messages"]) for piece in found] == [2, 4]
    assert [[message["weight"] for message in piece["messages"]] for piece in found] == [[0, 1], [0, 0, 0, 1]]
    assert found[1]["text"].startswith(found[0]["text"].removesuffix("</s>"))


@pytest.mark.parametrize("turns", ["together", "apart"])
def test_format_2_has_the_messages_that_its_text_is_made_of(tmp_path: Path, turns: str) -> None:
    """The messages have the system message that was added, and no dropped reasoning.

    Trainers that tokenize the messages themselves rely on this.
    """
    said = [("user", "2+2?"), ("assistant", "<think>\neasy\n</think>\n\n4"), ("user", "3+3?"), ("assistant", "6")]
    record: dict[str, Any] = {"messages": [{"role": role, "content": content} for role, content in said]}
    record["messages"][3]["reasoning_content"] = "simple"
    settings = {"turns": turns, "packing": False, "reasoning": "drop", "default_system": "Be brief."}
    path = pack_corpus(make_recipe(tmp_path, [record], **settings))
    verify(path)
    expected = [("system", "Be brief."), ("user", "2+2?"), ("assistant", "4"), ("user", "3+3?"), ("assistant", "6")]
    pieces = as_object(path, at="chat.jsonl:1")["pieces"]
    found = [[(message["role"], message["content"]) for message in piece["messages"]] for piece in pieces]
    assert found == ([expected] if turns == "together" else [expected[:3], expected])
    assert not re.search("easy|simple", str(pieces))
    weights = [message["weight"] for message in pieces[-1]["messages"]]
    assert weights == ([0, 1, 1, 1, 1] if turns == "together" else [0, 0, 0, 0, 1])


@pytest.mark.slow
def test_the_report_names_turns(apart: Path, tmp_path: Path) -> None:
    page = write_report(apart, tmp_path / "report.html")[0].read_text()
    assert "repeat an earlier sample of the same conversation" in page
    assert re.search(r" turn \d", page)  # the key determines which rows are shown


def test_lengths_are_those_of_samples(apart: Path) -> None:
    figures = read_figures(load_manifest(apart), folder_of(apart))
    once = {(entry["record"], entry["turn"]): entry["length"] for entry in reversed(index_of(apart))}
    assert np.repeat(figures.lengths.values, figures.lengths.counts).tolist() == sorted(once.values())


@pytest.mark.slow
def test_a_run_reports_samples(tmp_path: Path) -> None:
    write_project(tmp_path, RECORDS[:20], turns="apart", max_rejects=1.0)
    done = packcorpus(tmp_path, "pack", "corpus.yaml")
    assert done.returncode == 0, done.stderr
    assert "samples packed" in done.stderr
    assert json.loads((tmp_path / done.stdout.strip()).read_bytes())["config"]["turns"] == "apart"
    assert packcorpus(tmp_path, "verify").returncode == 0
