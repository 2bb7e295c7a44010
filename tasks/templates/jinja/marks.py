"""Find where a template writes the texts of messages, with marks in the texts.

    {"role": "assistant", "content": "It is 3."}  ─mark─▶  "It i▮4▮s 3."  ─render─▶  …It i▮4▮s 3.…  ─▶  70 to 78

A mark at the start or the end of a text would change what templates test and strip, so it is in the middle. The marked
rendering must be equal to the other one, apart from the marks. Otherwise, nothing is found.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

from tasks.templates.jinja.flagged import Range

# Characters that do not occur in any text, in the order in which they are tried.
_MARKS = [chr(code) for code in range(0xFDD2, 0xFDF0)]


class _Text(NamedTuple):
    """A marked text of message `k`: its content, its reasoning, or the name of a call.

    The mark is `offset` characters after its start.
    """

    k: int
    text: str
    offset: int


def places_of(
    text: str, messages: Sequence[Any], render: Callable[[list[Any]], str], roles: Collection[str]
) -> dict[int, Range]:
    """Return where the texts of each message with one of these roles start and end.

    `text` starts with the rendering of `messages`. Only texts that are written as they are, without white space around
    them, are found. The result is empty if marks change the rendering.
    """
    mark = next((mark for mark in _MARKS if mark not in text), "")
    if not mark:
        return {}
    marked, texts = _marked(messages, mark, roles)
    pieces = re.split(f"{mark}(\\d+){mark}", render(marked))
    if not text.startswith("".join(pieces[::2])):
        return {}
    found: dict[int, Range] = {}
    seen: set[str] = set()
    place = 0
    for piece, number in zip(pieces[::2], pieces[1::2], strict=False):
        place += len(piece)
        k, written, offset = texts[int(number)]
        start, stop = place - offset, place - offset + len(written)
        if number not in seen and text.startswith(written, start):
            first, last = found.get(k, (start, stop))
            found[k] = min(first, start), max(last, stop)
        seen.add(number)
    return found


def _marked(messages: Sequence[Any], mark: str, roles: Collection[str]) -> tuple[list[Any], list[_Text]]:
    """Return messages with a mark in the middle of each text, and the texts."""
    texts: list[_Text] = []

    def marked(k: int, text: str) -> str:
        core = text.strip()
        if not core:
            return text
        offset = len(core) // 2
        texts.append(_Text(k, core, offset))
        place = text.index(core) + offset
        return f"{text[:place]}{mark}{len(texts) - 1}{mark}{text[place:]}"

    found = []
    for k, message in enumerate(messages):
        if message["role"] in roles:
            message = dict(message)
            for key in ("reasoning_content", "thinking", "content"):
                if isinstance(message.get(key), str):
                    message[key] = marked(k, message[key])
                elif message.get(key):
                    message[key] = [{**part, "text": marked(k, part["text"])} for part in message[key]]
            if message.get("tool_calls"):
                message["tool_calls"] = [
                    {**call, "function": {**call["function"], "name": marked(k, call["function"]["name"])}}
                    for call in message["tool_calls"]
                ]
        found.append(message)
    return found, texts
