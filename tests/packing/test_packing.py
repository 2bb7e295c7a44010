"""Packing places every conversation once, and no row is too long.

It never needs more rows than best-fit decreasing, and its result is always the same.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import time
from bisect import bisect_left, insort
from functools import cache
from pathlib import Path
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.profiles import examples

from packcorpus.tasks.packing import bin_packing, column_generation
from packcorpus.tasks.packing.column_generation import lower_bound, rows_of

ROOT = Path(__file__).resolve().parents[2]
CORPORA = ROOT.parent / "shared" / "corpora"


@st.composite
def conversations(draw: st.DrawFn, max_size: int = 200) -> tuple[np.ndarray, int]:
    """Draw lengths and a capacity.

    Few or many distinct lengths, near-halves, and near-full rows all occur.
    """
    capacity = draw(st.integers(2, 3000) | st.integers(2, 40))
    low = draw(st.integers(1, max(1, capacity // draw(st.sampled_from([1, 3, 10])))))
    length = st.integers(low, draw(st.integers(low, capacity)))
    values = draw(st.lists(length, min_size=1, max_size=draw(st.sampled_from([1, 3, 50]))))
    least = draw(st.sampled_from([0, max_size // 10, max_size // 2]))
    lengths = draw(st.lists(st.sampled_from(values), min_size=least, max_size=max_size))
    return np.array(lengths, dtype=draw(st.sampled_from([np.int32, np.int64]))), capacity


def best_fit_decreasing_rows(lengths: np.ndarray, capacity: int) -> int:
    """Count the rows one conversation at a time, independent of the tested code."""
    free: list[int] = []
    for length in sorted(lengths.tolist(), reverse=True):
        i = bisect_left(free, length)
        left = (free.pop(i) if i < len(free) else capacity) - length
        insort(free, left)
    return len(free)


def optimal_rows(lengths: list[int], capacity: int) -> int:
    """Return the smallest number of rows, by dynamic programming over subsets.

    The smallest (rows, tokens in the last row) of each subset is exact.
    """

    @cache
    def best(subset: int) -> tuple[int, int]:
        if not subset:
            return 0, capacity
        found = (len(lengths) + 1, 0)
        for i, length in enumerate(lengths):
            if subset >> i & 1:
                rows, used = best(subset & ~(1 << i))
                found = min(found, (rows, used + length) if used + length <= capacity else (rows + 1, length))
        return found

    return best((1 << len(lengths)) - 1)[0]


def runs_of(lengths: np.ndarray, capacity: int) -> bin_packing.Runs:
    return bin_packing.Runs.of(bin_packing.solve(bin_packing.histogram(lengths, capacity), capacity).rows)


def check_plan(
    lengths: np.ndarray, capacity: int, order: np.ndarray | None = None, packed: bin_packing.Packing | None = None
) -> int:
    """Pack, assert every invariant of a plan, and return the number of rows.

    `packed` is the result for these lengths, if they were packed before.
    """
    counts = bin_packing.histogram(lengths, capacity)
    rows, (bound, _) = packed or bin_packing.solve(counts, capacity)
    served = np.arange(len(lengths)) if order is None else order
    row, start = bin_packing.assign(lengths, bin_packing.Runs.of(rows), served)
    assert row.dtype == start.dtype == np.int32
    assert row.shape == start.shape == lengths.shape
    assert all(copies >= 1 for _, copies in rows)
    assert sorted(set(row.tolist())) == list(range(rows_of(rows))), "a row is empty"

    at = np.lexsort((start, row))
    end = start[at] + lengths[at]
    opens = np.append(True, row[at][1:] != row[at][:-1])[: len(at)]
    begins = np.where(opens, 0, np.roll(end, 1))
    assert (start[at] == begins).all(), "a gap or an overlap"
    assert (end <= capacity).all(), "a row overflows"

    for length in set(lengths.tolist()):
        same = served[lengths[served] == length]
        places = list(zip(row[same].tolist(), start[same].tolist(), strict=True))
        assert places == sorted(places), f"conversations of {length} tokens are out of order"

    for lengths_in_row in ([length for length, _ in row] for row, _ in rows):
        assert lengths_in_row == sorted(set(lengths_in_row), reverse=True)

    assert lower_bound(counts, capacity)[0] <= bound
    assert bound <= rows_of(rows) <= best_fit_decreasing_rows(lengths, capacity)
    return rows_of(rows)


@settings(max_examples=examples(400), deadline=None)
@given(conversations())
def test_every_conversation_has_one_place(case: tuple[np.ndarray, int]) -> None:
    check_plan(*case)


@settings(max_examples=examples(100), deadline=None)
@given(conversations(), st.randoms(use_true_random=False))
def test_equal_lengths_follow_a_given_order(case: tuple[np.ndarray, int], random: Random) -> None:
    lengths, capacity = case
    order = list(range(len(lengths)))
    random.shuffle(order)
    check_plan(lengths, capacity, np.array(order, dtype=np.int64))


@settings(max_examples=examples(60), deadline=None)
@given(conversations(), st.sampled_from([1, 3, 7]))
def test_chunks_do_not_matter(case: tuple[np.ndarray, int], chunk: int) -> None:
    lengths, capacity = case
    runs, order = runs_of(lengths, capacity), np.arange(len(lengths))
    whole = bin_packing.assign(lengths, runs, order)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bin_packing, "CHUNK", chunk)
        parts = bin_packing.assign(lengths, runs, order)
    assert all((a == b).all() for a, b in zip(whole, parts, strict=True))


@settings(max_examples=examples(100), deadline=None)
@given(conversations(), st.sampled_from([0, 1, 20, 200]), st.sampled_from([1, 30]))
def test_valid_when_the_search_stops_early(case: tuple[np.ndarray, int], steps: int, window: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bin_packing, "SEARCH_STEPS", steps)
        patch.setattr(bin_packing, "WINDOW", window)
        check_plan(*case)


@settings(max_examples=examples(150), deadline=None)
@given(conversations())
def test_best_fit_decreasing_is_that_of_single_conversations(case: tuple[np.ndarray, int]) -> None:
    lengths, capacity = case
    rows = bin_packing.best_fit_decreasing(bin_packing.histogram(lengths, capacity), capacity)
    assert rows_of(rows) == best_fit_decreasing_rows(lengths, capacity)


def test_best_fit_decreasing_wins_where_it_is_better() -> None:
    lengths = np.array([17, 16, 15, 9, 9, 7, 6, 3])
    counts = bin_packing.histogram(lengths, 28)
    rows, left = bin_packing.exact_fill(counts, 28)
    assert (len(rows), left.sum()) == (4, 0), "no longer a case where it is better: find another"
    assert check_plan(lengths, 28) == 3


def test_a_row_whose_search_was_cut_short_is_not_kept() -> None:
    counts = bin_packing.histogram(np.array([9, 5, 4, 3]), 16)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bin_packing, "SEARCH_STEPS", 0)
        rows, left = bin_packing.exact_fill(counts, 16)
    assert rows == []
    assert (left == counts).all()


@pytest.mark.parametrize("capacity", [512, 1024])
def test_closer_to_the_bound_than_best_fit_decreasing(capacity: int) -> None:
    """Packing is at least five times closer to the bound.

    At 512 tokens, it needs 4208 rows instead of 4235, over a bound of 4206. At 1024, it needs 4861 instead of 4872,
    over 4859.
    """
    lengths = _lengths_like_conversations(20_000)
    lengths = lengths[lengths <= capacity]
    bound, _ = lower_bound(bin_packing.histogram(lengths, capacity), capacity)
    assert 5 * (check_plan(lengths, capacity) - bound) <= best_fit_decreasing_rows(lengths, capacity) - bound


@settings(max_examples=examples(150), deadline=None)
@given(st.integers(2, 30), st.data())
def test_tiny_cases_against_the_optimum(capacity: int, data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.integers(1, capacity), max_size=8))
    best = optimal_rows(lengths, capacity)
    counts = bin_packing.histogram(np.array(lengths, dtype=np.int64), capacity)
    rows, (bound, _) = bin_packing.solve(counts, capacity)
    assert lower_bound(counts, capacity)[0] <= bound <= best <= rows_of(rows)


@settings(max_examples=examples(100), deadline=None)
@given(st.integers(8, 30), st.data())
def test_column_generation_against_the_optimum(capacity: int, data: st.DataObject) -> None:
    """Column generation returns valid rows and a true bound.

    It starts from the worst rows, one conversation each, with any number of classes and little work.
    """
    lengths = data.draw(st.lists(st.integers(capacity // 5, capacity // 2), min_size=1, max_size=8))
    lengths = [max(1, length) for length in lengths]
    counts = bin_packing.histogram(np.array(lengths), capacity)
    alone = [([(length, 1)], lengths.count(length)) for length in sorted(set(lengths))]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(column_generation, "MOST_CLASSES", data.draw(st.sampled_from([1, 2, 3, 512])))
        patch.setattr(column_generation, "MOST_WORK", data.draw(st.sampled_from([0, 1_000, 10**9])))
        patch.setattr(column_generation, "SEARCH_WORK", 1)
        found = column_generation.improve(
            counts, (capacity,), alone, 0, lambda left: bin_packing.best_fit_decreasing(left, capacity)
        )
    rows = found.rows or alone
    assert found.bound <= optimal_rows(lengths, capacity) <= rows_of(rows)
    packed = [length for row, copies in rows for length, times in row * copies for _ in range(times)]
    assert sorted(packed) == sorted(lengths)
    assert all(sum(length * times for length, times in row) <= capacity for row, _ in rows)


@pytest.mark.parametrize(("capacity", "low", "high"), [(512, 128, 256), (512, 77, 205), (1024, 256, 512)])
def test_few_conversations_in_a_row_are_packed_optimally(capacity: int, low: int, high: int) -> None:
    """The number of rows equals the bound, with fewer rows than by search alone.

    The difference is up to 6 %.
    """
    lengths = low + 1 + _lengths_like_conversations(20_000) * 7919 % (high - low)
    counts = bin_packing.histogram(lengths, capacity)
    packed = bin_packing.solve(counts, capacity)
    searched = bin_packing.search(counts, capacity)
    assert check_plan(lengths, capacity, packed=packed) == rows_of(packed.rows) == packed.bound[0]
    is_plain = packed.bound == lower_bound(counts, capacity)
    assert is_plain or packed.bound[1] == "linear program"
    assert rows_of(packed.rows) < rows_of(searched)


@settings(max_examples=examples(60), deadline=None)
@given(st.integers(10, 60), st.integers(1, 40), st.data())
def test_full_rows_are_found_again(capacity: int, rows: int, data: st.DataObject) -> None:
    """Rows that two conversations fill exactly are all found.

    A long conversation has few partners, which must be kept for it.
    """
    lengths = []
    for _ in range(rows):
        first = data.draw(st.integers(capacity // 2 + 1, capacity - 1))
        lengths += [first, capacity - first]
    assert check_plan(np.array(lengths), capacity) == rows


@pytest.mark.parametrize("capacity", [2, 3, 7, 12, 25, 40])
def test_dual_feasible_functions_are_feasible(capacity: int) -> None:
    """Lengths that fit in a row have values that fit, for every function.

    An unbounded knapsack over all lengths shows it.
    """
    lengths = np.arange(1, capacity + 1)
    for k in range(1, capacity // 2 + 1):
        value = column_generation._f2(lengths, np.array(k), capacity).tolist()
        best = [0] * (capacity + 1)
        for total in range(1, capacity + 1):
            best[total] = max(best[total - n] + value[n - 1] for n in range(1, total + 1))
        assert best[capacity] <= 2 * (capacity // k), f"f2({k}) at {capacity}"


def test_bounds_are_named() -> None:
    def bound(lengths: list[int], capacity: int) -> tuple[int, str]:
        return lower_bound(bin_packing.histogram(np.array(lengths, dtype=np.int64), capacity), capacity)

    assert bound([], 10) == (0, "ceil(tokens/length)")
    assert bound([5, 5, 1], 10) == (2, "ceil(tokens/length)")
    assert bound([6, 6, 6], 10) == (3, "L2")
    assert bound([9, 9, 4, 4, 4], 10) == (4, "L2")  # 9s alone; three 4s need two rows
    assert bound([4] * 5, 11) == (3, "DFF")  # two to a row; 20 tokens would fit in two rows


@pytest.mark.parametrize(
    ("lengths", "capacity", "rows"),
    [
        ([], 8, 0),
        ([8], 8, 1),
        ([1], 131072, 1),
        ([8] * 5, 8, 5),
        ([1] * 17, 8, 3),
        ([1, 2, 1, 2, 1], 2, 4),
        ([5, 3] * 1000, 8, 1000),
        ([300, 212, 106, 106, 300], 512, 2),
        ([60, 50, 40, 30, 20], 100, 2),
    ],
)
def test_small_cases(lengths: list[int], capacity: int, rows: int) -> None:
    assert check_plan(np.array(lengths, dtype=np.int32), capacity) == rows


@pytest.mark.parametrize(
    ("counts", "capacity", "rows"),
    [
        ({1: 10**8}, 131072, 763),
        ({1: 10**8}, 2, 5 * 10**7),
        ({1000: 5 * 10**7, 3096: 5 * 10**7}, 4096, 5 * 10**7),
        ({4096: 10**8}, 4096, 10**8),
    ],
)
def test_cost_does_not_depend_on_the_number_of_conversations(counts: dict[int, int], capacity: int, rows: int) -> None:
    histogram = np.zeros(capacity + 1, dtype=np.int64)
    for length, copies in counts.items():
        histogram[length] = copies
    begun = time.process_time()
    packed, _ = bin_packing.solve(histogram, capacity)
    assert time.process_time() - begun < 1
    assert rows_of(packed) == rows == lower_bound(histogram, capacity)[0]


def test_empty() -> None:
    assert bin_packing.solve(np.zeros(9, dtype=np.int64), 8).rows == []


@pytest.mark.parametrize("bad", [0, -3, 9])
def test_a_length_that_fits_no_row_is_named(bad: int) -> None:
    with pytest.raises(ValueError, match=rf"length {bad} at position 3 .*1\.\.8"):
        bin_packing.histogram(np.array([1, 8, 2, bad, bad]), 8)


@pytest.mark.parametrize("lengths", [[1, 2, 2], [1, 2, 2, 3, 3], [1, 2, 2, 4], []])
def test_rows_of_other_lengths_are_refused(lengths: list[int]) -> None:
    runs = runs_of(np.array([1, 2, 2, 3]), 4)
    with pytest.raises(ValueError, match=r"places for .* conversations of . tokens"):
        bin_packing.assign(np.array(lengths, dtype=np.int64), runs, np.arange(len(lengths)))


def _lengths_like_conversations(n: int) -> np.ndarray:
    """Return a fixed skewed sample of lengths.

    A multiplicative generator makes it independent of any library's random numbers.
    """
    state, lengths = 1, []
    for _ in range(n):
        state = state * 48271 % 2147483647
        lengths.append(50 + (state % 1000) ** 3 // 600000)
    return np.array(lengths)


def _digest() -> str:
    digest = hashlib.sha256()
    lengths = _lengths_like_conversations(5000)
    for capacity in (512, 2048, 16384):
        chosen = lengths[lengths <= capacity]
        rows, _ = bin_packing.solve(bin_packing.histogram(chosen, capacity), capacity)
        patterns = [[length for length, times in row for _ in range(times)] for row, _ in rows]
        offsets = np.cumsum([0, *map(len, patterns)])
        copies = np.array([copies for _, copies in rows])
        assigned = bin_packing.assign(chosen, bin_packing.Runs.of(rows), np.arange(len(chosen)))
        for array in (np.concatenate(patterns), offsets, copies, *assigned):
            digest.update(array.astype("<i8").tobytes())
    return digest.hexdigest()


@pytest.mark.slow
def test_same_plan_in_every_process() -> None:
    """The digest of the plan is equal in every process.

    A change of the digest changes every corpus, and requires a new version of the stage.
    """
    folders = [".", "tests", "tests/packing"]
    code = f"import sys; sys.path[:0] = {folders}; import test_packing; print(test_packing._digest())"
    env = {**os.environ, "PYTHONHASHSEED": "1"}
    other = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True, check=True)
    assert other.stdout.strip() == _digest() == GOLDEN


GOLDEN = "42f9184076bef83b39f5f781d4d84efa1ea5baf09ae5d552bde24604fcec9bee"


def test_real_conversations_at_the_bound() -> None:
    """Real conversations are packed within 0.05 % of the bound at usual lengths.

    Characters / 4 approximate tokens.
    """
    if not CORPORA.is_dir():
        pytest.skip("needs ../shared/corpora")
    texts = [json.dumps(record) for path in CORPORA.glob("*.json") for record in json.loads(path.read_text())]
    texts += [line for path in CORPORA.glob("*.jsonl") for line in path.read_text().splitlines()]
    lengths = np.array([len(text) // 4 + 8 for text in texts])
    for capacity in (512, 1024, 2048, 4096):
        counts = bin_packing.histogram(lengths[lengths <= capacity], capacity)
        begun = time.process_time()
        rows = rows_of(bin_packing.solve(counts, capacity).rows)
        assert time.process_time() - begun < 2
        bound, name = lower_bound(counts, capacity)
        assert rows <= bound + max(1, bound * 0.0005), f"{rows} rows at {capacity}, {name} {bound}"
