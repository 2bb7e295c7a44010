"""Recompute every invariant of a corpus from its files.

manifest ─ its digest, its two copies
   ├ every file ─ size and SHA-256, nothing missing, no unlisted file
   ├ every shard ─ schema, and for each row: mask, labels, positions, ids, at least one trained token
   ├ index ─ its pieces tile every row without gap or overlap, start where positions restart, end with EOS
   ├ ledger ─ conversations, tokens, and figures counted a second time
   └ every sample ─ as in the token files, where these exist

None of the code that made the corpus is trusted or called. Memory is bounded, because the index is distributed over
temporary files (partitions.py) and checked one partition at a time.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from packcorpus.tasks.core.errors import DataError, PackError
from packcorpus.tasks.core.printable import counted
from packcorpus.tasks.encoders.tokenizer_files import find_tokenizer_files, joined_sha256, open_found
from packcorpus.tasks.storage.corpus_folder import (
    changed_files,
    check_copies,
    check_published,
    corpus_folder,
    foreign_files,
    raise_all,
    reading,
)
from packcorpus.tasks.storage.manifest import Manifest, load_manifest
from packcorpus.tasks.storage.schemas import ALL_DROP_REASONS
from packcorpus.tasks.verification.check_index import Index, IndexCheck, read_index
from packcorpus.tasks.verification.check_rows import Tokens, check_packed_rows, check_unpacked_rows
from packcorpus.tasks.verification.check_samples import check_samples

Require = Callable[[str, Any, Any], None]  # raises DataError unless a counted and a recorded value are equal


@dataclass(frozen=True)
class Check:
    """A check that passed, and its result."""

    name: str
    found: str


def verify(path: Path) -> list[Check]:
    """Check the corpus of a manifest, and return the checks, which all passed.

    Raises DataError, InputMissing, or StorageError at the first invariant that does not hold. If files are missing or
    damaged, the error names all of them, and their content is not checked.
    """
    manifest = load_manifest(path)
    folder, listed = corpus_folder(manifest, path), manifest.listed()
    wrong: list[PackError] = []
    try:
        check_copies(path, folder)
        check_published(path, manifest, folder)
    except PackError as error:
        if error.reason == "manifests_differ":  # it is unknown which of the two copies describes the files
            raise
        wrong.append(error)
    raise_all([*wrong, *changed_files(folder, listed), *foreign_files(manifest, folder)], folder)

    def require(name: str, counted: Any, recorded: Any) -> None:
        if counted != recorded:
            raise DataError(
                "wrong_figure", f"{folder / 'manifest.json'}: {name} is recorded as {recorded}, counted {counted}"
            )

    is_packed = manifest.packing_metadata.enabled
    with read_index(manifest, folder) as index:
        tokens = (check_packed_rows if is_packed else check_unpacked_rows)(manifest, folder, index)
        index.by_shard.close()
        if not tokens.rows:
            raise DataError("wrong_count", f"{path}: the corpus has no rows")
        if tokens.pieces != index.placed:
            raise DataError("bad_index", f"{folder / 'index.arrow'}: refers to shards or rows that do not exist")
        _check_beside(manifest, folder)
        _check_ledger(manifest, folder, index, tokens, require)
    samples = [Check("samples", check_samples(manifest, folder))] if is_packed else []
    size = sum(file.bytes for file in listed)
    rows = f"{counted(tokens.rows, 'row')}, {counted(tokens.packed, 'token')}, {tokens.trained:,} trained"
    held = "every invariant holds" if is_packed else "the counts match the index"
    files = f"{counted(len(listed), 'file')}, {size:,} bytes: sizes and SHA-256 as recorded, no unlisted files"
    return [
        Check("manifest", f"unedited, key {manifest.key[:12]}"),
        Check("files", files),
        Check("rows", f"{rows}: {held}"),
        Check("index", f"{counted(tokens.pieces, 'piece')} in the rows, without gap or overlap"),
        Check("ledger", "conversations, tokens, and figures agree with a second count"),
        *samples,
    ]


def _check_beside(manifest: Manifest, folder: Path) -> None:
    """Check the recorded tokenizer and template against the files next to the shards."""
    recorded, template, files = manifest.tokenizer, manifest.template, find_tokenizer_files(manifest, folder)
    encoder = open_found(manifest, files)
    templates = [(file.path, file.sha256) for file in manifest.template_files]
    for name, found, noted in (
        ("tokenizer.sha256", files.sha256(), recorded.sha256),
        ("tokenizer.kind", encoder.kind, recorded.kind),
        ("tokenizer.vocab_size", encoder.vocab_size, recorded.vocab_size),
        ("tokenizer.bos_token_id", encoder.bos_id, recorded.bos_token_id),
        ("tokenizer.eos_token_id", encoder.eos_id, recorded.eos_token_id),
        ("tokenizer.pad_token_id", encoder.pad_id, recorded.pad_token_id),
        ("template.leading_space", encoder.leading_space, template.leading_space),
        ("template.sha256", joined_sha256(templates) if templates else template.sha256, template.sha256),
    ):
        if found != noted:
            raise DataError("wrong_figure", f"{folder / 'manifest.json'}: {name} is recorded as {noted}, found {found}")


def _check_ledger(manifest: Manifest, folder: Path, index: Index, tokens: Tokens, require: Require) -> None:
    ledger, packing = manifest.ledger, manifest.packing_metadata
    # Places are the recorded sum here. Packed tokens and padding are compared with the rows below.
    ledger.check(ledger.tokens.packed + ledger.tokens.padding if packing.enabled else 0)
    reasons, rejected_by = Counter[str](), Counter[str]()
    rejects = folder / "rejects.jsonl"
    with reading(rejects, folder), rejects.open("rb") as lines:
        for reject in map(orjson.loads, lines):
            reasons[reject["reason"]] += 1
            rejected_by[reject["source"]] += 1
    require("rejected", dict(sorted(reasons.items())), ledger.conversations.rejected)
    check = IndexCheck(manifest, folder, index)
    seen, samples = check.conversations, check.samples
    require("packed conversations", seen.packed, ledger.conversations.packed)
    dropped = {reason: count for reason, count in ledger.conversations.dropped.items() if count}
    require("dropped", seen.dropped(ALL_DROP_REASONS), dict(sorted(dropped.items())))
    contaminated = ledger.conversations.dropped.get("contaminated", 0)
    require("contaminated", sum(file.conversations for file in manifest.evaluation), contaminated)
    require("read", seen.count + reasons.total(), ledger.conversations.read)
    for number, facts in enumerate(manifest.sources):
        accepted = int(seen.accepted[number])
        require(f"{facts.path}: accepted", accepted, facts.accepted)
        require(f"{facts.path}: rejected", rejected_by[facts.path], facts.rejected)
        require(f"{facts.path}: conversations", accepted + facts.rejected, facts.conversations)
        require(f"{facts.path}: trained_tokens", int(index.trained[number]), facts.trained_tokens)
    of_sources = sum(source.conversations for source in manifest.sources)
    require("conversations of all sources", of_sources, ledger.conversations.read)
    require("tokens of all sources", sum(source.tokens for source in manifest.sources), ledger.tokens.encoded)
    _check_weights(manifest, tokens, require)
    require("pieces", tokens.pieces, ledger.pieces.packed)
    require("packed tokens", tokens.packed, ledger.tokens.packed)
    require("trained tokens", tokens.trained, ledger.tokens.trained)
    require("separators", index.separators, ledger.tokens.separators)
    require("repeated", tokens.packed - index.separators - seen.tokens, ledger.tokens.repeated)
    require("shared", seen.shared, ledger.tokens.shared or 0)
    if (later := ledger.pieces.later) is not None:
        require("later pieces", seen.later, later)
        require("tokens before later pieces", seen.again, ledger.pieces.repeated_tokens)
    require("rows", tokens.rows, packing.rows)
    names = manifest.row_layout.split_names(manifest.config.get("epochs", 1))
    require("splits", list(manifest.splits), list(names))
    for name, split in manifest.splits.items():
        require(f"rows of {name}", sum(shard.rows for shard in split.shards), split.rows)
        if split.tokens is not None:
            require(f"tokens of {name}", tokens.of_splits.get(name, 0), split.tokens)
    per_row = round(tokens.pieces / tokens.rows, 4)
    require("avg_conversations_per_sequence", per_row, packing.avg_conversations_per_sequence)
    require("compression_ratio", per_row, packing.compression_ratio)
    rows_or_places, bound = packing.rows, packing.lower_bound_rows
    if packing.places is not None:
        require("places", tokens.places, packing.places)
        rows_or_places, bound = tokens.places, packing.lower_bound_places or 0
    above = round(100 * (rows_or_places / bound - 1), 4) if bound else None
    require("above_lower_bound_percent", above, packing.above_lower_bound_percent)
    require("truncated", seen.truncated, ledger.conversations.truncated)
    require("padding", tokens.places - tokens.packed if packing.enabled else 0, ledger.tokens.padding)
    require("alignment", tokens.alignment, ledger.tokens.alignment or 0)
    check.check()
    if ledger.conversations.duplicates is not None:
        require("duplicates", seen.packed - check.contents, ledger.conversations.duplicates)
    if (held := manifest.held_out) is not None:
        require("held_out: conversations", check.held_out, held.conversations)
        require("held_out: percent", round(100 * check.held_out / seen.packed, 4), held.percent)
        if manifest.config.get("validation_by") == "prompt":
            require("held_out: prompts", check.groups, held.prompts)
            require("held_out: shared", 0, held.shared)
        require("held_out: order of its counts", True, held.shared <= held.prompts <= held.conversations)
    if (noted := ledger.samples) is not None:
        require("samples: packed", samples.packed, noted.packed)
        require("samples: dropped", samples.dropped(ALL_DROP_REASONS), dict(sorted(noted.dropped.items())))
        # The samples of rejected conversations are not in the index, so their recorded number is used.
        require("samples: read", samples.count + noted.rejected, noted.read)
        require("samples: repeated_prompt_tokens", samples.repeated, noted.repeated_prompt_tokens)
    efficiency = round(100 * tokens.packed / manifest.places, 4) if packing.enabled else None
    require("packing_efficiency", efficiency, packing.packing_efficiency)
    bounds = [
        (f"rows of {name}", "bound", split.rows, split.lower_bound_rows) for name, split in manifest.splits.items()
    ]
    bounds.append(("places", "lower bound", packing.places or 0, packing.lower_bound_places))
    bounds.append(("rows", "lower bound", packing.rows, packing.lower_bound_rows))
    bounds.append(("tokens", "lower bound", tokens.packed, packing.lower_bound_tokens))
    for unit, name, count, least in bounds:
        if count < (least or 0):
            raise DataError("wrong_figure", f"{count:,} {unit} are fewer than the {name} {least:,}")


def _check_weights(manifest: Manifest, tokens: Tokens, require: Require) -> None:
    """Check the sums of the column `loss_weight` of each split."""
    recorded = manifest.loss_weight
    require("loss_weight", manifest.config.get("loss_weight", "none") != "none", recorded is not None)
    require("splits of loss_weight", [*tokens.weights], [*(recorded or ())])
    in_train = sum(facts.conversations for facts in manifest.mixture)
    copies = sum(facts.copies for facts in manifest.mixture)
    for split, facts in (recorded or {}).items():
        found = tokens.weights[split]
        count = manifest.ledger.conversations.packed - in_train if split == "validation" else copies
        require(f"conversations of {split}", count, facts.conversations)
        require(f"trained tokens of {split}", found.trained, facts.trained)
        require(f"loss_weight of {split}", math.fsum(found.sums), facts.loss_weight)
        if found.conversations:
            shares = round(math.fsum(found.conversations), 3)
            require(f"conversations of {split} by loss_weight", shares, float(facts.conversations))
