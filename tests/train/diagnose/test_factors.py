"""Each trial of a diagnosis changes one setting to a value not in effect."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from packcorpus.train.config import TrainingConfig
from packcorpus.train.diagnose.factors import (
    CHANGES_MEMORY,
    FACTORS,
    LEARNS_OTHERWISE,
    REFERENCE,
    InEffect,
    Trial,
    combined,
    in_order,
    refusal,
    trials_of,
)

OFF: dict[str, Any] = {"compiled": False, "checkpointing": True}

states = st.builds(
    InEffect,
    device=st.sampled_from(("cpu", "cuda")),
    precision=st.sampled_from(("fp32", "bf16")),
    attention=st.sampled_from(("sdpa", "eager", "flash2")),
    micro_batch=st.sampled_from((1, 2, 4)),
    rows_per_step=st.sampled_from((4, 8)),
    sequence_length=st.sampled_from((128, 1024, 4096)),
    packed=st.booleans(),
    has_fused_loss=st.booleans(),
    compiled=st.booleans(),
    checkpointing=st.sampled_from((False, True, 2, 3, "offload")),
)
configs = st.builds(
    TrainingConfig,
    quantization=st.sampled_from(("nf4", "none")),
    lora_r=st.integers(1, 64),
    micro_batch=st.sampled_from(("auto", 2)),
)


@given(configs, states)
def test_each_trial_changes_one_factor_to_a_valid_value_that_is_not_in_effect(
    config: TrainingConfig, now: InEffect
) -> None:
    trials = trials_of(config, now)
    assert len({trial.name for trial in trials}) == len(trials)
    current = config.model_dump() | {
        "attention": now.attention, "precision": now.precision, "micro_batch": now.micro_batch,
        "fused_loss": now.has_fused_loss, "compile": now.compiled, "activation_checkpointing": now.checkpointing,
        "sequence_length": now.sequence_length, "packing": now.packed,
    }  # fmt: skip
    for trial in trials:
        assert trial.factor in FACTORS
        changed = trial.corpus or trial.settings
        also = ["attention"] if now.attention == "flash2" and trial.name == "precision: fp32" else []
        size = ["micro_batch"] if trial.factor in CHANGES_MEMORY and config.micro_batch == "auto" else []
        assert list(changed) == [trial.factor, *size, *also]
        assert changed[trial.factor] != current[trial.factor]
        TrainingConfig(**config.model_dump() | dict(trial.settings))
        if trial.factor == "micro_batch":
            assert now.rows_per_step % trial.settings["micro_batch"] == 0, "as many rows per step"
    assert any(trial.corpus for trial in trials) == now.packed
    if now.device == "cpu":
        assert {trial.factor for trial in trials}.isdisjoint({"precision"})


@given(configs, states)
def test_every_factor_is_tried_once_before_any_is_tried_again(config: TrainingConfig, now: InEffect) -> None:
    trials = in_order(trials_of(config, now))
    assert "eager" in trials[-1].name or now.attention == "eager"
    factors = [trial.factor for trial in trials if "eager" not in trial.name]
    first = list(dict.fromkeys(factors))
    assert factors[: len(first)] == first == sorted(first, key=FACTORS.index)


def test_trials_that_are_left_out_do_not_delay_the_others_of_their_factor() -> None:
    now = InEffect("cuda", "bf16", "sdpa", 2, 4, 1024, packed=True, has_fused_loss=False, **OFF)
    trials = [trial for trial in trials_of(TrainingConfig(), now) if "flash" not in trial.name]
    names = [trial.name for trial in in_order(trials)]
    assert names.index("attention: varlen") < names.index("compile: true") < names.index("attention: flex")


@given(configs, states)
def test_rows_of_another_length_have_as_many_tokens_in_a_pass(config: TrainingConfig, now: InEffect) -> None:
    for trial in trials_of(config, now):
        if trial.factor == "sequence_length":
            tokens = trial.settings["micro_batch"] * trial.corpus["sequence_length"]
            assert tokens == max(now.micro_batch * now.sequence_length, trial.corpus["sequence_length"])


def test_a_trial_is_refused_if_the_machine_lacks_one_of_its_settings() -> None:
    lacking = {"attention": {"flash2": "no package"}, "fused_loss": {"true": "old torch"}}
    now = InEffect("cuda", "bf16", "sdpa", 2, 4, 1024, packed=True, has_fused_loss=False, **OFF)
    reasons = {trial.name: refusal(trial, lacking) for trial in trials_of(TrainingConfig(), now)}
    assert {name: reason for name, reason in reasons.items() if reason} == {
        "attention: flash2": "no package", "fused_loss: true": "old torch"
    }  # fmt: skip
    assert refusal(Trial("a + b", "combined", {"compile": True, "attention": "flash2"}), lacking) == "no package"


def test_winners_together_have_all_their_settings_and_measure_a_contested_micro_batch() -> None:
    length = Trial("a", "sequence_length", {"micro_batch": 8}, {"sequence_length": 512})
    size, off = Trial("b", "micro_batch", {"micro_batch": 4}), Trial("c", "activation_checkpointing", {"x": False})
    assert combined([length, off]).settings == {"micro_batch": 8, "x": False}
    both = combined([length, size, off])
    assert (both.settings, both.corpus) == ({"micro_batch": "auto", "x": False}, {"sequence_length": 512})
    assert both.name == "a + b + c"
    assert both.same_training


def test_the_reference_is_fp32_and_eager() -> None:
    assert REFERENCE == {
        "precision": "fp32", "attention": "eager", "compile": False, "fused_loss": False
    }  # fmt: skip
    assert set(LEARNS_OTHERWISE) <= set(FACTORS)
