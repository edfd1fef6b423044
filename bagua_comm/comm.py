"""The communicator: what users hold.

It checks arguments, allocates results, traces, counts, and asks its transport to move the bytes. All
arguments are checked before a byte moves, so that all ranks fail alike.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import pickle
import sys
import threading
import time
import warnings
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, NamedTuple

import numpy as np

from . import arrays, trace
from .arrays import Array, Scratch, as_array, check_reduction
from .errors import ArrayError, CommError, CommMismatch, UnsupportedError
from .lane import InlineLane, Lane, StreamLane, ThreadLane
from .topology import place
from .trace import Counters, Recorder
from .transports.base import COLLECTIVE, Message, Transport

_SIGNATURE_BYTES = 256

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
        check: Compare every collective call among the ranks before it runs, and raise `CommMismatch`
            naming both calls where they differ. Costs a small allgather a call.
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
                float32.

        Raises:
            ArrayError: `out` does not fit `x`, or `op` is unknown.
            UnsupportedError: No such reduction for this dtype, or no transport takes such an array.

        >>> from bagua_comm.testing import run_ranks
        >>> run_ranks(2, lambda comm: comm.allreduce(np.array([1.0, comm.rank]), op="avg"))
        [array([1. , 0.5]), array([1. , 0.5])]
        """
        call = "allreduce"
        send, transport = self.accept(call, "x", x)
        check_reduction(call, op, send.dtype)
        out, target = self.landing(call, out, send.shape, send)
        send = self.in_place(call, send, target)
        with Operation(self, call, transport, send, {"op": op}):
            transport.allreduce(arrays.contiguous(send), target, op)
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
        check_reduction(call, op, send.dtype)
        if self.rank != root:
            with Operation(self, call, transport, send, {"op": op, "root": root}):
                transport.reduce(arrays.contiguous(send), None, root, op)
            return None
        out, target = self.landing(call, out, send.shape, send)
        send = self.in_place(call, send, target)
        with Operation(self, call, transport, send, {"op": op, "root": root}):
            transport.reduce(arrays.contiguous(send), target, root, op)
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

    def reduce_scatter(self, x: Array, out: Array | None = None, *, op: str = "sum") -> Array:
        """Reduce `x` over all ranks and keep this rank's chunk.

        Collective. `x` has shape (p * m, ...) on every rank; the result, (m, ...), is chunk `rank`.

        Args:
            x: The array of this rank.
            out: Where to put the result. May be this rank's chunk of `x`.
            op: See `allreduce`.

        Raises:
            ArrayError: `x` does not split evenly, `out` does not fit, or `op` is unknown.
            UnsupportedError: No such reduction for this dtype, or no transport takes such an array.

        >>> from bagua_comm.testing import run_ranks
        >>> run_ranks(2, lambda comm: comm.reduce_scatter(np.arange(4.0)))
        [array([0., 2.]), array([4., 6.])]
        """
        call = "reduce_scatter"
        send, transport = self.accept(call, "x", x)
        check_reduction(call, op, send.dtype)
        m = self._even_chunk(call, send)
        out, target = self.landing(call, out, (m, *send.shape[1:]), send)
        send = arrays.contiguous(send)
        self._check_overlap(call, send, target, arrays.rows(send, self.size)[self.rank])
        with Operation(self, call, transport, send, {"op": op}):
            transport.reduce_scatter(send, target, op)
        return finished(out, target)

    def gather(self, x: Array, out: Array | None = None, *, root: int) -> Array | None:
        """Collect `x` of every rank on `root`, where row r of the result is rank r's; None elsewhere.

        Collective. `x` has the same shape and dtype on every rank; the result has shape (p, *x.shape).
        `out` matters on `root` alone; any shape with as many elements will do.

        Raises:
            ArrayError: `out` does not fit, or `root` is no rank.
            UnsupportedError: No transport takes such an array.
        """
        call = "gather"
        send, transport = self.accept(call, "x", x)
        self._check_peer(call, "root", root)
        send = arrays.contiguous(send)
        if self.rank != root:
            with Operation(self, call, transport, send, {"root": root}):
                transport.exchange([(root, send)], [], tag=COLLECTIVE)
            return None
        out, target = self.landing(call, out, (self.size, *send.shape), send, any_shape=True)
        table = arrays.rows(target, self.size)
        self._check_overlap(call, send, target, table[root])
        with Operation(self, call, transport, send, {"root": root}):
            if not arrays.same_memory(send, table[root]):
                table[root] = send.reshape(-1)
            transport.exchange([], [(r, table[r]) for r in self._others()], tag=COLLECTIVE)
        return finished(out, target)

    def scatter(self, x: Array | None, out: Array | None = None, *, root: int) -> Array:
        """Deal the rows of `x` of `root` to the ranks: the result is row `rank`.

        Collective. `x`, (p, ...), matters on `root` alone and is None elsewhere, where `out` gives the
        shape and dtype to expect. On `root`, `out` may be None or that row of `x`.

        Raises:
            ArrayError: `x` does not have p rows, `out` is missing or does not fit, `root` is no rank.
            UnsupportedError: No transport takes such an array.
        """
        call = "scatter"
        self._check_peer(call, "root", root)
        if self.rank != root:
            if out is None:
                raise ArrayError("scatter: out is None; ranks other than root must give it")
            like, transport = self.accept(call, "out", out)
            out, target = self.landing(call, out, like.shape, like)
            with Operation(self, call, transport, target, {"root": root}):
                transport.exchange([], [(root, target)], tag=COLLECTIVE)
            return finished(out, target)
        if x is None:
            raise ArrayError("scatter: x is None; root must give it")
        send, transport = self.accept(call, "x", x)
        if send.ndim == 0 or send.shape[0] != self.size:
            raise ArrayError(f"scatter: x has shape {send.shape}, expected ({self.size}, ...)")
        out, target = self.landing(call, out, send.shape[1:], send)
        send = arrays.contiguous(send)
        table, mine = arrays.rows(send, self.size), target.reshape(-1)
        self._check_overlap(call, send, mine, table[root])
        with Operation(self, call, transport, target, {"root": root}):
            if not arrays.same_memory(table[root], mine):
                mine[...] = table[root]
            transport.exchange([(r, table[r]) for r in self._others()], [], tag=COLLECTIVE)
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
        self._check_counts(call, "counts", counts)
        if send.size != counts[self.rank]:
            raise ArrayError(
                f"{call}: x has {send.size} elements, expected counts[{self.rank}] = {counts[self.rank]}"
            )
        out, target = self.landing(call, out, (sum(counts),), send, any_shape=True)
        send = arrays.contiguous(send).reshape(-1)
        parts = _parts(target, counts)
        self._check_overlap(call, send, target, parts[self.rank])
        with Operation(self, call, transport, target, {"counts": list(counts)}, payload=send.nbytes):
            if not arrays.same_memory(send, parts[self.rank]):
                parts[self.rank][...] = send
            others = self._others()
            transport.exchange([(r, send) for r in others], [(r, parts[r]) for r in others], tag=COLLECTIVE)
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
        self._check_counts(call, "counts", counts)
        self._check_counts(call, "out_counts", out_counts)
        if send.size != sum(counts):
            raise ArrayError(f"{call}: x has {send.size} elements, counts add up to {sum(counts)}")
        if counts[self.rank] != out_counts[self.rank]:
            raise ArrayError(
                f"{call}: counts[{self.rank}] is {counts[self.rank]}, but out_counts[{self.rank}] is "
                f"{out_counts[self.rank]}; both are this rank's own part"
            )
        out, target = self.landing(call, out, (sum(out_counts),), send, any_shape=True)
        send = arrays.contiguous(send).reshape(-1)
        if arrays.overlap(send, target):
            raise ArrayError(f"{call}: out overlaps x")
        source, parts = _parts(send, counts), _parts(target, out_counts)
        with Operation(self, call, transport, send, {}, compare=False):
            parts[self.rank][...] = source[self.rank]
            others = self._others()
            transport.exchange([(r, source[r]) for r in others], [(r, parts[r]) for r in others], tag=COLLECTIVE)
        return finished(out, target)

    def barrier(self) -> None:
        """Return when every rank has called.

        Collective.
        """
        with Operation(self, "barrier", self._host_transport(), _NOTHING, {}):
            self._host_transport().barrier()

    def broadcast_object(self, obj: Any, *, root: int) -> Any:
        """Give every rank the object of `root`, by pickle; `obj` is ignored elsewhere.

        Collective. Unpickling runs code chosen by the sender: ranks trust each other.

        Raises:
            ArrayError: `root` is no rank.
        """
        self._check_peer("broadcast_object", "root", root)
        data = np.frombuffer(pickle.dumps(obj), np.uint8) if self.rank == root else _NOTHING
        nbytes = np.array([data.size], np.int64)
        self.broadcast(nbytes, root=root)
        if self.rank != root:
            data = np.empty(int(nbytes[0]), np.uint8)
        self.broadcast(data, root=root)
        return obj if self.rank == root else pickle.loads(data.tobytes())

    def allgather_object(self, obj: Any) -> list[Any]:
        """The objects of all ranks in rank order, by pickle.

        Collective. Unpickling runs code chosen by the sender: ranks trust each other.
        """
        data = np.frombuffer(pickle.dumps(obj), np.uint8)
        counts = [int(n) for n in self.allgather(np.array(data.size, np.int64))]
        everything = self.allgatherv(data, np.empty(sum(counts), np.uint8), counts)
        return [pickle.loads(part.tobytes()) for part in _parts(everything, counts)]

    # Point to point ---------------------------------------------------------------------------------

    def send(self, x: Array, *, dest: int) -> None:
        """Send `x` to `dest`, which calls `recv`.

        Returns when `x` may be changed again, which can be before or after it is received.

        Raises:
            ArrayError: `dest` is no rank.
            UnsupportedError: No transport takes such an array.
        """
        self._exchange("send", [(dest, x)], [], dest=dest)

    def recv(self, out: Array, *, source: int) -> Array:
        """Receive into `out` what `source` sends to this rank next; returns `out`.

        Raises:
            ArrayError: `source` is no rank, or `out` cannot be written to.
            CommMismatch: The message has another size than `out`.
            UnsupportedError: No transport takes such an array.
        """
        self._exchange("recv", [], [(source, out)], source=source)
        return out

    def sendrecv(self, x: Array, out: Array, *, dest: int, source: int) -> Array:
        """Send `x` to `dest` and receive `out` from `source` at once; returns `out`.

        Raises:
            ArrayError: `dest` or `source` is no rank, or `out` cannot be written to or overlaps `x`.
            CommMismatch: The message has another size than `out`.
            UnsupportedError: No transport takes such an array.
        """
        self._exchange("sendrecv", [(dest, x)], [(source, out)], dest=dest, source=source)
        return out

    def exchange(self, sends: Sequence[Message], recvs: Sequence[Message]) -> None:
        """Send and receive many messages at once: lists of (peer, array).

        Between two ranks, messages match in the order of the lists; `send` and `recv` match as well.

        Raises:
            ArrayError: A peer is no rank, an array to receive into cannot be written to or overlaps
                another one.
            CommMismatch: A message has another size than the array it should fill.
            UnsupportedError: No transport takes such arrays.
        """
        self._exchange("exchange", sends, recvs)

    def _exchange(self, call: str, sends: Sequence[Message], recvs: Sequence[Message], **peers: int) -> None:
        outgoing: list[Message] = []
        incoming: list[Message] = []
        landings: list[tuple[Array, Array]] = []
        transports: list[Transport] = []
        for name, (peer, x) in [("sends", m) for m in sends] + [("recvs", m) for m in recvs]:
            self._check_peer(call, f"a peer in {name}" if not peers else "peer", peer)
            value, transport = self.accept(call, name, x)
            transports.append(transport)
            target = arrays.contiguous(value)
            if name == "sends":
                outgoing.append((peer, target))
                continue
            _check_writable(call, name, x, value)
            if any(arrays.overlap(target, other) for _, other in outgoing + incoming):
                raise ArrayError(f"{call}: an array to receive into overlaps another array")
            incoming.append((peer, target))
            landings.append((value, target))
        if not transports:
            return
        if any(transport is not transports[0] for transport in transports):
            raise UnsupportedError(f"{call}: host and device arrays in one call")
        first = outgoing[0][1] if outgoing else incoming[0][1]
        payload = sum(x.nbytes for _, x in outgoing)
        with Operation(self, call, transports[0], first, dict(peers), compare=False, payload=payload):
            transports[0].exchange(outgoing, incoming)
        for value, target in landings:
            finished(value, target)

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
                for the device nor for another thread.

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
            OSError: The file cannot be written.
        """
        recorded = self.tracer.spans() if isinstance(self.tracer, Recorder) else []
        spans = self.allgather_object(recorded)
        failure = None
        if self.rank == 0:
            try:
                Path(path).write_text(json.dumps(trace.chrome_trace(spans), default=str))
            except OSError as exc:
                failure = exc
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
            self.abort(error.code if isinstance(error.code, int) else 1)
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
    ) -> tuple[Any, Array]:
        """What `call` returns, and the contiguous array it fills; `finished` makes one of the two."""
        if out is None:
            target = arrays.empty(shape, like.dtype, like=like)
            return target, target
        # An array of the same kind as the input needs no closer look than its dtype below.
        value = out if type(out) is type(like) else self.accept(call, "out", out)[0]
        fits = value.size == math.prod(shape) if any_shape else value.shape == shape
        if not fits:
            wanted = f"{math.prod(shape)} elements" if any_shape else f"{shape}"
            raise ArrayError(f"{call}: out has shape {value.shape}, expected {wanted}")
        if value.dtype != like.dtype:
            raise ArrayError(f"{call}: out has dtype {value.dtype}, expected {like.dtype}")
        if type(value) is not type(like) and arrays.library(value) != arrays.library(like):
            raise ArrayError(f"{call}: out is a {arrays.library(value)} array, expected {arrays.library(like)}")
        _check_writable(call, "out", out, value)
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

    def _check_peer(self, call: str, name: str, peer: object) -> None:
        if not isinstance(peer, (int, np.integer)) or not 0 <= peer < self.size:
            raise ArrayError(f"{call}: {name} is {peer!r}, expected a rank from 0 to {self.size - 1}")

    def _check_counts(self, call: str, name: str, counts: Sequence[int]) -> None:
        if len(counts) != self.size or any(count < 0 for count in counts):
            raise ArrayError(f"{call}: {name} is {list(counts)}, expected {self.size} numbers of elements")

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
        mine = np.zeros(_SIGNATURE_BYTES, np.uint8)
        text = call.encode()[:_SIGNATURE_BYTES]
        mine[: len(text)] = np.frombuffer(text, np.uint8)
        table = np.empty((self.size, _SIGNATURE_BYTES), np.uint8)
        self._host_transport().allgather(mine, table)
        calls = [row.tobytes().rstrip(b"\0").decode(errors="replace") for row in table]
        for rank, other in enumerate(calls):
            if other != calls[0]:
                raise CommMismatch(f"rank 0 called {calls[0]}, but rank {rank} called {other}")

    def take_turn(self, name: str) -> bool:
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
        for transport in self.transports:
            transport.begin_call(name, collective=collective)
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
        self._outermost = comm.take_turn(self._name)
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

    def __str__(self) -> str:
        hidden = ("dtype", "bytes", "wire_bytes", "error")
        parts = [f"{self._x.dtype.name}{list(self._x.shape)}"] if self._x is not _NOTHING else []
        parts += [f"{key}={value}" for key, value in self._detail.items() if key not in hidden]
        return f"{self._name}({', '.join(parts)})"


_NOTHING: Array = np.empty(0, np.uint8)


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


def _parts(x: Array, counts: Sequence[int]) -> list[Array]:
    """Cut `x` into consecutive parts of these sizes."""
    flat, ends = x.reshape(-1), np.cumsum(counts)
    return [flat[end - count : end] for count, end in zip(counts, ends, strict=True)]
