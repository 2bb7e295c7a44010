"""Training compares texts of the rows with AutoTokenizer of the model."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from support.small_corpus import conversations, make_recipe, pack_corpus
from support.tokenizer_kinds import CHATML_JINJA, kind_path

from tasks.core.errors import DataError
from tasks.encoders.as_transformers.compare import Comparison
from tasks.storage.corpus_folder import checked_folder
from tasks.storage.manifest import Manifest, load_manifest
from train import doctor
from train.model import base_model
from train.model.base_model import check_rows, compare_rows


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
