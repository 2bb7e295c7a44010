"""Sections of answers that settings leave out have no label; no token changes."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, assume, event, given, settings
from hypothesis import strategies as st
from reference.sections import STYLES, trained
from support.profiles import examples
from support.tokenizer_kinds import open_kind, tokenize

from packcorpus.tasks.conversations.formats import read_record
from packcorpus.tasks.core.errors import Reject
from packcorpus.tasks.templates.jinja.template import JinjaTemplate
from packcorpus.tasks.templates.placeholders import blank, shape_of
from packcorpus.tasks.templates.sections import ALL_SECTIONS, Sections
from packcorpus.tasks.templates.spans import TEXT, Sample, Turns, trained_turns
from packcorpus.tasks.tokenization.samples import segments_of

KIND = "hf_byte_level"
FEW = settings(max_examples=examples(60), deadline=None, suppress_health_check=[HealthCheck.too_slow])

TEXTS = st.text("ab .(1\n", min_size=1, max_size=6)
CHOICES = st.builds(Sections, *[st.booleans()] * 4).filter(
    lambda found: found.reasoning or found.content or found.calls
)


def open_jinja(source: str, sections: Sections = ALL_SECTIONS, turns: Turns = "auto", kind: str = KIND) -> Any:
    return JinjaTemplate("test.jinja", source, open_kind(kind), "assistant", "2026-01-01", turns, sections=sections)


def samples_of(template: Any, messages: list[dict[str, Any]]) -> list[Sample]:
    conversation = read_record({"messages": messages}, "messages")
    found: list[Sample] = template.samples(conversation, trained_turns(conversation, "assistant"))
    return found


def runs(sample: Sample) -> list[str]:
    """Return each run of trained text in a sample."""
    text = "".join(span.text if span.trained else "\0" for span in sample.spans)
    return [run for run in text.split("\0") if run]


def ids_of(sample: Sample) -> list[int]:
    """Return the ids of a sample."""
    tokens, _, texts, _ = segments_of(sample.spans, open_kind(KIND))
    of_texts = iter(texts)
    return [
        id
        for token in tokens
        for id in (open_kind(KIND).encode([next(of_texts)]).ids.tolist() if token == TEXT else [token])
    ]


def user(content: str = "q") -> dict[str, Any]:
    return {"role": "user", "content": content}


def call(name: str = "find", **arguments: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


@st.composite
def answers(draw: st.DrawFn) -> dict[str, Any]:
    """Draw an answer with reasoning, content, and calls, or some of them."""
    reasoning = draw(st.sampled_from(["", "Why", "So (1).\n</think> is the end"]))
    content = draw(st.one_of(st.just(""), TEXTS))
    calls = [call(x=draw(TEXTS)) for _ in range(draw(st.integers(0 if content.strip() else 1, 2)))]
    message: dict[str, Any] = {"role": "assistant", "content": content, "reasoning_content": reasoning}
    return message | ({"tool_calls": calls} if calls else {})


def joins(left: str, right: str) -> bool:
    """Return whether a token crosses from one text into the next one.

    No token crosses a control token.
    """
    controls = open_kind(KIND).control_pattern
    left = left[max((found.end() for found in controls.finditer(left)), default=0) :]
    right = right[: found.start()] if (found := controls.search(right)) else right
    both, first, last = (open_kind(KIND).encode([text]).ids.tolist() for text in (left + right, left, right))
    return both != [*first, *last]


@pytest.mark.parametrize("style", STYLES)
def test_the_labels_are_those_of_the_reference_and_no_token_changes(style: str) -> None:
    source, pieces_of = STYLES[style]

    @FEW
    @given(answers(), answers(), CHOICES)
    def check(first: dict[str, Any], last: dict[str, Any], sections: Sections) -> None:
        messages = [user(), first, user("r"), last]
        parts = {name: getattr(sections, name) for name in ("reasoning", "content", "calls")}
        template = open_jinja(source, sections)
        try:
            expected = [
                run
                for message in (first, last)
                for run in trained(pieces_of(message), parts, not sections.empty, joins)
            ]
        except ValueError:
            event("crossed")
            with pytest.raises(Reject) as problem:
                samples_of(template, messages)
            assert problem.value.reason == "parts_not_separate"
            return
        try:
            whole = samples_of(open_jinja(source), messages)
        except Reject:
            assume(False)
        samples = samples_of(template, messages)
        assert [run for sample in samples for run in runs(sample)] == expected
        for one, other in zip(samples, whole, strict=True):
            assert "".join(span.text for span in one.spans) == "".join(span.text for span in other.spans)
            assert ids_of(one) == ids_of(other)
            assert (one.reasoned, one.closed) == (other.reasoned, other.closed)
        assert sum(s.reasoned for s in whole) == sum(bool(m["reasoning_content"]) for m in (first, last))
        assert sum(s.closed for s in whole) == sum(not m["reasoning_content"] for m in (first, last))

    check()


LOOP = "{% for m in messages %}<|im_start|>{{ m.role }}\n"
CALLS = "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }}</tool_call>{% endfor %}"
END = "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
# Reasoning is written in the last turn only, also if it is empty.
LAST = (
    LOOP + "{% if loop.last and m.role == 'assistant' %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}"
    "{{ m.content }}" + CALLS + END
)
NO_MARKER = LOOP + "{{ m.reasoning_content }} {{ m.content }}" + CALLS + END
WITH_CALLS = [user(), {"role": "assistant", "content": "Look.", "tool_calls": [call()]}]
REASONED = {"role": "assistant", "content": "Look.", "reasoning_content": "Why"}


def test_an_empty_block_is_left_out_of_each_sample() -> None:
    messages = [user(), {"role": "assistant", "content": "b"}, user("r"), REASONED]
    assert [runs(sample) for sample in samples_of(open_jinja(LAST), messages)] == [
        ["<think>\n\n</think>\n\nb<|im_end|>"],
        ["<think>\nWhy\n</think>\n\nLook.<|im_end|>"],
    ]
    samples = samples_of(open_jinja(LAST, Sections(empty=False)), messages)
    assert [runs(sample) for sample in samples] == [["b<|im_end|>"], ["<think>\nWhy\n</think>\n\nLook.<|im_end|>"]]
    assert [(sample.reasoned, sample.closed) for sample in samples] == [(0, 1), (1, 0)]


@pytest.mark.parametrize("content", ["</think> is a marker", "<think> is a marker", "[/THINK]"])
def test_a_content_about_markers_is_no_empty_block(content: str) -> None:
    messages = [user(), {"role": "assistant", "content": content}]
    source = LOOP + "{{ m.content }}" + END
    [sample] = samples_of(open_jinja(source, Sections(empty=False)), messages)
    assert (runs(sample), sample.closed) == ([content + "<|im_end|>"], 0)


def test_an_empty_block_in_the_data_is_left_out_and_not_counted() -> None:
    messages = [user(), {"role": "assistant", "content": "<think>\n\n</think>\n\nb"}]
    source = LOOP + "{{ m.content }}" + END
    [sample] = samples_of(open_jinja(source, Sections(empty=False)), messages)
    assert (runs(sample), sample.closed) == (["b<|im_end|>"], 0)


def test_only_a_control_token_of_the_template_ends_a_section() -> None:
    source = LOOP + "{{ m.reasoning_content }}<|eot_id|>{{ m.content }}" + END
    messages = [user(), {**REASONED, "reasoning_content": "Why <|eot_id|> so", "content": "It <|im_end|> is."}]
    [sample] = samples_of(open_jinja(source, Sections(reasoning=False)), messages)
    assert runs(sample) == ["It <|im_end|> is.<|im_end|>"]


@pytest.mark.parametrize(
    ("source", "sections", "problem"),
    [
        (
            LOOP + "{% for c in m.tool_calls or [] %}{{ c.function.name }} {% endfor %}{{ m.content }}" + END,
            Sections(calls=False),
            "no marker between them",
        ),
        (LOOP + "{{ m.content.replace('o', '0') }}" + CALLS + END, Sections(calls=False), "as they are"),
        (
            LOOP
            + "{% if '0' in (m.content or '') %}{{ raise_exception('no') }}{% endif %}{{ m.content }}"
            + CALLS
            + END,
            Sections(calls=False),
            "as they are",
        ),
    ],
)
def test_sections_that_cannot_be_separated_are_a_reject(source: str, sections: Sections, problem: str) -> None:
    with pytest.raises(Reject) as caught:
        samples_of(open_jinja(source, sections), WITH_CALLS)
    assert caught.value.reason == "parts_not_separate"
    assert caught.value.message.startswith("messages[1]: train_parts cannot separate its ")
    assert problem in caught.value.message


def test_reasoning_without_a_marker_after_it_is_a_reject() -> None:
    messages = [user(), REASONED]
    with pytest.raises(Reject, match="cannot separate its reasoning from its content"):
        samples_of(open_jinja(NO_MARKER, Sections(reasoning=False)), messages)
    assert runs(*samples_of(open_jinja(NO_MARKER), messages)) == ["Why Look.<|im_end|>"]


def test_a_token_across_the_edge_is_a_reject() -> None:
    source = LOOP + "{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.name }}{% endfor %}" + END
    messages = [user(), {"role": "assistant", "content": "th", "tool_calls": [call("e")]}]
    assert joins("th", "e")
    with pytest.raises(Reject, match="changes within a token of an answer: between its content and its calls"):
        samples_of(open_jinja(source, Sections(calls=False)), messages)
    assert not joins("th", " e")
    messages[1]["content"] = "th\n"
    [sample] = samples_of(open_jinja(source, Sections(calls=False)), messages)
    assert runs(sample) == ["th\n"]


def test_calls_may_come_before_the_content() -> None:
    """Gemma 4 writes them so."""
    source = LOOP + "<think>{{ m.reasoning_content }}</think>" + CALLS + "{{ '\n' + m.content }}" + END
    messages = [user(), {"role": "assistant", "content": "Look.", "tool_calls": [call(), call("f")]}]
    calls = "<tool_call>find</tool_call><tool_call>f</tool_call>\n"
    for reasoning in ({}, {"reasoning_content": "Why"}):
        messages[1] |= reasoning
        block = f"<think>{reasoning.get('reasoning_content', '')}</think>"
        for sections, expected in (
            (Sections(calls=False), [block, "Look.<|im_end|>"]),
            (Sections(content=False), [block + calls]),
            (Sections(reasoning=False), [calls + "Look.<|im_end|>"]),
            (Sections(reasoning=False, calls=False), ["Look.<|im_end|>"]),
        ):
            [sample] = samples_of(open_jinja(source, sections), messages)
            assert runs(sample) == expected


def test_generation_marks_are_divided_too() -> None:
    source = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}"
        "<think>\n{{ m.reasoning_content }}\n</think>\n\n{{ m.content }}" + CALLS + "<|im_end|>{% endgeneration %}"
        "{% else %}{{ m.content }}<|im_end|>{% endif %}\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    messages = [user(), {"role": "assistant", "content": "b"}, user("r"), {**REASONED, "tool_calls": [call()]}]
    [sample] = samples_of(open_jinja(source, Sections(empty=False, calls=False)), messages)
    assert runs(sample) == ["b<|im_end|>", "<think>\nWhy\n</think>\n\nLook."]


def test_reasoning_in_the_content_is_reasoning() -> None:
    messages = [user(), {"role": "assistant", "content": "<think>\nWhy\n</think>\n\nLook."}]
    for source in (LAST, LOOP + "{{ m.content }}" + END):
        [sample] = samples_of(open_jinja(source, Sections(reasoning=False)), messages)
        assert runs(sample) == ["Look.<|im_end|>"]
        [sample] = samples_of(open_jinja(source, Sections(content=False)), messages)
        assert runs(sample) == ["<think>\nWhy\n</think>\n\n"]


@pytest.mark.parametrize("sections", [Sections(calls=False), Sections(empty=False)])
def test_a_choice_of_sections_is_never_filled_in(sections: Sections) -> None:
    """Tokens decide where a label may change, and contents decide the tokens."""
    found = shape_of(
        read_record({"messages": [user(), {"role": "assistant", "content": "b"}]}, "messages"), [False, True]
    )
    assert found
    placeholders, _ = blank(found[0])
    assert open_jinja(LAST).outline(placeholders, [False, True])
    assert not open_jinja(LAST, sections).outline(placeholders, [False, True])


def test_answers_are_counted_alike_whether_they_are_filled_in_or_rendered() -> None:
    """Whether a conversation is filled in depends on the conversations before it."""
    answers = ["b", "<think>\n\n</think>\n\nb", "</think>b", "<think>Why</think>b", " b "]

    @settings(FEW, max_examples=examples(40))
    @given(
        st.sampled_from([LAST, LOOP + "{{ m.content }}" + END, LOOP + "<think>\n\n</think>\n\n{{ m.content }}" + END]),
        st.lists(st.tuples(st.sampled_from(answers), st.sampled_from(["", "Why"])), min_size=1, max_size=4),
    )
    def check(source: str, drawn: list[tuple[str, str]]) -> None:
        reads = source == LAST
        records = [
            {"messages": [user(), {"role": "assistant", "content": content, "reasoning_content": reasoning * reads}]}
            for content, reasoning in drawn
        ]
        filling, rendering = open_jinja(source), open_jinja(source)
        rendering.outline = lambda *_: None
        found = [tokenize(records, open_kind(KIND), each)[1] for each in (filling, rendering)]
        assert found[0] == found[1]

    check()
