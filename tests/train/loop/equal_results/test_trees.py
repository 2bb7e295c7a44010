"""Training on rows that store shared tokens once equals training on their samples.

    rows of trees ─Measured─▶ gradient of the adapter at the first optimizer step ┐
    each sample alone, Σ w·loss, divided by Σ w of all of them ───────────────────┴▶ equal

Run as a script under torch.distributed, this file is one rank of two.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.commands import ROOT, command
from support.training.step_gradients import Caught, Gradients, error, gradients_of
from support.training.tiny_training import LENGTH, Row, force_attention, plain_kernels, tiny_model
from support.training.tree_rows import alone, columns_of, random_trees, tree_rows, write_trees
from torch.utils.data import SequentialSampler
from transformers import TrainingArguments

from packcorpus.tasks.core.errors import DataError
from packcorpus.train.__main__ import main
from packcorpus.train.loop.trainer import Measured, one_gpu
from packcorpus.train.machine.ranks import leave
from packcorpus.train.model import base_model
from packcorpus.train.model.attention import Collator
from packcorpus.train.model.token_loss import fuse_loss, weigh_loss
from packcorpus.train.model.trees import use_trees

ROWS = 4  # of one optimizer step


def apart() -> list[Row]:
    return [row for seed in range(ROWS) for row in alone(random_trees(seed))]


@cache
def one_by_one() -> tuple[Gradients, float, float]:
    """Return the gradient, the weighted loss, and the token mean of a step."""
    torch.set_num_threads(1)
    model, rows = tiny_model(), apart()
    total = sum(float(row["loss_weight"].sum()) for row in rows)
    loss = tokens = count = 0.0
    for row in rows:
        logits = model(input_ids=row["input_ids"][None]).logits[0, :-1]
        each = torch.nn.functional.cross_entropy(logits, row["labels"][1:], reduction="none")
        part = (each * row["loss_weight"][1:]).sum() / total
        part.backward()
        loss += part.item()
        tokens, count = tokens + each.sum().item(), count + int((row["labels"][1:] >= 0).sum())
    return gradients_of(model), loss, tokens / count


class InOrder(Measured):
    def _get_train_sampler(self, *_: Any) -> Any:
        return SequentialSampler(self.train_dataset)


def trainer_of(
    folder: Path, fused: bool, micro_batch: int = 1, backend: str = "sdpa", **arguments: Any
) -> tuple[Any, Caught]:
    settings = TrainingArguments(
        output_dir=str(folder), per_device_train_batch_size=micro_batch, max_steps=1, max_grad_norm=0.0, use_cpu=True,
        save_strategy="no", report_to="none", disable_tqdm=True, remove_unused_columns=False, logging_steps=1,
        **arguments,
    )  # fmt: skip
    model, caught = tiny_model(), Caught()
    force_attention(model, backend)
    use_trees(model)
    weigh_loss(model)
    if fused:
        fuse_loss(model)
    trainer = InOrder(model, one_gpu(settings), Collator(backend), tree_rows(ROWS), callbacks=[caught])
    trainer.measure(LENGTH, 1.0, None)
    return trainer, caught


@pytest.mark.parametrize(("micro_batch", "accumulation"), [(1, 4), (2, 2), (4, 1)])
@pytest.mark.parametrize(("fused", "backend"), [(False, "sdpa"), (True, "sdpa"), (True, "varlen")])
def test_the_gradient_equals_that_of_the_samples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, micro_batch: int, accumulation: int, fused: bool, backend: str
) -> None:
    plain_kernels(monkeypatch)
    trainer, caught = trainer_of(tmp_path, fused, micro_batch, backend, gradient_accumulation_steps=accumulation)
    trainer.train()
    expected, loss, token_mean = one_by_one()
    assert error(caught.gradients, expected) < 1e-5
    (entry,) = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert entry["loss"] == pytest.approx(loss, rel=1e-5)
    assert abs(loss - token_mean) > 1e-3 * loss, "the weights matter"


@pytest.mark.parametrize("fused", [False, True])
def test_an_evaluation_has_both_means(tmp_path: Path, fused: bool) -> None:
    trainer, _ = trainer_of(tmp_path, fused)
    found = trainer.evaluate(tree_rows(ROWS))
    _, loss, token_mean = one_by_one()
    assert found["eval_loss"] == pytest.approx(token_mean, rel=1e-5)
    assert found["eval_weighted_loss"] == pytest.approx(loss, rel=1e-5)


def test_two_ranks_have_the_gradient_of_all_samples(tmp_path: Path) -> None:
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = command(ROOT, *launch, str(Path(__file__)), str(tmp_path))
    assert done.returncode == 0, done.stderr[-2000:]
    ranks = [load_file(tmp_path / f"{rank}.safetensors") for rank in range(2)]
    assert error(ranks[1], ranks[0]) == 0.0
    assert error(ranks[0], one_by_one()[0]) < 1e-5


def rank(folder: Path) -> None:
    """Run one of two ranks with two rows each; a step has all four."""
    torch.set_num_threads(1)
    trainer, caught = trainer_of(folder, False, gradient_accumulation_steps=2, ddp_backend="gloo")
    trainer.train()
    save_file(caught.gradients, folder / f"{torch.distributed.get_rank()}.safetensors")
    leave(together=True)


# -- a run -------------------------------------------------------------------------------------------------------------


def stop_after_a_checkpoint(log: Callable[..., None]) -> Callable[..., None]:
    def stopping(trainer: Any, logs: dict[str, float], *others: Any) -> None:
        if trainer.state.global_step == 3:
            raise DataError("loss_diverged", "the test ends the run here")
        log(trainer, logs, *others)

    return stopping


def test_a_run_trains_evaluates_and_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # The Llama has a fiftieth of its usual size here.
    monkeypatch.setattr(base_model, "PARAMETERS", 500_000)
    monkeypatch.setattr("packcorpus.train.loop.record.picture", lambda *_: b"")  # it takes half of the time
    write_trees(tmp_path / "rows" / "train-00000-of-00001.arrow", columns_of(tree_rows(8)))
    write_trees(tmp_path / "rows" / "validation-00000-of-00001.arrow", columns_of(tree_rows(2)))

    def train(name: str) -> int:
        folder = ["--manifest", str(tmp_path / "rows"), "--output", str(tmp_path / name), "--root", str(tmp_path)]
        size = ["--micro-batch", "1", "--tokens-per-step", str(2 * LENGTH), "--max-steps", "4", "--save-every", "2"]
        given = ["--base-model", "toy", "--device", "cpu", "--eval-every", "2", "--samples", "2"]
        return main([*folder, *size, *given])

    def record_of(name: str) -> dict[str, Any]:
        return json.loads((tmp_path / name / "training.json").read_text())

    def losses(name: str) -> list[float]:
        return [entry[key] for entry in record_of(name)["log"] for key in ("loss", "eval_loss") if key in entry]

    assert train("whole") == 0
    shown = capsys.readouterr().err
    assert "replaced tokens moved logits of the tokens that see them" in shown
    assert record_of("whole")["isolation"]["differs"] < 1e-5
    assert len(record_of("whole")["samples"]) == 2
    assert len(losses("whole")) == 6
    with monkeypatch.context() as patch:
        patch.setattr(Measured, "log", stop_after_a_checkpoint(Measured.log))
        assert train("stopped") == 65
    assert train("stopped") == 0
    assert "from checkpoint-2" in capsys.readouterr().err
    assert losses("stopped") == losses("whole")


if __name__ == "__main__":
    rank(Path(sys.argv[1]))
