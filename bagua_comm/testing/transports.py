"""The contract of a transport, as a test."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from .. import arrays
from ..arrays import BITWISE_OPS, FLOATS, INTEGERS, Array, Op, dtype_named
from ..averages import quantized_allgather, quantized_allreduce, quantized_reduce_scatter
from ..codecs import MinMaxUInt8
from ..comm import Communicator
from ..errors import CommMismatch
from ..transports import Transport
from .values import assert_raises, reduced, sample, whole_range

SIZES = (2048, 65536)
"""Array sizes in bytes at which transports often switch to another method."""

_COUNTS = (1, 15, 16, 17, 31, 100)
"""Numbers of one-byte elements just below, at and above the width of vector registers."""


def check_transport(
    transport: Transport | Communicator,
    *,
    asarray: Callable[[Array], Array] | None = None,
    sizes: Sequence[int] = SIZES,
) -> None:
    """Run every call of a `Communicator` over this transport, and compare with NumPy.

    Collective. Covers all dtypes and reductions over the whole range of each dtype, in and out of place, 0-d,
    empty, multi-dimensional, uneven and strided arrays, sizes, point-to-point messages, groups, lanes and
    quantized collectives. Results must have the bits of NumPy's in rank order. Sums and products of floats may be
    rounded differently if the transport has `adds_in_rank_order = False`.

    Args:
        transport: The transport. If it takes only device arrays, pass a communicator with it after a transport
            that takes host arrays.
        asarray: Copies a NumPy array to memory that this transport takes: `cupy.asarray` for device arrays.
        sizes: Array sizes in bytes at which this transport switches to another method. Arrays of this size, of
            one element less and of one element more are checked, and p times smaller ones.

    Raises:
        AssertionError: A result is wrong; the message names the call.
        CommMismatch: Ranks hold different bytes where all should hold the same.

    >>> from bagua_comm.testing import run_ranks
    >>> results = run_ranks(2, check_transport)
    """
    comm = transport if isinstance(transport, Communicator) else Communicator([transport])
    for check in (
        _check_reductions,
        _check_movement,
        _check_shapes,
        _check_uneven,
        _check_quantized,
        _check_point_to_point,
        _check_objects,
        _check_groups,
        _check_lane,
    ):
        check(comm, asarray or np.copy)
        comm.barrier()
    if asarray is None:
        _check_counts(comm)
    _check_sizes(comm, asarray or np.copy, sizes)
    comm.barrier()


def assert_same(actual: Array, expected: Array, what: str) -> None:
    """Fail unless both have the same shape, dtype and bits."""
    actual = _of_the_same_kind(actual, expected, what)
    if actual.tobytes() != expected.tobytes():
        _fail(actual, expected, _bits(actual) != _bits(expected), what)


def assert_reduced(actual: Array, expected: Array, op: str, exact: bool, what: str) -> None:
    """Like `assert_same`, except that all NaNs are equal, and in min and max all zeros.

    Unless `exact`, sums and products of floats may be rounded differently.
    """
    actual = _of_the_same_kind(actual, expected, what)
    is_float = expected.dtype.name in FLOATS
    if is_float and not exact and op not in ("min", "max"):
        rtol = {"float16": 1e-2, "bfloat16": 6e-2, "float32": 1e-5, "float64": 1e-12}[expected.dtype.name]
        wide = actual.astype(np.float64), expected.astype(np.float64)
        np.testing.assert_allclose(*wide, rtol=rtol, atol=rtol, err_msg=what)
        return
    wrong = _bits(actual) != _bits(expected)
    if is_float and wrong.any():
        with np.errstate(invalid="ignore"):
            wrong &= ~((actual != actual) & (expected != expected))
            if op in ("min", "max"):
                wrong &= actual != expected
    if wrong.any():
        _fail(actual, expected, wrong, what)


def _of_the_same_kind(actual: Array, expected: Array, what: str) -> Array:
    """Return `actual` on the host; fail unless both have the same shape and dtype."""
    actual = arrays.to_host(actual)
    assert actual.shape == expected.shape, f"{what}: shape {actual.shape}, expected {expected.shape}"
    assert actual.dtype == expected.dtype, f"{what}: dtype {actual.dtype}, expected {expected.dtype}"
    return actual


def _fail(actual: Array, expected: Array, wrong: Array, what: str) -> None:
    at = np.unravel_index(int(np.argmax(wrong)), wrong.shape)
    raise AssertionError(
        f"{what}: {int(wrong.sum())} of {wrong.size} elements are wrong; the first, {[int(i) for i in at]}, is "
        f"{actual[at]!r}, expected {expected[at]!r}"
    )


def _bits(x: Array) -> Array:
    """Integers that differ exactly where the bits of `x` differ."""
    x = np.ascontiguousarray(x).reshape(x.shape)
    if x.dtype.kind == "c":
        return _bits(x.real) * 31 ^ _bits(x.imag)
    return x.view(f"u{x.dtype.itemsize}")


def _exact(comm: Communicator, x: Array) -> bool:
    """Whether arrays like `x` go over a transport that adds in rank order."""
    return comm.transport_for(x).adds_in_rank_order


def _values(dtype: str, op: Op, exact: bool) -> Callable[..., Array]:
    """The function that draws operands: small ones if results may be rounded differently."""
    rounded = dtype in FLOATS and op not in ("min", "max")
    return sample if rounded and not exact else whole_range


def _check_reduced(comm: Communicator, x: Array, expected: Array, op: Op, exact: bool, what: str) -> None:
    """Reduce the arrays `x` of all ranks in each way, and compare with their reduction."""
    result = comm.allreduce(x, op=op)
    assert_reduced(result, expected, op, exact, f"allreduce {what}")
    comm.check_consistency(result)
    at_root = comm.reduce(x, root=comm.size - 1, op=op)
    if comm.rank == comm.size - 1:
        assert_reduced(at_root, expected, op, exact, f"reduce {what}")
    else:
        assert at_root is None
    count = len(x) // comm.size
    mine = comm.reduce_scatter(x[: count * comm.size], op=op)
    assert_reduced(mine, expected[count * comm.rank :][:count], op, exact, f"reduce_scatter {what}")


def _check_reductions(comm: Communicator, put: Callable[[Array], Array]) -> None:
    p = comm.size
    exact = _exact(comm, put(np.zeros(1)))
    for dtype in sorted(INTEGERS | FLOATS):
        for op in arrays.ARITHMETIC_OPS + (BITWISE_OPS if dtype in INTEGERS else ()):
            what = f"{op} of {dtype}"
            xs = [_values(dtype, op, exact)(r, (p, 33), dtype) for r in range(p)]
            expected = reduced(xs, op)
            x = put(xs[comm.rank])

            _check_reduced(comm, x, expected, op, exact, what)
            assert_same(x, xs[comm.rank], f"the operand of reductions {what}")

            assert comm.allreduce(x, out=x, op=op) is x
            assert_reduced(x, expected, op, exact, f"allreduce in place, {what}")
            x = put(xs[comm.rank])
            result = comm.allreduce(x, out=x if comm.rank == 0 else None, op=op)
            assert_reduced(result, expected, op, exact, f"allreduce in place on one rank, {what}")

            x = put(xs[comm.rank])
            mine = slice(comm.rank, comm.rank + 1)
            comm.reduce_scatter(x, out=x[mine], op=op)
            assert_reduced(x[mine], expected[mine], op, exact, f"reduce_scatter in place, {what}")


def _check_counts(comm: Communicator) -> None:
    p = comm.size
    exact = _exact(comm, np.zeros(1))
    for dtype in sorted(INTEGERS | FLOATS):
        for op in ("sum", "prod"):
            for count in _COUNTS if dtype_named(dtype).itemsize < 4 else _COUNTS[::3]:
                xs = [_values(dtype, op, exact)(r, (p * count,), dtype, seed=count) for r in range(p)]
                total = reduced(xs, op)
                result = comm.allreduce(xs[comm.rank][:count], op=op)
                assert_reduced(result, total[:count], op, exact, f"allreduce {op} of {count} {dtype}")
                chunk = total[comm.rank * count : (comm.rank + 1) * count]
                result = comm.reduce_scatter(xs[comm.rank], op=op)
                assert_reduced(result, chunk, op, exact, f"reduce_scatter {op} of {p * count} {dtype}")


def _check_sizes(comm: Communicator, put: Callable[[Array], Array], sizes: Sequence[int]) -> None:
    p, rank = comm.size, comm.rank
    exact = _exact(comm, put(np.zeros(1)))
    for dtype in ("int8", "float32"):
        middles = {size // np.dtype(dtype).itemsize // part for size in sizes for part in (1, p)}
        for count in sorted({middle + more for middle in middles for more in (-1, 0, 1)}):
            what = f"of {count} {dtype}"
            xs = [_values(dtype, "sum", exact)(r, (count,), dtype, seed=count) for r in range(p)]
            x = put(xs[rank])
            _check_reduced(comm, x, reduced(xs, "sum"), "sum", exact, what)
            even, chunk = count // p * p, slice(rank * (count // p), (rank + 1) * (count // p))
            if dtype != "int8":
                continue  # data that only move are sent as bytes
            assert_same(comm.allgather(x), np.stack(xs), f"allgather {what}")
            assert_same(
                comm.alltoall(x[:even]), np.concatenate([x[:even][chunk] for x in xs]), f"alltoall {what}"
            )
            comm.broadcast(x, root=p - 1)
            assert_same(x, xs[p - 1], f"broadcast {what}")


def _check_movement(comm: Communicator, put: Callable[[Array], Array]) -> None:
    p, rank = comm.size, comm.rank
    for dtype in sorted(arrays.MOVABLE):
        xs = [whole_range(r, (p, 2), dtype) for r in range(p)]
        x = put(xs[rank])

        for root in range(p):
            value = put(xs[rank])
            assert comm.broadcast(value, root=root) is value
            assert_same(value, xs[root], f"broadcast {dtype}")

        assert_same(comm.allgather(x), np.stack(xs), f"allgather {dtype}")
        table = put(np.zeros((p, p, 2), dtype_named(dtype)))
        table[rank] = x
        comm.allgather(table[rank], out=table)
        assert_same(table, np.stack(xs), f"allgather in place, {dtype}")

        expected = np.stack([xs[r][rank] for r in range(p)])
        assert_same(comm.alltoall(x), expected, f"alltoall {dtype}")
        comm.alltoall(x, out=x)
        assert_same(x, expected, f"alltoall in place, {dtype}")

        x = put(xs[rank])
        gathered = comm.gather(x, root=0)
        if rank == 0:
            assert_same(gathered, np.stack(xs), f"gather {dtype}")
        else:
            assert gathered is None
        row = put(np.zeros(2, dtype_named(dtype)))
        comm.scatter(x if rank == 0 else None, out=row, root=0)
        assert_same(row, xs[0][rank], f"scatter {dtype}")
        one = put(np.zeros((), dtype_named(dtype)))
        comm.scatter(x[:, 0] if rank == 0 else None, out=one, root=0)
        assert_same(one, xs[0][rank, 0], f"scatter {dtype} to 0-d arrays")


def _check_shapes(comm: Communicator, put: Callable[[Array], Array]) -> None:
    p, rank = comm.size, comm.rank
    exact = _exact(comm, put(np.zeros(1)))
    for shape in ((), (0,), (3, 0), (1,), (2, 3, 5)):
        xs = [sample(r, shape, "float32") for r in range(p)]
        x = put(xs[rank])
        assert_reduced(comm.allreduce(x), reduced(xs, "sum"), "sum", exact, f"allreduce of shape {shape}")
        assert_same(comm.allreduce(x, op="max"), reduced(xs, "max"), f"maximum of shape {shape}")
        assert_same(comm.allgather(x), np.stack(xs), f"allgather of shape {shape}")
        assert_same(comm.broadcast(x, root=p - 1), xs[p - 1], f"broadcast of shape {shape}")

    xs = [sample(r, (4, 6), "float64") for r in range(p)]
    total, x = reduced(xs, "sum"), put(xs[rank])
    strided = put(np.zeros((8, 6)))[::2]
    strided[...] = x
    for what, result, expected in (
        ("a transpose", comm.allreduce(put(xs[rank].T)), total.T),
        ("columns", comm.allreduce(x[:, ::2]), total[:, ::2]),
        ("an array that runs backwards", comm.allreduce(x[::-1]), total[::-1]),
        ("a strided array", comm.allreduce(strided, out=strided).copy(), total),
    ):
        assert_reduced(result, expected, "sum", exact, f"allreduce of {what}")
    strided[...] = x
    comm.broadcast(strided, root=0)
    assert_same(strided.copy(), xs[0], "broadcast of a strided array")

    xs = [sample(r, (70001,), "float32") for r in range(p)]
    x = put(xs[rank])
    part = comm.allreduce(x, out=put(xs[rank]) if rank else None)
    assert_reduced(part, reduced(xs, "sum"), "sum", exact, "allreduce of many elements")
    large = comm.allreduce(x, op="avg")
    assert_reduced(large, reduced(xs, "avg"), "avg", exact, "average of many elements")
    comm.check_consistency(large)


def _check_uneven(comm: Communicator, put: Callable[[Array], Array]) -> None:
    p, rank = comm.size, comm.rank
    counts = [(r * 2 + 1) % 4 for r in range(p)]  # some of them zero
    xs = [sample(r, (counts[r],), "int32") for r in range(p)]
    everything = comm.allgather(put(xs[rank]), put(np.zeros(sum(counts), np.int32)), counts=counts)
    assert_same(everything, np.concatenate(xs), "allgather with counts")

    sizes = [[(i + 2 * j) % 3 for j in range(p)] for i in range(p)]  # what i sends to j
    ys = [[sample(i * p + j, (sizes[i][j],), "float32") for j in range(p)] for i in range(p)]
    incoming = [sizes[i][rank] for i in range(p)]
    out = put(np.zeros(sum(incoming), np.float32))
    comm.alltoall(put(np.concatenate(ys[rank])), out, counts=sizes[rank], out_counts=incoming)
    assert_same(out, np.concatenate([ys[i][rank] for i in range(p)]), "alltoall with counts")


def _check_quantized(comm: Communicator, put: Callable[[Array], Array]) -> None:
    p, codec, dtype = comm.size, MinMaxUInt8(block=32), np.dtype(np.float32)
    for count in (96, 20_000):
        xs = [sample(r, (p * count,), "float32", seed=6) for r in range(p)]
        coded = [codec.decode(codec.encode(x.reshape(p, count)), np.empty((p, count), dtype)) for x in xs]
        coded = coded if p > 1 else [xs[0].reshape(1, count)]  # nothing is encoded
        mine = put(xs[comm.rank])
        for op in ("sum", "avg"):
            chunk = quantized_reduce_scatter(comm, mine, op=op, codec=codec)
            expected = reduced([rows[comm.rank] for rows in coded], op)
            assert_same(chunk, expected, f"quantized_reduce_scatter {op} of {p * count}")
            both = quantized_allgather(comm, chunk, codec=codec).reshape(-1)
            total = quantized_allreduce(comm, mine, op=op, codec=codec)
            assert_same(total, arrays.to_host(both), f"quantized_allreduce {op} of {p * count}")
        counts = [min(32 * (r + 1), count) if r != 1 else 0 for r in range(p)]
        part = quantized_reduce_scatter(comm, mine[: sum(counts)], op="sum", codec=codec, counts=counts)
        comm.check_consistency(quantized_allgather(comm, part, codec=codec, counts=counts))
        start = sum(counts[: comm.rank])
        rows = [rows.reshape(-1)[start : start + counts[comm.rank]] for rows in coded]
        assert_same(part, reduced(rows, "sum"), f"quantized_reduce_scatter by {counts}")


def _check_point_to_point(comm: Communicator, put: Callable[[Array], Array]) -> None:
    p, rank = comm.size, comm.rank
    right, left = (rank + 1) % p, (rank - 1) % p
    for dtype in ("float32", "bfloat16", "bool"):
        x, out = sample(rank, (3, 2), dtype), put(np.zeros((3, 2), dtype_named(dtype)))
        assert comm.sendrecv(put(x), out, dest=right, source=left) is out
        assert_same(out, sample(left, (3, 2), dtype), f"sendrecv {dtype}")

    first, second = put(np.array([rank])), put(np.array([rank, rank]))
    got_first, got_second = put(np.zeros(1, int)), put(np.zeros((2, 2), int))[:, 0]
    comm.exchange([(right, first), (right, second)], [(left, got_first), (left, got_second)])
    assert arrays.to_host(got_first).tolist() == [left]
    assert arrays.to_host(got_second.copy()).tolist() == [left, left]

    if p > 1:
        if rank == 0:
            comm.send(put(np.array([42.0])), dest=1)
        if rank == 1:
            assert arrays.to_host(comm.recv(put(np.zeros(1)), source=0)).tolist() == [42.0]
    if p > 1 and not comm.transport_for(first).enqueues:
        # Messages of collectives don't match those of send and recv. (Where a send waits for its receive on the
        # device, this order of calls never ends, and nothing compares sizes.)
        if rank == 0:
            comm.send(put(np.array([42.0])), dest=1)
        total = comm.allreduce(put(np.full(70001, 1.0)))
        assert arrays.to_host(total)[0] == p
        if rank == 1:
            assert arrays.to_host(comm.recv(put(np.zeros(1)), source=0)).tolist() == [42.0]

        if rank == 0:
            comm.send(put(np.zeros(3)), dest=1)
        if rank == 1:
            assert_raises(CommMismatch, lambda: comm.recv(put(np.zeros(4)), source=0))


def _check_objects(comm: Communicator, put: Callable[[Array], Array]) -> None:
    everyone = comm.allgather_object({"rank": comm.rank, "text": "x" * comm.rank})
    assert everyone == [{"rank": r, "text": "x" * r} for r in range(comm.size)]
    obj = ("from", comm.rank) if comm.rank == comm.size - 1 else None
    assert comm.broadcast_object(obj, root=comm.size - 1) == ("from", comm.size - 1)
    comm.check_consistency(put(np.arange(5)))
    if comm.size > 1:
        assert_raises(CommMismatch, lambda: comm.check_consistency(put(np.array([comm.rank]))))


def _check_groups(comm: Communicator, put: Callable[[Array], Array]) -> None:
    def count(group: Communicator) -> int:
        return int(arrays.to_host(group.allreduce(put(np.array(1)))))

    halves = comm.split(comm.rank % 2, key=-comm.rank)
    members = sorted((r for r in range(comm.size) if r % 2 == comm.rank % 2), reverse=True)
    assert (halves.rank, halves.size) == (members.index(comm.rank), len(members))
    assert arrays.to_host(halves.allgather(put(np.array(comm.rank)))).tolist() == members

    twin = comm.dup()
    assert (twin.rank, twin.size) == (comm.rank, comm.size)
    assert count(twin) == comm.size

    intra, inter = comm.by_node()
    assert (intra.rank, intra.size) == (comm.local_rank, comm.local_size)
    assert count(intra) == comm.local_size
    assert comm.by_node() == (intra, inter)
    halves.close()
    twin.close()


def _check_lane(comm: Communicator, put: Callable[[Array], Array]) -> None:
    xs = [put(np.full(1000, float(comm.rank + i))) for i in range(5)]
    enqueues = comm.transport_for(xs[0]).enqueues
    with comm.lane("stream" if enqueues else None) as lane:
        done = [lane.submit(lane.comm.allreduce, x, out=x) for x in xs]
        assert int(arrays.to_host(comm.allreduce(put(np.array(1))))) == comm.size  # beside it
        lane.wait()
        for i, x in enumerate(xs):
            assert arrays.to_host(x)[0] == sum(r + i for r in range(comm.size))
        assert all(future.done() for future in done)
