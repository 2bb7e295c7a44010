"""Define what is asked of a template in its child process, and the answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, Union

import orjson

from tasks.templates.jinja.composed.pieces import Expected, Piece, State
from tasks.templates.jinja.locate import Located, Range

# How turns are located: see `locate`. "others" are the ranges of turns that are not trained on, for train_on: all.
Method = Literal["auto", "together", "apart", "others"]


# Whether placeholders are traced, and whether with white space around them or with gaps for pieces (see `composed`).
Tracing = Literal["", "bare", "spaced", "pieces"]


class Job(NamedTuple):
    """A conversation to render, and the numbers of the messages to locate in it.

    `marks` asks for the ranges of {% generation %} blocks. `trace` records what the template does to values that are
    placeholders, which have white space around them if it is "spaced". `values` take their place in "pieces".
    """

    messages: list[Any]
    tools: Any
    marks: bool
    turns: list[int]
    method: Method
    trace: Tracing = ""
    values: Sequence[Any] = ()


class Pieces(NamedTuple):
    """Pieces to write: what a loop or a macro of the template writes of some values, and sets.

    `size` is about the characters of the values.
    """

    pieces: Sequence[Piece | orjson.Fragment]
    size: int


Written = list[tuple[str, State] | None]
Answer = Union["Rendering", Written]


class Rendering(NamedTuple):
    """A rendered conversation.

    `marks` are the ranges of its {% generation %} blocks. `lost` is a turn that could not be located, and why; then
    there are no samples. `unprompted`: the template has no prompt for the first message, so that no model writes it,
    and it was not located. `unusual` is the result of a `Trace`, if one was asked for, `pieces` those with gaps, and
    `parting` what two renderings have where they part at one.
    """

    text: str
    marks: list[Range]
    samples: list[Located]
    lost: tuple[int, str] | None
    unprompted: bool
    unusual: list[list[Any]] | None = None
    pieces: Sequence[Expected] = ()
    parting: Sequence[tuple[str, str]] = ()
