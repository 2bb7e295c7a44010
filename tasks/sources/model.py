"""Define an entry of the config's sources, a source file, and its parts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, WithJsonSchema, field_validator

from tasks.conversations.formats import COLUMNS, FORMAT_NAMES, check_format, read_record
from tasks.conversations.keys.other_data import OTHER_KEYS, check_ignored, without_parts
from tasks.conversations.model import Conversation
from tasks.core.errors import Reject


def _check_format(name: str) -> str:
    return name if name == "auto" else check_format(name)


FormatName = Annotated[
    str, AfterValidator(_check_format), WithJsonSchema({"type": "string", "enum": ["auto", *FORMAT_NAMES]})
]


class Source(BaseModel):
    """One entry of `sources`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    path: str = Field(min_length=1, description="File, glob or folder, relative to the folder of the config.")
    format: FormatName = Field(
        default="auto", description="Record format; auto finds it from the keys of the first records."
    )
    columns: dict[str, str] = Field(
        default_factory=dict, description="packcorpus key → key of the file, such as {instruction: frage}."
    )
    ignore: list[str] = Field(
        default_factory=list,
        description="Keys, and types of content parts, to leave out of records that are images, audio, video, or "
        "preference data, such as [images, label].",
    )
    weight: float = Field(
        default=1.0, gt=0, le=1000, allow_inf_nan=False, description="Weight of this source; see `weighting`."
    )
    limit: int | None = Field(
        default=None,
        ge=1,
        description="Maximum number of conversations to pack from this source, selected by the seed.",
    )

    @field_validator("ignore")
    @classmethod
    def _check_ignore(cls, names: list[str]) -> list[str]:
        check_ignored(names)
        return sorted(set(names))


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A file that is read.

    `path` is absolute; `name` is the path as in the config, with /. `container` and `format` are those of the content,
    not those requested. `bytes` and `mtime_ns` are from the time when `sha256` was computed. `entry` is the index of
    the first entry of `sources` that matches the file.
    """

    path: Path
    name: str
    container: str
    compression: str
    format: str
    columns: tuple[tuple[str, str], ...]
    bytes: int
    sha256: str
    mtime_ns: int
    entry: int = 0
    ignore: tuple[str, ...] = ()

    @property
    def wanted_columns(self) -> frozenset[str]:
        """The keys that have a meaning in a record of this file."""
        return frozenset((*COLUMNS, *(theirs for _, theirs in self.columns), *OTHER_KEYS.difference(self.ignore)))

    def conversation(self, record: object) -> Conversation:
        """Read a record of this file. Raises Reject, also if the record is one."""
        if isinstance(record, Reject):
            raise record
        return read_record(without_parts(record, self.ignore), self.format, dict(self.columns))


@dataclass(frozen=True, slots=True)
class Part:
    """The range of a file that one task reads: bytes [start, stop), or groups of rows.

    `sha256` is the digest of the bytes; for groups of rows, of the file's digest, start, and stop. It does not cover
    container, compression, format, and columns.
    """

    file: SourceFile
    start: int
    stop: int
    sha256: str
