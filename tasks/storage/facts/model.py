"""The base of all parts of a manifest."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

SHA256 = Field(pattern=r"^[0-9a-f]{64}$")


class Facts(BaseModel):
    """A part of a manifest."""

    # Build validators on first use: most parts are only validated within the whole manifest, by its validator.
    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)


def set_only(values: dict[str, Any], *names: str) -> dict[str, Any]:
    """Return `values` without the entries of `names` that are None.

    An optional field thus appears only in manifests of corpora that have it.
    """
    return {key: value for key, value in values.items() if key not in names or value is not None}
