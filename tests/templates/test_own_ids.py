"""Rows packed with a tokenizer's own template have the ids of inference.

Their labels are also those of inference, turn by turn. bench/reliability/own_ids.py compares all conversations of the
benchmarks. These tests compare a few.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
import yaml
from support.commands import ROOT, SHARED, needs_shared
from support.small_corpus import conversations, make_recipe, pack_corpus
from support.templates.modern_templates import DEFAULT_SYSTEM, LOOP, PROMPT
from support.tokenizer_kinds import kind_path

pytest.importorskip("transformers", reason="transformers is the reference and is not installed")

_spec = importlib.util.spec_from_file_location("own_ids", ROOT / "bench" / "reliability" / "own_ids.py")
assert _spec is not None
assert _spec.loader is not None
own_ids = sys.modules["own_ids"] = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(own_ids)

TOOLS = (
    "{% for tool in tools or [] %}{{ tool | tojson }}\n{% endfor %}"
    + LOOP
    + (
        "{{ m.content }}{% for c in m.tool_calls or [] %}\n<tool_call>\n{{ c.function | tojson }}\n</tool_call>"
        "{% endfor %}"
        "<|im_end|>\n{% endfor %}" + PROMPT
    )
)
# Only the last turn keeps its reasoning, whether the message has it in its content or in its own key.
LAST_REASONING = LOOP + (
    "{% set parts = m.content.split('</think>') if m.role == 'assistant' else [m.content] %}"
    "{% set thought = parts[0].split('<think>')[-1].strip('\n') if parts | length > 1 else m.reasoning_content %}"
    "{% if loop.last and thought %}<think>\n{{ thought }}\n</think>\n\n{% endif %}"
    "{{ parts[-1].lstrip('\n') }}<|im_end|>\n{% endfor %}" + PROMPT
)
SETTINGS = {"template": "tokenizer", "sequence_length": 4096, "overlong": "drop", "max_rejects": 1.0}


def says(role: str, content: str, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


CALL = {"type": "function", "function": {"name": "find", "arguments": {"x": [1, "<think>"]}}}
ASKED = says("user", "What is <think>?")
RECORDS = [
    *conversations(20, seed=5),
    {"messages": [ASKED, says("assistant", "<think>\nTwo.\n</think>\n\nA token."), ASKED, says("assistant", "Two.")]},
    {"messages": [ASKED, says("assistant", "No <|im_end|> or <|endoftext|>"), ASKED, says("assistant", "  Three ")]},
    {"messages": [says("system", "é"), ASKED, says("assistant", ""), says("user", "2"), says("assistant", "3")]},
    {"messages": [ASKED, says("assistant", "")]},
    {"messages": [ASKED, says("assistant", "long " * 2000)]},
]
CALLS = {"messages": [ASKED, says("assistant", "", tool_calls=[CALL] * 2), says("tool", "4"), says("assistant", "5")]}
REASONS = {"messages": [ASKED, says("assistant", "2", reasoning_content="1"), ASKED, says("assistant", "4")]}
# Each answer has a sample, except one empty answer and the answers of the two records that are left out.
TURNS = sum(message["role"] == "assistant" for record in RECORDS for message in record["messages"]) - 3


def tokenizer_with(template: str, folder: Path) -> Path:
    shutil.copytree(kind_path("hf_byte_level"), folder)
    config = json.loads((folder / "tokenizer_config.json").read_bytes())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": template}))
    return folder


@pytest.mark.parametrize(
    ("template", "turns", "more"),
    [
        (DEFAULT_SYSTEM, "together", []),
        (DEFAULT_SYSTEM, "apart", []),
        (TOOLS, "together", [CALLS]),
        (TOOLS, "apart", [CALLS]),
        (LAST_REASONING, "auto", [REASONS]),
        (LAST_REASONING, "apart", [REASONS]),
    ],
)
def test_every_turn_has_the_ids_of_inference(template: str, turns: str, more: list[Any], tmp_path: Path) -> None:
    records = RECORDS + more
    tokenizer = tokenizer_with(template, tmp_path / "tokenizer")
    manifest = pack_corpus(make_recipe(tmp_path, records, tokenizer="tokenizer", turns=turns, **SETTINGS))
    tally = own_ids.compare(manifest, own_ids.Reference(records, tokenizer))
    assert tally.wrong == []
    assert tally.left_out == {"rejected: no_trained_tokens": 1, "dropped: too_long": 1}
    assert tally.turns == TURNS + 2 * len(more)
    assert tally.samples == {"together": len(records) - 2, "apart": tally.turns}.get(turns, tally.samples)


def test_a_difference_is_found(tmp_path: Path) -> None:
    records = [{"messages": [ASKED, says("assistant", "One."), ASKED, says("assistant", "Two.")]}]
    reference = own_ids.Reference(records, tokenizer_with(TOOLS, tmp_path / "tokenizer"))
    turns = [reference.turn(0, 1), reference.turn(0, 3)]
    (first, one), (prompt, two) = turns
    ids = np.concatenate([prompt, two])
    trained = np.zeros(len(ids), bool)
    trained[len(first) : len(first) + len(one)] = trained[len(prompt) :] = True
    assert own_ids.difference(ids, trained, turns, reference) is None
    for at in range(len(ids)):
        changed, flags = ids.copy(), trained.copy()
        changed[at] += 1
        flags[at] = not flags[at]
        assert own_ids.difference(changed, trained, turns, reference), at
        assert "trained on" in own_ids.difference(ids, flags, turns, reference), at
    assert own_ids.difference(ids[:-1], trained[:-1], turns, reference)
    assert "after" in own_ids.difference(np.append(ids, ids[:3]), np.append(trained, [False] * 3), turns, reference)


def test_a_conversation_that_is_lost_is_found(tmp_path: Path) -> None:
    tokenizer = tokenizer_with(DEFAULT_SYSTEM, tmp_path / "tokenizer")
    manifest = pack_corpus(make_recipe(tmp_path, RECORDS[:4], tokenizer="tokenizer", **SETTINGS))
    tally = own_ids.compare(manifest, own_ids.Reference(RECORDS[:5], tokenizer))
    assert [line for line, _, _ in tally.wrong] == [5]


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """Return a tokenizer, and the reference of a few real conversations with it."""
    folder = tmp_path_factory.mktemp("real")
    tokenizer = tokenizer_with(TOOLS, folder / "tokenizer")
    config = folder / "corpora.yaml"
    sources = [{"path": str(SHARED / "corpora" / "*.json*")}]
    config.write_text(yaml.safe_dump({"sources": sources, "tokenizer": str(tokenizer), "template": "tokenizer"}))
    records, unreadable = own_ids.records_of(config, folder)
    assert unreadable == 0
    records = (records + own_ids.with_reasoning(SHARED / "corpora" / "gsm8k_train.jsonl", inline=True))[::101]
    records += [record for record in records if "tools" in record]
    return tokenizer, own_ids.Reference(records, tokenizer)


@needs_shared
@pytest.mark.slow
@pytest.mark.parametrize("turns", ["together", "apart"])
def test_real_conversations_have_the_ids_of_inference(turns: str, real: tuple[Path, Any], tmp_path: Path) -> None:
    tokenizer, reference = real
    records = reference.records
    manifest = own_ids.pack(
        records, {"tokenizer": str(tokenizer), "template": "tokenizer", "turns": turns}, tmp_path / turns
    )
    assert isinstance(manifest, Path), manifest
    tally = own_ids.compare(manifest, reference)
    assert tally.wrong == []
    assert tally.left_out == {}
    assert tally.samples == (len(records) if turns == "together" else tally.turns)
    assert orjson.loads(manifest.read_bytes())["noticed"]["content_tokens"]["<think>"]["assistant"] > 50
