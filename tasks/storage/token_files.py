"""Read token files: the conversations of one part as tokens with their labels.

A token file is an Arrow IPC file with one row per sample of an accepted conversation, nearly always all of it:

    record      int64               number of the record within the part (a line number for JSONL), from 0
    digest      uint64              hash of the content of the conversation (content_digest)
    turns       int32               messages, without system messages
    turn        int32               index of the message that the sample trains on; -1 if it is the whole conversation
    trained     int32               trained tokens, including the separator
    separator   bool                whether the last token is an EOS that was added
    tokens      large_list<int32>   the id of a trained token, ~id (bitwise not) of any other

One number carries a token and its label, so one copy moves both: id = v ^ (v >> 31), trained = v >= 0. The first token
of a conversation is never trained, because nothing precedes it to predict it from. With `packing: false`, three
columns follow (messages, tools, text), for format 2.0. The samples of a conversation are adjacent rows with the same
record and digest. Below, "conversation" means a sample.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import ClassVar

import numpy as np
import pyarrow as pa

from tasks.core.errors import StorageError
from tasks.storage.arrow import to_numpy
from tasks.storage.schemas import TOKENS_SCHEMA


class TokenFiles:
    """Token files, mapped or in memory. A file that is not needed may be None."""

    def __init__(self, paths: Sequence[Path | pa.Buffer | None]):
        self._paths = paths
        self.tables: list[pa.Table] = []
        self._chunks: list[tuple[list[int], list[tuple[np.ndarray, np.ndarray, int]]]] = []
        for path in paths:
            in_memory = isinstance(path, pa.Buffer)
            source = pa.BufferReader(path) if in_memory else pa.memory_map(str(path)) if path else None
            base = source.read_buffer(1).address if source else 0
            table = pa.ipc.open_file(source).read_all() if source else TOKENS_SCHEMA.empty_table()
            chunks = table.column("tokens").chunks
            edges = np.cumsum([0, *map(len, chunks)]).tolist()
            views = [(to_numpy(c.offsets), to_numpy(c.values), c.values.buffers()[1].address - base) for c in chunks]
            self.tables.append(table)
            self._chunks.append((edges, views))

    def tokens(self, part: int, conversation: int) -> np.ndarray:
        """Return a view of the tokens of a conversation, int32[length]: ids of trained tokens, ~id of others."""
        offsets, values, at = self._chunk(part, conversation)
        return values[offsets[at] : offsets[at + 1]]

    def gather(self, plan: dict[str, np.ndarray], starts: np.ndarray, out: np.ndarray) -> None:
        """Copy the pieces of a plan (schemas.PLAN_SCHEMA) into `out` (int32), each to its offset in `starts`.

        The files are read, not mapped: in a map, the 64 KiB around every piece count as memory of the process, and the
        pieces of a shard are scattered over the corpus. Raises StorageError if a file ends early.
        """
        room = out.view(np.uint8).data
        order = np.lexsort((plan["conversation"], plan["part"]))
        edges = np.searchsorted(plan["part"][order], np.arange(len(self._paths) + 1))
        for part, (top, bottom) in enumerate(pairwise(edges.tolist())):
            if top == bottom:
                continue
            path = self._paths[part]
            assert isinstance(path, Path), f"part {part} is in the plan, but its token file was not given"
            pieces = order[top:bottom]
            positions = self._positions(part, plan["conversation"][pieces]) + 4 * plan["first"][pieces]
            offsets = 4 * starts[pieces].astype(np.int64)
            ends = offsets + 4 * plan["taken"][pieces]
            with path.open("rb", buffering=0) as file:
                handle = file.fileno()
                for offset, end, position in zip(offsets.tolist(), ends.tolist(), positions.tolist(), strict=True):
                    if os.preadv(handle, (room[offset:end],), position) < end - offset:
                        raise StorageError("damaged_artefact", f"{path}: ends early; delete it and run again")

    def _positions(self, part: int, conversations: np.ndarray) -> np.ndarray:
        """Return the byte offsets in the file of the tokens of these conversations (ascending), int64."""
        edges, views = self._chunks[part]
        inside = np.searchsorted(conversations, edges)
        found = [
            position + 4 * offsets[conversations[top:bottom] - edge]
            for (offsets, _, position), edge, (top, bottom) in zip(
                views, edges, pairwise(inside.tolist()), strict=False
            )
        ]
        return np.concatenate(found)

    def _chunk(self, part: int, conversation: int) -> tuple[np.ndarray, np.ndarray, int]:
        """Return offsets and values of the record batch of a conversation, and its index in it."""
        edges, views = self._chunks[part]
        chunk = bisect_right(edges, conversation) - 1
        offsets, values, _ = views[chunk]
        return offsets, values, conversation - edges[chunk]


class TokenColumns:
    """Columns of the token files of all parts, by number of the conversation over all parts.

    One file is mapped at a time: touched pages of a map count as memory, at 40 bytes per conversation.
    """

    TYPES: ClassVar[dict[str, type]] = {
        "record": np.int64, "digest": np.uint64, "turns": np.int32, "turn": np.int32, "trained": np.int32,
        "separator": np.bool_, "length": np.int32,
    }  # fmt: skip

    def __init__(self, paths: Sequence[Path | pa.Buffer], bases: Sequence[int]):
        """Open token files. `bases` has the number of the first record of each part within its source."""
        self._paths, self._bases = paths, bases
        self._part, self._file = -1, TokenFiles([])
        counts = [self._open(part).tables[0].num_rows for part in range(len(paths))]
        self.edges: list[int] = [0, *accumulate(counts)]  # conversations before each part

    def column(self, name: str, first: int = 0, last: int | None = None) -> np.ndarray:
        """Return a column of the conversations [first, last) as TYPES; `record` counts within the source, from 0."""
        last = self.edges[-1] if last is None else last
        found: np.ndarray = np.empty(last - first, self.TYPES[name])
        for part in range(len(self._paths)):
            before = self.edges[part]
            top, bottom = max(first, before), min(last, self.edges[part + 1])
            if top < bottom:
                # Only the requested slice: large parts are read in slices.
                own = self._open(part).tables[0].column("tokens" if name == "length" else name)
                chunks = own.slice(top - before, bottom - top).chunks
                values = [np.diff(to_numpy(c.offsets)) if name == "length" else to_numpy(c) for c in chunks]
                found[top - first : bottom - first] = np.concatenate(values)
                if name == "record":
                    found[top - first : bottom - first] += self._bases[part]
        return found

    def tokens(self, conversation: int) -> np.ndarray:
        """Return the tokens of a conversation, int32[length]: ids of trained tokens, ~id of others."""
        part = bisect_right(self.edges, conversation) - 1
        return self._open(part).tokens(0, conversation - self.edges[part])

    def _open(self, part: int) -> TokenFiles:
        if part != self._part:
            self._part, self._file = part, TokenFiles([self._paths[part]])
        return self._file
