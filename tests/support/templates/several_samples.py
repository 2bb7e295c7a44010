"""A template that makes several samples of some conversations.

Templates that strip reasoning from the history do so, too. `stripping_template` makes every recipe of this process
render with it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise

import pytest

from packcorpus.tasks.conversations.model import Conversation
from packcorpus.tasks.recipe import Recipe
from packcorpus.tasks.templates.adjust import Adjust
from packcorpus.tasks.templates.built_in import BuiltIn
from packcorpus.tasks.templates.spans import Sample, Span, Template, ends_of_samples, up_to


class Strips(Template):
    """ChatML that writes only the last word of each earlier answer.

    A conversation with longer earlier answers has one sample for each trained turn.
    """

    name = "strips"
    markers_as_text = ()
    adjust = Adjust()

    def __init__(self, inner: BuiltIn):
        self._inner, self.encoder = inner, inner.encoder

    def spans(self, conversation: Conversation, trained: Sequence[bool]) -> list[Span]:
        return self._inner.spans(conversation, trained)

    def samples(self, conversation: Conversation, trained: Sequence[bool]) -> list[Sample]:
        answers = [message for message in conversation.messages if message.role == "assistant"]
        if all(len(message.content.split()) == 1 for message in answers[:-1]):
            return [Sample(self.spans(conversation, trained))]
        ends = ends_of_samples(conversation, trained)
        return [self._sample(conversation, turn, trained, after) for after, turn in pairwise([-1, *ends])]

    def separate(self, _: Conversation) -> None:
        """Render every conversation in full."""

    def outline(self, *_: object) -> None:
        """Render every conversation in full."""

    def _sample(self, conversation: Conversation, turn: int, trained: Sequence[bool], after: int) -> Sample:
        prefix, flags = up_to(conversation, turn, trained, after)
        for message in prefix.messages[:-1]:
            if message.role == "assistant":
                message.content = (message.content.split() or [""])[-1]
        return Sample(self.spans(prefix, flags), turn, after)


@contextmanager
def stripping_template() -> Iterator[None]:
    """Make every recipe of this process render with `Strips`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Recipe, "template", property(_stripping))
        yield


def _stripping(recipe: Recipe) -> Strips:
    return Strips(BuiltIn("chatml", recipe.encoder, recipe.config.train_on))
