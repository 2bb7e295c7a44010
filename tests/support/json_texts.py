"""Write JSON in all the ways that parsers accept.

The texts have equal keys, any white space, any escapes, and any spelling of a number.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

STYLES = ("compact", "usual", "colons", "wild", "ascii")
# The text after a key and the text between items; the style "wild" draws white space instead.
_BETWEEN = {"compact": (":", ","), "usual": (": ", ", "), "ascii": (":", ","), "colons": (" :", ",")}


class Pairs(list[tuple[str, Any]]):
    """An object in the order of its text, with all its equal keys."""

    def __repr__(self) -> str:
        return f"Pairs({super().__repr__()})"


class Raw(str):
    """A JSON text that is written verbatim, such as a number."""

    def __repr__(self) -> str:
        return f"Raw({super().__repr__()})"


def as_written(value: Any) -> Any:
    """Return a value of json.loads with its objects as Pairs."""
    if isinstance(value, dict):
        return Pairs((key, as_written(item)) for key, item in value.items())
    if isinstance(value, list):
        return [as_written(item) for item in value]
    return value if isinstance(value, str) else Raw(json.dumps(value))


def objects(node: Any) -> list[Pairs]:
    """Return all objects within a value."""
    inner = [value for _, value in node] if isinstance(node, Pairs) else node if isinstance(node, list) else []
    return [*([node] if isinstance(node, Pairs) else []), *(found for value in inner for found in objects(value))]


def written(node: Any, style: str, rng: random.Random) -> str:
    """Return a value as JSON in one of STYLES.

    `rng` draws white space and escapes.
    """
    colon, comma = _BETWEEN.get(style, ("", ""))

    def space() -> str:
        return rng.choice(("", "", "", " ", "\t", "  ", "\r")) if style == "wild" else ""

    def joined(items: Iterator[str], ends: str) -> str:
        between = comma or f"{space()},"
        return ends[0] + space() + between.join(f"{space()}{item}{space()}" for item in items) + ends[1]

    if isinstance(node, Raw):
        return node
    if isinstance(node, str):
        return spelled(node, rng) if style == "wild" else json.dumps(node, ensure_ascii=style == "ascii")
    if isinstance(node, Pairs):
        pairs = ((written(key, style, rng), written(value, style, rng)) for key, value in node)
        return joined((f"{key}{colon or f'{space()}:{space()}'}{value}" for key, value in pairs), "{}")
    return joined((written(item, style, rng) for item in node), "[]")


def spelled(text: str, rng: random.Random) -> str:
    """Return a JSON string in which any character may be escaped, in any way."""
    return '"' + "".join(_character(character, rng) for character in text) + '"'


def _character(character: str, rng: random.Random) -> str:
    plain = json.dumps(character, ensure_ascii=False)[1:-1]
    escaped = "".join(f"\\u{ord(unit):04x}" for unit in _units(character))
    return rng.choice([plain, plain, escaped, escaped.upper().replace("U", "u"), *(["\\/"] * (character == "/"))])


def _units(character: str) -> str:
    """Return the one or two UTF-16 code units of a character."""
    data = character.encode("utf-16-be")
    return "".join(chr(int.from_bytes(data[at : at + 2], "big")) for at in range(0, len(data), 2))
