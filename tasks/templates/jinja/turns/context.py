"""Check that a template writes all messages and tools of a conversation.

    a template without a place for the role `tool`:    user, call, result 52, answer "52."  ─▶  the result is missing

Turns that are trained on are checked by their labels (see `labels`). A context that is left out is as bad: the model
would learn an answer after a prompt that does not have its source.

If all texts are long, they are searched in each sample, in their order. A short text, or one beside reasoning, could be
found by chance, so other conversations are rendered once more with marks in their texts. Each sample is checked, for
a template may write a message in some prompts only. Earlier reasoning is not required, because many templates leave it
out of the history at inference, too. The ids of calls and results only connect them, and are not required either.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import orjson

from tasks.conversations.model import DEVELOPER
from tasks.conversations.reasoning import REASONING_KEYS
from tasks.core.errors import Reject
from tasks.core.printable import shown
from tasks.templates.jinja.turns.locate import is_written
from tasks.templates.jinja.turns.marks import new_mark
from tasks.templates.placeholders import GAP

# Returns the samples of messages and tools as text, or an empty list if the template refuses them.
Render = Callable[[Sequence[Any], Any], list[str]]

# A text of so many characters is not found by chance.
LONG = 16

# Keys of a schema whose strings are not content: templates translate or omit them.
_TYPES = ("type", "format", "required", "$schema", "strict", "additionalProperties")

# Reasoning at the start of a content, which templates may leave out of the history.
_REASONING = re.compile(r".*(?:</[\w:]*think(?:ing)?>|\[/THINK\])\s*", re.DOTALL)

_PLACEHOLDER = re.compile(r"\\u0000(\d+)\\u0000")  # in JSON


class _Text(NamedTuple):
    """A text that must be written.

    `place` says where the conversation has it. `k` is the index of the message, or -1 for a tool.
    """

    text: str
    place: str
    k: int


class Context:
    """Check the renderings of one template, whose name is for errors."""

    def __init__(self, name: str):
        self._name = name

    def require(
        self, samples: Sequence[tuple[str, int]], messages: Sequence[Any], tools: Any, breaker: str, render: Render
    ) -> None:
        """Raise Reject if a sample lacks a text of its conversation.

        Each sample has its text and the number of its messages. `breaker` is left out of errors.
        """
        if not tools and all(_has_long_texts_in_order(text, messages[:count]) for text, count in samples):
            return
        texts: list[_Text] = []
        others: list[_Text] = []  # keys and numbers, which cannot be marked
        mark = new_mark("".join(text for text, _ in samples))

        def marked(found: _Text) -> str:
            core = found.text.strip()
            if not core:
                return found.text
            texts.append(found)
            place = found.text.index(core) + len(core) // 2
            return f"{found.text[:place]}{mark}{len(texts) - 1}-{found.text[place:]}"

        rendered = render(*_marked(messages, tools, marked, others.append))
        are_alike = len(rendered) == len(samples)
        for n, (text, count) in enumerate(samples):
            seen = set(map(int, re.findall(rf"(?i){mark}(\d+)-", rendered[n]))) if are_alike else ()
            for number, found in enumerate(texts):
                is_there = number in seen if are_alike else is_written(found.text.strip(), text)
                if found.k < count and not is_there:
                    raise self._missing(found, messages, breaker)
            for found in others:
                if found.k < count and not is_written(found.text, text):
                    raise self._missing(found, messages, breaker)

    def _missing(self, found: _Text, messages: Sequence[Any], breaker: str) -> Reject:
        text = shown(found.text.replace(breaker, ""))
        if found.k < 0:
            return Reject(
                "tools_not_written",
                f"{found.place} has {text}, but the template {self._name} does not write it; use a "
                "template that writes tools, or set `ignore: [tools]` if the tools are not needed",
            )
        role = messages[found.k]["role"]
        left_out = {"system": "system", DEVELOPER: "system", "tool": "tool"}.get(role)
        drop = f", or set `drop_roles: [{left_out}]` if they are not needed" if left_out else ""
        return Reject(
            "message_not_written",
            f"{found.place} ({role}) has {text}, but the template {self._name} does not write it; use a template that "
            f"writes such messages{drop}",
        )


def has_gaps(text: str, messages: Sequence[Any], tools: Any) -> bool:
    """Return whether placeholders have a gap for each text."""
    required = [(each["content"], [call["function"] for call in each.get("tool_calls") or ()]) for each in messages]
    numbers = set(_PLACEHOLDER.findall(orjson.dumps((required, tools)).decode()))
    return numbers <= {gap[1] for gap in GAP.finditer(text)}


def _has_long_texts_in_order(text: str, messages: Sequence[Any]) -> bool:
    """Return whether all texts are long, and a rendering has them in their order.

    Reasoning often quotes a result, and may be left out, so texts beside reasoning could be found in it.
    """
    if any(map(_has_reasoning, messages)):
        return False
    place = 0
    for found in _texts(messages):
        core = found.text.strip()
        start = text.find(core, place) if len(core) >= LONG else -1
        if start < 0:
            return False
        place = start + len(core)
    return True


def _has_reasoning(message: Any) -> bool:
    content = message["content"] or ""
    texts = [content] if isinstance(content, str) else [part.get("text") or "" for part in content]
    return any(message.get(key) for key in REASONING_KEYS) or any(map(_REASONING.match, texts))


def _texts(messages: Sequence[Any]) -> Iterator[_Text]:
    """Yield the texts of messages in the usual order."""
    found: list[_Text] = []

    def noted(text: _Text) -> str:
        if text.text.strip():
            found.append(text)
        return text.text

    _marked(messages, None, noted, found.append)
    yield from found


def _marked(
    messages: Sequence[Any],
    tools: Any,
    mark: Callable[[_Text], str],
    note: Callable[[_Text], object],
) -> tuple[list[Any], Any]:
    """Return messages and tools with all texts passed through `mark`.

    Keys and numbers are passed to `note`.
    """
    marked = [_marked_message(message, k, mark, note) for k, message in enumerate(messages)]
    found = tools and [_marked_tool(tool, f"tools[{n}]", mark, note) for n, tool in enumerate(tools)]
    return marked, found


def _marked_message(message: Any, k: int, mark: Callable[[_Text], str], note: Callable[[_Text], object]) -> Any:
    message = dict(message)
    place = f"messages[{k}]"
    content = message.get("content")
    if isinstance(content, str):
        message["content"] = _marked_content(content, message["role"], place, k, mark)
    elif content:
        message["content"] = [
            {**part, "text": _marked_content(part["text"], message["role"], place, k, mark)}
            if part.get("text")
            else part
            for part in content
        ]
    if message.get("tool_calls"):
        message["tool_calls"] = [
            _marked_call(call, f"{place}.tool_calls[{n}]", k, mark, note)
            for n, call in enumerate(message["tool_calls"])
        ]
    return message


def _marked_content(content: str, role: str, place: str, k: int, mark: Callable[[_Text], str]) -> str:
    reasoning = _REASONING.match(content) if role == "assistant" else None
    start = reasoning.end() if reasoning else 0
    return content[:start] + mark(_Text(content[start:], place, k))


def _marked_call(call: Any, place: str, k: int, mark: Callable[[_Text], str], note: Callable[[_Text], object]) -> Any:
    function = dict(call["function"])
    function["name"] = mark(_Text(function["name"], place, k))
    arguments = function["arguments"]
    if isinstance(arguments, str):
        try:
            value = orjson.loads(arguments)
        except orjson.JSONDecodeError:
            function["arguments"] = mark(_Text(arguments, place, k))
        else:
            function["arguments"] = orjson.dumps(_marked_value(value, place, k, mark, note)).decode()
    else:
        function["arguments"] = _marked_value(arguments, place, k, mark, note)
    return {**call, "function": function}


def _marked_value(value: Any, place: str, k: int, mark: Callable[[_Text], str], note: Callable[[_Text], object]) -> Any:
    """Return arguments with their strings marked."""
    if isinstance(value, str):
        return mark(_Text(value, place, k))
    if isinstance(value, list):
        return [_marked_value(item, place, k, mark, note) for item in value]
    if isinstance(value, dict):
        for key in filter(str.strip, value):
            note(_Text(key, place, k))
        return {key: _marked_value(item, place, k, mark, note) for key, item in value.items()}
    # Templates write `true` and `null` in several ways, and numbers with an exponent, too.
    if isinstance(value, int | float) and not isinstance(value, bool) and "e" not in repr(value):
        note(_Text(repr(value), place, k))
    return value


def _marked_tool(value: Any, place: str, mark: Callable[[_Text], str], note: Callable[[_Text], object]) -> Any:
    """Return a tool, or a part of its schema, with its strings marked."""
    if isinstance(value, str):
        return mark(_Text(value, place, -1))
    if isinstance(value, list):
        return [_marked_tool(item, place, mark, note) for item in value]
    if not isinstance(value, dict):
        return value
    for name, properties in value.items():
        if name == "properties" and isinstance(properties, dict):
            for key in filter(str.strip, properties):
                note(_Text(key, place, -1))
    return {
        key: item if key in _TYPES and not isinstance(item, dict) else _marked_tool(item, place, mark, note)
        for key, item in value.items()
    }
