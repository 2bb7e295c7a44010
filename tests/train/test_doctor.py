"""Everything a machine may lack is reported with its fix."""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given as drawn
from hypothesis import strategies as st
from rich.console import Console

from packcorpus.tasks.core.errors import PartMissing
from packcorpus.train import doctor
from packcorpus.train.doctor import Finding
from packcorpus.train.machine import devices
from packcorpus.train.machine.devices import Gpu

GPU = Gpu("NVIDIA H200", 150_754_820_096, (9, 0))


def healthy(monkeypatch: pytest.MonkeyPatch, **facts: Any) -> None:
    """Fake a machine with one good GPU, except for `facts`."""
    gpus = facts.pop("gpus", [GPU])
    usual = {
        "gpus": lambda: gpus,
        "gpu_count": lambda: len(gpus),
        "gpu_sign": lambda: None,
        "no_code_reason": lambda: None,
        "no_nf4_reason": lambda kind: None,
        "is_wsl": lambda: False,
        "free_memory": lambda: 64 << 30,
        "free_disk": lambda path: 500 << 30,
        "compiler": lambda: "/usr/bin/c++",
        "has_nccl": lambda: True,
    }
    for name, fact in (usual | facts).items():
        monkeypatch.setattr(devices, name, fact)
    # The backends of train.model.attention ask torch for a GPU, which tests do not have.
    monkeypatch.setattr(doctor, "_attention", lambda kind: Finding("ok", "attention", "sdpa"))


def examined(monkeypatch: pytest.MonkeyPatch, **facts: Any) -> tuple[int, str]:
    """Return the exit code, and the output at 80 columns with its lines joined."""
    healthy(monkeypatch, **facts)
    out = io.StringIO()
    code = doctor.main(console=Console(file=out, width=80, markup=False, emoji=False, highlight=False))
    assert max(map(len, out.getvalue().splitlines())) <= 80
    return code, re.sub(r"\s+", " ", out.getvalue())


def test_a_healthy_machine_has_nothing_to_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    code, text = examined(monkeypatch)
    assert code == 0
    assert "GPU NVIDIA H200, 140 GiB, compute capability 9.0" in text
    assert f"torch {metadata.version('torch')}" in text
    assert text.endswith("training can run here ")
    assert "→" not in text


@pytest.mark.parametrize(
    ("facts", "level", "fix"),
    [
        ({"gpus": []}, "warning GPU none", "training runs on the CPU"),
        ({"gpus": [], "gpu_sign": lambda: "/dev/nvidia0"}, "problem GPU present (/dev/nvidia0)", "--device cpu"),
        ({"gpus": [Gpu("T4", 1 << 34, (7, 5))]}, "warning precision fp16 with loss scaling: T4", "2020 or later"),
        (
            {"no_code_reason": lambda: "no code for it; install another"},
            "problem GPU no code for it",
            "install another",
        ),
        ({"gpus": [Gpu("P40", 1 << 34, (6, 1))]}, "warning precision fp32: P40", "2020 or later"),
        ({"no_nf4_reason": lambda kind: "it is broken"}, "problem NF4 it is broken", "--quantization none"),
        ({"gpus": [GPU, GPU], "has_nccl": lambda: False}, "problem processes 2 GPUs", "--gpus 1"),
        ({"compiler": lambda: None}, "warning compiler no C++", "apt-get install g++"),
        ({"is_wsl": lambda: True}, "warning WSL Linux inside Windows", ".wslconfig"),
        ({"free_memory": lambda: 3 << 30}, "warning memory 3.0 GiB free", "close other programs"),
        ({"free_disk": lambda path: 2 << 30}, "warning disk 2.0 GiB free", "free some space"),
    ],
)
def test_every_problem_is_reported_with_its_fix(
    facts: dict[str, Callable[..., Any]], level: str, fix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, text = examined(monkeypatch, **facts)
    assert level in text
    assert re.search(rf"{re.escape(level)}.*→ [^→]*{re.escape(fix)}", text)
    is_problem = level.startswith("problem")
    assert code == (69 if is_problem else 0)
    verdict = (
        "training cannot run here with the default settings: 1 problem"
        if is_problem
        else "training can run here: 1 warning"
    )
    assert text.endswith(f"{verdict} ")


def test_missing_libraries_are_findings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Even torch may be missing, so none of it may be imported."""
    found = devices.version_of
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setattr(
        devices, "version_of", lambda package: {"torch": None, "trl": "0.9.1"}.get(package, found(package))
    )
    for name in ("gpus", "gpu_count", "gpu_sign", "no_nf4_reason", "has_nccl"):
        monkeypatch.setattr(devices, name, lambda *_: pytest.fail("torch is missing"))
    findings = doctor.examine()
    problems = {finding.topic: finding for finding in findings if finding.level == "problem"}
    assert problems.keys() == {"torch", "trl"}
    assert re.fullmatch(r"not installed; <[\d.]+,>=[\d.]+ is required", problems["torch"].found)
    assert re.fullmatch(r"0\.9\.1 is not supported \(<[\d.]+,>=[\d.]+ is required\)", problems["trl"].found)
    assert {finding.fix for finding in problems.values()} == {"make extras"}, "in a clone"
    monkeypatch.chdir(tmp_path)
    assert {finding.fix for finding in doctor.examine() if finding.fix} >= {"pip install 'packcorpus[train]'"}
    assert doctor.main(console=Console(file=io.StringIO())) == 69


def test_a_checkout_that_is_not_installed_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    found = metadata.Distribution.from_name

    def without_ours(name: str) -> metadata.Distribution:
        if name == "packcorpus":
            raise metadata.PackageNotFoundError(name)
        return found(name)

    monkeypatch.setattr(metadata.Distribution, "from_name", without_ours)
    code, text = examined(monkeypatch)
    assert code == 69
    assert re.search(r"problem packcorpus runs .* is not installed .* → run: make extras", text)
    with pytest.raises(PartMissing, match=r"is not installed in this Python.*make extras"):
        devices.check_libraries()


def test_an_unloadable_library_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> Any:
        raise OSError("libtorch_cuda.so: cannot open shared object file")

    code, text = examined(monkeypatch, gpus=[], gpu_count=broken)
    assert code == 69
    assert "problem libraries cannot be loaded: libtorch_cuda.so" in text


def test_attention_backends_of_this_machine() -> None:
    assert doctor._attention("cpu") == Finding("ok", "attention", "sdpa, eager")


@pytest.mark.parametrize(
    ("installed", "gpus", "expected"),
    [
        ({}, 1, "not installed: causal-conv1d, mamba-ssm, flash-linear-attention: Mamba and linear"),
        ({"mamba-ssm": "2.2"}, 1, "mamba-ssm 2.2; not installed: causal-conv1d, flash-linear-attention: Mamba and"),
        (dict.fromkeys(doctor.STATE_KERNELS, "1.0"), 0, "flash-linear-attention 1.0; not used, because they need a"),
        (dict.fromkeys(doctor.STATE_KERNELS, "1.0"), 1, "causal-conv1d 1.0; mamba-ssm 1.0; flash-linear-attention 1.0"),
    ],
)  # fmt: skip
def test_the_kernels_of_models_with_a_state_are_listed(
    installed: dict[str, str], gpus: int, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    healthy(monkeypatch, gpus=[GPU] * gpus, version_of=installed.get)
    [finding] = [finding for finding in doctor._compute() if finding.topic == "kernels"]
    assert (finding.level, finding.topic, finding.fix) == ("ok", "kernels", "")
    assert expected in finding.found
    assert ("slow reference code" in finding.found) == (len(installed) < 3 or not gpus)


def test_training_needs_match_the_project_metadata() -> None:
    needs = devices.training_needs()
    assert {"torch", "transformers", "trl", "peft", "bitsandbytes"} <= needs.keys()
    assert {"luigi", "pytest", "ruff"} & needs.keys() == set()
    assert all(re.fullmatch(r"<[\d.]+,>=[\d.]+", wanted) for wanted in needs.values())


@drawn(st.lists(st.integers(0, 30), min_size=1, max_size=3), st.lists(st.integers(0, 30), min_size=1, max_size=3))
def test_versions_compare_as_numbers(version: list[int], bound: list[int]) -> None:
    texts = [".".join(map(str, numbers)) for numbers in (version, bound)]
    padded = [numbers + [0] * (3 - len(numbers)) for numbers in (version, bound)]
    assert doctor.in_range(f"{texts[0]}+cpu", f">={texts[1]}") is (padded[0] >= padded[1])
    assert doctor.in_range(texts[0], f"<{texts[1]}") is (padded[0] < padded[1])


def test_a_range_has_two_ends() -> None:
    inside = [doctor.in_range(v, ">=3.11,<3.15") for v in ("3.10.9", "3.11.0", "3.14.9", "3.15.0")]
    assert inside == [False, True, True, False]


def test_levels_are_words_on_a_terminal_too() -> None:
    out = io.StringIO()
    console = Console(file=out, width=80, force_terminal=True, color_system="standard", markup=False)
    doctor.show([Finding("problem", "torch", "[bold]is not here[/bold] " * 8, "get it")], console)
    assert "\x1b[" in out.getvalue()
    plain = re.sub(r"\x1b\[[\d;]*m", "", out.getvalue())
    assert plain.startswith("problem  torch         [bold]is not here[/bold]")
    assert max(map(len, plain.splitlines())) <= 80
