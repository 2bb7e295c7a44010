"""Training on rows with weights equals training on separate conversations.

The tokens of the separate conversations are weighted by hand.

    packed rows, loss_weight ─Measured─▶ gradient of the adapter at the first optimizer step ┐
    each conversation alone, Σ w·loss, divided by Σ w of all of them ─────────────────────────────┴▶ equal

Run as a script under torch.distributed, this file is one rank of two.
"""

from __future__ import annotations

import json
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.commands import ROOT, command
from support.packed_rows import folder_of
from support.small_corpus import conversations, make_recipe, pack_corpus
from support.training.step_gradients import Caught, Gradients, alone, error, gradients_of
from support.training.tiny_training import LENGTH, Row, tiny_model
from torch.utils.data import SequentialSampler
from transformers import TrainingArguments

from packcorpus.tasks.core.errors import DataError
from packcorpus.train.__main__ import main
from packcorpus.train.data.corpus import open_corpus
from packcorpus.train.data.dataset import PackedDataset
from packcorpus.train.loop.feed import empty_row
from packcorpus.train.loop.trainer import Measured, one_gpu
from packcorpus.train.machine.ranks import leave
from packcorpus.train.model import base_model
from packcorpus.train.model.attention import Collator
from packcorpus.train.model.isolation import check_isolation
from packcorpus.train.model.options import try_fused_loss
from packcorpus.train.model.token_loss import fuse_loss, weigh_loss

ROWS = 4  # of one optimizer step


def records() -> list[dict[str, Any]]:
    found = conversations(60, longest=40)
    for number, record in enumerate(found):
        record["loss_weight"] = (0.25, 1, 4)[number % 3]
        record["messages"][-1]["loss_weight"] = 0.5 + number % 2
    return found


def pack(folder: Path, mode: str, **settings: Any) -> Path:
    # Parts of a conversation would share its weight.
    given = {"loss_weight": mode, "sequence_length": LENGTH, "overlong": "truncate"} | settings
    return pack_corpus(make_recipe(folder, records(), **given))


@cache
def packed(mode: str) -> list[Row]:
    with tempfile.TemporaryDirectory() as folder:
        rows = PackedDataset(pack(Path(folder), mode), load="memory")
        return [rows[number] for number in range(ROWS)]


def losses(model: Any, row: Row) -> torch.Tensor:
    """Return the loss of each trained token of one conversation alone."""
    logits = model(input_ids=row["input_ids"][None], position_ids=row["position_ids"][None]).logits[0, :-1]
    found = torch.nn.functional.cross_entropy(logits, row["labels"][1:], reduction="none")
    return found[row["labels"][1:] >= 0]


def weights(row: Row) -> torch.Tensor:
    return row["loss_weight"][1:][row["labels"][1:] >= 0]


@cache
def one_by_one(mode: str) -> tuple[Gradients, float, float]:
    """Return the gradient, the weighted loss, and the token mean of a step."""
    # Each conversation is computed separately. For `conversation` the weights are not read: the loss is the mean over
    # conversations of their token means.
    torch.set_num_threads(1)
    model, rows = tiny_model(), alone(packed(mode))
    total = sum(float(weights(row).sum()) for row in rows)
    loss = tokens = count = 0.0
    for row in rows:
        own = losses(model, row)
        each = own.mean() / len(rows) if mode == "conversation" else (weights(row) * own).sum() / total
        each.backward()
        loss, tokens, count = loss + each.item(), tokens + own.sum().item(), count + len(own)
    return gradients_of(model), loss, tokens / count


class InOrder(Measured):
    def _get_train_sampler(self, *_: Any) -> Any:
        return SequentialSampler(self.train_dataset)


def trainer_of(folder: Path, mode: str, fused: bool, micro_batch: int = 1, **arguments: Any) -> tuple[Any, Caught]:
    settings = TrainingArguments(
        output_dir=str(folder), per_device_train_batch_size=micro_batch, max_steps=1, max_grad_norm=0.0, use_cpu=True,
        save_strategy="no", report_to="none", disable_tqdm=True, remove_unused_columns=False, logging_steps=1,
        **arguments,
    )  # fmt: skip
    model, caught = tiny_model(), Caught()
    weigh_loss(model)
    if fused:
        fuse_loss(model)
    trainer = InOrder(model, one_gpu(settings), Collator("sdpa"), packed(mode), callbacks=[caught])
    trainer.measure(LENGTH, 1.0, None)
    return trainer, caught


# -- the gradient ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["data", "conversation", "both"])
@pytest.mark.parametrize(("micro_batch", "accumulation"), [(1, 4), (2, 2), (4, 1)])
@pytest.mark.parametrize("fused", [False, True])
def test_the_gradient_equals_that_of_separate_conversations(
    tmp_path: Path, mode: str, micro_batch: int, accumulation: int, fused: bool
) -> None:
    trainer, caught = trainer_of(tmp_path, mode, fused, micro_batch, gradient_accumulation_steps=accumulation)
    trainer.train()
    expected, loss, token_mean = one_by_one(mode)
    assert error(caught.gradients, expected) < 1e-4
    (entry,) = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert entry["loss"] == pytest.approx(loss, rel=1e-4)
    assert abs(loss - token_mean) > 1e-3 * loss, "the weights matter"
    trained = sum(int((row["labels"] >= 0).sum()) for row in packed(mode))
    assert entry["trained_tokens_per_second"] * entry["step_seconds"] == pytest.approx(trained)


def test_the_gradient_differs_where_weights_are_left_out(tmp_path: Path) -> None:
    # The models of transformers ignore the column of weights.
    trainer, caught = trainer_of(tmp_path, "data", False, gradient_accumulation_steps=4)
    del trainer.model.get_base_model().forward
    trainer.train()
    assert error(caught.gradients, one_by_one("data")[0]) > 0.05


@pytest.mark.parametrize("fused", [False, True])
def test_an_evaluation_has_both_means(tmp_path: Path, fused: bool) -> None:
    trainer, _ = trainer_of(tmp_path, "both", fused)
    found = trainer.evaluate(packed("both"))
    _, loss, token_mean = one_by_one("both")
    assert found["eval_loss"] == pytest.approx(token_mean, rel=1e-4)
    assert found["eval_weighted_loss"] == pytest.approx(loss, rel=1e-4)
    without = [{name: row[name] for name in row if name != "loss_weight"} for row in packed("both")]
    plain = trainer.evaluate(without)
    assert plain["eval_loss"] == pytest.approx(token_mean, rel=1e-4)
    assert "eval_weighted_loss" not in plain


def test_two_ranks_have_the_gradient_of_all_conversations(tmp_path: Path) -> None:
    # The ranks have different weights in a step.
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = command(ROOT, *launch, str(Path(__file__)), str(tmp_path), "data", "conversation")
    assert done.returncode == 0, done.stderr[-2000:]
    for mode in ("data", "conversation"):
        ranks = [load_file(tmp_path / f"{mode}-{rank}.safetensors") for rank in range(2)]
        assert error(ranks[1], ranks[0]) == 0.0
        assert error(ranks[0], one_by_one(mode)[0]) < 1e-4


def rank(folder: Path, modes: list[str]) -> None:
    """Run one of two ranks with two rows each; a step has all four."""
    torch.set_num_threads(1)
    for mode in modes:
        trainer, caught = trainer_of(folder, mode, False, gradient_accumulation_steps=2, ddp_backend="gloo")
        trainer.train()
        save_file(caught.gradients, folder / f"{mode}-{torch.distributed.get_rank()}.safetensors")
    leave(together=True)


# -- the model ---------------------------------------------------------------------------------------------------------


def test_the_loss_is_undone_and_fused_in_any_order() -> None:
    model, batch = tiny_model(), Collator("sdpa")(packed("data"))
    plain = model(**batch).loss.item()
    undo_weights = weigh_loss(model)
    weighted = model(**batch).loss.item()
    assert abs(weighted - plain) > 1e-3
    undo = fuse_loss(model)
    fused = model(**batch)
    assert (fused.loss.item(), fused.token_loss.item()) == pytest.approx((weighted, plain), rel=1e-4)
    undo()
    assert model(**batch).loss.item() == weighted
    assert model(input_ids=batch["input_ids"], loss_weight=batch["loss_weight"]).logits is not None
    undo_weights()
    assert model(**batch).loss.item() == plain
    assert try_fused_loss(model, {n: x for n, x in batch.items() if n != "loss_weight"}, torch.float32, 1).used


def test_the_check_of_isolation_is_without_weights() -> None:
    rows = packed("data")[:2]
    assert check_isolation(tiny_model(), Collator("sdpa")(rows), rows, seed=1).passed


# -- the rows ----------------------------------------------------------------------------------------------------------


def test_rows_have_weights_however_they_are_read(tmp_path: Path) -> None:
    manifest = pack(tmp_path, "both", validation=0.2)
    corpus = open_corpus(manifest)
    (tmp_path / "alone").mkdir()
    for shard in folder_of(manifest).glob("*-of-*.arrow"):
        (tmp_path / "alone" / shard.name).write_bytes(shard.read_bytes())
    assert corpus.weighted
    rows = PackedDataset(corpus, load="memory")
    for other in (PackedDataset(corpus, load="mmap"), PackedDataset(tmp_path / "alone")):
        for number in range(len(rows)):
            assert all(torch.equal(values, other[number][name]) for name, values in rows[number].items())
    assert rows[0]["loss_weight"].dtype == torch.float32
    filler = empty_row(rows)
    assert filler.keys() == rows[0].keys()
    assert filler["loss_weight"].abs().sum() == 0
    plain = open_corpus(pack(tmp_path / "none", "none"))
    assert not plain.weighted
    assert "loss_weight" not in PackedDataset(plain)[0]


@pytest.mark.parametrize("wrong", [0.0, float("nan"), -1.0])
def test_rows_whose_weights_are_wrong_are_refused(tmp_path: Path, wrong: float) -> None:
    from support.packed_rows import random_rows, write_rows

    rows: dict[str, Any] = random_rows(6)
    rows["loss_weight"] = (rows["labels"] >= 0).astype("float32")
    write_rows(tmp_path / "right" / "train-00000-of-00001.arrow", rows)
    assert PackedDataset(tmp_path / "right").corpus.weighted
    rows["loss_weight"][4, 3] = wrong
    write_rows(tmp_path / "wrong" / "train-00000-of-00001.arrow", rows)
    with pytest.raises(DataError, match=r"row 4: .*loss_weight"):
        PackedDataset(tmp_path / "wrong")


# -- a run -------------------------------------------------------------------------------------------------------------


def test_a_run_trains_with_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # The Llama has a fiftieth of its usual size here.
    monkeypatch.setattr(base_model, "PARAMETERS", 500_000)
    monkeypatch.setattr("packcorpus.train.loop.record.picture", lambda *_: b"")  # it takes half of the time
    manifest = pack(tmp_path, "both", validation=0.2)
    given = ["--manifest", str(manifest), "--output", str(tmp_path / "run"), "--root", str(tmp_path)]
    steps = [
        "--base-model",
        "toy",
        "--micro-batch",
        "1",
        "--tokens-per-step",
        str(2 * LENGTH),
        "--max-steps",
        "2",
        "--eval-every",
        "2",
    ]
    assert main([*given, *steps, "--device", "cpu", "--load", "mmap", "--fused-loss", "true"]) == 0
    shown = capsys.readouterr().err
    assert "loss_weight: both; the loss of a step is the weighted mean of its trained tokens" in shown
    log = json.loads((tmp_path / "run" / "training.json").read_text())["log"]
    (evaluation,) = [entry for entry in log if "eval_loss" in entry]
    assert evaluation["eval_weighted_loss"] > 0


if __name__ == "__main__":
    rank(Path(sys.argv[1]), sys.argv[2:])
