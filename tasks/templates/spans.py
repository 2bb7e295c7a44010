"""Define spans, the interface of templates, and which turns are trained on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple, Protocol

from tasks.conversations.model import ROLES, Conversation, is_blank
from tasks.core.errors import PackError, Reject
from tasks.encoders.encoder import Encoder
from tasks.templates.adjust import Adjust

TrainOn = Literal["assistant", "all", "last"]

Turns = Literal["auto", "together", "apart"]

TEXT = -1


class Span(NamedTuple):
    """A control token (`token` is its id and `text` its string) or text (`token` is TEXT)."""

    text: str
    token: int
    trained: bool
    role: str
    start: bool = False  # text after a control token that is a string of its own at inference


class Sample(NamedTuple):
    """What a model is trained on at once: a conversation, or one turn of it after its prompt at inference."""

    spans: list[Span]
    turn: int | None = None  # index of the message that is trained on; None if the sample is the whole conversation


class Outline(NamedTuple):
    """Samples of placeholders, and which values must not be filled into them.

    `formats` are the arguments of `tojson` that values are written with, by number.
    """

    samples: list[Sample]
    unusual: Callable[[Sequence[str]], bool] | None = None
    formats: Sequence[Sequence[Any]] = ()


class Template(Protocol):
    """The interface that `tokenization` needs of a template, built-in or Jinja."""

    name: str
    encoder: Encoder  # the reference encoder of the tokenizer that it is bound to
    markers_as_text: tuple[str, ...]
    adjust: Adjust

    def spans(self, conversation: Conversation, trained: Sequence[bool]) -> list[Span]:
        """Return the spans of a conversation. Raises Reject if this template cannot render it."""
        ...

    def samples(self, conversation: Conversation, trained: Sequence[bool]) -> list[Sample]:
        """Return the samples of a conversation, in the order of its turns. Raises Reject as `spans` does."""
        ...

    def all_samples(
        self, conversations: Sequence[tuple[Conversation, Sequence[bool]]]
    ) -> Iterator[list[Sample] | Reject | PackError]:
        """Yield the samples of each conversation, or what `samples` raises for it."""
        for conversation, trained in conversations:
            try:
                yield self.samples(conversation, trained)
            except (Reject, PackError) as problem:
                yield problem

    def separate(self, conversation: Conversation) -> Conversation | None:
        """Return a conversation with its reasoning where the template reads it; None if it has no outline."""
        ...

    def outline(self, conversation: Conversation, trained: Sequence[bool]) -> Outline | None:
        """Return the samples of a conversation of placeholders, if what surrounds them is the same for all contents."""
        ...


def up_to(conversation: Conversation, turn: int) -> tuple[Conversation, list[bool]]:
    """Return a conversation up to the message at index `turn`, and flags that train on this message only."""
    *before, last = conversation.messages[: turn + 1]
    messages = (*(replace(message, weight=0) for message in before), last)
    return replace(conversation, messages=messages), [index == turn for index in range(len(messages))]


def trained_turns(conversation: Conversation, train_on: TrainOn) -> list[bool]:
    """Return which messages are trained on.

    A blank turn and a turn with weight 0 never are; plain text always is. An answer that is nothing but reasoning is
    not blank: the model writes the reasoning and its stop token.
    """
    messages = conversation.messages
    roles = ROLES if train_on == "all" else ("assistant", "text")
    flags = [
        m.role in roles and bool(m.weight and (not is_blank(m) or (m.role == "assistant" and m.reasoning.strip())))
        for m in messages
    ]
    if train_on == "last":
        last = max((index for index, message in enumerate(messages) if message.role in roles), default=-1)
        return [flag and index == last for index, flag in enumerate(flags)]
    return flags
