"""Samples that begin alike are joined as in plain Python, and as well as can be."""

from __future__ import annotations

from itertools import pairwise, permutations, product
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.profiles import examples
from support.small_corpus import ids_of

from packcorpus.tasks.packing import families
from packcorpus.tasks.packing.bin_packing import best_fit_decreasing, histogram
from packcorpus.tasks.packing.column_generation import rows_of
from packcorpus.tasks.packing.families import Joined, join_samples, prompts_of, sort_samples
from packcorpus.tasks.storage.schemas import TOKENS_SCHEMA
from packcorpus.tasks.storage.token_files import TokenColumns

Values = list[int]  # a sample: ids that are trained on, and ~id of the others


def column_of(parts: list[list[Values]]) -> TokenColumns:
    """Return token files in memory, with a record batch for every two samples."""
    files: list[Path | pa.Buffer] = []
    for samples in parts:
        sink = pa.BufferOutputStream()
        with pa.ipc.new_file(sink, TOKENS_SCHEMA) as out:
            for top in range(0, len(samples), 2):
                some = samples[top : top + 2]
                columns = [
                    pa.array(some if field.name == "tokens" else [0] * len(some)).cast(field.type)
                    for field in TOKENS_SCHEMA
                ]
                out.write_batch(pa.record_batch(columns, schema=TOKENS_SCHEMA))
        files.append(sink.getvalue())
    return TokenColumns(files, [0] * len(files))


def common_of(one: Values, other: Values) -> int:
    pairs = zip(ids_of(one), ids_of(other), strict=False)
    return next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def prompt_of(sample: Values) -> int:
    return next((n for n, value in enumerate(sample) if value >= 0), len(sample))


def shared_by(before: Values, sample: Values) -> int:
    return max(0, min(prompt_of(sample), common_of(before, sample)) - 1)


token = st.tuples(st.integers(3, 4), st.booleans()).map(lambda drawn: drawn[0] if drawn[1] else ~drawn[0])
sample = st.lists(token, max_size=9).map(lambda values: [~3, *values])
samples_of_parts = st.lists(st.lists(sample, max_size=6), min_size=1, max_size=3)


@pytest.fixture
def few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(families, "READ", 6)
    monkeypatch.setattr(families, "STEP", 2)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(samples_of_parts, st.data())
@pytest.mark.usefixtures("few_at_a_time")
def test_samples_are_sorted_by_their_ids(parts: list[list[Values]], data: st.DataObject) -> None:
    tokens, samples = column_of(parts), [values for part in parts for values in part]
    assert prompts_of(tokens).tolist() == [prompt_of(values) for values in samples]
    flags = data.draw(st.lists(st.booleans(), min_size=len(samples), max_size=len(samples)))
    chosen = np.flatnonzero(flags)
    order, common = sort_samples(tokens, chosen, tokens.column("length")[chosen])
    wanted = sorted(range(len(chosen)), key=lambda number: ids_of(samples[chosen[number]]))
    assert order.tolist() == wanted
    in_order = [samples[chosen[number]] for number in wanted]
    assert common.tolist() == [0, *(common_of(*pair) for pair in pairwise(in_order))][: len(chosen)]


def joined(samples: list[Values], room: int) -> tuple[list[Values], Joined]:
    """Return sorted samples, and their trees."""
    samples = sorted(samples, key=ids_of)
    common = [0, *(common_of(*pair) for pair in pairwise(samples))]
    return samples, join_samples([*map(len, samples)], [*map(prompt_of, samples)], common, room)


def trees_in(found: Joined) -> list[list[int]]:
    firsts = {*range(len(found.after))} - {*found.after}
    trees = []
    for sample in sorted(firsts):
        tree = [sample]
        while (following := found.after[tree[-1]]) >= 0:
            tree.append(following)
        trees.append(tree)
    return trees


@given(st.lists(sample, min_size=1, max_size=9), st.integers(10, 24), st.sampled_from([1, 3]))
def test_each_sample_is_in_one_tree_after_what_it_shares(drawn: list[Values], room: int, least: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(families, "LEAST", least)
        samples, found = joined(drawn, room)
    trees = trees_in(found)
    assert sorted(number for tree in trees for number in tree) == list(range(len(samples)))
    stored = 0
    for tree in trees:
        assert found.shared[tree[0]] == 0
        for before, number in pairwise(tree):
            assert 0 <= found.shared[number] <= shared_by(samples[before], samples[number])
        size = sum(len(samples[number]) - found.shared[number] for number in tree)
        assert size <= room
        stored += size
    assert found.least <= stored


def cost(order: list[Values], begins: tuple[bool, ...], room: int) -> int | None:
    """Return the tokens that trees store in this order, or None if one is too long."""
    sizes = [len(order[0])]
    for (before, values), is_first in zip(pairwise(order), begins, strict=True):
        gain = len(values) - (0 if is_first else shared_by(before, values))
        sizes += [gain] if is_first else [sizes.pop() + gain]
    return sum(sizes) if max(sizes) <= room else None


@settings(max_examples=examples(60), deadline=None)
@given(st.lists(sample, min_size=1, max_size=5), st.integers(10, 20))
def test_no_order_and_no_cuts_store_fewer_tokens(drawn: list[Values], room: int) -> None:
    """Trees of any size are the best, and none store fewer tokens than the bound."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(families, "LEAST", 1)
        _, whole = joined(drawn, 1000)
        samples, found = joined(drawn, room)
    stored = sum(map(len, samples))
    every = [
        [total for begins in product((False, True), repeat=len(samples) - 1) if (total := cost([*order], begins, most))]
        for most in (1000, room)
        for order in permutations(samples)
    ]
    without, within = every[: len(every) // 2], every[len(every) // 2 :]
    assert stored - sum(whole.shared) == min(map(min, without))
    assert found.least <= min(total for totals in within for total in totals) <= stored - sum(found.shared)


def test_a_family_fills_trees_with_its_beginning_in_each() -> None:
    """Four products begin with 100 tokens, and 50 samples of each add 10 to 29."""
    samples = [
        [~(3 + product), *[~9] * 99, *[~(10 + number)] * 2, *[7] * (8 + number % 20)]
        for product in range(4)
        for number in range(50)
    ]
    samples, found = joined(samples, 250)
    trees = trees_in(found)
    assert all(len({samples[number][0] for number in tree}) == 1 for tree in trees)
    stored = sum(map(len, samples)) - sum(found.shared)
    assert found.least <= stored <= 1.05 * found.least


@pytest.mark.parametrize(("prompt", "fewer"), [(10, False), (20, True), (60, True)])
def test_answers_that_begin_alike_do_not_cost_rows(prompt: int, fewer: bool) -> None:
    """Samples train on what they have in common, so that each stores most of it."""
    samples = [[*[~9] * prompt, *[8] * 60, *[10 + number] * (20 + number % 40)] for number in range(300)]
    samples, found = joined(samples, 512)
    lengths = [[len(samples[number]) for number in tree] for tree in trees_in(found)]
    gone = [sum(found.shared[number] for number in tree) for tree in trees_in(found)]
    rows = [
        rows_of(best_fit_decreasing(histogram(np.array(sizes), 512), 512))
        for sizes in ([*map(len, samples)], [sum(some) - less for some, less in zip(lengths, gone, strict=True)])
    ]
    assert rows[1] < rows[0] if fewer else rows[1] == rows[0]
    assert any(gone) == fewer
