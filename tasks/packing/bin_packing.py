"""Choose which conversations share a row.

    lengths ─ histogram → counts ─ solve → Rows ─ Runs.of, assign → (row, start) of every conversation
                                     └─ the number of rows that every packing needs

Packing conversations into rows is one-dimensional bin packing with integer lengths. All decisions are made on the
histogram: the number of conversations of each length. `Rows` are the lengths of a row and the number of rows with these
lengths, so the work depends on the number of distinct lengths, not on the number of conversations.

The search is ``bottleneck-exact-fit``. Each row is opened by the longest remaining conversation. The rest of the
row is filled completely, or as far as the remaining lengths allow. Among all such fills, the algorithm takes the one
whose shortest conversation is as long as possible (then the second shortest, and so on). Short conversations are
needed to close rows, so this saves them for the end. The pattern is repeated as often as the counts allow.
It descends from the minimum-bin-slack heuristics (Gupta & Ho, Production Planning & Control 10, 1999; Fleszar &
Hindi, Computers & Operations Research 29, 2002), which search for the fullest row one row at a time. The rule for
choosing among full rows is new, and so is the table that finds the row. For every sum, the table holds how many of the
longest lengths are needed to reach it. Each entry starts as a trivial lower bound, and the search raises it whenever it
proves too low. Counts only fall, so a raised entry stays valid for the rest of the run, and no failed search is
repeated.

Cost: memory is O(capacity). A search step takes 0.1 µs of plain Python. The conversations of the table below took
0.02, 0.14, 0.7, and 1.4 million steps; 10 million log-normal lengths took 2.3 million at 4096 and as many at 131072.
After SEARCH_STEPS (a count, not a clock, so that every machine stops at the same point) the remaining conversations
are packed by best-fit-decreasing. If the result is above the lower bound, best-fit-decreasing also packs the whole
histogram (5 ms at 2048) and the smaller number of rows wins. The search has no floats, no random numbers, and no ties
left to a sort, so the plan is the same on every machine.

If the rows are still above the bound, column_generation.py packs better or proves a higher bound, in at most about
10 s. It is needed if few conversations fit in a row and their lengths do not add up to full rows. For example, 100,000
lengths between a quarter and half a row at 512 take 41,784 rows with the search alone and 39,018 rows with column
generation, and no packing has fewer.

Rows for 26,067 conversations with 7.2 million tokens, without conversations longer than a row:

    sequence length                           512    1024    2048    4096
    lower bound                              8740    5863    3261    1739
    bottleneck-exact-fit                     8740    5863    3261    1739   optimal
    best-fit-decreasing                      8813    5897    3269    1742

Alternatives that were tried on the same conversations and rejected:

* Longest first (the fill whose longest conversation is longest): 8761, 5865, 3261, 1739 rows. It uses the short
  conversations too early: at 512, its last 170 rows hold four conversations of 103..114 tokens each and leave a fifth
  of the row empty.
* Shortest conversations first in the fill: 9186, 5906, 3269, 1746 rows.
* Wasting up to 3 tokens for a fill of longer conversations: 8741, 5863, 3261, 1740 rows; up to 15 tokens costs 0.06 %
  on 100,000 lengths spread over 1/8..3/4 of a row.
* A bitset of reachable sums for every prefix of the lengths: the same rows, but 2.9 s instead of 0.3 s at 4096 with
  10 million log-normal lengths, and 11 s at 8192.
* Searching the whole row at long capacities, without WINDOW: 30 rows in 10 million steps at 131072.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from packcorpus.tasks.packing.column_generation import MOST_WORK, Row, Rows, improve, lower_bound, rows_of

ALGORITHM = "bottleneck-exact-fit"

# 1 s of plain Python, four times the most that real conversations took. Lengths spread evenly over 1..131072 would
# take 28 million; best-fit-decreasing alone is within 0.01 % there.
SEARCH_STEPS = 10_000_000
# While a row has more free tokens than this, it takes the longest conversations that fit; the search fills the rest.
# The window is larger if the shortest conversations are longer than 128. 1024 costs 0.005 % at 4096 with 10 million
# lengths; 4096 takes twice the time for the same rows.
WINDOW = 2048
# Conversations processed at a time: temporary arrays stay in the cache and take 25 MB.
CHUNK = 1 << 18


class Packing(NamedTuple):
    """Rows, and the number of rows that every packing needs, with its proof."""

    rows: Rows
    bound: tuple[int, str]


def histogram(lengths: np.ndarray, capacity: int) -> np.ndarray:
    """Count the conversations of each length.

    lengths: integers, shape (n,). Returns int64, shape (capacity + 1,), indexed by the length in tokens. Raises
    ValueError naming the first length outside 1..capacity and its position.
    """
    counts = np.zeros(capacity + 1, dtype=np.int64)
    for first in range(0, len(lengths), CHUNK):
        chunk = lengths[first : first + CHUNK]
        if chunk.min() < 1 or chunk.max() > capacity:
            at = int(np.flatnonzero((chunk < 1) | (chunk > capacity))[0])
            raise ValueError(
                f"length {chunk[at]} at position {first + at} does not fit in a row of 1..{capacity} tokens; drop, "
                "truncate, or split the conversation before packing"
            )
        counts += np.bincount(chunk, minlength=capacity + 1)
    return counts


def solve(counts: np.ndarray, capacity: int, most_work: int = MOST_WORK) -> Packing:
    """Pack a histogram, and prove a lower bound.

    There are never more rows than with best-fit-decreasing. counts: integers, shape (capacity + 1,), as returned by
    `histogram`. `most_work` limits the linear program.
    """
    bound = lower_bound(counts, capacity)
    rows = search(counts, capacity, bound[0])
    if rows_of(rows) > bound[0]:
        better, proved = improve(counts, (capacity,), rows, bound[0], lambda left: search(left, capacity), most_work)
        rows = better or rows
        bound = max(bound, (proved, "linear program"), key=lambda candidate: candidate[0])
    return Packing(rows, bound)


def search(counts: np.ndarray, capacity: int, enough: int = 0) -> Rows:
    """Pack a histogram by the search or, with fewer rows, by best-fit-decreasing.

    Best-fit-decreasing is tried only if the search takes more than `enough` rows.
    """
    rows, left = exact_fill(counts, capacity)
    rows += best_fit_decreasing(left, capacity)
    return rows if rows_of(rows) <= enough else min(rows, best_fit_decreasing(counts, capacity), key=rows_of)


def counts_of(rows: Rows, capacity: int) -> np.ndarray:
    """Return the histogram that rows pack: int64, shape (capacity + 1,)."""
    counts = np.zeros(capacity + 1, np.int64)
    for row, copies in rows:
        for length, times in row:
            counts[length] += copies * times
    return counts


def exact_fill(counts: np.ndarray, capacity: int, shorter: int = 0) -> tuple[Rows, np.ndarray]:
    """Pack by bottleneck-exact-fit until SEARCH_STEPS are used up.

    Only conversations longer than `shorter` open a row. Returns the rows, and the counts that remain unpacked.
    """
    lengths: list[int] = np.flatnonzero(counts)[::-1].tolist()  # a *class* is an index into this list: 0 is longest
    left: list[int] = [int(counts[length]) for length in lengths]
    classes = len(lengths)
    # The first class of at most t tokens, for every t; `classes` if none is that short.
    fitting: list[int] = np.searchsorted(-np.array(lengths, dtype=np.int64), -np.arange(capacity + 1)).tolist()
    # needed[t]: no subset of the longest needed[t] - 1 classes sums to t. Only ever raised, as the search learns.
    needed = [0] + [first + 1 for first in fitting[1:]]
    live = list(range(classes + 1))  # links to the next class that has conversations left
    below = list(range(capacity + 1))  # links to the next smaller sum that is not proved unreachable
    tokens = sum(length * conversations for length, conversations in zip(lengths, left, strict=True))
    steps = 0

    def follow(links: list[int], i: int) -> int:
        end = i
        while links[end] != end:
            end = links[end]
        while links[i] != end:
            links[i], i = end, links[i]
        return end

    def fill(total: int, allowed: int, row: Row) -> bool:
        """Fill `row` with exactly `total` tokens of the longest `allowed` classes.

        Appends (class, times) to `row`. Returns False if no such subset exists. Tries each class as the shortest of the
        fill, starting with the longest class. Each call raises `needed` or succeeds, until the steps are used up. Then
        it returns False, and its caller discards the row.
        """
        nonlocal steps
        k = needed[total]
        while k <= allowed:
            if steps > SEARCH_STEPS:
                return False
            i = k - 1
            if live[i] != i:
                k = follow(live, i) + 1
                continue
            length, most, times = lengths[i], left[i], 1
            rest = total - length
            while rest >= 0 and times <= most:
                if needed[rest] <= i and (rest == 0 or fill(rest, i, row)):
                    needed[total] = k
                    row.append((i, times))
                    return True
                rest -= length
                times += 1
            steps += times
            k += 1
        needed[total] = k
        return False

    rows: Rows = []
    last = classes - 1  # the shortest class with conversations left
    for opening in range(sum(length > shorter for length in lengths)):
        while left[opening] and steps <= SEARCH_STEPS:
            while not left[last]:
                last -= 1
            left[opening] -= 1
            free = capacity - lengths[opening]
            row: Row = [(opening, 1)]
            # Half the window stays free for the search. The recursion depth of the search is the number of distinct
            # lengths in a fill: 63 within WINDOW, 110 if only conversations longer than half of WINDOW are left.
            window = max(WINDOW, 16 * lengths[last])
            i = opening
            while free > window and (i := follow(live, max(i, fitting[free - window // 2]))) < classes:
                times = min(left[i], (free - window // 2) // lengths[i])
                if times:
                    row.append((i, times))
                    left[i] -= times
                    free -= times * lengths[i]
                i += 1
            longest = row[1:]
            total = follow(below, min(free, tokens - (capacity - free)))
            while total and not fill(total, classes, row):
                below[total] = total - 1
                total = follow(below, total)
            for i, times in longest:
                left[i] += times
            left[opening] += 1
            if steps > SEARCH_STEPS:
                break
            pattern: Counter[int] = Counter()
            for i, times in row:
                pattern[i] += times
            copies = min(left[i] // times for i, times in pattern.items())
            for i, times in pattern.items():
                tokens -= lengths[i] * copies * times
                left[i] -= copies * times
                if left[i] == 0:
                    live[i] = i + 1
            rows.append(([(lengths[i], times) for i, times in sorted(pattern.items())], copies))
    rest = np.zeros(capacity + 1, dtype=np.int64)
    rest[lengths] = left
    return rows, rest


def best_fit_decreasing(counts: np.ndarray, capacity: int) -> Rows:
    """Pack a histogram by best-fit-decreasing.

    Each conversation, longest first, goes to the fullest row that it fits in, or opens a new row. Rows with the same
    free space are interchangeable and are handled as one group, so the cost is per distinct length: 0.1 s for 16,000
    lengths. The number of rows is the same as if conversations were placed one by one.
    """
    # Tokens free → groups of equal rows, as (content, copies). A content is a linked list: (length, times, the rest).
    open_rows: dict[int, list[tuple[Any, int]]] = {}
    free_sizes: list[int] = []  # the keys of open_rows in order
    for length in np.flatnonzero(counts)[::-1].tolist():
        remaining = int(counts[length])
        while remaining:
            i = bisect_left(free_sizes, length)
            free, content, available = capacity, None, remaining
            if i < len(free_sizes):
                free = free_sizes[i]
                content, available = open_rows[free].pop()
            # While a row takes more of the same length it stays the fullest that fits, so fill it in one step.
            times = min(free // length, remaining)
            copies = min(available, remaining // times)
            if i < len(free_sizes):
                if available > copies:
                    open_rows[free].append((content, available - copies))
                elif not open_rows[free]:
                    del open_rows[free], free_sizes[i]
            remaining -= times * copies
            free -= times * length
            if free not in open_rows:
                open_rows[free] = []
                insort(free_sizes, free)
            open_rows[free].append(((length, times, content), copies))
    rows: Rows = []
    for free in free_sizes:
        for content, copies in open_rows[free]:
            row: Row = []
            while content:
                length, times, content = content
                row.append((length, times))
            rows.append((row[::-1], copies))
    return rows


@dataclass(frozen=True)
class Runs:
    """Runs of equal lengths within rows.

    All arrays are int64, with one element per run, sorted by length, then row. A run is `times` conversations side by
    side, starting at `start`, in `copies` consecutive rows, the first of which is `row`. Places are numbered by length,
    then row; `first_place` is the first place of the run.
    """

    length: np.ndarray
    times: np.ndarray
    row: np.ndarray
    start: np.ndarray
    copies: np.ndarray
    first_place: np.ndarray

    @classmethod
    def of(cls, rows: Iterable[tuple[Row, int]]) -> Runs:
        """List the runs of rows, which are numbered in this order; copies are consecutive."""
        values, top = array("q"), 0
        for row, copies_of_row in rows:
            offset = 0
            for size, count in row:
                values.extend((size, count, top, offset, copies_of_row))
                offset += size * count
            top += copies_of_row
        runs = np.frombuffer(values, np.int64).reshape(-1, 5)
        length, times, first_row, start, copies = runs[np.argsort(runs[:, 0], kind="stable")].T.copy()
        places = times * copies
        return cls(length, times, first_row, start, copies, np.cumsum(places) - places)


def assign(lengths: np.ndarray, runs: Runs, order: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the row and the start of every conversation.

    Both are int32 arrays of shape (n,). A start is the offset within the row, in tokens. lengths: integers, shape (n,),
    whose histogram `runs` packs. Conversations of equal length take the places of that length in the order of `order`,
    a permutation of 0..n-1. Places are taken row by row, from left to right. Raises ValueError if lengths and runs
    disagree.

    Memory: the result, 8 bytes per conversation, and a constant. Time: 0.3 to 0.5 s for 10 million.
    """
    longest = int(runs.length.max(initial=0))
    counts = histogram(lengths, max(longest, int(lengths.max(initial=0))))
    supply = np.zeros(len(counts), dtype=np.int64)
    np.add.at(supply, runs.length, runs.times * runs.copies)
    if wrong := np.flatnonzero(counts != supply).tolist():
        raise ValueError(
            f"rows do not match lengths: {supply[wrong[0]]} places for {counts[wrong[0]]} conversations of "
            f"{wrong[0]} tokens; pack the histogram of these lengths"
        )
    row = np.empty(len(lengths), dtype=np.int32)
    start = np.empty(len(lengths), dtype=np.int32)
    taken = np.cumsum(counts) - counts  # the next free place of each length; places are numbered by length, then row
    chunk = max(CHUNK, len(runs.length))
    for first in range(0, len(lengths), chunk):
        here = order[first : first + chunk]
        part = lengths[here]
        # numpy's stable sort of 16-bit integers is a radix sort.
        by_length = np.argsort(part.astype(np.uint16 if longest < 1 << 16 else np.int32), kind="stable")
        sizes = np.bincount(part, minlength=len(counts))
        place = np.repeat(taken - (np.cumsum(sizes) - sizes), sizes) + np.arange(len(part))
        taken += sizes
        cuts = np.append(np.searchsorted(place, runs.first_place), len(part))
        run = np.repeat(np.arange(len(runs.length)), np.diff(cuts))
        copy, nth = np.divmod(place - runs.first_place[run], runs.times[run])
        at = here[by_length]
        row[at] = runs.row[run] + copy
        start[at] = runs.start[run] + nth * runs.length[run]
    return row, start
