"""Each rank keeps a part of the frozen weights, and the run is the same.

This also holds for a resumed run.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.commands import NO_PICTURE, ROOT, command
from support.small_corpus import conversations, make_recipe, pack_corpus
from support.training.gloo_ranks import gloo_ranks
from support.training.tiny_training import tiny_model

from packcorpus.tasks.core.errors import UsageError
from packcorpus.train.config import TrainingConfig
from packcorpus.train.loop.trainer import Measured
from packcorpus.train.model.qlora import check_ranks


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sharding")
    pack_corpus(make_recipe(folder / "c", conversations(40), name="mine", sequence_length=64, validation=0.2))
    tiny_model(adapter=False).save_pretrained(folder / "tiny")
    tiny_model("qwen3_moe", adapter=False, num_hidden_layers=2).save_pretrained(folder / "experts")
    return folder


@pytest.mark.parametrize("base", ["tiny", "experts"])
def test_a_sharded_run_has_the_same_adapter_and_validation_loss(base: str, folder: Path) -> None:
    (manifest,) = (folder / "c" / "manifests").glob("*.json")
    words = [sys.executable, "-m", "packcorpus.train", "--manifest", str(manifest), "--base-model", str(folder / base)]
    words += ["--device", "cpu", "--gpus", "2", "--tokens-per-step", "256", "--micro-batch", "1", "--max-steps", "2"]
    words += ["--save-every", "1", "--learning-rate", "5e-3"]
    runs = {sharding: folder / f"{base}-{sharding}" for sharding in ("none", "full")}

    def train(sharding: str) -> dict:  # type: ignore[type-arg]
        done = command(ROOT, *words, "--sharding", sharding, "--output", str(runs[sharding]), **NO_PICTURE)
        assert done.returncode == 0, done.stderr
        return dict(json.loads((runs[sharding] / "training.json").read_text()))

    whole, sharded = train("none"), train("full")
    share = re.search(r"; sharded: (\d+) % of the bytes on each rank", sharded["in_effect"]["frozen weights"])
    assert share
    assert 50 < int(share[1]) < 100, "the embeddings stay whole"
    assert "sharded" not in whole["in_effect"]["frozen weights"]
    moved, own_moved = (sharded["isolation"][name] for name in ("moved", "own_moved"))
    assert moved <= (1e-4 * own_moved if base == "experts" else 0), "other tokens of an expert round differently"
    assert own_moved > 0
    assert [entry.get("loss") for entry in sharded["log"]] == [entry.get("loss") for entry in whole["log"]]
    assert sharded["result"]["validation_loss"] == whole["result"]["validation_loss"]
    adapter = (runs["none"] / "adapter_model.safetensors").read_bytes()
    assert (runs["full"] / "adapter_model.safetensors").read_bytes() == adapter
    for name in ("training.json", "adapter_model.safetensors"):
        (runs["full"] / name).unlink()
    shutil.rmtree(runs["full"] / "checkpoint-2")
    assert train("full")["in_effect"]["starts"] == "from checkpoint-1"
    assert (runs["full"] / "adapter_model.safetensors").read_bytes() == adapter


def test_the_frozen_weights_of_a_layer_are_whole_only_while_it_runs() -> None:
    code = """
import torch
from support.training.tiny_training import tiny_model
from packcorpus.train.model.qlora import shard, share_of_rank

model = tiny_model(vocab_size=32)
total = {name: weights.numel() for name, weights in model.named_parameters()}
shard(model, "cpu")
sizes = lambda layer: {name: getattr(w, "to_local", lambda: w)().numel() for name, w in layer.named_parameters()}
layers = model.get_decoder().layers
inside = []
layers[1].mlp.register_forward_hook(lambda *_: inside.extend([sizes(layers[0]), sizes(layers[1])]))
before = [sizes(layer) for layer in layers]
ids = torch.arange(8)[None]
model(input_ids=ids, labels=ids)["loss"].backward()
after = [sizes(layer) for layer in layers]
whole = [{name.partition(f"layers.{i}.")[2]: n for name, n in total.items() if f"layers.{i}." in name} for i in (0, 1)]
gradients = all(w.grad is not None for w in model.parameters() if w.requires_grad)
result = [whole, before, inside, after, gradients, share_of_rank(model)]
"""
    for whole, before, inside, after, gradients, share in gloo_ranks(2, code):
        frozen = {name for name in whole[0] if "lora_" not in name}
        assert len(frozen) == 9
        for sizes in (before, after):
            for layer, complete in zip(sizes, whole, strict=True):
                assert {name: layer[name] for name in frozen} == {name: complete[name] // 2 for name in frozen}
        assert {name: inside[0][name] for name in frozen} == {name: whole[0][name] // 2 for name in frozen}
        assert {name: inside[1][name] for name in frozen} == {name: whole[1][name] for name in frozen}
        assert all(layer[name] == whole[0][name] for layer in before for name in whole[0] if "lora_" in name)
        assert gradients
        assert 0.5 < share < 0.6


def test_one_rank_cannot_shard() -> None:
    check_ranks(TrainingConfig())
    with pytest.raises(UsageError, match="sharding: full needs several ranks"):
        check_ranks(TrainingConfig(sharding="full"))


@pytest.mark.parametrize(("rows", "size"), [(1, 1), (5, 2), (6, 2), (7, 3)])
def test_all_ranks_take_equally_many_validation_passes_and_each_row_counts_once(rows: int, size: int) -> None:
    """Ranks with more passes would wait for the weights of the others."""
    passes = []
    for rank in range(2):
        args = SimpleNamespace(process_index=rank, world_size=2, per_device_eval_batch_size=size)
        trainer: Any = SimpleNamespace(args=args, data_collator=list, _prepare_inputs=lambda batch: batch)
        passes.append(list(Measured._batches_of_rank(trainer, list(range(rows)))))
    assert len(passes[0]) == len(passes[1])
    assert all(batch for batch, _ in (*passes[0], *passes[1]))
    assert sorted(row for batch, counts in (*passes[0], *passes[1]) if counts for row in batch) == list(range(rows))


def test_samples_need_the_whole_model_on_one_rank() -> None:
    with pytest.raises(UsageError, match="set samples: 0"):
        check_ranks(TrainingConfig(sharding="full", samples=2))
