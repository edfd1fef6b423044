"""Codecs: lossy encodings of floating-point chunks for the wire."""

from ..kernels.host import Draws, largest_finite
from .base import Codec, padded
from .cast import BFloat16, Float16
from .int4 import Int4
from .minmax import MinMaxUInt8

__all__ = [
    "BFloat16",
    "Codec",
    "Draws",
    "Float16",
    "Int4",
    "MinMaxUInt8",
    "largest_finite",
    "padded",
]
