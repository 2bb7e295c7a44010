"""Llama 2: `[INST] request [/INST] answer`.

The system message is part of the request that it precedes.
"""

from __future__ import annotations

from collections.abc import Sequence

from packcorpus.tasks.conversations.model import full_text
from packcorpus.tasks.templates.families.hermes import respond, write_tools
from packcorpus.tasks.templates.placeholders import has_outer_space
from packcorpus.tasks.templates.writer import TOOL_CALL_MARKERS, ContentTest, Family, Turns, Writer, requests


def write(w: Writer, turns: Turns) -> None:
    for request, answer in requests(turns):
        w.turn("user", any(flag for _, flag in request))
        w.bos()
        if request:
            w.frame("[INST] ", start=True)
            _write_request(w, request)
            w.frame(" [/INST]")
        if answer:
            w.turn("assistant", answer[1])
            text = full_text(answer[0]).strip()
            w.say(f" {text}")
            write_tools(w, answer[0], text)
            w.say(" ")
            w.eos()


def _write_request(w: Writer, request: Turns) -> None:
    """Write the messages before an answer.

    White space at both ends of a message is removed, except in a system message and at the start of the message after
    it.
    """
    before = gap = ""
    for message, trained in request:
        w.turn(message.role, trained)
        text = full_text(message)
        text = text if message.role == "system" else text.rstrip() if before == "system" else text.strip()
        before = message.role
        if not text and message.role == "user":
            continue
        w.frame(gap)
        gap = "\n\n"
        if message.role == "system":
            w.frame("<<SYS>>\n")
            w.say(text)
            write_tools(w, message)
            w.frame("\n<</SYS>>")
        elif message.role == "tool":
            respond(w, text)
        else:
            w.say(text)


def _must_render(roles: Sequence[str]) -> ContentTest | None:
    return has_outer_space if "system" in roles else None


TEMPLATE = Family("llama2", TOOL_CALL_MARKERS, write, must_render=_must_render)
