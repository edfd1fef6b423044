"""The reduce-scatter and the gather in two levels, on nodes of equal and of different sizes."""

import numpy as np
import pytest
import torch

from bagua_comm import BFloat16, Exact, Hierarchical, Int4, MinMaxUInt8, Quantized, UnsupportedError
from bagua_comm.testing import run_ranks

EIGHT_BITS = Quantized(MinMaxUInt8(block=32), min_bytes=0)
NODES = [
    ["a"],
    ["a", "a"],
    ["a", "b"],
    ["a", "a", "b", "b"],
    ["a", "b", "a", "b"],
    ["a", "b", "b"],
    ["a", "a", "b", "a", "b", "c"],
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


@pytest.mark.covering(2)
@pytest.mark.parametrize("nodes", NODES, ids="".join)
@pytest.mark.parametrize("op", ["avg", "sum"])
@pytest.mark.parametrize(
    "average",
    [
        Hierarchical(),
        Hierarchical(EIGHT_BITS),
        Hierarchical(EIGHT_BITS, inside=Quantized(BFloat16())),
        Hierarchical(inside=EIGHT_BITS),
    ],
    ids=["exact", "eight bits", "sixteen inside", "eight inside"],
)
def test_every_rank_keeps_the_mean_of_its_chunk(nodes, op, average):
    p, m = len(nodes), 100
    xs, results = run(nodes, average, op, m)
    for rank, found in enumerate(results):
        wanted = mean(xs, rank, m) * (p if op == "sum" else 1)
        between = len(set(nodes)) > 1 and average.inner is EIGHT_BITS
        within = len(set(nodes)) < p and average.inside != Exact()
        limit = 8 / 255 * between + 8 / 255 * within + 1e-6
        assert np.abs(found - wanted).max() < limit * (p if op == "sum" else 1)
        if (between or within) and p > 2:
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


@pytest.mark.parametrize("nodes", ["aabb", "abab", "abb", "aabab"])
def test_inside_nodes_it_is_the_codec_on_the_array_of_each_rank(nodes):
    m, codec = 96, MinMaxUInt8(block=8)
    xs, results = run(nodes, Hierarchical(inside=Quantized(codec, min_bytes=0)), "avg", m)
    coded = [codec.decode(codec.encode(x.reshape(-1, m)), np.empty((len(nodes), m), np.float32)) for x in xs]
    for r, node in enumerate(nodes):
        if nodes.count(node) == 1:  # nothing is sent inside a node of one rank
            coded[r] = xs[r].reshape(-1, m)
    for rank, found in enumerate(results):
        np.testing.assert_allclose(found, np.mean([rows[rank] for rows in coded], axis=0), rtol=0, atol=1e-6)


# The gather

each_nodes = pytest.mark.parametrize("nodes", NODES, ids="".join)


def gathered(nodes, average, m, wrap=np.asarray):
    xs = arrays_of(len(nodes), m)

    def body(comm):
        out = wrap(np.full(len(nodes) * m, np.nan, np.float32))
        mine = out[comm.rank * m :][:m]  # as FSDP2 has it
        gather = average.bind_gather(comm)
        for _ in range(2):
            mine[...] = wrap(xs[comm.rank][:m])
            assert gather(mine, out) is out
        return np.asarray(out)

    return [x[:m] for x in xs], run_ranks(len(nodes), body, nodes=nodes)


@each_nodes
def test_an_exact_gather_has_the_chunks_of_all_ranks_in_their_order(nodes):
    xs, results = gathered(nodes, Hierarchical(), 100)
    assert {found.tobytes() for found in results} == {np.concatenate(xs).tobytes()}


@pytest.mark.covering(1)
@each_nodes
@pytest.mark.parametrize(
    "average",
    [
        Hierarchical(EIGHT_BITS),
        Hierarchical(EIGHT_BITS, inside=Quantized(BFloat16())),
        Hierarchical(inside=EIGHT_BITS),
    ],
    ids=["between", "both", "inside"],
)
def test_a_gather_encodes_each_chunk_once_on_all_ranks(nodes, average):
    xs, results = gathered(nodes, average, 100)
    codec = EIGHT_BITS.codec
    rows = np.stack(xs) if len(nodes) == 1 else codec.decode(codec.encode(np.stack(xs)), np.empty_like(xs))
    assert {found.tobytes() for found in results} == {rows.tobytes()}


def test_shards_may_be_tensors():
    nodes, average = ["a", "a", "b"], Hierarchical(EIGHT_BITS, inside=EIGHT_BITS)
    _, arrays = gathered(nodes, average, 64)
    _, tensors = gathered(nodes, average, 64, torch.tensor)
    assert [x.tobytes() for x in arrays] == [x.tobytes() for x in tensors]

    def body(comm):
        out = torch.zeros(2)
        assert Hierarchical().bind_shards(comm)(torch.arange(6.0), out, "avg") is out
        return out.tolist()

    assert run_ranks(3, body, nodes=nodes) == [[0, 1], [2, 3], [4, 5]]


def test_each_chunk_enters_a_node_once():
    nodes, m, codec = ["a", "a", "b", "b"], 1024, MinMaxUInt8()

    def body(comm):
        gather = Hierarchical(Quantized(codec, min_bytes=0)).bind_gather(comm)
        transports = [each.transports[0] for each in (comm, *comm.by_node())]
        before = [each.sent_bytes for each in transports]
        gather(np.ones(m, np.float32), np.zeros(4 * m, np.float32))
        return [each.sent_bytes - sent for each, sent in zip(transports, before, strict=True)]

    nbytes = codec.wire_nbytes(m, np.dtype("f4"))
    assert run_ranks(4, body, nodes=nodes) == [[0, 2 * nbytes, nbytes]] * 4


@pytest.mark.parametrize("nodes", ["aabb", "aaa"])
def test_each_gather_draws_other_random_numbers(nodes):
    def body(comm):
        gather = Hierarchical(Quantized(Int4(rounding="stochastic"), min_bytes=0)).bind_gather(comm)
        x = np.random.default_rng(comm.rank).standard_normal(256).astype(np.float32)
        return [gather(x, np.empty(comm.size * 256, np.float32)).tobytes() for _ in range(3)]

    assert all(len(set(found)) == 3 for found in run_ranks(len(nodes), body, nodes=nodes))


def test_a_gather_with_stochastic_rounding_is_the_same_on_all_ranks():
    xs, results = gathered("aabb", Hierarchical(Quantized(Int4(rounding="stochastic"), min_bytes=0)), 4096)
    assert len({found.tobytes() for found in results}) == 1
    errors = results[0] - np.concatenate(xs)
    nearest = gathered("aabb", Hierarchical(Quantized(Int4(), min_bytes=0)), 4096)[1][0] - np.concatenate(xs)
    assert np.linalg.norm(errors) > 1.2 * np.linalg.norm(nearest)


@pytest.mark.parametrize("nodes", ["aab", "ab"])
@pytest.mark.parametrize("bind", ["bind_shards", "bind_gather"])
def test_a_dtype_that_the_codec_cannot_code_is_refused_on_all_ranks_at_once(nodes, bind):
    """A rank of the larger node waited for its chunk; float64 was gathered through the codec in silence."""

    def body(comm):
        whole, chunk = np.ones(comm.size * 100), np.ones(100)
        bound = getattr(Hierarchical(EIGHT_BITS), bind)(comm)
        with pytest.raises(UnsupportedError, match="cannot code float64"):
            bound(whole, chunk, "avg") if bind == "bind_shards" else bound(chunk, whole)
        comm.barrier()

    run_ranks(len(nodes), body, nodes=nodes, timeout_s=20)


def test_small_arrays_are_exact():
    def body(comm):
        reduce = Hierarchical(Quantized(min_bytes=1 << 20)).bind_shards(comm)
        reduce(np.ones(8, np.float32), np.zeros(2, np.float32), "avg")
        return "quantized_reduce_scatter" in comm.counters.by_operation

    assert run_ranks(4, body, nodes=["a", "a", "b", "b"]) == [False] * 4
