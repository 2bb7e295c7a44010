"""Check the ledger and the files next to the shards."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson

from tasks.core.errors import DataError
from tasks.encoders.tokenizer_files import find_tokenizer_files, joined_sha256, open_found
from tasks.storage.corpus_folder import reading
from tasks.storage.manifest import Manifest
from tasks.storage.schemas import DROP_REASONS, SAMPLE_DROP_REASONS
from tasks.verification.check_index import IndexCheck
from tasks.verification.check_rows import Tokens
from tasks.verification.read_index import Index


def check_beside(manifest: Manifest, folder: Path) -> None:
    """Check the recorded tokenizer and template against the files next to the shards."""
    recorded, files = manifest.tokenizer, find_tokenizer_files(manifest, folder)
    encoder = open_found(manifest, files)
    templates = [(file.path, file.sha256) for file in manifest.template_files]
    for name, found, noted in (
        ("tokenizer.sha256", files.sha256(), recorded.sha256),
        ("tokenizer.kind", encoder.kind, recorded.kind),
        ("tokenizer.vocab_size", encoder.vocab_size, recorded.vocab_size),
        ("tokenizer.bos_token_id", encoder.bos_id, recorded.bos_token_id),
        ("tokenizer.eos_token_id", encoder.eos_id, recorded.eos_token_id),
        ("tokenizer.pad_token_id", encoder.pad_id, recorded.pad_token_id),
        ("template.leading_space", encoder.leading_space, manifest.template.leading_space),
        (
            "template.sha256",
            joined_sha256(templates) if templates else manifest.template.sha256,
            manifest.template.sha256,
        ),
    ):
        if found != noted:
            raise DataError("wrong_figure", f"{folder / 'manifest.json'}: {name} is recorded as {noted}, found {found}")


def _check_weights(manifest: Manifest, tokens: Tokens, require: Callable[[str, Any, Any], None]) -> None:
    """Check the sums of the column `loss_weight` of each split."""
    recorded = manifest.loss_weight
    require("loss_weight", manifest.config.get("loss_weight", "none") != "none", recorded is not None)
    if recorded is None:
        return
    require("splits of loss_weight", [*tokens.weights], [*recorded])
    in_train = sum(facts.conversations for facts in manifest.mixture)
    copies = sum(facts.copies for facts in manifest.mixture)
    for split, facts in recorded.items():
        found = tokens.weights[split]
        count = manifest.ledger.conversations.packed - in_train if split == "validation" else copies
        require(f"conversations of {split}", count, facts.conversations)
        require(f"trained tokens of {split}", found.trained, facts.trained)
        require(f"loss_weight of {split}", math.fsum(found.sums), facts.loss_weight)
        if found.conversations:
            shares = round(math.fsum(found.conversations), 3)
            require(f"conversations of {split} by loss_weight", shares, float(facts.conversations))


def check_recorded_ledger(manifest: Manifest, folder: Path, index: Index, tokens: Tokens) -> None:
    def require(name: str, counted: Any, recorded: Any) -> None:
        if counted != recorded:
            raise DataError(
                "wrong_figure", f"{folder / 'manifest.json'}: {name} is recorded as {recorded}, counted {counted}"
            )

    ledger, packing = manifest.ledger, manifest.packing_metadata
    # Places are the recorded sum here. Packed tokens and padding are compared with the rows below.
    ledger.check(ledger.tokens.packed + ledger.tokens.padding if packing.enabled else 0)
    reasons, rejected_by = _count_rejects(folder)
    require("rejected", dict(sorted(reasons.items())), ledger.conversations.rejected)
    check = IndexCheck(manifest, folder)
    for entries in index.by_content:
        check.add(entries)
    seen, samples = check.conversations, check.samples
    require("packed conversations", seen.packed, ledger.conversations.packed)
    recorded = {reason: count for reason, count in ledger.conversations.dropped.items() if count}
    require("dropped", seen.dropped(DROP_REASONS), dict(sorted(recorded.items())))
    require("read", seen.count + reasons.total(), ledger.conversations.read)
    for number, facts in enumerate(manifest.sources):
        accepted = int(seen.accepted[number])
        require(f"{facts.path}: accepted", accepted, facts.accepted)
        require(f"{facts.path}: rejected", rejected_by[facts.path], facts.rejected)
        require(f"{facts.path}: conversations", accepted + facts.rejected, facts.conversations)
        require(f"{facts.path}: trained_tokens", int(index.trained[number]), facts.trained_tokens)
    of_sources = sum(s.conversations for s in manifest.sources)
    require("conversations of all sources", of_sources, ledger.conversations.read)
    require("tokens of all sources", sum(s.tokens for s in manifest.sources), ledger.tokens.encoded)
    _check_weights(manifest, tokens, require)
    require("pieces", tokens.pieces, ledger.pieces.packed)
    require("packed tokens", tokens.packed, ledger.tokens.packed)
    require("trained tokens", tokens.trained, ledger.tokens.trained)
    require("separators", index.separators, ledger.tokens.separators)
    require("repeated", tokens.packed - index.separators - seen.tokens, ledger.tokens.repeated)
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
    above = round(100 * (packing.rows / packing.lower_bound_rows - 1), 4) if packing.lower_bound_rows else None
    if packing.places is not None:
        require("places", tokens.places, packing.places)
        bound = packing.lower_bound_places
        above = round(100 * (tokens.places / bound - 1), 4) if bound else None
    require("above_lower_bound_percent", above, packing.above_lower_bound_percent)
    require("truncated", seen.truncated, ledger.conversations.truncated)
    require("padding", tokens.places - tokens.packed if packing.enabled else 0, ledger.tokens.padding)
    require("alignment", tokens.alignment, ledger.tokens.alignment or 0)
    check.check()
    if (noted := ledger.samples) is not None:
        require("samples: packed", samples.packed, noted.packed)
        require("samples: dropped", samples.dropped(SAMPLE_DROP_REASONS), dict(sorted(noted.dropped.items())))
        # The samples of rejected conversations are not in the index, so their recorded number is used.
        require("samples: read", samples.count + noted.rejected, noted.read)
        require("samples: repeated_prompt_tokens", samples.repeated, noted.repeated_prompt_tokens)
    efficiency = round(100 * tokens.packed / manifest.places, 4) if packing.enabled else None
    require("packing_efficiency", efficiency, packing.packing_efficiency)
    for name, split in manifest.splits.items():
        if split.lower_bound_rows is not None and split.rows < split.lower_bound_rows:
            raise DataError(
                "wrong_figure", f"{split.rows:,} rows of {name} are fewer than the bound {split.lower_bound_rows:,}"
            )
    if packing.places is not None and packing.places < (packing.lower_bound_places or 0):
        raise DataError(
            "wrong_figure",
            f"{packing.places:,} places are fewer than the lower bound {packing.lower_bound_places:,}",
        )
    if packing.rows < packing.lower_bound_rows:
        raise DataError(
            "wrong_figure", f"{packing.rows:,} rows are fewer than the lower bound {packing.lower_bound_rows:,}"
        )


def _count_rejects(folder: Path) -> tuple[Counter[str], Counter[str]]:
    """Count the rejects of a corpus by reason and by source."""
    reasons, sources = Counter[str](), Counter[str]()
    path = folder / "rejects.jsonl"
    with reading(path, folder), path.open("rb") as lines:
        for line in lines:
            reject = orjson.loads(line)
            reasons[reject["reason"]] += 1
            sources[reject["source"]] += 1
    return reasons, sources
