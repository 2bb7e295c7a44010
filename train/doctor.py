"""Report whether this machine can train, and how to fix problems.

    machine ─examine─▶ [Finding(level, topic, found, fix), …] ─show─▶ one line each, with its fix below
                                                             └─main─▶ 0, or 69 if training cannot run

ok: nothing to do. warning: training runs, but not as well as it could. problem: training fails with the default
settings.
"""

from __future__ import annotations

import json
import platform
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from itertools import takewhile
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.table import Table
from rich.text import Text

from packcorpus.tasks.core.errors import PackError, PartMissing, UsageError
from packcorpus.tasks.core.printable import counted
from packcorpus.tasks.core.process import cores
from packcorpus.tasks.storage.corpus_folder import checked_folder
from packcorpus.tasks.storage.manifest import load_manifest
from packcorpus.train.config import TOY, Parser, load_training_config
from packcorpus.train.data.corpus import open_corpus
from packcorpus.train.machine import devices
from packcorpus.train.measures import advise

GIB = 1 << 30

# The small Llama trains in 2 GiB. An 8B model in NF4 needs 6 GiB to load.
LITTLE_MEMORY = 4 * GIB
# An 8B model has 16 GB. Two checkpoints of its adapter are kept, each 0.5 GB.
LITTLE_DISK = 20 * GIB
DISK_FIX = "models and checkpoints need more: free some space, or set `output`"

CORPORA = 3  # newest corpora whose tokenizers are compared with AutoTokenizer

STYLES = {"ok": "green", "warning": "yellow", "problem": "bold red"}

# Packages with kernels for convolutions, scans, and linear attention. transformers uses them if they are installed.
STATE_KERNELS = ("causal-conv1d", "mamba-ssm", "flash-linear-attention")


@dataclass(frozen=True, slots=True)
class Finding:
    """Result of one check; `fix` is empty if nothing needs fixing."""

    level: Literal["ok", "warning", "problem"]
    topic: str
    found: str
    fix: str = ""


def main(arguments: Sequence[str] = (), console: Console | None = None) -> int:
    """Print the findings and return 0, or 69 if training cannot run here."""
    given = parser().parse_args(list(arguments))
    console = console or Console(markup=False, emoji=False, highlight=False)
    if given.base_model:
        return _show_what_fits(given.base_model, given.corpus, console)
    if given.corpus:
        raise UsageError("bad_command_line", f"--corpus {given.corpus}: needs --base-model, whose memory is estimated")
    findings = examine()
    show(findings, console)
    return PartMissing.exit_code if any(finding.level == "problem" for finding in findings) else 0


def parser() -> Parser:
    """Build the parser of the command."""
    text = "Report what this machine can train with or, with --base-model, which rows of a model fit on which card."
    prog = "packcorpus train doctor"
    ours = Parser(prog=prog, usage=f"{prog} [OPTION…]", description=text, allow_abbrev=False)
    text = "a folder with a config.json, or a Hugging Face name, of which only config.json is downloaded"
    ours.add_argument("--base-model", metavar="MODEL", help=text)
    text = "corpus whose row lengths and trained tokens are used: a manifest, a name, or a folder"
    ours.add_argument("--corpus", metavar="CORPUS", help=text)
    ours.add_argument("--debug", action="store_true", help="print a traceback if an error occurs")
    return ours


def _show_what_fits(base: str, corpus: str | None, console: Console) -> int:
    opened = open_corpus(corpus) if corpus else None
    settings = load_training_config(overrides={"base_model": json.dumps(base)})
    if settings.base_model is None:
        raise UsageError("bad_command_line", f"--base-model {TOY}: fits on every card; name the model to estimate")
    devices.check_libraries()
    from packcorpus.train import fits

    fits.show(fits.fits_of(base, settings, opened), console)
    return 0


def examine() -> list[Finding]:
    """Return all findings, the most basic first."""
    findings = [*_libraries()]
    if devices.version_of("torch"):
        try:
            findings += [*_gpus(), *_compute(), *_tokenizers()]
        except (ImportError, OSError) as error:  # an installed package that lacks a shared library
            text = str(error).splitlines()[0]
            findings.append(
                Finding("problem", "libraries", f"cannot be loaded: {text}", f"reinstall: {devices.how_to_install()}")
            )
    findings += [Finding("warning", "WSL", advice.name, advice.action) for advice in advise({"wsl": devices.is_wsl()})]
    memory, disk = devices.free_memory(), devices.free_disk(Path("data"))
    for topic, free, little, text, fix in (
        ("memory", memory, LITTLE_MEMORY, "free", "close other programs, or use a smaller model"),
        ("disk", disk, LITTLE_DISK, "free in data/", DISK_FIX),
    ):
        if free is None:
            continue
        text = f"{free / GIB:.1f} GiB {text}"
        findings.append(Finding("warning", topic, text, fix) if free < little else Finding("ok", topic, text))
    return [*findings, Finding("ok", "CPU", f"{cores()} cores")]


def show(findings: list[Finding], console: Console) -> None:
    """Print the findings and a summary line."""
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    for width in (7, 12):
        table.add_column(no_wrap=True, min_width=width)
    table.add_column(overflow="fold")
    for finding in findings:
        table.add_row(Text(finding.level, STYLES[finding.level]), finding.topic, Text(finding.found))
        if finding.fix:
            table.add_row("", "", Text(f"→ {finding.fix}"))
    # rich pads the last column of a table with spaces, which are unwanted in a file or a pipe.
    with console.capture() as capture:
        console.print(table)
    for line in capture.get().splitlines():
        console.print(Text.from_ansi(line.rstrip()), soft_wrap=True)
    counts = {level: sum(finding.level == level for finding in findings) for level in ("problem", "warning")}
    summary = [counted(count, level) for level, count in counts.items() if count]
    verdict = "training cannot run here with the default settings" if counts["problem"] else "training can run here"
    console.print(Text(f"{verdict}{': ' * bool(summary)}{', '.join(summary)}"))


# -- Python and libraries ----------------------------------------------------------------------------------------------


def _libraries() -> Iterator[Finding]:
    """Yield findings for Python, each unusable package, and all usable ones."""
    version = platform.python_version()
    reason = devices.not_installed_reason()  # then the requirements are unknown
    wanted = "" if reason else metadata.metadata("packcorpus")["Requires-Python"] or ""
    if in_range(version, wanted):
        yield Finding("ok", "Python", version)
    else:
        text = f"{version} is not supported ({wanted} is required)"
        yield Finding("problem", "Python", text, "use a Python of that range")
    if reason:
        text, _, fix = reason.partition("; ")
        yield Finding("problem", "packcorpus", text, fix)
        return
    good, install = [], devices.how_to_install()
    for package, wanted in devices.training_needs().items():
        installed = devices.version_of(package)
        if installed is None:
            yield Finding("problem", package, f"not installed; {wanted} is required", install)
        elif in_range(installed, wanted):
            good.append(f"{package} {installed}")
        else:
            yield Finding("problem", package, f"{installed} is not supported ({wanted} is required)", install)
    if good:
        yield Finding("ok", "libraries", ", ".join(good))


def in_range(version: str, wanted: str) -> bool:
    """Return whether a version, without its local part, is in a range like ">=2.8,<3"."""

    def numbers(text: str) -> list[int]:
        found = [int(part) for part in takewhile(str.isdecimal, text.partition("+")[0].split("."))]
        return found + [0] * (4 - len(found))

    bounds = re.findall(r"(>=|<)\s*([\w.]+)", wanted)
    return all((numbers(version) >= numbers(bound)) == (sign == ">=") for sign, bound in bounds)


# -- compute -----------------------------------------------------------------------------------------------------------


def _gpus() -> Iterator[Finding]:
    found = devices.gpus()
    for gpu in found:
        major, minor = gpu.capability
        yield Finding("ok", "GPU", f"{gpu.name}, {gpu.memory / GIB:.0f} GiB, compute capability {major}.{minor}")
    if found:
        if reason := devices.no_code_reason():
            text, _, fix = reason.partition("; ")
            yield Finding("problem", "GPU", text, fix)
        if reason := devices.no_bf16_reason():
            best = {"fp16": "fp16 with loss scaling", "fp32": "fp32"}[devices.best_precision()]
            yield Finding(
                "warning", "precision", f"{best}: {reason}", "a GPU from 2020 or later is several times faster"
            )
        else:
            yield Finding("ok", "precision", "bf16")
    elif sign := devices.gpu_sign():
        fix = f"{devices.no_gpu_reason()}; or train without it: --device cpu"
        yield Finding("problem", "GPU", f"present ({sign}), but torch does not use it", fix)
    else:
        yield Finding("warning", "GPU", "none", "training runs on the CPU: enough for small models and experiments")
        yield Finding("ok", "precision", "fp32")


def _compute() -> Iterator[Finding]:
    """Yield findings for NF4, attention, kernels, the compiler, and processes."""
    count = devices.gpu_count()
    kind = "cuda" if count else "cpu"
    if reason := devices.no_nf4_reason(kind):
        yield Finding("problem", "NF4", reason, "or train without it: --quantization none")
    else:
        text = f"bitsandbytes {devices.version_of('bitsandbytes')} works on the {devices.called(kind)}"
        yield Finding("ok", "NF4", text)
    yield _attention(kind)
    versions = {package: devices.version_of(package) for package in STATE_KERNELS}
    found = [f"{package} {version}" for package, version in versions.items() if version]
    slow = "Mamba and linear-attention models run their slow reference code"
    if missing := ", ".join(package for package, version in versions.items() if not version):
        found.append(f"not installed: {missing}: {slow}")
    elif not count:
        found.append(f"not used, because they need a GPU: {slow}")
    yield Finding("ok", "kernels", "; ".join(found))
    if path := devices.compiler():
        yield Finding("ok", "compiler", path)
    else:
        text = "no C++ compiler, which `compile: true` needs"
        yield Finding("warning", "compiler", text, "sudo apt-get install g++")
    if count < 2:
        yield Finding("ok", "processes", f"1, on the {devices.called(kind)}")
    elif devices.has_nccl():
        yield Finding("ok", "processes", f"{count}, one per GPU, over NCCL")
    else:
        fix = f"{devices.CUDA_BUILDS}; or use one: --gpus 1"
        yield Finding("problem", "processes", f"{count} GPUs, but torch has no NCCL", fix)


def _attention(kind: str) -> Finding:
    import torch

    from packcorpus.train.model.attention import BACKENDS, unavailable_backends

    reasons = unavailable_backends(torch.device(kind))
    usable = ", ".join(name for name in BACKENDS if name not in reasons)
    missing = "; ".join(dict.fromkeys(reasons.values()))
    # A missing backend costs only speed, because sdpa, the default, is always available.
    return Finding("ok", "attention", f"{usable} ({missing})" if missing and kind == "cuda" else usable)


# -- corpora -----------------------------------------------------------------------------------------------------------


def _tokenizers() -> Iterator[Finding]:
    """Yield a finding for the tokenizer of each of the newest corpora of this folder."""
    # A corpus whose files are missing is left out, and so is one that uses the file of its tokenizer as it is.
    from packcorpus.train.model.base_model import compare_rows, is_as_it_is

    for path in sorted(Path("manifests").glob("*.json"), key=lambda path: path.stat().st_mtime)[-CORPORA:]:
        try:
            manifest = load_manifest(path)
            folder = checked_folder(manifest, path)
            if is_as_it_is(manifest, folder):
                continue
            found = compare_rows(manifest, folder, folder / "tokenizer")
        except PackError:
            continue
        name = f"{manifest.name} {manifest.key[:12]}"
        if problem := found.difference or found.failure:
            yield Finding("warning", "tokenizer", f"{name}: {problem}", "pack the corpus again with this version")
        elif found.texts:
            yield Finding("ok", "tokenizer", f"{name}: {found.texts} texts have the tokens of AutoTokenizer")
