"""Sums of all elements of all ranks, against fractions, and in other distributions."""

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from bagua_comm import ArrayError, UnsupportedError, reproducible_sum
from bagua_comm.averages.reproducible_scalars import BITS
from bagua_comm.testing import run_ranks, whole_range

REAL = {"float32": (24, -149), "float64": (53, -1074)}
"""The bits of a float, and the exponent of the smallest one."""


def summed(parts):
    """The scalar that every rank gets, if rank r has parts[r]."""
    found = run_ranks(len(parts), lambda comm: reproducible_sum(comm, parts[comm.rank]), timeout_s=20)
    assert len({(x.tobytes(), x.dtype, x.shape) for x in found}) == 1
    return found[0]


def exactly(values):
    """The formula, in fractions."""
    exponent = math.frexp(max([abs(x) for x in values.tolist()], default=0))[1]
    unit = Fraction(2) ** (exponent - BITS)
    return rounded(sum(round(Fraction(x) / unit) for x in values.tolist()) * unit, values.dtype)


def rounded(x, real):
    """The float nearest to a fraction, half to even, found between its neighbours."""
    digits, smallest = REAL[real.name]
    exponent = smallest
    while abs(x) / Fraction(2) ** exponent >= 2**digits:
        exponent += 1
    whole = round(x / Fraction(2) ** exponent)
    with np.errstate(over="ignore"):
        return np.ldexp(real.type(whole), exponent)


def dealt(values, seed, ranks):
    """The elements in another order, as an array of any size for each rank."""
    random = np.random.default_rng(seed)
    cuts = np.sort(random.integers(0, len(values) + 1, ranks - 1))
    return np.split(random.permutation(values), cuts)


def floats(name):
    return st.lists(st.floats(width=int(name[-2:]), allow_nan=False, allow_infinity=False), max_size=30)


@pytest.mark.parametrize("name", REAL)
@settings(max_examples=15, deadline=None)
@given(data=st.data(), seed=st.integers(0, 2**32), ranks=st.integers(1, 5))
def test_it_is_the_formula_in_exact_arithmetic_in_any_distribution(name, data, seed, ranks):
    values = np.array(data.draw(floats(name)), name)
    expected = exactly(values)
    assert summed([values]).tobytes() == expected.tobytes()
    assert summed(dealt(values, seed, ranks)).tobytes() == expected.tobytes()


@pytest.mark.parametrize("name", REAL)
@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 2**32), ranks=st.integers(1, 5), scale=st.integers(-1060, 900))
@example(seed=0, ranks=3, scale=-1074)
@example(seed=0, ranks=2, scale=-229)  # finite, but math.fsum overflows on the way
def test_it_is_the_exact_sum_rounded_once_where_80_bits_are_enough(name, seed, ranks, scale):
    digits, smallest = REAL[name]
    random = np.random.default_rng(seed)
    whole, places = random.integers(-(2**digits), 2**digits, 200), random.integers(0, BITS - digits, 200)
    with np.errstate(over="ignore", under="ignore"):
        values = np.ldexp(whole.astype(name), places + max(scale, smallest) % (100 - 2 * smallest) + smallest)
    values = values[np.isfinite(values)]
    expected = rounded(sum(map(Fraction, values.tolist())), np.dtype(name))
    assert summed(dealt(values, seed, ranks)).tobytes() == expected.tobytes()
    if name == "float64" and np.isfinite(expected):
        scale = 2.0**-100 if np.abs(values).max(initial=0.0) > 2.0**900 else 1.0  # fsum overflows before its end
        assert float(expected) == math.fsum(values * scale) / scale


@pytest.mark.parametrize("name", REAL)
@pytest.mark.parametrize("count", [1, 2, 1000, 40_000])  # of one limb for all ranks to three limbs
def test_the_number_of_elements_changes_nothing(name, count):
    values = np.random.default_rng(count).standard_normal(30).astype(name) ** 9
    zeros = np.zeros(count, name)
    assert summed([values, zeros]).tobytes() == summed([values]).tobytes() == exactly(values).tobytes()


@pytest.mark.parametrize("name", REAL)
def test_many_of_the_largest_number_do_not_overflow_before_the_end(name):
    largest = np.finfo(name).max
    many = np.full(2**17 + 1, -largest)
    assert summed([many, np.array([], name), -many[:-1]]) == -largest
    assert summed([many, -many[:-2]]) == -np.inf


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([], 0),
        ([-0.0, -0.0], 0),
        ([1e16, 1, -1e16], 1),
        ([1.5e308, 1.5e308], math.inf),
        ([1.5e308, 1.5e308, -1.5e308], 1.5e308),  # no partial sum is rounded
        ([5e-324, 5e-324, 5e-324], 1.5e-323),
        ([2.0**-1022, -5e-324], 2.0**-1022 - 5e-324),
        ([1, 2.0**-53, 2.0**-79], 1 + 2.0**-52),  # above the middle between two neighbours
        ([1, 2.0**-53], 1),
        ([1, 2.0**-81], 1),  # too far below the largest
        ([math.inf, 1], math.inf),
        ([-math.inf, 1e308], -math.inf),
        ([math.inf, -math.inf], math.nan),
        ([-math.nan, 1], math.nan),
        ([math.nan, math.inf], math.nan),
    ],
)
def test_extremes(values, expected):
    for order in (values, values[::-1]):
        parts = [np.array([x], float) for x in order] or [np.zeros((0, 3))]
        assert summed(parts).tobytes() == summed([np.array(order, float)]).tobytes()
        assert summed(parts).tobytes() == np.float64(expected).tobytes()


@pytest.mark.parametrize("dtype", ["complex64", "complex128"])
def test_real_and_imaginary_parts_are_sums_of_their_own(dtype):
    real = np.dtype(dtype).type(0).real.dtype
    values = (whole_range(0, (60,), real.name) * np.array([1, 1e-30], real)[np.arange(60) % 2]).view(dtype)
    values = values[np.isfinite(values)]
    total = summed([values[:7].reshape(7, 1), values[7:]])
    assert total.dtype == np.dtype(dtype)
    assert total.real.tobytes() == exactly(values.real).tobytes()
    assert total.imag.tobytes() == exactly(values.imag).tobytes()
    assert np.isnan(summed([values, np.array([complex(1, np.nan)], dtype)]).imag)
    assert summed([values, np.array([complex(0, np.nan)], dtype)]).real == total.real


def test_arrays_of_any_strides_and_scalars():
    x = np.arange(24.0).reshape(4, 6)
    assert summed([x[:, ::2], x.T[1::2]]) == x.sum()
    assert summed([np.float64(2), x[0]]) == 17


@pytest.mark.needs("torch")
def test_a_tensor_gets_a_tensor():
    import torch

    (total,) = run_ranks(1, lambda comm: reproducible_sum(comm, torch.tensor([1e16, 1.0, -1e16]).double()))
    assert (total.item(), total.shape, total.dtype) == (1.0, (), torch.float64)


def test_refusals_on_every_rank():
    def body(comm):
        for dtype, message in (
            ("int64", r"x has dtype int64.*sums of integers are exact, comm.allreduce\(x.sum\(\)\)"),
            ("float16", r"x has dtype float16.*x.astype\('float32'\)"),
            ("bool", "x has dtype bool, expected one of float32"),
        ):
            with pytest.raises(UnsupportedError, match=message):
                reproducible_sum(comm, np.ones(2, dtype))
        assert comm.counters.total().calls == 0
        with pytest.raises(ArrayError, match="rank 0 has x of float32, but rank 1 of complex64; convert all"):
            reproducible_sum(comm, np.ones(2, ("float32", "complex64")[comm.rank]))

    run_ranks(2, body, timeout_s=20)
