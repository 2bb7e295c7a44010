"""Jinja in a process of its own, which cannot hang, cannot eat the machine's memory, and sees no clock and no chance.

    Renderer.render(messages, tools, turns) ──JSON──▶ forked child: compile once, render, locate turns
                       Rendering or PackError ◀──JSON── text, marks, turns │ what went wrong

A template comes with a tokenizer, from somebody else. It is data here: the child that renders has bounds on memory
and on CPU time that the system keeps, writes no file, and answers in JSON. A fork and not a new interpreter, because
transformers takes 0.6 s to import and a fork 10 ms. The pipe costs 0.05 ms of CPU a conversation.

The child ends with its parent: it reads the end of its pipe, or comes to its bound of CPU time.
"""

from __future__ import annotations

import contextlib
import gc
import math
import multiprocessing
import os
import random
import resource
import select
import signal
import time
from collections.abc import Callable
from datetime import datetime
from multiprocessing.connection import Connection
from multiprocessing.util import Finalize
from typing import Any, NamedTuple, NoReturn

import orjson

from tasks.core.errors import DataError, PartMissing, Reject

# Of CPU time, which is the same on a busy machine. All renderings of one conversation take a millisecond; a template
# that takes this long loops.
SECONDS = 6.0
# How many times as long its parent waits for it, should it wait for something else.
PATIENCE = 20
# What the child may take beyond what it has when it is forked. A conversation is 16 MB at most (max_record_bytes),
# and a rendering holds a few copies of it.
MEMORY = 512 << 20
# Of one rendered text: a template writes what it is given about once, and an encoder takes up to 50 bytes for each.
MOST_CHARACTERS = 16 << 20
# To locate a turn takes two renderings, and one takes about 1 µs a message and 1 µs a KB: 4 s and more.
MOST_WORK = 2_000_000

_TRIAL = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]

Range = tuple[int, int]


class Rendering(NamedTuple):
    """A conversation as text; where its {% generation %} blocks and the turns that were asked for stand in it.

    `lost`: the first of these turns that could not be located; those behind it were not looked for.
    """

    text: str
    marks: list[Range]
    turns: list[Range]
    lost: int | None


class Renderer:
    """A template, compiled in a child. Raises PartMissing or DataError where it cannot be used.

    `special` are the names of special tokens that it sees, `today` is its clock.
    """

    def __init__(self, name: str, source: str, special: dict[str, str], today: datetime):
        self.name = name
        self._serve: Callable[[Connection], None] = lambda pipe: _serve(pipe, source, special, today)
        self._owner = 0
        self._end: Any = None
        try:  # here, so that children that are forked later have it too
            import jinja2.exceptions  # noqa: F401
            import transformers.utils.chat_template_utils  # noqa: F401
        except ImportError as error:
            self._missing(error)
        try:
            self._start()
            self.render(_TRIAL, None, False, [], False)  # one that can be used on nothing is told before there is work
        except Reject as reject:  # of our two messages, not of all
            if reject.reason == "too_long_text":
                self.close()
                raise DataError("bad_template", f"template {name}: {reject.message}") from None
        except BaseException:
            self.close()
            raise

    def render(self, messages: list[Any], tools: Any, marks: bool, turns: list[int], prompt: bool) -> Rendering:
        """One conversation. `turns`: messages to locate in it; with `prompt`, from the end of the generation prompt.

        Raises Reject where the template refuses this conversation or fails on it, DataError where it must not be used.
        """
        request = orjson.dumps([messages, tools, marks, turns, prompt])
        if len(turns) * (len(messages) + len(request) // 1000) > MOST_WORK:
            raise Reject(
                "too_many_turns",
                f"{len(turns):,} turns of {len(messages):,}, {len(request):,} bytes: locating each takes renderings of "
                "its own, and of so many too long; {% generation %} marks in the template locate them in one",
            )
        if self._owner != os.getpid():
            self._start()
        return Rendering(*self._ask(request))

    def close(self) -> None:
        """End the child. The next rendering starts another."""
        if self._end is not None:
            self._end()
        self._end, self._owner = None, 0

    def _start(self) -> None:
        self.close()
        self._pipe, theirs = multiprocessing.Pipe()
        # A Ctrl-C that arrives before the child has said that it takes none would show a traceback.
        masked = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
        try:
            child = os.fork()
            if not child:
                _in_child(theirs, self._serve, masked)
            self._owner = os.getpid()
            # Runs when this object goes, and when this process ends, also where that is one of Luigi's workers.
            self._end = Finalize(self, _end, (child, self._pipe), exitpriority=0)
            self._child = child
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, masked)
        theirs.close()
        self._poll = select.poll()
        self._poll.register(self._pipe.fileno(), select.POLLIN)
        self._ask(None)

    def _ask(self, request: bytes | None) -> Any:
        """The child's answer; to None, whether it could compile the template."""
        reply, late = None, False
        try:
            if request is not None:
                self._pipe.send_bytes(request)
            late = not self._poll.poll(SECONDS * PATIENCE * 1000)
            if late:
                raise EOFError
            reply = orjson.loads(self._pipe.recv_bytes())
        except (EOFError, OSError):
            how = self._status()
            if not late and how != "SIGXCPU":
                raise DataError(
                    "template_died", f"template {self.name}: ended the process that rendered it ({how})"
                ) from None
            doing = "compiling" if request is None else "rendering one conversation"
            raise DataError(
                "template_loops", f"template {self.name}: was still {doing} after {SECONDS:g} s; it loops"
            ) from None
        finally:
            if reply is None:  # whatever stopped us: the next answer would belong to this question
                self.close()
        kind, value = reply
        if kind == "done":
            return value
        self._fail(kind, value)

    def _status(self) -> str:
        """How the child ended."""
        self._end.cancel()
        self._end = None
        code = _end(self._child, self._pipe)
        return signal.Signals(-code).name if code < 0 else f"exit code {code}"

    def _fail(self, kind: str, value: str) -> NoReturn:
        if kind == "refused":
            raise Reject("template_refused", f"the template refuses it: {value}")
        if kind == "failed":
            raise Reject("template_failed", f"the template fails on it: {value}")
        if kind == "long":
            raise Reject("too_long_text", f"the template writes more than {MOST_CHARACTERS:,} characters")
        if kind == "missing":
            self._missing(value)
        problem = {
            "invalid": f"is not valid Jinja: {value}",
            "includes": f"{value}; a template stands by itself: put the text in its place",
            "unsafe": f"reaches for what a template must not: {value}",
            "memory": f"takes more than {MEMORY >> 20} MiB of memory for one conversation",
        }
        raise DataError("bad_template", f"template {self.name}: {problem[kind]}")

    def _missing(self, error: object) -> NoReturn:
        raise PartMissing(
            "library_missing",
            f"the template {self.name} is written in Jinja and needs transformers ({error}); "
            "install it with: make extras (or pip install --constraint constraints.txt 'packcorpus[train]'), "
            "or take a built-in template",
        ) from None


def _end(child: int, pipe: Connection) -> int:
    """Kill the child, if it lives, and leave no zombie; its exit code."""
    pipe.close()
    try:
        os.kill(child, signal.SIGKILL)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    except (ProcessLookupError, ChildProcessError):  # somebody has waited for all children
        return 0


# -- in the child -----------------------------------------------------------------------------------------------------

_OUT_OF_MEMORY = orjson.dumps(["memory", ""])


class _Problem(Exception):
    """What the parent is told: a kind of `Renderer._fail`, and words for it."""


def _in_child(pipe: Connection, serve: Callable[[Connection], None], masked: set[int | signal.Signals]) -> NoReturn:
    """Give up all that was inherited, serve, and end without a word and without what the parent would do at its end."""
    try:
        gc.freeze()  # what is garbage here belongs to the parent, which may have files to remove with it
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, masked)
        nothing = os.open(os.devnull, os.O_RDWR)
        for standard in (0, 1, 2):
            os.dup2(nothing, standard)
        os.closerange(3, pipe.fileno())  # locks, and the pipes of other children
        os.closerange(pipe.fileno() + 1, os.sysconf("SC_OPEN_MAX"))
        _bound(resource.RLIMIT_CORE, 0)
        _bound(resource.RLIMIT_FSIZE, 0)
        with contextlib.suppress(OSError), open("/proc/self/statm", encoding="ascii") as file:  # absent on macOS
            _bound(resource.RLIMIT_AS, int(file.read().split()[0]) * resource.getpagesize() + MEMORY)
        serve(pipe)
    finally:
        os._exit(0)


def _bound(limit: int, value: int) -> None:
    hard = resource.getrlimit(limit)[1]
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(limit, (value, value))


def _serve(pipe: Connection, source: str, special: dict[str, str], today: datetime) -> None:
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    render: Any = None
    request: Any = None
    while True:
        seconds = math.ceil(time.process_time() + SECONDS)
        resource.setrlimit(resource.RLIMIT_CPU, (seconds if hard < 0 else min(seconds, hard), hard))
        try:
            if render is None:
                render, value = _compile(source, special, today), None
            else:
                value = _rendering(render, *request)
            reply = orjson.dumps(["done", value])
        except _Problem as problem:
            kind, text = problem.args
            reply = orjson.dumps([kind, text[:1000].encode("utf-8", "replace").decode()])
        except orjson.JSONEncodeError as error:
            reply = orjson.dumps(["failed", f"it writes what is no text: {error}"])
        except MemoryError:
            reply = _OUT_OF_MEMORY
        pipe.send_bytes(reply)
        if render is None:
            return
        request = value = reply = None  # type: ignore[assignment]
        try:
            request = orjson.loads(pipe.recv_bytes())
        except EOFError:
            return


Render = Callable[[list[Any], Any, bool, bool], tuple[str, list[Range]]]


def _compile(source: str, special: dict[str, str], today: datetime) -> Render:
    """Rendering is transformers', so that the text is the one seen in use."""
    try:
        from jinja2 import nodes
        from jinja2.exceptions import SecurityError, TemplateError
        from transformers.utils.chat_template_utils import _compile_jinja_template, render_jinja_template

        environment = _compile_jinja_template(source).environment
        other = environment.parse(source).find((nodes.Include, nodes.Import, nodes.FromImport, nodes.Extends))
    except ImportError as error:
        raise _Problem("missing", str(error)) from None
    except MemoryError:
        raise
    except Exception as error:  # of Jinja, and of Python's compiler, which gets what Jinja makes of it
        raise _Problem("invalid", str(error)) from None
    if other is not None:
        name = "import" if isinstance(other, nodes.FromImport) else type(other).__name__.lower()
        raise _Problem("includes", f"line {other.lineno}: {{% {name} %}} reads another file")
    environment.globals["strftime_now"] = today.strftime

    def render(messages: list[Any], tools: Any, prompt: bool, marks: bool) -> tuple[str, list[Range]]:
        random.seed(0)  # Jinja has a filter `random` and a function `lipsum`
        try:
            texts, found = render_jinja_template(
                [messages],
                tools=tools,
                chat_template=source,
                return_assistant_tokens_mask=marks,
                add_generation_prompt=prompt,
                **special,
            )
        except SecurityError as error:
            raise _Problem("unsafe", str(error)) from None
        except TemplateError as error:
            raise _Problem("refused", str(error)) from None
        except MemoryError:
            raise
        except Exception as error:  # a template can raise whatever Python can
            raise _Problem("failed", str(error)) from None
        if len(texts[0]) > MOST_CHARACTERS:
            raise _Problem("long", "")
        return texts[0], found[0] if found else []

    return render


def _rendering(render: Render, messages: list[Any], tools: Any, marks: bool, turns: list[int], prompt: bool) -> Any:
    """A turn stands between the rendering of what is before it and that of it too, each a prefix of the next."""
    text, found = render(messages, tools, False, marks)
    located: list[Range] = []
    lost = None
    for k in turns:
        before = render(messages[:k], tools, prompt, False)[0] if k or prompt else ""
        through = render(messages[: k + 1], tools, False, False)[0] if k + 1 < len(messages) else text
        if not (through.startswith(before) and text.startswith(through)):
            lost = k
            break
        located.append((len(before), len(through)))
    return text, found, located, lost
