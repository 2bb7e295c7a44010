"""action.yml checks the dataset of a pull request.

The shell of its steps runs as on GitHub, in a clone whose branch differs from its origin.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.commands import BIN, ROOT, write_chats

ACTION = yaml.safe_load((ROOT / "action.yml").read_text())
GUIDE = (ROOT / "docs" / "guides" / "pull-requests.md").read_text(encoding="utf-8")
STEPS = {step["name"]: step for step in ACTION["runs"]["steps"] if "run" in step}
CONFIG = "name: chats\nsources: data/chats.jsonl\ntemplate: chatml\nsequence_length: 256\nvocab_size: 300\n"


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A clone of a repository with a config and ten chats, on a branch of its own."""
    origin = tmp_path / "origin"
    (origin / "data").mkdir(parents=True)
    (origin / "corpus.yaml").write_text(CONFIG)
    write_chats(origin / "data" / "chats.jsonl", 10)
    git(origin, "init", "--quiet", "--initial-branch", "main")
    commit(origin)
    git(tmp_path, "clone", "--quiet", "--depth", "1", origin.as_uri(), "clone")
    git(tmp_path / "clone", "switch", "--quiet", "--create", "branch")
    return tmp_path / "clone"


def git(folder: Path, *words: str) -> None:
    identity = {f"GIT_{who}_{what}": "a@b" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
    subprocess.run(["git", *words], cwd=folder, check=True, env=os.environ | identity)


def commit(folder: Path) -> None:
    git(folder, "add", ".")
    git(folder, "commit", "--quiet", "--message", "data")


def run(name: str, clone: Path, **inputs: str) -> tuple[int, str]:
    """Run a step as GitHub does; return its exit code and the summary of the job."""
    step, temp = STEPS[name], clone.parent / "temp"
    temp.mkdir(exist_ok=True)
    values = {f"inputs.{key}": str(value["default"]) for key, value in ACTION["inputs"].items()}
    values |= {f"inputs.{key}": value for key, value in inputs.items()}
    values |= {"github.base_ref": "main", "runner.temp": str(temp), "github.action_path": str(ROOT)}
    environment = {
        key: re.sub(r"\$\{\{ (.*?) \}\}", lambda found: values[found[1]], value) for key, value in step["env"].items()
    }
    environment |= {"RUNNER_TEMP": str(temp), "GITHUB_STEP_SUMMARY": str(temp / "summary.md")}
    environment |= {"PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}", "PIP_NO_INDEX": "1"}
    words = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"]]
    done = subprocess.run(words, cwd=clone, env=os.environ | environment, capture_output=True, text=True)
    summary = temp / "summary.md"
    return done.returncode, summary.read_text() if summary.exists() else done.stdout + done.stderr


def test_a_pull_request_that_adds_conversations(clone: Path) -> None:
    write_chats(clone / "data" / "chats.jsonl", 12)
    commit(clone)
    assert run("Install packcorpus", clone, package="pip")[0] == 0
    code, summary = run("Check", clone)
    assert code == 0, summary
    assert "Prediction" in summary
    code, summary = run("Pack and compare", clone)
    assert code == 0, summary
    assert "0 removed, 2 added" in summary
    assert summary.count("```") == 4


def test_a_pull_request_that_breaks_records(clone: Path) -> None:
    with (clone / "data" / "chats.jsonl").open("a") as file:
        file.write(json.dumps({"messages": "text"}) + "\n")
    code, summary = run("Check", clone)
    assert code == 65
    assert "The run will fail" in summary
    assert summary.endswith("```\n")


def test_a_config_that_the_base_lacks(clone: Path) -> None:
    (clone / "corpus.yaml").rename(clone / "new.yaml")
    code, summary = run("Pack and compare", clone, config="new.yaml")
    assert (code, summary) == (0, "main has no new.yaml: nothing to compare\n")


def test_the_workflow_of_the_guide_passes_inputs_that_exist() -> None:
    (text,) = re.findall(r"```yaml\n(.*?)```", GUIDE, re.S)
    workflow: dict[Any, Any] = yaml.safe_load(text)
    (job,) = workflow["jobs"].values()
    _, step = job["steps"]
    assert set(step["with"]) <= set(ACTION["inputs"])
