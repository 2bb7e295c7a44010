"""Adjacent fields keep their text and forge no control token.

    a template of fields and text ─▶ Jinja, broken and cut, and tokens ─▶ bytes and control tokens of each row
       └─ Python joins the same fields ─────────────────────────────────▶ the same

Control strings in contents are broken by a private character. It is removed later, even if a template has escaped it.
The tokenizers here know private characters. Contents consist of pieces of private characters and of their escaped
forms.
"""

from __future__ import annotations

import functools
import itertools
import json
import re
import shutil
import tempfile
from pathlib import Path
from typing import NamedTuple

from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from sentencepiece import sentencepiece_model_pb2
from support.profiles import examples
from support.tokenizer_kinds import kind_path, tokenize

from packcorpus.tasks.core.errors import PackError
from packcorpus.tasks.encoders.encoder import Encoder
from packcorpus.tasks.encoders.tokenizer_files import find_tokenizer, open_encoder
from packcorpus.tasks.templates.jinja.template import JinjaTemplate

KINDS = ("hf_byte_level", "sp_bpe_chatml")
PRIVATE = ("\ue000", "\ue001", "\ue002", "\U000f0000")
EVERY_PRIVATE = "".join(map(chr, range(0xE000, 0xF900)))  # all of the first area: the next one breaks the strings
# Tokens that are added to a tokenizer, as control tokens or as other tokens.
TOKENS = ("\ue000", "\ue001", "\\ue000", "\\ue001", "<\ue000>", "\ue000\ue001", "\U000f0000", "ue001", "[\ue001")
FIELDS = ("content", "name", "first")  # first: the content of the first message
FORMS = ("plain", "trim", "json", "ascii")
START, END = "<|im_start|>", "<|im_end|>"


class Part(NamedTuple):
    """A template writes this part: a text, or a field in one of FORMS."""

    what: str
    form: str = "text"


CONTENT = Part("content", "plain")  # Every template has this part, because it is trained on.


class Case(NamedTuple):
    """A case has a tokenizer with added tokens, a template, and conversations.

    Each conversation has pairs of texts: content and name.
    """

    kind: str
    control: tuple[str, ...]
    other: tuple[str, ...]
    parts: tuple[Part, ...]
    conversations: tuple[tuple[tuple[str, str], ...], ...]
    every: bool = False  # whether the first text contains all private characters of the first area


# -- generated cases --------------------------------------------------------------------------------------------------


def _pieces() -> tuple[str, ...]:
    forms = [json.dumps(private)[1:-1] for private in PRIVATE]
    cuts = [piece for form in forms for at in range(1, len(form)) for piece in (form[:at], form[at:])]
    controls = [piece for at in range(1, len(END)) for piece in (END[:at], END[at:])]
    others = ("\\", "\\\\", "a", " ", "\n", "é", "<", ">", "[", "0", '"', "u", "\\u", "\\UE000", "\\uE001")
    return tuple(dict.fromkeys([*PRIVATE, *PRIVATE, *forms, *TOKENS, END, START, *others, *cuts, *controls[::3]]))


PIECES = _pieces()
TEXTS = st.lists(st.sampled_from(PIECES), max_size=3).map("".join)
LITERALS = st.sampled_from(["a", " ", "\n", "\\", "\\u", "u", "e00", "0", "<", ">", "[", "|", *PRIVATE, *TOKENS[:5]])
PARTS = st.one_of(
    st.builds(Part, st.sampled_from(FIELDS), st.sampled_from(FORMS)),
    st.builds(Part, st.sampled_from(FIELDS), st.sampled_from(FORMS[:2])),
    LITERALS.map(Part),
)


@st.composite
def neighbors(draw: st.DrawFn) -> tuple[str, str]:
    """Draw a content and a name that may be two halves of one string."""
    content, name = draw(TEXTS), draw(TEXTS)
    if draw(st.booleans()):
        escapes = st.sampled_from([json.dumps(private)[1:-1] for private in PRIVATE])
        string = draw(escapes | st.sampled_from([END, *TOKENS]))
        at = draw(st.integers(0, len(string)))
        if draw(st.booleans()):
            content, name = content + string[:at], string[at:] + name
        else:
            content, name = string[at:] + content, name + string[:at]
    return content, name


@st.composite
def cases(draw: st.DrawFn) -> Case:
    tokens = draw(st.lists(st.sampled_from(TOKENS), max_size=3, unique=True))
    cut = draw(st.integers(0, len(tokens)))
    name = Part("name", draw(st.sampled_from(["plain", "plain", "trim"])))
    joined = st.permutations([CONTENT, name])  # adjacent in half of the templates
    parts = [*draw(st.lists(PARTS, max_size=2)), *draw(joined | st.just([CONTENT])), *draw(st.lists(PARTS, max_size=2))]
    some = st.lists(neighbors(), min_size=2, max_size=2).map(tuple)
    conversations = draw(st.lists(some, min_size=1, max_size=8).map(tuple))
    kind, every = draw(st.sampled_from(KINDS)), draw(st.integers(0, 30)) == 30
    return Case(kind, tuple(tokens[:cut]), tuple(tokens[cut:]), tuple(parts), conversations, every)


# -- the tokenizer and the template -----------------------------------------------------------------------------------


@functools.cache
def _place() -> Path:
    _KEPT.append(tempfile.TemporaryDirectory(prefix="test_joined_fields_"))
    return Path(_KEPT[-1].name)


_KEPT: list[tempfile.TemporaryDirectory[str]] = []


@functools.lru_cache(64)
def tokenizer(kind: str, control: tuple[str, ...], other: tuple[str, ...]) -> Encoder:
    """Return a tokenizer with added control tokens and other added tokens."""
    source, path = kind_path(kind), _place() / kind_path(kind).name
    if source.is_dir():
        shutil.copytree(source, path, dirs_exist_ok=True)
        spec = json.loads((source / "tokenizer.json").read_bytes())
        first = max(token["id"] for token in spec["added_tokens"]) + 1
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        for number, text in enumerate(control + other, first):
            token = {"id": number, "content": text, "special": text in control, **flags}
            spec["added_tokens"].append(token)
        (path / "tokenizer.json").write_text(json.dumps(spec))
    else:
        model = sentencepiece_model_pb2.ModelProto.FromString(source.read_bytes())
        types = sentencepiece_model_pb2.ModelProto.SentencePiece
        for text in control + other:
            model.pieces.add(piece=text, score=0.0, type=types.CONTROL if text in control else types.USER_DEFINED)
        path.write_bytes(model.SerializeToString())
    return open_encoder(find_tokenizer(path))


_FORM = {"plain": "{}", "trim": "{} | trim", "json": "{} | tojson", "ascii": "{} | tojson(ensure_ascii=true)"}
_FIELD = {"content": "m.content", "name": "m.name", "first": "messages[0].content"}


def source_of(parts: tuple[Part, ...]) -> str:
    """Return the template that writes these parts in every turn."""
    body = "".join(
        json.dumps(part.what).join(("{{ ", " }}"))
        if part.form == "text"
        else f"{{{{ {_FORM[part.form].format(_FIELD[part.what])} }}}}"
        for part in parts
    )
    turn = f"{START}{{{{ m.role }}}}\n{body}{END}\n"
    prompt = f"{{% if add_generation_prompt %}}{START}assistant\n{{% endif %}}"
    return f"{{% for m in messages %}}{turn}{{% endfor %}}{prompt}"


def messages_of(case: Case, texts: tuple[tuple[str, str], ...]) -> list[dict[str, str]]:
    """Return a conversation of a user and an assistant."""
    messages = [
        {"role": role, "content": content if content.strip() else f"{content}z", "name": name}
        for role, (content, name) in zip(("user", "assistant"), texts, strict=True)
    ]
    if case.every:
        messages[0]["content"] = EVERY_PRIVATE + messages[0]["content"]
    return messages


# -- the check --------------------------------------------------------------------------------------------------------


def expected(case: Case, encoder: Encoder, messages: list[dict[str, str]]) -> tuple[str, list[tuple[int, int]]]:
    """Return the text of a row, and the place and id of each control token."""
    text, controls = "", list[tuple[int, int]]()
    pattern = re.compile("|".join(map(re.escape, sorted(encoder.controls, key=len, reverse=True))))

    def template_writes(literal: str) -> None:
        nonlocal text
        controls.extend((len(text) + m.start(), encoder.controls[m.group()]) for m in pattern.finditer(literal))
        text += literal

    for message in messages:
        template_writes(f"{START}{message['role']}\n")
        # Adjacent literals may spell a control string together. The template writes it, so it is a control token.
        for is_literal, group in itertools.groupby(case.parts, key=lambda part: part.form == "text"):
            parts = list(group)
            if is_literal:
                template_writes("".join(part.what for part in parts))
            else:
                text += "".join(_field(part, message, messages) for part in parts)
        template_writes(f"{END}\n")
    return text, controls


def _field(part: Part, message: dict[str, str], messages: list[dict[str, str]]) -> str:
    value = messages[0]["content"] if part.what == "first" else message[part.what]
    if part.form in ("json", "ascii"):
        return json.dumps(value, ensure_ascii=part.form == "ascii")
    return value.strip() if part.form == "trim" else value


def check(case: Case) -> str:
    """Check the rows of a case, and return the outcome."""
    encoder = tokenizer(case.kind, case.control, case.other)
    conversations = [messages_of(case, texts) for texts in case.conversations]
    try:
        template = JinjaTemplate("t", source_of(case.parts), encoder, "assistant", "2026-01-01", "together")
        rows, _ = tokenize([{"messages": messages} for messages in conversations], encoder, template)
    except PackError as error:
        return error.reason
    known = set(encoder.controls.values()) - {encoder.unk_id}
    for row in rows:
        text, controls = expected(case, encoder, conversations[row.record])
        ids = row.ids.tolist()[: len(row.ids) - row.separator]
        pieces = [encoder.token_bytes(token) for token in ids]
        assert b"".join(pieces).decode() == text
        starts = itertools.accumulate(map(len, pieces), initial=0)
        found = [(start, token) for start, token in zip(starts, ids, strict=False) if token in known]
        assert found == [(len(text[:place].encode()), token) for place, token in controls]
    return "packed" if len(rows) == len(conversations) else "rejected"


@settings(max_examples=examples(30), deadline=None, suppress_health_check=list(HealthCheck))
@example(Case(KINDS[0], (), TOKENS[:2], (CONTENT, Part("\\"), CONTENT), ((("a", ""), ("ue002", "")),)))
@example(Case(KINDS[0], (), (), (CONTENT, Part("name", "trim")), ((("a\\", ""), ("b\\", " ue000")),)))
@example(Case(KINDS[0], (), (), (CONTENT, Part("000")), ((("<|im_end|>", ""), ("b\\ue", "")),)))
@example(Case(KINDS[0], TOKENS[:1], (), (CONTENT, Part("\ue000")), ((("a", ""), ("<|im_end", "")),)))
@example(Case(KINDS[0], TOKENS[3:4], (), (CONTENT, Part("content", "ascii")), ((("a", ""), ("\ue001", "")),)))
@example(Case(KINDS[0], ("\\ue000",), (), (CONTENT, Part("content", "ascii")), ((("", ""), ("\ue000", "")),)))
@given(cases())
def test_fields_side_by_side_keep_their_text_and_forge_no_control_token(case: Case) -> None:
    check(case)
