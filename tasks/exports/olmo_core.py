"""OLMo-core: raw arrays of tokens and label masks, and bounds of pieces as CSV.

    <split>/token_ids_part_0000.npy      uint16 or uint32 without a header, rows with padding
    <split>/labels_mask_part_0000.npy    bool without a header: trained on
    <split>/token_ids_part_0000.csv.gz   start,end of each piece

OLMo-core's fixed-length dataset keeps the rows, and finds the bounds of conversations by EOS (or EOS before BOS). The
export counts the bounds for which this is wrong. OLMo-core's packing dataset takes the bounds from the CSV files, which
leave out padding, and packs again.
"""

from __future__ import annotations

import gzip
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import IO, cast

import numpy as np

from packcorpus.tasks.exports.model import FOLDER, ExportFormat, Note, OutputFolder, Part, Reader, Settings, ShardJob
from packcorpus.tasks.storage.manifest import Manifest
from packcorpus.tasks.storage.schemas import IGNORED
from packcorpus.tasks.storage.shards import RowBatch


class OlmoCore(ExportFormat):
    name = "olmo-core"
    trainer = "OLMo-core"
    rows_kept = True
    aligned = True
    shifted = "the trainer"
    bounds = "EOS, or EOS before BOS, if that is exact; else `.csv.gz`"
    layout = "`token_ids_part_*.npy`, `labels_mask_part_*.npy`, `token_ids_part_*.csv.gz`"
    reader = Reader("ai2-olmo-core", "3.0.0", "olmo_core.data.numpy_dataset.NumpyFSLDataset")

    def write_shard(self, job: ShardJob, batches: Iterator[RowBatch], part: Part, out: OutputFolder) -> None:
        kind = _dtype(job.manifest)
        part.facts = {"wrong_by_eos": 0, "wrong_by_bos": 0}
        with ExitStack() as stack:
            ids, mask, table = (
                stack.enter_context(out.file(f"{job.split}/{name}_part_{job.number:04d}.{ending}"))
                for name, ending in (("token_ids", "npy"), ("labels_mask", "npy"), ("token_ids", "csv.gz"))
            )
            bounds = stack.enter_context(gzip.GzipFile("", "wb", fileobj=cast(IO[bytes], table), mtime=0))
            top = 0
            for rows in batches:
                ids.write(rows.ids.astype(kind))
                mask.write(rows.labels != IGNORED)
                starts = rows.starts + top
                lines = zip(starts.tolist(), (starts + rows.lengths).tolist(), strict=True)
                bounds.write("".join(f"{start},{end}\n" for start, end in lines).encode())
                top += rows.ids.size
                # Count the bounds in a row that the reader would invent or miss. The bound before padding does not
                # count, because padding is not trained on.
                within = rows.filled[:, 1:]  # both tokens of a pair are in the row
                real = (rows.positions[:, 1:] == 0) & within
                eos = (rows.ids[:, :-1] == job.manifest.tokenizer.eos_token_id) & within
                bos = eos & (rows.ids[:, 1:] == job.manifest.tokenizer.bos_token_id)
                part.facts["wrong_by_eos"] += int(np.count_nonzero(eos != real))
                part.facts["wrong_by_bos"] += int(np.count_nonzero(bos != real))

    def settings(self, manifest: Manifest, parts: Sequence[Part]) -> Settings:
        by_eos, by_bos = _found(manifest, parts)
        return {
            "NumpyFSLDatasetConfig": {
                "paths": f"{FOLDER}/train/token_ids_part_*.npy",
                "label_mask_paths": f"{FOLDER}/train/labels_mask_part_*.npy",
                "expand_glob": True,
                "sequence_length": manifest.sequence_length,
                "dtype": np.dtype(_dtype(manifest)).name,
                "generate_doc_lengths": by_eos or by_bos,
            },
            "TokenizerConfig": {
                "vocab_size": manifest.tokenizer.vocab_size,
                "eos_token_id": manifest.tokenizer.eos_token_id,
                "pad_token_id": manifest.tokenizer.pad_token_id,
                "bos_token_id": manifest.tokenizer.bos_token_id if by_bos and not by_eos else None,
            },
        }

    def notes(self, manifest: Manifest, parts: Sequence[Part]) -> list[Note]:
        if any(_found(manifest, parts)):
            return []
        wrong = sum(part.facts["wrong_by_eos"] for part in parts)
        text = (
            f"EOS does not mark the bounds of conversations here ({wrong:,} of them would be wrong), so the "
            "fixed-length dataset cannot keep the conversations of a row apart; NumpyPackedFSLDatasetConfig with "
            "generate_doc_lengths and use_array_if_local=False takes them from the .csv.gz files, and packs again"
        )
        return [Note("isolation", text)]


def _dtype(manifest: Manifest) -> type:
    return np.uint16 if manifest.tokenizer.vocab_size <= 1 << 16 else np.uint32


def _found(manifest: Manifest, parts: Sequence[Part]) -> tuple[bool, bool]:
    """Return whether the reader finds all bounds by EOS, and by EOS before BOS."""
    by_eos, by_bos = (not sum(part.facts[name] for part in parts) for name in ("wrong_by_eos", "wrong_by_bos"))
    return by_eos, by_bos and manifest.tokenizer.bos_token_id is not None
