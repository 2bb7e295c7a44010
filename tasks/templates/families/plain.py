"""Plain: the turns one after another, without text around them."""

from __future__ import annotations

from packcorpus.tasks.conversations.model import full_text
from packcorpus.tasks.templates.families.hermes import write_tools
from packcorpus.tasks.templates.writer import TOOL_CALL_MARKERS, Family, Turns, Writer


def write(w: Writer, turns: Turns) -> None:
    w.bos(start=True)
    for message, trained in turns:
        w.turn(message.role, trained)
        w.say(full_text(message))
        write_tools(w, message)
        if message.role == "assistant":
            w.eos()


TEMPLATE = Family("plain", TOOL_CALL_MARKERS, write)
