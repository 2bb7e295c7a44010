"""Read the definitions of tools, and the options that a record gives its template.

Tools are in `tools`, in `tool_defs`, or in OpenAI's older `functions`; options in `chat_template_kwargs`.

[{"name": "weather", "parameters": {…}}] → '{"type":"function","function":{"name":"weather","parameters":{…}}}'
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tasks.conversations.fields import json_of, parsed, text_of
from tasks.conversations.lists import list_of, object_of
from tasks.conversations.model import Record
from tasks.core.errors import Reject

OPTIONS = "chat_template_kwargs"


def options_of(record: Record) -> dict[str, Any] | None:
    """Return the variables of a record, or None if it sets none."""
    value = record.get(OPTIONS)
    if value is None or value == "" or value == {}:
        return None
    found: Any = parsed(json_of(object_of(value, OPTIONS), OPTIONS, "bad_type"), OPTIONS, "bad_type")
    return found or None


# Names of the definitions in a record.
TOOL_KEYS = ("tools", "tool_defs", "functions")


# Values of a key without definitions; in tables and CSV, they may be text.
_ABSENT: tuple[object, ...] = (None, "", "null", [], "[]")


def tool_keys(record: Mapping[str, object]) -> list[str]:
    """Return the keys of a record that hold definitions."""
    return [key for key in TOOL_KEYS if record.get(key) not in _ABSENT]


def tools_of(record: Record) -> tuple[str, ...]:
    """Return the schema of each tool as JSON text.

    The definitions are a list of schemas, or the JSON text of such a list.
    """
    found = {key: _tools(record[key], key) for key in tool_keys(record)}
    if len({*found.values()}) > 1:
        raise Reject("bad_tools", f"the record: {' and '.join(found)} differ; keep one")
    return next(iter(found.values()), ())


def _tools(value: object, key: str) -> tuple[str, ...]:
    if isinstance(value, str):
        value = parsed(text_of(value, key), key, "bad_tools")
        if value is None:
            return ()
    tools = []
    for index, item in enumerate(list_of(value, key, "bad_tools")):
        where = f"{key}[{index}]"
        tool = parsed(text_of(item, where), where, "bad_tools") if isinstance(item, str) else item
        tools.append(json_of(_as_function(object_of(tool, where, "bad_tools")), where, "bad_tools"))
    return tuple(tools)


def _as_function(tool: dict[str, object]) -> dict[str, object]:
    """Return a schema as the `function` of a tool.

    Templates and models expect this form. Some data has only the function, OpenAI's Responses API has the type next to
    the name, and Anthropic's API calls the parameters `input_schema`.
    """
    if "function" in tool or not isinstance(tool.get("name"), str):
        return tool
    is_anthropic = tool.get("parameters") is None and isinstance(tool.get("input_schema"), dict)
    if tool.get("type") not in (None, "function", *["custom"] * is_anthropic):
        return tool
    names = {"input_schema": "parameters"} if is_anthropic else {}
    kept = {names.get(key, key): value for key, value in tool.items() if key not in ("type", *names.values())}
    return {"type": "function", "function": kept}
