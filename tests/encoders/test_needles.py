"""Strings are found exactly where they occur."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

import tasks.encoders.string_search
from tasks.encoders.string_search import Needles

TEXTS = st.text("ab<", max_size=12).map(str.encode)


@given(st.lists(st.text("ab<", max_size=4).map(str.encode), max_size=4), TEXTS, st.sampled_from([1, 2, 5, 1 << 17]))
def test_they_occur_where_bytes_finds_them(needles: list[bytes], text: bytes, window: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tasks.encoders.string_search, "_WINDOW", window)
        assert Needles(needles).occur(text) == any(needle in text for needle in needles if needle)


def test_at_both_ends_and_across_windows() -> None:
    needles = Needles([b"<s>", "漢".encode()])
    gap = b"x" * ((1 << 17) - 1)
    for text in (b"<s>", b"<s>" + gap, gap + b"<s>", gap + "漢".encode(), gap + gap + b"<<s>"):
        assert needles.occur(text)
    for text in (b"", b"<s", gap + b"<s", "字".encode()):
        assert not needles.occur(text)
