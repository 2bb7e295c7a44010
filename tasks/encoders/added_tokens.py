"""Decide which added tokens a text may become.

    added tokens of the tokenizer ─┬─ special ─────────────────▶ protected: no text becomes one; templates write them
    content_tokens of the config ──┴─ not special, white space ▶ content tokens: matched by the tokenizer's library

Models read and write tokens such as <think> and <tool_call>, which are added tokens that are not special. EOS, BOS,
padding, and the unknown token are always protected: they end, begin, or fill a sample, or stand for unknown characters.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from tasks.core.errors import UsageError
from tasks.core.printable import shown, suggest

NONE = "-*"


def content_tokens_of(
    added: Mapping[str, bool], settings: Sequence[str], reserved: Collection[str], path: Path
) -> frozenset[str]:
    """Return the added tokens that a text may become.

    `added` has all added tokens of the tokenizer at `path`, and whether each is special. `settings` change the set in
    order: `X` adds a token, `-X` removes it, and `-*` removes all but white space. The set never contains `reserved`
    tokens. Raises UsageError for a name that is not an added token, and for adding a reserved token.
    """
    found = {token for token, special in added.items() if is_blank(token) or not special}
    for setting in settings:
        name = setting if setting in added else setting.removeprefix("-")
        if setting == NONE not in added:
            found = {token for token in found if is_blank(token)}
        elif name not in added:
            raise UsageError(
                "no_such_token",
                f"content_tokens: {shown(name)} is not an added token of {path}{suggest(name, added)}; name an added "
                "token, as `X` to let content write it or as `-X` to prevent that",
            )
        elif name != setting:
            found.discard(name)
        elif name in reserved:
            raise UsageError(
                "bad_setting",
                f"content_tokens: {shown(name)} begins, ends, or pads a sample, or stands for unknown characters, so "
                "content may not write it; remove it from content_tokens",
            )
        else:
            found.add(name)
    return frozenset(found - set(reserved))


def is_blank(token: str) -> bool:
    """Return whether a token consists only of white space.

    Models use such tokens to write indentation.
    """
    return not token.replace("▁", " ").strip()
