"""Casts to two bytes per element, rounded half to even. Finite values stay finite; NaN and inf stay.

Wire format: the elements in the wire dtype, zero-padded to a multiple of 32 bytes per chunk.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from .. import arrays
from ..arrays import DType
from ..errors import shown_as
from .base import ALIGNMENT, KernelCodec, check_count, padded


@shown_as("Codec")
class _Cast(KernelCodec):
    family: ClassVar[str] = "cast"
    rows_apart: ClassVar[bool] = False
    wire_dtype: ClassVar[str]

    @property
    def granule(self) -> int:
        """The number of elements that fill a part of the wire without padding."""
        return ALIGNMENT // 2

    def wire_nbytes(self, count: int, dtype: DType) -> int:
        """Bytes on the wire of a chunk of `count` elements.

        Raises:
            ArrayError: `count` is not an integer of at least 0.
        """
        return padded(2 * check_count("wire_nbytes", count))

    def _layout(self, count: int, dtype: DType) -> dict[str, DType]:
        return {"sent": arrays.dtype_named(self.wire_dtype)}


@dataclass(frozen=True)
class Float16(_Cast):
    """IEEE half precision: 11 significant bits, up to 65504; larger finite values become +-65504.

    >>> import numpy as np
    >>> x = np.array([[1e6, 0.1]], np.float32)
    >>> Float16().decode(Float16().encode(x), np.empty_like(x))
    array([[6.5504000e+04, 9.9975586e-02]], dtype=float32)
    """

    wire_dtype: ClassVar[str] = "float16"


@dataclass(frozen=True)
class BFloat16(_Cast):
    """bfloat16: 8 significant bits, the range of float32.

    >>> import numpy as np
    >>> x = np.array([[1e6, 0.1]], np.float32)
    >>> BFloat16().decode(BFloat16().encode(x), np.empty_like(x))
    array([[9.99424000e+05, 1.00097656e-01]], dtype=float32)
    """

    wire_dtype: ClassVar[str] = "bfloat16"
