"""Microscaling formats for interchange: MXFP8, MXFP4 and NVFP4. Small floats, with a scale for each block.

Wire format, version 1, of a chunk of E elements in blocks of B (the last may be shorter), nb = ceil(E / B), with
the dtypes of ml_dtypes, little endian:

    chunk   := header | codes
    header  := nb scales of one byte, zero-padded to a multiple of 32 bytes; in NVFP4 after a float32, the factor
    codes   := E codes of 8 or 4 bits, zero-padded to a multiple of 32 bytes; two of 4 bits share a byte, that of
               the even element in the low half

                  B      codes                scales
    MXFP8         32     E4M3 or E5M2         E8M0: 2^(code - 127)
    MXFP4         32     E2M1                 E8M0
    NVFP4         16     E2M1                 E4M3, times the factor of the chunk

Codes are rounded half to even and clamped to the largest finite one. With max the largest absolute value of the
block, top that of the chunk, and e the exponent of the largest finite code (8 for E4M3, 15 for E5M2, 2 for E2M1):

    MX        scale = 2^clip(floor(log2(max)) - e, -127, 127)      code = round(x / scale)
    NVFP4     factor = max(top / 2688, 2^-126)                     scale = E4M3(min(max / 6 / factor, 448))
              code = round(x / (scale * factor))                   x' = code * (scale * factor)

All operations are float32, each rounded by itself. x' is kept within the finite range of the element dtype before
it is rounded to it.

* The values of MX blocks are at most 1/8 off in MXFP8, relative to the largest of the block, and 1/4 in MXFP4,
  unless that is near 2^-127: the specification clamps what is above the largest code times a power of two.
* A zero decodes to a zero of its sign; in NVFP4, in a block whose scale is 0, to +0. A block of zeros has the
  scale 2^-127, and 0 in NVFP4. An element is lost where it is small beside the others of its block, and in NVFP4
  a block where it is small beside the chunk.
* A block that holds a NaN or an infinity: the scale is NaN (0xFF in E8M0, 0x7F in E4M3), codes 0, decodes to NaN.
  In NVFP4 it does not count towards the factor, so that the other blocks of the chunk stay as they are.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import ClassVar

import numpy as np

from .. import kernels
from ..arrays import Array, DType
from ..errors import ArrayError, UnsupportedError, shown, shown_as
from ..kernels.host import MX_BLOCK, NVFP4_BLOCK
from .base import ALIGNMENT, Codec, Steps, check_count, padded


@shown_as("Codec")
class _Microscaling(Codec):
    """The layout that the formats have in common, and the refusal of device arrays."""

    block: ClassVar[int]
    code_bits: ClassVar[int]
    factor_nbytes: ClassVar[int] = 0

    def wire_nbytes(self, count: int, dtype: DType) -> int:
        """Bytes on the wire of a chunk of `count` elements.

        Raises:
            ArrayError: `count` is not an integer of at least 0.
        """
        count = check_count("wire_nbytes", count)
        return self._start(count) + padded(-(-count * self.code_bits // 8))

    def steps(self, count: int, like: Array) -> Steps:
        """See `Codec.steps`.

        Raises:
            UnsupportedError: `like` is an array of a device.
        """
        self._kernels(like)
        return super().steps(count, like)

    def _start(self, count: int) -> int:
        """The byte at which the codes begin."""
        return padded(self.factor_nbytes + -(-count // self.block)) if count else 0

    def _kernels(self, x: Array) -> ModuleType:
        if not isinstance(x, np.ndarray):
            raise UnsupportedError(
                f"{self} codes arrays in host memory only, and the array is on a device; copy it to the host, or "
                "use a codec that has kernels for devices, such as MinMaxUInt8()"
            )
        return kernels.of(x)


class _MX(_Microscaling):
    block = MX_BLOCK

    @property
    def granule(self) -> int:
        """The number of elements whose scales fill a part of the wire without padding."""
        return ALIGNMENT * self.block

    @property
    def _code_format(self) -> str:
        return "e2m1"

    def _encode(self, chunks: Array, wire: Array) -> None:
        self._kernels(chunks).mx_encode(chunks, wire, self._start(chunks.shape[1]), self._code_format)

    def _decode(self, wire: Array, out: Array) -> None:
        self._kernels(out).mx_decode(wire, out, self._start(out.shape[1]), self._code_format)


@dataclass(frozen=True)
class MXFP8(_MX):
    """The MX format of eight bits: 8.25 bits an element, with a power of two as the scale of 32 elements.

    Arrays on a device raise `UnsupportedError`.

    Args:
        format: "e4m3" has 4 significant bits, "e5m2" has 3 and a wider range within a block.

    Source: OCP Microscaling Formats (MX) Specification, version 1.0, section 6.3 for the scale.

    >>> import numpy as np
    >>> x = np.array([[0.0, 0.3, -1.0, 1.9, 7.0]], np.float32)
    >>> MXFP8().decode(MXFP8().encode(x), np.empty_like(x))
    array([[ 0.    ,  0.3125, -1.    ,  1.875 ,  7.    ]], dtype=float32)
    """

    code_bits: ClassVar[int] = 8

    format: str = "e4m3"

    def __post_init__(self) -> None:
        if not isinstance(self.format, str) or self.format not in ("e4m3", "e5m2"):
            raise ArrayError(f'MXFP8: format is {shown(self.format)}, expected "e4m3" or "e5m2"')

    @property
    def _code_format(self) -> str:
        return self.format


@dataclass(frozen=True)
class MXFP4(_MX):
    """The MX format of four bits: 4.25 bits an element, with a power of two as the scale of 32 elements.

    Arrays on a device raise `UnsupportedError`. Its error is larger than that of `NVFP4`, since its scale is
    coarser and what is above the largest code is clamped.

    Source: OCP Microscaling Formats (MX) Specification, version 1.0, section 6.3 for the scale.

    >>> import numpy as np
    >>> x = np.array([[0.0, 0.4, -1.0, 2.4, 6.0]], np.float32)
    >>> MXFP4().decode(MXFP4().encode(x), np.empty_like(x))
    array([[ 0. ,  0.5, -1. ,  2. ,  6. ]], dtype=float32)
    """

    code_bits: ClassVar[int] = 4


@dataclass(frozen=True)
class NVFP4(_Microscaling):
    """NVIDIA's format of four bits: 4.5 bits an element, with a float of 8 bits as the scale of 16 elements.

    A float32 factor serves the whole chunk, so a chunk is not cut into pieces. Arrays on a device raise
    `UnsupportedError`.

    Source: NVIDIA, "Pretraining Large Language Models with NVFP4", arXiv 2509.25149.

    >>> import numpy as np
    >>> x = np.array([[0.0, 0.4, -1.0, 2.4, 6.0]], np.float32)
    >>> NVFP4().decode(NVFP4().encode(x), np.empty_like(x))
    array([[ 0. ,  0.5, -1. ,  2. ,  6. ]], dtype=float32)
    """

    block: ClassVar[int] = NVFP4_BLOCK
    code_bits: ClassVar[int] = 4
    factor_nbytes: ClassVar[int] = 4

    def _encode(self, chunks: Array, wire: Array) -> None:
        self._kernels(chunks).nvfp4_encode(chunks, wire, self._start(chunks.shape[1]))

    def _decode(self, wire: Array, out: Array) -> None:
        self._kernels(out).nvfp4_decode(wire, out, self._start(out.shape[1]))
