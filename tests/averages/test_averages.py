"""Quantized allreduce and the averages, over ranks that are threads."""

import functools
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import needs

import bagua_comm
from bagua_comm import (
    ArrayError,
    BFloat16,
    CommMismatch,
    ErrorFeedback,
    Exact,
    Float16,
    Hierarchical,
    Int4,
    MinMaxUInt8,
    Quantized,
    kernels,
    quantized_allreduce,
)
from bagua_comm.arrays import FLOATS, as_array, dtype_named
from bagua_comm.kernels import host
from bagua_comm.kernels.host import casts, minmax, numbers, sums
from bagua_comm.objects.caching import BoundedCache
from bagua_comm.testing import Recording, run_ranks

SIZES = (1, 2, 5)
SHAPES = [(), (0,), (3, 0), (1,), (7,), (16,), (1000,), (2, 3, 5)]
CODECS = [MinMaxUInt8(), MinMaxUInt8(block=5), MinMaxUInt8.bagua(), Float16(), BFloat16(), Int4()]

examples = settings(deadline=None, derandomize=True, max_examples=25)
each_size = pytest.mark.parametrize("p", SIZES)


def normal(p, shape, dtype="float32", seed=0):
    """An array for each of p ranks."""
    random = np.random.default_rng(seed)
    return [np.asarray(random.standard_normal(shape)).astype(dtype_named(dtype)) for _ in range(p)]


def allreduced(xs, codec, op):
    """The expected result: the steps of the quantized allreduce on a list of float32 arrays."""
    p, shape, size = len(xs), xs[0].shape, xs[0].size
    if p == 1 or size == 0:
        return xs[0]
    m = -(-size // p)
    wires = []  # of each rank: its p chunks, encoded
    for x in xs:
        padded = np.zeros(p * m, np.float32)
        padded[:size] = x.reshape(-1)
        wires.append(codec.encode(padded.reshape(p, m)))
    chunks = []
    for r in range(p):  # the owner of chunk r
        if isinstance(codec, Int4):  # adds rotated elements
            total = codec.combine(np.stack([wire[r] for wire in wires]), op=op, count=m, dtype=np.float32)
            chunks.append(codec.decode(total, np.empty((1, m), np.float32)))
            continue
        parts = [codec.decode(wire[r : r + 1], np.empty((1, m), np.float32)) for wire in wires]
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        if op == "avg":
            total = total / np.float32(p)
        chunks.append(codec.decode(codec.encode(total), np.empty((1, m), np.float32)))
    return np.concatenate(chunks).reshape(-1)[:size].reshape(shape)


def assert_same_bytes(expected, actual):
    assert (expected.shape, expected.dtype) == (actual.shape, actual.dtype)
    assert expected.tobytes() == actual.tobytes()


# Quantized allreduce: values


@each_size
@pytest.mark.parametrize("codec", CODECS, ids=repr)
def test_quantized_allreduce_of_any_shape_is_its_steps_in_numpy(p, codec):
    inputs = [(normal(p, shape, seed=i), op) for i, shape in enumerate(SHAPES) for op in ("sum", "avg")]

    def body(comm):
        return [quantized_allreduce(comm, xs[comm.rank], codec=codec, op=op) for xs, op in inputs]

    expected = [allreduced(xs, codec, op) for xs, op in inputs]
    for results in run_ranks(p, body):
        for wanted, actual in zip(expected, results, strict=True):
            assert_same_bytes(wanted, actual)


@examples
@given(
    p=st.sampled_from(SIZES),
    shape=st.lists(st.integers(0, 9), max_size=3).map(tuple),
    block=st.sampled_from([1, 3, 64, None]),
    op=st.sampled_from(["sum", "avg"]),
    seed=st.integers(0, 1000),
)
def test_quantized_allreduce_is_its_steps_in_numpy(p, shape, block, op, seed):
    xs, codec = normal(p, shape, seed=seed), MinMaxUInt8(block=block)
    expected = allreduced(xs, codec, op)
    for actual in run_ranks(p, lambda comm: quantized_allreduce(comm, xs[comm.rank], codec=codec, op=op)):
        assert_same_bytes(expected, actual)


@each_size
@pytest.mark.parametrize("op", ["sum", "avg"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_quantized_allreduce_is_near_the_exact_result(p, dtype, op):
    xs = normal(p, (999,), dtype)
    wide = np.stack(xs).astype(float)
    exact = wide.mean(axis=0) if op == "avg" else wide.sum(axis=0)
    # Half a step for what each rank sends, half a step for what the owner sends; rounding of values.
    widest = max(np.ptp(x) for x in wide)
    rounding = {"float32": 1e-6, "float16": 2.0**-10, "bfloat16": 2.0**-7}[dtype]
    bound = (widest / 255 + rounding * np.abs(wide).max()) * (p if op == "sum" else 1)

    def body(comm):
        result = quantized_allreduce(comm, xs[comm.rank], op=op)
        comm.check_consistency(result)
        return result

    for actual in run_ranks(p, body):
        assert (actual.shape, actual.dtype) == ((999,), dtype_named(dtype))
        assert np.abs(actual.astype(float) - exact).max() <= bound


def test_quantized_allreduce_by_hand():
    # Both chunks have whole numbers from 0 to 255 as levels on both ranks, and so has their mean.
    xs = [np.array([0, 1, 255, 0, 7, 255], np.float32), np.array([0, 3, 255, 0, 9, 255], np.float32)]
    results = run_ranks(2, lambda comm: quantized_allreduce(comm, xs[comm.rank], op="avg"))
    assert [x.tolist() for x in results] == [[0, 2, 255, 0, 8, 255]] * 2


def test_scratch_of_a_longer_array_is_not_read():
    longer, shorter = normal(3, (1000,)), normal(3, (10,), seed=1)  # 3 ranks pad 10 elements to 12

    def body(comm):
        quantized_allreduce(comm, longer[comm.rank])
        return quantized_allreduce(comm, shorter[comm.rank])

    for actual in run_ranks(3, body):
        assert_same_bytes(allreduced(shorter, MinMaxUInt8(), "sum"), actual)


def test_a_nan_of_one_rank_is_seen_by_all_in_its_block_alone():
    codec = MinMaxUInt8(block=4)
    xs = normal(3, (24,))  # chunks of 8: two blocks each
    expected = allreduced(xs, codec, "avg")
    expected[12:16] = np.nan
    xs[1][13] = np.nan
    for actual in run_ranks(3, lambda comm: quantized_allreduce(comm, xs[comm.rank], codec=codec, op="avg")):
        np.testing.assert_array_equal(expected, actual)


def test_a_single_rank_gets_its_array_back_unrounded():
    x = normal(1, (100,))[0]
    (actual,) = run_ranks(1, lambda comm: quantized_allreduce(comm, x, op="avg"))
    assert_same_bytes(x, actual)
    assert not np.shares_memory(x, actual)


# Quantized allreduce: where the result goes


@each_size
@pytest.mark.parametrize("shape", [(7,), (16, 3), ()])
def test_out_may_be_the_array_itself_or_another(p, shape):
    xs = normal(p, shape)
    expected = allreduced(xs, MinMaxUInt8(), "sum")

    def body(comm):
        x = xs[comm.rank].copy()
        apart = np.full_like(x, 7)
        assert quantized_allreduce(comm, x, out=apart) is apart
        assert_same_bytes(xs[comm.rank], x)
        assert quantized_allreduce(comm, x, out=x) is x
        return apart, x

    for apart, in_place in run_ranks(p, body):
        assert_same_bytes(expected, apart)
        assert_same_bytes(expected, in_place)


@each_size
def test_arrays_that_are_not_contiguous(p):
    xs = normal(p, (6, 5))
    expected = allreduced([np.ascontiguousarray(x.T) for x in xs], MinMaxUInt8(), "sum")

    def body(comm):
        table = np.zeros((5, 12), np.float32)
        strided = table[:, ::2]
        fresh = quantized_allreduce(comm, xs[comm.rank].T)
        assert quantized_allreduce(comm, xs[comm.rank].T, out=strided) is strided
        first = strided.copy()
        strided[...] = xs[comm.rank].T
        quantized_allreduce(comm, strided, out=strided)
        assert not table[:, 1::2].any()
        return fresh, first, strided.copy()

    for results in run_ranks(p, body):
        for actual in results:
            assert_same_bytes(expected, actual)


# Quantized allreduce: what it costs


@each_size
@pytest.mark.parametrize("count", [3, 4096, 5000])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_each_rank_sends_two_p_minus_one_chunks_on_the_wire(p, count, dtype):
    codec = MinMaxUInt8()
    chunk = -(-count // p)
    w = codec.wire_nbytes(chunk, dtype_named(dtype))  # an encoded chunk; an encoded array is p of them

    def body(comm):
        quantized_allreduce(comm, np.ones(count, dtype), codec=codec)
        return comm.counters.total().wire_bytes

    assert run_ranks(p, body) == [2 * (p - 1) * w] * p


@pytest.mark.parametrize("p", [2, 3, 8])
def test_it_is_one_alltoall_and_one_allgather(p):
    w = MinMaxUInt8().wire_nbytes(-(-1000 // p), np.dtype("float32"))

    def body(comm):
        quantized_allreduce(comm, np.ones(1000, np.float32))
        return comm.transports[0].calls

    assert run_ranks(p, body, wrap=Recording) == [[("alltoall", p * w), ("allgather", w)]] * p


@pytest.mark.parametrize(("p", "count", "nbytes"), [(1, 1000, []), (4, 0, [0])])
def test_nothing_moves_where_there_is_nothing_to_do(p, count, nbytes):
    def body(comm):
        quantized_allreduce(comm, np.ones(count, np.float32))
        return [sent for _, sent in comm.transports[0].calls]

    assert run_ranks(p, body, wrap=Recording) == [nbytes] * p


# Quantized allreduce: refusals


# Averages


def averaged(average, xs, nodes=None):
    """Average the arrays in place, one for each rank; returns them, after checking that they are equal."""

    def body(comm):
        x = xs[comm.rank].copy()
        mean = average.bind(comm)
        assert mean(x) is x
        comm.check_consistency(x)
        return x

    return run_ranks(len(xs), body, nodes=nodes)


@each_size
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
def test_exact_is_the_mean_rounded_once(p, dtype):
    xs = normal(p, (101,), dtype)
    total = xs[0].astype(np.float64 if dtype == "float64" else np.float32)
    for x in xs[1:]:
        total = total + x.astype(total.dtype)
    expected = (total / total.dtype.type(p)).astype(xs[0].dtype)
    for actual in averaged(Exact(), xs):
        assert_same_bytes(expected, actual)


def test_quantized_is_the_average_of_quantized_allreduce():
    xs, codec = normal(4, (5, 3)), MinMaxUInt8(block=8)
    for actual in averaged(Quantized(codec), xs):
        assert_same_bytes(allreduced(xs, codec, "avg"), actual)


LAYOUTS = {
    "one node": [0, 0, 0],
    "a node for each rank": [0, 1, 2, 3],
    "equal nodes": [0, 0, 1, 1],
    "equal nodes, interleaved": ["a", "b", "a", "b"],
    "3 and 1": [0, 0, 0, 1],
    "1, 2 and 1": [0, 1, 1, 2],
    "3, 2 and 3, interleaved": [0, 1, 2, 0, 2, 1, 2, 0],
    "one rank": [0],
}
each_layout = pytest.mark.parametrize("nodes", LAYOUTS.values(), ids=LAYOUTS.keys())


@pytest.mark.covering(1)
@each_layout
@pytest.mark.parametrize("dtype", sorted(FLOATS))
def test_hierarchical_is_the_true_mean(nodes, dtype):
    rounding = {"float64": 2.0**-53, "float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}[dtype]
    inputs = [normal(len(nodes), shape, dtype) for shape in SHAPES]

    def body(comm):
        mean = Hierarchical().bind(comm)
        return [mean(xs[comm.rank].copy()) for xs in inputs]

    for results in run_ranks(len(nodes), body, nodes=nodes):
        for xs, actual in zip(inputs, results, strict=True):
            wide = np.stack(xs).astype(float)
            assert (actual.shape, actual.dtype) == (xs[0].shape, xs[0].dtype)
            error = np.abs(actual.astype(float) - wide.mean(axis=0)).max(initial=0)
            assert error <= 8 * rounding * np.abs(wide).max(initial=0)


@each_layout
def test_hierarchical_is_exact_for_numbers_that_divide(nodes):
    random = np.random.default_rng(0)
    xs = [288.0 * random.integers(-100, 100, 50) for _ in nodes]  # by 2, 3 or 4, times n / 8, by 3 or 2
    for actual in averaged(Hierarchical(), [x.astype(np.float32) for x in xs], nodes):
        assert np.mean(xs, axis=0).tolist() == actual.tolist()


@pytest.mark.parametrize(
    ("nodes", "codec"),
    [
        *((nodes, MinMaxUInt8(block=4)) for nodes in LAYOUTS.values()),
        *((LAYOUTS["3 and 1"], codec) for codec in (MinMaxUInt8(), Float16())),
    ],
    ids=str,
)
def test_hierarchical_quantized_is_near_the_mean_and_equal_on_all_ranks(nodes, codec):
    xs = normal(len(nodes), (201,))
    exact = np.mean(xs, axis=0, dtype=float)
    heaviest = max(nodes.count(node) for node in nodes) * len(set(nodes)) / len(nodes)
    bound = heaviest * max(np.ptp(x) for x in xs) / 255 + 1e-5
    for actual in averaged(Hierarchical(Quantized(codec)), xs, nodes):
        assert np.abs(actual - exact).max() <= bound


@pytest.mark.covering(1)
@each_layout
@pytest.mark.parametrize("codec", [MinMaxUInt8(block=4), MinMaxUInt8(None), BFloat16()], ids=repr)
def test_a_codec_inside_nodes_rounds_what_enters_and_leaves_them_to_the_same_bytes_everywhere(nodes, codec):
    xs, inside = normal(len(nodes), (201,)), Quantized(codec, min_bytes=0)
    members = {label: [x for x, each in zip(xs, nodes, strict=True) if each == label] for label in nodes}
    owners = min(map(len, members.values()))
    if max(map(len, members.values())) == 1:
        expected = np.mean(xs, axis=0)  # no node has two ranks, so nothing is rounded
    else:
        chunks = [coded_chunks(rows, owners, codec) for rows in members.values()]
        counts = [len(rows) for rows in members.values()]
        expected = np.average(chunks, axis=0, weights=counts).astype(np.float32)
        expected = coded_chunks([expected], owners, codec, alone=False)[: xs[0].size]
    results = averaged(Hierarchical(inside=inside), xs, nodes)
    for actual in results:
        assert actual.tobytes() == results[0].tobytes()
    step = 2.0 * max(np.ptp(x) for x in xs) / 255  # a rounding in the last bit may choose the next code
    assert np.abs(results[0] - expected[: xs[0].size]).max() <= step
    assert (np.abs(results[0] - expected[: xs[0].size]) < 1e-5).mean() > 0.9


def coded_chunks(rows, parts, codec, alone=True):
    """The mean of arrays, each padded to `parts` chunks that are encoded and decoded; a single one is not."""
    size = -(-rows[0].size // parts)
    padded = [np.concatenate([x, np.zeros(parts * size - x.size, np.float32)]).reshape(parts, size) for x in rows]
    if len(rows) == 1 and alone:
        return padded[0].reshape(-1)
    return np.mean([codec.decode(codec.encode(x), np.empty_like(x)) for x in padded], axis=0).reshape(-1)


def test_small_arrays_are_exact_inside_nodes_too():
    xs = normal(3, (50,))
    for actual in averaged(Hierarchical(inside=Quantized(min_bytes=201)), xs, [0, 0, 1]):
        np.testing.assert_allclose(actual, np.mean(xs, axis=0), rtol=1e-5, atol=1e-6)


def test_ranks_with_other_settings_are_refused_on_all():
    def body(comm):
        average = Hierarchical(inside=Quantized()) if comm.rank == 2 else Hierarchical()
        messages = []
        for bind in (average.bind, average.bind_shards, average.bind_gather):
            with pytest.raises(ArrayError) as info:
                bind(comm)
            messages.append(str(info.value))
        return messages

    for average, *shards in run_ranks(3, body, nodes=[0, 0, 1]):
        assert "ranks differ: rank 0 has inside=Exact(), but rank 2 has inside=Quantized(" in average
        for message in shards:
            assert "rank 0 has Hierarchical(inner=Exact()), but rank 2 has Hierarchical(" in message


def test_one_bound_average_serves_arrays_of_any_size():
    inputs = [normal(4, (size,), seed=size) for size in (1000, 3, 0, 10, 1000)]

    def body(comm):
        mean = Hierarchical().bind(comm)
        return [mean(xs[comm.rank].copy()) for xs in inputs]

    for results in run_ranks(4, body, nodes=[0, 0, 0, 1]):
        for xs, actual in zip(inputs, results, strict=True):
            np.testing.assert_allclose(actual, np.mean(xs, axis=0), rtol=1e-6, atol=1e-6)


def test_hierarchies_nest():
    xs = normal(4, (33,))
    (first, *others) = averaged(Hierarchical(Hierarchical(Exact())), xs, nodes=[0, 0, 1, 1])
    np.testing.assert_allclose(first, np.mean(xs, axis=0), rtol=1e-6, atol=1e-6)
    assert len(others) == 3


def stage_bytes(average):
    """The bytes that each of 2 x 2 ranks sends inside its node and across nodes, averaging 4096 float32."""

    def body(comm):
        mean = average.bind(comm, np.ones(4096, np.float32))
        intra, inter = comm.by_node()
        groups = [group.transports[0] for group in (comm, intra, inter)]
        before = [transport.sent_bytes for transport in groups]
        counted = comm.counters.total().wire_bytes
        mean(np.ones(4096, np.float32))
        outside, inside, across = (t.sent_bytes - b for t, b in zip(groups, before, strict=True))
        assert outside == 0
        assert comm.counters.total().wire_bytes - counted == inside + across
        return inside, across

    return run_ranks(4, body, nodes=[0, 0, 1, 1])


def test_a_codec_inside_a_hierarchy_encodes_only_traffic_between_nodes():
    half, quarter = 2048 * 4, 1024 * 4  # of the array in bytes, and of that again
    assert stage_bytes(Hierarchical(Exact())) == [(half + half, quarter + quarter)] * 4
    encoded = 32 + 1024
    assert stage_bytes(Hierarchical(Quantized())) == [(half + half, encoded + encoded)] * 4
    inside = 32 + 2048
    both = Hierarchical(Quantized(), inside=Quantized())
    assert stage_bytes(both) == [(inside + inside, encoded + encoded)] * 4


@pytest.mark.parametrize(
    ("average", "width", "count"),
    [(Quantized(), 1, 2**21), (Quantized(), 1, 2**21 - 1), (Exact(), 4, 2**21), (Hierarchical(), 4, 2**21 - 1)],
)
def test_repeated_calls_keep_no_memory_and_take_none_but_for_messages(average, width, count, monkeypatch):
    for module in (casts, minmax, numbers, sums):
        monkeypatch.setattr(module, "PIECE", 2**14)  # so that messages stand out
    monkeypatch.setattr(minmax, "SPAN", 2**14)

    def body(comm):
        x = np.ones(count, np.float32)
        mean = average.bind(comm)
        mean(x)
        comm.barrier()
        if comm.rank == 0:
            tracemalloc.start()
        comm.barrier()
        for _ in range(2):
            mean(x)
        comm.barrier()
        traced = tracemalloc.get_traced_memory() if comm.rank == 0 else None
        comm.barrier()
        if comm.rank == 0:
            tracemalloc.stop()
        return traced

    kept, peak = run_ranks(2, body)[0]

    assert kept < 100_000
    assert peak < 1.5 * width * count + 500_000  # at most three messages of half an array each


@pytest.mark.parametrize("dtype", ["complex64", "complex128"])
@pytest.mark.parametrize(
    ("average", "nodes"), [(Exact(), [0, 0]), *((Hierarchical(), each) for each in ([0, 0, 1, 1], [0, 0, 1]))]
)
def test_complex_numbers_have_an_exact_mean(average, nodes, dtype):
    rng = np.random.default_rng(0)
    xs = [(rng.integers(-9, 9, 37) + 1j * rng.integers(-9, 9, 37)).astype(dtype) for _ in nodes]
    for actual in averaged(average, xs, nodes):
        assert actual.dtype == dtype
        np.testing.assert_allclose(actual, sum(xs) / len(xs), rtol=1e-6)


@pytest.mark.parametrize(
    ("average", "text"),
    [
        (Exact(), "Exact()"),
        (Quantized(), "Quantized(codec=MinMaxUInt8(block=512, eps=0.0), min_bytes=None)"),
        (Quantized(Float16()), "Quantized(codec=Float16(), min_bytes=None)"),
        (Hierarchical(), "Hierarchical(inner=Exact())"),
        (  # settings that are defaults do not change the name in checkpoints
            ErrorFeedback(decay=0),
            "ErrorFeedback(inner=Quantized(codec=MinMaxUInt8(block=512, eps=0.0), min_bytes=None))",
        ),
        (
            Hierarchical(inside=Quantized(Float16())),
            "Hierarchical(inner=Exact(), inside=Quantized(codec=Float16(), min_bytes=None))",
        ),
        (
            Hierarchical(Quantized(MinMaxUInt8(block=64))),
            "Hierarchical(inner=Quantized(codec=MinMaxUInt8(block=64, eps=0.0), min_bytes=None))",
        ),
    ],
)
def test_averages_are_values_and_nest(average, text):
    assert repr(average) == text
    assert eval(text, vars(bagua_comm)) == average
    assert len({average, eval(text, vars(bagua_comm))}) == 1


@pytest.mark.parametrize("sizes", [(1000, 2000), (1000, 1001)], ids=["bytes differ", "as many bytes"])
def test_arrays_of_different_sizes_raise_on_all_ranks(sizes):
    def body(comm):
        with pytest.raises(CommMismatch):
            quantized_allreduce(comm, np.ones(sizes[comm.rank], np.float32))
        return "told"

    assert run_ranks(2, body) == ["told", "told"]


# Found by trying: what used to go wrong


@pytest.mark.parametrize("average", [Quantized(min_bytes=0), Hierarchical(Quantized(min_bytes=0))], ids=str)
def test_a_rank_whose_array_is_empty_does_not_go_on_alone(average):
    def body(comm):
        average.bind(comm)(np.ones(0 if comm.rank == 1 else 5, np.float32))

    with pytest.raises(CommMismatch):
        run_ranks(3, body, timeout_s=5)


def test_means_of_unequal_nodes_in_16_bits_are_not_all_off_alike():
    def body(comm):
        x = normal(3, (20_000,), "bfloat16")[comm.rank]
        return x.astype(float), Hierarchical().bind(comm)(x.copy()).astype(float)

    xs, means = zip(*run_ranks(3, body, nodes=[0, 0, 1]), strict=True)
    expected = np.mean(xs, axis=0)
    assert abs(means[0] @ expected / (expected @ expected) - 1) < 1e-4  # 0.0018 if weights are rounded


def test_hierarchical_keeps_finite_values_finite_on_nodes_of_unequal_size():
    def body(comm):
        return Hierarchical().bind(comm)(np.full(5, 60000, np.float16))

    for mean in run_ranks(4, body, nodes=[0, 0, 0, 1]):
        assert mean.tolist() == [60000] * 5


@pytest.mark.parametrize("average", [Exact(), Hierarchical(), Quantized()], ids=repr)
@pytest.mark.parametrize("nodes", [[0, 0, 1, 1], [0, 0, 0, 1]])
def test_averages_take_strided_arrays_in_place(average, nodes):
    def body(comm):
        x = np.zeros((6, 8), np.float32)
        strided = x[::2, ::4]
        strided[...] = comm.rank
        assert average.bind(comm)(strided) is strided
        return x

    for x in run_ranks(4, body, nodes=nodes):
        assert x[::2, ::4].tolist() == [[1.5, 1.5]] * 3
        assert x.sum() == 9


def test_different_codecs_of_ranks_are_found_by_the_call_check():
    def body(comm):
        codec = MinMaxUInt8(eps=1e-7 * comm.rank)
        with pytest.raises(CommMismatch, match=r"eps=0.0.* but rank 1 called .*eps=1e-07"):
            quantized_allreduce(comm, np.zeros(4, np.float32), codec=codec)

    run_ranks(2, body, check=True)


def test_small_arrays_are_averaged_exactly_and_the_trace_says_so():
    def body(comm):
        mean, spans = Quantized(min_bytes=400).bind(comm), comm.tracer.spans
        small = mean(normal(4, 99)[comm.rank])
        names = [span.name for span in spans()]
        large = mean(normal(4, 100)[comm.rank])
        return small, names, large, [span.name for span in spans()][len(names) :]

    for small, names, large, later in run_ranks(4, body):
        np.testing.assert_allclose(small, np.mean(normal(4, 99), axis=0), rtol=1e-6)
        assert names == ["allreduce", "exact: small"]
        assert later == ["quantized_allreduce"]
        assert 1e-4 < np.abs(large - np.mean(normal(4, 100), axis=0)).max() < 0.1


def test_the_size_from_which_quantizing_pays_is_the_transports_own():
    def body(comm):
        comm.transports[0].quantize_bytes = 401
        Quantized().bind(comm)(np.ones(100, np.float32))
        return comm.tracer.spans()[-1].args

    assert run_ranks(2, body)[0] == {"bytes": 400, "min_bytes": 401}


@pytest.mark.parametrize("count", [1, 64, 1000])
@pytest.mark.parametrize("call", ["allreduce", "reduce_scatter", "allgather", "alltoall"])
def test_collectives_in_pieces_give_the_bytes_of_those_that_go_at_once(call, count):
    def body(comm):
        x = normal(3, 3 * count)[comm.rank]
        at_once = getattr(comm, call)(x)
        comm.transports[0].piece_bytes = 100
        return at_once.tobytes() == getattr(comm, call)(x).tobytes()

    assert run_ranks(3, body) == [True] * 3


# Bound averages


def settled_and_direct(average, make):
    """The results of an average that was prepared for other arrays, and of the call on a copy."""

    def body(comm):
        mean = average.bind(comm, np.zeros(1000, np.float32))
        mean(normal(2, 1000)[comm.rank])
        x = make(comm.rank)
        copy = as_array(x).copy()
        assert mean(x) is x
        quantized_allreduce(comm, copy, out=copy, op="avg")
        return as_array(x), copy

    return run_ranks(2, body)


def of_shape(shape):
    return lambda rank: np.asarray(np.random.default_rng(rank).standard_normal(shape)).astype(np.float16)


@pytest.mark.parametrize(
    "make",
    [
        *(lambda rank, step=step: normal(2, 3000)[rank][::step] for step in (2, -1, -3)),
        *(of_shape(shape) for shape in ((), (1,), (0,), (7, 3), (1000,))),
        lambda rank: needs.package("torch").from_numpy(normal(2, 1000)[rank].copy()),
    ],
)
def test_a_bound_average_takes_arrays_with_gaps_of_other_sizes_and_dtypes_and_tensors(make):
    for mean, expected in settled_and_direct(Quantized(min_bytes=0), make):
        assert mean.tobytes() == expected.tobytes()


class Unfrozen(MinMaxUInt8):
    __hash__ = None


def test_a_codec_that_has_no_hash_is_taken_all_the_same():
    x = normal(2, 1000)
    results = run_ranks(2, lambda comm: quantized_allreduce(comm, x[comm.rank], codec=Unfrozen()).tobytes())
    assert results == run_ranks(2, lambda comm: quantized_allreduce(comm, x[comm.rank]).tobytes())


class WatchedCache(BoundedCache):
    def __init__(self, limit):
        super().__init__(limit)
        self.looks, self.added = [], []

    def get(self, key):
        self.looks.append(key)
        return super().get(key)

    def __setitem__(self, key, value):
        self.added.append(key)
        super().__setitem__(key, value)


@pytest.mark.parametrize("bound", [True, False])
def test_each_call_looks_once_for_a_prepared_reduction(bound):
    def body(comm):
        mean = Quantized(min_bytes=0).bind(comm) if bound else functools.partial(quantized_allreduce, comm)
        cache = comm.call_cache = WatchedCache(10)
        for _ in range(2):
            mean(normal(2, 1000)[comm.rank])
        return len(cache.looks), len(cache.added)

    assert run_ranks(2, body) == [(2, 1)] * 2


def test_a_reduction_is_prepared_once_for_arrays_of_another_library():
    torch = needs.package("torch")

    def body(comm):
        cache = comm.call_cache = WatchedCache(10)
        for _ in range(2):
            quantized_allreduce(comm, torch.from_numpy(normal(2, 1000)[comm.rank].copy()))
        return len(cache.added)

    assert run_ranks(2, body) == [1, 1]


@pytest.mark.needs("numba")
@pytest.mark.parametrize("bound", [True, False])
def test_the_kernels_chosen_now_work_though_others_did_before(bound, monkeypatch):
    encoded, encode = [], host.minmax_encode
    monkeypatch.setattr(
        host, "minmax_encode", lambda *args, **more: (encoded.append(1), encode(*args, **more))[1]
    )

    def body(comm):
        mean = Quantized(min_bytes=0).bind(comm) if bound else functools.partial(quantized_allreduce, comm)
        x = normal(2, 1000)[comm.rank]
        with kernels.use("compiled"):
            mean(x)
        before = len(encoded)
        comm.barrier()
        with kernels.use("host"):
            mean(x)
        return before, len(encoded)

    assert all(before == 0 < after for before, after in run_ranks(2, body))
