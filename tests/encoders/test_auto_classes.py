"""The class of a tokenizer is the one that AutoTokenizer chooses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import transformers
from transformers import AutoTokenizer, PreTrainedTokenizerBase
from transformers.models.auto import tokenization_auto

from packcorpus.tasks.encoders.auto_classes import (
    AS_IS,
    CLASS_OF_TYPE,
    MISTRAL,
    REBUILT,
    VERSION,
    WRONG_CLASS,
    class_of,
)

NO_RULE = "of its model"
NAMES = (
    None, "LlamaTokenizer", "LlamaTokenizerFast", "GPT2Tokenizer", "PreTrainedTokenizerFast", "Qwen2TokenizerFast",
    "TokenizersBackend", "GemmaTokenizer", "BloomTokenizerFast", "Phi3Tokenizer",
)  # fmt: skip
TYPES = (
    None, "llama", "qwen2", "qwen3", "qwen3_5", "mistral", "granite", "gpt2", "gemma3_text", "phi3", "cohere", "olmo",
    "olmo2", "falcon_mamba", "hyperclovax_vision_v2", "internlm2", "starcoder2", "new_type",
)  # fmt: skip


def test_the_tables_are_those_of_the_tested_release() -> None:
    """If this test fails after an update, follow the new rules, and raise VERSION."""
    assert transformers.__version__.startswith(f"{VERSION}.")
    theirs = {
        model_type: (name or "").removesuffix("Fast")
        for model_type, name in tokenization_auto.TOKENIZER_MAPPING_NAMES.items()
    }
    ours = {model_type: name for model_type, name in CLASS_OF_TYPE.items() if name != NO_RULE}
    known = {AS_IS, *REBUILT, "CodeLlamaTokenizer"}
    assert ours == {model_type: name for model_type, name in theirs.items() if name in known}
    assert CLASS_OF_TYPE.keys() == theirs.keys()
    assert WRONG_CLASS == tokenization_auto.MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS
    assert {model_type for model_type in MISTRAL if CLASS_OF_TYPE[model_type] != AS_IS} == set()


@pytest.mark.parametrize("is_byte_level", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_the_class_is_that_of_auto_tokenizer(
    name: str | None, is_byte_level: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        PreTrainedTokenizerBase, "from_pretrained", classmethod(lambda cls, *given, **settings: cls.__name__)
    )
    (tmp_path / "tokenizer.json").write_text('"ByteLevel"' * is_byte_level)
    for model_type in TYPES:
        for in_model in (False, True):
            named = {"tokenizer_class": name} if name else {}
            model = ({"model_type": model_type} if model_type else {}) | (named if in_model else {})
            config = {} if in_model else named
            (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
            (tmp_path / "config.json").write_text(json.dumps(model or {"architectures": ["A"]}))
            found = class_of(config, model, lambda: is_byte_level)
            assert found == AutoTokenizer.from_pretrained(str(tmp_path)), (model_type, in_model)
