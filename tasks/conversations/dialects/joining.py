"""Join what one answer says but the data writes as several turns.

{"role": "assistant", "content": "Let me look."}, {"role": "tool_call", …}, {"role": "tool_call", …}    ms-swift
{"type": "reasoning", …}, {"type": "function_call", …}                          items of OpenAI's Responses API
    → one message with its reasoning, its content, and its calls in parallel
"""

from __future__ import annotations

from dataclasses import replace

from tasks.conversations.dialects.calls import CALL_ROLES
from tasks.conversations.model import Message


def may_follow(role: object, after_call: bool) -> bool:
    """Return whether a call turn may belong to the same answer as the turn before it.

    `role` is its role in the data. The call of ShareGPT is a turn of its own, or one of several calls.
    """
    return after_call or not (isinstance(role, str) and role.lower() == CALL_ROLES[0])


def joined(before: Message, after: Message) -> Message | None:
    """Return two turns of the assistant as one message.

    Returns None if that would change their order or their training: a message is reasoning, then content, then calls.
    """
    both = (before, after)
    if any(message.role != "assistant" for message in both):
        return None
    if before.train != after.train or before.loss_weight != after.loss_weight or before.name != after.name:
        return None
    has_text, has_calls = bool(before.content), bool(before.tool_calls)
    if (after.reasoning and (before.reasoning or has_text or has_calls)) or (after.content and (has_text or has_calls)):
        return None
    said = before if has_text else after
    return replace(
        before,
        content=said.content,
        parts=said.parts,
        reasoning=before.reasoning or after.reasoning,
        tool_calls=before.tool_calls + after.tool_calls,
    )
