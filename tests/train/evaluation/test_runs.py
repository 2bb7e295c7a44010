"""The results of whole runs do not depend on interruptions.

The results are the adapter that is kept, early stopping, and samples.

Runs are in this process, where loading torch again would take seconds. The validation losses are set, so that each
run has the course that a test is about. Steps, adapters, and checkpoints are real.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.small_corpus import conversations, make_recipe, pack_corpus
from support.training.validation import evaluated, with_adapter
from transformers import LlamaConfig, LlamaForCausalLM

from packcorpus.train import evaluation
from packcorpus.train.__main__ import main
from packcorpus.train.data.corpus import open_corpus
from packcorpus.train.data.dataset import PackedDataset
from packcorpus.train.loop import checkpoints, record
from packcorpus.train.loop.checkpoints import Checkpoints
from packcorpus.train.loop.run_folder import RunFolder
from packcorpus.train.loop.trainer import Measured

LENGTH = 64
ADAPTER = "adapter_model.safetensors"
# The loss after step 4 is lower than in the three evaluations after it.
LOSSES = {2: 5.0, 4: 4.0, 6: 4.5, 8: 4.2, 10: 4.1, 12: 3.0}


class Killed(BaseException):
    """Ends a run at once, as SIGKILL does; nothing catches it."""


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A corpus with a validation split, and the model `tiny` in the same folder."""
    folder = tmp_path_factory.mktemp("runs")
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=500, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=LENGTH, initializer_range=0.1,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder / "tiny")
    return pack_corpus(make_recipe(folder, conversations(80, seed=3), sequence_length=LENGTH, validation=0.1))


@pytest.fixture(scope="module", autouse=True)
def _in_this_process() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(record, "picture", lambda *_: b"<svg/>")  # matplotlib takes a second
        patch.setattr(RunFolder, "claim", lambda _: None)  # the lock is held until this process ends
        patch.setattr(evaluation, "LIMIT", 8)
        patch.setattr(checkpoints, "KEPT", 1)
        yield


def set_losses(patch: pytest.MonkeyPatch, course: Callable[[int, float], float]) -> None:
    """Replace each validation loss by `course(step, loss)`."""
    log = Measured.log

    def changed(self: Any, logs: dict[str, float], *others: Any) -> None:
        if "eval_loss" in logs:
            logs["eval_loss"] = course(self.state.global_step, logs["eval_loss"])
        log(self, logs, *others)

    patch.setattr(Measured, "log", changed)


@pytest.fixture
def _set_losses(monkeypatch: pytest.MonkeyPatch) -> None:
    set_losses(monkeypatch, lambda step, _: LOSSES[step])


def options(corpus: Path, output: Path, **settings: Any) -> list[str]:
    values = {
        "manifest": corpus, "output": output, "base_model": corpus.parents[1] / "tiny", "device": "cpu",
        "quantization": "none", "activation_checkpointing": "false", "micro_batch": 1, "tokens_per_step": 2 * LENGTH,
        "max_steps": 12, "eval_every": 2, "save_every": 100, "learning_rate": 0.05,
    }  # fmt: skip
    pairs = (values | settings).items()
    return [word for name, value in pairs for word in (f"--{name.replace('_', '-')}", str(value))]


def trained(corpus: Path, output: Path, **settings: Any) -> dict[str, Any]:
    """Run to the end, and return training.json."""
    assert main(options(corpus, output, **settings)) == 0
    return read(output)


def read(output: Path) -> dict[str, Any]:
    return dict(json.loads((output / "training.json").read_text()))


def steps_of(found: dict[str, Any]) -> list[tuple[int, float]]:
    return [(entry["step"], entry["loss"]) for entry in found["log"] if "step_seconds" in entry]


def evaluations_of(found: dict[str, Any]) -> list[tuple[int, float, float]]:
    return [(e["step"], e["eval_loss"], e["eval_token_accuracy"]) for e in found["log"] if "eval_loss" in e]


def kill(monkeypatch: pytest.MonkeyPatch, place: Any, name: str, at: int | None, after: bool) -> None:
    """Kill the run once, before or after a call."""
    # `at` limits this to the call in that step.
    call = getattr(place, name)

    def killing(*given: Any, **named: Any) -> Any:
        step = next((x.global_step for x in given if hasattr(x, "global_step")), None)
        if at not in (None, step):
            return call(*given, **named)
        monkeypatch.setattr(place, name, call)
        if after:
            call(*given, **named)
        raise Killed

    monkeypatch.setattr(place, name, killing)


def killed(corpus: Path, output: Path, **settings: Any) -> None:
    with pytest.raises(Killed):
        main(options(corpus, output, **settings))
    assert not (output / "training.json").exists()


# -- which adapter is kept ---------------------------------------------------------------------------------------------


def test_the_losses_in_the_record_are_those_of_the_adapter_that_was_written(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_losses(
        monkeypatch, lambda step, loss: loss + 10 * (step > 6)
    )  # one of the first three is the lowest, unchanged
    found = trained(corpus, tmp_path / "run", keep="best")
    result = found["result"]
    assert result["kept_step"] <= 6
    rows = PackedDataset(open_corpus(corpus), "validation")
    loss, accuracy = evaluated(with_adapter(corpus.parents[1] / "tiny", tmp_path / "run"), rows)
    assert (result["validation_loss"], result["token_accuracy"]) == pytest.approx((loss, accuracy), rel=1e-4)
    assert result["best"] == {"step": result["kept_step"], "validation_loss": result["validation_loss"],
                              "token_accuracy": result["token_accuracy"]}  # fmt: skip


@pytest.mark.usefixtures("_set_losses")
def test_the_adapter_of_the_lowest_loss_is_kept(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    best = trained(corpus, tmp_path / "best", keep="best", max_steps=10)
    assert (best["result"]["kept_step"], best["result"]["validation_loss"]) == (4, 4.0)
    assert "validation 4.0000, token accuracy" in (output := capsys.readouterr().err)
    assert "with the adapter of step 4;" in output
    assert "step 4/10  validation loss 4.0000, token accuracy" in output
    kept = {path.name for path in (tmp_path / "best").glob("checkpoint-*")}
    assert kept == {"checkpoint-4", "checkpoint-10"}, "the best, and the newest"
    last = trained(corpus, tmp_path / "last", max_steps=10)
    assert "with the adapter of" not in capsys.readouterr().err
    assert (last["result"]["kept_step"], last["result"]["best"]["step"]) == (10, 4)
    assert steps_of(best) == steps_of(last), "what is kept does not change training"
    of = {
        name: (tmp_path / name / ADAPTER).read_bytes()
        for name in ("best", "best/checkpoint-4", "best/checkpoint-10", "last")
    }
    assert of["best"] == of["best/checkpoint-4"] != of["best/checkpoint-10"] == of["last"]
    # The last evaluation may be the best, too.
    assert trained(corpus, tmp_path / "whole", keep="best")["result"]["kept_step"] == 12


@pytest.mark.usefixtures("_set_losses")
def test_a_run_without_its_best_checkpoint_ends_before_the_next_step(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kill(monkeypatch, Checkpoints, "on_save", at=10, after=True)
    killed(corpus, tmp_path / "run", keep="best", save_every=2)
    shutil.rmtree(tmp_path / "run" / "checkpoint-4")
    capsys.readouterr()
    assert main(options(corpus, tmp_path / "run", keep="best", save_every=2)) == 65
    output = capsys.readouterr().err
    assert "E648 error: " in output
    assert "checkpoint-4: is missing or incomplete, but the adapter of step 4 has the lowest" in output
    assert "\nstep " not in output


# -- early stopping, samples, interruptions ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with all settings that was never interrupted."""
    output = tmp_path_factory.mktemp("whole")
    with pytest.MonkeyPatch.context() as patch:
        set_losses(patch, lambda step, _: LOSSES[step])
        trained(corpus, output, **EVERYTHING)
    return output


EVERYTHING = {"keep": "best", "early_stopping": 3, "samples": 2, "quantization": "nf4"}


@pytest.mark.usefixtures("_set_losses")
def test_samples_change_no_weight(corpus: Path, tmp_path: Path, whole: Path) -> None:
    # A random number that samples draw, or a mode that they leave behind, would change the adapter.
    without = trained(corpus, tmp_path / "run", **EVERYTHING | {"samples": 0})
    assert steps_of(without) == steps_of(read(whole))
    assert without["samples"] == []
    assert not (tmp_path / "run" / evaluation.NAME).exists()
    for name in (ADAPTER, f"checkpoint-4/{ADAPTER}", f"checkpoint-10/{ADAPTER}"):
        assert (tmp_path / "run" / name).read_bytes() == (whole / name).read_bytes()


def test_a_run_stops_early_and_its_record_says_so(whole: Path) -> None:
    found = read(whole)
    assert found["result"]["stopped_early"] == {"step": 10, "evaluations": 3}
    assert (found["result"]["steps"], found["result"]["kept_step"]) == (10, 4)
    assert found["samples"] == [s for s in evaluation.read_samples(whole / evaluation.NAME) if s["step"] == 4]
    assert [s["step"] for s in evaluation.read_samples(whole / evaluation.NAME)] == [2, 2, 4, 4, 6, 6, 8, 8, 10, 10]
    assert len(found["samples"]) == 2


@pytest.mark.usefixtures("_set_losses")
def test_an_interrupted_run_has_the_results_of_an_uninterrupted_one(
    corpus: Path, tmp_path: Path, whole: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "run"
    kill(monkeypatch, Checkpoints, "on_save", at=4, after=False)  # the best, while it is written: resumes from step 2
    killed(corpus, output, **EVERYTHING)
    assert not (output / "checkpoint-4" / "complete.json").exists()
    kill(monkeypatch, evaluation.Samples, "on_evaluate", at=8, after=True)  # resumes from step 4, the best
    killed(corpus, output, **EVERYTHING)
    assert [path.name for path in output.glob("checkpoint-*")] == ["checkpoint-4"]
    kill(monkeypatch, record, "write_results", at=None, after=False)  # stopped early, but without a record
    killed(corpus, output, **EVERYTHING)
    capsys.readouterr()
    found, expected = trained(corpus, output, **EVERYTHING), read(whole)
    printed = capsys.readouterr().err
    assert "\nstep " not in printed, "no step is left"
    assert (
        "stopped early after step 10: 3 evaluations without a lower validation loss; best 4.0000 after step 4"
        in printed
    )
    assert "\n  generated " in printed
    assert steps_of(found) == steps_of(expected)
    assert evaluations_of(found) == evaluations_of(expected)
    timed = {"seconds", "data_wait", "phases", "peak_memory_bytes"} | {
        name for name in expected["result"] if "_per_second" in name
    }
    for name in found["result"].keys() - timed:
        assert found["result"][name] == expected["result"][name], name
    assert found["samples"] == expected["samples"]
    for name in (ADAPTER, evaluation.NAME):
        assert (output / name).read_bytes() == (whole / name).read_bytes()


@pytest.mark.usefixtures("_set_losses")
def test_a_run_without_eval_every_is_evaluated_once_at_its_end(corpus: Path, tmp_path: Path) -> None:
    given = options(corpus, tmp_path / "run", max_steps=4, samples=1)
    del given[given.index("--eval-every") : given.index("--eval-every") + 2]
    assert main(given) == 0
    found = read(tmp_path / "run")
    assert [step for step, _, _ in evaluations_of(found)] == [4]
    assert [sample["step"] for sample in found["samples"]] == [4]
    state = json.loads((tmp_path / "run" / "checkpoint-4" / "trainer_state.json").read_text())
    assert [entry["step"] for entry in state["log_history"] if "eval_loss" in entry] == [4], "before the checkpoint"
