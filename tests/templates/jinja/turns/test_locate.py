"""Each trained turn follows exactly the prompt that the model sees at inference.

This is true regardless of how a template changes the history.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.profiles import examples
from support.templates.modern_templates import (
    CALLS_IF_NULL,
    CONTINUED,
    END_LAST,
    INLINE,
    INTRODUCED,
    LOOP,
    MODERN,
    NEXT_HEADER,
    NO_CALLS,
    NO_END,
    OPENED,
    OPTIONAL,
    PARTS,
    PROMPT,
    QUESTIONS,
    SELECTED_PARTS,
    STRIPPED,
    TEXT_ARGUMENTS,
    WITHOUT_ENDS,
)
from support.tokenizer_kinds import open_kind, ordinary, reference, tokenize

from packcorpus.tasks.conversations.formats import read_record
from packcorpus.tasks.core.errors import Reject
from packcorpus.tasks.templates.adjust import Adjust
from packcorpus.tasks.templates.built_in import BuiltIn
from packcorpus.tasks.templates.jinja.template import JinjaTemplate
from packcorpus.tasks.templates.spans import Sample, TrainOn, Turns, trained_turns

pytest.importorskip("transformers", reason="transformers is the reference and is not installed")

KIND = "hf_byte_level"
FEW = settings(max_examples=examples(20), deadline=None, suppress_health_check=[HealthCheck.too_slow])


def open_jinja(source: str, turns: Turns = "auto", train_on: TrainOn = "assistant", **settings: Any) -> JinjaTemplate:
    return JinjaTemplate("test.jinja", source, open_kind(KIND), train_on, "2026-01-01", turns, **settings)


def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def answer(content: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


TWO = [user("a"), answer("b", reasoning_content="r"), user("c"), answer("d", reasoning_content="s")]
CALL = {"type": "function", "function": {"name": "find", "arguments": {"x": 1}}}


def samples_of(template: Any, messages: list[dict[str, Any]]) -> list[Sample]:
    conversation = read_record({"messages": messages}, "messages")
    return template.samples(conversation, trained_turns(conversation, "assistant"))  # type: ignore[no-any-return]


def trained(sample: Sample) -> list[str]:
    """Return each run of trained text in a sample."""
    text = "".join(span.text if span.trained else "\0" for span in sample.spans)
    return [run for run in text.split("\0") if run]


def whole(sample: Sample) -> str:
    return "".join(span.text for span in sample.spans)


@st.composite
def conversations(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Draw conversations whose answers may begin with white space.

    A token could join this white space with the prompt. Some questions are trained on.
    """
    text = ordinary(KIND)
    messages = [{"role": "system", "content": "Q" + draw(text)}] if draw(st.booleans()) else []
    for _ in range(draw(st.integers(1, 3))):
        reasoning = {"reasoning_content": "R" + draw(text).strip()} if draw(st.booleans()) else {}
        flag = {"train": True} if draw(st.integers(0, 3)) == 0 else {}
        messages += [user("Q" + draw(text)) | flag, answer(draw(text) + "Z", **reasoning)]
    return messages


@pytest.mark.parametrize("turns", ["auto", pytest.param("apart", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", MODERN)
def test_ids_equal_those_of_the_tokenizer_up_to_each_trained_turn(name: str, turns: Turns) -> None:
    source, library, encoder = MODERN[name], reference(KIND), open_kind(KIND)
    keeps = name in ("reasoning stripped from history", "empty block in the last turn", "prompt opens the reasoning")
    template = open_jinja(source, turns, adjust=Adjust(drop_reasoning=not keeps))

    def render(messages: list[dict[str, Any]], **more: Any) -> Any:
        return library.apply_chat_template(messages, chat_template=source, return_dict=False, **more)

    @FEW
    @given(conversations())
    def check(messages: list[dict[str, Any]]) -> None:
        if not keeps:
            messages = [{k: v for k, v in m.items() if k != "reasoning_content"} for m in messages]
        rows, receipt = tokenize([{"messages": messages}], encoder, template)
        if receipt["rejects"]:  # a question with a flag is in the same text as the system message
            assert name == "system message in the last user turn"
            assert {code for _, code, _ in receipt["rejects"]} <= {"flag_not_followed", "message_not_written"}
            return
        answers = [k for k, message in enumerate(messages) if message["role"] == "assistant"]
        assert len(rows) == len(answers) if turns == "apart" else 1 <= len(rows) <= len(answers)
        for k in answers:
            prompt = render(messages[:k], tokenize=True, add_generation_prompt=True)
            [row] = [r for r in rows if r.ids[: len(prompt)].tolist() == prompt and r.trained[len(prompt) :][:1].any()]
            assert not row.trained[len(prompt) - 1] or "train" in messages[k - 1]
            # The trained text begins with the answer of this turn and ends with a stop token.
            flags = row.trained[len(prompt) :].tolist()
            stop = len(prompt) + (flags.index(False) if False in flags else len(flags))
            text = encoder.decode(row.ids[len(prompt) : stop])
            assert "".join(messages[k]["content"].split()) in "".join(text.split())
            assert messages[k].get("reasoning_content", "") in text
            assert int(row.ids[stop - 1]) in encoder.control_strings

    check()


@pytest.mark.parametrize("turns", ["auto", "apart"])
@pytest.mark.parametrize("name", MODERN)
def test_a_turn_with_a_flag_has_the_same_tokens(name: str, turns: Turns) -> None:
    template, encoder = open_jinja(MODERN[name], turns), open_kind(KIND)
    texts = ("be", " a 1", "b 2", "\n\nc 3", "d 4", "e 5")
    messages = [
        {"role": "system", "content": "be"},
        *(user(t) if k % 2 else answer(t) for k, t in enumerate(texts[1:], 1)),
    ]
    for flagged in ((0, 1), (1,), (3,), (1, 3), (5,)):
        added = [message | {"train": True} if k in flagged else message for k, message in enumerate(messages)]
        rows, receipt = tokenize([{"messages": added}], encoder, template)
        if receipt["rejects"]:  # the system message is in the same text as the flagged question
            assert name == "system message in the last user turn"
            assert receipt["rejects"][0][1] in ("flag_not_followed", "message_not_written")
            continue
        before, _ = tokenize([{"messages": messages}], encoder, template)
        assert [row.ids.tolist() for row in rows[: len(before)]] == [row.ids.tolist() for row in before]
        assert all((row.trained >= other.trained).all() for row, other in zip(rows, before, strict=False))
        assert len(rows) == len(before) + (len(before) > 1 and flagged == (5,))
        trained = "".join(encoder.decode(row.ids[row.trained]) for row in rows)
        assert [k for k in (1, 3, 5) if texts[k].strip() in trained] == [k for k in flagged if k]
        assert sum(int(row.trained.sum()) for row in rows) < sum(len(row.ids) for row in rows)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("{{ m.content }} {{ m.content }}", "does not write its content in one place"),
        ("{{ m.content | length }}", "does not write its content in one place"),
        ("{{ 'x' if m.content == 'Q' }}{{ m.content }}", "does not write its content in one place"),
    ],
)
def test_a_turn_with_a_flag_that_cannot_be_located_is_rejected(content: str, problem: str) -> None:
    source = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'user' %}" + content + "{% else %}"
        "{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    messages = [user("Q"), answer("b"), user("R"), answer("c")]
    if "length" in content:
        with pytest.raises(Reject, match="does not write it"):
            samples_of(open_jinja(source, "apart"), messages)
    else:
        assert trained(samples_of(open_jinja(source, "apart"), messages)[0]) == ["b<|im_end|>"]
    with pytest.raises(Reject, match=rf"messages\[0\] \(user\) has a flag .*{problem}") as found:
        samples_of(open_jinja(source), [messages[0] | {"train": True}, *messages[1:]])
    assert found.value.reason == "flag_not_followed"


# The system message comes last.
HOISTED = (
    "{% for m in messages if m.role != 'system' %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% for m in messages if m.role == 'system' %}<|im_start|>{{ m.content }}<|im_end|>\n{% endfor %}"
)


def test_turns_with_a_flag_are_trained_on_wherever_they_are_written() -> None:
    messages = [{"role": "system", "content": "s", "train": True}, user("a"), answer("b")]
    source = "{% if not add_generation_prompt %}" + HOISTED + "{% else %}" + HOISTED.partition("{% endfor %}")[0]
    source += "{% endfor %}<|im_start|>assistant\n{% endif %}"
    [sample] = samples_of(open_jinja(source, "together"), messages)
    assert trained(sample) == ["b<|im_end|>", "s<|im_end|>"]


# Nothing but the ends of answers are control tokens.
TEXT_ONLY = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ '<|im_end|>' if m.role == 'assistant' else '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)


def test_a_flag_and_an_answer_in_one_text_leave_the_answer_after_its_prompt() -> None:
    encoder, template = open_kind(KIND), open_jinja(TEXT_ONLY)
    messages = [user("What is it?"), answer("b")]
    [before], _ = tokenize([{"messages": messages}], encoder, template)
    [after], _ = tokenize([{"messages": [messages[0] | {"train": True}, messages[1]]}], encoder, template)
    assert after.ids.tolist() == before.ids.tolist()
    assert after.trained[1:].all()
    for other in (answer("x", train=False), answer("", tool_calls=[CALL], train=False)):
        source = "{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.name }}{% endfor %}"
        text_only = open_jinja(TEXT_ONLY.replace("<|im_end|>", ";").replace("{{ m.content }}", source))
        with pytest.raises(Reject, match=r"messages\[0\] \(user\) has a flag .* in one text with messages\[1\]"):
            samples_of(text_only, [user("q") | {"train": True}, other, user("r"), answer("b")])
    two = [user("What is it?"), user("Say") | {"train": True}, answer("b")]
    with pytest.raises(Reject, match=r"messages\[1\] \(user\) has a flag .* in one text with messages\[0\]"):
        samples_of(template, two)


def test_conversations_with_a_flag_are_rendered() -> None:
    """Placeholders would not show where a content is."""
    template = open_jinja(STRIPPED)
    conversation = read_record({"messages": [user("a"), answer("b")]}, "messages")
    assert template.outline(conversation, [False, True])
    assert template.outline(conversation, [True, True]) is None


def test_no_token_crosses_the_end_of_a_turn() -> None:
    """A later prompt has the turn and the text after it, encoded as one text."""
    library, encoder = reference(KIND), open_kind(KIND)
    messages = [user("a"), answer("b"), user("c"), answer("d")]
    ids = library.apply_chat_template(
        messages[:3], chat_template=WITHOUT_ENDS, add_generation_prompt=True, return_dict=False
    )
    assert encoder.encode([" b the"]).ids.tolist() != encoder.encode([" b ", "the"]).ids.tolist(), "a token crosses"
    one, two = samples_of(open_jinja(WITHOUT_ENDS), messages)
    assert (trained(one), trained(two)) == ([" b "], [" d "])
    [prompt, _] = two.spans
    assert encoder.encode([prompt.text]).ids.tolist() == ids


# The template marks answers, and writes more after each one than the model does.
MARKED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
    "<|im_end|>\n{% endgeneration %}{% else %}{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}" + PROMPT
)


def test_a_turn_with_a_flag_needs_no_mark() -> None:
    messages = [user("a") | {"train": True}, answer("b"), user("c"), answer("d")]
    [sample] = samples_of(open_jinja(MARKED), messages)
    assert trained(sample) == ["user\na<|im_end|>", "b<|im_end|>", "d<|im_end|>"]


@pytest.mark.parametrize(
    "marked",
    [
        "{{ nl }}{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}{{ nl }}",
        "{% generation %}{{ nl }}{{ m.content }}<|im_end|>{{ nl }}{% endgeneration %}",
        "{{ nl }}{% generation %}{{ m.content | trim }}{% endgeneration %} "
        "{% generation %}<|im_end|>{% endgeneration %}{{ nl }}",
        "{{ nl }}{% generation %}{{ m.content }}{% endgeneration %}<|im_end|>{{ nl }}",
    ],
    ids=["exact", "with the line breaks around it", "two blocks, without the white space between", "no end token"],
)
def test_marks_must_hold_what_the_model_writes_and_may_hold_more(marked: str) -> None:
    source = (
        "{% set nl = '\\n' %}{% for m in messages %}<|im_start|>{{ m.role }}{% if m.role == 'assistant' %}"
        + marked
        + "{% else %}{{ nl }}{{ m.content }}<|im_end|>{{ nl }}{% endif %}{% endfor %}"
        + PROMPT
    )
    messages = [user("a"), answer("b "), user("c"), answer("b ")]
    [sample] = samples_of(open_jinja(source), messages)
    assert trained(sample) == ["b <|im_end|>", "b <|im_end|>"]


def test_marks_do_not_stand_for_a_turn_that_does_not_continue_its_prompt() -> None:
    """The model would read another text before its turn than in training."""
    template = open_jinja(MARKED.replace(PROMPT, "{% if add_generation_prompt %}I think: {% endif %}"))
    with pytest.raises(Reject, match=r"messages\[1\] \(assistant\) cannot be located"):
        samples_of(template, [user("c"), answer("d")])


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (STRIPPED, [["<think>\nr\n</think>\n\nb<|im_end|>"], ["<think>\ns\n</think>\n\nd<|im_end|>"]]),
        (OPENED, [["r\n</think>\n\nb<|im_end|>"], ["s\n</think>\n\nd<|im_end|>"]]),
        (INLINE, [["[r] b<|im_end|>", "[s] d<|im_end|>"]]),
    ],
    ids=["stripped", "opened", "inline"],
)
def test_reasoning_reaches_the_template_in_its_own_form_whatever_form_it_has(
    source: str, expected: list[list[str]]
) -> None:
    inline = [user("a"), answer("<think>\nr\n</think>\n\nb"), user("c"), answer("<think>s</think>d")]
    other = [m | ({"thinking": m["reasoning_content"]} if "reasoning_content" in m else {}) for m in TWO]
    for message in other:
        message.pop("reasoning_content", None)
    for messages in (TWO, inline, other):
        assert [trained(sample) for sample in samples_of(open_jinja(source), messages)] == expected


# Separates reasoning in a content as Qwen3 does, and writes it in the last turn only.
SEPARATES = (
    "{% for m in messages %}{% set c, r = m.content, m.reasoning_content or '' %}"
    "{% if m.role == 'assistant' and not r and '</think>' in c %}"
    "{% set r = c.split('</think>')[0].split('<think>')[-1].strip() %}"
    "{% set c = c.split('</think>')[-1].lstrip('\\n') %}{% endif %}"
    "<|im_start|>{{ m.role }}\n"
    "{% if r and loop.last %}<think>\n{{ r }}\n</think>\n\n{% endif %}{{ c }}<|im_end|>\n{% endfor %}" + PROMPT
)


@pytest.mark.parametrize("between", ["", "<think>", "b", "<think>b"])
def test_a_template_that_separates_reasoning_reads_a_second_tag_itself(between: str) -> None:
    messages = [user("q"), answer(f"<think>a</think>{between}</think>c"), user("p"), answer("d")]
    rows, receipt = tokenize([{"messages": messages}], open_kind(KIND), open_jinja(SEPARATES))
    if "b" in between:  # the template leaves it out
        assert [reason for _, reason, _ in receipt["rejects"]] == ["answer_not_written"]
        return
    assert receipt["rejects"] == []
    for row, k in zip(rows, (1, 3), strict=True):
        prompt = reference(KIND).apply_chat_template(
            messages[:k], chat_template=SEPARATES, add_generation_prompt=True, tokenize=True, return_dict=False
        )
        assert row.ids[: len(prompt)].tolist() == prompt
        assert row.trained[len(prompt)]


def test_one_sample_if_the_template_writes_history_as_it_is_read() -> None:
    plain = [user("a"), answer("b"), user("c"), answer("d")]
    [sample] = samples_of(open_jinja(STRIPPED), plain)
    assert (sample.turn, trained(sample)) == (None, ["b<|im_end|>", "d<|im_end|>"])
    first, second = samples_of(open_jinja(STRIPPED, "apart"), plain)
    assert (first.turn, trained(first), second.turn, trained(second)) == (1, ["b<|im_end|>"], 3, ["d<|im_end|>"])
    first, second = samples_of(open_jinja(STRIPPED), TWO)
    assert "<think>" not in whole(second).partition("<|im_start|>assistant")[2].partition("<|im_end|>")[0]


def test_a_turn_without_an_end_token_ends_with_the_token_that_follows() -> None:
    [sample] = samples_of(open_jinja(NO_END), [user("a"), answer("b"), user("c"), answer("d")])
    assert trained(sample) == ["b<|start_header_id|>", "d"]  # the separator is also trained on
    first, second = samples_of(open_jinja(END_LAST), [user("a"), answer("b"), user("c"), answer("d")])
    assert (trained(first), trained(second)) == (["b<|eot_id|>"], ["d<|eot_id|>"])


def test_nothing_after_the_eos_token_is_the_model_s() -> None:
    for turns in ("auto", "apart"):
        samples = samples_of(open_jinja(NEXT_HEADER, turns), [user("a"), answer("b"), user("c"), answer("d")])
        assert [text for sample in samples for text in trained(sample)] == ["b<|im_end|>", "d<|im_end|>"]


def test_an_answer_that_starts_with_the_words_of_its_reasoning_has_both() -> None:
    [sample] = samples_of(open_jinja(OPENED), [user("a"), answer("no, never", reasoning_content="no")])
    assert trained(sample) == ["no\n</think>\n\nno, never<|im_end|>"]


def test_together_is_refused_if_the_model_would_see_another_history() -> None:
    with pytest.raises(Reject, match=r'messages\[1\] \(assistant\) cannot be located, .*"<think>.*; set turns: auto'):
        samples_of(open_jinja(STRIPPED, "together"), TWO)


def test_a_prompt_that_no_turn_continues_is_refused_and_says_what_follows_instead() -> None:
    with pytest.raises(Reject, match=r'messages\[1\] .*"I think: " is expected, but "b<\|im_end\|>'):
        samples_of(open_jinja(INTRODUCED), [user("a"), answer("b")])


def test_reasoning_without_a_place_is_rejected_until_it_is_dropped() -> None:
    for template in (open_jinja(NO_CALLS), open_jinja(OPTIONAL), BuiltIn("chatml", open_kind(KIND), "assistant")):
        with pytest.raises(Reject, match=r"messages\[1\].*reasoning|messages\[1\].*cannot be located"):
            samples_of(template, TWO[:2])
    drop = Adjust(drop_reasoning=True)
    for template in (open_jinja(NO_CALLS, adjust=drop), BuiltIn("chatml", open_kind(KIND), "assistant", adjust=drop)):
        for message in (TWO[1], answer("<think>r</think>\n\nb")):
            [sample] = samples_of(template, [user("a"), message])
            assert trained(sample) == ["b<|im_end|>"]


def test_options_reach_the_template() -> None:
    [sample] = samples_of(open_jinja(OPTIONAL, options={"enable_thinking": True}), TWO[:2])
    assert trained(sample) == ["<think>\nr\n</think>\n\nb<|im_end|>"]
    [sample] = samples_of(open_jinja(OPTIONAL), [user("a"), answer("b")])
    assert whole(sample) == "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\nb<|im_end|>"


def test_the_default_system_message_is_added_where_there_is_none() -> None:
    adjust = Adjust(default_system="Be brief.")
    for template in (
        open_jinja(NO_CALLS, adjust=adjust),
        BuiltIn("chatml", open_kind(KIND), "assistant", adjust=adjust),
    ):
        [sample] = samples_of(template, [user("a"), answer("b")])
        assert whole(sample).startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\na")
        [sample] = samples_of(template, [{"role": "system", "content": "s"}, user("a"), answer("b")])
        assert whole(sample).startswith("<|im_start|>system\ns<|im_end|>\n")
    samples = samples_of(open_jinja(STRIPPED, "apart", adjust=adjust), TWO)
    assert [sample.turn for sample in samples] == [1, 3], "turns are numbered as in the record"


def test_errors_number_messages_as_the_record_does() -> None:
    adjust = Adjust(default_system="Be brief.")
    for template in (
        open_jinja(NO_CALLS, adjust=adjust),
        BuiltIn("chatml", open_kind(KIND), "assistant", adjust=adjust),
    ):
        with pytest.raises(Reject, match=r"messages\[1\] has reasoning"):
            samples_of(template, TWO[:2])
    system_in_last = open_jinja(MODERN["system message in the last user turn"], adjust=adjust)
    with pytest.raises(Reject, match=r"messages\[0\] \(user\) .* in one text with the default system message"):
        samples_of(system_in_last, [user("a") | {"train": True}, answer("b")])


def test_calls_reach_the_template_in_its_own_form_or_are_rejected() -> None:
    messages = [user("a"), answer("", tool_calls=[CALL]), {"role": "tool", "content": "7"}, answer("b")]
    for source in (CALLS_IF_NULL, TEXT_ARGUMENTS):
        [sample] = samples_of(open_jinja(source), messages)
        assert trained(sample)[0].replace(" ", "") == '<tool_call>find{"x":1}</tool_call><|im_end|>'
    with pytest.raises(Reject, match=r"messages\[1\] calls 'find'"):
        samples_of(open_jinja(NO_CALLS), messages)


def test_two_names_of_reasoning_must_agree() -> None:
    with pytest.raises(Reject, match="reasoning_content and thinking differ"):
        read_record({"messages": [user("a"), answer("b", reasoning_content="r", thinking="s")]}, "messages")


# -- answers with only reasoning --------------------------------------------------------------------------------------

FIELD, WRITTEN = answer("", reasoning_content="r"), answer("<think>\nr\n</think>\n\n")


@pytest.mark.parametrize("message", [FIELD, WRITTEN, answer(" ", reasoning_content="r")])
def test_an_answer_of_nothing_but_reasoning_is_trained_on_as_the_template_writes_it(message: dict[str, Any]) -> None:
    [first, last] = samples_of(open_jinja(STRIPPED), [user("a"), message, user("c"), answer("d")])
    assert first.turn == 1
    assert "".join(trained(first)).rstrip(" ") in (
        "<think>\nr\n</think>\n\n<|im_end|>",
        "<think>\nr\n</think>\n\n <|im_end|>",
    )
    assert (last.turn, trained(last)) == (3, ["d<|im_end|>"])


@pytest.mark.parametrize("message", [FIELD, WRITTEN])
def test_nothing_is_left_to_train_on_of_such_an_answer_if_reasoning_is_dropped(message: dict[str, Any]) -> None:
    drop = Adjust(drop_reasoning=True)
    for template in (open_jinja(STRIPPED, adjust=drop), BuiltIn("chatml", open_kind(KIND), "assistant", adjust=drop)):
        [sample] = samples_of(template, [user("a"), message, user("c"), answer("d")])
        assert trained(sample) == ["d<|im_end|>"]
        with pytest.raises(Reject, match="its answers contain only reasoning, which") as found:
            samples_of(template, [user("a"), message])
        assert found.value.reason == "no_trained_tokens"


def test_such_an_answer_is_rejected_if_the_template_has_no_place_for_reasoning() -> None:
    for template in (open_jinja(NO_CALLS), BuiltIn("chatml", open_kind(KIND), "assistant")):
        with pytest.raises(Reject) as found:
            samples_of(template, [user("a"), FIELD, user("c"), answer("d")])
        assert found.value.reason == "reasoning_not_written"


# The prompt closes the reasoning, like `enable_thinking: false` in many templates, but turns still contain reasoning.
CLOSES = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
    "<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% if enable_thinking is false %}<think>\n\n</think>\n\n"
    "{% endif %}{% endif %}"
)


def test_reasoning_after_a_prompt_that_has_closed_it_is_refused() -> None:
    """Reasoning that would follow its closed block is refused.

    It would be trained on at a place where no model reasons.
    """
    messages = [user("a"), answer("b", reasoning_content="r")]
    [sample] = samples_of(open_jinja(CLOSES), messages)
    assert trained(sample) == ["<think>\nr\n</think>\n\nb<|im_end|>"]
    options = {"enable_thinking": False}
    with pytest.raises(Reject, match="the prompt closes the reasoning, so set `reasoning: drop`") as found:
        samples_of(open_jinja(CLOSES, options=options), messages)
    assert found.value.reason == "turn_not_located"
    dropped = open_jinja(CLOSES, options=options, adjust=Adjust(drop_reasoning=True))
    assert trained(samples_of(dropped, messages)[0]) == ["b<|im_end|>"]


# The template writes reasoning only in turns with calls.
BEFORE_CALLS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.tool_calls %}{{ m.reasoning_content }};"
    "{% for c in m.tool_calls %}{{ c.function | tojson }}{% endfor %}{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def test_reasoning_before_calls_is_trained_on_if_the_template_writes_it_there_alone() -> None:
    template = open_jinja(BEFORE_CALLS)
    [sample] = samples_of(template, [user("a"), answer("", reasoning_content="hmm", tool_calls=[CALL])])
    assert "".join(trained(sample)).startswith("hmm;{")
    with pytest.raises(Reject) as found:
        samples_of(template, [user("a"), answer("r", reasoning_content="r")])
    assert found.value.reason == "reasoning_not_written"


# The template writes reasoning only after a user message.
ONCE_ASKED = (
    "{% set ns = namespace(asked=false) %}{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'user' %}{% set ns.asked = true %}{% endif %}{% if ns.asked and m.reasoning_content %}<think>\n"
    "{{ m.reasoning_content }}\n</think>\n\n{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def test_a_conversation_with_reasoning_that_is_left_out_is_rejected_alone() -> None:
    template = open_jinja(ONCE_ASKED)
    greeted = [{"role": "system", "content": "s"}, answer("b", reasoning_content="r"), *TWO]
    with pytest.raises(Reject, match=r"messages\[1\] has reasoning, but .* does not write it here, although") as found:
        samples_of(template, greeted)
    assert found.value.reason == "reasoning_left_out"
    alike = [greeted[0], answer("b or r", reasoning_content="r"), *TWO]  # "r" is written, but not as the reasoning
    with pytest.raises(Reject, match="does not write it here"):
        samples_of(template, alike)
    records = [{"messages": messages} for messages in (TWO, greeted, TWO, greeted, TWO)]
    rows, receipt = tokenize(records, open_kind(KIND), open_jinja(ONCE_ASKED))
    assert (len(rows), [reason for _, reason, *_ in receipt["rejects"]]) == (3, ["reasoning_left_out"] * 2)
    greeted[1]["train"] = False
    [sample] = samples_of(template, greeted)
    assert trained(sample) == ["<think>\nr\n</think>\n\nb<|im_end|>", "<think>\ns\n</think>\n\nd<|im_end|>"]


def test_conversations_that_are_rendered_together_get_their_own_samples() -> None:
    """Conversations that are rendered together are not mixed up.

    Whether the template writes reasoning before calls is tested first, because the renderer is busy later.
    """
    called = answer("", reasoning_content="hmm", tool_calls=[CALL])
    messages = [[user("a"), called], [user("q"), answer("first")], [user("q"), answer("second")]]
    conversations = [read_record({"messages": each}, "messages") for each in messages]
    pairs = [(each, trained_turns(each, "assistant")) for each in conversations]
    _, *others = open_jinja(BEFORE_CALLS).all_samples(pairs)
    assert [trained(sample) for found in others for sample in found] == [["first<|im_end|>"], ["second<|im_end|>"]]  # type: ignore[union-attr]


def called(content: str) -> list[dict[str, Any]]:
    call = {"type": "function", "function": {"name": "find", "arguments": {}}}  # the template writes only names
    return [answer(content, tool_calls=[call]), {"role": "tool", "content": "5"}]


@pytest.mark.parametrize(
    ("messages", "prompt", "written"),
    [
        # The turn has text and a call. Its prompt ends the turn, and the answer continues it.
        ([*called("b"), answer("c")], "find</tool_call><result>5</result>b<|im_end|>\n", "c<|im_end|>"),
        ([*called("b"), *called("c"), answer("d")], "<result>5</result>b<|im_end|>\n", "<tool_call>find</tool_call>c"),
        ([*called("b"), *called(""), answer("d")], "<result>5</result>b<|im_end|>\n", "<tool_call>find</tool_call>"),
        # Without text, the prompt does not end the turn.
        ([*called(""), answer("c")], "find</tool_call><result>5</result>", "c<|im_end|>"),
    ],
)
def test_an_answer_that_continues_a_turn_follows_its_prompt(
    messages: list[dict[str, Any]], prompt: str, written: str
) -> None:
    samples = samples_of(open_jinja(CONTINUED, "apart"), [user("a"), *messages])
    second = "".join(span.text for span in samples[1].spans if not span.trained)
    assert second.endswith(prompt)
    assert trained(samples[1]) == [written]


@pytest.mark.parametrize("source", [PARTS, SELECTED_PARTS])
def test_contents_are_parts_if_the_template_writes_no_others(source: str) -> None:
    """Contents become parts if the template writes only parts.

    Otherwise the contents would be missing, and only end tokens would be trained on.
    """
    [sample] = samples_of(open_jinja(source), [user("a"), answer("<|im_end|>b"), user("c"), answer("d")])
    start = "<|im_start|>assistant\n"
    assert whole(sample) == (
        f"<|im_start|>user\na<|im_end|>\n{start}<|im_end|>b<|im_end|>\n<|im_start|>user\nc<|im_end|>\n{start}d<|im_end|>\n"
    )
    assert trained(sample) == ["<|im_end|>b<|im_end|>", "d<|im_end|>"]
    assert next(span.text for span in sample.spans if span.trained) == "<|im_end|>b"


def test_an_answer_that_the_template_does_not_write_is_rejected() -> None:
    with pytest.raises(
        Reject, match=r"messages\[1\] has content, but the template test\.jinja does not write it"
    ) as found:
        samples_of(open_jinja(QUESTIONS), [user("a"), answer("b")])
    assert found.value.reason == "answer_not_written"


def test_what_a_template_leaves_out_is_no_secret_if_all_is_trained_on() -> None:
    """With `train_on: all`, a sample lacks the reasoning of its history."""
    turns = [user("a"), answer("b", reasoning_content="first"), user("c"), answer("d", reasoning_content="second")]
    records = [{"messages": messages} for messages in (turns[:2], turns)]
    rows, receipt = tokenize(records, open_kind(KIND), open_jinja(STRIPPED, train_on="all"), "all")
    assert (len(rows), [reason for _, reason, *_ in receipt["rejects"]]) == (1, ["reasoning_left_out"])
    rows, receipt = tokenize(records, open_kind(KIND), open_jinja(NO_END, train_on="all"), "all")
    assert (rows, [reason for _, reason, *_ in receipt["rejects"]]) == ([], ["reasoning_not_written"] * 2)


SPACED = """{% for m in messages %}<|im_start|>{{ m.role }}
{% if m.role == 'assistant' and m.reasoning_content is defined %}<think> {{ m.reasoning_content }} </think>
{% endif %}{{ m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
<think>{% endif %}"""


@pytest.mark.parametrize(
    ("source", "written"),
    [(SPACED, "  </think>\nb<|im_end|>"), (SPACED.replace(" </think>\n", "</think>"), " </think>b<|im_end|>")],
)
def test_the_space_around_missing_reasoning_is_that_of_other_reasoning(source: str, written: str) -> None:
    [sample] = samples_of(open_jinja(source), [user("a"), answer("b")])
    assert trained(sample) == [written]


def test_a_turn_does_not_end_at_the_first_eos_token_if_its_content_follows() -> None:
    """The answer of some templates has several parts, each with an end token."""
    source = """{% for m in messages %}<|im_start|>{{ m.role }}
{% if m.reasoning_content %}{{ m.reasoning_content }}<|im_end|>{% endif %}{{ m.content }}<|im_end|><|im_start|>user
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
    for reasoning in ("r", "b b"):
        [sample] = samples_of(open_jinja(source), [user("a"), answer("b", reasoning_content=reasoning)])
        assert trained(sample) == [f"{reasoning}<|im_end|>b<|im_end|>"]


def test_a_call_that_a_template_leaves_out_is_named() -> None:
    first = "{% for c in (m.tool_calls or [])[:1] %}<call>{{ c.function.name }} {{ c.function.arguments }}"
    source = LOOP + "{{ m.content }}" + first + "</call>{% endfor %}<|im_end|>\n{% endfor %}" + PROMPT
    for name in ("open", CALL["function"]["name"]):
        calls = [CALL, *[{**CALL, "function": {"name": name, "arguments": {"x": 1}}}] * 2]
        message = r"messages\[1\] has 3 parallel calls, but the template test.jinja writes only the first of them; give"
        with pytest.raises(Reject, match=message) as caught:
            samples_of(open_jinja(source), [user("a"), answer("", tool_calls=calls)])
        assert caught.value.reason == "calls_not_written"
