"""Define spans, the interface of templates, and which turns are trained on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple, Protocol

from tasks.conversations.model import ROLES, Conversation, Message, is_blank
from tasks.core.errors import PackError, Reject
from tasks.encoders.encoder import Encoder
from tasks.templates.adjust import Adjust

TrainOn = Literal["assistant", "all", "last"]

Turns = Literal["auto", "together", "apart"]

TEXT = -1


class Span(NamedTuple):
    """A control token or a run of text.

    `token` is the ID of the control token, and `text` its string. In a run of text, `token` is TEXT.
    """

    text: str
    token: int
    trained: bool
    role: str
    start: bool = False  # text after a control token that is a separate string at inference


class Sample(NamedTuple):
    """The unit that a model is trained on at once.

    It is a whole conversation, or one turn after its prompt at inference.
    """

    spans: list[Span]
    turn: int | None = None  # index of the message that is trained on; None if the sample is the whole conversation


class Rendered(NamedTuple):
    """A sample as the text that the template writes.

    Trained ranges that touch are one range. `controls` has the place and the string of each control token.
    """

    text: str
    ranges: list[tuple[int, int]]
    turn: int | None
    controls: list[tuple[int, str]]


class ToRender(NamedTuple):
    """A conversation to be rendered, and its trained turns.

    `expected` are the samples that it should have, if they are known.
    """

    conversation: Conversation
    trained: Sequence[bool]
    expected: Sequence[Rendered] | None = None


class Outline(NamedTuple):
    """Samples of placeholders, and a test for values that must not be filled in.

    `unusual` returns whether the template may treat one of the values differently from a placeholder. `formats` lists
    the arguments of `tojson` that values are written with; a gap refers to them by index. `is_guess` means that the
    template may treat any value differently, so each conversation must be rendered to confirm its samples.
    """

    samples: list[Sample]
    unusual: Callable[[Sequence[str]], bool] | None = None
    formats: Sequence[Sequence[Any]] = ()
    is_guess: bool = False


class Template(Protocol):
    """Interface of built-in and Jinja templates."""

    name: str
    encoder: Encoder  # reference encoder of the template's tokenizer
    markers_as_text: tuple[str, ...]
    adjust: Adjust

    def spans(self, conversation: Conversation, trained: Sequence[bool]) -> list[Span]:
        """Return the spans of a conversation.

        Raises Reject if the template cannot render the conversation.
        """
        ...

    def samples(self, conversation: Conversation, trained: Sequence[bool]) -> list[Sample]:
        """Return the samples of a conversation, in the order of its turns.

        Raises Reject if the template cannot render the conversation.
        """
        ...

    def all_samples(self, conversations: Sequence[ToRender]) -> Iterator[list[Sample] | Reject | PackError | None]:
        """Yield the samples of each conversation, or the error that `samples` raises.

        The result is None if the conversation has the expected samples.
        """
        for conversation, trained, _ in conversations:
            try:
                yield self.samples(conversation, trained)
            except (Reject, PackError) as problem:
                yield problem

    def separate(self, conversation: Conversation) -> Conversation | None:
        """Return a conversation with its strings where the template reads them.

        For example, reasoning is moved from the content to its field, or a context is joined to the content. Return
        None if the conversation has no outline.
        """
        ...

    def outline(self, conversation: Conversation, trained: Sequence[bool]) -> Outline | None:
        """Return the samples of a conversation of placeholders.

        If the text around the placeholders may depend on the contents, the samples are a guess (`Outline.is_guess`), or
        the result is None.
        """
        ...


def up_to(conversation: Conversation, turn: int) -> tuple[Conversation, list[bool]]:
    """Return a conversation up to and including the message at index `turn`.

    The second value has a flag for each message; only the last message is trained on.
    """
    *before, last = conversation.messages[: turn + 1]
    messages = (*(replace(message, train=False) for message in before), last)
    return replace(conversation, messages=messages), [index == turn for index in range(len(messages))]


def trained_turns(conversation: Conversation, train_on: TrainOn) -> list[bool]:
    """Return which messages are trained on.

    `train_on` decides unless a message has a flag. Blank turns are never trained on. An answer that has only reasoning
    is not blank, because the model writes the reasoning and its stop token. Plain text is trained on with any
    `train_on`.
    """
    messages = conversation.messages
    roles = ROLES if train_on == "all" else ("assistant", "text")
    chosen = [message.role in roles for message in messages]
    if train_on == "last" and True in chosen:
        chosen = [index == len(chosen) - 1 - chosen[::-1].index(True) for index in range(len(chosen))]
    return [_is_trained(message, flag) for message, flag in zip(messages, chosen, strict=True)]


def _is_trained(message: Message, is_chosen: bool) -> bool:
    is_reasoning = message.role == "assistant" and bool(message.reasoning.strip())
    return (is_chosen if message.train is None else message.train) and (not is_blank(message) or is_reasoning)
