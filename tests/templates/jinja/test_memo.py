"""The text of a macro is remembered only if it depends on its arguments alone."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import pytest

from tasks.templates.jinja.environment import ChatTemplate, chat_environment
from tasks.templates.jinja.memo.memo import Memo

# Macros that depend only on their arguments and on constants. RENDERED has macros that depend on more.
REMEMBERED = [
    "{% macro f(x) %}{{ x.name }}{% endmacro %}",
    "{% macro f(x, y=1) %}{% for k in x %}{{ loop.index }}{{ k }}{{ y }}{% endfor %}{% endmacro %}",
    "{% macro f(x) %}{% set ns = namespace(a=0) %}{% set ns.a = x | length %}{{ ns.a }}{% endmacro %}",
    "{% macro f(x) %}{% if x %}{% set y = 1 %}{{ y }}{% endif %}{% endmacro %}{% set y = messages[0].name %}",
    "{% macro g(x) %}{{ x | tojson }}{% endmacro %}{% macro f(x) %}{{ g(x) }}{{ bos_token }}{% endmacro %}",
]
RENDERED = [
    "{% macro f(x) %}{{ messages[0].name }}{% endmacro %}",
    "{% set ns = namespace(a=messages[0].name) %}{% macro f(x) %}{{ ns.a }}{% endmacro %}",
    "{% set y = messages[0].name %}{% macro f(x) %}{% if not x %}{% set y = 1 %}{% endif %}{{ y }}{% endmacro %}",
    "{% set y = messages[0].name %}{% macro f(x) %}{{ y }}{% set y = 1 %}{% endmacro %}",
    "{% set y = messages[0].name %}{% macro f(x, z=y) %}{{ z }}{% endmacro %}",
    "{% set y = messages[0].name %}{% macro g(x) %}{{ y }}{% endmacro %}{% macro f(x) %}{{ g(x) }}{% endmacro %}",
    "{% macro f(x) %}{{ caller() if caller else '' }}{% endmacro %}{% call f(tools[0]) %}{{ messages }}{% endcall %}",
    "{% set bos_token = messages[0].name %}{% macro f(x) %}{{ bos_token }}{% endmacro %}",
    "{% set dict = messages[0].name %}{% macro f(x) %}{{ dict }}{% endmacro %}",
    "{% macro f(x) %}{{ messages[0].name }}{% endmacro %}{% macro f(x) %}{{ messages[0].name }}!{% endmacro %}",
    "{% macro f(x) %}{% for y in [messages] %}{{ y[0].name }}{% endfor %}{% endmacro %}",
]


def template_of(source: str) -> ChatTemplate:
    return ChatTemplate(chat_environment(datetime(2026, 1, 1)), source, {"bos_token": "<s>"})


@pytest.mark.parametrize("source", REMEMBERED + RENDERED)
def test_a_macro_is_remembered_if_nothing_else_matters(source: str) -> None:
    template = template_of(source + "{{ f(tools[0]) }}{{ f(tools[0]) }}{{ f(tools[1]) }}")
    assert ("f" in template._memo.macros) == (source in REMEMBERED)
    tools = [{"name": "a", "b": 1}, {"name": "c"}]
    conversations = [[{"name": "x"}], [{"name": "y"}]]
    alone = []
    for messages in conversations:
        template.start([], None)
        alone.append(template.render(messages, tools, False))
    template.start(conversations, tools)
    assert [template.render(messages, tools, False) for messages in conversations] == alone


def test_only_parts_of_the_conversation_and_plain_values_are_arguments() -> None:
    memo, calls, part = Memo(), [0], {"a": [1]}

    def write(*args: Any, **named: Any) -> str:
        calls[0] += 1
        return str((args, named))

    def written(*args: Any, **named: Any) -> int:
        before = calls[0]
        assert memo.of("w", write, args, named) == memo.of("w", write, args, named) == str((args, named))
        return calls[0] - before

    assert written(part) == 2, "there is no conversation"
    memo.start([part])
    assert written(part) == 1
    assert written(part["a"], 1) == 1
    assert written(part["a"], True) == 1, "1 and True are different"
    assert written(part["a"], b=1) == 1
    assert written({"a": [1]}) == 2, "a template has made it"
    assert written(part, object) == 2
    assert written(1, None) == 2, "nothing of a conversation"
    assert written(1, "a") == 1
    assert written("a", 0.0) == written("a", -0.0) == 1, "0.0 and -0.0 are different"
    memo.start([part])
    assert written(part) == 1, "another conversation"
