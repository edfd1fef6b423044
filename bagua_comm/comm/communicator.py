"""The communicator: what users hold.

It checks arguments, allocates results, traces, counts, and asks its transport to move the bytes. All
arguments are checked before a byte moves, so that all ranks fail alike.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias, TypeVar, get_args, overload

import numpy as np
import numpy.typing as npt

from .. import arrays, trace
from ..arrays import A, AnyArray, Array, Elements, Op, OpOrder, S, as_real, parts
from ..cuda import SharedScratch
from ..errors import ArrayError, CommError, CommMismatch, UnsupportedError
from ..flight import FlightRecorder
from ..flight.entries import WORLD
from ..hooks import Hook, Hooks, Listener
from ..lane import InlineLane, Lane, StreamLane, ThreadLane
from ..logs import log_on_root
from ..pickling import Shared
from ..topology import place
from ..trace import Counters, Recorder
from ..transports.base import COLLECTIVE, Message, Move, Transport, check_timeout
from . import packets as objects
from .agreement import Messages, agree_on_split, compare_calls, compare_counts
from .call import (
    NOTHING,
    Call,
    Into,
    Kind,
    Kinds,
    Landing,
    Work,
    alike,
    as_argument,
    carrier,
    check_apart,
    check_mutable,
    check_writable,
    is_same,
    landing,
    run_as_one,
)
from .guard import Turn

T = TypeVar("T")

_log = logging.getLogger(__name__)


class Nodes(NamedTuple):
    """The communicators inside a node and across nodes; see `Communicator.by_node`."""

    intra: Communicator
    inter: Communicator


class Keeper(Protocol):
    """What keeps engines."""

    def adopt(self, engine: Any) -> None:
        """Called with every new engine, when it is ready. Collective."""

    def keeps(self, *things: object) -> bool:
        """Whether it has brought these objects to all ranks before it was set."""


class Communicator(Shared):
    """A group of `size` ranks that call collectives together; this is `rank` of them.

    Rules for all methods:

    * "Collective." means that all ranks call it, in the same order.
    * Arrays are NumPy or CuPy arrays, PyTorch tensors that do not require grad, or anything with `__dlpack__`, of
      any shape and of integer, floating-point (float16 and bfloat16 too), bool or complex dtype.
    * An input that is not C-contiguous, or not aligned, is copied once. If `out` is not, the result is copied
      into it.
    * `out=None` makes a new array. Where `out` may be the input itself, or lie in it, the method says
      so; any other overlap is refused. The result is returned: `out` itself if it was given, else an array of
      the library of the input, a tensor for a tensor.
    * A host array's result is there when the call returns. A device array is read and written in the order of
      CuPy's current stream: the result is there for what is enqueued on it after the call. Over NCCL the host
      waits neither for the device nor for peers. The next call may be on another stream: where both use memory
      of the communicator, that stream waits for the first one.
    * A call that waits for longer than `timeout_s` raises `CommTimeout`. Work that NCCL has in flight for longer
      is given up; the next call or `close` raises the error. `timeout_s=` of a call is its own limit, in seconds,
      instead of the communicator's; ranks may give different ones. The first rank whose time is over gives the
      communicator up, and tells the others. Leave the arrays of a call that raised `CommError` alone until all
      ranks know of it: others may still read them.

    One thread uses a communicator at a time: a call raises `CommError` while another thread is in one. See `lane`
    for work beside it. A process that was forked off cannot use its parent's communicator. It cannot be pickled;
    a copy of what holds it, by `copy.deepcopy` too, holds the same communicator.

    Args:
        transports: What moves the bytes; the first that `moves` an array is used for it. The first of all carries
            host arrays, which barriers, objects and checks go through.
        nodes: A label (a host name, say) for the node of every rank; None if all share one.
        device: The index of this rank's GPU, if it has one.
        check: Compare every call among the ranks before it runs, and raise `CommMismatch` naming both calls
            where they don't fit together: in dtype, shape, counts, op, root or codec. Costs a small allgather a
            call, and a small message before each message between two ranks.
        tracer: Where spans go; by default a `Recorder` of this communicator's own.
        op_order: See `op_order`; the same on all ranks.

    Raises:
        ArrayError: `op_order` is not one of the two.
    """

    def __init__(
        self,
        transports: Sequence[Transport],
        *,
        nodes: Sequence[object] | None = None,
        device: int | None = None,
        check: bool = False,
        tracer: trace.Tracer | None = None,
        op_order: OpOrder = "rank",
    ) -> None:
        self.transports = tuple(transports)
        first = self.transports[0]
        self.host = next((each for each in self.transports if each.moves(NOTHING)), first)
        """The transport of host arrays, which barriers, objects and checks go through."""
        self.rank: int = first.rank
        self.size: int = first.size
        self._labels = list(nodes) if nodes is not None else [0] * self.size
        self.node, self.local_rank, self.local_size = place(self.rank, self._labels)
        self.device = device
        self.check = check
        self.tracer: trace.Tracer = tracer if tracer is not None else Recorder()
        self.counters = Counters()
        self.flight = FlightRecorder(self.rank, self.size)
        """What this communicator, and those made from it, did last."""
        self.group = WORLD
        """The name of this communicator in the flight recorder."""
        self.hooks = Hooks()
        """Whom calls of this communicator, and of those made from it, are shown to; see `on`."""
        self.work = Work()
        self.scratch = SharedScratch()
        self.keeper: Keeper | None = None
        """What keeps the engines that are made on this very communicator, as `elastic.run` does."""
        self.settled: dict[Hashable, Any] = {}
        """What calls have prepared once, for later calls of the same kind."""
        self.kinds = Kinds()
        """What was worked out for calls, for others like them."""
        self._numbers: Counter[str] = Counter()
        self._nodes: Nodes | None = None
        self._messages = Messages()
        self.turn = Turn(self.transports, checked=check)
        """The plumbing of calls: which thread is in one."""
        self.op_order = op_order

    @property
    def timeout_s(self) -> float:
        """How long a call may wait for other ranks, in seconds; ranks may differ in it.

        Once it is set, calls from the next one on have it, and so have communicators and lanes that are made from
        then on. Lanes made before have their own: set that of `lane.comm`.

        Raises:
            ArrayError: It is set to something else than a positive number.
        """
        return self.transports[0].timeout_s

    @timeout_s.setter
    def timeout_s(self, timeout_s: float) -> None:
        limit_s = check_timeout("Communicator", timeout_s, ArrayError)
        for transport in self.transports:
            transport.set_timeout(limit_s)
        for comm in self._nodes or ():
            comm.timeout_s = limit_s

    @property
    def op_order(self) -> OpOrder:
        """The order in which host arrays are reduced over MPI: "rank" or "any".

        "rank": floats are added in the order of the ranks. "any": `allreduce`, `reduce` and `reduce_scatter` are
        MPI's own calls, which add in an order that MPI chooses, by number of ranks, size and hosts; so bits may
        differ from run to run. They stay this library's where MPI does not compute what is promised here apart
        from the order: of 16-bit floats, 8- and 16-bit integers, averages of integers, products of complex
        numbers, "min" and "max" of floats where MPI loses NaN; and where MPI takes longer: of small arrays, and
        `reduce` of more than 64 KiB. Other transports reduce as they do. Communicators that are made from this
        one have its order.

        Set it on all ranks alike, before a reduction. A call in two orders is a `CommMismatch` where MPI would
        reduce.
        """
        return self._op_order

    @op_order.setter
    def op_order(self, order: OpOrder) -> None:
        if order not in get_args(OpOrder):
            raise ArrayError(
                f"Communicator: op_order is {order!r}, expected one of {', '.join(get_args(OpOrder))}"
            )
        self._op_order: OpOrder = order
        self.kinds.clear()
        for transport in self.transports:
            transport.set_order(order)

    # Collectives ------------------------------------------------------------------------------------

    def allreduce(self, x: A, out: A | None = None, *, op: Op = "sum", timeout_s: float | None = None) -> A:
        """Reduce `x` over all ranks, to the same bytes on every rank.

        Collective. `x` has the same shape and dtype on every rank. `out` may be `x`.

        Args:
            x: The array of this rank.
            out: Where to put the result.
            op: "sum", "avg", "prod", "min", "max"; also "band", "bor", "bxor" for integers. The average
                of integers is added in 64 bits and truncated towards zero. float16 and bfloat16 are reduced in
                float32. Complex numbers have "sum", "avg" and, in host arrays, "prod".
            timeout_s: How long this call may wait for other ranks; the communicator's own `timeout_s` if None.

        Raises:
            ArrayError: `out` does not fit `x`, or `op` is unknown.
            UnsupportedError: No such reduction for this dtype, or no transport takes such an array.

        >>> from bagua_comm.testing import run_ranks
        >>> run_ranks(2, lambda comm: comm.allreduce(np.array([1.0, comm.rank]), op="avg"))
        [array([1. , 0.5]), array([1. , 0.5])]
        """
        repeated: A | None = self.kinds.repeat(self, "allreduce", (op,), x, out, timeout_s)
        if repeated is not None:
            return repeated
        call = Call(self, "allreduce", x, op=op, timeout_s=timeout_s)
        call.check_reduction(op)
        call.into(out, call.x.shape)
        call.in_place()
        call.contiguous()
        transport = call.transport
        call.make(lambda x, out: transport.allreduce(as_real(x, op), as_real(out, op), op), op)
        result: A = call.result
        return result

    def reduce(
        self, x: A, out: A | None = None, *, root: int, op: Op = "sum", timeout_s: float | None = None
    ) -> A | None:
        """Reduce `x` over all ranks; only `root` gets the result, the others None.

        Collective. `x` has the same shape and dtype on every rank. `out` matters on `root` alone, and
        may be `x`. For `op` see `allreduce`.

        Raises:
            ArrayError: `out` does not fit `x`, `root` is not a rank, or `op` is unknown.
            UnsupportedError: No such reduction for this dtype, or no transport takes such an array.
        """
        root = self._check_peer("reduce", "root", root)
        at_root = self.rank == root
        repeated: A | None = self.kinds.repeat(self, "reduce", (op, root), x, out, timeout_s)
        if repeated is not None:
            return repeated if at_root else None
        call = Call(self, "reduce", x, op=op, root=root, timeout_s=timeout_s)
        call.check_reduction(op)
        transport = call.transport
        if not at_root:
            call.contiguous()
            call.make(lambda x, _: transport.reduce(as_real(x, op), None, root, op), op, root, into="nothing")
            return None
        call.into(out, call.x.shape)
        call.in_place()
        call.contiguous()
        call.make(lambda x, out: transport.reduce(as_real(x, op), as_real(out, op), root, op), op, root)
        result: A = call.result
        return result

    def broadcast(self, x: A, *, root: int, timeout_s: float | None = None) -> A:
        """Copy `x` of `root` into `x` of every other rank; returns `x`.

        Collective. `x` has the same shape and dtype on every rank.

        Raises:
            ArrayError: `root` is not a rank, or `x` cannot be written to.
            UnsupportedError: No transport takes such an array.
        """
        root = self._check_peer("broadcast", "root", root)
        if self.kinds.repeat(self, "broadcast", (root,), x, None, timeout_s) is not None:
            return x
        call = Call(self, "broadcast", x, root=root, timeout_s=timeout_s)
        value = call.x
        check = check_mutable if self.rank == root else check_writable
        check("broadcast", "x", x, value)
        call.contiguous()
        call.sends(call.x if self.rank == root else None)
        call.target, transport = call.x, call.transport
        call.make(lambda x, _: transport.broadcast(x, root), root, into="x")
        if call.x is not value and self.rank != root:
            value[...] = call.x
        return x

    @overload
    def allgather(self, x: AnyArray, out: A, *, timeout_s: float | None = None) -> A: ...
    @overload
    def allgather(
        self, x: Elements[S], out: None = None, *, timeout_s: float | None = None
    ) -> npt.NDArray[S]: ...
    @overload
    def allgather(self, x: A, out: None = None, *, timeout_s: float | None = None) -> A: ...
    def allgather(self, x: Any, out: Any = None, *, timeout_s: float | None = None) -> Any:
        """Collect `x` of every rank: row r of the result is rank r's.

        Collective. `x` has the same shape and dtype on every rank; the result has shape `(p, *x.shape)`.
        An `out` of any shape with as many elements will do. `x` may be this rank's row of `out`.

        Raises:
            ArrayError: `out` does not fit.
            UnsupportedError: No transport takes such an array.

        >>> from bagua_comm.testing import run_ranks
        >>> run_ranks(2, lambda comm: comm.allgather(np.array([comm.rank, 7])))[0]
        array([[0, 7], [1, 7]])
        """
        shape = None if out is None else getattr(out, "shape", "unknown")
        result = self.kinds.repeat(self, "allgather", (shape,), x, out, timeout_s)
        if result is not None:
            return result
        call = Call(self, "allgather", x, timeout_s=timeout_s)
        call.into(out, (self.size, *call.x.shape), any_shape=True)
        call.contiguous()
        call.check_overlap(arrays.rows(call.target, self.size)[self.rank])
        call.make(call.transport.allgather, shape)
        return call.result

    @overload
    def reduce_scatter(
        self,
        x: AnyArray,
        out: A,
        *,
        op: Op = "sum",
        counts: Sequence[int] | None = None,
        timeout_s: float | None = None,
    ) -> A: ...
    @overload
    def reduce_scatter(
        self,
        x: Elements[S],
        out: None = None,
        *,
        op: Op = "sum",
        counts: Sequence[int] | None = None,
        timeout_s: float | None = None,
    ) -> npt.NDArray[S]: ...
    @overload
    def reduce_scatter(
        self,
        x: A,
        out: None = None,
        *,
        op: Op = "sum",
        counts: Sequence[int] | None = None,
        timeout_s: float | None = None,
    ) -> A: ...
    def reduce_scatter(
        self,
        x: Any,
        out: Any = None,
        *,
        op: Op = "sum",
        counts: Sequence[int] | None = None,
        timeout_s: float | None = None,
    ) -> Any:
        """Reduce `x` over all ranks and keep this rank's chunk.

        Collective. `x` has shape (p * m, ...) on every rank; the result, (m, ...), is chunk `rank`. With `counts`
        the chunks may differ: `x` has sum(counts) elements, and the result, (counts[rank],), is chunk `rank`.

        Args:
            x: The array of this rank.
            out: Where to put the result. May be this rank's chunk of `x`. With `counts`, any shape of as many
                elements will do.
            op: See `allreduce`.
            counts: How many elements each rank keeps, the same on every rank; as many each if None.
            timeout_s: See `allreduce`.

        Raises:
            ArrayError: `x` does not split evenly or is not as long as `counts` say, `out` does not fit, or `op`
                is unknown.
            UnsupportedError: No such reduction for this dtype, or no transport takes such an array.

        >>> from bagua_comm.testing import run_ranks
        >>> run_ranks(2, lambda comm: comm.reduce_scatter(np.arange(4.0)))
        [array([0., 2.]), array([4., 6.])]
        """
        if counts is None:
            result = self.kinds.repeat(self, "reduce_scatter", (op,), x, out, timeout_s)
            if result is not None:
                return result
        call = Call(self, "reduce_scatter", x, op=op, timeout_s=timeout_s)
        call.check_reduction(op)
        if counts is None:
            shape = (self._even_chunk("reduce_scatter", call.x), *call.x.shape[1:])
            chunks = [math.prod(shape)] * self.size
        else:
            chunks = call.detail["counts"] = self._check_counts("reduce_scatter", "counts", counts, call.x)
            shape = (chunks[self.rank],)
        call.into(out, shape, any_shape=counts is not None)
        call.contiguous()
        call.check_overlap(parts(call.x, chunks)[self.rank])
        transport = call.transport
        if counts is None:
            call.make(lambda x, out: transport.reduce_scatter(as_real(x, op), as_real(out, op), op), op)
            return call.result
        real, target = as_real(call.x, op), as_real(call.target, op)
        width = 1 if real is call.x else 2
        call.run(lambda: transport.reduce_scatterv(real, target, [width * count for count in chunks], op))
        return call.result

    def scan(self, x: A, out: A | None = None, *, op: Op = "sum", timeout_s: float | None = None) -> A:
        """Reduce `x` of ranks 0 to `rank`: each rank gets the reduction up to and including itself.

        Collective. `x` has the same shape and dtype on every rank. `out` may be `x`. For `op` see `allreduce`;
        "avg" is the average of rank + 1 arrays.

        Raises:
            ArrayError: `out` does not fit `x`, or `op` is unknown.
            UnsupportedError: No such reduction for this dtype, or no transport takes such an array.

        >>> from bagua_comm.testing import run_ranks
        >>> run_ranks(3, lambda comm: comm.scan(np.array([1, comm.rank])))
        [array([1, 0]), array([2, 1]), array([3, 3])]
        """
        result: A = self._prefix("scan", x, out, op, timeout_s)
        return result

    def exscan(self, x: A, out: A | None = None, *, op: Op = "sum", timeout_s: float | None = None) -> A | None:
        """Reduce `x` of the ranks before this one, 0 to rank - 1.

        Collective. `x` has the same shape and dtype on every rank. `out` may be `x`. For `op` see `allreduce`;
        "avg" is the average of `rank` arrays. Rank 0 has no ranks before it: it returns `out` as it is, None if
        none is given. With an `out` of zeros, as below, the sum of no arrays is zero.

        Raises:
            ArrayError: `out` does not fit `x`, or `op` is unknown.
            UnsupportedError: No such reduction for this dtype, or no transport takes such an array.

        >>> from bagua_comm.testing import run_ranks
        >>> run_ranks(3, lambda comm: comm.exscan(np.array(10 + comm.rank), out=np.array(0)))   # where mine begin
        [array(0), array(10), array(21)]
        """
        result: A | None = self._prefix("exscan", x, out, op, timeout_s)
        return result

    def _prefix(self, name: str, x: Any, out: Any, op: Op, timeout_s: float | None) -> Any:
        """What `scan` and `exscan` share."""
        call, exclusive = Call(self, name, x, op=op, timeout_s=timeout_s), name == "exscan"
        call.check_reduction(op)
        call.into(out, call.x.shape)
        call.in_place()
        call.contiguous()
        scan, target = call.transport.scan, as_real(call.target, op)
        call.run(lambda: scan(as_real(call.x, op), target, op, exclusive=exclusive))
        return out if exclusive and self.rank == 0 else call.result

    def allreduce_many(
        self,
        xs: Sequence[A],
        outs: Sequence[A | None] | None = None,
        *,
        op: Op = "sum",
        timeout_s: float | None = None,
    ) -> list[A]:
        """Reduce each of `xs` over all ranks, in one message for all arrays of a dtype: for many small arrays.

        Collective. The results have the bytes that `allreduce` of each array would give; over NCCL, which adds
        in an order that depends on the size, sums of floats may be rounded differently, but the same on all
        ranks. Every array is copied to the message and back.

        Args:
            xs: Arrays of the same shapes and dtypes, in the same order, on every rank. They may have several
                dtypes, and some may be host arrays and some device arrays.
            outs: Where to put the results, in the order of `xs`; may be `xs`.
            op: See `allreduce`.
            timeout_s: See `allreduce`.

        Raises:
            ArrayError: There are more or fewer `outs` than `xs`, one does not fit or overlaps an array other than
                its own input, or `op` is unknown.
            UnsupportedError: No such reduction for a dtype, or no transport takes such an array.

        >>> from bagua_comm.testing import run_ranks
        >>> run_ranks(2, lambda comm: comm.allreduce_many([np.ones(2), np.array(comm.rank)]))[0]
        [array([2., 2.]), array(1)]
        """
        name = "allreduce_many"
        sends = [Call(self, name, x, f"xs[{i}]", op=op, timeout_s=timeout_s) for i, x in enumerate(xs)]
        for send in sends:
            send.check_reduction(op)
        wanted = list(outs) if outs is not None else [None] * len(sends)
        if len(wanted) != len(sends):
            raise ArrayError(f"{name}: there are {len(wanted)} outs, expected {len(sends)}, one for each of xs")
        for i, (out, send) in enumerate(zip(wanted, sends, strict=True)):
            send.landing = landing(name, f"outs[{i}]", out, send.x.shape, send.x)
        written = [send.landing.value for send in sends]
        read = [send.x for send, out in zip(sends, written, strict=True) if not is_same(send.x, out)]
        check_apart(name, written, read)
        for members in alike(sends):
            run_as_one(
                [sends[i] for i in members],
                lambda transport, x: transport.allreduce(as_real(x, op), as_real(x, op), op),
                [sends[i].landing.target for i in members],
            )
        return [send.result for send in sends]

    def broadcast_many(self, xs: Sequence[A], *, root: int, timeout_s: float | None = None) -> list[A]:
        """Copy each of root's `xs` to every other rank, in one message for all arrays of a dtype.

        Collective. Does the same as `broadcast` of each array. Meant for many small arrays: they are copied to
        the message and back. Returns them. `xs` have the same shapes and dtypes, in the same order, on every
        rank. They may have several dtypes, and some may be host arrays and some device arrays.

        Raises:
            ArrayError: `root` is not a rank, or an array cannot be written to or overlaps another one.
            UnsupportedError: No transport takes such an array.

        >>> from bagua_comm.testing import run_ranks
        >>> def body(comm):
        ...     return comm.broadcast_many([np.array(comm.rank), np.full(2, 0.5 * comm.rank)], root=1)
        >>> run_ranks(2, body)[0]
        [array(1), array([0.5, 0.5])]
        """
        name = "broadcast_many"
        self._check_peer(name, "root", root)
        sends = [Call(self, name, x, f"xs[{i}]", root=root, timeout_s=timeout_s) for i, x in enumerate(xs)]
        check = check_mutable if self.rank == root else check_writable
        for i, send in enumerate(sends):
            check(name, f"xs[{i}]", xs[i], send.x)
        values = [send.x for send in sends]
        check_apart(name, values, [])
        for members in alike(sends):
            run_as_one(
                [sends[i] for i in members],
                lambda transport, x: transport.broadcast(x, root),
                [values[i] for i in members] if self.rank != root else [],
            )
        return list(xs)

    @overload
    def gather(self, x: AnyArray, out: A, *, root: int, timeout_s: float | None = None) -> A | None: ...
    @overload
    def gather(
        self, x: Elements[S], out: None = None, *, root: int, timeout_s: float | None = None
    ) -> npt.NDArray[S] | None: ...
    @overload
    def gather(self, x: A, out: A | None = None, *, root: int, timeout_s: float | None = None) -> A | None: ...
    def gather(self, x: Any, out: Any = None, *, root: int, timeout_s: float | None = None) -> Any:
        """Collect `x` of every rank on `root`, where row r of the result is rank r's; None elsewhere.

        Collective. `x` has the same shape and dtype on every rank; the result has shape `(p, *x.shape)`.
        `out` matters on `root` alone; any shape with as many elements will do. `x` may be its row of `out`.

        Raises:
            ArrayError: `out` does not fit, or `root` is not a rank.
            UnsupportedError: No transport takes such an array.
        """
        call = Call(self, "gather", x, root=root, timeout_s=timeout_s)
        return self._gather(call, out, [call.x.size] * self.size, root)

    @overload
    def gatherv(
        self,
        x: AnyArray,
        out: A,
        counts: Sequence[int] | None = None,
        *,
        root: int,
        timeout_s: float | None = None,
    ) -> A | None: ...
    @overload
    def gatherv(
        self,
        x: Elements[S],
        out: None = None,
        counts: Sequence[int] | None = None,
        *,
        root: int,
        timeout_s: float | None = None,
    ) -> npt.NDArray[S] | None: ...
    @overload
    def gatherv(
        self,
        x: A,
        out: A | None = None,
        counts: Sequence[int] | None = None,
        *,
        root: int,
        timeout_s: float | None = None,
    ) -> A | None: ...
    def gatherv(
        self,
        x: Any,
        out: Any = None,
        counts: Sequence[int] | None = None,
        *,
        root: int,
        timeout_s: float | None = None,
    ) -> Any:
        """Collect arrays of different lengths on `root`, one behind the other in rank order; None elsewhere.

        Collective. Rank r gives counts[r] elements, in any shape; the result has shape (sum(counts),). `out` and
        `counts` matter on `root` alone, which must give `counts`; an `out` of any shape with as many elements
        will do. `x` may be its own part of `out`.

        Raises:
            ArrayError: `counts` is missing or does not fit the ranks, `x` or `out`, or `root` is not a rank.
            CommMismatch: A rank gives another number of elements than `counts` says.
            UnsupportedError: No transport takes such an array.

        >>> from bagua_comm.testing import run_ranks
        >>> run_ranks(3, lambda comm: comm.gatherv(np.full(comm.rank, comm.rank), counts=[0, 1, 2], root=0))[0]
        array([1, 2, 2])
        """
        call = Call(self, "gatherv", x, root=root, timeout_s=timeout_s).uncompared()
        if self.rank != root:
            return self._gather(call, None, [], root)
        if counts is None:
            raise ArrayError("gatherv: counts is None; root must give it")
        return self._gather(call, out, self._check_counts("gatherv", "counts", counts, call.x, own=True), root)

    def _gather(self, call: Call, out: Any, counts: Sequence[int], root: int) -> Any:
        """What `gather` and `gatherv` share; `counts` matter on `root`."""
        self._check_peer(call.name, "root", root)
        is_even, given = call.name == "gather", call.x
        call.contiguous()
        if self.rank == root:
            call.into(out, (self.size, *given.shape) if is_even else (sum(counts),), any_shape=True)
            chunks = parts(call.target, counts)
            call.check_overlap(chunks[root])

        def move() -> None:
            if not is_even:
                self._compare_counts(call, self._only(root, given.size), counts)
            if self.rank != root:
                call.transport.exchange([(root, call.x)], [], tag=COLLECTIVE)
                return
            if not arrays.same_memory(call.x, chunks[root]):
                chunks[root][...] = call.x.reshape(-1)
            call.transport.exchange([], [(r, chunks[r]) for r in self._others()], tag=COLLECTIVE)

        call.run(move)
        return call.result if self.rank == root else None

    @overload
    def scatter(self, x: AnyArray | None, out: A, *, root: int, timeout_s: float | None = None) -> A: ...
    @overload
    def scatter(
        self, x: Elements[S], out: None = None, *, root: int, timeout_s: float | None = None
    ) -> npt.NDArray[S]: ...
    @overload
    def scatter(self, x: A, out: None = None, *, root: int, timeout_s: float | None = None) -> A: ...
    def scatter(self, x: Any, out: Any = None, *, root: int, timeout_s: float | None = None) -> Any:
        """Deal the rows of `x` of `root` to the ranks: the result is row `rank`.

        Collective. `x`, (p, ...), matters on `root` alone and is None elsewhere, where `out` gives the
        shape and dtype to expect. On `root`, `out` may be None or that row of `x`.

        Raises:
            ArrayError: `x` does not have p rows, `out` is missing or does not fit, `root` is not a rank.
            UnsupportedError: No transport takes such an array.
        """
        return self._scatter("scatter", x, None, out, root, timeout_s)

    @overload
    def scatterv(
        self,
        x: AnyArray | None,
        counts: Sequence[int] | None,
        out: A,
        *,
        root: int,
        timeout_s: float | None = None,
    ) -> A: ...
    @overload
    def scatterv(
        self,
        x: Elements[S],
        counts: Sequence[int] | None,
        out: None = None,
        *,
        root: int,
        timeout_s: float | None = None,
    ) -> npt.NDArray[S]: ...
    @overload
    def scatterv(
        self, x: A, counts: Sequence[int] | None, out: None = None, *, root: int, timeout_s: float | None = None
    ) -> A: ...
    def scatterv(
        self, x: Any, counts: Sequence[int] | None, out: Any = None, *, root: int, timeout_s: float | None = None
    ) -> Any:
        """Deal parts of `x` of `root` to the ranks, counts[r] elements to rank r.

        Collective. The parts lie one behind the other in `x`, in rank order. `x` and `counts` matter on `root`
        alone and are None elsewhere, where `out` gives the number of elements and the dtype to expect. On `root`,
        `out` may be None or that part of `x`; an `out` of any shape will do.

        Raises:
            ArrayError: `counts` is missing or does not fit the ranks, `x` or `out`; `x` or `out` is missing;
                `root` is not a rank.
            CommMismatch: A rank expects another number of elements than `counts` says.
            UnsupportedError: No transport takes such an array.

        >>> from bagua_comm.testing import run_ranks
        >>> def body(comm):
        ...     x, counts = (np.arange(3), [1, 2]) if comm.rank == 0 else (None, None)
        ...     return comm.scatterv(x, counts, np.empty(1 + comm.rank, int), root=0)
        >>> run_ranks(2, body)
        [array([0]), array([1, 2])]
        """
        return self._scatter("scatterv", x, counts, out, root, timeout_s)

    def _scatter(
        self, name: str, x: Any, counts: Sequence[int] | None, out: Any, root: int, timeout_s: float | None
    ) -> Any:
        """What `scatter` and `scatterv` share."""
        self._check_peer(name, "root", root)
        is_even, at_root = name == "scatter", self.rank == root
        if not at_root and out is None:
            raise ArrayError(f"{name}: out is None; ranks other than root must give it")
        if at_root and x is None:
            raise ArrayError(f"{name}: x is None; root must give it")
        call = (
            Call(self, name, x, root=root, timeout_s=timeout_s)
            if at_root
            else Call(self, name, out, "out", root=root, timeout_s=timeout_s)
        )
        given = call.x
        if not at_root:
            call.into(out, given.shape)
        elif is_even:
            if given.ndim == 0 or given.shape[0] != self.size:
                raise ArrayError(f"{name}: x has shape {given.shape}, expected ({self.size}, ...)")
            counts = [given.size // self.size] * self.size
            call.into(out, given.shape[1:])
        elif counts is None:
            raise ArrayError(f"{name}: counts is None; root must give it")
        else:
            counts = self._check_counts(name, "counts", counts, given)
            call.into(out, (counts[root],), any_shape=True)
        if at_root:
            call.contiguous()
            chunks, mine = parts(call.x, counts or []), call.target.reshape(-1)
            call.check_overlap(chunks[root])
        call.sends(call.x if at_root else None)
        call.x = call.target  # what is compared and counted is a rank's part

        def move() -> None:
            if not is_even:
                self._compare_counts(call, counts or [], self._only(root, call.target.size))
            if not at_root:
                call.transport.exchange([], [(root, call.target)], tag=COLLECTIVE)
            else:
                if not arrays.same_memory(chunks[root], mine):
                    mine[...] = chunks[root]
                call.transport.exchange([(r, chunks[r]) for r in self._others()], [], tag=COLLECTIVE)

        (call if is_even else call.uncompared()).run(move)
        return call.result

    def alltoall(self, x: A, out: A | None = None, *, timeout_s: float | None = None) -> A:
        """Send chunk j of `x` to rank j; chunk i of the result comes from rank i.

        Collective. `x` has shape (p * m, ...) on every rank, and so has the result. `out` may be `x`.

        Raises:
            ArrayError: `x` does not split evenly, or `out` does not fit.
            UnsupportedError: No transport takes such an array.
        """
        repeated: A | None = self.kinds.repeat(self, "alltoall", (), x, out, timeout_s)
        if repeated is not None:
            return repeated
        call = Call(self, "alltoall", x, timeout_s=timeout_s)
        self._even_chunk("alltoall", call.x)
        call.into(out, call.x.shape)
        call.in_place()
        call.contiguous()
        call.make(call.transport.alltoall)
        result: A = call.result
        return result

    def allgatherv(self, x: AnyArray, out: A, counts: Sequence[int], *, timeout_s: float | None = None) -> A:
        """Collect arrays of different lengths, one behind the other, on every rank.

        Collective. Rank r gives counts[r] elements; `out` has sum(counts), and every rank the same
        `counts`. `x` may be its own part of `out`.

        Raises:
            ArrayError: `counts` does not fit the ranks, `x` or `out`.
            UnsupportedError: No transport takes such an array.
        """
        name = "allgatherv"
        call = Call(self, name, x, timeout_s=timeout_s)
        counts = call.detail["counts"] = self._check_counts(name, "counts", counts, call.x, own=True)
        call.into(out, (sum(counts),), any_shape=True)
        call.contiguous()
        send, whole = call.x.reshape(-1), call.target.reshape(-1)
        chunks = parts(whole, counts)
        call.check_overlap(chunks[self.rank])
        call.sends(send)
        call.x, call.payload = whole, send.nbytes  # ranks give different sizes, and all get the same
        others = self._others()

        def move() -> None:
            if not arrays.same_memory(send, chunks[self.rank]):
                chunks[self.rank][...] = send
            call.transport.exchange([(r, send) for r in others], [(r, chunks[r]) for r in others], tag=COLLECTIVE)

        call.run(move)
        result: A = call.result
        return result

    def alltoallv(
        self,
        x: AnyArray,
        counts: Sequence[int],
        out: A,
        out_counts: Sequence[int],
        *,
        timeout_s: float | None = None,
    ) -> A:
        """Send counts[j] elements of `x` to rank j; out_counts[i] elements come from rank i.

        Collective. The parts lie one behind the other in `x` and in `out`, in the order of the ranks.
        Rank i's counts[j] must equal rank j's out_counts[i].

        Raises:
            ArrayError: The counts do not fit the ranks, `x` or `out`.
            CommMismatch: The counts of two ranks do not fit together.
            UnsupportedError: No transport takes such an array.
        """
        name = "alltoallv"
        call = Call(self, name, x, timeout_s=timeout_s).uncompared()
        counts = self._check_counts(name, "counts", counts, call.x)
        out_counts = self._check_counts(name, "out_counts", out_counts)
        if counts[self.rank] != out_counts[self.rank]:
            raise ArrayError(
                f"{name}: counts[{self.rank}] is {counts[self.rank]}, but out_counts[{self.rank}] is "
                f"{out_counts[self.rank]}; both are this rank's own part"
            )
        call.into(out, (sum(out_counts),), any_shape=True)
        call.contiguous()
        if arrays.overlap(call.x, call.target):
            raise ArrayError(f"{name}: out overlaps x")
        source, chunks = parts(call.x, counts), parts(call.target, out_counts)
        others = self._others()

        def move() -> None:
            self._compare_counts(call, counts, out_counts)
            chunks[self.rank][...] = source[self.rank]
            call.transport.exchange(
                [(r, source[r]) for r in others], [(r, chunks[r]) for r in others], tag=COLLECTIVE
            )

        call.run(move)
        result: A = call.result
        return result

    def barrier(self, *, timeout_s: float | None = None) -> None:
        """Return when every rank has called.

        Collective.
        """
        if self.kinds.repeat(self, "barrier", (), NOTHING, None, timeout_s) is None:
            call = Call.on_host(self, "barrier", timeout_s=timeout_s)
            host = self.host
            call.make(lambda *_: host.barrier(), into="nothing")

    # Objects ----------------------------------------------------------------------------------------

    @overload
    def broadcast_object(self, obj: None, *, root: int, timeout_s: float | None = None) -> Any: ...
    @overload
    def broadcast_object(self, obj: T | None, *, root: int, timeout_s: float | None = None) -> T: ...
    def broadcast_object(self, obj: Any, *, root: int, timeout_s: float | None = None) -> Any:
        """Give every rank the object of `root`, by pickle; `obj` is ignored elsewhere.

        Collective. Unpickling runs code chosen by the sender: ranks trust each other.

        Raises:
            ArrayError: `root` is not a rank.
            UnsupportedError: The object cannot be pickled; raised on all ranks.
        """
        name = "broadcast_object"
        self._check_peer(name, "root", root)
        mine = objects.pack(name, obj) if self.rank == root else objects.NOTHING
        call = Call.on_host(self, name, payload=mine.data.nbytes, root=root, timeout_s=timeout_s)
        parcel = call.run(lambda: objects.broadcast(self.host, mine, root))
        return obj if mine.size > 0 else parcel.open()

    def allgather_object(self, obj: T, *, timeout_s: float | None = None) -> list[T]:
        """The objects of all ranks in rank order, by pickle.

        Collective. Unpickling runs code chosen by the sender: ranks trust each other.

        Raises:
            UnsupportedError: An object cannot be pickled; raised on all ranks.
        """
        mine = objects.pack("allgather_object", obj)
        call = Call.on_host(self, "allgather_object", payload=mine.data.nbytes, timeout_s=timeout_s)
        parcels = call.run(lambda: objects.allgather(self.host, mine))
        failed = [parcel for parcel in parcels if parcel.size < 0]
        return [parcel.open() for parcel in failed or parcels]

    def gather_object(self, obj: T, *, root: int, timeout_s: float | None = None) -> list[T] | None:
        """The objects of all ranks in rank order, by pickle, on `root`; None elsewhere.

        Collective. Unpickling runs code chosen by the sender: ranks trust each other.

        Raises:
            ArrayError: `root` is not a rank.
            UnsupportedError: An object cannot be pickled; raised on all ranks.

        >>> from bagua_comm.testing import run_ranks
        >>> run_ranks(2, lambda comm: comm.gather_object({"rank": comm.rank}, root=0))
        [[{'rank': 0}, {'rank': 1}], None]
        """
        name = "gather_object"
        self._check_peer(name, "root", root)
        mine = objects.pack(name, obj)
        call = Call.on_host(self, name, payload=mine.data.nbytes, root=root, timeout_s=timeout_s)
        parcels = call.run(lambda: objects.gather(self.host, mine, root))
        found = [parcel.open() for parcel in parcels]
        return found if self.rank == root else None

    @overload
    def scatter_object(self, objs: None, *, root: int, timeout_s: float | None = None) -> Any: ...
    @overload
    def scatter_object(self, objs: Iterable[T] | None, *, root: int, timeout_s: float | None = None) -> T: ...
    def scatter_object(self, objs: Iterable[Any] | None, *, root: int, timeout_s: float | None = None) -> Any:
        """Deal the objects of `root` to the ranks, by pickle: the result is object number `rank`.

        Collective. `objs` are p objects; they matter on `root` alone and are None elsewhere. Unpickling runs code
        chosen by the sender: ranks trust each other.

        Raises:
            ArrayError: `root` is not a rank, or it gives more or fewer than p objects, which raises on all ranks.
            UnsupportedError: An object cannot be pickled; raised on all ranks.

        >>> from bagua_comm.testing import run_ranks
        >>> run_ranks(2, lambda comm: comm.scatter_object(["a", 2.5] if comm.rank == 0 else None, root=0))
        ['a', 2.5]
        """
        name = "scatter_object"
        self._check_peer(name, "root", root)
        parcels = objects.pack_each(name, objs, self.size) if self.rank == root else []
        payload = sum(parcel.data.nbytes for parcel in parcels)
        call = Call.on_host(self, name, payload=payload, root=root, timeout_s=timeout_s)
        return call.run(lambda: objects.scatter(self.host, parcels, root)).open()

    def send_object(self, obj: Any, *, dest: int, timeout_s: float | None = None) -> None:
        """Send an object, by pickle, to `dest`, which calls `recv_object`.

        Returns when `obj` may be changed again, which can be before or after it is received. Objects never match
        the arrays of `send` and `recv`; receive both in the order in which they are sent.

        Raises:
            ArrayError: `dest` is not a rank.
            UnsupportedError: The object cannot be pickled; nothing is sent then.
        """
        name = "send_object"
        self._check_peer(name, "dest", dest)
        parcel = objects.pack(name, obj)
        if parcel.size < 0:
            parcel.open()

        def move() -> None:
            if self.check:
                self._messages.compare(self.host, name, [(dest, None)], [])
            objects.send(self.host, parcel, dest)

        Call.on_host(self, name, payload=parcel.size, dest=dest, timeout_s=timeout_s).uncompared().run(move)

    def recv_object(self, *, source: int, timeout_s: float | None = None) -> Any:
        """The object that `source` sends to this rank next, by `send_object`.

        Unpickling runs code chosen by the sender: ranks trust each other.

        Raises:
            ArrayError: `source` is not a rank.

        >>> from bagua_comm.testing import run_ranks
        >>> def body(comm):
        ...     comm.send_object({"from": comm.rank}, dest=1 - comm.rank)
        ...     return comm.recv_object(source=1 - comm.rank)
        >>> run_ranks(2, body)
        [{'from': 1}, {'from': 0}]
        """
        name, host = "recv_object", self.host
        self._check_peer(name, "source", source)

        def move() -> objects.Parcel:
            if self.check:
                (wrong,) = self._messages.compare(host, name, [], [(source, None)])
                if wrong is not None:
                    # Received anyway, so that the next receive gets the next message.
                    if wrong.kind == arrays.library(NOTHING):
                        host.exchange([], [(source, np.empty(wrong.nbytes, np.uint8))])
                    raise wrong.error
            return objects.receive(host, source)

        return Call.on_host(self, name, source=source, timeout_s=timeout_s).uncompared().run(move).open()

    # Point to point ---------------------------------------------------------------------------------

    def send(self, x: AnyArray, *, dest: int, timeout_s: float | None = None) -> None:
        """Send `x` to `dest`, which calls `recv`.

        Returns when `x` may be changed again, which can be before or after it is received. On a lane, a send or a
        recv goes on while the caller works (MPI's isend and irecv). Tasks of a lane run one after the other, so a
        long send waits there for its recv: where two ranks send to each other, submit `sendrecv` or `exchange`.

        Raises:
            ArrayError: `dest` is not a rank.
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
        if not self._repeats("send", (dest,), x, None, timeout_s):
            self._exchange("send", [(dest, x)], [], timeout_s, dest=dest)

    def recv(self, out: A, *, source: int, timeout_s: float | None = None) -> A:
        """Receive into `out` what `source` sends to this rank next; returns `out`.

        On a lane it goes on while the caller works; see `send`.

        Raises:
            ArrayError: `source` is not a rank, or `out` cannot be written to.
            CommMismatch: The message has another size than `out`.
            UnsupportedError: No transport takes such an array.
        """
        if not self._repeats("recv", (source,), out, None, timeout_s):
            self._exchange("recv", [], [(source, out)], timeout_s, source=source)
        return out

    def sendrecv(
        self, x: AnyArray, out: A, *, dest: int | None, source: int | None, timeout_s: float | None = None
    ) -> A:
        """Send `x` to `dest` and receive `out` from `source` at once; returns `out`.

        Where `dest` is None nothing is sent, and where `source` is None `out` is left as it is (MPI's PROC_NULL):
        at the ends of a row of ranks, say.

        Raises:
            ArrayError: `dest` or `source` is not a rank, or `out` cannot be written to or overlaps `x`.
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
        if out is None or not self._repeats("sendrecv", (dest, source), x, out, timeout_s):
            self._exchange("sendrecv", [(dest, x)], [(source, out)], timeout_s, dest=dest, source=source)
        return out

    def exchange(
        self, sends: Sequence[MaybeMessage], recvs: Sequence[MaybeMessage], *, timeout_s: float | None = None
    ) -> None:
        """Send and receive many messages at once: lists of (peer, array).

        Between two ranks, messages match in the order of the lists; `send` and `recv` match as well. Where a peer
        is None nothing is sent or received, and the array is left as it is.

        Raises:
            ArrayError: A peer is not a rank, or an array to receive into cannot be written to or overlaps another
                one.
            CommMismatch: A message has another size than the array it should fill.
            UnsupportedError: No transport takes such arrays.
        """
        self._exchange("exchange", sends, recvs, timeout_s)

    def _exchange(
        self,
        name: str,
        sends: Sequence[MaybeMessage],
        recvs: Sequence[MaybeMessage],
        timeout_s: float | None,
        **peers: int | None,
    ) -> None:
        outgoing: list[Message] = []
        incoming: list[Message] = []
        values: list[Array] = []
        calls: list[Call] = []
        for side, (peer, x) in [("sends", m) for m in sends] + [("recvs", m) for m in recvs]:
            call = Call(self, name, x, side, timeout_s=timeout_s, **peers).uncompared()
            if side == "recvs":
                check_writable(name, side, x, call.x)
            if peer is None and name in ("sendrecv", "exchange"):
                continue
            peer = self._check_peer(name, f"a peer in {side}" if not peers else "peer", peer)
            if side == "recvs" and any(arrays.share_elements(call.x, other) for other in values):
                raise ArrayError(f"{name}: an array to receive into overlaps another array")
            calls.append(call)
            values.append(call.x)
            call.contiguous()
            (outgoing if side == "sends" else incoming).append((peer, call.x))
        if not calls:
            return
        first = calls[0]
        if any(call.transport is not first.transport for call in calls):
            raise UnsupportedError(f"{name}: some arrays are host and some device arrays; make a call for each")
        first.payload = sum(x.nbytes for _, x in outgoing)
        first.sends(outgoing[0][1] if outgoing else None)
        if incoming:
            first.target = incoming[0][1]
        if self.check:
            first.run(lambda: self._exchange_what_fits(name, first.transport, outgoing, incoming))
        else:
            first.run(lambda: first.transport.exchange(outgoing, incoming))
        received = values[len(outgoing) :]
        for value, (_, target) in zip(received, incoming, strict=True):
            if value is not target:
                value[...] = target
        if peers and len(calls) == len(peers):
            self._remember(first, [peer for peer, _ in outgoing], [peer for peer, _ in incoming], received)

    def _repeats(
        self, name: str, peers: tuple[int | None, ...], x: Any, out: Any, timeout_s: float | None
    ) -> bool:
        """Make a call between ranks if it is like an earlier one; False, and nothing was done, if it is not."""
        if self.check or x is out:
            return False
        for peer in peers:
            if type(peer) is not int:  # 1.0 is 1, and no rank
                return False
        return self.kinds.repeat(self, name, peers, x, out, timeout_s) is not None

    def _remember(self, call: Call, dests: list[int], sources: list[int], received: list[Array]) -> None:
        """Keep what was worked out for a call of at most one message each way, for `_repeats`."""
        exchange = call.transport.exchange
        (dest,), (source,) = dests or [-1], sources or [-1]
        moves: dict[tuple[bool, bool], Move] = {
            (True, True): lambda x, out: exchange(((dest, x),), ((source, out),)),
            (True, False): lambda x, _: exchange(((dest, x),), ()),
            (False, True): lambda _, out: exchange((), ((source, out),)),
        }
        move = moves[bool(dests), bool(sources)]
        into: Into = "nothing"
        if received:
            into = "out" if dests else "x"
            call.landing = Landing(None, received[0], received[0])
        self.kinds.add((*dests, *sources), Kind(call, move, into), call.given)

    def _exchange_what_fits(
        self, call: str, transport: Transport, sends: Sequence[Message], recvs: Sequence[Message]
    ) -> None:
        """Exchange, and raise if a message is not what was expected.

        Such a message is received anyway, so that the next receive gets the next message.
        """
        host = self.host
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
        """Group the ranks that give the same `color`, ordered by `key`, or by rank if it is None.

        Collective. Ranks that give the same `key` are ordered by rank.

        Raises:
            ArrayError: On all ranks alike: one gives a `color` that is not an integer from 0 to 2^31 - 1, or a
                `key` that is not an integer of 64 bits.
        """

        def split() -> Communicator:
            place = agree_on_split(self.host, color, self.rank if key is None else key)
            return self._derived([each.split(int(color), place) for each in self.transports], f":{color}")

        return Call.on_host(self, "split").run(split)

    def dup(self) -> Communicator:
        """Another communicator over the same ranks, whose messages never match this one's.

        Collective.
        """
        call = Call.on_host(self, "dup")
        return call.run(lambda: self._derived([transport.dup() for transport in self.transports]))

    def by_node(self) -> Nodes:
        """Communicators inside this node, and across nodes among ranks of equal `local_rank`.

        Collective. The first call splits; later ones return the same pair, which is closed with this one and
        counts its bytes here.
        """
        if self._nodes is None:
            intra = self.split(self.node)
            inter = self.split(self.local_rank)
            intra.counters = inter.counters = self.counters
            intra.work = inter.work = self.work
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
            lane: Lane = StreamLane(self.dup())
        elif all(transport.concurrent for transport in self.transports):
            lane = ThreadLane(self.dup())
        else:
            warnings.warn(
                "MPI grants less than MPI_THREAD_MULTIPLE: lanes work on the caller's thread, and nothing "
                "overlaps; see mpi4py.rc.thread_level",
                RuntimeWarning,
                stacklevel=2,
            )
            lane = InlineLane(self.dup())
        self.flight.lanes.add(lane)
        return lane

    def check_consistency(self, x: AnyArray, *, timeout_s: float | None = None) -> None:
        """Raise on every rank unless all ranks hold the same bytes, shape and dtype in `x`.

        Collective. Compares 128-bit BLAKE2 hashes.

        Raises:
            CommMismatch: The ranks' arrays differ; the message says which ranks agree.
        """
        value = Call(self, "check_consistency", x).x
        digest = hashlib.blake2b(f"{value.dtype.name}{value.shape}".encode(), digest_size=16)
        digest.update((value if isinstance(value, np.ndarray) else value.get()).tobytes())
        table = self.allgather(np.frombuffer(digest.digest(), np.uint8), timeout_s=timeout_s)
        groups: dict[bytes, list[int]] = {}
        for rank in range(self.size):
            groups.setdefault(table[rank].tobytes(), []).append(rank)
        if len(groups) > 1:
            found = "; ".join(f"ranks {ranks}" for ranks in groups.values())
            raise CommMismatch(f"check_consistency: x differs; these agree with each other: {found}")

    def trace(self, path: str | Path) -> None:
        """Write what all ranks did lately to `path`, as a Chrome trace that Perfetto opens.

        Collective. Rank 0 writes the file. In the picture, each process is a rank, and each row one of its
        threads.

        Raises:
            ArrayError: `path` is not a path, or a rank has a span that JSON cannot hold; on all ranks alike.
            OSError: The file cannot be written; on all ranks alike.
        """
        mine: tuple[list[trace.Span], str | None] = ([], None)
        try:
            mine = (trace.plain(self.tracer.spans() if isinstance(self.tracer, Recorder) else []), None)
        except Exception as exc:  # the other ranks wait for this one
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
        told: Exception | None = self.broadcast_object(failure, root=0)
        if told is not None:
            raise told

    def on(
        self,
        *,
        before: Listener | None = None,
        after: Listener | None = None,
        failed: Listener | None = None,
    ) -> Hook:
        """Have functions called for every call of this communicator, and of all that are made from it.

        Each takes a `CallView`. What they may raise, and on which thread they run, is said in `bagua_comm.hooks`.
        While there are none, a call pays for one look at an attribute.

        Args:
            before: Called when the call begins, before anything is sent.
            after: Called when it has ended well, with the result; on a device it may still be at work.
            failed: Called when it has failed, with the error.

        Returns:
            A handle; its `remove()` ends this.

        Raises:
            ArrayError: One of them cannot be called, or there is none.

        >>> from bagua_comm.testing import run_ranks
        >>> def body(comm):
        ...     seen = []
        ...     hook = comm.on(after=lambda call: seen.append(f"{call}: {call.result}"))
        ...     comm.dup().allreduce(np.ones(2))
        ...     hook.remove()
        ...     comm.barrier()
        ...     return seen
        >>> run_ranks(2, body)[0]
        ['dup() #1 of world: None', 'allreduce(float64[2]) #1 of world.1: [2. 2.]']
        """
        return self.hooks.add(self.group, before, after, failed)

    # Failure and end --------------------------------------------------------------------------------

    def shrink(self) -> Communicator:
        """A communicator over the ranks that are still alive, after `RankFailed`.

        Collective among the survivors.

        Raises:
            UnsupportedError: The library below cannot go on after a rank has died.
        """
        first, *rest = self.transports
        host = first.shrink()
        survivors = self._derived([host, *(transport.shrink(host) for transport in rest)], make=self._survivors)
        log_on_root(_log, survivors.rank, "shrink: %d of %d ranks are left", survivors.size, self.size)
        return survivors

    def abort(self, exit_code: int = 1) -> None:
        """Give up, on all ranks: under MPI all processes end with `exit_code`."""
        for transport in self.transports:
            transport.abort(exit_code)

    def number_of(self, kind: str) -> int:
        """The next number, from 1 on, of something that all ranks make in the same order: a layer, a call."""
        self._numbers[kind] += 1
        return self._numbers[kind]

    def close(self) -> None:
        """Free what this communicator holds; closing twice does nothing.

        Collective.
        """
        if self.turn.closed or not self.turn.is_of_this_process:
            return
        self.turn.closed = True
        if self._nodes is not None:
            for comm in self._nodes:
                comm.close()
        with ExitStack() as ends:  # the last transport first: it may be set up over the first
            ends.callback(self.scratch.clear)
            ends.callback(self.settled.clear)
            ends.callback(self.kinds.clear)
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
        if not self.turn.is_of_this_process:
            return
        if isinstance(error, SystemExit):
            # This rank leaves in the middle: its peers would wait for it.
            if not isinstance(error.code, int):
                print(error.code, file=sys.stderr, flush=True)
                error.code = 1  # it is printed
            self.abort(error.code)
        if not isinstance(error, CommError):
            self.flight.write(left=f"{type(error).__name__}: {error}")
        for transport in self.transports:
            transport.leave(f"{type(error).__name__}: {error}")

    def __repr__(self) -> str:
        names = "+".join(transport.name for transport in self.transports)
        return f"<Communicator rank {self.rank} of {self.size} over {names}>"

    # Checks -----------------------------------------------------------------------------------------

    def carrier(self, x: AnyArray, *, call: str = "carrier", name: str = "x") -> Transport:
        """The transport that moves arrays like `x`; errors call `x` argument `name` of `call`.

        Raises:
            UnsupportedError: No transport moves `x`: it is not an array, or its dtype or its library is not
                supported.
        """
        return carrier(self.transports, call, name, as_argument(call, name, x))

    def _check_peer(self, call: str, name: str, peer: object) -> int:
        if not isinstance(peer, (int, np.integer)) or not 0 <= peer < self.size:
            raise ArrayError(f"{call}: {name} is {peer!r}, expected a rank from 0 to {self.size - 1}")
        return int(peer)

    def _check_counts(
        self, call: str, name: str, counts: Sequence[int], x: Array | None = None, *, own: bool = False
    ) -> list[int]:
        """`counts` as integers, one for each rank. `x` must have their sum of elements or, if `own`, its own."""
        found = list(counts)
        if len(found) != self.size or not all(isinstance(n, (int, np.integer)) and n >= 0 for n in found):
            raise ArrayError(f"{call}: {name} is {found}, expected {self.size} numbers of elements")
        if own and x is not None and x.size != found[self.rank]:
            raise ArrayError(
                f"{call}: x has {x.size} elements, expected {name}[{self.rank}] = {found[self.rank]}"
            )
        if not own and x is not None and x.size != sum(found):
            raise ArrayError(f"{call}: x has {x.size} elements, expected {sum(found)}, the sum of {name}")
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

    def _compare_counts(self, call: Call, sends: Sequence[int], recvs: Sequence[int]) -> None:
        """With `check`, compare a call whose arrays differ among ranks, and its message sizes. Collective.

        `sends` and `recvs` say how many elements go to each rank and come from each; nothing if empty.
        """
        if not self.check:
            return
        root = call.detail.get("root")
        at = "" if root is None else f", root={root}"
        compare_calls(self.host, f"{call.name}({arrays.dtype_name(call.x.dtype)}{at})")
        nothing = [0] * self.size
        compare_counts(self.host, sends or nothing, recvs or nothing)

    def _only(self, rank: int, count: int) -> list[int]:
        """`count` for one rank, zero for the others."""
        return [count if r == rank else 0 for r in range(self.size)]

    def _survivors(self, transports: Sequence[Transport], **settings: Any) -> Communicator:
        """What `shrink` makes."""
        return Communicator(transports, **settings)

    def _derived(
        self, transports: Sequence[Transport], kind: str = "", make: Callable[..., Communicator] | None = None
    ) -> Communicator:
        """A communicator over transports split off from this one's, with all that is passed on.

        `kind` is the end of its name, which tells it from others that are split off at the same time.
        """
        first = transports[0]
        former = np.empty((first.size, 1), np.int64)
        first.allgather(np.array([self.rank], np.int64), former)
        comm = (make or Communicator)(
            transports,
            nodes=[self._labels[rank] for rank in former[:, 0]],
            device=self.device,
            check=self.check,
            tracer=self.tracer,
            op_order=self.op_order,
        )
        comm.hooks = self.hooks
        comm.flight, comm.group = self.flight, f"{self.group}.{self.number_of('group')}{kind}"
        members = self.flight.groups[self.group]
        comm.flight.groups[comm.group] = tuple(members[rank] for rank in former[:, 0])
        return comm


MaybeMessage: TypeAlias = tuple[int | None, AnyArray]
"""A message; nothing is sent or received if the peer is None."""
