"""Halos over MPI, bit for bit those of `Sendrecv` with derived datatypes."""

import itertools
import math
import time

import numpy as np
import pytest
from mpi4py import MPI

import bagua_comm
from bagua_comm import ArrayError, BaguaError, CommAborted, CommMismatch, Grid
from bagua_comm.arrays import MOVABLE, dtype_named
from bagua_comm.topology import balanced_dims

pytestmark = pytest.mark.mpi


def sendrecv_halos(cart, x, widths):
    """Fill the halos of contiguous `x` by mpi4py alone, axis by axis, as its users do."""
    bytes_of = [*x.shape[:-1], x.shape[-1] * x.itemsize]

    def part(axis, start, width):
        starts, lengths = [0] * x.ndim, list(x.shape)
        starts[axis], lengths[axis] = start, width
        starts[-1], lengths[-1] = starts[-1] * x.itemsize, lengths[-1] * x.itemsize
        made = MPI.BYTE.Create_subarray(bytes_of, lengths, starts).Commit()
        return [x.view(np.uint8), 1, made]

    for axis, width in enumerate(widths):
        (low, high), end = cart.Shift(axis, 1), x.shape[axis]
        ways = [(low, width, end - width, high), (high, end - 2 * width, 0, low)]
        for dest, start, halo, source in ways:
            sent, received = part(axis, start, width), part(axis, halo, width)
            cart.Sendrecv(sent, dest, 0, received, source, 0)
            sent[2].Free(), received[2].Free()


def cases(size):
    """Grids of 1 to 4 dimensions, periodic or not, with widths of 1 to 3."""
    rng = np.random.default_rng(size)
    for ndim in (1, 2, 3, 4):
        dims = [each for each in itertools.product(range(1, size + 1), repeat=ndim) if math.prod(each) == size]
        for each in dims:
            yield each, rng.integers(0, 2, ndim).astype(bool).tolist(), rng.integers(1, 4, ndim).tolist()


def test_halos_are_those_of_mpi_for_any_grid_and_width(comm):
    world, rng = MPI.COMM_WORLD.Dup(), np.random.default_rng(comm.rank)
    for dims, periodic, widths in cases(comm.size):
        cart, grid = world.Create_cart(dims, periodic), Grid(comm, dims, periodic)
        assert list(grid.coords) == cart.Get_coords(comm.rank)
        for axis, step in itertools.product(range(len(dims)), (1, 2, -1)):
            theirs = tuple(None if each == MPI.PROC_NULL else each for each in cart.Shift(axis, step))
            assert tuple(grid.shift(axis, step)) == theirs
        # Along the axis that is split, parts are of different lengths.
        shape = [3 * w + place for w, place in zip(widths, grid.coords, strict=True)]
        expected = rng.random(shape)
        x, strided = expected.copy(), np.repeat(expected, 2, axis=-1)[..., ::2]
        sendrecv_halos(cart, expected, widths)
        assert grid.exchange_halos(x, widths).tobytes() == expected.tobytes(), (dims, periodic, widths)
        assert grid.exchange_halos(strided, widths).tobytes() == expected.tobytes(), (dims, periodic, widths)
        cart.Free()
    world.Free()


@pytest.mark.parametrize(
    ("dtype", "length"), [*((dtype, 4) for dtype in sorted(MOVABLE)), ("bool", 700), ("complex128", 700)]
)
def test_halos_are_those_of_mpi_for_any_dtype(comm, dtype, length):
    dims = balanced_dims(comm.size, (0, 0))
    cart, grid = MPI.COMM_WORLD.Create_cart(dims, [True, True]), Grid(comm, dims, periodic=True)
    values = np.random.default_rng(comm.rank).integers(0, 100, (length, length))
    expected = values.astype(dtype_named(dtype))
    x = expected.copy()
    for _ in range(2):
        sendrecv_halos(cart, expected, [1, 1])
        assert grid.exchange_halos(x).tobytes() == expected.tobytes()
        x[1:-1, 1:-1] = expected[1:-1, 1:-1] = x[1:-1, 1:-1][::-1].copy()
    cart.Free()


def test_chosen_lengths_are_those_of_mpi(comm):
    for size, ndim in itertools.product((1, 2, 3, 4, 6, 8, 9, 12, 16), (1, 2, 3)):
        assert list(balanced_dims(size, [0] * ndim)) == MPI.Compute_dims(size, ndim)


def test_an_array_that_does_not_fit_is_refused_on_the_neighbours_and_all_go_on(comm):
    grid, last = Grid(comm, [comm.size], periodic=True), comm.size - 1
    concerned = {last, (last - 1) % comm.size, (last + 1) % comm.size}
    x = np.full((6, 4), float(comm.rank))
    if comm.rank in concerned and len(concerned) == comm.size:  # else those in between would wait for them
        bad = np.zeros((2, 4)) if comm.rank == last else x
        with pytest.raises(BaguaError, match="array has 2 elements along axis 0, expected at least 3") as found:
            grid.exchange_halos(bad)
        assert isinstance(found.value, ArrayError)
        assert (x == comm.rank).all()
    comm.barrier()
    grid.exchange_halos(x)
    assert (x[0] == (comm.rank - 1) % comm.size).all()
    assert (x[-1] == (comm.rank + 1) % comm.size).all()


def test_an_error_of_a_rank_in_a_repeated_exchange_wakes_both_its_neighbours(comm):
    with bagua_comm.connect(comm=MPI.COMM_WORLD, timeout_s=60, gpu="none") as world:
        grid, x = Grid(world, [world.size], periodic=True), np.full((6, 4), float(world.rank))
        grid.exchange_halos(x)
        start = time.monotonic()
        if world.rank == 0:
            with pytest.raises(ArrayError):
                grid.exchange_halos(x[:2])
        elif world.rank in (1, world.size - 1):
            with pytest.raises((CommMismatch, CommAborted)):  # the latter if the rank beyond has left first
                grid.exchange_halos(x)
        assert time.monotonic() - start < 30
    comm.barrier()
