"""NeMo Automodel: prepacked rows, with labels that are already shifted.

The padding after a piece belongs to the piece, both at the end of a row and, with `align`, before the next piece.
`seq_lens` counts the piece without this padding, `seq_lens_padded` counts it with the padding, and positions continue
in the padding.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from packcorpus.tasks.exports.model import FOLDER, DatasetFolder, Note, Part, Reader, Settings, lists
from packcorpus.tasks.storage.manifest import Manifest
from packcorpus.tasks.storage.shards import RowBatch


class Automodel(DatasetFolder):
    name = "automodel"
    trainer = "NeMo Automodel"
    rows_kept = True
    aligned = True
    shifted = "the export"
    bounds = "`seq_lens`, `seq_lens_padded`"
    layout = "a `datasets` folder: `input_ids`, `labels`, `position_ids`, `seq_lens`, `seq_lens_padded`"
    reader = Reader("nemo-automodel", "0.7.0", "nemo_automodel.components.datasets.utils.packed_sequence_thd_collater")

    def columns(self, rows: RowBatch, manifest: Manifest) -> dict[str, pa.Array]:
        count, length = rows.ids.shape
        places = np.full(count, length)
        padded = rows.lengths + rows.gaps
        # The position of the first padding is the length of the piece before it.
        before = np.repeat(rows.lengths, padded).reshape(count, length)
        positions = rows.positions + np.where(rows.filled, 0, before).astype(np.int32)
        return {
            "input_ids": lists(rows.ids.reshape(-1), places),
            "labels": lists(rows.next_labels().reshape(-1), places),
            "position_ids": lists(positions.reshape(-1), places),
            "seq_lens": lists(rows.lengths.astype(np.int32), rows.pieces),
            "seq_lens_padded": lists(padded.astype(np.int32), rows.pieces),
        }

    def settings(self, manifest: Manifest, parts: Sequence[Part]) -> Settings:
        return {
            "dataset": {"_target_": "datasets.load_from_disk", "dataset_path": f"{FOLDER}/train"},
            "packed_sequence": {
                "packing_strategy": "thd",
                "packed_sequence_size": manifest.sequence_length,
                "prepacked": True,
            },
            "dataloader": {"collate_fn": "nemo_automodel.components.datasets.utils.packed_sequence_thd_collater"},
        }

    def notes(self, manifest: Manifest, parts: Sequence[Part]) -> list[Note]:
        text = "pieces are not padded to multiples of 2 × the context-parallel size: use no context parallelism"
        if (align := manifest.row_layout.align) > 1:
            text = f"pieces are padded to multiples of {align}: 2 × the context-parallel size must divide it"
        return [Note("alignment", text)]
