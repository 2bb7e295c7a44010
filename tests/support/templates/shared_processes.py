"""Let templates with the same source share one process in the tests.

Starting the process of a template takes 50 ms there, because a fork copies the page table of its parent, and the tests
are a large process. Three of four templates of the tests were opened before. As in a corpus, a process then serves many
conversations. It remembers how conversations of the same shape were traced, so tests of tracing have their own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from packcorpus.tasks.templates.jinja import renderer as jinja2_process
from packcorpus.tasks.templates.jinja import template
from packcorpus.tasks.templates.jinja.renderer import Renderer

MOST = 40  # processes

_renderers: dict[str, Renderer] = {}


def open_renderer(*arguments: Any) -> Renderer:
    """Return the renderer with these arguments that was opened before, or open one.

    A process keeps the limits that were in effect at its start.
    """
    key = repr((arguments, jinja2_process.SECONDS, jinja2_process.MEMORY))
    if key not in _renderers:
        if len(_renderers) == MOST:
            _renderers.pop(next(iter(_renderers))).close()
        _renderers[key] = Renderer(*arguments)
    return _renderers[key]


@contextmanager
def shared_processes() -> Iterator[None]:
    """Share processes in this context, and end them after it.

    Their memory differs more and more from that of the tests.
    """
    with mock.patch.object(template, "Renderer", open_renderer):
        yield
    for renderer in _renderers.values():
        renderer.close()
    _renderers.clear()
