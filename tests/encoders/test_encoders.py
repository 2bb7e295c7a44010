"""Text never becomes a control token, and it can be decoded again.

Ordinary text has the ids of the reference library.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sentencepiece import sentencepiece_model_pb2
from support.profiles import examples
from support.tokenizer_kinds import (
    BUILT,
    HUGGING_FACE,
    KINDS,
    LOSSLESS,
    SENTENCEPIECE,
    SENTENCES,
    cache_folder,
    control_strings,
    hostile,
    kind_path,
    open_kind,
    ordinary,
    reference,
    with_inner_spaces,
)

import packcorpus.tasks.encoders.huggingface_encoder
from packcorpus.tasks.core.errors import DataError, InputMissing, UsageError
from packcorpus.tasks.encoders.encoder import Encoder, Unencodable
from packcorpus.tasks.encoders.sentencepiece_encoder import SentencePieceEncoder
from packcorpus.tasks.encoders.texts import Texts
from packcorpus.tasks.encoders.tokenizer_files import find_tokenizer, open_encoder

FEW = settings(max_examples=examples(60), deadline=None)


def written_as_text(encoder: Encoder, ids: Any) -> bool:
    """Return whether no id is a control token.

    The unknown token is allowed, because it represents a character.
    """
    return not {int(i) for i in ids} & (set(encoder.controls.values()) - {encoder.unk_id})


# -- control tokens ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_no_text_becomes_a_control_token_and_a_batch_is_its_texts_one_by_one(kind: str) -> None:
    encoder = open_kind(kind)

    @FEW
    @given(st.lists(hostile(kind), max_size=5))
    def check(texts: list[str]) -> None:
        encoded = encoder.encode(texts)
        assert encoded.ids.dtype == np.int32
        assert len(encoded.offsets) == len(texts) + 1
        assert (encoded.offsets[0], encoded.offsets[-1]) == (0, len(encoded.ids))
        assert written_as_text(encoder, encoded.ids)
        for index, text in enumerate(texts):
            ids = encoded.ids[encoded.offsets[index] : encoded.offsets[index + 1]].tolist()
            assert ids == encoder.encode([text]).ids.tolist(), text
            if kind in LOSSLESS:
                assert encoder.unk_id is None or encoder.unk_id not in ids
                shown = with_inner_spaces(text, encoder)
                assert encoder.decode(ids) == (shown.replace("▁", " ") if encoder.underline_is_space else shown)

    check()


@pytest.mark.parametrize("kind", KINDS)
def test_every_control_string_alone_comes_back_as_text(kind: str) -> None:
    encoder = open_kind(kind)
    for string in control_strings(kind):
        ids = encoder.encode([string]).ids
        assert written_as_text(encoder, ids), string
        assert encoder.decode(ids) == string
        if encoder.unk_id is not None:
            assert encoder.unk_id not in ids.tolist(), string


@pytest.mark.parametrize("kind", KINDS)
def test_the_controls_are_those_of_the_file(kind: str) -> None:
    expected = {
        "sp_bpe_chatml": {"<pad>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"},
        "sp_bpe_user_defined": {"<pad>", "<s>", "</s>"},
        "sp_unigram": {"<pad>", "<s>", "</s>"},
        "hf_metaspace": {"<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"},
        "hf_unigram": {"<pad>", "<unk>", "</s>", "<|im_start|>", "<|im_end|>", "<sep>"},
    }
    encoder = open_kind(kind)
    if kind in expected:
        assert set(encoder.controls) == expected[kind]
    for string, number in encoder.controls.items():
        assert encoder.decode([number]) == string
    assert {encoder.eos_id, encoder.pad_id} <= set(encoder.controls.values())


def test_white_space_that_is_user_defined_stays_a_piece() -> None:
    encoder = open_kind("sp_bpe_user_defined")
    assert len(encoder.encode(["  "]).ids) == 1


def test_white_space_among_added_tokens_is_no_control_token(tmp_path: Path) -> None:
    """Runs of white space among the added tokens are not control tokens.

    Gemma lists its pieces for runs of spaces and line ends there.
    """
    spec = json.loads((kind_path("hf_metaspace") / "tokenizer.json").read_bytes())
    number = spec["model"]["vocab"]["▁▁"]
    spec["added_tokens"].append({**spec["added_tokens"][0], "id": number, "content": "▁▁", "special": False})
    encoder = open_encoder(find_tokenizer(_changed(tmp_path, spec, "hf_metaspace")))
    assert encoder.controls == open_kind("hf_metaspace").controls
    ids = encoder.encode(["a  b</s>"]).ids
    assert number in ids
    assert encoder.decode(ids) == "a  b</s>"


@pytest.mark.parametrize("kind", KINDS)
def test_texts_with_control_strings(kind: str) -> None:
    encoder = open_kind(kind)
    strings = list(encoder.controls)
    assert encoder.holding(["plain", "a" + strings[0] * 3, strings[-1], strings[0][:-1]]) == [1, 2]
    assert encoder.holding([]) == []


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "hf_unigram"])
def test_the_model_itself_has_no_control_string_to_match(kind: str) -> None:
    """Models other than Unigram do not match control strings.

    This is the first of two guards. The second guard checks every id that the library returns.
    """
    encoder = open_kind(kind)
    assert written_as_text(encoder, encoder._encode(Texts.of(control_strings(kind))).ids)


def test_a_unigram_model_would_match_its_special_tokens_in_text() -> None:
    """Without the check of the encoder, this model returns control ids for text."""
    encoder = open_kind("hf_unigram")
    raw = encoder._encode(Texts.of(["x</s>y<unk>"])).ids.tolist()
    assert encoder.eos_id in raw
    assert encoder.unk_id in raw
    assert encoder.decode(encoder.encode(["x</s>y<unk>"]).ids) == "x</s>y<unk>"


def test_a_character_that_a_model_does_not_know_is_the_unknown_token_and_no_failure() -> None:
    encoder = open_kind("hf_unigram")
    assert encoder.encode(["漢"]).ids.tolist()[-1] == encoder.unk_id


def test_a_control_string_that_a_normalizer_makes_is_text(tmp_path: Path) -> None:
    """A control string that a normalizer creates stays text.

    NFKC turns the full-width ＜/s＞ into </s>.
    """
    spec = json.loads((kind_path("hf_unigram") / "tokenizer.json").read_bytes())
    spec["normalizer"] = {"type": "NFKC"}
    encoder = open_encoder(find_tokenizer(_changed(tmp_path, spec, "hf_unigram")))
    assert encoder.eos_id in encoder._encode(Texts.of(["＜/s＞"])).ids
    ids = encoder.encode(["a", "x ＜/s＞ y", "b"]).ids
    assert written_as_text(encoder, ids)
    assert encoder.decode(ids) == "ax </s> yb"


def test_a_control_token_that_a_text_cannot_avoid_is_an_error(tmp_path: Path) -> None:
    spec = json.loads((kind_path("hf_unigram") / "tokenizer.json").read_bytes())
    spec["added_tokens"].append({**spec["added_tokens"][0], "id": 6, "content": spec["model"]["vocab"][6][0]})
    spec["model"]["vocab"][6][0] = spec["added_tokens"][-1]["content"] = "é"
    encoder = open_encoder(find_tokenizer(_changed(tmp_path, spec, "hf_unigram")))
    with pytest.raises(Unencodable, match='encodes "é" as a control token') as caught:
        encoder.encode(["a", "café </s>", "b", "é"])
    assert list(caught.value.problems) == ["café </s>", "é"]


def test_a_text_on_which_the_library_fails_is_named(tmp_path: Path) -> None:
    """A text on which the library panics is named.

    The library panics if a pattern takes too many steps.
    """
    spec = json.loads((kind_path("hf_byte_level") / "tokenizer.json").read_bytes())
    spec["pre_tokenizer"]["pretokenizers"][0]["pattern"] = {"Regex": r"(?:x+x+)+y|\s+|\S+"}
    encoder = open_encoder(find_tokenizer(_changed(tmp_path, spec, "hf_byte_level")))
    hostile = ["x" * 40 + "!", "? " + "x" * 50]
    with pytest.raises(
        Unencodable, match=r"fails on the text that begins with \"x+\" \(Onig: .*\); remove the record"
    ) as caught:
        encoder.encode(["a", hostile[0], *"bcdefg", hostile[1]])
    assert sorted(caught.value.problems) == sorted(hostile)
    assert encoder.decode(encoder.encode(["a", *"bcdefg"]).ids) == "abcdefg"


@pytest.mark.parametrize("token", [1 << 24, 4_000_000_000])
def test_an_id_beyond_any_vocabulary_is_refused(token: int, tmp_path: Path) -> None:
    spec = json.loads((kind_path("hf_byte_level") / "tokenizer.json").read_bytes())
    spec["model"]["vocab"]["Ġtrain"] = token
    with pytest.raises(DataError, match=f'"Ġtrain" has the id {token:,}, but ids must be below 16,777,216'):
        open_encoder(find_tokenizer(_changed(tmp_path, spec, "hf_byte_level")))


def _changed(place: Path, spec: dict[str, Any], kind: str) -> Path:
    (place / "tokenizer.json").write_text(json.dumps(spec))
    (place / "tokenizer_config.json").write_bytes((kind_path(kind) / "tokenizer_config.json").read_bytes())
    return place


# -- the reference ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", SENTENCEPIECE)
def test_ordinary_text_gives_the_ids_of_sentencepiece(kind: str) -> None:
    encoder, processor = open_kind(kind), reference(kind)

    @FEW
    @given(st.lists(ordinary(kind), min_size=1, max_size=6))
    def check(texts: list[str]) -> None:
        texts = [text for text in texts if text] or ["x"]
        encoded = encoder.encode([encoder.with_leading_space(text) for text in texts])
        assert encoded.ids.tolist() == [i for ids in processor.encode(texts) for i in ids]

    check()


@pytest.mark.parametrize("kind", HUGGING_FACE)
def test_ordinary_text_gives_the_ids_of_transformers(kind: str) -> None:
    encoder, tokenizer = open_kind(kind), reference(kind)

    @FEW
    @given(st.lists(ordinary(kind), min_size=1, max_size=6))
    def check(texts: list[str]) -> None:
        texts = [text for text in texts if text] or ["x"]
        spaced = texts if encoder.leading_space == "none" else [encoder.with_leading_space(text) for text in texts]
        expected = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
        assert encoder.encode(spaced).ids.tolist() == [i for ids in expected for i in ids]

    check()


@pytest.mark.parametrize(
    ("kind", "rule", "text", "spaced"),
    [
        ("sp_bpe_chatml", "template", " x", "  x"),
        ("hf_byte_level", "none", "x", " x"),
        ("hf_metaspace", "first", " x", " x"),
        ("hf_legacy", "each", " x", "  x"),
        ("hf_unigram", "each", " x", " x"),
    ],
)
def test_where_each_kind_puts_a_space(kind: str, rule: str, text: str, spaced: str) -> None:
    encoder = open_kind(kind)
    assert encoder.leading_space == rule
    assert encoder.with_leading_space("x") == " x"
    assert encoder.with_leading_space(text) == spaced


@pytest.mark.parametrize("kind", KINDS)
def test_special_ids_are_those_of_the_reference(kind: str) -> None:
    encoder, library = open_kind(kind), reference(kind)
    if kind in SENTENCEPIECE:
        assert (encoder.bos_id, encoder.eos_id, encoder.unk_id) == (
            library.bos_id(),
            library.eos_id(),
            library.unk_id(),
        )
        assert encoder.vocab_size == library.vocab_size()
        assert encoder.adds_bos
    else:
        assert (encoder.bos_id, encoder.eos_id) == (library.bos_token_id, library.eos_token_id)
        assert encoder.vocab_size == len(library)
        assert encoder.adds_bos == (library.encode("")[:1] == [encoder.bos_id])
        if library.pad_token_id is not None:
            assert encoder.pad_id == library.pad_token_id


@pytest.mark.parametrize("kind", KINDS)
def test_every_token_has_bytes(kind: str) -> None:
    encoder = open_kind(kind)
    assert all(isinstance(encoder.token_bytes(number), bytes) for number in range(encoder.vocab_size))


# -- files ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", BUILT)
def test_eos_and_pad_can_be_named(kind: str) -> None:
    encoder = open_encoder(find_tokenizer(kind_path(kind)), eos_token="a", pad_token="b")
    assert (encoder.decode([encoder.eos_id]), encoder.decode([encoder.pad_id])) == ("a", "b")
    with pytest.raises(UsageError, match=r"unknown token 'nowhere'.*eos_token"):
        open_encoder(find_tokenizer(kind_path(kind)), eos_token="nowhere")


@pytest.mark.parametrize("kind", ["sp_bpe_chatml", "hf_byte_level"])
def test_a_damaged_file_is_named(kind: str, tmp_path: Path) -> None:
    main = find_tokenizer(kind_path(kind)).main
    whole = main.read_bytes()
    for content in (whole[: len(whole) // 2], b"{}", b"\xff\xfe nothing", b"[" * 9):
        broken = tmp_path / main.name
        broken.write_bytes(content)
        with pytest.raises((DataError, UsageError), match=str(broken)):
            open_encoder(find_tokenizer(broken))


def test_what_cannot_be_a_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputMissing, match="no such tokenizer"):
        find_tokenizer(tmp_path / "nowhere.model")
    with pytest.raises(InputMissing, match=r"contains no tokenizer\.json or tokenizer\.model"):
        find_tokenizer(tmp_path)
    (tmp_path / "qwen").mkdir()
    with pytest.raises(InputMissing, match=r"no such tokenizer; did you mean qwen\?"):
        find_tokenizer(tmp_path / "qwenn")
    for name, content, problem in (("a.model", "", "empty file"), ("a.txt", "x", r"not a \.model or \.json file")):
        (tmp_path / name).write_text(content)
        with pytest.raises((DataError, UsageError), match=problem):
            find_tokenizer(tmp_path / name)


def test_a_tokenizer_json_without_an_eos_asks_for_one(tmp_path: Path) -> None:
    spec = json.loads((kind_path("hf_byte_level") / "tokenizer.json").read_bytes())
    spec["added_tokens"] = [t for t in spec["added_tokens"] if t["content"] in ("<think>",)]
    (tmp_path / "tokenizer.json").write_text(json.dumps(spec | {"post_processor": None}))
    with pytest.raises(UsageError, match="no EOS token; set `eos_token`"):
        open_encoder(find_tokenizer(tmp_path / "tokenizer.json"))


def test_a_folder_is_its_files_and_its_digest_follows_them(tmp_path: Path) -> None:
    source = kind_path("hf_byte_level")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((source / name).read_bytes())
    (tmp_path / "notes.txt").write_text("not part of it")
    files = find_tokenizer(tmp_path)
    assert [file.name for file in files.files] == ["tokenizer.json", "tokenizer_config.json"]
    assert files.sha256() == find_tokenizer(source).sha256()
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    changed = find_tokenizer(tmp_path)
    assert changed.chat_template() == "{{ messages }}"
    assert changed.sha256() != files.sha256()


def test_a_folder_with_one_model_of_another_name_is_that_model(tmp_path: Path) -> None:
    source = kind_path("sp_bpe_chatml")
    (tmp_path / "mine.model").write_bytes(source.read_bytes())
    found = find_tokenizer(tmp_path)
    assert (found.main, found.sha256()) == (tmp_path / "mine.model", find_tokenizer(source).sha256())
    (tmp_path / "tokenizer_config.json").write_text("{}")
    assert [file.name for file in find_tokenizer(tmp_path).files] == ["tokenizer_config.json", "mine.model"]
    (tmp_path / "other.model").write_bytes(source.read_bytes())
    with pytest.raises(InputMissing, match=r"contains no .*; specify one of mine\.model, other\.model$"):
        find_tokenizer(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(source.read_bytes())
    assert find_tokenizer(tmp_path).main.name == "tokenizer.model"


def test_a_folder_with_a_sentencepiece_model_is_read_with_its_settings(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(kind_path("sp_bpe_chatml").read_bytes())
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": {"content": "<|im_end|>"}}')
    encoder = open_encoder(find_tokenizer(tmp_path, "files"))
    assert isinstance(encoder, SentencePieceEncoder)
    assert encoder.eos_id == encoder.controls["<|im_end|>"]


def test_tokenizers_are_built_in_the_cache() -> None:
    assert all(kind_path(kind).is_relative_to(cache_folder()) for kind in BUILT)


@pytest.mark.parametrize("kind", ["hf_metaspace", "hf_byte_level"])
def test_a_tokenizer_json_by_itself_keeps_the_bos_that_it_puts_in_front(kind: str) -> None:
    whole = open_kind(kind)
    file = kind_path(kind) / "tokenizer.json"
    alone = open_encoder(find_tokenizer(file), eos_token=whole.control_strings[whole.eos_id])
    assert (alone.bos_id, alone.adds_bos) == (whole.bos_id, whole.adds_bos)


def test_an_ordinary_piece_that_is_named_eos_is_never_content() -> None:
    encoder = open_encoder(find_tokenizer(kind_path("sp_bpe_chatml")), eos_token="e", pad_token="a")
    ids = encoder.encode(["see a tea"]).ids
    assert not {encoder.eos_id, encoder.pad_id} & set(ids.tolist())
    assert encoder.decode(ids) == "see a tea"


def test_a_model_cut_at_any_place_is_refused_or_whole(tmp_path: Path) -> None:
    data = kind_path("sp_bpe_chatml").read_bytes()
    # Also cut the model between fields, where the rest is valid protobuf. The last field is the normalizer.
    model = sentencepiece_model_pb2.ModelProto.FromString(data)
    fields = [field.name for field, _ in model.ListFields()]
    assert fields[-2:] == ["trainer_spec", "normalizer_spec"]
    ends = []
    for field in reversed(fields[1:]):
        model.ClearField(field)
        ends.append(len(model.SerializeToString()))
    for cut in [*range(1, len(data), len(data) // 150), *ends]:
        (tmp_path / "cut.model").write_bytes(data[:cut])
        with pytest.raises(DataError, match="truncated"):
            open_encoder(find_tokenizer(tmp_path / "cut.model"))


@pytest.mark.parametrize("kind", HUGGING_FACE)
def test_a_tokenizer_that_draws_at_random_is_refused(kind: str, tmp_path: Path) -> None:
    shutil.copytree(kind_path(kind), tmp_path / "hf")
    file = tmp_path / "hf" / "tokenizer.json"
    spec = json.loads(file.read_bytes())
    if spec["model"]["type"] != "BPE":
        pytest.skip("only BPE has a dropout")
    for dropout in (None, 0.0):
        spec["model"]["dropout"] = dropout
        file.write_text(json.dumps(spec))
        texts = SENTENCES * 3
        assert (
            open_encoder(find_tokenizer(file.parent)).encode(texts).ids.tolist()
            == open_kind(kind).encode(texts).ids.tolist()
        )
    for dropout in (0.001, 1.0):
        spec["model"]["dropout"] = dropout
        file.write_text(json.dumps(spec))
        with pytest.raises(DataError, match=rf"tokenizer.json: model.dropout is {dropout}, .* set it to null") as error:
            open_encoder(find_tokenizer(file.parent))
        assert error.value.reason == "random_tokenizer"


# -- long texts -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", HUGGING_FACE)
def test_a_text_encoded_in_pieces_is_the_text_encoded_at_once(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    encoder = open_kind(kind)
    texts = [" ".join(SENTENCES), "", "x", "The train leaves at 9. " * 400, "y"]
    whole = encoder.encode(texts)
    monkeypatch.setattr(packcorpus.tasks.encoders.huggingface_encoder, "LONGEST", 1000)
    pieces = encoder.encode(texts)
    assert pieces.offsets.tolist() == whole.offsets.tolist()
    assert pieces.ids.tolist() == whole.ids.tolist()


@pytest.mark.parametrize("kind", HUGGING_FACE)
def test_a_text_without_a_place_to_cut_comes_back(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packcorpus.tasks.encoders.huggingface_encoder, "LONGEST", 1000)
    encoder = open_kind(kind)
    for character in (" ", "a", "</s>"):
        text = character * 9999
        assert encoder.decode(encoder.encode([text]).ids) == text


@pytest.mark.parametrize("blank", ["\n", "   "])
def test_white_space_that_was_added_behind_control_tokens_keeps_its_id(blank: str, tmp_path: Path) -> None:
    shutil.copytree(kind_path("hf_byte_level"), tmp_path / "t")
    spec = json.loads((tmp_path / "t" / "tokenizer.json").read_bytes())
    behind = max([*spec["model"]["vocab"].values(), *(token["id"] for token in spec["added_tokens"])]) + 1
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    for number, (content, special) in enumerate((("<|new|>", True), ("<|newer|>", True), (blank, False))):
        spec["added_tokens"].append({"id": behind + number, "content": content, "special": special} | flags)
    (tmp_path / "t" / "tokenizer.json").write_text(json.dumps(spec))
    encoder = open_encoder(find_tokenizer(tmp_path / "t"))
    encoded = encoder.encode([f"a{blank}b", "a<|newer|>"])
    first = encoded.ids[: encoded.offsets[1]].tolist()
    assert behind + 2 in first
    assert encoder.decode(first) == f"a{blank}b"
    assert not {behind, behind + 1} & set(encoded.ids.tolist())
    assert encoder.decode(encoded.ids[encoded.offsets[1] :]) == "a<|newer|>"
