"""What a built-in template writes around the contents of the turns: the same for all conversations of one shape.

    roles user, assistant ─Frames─▶ Frame   "<|im_start|>user\n%s<|im_end|>\n<|im_start|>assistant\n"    not trained on
                                            "%s<|im_end|>"                                               trained on
    contents "2+2?", "4"  ──_filled───▶ the texts of this conversation

A frame is written once, by the template itself, with gaps for the contents. Records that hold turns and nothing else
are then read in columns, a block of them at a time: all roles, all contents, a frame for each record, and its texts
from two formatted strings, about 1 µs in all, where messages, spans and segments of their own would cost 15. Whatever
is unusual about a record (tools, calls of them, a turn that is blank, a name, a weight of 0, …) goes that longer way,
with the same result.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import chain, compress, groupby, repeat
from operator import itemgetter, mod
from typing import Any, NamedTuple

import numpy as np

from tasks.conversations.content import content_digest, said_of
from tasks.conversations.model import Conversation, Message, turns_of, usual_order
from tasks.conversations.plain_records import Turns, any_blank, grouped, plain_turns, role_of, turn_columns
from tasks.core.errors import Reject
from tasks.encoders.encoder import Encoder
from tasks.templates.built_in import BuiltIn
from tasks.templates.spans import Template, TrainOn, trained_turns
from tasks.tokenization.segments import segments_of

# Kept at a time; conversations of more shapes (roles, and which of them are trained on) go the longer way.
_MOST = 1024

# What stands in for what a turn says: no conversation holds a NUL. The white space is gone where a template strips.
_GAP = re.compile("\v?\0\\d+\0\v?")

_Shape = tuple[tuple[str, ...], tuple[bool, ...]]


class Frame(NamedTuple):
    """All that conversations of one shape have in common; S segments, of which some are texts."""

    tokens: np.ndarray  # int32[S], TEXT where a text stands
    trained: np.ndarray  # bool[S]
    separator: bool  # the last segment is an EOS that was added behind the template's tokens
    texts: tuple[str, ...]  # %s for each content
    gaps: tuple[int, ...]  # how many contents each of them has
    strips: bool  # whether the template takes the white space around the contents away, of all shapes alike
    says: str  # what such a conversation says (conversations.said), %s for each content
    usual: bool  # whether the turns stand in the usual order
    turns: int  # messages other than system ones


class Framed(NamedTuple):
    """Conversations one after another: of each its frame, its contents and content_digest; and the texts of all."""

    frames: list[Frame]
    contents: list[tuple[str, ...]]
    digests: list[int]
    texts: list[str]

    def runs(self, taken: Sequence[bool]) -> Iterator[tuple[int, int, Framed | None]]:
        """The records in their order, as runs [start, stop): those that were taken with what is theirs of this, and
        those that were not."""
        start, conversation, text = 0, 0, 0
        for is_taken, run in groupby(taken):
            stop = start + len(list(run))
            if is_taken:
                frames = self.frames[conversation : conversation + stop - start]
                texts = sum(len(frame.texts) for frame in frames)
                of = slice(conversation, conversation + len(frames))
                yield start, stop, Framed(frames, self.contents[of], self.digests[of], self.texts[text : text + texts])
                conversation, text = conversation + len(frames), text + texts
            else:
                yield start, stop, None
            start = stop


class Frames:
    """The frames of a template, an encoder and a format of records."""

    def __init__(
        self, template: Template, encoder: Encoder, train_on: TrainOn, format: str = "", renamed: bool = False
    ):
        """`renamed`: whether the records have other keys than the format's own."""
        self._template = template
        self._encoder = encoder
        self._train_on: TrainOn = train_on
        # Of other templates nothing is known; and where there is `has_space`, what a turn says decides about a space.
        self._known = isinstance(template, BuiltIn) and not encoder.has_space
        self._frames: dict[_Shape, Frame | None] = {}
        self._format = format if self._known and not renamed else ""
        self._by_roles: dict[tuple[object, ...], Frame | None] = {}

    def of_records(self, records: Sequence[Any]) -> tuple[Framed, list[bool]]:
        """The conversations of the records that hold turns and nothing else, and which these are; the others have to
        be read with care."""
        if self._format:
            turns = turn_columns(records, self._format)
            framed = turns and self._framed(turns)
            if framed:
                return framed, [True] * len(records)
            found = [plain_turns(record, self._format) for record in records]
            taken = [plain is not None and self._of_roles(plain[0]) is not None for plain in found]
            some = list(compress(found, taken))
            roles = [plain[0] for plain in some if plain]
            contents = [content for plain in some if plain for content in plain[1]]
            framed = self._framed(Turns(roles, list(map(len, roles)), contents)) if some else None
            if framed:
                return framed, taken
        return Framed([], [], [], []), [False] * len(records)

    def _framed(self, turns: Turns) -> Framed | None:
        """None where one of them cannot be framed."""
        try:
            for roles in set(turns.roles).difference(self._by_roles):
                self._of_roles(roles)
            frames = [frame for frame in map(self._by_roles.get, turns.roles) if frame]
            if len(frames) < len(turns.roles):
                return None
            return _filled(frames, turns.contents, turns.counts)
        except (TypeError, UnicodeEncodeError):  # a role that is no string, half of a surrogate pair
            return None

    def of_conversation(self, conversation: Conversation, trained: Sequence[bool]) -> Framed | None:
        """One conversation; None where what it says decides about more than its gaps."""
        if not self._known or conversation.tools or len(conversation.messages) > _MOST:
            return None
        contents = []
        for message in conversation.messages:
            if message.context or message.tool_calls or message.tool_call_id or message.name is not None:
                return None
            contents.append(message.content)
        if any_blank(contents):
            return None
        frame = self._frame(tuple([message.role for message in conversation.messages]), tuple(trained))
        return None if frame is None else _filled([frame], contents, [len(contents)])

    def _of_roles(self, roles: tuple[Any, ...]) -> Frame | None:
        """The frame of turns with these roles, as the record names them; None where there is none."""
        try:
            if roles in self._by_roles:
                return self._by_roles[roles]
        except TypeError:  # one that is a list
            return None
        named = [role_of(role, self._format) for role in roles]
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
        found = [int(gap.strip("\v\0")) for text in texts for gap in _GAP.findall(text)]
        assert found == list(range(len(roles))), f"{self._template.name}: {roles} becomes {texts}"
        written = ["%s".join(around.replace("%", "%%") for around in _GAP.split(text)) for text in texts]
        return Frame(
            tokens=np.array(tokens, np.int32),
            trained=np.array(flags, bool),
            separator=separator,
            texts=tuple(written),
            gaps=tuple(len(_GAP.findall(text)) for text in texts),
            strips=not any("\v" in text for text in texts),
            says="\0".join((said_of(turns), *["%s"] * len(roles))),
            usual=usual_order(roles),
            turns=turns_of(roles),
        )


_PATTERNS, _GAPS, _SAYS = (itemgetter(Frame._fields.index(name)) for name in ("texts", "gaps", "says"))


def _filled(frames: list[Frame], contents: list[str], counts: list[int]) -> Framed | None:
    """Conversations with these frames, of which each has so many of the contents; None where one holds a NUL. Raises
    UnicodeEncodeError."""
    of_each = grouped(contents, counts)
    said = list(map(str.encode, map(mod, map(_SAYS, frames), of_each)))
    if sum(map(bytes.count, said, repeat(0))) > len(contents):
        return None
    written = list(map(str.strip, contents)) if frames[0].strips else contents
    gaps = list(chain.from_iterable(map(_GAPS, frames)))
    texts = map(mod, chain.from_iterable(map(_PATTERNS, frames)), grouped(written, gaps))
    return Framed(frames, of_each, list(map(content_digest, said)), list(texts))
