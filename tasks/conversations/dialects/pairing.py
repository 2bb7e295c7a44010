"""Pair the calls of a conversation with their results.

assistant calls a, b; tool "3" (a); user "Thanks"    → 1 call without a result
user "2+2?"; tool "4"; assistant "4"                 → 1 result without a call

A result belongs to the call with its ID. Without an ID, it belongs to the first open call with its name, or to the
first open call. The calls of the last message may be open, because a conversation may end with them.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import lru_cache
from typing import NamedTuple

import orjson

from tasks.conversations.model import Conversation, Message, ToolCall

# Calls that a template of Hermes models writes may be in the content as text.
_CALL_AS_TEXT = "<tool_call>"


class Unpaired(NamedTuple):
    """Counts of what has no partner in a conversation.

    `undefined_tools` is 1 if a called tool has no definition.
    """

    calls_without_result: int = 0
    results_without_call: int = 0
    undefined_tools: int = 0


def unpaired_in(conversation: Conversation) -> Unpaired | None:
    """Return the calls and results without a partner, or None if there are none."""
    messages = conversation.messages
    if not any(message.tool_calls or message.role == "tool" for message in messages):
        return None
    open_calls: list[ToolCall] = []
    results = 0
    may_have_text_calls = False
    for message in messages:
        open_calls += message.tool_calls
        may_have_text_calls |= message.role == "assistant" and _CALL_AS_TEXT in message.content
        if message.role == "tool":
            if (call := _call_of(message, open_calls)) is not None:
                open_calls.remove(call)
            elif not may_have_text_calls:
                results += 1
    # The calls of the last message are open, because no result follows.
    found = Unpaired(len(open_calls) - len(messages[-1].tool_calls), results, int(_calls_undefined(conversation)))
    return found if any(found) else None


def _call_of(result: Message, calls: Sequence[ToolCall]) -> ToolCall | None:
    """Return the open call that a result belongs to."""
    if result.tool_call_id is not None and any(call.id is not None for call in calls):
        return next((call for call in calls if call.id == result.tool_call_id), None)
    named = [call for call in calls if call.name == result.name] if result.name else []
    return next(iter(named or calls), None)


def _calls_undefined(conversation: Conversation) -> bool:
    names = {call.name for message in conversation.messages for call in message.tool_calls}
    return bool(names) and not names.issubset(_names_of(conversation.tools))


@lru_cache(maxsize=512)
def _names_of(tools: tuple[str, ...]) -> Collection[str]:
    """Return the names of the tools with these schemas."""
    found = set()
    for tool in tools:
        schema = orjson.loads(tool)
        function = schema.get("function") if isinstance(schema.get("function"), dict) else schema
        if isinstance(function.get("name"), str):
            found.add(function["name"])
    return found


def unpaired_in_contents(roles: Sequence[str], contents: Sequence[str]) -> Unpaired | None:
    """Return the results without a call in a plain conversation.

    Returns None if there are none.
    """
    return unpaired_in(Conversation(tuple(map(Message, roles, contents))))
