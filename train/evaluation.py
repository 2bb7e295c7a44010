"""Evaluate a run: its evaluations, decisions, predicted tokens, and samples.

    trainer_state.json, sealed with each checkpoint ─history─▶ History(last, best, stale)
    on_evaluate ─history─▶ lower than all before: save (keep: best)
                          ─▶ `early_stopping` evaluations without a lower loss: save and stop
    first `samples` validation conversations ─prompts─▶ greedy ─tokenizer of the corpus─▶ samples.jsonl of the run

The log is the only state. A resumed run reads it from its checkpoint. Every rank has the same log, because the losses
are summed over all ranks, so all ranks decide the same.

samples.jsonl has one line per evaluation and conversation: step, sample, prompt, expected, generated, and whether the
answer ended with a stop token. A resumed run replaces the lines after its checkpoint, so the file does not depend on
interruptions. Samples change neither the model nor the random state.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import torch
from rich.console import Console
from transformers import TrainerCallback

from packcorpus.tasks.core.printable import counted, duration, shown
from packcorpus.tasks.encoders.encoder import Encoder
from packcorpus.tasks.encoders.tokenizer_files import open_tokenizer
from packcorpus.tasks.storage.files import write_bytes
from packcorpus.tasks.storage.schemas import IGNORED
from packcorpus.train.config import TrainingConfig
from packcorpus.train.data.corpus import Corpus
from packcorpus.train.data.paths import paths_of
from packcorpus.train.model.attention import BACKENDS, autocast, backend_to_load, dtype_of, use_attention
from packcorpus.train.model.base_model import positions
from packcorpus.train.model.qlora import keep_random

NAME = "samples.jsonl"
LIMIT = 128  # maximum tokens of an answer
PRINTED = 3  # samples at the end of a run
WITH_CACHE = ("sdpa", "eager")  # attention backends that continue a single sequence from a cache
PROMPT = 60  # number of characters of a prompt that are printed, from its end

Sample = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Validation loss and share of trained tokens that the model predicts."""

    step: int
    loss: float
    token_accuracy: float | None  # None in the log of an earlier version


@dataclass(frozen=True, slots=True)
class History:
    """Evaluations of a run so far."""

    last: Evaluation | None
    best: Evaluation | None  # the first with the lowest loss; None if no loss is a number
    stale: int  # evaluations since the best

    def is_over(self, config: TrainingConfig) -> bool:
        """Return whether `early_stopping` ends the run here."""
        return config.early_stopping is not None and self.stale >= config.early_stopping


def history(log: Iterable[dict[str, Any]]) -> History:
    """Read the evaluations of a log."""
    last, best, stale = None, None, 0
    for entry in log:
        if "eval_loss" not in entry:
            continue
        last = Evaluation(entry["step"], entry["eval_loss"], entry.get("eval_token_accuracy"))
        if last.loss < (best.loss if best else float("inf")):  # NaN is not lower
            best, stale = last, 0
        else:
            stale += 1
    return History(last, best, stale)


def outcome(log: list[dict[str, Any]], config: TrainingConfig, is_complete: bool) -> dict[str, Any]:
    """Return the results of evaluation; `is_complete`: the last step was run."""
    found = history(log)
    last, best = found.last, found.best
    kept = best or last if config.keep == "best" else last
    stopped = last and found.is_over(config) and not is_complete
    return {
        "validation_loss": kept.loss if kept else None,
        "token_accuracy": kept.token_accuracy if kept else None,
        "kept_step": kept.step if kept else max((entry["step"] for entry in log), default=0),
        "best": best and {"step": best.step, "validation_loss": best.loss, "token_accuracy": best.token_accuracy},
        "stopped_early": {"step": last.step, "evaluations": found.stale} if last and stopped else None,
    }


def described(config: TrainingConfig, rows: int) -> str:
    """Describe when the validation split is evaluated, and which decisions follow."""
    if not rows:
        return "none: the corpus has no validation split"
    text = f"every {counted(config.eval_every, 'step')}" if config.eval_every else "at the end"
    text += f", on {counted(rows, 'row')}"
    text += "; the adapter of the lowest loss is kept" if config.keep == "best" else ""
    if config.early_stopping:
        text += f"; stops after {counted(config.early_stopping, 'evaluation')} without a lower loss"
    return text + (f"; generates {counted(config.samples, 'answer')} each time" if config.samples else "")


def unused(config: TrainingConfig, steps: int) -> str | None:
    """Return a warning if only the last step is evaluated despite `eval_every`."""
    if not (config.eval_every and config.eval_every >= steps):
        return None
    decides = config.keep == "best" or config.early_stopping
    return (
        f"eval_every is {config.eval_every}, but there are only {counted(steps, 'step')}, so only the last step is "
        f"evaluated{' and nothing is compared' if decides else ''}. Lower eval_every"
    )


class Decisions(TrainerCallback):
    """Callback that saves and stops by the validation loss."""

    def __init__(self, config: TrainingConfig, has_rows: bool):
        self._config, self._has_rows = config, has_rows

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        if self._has_rows and state.global_step >= state.max_steps:
            control.should_evaluate = True

    def on_evaluate(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        found = history(state.log_history)
        if self._config.keep == "best" and not found.stale:
            control.should_save = True
        if found.is_over(self._config):
            control.should_save = control.should_training_stop = True


def count_predicted(outputs: Any, labels: torch.Tensor) -> torch.Tensor:
    """Count the labeled tokens that the preceding token predicts, int64[]."""
    if (counted := outputs.get("predicted")) is not None:  # with `fused_loss`
        return counted
    return (outputs["logits"][:, :-1].argmax(-1) == labels[:, 1:]).sum()  # never equal to -100


# -- samples -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Prompt:
    """Tokens of a conversation before its first trained turn, and of that turn."""

    ids: list[int]
    expected: list[int]


class Samples(TrainerCallback):
    """Callback that generates samples at each evaluation, on the first rank."""

    def __init__(self, corpus: Corpus, rows: Any, model: Any, count: int, folder: Path, console: Console):
        self._model, self._path, self._console = model, folder / NAME, console
        self._encoder = open_tokenizer(corpus.manifest, corpus.folder) if corpus.manifest else None
        self._prompts = find_prompts(rows, count)
        self._stops = stop_tokens(self._prompts, self._encoder)

    def on_evaluate(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        if not state.is_world_process_zero:
            return
        start = time.perf_counter()
        with generating(self._model, dtype_of(args)):
            samples = [self._sample(state.global_step, number, prompt) for number, prompt in enumerate(self._prompts)]
        earlier = [sample for sample in read_samples(self._path) if sample["step"] < state.global_step]
        write_bytes(self._path, b"".join(orjson.dumps(sample) + b"\n" for sample in (*earlier, *samples)))
        line = f"{counted(len(samples), 'sample')} generated in {duration(time.perf_counter() - start)}: {NAME}"
        self._console.print(line, markup=False, soft_wrap=True)

    def _sample(self, step: int, number: int, prompt: Prompt) -> Sample:
        longest = positions(self._model.config.get_text_config())
        limit = LIMIT if longest is None else min(LIMIT, longest - len(prompt.ids))
        generated = greedy(self._model, prompt.ids, limit, self._stops)
        return {
            "step": step,
            "sample": number,
            "prompt": self._text(prompt.ids),
            "expected": self._text(prompt.expected),
            "generated": self._text(generated),
            "ended": bool(generated) and generated[-1] in self._stops,
        }

    def _text(self, ids: list[int]) -> str | list[int]:
        return self._encoder.decode(ids) if self._encoder else ids


def stop_tokens(prompts: Sequence[Prompt], encoder: Encoder | None) -> set[int]:
    """Return EOS and the control tokens that end an expected answer."""
    # Without a tokenizer, they are the last tokens of the expected answers.
    ends = {prompt.expected[-1] for prompt in prompts}
    return ends & {*encoder.controls.values()} | {encoder.eos_id} if encoder else ends


def read_samples(path: Path) -> list[Sample]:
    """Return the samples of a run; [] if there are none."""
    return [orjson.loads(line) for line in path.read_bytes().splitlines()] if path.exists() else []


def samples_of(folder: Path, step: int) -> list[Sample]:
    """Return the samples of the evaluation after a step."""
    return [sample for sample in read_samples(folder / NAME) if sample["step"] == step]


def lines_of(samples: Sequence[Sample]) -> list[str]:
    """Return a few samples as readable text, two lines each."""
    lines = []
    for sample in samples[:PRINTED]:
        values = [sample[name] for name in ("prompt", "expected", "generated")]
        prompt, expected, generated = (text if isinstance(text, str) else " ".join(map(str, text)) for text in values)
        lines.append(f"sample {sample['sample']}, step {sample['step']}: {shown(prompt[-PROMPT:])}")
        lines.append(f"  generated {shown(generated)}, expected {shown(expected)}")
    return lines


def find_prompts(rows: Any, count: int) -> list[Prompt]:
    """Return the prompts of at most the first `count` conversations of a split."""
    prompts: list[Prompt] = []
    for number in range(len(rows)):
        row = {name: np.asarray(values) for name, values in rows[number].items()}
        ids, is_trained = row["input_ids"], row["labels"] != IGNORED
        for places, shared in paths_of(row):
            first = max(shared, 1)  # nothing predicts the first token
            trained = np.flatnonzero(is_trained[places[first:]]) + first
            if len(trained):  # otherwise padding
                gaps = np.flatnonzero(np.diff(trained) > 1)
                end = trained[gaps[0]] if len(gaps) else trained[-1]
                tokens = ids[places].tolist()
                prompts.append(Prompt(tokens[: trained[0]], tokens[trained[0] : end + 1]))
        if len(prompts) >= count:
            break
    return prompts[:count]


@contextmanager
def generating(model: Any, dtype: torch.dtype) -> Iterator[None]:
    """Make a model in training ready for `greedy` in this context.

    Dropout and activation checkpointing are off, compiled layers run uncompiled, and a backend for packed rows is
    replaced. The mode, the backend, and the state of the random number generators are restored.
    """
    was_training, backend = model.training, model.config._attn_implementation
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        stack.enter_context(keep_random(model.device))
        stack.enter_context(autocast(model.device, dtype))
        if any(module._compiled_call_impl for module in model.modules()):
            # Otherwise, each length would be compiled separately.
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.callback(model.train, was_training)
        model.eval()
        if backend not in WITH_CACHE:
            name = next(name for name, theirs in BACKENDS.items() if theirs == backend)
            stack.callback(use_attention, model, name)
            use_attention(model, backend_to_load(model.config, "sdpa")[0])
        yield


def greedy(model: Any, prompt: Sequence[int], limit: int, stops: Collection[int]) -> list[int]:
    """Return at most `limit` tokens that follow a prompt, up to a stop token.

    Call this within `generating`. `generate` of transformers is not used, because it follows the generation_config of a
    model: temperature, penalties, minimum length. The head reads only the last token, because the logits of a long
    prompt may not fit into memory.
    """
    ids, cache, found = torch.tensor([list(prompt)], device=model.device), None, list[int]()
    head = model.get_output_embeddings()
    hook = head.register_forward_pre_hook(lambda _, inputs: (inputs[0][:, -1:], *inputs[1:]))
    try:
        while len(found) < limit:
            outputs = model(input_ids=ids, past_key_values=cache, use_cache=True)
            cache = outputs.past_key_values
            found.append(int(outputs.logits[0, -1].argmax()))
            if found[-1] in stops:
                break
            ids = torch.tensor([found[-1:]], device=model.device)
    finally:
        hook.remove()
    return found
