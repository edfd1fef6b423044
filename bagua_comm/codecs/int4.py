"""Int4: four bits an element and two bytes a block, of rotated elements.

Wire format, version 1, of a chunk of E elements in blocks of B, nb = ceil(E / B), little endian; zeros fill the
last block:

    chunk  := header | codes
    header := nb scales in bfloat16, whatever the element dtype, zero-padded to a multiple of 32 bytes
    codes  := nb B / 2 bytes, zero-padded to a multiple of 32 bytes; element 2 i of the blocks is the low half of
              byte i, and 2 i + 1 the high half, in two's complement, -7 to 7

Each group of R elements of a block is rotated: multiplied by the Hadamard matrix H of size R (entries 1 and -1,
H H = R I), as fast Walsh-Hadamard butterflies, (a, b) -> (a + b, a - b), of strides 1, 2, 4, ..., R / 2. Before
that, D negates the elements at positions 3, 7, 11, 12, 13 and 14 of each 16 of a chunk. Without rotation, R = 1,
both are left out. Per block, in float32, every operation rounded half to even:

    t = H (D x / R)      s = bfloat16(max |t| / 7)      q = clip(rint(t * (1 / s)), -7, 7)      x' = D H q * s

* Rotation spreads a large element over its group, so that it does not take the precision of the others: the
  relative error of coding gradients is about a tenth, whatever their distribution.
* Without D, a mean that elements have in common, as gradients of neighbours do, would be a single large element
  of t. The signs of D are a bent function: its Walsh spectrum is flat, so a mean, too, is spread over t.
* H q is a sum of integers, exact in any order. x' is kept within the finite range of the element dtype, and
  rounded to it once. x / R is exact, except for subnormal numbers, and no sum overflows.
* s is rounded half to even. The largest element may thus exceed 7 steps, by less than 1/32 of a step.
* If s would be below 2^-126, the smallest normal number, the block gets scale 0 and codes 0, and decodes to 0. So
  does a block of zeros.
* A block that holds a NaN or an infinity has the canonical quiet NaN as its scale, and codes 0. It decodes to
  NaN, as every block with a scale that is not finite.
* Sums need no rotation, since it is linear: t = sum over ranks r, in rank order, of q_r * w_r in float32, where
  w_r is s_r or, for a mean over n ranks, s_r / n. The sum is quantized as above. Where it overflows, max |t| is
  the largest finite number.
* Stochastic rounding: q = clip(floor(t * (1 / s) + u), -7, 7), where u in [0, 1) depends on a key and the
  position of the element (see `kernels.host.random_bits`). s is rounded up, to at most 146 * 2^118, so that
  nothing is clipped: the expected value of s q is t.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from ..arrays import DType
from ..errors import ArrayError
from .base import KernelCodec, check_count, padded

_LONGEST = 4096
"""Elements of the longest block."""

_ALIGNED_BLOCKS = 16
"""Blocks whose scales take 32 bytes; their codes take a multiple of that."""


@dataclass(frozen=True)
class Int4(KernelCodec):
    """Four-bit codes of rotated blocks with a scale each: 4.5 bits an element for blocks of 32.

    The relative error (in L2) of coding normal numbers is 0.097. Rotation reduces the error of arrays with
    a few large elements.

    Args:
        block: Elements that share a scale, a power of two from 8 to 4096.
        rotate: Elements that are rotated together, a power of two up to `block`; 1 to rotate none.
        rounding: "nearest", or "stochastic" for errors of zero mean, which are 1.4 times as large.
        seed: The seed of the random numbers of stochastic rounding, from 0 to 2^63 - 1.

    Source: the rotated four-bit gradients of SDP4Bit (Jia et al., arXiv 2410.15526).

    >>> import numpy as np
    >>> x = np.array([[0.5, -1.0, 0.25, 8.0]], np.float32)
    >>> codec = Int4(block=8, rotate=1)
    >>> codec.decode(codec.encode(x), np.empty_like(x))
    array([[ 0.   , -1.140625,  0.     ,  7.984375]], dtype=float32)
    """

    family: ClassVar[str] = "int4"

    block: int = 32
    rotate: int = 32
    rounding: Literal["nearest", "stochastic"] = "nearest"
    seed: int = 0

    def __post_init__(self) -> None:
        if not _is_power_of_two(self.block) or not 8 <= self.block <= _LONGEST:
            raise ArrayError(f"Int4: block is {self.block!r}, expected a power of two from 8 to {_LONGEST}")
        if not _is_power_of_two(self.rotate) or self.rotate > self.block:
            raise ArrayError(
                f"Int4: rotate is {self.rotate!r}, expected a power of two from 1, for no rotation, to the "
                f"block of {self.block}"
            )
        if not isinstance(self.rounding, str) or self.rounding not in ("nearest", "stochastic"):
            raise ArrayError(f'Int4: rounding is {self.rounding!r}, expected "nearest" or "stochastic"')
        if type(self.seed) is not int or not 0 <= self.seed < 2**63:
            raise ArrayError(f"Int4: seed is {self.seed!r}, expected an int from 0 to 2**63 - 1")

    @property
    def granule(self) -> int:
        """The elements of 16 blocks, whose scales and codes need no padding."""
        return _ALIGNED_BLOCKS * self.block

    def wire_nbytes(self, count: int, dtype: DType) -> int:
        """Bytes on the wire of a chunk of `count` elements.

        Raises:
            ArrayError: `count` is not an integer of at least 0.
        """
        blocks = -(-check_count("wire_nbytes", count) // self.block)
        return padded(2 * blocks) + padded(blocks * self.block // 2)

    @property
    def random_seed(self) -> int | None:
        """The seed, if the rounding is stochastic."""
        return self.seed if self.rounding == "stochastic" else None

    def _layout(self, count: int, dtype: DType) -> dict[str, int]:
        return {"start": padded(2 * -(-count // self.block)), "block": self.block, "rotate": self.rotate}


def _is_power_of_two(x: object) -> bool:
    return type(x) is int and x > 0 and x & (x - 1) == 0
