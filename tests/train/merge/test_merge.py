"""A merged model is base plus adapter, for each kind of architecture.

The logits, names, shapes, and ties are the same.

    finished_run ─merge─▶ folder ─AutoModelForCausalLM─▶ logits == those of base + PeftModel, loaded here
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from support.training.finished_runs import CORPUS, finished_run, merged, randomize, run_on, write_record
from support.training.mxfp4 import save_mxfp4
from support.training.tiny_training import VOCABULARY
from transformers import AutoModelForCausalLM
from transformers.core_model_loading import WeightRenaming

from packcorpus.tasks.core.errors import DataError
from packcorpus.train.config import TrainingConfig
from packcorpus.train.machine import devices
from packcorpus.train.merge import merge_run, tensors, weights
from packcorpus.train.merge.find_run import find_base, find_run
from packcorpus.train.merge.weights import Adapter
from packcorpus.train.model.qlora import add_adapter

# One model for each way in which tensors of the files become weights, or in which PEFT adapts them.
KINDS = {
    "llama": {},
    "llama-tied": {"tie_word_embeddings": True},
    "qwen2": {},  # biases
    "gpt2": {},  # Conv1D, fused q, k, and v, tied
    "gpt_neox": {},  # renamed
    "phi3": {},  # fused q, k, and v
    "gemma2": {},  # tied
    "mixtral": {},  # renamed, experts stacked
    "qwen3_moe": {"tie_word_embeddings": True},
    "granitemoe": {},  # experts renamed
    "deepseek_v3": {},  # experts besides dense layers
    "gpt_oss": {},  # experts transposed, with biases
    "jetmoe": {},  # experts not stacked
}


@pytest.fixture(autouse=True)
def _quick() -> None:
    torch.set_num_threads(1)


@torch.inference_mode()
def logits(model: Any) -> torch.Tensor:
    ids = torch.randint(VOCABULARY, (2, 48), generator=torch.Generator().manual_seed(11))
    return model.eval()(input_ids=ids, use_cache=False).logits


def loaded(folder: Path, adapter: Path | None = None) -> Any:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return PeftModel.from_pretrained(model, adapter) if adapter else model


def tensors_in(folder: Path) -> dict[str, torch.Tensor]:
    return {name: value for file in folder.glob("*.safetensors") for name, value in load_file(file).items()}


def off(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


# -- base plus adapter -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_a_merged_model_is_base_plus_adapter(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = finished_run(tmp_path, kind.partition("-")[0], **KINDS[kind])
    folder, base = merged(run, tmp_path / "out"), tmp_path / "base"
    expected = logits(loaded(base, run))
    model = loaded(folder)
    assert off(logits(model), expected) < 1e-5
    assert off(logits(loaded(base)), expected) > 0.05, "the adapter has no effect, so the test would show nothing"
    before, after = tensors_in(base), tensors_in(folder)
    assert {name: value.shape for name, value in after.items()} == {name: value.shape for name, value in before.items()}
    changed = [name for name in before if not torch.equal(before[name], after[name])]
    assert 0 < len(changed) < len(before)
    assert not any("embed" in name or "lm_head" in name or "norm" in name for name in changed)
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert tied == loaded(base).config.tie_word_embeddings
    assert "one layer in memory at a time" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "variant"), [("llama", "rslora"), ("llama", "dora"), ("gpt2", "dora"), ("mixtral", "rslora")]
)
def test_each_variant_of_the_adapter(name: str, variant: str, tmp_path: Path) -> None:
    run = finished_run(tmp_path, name, lora_variant=variant, lora_alpha=6.0)
    folder = merged(run, tmp_path / "out")
    assert off(logits(loaded(folder)), logits(loaded(tmp_path / "base", run))) < 1e-5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_are_computed_in_fp32_and_rounded_once(dtype: torch.dtype, tmp_path: Path) -> None:
    run = finished_run(tmp_path, dtype=dtype, lora_targets=["q_proj"])
    before, after = tensors_in(tmp_path / "base"), tensors_in(merged(run, tmp_path / "out"))
    adapter = load_file(run / "adapter_model.safetensors")
    for layer in range(2):
        name = f"model.layers.{layer}.self_attn.q_proj"
        a, b = (adapter[f"base_model.model.{name}.lora_{part}.weight"].double() for part in "AB")
        exact = before[f"{name}.weight"].double() + 32 / 4 * b @ a
        # Equal except for a few values halfway between two neighbors.
        assert (after[f"{name}.weight"] != exact.float().to(dtype)).float().mean() < 1e-3
    assert {value.dtype for value in after.values()} == {dtype}
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert model.dtype == dtype


def test_another_precision_is_that_of_all_weights_but_those_kept_in_fp32(tmp_path: Path) -> None:
    run = finished_run(tmp_path, "deepseek_v3")
    folder = merged(run, tmp_path / "out", "bf16")
    found = {name: value.dtype for name, value in tensors_in(folder).items()}
    kept = {name for name, dtype in found.items() if dtype == torch.float32}
    assert kept == {name for name in found if name.endswith("e_score_correction_bias")}
    assert kept
    assert set(found.values()) == {torch.float32, torch.bfloat16}
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        assert set(file.offset_keys()[: len(kept)]) == kept, "else some would not be aligned"
    assert loaded(folder).config.dtype == torch.float32  # as asked for
    assert '"bfloat16"' in (folder / "config.json").read_text()


def test_a_tensor_in_another_precision_than_most_keeps_it(tmp_path: Path) -> None:
    run = finished_run(tmp_path, dtype=torch.bfloat16)
    file = tmp_path / "base" / "model.safetensors"
    weights = load_file(file)
    norms = [name for name in weights if "norm" in name]
    save_file(weights | {name: weights[name].float() for name in norms}, file, {"format": "pt"})
    run = run_on(tmp_path / "other", tmp_path / "base")
    found = tensors_in(merged(run, tmp_path / "out", "fp16"))
    assert {name for name, value in found.items() if value.dtype == torch.float32} == set(norms)
    assert {found[name].dtype for name in set(found) - set(norms)} == {torch.float16}


def test_experts_that_cannot_be_converted_back_are_merged_as_a_whole(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    finished_run(tmp_path, "qwen3_moe")
    file = tmp_path / "base" / "model.safetensors"
    weights = load_file(file)
    odd = next(name for name in weights if "experts.0.gate_proj" in name)  # one weight is made of two precisions
    save_file(weights | {odd: weights[odd].to(torch.float16)}, file, {"format": "pt"})
    run = run_on(tmp_path / "other", tmp_path / "base")
    folder = merged(run, tmp_path / "out")
    assert "the whole model in memory, because" in capsys.readouterr().err
    assert off(logits(loaded(folder)), logits(loaded(tmp_path / "base", run))) < 1e-5
    assert set(tensors_in(folder)) == set(weights)
    assert "loaded as a whole" in (folder / "README.md").read_text()
    half = merged(run, tmp_path / "half", "bf16")
    assert {value.dtype for value in tensors_in(half).values()} == {torch.bfloat16}


def test_experts_that_come_back_with_other_values_are_merged_as_a_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Reversing the conversion of transformers changes values here."""
    run = finished_run(tmp_path, "mixtral")
    right = tensors.revert_weight_conversion

    def wrong(model: Any, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name: value if value.is_meta else value * 1.001 for name, value in right(model, weights).items()}

    monkeypatch.setattr(tensors, "revert_weight_conversion", wrong)
    folder = merged(run, tmp_path / "out")
    assert "the whole model in memory, because" in capsys.readouterr().err
    assert off(logits(loaded(folder)), logits(loaded(tmp_path / "base", run))) < 1e-5


def test_a_tensor_that_a_renaming_does_not_mean_keeps_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A tensor is not renamed to a name that does not exist.

    transformers loads such a tensor in the same way.
    """
    run = finished_run(tmp_path)
    monkeypatch.setattr(
        tensors, "get_model_conversion_mapping", lambda model: [WeightRenaming("self_attn.q_proj", "nothing.like_it")]
    )
    folder = merged(run, tmp_path / "out")
    assert "one layer in memory at a time" in capsys.readouterr().err
    assert off(logits(loaded(folder)), logits(loaded(tmp_path / "base", run))) < 1e-5


@pytest.mark.parametrize("whole", [False, True])
def test_a_base_in_mxfp4_is_merged_into_its_unpacked_weights(
    whole: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if whole:

        def fails(*_: Any) -> Any:
            raise tensors.NotInvertible("this is a test")

        monkeypatch.setattr(weights, "groups_of", fails)
    base = tmp_path / "base"
    decoded = save_mxfp4(base)
    model = add_adapter(loaded(base), TrainingConfig(quantization="none", lora_r=4), base)
    randomize(model)
    model.save_pretrained(tmp_path / "run")
    write_record(tmp_path / "run", base, TrainingConfig(base_model=str(base), quantization="none"), CORPUS)
    folder = merged(tmp_path / "run", tmp_path / "out")
    assert "experts that are stored in MXFP4 are written in bf16" in (said := capsys.readouterr().err)
    assert ("the whole model in memory" if whole else "one layer in memory at a time") in said
    found = tensors_in(folder)
    assert {value.dtype for value in found.values()} == {torch.bfloat16}
    assert decoded.keys() <= found.keys()
    assert not any(name.endswith(("_blocks", "_scales")) for name in found)
    assert "quantization_config" not in json.loads((folder / "config.json").read_text())
    expected = logits(loaded(base, tmp_path / "run"))
    assert off(logits(loaded(folder)), expected) < 0.05
    assert off(logits(loaded(base)), expected) > 0.1
    exact = merged(tmp_path / "run", tmp_path / "exact", "fp32")
    assert off(logits(loaded(exact)), expected) < 1e-5


def test_several_files_are_read_and_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = finished_run(tmp_path, "mixtral")
    loaded(tmp_path / "base").save_pretrained(tmp_path / "parts", max_shard_size="200KB")
    assert len(list((tmp_path / "parts").glob("*.safetensors"))) > 3
    run = run_on(tmp_path / "other", tmp_path / "parts")
    monkeypatch.setattr(tensors, "SHARD_BYTES", 300_000)
    folder = merged(run, tmp_path / "out")
    files = sorted(path.name for path in folder.glob("*.safetensors"))
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    assert len(files) > 2
    assert all(path.stat().st_size < 310_000 for path in folder.glob("*.safetensors"))
    assert off(logits(loaded(folder)), logits(loaded(tmp_path / "parts", run))) < 1e-5


def test_the_same_merge_has_the_same_bytes(tmp_path: Path) -> None:
    run = finished_run(tmp_path, "qwen3_moe", dtype=torch.bfloat16)
    first, second = (merged(run, tmp_path / name) for name in ("first", "second"))
    names = sorted(path.name for path in first.iterdir())
    assert names == sorted(path.name for path in second.iterdir())
    assert {"README.md", "config.json", "generation_config.json", "merge.json", "model.safetensors"} <= set(names)
    for name in names:
        assert (first / name).read_bytes() == (second / name).read_bytes(), name


# -- the check ---------------------------------------------------------------------------------------------------------


def require_refused(run: Path, output: Path, message: str, dtype: str | None = None) -> None:
    with pytest.raises(DataError, match=message) as raised:
        merged(run, output, dtype)
    assert raised.value.reason == "merge_differs"
    assert not output.exists()
    assert not list(output.parent.glob(".*merging"))


@pytest.mark.parametrize("name", ["llama", "gpt2", "mixtral"])
def test_a_layer_that_is_merged_wrongly_is_refused(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = finished_run(tmp_path, name, dtype=torch.bfloat16)
    from peft.tuners.lora import layer

    for kind in (layer.Linear, layer.ParamWrapper):
        right = kind.get_delta_weight
        monkeypatch.setattr(kind, "get_delta_weight", lambda self, *a, right=right: 0.9 * right(self, *a))
    require_refused(run, tmp_path / "out", "the output with the merged weight differs by")


@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_files_that_hold_other_weights_are_refused(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = finished_run(tmp_path, name)
    right = weights.write_weights

    def wrong(folder: Path, *given: Any) -> Any:
        result = right(folder, *given)
        weights = load_file(folder / "model.safetensors")
        one = next(name for name in weights if name.endswith("layers.1.self_attn.o_proj.weight"))
        save_file(weights | {one: weights[one] * 1.02}, folder / "model.safetensors", {"format": "pt"})
        return result

    monkeypatch.setattr(merge_run, "write_weights", wrong)
    require_refused(run, tmp_path / "out", "the logits of the merged model differ by up to")


def test_an_adapter_that_rounding_hides_is_refused_with_the_precision_to_use(tmp_path: Path) -> None:
    run = finished_run(tmp_path, dtype=torch.bfloat16, scale=2e-4)
    require_refused(run, tmp_path / "out", r"rounding to bf16 hides \d+% .*merge with --dtype fp32")
    assert merged(run, tmp_path / "out", "fp32").is_dir()


def test_values_too_large_for_fp16_are_refused(tmp_path: Path) -> None:
    run = finished_run(tmp_path, scale=1e5, lora_targets=["down_proj"])
    require_refused(run, tmp_path / "out", "too large for fp16; use --dtype bf16", "fp16")


def test_an_adapter_of_zeros_is_merged_and_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = finished_run(tmp_path, scale=0.0)
    folder = merged(run, tmp_path / "out")
    assert "every B is zero" in capsys.readouterr().err
    before, after = tensors_in(tmp_path / "base"), tensors_in(folder)
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert "(all zero)" in (folder / "README.md").read_text()


def test_a_model_that_does_not_fit_is_compared_layer_by_layer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = finished_run(tmp_path, dtype=torch.bfloat16)
    monkeypatch.setattr(merge_run, "free_on_gpu", lambda: 0)
    monkeypatch.setattr(merge_run, "free_memory", lambda: 1000)
    merged(run, tmp_path / "out")
    printed = capsys.readouterr().err
    assert "layers: each compared" in printed
    assert "logits: not compared" in printed
    weights = sum(value.numel() for value in tensors_in(tmp_path / "base").values())
    monkeypatch.setattr(merge_run, "free_memory", lambda: 3 * weights)
    merged(run, tmp_path / "half")
    assert "computed in bf16 on the CPU" in capsys.readouterr().err


def test_the_precision_comes_before_the_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    finished_run(tmp_path, dtype=torch.bfloat16)
    found = tensors.tensors_of_model(tmp_path / "base")
    weights = sum(value.numel() for value in tensors_in(tmp_path / "base").values())

    def places(on_gpu: int, in_memory: int) -> list[tuple[str, torch.dtype]]:
        """Return the places, with room for weights of this many bytes each."""
        monkeypatch.setattr(merge_run, "free_on_gpu", lambda: int(merge_run.ROOM * weights * on_gpu) + 1)
        monkeypatch.setattr(merge_run, "free_memory", lambda: int(merge_run.ROOM * weights * in_memory) + 1)
        return [(place.device, place.dtype) for place in merge_run.places_that_fit(found, 0, torch.bfloat16)]

    gpu, cpu = ([(device, dtype) for dtype in (torch.float32, torch.bfloat16)] for device in ("cuda", "cpu"))
    assert places(4, 4) == [gpu[0], cpu[0], gpu[1], cpu[1]]
    assert places(2, 4) == [cpu[0], gpu[1], cpu[1]], "slower, but exact"
    assert places(2, 2) == [gpu[1], cpu[1]]
    assert places(0, 4) == cpu
    assert places(4, 0) == gpu
    assert places(0, 0) == []


def test_a_gpu_that_does_not_answer_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    def full() -> None:
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(merge_run.devices, "gpu_count", lambda: 1)
    monkeypatch.setattr(merge_run.devices, "no_code_reason", lambda: None)
    monkeypatch.setattr(merge_run.torch.cuda, "mem_get_info", full)
    assert merge_run.free_on_gpu() == 0


@pytest.mark.parametrize("error", [None, torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("no kernel")])
def test_logits_are_compared_on_a_gpu_or_else_on_the_cpu(
    error: Exception | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    load, used, adapters = merge_run._load, [], []
    with_adapter = merge_run.PeftModel.from_pretrained

    def stand_in(folder: Path, place: merge_run.Place) -> Any:
        used.append(place.device)
        if error and used == ["cuda", "cuda"]:  # the second model
            raise error
        return load(folder, merge_run.Place("cpu", place.dtype))

    def stand_in_with_adapter(*given: Any, torch_device: str, **named: Any) -> Any:
        adapters.append(torch_device)
        return with_adapter(*given, torch_device="cpu", **named)

    places = [("cuda", torch.float32), ("cuda", torch.bfloat16), ("cpu", torch.float32)]
    monkeypatch.setattr(merge_run, "_load", stand_in)
    monkeypatch.setattr(merge_run.PeftModel, "from_pretrained", stand_in_with_adapter)
    monkeypatch.setattr(merge_run, "places_that_fit", lambda *_: [merge_run.Place(*place) for place in places])
    merged(finished_run(tmp_path), tmp_path / "out")
    printed = capsys.readouterr().err
    assert used == ["cuda"] * 2 + ["cpu"] * 2 * bool(error), "after an error, the GPU is not used again"
    assert adapters == ["cuda", "cpu"][: 1 + bool(error)]
    assert ("computed in fp32 on the CPU" if error else "computed in fp32 on the GPU") in printed
    happened = {None: "", "C": "ran out of memory", "n": "failed (no kernel)"}[str(error)[0] if error else None]
    assert (f"logits: the GPU {happened} in fp32\n" in printed) == bool(error)


def test_a_gpu_loads_the_weights_directly_and_exactly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}

    def stand_in(folder: Path, **named: Any) -> Any:
        given.update(named)
        return torch.nn.Linear(1, 1)

    monkeypatch.setattr(merge_run, "how_to_load", lambda *_: {})
    monkeypatch.setattr(merge_run.base_model, "read_config", lambda *_: None)
    monkeypatch.setattr(merge_run, "auto_class", lambda *_: SimpleNamespace(from_pretrained=stand_in))
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    merge_run._load(tmp_path, merge_run.Place("cpu", torch.float32))
    assert "device_map" not in given
    assert torch.backends.cudnn.allow_tf32
    merge_run._load(tmp_path, merge_run.Place("cuda", torch.float32))
    assert given["device_map"] == {"": "cuda"}
    assert not torch.backends.cudnn.allow_tf32


def test_the_memory_of_a_gpu_without_code_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (7, 8))
    for count, reason, free in ((1, None, 7), (1, "no code", 0), (0, None, 0)):
        monkeypatch.setattr(devices, "gpu_count", lambda count=count: count)
        monkeypatch.setattr(devices, "no_code_reason", lambda reason=reason: reason)
        assert merge_run.free_on_gpu() == free


def test_the_adapter_is_read_one_layer_at_a_time(tmp_path: Path) -> None:
    """The layers of the adapter are left without values.

    So apart from one layer, the memory of a merge does not grow with the model.
    """
    run = finished_run(tmp_path)
    found = find_run(str(run), tmp_path)
    model = merge_run.without_weights(find_base(found))
    adapter = Adapter(run, model)
    values = tensors.tensors_of_model(tmp_path / "base")
    for name in adapter.layers:
        adapter.merge(name, values.read(name), torch.float32)
    parts = [value for layer, _ in adapter.layers.values() for value in layer.parameters()]
    assert parts
    assert all(value.is_meta for value in (*parts, *model.parameters()))
