"""Alpaca: `### Instruction:`, `### Input:`, and `### Response:` sections.

A preamble or the system message comes first.
"""

from __future__ import annotations

from packcorpus.tasks.conversations.model import full_text
from packcorpus.tasks.templates.families.hermes import describe, write_tools
from packcorpus.tasks.templates.writer import TOOL_CALL_MARKERS, Family, Turns, Writer

_TASK = "Below is an instruction that describes a task"
_WITH_INPUT = ", paired with an input that provides further context"
_REQUEST = ". Write a response that appropriately completes the request."

_TITLES = {"user": "### Instruction:\n", "assistant": "### Response:\n", "tool": "### Tool result:\n", "system": ""}


def write(w: Writer, turns: Turns) -> None:
    w.bos()
    gap = ""
    if not turns or turns[0][0].role != "system" or not full_text(turns[0][0]).strip():
        turns = turns[1:] if turns and turns[0][0].role == "system" else turns
        has_input = next((bool(message.context) for message, _ in turns if message.role == "user"), False)
        w.frame(_TASK + _WITH_INPUT * has_input + _REQUEST, start=True)
        describe(w)
        gap = "\n\n"
    for message, trained in turns:
        w.turn(message.role, trained)
        w.frame(gap + _TITLES[message.role], start=not gap)
        w.say(message.content, start=not gap)
        if message.context:
            w.frame("\n\n### Input:\n" if message.role == "user" else "\n\n")
            w.say(message.context)
        write_tools(w, message)
        if message.role == "assistant":
            w.eos()
        gap = "\n\n"


TEMPLATE = Family("alpaca", TOOL_CALL_MARKERS, write, writes_context=True, writes_tools=True)
