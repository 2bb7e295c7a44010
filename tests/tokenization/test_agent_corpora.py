"""Corpora of agents keep the whole prompt, and each task is one sample."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson
import pytest
from support.small_corpus import make_recipe, pack_corpus
from support.templates.agent_templates import AGENTS, LOSING
from support.tokenizer_kinds import kind_path

from packcorpus.tasks.core.errors import DataError

USER, SAID = {"role": "user", "content": "How many apples?"}, {"role": "assistant", "content": "52."}
RESULT = {"role": "tool", "content": "52 apples in stock"}
TOOL = {"type": "function", "function": {"name": "stock", "parameters": {"type": "object", "properties": {}}}}
LOST_RESULT = {"messages": [USER, {"role": "assistant", "content": "Let me look."}, RESULT, SAID]}
QUOTED_RESULT = {"messages": [*LOST_RESULT["messages"][:3], {"role": "assistant", "content": f"{RESULT['content']}."}]}
LOST_TOOLS = {"messages": [USER, SAID], "tools": [TOOL]}


def facts(folder: Path, record: dict[str, Any], source: str, own: dict[str, Any], **settings: Any) -> dict[str, Any]:
    """Return the manifest of a corpus with one conversation.

    `own` are settings of its source.
    """
    folder.mkdir(exist_ok=True)
    (folder / "agent.jinja").write_text(source)
    tokenizer = str(kind_path("hf_byte_level"))
    given = {"template": "agent.jinja", "tokenizer": tokenizer, "sequence_length": 16384, "max_rejects": 1.0}
    manifest = pack_corpus(make_recipe(folder, [record], sources=[{"path": "chat.jsonl"} | own], **given | settings))
    found: dict[str, Any] = orjson.loads(manifest.read_bytes())
    return found


@pytest.mark.parametrize(
    ("record", "template", "code", "own", "left_out"),
    [
        (LOST_RESULT, "results", "E245", {"drop_roles": ["tool"]}, "tool"),
        (QUOTED_RESULT, "results", "E245", {"drop_roles": ["tool"]}, "tool"),
        (LOST_TOOLS, "tools", "E246", {"ignore": ["tools"]}, "tools"),
    ],
)
def test_a_lost_part_is_a_reject_unless_a_setting_leaves_it_out(
    tmp_path: Path, record: dict[str, Any], template: str, code: str, own: dict[str, Any], left_out: str
) -> None:
    with pytest.raises(DataError, match=code):
        facts(tmp_path, record, LOSING[template], {})
    assert facts(tmp_path, record, LOSING[template], own)["ledger"]["context"]["left_out"] == {left_out: 1}
    assert facts(tmp_path, record, AGENTS["kept"], {})["ledger"]["conversations"]["packed"] == 1


def task(name: str, calls: int) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = [{"role": "user", "content": f"Task {name}"}]
    for step in range(calls):
        function = {"name": "ls", "arguments": {"path": f"/{name}{step}"}}
        call = {"tool_calls": [{"type": "function", "function": function}], "reasoning_content": f"Step {step}."}
        messages += [{"role": "assistant", "content": "", **call}, {"role": "tool", "content": "entry " * 9}]
    return [*messages, {"role": "assistant", "content": "Found.", "reasoning_content": "Done."}]


def test_two_tasks_of_ten_calls_are_two_samples(tmp_path: Path) -> None:
    record = {"messages": task("a", 10) + task("b", 10)}
    source = AGENTS["after the last user message"]
    auto, apart = (facts(tmp_path / turns, record, source, {}, turns=turns)["ledger"] for turns in ("auto", "apart"))
    assert (auto["samples"]["packed"], apart["samples"]["packed"]) == (2, 22)
    # A sample that does not end with EOS gets one; here, every turn ends with it.
    assert auto["tokens"]["trained"] == apart["tokens"]["trained"]
    assert auto["tokens"]["packed"] * 5 < apart["tokens"]["packed"]


def test_an_answer_with_other_tokens_in_later_prompts_ends_a_sample(tmp_path: Path) -> None:
    """A line break at its start joins the line break of the header."""
    messages = task("a", 4)
    messages[3] |= {"content": "\n\nso", "reasoning_content": ""}
    found = facts(tmp_path, {"messages": messages}, AGENTS["kept"], {})["ledger"]
    assert found["samples"]["packed"] == 2
