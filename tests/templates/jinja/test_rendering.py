"""Each hostile Jinja template ends with one message, in bounded time and memory."""

from __future__ import annotations

import multiprocessing
import os
import resource
import signal
import subprocess
import sys
import textwrap
import time
from contextlib import suppress
from datetime import datetime
from pathlib import Path

import pytest
from support.commands import ROOT
from support.tokenizer_kinds import open_kind

from packcorpus.tasks.core.errors import DataError, PackError, Reject
from packcorpus.tasks.templates.jinja import renderer as jinja2_process
from packcorpus.tasks.templates.jinja.control_strings import ControlStrings
from packcorpus.tasks.templates.jinja.environment import prepare_compiler
from packcorpus.tasks.templates.jinja.renderer import Renderer
from packcorpus.tasks.templates.jinja.rendering import Job, Rendering

pytest.importorskip("transformers", reason="transformers renders chat templates and is not installed")

MESSAGES = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
SAY = "{% for m in messages %}{{ m.content }}{% endfor %}"


def open_renderer(source: str) -> Renderer:
    return Renderer("odd.jinja", source, {"eos_token": "</s>"}, datetime(2026, 1, 1))


def render(source: str) -> Rendering:
    return open_renderer(source).render(Job(MESSAGES, None, False, [], "others"))


def children() -> set[int]:
    """Return the children of this process, including zombies."""
    listed = subprocess.run(["ps", "-o", "pid=", "--ppid", str(os.getpid())], capture_output=True, text=True).stdout
    return {pid for pid in map(int, listed.split()) if Path(f"/proc/{pid}").exists()}


def test_a_child_finds_the_compiler_ready() -> None:
    """The compiler is prepared before the child is forked.

    Otherwise each child would create the lexer of Jinja again.
    """
    prepare_compiler.cache_clear()
    renderer = open_renderer(SAY)
    assert prepare_compiler.cache_info().currsize == 1
    renderer.close()


LOOPS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
DOUBLING = "{% set n = namespace(s='a') %}{% for i in range(60) %}{% set n.s = n.s ~ n.s %}{% endfor %}{{ n.s }}"
LIST = "{% set n = namespace(l=[0]) %}{% for i in range(60) %}{% set n.l = n.l + n.l %}{% endfor %}"
MACRO = "{% macro f(x) %}{{ f(x) }}{{ f(x) }}{% endmacro %}{{ f(1) }}"
FAN = "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}"


@pytest.mark.parametrize(
    ("source", "error", "problem"),
    [
        (LOOPS, DataError, "still rendering one conversation after 0.2 s; it loops"),
        (FAN, DataError, "still rendering one conversation after 0.2 s; it loops"),
        ("{{ 'a' * 10**10 }}", DataError, "MiB of memory"),
        ("{{ messages[0].content * 10**10 }}", DataError, "MiB of memory"),
        ("{{ messages[0].content * 10**8 }}", DataError, "writes more than 16,777,216 characters"),
        ("{{ messages[0].content.rjust(10**10) }}", DataError, "MiB of memory"),
        ("{{ '%010000000000d' % 1 }}{{ '%0*d' % (10**10, 1) }}", (DataError, Reject), ""),
        (DOUBLING, DataError, "MiB of memory"),
        (LIST, DataError, "MiB of memory"),
        ("{% set x = 9 ** (9 ** 9) %}", DataError, "it loops"),
        (MACRO, Reject, "recursion"),
        ("{{ range(10**9) | list }}", Reject, "Range too big"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", DataError, "accesses Python internals"),
        ("{{ messages.append.__globals__ }}", DataError, "accesses Python internals"),
        ("{{ cycler.__init__.__globals__.os.system('true') }}", DataError, "accesses Python internals"),
        ("{% include '/etc/hostname' %}", DataError, "line 1: {% include %} reads another file"),
        ("\n{% from 'x' import y %}", DataError, "line 2: {% import %} reads another file"),
        ("{% extends messages[0].content %}", DataError, "{% extends %} reads another file"),
        ("{{ " + "(" * 9999 + "1" + ")" * 9999 + " }}", DataError, "not valid Jinja"),
        ("{% if 1 %}" * 9999 + "{% endif %}" * 9999, DataError, "not valid Jinja"),
        ("{% for i in [1] %}" * 50 + "{% endfor %}" * 50, DataError, "not valid Jinja: too many statically nested"),
        ("{{ " + "9" * 9999 + " }}", DataError, "not valid Jinja"),
        ("{{ '\\ud800' }}", Reject, "not valid text"),
        ("{{ raise_exception('x' * 99999) }}", Reject, "refuses the conversation: xxx"),
        ("{{ [1, 2] | sort(attribute='a' * 9) }}{{ messages | sum }}", Reject, "fails on the conversation"),
        ("{{ messages[0].content | regex_replace('(a+)+$', '') }}", DataError, "No filter named"),
        ("{{ ('a' * 99999) | wordwrap(1) | wordcount }}{{ ('<' * 99999) | striptags }}", None, ""),
        ("{{ ('a ' * 9999999) | urlize | title | wordwrap(1) | indent(9999) }}", DataError, ""),
    ],
)  # fmt: skip
def test_a_hostile_template_ends_with_one_message(
    source: str, error: type[Exception] | None, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The system rounds 0.2 s of CPU time up to 1 s. Templates that run out of memory keep the usual limit, because a
    # busy machine is slow.
    if "memory" not in problem:
        monkeypatch.setattr(jinja2_process, "SECONDS", 0.2)
    before = children()
    start = os.times()
    raised: Exception | None = None
    try:
        render(source)
    except (PackError, Reject) as found:
        raised = found if isinstance(found, PackError) else found.with_traceback(None)
    if error is None or raised is None:
        assert raised is error is None
    else:
        assert isinstance(raised, error)
        assert problem in str(raised)
        assert len(str(raised)) < 1200
        if isinstance(raised, PackError):
            assert str(raised).startswith("template odd.jinja: ")
    assert sum(os.times()[:4]) - sum(start[:4]) < 3
    # A child of an earlier test may end meanwhile, but there must not be a new child.
    assert children() <= before, "the process that rendered is still there"


def test_a_renderer_goes_on_after_what_it_could_not_do() -> None:
    source = "{% if messages[0].content == 'big' %}{{ 'a' * 10**10 }}{% endif %}" + SAY
    renderer = open_renderer(source)
    for _ in range(2):
        with pytest.raises(DataError, match="MiB of memory"):
            renderer.render(Job([{"role": "user", "content": "big"}], None, False, [], "others"))
        assert renderer.render(Job(MESSAGES, None, False, [0], "others")).text == "ab"


def job(content: str, turns: int = 0) -> Job:
    return Job([{"role": "user", "content": content}], None, False, [0] * turns, "others")


MOODY = (
    "{% set m = messages[0].content %}{% if m == 'no' %}{{ raise_exception('no') }}{% endif %}"
    "{% if m == 'big' %}{{ 'a' * 10**10 }}{% endif %}{% if m == 'loop' %}"
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}{% endif %}{{ m }}"
)


@pytest.mark.parametrize("call", [1, 100, 1 << 17])
def test_many_conversations_are_rendered_at_once(call: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("packcorpus.tasks.templates.jinja.renderer.CALL", call)
    monkeypatch.setattr(jinja2_process, "SECONDS", 0.2)
    renderer = open_renderer(MOODY)
    works = [str(number) for number in range(20)]
    assert [each.text for each in renderer.render_all(list(map(job, works)))] == works  # type: ignore[union-attr]
    found = list(renderer.render_all([job("a"), job("no"), job("b", turns=3_000_000), job("c")]))
    assert [getattr(each, "text", getattr(each, "reason", "")) for each in found] == [
        "a", "template_refused", "too_many_turns", "c",
    ]  # fmt: skip
    for fault, problem in (("big", "MiB of memory"), ("loop", "it loops")):
        found = list(renderer.render_all(list(map(job, ["a", "no", fault, "b", "no"]))))
        assert [type(each) for each in found] == [Rendering, Reject, *[DataError] * 3]
        assert all(problem in str(each) for each in found[2:])
        # The renderer continues with the next call, and does not return answers of an earlier call.
        assert [each.text for each in renderer.render_all(list(map(job, works)))] == works  # type: ignore[union-attr]


def test_answers_that_nobody_took_are_not_those_of_the_next_call() -> None:
    renderer = open_renderer(SAY)
    answers = renderer.render_all(list(map(job, "abc")))
    next(answers)
    del answers
    assert renderer.render(job("d")).text == "d"


def test_a_child_that_is_killed_is_reported_and_replaced() -> None:
    renderer = open_renderer(SAY)
    os.kill(renderer._child, signal.SIGSEGV)
    with pytest.raises(DataError, match=r"odd\.jinja: the process that rendered it died \(SIGSEGV\)"):
        renderer.render(Job(MESSAGES, None, False, [], "others"))
    assert renderer.render(Job(MESSAGES, None, False, [], "others")).text == "ab"


def test_chance_is_the_same_every_time() -> None:
    for source in ("{{ range(99999) | random }} {{ lipsum(n=1) }}", "{{ [range(99999)] | map('ran' ~ 'dom') | list }}"):
        assert render(source) == render(source)


def test_memory_is_bounded_by_the_system() -> None:
    """The child of a template that allocates without end stays below the memory limit.

    The system measures the memory.
    """
    program = f"""
        import resource, sys
        sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / "tests")!r}, {str(Path(__file__).parent)!r}]
        from test_rendering import DOUBLING, LIST, render
        for source in (DOUBLING, LIST):
            try: render(source)
            except Exception as error: print(error)
        child, parent = (resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_CHILDREN, resource.RUSAGE_SELF))
        print(child - parent)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, check=True)
    *messages, more = done.stdout.splitlines()
    assert len(messages) == 2
    assert all("MiB of memory" in message for message in messages)
    assert int(more) << 10 <= jinja2_process.MEMORY


def _in_a_worker(renderer: Renderer, out: object) -> None:
    before = renderer._child
    text = renderer.render(Job(MESSAGES, None, False, [], "others")).text
    out.put((text, before != renderer._child, renderer._child))  # type: ignore[attr-defined]


@pytest.mark.parametrize("daemon", [False, True])
def test_a_forked_worker_has_a_child_of_its_own_that_ends_with_it(daemon: bool) -> None:
    renderer = open_renderer(SAY)
    context = multiprocessing.get_context("fork")
    out = context.SimpleQueue()
    worker = context.Process(target=_in_a_worker, args=(renderer, out), daemon=daemon)
    worker.start()
    text, own, child = out.get()
    worker.join()
    assert (text, own, worker.exitcode) == ("ab", True, 0)
    assert not Path(f"/proc/{child}").exists(), "it was reaped by the worker, not left to init"
    assert renderer.render(Job(MESSAGES, None, False, [], "others")).text == "ab"


def test_the_child_ends_when_its_parent_is_killed_and_takes_no_lock_with_it(tmp_path: Path) -> None:
    program = f"""
        import sys, fcntl, time
        sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / "tests")!r}, {str(Path(__file__).parent)!r}]
        from test_rendering import SAY, open_renderer
        lock = open({str(tmp_path / "lock")!r}, "w"); fcntl.flock(lock, fcntl.LOCK_EX)
        renderer = open_renderer(SAY)
        print(renderer._child, flush=True); time.sleep(60)
    """
    parent = subprocess.Popen([sys.executable, "-c", textwrap.dedent(program)], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    held = os.readlink(f"/proc/{child}/cwd") and [os.readlink(f) for f in Path(f"/proc/{child}/fd").iterdir()]
    assert str(tmp_path / "lock") not in held
    parent.kill()
    parent.communicate()
    deadline = time.monotonic() + 300
    with suppress(FileNotFoundError, ProcessLookupError):  # the process is gone
        while Path(f"/proc/{child}/stat").read_text().split()[2] != "Z":
            assert time.monotonic() < deadline, "it lives on"
            time.sleep(0.05)


def test_the_cpu_of_a_child_without_a_parent_is_bounded() -> None:
    renderer = open_renderer(SAY)
    soft, _ = resource.prlimit(renderer._child, resource.RLIMIT_CPU)
    assert 0 < soft < 60
    assert resource.prlimit(renderer._child, resource.RLIMIT_FSIZE) == (0, 0)


SORTS = (
    "{% for k, v in tools[0].function.parameters.properties | dictsort %}{{ k }} {% endfor %}"
    "{% for k, v in tools[0].function.parameters.properties | dictsort(by='value') %}{{ k }} {% endfor %}"
    "{{ tools[0].function.parameters.required | sort | join(' ') }} {{ messages | length }}"
)


def test_private_characters_do_not_change_the_order_of_keys() -> None:
    """Private characters, which break parts of control strings, sort after letters."""
    encoder = open_kind("hf_byte_level")
    control_strings = ControlStrings(encoder, SORTS)
    names = ["start", "starts", "im", "image", "End", "ends", "en", "s", "st", "a"]
    properties = {name: name for name in names}
    function = {"name": "f", "parameters": {"properties": properties, "required": names}}
    tools, messages = [{"type": "function", "function": function}], [{"role": "user", "content": "a"}]
    broken = control_strings.broken(messages, tools)
    assert broken.tools != tools
    renderer = Renderer("t", SORTS, {}, datetime(2026, 1, 1))
    expected = renderer.render(Job(messages, tools, False, [], "others")).text
    assert (
        renderer.render(Job(broken.messages, broken.tools, False, [], "others")).text.replace(broken.private, "")
        == expected
    )
    assert expected.startswith("a en End ends im image s st start starts ")
