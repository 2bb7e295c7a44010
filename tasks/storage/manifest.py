"""The manifest of a corpus: its inputs, its outputs, and its packing figures.

    manifest.json ─load_manifest─▶ Manifest, refused if its digest or its key shows that it was edited
    Manifest.ledger ─check─▶ an error if a conversation, a token, or a place in a row is unaccounted for

`key` is the content key: the digest of everything that the corpus was built from. `digest` covers the manifest itself.
A manifest contains no time and no host name; run.json contains both.
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
from pydantic import Field, ValidationError, field_validator

from packcorpus.tasks.core.errors import DataError, InputMissing, StorageError
from packcorpus.tasks.core.printable import named_at
from packcorpus.tasks.storage.facts import (
    SHA256,
    EvaluationFacts,
    Facts,
    FileFacts,
    HeldOutFacts,
    Ledger,
    MixtureFacts,
    PackingMetadata,
    RowShape,
    Shard,
    SourceFacts,
    Split,
    TemplateFacts,
    Tokenizer,
    WeightSums,
)
from packcorpus.tasks.storage.files import read_json, to_json
from packcorpus.tasks.storage.keys import corpus_key, format_version_of, sha256_in, with_current_names
from packcorpus.tasks.storage.layout import TEMPLATE, TOOL_TEMPLATE, Layout, RowLayout, kind_of

REPAIR = "run: packcorpus repair"


class Manifest(Facts):
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
    train_on: Literal["assistant", "all", "last", "rounds"]
    seed: int
    sources: list[SourceFacts]
    mixture: list[MixtureFacts] = Field(description="One entry per entry of the config's `sources`.")
    evaluation: list[EvaluationFacts] = Field(
        default_factory=list, description="The files of `decontaminate`, in order; absent without it."
    )
    ledger: Ledger
    held_out: HeldOutFacts | None = Field(
        None, description="Absent if nothing is held out, and in manifests of earlier versions."
    )
    noticed: dict[str, int | dict[str, dict[str, int]]] = Field(
        description="Counts of unusual things that were handled. `reasoned_answers`: trained answers with reasoning. "
        "`empty_reasoning`: trained answers for which the template writes an empty block of reasoning. "
        "`content_tokens`: how often conversations contain each added token that content may become, by role. "
        "`unused_keys`: how often each unused key of the records occurred, by source. `undefined_names`: in how many "
        "places a template reads each name that nothing defines, by file. `unknown_markers`: how many conversations "
        "have each marker of the template that the tokenizer lacks. A count is absent if it is 0, or if an earlier "
        "version did not record it."
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

    @property
    def row_layout(self) -> RowLayout:
        shape, weights = self.shape or RowShape(), self.config.get("loss_weight", "none")
        lengths = tuple(shape.lengths or [self.sequence_length])
        return RowLayout(lengths, shape.align, shape.padding, shape.mix, weights, shape.share)

    @property
    def splits_at_turns(self) -> bool:
        return bool(self.config.get("overlong") == "split" and self.config.get("split_at") == "turns")

    @property
    def is_grouped(self) -> bool:
        """Return whether conversations are held out by something else than their content."""
        return bool(self.config.get("validation_by", "conversation") != "conversation")

    @property
    def row_lengths(self) -> tuple[int, ...]:
        return self.row_layout.lengths

    @property
    def places(self) -> int:
        return sum(split.rows * self.length_of_split(name) for name, split in self.splits.items())

    def length_of_split(self, split: str) -> int:
        return self.splits[split].sequence_length or self.sequence_length

    def length_of(self, shard: str) -> int:
        """Return the length of the rows of a shard, given by its path."""
        if len(self.row_lengths) == 1:
            return self.sequence_length
        lengths = {own.path: split.sequence_length for split in self.splits.values() for own in split.shards}
        return lengths.get(shard) or self.sequence_length

    def of_length(self, length: int) -> Manifest:
        """Return the part with one row length; its split names do not have the length."""
        splits = {kind_of(name): split for name, split in self.splits.items() if split.sequence_length == length}
        # Any shape, even an empty one, means that the shards have format 3.1.
        return self.model_copy(update={"sequence_length": length, "shape": RowShape(), "splits": splits})

    @property
    def tokenizer_name(self) -> str:
        """Return the name of the tokenizer's file or, on the Hub, its name and commit."""
        named, commit = self.config.get("tokenizer"), self.tokenizer.revision
        if not commit:
            return PurePosixPath(self.tokenizer.path).name
        return named_at(named["path"] if isinstance(named, dict) else str(named), commit)

    @property
    def noticed_counts(self) -> dict[str, int]:
        return {name: count for name, count in self.noticed.items() if isinstance(count, int)}

    @property
    def content_tokens(self) -> dict[str, dict[str, int]]:
        return self._noticed_by("content_tokens")

    @property
    def unused_keys(self) -> dict[str, dict[str, int]]:
        return self._noticed_by("unused_keys")

    @property
    def undefined_names(self) -> dict[str, dict[str, int]]:
        return self._noticed_by("undefined_names")

    @property
    def unknown_markers(self) -> dict[str, dict[str, int]]:
        return self._noticed_by("unknown_markers")

    def _noticed_by(self, name: str) -> dict[str, dict[str, int]]:
        counts = self.noticed.get(name, {})
        return counts if isinstance(counts, dict) else {}

    @field_validator("config")
    @classmethod
    def _rename_settings(cls, config: dict[str, Any]) -> dict[str, Any]:
        """Give settings from older versions their current names."""
        return with_current_names(config)

    @property
    def template_files(self) -> list[FileFacts]:
        return [file for name in (TEMPLATE, TOOL_TEMPLATE) for file in self.files if file.path == name]

    def listed(self) -> list[Shard | FileFacts]:
        """Return every file of the corpus folder that has a checksum here, shards first."""
        return [*(shard for split in self.splits.values() for shard in split.shards), *self.files]


def manifest_digest(values: dict[str, Any]) -> str:
    """Return the SHA-256 of a manifest's content; the order of keys has no effect."""
    content = {key: value for key, value in values.items() if key != "digest"}
    return hashlib.sha256(orjson.dumps(content, option=orjson.OPT_SORT_KEYS)).hexdigest()


def load_manifest(path: Path) -> Manifest:
    """Read a manifest and check that nobody edited it.

    Raises DataError, InputMissing, or StorageError, naming the file.
    """
    values = read_values(path)
    try:
        manifest = Manifest.model_validate(values)
        for edit in _edits(path, manifest, values):
            raise DataError("edited_manifest", f"{path}: was edited{edit}; {repair_hint(path)}")
        return manifest
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        problem = f"{'.'.join(map(str, first['loc'])) or 'manifest'}: {first['msg']}"
    except orjson.JSONEncodeError as error:
        problem = str(error)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        problem = f"config: {error!r}"
    raise DataError("bad_manifest", f"{path}: is not a packcorpus manifest: {problem}{_hint_if_ours(path)}")


def read_values(path: Path) -> Any:
    """Read the JSON of a manifest, whatever it contains.

    Raises DataError, InputMissing, or StorageError, naming the file.
    """
    if not os.path.isfile(path):  # not path.is_file(), which raises if a name is too long
        raise InputMissing("manifest_missing", f"{path}: no such manifest{lost_hint(path)}")
    try:
        return read_json(path)
    except StorageError as error:
        # This is not an artifact that a run would rebuild: it may be the user's own file.
        if error.reason != "damaged_artefact":
            raise
        raise DataError("bad_manifest", f"{error}, so it is not a manifest{_hint_if_ours(path)}") from None


def _edits(path: Path, manifest: Manifest, values: dict[str, Any]) -> Iterator[str]:
    """Yield each sign that a manifest was edited.

    Raises DataError if a path in it points outside the corpus folder, and other errors if no key can be computed.
    """
    # Compare the bytes of the file, too: otherwise, a damaged space would go unnoticed.
    if manifest_digest(values) != manifest.digest or to_json(values) != path.read_bytes():
        yield " or damaged (its content does not match its digest)"
    for inside in (*(file.path for file in manifest.listed()), manifest.tokenizer.path, manifest.corpus):
        pure = PurePosixPath(inside)
        if pure.is_absolute() or ".." in pure.parts or not pure.parts or "\0" in inside:
            raise DataError("path_outside", f"{path}: {inside!r} points outside the corpus folder")
    listed = Counter(str(PurePosixPath(file.path)) for file in manifest.listed())  # ./a and a are equal
    for name in (name for name, times in listed.items() if times > 1):
        yield f" ({name} is listed twice)"
    sources, entries = [source.content for source in manifest.sources], [source.entry for source in manifest.sources]
    digests = manifest.tokenizer.digest, manifest.template.sha256
    evaluation = [file.content for file in manifest.evaluation]
    if corpus_key(manifest.config, sources, entries, *digests, manifest.key_version, evaluation) != manifest.key:
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
    if manifest.shape and manifest.shape.lengths:
        for split, facts in manifest.splits.items():
            length = manifest.row_layout.length_of(split) if "-" in split else 0
            yield f"sequence_length of {split}", facts.sequence_length, length
    splits = [source.get("split") or "" for source in config["sources"]]
    for source in manifest.sources:
        yield f"split of {source.path}", source.split, splits[source.entry]
    yield "splits of the mixture", [facts.split for facts in manifest.mixture], splits
    yield "corpus", manifest.corpus, Layout.corpus_name(manifest.name, manifest.key)
    yield "template", manifest.template.name, config.get("template")
    yield "packing", manifest.packing_metadata.enabled, config.get("packing")
    yield "format_version", manifest.format_version, format_version_of(config)
    yield "shape", manifest.shape and manifest.shape.model_dump(), RowLayout.of(config).recorded or None
    yield "alignment", manifest.ledger.tokens.alignment is not None, manifest.row_layout.align > 1
    yield "pieces.later", manifest.ledger.pieces.later is not None, manifest.splits_at_turns
    yield "trained_truncated", manifest.ledger.tokens.trained_truncated is not None, config.get("overlong") == "turns"
    yield "trained_here", tokenizer.trained_here, config.get("tokenizer") is None
    if not tokenizer.trained_here:
        yield "the tokenizer's digest", sha256_in(tokenizer.digest), tokenizer.sha256


def repair_hint(path: Path) -> str:
    """Return the command that repairs `path`, for the end of an error message."""
    return f"{REPAIR} {shlex.quote(str(path))}"


def _hint_if_ours(path: Path) -> str:
    """Return "; " and the `repair_hint` if a run writes manifests there, or ""."""
    ours = path.name == "manifest.json" or path.absolute().parent.name == "manifests"
    return f"; {repair_hint(path)}" if ours else ""


def lost_hint(path: Path) -> str:
    """Return "; " and the `repair_hint` for a missing manifest, or "" without a copy."""
    home = path.absolute().parent
    other = home.parent / "data" / "corpora" / path.stem / "manifest.json"
    if home.parts[-3:-1] == ("data", "corpora"):
        other = home.parents[2] / "manifests" / f"{home.name}.json"
    return f"; {repair_hint(path)}" if os.path.isfile(other) else ""


def without_repair_hint(error: Exception) -> str:
    """Return an error message without "; " and the `repair_hint` at its end."""
    return str(error).partition(f"; {REPAIR}")[0]
