"""Read and write safetensors one tensor at a time, without mapping files.

    folder of a model ─Tensors─▶ names, shapes, precisions ─read─▶ one tensor
    [Place, …] in the order of writing ─plan_shards─▶ [[Place, …], …], each at most 5 GB ─write_shards─▶ files, index

The safetensors library can write a file only from all of its tensors at once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import orjson
import torch
from safetensors import SafetensorError, safe_open

from tasks.core.errors import DataError
from tasks.storage.files import atomic_file, read_json, to_json, write_bytes

SHARD_BYTES = 5_000_000_000
INDEX = "model.safetensors.index.json"
ONLY = "model.safetensors"

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True, slots=True)
class Place:
    """Tensor in a file, stored at bytes `start` to `start + bytes`."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    file: Path = Path()
    start: int = 0

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


# -- reading -----------------------------------------------------------------------------------------------------------


class Tensors:
    """Tensors of some safetensors files, by name.

    Raises DataError, which names the damaged file.
    """

    def __init__(self, files: Sequence[Path], reason: str, fix: str):
        self._reason, self._fix = reason, fix
        self.places = {place.name: place for file in files for place in self._places(file)}

    def _places(self, file: Path) -> Iterator[Place]:
        try:
            # safe_open checks sizes and offsets in the header, and that the file ends with the last tensor.
            with safe_open(file, framework="pt"), file.open("rb") as opened:
                size = int.from_bytes(opened.read(8), "little")
                header = orjson.loads(opened.read(size))
        except (OSError, SafetensorError, orjson.JSONDecodeError) as error:
            raise self._damaged(file, " ".join(str(error).split())) from None
        for name, facts in header.items():
            if name == "__metadata__":
                continue
            if facts["dtype"] not in DTYPES:
                raise self._damaged(file, f"{name} is stored as {facts['dtype']}, which cannot be merged")
            start = 8 + size + facts["data_offsets"][0]
            yield Place(name, DTYPES[facts["dtype"]], tuple(facts["shape"]), file, start)

    def read(self, name: str) -> torch.Tensor:
        """Read one tensor into memory."""
        place = self.places[name]
        if not place.bytes:
            return torch.empty(place.shape, dtype=place.dtype)
        buffer = bytearray(place.bytes)
        try:
            with place.file.open("rb", buffering=0) as file:
                file.seek(place.start)
                view, done = memoryview(buffer), 0
                while done < len(buffer):  # one call returns at most 2 GiB
                    count = file.readinto(view[done:])
                    if not count:
                        raise OSError("it is truncated")
                    done += count
        except OSError as error:
            raise self._damaged(place.file, error.strerror or str(error)) from None
        return torch.frombuffer(buffer, dtype=place.dtype).reshape(place.shape)

    def _damaged(self, file: Path, why: str) -> DataError:
        return DataError(self._reason, f"{file}: cannot be read ({why[:200].rstrip('.')}); {self._fix}")


def tensors_of_model(folder: Path) -> Tensors:
    """Open the weights of a model, in the files that transformers would load.

    Raises DataError if they are missing or damaged.
    """
    fix = "copy the model again"
    if (folder / ONLY).is_file():
        return Tensors([folder / ONLY], "bad_model", fix)
    if not (folder / INDEX).is_file():
        raise DataError("bad_model", f"{folder}: contains neither {ONLY} nor {INDEX}; {fix}")
    index = read_json(folder / INDEX)
    named = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(named, dict) or not all(isinstance(file, str) for file in named.values()):
        raise DataError("bad_model", f"{folder / INDEX}: has no weight_map; {fix}")
    found = Tensors([folder / file for file in sorted(set(named.values()))], "bad_model", fix)
    if missing := sorted(set(named) - set(found.places)):
        raise DataError("bad_model", f"{folder / named[missing[0]]}: lacks {missing[0]}; {fix}")
    return found


# -- writing -----------------------------------------------------------------------------------------------------------


def plan_shards(places: Sequence[Place]) -> list[list[Place]]:
    """Divide tensors into files of at most 5 GB, in their order.

    A larger tensor has its own file.
    """
    shards: list[list[Place]] = []
    size = 0
    for place in places:
        if not shards or size + place.bytes > SHARD_BYTES:
            shards.append([])
            size = 0
        shards[-1].append(place)
        size += place.bytes
    return shards


def write_shards(folder: Path, places: Sequence[Place], tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
    """Write `tensors`, and then the index if there are several files.

    The tensors come in the order of `places`. The offset of a tensor must be a multiple of the size of its precision,
    so precisions must not widen in this order.
    """
    shards = plan_shards(places)
    count = len(shards)
    names = [ONLY] if count == 1 else [f"model-{n:05d}-of-{count:05d}.safetensors" for n in range(1, count + 1)]
    for name, shard in zip(names, shards, strict=True):
        with atomic_file(folder / name) as out:
            out.write(_header(shard))
            for place in shard:
                key, tensor = next(tensors)
                if (key, tensor.dtype, tuple(tensor.shape)) != (place.name, place.dtype, place.shape):
                    raise RuntimeError(f"{key}: expected {place.name} {place.dtype} {place.shape}")
                out.write(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())
                del tensor
    if count > 1:
        weight_map = {place.name: name for name, shard in zip(names, shards, strict=True) for place in shard}
        total = {"total_size": sum(place.bytes for place in places)}
        index = {"metadata": total, "weight_map": dict(sorted(weight_map.items()))}
        write_bytes(folder / INDEX, to_json(index))


def _header(shard: Sequence[Place]) -> bytes:
    ends = list(accumulate(place.bytes for place in shard))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    for place, end in zip(shard, ends, strict=True):
        offsets = [end - place.bytes, end]
        header[place.name] = {"dtype": NAMES[place.dtype], "shape": place.shape, "data_offsets": offsets}
    text = orjson.dumps(header)
    text += b" " * (-len(text) % 8)  # so that the first tensor is aligned
    return len(text).to_bytes(8, "little") + text
