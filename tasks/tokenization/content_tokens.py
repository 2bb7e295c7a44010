"""Count the content tokens that conversations become, by the role of the message.

    {"<think>": {"assistant": 12}, "<tool_call>": {"assistant": 3, "user": 1}}

What a template writes is not counted, and neither is white space.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from tasks.conversations.model import ROLES
from tasks.encoders.encoder import Encoder
from tasks.tokenization.frames import Prepared

Counts = dict[str, dict[str, int]]

# Marks of `layout_of` for more than one string.
_SEVERAL = {"\x0e": 2, "\x0f": 3}


def count_content_tokens(encoder: Encoder, conversations: Iterable[Prepared]) -> Counts:
    """Return how often each content token occurs in what the conversations say, by role."""
    texts: list[str] = []
    roles: list[str] = []
    for prepared in conversations:
        layout, said = prepared.strings[0], prepared.strings[1:]
        if prepared.shape.layout:
            layout, said = prepared.shape.layout, prepared.strings
        texts += said
        roles += _roles(layout, len(said))
    return _by_token(Counter((token, roles[index]) for index, token in encoder.count_content_tokens(texts)))


def merged(found: Iterable[Mapping[str, Mapping[str, int]]]) -> Counts:
    """Return the sums of counts, in an order that does not depend on theirs."""
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
    """Return the role of each of `count` strings that `layout_of` describes; "tools" for the schemas of tools."""
    roles: list[str] = []
    role = ""
    for mark in layout:
        if ord(mark) <= len(ROLES):
            role = ROLES[ord(mark) - 1]
        elif mark == "\x10":
            role = "tools"
        roles += [role] * _SEVERAL.get(mark, 1)
    return roles + [role] * (count - len(roles))
