"""Each built-in template follows the published rules of its family.

It also trains on the answers of its samples.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reference.families import RULES, Messages, Sample, readable, samples
from support.profiles import examples
from support.tokenizer_kinds import open_kind

from packcorpus.tasks.conversations.formats import read_record
from packcorpus.tasks.core.errors import Reject
from packcorpus.tasks.encoders.encoder import Encoder
from packcorpus.tasks.templates.built_in import BUILT_IN, BuiltIn
from packcorpus.tasks.templates.families.hermes import spaced, value_or_string
from packcorpus.tasks.templates.spans import Turns, trained_turns

MANY = settings(max_examples=examples(100), deadline=None)

CONTENTS = st.sampled_from(
    [
        "a",
        "b\n\nc",
        " a",
        "a ",
        "a  ",
        "\n a b\n",
        "a\n ",
        'über "x" \\ {}',
        "漢字 🙂\u2028",
        "\u00a0x\u00a0",
        "",
        " ",
        "\n",
    ]
)
RESULTS = st.one_of(
    CONTENTS, st.sampled_from(['{"t": [1,2.50]}', "18", " [1 , 2]\n", "null", '{"ü":"\\u00fc"}', "{a}"])
)
JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-9, 9), st.sampled_from([0.5, -1e22, 1e-7]), CONTENTS),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(CONTENTS, inner, max_size=3)),
    max_leaves=6,
)
OBJECTS = st.dictionaries(st.sampled_from(["town", "größe", "a b"]), JSON, max_size=3)


@st.composite
def records(draw: st.DrawFn) -> dict[str, Any]:
    """Draw a record of the format `messages` with turns in the usual order."""
    messages: Messages = []
    if draw(st.booleans()):
        messages.append({"role": "system", "content": draw(CONTENTS)})
    for _ in range(draw(st.integers(1, 3))):
        messages.append({"role": "user", "content": draw(CONTENTS)})
        for _ in range(draw(st.integers(0, 2))):
            count = draw(st.integers(1, 3))
            functions = [{"name": f"look_{number}", "arguments": draw(OBJECTS)} for number in range(count)]
            calls = [{"id": f"call_{n:04}", "type": "function", "function": f} for n, f in enumerate(functions)]
            messages.append({"role": "assistant", "content": draw(CONTENTS), "tool_calls": calls})
            for call in calls:
                messages.append({"role": "tool", "content": draw(RESULTS), "tool_call_id": call["id"]})
        messages.append({"role": "assistant", "content": draw(CONTENTS)})
    messages[-1]["content"] += "."
    record: dict[str, Any] = {"messages": messages}
    if draw(st.booleans()):
        described = {"name": "look_0", "description": draw(CONTENTS), "parameters": draw(OBJECTS)}
        record["tools"] = [{"type": "function", "function": described}] * draw(st.integers(1, 2))
    return record


def written(template: str, record: dict[str, Any], encoder: Encoder, turns: Turns = "auto") -> list[Sample]:
    conversation = read_record(record, "messages")
    bound = BuiltIn(template, encoder, "assistant", turns)
    found = bound.samples(conversation, trained_turns(conversation, "assistant"))
    return [readable([(span.text, span.trained) for span in sample.spans], "", "") for sample in found]


def published(template: str, record: dict[str, Any], adds_space: bool, bos: str, eos: str) -> list[Sample]:
    found = samples(template, record["messages"], record.get("tools", []), "assistant", adds_space)
    return [readable(sample, bos, eos) for sample in found]


@pytest.mark.parametrize("template", RULES)
def test_a_template_writes_what_its_family_publishes(template: str) -> None:
    encoder = open_kind("sp_bpe_chatml")

    @MANY
    @given(records())
    def check(record: dict[str, Any]) -> None:
        assert written(template, record, encoder) == published(template, record, True, "<s>", "</s>")

    check()


CALL = {"function": {"name": "look", "arguments": {}}, "id": "a"}


@pytest.mark.parametrize(
    "turns",
    [
        [("user", "a"), ("assistant", "b"), ("system", "c"), ("user", "d"), ("assistant", "e")],
        [("assistant", "a"), ("assistant", "b"), ("system", "c")],
        [("system", ""), ("assistant", "a")],
        [("user", ""), ("user", "a"), ("system", ""), ("tool", "b"), ("assistant", "c")],
        [("user", "a"), ("call", " "), ("tool", "b"), ("assistant", "c")],
    ],
)
@pytest.mark.parametrize("template", RULES)
def test_an_unusual_order_is_written_as_the_reference_says(template: str, turns: list[tuple[str, str]]) -> None:
    """Unusual orders follow docs/reference/formats.md, because no family defines them."""
    calls = {"role": "assistant", "tool_calls": [CALL]}
    messages = [{"role": role, "content": text} | (calls if role == "call" else {}) for role, text in turns]
    record = {"messages": messages}
    expected = published(template, record, True, "<s>", "</s>")
    assert written(template, record, open_kind("sp_bpe_chatml")) == expected


def test_plain_text_after_bos_has_its_space_after_an_empty_message() -> None:
    messages = [{"role": role, "content": text} for role, text in (("system", ""), ("user", "a"), ("assistant", "b"))]
    conversation = read_record({"messages": messages}, "messages")
    spans = BuiltIn("plain", open_kind("sp_bpe_chatml"), "assistant").spans(conversation, [False, False, True])
    assert [(span.text, span.start) for span in spans] == [("<s>", False), ("a", True), ("b", False), ("</s>", False)]


def test_every_template_is_compared() -> None:
    assert set(RULES) == set(BUILT_IN)


def test_mistral_writes_no_space_for_a_tokenizer_that_adds_none() -> None:
    encoder = open_kind("hf_byte_level")
    bos = encoder.control_strings[encoder.bos_id] if encoder.adds_bos and encoder.bos_id is not None else ""

    @MANY
    @given(records())
    def check(record: dict[str, Any]) -> None:
        eos = encoder.control_strings[encoder.eos_id]
        assert written("mistral", record, encoder) == published("mistral", record, False, bos, eos)

    check()


def test_together_refuses_what_mistral_writes_otherwise_later() -> None:
    messages = [{"role": role, "content": "a"} for role in ("system", "user", "assistant", "user", "assistant")]
    encoder = open_kind("sp_bpe_chatml")
    with pytest.raises(Reject, match=r"template mistral: messages\[2\] \(assistant\) .* set turns: auto"):
        written("mistral", {"messages": messages}, encoder, "together")
    assert len(written("mistral", {"messages": messages}, encoder)) == 2
    assert len(written("mistral", {"messages": messages[1:]}, encoder, "together")) == 1
    messages[0]["content"] = ""
    assert len(written("mistral", {"messages": messages}, encoder, "together")) == 1


@pytest.mark.parametrize("has_input", [False, True])
def test_alpaca_mentions_an_input_only_if_there_is_one(has_input: bool) -> None:
    record = {"instruction": "Add.", "input": "2 and 2" * has_input, "output": "4"}
    conversation = read_record(record, "alpaca")
    spans = BuiltIn("alpaca", open_kind("sp_bpe_chatml"), "assistant").spans(conversation, [False, True])
    text = "".join(span.text for span in spans)
    assert ("a task, paired with an input that provides further context. Write" in text) == has_input
    assert ("\n\n### Input:\n2 and 2\n\n### Response:\n4" in text) == has_input


def test_alpaca_begins_alike_with_an_empty_system_message_and_without_one() -> None:
    """An alpaca text begins the same without and with an empty system message.

    This includes the space that SentencePiece adds to the start of a text.
    """
    turns = [{"role": "user", "content": "Add."}, {"role": "assistant", "content": "4"}]
    encoder, found = open_kind("sp_bpe_chatml"), []
    for system in ([], [{"role": "system", "content": ""}], [{"role": "system", "content": " \n"}]):
        conversation = read_record({"messages": [*system, *turns]}, "messages")
        trained = trained_turns(conversation, "assistant")
        found.append(BuiltIn("alpaca", encoder, "assistant").spans(conversation, trained))
    assert found[0] == found[1] == found[2]
    assert found[0][1].start


@pytest.mark.parametrize("template", BUILT_IN)
def test_tools_are_described_once_whatever_the_family(template: str) -> None:
    tool = {"type": "function", "function": {"name": "look", "parameters": {}}}
    for system in ([], [{"role": "system", "content": "Be brief."}], [{"role": "system", "content": ""}]):
        messages = [*system, {"role": "user", "content": "Ulm?"}, {"role": "assistant", "content": "Yes."}]
        [sample] = written(template, {"messages": messages, "tools": [tool]}, open_kind("sp_bpe_chatml"))
        text = "".join(text for text, _ in sample)
        assert text.count('{"type": "function", "function": {"name": "look", "parameters": {}}}') == 1
        has_system = any(message["content"] for message in system)
        assert ("appropriately completes" in text) == (template == "alpaca" and not has_system)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"a":[1,2.50,null]}', '{"a": [1, 2.5, null]}'),
        ("", '""'),
        ("rain", '"rain"'),
        ('{"a": 1, "a": 2}', '"{\\"a\\": 1, \\"a\\": 2}"'),
        ("NaN", '"NaN"'),
        ("1e999", '"1e999"'),
        ('"\\ud800"', '"\\"\\\\ud800\\""'),
        ("[" * 99999 + "]" * 99999, '"' + "[" * 99999 + "]" * 99999 + '"'),
        ("[" * 801 + "]" * 801, '"' + "[" * 801 + "]" * 801 + '"'),
        ("[" * 800 + '"[{", 1]' + "]" * 799 + " ", "[" * 800 + '"[{", 1]' + "]" * 799),
        (f"[{'[],' * 999}0]", f"[{'[], ' * 999}0]"),
    ],
)
def test_json_that_python_would_change_stays_a_string(text: str, expected: str) -> None:
    assert value_or_string(text) == expected


def test_arguments_that_are_nested_too_deeply_are_rejected() -> None:
    for depth in (801, 99999):
        with pytest.raises(Reject, match="nested too deeply"):
            spaced("[" * depth + "]" * depth)
    assert spaced("[" * 800 + "]" * 800) == "[" * 800 + "]" * 800
