"""The fewest samples hold every turn after its prompt, with few renderings."""

from __future__ import annotations

import random
from collections import Counter
from datetime import datetime
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from support.profiles import examples
from support.templates.modern_templates import CONTINUED, INTRODUCED, MODERN, STRIPPED

from tasks.templates.jinja.engines.choice import Engines
from tasks.templates.jinja.engines.fast import FastTemplate
from tasks.templates.jinja.engines.renderer import Renderer
from tasks.templates.jinja.engines.requests import Job, Rendering

TODAY = datetime(2026, 1, 1)
CONSTANTS = {"bos_token": "<s>", "eos_token": "<|im_end|>"}
ENDS = r"<\|im_end\|>|<\|im_start\|>|</s>"

TURN = """<|im_start|>{{ m.role }}
{% if m.reasoning_content and KEEPS %}<think>
{{ m.reasoning_content }}
</think>

{% endif %}{{ m.content }}{% for c in m.tool_calls or [] %}<call>{{ c.function.name }}{{ c.function.arguments.a }}
{% endfor %}<|im_end|>
"""
LAST = (
    "{% set ns = namespace(user=0) %}{% for m in messages if m.role == 'user' %}{% set ns.user = ns.user + 1 %}"
    "{% endfor %}"
)
AGENTS = {
    # Reasoning is written after the last user message only, like many reasoning models do.
    "after the last user message": LAST
    + "{% set at = namespace(user=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set at.user = at.user + 1 %}"
    + "{% endif %}"
    + TURN.replace("KEEPS", "at.user == ns.user")
    + "{% endfor %}",
    # Reasoning of calls is left out once an answer without calls follows.
    "until the final answer": "{% for m in messages %}{% set rest = messages[loop.index:] "
    + "| selectattr('role', 'equalto', 'assistant') | rejectattr('tool_calls', 'defined') | list %}"
    + TURN.replace("KEEPS", "not rest")
    + "{% endfor %}",
    # A result is written with another end once an answer follows.
    "end of the last result": "{% for m in messages %}"
    + TURN.replace("KEEPS", "true").replace("<|im_end|>\n", "{{ '.' if loop.last and m.role == 'tool' }}<|im_end|>\n")
    + "{% endfor %}",
    "kept": "{% for m in messages %}" + TURN.replace("KEEPS", "true") + "{% endfor %}",
}
PROMPT = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
SOURCES = {**{name: source + PROMPT for name, source in AGENTS.items()}, **MODERN}
SOURCES |= {"stripped": STRIPPED, "continued": CONTINUED, "introduced": INTRODUCED}


class Counted(FastTemplate):
    """A template that counts its renderings."""

    count = 0

    def _rendered(self, messages: list[Any], tools: Any, prompt: bool) -> Any:
        self.count += 1
        return super()._rendered(messages, tools, prompt)


def engines_of(source: str) -> Engines:
    return Engines(Renderer("agent.jinja", source, CONSTANTS, TODAY, ENDS), source, CONSTANTS, TODAY, ENDS)


def call(name: str) -> dict[str, Any]:
    function = {"name": f"get_{name}", "arguments": {"a": name}}
    return {"id": "call00001", "type": "function", "function": function}


def session(sizes: list[int], draw: random.Random) -> list[Any]:
    """Return a conversation with a task for each size, which is its number of calls."""
    texts = ["be", "a 1", "no", "</think>", "x<y", " b\n", "{}", "</tool_response>"]
    messages: list[Any] = []
    for size in sizes:
        messages.append({"role": "user", "content": draw.choice(texts)})
        for number in range(size + 1):
            message = {"role": "assistant", "content": draw.choice(["", "be", " so\n"]) if number < size else "done"}
            if draw.random() < 0.7:
                message["reasoning_content"] = draw.choice(["since", "r e", " t\n"])
            if number < size:
                message["tool_calls"] = [call(draw.choice("bcd")) for _ in range(draw.choice([1, 1, 2]))]
            messages.append(message)
            results = message.get("tool_calls", ())
            messages += [{"role": "tool", "name": "get_b", "content": draw.choice(texts)} for _ in results]
    return messages


def rendering(engines: Engines, messages: list[Any], engine: Any) -> Rendering | Exception:
    turns = [k for k, message in enumerate(messages) if message["role"] == "assistant"]
    job = Job(messages, None, False, turns, "auto", "", engine)
    if engine == "both":
        [found] = engines.renderer.render_all([job])
        return found
    found_fast = engines._fast_rendering(job)
    return found_fast if found_fast is not None else engines.render(job._replace(engine="jinja2"))


@pytest.mark.parametrize("name", SOURCES)
def test_few_renderings_find_what_all_renderings_find(name: str) -> None:
    engines = engines_of(SOURCES[name])

    @settings(max_examples=examples(20), deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.lists(st.integers(0, 6), min_size=1, max_size=3), st.randoms(use_true_random=False))
    @example([6], random.Random(1))
    def check(sizes: list[int], draw: random.Random) -> None:
        messages = session(sizes, draw)
        few, every = (rendering(engines, messages, engine) for engine in ("minijinja", "both"))
        assert str(few) == str(every)
        if not isinstance(few, Rendering) or few.lost:
            return
        turns = [k for k, message in enumerate(messages) if message["role"] == "assistant"]
        assert [k for sample in few.samples for k in sample.turns] == turns[few.unprompted :]
        for text, ranges, *_ in few.samples:
            assert all(one[1] <= other[0] for one, other in pairwise(ranges)) or name == "no end token"
            assert all(0 <= start <= stop <= len(text) for start, stop in ranges)

    check()


def test_a_task_of_an_agent_is_one_sample() -> None:
    messages = session([10, 10], random.Random(3))
    samples = {name: rendering(engines_of(SOURCES[name]), messages, "minijinja") for name in AGENTS}
    counts = {name: len(found.samples) for name, found in samples.items() if isinstance(found, Rendering)}
    assert counts["after the last user message"] == 2
    assert counts["until the final answer"] == 2
    assert counts["kept"] == 1
    assert counts["end of the last result"] == 22 - 2  # the first answer of each task does not follow a result


@pytest.mark.parametrize("name", ["after the last user message", "until the final answer", "kept"])
def test_the_number_of_renderings_does_not_grow_with_the_turns(name: str) -> None:
    counts = Counter[int]()
    for size in (20, 40, 80):
        engines = engines_of(SOURCES[name])
        engines._fast = Counted(SOURCES[name], CONSTANTS, TODAY)
        messages = session([size], random.Random(5))
        for message in messages:  # of one kind
            message.update({"content": "be"})
            if message["role"] == "assistant":
                message.update({"reasoning_content": "since"})
        assert isinstance(rendering(engines, messages, "minijinja"), Rendering)
        counts[size] = engines._fast.count
    assert counts[80] == counts[40] == counts[20] < 20
