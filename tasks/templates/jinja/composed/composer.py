"""Compose the renderings of conversations whose shape was seen before; all others are rendered.

conversation ─shape_of─▶ shape ──second time──▶ Composition
                    └──▶ values ─────────────────┴─▶ pieces that are not known yet ─sandbox─▶ Rendering
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any

import orjson

from tasks.conversations.model import Conversation, content_digest, whole_text
from tasks.encoders.encoder import Encoder
from tasks.templates.jinja.breaker import Breaker
from tasks.templates.jinja.composed.composition import Composition, objects_of
from tasks.templates.jinja.composed.pieces import Piece, State
from tasks.templates.jinja.neutral import Neutral
from tasks.templates.jinja.sandbox.limits import MOST_CHARACTERS
from tasks.templates.jinja.sandbox.requests import Job, Pieces, Rendering
from tasks.templates.jinja.unusual import Unusual
from tasks.templates.placeholders import COMPARED, ConversationShape, blank, shape_of

# The maximum number of shapes, and of texts between gaps of one shape and of all.
MOST_SHAPES = 1024
TEXTS_OF_SHAPE, TEXTS_OF_ALL = 1 << 14, 1 << 20

# Conversations with more trained turns are rendered: the sandbox refuses those that take too much work.
MOST_TURNS = 100

# The maximum number of characters of pieces that are remembered.
MOST_REMEMBERED = 4 << 20

Composing = Generator[Job | Pieces, Any, Rendering | None]


class Composer:
    """Compose renderings of one template. `job_of` returns a job with the messages and tools of a conversation."""

    def __init__(
        self,
        encoder: Encoder,
        breaker: Breaker,
        neutral: Neutral,
        job_of: Callable[[Job, Conversation], Job],
        inline: bool,
    ):
        """`inline`: the template reads reasoning, which may be in a content."""
        self._encoder, self._job_of, self._inline = encoder, job_of, inline
        self._breaker, self._neutral = breaker, neutral
        self._eos = encoder.control_strings.get(encoder.eos_id, "")
        self._compositions: dict[tuple[ConversationShape, str], Composition | None] = {}
        self._seen: set[int] = set()  # hashes of shapes
        self._texts = 0
        self._known: dict[bytes, tuple[str, State] | None] = {}
        self._remembered = 0

    def compose(
        self, job: Job, whole: Callable[[], Job], conversation: Conversation, trained: Sequence[bool], breaker: str
    ) -> Composing:
        """Yield what is to be written, and return the rendering of a job; None if it must be rendered.

        `whole` returns the job with messages and tools; `breaker` is empty if none has a part of a control string.
        """
        found = shape_of(conversation, trained) if len(job.turns) <= MOST_TURNS else None
        if found is None:
            return None
        shape, values = found
        key = shape, job.method
        if key not in self._compositions:
            if hash(key) not in self._seen:
                self._seen.add(hash(key))
                return None
            if len(self._compositions) >= MOST_SHAPES:
                return None
            self._compositions[key] = yield from self._composition(job, shape, values)
        composition = self._compositions[key]
        broken = self._broken_values(values, composition.objects, breaker) if composition and breaker else values
        written = composition.written(broken) if composition else None
        if composition is None or written is None:
            return None
        found_pieces = composition.pieces(values)
        pieces = yield from self._written([self._broken(piece, breaker) for piece in found_pieces])
        rendering = composition.rendered(written, pieces)
        if rendering is None or not (yield from self._are_own(found_pieces, pieces, breaker)):
            return None
        texts = [rendering.text, *(sample.text for sample in rendering.samples)]
        if any(len(text) > MOST_CHARACTERS for text in texts):
            return None
        if content_digest(whole_text(conversation).encode()) % COMPARED == 0:
            other = yield whole()
            if _places(other) != _places(rendering):
                raise AssertionError(f"{other.text!r} is composed as {rendering.text!r}, or its turns are elsewhere")
        return rendering

    def _composition(
        self, job: Job, shape: ConversationShape, values: list[str]
    ) -> Generator[Job | Pieces, Any, Composition | None]:
        """Return the composition of a shape; None if conversations of that shape are to be rendered."""
        placeholders, objects = blank(shape)
        job = self._job_of(job, placeholders)
        rendering = yield job._replace(trace="pieces", values=objects_of(values, objects))
        if rendering is None or rendering.lost or rendering.unusual is None:
            return None
        *tests, _ = rendering.unusual
        inline = self._inline or rendering.unprompted or not all(sample.plain for sample in rendering.samples)
        unusual = Unusual(tests, None, bool(tests[3]), inline)
        try:
            found = Composition(rendering, unusual, objects)
        except ValueError:
            return None
        self._texts += found.size
        return found if found.size <= TEXTS_OF_SHAPE and self._texts <= TEXTS_OF_ALL else None

    def _written(self, pieces: Sequence[Piece]) -> Generator[Pieces, Any, list[tuple[str, State] | None]]:
        """Return what pieces write and set; None for one that fails."""
        keys = [orjson.dumps(piece) for piece in pieces]
        new = {key: piece for key, piece in zip(keys, pieces, strict=True) if key not in self._known}
        if not new:
            return [self._known[key] for key in keys]
        answers = yield Pieces(list(new.values()))
        found = dict(zip(new, ((str(each[0]), each[1]) if each else None for each in answers), strict=True))
        written = [found[key] if key in found else self._known[key] for key in keys]
        self._remembered += sum(len(key) + len(each[0] if each else "") for key, each in found.items())
        if self._remembered > MOST_REMEMBERED:
            self._known, self._remembered = {}, 0
        self._known |= found
        return written

    def _are_own(
        self, pieces: Sequence[Piece], written: Sequence[tuple[str, State] | None], breaker: str
    ) -> Generator[Pieces, Any, bool]:
        """Return whether the template wrote every control string of the pieces itself, and whether it is complete."""
        for piece, found in zip(pieces, written, strict=True):
            text, state = found or ("", [])
            texts = [text, *(each for each in state if isinstance(each, str))]
            if (self._eos and self._eos in text) or any(map(self._breaker.may_join, texts)):
                return False
            controls = self._encoder.control_pattern.findall(text)
            if not controls:
                continue
            neutral = self._neutral_of(piece)
            if neutral != piece:
                [other] = yield from self._written([self._broken(neutral, breaker)])
                if other is None or self._encoder.control_pattern.findall(other[0]) != controls:
                    return False
        return True

    def _neutral_of(self, piece: Piece) -> Piece:
        return _changed(piece, self._neutral.of)

    def _broken(self, piece: Piece, breaker: str) -> Piece:
        return _changed(piece, lambda value: self._breaker.broken_value(value, breaker)) if breaker else piece

    def _broken_values(self, values: Sequence[str], objects: frozenset[int], breaker: str) -> list[str]:
        broken = [self._breaker.broken_value(value, breaker) for value in objects_of(values, objects)]
        return [value if isinstance(value, str) else orjson.dumps(value).decode() for value in broken]


def _changed(piece: Piece, change: Callable[[Any], Any]) -> Piece:
    """Return a piece whose values are changed, but not the names of variables."""
    name, values, namespaces = piece
    spaces = {space: {key: change(each) for key, each in of.items()} for space, of in namespaces.items()}
    if isinstance(name, str):
        args, named = values
        return [name, [change(args), {key: change(each) for key, each in named.items()}], spaces]
    return [name, {key: change(each) for key, each in values.items()}, spaces]


def _places(rendering: Rendering) -> list[Any]:
    """Return everything of a rendering that is used, with lists for tuples."""
    samples = [[text, [*map(list, ranges)], *others] for text, ranges, *others in rendering.samples]
    return [rendering.text, [*map(list, rendering.marks)], samples, rendering.lost, rendering.unprompted]
