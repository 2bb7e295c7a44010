"""The comparison with the installed AutoTokenizer names the first difference."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from support.commands import ROOT
from support.small_corpus import conversations, make_recipe, pack_corpus
from support.tokenizer_kinds import CHATML_JINJA, SENTENCES, kind_path

from packcorpus.tasks.dry_run.dry_run import predict
from packcorpus.tasks.encoders import auto_tokenizer
from packcorpus.tasks.encoders.auto_tokenizer import Comparison, compare, texts_in
from packcorpus.tasks.encoders.encoder import Encoded, Unencodable
from packcorpus.tasks.encoders.huggingface_encoder import HuggingFaceEncoder
from packcorpus.tasks.encoders.tokenizer_files import find_tokenizer, open_encoder, open_tokenizer
from packcorpus.tasks.recipe import Recipe
from packcorpus.tasks.storage.corpus_folder import checked_folder
from packcorpus.tasks.storage.manifest import load_manifest
from packcorpus.tasks.verification.verify import verify

TEXTS = [*SENTENCES, " a", "", "The", "a </s> b <|im_end|>", "<think>"]


def folder(place: Path, kind: str = "hf_byte_level", **values: object) -> Path:
    shutil.copytree(kind_path(kind), place)
    file = place / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_bytes()) | values))
    return place


@pytest.mark.parametrize("kind", ["hf_byte_level", "hf_metaspace", "hf_legacy", "hf_unigram"])
def test_equal_tokenizers(kind: str) -> None:
    encoder = open_encoder(find_tokenizer(kind_path(kind)))
    found = compare(encoder, kind_path(kind), TEXTS)
    assert not found.difference
    assert not found.failure
    assert found.texts > 30


def test_the_first_different_text_is_named(tmp_path: Path) -> None:
    place = folder(tmp_path / "hf", tokenizer_class="GPT2Tokenizer", add_prefix_space=True)
    found = compare(open_encoder(find_tokenizer(place, "files")), place, ["\n", "The train"])
    assert found.texts == 0
    assert found.difference.startswith('"\\n" becomes "Ċ" here, but "Ġ Ċ" with AutoTokenizer of Transformers 5')
    assert not compare(open_encoder(find_tokenizer(place)), place, TEXTS).difference


def test_a_token_with_another_id_is_named(tmp_path: Path) -> None:
    place = folder(tmp_path / "hf")
    encoder = open_encoder(find_tokenizer(place))
    spec = json.loads((place / "tokenizer.json").read_bytes())
    spec["added_tokens"][0]["content"], spec["added_tokens"][1]["content"] = "<|new|>", "<|begin_of_text|>"
    spec["post_processor"] = None
    (place / "tokenizer.json").write_text(json.dumps(spec))
    assert 'the token "<|begin_of_text|>" has the id' in compare(encoder, place, TEXTS).difference


def test_a_folder_that_auto_tokenizer_cannot_load(tmp_path: Path) -> None:
    found = compare(open_encoder(find_tokenizer(kind_path("hf_byte_level"))), tmp_path, TEXTS)
    assert "cannot load" in found.failure


def test_a_comparison_loads_no_pytorch_and_leaves_transformers_as_it_was() -> None:
    code = f"""
import sys
from pathlib import Path
from packcorpus.tasks.encoders.auto_tokenizer import compare
from packcorpus.tasks.encoders.tokenizer_files import find_tokenizer, open_encoder
place = Path({str(kind_path("hf_byte_level"))!r})
print(compare(open_encoder(find_tokenizer(place)), place, ["a", "b"]))
print([name for name in sys.modules if name.partition(".")[0] in ("torch", "transformers")])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout == "Comparison(texts=2, difference='', failure='')\n[]\n"
    assert done.stderr == ""


def test_no_text_is_equal() -> None:
    encoder = open_encoder(find_tokenizer(kind_path("hf_byte_level")))
    assert compare(encoder, kind_path("hf_byte_level"), ["", "<|im_end|>"]) == Comparison(0)


def test_texts_without_an_encoding_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    encoder = open_encoder(find_tokenizer(kind_path("hf_byte_level")))

    def encode(texts: Sequence[str]) -> Encoded:
        if "b" in texts:
            raise Unencodable({"b": "no encoding"})
        return HuggingFaceEncoder.encode(encoder, texts)

    monkeypatch.setattr(encoder, "encode", encode)
    assert compare(encoder, kind_path("hf_byte_level"), ["a", "b", "c"]) == Comparison(2)


def made(place: Path, tokenizer: object) -> Recipe:
    (place / "own.jinja").write_text(CHATML_JINJA)
    return make_recipe(place, conversations(20), tokenizer=tokenizer, template="own.jinja")


def test_a_corpus_keeps_how_its_tokenizer_is_loaded(tmp_path: Path) -> None:
    """The copy in the corpus encodes like the original.

    `as: files` makes another corpus.
    """
    folder(tmp_path / "hf", tokenizer_class="GPT2Tokenizer", add_prefix_space=True)
    keys = set()
    for tokenizer in ("hf", {"path": "hf", "as": "transformers"}, {"path": "hf", "as": "files"}):
        recipe = made(tmp_path, tokenizer)
        path = pack_corpus(recipe)
        manifest = load_manifest(path)
        keys.add(manifest.key)
        copy = checked_folder(manifest, path)
        assert manifest.tokenizer.digest == recipe.tokenizer_digest
        assert open_tokenizer(manifest, copy).model() == recipe.encoder.model()
        verify(path)
        rows = [[*recipe.encoder.encode(["The train leaves"]).ids.tolist(), recipe.encoder.eos_id]]
        found = compare(recipe.encoder, copy / "tokenizer", texts_in(recipe.encoder, rows))
        assert bool(found.difference) == (tokenizer == {"path": "hf", "as": "files"})
    assert len(keys) == 2


def test_check_warns_of_a_difference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder(tmp_path / "hf", tokenizer_class="GPT2Tokenizer")
    recipe = made(tmp_path, "hf")

    def warnings() -> list[str]:
        found = predict(recipe.config, recipe.folder, tmp_path).warnings
        return [warning.partition(";")[0] for warning in found if warning.startswith("tokenizer: ")]

    assert not warnings()
    monkeypatch.setattr("packcorpus.tasks.dry_run.sample.compare", lambda *given: Comparison(3, "a becomes b"))
    assert warnings() == ["tokenizer: a becomes b"]
    monkeypatch.setattr(auto_tokenizer, "find_spec", lambda name: None)
    assert not warnings()
