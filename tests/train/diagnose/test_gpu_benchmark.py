"""bench/training/gpu.py finds the best settings of the other trainers, and runs here with a tiny model."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.commands import ROOT
from support.small_corpus import conversations, make_recipe, pack_corpus

SCRIPT = ROOT / "bench" / "training" / "gpu.py"
_spec = importlib.util.spec_from_file_location("gpu_benchmark", SCRIPT)
assert _spec
assert _spec.loader
benchmark = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(benchmark)

CASE = {"micro_batch": 4, "rows": 8}


def processes(monkeypatch: pytest.MonkeyPatch, ends: dict[tuple[int, bool], Any]) -> list[tuple[int, bool]]:
    """Replace the processes of a trainer by their speeds or errors, and return what is tried."""
    tried: list[tuple[int, bool]] = []

    def run(words: list[str], **_: Any) -> SimpleNamespace:
        case = json.loads(words[-1])
        tried.append((case["micro_batch"], case["checkpointing"]))
        end = ends.get(tried[-1])
        if end is None:
            return SimpleNamespace(returncode=benchmark.SHORTAGE, stdout="", stderr="CUDA out of memory")
        if isinstance(end, str):
            return SimpleNamespace(returncode=1, stdout="", stderr=end)
        return SimpleNamespace(returncode=0, stdout=f'noise\n{{"trained_tokens_per_second": {end}}}\n', stderr="")

    monkeypatch.setattr(subprocess, "run", run)
    return tried


@pytest.mark.parametrize(
    ("ends", "expected", "order"),
    [
        # Halved until it fits; without checkpointing, one row fits, and is faster.
        ({(2, True): 7, (1, True): 6, (1, False): 9}, (1, False, 9), [4, 2, 4, 2, 1]),
        # Doubled while it is faster, up to the rows of a step.
        ({(4, True): 7, (8, True): 8, (4, False): 7, (8, False): 7.1}, (8, True, 8), [4, 8, 4, 8]),
        # The double does not fit.
        ({(4, True): 7}, (4, True, 7), [4, 8, 4, 2, 1]),
    ],
)
def test_the_fastest_setting_that_fits_counts(
    ends: dict[tuple[int, bool], Any], expected: tuple[int, bool, float], order: list[int], monkeypatch: Any
) -> None:
    tried = processes(monkeypatch, ends)
    found = benchmark.best("python", "TRL", CASE)
    assert (found["micro_batch"], found["checkpointing"], found["trained_tokens_per_second"]) == expected
    assert [size for size, _ in tried] == order


def test_any_other_failure_ends_with_its_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    errors = "\n".join(["old"] * 99 + ["Traceback", "  File a.py", "ImportError: no trl"])
    tried = processes(monkeypatch, {(4, True): errors})
    with pytest.raises(SystemExit) as caught:
        benchmark.best("python", "TRL", CASE)
    assert "  File a.py\nImportError: no trl\nTRL, micro-batch 4: failed with exit code 1" in str(caught.value.code)
    assert str(caught.value.code).count("\n") == benchmark.SHOWN
    assert len(tried) == 1


def test_a_model_that_never_fits_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = processes(monkeypatch, {})
    with pytest.raises(SystemExit, match="out of memory with one row per pass"):
        benchmark.best("python", "TRL", CASE)
    assert [size for size, _ in tried] == [4, 2, 1] * 2


@pytest.mark.parametrize(("error", "code"), [(torch.OutOfMemoryError("full"), 3), (ImportError("no trl"), 1)])
def test_the_exit_code_of_the_process_shows_which_it_is(
    error: Exception, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(_: Any) -> None:
        raise error

    with pytest.raises(SystemExit) as caught:
        benchmark.run_or_exit(fail, CASE)
    assert caught.value.code == code
    assert str(error) in capsys.readouterr().err


def figures(rate: float, memory: float, mfu: float | None) -> dict[str, Any]:
    return {"trained_tokens_per_second": rate, "memory_bytes": memory, "mfu": mfu, "setting": "x", "micro_batch": 1}


def test_goals_compare_with_the_better_of_the_others() -> None:
    runs = {"packcorpus": figures(13, 8, 0.5), "TRL": figures(5, 7, 0.2), "Unsloth": figures(10, 9, 0.4)}
    assert [*benchmark.goals(2048, "NVIDIA H100", runs).values()] == [True, True, True]
    runs["Unsloth"] = figures(11, 7, 0.4)
    assert [*benchmark.goals(2048, "NVIDIA H200", runs).values()] == [False, False, None]
    assert [*benchmark.goals(8192, "CPU", runs).values()] == [None, False, None]
    shown = benchmark.table([{"length": 8192, "runs": runs, "goals": benchmark.goals(8192, "CPU", runs)}])
    assert "| 8,192 | Unsloth (x) | 11 | 1.18 | 40.0% | 0.00 | 1 |" in shown
    assert "8,192: no more memory than the better of the others: not met" in shown


@pytest.mark.training
def test_the_whole_comparison_runs_on_a_cpu(tmp_path: Path) -> None:
    """Everything but CUDA and Unsloth runs."""
    packed, whole = (
        pack_corpus(make_recipe(tmp_path / str(packing), conversations(40), sequence_length=128, packing=packing))
        for packing in (True, False)
    )
    shape = ["--layers", "1", "--hidden", "32", "--steps", "3"]
    settings = ["--device", "cpu", "--quantization", "none", "--tokens-per-step", "256", "--micro-batch", "2"]
    words = [sys.executable, SCRIPT, tmp_path / "out", "--packed", packed, "--whole", whole, *shape, *settings]
    done = subprocess.run([*map(str, words)], capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "Unsloth: skipped" in done.stdout
    assert "128: MFU of 45% or more on an H100: not measured here" in done.stdout
    (found,) = json.loads((tmp_path / "out" / "gpu.json").read_text())
    for run in found["runs"].values():
        assert run["trained_tokens_per_second"] > 0
        assert run["memory_bytes"] > 0
