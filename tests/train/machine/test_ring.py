"""A rank that fails while the others wait ends all ranks within seconds.

The ranks show only its message.

Run as a script under torch.distributed, this file is one rank of several.
"""

from __future__ import annotations

import os
import re
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
from support.commands import ROOT, command
from support.small_corpus import conversations, make_recipe, pack_corpus
from support.training.tiny_training import tiny_model
from transformers.models.llama.modeling_llama import LlamaMLP

from packcorpus.train.__main__ import main
from packcorpus.train.machine import ranks

FAILS_IN = {
    # The place, the error, and its text in the output.
    "proof": (RuntimeError("no kernel image"), "attention `sdpa` does not run here: no kernel image"),
    "micro_batch": (torch.OutOfMemoryError("CUDA out of memory"), "does not fit into the memory"),
}
LIMIT = 120  # seconds, with other processes; a run takes ten


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("alarm")
    pack_corpus(make_recipe(folder, conversations(60), name="mine", sequence_length=64))
    tiny_model(adapter=False).save_pretrained(folder / "tiny")
    return folder


@pytest.mark.parametrize("place", FAILS_IN)
def test_a_rank_that_fails_alone_ends_all_with_its_message(place: str, folder: Path, tmp_path: Path) -> None:
    (manifest,) = (folder / "manifests").glob("*.json")
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    words += [str(Path(__file__)), place, "--manifest", str(manifest), "--base-model", str(folder / "tiny")]
    words += ["--device", "cpu", "--gpus", "2", "--sharding", "full", "--micro-batch", "1", "--max-steps", "3"]
    words += ["--output", str(tmp_path / "run")]
    start = time.monotonic()
    done = command(ROOT, *words)
    assert time.monotonic() - start < LIMIT
    assert done.returncode == 1, done.stderr
    assert FAILS_IN[place][1] in done.stderr
    assert len(re.findall(r"^E\d{3} ", done.stderr, flags=re.M)) == 1, done.stderr


def rank(place: str, given: list[str]) -> None:
    """Run one of two ranks; the second fails in the middle of a pass."""
    # The first waits for weights of the second in this pass.
    patch = pytest.MonkeyPatch()
    # The first rank never fails, so the waits can be short.
    for name, seconds in {"ALIKE": 0.5, "LOOK_EVERY": 0.1, "GRACE": 0.1}.items():
        patch.setattr(ranks, name, seconds)
    patch.setattr(ranks, "FAREWELL", 1000.0)  # gloo, unlike NCCL, would notice that this rank has ended
    plain = LlamaMLP.forward

    name = {"proof": "check_isolation"}.get(place, place)

    def fails(self: Any, x: torch.Tensor) -> torch.Tensor:
        if any(frame.f_code.co_name == name for frame, _ in traceback.walk_stack(None)):
            raise FAILS_IN[place][0]
        return plain(self, x)

    if os.environ["RANK"] == "1":
        patch.setattr(LlamaMLP, "forward", fails)
    sys.exit(main(given))


if __name__ == "__main__":
    rank(sys.argv[1], sys.argv[2:])
