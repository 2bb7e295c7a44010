"""Render conversations with tools with a template of their own.

Some tokenizers have the chat templates `default` and `tool_use`. Like transformers, `tool_use` renders a conversation
that has tools, and `default` all others.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

from tasks.conversations.model import Conversation
from tasks.core.errors import PackError, Reject
from tasks.templates.jinja.engines.choice import BothEngines
from tasks.templates.jinja.template import AT_ONCE, JinjaTemplate
from tasks.templates.spans import Outline, Sample, Span, Template


def open_jinja(name: str, sources: Sequence[str], *settings: Any) -> Template:
    """Open a Jinja template.

    A second source is for conversations with tools. `settings` are the further arguments of a JinjaTemplate.
    """
    default, *others = (JinjaTemplate(name, source, *settings) for source in sources)
    return ByTools(default, *others) if others else default


class ByTools(Template):
    """Two Jinja templates of one tokenizer, one of them for conversations with tools."""

    markers_as_text: tuple[str, ...] = ()

    def __init__(self, default: JinjaTemplate, tool_use: JinjaTemplate):
        self._default, self._tool_use = default, tool_use
        self.name, self.encoder = default.name, default.encoder
        self.adjust, self.sections = default.adjust, default.sections
        self.engines = BothEngines(default.engines, tool_use.engines)
        self.undefined = (*default.undefined, *tool_use.undefined)

    def of(self, conversation: Conversation) -> JinjaTemplate:
        """Return the template that renders a conversation."""
        return self._tool_use if conversation.tools else self._default

    def knows_developer(self, conversation: Conversation) -> bool:
        return self.of(conversation).knows_developer(conversation)

    def spans(self, conversation: Conversation, trained: Sequence[bool]) -> list[Span]:
        return self.of(conversation).spans(conversation, trained)

    def samples(self, conversation: Conversation, trained: Sequence[bool]) -> list[Sample]:
        return self.of(conversation).samples(conversation, trained)

    def all_samples(
        self, conversations: Sequence[tuple[Conversation, Sequence[bool]]]
    ) -> Iterator[list[Sample] | Reject | PackError]:
        """Yield the samples of each conversation, or the error that `samples` raises."""
        remaining = iter(conversations)
        while some := list(islice(remaining, AT_ONCE)):
            templates = [self.of(conversation) for conversation, _ in some]
            found = {
                id(template): template.all_samples(
                    [pair for pair, other in zip(some, templates, strict=True) if other is template]
                )
                for template in (self._default, self._tool_use)
            }
            for template in templates:
                yield next(found[id(template)])

    def separate(self, conversation: Conversation) -> Conversation | None:
        return self.of(conversation).separate(conversation)

    def outline(self, conversation: Conversation, trained: Sequence[bool]) -> Outline | None:
        return self.of(conversation).outline(conversation, trained)
