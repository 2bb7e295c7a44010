"""Overlong conversations are cut into ordered pieces, and lost tokens count.

Nothing else changes.
"""

from __future__ import annotations

import tempfile
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.profiles import examples
from support.small_corpus import Tokens, token_file, tokens_of

from tasks.config import Config
from tasks.core.errors import DataError
from tasks.packing.ledger import Losses, count_losses
from tasks.packing.pieces import Accepted, Columns, cut_overlong
from tasks.sources.model import Source
from tasks.storage.schemas import REJECTED
from tasks.storage.tokens.token_files import TokenColumns


class Result(NamedTuple):
    pieces: Columns
    trained: np.ndarray
    lost: Losses
    late: list[int]
    accepted: Accepted


def cut(rows: list[Tokens], parts: int = 1, **values: Any) -> Result:
    """Run cut_overlong on `rows`, which are divided among token files in order."""
    config = Config(sources=[Source(path="x")], **values)
    edges = [len(rows) * part // parts for part in range(parts + 1)]
    with tempfile.TemporaryDirectory() as name:
        paths: list[Path] = []
        for number, (top, bottom) in enumerate(pairwise(edges)):
            path = Path(name) / f"{number}.arrow"
            token_file(path, rows[top:bottom])
            paths.append(path)
        tokens = TokenColumns(paths, [0] * parts)
        accepted = Accepted(
            edges=np.array(edges),
            length=tokens.column("length"),
            separator=np.array([separator for _, separator in rows], bool),
            held_out=np.zeros(len(rows), bool),
            reason=np.zeros(len(rows), np.uint8),
        )
        file = SimpleNamespace(name="chats.jsonl")
        recipe: Any = SimpleNamespace(config=config, parts=[SimpleNamespace(file=file)] * parts)
        pieces = cut_overlong(accepted, tokens, recipe)
        late = np.flatnonzero(accepted.reason == REJECTED).tolist()
        return Result(
            pieces.columns(slice(None)),
            pieces.trained(slice(None), tokens),
            count_losses(pieces, config),
            late,
            accepted,
        )


def pieces_by_conversation(result: Result, count: int) -> list[list[tuple[int, int, bool, int]]]:
    """Return (first, taken, closed, trained) of every piece, by conversation."""
    found: list[list[tuple[int, int, bool, int]]] = [[] for _ in range(count)]
    p = result.pieces
    assert (np.diff(p.conversation) >= 0).all(), "pieces must be in source order"
    for owner, *columns in zip(p.conversation, p.first, p.taken, p.closed, result.trained, strict=True):
        found[int(owner)].append((int(columns[0]), int(columns[1]), bool(columns[2]), int(columns[3])))
    return found


corpora = st.lists(tokens_of(60), max_size=8)
policies = st.sampled_from(["truncate", "drop", "split"])


@settings(max_examples=examples(300), deadline=None)
@given(corpora, policies, st.integers(8, 40), st.integers(1, 3), st.booleans())
def test_tokens_add_up_and_stand_in_order(
    rows: list[Tokens], overlong: str, length: int, parts: int, packing: bool
) -> None:
    packing |= overlong == "split"
    result = cut(rows, parts, overlong=overlong, sequence_length=length, packing=packing)
    pieces, _, lost, late, _ = result
    for column, kind in (
        (pieces.first, np.int32), (pieces.taken, np.int32), (pieces.closed, np.bool_), (result.trained, np.int32),
    ):  # fmt: skip
        assert column.dtype == kind

    # The ledger's equation, with each of its terms counted separately.
    encoded = sum(len(values) - separator for values, separator in rows)
    separators = int(pieces.separator.sum())
    packed = int(pieces.length.sum())
    gone = lost.tokens_truncated + lost.tokens_dropped
    assert encoded - lost.tokens_rejected + separators == packed + gone
    is_long = [len(values) > length for values, _ in rows]
    kept = pieces_by_conversation(result, len(rows))
    assert all(not kept[c] for c in late)
    assert lost.dropped["too_long"] == (sum(is_long) if overlong == "drop" else 0)
    assert lost.truncated == sum(bool(k) and k[0][2] and overlong == "truncate" for k in kept)
    assert lost.split == (sum(bool(k) and long for k, long in zip(kept, is_long, strict=True)) * (overlong == "split"))
    assert len(late) + lost.dropped["too_long"] + sum(map(bool, kept)) == len(rows)

    for (values, _), own, long in zip(rows, kept, is_long, strict=True):
        if not long or (not packing and overlong == "truncate"):
            assert own == [(0, len(values), False, sum(v >= 0 for v in values))], "one that fits is left as it is"
            continue
        if overlong == "drop":
            assert own == []
        for first, taken, closed, trained in own:
            assert taken + closed <= length
            assert closed == (first + taken < len(values)), "exactly what is cut off is closed"
            # The first token of a piece has nothing before it, and the EOS that closes it is not trained.
            assert trained == sum(v >= 0 for v in values[first + 1 : first + taken]) > 0
        if overlong == "truncate":
            assert [(first, taken) for first, taken, *_ in own] in ([], [(0, length - 1)])
            assert bool(own) == any(v >= 0 for v in values[1 : length - 1])
        if overlong == "split":
            check_tiles(values, length, own)


def check_tiles(values: list[int], length: int, own: list[tuple[int, int, bool, int]]) -> None:
    """Check that the pieces of a split conversation tile it.

    Stretches without a trained token are left out.
    """
    full = -(-max(len(values) - length, 0) // (length - 1))
    sizes = [length - 1] * full + [len(values) - full * (length - 1)]
    expected = []
    for number, size in enumerate(sizes):
        first = number * (length - 1)
        trained = sum(v >= 0 for v in values[first + 1 : first + size])
        expected.append((first, size, number < full, trained))
    assert sizes[-1] <= length
    assert own == [piece for piece in expected if piece[3]]


def test_the_last_piece_is_never_a_lone_separator() -> None:
    length = 8
    for extra in range(1, 2 * length):
        values = [~5, *[6] * (length - 2 + extra), 2]
        result = cut([(values, True)], overlong="split", sequence_length=length)
        assert result.pieces.taken.min() >= 2
        assert result.pieces.taken.sum() == len(values)


def test_exactly_a_row_is_not_over_long() -> None:
    fits, over = ([~5, *[6] * 7], False), ([~5, *[6] * 8], True)
    for overlong in ("truncate", "drop", "split", "error"):
        result = cut([fits], overlong=overlong, sequence_length=8)
        assert result.pieces.length.tolist() == [8]
        assert result.lost == Losses({"too_long": 0})
    result = cut([over], overlong="truncate", sequence_length=8)
    assert result.pieces.taken.tolist() == [7]
    assert result.pieces.closed.tolist() == [True]
    assert result.lost.tokens_truncated == 1


def test_nothing_trained_within_the_row_is_rejected_late() -> None:
    rows: list[Tokens] = [([~5] * 9 + [6], False), ([~5, 6], False), ([~5] * 20 + [6], True)]
    result = cut(rows, overlong="truncate", sequence_length=8)
    assert result.late == [0, 2]
    assert result.lost == Losses({"too_long": 0}, tokens_rejected=10 + 20)
    assert result.pieces.conversation.tolist() == [1]


def test_a_conversation_without_a_trained_token_never_makes_a_row() -> None:
    rows: list[Tokens] = [([~5, 6], False), ([~5, ~6, ~2], True), ([~5] * 20, False)]
    for overlong in ("truncate", "split"):
        result = cut(rows, overlong=overlong, sequence_length=8)
        assert result.pieces.conversation.tolist() == [0]
        assert result.late == [1, 2]
        assert result.lost == Losses({"too_long": 0}, tokens_rejected=2 + 20)


def test_error_names_the_first_and_says_what_to_do() -> None:
    rows: list[Tokens] = [([~5, 6], False), ([~5, *[6] * 8], False), ([~5, *[6] * 8], False)]
    for packing in (True, False):
        with pytest.raises(DataError) as caught:
            cut(rows, overlong="error", sequence_length=8, packing=packing)
        assert str(caught.value) == (
            "chats.jsonl:2: 9 tokens exceed sequence_length 8 (as in 2 conversations); set overlong to truncate, "
            "drop, or split"
        )


def test_without_packing_a_row_is_a_whole_conversation() -> None:
    rows: list[Tokens] = [([~5, *[6] * 30], True), ([~5, 6], False)]
    result = cut(rows, packing=False, overlong="truncate", sequence_length=8)
    assert result.pieces.length.tolist() == [31, 2]
    assert result.lost == Losses({"too_long": 0})
    result = cut(rows, packing=False, overlong="drop", sequence_length=8)
    assert result.pieces.length.tolist() == [2]
    assert result.lost == Losses({"too_long": 1}, tokens_dropped=30)


def test_no_conversations() -> None:
    result = cut([])
    assert len(result.pieces.length) == 0
    assert result.late == []
