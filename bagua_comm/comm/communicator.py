"""The communicator, as users hold it: its groups, lanes, hooks, trace and end.

Its calls are in the modules of the classes that it inherits from. A call checks its arguments, allocates its
result, has the transport move the bytes, and is traced and counted. All arguments are checked before a byte
moves, so that all ranks fail alike.
"""

from __future__ import annotations

import hashlib
import json
import logging
import sys
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, NamedTuple

import numpy as np

from .. import trace
from ..arrays import AnyArray, Array
from ..errors import ArrayError, CommError, CommMismatch, UnsupportedError
from ..hooks import Hook, Listener
from ..lane import InlineLane, Lane, StreamLane, ThreadLane
from ..logs import log_on_root
from ..trace import Recorder
from ..transports.base import Transport
from .agreement import agree_on_split
from .call import Call
from .coalesced import CoalescedCollectives
from .collectives import Collectives
from .messages import PointToPoint
from .objects import ObjectCalls
from .uneven import UnevenCollectives

_log = logging.getLogger(__name__)


class Nodes(NamedTuple):
    """The communicators inside a node and across nodes; see `Communicator.by_node`."""

    intra: Communicator
    inter: Communicator


class Communicator(Collectives, UnevenCollectives, CoalescedCollectives, ObjectCalls, PointToPoint):
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

    _nodes: Nodes | None = None

    # Groups and lanes -------------------------------------------------------------------------------

    def split(self, color: int, key: int | None = None) -> Communicator:
        """Group the ranks that give the same `color`, ordered by `key`, or by rank if it is None.

        Collective. Ranks that give the same `key` are ordered by rank.

        Raises:
            ArrayError: On all ranks alike: one gives a `color` that is not an integer from 0 to 2^31 - 1, or a
                `key` that is not an integer of 64 bits.
        """

        def split(*_: Array) -> Communicator:
            place = agree_on_split(self.host, color, self.rank if key is None else key)
            return self._derived([each.split(int(color), place) for each in self.transports], f":{color}")

        derived: Communicator = Call(self, "split").run(split)
        return derived

    def dup(self) -> Communicator:
        """Another communicator over the same ranks, whose messages never match this one's.

        Collective.
        """

        def dup(*_: Array) -> Communicator:
            return self._derived([transport.dup() for transport in self.transports])

        derived: Communicator = Call(self, "dup").run(dup)
        return derived

    def by_node(self) -> Nodes:
        """Communicators inside this node, and across nodes among ranks of equal `local_rank`.

        Collective. The first call splits; later ones return the same pair, which is closed with this one and
        counts its bytes here.
        """
        if self._nodes is None:
            intra = self.split(self.node)
            inter = self.split(self.local_rank)
            intra.counters = inter.counters = self.counters
            intra.context = inter.context = self.context
            self._inner = self._nodes = Nodes(intra, inter)
        return self._nodes

    def lane(self, kind: Literal["thread", "stream"] | None = None) -> Lane[Communicator]:
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
            lane: Lane[Communicator] = StreamLane(self.dup())
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
        error: Exception | None = self.broadcast_object(failure, root=0)
        if error is not None:
            raise error

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

    def close(self) -> None:
        """Free what this communicator holds; closing twice does nothing.

        Collective.
        """
        if self.guard.closed or not self.guard.is_of_this_process:
            return
        self.guard.closed = True
        for comm in self._inner:
            comm.close()
        with ExitStack() as ends:  # the last transport first: it may be set up over the first
            ends.callback(self.scratch.clear)
            ends.callback(self.call_cache.clear)
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
        if not self.guard.is_of_this_process:
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

    # Derived communicators --------------------------------------------------------------------------

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
        comm.flight, comm.group = self.flight, f"{self.group}.{self.next_id('group')}{kind}"
        members = self.flight.groups[self.group]
        comm.flight.groups[comm.group] = tuple(members[rank] for rank in former[:, 0])
        return comm
