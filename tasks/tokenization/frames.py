"""Render conversations of the same shape once, and fill in their values.

    roles user, assistant ──Frames──▶ Filling  "<|im_start|>user\n…<|im_end|>\n<|im_start|>assistant\n"  not trained on
                                               "…<|im_end|>"                                             trained on
    contents "2+2?", "4"  ─Filling──▶ Prepared: the texts of this conversation

The text that a template writes around the values depends only on the shape of a conversation. The template renders it
once, with gaps. Filling the gaps takes 1 µs per plain conversation. Messages, spans, and segments take 15 µs, and a
Jinja template takes a millisecond. A conversation is rendered instead if its values could change more than the gaps: a
blank turn, a value that the template tests, …
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from msgspec import Struct

from tasks.conversations.answers import Unpaired
from tasks.conversations.model import (
    Conversation,
    content_digest,
    layout_of,
    message_of,
    role_named,
    turns_of,
    usual_order,
    whole_text,
)
from tasks.core.errors import DataError, Reject
from tasks.encoders.texts import SEPARATOR
from tasks.templates.placeholders import (
    COMPARED,
    GAP,
    ConversationShape,
    as_json,
    blank,
    can_be_filled,
    has_outer_space,
    has_tools,
    is_plain,
    shape_of,
)
from tasks.templates.spans import Sample, Template, TrainOn, has_empty_prompt, trained_turns
from tasks.tokenization.segments import Segments, segments_of

# The maximum number of shapes that are tried with a template, if none of them can be filled in.
MOST_FAILURES = 8

# The maximum number of shapes, and of messages in a shape. All other conversations are rendered.
MOST_SHAPES = 1024

# A shape with more trained turns is rendered with gaps when it occurs again. Few conversations of agents are alike.
LONG = 8
# A shape with more trained turns is not: gaps take a rendering of each prompt, so the time grows with the square.
LONGEST = 40

# The maximum number of pieces of text around gaps, for one shape and for all shapes. If each turn is a sample, their
# number grows with the square of the number of turns.
PIECES_OF_SHAPE, PIECES_OF_ALL = 1 << 14, 1 << 20


@dataclass(frozen=True, slots=True, eq=False)
class Shape:
    """The common properties of samples that differ only in their texts.

    A shape has S segments, some of which are texts.
    """

    tokens: np.ndarray  # int32[S], TEXT for a text
    trained: np.ndarray  # bool[S]
    separator: bool  # the last segment is an EOS that was added after the template's tokens
    usual: bool  # the turns are in the usual order
    turns: int  # messages that are not system messages
    reasoned: int = field(default=0, kw_only=True)  # as in `Sample`
    closed: int = field(default=0, kw_only=True)
    # Index of the message that ends the sample; -1 if the sample is the whole conversation.
    turn: int = field(default=-1, kw_only=True)
    # Index of the message that ends the sample before, or -1. Later messages are trained on.
    after: int = field(default=-1, kw_only=True)
    # The layout of the conversation if the texts contain all its strings, or else "".
    layout: str = field(default="", kw_only=True)
    # The conversation has an answer to an empty prompt.
    empty_prompt: bool = field(default=False, kw_only=True)


def shape_of_sample(
    segments: Segments, conversation: Conversation, sample: Sample, layout: str = "", empty_prompt: bool = False
) -> Shape:
    """Return the shape of a sample of a conversation.

    `layout` and `empty_prompt` are those of `Shape`.
    """
    usual, turns = _order_of(tuple([message.role for message in conversation.messages]))
    return Shape(
        tokens=np.array(segments.tokens, np.int32),
        trained=np.array(segments.trained, bool),
        separator=segments.separator,
        usual=usual,
        turns=turns,
        turn=-1 if sample.turn is None else sample.turn,
        after=sample.after,
        reasoned=sample.reasoned,
        closed=sample.closed,
        layout=layout,
        empty_prompt=empty_prompt,
    )


@lru_cache(1024)
def _order_of(roles: tuple[str, ...]) -> tuple[bool, int]:
    return usual_order(roles), turns_of(roles)


class Prepared(Struct, gc=False):
    """A sample that is ready to be encoded.

    Nearly always, a sample is a whole conversation.
    """

    shape: Shape
    joined: bytes  # the texts to be encoded, in the order of the segments of `shape`, separated by NUL
    strings: Sequence[str]  # all strings of the conversation, after its layout unless the shape has it
    digest: int  # its content_digest
    row: tuple[str, str | None, str] | None = None  # messages, tools, text: further columns of format 2.0
    weights: Sequence[tuple[int, float]] = ()  # weights of the data, each with its first segment
    unpaired: Unpaired | None = None  # calls and results without a partner, on the first sample of a conversation
    separate: list[str] | None = None  # the texts, if `joined` cannot be split into them: if one contains NUL, or none

    @property
    def texts(self) -> list[str]:
        return self.joined.decode().split(SEPARATOR) if self.separate is None else self.separate


class _Frame(NamedTuple):
    """The text that a template writes around the values of a sample."""

    shape: Shape
    parts: list[str]  # of all texts, joined with NUL; every second part is "" and is replaced by a value
    gaps: list[tuple[int, int]]  # number of the value, and number of its JSON format or -1


class Filling:
    """The samples of all conversations with the same shape, with gaps for the values.

    `strips` means that the template removes white space around values. `unusual` returns whether the template may write
    given values differently.
    """

    def __init__(
        self,
        frames: list[_Frame],
        layout: str,
        strips: bool,
        unusual: Callable[[Sequence[str]], bool] | None,
        objects: frozenset[int],
        formats: Sequence[Sequence[Any]],
    ):
        self._frames, self._layout, self._strips, self.unusual = frames, layout + "\0", strips, unusual
        self._objects, self._formats = objects, formats
        self.roles_with_results: tuple[str, ...] = ()  # the roles of a plain conversation with results of calls
        # Nearly always, there is one sample, which has every content once.
        self._only = frames[0] if frames[0].shape.layout else None

    def is_compared(self, found: Sequence[Prepared]) -> bool:
        """Return whether a conversation is also rendered and compared with `found`."""
        return self.unusual is not None and found[0].digest % COMPARED == 0

    def fill(self, contents: list[str]) -> list[Prepared] | None:
        """Return the samples of a plain conversation with these contents.

        Returns None if a content is blank, because then a template may write something else, and the turn is not
        trained on. Also returns None if a content is unusual, contains NUL, or is not valid text.
        """
        for content in contents:
            if not content or content.isspace() or SEPARATOR in content:
                return None
        if self.unusual and self.unusual(contents):
            return None
        whole = self._layout + "\0".join(contents)
        try:
            digest = content_digest(whole.encode())
        except UnicodeEncodeError:  # a lone surrogate
            return None
        if self._only is None:
            return self._filled(contents, whole.split(SEPARATOR), digest)
        shape, parts, _ = self._only
        parts = parts.copy()
        parts[1::2] = map(str.strip, contents) if self._strips else contents
        return [Prepared(shape, "".join(parts).encode(), contents, digest)]

    def fill_values(self, values: list[str], conversation: Conversation) -> list[Prepared] | None:
        """Return the samples of any conversation with these values.

        Returns None if they cannot be filled in.
        """
        if not can_be_filled(values, self._objects, self.unusual):
            return None
        whole = whole_text(conversation)
        # If the shape has the layout, the strings are just the values. Otherwise they begin with the layout.
        strings = values if self._only else whole.split("\0")
        try:
            return self._filled(values, strings, content_digest(whole.encode()))
        except UnicodeEncodeError:
            return None

    def _filled(self, values: list[str], strings: list[str], digest: int) -> list[Prepared]:
        stripped = [value.strip() for value in values] if self._strips else values
        written = {gap: stripped[gap[0]] for frame in self._frames for gap in frame.gaps if gap[1] < 0}
        for gap in {gap for frame in self._frames for gap in frame.gaps if gap[1] >= 0}:
            number, form = gap
            written[gap] = as_json(stripped[number], number in self._objects, self._formats[form])
        found = []
        for shape, parts, gaps in self._frames:
            parts = parts.copy()
            parts[1::2] = map(written.__getitem__, gaps)
            found.append(Prepared(shape, "".join(parts).encode(), strings, digest))
        return found


class Frames(dict[tuple[str, ...], Filling | None]):
    """Fillings by the names of the roles, rendered on first use.

    The value is None for roles that have no filling. `roles` maps the names in records, in lower case, to roles.
    """

    def __init__(self, template: Template, train_on: TrainOn, roles: Mapping[str, str]):
        self._template, self._train_on, self._roles = template, train_on, roles
        self._encoder = template.encoder
        # With such an encoder, the content decides whether a space is added.
        self.known = not self._encoder.has_space and not self._encoder.space_follows
        self._by_shape: dict[ConversationShape, Filling | None] = {}
        self._once: dict[ConversationShape, int] = {}  # long shapes that have occurred once, with a hash of the values
        self._pieces = 0
        self.start_part()

    def start_part(self) -> None:
        """Prepare for the conversations of another part.

        Forgets all failures, and all shapes if a limit is reached.
        """
        self._failures = 0  # number of shapes without a filling, until a shape has one
        if max(len(self), len(self._by_shape)) >= MOST_SHAPES or self._pieces > PIECES_OF_ALL:
            self.clear()
            self._by_shape, self._once, self._pieces = {}, {}, 0

    def has_roles(self, names: Sequence[str]) -> bool:
        """Return whether all names are names of roles."""
        return all(role_named(name, self._roles) for name in names)

    def __missing__(self, names: tuple[str, ...]) -> Filling | None:
        roles = tuple([role_named(name, self._roles) or "" for name in names])
        filling = None
        if roles and all(roles) and len(roles) <= MOST_SHAPES:
            turns = Conversation(tuple(message_of(role, "content") for role in roles))
            filling, _ = self._of_shape(turns, trained_turns(turns, self._train_on))
            if filling and "tool" in roles:
                filling.roles_with_results = tuple(message.role for message in turns.messages)
        if len(self) < MOST_SHAPES:
            self[names] = filling
        return filling

    def filled(
        self, conversation: Conversation, trained: Sequence[bool]
    ) -> tuple[list[Prepared], Filling] | tuple[None, None]:
        """Return the samples of a conversation and their filling.

        Returns None for both if the conversation cannot be filled in.
        """
        if not self.known or len(conversation.messages) > MOST_SHAPES:
            return None, None
        apart = self._template.separate(conversation)
        if apart is None:
            return None, None
        filling, values = self._of_shape(apart, trained)
        if filling is None:
            return None, None
        contents = [message.content for message in conversation.messages]
        if apart is conversation and is_plain(conversation) and all(contents):
            found = filling.fill(contents)
        else:
            found = filling.fill_values(values, conversation)
        return (found, filling) if found else (None, None)

    def _of_shape(self, conversation: Conversation, trained: Sequence[bool]) -> tuple[Filling | None, list[str]]:
        """Return the filling for a conversation, and the values of the conversation."""
        if not self.known or (self._failures >= MOST_FAILURES and has_tools(conversation)):
            return None, []  # no shape can be filled in, and this shape has objects
        found = shape_of(conversation, trained)
        if found is None:
            return None, []
        shape, values = found
        if sum(trained) > LONG and shape not in self._by_shape and has_tools(conversation):
            values_of_first = hash(tuple(values))  # a run prepares its first conversations several times
            if len(self._once) < MOST_SHAPES:
                self._once.setdefault(shape, values_of_first)
            if sum(trained) > LONGEST or self._once.get(shape, values_of_first) == values_of_first:
                return None, []
        if shape not in self._by_shape and len(self._by_shape) < MOST_SHAPES and self._failures < MOST_FAILURES:
            self._by_shape[shape] = self._render(shape, trained)
            self._failures += 1 if self._by_shape[shape] is None else -MOST_SHAPES
        return self._by_shape.get(shape), values

    def _render(self, shape: ConversationShape, trained: Sequence[bool]) -> Filling | None:
        """Render a shape, and return its filling.

        Returns None if the shape cannot be filled in, for example because the template rejects the roles, or because
        nothing is trained on.
        """
        turns, objects = blank(shape)
        try:
            outline = self._template.outline(turns, trained)
        except (Reject, DataError):  # rendering the conversations raises the error
            return None
        if outline is None:
            return None
        every = [(number, -1) for number in range(len(shape.turns))]  # the gaps of a plain conversation
        frames, spaces, pieces = [], set(), 0
        for sample in outline.samples:
            segments = segments_of(sample.spans, self._encoder)
            parts, gaps = _cut(segments.texts)
            if sum(part.count(SEPARATOR) for part in parts) >= len(segments.texts):  # the template writes NUL
                return None
            pieces += len(parts)
            spaces |= {space for number, form, space in gaps if form < 0 or number not in objects}
            places = [gap[:2] for gap in gaps]
            has_all = sample.turn is None and places == every and is_plain(turns)
            if True in segments.trained:
                layout, empty = layout_of(turns) if has_all else "", has_empty_prompt(turns, trained)
                found = shape_of_sample(segments, turns, sample, layout, empty)
                frames.append(_Frame(found, parts, places))
        self._pieces += pieces
        strips = spaces <= {0}
        if not frames or (0 in spaces and not strips) or pieces > PIECES_OF_SHAPE or self._pieces > PIECES_OF_ALL:
            return None
        if outline.unusual is None and not frames[0].shape.layout:
            return None  # a built-in template leaves a message out
        unusual = outline.unusual
        if 1 in spaces:  # a control token absorbs the white space on one side of a value
            unusual = _or_has_outer_space(unusual)
        return Filling(frames, layout_of(turns), strips, unusual, objects, outline.formats)


def frames_of(template: Template, train_on: TrainOn, roles: Mapping[str, str]) -> Frames:
    """Return the frames for the next part.

    A process renders each shape only once, and its forks inherit the result.
    """
    # mypy considers objects of a protocol unhashable.
    frames = _frames_once(template, train_on, tuple(roles.items()))  # type: ignore[arg-type]
    frames.start_part()
    return frames


def forget_frames() -> None:
    """Free the memory of frames.

    The next part renders its shapes again.
    """
    _frames_once.cache_clear()


@lru_cache(maxsize=4)
def _frames_once(template: Template, train_on: TrainOn, roles: tuple[tuple[str, str], ...]) -> Frames:
    return Frames(template, train_on, dict(roles))


def _or_has_outer_space(unusual: Callable[[Sequence[str]], bool] | None) -> Callable[[Sequence[str]], bool]:
    """Return a test that also finds values that begin or end with white space."""

    def is_unusual(values: Sequence[str]) -> bool:
        return has_outer_space(values) or (unusual is not None and unusual(values))

    return is_unusual


def _cut(texts: Sequence[str]) -> tuple[list[str], list[tuple[int, int, int]]]:
    """Cut texts at their gaps, and return the pieces and the gaps.

    The texts are joined with NUL. Every second piece is empty, and stands for a gap. A gap is the number of its value,
    the number of its JSON format or -1, and the number of its sides on which white space around the value is kept.
    """
    parts = [""]
    gaps: list[tuple[int, int, int]] = []
    for number, text in enumerate(texts):
        parts[-1] += SEPARATOR * (number > 0)
        end = 0
        for gap in GAP.finditer(text):
            parts[-1] += text[end : gap.start()]
            parts += ["", ""]
            gaps.append((int(gap[1]), int(gap[2] or -1), gap[0].count("\v")))
            end = gap.end()
        parts[-1] += text[end:]
    return parts, gaps
