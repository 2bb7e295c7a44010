"""A backend is tried in its own process.

If the process crashes, the backend is not used, and the crash is the reason.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import orjson
import psutil
import pytest
import torch
from support.commands import ROOT, in_fork_with_torch
from support.training.tiny_training import packed_rows, tiny_model
from transformers import LlamaForCausalLM

from tasks.core.errors import PartMissing
from train.config import TrainingConfig
from train.model import attention, isolation
from train.model.isolation import LOADED, Trial, fastest, in_process, run, try_apart

CPU = torch.device("cpu")
CONFIG = TrainingConfig(quantization="none", lora_r=4, attention="auto")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    tiny_model(adapter=False, num_hidden_layers=1).save_pretrained(folder)
    return folder


def requests(monkeypatch: pytest.MonkeyPatch, base: Path, *backends: str) -> list[dict[str, Any]]:
    """Return the requests to the other processes, as if these backends could crash."""
    asked: list[dict[str, Any]] = []

    def ask(request: dict[str, Any]) -> Trial:
        asked.append(orjson.loads(orjson.dumps(request)))
        return Trial(request["backend"], 1.0)

    monkeypatch.setattr(isolation, "APART", backends)
    monkeypatch.setattr(isolation, "in_process", ask)
    found = try_apart(base, CONFIG, CPU, torch.float32, packed_rows(), 2)
    assert [trial.attention for trial in found] == [request["backend"] for request in asked]
    return asked


def test_only_backends_of_the_machine_and_the_model_are_tried(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert try_apart(base, CONFIG, CPU, torch.float32, packed_rows(), 2) == [], "none of them runs on a CPU"
    assert [asked["backend"] for asked in requests(monkeypatch, base, "eager", "varlen", "sdpa")] == ["eager", "sdpa"]
    monkeypatch.setattr(LlamaForCausalLM, "_supports_sdpa", False)
    assert [asked["backend"] for asked in requests(monkeypatch, base, "eager", "varlen", "sdpa")] == ["eager"]


def test_the_other_process_does_what_this_one_would(
    base: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A real process gets the model and the rows, and answers with a speed."""
    (request,) = requests(monkeypatch, base, "eager")
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")

    def in_fork(words: list[str], env: dict[str, str], **_: Any) -> Any:
        assert not {"RANK", "TORCHELASTIC_RUN_ID"} & set(env)
        assert words[:4] == [sys.executable, "-P", "-m", "train.model.isolation"]
        done = in_fork_with_torch(ROOT, *words[1:])
        assert (Path(words[4]) / LOADED).exists(), done.stderr
        return SimpleNamespace(poll=lambda: done.returncode)

    monkeypatch.setattr(isolation, "subprocess", SimpleNamespace(Popen=in_fork, DEVNULL=subprocess.DEVNULL))
    found = in_process(request)
    assert (found.attention, found.reason) == ("eager", "")
    assert found.tokens_per_second > 0


def test_the_check_fails_there_as_here(base: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (request,) = requests(monkeypatch, base, "sdpa")
    assert run(request, tmp_path).tokens_per_second > 0
    leaking = [row | {"position_ids": [*range(len(row["position_ids"]))]} for row in request["rows"]]
    monkeypatch.setattr(isolation, "number_conversations", lambda rows: torch.arange(256).expand(len(rows), -1) // 64)
    assert "conversations see each other with attention `sdpa`" in run(request | {"rows": leaking}, tmp_path).reason
    assert "varlen needs a GPU" in run(request | {"backend": "varlen"}, tmp_path).reason
    full = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate\nmore")
    monkeypatch.setattr(isolation, "try_backend", fail_with(full))
    assert run(request, tmp_path) == Trial("sdpa", 0.0, "CUDA out of memory. Tried to allocate")


@pytest.mark.parametrize(("device", "chosen"), [("cuda", []), ("cuda:1", [torch.device("cuda:1")])])
def test_one_of_several_gpus_is_made_the_current_one(
    device: str, chosen: list[torch.device], base: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A single GPU has no number, and set_device refuses a device without one."""
    (request,) = requests(monkeypatch, base, "sdpa")
    current: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    monkeypatch.setattr(isolation, "load_model", fail_with(PartMissing("no_attention", "enough")))
    assert run(request | {"device": device}, tmp_path).reason == "enough"
    assert current == chosen


def fail_with(error: Exception) -> Any:
    def fail(*_: Any, **__: Any) -> None:
        raise error

    return fail


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("os.kill(os.getpid(), signal.SIGSEGV)", "its process was killed by SIGSEGV"),
        ("os.kill(os.getpid(), signal.SIGABRT)", "its process was killed by SIGABRT"),
        (
            "sys.exit('CUDA error: an illegal memory access')",
            "its process failed (CUDA error: an illegal memory access)",
        ),
        ("os._exit(1)", "its process failed (no message)"),
        ("os._exit(0)", "its process failed (no message)"),
        ("open(sys.argv[1] + '/loaded', 'w'); time.sleep(60)", "took longer than 1 s"),
        # Loading or downloading a model has no time limit.
        ("time.sleep(0.8); sys.exit('later')", "its process failed (later)"),
    ],
)
def test_a_kernel_that_ends_its_process_is_a_reason(code: str, reason: str) -> None:
    stand_in = (sys.executable, "-S", "-c", f"import os, signal, sys, time; {code}")
    assert in_process({"backend": "flash2"}, stand_in, limit=0.6) == Trial("flash2", 0.0, reason)


def test_the_process_does_not_outlive_the_one_that_started_it(tmp_path: Path) -> None:
    code = "import os, threading, time; from train.model.isolation import _end_with;"
    child = f"{code} threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start(); time.sleep(60)"
    parent = (
        "import os, sys, time\n"
        "child = os.fork()\n"
        f"if not child: exec({child!r})\n"
        "print(child, flush=True)\n"
        "time.sleep(0.5)\n"
    )
    done = in_fork_with_torch(tmp_path, "-c", parent)
    pid = int(done.stdout.split()[0])
    until = time.monotonic() + 120
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < until
        time.sleep(0.05)


def test_the_fastest_is_chosen_from_here_and_there(monkeypatch: pytest.MonkeyPatch) -> None:
    model, known = tiny_model(), [Trial("flash3", 0.0, "its process was killed by SIGSEGV"), Trial("varlen", 1e12)]
    used = []
    monkeypatch.setattr(isolation, "use_attention", lambda _, backend: used.append(backend))
    monkeypatch.setattr(isolation, "try_backend", lambda _, __, ___, backend, **____: Trial(backend, 5.0))
    monkeypatch.setattr(type(model.get_base_model()), "_supports_sdpa", False)
    best, trials = fastest(model, packed_rows(), 2, seed=1, tried=known)
    assert (best, used) == ("varlen", ["varlen"])
    assert [(trial.attention, trial.tokens_per_second, trial.reason) for trial in trials] == [
        ("flash3", 0.0, "its process was killed by SIGSEGV"),
        ("flash2", 5.0, ""),
        ("varlen", 1e12, ""),
        ("flex", 5.0, ""),
        ("sdpa", 0.0, "llama models lack it"),
        ("eager", 5.0, ""),
    ]


@pytest.mark.parametrize(("eager", "chosen"), [(102.0, "sdpa"), (104.0, "eager")])
def test_of_two_that_are_nearly_as_fast_the_first_is_chosen(
    eager: float, chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    speeds = {"sdpa": 100.0, "eager": eager}
    monkeypatch.setattr(isolation, "use_attention", lambda *_: None)
    known = [Trial(name, speeds.get(name, 0.0)) for name in attention.BACKENDS]
    assert fastest(tiny_model(), packed_rows(), 2, seed=1, tried=known)[0] == chosen
