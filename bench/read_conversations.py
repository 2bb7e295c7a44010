"""Read the conversations of a config, for the benchmarks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from packcorpus.tasks.conversations.model import Conversation
from packcorpus.tasks.core.errors import Reject
from packcorpus.tasks.sources.model import Part
from packcorpus.tasks.sources.parts import PartReader


def conversations_of(parts: Iterable[Part]) -> Iterator[tuple[object, Conversation | Reject]]:
    """Yield each record of parts with its conversation, or with its Reject."""
    for part in parts:
        for _, record in PartReader(part):
            try:
                yield record, part.file.conversation(record)
            except Reject as reject:
                yield record, reject


def valid_conversations(parts: Iterable[Part]) -> Iterator[Conversation]:
    """Yield the conversations of parts; rejected records are left out."""
    return (found for _, found in conversations_of(parts) if isinstance(found, Conversation))
