"""Calls and results are paired by ID, name, or order.

What has no partner is counted.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.small_corpus import make_recipe, pack_corpus

from packcorpus.tasks.conversations.answers import Unpaired, unpaired_in
from packcorpus.tasks.conversations.model import Conversation, Message, ToolCall
from packcorpus.tasks.dry_run.dry_run import predict
from packcorpus.tasks.storage.manifest import load_manifest

TOOLS = ('{"type":"function","function":{"name":"f"}}', '{"type":"function","function":{"name":"g"}}')
USER, SAID = Message("user", "a"), Message("assistant", "b")


def calls(*ids: str | None, name: str = "f") -> Message:
    return Message("assistant", "", tool_calls=tuple(ToolCall(name, "{}", id) for id in ids))


def result(id: str | None = None, name: str | None = None) -> Message:
    return Message("tool", "c", tool_call_id=id, name=name)


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        ((USER, SAID), None),
        ((USER, calls("x"), result("x"), SAID), None),
        ((USER, calls("x", "y"), result("y"), result("x"), SAID), None),
        ((USER, calls(None, None), result(), result(), SAID), None),
        ((USER, calls(None), result("x"), SAID), None),  # only results have IDs
        ((USER, calls("x"), result(), SAID), None),
        ((USER, calls("x")), None),  # a conversation may end with a call
        ((USER, calls("x"), result("x"), calls("y", "z")), None),
        ((USER, calls("x"), SAID), Unpaired(1, 0, 0)),
        ((USER, calls("x", "y"), result("x"), SAID), Unpaired(1, 0, 0)),
        ((USER, calls("x"), result("z"), SAID), Unpaired(1, 1, 0)),
        ((USER, result(), calls("x"), result("x"), SAID), Unpaired(0, 1, 0)),
        ((USER, calls("x"), result("x"), result("x"), SAID), Unpaired(0, 1, 0)),
        ((USER, calls("x"), calls("y")), Unpaired(1, 0, 0)),
        ((USER, calls(None), calls(None, name="g"), result(name="g"), result(name="f"), SAID), None),
        ((USER, calls("x"), calls("y", name="g"), result(name="g"), result("x"), SAID), None),
        ((USER, Message("assistant", "<tool_call>{}</tool_call>"), result(), SAID), None),
        ((USER, calls("x", name="h"), result("x"), SAID), Unpaired(0, 0, 1)),
    ],
)
def test_pairs(messages: tuple[Message, ...], expected: Unpaired | None) -> None:
    assert unpaired_in(Conversation(messages, TOOLS)) == expected


def test_a_conversation_that_calls_without_definitions_is_noticed() -> None:
    assert unpaired_in(Conversation((USER, calls("x")))) == Unpaired(0, 0, 1)
    assert unpaired_in(Conversation((USER, calls("x")), ('{"name":"f"}',))) is None
    assert unpaired_in(Conversation((USER, calls("x")), ('{"function":5}',))) == Unpaired(0, 0, 1)


def chat(*middle: dict[str, Any], **keys: Any) -> dict[str, Any]:
    ends = {"role": "user", "content": "How many apples?"}, {"role": "assistant", "content": "There are 52."}
    return {"messages": [ends[0], *middle, ends[1]], **keys}


CALL = {"role": "assistant", "content": "", "tool_calls": [{"id": "x", "function": {"name": "f", "arguments": "{}"}}]}
RESULT = {"role": "tool", "content": "52 apples in stock"}


@pytest.mark.parametrize("turns", ["together", "apart"])
def test_the_manifest_counts_what_has_no_partner(tmp_path: Path, turns: str) -> None:
    records = [chat(), chat(RESULT), chat(CALL), chat(CALL, RESULT, tools=[{"name": "f"}])] * 20
    recipe = make_recipe(tmp_path, records, turns=turns, sequence_length=512)
    noticed = load_manifest(pack_corpus(recipe)).noticed
    expected = {"results_without_call": 20, "calls_without_result": 20, "undefined_tools": 20}
    assert {name: noticed.get(name) for name in expected} == expected
    found = predict(recipe.config, recipe.folder, tmp_path).noticed
    assert {name: found.get(name) for name in expected} == expected


def test_nothing_is_noticed_in_whole_conversations(tmp_path: Path) -> None:
    records = [chat(), chat(CALL, RESULT, tools=[{"name": "f"}])] * 20
    noticed = load_manifest(pack_corpus(make_recipe(tmp_path, records, sequence_length=512))).noticed
    assert noticed.keys().isdisjoint(Unpaired._fields)
