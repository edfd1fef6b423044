"""The array arguments of calls: outputs, overlaps, and errors that name a wrong argument on every rank."""

import numpy as np
import pytest

from bagua_comm import ArrayError, Communicator, UnsupportedError
from bagua_comm.testing import run_ranks
from bagua_comm.transports import LocalTransport


def test_results_fill_any_array_of_the_right_size():
    def body(comm):
        out = np.empty(6)
        assert comm.allgather(np.full((3,), float(comm.rank)), out=out) is out
        return out

    assert run_ranks(2, body)[0].tolist() == [0, 0, 0, 1, 1, 1]


Z = {n: np.zeros(n) for n in (1, 2, 3, 4, 5, 8, 10, 12)}
"""Arrays of zeros by their length."""

X = Z[3]
WRONG = [
    (lambda c: c.allreduce(Z[12], out=X), ArrayError, r"allreduce: out has shape \(3,\), expected \(12,\)"),
    (lambda c: c.allreduce(Z[2], out=np.zeros(2, "f4")), ArrayError, "out has dtype float32, expected float64"),
    (
        lambda c: c.allreduce(Z[2], op="mean"),
        ArrayError,
        "op is 'mean', expected one of sum, .*; did you mean op='avg'",
    ),
    (lambda c: c.allreduce(Z[2], op="bor"), UnsupportedError, "no op='bor' for float64"),
    (lambda c: c.allreduce(np.zeros(2, "c16"), op="max"), UnsupportedError, "no op='max' for complex128; .*real"),
    (
        lambda c: c.reduce(np.zeros(2, bool), root=0, op="max"),
        UnsupportedError,
        "for bool; .*uint8, by min .*bor$",
    ),
    (lambda c: c.allreduce([1, 2]), UnsupportedError, "x: .*list; wrap it with numpy.asarray"),
    (lambda c: c.allreduce(object()), UnsupportedError, "got builtins.object"),
    (lambda c: c.allreduce(np.array(["a"])), UnsupportedError, "dtype <U1"),
    (lambda c: c.allreduce(np.array(1.0), out=np.float64(0)), ArrayError, "NumPy scalar, which cannot be"),
    (lambda c: c.allreduce(Z[10][:8], out=Z[10][2:]), ArrayError, "out overlaps x; pass out=x"),
    (lambda c: c.broadcast(Z[2], root=2), ArrayError, "root is 2, expected a rank from 0 to 1"),
    (lambda c: c.broadcast(Z[2], root="0"), ArrayError, "root is '0'"),
    (lambda c: c.send(Z[2], dest=-1), ArrayError, "send: dest is -1"),
    (lambda c: c.recv(np.float64(0), source=0), ArrayError, "NumPy scalar, which cannot be written to"),
    (lambda c: c.sendrecv(X, X, dest=0, source=0), ArrayError, "sendrecv: out overlaps x"),
    (lambda c: c.reduce_scatter(X), ArrayError, r"\(3,\), .* divisible by 2 ranks; or give counts="),
    (lambda c: c.reduce_scatter(Z[10], out=Z[10][1:6]), ArrayError, "out overlaps x outside of this rank's own"),
    (lambda c: c.reduce_scatter(X, counts=[1, 1]), ArrayError, "x has 3 elements, expected 2, the sum"),
    (lambda c: c.reduce_scatter(X, counts=[1.5, 1.5]), ArrayError, r"counts is \[1.5, 1.5\], expected 2"),
    (lambda c: c.reduce_scatter(X, counts=[4, -1]), ArrayError, r"counts is \[4, -1\], expected 2"),
    (lambda c: c.reduce_scatter(X, counts=3), ArrayError, "reduce_scatter: counts is 3, expected 2"),
    (lambda c: c.reduce_scatter(X, X[:2], counts=[3, 0]), ArrayError, "out has shape|own chunk"),
    (lambda c: c.alltoall(Z[5]), ArrayError, "divisible by 2 ranks; or give counts= and out_counts="),
    (lambda c: c.alltoall(Z[2], Z[5], counts=[1, 1], out_counts=[2, 3]), ArrayError, "own part"),
    (lambda c: c.alltoall(X, counts=[1, 2]), ArrayError, "out_counts is None, expected both"),
    (lambda c: c.alltoall(X, out_counts=[1, 2]), ArrayError, "counts is None, expected both"),
    (lambda c: c.allgather(X, X, counts=[1, 2]), ArrayError, r"x has 3 elements, expected counts\[[01]\] = [12]"),
    (lambda c: c.allgather(X, X, counts=[3]), ArrayError, r"allgather: counts is \[3\], expected 2 int"),
    (lambda c: c.gather(X, counts=[1, 1], root=c.rank), ArrayError, r"expected counts\[[01]\] = 1"),
    (lambda c: c.gather(X, root=5), ArrayError, "gather: root is 5"),
    (lambda c: c.scatter(None, root=0), ArrayError, "x is None|out is None"),
    (lambda c: c.scatter(X, Z[2], root=c.rank), ArrayError, r"scatter: .* \(2, ...\); pass counts="),
    (lambda c: c.scatter(None, counts=[1, 2], root=c.rank), ArrayError, "scatter: x is None; root must"),
    (lambda c: c.scatter(X, counts=[1, 1], root=c.rank), ArrayError, "x has 3 elements, expected 2, the sum of"),
    (lambda c: c.scatter(X, counts=[1, 2], root=1 - c.rank), ArrayError, "out is None; ranks other than"),
    (lambda c: c.scan(X, op="mean"), ArrayError, "scan: op is 'mean'"),
    (lambda c: c.scan(X[:2], X[1:]), ArrayError, "scan: out overlaps x"),
    (lambda c: c.exscan(X, Z[2]), ArrayError, r"exscan: out has shape \(2,\), expected \(3,\)"),
    (lambda c: c.allreduce_many([X, [1]]), UnsupportedError, r"allreduce_many: xs\[1\]: .*list"),
    (lambda c: c.allreduce_many([X], [X, X]), ArrayError, "there are 2 outs, expected 1, one for each"),
    (lambda c: c.allreduce_many([X, X], [None, X[:1]]), ArrayError, r"outs\[1\] has shape \(1,\)"),
    (lambda c: c.allreduce_many([X, X[:1]], [X, None]), ArrayError, "written to overlaps another"),
    (lambda c: c.allreduce_many([X[:2], X[2:]], [X[1:], None]), ArrayError, "written to overlaps"),
    (lambda c: c.allreduce_many(None), ArrayError, "allreduce_many: xs is None, expected a list"),
    (lambda c: c.broadcast_many([X, X[:1]], root=0), ArrayError, "written to overlaps another array"),
    (lambda c: c.exchange(None, []), ArrayError, r"are None and \[\], expected lists of .*array, tag"),
    (lambda c: c.exchange([], [(0, X, 1, 2)]), ArrayError, r"exchange: sends and recvs are \[\] and \[\(0, "),
    (lambda c: c.send_object(1, dest=None), ArrayError, "send_object: dest is None"),
    (lambda c: c.recv_object(source=7), ArrayError, "recv_object: source is 7"),
    (lambda c: c.gather_object(1, root="a"), ArrayError, "gather_object: root is 'a'"),
    (lambda c: c.split("red"), ArrayError, "color is 'red'"),
    *(
        (
            lambda c, wrong=wrong: c.split(**{"color": 0, **(wrong if c.rank == 1 else {})}),
            ArrayError,
            f"split: {words}",
        )
        for wrong, words in (
            ({"key": "a"}, "key is 'a', expected an integer from -9223372036854775808 to .*, on rank 1"),
            ({"key": 1.0}, r"key is 1\.0, expected an integer"),
            ({"key": 2**63}, "key is 9223372036854775808, expected an integer"),
            ({"color": -1}, "color is -1, expected an integer from 0 to 2147483647, on rank 1"),
            ({"color": 2**31}, "color is 2147483648, expected an integer"),
            ({"color": None}, "color is None, .*; ranks that no group needs give a color of their own"),
        )
    ),
    *(
        (
            lambda c, s=s: c.allreduce(X, timeout_s=s),
            ArrayError,
            "allreduce: timeout_s is .*, expected seconds, .* or math.inf",
        )
        for s in (0, -1, "soon", 1e10, float("-inf"), float("nan"))
    ),
]


@pytest.mark.parametrize(("call", "error", "words"), WRONG)
def test_wrong_arguments_are_named_on_every_rank_and_the_next_call_works(call, error, words):
    def body(comm):
        with pytest.raises(error, match=words):
            call(comm)
        return comm.allreduce(np.array(1))

    assert run_ranks(2, body) == [2, 2]


def test_numpy_scalars_are_read():
    assert run_ranks(2, lambda comm: comm.allreduce(np.float64(comm.rank))) == [1, 1]


def test_host_arrays_need_a_transport_that_moves_them():
    class DeviceOnly(LocalTransport):
        def moves(self, x):
            return False

    comm = Communicator([DeviceOnly()])
    with pytest.raises(UnsupportedError, match=r"numpy array, but .* transports \(local\) do not move"):
        comm.allreduce(np.zeros(1))
