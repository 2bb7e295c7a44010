"""Chance that is the same for ever: orders by a hash of numbers or of contents, which no release of numpy changes.

    0..n-1, seed, stream ─shuffle─▶ a permutation        contents, seed ─order_of_contents─▶ who comes first

The hash is splitmix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014), which gives each
number another value.
"""

from __future__ import annotations

import numpy as np

GOLDEN = np.uint64(0x9E3779B97F4A7C15)
CONTENTS = 1 << 20  # the stream of orders by content; those of splits and epochs are small numbers


def shuffle(count: int, seed: int, stream: int) -> np.ndarray:
    """A permutation of 0..count-1 (int32): numbers in the order of a hash. Each `stream` of a seed has its own.

    Memory: 20 bytes a number, 4 of them for the result.
    """
    z = np.arange(1, count + 1, dtype=np.uint64)
    z *= GOLDEN
    _mix(z, seed, stream)
    order = np.argsort(z, kind="stable")
    del z
    place_of = np.empty(count, np.int32)
    place_of[order] = np.arange(count, dtype=np.int32)
    return place_of


def order_of_contents(digests: np.ndarray, seed: int) -> np.ndarray:
    """Places of `digests` (uint64) in a seeded order of the contents (int64); equal contents stay in their order.

    What is added or taken away moves no other: a choice of the first k changes by what came and went.
    """
    z = digests * GOLDEN
    _mix(z, seed, CONTENTS)
    return np.argsort(z, kind="stable")


def hashes(numbers: np.ndarray) -> np.ndarray:
    """uint64, a hash of each number."""
    z = numbers.astype(np.uint64) * GOLDEN
    _mix(z, 0, 0)
    return z


def _mix(z: np.ndarray, seed: int, stream: int) -> None:
    """splitmix64 of each uint64, in place."""
    z += np.uint64((2 * seed + stream + 1) * 0xD1B54A32D192ED03 % 2**64)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
        z ^= z >> np.uint64(shift)
        z *= np.uint64(factor)
