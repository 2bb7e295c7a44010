"""What each entry of `sources` gives to a corpus, as a table of text: for a page, a dataset card, and a terminal.

MixtureFacts ─mixture_table─▶ head and lines ─narrowed─▶ those that a terminal has room for
"""

from __future__ import annotations

from collections.abc import Sequence

from tasks.core.printable import common_folder, printable
from tasks.storage.manifest import MixtureFacts

SHORTEST_NAME = 20  # characters of a source's name that are shown at least


def mixture_table(mixture: Sequence[MixtureFacts], weighting: object) -> list[list[str]]:
    """What each entry of `sources` gives to a pass over the training split: a head and a line for each, as text.

    Empty where every conversation is packed once.
    """
    if weighting != "token_share" and all(m.weight == 1 and not m.limit for m in mixture):
        return []
    head = ["source", "weight", "limit", "conversations", "copies", "tokens", "%", "trained", "%"]
    folder, lines = common_folder([m.path for m in mixture]), []
    for m in mixture:
        given = [printable(m.path.removeprefix(folder)), f"{m.weight:g}", f"{m.limit:,}" if m.limit else ""]
        counts = [f"{m.conversations:,}", f"{m.copies:,}", f"{m.tokens:,}", f"{m.tokens_percent:.1f}"]
        lines.append([*given, *counts, f"{m.trained_tokens:,}", f"{m.trained_tokens_percent:.1f}"])
    return [head, *lines]


def narrowed(table: list[list[str]], width: int) -> list[list[str]]:
    """The table for a terminal of `width` columns, with two spaces between its own: without what says nothing.

    Where it is still too wide, names are cut in their middle, and of the two shares that of the trained tokens stays.
    """
    if not table:
        return []
    columns = [list(column) for column in zip(*table, strict=True)]
    weight, limit, packed, copies, share = columns[1], columns[2], columns[3], columns[4], columns[6]
    packed[0] = "packed"
    said_nothing = [weight] * all(cell == "1" for cell in weight[1:]) + [limit] * (not any(limit[1:]))
    said_nothing += [copies] * (copies[1:] == packed[1:])
    columns = _without(columns, said_nothing)
    if _width(columns) - _surplus(columns[0]) > width:
        columns = _without(columns, [share])
    room = max(SHORTEST_NAME, width - _width([[], *columns[1:]]))
    names = [_shortened(name, room) for name in columns[0]]
    return [list(line) for line in zip(names, *columns[1:], strict=True)]


def _without(columns: list[list[str]], left_out: list[list[str]]) -> list[list[str]]:
    return [column for column in columns if not any(column is other for other in left_out)]


def _width(columns: list[list[str]]) -> int:
    return sum(max(map(len, column), default=0) for column in columns) + 2 * (len(columns) - 1)


def _surplus(names: list[str]) -> int:
    """How much shorter the column of the names may become."""
    return max(0, max(map(len, names)) - SHORTEST_NAME)


def _shortened(name: str, room: int) -> str:
    half = (room - 1) // 2
    return name if len(name) <= room else f"{name[: room - 1 - half]}…{name[-half:]}"


def limited_by(giving_all: Sequence[str], left_out: float, packed: float) -> str:
    """What a mixture by token_share says of the sources that give all they have; "" where nothing is left out."""
    if not giving_all or not left_out:
        return ""
    names, many = " and ".join(map(printable, giving_all)), len(giving_all) > 1
    gives, its = ("give all they have", "their weights") if many else ("gives all it has", "its weight")
    return (
        f"{names} {gives}, and so {'limit' if many else 'limits'} the others (token_share): "
        f"{100 * left_out / (left_out + packed):.0f} % of the conversations are left out; lower {its} to take more"
    )
