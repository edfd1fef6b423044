"""Grids of ranks, and halos beside windows of the whole array."""

import itertools
import math
import re

import numpy as np
import pytest
from support.device_ranks import run_on_devices, up

from bagua_comm import ArrayError, BaguaError, CommMismatch, Grid
from bagua_comm.arrays import MOVABLE, dtype_named
from bagua_comm.testing import run_ranks
from bagua_comm.topology import balanced_dims, share

DTYPES = sorted(MOVABLE)
POISON = 113


def grids(size, ndim):
    """All shapes of a grid of `size` ranks."""
    return [dims for dims in itertools.product(range(1, size + 1), repeat=ndim) if math.prod(dims) == size]


class Whole:
    """An array over a grid, whose parts are of uneven lengths, with the values beyond its open edges.

    Args:
        rng: Draws lengths and values.
        dims, periodic: Those of the grid.
        widths: The width of the halo along each axis.
        dtype: Its name.
    """

    def __init__(self, rng, dims, periodic, widths, dtype):
        self.widths, self.periodic = widths, periodic
        self.lengths = [rng.integers(max(w, 1), max(w, 1) + 3, n) for n, w in zip(dims, widths, strict=True)]
        shape = [sum(n) + 2 * w for n, w in zip(self.lengths, widths, strict=True)]
        self.values = rng.integers(0, 100, shape).astype(dtype_named(dtype))

    def part(self, coords):
        """The values of a rank with its halo, and which of them it has only after the exchange."""
        part, comes = self.values, np.zeros((1,) * len(coords), bool)
        for axis, (place, w) in enumerate(zip(coords, self.widths, strict=True)):
            lengths, end = self.lengths[axis], self.values.shape[axis] - 2 * w
            start = sum(lengths[:place])
            window = np.arange(start, start + lengths[place] + 2 * w) - w
            inside = (window >= 0) & (window < end) | self.periodic[axis]
            index = window % end + w if self.periodic[axis] else window + w
            halo = np.ones(len(window), bool)
            halo[w : len(window) - w] = False
            part = part.take(index, axis)
            along = [1] * len(coords)
            along[axis] = len(window)
            comes = comes | (halo & inside).reshape(along)
        return part, comes


def strided(x, way):
    """A copy of `x` in another place of memory."""
    if way == "gaps":
        return np.repeat(x, 2, axis=-1)[..., ::2]
    return {"C": np.ascontiguousarray, "F": np.asfortranarray}[way](x).copy(order=way)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 6])
def test_each_rank_gets_its_window_of_the_whole_array_corners_included(size):
    rng, dtypes = np.random.default_rng(size), itertools.cycle(DTYPES)
    cases = [
        (dims, rng.integers(0, 2, ndim).astype(bool).tolist(), rng.integers(1, 4, ndim).tolist(), next(dtypes))
        for ndim in (1, 2, 3, 4)
        for dims in rng.permutation(grids(size, ndim))[:5].tolist()
    ]
    cases += [((size,), [True], [2], dtype) for dtype in DTYPES]
    cases += [((size, 1), [True, True], [1, 0], "int32")]
    wholes = [Whole(rng, *case) for case in cases]

    def body(comm):
        for (dims, periodic, widths, _), whole in zip(cases, wholes, strict=True):
            grid = Grid(comm, dims, periodic)
            expected, comes = whole.part(grid.coords)
            for way in ("C", "F", "gaps"):
                x = strided(np.where(comes, np.array(POISON).astype(expected.dtype), expected), way)
                width = widths[0] if len(set(widths)) == 1 else widths
                for _ in range(2):
                    assert grid.exchange_halos(x, width) is x
                    assert x.tobytes() == expected.tobytes(), (dims, periodic, widths, way)

    run_ranks(size, body)


@pytest.mark.parametrize("check", [False, True])
@pytest.mark.parametrize("size", [1, 2])
def test_the_halos_of_a_ring_of_one_or_two_ranks_are_not_swapped(size, check):
    def body(comm):
        x = np.array([-1, 10 * comm.rank, 10 * comm.rank + 1, -1])
        return Grid(comm, [0], periodic=True).exchange_halos(x).tolist()

    expected = {1: [[1, 0, 1, 0]], 2: [[11, 0, 1, 10], [1, 10, 11, 0]]}
    assert run_ranks(size, body, check=check) == expected[size]


def test_axes_name_those_of_the_array_that_the_grid_splits():
    def body(comm):
        fields = np.full((2, 4, 5, 3), -1.0)
        fields[:, 1:-1, 1:-1] = comm.rank
        Grid(comm, (2, 2)).exchange_halos(fields, axes=(-2, 1))
        return fields[0, :, :, 0], (fields == fields[:1, :, :, :1]).all()

    whole = np.full((6, 8), -1.0)
    whole[1:-1, 1:-1] = np.kron([[0, 2], [1, 3]], np.ones((2, 3)))
    for rank, (found, all_fields) in enumerate(run_ranks(4, body)):
        row, column = 2 * (rank % 2), 3 * (rank // 2)
        np.testing.assert_array_equal(found, whole[row : row + 4, column : column + 5])
        assert all_fields


@pytest.mark.parametrize("device", ["lazy"], indirect=True)
@pytest.mark.parametrize(("kind", "size"), [("local", 2), ("staged", 2), ("nccl", 1), ("nccl", 4)])
def test_device_arrays_get_the_halos_of_host_arrays(device, kind, size):
    def body(comm, place):
        grid, found = Grid(comm, (0, 0), (True, False)), []
        for shape, width, axes in (((8, 7), 2, None), ((6, 2, 5), 1, (2, 0)), ((7, 9), (1, 0), None)):
            x = place(np.random.default_rng(comm.rank).standard_normal(shape).astype(np.float32))
            for _ in range(2):
                found.append(grid.exchange_halos(x, width, axes).copy())
        return [(x if isinstance(x, np.ndarray) else x.get()).tobytes() for x in found]

    expected = run_ranks(size, lambda comm: body(comm, np.copy))
    assert run_on_devices(device, size, kind, lambda comm: body(comm, up)) == expected


def test_a_grid_places_ranks_in_row_major_order_and_shifts_along_its_axes():
    def body(comm):
        grid = Grid(comm, (0, 3), periodic=(False, True))
        shifts = [tuple(grid.shift(axis, step)) for axis, step in ((0, 1), (1, 1), (-1, 2), (1, 0), (0, -1))]
        return grid.dims, grid.coords, shifts

    found = run_ranks(6, body)
    assert [(dims, coords) for dims, coords, _ in found] == [((2, 3), (r // 3, r % 3)) for r in range(6)]
    assert found[0][2] == [(None, 3), (2, 1), (1, 2), (0, 0), (3, None)]
    assert found[4][2] == [(1, None), (3, 5), (5, 3), (4, 4), (None, 1)]


def test_parts_may_change_their_lengths_between_calls_while_others_do_not():
    """As with a load that is balanced anew: rows move from rank 0 to rank 1, and rank 2 keeps its own."""

    def body(comm):
        grid, ends = Grid(comm, [comm.size]), []
        for rows in ((4, 3, 5), (3, 4, 5)):
            x = np.full((rows[comm.rank], 2), comm.rank)
            ends.append(grid.exchange_halos(x)[[0, -1], 0].tolist())
        return ends

    assert run_ranks(3, body) == [[[0, 1]] * 2, [[0, 2]] * 2, [[1, 2]] * 2]


def test_a_repeated_exchange_sends_the_halos_alone_and_is_one_call():
    def body(comm):
        grid, x = Grid(comm, (2, 1), (False, True)), np.zeros((5, 6))
        grid.exchange_halos(x)
        calls, sent = comm.counters.total().calls, comm.counters.total().wire_bytes
        grid.exchange_halos(x)
        after = comm.counters.total()
        return after.calls - calls, after.wire_bytes - sent

    assert run_ranks(2, body) == [(1, 6 * 8)] * 2


def test_a_lane_exchanges_beside_the_caller():
    def body(comm):
        x = np.full(4, comm.rank)
        with comm.lane() as lane:
            grid = lane.submit(Grid, lane.comm, [comm.size], True).result()
            lane.submit(grid.exchange_halos, x)
            lane.wait()
        return x.tolist()

    assert run_ranks(3, body) == [[2, 0, 0, 1], [0, 1, 1, 2], [1, 2, 2, 0]]


X = np.zeros((4, 5))
REFUSED = [
    (lambda c: Grid(c, (3, 1)), "Grid: dims (3, 1) make 3 ranks, but there are 2; give 0 for an axis"),
    (lambda c: Grid(c, (0, 3)), "dims (0, 3) make 3 ranks times those to choose, but there are 2"),
    (lambda c: Grid(c, 2), "Grid: dims is 2, expected a number of ranks for each axis; 0 to choose it"),
    (lambda c: Grid(c, ()), "dims is (), expected"),
    (lambda c: Grid(c, (-1, -2)), "dims is (-1, -2), expected"),
    (lambda c: Grid(c, (2.0, 1)), "dims is (2.0, 1), expected"),
    (lambda c: Grid(c, (0, 0), (True,)), "Grid: periodic is (True,), expected 2 integers, one for each axis"),
    (lambda c: Grid(c, (0, 0), "x"), "Grid: periodic is 'x', expected 2"),
    (lambda c: Grid(c, (0, 0)).shift(2), "shift: axis is 2, expected one of the 2 of the grid, from 0 on"),
    (lambda c: Grid(c, (0, 0)).shift(0, 1.5), "shift: step is 1.5, expected an integer"),
    (lambda c: Grid(c, [0]).shift((0, 0)), "shift: axis is (0, 0), expected an integer"),
    (lambda c: Grid(c, (0, 0)).exchange_halos(None), "exchange_halos: array: "),
    (lambda c: Grid(c, (0, 0)).exchange_halos(np.zeros(9)), "array has shape (9,), expected as many dimensions"),
    (lambda c: Grid(c, (0, 0)).exchange_halos(X, 2), "array has 4 elements along axis 0, expected at least 6: 2"),
    (lambda c: Grid(c, (0, 0)).exchange_halos(X, -1), "exchange_halos: width is -1, expected at least 0"),
    (lambda c: Grid(c, (0, 0)).exchange_halos(X, (1, 1, 1)), "width is (1, 1, 1), expected 2 integers"),
    (lambda c: Grid(c, (0, 0)).exchange_halos(X, ([1], 1)), "width is ([1], 1), expected 2 integers"),
    (
        lambda c: Grid(c, (0, 0)).exchange_halos(X, axes=(0, 2)),
        "axes are (0, 2), expected different axes of shape",
    ),
    (lambda c: Grid(c, (0, 0)).exchange_halos(X, axes=(1, -1)), "axes are (1, -1), expected different axes"),
    (lambda c: Grid(c, (0, 0)).exchange_halos(X, axes=(0,)), "axes is (0,), expected 2 integers"),
    (lambda c: Grid(c, (0, 0)).exchange_halos(np.broadcast_to(X, (3, 4, 5))), "exchange_halos: array "),
    (lambda c: Grid(c, (0, 0)).exchange_halos(X.astype(">f8")), "exchange_halos: array has dtype >f8"),
    (lambda c: Grid(c, (0, 0)).exchange_halos(X, timeout_s=-1), "timeout_s"),
]


@pytest.mark.parametrize("call", [call for call, _ in REFUSED])
def test_wrong_arguments_are_refused_on_all_ranks(call):
    (text,) = [text for each, text in REFUSED if each is call]

    def body(comm):
        with pytest.raises(BaguaError) as found:
            call(comm)
        comm.barrier()
        return str(found.value)

    for message in run_ranks(2, body):
        assert text in message


BAD = {
    "narrower": (lambda: np.zeros((2, 6)), "array has 2 elements along axis 0, expected at least 3"),
    "another dtype": (lambda: np.zeros((6, 6), np.int64), "int64[*, 6] with width=(1,), axes=(0,)"),
    "another width": (lambda: np.zeros((6, 8)), "float64[*, 8]"),
    "another shape of one size": (lambda: np.zeros((6, 2, 3)), "float64[*, 2, 3]"),
    "read-only": (lambda: np.broadcast_to(0.0, (6, 6)), "array "),
    "no array": (lambda: "x", "array: "),
}


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_text_of_one_rank_is_not_taken_for_a_halo_of_its_size(ranks):
    """A halo here has as many bytes as a description."""

    def body(comm):
        grid, x = Grid(comm, [ranks], periodic=True), np.full((8, 509), comm.rank, np.uint8)
        for _ in range(2):
            grid.exchange_halos(x)
        assert x[[0, -1], 0].tolist() == [(comm.rank - 1) % ranks, (comm.rank + 1) % ranks]
        x[[0, -1]] = 7
        for wrong in (x[:2], x.view(np.int8)):  # what is refused here, and what is new to this rank
            with pytest.raises(ArrayError):
                grid.exchange_halos(x if comm.rank else wrong)
            assert (x[[0, -1]] == 7).all()
            comm.barrier()

    run_ranks(ranks, body)


@pytest.mark.parametrize("ranks", [2, 3])
def test_an_error_of_a_rank_in_a_repeated_exchange_wakes_both_its_neighbours(ranks):
    def body(comm):
        grid, x = Grid(comm, [ranks], periodic=True), np.full((6, 4), 7.0)
        grid.exchange_halos(x)
        x[:] = comm.rank
        with pytest.raises(BaguaError) as found:
            grid.exchange_halos(x if comm.rank else x[:2])
        assert (x < ranks).all()  # halos may have come from the other neighbour, but no text
        return type(found.value), str(found.value)

    (own, text), *others = run_ranks(ranks, body)
    assert own is ArrayError
    assert "array has 2 elements" in text
    for error, text in others:
        assert error is CommMismatch
        assert "wrong, or new to it alone, sends 509 bytes in place of a halo" in text


@pytest.mark.parametrize("check", [False, True])
@pytest.mark.parametrize("bad", BAD)
def test_an_array_of_one_rank_that_does_not_fit_is_refused_on_its_neighbours_too(bad, check):
    make, text = BAD[bad]

    def body(comm):
        grid, x = Grid(comm, [2], periodic=True), np.full((6, 6), 7.0)
        with pytest.raises(BaguaError) as found:
            grid.exchange_halos(make() if comm.rank == 1 else x)
        assert (x == 7).all()
        return str(found.value)

    first, second = run_ranks(2, body, check=check)
    assert text in first
    assert text in second
    assert "rank 1" in first


def test_a_rank_that_changes_its_array_alone_is_found_by_the_size_of_what_it_sends():
    def body(comm):
        grid = Grid(comm, [2])
        grid.exchange_halos(np.zeros((4, 8)))
        with pytest.raises(CommMismatch, match=r"exchange_halos.* expected \d+ bytes from rank \d") as found:
            grid.exchange_halos(np.zeros((4, 9 if comm.rank else 8)))
        return re.search(r"rank . expected.*sent \d+", str(found.value))[0]

    assert run_ranks(2, body) == [
        "rank 0 expected 64 bytes from rank 1, which sent 509",
        "rank 1 expected 509 bytes from rank 0, which sent 64",
    ]


def test_ranks_that_make_different_grids_are_told_of_both():
    def body(comm):
        with pytest.raises(CommMismatch, match="Grid") as found:
            Grid(comm, (2, 1) if comm.rank else (1, 2))
        return str(found.value)

    for message in run_ranks(2, body):
        assert "(1, 2)" in message
        assert "(2, 1)" in message


def test_ranks_may_write_the_same_grid_in_different_ways():
    def body(comm):
        grids = [Grid(comm, (2, 1) if comm.rank else [2, 1]), Grid(comm, [2], [True] if comm.rank else True)]
        return [(grid.dims, grid.periodic) for grid in grids]

    assert run_ranks(2, body) == [[((2, 1), (False, False)), ((2,), (True,))]] * 2


@pytest.mark.parametrize("wrong", [(3, 1), "(2, 1)"])
def test_a_grid_that_one_rank_cannot_make_is_an_error_of_all(wrong):
    def body(comm):
        with pytest.raises(CommMismatch, match=r"dims=\(2, 1\)"):
            Grid(comm, (2, 1) if comm.rank else wrong)

    run_ranks(2, body)


def test_chosen_lengths_are_as_close_as_can_be():
    for size, ndim in itertools.product(range(1, 17), range(1, 4)):
        best = min(sorted(dims, reverse=True) for dims in grids(size, ndim))
        assert list(balanced_dims(size, [0] * ndim)) == best
    assert balanced_dims(24, (0, 2, 0, 3)) == (2, 2, 2, 3)


def test_shares_of_a_grid_make_the_whole():
    dims = balanced_dims(6, (0, 0))
    parts = [[share(7, place, n) for place in range(n)] for n in dims]
    assert [list(itertools.chain(*axis)) for axis in parts] == [list(range(7))] * 2


def test_what_is_no_communicator_is_refused_with_the_one_of_a_lane():
    def body(comm):
        with comm.lane() as lane:
            for wrong in (lane, 3):
                with pytest.raises(ArrayError, match=r"Grid: comm is .*; for a lane pass lane\.comm"):
                    Grid(wrong, (1,))
            return Grid(lane.comm, (1,)).coords

    assert run_ranks(1, body) == [(0,)]
