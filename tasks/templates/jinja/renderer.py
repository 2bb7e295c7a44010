"""Render Jinja templates with Jinja2, in a sandboxed child process.

The child has limited time and memory, a fixed date, and seeded random numbers.

    Renderer.render_all(jobs) ──JSON──▶ forked child: compile once, render, locate turns
      Rendering or problem ◀──lines of JSON── text, marks, samples │ the problem

A template is distributed with a tokenizer by a third party and is treated as untrusted data. The operating system
limits the memory and CPU time of the child that renders it. The child writes no files and replies in JSON. A fork takes
10 ms. Many conversations are sent at once, and the child sends some replies together. If it ends, the conversations
that it has not answered are sent again, one at a time, so that each problem belongs to one conversation.

When the parent exits, the child exits, too, because it reads the end of its pipe or reaches its CPU time limit.
"""

from __future__ import annotations

import contextlib
import gc
import math
import multiprocessing
import os
import re
import resource
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from functools import cached_property, partial
from multiprocessing.connection import Connection
from multiprocessing.util import Finalize
from typing import Any, NoReturn

import orjson
from jinja2.exceptions import SecurityError, TemplateError

from packcorpus.tasks.core.errors import DataError, Reject
from packcorpus.tasks.core.process import may_allocate
from packcorpus.tasks.templates.jinja.environment import (
    ChatTemplate,
    chat_environment,
    names_read,
    other_file,
    prepare_compiler,
)
from packcorpus.tasks.templates.jinja.rendering import MOST_CHARACTERS, MOST_WORK, Job, Rendering, rendered
from packcorpus.tasks.templates.jinja.traced import Trace, can_be_traced, prepare_tracing, traced
from packcorpus.tasks.templates.jinja.turns.answers import Failed
from packcorpus.tasks.templates.jinja.turns.locate import Located
from packcorpus.tasks.templates.jinja.turns.marks import Range

# Limit of CPU time, which does not depend on the load of the machine. All renderings of a short conversation take a
# millisecond, so a template that takes this long loops.
SECONDS = 6.0
# A conversation of so many messages has this time twice, and so on. The time of the slowest published template grows
# with the square of the messages: for 250 of them, it takes 2 s.
MORE_MESSAGES = 100
# The parent waits this many times as long in wall time, in case the child is blocked without using CPU.
PATIENCE = 20
# Bytes that the child may allocate in addition to its memory at the fork. A conversation has at most 16 MB
# (max_record_bytes), and a rendering holds a few copies of it.
MEMORY = 512 << 20
# Limit of turns × (messages + KB) of conversations that Jinja2 judges with the prompt of each turn. The slowest
# published template, that of Gemma 4, takes 0.5 ms per message, so this is 2 s.
MOST_JUDGED = 4000

# Bytes of conversations that are sent to the child at once, enough to make waiting for replies negligible.
CALL = 1 << 17
# Replies are sent together until they have so many bytes, or until so many seconds have passed: each message wakes the
# parent, which takes as long as a rendering.
REPLIES = 1 << 15
PAUSE = 0.02

_OUT_OF_MEMORY = orjson.dumps(["memory", ""])

_TRIAL = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]

# Added to a problem if the first message is the only turn to train on.
_NO_PROMPT = (
    "; it writes no prompt before messages[0], which is the only turn to train on: add a user message before it"
)


class Renderer:
    """A template compiled in a child process.

    The template sees `constants` (special tokens and options) by name, and the date `today`. `ends` matches a control
    token. `names_read` are the names that the template reads and does not define, with the number of places.
    Raises DataError if the template cannot be used.
    """

    names_read: Mapping[str, int]

    def __init__(self, name: str, source: str, constants: Mapping[str, Any], today: datetime, ends: str = r"(?!)"):
        self.name = name
        self._serve = partial(_serve, source=source, constants=constants, today=today, ends=ends)
        self._owner = 0
        self._end: Any = None
        self._is_used = False  # answers are pending
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

        Raises Reject if the template refuses this conversation or fails on it, and DataError if it must not be used at
        all.
        """
        [found] = self.render_all([job])
        if isinstance(found, Rendering):
            return found
        try:
            raise found
        finally:
            del found  # the traceback refers to this frame, and both would keep the child alive

    def render_all(self, jobs: Sequence[Job]) -> Iterator[Rendering | Reject | DataError]:
        """Render conversations and locate their turns.

        Yields an answer or an error for each job. The child continues while its answers are used. After a DataError,
        nothing is rendered, and all further jobs yield the same error.
        """
        error: DataError | None = None
        for call in _calls(jobs):
            answers = self._answers([request for request in call if isinstance(request, bytes)])
            for request in call:
                answer: Rendering | Reject | DataError
                try:
                    answer = error or (request if isinstance(request, Reject) else next(answers))
                except DataError as problem:
                    answer = error = problem.with_traceback(None)
                yield answer

    def close(self) -> None:
        """Kill the child; the next rendering starts a new child."""
        if self._end is not None:
            self._end()
        self._end, self._owner = None, 0

    def _start(self) -> None:
        self.close()
        prepare_compiler()
        self._pipe, theirs = multiprocessing.Pipe()
        # A Ctrl-C that reaches the child before it ignores interrupts would print a traceback.
        masked = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
        try:
            child = os.fork()
            if not child:
                _run_in_child(theirs, self._serve, masked)
            self._owner = os.getpid()
            # Runs when this object is deleted and when this process exits, even if the process is one of Luigi's
            # workers.
            self._end = Finalize(self, _end, (child, self._pipe), exitpriority=0)
            self._child = child
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, masked)
        theirs.close()
        [reply] = self._replies("compiling")
        self.names_read = self._value_of(*reply)

    def _answers(self, requests: Sequence[bytes]) -> Iterator[Rendering | Reject]:
        """Send requests, and yield the answers. Raises DataError."""
        if not requests:
            return
        assert not self._is_used, "the next answers are those to other requests"
        if self._owner != os.getpid():
            self._start()
        self._is_used, taken = True, 0
        try:
            with contextlib.suppress(OSError):  # the child has ended: `_replies` reports it
                self._pipe.send_bytes(b"[%s]" % b",".join(requests))
            while taken < len(requests):
                try:
                    replies = self._replies("rendering one conversation")
                except DataError:
                    if len(requests) == 1:
                        raise
                    break
                for kind, value in replies:
                    taken += 1
                    try:
                        text, marks, samples, lost, *others = self._value_of(kind, value)
                    except Reject as reject:
                        yield reject.with_traceback(None)
                        continue
                    located = [
                        Located(sample, _tuples(ranges), turn, turns, plain, _tuples(flagged), *differs)
                        for sample, ranges, turn, turns, plain, flagged, *differs in samples
                    ]
                    yield Rendering(text, _tuples(marks), located, lost and tuple(lost), *others)
        finally:
            self._is_used = False
            if taken < len(requests):  # the next replies would answer these requests
                self.close()
        # One of the others ended the child, which may have held replies to those before it.
        for request in requests[taken:]:
            yield from self._answers([request])

    def _replies(self, doing: str) -> list[Any]:
        """Return the child's next replies. Raises DataError if there are none."""
        replies, is_late = None, False
        try:
            is_late = not self._pipe.poll(SECONDS * PATIENCE)
            if is_late:
                raise EOFError
            replies = [orjson.loads(reply) for reply in self._pipe.recv_bytes().split(b"\n")]
        except (EOFError, OSError):
            self._end.cancel()
            self._end = None
            code = _end(self._child, self._pipe)
            how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
            if is_late or how == "SIGXCPU":
                raise DataError(
                    "template_loops", f"template {self.name}: still {doing} after {SECONDS:g} s; it loops"
                ) from None
            raise DataError(
                "template_died", f"template {self.name}: the process that rendered it died ({how})"
            ) from None
        finally:
            if replies is None:  # on any error: the next reply would answer this request
                self.close()
        return replies

    def _value_of(self, kind: str, value: Any) -> Any:
        """Return the value of a reply. Raises Reject or DataError if it is a problem."""
        if kind == "done":
            return value
        if kind == "refused":
            raise Reject("template_refused", f"the template refuses the conversation: {value}")
        if kind == "failed":
            raise Reject("template_failed", f"the template fails on the conversation: {value}")
        if kind == "long":
            raise Reject("too_long_text", f"the template writes more than {MOST_CHARACTERS:,} characters")
        if kind == "memory" and not may_allocate(MEMORY):
            raise MemoryError  # the limit of the system is stricter
        problem = {
            "invalid": f"not valid Jinja: {value}",
            "includes": f"{value}; a template must be a single file: insert the text of that file",
            "unsafe": f"accesses Python internals, which is not allowed: {value}",
            "memory": f"needs more than {MEMORY >> 20} MiB of memory for one conversation",
        }
        raise DataError("bad_template", f"template {self.name}: {problem[kind]}")


def _calls(jobs: Sequence[Job]) -> Iterator[list[bytes | Reject]]:
    """Yield lists of requests to send at once, of about CALL bytes each.

    A Reject takes the place of a job that takes too much work.
    """
    call: list[bytes | Reject] = []
    size = 0
    for job in jobs:
        texts = orjson.dumps(job.messages)
        work = work_of(job, len(texts))
        every = bool(job.trace) or (job.engine == "both" and work <= MOST_JUDGED)
        request = orjson.dumps((orjson.Fragment(texts), *job[1:], every))
        if work > MOST_WORK:
            what = f"{len(job.turns):,} turns in {len(job.messages):,} messages ({len(request):,} bytes)"
            call.append(
                Reject("too_many_turns", f"{what} are too many to locate, because each turn takes two renderings")
            )
            continue
        call.append(request)
        size += len(request)
        if size >= CALL:
            yield call
            call, size = [], 0
    yield call


def work_of(job: Job, size: int) -> int:
    """Return turns × (messages + KB).

    The time to render the prompt of each turn is proportional to it. `size` is the number of bytes of the messages.
    """
    return len(job.turns) * (len(job.messages) + size // 1000)


def _tuples(ranges: Iterable[Iterable[int]]) -> list[Any]:
    return [*map(tuple, ranges)]


def _end(child: int, pipe: Connection) -> int:
    """Kill the child if it is alive, leave no zombie, and return its exit code."""
    pipe.close()
    try:
        os.kill(child, signal.SIGKILL)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    except (ProcessLookupError, ChildProcessError):  # other code has waited for all children
        return 0


# The child


class _Problem(Exception):
    """A problem to send to the parent, as a kind of `Renderer._value_of` and a text."""


class _Refused(_Problem, Failed):
    """A problem of this conversation, not of the template."""


def _run_in_child(pipe: Connection, serve: Callable[[Connection], None], masked: set[int | signal.Signals]) -> NoReturn:
    """Release everything inherited, serve, and exit without the parent's handlers."""
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
    """Compile a template, then answer lists of requests until the pipe is closed.

    The first message has the names that the template reads. Any other message has the replies to one or several
    requests, as lines of JSON.
    """
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    template: _Template | None = None
    requests: list[Any] = [None]
    replies, size, since = list[bytes](), 0, 0.0
    while True:
        count = len(requests[-1][0]) if requests[-1] else 0
        seconds = math.ceil(time.process_time() + SECONDS * (1 + count / MORE_MESSAGES))
        resource.setrlimit(resource.RLIMIT_CPU, (seconds if hard < 0 else min(seconds, hard), hard))
        try:
            if template is None:
                template = _Template(source, constants, today, ends)
                value: Any = template.names_read
            else:
                *job, every = requests[-1]
                value = template.answer(Job(*job), every)
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
        job = value = reply = None  # type: ignore[assignment]
        if requests and size < REPLIES and time.monotonic() < since + PAUSE:
            continue
        pipe.send_bytes(b"\n".join(replies))  # a single reply, which may be large, is not copied
        if template is None:
            return
        replies.clear()
        try:
            if not requests:
                requests = orjson.loads(pipe.recv_bytes())[::-1]
        except EOFError:
            return
        size, since = 0, time.monotonic()


class _Template:
    """A template, with the variant of it that is traced. Raises _Problem."""

    def __init__(self, source: str, constants: Mapping[str, Any], today: datetime, ends: str):
        self._source, self._constants, self._today = source, constants, today
        self._ends, self._eos = re.compile(ends), constants.get("eos_token", "")
        environment = chat_environment(today)
        try:
            self._plain = ChatTemplate(environment, source, constants)
            tree = environment.parse(source)
            other, self.names_read = other_file(tree), names_read(environment, tree)
            self._can_be_traced = can_be_traced(tree)
        except MemoryError:
            raise
        # From Jinja, or from Python's compiler, which compiles the code that Jinja generates.
        except Exception as error:
            raise _Problem("invalid", str(error)) from None
        if other is not None:
            raise _Problem("includes", f"line {other[0]}: {{% {other[1]} %}} reads another file")

    @cached_property
    def _traced(self) -> ChatTemplate:
        environment = chat_environment(self._today)
        prepare_tracing(environment)
        return ChatTemplate(environment, self._source, self._constants)

    def answer(self, job: Job, every: bool) -> Any:
        trace = Trace()
        template = self._traced if job.trace else self._plain
        template.options = job.options or {}

        def render(messages: list[Any], tools: Any, prompt: bool, marks: bool) -> tuple[str, list[Range]]:
            why = _NO_PROMPT * (not messages)
            try:
                if job.trace:
                    messages, tools = (traced(value, trace, job.trace == "spaced") for value in (messages, tools))
                text, ranges = template.render(messages, tools, prompt, marks)
            except SecurityError as error:
                raise _Problem("unsafe", str(error)) from None
            except TemplateError as error:
                raise _Refused("refused", f"{error}{why}") from None
            except MemoryError:
                raise
            except Exception as error:  # a template can raise any exception of Python
                raise _Refused("failed", f"{error}{why}") from None
            if len(text) > MOST_CHARACTERS:
                raise _Problem("long", "")
            return text, ranges

        text, ranges, samples, *lost, _ = rendered(render, self._ends, self._eos, job, every)
        result = trace.result() if job.trace and self._can_be_traced else None
        return text, ranges, [tuple(sample) for sample in samples], *lost, result
