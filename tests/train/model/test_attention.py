"""Attention backends, bounds of segments, and correct calls of GPU kernels."""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import Any, get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from support.training.architectures import build
from support.training.tiny_training import (
    FAMILIES,
    LENGTH,
    Row,
    force_attention,
    packed_rows,
    plain_kernels,
    tiny_model,
)
from support.training.tree_rows import tree_rows
from transformers import default_data_collator

from packcorpus.tasks.core.errors import PartMissing
from packcorpus.train.config import Attention
from packcorpus.train.model import attention
from packcorpus.train.model.attention import (
    BACKENDS,
    BY_SEGMENTS,
    Collator,
    decoder_of,
    segments,
    unavailable_reason,
    use_attention,
    varlen_forward,
)

CPU, GPU = torch.device("cpu"), torch.device("cuda")


# -- segments ---------------------------------------------------------------------------------------------------------


@st.composite
def lengths_of_rows(draw: st.DrawFn) -> list[list[int]]:
    """Rows of the same length, cut into segments."""
    length = draw(st.integers(1, 30))
    rows = []
    for _ in range(draw(st.integers(1, 4))):
        cuts = draw(st.sets(st.integers(1, length - 1))) if length > 1 else set()
        bounds = [0, *sorted(cuts), length]
        rows.append([b - a for a, b in pairwise(bounds)])
    return rows


@given(lengths_of_rows(), st.sampled_from([torch.int32, torch.int64]))
def test_segments_of_a_batch_are_those_of_its_rows(rows: list[list[int]], dtype: torch.dtype) -> None:
    positions = torch.stack([torch.cat([torch.arange(n, dtype=dtype) for n in row]) for row in rows])
    flat = [n for row in rows for n in row]
    bounds, longest = segments(positions)
    assert bounds.tolist() == [0, *accumulate(flat)]
    assert bounds.dtype == torch.int32
    assert (longest, type(longest)) == (max(flat), int)


def test_every_row_starts_a_segment() -> None:
    positions = torch.tensor([[0, 1, 2], [5, 6, 0]])
    bounds, longest = segments(positions)
    assert bounds.tolist() == [0, 3, 5, 6]
    assert longest == 3
    assert positions.tolist() == [[0, 1, 2], [5, 6, 0]]


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_collator_extends_the_default_batch(backend: str) -> None:
    rows = packed_rows()[:3]
    expected, batch = default_data_collator(rows), Collator(backend)(rows)
    assert all(torch.equal(batch[name], values) for name, values in expected.items())
    assert {batch[name].dtype for name in ("input_ids", "position_ids")} == {torch.int32}
    assert batch["labels"].dtype == torch.int64
    added = {name: batch[name] for name in batch.keys() - expected.keys()}
    if backend not in BY_SEGMENTS:
        assert added == {}
        return
    bounds, longest = segments(batch["position_ids"])
    assert len(bounds) == 1 + sum(int((row["position_ids"] == 0).sum()) for row in rows)
    assert torch.equal(added.pop("cu_seq_lens_q"), bounds)
    assert torch.equal(added.pop("cu_seq_lens_k"), bounds)
    assert added == {"max_length_q": longest, "max_length_k": longest}


def test_rows_without_positions_are_one_segment_each() -> None:
    rows = [{name: row[name] for name in ("input_ids", "labels")} for row in packed_rows()[:2]]
    batch = Collator("varlen")(rows)
    assert batch["cu_seq_lens_q"].tolist() == [0, LENGTH, 2 * LENGTH]
    assert batch["max_length_k"] == LENGTH


# -- kernels ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("backend", ["varlen", "flash2", "flash3"])
def test_segment_kernels_equal_sdpa(monkeypatch: pytest.MonkeyPatch, backend: str, family: str) -> None:
    plain_kernels(monkeypatch)
    model, rows = tiny_model(family), packed_rows()[:3]
    with torch.no_grad():
        expected = model(**Collator("sdpa")(rows)).logits
        force_attention(model, backend)
        found = model(**Collator(backend)(rows)).logits
    assert (found - expected).abs().max() < 1e-4 * expected.abs().max()


@pytest.mark.parametrize(
    ("inputs", "word"),
    [
        ({"dropout": 0.1}, "dropout"),
        ({"softcap": 30.0}, "softcap"),
        ({"s_aux": torch.zeros(2)}, "s_aux"),
        ({"attention_mask": torch.ones(1, 1, 4, 4)}, "attention_mask"),
        ({"cu_seq_lens_q": None}, "batches without cu_seq_lens"),
    ],
)
def test_varlen_rejects_unsupported_features(
    monkeypatch: pytest.MonkeyPatch, inputs: dict[str, Any], word: str
) -> None:
    plain_kernels(monkeypatch)
    qkv = dict(zip(("query", "key", "value"), torch.randn(3, 1, 2, 4, 8), strict=True))
    bounds = torch.tensor([0, 4], dtype=torch.int32)
    fine = {"attention_mask": None, "cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds}
    fine |= {"max_length_q": 4, "max_length_k": 4} | qkv
    out, weights = varlen_forward(torch.nn.Identity(), **fine)
    assert (out.shape, weights) == ((1, 4, 2, 8), None)
    with pytest.raises(PartMissing, match=word):
        varlen_forward(torch.nn.Identity(), **fine | inputs)


def test_varlen_computes_in_the_precision_of_the_values(monkeypatch: pytest.MonkeyPatch) -> None:
    plain_kernels(monkeypatch)
    q, k, v = torch.randn(3, 2, 2, 4, 8)
    bounds = torch.tensor([0, 3, 8], dtype=torch.int32)
    named = {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "max_length_q": 5, "max_length_k": 5}
    out, _ = varlen_forward(torch.nn.Identity(), q, k, v.bfloat16(), None, **named)
    assert out.dtype == torch.bfloat16


# -- availability ------------------------------------------------------------------------------------------------------


def test_every_configurable_backend_exists() -> None:
    assert {*BACKENDS, "auto"} == set(get_args(Attention))


def test_without_a_gpu_only_sdpa_and_eager_train() -> None:
    assert [name for name in BACKENDS if unavailable_reason(name, CPU) is None] == ["sdpa", "eager"]
    assert unavailable_reason("flex", CPU) == "flex needs a GPU"


def test_unavailable_backends_on_a_gpu_are_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    def reasons(dtype: torch.dtype = torch.bfloat16) -> dict[str, str | None]:
        return {name: unavailable_reason(name, GPU, dtype) for name in BACKENDS}

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    always = {"flex": None, "sdpa": None, "eager": None}
    lacking = {"flash3": "flash3 needs the flash-attn-3 package", "flash2": "flash2 needs the flash-attn package"}
    assert reasons() == always | lacking | {"varlen": None}
    monkeypatch.setattr(attention, "PACKAGES", dict.fromkeys(lacking, ("", lambda: True)))
    assert set(reasons().values()) == set(reasons(torch.float16).values()) == {None}
    assert reasons(torch.float32) == always | {
        name: f"{name} needs `precision: bf16` or `fp16`" for name in BY_SEGMENTS
    }
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 5))
    assert {name for name, reason in reasons().items() if reason and "8.0 (Ampere)" in reason} == set(BY_SEGMENTS)


@pytest.mark.parametrize("adapter", [True, False])
def test_a_model_changes_its_backend(adapter: bool) -> None:
    model, batch = tiny_model(adapter=adapter), Collator("eager")(packed_rows()[:1])
    for backend in ("eager", "sdpa"):
        use_attention(model, backend)
        assert {layer.self_attn.config._attn_implementation for layer in model.get_decoder().layers} == {backend}
        with torch.no_grad():
            # Only eager returns attention weights.
            assert bool(model(**batch, output_attentions=True).attentions) == (backend == "eager")


def test_an_unusable_backend_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model()
    with pytest.raises(PartMissing, match=r"^varlen needs a GPU; use `attention: sdpa`$"):
        use_attention(model, "varlen")
    use_attention(model, "eager")
    monkeypatch.setattr(type(model.get_base_model()), "_supports_sdpa", False)
    with pytest.raises(PartMissing, match=r"^attention `sdpa` cannot be used with a llama model \(.*\); use sdpa$"):
        use_attention(model, "sdpa")
    assert model.config._attn_implementation == "eager"


def test_a_model_that_silently_keeps_its_backend_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model()
    monkeypatch.setattr(type(model.get_base_model()), "_can_set_attn_implementation", classmethod(lambda _: False))
    with pytest.raises(PartMissing, match=r"^attention `eager` cannot be used with a llama model; use sdpa$"):
        use_attention(model, "eager")


@pytest.mark.parametrize("adapter", [True, False])
@pytest.mark.parametrize("name", ["llama", "llama4_text", "modernbert-decoder", "opt"])
def test_the_decoder_of_a_model_contains_its_embeddings_and_not_its_head(name: str, adapter: bool) -> None:
    settings = {"opt": {"word_embed_proj_dim": 64}, "llama4_text": {"attn_temperature_tuning": False}}
    model = build(name, **settings.get(name, {}))
    if adapter:
        model = get_peft_model(model, LoraConfig(target_modules=["q_proj", "Wqkv", "q_attn"]))
    decoder, modules = decoder_of(model), [*decoder_of(model).modules()]
    assert any(module is model.get_input_embeddings() for module in modules)
    assert not any(module is model.get_output_embeddings() for module in modules)
    ids = torch.arange(10)[None]
    with torch.no_grad():
        assert decoder(ids)[0].shape == (1, 10, 64)


@pytest.mark.parametrize("rows", [packed_rows()[:2], tree_rows(2)])
def test_a_constant_bound_of_segments_is_never_too_small(rows: list[Row]) -> None:
    for name in ("max_length_q", "max_length_k"):
        exact = Collator("varlen")(rows)[name]
        for bound, expected in ((exact + 7, exact + 7), (1, exact)):
            assert Collator("varlen", bound)(rows)[name] == expected
