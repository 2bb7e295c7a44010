"""Axolotl: tokenized conversations, one per row, which axolotl packs again."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from packcorpus.tasks.exports.model import FOLDER, DatasetFolder, Note, Part, Reader, Settings, lists
from packcorpus.tasks.storage.manifest import Manifest
from packcorpus.tasks.storage.shards import RowBatch


class Axolotl(DatasetFolder):
    name = "axolotl"
    trainer = "axolotl"
    rows_kept = False
    shifted = "the model"
    bounds = "one piece per row"
    layout = "a `datasets` folder: `input_ids`, `attention_mask`, `labels`"
    reader = Reader("axolotl", "0.19.0", "axolotl.utils.collators.batching.V2BatchSamplerDataCollatorForSeq2Seq")

    def columns(self, rows: RowBatch, manifest: Manifest) -> dict[str, pa.Array]:
        filled, tokens = rows.filled, int(rows.tokens.sum())
        return {
            "input_ids": lists(rows.ids[filled], rows.lengths),
            "attention_mask": lists(np.ones(tokens, np.int8), rows.lengths),
            "labels": lists(rows.labels[filled], rows.lengths),
        }

    def settings(self, manifest: Manifest, parts: Sequence[Part]) -> Settings:
        validation = {"test_datasets": [{"path": f"{FOLDER}/validation", "type": ""}]}
        return {
            "datasets": [{"path": f"{FOLDER}/train", "type": ""}],
            **(validation if manifest.splits["validation"].rows else {}),
            "sequence_len": manifest.sequence_length,
            "sample_packing": True,
        }

    def notes(self, manifest: Manifest, parts: Sequence[Part]) -> list[Note]:
        text = (
            "axolotl reads the length of a row from its last position, so it cannot read packed rows and packs the "
            "conversations again"
        )
        return [Note("rows", text)]
