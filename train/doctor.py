"""`python -m train doctor`: what this machine can train with, and how to mend what is missing.

    machine ─examine─▶ [Finding(level, what, found, mend), …] ─show─▶ a line each, and how to mend it below
                                                             └─main─▶ 0, or 69 where training cannot run

ok: as it should be. warning: training runs, with less than it could. problem: training with the settings as they
come stops.
"""

from __future__ import annotations

import platform
import re
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from itertools import takewhile
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.table import Table
from rich.text import Text

from tasks.core.errors import PartMissing
from train.machine import devices

GIB = 1 << 30

# The small Llama trains in 2 GiB; an 8B model in NF4 takes 6 GiB to load.
LITTLE_MEMORY = 4 * GIB
# A checkpoint of an adapter on an 8B model is 0.5 GB, two are kept, and such a model is 16 GB.
LITTLE_DISK = 20 * GIB

STYLES = {"ok": "green", "warning": "yellow", "problem": "bold red"}

INSTALL = "make extras"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at; `mend` is empty where it is ok."""

    level: Literal["ok", "warning", "problem"]
    what: str
    found: str
    mend: str = ""


def main(console: Console | None = None) -> int:
    """Look at the machine and show what is found. 0 where training can run here, 69 where it cannot."""
    findings = examine()
    show(findings, console or Console(markup=False, emoji=False, highlight=False))
    return PartMissing.exit_code if any(finding.level == "problem" for finding in findings) else 0


def examine() -> list[Finding]:
    """All findings, the ground floor first. What needs torch is left out where torch is missing."""
    findings = [_python(), *_libraries()]
    if devices.version_of("torch"):
        try:
            findings += [*_gpus(), _quantization(), _attention(), _compile(), _several_gpus()]
        except (ImportError, OSError) as error:  # an installation that lacks a library of its own
            text = str(error).splitlines()[0]
            findings.append(Finding("problem", "libraries", f"cannot be loaded: {text}", f"install anew: {INSTALL}"))
    if devices.is_wsl():
        findings.append(_wsl())
    return [*findings, _memory(), _disk(), Finding("ok", "CPU", f"{devices.cpus()} cores")]


def show(findings: list[Finding], console: Console) -> None:
    """Print the findings, and a last line that sums them up."""
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    for width in (7, 12):
        table.add_column(no_wrap=True, min_width=width)
    table.add_column(overflow="fold")
    for finding in findings:
        table.add_row(Text(finding.level, STYLES[finding.level]), finding.what, Text(finding.found))
        if finding.mend:
            table.add_row("", "", Text(f"→ {finding.mend}"))
    # A table fills its last column with spaces, which would only be in the way elsewhere than on a screen.
    with console.capture() as capture:
        console.print(table)
    for line in capture.get().splitlines():
        console.print(Text.from_ansi(line.rstrip()), soft_wrap=True)
    counts = {level: sum(finding.level == level for finding in findings) for level in ("problem", "warning")}
    told = [f"{count} {level}{'s' * (count != 1)}" for level, count in counts.items() if count]
    verdict = "training cannot run here as it is set" if counts["problem"] else "training can run here"
    console.print(Text(f"{verdict}{': ' * bool(told)}{', '.join(told)}"))


# -- Python and libraries ----------------------------------------------------------------------------------------------


def _python() -> Finding:
    version = platform.python_version()
    wanted = metadata.metadata("packcorpus")["Requires-Python"] or ""
    if in_range(version, wanted):
        return Finding("ok", "Python", version)
    return Finding("problem", "Python", f"{version}, which is not {wanted}", "make clean, then make PYTHON=python3.12")


def _libraries() -> Iterator[Finding]:
    """The versions of what training needs, in one finding, and one more for each that is missing or out of range."""
    good = []
    for package, wanted in devices.training_needs().items():
        version = devices.version_of(package)
        if version is None:
            yield Finding("problem", package, f"is not installed; {wanted} is needed", INSTALL)
        elif in_range(version, wanted):
            good.append(f"{package} {version}")
        else:
            yield Finding("problem", package, f"{version} is not {wanted}", INSTALL)
    if good:
        yield Finding("ok", "libraries", ", ".join(good))


def in_range(version: str, wanted: str) -> bool:
    """Whether a version is within a range such as ">=2.8,<3"; local parts such as +cpu do not count."""
    bounds = re.findall(r"(>=|<)\s*([\w.]+)", wanted)
    return all((_numbers(version) >= _numbers(bound)) == (sign == ">=") for sign, bound in bounds)


def _numbers(version: str) -> list[int]:
    parts = takewhile(str.isdecimal, version.partition("+")[0].split("."))
    numbers = [int(part) for part in parts]
    return numbers + [0] * (4 - len(numbers))


# -- what computes -----------------------------------------------------------------------------------------------------


def _gpus() -> Iterator[Finding]:
    found = devices.gpus()
    for gpu in found:
        major, minor = gpu.capability
        yield Finding("ok", "GPU", f"{gpu.name}, {gpu.memory / GIB:.0f} GiB, compute capability {major}.{minor}")
    if found:
        lacking = devices.why_no_bf16()
        if lacking:
            yield Finding("warning", "precision", f"fp32: {lacking}", "a GPU of 2020 or later is several times faster")
        else:
            yield Finding("ok", "precision", "bf16")
    elif sign := devices.gpu_sign():
        mend = f"{devices.why_no_gpu()}; or train without it: --device cpu"
        yield Finding("problem", "GPU", f"is there ({sign}), and torch does not use it", mend)
    else:
        yield Finding("warning", "GPU", "none", "training runs on the CPU: enough for small models and for trying out")
        yield Finding("ok", "precision", "fp32")


def _quantization() -> Finding:
    kind = "cuda" if devices.gpu_count() else "cpu"
    if reason := devices.why_no_nf4(kind):
        return Finding("problem", "NF4", reason, "or train without it: --quantization none")
    return Finding("ok", "NF4", f"bitsandbytes {devices.version_of('bitsandbytes')} computes on the {_called(kind)}")


def _attention() -> Finding:
    import torch

    from train.model.attention import BACKENDS, why_not

    kind = "cuda" if devices.gpu_count() else "cpu"
    reasons = {name: why_not(name, torch.device(kind)) for name in BACKENDS}
    usable = ", ".join(name for name, reason in reasons.items() if not reason)
    missing = "; ".join(dict.fromkeys(reason for reason in reasons.values() if reason))
    if kind == "cpu" or not missing:
        return Finding("ok", "attention", usable)
    # sdpa is the default and always there; the others are for those who look for speed.
    return Finding("ok", "attention", f"{usable} ({missing})")


def _compile() -> Finding:
    if path := devices.compiler():
        return Finding("ok", "compiler", path)
    return Finding("warning", "compiler", "no C++ compiler; `compile: true` needs one", "sudo apt-get install g++")


def _several_gpus() -> Finding:
    count = devices.gpu_count()
    if count < 2:
        return Finding("ok", "processes", f"1, on the {_called('cuda' if count else 'cpu')}")
    if devices.has_nccl():
        return Finding("ok", "processes", f"{count}, one a GPU, over NCCL")
    return Finding(
        "problem", "processes", f"{count} GPUs, and torch has no NCCL", f"{devices.CUDA_BUILDS}; or use one: --gpus 1"
    )


def _called(kind: str) -> str:
    return "GPU" if kind == "cuda" else "CPU"


# -- what holds data ---------------------------------------------------------------------------------------------------


def _wsl() -> Finding:
    return Finding(
        "warning",
        "WSL",
        "rows are read into memory, since mapped files are slow here",
        "keep corpora in the Linux file system (~), not below /mnt/c; give WSL memory in .wslconfig",
    )


def _memory() -> Finding:
    free = devices.free_memory()
    if free < LITTLE_MEMORY:
        return Finding("warning", "memory", f"{free / GIB:.1f} GiB free", "end other programs, or take smaller models")
    return Finding("ok", "memory", f"{free / GIB:.1f} GiB free")


def _disk() -> Finding:
    folder = Path("data")
    free = devices.free_disk(folder)
    found = f"{free / GIB:.1f} GiB free in {folder}/"
    if free < LITTLE_DISK:
        return Finding("warning", "disk", found, "models and checkpoints need more: make room, or set `output`")
    return Finding("ok", "disk", found)
