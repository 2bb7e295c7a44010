"""The ids of a text equal those of AutoTokenizer, or the tokenizer is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.differential.auto_tokenizers import CHANGES, TEXTS, ids_in_a_row, write_folder, write_json
from support.tokenizer_kinds import BUILT
from transformers import AutoTokenizer

from packcorpus.tasks.core.errors import UsageError
from packcorpus.tasks.encoders import tokenizer_files
from packcorpus.tasks.encoders.auto_classes import REBUILT
from packcorpus.tasks.encoders.auto_tokenizer import load
from packcorpus.tasks.encoders.encoder import Encoder, Unencodable
from packcorpus.tasks.encoders.tokenizer_files import find_tokenizer, open_encoder

CLASSES = ("PreTrainedTokenizerFast", *REBUILT)
# A class for BPE cannot load a Unigram model, and each refusal names its reason.
REASONS = (
    "is for BPE", "to a Unigram model", "replace pieces", "adds a space to each piece", "absorbs white space",
    "is normalized", "between words",
)  # fmt: skip


def opened(place: Path) -> tuple[Encoder, Any] | None:
    """Return both tokenizers of a folder, or None if it is refused."""
    problem = None
    try:
        encoder = open_encoder(find_tokenizer(place))
    except UsageError as error:
        problem = error
    if problem:
        assert problem.reason == "unknown_loading"
        assert any(reason in str(problem) for reason in REASONS)
        assert f"`tokenizer: {{path: {place}, as: files}}`" in str(problem)
        return None
    return encoder, AutoTokenizer.from_pretrained(str(place))


@pytest.mark.parametrize("kind", BUILT)
@pytest.mark.parametrize("class_name", CLASSES)
def test_every_class(kind: str, class_name: str, tmp_path: Path) -> None:
    if (kind, class_name) == ("hf_byte_level", "GemmaTokenizer"):
        pytest.skip("its texts need an unknown token, see the test below")
    equal = 0
    for change in CHANGES:
        place = write_folder(tmp_path / "folder", kind, change, class_name)
        if (found := opened(place)) is None:
            continue
        encoder, auto = found
        for text in TEXTS:
            ids = auto(text, add_special_tokens=False)["input_ids"]
            assert ids_in_a_row(encoder, text) == ids, (change, text)
        assert encoder.vocab_size == len(auto)
        named = {name: token for name, token in auto.special_tokens_map.items() if isinstance(token, str)}
        assert dict(encoder.named_tokens) == named, change
        starts = auto.backend_tokenizer.encode("").ids
        assert encoder.adds_bos == (starts[:1] == [encoder.bos_id]), change
        equal += 1
    assert equal > 9 or kind == "hf_unigram"


def test_a_folder_that_nothing_changes_keeps_its_digest(tmp_path: Path) -> None:
    place = write_folder(tmp_path / "folder", "hf_byte_level", "nothing", "PreTrainedTokenizerFast")
    write_json(place, "config.json", {"model_type": "llama"})
    files = find_tokenizer(place)
    assert files.digest() == files.sha256() == find_tokenizer(place, "files").digest()
    assert [file.name for file in files.files] == ["tokenizer.json", "tokenizer_config.json"]


@pytest.mark.parametrize(
    ("class_name", "model", "change"),
    [
        ("PreTrainedTokenizerFast", {"model_type": "qwen2"}, "nothing"),
        (None, {"tokenizer_class": "GPT2Tokenizer"}, "nothing"),
        ("PreTrainedTokenizerFast", None, "added_tokens.json"),
    ],
)
def test_files_that_decide_are_part_of_the_digest(
    class_name: str | None, model: dict[str, Any] | None, change: str, tmp_path: Path
) -> None:
    place = write_folder(tmp_path / "folder", "hf_byte_level", change, class_name)
    if model:
        write_json(place, "config.json", model)
    files = find_tokenizer(place)
    before = files.digest()
    assert before == f"transformers-5.23:{files.sha256()}"
    decides = place / ("config.json" if model else "added_tokens.json")
    assert decides in files.files
    decides.write_text(decides.read_text() + " ")
    assert find_tokenizer(place).digest() != before
    assert find_tokenizer(place, "files").digest() == find_tokenizer(place, "files").sha256()


def test_a_text_that_needs_an_unknown_token_that_the_file_lacks_is_named(tmp_path: Path) -> None:
    """Its class adds <unk>, which the model cannot use."""
    found = opened(write_folder(tmp_path / "folder", "hf_byte_level", "nothing", "GemmaTokenizer"))
    assert found
    encoder, auto = found
    known_text, other = "train", "漢 train"
    assert encoder.encode([known_text]).ids.tolist() == auto(known_text, add_special_tokens=False)["input_ids"]
    with pytest.raises(Exception, match="Unk token `<unk>` not found"):
        auto(other)
    with pytest.raises(Unencodable, match=r'"漢 train" \(Unk token `<unk>` not found.*; remove the record') as caught:
        encoder.encode([known_text, other])
    assert [*caught.value.problems] == [other]


def test_a_tokenizer_is_built_once_for_its_digest_and_its_encoder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = write_folder(tmp_path / "folder", "hf_byte_level", "nothing", "PreTrainedTokenizerFast")
    loads: list[Path] = []
    monkeypatch.setattr(tokenizer_files, "load", lambda main, settings: loads.append(main) or load(main, settings))
    files = find_tokenizer(place)
    files.digest()
    first = open_encoder(files)
    assert len(loads) == 1
    assert open_encoder(files).model() == first.model()
    assert len(loads) == 2, "the first encoder has changed it"
    files.loaded()
    (place / "tokenizer.json").write_bytes((place / "tokenizer.json").read_bytes() + b" ")
    open_encoder(files)
    assert len(loads) == 4, "the file has changed"


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"tokenizer_class": "BertTokenizer"}, "has the class BertTokenizer"),
        ({"auto_map": {"AutoTokenizer": ["own.Slow", "own.Fast"]}}, "code of its own"),
        ({"split_special_tokens": True}, "the setting `split_special_tokens`"),
        ({"eos_token": {"content": "</s>"}}, "cannot be read"),
    ],
)
def test_what_has_no_rule_is_refused(values: dict[str, Any], reason: str, tmp_path: Path) -> None:
    place = write_folder(tmp_path / "folder", "hf_byte_level", "nothing", None)
    write_json(place, "tokenizer_config.json", {"eos_token": "<|im_end|>", **values})
    with pytest.raises(UsageError, match=reason) as error:
        find_tokenizer(place).digest()
    assert error.value.reason == "unknown_loading"
    assert open_encoder(find_tokenizer(place, "files"), eos_token="<|im_end|>").kind == "huggingface"
