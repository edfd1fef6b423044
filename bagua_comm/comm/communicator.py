"""The communicator, as users hold it: its groups, lanes, hooks, trace and end.

Its calls are in the modules of the classes that it inherits from. A call checks its arguments, allocates its
result, has the transport move the bytes, and is traced and counted. All arguments are checked before a byte
moves, so that all ranks fail.
"""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from .. import arrays
from ..arrays import A, AnyArray, Array, Op
from ..errors import ArrayError, BaguaError, CommError, CommMismatch, CommTimeout, UnsupportedError, shown
from ..execution.futures import end_lanes
from ..execution.lane import InlineLane, Lane, StreamLane, ThreadLane
from ..execution.requests import Buffer
from ..flight.entries import is_inside
from ..health.slow import Health
from ..hooks import Hook, Listener
from ..logs import log_on_root
from ..objects.closing import Closing
from ..topology import ranks_by
from ..transports.base import Transport
from .agreement import agree_on_split, are_equal, equality_terms
from .arguments import hint_of
from .call import Call
from .coalesced import CoalescedCollectives
from .collectives import Collectives
from .gather_scatter import GatherScatter
from .messages import PointToPoint
from .objects import ObjectCalls
from .public_methods import public_method
from .tracing import Traced, write_spans

_log = logging.getLogger(__name__)


class Nodes(NamedTuple):
    """The communicators inside a node and across nodes; see `Communicator.by_node`."""

    intra: Communicator
    inter: Communicator


_NAMES_OF_MPI4PY = {
    "get_rank": "rank",
    "get_size": "size",
    "bcast": "broadcast",
    "free": "close",
    "sendrecv_replace": "sendrecv(x.copy(), x, ...)",
    "reduce_scatter_block": "reduce_scatter",
    "ssend": "send",
    "gatherv": "gather(x, root=root, counts=counts)",
    "scatterv": "scatter(x, out, root=root, counts=counts)",
    "allgatherv": "allgather(x, counts=counts)",
    "alltoallv": "alltoall(x, counts=counts, out_counts=out_counts)",
    **dict.fromkeys(("create_cart", "cart_shift", "shift"), "bagua_comm.Grid(comm, dims, periodic), its shift"),
}
"""Names of mpi4py in small letters that are not those here."""

_NOT_HERE = {
    **dict.fromkeys(("probe", "iprobe", "mprobe", "improbe"), "each recv names its source, and knows the size"),
    **dict.fromkeys(
        ("wait", "waitall", "test", "testall"),
        "a request is a future: .result(), .done(), wait_all",
    ),
}
"""Names of mpi4py in small letters that have no counterpart, and what to do instead."""


class Communicator(Collectives, GatherScatter, CoalescedCollectives, ObjectCalls, PointToPoint, Closing):
    """A group of `size` ranks that make collective calls together; this process is rank `rank`.

    Rules for all methods:

    * "Collective." means that all ranks call it, in the same order.
    * Arrays are NumPy or CuPy arrays, PyTorch tensors that do not require grad, or anything with `__dlpack__`, of
      any shape and of integer, floating-point (float16 and bfloat16 too), bool or complex dtype.
    * An input that is not C-contiguous or not aligned is copied once. The result is copied into an `out` that is
      not.
    * `out=None` allocates a new array. A method says if `out` may be the input or lie in it; any other overlap
      raises `ArrayError`. The result is returned: `out` if it was given, else an array of the library of the
      input, a tensor for a tensor.
    * The result of a call on host arrays is complete when the call returns. Device arrays are read and written in
      the order of CuPy's current stream: work that is enqueued on it after the call sees the result. Over NCCL
      the host waits neither for the device nor for peers. If the next call is on another stream and both use
      memory of the communicator, that stream waits for the first one.
    * A call that waits for longer than `timeout_s` raises `CommTimeout`. NCCL work in flight for longer is
      aborted, and the next call or `close` raises the error. `timeout_s=` of a call, in seconds, replaces the
      communicator's limit, and math.inf removes it; ranks may give different ones. The first rank to time out
      aborts the communicator and notifies the others. After a `CommError`, do not modify the arrays of the call
      until all ranks have raised it: others may still read them.

    One thread uses a communicator at a time: a call raises `CommError` while another thread is in one. See `lane`
    for concurrent work. A forked process cannot use its parent's communicator. A communicator cannot be pickled;
    copies of an object that holds one, by `copy.deepcopy` too, share it.

    Args:
        transports: The transports that move the bytes; an array goes over the first one that `moves` it. The
            first of all moves host arrays, and carries barriers, objects and checks.
        nodes: A label, such as a host name, for the node of each rank; None if all ranks share one node.
        device: The index of this rank's GPU, if it has one.
        check: Compare every call among the ranks before it runs, and raise `CommMismatch`, which names both
            calls, if they differ in dtype, shape, counts, op, root or codec. Costs a small allgather for each
            collective call, and a small message before each message between two ranks.
        tracer: Receives the spans; by default a new `Recorder`.
        op_order: See `op_order`; the same on all ranks.

    Raises:
        ArrayError: `op_order` is neither "rank" nor "any".
    """

    _nodes: Nodes | None = None
    _own_lane: Lane[Communicator] | None = None
    at_close: Callable[[], object] | None = None
    """Called when this communicator has been closed; for what was made with it."""

    # Groups and lanes -------------------------------------------------------------------------------

    def split(self, color: int, key: int | None = None) -> Communicator:
        """Group the ranks that give the same `color`, ordered by `key`, or by rank if it is None.

        Collective. Ranks that give the same `key` are ordered by rank.

        Raises:
            ArrayError: The `color` of a rank is not an integer from 0 to 2^31 - 1, or its `key` is not an integer
                of 64 bits. Raised on all ranks.
        """

        def split(*_: Array) -> Communicator:
            place = agree_on_split(self.host, color, self.rank if key is None else key)
            return self._derived([each.split(int(color), place) for each in self.transports], f":{color}")

        derived: Communicator = Call(self, "split").run(split)
        return derived

    def dup(self) -> Communicator:
        """Return another communicator over the same ranks, whose messages never match this one's.

        Collective.
        """

        def dup(*_: Array) -> Communicator:
            return self._derived([transport.dup() for transport in self.transports])

        derived: Communicator = Call(self, "dup").run(dup)
        return derived

    def subgroup(self, ranks: Sequence[int], name: str) -> Communicator:
        """Return a communicator of some of the ranks, which alone call this; MPI calls it Comm_create_group.

        Collective among `ranks`. Another thread may be in a call of this communicator meanwhile.

        Args:
            ranks: The ranks, this one among them. They get the ranks 0, 1, ... in this order.
            name: A name for the group, the same on all its ranks; no other group of this communicator has had it.

        Raises:
            ArrayError: `ranks` are not different ranks, or this rank is not among them.
            CommTimeout: One of `ranks` does not call it.
            UnsupportedError: A transport can only `split`.

        >>> from bagua_comm.testing import run_ranks
        >>> def body(comm):
        ...     return comm.subgroup([2, 0], "ends").rank if comm.rank != 1 else None
        >>> run_ranks(3, body)
        [1, None, 0]
        """
        members = [self._check_peer("subgroup", "one of ranks", rank) for rank in ranks]
        if self.rank not in members or len(set(members)) < len(members):
            raise ArrayError(
                f"subgroup: ranks are {members}, expected different ones, rank {self.rank} among them"
            )
        self.guard.check("subgroup")
        host = self.host.subgroup(members, name)
        made = [host if each is self.host else each.subgroup(members, name, host) for each in self.transports]
        return self._derived(made, group=f"{self.group}/{name}")

    @public_method("by_node")
    def by_node(self) -> Nodes:
        """Return communicators inside this node, and across nodes among ranks of equal `local_rank`.

        Collective. The first call splits this communicator; later ones return the same pair. The pair is closed
        with this communicator, and shares its counters.
        """
        if self._nodes is None:
            intra = self.split(self.node)
            inter = self.split(self.local_rank)
            intra.counters = inter.counters = self.counters
            intra.context = inter.context = self.context
            self._inner = self._nodes = Nodes(intra, inter)
        return self._nodes

    @public_method("lane")
    def lane(self, kind: Literal["thread", "stream"] | None = None) -> Lane[Communicator]:
        """Return a lane, which runs tasks concurrently with the caller, on a duplicate of this communicator.

        Collective. Close it, or use it as a context manager.

        If MPI grants less than MPI_THREAD_MULTIPLE, a "thread" lane runs its tasks at once, on the caller's
        thread and stream, and warns of it.

        Args:
            kind: "thread", the default: tasks run on a thread of the lane and, if this communicator has a device,
                on a CUDA stream of the lane. "stream": tasks run at once on the caller's thread, on a CUDA stream
                of the lane; for tasks that only enqueue work, such as calls on device arrays over NCCL. The host
                then waits neither for the device nor for another thread. No lane can be captured in a CUDA graph.

        Raises:
            ArrayError: `kind` is neither "thread" nor "stream".
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
            lane: Lane[Communicator] = StreamLane(self._dup_for_lane())
        elif all(transport.concurrent for transport in self.transports):
            lane = ThreadLane(self._dup_for_lane())
        else:
            warnings.warn(
                "MPI grants less than MPI_THREAD_MULTIPLE: lanes work on the caller's thread, and nothing "
                "overlaps; see mpi4py.rc.thread_level",
                RuntimeWarning,
                stacklevel=2,
            )
            lane = InlineLane(self._dup_for_lane())
        self.flight.lanes.add(lane)
        self.flight.beside.add(lane.comm.group)
        lane.report_to(self.flight.unretrieved)
        return lane

    def _dup_for_lane(self) -> Communicator:
        try:
            return self.dup()
        except (CommMismatch, CommTimeout) as exc:
            exc.args = (f"{exc}; all ranks make a lane, also those that submit nothing to it",)
            raise

    @public_method("iallreduce")
    def iallreduce(
        self, x: A, out: A | None = None, *, op: Op = "sum", timeout_s: float | None = None
    ) -> Future[A]:
        """Begin an `allreduce`; return a future of its result.

        Collective. It runs on a lane that this communicator keeps, in the order in which such calls begin.

        Raises:
            ArrayError: See `allreduce`; nothing has begun, and later calls work.
            UnsupportedError: See `allreduce`.
        """
        call = Call(self, "iallreduce", x, op=op, timeout_s=timeout_s)
        if out is None:
            call.check_reduction(op)  # the lane allocates
        else:
            call.reduces_to(out, op)
            self._requests.check_free("iallreduce", Buffer.of(call.target, is_written=True))
        self._requests.check_free("iallreduce", Buffer.of(call.x, is_written=False))
        lane = self._kept_lane()
        return lane.submit(lane.comm.allreduce, x, out, op=op, timeout_s=timeout_s)

    @public_method("ibroadcast")
    def ibroadcast(self, x: A, *, root: int, timeout_s: float | None = None) -> Future[A]:
        """Begin a `broadcast`; return a future of `x`.

        Collective. See `iallreduce`.

        Raises:
            ArrayError: See `broadcast`.
            UnsupportedError: See `broadcast`.
        """
        root = self._check_peer("ibroadcast", "root", root)
        call = Call(self, "ibroadcast", x, root=root, timeout_s=timeout_s)
        call.broadcasts(root)
        self._requests.check_free("ibroadcast", Buffer.of(call.x, is_written=self.rank != root))
        lane = self._kept_lane()
        return lane.submit(lane.comm.broadcast, x, root=root, timeout_s=timeout_s)

    def _kept_lane(self) -> Lane[Communicator]:
        self._own_lane = self._own_lane or self.lane()
        return self._own_lane

    # Comparison, trace and hooks --------------------------------------------------------------------

    @public_method("check_consistency")
    def check_consistency(self, x: AnyArray, *, timeout_s: float | None = None) -> None:
        """Raise `CommMismatch` on every rank unless `x` has the same bytes, shape and dtype on all ranks.

        Collective. Compares 128-bit BLAKE2 hashes, in an allreduce of 32 bytes; gathers them only if they differ.

        Raises:
            CommMismatch: The arrays differ. The message lists the groups of ranks whose arrays are equal.
        """
        value = Call(self, "check_consistency", x).x
        digest = arrays.digest(value)
        if are_equal(self.allreduce(equality_terms(digest), op="max", timeout_s=timeout_s)):
            return
        table = self.allgather(np.frombuffer(digest, np.uint8), timeout_s=timeout_s)
        groups = ranks_by(row.tobytes() for row in table)
        if len(groups) > 1:
            found = "; ".join(f"ranks {ranks}" for ranks in groups.values())
            raise CommMismatch(
                f"check_consistency: x differs; these agree with each other: {found}; to find the step and the "
                "element, record each step by bagua_comm.divergence.DivergenceRecorder"
            )

    def trace(self, path: str | Path) -> Traced:
        """Write the latest spans of all ranks to `path`, as a Chrome trace, which Perfetto opens.

        Collective. Rank 0 writes the file, compressed if its name ends in ".gz". The trace shows each rank as a
        process, and each thread as a row. A missing folder is made.

        `with comm.trace(path):` writes the file again at the end of the block, with the spans that began in it.
        If the block raises, the first file stays.

        Raises:
            ArrayError: `path` is not a path, or a span of a rank cannot be written as JSON. Raised on all ranks.
            OSError: The file cannot be written. Raised on all ranks.
        """
        write_spans(self, path)
        return Traced(self, path)

    def health(self) -> Health:
        """Return the times of recent training steps of all ranks, and which rank or link is slow since when.

        Not collective. Engines on this communicator, or on one derived from it, gather them on their lanes every
        few steps; so do `bagua_torch.DistributedDataParallel` and `bagua_torch.fsdp.attach`. A slow rank or link
        is logged, too, by the logger "bagua_comm" on rank 0, when it becomes slow and when it no longer is.
        """
        return self.flight.health.latest

    def on(
        self,
        *,
        before: Listener | None = None,
        after: Listener | None = None,
        failed: Listener | None = None,
    ) -> Hook:
        """Register functions that are called for every call of this communicator and of those derived from it.

        Each takes a `CallView`. `bagua_comm.hooks` describes on which thread they run and what they may raise.
        Without hooks, a call pays for the lookup of one attribute.

        Args:
            before: Called when a call begins, before it sends anything.
            after: Called with the result when a call has succeeded; a device may still work on it.
            failed: Called with the error when a call has failed.

        Returns:
            A handle; its `remove()` removes the functions.

        Raises:
            ArrayError: An argument is not callable, or all three are None.

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
        """Return a communicator over the ranks that are still alive, after `RankFailed`.

        Collective among the survivors.

        Raises:
            UnsupportedError: The library of the transport cannot continue after a rank has died.
        """
        if not self.guard.is_of_this_process:
            self.guard.check("shrink")
        first, *rest = self.transports
        host = first.shrink()
        survivors = self._derived([host, *(transport.shrink(host) for transport in rest)], make=self._survivors)
        log_on_root(_log, survivors.rank, "shrink: %d of %d ranks are left", survivors.size, self.size)
        return survivors

    def stop_calls(self, reason: str) -> None:
        """Let the call in progress fail soon, and refuse all later ones; any thread may call it."""
        for transport in self.transports:
            transport.stop(reason)

    def abort(self, exit_code: int = 1) -> None:
        """Abort all ranks: under MPI all processes end with `exit_code`, of which a process returns 8 bits.

        Raises:
            ArrayError: `exit_code` is not an integer.
        """
        if not isinstance(exit_code, (int, np.integer)):
            raise ArrayError(f"abort: exit_code is {shown(exit_code)}, expected an integer")
        self._end_all(exit_code, f"comm.abort({exit_code})")

    def _end_all(self, exit_code: int, call: str) -> None:
        """Record that this rank ended all ranks by `call`, print so where they are processes, and do it."""
        if self.flight.write(left=f"it called {call}, which ends all ranks") is not None:
            text = f"rank {self.rank} of {self.size} called {call}, which ends all ranks"
            print(text, file=sys.stderr, flush=True)
        code = exit_code and (int(exit_code) & 255 or 1)  # MPI takes none of more than 31 bits
        for transport in self.transports:
            transport.abort(code)

    def close(self) -> None:
        """Free the resources of this communicator; closing it again does nothing.

        Collective. Open `Checkpoints` of this communicator, and of those made from it, are closed before. The
        tasks of a lane that is open, and the messages of `isend`, have `futures.TASK_END_S` to end or to make
        progress, those of `irecv` `requests.ARRIVAL_S`; then they are stopped. The communicator is closed also
        after an error.

        Raises:
            CheckpointError: A checkpoint could not be saved.
            CommError: A task of an open lane, or a request, did not end.
            Exception: The error of such a task, if nobody has asked for it. If this communicator does not work
                any more, either is a warning instead.
        """
        if self.guard.closed or not self.guard.is_of_this_process:
            return
        with ExitStack() as ends:
            ends.callback(self._free)
            ends.callback(self._end_lanes)
            for each in self._checkpoints():
                ends.callback(_close_first, each)

    def _checkpoints(self) -> list[Any]:
        """The open checkpoints of this communicator and of those made from it."""
        return [each for each in self.open_checkpoints if is_inside(each.group, self.group)]

    def _end_lanes(self) -> None:
        """End the tasks of open lanes; raise or warn of the first error that nobody has asked for."""
        problems = end_lanes(self.flight.lanes, self.flight.unretrieved, self.group)
        if not problems:
            return
        is_usable = all(transport.broken is None for transport in self.transports)
        for each in problems[1:] if is_usable else problems:
            warnings.warn(f"close: {each}", RuntimeWarning, stacklevel=3)
        if is_usable:
            raise problems[0].error

    def _free(self) -> None:
        self.guard.close()
        for comm in (*(self._nodes or ()), *([self._own_lane.comm] if self._own_lane else ())):
            comm.close()
        with ExitStack() as ends:  # the last transport first: it may use the first one
            if self.at_close is not None:
                ends.callback(self.at_close)
            ends.callback(self.scratch.clear)
            ends.callback(self.call_cache.clear)
            for transport in self.transports:
                ends.callback(transport.close)

    def _leave(self, error: BaseException) -> None:
        """End after an error: the other ranks get an error, too, and are not waited for."""
        try:
            self.leave_first(error)
        finally:
            self._leave_calls(error)

    def leave_first(self, error: BaseException) -> None:
        """Complete the saves of open checkpoints, or give them up, since this rank leaves after an error."""
        if self.guard.is_of_this_process:
            for each in self._checkpoints():
                with suppress(BaguaError):
                    each._leave(error)

    def _leave_calls(self, error: BaseException) -> None:
        if (hint := hint_of(error, type(self))) and hasattr(error, "add_note"):  # in Python 3.11 and later
            error.add_note(hint)
        if not self.guard.is_of_this_process:
            return
        if isinstance(error, SystemExit):
            # The other ranks would wait for this one.
            call = f"sys.exit({error.code!r})"
            if not isinstance(error.code, int):
                print(error.code, file=sys.stderr, flush=True)
                error.code = 1  # the exit code of a printed message
            self._end_all(error.code, call)
        if not isinstance(error, CommError):
            self.flight.write(left=f"{type(error).__name__}: {error}")
        for transport in self.transports:
            transport.leave(f"{type(error).__name__}: {error}")

    if not TYPE_CHECKING:  # it would hide wrong names from type checkers

        def __getattr__(self, name: str) -> Any:
            lowered = name.lower()
            plain = lowered.replace("bcast", "broadcast")
            beside = not hasattr(type(self), plain) and lowered.startswith("i") and hasattr(type(self), plain[1:])
            lowered = lowered[1:] if beside else plain
            here = _NAMES_OF_MPI4PY.get(lowered, lowered)
            known = lowered in _NAMES_OF_MPI4PY or hasattr(type(self), here)
            here = f"lane.submit(lane.comm.{here}, ...)" if beside else here
            hint = f"; it is {here} here, see docs/quickstart/coming-from.md" if known else ""
            if name.lower() in _NOT_HERE:
                hint = f"; there is none here: {_NOT_HERE[name.lower()]}, see docs/quickstart/coming-from.md"
            text = f"'Communicator' object has no attribute {name!r}{hint}"
            raise AttributeError(text, name=name, obj=self)

    def __repr__(self) -> str:
        names = "+".join(transport.name for transport in self.transports)
        return f"<Communicator rank {self.rank} of {self.size} over {names}>"

    # Derived communicators --------------------------------------------------------------------------

    def _survivors(self, transports: Sequence[Transport], **settings: Any) -> Communicator:
        """Return the result of `shrink`."""
        return Communicator(transports, **settings)

    def _derived(
        self,
        transports: Sequence[Transport],
        kind: str = "",
        make: Callable[..., Communicator] | None = None,
        group: str | None = None,
    ) -> Communicator:
        """Return a communicator over transports derived from this one's, with this one's settings.

        `kind` ends its name in the flight recorder, and distinguishes it from others made by the same call;
        `group` is the whole name.
        """
        first = transports[0]
        former = np.empty((first.size, 1), np.int64)
        first.begin_call_within(self.transports[0])  # else both could wait for their limit, one after the other
        try:
            first.allgather(np.array([self.rank], np.int64), former)
        finally:
            first.end_call()
        comm = (make or Communicator)(
            transports,
            nodes=[self._labels[rank] for rank in former[:, 0]],
            device=self.device,
            check=self.check,
            tracer=self.tracer,
            op_order=self.op_order,
        )
        comm.hooks, comm.open_checkpoints = self.hooks, self.open_checkpoints
        comm.flight, comm.group = self.flight, group or f"{self.group}.{self.next_id('group')}{kind}"
        comm.flight.counters[comm.group] = comm.counters
        members = self.flight.groups[self.group]
        comm.flight.groups[comm.group] = tuple(members[rank] for rank in former[:, 0])
        if comm.host.plan is not None:
            comm.flight.plans[comm.group] = comm.host.plan
        return comm


def _close_first(each: Closing) -> None:
    """Close an object that uses a duplicate of a communicator which may not work any more."""
    with suppress(CommError):  # the calls that failed have raised it
        each.close()
