"""Measure which conversations share a row, for each value of `neighbors`.

    python bench/packing/neighbors.py CONFIG

Packs the sources of a config three times in a temporary folder, and prints a row of a table for each run: the number of
rows, how full they are, and the CPU seconds of the whole command. For all pairs of conversations in a row, it prints
the share of pairs from the same source and the mean similarity of their topics (cosine of sketches). The last column is
the number of conversations that are near-duplicates of a conversation in their row. "By chance" is the result of
exchanging conversations of equal length at random. The config must not split conversations.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from packcorpus.tasks.packing.neighbors import directions_of, labels_of, meetings
from packcorpus.tasks.recipe import resolve
from packcorpus.tasks.storage.manifest import load_manifest
from packcorpus.tasks.storage.token_files import TokenColumns


def pairs_alike(row: np.ndarray, vectors: np.ndarray) -> float:
    """Return the mean product of the vectors of two conversations in a row.

    The mean is over all pairs. `vectors` are float[n, axes].
    """
    rows = int(row.max()) + 1
    counts = np.bincount(row, minlength=rows)
    sums = np.stack([np.bincount(row, weights=column, minlength=rows) for column in vectors.T])
    return float(((sums**2).sum() - (vectors**2).sum()) / (counts * (counts - 1)).sum())


def by_chance(row: np.ndarray, length: np.ndarray) -> np.ndarray:
    """Exchange the rows of conversations of equal length at random."""
    random = np.random.default_rng(0).random(len(row))
    here, there = np.lexsort((np.arange(len(row)), length)), np.lexsort((random, length))
    found = np.empty_like(row)
    found[there] = row[here]
    return found


def measure(config: Path, kind: str, root: Path) -> list[str]:
    """Pack with a value of `neighbors`, and return lines of the table."""
    values = yaml.safe_load(config.read_text()) | {"neighbors": kind, "name": kind}
    own = config.with_name(f"neighbors-{kind}.yaml")  # its paths are relative to its folder
    own.write_text(yaml.safe_dump(values))
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    command = [str(Path(sys.executable).with_name("packcorpus")), "pack", str(own), "--root", str(root)]
    found = subprocess.run(command, check=True, capture_output=True, text=True)
    seconds = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before
    path = Path(found.stdout.splitlines()[-1])
    manifest = load_manifest(path)
    with pa.OSFile(str(root / manifest.corpus / "index.arrow")) as file:
        index = pa.ipc.open_stream(file).read_all()
    recipe = resolve(own, root)
    own.unlink()
    files = [recipe.layout.token_file(key) for key in recipe.token_keys]
    tokens = TokenColumns(files, [0] * len(recipe.parts))
    assert len(index) == tokens.edges[-1], "a conversation was split or packed twice"
    is_packed = index["row"].is_valid().to_numpy()
    places = [index[name].to_numpy()[is_packed].astype(np.int64) for name in ("shard", "row", "length", "source")]
    shard, row, length, source = places
    row = np.unique(shard << 32 | row, return_inverse=True)[1]
    sources = np.eye(int(source.max()) + 1)[source]
    topics = directions_of(tokens)[is_packed] / 127
    labels = labels_of(tokens)[is_packed]
    lines = []
    full = manifest.packing_metadata.packing_efficiency
    for name, found_rows in ((kind, row), ("by chance", by_chance(row, length)))[: 2 if kind == "random" else 1]:
        same, alike = 100 * pairs_alike(found_rows, sources), pairs_alike(found_rows, topics)
        lines.append(
            f"| {name} | {int(row.max()) + 1:,} | {full:.2f} % | {seconds:.1f} | {same:.1f} % | {alike:.3f} | "
            f"{len(meetings(found_rows, labels)):,} |"
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure who shares a row.")
    parser.add_argument("config", type=Path)
    config = parser.parse_args().config
    print("| neighbors | rows | full | CPU s | pairs of one source | similarity | near-duplicates in their row |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    with tempfile.TemporaryDirectory() as folder:
        for kind in "random", "similar", "distinct":
            print(*measure(config, kind, Path(folder)), sep="\n", flush=True)


if __name__ == "__main__":
    main()
