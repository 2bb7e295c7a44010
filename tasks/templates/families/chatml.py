"""ChatML: `<|im_start|>role ... <|im_end|>` around every turn."""

from __future__ import annotations

from tasks.conversations.model import full_text
from tasks.templates.writer import TOOL_CALL_MARKERS, Family, Turns, Writer


def write(w: Writer, turns: Turns) -> None:
    # The newline separates turns. After the last one, EOS follows the stop token.
    for index, (message, trained) in enumerate(turns):
        if index:
            w.frame("\n")
        w.turn(message.role, trained)
        w.mark("<|im_start|>")
        w.frame(f"{message.role}\n")
        w.say(full_text(message))
        w.calls(message)
        w.own_mark("<|im_end|>")


TEMPLATE = Family("chatml", ("<|im_start|>", "<|im_end|>", *TOOL_CALL_MARKERS), write)
