"""A step that runs out of memory is retried with half the rows per pass.

The result is the same.

Run as a script under torch.distributed, this file is one rank of several.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
import torch
from support.commands import ROOT, command
from support.small_corpus import conversations, make_recipe, pack_corpus
from support.training.tiny_training import tiny_model
from transformers import Trainer

from packcorpus.tasks.core.errors import PartMissing
from packcorpus.train.__main__ import main
from packcorpus.train.config import TrainingConfig
from packcorpus.train.data.corpus import open_corpus
from packcorpus.train.loop import run
from packcorpus.train.loop.run_folder import Choices, RunFolder
from packcorpus.train.machine import process
from packcorpus.train.machine.process import LAUNCHED, RESTART

LENGTH = 128
FULL = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
BROKEN = torch.AcceleratorError("CUDA error: an illegal memory access was encountered\nmore")

BEFORE = Choices("cpu", "fp32", 1, "sdpa", 4, 3, 99.5, [], [])

Fails = Callable[[int, int], Exception | None]  # (step, rows) → what is raised


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("reduction")
    pack_corpus(make_recipe(folder, conversations(200, seed=3), sequence_length=LENGTH))
    tiny_model(adapter=False, num_hidden_layers=1, use_cache=True).save_pretrained(folder / "tiny")
    return folder


@pytest.fixture(autouse=True)
def _without_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "packcorpus.train.loop.record.picture", lambda *_: b""
    )  # no test looks at it, and it takes long


def words(folder: Path, output: Path) -> list[str]:
    (manifest,) = (folder / "manifests").glob("*.json")
    where = ["--manifest", str(manifest), "--output", str(output), "--base-model", str(folder / "tiny")]
    return [
        *(*where, "--device", "cpu"),
        *("--quantization", "none", "--activation-checkpointing", "false", "--lora-dropout", "0", "--max-steps", "5"),
        *("--micro-batch", "4", "--tokens-per-step", str(4 * LENGTH), "--save-every", "2", "--learning-rate", "1e-3"),
    ]


def fail(patch: pytest.MonkeyPatch, fails: Fails) -> None:
    real = Trainer.training_step

    def step(self: Any, model: Any, inputs: dict[str, torch.Tensor], *others: Any) -> torch.Tensor:
        error = fails(self.state.global_step + 1, len(inputs["input_ids"]))
        if error:
            raise error
        return real(self, model, inputs, *others)

    patch.setattr(Trainer, "training_step", step)


def restart_here(patch: pytest.MonkeyPatch) -> None:
    """Run the command again in this process; on a CPU, nothing is broken."""

    def restart(arguments: list[str], why: str) -> NoReturn:
        print(why, file=sys.stderr)
        raise SystemExit(main(arguments))

    patch.setattr(process, "restart", restart)


def record(output: Path) -> dict[str, Any]:
    return json.loads((output / "training.json").read_text())


def losses(output: Path) -> list[tuple[int, float]]:
    return [(entry["step"], entry["loss"]) for entry in record(output)["log"] if "step_seconds" in entry]


def test_a_step_without_memory_is_taken_again_with_fewer_rows(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(words(folder, tmp_path / "whole")) == 0
    assert record(tmp_path / "whole")["choices"]["reduced"] == []
    capfd.readouterr()

    # One failure is before the first checkpoint. One is after it, with the error of a GPU that reports it late.
    fail(monkeypatch, lambda step, rows: FULL if rows == 4 else BROKEN if (step, rows) == (4, 2) else None)
    restart_here(monkeypatch)
    with pytest.raises(SystemExit) as ended:
        main(words(folder, tmp_path / "reduced"))
    output = capfd.readouterr().err
    assert ended.value.code == 0, output
    said = [line for line in output.splitlines() if "continuing" in line]
    assert said == [
        "step 1 ran out of memory with 4 rows per pass: continuing from the beginning with 2",
        "step 4 failed (CUDA error: an illegal memory access was encountered) with 2 rows per pass: continuing from "
        "checkpoint-2 with 1",
    ]
    choices = record(tmp_path / "reduced")["choices"]
    assert (choices["micro_batch"], choices["accumulation"]) == (1, 4)
    assert choices["reduced"] == [line.partition(": continuing")[0] for line in said]
    found, expected = losses(tmp_path / "reduced"), losses(tmp_path / "whole")
    assert [step for step, _ in found] == [1, 2, 3, 4, 5]
    assert [loss for _, loss in found] == pytest.approx([loss for _, loss in expected], rel=1e-5)


def test_one_row_that_does_not_fit_stops_the_run(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    fail(monkeypatch, lambda step, rows: FULL if step == 3 else None)
    restart_here(monkeypatch)
    assert main([*words(folder, tmp_path), "--micro-batch", "1"]) == PartMissing.exit_code
    output = capfd.readouterr().err
    assert "E632" in output
    assert "step 3 ran out of memory with one row of about 128 tokens per pass; pack shorter rows" in output


def test_another_error_does_not_reduce_the_micro_batch(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail(monkeypatch, lambda step, rows: RuntimeError("a bug"))
    restart_here(monkeypatch)
    assert main(words(folder, tmp_path)) == 70
    assert json.loads((tmp_path / "run.json").read_text())["choices"]["micro_batch"] == 4


# -- several ranks -----------------------------------------------------------------------------------------------------


def test_all_ranks_end_for_a_restart(folder: Path, tmp_path: Path) -> None:
    # The other rank, which waits for the gradient of the first, finds the smaller micro-batch.
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    given = [*words(folder, tmp_path), "--tokens-per-step", str(8 * LENGTH), "--gpus", "2"]
    done = command(ROOT, *launch, str(Path(__file__)), *given)
    choices = json.loads((tmp_path / "run.json").read_text())["choices"]
    assert (choices["micro_batch"], choices["accumulation"], choices["ranks"]) == (2, 2, 2), done.stderr
    assert choices["reduced"] == ["step 2 ran out of memory with 4 rows per pass"]
    codes = [int(line.split()[-1]) for line in done.stderr.splitlines() if line.startswith("rank ended with")]
    assert codes == [RESTART, RESTART], done.stderr
    assert "continuing" not in done.stderr, "the launcher reports it, once"


def rank(given: list[str]) -> None:
    """Run one of two ranks; the second runs out of memory in step 2."""
    patch = pytest.MonkeyPatch()
    patch.setenv(LAUNCHED, "1")
    if os.environ["RANK"] == "1":
        fail(patch, lambda step, rows: FULL if step == 2 else None)
    leave = os._exit

    def end(code: int) -> None:
        print(f"rank ended with {code}", file=sys.stderr, flush=True)
        leave(code)

    patch.setattr(os, "_exit", end)
    end(main(given))


def test_a_launcher_of_ours_reports_the_restart(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    config = TrainingConfig(output=str(tmp_path))
    (manifest,) = (folder / "manifests").glob("*.json")
    run_folder, starts = RunFolder(tmp_path, config, open_corpus(manifest)), []

    def launched(ranks: int, arguments: list[str]) -> bool:
        starts.append(ranks)
        run_folder.write(reduced := BEFORE.halved("step 2 ran out of memory with 4 rows per pass") or BEFORE)
        return reduced.micro_batch == 2 and len(starts) == 1

    monkeypatch.setattr(process, "launch", launched)
    where = ["--manifest", str(manifest), "--base-model", "toy", "--output", str(tmp_path)]
    assert main([*where, "--device", "cpu", "--gpus", "2"]) == 0
    assert starts == [2, 2]
    said = "step 2 ran out of memory with 4 rows per pass: continuing from the beginning with 2\n"
    assert capfd.readouterr().err.endswith(said)


def test_under_another_launcher_the_user_must_run_it_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    given = SimpleNamespace(choices=BEFORE, folder=SimpleNamespace(write=lambda _: None, last_reduction=lambda: "why"))
    with pytest.raises(PartMissing, match=r"^why, if you run the same command again$"):
        run.reduce_micro_batch(given, 7, FULL)  # type: ignore[arg-type]
    monkeypatch.setenv(LAUNCHED, "1")
    with pytest.raises(process.Restart):
        run.reduce_micro_batch(given, 7, FULL)  # type: ignore[arg-type]


def test_one_row_of_a_rank_that_does_not_fit_names_the_cause() -> None:
    feed = SimpleNamespace(padded_tokens=1000, rows=10)
    settings = TrainingConfig(activation_checkpointing=True)
    choices = Choices("cuda", "bf16", 1, "sdpa", 1, 4, 1.0, [], [])
    given = SimpleNamespace(choices=choices, feed=feed, config=settings)
    with pytest.raises(PartMissing, match=r"step 7 failed \(CUDA error: an illegal memory access was encountered\)"):
        run.reduce_micro_batch(given, 7, BROKEN)  # type: ignore[arg-type]


if __name__ == "__main__":
    rank(sys.argv[1:])
