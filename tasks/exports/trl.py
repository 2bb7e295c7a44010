"""TRL: rows without padding, with the length of each piece."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from packcorpus.tasks.exports.model import FOLDER, DatasetFolder, Note, Part, Reader, Settings, is_balanced, lists
from packcorpus.tasks.storage.manifest import Manifest
from packcorpus.tasks.storage.shards import RowBatch


class Trl(DatasetFolder):
    name = "trl"
    trainer = "TRL `SFTTrainer`, Unsloth"
    rows_kept = True
    shifted = "the model"
    bounds = "`seq_lengths`"
    layout = "a `datasets` folder: `input_ids`, `labels`, `seq_lengths`; no padding"
    reader = Reader("trl", "1.16.0", "trl.trainer.sft_trainer.DataCollatorForLanguageModeling")

    def columns(self, rows: RowBatch, manifest: Manifest) -> dict[str, pa.Array]:
        filled = rows.filled
        return {
            "input_ids": lists(rows.ids[filled], rows.tokens),
            "labels": lists(rows.labels[filled], rows.tokens),
            "seq_lengths": lists(rows.lengths.astype(np.int32), rows.pieces),
        }

    def settings(self, manifest: Manifest, parts: Sequence[Part]) -> Settings:
        in_turn = {"train_sampling_strategy": "sequential", "per_device_train_batch_size": 1}
        return {
            "train_dataset": f"datasets.load_from_disk('{FOLDER}')['train']",
            "SFTConfig": {
                "padding_free": True,
                "packing": False,
                "max_length": None,
                "dataset_kwargs": {"skip_prepare_dataset": True},
                **(in_turn if is_balanced(manifest) else {}),
            },
        }

    def notes(self, manifest: Manifest, parts: Sequence[Part]) -> list[Note]:
        text = "set padding_free=True; otherwise, the conversations of a row attend to each other"
        return [Note("isolation", text)]
