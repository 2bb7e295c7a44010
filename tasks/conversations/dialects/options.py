"""Read `chat_template_kwargs`, the variables that a record sets for its template.

{"messages": […], "chat_template_kwargs": {"enable_thinking": false}} → {"enable_thinking": False}
"""

from __future__ import annotations

from typing import Any

from tasks.conversations.dialects.lists import object_of
from tasks.conversations.fields import json_of, parsed
from tasks.conversations.model import Record

OPTIONS = "chat_template_kwargs"


def options_of(record: Record) -> dict[str, Any] | None:
    """Return the variables of a record, or None if it sets none."""
    value = record.get(OPTIONS)
    if value is None or value == "" or value == {}:
        return None
    found: Any = parsed(json_of(object_of(value, OPTIONS), OPTIONS, "bad_type"), OPTIONS, "bad_type")
    return found or None
