"""Every invariant of a corpus, recomputed from its files. Nothing of what made the corpus is trusted, or called.

manifest ─ its digest, its two copies
   ├ every file ─ size and SHA-256, nothing missing, nothing besides
   ├ every shard ─ schema, and for each row: mask, labels, positions, ids, at least one trained token
   ├ index ─ its pieces tile every row without gap or overlap, begin where positions restart, end with EOS
   └ ledger ─ conversations, tokens and figures counted a second time
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.compute

from tasks.core.errors import DataError, PackError
from tasks.corpus.shards import IGNORED, conversation_schema, row_schema
from tasks.packing.index_writer import INDEX_SCHEMA
from tasks.packing.ledger import check_ledger
from tasks.recipe import split_names
from tasks.storage.corpus_folder import (
    check_copies,
    find_tokenizer_files,
    foreign_files,
    open_tokenizer,
    reading,
    refuse,
    wrong_files,
)
from tasks.storage.manifest import Manifest, corpus_folder, load_manifest
from tasks.verification.check_selection import check_choice, conversations_of

# Columns of the index that are null where a conversation was dropped; the others never are.
PLACE = {"split", "shard", "row", "start", "first"}
NAMES = {"split", "dropped"}


@dataclass(slots=True)
class Report:
    """What was checked: (name of the check, what was found). All of it held, or `verify` had raised."""

    checks: list[tuple[str, str]] = field(default_factory=list)


@dataclass(slots=True)
class _Tokens:
    """What the rows of all shards add up to."""

    packed: int = 0
    trained: int = 0
    rows: int = 0
    pieces: int = 0


def verify(path: Path) -> Report:
    """Check the corpus of a manifest. Raises DataError, InputMissing or StorageError at the first thing that is not as
    promised; where these are files, of all of them, and what they hold is not looked at.
    """
    report = Report()
    manifest = load_manifest(path)
    folder = corpus_folder(manifest, path)
    files = _check_files(path, manifest, folder)
    report.checks.append(("manifest", f"unedited, key {manifest.key[:12]}"))
    report.checks.append(("files", f"{files}: sizes and SHA-256 as recorded, nothing besides"))
    index = _read_index(folder / "index.arrow")
    check_rows = _check_rows if manifest.packing_metadata.enabled else _check_whole
    tokens = check_rows(manifest, folder, index)
    held = "every invariant holds" if manifest.packing_metadata.enabled else "as many as the index has"
    report.checks.append(
        ("rows", f"{tokens.rows:,} rows, {tokens.packed:,} tokens, {tokens.trained:,} trained: {held}")
    )
    if not tokens.rows:
        raise DataError("wrong_count", f"{path}: the corpus holds no row")
    if tokens.pieces != len(index) - index["row"].null_count:
        raise DataError("bad_index", f"{folder / 'index.arrow'}: has pieces in shards or rows that do not exist")
    report.checks.append(("index", f"{tokens.pieces:,} pieces tile the rows without gap or overlap"))
    _check_beside(manifest, folder)
    _check_ledger(manifest, folder, index, tokens)
    report.checks.append(("ledger", "conversations, tokens and figures agree with a second count"))
    return report


def _check_files(path: Path, manifest: Manifest, folder: Path) -> str:
    """How many there are, and of how many bytes."""
    wrong: list[PackError] = []
    try:
        check_copies(path, folder)
    except PackError as error:
        if error.reason == "manifests_differ":  # which of them speaks for the files is not known
            raise
        wrong.append(error)
    listed = manifest.listed()
    wrong += wrong_files(folder, listed)
    wrong += foreign_files(manifest, folder)
    refuse(wrong, folder)
    return f"{len(listed):,} files, {sum(file.bytes for file in listed):,} bytes"


def _read_index(path: Path) -> pa.Table:
    with reading(path), pa.memory_map(str(path)) as file:
        index = pa.ipc.open_stream(file).read_all()
    if not index.schema.equals(INDEX_SCHEMA):
        raise DataError("bad_index", f"{path}: has another schema than expected: {index.schema.names}")
    placed = index["row"].is_valid()
    for name in index.schema.names:
        valid = index[name].is_valid()
        if name == "dropped":
            valid = pa.compute.invert(valid)
        if not valid.equals(placed) and (name in PLACE or name == "dropped" or index[name].null_count):
            raise DataError("bad_index", f"{path}: {name} is null where it may not be")
    for name, least in (("length", 1), ("source", 0)):
        if len(index) and pa.compute.min(index[name]).as_py() < least:
            raise DataError("bad_index", f"{path}: a piece has no {name}")
    return index


def _pieces_of(index: pa.Table, split: str, shard: int) -> dict[str, np.ndarray]:
    """The index's pieces in one shard, by row and start."""
    chosen = index.filter(
        pa.compute.and_(
            pa.compute.equal(index["split"].cast(pa.string()), split), pa.compute.equal(index["shard"], shard)
        )
    )
    order = np.lexsort((chosen["start"].to_numpy(), chosen["row"].to_numpy()))
    return {name: chosen[name].to_numpy()[order] for name in chosen.schema.names if name not in NAMES}


def _check_rows(manifest: Manifest, folder: Path, index: pa.Table) -> _Tokens:
    total = _Tokens()
    for split, facts in manifest.splits.items():
        for number, shard in enumerate(facts.shards):
            path = folder / shard.path
            schema = row_schema(manifest.sequence_length, manifest.key)
            pieces = _pieces_of(index, split, number)
            rows = 0
            with reading(path), pa.memory_map(str(path)) as file:
                reader = _open(path, file, schema)
                for batch in reader:
                    top, rows = rows, rows + batch.num_rows
                    inside = slice(*np.searchsorted(pieces["row"], [top, rows]).tolist())
                    chosen = {name: values[inside] for name, values in pieces.items()}
                    chosen["row"] = chosen["row"] - top
                    _check_batch(batch, chosen, manifest, f"{path}: row {top}", total)
            if rows != shard.rows:
                raise DataError("wrong_count", f"{path}: holds {rows:,} rows, the manifest says {shard.rows:,}")
            total.rows += rows
    return total


def _open(path: Path, file: Any, schema: pa.Schema) -> Any:
    reader = pa.ipc.open_stream(file)
    if not reader.schema.equals(schema, check_metadata=True):
        raise DataError(
            "foreign_shard", f"{path}: is not a shard of this corpus (schema or metadata differ): {reader.schema}"
        )
    return reader


def _check_batch(
    batch: pa.RecordBatch, pieces: dict[str, np.ndarray], manifest: Manifest, where: str, total: _Tokens
) -> None:
    length, count = manifest.sequence_length, batch.num_rows
    ids, mask, labels, positions = (
        batch.column(name).flatten().to_numpy().reshape(count, length)
        for name in ("input_ids", "attention_mask", "labels", "position_ids")
    )

    def require(held: Any, what: str) -> None:
        """`held` is a bool for each row, or for each token."""
        bad = ~np.asarray(held)
        if bad.any():
            row = int(np.argwhere(bad)[0][0])
            raise DataError("bad_row", f"{where} + {row}: {what}")

    filled = mask.sum(axis=1, dtype=np.int64)
    columns = np.arange(length)
    require(((mask == 0) | (mask == 1)).all(axis=1), "attention_mask holds other values than 0 and 1")
    require((mask == (columns < filled[:, None])).all(axis=1), "attention_mask has a pad among the tokens")
    require(filled > 0, "the row is empty")
    require(((ids >= 0) & (ids < manifest.tokenizer.vocab_size)).all(axis=1), "a token id is beyond the vocabulary")
    require(((ids == manifest.tokenizer.pad_token_id) | (mask == 1)).all(axis=1), "a pad is not the pad token")
    require(((labels == IGNORED) | (labels == ids)).all(axis=1), "a label is neither -100 nor the token itself")
    require(((labels == IGNORED) | (mask == 1)).all(axis=1), "a pad is trained on")
    require((labels != IGNORED).any(axis=1), "no token of the row is trained on")
    # Positions: from the pieces of the index, and from nothing that wrote the rows.
    starts, lengths = pieces["start"].astype(np.int64), pieces["length"].astype(np.int64)
    first_of_row = np.searchsorted(pieces["row"], np.arange(count))
    require(np.bincount(pieces["row"], weights=lengths, minlength=count) == filled, "the index covers other tokens")
    expected = np.cumsum(lengths) - lengths
    expected -= np.repeat(expected[first_of_row], np.diff(np.append(first_of_row, len(starts))))
    if (starts != expected).any():
        row = int(pieces["row"][np.flatnonzero(starts != expected)[0]])
        raise DataError("bad_row", f"{where} + {row}: the index's pieces leave a gap or overlap")
    heads = pieces["row"].astype(np.int64) * length + starts
    ends = heads + lengths - 1
    marks = np.zeros(count * length, np.int64)
    marks[heads] = heads
    tails = np.arange(count) * length + filled
    marks[tails[filled < length]] = tails[filled < length]
    wanted = (np.arange(count * length) - np.maximum.accumulate(marks)).reshape(count, length)
    require((positions == wanted).all(axis=1), "position_ids do not restart at 0 at every conversation")
    flat_labels, flat_ids = labels.reshape(-1), ids.reshape(-1)
    if (flat_labels[heads] != IGNORED).any():
        raise DataError("bad_row", f"{where}: the first token of a conversation is trained on")
    if (flat_ids[ends][pieces["separator"]] != manifest.tokenizer.eos_token_id).any():
        raise DataError("bad_row", f"{where}: a conversation is not closed by the EOS separator")
    if (flat_labels[ends][pieces["closed"]] != IGNORED).any():
        raise DataError("bad_row", f"{where}: the separator behind a conversation that was cut is trained on")
    trained = np.add.reduceat(flat_labels != IGNORED, heads, dtype=np.int64) if len(heads) else np.zeros(0)
    if (trained != pieces["trained"]).any():
        raise DataError("bad_row", f"{where}: the index counts other trained tokens than the labels")
    total.pieces += len(heads)
    total.packed += int(filled.sum())
    total.trained += int((flat_labels != IGNORED).sum())


def _check_whole(manifest: Manifest, folder: Path, index: pa.Table) -> _Tokens:
    """Format 2.0: a row is a conversation."""
    total = _Tokens()
    for split, facts in manifest.splits.items():
        for number, shard in enumerate(facts.shards):
            path = folder / shard.path
            schema = conversation_schema(manifest.sequence_length, manifest.key)
            with reading(path), pa.memory_map(str(path)) as file:
                rows = sum(batch.num_rows for batch in _open(path, file, schema))
            pieces = _pieces_of(index, split, number)
            if rows != shard.rows:
                raise DataError("wrong_count", f"{path}: holds {rows:,} rows, the manifest says {shard.rows:,}")
            if not np.array_equal(pieces["row"], np.arange(rows)):
                raise DataError("bad_index", f"{path}: the index does not hold one conversation for each row")
            total.pieces += rows
            total.rows += rows
            total.packed += int(pieces["length"].sum())
            total.trained += int(pieces["trained"].sum())
    return total


def _check_beside(manifest: Manifest, folder: Path) -> None:
    """What the manifest says of the tokenizer and the template, by the files that lie beside the shards."""
    recorded, files = manifest.tokenizer, find_tokenizer_files(manifest, folder)
    encoder = open_tokenizer(manifest, folder)
    template = [file.sha256 for file in manifest.files if file.path == "template.jinja"]
    for name, found, said in (
        ("tokenizer.sha256", files.sha256(), recorded.sha256),
        ("tokenizer.kind", encoder.kind, recorded.kind),
        ("tokenizer.vocab_size", encoder.vocab_size, recorded.vocab_size),
        ("tokenizer.bos_token_id", encoder.bos_id, recorded.bos_token_id),
        ("tokenizer.eos_token_id", encoder.eos_id, recorded.eos_token_id),
        ("tokenizer.pad_token_id", encoder.pad_id, recorded.pad_token_id),
        ("template.leading_space", encoder.leading_space, manifest.template.leading_space),
        ("template.sha256", template or [manifest.template.sha256], [manifest.template.sha256]),
    ):
        if found != said:
            raise DataError("wrong_figure", f"{folder / 'manifest.json'}: {name} is recorded as {said}, found {found}")


def _check_ledger(manifest: Manifest, folder: Path, index: pa.Table, tokens: _Tokens) -> None:
    def require(name: str, counted: Any, recorded: Any) -> None:
        if counted != recorded:
            raise DataError(
                "wrong_figure", f"{folder / 'manifest.json'}: {name} is recorded as {recorded}, counted {counted}"
            )

    ledger, packing = manifest.ledger, manifest.packing_metadata
    check_ledger(ledger.model_dump())
    with reading(folder / "rejects.jsonl"):
        rejects = [orjson.loads(line) for line in (folder / "rejects.jsonl").read_bytes().splitlines()]
        reasons, rejected_by = (Counter(reject[key] for reject in rejects) for key in ("reason", "source"))
    require("rejected", dict(sorted(reasons.items())), ledger.conversations.rejected)
    seen = conversations_of(index)
    require("packed conversations", int(np.count_nonzero(seen["placed"])), ledger.conversations.packed)
    dropped = Counter(index["dropped"].drop_null().cast(pa.string()).to_pylist())
    recorded = {reason: count for reason, count in ledger.conversations.dropped.items() if count}
    require("dropped", dict(sorted(dropped.items())), dict(sorted(recorded.items())))
    require("read", len(seen["source"]) + len(rejects), ledger.conversations.read)
    trained = np.bincount(index["source"], index["trained"], minlength=len(manifest.sources)).astype(np.int64)
    for number, facts in enumerate(manifest.sources):
        accepted = int((seen["source"] == number).sum())
        require(f"{facts.path}: accepted", accepted, facts.accepted)
        require(f"{facts.path}: rejected", rejected_by[facts.path], facts.rejected)
        require(f"{facts.path}: conversations", accepted + facts.rejected, facts.conversations)
        require(f"{facts.path}: trained_tokens", int(trained[number]), facts.trained_tokens)
    require("conversations of all sources", sum(s.conversations for s in manifest.sources), ledger.conversations.read)
    require("tokens of all sources", sum(s.tokens for s in manifest.sources), ledger.tokens.encoded)
    require("pieces", tokens.pieces, ledger.pieces.packed)
    require("packed tokens", tokens.packed, ledger.tokens.packed)
    require("trained tokens", tokens.trained, ledger.tokens.trained)
    separators = pa.compute.sum(index["separator"]).as_py() or 0
    require("separators", separators, ledger.tokens.separators)
    require("repeated", tokens.packed - separators - int(seen["tokens"].sum()), ledger.tokens.repeated)
    require("rows", tokens.rows, packing.rows)
    require("splits", list(manifest.splits), list(split_names(manifest.config.get("epochs", 1))))
    for name, split in manifest.splits.items():
        require(f"rows of {name}", sum(shard.rows for shard in split.shards), split.rows)
    per_row = round(tokens.pieces / tokens.rows, 4)
    require("avg_conversations_per_sequence", per_row, packing.avg_conversations_per_sequence)
    require("compression_ratio", per_row, packing.compression_ratio)
    above = round(100 * (packing.rows / packing.lower_bound_rows - 1), 4) if packing.lower_bound_rows else None
    require("above_lower_bound_percent", above, packing.above_lower_bound_percent)
    require("truncated", int(np.count_nonzero(seen["truncated"])), ledger.conversations.truncated)
    places = tokens.rows * manifest.sequence_length
    require("padding", places - tokens.packed if packing.enabled else 0, ledger.tokens.padding)
    check_choice(manifest, folder, index, seen)
    efficiency = round(100 * tokens.packed / places, 4) if packing.enabled else None
    require("packing_efficiency", efficiency, packing.packing_efficiency)
    if packing.rows < packing.lower_bound_rows:
        raise DataError(
            "wrong_figure", f"{packing.rows:,} rows are fewer than the lower bound {packing.lower_bound_rows:,}"
        )
