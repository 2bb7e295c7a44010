"""Backends that may crash are tried in another process.

If it crashes, the backend is not used, the crash is the reason, and a new process goes on with the next backend.
"""

from __future__ import annotations

import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import orjson
import psutil
import pytest
import torch
from support.commands import ROOT, in_fork_with_torch
from support.training.tiny_training import packed_rows, tiny_model
from support.training.tree_rows import tree_rows
from transformers import LlamaForCausalLM

from packcorpus.tasks.core.errors import PartMissing
from packcorpus.train.config import TrainingConfig
from packcorpus.train.model import attention, isolation
from packcorpus.train.model.isolation import LOADED, Trial, fastest, in_processes, run, try_apart

CPU = torch.device("cpu")
CONFIG = TrainingConfig(quantization="none", lora_r=4, attention="auto")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    tiny_model(adapter=False, num_hidden_layers=1).save_pretrained(folder)
    return folder


def request_of(monkeypatch: pytest.MonkeyPatch, base: Path, *backends: str) -> dict[str, Any]:
    """Return the request to the other process, as if these backends could crash."""
    asked: list[dict[str, Any]] = []

    def ask(request: dict[str, Any]) -> list[Trial]:
        asked.append(orjson.loads(orjson.dumps(request)))
        return [Trial(backend, 1.0) for backend in request["backends"]]

    monkeypatch.setattr(isolation, "APART", backends)
    monkeypatch.setattr(isolation, "in_processes", ask)
    found = try_apart(base, CONFIG, CPU, torch.float32, packed_rows(), 2)
    (request,) = asked
    assert [trial.attention for trial in found] == request["backends"]
    return request


def test_only_backends_of_the_machine_and_the_model_are_tried(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert try_apart(base, CONFIG, CPU, torch.float32, packed_rows(), 2) == [], "none of them runs on a CPU"
    assert request_of(monkeypatch, base, "eager", "varlen", "sdpa")["backends"] == ["eager", "sdpa"]
    monkeypatch.setattr(LlamaForCausalLM, "_supports_sdpa", False)
    assert request_of(monkeypatch, base, "eager", "varlen", "sdpa")["backends"] == ["eager"]
    full = CONFIG.model_copy(update={"sharding": "full"})
    assert {trial.reason for trial in try_apart(base, full, CPU, torch.float32, packed_rows(), 2)} == {
        "not tried with sharding: full"
    }


def test_the_other_process_does_what_this_one_would(
    base: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A real process loads the model once, gets the rows, and answers with speeds."""
    request = request_of(monkeypatch, base, "eager", "sdpa")
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    started = []

    def in_fork(words: list[str], env: dict[str, str], **_: Any) -> Any:
        assert not {"RANK", "TORCHELASTIC_RUN_ID"} & set(env)
        assert words[:4] == [sys.executable, "-P", "-m", "packcorpus.train.model.isolation"]
        started.append(words)
        done = in_fork_with_torch(ROOT, *words[1:])
        assert (Path(words[4]) / LOADED).exists(), done.stderr
        return SimpleNamespace(poll=lambda: done.returncode)

    monkeypatch.setattr(isolation, "subprocess", SimpleNamespace(Popen=in_fork, DEVNULL=subprocess.DEVNULL))
    found = in_processes(request)
    assert [(trial.attention, trial.reason) for trial in found] == [("eager", ""), ("sdpa", "")]
    assert all(trial.tokens_per_second > 0 for trial in found)
    assert len(started) == 1


def test_the_check_fails_there_as_here(base: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    request = request_of(monkeypatch, base, "sdpa")

    def tried(**changes: Any) -> Trial:
        (found,) = run(request | changes, tmp_path)
        return found

    assert tried().tokens_per_second > 0
    leaking = [row | {"position_ids": [*range(len(row["position_ids"]))]} for row in request["rows"]]
    with monkeypatch.context() as other:
        other.setattr(isolation, "number_conversations", lambda rows: torch.arange(256).expand(len(rows), -1) // 64)
        assert "conversations see each other with attention `sdpa`" in tried(rows=leaking).reason
    both = [*run(request | {"backends": ["varlen", "sdpa"]}, tmp_path)]
    assert "varlen needs a GPU" in both[0].reason
    assert both[1].tokens_per_second > 0, "the model is still usable"
    full = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate\nmore")
    monkeypatch.setattr(isolation, "try_backend", fail_with(full))
    assert tried() == Trial("sdpa", 0.0, "CUDA out of memory. Tried to allocate")
    monkeypatch.setattr(isolation, "try_backend", fail_with(RuntimeError("a bug")))
    with pytest.raises(RuntimeError, match="a bug"):
        tried()
    monkeypatch.setattr(isolation, "load_model", fail_with(full))
    assert [*run(request | {"backends": ["varlen", "sdpa"]}, tmp_path)] == [
        Trial(backend, 0.0, "CUDA out of memory. Tried to allocate") for backend in ("varlen", "sdpa")
    ]


def test_the_other_process_gets_the_trees_of_rows(base: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    rows = [{name: values.tolist() for name, values in row.items()} for row in tree_rows(4)]
    request, passed = request_of(monkeypatch, base, "sdpa") | {"rows": rows}, []
    plain = isolation.try_backend

    def watched(model: Any, dataset: Any, *others: Any, **named: Any) -> Trial:
        passed.extend(dataset)
        return plain(model, dataset, *others, **named)

    monkeypatch.setattr(isolation, "try_backend", watched)
    (found,) = run(request, tmp_path)
    assert found.tokens_per_second > 0
    assert [row["end"].tolist() for row in passed] == [row["end"] for row in rows]
    (found,) = run(request | {"backends": ["varlen"]}, tmp_path)
    assert not found.tokens_per_second


@pytest.mark.parametrize(("device", "chosen"), [("cuda", []), ("cuda:1", [torch.device("cuda:1")])])
def test_one_of_several_gpus_is_made_the_current_one(
    device: str, chosen: list[torch.device], base: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A single GPU has no number, and set_device refuses a device without one."""
    request = request_of(monkeypatch, base, "sdpa")
    current: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    monkeypatch.setattr(isolation, "load_model", fail_with(PartMissing("no_attention", "enough")))
    assert [trial.reason for trial in run(request | {"device": device}, tmp_path)] == ["enough"]
    assert current == chosen


def test_a_gpu_that_a_kernel_has_broken_is_not_used_again(
    base: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    request = request_of(monkeypatch, base, "eager", "sdpa")
    monkeypatch.setattr(isolation, "load_model", lambda *_: tiny_model())
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(isolation, "autocast", lambda *_: nullcontext())
    error = torch.AcceleratorError("CUDA error: an illegal memory access")
    monkeypatch.setattr(torch.cuda, "synchronize", fail_with(error))
    monkeypatch.setattr(isolation, "try_backend", fail_with(error))
    expected = Trial("eager", 0.0, "CUDA error: an illegal memory access")
    assert [*run(request | {"device": "cuda"}, tmp_path)] == [expected]


def fail_with(error: Exception) -> Any:
    def fail(*_: Any, **__: Any) -> None:
        raise error

    return fail


HELPERS = """
import json, os, signal, sys, time
folder = sys.argv[1]
backends = json.load(open(folder + '/request.json'))['backends']
def load():
    open(folder + '/loaded', 'w')
def finish(name, reason=''):
    with open(folder + '/trials.jsonl', 'a') as file:
        trial = {'attention': name, 'tokens_per_second': 0.0 if reason else 1.0, 'reason': reason}
        file.write(json.dumps(trial) + chr(10))
"""


def stand_in(code: str) -> tuple[str, ...]:
    return sys.executable, "-S", "-c", HELPERS + code


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
        ("time.sleep(60)", "took longer than 1 s"),
    ],
)
def test_a_kernel_that_ends_its_process_is_a_reason_and_the_others_are_tried(code: str, reason: str) -> None:
    """The second of three backends fails, and a new process goes on with the third."""
    work = f"load()\nfor name in backends:\n    if name == 'flash2': {code}\n    finish(name)\n"
    request = {"backends": ["flash3", "flash2", "varlen"]}
    assert in_processes(request, stand_in(work), limit=0.6) == [
        Trial("flash3", 1.0),
        Trial("flash2", 0.0, reason),
        Trial("varlen", 1.0),
    ]


@pytest.mark.parametrize("code", ["sys.exit('no model')", "time.sleep(0.8); sys.exit('no model')"])
def test_without_a_model_no_backend_is_blamed_alone(code: str, tmp_path: Path) -> None:
    """Loading or downloading a model has no time limit, and is not tried again."""
    count = tmp_path / "count"
    work = f"open({str(count)!r}, 'a').write('.')\n{code}"
    reason = "its process failed (no model)"
    found = in_processes({"backends": ["flash2", "varlen"]}, stand_in(work), limit=0.6)
    assert found == [Trial("flash2", 0.0, reason), Trial("varlen", 0.0, reason)]
    assert count.read_text() == "."


def test_each_backend_has_its_own_time() -> None:
    work = "load()\nfor name in backends:\n    time.sleep(1.2)\n    finish(name)\n"
    backends = ["flash3", "flash2", "varlen"]
    assert in_processes({"backends": backends}, stand_in(work), limit=3) == [Trial(name, 1.0) for name in backends]


def test_a_process_that_stops_after_a_broken_gpu_is_replaced() -> None:
    """It ends without an error after it has written the reason, or half a line."""
    work = "load()\nfinish(backends[0], 'CUDA error' * (backends[0] == 'flash3'))\nos._exit(0)"
    assert in_processes({"backends": ["flash3", "varlen"]}, stand_in(work)) == [
        Trial("flash3", 0.0, "CUDA error"),
        Trial("varlen", 1.0),
    ]
    cut = "load()\nopen(folder + '/trials.jsonl', 'a').write('{')\nos._exit(1)"
    assert in_processes({"backends": ["varlen"]}, stand_in(cut)) == [
        Trial("varlen", 0.0, "its process failed (no message)")
    ]


def test_the_process_does_not_outlive_the_one_that_started_it(tmp_path: Path) -> None:
    code = "import os, threading, time; from packcorpus.train.model.isolation import _end_with;"
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
