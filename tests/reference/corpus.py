"""Records → the samples that a corpus must hold of each, or None for a reject."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from reference import families
from reference.records import Rejected, read
from reference.tokens import Encoded, Library, encoded, shares_its_text


def expected(
    records: Sequence[Any], format: str, template: str, library: Library, train_on: str = "assistant"
) -> list[list[Encoded] | None]:
    """Return the samples of each record in the order of its turns, or None.

    None means that the record must be rejected.
    """
    written = [samples_of(record, format, template, library, train_on) for record in records]
    ids = iter(encoded([sample for samples in written for sample in samples], library))
    return [[next(ids) for _ in samples] or None for samples in written]


def samples_of(
    record: Any, format: str, template: str, library: Library, train_on: str = "assistant"
) -> list[families.Sample]:
    """Return the samples of a record as text.

    The list is empty if the record must be rejected, or if none of its turns is trained on.
    """
    try:
        messages, tools = read(record, format)
    except Rejected:
        return []
    if not any(families.trained_turns(messages, train_on)):
        return []
    found = families.samples(template, messages, tools, train_on, library.adds_space)
    return [] if any(shares_its_text(sample, library) for sample in found) else found
