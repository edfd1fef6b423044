"""What a communicator does before its transport sees an array: memory layouts, and wrong arguments."""

import tempfile

import numpy as np

from bagua_comm import ArrayError
from bagua_comm.testing.transports import assert_reduced, assert_same
from bagua_comm.testing.values import assert_raises, reduced, sample


def _laid_out(values):
    """Copies of `values`, (n, m), in all memory layouts that NumPy has."""
    yield "in Fortran order", values.copy(order="F")
    yield "backwards", values[::-1, ::-1].copy()[::-1, ::-1]
    wide = np.zeros((len(values), 2 * values.shape[1] + 1), values.dtype)
    wide[:, 1::2] = values
    yield "with gaps", wide[:, 1::2]
    packed = np.frombuffer(bytearray(b"\0" + values.tobytes()), values.dtype, offset=1)
    yield "behind an odd byte", packed.reshape(values.shape)
    records = np.zeros(values.shape, [("tag", "u1"), ("value", values.dtype)])
    records["value"] = values
    yield "in records", records["value"]
    with tempfile.TemporaryFile() as file:
        mapped = np.memmap(file, values.dtype, "w+", offset=3, shape=values.shape)
        mapped[...] = values
        yield "in a file", mapped
    yield "read-only", np.frombuffer(values.tobytes(), values.dtype).reshape(values.shape)


def check_calls(comm):
    """Check memory layouts and wrong arguments. Collective."""
    _check_layouts(comm)
    _check_refusals(comm)


def _check_layouts(comm):
    p, rank = comm.size, comm.rank
    right, left, counts = (rank + 1) % p, (rank - 1) % p, [2] * p
    for dtype in ("int16", "float64"):
        xs = [sample(r, (p, 2), dtype, seed=5) for r in range(p)]
        zeros, stack = np.zeros_like(xs[0]), np.stack(xs)
        columns = np.stack([x[rank] for x in xs])
        for where, x in _laid_out(xs[rank]):
            what = f"of {dtype} {where}"
            assert_same(comm.allgather(x), stack, f"allgather {what}")
            assert_same(comm.alltoall(x), columns, f"alltoall {what}")
            gathered = comm.gather(x, root=0)
            if gathered is not None:
                assert_same(gathered, stack, f"gather {what}")
            row = comm.scatter(x if rank == 0 else None, None if rank == 0 else zeros[0].copy(), root=0)
            assert_same(row, xs[0][rank], f"scatter {what}")
            row = comm.allgather(x[rank], np.zeros_like(xs[0]), counts=counts)
            assert_same(row, np.stack([xs[r][r] for r in range(p)]), f"allgather with counts {what}")
            row = comm.alltoall(x, np.zeros_like(xs[0]), counts=counts, out_counts=counts)
            assert_same(row, columns, f"alltoall with counts {what}")
            received = comm.sendrecv(x, zeros.copy(), dest=right, source=left)
            assert_same(received, xs[left], f"sendrecv {what}")
            if x.flags.writeable:
                _check_landings(comm, xs, x, what)
            x = next(x for name, x in _laid_out(xs[rank]) if name == where)
            total, exact = reduced(xs, "sum"), comm.transport_for(x).adds_in_rank_order
            assert_reduced(comm.allreduce(x), total, "sum", exact, f"allreduce {what}")
            assert_reduced(comm.reduce_scatter(x), total[rank : rank + 1], "sum", exact, f"reduce_scatter {what}")
            at_root = comm.reduce(x, root=p - 1)
            if at_root is not None:
                assert_reduced(at_root, total, "sum", exact, f"reduce {what}")
            if x.flags.writeable:
                assert comm.allreduce(x, out=x) is x
                assert_reduced(x, total, "sum", exact, f"allreduce in place {what}")


def _check_landings(comm, xs, out, what):
    """Check that results are written to `out`, an array like one of `xs`."""
    p, rank = comm.size, comm.rank
    x, columns = xs[rank], np.stack([x[rank] for x in xs])
    assert comm.alltoall(x, out=out) is out
    assert_same(out, columns, f"alltoall into an array {what}")
    assert comm.allgather(x[0], out=out) is out
    assert_same(out, np.stack([x[0] for x in xs]), f"allgather into an array {what}")
    comm.allgather(x[0], out, counts=[x[0].size] * p)
    assert_same(out, np.stack([x[0] for x in xs]), f"allgather with counts into an array {what}")
    out[...] = x
    assert comm.alltoall(out, out=out) is out
    assert_same(out, columns, f"alltoall in place {what}")
    out[...] = x
    comm.broadcast(out, root=p - 1)
    assert_same(out, xs[p - 1], f"broadcast {what}")
    comm.sendrecv(x, out, dest=(rank + 1) % p, source=(rank - 1) % p)
    assert_same(out, xs[(rank - 1) % p], f"sendrecv into an array {what}")
    comm.scatter(x if rank == 0 else None, out[0], root=0)
    assert_same(out[0], xs[0][rank], f"scatter into an array {what}")


def _check_refusals(comm):
    x = np.zeros((3 * comm.size, 2), np.float32)
    wide = np.zeros(3 * comm.size + 1, np.float32)
    for error, call in (
        (ArrayError, lambda: comm.allreduce(x, op="mean")),
        (ArrayError, lambda: comm.allreduce(x, out=np.zeros(3, np.float32))),
        (ArrayError, lambda: comm.allreduce(x, out=np.zeros(x.shape, np.float64))),
        (ArrayError, lambda: comm.allreduce(x[:-1], out=x[1:])),
        (ArrayError, lambda: comm.allreduce(x, out=np.broadcast_to(np.float32(0), x.shape))),
        (ArrayError, lambda: comm.allreduce(x, out=np.frombuffer(x.tobytes(), x.dtype).reshape(x.shape))),
        (ArrayError, lambda: comm.alltoall(wide[:-1], out=wide[1:])),
        (ArrayError, lambda: comm.reduce_scatter(x, out=x[:3] if comm.rank else x[1:4])),
        (ArrayError, lambda: comm.sendrecv(wide[:-1], wide[1:], dest=0, source=0)),
        (ArrayError, lambda: comm.recv(np.float32(0), source=0)),
        (TypeError, lambda: comm.allreduce(x, op="bxor")),
        (TypeError, lambda: comm.allreduce([1.0, 2.0])),
        (TypeError, lambda: comm.allreduce(np.array([None]))),
        (TypeError, lambda: comm.allreduce(x.astype(x.dtype.newbyteorder()))),
        (TypeError, lambda: comm.allgather(np.zeros(3, np.dtype(np.int16).newbyteorder()))),
        (ArrayError, lambda: comm.allgather(x, out=np.zeros((comm.size, *x.shape), x.dtype.newbyteorder()))),
        (TypeError, lambda: comm.allreduce(np.zeros(2, bool))),
        (ArrayError, lambda: comm.broadcast(x, root=comm.size)),
        (ArrayError, lambda: comm.reduce(x, root=-1)),
        (ArrayError, lambda: comm.send(x, dest=comm.size)),
        (ArrayError, lambda: comm.recv(x, source=-1)),
        (ArrayError, lambda: comm.reduce_scatter(np.array(1.0))),
        (ArrayError, lambda: comm.allgather(x, x, counts=[1])),
        (ArrayError, lambda: comm.split(-1)),
    ):
        assert_raises(error, call)
    assert float(comm.allreduce(np.array(1.0))) == comm.size  # and it still works
