"""Replace all strings of a conversation with placeholders.

    user "2+2?", assistant reasoning "easy", "4"   ──shape_of─▶ (user, content), (assistant, content, reasoning)
                                                                and the values "2+2?", "4", "easy"
    shape ──blank──▶ user ␀0␀, assistant reasoning ␀2␀, ␀1␀     the same for all conversations of this shape

The rendering of the placeholders shows the text that a template writes around the strings. In the rendering, a
placeholder becomes a gap. `␀0␀` is a gap for the string itself. It has a vertical tab on either side, which disappears
if the template strips white space. `␀0:1␀` is a gap for the value as JSON, in the second of the formats used.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import count
from typing import Any, NamedTuple

import orjson

from packcorpus.tasks.conversations.model import Conversation, Message, ToolCall, full_text, message_of, options_json

GAP = re.compile("\v?\0(\\d+)(?::(\\d+))?\0\v?")

# A gap for a value that is written as JSON.
JSON_GAP = re.compile("\0(\\d+):\\d+\0")

# Kinds of arguments of a call. An empty object has no placeholder.
_TEXT, _OBJECT, _EMPTY = range(3)

# A conversation whose value has more brackets is rendered, so that a value that is nested too deeply is reported.
_MOST_BRACKETS = 200

# A conversation with longer options, as JSON, is rendered, because few others have the same.
_LONGEST_OPTIONS = 200

# One in this many conversations that are filled into a rendering of placeholders is also rendered, and the results are
# compared. The digest of a conversation decides, so that the choice does not depend on parts or workers.
COMPARED = 256

# Role of the data, whether trained on, whether content, reasoning, name, and tool_call_id are present, and the calls.
_Turn = tuple[str, bool, bool, bool, bool, bool, tuple[tuple[Any, bool], ...]]


class ConversationShape(NamedTuple):
    """The common properties of all conversations with the same placeholders.

    `tools` is the number of tools. `options` are the options of the template as JSON, or "".
    """

    turns: tuple[_Turn, ...]
    tools: int
    options: str = ""


def is_plain(conversation: Conversation) -> bool:
    """Return whether a conversation has only roles and contents."""
    return not (conversation.tools or conversation.template_options) and all(map(_is_plain, conversation.messages))


def _is_plain(m: Message) -> bool:
    others = m.context or m.parts or m.reasoning or m.tool_calls
    return not (others or m.tool_call_id is not None or m.name is not None)


def with_contexts_joined(conversation: Conversation) -> Conversation:
    """Return a conversation whose contents are strings that include their contexts."""
    if not any(message.context or message.parts for message in conversation.messages):
        return conversation
    messages = [
        replace(m, content=full_text(m), context="", parts=()) if m.context or m.parts else m
        for m in conversation.messages
    ]
    return replace(conversation, messages=tuple(messages))


def shape_of(conversation: Conversation, trained: Sequence[bool]) -> tuple[ConversationShape, list[str]] | None:
    """Return the shape and the values; None if a value cannot have a placeholder."""
    turns: list[_Turn] = []
    values: list[str] = []
    for message, flag in zip(conversation.messages, trained, strict=True):
        if _is_plain(message):
            turns.append((message.given_role, flag, message.content != "", False, False, False, ()))
            if message.content:
                values.append(message.content)
            continue
        if message.name == "" or message.tool_call_id == "":  # a template may test for its presence
            return None
        known = (full_text(message), message.reasoning, message.name, message.tool_call_id)
        values += filter(None, known)
        calls = []
        for call in message.tool_calls:
            values.append(call.name)
            kind = _kind(call.arguments)
            if kind != _EMPTY:
                values.append(call.arguments)
            if kind is None or not call.name:
                return None
            if call.id:
                values.append(call.id)
            calls.append((kind, bool(call.id)))
        content, reasoning, name, call_id = map(bool, known)
        turns.append((message.given_role, flag, content, reasoning, name, call_id, tuple(calls)))
    if conversation.tools and not are_objects(conversation.tools):
        return None
    options = options_json(conversation)
    if len(options) > _LONGEST_OPTIONS:
        return None
    return ConversationShape(tuple(turns), len(conversation.tools), options), [*values, *conversation.tools]


@lru_cache(maxsize=512)
def are_objects(tools: tuple[str, ...]) -> bool:
    """Return whether there are tools, all of them objects that are not empty."""
    return bool(tools) and all(_kind(tool) == _OBJECT for tool in tools)


def _kind(text: str) -> Any:
    """Return the kind of a call's arguments; None if they cannot have a placeholder."""
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError:
        return _TEXT if text else None
    if text.count("{") + text.count("[") > _MOST_BRACKETS or not isinstance(value, dict):
        return None
    if value:
        return _OBJECT
    return _EMPTY if text == "{}" else None


def blank(shape: ConversationShape) -> tuple[Conversation, frozenset[int]]:
    """Return a conversation of placeholders with the given shape.

    The second value has the numbers of the placeholders that are JSON objects.
    """
    objects: set[int] = set()
    numbers = count()

    def text(there: bool) -> str:
        return f"\v\0{next(numbers)}\0\v" if there else ""

    def value(kind: Any) -> str:
        if kind != _OBJECT:
            return text(kind == _TEXT) or "{}"
        objects.add(number := next(numbers))
        return json.dumps({f"\0{number}\0": 0})

    messages = []
    for role, _, content, reasoning, name, call_id, calls in shape.turns:
        message = message_of(role, text(content))
        message.reasoning = text(reasoning)
        message.name, message.tool_call_id = text(name) or None, text(call_id) or None
        message.tool_calls = tuple(ToolCall(text(True), value(kind), text(has_id) or None) for kind, has_id in calls)
        messages.append(message)
    tools = tuple(value(_OBJECT) for _ in range(shape.tools))
    options = orjson.loads(shape.options) if shape.options else None
    return Conversation(tuple(messages), tools, template_options=options), frozenset(objects)


def is_placeholder(arguments: str) -> bool:
    """Return whether arguments in a `blank` conversation are a placeholder or `{}`.

    A template that reads arguments as text has an outline only with such arguments.
    """
    an_object = r'\{"\\u0000\d+\\u0000": 0\}'  # as `blank` writes it
    return arguments == "{}" or bool(GAP.fullmatch(arguments) or re.fullmatch(an_object, arguments))


def can_be_filled(
    values: Sequence[str], objects: frozenset[int], must_render: Callable[[Sequence[str]], bool] | None
) -> bool:
    """Return whether a template writes the same text around values and placeholders.

    `must_render` tests for values that the template may treat differently. It gets `{}` for an object, because the
    template writes an object only as JSON.
    """
    if "" in values or any(map(str.isspace, values)) or "\0" in "".join(values):
        return False
    seen = ["{}" if number in objects else value for number, value in enumerate(values)]
    return not (must_render and must_render(seen))


def has_outer_space(values: Sequence[str]) -> bool:
    """Return whether one of these values begins or ends with white space."""
    return any(value[:1].isspace() or value[-1:].isspace() for value in values)


def as_json(text: str, is_object: bool, form: Sequence[Any]) -> str:
    """Return a value as `tojson` writes it with the arguments `form`."""
    return _encoder(*form[:2], *(form[2] or (None, None)), form[3]).encode(orjson.loads(text) if is_object else text)


@lru_cache
def _encoder(ascii: bool, indent: Any, item: str | None, key: str | None, sort_keys: bool) -> json.JSONEncoder:
    separators = (item, key) if item is not None and key is not None else None
    return json.JSONEncoder(ensure_ascii=ascii, indent=indent, separators=separators, sort_keys=sort_keys)
