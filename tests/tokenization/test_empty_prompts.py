"""Conversations with an answer to an empty prompt are counted and shown."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.commands import BIN, command
from support.small_corpus import conversations, make_recipe, pack_corpus, write_project

from packcorpus.tasks.config import load_config
from packcorpus.tasks.dry_run.dry_run import predict
from packcorpus.tasks.storage.manifest import load_manifest

CALL = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}


def turns(*contents: str, **flags: Any) -> dict[str, Any]:
    """Return a conversation.

    The first letter of a text is that of its role: system, user, assistant, or tool.
    """
    names = {"s": "system", "u": "user", "a": "assistant", "t": "tool"}
    messages = [{"role": names[text[0]], "content": text[2:]} for text in contents]
    return {"messages": messages}


COUNTED = [
    turns("u:", "a:b"),
    turns("u: \n\t", "a:b"),
    turns("s:Be brief.", "u:", "a:b"),
    turns("u:a", "a:b", "u:", "a:d"),
    turns("u:", "a:b", "u:c", "a:d"),
    turns("u:", "u: ", "a:b"),
    turns("u:", "a:b", "u:", "a:d"),
    {"prompt": "", "completion": "b"},
    {"instruction": "", "output": "b"},
]
OTHERS = [
    turns("u:a", "a:b"),
    turns("s:", "u:a", "a:b"),
    turns("u:a", "u:", "a:b"),
    turns("u:", "u:a", "a:b"),
    turns("u:a", "a:b", "u:"),
    {"messages": [{"role": "user", "content": "a"}, CALL, {"role": "tool", "content": ""}, *turns("a:b")["messages"]]},
    {"messages": [{"role": "user", "content": ""}, {"role": "assistant", "content": "b", "train": False}]
     + turns("u:c", "a:d")["messages"]},
    {"messages": [{"role": "user", "content": ""}, CALL | {"train": False}, {"role": "tool", "content": ""}]
     + turns("a:b")["messages"]},
    {"instruction": "", "input": "a", "output": "b"},
]  # fmt: skip


@pytest.mark.parametrize("record", COUNTED, ids=str)
@pytest.mark.parametrize("turns_", ["auto", "apart"])
def test_an_answer_to_an_empty_prompt_is_counted_once(tmp_path: Path, record: dict[str, Any], turns_: str) -> None:
    assert noticed(tmp_path, [record], turns=turns_) == 1


@pytest.mark.parametrize("record", OTHERS, ids=str)
def test_other_blank_messages_are_not_counted(tmp_path: Path, record: dict[str, Any]) -> None:
    assert noticed(tmp_path, [record]) == 0


def test_only_trained_answers_are_counted(tmp_path: Path) -> None:
    record = turns("u:", "a:b", "u:c", "a:d")
    assert (noticed(tmp_path, [record]), noticed(tmp_path, [record], train_on="last")) == (1, 0)


def noticed(folder: Path, records: list[dict[str, Any]], **settings: Any) -> int:
    """Return the count of records between other conversations.

    A built-in template and a Jinja template must agree.
    """
    counts = set()
    for template in ("chatml", "t.jinja"):
        source = (
            "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{{ m.tool_calls or '' }}<|im_end|>\n"
            "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
        )
        (folder / "t.jinja").write_text(source)
        format = next(iter(records[0]), "").replace("prompt", "prompt_completion").replace("instruction", "alpaca")
        others = conversations(5) if format == "messages" else []
        path = pack_corpus(make_recipe(folder, [*others, *records, *others], template=template, **settings))
        counts.add(load_manifest(path).noticed_counts["empty_prompts"])
    [count] = counts
    return count


def test_the_summary_and_the_check_show_them(tmp_path: Path) -> None:
    blank = turns("u:", "a:b")
    config = write_project(tmp_path, [*conversations(98), blank, blank])
    done = command(tmp_path, str(BIN / "packcorpus"), "pack", "corpus.yaml", "--on", "here")
    said = "2 conversations with an answer to an empty prompt: the user message before it is blank"
    assert said in done.stderr.splitlines()
    [warning] = [line for line in predict(load_config(config), tmp_path, tmp_path).warnings if "empty prompt" in line]
    assert warning.startswith("2.0 % of the conversations have an answer to an empty prompt: the user message before")
    config = write_project(tmp_path, [*conversations(99), blank])
    found = predict(load_config(config), tmp_path, tmp_path)
    assert found.noticed["empty_prompts"] == 1
    assert not any("empty prompt" in line for line in found.warnings), "1 % is not above 1 %"
