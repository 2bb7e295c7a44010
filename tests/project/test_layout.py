"""The layout matches CONTRIBUTING.md.

Folders are small, the layers are the same, and every file that is mentioned exists.
"""

from __future__ import annotations

import re
import tomllib
from collections import Counter

import pytest
from support.commands import ROOT

FOLDERS = ("bench", "data/sample", "docs", "packcorpus", "pipeline", "tasks", "tests", "train")
SUFFIXES = (".md", ".py")
MOST = 24
FILES = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.is_file() and path.name[0] != "."]
SOURCES = [path for path in [*FILES, *ROOT.glob("*.md"), ROOT / "Makefile"] if path.suffix in (*SUFFIXES, "")]
MENTIONED = re.compile(r"(?<![\w./<])((?:bench|data|docs|pipeline|tasks|tests|train)/[\w/-]+\.(?:md|py))\b")


def test_folders_are_small() -> None:
    files = Counter(path.parent.relative_to(ROOT).as_posix() for path in FILES if path.name != "__init__.py")
    too_many = {folder: count for folder, count in files.items() if count > MOST and "__pycache__" not in folder}
    assert not too_many


def test_files_that_are_mentioned_exist() -> None:
    lost = {
        f"{path.relative_to(ROOT)}: {name}"
        for path in SOURCES
        for name in MENTIONED.findall(path.read_text(encoding="utf-8"))
        if not (ROOT / name).exists() and not (ROOT / "tests" / name).exists()
    }
    assert not lost


@pytest.mark.parametrize("package", ["tasks", "train", "pipeline"])
def test_the_layers_of_contributing_are_those_that_are_enforced(package: str) -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    [layers] = [one["layers"] for one in contracts if one["name"] == f"The layers of {package}"]
    assert f"`{' → '.join(layers)}`" in (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
