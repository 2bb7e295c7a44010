"""Compare conversations by the sketches of their embeddings, instead of by their token ids.

    sketches ─less their mean─▶ directions, as of token ids ─signs of random sums─▶ labels: near-duplicates have one in
                                                                                   common

Vectors of one model have much in common, so that the angles between them are small; less their mean, they differ. All
figures are integers, or floating-point numbers that every machine rounds alike.
"""

from __future__ import annotations

import numpy as np

from tasks.core.seeded_order import random_signs
from tasks.packing.bin_packing import CHUNK
from tasks.packing.company.sketches import FEW, SPREAD, of_unit_length
from tasks.storage.schemas import AXES
from tasks.storage.token_files import TokenColumns

# Each label is the signs of BITS random sums (Charikar 2002). Of two directions with a cosine of 0.98, 97 % have one in
# common; of 0.9, half; of 0.7, 7 %; of 0.5, 1 %.
LABELS, BITS = 8, 16

# Their numbers in the sequence of random signs; those below are of the numbers of an embedding.
FIRST = 1 << 16


def embedded_directions(tokens: TokenColumns) -> np.ndarray:
    """Return the direction of each conversation, int8[conversations, AXES], of length 127; 0 without an embedding."""
    sums, count = np.zeros(AXES, np.int64), 0
    for _, sketches in tokens.sketches():
        sums += sketches.sum(axis=0, dtype=np.int64)
        count += int(np.count_nonzero(sketches.any(axis=1)))
    mean = np.rint(sums / max(1, count))
    found = np.zeros((tokens.edges[-1], AXES), np.int8)
    for first, sketches in tokens.sketches():
        centered = np.where(sketches.any(axis=1, keepdims=True), sketches - mean, 0)
        found[first : first + len(sketches)] = of_unit_length(centered)
    return found


def embedded_duplicates(tokens: TokenColumns) -> np.ndarray:
    """Return LABELS numbers for each conversation, uint32[conversations, LABELS]: near-duplicates have one in common.

    Those of which many have one in common, or that have no embedding, get labels of their own.
    """
    axes = embedded_directions(tokens)
    signs = random_signs(FIRST, LABELS * BITS, AXES).T
    found = np.empty((len(axes), LABELS), np.uint32)
    for top in range(0, len(axes), CHUNK):
        bits = np.packbits(axes[top : top + CHUNK] @ signs > 0, axis=1, bitorder="little")
        found[top : top + CHUNK] = bits.view("<u2")
    has_none, own = ~axes.any(axis=1), np.arange(len(axes), dtype=np.uint32) + np.uint32(1 << BITS)
    for label in found.T:
        counts = np.bincount(label, minlength=1 << BITS)
        is_own = has_none | (counts > max(FEW, len(axes) // SPREAD))[label]
        label[is_own] = own[is_own]
    return found
