"""Content stays content, with every tokenizer and every template.

    seed ─▶ conversations full of control strings, whole, cut, split over neighboring fields ─▶ rows
        └─▶ the same conversations, with x in every field ────────────────────────────────────▶ rows

No field of a conversation can add a control token. A row has the control tokens of the row with x, at the places of the
template's spans. Its labels are the labels of the spans, and its text decodes to the original. There are at least 2,000
conversations for each tokenizer and for each template; `make fuzz` checks 10,000 for each pair of them.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from itertools import count, repeat
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.profiles import examples
from support.templates.jinja_sources import CHATML_MARKED, JOINED, LLAMA2, LLAMA3, TOOLS
from support.tokenizer_kinds import (
    CHATML_JINJA,
    KINDS,
    LOSSLESS,
    bytes_of_tokens,
    check_row,
    control_strings,
    open_kind,
    tokenize,
)

from packcorpus.tasks.conversations.formats import read_record
from packcorpus.tasks.conversations.model import full_text
from packcorpus.tasks.encoders.encoder import Encoder
from packcorpus.tasks.templates.built_in import BUILT_IN, BuiltIn
from packcorpus.tasks.templates.jinja.template import JinjaTemplate
from packcorpus.tasks.templates.spans import Template, TrainOn, trained_turns

pytest.importorskip("transformers", reason="transformers renders chat templates and is not installed")

JINJA = {
    "tokenizer": CHATML_JINJA,  # the template of our Hugging Face folders
    "chatml_marked.jinja": CHATML_MARKED,
    "llama2.jinja": LLAMA2,
    "llama3.jinja": LLAMA3,
    "tools.jinja": TOOLS,
    "joined.jinja": JOINED,
}
TEMPLATES = (*BUILT_IN, *JINJA)
# These templates do not write tools or calls.
WITHOUT_TOOLS = ("tokenizer", "chatml_marked.jinja", "llama2.jinja", "llama3.jinja")
BATCH = 25
# For each pair of the 8 tokenizers and 13 templates.
EXAMPLES, CONVERSATIONS = 4, 125
# The maximum number of forms in a batch. Further conversations have one of these forms and other texts.
FORMS = 45


@cache
def open_template(name: str, kind: str, train_on: TrainOn) -> Template:
    if name in BUILT_IN:
        return BuiltIn(name, open_kind(kind), train_on)
    return JinjaTemplate(name, JINJA[name], open_kind(kind), train_on, "2026-01-01", "together")


# Marks in questions and answers, which the test finds again in the trained tokens.
QUESTION, ANSWER = "QzQ", "ZqZ"


# -- conversations ----------------------------------------------------------------------------------------------------

SPACE = ("", "", "", " ", "\n", "  ", "\t", "\u00a0")
WORDS = (
    "The", "train", " ride", "85", ", ", "?", "\n\n", " ", "  ", '"', "\\", "{", "}", "<", "|", ">", "[/", "\\u003c",
)  # fmt: skip
OTHER = (
    "🙂", "👩‍👩‍👧", "漢字", "مرحبا", "\u200d", "\u0301", "\r\n", "\u2028", "ﬁ", "①", "▁", "\ue000", "\uffff", "＜/s＞",
)  # fmt: skip


def neighbors(rng: random.Random, kind: str, count: int) -> list[str]:
    """Return the texts of neighboring fields.

    One text may begin a control string that the next one completes.
    """
    strings = control_strings(kind)
    lossless = kind in LOSSLESS
    space = SPACE if lossless else SPACE[:6]
    texts = []
    for _ in range(count):
        text = ""
        for _ in range(pick(rng, (0, 1, 1, 2, 5))):
            which = rng.random() * 5
            if which < 2:
                text += pick(rng, strings)
            elif which < 3:
                text += _cut(rng, pick(rng, strings))
            elif which < 4 and lossless:
                text += pick(rng, OTHER) if rng.random() < 0.7 else _any_character(rng)
            else:
                text += pick(rng, WORDS)
        texts.append(text)
    for left in range(count - 1):
        if rng.random() < 0.6:
            string = pick(rng, strings)
            first, second = sorted((below(rng, len(string) + 1), below(rng, len(string) + 1)))
            texts[left] += string[:first] + pick(rng, space)
            if left + 2 < count and rng.random() < 0.5:
                texts[left + 1] = pick(rng, space) + string[first:second] + pick(rng, space)
                left, first = left + 1, second
            texts[left + 1] = pick(rng, space) + string[first:] + texts[left + 1]
    return texts


def below(rng: random.Random, end: int) -> int:
    """Draw a number in half the time of `rng.randrange`."""
    return int(rng.random() * end)


def pick(rng: random.Random, choices: Sequence[Any]) -> Any:
    return choices[int(rng.random() * len(choices))]


def _cut(rng: random.Random, string: str) -> str:
    return string[below(rng, len(string)) :][: 1 + below(rng, len(string))]


def _any_character(rng: random.Random) -> str:
    code = 1 + below(rng, pick(rng, (0x80, 0x800, 0x10000, 0x110000)) - 1)
    return "" if 0xD800 <= code < 0xE000 else chr(code)


def conversation(rng: random.Random, texts: Iterator[str], writes_tools: bool = True) -> dict[str, Any]:
    """Return a record of the format `messages`.

    `rng` determines its form, and `texts` has all its texts. Without `writes_tools`, it has no tools and no calls.
    """

    def some(key: str) -> dict[str, Any]:
        return {key: next(texts)} if rng.random() < 0.6 else {}

    messages: list[dict[str, Any]] = []
    if rng.random() < 0.4:
        messages.append({"role": "system", **some("name"), "content": next(texts)})
    for _ in range(rng.randint(1, 2)):
        messages.append({"role": "user", **some("name"), "content": next(texts) + rng.choice(("", QUESTION))})
        if writes_tools and rng.random() < 0.4:
            arguments = {next(texts): next(texts), "k": [next(texts), {next(texts): next(texts)}]}
            call = {**some("id"), "function": {"name": "f" + next(texts), "arguments": arguments}}
            messages.append({"role": "assistant", "content": next(texts), "tool_calls": [call]})
            messages.append({"role": "tool", **some("name"), "content": next(texts), **some("tool_call_id")})
        messages.append({"role": "assistant", **some("name"), "content": ANSWER + next(texts)})
        if rng.random() < 0.2:
            messages[-2]["content"] = [{"type": "text", "text": next(texts)}, {"type": "text", "text": next(texts)}]
    tools = {"type": "function", "function": {"name": next(texts), "parameters": {next(texts): [{next(texts): 1}]}}}
    return {"messages": messages, **({"tools": [tools]} if writes_tools and rng.random() < 0.4 else {})}


def instruction(rng: random.Random, texts: Iterator[str]) -> dict[str, Any]:
    """Return a record of the format `alpaca`, with an instruction and an input."""
    system = {"system": "S" + next(texts)} if rng.random() < 0.5 else {}
    history = {"history": [[next(texts), ANSWER + next(texts)]]} if rng.random() < 0.5 else {}
    said = {"instruction": next(texts), "input": next(texts), "output": ANSWER + next(texts)}
    return {**system, **history, **said}


def texts_of(make: Callable[..., dict[str, Any]], form: int) -> int:
    """Return the number of texts in a record of this form."""
    numbers = count()
    make(random.Random(form), map(str, numbers))
    return next(numbers)


# -- the check --------------------------------------------------------------------------------------------------------


def check_batch(kind: str, name: str, seed: int, size: int = BATCH) -> int:
    """Check `size` conversations made from a seed, and return the number packed."""
    rng = random.Random(f"{kind} {name} {seed}")
    encoder = open_kind(kind)
    train_on: TrainOn = "last" if name == "joined.jinja" else rng.choice(("assistant", "all", "last"))
    if name == "mistral" and train_on == "assistant":  # it would make one sample of each conversation
        train_on = "last"
    template = open_template(name, kind, train_on)
    of_messages = partial(conversation, writes_tools=name not in WITHOUT_TOOLS)
    make, format = rng.choice(((of_messages, "messages"), (of_messages, "messages"), (instruction, "alpaca")))
    forms = [rng.getrandbits(64) for _ in range(min(size, FORMS))]
    sizes = {form: texts_of(make, form) for form in forms}
    form_of = [forms[number % len(forms)] for number in range(size)]
    given_records = [make(random.Random(form), iter(neighbors(rng, kind, sizes[form]))) for form in form_of]
    rows, _ = tokenize(given_records, encoder, template, train_on, format)
    packed_forms = list(dict.fromkeys(form_of[row.record] for row in rows))
    harmless = [make(random.Random(form), repeat("x")) for form in packed_forms]
    plain, _ = tokenize(harmless, encoder, template, train_on, format)
    table = bytes_of_tokens(encoder)

    def decode(ids: list[int]) -> str:
        return b"".join([table[i] for i in ids]).decode("utf-8", "replace")  # encoder.decode looks up tokens each time

    known = set(encoder.controls.values()) - {encoder.unk_id}
    expected_controls = {
        form: [i for i in row.ids.tolist() if i in known] for form, row in zip(packed_forms, plain, strict=True)
    }
    conversations = [read_record(given_records[row.record], format) for row in rows]
    flags_of = [trained_turns(said, train_on) for said in conversations]
    samples_of = template.all_samples([*zip(conversations, flags_of, strict=True)])
    for row, said, flags, samples in zip(rows, conversations, flags_of, samples_of, strict=True):
        record = given_records[row.record]
        assert isinstance(samples, list), samples
        [sample] = samples
        check_row(row, sample.spans, encoder)
        ids = row.ids.tolist()
        assert [i for i in ids if i in known] == expected_controls[form_of[row.record]], record
        if name != "joined.jinja":  # this template writes some texts several times
            trained = decode(row.ids[row.trained].tolist())
            expected = [m.content for m, flag in zip(said.messages, flags, strict=True) if flag]
            for mark in (QUESTION, ANSWER):
                assert trained.count(mark) == sum(text.count(mark) for text in expected), record
        if kind in LOSSLESS:
            text = _tight(decode(ids), encoder)
            for message in said.messages:
                if (name, message.role) == ("mistral", "tool"):
                    continue  # written as JSON
                content = full_text(message).strip() if name != "alpaca" else message.content.strip()
                content = content.replace("▁", " ") if encoder.underline_is_space else content
                assert _tight(content, encoder) in text, record
    return len(rows)


def _tight(text: str, encoder: Encoder) -> str:
    """Remove the spaces that some tokenizers put after content tokens."""
    for token in encoder.space_follows:
        text = re.sub(f"{re.escape(token)} +", token, text)
    return text


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_said_is_never_a_control_token_and_comes_back(kind: str, name: str) -> None:
    packed = []

    @settings(max_examples=examples(EXAMPLES), deadline=None, database=None)
    @given(st.integers(0, 1 << 64))
    def check(seed: int) -> None:
        packed.append(check_batch(kind, name, seed, CONVERSATIONS))

    check()
    assert sum(packed) > CONVERSATIONS * len(packed) // 3  # some templates write no calls
