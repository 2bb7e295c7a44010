"""Generate answers for validation conversations at each evaluation.

    first `samples` validation conversations ─prompts─▶ greedy ─tokenizer of the corpus─▶ samples.jsonl of the run

samples.jsonl has one line per evaluation and conversation: step, sample, prompt, expected, generated, and whether the
answer ended with a stop token. A resumed run replaces the lines after its checkpoint, so the file does not depend on
interruptions. Nothing here changes the model or the random state.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import orjson
from rich.console import Console
from transformers import TrainerCallback

from tasks.core.printable import counted, duration, shown
from tasks.encoders.encoder import Encoder
from tasks.encoders.tokenizer_files import open_tokenizer
from tasks.storage.files import write_bytes
from train.data.corpus import Corpus
from train.evaluation.generate import generating, greedy
from train.evaluation.prompts import Prompt, find_prompts
from train.model.attention import dtype_of
from train.model.base_model import positions

NAME = "samples.jsonl"
LIMIT = 128  # maximum tokens of an answer
PRINTED = 3  # samples at the end of a run
PROMPT = 60  # number of characters of a prompt that are printed, from its end

Sample = dict[str, Any]


class Samples(TrainerCallback):
    """Callback that generates samples at each evaluation, on the first rank.

    The other ranks wait for it at their next step.
    """

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
            found = [self._sample(state.global_step, number, prompt) for number, prompt in enumerate(self._prompts)]
        earlier = [sample for sample in read_samples(self._path) if sample["step"] < state.global_step]
        write_bytes(self._path, b"".join(orjson.dumps(sample) + b"\n" for sample in (*earlier, *found)))
        taken = duration(time.perf_counter() - start)
        self._console.print(
            f"{counted(len(found), 'sample')} generated in {taken}: {NAME}", markup=False, soft_wrap=True
        )

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
    """Return the tokens that end an answer.

    They are EOS and the control tokens that end an expected answer. Without a tokenizer, they are the last tokens of
    the expected answers.
    """
    ends = {prompt.expected[-1] for prompt in prompts}
    return ends & {*encoder.controls.values()} | {encoder.eos_id} if encoder else ends


def read_samples(path: Path) -> list[Sample]:
    """Return the samples of a run; [] if there are none."""
    return [orjson.loads(line) for line in path.read_bytes().splitlines()] if path.exists() else []


def samples_of(folder: Path, step: int) -> list[Sample]:
    """Return the samples of the evaluation after a step."""
    return [sample for sample in read_samples(folder / NAME) if sample["step"] == step]


def lines_of(samples: Sequence[Sample]) -> list[str]:
    """Return a few samples as readable text, two lines each.

    Texts from the data are escaped and truncated.
    """
    lines = []
    for sample in samples[:PRINTED]:
        found = [sample[name] for name in ("prompt", "expected", "generated")]
        prompt, expected, generated = (one if isinstance(one, str) else " ".join(map(str, one)) for one in found)
        lines.append(f"sample {sample['sample']}, step {sample['step']}: {shown(prompt[-PROMPT:])}")
        lines.append(f"  generated {shown(generated)}, expected {shown(expected)}")
    return lines
