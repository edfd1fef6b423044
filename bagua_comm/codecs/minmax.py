"""MinMaxUInt8: eight bits an element, with a minimum and a maximum per block.

Wire format, version 1, of a chunk of E elements in blocks of B (the last may be shorter),
nb = ceil(E / B), native endianness:

    chunk  := header | codes
    header := nb pairs (min, max) in the element dtype, zero-padded to a multiple of 32 bytes
    codes  := E uint8 codes, zero-padded to a multiple of 32 bytes

With one block per chunk this is the layout of BaguaSys' Bagua, except for the padding. Per block, in float32 and
rounded half to even, with the quotient of `scale` computed in float64 and rounded to float32:

    range = max - min + eps    scale = 255 / range    upper = rint(max * scale)    lower = upper - 255
    code  = clip(min(rint(x * scale), upper) - lower, 0, 255)        x' = (code + lower) / scale

* A zero inside the range decodes to an exact zero, and the error is at most half a step (range / 255), as long
  as |max| is below 2^16 ranges; above, float32 cannot tell neighbouring levels apart.
* A zero range, or one so small that `scale` overflows (below 7.5e-37): codes 0, decodes to min. So does a block
  whose `upper` is not finite (only with eps > 0).
* A block that holds a NaN or an infinity: NaN in its header, codes 0, decodes to NaN. A range that
  overflows float32 decodes to NaN as well.
* Zeros in a header are +0.0, and NaNs the canonical quiet ones, so that bytes do not depend on the
  order of comparisons.
* x' is kept within the finite range of the element dtype before it is rounded to it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from ..arrays import DType
from ..errors import ArrayError
from ..kernels.host import largest_finite
from .base import KernelCodec, check_count, padded


@dataclass(frozen=True)
class MinMaxUInt8(KernelCodec):
    """Eight-bit codes between the minimum and the maximum of each block.

    Args:
        block: Elements per block; None for one block per chunk.
        eps: Added to every range, as Bagua does to keep from dividing by zero; 0 needs no such guard.

    Source: Bagua's MinMaxUInt8 compression (Gan et al., arXiv 2107.01499), with per-block ranges,
    clamped codes and NaN kept visible.

    >>> codec = MinMaxUInt8(block=4)
    >>> x = np.array([[0.0, 0.5, 1.0, 2.55, 7.0]], np.float32)
    >>> codec.decode(codec.encode(x), np.empty_like(x))
    array([[0.  , 0.5 , 1.  , 2.55, 7.  ]], dtype=float32)
    """

    family: ClassVar[str] = "minmax"

    block: int | None = 512
    eps: float = 0.0

    def __post_init__(self) -> None:
        if self.block is not None and (type(self.block) is not int or self.block < 1):
            raise ArrayError(f"MinMaxUInt8: block is {self.block!r}, expected None or an int of at least 1")
        if not isinstance(self.eps, (int, float)) or not 0 <= self.eps <= largest_finite(np.dtype("f4")):
            raise ArrayError(f"MinMaxUInt8: eps is {self.eps!r}, expected a finite float32 >= 0")

    @classmethod
    def bagua(cls) -> MinMaxUInt8:
        """Bagua's setting: one block per chunk and eps = 1e-7."""
        return cls(block=None, eps=1e-7)

    @property
    def granule(self) -> int | None:
        """The length of a block: each block is coded independently."""
        return self.block

    def wire_nbytes(self, count: int, dtype: DType) -> int:
        """Bytes on the wire of a chunk of `count` elements.

        Raises:
            ArrayError: `count` is not an integer of at least 0.
        """
        return int(self._layout(check_count("wire_nbytes", count), dtype)["start"]) + padded(count)

    def _layout(self, count: int, dtype: DType) -> dict[str, float]:
        block = max(1, count) if self.block is None else self.block
        return {"start": padded(-(-count // block) * 2 * dtype.itemsize), "block": block, "eps": self.eps}
