"""A remembered loop writes and sets the same values as an executed loop."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.profiles import examples

from tasks.templates.jinja.environment import ChatTemplate, chat_environment
from tasks.templates.jinja.memo import blocks
from tasks.templates.jinja.memo.blocks import Block, Messages

CALLS = [{"function": {"name": "f", "arguments": {"a": 1, "b": ["x"]}}}, {"function": {"name": "g", "arguments": {}}}]
MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "s"},
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": "", "tool_calls": CALLS},
    {"role": "tool", "content": "0.0", "x": 0.0},
    {"role": "tool", "content": "-0.0", "x": -0.0},
    {"role": "assistant", "content": "b", "x": 1},
    {"role": "user", "content": "a", "x": True},
    {"role": "assistant", "content": "b"},
]
TOOLS = [{"name": "f", "parameters": {"a": {"type": "string"}}}, {"name": "g"}]

# Values that remembered loops may read, values that prevent remembering, and names that are sometimes other variables.
KNOWN = [
    *("m.role", "m.content", "m['content']", "m.tool_calls", "m.x", "m.nothing", "ns.a", "ns.b", "ns.nothing"),
    *(
        "tools | tojson",
        "tools[0].name",
        "option",
        "undefined_name",
        "'x'",
        "1",
        "-0.0",
        "true",
        "f(m)",
        "f(m.content)",
    ),
    *("g(m)", "h()", "add_generation_prompt", "part", "a", "other.a"),
]
OF_LOOPS = [
    *("loop.first", "loop.last", "loop.index0", "(loop.previtem or m).role", "(loop.nextitem or m).content"),
    *("loop.length", "loop.revindex", "messages[loop.index0 - 1].role"),
]
OTHERS = ["messages | length", "messages", "ns", "items", "f", "other", "m", "loop"]


def expressions(names: list[str], joined: str = "({} ~ {})") -> st.SearchStrategy[str]:
    one = st.sampled_from(names * 4 + OTHERS)
    return one | st.builds(joined.format, one, one)


LISTS = st.sampled_from(
    [
        *("messages", "messages[1:]", "messages[::-1]", "tools", "m.tool_calls", "[1, 2]", "range(2)", "[ns, ns]"),
        *("messages | selectattr('x')", "tools | list", "m.content", "items", "[m, m]", "tools[0].parameters"),
    ]
)
EXPRESSIONS = expressions(KNOWN + OF_LOOPS)
# In loops, a variable that is joined with itself would double until memory is full.
SHORT = expressions(KNOWN + OF_LOOPS, "({} ~ {})[:20]")
CONDITIONS = EXPRESSIONS | st.sampled_from(["m.role == 'user'", "not ns.a", "loop.first or loop.previtem.x"])


def statements(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    body = st.lists(inner, min_size=1, max_size=3).map("".join)
    return st.one_of(
        st.builds(LOOP, st.sampled_from(["m", "part", "part", "a", "ns"]), LISTS, body),
        st.builds("{{% for m in messages if {} %}}{}{{% else %}}{}{{% endfor %}}".format, CONDITIONS, body, body),
        st.builds("{{% if {} %}}{}{{% elif {} %}}{}{{% else %}}{}{{% endif %}}".format,
                  CONDITIONS, body, CONDITIONS, body, body),
    )  # fmt: skip


LOOP = "{{% for {} in {} %}}{}{{% endfor %}}".format
SETS = "{{% set {} = {} %}}".format
SIMPLE = st.one_of(
    st.builds("{{{{ {} }}}}".format, EXPRESSIONS),
    st.builds(SETS, st.sampled_from(["part", "a", "a", "m", "items", "tools"]), SHORT),
    st.builds(SETS, st.sampled_from(["ns.a", "ns.b", "other.a"]), SHORT),
    st.builds(
        "{{% if loop.index0 == 2 %}}{}{{% endif %}}".format, st.sampled_from(["{% break %}", "{% continue %}", "-"])
    ),
)
OUTSIDE = st.builds("{{{{ {} }}}}".format, expressions(["ns.a", "ns.b", "a", "tools | tojson", "part"])) | st.just("")
START = "{% set ns = namespace(a=0, b='') %}{% set items = messages[1:] %}"
MACROS = (
    "{% macro f(x) %}({{ x.role }}{{ x | string }}){% endmacro %}"
    "{% macro g(x) %}{% set ns.a = ns.a ~ x.role %}[{{ ns.b }}]{% endmacro %}"
    "{% macro h() %}{{ g(1) }}{% endmacro %}"
)
BODIES = st.lists(st.recursive(SIMPLE, statements, max_leaves=6), min_size=1, max_size=4).map("".join)
LOOPS = st.builds(LOOP, st.just("m"), st.sampled_from(["messages", "items", "messages[::-1]"]), BODIES)
SOURCES = st.builds(
    lambda other, before, loop, after: START + other + MACROS + before + loop + after,
    st.sampled_from(["{% set other = ns %}", "{% set other = namespace(a=1) %}"]),
    OUTSIDE,
    st.lists(LOOPS, min_size=1, max_size=2).map("".join),
    OUTSIDE,
)


def template_of(source: str, remembers: bool) -> ChatTemplate:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks, "LEAST", 0)
        return ChatTemplate(chat_environment(datetime(2026, 1, 1)), source, {"option": "o"}, remembers)


def written(template: ChatTemplate, count: int, prompt: bool) -> str:
    try:
        return template.render(MESSAGES[:count], TOOLS, prompt)[0]
    except Exception as error:  # a template can raise any exception
        return f"{type(error).__name__}: {error}"


LAST = "{{ m.role }}{{ loop.last }}{{ (loop.nextitem or m).role }}{% if m.x %}{% set ns.a = m.x %}{% endif %}{{ ns.a }}"
NESTED = LOOP("part", "m.tool_calls", "{{ part.function.name }}{{ loop.index }}{% set ns.b = ns.b ~ loop.index %}")


@example(START + LOOP("m", "messages", LAST) + "{{ ns.a }}", list(range(9)))
@example(START + LOOP("m", "messages", "{{ m.role }}{% set ns.a = ns.a ~ m.content %}"), [8, 2, 8])
@example(LOOP("m", "messages", "{{ tools }}") + "{% set tools = [] %}", [3])
@example(START + "{% set other = ns %}" + LOOP("m", "messages", "{% set ns.a = m.x %}{{ other.a }}"), [8, 3])
@example(START + LOOP("m", "items", NESTED + "{{ ns.b }}{{ loop.last }}"), [8, 3, 6])
@example(LOOP("m", "messages", "{{ m.x }}{{ loop }}"), [8, 4, 6])
@example(START + LOOP("ns", "tools", "{% set ns.b = ns.b ~ tools %}"), [8, 4])
@settings(max_examples=examples(24))
@given(source=SOURCES, counts=st.lists(st.integers(0, len(MESSAGES)), min_size=2, max_size=6))
def test_every_rendering_is_that_of_plain_jinja(source: str, counts: list[int]) -> None:
    try:
        plain = template_of(source, False)
    except Exception:  # for example a break outside of loops
        return
    remembering = template_of(source, True)
    for conversation in range(2):
        remembering.start(MESSAGES, TOOLS)
        for count in (len(MESSAGES), *counts):
            for prompt in (False, True):
                found = written(remembering, count, prompt)
                assert found == written(plain, count, prompt), (source, conversation, count, prompt)


REMEMBERED = [
    (LOOP("m", "messages", "{{ m.a }}"), Messages),
    (LOOP("m", "messages", "{{ loop.last }}{{ loop.nextitem }}{{ m.a }}"), Messages),
    (LOOP("tool", "tools", "{{ tool.a }}"), Block),
    (START + LOOP("m", "messages", "{% set ns.a = m.x %}"), Messages),
    (START + MACROS + LOOP("m", "messages", "{{ g(m) }}"), Messages),
    (START + "{% macro i() %}{{ items }}{% endmacro %}" + LOOP("m", "messages", "{{ i() }}"), None),
    (START + LOOP("m", "messages", "{{ ns }}"), Messages),  # its value is never known
    (LOOP("m", "messages", "{{ messages | length }}"), None),
    (LOOP("m", "messages", "{{ loop.length }}"), None),
    (LOOP("m", "messages", "{{ loop }}"), None),
    (LOOP("m", "messages", "{% if m.x %}{% break %}{% endif %}"), None),
    (LOOP("m", "messages", "{% generation %}{{ m.a }}{% endgeneration %}"), None),
    (LOOP("m", "messages", "{{ a }}{% set a = m %}"), None),
    ("{% for m in messages recursive %}{{ loop(m.a) }}{% endfor %}", None),
    ("{% for m in messages if m.x %}{{ m.a }}{% endfor %}", None),
    ("{% for m in messages %}{{ m.a }}{% else %}{{ a }}{% endfor %}", None),
]


@pytest.mark.parametrize(("source", "kind"), REMEMBERED, ids=range(len(REMEMBERED)))
def test_loops_are_remembered_if_nothing_else_matters(source: str, kind: type | None) -> None:
    template = template_of(source, True)
    found = template._template.environment.remembered  # type: ignore[attr-defined]
    assert [type(each) for each in found] == [kind] * (kind is not None)


def test_a_loop_is_executed_for_new_messages_only() -> None:
    template = template_of(START + LOOP("m", "messages", "{{ loop.last }}{{ (loop.nextitem or m).role }}"), True)
    [loop] = template._template.environment.remembered  # type: ignore[attr-defined]
    assert isinstance(loop, Messages)
    template.start(MESSAGES, TOOLS)
    template.render(MESSAGES, TOOLS, False)
    done = []
    plain = loop.run

    def run(items: Any, values: Any) -> Any:
        found = plain(items, values)
        done.append(found.done)
        return found

    loop.run = run  # type: ignore[method-assign]
    for count in range(len(MESSAGES) + 1):
        template.render(MESSAGES[:count], TOOLS, False)
    assert done == [0, 0, 1, 2, 3, 4, 5, 6, 7], "the last one does not know of a next one"
    changed = [*MESSAGES[:3], dict(MESSAGES[3]), *MESSAGES[4:]]
    template.render(changed, TOOLS, False)
    assert done[-1] == 0, "a message that is not of this conversation"
    template.start(MESSAGES, TOOLS)
    template.render(MESSAGES, TOOLS, False)
    assert done[-1] == 0, "another conversation"
