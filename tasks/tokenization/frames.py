"""Render conversations with what a built-in template writes around the contents, which depends on the roles alone.

    roles user, assistant ──Frames──▶ Frame   "<|im_start|>user\n…<|im_end|>\n<|im_start|>assistant\n"   not trained on
                                              "…<|im_end|>"                                              trained on
    contents "2+2?", "4"  ─fill─────▶ Prepared: the texts of this conversation

A frame is rendered once, by the template itself, with gaps for the contents. To fill it takes 1 µs per conversation;
messages, spans, and segments take 15 µs. A conversation whose contents could change more than the gaps (tools, tool
calls, a blank turn, a name, …) has no frame.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

import numpy as np
from msgspec import Struct

from tasks.conversations.model import (
    Conversation,
    Message,
    content_digest,
    layout_of,
    role_named,
    turns_of,
    usual_order,
)
from tasks.core.errors import DataError, Reject
from tasks.encoders.encoder import Encoder
from tasks.templates.spans import Template, TrainOn, trained_turns
from tasks.tokenization.segments import segments_of

# The maximum number of frames. Conversations of more shapes (roles, and which turns are trained on) have no frame.
MOST_FRAMES = 1024

# Stands for the content of a turn, which never contains NUL. A template that strips contents strips the white space.
_GAP = re.compile("\v?\0\\d+\0\v?")


@dataclass(frozen=True, slots=True, eq=False)
class Shape:
    """What conversations have in common that differ in their texts only; S segments, some of which are texts."""

    tokens: np.ndarray  # int32[S], TEXT for a text
    trained: np.ndarray  # bool[S]
    separator: bool  # the last segment is an EOS that was added after the template's tokens
    usual: bool  # the turns are in the usual order
    turns: int  # messages that are not system messages
    # Index of the message that a sample trains on; -1 if the sample is the whole conversation.
    turn: int = field(default=-1, kw_only=True)


@dataclass(frozen=True, slots=True, eq=False)
class Frame(Shape):
    """The shape of all conversations with the same roles, and what the template writes around their contents."""

    parts: list[str]  # of all texts, joined with NUL: every second one, "", is to be replaced by a content
    texts: int
    layout: str  # the layout_of these conversations, and NUL
    strips: bool  # the template removes white space around contents
    unusual: Callable[[Sequence[str]], bool] | None  # whether the template may write contents differently


class Prepared(Struct, gc=False):
    """A sample of a conversation, nearly always all of it, that is ready to be encoded."""

    shape: Shape
    texts: list[str]  # to be encoded, in the order of the segments of `shape`
    characters: int  # to be encoded, and at most one more for each text
    strings: Sequence[str]  # all strings of the conversation
    digest: int  # its content_digest
    row: tuple[str, str | None, str] | None = None  # messages, tools, text: further columns of format 2.0


class Frames(dict[tuple[str, ...], Frame | None]):
    """Frames by the names of the roles; None for roles without a frame. A frame is rendered on first use.

    `roles` maps the names in records, in lower case, to ours.
    """

    def __init__(self, template: Template, encoder: Encoder, train_on: TrainOn, roles: Mapping[str, str]):
        self._template, self._encoder, self._train_on, self._roles = template, encoder, train_on, roles
        # With these, the content decides about a space.
        self.known = not encoder.has_space and not encoder.space_follows
        self._by_shape: dict[tuple[tuple[str, ...], tuple[bool, ...]], Frame | None] = {}

    def __missing__(self, names: tuple[str, ...]) -> Frame | None:
        roles = tuple([role_named(name, self._roles) or "" for name in names])
        frame = None
        if roles and all(roles) and len(roles) <= MOST_FRAMES:
            turns = Conversation(tuple(Message(role, "content") for role in roles))
            frame = self._of_roles(roles, tuple(trained_turns(turns, self._train_on)))
        if len(self) < MOST_FRAMES:
            self[names] = frame
        return frame

    def of_conversation(self, conversation: Conversation, trained: Sequence[bool]) -> Frame | None:
        """Return the frame of a conversation, which `fill` fills with the contents of its messages."""
        messages = conversation.messages
        if conversation.tools or len(messages) > MOST_FRAMES:
            return None
        if any(m.context or m.reasoning or m.tool_calls or m.tool_call_id or m.name is not None for m in messages):
            return None
        return self._of_roles(tuple([message.role for message in messages]), tuple(trained))

    def _of_roles(self, roles: tuple[str, ...], trained: tuple[bool, ...]) -> Frame | None:
        shape = (roles, trained)
        if shape not in self._by_shape:
            if not self.known or len(self._by_shape) >= MOST_FRAMES:
                return None
            self._by_shape[shape] = self._render(*shape)
        return self._by_shape[shape]

    def _render(self, roles: tuple[str, ...], trained: tuple[bool, ...]) -> Frame | None:
        """Return None if the template rejects the roles, if nothing is trained on, or if there are tool results."""
        if "tool" in roles:
            return None
        turns = Conversation(tuple(Message(role, f"\v\0{number}\0\v") for number, role in enumerate(roles)))
        try:
            outline = self._template.outline(turns, trained)
        except (Reject, DataError):  # the conversations themselves will say why
            return None
        if outline is None or len(outline.samples) != 1:
            return None
        [(spans, turn)] = outline.samples
        tokens, flags, texts, separator = segments_of(spans, self._encoder)
        gaps = [int(gap.strip("\v\0")) for text in texts for gap in _GAP.findall(text)]
        if True not in flags or gaps != list(range(len(roles))):  # some templates leave a message out
            return None
        stripped = sum(text.count("\v") for text in texts)
        if stripped not in (0, 2 * len(gaps)):  # of some contents only
            return None
        between = "\0".join(_GAP.sub("\v", text) for text in texts).split("\v")
        return Frame(
            tokens=np.array(tokens, np.int32),
            trained=np.array(flags, bool),
            separator=separator,
            usual=usual_order(roles),
            turns=turns_of(roles),
            parts=list(chain.from_iterable((part, "") for part in between))[:-1],
            texts=len(texts),
            layout=layout_of(turns) + "\0",
            turn=-1 if turn is None else turn,
            strips=not stripped,
            unusual=outline.unusual,
        )


def fill(frame: Frame, contents: list[str]) -> Prepared | None:
    """Return the conversation with this frame and these contents.

    Return None if a content is blank (then a template may write something else, and the turn is not trained
    on), or not valid text.
    """
    for content in contents:
        if not content or content.isspace():
            return None
    if frame.unusual and frame.unusual(contents):
        return None
    parts = frame.parts.copy()
    parts[1::2] = map(str.strip, contents) if frame.strips else contents
    joined = "".join(parts)
    texts = joined.split("\0")
    if len(texts) > frame.texts:  # a content contains NUL
        return None
    try:
        digest = content_digest((frame.layout + "\0".join(contents)).encode())
    except UnicodeEncodeError:  # a lone surrogate
        return None
    return Prepared(frame, texts, len(joined), contents, digest)
