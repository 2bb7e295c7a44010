"""`torchrun … -m packcorpus train` trains on all ranks that torchrun started."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from support.commands import NO_PICTURE, process
from support.small_corpus import conversations, make_recipe, pack_corpus
from support.training.tiny_training import tiny_model

LENGTH = 64


@pytest.mark.slow
def test_two_ranks_of_torchrun_train_one_run(tmp_path: Path) -> None:
    """The ranks run in a folder with modules of the user that have our names."""
    pack_corpus(make_recipe(tmp_path, conversations(60, seed=5, longest=8), sequence_length=LENGTH))
    tiny_model(adapter=False, num_hidden_layers=1).save_pretrained(tmp_path / "tiny")
    for name in ("train", "tasks", "pipeline"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('a module of the user was run')\n")
    words = ["--standalone", "--nproc-per-node", "2", "-m", "packcorpus", "train", "small", "--base-model", "./tiny"]
    words += ["--device", "cpu", "--micro-batch", "1", "--tokens-per-step", str(4 * LENGTH), "--max-steps", "2"]
    done = process(tmp_path, sys.executable, "-m", "torch.distributed.run", *words, OMP_NUM_THREADS="1", **NO_PICTURE)
    assert done.returncode == 0, done.stderr
    record = tmp_path / done.stdout.splitlines()[-1]
    assert record == next(tmp_path.glob("data/adapters/small-*/training.json"))
    values = json.loads(record.read_bytes())
    assert (values["choices"]["ranks"], len(values["ranks"])) == (2, 2)
    assert done.stderr.count("starting training") == 1
