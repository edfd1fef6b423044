"""Weighted means of arrays against fractions: one process that has the samples of all ranks."""

import warnings
from fractions import Fraction

import numpy as np
import pytest

from bagua_comm import (
    ArrayError,
    BFloat16,
    CommMismatch,
    ErrorFeedback,
    Exact,
    Hierarchical,
    Int4,
    MinMaxUInt8,
    Quantized,
    Reproducible,
    TopK,
    UnsupportedError,
    quantized_allreduce,
    quantized_reduce_scatter,
    reproducible_allreduce,
    weigh,
)
from bagua_comm.arrays import dtype_named
from bagua_comm.comm.weights import agree_by
from bagua_comm.testing import run_ranks

TOKENS = [1, 7, 0, 513]
EIGHT, FOUR = Quantized(MinMaxUInt8(), min_bytes=0), Quantized(Int4(), min_bytes=0)
ALL = TopK(64, 64, bits=32)
SENDERS = ErrorFeedback(TopK(64, 64, bits=32, divide="senders"))


def arrays_of(ranks, dtype="float32", size=1000, seed=0):
    """The array of each rank; that of a rank without tokens is NaN."""
    values = np.random.default_rng(seed).standard_normal((ranks, size))
    return values.astype(np.float32).astype(dtype_named(dtype))


def joined(xs, weights, absolute=False):
    """The mean of one process: exact fractions, rounded to float64."""
    total, rows = sum(map(Fraction, weights)), []
    for column in np.asarray(xs, np.float64).T.tolist():
        terms = (Fraction(w) * Fraction(x) for w, x in zip(weights, column, strict=True) if w)
        rows.append(float(sum(map(abs, terms) if absolute else terms) / total))
    return np.array(rows)


def units(found, xs, weights):
    """The largest error, in units in the last place of the mean of absolute values."""
    size = joined(xs, weights, absolute=True)
    if found.dtype.name == "bfloat16":
        unit = np.spacing(size.astype(np.float32)) * 2.0**16
    else:
        unit = np.spacing(size.astype(found.dtype)).astype(np.float64)
    return np.max(np.abs(found.astype(np.float64) - joined(xs, weights)) / unit)


CALLS = {
    "allreduce": (lambda c, x, w: c.allreduce(x, np.empty_like(x), op="avg", weight=w), 1e-7),
    "eight bits": (lambda c, x, w: quantized_allreduce(c, x, op="avg", weight=w), 0.02),
    "reproducible": (lambda c, x, w: reproducible_allreduce(c, x, op="avg", weight=w), 1e-7),
    "weigh": (lambda c, x, w: c.allgather(c.reduce_scatter(weigh(c, x, w), op="avg")).reshape(-1), 1e-7),
    "weigh in eight bits": (
        lambda c, x, w: c.allgather(quantized_reduce_scatter(c, weigh(c, x, w), op="avg")).reshape(-1),
        0.02,
    ),
    **{
        str(average): (lambda c, x, w, a=average: a.bind_weighted(c)(x.copy(), w), error)
        for average, error in (
            (Reproducible(), 1e-7),
            (FOUR, 0.3),
            (Quantized(BFloat16(), min_bytes=0), 0.01),
            (ErrorFeedback(EIGHT), 0.02),
            (ALL, 1e-7),
            (Hierarchical(), 1e-6),
            (Hierarchical(EIGHT, inside=EIGHT), 0.05),
            (Hierarchical(ErrorFeedback(ALL)), 1e-6),
        )
    },
}


@pytest.mark.parametrize("name", CALLS)
def test_every_mean_is_that_of_one_process_with_the_joined_samples(name):
    call, error = CALLS[name]
    xs = arrays_of(4, size=400)
    expected = joined(xs, TOKENS)
    xs[2] = np.nan  # it has no tokens
    found = run_ranks(4, lambda c: call(c, xs[c.rank], TOKENS[c.rank]), nodes=["a", "a", "a", "b"])
    assert all(each.tobytes() == found[0].tobytes() for each in found)
    assert np.linalg.norm(found[0] - expected) <= error * np.linalg.norm(expected)
    plain = np.mean(np.delete(xs, 2, 0), 0)
    assert np.linalg.norm(found[0] - plain) > 2 * error * np.linalg.norm(expected)  # so that the weights matter


def test_the_exact_mean_is_one_unit_in_the_last_place_from_that_of_one_process():
    xs = arrays_of(4)
    (found, *_) = run_ranks(4, lambda c: c.allreduce(xs[c.rank], op="avg", weight=TOKENS[c.rank]))
    nearest = joined(xs, TOKENS).astype(np.float32)
    steps = found.view(np.int32).astype(np.int64) - nearest.view(np.int32)
    sizes = np.spacing(joined(xs, TOKENS, absolute=True).astype(np.float32)) / np.spacing(np.abs(nearest))
    assert np.all(np.abs(steps) <= sizes)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_random_weights_on_one_to_five_ranks(dtype):
    random = np.random.default_rng(5)
    for case in range(25):
        ranks = case % 5 + 1
        weights = np.where(random.random(ranks) < 0.2, 0, random.integers(1, 4000, ranks))
        weights[random.integers(ranks)] = 1 + case
        scaled = (weights * random.choice([1, 0.1, 1e-300, 1e300])).tolist()
        xs = arrays_of(ranks, dtype, 40, case)

        def mean(comm, xs=xs, weights=scaled):
            return comm.allreduce(xs[comm.rank], op="avg", weight=weights[comm.rank])

        found = run_ranks(ranks, mean)[0]
        # Each addend is rounded once, by a unit of the sum at most; sums of float32 round as in a plain mean.
        assert units(found, xs, scaled) <= (1 + ranks / 2 if dtype == "float32" else 1.6), (ranks, scaled)


def test_equal_weights_give_the_bits_of_the_plain_mean():
    xs = arrays_of(3)
    for average in (Exact(), EIGHT, FOUR, Reproducible(), ErrorFeedback(EIGHT)):

        def both(comm, average=average):
            weighted, plain = xs[comm.rank].copy(), xs[comm.rank].copy()
            return average.bind_weighted(comm)(weighted, 0.3).tobytes() == average.bind(comm)(plain).tobytes()

        assert run_ranks(3, both) == [True] * 3


def test_weights_of_zero_alone_give_zeros_and_one_warning():
    def body(comm):
        call = ErrorFeedback(EIGHT).bind_weighted(comm)
        call(arrays_of(2)[comm.rank], 1)  # leaves a residual
        found = [call(np.full(9, np.nan, np.float32), 0) for _ in range(2)]
        return [*found, comm.allreduce(np.full(9, np.nan), op="avg", weight=0)]

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        results = run_ranks(2, body)
    assert all((each == 0).all() for found in results for each in found)
    assert [str(each.message).partition(",")[0] for each in caught] == ["weight: all weights are 0"]


def test_a_weight_that_changes_does_not_scale_the_errors_of_earlier_means():
    steps = [arrays_of(2, size=500, seed=seed) for seed in range(6)]
    weights = [(1, 1), (1, 999), (50, 1), (0, 1), (7, 3), (1e6, 1)]

    def body(comm):
        bound = ErrorFeedback(FOUR).bind(comm)
        total = np.zeros(500)
        for xs, pair in zip(steps, weights, strict=True):
            total += bound(weigh(comm, xs[comm.rank], pair[comm.rank]))
        return total, bound.residual.astype(np.float64)

    (total, first), (_, second) = run_ranks(2, body)
    expected = sum(joined(xs, pair) for xs, pair in zip(steps, weights, strict=True))
    assert np.allclose(total + (first + second) / 2, expected, atol=1e-5)


def test_a_finite_mean_of_float16_stays_finite():
    xs = np.full((4, 3), 60000, np.float16)

    def body(comm):
        return comm.allreduce(xs[comm.rank], op="avg", weight=[0, 0, 3, 4096][comm.rank])

    assert [each.tolist() for each in run_ranks(4, body)] == [[60000] * 3] * 4


X = np.ones(4, np.float32)
EXPECTED = "expected a finite number of at least 0"
REFUSED = [
    *(
        (
            lambda c, x=bad: c.allreduce(X, op="avg", weight=x if c.rank else 1),
            ArrayError,
            f"1 has {text}, {EXPECTED}",
        )
        for bad, text in {
            -1: "-1.0",
            np.nan: "nan",
            np.inf: "inf",
            -np.inf: "nan",
            "1k": "set something that is no number",
            10**400: "inf",
        }.items()
    ),
    (lambda c: quantized_allreduce(c, X, op="avg", weight=-2), ArrayError, "rank 0 has -2.0"),
    (lambda c: Exact().bind_weighted(c)(X.copy(), -1), ArrayError, "rank 0 has -1.0"),
    (lambda c: SENDERS.bind_weighted(c)(X.copy(), 1), UnsupportedError, "and not by their weights"),
    (lambda c: c.allreduce(X, weight=1), ArrayError, "allreduce: op is 'sum' beside a weight, expected \"avg\""),
    (lambda c: quantized_allreduce(c, X, weight=1), ArrayError, "op is 'sum' beside a weight"),
    (lambda c: c.allreduce(np.arange(3), op="avg", weight=1), UnsupportedError, "int64 beside a weight"),
    (lambda c: c.allreduce(X, X[:2], op="avg", weight=1), ArrayError, "out has shape"),
    (lambda c: c.allreduce((y := X.copy())[:-1], y[1:], op="avg", weight=1), ArrayError, "out overlaps x"),
]


@pytest.mark.parametrize(("call", "error", "text"), REFUSED)
def test_a_wrong_weight_of_one_rank_is_an_error_on_all_and_the_next_mean_works(call, error, text):
    def body(comm):
        with pytest.raises(error, match=text):
            call(comm)
        return comm.allreduce(X, op="avg", weight=1 + comm.rank).tolist()

    assert run_ranks(2, body) == [[1] * 4] * 2


def test_nodes_of_unequal_size_count_by_it_which_a_mean_of_senders_does_not():
    with pytest.raises(UnsupportedError, match="nodes have 1 to 2 ranks, by which they count"):
        run_ranks(3, Hierarchical(SENDERS).bind, nodes=["a", "a", "b"])


def test_a_weight_on_some_ranks_alone_ends_the_call_on_all():
    def body(comm):
        with pytest.raises(CommMismatch) as raised:
            comm.allreduce(X, op="avg", weight=None if comm.rank else 5)
        return str(raised.value)

    with_weight, without = run_ranks(2, body)
    assert "rank 0 was sending the weight of its mean: set one on all ranks" in with_weight
    assert "allgather" in without


def test_a_function_for_the_weight_that_raises_on_one_rank_is_an_error_on_all():
    def body(comm):
        with pytest.raises(ArrayError, match="weight: rank 0 has raised in the function"):
            agree_by(comm, [lambda: {}["tokens"], lambda: 3][comm.rank])
        return comm.allreduce(np.ones(1)).tolist()

    assert run_ranks(2, body) == [[2.0]] * 2
