"""Count the tokens that samples of a conversation share with the sample before."""

from __future__ import annotations

import numpy as np


def shared_tokens(tokens: np.ndarray, offsets: np.ndarray, continues: np.ndarray) -> np.ndarray:
    """Return the tokens that a tree does not store again: int32[samples].

    `tokens` (int32, id or ~id) and `offsets` are those of the samples; `continues` is whether the sample before is of
    the same conversation. Samples share tokens before the first one that the later sample trains on, so no token is
    trained on twice. The last token that they share is stored again: the next one is predicted from it. So sample n is
    the first `shared` tokens of the sample before, then its own tokens from number `shared` on.
    """
    ids, shared = tokens ^ (tokens >> 31), np.zeros(len(continues), np.int32)
    bounds = offsets.tolist()
    for sample in np.flatnonzero(continues).tolist():
        before, start, stop = bounds[sample - 1 : sample + 2]
        trained = tokens[start:stop] >= 0
        prompt = int(trained.argmax()) if trained.any() else stop - start
        most = min(prompt, start - before)
        differs = ids[before : before + most] != ids[start : start + most]
        alike = int(differs.argmax()) if differs.any() else most
        shared[sample] = max(0, alike - 1)
    return shared
