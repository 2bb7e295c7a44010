"""Checking boundaries together, or again, equals checking each pair separately."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.tokenizer_kinds import open_kind

from tasks.encoders.encoder import Encoder
from tasks.templates.jinja.token_boundary import TokenBoundary

TEXTS = st.lists(st.sampled_from(["\n", " ", "a", "the", "\n\n", "</think>", ".", "é"]), max_size=4).map("".join)


@pytest.fixture(scope="module")
def encoder() -> Encoder:
    return open_kind("hf_byte_level")


@pytest.fixture(scope="module")
def boundary(encoder: Encoder) -> TokenBoundary:
    return TokenBoundary(encoder)


@given(pairs=st.lists(st.tuples(TEXTS, TEXTS), max_size=5))
def test_no_token_reaches_over_any_of_the_boundaries(
    encoder: Encoder, boundary: TokenBoundary, pairs: list[tuple[str, str]]
) -> None:
    def splits(tail: str, after: str) -> bool:
        whole, *parts = (encoder.encode([text]).ids for text in (tail + after, tail, after))
        return not tail or not after or np.array_equal(whole, np.concatenate(parts))

    assert boundary.splits_all(pairs) == all(splits(*pair) for pair in pairs)
    assert [boundary.splits(*pair) for pair in pairs] == [splits(*pair) for pair in pairs]
