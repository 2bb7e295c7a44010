"""Find out whether the template is to blame for failures.

    first 100 conversations ─┬─ all fail in the same way ─▶ DataError: it is the template
                             └─ otherwise ────────────────▶ each failure is a reject, under `max_rejects`

The first conversations are those in source order, and all conversations if there are fewer. They do not depend on
parts, workers, or engines. A run looks at them before it tokenizes the first part, and stops at the first one that does
not fail like the others. Nearly always, that is the first one, so the check takes a millisecond. A plan repeats the
check on the receipts of the parts, because earlier runs may have tokenized them. With `max_rejects: 1`, all
conversations may be rejected, so there is no check.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import islice

from tasks.core.errors import DataError, PackError, Reject
from tasks.readers.container import RecordReader
from tasks.readers.containers import container_named
from tasks.recipe import Recipe
from tasks.tokenization.prepare import Preparer

FIRST = 100

# Reasons to reject a conversation that are the fault of the template if all conversations have them.
OF_TEMPLATE = ("turn_not_located", "reasoning_not_written", "calls_not_written", "reasoning_left_out")


def check_first_conversations(recipe: Recipe) -> None:
    """Raise DataError if the first conversations all fail in the same way.

    An error of reading is left to the step that reads the whole source.
    """
    if recipe.config.max_rejects < 1 and (failure := first_failure(recipe)):
        raise failure


def first_failure(recipe: Recipe) -> DataError | None:
    """Return the error if the first conversations all fail in the same way."""
    rejects: list[tuple[str, Reject]] = []
    with suppress(PackError):
        for place, reject in islice(_rejects(recipe), FIRST):
            if reject is None:
                return None
            rejects.append((place, reject))
            if not are_alike([reject.reason for _, reject in rejects]):
                return None
        for place, first in rejects[:1]:
            return failure_of(len(rejects), place, first.reason, first.message)
    return None


def are_alike(reasons: Sequence[str]) -> bool:
    """Return whether conversations fail alike, perhaps due to the template."""
    return len(set(reasons)) == 1 and reasons[0] in OF_TEMPLATE


def failure_of(count: int, place: str, reason: str, message: str) -> DataError:
    """Return the error for `count` conversations that fail alike.

    `place` and `message` are those of the first one.
    """
    alike = f"; the first {count:,} conversations all fail like this" if count > 1 else ""
    return DataError(reason, f"{place}: {message}{alike}")


def _rejects(recipe: Recipe) -> Iterator[tuple[str, Reject | None]]:
    """Yield the place of each conversation, with its reject if it cannot be prepared."""
    config = recipe.config
    for file in recipe.files:
        weighted = config.reads_loss_weights
        preparer = Preparer(file, recipe.template, recipe.encoder, config.train_on, config.packing, weighted)
        reader = RecordReader(
            container_named(file.container), file, max_record_bytes=config.max_record_bytes, decode=preparer.decode
        )
        for number, record in reader:
            [found] = preparer.prepare_all([record])
            if isinstance(found, PackError):
                raise found
            yield f"{file.name}:{number + 1}", found if isinstance(found, Reject) else None
