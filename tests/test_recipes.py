"""Every recipe of docs/guides/other-trainers.md trains on isolated conversations.

The code of a recipe runs unchanged in a temporary folder, with its two paths set to a small corpus and a tiny model.
The input of the model is compared with the conversations of the same rows, each in its own batch.
"""

from __future__ import annotations

import re
import shutil
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.commands import ROOT
from support.packed_rows import folder_of, pack_small
from support.profiles import examples
from support.tokenizer_kinds import kind_path
from support.training.tiny_training import tiny_model

import packcorpus
from packcorpus.tasks.core.errors import DataError
from packcorpus.train.model import isolation

RECIPES = (ROOT / "docs" / "guides" / "other-trainers.md").read_text()


def code_of(heading: str) -> str:
    section = re.split(r"^## ", RECIPES, flags=re.M)
    (found,) = [part for part in section if part.startswith(heading)]
    return re.findall(r"```python\n(.*?)```", found, re.S)[0]


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build a corpus with several conversations per row, and a model with a tokenizer."""
    folder = tmp_path_factory.mktemp("recipes")
    corpus = folder_of(pack_small(folder, sequence_length=256))
    tiny_model(adapter=False).save_pretrained(folder / "model")
    shutil.copytree(kind_path("hf_byte_level"), folder / "model", dirs_exist_ok=True)
    shutil.copytree(corpus, folder / "corpus")
    return folder


@pytest.fixture(autouse=True)
def _here(project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    torch.set_num_threads(1)
    monkeypatch.chdir(tmp_path)
    for name in ("train", "tasks", "pipeline"):  # a user's own modules, which a recipe must not import
        (tmp_path / f"{name}.py").write_text(f"raise RuntimeError('{name}.py of the user was imported')\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def run(heading: str, project: Path) -> tuple[Any, list[dict[str, Any]]]:
    """Run a recipe, and return its variables and all batches of the model."""
    batches: list[dict[str, Any]] = []
    values: dict[str, Any] = {"FOLDER": str(project / "corpus"), "MODEL": str(project / "model")}

    def keep(module: Any, _args: Any, given: dict[str, Any]) -> None:
        if module.training and torch.is_grad_enabled() and "logits_to_keep" not in given:
            batches.append({name: x.clone() if torch.is_tensor(x) else x for name, x in given.items()})

    from transformers import LlamaForCausalLM

    build = LlamaForCausalLM.__init__

    def hooked(self: Any, *args: Any, **kwargs: Any) -> None:
        build(self, *args, **kwargs)
        self.register_forward_pre_hook(keep, with_kwargs=True)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LlamaForCausalLM, "__init__", hooked)
        exec(compile(code_of(heading), heading, "exec"), values)  # noqa: S102 - our own documentation
    return values, batches


def conversations_of(batch: dict[str, Any]) -> list[dict[str, torch.Tensor]]:
    """Return each conversation of a batch, and its padding, as a separate batch."""
    flat = {name: batch[name].flatten() for name in ("input_ids", "labels", "position_ids")}
    begins = (flat["position_ids"] == 0).nonzero().flatten().tolist()
    spans = pairwise([*begins, len(flat["input_ids"])])
    return [{name: values[None, first:last] for name, values in flat.items()} for first, last in spans]


def loss_alone(model: Any, batch: dict[str, Any]) -> float:
    """Return the mean loss over all trained tokens of separate conversations."""
    total, count = 0.0, 0
    for one in conversations_of(batch):
        trained = int((one["labels"][:, 1:] >= 0).sum())
        if trained:
            with torch.no_grad():
                total += float(model(input_ids=one["input_ids"], labels=one["labels"]).loss) * trained
            count += trained
    return total / count


@pytest.mark.parametrize("heading", ["transformers.Trainer", "trl.SFTTrainer", "A bare PyTorch loop"])
def test_a_recipe_trains_on_isolated_conversations(project: Path, heading: str) -> None:
    values, batches = run(heading, project)
    if heading == "transformers.Trainer":
        assert len(values["trainer"].eval_dataset) > 0
    model = values["model"].eval()
    assert len(batches) == 3
    for batch in batches:
        assert batch.get("attention_mask") is None
        assert not batch.get("use_cache")
        assert batch["input_ids"].numel() == 4 * 256
        assert len(conversations_of(batch)) > 8
        packed = {name: batch[name] for name in ("input_ids", "labels", "position_ids")}
        with torch.no_grad():
            loss = float(model(**packed, use_cache=False).loss)
            leaking = float(model(**packed | {"position_ids": None}, use_cache=False).loss)
        assert loss == pytest.approx(loss_alone(model, packed), rel=1e-5)
        assert abs(leaking - loss) > 1e-4 * loss, "a leak would show"


def test_the_trainer_accepts_a_corpus_without_a_validation_split(tmp_path: Path) -> None:
    corpus = folder_of(pack_small(tmp_path, sequence_length=256, validation=0.0))
    tiny_model(adapter=False).save_pretrained(tmp_path / "model")
    shutil.copytree(corpus, tmp_path / "corpus")
    values, batches = run("transformers.Trainer", tmp_path)
    assert (values["trainer"].eval_dataset, len(batches)) == (None, 3)


def test_trl_computes_the_positions_of_the_corpus(project: Path) -> None:
    values, batches = run("trl.SFTTrainer", project)
    known = {tuple(row["input_ids"]): row["position_ids"] for row in values["rows"]["train"]}
    for batch in batches:
        for ids, positions in zip(*(batch[name].view(-1, 256) for name in ("input_ids", "position_ids")), strict=True):
            assert positions.tolist() == list(known[tuple(ids.tolist())])


@pytest.mark.parametrize("heading", ["transformers.Trainer", "trl.SFTTrainer", "A bare PyTorch loop"])
def test_a_recipe_that_leaks_stops_before_it_trains(
    project: Path, heading: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    hidden = isolation._hidden

    def leaking(model: Any, batch: dict[str, Any], seed: int) -> torch.Tensor:
        return hidden(model, batch | {"attention_mask": torch.ones_like(batch["input_ids"])}, seed)

    monkeypatch.setattr(isolation, "_hidden", leaking)
    with pytest.raises(DataError, match="see each other"):
        run(heading, project)


@settings(max_examples=examples(30), deadline=None)
@given(st.lists(st.lists(st.integers(1, 6), min_size=4, max_size=4), min_size=1, max_size=3))
def test_the_mask_equals_the_segments(lengths: list[list[int]]) -> None:
    values: dict[str, Any] = {}
    exec(compile(code_of("A model of your own"), "recipe", "exec"), values)  # noqa: S102 - our own documentation
    assert (values["bounds"].tolist(), values["longest"]) == ([0, 3, 5], 3)
    width = max(map(sum, lengths))
    rows = [[*row, width - sum(row)] for row in lengths]
    positions = torch.tensor([[at for length in row for at in range(length)] for row in rows])
    mask = values["block_diagonal"](positions)
    bounds, _ = packcorpus.segments(positions)
    torch.manual_seed(0)
    query, key, value = torch.randn(3, len(rows), 2, width, 8)
    whole = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)
    flat = [x.transpose(1, 2).reshape(-1, 2, 8).transpose(0, 1) for x in (query, key, value)]
    alone = [
        torch.nn.functional.scaled_dot_product_attention(*(x[:, first:last] for x in flat), is_causal=True)
        for first, last in pairwise(bounds.tolist())
    ]
    expected = torch.cat(alone, 1).transpose(0, 1).reshape(len(rows), width, 2, 8).transpose(1, 2)
    torch.testing.assert_close(whole, expected)
