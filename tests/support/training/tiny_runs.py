"""Train a tiny architecture with the real command, and compare its losses.

name ─saved─▶ folder of a model without dropout ─┬─trained──▶ run folder, by `packcorpus train` in one or two ranks
                                                 └─losses_of▶ the loss of each step, by the class of the checkpoint
both ─outcome─▶ Outcome(way, difference, layers that are left out), or the error
"""

from __future__ import annotations

import json
import os
import re
import socket
import sys
import tempfile
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import transformers
from support.commands import NO_PICTURE, ROOT, command, in_fork_with_torch
from support.small_corpus import conversations, make_recipe, pack_corpus
from support.training.architectures import ALONE, ARCHITECTURES, STATE, TRAINS, build
from support.training.multimodal import MULTIMODAL
from support.training.multimodal import build as build_multimodal
from support.training.tiny_training import Row, rows_of

from packcorpus.train.__main__ import main

LENGTH, STEPS, SEED = 128, 3, 42
# Transformers computes the loss of single conversations with other shapes, which rounds differently.
SAME = 1e-5
ERROR = re.compile(r"error (E\d+): (.*)|(E791)")


@dataclass(frozen=True)
class Outcome:
    """How a model trained: `way` is TRAINS, STATE, ALONE, or an error with its code."""

    way: str
    difference: float = 0.0  # largest relative difference of a loss
    unused: int = 0  # layers without a gradient, which have no adapter

    def agrees(self, expected: str) -> bool:
        """Return whether this is what the table says: a way, or words of an error."""
        is_error = bool(re.match(r"E\d+ error", self.way)) and not self.way.startswith("E791")
        return self.way == expected or (is_error and expected in self.way)


@cache
def corpus() -> Path:
    """Pack a small corpus, and return its manifest."""
    folder = Path(tempfile.mkdtemp(prefix="tiny_runs-"))
    return pack_corpus(make_recipe(folder, conversations(120, seed=5), sequence_length=LENGTH, name="tiny"))


def without_dropout(config: Any) -> None:
    """Set every dropout of a config, and of the configs within it, to 0."""
    for name, value in vars(config).items():
        if isinstance(value, float) and re.search("drop|pdrop", name):
            setattr(config, name, 0.0)
        if hasattr(value, "model_type"):
            without_dropout(value)


def saved(name: str, folder: Path) -> Path:
    """Write a tiny model with random weights."""
    torch.manual_seed(3)
    model = build_multimodal(name) if name in MULTIMODAL else build(name, **ARCHITECTURES[name][0])
    without_dropout(model.config)
    with torch.no_grad():  # embeddings of zeros have no finite gradient in Gemma 3n, and are unlike a trained model
        for layer in (module for module in model.modules() if isinstance(module, torch.nn.Embedding)):
            layer.weight[layer.weight.abs().sum(1) == 0] = 0.1
    model.save_pretrained(folder)
    return folder


def words_of(base: Path, output: Path, *options: str) -> list[str]:
    """Return the options of the command."""
    words = ["--manifest", str(corpus()), "--base-model", str(base), "--output", str(output)]
    words += ["--device", "cpu", "--precision", "fp32", "--quantization", "none", "--micro-batch", "1"]
    words += ["--tokens-per-step", str(4 * LENGTH), "--max-steps", str(STEPS), "--learning-rate", "5e-3"]
    return [*words, "--lora-dropout", "0", "--fused-loss", "true", *options]


def trained(base: Path, output: Path, *options: str, ranks: int = 1) -> tuple[dict[str, Any], str]:
    """Run the command; return training.json, or {} and the text of the error."""
    words = words_of(base, output, *options)
    if ranks == 1:
        text = command(ROOT, sys.executable, "-m", "packcorpus.train", *words, **NO_PICTURE).stderr
    else:
        code = "import json, sys; from support.training.tiny_runs import in_ranks; in_ranks(*json.loads(sys.argv[1]))"
        text = in_fork_with_torch(ROOT, "-c", code, json.dumps([ranks, words]), **NO_PICTURE).stderr
    record = output / "training.json"
    return (json.loads(record.read_bytes()) if record.exists() else {}), text


def in_ranks(count: int, words: list[str]) -> None:
    """Run the command in forks of this process, as ranks of one run."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    os.environ |= {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count)}
    ranks = []
    for rank in range(count):
        ranks.append(os.fork())
        if not ranks[-1]:
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            os._exit(main(words))
    raise SystemExit(max(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in ranks))


def losses_of(base: Path, rows_per_step: int, steps: int = 1) -> list[float]:
    """Return the mean loss of each step, from single conversations.

    The first step has the weights of the base model.
    """
    config = transformers.AutoConfig.from_pretrained(base)
    model = getattr(transformers, config.architectures[0]).from_pretrained(base, dtype=torch.float32).eval()
    rows = rows_of(corpus())
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(SEED)).split(rows_per_step)
    return [mean_loss(model, [rows[number] for number in numbers.tolist()]) for numbers in order[:steps]]


def mean_loss(model: Any, rows: list[Row]) -> float:
    """Return the mean loss of trained tokens; each conversation runs alone."""
    total, count = 0.0, 0
    with torch.no_grad():
        for row in rows:
            starts = [*(row["position_ids"] == 0).nonzero().flatten().tolist(), len(row["input_ids"])]
            for start, stop in pairwise(starts):
                targets = row["labels"][start + 1 : stop]
                if (targets == -100).all():
                    continue
                logits = model(input_ids=row["input_ids"][None, start:stop].long(), use_cache=False).logits
                losses = torch.nn.functional.cross_entropy(logits[0, :-1].double(), targets, reduction="none")
                total += float(losses.sum())
                count += int((targets != -100).sum())
    return total / count


def outcome(name: str, folder: Path, ranks: int = 1) -> Outcome:
    """Train an architecture, and compare the losses of its first steps."""
    try:
        base = saved(name, folder / "base")
    except ImportError as error:
        return Outcome(f"transformers cannot build it: {' '.join(str(error).split())[:100]}")
    record, text = trained(base, folder / "run", ranks=ranks)
    if not record:
        return Outcome(error_of(text))
    logged = [entry["loss"] for entry in record["log"] if "step_seconds" in entry]
    expected = losses_of(base, record["choices"]["step"])
    off = max(abs(a - b) / b for a, b in zip(logged, expected, strict=False))
    assert len(logged) == STEPS, logged
    notes = record["choices"]["notes"]
    unused = next((int(found[1]) for note in notes if (found := re.match(r"adapter: (\d+) layer", note))), 0)
    way = TRAINS
    for mark, named in {"layers with a state": STATE, "model runs on each": ALONE}.items():
        way = named if mark in json.dumps(record["in_effect"]) else way
    if not off <= SAME:
        return Outcome(f"losses {logged} differ from {expected}", off, unused)
    return Outcome(way, off, unused)


def error_of(text: str) -> str:
    """Return the error in the output of a run."""
    lines = [line for line in text.splitlines() if re.search(r"\bE\d{3}\b", line)]
    return lines[-1] if lines else f"ended without a message: {text[-300:]}"


os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
