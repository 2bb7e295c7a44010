"""Try an attention backend in a separate process, which its kernel may crash.

    base model, settings, rows ─request.json─▶ python -P -m train.model.attention_trial FOLDER
                               ◀─result.json── Trial: tokens/s, or why it is excluded

A kernel that fails may end its process, or leave the GPU unusable for that process. Here, this affects only the
separate process. That process loads its own copy of the model, so the caller must not have loaded the model yet.
"""

from __future__ import annotations

import logging
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import orjson
import torch

from tasks.core.errors import PackError
from train.config import TrainingConfig
from train.machine.process import may_be_shortage
from train.model.attention import APART, autocast, backend_to_load, missing_backends, unavailable_reason
from train.model.base_model import read_config, silence_libraries
from train.model.isolation import ROWS, Trial, choose_rows, try_backend
from train.model.qlora import load_model

LIMIT = 900.0  # seconds for checking, compiling, and timing, after the model is loaded
LOADED = "loaded"  # name of the file that signals that the model is loaded
COMMAND = (sys.executable, "-P", "-m", "train.model.attention_trial")


def try_apart(
    base: Path | str, config: TrainingConfig, device: torch.device, dtype: torch.dtype, dataset: Any, count: int
) -> list[Trial]:
    """Try every backend whose kernel may crash; see `isolation.fastest`."""
    # Backends that the machine or the model lacks are not tried.
    if config.sharding == "full":  # a separate process would need the whole model
        return [Trial(backend, 0.0, "not tried with sharding: full") for backend in APART]
    lacking = missing_backends(read_config(base))
    numbers = [*range(count), *choose_rows(dataset, ROWS)]
    rows = [{name: column.tolist() for name, column in dataset[n % len(dataset)].items()} for n in numbers]
    request = {
        "base": str(base), "is_folder": isinstance(base, Path), "config": config.model_dump(), "device": str(device),
        "dtype": str(dtype).removeprefix("torch."), "rows": rows, "count": count,
    }  # fmt: skip
    backends = [name for name in APART if name not in lacking and not unavailable_reason(name, device, dtype)]
    return [in_process(request | {"backend": backend}) for backend in backends]


def in_process(request: dict[str, Any], command: Sequence[str] = COMMAND, limit: float = LIMIT) -> Trial:
    """Run one trial in a separate process; if it crashes, the trial has the reason."""
    backend = request["backend"]
    # The process is not one of the ranks.
    of_ranks = re.compile("TORCHELASTIC_.*|MASTER_.*|RANK|LOCAL_RANK|WORLD_SIZE")
    own = {name: text for name, text in os.environ.items() if not of_ranks.fullmatch(name)}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "request.json").write_bytes(orjson.dumps(request))
        with (folder / "stderr").open("wb") as errors:
            process = subprocess.Popen(  # noqa: S603 - this Python, and a path
                [*command, name], env=own, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=errors
            )
            until = math.inf
            while (code := process.poll()) is None:
                if until == math.inf and (folder / LOADED).exists():
                    until = time.monotonic() + limit
                if time.monotonic() > until:
                    process.kill()
                    process.wait()
                    return Trial(backend, 0.0, f"took longer than {limit:.0f} s")
                time.sleep(0.05)
        if code == 0 and (folder / "result.json").exists():
            return Trial(**orjson.loads((folder / "result.json").read_bytes()))
        lines = (folder / "stderr").read_text(encoding="utf-8", errors="replace").strip().splitlines()
    if code < 0:
        return Trial(backend, 0.0, f"its process was killed by {signal.Signals(-code).name}")
    last = (lines or ["no message"])[-1]
    return Trial(backend, 0.0, f"its process failed ({last[:160]})")


def run(request: dict[str, Any], folder: Path) -> Trial:
    """Load the model as for training, and try the backend."""
    backend, config = request["backend"], TrainingConfig(**request["config"])
    base = Path(request["base"]) if request["is_folder"] else request["base"]
    device, dtype = torch.device(request["device"]), getattr(torch, request["dtype"])
    kinds = {"input_ids": torch.int32, "labels": torch.int64, "position_ids": torch.int32}
    rows = [{name: torch.tensor(row[name], dtype=kind) for name, kind in kinds.items()} for row in request["rows"]]
    try:
        loaded_with, _ = backend_to_load(read_config(base), "auto")
        if device.index is not None:  # one of several GPUs; torch refuses "cuda" here
            torch.cuda.set_device(device)  # Triton kernels run on the current device
        model = load_model(base, config, device, dtype, loaded_with)
        (folder / LOADED).touch()
        with autocast(device, dtype):
            return try_backend(model, rows, request["count"], backend, seed=config.seed, passes=3)
    except PackError as error:
        return Trial(backend, 0.0, str(error))
    except RuntimeError as error:
        if not may_be_shortage(error):
            raise
        return Trial(backend, 0.0, str(error).splitlines()[0][:160])


def main(folder: Path) -> None:
    """Run the trial that request.json in a folder describes, and write result.json."""
    parent = os.getppid()

    def end_with_parent() -> None:  # so that this process does not keep the GPU busy
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()
    logging.getLogger("bitsandbytes").setLevel(logging.CRITICAL)
    silence_libraries()
    result = run(orjson.loads((folder / "request.json").read_bytes()), folder)
    (folder / "result.json").write_bytes(orjson.dumps(asdict(result)))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
