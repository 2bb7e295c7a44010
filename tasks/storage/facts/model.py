"""What all parts of a manifest have in common."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

SHA256 = Field(pattern=r"^[0-9a-f]{64}$")


class Facts(BaseModel):
    """A part of a manifest."""

    # Validators are built when they are first used: those of most parts never are, only that of the whole.
    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)


def set_only(values: dict[str, Any], *names: str) -> dict[str, Any]:
    """Return the values without those of `names` that are None: manifests of other corpora stay as they were."""
    return {key: value for key, value in values.items() if key not in names or value is not None}
