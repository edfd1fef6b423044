"""The array arguments of calls: outputs, overlaps, and errors that name a wrong argument on every rank."""

import numpy as np
import pytest

from bagua_comm import (
    ArrayError,
    Communicator,
    UnsupportedError,
)
from bagua_comm.testing import run_ranks
from bagua_comm.transports import LocalTransport


def test_an_input_is_never_changed():
    def body(comm):
        x = np.arange(4.0) + comm.rank
        x.flags.writeable = False
        comm.allreduce(x)
        comm.allgather(x)
        comm.alltoall(x)
        comm.reduce_scatter(x)
        return x

    assert run_ranks(2, body)[1].tolist() == [1, 2, 3, 4]


def test_results_fill_any_array_of_the_right_size():
    def body(comm):
        out = np.empty(6)
        assert comm.allgather(np.full((3,), float(comm.rank)), out=out) is out
        return out

    assert run_ranks(2, body)[0].tolist() == [0, 0, 0, 1, 1, 1]


def test_scatter_needs_its_arguments():
    def body(comm):
        with pytest.raises(ArrayError, match="x is None" if comm.rank == 0 else "out is None"):
            comm.scatter(None, root=0)

    run_ranks(2, body)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda comm: comm.allreduce(np.zeros(12), out=np.zeros(3)),
            ArrayError,
            r"allreduce: out has shape \(3,\), expected \(12,\)",
        ),
        (
            lambda comm: comm.allreduce(np.zeros(2), out=np.zeros(2, np.float32)),
            ArrayError,
            "allreduce: out has dtype float32, expected float64",
        ),
        (
            lambda comm: comm.allreduce(np.zeros(2), op="mean"),
            ArrayError,
            "op is 'mean', expected one of sum",
        ),
        (lambda comm: comm.allreduce(np.zeros(2), op="bor"), UnsupportedError, "no op='bor' for float64"),
        (
            lambda comm: comm.allreduce(np.zeros(2, complex), op="max"),
            UnsupportedError,
            "no op='max' for complex128; reduce magnitudes, or a view of its real",
        ),
        (
            lambda comm: comm.broadcast(np.zeros(2), root=2),
            ArrayError,
            "root is 2, expected a rank from 0 to 1",
        ),
        (lambda comm: comm.broadcast(np.zeros(2), root="0"), ArrayError, "root is '0'"),
        (lambda comm: comm.send(np.zeros(2), dest=-1), ArrayError, "send: dest is -1"),
        (lambda comm: comm.allreduce([1, 2]), UnsupportedError, "x: .*list; wrap it with numpy.asarray"),
        (lambda comm: comm.allreduce(object()), UnsupportedError, "got builtins.object"),
        (lambda comm: comm.allreduce(np.array(["a"])), UnsupportedError, "dtype <U1"),
        (
            lambda comm: comm.reduce_scatter(np.zeros(3)),
            ArrayError,
            r"shape \(3,\), expected a first dimension divisible by 2",
        ),
        (lambda comm: comm.alltoall(np.zeros(5)), ArrayError, "divisible by 2 ranks"),
        (
            lambda comm: comm.allgather(np.zeros(3), np.zeros(3), counts=[1, 2]),
            ArrayError,
            r"x has 3 elements, expected counts\[[01]\] = [12]",
        ),
        (
            lambda comm: comm.alltoall(np.zeros(2), np.zeros(5), counts=[1, 1], out_counts=[2, 3]),
            ArrayError,
            "own part",
        ),
        (
            lambda comm: comm.scatter(np.zeros(3), np.zeros(2), root=comm.rank),
            ArrayError,
            r"expected \(2, ...\)",
        ),
        (lambda comm: comm.split("red"), ArrayError, "color is 'red'"),
    ],
)
def test_wrong_arguments_are_named_on_every_rank_and_the_next_call_works(call, error, message):
    def body(comm):
        with pytest.raises(error, match=message):
            call(comm)
        return comm.allreduce(np.array(1))

    assert run_ranks(2, body) == [2, 2]


def test_overlapping_arrays_are_refused():
    def body(comm):
        x = np.zeros(10)
        with pytest.raises(ArrayError, match="out overlaps x; pass out=x"):
            comm.allreduce(x[:8], out=x[2:])
        with pytest.raises(ArrayError, match="out overlaps x outside of this rank's own chunk"):
            comm.reduce_scatter(x, out=x[1:6])
        with pytest.raises(ArrayError, match="sendrecv: out overlaps x"):
            comm.sendrecv(x, x, dest=0, source=0)

    run_ranks(2, body)


def test_numpy_scalars_are_read_but_never_written_to():
    def body(comm):
        assert comm.allreduce(np.float64(comm.rank)) == 1
        for call in (
            lambda: comm.allreduce(np.array(1.0), out=np.float64(0)),
            lambda: comm.recv(np.float64(0), source=0),
        ):
            with pytest.raises(ArrayError, match="NumPy scalar, which cannot be written to"):
                call()

    run_ranks(2, body)


def test_host_arrays_need_a_transport_that_moves_them():
    class DeviceOnly(LocalTransport):
        def moves(self, x):
            return False

    comm = Communicator([DeviceOnly()])
    with pytest.raises(UnsupportedError, match=r"numpy array, but .* transports \(local\) do not move"):
        comm.allreduce(np.zeros(1))
