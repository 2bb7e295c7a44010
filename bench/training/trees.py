"""Time passes over the same samples with and without trees, in turns.

    python bench/training/trees.py CONFIG.yaml [--passes N] [--hidden N]

CONFIG.yaml is packed with each value of `share`. A small Llama with random weights does forward and backward passes
over all rows, on a CPU with `attention: sdpa`. The loss of all samples and the gradient must be equal.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import yaml
from transformers import LlamaConfig, LlamaForCausalLM

import packcorpus
from packcorpus.tasks.config import config_from
from packcorpus.tasks.recipe import recipe_of
from packcorpus.tasks.work import Publish, run_all
from packcorpus.train.model.trees import use_trees

SHARES = ("none", "conversation", "all")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("config", type=Path)
    parser.add_argument("--passes", type=int, default=3)
    parser.add_argument("--hidden", type=int, default=128)
    given = parser.parse_args()
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as root:
        rows = {share: packed(given.config, share, Path(root)) for share in SHARES}
        vocabulary = int(max(row["input_ids"].max() for row in rows["none"])) + 1
        config = LlamaConfig(
            vocab_size=vocabulary, hidden_size=given.hidden, intermediate_size=4 * given.hidden, num_hidden_layers=3,
            num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=1 << 16, use_cache=False,
        )  # fmt: skip
        model = LlamaForCausalLM(config)
        use_trees(model)
        results: dict[str, tuple[float, torch.Tensor]] = {}
        for number in range(given.passes):
            for share, own in rows.items():
                start = time.perf_counter()
                results[share] = loss, _ = passed(model, own)
                seconds = time.perf_counter() - start
                print(f"pass {number}, share: {share}: {len(own)} rows, {seconds:.1f} s, loss {loss:.4f}", flush=True)
    usual, *others = (gradient for _, gradient in results.values())
    for gradient in others:
        print(f"relative difference of the gradients: {float((gradient - usual).norm() / usual.norm()):.1e}")


def packed(config: Path, share: str, root: Path) -> list[dict[str, torch.Tensor]]:
    values = yaml.safe_load(config.read_text()) | {"share": share}
    recipe = recipe_of(config_from(values, str(config)), config.parent, root)
    run_all(Publish(recipe))
    dataset = packcorpus.open(recipe.published).dataset("train")
    return [dataset[number] for number in range(len(dataset))]


def passed(model: Any, rows: list[dict[str, torch.Tensor]]) -> tuple[float, torch.Tensor]:
    """Return the loss of all rows and its gradient."""
    collate, total = packcorpus.Collator("sdpa"), 0.0
    model.zero_grad()
    for row in rows:
        batch = collate([row])
        labels = batch.pop("labels")[:, 1:]
        hidden = model(**batch, output_hidden_states=True, logits_to_keep=1).hidden_states[-1][:, :-1]
        chosen = labels >= 0
        logits = model.lm_head(hidden[chosen])
        loss = torch.nn.functional.cross_entropy(logits, labels[chosen], reduction="sum")
        loss.backward()
        total += loss.item()
    return total, torch.cat([weight.grad.flatten() for weight in model.parameters() if weight.grad is not None])


if __name__ == "__main__":
    main()
