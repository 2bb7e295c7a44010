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
from collections.abc import Callable, Mapping
from datetime import datetime
from functools import cached_property
from multiprocessing.connection import Connection
from typing import Any, NoReturn

import orjson
from jinja2.exceptions import SecurityError, TemplateError

from tasks.templates.jinja.engines import limits
from tasks.templates.jinja.engines.environment import ChatTemplate, chat_environment, other_file
from tasks.templates.jinja.engines.rendering import NO_PROMPT, rendered
from tasks.templates.jinja.engines.undefined import names_read
from tasks.templates.jinja.traced import Trace, can_be_traced, prepare_tracing, traced
from tasks.templates.jinja.turns.answers import Failed
from tasks.templates.jinja.turns.flagged import Range

# Replies are sent together until they have so many bytes, or until so many seconds have passed: each message wakes the
# parent, which takes as long as a rendering.
REPLIES = 1 << 15
PAUSE = 0.02

_OUT_OF_MEMORY = orjson.dumps(["memory", ""])


class _Problem(Exception):
    """A problem to send to the parent, as a kind of `Renderer._value_of` and a text."""


class _Refused(_Problem, Failed):
    """A problem of this conversation, not of the template."""


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

    The first message has the names that the template reads. Any other message has the replies to one or several
    requests, as lines of JSON.
    """
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    child: _Child | None = None
    requests: list[Any] = [None]
    replies, size, since = list[bytes](), 0, 0.0
    while True:
        count = len(requests[-1][0]) if requests[-1] else 0
        limit = limits.SECONDS * (1 + count / limits.MORE_MESSAGES)
        seconds = math.ceil(time.process_time() + limit)
        resource.setrlimit(resource.RLIMIT_CPU, (seconds if hard < 0 else min(seconds, hard), hard))
        try:
            if child is None:
                child = _Child(source, constants, today, ends)
                value = child.names_read
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
    """A template, with the variant of it that is traced.

    Raises _Problem if the template cannot be used.
    """

    def __init__(self, source: str, constants: Mapping[str, Any], today: datetime, ends: str):
        self._source, self._constants, self._today = source, constants, today
        self._ends, self._eos = re.compile(ends), constants.get("eos_token", "")
        self._template, self.names_read = _compile(source, constants, today)

    def answer(self, messages: list[Any], tools: Any, *job: Any) -> Any:
        """Return the fields of a Rendering for a Job; `job` has its further fields."""
        marks, turns, method, last, trace, every, options = job
        found = Trace()
        compiled = self._traced if trace else self._template
        compiled.options = options or {}
        template = _Tracing(compiled, found, trace == "spaced") if trace else compiled
        fixed = _Safe(template), self._ends, self._eos
        text, ranges, samples, *lost, _ = rendered(*fixed, messages, tools, marks, turns, method, last, every)
        unusual = found.result() if trace and self._can_be_traced else None
        return text, ranges, [tuple(sample) for sample in samples], *lost, unusual

    @cached_property
    def _traced(self) -> ChatTemplate:
        environment = chat_environment(self._today)
        prepare_tracing(environment)
        return ChatTemplate(environment, self._source, self._constants)

    @cached_property
    def _can_be_traced(self) -> bool:
        return can_be_traced(chat_environment(self._today), self._source)


class _Tracing:
    """A template that traces its operations on placeholders.

    Its renderings are plain texts, so that locating turns in them is not traced.
    """

    def __init__(self, template: ChatTemplate, trace: Trace, spaced: bool):
        self._trace, self._template, self._spaced = trace, template, spaced

    def render(self, messages: list[Any], tools: Any, prompt: bool, marks: bool = False) -> tuple[str, list[Range]]:
        Trace.last = self._trace
        messages, tools = (traced(value, self._trace, self._spaced) for value in (messages, tools))
        return self._template.render(messages, tools, prompt, marks)


class _Safe:
    """A template whose errors are problems."""

    def __init__(self, template: ChatTemplate | _Tracing):
        self._template = template

    def render(self, messages: list[Any], tools: Any, prompt: bool, marks: bool = False) -> tuple[str, list[Range]]:
        try:
            text, ranges = self._template.render(messages, tools, prompt, marks)
        except SecurityError as error:
            raise _Problem("unsafe", str(error)) from None
        except TemplateError as error:
            raise _Refused("refused", f"{error}{NO_PROMPT * (not messages)}") from None
        except MemoryError:
            raise
        except Exception as error:  # a template can raise any exception of Python
            raise _Refused("failed", f"{error}{NO_PROMPT * (not messages)}") from None
        if len(text) > limits.MOST_CHARACTERS:
            raise _Problem("long", "")
        return text, ranges


def _compile(source: str, constants: Mapping[str, Any], today: datetime) -> tuple[ChatTemplate, dict[str, int]]:
    """Return a compiled template and the names that it reads."""
    environment = chat_environment(today)
    try:
        template = ChatTemplate(environment, source, constants)
        tree = environment.parse(source)
        other, names = other_file(tree), names_read(environment, tree)
    except MemoryError:
        raise
    except Exception as error:  # from Jinja, or from Python's compiler, which compiles the code that Jinja generates
        raise _Problem("invalid", str(error)) from None
    if other is not None:
        raise _Problem("includes", f"line {other[0]}: {{% {other[1]} %}} reads another file")
    return template, names
