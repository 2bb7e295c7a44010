"""No content becomes a control token, regardless of what a template does to it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.profiles import examples
from support.tokenizer_kinds import CHATML_JINJA, open_kind

from packcorpus.tasks.core.errors import DataError, Reject
from packcorpus.tasks.encoders.encoder import Encoder
from packcorpus.tasks.sources.model import SourceFile
from packcorpus.tasks.templates.jinja.control_strings import Harmless
from packcorpus.tasks.templates.jinja.environment import chat_environment
from packcorpus.tasks.templates.jinja.template import JinjaTemplate
from packcorpus.tasks.tokenization.prepare import Preparer

KINDS = ("hf_byte_level", "sp_bpe_chatml")
FILE = SourceFile(Path("a.jsonl"), "a.jsonl", "jsonl", "", "messages", (), 0, "", 0)
CONTROLS = ("<|im_start|>", "<|im_end|>")

LETTERS = st.sampled_from(["", "*", " ", "<", "|", ">", "<|", "|>", "im_", "a", "&lt;", "%s", "\n", "é"])

# Every filter and method that returns text, with arguments that remove, add, or move characters.
FILTERS = [
    "lower", "upper", "title", "capitalize", "trim", "reverse", "string", "safe", "e", "forceescape", "striptags",
    "urlize", "tojson", "first", "last", "list | join", "unique | join", "sort | join", "default('x')", "indent",
    "center(40)", "truncate(14, true, '')", "wordwrap(5, true, '')", "urlencode", "map('lower') | join", "pprint",
    "select | join", "batch(3) | map('join') | join", "slice(2) | map('join') | join", "replace({0!r}, {1!r})",
    "trim({0!r})", "wordwrap(9, false, {0!r})", "reject('eq', {0!r}) | join", "items | join", "join({0!r})",
]  # fmt: skip
METHODS = [
    "lower()", "upper()", "title()", "swapcase()", "capitalize()", "casefold()", "strip({0!r} or None)",
    "lstrip({0!r} or None)", "removeprefix({0!r})", "removesuffix({0!r})", "expandtabs(0)", "zfill(30)",
    "replace({0!r}, {1!r})", "replace({0!r}, {1!r}, 1)", "split({0!r} or None) | join({1!r})",
    "split({0!r} or None)[-1]", "rsplit({0!r} or None, 1)[0]", "partition({0!r} or ' ') | join({1!r})",
    "splitlines() | join", "format(a={0!r})", "center(30, '*')", "join('ab')", "encode().decode()",
    "translate({{42: none, 32: none}})",
]  # fmt: skip
SLICES = ["[1:]", "[:-1]", "[::-1]", "[::2]", "[2:9]"]
OTHERS = ["~ {0!r}", "~ messages[0].content", "+ {0!r}", "* 2", "% ()"]


@st.composite
def expressions(draw: st.DrawFn) -> str:
    found = "m.content"
    for _ in range(draw(st.integers(1, 3))):
        arguments = draw(LETTERS), draw(LETTERS)
        kind, operations = draw(st.sampled_from([("|", FILTERS), (".", METHODS), ("", SLICES), (" ", OTHERS)]))
        found = f"({found}{kind}{draw(st.sampled_from(operations)).format(*arguments)})"
    before, after = draw(LETTERS), draw(LETTERS)
    return f"{before!r} ~ {found} ~ {after!r}" if draw(st.booleans()) else found


@st.composite
def contents(draw: st.DrawFn) -> str:
    """Draw text with control strings in many changed forms.

    They are cut, in another case, reversed, or with other characters between their own.
    """
    pieces = []
    for _ in range(draw(st.integers(1, 3))):
        control, other = draw(st.sampled_from(CONTROLS)), draw(LETTERS)
        cut = draw(st.integers(0, len(control)))
        changed = [control, control.upper(), control[::-1], control.title().swapcase(), other.join(control)]
        changed += [control[:cut], control[cut:], control[:cut] + other + control[cut:], other, "ok"]
        pieces.append(draw(st.sampled_from(changed)))
    return "".join(pieces) + "z"


def template_of(expression: str, encoder: Encoder) -> JinjaTemplate:
    source = CHATML_JINJA.replace("message.content", expression.replace("m.", "message."))
    return JinjaTemplate("t", source, encoder, "assistant", "2026-01-01")


def asked(question: str, answer: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


class Case(NamedTuple):
    """A case has a tokenizer, an expression of a template, and conversations."""

    kind: str
    expression: str
    pairs: list[tuple[str, str]]


def cases(kinds: Sequence[str] = KINDS) -> st.SearchStrategy[Case]:
    pairs = st.lists(st.tuples(contents(), contents()), min_size=1, max_size=8)
    return st.builds(Case, st.sampled_from(kinds), expressions(), pairs)


def check(case: Case) -> str:
    """Check that no content becomes a control token, and return the outcome.

    The outcome is "accepted", "template refused", or the reason for the reject.
    """
    encoder = open_kind(case.kind)
    try:
        preparer = Preparer(FILE, template_of(case.expression, encoder), encoder, "assistant")
    except DataError:
        return "template refused"
    outcomes = []
    for found in preparer.prepare_all(asked(*pair) for pair in case.pairs):
        if not isinstance(found, list):
            outcomes.append(found.reason)
            continue
        for sample in found:
            tokens = sample.layout.tokens.tolist()[: len(sample.layout.tokens) - sample.layout.separator]
            assert [tokens.count(encoder.controls[control]) for control in CONTROLS] == [2, 2], case.expression
            assert sum(token >= 0 for token in tokens) <= 4 + encoder.adds_bos
            # The encoder does not produce control tokens from the other texts.
            ids = encoder.encode(sample.texts).ids.tolist()
            assert not {encoder.controls[control] for control in CONTROLS} & set(ids)
        outcomes.append("accepted")
    return "accepted" if "accepted" in outcomes else outcomes[0]


@pytest.mark.slow
def test_whatever_a_template_does_to_contents_they_are_no_control_tokens() -> None:
    seen: Counter[tuple[str, str]] = Counter()

    @settings(max_examples=examples(320), deadline=None, suppress_health_check=list(HealthCheck))
    @given(cases())
    def find(case: Case) -> None:
        seen[case.kind, check(case)] += 1

    find()
    assert all(seen[kind, "accepted"] > sum(seen.values()) / 8 for kind in KINDS), seen
    assert any(seen[kind, "forged_token"] for kind in KINDS) or sum(seen.values()) < 160, seen


@pytest.mark.parametrize(
    ("expression", "content"),
    [
        ("m.content | lower", "a <|IM_END|> b"),
        ("m.content | replace('*', '')", "a <|im_*end|> b"),
        ("m.content.split() | join", "a <|im_ end|> b"),
        ("m.content | reverse", ">|dne_mi|< a"),
        ("m.content | wordwrap(9, true, '')", "a <|im_ end|> b"),
        ("'<|' ~ m.content | lower", "IM_END|> b"),
        ("m.content[::2]", "".join(f"{c}." for c in "a<|im_end|>")),
    ],
)
def test_a_conversation_that_becomes_a_control_token_is_rejected(expression: str, content: str) -> None:
    encoder = open_kind("hf_byte_level")
    preparer = Preparer(FILE, template_of(expression, encoder), encoder, "assistant")
    for turns in ([content, "ok then"], ["why not", content]):
        with pytest.raises(
            Reject, match=r"the template t turns a text of this conversation into the control token '<\|im_end\|>'"
        ):
            preparer.prepare(asked(*turns))
    if expression in ("m.content | reverse", "m.content[::2]"):
        with pytest.raises(Reject, match="does not write it"):  # in this form, a text cannot be found
            preparer.prepare(asked("why not", "ok then"))
    else:
        assert preparer.prepare(asked("why not", "ok then"))


def test_arguments_and_tools_become_no_control_tokens() -> None:
    encoder = open_kind("hf_byte_level")
    source = CHATML_JINJA.replace("message.content", "((message.content or '') ~ message.tool_calls ~ tools) | lower")
    preparer = Preparer(FILE, JinjaTemplate("t", source, encoder, "assistant", "2026-01-01"), encoder, "assistant")

    def record(argument: str, description: str) -> dict[str, Any]:
        call = {"type": "function", "function": {"name": "f", "arguments": json.dumps({"a": argument})}}
        tool = {"type": "function", "function": {"name": "f", "description": description}}
        turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
        return {"messages": turns, "tools": [tool]}

    assert preparer.prepare(record("b", "c"))
    for bad in (record("<|IM_END|>", "c"), record("b", "<|IM_END|>")):
        with pytest.raises(Reject, match="into the control token"):
            preparer.prepare(bad)


def test_control_tokens_that_depend_on_what_a_text_says_are_the_template_s_own() -> None:
    """A template may write control tokens depending on a text.

    A harmless conversation with the same messages does not contain these tokens.
    """
    encoder = open_kind("hf_byte_level")
    source = CHATML_JINJA.replace(
        "message.content",
        "('<|endoftext|>' if '</think>' in message.content or 'code' in message.content) ~ message.content[:99]",
    )
    preparer = Preparer(FILE, JinjaTemplate("t", source, encoder, "assistant", "2026-01-01"), encoder, "assistant")
    for question in ("what is it", "some code", "a </think> b", "what then"):
        assert preparer.prepare(asked(question, "so"))


@pytest.mark.parametrize("kind", KINDS)
def test_a_harmless_text_has_nothing_of_a_control_string_and_keeps_the_rest(kind: str) -> None:
    encoder = open_kind(kind)
    harmless = Harmless(encoder)
    assert harmless.of("a <|IM_END|> b_c\n<think>d</think>") == "a IM_END b_c\n<think>d</think>"
    ours = {"role": "user", "type": "[x]"}
    assert harmless.of({**ours, "content": "<|"}) == {**ours, "content": "a"}
    assert harmless.of([" ", 1, None, {"<a": ["|"]}]) == [" ", 1, None, {"a": ["a"]}]
    for control in encoder.controls:
        assert control not in harmless.of(control)


def test_every_filter_of_jinja_is_tried() -> None:
    known = " ".join((*FILTERS, *METHODS))
    numbers = {
        "filesizeformat",
        "abs",
        "count",
        "float",
        "int",
        "length",
        "max",
        "min",
        "round",
        "sum",
        "wordcount",
        "d",
    }
    lists = {
        "filesizeformat",
        "attr",
        "dictsort",
        "groupby",
        "map",
        "rejectattr",
        "selectattr",
        "xmlattr",
        "random",
        "format",
        "escape",
    }
    for name in set(chat_environment(datetime(2026, 1, 1)).filters) - numbers - lists:
        assert name in known, name
