"""Compose the samples of conversations whose shape was seen before.

conversation ─shape_of─▶ shape ──second time──▶ Composition
                    └──▶ values ─────────────────┴─▶ pieces that are not known yet ─sandbox─▶ samples

All other conversations are rendered.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, NamedTuple

import orjson

from tasks.conversations.model import Conversation, content_digest
from tasks.encoders.encoder import Encoder
from tasks.templates.jinja.composed.composition import Composition, Outlined
from tasks.templates.jinja.composed.known_pieces import KnownPieces
from tasks.templates.jinja.sandbox.requests import Job, Pieces
from tasks.templates.jinja.token_boundary import TokenBoundary
from tasks.templates.placeholders import COMPARED, ConversationShape, blank, shape_of
from tasks.templates.spans import Sample, Span, Turns

# The maximum number of shapes, and of texts between gaps in one shape and in all shapes.
MOST_SHAPES = 1024
TEXTS_OF_SHAPE, TEXTS_OF_ALL = 1 << 14, 1 << 20

# Conversations with more trained turns are rendered, so that the sandbox can refuse them if they take too much work.
MOST_TURNS = 100


class Composed(NamedTuple):
    """Composed samples of a conversation.

    `is_compared` is true if they are to be compared with its rendering.
    """

    samples: list[Sample]
    is_compared: bool


Composing = Generator[Job | Pieces, Any, Composed | None]
# Arguments: placeholders, flags of trained turns, method of locating them, and values of a conversation of this shape.
Outlining = Callable[[Conversation, Sequence[bool], Turns, Sequence[Any]], Generator[Job, Any, Outlined | None]]


class Composer:
    """Compose the samples of one template.

    `outlining` renders placeholders with the template.
    """

    def __init__(
        self,
        encoder: Encoder,
        controls: Mapping[tuple[str, bool], Span],
        pieces: KnownPieces,
        boundary: TokenBoundary,
        turns: Turns,
        outlining: Outlining,
    ):
        self._controls = controls
        self._pieces, self._boundary, self._turns, self._outlining = pieces, boundary, turns, outlining
        # Control tokens that absorb white space may absorb white space of a value.
        self._composes = not encoder.strips_left and not encoder.strips_right
        self._compositions: dict[tuple[ConversationShape, str], Composition | None] = {}
        self._seen: set[int] = set()  # hashes of shapes
        self._texts = 0

    def compose(self, conversation: Conversation, trained: Sequence[bool]) -> Composing:
        """Yield jobs and pieces, receive the results, and return composed samples.

        Return None if the conversation must be rendered.
        """
        if not self._composes or sum(trained) > MOST_TURNS:
            return None
        found = shape_of(conversation, trained)
        if found is None:
            return None
        shape, values = found
        if self._compositions.get((shape, self._turns), shape) is None:
            return None
        try:
            digest = content_digest("\0".join(values).encode())
        except UnicodeEncodeError:  # a lone surrogate
            return None
        samples = yield from self._samples(shape, self._turns, values)
        return Composed(samples, digest % COMPARED == 0) if samples else None

    def _samples(
        self, shape: ConversationShape, method: Turns, values: Sequence[str]
    ) -> Generator[Job | Pieces, Any, list[Sample] | None]:
        composition = yield from self._composition(shape, method, values)
        written = composition.written(values) if composition else None
        if composition is None or written is None:
            return None
        pieces = yield from self._pieces.written(composition.pieces, values, composition.objects)
        if not composition.add_pieces(values, written, pieces):
            return None
        if method == "auto" and not self._boundary.splits_all(composition.heads(written)):
            return (yield from self._samples(shape, "apart", values))
        return composition.samples(written)

    def _composition(
        self, shape: ConversationShape, method: Turns, values: Sequence[str]
    ) -> Generator[Job, Any, Composition | None]:
        """Return the composition of a shape; None if the conversation must be rendered.

        The first conversation of a shape is always rendered.
        """
        key = shape, method
        if key in self._compositions:
            return self._compositions[key]
        if hash(key) not in self._seen or len(self._compositions) >= MOST_SHAPES:
            self._seen.add(hash(key))
            return None
        placeholders, objects = blank(shape)
        seen = [orjson.loads(value) if number in objects else value for number, value in enumerate(values)]
        outlined = yield from self._outlining(placeholders, [flag for _, flag, *_ in shape.turns], method, seen)
        self._compositions[key] = composition = self._composition_of(outlined, objects) if outlined else None
        return composition

    def _composition_of(self, outlined: Outlined, objects: frozenset[int]) -> Composition | None:
        try:
            found = Composition(outlined, objects, self._controls)
        except ValueError:
            return None
        self._texts += found.size
        return found if found.size <= TEXTS_OF_SHAPE and self._texts <= TEXTS_OF_ALL else None
