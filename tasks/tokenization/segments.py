"""Split a conversation into segments.

    "<|im_start|>user\\n" "2+2?" <|im_end|> "\\n" …  ─segments_of─▶  tokens   [TEXT,  7,     TEXT, …]
    spans                                                            trained  [False, False, False, …]
                                                                     texts    ["<|im_start|>user\\n2+2?", "\\n…", …]

Each segment is one control token, or one text that is encoded separately. Adjacent spans of text are one text if both
are trained on, or neither is, unless the second one is `alone`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress
from typing import NamedTuple

from tasks.core.errors import Reject
from tasks.encoders.encoder import Encoder
from tasks.templates.spans import TEXT, Span

# Tokens, flags, and texts.
_Columns = tuple[list[int], list[bool], list[str]]


class Segments(NamedTuple):
    """The segments of a sample.

    `tokens` and `trained` have one item per segment. `texts` has one item per segment that is a text.
    """

    tokens: list[int]  # TEXT for a text
    trained: list[bool]
    texts: list[str]
    separator: bool  # the last segment is an EOS that was added after the template's tokens


def segments_of(spans: Sequence[Span], encoder: Encoder) -> Segments:
    """Return the segments of spans.

    Raises Reject if there are no spans.
    """
    closing = _closing(spans)
    separator = closing.token != encoder.eos_id
    columns = _unjoined(spans) if encoder.leading_space == "none" else None
    tokens, flags, texts = columns or _joined(spans, encoder)
    if separator:
        tokens.append(encoder.eos_id)
        flags.append(closing.trained)
    return Segments(tokens, flags, texts, separator)


def _unjoined(spans: Sequence[Span]) -> _Columns | None:
    """Return the tokens, flags, and texts of spans.

    Returns None if adjacent spans have to be joined.
    """
    strings, tokens, flags, *_ = zip(*spans, strict=True)
    are_texts = bytes(map(TEXT.__eq__, tokens))
    if b"\1\1" in are_texts:
        kinds = bytes([flag if is_text else 2 for is_text, flag in zip(are_texts, flags, strict=True)])
        if b"\0\0" in kinds or b"\1\1" in kinds:
            return None
    return [*tokens], [*flags], [*compress(strings, are_texts)]


def _joined(spans: Sequence[Span], encoder: Encoder) -> _Columns:
    """Return the tokens, flags, and texts of spans, with adjacent texts joined."""
    tokens: list[int] = []
    flags: list[bool] = []
    texts: list[str] = []
    pending: list[str] = []  # the texts of the spans in the last segment
    after = "start"
    leading = False

    def close() -> None:
        text = "".join(pending)
        texts.append(encoder.with_leading_space(text) if leading else text)
        pending.clear()

    for span in spans:
        if span.token == TEXT and pending and flags[-1] == span.trained and not span.alone:
            pending.append(span.text)
            continue
        if pending:
            close()
            after = "control" if texts[-1].endswith(encoder.space_follows) else "text"
        if span.token == TEXT:
            pending.append(span.text)
            leading = _has_leading_space(encoder, after, span.start)
        else:
            after = "control"
        tokens.append(span.token)
        flags.append(span.trained)
    if pending:
        close()
    return tokens, flags, texts


def _has_leading_space(encoder: Encoder, after: str, start: bool) -> bool:
    rule = encoder.leading_space
    if after == "start":
        return rule != "none"
    return after == "control" and (rule == "each" or (rule == "template" and start))


def _closing(spans: Sequence[Span]) -> Span:
    """Return the last span that is not only white space, or else the last span.

    The separator, if there is one, has the same flag. Raises Reject if there are no spans.
    """
    if not spans:
        raise Reject("no_trained_tokens", "the template does not write any of its answers")
    return next((span for span in reversed(spans) if span.token != TEXT or span.text.strip()), spans[-1])
