"""From conversations to a merged model with the real commands.

A run is trained in NF4, merged, and merged again.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from support.commands import NO_PICTURE, ROOT, command
from support.small_corpus import conversations, make_recipe, pack_corpus
from support.training.architectures import build
from transformers import AutoModelForCausalLM

from packcorpus.train.model.quantization import nf4_of

PYTHON = sys.executable


@pytest.mark.slow
def test_a_run_in_nf4_is_merged(tmp_path: Path) -> None:
    """A run in NF4 is merged, and a second merge does nothing.

    The base is small, because in NF4 the Llama of the sample takes half a minute for two steps on a CPU.
    """
    pack_corpus(make_recipe(tmp_path, conversations(40), sequence_length=64))
    torch.manual_seed(1)
    build("llama", initializer_range=0.1).save_pretrained(tmp_path / "tiny")
    [manifest] = (tmp_path / "manifests").iterdir()
    given = ["--manifest", str(manifest), "--base-model", "tiny", "--device", "cpu", "--micro-batch", "1"]
    steps = ["--tokens-per-step", "64", "--max-steps", "4", "--learning-rate", "2e-2", "--warmup", "0"]
    trained = command(tmp_path, PYTHON, "-m", "packcorpus.train", *given, *steps, **NO_PICTURE)
    assert trained.returncode == 0, trained.stderr
    record = Path(trained.stdout.splitlines()[-1])

    done = command(tmp_path, PYTHON, "-m", "packcorpus.train", "merge", "small")
    assert done.returncode == 0, done.stderr
    folder = Path("data/merged") / f"{record.parent.name}-fp32"
    assert done.stdout == f"{folder}\n"
    assert "one layer in memory at a time" in done.stderr
    assert "tokens of the corpus, computed in fp32 on the CPU" in done.stderr
    values = json.loads((tmp_path / record).read_text())
    assert len(values["base_digest"]) == len(values["adapter_sha256"]) == 64
    ids = torch.arange(3, 60)[None]
    base = values["base_model"]
    in_nf4 = {"quantization_config": nf4_of(torch.float32), "dtype": torch.float32}
    with torch.inference_mode():
        expected, alone, found = (
            model.eval()(input_ids=ids).logits
            for model in (
                PeftModel.from_pretrained(
                    AutoModelForCausalLM.from_pretrained(base, **in_nf4), tmp_path / record.parent
                ),
                AutoModelForCausalLM.from_pretrained(base, **in_nf4),
                AutoModelForCausalLM.from_pretrained(tmp_path / folder),
            )
        )
    assert (found - expected).norm() < 1e-4 * (alone - expected).norm()
    assert values["config"]["quantization"] == "nf4"
    other = command(tmp_path, PYTHON, "-m", "packcorpus.train", "merge", "small", "--base", "original")
    assert other.stdout == f"{folder}-original\n", other.stderr
    again = command(ROOT, PYTHON, "-m", "packcorpus.train", "merge", values["key"][:8], "--root", str(tmp_path))
    assert (again.returncode, again.stdout) == (0, f"{tmp_path / folder}\n"), again.stderr
    assert "already merged, nothing to do" in again.stderr


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["nope"], 66, "error: nope: no such run"),
        (["nope", "--dtype", "int8"], 64, "invalid choice"),
        ([], 64, "required: RUN"),
    ],
)
def test_a_mistake_is_one_line_and_an_exit_code(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], code: int, message: str
) -> None:
    from packcorpus.train.__main__ import main

    assert main(["merge", *words, "--root", str(tmp_path)]) == code
    printed = capsys.readouterr()
    assert message in printed.err
    assert printed.out == ""
    assert sum(" error: " in line or line.startswith("error: ") for line in printed.err.splitlines()) <= 1
