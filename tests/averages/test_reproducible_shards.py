"""Reproducible reduce-scatters: the bits of the sum of whole tensors, on any number of ranks."""

import numpy as np
import pytest

from bagua_comm import Reproducible
from bagua_comm.arrays import dtype_named
from bagua_comm.testing import run_ranks, sample

SHAPES = [(13, 7), (41, 1), (5, 300), (3, 3), (1, 129)]
ADDENDS = 12


def gradients(dtype="float32"):
    """The tensors of each microbatch, of very different sizes."""
    scales = [10.0 ** (3 * (i % 4) - 6) for i in range(ADDENDS)]
    return [
        [(sample(i, s, dtype) * scale).astype(dtype_named(dtype)) for s in SHAPES]
        for i, scale in enumerate(scales)
    ]


def parts(tensors, ranks):
    """All parts of all ranks, as FSDP2 lays them out."""
    rows = []
    for rank in range(ranks):
        for x in tensors:
            part = -(-len(x) // ranks)
            padded = np.zeros((part, x.shape[1]), x.dtype)
            mine = x[rank * part : (rank + 1) * part]
            padded[: len(mine)] = mine
            rows.append(padded.reshape(-1))
    return np.concatenate(rows)


def joined(results):
    """The whole tensors, one after the other, from the parts of all ranks."""
    whole, at = [], 0
    for rows, width in SHAPES:
        count = -(-rows // len(results)) * width
        whole.append(np.concatenate([x[at : at + count] for x in results])[: rows * width])
        at += count
    return np.concatenate(whole)


def sharded(ranks, addends, op="avg", block=128):
    share = len(addends) // ranks

    def body(comm):
        total = Reproducible(block, len(addends)).bind_shards(comm, SHAPES)
        out = np.full(total.size // ranks, np.nan, addends[0][0].dtype)
        for _ in range(2):
            for index in range(share):
                assert total(parts(addends[comm.rank * share + index], ranks), out, op) is out
                done = index == share - 1
                assert out.any() == done
                assert total.held == (0 if done else index + 1)
        return out

    return joined(run_ranks(ranks, body))


def unsharded(addends, block=128):
    """The mean by `Reproducible` of whole tensors, each of which begins a block."""

    def body(comm):
        sizes = [rows * width for rows, width in SHAPES]
        mean = Reproducible(block).bind(comm, sizes=sizes)
        return mean(np.concatenate([x.reshape(-1) for x in addends[comm.rank]]))

    return run_ranks(len(addends), body)[0]


@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64", "complex64"])
@pytest.mark.parametrize("block", [1, 50, 128])
def test_shards_have_the_same_bits_on_any_number_of_ranks_and_as_without_shards(block, dtype):
    addends = gradients(dtype)
    expected = unsharded(addends, block).tobytes()
    for ranks in (1, 2, 3, 4):
        assert sharded(ranks, addends, block=block).tobytes() == expected, ranks


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_with_an_addend_on_each_rank_they_have_the_bits_of_the_allreduce(ranks):
    addends = gradients()[:ranks]
    assert sharded(ranks, addends).tobytes() == unsharded(addends).tobytes()


def test_a_block_with_a_number_that_is_not_finite_becomes_nan_in_all_of_its_pieces():
    addends = gradients()
    addends[7][2][4, 299] = np.inf  # the last block of a tensor that four ranks share
    first = sum(rows * width for rows, width in SHAPES[:2])
    wrong = slice(first + 1408, first + 1500)
    found = sharded(4, addends)
    assert np.isnan(found[wrong]).all()
    assert np.isfinite(np.delete(found, wrong)).all()


def test_sums_are_not_divided():
    total, mean = (sharded(4, gradients(), op) for op in ("sum", "avg"))
    np.testing.assert_allclose(total, 12 * mean.astype(float), rtol=1e-6)


def test_each_rank_sends_its_parts_once():
    def body(comm):
        total = Reproducible().bind_shards(comm, [(400, 128)])
        before = comm.counters.total().wire_bytes
        total(np.ones(total.size, np.float32), np.zeros(total.size // 4, np.float32), "avg")
        return comm.counters.total().wire_bytes - before

    x, fields = 3 / 4 * 4 * 400 * 128, 2 * 3 / 4 * 401
    assert run_ranks(4, body) == [pytest.approx(x + fields, abs=16)] * 4
