"""Built-in templates write and train on the expected text.

Content stays content with every tokenizer.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from itertools import groupby
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.profiles import examples
from support.tokenizer_kinds import (
    KINDS,
    check_row,
    control_strings,
    everywhere,
    hostile,
    open_kind,
    ordinary,
    records,
    tokenize,
    with_inner_spaces,
)

from packcorpus.tasks.conversations.formats import read_record
from packcorpus.tasks.conversations.model import Conversation, Message, ToolCall
from packcorpus.tasks.core.errors import Reject, UsageError
from packcorpus.tasks.encoders.encoder import Encoder
from packcorpus.tasks.templates.built_in import BUILT_IN, MARKERS, BuiltIn, built_in_sha256
from packcorpus.tasks.templates.sections import ALL_SECTIONS, Sections
from packcorpus.tasks.templates.spans import TEXT, Span, TrainOn, trained_turns
from packcorpus.tasks.tokenization.samples import segments_of

FEW = settings(max_examples=examples(8), deadline=None, suppress_health_check=[HealthCheck.too_slow])

TRAIN_ON: tuple[TrainOn, ...] = ("assistant", "all", "last", "rounds")


def texts_of(spans: list[Span], trained: bool = True) -> list[str]:
    """Return the text of each trained run of spans, or of each untrained run."""
    runs: list[str] = []
    before = False
    for span in spans:
        if span.trained == trained:
            runs[len(runs) - before :] = [runs[-1] + span.text if before else span.text]
        before = span.trained == trained
    return runs


def spans_of(
    template: str, conversation: Conversation, encoder: Encoder, train_on: TrainOn = "assistant"
) -> list[Span]:
    return BuiltIn(template, encoder, train_on).spans(conversation, trained_turns(conversation, train_on))


# -- golden texts for human readers -----------------------------------------------------------------------------------

CONVERSATION = Conversation(
    (
        Message("system", "Be brief."),
        Message("user", "Weather?", context="Town: Ulm"),
        Message("assistant", "", tool_calls=(ToolCall("weather", '{"town": "Ulm"}', "call_1"),)),
        Message("tool", "rain", tool_call_id="call_1"),
        Message("assistant", "It rains."),
        Message("user", "Thanks"),
        Message("assistant", "Bye."),
    ),
    ('{"name":"weather"}',),
)

CALL = '<tool_call>\n{"name": "weather", "arguments": {"town": "Ulm"}}\n</tool_call>'
TOOLS = (
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n"
    '<tools>\n{"name": "weather"}\n</tools>\n\n'
    "For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML "
    'tags:\n<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
)
SYSTEM = f"Be brief.\n\n{TOOLS}"

# template: the text that it writes for CONVERSATION, and the trained parts of the text (train_on: assistant)
GOLDEN: dict[str, tuple[str, list[str]]] = {
    "chatml": (
        f"<|im_start|>system\n{SYSTEM}<|im_end|>\n"
        "<|im_start|>user\nWeather?\n\nTown: Ulm<|im_end|>\n"
        f"<|im_start|>assistant\n{CALL}<|im_end|>\n"
        "<|im_start|>user\n<tool_response>\nrain\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\nIt rains.<|im_end|>\n"
        "<|im_start|>user\nThanks<|im_end|>\n"
        "<|im_start|>assistant\nBye.<|im_end|>",
        [f"{CALL}<|im_end|>", "It rains.<|im_end|>", "Bye.<|im_end|>"],
    ),
    "llama2": (
        f"<s>[INST] <<SYS>>\n{SYSTEM}\n<</SYS>>\n\nWeather?\n\nTown: Ulm [/INST] {CALL} </s>"
        "<s>[INST] <tool_response>\nrain\n</tool_response> [/INST] It rains. </s>"
        "<s>[INST] Thanks [/INST] Bye. </s>",
        [f" {CALL} </s>", " It rains. </s>", " Bye. </s>"],
    ),
    "llama3": (
        "<|begin_of_text|>"
        f"<|start_header_id|>system<|end_header_id|>\n\n{SYSTEM}<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nWeather?\n\nTown: Ulm<|eot_id|>"
        f"<|start_header_id|>assistant<|end_header_id|>\n\n{CALL}<|eot_id|>"
        "<|start_header_id|>ipython<|end_header_id|>\n\nrain<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\nIt rains.<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nThanks<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\nBye.<|eot_id|>",
        [f"{CALL}<|eot_id|>", "It rains.<|eot_id|>", "Bye.<|eot_id|>"],
    ),
    "mistral": (
        "<s>[INST] Weather?\n\nTown: Ulm[/INST]"
        '[TOOL_CALLS] [{"name": "weather", "arguments": {"town": "Ulm"}, "id": "call_1"}]</s>'
        '[TOOL_RESULTS] {"content": "rain", "call_id": "call_1"}[/TOOL_RESULTS] It rains.</s>'
        '[AVAILABLE_TOOLS] [{"name": "weather"}][/AVAILABLE_TOOLS]'
        "[INST] Be brief.\n\nThanks[/INST] Bye.</s>",
        [
            '[TOOL_CALLS] [{"name": "weather", "arguments": {"town": "Ulm"}, "id": "call_1"}]</s>',
            " It rains.</s>",
            " Bye.</s>",
        ],
    ),
    "zephyr": (
        f"<|system|>\n{SYSTEM}</s>\n"
        "<|user|>\nWeather?\n\nTown: Ulm</s>\n"
        f"<|assistant|>\n{CALL}</s>\n"
        "<|tool|>\nrain</s>\n"
        "<|assistant|>\nIt rains.</s>\n"
        "<|user|>\nThanks</s>\n"
        "<|assistant|>\nBye.</s>",
        [f"{CALL}</s>", "It rains.</s>", "Bye.</s>"],
    ),
    "alpaca": (
        f"<s>{SYSTEM}\n\n"
        "### Instruction:\nWeather?\n\n### Input:\nTown: Ulm\n\n"
        f"### Response:\n{CALL}</s>\n\n"
        "### Tool result:\nrain\n\n"
        "### Response:\nIt rains.</s>\n\n"
        "### Instruction:\nThanks\n\n"
        "### Response:\nBye.</s>",
        [f"{CALL}</s>", "It rains.</s>", "Bye.</s>"],
    ),
    "plain": (
        f"<s>{SYSTEM}Weather?\n\nTown: Ulm{CALL}</s>rainIt rains.</s>ThanksBye.</s>",
        [f"{CALL}</s>", "It rains.</s>", "Bye.</s>"],
    ),
}


@pytest.mark.parametrize("template", BUILT_IN)
def test_each_template_writes_and_trains_this(template: str) -> None:
    whole, answers = GOLDEN[template]
    spans = spans_of(template, CONVERSATION, open_kind("sp_bpe_chatml"))
    assert "".join(span.text for span in spans) == whole
    assert texts_of(spans) == answers
    last = spans_of(template, CONVERSATION, open_kind("sp_bpe_chatml"), "last")
    assert "".join(span.text for span in last) == whole
    assert texts_of(last) == answers[-1:]


def test_the_templates_are_all_here() -> None:
    assert set(GOLDEN) == set(BUILT_IN), "add the new template to GOLDEN"


def test_alpaca_without_a_system_message_says_what_to_do() -> None:
    conversation = Conversation((Message("user", "2+2?"), Message("assistant", "4")))
    spans = spans_of("alpaca", conversation, open_kind("sp_bpe_chatml"))
    preamble = (
        "Below is an instruction that describes a task. Write a response that appropriately completes the request."
    )
    expected = f"<s>{preamble}\n\n### Instruction:\n2+2?\n\n### Response:\n4</s>"
    assert "".join(span.text for span in spans) == expected


def test_training_on_all_takes_the_frame_of_a_trained_turn_and_nothing_of_one_of_weight_0() -> None:
    conversation = replace(CONVERSATION, messages=CONVERSATION.messages[3:6], tools=())
    quiet = replace(conversation.messages[1], train=False)
    conversation = replace(conversation, messages=(conversation.messages[0], quiet, conversation.messages[2]))
    spans = spans_of("chatml", conversation, open_kind("sp_bpe_chatml"), "all")
    assert texts_of(spans) == [
        "<|im_start|>user\n<tool_response>\nrain\n</tool_response><|im_end|>\n",
        "<|im_start|>user\nThanks<|im_end|>",
    ]


def test_markers_become_tokens_where_the_tokenizer_has_them() -> None:
    expected: dict[tuple[str, str], list[str]] = {
        ("chatml", "sp_bpe_chatml"): ["<|im_start|>", "<|im_end|>"] * 7,
        ("chatml", "sp_bpe_user_defined"): [],
        ("chatml", "hf_byte_level"): ["<|im_start|>", "<|im_end|>"] * 7,
        ("llama3", "hf_byte_level"): [
            "<|begin_of_text|>",
            *["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"] * 7,
        ],
        ("llama2", "hf_metaspace"): ["<s>", "</s>"] * 3,
        ("zephyr", "hf_legacy"): ["</s>"] * 7,
        ("mistral", "sp_bpe_user_defined"): ["<s>", "</s>", "</s>", "</s>"],
        ("mistral", "mistral_v3"): [
            *["<s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "</s>", "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "</s>"],
            *["[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[INST]", "[/INST]", "</s>"],
        ],
    }
    for (template, kind), controls in expected.items():
        encoder = open_kind(kind)
        spans = spans_of(template, CONVERSATION, encoder)
        assert [span.text for span in spans if span.token != TEXT] == controls, (template, kind)
        assert all(encoder.controls[span.text] == span.token for span in spans if span.token != TEXT)


@pytest.mark.parametrize("kind", ["hf_byte_level", "sp_bpe_user_defined", "hf_legacy"])
@pytest.mark.parametrize("template", BUILT_IN)
def test_a_marker_that_is_a_content_token_is_one_token_whoever_writes_it(template: str, kind: str) -> None:
    encoder = open_kind(kind)
    token = next(t for t in ("<tool_call>", "<think>") if t in encoder.content_tokens)
    call = {"id": "c" * 9, "function": {"name": "f", "arguments": {}}}
    calls = {"role": "assistant", "content": "", "tool_calls": [call]}
    tool, answer = (
        {"role": "tool", "content": "r", "tool_call_id": "c" * 9},
        {"role": "assistant", "content": f"a{token}b"},
    )
    written = [{"messages": [{"role": "user", "content": "u"}, *turns, answer]} for turns in ([], [calls, tool])]
    rows, receipt = tokenize(written, encoder, template)
    by_template = template != "mistral" and token == "<tool_call>"
    number = encoder.content_tokens[token]
    counts = [sum(row.ids.tolist().count(number) for row in rows if row.record == record) for record in (0, 1)]
    assert counts == [1, 1 + by_template]
    assert receipt["content_tokens"] == {token: {"assistant": 2}}


@pytest.mark.parametrize(
    ("template", "kind", "missing"),
    [
        ("chatml", "sp_bpe_chatml", ("<tool_call>", "</tool_call>")),
        ("chatml", "sp_unigram", ("<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>")),
        ("llama3", "hf_metaspace", MARKERS["llama3"]),
        ("mistral", "sp_bpe_user_defined", tuple(m for m in MARKERS["mistral"] if m != "[INST]")),
        ("mistral", "mistral_v3", ()),
        ("plain", "sp_unigram", ("<tool_call>", "</tool_call>")),
    ],
)
def test_markers_that_the_tokenizer_lacks_are_listed(template: str, kind: str, missing: tuple[str, ...]) -> None:
    assert BuiltIn(template, open_kind(kind), "assistant").markers_as_text == missing


def test_each_template_has_a_digest_of_its_own() -> None:
    assert len({built_in_sha256(name) for name in BUILT_IN}) == len(BUILT_IN)


# -- content stays content, and labels match the spans ----------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("template", BUILT_IN)
def test_every_control_string_in_every_field_is_text(template: str, kind: str) -> None:
    encoder = open_kind(kind)
    strings = control_strings(kind)
    halves = [part for s in strings[:40] for part in (s[: len(s) // 2], s[len(s) // 2 :])]
    given_records = [everywhere(text) for text in ("".join(strings), " ".join(strings[39::-1]), "".join(halves))]
    given_records += [everywhere(string) for string in strings[:20]]
    rows, receipt = tokenize(given_records, encoder, template, "all")
    assert receipt["rejects"] == []
    assert receipt["control_text_seen"] == sum(
        any(control in json.dumps(record) for control in encoder.controls) for record in given_records
    )
    for row, record in zip(rows, given_records, strict=True):
        check_row(row, spans_of(template, read_record(record, "messages"), encoder, "all"), encoder)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("template", BUILT_IN)
@settings(FEW, max_examples=examples(5))
@given(data=st.data(), train_on=st.sampled_from(TRAIN_ON))
def test_rows_are_what_the_spans_say(template: str, kind: str, data: st.DataObject, train_on: TrainOn) -> None:
    encoder = open_kind(kind)
    given_records = data.draw(st.lists(records(hostile(kind)), min_size=1, max_size=4))
    rows, receipt = tokenize(given_records, encoder, template, train_on)
    assert {code for _, code, _ in receipt["rejects"]} <= {"no_trained_tokens", "flag_not_followed"}
    assert len({row.record for row in rows}) + len(receipt["rejects"]) == len(given_records)
    for record, of_record in groupby(rows, key=lambda row: row.record):
        conversation = read_record(given_records[record], "messages")
        bound = BuiltIn(template, encoder, train_on)
        samples = bound.samples(conversation, trained_turns(conversation, train_on))
        for row, sample in zip(of_record, samples, strict=True):
            check_row(row, sample.spans, encoder)


# The text that a template writes between a prompt and the answer.
GENERATION_PROMPT = {
    "chatml": "\n<|im_start|>assistant\n",
    "llama2": "",
    "llama3": "<|start_header_id|>assistant<|end_header_id|>\n\n",
    "mistral": "",
    "zephyr": "\n<|assistant|>\n",
    "alpaca": "\n\n### Response:\n",
    "plain": "",
}


@pytest.mark.parametrize("kind", ["sp_bpe_chatml", "sp_unigram", "hf_byte_level", "hf_metaspace", "hf_legacy"])
@pytest.mark.parametrize("template", BUILT_IN)
def test_before_each_answer_stands_the_prompt_and_nothing_of_what_follows(template: str, kind: str) -> None:
    """The tokens before answer k equal messages[:k] with the generation prompt.

    This is true for all seven templates. llama2 and mistral close a request with its last message, so they have no
    generation prompt.
    """
    encoder = open_kind(kind)

    @FEW
    @given(records(ordinary(kind), usual=True))
    def check(record: dict[str, Any]) -> None:
        messages = record["messages"]
        answers = [k for k, m in enumerate(messages) if m["role"] == "assistant" and m["content"].strip()]
        answers = [k for k in answers if messages[k - 1]["role"] != "assistant"]
        prompts = [{"messages": [*messages[:k], {"role": "assistant", "content": "Zzz"}]} for k in answers]
        rows, _ = tokenize([record, *prompts], encoder, template)
        samples = [row for row in rows if row.record == 0]
        for number, k in enumerate(answers):
            asked = [row for row in rows if row.record == number + 1][-1]
            whole, run = (samples[0], number) if len(samples) == 1 else (samples[number], -1)
            start, at = runs(whole.trained)[run], runs(asked.trained)[-1]
            assert whole.ids[:start].tolist() == asked.ids[:at].tolist()
            conversation = read_record(prompts[number], "messages")
            flags = trained_turns(conversation, "assistant")
            builder = BuiltIn(template, encoder, "assistant")
            spans = builder.spans(conversation, flags)
            prefix = builder.spans(replace(conversation, messages=conversation.messages[:k]), flags[:k])
            last = max(i for i, span in enumerate(spans) if not span.trained)
            asked_for = "".join(span.text for span in spans[: last + 1])
            assert asked_for == "".join(span.text for span in prefix) + GENERATION_PROMPT[template]

    check()


def runs(trained: Any) -> list[int]:
    """Return the start of each run of trained tokens."""
    return [i for i, flag in enumerate(trained) if flag and not trained[i - 1]]


@pytest.mark.parametrize("kind", ["sp_bpe_chatml", "hf_byte_level", "hf_metaspace", "hf_legacy", "hf_unigram"])
@pytest.mark.parametrize("template", BUILT_IN)
def test_the_tokens_before_an_answer_do_not_depend_on_it(template: str, kind: str) -> None:
    encoder = open_kind(kind)

    @FEW
    @given(records(ordinary(kind), usual=True), st.lists(ordinary(kind), min_size=2, max_size=2))
    def check(record: dict[str, Any], ends: list[str]) -> None:
        versions = []
        for end in ["!", *ends]:
            last = {"role": "assistant", "content": "x" + end}
            versions.append({"messages": [*record["messages"][:-1], last]})
        rows, _ = tokenize(versions, encoder, template, "last")
        heads = {tuple(row.ids[: row.trained.argmax()].tolist()) for row in rows}
        assert len(heads) == 1

    check()


# -- trained turns ----------------------------------------------------------------------------------------------------

TURNS = Conversation(
    (
        Message("system", "s"),
        Message("user", "u1"),
        Message("assistant", "a1"),
        Message("user", " \n"),
        Message("assistant", "", tool_calls=(ToolCall("f", "{}"),)),
        Message("tool", "t"),
        Message("assistant", "a2", train=False),
        Message("user", "u2"),
        Message("assistant", " \n"),
        Message("assistant", "a3"),
        Message("user", "u3"),
    )
)


@pytest.mark.parametrize(
    ("train_on", "trained"),
    [("assistant", [2, 4, 9]), ("last", [9]), ("rounds", [9]), ("all", [0, 1, 2, 4, 5, 7, 9, 10])],
)
def test_the_turns_that_are_trained(train_on: TrainOn, trained: list[int]) -> None:
    assert [i for i, flag in enumerate(trained_turns(TURNS, train_on)) if flag] == trained


@pytest.mark.parametrize(
    ("roles", "trained"),
    [
        ("system user assistant tool assistant", [2, 4]),
        ("user assistant user user assistant tool tool assistant", [4, 7]),
        ("user assistant user assistant user", [3]),
        ("assistant tool assistant", [0, 2]),
        ("system user", []),
    ],
)
def test_a_round_begins_at_the_last_user_message_with_an_answer(roles: str, trained: list[int]) -> None:
    conversation = Conversation(tuple(Message(role, "a") for role in roles.split()))
    assert [k for k, flag in enumerate(trained_turns(conversation, "rounds")) if flag] == trained


def test_only_the_last_answer_counts_as_last_even_where_it_is_not_trained() -> None:
    for last in (Message("assistant", "a", train=False), Message("assistant", "")):
        conversation = Conversation((Message("user", "u"), Message("assistant", "a"), Message("user", "u"), last))
        assert not any(trained_turns(conversation, "last"))
        assert trained_turns(conversation, "assistant") == [False, True, False, False]


# -- contents and calls -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["sp_bpe_chatml", "hf_byte_level", "hf_legacy"])
@pytest.mark.parametrize("template", BUILT_IN)
def test_contents_and_calls_are_trained_by_themselves(template: str, kind: str) -> None:
    encoder = open_kind(kind)
    whole, contents, calls = (
        BuiltIn(template, encoder, "assistant", "together" if template != "mistral" else "auto", sections=sections)
        for sections in (ALL_SECTIONS, Sections(calls=False), Sections(content=False))
    )
    call = st.builds(ToolCall, st.sampled_from(["find", "f"]), st.sampled_from(["{}", '{"x": "y"}']))
    answer = st.builds(
        Message,
        st.just("assistant"),
        st.sampled_from(["", "Zebra", "Zebra.", "\nZebra\n", "Zebra <tool_call>"]),
        tool_calls=st.lists(call, max_size=2).map(tuple),
    )

    def ids_of(spans: list[Span]) -> list[int]:
        tokens, _, texts, _ = segments_of(spans, encoder)
        encoded = iter(encoder.encode([text]).ids.tolist() for text in texts)
        return [id for token in tokens for id in (next(encoded) if token == TEXT else [token])]

    @settings(FEW, max_examples=examples(100))
    @given(st.lists(st.tuples(answer, st.booleans()), min_size=1, max_size=3))
    def check(drawn: list[tuple[Message, bool]]) -> None:
        messages = [
            each for one, flag in drawn for each in (Message("user", "q"), replace(one, train=None if flag else False))
        ]
        conversation = Conversation(tuple(messages))
        trained = trained_turns(conversation, "assistant")
        if not any(trained):
            return
        found = [next(each.all_samples([(conversation, trained)])) for each in (whole, contents, calls)]
        samples = [each for each in found if isinstance(each, list)]
        if len(samples) < len(found):
            assert [each.reason for each in found if isinstance(each, Reject)] == ["parts_not_separate"] * 2
            assert kind != "hf_byte_level", "no token crosses a line break, and other markers are tokens"
            return
        for one, of_contents, of_calls in zip(*samples, strict=True):
            assert ids_of(one.spans) == ids_of(of_contents.spans) == ids_of(of_calls.spans)
            every, some, others = (
                [flag for span in sample.spans for flag in [span.trained] * max(1, len(span.text))]
                for sample in (one, of_contents, of_calls)
            )
            assert [a + b for a, b in zip(some, others, strict=True)] == [*map(int, every)]
            assert not re.search(r"find|\bf\b|<tool_call>\n", "".join(texts_of(of_contents.spans)))
            assert "Zebra" not in "".join(texts_of(of_calls.spans))

    check()


@pytest.mark.parametrize("sections", [Sections(reasoning=False), Sections(empty=False)])
def test_built_in_templates_have_no_reasoning_to_leave_out(sections: Sections) -> None:
    with pytest.raises(UsageError, match=r"(train_parts: \{reasoning: false\}|empty_reasoning: mask): the built-in"):
        BuiltIn("chatml", open_kind("sp_bpe_chatml"), "assistant", sections=sections)


@pytest.mark.parametrize("template", BUILT_IN)
def test_an_answer_of_weight_0_and_an_empty_one_are_not_trained(template: str) -> None:
    encoder = open_kind("sp_bpe_chatml")
    spans = spans_of(template, TURNS, encoder)
    said = "".join(texts_of(spans))
    assert "a1" in said
    assert "a3" in said
    assert "a2" not in said
    assert '"name": "f"' in said
    assert len(texts_of(spans)) == 3


@pytest.mark.parametrize("template", BUILT_IN)
@pytest.mark.parametrize("kind", KINDS)
def test_a_turn_with_a_flag_has_the_same_tokens(kind: str, template: str) -> None:
    encoder = open_kind(kind)

    @settings(FEW)
    @given(st.lists(ordinary(kind), min_size=5, max_size=5), st.sampled_from([(0,), (1,), (2, 4), (0, 2)]))
    def check(texts: list[str], flagged: tuple[int, ...]) -> None:
        roles = ("user", "assistant", "user", "assistant", "user")
        messages = [{"role": role, "content": f"{text}Q"} for role, text in zip(roles, texts, strict=True)]
        added = [m | ({"train": True} if k in flagged else {}) for k, m in enumerate(messages)]
        [before], [after] = (tokenize([{"messages": given}], encoder, template)[0] for given in (messages, added))
        assert after.ids.tolist() == before.ids.tolist()
        assert (after.trained >= before.trained).all()
        text = "".join(encoder.decode(after.ids[after.trained]).split())
        assert all("".join(texts[k].split()) in text for k in flagged)
        assert (after.trained == before.trained).all() == (flagged == (1,))

    check()


def test_a_turn_with_a_flag_that_shares_its_text_is_rejected() -> None:
    messages = [
        {"role": "system", "content": "s"}, {"role": "user", "content": "u", "train": True},
        {"role": "assistant", "content": "a"},
    ]  # fmt: skip
    for template in ("llama2", "mistral", "alpaca"):
        _, receipt = tokenize([{"messages": messages}], open_kind("sp_bpe_chatml"), template)
        assert [code for _, code, _ in receipt["rejects"]] == ["flag_not_followed"], template
    # Its text, without control tokens, holds an answer that is not trained on.
    untrained = [
        {"role": "user", "content": "q"}, {"role": "assistant", "content": "x", "train": False},
        {"role": "user", "content": "r", "train": True}, {"role": "assistant", "content": "b"},
    ]  # fmt: skip
    _, receipt = tokenize([{"messages": untrained}], open_kind("hf_byte_level"), "zephyr")
    assert receipt["rejects"] == []
    _, receipt = tokenize([{"messages": untrained}], open_kind("mistral_v3"), "llama3")
    assert [code for _, code, _ in receipt["rejects"]] == ["flag_not_followed"]
    both = [message | {"train": True} for message in messages]
    for template in BUILT_IN:
        [row], _ = tokenize([{"messages": both}], open_kind("sp_bpe_chatml"), template)
        assert row.trained.sum() > len(row.ids) / 3


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("train_on", TRAIN_ON)
def test_plain_text_is_trained_whole_and_framed_by_no_template(kind: str, train_on: TrainOn) -> None:
    encoder = open_kind(kind)
    text = "The train leaves at 9:40." + "".join(control_strings(kind)[:9])
    for template in BUILT_IN:
        [row], _ = tokenize([{"text": text}], encoder, template, train_on, format="text")
        ids = row.ids.tolist()
        assert row.separator
        assert ids[-1] == encoder.eos_id
        assert row.trained.tolist() == [False, *[True] * (len(ids) - 1)]
        start = [encoder.bos_id] if encoder.adds_bos else []
        assert ids[: len(start)] == start
        shown = encoder.decode(ids[len(start) : -1])
        assert shown.removeprefix(" ") == with_inner_spaces(text, encoder)


def test_a_conversation_that_trains_nothing_is_rejected() -> None:
    record = {"messages": [{"role": "user", "content": "u"}, {"role": "assistant", "content": " "}]}
    rows, receipt = tokenize([record], open_kind("sp_bpe_chatml"), "chatml")
    assert rows == []
    assert [(index, code) for index, code, _ in receipt["rejects"]] == [(0, "no_trained_tokens")]


def test_spans_are_never_a_reject_for_a_built_in_template() -> None:
    encoder = open_kind("hf_byte_level")
    for template in BUILT_IN:
        for messages in ([Message("assistant", "a")], [Message("tool", "t"), Message("system", "s")]):
            try:
                assert spans_of(template, Conversation(tuple(messages)), encoder)
            except Reject as reject:
                pytest.fail(f"{template}: {reject}")
