"""What averages and their collectives refuse: every rank raises before a byte moves, and the next call works."""

import numpy as np
import pytest

from bagua_comm import (
    ArrayError,
    ErrorFeedback,
    Exact,
    Hierarchical,
    Int4,
    MinMaxUInt8,
    Quantized,
    Reproducible,
    TopK,
    UnsupportedError,
    quantized_allgather,
    quantized_allreduce,
    quantized_reduce_scatter,
    reproducible_allreduce,
)
from bagua_comm.testing import Recording, run_ranks

X = np.ones(8, np.float32)
PLAIN = TopK(64, 16, bits=32)
FEEDING = Hierarchical(ErrorFeedback())
READ_ONLY = np.broadcast_to(np.float32(0), 8)
DTYPES = ("float64", "int32", "bool", "complex64")


class Narrow(MinMaxUInt8):
    dtypes = frozenset({"float32"})


def coded(call):
    """What any quantized collective refuses."""
    name = call.__name__
    return [
        *((lambda c, d=d: call(c, X.astype(d)), UnsupportedError, f"{name}: .* code {d}, only") for d in DTYPES),
        (lambda c: call(c, X.astype("f8")), UnsupportedError, r"pass x\.astype\('float32'\)"),
        (lambda c: call(c, [1.0, 2.0]), UnsupportedError, f"{name}: x: expected a NumPy"),
        (lambda c: call(c, X, codec="minmax"), ArrayError, f"{name}: .*expected a Codec"),
    ]


def reduced(call):
    """What any quantized reduction refuses besides."""
    name = call.__name__
    return [
        *(
            (lambda c, op=op: call(c, X, op=op), ArrayError, f'{name}: op is {op!r}, expected "sum" or "avg"')
            for op in ("prod", "min", "band", "mean", None)
        ),
        *(
            (lambda c, decay=decay: call(c, X, decay=decay), ArrayError, f"{name}: decay is {decay}")
            for decay in (1.0, -1, None)
        ),
    ]


CALLS = [
    *(
        row
        for call in (quantized_allreduce, quantized_reduce_scatter, quantized_allgather)
        for row in coded(call)
    ),
    *(row for call in (quantized_allreduce, quantized_reduce_scatter) for row in reduced(call)),
    (lambda c: quantized_allreduce(c, X, out=np.ones(5, "f4")), ArrayError, r"out has shape \(5,\)"),
    (lambda c: quantized_allreduce(c, X, out=np.ones((2, 4), "f4")), ArrayError, r"out has shape \(2, 4\)"),
    (lambda c: quantized_allreduce(c, X, out=X.astype("f2")), ArrayError, "out has dtype float16"),
    (lambda c: quantized_allreduce(c, X, out=READ_ONLY), ArrayError, "out is read-only"),
    (lambda c: quantized_allreduce(c, X[:-1], out=X[1:]), ArrayError, "out overlaps x; pass out=x"),
    (lambda c: quantized_reduce_scatter(c, np.ones(9, "f4")), ArrayError, "divisible by 2 ranks"),
    (lambda c: quantized_reduce_scatter(c, X, counts=[1, 2]), ArrayError, "expected 3, the sum of counts"),
    (lambda c: quantized_reduce_scatter(c, X, X.copy()), ArrayError, r"out has shape \(8,\), expected \(4,\)"),
    (lambda c: quantized_reduce_scatter(c, X, residual=X[:4]), ArrayError, r"residual is float32\(4,\)"),
    (lambda c: quantized_reduce_scatter(c, X, residual=X), ArrayError, "residual overlaps"),
    (lambda c: quantized_reduce_scatter(c, X, X[2:6]), ArrayError, "out overlaps x outside"),
    (lambda c: quantized_allgather(c, X, reference=X), ArrayError, r"reference is float32\(8,\)"),
    (
        lambda c: quantized_allgather(c, (whole := np.ones((2, 8), "f4"))[c.rank], reference=whole),
        ArrayError,
        "reference overlaps x",
    ),
    (lambda c: reproducible_allreduce(c, X.astype("i4")), UnsupportedError, "int32.*allreduce has"),
    (lambda c: reproducible_allreduce(c, X.astype(bool)), UnsupportedError, "bool"),
    (lambda c: reproducible_allreduce(c, X, op="max"), ArrayError, "op is 'max'"),
    (lambda c: reproducible_allreduce(c, X, block=0), ArrayError, "block is 0"),
    (lambda c: reproducible_allreduce(c, X, out=X[:1]), ArrayError, "out has shape"),
    (lambda c: Reproducible().bind(c)(np.ones(2, np.int64)), UnsupportedError, "average int64.*allreduce has"),
    (lambda c: Reproducible(addends=1).bind(c), ArrayError, "2 ranks and 1 addends"),
    (lambda c: Reproducible().bind(c).hold(X), ArrayError, "0 to hold"),
    (lambda c: Reproducible(addends=3).bind_shards(c, [(4, 2)]), ArrayError, "multiple, since all ranks"),
    (lambda c: Reproducible(addends=1).bind_shards(c, [(4, 2)]), ArrayError, "at least one addend"),
    (
        lambda c: Reproducible().bind_shards(c, [(3, 3)])(np.ones(8, "f4"), np.ones(4, "f4"), "avg"),
        ArrayError,
        "x has 8 elements, expected 12, those of the tensors",
    ),
]


def bound(average):
    """What an average refuses that is a mean of the largest elements."""
    return [
        row
        for d in ("float64", "int32", "complex64")
        for row in (
            (lambda c, d=d: average.check(d), UnsupportedError, f"average {d}, only bfloat16, float16"),
            (lambda c, d=d: average.bind(c, np.zeros(3, d)), UnsupportedError, d),
            (lambda c, d=d: average.bind(c)(np.zeros(3, d)), UnsupportedError, d),
        )
    ]


def means_of(average, *sizes):
    def call(comm):
        mean = average.bind(comm)
        for size in sizes:
            mean(np.zeros(size, np.float32))

    return call


BOUND = [
    *(row for average in (PLAIN, ErrorFeedback(PLAIN)) for row in bound(average)),
    (lambda c: PLAIN.bind(c)(READ_ONLY), ArrayError, "read-only"),
    (
        means_of(ErrorFeedback(Quantized(), 0.8, 3, MinMaxUInt8(24)), 40, 39),
        ArrayError,
        r"\(39,\), expected float32\(40,\)",
    ),
    *(
        (
            lambda c, n=n: Hierarchical().bind_gather(c)(np.zeros(100, "f4"), np.zeros(n, "f4")),
            ArrayError,
            f"out has {n} .* expected 200",
        )
        for n in (199, 201)
    ),
    *(
        (
            lambda c, n=n: Hierarchical().bind_shards(c)(np.zeros(n, "f4"), np.zeros(100, "f4"), "avg"),
            ArrayError,
            f"x has {n} .* expected 200",
        )
        for n in (199, 201)
    ),
    (lambda c: Hierarchical().bind_gather(c)(X, np.zeros(32, "f4")[::2]), ArrayError, "out is not contiguous"),
    *(
        (lambda c, a=a: a.bind_shards(c)(X, X[:4].copy(), "max"), ArrayError, "op is 'max'")
        for a in (Quantized(min_bytes=0), Hierarchical(), PLAIN, Reproducible())
    ),
    (FEEDING.bind_shards, ArrayError, "inner is ErrorFeedback"),
    (FEEDING.bind_gather, ArrayError, "inner is ErrorFeedback"),
]

STOCHASTIC = Int4(rounding="stochastic")
SETTINGS = [
    *((Quantized, {"min_bytes": v}, "min_bytes is") for v in (-1, 1.5, True)),
    *(
        (Hierarchical, {"inside": v}, r"inside is .*, expected Exact\(\) or Quantized")
        for v in (ErrorFeedback(), MinMaxUInt8(), None, Quantized)
    ),
    (Hierarchical, {"inside": Quantized(STOCHASTIC)}, "which rounds stochastically"),
    (Hierarchical, {"inner": Reproducible()}, "sums inside a node are not reproducible"),
    *(
        (ErrorFeedback, {"inner": v}, r"inner is .*, expected Quantized\(codec\) or TopK\(\)")
        for v in (Exact(), MinMaxUInt8(), "quantized", None, ErrorFeedback())
    ),
    (ErrorFeedback, {"inner": Hierarchical(Quantized())}, r"; or Hierarchical\(ErrorFeedback\(\)\)$"),
    *((ErrorFeedback, {"decay": v}, f"decay is {v!r}, .* below 1") for v in (1, -0.1, float("nan"), "0.8", True)),
    *((ErrorFeedback, {"reset_every": v}, f"reset_every is {v!r}, .* at least 1") for v in (0, 2.0, True)),
    *((ErrorFeedback, {"residual_codec": v}, "residual_codec is .*Codec") for v in ("uint8", MinMaxUInt8)),
    (ErrorFeedback, {"residual_codec": STOCHASTIC}, "which rounds stochastically; expected one that rounds"),
    *(
        (ErrorFeedback, {"inner": PLAIN, "retain": v}, "retain is .* from 0 to 1")
        for v in (-0.1, 1.1, np.nan, "all", True)
    ),
    *((Reproducible, {"addends": v}, "addends is") for v in (0, -1, 2.0, True, 1 << 31)),
    (Reproducible, {"block": 0}, "block is"),
    *((TopK, {"chunk": v}, f"chunk is {v}, .*2 to 4096") for v in (1, 8192, 4096.0)),
    *((TopK, {"chunk": 64, "keep": v}, f"keep is {v}, .*even.* 2 to .* 64") for v in (66, 7, True)),
    *((TopK, {"bits": v}, f"bits is {v}, expected 2, 16 or 32") for v in (4, 2.0)),
]
CHECKS = [
    (Exact(), "int32", r"Exact\(\) cannot average int32; expected a floating-point or complex dtype"),
    (Hierarchical(), "bool", r"Exact\(\) cannot average bool; expected a floating-point or complex dtype"),
    (Quantized(), "float64", r"Quantized: .* cannot code float64, only .*x\.astype\('float32'\)"),
    (Hierarchical(Quantized()), "float64", r"Quantized: .* cannot code float64, only .*x\.astype\('float32'\)"),
    (
        Hierarchical(Quantized()),
        "complex64",
        "Quantized: .* cannot code complex64, only bfloat16, float16, float32$",
    ),
    (Hierarchical(inside=Quantized()), "float64", "cannot code float64"),
    (ErrorFeedback(residual_codec=Narrow()), "float16", "residual_codec is .* cannot code float16, only float32"),
]


def refused(comm, call, error, words):
    with pytest.raises(error, match=words):
        call(comm)
    sent = len(comm.transports[0].calls)
    assert comm.allreduce(np.array(1)) == 2
    return sent


@pytest.mark.parametrize(("call", "error", "words"), CALLS)
def test_calls_are_refused_before_a_byte_moves(call, error, words):
    assert run_ranks(2, lambda comm: refused(comm, call, error, words), wrap=Recording) == [0, 0]


@pytest.mark.parametrize(("call", "error", "words"), BOUND)
def test_bound_averages_refuse_on_every_rank(call, error, words):
    run_ranks(2, lambda comm: refused(comm, call, error, words), wrap=Recording)


@pytest.mark.parametrize(("kind", "settings", "words"), SETTINGS, ids=str)
def test_settings_out_of_range_are_refused(kind, settings, words):
    with pytest.raises(ArrayError, match=words):
        kind(**settings)


@pytest.mark.parametrize(("average", "dtype", "words"), CHECKS, ids=str)
def test_dtypes_are_refused_by_name(average, dtype, words):
    average.check("float32")
    with pytest.raises(UnsupportedError, match=words):
        average.check(dtype)
