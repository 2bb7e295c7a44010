"""Read the `embedding` of a record: a vector of numbers, from any model.

{"messages": […], "embedding": [0.12, -0.5, …]}  ─sketch_of─▶  AXES integers that nearly keep the angles of vectors

The embedding describes the topic of a conversation. Only its sketch is kept, so a conversation takes 64 bytes, whatever
the model. Each number of the vector is rounded to an integer before anything is added up. Sums of integers below 2^53
are exact in any order, so the sketch is the same on every machine. Embeddings are read only if the config has
`company_by: embedding`.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np

from tasks.conversations.fields import parsed
from tasks.core.errors import Reject
from tasks.core.printable import kind
from tasks.core.seeded_order import random_signs
from tasks.storage.schemas import AXES

EMBEDDING = "embedding"

# Maximum length of a vector.
MOST_NUMBERS = 1 << 16

# Vectors are rounded to STEPS steps on each side of 0, so that sums of squares are at most 2^46. Sketches are rounded
# to UNIT steps for the length of a vector.
STEPS, UNIT = 1 << 15, 1 << 10

_MOST = np.iinfo(np.int16).max


class Sketch(NamedTuple):
    """The sketch of an embedding; it is all zeros if there is no embedding."""

    numbers: int = 0  # length of the embedding
    axes: bytes = bytes(2 * AXES)  # int16[AXES]


def sketch_of(value: object, where: str, is_text: bool) -> Sketch:
    """Return the sketch of the embedding of a record.

    `is_text` means that a list is written as text, as in CSV. `where` is the key in the data. Raises Reject if the
    value is not a vector of finite numbers.
    """
    if value is None or (is_text and value == ""):
        return Sketch()
    if is_text and isinstance(value, str):
        value = parsed(value, where, "bad_embedding")
    if not isinstance(value, list):
        raise Reject("bad_embedding", f"{where} is {kind(value)}; expected a list of numbers")
    for number in value if {*map(type, value)} - {int, float} else ():
        if type(number) not in (int, float):
            raise Reject("bad_embedding", f"{where} holds {kind(number)}; expected numbers only")
    if not 0 < len(value) <= MOST_NUMBERS:
        expected = f"1 to {MOST_NUMBERS:,}"
        raise Reject("bad_embedding", f"{where} has {len(value):,} numbers; expected {expected}")
    vector = np.array(value, np.float64)
    if not (finite := np.isfinite(vector)).all():
        raise Reject("bad_embedding", f"{where} holds {value[int(finite.argmin())]}; expected finite numbers only")
    most = np.abs(vector).max()
    if not most:
        raise Reject("bad_embedding", f"{where} holds only 0, which has no direction; leave it out")
    whole = np.rint(vector / most * STEPS)
    length = np.sqrt(whole @ whole)
    axes = np.rint(_signs(len(whole)) @ whole * UNIT / length).clip(-_MOST, _MOST)
    return Sketch(len(whole), axes.astype("<i2").tobytes())


@lru_cache(maxsize=4)
def _signs(count: int) -> np.ndarray:
    """Return the signs that `count` numbers have in the sum of each axis.

    The result is float64[AXES, count].
    """
    return np.ascontiguousarray(random_signs(0, count, AXES).T, np.float64)
