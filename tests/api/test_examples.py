"""Every example of the Python reference runs.

The examples are in the docstrings, from which docs/generate.py makes the page. They run in the order of the page, in a
folder with the files that they name, and with the variables of earlier examples.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from support.commands import ROOT
from support.tokenizer_kinds import kind_path
from support.training.tiny_training import tiny_model

import packcorpus

PAGE = (ROOT / "docs" / "reference" / "python.md").read_text(encoding="utf-8")
# The second block of a section is its example; the first one is its signature, unless it is a class of results.
SECTIONS = re.split(r"^### ", PAGE.partition("## Errors")[0], flags=re.M)[1:]
EXAMPLES = {part.partition("\n")[0]: re.findall(r"```python\n(.*?)```", part, re.S)[-1] for part in SECTIONS}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("examples")
    shutil.copy(ROOT / "data" / "sample" / "chat.jsonl", place / "chats.jsonl")
    tiny_model(adapter=False).save_pretrained(place / "path" / "to" / "model")
    shutil.copytree(kind_path("hf_byte_level"), place / "path" / "to" / "model", dirs_exist_ok=True)
    return place


def test_every_example_runs(folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(folder)
    torch.set_num_threads(1)
    packcorpus.pack(sources="chats.jsonl", tokenizer="path/to/model", packing=False, name="whole", progress=False)
    values: dict[str, Any] = {"packcorpus": packcorpus, "torch": torch}
    values["model"] = tiny_model(adapter=False)
    names = [*EXAMPLES]
    assert names[:3] == ["pack", "check", "open"]
    assert len(names) == len(SECTIONS) > 20
    for name in names:
        exec(compile(EXAMPLES[name], name, "exec"), values)  # noqa: S102 - our own documentation
        if name == "Collator":
            assert {"input_ids", "labels", "position_ids"} == {*values["batch"]}
    shown = capfd.readouterr()
    assert "Traceback" not in shown.out + shown.err
    assert "Corpus mine" in shown.out
