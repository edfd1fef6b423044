"""The reduce-scatter in two levels, on nodes of equal and of different sizes."""

import numpy as np
import pytest

from bagua_comm import ArrayError, ErrorFeedback, Exact, Hierarchical, MinMaxUInt8, Quantized
from bagua_comm.testing import run_ranks

EIGHT_BITS = Quantized(MinMaxUInt8(block=32), min_bytes=0)
NODES = [
    ["a"],
    ["a", "a"],
    ["a", "b"],
    ["a", "a", "b", "b"],
    ["a", "b", "a", "b"],
    ["a", "b", "b"],
    ["a", "a", "b", "a", "b"],
    ["a", "a", "a", "a", "b", "c", "c"],
]


def arrays_of(p, m):
    return [np.random.default_rng(rank).standard_normal(p * m).astype(np.float32) for rank in range(p)]


def mean(xs, rank, m):
    """The exact mean of chunk `rank`."""
    return sum(x[rank * m :][:m].astype(np.float64) for x in xs) / len(xs)


def run(nodes, average, op, m):
    xs = arrays_of(len(nodes), m)

    def body(comm):
        reduce, out = average.bind_shards(comm), np.zeros(m, np.float32)
        for _ in range(2):
            assert reduce(xs[comm.rank].copy(), out, op) is out
        return out

    return xs, run_ranks(len(nodes), body, nodes=nodes)


@pytest.mark.parametrize("nodes", NODES, ids="".join)
@pytest.mark.parametrize("op", ["avg", "sum"])
@pytest.mark.parametrize("average", [Hierarchical(), Hierarchical(EIGHT_BITS)], ids=["exact", "eight bits"])
def test_every_rank_keeps_the_mean_of_its_chunk(nodes, op, average):
    p, m = len(nodes), 100
    xs, results = run(nodes, average, op, m)
    for rank, found in enumerate(results):
        wanted = mean(xs, rank, m) * (p if op == "sum" else 1)
        between = len(set(nodes)) > 1 and average.inner is EIGHT_BITS
        limit = 8 / 255 if between else 1e-6
        assert np.abs(found - wanted).max() < limit * (p if op == "sum" else 1)
        if between and p > 2:
            assert np.abs(found - wanted).max() > 1e-5  # it is quantized


@pytest.mark.parametrize("nodes", ["aabb", "aaabbbccc"])
def test_between_nodes_it_is_the_codec_on_means_of_nodes(nodes):
    m, codec = 96, EIGHT_BITS.codec
    xs, results = run(nodes, Hierarchical(EIGHT_BITS), "avg", m)
    for rank, found in enumerate(results):
        rows = []
        for name in dict.fromkeys(nodes):
            inside = [x[rank * m :][:m] for x, node in zip(xs, nodes, strict=True) if node == name]
            total = inside[0]
            for each in inside[1:]:
                total = total + each
            mean = (total / np.float32(len(inside)))[None]
            rows.append(codec.decode(codec.encode(mean), np.empty_like(mean))[0])
        total = rows[0]
        for row in rows[1:]:
            total = total + row
        assert (total / np.float32(len(rows))).tobytes() == found.tobytes()


def test_each_node_sends_a_share_of_the_bytes():
    nodes, m = ["a", "a", "a", "a", "b", "b", "b", "b"], 4096

    def body(comm):
        reduce = Hierarchical(EIGHT_BITS).bind_shards(comm)
        reduce(np.ones(8 * m, np.float32), np.zeros(m, np.float32), "avg")
        return comm.counters["quantized_reduce_scatter"].wire_bytes

    assert run_ranks(8, body, nodes=nodes) == [EIGHT_BITS.codec.wire_nbytes(m, np.dtype("f4"))] * 8


def test_small_arrays_are_exact():
    def body(comm):
        reduce = Hierarchical(Quantized(min_bytes=1 << 20)).bind_shards(comm)
        reduce(np.ones(8, np.float32), np.zeros(2, np.float32), "avg")
        return "quantized_reduce_scatter" in comm.counters.by_operation

    assert run_ranks(4, body, nodes=["a", "a", "b", "b"]) == [False] * 4


def test_an_average_with_a_state_is_refused():
    def body(comm):
        with pytest.raises(ArrayError, match=r"inner is ErrorFeedback.*, expected Exact"):
            Hierarchical(ErrorFeedback()).bind_shards(comm)
        Hierarchical(Exact()).bind_shards(comm)

    run_ranks(2, body)
