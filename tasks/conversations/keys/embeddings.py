"""Read what a conversation is about as its record says: `embedding`, a vector of numbers of any model.

{"messages": […], "embedding": [0.12, -0.5, …]}  ─sketch_of─▶  AXES integers, nearly at the angles of the vectors

Only the sketch is kept, so that a conversation takes 64 bytes, whatever the model. The vector is rounded to integers,
one by one, before anything is added up. Sums of integers below 2^53 are exact in any order, so the sketch is the same
on every machine. Read only with `company_by: embedding` in the config.
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

# Numbers of a vector.
MOST_NUMBERS = 1 << 16

# Vectors are rounded to this many steps on each side of 0, so that sums of squares are at most 2^46; sketches to UNIT
# steps for the length of a vector.
STEPS, UNIT = 1 << 15, 1 << 10

_MOST = np.iinfo(np.int16).max


class Sketch(NamedTuple):
    """What is kept of an embedding; without one, all of it is 0."""

    numbers: int = 0  # of the embedding
    axes: bytes = bytes(2 * AXES)  # int16[AXES]


def sketch_of(value: object, where: str, is_text: bool) -> Sketch:
    """Return the sketch of the embedding of a record. Raises Reject if it is not a vector of finite numbers.

    `is_text`: a list is written as text, as in CSV. `where` is the key in the data.
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
    """Return the signs with which `count` numbers are added up to each axis: float64[AXES, count]."""
    return np.ascontiguousarray(random_signs(0, count, AXES).T, np.float64)
