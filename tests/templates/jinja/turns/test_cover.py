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
from support.differential.agent_sessions import session
from support.profiles import examples
from support.templates.agent_templates import AGENTS
from support.templates.modern_templates import CONTINUED, INTRODUCED, MODERN, STRIPPED

from packcorpus.tasks.templates.jinja.engines import Engines, FastTemplate
from packcorpus.tasks.templates.jinja.renderer import Renderer
from packcorpus.tasks.templates.jinja.rendering import Job, Rendering

TODAY = datetime(2026, 1, 1)
CONSTANTS = {"bos_token": "<s>", "eos_token": "<|im_end|>"}
ENDS = r"<\|im_end\|>|<\|im_start\|>|</s>"

SOURCES = MODERN | AGENTS
SOURCES |= {"stripped": STRIPPED, "continued": CONTINUED, "introduced": INTRODUCED}


class Counted(FastTemplate):
    """A template that counts its renderings."""

    count = 0

    def _rendered(self, messages: list[Any], tools: Any, prompt: bool) -> Any:
        self.count += 1
        return super()._rendered(messages, tools, prompt)


def engines_of(source: str) -> Engines:
    return Engines(Renderer("agent.jinja", source, CONSTANTS, TODAY, ENDS), source, CONSTANTS, TODAY, ENDS)


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
        if isinstance(few, Rendering) and isinstance(every, Rendering) and few.lost and every.lost:
            # The conversation is rejected. Which of several turns is named depends on the order of renderings.
            every = every._replace(lost=few.lost)
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
