"""Slabs of sharded arrays on their way to the ranks that need them."""

import numpy as np
import pytest

from bagua_comm import CommAborted
from bagua_comm.checkpoint.trees import Slab
from bagua_comm.elastic.snapshot import shards
from bagua_comm.elastic.snapshot.shards import LostStateError, even, interval_of, redistribute
from bagua_comm.testing import run_ranks

SHAPES = [(7, 3), (2, 8, 2), (1,), (5, 0)]


def wholes(chance):
    return [(chance.standard_normal(shape), chance.integers(len(shape))) for shape in SHAPES]


def slab(whole, axis, begin, end):
    part = np.take(whole, range(begin, end), axis)
    return Slab("x", part, axis, begin, whole.shape[axis])


def checked(slab):
    return slab, shards.checksum(slab.array)


def cuts(chance, total, ranks):
    """Intervals that cover an array, in a random order of the ranks."""
    at = [0, *sorted(chance.integers(0, total + 1, ranks - 1)), total]
    return [(int(at[n]), int(at[n + 1])) for n in chance.permutation(ranks)]


@pytest.mark.parametrize("seed", range(6))
def test_each_rank_receives_what_it_needs_of_random_slabs(seed):
    chance, ranks = np.random.default_rng(seed), 4
    arrays = wholes(chance)
    before, after = ([cuts(chance, x.shape[axis], ranks) for x, axis in arrays] for _ in range(2))
    copies = [cuts(chance, x.shape[axis], ranks) for x, axis in arrays]  # of others

    def body(comm):
        held = [
            [checked(slab(x, axis, *each[comm.rank])) for each in (first, second)]
            for (x, axis), first, second in zip(arrays, before, copies, strict=True)
        ]
        kinds = [slab(x, axis, 0, 0) for x, axis in arrays]
        wanted = [each[comm.rank] for each in after] if comm.rank else None
        return redistribute(comm, kinds, held, wanted)

    first, *others = run_ranks(ranks, body)
    assert first == []
    for rank, found in enumerate(others, 1):
        for (x, axis), needs, got in zip(arrays, after, found, strict=True):
            assert interval_of(got) == needs[rank]
            np.testing.assert_array_equal(got.array, slab(x, axis, *needs[rank]).array)


def test_no_rank_sends_what_the_other_has_itself():
    x = np.arange(8.0)

    def body(comm):
        redistribute(comm, [slab(x, 0, 0, 0)], [[checked(slab(x, 0, 0, 8))]], [even(8, 2)[comm.rank]])
        return comm.counters.by_operation["exchange"].payload_bytes

    assert run_ranks(2, body) == [0, 0]


def test_all_ranks_learn_what_none_of_them_holds():
    x = np.arange(8.0)

    def body(comm):
        mine = [[checked(slab(x, 0, *((0, 3) if comm.rank else (6, 8))))]] * 5
        with pytest.raises(LostStateError, match=r"indices 3 to 5 of 8 along axis 0 of x, .*, and 2 others"):
            redistribute(comm, [slab(x, 0, 0, 0)] * 5, mine, [(0, 8)] * 5 if comm.rank else None)

    run_ranks(3, body)


def test_a_damaged_slab_is_left_out_and_an_error_where_it_is_the_last_one():
    x = np.arange(8.0)

    def body(comm):
        kinds, good = [slab(x, 0, 0, 0)], checked(slab(x, 0, 0, 8))
        bad = slab(x + 1, 0, 0, 8), good[1]
        (found,) = redistribute(comm, kinds, [[good if comm.rank == 2 else bad]], [(comm.rank, 8)])
        np.testing.assert_array_equal(found.array, x[comm.rank :])
        with pytest.raises(LostStateError, match="indices 0 to 7 of 8"):
            redistribute(comm, kinds, [[bad]], [(0, 8)])

    run_ranks(3, body)


def test_a_piece_that_arrives_damaged_is_an_error_on_all_ranks(monkeypatch):
    """Else the others go on into training, and wait there."""
    x, real, seen = np.arange(8.0), shards.checksum, []
    monkeypatch.setattr(shards, "checksum", lambda piece: real(piece) + len(seen.append(piece) or seen))

    def body(comm):
        held = [[] if comm.rank else [(slab(x, 0, 0, 8), None)]]
        with pytest.raises(CommAborted, match="from rank 0 arrived damaged on rank 1"):
            redistribute(comm, [slab(x, 0, 0, 0)], held, [(0, 8)] if comm.rank == 1 else None)

    run_ranks(3, body)
