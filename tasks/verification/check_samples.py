"""Compare every sample in the rows of a corpus with the token files.

    plan of a shard ─▶ pieces ┬─ their tokens in the token files ─compared─ all places of the rows
                              └─ in trees: the sample so far ─compared─ what the last token sees by the column `end`

A corpus is compared where it was packed, as long as its plan and its token files exist.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from packcorpus.tasks.core.errors import DataError, PackError, StorageError
from packcorpus.tasks.core.printable import counted
from packcorpus.tasks.storage.files import has_artifact, read_receipt, sha256_of
from packcorpus.tasks.storage.layout import Layout
from packcorpus.tasks.storage.manifest import Manifest
from packcorpus.tasks.storage.schemas import END, IGNORED, to_numpy
from packcorpus.tasks.storage.shards import open_index, open_shard, row_columns
from packcorpus.tasks.storage.token_files import TokenFiles
from packcorpus.tasks.verification.check_rows import pieces_between

# Tokens that are read at a time to compare what samples share.
READ = 1 << 20


class _Different(Exception):
    """A piece, by its number in the plan, and how it differs."""

    def __init__(self, piece: int, what: str):
        super().__init__(what)
        self.piece, self.what = piece, what


def layout_of(manifest: Manifest, folder: Path) -> Layout:
    """Return the project of a corpus or, if it was moved, the working directory."""
    home = folder.resolve()
    return Layout(home.parents[2] if home.parts[-3:] == Path(manifest.corpus).parts else Path.cwd())


def find_plan(manifest: Manifest, layout: Layout) -> tuple[Path, list[str]] | None:
    """Return folder and token file keys of a complete plan of a corpus, or None."""
    wanted = manifest.name, manifest.key, [source.path for source in manifest.sources]
    for receipt in sorted(layout.plan_folder("*").parent.glob("*/plan.json")):
        with suppress(PackError, OSError, LookupError, TypeError, AttributeError):
            plan = read_receipt(receipt)
            named = plan["name"], plan["corpus"], [source["path"] for source in plan["sources"]]
            digests = plan["sha256"].items()
            # A plan in groups, of an earlier version, has no plan.arrow.
            is_ours = "plan.arrow" in plan["sha256"] and named == wanted
            if is_ours and all(sha256_of(receipt.parent / name) == digest for name, digest in digests):
                return receipt.parent, plan["token_files"]
    return None


def check_samples(manifest: Manifest, folder: Path) -> str:
    """Compare all samples of packed rows, and return the result for `verify`.

    The rows and the index must have passed their own checks. Raises DataError at the first sample that differs.
    """
    layout = layout_of(manifest, folder)
    plan = find_plan(manifest, layout)
    if plan is None:
        return "not compared, because the plan of the corpus is gone or damaged"
    files = [layout.token_file(key) for key in plan[1]]
    for key, file in zip(plan[1], files, strict=True):
        if not has_artifact(file, layout.token_receipt(key), checksum="xxh3"):
            return f"not compared, because {layout.name_of(file)} is gone or damaged"
    tokens, compared = TokenFiles(files), 0
    fix = f"delete {folder}, then pack the corpus again"
    shards = ((name, number, shard) for name, of in manifest.splits.items() for number, shard in enumerate(of.shards))
    with pa.OSFile(str(plan[0] / "plan.arrow")) as source, pa.ipc.open_file(source) as reader:
        for at, (split, number, shard) in enumerate(shards):
            batch, rows = reader.get_batch(at), 0  # a plan with the key of the corpus has as many shards
            pieces = {name: to_numpy(batch.column(name)) for name in batch.schema.names}
            if (planned := int(pieces["row"].max(initial=-1)) + 1) != shard.rows:
                what = f"has {shard.rows:,} rows, but {planned:,} were planned"
                raise DataError("wrong_count", f"{folder / shard.path}: {what}; {fix}")
            with open_shard(manifest, folder, shard, streamed=True) as batches:
                for batch in batches:
                    top, rows = rows, rows + batch.num_rows
                    chosen = pieces_between(pieces, top, rows)
                    try:
                        _compare(batch, chosen, tokens, manifest, manifest.length_of_split(split))
                    except _Different as found:
                        row, start = (int(chosen[name][found.piece]) for name in ("row", "start"))
                        where = f"{folder / shard.path}: row {top + row}: the sample of "
                        where += _name_of(manifest, folder, split, number, top + row, start)
                        raise DataError("bad_row", f"{where} {found.what}; {fix}") from None
                    except OSError as error:
                        what = "was removed while it was read; run again"
                        raise StorageError("cannot_read", f"{error.filename}: {what}") from error
            compared += len(pieces["row"])
    return f"compared with the token files ({counted(compared, 'sample')})"


def _name_of(manifest: Manifest, folder: Path, split: str, shard: int, row: int, start: int) -> str:
    """Return the source and record that the index has at a place."""
    with open_index(manifest, folder) as reader:
        for batch in reader:
            is_here = pc.and_(pc.equal(batch.column("row"), row), pc.equal(batch.column("start"), start))
            for entry in batch.filter(is_here).to_pylist():
                if (entry["split"], entry["shard"]) == (split, shard):
                    return f"{manifest.sources[entry['source']].path}:{entry['record']}"
    return "no record"


def _compare(
    batch: pa.RecordBatch, plan: dict[str, np.ndarray], tokens: TokenFiles, manifest: Manifest, length: int
) -> None:
    """Compare a batch of rows; raise _Different at the first sample that differs."""
    pad, none = manifest.tokenizer.pad_token_id, np.zeros(len(plan["row"]), np.int32)
    plan = {"repeated": none, "shared": none, **plan, "position": tokens.locate(plan)}
    ids, _, labels, _ = (values.reshape(-1) for values in row_columns(batch, length, manifest.row_layout, pad).values())
    starts = plan["row"] * np.int64(length) + plan["start"]
    begins = starts + plan["repeated"]
    wanted = np.full(len(ids), ~pad, np.int32)
    if plan["repeated"].any():
        tokens.gather(_beginnings(plan, plan["repeated"]), starts, wanted)
        np.minimum(wanted, ~wanted, out=wanted)
    tokens.gather(plan, begins, wanted)
    wanted[(begins + plan["taken"])[plan["closed"]]] = ~manifest.tokenizer.eos_token_id
    # The first token of a piece has nothing before it, unless the piece continues a tree.
    firsts = begins[plan["shared"] == 0]
    wanted[firsts] = np.minimum(wanted[firsts], ~wanted[firsts])
    found = np.where(labels == IGNORED, ~ids, ids)
    if not np.array_equal(found, wanted):
        at = int(np.argmax(found != wanted))
        piece = max(0, int(np.searchsorted(starts, at, side="right")) - 1)
        number = at - int(starts[piece])
        if number >= plan["repeated"][piece]:
            number += int(plan["first"][piece] - plan["repeated"][piece])
        raise _Different(piece, _difference(number, found[at], wanted[at]))
    if END in batch.schema.names:
        _compare_paths(ids, to_numpy(batch.column(END).flatten()).reshape(-1, length), plan, tokens)


def _compare_paths(ids: np.ndarray, ends: np.ndarray, plan: dict[str, np.ndarray], tokens: TokenFiles) -> None:
    """Compare what samples share with what their last tokens see by `end`."""
    length, shared = ends.shape[1], plan["shared"]
    columns = [plan[name].tolist() for name in ("row", "start", "taken", "closed", "repeated", "shared")]

    def paths(pieces: slice) -> Iterator[np.ndarray]:
        places = zip(*(column[pieces] for column in columns), strict=True)
        for piece, (row, start, taken, closed, repeated, before) in enumerate(places, pieces.start):
            after = start + repeated + taken + closed
            seen = np.flatnonzero(ends[row, :after] >= after)
            if len(seen) != before + after - start or seen[before] != start:
                raise _Different(piece, f"has {before + after - start:,} tokens, but its last token sees others")
            yield seen[:before] + row * length

    edges = (np.flatnonzero(np.diff(np.cumsum(shared, dtype=np.int64) // READ)) + 1).tolist()
    for first, last in zip([0, *edges], [*edges, len(shared)], strict=True):
        pieces = slice(first, last)
        places = np.concatenate([np.empty(0, np.int64), *paths(pieces)])
        offsets = np.cumsum(shared[pieces], dtype=np.int64)
        wanted = np.empty(len(places), np.int32)
        heads = _beginnings({name: values[pieces] for name, values in plan.items()}, shared[pieces])
        tokens.gather(heads, offsets - shared[pieces], wanted)
        # No sample trains on what it shares: its tree would lose the label.
        found = ~ids[places]
        if not np.array_equal(found, wanted):
            at = int(np.argmax(found != wanted))
            piece = int(np.searchsorted(offsets, at, side="right"))
            number = at - int(offsets[piece] - shared[first + piece])
            raise _Different(first + piece, _difference(number, found[at], wanted[at]))


def _beginnings(plan: dict[str, np.ndarray], counts: np.ndarray) -> dict[str, np.ndarray]:
    """Return a plan of the first tokens of the samples of pieces."""
    return {**plan, "position": plan["position"] - 4 * plan["first"].astype(np.int64), "taken": counts}


def _difference(number: int, found: int, wanted: int) -> str:
    """Describe a token, counted from 0; values are id or ~id."""
    (one, is_trained), (other, _) = ((int(value if value >= 0 else ~value), value >= 0) for value in (found, wanted))
    if one == other:
        trained, not_trained = "is trained on", "is not trained on"
        here, there = (trained, not_trained) if is_trained else (not_trained, trained)
        return f"differs from its token file: token {number:,} {here}, there it {there}"
    return f"differs from its token file: token {number:,} is {one:,}, there {other:,}"
