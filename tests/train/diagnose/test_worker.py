"""Trials that share a process have the results of separate processes."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from support.small_corpus import conversations, make_recipe, pack_corpus
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from packcorpus.train.config import TrainingConfig
from packcorpus.train.diagnose.factors import Trial
from packcorpus.train.diagnose.trials import Runner
from packcorpus.train.diagnose.worker import Kept, copy_of
from packcorpus.train.model import qlora

SETTINGS: tuple[dict[str, Any], ...] = (
    {}, {"activation_checkpointing": False}, {"attention": "eager", "lora_r": 4}, {"fused_loss": True}, {},
)  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a corpus in rows of 128, and a model."""
    folder = tmp_path_factory.mktemp("worker")
    pack_corpus(make_recipe(folder, conversations(60, seed=5), name="short", sequence_length=128))
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=500, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, max_position_embeddings=128, initializer_range=0.1,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder / "model")
    return folder


def words(folder: Path) -> list[str]:
    given = {"root": folder, "base-model": folder / "model", "device": "cpu", "max-steps": 2, "tokens-per-step": 256}
    given |= {"lora-dropout": 0.1, "micro-batch": 1}
    return [word for name, value in given.items() for word in (f"--{name}", str(value))]


def losses(runner: Runner, settings: dict[str, Any]) -> list[tuple[float, float]]:
    outcome, record = runner.run(Trial(str(settings), "several", settings), Path("short"), 300)
    assert not outcome.reason, outcome.reason
    return [(entry["loss"], entry["grad_norm"]) for entry in record["log"] if "step_seconds" in entry]


def test_trials_in_one_process_have_the_losses_of_trials_in_their_own(folder: Path, tmp_path: Path) -> None:
    shared = Runner(words(folder), tmp_path)
    try:
        found = [losses(shared, settings) for settings in SETTINGS]
    finally:
        shared.stop()
    own = Runner(words(folder), tmp_path)
    for number in (2, 3):  # the others show by themselves that nothing of these is left
        assert losses(own, SETTINGS[number]) == found[number]
        own.stop()
    assert found[0] == found[4]
    assert sum(found[0], ()) == pytest.approx(sum(found[1], ()), rel=1e-5)
    assert found[2] != found[0], "another rank"


WORKER = """
import json, os, sys, time
for line in sys.stdin:
    words = json.loads(line)["train"]
    kind = words[words.index("--seed") + 1]
    if kind == "1":
        os.kill(os.getpid(), 11)
    if kind == "2":
        os.system("sleep 1000 & echo $! > %s")
        time.sleep(1000)
    print(json.dumps({"error": {"code": "E632", "message": "too large"}}), file=sys.stderr)
    print(69, flush=True)
"""


def test_a_crash_and_a_trial_that_hangs_lose_only_themselves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    child = tmp_path / "child"
    monkeypatch.setattr(Runner, "command", (sys.executable, "-c", WORKER % child))
    runner = Runner([], tmp_path)

    def reason(seed: int, limit: float = 60) -> str:
        return runner.run(Trial("x", "seed", {"seed": seed}), Path("m"), limit)[0].reason

    assert reason(1) == "killed by SIGSEGV"
    started = time.monotonic()
    assert reason(2, 3) == "took longer than 3 s"
    assert time.monotonic() - started < 30
    if child.exists():  # the process had started
        place = Path(f"/proc/{child.read_text().strip()}/cmdline")
        while (
            place.exists() and place.read_bytes() and time.monotonic() - started < 60
        ):  # a killed process takes time to end
            time.sleep(0.05)
        assert time.monotonic() - started < 60
    assert reason(0) == "E632: too large"
    assert runner.is_cold(Trial("x", "seed")), "a new process follows a failure"


def test_a_copy_shares_the_weights_and_nothing_else(folder: Path) -> None:
    config = TrainingConfig(base_model=str(folder / "model"), activation_checkpointing=True)
    kept = Kept(qlora.load_base)
    first, other = (kept(folder / "model", config, "cpu", torch.float32, name) for name in ("sdpa", "eager"))
    assert first.config._attn_implementation == "sdpa", "the configs are separate"
    for ours, theirs in zip(first.parameters(), other.parameters(), strict=True):
        assert ours is theirs
    qlora.add_adapter(first, config)
    assert not [name for name, _ in other.named_parameters() if "lora" in name]
    layer = next(module for module in other.modules() if isinstance(module, nn.Linear))
    layer.register_forward_hook(lambda *_: None)
    assert not any(module._forward_hooks for module in copy_of(kept._loaded[1]).modules())  # type: ignore[index]
    plain = LlamaForCausalLM.forward
    LlamaForCausalLM.forward = None
    kept.restore_code()
    assert LlamaForCausalLM.forward is plain
