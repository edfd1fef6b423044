"""Element-wise steps of algorithms and optimizers.

Flat arrays of one size. float16 and bfloat16 are computed in float32 and rounded once; `out` may be an input. A
factor is rounded to the dtype in which a kernel computes, never to a narrower one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from ...arrays import REDUCED_PRECISION, Array
from .numbers import PIECE, ZERO


def scale(x: Array, factor: float) -> None:
    """Multiply floating-point `x` in place. Products of float32 with the factor, of 64 bits, are rounded once."""
    if x.dtype == np.float32:
        with np.errstate(all="ignore"):
            np.multiply(x, float(factor), out=x, dtype=np.float64, casting="same_kind")
    else:
        _elementwise(np.multiply, (x,), (x,), factor)


def add(x: Array, y: Array, out: Array) -> None:
    """x + y."""
    _elementwise(np.add, (x, y), (out,))


def subtract(x: Array, y: Array, out: Array) -> None:
    """x - y."""
    _elementwise(np.subtract, (x, y), (out,))


def loss(x: Array, decoded: Array, factor: float, out: Array) -> None:
    """factor (x - decoded), or 0 where that is not finite."""

    def formula(x: Array, decoded: Array, factor: float) -> Array:
        lost = (x - decoded) * factor
        return np.where(np.isfinite(lost), lost, ZERO)

    _elementwise(formula, (x, decoded), (out,), factor)


def decayed_loss(x: Array, decoded: Array, decay: float, out: Array) -> None:
    """out <- decay out + x - decoded, or 0 where that is not finite."""

    def formula(x: Array, decoded: Array, earlier: Array, decay: float) -> Array:
        lost = earlier * decay + (x - decoded)
        return np.where(np.isfinite(lost), lost, ZERO)

    _elementwise(formula, (x, decoded, out), (out,), decay)


def midpoint(x: Array, y: Array, out: Array) -> None:
    """(x + y) / 2."""
    _elementwise(lambda x, y: (x + y) / 2, (x, y), (out,))


def blend(x: Array, y: Array, weight: float, out: Array) -> None:
    """weight x + (1 - weight) y."""
    _elementwise(lambda x, y, mine, other: x * mine + y * other, (x, y), (out,), weight, 1 - weight)


def ring_difference(x: Array, left: Array, right: Array, weight: Array, out: Array) -> None:
    """x + left / 3 + right / 3 - (5 / 3) weight."""

    def formula(x: Array, left: Array, right: Array, weight: Array) -> Array:
        return x + left / 3 + right / 3 - weight * (5 / 3)

    _elementwise(formula, (x, left, right, weight), (out,))


def move_half(x: Array, received: Array, sent: Array, out: Array) -> None:
    """x + (received - sent) / 2."""
    _elementwise(lambda x, received, sent: x + (received - sent) / 2, (x, received, sent), (out,))


def advance(x: Array, mean: Array, snapshot: Array) -> None:
    """x <- x + (mean - snapshot)."""
    _elementwise(lambda x, mean, snapshot: x + (mean - snapshot), (x, mean, snapshot), (x,))


def add_scaled(x: Array, y: Array, factor: float, out: Array | None = None) -> None:
    """x + factor y, in place if `out` is None."""
    _elementwise(lambda x, y, factor: x + y * factor, (x, y), (x if out is None else out,), factor)


def sgd_step(
    x: Array, g: Array, buffer: Array, *, lr: float, momentum: float, weight_decay: float, nesterov: bool
) -> None:
    """A step of SGD: g' = g + wd x; b <- mu b + g'; x <- x - lr (g' + mu b if nesterov else b)."""

    def step(x: Array, g: Array, b: Array, lr: float, mu: float, decay: float) -> tuple[Array, Array]:
        g = g + x * decay if decay else g
        b = b * mu + g
        return x - (g + b * mu if nesterov else b) * lr, b

    _elementwise(step, (x, g, buffer), (x, buffer), lr, momentum, weight_decay)


def adam_moments(
    x: Array, g: Array, m: Array, v: Array, *, betas: tuple[float, float], weight_decay: float
) -> None:
    """Adam's moments: g' = g + wd x; m <- b1 m + (1 - b1) g'; v <- b2 v + (1 - b2) g'^2."""

    def step(x: Array, g: Array, m: Array, v: Array, b1: float, b2: float, decay: float) -> tuple[Array, Array]:
        g = g + x * decay if decay else g
        return m * b1 + g * (1 - b1), v * b2 + g * g * (1 - b2)

    _elementwise(step, (x, g, m, v), (m, v), *betas, weight_decay)


def adam_step(x: Array, m: Array, v: Array, *, lr: float, eps: float, corrections: tuple[float, float]) -> None:
    """Adam's step: x <- x - lr / c1 * m / (sqrt(v) / sqrt(c2) + eps), c = 1 - beta^t; no step where v is 0."""
    first, second = corrections

    def step(x: Array, m: Array, v: Array, rate: float, root: float, eps: float) -> Array:
        return x - np.where(v == 0, ZERO, m / (np.sqrt(v) / root + eps)) * rate

    _elementwise(step, (x, m, v), (x,), lr / first, math.sqrt(second), eps)


def _elementwise(
    formula: Callable[..., Array | tuple[Array, Array]],
    inputs: Sequence[Array],
    outputs: Sequence[Array],
    *factors: float,
) -> None:
    """Fill `outputs` with `formula(*inputs, *factors)`, piece by piece."""
    factors = tuple(map(float, factors))  # a NumPy scalar has a dtype, in which arrays would be computed
    narrow = inputs[0].dtype.name in REDUCED_PRECISION
    with np.errstate(all="ignore"):
        if isinstance(formula, np.ufunc) and not narrow:
            formula(*inputs, *factors, out=outputs[0])
            return
        for start in range(0, inputs[0].size, PIECE):
            piece = slice(start, start + PIECE)
            values = [x[piece].astype(np.float32) if narrow else x[piece] for x in inputs]
            results = formula(*values, *factors)
            for out, result in zip(outputs, results if len(outputs) > 1 else [results], strict=True):
                np.copyto(out[piece], result, casting="unsafe")
