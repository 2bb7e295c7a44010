"""Nothing of a prompt is lost without a reject."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.profiles import examples
from support.templates.modern_templates import LOOP, PROMPT
from support.tokenizer_kinds import open_kind, tokenize

from packcorpus.tasks.sources.model import SourceFile
from packcorpus.tasks.templates.jinja.template import JinjaTemplate

KIND = "hf_byte_level"
CITY = {"type": "object", "properties": {"town": {"type": "string", "description": "Where it is."}}}
TOOLS = [{"type": "function", "function": {"name": "f", "description": "Weather.", "parameters": CITY}}]
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": {"town": "Oslo", "days": 3}}}

WRITTEN = "{% if tools %}{{ tools | tojson }}{% endif %}" + LOOP
CALLS = "{% for c in m.tool_calls or [] %}{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}"
ALL = WRITTEN + "{{ m.content }}" + CALLS + "<|im_end|>\n{% endfor %}" + PROMPT


def without(role: str) -> str:
    """Return a template that does not write the messages of a role."""
    return ALL.replace("{% for m in messages %}", f"{{% for m in messages if m.role != '{role}' %}}")


def conversation(result: str = "52", system: str = "s") -> list[dict[str, Any]]:
    return [
        {"role": "system", "content": system},
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c1", "content": result},
        {"role": "assistant", "content": "It is 52."},
    ]


def rejects_of(source: str, record: dict[str, Any], count: int = 3) -> list[Any]:
    template = JinjaTemplate("test.jinja", source, open_kind(KIND), "assistant", "2026-01-01")
    _, receipt = tokenize([record] * count, open_kind(KIND), template)
    return [reject[1:] for reject in receipt["rejects"]]


SHORTER = ALL.replace("{{ c.function.arguments | tojson }}", "{{ c.function.arguments.town }}")


@pytest.mark.parametrize(
    ("source", "reason", "place"),
    [
        (without("tool"), "message_not_written", 'messages[3] (tool) has "52"'),
        (without("system"), "message_not_written", 'messages[0] (system) has "s"'),
        (ALL.replace("{{ tools | tojson }}", "tools"), "tools_not_written", 'tools[0] has "function"'),
        (ALL.replace("{{ tools | tojson }}", "{{ tools[0].function.name }}"), "tools_not_written", '"Weather."'),
        (SHORTER, "answer_not_written", 'messages[2].tool_calls[0] (assistant) has "town"'),  # in the tools alone
        (SHORTER.replace("town", "days"), "message_not_written", 'messages[2].tool_calls[0] (assistant) has "Oslo"'),
    ],
)
def test_a_lost_part_is_named(source: str, reason: str, place: str) -> None:
    found = rejects_of(source, {"messages": conversation(), "tools": TOOLS})
    assert [each[0] for each in found] == [reason] * 3
    assert place in found[0][1] or reason == "tools_not_written"
    assert "test.jinja" in found[0][1]


def test_whole_conversations_are_filled_in() -> None:
    template = JinjaTemplate("test.jinja", ALL, open_kind(KIND), "assistant", "2026-01-01")
    with mock.patch.object(template, "all_samples", side_effect=template.all_samples) as samples:
        rows, receipt = tokenize([{"messages": conversation(), "tools": TOOLS}] * 3, open_kind(KIND), template)
    assert len(rows) == 3
    assert not receipt["rejects"]
    assert not any(call.args[0] for call in samples.call_args_list)


@settings(max_examples=examples(50), deadline=None, suppress_health_check=list(HealthCheck))
@given(st.sampled_from(["", "system", "tool"]), st.text(max_size=20), st.text(max_size=20), st.booleans())
def test_a_text_is_never_found_by_chance(lost: str, result: str, system: str, inline: bool) -> None:
    """Results and answers often have the same words."""
    messages = conversation(result, system)
    messages[-1]["content"] = f"{system} {result} tool system 52"
    if inline:
        messages[-1]["content"] = "<think>\nr\n</think>\n\n" + messages[-1]["content"]
    source = without(lost) if lost else ALL
    template = JinjaTemplate("test.jinja", source, open_kind(KIND), "assistant", "2026-01-01")
    _, receipt = tokenize([{"messages": messages, "tools": TOOLS}], open_kind(KIND), template)
    is_lost = bool({"system": system, "tool": result}.get(lost, "").strip())
    reasons = {reject[1] for reject in receipt["rejects"]} - {"nul", "lone_surrogate"}
    assert reasons == ({"message_not_written"} if is_lost else set()) or receipt["rejects"][0][1] == "nul"


@pytest.mark.parametrize("quoting", ["content", "reasoning_content", "question"])
def test_a_long_result_that_another_text_quotes_is_lost(quoting: str) -> None:
    result = "52 apples are in stock."
    messages = conversation(result, "You count the apples.")
    messages[1]["content"] = f"Is it true: {result}" if quoting == "question" else "How many apples are there?"
    messages[-1] |= {"content": "There are fifty-two of them."} | ({quoting: f"It says: {result}"})
    messages[2:3] = [{"role": "assistant", "content": "I look at the stock.", "train": False}]
    source = without("tool").replace("{{ m.content }}", "{{ m.reasoning_content }}{{ m.content }}")
    assert [each[0] for each in rejects_of(source, {"messages": messages})] == ["message_not_written"] * 3
    assert rejects_of(source.replace(" if m.role != 'tool'", ""), {"messages": messages}) == []


def test_templates_may_change_texts_and_leave_reasoning_out_of_the_history() -> None:
    source = ALL.replace("{{ m.content }}", "{{ m.content.split('</think>')[-1] | trim | upper }}")
    thought = {"role": "assistant", "content": "<think>\nr\n</think>\n\nso", "train": False}
    messages = [*conversation()[:-1], thought, *conversation()[1:]]
    assert rejects_of(source, {"messages": messages, "tools": TOOLS}) == []


def test_settings_leave_messages_and_tools_out() -> None:
    file = SourceFile(Path("a.jsonl"), "a.jsonl", "jsonl", "", "messages", (), 0, "", 0)
    record = {"messages": conversation(), "tools": TOOLS}
    assert [m.role for m in file.conversation(record).messages] == ["system", "user", "assistant", "tool", "assistant"]
    dropping = replace(file, drop_roles=("tool",), ignore=("tools",))
    found = dropping.conversation(record)
    assert [m.role for m in found.messages] == ["system", "user", "assistant", "assistant"]
    assert found.tools == ()


THINK = "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
ANSWERS = LOOP + THINK + "{{ m.content }}" + CALLS + "<|im_end|>\n{% endfor %}" + PROMPT
# The first part of an answer ends with the EOS token.
PARTS = ANSWERS.replace("</think>", "</think><|im_end|>")
# Reasoning is a turn of its own, before the answer.
HEADER = "<|im_start|>{{ m.role }}\n"
THOUGHT = "{% if m.reasoning_content %}<|im_start|>thought\n{{ m.reasoning_content }}<|im_end|>\n{% endif %}"
BEFORE = ANSWERS.replace(THINK, "").replace(HEADER, THOUGHT + HEADER)
# The arguments of calls follow the answer.
AFTER = ANSWERS.replace(CALLS, CALLS.replace("{{ c.function.arguments | tojson }}", "")).replace(
    "<|im_end|>\n", "<|im_end|>\n" + CALLS.replace("{{ c.function.name }}", "")
)


def answered(content: str, **more: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": "q"}, {"role": "assistant", "content": content, **more}]


def content_as(source: str, expression: str) -> str:
    return source.replace("{{ m.content }}", f"{{{{ {expression} if m.role == 'assistant' else m.content }}}}")


@pytest.mark.parametrize(
    ("source", "messages", "text"),
    [
        (content_as(PARTS, "(m.content | upper)"), answered("so", reasoning_content="r"), '"so"'),
        (content_as(PARTS, "(m.content | tojson)"), answered('"so"', reasoning_content="r"), "so"),
        (BEFORE, answered("", reasoning_content="Oslo", tool_calls=[CALL]), 'the reasoning "Oslo"'),
        (content_as(ANSWERS, "m.content[:22]"), answered("one two three four five."), '"one two'),
        (content_as(ANSWERS, "m.content[1:]"), answered("one two three four five."), '"one two'),
        (content_as(ANSWERS, "m.content[:-1]"), answered("one two three four five."), '"one two'),
        (content_as(ANSWERS, "m.content.replace('two ', '')"), answered("one two three four five."), '"one two'),
        (content_as(ANSWERS, "m.content.split('\\n')[0]"), answered("one two three\nfour"), '"one two'),
        (content_as(ANSWERS, "m.content.split('</think>')[-1]"), answered("why</think>so"), 'the reasoning "why"'),
        (AFTER, [*answered("", tool_calls=[CALL]), {"role": "tool", "content": "5"}, *answered("so")], '"town"'),
    ],
)
def test_a_text_outside_the_label_of_its_turn_is_named(source: str, messages: list[dict[str, Any]], text: str) -> None:
    found = rejects_of(source, {"messages": messages})
    assert [each[0] for each in found] == ["answer_not_written"] * 3
    assert text in found[0][1]
    assert "test.jinja" in found[0][1]


def test_answers_are_filled_in_only_if_their_labels_hold_them() -> None:
    source = content_as(PARTS, "(m.content | tojson)")
    template = JinjaTemplate("test.jinja", source, open_kind(KIND), "assistant", "2026-01-01")
    rows, _ = tokenize([{"messages": answered("so", reasoning_content="r")}] * 3, open_kind(KIND), template)
    texts = [open_kind(KIND).decode(row.ids[row.trained]) for row in rows]
    assert texts == ['<think>r</think><|im_end|>"so"<|im_end|>'] * 3


def test_the_label_of_a_turn_that_a_flag_adds_holds_its_text() -> None:
    source = ANSWERS.replace("{{ m.content }}", "{{ m.content.split(' ') | join('<|im_end|>') }}")
    messages = [{"role": "user", "content": "one three two", "train": True}, {"role": "assistant", "content": "b"}]
    [[reason, message], *_] = rejects_of(source, {"messages": messages})
    assert reason == "answer_not_written"
    assert 'messages[0] (user) has "one three two"' in message


def test_a_label_holds_its_text_if_all_is_trained_on() -> None:
    """This template writes a question with its answer."""
    source = "{% for m in messages if m.role == 'assistant' %}"
    source += "{{ messages[loop.index0 * 2].content }}<|im_end|>{{ m.content }}<|im_end|>{% endfor %}"
    template = JinjaTemplate("test.jinja", source, open_kind(KIND), "all", "2026-01-01")
    messages = answered("a", train=False) + answered("b")
    _, receipt = tokenize([{"messages": messages[:2]}, {"messages": messages[2:]}], open_kind(KIND), template, "all")
    assert [(number, reason) for number, reason, _ in receipt["rejects"]] == [(0, "answer_not_written")]


def test_a_greeting_without_a_prompt_is_context() -> None:
    """No model writes it, so it has no label."""
    source = "{% if messages[0].role == 'system' %}{% endif %}" + content_as(ANSWERS, "(m.content | upper)")
    messages = [{"role": "assistant", "content": "hello"}, *answered("so")]
    assert rejects_of(source, {"messages": messages}) == []
