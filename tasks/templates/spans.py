"""Define spans, the interface of templates, and which turns are trained on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

from packcorpus.tasks.conversations.model import ROLES, Conversation, is_blank
from packcorpus.tasks.core.errors import PackError, Reject
from packcorpus.tasks.encoders.encoder import Encoder
from packcorpus.tasks.templates.adjust import Adjust
from packcorpus.tasks.templates.markers import UnknownMarkers
from packcorpus.tasks.templates.sections import Sections

if TYPE_CHECKING:
    from packcorpus.tasks.templates.jinja.engines import BothEngines, Engines

TrainOn = Literal["assistant", "all", "last", "rounds"]

Turns = Literal["auto", "together", "apart", "as_rendered"]

TEXT = -1


class Span(NamedTuple):
    """A control token or a run of text.

    `token` is the ID of the control token, and `text` its string. In a run of text, `token` is TEXT. A text that is
    `alone` is not joined with the text before it, although both are trained on.
    """

    text: str
    token: int
    trained: bool
    role: str
    start: bool = False  # text after a control token that is a separate string at inference
    alone: bool = False


class Sample(NamedTuple):
    """The unit that a model is trained on at once.

    It is a whole conversation, or a part that ends with a turn, each trained turn after its prompt at inference.
    """

    spans: list[Span]
    turn: int | None = None  # index of the message that ends it; None if the sample is the whole conversation
    after: int = -1  # index of the message that ends the sample before; later messages are trained on
    # Numbers of its trained answers with reasoning, and of those for which the template writes an empty block of it.
    reasoned: int = 0
    closed: int = 0
    # Of the first sample: the indexes of earlier answers whose reasoning the template writes in no sample.
    unwritten: tuple[int, ...] = ()
    # With `turns: as_rendered`: numbers of its trained answers whose prompts at inference are not the text before them,
    # and of those that are written differently; the messages whose reasoning it lacks, and those that it lacks
    # altogether, which are not trained on.
    unlike: int = 0
    changed: int = 0
    unreasoned: tuple[int, ...] = ()
    absent: tuple[int, ...] = ()


class Outline(NamedTuple):
    """Samples of placeholders, and a test for values that must not be filled in.

    `must_render` returns whether the template may treat one of the values differently from a placeholder. `formats`
    lists the arguments of `tojson` that values are written with; a gap refers to them by index.
    """

    samples: list[Sample]
    must_render: Callable[[Sequence[str]], bool] | None = None
    formats: Sequence[Sequence[Any]] = ()


class Template(Protocol):
    """Interface of built-in and Jinja templates."""

    name: str
    encoder: Encoder  # reference encoder of the template's tokenizer
    markers_as_text: tuple[str, ...]
    unknown: UnknownMarkers = UnknownMarkers()
    writes_reasoning: bool = False
    adjust: Adjust
    sections: Sections

    engines: Engines | BothEngines | None = None  # of a Jinja template
    # The names that each Jinja source reads and nothing defines, with the number of places.
    undefined: Sequence[Mapping[str, int]] = ()

    def knows_developer(self, conversation: Conversation) -> bool:
        """Return whether the role developer stays; it is system otherwise."""
        return False

    def spans(self, conversation: Conversation, trained: Sequence[bool]) -> list[Span]:
        """Return the spans of a conversation that is one sample."""
        [sample] = self.samples(conversation, trained)
        return sample.spans

    # A template overrides `samples` or `all_samples`.

    def samples(self, conversation: Conversation, trained: Sequence[bool]) -> list[Sample]:
        """Return the samples of a conversation, in the order of its turns.

        `trained` is true for each message that is trained on. Raises Reject if the conversation cannot be rendered, and
        DataError if the template cannot be used.
        """
        [found] = self.all_samples([(conversation, trained)])
        if isinstance(found, list):
            return found
        raise found

    def all_samples(
        self, conversations: Sequence[tuple[Conversation, Sequence[bool]]]
    ) -> Iterator[list[Sample] | Reject | PackError]:
        """Yield the samples of each conversation, or the error that `samples` raises."""
        for conversation, trained in conversations:
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
        """Return samples of placeholders; None if text around them may depend on values."""
        ...


def has_flagged(conversation: Conversation, trained: Sequence[bool]) -> bool:
    """Return whether messages that no model writes are trained on."""
    return any(flag and m.role != "assistant" for m, flag in zip(conversation.messages, trained, strict=True))


def ends_of_samples(conversation: Conversation, trained: Sequence[bool]) -> list[int]:
    """Return the index of the last message of each sample, if each turn is a sample.

    These are the trained answers. A trained message that no model writes is part of the sample of the next answer. If
    no answer follows, such messages have a sample of their own.
    """
    turns = [k for k, flag in enumerate(trained) if flag]
    answers = [k for k in turns if conversation.messages[k].role == "assistant"]
    return answers if turns[-1:] == answers[-1:] else [*answers, turns[-1]]


def up_to(
    conversation: Conversation, turn: int, trained: Sequence[bool], after: int
) -> tuple[Conversation, list[bool]]:
    """Return the sample that ends with the message at index `turn`.

    `after` is the index of the message that ends the sample before, or -1. The second value has a flag for each
    message, which is true if the sample trains on it.
    """
    flags = [flag and after < k for k, flag in enumerate(trained[: turn + 1])]
    messages = [
        message if flag else replace(message, train=False)
        for message, flag in zip(conversation.messages, flags, strict=False)
    ]
    return replace(conversation, messages=tuple(messages)), flags


def trained_turns(conversation: Conversation, train_on: TrainOn) -> list[bool]:
    """Return which messages are trained on.

    `train_on` decides unless a message has a flag. Blank turns are never trained on. An answer that has only reasoning
    is not blank, because the model writes the reasoning and its stop token. Plain text is trained on with any
    `train_on`.
    """
    messages = conversation.messages
    roles = ROLES if train_on == "all" else ("assistant", "text")
    chosen = [message.role in roles for message in messages]
    if train_on in ("last", "rounds") and True in chosen:
        last = len(chosen) - 1 - chosen[::-1].index(True)
        start = last if train_on == "last" else start_of_last_round(tuple([message.role for message in messages]))
        chosen = [flag and start <= k <= last for k, flag in enumerate(chosen)]
    return [
        (flag if message.train is None else message.train)
        and (not is_blank(message) or (message.role == "assistant" and bool(message.reasoning.strip())))
        for message, flag in zip(messages, chosen, strict=True)
    ]


@lru_cache(1024)
def start_of_last_round(roles: tuple[str, ...]) -> int:
    """Return the index after the last user message that has an answer."""
    last = max((k for k, role in enumerate(roles) if role == "assistant"), default=0)
    return max((k + 1 for k, role in enumerate(roles[:last]) if role == "user"), default=0)


def has_empty_prompt(conversation: Conversation, trained: Sequence[bool]) -> bool:
    """Return whether a trained answer follows messages of the user that are all blank.

    Results of tools may be blank, because some tools have nothing to say.
    """
    messages = conversation.messages
    is_empty = False
    for k, message in enumerate(messages):
        if message.role == "user":
            is_empty = is_blank(message) and (is_empty or k == 0 or messages[k - 1].role != "user")
        elif is_empty and message.role == "assistant" and messages[k - 1].role == "user" and trained[k]:
            return True
    return False
