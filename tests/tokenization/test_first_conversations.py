"""One odd conversation is a reject; a template that fits none stops the run.

The template must fail on the first hundred conversations, in source order.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from support.commands import BIN, command
from support.small_corpus import make_recipe, pack_corpus, write_project
from support.tokenizer_kinds import kind_path

from packcorpus.tasks.config import load_config
from packcorpus.tasks.core.errors import DataError
from packcorpus.tasks.dry_run.config_draft import write_draft
from packcorpus.tasks.dry_run.dry_run import predict
from packcorpus.tasks.dry_run.given import Given
from packcorpus.tasks.recipe import Recipe, resolve
from packcorpus.tasks.storage.manifest import load_manifest
from packcorpus.tasks.work import Plan, TokenizePart

USER = {"role": "user", "content": "2+2?"}
GOOD = {"messages": [USER, {"role": "assistant", "content": "4"}]}
# The built-in template does not write the field (E418).
REASONED = {"messages": [USER, {"role": "assistant", "content": "4", "reasoning_content": "Two and two."}]}
ODD = {"messages": [{"role": "odd", "content": "2+2?"}]}
CALL = {"function": {"name": "f", "arguments": {"a": 1}}}
CALLING = {"messages": [USER, {"role": "assistant", "content": "", "tool_calls": [CALL]}]}
# A template that writes neither calls (E238) nor reasoning (E418). No answer follows its prompt for "x" (E417).
NO_CALLS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% if messages[-1].content == 'x' %}I{% endif %}"
    "{% endif %}"
)
LOST = {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "4"}]}


def error_of(recipe: Recipe) -> tuple[str, str] | None:
    try:
        pack_corpus(recipe)
    except DataError as error:
        return error.reason, str(error)
    return None


def rejects(recipe: Recipe) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (recipe.corpus_folder / "rejects.jsonl").read_text().splitlines()]


def test_one_odd_conversation_is_a_reject(tmp_path: Path) -> None:
    recipe = make_recipe(tmp_path, [*[GOOD] * 200, REASONED])
    manifest = load_manifest(pack_corpus(recipe))
    assert manifest.ledger.conversations.rejected == {"reasoning_not_written": 1}
    [reject] = rejects(recipe)
    assert (reject["line"], reject["code"]) == (201, "E418")
    assert reject["message"].startswith("messages[1] has reasoning, but the built-in template chatml does not write it")


@pytest.mark.parametrize(
    ("record", "code"), [(CALLING, "E238"), (LOST, "E417"), (REASONED, "E418")], ids=["calls", "turn", "reasoning"]
)
def test_one_odd_conversation_of_a_jinja_template(tmp_path: Path, record: dict[str, Any], code: str) -> None:
    (tmp_path / "t.jinja").write_text(NO_CALLS)
    recipe = make_recipe(tmp_path, [record, *[GOOD] * 150], template="t.jinja")
    pack_corpus(recipe)
    assert [(reject["line"], reject["code"]) for reject in rejects(recipe)] == [(1, code)]
    recipe = make_recipe(tmp_path, [*[record] * 100, *[GOOD] * 50], template="t.jinja", max_rejects=0.9)
    _, message = error_of(recipe) or ("", "")
    assert message.startswith("chat.jsonl:1: ")
    assert "template t.jinja" in message
    assert message.endswith("; the first 100 conversations all fail like this")


@pytest.mark.parametrize(
    ("records", "expected"),
    [
        ([REASONED] * 3, "3"),
        ([*[REASONED] * 100, *[GOOD] * 5], "100"),
        ([*[REASONED] * 99, GOOD], ""),
        ([GOOD, *[REASONED] * 150], ""),
        ([*[REASONED] * 50, ODD, *[REASONED] * 99], ""),
        ([ODD, *[REASONED] * 150], ""),
        ([*[REASONED] * 250], "100"),
        ([ODD] * 120, ""),  # the template has not seen them
    ],
    ids=["few", "then good", "99", "good first", "another between", "another first", "all", "data"],
)
@pytest.mark.parametrize("part_size", [1024, 1 << 20])
def test_first_conversations(tmp_path: Path, records: Sequence[Any], expected: str, part_size: int) -> None:
    """The error does not depend on parts.

    It is the same for any size, and if they were tokenized before, the last one first.
    """
    fresh = make_recipe(tmp_path / "fresh", records, part_size=part_size)
    found = error_of(fresh)
    assert found is not None
    if expected:
        assert found[0] == "reasoning_not_written"
        assert found[1].startswith("chat.jsonl:1: messages[1] has reasoning")
        assert found[1].endswith(f"; the first {expected} conversations all fail like this")
        assert not [*fresh.layout.root.glob("data/tokens/**/*.arrow")], "the run stops before it tokenizes"
    else:
        count = sum(record is not GOOD for record in records)
        assert (found[0], found[1].partition(" ")[0]) == ("too_many_rejects", str(count))
        reason = "bad_role" if records[-1] is ODD else "reasoning_not_written"
        assert f"\nthe most frequent reason is {reason}; fix: " in found[1]
    folder = tmp_path / "before"
    tolerant = make_recipe(folder, records, part_size=part_size, max_rejects=1.0)
    for part in reversed(TokenizePart.all_of(tolerant)):
        part.run()
    recipe = make_recipe(folder, records, part_size=part_size)
    with pytest.raises(DataError) as caught:
        Plan(recipe).run()
    assert (caught.value.reason, str(caught.value).replace(str(folder), "")) == (
        found[0],
        found[1].replace(str(tmp_path / "fresh"), ""),
    )


def test_any_conversation_may_be_rejected_if_all_may(tmp_path: Path) -> None:
    recipe = make_recipe(tmp_path, [*[REASONED] * 120, GOOD], max_rejects=1.0)
    manifest = load_manifest(pack_corpus(recipe))
    assert manifest.ledger.conversations.rejected == {"reasoning_not_written": 120}


def test_the_first_conversations_are_those_of_all_files(tmp_path: Path) -> None:
    for number, records in enumerate(([REASONED] * 60, [REASONED] * 39, [GOOD, REASONED])):
        lines = "".join(json.dumps(record) + "\n" for record in records)
        (tmp_path / f"{number}.jsonl").write_text(lines)
    sources = [{"path": f"{number}.jsonl"} for number in range(3)]
    reason, _ = error_of(make_recipe(tmp_path, [], sources=sources)) or ("", "")
    assert reason == "too_many_rejects"
    _, message = error_of(make_recipe(tmp_path, [], sources=sources[:2])) or ("", "")
    assert message.endswith("; the first 99 conversations all fail like this")


@pytest.mark.parametrize("engine", ["auto", "reference"])
def test_check_forecasts_the_error(tmp_path: Path, engine: str) -> None:
    records = [*[REASONED] * 100, *[GOOD] * 300]
    config = write_project(tmp_path, records, engine=engine)
    with pytest.raises(DataError) as caught:
        predict(load_config(config), tmp_path, tmp_path)
    assert (caught.value.reason, str(caught.value)) == error_of(make_recipe(tmp_path, records, engine=engine))
    found = predict(load_config(write_project(tmp_path, [GOOD, *records], engine=engine)), tmp_path, tmp_path)
    assert [(one.reason, one.looked_at) for one in found.rejects] == [("reasoning_not_written", 100)]
    assert "the most frequent reason is reasoning_not_written; fix: set reasoning: drop" in found.failures[0]


@pytest.mark.slow
@pytest.mark.parametrize("on", ["workers:2", "here"])
def test_every_engine_stops_with_the_same_message(tmp_path: Path, on: str) -> None:
    write_project(tmp_path, [*[REASONED] * 100, *[GOOD] * 300], part_size=2048)
    done = command(tmp_path, str(BIN / "packcorpus"), "pack", "corpus.yaml", "--on", on)
    assert done.returncode == 65
    [line] = [line for line in done.stderr.splitlines() if line.startswith("E")]
    assert line.startswith("E418 error: chat.jsonl:1: messages[1] has reasoning, but the built-in template chatml")
    assert line.endswith("; the first 100 conversations all fail like this")
    assert "Traceback" not in done.stderr


def test_init_names_a_max_rejects_that_runs_if_the_first_conversations_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(kind_path("hf_byte_level"), tmp_path / "model")
    settings = json.loads((tmp_path / "model" / "tokenizer_config.json").read_text())
    (tmp_path / "model" / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": NO_CALLS}))
    for count, expected in ((100, "1"), (99, "0.25")):
        records = [*[CALLING] * count, *[GOOD] * 300]
        (tmp_path / "chat.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
        draft = write_draft(["chat.jsonl"], Path("corpus.yaml"), True, Given())
        config = load_config(Path("corpus.yaml"))
        assert (config.template, config.max_rejects, draft.will_fail) == ("tokenizer", 0.01, True)
        assert f"or set max_rejects: {expected} to leave them out" in draft.choices[0]
        with Path("corpus.yaml").open("a") as file:
            file.write(f"max_rejects: {expected}.0\n" if expected == "1" else f"max_rejects: {expected}\n")
        pack_corpus(resolve(Path("corpus.yaml"), tmp_path))
