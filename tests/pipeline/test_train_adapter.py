"""`luigi --module pipeline TrainAdapter`: packs where needed, trains in a process of its own, knows when it is done."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import orjson
import psutil
import pytest
import torch
from support.commands import BIN, ROOT, command, luigi, write_chats
from transformers import LlamaConfig, LlamaForCausalLM

CONFIG = "name: chats\nsources: [{path: chats.jsonl}]\nsequence_length: 128\nvocab_size: 400\n"
OPTIONS = "--base-model tiny --device cpu --micro-batch 1 --tokens-per-step 256 --learning-rate 5e-3"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # more only wait for each other here
    write_chats(tmp_path / "chats.jsonl", 300)
    (tmp_path / "corpus.yaml").write_text(CONFIG)
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=400, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(tmp_path / "tiny")
    return tmp_path


def words(options: str) -> list[str]:
    return [str(BIN / "luigi"), "--module", "pipeline", "TrainAdapter", "--config", "corpus.yaml", "--options", options]


@pytest.mark.parametrize(("number", "workers"), [(signal.SIGINT, "2"), (signal.SIGTERM, "1"), (signal.SIGTERM, "2")])
def test_it_packs_and_trains_and_a_signal_leaves_a_checkpoint_from_which_it_resumes(
    folder: Path, number: int, workers: str
) -> None:
    """Ctrl-C reaches every process, as from a terminal; SIGTERM luigi alone, as from a batch system.

    After Ctrl-C, the same command completes the training, and once more it is a no-op.
    """
    wanted = [*words(f"{OPTIONS} --max-steps 30"), "--workers", workers]
    environment = os.environ | {"LUIGI_CONFIG_PATH": str(ROOT / "luigi.cfg")}
    process = subprocess.Popen(
        wanted, cwd=folder, env=environment, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stderr
    errors = ""
    for line in process.stderr:
        errors += line
        if line.startswith("step 1/"):
            (os.killpg if number == signal.SIGINT else os.kill)(process.pid, number)
    assert process.wait(timeout=120) == 75, errors
    assert "stopping after this step, with a checkpoint" in errors
    assert "Traceback" not in errors
    assert "error" not in errors
    assert errors.count("E713") == 1
    (checkpoint,) = folder.glob("data/adapters/*/checkpoint-*")
    assert (checkpoint / "complete.json").exists(), errors
    with (checkpoint.parent / "run.lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # no process is left that trains
    if number == signal.SIGINT:
        done = command(folder, *wanted)
        assert done.returncode == 0, done.stderr
        assert f"from {checkpoint.name}" in done.stderr
        assert f"resuming after step {checkpoint.name.removeprefix('checkpoint-')}; loading" in done.stderr
        record = folder / done.stdout.splitlines()[-1]
        (manifest,) = (folder / "manifests").glob("*.json")
        assert orjson.loads(record.read_bytes())["corpus"]["key"] == orjson.loads(manifest.read_bytes())["key"]
        again = command(folder, *wanted)
        assert again.returncode == 0, again.stderr
        assert "already trained, nothing to do" in again.stderr
        assert folder / again.stdout.splitlines()[-1] == record


@pytest.mark.parametrize("seconds", [0.0, 1.5])
@pytest.mark.parametrize(("number", "workers"), [(signal.SIGINT, "2"), (signal.SIGINT, "1"), (signal.SIGTERM, "2")])
def test_a_signal_before_the_first_step_is_reported_once(
    folder: Path, number: int, workers: str, seconds: float
) -> None:
    """While the new process starts, and while it loads torch."""
    assert luigi(folder, "--config", "corpus.yaml").returncode == 0
    environment = os.environ | {"LUIGI_CONFIG_PATH": str(ROOT / "luigi.cfg")}
    process = subprocess.Popen(
        [*words(OPTIONS), "--workers", workers],
        cwd=folder, env=environment, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    assert process.stderr
    while not training_of(process.pid):
        time.sleep(0.005)
    time.sleep(seconds)
    (os.killpg if number == signal.SIGINT else os.kill)(process.pid, number)
    errors = process.stderr.read()
    assert process.wait(timeout=120) == 75, errors
    assert errors.count("E713") == 1, errors
    assert not any(word in errors for word in ("Traceback", "error:", "ignored", "step 1/")), errors


def training_of(pid: int) -> bool:
    """Return whether a run has a `python -m train` process, other than the one that asks for the path of its record."""
    for process in psutil.Process(pid).children(recursive=True):
        with suppress(psutil.Error):
            given = process.cmdline()
            if "train" in given and "--where" not in given:
                return True
    return False


def test_an_error_of_training_fails_the_task_without_a_traceback(folder: Path) -> None:
    """Here a missing extra, which is reported by name."""
    (folder / "hidden").mkdir()
    (folder / "hidden" / "sitecustomize.py").write_text("import sys\nsys.modules['torch'] = None\n")
    done = command(folder, *words(OPTIONS), PYTHONPATH=f"{folder / 'hidden'}:{os.environ.get('PYTHONPATH', '')}")
    assert done.returncode == 69, done.stderr
    assert "E721 error: training needs torch, which is not installed; run: make extras" in done.stderr
    assert done.stderr.count(" error: ") == 1
    assert "Traceback" not in done.stderr
    assert list((folder / "manifests").glob("*.json")), "the corpus is packed all the same"


def test_a_diagnosis_that_exists_is_a_no_op(folder: Path) -> None:
    """Its own tests run the trials; here, Luigi finds it below the same root and settings."""
    assert luigi(folder, "--config", "corpus.yaml").returncode == 0
    (manifest,) = (folder / "manifests").glob("*.json")
    given = [str(BIN / "luigi"), "--module", "pipeline", "DiagnoseTraining", "--config", "corpus.yaml"]
    where = command(
        folder, sys.executable, "-m", "train", "diagnose", "--manifest", str(manifest), *OPTIONS.split(), "--where"
    )
    path = folder / where.stdout.splitlines()[-1]
    assert path.parent.parent == folder / "data" / "diagnoses"
    path.parent.mkdir(parents=True)
    path.write_text("{}")
    done = command(folder, *given, "--options", OPTIONS)
    assert done.returncode == 0, done.stderr
    assert "already diagnosed, nothing to do" in done.stderr
    assert folder / done.stdout.splitlines()[-1] == path
    other = command(folder, *given, "--options", f"{OPTIONS} --device cuda")
    assert "already diagnosed" not in other.stderr, "other settings are another diagnosis"
    assert other.returncode == 69, other.stderr
