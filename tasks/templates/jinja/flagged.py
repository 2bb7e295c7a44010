"""Locate messages that no model writes, if a flag in the data adds them.

    … <|im_start|>▓user\\nWhat is 6 × 7?<|im_end|>▓\\n<|im_start|>assistant\\n42.<|im_end|>     with "train": true

The range of such a message is the text between two control tokens, with the second one. A label within a text would
cut the text in two, and the tokens would differ from those of the prompt that the model reads at inference.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

Range = tuple[int, int]


class NotLocated(Exception):
    """Turn `turn` cannot be located; `problem` describes why."""

    def __init__(self, turn: int, problem: str):
        super().__init__(turn, problem)
        self.turn, self.problem = turn, problem


def flagged_ranges(
    render: Callable[[list[Any]], str],
    messages: Sequence[Any],
    text: str,
    turns: Sequence[int],
    answers: Sequence[Range],
    ends: re.Pattern[str],
) -> list[Range]:
    """Return the ranges of messages in a text, in ascending order.

    `text` is the rendering of `messages`, and `turns` has the indices of those to locate. `ends` matches a control
    token. An answer in `answers` also ends a range. Raises NotLocated if the template does not write a message in one
    place, or writes it in one text with another message that is not trained on.
    """
    if not turns:
        return []
    places = {k: _place_of(render, messages, k, text) for k, message in enumerate(messages) if _has_text(message)}
    controls = [match.span() for match in ends.finditer(text)]
    found = set()
    for k in turns:
        place = places[k]
        if place is None:
            raise NotLocated(k, "the template does not write its content in one place")
        start = max([0, *(stop for _, stop in (*controls, *answers) if stop <= place)])
        stop = min([len(text), *(stop for first, stop in controls if first >= place)])
        stop = min([stop, *(first for first, _ in answers if first >= place)])
        for other, there in places.items():
            # The place of an answer is often unknown, for example if its reasoning is left out.
            is_unknown = there is None and messages[other]["role"] != "assistant"
            is_inside = there is not None and start <= there < stop and not any(a <= there < b for a, b in answers)
            if other not in turns and (is_unknown or is_inside):
                raise NotLocated(k, f"the template writes it in one text with messages[{other}]")
        found.add((start, stop))
    return sorted(found)


def _place_of(render: Callable[[list[Any]], str], messages: Sequence[Any], turn: int, text: str) -> int | None:
    """Return a place within the content of a message in the rendering of messages.

    A mark in the middle of the content shows the place. Returns None if the mark changes anything else, or is not in
    one place.
    """
    mark = next(mark for mark in map("m-a-r-k-{}".format, count()) if mark not in text)
    content = messages[turn]["content"]
    if isinstance(content, str):
        middle = len(content) // 2
        marked: Any = content[:middle] + mark + content[middle:]
    else:
        marked = [*content, {"type": "text", "text": mark}]
    before, *rest = render([*messages[:turn], {**messages[turn], "content": marked}, *messages[turn + 1 :]]).split(mark)
    return len(before) if len(rest) == 1 and before + rest[0] == text else None


def _has_text(message: Any) -> bool:
    content = message.get("content") or ""
    return bool(content.strip() if isinstance(content, str) else content)
