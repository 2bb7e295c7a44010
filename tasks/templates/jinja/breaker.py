"""Break the control strings in a conversation before it is rendered.

    "<|im_end|>"  ──▶  "<\\ue000|im_end|>"

A private character is inserted into every control string in a message. It is also inserted before or after every
fragment of a control string that a neighboring field could complete, even if the template strips white space between
them. A control string that is intact after rendering was therefore written by the template. The private character is
then removed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache
from itertools import chain
from typing import Any, NamedTuple

import orjson

from tasks.conversations.model import OPENAI_ROLES
from tasks.core.errors import Reject
from tasks.encoders.encoder import Encoder
from tasks.templates.jinja.strings import Unchanged

_PRIVATE_CHARACTER = "\ue000"
# Unicode's three private use areas.
PRIVATE_AREAS = (range(0xE000, 0xF900), range(0xF0000, 0xFFFFE), range(0x100000, 0x10FFFE))

# The end of a string in JSON that another text could complete to an escaped private character. White space after it is
# ignored, because templates may strip it. In the source of a template, any backslash counts that does not start a usual
# escape such as \n.
_SPACE = r"(?:\s|\\[nrtf]|\\u00(?:0b|1[c-f]))*"
_CUT_ESCAPE = re.compile(rf'\\\\[\\u0-9a-f]{{0,12}}{_SPACE}"')
_WRITES_BACKSLASH = re.compile(r"""\\(?![nrt"'])""")
# The start of a string in JSON, or of a text in the source of a template.
_START = rf"""(?:^|["'}}]){_SPACE}"""

_LIKE_ESCAPE = re.compile(r"\\u[0-9a-f]{4}|^[\\u0-9a-f]{2,12}$")

# Keys of messages, which templates read.
OUR_KEYS = {
    "role", "content", "reasoning_content", "name", "tool_calls", "tool_call_id", "id", "type", "function", "arguments",
}  # fmt: skip


class Breaker:
    """Break a tokenizer's control strings in conversations, for one template."""

    def __init__(self, encoder: Encoder, source: str):
        self._encoder, self._source = encoder, source
        self._intact = Unchanged(lambda text: self._broken_text(text, _PRIVATE_CHARACTER), OUR_KEYS, OPENAI_ROLES)

    def broken(self, messages: Any, tools: Any, options: Mapping[str, Any] | None = None, said: str = "") -> Broken:
        """Break the control strings of messages, tools, and options of the template.

        `said` is the JSON of the options. Fragments in options stay, because templates compare options with texts.
        Raises Reject if they are nested too deeply, or if no private character is left to break them.
        """
        try:
            json = orjson.dumps((messages, tools)).decode()
            breaker = self._breaker(json + said)
            broken = self._intact.changed(json, lambda text: self._broken_text(text, breaker))
            if broken != json:  # conversations without control strings are not parsed
                messages, tools = orjson.loads(broken)
            if said and self._encoder.control_pattern.search(said):
                options = self._with_broken_controls(options, breaker)
            return Broken(messages, tools, breaker, json, options, said)
        except (orjson.JSONEncodeError, RecursionError):
            raise _too_deep() from None

    def _with_broken_controls(self, value: Any, breaker: str) -> Any:
        if isinstance(value, str):
            return self._break_controls(value, breaker)
        if isinstance(value, dict):
            return {
                self._break_controls(key, breaker): self._with_broken_controls(v, breaker) for key, v in value.items()
            }
        return [self._with_broken_controls(v, breaker) for v in value] if isinstance(value, list) else value

    @cached_property
    def _fragments(self) -> _Fragments:
        return _fragments_of(tuple(self._encoder.controls))

    def _breaker(self, text: str) -> str:
        """Return a private character that can break the control strings of a conversation.

        `text` is the conversation as JSON. The character is not in the conversation, the template, a control string, or
        a content token. Its escaped form is not in the conversation or the template, not even across two consecutive
        texts. A control string and the escaped form do not contain each other. Raises Reject if there is no such
        character.
        """
        continues = self._writes_backslash or ("\\" in text and _CUT_ESCAPE.search(text) is not None)
        for private in (chr(code) for code in chain(*PRIVATE_AREAS)):
            form = escaped(private)
            if private in text or private in self._private or escaped(form) in text or form in self._source:
                continue
            if any(string in form or form in string for string in self._like_escapes):
                continue
            if continues and any(_continues(form).search(source) for source in (text, self._source)):
                continue
            return private
        raise Reject("no_private_character", "the conversation uses all 137,468 private characters of Unicode")

    @cached_property
    def _like_escapes(self) -> list[str]:
        """Return the control strings that may be part of an escape such as `\\ue000`.

        A template that escapes texts may write such an escape.
        """
        return [string for string in self._encoder.controls if len(string) > 1 and _LIKE_ESCAPE.search(string)]

    @cached_property
    def _writes_backslash(self) -> bool:
        return _WRITES_BACKSLASH.search(self._source) is not None

    @cached_property
    def _private(self) -> set[str]:
        """Return the characters of the template, control strings, and content tokens."""
        return set().union(self._source, *self._encoder.controls, *self._encoder.content_tokens)

    def _broken_text(self, text: str, breaker: str) -> str:
        core = text.strip()
        if not core:
            return text
        starts, ends, insides, long = self._fragments
        before = ends.match(core)
        after = core in insides or starts.match(core) or (long and any(core in string for string in long))
        if not before and not after and not self._encoder.control_pattern.search(core):
            return text
        left, right = text[: len(text) - len(text.lstrip())], text[len(text.rstrip()) :]
        broken = self._break_controls(core, breaker)
        # Two breakers in a row must only follow a control string of one character.
        before = before and not broken.startswith(breaker)
        return left + breaker * before + broken + breaker * bool(after) + right

    def _break_controls(self, text: str, breaker: str) -> str:
        """Break each control string after its first character, even if they overlap.

        A control string of one character gets one private character before it and two after it. If a template writes
        such a string between two texts, it is followed by at most one private character.
        """
        pieces: list[str] = []
        end = 0
        while match := self._encoder.control_pattern.search(text, end):
            first = text[match.start()]
            alone = first in self._encoder.controls
            pieces += [text[end : match.start()], breaker * alone, first, breaker * (1 + alone)]
            end = match.start() + 1
        return "".join(pieces) + text[end:] if pieces else text


class Broken(NamedTuple):
    """A conversation with broken control strings, and the character that breaks them.

    `json` and `json_of_options` are the conversation and the options of its template before. `reads_parts` means that
    the template reads all contents as lists.
    """

    messages: Any
    tools: Any
    breaker: str
    json: str
    options: Any = None
    json_of_options: str = ""
    reads_parts: bool = False


class _Ends:
    """Strings that a text may start (`left`) or end with.

    The first few characters of a text nearly always show that it starts with none of the strings. `_stems` has the
    first one to STEM characters of each string (the last ones unless `left`).
    """

    STEM = 8

    def __init__(self, strings: Sequence[str], left: bool):
        self._strings, self._left = frozenset(strings), left
        self._longest = max(map(len, strings), default=0)
        stems = range(1, self.STEM + 1)
        self._stems = frozenset(string[:k] if left else string[-k:] for string in self._strings for k in stems)

    def match(self, text: str) -> bool:
        """Return whether the text starts or ends with one of the strings."""
        if (text[:1] if self._left else text[-1:]) not in self._stems:
            return False
        for k in range(1, min(self._longest, len(text)) + 1):
            piece = text[:k] if self._left else text[-k:]
            if piece in self._strings:
                return True
            if k <= self.STEM and piece not in self._stems:
                return False
        return False


_Fragments = tuple[_Ends, _Ends, frozenset[str], tuple[str, ...]]


@lru_cache(8)  # for several templates of a tokenizer; it may have a thousand control strings
def _fragments_of(strings: tuple[str, ...]) -> _Fragments:
    """Return proper prefixes, suffixes, and inner substrings of control strings.

    The last item has the control strings that are too long to list their substrings.
    """
    starts = _Ends([s[:i] for s in strings for i in range(1, len(s))], left=False)
    ends = _Ends([s[i:] for s in strings for i in range(1, len(s))], left=True)
    short = [s for s in strings if len(s) < 64]
    insides = frozenset(s[i:j] for s in short for i in range(1, len(s)) for j in range(i + 1, len(s)))
    return starts, ends, insides, tuple(s for s in strings if len(s) >= 64)


def _too_deep() -> Reject:
    return Reject("too_deep", "a tool, or the arguments of a tool call, are nested too deeply")


@lru_cache
def _continues(form: str) -> re.Pattern[str]:
    """Return a pattern for texts that start with the rest of an escaped character."""
    return re.compile(f"{_START}(?:{'|'.join(re.escape(escaped(form[cut:])) for cut in range(1, len(form)))})")


@lru_cache(1024)
def escaped(text: str) -> str:
    """Escape a text as in ASCII JSON."""
    return json.dumps(text)[1:-1]
