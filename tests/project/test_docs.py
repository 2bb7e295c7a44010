"""The documentation is true.

Its commands run, its generated pages are current, and its options exist.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import orjson
import pytest
from support.commands import BIN, ROOT, command
from support.templates.jinja_sources import TOOLS
from support.tokenizer_kinds import kind_path

from packcorpus.tasks.config import Config, load_config
from packcorpus.tasks.conversations.formats import FORMAT_NAMES, detect, read_record
from packcorpus.tasks.dry_run.dry_run import predict
from packcorpus.tasks.sources.model import Source
from packcorpus.tasks.storage.manifest import Manifest

sys.path.insert(0, str(ROOT / "docs"))
import capture

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
CAPTURED = [page for page in PAGES if "<!-- capture" in page.read_text(encoding="utf-8")]
FORKED = {name: value for name, value in capture.ENVIRONMENT.items() if name != "OMP_NUM_THREADS"}
USAGE, BUG, NOT_FOUND = 64, 70, 127
TRAINERS = ("TRL", "axolotl", "LLaMA-Factory", "torchtune", "Unsloth", "ms-swift")  # with their settings


@pytest.mark.parametrize("page", CAPTURED, ids=lambda page: page.name)
def test_the_commands_of_a_page_run(page: Path, tmp_path: Path) -> None:
    """The commands of a page run in order, as docs/capture.py runs them.

    The commands of the README succeed. Commands of other pages may show an error.
    """
    shutil.copytree(ROOT / "data" / "sample", tmp_path / "data" / "sample")
    shutil.copy(ROOT / "luigi.cfg", tmp_path)
    for setup, _, _, body in capture.MARKER.findall(page.read_text(encoding="utf-8")):
        for line in [f"$ {setup}"] if setup else body.splitlines():
            if line.strip().startswith("$ "):
                done = run(line.strip()[2:], tmp_path)
                assert done.returncode not in (USAGE, BUG, NOT_FOUND), f"{line}\n{done.stdout}{done.stderr}"
                assert done.returncode == 0 or page.name != "README.md", f"{line}\n{done.stdout}{done.stderr}"


def run(line: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a line as docs/capture.py does.

    A plain command of the project runs in a fork, which starts in milliseconds.
    """
    words = shlex.split(line, comments=True)
    if words[0] in ("luigi", "packcorpus", "python") and not set(line) & set("$|><;&*"):
        words[0] = sys.executable if words[0] == "python" else str(BIN / words[0])
        return command(folder, *words, **FORKED)
    return capture.run(line, folder)


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 120


@pytest.mark.parametrize("page", [ROOT / "README.md", ROOT / "CONTRIBUTING.md"], ids=lambda page: page.name)
def test_links_lead_to_files(page: Path) -> None:
    """mkdocs checks the links of the site."""
    for target in re.findall(r"\]\(([^)#]+)", page.read_text(encoding="utf-8")):
        assert "://" in target or (ROOT / target).exists(), target


def test_the_generated_pages_are_current() -> None:
    done = subprocess.run([sys.executable, "docs/generate.py", "--check"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, f"run make schemas\n{done.stdout}{done.stderr}"


def test_the_schemas_are_those_of_the_models() -> None:
    for name, model in (("config", Config), ("manifest", Manifest)):
        written = orjson.loads((ROOT / "docs" / "reference" / f"{name}.schema.json").read_bytes())
        assert written == model.model_json_schema(), "run make schemas"


def test_the_migration_notes_name_options_that_exist() -> None:
    """Our options are options of the models.

    TRL's options are options of the installed package.
    """
    from trl import SFTConfig
    from trl.scripts.utils import DatasetConfig, DatasetMixtureConfig

    text = (ROOT / "docs" / "guides" / "migration.md").read_text()
    sections = {part.partition("\n")[0]: part for part in re.split(r"^## ", text, flags=re.M)[1:]}
    rows = {name: re.findall(r"^\| (`.*?) \| (.*?) \| .*\|$", sections[name], re.M) for name in TRAINERS}
    assert {name: len(found) > 9 for name, found in rows.items()} == dict.fromkeys(rows, True)
    ours = {*Config.model_fields, *Source.model_fields}
    for theirs, here in (row for found in rows.values() for row in found):
        for option in re.findall(r"`([a-z_]+)[:`]", here):
            known = (*ours, *FORMAT_NAMES, *Config.model_fields["overlong"].annotation.__args__)
            known += Config.model_fields["train_on"].annotation.__args__
            known += (*Config.model_fields["weighting"].annotation.__args__, "train", "training")  # flags of a message
            assert option in known, f"{theirs}: {option}"
    for theirs, _ in rows["TRL"]:
        for option in re.findall(r"`([a-z_]+)", theirs):
            assert any(option in c.__dataclass_fields__ for c in (SFTConfig, DatasetMixtureConfig, DatasetConfig)), (
                option
            )


@pytest.mark.parametrize("tool", [tool for tool in TRAINERS if tool not in ("torchtune", "Unsloth")])
def test_the_example_of_the_migration_notes_packs_the_sample(tool: str, tmp_path: Path) -> None:
    """Every conversation is packed, with a tokenizer that has a chat template."""
    text = (ROOT / "docs" / "guides" / "migration.md").read_text()
    part = text.partition(f"### {tool}: an example")[2].partition(f"### {tool}: not supported")[0]
    theirs, ours = re.findall(r"^```(?!yaml\nsources)\w+\n|^```yaml\n(sources.*?)^```", part, re.M | re.S)[-2:]
    assert not theirs
    shutil.copytree(ROOT / "data" / "sample", tmp_path, dirs_exist_ok=True)
    shutil.copytree(kind_path("hf_byte_level"), tmp_path / "model")
    (tmp_path / "model" / "chat_template.jinja").write_text(TOOLS)
    (tmp_path / "my.yaml").write_text(ours)
    found = predict(load_config(tmp_path / "my.yaml"), tmp_path, tmp_path)
    assert found.whole
    assert not found.failures
    assert all(source.rejected == 0 < source.conversations for source in found.sources)


def test_the_records_of_a_guide_are_read() -> None:
    """Every record in a block of JSON has a format and no value that is refused."""
    text = (ROOT / "docs" / "guides" / "agent-data.md").read_text()
    count = 0
    for block in re.findall(r"^```json\n(.*?)^```", text, re.M | re.S):
        while block := block.strip():
            record, end = json.JSONDecoder().raw_decode(block)
            assert read_record(record, detect(record) or "").messages
            block, count = block[end:], count + 1
    assert count > 2
