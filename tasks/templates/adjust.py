"""Apply the settings `default_system` and `reasoning` to a conversation.

    default_system: "Be brief."   user, assistant ──▶ system, user, assistant
    reasoning: drop               answers without their reasoning

This happens before a template writes the conversation. The conversation of the record and its digest do not change.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from tasks.conversations.model import Conversation, Message, is_blank
from tasks.core.errors import Reject
from tasks.templates.reasoning import without_reasoning

# Variables of a template that packcorpus sets itself.
GIVEN_TO_TEMPLATES = ("messages", "tools", "add_generation_prompt")


class Adjust(NamedTuple):
    """The settings `reasoning` and `default_system`."""

    drop_reasoning: bool = False
    default_system: str | None = None

    def of(self, conversation: Conversation, trained: Sequence[bool]) -> tuple[Conversation, Sequence[bool], int]:
        """Return the adjusted conversation, its flags, and the number of added messages.

        Messages are added at the start. Raises Reject if nothing is left to train on.
        """
        messages = conversation.messages
        if messages[0].role == "text":
            return conversation, trained, 0
        if self.drop_reasoning:
            messages = tuple(without_reasoning(m) if m.role == "assistant" else m for m in messages)
            conversation = replace(conversation, messages=messages)
            trained = _without_blank(messages, trained)
        if self.default_system is None or messages[0].role == "system":
            return conversation, trained, 0
        system = Message("system", self.default_system, train=False)
        return replace(conversation, messages=(system, *messages)), [False, *trained], 1


NO_CHANGE = Adjust()


def _without_blank(messages: Sequence[Message], trained: Sequence[bool]) -> Sequence[bool]:
    """Return the flags, cleared for messages that are blank without their reasoning.

    Raises Reject if this clears all flags.
    """
    found = [flag and not is_blank(message) for message, flag in zip(messages, trained, strict=True)]
    if any(trained) and not any(found):
        raise Reject(
            "no_trained_tokens", "its answers contain only reasoning, which the setting `reasoning: drop` removes"
        )
    return found
