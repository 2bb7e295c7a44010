"""What the documents say is true: commands run as they stand, tables name what exists, schemas are current."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import orjson
from support.commands import ROOT

from tasks.config import Config
from tasks.conversations.formats import FORMAT_NAMES
from tasks.sources.model import Source
from tasks.storage.manifest import Manifest
from tasks.templates.built_in import BUILT_IN

README = (ROOT / "README.md").read_text()


def test_the_readmes_commands_run_as_they_stand(tmp_path: Path) -> None:
    copy = tmp_path / "packcorpus"
    shutil.copytree(
        ROOT,
        copy,
        ignore=shutil.ignore_patterns(".venv", ".git", "corpora", "tokens", "plans", "tokenizers", ".*_cache"),
    )
    for old in (copy / "manifests").glob("*.json"):
        old.unlink()
    (copy / ".venv").symlink_to(Path(sys.prefix))
    for installed in ("pyproject.toml", "constraints.txt"):
        os.utime(copy / installed, (0, 0))  # make must not install the copy into the environment that it shares
    script = "set -e\n" + "".join(re.findall(r"^```sh\n(.*?)^```", README, re.M | re.S))
    assert "luigi --module pipeline PackCorpus" in script
    done = subprocess.run(["bash", "-c", script], cwd=copy, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    assert len(list((copy / "manifests").glob("sample-*.json"))) == 1
    assert len(list((copy / "manifests").glob("mine-*.json"))) == 1
    assert "⟦6 × 7 = 42.▐<|im_end|>▌▐</s>▌⟧" in done.stdout


def test_the_readme_names_every_setting_format_and_template() -> None:
    config = README[README.index("## Config") :]
    for name in Config.model_fields:
        assert f"`{name}`" in config, name
    for name in (*FORMAT_NAMES, *BUILT_IN):
        assert f"`{name}`" in README, name


def test_contributing_names_every_module() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    for module in (ROOT / "tasks").glob("[!_]*.py"):
        assert f"`{module.stem}`" in text, module.stem


def test_the_schemas_in_docs_are_those_of_the_models() -> None:
    for name, model in (("config", Config), ("manifest", Manifest)):
        written = orjson.loads((ROOT / "docs" / f"{name}.schema.json").read_bytes())
        assert written == model.model_json_schema(), "make schemas writes them anew"


def test_the_migration_notes_name_options_that_there_are() -> None:
    """Ours, from the models; theirs, of what is installed."""
    from trl import SFTConfig
    from trl.scripts.utils import DatasetConfig, DatasetMixtureConfig

    text = (ROOT / "docs" / "migration.md").read_text()
    sections = {part.partition("\n")[0]: part for part in re.split(r"^## ", text, flags=re.M)[1:]}
    rows = {name: re.findall(r"^\| (`.*?) \| (.*?) \| .*\|$", part, re.M) for name, part in sections.items()}
    assert {name: len(found) > 9 for name, found in rows.items()} == dict.fromkeys(rows, True)
    ours = {*Config.model_fields, *Source.model_fields}
    for theirs, here in (row for found in rows.values() for row in found):
        for option in re.findall(r"`([a-z_]+)[:`]", here):
            known = (*ours, *FORMAT_NAMES, *Config.model_fields["overlong"].annotation.__args__, "last")
            known += Config.model_fields["weighting"].annotation.__args__
            assert option in known, f"{theirs}: {option}"
    for theirs, _ in rows["TRL"]:
        for option in re.findall(r"`([a-z_]+)", theirs):
            assert any(option in c.__dataclass_fields__ for c in (SFTConfig, DatasetMixtureConfig, DatasetConfig)), (
                option
            )
