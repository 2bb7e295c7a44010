"""The small Llama, and the contract between a base model and a corpus."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.profiles import examples
from support.servers.remote import hub_stand_in
from support.small_corpus import conversations, make_recipe, pack_corpus
from support.tokenizer_kinds import kind_path
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from packcorpus.tasks.core.errors import DataError, InputMissing, StorageError
from packcorpus.tasks.encoders.tokenizer_files import find_tokenizer
from packcorpus.tasks.storage.manifest import Manifest, load_manifest
from packcorpus.train.config import TrainingConfig
from packcorpus.train.model import base_model as base_model_module
from packcorpus.train.model.base_model import (
    base_model,
    build_small_llama,
    check_model,
    check_tokenizer,
    positions,
    read_config,
    small_llama,
    tokenizer_path,
)


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shrink the small Llama to a million parameters, which is faster to write."""
    monkeypatch.setattr(base_model_module, "PARAMETERS", 1_000_000)


def count(config: LlamaConfig) -> int:
    with torch.device("meta"):
        return sum(weights.numel() for weights in LlamaForCausalLM(config).parameters())


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


# -- the small Llama ---------------------------------------------------------------------------------------------------


@given(st.integers(300, 150_000))
@settings(max_examples=examples(40), deadline=None)
def test_the_small_llama_has_23_million_parameters_for_any_vocabulary(vocab_size: int) -> None:
    config = small_llama(vocab_size, 1024)
    assert count(config) == pytest.approx(23e6, rel=0.1)
    assert config.num_hidden_layers >= base_model_module.LAYERS
    assert config.hidden_size == 64 * config.num_attention_heads


@pytest.mark.parametrize("sequence_length", [128, 4096, 5000, 100_000])
def test_the_small_llama_has_positions_for_the_rows(sequence_length: int) -> None:
    check_model("it", small_llama(4096, sequence_length), 4095, sequence_length)


@pytest.mark.usefixtures("tiny")
def test_the_same_seed_gives_the_same_bytes(tmp_path: Path) -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    once = build_small_llama(500, 128, 42, tmp_path / "a")
    again = build_small_llama(500, 128, 42, tmp_path / "b")
    assert torch.equal(before, torch.get_rng_state())
    assert once.name == again.name
    assert contents(once) == contents(again)
    other = build_small_llama(500, 128, 43, tmp_path / "a")
    assert other.name != once.name
    assert contents(other)["model.safetensors"] != contents(once)["model.safetensors"]


@pytest.mark.usefixtures("tiny")
def test_an_existing_small_llama_is_reused(tmp_path: Path) -> None:
    path = base_model(TrainingConfig(), 500, 128, tmp_path)
    assert isinstance(path, Path)
    written = (path / "model.safetensors").stat()
    assert base_model(TrainingConfig(), 500, 128, tmp_path) == path
    assert (path / "model.safetensors").stat() == written
    config = read_config(path)
    check_model(path, config, 499, 128)
    loaded, info = AutoModelForCausalLM.from_pretrained(path, output_loading_info=True)
    assert not any(info.values()), f"weights did not match: {info}"
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    assert sum(weights.numel() for weights in loaded.parameters()) == count(config)
    assert path.name.startswith(f"llama-{round(count(config) / 1e6)}m-")


@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize("written", [0, 1])
def test_a_partially_written_model_is_rebuilt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: int) -> None:
    real, calls = base_model_module.write_bytes, []

    def dies(path: Path, data: bytes) -> None:
        calls.append(path)
        if len(calls) > written:
            raise StorageError("cannot_write", "the disk is full")
        real(path, data[: len(data) // 2])  # not the complete content

    monkeypatch.setattr(base_model_module, "write_bytes", dies)
    with pytest.raises(StorageError):
        build_small_llama(500, 128, 42, tmp_path / "a")
    monkeypatch.setattr(base_model_module, "write_bytes", real)
    whole = build_small_llama(500, 128, 42, tmp_path / "a")
    assert contents(whole) == contents(build_small_llama(500, 128, 42, tmp_path / "b"))


# -- base_model --------------------------------------------------------------------------------------------------------


def refusal(kind: type[Exception], call: Any, *arguments: Any) -> str:
    with pytest.raises(kind) as caught:
        call(*arguments)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_folder_or_a_hub_name_is_used_unchanged(tmp_path: Path) -> None:
    small_llama(500, 128).save_pretrained(tmp_path / "mine")
    for named in (tmp_path / "mine", "owner/model"):
        assert base_model(TrainingConfig(base_model=str(named)), 500, 128, tmp_path) == named


@pytest.mark.parametrize("named", ["./nowhere", "/no/where", "a/b/c", "model.gguf", "."])
def test_anything_else_is_not_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: str) -> None:
    monkeypatch.chdir(tmp_path)
    Path("model.gguf").write_bytes(b"GGUF")
    kind, why = (DataError, "contains no config.json") if named == "." else (InputMissing, "no such folder")
    message = refusal(kind, base_model, TrainingConfig(base_model=named), 500, 128, tmp_path)
    assert message.startswith(f"base_model: {named}: {why}")


@pytest.mark.parametrize("content", ["{", "{}", '{"model_type": "no-such-model"}'])
def test_an_unreadable_config(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    assert str(tmp_path) in refusal(DataError, read_config, tmp_path)


def test_code_of_a_model_is_not_executed(tmp_path: Path) -> None:
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Config: pass\n")
    named = {"model_type": "evil", "auto_map": {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}}
    (tmp_path / "config.json").write_text(json.dumps(named))
    refusal(DataError, read_config, tmp_path)
    assert not (tmp_path / "ran").exists()


def test_an_unreachable_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    message = refusal(InputMissing, read_config, "owner/no-such-model")
    assert message.startswith("base_model: 'owner/no-such-model' is not a local folder; it could not be downloaded")


# -- the contract ------------------------------------------------------------------------------------------------------


def test_ids_beyond_the_vocabulary() -> None:
    config = small_llama(500, 128)
    check_model("it", config, 499, 128)
    message = refusal(DataError, check_model, "it", config, 500, 128)
    assert "the id 500" in message
    assert "up to 499" in message


def test_rows_longer_than_the_positions() -> None:
    config = LlamaConfig(vocab_size=500, max_position_embeddings=2048)
    check_model("it", config, 499, 2048)
    message = refusal(DataError, check_model, "it", config, 499, 2049)
    assert "rows have 2049 tokens" in message
    assert "--sequence-length 2048" in message


@pytest.mark.parametrize(
    ("longest", "rope", "reads"),
    [
        (4096, None, 4096),
        (4096, {"rope_type": "linear", "factor": 4.0}, 16384),
        (32768, {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}, 131072),
        (32768, {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 4096}, 32768),
        (163840, {"rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 4096}, 163840),
        (
            131072,
            {
                "rope_type": "llama3",
                "factor": 8.0,
                "original_max_position_embeddings": 8192,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
            },
            131072,
        ),
    ],
)
def test_rope_scaling_extends_the_positions(longest: int, rope: dict[str, Any] | None, reads: int) -> None:
    rope = rope and rope | {"rope_theta": 10000.0}
    assert positions(LlamaConfig(max_position_embeddings=longest, rope_parameters=rope)) == reads


def test_a_model_without_a_limit_accepts_any_row() -> None:
    from transformers import BloomConfig, XLNetConfig  # the first has ALiBi instead of positions, the second says -1

    assert positions(BloomConfig()) is None
    assert positions(XLNetConfig()) is None
    check_model("it", BloomConfig(vocab_size=500), 499, 1 << 20)


# -- tokenizers --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    """The manifest of a corpus made with the file tiny.model."""
    return load_manifest(pack_corpus(make_recipe(tmp_path_factory.mktemp("corpus"), conversations(8))))


MODEL = kind_path("sp_bpe_chatml")
CORPUS = find_tokenizer(MODEL)


def folder_with(path: Path, **files: bytes) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (path / f"tokenizer.{name}").write_bytes(content)
    return path


def changed_model(change: str) -> bytes:
    """Return the model with another last piece, or the same model in other bytes."""
    from sentencepiece import sentencepiece_model_pb2 as proto

    model = proto.ModelProto.FromString(MODEL.read_bytes())
    if change == "piece":
        model.pieces[-1].piece = "another"
    else:
        model.trainer_spec.input.append("saved again")
    return bytes(model.SerializeToString())


def test_the_same_tokenizer_is_accepted(tmp_path: Path, manifest: Manifest) -> None:
    base = folder_with(tmp_path / "base", model=MODEL.read_bytes())
    assert "the same" in check_tokenizer(manifest, CORPUS, TrainingConfig(), base)
    # Next to a tokenizer of the other kind, which find_tokenizer prefers.
    folder_with(base, json=b"{}")
    assert find_tokenizer(base).main.suffix == ".json"
    assert "the same" in check_tokenizer(manifest, CORPUS, TrainingConfig(), base)
    assert "the same" in check_tokenizer(manifest, CORPUS, TrainingConfig(tokenizer=str(MODEL)), "owner/model")
    named = folder_with(tmp_path / "named", model=MODEL.read_bytes())
    (named / "tokenizer.model").rename(named / "mine.model")
    (named / "tokenizer_config.json").write_text("{}")
    assert "the same" in check_tokenizer(manifest, CORPUS, TrainingConfig(tokenizer=str(named)), base)


def test_a_different_tokenizer_is_rejected(tmp_path: Path, manifest: Manifest) -> None:
    base = folder_with(tmp_path / "base", model=changed_model("piece"))
    message = refusal(DataError, check_tokenizer, manifest, CORPUS, TrainingConfig(), base)
    assert manifest.tokenizer.sha256[:12] in message
    assert "vocabulary (" in message
    assert str(base) in message
    # The config's tokenizer overrides the model's own, in both directions.
    assert "the same" in check_tokenizer(manifest, CORPUS, TrainingConfig(tokenizer=str(MODEL)), base)
    right = folder_with(tmp_path / "right", model=MODEL.read_bytes())
    refusal(DataError, check_tokenizer, manifest, CORPUS, TrainingConfig(tokenizer=str(base)), right)


def test_a_tokenizer_of_another_kind_is_rejected(tmp_path: Path, manifest: Manifest) -> None:
    base = folder_with(tmp_path / "base", json=b"{}")
    for config in (TrainingConfig(), TrainingConfig(tokenizer=str(base))):
        assert manifest.tokenizer.sha256[:12] in refusal(DataError, check_tokenizer, manifest, CORPUS, config, base)


def test_a_base_model_without_a_tokenizer(tmp_path: Path, manifest: Manifest) -> None:
    assert "was not compared" in check_tokenizer(manifest, CORPUS, TrainingConfig(), tmp_path)
    refusal(InputMissing, check_tokenizer, manifest, CORPUS, TrainingConfig(tokenizer=str(tmp_path / "no")), tmp_path)


def test_the_tokenizer_of_a_model_on_the_hub(
    tmp_path: Path, manifest: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = folder_with(tmp_path / "right", model=MODEL.read_bytes())
    other = folder_with(tmp_path / "other", model=changed_model("piece"))
    for folder in (right, other):
        monkeypatch.setattr(base_model_module, "fetch_model", lambda model, patterns, folder=folder: folder)
        if folder == right:
            assert "the same in owner/model" in check_tokenizer(manifest, CORPUS, TrainingConfig(), "owner/model")
        else:
            refusal(DataError, check_tokenizer, manifest, CORPUS, TrainingConfig(), "owner/model")


def test_a_model_on_the_hub_shares_the_cache_with_the_tokenizer_of_a_corpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    folder = Path(kind_path("hf_byte_level"))
    with hub_stand_in() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        hub.publish("owner/model", {path.name: path.read_bytes() for path in folder.iterdir()})
        recipe = make_recipe(tmp_path, conversations(5), tokenizer="owner/model")
        packed_with = recipe.tokenizer_files.main.parent
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert tokenizer_path(TrainingConfig(), "owner/model") == packed_with
    assert tokenizer_path(TrainingConfig(tokenizer="owner/model"), tmp_path) == packed_with


def test_a_tokenizer_that_was_saved_again_is_the_same(tmp_path: Path, manifest: Manifest) -> None:
    base = folder_with(tmp_path / "base", model=changed_model("bytes"))
    assert find_tokenizer(base).sha256() != manifest.tokenizer.sha256
    assert "although their files differ" in check_tokenizer(manifest, CORPUS, TrainingConfig(), base)


def test_a_corpus_made_with_a_folder(tmp_path: Path) -> None:
    # The digest of the corpus covers all files of the folder.
    base = folder_with(tmp_path / "project" / "base", model=MODEL.read_bytes())
    (base / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    made = load_manifest(pack_corpus(make_recipe(tmp_path / "project", conversations(8), tokenizer="base")))
    corpus, copy = find_tokenizer(base), tmp_path / "copy"
    shutil.copytree(base, copy)
    assert "the same" in check_tokenizer(made, corpus, TrainingConfig(), copy)
    (copy / "tokenizer_config.json").write_text('{"eos_token": "</s>", "chat_template": "another"}')
    assert "the same" in check_tokenizer(made, corpus, TrainingConfig(), copy)
    (copy / "tokenizer_config.json").write_text('{"eos_token": "<s>"}')
    message = refusal(DataError, check_tokenizer, made, corpus, TrainingConfig(), copy)
    assert 'eos_token ("</s>" in the corpus, "<s>" in the model)' in message
    named = made.model_copy(update={"config": made.config | {"eos_token": "</s>"}})
    assert "the same" in check_tokenizer(named, corpus, TrainingConfig(), copy)
