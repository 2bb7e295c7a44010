"""Checking boundaries together, or again, equals checking each pair separately."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.tokenizer_kinds import open_kind

from packcorpus.tasks.conversations.model import Conversation, Message
from packcorpus.tasks.encoders.encoder import Encoder
from packcorpus.tasks.templates.jinja.splitting import TokenBoundary
from packcorpus.tasks.templates.jinja.template import JinjaTemplate

TEXTS = st.lists(st.sampled_from(["\n", " ", "a", "the", "\n\n", "</think>", ".", "é"]), max_size=4).map("".join)
KINDS = ["hf_byte_level", "hf_metaspace", "hf_legacy", "hf_unigram", "sp_bpe_chatml"]
VICUNA = (
    "{% for m in messages %}{{ 'USER: ' if m.role == 'user' else 'ASSISTANT: ' }}{{ m.content }}"
    "{{ ' ' if m.role == 'user' else '</s>' }}{% endfor %}{% if add_generation_prompt %}ASSISTANT: {% endif %}"
)


@pytest.fixture(scope="module", params=KINDS)
def encoder(request: pytest.FixtureRequest) -> Encoder:
    return open_kind(request.param)


@pytest.fixture(scope="module")
def boundary(encoder: Encoder) -> TokenBoundary:
    return TokenBoundary(encoder)


@given(pairs=st.lists(st.tuples(TEXTS, TEXTS), max_size=5))
def test_no_token_reaches_over_any_of_the_boundaries(
    encoder: Encoder, boundary: TokenBoundary, pairs: list[tuple[str, str]]
) -> None:
    def splits(tail: str, after: str) -> bool:
        tails = [tail] if encoder.leading_space == "none" else [tail, encoder.with_leading_space(tail)]
        alone = encoder.with_leading_space(after) if tail.endswith(encoder.space_follows) else after
        found = [[encoder.encode([text]).ids for text in (each + after, each, alone)] for each in tails]
        return not tail or not after or all(np.array_equal(whole, np.concatenate(parts)) for whole, *parts in found)

    assert boundary.splits_all(pairs) == all(splits(*pair) for pair in pairs)
    assert [boundary.splits(*pair) for pair in pairs] == [splits(*pair) for pair in pairs]


def test_a_space_before_answers_gives_each_turn_a_sample_if_words_begin_with_it(encoder: Encoder) -> None:
    """Later prompts have one token for the last space of a prompt and the next word."""
    template = JinjaTemplate("t.jinja", VICUNA, encoder, "assistant", "2026-01-01")
    said = ["hello", "friend of mine", "again", "the answer"]
    messages = tuple(Message(("user", "assistant")[n % 2], text) for n, text in enumerate(said))
    samples = template.samples(Conversation(messages), [False, True, False, True])
    assert [sample.turn for sample in samples] == [1, 3]
