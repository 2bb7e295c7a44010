"""The isolation check accepts isolated rows and detects every known leak."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.training.tiny_training import (
    EXPERTS,
    FAMILIES,
    LENGTH,
    Row,
    force_attention,
    packed_rows,
    plain_kernels,
    tiny_model,
)

from packcorpus.tasks.core.errors import DataError, PartMissing
from packcorpus.train.config import TrainingConfig
from packcorpus.train.model import isolation
from packcorpus.train.model.attention import BACKENDS, Collator, unavailable_reason
from packcorpus.train.model.isolation import (
    Isolation,
    check_isolation,
    choose_rows,
    count_conversations,
    fastest,
    number_conversations,
    require_isolation,
)
from packcorpus.train.model.qlora import infinite_weights, load_model

Batch = dict[str, Any]


def several(count: int) -> list[Row]:
    """Real rows with two or more conversations each."""
    return [packed_rows()[i] for i in choose_rows(packed_rows(), count)]


# -- isolated ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("backend", ["sdpa", "eager", "flex", "varlen", "flash2"])
def test_isolated_logits_do_not_move(monkeypatch: pytest.MonkeyPatch, backend: str, family: str, count: int) -> None:
    plain_kernels(monkeypatch)
    model, rows = tiny_model(family, dropout=0.1), several(count)
    force_attention(model, backend)
    # On a CPU, flex has a forward pass, which takes 20 s to compile.
    with torch.compiler.set_stance("force_eager") if backend == "flex" else nullcontext():
        seen = check_isolation(model, Collator(backend)(rows), rows, seed=1)
    assert (seen.moved, seen.noise) == (0.0, 0.0)
    assert seen.own_moved > 1
    assert seen.passed
    assert (seen.rows, seen.conversations) == (count, sum(map(count_conversations, rows)))


def test_it_runs_with_activation_checkpointing_and_autocast() -> None:
    model, rows = tiny_model(dropout=0.1), several(2)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    with torch.autocast("cpu", torch.bfloat16):
        assert check_isolation(model, Collator("sdpa")(rows), rows, seed=1).passed
        leaks = Collator("sdpa")(rows) | {"attention_mask": torch.ones(2, LENGTH)}
        assert not check_isolation(model, leaks, rows, seed=1).passed


# -- leaking -----------------------------------------------------------------------------------------------------------


def padded(batch: Batch) -> torch.Tensor:
    mask = torch.ones_like(batch["input_ids"])
    mask[:, -5:] = 0
    return mask


LEAKS: dict[str, Callable[[Batch], Batch]] = {
    "mask of ones": lambda batch: batch | {"attention_mask": torch.ones_like(batch["input_ids"])},
    "padded mask": lambda batch: batch | {"attention_mask": padded(batch)},
    "no positions": lambda batch: {name: x for name, x in batch.items() if name != "position_ids"},
    "cache": lambda batch: batch | {"use_cache": True},
    "one row does not restart": lambda batch: (
        batch | {"position_ids": torch.cat([batch["position_ids"][:-1], torch.arange(LENGTH)[None]])}
    ),
}


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("backend", ["sdpa", "eager"])
@pytest.mark.parametrize("leak", LEAKS)
def test_every_leak_is_detected(leak: str, backend: str, count: int) -> None:
    model, rows = tiny_model(dropout=0.1), several(count)
    force_attention(model, backend)
    seen = check_isolation(model, LEAKS[leak](Collator(backend)(rows)), rows, seed=1)
    assert not seen.passed
    assert seen.moved > 0.1
    assert seen.noise == 0.0


def test_a_cache_that_the_model_enables_itself_is_detected() -> None:
    model, rows = tiny_model(use_cache=True), several(1)
    assert not check_isolation(model, Collator("sdpa")(rows), rows, seed=1).passed


def test_one_leaking_row_among_many_is_detected() -> None:
    model, rows = tiny_model(), several(4)
    batch = Collator("sdpa")(rows)
    assert check_isolation(model, batch, rows, seed=1).passed
    for row in range(4):
        positions = batch["position_ids"].clone()
        second = int((positions[row] == 0).nonzero()[1])
        positions[row, second:] += second
        assert not check_isolation(model, batch | {"position_ids": positions}, rows, seed=1).passed


@pytest.mark.parametrize(
    ("change", "leaks"),
    [
        (lambda batch: batch, False),
        # transformers finds the segments itself only for a single row, and a mask with zeros overrides the bounds.
        (lambda batch: {name: x for name, x in batch.items() if "seq_lens" not in name}, True),
        (lambda batch: batch | {"attention_mask": padded(batch)}, True),
    ],
)
def test_flash_attention_leaks_without_bounds(
    monkeypatch: pytest.MonkeyPatch, change: Callable[[Batch], Batch], leaks: bool
) -> None:
    plain_kernels(monkeypatch)
    model, rows = tiny_model(), several(2)
    force_attention(model, "flash2")
    assert check_isolation(model, change(Collator("flash2")(rows)), rows, seed=1).passed != leaks


def bounds_of_rows_lost(rows: list[Row]) -> Batch:
    batch = Collator("varlen")(rows)
    return with_bounds(batch, batch["cu_seq_lens_q"][batch["cu_seq_lens_q"] % LENGTH != 0])


def with_bounds(batch: Batch, inner: torch.Tensor) -> Batch:
    """Cut the batch, as one sequence, at other places."""
    bounds = torch.cat([torch.tensor([0]), inner, torch.tensor([batch["input_ids"].numel()])]).to(torch.int32)
    longest = int(bounds.diff().max())
    return (
        batch
        | dict.fromkeys(("cu_seq_lens_q", "cu_seq_lens_k"), bounds)
        | dict.fromkeys(("max_length_q", "max_length_k"), longest)
    )


# Collators that lose some bounds, as seen in the field.
HOLES: dict[str, Callable[[list[Row]], Batch]] = {
    "every bound after the first conversation": lambda rows: with_bounds(
        Collator("varlen")(rows), Collator("varlen")(rows)["cu_seq_lens_q"][1:2]
    ),
    "those between rows": bounds_of_rows_lost,
}


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("hole", HOLES)
def test_lost_bounds_are_detected(monkeypatch: pytest.MonkeyPatch, hole: str, count: int, autocast: bool) -> None:
    # They are even detected if the first conversation of every row sees only itself.
    plain_kernels(monkeypatch)
    model, rows = tiny_model(), [row for row in packed_rows() if count_conversations(row) >= 3][:count]
    force_attention(model, "varlen")
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        assert check_isolation(model, Collator("varlen")(rows), rows, seed=1).passed
        seen = check_isolation(model, HOLES[hole](rows), rows, seed=1)
    assert seen.passed == (hole == "those between rows" and count == 1), "one row has no bound to another"


@pytest.mark.parametrize("weight", [1e-6, 1e-3, 1.0])
def test_a_weak_leak_in_the_last_layer_is_detected(weight: float) -> None:
    model, rows = tiny_model(), several(2)
    batch = Collator("sdpa")(rows)
    assert check_isolation(model, batch, rows, seed=1).passed

    def leak(_module: Any, _inputs: Any, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + weight * hidden.roll(1, 1)  # each token reads the one before it

    model.get_decoder().layers[-1].register_forward_hook(leak)
    seen = check_isolation(model, batch, rows, seed=1)
    assert not seen.passed
    assert seen.moved < 20 * weight, "a stronger leak than the test states"


@pytest.mark.parametrize("family", EXPERTS)
def test_experts_may_round_differently_but_not_leak(family: str) -> None:
    model, rows = tiny_model(family, adapter=False), several(2)
    batch = Collator("sdpa")(rows)
    seen = check_isolation(model, batch, rows, seed=1)
    assert seen.passed
    assert seen.rounding == 1e-4
    assert seen.moved < seen.allowed / 10
    with torch.autocast("cpu", torch.bfloat16):
        assert check_isolation(model, batch, rows, seed=1).rounding == 0.05
    for leak in LEAKS.values():
        leaking = check_isolation(model, leak(batch), rows, seed=1)
        assert not leaking.passed
        assert leaking.moved > 1000 * leaking.allowed


# -- measurements ------------------------------------------------------------------------------------------------------


def passes(model: Any, batch: Batch, rows: list[Row], seed: int) -> tuple[Isolation, list[torch.Tensor]]:
    """Return the result of the check, and the ids that it passed to the model."""
    given: list[torch.Tensor] = []
    hook = model.get_input_embeddings().register_forward_pre_hook(lambda _, inputs: given.append(inputs[0]))
    seen = check_isolation(model, batch, rows, seed=seed)
    hook.remove()
    return seen, given


@pytest.mark.parametrize("logits", [1, 7 * 500, 1 << 26])
def test_sliced_logits_equal_whole_logits(monkeypatch: pytest.MonkeyPatch, logits: int) -> None:
    monkeypatch.setattr(isolation, "LOGITS", logits)
    model, rows = tiny_model(), several(2)
    batch = LEAKS["mask of ones"](Collator("sdpa")(rows))
    seen, (one, _, *others) = passes(model, batch, rows, seed=1)
    numbers = number_conversations(rows)
    most, own = [], []
    for other in others:
        with torch.no_grad():
            moved = (model(**batch | {"input_ids": one}).logits - model(**batch | {"input_ids": other}).logits).abs()
        most.append(moved[one == other].max().item())
        own += [moved[numbers == number].max().item() for number in numbers[one != other].unique()]
    assert seen.moved == pytest.approx(max(most), rel=1e-5)
    assert seen.own_moved == pytest.approx(min(own), rel=1e-5)


def test_the_model_is_restored() -> None:
    model, rows = tiny_model(dropout=0.1).eval(), several(1)
    state, hooks = torch.random.get_rng_state(), len(model.get_decoder()._forward_hooks)
    check_isolation(model, Collator("sdpa")(rows), rows, seed=1)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert not any(module.training for module in model.modules())
    assert len(model.get_decoder()._forward_hooks) == hooks
    assert all(weights.grad is None for weights in model.parameters())


def test_dropout_is_the_same_in_every_pass() -> None:
    """Other random numbers in a pass would be noise and hide a smaller leak."""
    model, rows = tiny_model(dropout=0.5).eval(), several(1)
    batch = Collator("sdpa")(rows)
    modes: list[bool] = []
    model.get_decoder().register_forward_pre_hook(lambda module, _: modes.append(module.training))
    with torch.no_grad():
        model.train()
        logits = [model(**batch).logits for _ in range(2)]
    assert not torch.equal(*logits), "dropout is not in effect, so this test shows nothing"
    assert check_isolation(model.eval(), batch, rows, seed=1).noise == 0.0
    assert modes[2:] == [True] * 4


@pytest.mark.parametrize(
    ("moved", "own_moved", "noise", "rounding", "passed"),
    [
        (0.0, 9.0, 0.0, 0.0, True),
        (0.5, 9.0, 0.5, 0.0, True),
        (0.6, 9.0, 0.5, 0.0, False),
        (0.5, 4.0, 0.5, 0.0, False),
        (0.0, 0.0, 0.0, 0.0, False),
        (0.0, math.inf, 0.0, 0.0, False),
        (math.nan, 9.0, 0.0, 0.0, False),
        (0.0, math.nan, 0.0, 0.0, False),
        (0.0, 9.0, math.nan, 0.0, False),
        (math.inf, math.inf, math.inf, 0.0, False),
        # Rounding is relative to the replaced conversations.
        (7e-4, 7.0, 0.0, 1e-4, True),
        (8e-4, 7.0, 0.0, 1e-4, False),
        (0.0, 0.0, 0.0, 1e-4, False),
    ],
)
def test_conditions_to_pass(moved: float, own_moved: float, noise: float, rounding: float, passed: bool) -> None:
    assert Isolation(1, 1, moved, own_moved, noise, rounding).passed == passed


def test_the_result_is_one_line() -> None:
    assert str(Isolation(2, 5, 0.0, 9.8765, 0.0)) == (
        "after replacing every second of 5 conversations in 2 rows, their logits moved by 9.88 or more, those of the "
        "others by 0 or less"
    )


# -- refusals ---------------------------------------------------------------------------------------------------------


def require(model: Any, rows: list[Row], collator: Callable[[list[Row]], Batch], attention: str = "sdpa") -> Any:
    return require_isolation(model, rows, collator, 2, attention=attention, seed=1)


def test_leaking_rows_are_rejected_with_one_line() -> None:
    def leaking(rows: list[Row]) -> Batch:
        return LEAKS["mask of ones"](Collator("sdpa")(rows))

    with pytest.raises(DataError) as error:
        require(tiny_model(), packed_rows(), leaking, "eager")
    message = str(error.value)
    assert "see each other with attention `eager` (logits moved by " in message
    assert "rounding explains at most 0" in message
    assert "; training was not started. The code of llama models mixes tokens of different" in message
    assert "\n" not in message


@pytest.mark.parametrize("kind", ["zeros", "noise"])
def test_a_blind_check_is_not_a_proof(kind: str) -> None:
    """A model with random output moves equally far without a change, without a leak."""
    model, source = tiny_model(), torch.Generator().manual_seed(1)
    head = model.get_output_embeddings()
    if kind == "zeros":
        torch.nn.init.zeros_(head.weight)
    else:
        head.register_forward_hook(lambda _m, _i, out: out + torch.randn(out.shape, generator=source) * 100)
    with pytest.raises(DataError, match="isolation cannot be checked with attention `sdpa`"):
        require(model, packed_rows(), Collator("sdpa"))


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("everywhere", [True, False])
def test_infinite_logits_are_not_a_proof(value: float, everywhere: bool) -> None:
    model = tiny_model()
    with torch.no_grad():
        weights = model.get_output_embeddings().weight
        (weights if everywhere else weights[17, :1]).fill_(value)
    with pytest.raises(DataError, match=r"The base model has NaN or infinity in 1 weight, such as .*lm_head"):
        require(model, packed_rows(), Collator("sdpa"))


def test_infinite_logits_of_finite_weights_are_a_fault_of_the_code() -> None:
    model = tiny_model()
    model.get_output_embeddings().register_forward_hook(lambda _m, _i, out: out * math.nan)
    with pytest.raises(DataError, match=r"^the logits of this llama model are not finite .* All weights are finite"):
        require(model, packed_rows(), Collator("sdpa"))


def test_damaged_weights_are_named_in_4_bits(tmp_path: Path) -> None:
    base = tiny_model(adapter=False)
    with torch.no_grad():
        base.model.layers[1].mlp.up_proj.weight[3, 5] = math.nan
    base.save_pretrained(tmp_path)
    model = load_model(tmp_path, TrainingConfig(), "cpu", torch.float32)
    assert [name for name in infinite_weights(model) if "layers.1.mlp.up_proj" in name] == infinite_weights(model) != []


@pytest.mark.parametrize("precision", [torch.bfloat16, torch.float16])
def test_a_model_that_overflows_in_fp16_needs_fp32(precision: torch.dtype) -> None:
    """Some models were made in bf16, with its larger range, and overflow in fp16."""
    model = tiny_model()
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(1e5)
    with torch.autocast("cpu", precision):
        if precision == torch.bfloat16:
            require(model, packed_rows(), Collator("sdpa"))
        else:
            with pytest.raises(DataError, match=r"logits of .* are not finite .* Set precision: fp32$"):
                require(model, packed_rows(), Collator("sdpa"))


@pytest.mark.parametrize("kind", [RuntimeError, ValueError, NotImplementedError, ImportError])
def test_a_backend_that_does_not_run_is_reported(kind: type[Exception]) -> None:
    def broken(_: list[Row]) -> Batch:
        raise kind("head size 96 is not supported\nat line 12")

    with pytest.raises(PartMissing) as error:
        require(tiny_model(), packed_rows(), broken, "flash2")
    assert str(error.value) == (
        "attention `flash2` does not run here: head size 96 is not supported; try `attention: sdpa`"
    )


@pytest.mark.parametrize("kind", [IndexError, KeyError, TypeError, AttributeError, AssertionError])
def test_an_error_of_the_code_of_a_model_names_its_class_and_place(kind: type[Exception]) -> None:
    def broken(_: list[Row]) -> Batch:
        raise kind("tuple index out of range")

    with pytest.raises(PartMissing) as error:
        require(tiny_model(), packed_rows(), broken)
    text = re.sub(r"line \d+", "line 9", str(error.value)).replace("'", "")
    assert text == (
        "attention `sdpa` does not run here: LlamaForCausalLM fails in test_isolation.py, line 9 "
        f"({kind.__name__}: tuple index out of range); try `attention: eager`"
    )


@pytest.mark.parametrize("needs_16_bits", [True, False])
def test_a_pass_that_fails_only_in_4_bits_needs_no_quantization(needs_16_bits: bool, tmp_path: Path) -> None:
    tiny_model(adapter=False).save_pretrained(tmp_path)
    model = load_model(tmp_path, TrainingConfig(), "cpu", torch.float32)
    layer = model.get_base_model().model.layers[1].mlp.up_proj.base_layer
    kind, packed = type(layer), layer.weight

    def read(_mlp: Any, inputs: tuple[torch.Tensor]) -> None:
        inputs[0] @ (layer.weight if needs_16_bits else packed).T

    model.get_base_model().model.layers[1].mlp.register_forward_pre_hook(read)
    fix = "set `quantization: none`, because the same pass runs" if needs_16_bits else "try `attention: eager`"
    with pytest.raises(PartMissing, match=rf"does not run here: .*; {fix}"):
        require(model, packed_rows(), Collator("sdpa"))
    assert (type(layer), layer.weight) == (kind, packed), "the model is as before"


def test_out_of_memory_is_not_reported_as_a_failing_backend() -> None:
    def greedy(_: list[Row]) -> Batch:
        raise torch.OutOfMemoryError("16 GB")

    with pytest.raises(torch.OutOfMemoryError):
        require(tiny_model(), packed_rows(), greedy)


# -- rows -------------------------------------------------------------------------------------------------------------


def test_rows_of_one_conversation_need_no_check() -> None:
    alone = [row for row in packed_rows() if count_conversations(row) == 1]
    assert alone
    assert choose_rows(alone, 1) == []
    assert require_isolation(tiny_model(), alone, Collator("sdpa"), 1, attention="sdpa", seed=1) is None


def test_rows_of_one_conversation_are_isolated_from_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that sees the batch as one sequence could join them."""
    plain_kernels(monkeypatch)
    alone = [row for row in packed_rows() if count_conversations(row) == 1]
    model = tiny_model()
    force_attention(model, "varlen")
    assert require(model, alone, Collator("varlen"), "varlen").conversations == 4
    with pytest.raises(DataError, match="see each other"):
        require(model, alone, bounds_of_rows_lost, "varlen")


@st.composite
def rows_of_runs(draw: st.DrawFn) -> tuple[Row, int]:
    """A row of 1 to 4 conversations with trained tokens, and perhaps padding."""
    conversations = draw(st.integers(1, 4))
    positions, labels = [], []
    for run in range(conversations + draw(st.integers(0, 1))):
        length = draw(st.integers(2, 5))
        positions += range(length)
        trained = draw(st.integers(1, length - 1)) if run < conversations else -1
        labels += [3 if i == trained else -100 for i in range(length)]
    return {"position_ids": torch.tensor(positions), "labels": torch.tensor(labels)}, conversations


@given(st.lists(rows_of_runs(), max_size=8), st.integers(1, 6))
def test_chosen_rows(made: list[tuple[Row, int]], count: int) -> None:
    assert [count_conversations(row) for row, _ in made] == [conversations for _, conversations in made]
    counts = [conversations for _, conversations in made]
    fit = [number for number in range(len(made)) if counts[number] >= 2]
    chosen = choose_rows([row for row, _ in made], count)
    assert len(chosen) == (count if fit else 0)
    assert len({*chosen}) == min(count, len(fit))
    assert {*chosen} <= {*fit}
    assert min((counts[n] for n in chosen), default=9) >= max((counts[n] for n in fit if n not in chosen), default=0)


# -- the fastest ------------------------------------------------------------------------------------------------------


def test_the_fastest_passing_backend_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    model, rows = tiny_model(dropout=0.1).eval(), packed_rows()
    state = torch.random.get_rng_state()
    best, trials = fastest(model, rows, 2, seed=1)
    speeds = {trial.attention: trial.tokens_per_second for trial in trials}
    assert speeds.keys() == BACKENDS.keys()
    assert speeds[best] >= 0.97 * max(speeds.values())
    assert model.config._attn_implementation == best
    assert {name for name, speed in speeds.items() if speed} == {"sdpa", "eager"}
    for trial in trials:
        why = unavailable_reason(trial.attention, torch.device("cpu"))
        assert trial.reason == (f"{why}; use `attention: sdpa`" if why else "")
    assert torch.equal(torch.random.get_rng_state(), state)
    assert not model.training
    assert all(weights.grad is None for weights in model.parameters())


def test_a_fast_backend_that_leaks_or_fails_is_excluded(monkeypatch: pytest.MonkeyPatch) -> None:
    class Leaking(Collator):
        def __call__(self, rows: Any) -> Batch:
            batch = super().__call__(rows)
            return LEAKS["mask of ones"](batch) if self.backend == "sdpa" else batch

    monkeypatch.setattr(isolation, "Collator", Leaking)
    best, trials = fastest(tiny_model(), packed_rows(), 2, seed=1, passes=1)
    reasons = {trial.attention: trial.reason for trial in trials}
    assert best == "eager"
    assert "see each other with attention `sdpa`" in reasons["sdpa"]

    model = tiny_model()
    model.get_output_embeddings().register_forward_hook(fail)
    with pytest.raises(PartMissing, match=r"no attention backend can train .*\(flash3: .*; eager: .* bad width;"):
        fastest(model, packed_rows(), 2, seed=1)


def fail(*_: Any) -> None:
    raise RuntimeError("bad width")
