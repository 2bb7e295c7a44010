"""Render a conversation with any engine, and locate its turns.

A conversation is rendered several times: as a whole, and up to each turn. Jinja2 does this in its child process
(`child`), and minijinja in this process (`fast`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from tasks.templates.jinja.engines.requests import Method, Rendering
from tasks.templates.jinja.turns.answers import Failed
from tasks.templates.jinja.turns.flagged import NotLocated, Range
from tasks.templates.jinja.turns.locate import Located, locate, prefix_ranges

# Added to a problem if the first message is the only turn to train on.
NO_PROMPT = "; it writes no prompt before messages[0], which is the only turn to train on: add a user message before it"


class Engine(Protocol):
    """A compiled template."""

    def render(self, messages: list[Any], tools: Any, prompt: bool, marks: bool = False) -> tuple[str, list[Range]]:
        """Return the rendered text and the ranges of its `{% generation %}` blocks.

        The ranges are only known if `marks` is true. `prompt` adds the generation prompt. Raises Failed or another
        error of the engine.
        """
        ...


def rendered(
    engine: Engine,
    ends: re.Pattern[str],
    eos: str,
    messages: list[Any],
    tools: Any,
    marked: bool,
    turns: list[int],
    method: Method,
    last: Sequence[int] = (),
    every: bool = True,
) -> Rendering:
    """Return the rendering of a conversation with its turns.

    The arguments from `messages` on are those of a `Job`, and `every` is that of `locate`. Raises the errors of the
    engine.
    """

    def text_of(messages: list[Any], prompt: bool) -> str:
        return engine.render(messages, tools, prompt)[0]

    whole, marks = engine.render(messages, tools, False, marked)
    answers = [k for k in turns if messages[k]["role"] == "assistant"]
    is_first = method != "others" and len(answers) > 1 and answers[0] == 0
    unprompted = is_first and not _is_prompted(text_of, messages, ends)
    turns = turns[unprompted:]
    try:
        if method == "others":
            samples = [Located(whole, prefix_ranges(text_of, messages, whole, turns), None, turns, True, [])]
        else:
            samples = locate(text_of, messages, whole, turns, method, ends, eos, last, every)
    except NotLocated as lost:
        return Rendering(whole, marks, [], (lost.turn, lost.problem), unprompted)
    return Rendering(whole, marks, samples, None, unprompted)


def _is_prompted(render: Callable[[list[Any], bool], str], messages: list[Any], ends: re.Pattern[str]) -> bool:
    """Return whether the first message continues the prompt of an empty conversation."""
    try:
        locate(render, messages, "", [0], "apart", ends)
    except (NotLocated, Failed):
        return False
    return True
