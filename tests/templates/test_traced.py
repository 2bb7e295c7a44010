"""Contents are filled into the rendering of placeholders only if the template would write the same."""

from __future__ import annotations

from datetime import datetime
from typing import Any
from unittest import mock

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from support.profiles import examples
from support.templates.jinja_sources import CHATML_MARKED, LLAMA2, LLAMA3
from support.templates.modern_templates import INLINE, LOOP, MODERN, PROMPT
from support.tokenizer_kinds import CHATML_JINJA, hostile, open_kind, ordinary, tokenize

from tasks.templates.jinja_environment import ChatTemplate, chat_environment
from tasks.templates.jinja_template import JinjaTemplate
from tasks.templates.traced import Trace, can_be_traced, prepare_tracing, traced
from tasks.tokenization import prepare

KIND = "hf_byte_level"
FEW = settings(max_examples=examples(40), deadline=None, suppress_health_check=[HealthCheck.too_slow])
MACRO = (
    "{% macro written(c) %}{{ c | trim }}{% endmacro %}"
    + LOOP
    + "{% set text = written(m.content) %}{% if 'secret' in text %}(hidden){% else %}{{ text }}{% endif %}<|im_end|>\n"
    "{% endfor %}" + PROMPT
)
TEMPLATES = MODERN | {
    "chatml": CHATML_JINJA,
    "marked": CHATML_MARKED,
    "llama2": LLAMA2,
    "llama3": LLAMA3,
    "inline": INLINE,
    "macro": MACRO,
}


def written(*contents: str) -> list[dict[str, Any]]:
    roles = ("user", "assistant")
    return [{"role": roles[number % 2], "content": content} for number, content in enumerate(contents)]


@pytest.mark.parametrize("name", TEMPLATES)
def test_filled_conversations_are_what_is_rendered(name: str) -> None:
    encoder = open_kind(KIND)
    template = JinjaTemplate("test.jinja", TEMPLATES[name], encoder, "assistant", "2026-01-01")
    odd = st.sampled_from(["</think>", "<think>a</think>b", "secret", "\nb", " b ", "\0", "b\n\n", "<think>"])
    content = st.one_of(ordinary(KIND), hostile(KIND), odd)

    @FEW
    @given(st.lists(content.map(lambda text: "Q" + text) | content, min_size=2, max_size=4))
    @example(["Q", "secret"])
    @example(["Q", "a</think>b", "Q", "\nb"])
    def check(contents: list[str]) -> None:
        record = {"messages": written(*contents)}
        filled, first = tokenize([record], encoder, template)
        with mock.patch.object(prepare, "fill", return_value=None):
            rendered, second = tokenize([record], encoder, template)
        assert first["rejects"] == second["rejects"]
        assert [row.ids.tolist() for row in filled] == [row.ids.tolist() for row in rendered]
        assert [row.trained.tolist() for row in filled] == [row.trained.tolist() for row in rendered]

    check()


def test_ordinary_conversations_are_filled() -> None:
    """Else the test above would compare renderings with themselves."""
    for name in ("chatml", "llama3", "marked", "macro", "default system message", "reasoning stripped from history"):
        template = JinjaTemplate("test.jinja", TEMPLATES[name], open_kind(KIND), "assistant", "2026-01-01")
        with mock.patch.object(template, "samples", side_effect=AssertionError("rendered")):
            rows, _ = tokenize([{"messages": written("a", "b", "c", "d")}], open_kind(KIND), template)
        assert len(rows) == 1, name


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("m.content", [[], [], [], []]),
        ("m.content | trim", [[], [], [], ["strip"]]),
        ("m.content ~ 'a' + m.content", [[], [], [], []]),
        ("m.content if 'x' in m.content else m.content", [["x"], [], [], []]),
        ("m.content.split('x')[-1].lstrip('\n')", [["x"], ["\n"], [], []]),
        ("m.content.replace('x', 'y') if m.content.startswith('z')", [["z"], [], [], []]),
        ("m.content if m.content == 'x'", [["x"], [], [], []]),
        ("m.content | length", None),
        ("m.content | upper", None),
        ("m.content[0]", None),
        ("'%s' % m.content", None),
        ("(m.content ~ 'a') if 'x' in (m.content ~ 'a')", None),
        ("m.content | tojson", [[], [], [], []]),  # its placeholder is escaped, so that there is no frame
        ("m.content | urlencode", None),
        ("m.content.encode()", None),
    ],
)
def test_a_trace_knows_what_was_done(expression: str, expected: list[list[str]] | None) -> None:
    source = "{% for m in messages %}{{ " + expression + " }}{% endfor %}"
    environment = chat_environment(datetime(2026, 1, 1))
    prepare_tracing(environment)
    trace = Trace()
    ChatTemplate(environment, source, {}).render(traced([{"content": "\v\0" + "0\0\v"}], trace), None, False)
    assert (trace.result() if can_be_traced(environment, source) else None) == expected
