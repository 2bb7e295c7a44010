"""Options change only speed and memory, and are used only if they do.

A tiny model is loaded by the real code on the CPU; options are tried on real rows.
"""

from __future__ import annotations

import math
import re
import sys
from pathlib import Path
from types import MethodType, SimpleNamespace
from typing import Any

import pytest
import torch
from support.training.architectures import ARCHITECTURES, build
from support.training.loaded_model import adapter, batch_of, load, save_base
from support.training.tiny_training import gradients, largest_difference, packed_rows, tiny_model
from support.training.tree_rows import lay_out, random_trees
from torch._dynamo.utils import counters
from torch._inductor import config as inductor_config
from torch._inductor import cpu_vec_isa
from torch.nn.parallel import DistributedDataParallel
from transformers.integrations import liger as liger_of_transformers
from transformers.models.llama import modeling_llama

from packcorpus.train.config import TrainingConfig
from packcorpus.train.machine.devices import compiler
from packcorpus.train.model import attention, liger, options, token_loss
from packcorpus.train.model.attention import Collator, autocast, use_attention
from packcorpus.train.model.options import (
    SAME,
    comparable,
    loss_and_gradient,
    try_compile,
    try_fused_loss,
    try_liger,
)
from packcorpus.train.model.qlora import add_adapter
from packcorpus.train.model.token_loss import fuse_loss

needs_compiler = pytest.mark.skipif(compiler() is None, reason="torch.compile needs a C++ compiler on a CPU")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_base(tmp_path_factory.mktemp("base"))


# -- the fused loss ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("checkpointing", [True, False])
@pytest.mark.parametrize("items", [None, 77, torch.tensor(1234)])
def test_the_fused_loss_equals_the_loss(base: Path, items: Any, checkpointing: bool) -> None:
    model = load(base, lora_dropout=0.0, activation_checkpointing=checkpointing)
    inputs = batch_of(0, 1, 2) | ({} if items is None else {"num_items_in_batch": items})
    plain, expected = gradients(model, **inputs)
    undo = fuse_loss(model)
    fused, found = gradients(model, **inputs)
    assert fused == pytest.approx(plain, rel=1e-5)
    assert largest_difference(expected, found) < 1e-4
    assert model(**inputs).logits is None
    undo()
    assert model(**inputs).logits is not None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_fused_loss_is_not_rounded_to_16_bits(tmp_path: Path, dtype: torch.dtype) -> None:
    tiny_model(adapter=False, initializer_range=0.1).save_pretrained(tmp_path)
    model, batch = load(tmp_path, dtype), batch_of(*range(4))
    plain, _ = loss_and_gradient(model, batch, dtype)
    fuse_loss(model)
    fused, _ = loss_and_gradient(model, batch, dtype)
    assert fused == pytest.approx(plain, rel=5e-4)


def test_a_model_that_calls_dropout_itself_can_be_compared() -> None:
    # OPT keeps its rates as numbers. With dropout, passes would differ by chance, and every option would be refused.
    torch.manual_seed(0)
    model = add_adapter(build("opt", **ARCHITECTURES["opt"][0]), TrainingConfig(lora_dropout=0.0)).train()
    model.config.use_cache = False
    layer = model.get_decoder().layers[0]
    assert layer.dropout > 0
    batch = batch_of(0, 1)
    del batch["position_ids"]
    assert try_fused_loss(model, batch, torch.float32, 42).used
    assert layer.dropout > 0


def test_a_pass_without_labels_still_has_logits(base: Path) -> None:
    model = load(base).eval()
    inputs = batch_of(0)
    del inputs["labels"]
    with torch.no_grad():
        plain = model(**inputs)["logits"]
        fuse_loss(model)
        assert torch.equal(model(**inputs)["logits"], plain)


def test_the_fused_loss_works_under_ddp(base: Path) -> None:
    model = load(base, lora_dropout=0.0)
    expected = gradients(model, **batch_of(0, 1))
    fuse_loss(model)
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        found = gradients(DistributedDataParallel(model), **batch_of(0, 1))
    finally:
        torch.distributed.destroy_process_group()
    assert found[0] == pytest.approx(expected[0], rel=1e-5)
    assert largest_difference(expected[1], {n.removeprefix("module."): g for n, g in found[1].items()}) < 1e-4


# -- options are tested first ------------------------------------------------------------------------------------------


def same_as_before(model: Any, before: dict[str, torch.Tensor]) -> bool:
    now = adapter(model)
    return all(torch.equal(before[name], now[name]) for name in before) and all(
        p.grad is None for p in model.parameters()
    )


@pytest.mark.parametrize("dtype", SAME)
def test_the_fused_loss_is_used(base: Path, dtype: torch.dtype) -> None:
    model = load(base, dtype, lora_dropout=0.05)
    before, random = adapter(model), torch.get_rng_state()
    tried = try_fused_loss(model, batch_of(0, 1), dtype, 1)
    assert tried.used
    assert tried.note.startswith("fused_loss: used")
    assert same_as_before(model, before)
    assert torch.equal(torch.get_rng_state(), random)
    with autocast(model.device, dtype):
        assert model(**batch_of(0)).logits is None
    assert {m.p for m in model.modules() if isinstance(m, torch.nn.Dropout)} == {0.05}


def test_losses_are_compared_on_few_trained_tokens(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The logits of a whole row might not fit without the fused loss."""
    monkeypatch.setattr(options, "COMPARED", 64)
    labels = torch.full((256,), -100)
    for first, start in ((0, 0), (1, 0), (100, 99), (255, 192)):
        labels[:] = -100
        labels[first:] = 7
        row = comparable({"input_ids": torch.arange(256), "labels": labels})
        assert row["input_ids"].tolist() == [*range(start, start + 64)]
        assert (row["labels"][1:] >= 0).any()
    assert comparable({"labels": labels[:30]})["labels"].tolist() == labels[:30].tolist()


def test_small_gradients_do_not_vanish_in_fp16(base: Path) -> None:
    model, batch = load(base), batch_of(0, 1)
    batch["labels"][:, 1:].clamp_(max=-100)
    batch["labels"][0, 5] = 3
    loss, norm = loss_and_gradient(model, batch, torch.float32)
    half = load(base, torch.float16)
    tiny = batch | {"num_items_in_batch": 1_000_000}
    found, half_norm = loss_and_gradient(half, tiny, torch.float16)
    assert found * 1e6 == pytest.approx(loss, rel=1e-2)
    assert half_norm * 1e6 == pytest.approx(norm, rel=1e-2)


@pytest.mark.parametrize("wrong", [1.01, float("nan")])
def test_a_fused_loss_that_differs_is_not_used(base: Path, monkeypatch: pytest.MonkeyPatch, wrong: float) -> None:
    real = token_loss._add_up

    def off(*arguments: Any) -> Any:
        sums, gradients = real(*arguments)
        return sums * wrong, gradients

    monkeypatch.setattr(token_loss, "_add_up", off)
    model = load(base)
    before = adapter(model)
    tried = try_fused_loss(model, batch_of(0, 1), torch.float32, 1)
    assert not tried.used
    assert tried.note.startswith("fused_loss: not used: loss or gradient differs by")
    assert model(**batch_of(0)).logits is not None
    assert same_as_before(model, before)


def test_a_wrong_gradient_of_a_correct_loss_is_not_used(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = token_loss._add_up

    def off(*arguments: Any) -> Any:
        sums, gradients = real(*arguments)
        return sums, [1.01 * gradient for gradient in gradients]

    monkeypatch.setattr(token_loss, "_add_up", off)
    assert try_fused_loss(load(base), batch_of(0, 1), torch.float32, 1).note.startswith("fused_loss: not used")


# -- compile -----------------------------------------------------------------------------------------------------------


def compile_with(monkeypatch: pytest.MonkeyPatch, backend: Any, **settings: Any) -> None:
    """Compile layers with this backend; torch's own takes a minute."""
    torch._dynamo.reset()
    counters.clear()
    real = torch.compile
    monkeypatch.setattr(torch, "compile", lambda *args, **named: real(*args, **named | {"backend": backend} | settings))


def time_as(monkeypatch: pytest.MonkeyPatch, plain: float, compiled: float) -> None:
    """Run the passes, but pretend that they take these times."""
    real, times = options._seconds, iter((plain, compiled))

    def seconds(*args: Any) -> tuple[float, bool]:
        return next(times), real(*args)[1]

    monkeypatch.setattr(options, "_seconds", seconds)


def three() -> list[dict[str, torch.Tensor]]:
    return [batch_of(row) for row in range(3)]


def is_compiled(model: Any) -> bool:
    return any(layer._compiled_call_impl is not None for layer in model.get_decoder().layers)


QUICK = {
    "quantization": "none", "lora_targets": ["q_proj"], "lora_dropout": 0.0, "activation_checkpointing": False
}  # fmt: skip


def test_a_compiler_that_fails_is_not_used(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("\nNo working C++ compiler found.\nmore lines")

    monkeypatch.setattr(torch, "compile", lambda *_, **__: broken)
    model = load(base)
    before = adapter(model)
    tried = try_compile(model, three(), torch.float32, 1)
    assert tried.note == "compile: not used: RuntimeError: No working C++ compiler found."
    assert not tried.used
    assert same_as_before(model, before)
    model(**batch_of(0))["loss"].backward()


@needs_compiler
def test_compiled_layers_give_the_same_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Compiling 4-bit layers and adapters on all of them takes a minute; vector instructions, of which torch first
    # compiles a test each, and other processes that load torch take half a minute if nothing is cached.
    monkeypatch.setattr(inductor_config, "compile_threads", 1)
    monkeypatch.setattr(cpu_vec_isa, "valid_vec_isa_list", list)
    quick = {"quantization": "none", "lora_targets": ["q_proj"], "lora_dropout": 0.0}
    base = save_base(tmp_path, num_hidden_layers=3)
    model, batch = load(base, **quick), batch_of(0)
    names = list(model.state_dict())
    expected = gradients(model, **batch)
    torch._dynamo.reset()
    counters.clear()
    tried = try_compile(model, [batch], torch.float32, 1, timed=False)
    assert tried.used
    assert tried.note.startswith("compile: used: as at the first start (a step differs by ")
    assert counters["stats"]["unique_graphs"] == 2, "not one graph for the first layer, and one for all others"
    assert all(layer._compiled_call_impl is not None for layer in model.get_decoder().layers)
    assert list(model.state_dict()) == names
    found = gradients(model, **batch)
    assert found[0] == pytest.approx(expected[0], rel=1e-5)
    assert largest_difference(expected[1], found[1]) < 1e-4


@pytest.mark.parametrize(("plain", "compiled", "used"), [(2.0, 1.0, True), (1.0, 0.98, False)])
def test_compiled_layers_are_used_only_if_they_are_faster(
    base: Path, monkeypatch: pytest.MonkeyPatch, plain: float, compiled: float, used: bool
) -> None:
    compile_with(monkeypatch, "eager")
    time_as(monkeypatch, plain, compiled)
    model = load(base, **QUICK)
    before = adapter(model)
    tried = try_compile(model, three(), torch.float32, 1)
    assert (tried.used, is_compiled(model)) == (used, used)
    assert f"a pass takes {compiled:.3g} s with it and {plain:.3g} s without" in tried.note
    assert same_as_before(model, before)


def failing(*_: Any) -> None:
    raise RuntimeError("no kernel")


@pytest.mark.parametrize("how", ["stance", "hidden error"])
def test_layers_that_torch_silently_did_not_compile_are_detected(
    base: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    compile_with(monkeypatch, failing if how == "hidden error" else "eager")
    time_as(monkeypatch, 2.0, 1.0)
    model = load(base, **QUICK)
    hides = torch._dynamo.config.patch(suppress_errors=True)
    with torch.compiler.set_stance("force_eager") if how == "stance" else hides:
        tried = try_compile(model, three(), torch.float32, 1)
    cause = " (torch._dynamo.config.suppress_errors hides the error)" if how == "hidden error" else ""
    assert tried.note == f"compile: not used: torch compiled nothing and ran the layers as they are{cause}"
    assert not is_compiled(model)


def test_the_recompile_limit_is_detected(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compile_with(monkeypatch, "eager")
    time_as(monkeypatch, 2.0, 1.0)
    model = load(base, **QUICK | {"lora_dropout": 0.1})  # compared without dropout, timed with it
    with torch._dynamo.config.patch(recompile_limit=1):
        tried = try_compile(model, three(), torch.float32, 1)
    assert tried.note == "compile: not used: torch compiled a layer 1 times, its limit, and then ran it as it is"
    assert not is_compiled(model)
    assert options.gave_up()


def test_graph_breaks_are_counted(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compile_with(monkeypatch, "eager")
    time_as(monkeypatch, 2.0, 1.0)
    model = load(base, **QUICK)
    real = model.get_decoder().layers[0].mlp.forward
    for layer in model.get_decoder().layers:
        layer.mlp.forward = lambda x: torch._dynamo.graph_break() or real(x)
    tried = try_compile(model, three(), torch.float32, 1)
    assert tried.used
    assert re.search(r"; \d+ graph breaks?$", tried.note)
    assert not options.gave_up()


def masked_varlen(q: Any, k: Any, v: Any, of_q: Any, of_k: Any, _: int, longest: int, **settings: Any) -> Any:
    """Compute what torch's kernel does, without a loop over the segments."""
    queries, keys = (
        torch.bucketize(torch.arange(len(x)), bounds[1:], right=True) for x, bounds in ((q, of_q), (k, of_k))
    )
    back = (torch.arange(len(q)) + (of_k - of_q)[1:][queries])[:, None] - torch.arange(len(k))
    mask = (queries[:, None] == keys) & (back >= 0) & (back < longest)
    heads = [x.transpose(0, 1)[None] for x in (q, k, v)]
    out = torch.nn.functional.scaled_dot_product_attention(*heads, attn_mask=mask, enable_gqa=True)
    return out[0].transpose(0, 1)


def of_segments(length: int, collator: Collator) -> dict[str, Any]:
    """Return a batch of one row, in segments of `length`."""
    row = packed_rows()[0]
    return collator([row | {"position_ids": torch.arange(len(row["input_ids"])) % length}])


def of_trees(seed: int, collator: Collator) -> dict[str, Any]:
    """Return a batch of one row of trees."""
    row = lay_out(random_trees(seed))
    del row["loss_weight"]
    return collator([row])


@pytest.mark.parametrize(
    ("dynamic", "longest", "of_rows"),
    [(None, 64, of_segments), (None, 0, of_segments), (False, 64, of_segments), (None, 128, of_trees)],
)
def test_layers_that_torch_compiles_for_each_batch_are_not_used(
    base: Path, monkeypatch: pytest.MonkeyPatch, dynamic: bool | None, longest: int, of_rows: Any
) -> None:
    """The kernels of a GPU get bounds of different lengths, and a number of tokens."""
    compile_with(monkeypatch, "eager", dynamic=dynamic)
    time_as(monkeypatch, 2.0, 1.0)
    monkeypatch.setattr(attention, "varlen_attn", masked_varlen)
    monkeypatch.setattr(attention, "unavailable_reason", lambda *_: None)
    model = load(base, **QUICK)
    use_attention(model, "varlen")
    batches = [of_rows(number, Collator("varlen", longest)) for number in (60, 40, 30, 23)]
    assert len({len(batch["cu_seq_lens_q"]) for batch in batches}) == 4
    for name in ("max_length_q", "max_length_k"):
        assert len({batch[name] for batch in batches}) == (1 if longest else 4)
    tried = try_compile(model, batches[:3], torch.float32, 1)
    if dynamic is None:
        assert tried.used, tried.note
        graphs = counters["stats"]["unique_graphs"]
        assert loss_and_gradient(model, batches[3], torch.float32)[0] > 0
        assert counters["stats"]["unique_graphs"] == graphs, "a batch that was not tried needs no new graph"
    else:
        assert tried.note == "compile: not used: torch compiled the layers again for another batch"
        assert not is_compiled(model)


# -- Liger -------------------------------------------------------------------------------------------------------------


def fake_liger(monkeypatch: pytest.MonkeyPatch, off: float = 0.0, fails: bool = False) -> list[dict[str, Any]]:
    """Install a package that replaces what Liger does, and is `off`; return the calls."""
    calls: list[dict[str, Any]] = []

    def apply(model: Any, **settings: Any) -> None:
        calls.append(settings)
        plain = modeling_llama.apply_rotary_pos_emb
        if model.config.model_type != "llama":
            return
        modeling_llama.apply_rotary_pos_emb = lambda *args, **named: plain(*args, **named)
        for part in model.modules():
            if isinstance(part, modeling_llama.LlamaRMSNorm):
                part.offset = 0.0
                part.forward = MethodType(lambda self, x: type(self).forward(self, x) * (1 + off), part)
        for layer in model.get_decoder().layers:  # as for Nemotron
            layer.mlp.act_fn = torch.nn.SiLU()
        if fails:
            raise AttributeError("no q_norm")

    package = SimpleNamespace(_apply_liger_kernel_to_instance=apply)
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers", package)
    for place in (liger, liger_of_transformers):
        monkeypatch.setattr(place, "is_liger_kernel_available", lambda: True)
    return calls


def state_of(model: Any) -> list[dict[str, Any]]:
    return [liger._state(place) for place in (*model.modules(), modeling_llama)]


@pytest.mark.parametrize("dtype", SAME)
def test_liger_is_used_if_it_is_equal_and_faster(
    base: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    calls, model = fake_liger(monkeypatch), load(base, dtype)
    time_as(monkeypatch, 2.0, 1.0)
    expected, before = gradients(model, **batch_of(0)), adapter(model)
    tried = try_liger(model, three(), dtype, 1)
    assert tried.used, tried.note
    assert tried.note.startswith("liger: used: a pass takes 1 s with it and 2 s without (a step differs by ")
    assert calls == [{"cross_entropy": False, "fused_linear_cross_entropy": False}], "the loss stays ours"
    assert same_as_before(model, before)
    assert "forward" in vars(model.get_decoder().norm)
    if dtype == torch.float32:
        found = gradients(model, **batch_of(0))
        assert found[0] == pytest.approx(expected[0], rel=1e-6)
        assert largest_difference(expected[1], found[1]) < 1e-5


@pytest.mark.parametrize(
    ("settings", "times", "reason"),
    [
        ({"off": 0.01}, (2.0, 1.0), "loss or gradient differs by"),
        ({"off": math.nan}, (2.0, 1.0), "loss or gradient differs by nan"),
        ({}, (1.0, 0.99), "a pass takes 0.99 s with it and 1 s without"),
        ({"fails": True}, (2.0, 1.0), "AttributeError: no q_norm"),
    ],
)
def test_a_model_is_as_before_if_liger_is_not_used(
    base: Path, monkeypatch: pytest.MonkeyPatch, settings: Any, times: tuple[float, float], reason: str
) -> None:
    calls, model = fake_liger(monkeypatch, **settings), load(base)
    time_as(monkeypatch, *times)
    expected, before, state = gradients(model, **batch_of(0)), adapter(model), state_of(model)
    tried = try_liger(model, three(), torch.float32, 1)
    assert not tried.used
    assert tried.note.startswith(f"liger: not used: {reason}")
    assert calls
    assert same_as_before(model, before)
    model.zero_grad()
    now = state_of(model)
    assert len(now) == len(state)
    assert all(liger._same(*pair) for pair in zip(now, state, strict=True))
    found = gradients(model, **batch_of(0))
    assert found[0] == expected[0]
    assert largest_difference(expected[1], found[1]) == 0


def test_without_liger_or_without_its_kernels_the_note_says_so(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load(base)
    monkeypatch.setattr(liger, "is_liger_kernel_available", lambda: False)
    said = "liger: not used: it may be faster; run: pip install liger-kernel"
    assert try_liger(model, three(), torch.float32, 1).note == said
    fake_liger(monkeypatch)
    other = add_adapter(build("olmo", **ARCHITECTURES["olmo"][0]), TrainingConfig(quantization="none")).train()
    other.config.use_cache = False
    tried = try_liger(other, three(), torch.float32, 1)
    assert tried.note == "liger: not used: ValueError: it has none for olmo models"
