"""`pack` and `check` take data without a config, and draft one that is kept."""

from __future__ import annotations

import json
import os
import pty
import shutil
import subprocess
from pathlib import Path

import pytest
from support.commands import BIN, command
from support.small_corpus import conversations
from support.tokenizer_kinds import kind_path

from packcorpus.tasks.cli.data_config import find_config
from packcorpus.tasks.config import load_config
from packcorpus.tasks.core.errors import PackError, UsageError
from packcorpus.tasks.dry_run.given import Given

TOOL = str(BIN / "packcorpus")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in conversations(60)))
    shutil.copy(kind_path("sp_bpe_chatml"), tmp_path / "near.model")
    return tmp_path


def test_data_is_packed_with_a_config_that_is_kept(here: Path) -> None:
    words = ("pack", "chats.jsonl", "--tokenizer", "near.model")
    first = command(here, TOOL, *words)
    assert first.returncode == 0, first.stderr
    assert (
        "\nconfig: chats.yaml: written; to change settings, edit it, then run: packcorpus pack chats.yaml\n"
        in first.stderr
    )
    drafted = (here / "chats.yaml").read_text()
    assert drafted.startswith("# packcorpus pack chats.jsonl --tokenizer near.model\n")
    manifest = json.loads((here / first.stdout.strip()).read_text())
    assert manifest["config"] == load_config(here / "chats.yaml").settings()
    # The same command uses the file again, also after the data has grown or the file was edited.
    with (here / "chats.jsonl").open("a") as file:
        file.write(json.dumps(conversations(61)[-1]) + "\n")
    again = command(here, TOOL, *words)
    assert (again.returncode, (here / "chats.yaml").read_text()) == (0, drafted)
    assert "config: chats.yaml: as an earlier run of this command wrote it" in again.stderr
    edited = drafted.replace("sequence_length: 1024", "sequence_length: 512")
    (here / "chats.yaml").write_text(edited)
    third = command(here, TOOL, *words)
    assert json.loads((here / third.stdout.strip()).read_text())["config"]["sequence_length"] == 512
    # Other words are another draft, and no file is changed.
    other = command(here, TOOL, *words, "--sequence-length", "256", "--json")
    found = json.loads(other.stderr.splitlines()[0])
    assert (found["config"], found["written"], found["settings"]["sequence_length"]) == ("chats-2.yaml", True, 256)
    assert (here / "chats.yaml").read_text() == edited
    named = command(here, TOOL, *words, "--name", "mine", "--quiet")
    assert (named.stderr, named.stdout.startswith("manifests/mine-")) == ("", True)


def test_check_of_data_predicts_what_pack_will_make_and_writes_nothing(here: Path) -> None:
    before = sorted(os.listdir(here))
    done = command(here, TOOL, "check", "chats.jsonl", "--tokenizer", "near.model", "--json")
    assert done.returncode == 0, done.stderr
    assert sorted(os.listdir(here)) == before
    predicted = json.loads(done.stdout)
    packed = command(here, TOOL, "pack", "chats.jsonl", "--tokenizer", "near.model")
    manifest = json.loads((here / packed.stdout.strip()).read_text())
    assert predicted["ledger"]["tokens"] == manifest["ledger"]["tokens"]
    assert predicted["settings"]["sequence_length"] == manifest["config"]["sequence_length"]
    (here / "chats.yaml").write_text((here / "chats.yaml").read_text().replace("1024", "512"))
    again = json.loads(command(here, TOOL, "check", "chats.jsonl", "--tokenizer", "near.model", "--json").stdout)
    assert again["settings"]["sequence_length"] == 512


def test_without_a_tokenizer_none_is_trained(here: Path) -> None:
    assert command(here, TOOL, "check", "chats.jsonl").returncode == 0, "the only one nearby"
    (here / "near.model").unlink()
    for name in ("pack", "check"):
        done = command(here, TOOL, name, "chats.jsonl")
        assert done.returncode == 64
        assert done.stderr.splitlines()[:2] == [
            "E110 error: no tokenizer is named, and none is nearby; name that of your model:",
            "  packcorpus pack chats.jsonl --tokenizer Qwen/Qwen3-8B",
        ]
    assert sorted(os.listdir(here)) == ["chats.jsonl"]


def test_a_terminal_asks_which_tokenizer(here: Path) -> None:
    shutil.copy(kind_path("sp_unigram"), here / "other.model")
    refused = command(here, TOOL, "check", "chats.jsonl")
    assert refused.stderr.splitlines()[:3] == [
        "E110 error: several tokenizers are nearby; name the one of your model:",
        "  --tokenizer near.model",
        "  --tokenizer other.model",
    ]
    mine, theirs = pty.openpty()
    words = [TOOL, "init", "chats.jsonl"]
    with subprocess.Popen(words, cwd=here, stdin=theirs, stderr=theirs, stdout=subprocess.PIPE) as process:
        os.write(mine, b"3\n2\n")
        assert process.wait(120) == 0
    assert load_config(here / "corpus.yaml").tokenizer == "other.model"
    os.close(mine)
    os.close(theirs)


@pytest.mark.parametrize(
    ("words", "config"),
    [
        ([], "corpus.yaml"),
        (["corpus.yaml"], "corpus.yaml"),
        (["gone.yml"], "gone.yml"),
        (["a.json"], "a.json"),
        (["settings.conf"], "settings.conf"),
        (["gone"], "gone"),
        (["chats.jsonl"], None),
        (["list.json"], None),
        (["chats.jsonl", "gone.jsonl"], None),
        (["*.jsonl"], None),
        (["folder"], None),
        (["openai/gsm8k"], None),
        (["s3://bucket/a.jsonl"], None),
    ],
)
def test_a_word_is_a_config_or_data(here: Path, words: list[str], config: str | None) -> None:
    (here / "corpus.yaml").write_text("sources: chats.jsonl\n")
    (here / "a.json").write_text('{"sources": ["chats.jsonl"]}')
    (here / "list.json").write_text('[{"text": "a"}]')
    (here / "settings.conf").write_text("sources: chats.jsonl\n")
    (here / "folder").mkdir()
    assert find_config(words, Given()) == (Path(config) if config else None)


@pytest.mark.parametrize(
    ("words", "given", "problem"),
    [
        (["corpus.yaml", "chats.jsonl"], Given(), "corpus.yaml: is a config, and other files are named, too; name one"),
        (["chats.jsonl", "gone.yaml"], Given(), "gone.yaml: is a config"),
        (["corpus.yaml"], Given(tokenizer="x"), "--tokenizer: corpus.yaml is a config; set `tokenizer` there, or name"),
        ([], Given(name="x"), "--name: corpus.yaml is a config; set `name` there"),
    ],
)
def test_a_config_and_data_are_not_mixed(here: Path, words: list[str], given: Given, problem: str) -> None:
    (here / "corpus.yaml").write_text("sources: chats.jsonl\n")
    with pytest.raises(UsageError, match=problem):
        find_config(words, given)
    assert find_config(["corpus.yaml"], Given(sequence_length="512")) == Path("corpus.yaml")
    (here / "corpus.yaml").unlink()
    with pytest.raises(PackError, match=r"corpus\.yaml: no such config"):
        find_config([], Given())
