"""A failed allocation is recognized, and the process is replaced."""

from __future__ import annotations

import os
import sys

import pytest
import torch
from support.commands import ROOT, process

from packcorpus.train.__main__ import ALLOCATOR, _set_environment
from packcorpus.train.machine.process import described, is_shortage, may_be_shortage

ILLEGAL = torch.AcceleratorError("CUDA error: an illegal memory access was encountered.\nSearch for it in the docs")


@pytest.mark.parametrize(
    ("error", "shortage", "maybe"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), True, True),
        (torch.AcceleratorError("CUDA error: out of memory\nCUDA kernel errors might be reported later"), True, True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True, True),
        (RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"), True, True),
        (RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"), True, True),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate"), True, True),
        (ILLEGAL, False, True),
        (RuntimeError("The size of tensor a (3) must match the size of tensor b (4)"), False, False),
        (ValueError("out of memory"), False, False),
    ],
)
def test_failed_allocations_are_recognized(error: Exception, shortage: bool, maybe: bool) -> None:
    assert (is_shortage(error), may_be_shortage(error)) == (shortage, maybe)


def test_what_happened_is_described_in_a_few_words() -> None:
    assert described(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")) == "ran out of memory"
    assert described(ILLEGAL) == "failed (CUDA error: an illegal memory access was encountered)"
    assert described(torch.AcceleratorError("")) == "failed (AcceleratorError)"


# Stands for the training command: it reports its process id, its files, and whether signals wait.
REPORT = """
import os, signal
files = sorted(int(name) for name in os.listdir("/proc/self/fd"))[:-1]
print(os.getpid(), files, {signal.SIGINT, signal.SIGTERM} <= signal.pthread_sigmask(signal.SIG_BLOCK, []))
"""
RESTARTS = """
import os, sys
from packcorpus.train.machine.process import restart
os.set_inheritable(os.open(os.devnull, os.O_RDONLY), True)
real = os.execv
os.execv = lambda path, words: (print(os.getpid(), words[1:], flush=True), real(path, [path, "-c", sys.argv[1]]))
restart(["--manifest", "x"], "why")
"""


def test_the_process_is_replaced_by_the_same_command() -> None:
    # Only the standard files stay open. Signals wait until the new process can report them.
    done = process(ROOT, sys.executable, "-c", RESTARTS, REPORT, PYTHONPATH=str(ROOT))
    before, after = done.stdout.splitlines()
    pid = before.split()[0]
    assert before == f"{pid} ['-P', '-m', 'packcorpus.train', '--manifest', 'x']"
    assert after == f"{pid} [0, 1, 2] True"
    assert done.stderr == "why\n"


@pytest.mark.parametrize("name", ALLOCATOR)
def test_the_allocator_of_a_gpu_is_set_unless_the_user_has_set_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for given, expected in (
        ({}, {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}),
        ({name: "max_split_size_mb:64"}, {name: "max_split_size_mb:64"}),
    ):
        monkeypatch.setattr(os, "environ", dict(given))
        _set_environment()
        assert {name: os.environ[name] for name in ALLOCATOR if name in os.environ} == expected
