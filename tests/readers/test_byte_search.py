"""A search of bytes finds what `in` finds."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from packcorpus.tasks.readers.strict_json import contains

few = st.lists(st.sampled_from([b"u", b"0", b"2", b"\xe2", b"\x96"]), max_size=12).map(b"".join)


@given(few, few.filter(lambda part: len(part) > 1))
def test_a_part_is_found_if_it_occurs(text: bytes, part: bytes) -> None:
    assert contains(text, part) == (part in text)
    assert contains(text + part, part)
