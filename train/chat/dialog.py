"""Render a dialog as the rows of the training were rendered.

    messages + an answer ─template of the corpus─▶ spans ─its encoder─▶ ids up to that answer: the prompt
    ids of an answer ─decode─▶ text ─remembered─▶ the message that the next prompt contains

Without the corpus, the chat template of the model's own tokenizer renders the prompts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from transformers import AutoTokenizer

from packcorpus.tasks.conversations.model import Conversation, Message, as_openai
from packcorpus.tasks.core.errors import InputMissing, Reject, UsageError
from packcorpus.tasks.storage.schemas import TOKENS_SCHEMA
from packcorpus.tasks.templates.spans import Sample
from packcorpus.tasks.tokenization.samples import prepare_spans
from packcorpus.tasks.tokenization.tokenize_part import COUNTS, Batch
from packcorpus.train.data.conversations import open_template
from packcorpus.train.merge.other_files import Facts

ANSWER = Message("assistant", "x")  # stands for the answer that follows a prompt
OPENED, CLOSED = "<think>", "</think>"


class Dialog(Protocol):
    """Prompts for a model. `stops` are the ids that end an answer."""

    stops: list[int]
    about: str  # where the template comes from

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        """Return the ids before the next answer.

        Raises UsageError if there is no such prompt.
        """
        ...

    def text(self, ids: Sequence[int]) -> str:
        """Return the text of ids, with control tokens as their strings."""
        ...


class OfCorpus(Dialog):
    """Prompts by the template and the tokenizer of a corpus."""

    def __init__(self, facts: Facts):
        assert facts.corpus
        assert facts.encoder
        self._encoder, manifest = facts.encoder, facts.manifest
        # Which tokens are trained on does not change the text, but the prompt ends where the last answer begins.
        config = {
            name: value for name, value in manifest.config.items() if name not in ("train_parts", "empty_reasoning")
        }
        changed = manifest.model_copy(update={"train_on": "last", "config": config})
        self._template = open_template(changed, facts.corpus.folder, self._encoder)
        self.stops, self.about = facts.stop_tokens(), f"template {manifest.template.name} of the corpus {manifest.name}"

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        conversation = Conversation((*messages, ANSWER))
        trained = [False] * len(messages) + [True]
        batch = Batch(self._encoder, dict.fromkeys(COUNTS, 0), str)
        try:
            sample = self._template.samples(conversation, trained)[-1]
            batch.add(0, [prepare_spans(conversation, Sample(sample.spans), self._encoder)])
        except Reject as reject:
            raise UsageError("bad_prompt", f"the template does not accept these messages: {reject.message}") from None
        encoded = batch.encode(TOKENS_SCHEMA)
        if encoded is None:
            raise UsageError("bad_prompt", f"the tokenizer cannot encode these messages: {batch.rejects[0][1].message}")
        [tokens] = encoded.column("tokens").to_pylist()
        end = next((place for place, token in enumerate(tokens) if token >= 0), len(tokens))
        return [~token for token in tokens[:end]]

    def text(self, ids: Sequence[int]) -> str:
        return self._encoder.decode(ids)


class OfTokenizer(Dialog):
    """Prompts by the chat template of a model's own tokenizer."""

    def __init__(self, folder: Path, stops: list[int]):
        try:
            self._tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
        except (OSError, ValueError) as error:
            reason = " ".join(str(error).split())[:200]
            raise InputMissing(
                "model_missing", f"{folder}: has no tokenizer ({reason}); copy that of the corpus into it"
            ) from None
        if not self._tokenizer.chat_template:
            raise UsageError(
                "bad_prompt", f"{folder}: has no chat template, and its corpus is missing; pack the corpus again"
            )
        ends = [self._tokenizer.eos_token_id] if self._tokenizer.eos_token_id is not None else []
        self.stops, self.about = stops or ends, f"chat template of {folder}, because its corpus is not here"

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        try:
            found: Any = self._tokenizer.apply_chat_template(
                [as_openai(message) for message in messages], add_generation_prompt=True, return_dict=False
            )
        except Exception as error:  # a template raises what it wants
            reason = " ".join(str(error).split())[:200]
            raise UsageError("bad_prompt", f"the template does not accept these messages: {reason}") from None
        return [int(token) for token in found]

    def text(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=False))


def remembered(dialog: Dialog, prompt: Sequence[int], answer: Sequence[int]) -> Message:
    """Return an answer as a message of the next prompt."""
    text = dialog.text([token for token in answer if token not in dialog.stops])
    if CLOSED in text and OPENED not in text and dialog.text(prompt[-8:]).rstrip().endswith(OPENED):
        text = f"{OPENED}\n{text}"  # the prompt had opened it
    return replace(ANSWER, content=text)
