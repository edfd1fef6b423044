"""Arrays whose elements do not lie at multiples of their size, as in a file behind a header of odd length."""

import tempfile

import numpy as np
import pytest

pytestmark = pytest.mark.mpi


def unaligned(values):
    """A copy of `values`, one byte behind where it would be aligned, and read-only."""
    array = np.frombuffer(b"\0" + values.tobytes(), values.dtype, offset=1)
    assert values.dtype.itemsize == 1 or not array.flags.aligned
    return array


@pytest.mark.parametrize("dtype", ["int8", "int16", "uint32", "int64", "float64", "complex64"])
@pytest.mark.parametrize("count", [1, 300, 100_000])
def test_unaligned_inputs_give_the_results_of_aligned_ones(comm, dtype, count):
    plain = np.arange(comm.size * count).astype(dtype) + np.dtype(dtype).type(comm.rank)
    odd = unaligned(plain)
    calls = [comm.allgather, comm.alltoall, lambda x: comm.gather(x, root=0)]
    if not dtype.startswith("complex"):
        calls += [comm.allreduce, comm.reduce_scatter, lambda x: comm.reduce(x, root=comm.size - 1, op="max")]
    for call in calls:
        expected, actual = call(plain), call(odd)
        assert (expected is None) == (actual is None)
        if expected is not None:
            assert expected.tobytes() == actual.tobytes()
    assert odd.tobytes() == plain.tobytes()


@pytest.mark.parametrize("count", [1, 300, 100_000])
def test_a_mapped_file_behind_a_header_can_be_reduced_in_place_received_and_broadcast(comm, count):
    with tempfile.TemporaryFile() as file:
        x = np.memmap(file, np.int32, "w+", offset=3, shape=(count,))
        x[...] = comm.rank
        assert comm.allreduce(x, out=x) is x
        assert (np.asarray(x) == sum(range(comm.size))).all()
        x[...] = comm.rank
        comm.broadcast(x, root=comm.size - 1)
        assert (np.asarray(x) == comm.size - 1).all()
        comm.sendrecv(
            np.full(count, comm.rank, np.int32),
            x,
            dest=(comm.rank + 1) % comm.size,
            source=(comm.rank - 1) % comm.size,
        )
        assert (np.asarray(x) == (comm.rank - 1) % comm.size).all()
