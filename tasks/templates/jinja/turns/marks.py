"""Find where a template writes the texts of messages, with marks in the texts.

    {"role": "assistant", "content": "It is 3."}  ─mark─▶  "It i▮s 3."  ─render─▶  …It i▮s 3.…  ─▶  70 to 78

A mark at the start or the end of a text would change what templates test and strip, so it is in the middle. The marked
rendering must be equal to the other one, apart from the marks. Otherwise, nothing is found.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from itertools import count
from typing import Any, Literal, NamedTuple

from tasks.conversations.answers import REASONING_KEYS
from tasks.templates.jinja.turns.flagged import Range
from tasks.templates.reasoning import INLINE

Section = Literal["reasoning", "content", "calls"]


class MarkedText(NamedTuple):
    """A marked text of message `k`: its content, its reasoning, or the name of a call.

    The mark is `offset` characters after its start.
    """

    k: int
    section: Section
    text: str
    offset: int


def new_mark(text: str) -> str:
    """Return the start of marks, which a text does not have. A number and `-` follow.

    Marks are ASCII, so that no way of writing a text escapes them.
    """
    return next(mark for mark in map("-mark{}-".format, count()) if mark not in text)


def places_of(
    text: str, messages: Sequence[Any], render: Callable[[list[Any]], str], roles: Collection[str]
) -> dict[int, Range]:
    """Return where the texts of each message with one of these roles start and end.

    `text` starts with the rendering of `messages`. Only texts that are written as they are, without white space around
    them, are found. The result is empty if marks change the rendering.
    """
    mark = new_mark(text)
    marked, texts = marked_messages(messages, mark, [k for k, m in enumerate(messages) if m["role"] in roles])
    rendered, places = placed(render(marked), mark, texts)
    if not text.startswith(rendered):
        return {}
    found: dict[int, Range] = {}
    seen: set[int] = set()
    for number, place in places:
        if place and number not in seen:
            first, last = found.get(texts[number].k, place)
            found[texts[number].k] = min(first, place[0]), max(last, place[1])
        seen.add(number)
    return found


def placed(rendered: str, mark: str, texts: Sequence[MarkedText]) -> tuple[str, list[tuple[int, Range | None]]]:
    """Return a rendering without its marks, and the places of the marked texts.

    Each place has the number of its text. It is None if the text is not written as it is.
    """
    pieces = re.split(rf"{mark}(\d+)-", rendered)
    text = "".join(pieces[::2])
    places: list[tuple[int, Range | None]] = []
    place = 0
    for piece, number in zip(pieces[::2], pieces[1::2], strict=False):
        place += len(piece)
        one = texts[int(number)]
        start = place - one.offset
        is_own = start >= 0 and text.startswith(one.text, start)
        places.append((int(number), (start, start + len(one.text)) if is_own else None))
    return text, places


def marked_messages(messages: Sequence[Any], mark: str, which: Collection[int]) -> tuple[list[Any], list[MarkedText]]:
    """Return messages with marks in the texts of some of them, and these texts.

    `which` are their indices.
    """
    texts: list[MarkedText] = []

    def marked(k: int, section: Section, text: str) -> str:
        core = text.strip()
        if not core:
            return text
        offset = len(core) // 2
        texts.append(MarkedText(k, section, core, offset))
        place = text.index(core) + offset
        return f"{text[:place]}{mark}{len(texts) - 1}-{text[place:]}"

    def of_content(k: int, text: str) -> str:
        found = INLINE.match(text) if messages[k]["role"] == "assistant" else None
        if not found or not found[1].strip():
            return marked(k, "content", text)
        reasoning, content = marked(k, "reasoning", found[1]), marked(k, "content", text[found.end() :])
        return text[: found.start(1)] + reasoning + text[found.end(1) : found.end()] + content

    found = []
    for k, message in enumerate(messages):
        if k in which:
            message = dict(message)
            for key in REASONING_KEYS:
                if isinstance(message.get(key), str):
                    message[key] = marked(k, "reasoning", message[key])
            content = message.get("content")
            if isinstance(content, str):
                message["content"] = of_content(k, content)
            elif content:
                message["content"] = [{**part, "text": of_content(k, part["text"])} for part in content]
            if message.get("tool_calls"):
                message["tool_calls"] = [
                    {**call, "function": {**call["function"], "name": marked(k, "calls", call["function"]["name"])}}
                    for call in message["tool_calls"]
                ]
        found.append(message)
    return found, texts
