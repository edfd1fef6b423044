"""Reproducible sums, against the formula in exact arithmetic, and against themselves in another order."""

import contextlib
import hashlib
import itertools
import math
import re
from fractions import Fraction

import numpy as np
import pytest

from bagua_comm import (
    ArrayError,
    CommMismatch,
    Engine,
    GradientAllReduce,
    Plan,
    Point,
    Reproducible,
    TensorSpec,
    kernels,
    reproducible_allreduce,
)
from bagua_comm.arrays import dtype_named
from bagua_comm.averages.reproducible import MOST_ADDENDS
from bagua_comm.testing import run_ranks, whole_range
from bagua_comm.topology import share

CODED = ("float32", "float16", "bfloat16", "float64")
GOLDEN = {
    "float32": "a6a064b35e06050a",
    "float16": "83930ea7af0b3630",
    "bfloat16": "6bd79d55429b6656",
    "float64": "d653367c1af06bc0",
}
LARGEST, SMALLEST = float(np.finfo(np.float32).max), 2.0**-149


def exactly(addends, block, op, sizes=None):
    """The formula, in fractions. `sizes`: of the tensors that lie in an array."""
    dtype, count = addends[0].dtype, len(addends)
    real = np.dtype(np.float64 if dtype == np.float64 else np.float32)
    least, most = (-1021, 63) if dtype == np.float64 else (-125, 31)
    rows = [x.reshape(-1).astype(real) for x in addends]
    ends = list(itertools.accumulate(sizes or [rows[0].size]))
    starts = [at for end, begin in zip(ends, [0, *ends], strict=False) for at in range(begin, end, block)]
    out = np.empty(ends[-1], real)
    for begin in starts:
        end = min(begin + block, next(end for end in ends if end > begin))
        values = [[float(x) for x in row[begin:end]] for row in rows]
        if not all(math.isfinite(x) for row in values for x in row):
            out[begin:end] = np.nan
            continue
        # 2^exponent is above all of them, but for subnormal numbers as little as possible.
        exponent = max(least, math.frexp(max(abs(x) for row in values for x in row))[1])
        bits = most - math.ceil(math.log2(count))
        unit, limit = Fraction(2) ** (exponent - bits), 2**bits - 1
        for i in range(end - begin):
            total = sum(max(-limit, min(limit, round(Fraction(row[i]) / unit))) for row in values)
            out[begin + i] = nearest(total * unit / (count if op == "avg" else 1), real)
    with np.errstate(over="ignore"):
        return out.astype(dtype).reshape(addends[0].shape)


def nearest(x, real):
    """The float32 or float64 nearest to a fraction, half to even."""
    digits, smallest = (53, -1074) if real == np.float64 else (24, -149)
    estimate = abs(x.numerator).bit_length() - x.denominator.bit_length() if x else 0
    exponent = max(smallest, estimate - digits - 1)
    while abs(x) / Fraction(2) ** exponent >= 2**digits:
        exponent += 1
    with np.errstate(over="ignore"):
        return np.ldexp(real.type(round(x / Fraction(2) ** exponent)), exponent)


def normal(rank, shape, dtype="float32", seed=0):
    return np.random.default_rng([seed, rank]).standard_normal(shape).astype(dtype_named(dtype))


def as_float64(x):
    """float32 at the ends of its range as float64 at the ends of its own; other numbers as they are."""
    ends = {SMALLEST: 2.0**-1074, LARGEST: float(np.finfo(np.float64).max)}
    return np.array([math.copysign(ends.get(abs(v), abs(v)), v) for v in x.tolist()])


def summed(xs, block=128, op="sum", **options):
    """The bytes that every rank gets, if rank r has xs[r]."""
    found = run_ranks(
        len(xs), lambda comm: reproducible_allreduce(comm, xs[comm.rank], op=op, block=block), **options
    )
    assert len({x.tobytes() for x in found}) == 1
    return found[0]


def same(expected, actual):
    assert (expected.dtype, expected.shape) == (actual.dtype, actual.shape)
    if expected.tobytes() != actual.tobytes():
        np.testing.assert_array_equal(expected.astype(np.float32), actual.astype(np.float32))
        raise AssertionError("zeros of another sign, or another NaN")


# The formula


@pytest.mark.parametrize("op", ["sum", "avg"])
@pytest.mark.parametrize("dtype", CODED)
@pytest.mark.parametrize("p", [1, 3])
def test_it_is_the_formula_in_exact_arithmetic(p, dtype, op):
    xs = [normal(rank, (5, 41), dtype, seed=p) for rank in range(p)]
    same(exactly(xs, 16, op), summed(xs, 16, op))


@pytest.mark.parametrize("dtype", CODED)
@pytest.mark.parametrize("p", [2, 3])
def test_also_on_numbers_of_all_sizes_with_nan_and_infinities(p, dtype):
    xs = [whole_range(rank, (300,), dtype, seed=p) for rank in range(p)]
    expected = exactly(xs, 3, "avg")
    assert 0 < np.isnan(expected.astype(np.float64)).sum() < expected.size
    same(expected, summed(xs, 3, "avg"))


def any_bits(rank, count, dtype):
    """Numbers of all sizes, by integer arithmetic alone: the same in every version of NumPy."""
    kind = dtype_named(dtype)
    bits = (np.arange(count, dtype=np.uint64) + 1000 * rank + 1) * np.uint64(0x9E3779B97F4A7C15)
    return (bits >> np.uint64(64 - 8 * kind.itemsize)).astype(f"u{kind.itemsize}").view(kind)


@pytest.mark.parametrize(("dtype", "digest"), GOLDEN.items())
def test_golden_bytes(dtype, digest):
    """Golden bytes for later versions: the mean of 3 addends, blocks of 4."""
    xs = [any_bits(rank, 400, dtype) for rank in range(3)]
    mean = summed(xs, 4, "avg")
    same(exactly(xs, 4, "avg"), mean)
    assert hashlib.sha256(mean.tobytes()).hexdigest()[:16] == digest


def of(*values):
    return np.array(values, np.float32)


@pytest.mark.parametrize(
    ("xs", "total", "mean"),
    [
        ([of(LARGEST)] * 3, of(np.inf), of(LARGEST)),
        ([of(LARGEST), of(LARGEST), of(-LARGEST)], of(LARGEST), of(LARGEST / 3)),
        ([of(SMALLEST)] * 3, of(3 * SMALLEST), of(SMALLEST)),
        ([of(SMALLEST), of(0), of(0)], of(SMALLEST), of(0)),
        ([of(-0.0)] * 3, of(0), of(0)),
        ([of(0, 1), of(-0.0, 1), of(0, -2)], of(0, 0), of(0, 0)),
        ([of(LARGEST, SMALLEST)] * 2, of(np.inf, 0), of(LARGEST, 0)),  # too far below the largest of its block
        ([of(np.nan, 1), of(2, 3)], of(np.nan, np.nan), of(np.nan, np.nan)),
        ([of(np.inf, 1), of(-np.inf, 3)], of(np.nan, np.nan), of(np.nan, np.nan)),
    ],
)
def test_extremes(xs, total, mean):
    same(total, summed(xs))
    same(mean, summed(xs, op="avg"))
    if mean[0] != np.float32(LARGEST / 3) and total[0] != 3 * SMALLEST:  # which have another value in float64
        same(as_float64(total), summed([as_float64(x) for x in xs]))
        same(as_float64(mean), summed([as_float64(x) for x in xs], op="avg"))


@pytest.mark.parametrize("op", ["sum", "avg"])
@pytest.mark.parametrize("p", [2, 3, 5])
def test_sums_of_float64_of_more_bits_than_it_has_are_rounded_once(p, op):
    """A mean over 5 ranks of one number was not that number: its sum was rounded, and then the quotient."""
    ones = np.ldexp(np.ones(60), -np.arange(60))
    xs = [np.concatenate([normal(rank, 200, "float64", seed=p), rank + ones, 1 - ones]) for rank in range(p)]
    same(exactly(xs, 1, op), summed(xs, 1, op))
    equal = [np.nextafter(normal(0, 200, "float64"), 9)] * p
    same(equal[0], summed(equal, 1, "avg"))


@pytest.mark.parametrize("p", [1, 3])
def test_subnormal_sums_of_float64_are_rounded_once_and_means_are_off_by_less_than_the_smallest_number(p):
    random = np.random.default_rng(p)
    xs = [np.ldexp(random.standard_normal(300), random.integers(-1075, -1005, 300)) for _ in range(p)]
    same(exactly(xs, 1, "sum"), summed(xs, 1))
    mean, found = exactly(xs, 1, "avg"), summed(xs, 1, "avg")
    assert np.abs(mean - found).max() <= 2.0**-1074
    normal_ones = np.abs(mean) > 2.0**-1022
    assert normal_ones.any()
    assert (mean[normal_ones] == found[normal_ones]).all()


@pytest.mark.parametrize(("dtype", "real"), [("complex64", "float32"), ("complex128", "float64")])
def test_complex_numbers_are_pairs_of_floats_that_share_a_unit(dtype, real):
    xs = [normal(rank, (6, 10), real, seed=5).view(dtype) for rank in range(3)]
    for op in ("sum", "avg"):
        expected = exactly([x.view(real) for x in xs], 16, op)
        assert summed(xs, 8, op).tobytes() == expected.tobytes()
    bound = run_ranks(3, lambda comm: Reproducible(8).bind(comm, sizes=[20, 9])(xs[comm.rank].copy()))
    expected = exactly([x.view(real) for x in xs], 16, "avg", sizes=[40, 18, 2])
    assert {x.tobytes() for x in bound} == {expected.tobytes()}


def test_addends_that_are_held_may_be_complex():
    xs = [normal(i, 10, "float64").view("complex128") for i in range(4)]

    def mean(comm):
        bound = Reproducible(addends=4).bind(comm)
        mine = [xs[i].copy() for i in share(4, comm.rank, comm.size)]
        for x in mine[:-1]:
            bound.hold(x)
        return bound(mine[-1]).tobytes()

    assert {*run_ranks(1, mean), *run_ranks(2, mean)} == {summed(xs, op="avg").tobytes()}


@pytest.mark.parametrize("module", ["host", pytest.param("compiled", marks=pytest.mark.needs("numba"))])
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("real", [np.float32, np.float64])
def test_the_largest_sum_there_can_be_does_not_overflow(real, sign, module):
    """All addends are the largest number, whose q is the largest; it is multiplied, not added, to save time."""
    with kernels.use(module):
        run = kernels.on_host()
    form, x, bounds = run.fixed_format(np.dtype(real)), sign * np.array([np.finfo(real).max]), np.array([0, 1])
    for addends in (1, 2, 3, 128, 129, 1000, MOST_ADDENDS):
        fields, total, bits = np.zeros(1, form.field), np.empty(1, form.total), form.bits(addends)
        run.fixed_exponents(x, bounds, fields)
        run.fixed_add(x, bounds, fields, bits, total, first=True)
        sum_of_all = int(total[0]) * addends
        assert abs(sum_of_all) <= np.iinfo(form.total).max
        total[0] = sum_of_all
        mean = np.empty(1, real)
        run.fixed_mean(total, bounds, fields, bits, addends, mean)
        assert np.isfinite(mean).all()
        np.testing.assert_allclose(mean, x, rtol=2.0**-bits, err_msg=str(addends))


# Bits do not depend on


def test_the_order_of_ranks_does_not_show():
    xs = [normal(rank, 1000) * 10.0**rank for rank in range(4)]
    xs = [x.astype(np.float32) for x in xs]
    found = {summed([xs[i] for i in order]).tobytes() for order in itertools.permutations(range(4))}
    floats = {sum(xs[i] for i in order).tobytes() for order in itertools.permutations(range(4))}
    assert len(found) == 1
    assert len(floats) > 1  # for which the order does show


SPECS = [TensorSpec(name, shape, "float32") for name, shape in (("a", (7, 3)), ("b", (300,)), ("c", ()))]


def trained(comm, algorithm, gradients, *, bucket_bytes=256, specs=SPECS):
    """The means of one step, by tensor, on this rank; gradients(i, spec) are those of microbatch i."""
    plan = Plan.pack(specs, bucket_bytes=bucket_bytes, alignment=8 * comm.size)
    addends = algorithm.average.addends or comm.size
    with Engine(comm, algorithm, plan, plan.allocate()) as engine:
        for i in (mine := share(addends, comm.rank, comm.size)):
            for bucket in engine.buckets:
                for tensor in bucket.spec.tensors:
                    bucket.views[tensor.name][...] = gradients(i, tensor)
            if i != mine[-1]:
                engine.hold()
        for spec in specs:
            engine.ready(spec.name)
        engine.at(Point.BACKWARD)
        views = plan.cut([bucket.flat for bucket in engine.buckets])
        return {name: view.copy() for name, view in views.items()}


def gradient(i, spec):
    return normal(i, spec.shape, seed=ord(spec.name)) * np.float32(2.0) ** (5 * i)


def bytes_of(means):
    return sorted((name, x.tobytes()) for name, x in means.items())


def test_nor_does_the_size_of_buckets_or_the_order_in_them():
    algorithm = GradientAllReduce(Reproducible(block=64))
    cases = [(1, SPECS), (256, SPECS), (10**6, SPECS), (10**6, SPECS[::-1])]

    def body(comm, nbytes, specs):
        return bytes_of(trained(comm, algorithm, gradient, bucket_bytes=nbytes, specs=specs))

    found = [x for case in cases for x in run_ranks(3, lambda comm, case=case: body(comm, *case))]
    assert [x for x in found if x != found[0]] == []


def test_a_mean_of_gradients_is_the_formula_with_blocks_from_the_beginning_of_each_tensor():
    found = run_ranks(3, lambda comm: trained(comm, GradientAllReduce(Reproducible(64)), gradient))
    for spec in SPECS:
        same(exactly([gradient(i, spec) for i in range(3)], 64, "avg"), found[0][spec.name])


@pytest.mark.parametrize("addends", [5, 24])
def test_nor_does_the_number_of_ranks_that_microbatches_are_dealt_to(addends):
    algorithm = GradientAllReduce(Reproducible(addends=addends))
    found = [
        bytes_of(means)
        for ranks in (1, 2, 3, 5)
        for means in run_ranks(ranks, lambda comm: trained(comm, algorithm, gradient))
    ]
    assert [x for x in found if x != found[0]] == []


def test_held_addends_are_freed_with_their_mean():
    def body(comm):
        bound = Reproducible(addends=3).bind(comm)
        means = []
        for _ in range(2):
            for i in range(3):
                x = of(i, 2 * i)
                if i < 2:
                    bound.hold(x)
                    assert not x.any()
            means.append(bound(x).tolist())
        return means

    assert run_ranks(1, body) == [[[1, 2]] * 2]


def test_the_sum_keeps_what_float32_loses():
    xs = [of(1), of(2**-24), of(2**-24), of(-1)]
    assert sum(xs) == 0
    assert summed(xs) == 2.0**-23


# Outputs, costs, and errors


def test_out_may_be_the_array_itself_or_another_of_any_strides():
    xs = [normal(rank, (6, 5)) for rank in range(2)]
    expected = exactly(xs, 128, "sum")

    def body(comm):
        x = xs[comm.rank].copy()
        table = np.zeros((6, 10), np.float32)
        assert reproducible_allreduce(comm, x, out=table[:, ::2]).base is table
        turned = np.ascontiguousarray(x.T).T
        mean = Reproducible().bind(comm)(turned)
        assert reproducible_allreduce(comm, x, out=x) is x
        return x, table[:, ::2].copy(), mean * 2

    for x, strided, mean in run_ranks(2, body):
        same(expected, x)
        same(expected, strided)
        np.testing.assert_allclose(mean, expected, rtol=1e-6)


def test_ranks_with_arrays_of_other_dtypes_are_told_so():
    def body(comm):
        with pytest.raises(CommMismatch, match=r"rank \d called .*uint.* rank \d called .*uint"):
            reproducible_allreduce(comm, np.ones(3, (np.float32, np.float64)[comm.rank]))

    run_ranks(2, body, timeout_s=20)


def test_ranks_with_shorter_floats_are_told_both_dtypes():
    """Each rank rounded the sum to its own dtype."""

    def body(comm):
        with pytest.raises(ArrayError, match=r"rank 0 has .* of float32, but rank 1 has .* of float16"):
            reproducible_allreduce(comm, np.ones(3, (np.float32, np.float16)[comm.rank]))

    run_ranks(2, body, timeout_s=20)


def test_the_wire_is_that_of_float32_and_a_byte_a_block_and_8_bytes():
    def sent(comm, call):
        before = comm.counters.total().wire_bytes
        call()
        return comm.counters.total().wire_bytes - before

    def body(comm):
        x = np.ones(128 * 120, np.float32)  # blocks for 4 ranks, and as many bytes of the number
        return sent(comm, lambda: comm.allreduce(x)), sent(comm, lambda: reproducible_allreduce(comm, x))

    for exact, reproducible in run_ranks(4, body):
        assert reproducible == exact * (1 + 1 / 512) + 2 * 3 / 4 * 8


@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (1,)])
def test_arrays_of_any_shape(shape):
    xs = [np.full(shape, rank, np.float32) for rank in range(2)]
    same(np.full(shape, 1, np.float32), summed(xs))


def said(comm, average, held=0):
    """The error of every rank that averages after holding these numbers of addends; empty if there is none."""
    bound = average.bind(comm)
    for _ in range(held):
        with contextlib.suppress(ArrayError):
            bound.hold(of(1, 2))
    try:
        bound(of(1, 2))
    except ArrayError as exc:
        return str(exc)


@pytest.mark.parametrize(
    ("averages", "held", "message"),
    [
        ([Reproducible(addends=6)] * 2, (2, 1), "rank 1 of 2 has 3 of 6 addends, but has 2; distribute"),
        ([Reproducible(addends=6)] * 2, (2, 3), "rank 1 of 2 has 3 of 6 addends, but has 4; distribute"),
        ([Reproducible(addends=6)] * 2, (0, 0), "has 3 of 6 addends, but has 1; Reproducible: rank 1 of 2"),
        ([Reproducible(addends=6), Reproducible(addends=8)], (2, 3), "rank 0 has 6 .*, but rank 1 has 8 addends"),
        ([Reproducible(64), Reproducible(65)], (0, 0), "rank 0 has 2 .* of 64, .* of 65, in 1 tensors"),
    ],
)
def test_a_wrong_number_of_addends_is_an_error_on_every_rank(averages, held, message):
    found = run_ranks(2, lambda comm: said(comm, averages[comm.rank], held[comm.rank]), timeout_s=20)
    assert found[0] == found[1]
    assert re.search(message, found[0])


def test_ranks_with_arrays_of_other_sizes_are_told_both_sizes():
    """The settings were named alone, which were the same on both ranks."""

    def body(comm):
        with pytest.raises(ArrayError, match=r"3 elements in tensor 0, but rank 1 .* 4 elements in tensor 0;"):
            reproducible_allreduce(comm, np.ones(3 + comm.rank, np.float32))

    run_ranks(2, body)


def test_after_a_wrong_number_of_addends_the_next_mean_is_well():
    def body(comm):
        bound = Reproducible(addends=4).bind(comm)
        with pytest.raises(ArrayError, match="but has 1"):
            bound(of(1))
        bound.hold(of(comm.rank))
        return bound(of(3)).tolist()

    assert run_ranks(2, body) == [[1.75]] * 2


def test_an_engine_refuses_to_hold_where_nothing_is_kept():
    plan = Plan.pack(SPECS)

    def body(comm):
        with Engine(comm, GradientAllReduce(), plan, plan.allocate()) as engine:
            for _ in range(2):
                with pytest.raises(ArrayError, match="keeps no addends"):
                    engine.hold()

    run_ranks(2, body)


def test_hold_is_for_the_time_before_a_bucket_has_left():
    plan = Plan.pack(SPECS)

    def body(comm):
        with Engine(comm, GradientAllReduce(Reproducible(addends=1)), plan, plan.allocate()) as engine:
            for spec in SPECS:
                engine.ready(spec.name)
            with pytest.raises(ArrayError, match="buckets have left"):
                engine.hold()
            engine.at(Point.BACKWARD)

    run_ranks(1, body)
