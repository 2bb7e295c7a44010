"""`import train` is cheap, and its public names are those of its modules."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.commands import ROOT

import train


def run_python(code: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run code in a fresh process, in a folder that is not on its sys.path."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-P", "-c", code]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=120, check=False)


def test_import_loads_no_torch(tmp_path: Path) -> None:
    code = (
        "import sys, train; heavy = {'torch', 'transformers', 'numpy', 'pyarrow'};"
        "print(heavy & sys.modules.keys());"
        "from train import open_corpus; print({'torch', 'transformers'} & sys.modules.keys());"
        "from train import PackedDataset; print(PackedDataset.__module__, 'torch' in sys.modules)"
    )
    done = run_python(code, tmp_path)
    assert done.stdout.splitlines() == ["set()", "set()", "train.data.dataset True"], done.stderr


def test_every_public_name_is_found() -> None:
    for name in train.__all__:
        assert getattr(train, name) is not None
    assert set(train.__all__) <= set(dir(train))
    with pytest.raises(AttributeError, match="'train' has no attribute 'packed_dataset'"):
        _ = train.packed_dataset


def test_ranks_ignore_modules_of_the_user_with_our_names(tmp_path: Path) -> None:
    """A rank reports the unknown option: exit code 64, not 3 of these files."""
    for name in ("train", "tasks", "pipeline"):
        (tmp_path / f"{name}.py").write_text("import os\nprint('a module of the user', flush=True)\nos._exit(3)\n")
    code = (
        "from train.machine.launch import RankFailed, launch\n"
        "try:\n    launch(2, ['--manifest', 'none', '--no-such-option'])\n"
        "except RankFailed as failed:\n    print('exit code', failed.exit_code)"
    )
    done = run_python(code, tmp_path)
    assert done.stdout.splitlines() == ["exit code 64"], done.stderr
    assert "--no-such-option" in done.stderr
