"""Llama 2: `[INST] request [/INST] answer`, the system message inside the first request."""

from __future__ import annotations

from tasks.conversations.model import full_text
from tasks.templates.writer import TOOL_CALL_MARKERS, Family, Turns, Writer, requests


def write(w: Writer, turns: Turns) -> None:
    for request, answer in requests(turns):
        w.turn("user", any(flag for _, flag in request))
        w.bos()
        if request:
            w.frame("[INST] ", start=True)
            for index, (message, trained) in enumerate(request):
                w.turn(message.role, trained)
                if index and request[index - 1][0].role != "system":
                    w.frame("\n\n")
                text = full_text(message).strip()
                if message.role == "system":
                    w.frame("<<SYS>>\n")
                    w.say(text)
                    w.frame("\n<</SYS>>\n\n")
                elif message.role == "tool":
                    w.say(f"<tool_response>\n{text}\n</tool_response>")
                else:
                    w.say(text)
            w.frame(" [/INST]")
        if answer:
            w.turn("assistant", answer[1])
            w.say(f" {full_text(answer[0]).strip()}")
            w.calls(answer[0])
            w.say(" ")
            w.eos()


TEMPLATE = Family("llama2", TOOL_CALL_MARKERS, write)
