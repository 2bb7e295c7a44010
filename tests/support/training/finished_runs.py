"""Finished runs without training.

ARCHITECTURES ─finished_run─▶ base/ (random weights), run/ (adapter whose B is not zero, training.json)
run ─merged─▶ folder of the merged model, as the command writes it

A finished run is a base model and a folder as `packcorpus train` writes it.
"""

from __future__ import annotations

import shutil
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import orjson
import torch
from support.training.architectures import ARCHITECTURES, build

from packcorpus.tasks.storage.files import sha256_of, to_json
from packcorpus.train.config import TrainingConfig
from packcorpus.train.loop.run_folder import model_digest
from packcorpus.train.merge import merge_run
from packcorpus.train.merge.find_run import find_base, find_run
from packcorpus.train.merge.merge_run import merge
from packcorpus.train.model.base_model import read_config
from packcorpus.train.model.checkpoint import auto_class
from packcorpus.train.model.qlora import add_adapter

CORPUS = {"name": "mine", "key": "c" * 64, "sequence_length": 256}
RESULT = {"steps": 4, "loss_steps": 1, "first_loss": 3.5, "last_loss": 1.25, "validation_loss": None}
CHOICES = {"precision": "fp32", "micro_batch": 2, "accumulation": 3, "ranks": 1}


def finished_run(
    folder: Path, name: str = "llama", dtype: torch.dtype = torch.float32, scale: float = 0.02, **how: Any
) -> Path:
    """Write a base model and a run on it, and return the run's folder.

    `how` has settings of the model and of the training. Many tests need the same run, which is made once and copied.
    """
    made = _made(name, dtype, scale, orjson.dumps(how, option=orjson.OPT_SORT_KEYS))
    for part in ("base", "run"):
        shutil.copytree(Path(made.name) / part, folder / part)
    for file in (folder / "run").iterdir():
        if file.suffix in (".json", ".md"):  # they name the base model
            text = file.read_text(encoding="utf-8").replace(str(Path(made.name).resolve()), str(folder.resolve()))
            file.write_text(text, encoding="utf-8")
    return folder / "run"


@cache
def _made(name: str, dtype: torch.dtype, scale: float, given: bytes) -> TemporaryDirectory[str]:
    """Return a folder with a base model and a run on it."""
    made = TemporaryDirectory()
    folder, how = Path(made.name).resolve(), orjson.loads(given)
    known = {*TrainingConfig.model_fields, "corpus"}
    settings = {key: how.pop(key) for key in [*how] if key not in known}
    torch.manual_seed(3)
    base = folder / "base"
    build(name, **ARCHITECTURES[name][0] | settings).to(dtype).save_pretrained(base)
    run_on(folder / "run", base, scale, **how)
    return made


def run_on(run: Path, base: Path, scale: float = 0.02, corpus: dict[str, Any] | None = None, **config: Any) -> Path:
    """Write a run on a base model; its adapter has random weights of scale `scale`."""
    given = TrainingConfig(**{"base_model": str(base), "quantization": "none", "lora_r": 4} | config)
    auto = auto_class(base, read_config(base))
    model = add_adapter(auto.from_pretrained(base, dtype="auto"), given, base)
    randomize(model, scale)
    model.save_pretrained(run)
    write_record(run, base, given, corpus or CORPUS)
    return run


def randomize(model: Any, scale: float = 0.02) -> None:
    """Change all weights of an adapter as training would."""
    torch.manual_seed(4)
    with torch.no_grad():
        for key, weights in model.named_parameters():
            if "lora_B" in key:
                weights.normal_(std=scale)
            elif "lora_magnitude" in key:
                weights.mul_(1.0 + scale)
            elif ".modules_to_save." in key:
                weights.add_(torch.randn_like(weights), alpha=5 * scale)


def merged(
    run: Path, output: Path, dtype: str | None = None, root: Path | None = None, base_weights: Any = None
) -> Path:
    """Merge a run in this process.

    No garbage is collected before each model is loaded: these models are tiny, and that takes an eighth of the time.
    """
    found = find_run(str(run), output.parent)
    with mock.patch.object(merge_run, "gc"):
        return merge(found, find_base(found), dtype, output, root or output.parent, base_weights)


def write_record(run: Path, base: Path, config: TrainingConfig, corpus: dict[str, Any]) -> None:
    record = {
        "key": "d" * 64,
        "corpus": corpus,
        "format_version": "3.0",
        "base_model": str(base.resolve()),
        "base_digest": model_digest(str(base)),
        "base_commit": None,
        "config": config.model_dump(),
        "choices": CHOICES,
        "result": RESULT,
        "versions": {"packcorpus": "0.1.0"},
        "adapter_sha256": sha256_of(run / "adapter_model.safetensors"),
        "log": [],
    }
    (run / "training.json").write_bytes(to_json(record))
