"""Conversations that are filled in equal their renderings.

Contents are filled into the rendering of placeholders only if the template would write the same text.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from datetime import datetime
from functools import lru_cache
from typing import Any
from unittest import mock

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from support.profiles import examples
from support.templates.jinja_sources import CHATML_MARKED, JOINED, LLAMA2, LLAMA3, TOOLS
from support.templates.modern_templates import (
    CALLS_IF_NULL,
    INLINE,
    LOOP,
    MODERN,
    NO_CALLS,
    PROMPT,
    TEXT_ARGUMENTS,
    WITHOUT_ENDS,
)
from support.tokenizer_kinds import CHATML_JINJA, hostile, open_kind, ordinary, tokenize

from packcorpus.tasks.core.errors import DataError
from packcorpus.tasks.templates.jinja.environment import ChatTemplate, chat_environment
from packcorpus.tasks.templates.jinja.template import JinjaTemplate
from packcorpus.tasks.templates.jinja.traced import Trace, can_be_traced, prepare_tracing, traced
from packcorpus.tasks.tokenization.skeletons import Skeleton

KIND = "hf_byte_level"
# For each template separately.
FEW = settings(max_examples=examples(15), deadline=None, suppress_health_check=[HealthCheck.too_slow])
MACRO = (
    "{% macro written(c) %}{{ c | trim }}{% endmacro %}"
    + LOOP
    + "{% set text = written(m.content) %}{% if 'secret' in text %}(hidden){% else %}{{ text }}{% endif %}<|im_end|>\n"
    "{% endfor %}" + PROMPT
)
AS_JSON = (
    LOOP + "{{ m.content }}{% if m.tool_calls %}{{ m.tool_calls | tojson }}{% endif %}"
    "{% for c in m.tool_calls or [] if not c.function.arguments %}nothing{% endfor %}"
    "{% if m.reasoning_content is defined %}{{ m.reasoning_content | trim | tojson(ensure_ascii=true) }}{% endif %}"
    "<|im_end|>\n"
    "{% endfor %}{{ tools | tojson }}{% for tool in tools or [] %}{{ tool | tojson(indent=2) }}{% endfor %}" + PROMPT
)
# The template reads tools and arguments one by one.
FIELDS = "{% for tool in tools or [] %}{{ tool.function.name }} {{ tool.function.parameters | tojson }}\n{% endfor %}"
ITEMS = (
    FIELDS + LOOP + "{% if m.content is iterable and m.content | trim | length > 0 %}{{ m.content }}{% endif %}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }}{% for k, v in c.function.arguments | items %}"
    "<{{ k }}>{{ v if v is string else v | tojson }}</{{ k }}>{% endfor %}</tool_call>{% endfor %}<|im_end|>\n"
    "{% endfor %}" + PROMPT
)
# The prompt ends and the answer begins with a line end. A token may join both.
LINE_ENDS = (
    LOOP + "{% if m.role == 'assistant' %}<think>\n\n</think>\n\n{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)
# These uses of values cannot be traced, but they rarely change the text.
OPEN = {
    "cut": LOOP + "{{ m.content[:1000] }}<|im_end|>\n{% endfor %}" + PROMPT,
    "by length": LOOP
    + "{% if m.content | length < 30 %}{{ m.content }}{% else %}(long){% endif %}<|im_end|>\n{% endfor %}"
    + PROMPT,
    "lower": LOOP + "{{ m.content | trim | lower }}<|im_end|>\n{% endfor %}" + PROMPT,
    # Also removes the character that breaks control strings.
    "ascii": LOOP + "{{ m.content.encode('ascii', 'ignore').decode() }}<|im_end|>\n{% endfor %}" + PROMPT,
    "cut, with reasoning in the last turn": LOOP
    + "{% if m.reasoning_content and loop.last %}<think>{{ m.reasoning_content[:1000] }}</think>{% endif %}"
    "{{ m.content[:1000] }}<|im_end|>\n{% endfor %}" + PROMPT,
}
TEMPLATES = (
    MODERN
    | OPEN
    | {
        "chatml": CHATML_JINJA,
        "marked": CHATML_MARKED,
        "llama2": LLAMA2,
        "llama3": LLAMA3,
        "inline": INLINE,
        "macro": MACRO,
        "tools": TOOLS,
        "joined": JOINED,
        "calls if null": CALLS_IF_NULL,
        "text arguments": TEXT_ARGUMENTS,
        "no calls": NO_CALLS,
        "everything as JSON": AS_JSON,
        "NUL": LOOP + "{{ '\\0' }}{{ m.content }}<|im_end|>\n{% endfor %}" + PROMPT,
        "items": ITEMS,
        "fields and text arguments": FIELDS + TEXT_ARGUMENTS,
        "line ends meet": LINE_ENDS,
        "no end tokens": WITHOUT_ENDS,
        "stripped on the left": LOOP + "{{ m.content.lstrip() }}<|im_end|>\n{% endfor %}" + PROMPT,
        "escaped": LOOP + "{{ 'a' | safe + m.content }}<|im_end|>\n{% endfor %}" + PROMPT,
    }
)


@contextmanager
def rendering_all() -> Iterator[None]:
    nothing = {"fill": lambda *_: None, "fill_values": lambda *_: None}
    with mock.patch.multiple(Skeleton, **nothing):
        yield


def written(*contents: str) -> list[dict[str, Any]]:
    roles = ("user", "assistant")
    return [{"role": roles[number % 2], "content": content} for number, content in enumerate(contents)]


@lru_cache(2)  # for the examples of one test
def template_of(name: str, turns: Any = "auto") -> JinjaTemplate:
    return JinjaTemplate("test.jinja", TEMPLATES[name], open_kind(KIND), "assistant", "2026-01-01", turns)


ODD = st.sampled_from(["</think>", "<think>a</think>b", "secret", "\nb", " b ", "\0", "b\n\n", "<think>"])
CONTENT = st.one_of(ordinary(KIND), hostile(KIND), ODD)


@pytest.mark.slow
@pytest.mark.parametrize("name", TEMPLATES)
@FEW
@given(contents=st.lists(CONTENT.map(lambda text: "Q" + text) | CONTENT, min_size=2, max_size=4))
@example(contents=["Q", "secret"])
@example(contents=["Q", "a</think>b", "Q", "\nb"])
def test_filled_conversations_are_what_is_rendered(name: str, contents: list[str]) -> None:
    encoder, template = open_kind(KIND), template_of(name)
    record = {"messages": written(*contents)}
    filled, first = tokenize([record], encoder, template)
    with rendering_all():
        rendered, second = tokenize([record], encoder, template)
    assert first["rejects"] == second["rejects"]
    assert [row.ids.tolist() for row in filled] == [row.ids.tolist() for row in rendered]
    assert [row.trained.tolist() for row in filled] == [row.trained.tolist() for row in rendered]


def texts_and_values(text: st.SearchStrategy[str]) -> tuple[st.SearchStrategy[str], st.SearchStrategy[dict[str, Any]]]:
    """Return a strategy of texts, and one of arguments that hold them."""
    return text, st.dictionaries(text, st.one_of(text, st.integers(), st.lists(text, max_size=2)), max_size=2)


# Prepared once, which takes as long as many draws.
SHORT = st.sampled_from(["yes", "no", "2+2?", "é", "It is 4."])
UNUSUAL = st.sampled_from(
    ["</think>", "<think>a</think>b", "secret", "\nb", " b ", "b\n\n", 'é\u2028"\\', "<|im_end|>"]
)
CLEAN, MIXED = texts_and_values(SHORT), texts_and_values(st.one_of(SHORT, SHORT, SHORT, UNUSUAL))


@st.composite
def modern(draw: st.DrawFn) -> dict[str, Any]:
    """Draw a conversation with reasoning, calls, results, and tools.

    Half of the conversations contain only short words.
    """
    flag = st.booleans()
    text, value = CLEAN if draw(flag) else MIXED
    messages: list[dict[str, Any]] = []
    if draw(flag):
        messages.append({"role": "system", "content": draw(text)})
    for _ in range(draw(st.integers(1, 3))):
        messages.append({"role": "user", "content": draw(text)} | ({"name": draw(text)} if draw(flag) else {}))
        thought = draw(st.sampled_from([None, None, "reasoning_content", "inline"]))
        if draw(flag):
            calls = []
            for number in range(draw(st.integers(1, 2))):
                arguments: Any = draw(value)
                if draw(flag):
                    arguments = json.dumps(arguments)
                function = {"name": draw(text), "arguments": arguments}
                calls.append({"function": function} | ({"id": f"id{number}"} if draw(flag) else {}))
            messages.append(
                {"role": "assistant", "content": draw(st.sampled_from(["", "Let me see."])), "tool_calls": calls}
            )
            messages += [{"role": "tool", "content": draw(text)} for _ in calls]
        answer = {"role": "assistant", "content": draw(text)}
        if thought == "inline":
            answer["content"] = f"<think>\n{draw(st.just('') | text)}\n</think>\n\n{answer['content']}"
        elif thought:
            answer[thought] = draw(text)
        messages.append(answer)
    if draw(st.integers(0, 3)) == 0:
        for message in messages:
            message["train"] = draw(st.sampled_from([True, None, False]))
    tools = [{"type": "function", "function": {"name": draw(text), "parameters": draw(value)}} for _ in range(2)]
    return {"messages": messages} | ({"tools": tools} if draw(flag) else {})


@pytest.mark.slow
@pytest.mark.parametrize("name", TEMPLATES)
@settings(FEW, max_examples=examples(20))
@given(turns=st.sampled_from(["auto", "apart"]), record=modern())
def test_modern_conversations_are_what_is_rendered(name: str, turns: Any, record: dict[str, Any]) -> None:
    compare_with_rendered(record, template_of(name, turns))


def compare_with_rendered(record: dict[str, Any], template: JinjaTemplate) -> None:
    """Compare the rows and receipt of a filled-in conversation with a rendered one."""
    results = []
    for rendered in (False, True):
        with rendering_all() if rendered else nullcontext():
            try:
                # If arguments are read one by one, the second record is filled in. If tools are, the third record is.
                rows, receipt = tokenize([record] * 3, open_kind(KIND), template)
                results.append(([(row.ids.tolist(), row.trained.tolist()) for row in rows], receipt))
            except DataError as error:
                results.append(([], {"error": str(error)}))
    assert results[0] == results[1]


CALL = {"function": {"name": "f", "arguments": {"a": "é"}}, "id": "c1"}
RESULT = {"role": "tool", "content": "r", "tool_call_id": "c1"}
USED = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "", "tool_calls": [CALL]}, RESULT]
THOUGHT = {"role": "assistant", "content": "b", "reasoning_content": "t"}


def rendered(samples: mock.Mock) -> int:
    """Return the number of conversations that a template rendered."""
    return sum(len(call.args[0]) for call in samples.call_args_list)


@pytest.mark.parametrize(
    ("name", "messages", "tools"),
    [
        ("tools", [*USED, *written("b")], [{"type": "function", "function": {"name": "f"}}]),
        ("items", [*USED, *written("b")], [{"type": "function", "function": {"name": "f", "parameters": {"a": 1}}}]),
        ("text arguments", USED, None),
        ("calls if null", USED, None),
        ("reasoning stripped from history", [*written("a"), THOUGHT], None),
        ("reasoning stripped from history", [*written("a"), THOUGHT, *written("c"), THOUGHT], None),
        ("reasoning stripped from history", written("a", "<think>\nt\n</think>\n\nb", "c", "d"), None),
        ("empty block in the last turn", written("a", "b", "c", "d"), None),
        ("line ends meet", written("a", "b", "c", "d"), None),
        ("chatml", written("a", "<think>\nt\n</think>\n\nb"), None),
        ("everything as JSON", [USED[0], THOUGHT], [{"type": "function", "function": {"name": "é"}}]),
    ],
)
def test_modern_conversations_are_filled(name: str, messages: list[Any], tools: Any) -> None:
    """Modern conversations are filled in.

    Otherwise the tests above would compare renderings with themselves.
    """
    template = JinjaTemplate("test.jinja", TEMPLATES[name], open_kind(KIND), "assistant", "2026-01-01")
    record = {"messages": messages} | ({"tools": tools} if tools else {})
    with mock.patch.object(template, "all_samples", side_effect=template.all_samples) as samples:
        rows, _ = tokenize([record] * 3, open_kind(KIND), template)
    assert rows
    assert rendered(samples) == (3 if name == "items" else 0)


def test_ordinary_conversations_are_filled() -> None:
    """Ordinary conversations are filled in.

    Otherwise the test above would compare renderings with themselves.
    """
    for name in ("chatml", "llama3", "marked", "macro", "default system message", "reasoning stripped from history"):
        template = JinjaTemplate("test.jinja", TEMPLATES[name], open_kind(KIND), "assistant", "2026-01-01")
        with mock.patch.object(template, "all_samples", side_effect=template.all_samples) as samples:
            rows, _ = tokenize([{"messages": written("a", "b", "c", "d")}], open_kind(KIND), template)
        assert (len(rows), rendered(samples)) == (1, 0), name


@pytest.mark.parametrize("turn", [0, 1])
@pytest.mark.parametrize(
    "odd", ["Q" * 2000, "<|IM_END|>", " D ", "<|im_end|>", "<think>t</think>D", "\0", "im_end|>", "é"]
)
@pytest.mark.parametrize("name", OPEN)
def test_contents_of_templates_that_cannot_be_traced_are_rendered(name: str, odd: str, turn: int) -> None:
    messages = written("What is 2+2?", "It is 4.")
    messages[turn]["content"] = odd
    compare_with_rendered({"messages": messages}, template_of(name))


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("m.content", [[], [], [], [], []]),
        ("m.content | trim", [[], [], [], ["strip"], []]),
        ("m.content ~ 'a' + m.content", [[], [], [], [], []]),
        ("m.content if 'x' in m.content else m.content", [["x"], [], [], [], []]),
        ("m.content.split('x')[-1].lstrip('\n')", [["x"], ["\n"], [], [], []]),
        ("m.content.replace('x', 'y') if m.content.startswith('z')", [["z"], [], [], [], []]),
        ("m.content if m.content == 'x'", [["x"], [], [], [], []]),
        ("m.content | length", None),
        ("'a' if m.content | length > 0 and m.content | count != 0", [[], [], [], [], []]),
        ("'a' if m.content | length > 1", None),
        ("{'a': m.content | length} | tojson", None),
        ("'a' if m.content is iterable", [[], [], [], [], []]),
        ("m.content | upper", None),
        ("m.content[0]", None),
        ("'%s' % m.content", None),
        ("(m.content ~ 'a') if 'x' in (m.content ~ 'a')", [["x"], [], [], [], []]),
        ("'b' if 'a' in (m.content ~ 'a')", [[], [], [], [], []]),
        ("'b' if 'xa' in (m.content ~ 'a')", None),
        ("'b' if 'ax' in ('a' ~ m.content)", None),
        ("(m.content ~ 'axb').split('x')[-1]", [["x"], [], [], [], []]),
        ("(m.content ~ 'axb').split('x', 1)[-1]", None),
        ("(m.content ~ 'bxa').split('xab')[-1]", None),
        ("('bxa' ~ m.content).split('xab')[-1]", None),
        ("m.content | tojson", [[], [], [], [], [[False, None, None, False]]]),
        ("m | tojson(sort_keys=true)", [[], [], [], [], [[False, None, None, True]]]),
        ("m | tojson(indent=2)", None),
        ("(m.content ~ 'a') | tojson", None),
        ("m.content | urlencode", None),
        ("m.content | safe", [[], [], [], [], []]),
        ("'a' + m.content | safe", None),  # the template would escape a
        ("m.content | safe + 'a'", None),
        ("('a' | safe) + m.content", None),
        ("m.content + ('a' | safe)", None),
        ("('%s' | safe) % m.content", None),
        ("('a' | safe).join([m.content])", None),
        ("m.content.encode()", None),
    ],
)
def test_a_trace_knows_what_was_done(expression: str, expected: list[list[str]] | None) -> None:
    source = "{% for m in messages %}{{ " + expression + " }}{% endfor %}"
    environment = chat_environment(datetime(2026, 1, 1))
    prepare_tracing(environment)
    trace = Trace()
    ChatTemplate(environment, source, {}).render(traced([{"content": "\0" + "0\0"}], trace, True), None, False)
    assert (trace.result() if can_be_traced(environment.parse(source)) else None) == expected


def test_a_blank_block_of_reasoning_is_rendered() -> None:
    """An empty block of reasoning is rendered, because templates may test for it."""
    template = JinjaTemplate("test.jinja", AS_JSON, open_kind(KIND), "assistant", "2026-01-01")
    compare_with_rendered({"messages": written("a", "<think>\n\n</think>\n\nb")}, template)


@pytest.mark.parametrize("answer", [" b ", "\tb", "\n\nb"])
def test_an_answer_after_opened_reasoning_is_stripped_in_each_way(answer: str) -> None:
    """An answer after an opened block of reasoning equals its rendering.

    The prompt opens reasoning that the turn does not have, so the end of the block and two line ends come before the
    answer.
    """
    source = (
        LOOP + "{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n"
    )
    template = JinjaTemplate("test.jinja", source + "{% endif %}", open_kind(KIND), "assistant", "2026-01-01")
    compare_with_rendered({"messages": written("What is 2+2?", answer)}, template)


@pytest.mark.parametrize("arguments", [{"a": 1}, '{ "a": 1}', "{ }", {}])
def test_arguments_that_are_written_as_text_stay_as_they_are(arguments: Any) -> None:
    template = JinjaTemplate(
        "test.jinja", TEMPLATES["fields and text arguments"], open_kind(KIND), "assistant", "2026-01-01"
    )
    call = {"function": {"name": "f", "arguments": arguments}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    messages = [*written("a"), {"role": "assistant", "tool_calls": [call]}]
    compare_with_rendered({"messages": messages, "tools": tools}, template)
