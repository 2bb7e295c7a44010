"""Render Jinja templates in a sandboxed child process.

Its time and memory are limited, its date is fixed, and it has no randomness.

    Renderer.render_all(jobs) ──JSON──▶ forked child: compile once, render, locate turns
      Rendering or problem ◀──JSON, each── text, marks, samples │ the problem

A template is distributed with a tokenizer, by somebody else, and treated as untrusted data: the operating system limits
the memory and CPU time of the child that renders it, and the child writes no file and replies in JSON. A fork takes
10 ms. Many conversations are sent at once and answered one by one, so that the problem of one is known to be its own.

The child exits with its parent: it reads the end of its pipe or reaches its CPU time limit.
"""

from __future__ import annotations

import contextlib
import gc
import math
import multiprocessing
import os
import re
import resource
import select
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from multiprocessing.connection import Connection
from multiprocessing.util import Finalize
from typing import Any, Literal, NamedTuple, NoReturn

import orjson
from jinja2.exceptions import SecurityError, TemplateError

from tasks.core.errors import DataError, Reject
from tasks.templates.jinja.environment import ChatTemplate, chat_environment, other_file
from tasks.templates.jinja.locate import Located, NotLocated, Range, locate, prefix_ranges
from tasks.templates.jinja.traced import Trace, can_be_traced, prepare_tracing, traced

# Limit of CPU time, which does not depend on the load of the machine. All renderings of one conversation take a
# millisecond; a template that takes this long loops.
SECONDS = 6.0
# The parent waits this many times as long in wall time, in case the child is blocked without using CPU.
PATIENCE = 20
# Bytes that the child may allocate in addition to what it has when forked. A conversation has at most 16 MB
# (max_record_bytes), and a rendering holds a few copies of it.
MEMORY = 512 << 20
# Limit of one rendered text: a template writes its input about once, and an encoder takes up to 50 bytes per character.
MOST_CHARACTERS = 16 << 20
# Limit of turns × (messages + KB). Locating a turn takes two renderings, and each takes about 1 µs per message and 1 µs
# per KB, so this is 4 s or more.
MOST_WORK = 2_000_000

_TRIAL = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]

# Bytes of conversations that are sent to the child at once: enough that waiting for it costs nothing.
CALL = 1 << 17

# How turns are located: see `locate`. "others" are the ranges of turns that are not trained on, for train_on: all.
Method = Literal["auto", "together", "apart", "others"]


# Whether placeholders are traced, and whether with white space around them.
Tracing = Literal["", "bare", "spaced"]


class Job(NamedTuple):
    """A conversation to render, and the numbers of the messages to locate in it.

    `marks` asks for the ranges of {% generation %} blocks. `trace` records what the template does to values that are
    placeholders, which have white space around them if it is "spaced".
    """

    messages: list[Any]
    tools: Any
    marks: bool
    turns: list[int]
    method: Method
    trace: Tracing = ""


class Rendering(NamedTuple):
    """A rendered conversation.

    `marks` are the ranges of its {% generation %} blocks. `lost` is a turn that could not be located, and why; then
    there are no samples. `unprompted`: the template has no prompt for the first message, so that no model writes it,
    and it was not located. `unusual` is the result of a `Trace`, if one was asked for.
    """

    text: str
    marks: list[Range]
    samples: list[Located]
    lost: tuple[int, str] | None
    unprompted: bool
    unusual: list[list[Any]] | None = None


class Renderer:
    """A template compiled in a child process.

    Raises DataError if it cannot be used. The template sees `constants` (special tokens and options) by name, and the
    date `today`. `ends` matches a control token.
    """

    def __init__(self, name: str, source: str, constants: Mapping[str, Any], today: datetime, ends: str = r"(?!)"):
        self.name = name
        self._serve: Callable[[Connection], None] = lambda pipe: _serve(pipe, source, constants, today, ends)
        self._owner = 0
        self._end: Any = None
        try:
            self._start()
            self.render(Job(_TRIAL, None, False, [], "others"))  # reports an unusable template before any work is done
        except Reject as reject:  # the template may refuse the trial conversation and still accept others
            if reject.reason == "too_long_text":
                self.close()
                raise DataError("bad_template", f"template {name}: {reject.message}") from None
        except BaseException:
            self.close()
            raise

    def render(self, job: Job) -> Rendering:
        """Render one conversation and locate its turns.

        Raises Reject if the template refuses this conversation or fails on it, DataError if it must not be used at all.
        """
        [found] = self.render_all([job])
        if isinstance(found, Rendering):
            return found
        try:
            raise found
        finally:
            del found  # its traceback refers to this frame: together they would keep the child alive

    def render_all(self, jobs: Sequence[Job]) -> Iterator[Rendering | Reject | DataError]:
        """Render conversations and locate their turns. What `render` would raise takes the place of its rendering.

        The child goes on while its answers are used. Nothing is rendered after a DataError, which takes all further
        places.
        """
        error: DataError | None = None
        for call in _calls(jobs):
            answers = self._answers([request for request in call if isinstance(request, bytes)])
            for request in call:
                if error:
                    yield error
                    continue
                if isinstance(request, Reject):
                    yield request
                    continue
                try:
                    answer: Rendering | Reject | DataError = next(answers)
                except DataError as problem:
                    answer = error = problem.with_traceback(None)
                yield answer

    def close(self) -> None:
        """Kill the child. The next rendering starts another one."""
        if self._end is not None:
            self._end()
        self._end, self._owner = None, 0

    def _start(self) -> None:
        self.close()
        self._pipe, theirs = multiprocessing.Pipe()
        # A Ctrl-C that reaches the child before it ignores interrupts would print a traceback.
        masked = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
        try:
            child = os.fork()
            if not child:
                _in_child(theirs, self._serve, masked)
            self._owner = os.getpid()
            # Runs when this object is deleted and when this process exits, also if it is one of Luigi's workers.
            self._end = Finalize(self, _end, (child, self._pipe), exitpriority=0)
            self._child = child
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, masked)
        theirs.close()
        self._poll = select.poll()
        self._poll.register(self._pipe.fileno(), select.POLLIN)
        self._reply("compiling")

    def _answers(self, requests: Sequence[bytes]) -> Iterator[Rendering | Reject]:
        """Send requests, and yield the answer to each as it comes. Raises DataError."""
        if self._owner != os.getpid():
            self._start()
        left = len(requests)
        answer: Rendering | Reject
        try:
            for number in range(len(requests)):
                try:
                    text, marks, samples, lost, unprompted, unusual = self._reply(
                        "rendering one conversation", requests if not number else ()
                    )
                    found = [Located(*sample) for sample in samples]
                    answer = Rendering(text, marks, found, lost, unprompted, unusual)
                except Reject as reject:
                    answer = reject.with_traceback(None)
                left -= 1
                yield answer
        finally:
            if left:  # the next replies would answer these requests
                self.close()

    def _reply(self, doing: str, requests: Sequence[bytes] = ()) -> Any:
        """Return the child's next reply, after sending requests. Raises Reject and DataError if it is a problem."""
        reply, late = None, False
        try:
            if requests:
                self._pipe.send_bytes(b"[%s]" % b",".join(requests))
            late = not self._poll.poll(SECONDS * PATIENCE * 1000)
            if late:
                raise EOFError
            reply = orjson.loads(self._pipe.recv_bytes())
        except (EOFError, OSError):
            how = self._status()
            if not late and how != "SIGXCPU":
                raise DataError(
                    "template_died", f"template {self.name}: killed the process that rendered it ({how})"
                ) from None
            raise DataError(
                "template_loops", f"template {self.name}: still {doing} after {SECONDS:g} s; it loops"
            ) from None
        finally:
            if reply is None:  # on any error: the next reply would answer this request
                self.close()
        kind, value = reply
        if kind == "done":
            return value
        self._fail(kind, value)

    def _status(self) -> str:
        """Wait for the child and describe how it ended."""
        self._end.cancel()
        self._end = None
        code = _end(self._child, self._pipe)
        return signal.Signals(-code).name if code < 0 else f"exit code {code}"

    def _fail(self, kind: str, value: str) -> NoReturn:
        if kind == "refused":
            raise Reject("template_refused", f"the template refuses the conversation: {value}")
        if kind == "failed":
            raise Reject("template_failed", f"the template fails on the conversation: {value}")
        if kind == "long":
            raise Reject("too_long_text", f"the template writes more than {MOST_CHARACTERS:,} characters")
        problem = {
            "invalid": f"not valid Jinja: {value}",
            "includes": f"{value}; a template must be a single file: insert the text of that file",
            "unsafe": f"must not access Python internals: {value}",
            "memory": f"needs more than {MEMORY >> 20} MiB of memory for one conversation",
        }
        raise DataError("bad_template", f"template {self.name}: {problem[kind]}")


def _calls(jobs: Sequence[Job]) -> Iterator[list[bytes | Reject]]:
    """Yield requests to send at once, about CALL bytes; a job that is too much has a Reject instead."""
    call: list[bytes | Reject] = []
    size = 0
    for job in jobs:
        request = orjson.dumps([*job])
        turns, count = len(job.turns), len(job.messages)
        if turns * (count + len(request) // 1000) > MOST_WORK:
            what = f"{turns:,} turns to locate in {count:,} messages ({len(request):,} bytes)"
            call.append(Reject("too_many_turns", f"{what} are too many, at two renderings per turn"))
            continue
        call.append(request)
        size += len(request)
        if size >= CALL:
            yield call
            call, size = [], 0
    yield call


def _end(child: int, pipe: Connection) -> int:
    """Kill the child if it is alive, leave no zombie, and return its exit code."""
    pipe.close()
    try:
        os.kill(child, signal.SIGKILL)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    except (ProcessLookupError, ChildProcessError):  # other code has waited for all children
        return 0


# -- in the child -----------------------------------------------------------------------------------------------------

_OUT_OF_MEMORY = orjson.dumps(["memory", ""])


class _Problem(Exception):
    """A problem to send to the parent: a kind of `Renderer._fail` and a text."""


def _in_child(pipe: Connection, serve: Callable[[Connection], None], masked: set[int | signal.Signals]) -> NoReturn:
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
            _limit(resource.RLIMIT_AS, int(file.read().split()[0]) * resource.getpagesize() + MEMORY)
        serve(pipe)
    finally:
        os._exit(0)


def _limit(kind: int, value: int) -> None:
    hard = resource.getrlimit(kind)[1]
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(kind, (value, value))


def _serve(pipe: Connection, source: str, constants: Mapping[str, Any], today: datetime, ends: str) -> None:
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    template: ChatTemplate | None = None
    tracing: tuple[ChatTemplate, bool] | None = None
    pattern, eos = re.compile(ends), constants.get("eos_token", "")
    requests: list[Any] = [None]
    while True:
        seconds = math.ceil(time.process_time() + SECONDS)
        resource.setrlimit(resource.RLIMIT_CPU, (seconds if hard < 0 else min(seconds, hard), hard))
        try:
            if template is None:
                template, value = _compile(source, constants, today), None
            elif spaced := requests[-1].pop():
                if tracing is None:
                    environment = chat_environment(today)
                    prepare_tracing(environment)
                    template_of_traces = ChatTemplate(environment, source, constants, remembers=False)
                    tracing = template_of_traces, can_be_traced(environment, source)
                trace = Trace()
                value = _rendering(_Tracing(tracing[0], trace, spaced == "spaced"), pattern, eos, *requests[-1])
                value = (*value, trace.result() if tracing[1] else None)
            else:
                template.start(*requests[-1][:2])
                value = (*_rendering(template, pattern, eos, *requests[-1]), None)
            reply = orjson.dumps(["done", value])
        except _Problem as problem:
            kind, text = problem.args
            reply = orjson.dumps([kind, text[:1000].encode("utf-8", "replace").decode()])
        except orjson.JSONEncodeError as error:
            reply = orjson.dumps(["failed", f"its output is not valid text: {error}"])
        except MemoryError:
            reply = _OUT_OF_MEMORY
        pipe.send_bytes(reply)
        if template is None:
            return
        requests.pop()
        value = reply = None  # type: ignore[assignment]
        try:
            requests = requests or orjson.loads(pipe.recv_bytes())[::-1]
        except EOFError:
            return


class _Tracing:
    """A template that traces what it renders. Turns are located in the renderings without a trace of it."""

    def __init__(self, template: ChatTemplate, trace: Trace, spaced: bool):
        self._template, self._trace, self._spaced = template, trace, spaced

    def render(self, messages: list[Any], tools: Any, prompt: bool, marks: bool = False) -> tuple[str, list[Range]]:
        messages, tools = traced(messages, self._trace, self._spaced), traced(tools, self._trace, self._spaced)
        return self._template.render(messages, tools, prompt, marks)


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


# The first message alone is trained on.
NO_PROMPT = "; it writes no prompt before messages[0], the only turn to train on: add a message of the user before it"


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
        if len(text) > MOST_CHARACTERS:
            raise _Problem("long", "")
        return text, marks

    def text_of(messages: list[Any], prompt: bool) -> str:
        return render(messages, prompt)[0]

    whole, marks = render(messages, False, marked)
    is_first = method != "others" and len(turns) > 1 and turns[0] == 0
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
    """Return whether the first message of a conversation continues the prompt that a template writes without any."""
    try:
        locate(render, messages, "", [0], "apart", ends)
    except NotLocated:
        return False
    except _Problem as problem:
        if problem.args[0] in ("refused", "failed"):
            return False
        raise
    return True
