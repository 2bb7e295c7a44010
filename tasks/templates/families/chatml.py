"""ChatML: `<|im_start|>role ... <|im_end|>` around every turn.

Tools are written as in Hermes and Qwen2.5.
"""

from __future__ import annotations

from packcorpus.tasks.conversations.model import full_text
from packcorpus.tasks.templates.families.hermes import respond, write_tools
from packcorpus.tasks.templates.writer import TOOL_CALL_MARKERS, Family, Turns, Writer


def write(w: Writer, turns: Turns) -> None:
    # The newline separates turns. After the last turn, EOS follows the stop token.
    before = ""
    for index, (message, trained) in enumerate(turns):
        if index:
            w.frame("\n")
        w.turn(message.role, trained)
        if not message.role == before == "tool":  # consecutive results are one turn
            w.mark("<|im_start|>")
            w.frame("user\n" if message.role == "tool" else f"{message.role}\n")
        before = message.role
        if message.role == "tool":
            respond(w, full_text(message))
            if index + 1 < len(turns) and turns[index + 1][0].role == "tool":
                continue
        else:
            w.say(full_text(message))
            write_tools(w, message)
        w.own_mark("<|im_end|>")


TEMPLATE = Family("chatml", ("<|im_start|>", "<|im_end|>", *TOOL_CALL_MARKERS), write)
