"""The sdist and the wheel are complete, and the wheel works in a user's folder."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml
from packaging.specifiers import SpecifierSet
from support.commands import ROOT

SOURCES = ("packcorpus", "pipeline", "tasks", "train")
FILES = ("pyproject.toml", "README.md", "LICENSE", "MANIFEST.in")


def build(project: Path, kind: str) -> Path:
    """Build a `wheel` or an `sdist` of a project, and return the file."""
    code = f"from setuptools import build_meta; print(build_meta.build_{kind}('.'))"
    done = subprocess.run([sys.executable, "-c", code], cwd=project, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return project / done.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return a wheel and an sdist of the files that a clone has."""
    project = tmp_path_factory.mktemp("clone")
    left_out = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in (*SOURCES, "src"):
        shutil.copytree(ROOT / name, project / name, symlinks=True, ignore=left_out)
    for name in FILES:
        shutil.copy(ROOT / name, project)
    (project / "tests").mkdir()
    (project / "tests" / "test_config.py").write_bytes(b"")
    sdist = build(project, "sdist")
    return build(project, "wheel"), sdist


def contents(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist() if not name.endswith("/RECORD")}


@pytest.mark.slow
def test_a_wheel_holds_all_code_and_data_once(built: tuple[Path, Path]) -> None:
    here = {
        path.relative_to(ROOT).as_posix(): path.read_bytes()
        for folder in SOURCES
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    expected = {
        name if name.startswith("packcorpus/") else f"packcorpus/{name}": content for name, content in here.items()
    }
    # It only imports the package of the same name in packcorpus.
    beside = ("pipeline/__init__.py",)
    found = {name: content for name, content in contents(built[0]).items() if ".dist-info/" not in name}
    assert found == expected | {name: here[name] for name in beside}


@pytest.mark.slow
def test_the_sdist_builds_the_same_wheel(built: tuple[Path, Path], tmp_path: Path) -> None:
    wheel, sdist = built
    with tarfile.open(sdist) as archive:
        assert [member.name for member in archive if member.issym() or member.islnk()] == []
        archive.extractall(tmp_path, filter="data")
    [project] = tmp_path.iterdir()
    assert not (project / "tests").exists()
    assert contents(build(project, "wheel")) == contents(wheel)


@pytest.mark.slow
def test_a_wheel_works_in_a_folder_with_modules_of_the_same_names(built: tuple[Path, Path], tmp_path: Path) -> None:
    words = [sys.executable, str(ROOT / "tests" / "smoke.py"), str(built[0]), "--here"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "from nothing to the first rows" in done.stdout


def test_the_release_runs_the_smoke_test_on_every_supported_python() -> None:
    workflow = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text())
    smoke, publish = workflow["jobs"]["smoke"], workflow["jobs"]["publish"]
    supported = SpecifierSet(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"])
    every = [f"3.{minor}" for minor in range(40) if f"3.{minor}" in supported]
    assert smoke["strategy"]["matrix"]["python"] == every
    assert smoke["steps"][-1]["run"] == "python tests/smoke.py dist/*.whl"
    assert publish["needs"] == "smoke"
    assert publish["permissions"] == {"id-token": "write"}
    assert "password" not in str(workflow)
