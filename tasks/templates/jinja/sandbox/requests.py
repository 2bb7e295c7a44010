"""Define the requests to a template's child process, and the answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, Union

import orjson

from tasks.templates.jinja.composed.pieces import Expected, Piece, State
from tasks.templates.jinja.flagged import Range
from tasks.templates.jinja.locate import Located

# How turns are located (see `locate`). "others" locates the turns that are not trained on, for train_on: all.
Method = Literal["auto", "together", "apart", "others"]


# Whether placeholders are traced, and whether they have white space around them or gaps for pieces (see `composed`).
Tracing = Literal["", "bare", "spaced", "pieces"]


class Job(NamedTuple):
    """A conversation to render, and the indices of the messages to locate in it.

    `marks` requests the ranges of {% generation %} blocks. `trace` records the operations of the template on
    placeholders. They have white space around them if `trace` is "spaced". `values` replace them in pieces if `trace`
    is "pieces".
    """

    messages: list[Any]
    tools: Any
    marks: bool
    turns: list[int]
    method: Method
    trace: Tracing = ""
    values: Sequence[Any] = ()


class Pieces(NamedTuple):
    """Pieces to write: loops and macros of the template, with their values.

    `size` is the approximate number of characters in the values.
    """

    pieces: Sequence[Piece | orjson.Fragment]
    size: int


Written = list[tuple[str, State] | None]
Answer = Union["Rendering", Written]


class Rendering(NamedTuple):
    """A rendered conversation.

    `marks` are the ranges of its {% generation %} blocks. `lost` is a turn that could not be located, with the reason;
    in this case, there are no samples. `unprompted` is true if the template has no prompt for the first message. No
    model writes such a message, so it was not located. `unusual` is the result of a `Trace`, if requested. `pieces` are
    the pieces with gaps. `parting` has pairs of texts where two renderings diverge at the gap of a piece.
    """

    text: str
    marks: list[Range]
    samples: list[Located]
    lost: tuple[int, str] | None
    unprompted: bool
    unusual: list[list[Any]] | None = None
    pieces: Sequence[Expected] = ()
    parting: Sequence[tuple[str, str]] = ()
