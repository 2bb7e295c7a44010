"""Collect the spans that a built-in template writes.

    template ── turn, mark, frame, say ──▶ Writer ──▶ [Span(text, token, trained, role), ...]

A marker becomes a control token if the tokenizer has one for it, and text otherwise. Encoding turns a content token of
the tokenizer, such as <tool_call>, into that token, whether the template or a message wrote its text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from packcorpus.tasks.conversations.model import Message
from packcorpus.tasks.encoders.encoder import Encoder
from packcorpus.tasks.templates.sections import ALL_SECTIONS, Sections
from packcorpus.tasks.templates.spans import TEXT, Span

TOOL_CALL_MARKERS = ("<tool_call>", "</tool_call>")

Turns = Sequence[tuple[Message, bool]]
"""Pairs of a message and a flag that is true if the message is trained on."""

ContentTest = Callable[[Sequence[str]], bool]
"""Test whether a template may treat one of these nonblank contents differently from a placeholder."""


@dataclass(frozen=True)
class Family:
    """A built-in template.

    `markers` are the markers that it may write, and `write` writes a conversation. The text that `write` adds around
    the content of a message may depend only on the roles and on which turns are trained on. Exceptions are
    conversations with tools, tool calls, tool results, or a blank message and, if `writes_context` is set,
    conversations with a context. The fast path relies on this rule (see `tokenization.skeletons`), and a property test
    checks every template.
    """

    name: str
    markers: tuple[str, ...]
    write: Callable[[Writer, Turns], None]
    writes_context: bool = False
    """Whether `write` has a separate place for the context of a message. Otherwise, it writes `full_text`."""
    writes_tools: bool = False
    """Whether `write` has a separate place for `Writer.tools`. Otherwise, the system message describes the tools."""
    must_render: Callable[[Sequence[str]], ContentTest | None] | None = None
    """Return a test for contents that `write` changes in part, such as by stripping one end, given the roles."""
    differs_later: Callable[[Turns, Sequence[str]], int | None] | None = None
    """Return the index of a trained turn that is written differently, or has another prompt, once more turns follow."""


class Writer:
    """Collect spans.

    `headers_too` (train_on: all) trains on the text around a turn together with the turn.
    """

    def __init__(
        self, encoder: Encoder, headers_too: bool, tools: Sequence[str] = (), sections: Sections = ALL_SECTIONS
    ):
        self.encoder = encoder
        self.headers_too = headers_too
        self.tools = tools
        self.tools_gap = "\n\n"  # between the system message and the tools
        self.spans: list[Span] = []
        self.said: list[bool] = []  # whether a span is part of the content of a turn
        self.cuts: list[int] = []  # numbers of the spans before which a label may change within an answer
        self.role = ""
        self.trained = False
        self._starts = False  # the next text is a separate string
        self._sections = sections
        self._turn = False
        self._left_out = False  # the last span is part of a trained answer, and in a section that is left out

    def turn(self, role: str, trained: bool) -> None:
        """Start a turn of `role`."""
        self.role = role
        self._turn = trained
        self.trained = trained and (role != "assistant" or self._sections.content)

    def calls(self) -> None:
        """Continue with the calls of an answer, up to the end of its turn."""
        self.trained = self._turn and self._sections.calls
        self.cuts.append(len(self.spans))

    def mark(self, marker: str, start: bool = False) -> None:
        """Write a marker that is not part of the turn."""
        self._mark(marker, self.trained and self.headers_too, False, start)

    def own_mark(self, marker: str) -> None:
        """Write a marker that is part of the turn, and trained on like it."""
        self._mark(marker, self.trained, True)

    def bos(self, start: bool = False) -> None:
        """Write BOS if the tokenizer has a BOS token and adds it itself.

        If `start` is true, the text after BOS is a separate string.
        """
        if self.encoder.adds_bos and self.encoder.bos_id is not None:
            self._token(self.encoder.bos_id, False, False)
        self._starts = start

    def eos(self) -> None:
        """Write EOS as a stop token, which is trained on if the turn is."""
        self._token(self.encoder.eos_id, self.trained, True)

    def frame(self, text: str, start: bool = False) -> None:
        """Write text that is not part of the turn."""
        self._text(text, self.trained and self.headers_too, False, start)

    def say(self, text: str, start: bool = False) -> None:
        """Write text that is part of the turn."""
        self._text(text, self.trained, True, start)

    def _mark(self, marker: str, trained: bool, said: bool, start: bool = False) -> None:
        token = self.encoder.controls.get(marker)
        if token is None:
            self._text(marker, trained, said, start)
        else:
            self._add(Span(marker, token, trained, self.role), said)

    def _token(self, token: int, trained: bool, said: bool) -> None:
        self._add(Span(self.encoder.control_strings.get(token, ""), token, trained, self.role), said)

    def _text(self, text: str, trained: bool, said: bool, start: bool = False) -> None:
        if text:
            self._add(Span(text, TEXT, trained, self.role, start or self._starts), said)

    def _add(self, span: Span, said: bool) -> None:
        left_out = said and self._turn and not self.trained
        if span.token == TEXT and (left_out or self._left_out) and self.said[-1:] == [not said]:
            span = span._replace(alone=True)  # the tokens are those that it has with a label
        self._left_out = left_out
        self.spans.append(span)
        self.said.append(said)
        self._starts = False


def requests(turns: Turns) -> list[tuple[Turns, tuple[Message, bool] | None]]:
    """Group turns into pairs of a request and its answer.

    A request is all turns between two answers. The last answer is None if no answer follows the last request.
    """
    pairs: list[tuple[Turns, tuple[Message, bool] | None]] = []
    request: list[tuple[Message, bool]] = []
    for turn in turns:
        if turn[0].role == "assistant":
            pairs.append((request, turn))
            request = []
        else:
            request.append(turn)
    return [*pairs, (request, None)] if request else pairs
