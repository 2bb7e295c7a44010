"""`python -m train diagnose`: it finds what is slow by itself, and a trial that fails is a row with its reason."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support.commands import ROOT, command
from support.small_corpus import conversations, make_recipe, pack_corpus
from transformers import LlamaConfig, LlamaForCausalLM

from tasks.core.errors import PackError, UsageError
from tasks.storage.corpus_folder import changed_files
from tasks.storage.manifest import load_manifest
from train.data.corpus import open_corpus
from train.diagnose import command as diagnose
from train.diagnose import run_trial
from train.diagnose.replan import replan
from train.diagnose.run_trial import failure

LENGTH = 2048


class Forked:
    """Stands for Popen: a fork of a process that has loaded torch, which starts at once."""

    def __init__(self, words: list[str], **named: Any):
        assert words[1:4] == ["-P", "-m", "train"]
        self._done = command(ROOT, sys.executable, *words[2:], **{"PACKCORPUS_JSON": named["env"]["PACKCORPUS_JSON"]})
        self.returncode = self._done.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        return "", self._done.stderr

    def kill(self) -> None:
        pass


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows of 2,048 tokens from conversations of about 50, and a model in which attention takes most of the time."""
    folder = tmp_path_factory.mktemp("diagnosis")
    pack_corpus(make_recipe(folder, conversations(2000, seed=5), name="long", sequence_length=LENGTH))
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=500, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=8,
        num_key_value_heads=8, max_position_embeddings=LENGTH, initializer_range=0.1,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder / "model")
    return folder


def words(folder: Path, *others: str) -> list[str]:
    where = ["--manifest", "long", "--root", str(folder), "--base-model", str(folder / "model")]
    return [*where, "--device", "cpu", "--tokens-per-step", str(LENGTH), "--steps", "4", *others]


def test_it_finds_that_the_rows_are_too_long_for_the_model(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_trial, "Popen", Forked)
    monkeypatch.setattr(diagnose.signal, "signal", lambda *_: None)
    given = words(folder, "--only", "sequence_length,attention,quantization", "--budget", "500")
    assert diagnose.main(given) == 0
    shown = capsys.readouterr()
    path = Path(shown.out.strip())
    found = json.loads(path.read_text())
    trials = {one["trial"]["name"]: one for one in found["trials"]}
    assert list(trials)[:4] == [
        "attention: eager",
        "sequence_length: 1024",
        "quantization: none",
        "sequence_length: 4096",
    ]
    assert "4096" in trials["sequence_length: 4096"]["reason"], "more positions than the model has"
    assert trials["sequence_length: 512"]["speedup"]["ratio"] > trials["sequence_length: 1024"]["speedup"]["ratio"] > 1
    assert "sequence_length: 512" in found["conclusion"]["sentence"]
    assert "sequence_length: 512" in found["conclusion"]["corpus"]
    # Rounding: eager attention and the baseline are the same up to it, weights in full precision are not.
    assert found["reference"] == "attention: eager"
    eager, base, full = (
        one["losses"] for one in (trials["attention: eager"], found["baselines"][0], trials["quantization: none"])
    )
    assert base == pytest.approx(eager, rel=1e-4)
    assert full != pytest.approx(eager, rel=1e-4)
    assert len(found["baselines"]) == 2
    assert "E614" in shown.err
    assert found["conclusion"]["sentence"] in shown.err.replace("\n", " ")
    for ending, mark in ((".md", "| sequence_length: 512 |"), (".svg", "<svg")):
        assert mark in path.with_suffix(ending).read_text()
    assert not list(folder.glob("data/adapters/*")), "trials leave nothing behind"
    assert diagnose.main([*given, "--where"]) == 0
    assert capsys.readouterr().out.strip() == str(path)


def test_a_replanned_corpus_has_the_same_conversations_and_reads_no_source(folder: Path, tmp_path: Path) -> None:
    corpus = open_corpus(Path("long"), root=folder)
    manifest = load_manifest(replan(corpus, {"sequence_length": 512}, folder, tmp_path))
    assert corpus.manifest
    assert (manifest.sequence_length, manifest.ledger.conversations) == (512, corpus.manifest.ledger.conversations)
    assert not changed_files(tmp_path / manifest.corpus, manifest.listed())
    assert (tmp_path / "data" / "tokens").is_symlink()


def test_settings_that_do_not_train_end_the_diagnosis(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_trial, "Popen", Forked)
    monkeypatch.setattr(diagnose.signal, "signal", lambda *_: None)
    with pytest.raises(PackError, match="flash2 needs a GPU") as caught:
        diagnose.main(words(folder, "--attention", "flash2"))
    assert (caught.value.reason, caught.value.exit_code) == ("no_attention", 69)


@pytest.mark.parametrize(
    ("given", "message"),
    [(["--only", "atention"], "no such factor; did you mean attention"), (["--steps", "1"], "first step is not timed")],
)
def test_wrong_options_are_an_error_that_names_them(folder: Path, given: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        diagnose.main([*words(folder), *given])


@pytest.mark.parametrize(
    ("code", "errors", "reason"),
    [
        (0, "", ""),
        (69, 'step 1/8\n{"error": {"code": "E632", "message": "does not fit"}}\n', "E632: does not fit"),
        (-9, "", "killed by SIGKILL, which is what the system does when memory runs out"),
        (-11, "", "killed by SIGSEGV"),
        (1, "Traceback\nRuntimeError: boom", "RuntimeError: boom"),
        (3, "", "exit code 3"),
    ],
)
def test_a_failure_becomes_its_reason(code: int, errors: str, reason: str) -> None:
    assert failure(code, errors) == reason
