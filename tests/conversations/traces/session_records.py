"""Records of sessions, as Claude Code, Codex, and Pi write them.

claude("user", "u1", None, "2+2?"), claude("assistant", "a1", "u1", text("4"), id="m1"), …
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

Record = dict[str, Any]


def lines(records: Iterable[Record]) -> bytes:
    return "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records).encode()


def write(path: Path, records: Iterable[Record]) -> Path:
    path.write_bytes(lines(records))
    return path


def text(said: str) -> Record:
    return {"type": "text", "text": said}


# -- Claude Code ------------------------------------------------------------------------------------------------------


def claude(role: str, uuid: str, parent: str | None, *content: Any, id: str = "", **more: Any) -> Record:
    """Return a message; one string is the content itself, and anything else is a part."""
    message: Record = {"role": role, "content": content[0] if isinstance(content[0], str) else [*content]}
    if role == "assistant":
        message |= {"id": id or f"msg_{uuid}", "type": "message", "model": "model", "usage": {"output_tokens": 5}}
    about = {"sessionId": "s", "cwd": "/work", "version": "2.1.0", "userType": "external", "isSidechain": False}
    return {"type": role, "uuid": uuid, "parentUuid": parent, "message": message, "timestamp": "t"} | about | more


def thinking(said: str) -> Record:
    return {"type": "thinking", "thinking": said, "signature": "sig"}


def tool_use(number: str, name: str, **arguments: Any) -> Record:
    return {"type": "tool_use", "id": number, "name": name, "input": arguments}


def tool_result(number: str, content: Any) -> Record:
    return {"type": "tool_result", "tool_use_id": number, "content": content}


# Two parallel calls: each is a record of the same answer, and each result follows its own call.
PARALLEL = [
    {"type": "summary", "summary": "Rain", "leafUuid": "z"},
    {"type": "file-history-snapshot", "messageId": "m", "snapshot": {}, "isSnapshotUpdate": False},
    claude("user", "u1", None, "Rain?"),
    claude("assistant", "a1", "u1", thinking("Look it up."), id="m1"),
    claude("assistant", "a2", "a1", text("I look."), id="m1"),
    claude("assistant", "a3", "a2", tool_use("t1", "weather", city="Oslo"), id="m1"),
    claude("assistant", "a4", "a2", tool_use("t2", "weather", city="Köln"), id="m1"),
    claude("user", "r1", "a3", tool_result("t1", "rain"), toolUseResult={"stdout": "rain"}),
    claude("user", "r2", "a4", tool_result("t2", [text("sun"), text("25 °C")])),
    {"type": "system", "subtype": "turn_duration", "uuid": "s1", "parentUuid": "r2", "durationMs": 5},
    claude("assistant", "a5", "s1", text("Rain in Oslo."), id="m2"),
]


# -- Codex ------------------------------------------------------------------------------------------------------------


def codex(kind: str, /, **payload: Any) -> Record:
    return {"timestamp": "2026-01-01T00:00:00.000Z", "type": kind, "payload": payload}


def item(kind: str, /, **payload: Any) -> Record:
    return codex("response_item", type=kind, **payload)


def asked(said: str, role: str = "user") -> Record:
    return item("message", role=role, content=[{"type": "input_text", "text": said}])


def answered(said: str) -> Record:
    return item("message", role="assistant", content=[{"type": "output_text", "text": said}])


META = codex("session_meta", id="c", cwd="/work", originator="codex_cli_rs", base_instructions={"text": "You code."})

TURN = [
    META,
    asked("Be brief.", "developer"),
    asked("<environment_context>\n  <cwd>/work</cwd>\n</environment_context>"),
    codex("turn_context", model="m", cwd="/work"),
    asked("Rain?"),
    codex("event_msg", type="user_message", message="Rain?"),
    item("reasoning", summary=[{"type": "summary_text", "text": "Look it up."}], content=None, encrypted_content="x"),
    item("function_call", name="weather", arguments='{"city": "Oslo"}', call_id="c1"),
    item("function_call_output", call_id="c1", output="rain"),
    item("custom_tool_call", name="apply_patch", input="*** Begin Patch", call_id="c2", status="completed"),
    item("custom_tool_call_output", call_id="c2", output=[{"type": "input_text", "text": "done"}]),
    codex("event_msg", type="token_count", info=None),
    answered("Yes."),
]


# -- Pi ---------------------------------------------------------------------------------------------------------------

HEADER = {"type": "session", "version": 3, "id": "p", "timestamp": "t", "cwd": "/work"}


def pi(id: str, parent: str | None, role: str, content: Any, **more: Any) -> Record:
    message = {"role": role, "content": content, "timestamp": 1} | more
    return {"type": "message", "id": id, "parentId": parent, "timestamp": "t", "message": message}


def entry(type: str, id: str, parent: str | None, **more: Any) -> Record:
    return {"type": type, "id": id, "parentId": parent, "timestamp": "t"} | more


TREE = [
    HEADER,
    pi("1", None, "user", "Rain?"),
    pi("2", "1", "assistant", [text("No idea.")], stopReason="stop"),
    pi(
        "3",
        "1",
        "assistant",
        [
            {"type": "thinking", "thinking": "Look it up."},
            {"type": "toolCall", "id": "k", "name": "weather", "arguments": {"city": "Oslo"}},
        ],
        stopReason="toolUse",
    ),
    pi("4", "3", "toolResult", [text("rain")], toolCallId="k", toolName="weather", isError=False),
    entry("model_change", "5", "4", provider="p", modelId="m"),
    pi("6", "5", "assistant", [text("Yes.")], stopReason="stop"),
]
