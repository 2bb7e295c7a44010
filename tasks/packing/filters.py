"""Drop conversations by length, number of turns, or duplicate content.

    Accepted ─min_tokens, max_tokens, min_turns, max_turns─▶ ─duplicates: drop─▶ Accepted.reason

Token limits apply to each sample. Turn limits and duplicates apply to a conversation, so all its samples are dropped.
No filter depends on the sequence length, so the same conversations remain at every sequence length.
"""

from __future__ import annotations

import numpy as np

from tasks.config import Config
from tasks.packing.pieces import Accepted
from tasks.storage.schemas import drop_code
from tasks.storage.tokens.token_files import TokenColumns


def filter_conversations(accepted: Accepted, tokens: TokenColumns, config: Config) -> None:
    """Set `accepted.reason` of conversations that the filters remove."""
    for name in ("tokens", "turns"):
        least, most = getattr(config, f"min_{name}"), getattr(config, f"max_{name}")
        if least is None and most is None:
            continue
        values = accepted.length if name == "tokens" else tokens.column("turns")
        if least is not None:
            accepted.reason[(values < least) & (accepted.reason == 0)] = drop_code(f"min_{name}")
        if most is not None:
            accepted.reason[(values > most) & (accepted.reason == 0)] = drop_code(f"max_{name}")
    if config.duplicates == "drop":
        _drop_duplicates(accepted, tokens)


def _drop_duplicates(accepted: Accepted, tokens: TokenColumns) -> None:
    """Keep only the first of the remaining conversations with equal content.

    Lengths are compared, too, because two different conversations may share a 64-bit hash. Among 10 million
    conversations, this happens in 3 of a million corpora. The held-out split is chosen by the same hash, so equal
    contents are always in the same split.
    """
    digests, length = tokens.column("digest"), accepted.samples.total(accepted.length)
    order = np.lexsort((length, digests))  # stable: equal contents stay in source order
    order = order[accepted.left()[order]]
    same = (digests[order[1:]] == digests[order[:-1]]) & (length[order[1:]] == length[order[:-1]])
    accepted.drop(order[1:][same], "duplicate")
