"""`import train` is cheap, and all of its public names exist."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.commands import ROOT

from packcorpus import train


def test_import_loads_no_torch(tmp_path: Path) -> None:
    # The process is new and lacks torch, so a name that needs torch fails. It runs in a folder that is not on sys.path.
    code = (
        "import sys; sys.modules['torch'] = None; import train;"
        "print({'transformers', 'numpy', 'pyarrow'} & sys.modules.keys());"
        "from packcorpus.train import open_corpus; print({'transformers'} & sys.modules.keys())\n"
        "try:\n    from packcorpus.train import PackedDataset\nexcept ImportError as error:\n    print(error.name)"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-P", "-c", code]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.stdout.splitlines() == ["set()", "set()", "torch"], done.stderr


def test_every_public_name_is_found() -> None:
    for name in train.__all__:
        assert getattr(train, name) is not None
    assert set(train.__all__) <= set(dir(train))
    assert train.PackedDataset.__module__ == "packcorpus.train.data.dataset"
    with pytest.raises(AttributeError, match="'train' has no attribute 'packed_dataset'"):
        _ = train.packed_dataset
