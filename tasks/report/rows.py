"""Choose rows for the report, decode them, and cut them to fit the page.

    key ─choose─▶ row numbers ─index─▶ pieces ─shards, tokenizer─▶ Sample ─ Excerpt conversations ─ Runs of text
                                                                   └ strip: conversations and trained tokens, as shapes

In a strip of trees, a piece is below the one that has the tokens before it, with a line from the last of them.
Long texts are cut in the middle, the longest first, so that every turn of a row remains visible.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from html import escape
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from packcorpus.tasks.conversations.formats import read_record
from packcorpus.tasks.core.errors import DataError, Reject
from packcorpus.tasks.core.printable import printable, printable_lines
from packcorpus.tasks.encoders.encoder import Encoder
from packcorpus.tasks.encoders.tokenizer_files import open_tokenizer
from packcorpus.tasks.inspection.lookup import turn_of
from packcorpus.tasks.inspection.rows import runs_of
from packcorpus.tasks.report.figures import Piece
from packcorpus.tasks.storage.manifest import Manifest
from packcorpus.tasks.storage.schemas import END, IGNORED
from packcorpus.tasks.storage.shards import path_before, read_rows
from packcorpus.tasks.templates.spans import trained_turns

# Width of a strip. Finer shapes are invisible, and would take megabytes for a row of 100,000 tokens.
COLUMNS = 400
# Bytes of markup around each run of text, and around each conversation.
RUN_BYTES, CONVERSATION_BYTES = 40, 300
# Number of color classes, which neighboring conversations use in turn.
HUES = 4
# Height of the blocks of a strip, of a level of a tree, and of the line of trained tokens with its gap.
BLOCK, LEVEL, TRAINED = 10, 13, 8
# The deepest level of trees that is drawn as such.
DEEPEST = 8


@dataclass(slots=True)
class Run:
    """Text, without `left_out` characters before `suffix`, or a control token."""

    text: str
    trained: bool
    control: bool = False
    suffix: str = ""
    left_out: int = 0


@dataclass(slots=True)
class Excerpt:
    """A conversation, or a piece of one: runs, grouped by whether they are trained."""

    place: str
    facts: list[str]
    hue: int
    groups: list[tuple[bool, list[Run]]]
    left_out: int = 0  # runs
    level: int = 0  # in its tree


@dataclass(slots=True)
class Sample:
    """One row; `hues` and `trained_shape` are SVG paths with x from 0 to COLUMNS."""

    split: str
    row: int
    shard: str
    tokens: int
    trained: int
    pads: int
    count: int
    conversations: list[Excerpt] = field(default_factory=list)
    left_out: int = 0  # conversations
    hues: list[str] = field(default_factory=list)
    branches: str = ""  # of trees, as an SVG path
    trained_shape: str = ""
    height: int = 0  # of the strip
    trees: int = 0


def choose(key: str, rows: int, count: int) -> list[int]:
    """Choose `count` distinct numbers below `rows` by the key, ascending.

    If there are not more than `count` rows, all of them are chosen.
    """
    if rows <= count:
        return list(range(rows))
    chosen: set[int] = set()
    attempt = 0
    while len(chosen) < count:
        chosen.add(int(hashlib.sha256(f"{key}:{attempt}".encode()).hexdigest(), 16) % rows)
        attempt += 1
    return sorted(chosen)


def samples(manifest: Manifest, folder: Path, drawn: dict[int, list[Piece]], budget: int) -> Iterator[Sample]:
    """Yield rows, each cut to about `budget` bytes of HTML.

    `drawn` has their numbers and their pieces (Figures.drawn). Raises DataError or InputMissing.
    """
    encoder = open_tokenizer(manifest, folder) if manifest.packing_metadata.enabled else None
    top = 0
    for split, facts in manifest.splits.items():
        of_split = top
        for shard in facts.shards:
            within = [number - top for number in sorted(drawn) if top <= number < top + shard.rows]
            for at, columns in read_rows(manifest, folder, shard, within):
                number = top + at
                if encoder is None:
                    sample = _whole(manifest, columns, drawn[number])
                else:
                    sample = _packed(manifest, columns, drawn[number], encoder, manifest.length_of_split(split))
                sample.split, sample.row, sample.shard = split, number - of_split, shard.path
                _fit(sample, budget)
                yield sample
            top += shard.rows


# -- format 3.0 -------------------------------------------------------------------------------------------------------


def _packed(manifest: Manifest, row: dict[str, Any], pieces: list[Piece], encoder: Encoder, length: int) -> Sample:
    ids, labels = row["input_ids"], row["labels"]
    if ids.min() < 0 or ids.max() >= encoder.vocab_size:
        raise DataError("bad_row", "a row contains ids that the tokenizer does not have; run: packcorpus verify")
    trained = labels != IGNORED
    filled = sum(piece.length for piece in pieces)
    sample = Sample("", 0, "", filled, int(trained.sum()), len(ids) - filled, len(pieces))
    levels, branches = _levels(row, pieces)
    deepest = max(levels, default=0)
    for number, (piece, level) in enumerate(zip(pieces, levels, strict=True)):
        inside = slice(piece.start, piece.start + piece.length)
        runs = [
            Run(printable_lines(encoder.decode(run.ids)), run.trained, run.control)
            for run in runs_of(encoder, ids[inside], labels[inside])
        ]
        facts = [f"{piece.length:,} tokens", f"{piece.trained:,} trained", *["truncated"] * piece.truncated]
        if level:
            facts.insert(1, f"after {int(row['position_ids'][piece.start]):,} shared")
        excerpt = Excerpt(_place(manifest, piece), facts, number % HUES, _grouped(runs), level=level)
        sample.conversations.append(excerpt)
    for hue in range(HUES):
        of_level: dict[int, list[tuple[int, int]]] = {}
        for piece, level in list(zip(pieces, levels, strict=True))[hue::HUES]:
            of_level.setdefault(level, []).append((piece.start, piece.start + piece.length))
        sample.hues.append("".join(_path(spans, length, level * LEVEL, BLOCK) for level, spans in of_level.items()))
    between = LEVEL - BLOCK
    sample.branches = "".join(
        f"M{_column(last, length)} {level * LEVEL - between}v{between / 2}H{_column(first, length)}v{between / 2}"
        for last, first, level in branches
    )
    sample.trees = levels.count(0)
    bottom = deepest * LEVEL + BLOCK
    edges = np.flatnonzero(np.diff(trained, prepend=False, append=False)).tolist()
    sample.trained_shape = _path(zip(edges[::2], edges[1::2], strict=True), length, bottom + 3, TRAINED - 3)
    sample.height = bottom + TRAINED + 1
    return sample


def _levels(row: dict[str, Any], pieces: list[Piece]) -> tuple[list[int], list[tuple[int, int, int]]]:
    """Return the level of each piece in its tree, from 0, at most DEEPEST.

    Also returns (end of its path, its start, its level) for each piece that is below another one.
    """
    levels, branches = list[int](), list[tuple[int, int, int]]()
    for number, piece in enumerate(pieces):
        path = path_before(row[END], piece.start).tolist() if END in row else []
        under = [above for above in range(number) if path and pieces[above].start <= path[-1]]
        levels.append(min(DEEPEST, levels[under[-1]] + 1) if under else 0)
        if under and levels[-1] > levels[under[-1]]:
            branches.append((path[-1] + 1, piece.start, levels[-1]))
    return levels, branches


def _column(place: int, length: int) -> int:
    return place * COLUMNS // length


def _place(manifest: Manifest, piece: Piece) -> str:
    name = manifest.sources[piece.source].path if 0 <= piece.source < len(manifest.sources) else "?"
    return printable(f"{name}:{piece.record}{turn_of({'turn': piece.turn})}")


def _path(spans: Iterable[tuple[int, int]], length: int, y: int, height: int) -> str:
    """Return rectangles over spans of tokens as one SVG path.

    Those that share a column are joined.
    """
    shapes: list[list[int]] = []
    for first, last in spans:
        left, right = _column(first, length), max(_column(first, length) + 1, _column(last, length))
        if shapes and left < shapes[-1][1]:
            shapes[-1][1] = max(right, shapes[-1][1])
        else:
            shapes.append([left, right])
    return "".join(f"M{left} {y}h{right - left}v{height}h{left - right}z" for left, right in shapes)


# -- format 2.0 -------------------------------------------------------------------------------------------------------


def _whole(manifest: Manifest, row: dict[str, Any], pieces: list[Piece]) -> Sample:
    tokens, trained = sum(piece.length for piece in pieces), sum(piece.trained for piece in pieces)
    runs: list[Run] = []
    if row["messages"] is None:
        runs.append(Run(printable_lines(row["text"]), trained=True))
    else:
        if row["tools"]:
            runs += [Run("tools", False, control=True), Run(f"\n{printable_lines(row['tools'])}\n", False)]
        try:
            trained_on = trained_turns(read_record(row, "messages"), manifest.train_on)
        except Reject as error:
            raise DataError("bad_row", f"a row is not a conversation: {error}; run: packcorpus verify") from None
        for message, is_trained in zip(row["messages"], trained_on, strict=True):
            calls = orjson.dumps(message["tool_calls"]).decode() if message["tool_calls"] else ""
            content = "\n".join(filter(None, (message.get("reasoning_content"), message["content"], calls)))
            runs.append(Run(printable(message["role"]), False, control=True))
            runs += [Run("\n", False), Run(printable_lines(content), is_trained), Run("\n", False)]
    facts = [f"{tokens:,} tokens", f"{trained:,} trained"]
    excerpt = Excerpt(_place(manifest, pieces[0]), facts, 0, _grouped(runs))
    return Sample("", 0, "", tokens, trained, 0, 1, [excerpt])


# -- cutting to size ---------------------------------------------------------------------------------------------


def _grouped(runs: list[Run]) -> list[tuple[bool, list[Run]]]:
    return [(trained, list(group)) for trained, group in groupby(runs, key=lambda run: run.trained)]


def _fit(sample: Sample, budget: int) -> None:
    """Cut a row to `budget` bytes.

    First, whole conversations and runs at its end are cut, then the middles of the longest texts.
    """
    spent = 0
    kept: list[Excerpt] = []
    for excerpt in sample.conversations:
        if spent > budget // 2:
            break
        spent += CONVERSATION_BYTES
        groups: list[tuple[bool, list[Run]]] = []
        for trained, runs in excerpt.groups:
            room = max(0, (budget // 2 - spent) // RUN_BYTES)
            spent += RUN_BYTES * min(len(runs), room)
            excerpt.left_out += len(runs[room:])
            if runs[:room]:
                groups.append((trained, runs[:room]))
        excerpt.groups = groups
        kept.append(excerpt)
    sample.left_out = len(sample.conversations) - len(kept)
    sample.conversations = kept
    runs = [run for excerpt in kept for _, runs in excerpt.groups for run in runs]
    sizes = [len(escape(run.text).encode("utf-8", "surrogatepass")) for run in runs]
    most = _share(sizes, budget - spent)
    for run, size in zip(runs, sizes, strict=True):
        if size > most:
            text, characters = run.text, len(run.text) * most // size
            prefix, suffix = characters * 2 // 3, characters - characters * 2 // 3
            run.text, run.suffix, run.left_out = text[:prefix], text[len(text) - suffix :], len(text) - characters


def _share(sizes: list[int], budget: int) -> int:
    """Return the largest size for which all texts, cut to it, fit into the budget."""
    left = max(budget, 0)
    for place, size in enumerate(sorted(sizes)):
        if size * (len(sizes) - place) > left:
            return left // (len(sizes) - place)
        left -= size
    return max(sizes, default=0)
