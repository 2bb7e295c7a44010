"""Composed conversations equal their renderings.

Placeholders and pieces are used only if the template would write the same text.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from functools import lru_cache
from multiprocessing.sharedctypes import RawValue
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from support.profiles import examples
from support.templates.modern_templates import LOOP, PROMPT
from support.tokenizer_kinds import open_kind, tokenize

from tasks.conversations.formats import read_record
from tasks.core.errors import DataError
from tasks.templates.jinja.composed import composer
from tasks.templates.jinja.composed.composer import Composer
from tasks.templates.jinja.composed.composition import Composition
from tasks.templates.jinja.composed.pieces import Writer
from tasks.templates.jinja.environment import chat_environment
from tasks.templates.jinja.memo import blocks
from tasks.templates.jinja.sandbox import lockstep
from tasks.templates.jinja.sandbox.requests import Pieces
from tasks.templates.jinja.splitter import Splitter
from tasks.templates.jinja.template import JinjaTemplate
from tasks.templates.placeholders import Reads
from tasks.templates.spans import Sample, trained_turns
from tasks.tokenization import frames
from tasks.tokenization.frames import Filling

KIND = "hf_byte_level"
START = "{% set ns = namespace(name='', any=false) %}"
END = "{{ m.content }}<|im_end|>\n{% endfor %}" + PROMPT
# A loop reads the arguments one by one. A loop and a macro read the tools one by one.
ARGUMENTS = (
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }}{% for k, v in c.function.arguments | items %}"
    "<{{ k }}>{{ v if v is string else v | tojson }}</{{ k }}>{% endfor %}</tool_call>{% endfor %}"
)
DECLARED = (
    "{% macro declare(tool) %} {{ tool.function.name }}{% for k, v in tool.function.parameters | dictsort %}"
    "<|eot_id|>{{ k }}: {{ v }}{% endfor %}\n{% endmacro %}"
    "{% for tool in tools or [] %}{{ declare(tool) | trim }};{% endfor %}"
)
TEMPLATES = {
    "arguments": LOOP + ARGUMENTS + END,
    "tools in a loop": (
        "{% for tool in tools or [] %}{{ tool.function.name }}({% for k, v in tool.function.parameters | items %}"
        "{{ k }}={{ v }},{% endfor %}){% endfor %}" + LOOP + ARGUMENTS + END
    ),
    "tools in a macro, control tokens between": DECLARED + LOOP + ARGUMENTS + END,
    "one macro for each": "{% macro all(tools) %}{% for t in tools %}{{ t.function }}{% endfor %}{% endmacro %}"
    "{{ all(tools or []) }}" + LOOP + ARGUMENTS + END,
    # Namespaces: a flag, a name that is set later, and names that only some calls set.
    "flag": START + LOOP + "{% set ns.any = false %}{% for c in m.tool_calls or [] %}{{ c.function.name }}"
    "{% for k in c.function.arguments %}{{ ', ' if ns.any }}{{ k }}{% set ns.any = true %}{% endfor %}{% endfor %}"
    "{{ 'some' if ns.any else 'none' }}" + END,
    "name": START + LOOP + "{% for c in m.tool_calls or [] %}{% for k in c.function.arguments %}"
    "{% set ns.name = k ~ '' %}{% endfor %}{% endfor %}[{{ ns.name }}]" + ARGUMENTS + END,
    "name of a call": START + LOOP + "{% for c in m.tool_calls or [] %}{% if c.function.arguments %}"
    "{% set ns.name = c.function.name %}{% endif %}{% endfor %}{{ ns.name }}" + ARGUMENTS + END,
    "name of long arguments": START
    + LOOP
    + "{% for c in m.tool_calls or [] %}{% if c.function.arguments | length > 1 %}"
    "{% set ns.name = c.function.name %}{% endif %}{% endfor %}{{ ns.name or 'short' }}" + ARGUMENTS + END,
    # These templates change texts, which could create control strings, strip them, or end them in a part of a control
    # string.
    "lower": LOOP
    + "{% for c in m.tool_calls or [] %}{{ c.function.name }}{% for k, v in c.function.arguments | items %}"
    "<|eot_id|>{{ v | string | lower }}{% endfor %}{% endfor %}" + END,
    "ends open": LOOP + "{% for c in m.tool_calls or [] %}{% for k in c.function.arguments %}{{ k }}<|im{% endfor %}"
    "{% endfor %}_end|>" + END,
    "stripped": "{% macro keys(c) %} {% for k in c.function.arguments %}{{ k }} {% endfor %}{% endmacro %}"
    + LOOP
    + "{% for c in m.tool_calls or [] %}{{ c.function.name }}[{{ (' a ' ~ keys(c)) | trim }}|"
    "{{ (keys(c) ~ ' a ') | trim }}|{{ keys(c) | trim }}]"
    "{% endfor %}" + END,
    "eos in arguments": LOOP + "{% for c in m.tool_calls or [] %}{% for k in c.function.arguments %}"
    "{{ k }}{{ eos_token }}{% endfor %}{% endfor %}" + END,
    # Each turn has its own sample.
    "reasoning stripped": LOOP + ARGUMENTS + "{% if loop.last %}{{ m.reasoning_content }}{% endif %}" + END,
    "a block around the answer": LOOP
    + ARGUMENTS
    + "{% set c = '<think></think>' ~ m.content if m.role == 'assistant' else m.content %}"
    "{% if '<think>' in c and '</think>' in c and not loop.last %}{% set c = c.split('</think>')[-1] %}{% endif %}"
    "{{ c }}<|im_end|>\n{% endfor %}" + PROMPT,
    # In a turn without content, the prompt contains the line end that the loop writes first.
    "a line end before each call": "{% for m in messages %}<|im_start|>{{ m.role }}{{ '\n' ~ m.content if m.content }}"
    "{% for c in m.tool_calls or [] %}{{ '\n' ~ c.function.name }}{% for k, v in c.function.arguments | items %}"
    "<{{ k }}>{{ v }}{% endfor %}{% endfor %}<|im_end|>{{ '\n' }}{% endfor %}" + PROMPT,
    "names": "{% macro loop_0(k) %}[{{ k }}]{% endmacro %}"
    + LOOP
    + "{% for c in m.tool_calls or [] %}{{ c.function.name }}{% for k in c.function.arguments %}"
    "{{ loop_0(k) ~ kwargs }}{{ kwargs is defined }}{% endfor %}{% endfor %}" + END,
    "a name that macros have": LOOP + "{% for c in m.tool_calls or [] %}{{ c.function.name }}"
    "{% for k in c.function.arguments %}{{ k ~ caller }}{{ caller is defined }}{% endfor %}{% endfor %}" + END,
    "fails": LOOP
    + "{% for c in m.tool_calls or [] %}{% for k, v in c.function.arguments | items %}{{ v + 1 }}{% endfor %}"
    "{% endfor %}" + END,
}


@contextmanager
def ways(compose: bool) -> Iterator[None]:
    """Compose or render conversations, but fill in nothing."""

    def no(*_: Any) -> Iterator[None]:
        yield from ()

    nothing = {"fill": lambda *_: None, "fill_values": lambda *_: None}
    way = mock.patch.object(Composer, "compose", Composer.compose if compose else no)
    least = mock.patch.object(blocks, "LEAST", 0)  # The child is forked from here and inherits this value.
    with mock.patch.multiple(Filling, **nothing), mock.patch.object(composer, "COMPARED", 1 << 70), way, least:
        yield


@lru_cache(4)
def template_of(name: str, turns: Any = "auto") -> JinjaTemplate:
    with ways(compose=True):
        return JinjaTemplate("test.jinja", TEMPLATES[name], open_kind(KIND), "assistant", "2026-01-01", turns)


def record_of(arguments: list[Any], tools: list[Any], contents: list[str], reasoning: str = "") -> dict[str, Any]:
    """Return a conversation in which each answer calls with the next arguments."""
    messages: list[dict[str, Any]] = []
    for number, content in enumerate(contents):
        messages.append({"role": "user", "content": content})
        calls = [{"function": {"name": f"f{number}", "arguments": each}} for each in arguments[number : number + 1]]
        more: dict[str, Any] = {"tool_calls": calls} if calls else {}
        messages.append(
            {"role": "assistant", "content": content, **more} | ({"reasoning_content": reasoning} if reasoning else {})
        )
    given = [{"type": "function", "function": {"name": f"t{k}", "parameters": tool}} for k, tool in enumerate(tools)]
    return {"messages": messages} | ({"tools": given} if tools else {})


def rows_of(records: list[dict[str, Any]], template: JinjaTemplate) -> Any:
    try:
        rows, receipt = tokenize(records, open_kind(KIND), template)
    except DataError as error:
        return str(error)
    return [(row.ids.tolist(), row.trained.tolist()) for row in rows], receipt


TEXT = st.sampled_from(
    [
        "a",
        "im_end",
        "b c",
        " b ",
        "é",
        "<|IM_END|>",
        "<|im_end|>",
        "<|",
        "|>",
        "</think>",
        "\n",
        "",
        "Oslo",
        "t",
        "<|EOT_ID|>",
    ]
)
VALUES = st.dictionaries(TEXT, TEXT | st.integers(0, 9) | st.lists(TEXT, max_size=2), max_size=3)
CONTENTS = st.lists(st.sampled_from(["yes", "It is 4.", "a"]) | TEXT, min_size=1, max_size=2)
RECORDS = st.builds(
    record_of, st.lists(VALUES, max_size=2), st.lists(VALUES, max_size=2), CONTENTS, st.sampled_from(["", "hm"])
)
A = record_of([{"a": 1}, {"b": "é", "c": "<|im_end|>"}], [{"x": "y"}], ["q", "r"])
ONLY_CALLS = {"messages": [m | {"content": m["content"] * (m["role"] == "user")} for m in A["messages"]]}
B = record_of([{"k": "a"}, {"im": [1], "d": "<|IM_END|>"}], [{"x": "<|EOT_ID|>"}], ["q", "r"])


@pytest.mark.slow
@pytest.mark.parametrize("turns", ["auto", "apart"])
@pytest.mark.parametrize("name", TEMPLATES)
@settings(max_examples=examples(12), deadline=None, suppress_health_check=list(HealthCheck))
@given(records=st.lists(RECORDS, min_size=1, max_size=3))
@example(records=[A, B])
@example(records=[ONLY_CALLS])
def test_composed_conversations_are_what_is_rendered(name: str, turns: Any, records: list[dict[str, Any]]) -> None:
    template = template_of(name, turns)
    with ways(compose=False):
        expected = rows_of(records * 3, template)
    with ways(compose=True):
        assert rows_of(records * 3, template) == expected


# Pieces of these templates contain a part of a control string or the EOS token, fail, depend on a value that another
# piece sets, or use a name with another meaning in macros.
NEVER = {"ends open", "eos in arguments", "fails", "name", "a name that macros have"}


@pytest.mark.parametrize("name", TEMPLATES)
def test_conversations_are_composed(name: str) -> None:
    """The templates outside NEVER compose conversations.

    Otherwise the test above would compare renderings with themselves.
    """
    found = []
    plain = Composer.compose

    def compose(*given: Any) -> Any:
        found.append((yield from plain(*given)))
        return found[-1]

    template = template_of(name)
    numbers = [record_of([{"a": k}, {"b": "é", "c": k}], [{"x": k}], ["q", "r"]) for k in range(6)]
    with ways(compose=True), mock.patch.object(Composer, "compose", compose):
        rows_of(numbers, template)
        assert any(found) == (name not in NEVER), found


def test_a_piece_is_written_once_for_its_shape() -> None:
    """A piece is written once, although many renderings contain it.

    Placeholders are rendered for each turn, with its prompt and without it, and each rendering declares the tools.
    """
    name = "tools in a macro, control tokens between"
    most = RawValue("i", 0)  # shared with the child
    plain, counts = Writer.write, Counter[str]()

    def write(writer: Writer, piece: Any) -> Any:
        counts[str(piece)] += 1
        most.value = max(counts.values())
        return plain(writer, piece)

    records = [record_of([{"a": k}, {"b": "é", "c": k}], [{"x": k}], ["q", "r"]) for k in range(2)]
    with ways(compose=True), mock.patch.object(Writer, "write", write):
        rows_of(records, JinjaTemplate("t.jinja", TEMPLATES[name], open_kind(KIND), "assistant", "2026-01-01"))
    assert most.value == 1


def test_loops_that_cannot_be_macros_keep_no_other_from_being_written() -> None:
    source = "{% for k in tools %}{{ k.a ~ k.b ~ k.c ~ k.d }}{% endfor %}" + TEMPLATES["a name that macros have"]
    with ways(compose=True):
        writer = Writer(chat_environment(datetime(2026, 1, 1)), source, {})
    [number] = writer._blocks
    assert writer._blocks[number].names == ["tools"]
    assert writer.write([number, {"tools": [{"a": 1}, {"b": 2}]}, {}]) == ("12", [])
    assert writer.write([number, {}, {}]) == ("", [])


class FakeRenderer:
    """Write each piece as a text, and fail at the piece "loops".

    All requests that follow also fail, as if the child was killed.
    """

    def __init__(self) -> None:
        self.requests: list[list[str]] = []

    def render_all(self, requests: list[Pieces]) -> Iterator[Any]:
        error = None
        for request in requests:
            pieces = [str(piece) for piece in request.pieces]
            self.requests.append(pieces)
            error = error or (DataError("template_loops", f"{pieces}") if "loops" in pieces else None)
            yield error or [(f"<{piece}>", []) for piece in pieces]


def test_pieces_of_many_conversations_are_one_request() -> None:
    renderer: Any = FakeRenderer()
    asked: list[Any] = [Pieces(["a", "b"], 4), Pieces(["c"], 1), Pieces(["d"], lockstep.CALL), Pieces(["e"], 2)]
    expected = [[("<a>", []), ("<b>", [])], [("<c>", [])], [("<d>", [])], [("<e>", [])]]
    assert [*lockstep._written(asked, renderer)] == expected
    assert renderer.requests == [["a", "b", "c", "d"], ["e"]]  # a long request is the last of its call
    assert [*lockstep._written([], renderer)] == []


def test_a_problem_with_pieces_is_one_of_their_conversation() -> None:
    renderer: Any = FakeRenderer()
    asked: list[Any] = [Pieces(["a"], 4), Pieces(["loops"], 1), Pieces(["b"], lockstep.CALL), Pieces(["c"], 1)]
    first, *problems, last = lockstep._written(asked, renderer)
    assert (first, last) == ([("<a>", [])], [("<c>", [])])
    assert [str(problem) for problem in problems] == ["['loops']"] * 2  # the run ends at the first problem
    assert renderer.requests == [["a", "loops", "b"], ["a"], ["loops"], ["b"], ["c"]]


def test_a_composed_conversation_is_compared_with_its_rendering() -> None:
    plain = Composition.samples

    def other(*given: Any) -> Any:
        found = plain(*given)
        return found and [Sample(found[0].spans[1:], found[0].turn), *found[1:]]

    template = template_of("arguments")
    with ways(compose=True), mock.patch.object(composer, "COMPARED", 1):
        rows_of([A] * 3, template)
        with mock.patch.object(Composition, "samples", other), pytest.raises(AssertionError, match="are composed as"):
            rows_of([A] * 3, template)


@settings(max_examples=examples(100))
@given(
    st.lists(
        st.tuples(
            st.lists(
                st.sampled_from(["<|im_end|>", "<|im_start|>", "<|im", "_end|>", "a", "b\n", "\ue000"]), max_size=8
            ),
            st.lists(st.integers(0, 40), max_size=4),
        ),
        max_size=4,
    )
)
def test_texts_with_the_same_start_are_cut_as_if_each_were_the_first(texts: list[tuple[list[str], list[int]]]) -> None:
    encoder = open_kind(KIND)
    splitter, start, cuts = Splitter(encoder), "<|im_start|>user\nq<|im_end|>\n" * 3, []
    for pieces, edges in texts:
        text = start + "".join(pieces)
        places = sorted({min(edge * 3, len(text)) for edge in edges})[: len(set(edges)) // 2 * 2]
        ranges = list(zip(places[::2], places[1::2], strict=False))
        cuts.append((text, ranges))
    assert [*splitter.split_all(cuts, "\ue000")] == [splitter.split(*cut, "\ue000") for cut in cuts]


@settings(max_examples=examples(50))
@given(st.lists(st.sampled_from(["<|im_end|>", "<|im", "_end|>", "a", "\ue000", "§", " "]), max_size=8), st.booleans())
@example(["§", "\ue000", "\ue000"], True)
def test_control_strings_are_marked_as_they_are_found(pieces: list[str], alone: bool) -> None:
    encoder = open_kind(KIND)
    controls = {**encoder.controls, **({"§": 0} if alone else {})}  # a control string of one character
    pattern = re.compile("|".join(map(re.escape, sorted(controls, key=len, reverse=True))))
    found = {"controls": controls, "control_pattern": pattern, "written_pattern": pattern}
    splitter = Splitter(SimpleNamespace(strips_left=(), strips_right=(), **found))  # type: ignore[arg-type]
    text = "".join(pieces)
    marked = splitter.marked(text, "\ue000")
    assert marked.replace("\0", "") == text
    assert marked.split("\0")[1::2] == [string for _, string, _ in splitter.controls_in(text, "\ue000")]


def test_nothing_is_composed_if_control_tokens_absorb_white_space() -> None:
    encoder = open_kind(KIND)
    with mock.patch.object(encoder, "strips_right", frozenset({"<|im_end|>"})), ways(compose=True):
        template = JinjaTemplate("test.jinja", TEMPLATES["arguments"], encoder, "assistant", "2026-01-01")
        conversation = read_record(A, "messages")
        trained = trained_turns(conversation, "assistant")
        for _ in range(3):
            steps = template._composed(conversation, trained)
            with pytest.raises(StopIteration) as end:
                next(steps)
            assert end.value.value is None


def test_arguments_that_are_rarely_the_same_are_rarely_looked_at() -> None:
    new = [record_of([{f"k{k}": [0] * k}], [], ["q"]) for k in range(200)]
    looked_at: list[Reads] = []

    def shape_of(conversation: Any, trained: Any, reads: Reads = Reads.NOTHING) -> Any:
        looked_at.append(reads)
        return plain(conversation, trained, reads)

    plain = frames.shape_of
    with mock.patch.object(frames, "shape_of", shape_of):
        rows_of(new, template_of("arguments"))
        assert 64 < looked_at.count(Reads.ARGUMENTS) < 100
        looked_at.clear()
        rows_of([*new, *new[:1] * 400], template_of("arguments"))
        assert looked_at.count(Reads.ARGUMENTS) > 200  # arguments that repeat are looked at again
