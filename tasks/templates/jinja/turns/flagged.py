"""Locate messages that no model writes, if a flag in the data adds them.

    … <|im_start|>▓user\\nWhat is 6 × 7?<|im_end|>▓\\n<|im_start|>assistant\\n42.<|im_end|>     with "train": true

The range of such a message is the text between two control tokens, with the second one. A label within a text would
cut the text in two, and the tokens would differ from those of the prompt that the model reads at inference.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from itertools import count, islice
from typing import Any

from tasks.conversations.answers import REASONING_KEYS

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
    controls = [match.span() for match in ends.finditer(text)]
    mark, other_mark = islice((mark for mark in map("m-a-r-k-{}-".format, count()) if mark not in text), 2)
    found = set()
    for k in turns:
        marked = [_with(message, mark) if n == k else message for n, message in enumerate(messages)]
        before, *rest = render(marked).split(mark)
        if len(rest) != 1 or before + rest[0] != text:
            raise NotLocated(k, "the template does not write its content in one place")
        place = len(before)
        start = max([0, *(stop for _, stop in (*controls, *answers) if stop <= place)])
        stop = min([len(text), *(stop for first, stop in controls if first >= place)])
        stop = min([stop, *(first for first, _ in answers if first >= place)])
        found.add((start, stop))
        part = text[start:place] + mark + text[place:stop]
        for other in range(len(messages)):
            if other not in turns and part not in render(
                [_with(message, other_mark) if n == other else message for n, message in enumerate(marked)]
            ):
                raise NotLocated(k, f"the template writes it in one text with messages[{other}]")
    return sorted(found)


def _with(message: Any, mark: str) -> Any:
    """Return a message with a mark in its texts.

    These are its content, its reasoning, and the names of its calls. The mark is in the middle of a content, or a
    further part of it. Nothing is added to an empty content.
    """
    content, found = message.get("content"), dict(message)
    if content:
        middle = len(content) // 2
        is_text = isinstance(content, str)
        found["content"] = (
            content[:middle] + mark + content[middle:] if is_text else [*content, {"type": "text", "text": mark}]
        )
    found |= {key: mark for key in REASONING_KEYS if message.get(key)}
    if message.get("tool_calls"):
        calls = message["tool_calls"]
        found["tool_calls"] = [{**call, "function": {**call["function"], "name": mark}} for call in calls]
    return found
