"""The form of a token file: the conversations of one part as tokens with their labels.

A token file is an Arrow IPC file with a row for each accepted conversation:

    record      int64               number of the record within the part (a line number for JSONL), from 0
    digest      uint64              hash of what the conversation says (conversations.content_digest)
    trained     int32               tokens that are trained on, the separator included
    separator   bool                whether the last token is an EOS that was added here
    tokens      large_list<int32>   a token that is trained on as its id, another as ~id (bitwise not)

One number carries the token and its label, so that one copy moves both: id = v ^ (v >> 31), trained = v >= 0. The
first token of a conversation is never trained, since nothing stands before it to predict it from. With packing:
false three columns follow (messages, tools, text), for format 2.0.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa

SCHEMA = pa.schema(
    [
        ("record", pa.int64()),
        ("digest", pa.uint64()),
        ("trained", pa.int32()),
        ("separator", pa.bool_()),
        ("tokens", pa.large_list(pa.int32())),
    ]
)
WHOLE_SCHEMA = pa.schema([*SCHEMA, *(pa.field(name, pa.large_string()) for name in ("messages", "tools", "text"))])


class TokenFiles:
    """Token files, mapped; tokens are read where they lie. A file that is not needed may be given as None."""

    def __init__(self, paths: Sequence[Path | None]):
        empty = SCHEMA.empty_table()
        self.tables = [pa.ipc.open_file(pa.memory_map(str(path))).read_all() if path else empty for path in paths]
        self._chunks: list[tuple[np.ndarray, list[tuple[np.ndarray, np.ndarray]]]] = []
        for table in self.tables:
            column = table.column("tokens")
            edges = np.cumsum([0, *(len(chunk) for chunk in column.chunks)])
            views = [(chunk.offsets.to_numpy(), chunk.values.to_numpy()) for chunk in column.chunks]
            self._chunks.append((edges, views))

    def lengths(self) -> np.ndarray:
        """int32, tokens of each conversation of all files, in order."""
        lengths = [np.diff(offsets) for _, views in self._chunks for offsets, _ in views]
        return np.concatenate([np.empty(0, np.int32), *lengths]).astype(np.int32)

    def tokens(self, part: int, conversation: int) -> np.ndarray:
        """int32[length], trained tokens as their id and others as ~id; a view, not a copy."""
        edges, views = self._chunks[part]
        chunk = int(np.searchsorted(edges, conversation, side="right")) - 1
        offsets, values = views[chunk]
        at = conversation - int(edges[chunk])
        return values[offsets[at] : offsets[at + 1]]
