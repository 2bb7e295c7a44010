"""Rows with trees have the loss and the gradient of their samples apart.

samples in trees ─lay_out─▶ rows ─model with use_trees─▶ Σ w·loss / Σ w and its gradient ┐
                 ─alone───▶ each sample, as the model is used ──▶ Σ of the same, by hand ┴▶ equal
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.training.architectures import ARCHITECTURES, build
from support.training.loaded_model import load, save_base
from support.training.tiny_runs import without_dropout
from support.training.tiny_training import (
    LENGTH,
    Row,
    force_attention,
    largest_difference,
    packed_rows,
    plain_kernels,
    tiny_model,
)
from support.training.tree_rows import Tree, alone, lay_out, random_trees, tree_rows
from transformers import AutoModelForCausalLM

from packcorpus.tasks.core.errors import DataError, PartMissing
from packcorpus.train.data.paths import paths_of
from packcorpus.train.model import attention
from packcorpus.train.model.attention import BACKENDS, Collator, separate_by_positions
from packcorpus.train.model.isolation import check_isolation, choose_rows, fastest, require_isolation
from packcorpus.train.model.options import comparable
from packcorpus.train.model.token_loss import fuse_loss, weigh_loss
from packcorpus.train.model.trees import TreesOfRows, use_trees

Gradients = dict[str, torch.Tensor]
Batch = dict[str, Any]
Change = Callable[[list[Row], str], Batch]  # makes a batch for a backend that is not exact

SAMPLES: list[list[Tree]] = [random_trees(11), random_trees(12)]  # of two rows
ROWS = [lay_out(trees) for trees in SAMPLES]

EXACT = [
    "llama", "qwen3", "mistral", "gemma3_text", "gemma2", "qwen3_moe", "mixtral", "gpt_oss", "phi3", "olmo2", "gpt2",
    "cohere2", "llama4_text", "deepseek_v3",
]  # fmt: skip


def architecture(name: str, **settings: Any) -> Any:
    """Build a tiny model without dropout; Mistral and Phi-3 get a window."""
    window = {"sliding_window": 24} if name in ("mistral", "phi3") else {}
    config = build(name, **ARCHITECTURES[name][0] | window | settings).config
    without_dropout(config)
    config.use_cache = False
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(config)
    separate_by_positions(model)
    return model.train()


def gradients_of(model: Any) -> Gradients:
    return {name: weights.grad.clone() for name, weights in model.named_parameters() if weights.grad is not None}


def of_samples(model: Any) -> tuple[float, Gradients]:
    """Return the weighted loss of all samples, each alone, and its gradient."""
    rows = [row for trees in SAMPLES for row in alone(trees)]
    total = sum(float(row["loss_weight"].sum()) for row in rows)
    loss = 0.0
    model.zero_grad()
    for row in rows:
        logits = model(input_ids=row["input_ids"][None].long()).logits[0, :-1]
        each = torch.nn.functional.cross_entropy(logits, row["labels"][1:], reduction="none")
        part = (each * row["loss_weight"][1:]).sum() / total
        part.backward()
        loss += part.item()
    found = gradients_of(model)
    model.zero_grad()
    return loss, found


def of_trees(model: Any, batch: Batch | None = None) -> tuple[float, Gradients]:
    backend = next(name for name, theirs in BACKENDS.items() if theirs == model.config._attn_implementation)
    model.zero_grad()
    loss = model(**(batch or Collator(backend)(ROWS)))["loss"]
    loss.backward()
    found = gradients_of(model)
    model.zero_grad()
    return loss.item(), found


def difference(one: tuple[float, Gradients], other: tuple[float, Gradients]) -> float:
    """Return the relative difference of losses or of gradients, whichever is larger."""
    return max(abs(one[0] - other[0]) / other[0], largest_difference(other[1], one[1]))


# -- exact -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", EXACT)
def test_loss_and_gradient_are_those_of_the_samples_apart(name: str) -> None:
    model = architecture(name)
    expected = of_samples(model)
    use_trees(model)
    weigh_loss(model)
    assert difference(of_trees(model), expected) <= 1e-5


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "mixtral"])
@pytest.mark.parametrize("backend", ["eager", "sdpa", "varlen"])
def test_all_backends_are_exact_with_checkpointing_and_the_fused_loss(
    monkeypatch: pytest.MonkeyPatch, name: str, backend: str
) -> None:
    plain_kernels(monkeypatch)
    model = architecture(name)
    expected = of_samples(model)
    force_attention(model, backend)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    use_trees(model)
    fuse_loss(model)
    assert difference(of_trees(model), expected) <= 1e-5


@pytest.mark.parametrize("checkpointing", [False, True])
def test_nf4_is_exact(tmp_path: Path, checkpointing: bool) -> None:
    model = load(save_base(tmp_path), quantization="nf4", activation_checkpointing=checkpointing)
    with torch.no_grad():
        for name, weights in model.named_parameters():
            if "lora_B" in name:
                weights.normal_(std=0.05)
    expected = of_samples(model)
    assert require_isolation(model, ROWS, Collator("sdpa"), 2, attention="sdpa", seed=1)
    weigh_loss(model)
    assert difference(of_trees(model), expected) <= 1e-5


def test_flex_computes_the_same_logits() -> None:
    # On a CPU, flex has only a forward pass.
    for name in ("llama", "gemma3_text"):
        model, batch = architecture(name), Collator("sdpa")(ROWS)
        del batch["labels"], batch["loss_weight"]
        use_trees(model)
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            expected = model(**batch).logits
            force_attention(model, "flex")
            assert torch.allclose(model(**batch).logits, expected, atol=1e-4)


# -- what would train wrongly ------------------------------------------------------------------------------------------


def seeing_siblings(rows: list[Row], backend: str) -> Batch:
    """Let each token see all of its tree before it."""
    changed = []
    for row in rows:
        ends = row["end"].clone()
        roots = [*(row["position_ids"] == 0).nonzero().flatten().tolist(), len(ends)]
        for start, stop in pairwise(roots):
            if int(ends[start]) == stop:  # otherwise padding
                ends[start:stop] = stop
        changed.append(row | {"end": ends})
    return Collator(backend)(changed)


def alone_in_pieces(rows: list[Row], backend: str) -> Batch:
    """Let each token see only its own piece."""
    changed = []
    for row in rows:
        ends = torch.zeros_like(row["end"])
        for sample in paths_of({name: values.numpy() for name, values in row.items()}):
            stop = int(sample.places[-1]) + 1
            ends[:stop][ends[:stop] == 0] = stop
        changed.append(row | {"end": ends})
    return Collator(backend)(changed)


def positions_by_place(rows: list[Row], backend: str) -> Batch:
    """Count positions through a tree, not along a path."""
    batch = Collator(backend)(rows)
    is_root = batch["position_ids"] == 0
    place = torch.arange(is_root.shape[1]).expand_as(is_root)
    return batch | {"position_ids": place - torch.where(is_root, place, 0).cummax(1).values}


def without_weights(rows: list[Row], backend: str) -> Batch:
    batch = Collator(backend)(rows)
    del batch["loss_weight"]
    return batch


@pytest.mark.parametrize("change", [seeing_siblings, alone_in_pieces, positions_by_place, without_weights])
def test_what_is_not_exact_differs(change: Change) -> None:
    model = architecture("llama")
    expected = of_samples(model)
    use_trees(model)
    weigh_loss(model)
    assert difference(of_trees(model, change(ROWS, "sdpa")), expected) > 0.05


@pytest.mark.parametrize(
    ("name", "backend"),
    [("llama", "sdpa"), ("gemma3_text", "sdpa"), ("gpt_oss", "eager"), ("llama", "varlen"), ("gemma3_text", "varlen")],
)
def test_the_proof_accepts_trees(monkeypatch: pytest.MonkeyPatch, name: str, backend: str) -> None:
    plain_kernels(monkeypatch)
    model = architecture(name)
    force_attention(model, backend)
    found = require_isolation(model, tree_rows(6), Collator(backend), 2, attention=backend, seed=1)
    assert found is not None
    assert found.passed
    assert found.own_moved > 0.1
    assert "replaced tokens moved logits of the tokens that see them" in str(found)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (seeing_siblings, "tokens see more than their path"),
        (alone_in_pieces, "tokens do not see all of their path"),
        (positions_by_place, "counts positions or windows by the places of a row"),
    ],
)
@pytest.mark.parametrize("backend", ["sdpa", "varlen"])
def test_the_proof_refuses_what_is_not_exact(
    monkeypatch: pytest.MonkeyPatch, change: Change, message: str, backend: str
) -> None:
    plain_kernels(monkeypatch)
    model = architecture("llama")
    force_attention(model, backend)
    with pytest.raises(DataError, match=rf"{message}.*share: none") as error:
        require_isolation(model, ROWS, lambda rows: change(rows, backend), 2, attention=backend, seed=1)
    assert error.value.code == "E618"


@pytest.mark.parametrize("backend", ["sdpa", "varlen"])
def test_the_proof_detects_one_sibling_that_is_seen(monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
    plain_kernels(monkeypatch)
    model = architecture("llama")
    force_attention(model, backend)
    use_trees(model)
    for count in (1, 2):
        rows = ROWS[:count]
        assert check_isolation(model, Collator(backend)(rows), rows, seed=1).passed
        for start in TreesOfRows(rows).starts[1:].tolist():
            number, place = divmod(start, LENGTH)
            positions, end = rows[number]["position_ids"], rows[number]["end"].clone()
            if positions[place] == 0:
                continue
            same = (positions[:place] == positions[place]).nonzero()
            end[int(same[-1])] = place + 2  # the token that is copied, where the sample before goes on
            changed = [*rows]
            changed[number] = rows[number] | {"end": end}
            assert not check_isolation(model, Collator(backend)(changed), rows, seed=1).passed


@pytest.mark.parametrize("name", ["bloom", "mpt", "gpt_neo", "roberta", "bart", "rwkv"])
def test_models_with_other_positions_windows_or_states_are_refused(name: str) -> None:
    model = architecture(name)
    backend = model.config._attn_implementation
    with pytest.raises(DataError, match="Pack the corpus with share: none, or use another model") as error:
        require_isolation(model, ROWS, Collator(backend), 2, attention=backend, seed=1)
    assert error.value.code == "E618"


@pytest.mark.parametrize("name", ["mamba", "lfm2", "qwen3_next"])
def test_models_that_scan_are_refused_by_name(name: str) -> None:
    model = architecture(name)
    with pytest.raises(DataError, match=rf"a {name} model passes a state .* share: none") as error:
        require_isolation(model, ROWS, Collator("sdpa"), 2, attention="sdpa", seed=1)
    assert error.value.code == "E650"


@pytest.mark.parametrize("backend", ["flash2", "flash3"])
def test_backends_that_cannot_follow_paths_are_refused_by_name(backend: str) -> None:
    with pytest.raises(PartMissing, match=rf"attention `{backend}` cannot follow.*`attention: varlen`.*share: none"):
        Collator(backend)(ROWS)


def test_a_row_of_one_tree_without_padding_is_proven() -> None:
    row = lay_out(random_trees(5)[:1])
    size = int((row["input_ids"] > 0).sum())
    rows = [{name: values[:size] for name, values in row.items()}]
    assert TreesOfRows(rows).samples > 1
    assert require_isolation(tiny_model(), rows, Collator("sdpa"), 1, attention="sdpa", seed=1)


def test_the_fastest_backend_follows_trees(monkeypatch: pytest.MonkeyPatch) -> None:
    plain_kernels(monkeypatch)
    monkeypatch.setattr(attention, "unavailable_reason", lambda name, *_: "no kernel" if name == "flex" else None)
    chosen, trials = fastest(tiny_model(), ROWS, 2, seed=1, passes=1)
    assert chosen in ("varlen", "sdpa", "eager")
    assert {trial.attention for trial in trials if trial.tokens_per_second} == {"varlen", "sdpa", "eager"}


# -- paths -------------------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 2**32), min_size=1, max_size=3), st.integers(0, 200))
def test_a_query_has_the_keys_that_it_sees(seeds: list[int], cut: int) -> None:
    rows = [lay_out(random_trees(seed)) for seed in seeds]
    rows = [{name: values[cut:] - cut * (name == "end") for name, values in row.items()} for row in rows]
    batch = Collator("varlen")(rows)
    (starts, stops), (firsts, lasts) = (
        (bounds[:-1], bounds[1:]) for bounds in (batch["cu_seq_lens_q"], batch["cu_seq_lens_k"])
    )
    assert (starts[0], stops[-1], firsts[0], lasts[-1]) == (0, batch["input_ids"].numel(), 0, len(batch["key_places"]))
    assert batch["max_length_q"] == (stops - starts).max()
    assert batch["max_length_k"] == (lasts - firsts).max()
    assert "end" not in batch
    length, key = LENGTH - cut, torch.arange(LENGTH - cut)
    for start, stop, first, last in zip(*(x.tolist() for x in (starts, stops, firsts, lasts)), strict=True):
        number = start // length
        for place in range(start, stop):
            query = place % length
            if rows[number]["input_ids"][query]:  # not padding
                seen = ((key <= query) & (query < rows[number]["end"])).nonzero().flatten() + number * length
                assert torch.equal(batch["key_places"][first : last - (stop - 1 - place)], seen)


# -- the columns -------------------------------------------------------------------------------------------------------


def test_a_batch_without_trees_is_as_before() -> None:
    model = architecture("gemma3_text")
    rows = [packed_rows()[number] for number in choose_rows(packed_rows(), 2)]
    batch = Collator("sdpa")(rows)
    with torch.no_grad():
        expected = model(**batch).logits
        use_trees(model)
        use_trees(model)  # no second time
        assert len(model._forward_pre_hooks) == 1
        model(**Collator("sdpa")(ROWS))
        assert torch.equal(model(**batch).logits, expected)


def test_no_decoder_receives_the_column() -> None:
    model = tiny_model()
    use_trees(model)
    seen: list[set[str]] = []
    model.get_decoder().register_forward_pre_hook(lambda _, args, named: seen.append({*named}), with_kwargs=True)
    model(**Collator("sdpa")(ROWS))
    assert "end" not in seen[0]
    for change in ({"attention_mask": torch.ones_like(ROWS[0]["end"])[None]}, {"position_ids": None}):
        with pytest.raises(ValueError, match="rows with `end` need their position_ids, and no attention_mask"):
            model(**Collator("sdpa")(ROWS[:1]) | change)


def test_a_part_of_a_row_can_be_compared() -> None:
    row = lay_out(random_trees(3, 3000), 3000)
    start = int((row["labels"] >= 0).nonzero()[0]) - 1
    row["labels"][:1000] = -100
    part = comparable(row)
    start = 3000 - len(part["end"])
    assert torch.equal(part["end"] + start, row["end"][start:])
    model = tiny_model(max_position_embeddings=3000)
    use_trees(model)
    assert model(**Collator("sdpa")([part])).loss.isfinite()
