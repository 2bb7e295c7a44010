"""Compare samples with the ids that AutoTokenizer gives at inference.

    folder ─opened─▶ Pair, or why the folder is refused
    records ─┬─ tokenize_part ─▶ ids and labels of each sample ──────────────┬─▶ Tally
             └─ AutoTokenizer.apply_chat_template(messages[:k], …) ──────────┘

The ids before a trained turn must be those of its prompt. The ids of the turn must be those that the template writes
after the prompt, and only these are trained on. No content has a control string, because AutoTokenizer would make
control tokens of it.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from support.tokenizer_kinds import CHATML_JINJA, Row, tokenize
from transformers import AutoTokenizer

from packcorpus.tasks.core.errors import PackError
from packcorpus.tasks.encoders.encoder import Encoder
from packcorpus.tasks.encoders.tokenizer_files import find_tokenizer, open_encoder
from packcorpus.tasks.templates.jinja.template import JinjaTemplate

TODAY = "2026-01-01"
Messages = list[dict[str, str]]

_TEXTS = "{% for m in messages %}{% if m.role == 'user' %}"
TEMPLATES = {
    "chatml": CHATML_JINJA,
    "trimmed": CHATML_JINJA.replace("message.content", "message.content | trim"),
    "bos": "{{ bos_token }}" + CHATML_JINJA,
    "spaced": _TEXTS + "{{ bos_token }}[INST] {{ m.content }} [/INST]{% else %} {{ m.content }} {{ eos_token }}"
    "{% endif %}{% endfor %}",
    "joined": _TEXTS + "{{ bos_token }}[INST]{{ m.content }}[/INST]{% else %}{{ m.content }}{{ eos_token }}{% endif %}"
    "{% endfor %}",
    "headings": _TEXTS
    + "### Instruction:\n{{ m.content }}\n\n### Response:\n{% else %}{{ m.content }}{{ eos_token }}\n\n"
    "{% endif %}{% endfor %}",
}
WORDS = (
    "The", "the", "train", " train", " leaves", "area", "85", "1000", "9:40", ", ", ".", "?", "!", "don't", "I'LL", "x",
    "def f(x):\n    return x", "Wie lange?", "0.9 > 0.11", "a" * 20, "<", "|", "[", "##s", "</", "- ",
)  # fmt: skip
SPACE = ("", "", "", " ", " ", "  ", "\n", "\n\n", "\t", "\r\n", " \n ", "\u00a0", "\u2028", " " * 9)
RARE = (
    "🙂", "👩‍👩‍👧", "漢字", "Привет", "مرحبا", "हिन्दी", "\u200d", "e\u0301", "é", "ﬁ", "①", "▁", "▁▁ ", "ẞ",
    "Ġ", "\ue000",
)  # fmt: skip


@dataclass
class Tally:
    """Counts of the outcomes of records, and how each wrong record differs."""

    outcomes: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)


class Pair(NamedTuple):
    """A tokenizer, opened by packcorpus and by AutoTokenizer."""

    encoder: Encoder
    template: JinjaTemplate
    auto: Any


def opened(place: Path) -> Pair | PackError:
    """Return both tokenizers of a folder, or the error that refuses it."""
    try:
        files = find_tokenizer(place)
        encoder = open_encoder(files)
        source = files.chat_template()
        assert source is not None
        template = JinjaTemplate("tokenizer", source, encoder, "assistant", TODAY)
    except PackError as error:
        return error
    return Pair(encoder, template, AutoTokenizer.from_pretrained(str(place)))


def reason_of(error: PackError) -> str:
    """Return why a tokenizer is refused, without its path."""
    return f"{error.reason}: {str(error).partition(': ')[2].partition(', and there is no rule')[0]}"


def compare(pair: Pair, conversations: Sequence[Messages]) -> Tally:
    """Compare the samples of conversations, and account for each conversation."""
    tally = Tally()
    records = [{"messages": messages} for messages in conversations]
    rows, receipt = tokenize(records, pair.encoder, pair.template)
    rejects = {number: reason for number, reason, _ in receipt["rejects"]}
    own: dict[int, list[Row]] = {number: [] for number in range(len(records))}
    for row in rows:
        own[row.record].append(row)
    for number, messages in enumerate(conversations):
        turns = [k for k, said in enumerate(messages) if said["role"] == "assistant" and said["content"].strip()]
        if number in rejects:
            outcome = f"rejected: {rejects[number]}"
            wrong = "" if (rejects[number] == "no_trained_tokens") == (not turns) else outcome
        else:
            wrong, outcome = _difference(pair.auto, messages, own[number], turns), "equal"
        if wrong:
            tally.wrong.append(f"{wrong}: {messages}")
        else:
            tally.outcomes[outcome] += 1
    return tally


def _difference(auto: Any, messages: Messages, rows: Sequence[Row], turns: Sequence[int]) -> str:
    """Return how the samples of a conversation differ from inference, or ""."""
    done: list[int] = []
    for row in rows:
        own = [k for k in turns if k not in done and (row.turn < 0 or k <= row.turn)]
        done += own
        ids = row.ids.tolist()[: len(row.ids) - row.separator]
        flags, trained = row.trained.tolist()[: len(ids)], [False] * len(ids)
        for k in own:
            prompt = auto.apply_chat_template(messages[:k], add_generation_prompt=True, return_dict=False)
            start = len(prompt)
            if ids[:start] != prompt:
                return f"the prompt of turn {k} {_parted(auto, ids, prompt)}"
            stop, wrong = _end_of_answer(auto, messages, k, prompt, ids, flags)
            if wrong:
                return f"turn {k} {wrong}"
            trained[start:stop] = [True] * (stop - start)
        trained[:1] = [False]
        if flags != trained:
            at = next(at for at, (one, other) in enumerate(zip(flags, trained, strict=True)) if one != other)
            return f"token {at} of turns {own} {'is' if flags[at] else 'is not'} trained on"
    return "" if done == turns else f"turns {turns} are trained on at inference, {done} here"


def _end_of_answer(
    auto: Any, messages: Messages, k: int, prompt: list[int], ids: list[int], flags: list[bool]
) -> tuple[int, str]:
    """Return where the answer of a turn ends in a sample, and how it differs.

    If a token crosses the end of the prompt, the text of the answer is compared, because the model writes it alone. So
    are unknown tokens there, which some tokenizers make one of. If no control token ends an answer, the first one of
    the next turn does.
    """
    start = len(prompt)
    before = auto.apply_chat_template(messages[:k], add_generation_prompt=True, tokenize=False)
    text = auto.apply_chat_template(messages[: k + 1], tokenize=False)
    assert text.startswith(before)
    text = text[len(before) :]
    whole = auto.apply_chat_template(messages[: k + 1], return_dict=False)
    crosses = whole[:start] != prompt or prompt[-1] == auto.unk_token_id
    answer = auto(text, add_special_tokens=False)["input_ids"] if crosses else whole[start:]
    special = {
        number: token.content
        for number, token in auto.added_tokens_decoder.items()
        if token.special and number != auto.unk_token_id and token.content.strip()
    }
    ends = [at for at, token in enumerate(answer, 1) if token in special]
    last = max((text.rfind(token) + len(token) for token in special.values() if token in text), default=0)
    if ends and not text[last:].strip():
        answer = answer[: ends[-1]]
    elif flags[start + len(answer) :][:1] == [True] and ids[start + len(answer)] in special:
        answer = [*answer, ids[start + len(answer)]]
    if crosses:
        size = next((at for at, flag in enumerate(flags[start:]) if not flag), len(ids) - start)
        here, there = (_written(auto, tokens) for tokens in (ids[start : start + size], answer))
        return start + size, "" if here == there else f"has the text {here!r} here, {there!r} at inference"
    stop = start + len(answer)
    return stop, "" if ids[start:stop] == answer else _parted(auto, ids[start:], answer)


def _written(auto: Any, ids: list[int]) -> str:
    """Return the pieces of ids as one string, without a leading space."""
    return "".join(auto.convert_ids_to_tokens(ids)).lstrip("▁Ġ")


def _parted(auto: Any, here: list[int], there: list[int]) -> str:
    size = min(len(here), len(there))
    at = next((at for at in range(size) if here[at] != there[at]), size)
    ours, theirs = (auto.convert_ids_to_tokens(ids[max(0, at - 3) : at + 5]) for ids in (here, there))
    return f"differs at token {at}: {ours} here, {theirs} at inference"


# -- conversations ----------------------------------------------------------------------------------------------------


def conversations(source: random.Random, count: int, more: Sequence[str] = ()) -> Iterator[Messages]:
    """Yield conversations of unusual texts. `more` are further words."""
    for _ in range(count):
        roles = ["user", "assistant"] * source.choice((1, 1, 2, 3))
        yield [{"role": role, "content": text_of(source, more)} for role in roles]


def text_of(source: random.Random, more: Sequence[str] = ()) -> str:
    """Return a text.

    It often begins with white space or one of `more`, so that a token may cross its start.
    """
    words = (WORDS, WORDS, SPACE, RARE, more or WORDS)
    pieces = (source.choice(source.choice(words)) for _ in range(source.choice((0, 1, 1, 2, 4, 8, 20))))
    first = source.choice(source.choice((SPACE, SPACE, more or SPACE)))
    return first + "".join(piece + source.choice((" ", " ", "")) for piece in pieces)
