"""Render many conversations in few calls of the sandbox.

    steps of each conversation   ─yield Job─▶  ┐                                    ┌ ─send Rendering─▶  steps
                                 ─yield Job─▶  ┴ render_all: one call for them all ─┴ ─send Rendering─▶

Preparing a conversation takes one rendering or several, and what it needs next depends on the last one. So its steps
are a generator that yields what to render and is sent the rendering.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence

from tasks.core.errors import DataError, PackError, Reject
from tasks.templates.jinja.sandbox import Job, Renderer, Rendering
from tasks.templates.spans import Sample

# Conversations that are rendered together: their renderings are held in memory.
AT_ONCE = 64

Steps = Generator[Job, Rendering, list[Sample]]
Result = list[Sample] | Reject | PackError


def results_of(steps: Sequence[Steps], renderer: Renderer) -> Iterator[Result]:
    """Yield what the steps of each conversation return, or the Reject or PackError that they raise."""
    for first in range(0, len(steps), AT_ONCE):
        some = steps[first : first + AT_ONCE]
        now = [_go_on(step) for step in some]  # a job, or the result
        while places := [place for place, each in enumerate(now) if isinstance(each, Job)]:
            renderings = renderer.render_all([job for job in now if isinstance(job, Job)])
            for place, rendering in zip(places, renderings, strict=True):
                now[place] = _go_on(some[place], rendering)
        yield from (each for each in now if not isinstance(each, Job))


def _go_on(step: Steps, rendering: Rendering | Reject | DataError | None = None) -> Job | Result:
    """Return what is to be rendered next, or the result."""
    if isinstance(rendering, Reject | DataError):
        return rendering
    try:
        return next(step) if rendering is None else step.send(rendering)
    except StopIteration as end:
        return list(end.value)
    except (Reject, PackError) as problem:
        return problem.with_traceback(None)  # it refers to the steps, and so to every text of the conversation
