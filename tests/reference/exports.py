"""Plain readers of exports, written from the formats that the trainers publish.

    expected(corpus, split)             the rows of a corpus, from its shards
    READERS["trl"](export, split, …)    the rows of an export

A row is a list of pieces. A piece has its token ids and, for each token but the last, the target of the loss: the
next token, or -100. Formats that shift labels and formats that do not are therefore compared by their effect in
training.
"""

from __future__ import annotations

import gzip
import json
from array import array
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
from pyarrow import parquet

IGNORED = -100

Piece = tuple[list[int], list[int]]
Row = list[Piece]


class Facts(NamedTuple):
    """Settings of a trainer."""

    length: int
    pad: int
    settings: dict[str, Any]


def expected(corpus: Path, split: str) -> list[Row]:
    rows = []
    for path in sorted(corpus.glob(f"{split}-*.arrow")):
        align = alignment(path)
        for row in stream(path):
            rows.append([])
            for start, end in runs(row["position_ids"]) if "attention_mask" in row else places(row["seq_lens"], align):
                if row.get("attention_mask", [1] * end)[start]:
                    rows[-1] += pieces(row["input_ids"], row["labels"], [start, end])
    return rows


def alignment(path: Path) -> int:
    """Return the multiple that the conversations of a shard start at."""
    with pa.memory_map(str(path)) as file:
        facts = pa.ipc.open_stream(file).schema.metadata
    return int(facts.get(b"align", 1))


def places(lengths: Sequence[int], align: int) -> list[tuple[int, int]]:
    """Return the start and end of each conversation of a row.

    Each starts at the next multiple of `align`.
    """
    starts = sums([-(-length // align) * align for length in lengths])
    return [(start, start + length) for start, length in zip(starts, lengths, strict=False)]


def runs(positions: Sequence[int]) -> list[tuple[int, int]]:
    """Return the start and end of each run of positions; a run begins at each 0."""
    return list(pairwise([*(at for at, position in enumerate(positions) if position == 0), len(positions)]))


def pieces(ids: Sequence[int], labels: Sequence[int], bounds: Sequence[int]) -> Row:
    """Return the pieces between the bounds; the labels are not shifted."""
    return [(list(ids[start:end]), list(labels[start + 1 : end])) for start, end in pairwise(bounds)]


def stream(path: Path) -> list[dict[str, Any]]:
    with pa.memory_map(str(path)) as file:
        found = pa.ipc.open_stream(file).read_all().to_pylist()
    return list(found)


def dataset(folder: Path) -> list[dict[str, Any]]:
    """Return the rows of a folder saved by `datasets`.

    state.json lists the files in their order.
    """
    state = json.loads((folder / "state.json").read_bytes())
    json.loads((folder / "dataset_info.json").read_bytes())
    return [row for file in state["_data_files"] for row in stream(folder / file["filename"])]


def sums(lengths: Sequence[int]) -> list[int]:
    """Return the running sum of lengths, from 0."""
    bounds = [0]
    for length in lengths:
        bounds.append(bounds[-1] + length)
    return bounds


def trl(export: Path, split: str, facts: Facts) -> list[Row]:
    """Read rows in which `seq_lengths` add up to the length of the row.

    The label of the first token of each piece becomes -100, then the model shifts the labels.
    """
    rows = []
    for row in dataset(export / split):
        bounds = sums(row["seq_lengths"])
        assert bounds[-1] == len(row["input_ids"]) == len(row["labels"]) <= facts.length
        rows.append(pieces(row["input_ids"], row["labels"], bounds))
    return rows


def megatron(export: Path, split: str, facts: Facts) -> list[Row]:
    """Read rows in which each segment has inputs and labels, already shifted.

    The inputs are all tokens but the last, and the labels are all but the first, with their mask.
    """
    rows = []
    for path in sorted((export / split).glob("*.parquet")):
        for row in parquet.read_table(path).to_pylist():
            ids, mask, found = row["input_ids"], row["loss_mask"], []
            assert row["seq_start_id"][0] == 0
            assert len(mask) == len(ids)
            for start, end in pairwise([*row["seq_start_id"], len(ids)]):
                assert mask[end - 1] == 0
                inputs, labels = ids[start : end - 1], ids[start + 1 : end]
                targets = [label if on else IGNORED for label, on in zip(labels, mask[start : end - 1], strict=True)]
                found.append(([*inputs, labels[-1]], targets))
            rows.append(found)
    return rows


def axolotl(export: Path, split: str, facts: Facts) -> list[Row]:
    """Read rows with one conversation each.

    The attention mask is 1 everywhere, and the model shifts the labels.
    """
    rows = []
    for row in dataset(export / split):
        size = len(row["input_ids"])
        assert row["attention_mask"] == [1] * size
        assert len(row["labels"]) == size <= facts.length
        rows.append(pieces(row["input_ids"], row["labels"], [0, size]))
    return rows


def llama_factory(export: Path, split: str, facts: Facts) -> list[Row]:
    """Read rows in which `attention_mask` numbers the pieces from 1.

    The mask is 0 on padding, and every row has some padding. The model shifts the labels.
    """
    rows = []
    for row in dataset(export / split):
        mask, width = row["attention_mask"], len(row["input_ids"])
        assert len(mask) == width > facts.length
        assert width % 8 == 0
        assert mask[-1] == 0
        found = [[at for at in range(width) if mask[at] == number] for number in range(max(mask) + 1)]
        padding, starts = found[0], [places[0] for places in found[1:]]
        assert starts == sorted(starts)
        assert all(places == list(range(places[0], places[-1] + 1)) for places in found[1:]), "one run each"
        assert {row["input_ids"][at] for at in padding} == {facts.pad}
        assert {row["labels"][at] for at in padding} == {IGNORED}
        assert {row["position_ids"][at] for at in padding} == {0}
        for places in found[1:]:
            assert [row["position_ids"][at] for at in places] == list(range(len(places)))
        end = found[-1][-1] + 1
        assert row["packing_params"]["sequence_boundaries"] == [*starts, end, width]
        assert row["packing_params"]["right_padding_length"] == width - end
        rows.append([])
        for places in found[1:]:
            rows[-1] += pieces(row["input_ids"], row["labels"], [places[0], places[-1] + 1])
    return rows


def xtuner(export: Path, split: str, facts: Facts) -> list[Row]:
    """Read packs of slices of lines, in the order of order.npy.

    The last token of a pack is not an input, and the trainer shifts the labels. Padding is one more slice.
    """
    folder = export / split
    files = [Path(path) for path in json.loads((folder / "pack" / "paths.json").read_bytes())]
    lines = [[json.loads(line) for line in path.read_text().splitlines()] for path in files]
    bounds, samples = npy(folder / "pack" / "boundaries.npy"), npy(folder / "pack" / "samples.npy")
    rows: list[Row] = []
    for start, end in pairwise(bounds):
        row: Row = []
        for at in range(start, end):
            file, number, first_char, last_char, first, last = samples[6 * at : 6 * at + 6]
            assert (first_char, last_char) == (-1, -1)
            line = lines[file][number]
            assert last <= len(line["input_ids"]) == len(line["labels"])
            row += pieces(line["input_ids"], line["labels"], [first, last])
        assert sum(len(ids) for ids, _ in row) == facts.length
        rows.append([piece for piece in row if not is_padding(piece, facts)])
    assert bounds[-1] * 6 == len(samples)
    return [rows[number] for number in npy(folder / "order.npy")]


def is_padding(piece: Piece, facts: Facts) -> bool:
    return set(piece[0]) == {facts.pad} and set(piece[1]) <= {IGNORED}


def npy(path: Path) -> list[int]:
    """Return the int64 numbers of a NumPy file, version 1.0."""
    data = path.read_bytes()
    assert data[:8] == b"\x93NUMPY\x01\x00"
    size = 10 + int.from_bytes(data[8:10], "little")
    header = data[10:size].decode()
    assert "'<i8'" in header
    assert "False" in header
    return array("q", data[size:]).tolist()


def olmo_core(export: Path, split: str, facts: Facts) -> list[Row]:
    """Read rows stored one after another, with the bounds of pieces in CSV files.

    The mask of a token applies to the token itself, and the trainer shifts the labels. With `generate_doc_lengths`,
    the trainer ends a conversation at EOS, or only at EOS before BOS if there is a BOS. These ends must match the CSV
    files.
    """
    own, names = facts.settings["NumpyFSLDatasetConfig"], facts.settings["TokenizerConfig"]
    eos, bos = names["eos_token_id"], names["bos_token_id"]
    rows = []
    for path in sorted((export / split).glob("token_ids_part_*.npy")):
        ids = array({"uint16": "H", "uint32": "I"}[own["dtype"]], path.read_bytes())
        mask = path.with_name(path.name.replace("token_ids", "labels_mask")).read_bytes()
        assert len(mask) == len(ids)
        labels = [token if on else IGNORED for token, on in zip(ids, mask, strict=True)]
        text = gzip.decompress(path.with_name(path.name.replace(".npy", ".csv.gz")).read_bytes()).decode()
        bounds = [tuple(map(int, line.split(","))) for line in text.splitlines()]
        for top in range(0, len(ids), facts.length):
            inside = [(start, end) for start, end in bounds if top <= start < top + facts.length]
            assert inside[0][0] == top
            assert inside[-1][1] <= top + facts.length
            if own["generate_doc_lengths"]:
                edges = [inside[0][0], *(end for _, end in inside)]
                ends = [
                    at + 1 for at in range(top, edges[-1] - 1) if ids[at] == eos and (bos is None or ids[at + 1] == bos)
                ]
                assert ends == edges[1:-1]
            rows.append([])
            for edges in inside:
                rows[-1] += pieces(ids, labels, edges)
    return rows


def mds(export: Path, split: str, facts: Facts) -> list[Row]:
    """Read the rows of MDS shards; a piece begins at each position 0."""
    rows = []
    for columns in mds_samples(export / split, facts.length):
        ids, labels, positions = (columns[name] for name in ("input_ids", "labels", "position_ids"))
        row = [pieces(ids, labels, run)[0] for run in runs(positions)]
        rows.append([piece for piece in row if not is_padding(piece, facts)])
    return rows


def mds_samples(folder: Path, length: int) -> Iterator[dict[str, array[Any]]]:
    """Yield the columns of each sample of an MDS folder.

    A shard has the number of samples and the offsets as u32, then the config, then the samples. The columns of a
    sample are in the order of their names. The encoding of a column is ndarray:TYPE:LENGTH.
    """
    index = json.loads((folder / "index.json").read_bytes())
    assert index["version"] == 2
    for shard in index["shards"]:
        data = (folder / shard["raw_data"]["basename"]).read_bytes()
        assert len(data) == shard["raw_data"]["bytes"]
        count = array("I", data[:4])[0]
        assert count == shard["samples"]
        offsets = array("I", data[4 : 4 * (count + 2)])
        config = json.loads(data[4 * (count + 2) : offsets[0]])
        assert all(shard[name] == config[name] for name in ("column_names", "column_encodings", "column_sizes"))
        assert config["column_names"] == sorted(config["column_names"])
        kinds = {f"ndarray:int32:{length}": "i", f"ndarray:float32:{length}": "f"}
        encodings = dict(zip(config["column_names"], config["column_encodings"], strict=True))
        for start, end in pairwise(offsets):
            assert end - start == sum(config["column_sizes"]) == 4 * length * len(encodings)
            places = range(start, end, 4 * length)
            yield {
                name: array(kinds[kind], data[at : at + 4 * length])
                for at, (name, kind) in zip(places, encodings.items(), strict=True)
            }


def automodel(export: Path, split: str, facts: Facts) -> list[Row]:
    """Read rows with labels that are already shifted.

    The padding of a row belongs to its last piece.
    """
    rows = []
    for row in dataset(export / split):
        ids, labels = row["input_ids"], row["labels"]
        bounds, found = sums(row["seq_lens_padded"]), []
        assert bounds[-1] == len(ids) == facts.length
        assert row["position_ids"] == [at for size in row["seq_lens_padded"] for at in range(size)]
        for start, end, size in zip(bounds, bounds[1:], row["seq_lens"], strict=False):
            assert set(labels[start + size - 1 : end]) <= {IGNORED}
            assert set(ids[start + size : end]) <= {facts.pad}
            found.append((ids[start : start + size], labels[start : start + size - 1]))
        rows.append(found)
    return rows


def flat(rows: Sequence[Row]) -> Iterator[Piece]:
    return (piece for row in rows for piece in row)


READERS: dict[str, Callable[[Path, str, Facts], list[Row]]] = {
    "trl": trl, "megatron": megatron, "axolotl": axolotl, "llama-factory": llama_factory, "xtuner": xtuner,
    "olmo-core": olmo_core, "mds": mds, "automodel": automodel,
}  # fmt: skip
