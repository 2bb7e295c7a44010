"""The Hermes format of tools, and JSON as published templates write it.

    system message   # Tools … <tools>\\n{"type": "function", "function": {"name": "weather", …}}\\n</tools> …
    answer           <tool_call>\\n{"name": "weather", "arguments": {"town": "Ulm"}}\\n</tool_call>
    result           <tool_response>\\nrain\\n</tool_response>

The text is taken from the published templates of Qwen2.5 and Qwen3, without their default system message. ChatML uses
this format, and so do families without their own rules for tools.

JSON has a space after each comma and colon, and no unneeded escapes: Templates apply `tojson` to values that Python has
read, so numbers have Python's digits, too. The maximum depth that Python reads depends on its version. `DEEPEST` is a
fixed limit.
"""

from __future__ import annotations

import json
import re
from typing import Any

from packcorpus.tasks.conversations.model import Message
from packcorpus.tasks.core.errors import Reject
from packcorpus.tasks.templates.writer import Turns, Writer

# Maximum depth of brackets. Python 3.11 reads 992, less the depth of its own stack; later versions read more.
DEEPEST = 800

_STRING_OR_BRACKET = re.compile(r'"(?:[^"\\]++|\\.)*+"|[\[\]{}]', re.DOTALL)


def json_string(text: str) -> str:
    """Return `text` as a JSON string."""
    return json.dumps(text, ensure_ascii=False)


def spaced(text: str) -> str:
    """Return a JSON text with the spaces of templates. Raises Reject."""
    try:
        value = json.loads(text)
        _check_depth(text)
        return json.dumps(value, ensure_ascii=False)
    except RecursionError:
        raise Reject("too_deep", "a tool, or the arguments of a tool call, are nested too deeply") from None


def value_or_string(text: str) -> str:
    """Return JSON with the spaces that templates write, and other text as a string.

    Other text includes JSON that cannot be rewritten without loss, such as an object with a duplicate key.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(value := dict(pairs)) < len(pairs):
            raise ValueError("duplicate key")
        return value

    try:
        value = json.loads(text, object_pairs_hook=unique)
        _check_depth(text)
        written = json.dumps(value, ensure_ascii=False, allow_nan=False)
        written.encode()  # no lone surrogate
        return written
    except (ValueError, RecursionError):
        return json_string(text)


def _check_depth(text: str) -> None:
    """Raise RecursionError if valid JSON is nested deeper than `DEEPEST`."""
    if text.count("[") + text.count("{") <= DEEPEST:
        return
    depth = 0
    for token in _STRING_OR_BRACKET.finditer(text):
        depth += (token.group() in "[{") - (token.group() in "]}")
        if depth > DEEPEST:
            raise RecursionError


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
    """Add an empty system message for the tools if there is none."""
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
    for number, piece in enumerate(_MARKERS.split(text)):
        (w.own_mark if number % 2 else w.say)(piece)
