"""Render a conversation with any engine, and locate its turns.

A conversation is rendered several times: as a whole, and up to each turn. Jinja2 does this in its child process (see
`renderer`), and minijinja in this process (see `engines`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from packcorpus.tasks.templates.jinja.turns.answers import Failed, NotLocated
from packcorpus.tasks.templates.jinja.turns.locate import Located, locate, prefix_ranges
from packcorpus.tasks.templates.jinja.turns.marks import Range

# Limit of one rendered text. A template writes its input about once, and an encoder takes up to 50 bytes per character.
MOST_CHARACTERS = 16 << 20
# Limit of turns × (messages + KB). Locating a turn takes two renderings, and each takes about 1 µs per message and 1 µs
# per KB, so this is 4 s or more.
MOST_WORK = 2_000_000

# How turns are located (see `locate`). "others" locates the turns that are not trained on, for train_on: all.
Method = Literal["auto", "together", "apart", "as_rendered", "others"]

# Whether placeholders are traced, and whether they have white space around them.
Tracing = Literal["", "bare", "spaced"]

# What renders a conversation. Jinja2 also renders those of "both", and the results are compared.
EngineName = Literal["jinja2", "minijinja", "both"]


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
    engine: EngineName = "jinja2"
    options: Mapping[str, Any] | None = None
    last: Sequence[int] = ()


class Rendering(NamedTuple):
    """A rendered conversation.

    `marks` are the ranges of its {% generation %} blocks. `lost` is a turn that could not be located, with the reason;
    in this case, there are no samples. `unprompted` is true if the template has no prompt for the first message. No
    model writes such a message, so it was not located. `trace` is the result of a `Trace`, if requested.
    """

    text: str
    marks: list[Range]
    samples: list[Located]
    lost: tuple[int, str] | None
    unprompted: bool
    trace: list[list[Any]] | None = None


# Returns the text of messages and tools, and the ranges of its {% generation %} blocks. The first flag adds the
# generation prompt, and the second one requests the ranges. Raises Failed or another error of the engine.
RenderMessages = Callable[[list[Any], Any, bool, bool], tuple[str, list[Range]]]


def rendered(render: RenderMessages, ends: re.Pattern[str], eos: str, job: Job, every: bool) -> Rendering:
    """Return the rendering of a conversation with its turns.

    `ends`, `eos`, and `every` are those of `locate`. Raises the errors of the engine.
    """
    messages, tools, marked, turns, method, *_, last = job

    def text_of(messages: list[Any], prompt: bool) -> str:
        return render(messages, tools, prompt, False)[0]

    whole, marks = render(messages, tools, False, marked)
    answers = [k for k in turns if messages[k]["role"] == "assistant"]
    unprompted = False
    if method != "others" and len(answers) > 1 and answers[0] == 0:
        try:  # whether the first message continues the prompt of an empty conversation
            locate(text_of, messages, "", [0], "apart", ends)
        except (NotLocated, Failed):
            unprompted = True
    turns = turns[unprompted:]
    try:
        if method == "others":
            samples = [Located(whole, prefix_ranges(text_of, messages, whole, turns), None, turns, True, [])]
        else:
            samples = locate(text_of, messages, whole, turns, method, ends, eos, last, every)
    except NotLocated as lost:
        return Rendering(whole, marks, [], (lost.turn, lost.problem), unprompted)
    return Rendering(whole, marks, samples, None, unprompted)
