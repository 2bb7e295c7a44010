"""Whoever follows the page of `packcorpus skill` to the letter prepares a dataset.

Its commands run in their order, in a folder with `chats.jsonl` and the tokenizer of a model in `path/to/model`.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
from pathlib import Path

from support.commands import ROOT, packcorpus, write_chats
from support.templates.jinja_sources import TOOLS
from support.tokenizer_kinds import kind_path

from packcorpus.tasks.config import Config
from packcorpus.tasks.core.error_codes import CODES, EXITS
from packcorpus.tasks.exports.export import EXPORTS
from packcorpus.tasks.sources.model import Source

PAGE = (ROOT / "tasks" / "cli" / "skill.md").read_text(encoding="utf-8")
COMMANDS = [line for block in re.findall(r"^```sh\n(.*?)^```", PAGE, re.M | re.S) for line in block.splitlines()]
# What the page says that a command prints, by its words.
PRINTED = {
    ("inspect", "chats.jsonl"): "messages",
    ("init",): "corpus.yaml",
    ("check",): "⟦",
    ("inspect", "--row"): "▐",
    ("inspect", "--at"): "chats.jsonl:2",
    ("verify",): "all 6 checks passed",
    ("report",): ".html",
    ("export",): "padding_free",
}


def test_the_page_is_printed(tmp_path: Path) -> None:
    assert packcorpus(tmp_path, "skill").stdout == PAGE
    assert json.loads(packcorpus(tmp_path, "skill", "--json").stdout) == {"page": PAGE}
    assert len(PAGE.split()) <= 900


def test_its_commands_prepare_a_dataset(tmp_path: Path) -> None:
    write_chats(tmp_path / "chats.jsonl", 40)
    shutil.copytree(kind_path("hf_byte_level"), tmp_path / "path" / "to" / "model")
    (tmp_path / "path" / "to" / "model" / "chat_template.jinja").write_text(TOOLS)
    assert len(COMMANDS) > 8
    missing = dict(PRINTED)
    for line in COMMANDS:
        words = shlex.split(line)[1:]
        done = packcorpus(tmp_path, *words)
        assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
        if words[0] == "pack":
            assert (tmp_path / done.stdout.splitlines()[-1]).is_file(), "the last line is the manifest"
        for prefix in [prefix for prefix in missing if tuple(words[: len(prefix)]) == prefix]:
            assert missing.pop(prefix) in done.stdout, line
    assert not missing


def test_its_settings_codes_and_formats_exist() -> None:
    by_code = {code.code for code in CODES.values()}
    assert set(re.findall(r"\bE\d{3}\b", PAGE)) <= by_code
    assert {int(number) for number in re.findall(r"[ ,](\d+) (?:done|wrong|try)", PAGE)} <= set(EXITS)
    settings = {*Config.model_fields, *Source.model_fields, "train"}
    assert set(re.findall(r"`([a-z_]+): ", PAGE)) <= settings
    assert all(f"`{export.name}`" in PAGE or f"--to {export.name}" in PAGE for export in EXPORTS)
