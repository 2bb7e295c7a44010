"""Pack conversations with and without trees; print tokens and rows.

    python bench/packing/trees.py CONFIG.yaml [--plan SAMPLES]

The conversations of CONFIG.yaml are packed with `turns: auto` and `turns: apart`. "Pairs" are the pairs of tokens that
attention computes, halved, and the bound is what any trees across conversations store. `--plan` measures instead how
long it takes to join generated samples, five for each conversation.
"""

from __future__ import annotations

import argparse
import resource
import tempfile
import time
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import yaml

from packcorpus.tasks.config import config_from
from packcorpus.tasks.packing.pieces import Accepted, Pieces
from packcorpus.tasks.packing.trees import join
from packcorpus.tasks.recipe import recipe_of
from packcorpus.tasks.storage.manifest import load_manifest
from packcorpus.tasks.storage.schemas import TOKENS_SCHEMA
from packcorpus.tasks.storage.token_files import Samples, TokenColumns
from packcorpus.tasks.work import Publish, run_all

SHARES = ("none", "conversation", "all")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("config", type=Path, nargs="?")
    parser.add_argument("--plan", type=int, default=0, help="samples")
    given = parser.parse_args()
    if given.plan:
        print(plan(given.plan))
    else:
        print("| turns | share | samples | tokens | rows | full | trained | pairs | bound |\n|---|---|" + "---:|" * 7)
        for turns, share in product(("auto", "apart"), SHARES):
            print(f"| {turns} | {share} | {packed(given.config, turns, share)} |", flush=True)


def packed(config: Path, turns: str, share: str) -> str:
    values = yaml.safe_load(config.read_text())
    values["advanced"] = values.get("advanced", {}) | {"turns": turns}
    with tempfile.TemporaryDirectory() as root:
        recipe = recipe_of(config_from(values | {"share": share}, str(config)), config.parent, Path(root))
        run_all(Publish(recipe))
        manifest = load_manifest(recipe.published)
    ledger, packing = manifest.ledger, manifest.packing_metadata
    samples = ledger.samples.packed if ledger.samples else ledger.conversations.packed
    pairs = sum(split.statistics.squares for split in manifest.splits.values() if split.statistics) / 2
    trained = 100 * ledger.tokens.trained / ledger.tokens.packed
    bound = f"{packing.lower_bound_tokens:,}" if packing.lower_bound_tokens else ""
    cells = [f"{samples:,}", f"{ledger.tokens.packed:,}", f"{packing.rows:,}", f"{packing.packing_efficiency:.1f} %"]
    return " | ".join([*cells, f"{trained:.1f} %", f"{pairs / 1e9:.2f} G", bound])


def plan(samples: int) -> str:
    """Return the time to join samples of conversations about four products."""
    random = np.random.default_rng(0)
    products = random.integers(0, 32_000, (4, 500), np.int32)
    of_part = np.array_split(np.arange(samples // 5), max(1, samples // 20_000))
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder, f"{part}.arrow") for part in range(len(of_part))]
        for file, conversations in zip(files, of_part, strict=True):
            write_tokens(file, len(conversations), products, random)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        tokens = TokenColumns(files, [0] * len(files))
        lengths = tokens.column("length")
        nothing = np.zeros(len(lengths), np.bool_)
        accepted = Accepted(
            np.array(tokens.edges), lengths, nothing, nothing, nothing.view(np.uint8), Samples.of(tokens)
        )
        no_cuts = np.empty((0, 6), np.int32)
        pieces = Pieces(accepted, np.arange(len(lengths), dtype=np.int32), len(lengths), no_cuts[:, 0], no_cuts)
        start = time.perf_counter()
        shared = join(pieces, tokens, 8192)
        seconds = time.perf_counter() - start
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert shared.shared is not None
    assert shared.least is not None
    encoded = int(lengths.sum(dtype=np.int64))
    return (
        f"{len(lengths):,} samples with {encoded:,} tokens: {encoded - int(shared.shared.sum(dtype=np.int64)):,} in "
        f"trees, at least {shared.least.sum():,} in any; {seconds:.1f} s, {memory / 1000:.0f} MB "
        f"({before / 1000:.0f} MB before)"
    )


def write_tokens(file: Path, conversations: int, products: np.ndarray, random: np.random.Generator) -> None:
    """Write conversations of five samples.

    Each trains on 100 tokens, of which the next sample repeats 50.
    """
    system, texts = (
        random.integers(0, len(products), conversations),
        random.integers(0, 32_000, (conversations, 1000), np.int32),
    )
    columns: dict[str, Any] = {name: np.zeros(5 * conversations, np.int64) for name in TOKENS_SCHEMA.names}
    columns["record"], columns["turn"] = (grid.ravel() for grid in np.indices((conversations, 5)))
    samples = [
        np.hstack([~products[system], ~np.delete(texts[:, : 200 * turn], gone(turn), 1), ~asked, answer])
        for turn in range(5)
        for asked, answer in [np.split(texts[:, 200 * turn : 200 * turn + 200], 2, axis=1)]
    ]
    values = np.hstack(samples)
    ends = np.cumsum([0, *(sample.shape[1] for sample in samples)])[1:]
    offsets = np.append(0, (np.arange(conversations)[:, None] * ends[-1] + ends).ravel())
    columns["tokens"] = pa.LargeListArray.from_arrays(pa.array(offsets), pa.array(values.ravel()))
    arrays = [pa.array(columns[field.name]).cast(field.type) for field in TOKENS_SCHEMA]
    with pa.ipc.new_file(str(file), TOKENS_SCHEMA) as out:
        out.write_table(pa.table(arrays, schema=TOKENS_SCHEMA), max_chunksize=4096)


def gone(turn: int) -> list[int]:
    """Return the reasoning of earlier answers, which a sample does not repeat."""
    return [200 * earlier + 100 + place for earlier in range(turn) for place in range(50)]


if __name__ == "__main__":
    main()
