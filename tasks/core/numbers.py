"""Cast to int32, the type in plans and indexes, and shuffle by a seeded hash.

    0..n-1, seed, stream ─shuffle─▶ a permutation        contents, seed ─order_of_contents─▶ an order of the contents
                         ─draws─▶ a number for each

numpy's own casts wrap around silently: conversation 2,147,483,648 would become -2,147,483,648. And a release of numpy
may change its random generators. The hash is splitmix64 (Steele, Lea, Flood: Fast splittable pseudorandom number
generators, 2014). It is a bijection: different numbers have different hashes.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from packcorpus.tasks.core.errors import DataError

MOST = (1 << 31) - 1
CHUNK = 1 << 16  # numbers processed at a time
GOLDEN = np.uint64(0x9E3779B97F4A7C15)
CONTENTS = 1 << 20  # the stream for orders by content; the streams of splits and epochs are small numbers
BALANCED = 1 << 22  # the first stream for the order of balanced steps; one for each split


def check_number(number: int, what: str) -> int:
    """Return a number that fits in int32. Otherwise, raises DataError about `what`."""
    if not -MOST <= number <= MOST:
        raise DataError(
            "too_many",
            f"{what}: {number:,} exceeds the limit of a plan ({MOST:,}); divide the sources into several corpora",
        )
    return number


def as_int32(values: np.ndarray, what: str) -> np.ndarray:
    """Return integers as int32. Raises DataError about `what` if one does not fit."""
    if values.dtype.itemsize >= 4 and values.dtype != np.int32 and len(values):
        for extreme in (int(values.min()), int(values.max())):
            check_number(extreme, what)
    return values.astype(np.int32, copy=False)


def shuffle(count: int, seed: int, stream: int) -> np.ndarray:
    """Return a seeded permutation of 0..count-1, int32.

    Each `stream` of a seed has its own permutation. Element i is the rank of i by its hash. The function takes 12 bytes
    of memory per number, 4 of them for the result.
    """
    check_number(count, "rows and pieces")
    # Each number replaces the low bits of its draw, because sorting values takes a tenth of the time of sorting
    # indexes. Numbers whose remaining bits are equal are then sorted by the whole draw.
    keys, low = np.empty(count, np.uint64), np.uint64((1 << count.bit_length()) - 1)
    for chunk in _chunks(count):
        numbers = np.arange(chunk.start, chunk.stop, dtype=np.uint64)
        keys[chunk] = _draws_of(numbers, seed, stream) & ~low | numbers
    keys.sort()
    begin_alike = [np.empty(0, np.int64)]
    for chunk in _chunks(count - 1):
        after = keys[chunk.start + 1 : chunk.stop + 1]
        begin_alike.append(np.flatnonzero((after ^ keys[chunk]) <= low) + chunk.start)
    equal = np.concatenate(begin_alike)
    keys &= low
    if len(equal):
        places = np.union1d(equal, equal + 1)
        numbers = keys[places]
        keys[places] = numbers[np.argsort(_draws_of(numbers, seed, stream))]
    sorted_numbers, place_of = keys.view(np.int64), np.empty(count, np.int32)
    for chunk in _chunks(count):
        place_of[sorted_numbers[chunk]] = np.arange(chunk.start, chunk.stop, dtype=np.int32)
    return place_of


def _chunks(count: int) -> Iterator[slice]:
    """Divide 0..count-1 into slices whose temporary arrays fit in a cache."""
    for first in range(0, count, CHUNK):
        yield slice(first, min(first + CHUNK, count))


def draws(count: int, seed: int, stream: int) -> np.ndarray:
    """Return a distinct seeded pseudo-random number for each of 0..count-1, uint64."""
    return _draws_of(np.arange(count, dtype=np.uint64), seed, stream)


def _draws_of(numbers: np.ndarray, seed: int, stream: int) -> np.ndarray:
    z = numbers + np.uint64(1)
    z *= GOLDEN
    _mix(z, seed, stream)
    return z


def order_of_contents(digests: np.ndarray, seed: int) -> np.ndarray:
    """Return the indexes that sort contents into a seeded order.

    Contents are given by `digests` (uint64); the indexes are int64. Equal contents keep their order. Adding or removing
    contents does not reorder the others.
    """
    z = digests * GOLDEN
    _mix(z, seed, CONTENTS)
    return np.argsort(z, kind="stable")


def hashes(numbers: np.ndarray) -> np.ndarray:
    """Hash each number, uint64."""
    z = numbers.astype(np.uint64) * GOLDEN
    _mix(z, 0, 0)
    return z


def _mix(z: np.ndarray, seed: int, stream: int) -> None:
    """Apply splitmix64 to each uint64, in place."""
    z += np.uint64((2 * seed + stream + 1) * 0xD1B54A32D192ED03 % 2**64)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
        z ^= z >> np.uint64(shift)
        z *= np.uint64(factor)


def is_in(values: np.ndarray, known: np.ndarray) -> np.ndarray:
    """Return whether each value is among `known`, which is sorted."""
    if not len(known):
        return np.zeros(len(values), np.bool_)
    return np.asarray(known[np.searchsorted(known, values).clip(max=len(known) - 1)] == values)
