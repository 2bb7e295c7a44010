"""The guide to Llama-3.1-8B on one GPU: its commands run, its table is true."""

from __future__ import annotations

import json
import re
import runpy
import shlex
import shutil
import sys
from pathlib import Path

import pytest
import torch
from support.commands import BIN, NO_PICTURE, ROOT, command
from support.small_corpus import conversations
from support.tokenizer_kinds import kind_path
from support.training.architectures import build
from support.training.served_runs import CHATML, update

from packcorpus.train.diagnose.command import parser as diagnose_parser

PAGE = (ROOT / "docs" / "guides" / "one-gpu.md").read_text(encoding="utf-8")
# What a stand-in on a CPU needs in addition.
ADDED = {
    "train support": "--device cpu --tokens-per-step 512 --max-steps 2 --learning-rate 2e-2",
    "train chat": "--max-tokens 4",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a tiny model of the guide's name, and its data."""
    folder = tmp_path_factory.mktemp("guide")
    model = folder / "llama-3.1-8b"
    shutil.copytree(kind_path("hf_byte_level"), model)
    update(model / "tokenizer_config.json", chat_template=None)
    (model / "chat_template.jinja").write_text(CHATML)
    vocabulary = json.loads((model / "tokenizer.json").read_text())
    size = len(vocabulary["model"]["vocab"]) + len(vocabulary["added_tokens"])
    torch.manual_seed(1)
    built = build("llama", vocab_size=size, max_position_embeddings=4096, initializer_range=0.1)
    built.save_pretrained(model)
    (folder / "chats.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in conversations(200)))
    [config] = re.findall(r"^```yaml\n(.*?)^```", PAGE, re.M | re.S)
    (folder / "support.yaml").write_text(config.replace("sequence_length: 2048", "sequence_length: 256"))
    return folder


def commands() -> list[list[str]]:
    blocks = re.findall(r"^```console\n(.*?)^```", PAGE, re.M | re.S)
    lines = [line for block in blocks for line in block.splitlines()]
    assert all(line.startswith("$ ") for line in lines)
    return [shlex.split(line.removeprefix("$ "), comments=True) for line in lines]


@pytest.mark.slow
def test_every_command_runs_with_a_tiny_model(folder: Path) -> None:
    ran = []
    for words in commands():
        if words[0] != "packcorpus":  # they need a network
            assert words[0] in ("pip", "hf"), words
            continue
        ran.append(" ".join(words[1:3]))
        words += [word for name, more in ADDED.items() if ran[-1] == name for word in more.split()]
        if words[1:] == ["train", "chat", "support", "--max-tokens", "4"]:
            words += ["--prompt", "Which train?"]  # instead of a terminal
        trains = {"train": words[2:], "certify": words[1:]}.get(words[1])
        if trains is None:
            done = command(folder, str(BIN / "packcorpus"), *words[1:])
        else:
            done = command(folder, sys.executable, "-m", "packcorpus.train", *trains, **NO_PICTURE)
        is_free = words[1:] == ["train", "doctor"]  # it judges this machine
        assert done.returncode == 0 or is_free, (words, done.stdout, done.stderr)
    expected = ["train doctor", "check support.yaml", "pack support.yaml", "train doctor", "train support"]
    assert ran == [*expected, "train chat", "train chat", "train merge", "certify support"]


def test_the_other_commands_exist() -> None:
    [diagnose] = re.findall(r"`packcorpus train diagnose (.*?)`", PAGE)
    assert diagnose_parser().parse_args(shlex.split(diagnose)).set_base_model == "llama-3.1-8b"


@pytest.mark.slow
def test_the_table_of_memory_is_that_of_doctor() -> None:
    table = re.search(r"<!-- memory -->\n\n(.*?)\n\n<!-- /memory -->", PAGE, re.S)
    assert table
    wanted = "\n".join(runpy.run_path(str(ROOT / "docs" / "generate.py"))["memory_table"]())
    assert table[1] == wanted, "run python docs/generate.py --memory"
