"""Two tokenizers are the same if every text becomes the same tokens.

The layout of their files does not matter.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.small_corpus import conversations, make_recipe, pack_corpus
from support.tokenizer_kinds import CHATML_JINJA, HUGGING_FACE, KINDS, SENTENCEPIECE, kind_path

from packcorpus.tasks.core.errors import DataError
from packcorpus.tasks.encoders.auto_tokenizer import Comparison
from packcorpus.tasks.encoders.tokenizer_files import TokenizerFiles, find_tokenizer
from packcorpus.tasks.storage.corpus_folder import checked_folder
from packcorpus.tasks.storage.manifest import Manifest, load_manifest
from packcorpus.train import doctor
from packcorpus.train.model import base_model
from packcorpus.train.model.base_model import check_rows, compare_rows, differences


def files_of(kind: str) -> TokenizerFiles:
    return find_tokenizer(kind_path(kind))


def changed_json(place: Path, kind: str, change: Callable[[dict[str, Any]], Any]) -> TokenizerFiles:
    """Write a changed tokenizer.json of a kind in another layout."""
    # tokenizer_config.json is not changed.
    spec = json.loads((kind_path(kind) / "tokenizer.json").read_bytes())
    change(spec)
    place.mkdir(exist_ok=True)
    (place / "tokenizer.json").write_text(json.dumps(spec, indent=3, sort_keys=True))
    (place / "tokenizer_config.json").write_bytes((kind_path(kind) / "tokenizer_config.json").read_bytes())
    return find_tokenizer(place)


def changed_model(place: Path, kind: str, change: Callable[[Any], Any]) -> TokenizerFiles:
    from sentencepiece import sentencepiece_model_pb2 as proto

    model = proto.ModelProto.FromString(kind_path(kind).read_bytes())
    change(model)
    (place / "tokenizer.model").write_bytes(model.SerializeToString())
    return find_tokenizer(place)


@pytest.mark.parametrize("kind", KINDS)
def test_a_tokenizer_is_itself_and_no_other(kind: str) -> None:
    for other in [kind] if kind == "mistral_v3" else KINDS[:-1]:
        assert (differences(files_of(kind), files_of(other)) == []) == (kind == other), other


@pytest.mark.parametrize("kind", HUGGING_FACE)
def test_a_tokenizer_that_transformers_saves_again_is_the_same(kind: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers saves the tokenizer and is not installed")
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(str(kind_path(kind)))
    tokenizer.chat_template = "another"
    tokenizer.save_pretrained(str(tmp_path))
    again = find_tokenizer(tmp_path)
    assert again.sha256() != files_of(kind).sha256()
    assert differences(files_of(kind), again) == []


TRUNCATION = {"max_length": 9, "strategy": "LongestFirst", "stride": 0, "direction": "Right"}


def _old_merges(spec: dict[str, Any]) -> None:
    """Write each merge as one string, like older versions of the library."""
    if "merges" in spec["model"]:
        spec["model"]["merges"] = [" ".join(pair) for pair in spec["model"]["merges"]]


@pytest.mark.parametrize("kind", HUGGING_FACE)
@pytest.mark.parametrize(
    "change",
    [
        lambda spec: None,
        _old_merges,
        lambda spec: spec.update(truncation=TRUNCATION),
        lambda spec: spec.update(post_processor=None),
        lambda spec: spec.update(decoder=None),
    ],
)  # fmt: skip
def test_what_changes_no_token_does_not_count(kind: str, change: Callable[[Any], Any], tmp_path: Path) -> None:
    assert differences(files_of(kind), changed_json(tmp_path, kind, change)) == []


@pytest.mark.parametrize(
    ("kind", "change", "named"),
    [
        ("hf_byte_level", lambda s: s["model"]["merges"].pop(), r"merges \(number .* in the corpus, none in the m"),
        ("hf_byte_level", lambda s: _last(s).update(special=True), r'added tokens \("</tool_call>": \d+ in .*special'),
        ("hf_byte_level", lambda s: s["added_tokens"].pop(), r'added tokens \("</tool_call>": .*, none in the model\)'),
        ("hf_byte_level", lambda s: s.update(normalizer={"type": "NFC"}), r"^normalizer$"),
        ("hf_metaspace", lambda s: s["pre_tokenizer"].update(prepend_scheme="always"), r"^pre-tokenizer$"),
        ("hf_metaspace", lambda s: s["model"].update(byte_fallback=False), r'model settings \("byte_fallback": True'),
        ("hf_metaspace", lambda s: s["model"]["vocab"].update(new=1000), r'vocabulary \("new": none .*, 1000 in'),
        ("hf_unigram", lambda s: s["model"]["vocab"][9].__setitem__(1, -99.0), r"scores \(.* -99.0 in the model\)"),
    ],
)  # fmt: skip
def test_what_changes_tokens_is_named(kind: str, change: Callable[[Any], Any], named: str, tmp_path: Path) -> None:
    found = differences(files_of(kind), changed_json(tmp_path, kind, change))
    assert any(re.search(named, part) for part in found), found


def _last(spec: dict[str, Any]) -> dict[str, Any]:
    """Return the last added token of a tokenizer.json."""
    token: dict[str, Any] = spec["added_tokens"][-1]
    return token


@pytest.mark.parametrize("kind", SENTENCEPIECE[:3])
def test_a_sentencepiece_model_with_other_notes_is_the_same(kind: str, tmp_path: Path) -> None:
    again = changed_model(tmp_path, kind, lambda model: model.trainer_spec.input.append("elsewhere.txt"))
    assert again.sha256() != files_of(kind).sha256()
    assert differences(files_of(kind), again) == []


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda m: setattr(m.pieces[-1], "piece", "new"), "vocabulary ("),
        (lambda m: setattr(m.pieces[-9], "score", -7777.0), "-7777.0 in the model"),
        (lambda m: setattr(m.pieces[-9], "type", 4), "USER_DEFINED"),
        (lambda m: setattr(m.normalizer_spec, "add_dummy_prefix", False), "normalizer"),
        (lambda m: setattr(m.trainer_spec, "eos_piece", "e"), '"eos_piece": "</s>" in the corpus, "e" in the model'),
    ],
)
def test_what_changes_tokens_of_a_sentencepiece_model_is_named(
    change: Callable[[Any], Any], named: str, tmp_path: Path
) -> None:
    found = differences(files_of("sp_bpe_chatml"), changed_model(tmp_path, "sp_bpe_chatml", change))
    assert any(named in part for part in found), found


def test_bos_and_eos_count_if_both_name_them(tmp_path: Path) -> None:
    other = changed_json(tmp_path, "hf_byte_level", lambda spec: None)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_bytes())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings | {"eos_token": "<|eot_id|>"}))
    ours = files_of("hf_byte_level")
    assert differences(ours, other) == ['eos_token ("<|im_end|>" in the corpus, "<|eot_id|>" in the model)']
    assert differences(ours, other, compare_eos=False) == []
    alone = TokenizerFiles(other.main, (other.main,))
    assert differences(ours, alone) == differences(alone, ours) == []


def test_a_conversion_is_not_compared() -> None:
    [found] = differences(files_of("sp_bpe_chatml"), files_of("hf_metaspace"))
    assert "the corpus has a SentencePiece model, but the model has a tokenizer.json" in found


def test_a_damaged_tokenizer_is_named(tmp_path: Path) -> None:
    for name, kind in (("tokenizer.json", "hf_byte_level"), ("tokenizer.model", "sp_bpe_chatml")):
        (tmp_path / name).write_bytes(b"\xff nothing")
        damaged = TokenizerFiles(tmp_path / name, (tmp_path / name,))
        with pytest.raises(DataError, match=name):
            differences(files_of(kind), damaged)


# -- texts of the rows -------------------------------------------------------------------------------------------


def changed(place: Path, **values: Any) -> Path:
    shutil.copytree(kind_path("hf_byte_level"), place)
    file = place / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_bytes()) | values))
    return place


def packed(place: Path, tokenizer: object = "hf") -> tuple[Manifest, Path]:
    (place / "own.jinja").write_text(CHATML_JINJA)
    path = pack_corpus(make_recipe(place, conversations(20), tokenizer=tokenizer, template="own.jinja"))
    manifest = load_manifest(path)
    return manifest, checked_folder(manifest, path)


def test_rows_are_compared_with_the_tokenizer_of_the_model(tmp_path: Path) -> None:
    same = changed(tmp_path / "hf")
    other = changed(tmp_path / "other", tokenizer_class="GPT2Tokenizer", add_prefix_space=True)
    manifest, folder = packed(tmp_path)
    assert compare_rows(manifest, folder, same).texts > 20
    assert check_rows(manifest, folder, same).endswith("texts have the tokens of AutoTokenizer")
    with pytest.raises(DataError, match=r"becomes .* here, but .* with AutoTokenizer of Transformers") as error:
        check_rows(manifest, folder, other)
    assert error.value.reason == "other_tokenizer"


@pytest.mark.parametrize("tokenizer", [{"path": "hf", "as": "files"}, "hf/tokenizer.json"])
def test_a_file_that_is_used_as_it_is_only_leads_to_a_note(tokenizer: object, tmp_path: Path) -> None:
    place = changed(tmp_path / "hf", tokenizer_class="GPT2Tokenizer", add_prefix_space=True)
    manifest, folder = packed(tmp_path, tokenizer)
    assert check_rows(manifest, folder, place).startswith("tokenizer: ")
    assert "here, but" in check_rows(manifest, folder, place)


def test_doctor_compares_the_newest_corpora(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changed(tmp_path / "hf", tokenizer_class="GPT2Tokenizer")
    manifest, folder = packed(tmp_path)
    monkeypatch.chdir(tmp_path)
    [finding] = doctor._tokenizers()
    assert (finding.level, finding.topic) == ("ok", "tokenizer")
    assert finding.found.startswith(f"small {manifest.key[:12]}: ")
    # A later release of Transformers may follow other rules.
    monkeypatch.setattr(base_model, "compare_rows", lambda *given: Comparison(difference="a becomes b"))
    [finding] = doctor._tokenizers()
    assert finding.level == "warning"
    assert finding.found.endswith("a becomes b")
    shutil.rmtree(folder)
    assert not list(doctor._tokenizers())
