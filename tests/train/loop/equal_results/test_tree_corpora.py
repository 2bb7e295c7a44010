"""A corpus has the same loss and gradient with `share: conversation` as without.

conversations ─pack, share: none─────────▶ rows ─┐ Σ w·loss of all rows / Σ w, and its gradient
              ─pack, share: conversation─▶ rows ─┴▶ equal
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from support.small_corpus import WORDS, make_recipe, pack_corpus
from support.training.step_gradients import Gradients, error, gradients_of
from support.training.tiny_training import force_attention, plain_kernels, tiny_model

from packcorpus.train.config import TrainingConfig
from packcorpus.train.data.corpus import open_corpus
from packcorpus.train.data.dataset import PackedDataset
from packcorpus.train.loop.feed import open_feed
from packcorpus.train.model.isolation import require_isolation
from packcorpus.train.model.token_loss import weigh_loss

# Only the last answer keeps its reasoning, so samples part where an answer begins.
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }} {% if m.role == 'assistant' and loop.last %}"
    "{{ m.reasoning_content }} {% endif %}{{ m.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant {% endif %}"
)


def records() -> list[dict[str, Any]]:
    source = random.Random(5)

    def words(most: int) -> str:
        return " ".join(source.choices(WORDS, k=source.randint(1, most)))

    found = []
    for number in range(40):
        messages: list[dict[str, Any]] = [{"role": "system", "content": "so it is " * (8 + 8 * (number % 2))}]
        for _ in range(source.randint(1, 5)):
            messages.append({"role": "user", "content": words(9)})
            messages.append({"role": "assistant", "content": words(9), "reasoning_content": words(6)})
        found.append({"messages": messages, "loss_weight": (0.25, 1, 4)[number % 3]})
    return found


def pack(folder: Path, share: str) -> Path:
    folder.mkdir()
    (folder / "own.jinja").write_text(TEMPLATE)
    settings = {"template": "own.jinja", "turns": "apart", "loss_weight": "both", "sequence_length": 256}
    return pack_corpus(make_recipe(folder, records(), share=share, validation=0.2, **settings))


def of_all_rows(manifest: Path, backend: str) -> tuple[float, Gradients, int]:
    """Return the weighted loss of all training rows, its gradient, and their tokens."""
    model, rows = tiny_model(), PackedDataset(manifest)
    feed = open_feed(open_corpus(manifest), TrainingConfig())
    force_attention(model, backend)
    collate = feed.collator(backend)
    require_isolation(model, rows, collate, 2, attention=backend, seed=1)
    weigh_loss(model)
    total = sum(float(row["loss_weight"].sum()) for row in rows)
    loss = 0.0
    for number in range(len(rows)):
        part = model(**collate([rows[number]]), num_items_in_batch=total)["loss"]
        part.backward()
        loss += part.item()
    return loss, gradients_of(model), rows.tokens


def test_trees_of_a_corpus_train_like_its_samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain_kernels(monkeypatch)
    loss, gradients, tokens = of_all_rows(pack(tmp_path / "none", "none"), "sdpa")
    for share, most in (("conversation", 0.8), ("all", 0.65)):
        manifest = pack(tmp_path / share, share)
        for backend in ("sdpa", "varlen"):
            trees = of_all_rows(manifest, backend)
            assert trees[0] == pytest.approx(loss, rel=1e-5)
            assert error(trees[1], gradients) < 1e-5
            assert trees[2] < most * tokens
            assert torch.tensor(trees[0]).isfinite()
