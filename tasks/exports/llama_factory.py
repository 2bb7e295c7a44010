"""LLaMA-Factory: a folder for `tokenized_path`, in the form of its neat packing.

`attention_mask` has the number of the piece, from 1, and 0 on padding. Every row ends with padding, because
LLaMA-Factory drops a mask without zeros. The length of rows is a multiple of 8, because its collator would pad only
some of the columns to such a multiple.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from packcorpus.tasks.exports.model import FOLDER, DatasetFolder, Part, Reader, Settings, is_balanced, lists
from packcorpus.tasks.storage.layout import SPLITS
from packcorpus.tasks.storage.manifest import Manifest
from packcorpus.tasks.storage.schemas import IGNORED, offsets_of, to_arrow
from packcorpus.tasks.storage.shards import RowBatch

MULTIPLE = 8
NO_MEDIA = 1 << 32  # the number of a piece that cannot exist: a row has no images, videos, or audio


class LlamaFactory(DatasetFolder):
    name = "llama-factory"
    trainer = "LLaMA-Factory"
    rows_kept = True
    aligned = True
    shifted = "the model"
    bounds = "`attention_mask` with the number of the piece, `position_ids`"
    layout = "a `datasets` folder: `input_ids`, `attention_mask`, `position_ids`, `labels`, `packing_params`"
    reader = Reader("llamafactory", "0.9.5", "llamafactory.data.collator.SFTDataCollatorWith4DAttentionMask")

    def columns(self, rows: RowBatch, manifest: Manifest) -> dict[str, pa.Array]:
        count, length = rows.ids.shape
        width = (length // MULTIPLE + 1) * MULTIPLE
        filled = rows.filled

        def column(values: np.ndarray, empty: int, kind: type = np.int32) -> pa.Array:
            room = np.full((count, width), empty, kind)
            room[:, :length][filled] = values
            return lists(room.reshape(-1), np.full(count, width))

        of_row = np.arange(len(rows.lengths)) - np.repeat(offsets_of(rows.pieces)[:-1], rows.pieces)
        return {
            "input_ids": column(rows.ids[filled], manifest.tokenizer.pad_token_id),
            "attention_mask": column(np.repeat(of_row + 1, rows.lengths), 0),
            "position_ids": column(rows.positions[filled], 0),
            "labels": column(rows.labels[filled], IGNORED),
            "packing_params": _packing_params(rows, width),
        }

    def splits_loaded(self, splits: Sequence[str]) -> Sequence[str]:
        return [split for split in splits if split in SPLITS]

    def settings(self, manifest: Manifest, parts: Sequence[Part]) -> Settings:
        return {
            "stage": "sft",
            "tokenized_path": FOLDER,
            "cutoff_len": manifest.sequence_length,
            "packing": True,
            "neat_packing": True,
            **({"disable_shuffling": True, "per_device_train_batch_size": 1} if is_balanced(manifest) else {}),
        }


def _packing_params(rows: RowBatch, width: int) -> pa.Array:
    """Return the bounds of the pieces of each row.

    A piece includes the padding before the next piece. The padding at the end of the row counts as one more piece.
    """
    count, length = rows.ids.shape
    gaps = rows.gaps
    lasts = np.cumsum(rows.pieces) - 1
    padding = gaps[lasts] + width - length
    gaps[lasts] = 0
    bounds = np.empty(len(rows.lengths) + 2 * count, np.int64)
    edges = offsets_of(rows.pieces + 2)  # a 0, the end of each piece, and the end of the row
    is_piece = np.ones(len(bounds), bool)
    is_piece[edges[:-1]] = is_piece[edges[1:] - 1] = False
    bounds[edges[:-1]], bounds[edges[1:] - 1] = 0, width
    bounds[is_piece] = rows.starts + rows.lengths + gaps - np.repeat(np.arange(count) * length, rows.pieces)
    media = lists(np.full(count, NO_MEDIA, np.int64), np.ones(count, np.int64))
    return pa.StructArray.from_arrays(
        [lists(bounds, rows.pieces + 2), media, media, media, to_arrow(padding.astype(np.int64))],
        ["sequence_boundaries", "image_subseq_ids", "video_subseq_ids", "audio_subseq_ids", "right_padding_length"],
    )
