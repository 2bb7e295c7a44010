"""A run continues on another number of ranks and with another micro-batch.

uninterrupted run ───────────────────────────────────┐
stopped ─▶ killed on other ranks ─▶ other ranks again ┴▶ the same steps, losses, and validation losses
"""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.commands import NO_PICTURE, ROOT, started
from support.small_corpus import conversations, make_recipe, once, pack_corpus
from support.training.tiny_training import tiny_model

LENGTH = 64
TOKENS = {"2.0": 408}
KINDS: dict[str, dict[str, Any]] = {
    "epochs": {"epochs": 2},
    "lengths": {"sequence_length": [32, LENGTH]},
    "balance": {"balance": {"ranks": 2, "rows_per_rank": 2}},
    "weights": {"loss_weight": "conversation"},
    "none": {"padding": "none"},
    "2.0": {"packing": False},
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a function that makes a corpus of a kind, and a model."""
    folder = tmp_path_factory.mktemp("elastic")
    tiny_model(adapter=False, num_hidden_layers=1).save_pretrained(folder / "tiny")

    def corpus(kind: str) -> tuple[Path, Path]:
        settings = {"sequence_length": LENGTH, "validation": 0.1, "max_rejects": 0.5} | KINDS[kind]
        recipe = make_recipe(folder / kind, conversations(150, seed=5, longest=8), name="mine", **settings)
        return pack_corpus(recipe), folder / "tiny"

    return once(corpus)


def newest(folder: Path) -> int:
    """Return the step of the newest complete checkpoint, or 0."""
    return max((int(path.parent.name.partition("-")[2]) for path in folder.glob("*/complete.json")), default=0)


def run(words: list[str], folder: Path, ranks: int, size: int, stop: signal.Signals | None = None) -> str:
    """Run on a number of ranks until the end, or until a signal; return stderr."""
    given = [*words, "--output", str(folder), "--gpus", str(ranks), "--micro-batch", str(size)]
    before = newest(folder)
    with started(ROOT, *given, **NO_PICTURE) as process:
        if stop:
            while newest(folder) == before:  # these ranks have written a checkpoint
                assert psutil.Process(process.pid).status() != psutil.STATUS_ZOMBIE
                time.sleep(0.002)
            of_ranks = psutil.Process(process.pid).children()
            os.kill(of_ranks[-1].pid if of_ranks and stop == signal.SIGKILL else process.pid, stop)
        output = process.stderr.read()
        code = process.wait()
    assert (code == 0) == (stop is None), output
    assert before == 0 or f"from checkpoint-{before}" in output, output
    return output


def log_of(folder: Path, name: str) -> list[tuple[int, float]]:
    log = json.loads((folder / "training.json").read_text())["log"]
    return [(entry["step"], entry[name]) for entry in log if name in entry]


def words_of(made: Any, kind: str, *options: str) -> list[str]:
    manifest, model = made(kind=kind)
    words = ["-m", "packcorpus.train", "--manifest", str(manifest), "--base-model", str(model), "--device", "cpu"]
    words += ["--tokens-per-step", str(TOKENS.get(kind, 8 * LENGTH)), "--epochs", "2", "--learning-rate", "5e-3"]
    words += ["--eval-every", "3", "--save-every", "2", "--activation-checkpointing", "false"]
    return [*words, *options]


FEWER, MORE = ((1, 4), (2, 1), (1, 2)), ((2, 4), (3, 1), (3, 2))


@pytest.mark.parametrize(
    ("kind", "starts"),
    [
        ("epochs", FEWER), ("epochs", MORE), ("lengths", MORE), ("balance", MORE), ("weights", FEWER), ("none", FEWER),
        ("2.0", MORE),
    ],
)  # fmt: skip
def test_a_run_continues_on_other_ranks(kind: str, starts: Any, made: Any, tmp_path: Path) -> None:
    """Of the eight rows of a usual step, three ranks have three, three, and two."""
    words, whole, folder = words_of(made, kind, "--lora-dropout", "0"), tmp_path / "whole", tmp_path / "run"
    run(words, whole, *starts[0])
    run(words, folder, *starts[0], signal.SIGTERM)
    outputs = [run(words, folder, *starts[1], signal.SIGKILL), run(words, folder, *starts[2])]
    assert not any("when this run started" in output for output in outputs)
    for name in ("loss", "eval_loss", "learning_rate", "grad_norm"):
        found, expected = log_of(folder, name), log_of(whole, name)
        steps = [[step for step, _ in log] for log in (found, expected)]
        assert steps[0] == steps[1]
        assert [value for _, value in found] == pytest.approx([value for _, value in expected], rel=1e-5, abs=1e-12)
    choices, at_once = (json.loads((of / "training.json").read_text())["choices"] for of in (folder, whole))
    assert (choices["ranks"], choices["step"]) == (starts[2][0], at_once["step"])


def test_only_dropout_makes_a_continued_run_differ(made: Any, tmp_path: Path) -> None:
    words, whole, folder = words_of(made, "epochs", "--lora-dropout", "0.3"), tmp_path / "whole", tmp_path / "run"
    run(words, whole, 1, 4)
    run(words, folder, 1, 4, signal.SIGTERM)
    output = run(words, folder, 2, 4)
    text = "ranks is 2, but was 1 when this run started: steps have the same rows, but other random numbers of dropout"
    assert text in output
    pairs = zip(log_of(folder, "loss"), log_of(whole, "loss"), strict=True)
    assert next(number for number, (found, expected) in enumerate(pairs) if found != expected) >= 2
    assert log_of(folder, "learning_rate") == log_of(whole, "learning_rate")
    # Validation has no dropout, and the two runs learn alike.
    losses = [log_of(path, "eval_loss")[-1][1] for path in (folder, whole)]
    assert losses[0] == pytest.approx(losses[1], rel=0.02)


def test_a_run_with_divided_weights_continues_on_more_ranks(made: Any, tmp_path: Path) -> None:
    words, whole, folder = words_of(made, "epochs", "--sharding", "full"), tmp_path / "whole", tmp_path / "run"
    words += ["--lora-dropout", "0"]
    run(words, whole, 2, 2)
    run(words, folder, 2, 2, signal.SIGKILL)
    run(words, folder, 3, 1)
    for name in ("loss", "eval_loss"):
        found, expected = ([value for _, value in log_of(path, name)] for path in (folder, whole))
        assert found == pytest.approx(expected, rel=1e-5)
