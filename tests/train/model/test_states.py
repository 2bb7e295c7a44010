"""Models that cannot isolate conversations train on them separately.

packed rows ─model in one of its ways─▶ logits, loss, gradient of the adapter ┐
each conversation alone, by the model as transformers has it ─────────────────┴▶ equal
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.training.architectures import ARCHITECTURES, STATE, build
from support.training.tiny_training import LENGTH, Row, packed_rows, tiny_model

from packcorpus.tasks.core.errors import DataError, PartMissing
from packcorpus.train.config import TrainingConfig
from packcorpus.train.model import states
from packcorpus.train.model.attention import Collator, segments, separate_by_positions
from packcorpus.train.model.isolation import check_isolation, choose_rows, require_isolation
from packcorpus.train.model.qlora import add_adapter

# Convolutions alone, the gated delta rule, Mamba 2 alone, beside, and between attention, and Mamba 1.
HYBRIDS = ("lfm2", "qwen3_next", "qwen3_5_text", "bamba", "falcon_h1", "granitemoehybrid", "nemotron_h", "jamba")
MODELS = ("opt", "minimax", "rwkv")


def rows() -> list[Row]:
    """Return two rows of several conversations; the second ends with padding."""
    several = [packed_rows()[i] for i in choose_rows(packed_rows(), 40)]
    padded = [row for row in several if (row["labels"][int((row["position_ids"] == 0).nonzero()[-1]) :] < 0).all()]
    return [several[0], padded[0]]


def model_of(name: str) -> Any:
    """Return a model with an adapter whose B is not zero."""
    torch.manual_seed(3)
    model = build(name, **ARCHITECTURES[name][0] | ({"dropout": 0.0} if name == "opt" else {}))
    model.config.use_cache = False
    model = add_adapter(model, TrainingConfig(lora_dropout=0.0))
    with torch.no_grad():
        for weights_name, weights in model.named_parameters():
            if "lora_B" in weights_name:
                weights.normal_(std=0.05)
    return model.train()


def apart(name: str, way: str) -> Any:
    """Return the model in the way in which it trains."""
    model = model_of(name)
    separate_by_positions(model)
    states.use_way(model, way)
    return model


def alone(batch: list[Row]) -> Iterator[tuple[int, slice]]:
    """Yield the row and the place of each conversation and of padding."""
    for number, row in enumerate(batch):
        bounds = [*(row["position_ids"] == 0).nonzero().flatten().tolist(), LENGTH]
        yield from ((number, slice(a, b)) for a, b in pairwise(bounds))


def gradients(model: Any) -> torch.Tensor:
    return torch.cat([weights.grad.flatten() for _, weights in model.named_parameters() if weights.grad is not None])


def summed_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(logits[:-1], labels[1:], reduction="sum")


def one_by_one(name: str) -> tuple[list[torch.Tensor], float, torch.Tensor]:
    """Return the logits, summed loss, and gradient of separate conversations."""
    # Each conversation is a separate row.
    model, logits, total = model_of(name), [], 0.0
    for number, place in alone(rows()):
        row = rows()[number]
        found = model(input_ids=row["input_ids"][None, place], position_ids=row["position_ids"][None, place]).logits[0]
        logits.append(found.detach())
        if (row["labels"][place] >= 0).any():
            loss = summed_loss(found, row["labels"][place])
            loss.backward()
            total += loss.item()
    return logits, total, gradients(model)


# -- equal to separate conversations -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*HYBRIDS, *MODELS])
def test_losses_and_gradients_equal_those_of_separate_conversations(name: str) -> None:
    logits, total, gradient = one_by_one(name)
    batch = Collator("sdpa")(rows())
    model = apart(name, states.LAYERS if name in HYBRIDS else states.MODEL)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    out = model(**batch, num_items_in_batch=1)
    out.loss.backward()
    assert out.loss.item() == pytest.approx(total, rel=1e-5)
    for (number, place), expected in zip(alone(rows()), logits, strict=True):
        assert torch.allclose(out.logits[number, place], expected, atol=1e-4)
    assert (gradients(model) - gradient).norm() < 1e-4 * gradient.norm()
    for weights_name, weights in model.named_parameters():
        if weights.requires_grad and not weights.grad.any():
            pytest.fail(f"{weights_name} has no effect")

    # Negative control: the model as transformers has it.
    leaking = model_of(name)
    seen = leaking(**batch, num_items_in_batch=1)
    seen.loss.backward()
    assert (seen.logits - out.logits).abs().max() > 0.1
    assert (gradients(leaking) - gradient).norm() > 0.01 * gradient.norm()


# -- kernels -----------------------------------------------------------------------------------------------------------


def plain_kernels(monkeypatch: pytest.MonkeyPatch, family: str, scan: str) -> list[tuple[Any, Any]]:
    """Replace the kernels of a family by its own code, and return their bounds."""
    # The code runs on each segment separately.
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    plain_conv, plain_scan = (getattr(module, name).__wrapped__ for name in ("causal_conv1d_fn", scan))
    calls = []

    def conv(x: torch.Tensor, *args: Any, seq_idx: torch.Tensor, cu_seq_lens_q: torch.Tensor, **named: Any) -> Any:
        assert len(x) == 1, "kernels take bounds of one sequence"
        assert seq_idx.dtype == cu_seq_lens_q.dtype == torch.int32
        assert seq_idx.shape == (1, x.shape[2])
        calls.append((seq_idx, cu_seq_lens_q))
        sizes = seq_idx[0].unique_consecutive(return_counts=True)[1].tolist()
        return torch.cat([plain_conv(part, *args, **named) for part in x.split(sizes, 2)], 2)

    def scanned(*args: torch.Tensor, **named: Any) -> Any:
        bounds = named.pop("cu_seqlens", None)
        sizes = (bounds if bounds is not None else named.pop("cu_seq_lens_q")).diff().tolist()
        length = sum(sizes)

        def part(x: Any, start: int, size: int) -> Any:
            has_tokens = isinstance(x, torch.Tensor) and x.ndim > 1 and x.shape[1] == length
            return x[:, start : start + size] if has_tokens else x

        found, start = [], 0
        for size in sizes:
            here = {name: part(x, start, size) for name, x in named.items()}
            out = plain_scan(*(part(x, start, size) for x in args), **here)
            found.append(out if isinstance(out, torch.Tensor) else out[0])
            start += size
        joined = torch.cat(found, 1)
        return joined if isinstance(out, torch.Tensor) else (joined, None)

    monkeypatch.setattr(module, "causal_conv1d_fn", conv)
    monkeypatch.setattr(module, scan, scanned)
    # The fused kernel reads the weights of linear layers, which are quantized or have an adapter.
    fused = "mamba2_split_conv1d_scan_combined"
    monkeypatch.setattr(module, fused, lambda *_, **__: pytest.fail("the fused kernel was called"), raising=False)
    return calls


KERNELS = {
    "qwen3_next": ("qwen3_next", "torch_chunk_gated_delta_rule"),
    "qwen3_5_text": ("qwen3_5", "torch_chunk_gated_delta_rule"),
    "bamba": ("bamba", "mamba2_chunk_scan"),
    "falcon_h1": ("falcon_h1", "mamba2_chunk_scan"),
}


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("backend", ["sdpa", "varlen"])
def test_kernels_get_the_bounds_of_the_batch_as_one_sequence(
    monkeypatch: pytest.MonkeyPatch, name: str, backend: str
) -> None:
    batch = Collator("sdpa")(rows())
    given = batch | {key: x for key, x in Collator(backend)(rows()).items() if "seq_lens" in key}
    expected = apart(name, states.LAYERS)(**given)
    calls = plain_kernels(monkeypatch, *KERNELS[name])
    model = apart(name, states.KERNELS)
    # Bounds that a backend needs in attention do not reach the layers twice.
    found = model(**given)
    assert torch.allclose(found.logits, expected.logits, atol=1e-4)
    bounds, _ = segments(batch["position_ids"])
    for numbers, given_bounds in calls:
        assert torch.equal(given_bounds, bounds)
        assert torch.equal(numbers[0].bincount().cumsum(0), bounds[1:])
    assert calls
    found.loss.backward()
    expected.loss.backward()


@pytest.mark.parametrize("name", ["lfm2", "bamba", "qwen3_next"])
def test_without_kernels_layers_run_on_conversations_and_the_package_is_named(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(states, "ways", lambda *_: [states.KERNELS, states.LAYERS])
    model = model_of(name)
    proof = require_isolation(model, packed_rows(), Collator("sdpa"), 2, attention="sdpa", seed=1)
    assert proof is not None
    assert proof.moved == 0.0
    state = states.separation(model)
    assert state.way == states.LAYERS
    assert state.reason == (
        "`causal_conv1d_fn` can't keep packed sequences apart without `causal_conv1d`. Install `causal_conv1d` to "
        "train on packed sequences"
    )


def test_kernels_that_lose_the_bounds_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scan of Mamba 1 takes no bounds, and would ignore them."""
    module = importlib.import_module("transformers.models.jamba.modeling_jamba")
    monkeypatch.setattr(module, "causal_conv1d_fn", module.causal_conv1d_fn.__wrapped__)
    monkeypatch.setattr(states, "ways", lambda *_: [states.KERNELS, states.LAYERS])
    model = model_of("jamba")
    require_isolation(model, packed_rows(), Collator("sdpa"), 2, attention="sdpa", seed=1)
    state = states.separation(model)
    assert (state.way, state.reason) == (states.LAYERS, "its kernels do not separate them")


# -- ways --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name, (_, how) in ARCHITECTURES.items() if how == STATE])
def test_ways_of_models_with_a_state(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    with torch.device("meta"):
        model = build(name, **ARCHITECTURES[name][0])
    assert states.ways(model, "sdpa") == [states.LAYERS, states.MODEL]
    assert states.ways(model, "flash2") == [states.LAYERS]
    monkeypatch.setattr(type(model), "device", torch.device("cuda"))
    assert states.ways(model, "eager") == [states.KERNELS, states.LAYERS, states.MODEL]


def test_a_model_with_attention_alone_is_left_alone() -> None:
    model = tiny_model()
    forward, hooks = model.get_decoder().forward, len(model._forward_pre_hooks)
    require_isolation(model, packed_rows(), Collator("sdpa"), 2, attention="sdpa", seed=1)
    assert states.separation(model).way == states.ATTENTION
    assert model.get_decoder().forward == forward
    assert len(model._forward_pre_hooks) == hooks


def test_a_way_can_be_changed_and_undone() -> None:
    model, batch = model_of("lfm2"), rows()
    given = Collator("sdpa")(batch)
    for way, isolated in [(states.MODEL, True), (states.ATTENTION, False), (states.LAYERS, True), (states.MODEL, True)]:
        states.use_way(model, way)
        assert check_isolation(model, given, batch, seed=1).passed == isolated
    assert len(model.get_base_model()._forward_pre_hooks) == 1
    assert check_isolation(model.get_base_model(), given, batch, seed=1).passed, "without its adapter around it"
    assert all(module.training for module in model.modules())


def test_conversations_that_are_rows_are_left_alone() -> None:
    """Rows of format 2.0 have a mask of their padding and no positions."""
    row = rows()[0]
    start, stop = (row["position_ids"] == 0).nonzero().flatten()[:2].tolist()
    ids = row["input_ids"][None, start:stop]
    with torch.no_grad():
        expected = model_of("lfm2")(input_ids=ids).logits
        for way in (states.LAYERS, states.MODEL):
            model = apart("lfm2", way)
            model(**Collator("sdpa")(rows()))
            for given in ({}, {"attention_mask": torch.ones_like(ids), "position_ids": torch.zeros_like(ids)}):
                assert torch.equal(model(input_ids=ids, **given).logits.isfinite(), expected.isfinite())
                assert states.separation(model).cuts is None
            assert torch.allclose(model(input_ids=ids).logits, expected, atol=1e-5)


def test_a_model_that_mixes_rows_is_refused_with_the_reason() -> None:
    model = tiny_model()
    model.get_decoder().layers[0].register_forward_hook(lambda _m, _i, hidden: hidden + hidden.flatten(0, 1).mean(0))
    with pytest.raises(DataError, match="even if each conversation has its own row; use another model") as caught:
        require_isolation(model, packed_rows(), Collator("sdpa"), 2, attention="sdpa", seed=1)
    assert "try" not in str(caught.value).lower()


def test_a_model_without_other_backends_is_not_sent_to_one(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("mamba")

    def fail(_: Any) -> None:
        raise RuntimeError("too wide")

    monkeypatch.setattr(states, "cut", fail)
    with pytest.raises(PartMissing, match=r"too wide; if this names a package .*, or else use another model"):
        require_isolation(model, packed_rows(), Collator("eager"), 2, attention="eager", seed=1)


# -- the conversations of a batch --------------------------------------------------------------------------------------


@given(st.lists(st.integers(1, 300), min_size=1, max_size=50))
def test_groups_are_few_and_mostly_full(lengths: list[int]) -> None:
    found = states.groups(lengths)
    assert sorted(number for group in found for number in group) == list(range(len(lengths)))
    for group in found:
        assert max(lengths[number] for number in group) == lengths[group[0]] <= 2 * min(lengths[n] for n in group)
    assert len(found) <= math.log2(max(lengths)) + 1


@st.composite
def batches(draw: st.DrawFn) -> torch.Tensor:
    length = draw(st.integers(1, 40))
    starts = draw(st.lists(st.sets(st.integers(1, length)), min_size=1, max_size=3))
    bounds = [sorted({0, *(start for start in row if start < length), length}) for row in starts]
    return torch.tensor([[i for a, b in pairwise(row) for i in range(b - a)] for row in bounds])


@given(batches())
def test_segments_are_taken_out_and_put_back(positions: torch.Tensor) -> None:
    cuts = states.cut(positions)
    tokens = torch.arange(positions.numel()).view_as(positions)
    seen = []

    def call(x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        for row, place in zip(x.tolist(), places.tolist(), strict=True):
            size = max(place) + 1
            assert place == [*range(size), *[size - 1] * (len(place) - size)], "a conversation, its last token repeated"
            assert row[:size] == list(range(row[0], row[0] + size))
            assert set(row[size:]) <= {row[size - 1]}
            seen.extend(row[:size])
        return x[..., None] * 2

    out = states.run_apart(cuts, call, (tokens,), {"places": positions, "cu_seq_lens_q": cuts.bounds, "seq_idx": 1})
    assert torch.equal(out[..., 0], tokens * 2)
    assert sorted(seen) == list(range(positions.numel()))
    assert torch.equal(cuts.numbers[0], (positions == 0).flatten().cumsum(0) - 1)
