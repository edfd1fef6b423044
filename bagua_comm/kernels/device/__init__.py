"""Kernels on a CUDA device: the .cu files of this folder, through CuPy. `host` specifies what each computes.

A call enqueues its kernel on CuPy's current stream and returns without waiting. Arrays are contiguous. Only the
first call of a size allocates memory.
"""

# ruff: noqa: F401 - `kernels.of` returns this module, so these are its functions

from .casts import cast_combine, cast_decode, cast_encode
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
from .fixed_point import fixed_add, fixed_exponents, fixed_mean
from .int4 import int4_combine, int4_decode, int4_encode
from .launches import LARGEST_CTA, before_launch, compile_options, loaded, source
from .minmax import minmax_combine, minmax_decode, minmax_encode
from .sums import reduce_rows
from .top_k import top_k_encode, top_k_subtract, top_k_sum
