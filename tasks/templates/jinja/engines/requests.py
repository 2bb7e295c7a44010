"""Define the requests for renderings, and the answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

from tasks.templates.jinja.turns.flagged import Range
from tasks.templates.jinja.turns.locate import Located

# How turns are located (see `locate`). "others" locates the turns that are not trained on, for train_on: all.
Method = Literal["auto", "together", "apart", "others"]

# Whether placeholders are traced, and whether they have white space around them.
Tracing = Literal["", "bare", "spaced"]

# What renders a conversation. Jinja2 also renders those of "both", and the results are compared.
Engine = Literal["jinja2", "minijinja", "both"]


class Job(NamedTuple):
    """A conversation to render, and the indices of the messages to locate in it.

    `marks` requests the ranges of {% generation %} blocks. `trace` records the operations of the template on
    placeholders, which have white space around them if `trace` is "spaced". `options` are variables of this
    conversation, over those of the template. A sample ends after each turn of `last`.
    """

    messages: list[Any]
    tools: Any
    marks: bool
    turns: list[int]
    method: Method
    trace: Tracing = ""
    engine: Engine = "jinja2"
    options: Mapping[str, Any] | None = None
    last: Sequence[int] = ()


class Rendering(NamedTuple):
    """A rendered conversation.

    `marks` are the ranges of its {% generation %} blocks. `lost` is a turn that could not be located, with the reason;
    in this case, there are no samples. `unprompted` is true if the template has no prompt for the first message. No
    model writes such a message, so it was not located. `unusual` is the result of a `Trace`, if requested.
    """

    text: str
    marks: list[Range]
    samples: list[Located]
    lost: tuple[int, str] | None
    unprompted: bool
    unusual: list[list[Any]] | None = None
