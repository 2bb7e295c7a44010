"""Load a model, and generate answers token by token.

Subject ─open_speaker─▶ base in the precision of the training + adapter, or the whole model, on the GPU or the CPU
prompt ─Speaker.answer─▶ `generate` of Transformers ─▶ text on standard output, a token at a time ─▶ ids
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, StoppingCriteria
from transformers.generation.streamers import BaseStreamer

from packcorpus.tasks.core.errors import UsageError
from packcorpus.tasks.core.printable import counted, printable_lines
from packcorpus.train.chat.dialog import Dialog, OfCorpus, OfTokenizer
from packcorpus.train.chat.subject import Subject
from packcorpus.train.config import TrainingConfig
from packcorpus.train.machine import devices
from packcorpus.train.merge.other_files import find_facts
from packcorpus.train.merge.tensors import tensors_of_model
from packcorpus.train.model import base_model
from packcorpus.train.model.attention import autocast, backend_to_load
from packcorpus.train.model.qlora import add_adapter, load_base

UNFINISHED = "\ufffd"  # the text of an incomplete character


def open_dialog(subject: Subject, root: Path) -> Dialog:
    """Return the prompts of a model: those of its corpus, if that is here."""
    base_model.silence_libraries()
    facts = find_facts(subject.run.record, root)[0] if subject.run else None
    if facts and facts.corpus and facts.encoder:
        return OfCorpus(facts)
    folders = [subject.folder, *([subject.base.folder] if subject.base else [])]
    folder = next(filter(base_model.has_tokenizer, folders), subject.folder)
    stops = (
        GenerationConfig.from_pretrained(folder).eos_token_id if (folder / "generation_config.json").is_file() else None
    )
    return OfTokenizer(folder, stops if isinstance(stops, list) else [] if stops is None else [stops])


def open_speaker(subject: Subject, dialog: Dialog, most: int, temperature: float, seed: int) -> Speaker:
    """Load a model for answers of at most `most` tokens.

    Raises the errors of training.
    """
    settings = subject.run.record["config"] if subject.run else {}
    known = {name: value for name, value in settings.items() if name in TrainingConfig.model_fields}
    machine: dict[str, Any] = {"device": "auto", "precision": "auto", "sharding": "none"}
    adapter = str(subject.folder) if subject.base else None
    config = TrainingConfig(**known | machine | {"adapter": adapter})
    if subject.base is None:  # merged weights are used as they are
        config = config.model_copy(update={"quantization": "none"})
    device = devices.resolve(config)
    place, dtype = torch.device(device.kind), device.dtype
    base = subject.base.folder if subject.base else subject.folder
    if subject.base is None and device.kind == "cpu":
        dtype = tensors_of_model(base).precision
    attention = backend_to_load(base_model.read_config(base), "sdpa")[0]
    skipped = subject.run.record.get("in_16_bits", []) if subject.run and subject.base else []
    model = load_base(base, config, place, dtype, attention, skipped)
    model.generation_config = GenerationConfig()  # a model may have its own temperature, penalties, and minimum length
    if subject.base:
        model = add_adapter(model, config, base)
    return Speaker(
        model.eval(), dtype, dialog, most, temperature, seed, f"{device.name}, {str(dtype).removeprefix('torch.')}"
    )


class Speaker:
    """A model that answers prompts on standard output."""

    def __init__(
        self, model: Any, dtype: torch.dtype, dialog: Dialog, most: int, temperature: float, seed: int, about: str
    ):
        self._model, self._dtype, self._dialog, self._most, self._about = model, dtype, dialog, most, about
        self._longest = base_model.positions(model.config.get_text_config())
        sampling: dict[str, Any] = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {}
        self._how = {"eos_token_id": dialog.stops, "pad_token_id": dialog.stops[0], "use_cache": True} | sampling
        self.is_stopped = False
        torch.manual_seed(seed)

    def __str__(self) -> str:
        return self._about

    def stop(self) -> None:
        """End the answer after the token that is being generated."""
        self.is_stopped = True

    def answer(self, prompt: Sequence[int]) -> list[int]:
        """Print an answer and return its ids. Raises UsageError if the prompt is too long."""
        most = self._most if self._longest is None else min(self._most, self._longest - len(prompt))
        if most < 1:
            raise UsageError(
                "bad_prompt",
                f"the dialog has {counted(len(prompt), 'token')}, but the model has positions for {self._longest:,}; "
                "start a new one",
            )
        self.is_stopped, printed = False, Printed(self._dialog)
        ids = torch.tensor([list(prompt)], device=self._model.device)
        with torch.inference_mode(), autocast(self._model.device, self._dtype):
            self._model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                generation_config=GenerationConfig(max_new_tokens=most, **self._how),
                stopping_criteria=[Stopped(self)],
                streamer=printed,
            )
        return printed.ids


class Stopped(StoppingCriteria):
    """Criterion that ends an answer after `Speaker.stop`."""

    def __init__(self, speaker: Speaker):
        self._speaker = speaker

    def __call__(self, input_ids: Any, scores: Any, **_: Any) -> Any:
        return torch.full((input_ids.shape[0],), self._speaker.is_stopped, device=input_ids.device)


class Printed(BaseStreamer):
    """Streamer that prints each character as soon as its tokens are complete."""

    def __init__(self, dialog: Dialog):
        self._dialog, self._shown, self._has_prompt = dialog, 0, False
        self.ids: list[int] = []

    def put(self, value: Any) -> None:
        if not self._has_prompt:
            self._has_prompt = True
            return
        self.ids += value.flatten().tolist()
        self._print()

    def end(self) -> None:
        self._print(complete=True)

    def _print(self, complete: bool = False) -> None:
        text = self._dialog.text([token for token in self.ids if token not in self._dialog.stops])
        if not complete:
            text = text.rstrip(UNFINISHED)
        sys.stdout.write(printable_lines(text[self._shown :]))
        sys.stdout.flush()
        self._shown = max(self._shown, len(text))
