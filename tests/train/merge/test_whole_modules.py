"""Modules that were trained as a whole replace the modules of the base.

Weights that are no longer shared are stored separately.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from support.training.architectures import build
from support.training.finished_runs import CORPUS, finished_run, merged, randomize, run_on, write_record
from support.training.tiny_training import VOCABULARY
from transformers import AutoModelForCausalLM

from packcorpus.tasks.core.errors import DataError, StorageError
from packcorpus.tasks.storage.files import read_json
from packcorpus.train.config import TrainingConfig
from packcorpus.train.merge import merge_run, weights
from packcorpus.train.merge.tensors import NotInvertible

ADAPTER = "adapter_model.safetensors"
PREFIX = "base_model.model."
HYBRIDS = {
    "num_hidden_layers": 5, "layers_block_type": ["mamba", *["hybrid"] * 4], "num_mem_blocks": 2,
    "use_shared_attention_adapter": True, "initializer_range": 0.05,
}  # fmt: skip


@pytest.fixture(autouse=True)
def _quick() -> None:
    torch.set_num_threads(1)


@torch.inference_mode()
def logits(folder: Path, adapter: Path | None = None) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    if adapter:
        model = PeftModel.from_pretrained(model, adapter)
    ids = torch.randint(VOCABULARY, (2, 32), generator=torch.Generator().manual_seed(11))
    return model.eval()(input_ids=ids, use_cache=False).logits


def require_base_plus_adapter(folder: Path, base: Path, run: Path) -> None:
    expected = logits(base, run)
    assert (logits(folder) - expected).norm() / expected.norm() < 1e-4
    assert (logits(base) - expected).norm() / expected.norm() > 0.05, "the adapter has no effect"


def run_by_peft(run: Path, base: Path, **settings: Any) -> Path:
    """Write a run whose adapter PEFT made without our settings."""
    model = AutoModelForCausalLM.from_pretrained(base)
    model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM", **settings))
    randomize(model, 0.1)
    model.save_pretrained(run)
    write_record(run, base, TrainingConfig(base_model=str(base), quantization="none"), CORPUS)
    return run


def without_streaming(monkeypatch: pytest.MonkeyPatch) -> None:
    """Load the model as a whole, and skip the comparison of logits.

    The comparison takes most of the time.
    """

    def refuse(*given: Any) -> Any:
        raise NotInvertible("of this test")

    monkeypatch.setattr(weights, "groups_of", refuse)
    monkeypatch.setattr(merge_run, "free_on_gpu", lambda: 0)
    monkeypatch.setattr(merge_run, "free_memory", lambda: 1000)


# -- whole modules -----------------------------------------------------------------------------------------------------

BOTH = {"modules_to_save": ["embed_tokens", "lm_head"]}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "both": ("llama", BOTH | {"tie_word_embeddings": False}),
    "head": ("llama", {"modules_to_save": ["lm_head"], "tie_word_embeddings": False}),
    "tied": ("llama", BOTH | {"tie_word_embeddings": True}),
    "tied, other names": ("gpt2", {"modules_to_save": ["wte"]}),
    "head with a bias": ("phi", {"modules_to_save": ["lm_head"], "tie_word_embeddings": False}),
    "renamed in the files": ("gpt_neox", {"modules_to_save": ["lm_head"], "tie_word_embeddings": False}),
}


@pytest.mark.parametrize(("case", "whole"), [*((case, False) for case in CASES), ("tied", True), ("both", True)])
def test_whole_modules_replace_those_of_the_base(
    case: str, whole: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, how = CASES[case]
    run, base = finished_run(tmp_path, name, **how), tmp_path / "base"
    if whole:
        without_streaming(monkeypatch)
    folder = merged(run, tmp_path / "out")
    require_base_plus_adapter(folder, base, run)
    before, after, adapter = (load_file(path) for path in (base / "model.safetensors", folder / "model.safetensors",
                                                           run / ADAPTER))  # fmt: skip
    assert {name: value.shape for name, value in after.items()} == {name: value.shape for name, value in before.items()}
    trained = {name: value for name, value in adapter.items() if ".lora_" not in name}
    assert trained
    exact = [name for name, value in after.items() if any(torch.equal(value, one) for one in trained.values())]
    assert {name.rpartition(".")[0].rpartition(".")[2] for name in exact} <= {
        "embed_tokens",
        "lm_head",
        "wte",
        "embed_out",
    }
    assert len(exact) == len({value.sum().item() for value in trained.values()})
    models = [AutoModelForCausalLM.from_pretrained(path) for path in (base, folder)]
    assert models[0].config.tie_word_embeddings == models[1].config.tie_word_embeddings
    assert f"{sorted(name.removeprefix(PREFIX) for name in trained)[0]}" in (folder / "README.md").read_text()


def test_whole_modules_have_the_precision_of_the_model(tmp_path: Path) -> None:
    run = finished_run(tmp_path, dtype=torch.bfloat16, **CASES["head"][1])
    after = load_file(merged(run, tmp_path / "out") / "model.safetensors")
    trained = load_file(run / ADAPTER)[f"{PREFIX}lm_head.weight"]
    assert trained.dtype == torch.float32
    assert torch.equal(after["lm_head.weight"], trained.bfloat16())


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("name", ["lm_head", "embed_tokens"])
def test_of_tied_weights_one_that_was_trained_alone_is_stored_apart(
    name: str, whole: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    base = tmp_path / "base"
    build("llama", tie_word_embeddings=True).save_pretrained(base)
    run = run_by_peft(tmp_path / "run", base, modules_to_save=[name, "norm"])
    if whole:
        without_streaming(monkeypatch)
    folder = merged(run, tmp_path / "out")
    require_base_plus_adapter(folder, base, run)
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert not model.config.tie_word_embeddings
    before, after = load_file(base / "model.safetensors"), load_file(folder / "model.safetensors")
    assert after.keys() == {*before, "lm_head.weight"}
    other = "model.embed_tokens.weight" if name == "lm_head" else "lm_head.weight"
    assert torch.equal(after[other], before["model.embed_tokens.weight"])
    assert not torch.equal(after["model.norm.weight"], before["model.norm.weight"])
    assert "1 shared weight stored separately (tie_word_embeddings: False)" in capsys.readouterr().err


def test_a_whole_module_that_is_not_finite_is_refused(tmp_path: Path) -> None:
    base = tmp_path / "base"
    build("llama").save_pretrained(base)
    run = run_by_peft(tmp_path / "run", base, modules_to_save=["norm"])
    weights = load_file(run / ADAPTER)
    weights[f"{PREFIX}model.norm.weight"][3] = float("nan")
    save_file(weights, run / ADAPTER)
    write_record(run, base, TrainingConfig(base_model=str(base), quantization="none"), CORPUS)
    with pytest.raises(DataError, match=r"norm\.weight is not finite"):
        merged(run, tmp_path / "out")


# -- ranks and alphas of some layers -----------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", [{}, {"use_rslora": True}, {"use_dora": True}])
def test_a_run_from_an_adapter_whose_layers_have_different_ranks(variant: dict[str, bool], tmp_path: Path) -> None:
    base = tmp_path / "base"
    build("llama").save_pretrained(base)
    patterns = {"rank_pattern": {r"layers\.1\.self_attn\.q_proj": 7}, "alpha_pattern": {r"layers\.0\..*q_proj": 2}}
    start = run_by_peft(tmp_path / "start", base, **patterns, **variant)
    run = run_on(tmp_path / "run", base, scale=0.3, adapter=str(start), lora_r=16)
    shapes = {tuple(value.shape) for name, value in load_file(run / ADAPTER).items() if "lora_A" in name}
    assert shapes == {(4, 64), (7, 64)}
    require_base_plus_adapter(merged(run, tmp_path / "out"), base, run)


# -- blocks that several layers share ----------------------------------------------------------------------------------


@pytest.mark.parametrize("whole", [False, True])
def test_zamba_2_gets_a_block_for_each_layer(whole: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, base = finished_run(tmp_path, "zamba2", **HYBRIDS), tmp_path / "base"
    if whole:
        without_streaming(monkeypatch)
    folder = merged(run, tmp_path / "out")
    require_base_plus_adapter(folder, base, run)
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.config.num_mem_blocks == 4
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    stored = load_file(folder / "model.safetensors").keys()
    assert stored == {name for name, _ in model.named_parameters()}, "each weight of the model once, and no other"


def test_a_disk_without_room_for_separate_blocks_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = finished_run(tmp_path, "zamba2")
    size = (tmp_path / "base" / "model.safetensors").stat().st_size
    monkeypatch.setattr(merge_run, "free_disk", lambda path: merge_run.OTHER_FILES + size)
    with pytest.raises(StorageError, match=r"needs 101 MB, but only 101 MB are free"):
        merged(run, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_zamba_cannot_store_a_shared_block_for_each_layer(tmp_path: Path) -> None:
    run = finished_run(tmp_path, "zamba")
    with pytest.raises(
        DataError,
        match=r"changes 7 weights of a zamba model differently in each layer that shares it \(such as model\.layers\.1"
        r".*down_proj\.weight and model\.layers\.2.*down_proj\.weight\); .*lora_targets: \[in_proj, linear\]",
    ) as raised:
        merged(run, tmp_path / "out")
    assert raised.value.reason == "cannot_merge"
    alone = run_on(tmp_path / "alone", tmp_path / "base", lora_targets=["in_proj", "linear"])
    require_base_plus_adapter(merged(alone, tmp_path / "out"), tmp_path / "base", alone)


@pytest.mark.parametrize("name", ["zamba", "zamba2"])
def test_a_shared_block_that_changes_alike_in_all_layers_stays_shared(name: str, tmp_path: Path) -> None:
    run, base = finished_run(tmp_path, name), tmp_path / "base"
    weights = load_file(run / ADAPTER)
    for key in weights:
        if ".layers.2.shared_trans" in key:
            weights[key] = weights[key.replace(".layers.2.", ".layers.1.")].clone()
    save_file(weights, run / ADAPTER)
    write_record(run, base, TrainingConfig(base_model=str(base), quantization="none"), CORPUS)
    folder = merged(run, tmp_path / "out")
    require_base_plus_adapter(folder, base, run)
    assert load_file(folder / "model.safetensors").keys() == load_file(base / "model.safetensors").keys()
    assert read_json(folder / "config.json") == read_json(base / "config.json")
    zero = run_on(tmp_path / "zero", base, scale=0.0)
    assert merged(zero, tmp_path / "same").is_dir(), "an adapter of zeros changes all layers alike"
