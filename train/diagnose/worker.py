"""Process of a diagnosis that runs trials, and loads the base model only once.

    standard input: one job as JSON per line
      {"train": [words of the command], "until": …} ─▶ the real command ────────────┐
      {"replan": …} ─────────────────────────────────▶ a corpus that is packed again ┴▶ its exit code

A trial changes the structure of the model: adapters, hooks, attention, compiled layers. It therefore gets a copy of the
base model that shares only the frozen weights, and everything else that a trial may change in this process is set back
after it. After a failure, this process ends, because neither a GPU nor its memory can be trusted then.
"""

from __future__ import annotations

import ctypes
import gc
import os
import random
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from copy import deepcopy
from importlib import import_module
from pathlib import Path
from typing import Any

import orjson

from packcorpus.train.loop.run_folder import UNTIL


def main() -> None:
    """Answer each job with its exit code, until one fails."""
    with open(os.dup(1), "w", encoding="ascii") as answers:  # another process that replaces this one does not get it
        os.dup2(2, 1)  # for whatever a library prints
        state = None
        for line in sys.stdin:
            job = orjson.loads(line)
            if "train" in job and state is None:
                with suppress(ImportError):  # the command reports a missing library
                    state = State()
            if "train" in job:
                os.environ[UNTIL] = job["until"]
            code = _train(job["train"]) if "train" in job else _replan(**job["replan"])
            sys.stderr.flush()
            if state and not code:
                state.restore()
            print(code, file=answers, flush=True)
            if code:
                return


def _train(words: list[str]) -> int:
    return int(import_module("packcorpus.train.__main__").main(words))  # a layer above this one


def _replan(manifest: str, root: str, changes: dict[str, Any], folder: str) -> int:
    from packcorpus.tasks.core.messages import format_error, to_pack_error
    from packcorpus.train.data.corpus import open_corpus
    from packcorpus.train.diagnose.trials import replan

    try:
        replan(open_corpus(manifest, root=Path(root)), changes, Path(root), Path(folder))
    except Exception as error:
        failed = to_pack_error(error)
        print(format_error(failed), file=sys.stderr)
        return failed.exit_code
    return 0


class State:
    """State of this process before its first trial."""

    def __init__(self) -> None:
        import numpy as np
        import torch

        from packcorpus.train.model import qlora

        self._model = Kept(qlora.load_base)
        qlora.load_base = self._model
        self._environment = dict(os.environ)
        self._random = random.getstate(), np.random.get_state(), torch.get_rng_state()
        self._settings = torch.get_default_dtype(), torch.get_float32_matmul_precision(), torch.get_num_threads()

    def restore(self) -> None:
        """Set everything back, and free the memory of a trial."""
        import numpy as np
        import torch
        from accelerate.state import AcceleratorState, GradientState
        from torch._dynamo.utils import counters

        self._model.restore_code()
        os.environ.clear()
        os.environ.update(self._environment)
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        torch._dynamo.reset()
        counters.clear()
        gc.collect()
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).malloc_trim(0)  # otherwise, the next trial would seem to need this memory
        generator, numpy_generator, torch_generator = self._random
        random.setstate(generator)
        np.random.set_state(numpy_generator)
        torch.set_rng_state(torch_generator)
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()
            torch.cuda.manual_seed_all(torch.initial_seed())
        dtype, precision, threads = self._settings
        torch.set_default_dtype(dtype)
        torch.set_float32_matmul_precision(precision)
        torch.set_num_threads(threads)


class Kept:
    """Function like `qlora.load_base` that keeps the first model, and returns copies."""

    def __init__(self, load: Callable[..., Any]):
        self._load = load
        self._loaded: tuple[Any, Any] | None = None
        self._code: list[tuple[Any, dict[str, Any]]] = []  # modules and classes of the model, as they were

    def __call__(
        self, base: Path | str, config: Any, device: Any, dtype: Any, attention: str, skipped: Sequence[str] = ()
    ) -> Any:
        from packcorpus.train.model.attention import use_attention

        what = str(base), config.quantization, str(device), dtype, tuple(skipped)
        if config.sharding != "none" or (self._loaded and self._loaded[0] != what):
            return self._load(base, config, device, dtype, attention, skipped)
        if self._loaded is None:
            model = self._load(base, config, device, dtype, attention, skipped)
            self._loaded = what, model
            classes = {type(module) for module in model.modules()}
            modules = {sys.modules[kind.__module__] for kind in classes}
            self._code = [(holder, dict(vars(holder))) for holder in (*classes, *modules)]
        model = copy_of(self._loaded[1])
        use_attention(model, attention)
        return model

    def restore_code(self) -> None:
        """Restore functions and methods of the model's code that a library replaced."""
        for holder, values in self._code:
            for name, value in values.items():
                if vars(holder).get(name) is not value:
                    setattr(holder, name, value)


def copy_of(model: Any) -> Any:
    """Copy the structure of a model, but share its weights and their quantization."""
    from bitsandbytes.functional import QuantState

    shared = list(model.parameters())
    for module in model.modules():
        shared += [value for value in vars(module).values() if isinstance(value, QuantState)]
    return deepcopy(model, {id(value): value for value in shared})


if __name__ == "__main__":
    main()
