"""List keys of all record formats.

Tests use them to generate records of no format.
"""

from __future__ import annotations

RECORD_KEYS = (
    "messages", "conversations", "role", "content", "from", "value", "tool_calls", "function", "name",
    "arguments", "tools", "text", "prompt", "completion", "instruction", "input", "output", "response",
    "history", "system", "weight", "type", "id", "replies", "rank", "deleted", "context", "question",
    "answer", "function_call", "completions", "chosen", "rejected",
)  # fmt: skip
