"""Serve requests in the child process of a template (see `renderer`)."""

from __future__ import annotations

import contextlib
import gc
import math
import os
import re
import resource
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from multiprocessing.connection import Connection
from typing import Any, NoReturn

import orjson
from jinja2.exceptions import SecurityError, TemplateError

from tasks.templates.jinja.composed.pieces import Expected, Gaps, LeftGap, Piece, State, Writer
from tasks.templates.jinja.environment import ChatTemplate, chat_environment, other_file
from tasks.templates.jinja.flagged import NotLocated, Range
from tasks.templates.jinja.locate import MOST_OF_MARKER, Located, common_start, locate, prefix_ranges
from tasks.templates.jinja.sandbox import limits
from tasks.templates.jinja.sandbox.requests import Method
from tasks.templates.jinja.traced import ANY_GAP, GAP_OF_PIECE, Trace, can_be_traced, prepare_tracing, traced

# The maximum number of renderings of placeholders that are kept, one for each conversation that is rendered together.
AT_ONCE = 64

# Replies are sent together until they have so many bytes, or until so many seconds have passed: each message wakes the
# parent, which takes as long as a rendering.
REPLIES = 1 << 15
PAUSE = 0.02

_OUT_OF_MEMORY = orjson.dumps(["memory", ""])


class _Problem(Exception):
    """A problem to send to the parent, as a kind of `Renderer._value_of` and a text."""


def run_in_child(pipe: Connection, serve: Callable[[Connection], None], masked: set[int | signal.Signals]) -> NoReturn:
    """Release everything inherited, serve requests, and exit silently.

    The parent's exit handlers do not run.
    """
    try:
        gc.freeze()  # objects belong to the parent; collecting them here could remove its files
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, masked)
        nothing = os.open(os.devnull, os.O_RDWR)
        for standard in (0, 1, 2):
            os.dup2(nothing, standard)
        os.closerange(3, pipe.fileno())  # locks and the pipes of other children
        os.closerange(pipe.fileno() + 1, os.sysconf("SC_OPEN_MAX"))
        _limit(resource.RLIMIT_CORE, 0)
        _limit(resource.RLIMIT_FSIZE, 0)
        with contextlib.suppress(OSError), open("/proc/self/statm", encoding="ascii") as file:  # absent on macOS
            _limit(resource.RLIMIT_AS, int(file.read().split()[0]) * resource.getpagesize() + limits.MEMORY)
        serve(pipe)
    finally:
        os._exit(0)


def _limit(kind: int, value: int) -> None:
    hard = resource.getrlimit(kind)[1]
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(kind, (value, value))


def serve(pipe: Connection, source: str, constants: Mapping[str, Any], today: datetime, ends: str) -> None:
    """Compile a template, then answer lists of requests until the pipe is closed.

    A message has the replies to one or several requests, as lines of JSON.
    """
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    child: _Child | None = None
    requests: list[Any] = [None]
    replies, size, since = list[bytes](), 0, 0.0
    while True:
        seconds = math.ceil(time.process_time() + limits.SECONDS)
        resource.setrlimit(resource.RLIMIT_CPU, (seconds if hard < 0 else min(seconds, hard), hard))
        try:
            if child is None:
                child, value = _Child(source, constants, today, ends), None
            else:
                value = child.answer(*requests[-1])
            reply = orjson.dumps(["done", value])
        except _Problem as problem:
            kind, text = problem.args
            reply = orjson.dumps([kind, text[:1000].encode("utf-8", "replace").decode()])
        except orjson.JSONEncodeError as error:
            reply = orjson.dumps(["failed", f"its output is not valid text: {error}"])
        except MemoryError:
            reply = _OUT_OF_MEMORY
        replies.append(reply)
        requests.pop()
        size += len(reply)
        value = reply = None  # type: ignore[assignment]
        if requests and size < REPLIES and time.monotonic() < since + PAUSE:
            continue
        pipe.send_bytes(b"\n".join(replies))  # a single reply, which may be large, is not copied
        if child is None:
            return
        replies.clear()
        try:
            if not requests:
                requests = orjson.loads(pipe.recv_bytes())[::-1]
        except EOFError:
            return
        size, since = 0, time.monotonic()


class _Child:
    """A template, with the variants of it that are compiled on first use.

    Raises _Problem if the template cannot be used.
    """

    def __init__(self, source: str, constants: Mapping[str, Any], today: datetime, ends: str):
        self._source, self._constants, self._today = source, constants, today
        self._ends, self._eos = re.compile(ends), constants.get("eos_token", "")
        self._template = _compile(source, constants, today)
        self._tracings: dict[bytes, _Tracing] = {}

    def answer(self, messages: list[Any], *job: Any) -> Any:
        """Return the answer to a request.

        For a Job, `job` has its other fields, and the answer is a Rendering. For Pieces, `messages` are the pieces,
        `job` is empty, and the answer has their results.
        """
        if not job:
            return [[self._written(piece) for piece in messages]]
        tools, *others, trace, values = job
        if not trace:
            self._template.start(messages, tools)
            return self._located(self._template, messages, tools, *others)
        if trace == "pieces":
            return self._composed(messages, tools, values, *others)
        found = Trace()
        rendering = self._located(_Tracing(self._traced, found, trace == "spaced"), messages, tools, *others)
        return *rendering, found.result() if self._can_be_traced else None, ()

    def _composed(self, messages: list[Any], tools: Any, values: Any, *others: Any) -> Any:
        """Return the rendering of placeholders with gaps for pieces.

        Turns of the same placeholders are often located a second time with the method "apart". They are rendered once.
        """
        key = orjson.dumps([messages, tools])
        if key not in self._tracings:
            if len(self._tracings) >= AT_ONCE:
                self._tracings.clear()
            template, gaps = self._with_gaps
            self._tracings[key] = _Tracing(template, Trace(), False, gaps, values)
        tracing = self._tracings[key]
        rendering = self._located(tracing, messages, tools, *others)
        unusual = tracing.trace.result() if self._can_be_traced else None
        return *rendering, unusual, tracing.pieces, tracing.parting_at_pieces()

    def _located(self, template: ChatTemplate | _Tracing, *job: Any) -> Any:
        return _rendering(template, self._ends, self._eos, *job)

    @cached_property
    def _traced(self) -> ChatTemplate:
        environment = chat_environment(self._today)
        prepare_tracing(environment)
        return ChatTemplate(environment, self._source, self._constants, remembers=False)

    @cached_property
    def _with_gaps(self) -> tuple[ChatTemplate, Gaps]:
        environment: Any = chat_environment(self._today)
        prepare_tracing(environment)
        environment.memo = gaps = Gaps(self._writer)
        template = ChatTemplate(environment, self._source, self._constants)
        environment.remembered = gaps.left_for(environment.remembered)
        return template, gaps

    @cached_property
    def _writer(self) -> Writer:
        return Writer(chat_environment(self._today), self._source, self._constants)

    @cached_property
    def _can_be_traced(self) -> bool:
        return can_be_traced(chat_environment(self._today), self._source)

    def _written(self, piece: Piece) -> tuple[str, State] | None:
        """Return the text that a piece writes, and the values that it sets.

        Return None if the piece fails. The whole conversation is then rendered, which reports the problem.
        """
        try:
            text, state = self._writer.write(piece)
        except MemoryError:
            raise
        except Exception:  # a template can raise any exception of Python
            return None
        return (text, state) if len(text) <= limits.MOST_CHARACTERS else None


class _Tracing:
    """A template that traces its operations on placeholders.

    Its renderings are plain texts, so that locating turns in them is not traced. `gaps` leaves gaps for pieces. The
    messages of every rendering must be the first messages of one conversation.
    """

    def __init__(
        self, template: ChatTemplate, trace: Trace, spaced: bool, gaps: Gaps | None = None, values: Sequence[Any] = ()
    ):
        self.trace, self._left = trace, dict[bytes, LeftGap]()
        self._template, self._spaced, self._gaps, self._values = template, spaced, gaps, values
        self._known: dict[tuple[int, bool, bool], tuple[str, list[Range]]] = {}
        self._messages: list[Any] = []
        self._tools: Any = None

    def render(self, messages: list[Any], tools: Any, prompt: bool, marks: bool = False) -> tuple[str, list[Range]]:
        key = len(messages), prompt, marks
        if key not in self._known:
            Trace.last = self.trace
            if len(messages) > len(self._messages):
                self._messages = traced(messages, self.trace, self._spaced)
                self._tools = traced(tools, self.trace, self._spaced)
            if self._gaps:
                self._gaps.watch(self.trace, self._values, self._left)
                if self._gaps.watched is not self._messages:
                    self._gaps.watched = self._messages
                    self._gaps.start(self._messages, self._tools)
            self._known[key] = self._template.render(self._messages[: len(messages)], self._tools, prompt, marks)
        return self._known[key]

    @property
    def pieces(self) -> list[Expected]:
        return [gap.expected for gap in self._left.values()]

    def parting_at_pieces(self) -> list[tuple[str, str]]:
        """Return pairs of texts where two renderings diverge at the gap of a piece.

        Turns are located where renderings diverge. A piece could start with the text of the other rendering, such as a
        line end before a call. The renderings would then diverge later.
        """
        texts = {(count, prompt): text for (count, prompt, _), (text, _) in self._known.items()}
        whole = texts[max(texts)[0], False]
        pairs = {(text, whole) for text in texts.values()}
        pairs |= {(text, texts.get((count + 1, False), whole)) for (count, prompt), text in texts.items() if prompt}
        return sorted({found for pair in pairs if (found := _parting_at_piece(*pair))})


def _parting_at_piece(*texts: str) -> tuple[str, str] | None:
    place = common_start(*texts)
    if place == min(map(len, texts)):
        return None
    one, other = (_at(place, text) for text in texts)
    return (one, other) if GAP_OF_PIECE.match(one) or GAP_OF_PIECE.match(other) else None


def _at(place: int, text: str) -> str:
    """Return the gap at a place of a text, or the text from there to the next gap."""
    gaps = (gap for gap in ANY_GAP.finditer(text) if gap.start() <= place < gap.end())
    return next((gap.group() for gap in gaps), text[place : place + MOST_OF_MARKER].partition("\0")[0])


def _compile(source: str, constants: Mapping[str, Any], today: datetime) -> ChatTemplate:
    environment = chat_environment(today)
    try:
        template = ChatTemplate(environment, source, constants)
        other = other_file(environment, source)
    except MemoryError:
        raise
    except Exception as error:  # from Jinja, or from Python's compiler, which compiles the code that Jinja generates
        raise _Problem("invalid", str(error)) from None
    if other is not None:
        raise _Problem("includes", f"line {other[0]}: {{% {other[1]} %}} reads another file")
    return template


# Added to a problem if the first message is the only turn to train on.
NO_PROMPT = "; it writes no prompt before messages[0], which is the only turn to train on: add a user message before it"


def _rendering(
    template: ChatTemplate | _Tracing,
    ends: re.Pattern[str],
    eos: str,
    messages: list[Any],
    tools: Any,
    marked: bool,
    turns: list[int],
    method: Method,
) -> Any:
    """Render a conversation and locate turns."""

    def render(messages: list[Any], prompt: bool, marked: bool = False) -> tuple[str, list[Range]]:
        try:
            text, marks = template.render(messages, tools, prompt, marked)
        except SecurityError as error:
            raise _Problem("unsafe", str(error)) from None
        except TemplateError as error:
            raise _Problem("refused", f"{error}{NO_PROMPT * (not messages)}") from None
        except MemoryError:
            raise
        except Exception as error:  # a template can raise any exception of Python
            raise _Problem("failed", f"{error}{NO_PROMPT * (not messages)}") from None
        if len(text) > limits.MOST_CHARACTERS:
            raise _Problem("long", "")
        return text, marks

    def text_of(messages: list[Any], prompt: bool) -> str:
        return render(messages, prompt)[0]

    whole, marks = render(messages, False, marked)
    answers = [k for k in turns if messages[k]["role"] == "assistant"]
    is_first = method != "others" and len(answers) > 1 and answers[0] == 0
    unprompted = is_first and not _is_prompted(text_of, messages, ends)
    turns = turns[unprompted:]
    try:
        if method == "others":
            samples = [Located(whole, prefix_ranges(text_of, messages, whole, turns), None)]
        else:
            samples = locate(text_of, messages, whole, turns, method, ends, eos)
    except NotLocated as lost:
        return whole, marks, [], (lost.turn, lost.problem), unprompted
    return whole, marks, [tuple(sample) for sample in samples], None, unprompted


def _is_prompted(render: Callable[[list[Any], bool], str], messages: list[Any], ends: re.Pattern[str]) -> bool:
    """Return whether the first message continues the prompt of an empty conversation."""
    try:
        locate(render, messages, "", [0], "apart", ends)
    except NotLocated:
        return False
    except _Problem as problem:
        if problem.args[0] in ("refused", "failed"):
            return False
        raise
    return True
