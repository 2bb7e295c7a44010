"""XTuner V1: the plan as a preset pack, and its tokens as lines of JSON.

    <split>/samples/<shard>.jsonl     {"input_ids": […], "labels": […]}, a line per piece, then a line of padding
    <split>/pack/boundaries.npy       int64[rows + 1]: the slices of row i are boundaries[i] to boundaries[i + 1]
    <split>/pack/samples.npy          int64[slices, 6]: file, line, -1, -1, first token, end
    <split>/pack/paths.json           the files
    <split>/order.npy                 int64[rows]: the order of the rows

XTuner refuses a pack that is not full. Padding at the end of a row or between pieces is therefore a slice of the line
of padding.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import IO, Any, cast

import numpy as np
import orjson

from packcorpus.tasks.exports.model import FOLDER, ExportFormat, Note, OutputFolder, Part, Reader, Settings, ShardJob
from packcorpus.tasks.storage.manifest import Manifest
from packcorpus.tasks.storage.schemas import IGNORED, offsets_of
from packcorpus.tasks.storage.shards import RowBatch

SLICES = 1 << 16  # written at a time
PADDING = -1  # stands for the line of padding until the number of lines before it is known


class Xtuner(ExportFormat):
    name = "xtuner"
    trainer = "XTuner V1"
    rows_kept = True
    aligned = True
    ordered = True  # rank r of n takes every n-th row of order.npy, from row r on
    shifted = "the trainer"
    bounds = "a slice per piece, and one for the padding after it"
    layout = "`samples/*.jsonl`, `pack/` (`boundaries.npy`, `samples.npy`, `paths.json`), `order.npy`"
    reader = Reader("xtuner", "v1 of 2026-08-21 (b934f46)", "xtuner.v1.datasets.preset_pack.PresetPackDataset")

    def write_shard(self, job: ShardJob, batches: Iterator[RowBatch], part: Part, out: OutputFolder) -> None:
        blocks, counts, top = [np.empty((0, 2), np.int32)], [np.empty(0, np.int32)], 0
        with out.file(f"{job.split}/samples/{job.name}.jsonl") as file:
            for rows in batches:
                filled = rows.filled
                ids, labels, edges = rows.ids[filled], rows.labels[filled], offsets_of(rows.lengths).tolist()
                for start, end in pairwise(edges):
                    file.write(_line({"input_ids": ids[start:end], "labels": labels[start:end]}))
                blocks.append(_ends(rows, top))
                of_row = np.repeat(np.arange(len(rows)), rows.pieces)
                counts.append((rows.pieces + np.bincount(of_row[rows.gaps > 0], minlength=len(rows))).astype(np.int32))
                top += len(rows.lengths)
            slices = np.concatenate(blocks)
            if padding := int(slices[slices[:, 0] == PADDING, 1].max(initial=0)):
                pad = job.manifest.tokenizer.pad_token_id
                file.write(_line({"input_ids": [pad] * padding, "labels": [IGNORED] * padding}))
            slices[slices[:, 0] == PADDING, 0] = top
        part.columns = {"slices": slices, "counts": np.concatenate(counts)}

    def close_split(self, manifest: Manifest, split: str, parts: Sequence[Part], out: OutputFolder) -> None:
        names = [f"{split}/samples/{split}-{number:05d}-of-{len(parts):05d}.jsonl" for number in range(len(parts))]
        out.write(f"{split}/pack/paths.json", orjson.dumps([str(out.final / name) for name in names]))
        bounds = offsets_of(np.concatenate([part.columns["counts"] for part in parts]))
        _write_array(out, f"{split}/pack/boundaries.npy", (len(bounds),), iter([bounds]))
        _write_array(out, f"{split}/pack/samples.npy", (int(bounds[-1]), 6), _samples(parts))
        _write_array(out, f"{split}/order.npy", (len(bounds) - 1,), iter([np.arange(len(bounds) - 1)]))

    def settings(self, manifest: Manifest, parts: Sequence[Part]) -> Settings:
        return {
            "DatasetConfig": {"anno_path": f"{FOLDER}/train/samples"},
            "DataloaderConfig": {
                "pack_level": "preset",
                "sampler_type": "preset",
                "pack_config_path": f"{FOLDER}/train/pack",
                "sampler_config_path": f"{FOLDER}/train/order.npy",
                "pack_max_length": manifest.sequence_length,
            },
            "tokenize_fn": "the class Tokens in the export guide",
        }

    def notes(self, manifest: Manifest, parts: Sequence[Part]) -> list[Note]:
        paths = (
            "paths.json has the paths of the files, relative if the path of this folder was: start XTuner in the same "
            "working directory, and export again if you move the folder"
        )
        text = "XTuner leaves out the last rows of order.npy that do not fill a global batch"
        return [Note("paths", paths), Note("last_step", text)]


def _line(values: dict[str, Any]) -> bytes:
    return orjson.dumps(values, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE)


def _ends(rows: RowBatch, top: int) -> np.ndarray:
    """Return line and end of each slice, int32[slices, 2]; `top` lines come before."""
    slices = np.stack([np.arange(top, top + len(rows.lengths)), rows.lengths], axis=1).astype(np.int32)
    gaps = rows.gaps
    followed = np.flatnonzero(gaps)
    padding = np.stack([np.full(len(followed), PADDING), gaps[followed]], axis=1)
    return np.insert(slices, followed + 1, padding, axis=0)


def _samples(parts: Sequence[Part]) -> Iterator[np.ndarray]:
    """Yield the rows of samples.npy in blocks."""
    for number, part in enumerate(parts):
        slices = part.columns["slices"]
        for top in range(0, len(slices), SLICES):
            some = slices[top : top + SLICES]
            samples = np.zeros((len(some), 6), np.int64)
            samples[:, 0], samples[:, [1, 5]] = number, some
            samples[:, 2:4] = -1  # whole lines, not ranges of characters
            yield samples


def _write_array(out: OutputFolder, name: str, shape: tuple[int, ...], blocks: Iterator[np.ndarray]) -> None:
    """Write an int64 array in blocks, in the format of np.save."""
    with out.file(name) as file:
        header = {"descr": "<i8", "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(cast(IO[bytes], file), cast(Any, header))
        for block in blocks:
            file.write(np.ascontiguousarray(block, "<i8"))
