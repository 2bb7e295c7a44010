"""`luigi --module pipeline TrainAdapter` packs if needed, and trains.

It trains in a separate process, and it does nothing if the training is done.
"""

from __future__ import annotations

import fcntl
import os
import shutil
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
from support.commands import BIN, NO_PICTURE, ROOT, Done, command, in_fork_with_torch, pack, started, write_chats
from transformers import LlamaConfig, LlamaForCausalLM

CONFIG = "name: chats\nsources: [{path: chats.jsonl}]\nsequence_length: 128\nvocab_size: 400\n"
OPTIONS = "--base-model tiny --device cpu --micro-batch 1 --tokens-per-step 256 --learning-rate 5e-3"


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a config, its chats, and the model `tiny`."""
    folder = tmp_path_factory.mktemp("sources")
    write_chats(folder / "chats.jsonl", 300)
    (folder / "corpus.yaml").write_text(CONFIG)
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=400, hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder / "tiny")
    return folder


@pytest.fixture(scope="module")
def packed(sources: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of `sources` with its corpus."""
    folder = tmp_path_factory.mktemp("packed") / "folder"
    shutil.copytree(sources, folder)
    pack(folder, "--config", "corpus.yaml")
    return folder


@pytest.fixture
def folder(packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a copy of `packed`."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # more threads only wait for each other here
    return Path(shutil.copytree(packed, tmp_path / "folder"))


def words(options: str) -> list[str]:
    return [str(BIN / "luigi"), "--module", "pipeline", "TrainAdapter", "--config", "corpus.yaml", "--options", options]


def test_it_packs_and_trains_and_after_ctrl_c_the_same_command_completes_the_training(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C reaches every process, as from a terminal.

    All processes start as a user starts them. After the training, the command is a no-op.
    """
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    folder = Path(shutil.copytree(sources, tmp_path / "folder"))
    wanted = [*words(f"{OPTIONS} --max-steps 20"), "--workers", "2"]
    environment = os.environ | {"LUIGI_CONFIG_PATH": str(ROOT / "luigi.cfg")}
    process = subprocess.Popen(
        wanted, cwd=folder, env=environment, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stderr
    errors = ""
    for line in process.stderr:
        errors += line
        if line.startswith("step 1/"):
            os.killpg(process.pid, signal.SIGINT)
    assert process.wait(timeout=120) == 75, errors
    checkpoint = the_checkpoint(folder, errors)

    done = in_fork_with_torch(folder, *wanted, **NO_PICTURE)
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


@pytest.mark.parametrize("workers", ["1", "2"])
def test_sigterm_to_luigi_alone_leaves_a_checkpoint(folder: Path, workers: str) -> None:
    """A batch system sends SIGTERM to luigi alone."""
    with started(folder, *words(f"{OPTIONS} --max-steps 30"), "--workers", workers, **NO_PICTURE) as process:
        errors = ""
        for line in process.stderr:
            errors += line
            if line.startswith("step 1/"):
                os.kill(process.pid, signal.SIGTERM)
        assert process.wait() == 75, errors
    the_checkpoint(folder, errors)


def the_checkpoint(folder: Path, errors: str) -> Path:
    """Return the checkpoint of the run that was stopped.

    The run must have reported it once, and no process that trains is left.
    """
    assert "stopping after this step, with a checkpoint" in errors
    assert "Traceback" not in errors
    assert "error" not in errors
    assert errors.count("E713") == 1
    (checkpoint,) = folder.glob("data/adapters/*/checkpoint-*")
    assert (checkpoint / "complete.json").exists(), errors
    with (checkpoint.parent / "run.lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # no process that trains is left
    return checkpoint


@pytest.mark.parametrize("moment", ["starts", "loads torch"])
@pytest.mark.parametrize(("number", "workers"), [(signal.SIGINT, "2"), (signal.SIGINT, "1"), (signal.SIGTERM, "2")])
def test_a_signal_before_the_first_step_is_reported_once(folder: Path, number: int, workers: str, moment: str) -> None:
    """The signal arrives while the process starts, or while it loads torch."""
    given = [*words(OPTIONS), "--workers", workers]
    with started(folder, *given, package="tasks") as process:
        while not (training := training_of(process.pid)):
            time.sleep(0.005)
        while moment == "loads torch" and "/libtorch" not in Path(f"/proc/{training}/maps").read_text():
            time.sleep(0.005)
        (os.killpg if number == signal.SIGINT else os.kill)(process.pid, number)
        errors = process.stderr.read()
        assert process.wait() == 75, errors
    assert errors.count("E713") == 1, errors
    assert not any(word in errors for word in ("Traceback", "error:", "ignored", "step 1/")), errors


def training_of(pid: int) -> int:
    """Return the training process of a run that trains, or 0.

    The process that only prints the path of the record does not count.
    """
    for process in psutil.Process(pid).children(recursive=True):
        with suppress(psutil.Error):
            given = process.cmdline()
            if "packcorpus.train" in given and "--where" not in given:
                return process.pid
    return 0


def test_an_error_of_training_fails_the_task_without_a_traceback(folder: Path) -> None:
    """The error is a missing extra, which the message names."""
    shutil.rmtree(folder / "manifests")
    shutil.rmtree(folder / "data" / "corpora")
    done = without_torch(folder, *words(OPTIONS))
    assert done.returncode == 69, done.stderr
    missing = "E721 error: training needs torch, which is not installed; run: pip install 'packcorpus[train]'"
    assert missing in done.stderr
    assert done.stderr.count(" error: ") == 1
    assert "Traceback" not in done.stderr
    assert list((folder / "manifests").glob("*.json")), "the corpus is packed all the same"


def without_torch(folder: Path, *given: str) -> Done:
    """Run a command on a machine that lacks torch."""
    (folder / "hidden").mkdir()
    (folder / "hidden" / "sitecustomize.py").write_text("import sys\nsys.modules['torch'] = None\n")
    return command(folder, *given, PYTHONPATH=f"{folder / 'hidden'}:{os.environ.get('PYTHONPATH', '')}")


def test_a_diagnosis_that_exists_is_a_no_op(folder: Path) -> None:
    """Luigi finds the diagnosis for the same root and settings.

    The tests of the diagnosis itself run the trials.
    """
    (manifest,) = (folder / "manifests").glob("*.json")
    given = [str(BIN / "luigi"), "--module", "pipeline", "DiagnoseTraining", "--config", "corpus.yaml"]
    where = command(
        folder,
        sys.executable,
        "-m",
        "packcorpus.train",
        "diagnose",
        "--manifest",
        str(manifest),
        *OPTIONS.split(),
        "--where",
    )
    path = folder / where.stdout.splitlines()[-1]
    assert path.parent.parent == folder / "data" / "diagnoses"
    path.parent.mkdir(parents=True)
    path.write_text("{}")
    done = command(folder, *given, "--options", OPTIONS)
    assert done.returncode == 0, done.stderr
    assert "already diagnosed, nothing to do" in done.stderr
    assert folder / done.stdout.splitlines()[-1] == path
    other = without_torch(folder, *given, "--options", f"{OPTIONS} --lora-r 8")
    assert "already diagnosed" not in other.stderr, "other settings are another diagnosis"
    assert other.returncode == 69, other.stderr
