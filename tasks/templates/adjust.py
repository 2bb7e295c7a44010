"""Adjust a conversation before a template writes it, as the config says.

    default_system: "Be brief."   user, assistant ──▶ system, user, assistant
    reasoning: drop               answers without their reasoning

The conversation of the record, and with it its digest, stays as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from tasks.conversations.model import Conversation, Message
from tasks.templates.reasoning import without_reasoning


class Adjust(NamedTuple):
    """The settings `reasoning` and `default_system`."""

    drop_reasoning: bool = False
    default_system: str | None = None

    def of(self, conversation: Conversation, trained: Sequence[bool]) -> tuple[Conversation, Sequence[bool], int]:
        """Return the conversation, the flags of its messages, and how many messages were added before the others."""
        messages = conversation.messages
        if messages[0].role == "text":
            return conversation, trained, 0
        if self.drop_reasoning:
            messages = tuple(without_reasoning(m) if m.role == "assistant" else m for m in messages)
            conversation = Conversation(messages, conversation.tools)
        if self.default_system is None or messages[0].role == "system":
            return conversation, trained, 0
        return (
            Conversation((Message("system", self.default_system), *messages), conversation.tools),
            [False, *trained],
            1,
        )


NO_CHANGE = Adjust()
