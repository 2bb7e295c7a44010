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
import multiprocessing
import os
import select
import signal
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from multiprocessing.connection import Connection
from multiprocessing.util import Finalize
from typing import Any

import orjson

from tasks.core.errors import DataError, Reject
from tasks.core.process import may_allocate
from tasks.templates.jinja.engines import limits
from tasks.templates.jinja.engines.child import run_in_child, serve
from tasks.templates.jinja.engines.environment import prepare_compiler
from tasks.templates.jinja.engines.requests import Job, Rendering
from tasks.templates.jinja.turns.locate import Located

_TRIAL = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]

# Bytes of conversations that are sent to the child at once, enough to make waiting for replies negligible.
CALL = 1 << 17


class Renderer:
    """A template compiled in a child process.

    The template sees `constants` (special tokens and options) by name, and the date `today`. `ends` matches a control
    token. `names_read` are the names that the template reads and does not define, with the number of places.
    Raises DataError if the template cannot be used.
    """

    names_read: Mapping[str, int]

    def __init__(self, name: str, source: str, constants: Mapping[str, Any], today: datetime, ends: str = r"(?!)"):
        self.name = name
        self._serve: Callable[[Connection], None] = lambda pipe: serve(pipe, source, constants, today, ends)
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
                run_in_child(theirs, self._serve, masked)
            self._owner = os.getpid()
            # Runs when this object is deleted and when this process exits, even if the process is one of Luigi's
            # workers.
            self._end = Finalize(self, _end, (child, self._pipe), exitpriority=0)
            self._child = child
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, masked)
        theirs.close()
        self._poll = select.poll()
        self._poll.register(self._pipe.fileno(), select.POLLIN)
        [reply] = self._replies("compiling")
        self.names_read = self._value_of(*reply)

    def _answers(self, requests: Sequence[bytes]) -> Iterator[Rendering | Reject]:
        """Send requests, and yield the answers.

        Raises DataError if the template must not be used.
        """
        if not requests:
            return
        assert not self._is_used, "the next answers are those to other requests"
        if self._owner != os.getpid():
            self._start()
        self._is_used, taken = True, 0
        try:
            self._send(b"[%s]" % b",".join(requests))
            while taken < len(requests):
                try:
                    replies = self._replies("rendering one conversation")
                except DataError:
                    if len(requests) == 1:
                        raise
                    break
                for kind, value in replies:
                    taken += 1
                    yield self._answer(kind, value)
        finally:
            self._is_used = False
            if taken < len(requests):  # the next replies would answer these requests
                self.close()
        # One of the others ended the child, which may have held replies to those before it.
        for request in requests[taken:]:
            yield from self._answers([request])

    def _answer(self, kind: str, value: Any) -> Rendering | Reject:
        """Return the answer that a reply contains.

        Raises DataError if the template must not be used.
        """
        try:
            found = self._value_of(kind, value)
        except Reject as reject:
            return reject.with_traceback(None)
        text, marks, samples, lost, *others = found
        located = [
            Located(sample, _tuples(ranges), turn, turns, plain, _tuples(flagged))
            for sample, ranges, turn, turns, plain, flagged in samples
        ]
        return Rendering(text, _tuples(marks), located, lost and tuple(lost), *others)

    def _send(self, message: bytes) -> None:
        with contextlib.suppress(OSError):  # the child has ended: `_replies` reports it
            self._pipe.send_bytes(message)

    def _replies(self, doing: str) -> list[Any]:
        """Return the child's next replies. Raises DataError if there are none."""
        replies, late = None, False
        try:
            late = not self._poll.poll(limits.SECONDS * limits.PATIENCE * 1000)
            if late:
                raise EOFError
            replies = [orjson.loads(reply) for reply in self._pipe.recv_bytes().split(b"\n")]
        except (EOFError, OSError):
            how = self._status()
            if not late and how != "SIGXCPU":
                raise DataError(
                    "template_died", f"template {self.name}: the process that rendered it died ({how})"
                ) from None
            raise DataError(
                "template_loops", f"template {self.name}: still {doing} after {limits.SECONDS:g} s; it loops"
            ) from None
        finally:
            if replies is None:  # on any error: the next reply would answer this request
                self.close()
        return replies

    def _status(self) -> str:
        """Wait for the child and describe how it ended."""
        self._end.cancel()
        self._end = None
        code = _end(self._child, self._pipe)
        return signal.Signals(-code).name if code < 0 else f"exit code {code}"

    def _value_of(self, kind: str, value: Any) -> Any:
        """Return the value of a reply. Raises Reject or DataError if it is a problem."""
        if kind == "done":
            return value
        if kind == "refused":
            raise Reject("template_refused", f"the template refuses the conversation: {value}")
        if kind == "failed":
            raise Reject("template_failed", f"the template fails on the conversation: {value}")
        if kind == "long":
            raise Reject("too_long_text", f"the template writes more than {limits.MOST_CHARACTERS:,} characters")
        if kind == "memory" and not may_allocate(limits.MEMORY):
            raise MemoryError  # the limit of the system is stricter
        problem = {
            "invalid": f"not valid Jinja: {value}",
            "includes": f"{value}; a template must be a single file: insert the text of that file",
            "unsafe": f"accesses Python internals, which is not allowed: {value}",
            "memory": f"needs more than {limits.MEMORY >> 20} MiB of memory for one conversation",
        }
        raise DataError("bad_template", f"template {self.name}: {problem[kind]}")


def _calls(jobs: Sequence[Job]) -> Iterator[list[bytes | Reject]]:
    """Yield lists of requests to send at once, of about CALL bytes each.

    A Reject takes the place of a job that takes too much work.
    """
    call: list[bytes | Reject] = []
    size = 0
    for job in jobs:
        messages, tools, marks, located, method, trace, engine, options, last = job
        texts = orjson.dumps(messages)
        work = work_of(job, len(texts))
        every = bool(trace) or (engine == "both" and work <= limits.MOST_JUDGED)
        request = orjson.dumps((orjson.Fragment(texts), tools, marks, located, method, last, trace, every, options))
        turns, count = len(job.turns), len(job.messages)
        if work > limits.MOST_WORK:
            what = f"{turns:,} turns in {count:,} messages ({len(request):,} bytes)"
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
