"""Tools for tests, ours and yours: worlds of threads, a recording transport, conformance kits.

`check_transport`, `check_codec` and `check_algorithm` are the contracts made executable: what passes
them can be used wherever the library uses its own.
"""

from __future__ import annotations

import dataclasses
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np

import bagua_comm

from . import arrays
from .algorithms import Algorithm, Point
from .algorithms.base import phases_of
from .arrays import BITWISE_OPS, FLOATS, INTEGERS, Array, dtype_named
from .bucket import Plan, TensorSpec
from .codecs import Codec
from .comm import Communicator
from .engine import Engine
from .errors import ArrayError, CommAborted, CommMismatch, CommTimeout
from .transports import LocalTransport, Transport
from .transports.base import POINT_TO_POINT, Message
from .transports.local import Hub

T = TypeVar("T")


# ---------------------------------------------------------------------------------------------------
# Worlds
# ---------------------------------------------------------------------------------------------------


def run_ranks(
    size: int,
    body: Callable[[Communicator], T],
    *,
    nodes: Sequence[object] | None = None,
    wrap: Callable[[Transport], Transport] | None = None,
    timeout_s: float = 30.0,
    check: bool = False,
) -> list[T]:
    """Run `body(comm)` once per rank, each on a thread over the local transport; returns the results.

    An exception in one rank wakes the others, and is raised here with the rank in a note.

    Args:
        size: Number of ranks.
        body: What each rank does.
        nodes: A label for every rank's node; None if all share one.
        wrap: Put around every rank's transport, `Recording` say.
        timeout_s: How long one call may wait for its peers.
        check: See `Communicator`.

    >>> run_ranks(3, lambda comm: comm.rank * 10)
    [0, 10, 20]
    """
    hub = Hub(size)
    results: list[Any] = [None] * size
    failures: list[tuple[int, BaseException]] = []

    def run(rank: int) -> None:
        transport: Transport = LocalTransport(hub, rank, timeout_s=timeout_s)
        try:
            if wrap is not None:
                transport = wrap(transport)
            comm = Communicator([transport], nodes=nodes, check=check)
            results[rank] = body(comm)
        except BaseException as exc:
            failures.append((rank, exc))
            hub.abort(f"rank {rank} failed: {type(exc).__name__}: {exc}")

    threads = [
        threading.Thread(target=run, args=(rank,), name=f"rank {rank}", daemon=True) for rank in range(size)
    ]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        for thread in threads:
            thread.join(0.05)
        if failures and any(thread.is_alive() for thread in threads):
            _give_up_waiting(threads, timeout_s)
    if failures:
        # What others raise because one failed is not what went wrong.
        first = next((f for f in failures if not isinstance(f[1], CommAborted)), failures[0])
        rank, error = first
        if hasattr(error, "add_note"):
            error.add_note(f"in rank {rank} of {size}")
        raise error
    return results


def _give_up_waiting(threads: Sequence[threading.Thread], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
        if thread.is_alive():
            raise CommTimeout(f"{thread.name} still runs {timeout_s:g} s after another rank failed")


class Call(NamedTuple):
    """One call that a `Recording` saw."""

    name: str
    nbytes: int


class Recording(Transport):
    """A transport that passes everything on, and remembers the calls in `calls`.

    >>> def body(comm):
    ...     comm.allreduce(np.ones(4))
    ...     return comm.transports[0].calls
    >>> run_ranks(2, body, wrap=Recording)[0]
    [Call(name='allreduce', nbytes=32)]
    """

    name = "recording"

    def __init__(self, inner: Transport) -> None:
        super().__init__()
        self.inner, self.calls = inner, list[Call]()
        self.rank, self.size, self.timeout_s = inner.rank, inner.size, inner.timeout_s
        self.concurrent, self.enqueues = inner.concurrent, inner.enqueues

    @property
    def sent_bytes(self) -> int:  # type: ignore[override]
        """What the recorded transport counts."""
        return self.inner.sent_bytes

    def begin_call(self, name: str, *, collective: bool) -> None:
        """See `Transport.begin_call`; the recorded transport is the one that waits."""
        self.inner.begin_call(name, collective=collective)

    def end_call(self) -> None:
        """See `Transport.end_call`."""
        self.inner.end_call()

    def moves(self, x: Array) -> bool:
        """What the recorded transport moves."""
        return self.inner.moves(x)

    def exchange(self, sends: Sequence[Message], recvs: Sequence[Message], *, tag: int = POINT_TO_POINT) -> None:
        """See `Transport.exchange`."""
        self._note("exchange", *[x for _, x in sends])
        self.inner.exchange(sends, recvs, tag=tag)

    def allreduce(self, x: Array, out: Array, op: str) -> None:
        """See `Transport.allreduce`."""
        self._note("allreduce", x)
        self.inner.allreduce(x, out, op)

    def reduce_scatter(self, x: Array, out: Array, op: str) -> None:
        """See `Transport.reduce_scatter`."""
        self._note("reduce_scatter", x)
        self.inner.reduce_scatter(x, out, op)

    def reduce(self, x: Array, out: Array | None, root: int, op: str) -> None:
        """See `Transport.reduce`."""
        self._note("reduce", x)
        self.inner.reduce(x, out, root, op)

    def broadcast(self, x: Array, root: int) -> None:
        """See `Transport.broadcast`."""
        self._note("broadcast", x)
        self.inner.broadcast(x, root)

    def allgather(self, x: Array, out: Array) -> None:
        """See `Transport.allgather`."""
        self._note("allgather", x)
        self.inner.allgather(x, out)

    def alltoall(self, x: Array, out: Array) -> None:
        """See `Transport.alltoall`."""
        self._note("alltoall", x)
        self.inner.alltoall(x, out)

    def barrier(self) -> None:
        """See `Transport.barrier`."""
        self._note("barrier")
        self.inner.barrier()

    def split(self, color: int, key: int) -> Transport:
        """See `Transport.split`."""
        return Recording(self.inner.split(color, key))

    def dup(self) -> Transport:
        """See `Transport.dup`."""
        return Recording(self.inner.dup())

    def shrink(self, host: Transport | None = None) -> Transport:
        """See `Transport.shrink`."""
        return Recording(self.inner.shrink(host))

    def abort(self, exit_code: int = 1) -> None:
        """See `Transport.abort`."""
        self.inner.abort(exit_code)

    def leave(self, reason: str | None = None) -> bool:
        """See `Transport.leave`."""
        return self.inner.leave(reason)

    def close(self) -> None:
        """See `Transport.close`."""
        self.inner.close()

    def _note(self, name: str, *values: Array) -> None:
        self.calls.append(Call(name, sum(x.nbytes for x in values)))


# ---------------------------------------------------------------------------------------------------
# Conformance: transports
# ---------------------------------------------------------------------------------------------------


def check_transport(
    transport: Transport | Communicator, *, asarray: Callable[[Array], Array] | None = None
) -> None:
    """Run every call of a `Communicator` over this transport, and compare with NumPy.

    Collective. Covers all dtypes and reductions, in and out of place, 0-d, empty, multi-dimensional,
    uneven and non-contiguous arrays, point-to-point messages, groups, lanes and wrong arguments.

    Args:
        transport: What to check. A transport of device arrays alone goes into a communicator, behind one that
            carries host arrays.
        asarray: Copies a NumPy array to where this transport takes it: `cupy.asarray`, for one of device arrays.

    >>> results = run_ranks(2, check_transport)
    """
    comm = transport if isinstance(transport, Communicator) else Communicator([transport])
    for check in (
        _check_reductions,
        _check_movement,
        _check_layouts,
        _check_uneven,
        _check_point_to_point,
        _check_objects,
        _check_groups,
        _check_lane,
    ):
        check(comm, asarray or np.copy)
        comm.barrier()
    _check_refusals(comm)
    comm.barrier()


def sample(rank: int, shape: tuple[int, ...], dtype: str, seed: int = 0) -> Array:
    """Reproducible values that every rank can work out for every other: small, signed where possible."""
    random = np.random.default_rng([seed, rank])
    if dtype == "bool":
        return random.integers(0, 2, shape).astype(bool)
    if dtype in INTEGERS:
        low = 0 if dtype.startswith("u") else -3
        return random.integers(low, 4, shape).astype(dtype)
    values = random.standard_normal(shape)
    if dtype.startswith("complex"):
        values = values + 1j * random.standard_normal(shape)
    return np.asarray(values).astype(dtype_named(dtype))


def reduced(values: Sequence[Array], op: str) -> Array:
    """What reducing these arrays gives, worked out in NumPy: the reference of `allreduce`."""
    dtype = values[0].dtype
    wide = np.dtype(np.float32) if dtype.name in arrays.REDUCED_PRECISION else dtype
    with np.errstate(all="ignore"):
        stack = np.stack([value.astype(wide) for value in values])
        if op == "avg" and dtype.name in INTEGERS:
            return np.trunc(stack.astype(np.float64).mean(axis=0)).astype(dtype)
        if op == "avg":
            return np.asarray(stack.sum(axis=0, dtype=wide) / wide.type(len(values))).astype(dtype)
        function = {
            "sum": np.add,
            "prod": np.multiply,
            "min": np.minimum,
            "max": np.maximum,
            "band": np.bitwise_and,
            "bor": np.bitwise_or,
            "bxor": np.bitwise_xor,
        }[op]
        return np.asarray(function.reduce(stack, axis=0, dtype=wide)).astype(dtype)


def _on_host(x: Array) -> Array:
    return x if isinstance(x, np.ndarray) else x.get()


def _assert_close(actual: Array, expected: Array, what: str) -> None:
    actual = _on_host(actual)
    assert actual.shape == expected.shape, f"{what}: shape {actual.shape}, expected {expected.shape}"
    assert actual.dtype == expected.dtype, f"{what}: dtype {actual.dtype}, expected {expected.dtype}"
    tolerance = {"float16": 1e-2, "bfloat16": 6e-2, "float32": 1e-5, "float64": 1e-12}
    rtol = tolerance.get(expected.dtype.name, 0)
    wide = np.complex128 if expected.dtype.kind == "c" else np.float64
    if expected.dtype.name in INTEGERS or expected.dtype == bool:
        np.testing.assert_array_equal(actual, expected, err_msg=what)
    else:
        np.testing.assert_allclose(actual.astype(wide), expected.astype(wide), rtol=rtol, atol=rtol, err_msg=what)


def _check_reductions(comm: Communicator, put: Callable[[Array], Array]) -> None:
    p = comm.size
    for dtype in sorted(INTEGERS | FLOATS):
        for op in arrays.ARITHMETIC_OPS + (BITWISE_OPS if dtype in INTEGERS else ()):
            what = f"{op} of {dtype}"
            xs = [sample(r, (p, 3), dtype) for r in range(p)]
            expected = reduced(xs, op)
            x = put(xs[comm.rank])

            result = comm.allreduce(x, op=op)
            _assert_close(result, expected, f"allreduce {what}")
            np.testing.assert_array_equal(_on_host(x), xs[comm.rank])
            comm.check_consistency(result)

            assert comm.allreduce(x, out=x, op=op) is x
            _assert_close(x, expected, f"allreduce in place, {what}")
            x = put(xs[comm.rank])
            result = comm.allreduce(x, out=x if comm.rank == 0 else None, op=op)
            _assert_close(result, expected, f"allreduce in place on one rank, {what}")

            x = put(xs[comm.rank])
            at_root = comm.reduce(x, root=p - 1, op=op)
            if comm.rank == p - 1:
                _assert_close(at_root, expected, f"reduce {what}")
            else:
                assert at_root is None

            mine = comm.reduce_scatter(x, op=op)
            _assert_close(mine, expected[comm.rank : comm.rank + 1], f"reduce_scatter {what}")
            chunk = x[comm.rank : comm.rank + 1]
            comm.reduce_scatter(x, out=chunk, op=op)
            _assert_close(chunk, _on_host(mine), f"reduce_scatter in place, {what}")


def _check_movement(comm: Communicator, put: Callable[[Array], Array]) -> None:
    p, rank = comm.size, comm.rank
    for dtype in sorted(arrays.MOVABLE):
        xs = [sample(r, (p, 2), dtype) for r in range(p)]
        x = put(xs[rank])

        for root in range(p):
            value = put(xs[rank])
            assert comm.broadcast(value, root=root) is value
            _assert_close(value, xs[root], f"broadcast {dtype}")

        _assert_close(comm.allgather(x), np.stack(xs), f"allgather {dtype}")
        table = put(np.zeros((p, p, 2), dtype_named(dtype)))
        table[rank] = x
        comm.allgather(table[rank], out=table)
        _assert_close(table, np.stack(xs), f"allgather in place, {dtype}")

        expected = np.stack([xs[r][rank] for r in range(p)])
        _assert_close(comm.alltoall(x), expected, f"alltoall {dtype}")
        comm.alltoall(x, out=x)
        _assert_close(x, expected, f"alltoall in place, {dtype}")

        x = put(xs[rank])
        gathered = comm.gather(x, root=0)
        if rank == 0:
            _assert_close(gathered, np.stack(xs), f"gather {dtype}")
        else:
            assert gathered is None
        row = put(np.zeros(2, dtype_named(dtype)))
        comm.scatter(x if rank == 0 else None, out=row, root=0)
        _assert_close(row, xs[0][rank], f"scatter {dtype}")
        one = put(np.zeros((), dtype_named(dtype)))
        comm.scatter(x[:, 0] if rank == 0 else None, out=one, root=0)
        _assert_close(one, xs[0][rank, 0], f"scatter {dtype} to 0-d arrays")


def _check_layouts(comm: Communicator, put: Callable[[Array], Array]) -> None:
    p, rank = comm.size, comm.rank
    for shape in ((), (0,), (3, 0), (1,), (2, 3, 5)):
        xs = [sample(r, shape, "float32") for r in range(p)]
        x = put(xs[rank])
        _assert_close(comm.allreduce(x), reduced(xs, "sum"), f"allreduce of shape {shape}")
        _assert_close(comm.allreduce(x, op="max"), reduced(xs, "max"), f"maximum of shape {shape}")
        _assert_close(comm.allgather(x), np.stack(xs), f"allgather of shape {shape}")
        _assert_close(comm.broadcast(x, root=p - 1), xs[p - 1], f"broadcast of shape {shape}")

    xs = [sample(r, (4, 6), "float64") for r in range(p)]
    strided = put(np.zeros((8, 6)))[::2]
    strided[...] = put(xs[rank])
    _assert_close(comm.allreduce(put(xs[rank].T)), reduced(xs, "sum").T, "allreduce of a transpose")
    _assert_close(comm.allreduce(put(xs[rank])[:, ::2]), reduced(xs, "sum")[:, ::2], "allreduce of columns")
    assert comm.allreduce(strided, out=strided) is strided
    _assert_close(strided.copy(), reduced(xs, "sum"), "allreduce of a strided array")
    strided[...] = put(xs[rank])
    comm.broadcast(strided, root=0)
    _assert_close(strided.copy(), xs[0], "broadcast of a strided array")

    xs = [sample(r, (70001,), "float32") for r in range(p)]
    x = put(xs[rank])
    part = comm.allreduce(x, out=put(xs[rank]) if rank else None)
    _assert_close(part, reduced(xs, "sum"), "allreduce of many elements")
    large = comm.allreduce(x, op="avg")
    _assert_close(large, reduced(xs, "avg"), "allreduce of many elements")
    comm.check_consistency(large)


def _check_uneven(comm: Communicator, put: Callable[[Array], Array]) -> None:
    p, rank = comm.size, comm.rank
    counts = [(r * 2 + 1) % 4 for r in range(p)]  # some of them zero
    xs = [sample(r, (counts[r],), "int32") for r in range(p)]
    everything = comm.allgatherv(put(xs[rank]), put(np.zeros(sum(counts), np.int32)), counts)
    _assert_close(everything, np.concatenate(xs), "allgatherv")

    sizes = [[(i + 2 * j) % 3 for j in range(p)] for i in range(p)]  # what i sends to j
    ys = [[sample(i * p + j, (sizes[i][j],), "float32") for j in range(p)] for i in range(p)]
    incoming = [sizes[i][rank] for i in range(p)]
    out = put(np.zeros(sum(incoming), np.float32))
    comm.alltoallv(put(np.concatenate(ys[rank])), sizes[rank], out, incoming)
    _assert_close(out, np.concatenate([ys[i][rank] for i in range(p)]), "alltoallv")


def _check_point_to_point(comm: Communicator, put: Callable[[Array], Array]) -> None:
    p, rank = comm.size, comm.rank
    right, left = (rank + 1) % p, (rank - 1) % p
    for dtype in ("float32", "bfloat16", "bool"):
        x, out = sample(rank, (3, 2), dtype), put(np.zeros((3, 2), dtype_named(dtype)))
        assert comm.sendrecv(put(x), out, dest=right, source=left) is out
        _assert_close(out, sample(left, (3, 2), dtype), f"sendrecv {dtype}")

    first, second = put(np.array([rank])), put(np.array([rank, rank]))
    got_first, got_second = put(np.zeros(1, int)), put(np.zeros((2, 2), int))[:, 0]
    comm.exchange([(right, first), (right, second)], [(left, got_first), (left, got_second)])
    assert _on_host(got_first).tolist() == [left]
    assert _on_host(got_second.copy()).tolist() == [left, left]

    if p > 1:
        if rank == 0:
            comm.send(put(np.array([42.0])), dest=1)
        if rank == 1:
            assert _on_host(comm.recv(put(np.zeros(1)), source=0)).tolist() == [42.0]
    if p > 1 and not comm.accept("check_transport", "x", first)[1].enqueues:
        # Messages of collectives don't match those of send and recv. (Where a send waits for its receive on the
        # device, this order of calls never ends, and nothing compares sizes.)
        if rank == 0:
            comm.send(put(np.array([42.0])), dest=1)
        total = comm.allreduce(put(np.full(70001, 1.0)))
        assert _on_host(total)[0] == p
        if rank == 1:
            assert _on_host(comm.recv(put(np.zeros(1)), source=0)).tolist() == [42.0]

        if rank == 0:
            comm.send(put(np.zeros(3)), dest=1)
        if rank == 1:
            _assert_raises(CommMismatch, lambda: comm.recv(put(np.zeros(4)), source=0))


def _check_objects(comm: Communicator, put: Callable[[Array], Array]) -> None:
    everyone = comm.allgather_object({"rank": comm.rank, "text": "x" * comm.rank})
    assert everyone == [{"rank": r, "text": "x" * r} for r in range(comm.size)]
    obj = ("from", comm.rank) if comm.rank == comm.size - 1 else None
    assert comm.broadcast_object(obj, root=comm.size - 1) == ("from", comm.size - 1)
    comm.check_consistency(put(np.arange(5)))
    if comm.size > 1:
        _assert_raises(CommMismatch, lambda: comm.check_consistency(put(np.array([comm.rank]))))


def _check_groups(comm: Communicator, put: Callable[[Array], Array]) -> None:
    def count(group: Communicator) -> int:
        return int(_on_host(group.allreduce(put(np.array(1)))))

    halves = comm.split(comm.rank % 2, key=-comm.rank)
    members = sorted((r for r in range(comm.size) if r % 2 == comm.rank % 2), reverse=True)
    assert (halves.rank, halves.size) == (members.index(comm.rank), len(members))
    assert _on_host(halves.allgather(put(np.array(comm.rank)))).tolist() == members

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
    enqueues = comm.accept("check_transport", "x", xs[0])[1].enqueues
    with comm.lane("stream" if enqueues else None) as lane:
        done = [lane.submit(lane.comm.allreduce, x, out=x) for x in xs]
        assert int(_on_host(comm.allreduce(put(np.array(1))))) == comm.size  # beside it
        lane.wait()
        for i, x in enumerate(xs):
            assert _on_host(x)[0] == sum(r + i for r in range(comm.size))
        assert all(future.done() for future in done)


def _check_refusals(comm: Communicator) -> None:
    x = np.zeros((3 * comm.size, 2), np.float32)
    for error, call in (
        (ArrayError, lambda: comm.allreduce(x, op="mean")),
        (ArrayError, lambda: comm.allreduce(x, out=np.zeros(3, np.float32))),
        (ArrayError, lambda: comm.allreduce(x, out=np.zeros(x.shape, np.float64))),
        (ArrayError, lambda: comm.allreduce(x[:-1], out=x[1:])),
        (ArrayError, lambda: comm.allreduce(x, out=np.broadcast_to(np.float32(0), x.shape))),
        (TypeError, lambda: comm.allreduce(x, op="bxor")),
        (TypeError, lambda: comm.allreduce([1.0, 2.0])),
        (TypeError, lambda: comm.allreduce(np.array([None]))),
        (TypeError, lambda: comm.allreduce(x.astype(">f4"))),
        (TypeError, lambda: comm.allreduce(np.zeros(2, bool))),
        (ArrayError, lambda: comm.broadcast(x, root=comm.size)),
        (ArrayError, lambda: comm.reduce(x, root=-1)),
        (ArrayError, lambda: comm.send(x, dest=comm.size)),
        (ArrayError, lambda: comm.recv(x, source=-1)),
        (ArrayError, lambda: comm.reduce_scatter(np.array(1.0))),
        (ArrayError, lambda: comm.allgatherv(x, x, [1])),
        (ArrayError, lambda: comm.split(-1)),
    ):
        _assert_raises(error, call)
    assert float(comm.allreduce(np.array(1.0))) == comm.size  # and it still works


def _assert_raises(error: type[BaseException], call: Callable[[], object]) -> None:
    try:
        call()
    except error:
        return
    raise AssertionError(f"expected {error.__name__}")


# ---------------------------------------------------------------------------------------------------
# Conformance: codecs
# ---------------------------------------------------------------------------------------------------


def check_codec(codec: Codec) -> None:
    """Check that a codec keeps the contract of `codecs.base`.

    >>> check_codec(bagua_comm.MinMaxUInt8(block=64))
    """
    again = eval(repr(codec), _names_of(codec))
    assert again == codec
    assert hash(again) == hash(codec)
    for name in sorted(codec.dtypes):
        dtype = dtype_named(name)
        for n, m in ((1, 1), (3, 7), (2, 1000), (4, 1024), (1, 0), (2, 70001)):
            x = sample(n, (n, m), name, seed=m)
            w = codec.wire_nbytes(m, dtype)
            wire = codec.encode(x)
            assert wire.shape == (n, w)
            assert wire.dtype == np.uint8

            dirty = np.full((n, w), 255, np.uint8)
            assert codec.encode(x, out=dirty) is dirty
            assert dirty.tobytes() == wire.tobytes(), "encode leaves old bytes on the wire"
            for row in range(n):
                alone = codec.encode(x[row : row + 1])
                assert alone.tobytes() == wire[row].tobytes(), "a chunk depends on its neighbours"

            decoded = np.full_like(x, 7)
            assert codec.decode(wire, decoded) is decoded
            if m:
                spread = float(np.ptp(x.astype(np.float64)))
                error = np.abs(decoded.astype(np.float64) - x.astype(np.float64)).max()
                assert error <= max(spread / 64, 1e-2), f"error {error} for a range of {spread}"

            for op in ("sum", "avg"):
                combined = codec.combine(wire, op=op, count=m, dtype=dtype)
                total = _combined(codec, wire, op, m, dtype)
                if name == "float32":
                    assert combined.tobytes() == codec.encode(total).tobytes()
                elif m:
                    # Its sum is not rounded to the element dtype on the way, as `total` was.
                    again = codec.decode(combined, np.empty_like(total)).astype(np.float64)
                    spread = float(np.ptp(total.astype(np.float64)))
                    difference = np.abs(again - total.astype(np.float64)).max()
                    assert difference <= max(spread / 32, 0.1), f"{op} of {name}: off by {difference}"

        x = sample(0, (2, 1000), name)
        x[0, 10], x[1, 20] = np.nan, np.inf
        decoded = codec.decode(codec.encode(x), np.empty_like(x)).astype(np.float64)
        assert not np.isfinite(decoded[0]).all(), "a NaN is hidden"
        assert not np.isfinite(decoded[1]).all(), "an infinity is hidden"
        extremes = np.array([[1, 0.999, 0, 0.5] * 8], dtype) * bagua_comm.kernels.host.largest_finite(dtype)
        extremes = extremes.astype(dtype)
        decoded = codec.decode(codec.encode(extremes), np.empty_like(extremes))
        assert np.isfinite(decoded.astype(np.float64)).all(), "what is finite becomes infinite"
    _assert_raises(TypeError, lambda: codec.encode(np.zeros((1, 2), np.int32)))
    _assert_raises(ArrayError, lambda: codec.encode(np.zeros(4, np.float32)))
    _assert_raises(ArrayError, lambda: codec.encode(np.zeros((1, 4), np.float32), out=np.zeros((1, 1), np.uint8)))


def _names_of(value: object) -> dict[str, Any]:
    """The names that the repr of a value may use: ours, and those of the module that defines its class."""
    return {**vars(bagua_comm), **vars(sys.modules[type(value).__module__])}


def _combined(codec: Codec, wire: Array, op: str, count: int, dtype: np.dtype[Any]) -> Array:
    """What `combine` should encode, by way of decoding; exact for float32."""
    n = len(wire)
    wide = codec.decode(wire, np.empty((n, count), dtype)).astype(np.float32)
    total = wide[0].copy()
    for row in wide[1:]:
        total += row
    if op == "avg":
        total /= np.float32(n)
    return total[None].astype(dtype)


# ---------------------------------------------------------------------------------------------------
# Conformance: algorithms
# ---------------------------------------------------------------------------------------------------


def check_algorithm(
    algorithm: Algorithm, *, comm: Communicator | None = None, sizes: Sequence[int] = (1, 2, 3, 4)
) -> None:
    """Check that an algorithm keeps its contract: settings, window, same bytes, a restart that changes nothing.

    Trains with it in an `Engine` for several steps: over `comm` (collective), or in worlds of each of `sizes`.

    >>> check_algorithm(bagua_comm.ByteGrad(), sizes=(2,))
    """
    assert dataclasses.is_dataclass(algorithm)
    assert eval(repr(algorithm), _names_of(algorithm)) == algorithm
    for phase in phases_of(algorithm):
        assert phase.payload in ("grad", "weight")
        points = list(Point)
        assert phase.window.opens in points
        assert phase.window.closes in points
    if comm is not None:
        _check_training(comm, algorithm)
        return
    for size in sizes:
        run_ranks(size, lambda comm: _check_training(comm, algorithm))


_SPECS = [TensorSpec(f"t{i}", (5, i + 1), "float32") for i in range(6)]


def _check_training(comm: Communicator, algorithm: Algorithm) -> None:
    def make() -> Engine:
        plan = Plan.pack(_SPECS, bucket_bytes=200, alignment=4 * comm.size)
        return Engine(comm, algorithm, plan, {p.payload: plan.allocate() for p in phases_of(algorithm)})

    with make() as engine:
        assert len(engine.buckets) > 1
        for step in range(3):
            _train(comm, engine, step)
        saved = engine.state_dict()
        flats = [bucket.flat.copy() for bucket in engine.buckets]
        for step in range(3, 5):
            _train(comm, engine, step)
        engine.settle()
        expected = [bucket.flat.copy() for bucket in engine.buckets]

    if any(phase.window.closes is Point.NEVER for phase in phases_of(algorithm)):
        return  # what other ranks do when is not for a checkpoint to say
    with make() as engine:
        engine.load_state_dict(saved)
        for bucket, flat in zip(engine.buckets, flats, strict=True):
            bucket.flat[...] = flat
        for step in range(3, 5):
            _train(comm, engine, step)
        engine.settle()
        for bucket, flat in zip(engine.buckets, expected, strict=True):
            np.testing.assert_array_equal(bucket.flat, flat, err_msg="after a restart")


def _train(comm: Communicator, engine: Engine, step: int) -> None:
    """One step: gradients that differ between ranks, or weights that change by as much."""
    engine.at(Point.FORWARD)
    of_gradients = engine.payload == "grad"
    if not of_gradients:
        engine.at(Point.BACKWARD)
    for bucket in engine.buckets:
        for view in bucket.views.values():
            value = sample(comm.rank, view.shape, "float32", seed=step)
            view[...] = value if of_gradients else view - value
    if of_gradients:
        for spec in reversed(_SPECS):  # not in the order of the plan
            engine.ready(spec.name)
        engine.at(Point.BACKWARD)
        for bucket, state in zip(engine.buckets, engine.states, strict=True):
            _assert_averaged(comm, bucket.flat, state)
    engine.at(Point.STEP)
    assert all(np.isfinite(bucket.flat).all() for bucket in engine.buckets)


def _assert_averaged(comm: Communicator, gradient: Array, state: Any) -> None:
    """All ranks hold the same gradient, or the same of what the algorithm averages in its place.

    Raises:
        CommMismatch: They don't.
    """
    fields = dataclasses.fields(state) if dataclasses.is_dataclass(state) else ()
    kept = [value for value in (getattr(state, field.name) for field in fields) if hasattr(value, "dtype")]
    for candidate in kept:
        try:
            comm.check_consistency(candidate)
        except CommMismatch:
            continue
        if candidate.any():
            return
    comm.check_consistency(gradient)


__all__ = [
    "Call",
    "Recording",
    "check_algorithm",
    "check_codec",
    "check_transport",
    "reduced",
    "run_ranks",
    "sample",
]
