"""Conversation → segments: what is encoded by itself, one control token or one text.

    "<|im_start|>user\\n" "2+2?" <|im_end|> "\\n" …  ─segments_of─▶  tokens   [TEXT,  7,     TEXT, …]
    spans                                                            trained  [False, False, False, …]
                                                                     texts    ["<|im_start|>user\\n2+2?", "\\n…", …]

Neighbouring spans of text that are alike in being trained are one text. A built-in template writes the same frame
around every conversation whose turns have the same roles, so the frame is written once, with gaps, and the gaps are
filled by what the turns say: a third of the cost of a conversation's own spans.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate, chain
from typing import NamedTuple

from tasks.conversations import Conversation, Message
from tasks.encoders import Encoder
from tasks.errors import Reject
from tasks.templates import TEXT, BuiltIn, Span, Template

# Kept; conversations of more shapes (roles and which are trained) than these are written anew.
_FRAMES = 256

# What stands in for what a turn says: no conversation holds a NUL. The white space is gone where a template strips.
_GAP = re.compile("\v?\0(\\d+)\0\v?")


class Segments(NamedTuple):
    """`tokens` and `trained` are as long as there are segments, `texts` as there are texts among them."""

    tokens: list[int]  # TEXT where a text stands
    trained: list[bool]
    texts: list[str]
    separator: bool  # the last segment is an EOS that was added behind the template's tokens


class _Frame(NamedTuple):
    """Segments with gaps: a text is a pattern for %, and the range of the messages whose contents it takes."""

    tokens: list[int]
    trained: list[bool]
    texts: list[tuple[str, int, int]]
    separator: bool
    strips: bool  # whether the template takes the white space around the contents away


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


class Segmenter:
    """A template and an encoder: conversations → segments."""

    def __init__(self, template: Template, encoder: Encoder):
        self._template = template
        self._encoder = encoder
        # Of other templates nothing is known; and where there is `has_space`, what a turn says decides about a space.
        self._has_frames = isinstance(template, BuiltIn) and not encoder.has_space
        self._frame = lru_cache(maxsize=_FRAMES)(self._new_frame)

    def segments(self, conversation: Conversation, trained: Sequence[bool]) -> Segments:
        """Raises Reject where the conversation cannot be written with this template."""
        said: list[str] = []
        shape: list[str | bool] = []
        if self._has_frames and not conversation.tools:
            for message in conversation.messages:
                text = message.content
                if not text or text.isspace() or message.context or message.tool_calls or message.role == "tool":
                    break
                said.append(text)
                shape.append(message.role)
            else:
                shape += trained
                frame = self._frame(tuple(shape))
                if frame.strips:
                    said = [text.strip() for text in said]
                texts = [text % tuple(said[first:stop]) for text, first, stop in frame.texts]
                return Segments(frame.tokens, frame.trained, texts, frame.separator)
        return segments_of(self._template.spans(conversation, trained), self._encoder)

    def _new_frame(self, shape: tuple[str | bool, ...]) -> _Frame:
        """Of all conversations of a shape: the roles, then which turns are trained on."""
        count = len(shape) // 2
        messages = tuple(Message(str(role), f"\v\0{number}\0\v") for number, role in enumerate(shape[:count]))
        spans = self._template.spans(Conversation(messages), [bool(flag) for flag in shape[count:]])
        tokens, flags, texts, separator = segments_of(spans, self._encoder)
        gaps = [list(map(int, _GAP.findall(text))) for text in texts]
        assert [*chain.from_iterable(gaps)] == list(range(count)), f"{self._template.name}: {shape} becomes {texts}"
        edges = [0, *accumulate(map(len, gaps))]
        patterns = [_GAP.sub("%s", text.replace("%", "%%")) for text in texts]
        strips = not any("\v" in text for text in texts)
        return _Frame(tokens, flags, list(zip(patterns, edges, edges[1:], strict=False)), separator, strips)
