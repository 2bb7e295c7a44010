"""Texts in one string of bytes are those of a list, and are searched exactly."""

from __future__ import annotations

import gc
import weakref

import pytest
from hypothesis import given
from hypothesis import strategies as st

import packcorpus.tasks.encoders.texts
from packcorpus.tasks.encoders.texts import SEPARATOR, UNDERLINE, Needles, Texts, find, needles_of

texts = st.lists(st.text(st.sampled_from([*"ab é漢🎉", SEPARATOR, UNDERLINE]), max_size=6), max_size=8)


@given(texts)
def test_texts_are_those_of_a_list(strings: list[str]) -> None:
    found = Texts.of(strings)
    assert len(found) == len(strings)
    assert list(found.strings) == strings
    assert found.with_separator == [number for number, text in enumerate(strings) if SEPARATOR in text]
    assert found.with_underline == [number for number, text in enumerate(strings) if UNDERLINE in text]
    starts = [0, *(found.ends + 1)]
    assert [found.joined[start:end].decode() for start, end in zip(starts, found.ends, strict=False)] == strings


@given(texts.filter(bool))
def test_joined_texts_need_no_list_if_none_contains_the_separator(strings: list[str]) -> None:
    strings = [text.replace(SEPARATOR, "") for text in strings]
    found = Texts(SEPARATOR.join(strings).encode())
    assert found.strings == strings
    assert found.ends.tolist() == Texts.of(strings).ends.tolist()
    assert found.with_separator == []


@given(texts.filter(bool), st.data())
def test_some_texts_are_replaced_by_empty_ones(strings: list[str], data: st.DataObject) -> None:
    left_out = data.draw(st.sets(st.integers(0, len(strings) - 1)))
    kept = ["" if number in left_out else text for number, text in enumerate(strings)]
    assert Texts.of(strings).without(sorted(left_out)) == SEPARATOR.join(kept).encode()


CONTENTS = st.text("ab<", max_size=12).map(str.encode)


@given(st.lists(st.text("ab<", max_size=4).map(str.encode), max_size=4), CONTENTS, st.sampled_from([1, 2, 5, 1 << 17]))
def test_strings_are_found_where_bytes_finds_them(needles: list[bytes], text: bytes, window: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packcorpus.tasks.encoders.texts, "_WINDOW", window)
        places = sorted(
            {place for needle in filter(None, needles) for place in range(len(text)) if text.startswith(needle, place)}
        )
        assert list(Needles(needles).places(text)) == places


def test_strings_are_found_at_both_ends_and_across_windows() -> None:
    needles = Needles([b"<s>", "漢".encode()])
    gap = b"x" * ((1 << 17) - 1)
    for text in (b"<s>", b"<s>" + gap, gap + b"<s>", gap + "漢".encode(), gap + gap + b"<<s>"):
        assert list(needles.places(text))
    for text in (b"", b"<s", gap + b"<s", "字".encode()):
        assert not list(needles.places(text))


def test_texts_are_freed_without_a_search_for_cycles() -> None:
    texts = Texts.of(["a", "b"])
    assert find(needles_of(["a"]), texts) == [0]
    is_alive = weakref.ref(texts)
    gc.disable()
    try:
        del texts
        assert is_alive() is None
    finally:
        gc.enable()
