"""Convert the reasoning of an answer to the form that a template reads.

{"content": "4", "reasoning_content": "2+2"}           field: most templates of reasoning models
{"content": "<think>\\n2+2\\n</think>\\n\\n4"}             inline: templates that search the content for reasoning
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from enum import Enum
from typing import Any

from tasks.conversations.model import Conversation, Message

INLINE = re.compile(r"\s*<think>(.*?)</think>\s*", re.DOTALL)


class ReasoningForm(Enum):
    FIELD = "field"
    INLINE = "inline"
    NONE = "none"


def reasoning_of(message: Message) -> str:
    """Return the reasoning from the field or the start of the content of a message."""
    if message.reasoning:
        return message.reasoning.strip()
    found = INLINE.match(message.content) if message.role == "assistant" else None
    return found[1].strip() if found else ""


def without_reasoning(message: Message) -> Message:
    """Return a message without reasoning in its field and in its content."""
    content = INLINE.sub("", message.content, count=1) if INLINE.match(message.content) else message.content
    fields = {name: getattr(message, name) for name in message.__slots__}
    return Message(**fields | {"content": content, "reasoning": ""})


def is_ambiguous(content: str) -> bool:
    """Return whether a content begins with reasoning that may end at several tags."""
    return content.count("</think>") > 1 and bool(INLINE.match(content))


def separated(conversation: Conversation) -> Conversation | None:
    """Return a conversation with its reasoning in the field instead of the content.

    Return None if the reasoning in a content is blank or ambiguous, or if the message also has a context.
    """
    messages = []
    for message in conversation.messages:
        found = None
        if message.role == "assistant" and not message.reasoning and "<think>" in message.content:
            found = INLINE.match(message.content)
        if found and (message.context or not found[1].strip() or is_ambiguous(message.content)):
            return None
        if found:
            fields = {name: getattr(message, name) for name in message.__slots__}
            content = message.content[found.end() :]
            message = Message(**fields | {"content": content, "reasoning": found[1].strip()})
        messages.append(message)
    return replace(conversation, messages=tuple(messages))


def with_reasoning(message: dict[str, Any], form: ReasoningForm, fields: Sequence[str] = ()) -> dict[str, Any]:
    """Return an OpenAI message with its reasoning in the form that a template reads.

    The reasoning is also in these fields, which are some of REASONING_KEYS.
    """
    content = message.get("content") or ""
    found = INLINE.match(content)
    if form is ReasoningForm.FIELD and found and not message.get("reasoning_content"):
        message = {**message, "content": content[found.end() :], "reasoning_content": found[1].strip()}
    reasoning = message.get("reasoning_content")
    if form is ReasoningForm.INLINE and reasoning:
        message = {key: value for key, value in message.items() if key != "reasoning_content"}
        return {**message, "content": f"<think>\n{reasoning.strip()}\n</think>\n\n{content}"}
    return {**dict.fromkeys(fields, reasoning), **message} if reasoning else message
