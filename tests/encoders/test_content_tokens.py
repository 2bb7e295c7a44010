"""Added tokens in text match like in the library, but special tokens never match."""

from __future__ import annotations

import functools
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.profiles import examples
from support.tokenizer_kinds import HUGGING_FACE, SENTENCEPIECE, folder, hostile, kind_path, open_kind, reference

from packcorpus.tasks.core.errors import UsageError
from packcorpus.tasks.encoders.encoder import Encoder
from packcorpus.tasks.encoders.gigatoken_encoder import GigatokenEncoder
from packcorpus.tasks.encoders.tokenizer_files import find_tokenizer, open_encoder

FEW = settings(max_examples=examples(60), deadline=None)
PLAIN = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}

# They overlap, contain one another or white space, and some are words.
NAMES = ("<a>", "<a", "a>", "<a><b>", "</a>", "ab", "abc", "bc", " a", "é", "e\u0301", "<｜x▁y｜>", "a\nb", "|a|", "Ab")
names = st.lists(st.sampled_from(NAMES), min_size=1, max_size=6, unique=True)
texts = st.lists(
    st.sampled_from((*NAMES, *"abc <>é\n", "  ", "The train", "漢", "▁", "<|im_end|>", "A")), max_size=10
).map("".join)


normalizers = st.sampled_from([None, {"type": "NFC"}, {"type": "Lowercase"}])


@functools.cache
def spec_of(kind: str) -> str:
    return (kind_path(kind) / "tokenizer.json").read_text()


def with_added(kind: str, tokens: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return a tokenizer.json with more added tokens after its own."""
    spec: dict[str, Any] = json.loads(spec_of(kind))
    known = {token["content"] for token in spec["added_tokens"]}
    behind = 1 + max(token["id"] for token in spec["added_tokens"])
    new = [token for token in tokens if token["content"] not in known]
    spec["added_tokens"] += [token | {"id": behind + number} for number, token in enumerate(new)]
    return spec


def opened(kind: str, spec: dict[str, Any], content_tokens: Sequence[str] = ()) -> Encoder:
    with tempfile.TemporaryDirectory(dir=folder()) as name:
        (Path(name) / "tokenizer.json").write_text(json.dumps(spec))
        config = (kind_path(kind) / "tokenizer_config.json").read_bytes()
        (Path(name) / "tokenizer_config.json").write_bytes(config)
        return open_encoder(find_tokenizer(Path(name), "files"), content_tokens=content_tokens)


def without_special(spec: dict[str, Any]) -> Any:
    """Return the library's own tokenizer without special tokens.

    A special token is replaced by a placeholder if its removal would change the ids of other tokens.
    """
    from tokenizers import Tokenizer

    added = [
        token | {"content": f"\0special {number}\0"} if token["special"] else token
        for number, token in enumerate(spec["added_tokens"])
        if not (token["special"] and token["content"] in spec["model"]["vocab"])
    ]
    return Tokenizer.from_str(json.dumps(spec | {"added_tokens": added, "post_processor": None}))


@st.composite
def added(draw: st.DrawFn, flags: Sequence[str]) -> list[dict[str, Any]]:
    """Draw added tokens and the values of some of their flags."""
    return [
        {"content": name, "special": draw(st.booleans())} | PLAIN | {flag: draw(st.booleans()) for flag in flags}
        for name in draw(names)
    ]


@pytest.mark.parametrize("kind", HUGGING_FACE[:3])
@FEW
@given(data=st.data())
def test_ids_are_those_of_the_library_whose_special_tokens_are_not_matched(kind: str, data: st.DataObject) -> None:
    flags = ("single_word", "lstrip", "rstrip", "normalized") if kind == "hf_byte_level" else ()
    # A token that starts with a space would match the space that is added before a text.
    tokens = [token for token in data.draw(added(flags)) if kind == "hf_byte_level" or token["content"] != " a"]
    spec = with_added(kind, tokens)
    if kind == "hf_byte_level":
        spec["normalizer"] = data.draw(normalizers)
    encoder, library = opened(kind, spec), without_special(spec)
    special = {token["content"] for token in spec["added_tokens"] if token["special"]}
    assert set(encoder.controls) == special
    for text in data.draw(st.lists(st.one_of(texts, hostile(kind)), min_size=1, max_size=6)):
        spaced = text if encoder.leading_space == "none" or not text else encoder.with_leading_space(text)
        ids = encoder.encode([spaced]).ids.tolist()
        assert ids == library.encode(text, add_special_tokens=False).ids, text
        assert not set(ids) & (set(encoder.controls.values()) - {encoder.unk_id})
        if encoder.leading_space == "none" and not (spec["normalizer"] or encoder.strips_left or encoder.strips_right):
            assert encoder.decode(ids) == text


@pytest.mark.parametrize("kind", ["hf_byte_level", "hf_metaspace", "hf_legacy"])
@FEW
@given(data=st.data())
def test_both_engines_match_the_same(kind: str, data: st.DataObject) -> None:
    spec = with_added(kind, data.draw(added(("single_word", "lstrip", "rstrip", "normalized"))))
    if kind == "hf_byte_level":
        spec["normalizer"] = data.draw(st.sampled_from([None, {"type": "NFC"}]))
    slow = opened(kind, spec)
    fast = GigatokenEncoder(slow)
    said = data.draw(st.lists(st.one_of(texts, hostile(kind)), max_size=6))
    expected, found = slow.encode(said), fast.encode(said)
    assert (found.ids.tolist(), found.offsets.tolist()) == (expected.ids.tolist(), expected.offsets.tolist())


@pytest.mark.parametrize("kind", SENTENCEPIECE)
def test_user_defined_pieces_are_those_of_sentencepiece(kind: str) -> None:
    encoder, processor = open_kind(kind), reference(kind)

    @FEW
    @given(hostile(kind))
    def check(text: str) -> None:
        ids = encoder.encode([encoder.with_leading_space(text)]).ids.tolist()
        assert ids == (processor.encode(text) if text else ids), text

    check()


def test_a_token_before_which_no_space_belongs() -> None:
    """The library adds a space before text, but not before an added token."""
    for kind, ids_of_b in (("hf_metaspace", "b"), ("hf_legacy", " b")):
        encoder = open_kind(kind)
        ids = encoder.encode([encoder.with_leading_space("<think>b")]).ids.tolist()
        assert ids == [encoder.content_tokens["<think>"], *encoder.encode([ids_of_b]).ids.tolist()]


# -- the setting ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["hf_byte_level", "sp_bpe_user_defined"])
def test_content_tokens_changes_what_content_may_become(kind: str) -> None:
    plain, special = ("<think>", "<|eot_id|>") if kind == "hf_byte_level" else ("<tool_call>", "</s>")
    path = find_tokenizer(kind_path(kind))
    eos = "<|eot_id|>" if special == "</s>" else None
    text = f"a{plain}b{special}c"
    usual = open_kind(kind)
    assert plain in usual.content_tokens
    assert special in usual.controls
    if kind == "hf_byte_level":
        changed = open_encoder(path, eos, content_tokens=[special, f"-{plain}"])
        assert (special in changed.content_tokens, plain in changed.controls) == (True, True)
        ids = changed.encode([text]).ids.tolist()
        assert ids.count(changed.content_tokens[special]) == 1
        assert changed.controls[plain] not in ids
        assert changed.decode(ids) == text
    none = open_encoder(path, content_tokens=["-*"])
    assert not any(string.strip() for string in none.content_tokens)
    assert none.decode(none.encode([text]).ids) == text
    assert not set(none.controls.values()) & set(none.encode([text]).ids.tolist())
    again = open_encoder(path, content_tokens=["-*", plain])
    assert [string for string in again.content_tokens if string.strip()] == [plain]


@pytest.mark.parametrize(
    ("setting", "problem"),
    [
        ("<thnik>", r'content_tokens: "<thnik>" is not an added token of .*; did you mean <think>\?'),
        ("-<thnik>", r'content_tokens: "<thnik>" is not an added token'),
        ("The", r'"The" is not an added token'),
        ("<|im_end|>", r'"<|im_end|>" begins, ends, or pads a sample'),
        ("<|endoftext|>", r"pads a sample"),
        ("<|begin_of_text|>", r"begins, ends, or pads a sample"),
    ],
)
def test_a_token_that_content_cannot_become_is_named(setting: str, problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        open_encoder(find_tokenizer(kind_path("hf_byte_level")), content_tokens=[setting])


def test_a_token_whose_name_starts_with_a_dash_is_that_token() -> None:
    tokens = [{"content": name, "special": True} | PLAIN for name in ("-x", "x")]
    encoder = opened("hf_byte_level", with_added("hf_byte_level", tokens), ["-x"])
    assert {"-x", "x"} & set(encoder.content_tokens) == {"-x"}


def test_eos_and_padding_are_protected_even_if_they_are_not_special() -> None:
    spec = with_added("hf_byte_level", [])
    for token in spec["added_tokens"]:
        token["special"] = False
    encoder = opened("hf_byte_level", spec)
    assert set(encoder.controls) == {"<|begin_of_text|>", "<|im_end|>", "<|endoftext|>"}
    ids = encoder.encode(["a<|im_end|>b<|im_start|>"]).ids.tolist()
    assert encoder.eos_id not in ids
    assert ids[-1] == encoder.content_tokens["<|im_start|>"]


# -- counts -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["hf_byte_level", "hf_legacy", "sp_bpe_user_defined"])
@FEW
@given(data=st.data())
def test_each_content_token_of_a_text_is_counted(kind: str, data: st.DataObject) -> None:
    encoder = open_kind(kind)
    said = data.draw(st.lists(hostile(kind), max_size=6))
    counted = {token: string for string, token in encoder.content_tokens.items() if string.strip()}
    expected = [
        (index, counted[token])
        for index, text in enumerate(said)
        for token in encoder.encode([text]).ids.tolist()
        if token in counted
    ]
    assert encoder.count_content_tokens(said) == expected
