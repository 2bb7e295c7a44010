"""Render conversations of the same shape once, and fill in their values.

    roles user, assistant ─▶ Skeleton  "<|im_start|>user\n…<|im_end|>\n<|im_start|>assistant\n"  not trained on
                                │      "…<|im_end|>"                                             trained on
    contents "2+2?", "4"  ───fill───▶ Prepared: the texts of this conversation

The text that a template writes around the values depends only on the shape of a conversation. The template renders it
once, with gaps. Filling the gaps takes 1 µs per plain conversation. Messages, spans, and segments take 15 µs, and a
Jinja template takes a millisecond. A conversation is rendered instead if its values could change more than the gaps: a
blank turn, a value that the template tests, …
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from packcorpus.tasks.conversations.model import (
    ROLES,
    Conversation,
    content_digest,
    first_answer,
    layout_of,
    message_of,
    role_named,
    whole_text,
)
from packcorpus.tasks.core.errors import DataError, Reject
from packcorpus.tasks.encoders.texts import SEPARATOR
from packcorpus.tasks.templates.placeholders import (
    COMPARED,
    GAP,
    ConversationShape,
    are_objects,
    as_json,
    blank,
    can_be_filled,
    has_outer_space,
    is_plain,
    shape_of,
)
from packcorpus.tasks.templates.spans import Template, TrainOn, has_empty_prompt, trained_turns
from packcorpus.tasks.tokenization.samples import (
    Prepared,
    TokenLayout,
    layout_of_tokens,
    prompt_digest,
    segments_of,
)

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


class _SampleSkeleton(NamedTuple):
    """The text that a template writes around the values of a sample."""

    layout: TokenLayout
    parts: list[str]  # of all texts, joined with NUL; every second part is "" and is replaced by a value
    gaps: list[tuple[int, int]]  # number of the value, and number of its JSON format or -1


class Skeleton:
    """The samples of all conversations with the same shape, with gaps for the values.

    `strips` means that the template removes white space around values. `must_render` returns whether the template may
    write given values differently. `objects` are the numbers of the values that are JSON objects, and
    `reasoning` those of the reasoning that is in no sample. `prompt` are the roles before the first trained answer.
    """

    def __init__(
        self,
        samples: list[_SampleSkeleton],
        layout: str,
        strips: bool,
        must_render: Callable[[Sequence[str]], bool] | None,
        objects: frozenset[int],
        formats: Sequence[Sequence[Any]],
        reasoning: Sequence[int] = (),
        prompt: Sequence[str] = (),
    ):
        self._samples, self._layout, self._strips, self._must_render = samples, layout + SEPARATOR, strips, must_render
        self._objects, self._formats = objects, formats
        self._reasoning = reasoning
        # The contents before the first trained answer are the prompt, if one of them is of the user.
        self._in_prompt = len(prompt) if "user" in prompt else 0
        self._prompt_layout = "".join(chr(1 + ROLES.index(role)) for role in prompt) + SEPARATOR
        self._gaps = {gap for sample in samples for gap in sample.gaps}
        self.roles_with_results: tuple[str, ...] = ()  # the roles of a plain conversation with results of calls
        # Nearly always, there is one sample, which has every content once.
        self._only = samples[0] if samples[0].layout.conversation else None

    def is_compared(self, samples: Sequence[Prepared]) -> bool:
        """Return whether a conversation is also rendered and compared with `samples`."""
        return self._must_render is not None and samples[0].digest % COMPARED == 0

    def fill(self, contents: list[str]) -> list[Prepared] | None:
        """Return the samples of a plain conversation with these contents.

        Returns None if a content is blank, because then a template may write something else, and the turn is not
        trained on. Also returns None if a content must be rendered, contains NUL, or is not valid text.
        """
        for content in contents:
            if not content or content.isspace() or SEPARATOR in content:
                return None
        if self._must_render and self._must_render(contents):
            return None
        whole = self._layout + SEPARATOR.join(contents)
        try:
            prompt = digest = content_digest(whole.encode())
        except UnicodeEncodeError:  # a lone surrogate
            return None
        if self._in_prompt:
            texts = map(str.strip, contents[: self._in_prompt])
            prompt = content_digest((self._prompt_layout + SEPARATOR.join(texts)).encode())
        if self._only is None:
            return self._filled(contents, whole.split(SEPARATOR), digest, prompt)
        layout, parts, _ = self._only
        parts = parts.copy()
        parts[1::2] = map(str.strip, contents) if self._strips else contents
        return [Prepared(layout, "".join(parts).encode(), contents, digest, prompt=prompt)]

    def fill_values(
        self, values: list[str], conversation: Conversation, trained: Sequence[bool]
    ) -> list[Prepared] | None:
        """Return the samples of any conversation; None if its values cannot be filled in."""
        if not can_be_filled(values, self._objects, self._must_render):
            return None
        whole = whole_text(conversation)
        # If the token layout has the layout, the strings are just the values. Otherwise they begin with the layout.
        strings = values if self._only else whole.split(SEPARATOR)
        try:
            digest = content_digest(whole.encode())
            samples = self._filled(values, strings, digest, prompt_digest(conversation, trained, digest))
            samples[0].reasoning = [[values[number].strip()] for number in self._reasoning]
            return samples
        except UnicodeEncodeError:
            return None

    def _filled(self, values: list[str], strings: list[str], digest: int, prompt: int) -> list[Prepared]:
        stripped = [value.strip() for value in values] if self._strips else values
        objects, formats = self._objects, self._formats
        written = {
            (n, form): stripped[n] if form < 0 else as_json(stripped[n], n in objects, formats[form])
            for n, form in self._gaps
        }
        prepared = []
        for layout, parts, gaps in self._samples:
            parts = parts.copy()
            parts[1::2] = map(written.__getitem__, gaps)
            prepared.append(Prepared(layout, "".join(parts).encode(), strings, digest, prompt=prompt))
        return prepared


class Skeletons(dict[tuple[str, ...], Skeleton | None]):
    """Skeletons by the names of the roles, rendered on first use.

    The value is None for roles that have no skeleton. `roles` maps the names in records, in lower case, to roles.
    """

    def __init__(self, template: Template, train_on: TrainOn, roles: Mapping[str, str]):
        self._template, self._train_on, self._roles = template, train_on, roles
        # Otherwise, the content decides whether a space is added.
        self.are_used = not template.encoder.has_space and not template.encoder.space_follows
        self._by_shape: dict[ConversationShape, Skeleton | None] = {}
        self._once: dict[ConversationShape, int] = {}  # long shapes that have occurred once, with a hash of the values
        self._pieces = 0
        self.start_part()

    def start_part(self) -> None:
        """Forget all failures before the next part, and all shapes if a limit is reached."""
        self._failures = 0  # number of shapes without a skeleton, until a shape has one
        if max(len(self), len(self._by_shape)) >= MOST_SHAPES or self._pieces > PIECES_OF_ALL:
            self.clear()
            self._by_shape, self._once, self._pieces = {}, {}, 0

    def has_roles(self, names: Sequence[str]) -> bool:
        """Return whether all names are names of roles."""
        return all(role_named(name, self._roles) for name in names)

    def __missing__(self, names: tuple[str, ...]) -> Skeleton | None:
        roles = tuple([role_named(name, self._roles) or "" for name in names])
        skeleton = None
        if roles and all(roles) and len(roles) <= MOST_SHAPES:
            turns = Conversation(tuple(message_of(role, "content") for role in roles))
            skeleton, _ = self._of_shape(turns, trained_turns(turns, self._train_on))
            if skeleton and "tool" in roles:
                skeleton.roles_with_results = tuple(message.role for message in turns.messages)
        if len(self) < MOST_SHAPES:
            self[names] = skeleton
        return skeleton

    def filled(
        self, conversation: Conversation, trained: Sequence[bool]
    ) -> tuple[list[Prepared], Skeleton] | tuple[None, None]:
        """Return samples and their skeleton, or None for both if it cannot be filled in."""
        if not self.are_used or len(conversation.messages) > MOST_SHAPES:
            return None, None
        separate = self._template.separate(conversation)
        skeleton, values = (None, []) if separate is None else self._of_shape(separate, trained)
        if skeleton is None:
            return None, None
        contents = [message.content for message in conversation.messages]
        if separate is conversation and is_plain(conversation) and all(contents):
            samples = skeleton.fill(contents)
        else:
            samples = skeleton.fill_values(values, conversation, trained)
        return (samples, skeleton) if samples else (None, None)

    def _of_shape(self, conversation: Conversation, trained: Sequence[bool]) -> tuple[Skeleton | None, list[str]]:
        """Return the skeleton for a conversation, and the values of the conversation."""
        if not self.are_used or (self._failures >= MOST_FAILURES and are_objects(conversation.tools)):
            return None, []  # no shape can be filled in, and this shape has objects
        shape_and_values = shape_of(conversation, trained)
        if shape_and_values is None:
            return None, []
        shape, values = shape_and_values
        if shape in self._by_shape:
            return self._by_shape[shape], values
        if sum(trained) > LONG and are_objects(conversation.tools):
            values_of_first = hash(tuple(values))  # a run prepares its first conversations several times
            if len(self._once) < MOST_SHAPES:
                self._once.setdefault(shape, values_of_first)
            if sum(trained) > LONGEST or self._once.get(shape, values_of_first) == values_of_first:
                return None, []
        if len(self._by_shape) >= MOST_SHAPES or self._failures >= MOST_FAILURES:
            return None, values
        skeleton = self._by_shape[shape] = self._render(shape, trained)
        self._failures += 1 if skeleton is None else -MOST_SHAPES
        return skeleton, values

    def _render(self, shape: ConversationShape, trained: Sequence[bool]) -> Skeleton | None:
        """Render a shape, and return its skeleton.

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
        samples, sides, pieces = [], set(), 0
        for sample in outline.samples:
            segments = segments_of(sample.spans, self._template.encoder)
            parts, gaps = [""], []
            for text in segments.texts:
                end = 0
                for gap in GAP.finditer(text):
                    parts[-1] += text[end : gap.start()]
                    parts += ["", ""]
                    number, form = int(gap[1]), int(gap[2] or -1)
                    gaps.append((number, form))
                    if form < 0 or number not in objects:
                        sides.add(gap[0].count("\v"))  # on which white space around the value is kept
                    end = gap.end()
                parts[-1] += text[end:] + SEPARATOR
            parts[-1] = parts[-1].removesuffix(SEPARATOR)
            if sum(part.count(SEPARATOR) for part in parts) >= len(segments.texts):  # the template writes NUL
                return None
            pieces += len(parts)
            if True in segments.trained:
                has_all = sample.turn is None and gaps == every and is_plain(turns)
                layout, empty = layout_of(turns) if has_all else "", has_empty_prompt(turns, trained)
                samples.append(
                    _SampleSkeleton(
                        layout_of_tokens(segments, turns, sample, layout, empty, self._template.unknown), parts, gaps
                    )
                )
        self._pieces += pieces
        strips = sides <= {0}
        if not samples or (0 in sides and not strips) or pieces > PIECES_OF_SHAPE or self._pieces > PIECES_OF_ALL:
            return None
        must_render = outline.must_render
        if must_render is None and not samples[0].layout.conversation:
            return None  # a built-in template leaves a message out
        if 1 in sides:  # a control token absorbs the white space on one side of a value

            def has_outer_space_or_must_render(values: Sequence[str]) -> bool:
                return has_outer_space(values) or (outline.must_render is not None and outline.must_render(values))

            must_render = has_outer_space_or_must_render
        written = {number for sample in samples for number, _ in sample.gaps}
        last, drops = outline.samples[-1].turn, self._template.adjust.drop_reasoning
        earlier = turns.messages if last is None or drops else turns.messages[: last + 1]
        # Whether a trained turn may lack its reasoning is checked by the template.
        untrained = [message for message, flag in zip(earlier, trained, strict=False) if drops or not flag]
        numbers = [int(gap[1]) for message in untrained for gap in GAP.finditer(message.reasoning)]
        left_out = [number for number in numbers if number not in written]
        roles = [message.role for message in turns.messages]
        prompt = roles[: first_answer(roles, trained)]
        return Skeleton(samples, layout_of(turns), strips, must_render, objects, outline.formats, left_out, prompt)


def skeletons_of(template: Template, train_on: TrainOn, roles: Mapping[str, str]) -> Skeletons:
    """Return the skeletons for the next part.

    A process renders each shape only once, and its forks inherit the result.
    """
    # mypy considers objects of a protocol unhashable.
    skeletons = _skeletons_once(template, train_on, tuple(roles.items()))  # type: ignore[arg-type]
    skeletons.start_part()
    return skeletons


@lru_cache(maxsize=4)
def _skeletons_once(template: Template, train_on: TrainOn, roles: tuple[tuple[str, str], ...]) -> Skeletons:
    return Skeletons(template, train_on, dict(roles))


def forget_skeletons() -> None:
    """Free the memory of skeletons; the next part renders its shapes again."""
    _skeletons_once.cache_clear()
