"""Only our own lines reach the user."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

WARNING = "logging.getLogger('bitsandbytes.backends').warning('Failed to load CPU gemm_4bit_forward')"


@pytest.mark.parametrize("name", ["train", "train.__main__", "train.data.corpus"])
def test_bitsandbytes_does_not_warn_on_import(name: str, tmp_path: Path) -> None:
    code = f"import logging, packcorpus.{name}; {WARNING}"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stderr == ""
