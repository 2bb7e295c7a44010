"""The shape of rows: their lengths, the alignment of pieces, and padding."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from tasks.storage.facts.model import Facts
from tasks.storage.keys import SHAPE_SETTINGS


class RowShape(Facts):
    """Properties of rows that differ from format 3.0; the others are left out."""

    align: int = Field(default=1, ge=1, description="Pieces start at multiples of this number.")
    padding: Literal["row", "none"] = Field(
        default="row", description="none: rows are lists that end after their last piece."
    )
    lengths: list[int] | None = Field(default=None, description="The lengths of rows, ascending.")
    mix: Literal["tokens", "blocks"] | None = Field(
        default=None, description="The order of training steps of several lengths."
    )

    def physical(self, length: Any) -> Any:
        """Return the length of a piece, rounded up to a multiple of `align`.

        This is the number of places from its start to the next possible start.
        """
        return -(-length // self.align) * self.align


def shape_of(settings: dict[str, Any]) -> RowShape | None:
    """Return the shape of rows from recorded settings, or None for format 3.0."""
    values = {name: settings[name] for name in SHAPE_SETTINGS if name in settings}
    if isinstance(lengths := settings.get("sequence_length"), list):
        values |= {"lengths": lengths, "mix": settings.get("mix", "tokens")}
    return RowShape.model_validate(values) if values else None
