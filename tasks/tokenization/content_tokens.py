"""Count the content tokens that conversations become, by the role of the message.

    {"<think>": {"assistant": 12}, "<tool_call>": {"assistant": 3, "user": 1}}

The template's own text and white space are not counted. Text that a template leaves out of a conversation, such as the
reasoning of earlier turns, is not counted either.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property, lru_cache

from tasks.conversations.model import ROLES
from tasks.encoders.encoder import Encoder, is_blank
from tasks.encoders.texts import SEPARATOR
from tasks.tokenization.frames import Prepared

Counts = dict[str, dict[str, int]]

# Marks of `layout_of` for more than one string.
_SEVERAL = {"\x0e": 2, "\x0f": 3}


# Number of characters around a token, without white space, that identify it in the rendered text.
_NEAR = 24


def count_content_tokens(encoder: Encoder, conversations: Iterable[Sequence[Prepared]]) -> Counts:
    """Count the content tokens in the rendered text of conversations, by role.

    Each conversation is given by all its samples.
    """
    texts: list[str] = []
    roles: list[str] = []
    samples_of = list(conversations)
    every = ["\0".join(samples[0].strings) for samples in samples_of]  # each sample has all strings
    for number in encoder.holding_content_tokens(every):
        samples = samples_of[number]
        prepared = samples[0]
        filled = prepared.shape.layout  # set if the texts contain every string
        layout, said = (filled, prepared.strings) if filled else (prepared.strings[0], prepared.strings[1:])
        owners = _roles(layout, len(said))
        if not filled:
            written = _Written(SEPARATOR.join(sample.joined.decode() for sample in samples))
            pairs = [
                (part, role)
                for text, role in zip(said, owners, strict=True)
                for part in written.parts_of(text, _tokens(encoder), encoder.control_pattern)
            ]
            said, owners = [part for part, _ in pairs], [role for _, role in pairs]
        texts += said
        roles += owners
    return _by_token(Counter((token, roles[index]) for index, token in encoder.count_content_tokens(texts)))


class _Written:
    """The text that a template writes for a conversation."""

    def __init__(self, text: str):
        self._text = text

    def parts_of(self, text: str, tokens: re.Pattern[str], controls: re.Pattern[str]) -> list[str]:
        """Return the parts of a string that are written.

        This is the whole string, or else all its content tokens that have the same text around them. White space is
        ignored, because a template may strip a content, write its reasoning elsewhere, or format the JSON of a call.
        A control string next to them may be one that the template writes, which is not in the text.
        """
        if text in self._text:
            return [text]
        plain, cut = _contexts(_bare(text), tokens), _contexts(_bare(controls.sub(SEPARATOR, text)), tokens)
        if len(plain) != len(cut):  # a token holds a control string
            cut = plain
        pairs = zip(plain, cut, strict=True)
        return [token for (token, one), (_, other) in pairs if one in self._bare or other in self._bare]

    @cached_property
    def _bare(self) -> str:
        return _bare(self._text)


def _contexts(bare: str, tokens: re.Pattern[str]) -> list[tuple[str, str]]:
    """Return each content token of a text without white space, and the text around it."""
    places = (match.span() for match in tokens.finditer(bare))
    return [(bare[start:end], bare[max(0, start - _NEAR) : end + _NEAR]) for start, end in places]


def _bare(text: str) -> str:
    """Return a text without white space."""
    return "".join(text.split())


@lru_cache(maxsize=2)
def _tokens(encoder: Encoder) -> re.Pattern[str]:
    names = [_bare(name) for name in encoder.content_tokens if not is_blank(name)]
    return re.compile("|".join(map(re.escape, sorted(names, key=len, reverse=True))) or r"(?!)")


def merged(found: Iterable[Mapping[str, Mapping[str, int]]]) -> Counts:
    """Add up counts of content tokens by role.

    The order of the result does not depend on the order of the counts.
    """
    sums: Counter[tuple[str, str]] = Counter()
    for counts in found:
        for token, by_role in counts.items():
            sums.update({(token, role): count for role, count in by_role.items()})
    return _by_token(sums)


def _by_token(sums: Mapping[tuple[str, str], int]) -> Counts:
    result: Counts = {}
    for token, role in sorted(sums):
        result.setdefault(token, {})[role] = sums[token, role]
    return result


def _roles(layout: str, count: int) -> list[str]:
    """Return the role of each of `count` strings that `layout_of` describes.

    The role of tool schemas is "tools", and that of template options "options".
    """
    roles: list[str] = []
    role = ""
    for mark in layout:
        if ord(mark) <= len(ROLES):
            role = ROLES[ord(mark) - 1]
        elif mark == "\x10":
            role = "tools"
        elif mark == "\x13":
            role = "options"
        roles += [role] * _SEVERAL.get(mark, 1)
    return roles + [role] * (count - len(roles))
