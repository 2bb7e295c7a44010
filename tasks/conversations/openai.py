"""Convert conversations to the OpenAI message format."""

from __future__ import annotations

from typing import Any

import orjson

from tasks.conversations.model import DEVELOPER, Conversation, Message, full_text

# The roles of messages in this form.
OPENAI_ROLES = ("system", DEVELOPER, "user", "assistant", "tool")


def turns_json(conversation: Conversation) -> str:
    """Return the messages as JSON for format 2.0.

    The result is null for the format `text`, which has no turns.
    """
    plain = conversation.messages[0].role == "text"
    return orjson.dumps(None if plain else [as_row(message) for message in conversation.messages]).decode()


def tools_json(conversation: Conversation) -> str | None:
    return f"[{','.join(conversation.tools)}]" if conversation.tools else None


def as_row(message: Any) -> dict[str, Any]:
    """Return a message in OpenAI's form for format 2.0.

    Arguments of tool calls are JSON text.
    """
    calls = [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in message.tool_calls
    ]
    return {
        "role": message.given_role,
        "content": full_text(message),
        "name": message.name,
        "tool_calls": calls or None,
        "tool_call_id": message.tool_call_id,
        "weight": 0 if message.train is False else 1,
        "reasoning_content": message.reasoning or None,
        "train": message.train,
    }


def as_openai(message: Message) -> dict[str, Any]:
    """Return a message in OpenAI's form, which chat templates expect."""
    found: dict[str, Any] = {"role": message.role, "content": full_text(message)}
    if message.name is not None:
        found["name"] = message.name
    if message.tool_call_id is not None:
        found["tool_call_id"] = message.tool_call_id
    if message.reasoning:
        found["reasoning_content"] = message.reasoning
    if message.tool_calls:
        found["tool_calls"] = [
            {"type": "function", "function": {"name": call.name, "arguments": _arguments(call.arguments)}}
            | ({"id": call.id} if call.id else {})
            for call in message.tool_calls
        ]
    return found


def in_parts(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message in OpenAI's form with its content as a list of one part.

    Some templates read only this form. If the content is a list of texts, each of them is a part.
    """
    content = [message["content"]] if isinstance(message["content"], str) else message["content"]
    return {**message, "content": [{"type": "text", "text": text} for text in content]} if content else message


def _arguments(text: str) -> Any:
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        return text
