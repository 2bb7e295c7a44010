"""Jinja templates produce the tokens and labels of transformers.

Control tokens come only from the template.
"""

from __future__ import annotations

import functools
import json
import re
import unicodedata
from datetime import datetime
from itertools import chain, product
from typing import Any
from unittest import mock

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
from support.templates.modern_templates import INTRODUCED
from support.tokenizer_kinds import (
    CHATML_JINJA,
    Row,
    check_row,
    control_strings,
    everywhere,
    folder,
    hostile,
    kind_path,
    open_kind,
    ordinary,
    records,
    reference,
    tokenize,
)

from packcorpus.tasks.conversations.formats import read_record
from packcorpus.tasks.conversations.model import Conversation, Message
from packcorpus.tasks.core.errors import DataError, Reject, UsageError
from packcorpus.tasks.encoders.encoder import Encoder
from packcorpus.tasks.encoders.tokenizer_files import find_tokenizer, open_encoder
from packcorpus.tasks.templates.jinja import renderer
from packcorpus.tasks.templates.jinja.control_strings import ControlStrings
from packcorpus.tasks.templates.jinja.template import JinjaTemplate
from packcorpus.tasks.templates.spans import TEXT, Span, TrainOn, Turns, trained_turns

pytest.importorskip("transformers", reason="transformers renders chat templates and is not installed")
from transformers.utils.chat_template_utils import _compile_jinja_template, render_jinja_template

FEW = settings(max_examples=examples(10), deadline=None, suppress_health_check=[HealthCheck.too_slow])

TEMPLATES = {
    "chatml": CHATML_JINJA,
    "chatml_marked": CHATML_MARKED,
    "llama3": LLAMA3,
    "llama3_marked": LLAMA3_MARKED,
    "llama2": LLAMA2,
    "tools": TOOLS,
    "alternating": ALTERNATING,
    "dated": DATED,
}
HF = ("hf_byte_level", "hf_metaspace", "hf_legacy")


def jinja(
    source: str, kind: str, train_on: TrainOn = "assistant", today: str = "2026-01-01", turns: Turns = "auto"
) -> JinjaTemplate:
    return JinjaTemplate("test.jinja", source, open_kind(kind), train_on, today, turns)


def spans_of(template: JinjaTemplate, record: dict[str, Any], train_on: TrainOn = "assistant") -> list[Span]:
    conversation = read_record(record, "messages")
    return template.spans(conversation, trained_turns(conversation, train_on))


def its_own(row: Row) -> list[int]:
    """Return the ids of the row without the separator."""
    return row.ids.tolist()[: len(row.ids) - row.separator]


def starts(row: Row) -> list[int]:
    return [i for i, flag in enumerate(row.trained) if flag and not row.trained[i - 1]]


# -- the reference ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", HF)
@pytest.mark.parametrize("name", TEMPLATES)
def test_tokens_and_labels_are_those_of_transformers(name: str, kind: str) -> None:
    """Tokens and labels equal those of transformers, without control text in contents.

    Answers begin with a letter. packcorpus encodes an answer from its own start, but transformers would join leading
    white space with the line end before it.
    """
    source, library = TEMPLATES[name], reference(kind)
    render = functools.partial(library.apply_chat_template, chat_template=source, return_dict=False)
    _compile_jinja_template(source).environment.globals["strftime_now"] = datetime(2026, 1, 1).strftime
    template = jinja(source, kind)

    @FEW
    @given(records(ordinary(kind), usual=True))
    def check(record: dict[str, Any]) -> None:
        messages = [m | {"content": "Zz" + m["content"]} for m in record["messages"][:-1] if m["role"] != "system"]
        if name == "tools":
            call = {"type": "function", "function": {"name": "f", "arguments": {"a": messages[0]["content"], "b": 1}}}
            messages[-1] |= {"tool_calls": [call]}
            messages += [{"role": "tool", "name": "f", "content": "7"}, {"role": "assistant", "content": "Seven."}]
        tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}] if name == "tools" else None
        [row], _ = tokenize([{"messages": messages, "tools": tools}], open_kind(kind), template)
        assert its_own(row) == render(messages, tools=tools, tokenize=True)

        answers = [k for k, message in enumerate(messages) if message["role"] == "assistant"]
        prompts = [render(messages[:k], tools=tools, tokenize=True, add_generation_prompt=True) for k in answers]
        assert [at for at in starts(row) if at < len(its_own(row))] == [len(prompt) for prompt in prompts]
        assert all(row.ids[: len(prompt)].tolist() == prompt for prompt in prompts)
        if "marked" in name:
            whole = library.apply_chat_template(
                messages, chat_template=source, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
            )
            assert row.trained[: len(whole["input_ids"])].tolist() == [bool(flag) for flag in whole["assistant_masks"]]

    check()


@pytest.mark.parametrize("kind", HF)
def test_the_tokenizers_own_template_is_read_from_its_folder(kind: str) -> None:
    source = find_tokenizer(kind_path(kind)).chat_template()
    assert source == reference(kind).chat_template == CHATML_JINJA


def test_the_trained_turns_read_by_eye() -> None:
    record = {
        "messages": [
            {"role": "user", "content": "2+2?"},
            {"role": "assistant", "content": "4"},
            {"role": "user", "content": "Sure?"},
            {"role": "assistant", "content": "Yes.", "weight": 0},
            {"role": "user", "content": "And 3+3?"},
            {"role": "assistant", "content": "6"},
        ]
    }
    expected: dict[tuple[str, TrainOn], list[str]] = {
        ("chatml", "assistant"): ["4<|im_end|>", "6<|im_end|>"],
        ("chatml_marked", "assistant"): ["4<|im_end|>", "6<|im_end|>"],
        ("chatml", "last"): ["6<|im_end|>"],
        ("llama2", "assistant"): [" 4 <|im_end|>", " 6 <|im_end|>"],
        ("chatml", "all"): [
            "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n4<|im_end|>\n<|im_start|>user\nSure?<|im_end|>\n",
            "\n<|im_start|>user\nAnd 3+3?<|im_end|>\n<|im_start|>assistant\n6<|im_end|>\n",
        ],
    }
    for (name, train_on), runs in expected.items():
        spans = spans_of(jinja(TEMPLATES[name], "hf_byte_level", train_on), record, train_on)
        found = "".join(span.text if span.trained else "\0" for span in spans)
        assert [run for run in found.split("\0") if run] == runs, (name, train_on)


def test_white_space_behind_the_stop_token_is_not_trained_and_no_separator_follows_it() -> None:
    [row], _ = tokenize(
        [{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}],
        open_kind("hf_byte_level"),
        jinja(CHATML_JINJA, "hf_byte_level"),
    )
    encoder = open_kind("hf_byte_level")
    assert encoder.decode(row.ids[-2:]) == "<|im_end|>\n"
    assert row.trained[-3:].tolist() == [True, True, False]
    assert not row.separator


@pytest.mark.parametrize(
    ("end", "after"), [*product(("<|eot_id|>", "<|im_end|>"), ("", "\n")), ("</tool_call>", "")], ids=str
)
def test_the_separator_follows_the_end_token_of_a_turn_unless_that_is_eos(end: str, after: str) -> None:
    """A separator follows unless the turn ends with EOS, here <|im_end|>.

    The separator is trained on, because some runtimes stop only at EOS.
    """
    source = (
        "{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>{{ m.content }}" + end + "{% endfor %}"
        "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>{% else %}{{ after }}{% endif %}"
    )
    messages = [{"role": role, "content": text} for role, text in zip(("user", "assistant") * 2, "abcd", strict=True)]
    encoder = open_kind("hf_byte_level")
    template = JinjaTemplate("t", source, encoder, "assistant", "2026-01-01", options={"after": after})
    [row], _ = tokenize([{"messages": messages}], encoder, template)
    ids = its_own(row)
    assert encoder.decode(ids) == render_jinja_template([messages], chat_template=source, after=after)[0][0]
    assert [encoder.decode(ids[start : start + 2]) for start in starts(row)[:2]] == ["b" + end, "d" + end]
    is_eos = end == "<|im_end|>"
    assert row.separator != is_eos
    assert [*row.ids].count(encoder.eos_id) == 4 * is_eos + row.separator
    assert [bool(flag) for flag in row.trained[len(ids) :]] == [True] * row.separator


def test_plain_text_is_framed_by_no_template() -> None:
    [row], _ = tokenize([{"text": "a b"}], open_kind("hf_byte_level"), jinja(LLAMA3, "hf_byte_level"), format="text")
    assert open_kind("hf_byte_level").decode(row.ids) == "<|begin_of_text|>a b<|im_end|>"


# -- content stays content --------------------------------------------------------------------------------------------


FORM = {"messages", "tools", "role", "content", "name", "tool_calls", "tool_call_id", "id", "type", "function"}
FORM |= {"arguments", "parameters", "k", "weight"}


def harmless(value: Any, known: bool = False) -> Any:
    """Replace every string of a record with x, except known keys, roles, and types."""
    if isinstance(value, str):
        return value if known else "x"
    if isinstance(value, dict):
        return {k if k in FORM else "x": harmless(item, known=k in ("role", "type")) for k, item in value.items()}
    return [harmless(item) for item in value] if isinstance(value, list) else value


def controls_of(row: Row, encoder: Encoder) -> list[str]:
    known = set(encoder.controls.values()) - {encoder.unk_id}
    return [encoder.control_strings[int(number)] for number in row.ids if int(number) in known]


@pytest.mark.slow
@pytest.mark.parametrize("kind", HF)
@pytest.mark.parametrize("name", ["chatml", "chatml_marked", "llama3", "tools", "joined"])
def test_the_control_tokens_are_those_that_the_template_writes(name: str, kind: str) -> None:
    """The control tokens equal those of the same record with x for every text."""
    encoder, source = open_kind(kind), {**TEMPLATES, "joined": JOINED}[name]
    # With `apart`, an answer that begins with white space would have its own sample.
    template = jinja(source, kind, "last" if name == "joined" else "assistant", turns="together")
    strings = control_strings(kind)
    given_records = [everywhere(text) for text in (*strings, "".join(strings), " ".join(strings))]
    given_records += [everywhere(string[:cut]) for string in strings for cut in range(1, len(string))]
    given_records += [everywhere(string[cut:]) for string in strings for cut in range(1, len(string))]

    def check(found: list[dict[str, Any]]) -> None:
        for record in found:
            if name != "tools":  # the other templates do not write tools
                record.pop("tools", None)
            for message in record["messages"]:
                if name not in ("tools", "joined"):  # these templates write calls
                    message.pop("tool_calls", None)
            record["messages"][-1]["content"] = record["messages"][-1]["content"] or "x"
        rows, _ = tokenize(found, encoder, template)
        # With x for every text, most records are equal. Each is tokenized once.
        keys = [json.dumps(harmless(found[row.record])) for row in rows]
        forms = list(dict.fromkeys(keys))
        plain, _ = tokenize([json.loads(form) for form in forms], encoder, template)
        expected = {form: controls_of(row, encoder) for form, row in zip(forms, plain, strict=True)}
        for row, key in zip(rows, keys, strict=True):
            assert controls_of(row, encoder) == expected[key], found[row.record]

    check(given_records)
    FEW(given(st.lists(records(hostile(kind)), min_size=1, max_size=4))(check))()


@pytest.mark.parametrize("space", ["", " ", "\n"])
def test_a_control_string_that_the_template_joins_from_adjacent_fields_is_text(space: str) -> None:
    encoder = open_kind("hf_byte_level")
    template = jinja(
        "<|im_start|>{% for m in messages %}{{ m.name | trim }}{{ m.content | trim }}{{ m.tool_call_id }}{% endfor %}"
        "<|eot_id|>",
        "hf_byte_level",
        "all",
    )
    for string in encoder.controls:
        for first in range(len(string)):
            for second in range(first, len(string) + 1):
                parts = (string[:first] + space, space + string[first:second] + space, string[second:])
                message = dict(zip(("name", "content", "tool_call_id"), parts, strict=True))
                turns = [{"role": "user", "content": "a"}, {"role": "assistant", **message}]
                spans = template.spans(read_record({"messages": turns}, "messages"), [True, True])
                assert [s.text for s in spans if s.token != TEXT] == ["<|im_start|>", "<|eot_id|>"], parts
                said = parts[0].strip() + parts[1].strip() + parts[2]
                assert "".join(s.text for s in spans if s.token == TEXT) == "a" + said


@pytest.mark.parametrize("name", ["chatml", "chatml_marked", "llama3", "llama2", "tools", "joined"])
def test_what_is_written_is_what_transformers_renders_whatever_is_said(name: str) -> None:
    """Breaking control strings in contents neither loses, adds, nor moves a character."""
    source, library = {**TEMPLATES, "joined": JOINED}[name], reference("hf_byte_level")
    template = jinja(source, "hf_byte_level", "all")

    @FEW
    @given(records(hostile("hf_byte_level")))
    def check(record: dict[str, Any]) -> None:
        if name not in ("tools", "joined"):  # the other templates write no tools, and no calls
            record.pop("tools", None)
        for message in record["messages"]:
            message.pop("weight", None)
            if name not in ("tools", "joined"):
                message.pop("tool_calls", None)
        spans = template.spans(*_all(record))
        rendered = library.apply_chat_template(
            record["messages"], tools=record.get("tools"), chat_template=source, tokenize=False
        )
        assert "".join(span.text for span in spans) == rendered

    def _all(record: dict[str, Any]) -> Any:
        conversation = read_record(record, "messages")
        return conversation, [True] * len(conversation.messages)

    check()


@pytest.mark.parametrize("kind", HF)
@pytest.mark.parametrize("name", ["chatml", "llama3_marked", "llama2"])
def test_rows_are_what_the_spans_say(name: str, kind: str) -> None:
    encoder = open_kind(kind)
    template_for = functools.cache(functools.partial(jinja, TEMPLATES[name], kind))

    @FEW
    @given(
        st.lists(records(hostile(kind)), min_size=1, max_size=3),
        st.sampled_from(["assistant", "last", "rounds", "all"]),
    )
    def check(given_records: list[dict[str, Any]], train_on: TrainOn) -> None:
        template = template_for(train_on)
        rows, _ = tokenize(given_records, encoder, template, train_on)
        for row in rows:
            check_row(row, spans_of(template, given_records[row.record], train_on), encoder)

    check()


@functools.cache
def odd() -> tuple[Encoder, Any]:
    """Return a tokenizer with odd control strings.

    Some have one character, some contain other control strings, and some absorb the white space next to them.
    """
    from tokenizers import AddedToken, Tokenizer
    from transformers import PreTrainedTokenizerFast

    place = folder() / "odd"
    place.mkdir(exist_ok=True)
    tokenizer = Tokenizer.from_file(str(kind_path("hf_byte_level") / "tokenizer.json"))
    plain = [AddedToken(content, special=True, normalized=False) for content in ("⏹", "<x>", "<|a|><x>", "aa<x")]
    tokenizer.add_special_tokens(plain)
    tokenizer.add_special_tokens([AddedToken("<|end|>", rstrip=True, special=True, normalized=False)])
    tokenizer.add_special_tokens([AddedToken("<mask>", lstrip=True, special=True, normalized=False)])
    tokenizer.save(str(place / "tokenizer.json"))
    (place / "tokenizer_config.json").write_bytes((kind_path("hf_byte_level") / "tokenizer_config.json").read_bytes())
    return open_encoder(find_tokenizer(place)), PreTrainedTokenizerFast.from_pretrained(str(place))


ODD = (
    "{% for m in messages %}<|a|><x>{{ m.role }}<|end|>\n\n{{ m.content }} <mask>⏹{% endfor %}"
    "{% if add_generation_prompt %}<|a|><x>assistant<|end|>\n\n{% endif %}"
)


def test_odd_control_strings_in_content_are_text() -> None:
    encoder, _ = odd()
    template = JinjaTemplate("odd", ODD, encoder, "assistant", "2026-01-01")
    for text in ("⏹", "a⏹", "⏹⏹", "<|a|><x>", "<|a|>", "aa<x>", "<x><x>", "<mask>", "<|end|>", "aa<|a|><x>⏹"):
        record = {"messages": [{"role": "user", "content": text}, {"role": "assistant", "content": "b" + text}]}
        spans = spans_of(template, record)
        assert [s.text for s in spans if s.token != TEXT] == ["<|a|><x>", "<|end|>", "<mask>", "⏹"] * 2, text
        assert "".join(s.text for s in spans if s.token == TEXT and not s.trained) == f"user{text}assistant"


@pytest.mark.parametrize(
    "content",
    [
        "\n\n{{ m.content }} <mask>",
        "\n\n{{ m.content }}",
        "\n\n{{ m.content }}x<mask>",
        "\n\n{{ m.content[:1000] }}",
        "{{ m.content[:1000] }}",
        "x{{ m.content[:1000] }}<mask>",
    ],
)
def test_control_tokens_swallow_the_white_space_that_they_swallow_in_transformers(content: str) -> None:
    """This includes a token that swallows white space on one side of a content."""
    encoder, library = odd()
    source = ODD.replace("<|end|>\n\n{{ m.content }} <mask>", "<|end|>" + content)
    template = JinjaTemplate("odd", source, encoder, "assistant", "2026-01-01")

    @FEW
    @example(" a ", "b ")
    @example("\n\na", "b\n")
    @given(ordinary("hf_byte_level"), ordinary("hf_byte_level"))
    def check(first: str, second: str) -> None:
        messages = [{"role": "user", "content": first}, {"role": "assistant", "content": "Z" + second}]
        [row], _ = tokenize([{"messages": messages}], encoder, template)
        assert its_own(row) == library.apply_chat_template(
            messages, chat_template=source, tokenize=True, return_dict=False
        )

    check()


def test_a_conversation_that_uses_private_characters_keeps_them() -> None:
    template = jinja(CHATML_JINJA, "hf_byte_level")
    text = "\ue000<|im_end|>\ue001 \\ue002"
    record = {"messages": [{"role": "user", "content": text}, {"role": "assistant", "content": text}]}
    spans = spans_of(template, record)
    assert "".join(span.text for span in spans).count(text) == 2
    assert sum(span.token != TEXT for span in spans) == 4


# All private characters of Unicode.
PRIVATE = [*map(chr, chain(range(0xE000, 0xF900), range(0xF0000, 0xFFFFE), range(0x100000, 0x10FFFE)))]


@pytest.mark.parametrize("private", ["\ue000", "\U000f0000"])
@pytest.mark.parametrize("cut", [1, 2, 3, 5, -1])
def test_texts_that_follow_each_other_are_no_escaped_private_character(private: str, cut: int) -> None:
    """Contents that together spell an escaped private character are kept.

    A control string is broken by a private character, whose escaped form is removed from a rendering.
    """
    form = json.dumps(private)[1:-1]
    others = "".join(PRIVATE[: PRIVATE.index(private)])
    template = jinja(
        CHATML_JINJA.replace("message.content", "messages[0].content ~ messages[-1].content"), "hf_byte_level"
    )
    turns = [f"<|im_end|>{others}a{form[:cut]}", f"{form[cut:]}b"]
    record = {"messages": [{"role": "user", "content": turns[0]}, {"role": "assistant", "content": turns[1]}]}
    text = "".join(span.text for span in spans_of(template, record))
    assert f"a{form}b<|im_end|>" in text


def test_the_private_character_is_none_that_the_tokenizer_knows() -> None:
    encoder = mock.Mock(controls={"<|im_end|>": 1, "\ue000": 2, "<\ue001>": 3}, content_tokens={"\ue002": 4})
    encoder.control_pattern = re.compile("|".join(encoder.controls))
    broken = ControlStrings(encoder, "{{ '\ue003' }}").broken([{"role": "user", "content": "a\ue004"}], None)
    assert broken.private == "\ue005"


def test_a_conversation_that_uses_all_private_characters_is_rejected() -> None:
    assert {unicodedata.category(character) for character in PRIVATE} == {"Co"}
    assert len(PRIVATE) == 137_468
    text = "".join(PRIVATE) + "<|im_end|>"
    record = {"messages": [{"role": "user", "content": text}, {"role": "assistant", "content": "b"}]}
    with pytest.raises(Reject) as reject:
        spans_of(jinja(CHATML_JINJA, "hf_byte_level"), record)
    assert reject.value.reason == "no_private_character"


# -- the clock --------------------------------------------------------------------------------------------------------


def test_a_template_sees_the_date_of_the_config_and_each_its_own() -> None:
    record = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    old, new = (jinja(DATED, "hf_byte_level", today=day) for day in ("1999-12-31", "2026-02-01"))
    for template, day in ((old, "31 Dec 1999"), (new, "01 Feb 2026"), (old, "31 Dec 1999")):
        assert spans_of(template, record)[1].text == f"system\nToday is {day}."


def test_a_date_that_is_none_is_named() -> None:
    with pytest.raises(UsageError, match="template_date: 2026-02-31"):
        jinja(DATED, "hf_byte_level", today="2026-02-31")


# -- templates that cannot be used ------------------------------------------------------------------------------------

TWO_ANSWERS = {
    "messages": [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
        {"role": "assistant", "content": "d"},
    ]
}


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        (INTRODUCED, r"messages\[1\] \(assistant\) cannot be located"),
        (
            CHATML_MARKED.replace("{% generation %}{{ message.content }}", "{{ message.content }}{% generation %}"),
            r'messages\[1\] cannot be located, because the model writes "b" after its prompt, and no \{% gen',
        ),
        (CHATML_MARKED.replace("== 'assistant'", "== 'tool'"), r'the model writes "b" after its prompt'),
    ],
    ids=["begins the answer", "marks too late", "marks other turns"],
)
def test_a_conversation_whose_labels_would_be_wrong_is_rejected(source: str, problem: str) -> None:
    rows, receipt = tokenize([TWO_ANSWERS], open_kind("hf_byte_level"), jinja(source, "hf_byte_level"))
    [[index, reason, message]] = receipt["rejects"]
    assert (rows, index, reason) == ([], 0, "turn_not_located")
    assert re.search(problem, message)


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("{{ messages.__class__.__mro__ }}" + CHATML_JINJA, "accesses Python internals"),
        ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "after 0.2 s; it loops"),
    ],
    ids=["reaches for Python", "loops"],
)
def test_a_template_that_cannot_be_used_stops_the_run(
    source: str, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(renderer, "SECONDS", 0.2)
    with pytest.raises(DataError, match=problem):
        tokenize([TWO_ANSWERS], open_kind("hf_byte_level"), jinja(source, "hf_byte_level"))


@pytest.mark.parametrize(
    ("source", "code", "problem"),
    [
        (ALTERNATING, "template_refused", "refuses the conversation: roles must alternate user/assistant"),
        ("{{ messages[0].content + 1 }}", "template_failed", "fails on the conversation"),
        ("<|im_start|>", "answer_not_written", "does not write it"),
        ("", "answer_not_written", "does not write it"),
    ],
)
def test_a_conversation_that_a_template_cannot_write_is_rejected(source: str, code: str, problem: str) -> None:
    record = {"messages": [{"role": "user", "content": "a"}, *TWO_ANSWERS["messages"]]}
    rows, receipt = tokenize([record], open_kind("hf_byte_level"), jinja(source, "hf_byte_level"))
    assert rows == []
    [[index, found, message]] = receipt["rejects"]
    assert (index, found) == (0, code)
    assert problem in message


@pytest.mark.parametrize("turns", ["auto", "together", "apart"])
@pytest.mark.parametrize(
    "source",
    ["{% if messages[0].role == 'system' %}{% endif %}" + CHATML_JINJA, CHATML_JINJA + "{{ '' if messages else 'a' }}"],
)
def test_a_greeting_without_a_prompt_is_context(source: str, turns: Turns) -> None:
    """An answer before the first message of the user is not trained on.

    No model generates it: transformers refuses to write a prompt without messages.
    """
    template = jinja(source, "hf_byte_level", turns=turns)
    first = {"role": "assistant", "content": "Hello!"}
    records = [{"messages": [one, *TWO_ANSWERS["messages"]]} for one in (first, first | {"train": False}, first)]
    records.append({"messages": [first]})
    if source.startswith(CHATML_JINJA):
        records.pop()  # E417: the answer does not continue the text that the template writes
    rows, receipt = tokenize(records, open_kind("hf_byte_level"), template)
    found = [(row.ids.tolist(), row.trained.tolist()) for row in rows]
    count = len(found) // 3
    assert found[:count] == found[count : 2 * count] == found[2 * count :]
    assert sum(any(trained) for _, trained in found) == len(found)
    assert receipt["unusual_order"] == 3
    for index, code, message in receipt["rejects"]:
        assert (index, code) == (3, "template_refused")
        assert "has no element 0; it writes no prompt before messages[0], which is the only turn to train on" in message
    assert len(receipt["rejects"]) == len(records) - 3


def test_arguments_nested_too_deeply_are_rejected() -> None:
    for depth in (300, 900):
        arguments = '{"a":' * depth + "1" + "}" * depth
        call = {"function": {"name": "f", "arguments": arguments}}
        record = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": [call]}]}
        _, receipt = tokenize([record], open_kind("hf_byte_level"), jinja(TOOLS, "hf_byte_level"))
        assert [code for _, code, _ in receipt["rejects"]] == ["too_deep"]


def test_a_template_that_is_no_jinja_is_named() -> None:
    with pytest.raises(DataError, match=r"test\.jinja: not valid Jinja: .*endfor"):
        jinja("{% for message in messages %}", "hf_byte_level")


@pytest.mark.parametrize("name", ["reasoning_content", "thinking", "reasoning"])
def test_reasoning_has_every_name_that_templates_read(name: str) -> None:
    source = (
        f"{{% for m in messages %}}<|im_start|>{{{{ m.role }}}}\n{{% if m.{name} %}}[{{{{ m.{name} }}}}]{{% endif %}}"
        "{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    template = JinjaTemplate("t.jinja", source, open_kind("hf_byte_level"), "assistant", "2026-01-01")
    conversation = Conversation((Message("user", "2+2?"), Message("assistant", "4", reasoning="Two and two.")))
    [sample] = template.samples(conversation, [False, True])
    assert "".join(span.text for span in sample.spans if span.trained).startswith("[Two and two.]4")
