"""Megatron-Bridge, NeMo: packed Parquet files.

A piece of n tokens is a segment of n stored tokens that counts as n - 1: the reader takes all tokens but the last as
inputs, and all tokens but the first as labels. `loss_mask` is for the next token, so it ends with 0 in every segment.

    stored      a  b  c  EOS │ d  e  EOS          inputs   a  b  c │ d  e
    loss_mask   0  1  1   0  │ 1  1   0           labels   b  c EOS│ e EOS
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa
from pyarrow import parquet

from packcorpus.tasks.exports.model import (
    FOLDER,
    ExportFormat,
    Note,
    OutputFolder,
    Part,
    Reader,
    Settings,
    ShardJob,
    lists,
)
from packcorpus.tasks.storage.files import to_json
from packcorpus.tasks.storage.manifest import Manifest
from packcorpus.tasks.storage.schemas import IGNORED, offsets_of
from packcorpus.tasks.storage.shards import RowBatch

GROUP_ROWS, GROUP_TOKENS = 512, 1 << 19  # at most in a row group, because the reader holds one group in memory


class Megatron(ExportFormat):
    name = "megatron"
    trainer = "Megatron-Bridge, NeMo"
    rows_kept = True
    shifted = "the export (`loss_mask`), the trainer (tokens)"
    bounds = "`seq_start_id`"
    layout = "Parquet: `input_ids`, `loss_mask`, `seq_start_id`; no padding; `metadata.json` for CUDA graphs"
    reader = Reader("megatron-bridge", "0.6.0", "megatron.bridge.data.packing.parquet.GPTSFTPackedParquetDataset")

    def write_shard(self, job: ShardJob, batches: Iterator[RowBatch], part: Part, out: OutputFolder) -> None:
        size = max(1, min(GROUP_ROWS, GROUP_TOKENS // job.manifest.sequence_length))
        with out.file(f"{job.split}/{job.name}.idx.parquet") as file:
            writer, shortest = None, job.manifest.sequence_length
            for rows in batches:
                shortest = min(shortest, int((rows.tokens - rows.pieces).min()))
                filled = rows.filled
                # Tokens in the rows before the row of each piece.
                before = np.repeat(offsets_of(rows.tokens)[:-1], rows.pieces)
                trained = (rows.next_labels() != IGNORED)[filled].astype(np.int8)
                starts = offsets_of(rows.lengths)[:-1] - before
                columns = {
                    "input_ids": lists(rows.ids[filled], rows.tokens),
                    "loss_mask": lists(trained, rows.tokens),
                    "seq_start_id": lists(starts.astype(np.int32), rows.pieces),
                }
                batch = pa.RecordBatch.from_pydict(columns)
                writer = writer or parquet.ParquetWriter(file, batch.schema)
                writer.write_batch(batch, row_group_size=size)
            assert writer is not None, f"{job.name} has no rows"
            writer.close()
        part.facts = {"shortest": shortest}

    def close_split(self, manifest: Manifest, split: str, parts: Sequence[Part], out: OutputFolder) -> None:
        rows, pieces = (sum(getattr(part, name) for part in parts) for name in ("rows", "pieces"))
        counted = sum(part.tokens for part in parts) - pieces
        facts = {
            "dataset_max_seqlen": max(part.longest_piece for part in parts) - 1,
            "max_samples_per_bin": max(part.most_pieces for part in parts),
            "packing_factor": round(pieces / rows, 2),
            "packing_efficiency": round(100 * counted / (rows * manifest.sequence_length), 2),
            "pack_size": manifest.sequence_length,
            "min_packed_seqlen": min(part.facts["shortest"] for part in parts),
        }
        out.write(f"{split}/metadata.json", to_json([facts]))

    def settings(self, manifest: Manifest, parts: Sequence[Part]) -> Settings:
        return {
            "dataset": {
                "dataset_root": FOLDER,
                "seq_length": manifest.sequence_length,
                "enable_offline_packing": True,
                "offline_packing_specs": {
                    "packed_sequence_size": manifest.sequence_length,
                    "packed_train_data_path": f"{FOLDER}/train",
                    "packed_val_data_path": f"{FOLDER}/validation" if manifest.splits["validation"].rows else None,
                    "pad_seq_to_mult": 1,
                },
                "dataset_kwargs": {"answer_only_loss": True},
            },
            "train": {"micro_batch_size": 1},
        }

    def notes(self, manifest: Manifest, parts: Sequence[Part]) -> list[Note]:
        text = "pieces are not padded to multiples: pad_seq_to_mult must be 1, without context parallelism"
        labels = "answer_only_loss must be true: without it every token but EOS is trained on"
        return [Note("alignment", text), Note("labels", labels)]
