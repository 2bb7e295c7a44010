"""Read content parts of OpenAI's, Anthropic's, and LLaMA-Factory's forms.

[{"type": "thinking", "thinking": "Ask."}, {"type": "text", "text": "Let me look."},
 {"type": "tool_use", "id": "a", "name": "weather", "input": {"city": "Oslo"}}]
    → Content(reasoning="Ask.", texts=["Let me look."], calls=[ToolCall("weather", …, "a")])
[{"type": "tool_result", "tool_use_id": "a", "content": "3"}] → a message of the role tool

Parts are lossless: an answer is reasoning, then text, then calls, so parts in another order are rejected, and so is
every other type of part. Keys that are not read, such as the `signature` of thinking, are counted as unused.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from tasks.conversations.calls import ARGUMENTS, call_of, calls_of_turn
from tasks.conversations.fields import text_of
from tasks.conversations.lists import is_struct_of_lists, list_of, object_of
from tasks.conversations.model import Message, ToolCall
from tasks.core.errors import Reject
from tasks.core.printable import kind, shown

# The types of parts, with the keys that are read; the first key that is there holds the text.
TEXT_PARTS = dict.fromkeys(("text", "input_text", "output_text"), ("text", "value"))
REASONING_PARTS = {
    "thinking": ("thinking", "text", "value"),
    "reasoning": ("reasoning", "text", "value", "summary", "content"),
}
CALL_PARTS = {"tool_use": ("id", "name", "input"), "tool_call": ("value", "id", "name", *ARGUMENTS)}
RESULT_PARTS = {"tool_result": ("tool_use_id", "content")}

# Types of the parts of a reasoning item in OpenAI's Responses API.
_OF_REASONING = ("summary_text", "reasoning_text", "text")

_ORDER = ("reasoning", "text", "call")


class PartKeys(frozenset[str]):
    """The keys of a content part that are read."""


_KEYS = {
    name: PartKeys(("type", *keys)) for name, keys in (TEXT_PARTS | REASONING_PARTS | CALL_PARTS | RESULT_PARTS).items()
}
_OTHER = PartKeys(("type", "text"))


def keys_of_part(part: Mapping[str, object]) -> Collection[str]:
    """Return the keys of a part that are read."""
    name = part.get("type")
    return _KEYS.get(name, _OTHER) if isinstance(name, str) else _OTHER


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
    found: list[Content | Message] = []
    for index, item in enumerate(list_of(value, where, "bad_content")):
        place = f"{where}[{index}]"
        if (isinstance(item, str) and not item.lstrip().startswith("{")) or not isinstance(item, (str, dict)):
            raise Reject("bad_content", f"{place}: expected a part with a type, found {kind(item)}")
        part = object_of(item, place, "bad_content")
        name = part.get("type")
        if isinstance(name, str) and name in RESULT_PARTS:
            found.append(_result(part, place))
            continue
        if not found or isinstance(found[-1], Message):
            found.append(Content())
        _add(found[-1], part, place)  # type: ignore[arg-type]
    return found or [Content()]


def _add(content: Content, part: dict[str, object], where: str) -> None:
    name = part["type"] if isinstance(part.get("type"), str) else None
    if name in TEXT_PARTS:
        _in_order(content, "text", where)
        key = "value" if part.get("text") is None and part.get("value") is not None else "text"
        content.has_values |= key == "value"
        content.texts.append(_string(part.get(key), f"{where}.{key}"))
    elif name in REASONING_PARTS:
        _in_order(content, "reasoning", where)
        content.reasoning.append(_reasoning(part, REASONING_PARTS[str(name)], where))
    elif name in CALL_PARTS:
        _in_order(content, "call", where)
        if part.get("value") is not None:
            reasoning, text, calls = calls_of_turn(part["value"], f"{where}.value")
            if reasoning or text:
                raise Reject("bad_content", f"{where}.value: expected the JSON text of a call, and nothing before it")
            content.calls += calls
        else:
            content.calls.append(call_of({**part, "type": None}, where))
    else:
        raise Reject("bad_content", f"{where}.type is {shown(part.get('type'))}; only text parts can be packed")


def _in_order(content: Content, name: str, where: str) -> None:
    if content.last and _ORDER.index(name) < _ORDER.index(content.last):
        raise Reject(
            "bad_content",
            f"{where} is {name} after a {content.last}; an answer is reasoning, then text, then calls: split it into "
            "several messages",
        )
    content.last = name


def _string(value: object, where: str) -> str:
    if not isinstance(value, str):
        raise Reject("bad_content", f"{where}: expected a string, found {kind(value)}")
    return text_of(value, where)


def _reasoning(part: dict[str, object], keys: Collection[str], where: str) -> str:
    """Return the reasoning of a part; `summary` and `content` are lists of texts."""
    found = [key for key in keys if part.get(key) not in (None, "", [])]
    if len(found) > 1:
        raise Reject("bad_content", f"{where}: {' and '.join(found)} hold reasoning; keep one")
    if not found:
        return ""
    key = found[0]
    return (
        _string(part[key], f"{where}.{key}") if key not in ("summary", "content") else texts_of_reasoning(part, where)
    )


def texts_of_reasoning(item: Mapping[str, object], where: str) -> str:
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


def _result(part: dict[str, object], where: str) -> Message:
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
    found = read_parts(value, where)
    [content] = found if len(found) == 1 else [None]
    if not isinstance(content, Content) or content.reasoning or content.calls:
        raise Reject("bad_content", f"{where}: only text parts can be packed here")
    return content.text, content.parts


def answer_of(
    content: Content, where: str, reasoning: str, calls: tuple[ToolCall, ...]
) -> tuple[str, tuple[ToolCall, ...]]:
    """Return the reasoning and the calls of a message.

    They are in its keys or in its parts. Both may have them if they are the same.
    """
    of_parts = "\n\n".join(filter(None, content.reasoning))
    own = tuple(content.calls)
    if reasoning and of_parts and reasoning != of_parts:
        raise Reject("bad_content", f"{where}: its reasoning and the reasoning in its content differ; keep one")
    if calls and own and calls != own:
        raise Reject("bad_tool_call", f"{where}: tool_calls and the calls in its content differ; keep one")
    return of_parts or reasoning, own or calls


def content_of_call(value: object, where: str) -> Content:
    """Read the content of a turn whose role says "call"."""
    if isinstance(value, list) and any(isinstance(part, dict) and part.get("type") in TEXT_PARTS for part in value):
        value, _ = text_and_parts(value, where)
    reasoning, text, calls = calls_of_turn(value, where)
    return Content([text] if text else [], [reasoning] if reasoning else [], list(calls))


# The types of items, with the keys that are read.
_KEYS_OF_ITEMS: dict[str, Collection[str]] = {
    "reasoning": ("type", "summary", "content"),
    "function_call": ("type", "call_id", "name", "arguments"),
    "function_call_output": ("type", "call_id", "output"),
}


def is_item(item: Mapping[str, object]) -> bool:
    """Return whether a turn is an item without a role."""
    return item.get("role") is None and item.get("from") is None and bool(keys_of_item(item))


def is_reasoning_item(item: Mapping[str, object]) -> bool:
    """Return whether an item is the reasoning of the answer after it."""
    return item.get("type") == "reasoning"


def keys_of_item(item: Mapping[str, object]) -> Collection[str]:
    """Return the keys of an item that are read; none if it has no such type."""
    name = item.get("type")
    keys = _KEYS_OF_ITEMS.get(name, ()) if isinstance(name, str) else ()
    return keys if name != "reasoning" or not item.get("content") else ("type", "content")


def message_of_item(item: dict[str, object], where: str) -> Message:
    name, call_id = item["type"], item.get("call_id")
    call_id = None if call_id is None else text_of(call_id, f"{where}.call_id")
    if name == "function_call":
        call = call_of({"name": item.get("name"), "arguments": item.get("arguments"), "id": call_id}, where)
        return Message("assistant", "", tool_calls=(call,))
    if name == "function_call_output":
        text, parts = text_and_parts(item.get("output"), f"{where}.output")
        return Message("tool", text, tool_call_id=call_id, parts=parts)
    reasoning = texts_of_reasoning(item, where)
    if not reasoning:
        raise Reject("bad_content", f"{where}: an item of reasoning without a text; only text can be packed")
    return Message("assistant", "", reasoning=reasoning)
