"""A dry run warns about problems in settings and data.

It names settings without effect, long conversations, markers, and keys that may be training flags.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from support.inspected import rendered
from support.small_corpus import conversations, write_project
from support.templates.modern_templates import EMPTY_LAST, STRIPPED
from support.tokenizer_kinds import CHATML_JINJA, kind_path

from packcorpus.tasks.cli.check_view import show_prediction
from packcorpus.tasks.config import load_config
from packcorpus.tasks.conversations.turn_weights import flag_hints
from packcorpus.tasks.dry_run.dry_run import predict

CHAT = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "It is 4."}]


def warnings(folder: Path, records: list[dict[str, Any]], **settings: Any) -> list[str]:
    config = write_project(folder, records, **settings)
    return predict(load_config(config), folder, folder).warnings


def test_options_without_effect_are_named(tmp_path: Path) -> None:
    (tmp_path / "own.jinja").write_text("{% if enable_thinking %}x{% endif %}" + CHATML_JINJA)
    options = {"enable_thinkin": False, "enable_thinking": True}
    found = warnings(tmp_path, conversations(5), template="own.jinja", template_options=options)
    advice = "so it has no effect; did you mean enable_thinking?"
    assert [line for line in found if "option" in line] == [
        f"template_options: the template does not use enable_thinkin, {advice}"
    ]
    found = warnings(tmp_path, conversations(5), template_options={"a": 1})
    assert "template_options: built-in templates have no options, so a has no effect" in found


def test_long_conversations_are_counted(tmp_path: Path) -> None:
    long = {"messages": [CHAT[0], {"role": "assistant", "content": "four " * 300}]}
    records = [*conversations(20), long]
    fates = {
        "truncate": "1 conversation will be truncated to 128 tokens, which drops ",
        "drop": "1 conversation longer than 128 tokens will be dropped; ",
        "split": "1 conversation longer than 128 tokens will be split into ",
    }
    for overlong, fate in fates.items():
        found = [line for line in warnings(tmp_path, records, overlong=overlong) if "overlong" in line]
        assert [line.startswith(f"overlong: {fate}") for line in found] == [True]
    assert not [line for line in warnings(tmp_path, records[:-1]) if "overlong" in line]


def test_conversations_to_cut_after_a_turn_are_counted_apart_from_those_to_drop(tmp_path: Path) -> None:
    answer = {"role": "assistant", "content": "four " * 300}
    records = [*conversations(20), *[{"messages": [*CHAT, CHAT[0], answer]}] * 2, {"messages": [CHAT[0], answer]}]
    found = [line for line in warnings(tmp_path, records, overlong="turns") if "overlong" in line]
    assert [re.split("[;,]", line)[0] for line in found] == [
        "overlong: 2 conversations will be cut after the last trained turn that fits in 128 tokens",
        "overlong: 1 conversation longer than 128 tokens will be dropped",
    ]


@pytest.mark.parametrize("special", [True, False])
def test_markers_that_messages_can_write_are_named_and_the_fix_works(tmp_path: Path, special: bool) -> None:
    folder = Path(shutil.copytree(kind_path("hf_byte_level"), tmp_path / "tokenizer"))
    file = folder / "tokenizer.json"
    values = json.loads(file.read_text())
    names = ("<|start_header_id|>", "<|eot_id|>")
    for token in values["added_tokens"]:
        token["special"] = special if token["content"] in names else token["special"]
    file.write_text(json.dumps(values))
    settings: dict[str, Any] = {"template": "llama3", "tokenizer": "tokenizer"}
    found = [line for line in warnings(tmp_path, [{"messages": CHAT}] * 9, **settings) if "frame turns" in line]
    if special:
        assert not found
        return
    assert found[0].startswith("<|start_header_id|> and <|eot_id|> frame turns, but the tokenizer does not mark them")
    names = tuple(found[0].partition("content_tokens: [")[2].rstrip("]}").replace("'", "").split(", "))
    assert names == ("-<|start_header_id|>", "-<|eot_id|>")
    again = warnings(tmp_path, [{"messages": CHAT}] * 9, content_tokens=list(names), **settings)
    assert not [line for line in again if "frame turns" in line]


def test_several_samples_are_explained(tmp_path: Path) -> None:
    (tmp_path / "own.jinja").write_text(STRIPPED)
    thought = {"role": "assistant", "content": "It is 4.", "reasoning": "Two and two."}
    records = [{"messages": [CHAT[0], thought, CHAT[0], thought, CHAT[0], thought]}] * 9
    settings = {"template": "own.jinja", "tokenizer": str(kind_path("hf_byte_level"))}
    [line] = [line for line in warnings(tmp_path, records, **settings) if "turns" in line]
    assert line.startswith("turns: auto: the template writes earlier turns differently")
    assert not [line for line in warnings(tmp_path, records, turns="apart", **settings) if "turns" in line]
    assert not [line for line in warnings(tmp_path, records, train_on="last", **settings) if "turns" in line]


def test_answers_that_close_the_reasoning_at_once_are_counted(tmp_path: Path) -> None:
    (tmp_path / "own.jinja").write_text(EMPTY_LAST)
    settings = {"template": "own.jinja", "tokenizer": str(kind_path("hf_byte_level"))}
    thought = [CHAT[0], CHAT[1] | {"reasoning_content": "Why."}]
    records = [{"messages": turns} for turns in [CHAT[:2]] * 8 + [thought]]
    [line] = [line for line in warnings(tmp_path, records, **settings) if "reasoning" in line]
    assert line.startswith("8 trained answers of the sample close the reasoning at once, and 1 has reasoning. ")
    assert line.endswith("set  advanced: {empty_reasoning: mask}")
    config = write_project(tmp_path, records, **settings)
    found = predict(load_config(config), tmp_path, tmp_path)
    assert (found.noticed["empty_reasoning"], found.noticed["reasoned_answers"]) == (8, 1)
    page = rendered(found, show_prediction)
    assert "8 trained answers without reasoning, for which the template writes" in " ".join(page.split())
    for less in ({"empty_reasoning": "mask"}, {"train_parts": {"reasoning": False}}):
        assert not [line for line in warnings(tmp_path, records, **settings, **less) if "reasoning" in line]
    few = [{"messages": turns} for turns in [thought] * 199 + [CHAT[:2]]]
    assert not [line for line in warnings(tmp_path, few, **settings) if "reasoning" in line]


def test_keys_that_may_be_training_flags_are_named(tmp_path: Path) -> None:
    turns = [CHAT[0], CHAT[1] | {"should_train": False}]
    [line] = [line for line in warnings(tmp_path, [{"messages": turns}] * 9) if "flag" in line]
    assert line == (
        "chat.jsonl: messages[].should_train is not used, but may be a training flag; if so, set  "
        "columns: {train: should_train}"
    )
    source = {"path": "chat.jsonl", "columns": {"train": "should_train"}}
    turns += CHAT
    assert not [line for line in warnings(tmp_path, [{"messages": turns}] * 9, sources=[source]) if "flag" in line]
    names = {"loss": 1, "loss_mask": 1, "trainable": 1, "is_masked": 1, "strain": 1, "trainer_id": 1, "gloss": 1}
    paths = {f"turns[].{name}": 1 for name in names} | {"weight": 3, "messages[].tool_calls[].weight": 1}
    assert [line.split()[1] for line in flag_hints({"a": paths})] == [
        "turns[].loss", "turns[].loss_mask", "turns[].trainable", "turns[].is_masked"
    ]  # fmt: skip


def test_nothing_is_predicted_if_nothing_can_be_packed(tmp_path: Path) -> None:
    config = write_project(tmp_path, [{"messages": CHAT[:1]}] * 3)
    page = rendered(predict(load_config(config), tmp_path, tmp_path), show_prediction)
    assert "no conversation of the sample is left to train on" in page
    assert "it has no assistant message" in " ".join(page.split())
    assert "Prediction" not in page
    assert "Steps" not in page
