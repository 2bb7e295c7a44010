"""Convert a conversation to spans with a Jinja chat template.

The template is the tokenizer's own, or a file.

    messages ─break─▶ messages whose control strings are broken ─render─▶ texts ─split─▶ control tokens and text
                                                                  └─locate─▶ which characters are trained on

Templates are rendered in the environment that they are written for, so the text equals the one the model sees in use.
This module adds two things:

- Content stays content. A private character is inserted into every control string that a message contains, and before
  or after every fragment of one that a neighboring field could complete (also if the template strips the white space
  around it). Any control string that is intact after rendering was therefore written by the template. The private
  character is then removed.
- Trained turns are located (see `locate`): after exactly the prompt that the model sees at inference.
  `{% generation %}` marks are used if the template has them, and must agree. If a turn cannot be located, the run fails
  and names it, because any guess would produce wrong labels silently.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from functools import cached_property
from itertools import chain, pairwise, product
from typing import Any

import numpy as np
import orjson

from tasks.conversations.model import Conversation, Message
from tasks.conversations.openai import as_openai
from tasks.core.errors import DataError, Reject, UsageError
from tasks.encoders.encoder import Encoder
from tasks.templates.adjust import NO_CHANGE, Adjust
from tasks.templates.built_in import plain_text
from tasks.templates.jinja.sandbox import Method, Renderer, Rendering
from tasks.templates.jinja.unusual import Unusual
from tasks.templates.reasoning import ReasoningForm, reasoning_of, with_reasoning
from tasks.templates.spans import TEXT, Outline, Sample, Span, TrainOn, Turns

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")

# Templates that look for reasoning in the content split it at its end marker, or test for it.
_READS_INLINE = re.compile(r"""split\(\s*['"]</?think>|['"]</think>['"]\s+in\b""")

# Unicode's three areas for private use.
_PRIVATE = (range(0xE000, 0xF900), range(0xF0000, 0xFFFFE), range(0x100000, 0x10FFFE))

Ranges = list[tuple[int, int]]

# A placeholder, with the white space around it that a template strips.
_GAP = re.compile("\v?\0\\d+\0\v?")


class JinjaTemplate:
    """A Jinja chat template bound to a tokenizer.

    `today` is the date that the template sees, as YYYY-MM-DD; `options` are further variables, such as enable_thinking.
    """

    markers_as_text: tuple[str, ...] = ()

    def __init__(
        self,
        name: str,
        source: str,
        encoder: Encoder,
        train_on: TrainOn,
        today: str,
        turns: Turns = "auto",
        options: Mapping[str, Any] | None = None,
        adjust: Adjust = NO_CHANGE,
    ):
        self.name = name
        self.adjust = adjust
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
        self._splits: dict[tuple[str, str], bool] = {}
        ends = encoder.control_pattern.pattern
        self._renderer = Renderer(name, source, special | dict(options or {}), date, ends)

    def spans(self, conversation: Conversation, trained: Sequence[bool]) -> list[Span]:
        """Return the spans of a conversation that is one sample. Raises what `samples` raises."""
        [sample] = self.samples(conversation, trained)
        return sample.spans

    def samples(self, conversation: Conversation, trained: Sequence[bool]) -> list[Sample]:
        """Render a conversation and split each of its samples into spans.

        `trained` is true for each message that is trained on. Raises Reject if the conversation cannot be rendered,
        DataError if the template cannot be used.
        """
        if conversation.messages[0].role == "text":
            return [Sample(plain_text(conversation, trained, self._encoder))]
        conversation, trained, added = self.adjust.of(conversation, trained)
        messages, tools, breaker = self._broken(conversation)
        if self._all:
            others = [k for k, flag in enumerate(trained) if not flag]
            rendering = self._renderer.render(messages, tools, False, others, "others")
            self._require_located(rendering, conversation, "the rendering of the messages before it", breaker)
            return [Sample(self._split(rendering.text, self._without(rendering), breaker))]
        turns = [k for k, flag in enumerate(trained) if flag]
        rendering = self._render(messages, tools, turns, self._turns)
        if self._turns == "auto" and not self._is_read_alike(rendering, breaker):
            rendering = self._render(messages, tools, turns, "apart")
        ranges_of_marks = self._marked_turns(rendering, conversation, trained) if self._marked else None
        if rendering.lost and ranges_of_marks and self._turns != "apart":
            return [Sample(self._split(rendering.text, ranges_of_marks, breaker))]
        self._require_located(rendering, conversation, "its prompt", breaker)
        found = []
        for text, ranges, turn in rendering.samples:
            if turn is None and ranges_of_marks is not None:
                self._require_agreement(ranges, ranges_of_marks, turns)
                ranges = ranges_of_marks
            numbers = turns if turn is None else [turn]
            for k, (start, stop) in zip(numbers, ranges, strict=True):
                self._require_written(conversation.messages[k], k, text[start:stop].replace(breaker, ""))
            found.append(Sample(self._split(text, ranges, breaker), None if turn is None else turn - added))
        return found

    def outline(self, conversation: Conversation, trained: Sequence[bool]) -> Outline | None:
        """Return the samples of a conversation of placeholders, if the template only writes and tests contents."""
        if self._all or not all("\0" in message.content for message in conversation.messages):
            return None
        conversation, trained, added = self.adjust.of(conversation, trained)
        turns = [k for k, flag in enumerate(trained) if flag]
        rendering, breaker = self._trace(conversation, turns)
        strips = bool(rendering.unusual and rendering.unusual[3])
        if strips:
            # Only if it strips every content, wherever it is, do contents with and without white space become the same.
            bare = [replace(message, content=message.content.strip("\v")) for message in conversation.messages]
            other, breaker = self._trace(Conversation(tuple(bare)), turns)
            strips = other != rendering
            rendering = other
        if rendering.lost or rendering.unusual is None:
            return None
        heads = []
        for text, ranges, turn in rendering.samples:
            for start, stop in self._inner(text, ranges) if turn is None else []:
                tail = self._tail(text[:start].replace(breaker, ""))
                head = _GAP.match(text, start, stop)
                if head is None and not self._splits_at(tail, text[start:stop].partition("\0")[0].replace(breaker, "")):
                    return None
                if head is not None and tail:
                    heads.append((int(head.group().strip("\v\0")), tail))
        marked = self._marked_turns(rendering, conversation, trained) if self._marked else None
        found = []
        for text, ranges, turn in rendering.samples:
            if turn is None and marked is not None:
                self._require_agreement(ranges, marked, turns)
                ranges = marked
            found.append(Sample(self._split(text, ranges, breaker), None if turn is None else turn - added))
        return Outline(found, Unusual(rendering.unusual, heads, self._splits_at, strips))

    def _trace(self, conversation: Conversation, turns: list[int]) -> tuple[Rendering, str]:
        messages, tools, breaker = self._broken(conversation)
        return self._renderer.render(messages, tools, self._marked, turns, self._turns, trace=True), breaker

    def _without(self, rendering: Rendering) -> Ranges:
        """Return the ranges between the located turns, which are all but them."""
        text, [(_, ranges, _)] = rendering.text, rendering.samples
        edges = [0, *chain(*((start, self._without_space(text, start, stop)) for start, stop in ranges)), len(text)]
        return list(zip(edges[::2], edges[1::2], strict=True))

    def _render(self, messages: list[Any], tools: Any, turns: list[int], method: Method) -> Rendering:
        return self._renderer.render(messages, tools, self._marked, turns, method)

    def _broken(self, conversation: Conversation) -> tuple[list[Any], Any, str]:
        """Return messages and tools as the template expects them, with broken control strings, and the breaker."""
        messages = [self._as_expected(message) for message in conversation.messages]
        tools: Any = [orjson.loads(tool) for tool in conversation.tools] or None
        try:
            breaker = self._breaker(messages, tools)
            return self._break(messages, breaker), self._break(tools, breaker), breaker
        except (orjson.JSONEncodeError, RecursionError):
            raise Reject("too_deep", "a tool, or the arguments of a tool call, are nested too deeply") from None

    def _as_expected(self, message: Message) -> dict[str, Any]:
        found = as_openai(message)
        if message.role == "assistant":
            found = with_reasoning(found, self._reasoning_form)
            if message.tool_calls and self._call_form is not None:
                null_content, text_arguments = self._call_form
                if null_content and not found["content"]:
                    found["content"] = None
                if text_arguments:
                    for call, written in zip(message.tool_calls, found["tool_calls"], strict=True):
                        written["function"]["arguments"] = call.arguments
        return found

    # How this template reads what templates read differently

    @cached_property
    def _reasoning_form(self) -> ReasoningForm:
        """Return how the template reads reasoning: it is rendered with each, and must write it."""
        for form in (ReasoningForm.FIELD, ReasoningForm.INLINE):
            if form is ReasoningForm.INLINE and not _READS_INLINE.search(self._source):
                continue  # it would write it as any other content
            answer = with_reasoning({"role": "assistant", "content": "b", "reasoning_content": "r-e-a-s-o-n"}, form)
            if "r-e-a-s-o-n" in self._trial(answer):
                return form
        # Some prompts open the reasoning, and the template leaves it out of the turn: see `locate`.
        return ReasoningForm.FIELD if _READS_INLINE.search(self._source) else ReasoningForm.NONE

    @cached_property
    def _call_form(self) -> tuple[bool, bool] | None:
        """Return whether the template writes calls only if the content is null, and only if arguments are JSON text.

        None: it writes none.
        """
        arguments = {"a": "b"}
        parameters = {"type": "object", "properties": {"a": {"type": "string", "description": "a"}}, "required": ["a"]}
        tool = {"type": "function", "function": {"name": "other", "description": "a", "parameters": parameters}}
        for tools, text_arguments, content in product((None, [tool]), (False, True), ("", None)):
            function = {"name": "t-o-o-l", "arguments": json.dumps(arguments) if text_arguments else arguments}
            call = {"type": "function", "id": "callabcde", "function": function}
            if "t-o-o-l" in self._trial({"role": "assistant", "content": content, "tool_calls": [call]}, tools):
                return content is None, text_arguments
        return None

    def _trial(self, answer: dict[str, Any], tools: Any = None) -> str:
        try:
            return self._renderer.render([{"role": "user", "content": "a"}, answer], tools, False, [], "others").text
        except Reject:
            return ""

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

    def _require_located(self, rendering: Rendering, conversation: Conversation, start: str, breaker: str) -> None:
        if rendering.lost is None:
            return
        k, problem = rendering.lost
        raise DataError(
            "turn_not_located",
            f"template {self.name}: messages[{k}] ({conversation.messages[k].role}) cannot be located: its rendering "
            f"does not continue {start}: {problem.replace(_escaped(breaker), '')}",
        )

    def _marked_turns(self, rendering: Rendering, conversation: Conversation, trained: Sequence[bool]) -> Ranges:
        """Return the ranges of the trained turns by {% generation %} blocks."""
        answers = [k for k, message in enumerate(conversation.messages) if message.role == "assistant"]
        if len(answers) == len(rendering.marks):
            return [(start, stop) for k, (start, stop) in zip(answers, rendering.marks, strict=True) if trained[k]]
        raise DataError(
            "turn_not_located",
            f"template {self.name}: rendered {len(rendering.marks)} {{% generation %}} blocks for {len(answers)} "
            f"assistant turns (messages{answers}); mark every assistant turn, or remove the marks",
        )

    def _require_agreement(self, located: Ranges, marked: Ranges, turns: Sequence[int]) -> None:
        for k, (start, stop), (first, last) in zip(turns, located, marked, strict=True):
            if first != start or last < stop:
                raise DataError(
                    "turn_not_located",
                    f"template {self.name}: messages[{k}]: its {{% generation %}} block covers characters {first:,} to "
                    f"{last:,}, but after its prompt the model writes {start:,} to {stop:,}; mark what the model "
                    "writes, or remove the marks",
                )

    def _require_written(self, message: Message, k: int, answer: str) -> None:
        """Check that the template wrote the reasoning and the calls of a turn.

        What it never writes may be in the answer by chance, so the texts alone do not decide.
        """
        reasoning = reasoning_of(message)
        never = self._reasoning_form is ReasoningForm.NONE and bool(message.reasoning)
        if reasoning and (never or "".join(reasoning.split()) not in "".join(answer.split())):
            raise DataError(
                "reasoning_not_written",
                f"template {self.name}: messages[{k}] has reasoning, and the template has no place for it; "
                "set `reasoning: drop`, or use a template with a place for reasoning",
            )
        for call in message.tool_calls:
            if self._call_form is None or "".join(call.name.split()) not in "".join(answer.split()):
                raise Reject(
                    "calls_not_written",
                    f"messages[{k}] calls {call.name!r}, and the template {self.name} does not write tool calls",
                )

    def _is_read_alike(self, rendering: Rendering, breaker: str) -> bool:
        """Return whether tokens of the prompts do not depend on where a trained turn starts.

        A turn is encoded from its own start, as the model writes it; later prompts are encoded as a whole.
        """
        return all(
            self._splits_at(self._tail(text[:start].replace(breaker, "")), text[start:stop].replace(breaker, ""))
            for text, ranges, turn in rendering.samples
            if turn is None
            for start, stop in self._inner(text, ranges)
        )

    @staticmethod
    def _inner(text: str, ranges: Ranges) -> Ranges:
        """Return the ranges that a later prompt contains."""
        return ranges[:-1]

    def _tail(self, before: str) -> str:
        """Return the end of a text, from its last control token on."""
        ends = self._encoder.control_pattern.finditer(before, max(0, len(before) - 64))
        return before[max((match.end() for match in ends), default=0) :][-32:]

    def _splits_at(self, tail: str, after: str) -> bool:
        """Return whether no token would reach from the end of one text, its `_tail`, into the text after it."""
        if not tail or not after or self._encoder.leading_space != "none":
            return True
        match = self._encoder.control_pattern.search(after, 0, 64)
        head = after[: match.start() if match else 32]
        if not head:
            return True
        if tail.endswith("\n") and not head[0].isspace() and self._newlines_end_tokens:
            key = (tail, head[0])
            if key not in self._splits:
                self._splits[key] = self._is_split(tail, head[0])
            return self._splits[key]
        return self._is_split(tail, head)

    def _is_split(self, tail: str, head: str) -> bool:
        encoded = self._encoder.encode([tail + head, tail, head])
        first = encoded.offsets[1]
        return bool(np.array_equal(encoded.ids[:first], encoded.ids[first:]))

    @cached_property
    def _newlines_end_tokens(self) -> bool:
        """Return whether only white space follows a line end within a token: then none reaches into a word after it."""
        pieces = map(self._encoder.token_bytes, range(self._encoder.vocab_size))
        return not any(piece.rpartition(b"\n")[2].strip() for piece in pieces if b"\n" in piece)

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
