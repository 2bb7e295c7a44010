"""bench/training/gpu.py halves the micro-batch of TRL only if memory runs out."""

from __future__ import annotations

import importlib.util
import json
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.commands import ROOT

_spec = importlib.util.spec_from_file_location("gpu_benchmark", ROOT / "bench" / "training" / "gpu.py")
assert _spec
assert _spec.loader
benchmark = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(benchmark)

CASE = {"micro_batch": 4}


def processes(monkeypatch: pytest.MonkeyPatch, *ends: tuple[int, str]) -> list[int]:
    """Replace the processes of TRL by their ends, and return the tried micro-batches."""
    tried: list[int] = []

    def run(words: list[str], **_: Any) -> SimpleNamespace:
        code, errors = ends[len(tried)]
        tried.append(json.loads(words[-1])["micro_batch"])
        return SimpleNamespace(returncode=code, stdout='noise\n{"tokens_per_second": 7}\n', stderr=errors)

    monkeypatch.setattr(subprocess, "run", run)
    return tried


def test_a_shortage_of_memory_halves_the_micro_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = processes(monkeypatch, (benchmark.SHORTAGE, "CUDA out of memory"), (0, ""))
    assert benchmark.trl_that_fits(Path("m"), Path("model"), CASE) == (2, {"tokens_per_second": 7})
    assert tried == [4, 2]


def test_any_other_failure_ends_with_its_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    errors = "\n".join(["old"] * 99 + ["Traceback", "  File a.py", "ImportError: no trl"])
    tried = processes(monkeypatch, (1, errors))
    with pytest.raises(SystemExit) as caught:
        benchmark.trl_that_fits(Path("m"), Path("model"), CASE)
    assert "  File a.py\nImportError: no trl\nTRL, micro-batch 4: failed with exit code 1" in str(caught.value.code)
    assert str(caught.value.code).count("\n") == benchmark.SHOWN
    assert tried == [4]


def test_a_model_that_never_fits_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = processes(monkeypatch, *[(benchmark.SHORTAGE, "")] * 3)
    with pytest.raises(SystemExit, match="out of memory with one row per pass"):
        benchmark.trl_that_fits(Path("m"), Path("model"), CASE)
    assert tried == [4, 2, 1]


@pytest.mark.parametrize(("error", "code"), [(torch.OutOfMemoryError("full"), 3), (ImportError("no trl"), 1)])
def test_the_exit_code_of_the_process_shows_which_it_is(
    error: Exception, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: Any) -> None:
        raise error

    monkeypatch.setattr(benchmark, "trl", fail)
    with pytest.raises(SystemExit) as caught:
        benchmark.trl_or_exit(Path("m"), Path("model"), CASE)
    assert caught.value.code == code
    assert str(error) in capsys.readouterr().err
