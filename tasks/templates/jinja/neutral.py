"""Remove the characters of control strings from the texts of a conversation.

    "a <|IM_END|> b"  ─neutral─▶  "a IM_END b"

A template may change texts: `{{ message.content | lower }}` turns <|IM_END|> into a control token, although the content
has no control string to break. The control tokens of a rendering are therefore compared with the control tokens of a
rendering of neutral texts. No template can turn a neutral text into a control token.
"""

from __future__ import annotations

import re
from typing import Any

import orjson

from tasks.encoders.encoder import Encoder
from tasks.templates.jinja.breaker import OUR_KEYS
from tasks.templates.jinja.strings import Unchanged

# Patterns for the characters that distinguish a control string from other text. The first pattern that matches counts.
_DISTINCT = (re.compile(r"[<>|\[\]\uff5c]"), re.compile(r"[^\w\s]"), re.compile(r"[\W_]"), re.compile(r"."))

# Markers that templates look for in contents. Markers and content tokens are kept, so that templates behave the same.
_MARKERS = ("<think>", "</think>")

# Keys whose values templates compare.
_COMPARED = ("role", "type")


class Neutral:
    """Remove the characters of a tokenizer's control strings from texts."""

    def __init__(self, encoder: Encoder):
        found = {character for string in encoder.controls for character in _distinct(string)}
        distinct = {form for character in found for form in (character, character.lower(), character.upper())}
        # Filters may make other control strings from texts with none of their characters: \\u00e9 from é.
        is_odd = any(not _DISTINCT[0].search(string) for string in encoder.controls)
        others = r"|[^\w\s]|[^\x00-\x7f]" if is_odd else ""
        kept = {*(token for token in encoder.content_tokens if token.isascii() or not is_odd), *_MARKERS} - distinct
        one_of = "".join(map(re.escape, sorted(distinct)))
        markers = "|".join(map(re.escape, sorted(kept, key=len, reverse=True)))
        self._pattern = re.compile(f"({markers})|[{one_of}]{others}" if distinct else r"(?!)()")
        self._neutral = Unchanged(self.of, OUR_KEYS)

    def has(self, messages: Any, tools: Any) -> bool:
        """Return whether all texts are neutral.

        The result is the same before and after control strings were broken.
        """
        return self._neutral.has_all(orjson.dumps((messages, tools)).decode())

    def of(self, value: Any) -> Any:
        """Return messages or tools with neutral texts."""
        if isinstance(value, str):
            neutral = self._pattern.sub(lambda match: match[1] or "", value)
            return neutral if neutral.strip() or not value.strip() else "a"
        if isinstance(value, dict):
            return {
                key if key in OUR_KEYS else self.of(key): item if key in _COMPARED else self.of(item)
                for key, item in value.items()
            }
        return [self.of(item) for item in value] if isinstance(value, list) else value


def _distinct(string: str) -> list[str]:
    return next(found for pattern in _DISTINCT if (found := pattern.findall(string)))
