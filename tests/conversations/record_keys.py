"""List keys that records of some format have, from which tests make records of none."""

from __future__ import annotations

RECORD_KEYS = (
    "messages", "conversations", "role", "content", "from", "value", "tool_calls", "function", "name",
    "arguments", "tools", "text", "prompt", "completion", "instruction", "input", "output", "response",
    "history", "system", "weight", "type", "id", "replies", "rank", "deleted", "context", "question",
    "answer", "function_call",
)  # fmt: skip
