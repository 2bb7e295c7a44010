"""The fast encoder equals the reference, or leaves the tokenizer to the reference."""

from __future__ import annotations

import io
import json
import os
import signal
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.profiles import examples
from support.small_corpus import conversations, make_recipe, pack_corpus
from support.tokenizer_kinds import SENTENCES, control_strings, hostile, kind_path, open_kind, ordinary

from packcorpus.tasks.dry_run.dry_run import predict
from packcorpus.tasks.encoders import gigatoken_encoder
from packcorpus.tasks.encoders.encoder import Encoder
from packcorpus.tasks.encoders.gigatoken_encoder import GigatokenEncoder, Unsupported
from packcorpus.tasks.encoders.texts import Texts
from packcorpus.tasks.encoders.tokenizer_files import find_tokenizer, open_encoder
from packcorpus.tasks.storage.manifest import load_manifest
from packcorpus.tasks.tokenization import checks
from packcorpus.tasks.tokenization.checks import HARD, hard_tokens

FAST = ("sp_bpe_chatml", "sp_bpe_user_defined", "hf_byte_level", "hf_metaspace", "hf_legacy", "mistral_v3")
FEW = settings(max_examples=examples(60), deadline=None)

ODD = [
    "\0",
    "▁",
    "▁▁",
    " ",
    "  ",
    " " * 9,
    "\n\n\n",
    "\t",
    "\r",
    "🙂",
    "👩‍👩‍👧",
    "e\u0301\u0323",
    "\u200d",
    "\ufeff",
    "<0x41>",
    "<unk>",
]
odd = st.lists(st.one_of(st.sampled_from(ODD), st.text(max_size=4)), max_size=12).map("".join)


def check_same(fast: Encoder, reference: Encoder, texts: list[str]) -> None:
    found, expected = fast.encode(texts), reference.encode(texts)
    assert found.ids.dtype == expected.ids.dtype
    assert found.offsets.dtype == expected.offsets.dtype
    assert np.array_equal(found.offsets, expected.offsets), texts
    assert np.array_equal(found.ids, expected.ids), texts


@pytest.mark.parametrize("kind", FAST)
def test_any_batch_gives_the_ids_of_the_reference(kind: str) -> None:
    reference = open_kind(kind)
    fast = GigatokenEncoder(reference)

    @FEW
    @given(st.lists(st.one_of(hostile(kind), ordinary(kind), odd), max_size=6))
    def check(texts: list[str]) -> None:
        check_same(fast, reference, texts)

    check()
    check_same(fast, reference, list(HARD))
    check_same(fast, reference, [])
    check_same(fast, reference, ["", "a", ""])


@pytest.mark.parametrize("kind", FAST)
def test_texts_are_joined_and_come_apart(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fast = GigatokenEncoder(open_kind(kind))
    whole: list[list[int]] = []
    joined = fast._joined

    def listening(texts: Texts, others: list[int]) -> Any:
        whole.append(others)
        return joined(texts, others)

    monkeypatch.setattr(fast, "_joined", listening)
    check_same(fast, fast.reference, [" a ", "", "  ", "b\n", " 's", "c", "\n", "d"])
    assert len(whole) == 1
    check_same(fast, fast.reference, ["a", " b\0 ", "c"])
    assert whole[-1] == [1], "the reference has what holds the separator"


@pytest.mark.parametrize("change", ["strips", "normalizes"])
def test_a_model_that_looks_around_has_a_separator_of_its_own(change: str, tmp_path: Path) -> None:
    import sentencepiece as spm
    from sentencepiece import sentencepiece_model_pb2 as proto

    model = proto.ModelProto()
    model.ParseFromString(kind_path("sp_bpe_chatml").read_bytes())
    if change == "strips":
        model.normalizer_spec.remove_extra_whitespaces = True
    else:
        rules = spm.SentencePieceNormalizer(rule_name="nmt_nfkc").serialized_normalizer_spec()
        model.normalizer_spec.precompiled_charsmap = proto.NormalizerSpec.FromString(rules).precompiled_charsmap
    (tmp_path / "t.model").write_bytes(model.SerializeToString())
    reference = open_encoder(find_tokenizer(tmp_path / "t.model"))
    assert GigatokenEncoder(open_kind("sp_bpe_chatml"))._separator < reference.vocab_size
    fast = GigatokenEncoder(reference)
    assert fast._separator == reference.vocab_size
    check_same(fast, reference, ["a", " b c ", "", "d", "ﬁ①"])


@pytest.mark.parametrize("kind", FAST)
def test_a_control_string_stays_text_wherever_it_stands(kind: str) -> None:
    reference = open_kind(kind)
    fast = GigatokenEncoder(reference)
    strings = control_strings(kind)
    texts = [*strings, *(f"so {string} it" for string in strings), *("plain",) * 9, "".join(strings)]
    check_same(fast, reference, texts)
    assert not set(fast.encode(texts).ids.tolist()) & (set(fast.controls.values()) - {fast.unk_id})
    assert fast.decode(fast.encode(["a</s>b"]).ids) == "a</s>b"


@pytest.mark.parametrize("kind", ["sp_bpe_chatml", "mistral_v3"])
def test_gigatoken_by_itself_would_match_control_tokens(kind: str) -> None:
    """Without the check of ids, control strings in text would be control tokens."""
    fast = GigatokenEncoder(open_kind(kind))
    assert fast.eos_id in fast._backend.encode("a</s>b").tolist()


@pytest.mark.parametrize(("piece", "text"), [("▁hei", " height"), ("▁0.", " 0.9")])
def test_a_control_token_that_begins_with_a_space_is_never_merged(piece: str, text: str) -> None:
    reference = open_encoder(find_tokenizer(kind_path("sp_bpe_chatml")), pad_token=piece)
    assert reference.controls[piece] == reference.pad_id
    fast = GigatokenEncoder(reference)
    check_same(fast, reference, [text, f"{text} {text}", "plain"])
    assert any(piece.replace("▁", " ") in hard for hard in hard_tokens(reference))


@pytest.mark.parametrize("kind", ["sp_bpe_chatml", "mistral_v3"])
def test_texts_that_come_back_with_a_control_id_go_to_the_reference(kind: str) -> None:
    reference = open_kind(kind)
    fast = GigatokenEncoder(reference)
    check_same(fast, reference, ["a", "b</s>c", "so </s></s>\n it", "x</s></a>", "d"])


@pytest.mark.parametrize("kind", FAST)
def test_texts_with_a_control_string_are_found(kind: str) -> None:
    fast = GigatokenEncoder(open_kind(kind))
    strings = [string.replace("▁", " ") for string in fast.controls]

    @FEW
    @given(st.lists(st.one_of(hostile(kind), odd), max_size=12))
    def check(texts: list[str]) -> None:
        held = (any(string in text.replace("▁", " ") for string in strings) for text in texts)
        assert fast.holding(texts) == [place for place, found in enumerate(held) if found]

    check()


def test_removed_tokens_do_not_match_a_text_between_separators() -> None:
    """Placeholders of removed tokens do not match a text between separators.

    A special token before <think> is replaced by a placeholder, such as NUL 3 NUL, to keep the ids of later tokens.
    """
    reference = open_kind("hf_byte_level")
    assert "\\u00003\\u0000" in reference.model().decode()
    fast = GigatokenEncoder(reference)
    assert fast._joined(Texts.of(["a", *"0123456789", "<think>"])) is not None


def test_content_tokens_are_gigatokens() -> None:
    reference = open_kind("hf_byte_level")
    fast = GigatokenEncoder(reference)
    assert reference.content_tokens["<think>"] in fast._joined(Texts.of(["a", "a<think>b"])).ids.tolist()


def left_to_reference(fast: GigatokenEncoder, texts: list[str], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the texts that the reference encodes."""
    found: list[str] = []
    encode = fast._encode_as_text
    monkeypatch.setattr(fast, "_encode_as_text", lambda some: found.extend(some) or encode(some))
    check_same(fast, fast.reference, texts)
    return found


def test_user_defined_white_space_is_the_references(monkeypatch: pytest.MonkeyPatch) -> None:
    fast = GigatokenEncoder(open_kind("sp_bpe_user_defined"))
    texts = ["one two", "a  b", "c", "▁ ", "   "]
    assert left_to_reference(fast, texts, monkeypatch) == ["a  b", "▁ ", "   "]


@pytest.mark.parametrize("kind", ["hf_byte_level", "hf_metaspace", "hf_legacy"])
def test_gigatoken_encodes_control_strings_that_its_model_does_not_have(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fast = GigatokenEncoder(open_kind(kind))
    texts = [text for string in fast.controls for text in (string, f"so{string}it {string}{string}")]
    assert left_to_reference(fast, texts, monkeypatch) == []


@pytest.mark.parametrize("kind", FAST)
def test_it_is_the_same_tokenizer(kind: str) -> None:
    reference = open_kind(kind)
    fast = GigatokenEncoder(reference)
    for name in set(Encoder.__annotations__) - {"engine"}:
        assert getattr(fast, name) == getattr(reference, name), name
    assert [fast.token_bytes(n) for n in range(fast.vocab_size)] == [
        reference.token_bytes(n) for n in range(fast.vocab_size)
    ]
    assert (fast.engine, fast.with_leading_space("x")) == ("gigatoken", reference.with_leading_space("x"))


def test_words_that_were_seen_are_forgotten_before_they_fill_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    reference = open_kind("sp_bpe_chatml")
    fast = GigatokenEncoder(reference)
    first = fast._backend
    check_same(fast, reference, ["one two"])
    assert fast._backend is first
    monkeypatch.setattr(gigatoken_encoder, "MOST_MEMORY", -1 << 50)
    check_same(fast, reference, ["one two"])
    assert fast._backend is not first


def test_a_child_that_is_forked_after_encoding_encodes_the_same() -> None:
    fast = GigatokenEncoder(open_kind("hf_byte_level"))
    texts = [*SENTENCES, "".join(SENTENCES) * 200]
    before = fast.encode(texts).ids.tolist()
    child = os.fork()
    if not child:
        os._exit(fast.encode(texts).ids.tolist() != before)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.parametrize(
    ("kind", "why"), [("sp_unigram", "the model is not BPE"), ("hf_unigram", "not every byte has a token")]
)
def test_other_kinds_are_left_to_the_reference(kind: str, why: str) -> None:
    with pytest.raises(Unsupported, match=why):
        GigatokenEncoder(open_kind(kind))


def trained(path: Path, **options: Any) -> Encoder:
    from sentencepiece import SentencePieceTrainer

    model = io.BytesIO()
    words = iter(line for text in SENTENCES for line in text.split("\n"))
    options = {"model_type": "bpe", "vocab_size": 400, "hard_vocab_limit": False, "minloglevel": 2} | options
    SentencePieceTrainer.train(sentence_iterator=words, model_writer=model, **options)
    path.write_bytes(model.getvalue())
    return open_encoder(find_tokenizer(path))


def test_a_model_without_byte_fallback_is_left_to_the_reference(tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match="not every byte has a token"):
        GigatokenEncoder(trained(tmp_path / "a.model", byte_fallback=False))


def test_a_model_with_unused_pieces_is_left_to_the_reference(tmp_path: Path) -> None:
    from sentencepiece import sentencepiece_model_pb2 as proto

    model = proto.ModelProto()
    model.ParseFromString(kind_path("sp_bpe_chatml").read_bytes())
    model.pieces[len(model.pieces) - 90].type = proto.ModelProto.SentencePiece.UNUSED
    (tmp_path / "a.model").write_bytes(model.SerializeToString())
    with pytest.raises(Unsupported, match="unused pieces"):
        GigatokenEncoder(open_encoder(find_tokenizer(tmp_path / "a.model")))


def test_a_word_piece_tokenizer_is_left_to_the_reference(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordPiece({"[UNK]": 0, "</s>": 1, "a": 2, "##b": 3}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["</s>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(Unsupported, match="not every byte has a token"):
        GigatokenEncoder(open_encoder(find_tokenizer(tmp_path / "tokenizer.json")))


def test_a_model_that_gigatoken_cannot_load_is_left_to_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    reference = open_kind("hf_byte_level")
    spec = json.loads(reference.model())
    spec["model"]["type"] = "WordLevel"
    monkeypatch.setattr(reference, "model", lambda: json.dumps(spec).encode())
    with pytest.raises(Unsupported, match="gigatoken cannot load the model: "):
        GigatokenEncoder(reference)


def test_an_interrupt_waits_until_rust_is_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    fast = GigatokenEncoder(open_kind("sp_bpe_chatml"))
    went: list[str] = []

    class Backend:
        def encode(self, text: str) -> None:
            os.kill(os.getpid(), signal.SIGINT)
            went.append("on")

    monkeypatch.setattr(fast, "_open", lambda: SimpleNamespace(backend=Backend()))
    with pytest.raises(KeyboardInterrupt):
        fast._load()
    assert went == ["on"]


def test_without_gigatoken_the_bytes_are_the_same_and_a_note_says_why_it_is_slow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fast = load_manifest(pack_corpus(make_recipe(tmp_path / "fast", conversations(30))))
    monkeypatch.setitem(sys.modules, "gigatoken", None)
    monkeypatch.setattr(metadata, "version", without_gigatoken(metadata.version))
    checks.release_encoders()
    checks._versions.cache_clear()
    recipe = make_recipe(tmp_path / "slow", conversations(30))
    assert any("pip install gigatoken" in note for note in recipe.notes)
    prediction = predict(recipe.config, tmp_path / "slow", tmp_path / "slow")
    assert sum("pip install gigatoken" in warning for warning in prediction.warnings) == 1
    slow = load_manifest(pack_corpus(recipe))
    choice = checks.chosen_engines(recipe)
    checks._versions.cache_clear()
    assert choice
    assert choice.engine == recipe.encoder.engine
    assert slow == fast


def without_gigatoken(version: Callable[[str], str]) -> Callable[[str], str]:
    def version_of(name: str) -> str:
        if name == "gigatoken":
            raise metadata.PackageNotFoundError(name)
        return version(name)

    return version_of
