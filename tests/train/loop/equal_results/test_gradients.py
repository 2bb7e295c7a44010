"""Training on packed rows equals training on separate conversations.

    packed rows ─transformers.Trainer─▶ gradient of the adapter at the first optimizer step ┐
    each conversation alone, from position 0, as its own row ─▶ Σ gradients / trained tokens ┴▶ equal

Run as a script under torch.distributed, this file is one rank of several.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.commands import ROOT, command
from support.training.step_gradients import Caught, Gradients, alone, error, gradients_of
from support.training.tiny_training import Row, force_attention, packed_rows, plain_kernels, tiny_model
from torch.utils.data import SequentialSampler
from transformers import Trainer, TrainingArguments

from packcorpus.train.machine.ranks import leave
from packcorpus.train.model.attention import Collator
from packcorpus.train.model.isolation import check_isolation

ROWS = 4  # of one optimizer step


def chosen() -> list[Row]:
    return packed_rows()[:ROWS]


@cache
def one_by_one() -> tuple[Gradients, float]:
    """Return the token-weighted gradient and the summed loss of the conversations."""
    torch.set_num_threads(1)
    model, total, trained = tiny_model(), 0.0, 0
    for row in alone(chosen()):
        # Computed here from the logits: every label is predicted by the token before it.
        logits = model(input_ids=row["input_ids"][None], position_ids=row["position_ids"][None]).logits[0, :-1]
        loss = torch.nn.functional.cross_entropy(logits, row["labels"][1:], reduction="sum")
        loss.backward()
        total += loss.item()
        trained += int((row["labels"][1:] >= 0).sum())
    return {name: gradient / trained for name, gradient in gradients_of(model).items()}, total


class InOrder(Trainer):
    def _get_train_sampler(self, *_: Any) -> Any:
        return SequentialSampler(self.train_dataset)


def trained_on(
    folder: Path, collator: Callable[[list[Row]], Any], model: Any = None, *, micro_batch: int = 1, **arguments: Any
) -> Gradients:
    """Return the gradients of the real Trainer at the first optimizer step."""
    settings = TrainingArguments(
        output_dir=str(folder), per_device_train_batch_size=micro_batch, max_steps=1, max_grad_norm=0.0, use_cpu=True,
        save_strategy="no", report_to="none", disable_tqdm=True, logging_strategy="no", remove_unused_columns=False,
        activation_checkpointing_kwargs={"use_reentrant": False}, **arguments,
    )  # fmt: skip
    caught = Caught()
    trainer = InOrder(model or tiny_model(), settings, collator, chosen(), callbacks=[caught])
    trainer.train()
    return caught.gradients


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize(("micro_batch", "accumulation"), [(1, 4), (2, 2), (4, 1)])
def test_the_gradient_equals_that_of_separate_conversations(
    tmp_path: Path, micro_batch: int, accumulation: int, checkpointing: bool
) -> None:
    model, calls = tiny_model(), []
    model.get_decoder().layers[0].self_attn.register_forward_hook(lambda *_: calls.append(1))
    found = trained_on(
        tmp_path,
        Collator("sdpa"),
        model,
        micro_batch=micro_batch,
        gradient_accumulation_steps=accumulation,
        activation_checkpointing=checkpointing,
    )
    assert len(calls) == accumulation * (1 + checkpointing), "activations are computed again where they are not kept"
    assert any("lora_A" in name and gradient.abs().max() > 0 for name, gradient in found.items())
    assert error(found, one_by_one()[0]) < 1e-4


@pytest.mark.parametrize("backend", ["eager", "varlen", "flash2"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_other_backends_have_the_same_gradient(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backend: str, checkpointing: bool
) -> None:
    plain_kernels(monkeypatch)
    model = tiny_model()
    force_attention(model, backend)
    passes = {"micro_batch": 2, "gradient_accumulation_steps": 2, "activation_checkpointing": checkpointing}
    found = trained_on(tmp_path, Collator(backend), model, **passes)
    assert error(found, one_by_one()[0]) < 1e-4


@pytest.mark.parametrize("leak", ["mask", "no positions"])
@pytest.mark.parametrize("micro_batch", [1, 2])
def test_a_leak_changes_the_gradient_and_is_detected(tmp_path: Path, leak: str, micro_batch: int) -> None:
    def leaking(rows: list[Row]) -> dict[str, Any]:
        batch = Collator("sdpa")(rows)
        if leak == "mask":
            return batch | {"attention_mask": torch.ones_like(batch["input_ids"])}
        del batch["position_ids"]
        return batch

    accumulation = ROWS // micro_batch
    found = trained_on(tmp_path, leaking, micro_batch=micro_batch, gradient_accumulation_steps=accumulation)
    assert error(found, one_by_one()[0]) > 0.1
    rows = chosen()[:micro_batch]
    assert not check_isolation(tiny_model(), leaking(rows), rows, seed=1).passed


def test_the_loss_equals_that_of_separate_conversations() -> None:
    """The first token of a conversation, which nothing predicts, adds nothing."""
    rows = chosen()
    begins = [row["position_ids"] == 0 for row in rows]
    # The loss if first tokens were trained on.
    wrong = [r | {"labels": torch.where(b, r["input_ids"], r["labels"])} for r, b in zip(rows, begins, strict=True)]
    with torch.no_grad():
        total, other = (tiny_model()(**Collator("sdpa")(x), num_items_in_batch=1).loss.item() for x in (rows, wrong))
    assert total == pytest.approx(one_by_one()[1], rel=1e-5)
    assert other > total + 1


# Backend, micro-batch, and activation checkpointing.
RANK_CASES = ("sdpa-1-plain", "sdpa-1-checkpointing", "sdpa-2-checkpointing", "varlen-1-plain")


def test_two_ranks_have_the_gradient_of_all_conversations(tmp_path: Path) -> None:
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = command(ROOT, *launch, str(Path(__file__)), str(tmp_path), *RANK_CASES)
    assert done.returncode == 0, done.stderr[-2000:]
    for case in RANK_CASES:
        ranks = [load_file(tmp_path / f"{case}-{rank}.safetensors") for rank in range(2)]
        assert error(ranks[1], ranks[0]) == 0.0
        assert error(ranks[0], one_by_one()[0]) < 1e-4


def rank(folder: Path, cases: list[str]) -> None:
    """Run one of two ranks with two rows each; a step has all four."""
    torch.set_num_threads(1)
    plain_kernels(pytest.MonkeyPatch())
    for case in cases:
        backend, micro_batch, checkpointing = case.split("-")
        model = tiny_model()
        force_attention(model, backend)
        found = trained_on(
            folder,
            Collator(backend),
            model,
            micro_batch=int(micro_batch),
            gradient_accumulation_steps=2 // int(micro_batch),
            activation_checkpointing=checkpointing == "checkpointing",
            ddp_backend="gloo",
        )
        assert torch.distributed.get_world_size() == 2
        save_file(found, folder / f"{case}-{torch.distributed.get_rank()}.safetensors")
    leave(together=True)


if __name__ == "__main__":
    rank(Path(sys.argv[1]), sys.argv[2:])
