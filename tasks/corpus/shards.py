"""Write shards: uncompressed Arrow IPC streams with columns of fixed width.

    plan of one shard + token files ─write_shard─▶ train-00000-of-00004.arrow
                                                    input_ids, attention_mask, labels, position_ids
                                                    (end and loss_weight, if the config sets them)

A row has L tokens: conversations, each closed by the EOS separator, then padding. With `align`, padding also fills the
gap between a conversation and the next multiple. With `padding: none`, the padding after the last conversation is left
out, and columns are lists. With `share`, pieces of a tree follow one another, and `end` is where the part of the tree
ends that sees a token. Rows are built in batches: every piece of a conversation is read once, directly into its
place, and the four columns are computed from there.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pyarrow as pa

from packcorpus.tasks.storage.files import atomic_file
from packcorpus.tasks.storage.layout import RowLayout
from packcorpus.tasks.storage.schemas import IGNORED, conversation_schema, offsets_of, row_schema, to_arrow, to_numpy
from packcorpus.tasks.storage.token_files import TokenFiles, WeightRuns

# Tokens per record batch: 13 MB of columns, far below Arrow's 32-bit limits for any sequence length.
BATCH_TOKENS = 1 << 20


@dataclass(frozen=True, slots=True)
class Rows:
    """Columns of R rows of L tokens.

    Columns are int32[R, L], except attention_mask, int8[R, L], and loss_weight, float32[R, L]. Without weights,
    loss_weight has no rows, and without trees, end has none.
    """

    input_ids: np.ndarray
    attention_mask: np.ndarray
    labels: np.ndarray
    position_ids: np.ndarray
    end: np.ndarray
    loss_weight: np.ndarray

    @classmethod
    def room(cls, rows: int, length: int, weighted: bool = False, shared: bool = False) -> Rows:
        """Allocate rows for reuse.

        Allocating new memory would take as much time as the computation.
        """
        ids, labels, positions = (np.empty((rows, length), np.int32) for _ in range(3))
        weights = np.empty((rows * weighted, length), np.float32)
        ends = np.empty((rows * shared, length), np.int32)
        return cls(ids, np.empty((rows, length), np.int8), labels, positions, ends, weights)

    def first(self, rows: int) -> Rows:
        """Return views of the first rows."""
        return Rows(*(getattr(self, name)[:rows] for name in self.__slots__))


def build_rows(plan: dict[str, np.ndarray], tokens: TokenFiles, room: Rows, eos: int, pad: int) -> None:
    """Compute the rows of a plan and write them to `room`, filling it completely.

    `plan` has the columns of PLAN_SCHEMA and `position` (TokenFiles.locate), sorted by row and start. Rows are numbered
    from 0.
    """
    rows, length = room.input_ids.shape
    ids, values, positions = (a.reshape(-1) for a in (room.input_ids, room.labels, room.position_ids))
    values.fill(~pad)
    starts = plan["row"] * length + plan["start"]
    begins = starts + plan["repeated"] if "repeated" in plan else starts
    tokens.gather(plan, begins, values)
    if begins is not starts:
        _repeat(plan, tokens, starts, values)
    values[(begins + plan["taken"])[plan["closed"]]] = ~eos
    # The first token of a piece is never trained. In the middle of a split conversation it may have been trained, but
    # it has no context here.
    for places in (starts, begins):
        first = values[places]
        values[places] = np.where(first >= 0, ~first, first)
    untrained = np.right_shift(values, 31, out=positions)  # -1 if untrained, 0 if trained
    np.bitwise_xor(values, untrained, out=ids)
    # IGNORED if untrained, otherwise the id. Bitwise, because np.where takes ten times as long.
    labels = np.bitwise_xor(ids, IGNORED, out=values)
    labels &= untrained
    labels ^= ids
    # Positions restart at 0 at every conversation, and at the padding that follows it, if any.
    ends = begins + plan["taken"] + plan["closed"]
    padded = (ends != np.append(starts[1:], -1)) & (ends % length != 0)
    restarts = np.concatenate([starts, ends[padded]])
    is_piece = np.arange(len(restarts)) < len(starts)
    order = np.argsort(restarts, kind="stable")
    restarts, is_piece = restarts[order], is_piece[order]
    sizes = np.diff(restarts, append=np.int32(rows * length))
    room.attention_mask.reshape(-1)[:] = np.repeat(is_piece.view(np.int8), sizes)
    positions.fill(1)
    positions[restarts] = 1 - np.diff(restarts, prepend=np.int32(-1))
    np.cumsum(positions, out=positions)
    if "shared" in plan:
        before = np.zeros(len(restarts), np.int32)
        before[is_piece] = plan["shared"]
        positions += np.repeat(before, sizes)
        room.end.reshape(-1)[:] = np.arange(rows * length) + 1
        _write_ends(plan["shared"], starts, ends, room.end.reshape(-1))
        room.end[:] -= (np.arange(rows, dtype=np.int32) * length)[:, None]


def _write_ends(shared: np.ndarray, starts: np.ndarray, ends: np.ndarray, out: np.ndarray) -> None:
    """Write where the part of the tree ends that sees each token: the place after it.

    A later piece of the tree sees the first `shared` tokens of the path before it. `starts` and `ends` are the places
    of the pieces in `out`.
    """
    path: list[tuple[int, int, int]] = []  # runs of tokens that the next piece may see: first and last depth, place
    last = 0

    def close(depth: int, at: int) -> None:
        """Note that no later piece sees the tokens of the path from `depth` on."""
        while path and path[-1][1] > depth:
            first, after, place = path.pop()
            kept = max(0, depth - first)
            out[place + kept : place + after - first] = at
            if kept:
                path.append((first, depth, place))
                return

    for depth, start, end in zip(shared.tolist(), starts.tolist(), ends.tolist(), strict=True):
        close(depth, start if depth else last)
        path.append((depth, depth + end - start, start))
        last = end
    close(0, last)


def _repeat(plan: dict[str, np.ndarray], tokens: TokenFiles, starts: np.ndarray, values: np.ndarray) -> None:
    """Write the repeated first tokens of conversations before their pieces, untrained."""
    chosen = plan["repeated"] > 0
    again = {name: column[chosen] for name, column in plan.items()}
    again |= {"position": again["position"] - 4 * again["first"], "taken": again["repeated"]}
    tokens.gather(again, starts[chosen], values)
    counts = again["repeated"].astype(np.int64)
    places = np.repeat(starts[chosen] - (np.cumsum(counts) - counts), counts) + np.arange(counts.sum())
    repeated = values[places]
    values[places] = np.where(repeated >= 0, ~repeated, repeated)


@dataclass(frozen=True, slots=True)
class Weighting:
    """Weighting of trained tokens; see Config.loss_weight.

    `trained` and `conversations` are the numbers of trained tokens and conversations in the shard's split, with copies.
    """

    of_data: bool
    of_conversations: bool
    trained: int
    conversations: int


def weigh_rows(plan: dict[str, np.ndarray], runs: WeightRuns | None, weighting: Weighting, room: Rows) -> float:
    """Write the weights of built rows to `room`, and return their sum.

    A token that is not trained on has weight 0. The weight of a trained token is computed in float64 and then rounded
    to float32. It is the weight in the data, times the mean number of trained tokens per conversation of the split,
    divided by the number of trained tokens in its own conversation. Each factor is a correctly rounded operation on
    exact numbers, so it is the same on any machine. The returned sum is of the rounded weights, added exactly and
    rounded once.
    """
    length = room.labels.shape[1]
    starts = plan["row"].astype(np.int64) * length + plan["start"] + plan.get("repeated", 0)
    taken = plan["taken"].astype(np.int64)
    factor = np.ones(len(starts))
    if weighting.of_conversations:
        factor = weighting.trained / (weighting.conversations * plan["trained_of_all"].astype(np.float64))
    if runs is None:
        pieces, low, high, weights = np.arange(len(starts)), np.zeros(len(starts), np.int64), taken, factor
    else:
        pieces = np.repeat(np.arange(len(starts)), np.diff(runs.offsets))
        before = np.append(0, runs.ends[:-1])
        before[runs.offsets[:-1]] = 0
        first = plan["first"][pieces]
        low, high = (np.clip(edge - first, 0, taken[pieces]) for edge in (before, runs.ends))
        weights = factor[pieces] * runs.weights
    # Runs are in order within each piece, and pieces within the rows. Tokens between runs are not trained on.
    values, edges = weights.astype(np.float32), starts[pieces] + low
    flat = room.loss_weight.reshape(-1)
    flat.fill(0)
    counts = high - low
    places = np.repeat(edges - np.append(0, np.cumsum(counts)[:-1]), counts) + np.arange(counts.sum())
    flat[places] = np.repeat(values, counts)
    trained = room.labels.reshape(-1) != IGNORED
    flat *= trained
    return sum_of_weights(flat)


def sum_of_weights(weights: np.ndarray) -> float:
    """Return the sum of float32 weights, added exactly and rounded once.

    Equal weights are counted first, because there are few different ones.
    """
    values, counts = np.unique(weights, return_counts=True)
    return math.fsum((values.astype(np.float64) * counts).tolist())


def _lists(rows: Rows, plan: dict[str, np.ndarray], schema: pa.Schema, layout: RowLayout) -> pa.RecordBatch:
    """Return rows without the padding after their last piece, as lists."""
    count, length = rows.input_ids.shape
    lengths = (plan.get("repeated", 0) + plan["taken"] + plan["closed"]).astype(np.int32)
    pieces = np.bincount(plan["row"], minlength=count)
    sizes = np.bincount(plan["row"], weights=layout.places(lengths), minlength=count).astype(np.int64)
    kept = np.arange(length) < sizes[:, None]
    columns = []
    for field in schema:
        if field.name == "max_seqlen":
            longest = np.zeros(count, np.int32)
            np.maximum.at(longest, plan["row"], lengths)
            columns.append(to_arrow(longest))
            continue
        values, of_rows = (lengths, pieces) if field.name == "seq_lens" else (getattr(rows, field.name)[kept], sizes)
        offsets = to_arrow(offsets_of(of_rows).astype(np.int32))
        columns.append(pa.ListArray.from_arrays(offsets, to_arrow(values), type=field.type))
    return pa.record_batch(columns, schema=schema)


def _record_batch(rows: Rows, schema: pa.Schema) -> pa.RecordBatch:
    columns = []
    for field in schema:
        values = to_arrow(getattr(rows, field.name).reshape(-1))
        columns.append(pa.FixedSizeListArray.from_arrays(values, type=field.type))
    return pa.record_batch(columns, schema=schema)


def write_shard(
    path: Path,
    plan: pa.RecordBatch,
    rows: int,
    tokens: TokenFiles,
    special: tuple[int, int],
    layout: RowLayout,
    length: int,
    key: str,
    weighting: Weighting | None = None,
) -> dict[str, Any]:
    """Write one shard of format 3.0 to 3.2, whose rows have `length` tokens.

    `special` has the ids of EOS and padding. Returns the bytes, sha256, rows, packed tokens, and trained tokens of the
    shard; with `weighting`, also the sum of its weights.
    """
    schema = row_schema(layout, length, key)
    columns = {field.name: to_numpy(plan.column(field.name)) for field in plan.schema}
    columns["position"] = tokens.locate(columns)
    runs = tokens.weights(columns) if weighting and weighting.of_data else None
    step = max(1, BATCH_TOKENS // length)
    counts: dict[str, Any] = {"rows": rows, "packed": 0, "trained": 0}
    sums: list[float] = []
    room = Rows.room(min(rows, step), length, weighting is not None, layout.is_shared)
    with atomic_file(path) as out:
        with pa.ipc.new_stream(pa.PythonFile(out, "w"), schema) as writer:
            # A shard without rows has one empty batch, because datasets cannot open a file without batches.
            for top in range(0, max(rows, 1), step):
                bottom = min(top + step, rows)
                inside = slice(*np.searchsorted(columns["row"], [top, bottom]).tolist())
                chosen = {name: values[inside] for name, values in columns.items()}
                chosen["row"] = chosen["row"] - top
                built = room.first(bottom - top)
                build_rows(chosen, tokens, built, *special)
                counts["packed"] += sum(
                    int(chosen[name].sum()) for name in ("repeated", "taken", "closed") if name in chosen
                )
                counts["trained"] += int(np.count_nonzero(built.labels != IGNORED))
                if weighting:
                    sums.append(weigh_rows(chosen, runs and runs.between(inside), weighting, built))
                if layout.padding == "none":
                    batch = _lists(built, chosen, schema, layout)
                    counts["places"] = counts.get("places", 0) + len(batch.column("input_ids").flatten())
                else:
                    batch = _record_batch(built, schema)
                writer.write_batch(batch)
        counts |= {"loss_weight": math.fsum(sums)} if weighting else {}
        return {"bytes": out.size, "sha256": out.digest()} | counts


def write_conversations(path: Path, plan: pa.RecordBatch, tokens: TokenFiles, length: int, key: str) -> dict[str, Any]:
    """Write one shard of format 2.0.

    A row is a whole conversation, in the order of the plan. Returns the same facts as write_shard.
    """
    schema = conversation_schema(length, key)
    places = list(zip(plan.column("part").to_pylist(), plan.column("conversation").to_pylist(), strict=True))
    trained = 0
    with atomic_file(path) as out:
        with pa.ipc.new_stream(pa.PythonFile(out, "w"), schema) as writer:
            for top in range(0, max(len(places), 1), 1024):
                found = [tokens.table(part).slice(place, 1).to_pylist()[0] for part, place in places[top : top + 1024]]
                trained += sum(row["trained"] for row in found)
                rows = [{name: row[name] for name in schema.names} for row in found]
                for row in rows:
                    row["messages"] = orjson.loads(row["messages"])
                writer.write_batch(pa.RecordBatch.from_pylist(rows, schema=schema))
        packed = int(plan.column("taken").to_numpy().sum())
        counts = {"rows": len(places), "packed": packed, "trained": trained}
        return {"bytes": out.size, "sha256": out.digest()} | counts
