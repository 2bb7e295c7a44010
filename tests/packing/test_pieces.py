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
from support.small_corpus import EOS, TRUNCATED, Tokens, token_file, tokens_of

from packcorpus.tasks.config import Config
from packcorpus.tasks.core.errors import DataError
from packcorpus.tasks.packing.ledger import Losses, count_losses
from packcorpus.tasks.packing.pieces import Accepted, Columns, cut_overlong
from packcorpus.tasks.sources.model import Source
from packcorpus.tasks.storage.schemas import REJECTED
from packcorpus.tasks.storage.token_files import TokenColumns


class Result(NamedTuple):
    pieces: Columns
    trained: np.ndarray
    lost: Losses
    late: list[int]
    accepted: Accepted


def cut(rows: list[Tokens], parts: int = 1, **values: Any) -> Result:
    """Run cut_overlong on `rows`, which are divided among token files in order."""
    config = Config(sources=[Source(path="x")], **TRUNCATED | values)
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
        recipe.encoder = SimpleNamespace(eos_id=EOS)
        pieces = cut_overlong(accepted, tokens, recipe)
        late = np.flatnonzero(accepted.reason == REJECTED).tolist()
        return Result(
            pieces.columns(slice(None)),
            pieces.trained(slice(None), tokens),
            count_losses(pieces, tokens, config),
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


@st.composite
def with_stops(draw: st.DrawFn, longest: int) -> Tokens:
    """Draw a conversation in which some trained turns end with EOS."""
    values, separator = draw(tokens_of(longest))
    stops = draw(st.binary(min_size=len(values), max_size=len(values)))
    for end in range(1, len(values)):
        if values[end - 1] >= 0 > values[end] and stops[end] % 2:
            values[end - 1] = EOS
    return values, separator


corpora = st.lists(with_stops(60), max_size=8)
policies = st.sampled_from(["truncate", "turns", "drop", "split"])


@settings(max_examples=examples(300), deadline=None)
@given(corpora, policies, st.integers(8, 40), st.integers(1, 3), st.booleans())
def test_tokens_add_up_and_stand_in_order(
    rows: list[Tokens], overlong: str, length: int, parts: int, packing: bool
) -> None:
    packing |= overlong in ("split", "turns")
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
    whole_turns = [turns_that_fit(values, length) for values, _ in rows]
    without = [long and not ends for long, ends in zip(is_long, whole_turns, strict=True)]
    assert lost.dropped["too_long"] == {"drop": sum(is_long), "turns": sum(without)}.get(overlong, 0)
    is_cut = [bool(k) and k[0][1] < len(values) for k, (values, _) in zip(kept, rows, strict=True)]
    assert lost.truncated == sum(is_cut) * (overlong in ("truncate", "turns"))
    beyond = [
        sum(value >= 0 for value in values[k[0][1] :])
        for k, (values, _), cut in zip(kept, rows, is_cut, strict=True)
        if cut
    ]
    assert lost.trained_truncated == (sum(beyond) if overlong == "turns" else None)
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
            is_closed = values[taken - 1] != EOS if overlong == "turns" else first + taken < len(values)
            assert closed == is_closed, "exactly what is cut off is closed, unless it ends with EOS"
            # The first token of a piece has nothing before it, and the EOS that closes it is not trained.
            assert trained == sum(v >= 0 for v in values[first + 1 : first + taken]) > 0
        if overlong == "truncate":
            assert [(first, taken) for first, taken, *_ in own] in ([], [(0, length - 1)])
            assert bool(own) == any(v >= 0 for v in values[1 : length - 1])
        if overlong == "turns":
            assert [(first, taken) for first, taken, *_ in own] == [
                (0, end) for end in turns_that_fit(values, length)[-1:]
            ]
        if overlong == "split":
            check_tiles(values, length, own)


def turns_that_fit(values: list[int], length: int) -> list[int]:
    """Return the end of each trained turn that a row can end with.

    If the turn does not end with EOS, a row needs a place for it.
    """
    found = []
    for end in range(1, len(values)):
        is_end = values[end - 1] >= 0 and values[end] < 0
        if is_end and end + (values[end - 1] != EOS) <= length and any(value >= 0 for value in values[1:end]):
            found.append(end)
    return found


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
    for overlong in ("truncate", "turns", "drop", "split", "error"):
        result = cut([fits], overlong=overlong, sequence_length=8)
        assert result.pieces.length.tolist() == [8]
        assert result.lost == Losses({"too_long": 0}, trained_truncated=0 if overlong == "turns" else None)
    result = cut([over], overlong="truncate", sequence_length=8)
    assert result.pieces.taken.tolist() == [7]
    assert result.pieces.closed.tolist() == [True]
    assert result.lost.tokens_truncated == 1


P, A, STOP = ~5, 6, EOS  # a token of a prompt, of an answer, and of EOS


@pytest.mark.parametrize(
    ("values", "taken", "closed", "trained"),
    [
        ([P, P, A, STOP, P, P, A, A, STOP], 4, False, 2),  # the second answer lacks one place
        ([P, P, A, STOP, P, A, STOP, P, A], 7, False, 4),  # the third prompt is not kept
        ([P, P, A, STOP, P, A, A, STOP, P], 8, False, 5),  # a turn fills the row
        ([P, P, A, A, P, A, A, A, P], 4, True, 2),  # no place for the EOS after the second answer
        ([P, P, A, A, P, A, A, P, P], 7, True, 4),  # a place for it
        ([P, A, A, STOP, P, P, P, P, STOP], 4, False, 3),  # the last EOS is a turn that does not fit
    ],
)
def test_turns_are_kept_whole(values: list[int], taken: int, closed: bool, trained: int) -> None:
    result = cut([(values, False)], overlong="turns", sequence_length=8)
    [(first, *found)] = pieces_by_conversation(result, 1)[0]
    assert (first, *found) == (0, taken, closed, trained)
    assert result.pieces.separator.tolist() == [closed], "no second EOS after a turn that ends with EOS"
    rest = values[taken:]
    assert result.lost == Losses(
        {"too_long": 0},
        truncated=1,
        tokens_truncated=len(rest),
        trained_truncated=sum(value >= 0 for value in rest),
    )


@pytest.mark.parametrize(
    "values",
    [
        [P, P, P, A, A, A, A, A, STOP],  # one turn, longer than the row
        [P, P, P, P, P, P, P, P, A],  # a prompt that is longer
        [P, P, P, A, A, A, A, A, P],  # the turn fits, but not with an EOS
        [A, *[P] * 7, A],  # the first token is never trained
        [A] * 20,  # plain text is one turn
    ],
)
def test_a_conversation_without_a_turn_that_fits_is_dropped(values: list[int]) -> None:
    result = cut([(values, False), ([P, A], False)], overlong="turns", sequence_length=8)
    assert result.pieces.conversation.tolist() == [1]
    assert result.late == []
    assert result.lost == Losses({"too_long": 1}, tokens_dropped=len(values), trained_truncated=0)


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
            "turns, drop, or split"
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
