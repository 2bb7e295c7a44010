"""Define a conversation: messages, tool calls, and roles."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise


@dataclass(slots=True)
class ToolCall:
    """One call of a tool by the assistant. `arguments` is JSON text (normally an object)."""

    name: str
    arguments: str
    id: str | None = None


@dataclass(slots=True)
class Message:
    """One turn. `role` is one of `ROLES`.

    `context` is what Alpaca calls input and Dolly context: it belongs to `content`, but a template may set it apart.
    `weight` 0 means that the turn is never trained on.
    """

    role: str
    content: str
    context: str = ""
    name: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    weight: int = 1


@dataclass(slots=True)
class Conversation:
    """A list of messages. `tools` holds the schemas of the tools on offer, each as JSON text."""

    messages: tuple[Message, ...]
    tools: tuple[str, ...] = ()


ROLES = ("system", "user", "assistant", "tool", "text")


def turns_of(roles: Sequence[str]) -> int:
    """Messages that are no system ones."""
    return sum(role != "system" for role in roles)


def usual_order(roles: Sequence[str]) -> bool:
    """System first, if at all; then user and assistant in turn, tools answering the assistant."""
    turns = [role for role in roles if role != "text"]
    if turns[:1] == ["system"]:
        turns = turns[1:]
    follows = {"user": ("assistant",), "assistant": ("user", "tool"), "tool": ("tool", "assistant")}
    return turns[:1] in ([], ["user"]) and all(b in follows.get(a, ()) for a, b in pairwise(turns))


def full_text(message: Message) -> str:
    """Content and context as one text, for templates that do not set them apart."""
    return "\n\n".join(filter(None, (message.content, message.context)))
