"""A run with NF4 is merged into the weights that it computed with.

base ─load_model, as in training─▶ NF4 ─▶ dequantized, bit by bit ┬ Dequantized.value(weight of the files)
                                                                 └ merged files of an adapter of zeros
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from bitsandbytes.functional import dequantize_4bit
from bitsandbytes.nn import Linear4bit
from safetensors.torch import load_file
from support.commands import NO_PICTURE, ROOT, command
from support.small_corpus import conversations, make_recipe, pack_corpus
from support.training import multimodal
from support.training.finished_runs import finished_run, merged, run_on
from support.training.tiny_training import tiny_model
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

from packcorpus.tasks.core.errors import UsageError
from packcorpus.train.config import TrainingConfig
from packcorpus.train.data.corpus import open_corpus
from packcorpus.train.merge import merge_run
from packcorpus.train.merge.dequantized import dequantized_of, of_text
from packcorpus.train.merge.find_run import find_base, find_run
from packcorpus.train.merge.losses import FEWEST, pieces_of
from packcorpus.train.merge.merge_run import without_weights
from packcorpus.train.merge.tensors import PRECISIONS
from packcorpus.train.model.qlora import load_model

# Models whose linear layers reach bitsandbytes in different ways.
KINDS = ("llama", "gpt2", "phi3", "qwen3_moe", "mamba", "zamba2")


@pytest.fixture(autouse=True)
def _quick() -> None:
    torch.set_num_threads(1)


def in_training(base: Path, precision: str) -> dict[str, torch.Tensor]:
    """Return the dequantized weights of the model that a run trains, by name."""
    config = TrainingConfig(base_model=str(base), quantization="nf4", activation_checkpointing=False)
    model = load_model(base, config, "cpu", PRECISIONS[precision], "eager").get_base_model()
    found = {}
    for name, layer in model.named_modules(remove_duplicate=False):
        if isinstance(layer, Linear4bit):
            value = dequantize_4bit(layer.weight.data, layer.weight.quant_state)
            found[f"{name.removesuffix('.base_layer')}.weight"] = value.T if layer.source_cls is Conv1D else value
    return found


def loaded(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype="auto")


def of_run(run: Path, precision: str = "fp32") -> Any:
    found = find_run(str(run), run.parent)
    found.record["choices"]["precision"] = precision
    base = find_base(found)
    return dequantized_of(found, base, without_weights(base))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("dtype", "precision"), [("bf16", "fp32"), ("fp32", "bf16"), ("fp32", "fp16")])
def test_the_weights_are_those_of_the_training(kind: str, dtype: str, precision: str, tmp_path: Path) -> None:
    run = finished_run(tmp_path, kind, dtype=PRECISIONS[dtype], scale=0.0, quantization="nf4")
    expected, nf4 = in_training(tmp_path / "base", precision), of_run(run, precision)
    assert nf4.layers.keys() == expected.keys()
    weights = dict(loaded(tmp_path / "base").named_parameters(remove_duplicate=False))
    for name, value in expected.items():
        found = nf4.value(name, weights[name].data)
        assert found.dtype == PRECISIONS[precision]
        assert torch.equal(found, value), name
        assert not torch.equal(found.float(), weights[name].float()), "nothing is rounded, so this shows nothing"


def test_a_layer_after_the_decoder_is_in_nf4_also_if_the_head_is_tied(tmp_path: Path) -> None:
    run = finished_run(tmp_path, "gemma3n_text", scale=0.0, quantization="nf4")
    record = json.loads((run / "training.json").read_text())
    skipped = [f"model.layers.{n}.altup.{name}_coefs" for n in range(4) for name in ("correction", "prediction")]
    (run / "training.json").write_text(json.dumps(record | {"in_16_bits": skipped}))
    assert of_run(run).layers.keys() == in_training(tmp_path / "base", "fp32").keys()


@pytest.mark.parametrize("kind", KINDS)
def test_the_merged_weights_are_those_values_plus_the_adapter(kind: str, tmp_path: Path) -> None:
    run = finished_run(
        tmp_path, kind, scale=0.0, quantization="nf4", lora_targets=["q_proj"] if kind == "llama" else "all"
    )
    expected = in_training(tmp_path / "base", "fp32")
    before, after = loaded(tmp_path / "base").state_dict(), loaded(merged(run, tmp_path / "out")).state_dict()
    for name, value in after.items():
        # A B of zero leaves the weights as they are.
        assert torch.equal(value, expected.get(name, before[name])), name
    assert expected.keys() <= after.keys()
    original = loaded(merged(run, tmp_path / "original", base_weights="original")).state_dict()
    assert all(torch.equal(value, before[name]) for name, value in original.items())


@pytest.mark.parametrize("name", ["qwen3_vl_moe", "llama4"])
def test_towers_keep_their_bytes(name: str, tmp_path: Path) -> None:
    """The run had them in 4 bits too, but did not use them."""
    base = tmp_path / "base"
    multimodal.build(name).to(torch.bfloat16).save_pretrained(base)
    folder = merged(run_on(tmp_path / "run", base, quantization="nf4", lora_targets=["q_proj"]), tmp_path / "out")
    before, after = (load_file(path / "model.safetensors") for path in (base, folder))
    changed = {key for key in before if not torch.equal(before[key], after[key])}
    assert before.keys() == after.keys()
    assert all("language_model" in key for key in changed)
    assert any(key.endswith("v_proj.weight") for key in changed), "not adapted, but rounded"


def test_towers_inside_the_decoder_are_no_part_of_the_text() -> None:
    config = AutoConfig.for_model("phi4_multimodal", num_hidden_layers=1, vocab_size=64, pad_token_id=0)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    names = {name for name, module in model.named_modules() if module in of_text(model)}
    assert "model.layers.0.self_attn.qkv_proj" in names
    assert not any("embed_tokens_extend" in name for name in names)


def test_a_merge_has_the_same_bytes_again(tmp_path: Path) -> None:
    run = finished_run(tmp_path, "qwen3_moe", quantization="nf4")
    first, second = merged(run, tmp_path / "first", "bf16"), merged(run, tmp_path / "second", "bf16")
    assert {path.name: path.read_bytes() for path in first.iterdir()} == {
        path.name: path.read_bytes() for path in second.iterdir()
    }
    assert json.loads((first / "merge.json").read_text())["base_weights"] == "dequantized"


def test_a_run_without_quantization_has_only_the_original_weights(tmp_path: Path) -> None:
    run = finished_run(tmp_path)
    with pytest.raises(UsageError, match="was trained with quantization: none; use --base original"):
        merged(run, tmp_path / "out", base_weights="dequantized")
    merged(run, tmp_path / "out")
    assert json.loads((tmp_path / "out" / "merge.json").read_text())["base_weights"] == "original"


def test_a_merge_into_the_other_weights_is_another_merge(tmp_path: Path) -> None:
    run = finished_run(tmp_path, quantization="nf4")
    folder = merged(run, tmp_path / "out", base_weights="original")
    with pytest.raises(UsageError, match=r"a different merge \(base_weights original, now dequantized\)"):
        merged(run, folder)
    # A version without the setting merged into the original weights.
    record = json.loads((folder / "merge.json").read_text())
    record.pop("base_weights")
    (folder / "merge.json").write_text(json.dumps(record))
    assert merged(run, folder, base_weights="original") == folder


# -- losses ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a root with runs: `packed`, `whole` (2.0), and `lengths`, unvalidated."""
    root = tmp_path_factory.mktemp("trained")
    tiny_model(adapter=False, num_hidden_layers=2).save_pretrained(root / "tiny")
    corpora = {
        "packed": {"validation": 0.2},
        "whole": {"validation": 0.2, "packing": False},
        "lengths": {"sequence_length": [64, 128]},
    }
    for name, settings in corpora.items():
        manifest = pack_corpus(make_recipe(root, conversations(60, seed=3), name=name, **settings))
        words = [
            "--manifest",
            str(manifest),
            "--base-model",
            str(root / "tiny"),
            "--root",
            str(root),
            "--device",
            "cpu",
        ]
        words += ["--max-steps", "12", "--micro-batch", "2", "--tokens-per-step", "512", "--learning-rate", "1e-2"]
        words += ["--output", str(root / "runs" / name)]
        done = command(ROOT, sys.executable, "-m", "packcorpus.train", *words, **NO_PICTURE)
        assert done.returncode == 0, done.stderr
    return root


@pytest.mark.parametrize("name", ["packed", "whole", "lengths"])
def test_the_losses_are_those_of_the_training_and_of_both_merges(
    name: str, trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = trained / "runs" / name
    folder = merged(run, tmp_path / "out", "bf16", trained)
    printed = capsys.readouterr().err
    found = re.search(
        r"loss: (\S+) in training, (\S+) merged into the dequantized weights, (\S+) merged into the original weights "
        r"\(([\d,]+) trained tokens of the (\w+) rows\)\n",
        printed,
    )
    assert found, printed
    assert f"| loss of this model | {found[0][6:-1]} |\n" in (folder / "README.md").read_text()
    training, dequantized, original = map(float, found.groups()[:3])
    recorded = json.loads((run / "training.json").read_text())["result"]["validation_loss"]
    assert found[5] == ("training" if name == "lengths" else "validation")
    if recorded is not None:  # measured by the training, on whole rows
        assert training == pytest.approx(recorded, abs=1e-4)
    assert dequantized == pytest.approx(training, abs=2e-3), "rounded to bf16"
    assert original > training + 0.02, "the error of NF4"
    again = merged(run, tmp_path / "again", "bf16", trained)
    assert (again / "README.md").read_bytes() == (folder / "README.md").read_bytes()
    merged(run, tmp_path / "original", "bf16", trained, "original")
    text = f"{found[1]} in training, {found[3]} merged into the original weights, {found[2]} merged into the deq"
    assert text in capsys.readouterr().err, "each is the loss of the folder that is written"


def test_a_lower_loss_with_the_original_weights_is_reported(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    values = iter([4.5, 4.5, 4.4])
    monkeypatch.setattr(merge_run, "mean_loss", lambda *_: next(values))
    merged(trained / "runs" / "packed", tmp_path / "out", root=trained)
    assert "note: the loss is lower with the original weights" in capsys.readouterr().err


def test_a_large_model_is_measured_on_few_tokens(trained: Path) -> None:
    (manifest,) = (trained / "manifests").glob("lengths-*.json")
    corpus = open_corpus(manifest)
    few, many = pieces_of(corpus, 10**12), pieces_of(corpus, 10**6)
    sizes = [sum(len(ids) for ids, _ in given.pieces) for given in (few, many)]
    assert 0.7 * FEWEST < sizes[0] <= FEWEST < sizes[1]
    assert many.pieces[0][0].tolist() == few.pieces[0][0].tolist()
    assert all(labels[-1] != -100 for _, labels in many.pieces), "up to the last trained token"
    assert {len(ids) <= 64 for ids, _ in few.pieces} == {True, False}, "rows of both lengths"
