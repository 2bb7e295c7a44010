"""Find where messages of the user begin in the tokens of a conversation.

    template ─renders a probe─▶  … <|im_end|> \\n  <|im_start|> user \\n question  ─▶ TurnMarks((<|im_start|>, user))
    tokens   <|im_start|> system … <|im_start|> user … <|im_start|> user …         ─▶ starts of the user's messages

A message of the user begins with a control token, which content cannot write. A template that marks its turns with text
alone has no marks, and then only the ends of trained turns are known.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from packcorpus.tasks.conversations.model import Conversation, Message, ToolCall
from packcorpus.tasks.core.errors import PackError, Reject
from packcorpus.tasks.encoders.encoder import Encoder
from packcorpus.tasks.templates.spans import TEXT, Template
from packcorpus.tasks.tokenization.samples import Segments, segments_of

# Texts of the probe. No template writes them.
ANSWER, QUESTION, RESULT = "Qanswerq", "Qquestionq", "Qresultq"
# The message begins with the tokens that the encodings of both beginnings have in common.
BEGINNINGS = ("x", "7")


@dataclass(slots=True)
class TurnMarks:
    """The tokens with which messages begin.

    `user` begins a message of the user. `result` begins a result of a tool, if that looks like one. Both are empty if
    they are unknown. `trains_all` means that labels do not show where turns end.
    """

    encoder: Encoder
    user: tuple[int, ...] = ()
    result: tuple[int, ...] = ()
    trains_all: bool = False
    _blank: dict[int, bool] = field(default_factory=dict)

    def starts(self, values: np.ndarray) -> list[int]:
        """Return the offsets at which messages of the user begin, ascending.

        `values` are int32, ~id if untrained.
        """
        if not self.user:
            return []
        starts = np.flatnonzero((values == self.user[0]) | (values == ~self.user[0]))
        starts = _followed(values, starts, self.user)
        found: list[int] = starts.tolist()
        if self.result and found:
            results = set(_followed(values, starts, self.result).tolist())
            found = [start for start in found if start not in results]
        return found

    def is_blank(self, value: int) -> bool:
        """Return whether a token is white space; `value` is ~id if it is untrained."""
        token = value ^ (value >> 31)
        if token not in self._blank:
            self._blank[token] = not self.encoder.token_bytes(token).strip()
        return self._blank[token]


def _followed(values: np.ndarray, places: np.ndarray, tokens: tuple[int, ...]) -> np.ndarray:
    """Return the places with these tokens; the first of them is known to be there."""
    places = places[places + len(tokens) <= len(values)]
    for offset, token in enumerate(tokens[1:], 1):
        there = values[places + offset]
        places = places[(there == token) | (there == ~token)]
    return places


def marks_of(template: Template, encoder: Encoder, trains_all: bool) -> TurnMarks:
    """Return the marks of a template; its encoder is `encoder`."""
    user = _begin(template, encoder, [Message("user", "x"), Message("assistant", ANSWER), Message("user", QUESTION)])
    call = Message("assistant", "", tool_calls=(ToolCall("lookup", '{"key": "Qanswerq"}', "a12345678"),))
    result = Message("tool", RESULT, name="lookup", tool_call_id="a12345678")
    of_result = _begin(template, encoder, [Message("user", "x"), call, result]) if user else ()
    looks_alike = len(of_result) > len(user) and of_result[: len(user)] == user
    return TurnMarks(encoder, user, of_result if looks_alike else (), trains_all)


def _begin(template: Template, encoder: Encoder, messages: list[Message]) -> tuple[int, ...]:
    """Return the tokens between the answer and the last message of a probe.

    They begin with a control token. The result is empty if there is none, or if the template cannot write the probe.
    """
    conversation = Conversation((*messages, Message("assistant", "y")))
    trained = [message.role == "assistant" for message in conversation.messages]
    try:
        sample = template.samples(conversation, trained)[-1]
        segments = segments_of(sample.spans, encoder)
    except (Reject, PackError):
        return ()
    stop = next((token for token, flag in zip(*segments[:2], strict=True) if flag and token != TEXT), None)
    return _between(segments, encoder, messages[-1].content, stop)


def _between(segments: Segments, encoder: Encoder, content: str, stop: int | None) -> tuple[int, ...]:
    texts = iter(segments.texts)
    pieces = [token if token != TEXT else next(texts) for token in segments.tokens]
    after = [n for n, piece in enumerate(pieces) if isinstance(piece, str) and ANSWER in piece]
    at = [n for n, piece in enumerate(pieces) if isinstance(piece, str) and content in piece]
    if not after or not at or at[0] <= after[0]:
        return ()
    last = pieces[at[0]]
    between = pieces[after[0] + 1 : at[0]]
    while between and (isinstance(between[0], str) or between[0] == stop):  # the end of the answer
        del between[0]
    if not between:
        return ()
    begin = [token for piece in between for token in (_ids(encoder, piece) if isinstance(piece, str) else [piece])]
    assert isinstance(last, str)
    prefix = last.partition(content)[0]
    encodings = [_ids(encoder, prefix + beginning) for beginning in BEGINNINGS]
    for one, other in zip(*encodings, strict=False):
        if one != other:
            break
        begin.append(one)
    while begin and not encoder.token_bytes(begin[-1]).strip():  # white space may join that of a content
        del begin[-1]
    return tuple(begin)


def _ids(encoder: Encoder, text: str) -> list[int]:
    ids: list[int] = encoder.encode([text]).ids.tolist()
    return ids
