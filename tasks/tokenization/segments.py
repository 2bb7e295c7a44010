"""Conversation → segments: what is encoded by itself, one control token or one text.

    "<|im_start|>user\\n" "2+2?" <|im_end|> "\\n" …  ─segments_of─▶  tokens   [TEXT,  7,     TEXT, …]
    spans                                                            trained  [False, False, False, …]
                                                                     texts    ["<|im_start|>user\\n2+2?", "\\n…", …]

Neighbouring spans of text that are alike in being trained are one text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from tasks.core.errors import Reject
from tasks.encoders.encoder import Encoder
from tasks.templates.spans import TEXT, Span


class Segments(NamedTuple):
    """`tokens` and `trained` are as long as there are segments, `texts` as there are texts among them."""

    tokens: list[int]  # TEXT where a text stands
    trained: list[bool]
    texts: list[str]
    separator: bool  # the last segment is an EOS that was added behind the template's tokens


def segments_of(spans: Sequence[Span], encoder: Encoder) -> Segments:
    """The segments of any spans, of which there is at least one."""
    tokens: list[int] = []
    flags: list[bool] = []
    texts: list[str] = []
    pending: list[str] = []  # joined to the text that the last segment stands for
    behind = "start"
    leading = False

    def close() -> None:
        text = "".join(pending)
        texts.append(encoder.with_leading_space(text) if leading else text)
        pending.clear()

    for span in spans:
        if span.token == TEXT and pending and flags[-1] == span.trained:
            pending.append(span.text)
            continue
        if pending:
            close()
            behind = "text"
        if span.token == TEXT:
            pending.append(span.text)
            leading = _has_leading_space(encoder, behind, span.start)
        else:
            behind = "control"
        tokens.append(span.token)
        flags.append(span.trained)
    if pending:
        close()
    closing = _closing(spans)
    separator = closing.token != encoder.eos_id
    if separator:
        tokens.append(encoder.eos_id)
        flags.append(closing.trained)
    return Segments(tokens, flags, texts, separator)


def _has_leading_space(encoder: Encoder, behind: str, start: bool) -> bool:
    rule = encoder.leading_space
    if behind == "start":
        return rule != "none"
    return behind == "control" and (rule == "each" or (rule == "template" and start))


def _closing(spans: Sequence[Span]) -> Span:
    """The last span that is more than white space: what the separator stands behind. Raises Reject where none is."""
    if not spans:
        raise Reject("no_trained_tokens", "the template writes nothing of its answers")
    return next((span for span in reversed(spans) if span.token != TEXT or span.text.strip()), spans[-1])
