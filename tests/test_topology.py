"""All ranks' answers fit together, and give what the papers promise."""

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bagua_comm import ArrayError
from bagua_comm.topology import Place, one_peer_exponential, place, ring, shift_one

examples = settings(deadline=None, derandomize=True, max_examples=50)
sizes = st.integers(1, 40)
even_sizes = st.integers(1, 20).map(lambda half: 2 * half)
steps = st.integers(0, 10_000)


# Ring


@examples
@given(size=sizes)
def test_ring_neighbours_are_mutual(size):
    for rank in range(size):
        left, right = ring(rank, size)
        assert rank == ring(left, size).right
        assert rank == ring(right, size).left


@examples
@given(size=sizes)
def test_walking_right_visits_every_rank_once(size):
    rank, met = 0, []
    for _ in range(size):
        met.append(rank)
        rank = ring(rank, size).right
    assert rank == 0
    assert list(range(size)) == met


def test_small_rings():
    assert ring(0, 1) == (0, 0)
    assert ring(0, 2) == (1, 1)
    assert ring(2, 3) == (1, 0)


# shift_one


def bagua_shift_one(r, n, s):
    """Bagua's peer selection, from its `decentralized_full_precision_synchronous.rs`."""
    if r < n // 2:
        return ((s + r) % ((n + 1) // 2)) + n // 2
    return (r - n // 2 - s) % (n // 2)


@examples
@given(size=even_sizes, step=steps)
def test_shift_one_pairs_are_mutual_and_cross_halves(size, step):
    peers = [shift_one(rank, size, step) for rank in range(size)]
    assert [peers[peer] for peer in peers] == list(range(size))
    assert all((peer < size // 2) != (rank < size // 2) for rank, peer in enumerate(peers))


@examples
@given(size=even_sizes, step=steps)
def test_shift_one_pairs_each_rank_with_every_partner_once_in_half_the_size_of_steps(size, step):
    half = size // 2
    for rank in range(size):
        met = sorted(shift_one(rank, size, step + i) for i in range(half))
        assert met == list(range(half, size) if rank < half else range(half))


@examples
@given(size=even_sizes, step=steps)
def test_shift_one_is_baguas(size, step):
    expected = [bagua_shift_one(rank, size, step) for rank in range(size)]
    assert expected == [shift_one(rank, size, step) for rank in range(size)]


@pytest.mark.parametrize("size", [1, 3, 7])
def test_shift_one_refuses_an_odd_number_of_ranks(size):
    with pytest.raises(ArrayError) as caught:
        shift_one(0, size, 0)
    message = f'shift_one pairs ranks, so it needs an even number of them; got {size} (use peers="all")'
    assert message == str(caught.value)


# One-peer exponential graph


@examples
@given(size=sizes, step=steps)
def test_my_destination_has_me_as_its_source(size, step):
    for rank in range(size):
        dest, source = one_peer_exponential(rank, size, step)
        assert rank == one_peer_exponential(dest, size, step).source
        assert rank == one_peer_exponential(source, size, step).dest


@examples
@given(size=sizes, step=steps)
def test_each_step_is_a_permutation_without_fixed_points(size, step):
    dests = [one_peer_exponential(rank, size, step).dest for rank in range(size)]
    assert sorted(dests) == list(range(size))
    assert all(dest != rank for rank, dest in enumerate(dests)) or size == 1


@examples
@given(exponent=st.integers(0, 6), first=steps, data=st.data())
def test_averaging_over_log2_steps_gives_the_exact_mean(exponent, first, data):
    size = 2**exponent
    values = data.draw(st.lists(st.integers(-1000, 1000), min_size=size, max_size=size))
    now = [Fraction(value) for value in values]
    for step in range(first, first + exponent):
        now = [(now[r] + now[one_peer_exponential(r, size, step).source]) / 2 for r in range(size)]
    assert [Fraction(sum(values), size)] * size == now


@pytest.mark.parametrize(
    ("size", "hops"), [(2, [1, 1, 1]), (3, [1, 2, 1]), (4, [1, 2, 1]), (5, [1, 2, 4, 1]), (8, [1, 2, 4, 1])]
)
def test_hops_double_until_they_would_reach_around(size, hops):
    assert hops == [one_peer_exponential(0, size, step).dest for step in range(len(hops))]


def test_a_single_rank_is_its_own_peer():
    assert one_peer_exponential(0, 1, step=5) == (0, 0)


# Places


@examples
@given(labels=st.lists(st.sampled_from("abcd"), min_size=1, max_size=12))
def test_places_number_nodes_by_first_rank_and_ranks_within_them(labels):
    nodes, members = [], {}
    for rank, label in enumerate(labels):
        if label not in nodes:
            nodes.append(label)
        members.setdefault(label, []).append(rank)
    for rank, label in enumerate(labels):
        expected = Place(nodes.index(label), members[label].index(rank), len(members[label]))
        assert expected == place(rank, labels)


def test_places_on_interleaved_nodes():
    labels = ["b", "a", "b", "c", "a", "b"]
    assert [place(rank, labels) for rank in range(6)] == [
        (0, 0, 3), (1, 0, 2), (0, 1, 3), (2, 0, 1), (1, 1, 2), (0, 2, 3)
    ]  # fmt: skip


@pytest.mark.parametrize(("rank", "size"), [(-1, 4), (4, 4), (0, 0)])
def test_a_rank_outside_the_group_is_refused(rank, size):
    for call in (
        lambda: ring(rank, size),
        lambda: shift_one(rank, size, 0),
        lambda: one_peer_exponential(rank, size, 0),
        lambda: place(rank, [0] * size),
    ):
        with pytest.raises(ArrayError) as caught:
            call()
        assert f"rank is {rank}, expected 0 <= rank < {size}" == str(caught.value)
