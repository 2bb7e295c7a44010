"""The manifest of a corpus: what went in, what came out, and how full the rows are.

    manifest.json ─load_manifest─▶ Manifest, refused if its digest or its key shows that it was edited
    Manifest.ledger ─check─▶ an error if a conversation, a token, or a place in a row is unaccounted for

`key` is the content key: the digest of everything that the corpus was built from. `digest` covers the manifest itself.
A manifest contains no time and no host name; these are in run.json.
"""

from __future__ import annotations

import hashlib
import os
import shlex
from collections import Counter
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any, Literal

import orjson
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    ValidationError,
    field_validator,
    model_serializer,
)

from tasks.core.errors import DataError, InputMissing, StorageError
from tasks.storage.files import read_json, to_json
from tasks.storage.keys import KEY_NAMES, SHAPE_SETTINGS, corpus_key, format_version_of
from tasks.storage.paths import Layout
from tasks.storage.splits import kind_of, length_in

REPAIR = "run: packcorpus repair"

SHA256 = Field(pattern=r"^[0-9a-f]{64}$")

# Facts about a source that are recorded only if they are not the usual ones.
READING = ("roles", "delimiter", "encoding", "ignore")


class _Part(BaseModel):
    # Validators are built when they are first used: those of most parts never are, only that of the whole.
    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)


class Tokenizer(_Part):
    """The tokenizer; `path` is that of its copy in the corpus folder."""

    kind: Literal["sentencepiece", "huggingface"]
    path: str
    sha256: str = SHA256
    vocab_size: int
    bos_token_id: int | None
    eos_token_id: int
    pad_token_id: int
    engine: str = Field(
        description="The library that defines the tokens: sentencepiece or tokenizers. run.json names the encoder."
    )
    parity: dict[str, Any] | None = Field(
        None, exclude=True, description="Only in manifests of earlier versions; see run.json."
    )
    trained_here: bool = Field(description="True if the run trained it on the sources.")
    digest: str = Field(description='The part of the key: sha256, or "trained:" and the key of its training.')


class TemplateFacts(_Part):
    """The template. A marker that the tokenizer lacks is encoded as text."""

    name: str
    sha256: str = SHA256
    markers_as_text: list[str]
    leading_space: str = Field(
        description="What puts a space before text: the template, or for none, the first, or each text."
    )


class SourceFacts(_Part):
    """One source file. tokens and trained_tokens add up to encoded and trained of the ledger."""

    path: str
    entry: int = Field(ge=0, description="Index in the config's `sources`, from 0.")
    container: str
    compression: str
    format: str
    columns: dict[str, str]
    bytes: int
    sha256: str = SHA256
    conversations: int
    accepted: int
    rejected: int
    tokens: int
    trained_tokens: int
    roles: dict[str, str] = Field(default_factory=dict, description="Further names of roles, in lower case, and ours.")
    delimiter: str = Field("", description="Of a CSV or TSV file, if it is not comma or tab.")
    encoding: str = Field("", description="Of a CSV or TSV file, if it is not UTF-8.")
    ignore: list[str] = Field(default_factory=list, description="Keys and parts of other data that were left out.")
    revision: str = Field("", description="The commit of a dataset on the Hugging Face Hub.")

    @property
    def reading(self) -> dict[str, Any]:
        """Return further facts about how the file was read, if they are not the usual ones."""
        facts = {name: getattr(self, name) for name in READING}
        return {name: value for name, value in facts.items() if value}

    @model_serializer(mode="wrap")
    def _leave_out_usual(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        values = serialize(self)
        return {name: values[name] for name in values if name not in (*READING, "revision") or values[name]}


class MixtureFacts(_Part):
    """The contribution of one entry of `sources` to one pass over the training split."""

    path: str
    weight: float
    limit: int | None
    conversations: int
    copies: int = Field(description="Conversations, counted as often as they are packed.")
    tokens: int = Field(description="Tokens in rows, including separators.")
    trained_tokens: int
    tokens_percent: float
    trained_tokens_percent: float


class Conversations(_Part):
    """read = packed + Σ rejected + Σ dropped; truncated and split are among the packed."""

    read: int
    packed: int
    rejected: dict[str, int]
    dropped: dict[str, int]
    truncated: int
    split: int


class Pieces(_Part):
    """Pieces in rows: one per conversation, more with overlong: split, weights, or epochs."""

    packed: int
    dropped: int


class Tokens(_Part):
    """encoded + separators + repeated = packed + truncated + dropped; packed + padding = places in rows.

    Rows have sequence_length places; with `padding: none`, as many as they need.
    """

    encoded: int
    separators: int
    repeated: int = Field(description="Further copies, by weight and in further epochs, without separators.")
    truncated: int
    dropped: int
    rejected: int = Field(description="Tokens of conversations that were rejected after tokenization.")
    packed: int
    padding: int
    trained: int
    alignment: int | None = Field(
        None, description="Padding that rounds pieces up to multiples of `align`; part of `padding`. Only with `align`."
    )

    @model_serializer(mode="wrap")
    def _without_alignment(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return _set_only(dump(self), "alignment")


class SampleFacts(_Part):
    """Samples, of which a conversation may have one for each trained turn: read = packed + rejected + Σ dropped."""

    read: int
    packed: int
    rejected: int = Field(description="Samples of conversations that were rejected after tokenization.")
    dropped: dict[str, int]
    repeated_prompt_tokens: int = Field(
        description="Untrained tokens of each packed sample after the first of its conversation, at most as many as "
        "the packed sample before it has; further copies do not count."
    )


class Ledger(_Part):
    """Where every conversation and every token went. `samples` exists if a conversation has several samples."""

    conversations: Conversations
    pieces: Pieces
    tokens: Tokens
    samples: SampleFacts | None = None

    @model_serializer(mode="wrap")
    def _without_samples(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out `samples` if every conversation is one sample, so that such manifests stay as they were."""
        return _set_only(dump(self), "samples")

    def check(self, places: int) -> None:
        """Raise DataError unless conversations, tokens, and places in rows balance: something was lost.

        `places` is rows × sequence_length, or 0 without packing; with `padding: none` those that rows have.
        """
        of, tokens = self.conversations, self.tokens
        for unit, count, accounted in (
            ("conversations read", of.read, of.packed + sum(of.rejected.values()) + sum(of.dropped.values())),
            (
                "tokens encoded",
                tokens.encoded + tokens.separators + tokens.repeated,
                tokens.packed + tokens.truncated + tokens.dropped,
            ),
            ("places in rows", places, (tokens.packed if places else 0) + tokens.padding),
            *self._samples_to_balance(),
        ):
            if count != accounted:
                raise DataError(
                    "open_ledger", f"the ledger does not balance: {count:,} {unit}, but {accounted:,} accounted for"
                )
        if (tokens.alignment or 0) > tokens.padding:
            raise DataError(
                "open_ledger",
                f"the ledger does not balance: {tokens.alignment:,} tokens of alignment, but {tokens.padding:,} of "
                "padding, which includes them",
            )

    def _samples_to_balance(self) -> Iterator[tuple[str, int, int]]:
        if of := self.samples:
            yield "samples read", of.read, of.packed + of.rejected + sum(of.dropped.values())


class PackingMetadata(_Part):
    """How full the rows are. packing_efficiency is packed / (rows × sequence_length) in percent."""

    enabled: bool
    algorithm: str
    rows: int
    lower_bound_rows: int
    lower_bound: str
    above_lower_bound_percent: float
    packing_efficiency: float | None
    avg_conversations_per_sequence: float
    compression_ratio: float
    places: int | None = Field(None, description="Tokens and padding of all rows. Only if rows have several lengths.")
    lower_bound_places: int | None = Field(
        None,
        description="The places that every packing needs; `above_lower_bound_percent` compares them. Only if rows have "
        "several lengths: `lower_bound_rows` then is the bound of the conversations that were chosen for each length.",
    )

    @model_serializer(mode="wrap")
    def _leave_out_places(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return _set_only(dump(self), "places", "lower_bound_places")


class Shard(_Part):
    """One Arrow file; `path` is relative to the corpus folder."""

    path: str
    rows: int
    bytes: int
    sha256: str = SHA256


class RowSums(_Part):
    """Sums over the records of rows.arrow; `longest` is the largest of them."""

    squares: int = Field(description="Squared lengths of all segments, to which the cost of attention is proportional.")
    longest: int
    segments: int
    trained: int


class Split(_Part):
    """Rows and shards of train, validation, or train repacked for a later epoch: train_epoch_2, train_epoch_3, …"""

    rows: int
    shards: list[Shard]
    statistics: RowSums | None = Field(
        None, description="Of rows.arrow. Absent without packing, and in corpora of earlier versions."
    )
    groups: list[int] | None = Field(
        None, description="With `balance`, if the corpus is planned in several groups: the rows of each, in order."
    )
    sequence_length: int | None = Field(None, description="Length of its rows, if rows have several lengths.")
    tokens: int | None = Field(None, description="Tokens without padding, if rows have several lengths.")
    lower_bound_rows: int | None = Field(None, description="For the conversations of this length.")

    @model_serializer(mode="wrap")
    def _leave_out_absent(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {name: value for name, value in dump(self).items() if value is not None}


class WeightSums(_Part):
    """The weights of the trained tokens of a split. With each conversation weighted the same, the mean weight is 1."""

    trained: int = Field(description="Trained tokens.")
    conversations: int = Field(description="Conversations, counted as often as they are packed.")
    loss_weight: float = Field(description="Sum of the column `loss_weight` over all rows.")


class FileFacts(_Part):
    """A file next to the shards."""

    path: str
    bytes: int
    sha256: str = SHA256


class RowShape(_Part):
    """How rows differ from those of format 3.0. What does not differ is left out."""

    align: int = Field(default=1, ge=1, description="Pieces start at multiples of it.")
    padding: Literal["row", "none"] = Field(
        default="row", description="none: rows are lists that end after their last piece."
    )
    lengths: list[int] | None = Field(default=None, description="The lengths that rows have, ascending.")
    mix: Literal["tokens", "blocks"] | None = Field(
        default=None, description="The order of training steps of several lengths."
    )

    @model_serializer(mode="wrap")
    def _leave_out_usual(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        fields = type(self).model_fields
        return {name: value for name, value in dump(self).items() if value != fields[name].default}

    def physical(self, length: Any) -> Any:
        """Return the places from the start of a piece to the next possible start: its length, rounded up."""
        return -(-length // self.align) * self.align


def shape_of(settings: dict[str, Any]) -> RowShape | None:
    """Return the shape of rows from the recorded settings; None if it is that of format 3.0."""
    values = {name: settings[name] for name in SHAPE_SETTINGS if name in settings}
    if isinstance(lengths := settings.get("sequence_length"), list):
        values |= {"lengths": lengths, "mix": settings.get("mix", "tokens")}
    return RowShape.model_validate(values) if values else None


class Manifest(_Part):
    """A corpus and its accounting."""

    format_version: Literal["2.0", "3.0", "3.1"]
    name: str
    key: str = SHA256
    key_version: int = Field(ge=1, description="Version of the rules that compute the key from the manifest.")
    texts_version: int = Field(1, ge=1, description="Version of the wording of reject messages and the dataset card.")
    corpus: str = Field(description="The corpus folder, relative to the project root.")
    sequence_length: int = Field(description="Tokens in a row; if rows have several lengths, the longest.")
    shape: RowShape | None = Field(None, description="Only in format 3.1: how its rows differ from those of 3.0.")
    tokenizer: Tokenizer
    template: TemplateFacts
    train_on: Literal["assistant", "all", "last"]
    seed: int
    sources: list[SourceFacts]
    mixture: list[MixtureFacts] = Field(description="One entry per entry of the config's `sources`.")
    ledger: Ledger
    noticed: dict[str, int | dict[str, dict[str, int]]] = Field(
        description="Counts of things that were handled but may surprise; `content_tokens`: how often conversations "
        "contain each added token that content may become, by role; `unused_keys`: by source, how often each key of "
        "the records occurred that is not used. Absent: there is none, or an earlier version did not count them."
    )
    packing_metadata: PackingMetadata
    splits: dict[str, Split]
    loss_weight: dict[str, WeightSums] | None = Field(
        None,
        description="By split, if rows have a column `loss_weight`; otherwise absent. Splits that differ only in the "
        "length of their rows, such as train-512 and train-1024, are one here.",
    )
    files: list[FileFacts] = Field(description="Files next to the shards: index, rejects, tokenizer, dataset card.")
    config: dict[str, Any]
    digest: str = Field(pattern=r"^[0-9a-f]{64}$", description="SHA-256 of the manifest without this field.")

    @model_serializer(mode="wrap")
    def _leave_out_absent(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out what other corpora do not have, so that their manifests stay as they were."""
        return _set_only(serialize(self), "loss_weight", "shape")

    @property
    def row_shape(self) -> RowShape:
        """Return the shape of rows; with its defaults in format 3.0."""
        return self.shape or RowShape()

    @property
    def row_lengths(self) -> tuple[int, ...]:
        """Return the lengths that rows have, ascending. The last is `sequence_length`."""
        return tuple(self.row_shape.lengths or [self.sequence_length])

    @property
    def places(self) -> int:
        """Return the tokens and the padding of all rows."""
        return sum(split.rows * (split.sequence_length or self.sequence_length) for split in self.splits.values())

    def length_of_split(self, split: str) -> int:
        """Return the length of the rows of a split."""
        return self.splits[split].sequence_length or self.sequence_length

    def length_of(self, shard: str) -> int:
        """Return the length of the rows of a shard, given by its path."""
        if len(self.row_lengths) == 1:
            return self.sequence_length
        name = next((n for n, split in self.splits.items() for own in split.shards if own.path == shard), "")
        return self.length_of_split(name) if name else self.sequence_length

    def of_length(self, length: int) -> Manifest:
        """Return the part of the corpus with rows of one length: its splits without the length in their names."""
        splits = {kind_of(name): split for name, split in self.splits.items() if split.sequence_length == length}
        # Its shards are of format 3.1, as a shape says, if only an empty one.
        return self.model_copy(update={"sequence_length": length, "shape": RowShape(), "splits": splits})

    @property
    def noticed_counts(self) -> dict[str, int]:
        """Return the counts of `noticed` that are numbers."""
        return {name: count for name, count in self.noticed.items() if isinstance(count, int)}

    @property
    def content_tokens(self) -> dict[str, dict[str, int]]:
        """Return how often conversations contain each content token, by role."""
        found = self.noticed.get("content_tokens", {})
        return found if isinstance(found, dict) else {}

    @field_validator("config")
    @classmethod
    def _rename_settings(cls, config: dict[str, Any]) -> dict[str, Any]:
        """Give settings that an older version recorded the names of today."""
        today = {old: name for name, old in KEY_NAMES.items()}
        return {today.get(name, name): value for name, value in config.items()}

    @property
    def unused_keys(self) -> dict[str, dict[str, int]]:
        """Return the unused keys of each source that has some, and how often they occurred."""
        found = self.noticed.get("unused_keys", {})
        return found if isinstance(found, dict) else {}

    def listed(self) -> list[Shard | FileFacts]:
        """Return every file of the corpus folder that has a checksum here, shards first."""
        return [*(shard for split in self.splits.values() for shard in split.shards), *self.files]


def _set_only(values: dict[str, Any], *names: str) -> dict[str, Any]:
    """Return the values without those of `names` that are None: manifests of other corpora stay as they were."""
    return {key: value for key, value in values.items() if key not in names or value is not None}


def manifest_digest(values: dict[str, Any]) -> str:
    """Return the SHA-256 of a manifest's content, independent of the order of its keys."""
    content = {key: value for key, value in values.items() if key != "digest"}
    return hashlib.sha256(orjson.dumps(content, option=orjson.OPT_SORT_KEYS)).hexdigest()


def key_of_manifest(manifest: Manifest) -> str:
    """Recompute the key from the parts of the recipe that the manifest repeats."""
    sources: list[list[Any]] = [
        [source.sha256, source.container, source.compression, source.format, [*map(list, source.columns.items())]]
        + [source.reading] * bool(source.reading)
        for source in manifest.sources
    ]
    entries = [source.entry for source in manifest.sources]
    return corpus_key(
        manifest.config, sources, entries, manifest.tokenizer.digest, manifest.template.sha256, manifest.key_version
    )


def load_manifest(path: Path) -> Manifest:
    """Read a manifest and check that nobody edited it.

    Raises DataError or InputMissing, naming the file.
    """
    values = read_values(path)
    try:
        manifest = Manifest.model_validate(values)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"])) or "manifest"
        raise DataError("bad_manifest", f"{path}: is not a packcorpus manifest: {where}: {first['msg']}") from None
    for edit in _edits(path, manifest, values):
        raise DataError("edited_manifest", f"{path}: was edited{edit}; {repair_hint(path)}")
    return manifest


def read_values(path: Path) -> Any:
    """Read the JSON of a manifest, whatever it contains. Raises DataError or InputMissing."""
    if not os.path.isfile(path):  # not path.is_file(), which raises if a name is too long
        raise InputMissing("manifest_missing", f"{path}: no such manifest{lost_hint(path)}")
    try:
        return read_json(path)
    except StorageError as error:
        # Not an artifact that a run would rebuild: it may be a file of the user's own.
        if error.reason != "damaged_artefact":
            raise
        ours = path.name == "manifest.json" or path.absolute().parent.name == "manifests"
        fix = f"; {repair_hint(path)}" if ours else ""
        raise DataError("bad_manifest", f"{error}, so it is not a manifest{fix}") from None


def _edits(path: Path, manifest: Manifest, values: dict[str, Any]) -> Iterator[str]:
    """Yield what shows that a manifest was edited. Raises DataError if it leads out of its folder or has no key."""
    # Published byte for byte: else a damaged space would go unnoticed.
    try:
        unedited = manifest_digest(values) == manifest.digest and to_json(values) == path.read_bytes()
    except orjson.JSONEncodeError as error:
        raise DataError("bad_manifest", f"{path}: is not a packcorpus manifest: {error}") from None
    if not unedited:
        yield " or damaged (its content does not match its digest)"
    for inside in (*(file.path for file in manifest.listed()), manifest.tokenizer.path, manifest.corpus):
        pure = PurePosixPath(inside)
        if pure.is_absolute() or ".." in pure.parts or not pure.parts or "\0" in inside:
            raise DataError("path_outside", f"{path}: {inside!r} leads out of the corpus folder")
    listed = Counter(str(PurePosixPath(file.path)) for file in manifest.listed())  # ./a is a
    for name in (name for name, times in listed.items() if times > 1):
        yield f" ({name} is listed twice)"
    try:
        key = key_of_manifest(manifest)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise DataError("bad_manifest", f"{path}: is not a packcorpus manifest: config: {error!r}") from None
    if key != manifest.key:
        yield " (its key does not match its settings and sources)"
    for name, once, again in _repeated_values(manifest):
        if once != again:
            yield f" ({name} is {once} in one place and {again} in another)"


def _repeated_values(manifest: Manifest) -> Iterator[tuple[str, Any, Any]]:
    """Yield (name, value, value) for everything that a manifest records twice."""
    config, tokenizer = manifest.config, manifest.tokenizer
    lengths = config.get("sequence_length")
    for name in ("name", "train_on", "seed"):
        yield name, getattr(manifest, name), config.get(name)
    yield "sequence_length", list(manifest.row_lengths), lengths if isinstance(lengths, list) else [lengths]
    yield "sequence_length", manifest.sequence_length, manifest.row_lengths[-1]
    if manifest.row_shape.lengths:
        for split, facts in manifest.splits.items():
            yield f"sequence_length of {split}", facts.sequence_length, length_in(split, 0)
    yield "corpus", manifest.corpus, Layout.corpus_name(manifest.name, manifest.key)
    yield "template", manifest.template.name, config.get("template")
    yield "packing", manifest.packing_metadata.enabled, config.get("packing")
    yield "format_version", manifest.format_version, format_version_of(config)
    shape = shape_of(config)
    yield "shape", manifest.shape and manifest.shape.model_dump(), shape and shape.model_dump()
    with_alignment = manifest.row_shape.align > 1
    yield "alignment", manifest.ledger.tokens.alignment is not None, with_alignment
    yield "trained_here", tokenizer.trained_here, config.get("tokenizer") is None
    if not tokenizer.trained_here:
        yield "the tokenizer's digest", tokenizer.digest, tokenizer.sha256


def repair_hint(path: Path) -> str:
    """Return the command that restores a damaged corpus or manifest, as the end of an error message."""
    return f"{REPAIR} {shlex.quote(str(path))}"


def lost_hint(path: Path) -> str:
    """Return the end of an error message: how to restore a missing manifest, or "" if it has no other copy."""
    home = path.absolute().parent
    other = home.parent / "data" / "corpora" / path.stem / "manifest.json"
    if home.parts[-3:-1] == ("data", "corpora"):
        other = home.parents[2] / "manifests" / f"{home.name}.json"
    return f"; {repair_hint(path)}" if os.path.isfile(other) else ""


def without_repair_hint(error: Exception) -> str:
    """Return an error message that ends with "; " and `repair_hint`, without it."""
    return str(error).partition(f"; {REPAIR}")[0]
