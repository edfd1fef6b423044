"""Element-wise steps of algorithms and optimizers: launches of elementwise.cu."""

from __future__ import annotations

import math

from ...arrays import Array
from .launches import launch_flat


def scale(x: Array, factor: float) -> None:
    """See `host.scale`."""
    _elementwise("scale", x, x, float(factor))


def add(x: Array, y: Array, out: Array) -> None:
    """See `host.add`."""
    _elementwise("add", x, x, y, out)


def subtract(x: Array, y: Array, out: Array) -> None:
    """See `host.subtract`."""
    _elementwise("subtract", x, x, y, out)


def loss(x: Array, decoded: Array, factor: float, out: Array) -> None:
    """See `host.loss`."""
    _elementwise("loss", x, x, decoded, out, float(factor))


def decayed_loss(x: Array, decoded: Array, decay: float, out: Array) -> None:
    """See `host.decayed_loss`."""
    _elementwise("decayed_loss", x, x, decoded, out, float(decay))


def midpoint(x: Array, y: Array, out: Array) -> None:
    """See `host.midpoint`."""
    _elementwise("midpoint", x, x, y, out)


def blend(x: Array, y: Array, weight: float, out: Array) -> None:
    """See `host.blend`."""
    _elementwise("blend", x, x, y, out, float(weight))


def ring_difference(x: Array, left: Array, right: Array, weight: Array, out: Array) -> None:
    """See `host.ring_difference`."""
    _elementwise("ring_difference", x, x, left, right, weight, out)


def move_half(x: Array, received: Array, sent: Array, out: Array) -> None:
    """See `host.move_half`."""
    _elementwise("move_half", x, x, received, sent, out)


def advance(x: Array, mean: Array, snapshot: Array) -> None:
    """See `host.advance`."""
    _elementwise("advance", x, x, mean, snapshot)


def add_scaled(x: Array, y: Array, factor: float, out: Array | None = None) -> None:
    """See `host.add_scaled`."""
    _elementwise("add_scaled", x, x, y, x if out is None else out, float(factor))


def sgd_step(
    x: Array, g: Array, buffer: Array, *, lr: float, momentum: float, weight_decay: float, nesterov: bool
) -> None:
    """See `host.sgd_step`."""
    _elementwise("sgd_step", x, x, g, buffer, float(lr), float(momentum), float(weight_decay), int(nesterov))


def adam_moments(
    x: Array, g: Array, m: Array, v: Array, *, betas: tuple[float, float], weight_decay: float
) -> None:
    """See `host.adam_moments`."""
    _elementwise("adam_moments", x, x, g, m, v, *map(float, betas), float(weight_decay))


def adam_step(x: Array, m: Array, v: Array, *, lr: float, eps: float, corrections: tuple[float, float]) -> None:
    """See `host.adam_step`."""
    first, second = corrections
    _elementwise("adam_step", x, x, m, v, float(lr / first), math.sqrt(second), float(eps))


def _elementwise(name: str, like: Array, *args: object) -> None:
    launch_flat("elementwise.cu", name, args, like.size, like.dtype)
