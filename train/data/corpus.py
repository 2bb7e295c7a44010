"""Open a manifest, a corpus folder, or a folder of shards, without loading torch.

x, KEY, manifests/x.json, CORPUS/manifest.json, CORPUS ─load_manifest─▶ key, length, digests ─┐
a folder of shards alone ─their names, schema metadata────────────────▶ key, length ──────────┤
every shard ─schema: version, key, length, columns────────────────────────────────────────────┴─▶ Corpus
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
from pydantic import ValidationError

from packcorpus.tasks.core.errors import DataError, InputMissing, UsageError
from packcorpus.tasks.inspection.manifests import HERE, by_name, find_manifest
from packcorpus.tasks.storage.corpus_folder import check_listed, checked_folder, find_listed, published_copy, reading
from packcorpus.tasks.storage.facts import RowShape
from packcorpus.tasks.storage.files import sha256_of
from packcorpus.tasks.storage.keys import PACKED, SHAPE_SETTINGS, SHAPED, SHARED, WHOLE
from packcorpus.tasks.storage.layout import SPLITS, RowLayout, kind_of
from packcorpus.tasks.storage.manifest import Manifest, load_manifest, lost_hint, read_values
from packcorpus.tasks.storage.schemas import END, LOSS_WEIGHT
from packcorpus.tasks.storage.shards import check_schema, describe_columns, describe_metadata, shard_schema
from packcorpus.tasks.stores.mirror import remote_with
from packcorpus.tasks.stores.urls import local_path_of, url_of

SHARD_NAME = re.compile(r"([\w-]+)-(\d{5})-of-(\d{5})\.arrow")
KEY = re.compile(r"[0-9a-f]{64}")
VERSIONS = (PACKED, SHAPED, SHARED, WHOLE)

# Required columns of rows from other tools. position_ids are optional, but without them conversations see each other.
REQUIRED = ("input_ids", "attention_mask", "labels")
# Required columns of rows without padding.
LISTS = ("input_ids", "labels", "seq_lens")

# The last bytes of a complete Arrow stream. A file truncated between two batches lacks them but is otherwise readable.
END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"


@dataclass(frozen=True, slots=True)
class Shard:
    """Arrow file of a corpus; `path` is relative to the corpus folder."""

    path: str
    rows: int
    bytes: int
    sha256: str | None  # None without a manifest


@dataclass(frozen=True, slots=True)
class Corpus:
    """Facts about a corpus that a trainer needs."""

    name: str
    folder: Path
    format_version: str  # 3.0: packed rows; 3.1: of another shape; 3.2: with trees; 2.0: one conversation per row
    key: str  # from the manifest or the shards; if they have none, a digest of the bytes of the shards
    sequence_length: int  # the length of the longest rows
    manifest: Manifest | None
    splits: dict[str, list[Shard]]
    isolated: bool  # rows have position_ids
    layout: RowLayout
    weighted: bool = False  # rows have loss_weight
    notes: tuple[str, ...] = ()  # messages for the user, one sentence each

    def __str__(self) -> str:
        columns = f"{'with' if self.isolated else 'without'} position_ids" + f", with {LOSS_WEIGHT}" * self.weighted
        return f"format {self.format_version}, key {self.key[:12] or 'none'}, length {self.sequence_length}, {columns}"

    @property
    def packed(self) -> bool:
        """Return whether rows hold tokens, not the messages of one conversation."""
        return self.format_version != WHOLE

    @property
    def lengths(self) -> tuple[int, ...]:
        """Return the row lengths in ascending order."""
        return self.manifest.row_lengths if self.manifest else (self.sequence_length,)

    def length_of(self, split: str) -> int:
        """Return the length of the rows of a split."""
        return self.layout.length_of(split) if len(self.lengths) > 1 else self.sequence_length

    def rows(self, split: str) -> int:
        """Return the number of rows of a split; `train` counts all lengths."""
        own = [name for name in self.splits if split in (name, kind_of(name))]
        return sum(shard.rows for name in own for shard in self.splits[name])


def use_corpus(options: argparse.Namespace) -> None:
    """Set `manifest` to the path of the corpus, and `root` to a local folder.

    A run that continues in another process, perhaps hours later, must not find another latest corpus.
    """
    if options.corpus and options.manifest:
        raise UsageError("bad_command_line", f"{options.corpus} and --manifest {options.manifest}: name one corpus")
    options.manifest, options.corpus = locate(options.manifest or options.corpus, options.root), None
    if url_of(options.root):  # only the corpus is in the bucket; training writes its own files locally
        options.root = Path()


def open_corpus(path: str | os.PathLike[str], allow_unisolated: bool = False, root: Path = HERE) -> Corpus:
    """Open a corpus by its manifest or by the metadata of its shards.

    `path` may be the URL of a manifest. A name or a key is looked up in the manifests/ of `root`. This function checks
    the schema of every shard, or only of the first shard if the corpus is in a bucket. `shards.read_verified` checks
    the digests later.

    Raises InputMissing, UsageError, DataError, or StorageError, which name the file and its fault. Packed rows without
    position_ids are an error unless `allow_unisolated` is set.
    """
    path = locate(path, root)
    if path.is_dir():
        inside = path / "manifest.json"
        if not inside.is_file():
            return _from_shards(path, allow_unisolated)
        if not _is_ours(read_values(inside)):
            note = f"{inside}: belongs to another tool and was ignored"
            return _from_shards(path, allow_unisolated, note)
        path = inside
    elif path.suffix == ".arrow":
        raise UsageError(
            "one_file", f"{path}: is only one file of a corpus; pass the manifest, or the folder {path.parent}"
        )
    return _from_manifest(path, allow_unisolated)


def locate(path: str | os.PathLike[str] | None, root: Path = HERE) -> Path:
    """Return the file or folder of a corpus that is named like for `open_corpus`.

    Without a path, it is the manifest of the latest run.
    """
    if path is None:
        return find_manifest(None, root)
    path = local_path_of(path if isinstance(path, Path) else os.fspath(path))
    if remote_with(path) or path.suffix in (".yaml", ".yml") or (url_of(root) and not path.exists()):
        return find_manifest(path, root)  # fetches the manifest
    if not path.is_file() and not (path / "manifest.json").is_file() and not any(path.glob("*.arrow")):
        path = by_name(str(path), root) or path
    return path if path.exists() else find_manifest(path, root)  # its error suggests close matches


# -- with a manifest -------------------------------------------------------------------------------------------------


def _is_ours(values: Any) -> bool:
    return isinstance(values, dict) and bool({"digest", "ledger"} & values.keys())


def _from_manifest(path: Path, allow_unisolated: bool) -> Corpus:
    values = read_values(path)
    version = values.get("format_version") if isinstance(values, dict) else None
    if not _is_ours(values):
        raise DataError(
            "bad_manifest",
            f"{path}: is not a packcorpus manifest (format_version {version!r}, no digest); to train on rows of "
            "another tool, pass the folder of their shards",
        )
    if version not in VERSIONS:
        raise DataError(
            "bad_manifest", f"{path}: format_version is {version!r}, but training supports {', '.join(VERSIONS)}"
        )
    manifest = load_manifest(path)
    folder = checked_folder(manifest, path)
    _check_key(folder, manifest)
    for file in manifest.files:  # 2 % of the bytes of a corpus; they define the meaning of its IDs and labels
        check_listed(folder, file)
    splits = {name: [Shard(**shard.model_dump()) for shard in split.shards] for name, split in manifest.splits.items()}
    lacking, shards = False, [shard for shards in splits.values() for shard in shards]
    for shard in shards:
        wanted = shard_schema(manifest, shard.path)
        if remote_with(folder) and shard != shards[0]:
            continue  # in a bucket; its digest is checked when it is read
        where = find_listed(folder, shard.path, shard.bytes)
        # Keep the comparison in this block: a damaged column name may not be UTF-8 and is decoded only when read.
        with reading(where, folder), pa.memory_map(str(where)) as file:
            schema = pa.ipc.open_stream(file).schema
            if version != WHOLE and schema.metadata == wanted.metadata and "position_ids" not in schema.names:
                _check_rows(where, schema, allow_unisolated, manifest.row_layout)
                lacking = True
            else:
                check_schema(where, schema, wanted, folder)
    return Corpus(
        name=manifest.name, folder=folder, format_version=version, key=manifest.key,
        sequence_length=manifest.sequence_length, manifest=manifest, splits=splits, layout=manifest.row_layout,
        isolated=version != WHOLE and not lacking, weighted=manifest.row_layout.is_weighted,
    )  # fmt: skip


def _check_key(folder: Path, manifest: Manifest) -> None:
    """Raise DataError if manifest.json and the shards belong to different corpora."""
    # Without this check, the first listed file would be reported as damaged.
    keys = set()
    for path in folder.glob("*.arrow"):
        with suppress(OSError, pa.ArrowException):  # a later check reports unreadable shards
            if SHARD_NAME.fullmatch(path.name):
                metadata = pa.ipc.open_stream(pa.memory_map(str(path))).schema.metadata or {}
                keys.add(metadata.get(b"manifest_key", b"").decode(errors="replace"))
    [key] = keys if len(keys) == 1 else {None}
    if key is None or not KEY.fullmatch(key) or key == manifest.key:
        return
    listed = [(folder / file.path, file.bytes) for file in manifest.files]
    if all(path.is_file() and path.stat().st_size == size for path, size in listed):
        return  # the other files match the manifest, so the shards do not belong here
    fix = "copy the manifest.json of that corpus into the folder, or copy the folder again"
    if (own := published_copy(folder)) and own.is_file() and own.stem.rpartition("-")[2] == key[:12]:
        fix = f"run: packcorpus repair {own}"
    raise DataError(
        "foreign_shard",
        f"{folder / 'manifest.json'}: is the manifest of a different corpus, {manifest.name} {manifest.key[:12]}; the "
        f"shards in this folder belong to {key[:12]}; {fix}",
    )


# -- without a manifest ----------------------------------------------------------------------------------------------


def _from_shards(folder: Path, allow_unisolated: bool, *notes: str) -> Corpus:
    splits: dict[str, list[Shard]] = {split: [] for split in SPLITS}
    first: Corpus | None = None
    for split, path in _find_shards(folder):
        corpus, rows = _read_header(path, allow_unisolated)
        first = first or corpus
        if corpus != first:
            name = next(shard.path for shards in splits.values() for shard in shards)
            text = f"{path}: belongs to a different corpus ({corpus}) than {name} ({first})"
            raise DataError("mixed_shards", text)
        splits.setdefault(split, []).append(Shard(path.name, rows, path.stat().st_size, None))
    if not first:
        raise DataError(
            "not_trainable",
            f"{folder}: contains neither a manifest.json nor shards (such as train-00000-of-00001.arrow)"
            f"{lost_hint(folder)}",
        )
    key = first.key
    if not KEY.fullmatch(key):  # a key of the bytes, so that a run resumes only on equal rows
        digests = [sha256_of(folder / shard.path) for shards in splits.values() for shard in shards]
        key = hashlib.sha256("".join(digests).encode()).hexdigest()
    note = f"{folder}: has no packcorpus manifest, so there are no digests and damage can go unnoticed"
    return replace(first, key=key, splits=splits, notes=(*notes, note))


def _find_shards(folder: Path) -> list[tuple[str, Path]]:
    found: dict[str, dict[int, Path]] = {}
    totals: dict[str, int] = {}
    for path in sorted(folder.glob("*.arrow")):
        if match := SHARD_NAME.fullmatch(path.name):
            split, number, total = match[1], int(match[2]), int(match[3])
            if totals.setdefault(split, total) != total:
                raise DataError(
                    "mixed_shards",
                    f"{path}: the split {split} mixes shards of {totals[split]} and of {total}; keep the shards of one "
                    "run",
                )
            found.setdefault(split, {})[number] = path
    for split, paths in found.items():
        if missing := set(range(totals[split])) ^ paths.keys():
            name = f"{split}-{min(missing):05d}-of-{totals[split]:05d}.arrow"
            raise InputMissing(
                "file_missing", f"{folder}: {name} is missing or out of range; training needs the complete corpus"
            )
    return [(split, paths[number]) for split, paths in found.items() for number in sorted(paths)]


def _read_header(path: Path, allow_unisolated: bool) -> tuple[Corpus, int]:
    """Return the corpus of a shard, without its splits, and its number of rows."""
    find_listed(path.parent, path.name, path.lstat().st_size)
    with reading(path), pa.memory_map(str(path)) as file:
        reader = pa.ipc.open_stream(file)
        schema, rows, first_row = reader.schema, 0, 0
        names = schema.names
        for batch in reader:
            if not rows and batch.num_rows and "input_ids" in names:
                first_row = len(batch.column("input_ids")[0])
            rows += batch.num_rows
        file.seek(max(0, file.size() - len(END_OF_STREAM)))
        complete = file.read() == END_OF_STREAM
    if not complete:
        raise DataError(
            "cut_shard", f"{path}: is truncated (it lacks the end of an Arrow stream); copy it again, or pack again"
        )
    metadata = {
        key.decode(errors="replace"): value.decode(errors="replace") for key, value in (schema.metadata or {}).items()
    }
    version, length = metadata.get("format_version"), metadata.get("sequence_length", str(first_row))
    if version == SHAPED and not metadata.keys() & set(SHAPE_SETTINGS):
        raise DataError(
            "not_trainable",
            f"{path}: has rows of one of several lengths, which cannot be read without the manifest of their corpus; "
            "copy its manifest.json and the files next to the shards into the folder",
        )
    packed = version in (PACKED, SHAPED, SHARED)
    columns = {"input_ids"} if packed else {"messages", "text"} if version == WHOLE else set()
    if version is None or not columns & set(names):
        raise DataError(
            "not_trainable",
            f"{path}: contains neither packed rows ({PACKED}) nor conversations ({WHOLE}): "
            f"metadata {describe_metadata(schema)}, columns {describe_columns(schema)}; build a corpus with PackCorpus",
        )
    if not length.isdecimal() or not int(length):
        raise DataError("not_trainable", f"{path}: has no sequence_length: metadata {describe_metadata(schema)}")
    try:
        shape = RowShape.model_validate({name: metadata[name] for name in SHAPE_SETTINGS if name in metadata})
    except ValidationError as error:
        found = error.errors(include_url=False)[0]
        raise DataError("not_trainable", f"{path}: metadata: {found['loc'][0]}: {found['msg']}") from None
    layout = RowLayout((int(length),), shape.align, shape.padding, share=shape.share)
    if packed:
        _check_rows(path, schema, allow_unisolated, layout)
    corpus = Corpus(
        name=path.parent.resolve().name, folder=path.parent, format_version=version,
        key=metadata.get("manifest_key", ""), sequence_length=int(length), manifest=None, splits={}, layout=layout,
        isolated="position_ids" in names, weighted=LOSS_WEIGHT in names,
    )  # fmt: skip
    return corpus, rows


def _check_rows(path: Path, schema: pa.Schema, allow_unisolated: bool, layout: RowLayout) -> None:
    """Raise DataError unless columns are lists of integers and position_ids exist."""
    # With `allow_unisolated`, position_ids may be missing, except in rows without padding.
    required = LISTS if layout.padding == "none" else (*REQUIRED, *["position_ids", END] * layout.is_shared)
    if layout.padding == "none" and "position_ids" not in schema.names:
        raise DataError("not_trainable", f"{path}: rows without padding have no position_ids; pack them again")
    for name in {*required, "position_ids"}:
        if name not in schema.names:
            continue
        type_ = schema.field(name).type
        is_list = any(test(type_) for test in (pa.types.is_fixed_size_list, pa.types.is_list, pa.types.is_large_list))
        if not is_list or not pa.types.is_integer(type_.value_type):
            raise DataError("not_trainable", f"{path}: {name} is {type_}, not a list of integers")
    if missing := [name for name in required if name not in schema.names]:
        raise DataError("not_trainable", f"{path}: has no {', '.join(missing)}; columns {describe_columns(schema)}")
    if "position_ids" not in schema.names and not allow_unisolated:
        raise DataError(
            "unisolated_rows",
            f"{path}: rows have no position_ids, so the conversations of a row would see each other while the loss "
            "looks healthy; pack them with PackCorpus, or train anyway with allow_unisolated: true",
        )
