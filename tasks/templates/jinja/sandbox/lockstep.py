"""Render many conversations in few calls of the sandbox.

    steps of each conversation   ─yield Job─▶  ┐                                    ┌ ─send Rendering─▶  steps
                                 ─yield Job─▶  ┴ render_all: one call for them all ─┴ ─send Rendering─▶

Preparing a conversation takes one or several renderings, and each may depend on the previous rendering. The steps of a
conversation are therefore a generator that yields requests and receives answers.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from itertools import accumulate, chain, islice
from typing import Any

from tasks.core.errors import DataError, PackError, Reject
from tasks.templates.jinja.sandbox.renderer import CALL, Renderer
from tasks.templates.jinja.sandbox.requests import Answer, Job, Pieces, Rendering
from tasks.templates.spans import Sample

# Number of conversations that are rendered together. Their renderings are held in memory.
AT_ONCE = 64

_REQUESTS = (Job, Pieces)

Steps = Generator[Job | Pieces, Any, list[Sample] | None]
Result = list[Sample] | None | Reject | PackError


def results_of(steps: Sequence[Steps], renderer: Renderer) -> Iterator[Result]:
    """Yield the result of each conversation's steps, or the error that they raise.

    If placeholders cannot be rendered, the steps receive None, because the conversation itself may be valid.
    """
    for first in range(0, len(steps), AT_ONCE):
        some = steps[first : first + AT_ONCE]
        now = [_go_on(step) for step in some]  # the next request, or the result
        while places := [place for place, each in enumerate(now) if isinstance(each, _REQUESTS)]:
            jobs = {place: job for place in places if isinstance(job := now[place], Job)}
            alone = {place: job for place, job in jobs.items() if job.trace}
            together = {place: job for place, job in jobs.items() if not job.trace}
            pieces = {place: each for place in places if isinstance(each := now[place], Pieces)}
            answers = chain(renderer.render_all([*together.values()]), _written([*pieces.values()], renderer))
            for place, answer in zip([*together, *pieces], answers, strict=True):
                now[place] = answer if isinstance(answer, Reject | DataError) else _go_on(some[place], answer)
            for place, job in alone.items():
                now[place] = _go_on(some[place], _of_placeholders(job, renderer))
        yield from (each for each in now if not isinstance(each, _REQUESTS))


def _written(requests: Sequence[Pieces], renderer: Renderer) -> Iterator[Answer | Reject | DataError]:
    """Yield the results of the pieces of each conversation.

    The pieces of many conversations are one request. If it fails, the pieces of each conversation are sent separately,
    so that each answer belongs to one conversation.
    """
    first = 0
    while first < len(requests):
        sizes = accumulate(request.size for request in requests[first:])
        some = requests[first : first + 1 + sum(1 for size in sizes if size < CALL)]
        first += len(some)
        [answer] = renderer.render_all([Pieces([*chain(*(each.pieces for each in some))], 0)])
        if isinstance(answer, list):
            pieces = iter(answer)
            yield from ([*islice(pieces, len(each.pieces))] for each in some)
        else:
            yield from renderer.render_all(some)


def _of_placeholders(job: Job, renderer: Renderer) -> Rendering | None:
    try:
        return renderer.render(job)
    except (Reject, DataError):
        return None


def _go_on(step: Steps, answer: Answer | None = None) -> Job | Pieces | Result:
    """Return the next request, or the result."""
    try:
        return step.send(answer)
    except StopIteration as end:
        return end.value
    except (Reject, PackError) as problem:
        return problem.with_traceback(None)  # a traceback refers to the steps, and so to all texts of the conversation
