"""minijinja writes the texts of Jinja2, or leaves the conversation to Jinja2."""

from __future__ import annotations

import json
import re
import zlib
from datetime import datetime
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from support.profiles import examples
from support.templates.jinja_sources import (
    ALTERNATING,
    CHATML_MARKED,
    DATED,
    JOINED,
    LLAMA2,
    LLAMA3,
    LLAMA3_MARKED,
    TOOLS,
)
from support.templates.modern_templates import (
    CALLS_IF_NULL,
    CONTINUED,
    INLINE,
    INTRODUCED,
    MODERN,
    PARTS,
    SELECTED_PARTS,
    TEXT_ARGUMENTS,
)

from packcorpus.tasks.core.errors import DataError, Reject
from packcorpus.tasks.templates.jinja import renderer
from packcorpus.tasks.templates.jinja.engines import COMPARED, TRIALS, Engines, FastTemplate, Unsure, is_sure
from packcorpus.tasks.templates.jinja.renderer import Renderer
from packcorpus.tasks.templates.jinja.rendering import Job, Rendering

pytest.importorskip("transformers", reason="transformers renders chat templates and is not installed")

TODAY = datetime(2026, 1, 1)
CONSTANTS = {"bos_token": "<s>", "eos_token": "</s>"}
ENDS = r"<\|im_end\|>|<\|eot_id\|>|</s>"
SAY = "{% for m in messages %}{{ m.content }}\n{% endfor %}"
SOURCES = [
    ALTERNATING, CHATML_MARKED, DATED, JOINED, LLAMA2, LLAMA3, LLAMA3_MARKED, TOOLS, CALLS_IF_NULL, CONTINUED, INLINE,
    INTRODUCED, PARTS, SELECTED_PARTS, TEXT_ARGUMENTS, *MODERN.values(),
]  # fmt: skip


def open_engines(source: str) -> Engines:
    return Engines(Renderer("odd.jinja", source, CONSTANTS, TODAY, ENDS), source, CONSTANTS, TODAY, ENDS)


def as_json(messages: list[Any], tools: Any = None) -> str:
    return json.dumps([messages, tools], ensure_ascii=False, separators=(",", ":"))


def said(content: Any, answer: str = "b") -> list[Any]:
    return [{"role": "user", "content": content}, {"role": "assistant", "content": answer}]


def called(arguments: Any) -> list[Any]:
    call = {"id": "call00001", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return [*said("a"), {"role": "assistant", "content": "", "tool_calls": [call]}]


def job(messages: list[Any], engine: Any = "minijinja", tools: Any = None, marks: bool = False) -> Job:
    turns = [k for k, message in enumerate(messages) if message["role"] == "assistant"]
    return Job(messages, tools, marks, turns, "auto", "", engine)


def by_minijinja(engines: Engines, job: Job) -> Rendering | None:
    return engines._fast_rendering(job)


# -- equality ---------------------------------------------------------------------------------------------------------

UNUSUAL = st.one_of(
    st.text(max_size=8),
    st.sampled_from([
        "", " ", "\n", " b\n", "\x0b", "\x0c", "\x85", "\xa0", "\u200b", "\u2028", "\u3000a", "\ufeff", "\x7f", "ß",
        "ﬁ", "</think>", "<think>\nr\n</think>\n\ns", "<|im_end|>", "{{ x }}", "{% if %}", "{#", "'\"", "\\", "ΑΣ",
    ]),
)  # fmt: skip
VALUES = st.recursive(
    st.one_of(
        UNUSUAL,
        st.none(),
        st.booleans(),
        st.integers(-(2**63), 2**64 - 1),
        st.floats(allow_nan=False, allow_infinity=False),
    ),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(UNUSUAL, inner, max_size=3)),
    max_leaves=6,
)


@st.composite
def conversations(draw: st.DrawFn) -> tuple[list[Any], Any]:
    messages: list[Any] = [{"role": "system", "content": draw(UNUSUAL)}] if draw(st.booleans()) else []
    tools = None
    for _ in range(draw(st.integers(1, 2))):
        messages += said(draw(UNUSUAL), draw(UNUSUAL))
        if draw(st.booleans()):
            messages[-1]["reasoning_content"] = draw(UNUSUAL)
        if draw(st.booleans()):
            messages += called(draw(st.dictionaries(UNUSUAL, VALUES, max_size=3)))[2:]
            messages.append({"role": "tool", "name": draw(UNUSUAL), "content": draw(UNUSUAL)})
            tools = [{"type": "function", "function": {"name": "f", "description": draw(UNUSUAL), "a": draw(VALUES)}}]
    return messages, tools


@pytest.mark.parametrize("source", SOURCES)
def test_both_engines_write_the_same(source: str) -> None:
    engines = open_engines(source)

    @settings(max_examples=examples(25), deadline=None, suppress_health_check=list(HealthCheck))
    @given(conversations())
    @example((called({"a": 0.25, "b": [None, True, "é"], "ß": 1, "ssa": 2}), None))
    def same(conversation: tuple[list[Any], Any]) -> None:
        messages, tools = conversation
        if is_sure(as_json(messages, tools)):
            asked = job(messages, tools=tools, marks="generation" in source)
            found = by_minijinja(engines, asked)
            if found is not None:
                assert found == engines.renderer.render(asked)

    same()
    assert by_minijinja(engines, job(said("a"))) is not None or source in (SELECTED_PARTS, PARTS, JOINED)


@pytest.mark.parametrize(
    "value",
    [1000000000000000.2, 0.30000000000000004, 1.0, -0.0, 1e-7, 1e22, -1.5e300],
)
def test_floats_that_python_writes_in_another_way_go_to_jinja2(value: float) -> None:
    engines = open_engines(SAY)
    for written in ({"a": value}, {"a": [0, value]}):
        assert engines.engine_for(as_json(called(written))) == "jinja2"
    assert engines.engine_for(as_json(called({"a": 12345.678}))) != "jinja2"


@pytest.mark.parametrize("text", ["\x1ca", "a\x1d", "\x1e", "\x1f", "\u019b", "\u0264", "\ufdd0", "\ufdd1", None])
def test_texts_in_which_the_engines_differ_go_to_jinja2(text: Any) -> None:
    messages = said(text)
    written = as_json(messages)
    assert open_engines(SAY).engine_for(written) == "jinja2"
    assert open_engines(SAY).engine_for(as_json(said("\x1b\xa0"))) != "jinja2"


def test_what_python_escapes_in_lists_goes_to_jinja2() -> None:
    engines = open_engines("{{ messages[-1].tool_calls }}" + SAY)
    for text in ("\xa0", "\u200b", "\U0001f468\u200d"):
        assert engines.engine_for(as_json(called({"a": text}))) == "jinja2"
        assert engines.engine_for(as_json(said(text), [{"a": {}}])) == "jinja2"
        assert engines.engine_for(as_json(said(text))) != "jinja2"
    # A template that writes a list of contents is found by the trials.
    assert open_engines("{{ [messages[0].content] }}").engine_for(as_json(said("a"))) == "jinja2"


def test_dictsort_orders_like_python() -> None:
    source = "{% for c in messages[-1].tool_calls %}{{ c.function.arguments | dictsort | tojson }}{% endfor %}" + SAY
    engines = open_engines(source)
    for keys in (["ß", "t", "ssa"], ["ﬁ", "long"], ["B", "a", "é"]):
        asked = job(called(dict.fromkeys(keys, 1)))
        found = by_minijinja(engines, asked)
        assert found is not None
        assert found == engines.renderer.render(asked)


@pytest.mark.parametrize(
    "expression",
    [
        "m.content.title()", "m.content | title", "m.content.splitlines()", "m.content.isdigit()", "m.content | e",
        "m.content | list | sort", "m.content | indent", "m.content | striptags", "m.content | urlencode",
        "m.content is upper", "(m.content | length) is odd", "m.content | pprint",
    ],
)  # fmt: skip
def test_constructs_in_which_the_engines_differ_go_to_jinja2(expression: str) -> None:
    engines = open_engines("{% for m in messages %}{{ " + expression + " }}{% endfor %}")
    assert engines._fast is None or by_minijinja(engines, job(said("it's\x0bß"))) is None
    assert engines.render(job(said("it's\x0bß"))) == engines.renderer.render(job(said("it's\x0bß")))


# -- marks ------------------------------------------------------------------------------------------------------------

MARKED = [
    "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}\n{% endfor %}",
    "\n{% for m in messages %}a {%- generation -%} {{ m.content }} {%- endgeneration -%} b{% endfor %}",
    "\n\n {% generation %}\n  a\n {% endgeneration %}\nb{{ messages[0].content }}",
    "{% set x = 1 %}{% generation %}{% set x = 2 %}{{ x }}{% endgeneration %}{{ x }}",
    "{% for m in messages %}{% set y = m.content %}{% generation %}{{ y }}{{ loop.index }}{% endgeneration %}"
    "{% endfor %}",
    "{% generation %}{% endgeneration %}{% if tools %}{% generation %}a{% endgeneration %}{% endif %}z",
    "{%+ generation %}a{%- endgeneration +%}\n {{ messages[0].content }}",
]


@pytest.mark.parametrize("source", MARKED)
def test_both_engines_mark_the_same_text(source: str) -> None:
    engines = open_engines(source)
    for messages in (said("é\n", " b "), said("\n")):
        asked = Job(messages, None, True, [], "others", "", "minijinja")
        found = by_minijinja(engines, asked)
        assert found is not None
        assert found == engines.renderer.render(asked)
        assert found.marks


# -- hostile templates ------------------------------------------------------------------------------------------------

ONLY_HOSTILE = "{% if messages[0].content == 'no' %}HOSTILE{% endif %}" + SAY
HOSTILE = [
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{% set n = namespace(s='a') %}{% for i in range(60) %}{% set n.s = n.s ~ n.s %}{% endfor %}{{ n.s }}",
    "{{ 'a' * 10**9 }}",
    "{% macro f(x) %}{{ f(x) }}{{ f(x) }}{% endmacro %}{{ f(1) }}",
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "{{ range(10**9) | list }}",
    "{{ range(10**9) | join('aaaa') }}",
]


@pytest.mark.parametrize("hostile", HOSTILE)
def test_a_hostile_template_ends_and_gets_the_error_of_the_judge(hostile: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(renderer, "SECONDS", 1)
    engines = open_engines(ONLY_HOSTILE.replace("HOSTILE", hostile))
    assert by_minijinja(engines, job(said("a"))) is not None
    assert by_minijinja(engines, job(said("no"))) is None
    with pytest.raises((DataError, Reject)) as expected:
        engines.renderer.render(job(said("no")))
    with pytest.raises(type(expected.value), match=re.escape(str(expected.value))):
        engines.render(job(said("no")))


@pytest.mark.parametrize(
    "private",
    ["{{ ''.__class__ }}", "{{ messages[0]['_a'] }}", "{{ messages | map(attribute='a') | attr('_a') }}", "{{ x._y }}"],
)
def test_private_attributes_are_not_read_by_minijinja(private: str) -> None:
    with pytest.raises(Unsure):
        FastTemplate("{% if messages[0].content == 'no' %}" + private + "{% endif %}" + SAY, {}, TODAY)


def test_what_minijinja_cannot_compile_is_rendered_by_jinja2() -> None:
    source = "{% print messages[0].role %}" + SAY
    with pytest.raises(Unsure):
        FastTemplate(source, {}, TODAY)
    engines = open_engines(source)
    assert engines.engine_for(as_json(said("a"))) == "jinja2"
    assert engines.render(job(said("a"))) == engines.renderer.render(job(said("a")))


def test_what_minijinja_cannot_render_is_rendered_by_jinja2() -> None:
    source = "{% set n = namespace(v=1) %}{% generation %}{% set n.v = 2 %}{% endgeneration %}{{ n.v }}" + SAY
    engines = open_engines(source)
    assert by_minijinja(engines, job(said("a"))) is None
    assert engines.render(job(said("a"))).text == "2a\nb\n"


# -- the judge --------------------------------------------------------------------------------------------------------


def test_the_conversation_alone_decides_what_is_compared() -> None:
    one, other = open_engines(SAY), open_engines(SAY + "a")
    written = [as_json(said(str(number))) for number in range(3000)]
    found = [one.engine_for(text) for text in written]
    assert found == [other.engine_for(text) for text in reversed(written)][::-1]
    compared = [text for text, engine in zip(written, found, strict=True) if engine == "both"]
    assert compared == [text for text in written if zlib.crc32(text.encode()) % COMPARED == 0]
    assert 5 < len(compared) < 100


def test_if_the_engines_differ_jinja2_renders_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    engines = open_engines(SAY)
    right = FastTemplate._rendered

    def wrong(self: FastTemplate, messages: list[Any], tools: Any, prompt: bool) -> Any:
        text, marks = right(self, messages, tools, prompt)
        return text.replace("special", "wrong"), marks

    monkeypatch.setattr(FastTemplate, "_rendered", wrong)
    assert engines.render(job(said("special"))).text == "wrong\nb\n"  # not compared
    assert engines.render(job(said("usual"), "both")).text == "usual\nb\n"
    assert engines.differs is None
    found = engines.render_all([job(said("a")), job(said("special"), "both"), job(said("c"))])
    assert [each.text for each in found if isinstance(each, Rendering)] == ["a\nb\n", "special\nb\n", "c\nb\n"]
    assert engines.differs is not None
    assert "wrong" in engines.differs
    assert "special" in engines.differs
    assert engines.engine_for(as_json(said("a"))) == "both"  # by Jinja2 alone, with the prompt of each turn
    assert engines.render(job(said("special"))).text == "special\nb\n"


def test_a_template_whose_trials_differ_is_rendered_by_jinja2(monkeypatch: pytest.MonkeyPatch) -> None:
    right = FastTemplate._rendered
    monkeypatch.setattr(FastTemplate, "_rendered", lambda *given: (right(*given)[0] + "!", []))
    engines = open_engines(SAY)
    assert engines.engine_for(as_json(said("a"))) == "jinja2"
    assert engines.differs is None
    assert len(TRIALS) == 12
