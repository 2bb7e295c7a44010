"""Read content parts of OpenAI's, Anthropic's, and LLaMA-Factory's forms.

[{"type": "thinking", "thinking": "Ask."}, {"type": "text", "text": "Let me look."},
 {"type": "tool_use", "id": "a", "name": "weather", "input": {"city": "Oslo"}}]
    → Content(reasoning=["Ask."], texts=["Let me look."], calls=[ToolCall("weather", …, "a")])
[{"type": "tool_result", "tool_use_id": "a", "content": "3"}] → a message of the role tool

Parts are lossless: an answer is reasoning, then text, then calls, so parts in another order are rejected, and so is
every other type of part. Keys that are not read, such as the `signature` of thinking, are counted as unused.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from packcorpus.tasks.conversations.answers import ARGUMENTS, call_of, calls_of_turn
from packcorpus.tasks.conversations.model import Message, Record, ToolCall
from packcorpus.tasks.conversations.values import is_struct_of_lists, list_of, object_of, text_of
from packcorpus.tasks.core.errors import Reject
from packcorpus.tasks.core.printable import kind, shown


class PartKeys(frozenset[str]):
    """The keys of a content part that are read."""


# What a part of each type is, and the keys of it that are read.
_TEXT = ("text", PartKeys(("type", "text", "value")))
_PARTS = {
    "text": _TEXT,
    "input_text": _TEXT,
    "output_text": _TEXT,
    "thinking": ("reasoning", PartKeys(("type", "thinking", "text", "value"))),
    "reasoning": ("reasoning", PartKeys(("type", "reasoning", "text", "value", "summary", "content"))),
    "tool_use": ("call", PartKeys(("type", "id", "name", "input"))),
    "tool_call": ("call", PartKeys(("type", "value", "id", "name", *ARGUMENTS))),
    "tool_result": ("result", PartKeys(("type", "tool_use_id", "content"))),
}
_OTHER = ("", PartKeys(("type", "text")))

_ORDER = ("", "reasoning", "text", "call")

# The keys of a part that may hold its reasoning; `summary` and `content` are lists of texts.
_REASONING = ("thinking", "reasoning", "text", "value", "summary", "content")

# Types of the parts of a reasoning item in OpenAI's Responses API.
_OF_REASONING = ("summary_text", "reasoning_text", "text")


def kind_of_part(part: Mapping[str, object]) -> tuple[str, PartKeys]:
    """Return what a part is, and its keys that are read.

    It is text, reasoning, a call, a result, or "".
    """
    name = part.get("type")
    return _PARTS.get(name, _OTHER) if isinstance(name, str) else _OTHER


@dataclass(slots=True)
class Content:
    """The parts of one message, or of a stretch of it between results."""

    texts: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)
    has_values: bool = False  # LLaMA-Factory's form
    last: str = ""  # the kind of the last part

    @property
    def text(self) -> str:
        """Return the texts as servers join them for templates that read no lists."""
        return "\n".join(self.texts)

    @property
    def parts(self) -> tuple[str, ...]:
        return tuple(self.texts) if len(self.texts) > 1 else ()


def read_parts(value: object, where: str) -> list[Content | Message]:
    """Read a list of parts.

    Results of calls become messages; the other parts between them are collected. The list is never empty.
    """
    pieces: list[Content | Message] = []
    for index, item in enumerate(list_of(value, where, "bad_content")):
        place = f"{where}[{index}]"
        if (isinstance(item, str) and not item.lstrip().startswith("{")) or not isinstance(item, (str, dict)):
            raise Reject("bad_content", f"{place}: expected a part with a type, found {kind(item)}")
        part = object_of(item, place, "bad_content")
        part_kind, keys = kind_of_part(part)
        if part_kind == "result":
            pieces.append(_result(part, place))
            continue
        content = pieces[-1] if pieces else None
        if not isinstance(content, Content):
            pieces.append(content := Content())
        if not part_kind:
            raise Reject("bad_content", f"{place}.type is {shown(part.get('type'))}; only text parts can be packed")
        if _ORDER.index(part_kind) < _ORDER.index(content.last):
            raise Reject(
                "bad_content",
                f"{place} is {part_kind} after a {content.last}; an answer is reasoning, then text, then calls: split "
                "it into several messages",
            )
        content.last = part_kind
        if part_kind == "text":
            key = "value" if part.get("text") is None and part.get("value") is not None else "text"
            content.has_values |= key == "value"
            content.texts.append(_string(part.get(key), f"{place}.{key}"))
        elif part_kind == "reasoning":
            content.reasoning.append(_reasoning(part, keys, place))
        elif part.get("value") is None:
            content.calls.append(call_of({**part, "type": None}, place))
        else:
            reasoning, text, calls = calls_of_turn(part["value"], f"{place}.value")
            if reasoning or text:
                raise Reject("bad_content", f"{place}.value: expected the JSON text of a call, and nothing before it")
            content.calls += calls
    return pieces or [Content()]


def _string(value: object, where: str) -> str:
    if not isinstance(value, str):
        raise Reject("bad_content", f"{where}: expected a string, found {kind(value)}")
    return text_of(value, where)


def _reasoning(part: Record, keys: Collection[str], where: str) -> str:
    found = [key for key in _REASONING if key in keys and part.get(key) not in (None, "", [])]
    if len(found) > 1:
        raise Reject("bad_content", f"{where}: {' and '.join(found)} hold reasoning; keep one")
    if not found:
        return ""
    [key] = found
    if key in ("summary", "content"):
        return _texts_of_reasoning(part, where)
    return _string(part[key], f"{where}.{key}")


def _texts_of_reasoning(item: Record, where: str) -> str:
    """Return the texts of a reasoning item of OpenAI's Responses API.

    Its `content` is the reasoning, and its `summary` stands for it if there is no content.
    """
    key = "content" if item.get("content") else "summary"
    texts = []
    for index, value in enumerate(list_of(item.get(key) or [], f"{where}.{key}", "bad_content")):
        place = f"{where}.{key}[{index}]"
        part = object_of(value, place, "bad_content")
        if part.get("type") not in _OF_REASONING:
            raise Reject("bad_content", f"{place}.type is {shown(part.get('type'))}; expected {_OF_REASONING[0]}")
        texts.append(_string(part.get("text"), f"{place}.text"))
    return "\n\n".join(texts)


def _result(part: Record, where: str) -> Message:
    """Read a result of Anthropic's form."""
    call_id, value = part.get("tool_use_id"), part.get("content")
    message = Message("tool", "", tool_call_id=None if call_id is None else text_of(call_id, f"{where}.tool_use_id"))
    if value is not None:
        message.content, message.parts = text_and_parts(value, f"{where}.content")
    return message


def text_and_parts(value: object, where: str) -> tuple[str, tuple[str, ...]]:
    """Read a string, or a list of text parts, as a text and its parts.

    The parts are empty if there is only one.
    """
    if isinstance(value, str):
        return text_of(value, where), ()
    if not isinstance(value, list) and not is_struct_of_lists(value):
        raise Reject("bad_content", f"{where}: expected a string, found {kind(value)}")
    content, *others = read_parts(value, where)
    if others or not isinstance(content, Content) or content.reasoning or content.calls:
        raise Reject("bad_content", f"{where}: only text parts can be packed here")
    return content.text, content.parts


def answer_of(
    content: Content, where: str, reasoning: str, calls: tuple[ToolCall, ...]
) -> tuple[str, tuple[ToolCall, ...]]:
    """Return the reasoning and the calls of a message.

    They are in its keys or in its parts. Both may have them if they are the same.
    """
    of_parts, calls_of_parts = "\n\n".join(filter(None, content.reasoning)), tuple(content.calls)
    if reasoning and of_parts and reasoning != of_parts:
        raise Reject("bad_content", f"{where}: its reasoning and the reasoning in its content differ; keep one")
    if calls and calls_of_parts and calls != calls_of_parts:
        raise Reject("bad_tool_call", f"{where}: tool_calls and the calls in its content differ; keep one")
    return of_parts or reasoning, calls_of_parts or calls


def content_of_call(value: object, where: str) -> Content:
    """Read the content of a turn whose role says "call"."""
    if isinstance(value, list) and any(isinstance(part, dict) and kind_of_part(part)[0] == "text" for part in value):
        value, _ = text_and_parts(value, where)
    reasoning, text, calls = calls_of_turn(value, where)
    return Content([text] if text else [], [reasoning] if reasoning else [], list(calls))


# -- items ------------------------------------------------------------------------------------------------------------

# The types of items, with the keys that are read.
_ITEMS: dict[object, Collection[str]] = {
    "reasoning": ("type", "summary", "content"),
    "function_call": ("type", "call_id", "name", "arguments"),
    "function_call_output": ("type", "call_id", "output"),
}


def keys_of_item(item: Mapping[str, object]) -> Collection[str]:
    """Return the keys that are read of a turn that is an item without a role.

    There are none if it is another turn.
    """
    name = item.get("type")
    if item.get("role") is not None or item.get("from") is not None or not isinstance(name, str):
        return ()
    return ("type", "content") if name == "reasoning" and item.get("content") else _ITEMS.get(name, ())


def message_of_item(item: Record, where: str) -> Message:
    name, call_id = item["type"], item.get("call_id")
    call_id = None if call_id is None else text_of(call_id, f"{where}.call_id")
    if name == "function_call":
        call = call_of({"name": item.get("name"), "arguments": item.get("arguments"), "id": call_id}, where)
        return Message("assistant", "", tool_calls=(call,))
    if name == "function_call_output":
        text, parts = text_and_parts(item.get("output"), f"{where}.output")
        return Message("tool", text, tool_call_id=call_id, parts=parts)
    reasoning = _texts_of_reasoning(item, where)
    if not reasoning:
        raise Reject("bad_content", f"{where}: an item of reasoning without a text; only text can be packed")
    return Message("assistant", "", reasoning=reasoning)
