"""The contract of a codec, as a test."""

from __future__ import annotations

from typing import Any

import numpy as np

import bagua_comm

from ..arrays import Array, dtype_named
from ..codecs import Codec
from ..errors import ArrayError
from ..kernels.host import Draws
from .values import assert_raises, check_settings, sample


def check_codec(codec: Codec, *, error: float = 1 / 64, exact_sums: bool = True) -> None:
    """Check that a codec meets the contract of `codecs.base`.

    Args:
        codec: The codec, a frozen dataclass whose `repr` shows its settings.
        error: The largest error of decoding, as a fraction of the range of the values and zero: 1/64 is generous
            for eight bits, 1/16 for four, 1/8 for four of rotated elements. Sums, which are coded twice, may have
            twice this error. Rounding to the dtype of the elements is allowed as well.
        exact_sums: Whether `combine` of float32 rows gives the bytes of encoding the sum of the decoded rows.
            False for a codec that adds them in another form, such as rotated, where rounding differs.

    Raises:
        AssertionError: It breaks the contract.

    >>> check_codec(bagua_comm.MinMaxUInt8(block=64))
    """
    check_settings(codec)
    hash(codec)
    for name in sorted(codec.dtypes):
        dtype = dtype_named(name)
        for n, m in ((1, 1), (3, 7), (2, 1000), (4, 1024), (1, 0), (2, 70001)):
            x = sample(n, (n, m), name, seed=m)
            w = codec.wire_nbytes(m, dtype)
            draws = [None if codec.random_seed is None else Draws(n, row * m) for row in range(n)]
            wire = codec.encode(x, draws=draws[0])
            assert wire.shape == (n, w)
            assert wire.dtype == np.uint8

            dirty = np.full((n, w), 255, np.uint8)
            assert codec.encode(x, out=dirty, draws=draws[0]) is dirty
            assert dirty.tobytes() == wire.tobytes(), "encode leaves old bytes on the wire"
            for row in range(n):
                alone = codec.encode(x[row : row + 1], draws=draws[row])
                assert alone.tobytes() == wire[row].tobytes(), "a chunk depends on its neighbours"

            decoded = np.full_like(x, 7)
            assert codec.decode(wire, decoded) is decoded
            if m:
                _assert_close(decoded, x, error, f"decode {name}")

            for op in ("sum", "avg"):
                combined = codec.combine(wire, op=op, count=m, dtype=dtype, draws=draws[0])
                total = _combined(codec, wire, op, m, dtype)
                if name == "float32" and exact_sums:
                    assert combined.tobytes() == codec.encode(total, draws=draws[0]).tobytes()
                elif m:
                    # A codec may add decoded values before it rounds to the element dtype; `total` is rounded.
                    _assert_close(
                        codec.decode(combined, np.empty_like(total)), total, 2 * error, f"{op} of {name}"
                    )

        x = sample(0, (2, 1000), name)
        x[0, 10], x[1, 20] = np.nan, np.inf
        decoded = codec.decode(codec.encode(x), np.empty_like(x)).astype(np.float64)
        assert not np.isfinite(decoded[0]).all(), "a NaN is hidden"
        assert not np.isfinite(decoded[1]).all(), "an infinity is hidden"
        extremes = np.array([[1, 0.999, 0, 0.5] * 8], dtype) * bagua_comm.kernels.host.largest_finite(dtype)
        extremes = extremes.astype(dtype)
        decoded = codec.decode(codec.encode(extremes), np.empty_like(extremes))
        for value, result in zip(extremes[0].tolist(), decoded[0].tolist(), strict=True):
            assert np.isfinite(result), (
                f"{value!r} of {dtype} decodes to {result}, expected a finite value, in the chunk {extremes[0]}"
            )
    assert_raises(TypeError, lambda: codec.encode(np.zeros((1, 2), np.int32)))
    assert_raises(ArrayError, lambda: codec.encode(np.zeros(4, np.float32)))
    assert_raises(ArrayError, lambda: codec.encode(np.zeros((1, 4), np.float32), out=np.zeros((1, 1), np.uint8)))


def _assert_close(actual: Array, expected: Array, error: float, what: str) -> None:
    """Fail if an error exceeds `error` times the range of `expected` and zero, plus rounding."""
    actual, wide = actual.astype(np.float64), expected.astype(np.float64)
    spread = max(wide.max(), 0.0) - min(wide.min(), 0.0)
    rounding = 4 * np.abs(wide).max() * 2.0 ** -_DIGITS[expected.dtype.name]
    off, allowed = float(np.abs(actual - wide).max()), float(spread * error + rounding)
    assert off <= allowed, f"{what}: off by {off}, for a range of {spread}; error={error} allows {allowed}"


_DIGITS = {"float32": 24, "float16": 11, "bfloat16": 8}
"""Significant bits of each dtype."""


def _combined(codec: Codec, wire: Array, op: str, count: int, dtype: np.dtype[Any]) -> Array:
    """The expected input of `combine`'s encoding: the sum or the mean of the decoded rows."""
    n = len(wire)
    wide = codec.decode(wire, np.empty((n, count), dtype)).astype(np.float32)
    total = wide[0].copy()
    for row in wide[1:]:
        total += row
    if op == "avg":
        total /= np.float32(n)
    return total[None].astype(dtype)
