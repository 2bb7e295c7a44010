"""A file is split at the same lines, in chunks of any size."""

from __future__ import annotations

import hashlib
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st
from support.profiles import examples

from packcorpus.tasks.readers.lines import split_at_lines


def expected(data: bytes, part_size: int) -> list[tuple[int, int, str]]:
    """Return all parts, one after another, with their digests.

    A part ends with the first line that ends at or after the next multiple of the size.
    """
    cuts = [0]
    while (found := data.find(b"\n", (cuts[-1] // part_size + 1) * part_size - 1)) >= 0:
        cuts.append(found + 1)
    if cuts[-1] < len(data) or not data:
        cuts.append(len(data))
    return [(start, stop, hashlib.sha256(data[start:stop]).hexdigest()) for start, stop in pairwise(cuts)]


@settings(max_examples=examples(400), deadline=None)
@given(
    st.lists(st.binary(max_size=12).map(lambda line: line.replace(b"\n", b"") + b"\n"), max_size=20).map(b"".join),
    st.binary(max_size=5),
    st.integers(1, 40),
    st.integers(1, 60),
)
def test_parts_and_digests_do_not_depend_on_chunks(lines: bytes, rest: bytes, part_size: int, chunk: int) -> None:
    data = lines + rest
    chunks = [data[start : start + chunk] for start in range(0, len(data), chunk)]
    digest, cuts = split_at_lines(chunks, part_size)
    assert digest == hashlib.sha256(data).hexdigest()
    assert cuts == expected(data, part_size)
