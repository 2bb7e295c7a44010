"""Llama 3: a header with the role, then the turn up to `<|eot_id|>`."""

from __future__ import annotations

from packcorpus.tasks.conversations.model import full_text
from packcorpus.tasks.templates.families.hermes import write_tools
from packcorpus.tasks.templates.writer import TOOL_CALL_MARKERS, Family, Turns, Writer


def write(w: Writer, turns: Turns) -> None:
    w.mark("<|begin_of_text|>")
    for message, trained in turns:
        w.turn(message.role, trained)
        w.mark("<|start_header_id|>")
        w.frame("ipython" if message.role == "tool" else message.role)
        w.mark("<|end_header_id|>")
        w.frame("\n\n")
        text = full_text(message).strip()
        w.say(text)
        write_tools(w, message, text)
        w.own_mark("<|eot_id|>")


MARKERS = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", *TOOL_CALL_MARKERS)
TEMPLATE = Family("llama3", MARKERS, write)
