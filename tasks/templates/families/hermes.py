"""The Hermes format of tools, with the instructions of Qwen2.5.

    system message   # Tools … <tools>\\n{"type": "function", "function": {"name": "weather", …}}\\n</tools> …
    answer           <tool_call>\\n{"name": "weather", "arguments": {"town": "Ulm"}}\\n</tool_call>
    result           <tool_response>\\nrain\\n</tool_response>

The text is taken from the published templates of Qwen2.5 and Qwen3, without their default system message. ChatML uses
this format, and so do families without their own rules for tools.
"""

from __future__ import annotations

import re

from tasks.conversations.model import Message
from tasks.templates.families.json_text import json_string, spaced
from tasks.templates.writer import Turns, Writer

_INTRODUCTION = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
"""

_INSTRUCTION = """
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{"name": <function-name>, "arguments": <args-json-object>}
</tool_call>"""

_MARKERS = re.compile("(</?tools>|</?tool_call>)")


def with_system(w: Writer, turns: Turns) -> Turns:
    """Add an empty system message if there are tools and no system message.

    The tools are then described in the added message.
    """
    if not w.tools or (turns and turns[0][0].role == "system"):
        return turns
    w.tools_gap = ""
    return [(Message("system", ""), False), *turns]


def write_tools(w: Writer, message: Message, content: str | None = None) -> None:
    """Write the tools after a system message, or the calls after an answer.

    `content` is the content as it was written, if the template may have changed it.
    """
    if message.role == "system":
        describe(w)
    gap = "\n" if (message.content if content is None else content) else ""
    for call in call_text(message):
        w.say(gap)
        w.calls()
        w.own_mark("<tool_call>")
        w.say(f"\n{call}\n")
        w.own_mark("</tool_call>")
        gap = "\n"


def describe(w: Writer) -> None:
    """Write the tools and instructions for calling them, once per conversation."""
    if not w.tools:
        return
    w.say(w.tools_gap)
    _say_marked(w, _INTRODUCTION)
    w.say("\n".join(map(spaced, w.tools)))
    _say_marked(w, _INSTRUCTION)
    w.tools = ()


def respond(w: Writer, result: str) -> None:
    """Write the result of a call."""
    w.own_mark("<tool_response>")
    w.say(f"\n{result}\n")
    w.own_mark("</tool_response>")


def call_text(message: Message) -> list[str]:
    """Return each tool call of a message as a JSON object with name and arguments."""
    return [
        f'{{"name": {json_string(call.name)}, "arguments": {spaced(call.arguments or "{}")}}}'
        for call in message.tool_calls
    ]


def _say_marked(w: Writer, text: str) -> None:
    """Write text, with its markers as control tokens if the tokenizer has them.

    Such a marker is a control token at inference, too.
    """
    for piece in _MARKERS.split(text):
        if _MARKERS.fullmatch(piece):
            w.own_mark(piece)
        else:
            w.say(piece)
