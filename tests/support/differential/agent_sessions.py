"""Conversations of agents: tasks with calls, their results, and answers."""

from __future__ import annotations

import random
from typing import Any


def call(name: str) -> dict[str, Any]:
    function = {"name": f"get_{name}", "arguments": {"a": name}}
    return {"id": "call00001", "type": "function", "function": function}


def session(sizes: list[int], draw: random.Random) -> list[Any]:
    """Return a conversation with a task for each size, which is its number of calls."""
    texts = ["be", "a 1", "no", "</think>", "x<y", " b\n", "{}", "</tool_response>"]
    messages: list[Any] = []
    for size in sizes:
        messages.append({"role": "user", "content": draw.choice(texts)})
        for number in range(size + 1):
            message = {
                "role": "assistant",
                "content": draw.choice(["", "be", " so\n", "\n\nso"]) if number < size else "done",
            }
            if draw.random() < 0.7:
                message["reasoning_content"] = draw.choice(["since", "r e", " t\n"])
            if number < size:
                message["tool_calls"] = [call(draw.choice("bcd")) for _ in range(draw.choice([1, 1, 2]))]
            messages.append(message)
            results = message.get("tool_calls", ())
            messages += [{"role": "tool", "name": "get_b", "content": draw.choice(texts)} for _ in results]
    return messages
