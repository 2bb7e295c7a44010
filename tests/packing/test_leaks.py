"""Prompts of the validation split that are nearly in the training split.

They are recounted with sets of runs of token ids, pair by pair.
"""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.profiles import examples
from support.small_corpus import make_recipe, pack_corpus

from packcorpus.tasks.packing import leaks, neighbors
from packcorpus.tasks.packing.leaks import _Texts, count_leaks
from packcorpus.tasks.packing.plan import select_pieces
from packcorpus.tasks.recipe import Recipe
from packcorpus.tasks.storage.manifest import load_manifest
from packcorpus.tasks.storage.token_files import TokenColumns

SYSTEM = {
    "role": "system",
    "content": "You are an assistant of a small library. Always answer in full sentences.",
}


def edited(words: list[str], share: float, source: random.Random) -> list[str]:
    return [f"other{source.randrange(10**6)}" if source.random() < share else word for word in words]


def records(prompts: int, seed: int, share: float, words: int = 60) -> list[dict[str, Any]]:
    """Return pairs of prompts that differ in a share of their words."""
    source, found = random.Random(seed), []
    for number in range(prompts):
        said = [f"w{source.randrange(10**5)}" for _ in range(words)]
        for k in range(2):
            said = edited(said, share * k, source)
            answer = {"role": "assistant", "content": f"Answer {number} {k}."}
            found.append({"messages": [SYSTEM, {"role": "user", "content": " ".join(said)}, answer]})
    return found


def tokens_of(recipe: Recipe) -> TokenColumns:
    pack_corpus(recipe)
    return TokenColumns([recipe.layout.token_file(key) for key in recipe.token_keys], [0] * len(recipe.token_keys))


def recount(tokens: TokenColumns, held_out: np.ndarray) -> int:
    """Count the held-out prompts that are near to a trained one, by all pairs."""
    prompts = []
    for number in range(tokens.edges[-1]):
        values = tokens.tokens(number)
        ids = [int(value) ^ (int(value) >> 31) for value in values[: int(np.argmax(values >= 0))]][-leaks.LONGEST :]
        prompts.append([tuple(ids[at : at + neighbors.RUN]) for at in range(len(ids) - neighbors.RUN + 1)])
    distinct = dict.fromkeys(map(tuple, prompts))
    often = Counter(run for prompt in distinct for run in prompt)
    common = {run for run, count in often.items() if count > max(leaks.FEW, len(distinct) // leaks.SPREAD)}
    sides: list[set[frozenset[tuple[int, ...]]]] = [set(), set()]
    for prompt, is_held in zip(prompts, held_out.tolist(), strict=True):
        sides[is_held].add(frozenset(prompt))

    def similar(one: frozenset[tuple[int, ...]], other: frozenset[tuple[int, ...]]) -> bool:
        return len(one & other) >= leaks.SIMILAR * len(one | other)

    return sum(
        any(similar(one, other) and similar(one - common, other - common) for other in sides[0] if other - common)
        for one in sides[1] - sides[0]
        if one - common
    )


@pytest.mark.parametrize(("share", "expected"), [(0.02, 1.0), (0.3, 0.0)])
def test_prompts_that_differ_in_few_words_are_near(share: float, expected: float, tmp_path: Path) -> None:
    recipe = make_recipe(tmp_path, records(120, 1, share), validation=0.3, sequence_length=1024)
    facts = load_manifest(pack_corpus(recipe)).held_out
    assert facts is not None
    tokens = tokens_of(recipe)
    held_out = select_pieces(tokens, recipe).accepted.held_out
    of_both = sum(held_out[n] != held_out[n ^ 1] for n in range(0, 240, 2))
    assert facts.near == recount(tokens, held_out)
    assert facts.near >= 0.6 * expected * of_both
    assert expected or not facts.near


@settings(max_examples=examples(12), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 10**6), share=st.sampled_from([0.0, 0.01, 0.03, 0.06]), words=st.sampled_from([8, 30, 80]))
def test_the_count_is_that_of_all_pairs(
    seed: int, share: float, words: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Labels miss at most a few of the pairs, and find no other ones."""
    recipe = make_recipe(
        tmp_path_factory.mktemp("near"), records(25, seed, share, words), validation=0.4, sequence_length=512
    )
    tokens = tokens_of(recipe)
    pieces = select_pieces(tokens, recipe)
    facts = count_leaks(pieces, tokens)
    wanted = recount(tokens, pieces.accepted.held_out)
    assert facts is not None
    assert wanted - max(1, wanted // 20) <= facts["near"] <= wanted


def test_parts_do_not_matter_and_too_many_prompts_are_not_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given_records, counts = records(60, 3, 0.02), []
    for part_size in (1 << 10, 1 << 22):
        recipe = make_recipe(tmp_path / str(part_size), given_records, validation=0.3, part_size=part_size)
        counts.append(load_manifest(pack_corpus(recipe)).held_out)
    assert counts[0] == counts[1]
    assert counts[0] is not None
    assert counts[0].near
    monkeypatch.setattr(leaks, "MOST", 100)
    again = load_manifest(pack_corpus(make_recipe(tmp_path / "many", given_records, validation=0.3))).held_out
    assert again == counts[0].model_copy(update={"near": None})


def test_frequent_runs_do_not_count(tmp_path: Path) -> None:
    """Short questions after the same system prompt are not near."""
    given_records = [
        {"messages": [SYSTEM, {"role": "user", "content": f"w{n} x{n}?"}, {"role": "assistant", "content": "Yes."}]}
        for n in range(200)
    ]
    recipe = make_recipe(tmp_path, given_records, validation=0.3)
    facts = load_manifest(pack_corpus(recipe)).held_out
    assert facts is not None
    assert facts.near == recount(tokens_of(recipe), select_pieces(tokens_of(recipe), recipe).accepted.held_out)
    assert not _Texts(tokens_of(recipe), np.empty(0, np.int64)).runs_of(np.empty(0, np.int64))
