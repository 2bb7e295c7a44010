"""Define an entry of `sources` in the config, a source file, and its parts."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, BinaryIO, ClassVar, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    WithJsonSchema,
    field_validator,
    model_serializer,
)

from packcorpus.tasks.conversations.formats import (
    COLUMNS,
    FORMAT_NAMES,
    OWN_KEYS,
    USUAL_COLUMNS,
    check_format,
    read_record,
)
from packcorpus.tasks.conversations.model import Conversation
from packcorpus.tasks.conversations.names import Roles, is_of_record
from packcorpus.tasks.conversations.other_data import OTHER_KEYS, check_ignored, without_parts
from packcorpus.tasks.conversations.session import SESSION, without_media
from packcorpus.tasks.conversations.several_answers import CHOSEN, PREFERENCE, REJECTED
from packcorpus.tasks.conversations.turn_weights import LOSS_WEIGHT
from packcorpus.tasks.core.errors import DataError, Reject, StorageError
from packcorpus.tasks.core.other_tools import Place
from packcorpus.tasks.core.yaml_settings import defaults_of
from packcorpus.tasks.readers.csv_file import check_delimiter, check_encoding, name_of
from packcorpus.tasks.sources.blocks import BlockDigests, open_blocks, open_checked
from packcorpus.tasks.stores.store import Facts
from packcorpus.tasks.stores.urls import check_url, is_url

_BUFFER = 1 << 12  # the default up to Python 3.13; Python 3.14 would read 128 KiB for each sample of a file


FormatName = Annotated[
    str,
    AfterValidator(lambda name: name if name == "auto" else check_format(name)),
    WithJsonSchema({"type": "string", "enum": ["auto", *FORMAT_NAMES]}),
]
Delimiter = Annotated[str, AfterValidator(check_delimiter), WithJsonSchema({"type": "string"})]
EncodingName = Annotated[str, AfterValidator(check_encoding), WithJsonSchema({"type": "string"})]

# Settings of a source that are recorded only if they are set.
LATER = ("roles", "delimiter", "encoding", "ignore", "drop_roles", "tokenizer_sha256", "split")
SHOWN = 5  # maximum number of files whose unusual layout is described


class Source(BaseModel):
    """One entry of `sources`."""

    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)
    place: ClassVar[Place] = "source"

    path: str = Field(
        min_length=1,
        description="File, glob or folder, relative to the folder of the config; a URL (`s3://`, `gs://`, `az://`, "
        "`hf://datasets/OWNER/NAME@REVISION/PATH`, `file://`); or OWNER/NAME of a dataset on the Hugging Face Hub.",
    )
    format: FormatName = Field(
        default="auto", description="Record format; auto finds it from the keys of the first records."
    )
    columns: dict[str, str] = Field(
        default_factory=dict,
        description="Keys of packcorpus and their names in the file, such as {instruction: frage}. `role`, `content`, "
        "and `train` are keys of a message, `reasoning` and `loss_weight` of a message or a record, and all others "
        "of a record.",
    )
    roles: Roles = Field(
        default_factory=dict,
        description="As the key `roles` of the config, for this source.",
    )
    delimiter: Delimiter = Field(
        default="auto", description="Character between the cells of a CSV or TSV file, or tab; auto finds it."
    )
    encoding: EncodingName = Field(
        default="auto", description="Encoding of a CSV or TSV file, such as windows-1252; auto finds it."
    )
    ignore: list[str] = Field(
        default_factory=list,
        description="Keys, and types of content parts, with images, audio, video, or preference data to leave out, "
        "such as [images, label]; `tools` leaves out the tools of conversations.",
    )
    drop_roles: list[Literal["system", "tool"]] = Field(
        default_factory=list,
        description="Roles whose messages are left out, such as [tool] for a template that does not write results.",
    )
    tokenizer_sha256: str = Field(
        default="",
        pattern=r"^([0-9a-f]{64})?$",
        description="SHA-256 of the tokenizer that recorded the ids of a source with format `tokens`; the run stops if "
        "it is not the tokenizer of the config.",
    )
    weight: float = Field(
        default=1.0, gt=0, le=1000, allow_inf_nan=False, description="Weight of this source; see `weighting`."
    )
    limit: int | None = Field(
        default=None,
        ge=1,
        description="Maximum number of conversations to pack from this source, selected by the seed.",
    )
    split: Literal["train", "validation"] | None = Field(
        default=None,
        description="Split of all its conversations: `validation`, or `train` to hold out none. By default, "
        "`validation` of the config chooses. Validation sources are packed once and have no share of the mixture.",
    )

    @field_validator("path")
    @classmethod
    def _check_path(cls, path: str) -> str:
        """Refuse a URL with credentials before anything else shows it."""
        if is_url(path):
            check_url(path)
        return path

    @field_validator("weight", mode="before")
    @classmethod
    def _check_percent(cls, weight: object) -> object:
        if isinstance(weight, str) and weight.strip().endswith("%"):
            number = weight.strip().removesuffix("%").strip()
            raise ValueError(
                f"must be a number; for shares of the result, set weighting: proportions and weight: {number:.20}"
            )
        return weight

    @field_validator("drop_roles")
    @classmethod
    def _sort_roles(cls, roles: list[str]) -> list[str]:
        return sorted(set(roles))

    @field_validator("ignore")
    @classmethod
    def _check_ignore(cls, names: list[str]) -> list[str]:
        check_ignored(names)
        return sorted(set(names))

    @model_serializer(mode="wrap")
    def _leave_out_defaults(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out defaults of LATER, which older configs have no keys for."""
        values, defaults = serialize(self), defaults_of(type(self))
        return {name: value for name, value in values.items() if name not in LATER or value != defaults[name]}

    @property
    def role_names(self) -> dict[str, str]:
        """Return the role of each name in `roles`, by the name in lower case."""
        return {name.lower(): role for role, names in self.roles.items() for name in names}


@dataclass(frozen=True, slots=True)
class SourceFile:
    """One file of the sources, and how to read it.

    `path` is absolute. `name` is the path as in the config, with forward slashes. `container` is the container of the
    content, which may differ from the extension, and `format` is never `auto`. `bytes` and `mtime_ns` are the size and
    modification time of the content that `sha256` was computed from. `entry` is the index of the first entry of
    `sources` that matches the file. `roles` has further names of roles, in lower case, each with its role. `delimiter`
    and `encoding` of a CSV or TSV file are empty for the usual values: comma or tab, and UTF-8. `tokenizer_sha256`
    names the tokenizer of recorded ids, if the source does. `group_key` is the key of records that `validation_by`
    names, and `pairs` the setting of the config. `note` is what a user may want to know of the file's folder. `blocks`
    has the digests of the file's blocks once the file is hashed.

    The `name` of a remote file is its URL. `path` is then the local copy, `arrived` is the SHA-256 of the copy on
    arrival, and `revision` is the commit of a dataset on the Hub. An object that is read in blocks has its ETag as
    `identity`. Its `arrived` is empty, and the file at `path` holds only the blocks that were read, with holes between
    them.
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
    drop_roles: tuple[str, ...] = ()
    roles: tuple[tuple[str, str], ...] = ()
    delimiter: str = ""
    encoding: str = ""
    tokenizer_sha256: str = ""
    revision: str = ""
    arrived: str = ""
    identity: str = ""
    group_key: str = ""
    pairs: str = "chosen"
    note: str = field(default="", compare=False)
    blocks: BlockDigests | None = field(default=None, compare=False, repr=False)

    @property
    def facts(self) -> Facts:
        return Facts(self.bytes, self.identity)

    def open(self, stop: int | None = None) -> BinaryIO:
        """Open the file to read all bytes up to `stop`, or single places without it.

        Once the file is hashed, reading raises DataError if it has changed since.
        """
        if self.identity:
            return open_blocks(self.path, self.name, self.facts, self.blocks, stop)
        if self.blocks is None:
            return self.path.open("rb", _BUFFER)
        return open_checked(self.path, self.name, self.bytes, self.blocks)

    def check_unchanged(self) -> None:
        """Raise DataError if the file has another size or modification time than before."""
        if self.identity:  # each response is compared with its ETag
            return
        try:
            stat = self.path.stat()
        except OSError:
            raise DataError("input_changed", f"{self.name}: disappeared while it was read; run again") from None
        if (stat.st_size, stat.st_mtime_ns) != (self.bytes, self.mtime_ns):
            raise DataError("input_changed", f"{self.name}: changed while it was read; run again")

    def cannot_read(self, error: OSError) -> StorageError:
        """Return the error for a failure to read the file."""
        return StorageError("cannot_read", f"{self.name}: cannot be read: {error.strerror or error}")

    @property
    def wanted_columns(self) -> frozenset[str]:
        """Return the keys that have a meaning in a record of this file."""
        mapped = [theirs for ours, theirs in self.columns if is_of_record(ours)]
        # The format is "" until it is found.
        own = COLUMNS if self.format in ("", *(format.name for format in OWN_KEYS)) else USUAL_COLUMNS
        return frozenset((*own, LOSS_WEIGHT, *mapped, *OTHER_KEYS.difference(self.ignore), *self.group_keys))

    @property
    def unread(self) -> frozenset[str]:
        """Return the keys of a pair that settings leave out."""
        if self.format != PREFERENCE.name:
            return frozenset()
        chosen, rejected = (dict(self.columns).get(name, name) for name in (CHOSEN, REJECTED))
        return frozenset({chosen, rejected}.intersection(self.ignore)).union([rejected] * (self.pairs != "both"))

    @property
    def group_keys(self) -> tuple[str, ...]:
        """Return the keys of a record that may hold the value of `group_key`."""
        return (self.group_key, self.group_key.partition(".")[0]) if self.group_key else ()

    @property
    def reading(self) -> dict[str, Any]:
        """Return the unusual settings that this file is read with, for content keys."""
        facts = {"roles": dict(self.roles), "delimiter": self.delimiter, "encoding": self.encoding}
        facts |= {"ignore": list(self.ignore), "drop_roles": list(self.drop_roles)}
        return {name: value for name, value in facts.items() if value}

    def conversation(self, record: object, left_out: Counter[str] | None = None) -> Conversation:
        """Convert a record of this file to a conversation.

        What settings leave out is counted in `left_out`. Raises Reject, also if the record is itself a Reject.
        """
        if isinstance(record, Reject):
            raise record
        if self.format == SESSION.name and isinstance(record, dict):
            record = without_media(record, self.ignore)
        record = without_parts(record, self.ignore)
        if isinstance(record, dict) and (unread := self.unread):
            record = {key: value for key, value in record.items() if key not in unread}
        conversation = read_record(record, self.format, dict(self.columns), dict(self.roles))
        if "tools" in self.ignore and conversation.tools:
            conversation.tools = ()
            if left_out is not None:
                left_out["left_out_tools"] += 1
        if self.drop_roles:
            kept = [k for k, message in enumerate(conversation.messages) if message.role not in self.drop_roles]
            if left_out is not None:
                roles = [message.role for message in conversation.messages if message.role in self.drop_roles]
                left_out.update(f"left_out_{role}" for role in roles)
            answers = tuple(a._replace(first=bisect_left(kept, a.first)) for a in conversation.answers)
            ends = [*(answer.first for answer in answers), len(kept)]
            emptied = [answer.place for answer, end in zip(answers, ends[1:], strict=True) if answer.first == end]
            if not kept or emptied:
                what = f"{emptied[0]}: all" if emptied else "all"
                names = ", ".join(self.drop_roles)
                raise Reject("empty", f"{what} of its messages have a role of `drop_roles`: {names}")
            conversation.messages = tuple(conversation.messages[k] for k in kept)
            conversation.answers = answers
        return conversation


def found_layouts(files: Sequence[SourceFile], sources: Sequence[Source]) -> list[str]:
    """Return up to five notes on files, and on what was detected in them."""
    lines = list(dict.fromkeys(file.note for file in files if file.note))
    for file in files:
        source = sources[file.entry]
        facts = [f"delimiter {name_of(file.delimiter)}"] * bool(file.delimiter and source.delimiter == "auto")
        facts += [f"encoding {file.encoding}"] * bool(file.encoding and source.encoding == "auto")
        if facts:
            lines.append(f"{file.name}: found {' and '.join(facts)}; if that is wrong, set it in its source")
    further = [f"and {len(lines) - SHOWN:,} more files"] * (len(lines) > SHOWN)
    return lines[:SHOWN] + further


@dataclass(frozen=True, slots=True)
class Part:
    """The range [start, stop) of a file that one step reads.

    It counts bytes of the text, decompressed, or rows. Only if a compressed file is one part, it counts its own bytes.
    `sha256` is the digest of the bytes. For rows, it is the digest of the file's digest, `start`, and `stop`. It
    does not cover container, compression, format, and columns. `unpacked` is a copy of the range, if there is one.
    """

    file: SourceFile
    start: int
    stop: int
    sha256: str
    unpacked: Path | None = field(default=None, compare=False)

    @property
    def is_whole(self) -> bool:
        """Return whether this is a text file as a whole, perhaps compressed."""
        return self.sha256 == self.file.sha256
