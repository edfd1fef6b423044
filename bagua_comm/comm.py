"""The communicator: what users hold.

It checks arguments, allocates results, traces, counts, and asks its transport to move the bytes. All
arguments are checked before a byte moves, so that all ranks fail alike.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import sys
import threading
import time
import warnings
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np

from . import arrays, objects, trace
from .agreement import Messages, compare_calls, compare_counts
from .arrays import Array, Scratch, as_array, as_real, check_reduction, parts
from .errors import ArrayError, CommError, CommMismatch, UnsupportedError
from .lane import InlineLane, Lane, StreamLane, ThreadLane
from .topology import place
from .trace import Counters, Recorder
from .transports.base import COLLECTIVE, Message, Transport

_POINT_TO_POINT = frozenset({"send", "recv", "sendrecv", "exchange", "send_object", "recv_object"})
"""Calls that two ranks make, and not all."""


class Nodes(NamedTuple):
    """The communicators inside a node and across nodes; see `Communicator.by_node`."""

    intra: Communicator
    inter: Communicator


class Communicator:
    """A group of `size` ranks that call collectives together; this is `rank` of them.

    Rules for all methods:

    * "Collective." means that all ranks call it, in the same order.
    * Arrays are NumPy or CuPy arrays, or anything with `__dlpack__` (a torch tensor), of any shape and
      of integer, floating-point (float16 and bfloat16 too), bool or complex dtype.
    * An input that is not C-contiguous, or not aligned, is copied once; into such an `out` the result is copied.
    * `out=None` makes a new array. Where `out` may be the input itself, or lie in it, the method says
      so; any other overlap is refused. The result is returned, `out` itself if it was given.
    * A host array's result is there when the call returns. A device array is read and written in the order of
      CuPy's current stream: the result is there for what is enqueued on it after the call. Over NCCL the host
      waits neither for the device nor for peers.
    * A wait that lasts longer than `timeout_s` raises `CommTimeout`. What NCCL has in flight for longer is given
      up, and the next call raises it, or `close`.

    One thread uses a communicator at a time: a call raises `CommError` while another thread is in one. See `lane`
    for work beside it. A process that was forked off cannot use its parent's communicator.

    Args:
        transports: What moves the bytes; the first that `moves` an array is used for it. The first of all carries
            host arrays, which barriers, objects and checks go through.
        nodes: A label (a host name, say) for the node of every rank; None if all share one.
        device: The index of this rank's GPU, if it has one.
        check: Compare every call among the ranks before it runs, and raise `CommMismatch` naming both calls
            where they don't fit together: in dtype, shape, counts, op, root or codec. Costs a small allgather a
            call, and a small message before each message between two ranks.
        tracer: Where spans go; by default a `Recorder` of this communicator's own.
    """

    def __init__(
        self,
        transports: Sequence[Transport],
        *,
        nodes: Sequence[object] | None = None,
        device: int | None = None,
        check: bool = False,
        tracer: trace.Tracer | None = None,
    ) -> None:
        self.transports = tuple(transports)
        first = self.transports[0]
        self.rank: int = first.rank
        self.size: int = first.size
        self.timeout_s: float = first.timeout_s
        self._labels = list(nodes) if nodes is not None else [0] * self.size
        self.node, self.local_rank, self.local_size = place(self.rank, self._labels)
        self.device = device
        self.check = check
        self.tracer: trace.Tracer = tracer if tracer is not None else Recorder()
        self.counters = Counters()
        self.scratch = Scratch()
        self._nodes: Nodes | None = None
        self._closed = False
        self._messages = Messages()
        self._process = os.getpid()
        self._busy = threading.Lock()
        self._user = 0
        """The thread that makes a call, by its number; 0 if none."""
        self._calls = 0
        self._last_call = "none"

    # Collectives ------------------------------------------------------------------------------------

    def allreduce(self, x: Array, out: Array | None = None, *, op: str = "sum") -> Array:
        """Reduce `x` over all ranks, to the same bytes on every rank.

        Collective. `x` has the same shape and dtype on every rank. `out` may be `x`.

        Args:
            x: The array of this rank.
            out: Where to put the result.
            op: "sum", "avg", "prod", "min", "max"; also "band", "bor", "bxor" for integers. The average
                of integers is added in 64 bits and truncated towards zero. float16 and bfloat16 are reduced in
                float32. Complex numbers have "sum", "avg" and, in host arrays, "prod".

        Raises:
            ArrayError: `out` does not fit `x`, or `op` is unknown.
            UnsupportedError: No such reduction for this dtype, or no transport takes such an array.

        >>> from bagua_comm.testing import run_ranks
        >>> run_ranks(2, lambda comm: comm.allreduce(np.array([1.0, comm.rank]), op="avg"))
        [array([1. , 0.5]), array([1. , 0.5])]
        """
        call = "allreduce"
        send, transport = self.accept(call, "x", x)
        _check_reduction(call, op, send)
        out, target = self.landing(call, out, send.shape, send)
        send = self.in_place(call, send, target)
        with Operation(self, call, transport, send, {"op": op}):
            transport.allreduce(as_real(arrays.contiguous(send), op), as_real(target, op), op)
        return finished(out, target)

    def reduce(self, x: Array, out: Array | None = None, *, root: int, op: str = "sum") -> Array | None:
        """Reduce `x` over all ranks; only `root` gets the result, the others None.

        Collective. `x` has the same shape and dtype on every rank. `out` matters on `root` alone, and
        may be `x`. For `op` see `allreduce`.

        Raises:
            ArrayError: `out` does not fit `x`, `root` is no rank, or `op` is unknown.
            UnsupportedError: No such reduction for this dtype, or no transport takes such an array.
        """
        call = "reduce"
        send, transport = self.accept(call, "x", x)
        self._check_peer(call, "root", root)
        _check_reduction(call, op, send)
        if self.rank != root:
            with Operation(self, call, transport, send, {"op": op, "root": root}):
                transport.reduce(as_real(arrays.contiguous(send), op), None, root, op)
            return None
        out, target = self.landing(call, out, send.shape, send)
        send = self.in_place(call, send, target)
        with Operation(self, call, transport, send, {"op": op, "root": root}):
            transport.reduce(as_real(arrays.contiguous(send), op), as_real(target, op), root, op)
        return finished(out, target)

    def broadcast(self, x: Array, *, root: int) -> Array:
        """Copy `x` of `root` into `x` of every other rank; returns `x`.

        Collective. `x` has the same shape and dtype on every rank.

        Raises:
            ArrayError: `root` is no rank, or `x` cannot be written to.
            UnsupportedError: No transport takes such an array.
        """
        call = "broadcast"
        value, transport = self.accept(call, "x", x)
        self._check_peer(call, "root", root)
        if self.rank != root:
            _check_writable(call, "x", x, value)
        target = arrays.contiguous(value)
        with Operation(self, call, transport, target, {"root": root}):
            transport.broadcast(target, root)
        if target is not value and self.rank != root:
            value[...] = target
        return x

    def allgather(self, x: Array, out: Array | None = None) -> Array:
        """Collect `x` of every rank: row r of the result is rank r's.

        Collective. `x` has the same shape and dtype on every rank; the result has shape (p, *x.shape).
        An `out` of any shape with as many elements will do. `x` may be this rank's row of `out`.

        Raises:
            ArrayError: `out` does not fit.
            UnsupportedError: No transport takes such an array.

        >>> from bagua_comm.testing import run_ranks
        >>> run_ranks(2, lambda comm: comm.allgather(np.array([comm.rank, 7])))[0]
        array([[0, 7], [1, 7]])
        """
        call = "allgather"
        send, transport = self.accept(call, "x", x)
        out, target = self.landing(call, out, (self.size, *send.shape), send, any_shape=True)
        send = arrays.contiguous(send)
        self._check_overlap(call, send, target, arrays.rows(target, self.size)[self.rank])
        with Operation(self, call, transport, send, {}):
            transport.allgather(send, target)
        return finished(out, target)

    def reduce_scatter(
        self, x: Array, out: Array | None = None, *, op: str = "sum", counts: Sequence[int] | None = None
    ) -> Array:
        """Reduce `x` over all ranks and keep this rank's chunk.

        Collective. `x` has shape (p * m, ...) on every rank; the result, (m, ...), is chunk `rank`. With `counts`
        the chunks may differ: `x` has sum(counts) elements, and the result, (counts[rank],), is chunk `rank`.

        Args:
            x: The array of this rank.
            out: Where to put the result. May be this rank's chunk of `x`. With `counts`, any shape of as many
                elements will do.
            op: See `allreduce`.
            counts: How many elements each rank keeps, the same on every rank; as many each if None.

        Raises:
            ArrayError: `x` does not split evenly or is not as long as `counts` say, `out` does not fit, or `op`
                is unknown.
            UnsupportedError: No such reduction for this dtype, or no transport takes such an array.

        >>> from bagua_comm.testing import run_ranks
        >>> run_ranks(2, lambda comm: comm.reduce_scatter(np.arange(4.0)))
        [array([0., 2.]), array([4., 6.])]
        """
        call = "reduce_scatter"
        send, transport = self.accept(call, "x", x)
        _check_reduction(call, op, send)
        if counts is None:
            shape = (self._even_chunk(call, send), *send.shape[1:])
            chunks = [math.prod(shape)] * self.size
        else:
            chunks = self._check_counts(call, "counts", counts, send)
            shape = (chunks[self.rank],)
        out, target = self.landing(call, out, shape, send, any_shape=counts is not None)
        send = arrays.contiguous(send)
        self._check_overlap(call, send, target, parts(send, chunks)[self.rank])
        real, result = as_real(send, op), as_real(target, op)
        with Operation(
            self, call, transport, send, {"op": op} if counts is None else {"op": op, "counts": chunks}
        ):
            if counts is None:
                transport.reduce_scatter(real, result, op)
            else:
                width = 1 if real is send else 2
                transport.reduce_scatterv(real, result, [width * count for count in chunks], op)
        return finished(out, target)

    def scan(self, x: Array, out: Array | None = None, *, op: str = "sum") -> Array:
        """Reduce `x` of ranks 0 to `rank`: each rank gets what the ranks up to itself come to.

        Collective. `x` has the same shape and dtype on every rank. `out` may be `x`. For `op` see `allreduce`;
        "avg" is the average of rank + 1 arrays.

        Raises:
            ArrayError: `out` does not fit `x`, or `op` is unknown.
            UnsupportedError: No such reduction for this dtype, or no transport takes such an array.

        >>> from bagua_comm.testing import run_ranks
        >>> run_ranks(3, lambda comm: comm.scan(np.array([1, comm.rank])))
        [array([1, 0]), array([2, 1]), array([3, 3])]
        """
        return self._prefix("scan", x, out, op)

    def exscan(self, x: Array, out: Array | None = None, *, op: str = "sum") -> Array | None:
        """Reduce `x` of the ranks before this one, 0 to rank - 1.

        Collective. `x` has the same shape and dtype on every rank. `out` may be `x`. For `op` see `allreduce`;
        "avg" is the average of `rank` arrays. Rank 0 has no ranks before it: it returns `out` as it is, None if
        none is given. An `out` of zeros, as below, makes a sum of nothing zero.

        Raises:
            ArrayError: `out` does not fit `x`, or `op` is unknown.
            UnsupportedError: No such reduction for this dtype, or no transport takes such an array.

        >>> from bagua_comm.testing import run_ranks
        >>> run_ranks(3, lambda comm: comm.exscan(np.array(10 + comm.rank), out=np.array(0)))   # where mine begin
        [array(0), array(10), array(21)]
        """
        return self._prefix("exscan", x, out, op)

    def _prefix(self, call: str, x: Array, out: Array | None, op: str) -> Any:
        """What `scan` and `exscan` share."""
        send, transport = self.accept(call, "x", x)
        _check_reduction(call, op, send)
        result, target = self.landing(call, out, send.shape, send)
        send, exclusive = arrays.contiguous(self.in_place(call, send, target)), call == "exscan"
        with Operation(self, call, transport, send, {"op": op}):
            transport.scan(as_real(send, op), as_real(target, op), op, exclusive=exclusive)
        return out if exclusive and self.rank == 0 else finished(result, target)

    def allreduce_many(
        self, xs: Sequence[Array], outs: Sequence[Array | None] | None = None, *, op: str = "sum"
    ) -> list[Array]:
        """Reduce each of `xs` over all ranks, in one message for all arrays of a dtype: for many small arrays.

        Collective. The results have the bytes that `allreduce` of each array would give; over NCCL, which adds
        in an order that depends on the size, sums of floats may be rounded otherwise, alike on all ranks. Every
        array is copied to the message and back.

        Args:
            xs: Arrays of the same shapes and dtypes, in the same order, on every rank. They may have several
                dtypes, and some may be host arrays and some device arrays.
            outs: Where to put the results, in the order of `xs`; may be `xs`.
            op: See `allreduce`.

        Raises:
            ArrayError: There are more or fewer `outs` than `xs`, one does not fit or overlaps another array than
                its own, or `op` is unknown.
            UnsupportedError: No such reduction for a dtype, or no transport takes such an array.

        >>> from bagua_comm.testing import run_ranks
        >>> run_ranks(2, lambda comm: comm.allreduce_many([np.ones(2), np.array(comm.rank)]))[0]
        [array([2., 2.]), array(1)]
        """
        call = "allreduce_many"
        sends = [self.accept(call, f"xs[{i}]", x) for i, x in enumerate(xs)]
        for send, _ in sends:
            _check_reduction(call, op, send)
        wanted = list(outs) if outs is not None else [None] * len(sends)
        if len(wanted) != len(sends):
            raise ArrayError(f"{call}: there are {len(wanted)} outs, expected {len(sends)}, one for each of xs")
        landings = [
            self.landing(call, out, send.shape, send, name=f"outs[{i}]")
            for i, (out, (send, _)) in enumerate(zip(wanted, sends, strict=True))
        ]
        written = [as_array(out) for out, _ in landings]
        read = [x for (x, _), out in zip(sends, written, strict=True) if not _is_same(x, out)]
        _check_apart(call, written, read)
        for transport, members in _alike(sends):
            with self._together(call, transport, [sends[i][0] for i in members], {"op": op}) as flat:
                transport.allreduce(as_real(flat, op), as_real(flat, op), op)
                _unpack(flat, [written[i] for i in members])
        return [out for out, _ in landings]

    def broadcast_many(self, xs: Sequence[Array], *, root: int) -> list[Array]:
        """Copy each of `xs` of `root` into that of every other rank, in one message for all arrays of a dtype.

        Collective. The same as `broadcast` of each, for many small arrays, which are copied to the message and
        back; returns them. `xs` have the same shapes and dtypes, in the same order, on every rank. They may have
        several dtypes, and some may be host arrays and some device arrays.

        Raises:
            ArrayError: `root` is no rank, or an array cannot be written to or overlaps another one.
            UnsupportedError: No transport takes such an array.

        >>> from bagua_comm.testing import run_ranks
        >>> def body(comm):
        ...     return comm.broadcast_many([np.array(comm.rank), np.full(2, 0.5 * comm.rank)], root=1)
        >>> run_ranks(2, body)[0]
        [array(1), array([0.5, 0.5])]
        """
        call = "broadcast_many"
        self._check_peer(call, "root", root)
        values = [self.accept(call, f"xs[{i}]", x) for i, x in enumerate(xs)]
        if self.rank != root:
            for i, (value, _) in enumerate(values):
                _check_writable(call, f"xs[{i}]", xs[i], value)
        _check_apart(call, [value for value, _ in values], [])
        for transport, members in _alike(values):
            each = [values[i][0] for i in members]
            with self._together(call, transport, each, {"root": root}) as flat:
                transport.broadcast(flat, root)
                if self.rank != root:
                    _unpack(flat, each)
        return list(xs)

    def gather(self, x: Array, out: Array | None = None, *, root: int) -> Array | None:
        """Collect `x` of every rank on `root`, where row r of the result is rank r's; None elsewhere.

        Collective. `x` has the same shape and dtype on every rank; the result has shape (p, *x.shape).
        `out` matters on `root` alone; any shape with as many elements will do. `x` may be its row of `out`.

        Raises:
            ArrayError: `out` does not fit, or `root` is no rank.
            UnsupportedError: No transport takes such an array.
        """
        send, transport = self.accept("gather", "x", x)
        return self._gather("gather", send, transport, out, [send.size] * self.size, root)

    def gatherv(
        self, x: Array, out: Array | None = None, counts: Sequence[int] | None = None, *, root: int
    ) -> Array | None:
        """Collect arrays of different lengths on `root`, one behind the other in rank order; None elsewhere.

        Collective. Rank r gives counts[r] elements, in any shape; the result has shape (sum(counts),). `out` and
        `counts` matter on `root` alone, which must give `counts`; an `out` of any shape with as many elements
        will do. `x` may be its own part of `out`.

        Raises:
            ArrayError: `counts` is missing or does not fit the ranks, `x` or `out`, or `root` is no rank.
            CommMismatch: A rank gives another number of elements than `counts` says.
            UnsupportedError: No transport takes such an array.

        >>> from bagua_comm.testing import run_ranks
        >>> run_ranks(3, lambda comm: comm.gatherv(np.full(comm.rank, comm.rank), counts=[0, 1, 2], root=0))[0]
        array([1, 2, 2])
        """
        call = "gatherv"
        send, transport = self.accept(call, "x", x)
        if self.rank != root:
            return self._gather(call, send, transport, None, [], root)
        if counts is None:
            raise ArrayError(f"{call}: counts is None; root must give it")
        counts = self._check_counts(call, "counts", counts, send, own=True)
        return self._gather(call, send, transport, out, counts, root)

    def _gather(
        self, call: str, send: Array, transport: Transport, out: Array | None, counts: Sequence[int], root: int
    ) -> Array | None:
        """What `gather` and `gatherv` share; `counts` matter on `root`."""
        self._check_peer(call, "root", root)
        is_even = call == "gather"
        send, target = arrays.contiguous(send), None
        if self.rank == root:
            shape = (self.size, *send.shape) if is_even else (sum(counts),)
            out, target = self.landing(call, out, shape, send, any_shape=True)
            chunks = parts(target, counts)
            self._check_overlap(call, send, target, chunks[root])
        with Operation(self, call, transport, send, {"root": root}, compare=is_even):
            if not is_even:
                self._compare_counts(call, send, root, self._only(root, send.size), counts)
            if target is None:
                transport.exchange([(root, send)], [], tag=COLLECTIVE)
                return None
            if not arrays.same_memory(send, chunks[root]):
                chunks[root][...] = send.reshape(-1)
            transport.exchange([], [(r, chunks[r]) for r in self._others()], tag=COLLECTIVE)
        return finished(out, target)

    def scatter(self, x: Array | None, out: Array | None = None, *, root: int) -> Array:
        """Deal the rows of `x` of `root` to the ranks: the result is row `rank`.

        Collective. `x`, (p, ...), matters on `root` alone and is None elsewhere, where `out` gives the
        shape and dtype to expect. On `root`, `out` may be None or that row of `x`.

        Raises:
            ArrayError: `x` does not have p rows, `out` is missing or does not fit, `root` is no rank.
            UnsupportedError: No transport takes such an array.
        """
        return self._scatter("scatter", x, None, out, root)

    def scatterv(
        self, x: Array | None, counts: Sequence[int] | None, out: Array | None = None, *, root: int
    ) -> Array:
        """Deal parts of `x` of `root` to the ranks, counts[r] elements to rank r.

        Collective. The parts lie one behind the other in `x`, in rank order. `x` and `counts` matter on `root`
        alone and are None elsewhere, where `out` gives the number of elements and the dtype to expect. On `root`,
        `out` may be None or that part of `x`; an `out` of any shape will do.

        Raises:
            ArrayError: `counts` is missing or does not fit the ranks, `x` or `out`; `x` or `out` is missing;
                `root` is no rank.
            CommMismatch: A rank expects another number of elements than `counts` says.
            UnsupportedError: No transport takes such an array.

        >>> from bagua_comm.testing import run_ranks
        >>> def body(comm):
        ...     x, counts = (np.arange(3), [1, 2]) if comm.rank == 0 else (None, None)
        ...     return comm.scatterv(x, counts, np.empty(1 + comm.rank, int), root=0)
        >>> run_ranks(2, body)
        [array([0]), array([1, 2])]
        """
        return self._scatter("scatterv", x, counts, out, root)

    def _scatter(
        self, call: str, x: Array | None, counts: Sequence[int] | None, out: Array | None, root: int
    ) -> Array:
        """What `scatter` and `scatterv` share."""
        self._check_peer(call, "root", root)
        is_even, detail = call == "scatter", {"root": root}
        if self.rank != root:
            if out is None:
                raise ArrayError(f"{call}: out is None; ranks other than root must give it")
            like, transport = self.accept(call, "out", out)
            out, target = self.landing(call, out, like.shape, like)
            with Operation(self, call, transport, target, detail, compare=is_even):
                if not is_even:
                    self._compare_counts(call, target, root, [], self._only(root, target.size))
                transport.exchange([], [(root, target)], tag=COLLECTIVE)
            return finished(out, target)
        if x is None:
            raise ArrayError(f"{call}: x is None; root must give it")
        send, transport = self.accept(call, "x", x)
        if is_even:
            if send.ndim == 0 or send.shape[0] != self.size:
                raise ArrayError(f"{call}: x has shape {send.shape}, expected ({self.size}, ...)")
            counts = [send.size // self.size] * self.size
            out, target = self.landing(call, out, send.shape[1:], send)
        elif counts is None:
            raise ArrayError(f"{call}: counts is None; root must give it")
        else:
            counts = self._check_counts(call, "counts", counts, send)
            out, target = self.landing(call, out, (counts[root],), send, any_shape=True)
        send = arrays.contiguous(send)
        chunks, mine = parts(send, counts), target.reshape(-1)
        self._check_overlap(call, send, mine, chunks[root])
        with Operation(self, call, transport, target, detail, compare=is_even):
            if not is_even:
                self._compare_counts(call, target, root, counts, self._only(root, target.size))
            if not arrays.same_memory(chunks[root], mine):
                mine[...] = chunks[root]
            transport.exchange([(r, chunks[r]) for r in self._others()], [], tag=COLLECTIVE)
        return finished(out, target)

    def alltoall(self, x: Array, out: Array | None = None) -> Array:
        """Send chunk j of `x` to rank j; chunk i of the result comes from rank i.

        Collective. `x` has shape (p * m, ...) on every rank, and the result the same. `out` may be `x`.

        Raises:
            ArrayError: `x` does not split evenly, or `out` does not fit.
            UnsupportedError: No transport takes such an array.
        """
        call = "alltoall"
        send, transport = self.accept(call, "x", x)
        self._even_chunk(call, send)
        out, target = self.landing(call, out, send.shape, send)
        send = self.in_place(call, send, target)
        with Operation(self, call, transport, send, {}):
            transport.alltoall(arrays.contiguous(send), target)
        return finished(out, target)

    def allgatherv(self, x: Array, out: Array, counts: Sequence[int]) -> Array:
        """Collect arrays of different lengths, one behind the other, on every rank.

        Collective. Rank r gives counts[r] elements; `out` has sum(counts), and every rank the same
        `counts`. `x` may be its own part of `out`.

        Raises:
            ArrayError: `counts` does not fit the ranks, `x` or `out`.
            UnsupportedError: No transport takes such an array.
        """
        call = "allgatherv"
        send, transport = self.accept(call, "x", x)
        counts = self._check_counts(call, "counts", counts, send, own=True)
        out, target = self.landing(call, out, (sum(counts),), send, any_shape=True)
        send, whole = arrays.contiguous(send).reshape(-1), target.reshape(-1)
        chunks = parts(whole, counts)
        self._check_overlap(call, send, target, chunks[self.rank])
        with Operation(self, call, transport, whole, {"counts": counts}, payload=send.nbytes):
            if not arrays.same_memory(send, chunks[self.rank]):
                chunks[self.rank][...] = send
            others = self._others()
            transport.exchange([(r, send) for r in others], [(r, chunks[r]) for r in others], tag=COLLECTIVE)
        return finished(out, target)

    def alltoallv(self, x: Array, counts: Sequence[int], out: Array, out_counts: Sequence[int]) -> Array:
        """Send counts[j] elements of `x` to rank j; out_counts[i] elements come from rank i.

        Collective. The parts lie one behind the other in `x` and in `out`, in the order of the ranks.
        Rank i's counts[j] must equal rank j's out_counts[i].

        Raises:
            ArrayError: The counts do not fit the ranks, `x` or `out`.
            CommMismatch: The counts of two ranks do not fit together.
            UnsupportedError: No transport takes such an array.
        """
        call = "alltoallv"
        send, transport = self.accept(call, "x", x)
        counts = self._check_counts(call, "counts", counts, send)
        out_counts = self._check_counts(call, "out_counts", out_counts)
        if counts[self.rank] != out_counts[self.rank]:
            raise ArrayError(
                f"{call}: counts[{self.rank}] is {counts[self.rank]}, but out_counts[{self.rank}] is "
                f"{out_counts[self.rank]}; both are this rank's own part"
            )
        out, target = self.landing(call, out, (sum(out_counts),), send, any_shape=True)
        send = arrays.contiguous(send).reshape(-1)
        if arrays.overlap(send, target):
            raise ArrayError(f"{call}: out overlaps x")
        source, chunks = parts(send, counts), parts(target, out_counts)
        with Operation(self, call, transport, send, {}, compare=False):
            self._compare_counts(call, send, None, counts, out_counts)
            chunks[self.rank][...] = source[self.rank]
            others = self._others()
            transport.exchange([(r, source[r]) for r in others], [(r, chunks[r]) for r in others], tag=COLLECTIVE)
        return finished(out, target)

    def barrier(self) -> None:
        """Return when every rank has called.

        Collective.
        """
        with Operation(self, "barrier", self._host_transport(), _NOTHING, {}):
            self._host_transport().barrier()

    # Objects ----------------------------------------------------------------------------------------

    def broadcast_object(self, obj: Any, *, root: int) -> Any:
        """Give every rank the object of `root`, by pickle; `obj` is ignored elsewhere.

        Collective. Unpickling runs code chosen by the sender: ranks trust each other.

        Raises:
            ArrayError: `root` is no rank.
            UnsupportedError: The object cannot be pickled; on all ranks.
        """
        call, host = "broadcast_object", self._host_transport()
        self._check_peer(call, "root", root)
        mine = objects.pack(call, obj) if self.rank == root else objects.NOTHING
        with Operation(self, call, host, _NOTHING, {"root": root}, payload=mine.data.nbytes):
            parcel = objects.broadcast(host, mine, root)
        return obj if mine.size > 0 else parcel.open()

    def allgather_object(self, obj: Any) -> list[Any]:
        """The objects of all ranks in rank order, by pickle.

        Collective. Unpickling runs code chosen by the sender: ranks trust each other.

        Raises:
            UnsupportedError: An object cannot be pickled; on all ranks.
        """
        call, host = "allgather_object", self._host_transport()
        mine = objects.pack(call, obj)
        with Operation(self, call, host, _NOTHING, {}, payload=mine.data.nbytes):
            parcels = objects.allgather(host, mine)
        failed = [parcel for parcel in parcels if parcel.size < 0]
        return [parcel.open() for parcel in failed or parcels]

    def gather_object(self, obj: Any, *, root: int) -> list[Any] | None:
        """The objects of all ranks in rank order, by pickle, on `root`; None elsewhere.

        Collective. Unpickling runs code chosen by the sender: ranks trust each other.

        Raises:
            ArrayError: `root` is no rank.
            UnsupportedError: An object cannot be pickled; on all ranks.

        >>> from bagua_comm.testing import run_ranks
        >>> run_ranks(2, lambda comm: comm.gather_object({"rank": comm.rank}, root=0))
        [[{'rank': 0}, {'rank': 1}], None]
        """
        call, host = "gather_object", self._host_transport()
        self._check_peer(call, "root", root)
        mine = objects.pack(call, obj)
        with Operation(self, call, host, _NOTHING, {"root": root}, payload=mine.data.nbytes):
            parcels = objects.gather(host, mine, root)
        found = [parcel.open() for parcel in parcels]
        return found if self.rank == root else None

    def scatter_object(self, objs: Iterable[Any] | None, *, root: int) -> Any:
        """Deal the objects of `root` to the ranks, by pickle: the result is the one of number `rank`.

        Collective. There are p of them; they matter on `root` alone and are None elsewhere. Unpickling runs
        code chosen by the sender: ranks trust each other.

        Raises:
            ArrayError: `root` is no rank, or gives more or fewer than p objects; the latter on all ranks.
            UnsupportedError: An object cannot be pickled; on all ranks.

        >>> from bagua_comm.testing import run_ranks
        >>> run_ranks(2, lambda comm: comm.scatter_object(["a", 2.5] if comm.rank == 0 else None, root=0))
        ['a', 2.5]
        """
        call, host = "scatter_object", self._host_transport()
        self._check_peer(call, "root", root)
        parcels = objects.pack_each(call, objs, self.size) if self.rank == root else []
        payload = sum(parcel.data.nbytes for parcel in parcels)
        with Operation(self, call, host, _NOTHING, {"root": root}, payload=payload):
            parcel = objects.scatter(host, parcels, root)
        return parcel.open()

    def send_object(self, obj: Any, *, dest: int) -> None:
        """Send an object, by pickle, to `dest`, which calls `recv_object`.

        Returns when `obj` may be changed again, which can be before or after it is received. Objects never match
        the arrays of `send` and `recv`; receive both in the order in which they are sent.

        Raises:
            ArrayError: `dest` is no rank.
            UnsupportedError: The object cannot be pickled; nothing is sent then.
        """
        call, host = "send_object", self._host_transport()
        self._check_peer(call, "dest", dest)
        parcel = objects.pack(call, obj)
        if parcel.size < 0:
            parcel.open()
        with Operation(self, call, host, _NOTHING, {"dest": dest}, compare=False, payload=parcel.size):
            if self.check:
                self._messages.compare(host, call, [(dest, None)], [])
            objects.send(host, parcel, dest)

    def recv_object(self, *, source: int) -> Any:
        """The object that `source` sends to this rank next, by `send_object`.

        Unpickling runs code chosen by the sender: ranks trust each other.

        Raises:
            ArrayError: `source` is no rank.

        >>> from bagua_comm.testing import run_ranks
        >>> def body(comm):
        ...     comm.send_object({"from": comm.rank}, dest=1 - comm.rank)
        ...     return comm.recv_object(source=1 - comm.rank)
        >>> run_ranks(2, body)
        [{'from': 1}, {'from': 0}]
        """
        call, host = "recv_object", self._host_transport()
        self._check_peer(call, "source", source)
        with Operation(self, call, host, _NOTHING, {"source": source}, compare=False):
            if self.check:
                (wrong,) = self._messages.compare(host, call, [], [(source, None)])
                if wrong is not None:
                    # Taken all the same, so that the next message is the next.
                    if wrong.kind == arrays.library(_NOTHING):
                        host.exchange([], [(source, np.empty(wrong.nbytes, np.uint8))])
                    raise wrong.error
            parcel = objects.receive(host, source)
        return parcel.open()

    # Point to point ---------------------------------------------------------------------------------

    def send(self, x: Array, *, dest: int) -> None:
        """Send `x` to `dest`, which calls `recv`.

        Returns when `x` may be changed again, which can be before or after it is received. On a lane, a send or a
        recv goes on while the caller works (MPI's isend and irecv). Tasks of a lane run one after the other, so a
        long send waits there for its recv: where two ranks send to each other, submit `sendrecv` or `exchange`.

        Raises:
            ArrayError: `dest` is no rank.
            UnsupportedError: No transport takes such an array.

        >>> from bagua_comm.testing import run_ranks
        >>> def body(comm):
        ...     x = np.arange(2) if comm.rank == 0 else np.zeros(2, int)
        ...     with comm.lane() as lane:
        ...         if comm.rank == 0:
        ...             request = lane.submit(lane.comm.send, x, dest=1)     # isend: returns at once
        ...         else:
        ...             request = lane.submit(lane.comm.recv, x, source=0)   # irecv
        ...         request.result()                                         # wait; until then, leave x alone
        ...     return x
        >>> run_ranks(2, body)
        [array([0, 1]), array([0, 1])]
        """
        self._exchange("send", [(dest, x)], [], dest=dest)

    def recv(self, out: Array, *, source: int) -> Array:
        """Receive into `out` what `source` sends to this rank next; returns `out`.

        On a lane it goes on while the caller works; see `send`.

        Raises:
            ArrayError: `source` is no rank, or `out` cannot be written to.
            CommMismatch: The message has another size than `out`.
            UnsupportedError: No transport takes such an array.
        """
        self._exchange("recv", [], [(source, out)], source=source)
        return out

    def sendrecv(self, x: Array, out: Array, *, dest: int | None, source: int | None) -> Array:
        """Send `x` to `dest` and receive `out` from `source` at once; returns `out`.

        Where `dest` is None nothing is sent, and where `source` is None `out` is left as it is (MPI's PROC_NULL):
        at the ends of a row of ranks, say.

        Raises:
            ArrayError: `dest` or `source` is no rank, or `out` cannot be written to or overlaps `x`.
            CommMismatch: The message has another size than `out`.
            UnsupportedError: No transport takes such an array.

        >>> from bagua_comm.testing import run_ranks
        >>> def body(comm):   # everybody's left neighbour
        ...     right = comm.rank + 1 if comm.rank + 1 < comm.size else None
        ...     left = comm.rank - 1 if comm.rank > 0 else None
        ...     return comm.sendrecv(np.array(comm.rank), np.array(-1), dest=right, source=left)
        >>> run_ranks(3, body)
        [array(-1), array(0), array(1)]
        """
        self._exchange("sendrecv", [(dest, x)], [(source, out)], dest=dest, source=source)
        return out

    def exchange(self, sends: Sequence[MaybeMessage], recvs: Sequence[MaybeMessage]) -> None:
        """Send and receive many messages at once: lists of (peer, array).

        Between two ranks, messages match in the order of the lists; `send` and `recv` match as well. Where a peer
        is None nothing is sent or received, and the array is left as it is.

        Raises:
            ArrayError: A peer is no rank, an array to receive into cannot be written to or overlaps
                another one.
            CommMismatch: A message has another size than the array it should fill.
            UnsupportedError: No transport takes such arrays.
        """
        self._exchange("exchange", sends, recvs)

    def _exchange(
        self, call: str, sends: Sequence[MaybeMessage], recvs: Sequence[MaybeMessage], **peers: int | None
    ) -> None:
        outgoing: list[Message] = []
        incoming: list[Message] = []
        landings: list[tuple[Array, Array]] = []
        values: list[Array] = []
        transports: list[Transport] = []
        for name, (peer, x) in [("sends", m) for m in sends] + [("recvs", m) for m in recvs]:
            value, transport = self.accept(call, name, x)
            if name == "recvs":
                _check_writable(call, name, x, value)
            if peer is None and call in ("sendrecv", "exchange"):
                continue
            peer = self._check_peer(call, f"a peer in {name}" if not peers else "peer", peer)
            transports.append(transport)
            target = arrays.contiguous(value)
            if name == "recvs" and any(arrays.share_elements(value, other) for other in values):
                raise ArrayError(f"{call}: an array to receive into overlaps another array")
            values.append(value)
            if name == "sends":
                outgoing.append((peer, target))
                continue
            incoming.append((peer, target))
            landings.append((value, target))
        if not transports:
            return
        if any(transport is not transports[0] for transport in transports):
            raise UnsupportedError(f"{call}: host and device arrays in one call")
        first = outgoing[0][1] if outgoing else incoming[0][1]
        payload = sum(x.nbytes for _, x in outgoing)
        with Operation(self, call, transports[0], first, dict(peers), compare=False, payload=payload):
            if self.check:
                self._exchange_what_fits(call, transports[0], outgoing, incoming)
            else:
                transports[0].exchange(outgoing, incoming)
        for value, target in landings:
            finished(value, target)

    def _exchange_what_fits(
        self, call: str, transport: Transport, sends: Sequence[Message], recvs: Sequence[Message]
    ) -> None:
        """Exchange, and raise if a message is not what was expected.

        Such a message is taken all the same, so that the next one is the next.
        """
        host = self._host_transport()
        unfit = self._messages.compare(host, call, sends, recvs)
        incoming = []
        for (peer, out), wrong in zip(recvs, unfit, strict=True):
            if wrong is None:
                incoming.append((peer, out))
            elif wrong.kind == arrays.library(out):
                incoming.append((peer, arrays.empty((wrong.nbytes,), np.uint8, like=out)))
        transport.exchange(sends, incoming)
        for (peer, _), wrong in zip(recvs, unfit, strict=True):
            if wrong is not None and wrong.kind == "object":
                objects.receive(host, peer)
        for wrong in unfit:
            if wrong is not None:
                raise wrong.error

    # Groups and lanes -------------------------------------------------------------------------------

    def split(self, color: int, key: int | None = None) -> Communicator:
        """Group the ranks that give the same `color` >= 0, ordered by `key`, else by rank.

        Collective.

        Raises:
            ArrayError: `color` is not an integer >= 0.
        """
        if not isinstance(color, (int, np.integer)) or not 0 <= color < 2**31:
            raise ArrayError(f"split: color is {color!r}, expected an integer >= 0")
        order = self.rank if key is None else key
        with Operation(self, "split", self._host_transport(), _NOTHING, {}):
            parts = [transport.split(int(color), int(order)) for transport in self.transports]
        return self._derived(parts)

    def dup(self) -> Communicator:
        """Another communicator over the same ranks, whose messages never match this one's.

        Collective.
        """
        with Operation(self, "dup", self._host_transport(), _NOTHING, {}):
            parts = [transport.dup() for transport in self.transports]
        return self._derived(parts)

    def by_node(self) -> Nodes:
        """Communicators inside this node, and across nodes among ranks of equal `local_rank`.

        Collective. The first call splits; later ones return the same pair, which is closed with this one and
        counts its bytes here.
        """
        if self._nodes is None:
            intra = self.split(self.node)
            inter = self.split(self.local_rank)
            intra.counters = inter.counters = self.counters
            self._nodes = Nodes(intra, inter)
        return self._nodes

    def lane(self, kind: Literal["thread", "stream"] | None = None) -> Lane:
        """A lane: work beside the caller, on its own duplicate of this communicator.

        Collective. Close it, or use it as a context manager.

        Where MPI grants less than MPI_THREAD_MULTIPLE, a lane of kind "thread" works at once, on the caller's
        thread and stream, and a warning says so.

        Args:
            kind: "thread", also if None: tasks run on a thread of their own and, where this communicator works on
                a device, on a CUDA stream of their own. "stream": tasks run at once, but on such a stream; for
                tasks that only enqueue work, as calls on device arrays over NCCL do. The host then waits neither
                for the device nor for another thread. A lane cannot be captured in a CUDA graph, whatever its
                kind.

        Raises:
            ArrayError: `kind` is something else.
            UnsupportedError: `kind` is "stream", but calls of this communicator wait for the host or for peers.

        >>> from bagua_comm.testing import run_ranks
        >>> def body(comm):
        ...     x = np.ones(3)
        ...     with comm.lane() as lane:
        ...         lane.submit(lane.comm.allreduce, x, out=x)   # returns at once
        ...         lane.wait()
        ...     return x
        >>> run_ranks(2, body)
        [array([2., 2., 2.]), array([2., 2., 2.])]
        """
        if kind not in (None, "thread", "stream"):
            raise ArrayError(f'lane: kind is {kind!r}, expected "thread" or "stream"')
        if kind == "stream":
            if self.device is None or not any(transport.enqueues for transport in self.transports):
                raise UnsupportedError('lane: kind is "stream", which needs a device and NCCL; use "thread"')
            return StreamLane(self.dup())
        comm = self.dup()
        if all(transport.concurrent for transport in self.transports):
            return ThreadLane(comm)
        warnings.warn(
            "MPI grants less than MPI_THREAD_MULTIPLE: lanes work on the caller's thread, and nothing "
            "overlaps; see mpi4py.rc.thread_level",
            RuntimeWarning,
            stacklevel=2,
        )
        return InlineLane(comm)

    def check_consistency(self, x: Array) -> None:
        """Raise on every rank unless all ranks hold the same bytes, shape and dtype in `x`.

        Collective. Compares 128-bit BLAKE2 hashes.

        Raises:
            CommMismatch: They don't; the message says which ranks agree.
        """
        value, _ = self.accept("check_consistency", "x", x)
        digest = hashlib.blake2b(f"{value.dtype.name}{value.shape}".encode(), digest_size=16)
        digest.update((value if isinstance(value, np.ndarray) else value.get()).tobytes())
        table = self.allgather(np.frombuffer(digest.digest(), np.uint8))
        groups: dict[bytes, list[int]] = {}
        for rank in range(self.size):
            groups.setdefault(table[rank].tobytes(), []).append(rank)
        if len(groups) > 1:
            found = "; ".join(f"ranks {ranks}" for ranks in groups.values())
            raise CommMismatch(f"check_consistency: x differs; these agree with each other: {found}")

    def trace(self, path: str | Path) -> None:
        """Write what all ranks did lately to `path`, as a Chrome trace that Perfetto opens.

        Collective. Rank 0 writes; a process in the picture is a rank, a row one of its threads.

        Raises:
            ArrayError: `path` is no path, or a rank has a span that JSON cannot hold; on all ranks alike.
            OSError: The file cannot be written; on all ranks alike.
        """
        mine: tuple[list[trace.Span], str | None] = ([], None)
        try:
            mine = (trace.plain(self.tracer.spans() if isinstance(self.tracer, Recorder) else []), None)
        except Exception as exc:  # the others are on their way here
            mine = ([], f"rank {self.rank} has a span that JSON cannot hold: {exc!r}")
        rows = self.allgather_object(mine)
        failure: ArrayError | OSError | None = None
        if self.rank == 0:
            try:
                problem = next((text for _, text in rows if text is not None), None)
                if problem is not None:
                    raise ArrayError(f"trace: {str(path)!r} is not written: {problem}")
                Path(path).write_text(json.dumps(trace.chrome_trace([spans for spans, _ in rows])))
            except ArrayError as exc:
                failure = exc
            except OSError as exc:
                failure = OSError(exc.errno, exc.strerror or str(exc), str(path))
            except Exception as exc:
                failure = ArrayError(f"trace: {path!r} cannot be written: {exc!r}")
        failure = self.broadcast_object(failure, root=0)
        if failure is not None:
            raise failure

    # Failure and end --------------------------------------------------------------------------------

    def shrink(self) -> Communicator:
        """A communicator over the ranks that are still alive, after `RankFailed`.

        Collective among the survivors.

        Raises:
            UnsupportedError: The library below cannot go on after a rank has died.
        """
        first, *rest = self.transports
        host = first.shrink()
        return self._derived([host, *(transport.shrink(host) for transport in rest)])

    def abort(self, exit_code: int = 1) -> None:
        """Give up, on all ranks: under MPI all processes end with `exit_code`."""
        for transport in self.transports:
            transport.abort(exit_code)

    def close(self) -> None:
        """Free what this communicator holds; closing twice does nothing.

        Collective.
        """
        if self._closed or self._process != os.getpid():
            return
        self._closed = True
        if self._nodes is not None:
            for comm in self._nodes:
                comm.close()
        with ExitStack() as ends:  # the last transport first: it may be set up over the first
            ends.callback(self.scratch.clear)
            for transport in self.transports:
                ends.callback(transport.close)

    def __enter__(self) -> Communicator:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is None or (isinstance(error, SystemExit) and error.code in (None, 0)):
            self.close()
            return
        if self._process != os.getpid():
            return
        if isinstance(error, SystemExit):
            # This rank leaves in the middle: its peers would wait for it.
            if not isinstance(error.code, int):
                print(error.code, file=sys.stderr, flush=True)
                error.code = 1  # it is printed
            self.abort(error.code)
        for transport in self.transports:
            transport.leave(f"{type(error).__name__}: {error}")

    def __repr__(self) -> str:
        names = "+".join(transport.name for transport in self.transports)
        return f"<Communicator rank {self.rank} of {self.size} over {names}>"

    # Checks -----------------------------------------------------------------------------------------

    def accept(self, call: str, name: str, x: Any) -> tuple[Array, Transport]:
        """View argument `name` of `call` as an array, and pick the transport that moves it."""
        if type(x) is np.ndarray:
            value = x
        else:
            try:
                value = as_array(x)
            except UnsupportedError as exc:
                raise UnsupportedError(f"{call}: {name}: {exc}") from exc
        if not arrays.is_movable(value.dtype):
            raise UnsupportedError(
                f"{call}: {name} has dtype {value.dtype}, expected integers, floats, bool or complex "
                "in native byte order"
            )
        for transport in self.transports:
            if transport.moves(value):
                return value, transport
        names = ", ".join(transport.name for transport in self.transports)
        raise UnsupportedError(
            f"{call}: {name} is a {arrays.library(value)} array, which none of this communicator's "
            f"transports ({names}) moves"
        )

    def landing(
        self,
        call: str,
        out: Any | None,
        shape: tuple[int, ...],
        like: Array,
        *,
        any_shape: bool = False,
        name: str = "out",
    ) -> tuple[Any, Array]:
        """What `call` returns, and the contiguous array it fills; `finished` makes one of the two."""
        if out is None:
            target = arrays.empty(shape, like.dtype, like=like)
            return target, target
        # An array of the same kind as the input needs no closer look than its dtype below.
        value = out if type(out) is type(like) else self.accept(call, name, out)[0]
        fits = value.size == math.prod(shape) if any_shape else value.shape == shape
        if not fits:
            wanted = f"{math.prod(shape)} elements" if any_shape else f"{shape}"
            raise ArrayError(f"{call}: {name} has shape {value.shape}, expected {wanted}")
        if value.dtype != like.dtype:
            raise ArrayError(f"{call}: {name} has dtype {value.dtype}, expected {like.dtype}")
        if type(value) is not type(like) and arrays.library(value) != arrays.library(like):
            raise ArrayError(
                f"{call}: {name} is a {arrays.library(value)} array, expected {arrays.library(like)}"
            )
        _check_writable(call, name, out, value)
        if arrays.is_contiguous(value):
            return out, value
        return out, arrays.empty(value.shape, value.dtype, like=value)

    def in_place(self, call: str, x: Array, target: Array) -> Array:
        """`target` itself if `x` is that memory; raises if they overlap in any other way."""
        if x is target or not arrays.overlap(x, target):
            return x
        if arrays.is_contiguous(x) and arrays.same_memory(x, target):
            return target
        raise ArrayError(f"{call}: out overlaps x; pass out=x or memory apart from it")

    def _check_overlap(self, call: str, x: Array, target: Array, allowed: Array) -> None:
        """Raise if `x` and `target` overlap otherwise than by one being its own chunk of the other."""
        if not arrays.overlap(x, target):
            return
        if not (arrays.same_memory(x, allowed) or arrays.same_memory(target, allowed)):
            raise ArrayError(f"{call}: out overlaps x other than in this rank's own chunk")

    def _check_peer(self, call: str, name: str, peer: object) -> int:
        if not isinstance(peer, (int, np.integer)) or not 0 <= peer < self.size:
            raise ArrayError(f"{call}: {name} is {peer!r}, expected a rank from 0 to {self.size - 1}")
        return int(peer)

    def _check_counts(
        self, call: str, name: str, counts: Sequence[int], x: Array | None = None, *, own: bool = False
    ) -> list[int]:
        """`counts` as integers, one for each rank; `x` has as many elements as all of them, or as its `own`."""
        found = list(counts)
        if len(found) != self.size or not all(isinstance(n, (int, np.integer)) and n >= 0 for n in found):
            raise ArrayError(f"{call}: {name} is {found}, expected {self.size} numbers of elements")
        if own and x is not None and x.size != found[self.rank]:
            raise ArrayError(
                f"{call}: x has {x.size} elements, expected {name}[{self.rank}] = {found[self.rank]}"
            )
        if not own and x is not None and x.size != sum(found):
            raise ArrayError(f"{call}: x has {x.size} elements, {name} add up to {sum(found)}")
        return [int(n) for n in found]

    def _even_chunk(self, call: str, x: Array) -> int:
        if x.ndim == 0 or x.shape[0] % self.size:
            raise ArrayError(
                f"{call}: x has shape {x.shape}, expected a first dimension divisible by {self.size} ranks"
            )
        return int(x.shape[0]) // self.size

    # Plumbing ---------------------------------------------------------------------------------------

    def _others(self) -> list[int]:
        return [r for r in range(self.size) if r != self.rank]

    def _host_transport(self) -> Transport:
        return next(transport for transport in self.transports if transport.moves(_NOTHING))

    def compare_calls(self, call: str) -> None:
        """Raise `CommMismatch` on all ranks unless all are about to make the same call. Collective."""
        compare_calls(self._host_transport(), call)

    def _compare_counts(
        self, call: str, x: Array, root: int | None, sends: Sequence[int], recvs: Sequence[int]
    ) -> None:
        """With `check`, compare a call whose arrays differ among the ranks, and their sizes. Collective.

        `sends` and `recvs` say how many elements go to each rank and come from each; nothing if empty.
        """
        if not self.check:
            return
        at = "" if root is None else f", root={root}"
        self.compare_calls(f"{call}({arrays.dtype_name(x.dtype)}{at})")
        nothing = [0] * self.size
        compare_counts(self._host_transport(), sends or nothing, recvs or nothing)

    def _only(self, rank: int, count: int) -> list[int]:
        """`count` for one rank, zero for the others."""
        return [count if r == rank else 0 for r in range(self.size)]

    @contextmanager
    def _together(
        self, call: str, transport: Transport, xs: Sequence[Array], detail: dict[str, Any]
    ) -> Iterator[Array]:
        """One call on all of `xs`, of one dtype, copied into one array."""
        first, shapes = xs[0], [list(x.shape) for x in xs]
        outermost = self.take_turn(
            call, lambda: f"{call}({first.dtype}, {detail})"
        )  # from here on, scratch is in use
        try:
            flat = self.scratch.take("many", (sum(x.size for x in xs),), first.dtype, like=first)
            with Operation(self, call, transport, flat, {**detail, "shapes": shapes}):
                for x, part in zip(xs, parts(flat, [x.size for x in xs]), strict=True):
                    part.reshape(x.shape)[...] = x
                yield flat
        finally:
            self.end_turn(outermost)

    def take_turn(self, name: str, describe: Callable[[], str]) -> bool:
        """Begin a call, or a call within one; True if it is the outermost, which `end_turn` must end.

        Raises:
            CommError: Another thread is in a call, this communicator is closed, or it is a parent process's.
        """
        if self._closed or self._process != os.getpid():
            raise CommError(f"{name}: {self._why_unusable()}")
        me = threading.get_ident()
        if self._user == me:
            return False
        if not self._busy.acquire(blocking=False):
            raise CommError(
                f"{name}: another thread is in a call of this communicator; give each thread one of its own, by "
                "dup() on all ranks, or submit the call to a lane()"
            )
        self._user = me
        collective = name not in _POINT_TO_POINT
        compared = None if self.check else describe  # what is checked is compared before, and in full
        for transport in self.transports:
            transport.begin_call(name, collective=collective, describe=compared)
        return True

    def end_turn(self, outermost: bool) -> None:
        """End what `take_turn` began."""
        if outermost:
            for transport in self.transports:
                transport.end_call()
            self._user = 0
            self._busy.release()

    def _why_unusable(self) -> str:
        if self._process != os.getpid():
            return (
                f"this process was forked off process {self._process}, rank {self.rank}; a child cannot use its "
                "parent's communicator: start ranks with mpirun, and children that don't communicate by fork"
            )
        return "this communicator is closed"

    def _derived(self, transports: Sequence[Transport]) -> Communicator:
        """A communicator over transports split off from this one's, with its settings."""
        first = transports[0]
        former = np.empty((first.size, 1), np.int64)
        first.allgather(np.array([self.rank], np.int64), former)
        return Communicator(
            transports,
            nodes=[self._labels[rank] for rank in former[:, 0]],
            device=self.device,
            check=self.check,
            tracer=self.tracer,
        )


class Operation:
    """One call while it runs: compared, timed, counted, and named in errors."""

    __slots__ = (
        "_comm",
        "_compare",
        "_detail",
        "_name",
        "_outermost",
        "_payload",
        "_sent",
        "_start",
        "_transport",
        "_x",
    )

    def __init__(
        self,
        comm: Communicator,
        name: str,
        transport: Transport,
        x: Array,
        detail: dict[str, Any],
        *,
        compare: bool = True,
        payload: int | None = None,
    ) -> None:
        self._comm, self._name, self._transport, self._x = comm, name, transport, x
        self._compare, self._payload, self._detail = compare, payload, detail

    def __enter__(self) -> None:
        comm = self._comm
        self._outermost = comm.take_turn(self._name, self.signature)
        comm._calls += 1
        if comm.check and self._compare:
            try:
                comm.compare_calls(str(self))
            except BaseException:
                comm.end_turn(self._outermost)
                raise
        self._sent = self._transport.sent_bytes
        self._start = time.perf_counter_ns()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        end = time.perf_counter_ns()
        comm, name, detail = self._comm, self._name, self._detail
        comm.end_turn(self._outermost)
        wire = self._transport.sent_bytes - self._sent
        payload = self._x.nbytes if self._payload is None else self._payload
        detail["bytes"], detail["wire_bytes"] = payload, wire
        detail["dtype"] = arrays.dtype_name(self._x.dtype)
        if kind is not None:
            detail["error"] = kind.__name__
        comm.tracer.add(name, self._start, end, detail)
        if error is None:
            comm.counters.by_operation[name].add(payload, wire)
            comm._last_call = name
        elif isinstance(error, CommError) and error.args:
            call = str(self)
            before = f"{comm._last_call} #{comm._calls - 1}" if comm._calls > 1 else "nothing"
            error.args = (f"{call} #{comm._calls}: {error.args[0]}; before it: {before}",)

    def signature(self) -> str:
        """What must be alike on all ranks, if they all make this call."""
        op, root = self._detail.get("op"), self._detail.get("root")
        parts = [arrays.dtype_name(self._x.dtype) if self._x is not _NOTHING else ""]
        parts += [f"op={op}"] if op is not None else []
        parts += [f"root={root}"] if root is not None else []
        return f"{self._name}({', '.join(parts)})"

    def __str__(self) -> str:
        hidden = ("dtype", "bytes", "wire_bytes", "error")
        parts = [f"{self._x.dtype.name}{list(self._x.shape)}"] if self._x is not _NOTHING else []
        parts += [f"{key}={value}" for key, value in self._detail.items() if key not in hidden]
        return f"{self._name}({', '.join(parts)})"


_NOTHING: Array = np.empty(0, np.uint8)

MaybeMessage: TypeAlias = tuple[int | None, Array]
"""A message, or none if the peer is None."""


def _check_reduction(call: str, op: str, x: Array) -> None:
    check_reduction(call, op, x.dtype)
    if op == "prod" and x.dtype.kind == "c" and not isinstance(x, np.ndarray):
        raise UnsupportedError(
            f"{call}: there is no op='prod' for {x.dtype} on a device; reduce a copy on the host, x.get()"
        )


def _is_same(a: Array, b: Array) -> bool:
    return a is b or (arrays.extent(a) == arrays.extent(b) and a.strides == b.strides)


def _check_apart(call: str, written: Sequence[Array], read: Sequence[Array]) -> None:
    """Raise if what is written overlaps anything else."""
    extents = [(*arrays.extent(x), True) for x in written if x.size]
    extents += [(*arrays.extent(x), False) for x in read if x.size]
    end_of_all = end_of_written = 0
    for start, end, is_written in sorted(extents):
        if start < (end_of_all if is_written else end_of_written):
            raise ArrayError(f"{call}: an array that is written to overlaps another array")
        end_of_all = max(end_of_all, end)
        end_of_written = max(end_of_written, end) if is_written else end_of_written


def _alike(xs: Sequence[tuple[Array, Transport]]) -> list[tuple[Transport, list[int]]]:
    """Group arrays that go in one message: transports, and the indices of arrays of one library and dtype."""
    groups: dict[Hashable, tuple[Transport, list[int]]] = {}
    for i, (x, transport) in enumerate(xs):
        key = id(transport), arrays.library(x), x.dtype
        groups.setdefault(key, (transport, []))[1].append(i)
    return list(groups.values())


def _unpack(flat: Array, xs: Sequence[Array]) -> None:
    for x, part in zip(xs, parts(flat, [x.size for x in xs]), strict=True):
        x[...] = part.reshape(x.shape)


def _check_writable(call: str, name: str, x: object, value: Array) -> None:
    if isinstance(x, np.generic):
        raise ArrayError(f"{call}: {name} is a NumPy scalar, which cannot be written to; use a 0-d array")
    if isinstance(value, np.ndarray) and not value.flags.writeable:
        raise ArrayError(f"{call}: {name} is read-only")


def finished(out: Any, target: Array) -> Any:
    """Copy the result to where it was wanted, unless it is there already."""
    if target is not out:
        value = as_array(out)
        if not arrays.same_memory(value, target):
            value[...] = target
    return out
