"""The requested device and precision are in effect, or the run stops."""

from __future__ import annotations

import builtins
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from packcorpus.tasks.core.errors import PartMissing
from packcorpus.train.config import TrainingConfig
from packcorpus.train.machine import devices
from packcorpus.train.machine.devices import Device, Gpu

H200 = Gpu("NVIDIA H200", 150_000_000_000, (9, 0))
T4 = Gpu("Tesla T4", 15_000_000_000, (7, 5))
V100 = Gpu("Tesla V100-SXM2-32GB", 34_000_000_000, (7, 0))
P40 = Gpu("Tesla P40", 24_000_000_000, (6, 1))


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Fake a machine with these GPUs, or with the `sign` of a GPU that torch misses."""

    def make(*gpus: Gpu, sign: str | None = None, nf4: str | None = None) -> None:
        monkeypatch.setattr(devices, "gpus", lambda: list(gpus))
        monkeypatch.setattr(devices, "gpu_count", lambda: len(gpus))
        monkeypatch.setattr(devices, "gpu_sign", lambda: sign)
        monkeypatch.setattr(torch.cuda, "get_arch_list", list)
        monkeypatch.setattr(devices, "no_nf4_reason", lambda kind: nf4)

    return make


def config(**settings: Any) -> TrainingConfig:
    return TrainingConfig(**settings)


def refusal(call: Callable[[TrainingConfig], Any], **settings: Any) -> str:
    with pytest.raises(PartMissing) as error:
        call(config(**settings))
    message = str(error.value)
    assert "\n" not in message
    return message


# -- what is in effect -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gpus", "settings", "kind", "precision"),
    [
        ([], {}, "cpu", "fp32"),
        ([], {"device": "cpu", "precision": "fp32"}, "cpu", "fp32"),
        ([H200], {}, "cuda", "bf16"),
        ([H200], {"device": "cuda", "precision": "bf16"}, "cuda", "bf16"),
        ([H200], {"precision": "fp32"}, "cuda", "fp32"),
        ([H200], {"device": "cpu"}, "cpu", "fp32"),
        ([T4], {}, "cuda", "fp16"),
        ([T4], {"precision": "fp32"}, "cuda", "fp32"),
        ([H200], {"precision": "fp16"}, "cuda", "fp16"),
        ([V100], {}, "cuda", "fp16"),
        ([H200, T4], {}, "cuda", "fp16"),
        ([P40], {}, "cuda", "fp32"),
        ([T4, P40], {}, "cuda", "fp32"),
        ([P40], {"precision": "fp16"}, "cuda", "fp16"),
    ],
)
def test_auto_uses_what_is_available(
    gpus: list[Gpu], settings: dict[str, str], kind: str, precision: str, given: Callable[..., None]
) -> None:
    given(*gpus)
    device = devices.resolve(config(**settings))
    assert (device.kind, device.precision) == (kind, precision)
    assert device.dtype == {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[precision]
    assert device.name == gpus[0].name if kind == "cuda" else "CPU" in device.name


def test_each_process_has_a_gpu_of_its_own(given: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    a100 = Gpu("NVIDIA A100", 80_000_000_000, (8, 0))
    given(H200, a100)
    for rank, gpu in (("0", H200), ("1", a100)):
        monkeypatch.setenv("LOCAL_RANK", rank)
        assert devices.resolve(config()).name == gpu.name
    given(H200)  # the only one visible to this process
    assert devices.resolve(config()).name == H200.name


def test_an_unused_gpu_stops_the_run(given: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    given(sign="/dev/nvidia0")
    monkeypatch.setattr(torch.version, "cuda", None)
    for call in (devices.resolve, devices.ranks):
        for device in ("auto", "cuda"):
            message = refusal(call, device=device)
            assert "a GPU is present (/dev/nvidia0) but torch does not use it: torch" in message
            assert "is a CPU build; install a CUDA build" in message
            assert message.endswith("device: cpu")
        call(config(device="cpu"))


def test_cuda_without_a_gpu_stops_the_run(given: Callable[..., None]) -> None:
    given()
    assert refusal(devices.resolve, device="cuda").endswith("to train on the CPU, set device: auto or cpu")


@pytest.mark.parametrize(
    ("gpu", "precision", "why", "fix"),
    [
        (None, "bf16", "CPU", "auto, or train on a GPU"),
        (None, "fp16", "CPU", "auto, or train on a GPU"),
        (T4, "bf16", "Tesla T4 (compute capability 7.5) has no bf16", "auto or fp16"),
        (P40, "bf16", "Tesla P40 (compute capability 6.1) has no bf16", "auto or fp32"),
    ],
)
def test_a_precision_without_effect_stops_the_run(
    gpu: Gpu | None, precision: str, why: str, fix: str, given: Callable[..., None]
) -> None:
    given(*filter(None, [gpu]))
    message = refusal(devices.resolve, precision=precision)
    assert message.startswith(f"precision: {precision}")
    assert why in message
    assert message.endswith(f"set precision: {fix}")
    suggested = fix.split()[-1]
    if gpu:
        assert devices.resolve(config(precision=suggested)).precision == suggested


@pytest.mark.parametrize(
    ("codes", "gpu", "has_code"),
    [
        (["sm_75", "sm_80", "sm_90", "sm_100", "sm_120", "compute_120"], H200, True),
        (["sm_75", "sm_80", "sm_90"], T4, True),
        (["sm_75", "sm_80", "sm_90"], V100, False),  # as in builds for CUDA 13
        (["sm_50", "sm_60", "sm_70", "sm_90"], T4, True),
        (["sm_60", "sm_70"], H200, False),
        (["sm_60", "compute_70"], H200, True),
        (["sm_60"], P40, True),
        (["sm_61"], Gpu("P100", 1, (6, 0)), False),
        ([], V100, True),
        (["gfx90a", "gfx942"], V100, True),
    ],
)
def test_a_gpu_without_code_stops_the_run(
    codes: list[str], gpu: Gpu, has_code: bool, given: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    given(gpu)
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: codes)
    if has_code:
        devices.resolve(config())
    else:
        message = refusal(devices.resolve)
        assert f"has no code for {gpu.name} (compute capability" in message
        assert message.endswith("to train without it, set device: cpu")


@pytest.mark.parametrize("gpus", [[], [H200]])
def test_nf4_without_bitsandbytes_stops_the_run(gpus: list[Gpu], given: Callable[..., None]) -> None:
    given(*gpus, nf4="it lacks a library; install it")
    message = refusal(devices.resolve)
    assert message == (
        "quantization: nf4 cannot be used: it lacks a library; install it; to train without it, set quantization: none"
    )
    devices.resolve(config(quantization="none"))


@pytest.mark.parametrize(
    ("gpus", "settings", "count"),
    [
        ([], {}, 1),
        ([], {"gpus": 2}, 2),  # two processes on a CPU, over gloo
        ([H200] * 4, {}, 4),
        ([H200] * 4, {"gpus": 3}, 3),
        ([H200] * 4, {"device": "cpu"}, 1),
    ],
)
def test_one_process_per_gpu(gpus: list[Gpu], settings: dict[str, Any], count: int, given: Callable[..., None]) -> None:
    given(*gpus)
    assert devices.ranks(config(**settings)) == count


def test_more_gpus_than_available_stop_the_run(given: Callable[..., None]) -> None:
    given(H200, H200)
    assert "gpus: 3: torch sees only 2 here; set gpus: auto or a number up to 2" in refusal(devices.ranks, gpus=3)


# -- GPUs --------------------------------------------------------------------------------------------------------------


def test_reasons_why_torch_finds_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    assert devices.no_gpu_reason().startswith(f"torch {torch.__version__} is a CPU build")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    for hidden in ("", "-1"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
        assert devices.no_gpu_reason() == f"CUDA_VISIBLE_DEVICES={hidden} hides it; unset that variable"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert "--gpus all" in devices.no_gpu_reason()

    def too_old() -> None:
        raise RuntimeError(
            "The NVIDIA driver on your system is too old (found version 11040). Please update your GPU driver."
        )

    monkeypatch.setattr(torch.cuda, "init", too_old)
    assert devices.no_gpu_reason() == (
        "The NVIDIA driver on your system is too old (found version 11040) (torch is built for CUDA 13.0); "
        "update the driver or install a matching torch"
    )


@pytest.mark.parametrize(
    ("output", "code", "sign"),
    [
        ("GPU 0: NVIDIA GeForce RTX 4090 (UUID: GPU-1f)\n", 0, "nvidia-smi: GPU 0: NVIDIA GeForce RTX 4090"),
        ("No devices found.\n", 0, None),
        ("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.\n", 9, None),
    ],
)
def test_a_gpu_is_detected_by_nvidia_smi(
    output: str, code: int, sign: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "Path", lambda path: tmp_path / path.lstrip("/"))
    monkeypatch.setenv("PATH", str(tmp_path / "nowhere"))
    assert devices.gpu_sign() is None
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / "nvidia-smi").write_text("")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: subprocess.CompletedProcess([], code, output))
    assert devices.gpu_sign() == sign
    for place in ("proc/driver/nvidia/gpus/0000:01:00.0", "dev/nvidia0"):
        (tmp_path / place).mkdir(parents=True)
        assert devices.gpu_sign() == "/" + place.removesuffix("/0000:01:00.0")


# -- bitsandbytes ------------------------------------------------------------------------------------------------------


def test_bitsandbytes_works_here() -> None:
    assert devices.no_nf4_reason("cpu") is None


def test_a_broken_bitsandbytes_is_detected(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import bitsandbytes

    monkeypatch.chdir(tmp_path)  # not in the clone, which has `make extras`

    def without_library(*_: Any, **__: Any) -> None:
        raise RuntimeError("\nMethod 'cquantize' not available in CPU-only version of bitsandbytes.\nReinstall")

    with monkeypatch.context() as patch:
        patch.setattr(bitsandbytes.functional, "quantize_4bit", without_library)
        assert "(Method 'cquantize' not available in CPU-only version of bitsandbytes)" in str(
            devices.no_nf4_reason("cpu")
        )
    with monkeypatch.context() as patch:
        patch.setattr(bitsandbytes, "matmul_4bit", lambda *_, **__: torch.zeros(64, 64))
        assert "computes wrong results on this CPU (off by 1)" in str(devices.no_nf4_reason("cpu"))
    importing = builtins.__import__

    def refuse(name: str, *others: Any) -> Any:
        if name == "bitsandbytes":
            raise ImportError("libcudart.so.13: cannot open shared object file")
        return importing(name, *others)

    monkeypatch.setattr(builtins, "__import__", refuse)
    assert devices.no_nf4_reason("cuda") == (
        "bitsandbytes cannot be imported (libcudart.so.13: cannot open shared object file); "
        "run: pip install 'packcorpus[train]'"
    )


# -- other facts -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("files", "free"),
    [
        ({"/proc/meminfo": "MemTotal: 9 kB\nMemAvailable:    4000 kB\n"}, 4_096_000),
        # A container limited to 3 MB that uses 1 MB, 0.4 MB of which are cached files.
        (
            {
                "/proc/meminfo": "MemAvailable: 4000 kB\n",
                "/sys/fs/cgroup/memory.max": "3000000\n",
                "/sys/fs/cgroup/memory.current": "1000000\n",
                "/sys/fs/cgroup/memory.stat": "anon 5\ninactive_file 400000\n",
            },
            2_400_000,
        ),
        ({"/proc/meminfo": "MemAvailable: 1000 kB\n", "/sys/fs/cgroup/memory.max": "max\n"}, 1_024_000),
    ],
)
def test_free_memory(files: dict[str, str], free: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "_read", lambda path: files.get(path, ""))
    assert devices.free_memory() == free


def test_wsl_is_detected_by_its_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    for version, wsl in (("Linux version 5.15.167.4-microsoft-standard-WSL2", True), ("Linux version 6.8", False)):
        monkeypatch.setattr(devices, "_read", {"/proc/version": version}.get)
        assert devices.is_wsl() is wsl


def test_facts_of_this_machine() -> None:
    found = devices.version_of("torch")
    assert found in (torch.__version__, torch.__version__.partition("+")[0])  # the wheels of PyPI name no build
    assert devices.version_of("no-such-package") is None
    assert devices.cores() >= 1
    assert devices.free_memory() > 0
    assert devices.gpu_count() == len(devices.gpus())
    if not devices.gpu_count():
        assert devices.resolve(config(device="cpu")) == Device("cpu", "fp32", f"CPU, {devices.cores()} cores")
