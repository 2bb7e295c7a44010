"""Detect the capabilities of the machine, and choose the device of a run.

    torch, bitsandbytes, /dev, /proc ─gpus, gpu_sign, no_bf16_reason, no_nf4_reason, …─▶ facts
    facts + TrainingConfig ─resolve─▶ Device(kind, precision, name)     the device actually in effect
                           └─ranks──▶ number of processes

Functions import torch only if they need it, so a machine without torch can be examined too. A run stops if it would use
less than the settings request or than the machine has.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import subprocess
import warnings
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from packcorpus.tasks.core.errors import PartMissing
from packcorpus.tasks.core.process import cores
from packcorpus.tasks.core.process import free_disk as free_disk
from packcorpus.train.config import TrainingConfig
from packcorpus.train.machine.process import first_line

if TYPE_CHECKING:
    import torch

CUDA_BUILDS = "https://pytorch.org/get-started/locally"


@dataclass(frozen=True, slots=True)
class Gpu:
    """GPU that torch can use; `memory` in bytes, `capability` as (major, minor)."""

    name: str
    memory: int
    capability: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Device:
    """Device and precision of a run; `name` is for display."""

    kind: Literal["cuda", "cpu"]
    precision: Literal["bf16", "fp16", "fp32"]
    name: str

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of computations and of frozen weights that are not quantized."""
        import torch

        return {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[self.precision]


def resolve(config: TrainingConfig) -> Device:
    """Return the device and the precision that are actually in effect."""
    # This tries bitsandbytes on the GPU, so call it in the process that trains.
    kind, precision = _kind(config), config.precision
    if kind == "cuda" and (reason := no_code_reason()):
        raise PartMissing("no_gpu", f"{reason}; to train without it, set device: cpu")
    if config.quantization == "nf4" and (reason := no_nf4_reason(kind)):
        text = f"quantization: nf4 cannot be used: {reason}; to train without it, set quantization: none"
        raise PartMissing("no_nf4", text)
    if kind == "cpu" and precision in ("bf16", "fp16"):
        raise PartMissing(
            "no_bf16",
            f"precision: {precision} has no effect on a CPU, which computes in fp32 here; set precision: auto, or "
            "train on a GPU",
        )
    if kind == "cpu":
        return Device("cpu", "fp32", f"CPU, {cores()} cores")
    best = best_precision()
    if precision == "bf16" and best != "bf16":
        text = f"precision: bf16 cannot be used: {no_bf16_reason()}; set precision: auto or {best}"
        raise PartMissing("no_bf16", text)
    return Device("cuda", best if precision == "auto" else precision, gpus()[_own_gpu()].name)


def ranks(config: TrainingConfig) -> int:
    """Return the number of processes, one per GPU, without initializing CUDA."""
    if _kind(config) == "cpu":
        return 1 if config.gpus == "auto" else config.gpus
    count = gpu_count()
    if config.gpus == "auto":
        return count
    if config.gpus > count:
        raise PartMissing(
            "no_gpu", f"gpus: {config.gpus}: torch sees only {count} here; set gpus: auto or a number up to {count}"
        )
    return config.gpus


def check_libraries() -> None:
    """Raise PartMissing if packcorpus or a package of its `train` extra is missing."""
    if reason := not_installed_reason():
        raise PartMissing("library_missing", f"packcorpus {reason}")
    if missing := [name for name in training_needs() if version_of(name) is None or find_spec(name) is None]:
        raise PartMissing(
            "library_missing",
            f"training needs {', '.join(missing)}, which is not installed; run: {how_to_install()}",
        )


def not_installed_reason() -> str | None:
    """Return why the requirements are unknown, and the fix; None if they are known."""
    text = "runs from its source folder and is not installed in this Python, so its requirements are unknown; "
    return None if version_of("packcorpus") else f"{text}run: {how_to_install()}"


def how_to_install() -> str:
    """Return the command that installs the extra `train` here."""
    ours = Path(__file__).resolve().parents[2]  # of a clone, which has a Makefile
    if (ours / "Makefile").is_file() and Path.cwd().resolve() == ours:
        return "make extras"
    return f"pip install '{'packcorpus' if version_of('packcorpus') else ours}[train]'"


def training_needs() -> dict[str, str]:
    """Return the requirements of the `train` extra, as {"torch": ">=2.8", …}."""
    needs = {}
    for line in metadata.requires("packcorpus") or ():
        requirement, _, condition = line.partition(";")
        match = re.fullmatch(r"([\w.-]+)\s*(.*)", requirement.strip())
        if match and re.fullmatch(r"""\s*extra == ["']train["']\s*""", condition):
            needs[match[1]] = match[2]
    return needs


def check_reporting(config: TrainingConfig) -> None:
    """Raise PartMissing if a tool named by `report_to` is not installed."""
    for tool in config.trackers:
        if version_of(tool) is None:
            raise PartMissing("library_missing", f"report_to: {tool} is not installed; run: pip install {tool}")


def _kind(config: TrainingConfig) -> Literal["cuda", "cpu"]:
    if config.device == "cpu":
        return "cpu"
    if gpu_count():
        return "cuda"
    if sign := gpu_sign():
        raise PartMissing(
            "no_gpu",
            f"a GPU is present ({sign}) but torch does not use it: {no_gpu_reason()}; "
            "to train without it, set device: cpu",
        )
    if config.device == "cuda":
        raise PartMissing("no_gpu", f"device: cuda: {no_gpu_reason()}; to train on the CPU, set device: auto or cpu")
    return "cpu"


def _own_gpu() -> int:
    # A launcher may make only one GPU visible to each process.
    return int(os.environ.get("LOCAL_RANK", "0")) % gpu_count()


# -- GPUs --------------------------------------------------------------------------------------------------------------


def gpu_count() -> int:
    """Return the number of GPUs that torch can use."""
    import torch

    with warnings.catch_warnings():  # no_gpu_reason reports the reason
        warnings.simplefilter("ignore")
        return torch.cuda.device_count() if torch.cuda.is_available() else 0


def gpus() -> list[Gpu]:
    """Return the GPUs that torch can use; initializes CUDA if there is one."""
    import torch

    properties = [torch.cuda.get_device_properties(number) for number in range(gpu_count())]
    return [Gpu(gpu.name, gpu.total_memory, (gpu.major, gpu.minor)) for gpu in properties]


def gpu_sign() -> str | None:
    """Return evidence of an NVIDIA GPU, whether torch can use it or not."""
    if Path("/dev/nvidia0").exists():
        return "/dev/nvidia0"
    # The folder exists even if the driver is loaded without a GPU. In a container, it is the folder of the host.
    if any(Path("/proc/driver/nvidia/gpus").glob("*")):
        return "/proc/driver/nvidia/gpus"
    # On WSL the driver belongs to Windows, and nvidia-smi is the only visible part of it.
    if tool := shutil.which("nvidia-smi"):
        try:
            done = subprocess.run(  # noqa: S603 - the first of that name on PATH, as a shell would run it
                [tool, "-L"], capture_output=True, text=True, timeout=20, check=False
            )
        except (OSError, subprocess.TimeoutExpired):
            return None
        if done.returncode == 0 and done.stdout.startswith("GPU "):
            return f"nvidia-smi: {done.stdout.splitlines()[0].split(' (UUID')[0]}"
    return None


def no_gpu_reason() -> str:
    """Return why torch cannot use a GPU, and how to fix it."""
    import torch

    if torch.version.cuda is None and torch.version.hip is None:
        return f"torch {torch.__version__} is a CPU build; install a CUDA build ({CUDA_BUILDS})"
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    if hidden is not None and (not hidden.strip() or hidden.strip().startswith("-")):
        return f"CUDA_VISIBLE_DEVICES={hidden} hides it; unset that variable"
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        reason = str(error).strip().splitlines()[0].split(". Please", 1)[0].rstrip(".")
        return f"{reason} (torch is built for CUDA {torch.version.cuda}); update the driver or install a matching torch"
    return "torch finds none; if this is a container, start it with GPU access (--gpus all)"


def no_code_reason() -> str | None:
    """Return why torch has no code for one of its GPUs; None if it has code for all."""
    import torch

    # sm_75 runs on 7.5 to 7.9, and compute_75 also on all later ones. AMD uses other names, which are not compared.
    codes = [
        (kind, int(major), int(minor))
        for kind, major, minor in re.findall(r"\b(sm|compute)_(\d+)(\d)", " ".join(torch.cuda.get_arch_list()))
    ]
    for gpu in gpus() if codes else ():
        major, minor = gpu.capability
        if not any(
            (its_minor <= minor) if its_major == major else (kind == "compute" and its_major < major)
            for kind, its_major, its_minor in codes
        ):
            return (
                f"torch {torch.__version__} has no code for {gpu.name} (compute capability {major}.{minor}); install a "
                f"build for a CUDA version other than {torch.version.cuda} ({CUDA_BUILDS})"
            )
    return None


def no_bf16_reason() -> str | None:
    """Return why torch's GPUs cannot compute in bf16; None if all of them can."""
    # Turing and older GPUs emulate bf16, several times slower than fp32. Ampere is 8.0, and AMD reports 9 or more.
    for gpu in gpus():
        if gpu.capability < (8, 0):
            capability = ".".join(map(str, gpu.capability))
            return f"{gpu.name} (compute capability {capability}) has no bf16, which requires 8.0"
    return None


def best_precision() -> Literal["bf16", "fp16", "fp32"]:
    """Return the fastest precision in which all of torch's GPUs can train."""
    if no_bf16_reason() is None:
        return "bf16"
    # Volta (7.0) was the first with tensor cores. On most older GPUs, fp16 is slower than fp32.
    return "fp16" if all(gpu.capability >= (7, 0) for gpu in gpus()) else "fp32"


def no_nf4_reason(kind: str) -> str | None:
    """Return why NF4 fails and how to fix it; None if a small product is right."""
    import torch

    logging.getLogger("bitsandbytes").setLevel(logging.CRITICAL)  # it logs twenty lines if its library cannot be loaded
    try:
        from bitsandbytes import functional, matmul_4bit
    except ImportError as error:
        return f"bitsandbytes cannot be imported ({first_line(error)}); run: {how_to_install()}"
    version, here = metadata.version("bitsandbytes"), called(kind)
    device = f"cuda:{_own_gpu()}" if kind == "cuda" else kind
    try:
        weights = torch.linspace(-1, 1, 64 * 64, device=device).reshape(64, 64)
        packed, state = functional.quantize_4bit(weights, quant_type="nf4", compress_statistics=True)
        product = matmul_4bit(torch.eye(64, device=device), packed.t(), quant_state=state)
        deviation = float((product - weights.t()).abs().max())
    except Exception as failure:  # RuntimeError, AttributeError, NotImplementedError, depending on the backend
        fix = "reinstall it"
        if kind == "cuda":
            fix = f"install a release built for CUDA {torch.version.cuda} (for details run python -m bitsandbytes)"
        return f"bitsandbytes {version} does not work on this {here} ({first_line(failure)}); {fix}"
    # Half of the widest gap between two of NF4's 16 values is 0.152.
    wrong = f"computes wrong results on this {here} (off by {deviation:.2g}); install another release"
    return f"bitsandbytes {version} {wrong}" if deviation > 0.16 else None


def called(kind: str) -> str:
    """Return the name of a kind of device: GPU or CPU."""
    return "GPU" if kind == "cuda" else "CPU"


def has_nccl() -> bool:
    """Return whether several GPUs can train together."""
    import torch

    return torch.distributed.is_available() and torch.distributed.is_nccl_available()


# -- the rest of the machine -------------------------------------------------------------------------------------------


def version_of(package: str) -> str | None:
    """Return the version of a distribution; None if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def processes_here(unknown: int = 1) -> int:
    """Return the number of ranks on this machine; `unknown` if no launcher set it."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", unknown))


def is_wsl() -> bool:
    """Return whether this Linux runs inside Windows (WSL)."""
    return "microsoft" in _read("/proc/version").lower()


def free_memory() -> int:
    """Return the bytes of memory available without swapping."""
    # The limit of a container is respected. macOS does not report available memory.
    for line in _read("/proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            free = 1024 * int(line.split()[1])
            break
    else:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    limit, used = (_read(f"/sys/fs/cgroup/memory.{name}").strip() for name in ("max", "current"))
    if not (limit.isdecimal() and used.isdecimal()):
        return free
    # The cgroup counts cached files as used, although they can be evicted.
    cached = re.search(r"^inactive_file (\d+)$", _read("/sys/fs/cgroup/memory.stat"), re.M)
    return max(0, min(free, int(limit) - int(used) + int(cached[1] if cached else 0)))


def compiler() -> str | None:
    """Return the C++ compiler that torch.compile would use; None if there is none."""
    return next(filter(None, map(shutil.which, (os.environ.get("CXX", "c++"), "g++", "clang++"))), None)


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
