"""The order of samples: a shuffle computed by a Feistel network.

A shuffled list of a billion samples takes gigabytes on every rank, and depends on the version of the random generator. A
Feistel network is a permutation by construction: it splits the bits of an index into two halves and repeatedly mixes one with a
hash of the other. Each position is computed independently, so a run resumes anywhere. The network permutes a power of four; a
result out of range is permuted again until it is in range (cycle walking).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

ROUNDS = 8
_MASK = (1 << 64) - 1


def shuffled(places: npt.NDArray[np.int64], count: int, seed: int, epoch: int) -> npt.NDArray[np.int64]:
    """The sample at each position of an epoch: a permutation of range(count), by (seed, epoch)."""
    assert count >= 1
    half_bits = np.uint64(max((count - 1).bit_length() + 1, 2) // 2)
    low_mask = np.uint64((1 << int(half_bits)) - 1)
    keys = _round_keys(seed, epoch)
    values = places.astype(np.uint64)
    outside = np.ones(values.shape, dtype=bool)
    while outside.any():
        left, right = values[outside] >> half_bits, values[outside] & low_mask
        for key in keys:
            left, right = right, left ^ (_mix(right ^ key) & low_mask)
        values[outside] = (left << half_bits) | right
        outside = values >= np.uint64(count)
    return values.astype(np.int64)


def _round_keys(seed: int, epoch: int) -> npt.NDArray[np.uint64]:
    start = _mix(np.array([seed & _MASK], dtype=np.uint64)) ^ np.uint64(epoch & _MASK)
    counter: npt.NDArray[np.uint64] = np.arange(1, ROUNDS + 1, dtype=np.uint64)
    return _mix(np.add(_mix(start), counter, dtype=np.uint64))


def _mix(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """A strong 64-bit hash (the finalizer of splitmix64); integer overflow wraps around."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
