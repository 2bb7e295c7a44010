"""Convert a conversation to spans with a Jinja chat template.

The template is the tokenizer's own, or a file.

    messages ─break─▶ messages whose control strings are broken ─render─▶ one text ─split─▶ control tokens and text
                                                                  └─locate─▶ which characters are trained on

Templates are rendered by transformers (its sandbox, its filters), so the text equals the one the model sees in use.
This module adds two things:

- Content stays content. A private character is inserted into every control string that a message contains, and before
  or after every fragment of one that a neighboring field could complete (also if the template strips the white space
  around it). Any control string that is intact after rendering was therefore written by the template. The private
  character is then removed.
- Trained turns are located. If the template has `{% generation %}` marks, these are used. Otherwise the prefix property
  is: the rendering of messages[:k] with the generation prompt must be a prefix of the rendering of messages[:k+1],
  and this one a prefix of the whole; the text between the two is turn k. If that does not hold, the run fails and names
  the turn, because any guess would produce wrong labels silently. White space after the turn's last control token is
  not trained.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from datetime import datetime
from functools import cached_property
from itertools import chain, pairwise
from typing import Any

import orjson

from tasks.conversations.model import Conversation
from tasks.conversations.openai import as_openai
from tasks.core.errors import DataError, Reject, UsageError
from tasks.encoders.encoder import Encoder
from tasks.templates.built_in import plain_text
from tasks.templates.jinja_sandbox import Renderer, Rendering
from tasks.templates.spans import TEXT, Sample, Span, TrainOn, Turns

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")

# Unicode's three areas for private use.
_PRIVATE = (range(0xE000, 0xF900), range(0xF0000, 0xFFFFE), range(0x100000, 0x10FFFE))

Ranges = list[tuple[int, int]]


class JinjaTemplate:
    """A Jinja chat template bound to a tokenizer.

    `today` is the date that the template sees, as YYYY-MM-DD.
    """

    markers_as_text: tuple[str, ...] = ()

    def __init__(self, name: str, source: str, encoder: Encoder, train_on: TrainOn, today: str, turns: Turns = "auto"):
        self.name = name
        self._source = source
        self._encoder = encoder
        self._all = train_on == "all"
        self._turns = turns
        self._marked = _GENERATION.search(source) is not None
        try:
            date = datetime.fromisoformat(today)
        except ValueError as error:
            raise UsageError("bad_setting", f"template_date: {today}: {error}") from None
        special = {
            key: encoder.control_strings.get(token, "")
            for key, token in zip(
                ("bos_token", "eos_token", "pad_token"), (encoder.bos_id, encoder.eos_id, encoder.pad_id), strict=True
            )
            if token is not None
        }
        self._renderer = Renderer(name, source, special, date)

    def spans(self, conversation: Conversation, trained: Sequence[bool]) -> list[Span]:
        """Render a conversation and split it into spans.

        `trained` is true for each message that is trained on. Raises Reject if the conversation cannot be rendered,
        DataError if the template cannot be used.
        """
        if conversation.messages[0].role == "text":
            return plain_text(conversation, trained, self._encoder)
        messages: list[Any] = [as_openai(message) for message in conversation.messages]
        tools: Any = [orjson.loads(tool) for tool in conversation.tools] or None
        try:
            breaker = self._breaker(messages, tools)
            messages, tools = self._break(messages, breaker), self._break(tools, breaker)
        except (orjson.JSONEncodeError, RecursionError):
            raise Reject("too_deep", "a tool, or the arguments of a tool call, are nested too deeply") from None
        rendering = self._renderer.render(messages, tools, self._marked, *self._turns_to_locate(trained))
        ranges = self._trained_ranges(rendering, [message.role for message in conversation.messages], trained)
        return self._split(rendering.text, ranges, breaker)

    def samples(self, conversation: Conversation, trained: Sequence[bool]) -> list[Sample]:
        """Return the samples of a conversation. Raises what `spans` raises."""
        return [Sample(self.spans(conversation, trained))]

    # Content stays content

    @cached_property
    def _pieces(self) -> tuple[_Ends, _Ends, frozenset[str], tuple[str, ...]]:
        """Return proper prefixes, suffixes, and inner substrings of control strings.

        The last item are the strings too long to list their substrings.
        """
        strings = self._encoder.controls
        starts = _Ends([s[:i] for s in strings for i in range(1, len(s))], left=False)
        ends = _Ends([s[i:] for s in strings for i in range(1, len(s))], left=True)
        short = [s for s in strings if len(s) < 64]
        insides = frozenset(s[i:j] for s in short for i in range(1, len(s)) for j in range(i + 1, len(s)))
        return starts, ends, insides, tuple(s for s in strings if len(s) >= 64)

    def _breaker(self, *values: Any) -> str:
        """Return a private character that neither conversation nor template contains.

        They do not contain it escaped either.
        """
        text = orjson.dumps(values).decode() + self._source
        seen = set(text) if not text.isascii() else set[str]()
        private = (chr(code) for code in chain(*_PRIVATE))
        free = next((c for c in private if c not in seen and _escaped(c) not in text), None)
        if free is None:
            raise Reject("no_private_character", "the conversation uses all 137,468 private characters of Unicode")
        return free

    def _break(self, value: Any, breaker: str, trusted: bool = False) -> Any:
        if isinstance(value, str):
            return value if trusted else self._break_text(value, breaker)
        if isinstance(value, dict):
            # Keys of the message format and the role of a message are known strings, not content.
            return {
                self._break_text(key, breaker) if key not in _OUR_KEYS else key: self._break(
                    item, breaker, trusted=key == "role" and item in _ROLES
                )
                for key, item in value.items()
            }
        if isinstance(value, list):
            return [self._break(item, breaker) for item in value]
        return value

    def _break_text(self, text: str, breaker: str) -> str:
        core = text.strip()
        if not core:
            return text
        starts, ends, insides, long = self._pieces
        before = ends.match(core)
        after = core in insides or starts.match(core) or any(core in string for string in long)
        left, right = text[: len(text) - len(text.lstrip())], text[len(text.rstrip()) :]
        return left + breaker * before + self._break_controls(core, breaker) + breaker * after + right

    def _break_controls(self, text: str, breaker: str) -> str:
        """Break each control string after its first character, also within another one.

        A control string of one character gets a private character on both sides.
        """
        pieces: list[str] = []
        end = 0
        while match := self._encoder.control_pattern.search(text, end):
            alone = len(match.group()) == 1
            pieces += [text[end : match.start()], breaker * alone, text[match.start()], breaker]
            end = match.start() + 1
        return "".join(pieces) + text[end:] if pieces else text

    # Labels

    def _turns_to_locate(self, trained: Sequence[bool]) -> tuple[list[int], bool]:
        """Return the turns to locate, and whether each starts after the generation prompt."""
        if self._all:
            return [k for k, flag in enumerate(trained) if not flag], False
        return [] if self._marked else [k for k, flag in enumerate(trained) if flag], True

    def _trained_ranges(self, rendering: Rendering, roles: Sequence[str], trained: Sequence[bool]) -> Ranges:
        text, marks, turns, lost = rendering
        if lost is not None:
            prompt = "" if self._all else "with the generation prompt "
            raise DataError(
                "turn_not_located",
                f"template {self.name}: messages[{lost}] ({roles[lost]}) cannot be located: the rendering of "
                f"messages[:{lost}] {prompt}is not a prefix of that of messages[:{lost + 1}], or the latter is not a "
                "prefix of the whole; add {% generation %} marks to the template or use a built-in one",
            )
        turns = [(start, self._without_space(text, start, stop)) for start, stop in turns]
        if self._all:
            edges = [0, *chain(*turns), len(text)]
            return list(zip(edges[::2], edges[1::2], strict=True))
        if not self._marked:
            return turns
        answers = [k for k, role in enumerate(roles) if role == "assistant"]
        if len(answers) == len(marks):
            return [(start, stop) for k, (start, stop) in zip(answers, marks, strict=True) if trained[k]]
        raise DataError(
            "turn_not_located",
            f"template {self.name}: rendered {len(marks)} {{% generation %}} blocks for {len(answers)} assistant turns "
            f"(messages{answers}); mark every assistant turn, or remove the marks",
        )

    def _without_space(self, text: str, start: int, stop: int) -> int:
        """Return the end of a turn without white space after its last control token."""
        last = max((m.end() for m in self._encoder.control_pattern.finditer(text, start, stop)), default=0)
        return last if last and not text[last:stop].strip() else stop

    def _split(self, text: str, ranges: Ranges, breaker: str) -> list[Span]:
        """Cut the rendered text at control tokens and at the edges of trained ranges."""
        spans: list[Span] = []
        edges = sorted({edge for turn in ranges for edge in turn})
        starts = [start for start, _ in ranges]  # in ascending order
        escaped = _escaped(breaker)

        def is_trained(position: int) -> bool:
            turn = bisect_right(starts, position) - 1
            return turn >= 0 and position < ranges[turn][1]

        def add(start: int, stop: int) -> None:
            cuts = [start, *edges[bisect_right(edges, start) : bisect_left(edges, stop)], stop]
            for left, right in pairwise(cuts):
                piece = text[left:right].replace(breaker, "").replace(escaped, "")
                if piece:
                    spans.append(Span(piece, TEXT, is_trained(left), ""))

        end = 0
        for match in self._encoder.written_pattern.finditer(text):
            string = match.group() if match.group() in self._encoder.controls else match.group().strip()
            if len(string) == 1 and breaker in (
                text[match.start() - 1 : match.start()],
                text[match.end() : match.end() + 1],
            ):
                continue
            add(end, match.start())
            at = match.start() + match.group().index(string)
            spans.append(Span(string, self._encoder.controls[string], is_trained(at), ""))
            end = match.end()
        add(end, len(text))
        return spans


class _Ends:
    """Strings that a text may start (`left`) or end with.

    For nearly every text, the first characters show that it starts with none: `_stems` has the first characters of the
    strings, from one up to STEM of them.
    """

    STEM = 8

    def __init__(self, strings: Sequence[str], left: bool):
        self._strings, self._left = frozenset(strings), left
        self._longest = max(map(len, strings), default=0)
        stems = range(1, self.STEM + 1)
        self._stems = frozenset(string[:k] if left else string[-k:] for string in self._strings for k in stems)

    def match(self, text: str) -> bool:
        """Return whether the text starts or ends with one of the strings."""
        for k in range(1, min(self._longest, len(text)) + 1):
            piece = text[:k] if self._left else text[-k:]
            if piece in self._strings:
                return True
            if k <= self.STEM and piece not in self._stems:
                return False
        return False


_OUR_KEYS = {"role", "content", "name", "tool_calls", "tool_call_id", "id", "type", "function", "arguments"}
_ROLES = {"system", "user", "assistant", "tool"}


def _escaped(character: str) -> str:
    """Escape a character as in ASCII JSON."""
    return json.dumps(character)[1:-1]
