"""Kernels in NumPy: the specification of every other kernel, byte for byte.

All arithmetic is float32, with each operation rounded half to even and no fused multiply-add; sums run in rank
order. A kernel works on pieces that fit a cache, with a few scratch arrays, and writes its results to arrays of
the caller.
"""

from .casts import cast_combine, cast_decode, cast_encode, cast_saturating
from .checksums import checksum_blocks
from .elementwise import (
    adam_moments,
    adam_step,
    add,
    add_scaled,
    advance,
    blend,
    decayed_loss,
    loss,
    midpoint,
    move_half,
    ring_difference,
    scale,
    sgd_step,
    subtract,
)
from .fixed_point import FixedFormat, fixed_add, fixed_exponents, fixed_format, fixed_mean
from .int4 import int4_combine, int4_decode, int4_encode
from .minmax import minmax_combine, minmax_decode, minmax_encode
from .numbers import largest_finite, silent_context, widen
from .random_bits import Draws
from .sums import divide, is_plain, reduce_rows
from .top_k import (
    TOP_K_DIVISORS,
    TOP_K_LARGEST_CHUNK,
    TopKLayout,
    top_k_encode,
    top_k_layout,
    top_k_subtract,
    top_k_sum,
)

__all__ = [
    "TOP_K_DIVISORS",
    "TOP_K_LARGEST_CHUNK",
    "Draws",
    "FixedFormat",
    "TopKLayout",
    "adam_moments",
    "adam_step",
    "add",
    "add_scaled",
    "advance",
    "blend",
    "cast_combine",
    "cast_decode",
    "cast_encode",
    "cast_saturating",
    "checksum_blocks",
    "decayed_loss",
    "divide",
    "fixed_add",
    "fixed_exponents",
    "fixed_format",
    "fixed_mean",
    "int4_combine",
    "int4_decode",
    "int4_encode",
    "is_plain",
    "largest_finite",
    "loss",
    "midpoint",
    "minmax_combine",
    "minmax_decode",
    "minmax_encode",
    "move_half",
    "reduce_rows",
    "ring_difference",
    "scale",
    "sgd_step",
    "silent_context",
    "subtract",
    "top_k_encode",
    "top_k_layout",
    "top_k_subtract",
    "top_k_sum",
    "widen",
]
