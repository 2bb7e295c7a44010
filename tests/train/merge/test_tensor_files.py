"""safetensors reads files that are written one tensor at a time.

The tests also read files that safetensors wrote.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import orjson
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from packcorpus.tasks.core.errors import DataError
from packcorpus.train.merge import tensors
from packcorpus.train.merge.tensors import DTYPES, Place, Tensors, tensors_of_model, write_shards

SHAPES = st.lists(st.integers(0, 5), max_size=3).map(tuple)


def value_of(place: Place) -> torch.Tensor:
    count = place.bytes // place.dtype.itemsize
    return (
        (torch.arange(count) % 2 if place.dtype == torch.bool else torch.arange(count))
        .to(place.dtype)
        .reshape(place.shape)
    )


@given(st.lists(st.tuples(st.sampled_from(sorted(DTYPES)), SHAPES), min_size=1, max_size=8), st.integers(1, 200))
def test_what_is_written_is_what_safetensors_reads(
    tmp_path_factory: pytest.TempPathFactory, kinds: list[tuple[str, tuple[int, ...]]], limit: int
) -> None:
    folder = tmp_path_factory.mktemp("files")
    places = [Place(f"w{n}", DTYPES[kind], shape) for n, (kind, shape) in enumerate(kinds)]
    places.sort(key=lambda place: -place.dtype.itemsize)
    values = {place.name: value_of(place) for place in places}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tensors, "SHARD_BYTES", limit)
        write_shards(folder, places, ((place.name, values[place.name]) for place in places))
    shards = [load_file(file) for file in folder.glob("*.safetensors")]
    assert all(len(shard) == 1 or sum(value.nbytes for value in shard.values()) <= limit for shard in shards)
    read = {name: value for file in folder.glob("*.safetensors") for name, value in load_file(file).items()}
    assert read.keys() == values.keys()
    assert all(torch.equal(read[name], value) and read[name].dtype == value.dtype for name, value in values.items())
    starts = [int.from_bytes(file.read_bytes()[:8], "little") for file in folder.glob("*.safetensors")]
    assert all(start % 8 == 0 for start in starts), "the first tensor is not aligned"
    assert (folder / "model.safetensors.index.json").is_file() == (len(shards) > 1)
    found = tensors_of_model(folder)
    assert all(torch.equal(found.read(name), value) for name, value in values.items())


def test_files_of_the_library_are_read(tmp_path: Path) -> None:
    values = {"a": torch.randn(3, 4), "b": torch.randn(2).bfloat16(), "c": torch.tensor(7)}
    save_file(values, tmp_path / "model.safetensors")
    found = tensors_of_model(tmp_path)
    assert all(torch.equal(found.read(name), value) for name, value in values.items())


def test_tensors_out_of_order_are_a_bug(tmp_path: Path) -> None:
    places = [Place("a", torch.float32, (2,)), Place("b", torch.float32, (2,))]
    with pytest.raises(RuntimeError, match="expected a"):
        write_shards(tmp_path, places, iter([("b", torch.zeros(2)), ("a", torch.zeros(2))]))
    with pytest.raises(RuntimeError, match="expected a"):
        write_shards(tmp_path, [replace(places[0], shape=(3,))], iter([("a", torch.zeros(2))]))
    assert not list(tmp_path.glob("*.safetensors"))


@pytest.mark.parametrize("cut", [4, 60, 200])
def test_a_truncated_file_is_named(tmp_path: Path, cut: int) -> None:
    file = tmp_path / "model.safetensors"
    save_file({"a": torch.zeros(60)}, file)
    file.write_bytes(file.read_bytes()[:cut])
    with pytest.raises(DataError, match=r"model.safetensors: cannot be read .*; copy the model again"):
        tensors_of_model(tmp_path)


def test_a_precision_that_cannot_be_merged_is_named(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(4).to(torch.float8_e4m3fn)}, tmp_path / "model.safetensors")
    with pytest.raises(DataError, match="a is stored as F8_E4M3, which cannot be merged"):
        tensors_of_model(tmp_path)


def test_a_file_that_shrinks_after_it_was_opened_is_named(tmp_path: Path) -> None:
    file = tmp_path / "a.safetensors"
    save_file({"a": torch.zeros(60)}, file)
    found = Tensors([file], "bad_model", "copy it")
    file.write_bytes(file.read_bytes()[:-8])
    with pytest.raises(DataError, match=r"a.safetensors: cannot be read .*; copy it"):
        found.read("a")


@pytest.mark.parametrize(
    ("index", "message"),
    [
        (None, "contains neither model.safetensors nor"),
        (b"[]", "has no weight_map"),
        (orjson.dumps({"weight_map": {"a": "x.safetensors"}}), "x.safetensors: cannot be read"),
        (orjson.dumps({"weight_map": {"a": "y.safetensors", "b": "y.safetensors"}}), "y.safetensors: lacks b"),
    ],
)
def test_an_incomplete_model_is_refused(tmp_path: Path, index: bytes | None, message: str) -> None:
    save_file({"a": torch.zeros(2)}, tmp_path / "y.safetensors")
    if index is not None:
        (tmp_path / "model.safetensors.index.json").write_bytes(index)
    with pytest.raises(DataError, match=message):
        tensors_of_model(tmp_path)
