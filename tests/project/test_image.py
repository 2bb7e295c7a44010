"""The Dockerfile agrees with the project.

The tests compare its copies, requirements, and labels, and build nothing.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import NamedTuple

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from support.commands import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PINS = (ROOT / "constraints.txt").read_text()
TARGETS = ("core", "train")


class Instruction(NamedTuple):
    word: str
    arguments: str


class Stage(NamedTuple):
    name: str
    base: str
    instructions: list[Instruction]


def read_stages() -> tuple[dict[str, str], dict[str, Stage]]:
    """Return the arguments before the first stage, and the stages by name, in order."""
    lines = (line for line in (ROOT / "Dockerfile").read_text().splitlines() if not line.startswith("#"))
    logical = re.sub(r"\\\n", "", "\n".join(lines)).splitlines()
    before: dict[str, str] = {}
    stages: dict[str, Stage] = {}
    for word, arguments in (line.split(None, 1) for line in logical if line.strip()):
        if word == "FROM":
            base, name = re.fullmatch(r"(\S+) AS (\S+)", arguments).groups()
            stages[name] = Stage(name, base, [])
        elif stages:
            stages[name].instructions.append(Instruction(word, arguments))
        else:
            assert word == "ARG", word
            before.update([arguments.split("=", 1)])
    return before, stages


ARGUMENTS, STAGES = read_stages()


def chain_of(target: str) -> list[Instruction]:
    """Return the instructions of a target, from the base image on."""
    stage = STAGES[target]
    return (chain_of(stage.base) if stage.base in STAGES else []) + stage.instructions


def values_of(word: str, chain: list[Instruction]) -> dict[str, str]:
    """Return the NAME=VALUE pairs of ARG or ENV."""
    text = " ".join(instruction.arguments for instruction in chain if instruction.word == word)
    return {name: quoted or plain for name, quoted, plain in re.findall(r'(\w+)=(?:"([^"]*)"|(\S*))', text)}


def test_every_file_that_is_copied_exists_and_reaches_the_builder() -> None:
    copied = set()
    for stage in STAGES.values():
        for word, arguments in stage.instructions:
            if word in ("COPY", "ADD") and "--from=" not in arguments:
                copied.update(arguments.split()[:-1])
    assert copied
    assert [name for name in sorted(copied) if not (ROOT / name).exists()] == []
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    assert lines[1] == "*"
    assert {line.removeprefix("!") for line in lines if line.startswith("!")} == copied


def test_stages_use_stages_before_them() -> None:
    seen: set[str] = set()
    for stage in STAGES.values():
        used = re.findall(
            r"(?:--|,)from=([\w-]+)", " ".join(instruction.arguments for instruction in stage.instructions)
        )
        assert set(used) <= seen, stage.name
        assert stage.base in seen or re.match(r"python:\$\{PYTHON\}-", stage.base), stage.name
        seen.add(stage.name)
    assert seen >= set(TARGETS)


def test_only_caches_are_mounted() -> None:
    """Buildah 1.28 does not rebuild a layer if only a mounted file has changed.

    The image would then have old code.
    """
    mounts = re.findall(
        r"--mount=type=(\w+)", " ".join(each.arguments for stage in STAGES.values() for each in stage.instructions)
    )
    assert set(mounts) == {"cache"}


def test_the_python_is_the_one_of_ci() -> None:
    assert ARGUMENTS["PYTHON"] in SpecifierSet(PROJECT["requires-python"])
    lock = (ROOT / "requirements.lock").read_text()
    assert re.findall(r"^torch==.*python_version == '([\d.]+)'", lock, re.M) == [ARGUMENTS["PYTHON"]]


@pytest.mark.parametrize("target", TARGETS)
def test_a_target_runs_as_any_user(target: str) -> None:
    """The user is a number, and all users can write to the folders.

    Kubernetes does not know whether a name is root, and the user ID may differ.
    """
    chain = chain_of(target)
    users = [arguments for word, arguments in chain if word == "USER"]
    assert int(users[-1]) > 0
    assert chain.index(Instruction("USER", users[-1])) > max(i for i, each in enumerate(chain) if each.word == "RUN")
    folders = [
        found[1].split() for each in chain if (found := re.search(r"install -.*--mode=1777 (.*)", each.arguments))
    ]
    environment = values_of("ENV", chain)
    assert folders == [[environment["HOME"], "/work"]]
    assert environment["USER"] == environment["LOGNAME"]
    assert [arguments for word, arguments in chain if word in ("WORKDIR", "VOLUME")] == ["/work", "/work"]


@pytest.mark.parametrize("target", TARGETS)
def test_the_version_is_that_of_the_project(target: str) -> None:
    assert values_of("ARG", chain_of(target))["VERSION"] == PROJECT["version"]


def test_the_requirements_of_the_targets_are_those_of_the_project(tmp_path: Path) -> None:
    """The test runs the command that writes the requirements, in another folder."""
    source = STAGES["source"].instructions
    (command,) = [each.arguments for each in source if each.word == "RUN" and "tomllib" in each.arguments]
    command = command.replace("/lists", str(tmp_path / "lists")).replace("python -c", f"{sys.executable} -c")
    extras = {target: values_of("ARG", source)[f"{target.upper()}_EXTRAS"] for target in TARGETS}
    environment = {"PATH": "/usr/bin:/bin", **{f"{target.upper()}_EXTRAS": extras[target] for target in TARGETS}}
    done = subprocess.run(["/bin/sh", "-c", command], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    names = {}
    for target in TARGETS:
        optional = [line for extra in extras[target].split() for line in PROJECT["optional-dependencies"][extra]]
        written = (tmp_path / "lists" / f"{target}.txt").read_text().split("\n")
        assert written == [*sorted({*PROJECT["dependencies"], *optional}), ""]
        names[target] = {Requirement(line).name for line in written if line}
    assert names["train"] - names["core"] >= {"torch"}
    assert "torch" not in names["core"]
    assert (tmp_path / "lists" / "torch.txt").read_text().split() == re.findall(r"^torch==\S+$", PINS, re.M)
    assert (tmp_path / "lists" / "constraints.txt").read_text() == PINS
