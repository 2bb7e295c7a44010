"""Certify finds what public reports describe, replayed on a tiny model.

    a run, merged by the real code ─change one file as in the report─▶ the check that must say so

The links of the reports are below https://github.com. Each check is also run on the unchanged run, which has no fault.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.training.finished_runs import finished_run, merged, run_on
from support.training.served_runs import CHATML, Served, make_corpus, make_run, update
from transformers import AutoConfig, AutoTokenizer, Gemma3ForConditionalGeneration, Qwen3VLForConditionalGeneration

from packcorpus.tasks.storage.files import sha256_of
from packcorpus.train.certify.adapter_checks import check_adapter, check_names
from packcorpus.train.certify.command import certify
from packcorpus.train.certify.finding import Finding, table, verdict
from packcorpus.train.certify.model_checks import check_logits, check_stops, check_weights
from packcorpus.train.certify.prompt_checks import check_ids, check_template


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Served:
    torch.set_num_threads(1)
    home = tmp_path_factory.mktemp("llama")
    return make_run(home, home, make_corpus(home), "llama")


@pytest.fixture
def served(made: Served, tmp_path: Path) -> Served:
    """Return a copy of the sound run, whose files may be changed."""
    shutil.copytree(made.root, tmp_path / "copy")
    home = tmp_path / "copy"
    update(home / "run" / "training.json", base_model=str(home / "base"))
    return Served(home, home / "run", home / "out")


def test_the_unchanged_run_is_sound(made: Served) -> None:
    for is_merged in (True, False):
        findings = certify(made.subject(is_merged))
        assert [each for each in findings if each.result in ("FAULT", "avoid")] == []
        assert {each.check for each in findings if each.result == "skipped"} <= {"vLLM", "weights"}
        is_sound, lines = verdict(made.subject(is_merged), findings)
        assert is_sound
        assert lines[0].startswith("SOUND: ")
        assert max(map(len, [*table(findings), *lines])) <= 80


def manifest_of(served: Served) -> Path:
    [manifest] = (served.root / "manifests").glob("*.json")
    return manifest


# -- tokenizers --------------------------------------------------------------------------------------------------------


def change_tokenizer(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    spec = json.loads((folder / "tokenizer.json").read_bytes())
    change(spec)
    (folder / "tokenizer.json").write_text(json.dumps(spec))


def test_metaspace_replaces_byte_level(served: Served) -> None:
    """Replay huggingface/transformers/issues/45488.

    The class LlamaTokenizer replaces the pre-tokenizer; spaces are lost.
    """

    def change(spec: dict[str, Any]) -> None:
        spec["pre_tokenizer"] = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": False}

    change_tokenizer(served.merged, change)
    assert 'becomes "' in served.faults(check_ids)
    assert "merged: " in served.faults(check_ids)
    assert "renders the text of training, but its tokens are" in served.faults(check_template)


def test_a_class_with_another_digit_rule(served: Served) -> None:
    """Replay huggingface/transformers/issues/45920.

    The class in tokenizer_config.json splits digits otherwise.
    """
    update(served.merged / "tokenizer_config.json", tokenizer_class="Qwen2Tokenizer")
    assert 'becomes "' in served.faults(check_ids)


def test_a_class_that_follows_from_the_model(made: Served, tmp_path: Path) -> None:
    """Replay huggingface/transformers/issues/45812.

    The same files, but config.json of another model decides the class.
    """
    served = make_run(made.root, tmp_path, json.loads(manifest_of(made).read_bytes()), "qwen2")
    assert 'becomes "' in served.faults(check_ids)


def test_another_regular_expression(served: Served) -> None:
    """Replay huggingface/transformers/issues/42591.

    The advice to fix Mistral's expression, for another model.
    """

    def change(spec: dict[str, Any]) -> None:
        spec["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = (
            r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+"
        )

    change_tokenizer(served.base, change)
    assert "base: " in served.faults(check_ids)


def test_added_tokens_with_other_ids(served: Served) -> None:
    """Replay unslothai/unsloth/issues/188.

    The saved tokenizer has other special tokens than training.
    """

    def change(spec: dict[str, Any]) -> None:
        tokens = {token["content"]: token for token in spec["added_tokens"]}
        tokens["<|im_end|>"]["content"], tokens["<|eot_id|>"]["content"] = "<|eot_id|>", "<|im_end|>"

    change_tokenizer(served.merged, change)
    assert 'the token "<|im_end|>" has the id' in served.faults(check_ids) or "<|eot_id|>" in served.faults(check_ids)
    assert "its tokens are" in served.faults(check_template)


def test_a_folder_without_tokenizer(served: Served) -> None:
    for file in served.merged.glob("tokenizer*"):
        file.unlink()
    assert "has no tokenizer; copy that of the corpus" in served.faults(check_ids)


# -- adapters ----------------------------------------------------------------------------------------------------------


def rename(run: Path, change: Callable[[str], str]) -> None:
    """Rename the tensors of an adapter, as if it had been trained so."""
    file = run / "adapter_model.safetensors"
    save_file({change(name): value for name, value in load_file(file).items()}, file, {"format": "pt"})
    update(run / "training.json", adapter_sha256=sha256_of(file))


TEXT = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 16, "vocab_size": 500,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
WRAPPERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "gemma3": (
        Gemma3ForConditionalGeneration,
        {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28,
         "patch_size": 14},
    ),
    "qwen3_vl": (
        Qwen3VLForConditionalGeneration,
        {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 32,
         "deepstack_visual_indexes": [0]},
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", WRAPPERS)
def test_names_of_the_text_model_for_a_wrapper(kind: str, made: Served, tmp_path: Path) -> None:
    """Replay vllm-project/vllm/issues/34186 (Gemma 3) and 48019 (Qwen 3 VL).

    VLLM serves the base model, without an error.

    The names of an adapter that was trained on the wrapper are right.
    """
    cls, vision = WRAPPERS[kind]
    torch.manual_seed(1)
    config = AutoConfig.for_model(kind, text_config=TEXT, vision_config=vision, architectures=[cls.__name__])
    cls(config).save_pretrained(tmp_path / "base")
    finished_run(tmp_path / "text")
    shutil.move(tmp_path / "text" / "run", tmp_path / "run")
    update(tmp_path / "run" / "training.json", base_model=str(tmp_path / "base"), base_digest=None)
    served = Served(made.root, tmp_path / "run", tmp_path)
    found = served.faults(check_names, is_merged=False)
    assert f"of no module of {cls.__name__}, which servers load: vLLM ignores them" in found
    assert "serve the merged model" in found
    rename(tmp_path / "run", lambda name: name.replace("model.model.layers", "model.model.language_model.layers"))
    assert served.faults(check_names, is_merged=False) == ""


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral"])
def test_stacked_experts(name: str, made: Served, tmp_path: Path) -> None:
    """Replay vllm-project/vllm/pull/41384 and 52194, sgl-project/sglang/pull/32376.

    Adapters of experts are dropped.
    """
    served = Served(made.root, finished_run(tmp_path, name), tmp_path)
    assert "stacked experts (target_parameters): vLLM and SGLang drop" in served.faults(check_names, is_merged=False)


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ({"lora_variant": "dora"}, "vLLM refuses DoRA"),
        ({"modules_to_save": ["lm_head"]}, "vLLM refuses modules that were trained as a whole"),
    ],
)
def test_what_vllm_refuses(how: dict[str, Any], text: str, made: Served, tmp_path: Path) -> None:
    """PEFTHelper of vLLM raises ValueError at the first request with the adapter."""
    served = Served(made.root, finished_run(tmp_path, **how), tmp_path)
    assert f"{text}" in served.faults(check_names, is_merged=False)


def test_a_rank_above_the_default_of_vllm_is_a_note(made: Served, tmp_path: Path) -> None:
    served = Served(made.root, finished_run(tmp_path, lora_r=20), tmp_path)
    [note] = [each for each in check_names(served.subject(False)) if each.result == "note"]
    assert note.text == "rank 20: vLLM needs --max-lora-rank 32"
    assert served.faults(check_names, is_merged=False) == ""


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda name: name.replace("base_model.model.", "base_model.model.base_model.model.", 1), "PEFT ignores it"),
        (lambda name: f"thinker.{name}", "PEFT ignores it"),
        (lambda name: name.replace("q_proj", "query"), "is missing; the base model expects"),
    ],
)
def test_names_that_peft_ignores(change: Callable[[str], str], text: str, served: Served) -> None:
    """Replay huggingface/peft/issues/2699 and NVIDIA-NeMo/Automodel/pull/3672.

    Keys that match nothing, and a warning.
    """
    rename(served.run, change)
    assert text in served.faults(check_adapter)
    findings = certify(served.subject())
    assert not verdict(served.subject(), findings)[0], "it is a fault of everything that is made of the adapter"


@pytest.mark.parametrize(("value", "text"), [(0.0, "every B is zero"), (float("nan"), "is not finite")])
def test_weights_that_were_not_trained(value: float, text: str, served: Served) -> None:
    file = served.run / "adapter_model.safetensors"
    weights = {
        name: torch.full_like(tensor, value) if "lora_B" in name else tensor for name, tensor in load_file(file).items()
    }
    save_file(weights, file, {"format": "pt"})
    assert text in served.faults(check_adapter)
    assert "differs from the file that the run wrote" in served.faults(check_adapter)


def test_one_layer_that_was_not_trained_is_a_note(served: Served) -> None:
    file = served.run / "adapter_model.safetensors"
    weights = load_file(file)
    next(tensor for name, tensor in weights.items() if "lora_B" in name).zero_()
    save_file(weights, file, {"format": "pt"})
    assert any(
        each.result == "note" and each.text.startswith("1 of 14 Bs are zero")
        for each in check_adapter(served.subject())
    )


@pytest.mark.parametrize("values", [{"lora_alpha": 8}, {"r": None}, {"use_rslora": True}])
def test_a_scale_that_was_lost(values: dict[str, Any], served: Served) -> None:
    update(served.run / "adapter_config.json", **values)
    assert f"{next(iter(values))} is " in served.faults(check_adapter)


# -- chat templates ----------------------------------------------------------------------------------------------------


def test_a_template_that_was_lost(served: Served) -> None:
    """hiyouga/LlamaFactory/issues/8399: the merged folder has no chat template."""
    (served.merged / "chat_template.jinja").unlink()
    assert "has no chat template; copy template.jinja of the corpus" in served.faults(check_template)


def test_two_templates_that_differ(served: Served) -> None:
    """Replay huggingface/text-generation-inference/issues/3247.

    Some programs read chat_template.jinja, and some the other.
    """
    update(served.merged / "tokenizer_config.json", chat_template=CHATML.replace("\n{{", "{{"))
    assert "tokenizer_config.json differ, and programs read one or the other" in served.faults(check_template)


def test_a_default_system_message(served: Served) -> None:
    """Replay hiyouga/LlamaFactory/issues/7785.

    The saved template writes a system message that training did not have.
    """
    source = "{% if messages[0].role != 'system' %}<|im_start|>system\nYou help.<|im_end|>\n{% endif %}" + CHATML
    (served.merged / "chat_template.jinja").write_text(source)
    assert "apply_chat_template of Transformers differs from training" in served.faults(check_template)


def test_a_prompt_that_begins_the_reasoning(served: Served) -> None:
    """Templates of DeepSeek R1 and QwQ write <think> in the prompt of an answer."""
    (served.merged / "chat_template.jinja").write_text(
        CHATML.replace("assistant\n{% endif", "assistant\n<think>\n{% endif")
    )
    assert "apply_chat_template of Transformers differs from training" in served.faults(check_template)


def test_white_space_that_a_template_adds(served: Served) -> None:
    """Replay vllm-project/vllm/pull/20717.

    A template in several lines renders their indentation.
    """
    (served.merged / "chat_template.jinja").write_text(CHATML.replace("<|im_end|>", "\n  <|im_end|>"))
    assert "differs from training" in served.faults(check_template)


def test_a_value_that_minijinja_writes_otherwise(served: Served) -> None:
    source = CHATML.replace("{% for", "{% if 0.0000001 ~ '' != '1e-07' %}!{% endif %}{% for", 1)
    (served.merged / "chat_template.jinja").write_text(source)
    found = served.faults(check_template)
    assert "minijinja (for llama.cpp) differs from training" in found
    assert "Transformers" not in found.partition("; serve")[0]


# -- stop tokens, weights, and logits ----------------------------------------------------------------------------------


def test_generation_that_does_not_stop(served: Served) -> None:
    """Replay unslothai/unsloth/issues/5386 and huggingface/open-r1/pull/663.

    <eos> instead of the token that ends a turn.
    """
    update(served.merged / "generation_config.json", eos_token_id=2)
    assert 'an answer ends with "<|im_end|>"' in served.faults(check_stops)
    (served.merged / "generation_config.json").unlink()
    assert 'an answer ends with "<|im_end|>"' in served.faults(check_stops)


def test_generation_that_stops_early(served: Served) -> None:
    rows = served.subject().facts.labeled_rows(1)  # type: ignore[union-attr]
    [(ids, labels)] = rows
    inside = next(
        token for token, label, later in zip(ids, labels, labels[1:], strict=False) if label >= 0 and later >= 0
    )
    update(served.merged / "generation_config.json", eos_token_id=[424, 425, inside])
    assert "stops generation, but answers have it in the middle" in served.faults(check_stops)


def test_a_merge_that_lost_the_adapter(served: Served) -> None:
    """unslothai/unsloth/issues/5410: the merged weights are those of the base model."""
    shutil.copy(served.base / "model.safetensors", served.merged / "model.safetensors")
    assert "the logits of the merged model differ" in served.faults(check_logits)
    assert served.faults(check_weights) == ""


def test_a_merge_of_another_run(served: Served) -> None:
    update(served.merged / "merge.json", adapter="0" * 64)
    assert "merge.json: adapter is 000000000000, but that of the run is" in served.faults(check_weights)


def test_a_config_that_does_not_fit_the_weights(served: Served) -> None:
    update(served.merged / "config.json", dtype="bfloat16")
    assert "config.json has dtype bfloat16, but most weights are torch.float32" in served.faults(check_weights)
    update(served.merged / "config.json", dtype="float32", tie_word_embeddings=True)
    assert "config.json has tie_word_embeddings, but lm_head.weight and" in served.faults(check_weights)
    update(served.merged / "config.json", tie_word_embeddings=False, vocab_size=64)
    found = served.faults(check_weights)
    assert "rows, but vocab_size in config.json is 64" in found
    assert "the model fewer" in found


def test_a_tensor_that_is_missing(served: Served) -> None:
    file = served.merged / "model.safetensors"
    weights = load_file(file)
    del weights["model.norm.weight"]
    save_file(weights, file, {"format": "pt"})
    assert "lacks 1 tensor of the base model, such as model.norm.weight" in served.faults(check_weights)


def test_a_model_that_does_not_fit_is_named(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("packcorpus.train.certify.model_checks.places_that_fit", lambda *_: [])
    [finding] = check_logits(served.subject())
    assert finding.result == "skipped"
    assert "does not fit into the" in finding.text
    is_sound, lines = verdict(served.subject(), [finding])
    assert is_sound
    assert "Not checked: logits of merged" in " ".join(lines)


def test_faults_of_the_base_are_to_be_avoided_if_there_is_a_merged_model(served: Served) -> None:
    update(served.base / "generation_config.json", eos_token_id=2)
    findings = certify(served.subject())
    assert [each.of for each in findings if each.result == "avoid"] == ["base"]
    is_sound, lines = verdict(served.subject(), findings)
    assert is_sound
    assert "serve this merged model, not base plus adapter" in " ".join(lines)
    subject = replace(served.subject(), merged=None)
    is_sound, lines = verdict(subject, certify(subject))
    assert not is_sound
    assert "serve the merged model: packcorpus train merge" in " ".join(lines)


@pytest.mark.parametrize("weights", ["original", "dequantized"])
def test_a_run_in_nf4_is_compared_with_both_bases(weights: str, served: Served) -> None:
    run_on(served.root / "nf4", served.base, quantization="nf4")
    nf4 = Served(served.root, served.root / "nf4", served.root / "nf4-out")
    merged(nf4.run, nf4.merged, base_weights=weights)
    quantized, plain = check_logits(nf4.subject())
    assert (quantized.result, plain.result) == ("ok", "ok")
    assert "because NF4 alone changes the base by" in quantized.text
    shutil.copy(served.base / "model.safetensors", nf4.merged / "model.safetensors")
    assert "the logits of the merged model differ" in nf4.faults(check_logits)


def test_vllm_is_asked_if_it_is_installed(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("vllm.tokenizers")
    module.get_tokenizer = lambda folder, **_: AutoTokenizer.from_pretrained(folder)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", ModuleType("vllm"))
    monkeypatch.setitem(sys.modules, "vllm.tokenizers", module)
    monkeypatch.setattr("packcorpus.train.certify.prompt_checks.find_spec", lambda name: name == "vllm")
    [*_, last] = [each for each in check_template(served.subject()) if each.check == "vLLM"]
    assert last == Finding("vLLM", "merged", "ok", "vLLM renders 60 prompts as in training")
    module.get_tokenizer = lambda folder, **_: AutoTokenizer.from_pretrained(served.base)  # type: ignore[attr-defined]
    (served.base / "chat_template.jinja").write_text(CHATML.replace("user", "human").replace("m.role", "'human'"))
    assert "merged: vLLM differs from training" in served.faults(check_template)


def test_options_of_the_template_are_a_note(tmp_path: Path) -> None:
    source = CHATML.replace("assistant\n{% endif", "assistant\n{{ opening }}{% endif")
    source = source.replace("{{ m.role }}\n", "{{ m.role }}\n{% if m.role == 'assistant' %}{{ opening }}{% endif %}")
    manifest = make_corpus(tmp_path, template=source, template_options={"opening": "!"})
    served = make_run(tmp_path, tmp_path, manifest, "llama")
    found = [each for each in check_template(served.subject()) if each.of == "merged"]
    assert [each.result for each in found if each.check == "template"] == ["ok", "note"]
    assert found[1].text == 'requests must send chat_template_kwargs: {"opening": "!"}'


@pytest.mark.parametrize("settings", [{"packing": False}, {"train_on": "all"}, {"turns": "apart"}])
def test_other_kinds_of_rows(settings: dict[str, Any], tmp_path: Path) -> None:
    served = make_run(tmp_path, tmp_path, make_corpus(tmp_path, **settings), "llama")
    findings = certify(served.subject())
    assert [each for each in findings if each.result in ("FAULT", "avoid")] == []
    assert {each.check for each in findings if each.result == "skipped"} <= {"vLLM"}


def test_a_base_in_low_precision_is_named(served: Served) -> None:
    update(served.base / "config.json", quantization_config={"quant_method": "fp8"})
    [finding] = check_logits(served.subject(is_merged=False))
    assert (finding.result, finding.text) == ("skipped", "the base model is stored in low precision (fp8)")
