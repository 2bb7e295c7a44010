"""What each entry of `sources` gives to a corpus, as a table of text: for a terminal, a page and a dataset card."""

from __future__ import annotations

from collections.abc import Sequence

from tasks.manifest import MixtureFacts
from tasks.printable import common_folder, printable


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
