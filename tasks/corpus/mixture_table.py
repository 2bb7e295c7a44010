"""Tabulate the contribution of each entry of `sources` to a corpus.

    MixtureFacts ─mixture_table─▶ titles and lines ─fit_to_width─▶ the columns that fit in a terminal

The table is shown in the report, the dataset card, and the terminal.
"""

from __future__ import annotations

from collections.abc import Sequence

from tasks.core.printable import common_folder, printable
from tasks.storage.facts import MixtureFacts

SHORTEST_NAME = 20  # minimum number of characters to show of a source's name


def mixture_table(mixture: Sequence[MixtureFacts], weighting: object) -> list[list[str]]:
    """Tabulate the contribution of each entry of `sources` to a pass over `train`.

    Returns column titles and one line per entry, as text. The table is empty if every conversation is packed exactly
    once.
    """
    if weighting != "token_share" and all(m.weight == 1 and not m.limit for m in mixture):
        return []
    titles = ["source", "weight", "limit", "conversations", "copies", "tokens", "%", "trained", "%"]
    folder, lines = common_folder([m.path for m in mixture]), []
    for m in mixture:
        given = [printable(m.path.removeprefix(folder)), f"{m.weight:g}", f"{m.limit:,}" if m.limit else ""]
        counts = [f"{m.conversations:,}", f"{m.copies:,}", f"{m.tokens:,}", f"{m.tokens_percent:.1f}"]
        lines.append([*given, *counts, f"{m.trained_tokens:,}", f"{m.trained_tokens_percent:.1f}"])
    return [titles, *lines]


def fit_to_width(table: list[list[str]], width: int) -> list[list[str]]:
    """Fit the table to `width` characters, with two spaces between columns.

    Columns without information are removed. If the table is still too wide, the share of all tokens is removed (the
    share of trained tokens stays), and names are shortened in the middle.
    """
    if not table:
        return []
    columns = [list(column) for column in zip(*table, strict=True)]
    weight, limit, packed, copies, share = columns[1], columns[2], columns[3], columns[4], columns[6]
    packed[0] = "packed"
    redundant = [weight] * all(cell == "1" for cell in weight[1:]) + [limit] * (not any(limit[1:]))
    redundant += [copies] * (copies[1:] == packed[1:])
    columns = _without(columns, redundant)
    surplus = max(0, max(map(len, columns[0])) - SHORTEST_NAME)  # by which names can be shortened
    if _width(columns) - surplus > width:
        columns = _without(columns, [share])
    room = max(SHORTEST_NAME, width - _width([[], *columns[1:]]))
    names = [_shortened(name, room) for name in columns[0]]
    return [list(line) for line in zip(names, *columns[1:], strict=True)]


def _without(columns: list[list[str]], left_out: list[list[str]]) -> list[list[str]]:
    return [column for column in columns if not any(column is other for other in left_out)]


def _width(columns: list[list[str]]) -> int:
    return sum(max(map(len, column), default=0) for column in columns) + 2 * (len(columns) - 1)


def _shortened(name: str, room: int) -> str:
    half = (room - 1) // 2
    return name if len(name) <= room else f"{name[: room - 1 - half]}…{name[-half:]}"


def explain_limits(giving_all: Sequence[str], left_out: float, packed: float) -> str:
    """Explain which sources limit a mixture by `token_share`.

    Sources that are used in full limit it. Returns "" if no conversation is left out.
    """
    if not giving_all or not left_out:
        return ""
    names, many = " and ".join(map(printable, giving_all)), len(giving_all) > 1
    verb = "are used in full and limit" if many else "is used in full and limits"
    return (
        f"{names} {verb} the others (token_share): {100 * left_out / (left_out + packed):.0f} % of the conversations "
        f"are left out; lower {'their weights' if many else 'its weight'} to include more"
    )
