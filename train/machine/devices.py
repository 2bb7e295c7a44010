"""What the machine has, as plain values, and what of it a run uses.

    torch, bitsandbytes, /dev, /proc ─gpus, unused_gpu, why_no_bf16, why_no_nf4, …─▶ facts
    facts + TrainingConfig ─resolve─▶ Device(kind, precision, name)     what is really in effect
                           └─ranks──▶ number of processes

Every fact comes from one small function. torch is imported where it is needed, so that a machine without it can be
looked at, too. A run that would go on with less than was asked for, or with less than the machine has, is stopped.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import warnings
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from tasks.core.errors import PartMissing
from train.config import TrainingConfig

CUDA_BUILDS = "https://pytorch.org/get-started/locally"


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU that torch can use; `memory` in bytes, `capability` as (major, minor)."""

    name: str
    memory: int
    capability: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Device:
    """Where a run computes, and in which precision. `name` is for people."""

    kind: Literal["cuda", "cpu"]
    precision: Literal["bf16", "fp32"]
    name: str

    @property
    def bf16(self) -> bool:
        return self.precision == "bf16"


def resolve(config: TrainingConfig) -> Device:
    """The device and the precision that are really in effect.

    Raises PartMissing where a GPU is there and not used (unless `device: cpu` says so), where the GPU, bf16 or NF4 that
    is asked for is not to be had. It tries bitsandbytes on the GPU, so it is for the process that trains.
    """
    kind = _kind(config)
    if config.quantization == "nf4" and (reason := why_no_nf4(kind)):
        raise PartMissing(
            "no_nf4", f"quantization: nf4 cannot be used: {reason}; or train without it: quantization: none"
        )
    if kind == "cpu":
        if config.precision == "bf16":
            raise PartMissing(
                "no_bf16",
                "precision: bf16 is not in effect on a CPU, which computes in fp32 here; "
                "set precision: auto, or train on a GPU",
            )
        return Device("cpu", "fp32", f"CPU, {cpus()} cores")
    lacking = why_no_bf16()
    if config.precision == "bf16" and lacking:
        raise PartMissing("no_bf16", f"precision: bf16 cannot be used: {lacking}; set precision: auto or fp32")
    fp32 = config.precision == "fp32" or lacking
    return Device("cuda", "fp32" if fp32 else "bf16", gpus()[_own_gpu()].name)


def ranks(config: TrainingConfig) -> int:
    """How many processes train: one a GPU; on a CPU one, or as many as `gpus` says. CUDA is not initialised.

    Raises PartMissing as `resolve` does, and where `gpus` is more than there are.
    """
    if _kind(config) == "cpu":
        return 1 if config.gpus == "auto" else config.gpus
    count = gpu_count()
    if config.gpus == "auto":
        return count
    if config.gpus > count:
        raise PartMissing(
            "no_gpu", f"gpus: {config.gpus}: torch sees {count} here; set gpus: auto or a number up to {count}"
        )
    return config.gpus


def check_libraries() -> None:
    """Raises PartMissing where what the extra `train` installs is not there."""
    missing = [name for name in training_needs() if version_of(name) is None or not _is_found(name)]
    if missing:
        raise PartMissing(
            "library_missing", f"training needs {', '.join(missing)}, not installed here; install with: make extras"
        )


def _is_found(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ImportError:
        return False


def training_needs() -> dict[str, str]:
    """What the extra `train` asks for, as {"torch": ">=2.8", …}."""
    found = {}
    for line in metadata.requires("packcorpus") or ():
        requirement, _, condition = line.partition(";")
        match = re.fullmatch(r"([\w.-]+)\s*(.*)", requirement.strip())
        if match and re.fullmatch(r"""\s*extra == ["']train["']\s*""", condition):
            found[match[1]] = match[2]
    return found


def check_reporting(config: TrainingConfig) -> None:
    """Raises PartMissing where the tool that `report_to` names is not installed."""
    tool = config.report_to
    if tool != "none" and version_of(tool) is None:
        raise PartMissing(
            "library_missing", f"report_to: {tool} is not installed here; install it with: pip install {tool}"
        )


def _kind(config: TrainingConfig) -> Literal["cuda", "cpu"]:
    if config.device == "cpu":
        return "cpu"
    if gpu_count():
        return "cuda"
    if sign := gpu_sign():
        raise PartMissing(
            "no_gpu",
            f"a GPU is there ({sign}) and torch does not use it: {why_no_gpu()}; "
            "or train without it all the same: device: cpu",
        )
    if config.device == "cuda":
        raise PartMissing("no_gpu", f"device: cuda: {why_no_gpu()}; or train on the CPU: device: auto or cpu")
    return "cpu"


def _own_gpu() -> int:
    """Number of the GPU of this process; a launcher may also show each process a single one."""
    return int(os.environ.get("LOCAL_RANK", "0")) % gpu_count()


# -- GPUs --------------------------------------------------------------------------------------------------------------


def gpu_count() -> int:
    """GPUs that torch can use."""
    import torch

    with warnings.catch_warnings():  # what is wrong is said by why_no_gpu
        warnings.simplefilter("ignore")
        return torch.cuda.device_count() if torch.cuda.is_available() else 0


def gpus() -> list[Gpu]:
    """The GPUs that torch can use; CUDA is initialised where there is one."""
    import torch

    found = [torch.cuda.get_device_properties(number) for number in range(gpu_count())]
    return [Gpu(gpu.name, gpu.total_memory, (gpu.major, gpu.minor)) for gpu in found]


def gpu_sign() -> str | None:
    """What says that an NVIDIA GPU is there, whether torch can use it or not."""
    if Path("/dev/nvidia0").exists():
        return "/dev/nvidia0"
    # The folder stays when the driver is loaded without a GPU; within a container it is the host's.
    if any(Path("/proc/driver/nvidia/gpus").glob("*")):
        return "/proc/driver/nvidia/gpus"
    # On WSL the driver is Windows', and nvidia-smi all that is seen of it.
    if tool := shutil.which("nvidia-smi"):
        try:
            done = subprocess.run(  # noqa: S603 - the first of that name on PATH, as a shell would take it
                [tool, "-L"], capture_output=True, text=True, timeout=20, check=False
            )
        except (OSError, subprocess.TimeoutExpired):
            return None
        if done.returncode == 0 and done.stdout.startswith("GPU "):
            return f"nvidia-smi: {done.stdout.splitlines()[0].split(' (UUID')[0]}"
    return None


def why_no_gpu() -> str:
    """Why torch can use no GPU, and how to mend it."""
    import torch

    if torch.version.cuda is None and torch.version.hip is None:
        return f"torch {torch.__version__} is a build for the CPU; install one for CUDA ({CUDA_BUILDS})"
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    if hidden is not None and (not hidden.strip() or hidden.strip().startswith("-")):
        return f"CUDA_VISIBLE_DEVICES={hidden} hides it; unset it"
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        said = str(error).strip().splitlines()[0].split(". Please", 1)[0].rstrip(".")
        return f"{said} (torch is built for CUDA {torch.version.cuda}); update the driver or install another torch"
    return "torch finds none; in a container, start it with access to the GPU (--gpus all)"


def why_no_bf16() -> str | None:
    """Why the GPUs that torch uses do not compute in bf16; None where all of them do."""
    for gpu in gpus():
        # Turing and older emulate it, several times slower than fp32. 8.0 is Ampere; AMD reports 9 and more.
        if gpu.capability < (8, 0):
            major, minor = gpu.capability
            return f"{gpu.name} (compute capability {major}.{minor}) has no bf16, which came with 8.0"
    return None


def why_no_nf4(kind: str) -> str | None:
    """Why bitsandbytes cannot quantise on a device, and how to mend it; None where a small product comes out right."""
    # bitsandbytes logs an error of twenty lines where its library cannot be loaded.
    import logging

    import torch

    logging.getLogger("bitsandbytes").setLevel(logging.CRITICAL)
    try:
        from bitsandbytes import functional, matmul_4bit
    except ImportError as error:
        return f"bitsandbytes cannot be imported ({_first_line(error)}); install it with: make extras"
    version = metadata.version("bitsandbytes")
    device = f"cuda:{_own_gpu()}" if kind == "cuda" else kind
    try:
        weights = torch.linspace(-1, 1, 64 * 64, device=device).reshape(64, 64)
        packed, state = functional.quantize_4bit(weights, quant_type="nf4", compress_statistics=True)
        product = matmul_4bit(torch.eye(64, device=device), packed.t(), quant_state=state)
        off = float((product - weights.t()).abs().max())
    except Exception as failure:  # RuntimeError, AttributeError, NotImplementedError: whatever the backend lacks
        return (
            f"bitsandbytes {version} does not work on {_place(kind)} ({_first_line(failure)}); install a release "
            f"built for CUDA {torch.version.cuda} (python -m bitsandbytes says more)"
            if kind == "cuda"
            else f"bitsandbytes {version} does not work on {_place(kind)} ({_first_line(failure)}); install it anew"
        )
    # Half of the widest gap between two of NF4's 16 values is 0.152.
    if off > 0.16:
        return f"bitsandbytes {version} computes wrong on {_place(kind)} (off by {off:.2g}); install another release"
    return None


def _place(kind: str) -> str:
    return "this GPU" if kind == "cuda" else "this CPU"


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[0] if lines else type(error).__name__)[:160].rstrip(".")


def has_nccl() -> bool:
    """Whether several GPUs can work together."""
    import torch

    return bool(torch.distributed.is_available() and torch.distributed.is_nccl_available())


# -- the rest of the machine -------------------------------------------------------------------------------------------


def version_of(package: str) -> str | None:
    """Version of an installed distribution; None where it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def cpus() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def is_wsl() -> bool:
    """Whether this Linux runs within Windows."""
    return "microsoft" in _read("/proc/version").lower()


def free_memory() -> int:
    """Bytes of memory that can be had without swapping: the machine's, or what a container's limit leaves.

    Where the system does not tell (macOS), half of what there is.
    """
    for line in _read("/proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            free = 1024 * int(line.split()[1])
            break
    else:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    limit, used = (_read(f"/sys/fs/cgroup/memory.{name}").strip() for name in ("max", "current"))
    if not (limit.isdecimal() and used.isdecimal()):
        return free
    # Files that were read and can be forgotten again count as used there.
    cached = re.search(r"^inactive_file (\d+)$", _read("/sys/fs/cgroup/memory.stat"), re.M)
    return max(0, min(free, int(limit) - int(used) + int(cached[1] if cached else 0)))


def free_disk(path: Path) -> int:
    """Bytes that can be written where `path` is, or would be."""
    path = path.absolute()
    while not path.exists():
        path = path.parent
    return shutil.disk_usage(path).free


def compiler() -> str | None:
    """The C++ compiler that torch.compile would take."""
    return next(filter(None, map(shutil.which, (os.environ.get("CXX", "c++"), "g++", "clang++"))), None)


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
