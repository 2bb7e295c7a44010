"""Read items of OpenAI's Responses API.

They are among the messages and have no role.

{"type": "reasoning", "summary": [{"type": "summary_text", "text": "Ask."}]}               → the assistant's reasoning
{"type": "function_call", "call_id": "a", "name": "weather", "arguments": "{}"}            → the assistant's call
{"type": "function_call_output", "call_id": "a", "output": "3"}                            → a result
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from tasks.conversations.dialects.calls import call_of
from tasks.conversations.dialects.parts import text_and_parts, texts_of_reasoning
from tasks.conversations.fields import text_of
from tasks.conversations.model import Message
from tasks.core.errors import Reject

# The types of items, with the keys that are read.
_KEYS: dict[str, Collection[str]] = {
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
    keys = _KEYS.get(name, ()) if isinstance(name, str) else ()
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
