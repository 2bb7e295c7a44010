"""An error of the code of a model is a refusal with the class of the model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.commands import NO_PICTURE, ROOT, in_fork_with_torch
from support.training.loaded_model import save_base
from support.training.tiny_runs import saved, words_of
from support.training.tiny_training import tiny_model

from packcorpus.tasks.core.errors import DataError, PartMissing
from packcorpus.train.config import TrainingConfig
from packcorpus.train.model import qlora
from packcorpus.train.model.refusal import named


@pytest.mark.parametrize("error", [ZeroDivisionError("by zero"), KeyError("pixels"), StopIteration(), Exception("odd")])
def test_any_error_of_a_model_names_its_class_and_what_failed(error: Exception) -> None:
    reason = rf"LlamaForCausalLM \(llama\) cannot be trained: a pass in training fails \({type(error).__name__}: "
    with pytest.raises(DataError, match=reason) as raised, named(tiny_model(adapter=False)):
        raise error
    assert (raised.value.code, raised.value.__cause__) == ("E650", error)


@pytest.mark.parametrize(
    "error",
    [torch.OutOfMemoryError("x"), RuntimeError("CUDA out of memory"), MemoryError(), PartMissing("no_nf4", "x")],
)
def test_errors_of_the_machine_stay_as_they_are(error: Exception) -> None:
    with pytest.raises(type(error)) as raised, named(tiny_model(adapter=False)):
        raise error
    assert raised.value is error


def test_an_error_while_a_model_is_built_is_not_a_bug(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_args: Any, **_named: Any) -> None:
        raise AttributeError("'LlamaConfig' object has no attribute 'depth'")

    base = save_base(tmp_path)
    monkeypatch.setattr("transformers.LlamaForCausalLM.__init__", fail)
    with pytest.raises(DataError, match="has no attribute 'depth'"):
        qlora.load_model(base, TrainingConfig(quantization="none"), "cpu", torch.float32)


# Divides by zero in the backward pass, an error that no attention backend has.
ODD = """
import sys
import torch
from transformers.models.llama.modeling_llama import LlamaMLP

class Odd(torch.autograd.Function):
    @staticmethod
    def forward(context, states):
        return states.clone()

    @staticmethod
    def backward(context, gradient):
        return gradient / (1 // 0)

plain = LlamaMLP.forward
LlamaMLP.forward = lambda self, states: Odd.apply(plain(self, states))
from packcorpus.train.__main__ import main
sys.exit(main(sys.argv[1:]))
"""


def test_a_model_whose_backward_pass_fails_is_refused_by_the_command(tmp_path: Path) -> None:
    words = words_of(saved("llama", tmp_path / "base"), tmp_path / "run")
    done = in_fork_with_torch(ROOT, "-c", ODD, *words, **NO_PICTURE)
    assert "E650 error: LlamaForCausalLM (llama) cannot be trained: a pass in training fails (ZeroDiv" in done.stderr
    assert "Traceback" not in done.stderr
