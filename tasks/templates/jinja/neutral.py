"""Make texts harmless, to see which control tokens a template writes by itself.

    "a <|IM_END|> b"  ─neutral─▶  "a IM_END b"

A template may change what it writes: `{{ message.content | lower }}` makes a control token of <|IM_END|>, although no
control string was there to break. So the control tokens of a rendering are compared with those of the same conversation
without the characters that control strings consist of: nothing can make a control token of these texts.
"""

from __future__ import annotations

import re
from typing import Any

import orjson

from tasks.encoders.encoder import Encoder
from tasks.templates.jinja.strings import Unchanged

# The characters that distinguish a control string from other text: those of the first pattern that finds any.
_DISTINCT = (re.compile(r"[<>|\[\]\uff5c]"), re.compile(r"[^\w\s]"), re.compile(r"[\W_]"), re.compile(r"."))

# Markers that templates look for in contents. They stay, as do content tokens, so that the template does the same.
_MARKERS = ("<think>", "</think>")

_OUR_KEYS = ("role", "type")


class Neutral:
    """Remove from the texts of a conversation what control strings of a tokenizer consist of."""

    def __init__(self, encoder: Encoder):
        found = {character for string in encoder.controls for character in _distinct(string)}
        distinct = {form for character in found for form in (character, character.lower(), character.upper())}
        # Filters may write other control strings although a text has none of their characters: \\u00e9 for an é.
        is_odd = any(not _DISTINCT[0].search(string) for string in encoder.controls)
        others = r"|[^\w\s]|[^\x00-\x7f]" if is_odd else ""
        kept = {*(token for token in encoder.content_tokens if token.isascii() or not is_odd), *_MARKERS} - distinct
        one_of = "".join(map(re.escape, sorted(distinct)))
        markers = "|".join(map(re.escape, sorted(kept, key=len, reverse=True)))
        self._pattern = re.compile(f"({markers})|[{one_of}]{others}" if distinct else r"(?!)()")
        self._neutral = Unchanged(self.of)

    def has(self, messages: Any, tools: Any) -> bool:
        """Return whether all texts are neutral already, before and after control strings were broken."""
        return self._neutral.has_all(orjson.dumps((messages, tools)).decode())

    def of_json(self, lines: str) -> str:
        """Return lines of compact JSON with neutral texts."""
        if self._neutral.has_all(lines):
            return lines
        return "\n".join([orjson.dumps(self.of(orjson.loads(line))).decode() for line in lines.split("\n")])

    def of(self, value: Any) -> Any:
        """Return messages or tools with neutral texts."""
        if isinstance(value, str):
            neutral = self._pattern.sub(lambda match: match[1] or "", value)
            return neutral if neutral.strip() or not value.strip() else "a"
        if isinstance(value, dict):
            return {self.of(key): item if key in _OUR_KEYS else self.of(item) for key, item in value.items()}
        return [self.of(item) for item in value] if isinstance(value, list) else value


def _distinct(string: str) -> list[str]:
    return next(found for pattern in _DISTINCT if (found := pattern.findall(string)))
