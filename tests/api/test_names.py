"""`import packcorpus` is cheap, and its public names exist."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.commands import ROOT

import packcorpus

ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def python(folder: Path, *words: str, path: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Run a new Python in a folder that is not on sys.path."""
    environment = ENVIRONMENT | {"PYTHONPATH": str(path)}
    command = [sys.executable, "-P", *words]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def test_import_loads_nothing(tmp_path: Path) -> None:
    code = (
        "import sys; before = {*sys.modules}; import packcorpus; new = {*sys.modules} - before;"
        "print(*sorted({name.partition('.')[0] for name in new} - sys.stdlib_module_names));"
        "packcorpus.open, packcorpus.pack, packcorpus.UsageError;"
        "print({'torch', 'transformers', 'luigi', 'datasets'} & {*sys.modules})"
    )
    done = python(tmp_path, "-c", code)
    assert done.stdout.splitlines() == ["packcorpus", "set()"], done.stderr


@pytest.mark.parametrize("name", ["PackedDataset", "Collator", "sft_dataset", "weigh_loss"])
def test_a_name_of_the_extra_names_the_command_that_installs_it(name: str, tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['torch'] = sys.modules['datasets'] = None\n"
        "import packcorpus\n"
        f"try:\n    packcorpus.{name}\n"
        "except packcorpus.PartMissing as error:\n    print(error.code, error)"
    )
    done = python(tmp_path, "-c", code)
    library = "datasets" if name == "sft_dataset" else "torch"
    assert done.stdout == f"E721 {library} is not installed; run: pip install 'packcorpus[train]'\n", done.stderr


def test_every_public_name_is_found() -> None:
    for name in packcorpus.__all__:
        assert getattr(packcorpus, name) is not None
    assert set(packcorpus.__all__) <= set(dir(packcorpus))
    assert packcorpus.PackedDataset.__module__ == "packcorpus.train.data.dataset"
    with pytest.raises(AttributeError, match="'packcorpus' has no attribute 'packed_dataset'"):
        _ = packcorpus.packed_dataset


@pytest.mark.parametrize("lost", ["absent", "file"])
def test_a_copy_without_its_links_says_so_in_one_line(lost: str, tmp_path: Path) -> None:
    """A ZIP file has no links, and a checkout with core.symlinks=false has files."""
    copy = tmp_path / "copy" / "packcorpus"
    copy.mkdir(parents=True)
    for file in (ROOT / "packcorpus").glob("*.py"):
        shutil.copy(file, copy)
    if lost == "file":
        for name in ("pipeline", "tasks", "train"):
            (copy / name).write_text(f"../{name}")
    problem = f"{copy / 'pipeline'}: is not a folder, so this copy of packcorpus is incomplete"
    line = f"E722 error: {problem}; install it with pip, or clone it again with symbolic links"
    command = python(tmp_path, "-m", "packcorpus", "list", path=copy.parent)
    assert (command.returncode, command.stdout, command.stderr) == (69, "", f"{line}\n")
    script = python(tmp_path, "-c", "import packcorpus", path=copy.parent)
    assert script.stderr.splitlines()[-1] == f"ImportError: {line}"
