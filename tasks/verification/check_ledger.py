"""Check the ledger and the files next to the shards."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pyarrow as pa

from tasks.core.errors import DataError
from tasks.encoders.corpus_tokenizer import find_tokenizer_files, open_tokenizer
from tasks.storage.corpus_folder import reading
from tasks.storage.manifest import Manifest, SampleFacts
from tasks.storage.schemas import DROP_REASONS, SAMPLE_DROP_REASONS
from tasks.storage.splits import split_names
from tasks.verification.check_rows import Tokens
from tasks.verification.check_selection import Conversations, check_choice, conversations_of


def check_beside(manifest: Manifest, folder: Path) -> None:
    """Check what the manifest records about tokenizer and template against the files next to the shards."""
    recorded, files = manifest.tokenizer, find_tokenizer_files(manifest, folder)
    encoder = open_tokenizer(manifest, folder)
    template = [file.sha256 for file in manifest.files if file.path == "template.jinja"]
    for name, found, noted in (
        ("tokenizer.sha256", files.sha256(), recorded.sha256),
        ("tokenizer.kind", encoder.kind, recorded.kind),
        ("tokenizer.vocab_size", encoder.vocab_size, recorded.vocab_size),
        ("tokenizer.bos_token_id", encoder.bos_id, recorded.bos_token_id),
        ("tokenizer.eos_token_id", encoder.eos_id, recorded.eos_token_id),
        ("tokenizer.pad_token_id", encoder.pad_id, recorded.pad_token_id),
        ("template.leading_space", encoder.leading_space, manifest.template.leading_space),
        ("template.sha256", template or [manifest.template.sha256], [manifest.template.sha256]),
    ):
        if found != noted:
            raise DataError("wrong_figure", f"{folder / 'manifest.json'}: {name} is recorded as {noted}, found {found}")


def check_recorded_ledger(manifest: Manifest, folder: Path, index: pa.Table, tokens: Tokens) -> None:
    def require(name: str, counted: Any, recorded: Any) -> None:
        if counted != recorded:
            raise DataError(
                "wrong_figure", f"{folder / 'manifest.json'}: {name} is recorded as {recorded}, counted {counted}"
            )

    ledger, packing = manifest.ledger, manifest.packing_metadata
    # Packed and padding are counted below, against the places of all rows.
    ledger.check(ledger.tokens.packed + ledger.tokens.padding if packing.enabled else 0)
    with reading(folder / "rejects.jsonl", folder):
        rejects = [orjson.loads(line) for line in (folder / "rejects.jsonl").read_bytes().splitlines()]
        reasons, rejected_by = (Counter(reject[key] for reject in rejects) for key in ("reason", "source"))
    require("rejected", dict(sorted(reasons.items())), ledger.conversations.rejected)
    seen = conversations_of(index)
    samples = seen if ledger.samples is None else conversations_of(index, apart=True)
    require("packed conversations", int(np.count_nonzero(seen["placed"])), ledger.conversations.packed)
    dropped = Counter((*DROP_REASONS, "unknown")[reason] for reason in seen["reason"][~seen["placed"]].tolist())
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
    check_choice(manifest, folder, index, seen, samples)
    if ledger.samples is not None:
        _check_samples(ledger.samples, samples, require)
    efficiency = round(100 * tokens.packed / places, 4) if packing.enabled else None
    require("packing_efficiency", efficiency, packing.packing_efficiency)
    if packing.rows < packing.lower_bound_rows:
        raise DataError(
            "wrong_figure", f"{packing.rows:,} rows are fewer than the lower bound {packing.lower_bound_rows:,}"
        )


def _check_samples(recorded: SampleFacts, samples: Conversations, require: Callable[[str, Any, Any], None]) -> None:
    """Check the figures of samples; those of conversations that were rejected are not in the index."""
    placed = samples["placed"]
    require("samples: packed", int(np.count_nonzero(placed)), recorded.packed)
    dropped = Counter((*SAMPLE_DROP_REASONS, "unknown")[reason] for reason in samples["reason"][~placed].tolist())
    require("samples: dropped", dict(sorted(dropped.items())), dict(sorted(recorded.dropped.items())))
    require("samples: read", len(placed) + recorded.rejected, recorded.read)
    source, record, length, untrained = (samples[name][placed] for name in ("source", "record", "length", "untrained"))
    later = (source[1:] == source[:-1]) & (record[1:] == record[:-1])
    repeated = int(np.minimum(untrained[1:], length[:-1])[later].sum())
    require("samples: repeated_prompt_tokens", repeated, recorded.repeated_prompt_tokens)
