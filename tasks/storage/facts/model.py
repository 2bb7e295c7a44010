"""The base of all parts of a manifest."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field, SerializerFunctionWrapHandler, model_serializer

SHA256 = Field(pattern=r"^[0-9a-f]{64}$")


class Facts(BaseModel):
    """A part of a manifest.

    A field with a default appears only in manifests of corpora for which it has another value.
    """

    # Build validators on first use: most parts are only validated within the whole manifest, by its validator.
    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)

    @model_serializer(mode="wrap")
    def _leave_out_defaults(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        fields = type(self).model_fields
        return {
            name: value
            for name, value in dump(self).items()
            if fields[name].is_required() or value != fields[name].get_default(call_default_factory=True)
        }
