"""What a built-in template writes around the contents of the turns: the same for all conversations of one shape.

    roles user, assistant ─Frames─▶ Frame   "<|im_start|>user\n{0}<|im_end|>\n<|im_start|>assistant\n"   not trained on
                                            "{1}<|im_end|>"                                              trained on
    contents "2+2?", "4"  ─Frame.fill─▶ the texts of this conversation

A frame is written once, by the template itself, with gaps for the contents. Nearly every conversation is then two
lookups and a few joined strings, a fifth of what its messages, spans and segments would cost; whatever is unusual about
one (tools, calls of them, a turn that is blank, a name, a weight of 0, …) goes that longer way, with the same result.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import accumulate, chain
from typing import Any, NamedTuple

import numpy as np

from tasks.conversations import PLAIN, Conversation, Message, said_of, turns_of, usual_order
from tasks.encoders import Encoder
from tasks.errors import Reject
from tasks.segments import segments_of
from tasks.templates import BuiltIn, Template, TrainOn, trained_turns

# Kept at a time; conversations of more shapes (roles, and which of them are trained on) go the longer way.
_MOST = 1024

# What stands in for what a turn says: no conversation holds a NUL. The white space is gone where a template strips.
_GAP = re.compile("\v?\0\\d+\0\v?")

_Shape = tuple[tuple[str, ...], tuple[bool, ...]]


class Frame(NamedTuple):
    """All that conversations of one shape have in common; S segments, of which some are texts.

    A text is the strings around its gaps, and which content comes into the first one.
    """

    tokens: np.ndarray  # int32[S], TEXT where a text stands
    trained: np.ndarray  # bool[S]
    separator: bool  # the last segment is an EOS that was added behind the template's tokens
    texts: tuple[tuple[list[str], int], ...]
    strips: bool  # whether the template takes the white space around the contents away
    said_of: str
    usual: bool  # whether the turns stand in the usual order
    turns: int  # messages other than system ones

    def fill(self, contents: list[str]) -> list[str]:
        """The texts of the conversation that says `contents`."""
        if self.strips:
            contents = list(map(str.strip, contents))
        texts = []
        for around, first in self.texts:
            if len(around) == 2:
                texts.append(around[0] + contents[first] + around[1])
            else:
                gaps = zip(contents[first:], around[1:], strict=False)
                texts.append(around[0] + "".join(chain.from_iterable(gaps)))
        return texts

    def said(self, contents: list[str]) -> str:
        """What the conversation says (conversations.said)."""
        return self.said_of + "\0" + "\0".join(contents)


class Frames:
    """The frames of a template, an encoder and a format of records."""

    def __init__(
        self, template: Template, encoder: Encoder, train_on: TrainOn, format: str = "", columns: bool = False
    ):
        """`columns`: whether the records have other keys than the format's own."""
        self._template = template
        self._encoder = encoder
        self._train_on: TrainOn = train_on
        # Of other templates nothing is known; and where there is `has_space`, what a turn says decides about a space.
        self._known = isinstance(template, BuiltIn) and not encoder.has_space
        self._frames: dict[_Shape, Frame | None] = {}
        self._plain = PLAIN.get(format) if self._known and not columns else None
        self._by_roles: dict[tuple[object, ...], Frame | None] = {}

    def of_record(self, record: Any) -> tuple[Frame, list[str]] | None:
        """Frame and contents of a record that holds turns and nothing else; None where it has to be read with care."""
        if self._plain is None:
            return None
        turns_key, role_key, content_key, _, others = self._plain
        try:
            turns = record[turns_key]
            if len(record) > 1 and not others.isdisjoint(record):
                return None
            roles = tuple([turn[role_key] for turn in turns])
            contents: list[str] = [turn[content_key] for turn in turns]
            frame = self._by_roles[roles] if roles in self._by_roles else self._of_roles(roles)
            whole = "".join(contents)
            if not whole.isascii():
                whole.encode()
        except (KeyError, TypeError, UnicodeEncodeError):
            return None
        if frame is None or sum(map(len, turns)) != 2 * len(turns) or "\0" in whole or _is_blank(contents):
            return None
        return frame, contents

    def of_conversation(self, conversation: Conversation, trained: Sequence[bool]) -> tuple[Frame, list[str]] | None:
        """Frame and contents of a conversation; None where what it says decides about more than its gaps."""
        if not self._known or conversation.tools or len(conversation.messages) > _MOST:
            return None
        contents = []
        for message in conversation.messages:
            if message.context or message.tool_calls or message.tool_call_id or message.name is not None:
                return None
            contents.append(message.content)
        if _is_blank(contents):
            return None
        frame = self._frame(tuple([message.role for message in conversation.messages]), tuple(trained))
        return None if frame is None else (frame, contents)

    def _of_roles(self, roles: tuple[Any, ...]) -> Frame | None:
        """The frame of turns with these roles, as the record names them. Raises TypeError where one is no string."""
        assert self._plain
        named = [self._plain.roles.get(role, "") for role in roles]
        frame = None
        if named and all(named) and len(named) <= _MOST:
            turns = Conversation(tuple(Message(role, "said") for role in named))
            frame = self._frame(tuple(named), tuple(trained_turns(turns, self._train_on)))
        if len(self._by_roles) < _MOST:
            self._by_roles[roles] = frame
        return frame

    def _frame(self, roles: tuple[str, ...], trained: tuple[bool, ...]) -> Frame | None:
        shape = (roles, trained)
        if shape not in self._frames:
            if len(self._frames) >= _MOST:
                return None
            self._frames[shape] = self._new(*shape)
        return self._frames[shape]

    def _new(self, roles: tuple[str, ...], trained: tuple[bool, ...]) -> Frame | None:
        """None where the template cannot write it, where nothing is trained on, or where results of tools stand."""
        if "tool" in roles:
            return None
        turns = Conversation(tuple(Message(role, f"\v\0{number}\0\v") for number, role in enumerate(roles)))
        try:
            tokens, flags, texts, separator = segments_of(self._template.spans(turns, trained), self._encoder)
        except Reject:
            return None
        if True not in flags:
            return None
        gaps = [len(_GAP.findall(text)) for text in texts]
        found = [int(gap.strip("\v\0")) for text in texts for gap in _GAP.findall(text)]
        assert found == list(range(len(roles))), f"{self._template.name}: {roles} becomes {texts}"
        return Frame(
            tokens=np.array(tokens, np.int32),
            trained=np.array(flags, bool),
            separator=separator,
            texts=tuple(zip(map(_GAP.split, texts), accumulate(gaps, initial=0), strict=False)),
            strips=not any("\v" in text for text in texts),
            said_of=said_of(turns),
            usual=usual_order(roles),
            turns=turns_of(roles),
        )


def _is_blank(contents: list[str]) -> bool:
    """Whether a turn says nothing, or white space alone: whether it is trained on, and what the template writes, is
    then another matter."""
    return not all(contents) or any(map(str.isspace, contents))
