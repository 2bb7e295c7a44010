"""Check the settings of rows.

tasks.config ─the settings that are not at their default─▶ ValueError, which names the setting and the fix

There are rules for the lengths of rows, for settings that need packed rows, and for settings that exclude each other.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

# Shortest and longest row, in tokens, and the maximum number of lengths in a corpus.
SHORTEST_ROW, LONGEST_ROW, MOST_LENGTHS = 8, 1 << 20, 8

# Settings that need packed rows, and the reason why they have no meaning without packing.
WITHOUT_PACKING = {
    "company": "no row is shared",
    "loss_weight": "rows have no column for it",
    "balance": "the trainer creates and orders the batches",
    "align": "a row has text instead of tokens",
    "padding": "a row has text instead of tokens",
}

# Settings that exclude several lengths of rows, and the reason.
NOT_WITH_LENGTHS = {
    "align": "the row of a conversation is chosen by its number of tokens, without alignment",
    "balance": "all rows of a balanced step have one length",
    "padding": "rows without padding have no length",
}

# Pairs of settings that exclude each other, and the reason.
NOT_TOGETHER = (
    ("padding", "loss_weight", "rows without padding have no column for weights"),
    ("padding", "balance", "rows of a balanced order are equally long"),
)


class Balance(BaseModel):
    """Steps that rows are ordered for, with about equal work for all ranks."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    ranks: int = Field(ge=2, le=1 << 16, description="Number of ranks (GPUs with a copy of the model) in a step.")
    rows_per_rank: int = Field(
        1,
        ge=1,
        le=1 << 16,
        description="Number of rows that each rank processes before the ranks wait for each other, or a divisor of it.",
    )


def or_lengths(schema: dict[str, Any]) -> None:
    """Allow several lengths in the JSON Schema."""
    bounds = {name: schema.pop(name) for name in ("minimum", "maximum")}
    one = {"type": schema.pop("type"), **bounds}
    several = {"type": "array", "items": one, "minItems": 1, "maxItems": MOST_LENGTHS, "uniqueItems": True}
    schema["anyOf"] = [one, several]


def lengths_of(value: list[Any]) -> tuple[int, ...]:
    """Return several lengths of rows, ascending.

    Raises ValueError if a length is invalid or given twice, or if there are none or too many.
    """
    for length in value:
        if type(length) is not int or not SHORTEST_ROW <= length <= LONGEST_ROW:
            raise ValueError(
                f"sequence_length: {length!r} in {value!r} must be an integer from {SHORTEST_ROW} to {LONGEST_ROW:,}"
            )
    if not value or len(set(value)) != len(value) or len(value) > MOST_LENGTHS:
        raise ValueError(
            f"sequence_length: {value!r}: expected 1 to {MOST_LENGTHS} lengths, each once, such as [512, 1024]"
        )
    return tuple(sorted(value))


def check_packing(packing: bool, chosen: Mapping[str, Any]) -> None:
    """Raise ValueError if a setting excludes another setting or needs packed rows.

    `chosen` has the settings that are not at their default.
    """
    for name, why in () if packing else WITHOUT_PACKING.items():
        if name in chosen:
            given = name if isinstance(chosen[name], Balance) else f"{name}: {chosen[name]}"
            raise ValueError(f"{given} requires packing: true; without packing, {why}; remove {name}")
    for one, other, why in NOT_TOGETHER:
        if one in chosen and other in chosen:
            raise ValueError(f"{one} and {other} cannot be set together: {why}; remove one of them")


def check_align(length: int, align: int) -> None:
    """Raise ValueError if the length of rows is not a multiple of `align`."""
    if length % align:
        below = length // align * align
        nearest = [f"{near:,}" for near in (below, below + align) if SHORTEST_ROW <= near <= LONGEST_ROW]
        raise ValueError(
            f"sequence_length: {length:,} is not a multiple of align: {align:,}; "
            f"the nearest {'multiples are' if len(nearest) > 1 else 'multiple is'} {' and '.join(nearest)}"
        )


def check_lengths(lengths: tuple[int, ...], packing: bool, chosen: Mapping[str, Any]) -> None:
    """Raise ValueError if a setting excludes or needs several lengths of rows.

    `lengths` is empty if there is only one length. `chosen` has the settings that are not at their default.
    """
    if lengths and not packing:
        raise ValueError(
            f"sequence_length: {list(lengths)} requires packing: true; without packing, rows have no length"
        )
    for name, why in NOT_WITH_LENGTHS.items() if lengths else ():
        if name in chosen:
            raise ValueError(
                f"sequence_length: {list(lengths)} and {name} cannot be combined: {why}; remove {name}, or keep one "
                "length"
            )
    if "mix" in chosen and not lengths:
        raise ValueError(
            f"mix: {chosen['mix']} requires several lengths, such as sequence_length: [512, 1024]; for a single "
            "length, remove mix"
        )
