"""Random numbers of stochastic rounding, from a key and the position of an element alone.

A counter-based generator, after Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011: any rank,
device or rerun with the same key gets the same number for the same element, in any order.
"""

from __future__ import annotations

import hashlib
from typing import NamedTuple

import numpy as np

from ...arrays import Array


class Draws(NamedTuple):
    """The random numbers of the elements of an array."""

    key: int
    """64 random bits: another key gives other numbers."""
    counter: int = 0
    """The position of the first element in the array of all chunks; the lower 32 bits count."""

    @classmethod
    def of(cls, *identity: int | str) -> Draws:
        """The random numbers of the array that this identifies, such as (seed, call, rank).

        >>> Draws.of(0, 1, 2) == Draws.of(0, 1, 2) != Draws.of(0, 1, 3)
        True
        """
        digest = hashlib.blake2b(repr(identity).encode(), digest_size=8).digest()
        return cls(int.from_bytes(digest, "little"))

    def of_result(self) -> Draws:
        """The random numbers of the result of a reduction of arrays like this one."""
        return Draws.of(self.key)._replace(counter=self.counter)

    def after(self, elements: int) -> Draws:
        """The random numbers after those of the first `elements`."""
        return self._replace(counter=self.counter + elements)

    @property
    def words(self) -> tuple[int, int, int]:
        """The lower and the upper half of the key, and the lower 32 bits of the counter: what kernels take."""
        return self.key & 0xFFFFFFFF, self.key >> 32 & 0xFFFFFFFF, self.counter & 0xFFFFFFFF


def uniform(draws: Draws, count: int) -> Array:
    """`count` numbers in [0, 1), float32 multiples of 2^-24.

    The hash is lowbias32 of Wellons' hash-prospector (public domain), which mixes 32 bits; the upper half of
    the key is added between its two multiplications.
    """
    low, high, counter = map(np.uint32, draws.words)
    x = np.arange(count, dtype=np.uint32)
    x += counter
    x ^= low
    x ^= x >> np.uint32(16)
    x *= np.uint32(0x7FEB352D)
    x ^= x >> np.uint32(15)
    x += high
    x *= np.uint32(0x846CA68B)
    x ^= x >> np.uint32(16)
    return (x >> np.uint32(8)).astype(np.float32) * np.float32(2.0**-24)
