"""Zephyr: a line with the role, then the turn up to EOS."""

from __future__ import annotations

from packcorpus.tasks.conversations.model import full_text
from packcorpus.tasks.templates.families.hermes import write_tools
from packcorpus.tasks.templates.writer import TOOL_CALL_MARKERS, Family, Turns, Writer


def write(w: Writer, turns: Turns) -> None:
    for index, (message, trained) in enumerate(turns):
        if index:
            w.frame("\n")
        w.turn(message.role, trained)
        w.mark(f"<|{message.role}|>")
        w.frame("\n")
        w.say(full_text(message))
        write_tools(w, message)
        w.eos()


TEMPLATE = Family("zephyr", ("<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", *TOOL_CALL_MARKERS), write)
