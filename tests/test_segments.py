"""A frame that is filled is what the template writes of its own accord, whatever is said, for every tokenizer."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tokenizer_kinds import BUILT, hostile, open_kind

from tasks.conversations import Conversation, Message
from tasks.segments import Segmenter, segments_of
from tasks.templates import BUILT_IN, TEXT, BuiltIn, TrainOn, trained_turns

FEW = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])

USUAL = Conversation((Message("user", "100 %s"), Message("assistant", " %d\n")))
ROLES = st.sampled_from(["system", "user", "user", "assistant", "assistant", "tool"])


@pytest.mark.parametrize("kind", BUILT)
@pytest.mark.parametrize("name", BUILT_IN)
def test_a_filled_frame_is_what_the_template_writes(kind: str, name: str) -> None:
    encoder = open_kind(kind)
    segmenters = {on: Segmenter(BuiltIn(name, encoder, on), encoder) for on in ("assistant", "all", "last")}
    texts = st.sampled_from(["", " ", "\n", "\v", "%", "%%s", " a ", "\x1cb", "▁"]) | hostile(kind)
    turns = st.builds(Message, ROLES, texts, st.sampled_from(["", "", "", " c"]), weight=st.sampled_from([1, 1, 1, 0]))
    conversations = st.lists(turns, min_size=1, max_size=5).map(lambda m: Conversation(tuple(m)))
    plain = texts.filter(bool).map(lambda text: Conversation((Message("text", text),)))

    @FEW
    @given(conversations | plain, st.sampled_from(["assistant", "all", "last"]))
    @example(USUAL, "assistant")
    @example(USUAL, "all")
    @example(Conversation((Message("text", " a\n"),)), "assistant")
    def check(conversation: Conversation, train_on: TrainOn) -> None:
        trained = trained_turns(conversation, train_on)
        spans = BuiltIn(name, encoder, train_on).spans(conversation, trained)
        if spans:
            assert segmenters[train_on].segments(conversation, trained) == segments_of(spans, encoder)

    check()


def test_a_frame_is_written_once(monkeypatch: pytest.MonkeyPatch) -> None:
    encoder = open_kind("sp_bpe_chatml")
    template = BuiltIn("chatml", encoder, "assistant")
    segmenter = Segmenter(template, encoder)
    first = segmenter.segments(USUAL, [False, True])
    monkeypatch.setattr(template, "spans", None)
    assert segmenter.segments(USUAL, [False, True]) == first
    others = Conversation((Message("user", "2+2?"), Message("assistant", "4")))
    found = segmenter.segments(others, [False, True])
    assert "".join(found.texts) == "user\n2+2?\nassistant\n4"
    assert [token == TEXT for token in found.tokens] == [token == TEXT for token in first.tokens]
