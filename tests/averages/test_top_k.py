"""The mean of the largest elements: which are sent, what arrives, and what error feedback keeps."""

import json
import subprocess
import sys

import numpy as np
import pytest
from support.golden import GOLDEN
from support.references import largest

from bagua_comm import ArrayError, CommMismatch, ErrorFeedback, Hierarchical, MinMaxUInt8, TopK
from bagua_comm.arrays import dtype_named
from bagua_comm.kernels import compiled, host
from bagua_comm.testing import run_ranks

DTYPES = ("float32", "float16", "bfloat16")
SIZES = [0, 1, 15, 17, 64, 1000]  # below, at and above a chunk of 64, of which 16 are kept
PLAIN = TopK(64, 16, bits=32)


def arrays_of(ranks, size, dtype="float32", seed=0):
    random = np.random.default_rng(seed)
    return [random.standard_normal(size).astype(dtype_named(dtype)) for _ in range(ranks)]


def averaged(average, xs, **settings):
    """The mean on all ranks, which is the same, and the residual of each rank, None without one."""

    def body(comm):
        x, mean = xs[comm.rank].copy(), average.bind(comm)
        assert mean(x) is x
        return x, getattr(mean, "residual", None)

    results, residuals = zip(*run_ranks(len(xs), body, **settings), strict=True)
    assert all(x.tobytes() == results[0].tobytes() for x in results)
    return results[0], residuals


def expected_mean(xs, average):
    """The sum of what ranks send, in rank order in float32, over their number."""
    total = np.zeros(xs[0].shape, np.float32)
    for x in xs:
        total = total + largest(x.astype(np.float32), average.chunk, average.keep, average.bits)
    return (total / np.float32(len(xs))).astype(xs[0].dtype)


@pytest.mark.parametrize("bits", [2, 32])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_mean_of_what_ranks_send(dtype, bits):
    average, ranks = TopK(64, 16, bits), 3
    inputs = [arrays_of(ranks, size, dtype, seed=size) for size in SIZES]
    for results in run_ranks(ranks, lambda comm: [average.bind(comm)(xs[comm.rank].copy()) for xs in inputs]):
        for xs, result in zip(inputs, results, strict=True):
            assert result.tobytes() == expected_mean(xs, average).tobytes(), xs[0].size


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
def test_any_settings(seed):
    random = np.random.default_rng(seed)
    for _ in range(10):
        chunk = int(random.integers(2, 4097))
        average = TopK(chunk, 2 * int(random.integers(1, chunk // 2 + 1)), bits=int(random.choice([2, 32])))
        xs = arrays_of(2, int(random.integers(1, 9000)), random.choice(DTYPES), seed)
        np.testing.assert_array_equal(averaged(average, xs)[0], expected_mean(xs, average), str(average))


def test_values_of_sixteen_bits_are_rounded_half_to_even_and_stay_finite():
    x = np.array([1 + 2**-8, 1 + 3 * 2**-8, -3.4e38, 1e-45], np.float32)
    result, _ = averaged(TopK(4, 4, bits=16), [x, 0 * x])
    assert (2 * result).tolist() == [1.0, 1 + 2**-6, -(2.0**128 - 2.0**120), 0.0]


def test_a_residual_of_finite_numbers_is_finite():
    x = np.full(64, -65000, np.float16)
    x[:6], x[0] = -30000, 65504  # of another sign than the value that is sent for it

    def body(comm):
        mean = ErrorFeedback(TopK(64, 64, 2)).bind(comm)
        return [
            np.isfinite(mean(y)).all() for y in (x.copy(), np.zeros(64, np.float16), np.zeros(64, np.float16))
        ]

    assert run_ranks(2, body) == [[True] * 3] * 2


def test_of_equal_magnitudes_those_of_lower_indices_are_sent():
    x = np.array([1, -2, 2, 2, -1, 1, 2, 0], np.float32)
    result, _ = averaged(TopK(8, 2, bits=32), [x, x])
    assert result.tolist() == [0, -2, 2, 0, 0, 0, 0, 0]
    result, _ = averaged(TopK(8, 6, bits=32), [x, x])
    assert result.tolist() == [1, -2, 2, 2, -1, 0, 2, 0]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf, -np.inf])
def test_what_is_not_finite_arrives_as_nan_and_leaves_no_residual(bad, dtype):
    for bits, hit in ((32, 1), (16, 1), (2, 4)):
        x, y = (np.array([5, 4, 3, 2, 1, 0, 0, 9, 9, 9, 9, 9], np.float32) for _ in range(2))
        x[5] = bad
        x, y = (each.astype(dtype_named(dtype)) for each in (x, y))
        result, (mine, other) = averaged(ErrorFeedback(TopK(6, 2, bits)), [x, y])
        assert np.flatnonzero(np.isnan(result)).tolist() == ([5] if hit == 1 else [0, 5, 7, 8]), bits
        assert np.isfinite(mine).all()
        assert np.isfinite(other).all()
        assert mine[[1, 2, 3, 4]].tolist() == [4, 3, 2, 1]


def test_more_nans_than_are_sent_leave_no_residual_either():
    x = np.full(10, np.nan, np.float32)
    x[9] = 1
    result, (residual, _) = averaged(ErrorFeedback(TopK(10, 2)), [x, x])
    assert np.flatnonzero(np.isnan(result)).tolist() == [0, 1]
    assert residual.tolist() == [0] * 9 + [1]


def test_a_nan_counts_as_larger_than_an_infinity():
    x = np.array([np.inf, 1, np.nan, -np.inf, -np.nan], np.float32)
    result, _ = averaged(TopK(5, 2, bits=32), [x, x])
    assert np.flatnonzero(np.isnan(result)).tolist() == [2, 4]


@pytest.mark.parametrize("bits", [2, 16, 32])
def test_the_nan_of_a_mean_is_the_canonical_one(bits):
    for dtype, canonical in (("float32", 0x7FC00000), ("float16", 0x7E00), ("bfloat16", 0x7FC0)):
        x = np.array([-np.nan, np.inf], dtype_named(dtype))
        result, _ = averaged(TopK(2, 2, bits), [x, -x])
        assert result.view(f"u{result.itemsize}").tolist() == [canonical] * 2


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", [2, 16, 32])
def test_what_is_not_sent_keeps_its_bits_and_what_is_sent_leaves_the_difference(bits, dtype):
    xs = arrays_of(2, 1000, dtype)
    xs[0][::3] = -0.0
    _, residuals = averaged(ErrorFeedback(TopK(64, 4, bits)), xs)
    for x, residual in zip(xs, residuals, strict=True):
        wide = x.astype(np.float32)
        # -0.0 + 0 is 0: the residual of the first mean is x + 0.
        unsent = largest(wide, 64, 4) == 0
        assert residual[unsent].tobytes() == (x[unsent] + x.dtype.type(0)).tobytes()
        if bits == 2:
            left = (wide - largest(wide, 64, 4, 2)).astype(x.dtype)
            assert residual[~unsent].tobytes() == left[~unsent].tobytes()
        elif bits == 32:
            assert not residual[~unsent].any()


@pytest.mark.parametrize(
    "settings", [{}, {"decay": 0.5}, {"retain": 0.75}, {"decay": 0.5, "retain": 0.5}], ids=repr
)
def test_error_feedback_follows_its_equations(settings):
    steps, ranks = 5, 3
    b, c = np.float32(settings.get("decay", 0)), np.float32(settings.get("retain", 1))
    average = ErrorFeedback(PLAIN, **settings)

    def body(comm):
        mean = average.bind(comm)
        return [(mean(arrays_of(ranks, 200, seed=s)[comm.rank]), mean.residual.copy()) for s in range(steps)]

    actual = run_ranks(ranks, body)
    rs = [np.zeros(200, np.float32) for _ in range(ranks)]
    for step in range(steps):
        rs = [c * r for r in rs]
        vs = [x + (1 - b) * r for x, r in zip(arrays_of(ranks, 200, seed=step), rs, strict=True)]
        sent = [largest(v, 64, 16) for v in vs]
        rs = [b * r + (v - s) for v, s, r in zip(vs, sent, rs, strict=True)]
        for rank in range(ranks):
            np.testing.assert_allclose(actual[rank][step][0], sum(sent) / ranks, rtol=0, atol=1e-6)
            np.testing.assert_allclose(actual[rank][step][1], rs[rank], rtol=0, atol=1e-6)


def test_without_forgetting_nothing_is_lost():
    """The sum of the means, plus the mean of the residuals, is the sum of the exact means."""
    xs = [arrays_of(3, 500, seed=step) for step in range(20)]

    def body(comm):
        mean = ErrorFeedback(TopK(64, 4)).bind(comm)
        return sum(mean(x[comm.rank].copy()) for x in xs), mean.residual

    ranks = run_ranks(3, body)
    total = ranks[0][0] + sum(residual for _, residual in ranks) / 3
    np.testing.assert_allclose(total, sum(sum(x) for x in xs) / 3, atol=1e-4)


def test_a_single_rank_keeps_its_array_and_gets_back_what_it_had_not_sent():
    def body(comm):
        mean = ErrorFeedback(PLAIN).bind(comm)
        first = mean(np.arange(3, dtype=np.float32)).tolist()
        mean.residual = np.array([5, 0, 0], np.float32)  # of a training on more ranks
        return first, mean(np.arange(3, dtype=np.float32)).tolist(), mean.residual.tolist()

    assert run_ranks(1, body) == [([0, 1, 2], [5, 1, 2], [0, 0, 0])]


def test_an_encoded_residual():
    xs = arrays_of(2, 300)
    _, residuals = averaged(ErrorFeedback(PLAIN, residual_codec=MinMaxUInt8()), xs)
    _, exact = averaged(ErrorFeedback(PLAIN), xs)
    for each, other in zip(residuals, exact, strict=True):
        assert 0 < np.abs(each - other).max() < 0.02


def test_arrays_of_any_shape_and_layout():
    def body(comm):
        whole = np.arange(60, dtype=np.float32).reshape(6, 10)
        mean = TopK(4, 4, bits=32).bind(comm)
        every_other = whole.copy()
        mean(every_other[:, ::2])
        return whole, mean(whole.copy()), every_other, mean(np.full((), 3, np.float32))

    for whole, mean, every_other, scalar in run_ranks(2, body):
        assert mean.tolist() == every_other.tolist() == whole.tolist()
        assert scalar == 3


@pytest.mark.parametrize(
    ("average", "count", "nbytes"),
    [
        (TopK(), 4096, 16 + 112),
        (TopK(), 1_000 * 4096, 16 + 112_000),
        (TopK(), 4096 + 1, 144),  # one element: a byte of codes and three of indices
        (TopK(), 10, 48),  # 16, 3 and 15 bytes
        (TopK(bits=16), 4096, 128 + 96),
        (TopK(bits=32), 4096, 256 + 96),
        (TopK(), 0, 16),
    ],
)
def test_bytes_that_a_rank_sends(average, count, nbytes):
    assert average.wire_nbytes(count) == nbytes

    def body(comm):
        mean, before = average.bind(comm), comm.counters["TopK"].wire_bytes
        mean(np.ones(count, np.float32))
        return comm.counters["TopK"].wire_bytes - before

    assert run_ranks(3, body) == [2 * (nbytes if count else 1)] * 3  # a barrier of threads sends a byte to each


@pytest.mark.parametrize("nodes", ["aabb", "aab"])
def test_sparse_between_nodes_and_exact_inside(nodes):
    xs = arrays_of(len(nodes), 200)
    result, _ = averaged(Hierarchical(TopK(64, 64, bits=32)), xs, nodes=nodes)
    np.testing.assert_allclose(result, sum(xs) / len(xs), atol=1e-6)
    result, _ = averaged(Hierarchical(TopK(50, 2, bits=32)), xs, nodes=nodes)
    assert 0 < np.count_nonzero(result) <= 2 * 2 * 4


# Golden bytes --------------------------------------------------------------------------------------------


def test_the_golden_file_equals_the_output_of_its_generator():
    script = GOLDEN / "make_top_k.py"
    assert subprocess.run([sys.executable, script, "--check"], timeout=300).returncode == 0


@pytest.mark.parametrize("module", [host, pytest.param(compiled, marks=pytest.mark.needs("numba"))])
@pytest.mark.parametrize("dtype", DTYPES)
def test_golden_bytes(dtype, module):
    found = [case for case in json.loads((GOLDEN / "top_k.json").read_text()) if case["dtype"] == dtype]
    assert len(found) > 50
    for case in found:
        n, m, settings = case["n"], case["m"], (case["chunk"], case["keep"], case["bits"])
        x = np.frombuffer(bytes.fromhex(case["input"]), dtype_named(dtype)).reshape(n, m).copy()
        wires = np.full((n, TopK(*settings).wire_nbytes(m)), 0xEE, np.uint8)
        mean = np.empty_like(x[0])
        for row, wire in zip(x, wires, strict=True):
            module.top_k_encode(row, wire, *settings)
        module.top_k_sum(wires, mean, *settings, "avg")
        for row, wire in zip(x, wires, strict=True):
            module.top_k_subtract(row, wire, *settings)
        assert wires.tobytes().hex() == case["wire"], case["name"]
        assert mean.tobytes().hex() == case["mean"], case["name"]
        assert x.tobytes().hex() == case["left"], case["name"]


# Bad input -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrap", [lambda average: average, ErrorFeedback, Hierarchical])
def test_ranks_with_other_settings_are_an_error_on_all_ranks(wrap):
    def body(comm):
        with pytest.raises((CommMismatch, ArrayError), match=r"keep=1[68].*but rank"):
            wrap(TopK(64, 16 if comm.rank else 18)).bind(comm)

    run_ranks(3, body, nodes="abc")


def test_ranks_with_other_sizes_are_an_error_on_all_ranks():
    def body(comm):
        mean = PLAIN.bind(comm)
        with pytest.raises(CommMismatch):
            mean(np.ones(64 * (1 + comm.rank), np.float32))

    run_ranks(2, body, check=True)
