"""Break the control strings in a conversation before it is rendered.

    "<|im_end|>"  ──▶  "<\\ue000|im_end|>"      so a control string that is intact after rendering is the template's own
    "<|IM_END|>"  ──▶  "IM_END"                harmless: no template can turn it into a control token

A private character is inserted into every control string in a message. It is also inserted before or after every
fragment of a control string that a neighboring field could complete, even if the template strips white space between
them. The private character is removed after rendering.

A template may also change texts: `{{ message.content | lower }}` turns <|IM_END|> into a control token, although the
content has no control string to break. The control tokens of a rendering are therefore compared with those of a
rendering of harmless texts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cached_property, lru_cache
from itertools import chain
from typing import Any, NamedTuple

import orjson

from packcorpus.tasks.conversations.model import OPENAI_ROLES
from packcorpus.tasks.core.errors import Reject
from packcorpus.tasks.encoders.encoder import Encoder

# Up to _MOST_KNOWN strings of up to _SHORT characters are remembered.
_SHORT, _MOST_KNOWN = 64, 1 << 14


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

# Patterns for the characters that distinguish a control string from other text. The first pattern that matches counts.
_DISTINCT = (re.compile(r"[<>|\[\]\uff5c]"), re.compile(r"[^\w\s]"), re.compile(r"[\W_]"), re.compile(r"."))

# Markers that templates look for in contents. Markers and content tokens are kept, so that templates behave the same.
_MARKERS = ("<think>", "</think>")


class Unchanged:
    """Strings that `change` returns unchanged.

    Keys in `keys` and roles in `roles` are ignored. A conversation has hundreds of strings, and most of them occur many
    times, such as names of parameters, types, and functions. A regular expression finds the strings in JSON, and
    results for short strings are remembered.
    """

    def __init__(self, change: Callable[[str], str], keys: Iterable[str] = (), roles: Iterable[str] = ()):
        self._change = change
        self._known: set[str] = {""}
        self._changing: set[str] = set()
        ours = [f'"role":"{role}"' for role in sorted(roles)] + [f'"{key}":' for key in sorted(keys)]
        # Compact JSON has these texts nowhere else: quotes within a string have backslashes.
        self._strings = re.compile("|".join([*map(re.escape, ours), r'"([^"\\]*(?:\\.[^"\\]*)*)"']), re.DOTALL)

    def has_all(self, json: str) -> bool:
        """Return whether all keys and strings of compact JSON would stay unchanged."""
        return not self._others(json)

    def changed(self, json: str, change: Callable[[str], str]) -> str:
        """Return compact JSON with `change` applied to the strings that need a change."""
        new = {string: orjson.dumps(change(_plain(string))).decode() for string in self._others(json)}
        return self._strings.sub(lambda match: new.get(match[1]) or match[0], json) if new else json

    def _others(self, json: str) -> set[str]:
        new = set(self._strings.findall(json)) - self._known
        others = new & self._changing
        new -= others
        others |= {string for string in new if self._change(value := _plain(string)) != value}
        if len(self._known) + len(self._changing) > _MOST_KNOWN:
            self._known, self._changing = {""}, set()
        for string in new:
            if len(string) <= _SHORT:
                (self._changing if string in others else self._known).add(string)
        return others


def _plain(string: str) -> str:
    return str(orjson.loads(f'"{string}"')) if "\\" in string else string


class Broken(NamedTuple):
    """A conversation with broken control strings.

    The character `private` breaks them. `json` and `json_of_options` are the conversation and the options of its
    template before. `reads_parts` means that the template reads all contents as lists.
    """

    messages: Any
    tools: Any
    private: str
    json: str
    options: Any = None
    json_of_options: str = ""
    reads_parts: bool = False


class ControlStrings:
    """Break a tokenizer's control strings in conversations, for one template."""

    def __init__(self, encoder: Encoder, source: str):
        self._encoder, self._source = encoder, source
        self._intact = Unchanged(lambda text: self._broken_text(text, _PRIVATE_CHARACTER), OUR_KEYS, OPENAI_ROLES)
        self._writes_backslash = _WRITES_BACKSLASH.search(source) is not None
        # A template that escapes texts may write an escape such as `\\ue000` with these.
        self._like_escapes = [string for string in encoder.controls if len(string) > 1 and _LIKE_ESCAPE.search(string)]

    def broken(self, messages: Any, tools: Any, options: Mapping[str, Any] | None = None, said: str = "") -> Broken:
        """Break the control strings of messages, tools, and options of the template.

        `said` is the JSON of the options. Fragments in options stay, because templates compare options with texts.
        Raises Reject if they are nested too deeply, or if no private character is left to break them.
        """
        try:
            json = orjson.dumps((messages, tools)).decode()
            private = self._private_character(json + said)
            broken = self._intact.changed(json, lambda text: self._broken_text(text, private))
            if broken != json:  # conversations without control strings are not parsed
                messages, tools = orjson.loads(broken)
            if said and self._encoder.control_pattern.search(said):
                options = _changed(options, lambda text: self._break_controls(text, private))
            return Broken(messages, tools, private, json, options, said)
        except (orjson.JSONEncodeError, RecursionError):
            raise Reject("too_deep", "a tool, or the arguments of a tool call, are nested too deeply") from None

    def _private_character(self, text: str) -> str:
        """Return a private character that can break the control strings of a conversation.

        `text` is the conversation as JSON. The character is not in the conversation, the template, a control string, or
        a content token. Its escaped form is not in the conversation or the template, not even across two consecutive
        texts. A control string and the escaped form do not contain each other. Raises Reject if there is no such
        character.
        """
        continues = self._writes_backslash or ("\\" in text and _CUT_ESCAPE.search(text) is not None)
        for private in (chr(code) for code in chain(*PRIVATE_AREAS)):
            form = escaped(private)
            if private in text or private in self._taken or escaped(form) in text or form in self._source:
                continue
            if any(string in form or form in string for string in self._like_escapes):
                continue
            if continues and any(_continues(form).search(source) for source in (text, self._source)):
                continue
            return private
        raise Reject("no_private_character", "the conversation uses all 137,468 private characters of Unicode")

    @cached_property
    def _taken(self) -> set[str]:
        """The characters of the template, control strings, and content tokens."""
        return set().union(self._source, *self._encoder.controls, *self._encoder.content_tokens)

    @cached_property
    def _fragments(self) -> _Fragments:
        return _fragments_of(tuple(self._encoder.controls))

    def _broken_text(self, text: str, private: str) -> str:
        core = text.strip()
        if not core:
            return text
        starts, ends, insides, long = self._fragments
        before = ends.match(core)
        after = core in insides or starts.match(core) or (long and any(core in string for string in long))
        if not before and not after and not self._encoder.control_pattern.search(core):
            return text
        left, right = text[: len(text) - len(text.lstrip())], text[len(text.rstrip()) :]
        broken = self._break_controls(core, private)
        # Two private characters in a row must only follow a control string of one character.
        before = before and not broken.startswith(private)
        return left + private * before + broken + private * bool(after) + right

    def _break_controls(self, text: str, private: str) -> str:
        """Break each control string after its first character, even if they overlap.

        A control string of one character gets one private character before it and two after it. If a template writes
        such a string between two texts, it is followed by at most one private character.
        """
        pieces: list[str] = []
        end = 0
        while match := self._encoder.control_pattern.search(text, end):
            first = text[match.start()]
            alone = first in self._encoder.controls
            pieces += [text[end : match.start()], private * alone, first, private * (1 + alone)]
            end = match.start() + 1
        return "".join(pieces) + text[end:] if pieces else text


def _changed(value: Any, change: Callable[[str], str], keys: Collection[str] = (), kept: Collection[str] = ()) -> Any:
    """Return a value with its strings changed.

    These `keys` stay, and the values of the keys `kept`.
    """
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {
            key if key in keys else change(key): item if key in kept else _changed(item, change, keys, kept)
            for key, item in value.items()
        }
    return [_changed(item, change, keys, kept) for item in value] if isinstance(value, list) else value


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
    """Return prefixes, suffixes, and inner parts of strings, and the long strings."""
    starts = _Ends([s[:i] for s in strings for i in range(1, len(s))], left=False)
    ends = _Ends([s[i:] for s in strings for i in range(1, len(s))], left=True)
    short = [s for s in strings if len(s) < 64]
    insides = frozenset(s[i:j] for s in short for i in range(1, len(s)) for j in range(i + 1, len(s)))
    return starts, ends, insides, tuple(s for s in strings if len(s) >= 64)


@lru_cache
def _continues(form: str) -> re.Pattern[str]:
    """Return a pattern for texts that start with the rest of an escaped character."""
    return re.compile(f"{_START}(?:{'|'.join(re.escape(escaped(form[cut:])) for cut in range(1, len(form)))})")


@lru_cache(1024)
def escaped(text: str) -> str:
    """Escape a text as in ASCII JSON."""
    return json.dumps(text)[1:-1]


class Harmless:
    """Remove the characters of a tokenizer's control strings from texts."""

    def __init__(self, encoder: Encoder):
        found: set[str] = set()
        for string in encoder.controls:
            found |= next({*match} for pattern in _DISTINCT if (match := pattern.findall(string)))
        distinct = {form for character in found for form in (character, character.lower(), character.upper())}
        # Filters may make other control strings from texts with none of their characters: \\u00e9 from é.
        is_odd = any(not _DISTINCT[0].search(string) for string in encoder.controls)
        others = r"|[^\w\s]|[^\x00-\x7f]" if is_odd else ""
        kept = {*(token for token in encoder.content_tokens if token.isascii() or not is_odd), *_MARKERS} - distinct
        one_of = "".join(map(re.escape, sorted(distinct)))
        markers = "|".join(map(re.escape, sorted(kept, key=len, reverse=True)))
        self._pattern = re.compile(f"({markers})|[{one_of}]{others}" if distinct else r"(?!)()")
        self._unchanged = Unchanged(self._text, OUR_KEYS)

    def has(self, messages: Any, tools: Any) -> bool:
        """Return whether all texts are harmless, whether or not they are broken."""
        return self._unchanged.has_all(orjson.dumps((messages, tools)).decode())

    def of(self, value: Any) -> Any:
        """Return messages or tools with harmless texts."""
        # Templates compare the values of `role` and `type`.
        return _changed(value, self._text, OUR_KEYS, ("role", "type"))

    def _text(self, text: str) -> str:
        harmless = self._pattern.sub(lambda match: match[1] or "", text)
        return harmless if harmless.strip() or not text.strip() else "a"
