"""Compare conversations by sketches of their embeddings instead of by token ids.

    sketches ─minus their mean─▶ directions ─signs of random sums─▶ labels: near-duplicates have one in common

Embeddings of one model have much in common, so the angles between them are small. Without their mean, they differ. All
figures are integers, or floating-point numbers that every machine rounds alike.
"""

from __future__ import annotations

import numpy as np

from tasks.core.seeded_order import random_signs
from tasks.packing.bin_packing import CHUNK
from tasks.packing.company.sketches import FEW, SPREAD, of_unit_length
from tasks.storage.schemas import AXES
from tasks.storage.tokens.token_files import TokenColumns

# Each label is the signs of BITS random sums (Charikar 2002). The share of pairs with a common label is 97 % for a
# cosine of 0.98, half for 0.9, 7 % for 0.7, and 1 % for 0.5.
LABELS, BITS = 8, 16

# Number of the first random sum in the sequence of random signs. Smaller numbers are for the elements of an embedding.
FIRST = 1 << 16


def embedded_directions(tokens: TokenColumns) -> np.ndarray:
    """Return the direction of each conversation: int8[conversations, AXES].

    Directions have a length of 127, or 0 without an embedding.
    """
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
    """Return the labels of each conversation: uint32[conversations, LABELS].

    Near-duplicates have a label in common. A label that many conversations share is replaced by unique labels.
    Conversations without an embedding have unique labels.
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
