"""Alpaca: `### Instruction:`, `### Input:`, and `### Response:` sections."""

from __future__ import annotations

from tasks.templates.writer import TOOL_CALL_MARKERS, Family, Turns, Writer


def write(w: Writer, turns: Turns) -> None:
    w.bos()
    gap = ""
    if not turns or turns[0][0].role != "system":
        w.frame("Below is a task. Write a response that fulfils it.", start=True)
        gap = "\n\n"
    titles = {"user": "### Instruction:\n", "assistant": "### Response:\n", "tool": "### Tool result:\n", "system": ""}
    for message, trained in turns:
        w.turn(message.role, trained)
        w.frame(gap + titles[message.role], start=not gap)
        w.say(message.content, start=not gap)
        if message.context:
            w.frame("\n\n### Input:\n" if message.role == "user" else "\n\n")
            w.say(message.context)
        w.calls(message)
        if message.role == "assistant":
            w.eos()
        gap = "\n\n"


TEMPLATE = Family("alpaca", TOOL_CALL_MARKERS, write)
