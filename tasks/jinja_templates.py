"""Chat templates in Jinja: the tokenizer's own, or a file. Conversation → spans.

    messages ─mark─▶ messages whose control strings are broken ─render─▶ one text ─split─▶ control tokens and text
                                                                 └─locate─▶ which characters are trained on

Rendering is transformers' (its sandbox, its filters), so that the text is the one seen in use. Two things are ours:

- Content stays content. A private character is put into every control string that a message contains, and behind
  or before every piece of one that a neighbouring field could complete (also where the template takes the white
  space around it away). What is still whole after rendering was written by the template; the private character is
  then taken out.
- Trained turns are located. With `{% generation %}` marks, by these. Without, by the prefix property: the rendering
  of messages[:k] with the generation prompt must be a prefix of that of messages[:k+1], and this of the whole;
  what stands between is turn k. Where that does not hold the run fails and names the turn, since any other guess
  would be silently wrong labels. White space behind the turn's last control token is not trained.
"""

from __future__ import annotations

import json
import re
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from functools import cached_property
from itertools import chain, pairwise
from typing import Any

import orjson

from tasks.conversations import Conversation, Message
from tasks.encoders import Encoder
from tasks.errors import DataError, PartMissing, Reject, UsageError
from tasks.templates import TEXT, Span, TrainOn, full_text, plain_text

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_PRIVATE = (range(0xE000, 0xF900), range(0xF0000, 0xFFFFE), range(0x100000, 0x10FFFE))

# One rendering takes a millisecond; a template that takes this long loops.
SECONDS = 8.0

Ranges = list[tuple[int, int]]


class JinjaTemplate:
    """A Jinja chat template, bound to a tokenizer. `today` is the date that the template sees, as YYYY-MM-DD."""

    markers_as_text: tuple[str, ...] = ()

    def __init__(self, name: str, source: str, encoder: Encoder, train_on: TrainOn, today: str):
        self.name = name
        self._source = source
        self._encoder = encoder
        self._all = train_on == "all"
        self._marked = _GENERATION.search(source) is not None
        self._renderer, self._globals = _renderer(name, source)
        try:
            self._today = datetime.fromisoformat(today)
        except ValueError as error:
            raise UsageError(f"template_date: {today}: {error}") from None
        self._special = {
            key: encoder.control_strings.get(token, "")
            for key, token in zip(
                ("bos_token", "eos_token", "pad_token"), (encoder.bos_id, encoder.eos_id, encoder.pad_id), strict=True
            )
            if token is not None
        }

    def spans(self, conversation: Conversation, trained: Sequence[bool]) -> list[Span]:
        if conversation.messages[0].role == "text":
            return plain_text(conversation, trained, self._encoder)
        messages: list[Any] = [_as_openai(message) for message in conversation.messages]
        tools: Any = [orjson.loads(tool) for tool in conversation.tools] or None
        try:
            breaker = self._breaker(messages, tools)
            messages, tools = self._break(messages, breaker), self._break(tools, breaker)
        except (orjson.JSONEncodeError, RecursionError):
            raise Reject("too_deep", "the arguments of a tool call, or a tool, are nested too deeply") from None
        text, marks = self._render(messages, tools, marks=self._marked)
        ranges = self._trained_ranges(text, marks, messages, tools, trained)
        return self._split(text, ranges, breaker)

    # Rendering

    def _render(self, messages: list[Any], tools: Any, prompt: bool = False, marks: bool = False) -> tuple[str, Ranges]:
        from jinja2.exceptions import SecurityError, TemplateError

        # transformers keeps the compiled template by its source, for all that use it: the clock is set each time.
        self._globals["strftime_now"] = self._today.strftime
        try:
            with _time_limit(self.name):
                texts, found = self._renderer(
                    [messages],
                    tools=tools,
                    chat_template=self._source,
                    return_assistant_tokens_mask=marks,
                    add_generation_prompt=prompt,
                    **self._special,
                )
        except SecurityError as error:
            raise DataError(f"template {self.name}: reaches for what a template must not: {error}") from None
        except TemplateError as error:
            raise Reject("template_refused", f"the template refuses it: {error}") from None
        except MemoryError:
            raise DataError(f"template {self.name}: takes more memory than there is") from None
        except (TypeError, ValueError, KeyError, AttributeError, ArithmeticError, RecursionError) as error:
            raise Reject("template_failed", f"the template fails on it: {error}") from None
        return texts[0], found[0] if found else []

    # Content stays content

    @cached_property
    def _pieces(self) -> tuple[frozenset[str], frozenset[str], frozenset[str]]:
        """Proper beginnings, endings and insides of the control strings."""
        strings = self._encoder.controls
        starts = frozenset(s[:i] for s in strings for i in range(1, len(s)))
        ends = frozenset(s[i:] for s in strings for i in range(1, len(s)))
        short = [s for s in strings if len(s) < 64]
        insides = frozenset(s[i:j] for s in short for i in range(1, len(s)) for j in range(i + 1, len(s)))
        return starts, ends, insides

    def _breaker(self, *values: Any) -> str:
        """A private character that neither the conversation nor the template contains, in itself or escaped."""
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
            # Our own keys are known words; the value of a message's role is one of ROLES.
            return {
                self._break_text(key, breaker) if key not in _OUR_KEYS else key: self._break(
                    item, breaker, trusted=key == "role" and item in _ROLE_WORDS
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
        starts, ends, insides = self._pieces
        longest = max(map(len, self._encoder.controls), default=0)
        before = any(core[:k] in ends for k in range(1, min(longest, len(core) + 1)))
        behind = core in insides or any(core[-k:] in starts for k in range(1, min(longest, len(core) + 1)))
        left, right = text[: len(text) - len(text.lstrip())], text[len(text.rstrip()) :]
        return left + breaker * before + self._break_controls(core, breaker) + breaker * behind + right

    def _break_controls(self, text: str, breaker: str) -> str:
        """Each control string broken behind its first character, also within another; of one character, set apart."""
        pieces: list[str] = []
        end = 0
        while match := self._encoder.control_pattern.search(text, end):
            alone = len(match.group()) == 1
            pieces += [text[end : match.start()], breaker * alone, text[match.start()], breaker]
            end = match.start() + 1
        return "".join(pieces) + text[end:] if pieces else text

    # Labels

    def _trained_ranges(
        self, text: str, marks: Ranges, messages: list[Any], tools: Any, trained: Sequence[bool]
    ) -> Ranges:
        if self._all:
            untrained = [self._turn(text, messages, tools, k, prompt=False) for k, t in enumerate(trained) if not t]
            edges = [0, *(edge for turn in untrained for edge in turn), len(text)]
            return list(zip(edges[::2], edges[1::2], strict=True))
        if self._marked:
            answers = [k for k, message in enumerate(messages) if message["role"] == "assistant"]
            if len(answers) == len(marks):
                return [turn for k, turn in zip(answers, marks, strict=True) if trained[k]]
            raise DataError(
                f"template {self.name}: {len(marks)} {{% generation %}} blocks were rendered for {len(answers)} "
                f"assistant turns (messages{answers}); they must be as many, or the marks be left out"
            )
        return [self._turn(text, messages, tools, k, prompt=True) for k, t in enumerate(trained) if t]

    def _turn(self, text: str, messages: list[Any], tools: Any, k: int, prompt: bool) -> tuple[int, int]:
        """Characters [start, stop) of messages[k] in `text`."""
        before = self._render(messages[:k], tools, prompt=prompt)[0] if k or prompt else ""
        through = self._render(messages[: k + 1], tools)[0] if k + 1 < len(messages) else text
        if not (through.startswith(before) and text.startswith(through)):
            what = "with the generation prompt " if prompt else ""
            raise DataError(
                f"template {self.name}: messages[{k}] ({messages[k]['role']}) cannot be located: the rendering of "
                f"messages[:{k}] {what}is no prefix of that of messages[:{k + 1}], or this not of the whole; add "
                "{% generation %} marks to the template or take a built-in one"
            )
        stop = len(through)
        last = max((m.end() for m in self._encoder.control_pattern.finditer(text, len(before), stop)), default=0)
        if last and not text[last:stop].strip():
            stop = last
        return len(before), stop

    def _split(self, text: str, ranges: Ranges, breaker: str) -> list[Span]:
        """Cut the rendered text at control tokens and at the edges of what is trained."""
        spans: list[Span] = []
        edges = sorted({edge for turn in ranges for edge in turn})
        escaped = _escaped(breaker)

        def is_trained(position: int) -> bool:
            return any(start <= position < stop for start, stop in ranges)

        def add(start: int, stop: int) -> None:
            cuts = [start, *(edge for edge in edges if start < edge < stop), stop]
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


_OUR_KEYS = {"role", "content", "name", "tool_calls", "tool_call_id", "id", "type", "function", "arguments"}
_ROLE_WORDS = {"system", "user", "assistant", "tool"}


def _as_openai(message: Message) -> dict[str, Any]:
    """The message in OpenAI's form, which chat templates are written for."""
    found: dict[str, Any] = {"role": message.role, "content": full_text(message)}
    if message.name is not None:
        found["name"] = message.name
    if message.tool_call_id is not None:
        found["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        found["tool_calls"] = [
            {"type": "function", "function": {"name": call.name, "arguments": _arguments(call.arguments)}}
            | ({"id": call.id} if call.id else {})
            for call in message.tool_calls
        ]
    return found


def _arguments(text: str) -> Any:
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        return text


def _escaped(character: str) -> str:
    """The character as JSON in ASCII has it."""
    return json.dumps(character)[1:-1]


@contextmanager
def _time_limit(name: str) -> Iterator[None]:
    """Raises DataError from a rendering that does not end (in the main thread, where signals arrive)."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(*_: object) -> None:
        raise DataError(f"template {name}: was still rendering one conversation after {SECONDS:g} s; it loops")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _renderer(name: str, source: str) -> tuple[Any, dict[str, Any]]:
    """transformers' renderer, and the globals that the template sees. Raises PartMissing or DataError."""
    try:
        from jinja2.exceptions import TemplateError
        from transformers.utils.chat_template_utils import _compile_jinja_template, render_jinja_template

        compiled = _compile_jinja_template(source)
    except ImportError as error:
        raise PartMissing(
            f"the template {name} is written in Jinja and needs transformers ({error}); "
            "install it with: make extras (or pip install --constraint constraints.txt 'packcorpus[train]'), "
            "or take a built-in template"
        ) from None
    except (TemplateError, RecursionError) as error:
        raise DataError(f"template {name}: is not valid Jinja: {error}") from None
    return render_jinja_template, compiled.environment.globals
