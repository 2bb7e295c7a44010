"""The manifest: what went in, what came out, how full the rows are. The commit of a corpus.

    Recipe + plan receipt + shard receipts ─build_manifest─▶ Manifest ─publish─▶ <corpus>/manifest.json,
                                                                                  then manifests/<name>-<key12>.json
    manifest.json ─load_manifest─▶ Manifest, refused where its own digest or key says that it was edited

`key` is the content key: the digest of everything that the corpus was made from. `digest` is over the manifest
itself. A manifest holds no time and no host; these are in run.json.
"""

from __future__ import annotations

import hashlib
import os
import shlex
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any, Literal

import orjson
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from tasks.core.errors import DataError, InputMissing, StorageError
from tasks.storage.files import read_json, to_json
from tasks.storage.keys import FORMAT_VERSION, KEY_NAMES, corpus_key
from tasks.storage.paths import Layout

SHA256 = Field(pattern=r"^[0-9a-f]{64}$")


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Parity(_Part):
    """What was compared before gigatoken was used, or was not. Without texts: a tokenizer that it cannot read."""

    texts: int
    bytes: int
    differs: str | None = Field(description="The text that it encoded differently, from shortly before that place.")
    reason: str | None = Field(description="Why it cannot read the tokenizer.")


class Tokenizer(_Part):
    """The tokenizer; `path` is that of the copy in the corpus folder."""

    kind: Literal["sentencepiece", "huggingface"]
    path: str
    sha256: str = SHA256
    vocab_size: int
    bos_token_id: int | None
    eos_token_id: int
    pad_token_id: int
    engine: str = Field(description="What encodes: gigatoken, or the reference: sentencepiece or tokenizers.")
    parity: Parity | None = Field(None, description="The proof of gigatoken; null where the config asks for none.")
    trained_here: bool = Field(description="True where the run trained it on the sources.")
    digest: str = Field(description="What the key has of it: sha256, or trained: and the key of its training.")


class TemplateFacts(_Part):
    """The template; a marker that the tokenizer lacks is encoded as text."""

    name: str
    sha256: str = SHA256
    markers_as_text: list[str]
    leading_space: str = Field(description="Whose rule puts a space before text: template, or none, first, each.")


class SourceFacts(_Part):
    """One source file. tokens and trained_tokens add up to the ledger's encoded and trained."""

    path: str
    entry: int = Field(ge=0, description="Place in the config's sources.")
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


class MixtureFacts(_Part):
    """What one entry of the config's sources gives to one pass over the training split."""

    path: str
    weight: float
    limit: int | None
    conversations: int
    copies: int = Field(description="Conversations, each as often as it is packed.")
    tokens: int = Field(description="In rows, separators included.")
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
    """Pieces of conversations in rows; one each, except where overlong: split, a weight or epochs made more."""

    packed: int
    dropped: int


class Tokens(_Part):
    """encoded + separators + repeated = packed + truncated + dropped; packed + padding = rows × sequence_length."""

    encoded: int
    separators: int
    repeated: int = Field(description="Without separators: further copies, by weight and in further epochs.")
    truncated: int
    dropped: int
    rejected: int = Field(description="Tokens of conversations that were rejected after encoding; not in encoded.")
    packed: int
    padding: int
    trained: int


class Ledger(_Part):
    """Where every conversation and every token went."""

    conversations: Conversations
    pieces: Pieces
    tokens: Tokens


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


class Shard(_Part):
    """One Arrow file; `path` is relative to the corpus folder."""

    path: str
    rows: int
    bytes: int
    sha256: str = SHA256


class Split(_Part):
    """Rows and shards of train, validation, or train packed anew for an epoch: train_epoch_2, train_epoch_3, …"""

    rows: int
    shards: list[Shard]


class FileFacts(_Part):
    """A file beside the shards."""

    path: str
    bytes: int
    sha256: str = SHA256


class Manifest(_Part):
    """A corpus, accounted for."""

    format_version: Literal["2.0", "3.0"]
    name: str
    key: str = SHA256
    key_version: int = Field(ge=1, description="The rules by which the key was made of what the manifest repeats.")
    texts_version: int = Field(1, ge=1, description="Version of the wording of reject messages and the dataset card.")
    corpus: str = Field(description="The corpus folder, from the project's root.")
    sequence_length: int
    tokenizer: Tokenizer
    template: TemplateFacts
    train_on: Literal["assistant", "all", "last"]
    seed: int
    sources: list[SourceFacts]
    mixture: list[MixtureFacts] = Field(description="An entry for each of the config's sources.")
    ledger: Ledger
    noticed: dict[str, int] = Field(description="Things that were handled but may surprise, as counts.")
    packing_metadata: PackingMetadata
    splits: dict[str, Split]
    files: list[FileFacts] = Field(description="What lies beside the shards: index, rejects, tokenizer, dataset card.")
    config: dict[str, Any]
    digest: str = Field(pattern=r"^[0-9a-f]{64}$", description="SHA-256 of the manifest without this field.")

    @field_validator("config")
    @classmethod
    def _rename_settings(cls, config: dict[str, Any]) -> dict[str, Any]:
        """Give settings that an older version recorded the names of today."""
        today = {old: name for name, old in KEY_NAMES.items()}
        return {today.get(name, name): value for name, value in config.items()}

    def listed(self) -> list[Shard | FileFacts]:
        """Every file of the corpus folder that has a digest here, shards first."""
        return [*(shard for split in self.splits.values() for shard in split.shards), *self.files]


def manifest_digest(values: dict[str, Any]) -> str:
    """SHA-256 of the manifest's content, whatever the order of its keys."""
    content = {key: value for key, value in values.items() if key != "digest"}
    return hashlib.sha256(orjson.dumps(content, option=orjson.OPT_SORT_KEYS)).hexdigest()


def key_of_manifest(manifest: Manifest) -> str:
    """The key, made again of what the manifest repeats of the recipe."""
    sources = [
        [source.sha256, source.container, source.compression, source.format, [*map(list, source.columns.items())]]
        for source in manifest.sources
    ]
    entries = [source.entry for source in manifest.sources]
    return corpus_key(
        manifest.config, sources, entries, manifest.tokenizer.digest, manifest.template.sha256, manifest.key_version
    )


def load_manifest(path: Path) -> Manifest:
    """Read a manifest and check that nobody edited it. Raises DataError or InputMissing, naming the file."""
    if not os.path.isfile(path):  # not path.is_file(), which raises where a name is too long
        raise InputMissing("manifest_missing", f"{path}: no such manifest")
    try:
        values = read_json(path)
    except StorageError as error:
        # Whatever it is: it may be a file of the user's own, and no artefact that a run makes again.
        if error.reason != "damaged_artefact":
            raise
        ours = path.name == "manifest.json" or path.absolute().parent.name == "manifests"
        raise DataError("bad_manifest", f"{error}, and so no manifest{f'; {mend(path)}' if ours else ''}") from None
    try:
        manifest = Manifest.model_validate(values)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"])) or "manifest"
        raise DataError("bad_manifest", f"{path}: is not a packcorpus manifest: {where}: {first['msg']}") from None
    # As it was published, to the byte: else a white space that was damaged would go unnoticed.
    try:
        unedited = manifest_digest(values) == manifest.digest and to_json(values) == path.read_bytes()
    except orjson.JSONEncodeError as error:
        raise DataError("bad_manifest", f"{path}: is not a packcorpus manifest: {error}") from None
    if not unedited:
        raise DataError(
            "edited_manifest", f"{path}: was edited or damaged (its content does not match its digest); {mend(path)}"
        )
    for inside in (*(file.path for file in manifest.listed()), manifest.tokenizer.path, manifest.corpus):
        pure = PurePosixPath(inside)
        if pure.is_absolute() or ".." in pure.parts or not pure.parts or "\0" in inside:
            raise DataError("path_outside", f"{path}: {inside!r} leads out of the corpus folder")
    try:
        key = key_of_manifest(manifest)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise DataError("bad_manifest", f"{path}: is not a packcorpus manifest: config: {error!r}") from None
    if key != manifest.key:
        raise DataError(
            "edited_manifest", f"{path}: was edited (its key is not that of its settings and sources); {mend(path)}"
        )
    for name, once, again in _said_twice(manifest):
        if once != again:
            raise DataError(
                "edited_manifest",
                f"{path}: was edited ({name} is {once} in one place, {again} in another); {mend(path)}",
            )
    return manifest


def _said_twice(manifest: Manifest) -> Iterator[tuple[str, Any, Any]]:
    config, tokenizer = manifest.config, manifest.tokenizer
    for name in ("name", "sequence_length", "train_on", "seed"):
        yield name, getattr(manifest, name), config.get(name)
    yield "corpus", manifest.corpus, Layout.corpus_name(manifest.name, manifest.key)
    yield "template", manifest.template.name, config.get("template")
    yield "packing", manifest.packing_metadata.enabled, config.get("packing")
    yield "format_version", manifest.format_version, FORMAT_VERSION[manifest.packing_metadata.enabled]
    yield "trained_here", tokenizer.trained_here, config.get("tokenizer") is None
    if not tokenizer.trained_here:
        yield "the tokenizer's digest", tokenizer.digest, tokenizer.sha256


def mend(path: Path) -> str:
    """What to do about a corpus or manifest that is not as it was published."""
    return f"mend it with: packcorpus repair {shlex.quote(str(path))}"


def check_ledger(ledger: dict[str, Any]) -> None:
    """Raises DataError where conversations or tokens do not add up: something was lost, and the run must not pass."""
    conversations, tokens = ledger["conversations"], ledger["tokens"]
    ended = conversations["packed"] + sum(conversations["rejected"].values()) + sum(conversations["dropped"].values())
    if conversations["read"] != ended:
        raise DataError(
            "open_ledger", f"the ledger does not close: {conversations['read']:,} conversations read, {ended:,} ended"
        )
    gone_in = tokens["encoded"] + tokens["separators"] + tokens["repeated"]
    come_out = tokens["packed"] + tokens["truncated"] + tokens["dropped"]
    if gone_in != come_out:
        raise DataError("open_ledger", f"the ledger does not close: {gone_in:,} tokens went in, {come_out:,} came out")
