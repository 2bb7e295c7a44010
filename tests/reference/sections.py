"""The text of an answer that `train_parts` and `empty_reasoning` train on.

    message ─Style.pieces─▶ [("reasoning", "<think>\nWhy\n</think>"), ("content", "\n\n4"), …] ─trained─▶ runs of text

The rules are those of docs/concepts/labels.md. A style is a template, and the same template in Python.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import groupby
from typing import Any, NamedTuple

Message = dict[str, Any]
Pieces = list[tuple[str, str]]  # a section, and its text without white space at the end


class Style(NamedTuple):
    """A template in Jinja and in Python.

    `pieces` returns what the model writes after the prompt.
    """

    source: str
    pieces: Callable[[Message], Pieces]


def trained(pieces: Pieces, parts: dict[str, bool], mask: bool, joins: Callable[[str, str], bool]) -> list[str]:
    """Return the runs of trained text of an answer.

    `joins` returns whether a token crosses from the end of a text into another one. Raises ValueError if it is not
    possible to change a label between two sections.
    """
    flags = [parts["reasoning"] and not mask if name == "block" else parts[name] for name, _ in pieces]
    whole = "".join(text for _, text in pieces)
    runs: list[tuple[bool, str]] = []
    start = end = 0
    for number, (_, text) in enumerate(pieces):
        end += len(text)
        if number + 1 == len(pieces):
            runs.append((flags[number], whole[start:]))
        elif flags[number] != flags[number + 1]:
            space = len(whole[end:]) - len(whole[end:].lstrip())
            places = [place for place in range(end + space, end - 1, -1) if not joins(whole[:place], whole[place:])]
            if not places:
                raise ValueError(f"a token crosses the end of {text!r}")
            runs.append((flags[number], whole[start : places[0]]))
            start = places[0]
        else:
            runs.append((flags[number], whole[start:end]))
            start = end
    joined = [(flag, "".join(text for _, text in run)) for flag, run in groupby(runs, key=lambda run: run[0])]
    return [text for flag, text in joined if flag and text]


def _calls(message: Message) -> list[str]:
    return [
        json.dumps({"name": call["function"]["name"], "arguments": call["function"]["arguments"]})
        for call in message.get("tool_calls", ())
    ]


def _section(message: Message) -> str:
    return "reasoning" if message.get("reasoning_content") else "block"


_CALLS = (
    "{% for c in m.tool_calls or [] %}{% if m.content or not loop.first %}{{ '\n' }}{% endif %}<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}'
)
_LOOP = "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
_END = "{% endif %}{{ m.content }}" + _CALLS + "<|im_end|>\n{% endfor %}"
_PROMPT = "{% if add_generation_prompt %}<|im_start|>assistant\n"


def _block(before: str, after: str, end: str = "<|im_end|>") -> Callable[[Message], Pieces]:
    """Return the pieces of a template that writes reasoning between two texts."""

    def pieces(message: Message) -> Pieces:
        block, content = before + message.get("reasoning_content", "") + after, message["content"]
        calls = "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in _calls(message))
        texts = [(_section(message), block), ("content", content)]
        texts += [("calls", ("\n" if content else "") + calls)] if calls else []
        found: Pieces = []
        space = ""
        for name, text in texts:
            written = space + text
            if text.strip():
                found.append((name, written.rstrip()))
                space = written[len(written.rstrip()) :]
            else:
                space = written
        return [*found[:-1], (found[-1][0], found[-1][1] + space + end)]

    return pieces


STYLES = {
    "block": Style(
        _LOOP + "<think>\n{{ m.reasoning_content }}\n</think>\n\n" + _END + _PROMPT + "{% endif %}",
        _block("<think>\n", "\n</think>\n\n"),
    ),
    "opened": Style(
        _LOOP + "<think>\n{{ m.reasoning_content }}\n</think>\n\n" + _END + _PROMPT + "<think>\n{% endif %}",
        _block("", "\n</think>\n\n"),
    ),
    "Mistral": Style(
        _LOOP + "[THINK]{{ m.reasoning_content }}[/THINK]" + _END + _PROMPT + "{% endif %}",
        _block("[THINK]", "[/THINK]"),
    ),
    "Gemma": Style(
        _LOOP + "<|channel>thought\n{{ m.reasoning_content }}<channel|>" + _END + _PROMPT + "{% endif %}",
        _block("<|channel>thought\n", "<channel|>"),
    ),
    "gpt-oss": Style(
        _LOOP + "<|channel|>analysis<|message|>{{ m.reasoning_content }}<|end|>\n" + _END + _PROMPT + "{% endif %}",
        _block("<|channel|>analysis<|message|>", "<|end|>\n"),
    ),
}
