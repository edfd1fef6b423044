"""What every codec must do, as an executable contract."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np

import bagua_comm

from ..arrays import Array, dtype_named
from ..codecs import Codec
from ..errors import ArrayError
from .values import assert_raises, sample


def check_codec(codec: Codec, *, error: float = 1 / 64) -> None:
    """Check that a codec keeps the contract of `codecs.base`.

    Args:
        codec: What to check; `eval(repr(codec))`, with the names of its modules, must give it again.
        error: The largest error that decoding may leave, as a part of the range of the values: 1/64 is generous
            for eight bits, 1/16 for four. Sums, which are coded twice, may be off by twice as much.

    Raises:
        AssertionError: It does not.

    >>> check_codec(bagua_comm.MinMaxUInt8(block=64))
    """
    again = eval(repr(codec), names_of(codec))
    assert again == codec
    assert hash(again) == hash(codec)
    for name in sorted(codec.dtypes):
        dtype = dtype_named(name)
        for n, m in ((1, 1), (3, 7), (2, 1000), (4, 1024), (1, 0), (2, 70001)):
            x = sample(n, (n, m), name, seed=m)
            w = codec.wire_nbytes(m, dtype)
            wire = codec.encode(x)
            assert wire.shape == (n, w)
            assert wire.dtype == np.uint8

            dirty = np.full((n, w), 255, np.uint8)
            assert codec.encode(x, out=dirty) is dirty
            assert dirty.tobytes() == wire.tobytes(), "encode leaves old bytes on the wire"
            for row in range(n):
                alone = codec.encode(x[row : row + 1])
                assert alone.tobytes() == wire[row].tobytes(), "a chunk depends on its neighbours"

            decoded = np.full_like(x, 7)
            assert codec.decode(wire, decoded) is decoded
            if m:
                spread = float(np.ptp(x.astype(np.float64)))
                off = np.abs(decoded.astype(np.float64) - x.astype(np.float64)).max()
                allowed = max(spread * error, 1e-2)
                assert off <= allowed, (
                    f"{name}: off by {off}, for a range of {spread}; error={error} allows {allowed}"
                )

            for op in ("sum", "avg"):
                combined = codec.combine(wire, op=op, count=m, dtype=dtype)
                total = _combined(codec, wire, op, m, dtype)
                if name == "float32":
                    assert combined.tobytes() == codec.encode(total).tobytes()
                elif m:
                    # Its sum is not rounded to the element dtype on the way, as `total` was.
                    again = codec.decode(combined, np.empty_like(total)).astype(np.float64)
                    spread = float(np.ptp(total.astype(np.float64)))
                    difference = np.abs(again - total.astype(np.float64)).max()
                    assert difference <= max(2 * spread * error, 0.1), f"{op} of {name}: off by {difference}"

        x = sample(0, (2, 1000), name)
        x[0, 10], x[1, 20] = np.nan, np.inf
        decoded = codec.decode(codec.encode(x), np.empty_like(x)).astype(np.float64)
        assert not np.isfinite(decoded[0]).all(), "a NaN is hidden"
        assert not np.isfinite(decoded[1]).all(), "an infinity is hidden"
        extremes = np.array([[1, 0.999, 0, 0.5] * 8], dtype) * bagua_comm.kernels.host.largest_finite(dtype)
        extremes = extremes.astype(dtype)
        decoded = codec.decode(codec.encode(extremes), np.empty_like(extremes))
        assert np.isfinite(decoded.astype(np.float64)).all(), "what is finite becomes infinite"
    assert_raises(TypeError, lambda: codec.encode(np.zeros((1, 2), np.int32)))
    assert_raises(ArrayError, lambda: codec.encode(np.zeros(4, np.float32)))
    assert_raises(ArrayError, lambda: codec.encode(np.zeros((1, 4), np.float32), out=np.zeros((1, 1), np.uint8)))


def names_of(value: object) -> dict[str, Any]:
    """The names that the repr of a value may use: ours, and those of the modules that define its classes.

    Its classes are its own and those of the values it is made of.
    """
    classes = list(_classes_of(value))
    modules = [vars(sys.modules[cls.__module__]) for cls in classes]
    names = {name: names[name] for names in modules for name in names}
    return {**vars(bagua_comm), **names, **{cls.__name__: cls for cls in reversed(classes)}}


def _classes_of(value: object) -> Iterator[type]:
    if isinstance(value, (tuple, list, set, frozenset)):
        for item in value:
            yield from _classes_of(item)
    elif isinstance(value, dict):
        for item in value.items():
            yield from _classes_of(item)
    elif dataclasses.is_dataclass(value) or type(value).__module__ != "builtins":
        yield type(value)
        for field in dataclasses.fields(value) if dataclasses.is_dataclass(value) else ():
            yield from _classes_of(getattr(value, field.name))


def _combined(codec: Codec, wire: Array, op: str, count: int, dtype: np.dtype[Any]) -> Array:
    """What `combine` should encode, by way of decoding; exact for float32."""
    n = len(wire)
    wide = codec.decode(wire, np.empty((n, count), dtype)).astype(np.float32)
    total = wide[0].copy()
    for row in wide[1:]:
        total += row
    if op == "avg":
        total /= np.float32(n)
    return total[None].astype(dtype)
