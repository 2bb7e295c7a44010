"""`packcorpus train diagnose` finds slow settings on its own.

A trial that fails is a row with its reason.
"""

from __future__ import annotations

import io
import json
import re
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console
from support.small_corpus import conversations, make_recipe, pack_corpus
from transformers import LlamaConfig, LlamaForCausalLM

from packcorpus.tasks.core.errors import PackError, UsageError
from packcorpus.tasks.storage.corpus_folder import changed_files
from packcorpus.tasks.storage.manifest import load_manifest
from packcorpus.train.config import TrainingConfig
from packcorpus.train.data.corpus import open_corpus
from packcorpus.train.diagnose import command as diagnose
from packcorpus.train.diagnose import compare, factors
from packcorpus.train.diagnose.command import Diagnosis
from packcorpus.train.diagnose.compare import Outcome, speedups
from packcorpus.train.diagnose.factors import Trial
from packcorpus.train.diagnose.trials import Runner, failure, lost, outcome_of, replan, unused_option
from packcorpus.train.loop.run_folder import ENOUGH
from packcorpus.train.measures import PHASES

LENGTH = 512


# A worker in which a pass with a row of more than 256 tokens takes long. The time is not computing time, so the result
# is the same on a loaded machine.
SLOW_ROWS = """
import sys, time
from packcorpus.train.diagnose.worker import main
from transformers import Trainer

plain = Trainer.training_step

def slow(self, model, inputs, *others):
    if inputs["input_ids"].shape[-1] > 256:
        time.sleep(0.75)
    return plain(self, model, inputs, *others)

Trainer.training_step = slow
main()
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Corpora in rows of 512 and 128, and a model.

    Conversations have about 50 tokens.
    """
    folder = tmp_path_factory.mktemp("diagnosis")
    records = conversations(400, seed=5)
    for name, length in {"long": LENGTH, "short": 128}.items():
        pack_corpus(make_recipe(folder, records, name=name, sequence_length=length))
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=500, hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=4, max_position_embeddings=LENGTH, initializer_range=0.1,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder / "model")
    return folder


def words(folder: Path, name: str, *others: str) -> list[str]:
    where = ["--manifest", name, "--root", str(folder), "--base-model", str(folder / "model")]
    fixed = ["--device", "cpu", "--micro-batch", "1", "--activation-checkpointing", "false", "--budget", "1000000"]
    return [*where, *fixed, *others]


def diagnosed(
    given: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> tuple[Path, dict[str, Any], str]:
    """Return the path of a diagnosis, its content, and the output."""
    monkeypatch.setattr(diagnose.signal, "signal", lambda *_: None)
    assert diagnose.main(given) == 0
    shown = capsys.readouterr()
    path = Path(shown.out.strip())
    return path, json.loads(path.read_text()), shown.err


def test_it_finds_that_the_rows_are_too_long_for_the_model(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(factors, "SHORTEST", LENGTH // 2)
    # One repeat is cheap, and too few to know the noise while other processes run, so it counts as none.
    monkeypatch.setattr(compare, "FEWEST", 1)
    monkeypatch.setattr(compare, "MOST", 1)
    monkeypatch.setattr(compare, "STUDENT", (0.0,))
    given = words(folder, "long", "--only", "sequence_length", "--steps", "3", "--attention", "eager")
    given += ["--tokens-per-step", str(LENGTH), "--quantization", "none", "--fused-loss", "false"]
    monkeypatch.setattr(Runner, "command", (sys.executable, "-P", "-c", SLOW_ROWS))
    path, found, shown = diagnosed(given, capsys, monkeypatch)
    trials = {one["trial"]["name"]: one for one in found["trials"]}
    assert list(trials) == ["sequence_length: 256", "sequence_length: 1024"]
    assert trials["sequence_length: 1024"]["reason"].startswith("E614"), "more positions than the model has"
    chosen = "sequence_length: 256"
    assert trials[chosen]["speedup"], trials[chosen]
    assert trials[chosen]["speedup"]["ratio"] > 1.5
    assert [one["trial"] for one in found["runs"]] == [
        "current settings", *trials, "current settings", chosen, "current settings"
    ]  # fmt: skip
    assert found["conclusion"]["corpus"] == chosen
    assert found["conclusion"]["sentence"].startswith(f"{chosen} trains ")
    assert found["reference"] == "current settings"
    assert len(found["baselines"]) == 3
    assert found["conclusion"]["sentence"] in shown.replace("\n", " ")
    for ending, mark in ((".md", f"| {chosen}"), (".svg", "<svg")):
        assert mark in path.with_suffix(ending).read_text()
    assert not list(folder.glob("data/adapters/*")), "trials leave nothing behind"
    assert diagnose.main([*given, "--where"]) == 0
    assert capsys.readouterr().out.strip() == str(path)


class WithoutFusedLoss(Runner):
    """Runner on a machine whose torch has no fused loss."""

    def run(self, trial: Trial, manifest: Path, limit: float, wanted: float) -> tuple[Outcome, dict[str, Any]]:
        outcome, record = super().run(trial, manifest, limit, wanted)
        assert record["unavailable"]["attention"].keys() == {"flash3", "flash2", "varlen", "flex"}, "on a CPU"
        return outcome, record | {"unavailable": {"fused_loss": {"true": "torch is too old"}}}


def test_losses_are_compared_with_those_in_fp32_and_eager(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(diagnose, "Runner", WithoutFusedLoss)
    given = words(folder, "short", "--only", "quantization,fused_loss", "--steps", "3", "--lora-dropout", "0.5")
    given += ["--tokens-per-step", "256", "--attention", "auto", "--fused-loss", "false"]
    path, found, shown = diagnosed(given, capsys, monkeypatch)
    assert found["settings"]["attention"] == found["choices"]["attention"] in ("sdpa", "eager"), "not auto"
    assert {"attention", "precision"} <= {*found["chosen_by_auto"]}
    assert f"attention: {found['choices']['attention']}" in shown
    # Which of them is faster is up to the machine; eager is the reference already.
    is_eager = found["choices"]["attention"] == "eager"
    assert found["reference"] == ("current settings" if is_eager else "reference: fp32, eager")
    off = {
        line.split(" | ")[0].strip("| "): line.split(" | ")[-2:]
        for line in path.with_suffix(".md").read_text().splitlines()
    }
    loss, gradient = (float(text.strip("| ")) for text in off["current settings"])
    assert loss < 1e-4 > gradient, "both backends compute the same, and dropout is off"
    loss, gradient = (float(text.strip("| ")) for text in off["quantization: none"])
    assert loss > 1e-4 < gradient, "weights in full precision are others"
    # A trial that cannot work here is not run, but a row with its reason.
    assert "fused_loss: true" not in [one["trial"] for one in found["runs"]]
    reasons = {one["trial"]["name"]: one["reason"] for one in found["trials"]}
    assert reasons["fused_loss: true"] == "not tried: torch is too old"
    assert found["untried"] == []
    assert "fused_loss: true: not tried: torch is too old" in shown


def test_a_replanned_corpus_has_the_same_conversations_and_reads_no_source(folder: Path, tmp_path: Path) -> None:
    corpus = open_corpus(Path("long"), root=folder)
    manifest = load_manifest(replan(corpus, {"sequence_length": 256}, folder, tmp_path))
    assert corpus.manifest
    assert (manifest.sequence_length, manifest.ledger.conversations) == (256, corpus.manifest.ledger.conversations)
    assert not changed_files(tmp_path / manifest.corpus, manifest.listed())
    assert (tmp_path / "data" / "tokens").is_symlink()


def test_conversations_that_shorter_rows_lose_are_counted(folder: Path, tmp_path: Path) -> None:
    corpus = open_corpus(Path("long"), root=folder)
    assert lost(corpus, replan(corpus, {"sequence_length": 256}, folder, tmp_path / "half")) == ""
    found = lost(corpus, replan(corpus, {"sequence_length": 24, "overlong": "drop"}, folder, tmp_path / "short"))
    assert re.fullmatch(r"without [1-9]\d* of 400 conversations", found)


class Simulated:
    """A stand-in for Runner with simulated speeds.

    Each run takes `seconds`, and `compiling` more if it compiles. Without activation checkpointing, steps are 1.4 times
    as fast. On a GPU, a run in fp32 takes `slower` times as long.
    """

    now, seconds, compiling, slower = 0.0, 30.0, 0.0, 3.0
    device, precision, attention = "cpu", "fp32", "sdpa"
    unavailable: dict[str, dict[str, str]] = {}  # noqa: RUF012 - replaced, never changed

    def __init__(self, words: list[str], folder: Path):
        self.errors, self.words = "", words

    def is_cold(self, trial: Trial) -> bool:
        return False

    def learned(self, length: int) -> str:
        return "it was still loading"

    def stop(self) -> None:
        pass

    def run(self, trial: Trial, manifest: Path, limit: float, wanted: float) -> tuple[Outcome, dict[str, Any]]:
        seconds = self.seconds + self.compiling * bool(trial.settings.get("compile"))
        if self.precision != "fp32" and trial.settings.get("precision") == "fp32":
            seconds *= self.slower
        if seconds > limit:
            Simulated.now += limit
            return Outcome(trial, f"took longer than {limit:.0f} s", seconds=limit), {}
        Simulated.now += seconds
        rate = 140.0 if trial.settings.get("activation_checkpointing") is False else 100.0
        choices = {"device": self.device, "precision": self.precision}
        choices |= {"attention": self.attention, "micro_batch": 1, "accumulation": 2, "checkpointing": True}
        record = {"choices": choices | {"options": None}, "unavailable": self.unavailable}
        return Outcome(trial, tokens_per_second=rate, seconds=seconds, micro_batch=1), record


ONLY = tuple(set(factors.FACTORS) - {"sequence_length", "packing"})


def simulated(
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    budget: int,
    only: tuple[str, ...] = ONLY,
    runner: type[Simulated] = Simulated,
) -> Diagnosis:
    """Return a finished diagnosis whose runs took simulated time."""
    monkeypatch.setattr(diagnose, "Runner", runner)
    monkeypatch.setattr(diagnose.signal, "signal", lambda *_: None)
    monkeypatch.setattr(diagnose, "time", SimpleNamespace(monotonic=lambda: Simulated.now))
    monkeypatch.setattr(Simulated, "now", 0.0)
    given = diagnose.parser().parse_args(["--manifest", "short", "--budget", str(budget)])
    corpus = open_corpus(Path("short"), root=folder)
    found = Diagnosis(given, TrainingConfig(), corpus, only, tmp_path, Console(quiet=True), 0.0)
    found.run()
    return found


@pytest.mark.parametrize("budget", [35, 60, 95, 150, 200, 240, 300, 400, 600, 10_000])
def test_a_diagnosis_ends_within_its_budget_and_repeats_the_winner(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, budget: int
) -> None:
    found = simulated(folder, tmp_path, monkeypatch, budget)
    assert budget - 2 * Simulated.seconds < Simulated.now <= budget or not found.untried, "no time is left unused"
    names = [one.trial.name for one in found.runs]
    assert names[0] == "current settings"
    assert names[-1] == "current settings" or budget < 90
    trials = factors.in_order(factors.trials_of(found.config, found.now))
    planned = [trial.name for trial in trials if trial.factor in ONLY]
    tried = [name for name in dict.fromkeys(names) if name != "current settings"]
    assert [*tried, *(trial.name for trial in found.untried)] == planned
    assert planned[-1] == "attention: eager"
    sentence = found.results().verdict.sentence
    if tried and found.untried:
        assert f"Only {len(tried)} of {len(planned)} trials were tried; raise --budget." in sentence
    assert ("Only" in sentence) == bool(tried and found.untried)
    winner = "activation_checkpointing: false"
    if winner in tried:
        assert names.count(winner) >= 1 + (compare.FEWEST if budget >= 300 else budget >= 150)
        assert speedups(found.runs)[winner].ratio == pytest.approx(1.4)


def test_a_trial_that_compiles_for_long_does_not_end_the_trials(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Simulated, "seconds", 20.0)
    monkeypatch.setattr(Simulated, "compiling", 40.0)
    found = simulated(folder, tmp_path, monkeypatch, 500)
    tried = list(dict.fromkeys(one.trial.factor for one in found.runs))
    later = ["lora_targets", "optimizer", "lora_r", "loader_workers", "quantization"]
    assert tried[tried.index("compile") :] == ["compile", *later, "attention"]
    assert (found._expected(), found._expected(Trial("", "compile", {"compile": True}))) == (20, 60)
    assert Simulated.now <= 500
    assert found.runs[-1].trial.name == "current settings"


def test_a_budget_without_time_for_the_current_settings_says_what_was_learned(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UsageError, match=r"--budget 20: ended before the first step.* still loading; raise") as caught:
        simulated(folder, tmp_path, monkeypatch, 20)
    assert (caught.value.reason, caught.value.exit_code, Simulated.now) == ("budget_too_small", 64, 20)


class Loaded(Simulated):
    """A stand-in for Runner on a loaded machine: 20 s of loading, and 15 s for a step."""

    def run(self, trial: Trial, manifest: Path, limit: float, wanted: float) -> tuple[Outcome, dict[str, Any]]:
        steps = 8 if wanted > 140 else max(ENOUGH, int((wanted - 20) // 15))
        self.seconds = 20.0 + 15.0 * steps
        outcome, record = super().run(trial, manifest, limit, wanted)
        return replace(outcome, losses=(1.0,) * steps), record


@pytest.mark.parametrize(("budget", "steps"), [(240, [4, 3]), (1000, [8, 8])])
def test_on_a_loaded_machine_runs_make_fewer_steps_so_that_something_is_tried(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, budget: int, steps: list[int]
) -> None:
    found = simulated(folder, tmp_path, monkeypatch, budget, runner=Loaded)
    assert Simulated.now <= budget
    assert [len(run.losses) for run in found.runs[:2]] == steps
    assert found.results().fewest_steps == (0 if steps[1] == 8 else steps[1])


class Cold(Simulated):
    """A stand-in for Runner whose first run loads the libraries and the model."""

    def run(self, trial: Trial, manifest: Path, limit: float, wanted: float) -> tuple[Outcome, dict[str, Any]]:
        self.seconds = 30.0 if trial.factor == factors.BASELINE else 18.0
        outcome, record = super().run(trial, manifest, limit, wanted)
        return replace(outcome, is_cold=trial.factor == factors.BASELINE, step_seconds=10.0), record


@pytest.mark.parametrize(("budget", "tried"), [(49, 0), (50, 1)])
def test_what_the_first_run_has_loaded_is_not_expected_again(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, budget: int, tried: int
) -> None:
    """The first run needs 20 s beside its steps, and others half of that."""
    found = simulated(folder, tmp_path, monkeypatch, budget, runner=Cold)
    assert len(found.runs) == 1 + tried


@pytest.mark.parametrize(
    ("budget", "only", "slower", "reference"),
    [
        (300, ONLY, 1.0, "no time for a run in fp32"),  # trials need it
        (300, ("loader_workers",), 3.0, "last"),
        (150, ("loader_workers",), 3.0, "reference: fp32, eager: took longer than 60 s"),
        (100, ("loader_workers",), 3.0, "no time for a run in fp32"),
    ],
)
def test_the_reference_leaves_time_for_the_trials(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, budget: int, only: Any, slower: float, reference: str
) -> None:
    monkeypatch.setattr(Simulated, "device", "cuda")
    monkeypatch.setattr(Simulated, "precision", "bf16")
    monkeypatch.setattr(Simulated, "slower", slower)
    found = simulated(folder, tmp_path, monkeypatch, budget, only)
    assert Simulated.now <= budget
    assert len({one.trial.name for one in found.runs}) >= min(4, 1 + len(only))
    assert found.runs[-1].trial.name == "current settings"
    why = found.results().not_compared
    if why:
        assert reference in why
    else:
        assert found.reference
        assert found.reference.at > found.runs[-1].at
        assert found.reference.trial.settings == {"precision": "fp32", "attention": "eager"}


class Interrupted(Simulated):
    """A stand-in for Runner in which Ctrl-C arrives during a trial."""

    diagnosis: Diagnosis

    def run(self, trial: Trial, manifest: Path, limit: float, wanted: float) -> tuple[Outcome, dict[str, Any]]:
        if trial.factor == "micro_batch":
            self.diagnosis._stop(2, None)
        outcome, record = super().run(trial, manifest, limit, wanted)
        outcome = replace(outcome, phases=dict.fromkeys(PHASES, 0.2))
        return outcome, record | {"corpus": {"trained": 1, "tokens": 2}, "advice": []}


@pytest.mark.parametrize("is_broken", [False, True])
def test_an_interrupted_diagnosis_shows_its_finished_trials_and_writes_nothing(
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    is_broken: bool,
) -> None:
    def end(code: int) -> None:
        raise SystemExit(code)

    monkeypatch.setattr(diagnose, "Runner", Interrupted)
    monkeypatch.setattr(diagnose.signal, "signal", lambda *_: None)
    monkeypatch.setattr(diagnose.os, "_exit", end)
    if is_broken:
        monkeypatch.setattr(Diagnosis, "results", lambda _: 1 / 0)
    given = diagnose.parser().parse_args(["--manifest", "short", "--budget", "100000"])
    console = Console(file=io.StringIO(), width=160)
    corpus = open_corpus(Path("short"), root=folder)
    found = Diagnosis(given, TrainingConfig(), corpus, ONLY, tmp_path / "runs", console, time.monotonic())
    monkeypatch.setattr(Interrupted, "diagnosis", found, raising=False)
    (tmp_path / "runs" / "trial").mkdir(parents=True)
    with pytest.raises(SystemExit) as caught:
        found.run()
    assert caught.value.code == 75
    assert capfd.readouterr().err.splitlines()[0] == "E713 interrupted; no diagnosis was written"
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    if not is_broken:
        assert "activation_checkpointing: false trains 1.40×" in shown
        assert "not tried, because of the interruption: micro_batch: 2, fused_loss: true, " in shown
    assert not list(tmp_path.iterdir())


def test_settings_that_do_not_train_end_the_diagnosis(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diagnose.signal, "signal", lambda *_: None)
    with pytest.raises(PackError, match="flash2 needs a GPU") as caught:
        diagnose.main(words(folder, "long", "--attention", "flash2"))
    assert (caught.value.reason, caught.value.exit_code) == ("no_attention", 69)


@pytest.mark.parametrize(
    ("given", "message"),
    [(["--only", "atention"], "no such factor; did you mean attention"), (["--steps", "1"], "first step is not timed")],
)
def test_wrong_options_are_an_error_that_names_them(folder: Path, given: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        diagnose.main([*words(folder, "long"), *given])


def test_figures_are_those_of_the_timed_steps() -> None:
    """The first step may include compiling, which takes longer than the others."""
    step = {"step_seconds": 1.0, "loss": 2.0, "grad_norm": 1.0, "non_pad_tokens_per_second": 100.0, "mfu": 0.3}
    step |= {f"{phase}_seconds": 0.2 for phase in PHASES}
    slow = step | {"step_seconds": 20.0, "non_pad_tokens_per_second": 5.0, "mfu": 0.015}
    record = {
        "log": [slow, step, step],
        "choices": {"micro_batch": 2, "accumulation": 2, "ranks": 1},
        "result": {"peak_memory_bytes": 1, "mfu": 0.04},
    }
    found = outcome_of(Trial("compile: true", "compile", {"compile": True}), record)
    assert (found.tokens_per_second, found.rows_per_second, found.mfu) == (100.0, 4.0, pytest.approx(0.3))
    del record["log"][2]["mfu"]
    assert outcome_of(Trial("a", "compile"), record).mfu is None


def test_an_option_that_the_run_does_not_use_is_a_row_with_the_reason() -> None:
    trial = Trial("compile: true", "compile", {"compile": True})
    notes = ["fused_loss: used", "compile: not used: slower, 2.1 s instead of 2.0 s"]
    choices = {"options": {"compile": False, "fused_loss": True}, "notes": notes}
    assert unused_option(trial, choices) == notes[1]
    assert unused_option(trial, choices | {"options": {"compile": True}}) == ""
    assert unused_option(Trial("x", "compile", {"compile": False}), choices) == ""
    assert unused_option(Trial("x", "attention", {"attention": "eager"}), choices) == ""


@pytest.mark.parametrize(
    ("code", "errors", "reason"),
    [
        (0, "", ""),
        (69, 'step 1/8\n{"error": {"code": "E632", "message": "does not fit"}}\n', "E632: does not fit"),
        (-9, "", "killed by SIGKILL, which the system sends when memory runs out"),
        (-11, "", "killed by SIGSEGV"),
        (1, "Traceback\nRuntimeError: boom", "RuntimeError: boom"),
        (3, "", "exit code 3"),
    ],
)
def test_a_failure_becomes_its_reason(code: int, errors: str, reason: str) -> None:
    assert failure(code, errors) == reason
