"""Mistral: `[INST] request [/INST] answer`, with places of their own for tools, calls, and results."""

from __future__ import annotations

from tasks.conversations.model import full_text
from tasks.templates.writer import Family, Turns, Writer, call_text, json_text, requests


def write(w: Writer, turns: Turns) -> None:
    w.bos()
    if w.tools:
        w.mark("[AVAILABLE_TOOLS]", start=True)
        w.frame(f" [{', '.join(w.tools)}]")
        w.mark("[/AVAILABLE_TOOLS]")
    for request, answer in requests(turns):
        results = [turn for turn in request if turn[0].role == "tool"]
        for message, trained in results:
            w.turn("tool", trained)
            w.mark("[TOOL_RESULTS]")
            call = f', "call_id": {json_text(message.tool_call_id)}' if message.tool_call_id else ""
            w.say(f' {{"content": {json_text(full_text(message))}{call}}}')
            w.mark("[/TOOL_RESULTS]")
        messages = [turn for turn in request if turn[0].role != "tool"]
        if messages:
            w.turn("user", any(flag for _, flag in messages))
            w.mark("[INST]", start=True)
            for index, (message, trained) in enumerate(messages):
                w.turn(message.role, trained)
                w.frame("\n\n" if index else " ")
                w.say(full_text(message))
            w.mark("[/INST]")
        if answer:
            message, trained = answer
            w.turn("assistant", trained)
            if message.content:
                w.say(f" {full_text(message)}")
            if message.tool_calls:
                ids = [f', "id": {json_text(call.id)}' if call.id else "" for call in message.tool_calls]
                objects = [text[:-1] + key + "}" for text, key in zip(call_text(message), ids, strict=True)]
                w.own_mark("[TOOL_CALLS]")
                w.say(f" [{', '.join(objects)}]")
            w.eos()


MARKERS = (
    *("[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
    *("[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
)
TEMPLATE = Family("mistral", MARKERS, write, writes_tools=True)
