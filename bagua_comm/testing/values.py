"""Arrays to send, and their expected reductions."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable, Sequence

import numpy as np

import bagua_comm

from .. import arrays
from ..arrays import INTEGERS, Array, dtype_named


def sample(rank: int, shape: tuple[int, ...], dtype: str, seed: int = 0) -> Array:
    """Reproducible values that every rank can compute for every other rank: small, and signed if the dtype is."""
    random = np.random.default_rng([seed, rank])
    if dtype == "bool":
        return random.integers(0, 2, shape).astype(bool)
    if dtype in INTEGERS:
        low = 0 if dtype.startswith("u") else -3
        return random.integers(low, 4, shape).astype(dtype)
    values = random.standard_normal(shape)
    if dtype.startswith("complex"):
        values = values + 1j * random.standard_normal(shape)
    return np.asarray(values).astype(dtype_named(dtype))


_PERIOD = 8191
"""The number of values drawn; larger arrays repeat them. A prime, so that pieces of arrays begin differently."""


def whole_range(rank: int, shape: tuple[int, ...], dtype: str, seed: int = 0) -> Array:
    """Reproducible values from the whole range of a dtype: sums of integers wrap, sums of floats overflow.

    Among floats are NaN, both zeros, infinities and subnormal numbers; half of them are of ordinary size.

    >>> int(whole_range(0, (1000,), "int8").min())
    -128
    """
    kind, random = dtype_named(dtype), np.random.default_rng([seed, rank, 1])
    if kind.kind == "c":
        parts = whole_range(rank, (*shape, 2), f"float{4 * kind.itemsize}", seed)
        return parts.view(kind).reshape(shape)
    count = min(math.prod(shape), _PERIOD)
    if dtype == "bool":
        values = random.integers(0, 2, count).astype(bool)
        return np.resize(values, shape)
    if dtype in INTEGERS:
        info = np.iinfo(kind)
        values = random.integers(info.min, info.max, count, kind, endpoint=True)
        ends = np.array([info.min, info.max, 0, 1], kind)
    else:
        largest = bagua_comm.kernels.host.largest_finite(kind)
        smallest = np.ones((), f"u{kind.itemsize}").view(kind)
        ends = np.array([np.nan, 0.0, -0.0, np.inf, -np.inf, largest, -largest, smallest, 1.0], kind)
        any_bits = np.frombuffer(random.bytes(count * kind.itemsize), kind).copy()
        with np.errstate(invalid="ignore"):
            any_bits[any_bits != any_bits] = np.nan  # not one that traps
        values = np.where(random.random(count) < 0.5, any_bits, random.standard_normal(count).astype(kind))
    at = random.random(count) < 0.1
    values[at] = random.choice(ends, count)[at]
    return np.resize(values, shape)


def reduced(values: Sequence[Array], op: str) -> Array:
    """The reduction of these arrays in rank order, computed in NumPy: the reference for `allreduce`."""
    dtype, p = values[0].dtype, len(values)
    wide = dtype
    if dtype.name in arrays.REDUCED_PRECISION:
        wide = np.dtype(np.float32)
    elif op == "avg" and dtype.name in INTEGERS:
        wide = np.dtype(np.uint64 if dtype.kind == "u" else np.int64)
    function = arrays.UFUNCS[op]
    with np.errstate(all="ignore"):
        total = values[0].astype(wide)
        for value in values[1:]:
            total = np.asarray(function(total, value.astype(wide)))
        if op == "avg" and dtype.name in INTEGERS:  # towards zero
            total = total // wide.type(p) + ((total < 0) & (total % wide.type(p) != 0))
        elif op == "avg":
            total = total / wide.type(p)
        return np.asarray(total).astype(dtype)


def assert_raises(error: type[BaseException], call: Callable[[], object]) -> None:
    """Fail unless `call` raises `error`."""
    try:
        call()
    except error:
        return
    raise AssertionError(f"expected {error.__name__}")


def check_settings(value: object) -> None:
    """Fail unless `value` is a dataclass, which equals its copy, and whose `repr` shows its settings."""
    assert dataclasses.is_dataclass(value), f"{type(value).__qualname__} is not a dataclass: {value!r}"
    same = copy.deepcopy(value)
    assert same == value, f"a copy of {value!r} differs from it"
    assert " object at 0x" not in repr(value), f"the repr {value!r} hides the settings; expected a dataclass's"
