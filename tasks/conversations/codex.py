"""Sessions of Codex: `~/.codex/sessions/**/rollout-*.jsonl`.

    {"type": "session_meta", "payload": {"id": "…", "base_instructions": {"text": "You are …"}, …}}
    {"type": "response_item", "payload": {"type": "message", "role": "user", "content": [{"type": "input_text", …}]}}
    {"type": "response_item", "payload": {"type": "function_call", "name": "shell", "arguments": "{…}", …}}

The conversation is what the model would continue with. A turn that was rolled back is left out. After a summary
(`compacted`), the conversation is the history that replaces the earlier one; if the record has none, it is the requests
so far and the summary. A summary that only OpenAI can read changes nothing. Older files have the items without
`payload`. `event_msg` repeats what the items have, and is only read for turns that were rolled back.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from packcorpus.tasks.conversations.model import Record
from packcorpus.tasks.conversations.session_turns import (
    BEFORE_SUMMARY,
    OTHER_BRANCH,
    Turns,
    joined_text,
    parts_of,
    place_of,
    said,
    type_of,
)
from packcorpus.tasks.conversations.values import json_of, text_of
from packcorpus.tasks.core.errors import Reject
from packcorpus.tasks.core.printable import kind, shown

RECORD_TYPES = ("session_meta", "response_item", "event_msg", "turn_context", "compacted")

_ITEMS = (
    "message",
    "reasoning",
    "function_call",
    "function_call_output",
    "custom_tool_call",
    "custom_tool_call_output",
    "local_shell_call",
)

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}

_TEXT = ("input_text", "output_text", "text")


class _Item(NamedTuple):
    """An item of the conversation, and its place in messages."""

    place: str
    item: Record


def is_codex(record: Record) -> bool:
    """Return whether a record is one of Codex."""
    return record.get("type") in RECORD_TYPES and isinstance(record.get("payload"), dict)


def is_old_codex(record: Record) -> bool:
    """Return whether a record is the first one of an older version, which has no type."""
    return "type" not in record and {"id", "timestamp", "instructions"} <= record.keys()


def read_codex(records: Sequence[Record]) -> Turns:
    """Return the messages of a session.

    Raises Reject if it is not as Codex writes it.
    """
    turns = Turns()
    history: list[_Item] = []
    requests: list[int] = []  # places in the history at which turns of the user begin
    has_meta = False
    for index, record in enumerate(records):
        name, payload, where = type_of(record), record.get("payload"), place_of(index)
        if not isinstance(payload, dict):
            if name in _ITEMS:  # an older version
                history.append(_Item(where, record))
            elif not is_old_codex(record):
                turns.left_out[name] += 1
        elif name == "response_item":
            if payload.get("type") in _ITEMS:
                history.append(_Item(f"{where}: payload", payload))
            else:
                turns.left_out[f"response_item.{type_of(payload)}"] += 1
        elif name == "session_meta" and not has_meta:
            has_meta = True
            _add_meta(payload, f"{where}: payload", turns)
        elif name == "compacted":
            kept, summary = _after_summary(payload, f"{where}: payload", history)
            if summary:
                turns.left_out[BEFORE_SUMMARY] += len(history) - len(kept)
                history, requests = [*kept, *summary], []
            else:
                turns.left_out[name] += 1
        elif name == "event_msg" and payload.get("type") == "user_message":
            turns.left_out[name] += 1
            requests += [n for n in range(len(history) - 1, -1, -1) if _is_request(history[n].item)][:1]
        elif name == "event_msg" and payload.get("type") == "thread_rolled_back":
            start = _start_of(payload.get("num_turns"), f"{where}: payload.num_turns", history, requests)
            turns.left_out[OTHER_BRANCH] += len(history) - start
            history, requests = history[:start], [place for place in requests if place < start]
        else:
            turns.left_out[name] += 1
    for place, item in history:
        _add(item, place, turns)
    return turns


def _add_meta(meta: Record, where: str, turns: Turns) -> None:
    """Add the instructions and the tools that the session begins with."""
    instructions = meta.get("base_instructions")
    if isinstance(instructions, dict):
        turns.ask("system", said(instructions, "text", f"{where}.base_instructions"))
    tools = meta.get("dynamic_tools")
    for index, tool in enumerate(tools if isinstance(tools, list) else ()):
        if isinstance(tool, dict) and isinstance(tool.get("name"), str):
            function = {"name": tool["name"], "description": tool.get("description", "")}
            function["parameters"] = tool.get("inputSchema") or {}
            schema = {"type": "function", "function": function}
            turns.tools.append(json_of(schema, f"{where}.dynamic_tools[{index}]", "bad_tools"))


def _after_summary(payload: Record, where: str, history: list[_Item]) -> tuple[list[_Item], list[_Item]]:
    """Return what a summary keeps of a history, and what it adds.

    It adds nothing if it cannot be read.
    """
    replaced, text = payload.get("replacement_history"), payload.get("message")
    if isinstance(replaced, list) and replaced:
        items = [_Item(f"{where}.replacement_history[{n}]", item) for n, item in enumerate(replaced)]
        return [], items if all(isinstance(item, dict) and item.get("type") in _ITEMS for _, item in items) else []
    if not isinstance(text, str) or not text:
        return [], []
    asked = [each for each in history if each.item.get("role") in ("system", "developer", "user")]
    summary: Record = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": text}]}
    return asked, [_Item(f"{where}.message", summary)]


def _is_request(item: Record) -> bool:
    return item.get("type") == "message" and item.get("role") == "user"


def _start_of(count: object, where: str, history: list[_Item], requests: list[int]) -> int:
    """Return where the last `count` turns of the user begin in the history.

    Without events that mark them, every message of the user begins a turn, unless it is context in a tag.
    """
    if not isinstance(count, int) or isinstance(count, bool) or count < 0:
        raise Reject("bad_session", f"{where}: expected a number, found {shown(count)}")
    starts = requests or [n for n, (_, item) in enumerate(history) if _is_request(item) and not _is_context(item)]
    return len(history) if not count else starts[-count] if count <= len(starts) else starts[0] if starts else 0


def _is_context(item: Record) -> bool:
    content = item.get("content")
    part = content[0] if isinstance(content, list) and content else None
    text = part.get("text") if isinstance(part, dict) else None
    return isinstance(text, str) and text.lstrip().startswith("<")


def _add(item: Record, where: str, turns: Turns) -> None:
    """Add an item of the history to the messages."""
    name = item["type"]
    if name == "message":
        given = item.get("role")
        role = _ROLES.get(given) if isinstance(given, str) else None
        if role is None:
            raise Reject("bad_role", f"{where}.role is {shown(given)}; expected user, assistant, developer, or system")
        text = joined_text(item.get("content"), f"{where}.content", _TEXT)
        if role == "assistant":
            turns.say(turns.answer(), text)
        else:
            turns.ask(role, text)
    elif name == "reasoning":
        turns.think(turns.answer(), _reasoning(item, where))
    elif name == "function_call":
        turns.call(turns.answer(), item.get("name"), item.get("arguments"), item.get("call_id"), where)
    elif name == "custom_tool_call":
        given = {"input": item.get("input")} if "input" in item else item.get("arguments")
        turns.call(turns.answer(), item.get("name"), given, item.get("call_id"), where)
    elif name == "local_shell_call":
        number = item.get("call_id") or item.get("id")
        turns.call(turns.answer(), "local_shell", item.get("action"), number, where)
    else:
        turns.result(item.get("call_id"), _output(item.get("output"), f"{where}.output"), where)


def _reasoning(item: Record, where: str) -> str:
    """Return the reasoning itself if the item has it, or else its summary."""
    for key in ("content", "summary"):
        texts = [said(part, "text", place) for _, part, place in parts_of(item.get(key), f"{where}.{key}")]
        if any(texts):
            return "\n".join(filter(None, texts))
    return ""


def _output(output: object, where: str) -> str:
    """Return the text of a result.

    It is a string, a list of parts, or in older files an object with the text as `content`.
    """
    if isinstance(output, dict):
        return text_of(output.get("content", ""), f"{where}.content")
    if not isinstance(output, (str, list)) and output is not None:
        raise Reject("bad_content", f"{where}: expected a string or a list of parts, found {kind(output)}")
    return joined_text(output, where, _TEXT)
