"""Transport of host arrays over gloo, between the ranks of a process group of torch.distributed.

A transport takes its ranks and its store from a process group, and opens its own connections. So neither its
messages nor its failures affect other users of the group, and subgroups have the requested order of ranks.
(`torch.distributed.new_group` sorts ranks, and reuses keys that a closed group may have left in the store.)
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import sys
import threading
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import NamedTuple, Protocol, TypeVar

import numpy as np
import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions

from bagua_comm import (
    BootstrapError,
    CommAborted,
    CommError,
    CommMismatch,
    RankFailed,
    UnsupportedError,
    kernels,
)
from bagua_comm.arrays import Array, dtype_name, parts
from bagua_comm.arrays import rows as rows_of
from bagua_comm.bootstrap import environment
from bagua_comm.flight.batches import named
from bagua_comm.transports import Transport, derived
from bagua_comm.transports.flow import COLLECTIVE, POINT_TO_POINT, Flow, Message, TransportFlow
from bagua_comm.transports.labels import Ended, Labelled, Receive

from ..arrays import as_tensor
from .children import closed_in_children, kept_in_children
from .frames import BODY_BYTES, bytes_of, swaps_of
from .store import Store, connections_to
from .verdicts import Verdict, messages_that_differ
from .waiter import run_watched
from .wire import LEAVING, SERIAL_SHIFT, SERIALS, FramedTransport, unrecorded

AT_ONCE_BYTES = 1 << 20
"""See `Transport.at_once_bytes`."""

RING_CHUNK_BYTES = 1 << 15
"""For chunks of at least this size, gloo's own ring allreduce sums float32 and float64."""

LOOK_S = 0.1
"""How often a rank that follows a plan looks for others that do not, while it waits for them."""

CHECK_LOOKS = 5
"""After how many of these looks it checks the connections, too: where one is closed, gloo fails only the messages
that it has not begun. Each check posts a receive to each rank, which stays."""

LEAVE_S = 10.0
"""How long `close` waits for the other ranks to close."""

T = TypeVar("T")


class _Guard(Protocol):
    """Runs a function that connects ranks, and raises an error if one of them has died."""

    def __call__(self, connect: Callable[[], T], /) -> T:
        """The result of `connect`."""


_NOTHING: Array = np.empty(0, np.uint8)

_COMPARED, _IN_NEXT_ROUND, _UNKNOWN = range(3)
"""What ranks still have to compare in a collective call: nothing; its number, in the next round among all ranks;
its name and the sizes of its messages, because it does not begin with such a round."""


class _Begun(NamedTuple):
    """A call that follows the plan, and has begun before it is made."""

    text: str
    serial: int
    work: dist.Work
    arrays: object
    """What gloo uses, which must stay in memory."""


@dataclass(frozen=True)
class RendezvousInfo:
    """The rendezvous of the ranks of a transport: a store, and a key in it that was never used before."""

    store: Store
    key: str
    rank: int
    size: int
    server: int | None = None
    """The rank whose process serves the store; None if that is none of them, or not known."""

    @classmethod
    def of(cls, group: dist.ProcessGroup | None) -> RendezvousInfo:
        """A new rendezvous of the ranks of a process group, in its order. Collective."""
        call = "ProcessGroupTransport"
        if not dist.is_available() or not dist.is_initialized():
            raise BootstrapError(f"{call}: torch.distributed is not initialised; call bagua_torch.connect()")
        if not dist.is_gloo_available():
            raise UnsupportedError(f"{call}: this PyTorch was built without gloo")
        rank = dist.get_rank(group)
        if rank < 0:
            raise BootstrapError(f"{call}: this process is not in the group")
        ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
        key = "bagua/" + hashlib.blake2b(repr(ranks).encode(), digest_size=8).hexdigest()
        store = dist.distributed_c10d._get_default_store()
        server = ranks.index(0) if 0 in ranks and not environment.torchrun_serves() else None
        return cls(store, f"{key}/{count(store, key, rank)}", rank, len(ranks), server)

    def among(self, ranks: Sequence[int], name: str) -> RendezvousInfo:
        """The rendezvous of some of these ranks, this one among them, under a new name."""
        server = ranks.index(self.server) if self.server in ranks else None
        key = f"{self.key}/{name}"
        return replace(self, key=key, rank=ranks.index(self.rank), size=len(ranks), server=server)

    def part(self, connection: Store) -> Store:
        """The part of the store that belongs to this rendezvous, through a connection to the store."""
        return dist.distributed_c10d.PrefixStore(f"{self.key}/gloo", connection)


def _size_of(x: Array) -> str:
    return f" of {x.size} x {dtype_name(x.dtype)} ({x.nbytes} bytes)"


def count(store: Store, key: str, rank: int) -> int:
    """Count the calls of this rank for `key`; the same number on all ranks, if all call it equally often."""
    return int(store.add(f"{key}/of-{rank}", 1))


class ProcessGroupTransport(FramedTransport):
    """One rank of a torch.distributed process group.

    Collective. The process group is never changed, not even by an error. `bagua_comm.connect(transport=...)`
    adds a transport for CUDA arrays.

    When `exchange` returns, long messages have been received, but short ones may still be on their way: `close`
    waits for them, the end of the process does not. The transport cannot be used after an error. A timeout,
    the loss of a peer, `abort`, and an exception from a signal handler in a call close its connections, so that
    peers that wait for this rank fail at once. They also fail at once when its process ends. If ranks make
    different collective calls, all of them raise the same `CommMismatch`.

    Args:
        group: The process group; the default one if None.
        timeout_s: How long a call may wait for a peer.
        rendezvous: How the ranks find each other; a new rendezvous of `group` if None.
        guard: Called with a function that connects the ranks, for this transport and for subgroups; returns its
            result, or raises a `CommError` sooner. None to wait for all ranks as long as a call may.

    Raises:
        BootstrapError: torch.distributed is not initialised, or this process is not in the group.
        CommTimeout: The other ranks cannot be reached, or do not join.
        UnsupportedError: This PyTorch was built without gloo.
    """

    name = "torch"
    adds_in_rank_order = False  # gloo does not, from `RING_CHUNK_BYTES` on
    at_once_bytes = AT_ONCE_BYTES
    few_ranks = sys.maxsize  # a call begins with a round among all ranks, which carries small arrays as well

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        *,
        timeout_s: float = 300.0,
        rendezvous: RendezvousInfo | None = None,
        guard: _Guard | None = None,
    ) -> None:
        info = rendezvous or RendezvousInfo.of(group)
        super().__init__(info.rank, info.size, timeout_s)
        self._guard, self._rendezvous = guard, info
        self._splits = 0
        self._children: list[ProcessGroupTransport] = []  # kept alive: one may have pending messages
        self._unchecked = _COMPARED
        self._follows = False  # whether the collective call follows the plan
        self._serials = 0  # how many collective calls have been made or begun
        self._begun: deque[_Begun] = deque()  # calls that will be made
        self._work: dist.Work | None = None  # of the collective call, if it has begun ahead
        self._beginning = threading.Lock()  # held while a call begins ahead, and while one is compared late
        if self.size > 1:
            self._connect()

    def _connect(self) -> None:
        info = self._rendezvous

        def connect() -> object:
            connections = connections_to(info.store)
            self._verdict = Verdict(info.part(connections.unblocked), info.server)
            with closed_in_children(), connections.one(info.store) as connection:
                group = dist.ProcessGroupGloo(info.part(connection), self.rank, self.size, self._timeout)
                return kept_in_children(group)

        try:
            self._gloo = connect() if self._guard is None else self._guard(connect)
        except RuntimeError as exc:
            raise self._translate(exc, None) from exc

    def moves(self, x: Array) -> bool:
        """Host arrays."""
        return isinstance(x, np.ndarray)

    def begin_call(self, name: str, *, collective: bool, describe: Callable[[], str] | None = None) -> None:
        """See `Transport.begin_call`."""
        super().begin_call(name, collective=collective, describe=describe)
        self._unchecked = _UNKNOWN if collective and self.size > 1 else _COMPARED

    def agree_on_call(self, call: str, x: Array, *, by_messages: bool = False) -> Flow:
        """See `Transport.agree_on_call`. Ranks compare the call in its next exchange, which raises."""
        self._name_call(call, _size_of(x))
        return TransportFlow(self, self.piece_bytes)

    def _name_call(self, call: str, of: str = "", sizes: str = "") -> None:
        """Let the next round among all ranks compare this call.

        Args:
            call: Its name.
            of: Further properties that are equal on all ranks.
            sizes: The sizes of its messages on this rank. A call with these follows a plan that has them; they
                are not compared.
        """
        self._text = f"{self.signature() or call}{of}"
        text = f"{call}: {self._text}"
        if self._begun:
            if self._begun[0].text != text:  # a hook that was added meanwhile makes calls
                text = f"rank {self.rank} called {text}, but has begun {self._begun[0].text}"
                raise self._close_with(CommAborted(text))
            begun, self._follows = self._begun.popleft(), True
            self._serial, self._work = begun.serial, begun.work
        else:
            has_sizes = not self.plan.expects(text)
            follows = self.plan.note(f"{text}{sizes}" if has_sizes else text)
            self._serial, self._follows = self._next_serial(), follows and (has_sizes or not sizes)
        self._number = self._serial << SERIAL_SHIFT | zlib.crc32(text.encode())
        self._unchecked = _IN_NEXT_ROUND if self.size > 1 else _COMPARED

    def _next_serial(self) -> int:
        self._serials = (self._serials + 1) % SERIALS
        return self._serials

    def _synchronize(self) -> None:
        """Exchange empty frames among all ranks. Collective."""
        nothing = [(peer, _NOTHING) for peer in self.others()]
        self.exchange(nothing, nothing, tag=COLLECTIVE)

    def exchange(self, sends: Sequence[Message], recvs: Sequence[Message], *, tag: int = POINT_TO_POINT) -> None:
        """All messages at once; see `Transport.exchange`."""
        self._uninterrupted(lambda: self._exchange_compared(sends, recvs, tag))

    def _exchange_compared(self, sends: Sequence[Message], recvs: Sequence[Message], tag: int) -> None:
        """Exchange messages; in a collective call, once the ranks have compared it."""
        swaps = swaps_of(sends, recvs) if tag == COLLECTIVE else {}
        swaps.pop(self.rank, None)
        first = False
        if tag == COLLECTIVE and self._unchecked != _COMPARED:
            first = self._unchecked == _IN_NEXT_ROUND and len(swaps) == self.size - 1
            if self._unchecked == _UNKNOWN:
                self._compare_messages(sends, recvs)
            elif not first:
                self._synchronize()
            self._unchecked = _COMPARED
        self._exchange(sends, recvs, tag, swaps, first)

    def exchange_labelled(self, sends: Sequence[Labelled], receives: Sequence[Receive]) -> None:
        """See `Transport.exchange_labelled`. The frame of a message has its label."""
        self._uninterrupted(lambda: self._exchange_labelled(sends, receives))

    def begin_labelled(self, sends: Sequence[Labelled], receives: Sequence[Receive]) -> Ended:
        """See `Transport.begin_labelled`."""
        return self._uninterrupted(lambda: self._begin_labelled(sends, receives))

    def _uninterrupted(self, call: Callable[[], T]) -> T:
        """Make a call; refuse all later ones if an exception of the user ends it."""
        if self.broken is not None:
            self.check_usable()
        try:
            return call()
        except CommError:
            raise
        except BaseException as exc:
            self.refuse_calls(f"a call was interrupted ({type(exc).__name__})")
            raise

    def _compare_messages(self, sends: Sequence[Message], recvs: Sequence[Message]) -> None:
        """Name this call, and see `_compare_sizes`. Collective."""
        self._name_call("messages")
        self._compare_sizes(sends, recvs)

    def _compare_sizes(self, sends: Sequence[Message], recvs: Sequence[Message]) -> None:
        """Raise `CommMismatch` on all ranks unless all make this call, and each message is as long as expected.

        Collective.
        """
        table = np.full((self.size, 2, self.size), -1, np.int64)
        table[self.rank, :, self.rank] = self._follows
        for row, messages in zip(table[self.rank], (sends, recvs), strict=True):
            for peer, x in messages:
                if peer != self.rank:
                    row[peer] = max(row[peer], 0) + x.nbytes
        self._round(lambda _: table[self.rank], lambda peer: table[peer], first=True)
        problem = messages_that_differ(table)
        if problem is not None:
            self.plan.end()
            error = CommMismatch(problem)
            if table.diagonal(0, 0, 2).any():  # a rank may have begun the call
                raise self._end_together(table, error)
            raise error
        if np.unique(table[:, 0][~np.eye(self.size, dtype=bool)]).size > 1:
            self.plan.correct(f"messages: {self._text}")
        self._unchecked = _COMPARED

    # Collectives that are faster than those derived from `exchange` ---------------------------------

    def allreduce(self, x: Array, out: Array, op: str) -> None:
        """See `Transport`. Small arrays take one round; gloo computes large sums."""
        if self._is_native(x, op):
            self._allreduce_natively(x, out, op)
        else:
            super().allreduce(x, out, op)

    def _is_native(self, x: Array, op: str) -> bool:
        """Whether gloo sums `x`. Of two ranks, the bits of smaller sums are equal; a plan is in force on both."""
        is_large = x.nbytes * (self.size - 1) > AT_ONCE_BYTES and x.nbytes >= self.size * RING_CHUNK_BYTES
        is_large = is_large or (self.size == 2 and x.nbytes > BODY_BYTES and self.plan.in_force)
        return is_large and op in ("sum", "avg") and x.dtype.char in "fd"

    def begin_allreduce(self, signature: str, x: Array, op: str) -> bool:
        """See `Transport.begin_allreduce`. Only a call that follows the plan begins."""
        if not self._is_native(x, op):
            return False
        text = f"allreduce {op}: {signature}{_size_of(x)}"
        with self._beginning:
            if self.broken is not None or not self.plan.expects(text):
                return False
            tensors = [as_tensor(x.reshape(-1))]
            try:
                work = unrecorded(self._gloo.allreduce, tensors, self._sum(self.timeout_s))
            except RuntimeError:  # the call itself reports it
                return False
            self.plan.note(text)
            self._begun.append(_Begun(text, self._next_serial(), kept_in_children(work), tensors))
        return True

    @staticmethod
    def _sum(limit_s: float) -> dist.AllreduceOptions:
        options = dist.AllreduceOptions()
        options.reduceOp, options.timeout = dist.ReduceOp(dist.ReduceOp.SUM), timedelta(seconds=limit_s)
        return options

    def allgather(self, x: Array, out: Array) -> None:
        """See `Transport`. Gloo moves large arrays of a planned call."""
        flow = self.agree_on_call("allgather", x)
        if self._skips_frames(x.nbytes):
            options = AllgatherOptions()
            options.timeout = timedelta(seconds=self.limit_s)
            rows = bytes_of(out).chunk(self.size)
            self._run_natively(functools.partial(self._gloo.allgather, [rows], [bytes_of(x)], options))
            self.sent_bytes += x.nbytes * (self.size - 1)
        else:
            derived.allgather(flow, x, out)

    def alltoall(self, x: Array, out: Array) -> None:
        """See `Transport`. Gloo moves large arrays of a planned call."""
        flow = self.agree_on_call("alltoall", x)
        if self._skips_frames(x.nbytes // self.size):
            self._alltoall_natively(self._without_overlap(x, out), out)
        else:
            derived.alltoall(flow, x, out, self._scratch)

    def alltoall_parts(self, x: Array, out: Array, counts: Sequence[int], out_counts: Sequence[int]) -> None:
        """See `Transport`. Gloo moves the parts; equal parts of a planned call, without a comparison.

        Parts that are equal on this rank may differ on others. So the plan has their size, the comparison does
        not, and those that do not follow the plan are exchanged in the same way.
        """
        if self.size == 1:
            super().alltoall_parts(x, out, counts, out_counts)
            return
        sends, recvs = (list(enumerate(parts(*of))) for of in ((x, counts), (out, out_counts)))
        sizes = {part.nbytes for peer, part in (*sends, *recvs) if peer != self.rank}
        is_even = len(sizes) == 1 and 0 not in sizes
        self._name_call("messages", sizes=f" of {sizes.pop()} bytes" if is_even else "")
        self._follows = self._follows and is_even
        compare = functools.partial(self._compare_sizes, sends, recvs)
        if not self._follows:
            compare()
        self._alltoall_natively(x, out, counts, out_counts, compare)

    def reduce_scatter(self, x: Array, out: Array, op: str) -> None:
        """See `Transport`. Gloo moves large arrays of a planned call."""
        flow = self.agree_on_call(f"reduce_scatter {op}", x)
        if self._skips_frames(out.nbytes):
            parts = self._scratch.take("parts", (self.size, out.size), x.dtype, like=x)
            self._alltoall_natively(x, parts)
            kernels.of(out).reduce_rows(parts, out.reshape(-1), op)
        else:
            derived.reduce_scatter(flow, list(rows_of(x, self.size)), out, op, self._scratch)

    def _skips_frames(self, nbytes: int) -> bool:
        """Whether messages of `nbytes` go without frames: the call follows the plan, and they are long."""
        return self._follows and nbytes > BODY_BYTES

    def _alltoall_natively(
        self,
        x: Array,
        out: Array,
        counts: Sequence[int] = (),
        out_counts: Sequence[int] = (),
        compare: Callable[[], None] | None = None,
    ) -> None:
        options = dist.AllToAllOptions()
        options.timeout = timedelta(seconds=self.limit_s)
        splits = [[n * x.itemsize for n in each] for each in (out_counts, counts)]
        start = functools.partial(self._gloo.alltoall_base, bytes_of(out), bytes_of(x), *splits, options)
        self._run_natively(start, compare)
        self.sent_bytes += x.nbytes - (splits[1][self.rank] if counts else x.nbytes // self.size)

    def _allreduce_natively(self, x: Array, out: Array, op: str) -> None:
        self.agree_on_call(f"allreduce {op}", x)
        if not self._follows:
            self._synchronize()
        if x is not out:
            out[...] = x
        tensors, options = [as_tensor(out.reshape(-1))], self._sum(self.limit_s)
        self._run_natively(functools.partial(self._gloo.allreduce, tensors, options))
        if op == "avg":
            kernels.host.divide(out, self.size)
        self.sent_bytes += 2 * x.nbytes * (self.size - 1) // self.size

    def _run_natively(
        self, start: functools.partial[dist.Work], compare: Callable[[], None] | None = None
    ) -> None:
        """Run a collective of gloo that no rank finishes without all others; compared, or it follows the plan.

        Args:
            start: Starts it.
            compare: Compares a call that follows the plan if another rank does not; `_synchronize` if None.
        """
        self.check_usable()
        if not self._follows:
            work = self._start(None, start)
            self._wait_for_all(kept_in_children(work), self._check_connection)
            return
        begun, self._work = self._work, None
        compare = compare or self._synchronize
        if begun is None:
            self._compare_late(compare)
            begun = kept_in_children(self._start(None, start))
        try:
            looks = itertools.count(1)

            def look() -> None:
                self._compare_late(compare)
                if next(looks) % CHECK_LOOKS == 0:
                    self._check_connection()

            self._wait_for_all(begun, look, LOOK_S)
        except CommError:
            self._interrupted = start
            self._hang_up()
            raise
        self._unchecked = _COMPARED

    def _compare_late(self, compare: Callable[[], None]) -> None:
        """Compare a planned call after all if another rank does; raise on all ranks if calls differ."""
        if self._others_call():
            with self._beginning:
                compare()

    def broadcast(self, x: Array, root: int) -> None:
        """See `Transport`. Small arrays are sent in the round in which ranks compare the call."""
        self.agree_on_call(f"broadcast from {root}", x)
        if x.nbytes <= BODY_BYTES:
            sends = [(peer, x if self.rank == root else _NOTHING) for peer in self.others()]
            recvs = [(peer, x if peer == root else _NOTHING) for peer in self.others()]
            self.exchange(sends, recvs, tag=COLLECTIVE)
        else:
            self._synchronize()
            super().broadcast(x, root)

    def barrier(self) -> None:
        """See `Transport`. One round among all ranks."""
        if self.size > 1:
            self._name_call("barrier")
            self._synchronize()

    # Groups, failure and end ------------------------------------------------------------------------

    def split(self, color: int, key: int) -> Transport:
        """See `Transport.split`."""
        members = self._members(color, key)
        self.plan.end()
        info = self._rendezvous.among(members, f"{self._splits}.{color}")
        self._splits += 1
        child = self._connected(info, members)
        child.on_slow_leave = self.on_slow_leave
        return child

    def subgroup(self, ranks: Sequence[int], name: str, host: Transport | None = None) -> Transport:
        """See `Transport.subgroup`."""
        return self._connected(self._rendezvous.among(ranks, name), ranks)

    def _connected(self, info: RendezvousInfo, members: Sequence[int]) -> ProcessGroupTransport:
        """A transport of some of these ranks, which this one aborts and closes with itself."""
        guard = self._guard or self._watching(members)
        child = ProcessGroupTransport(timeout_s=self.timeout_s, rendezvous=info, guard=guard)
        child._guard = self._guard  # its own groups watch its own connections
        self._children = [each for each in self._children if each._gloo is not None] + [child]
        return child

    def lost_among(self, ranks: Iterable[int]) -> list[int]:
        """Those of these ranks that have died or left: their connections are closed. Any thread may call it."""
        return [each for each in ranks if each != self.rank and self._is_closed(each)]

    def _watching(self, members: Sequence[int]) -> _Guard:
        """A guard of the connection of some ranks, which raises `RankFailed` if one of them dies meanwhile."""

        def check() -> None:
            if lost := self.lost_among(members):
                text = f"rank {self.rank} lost {named(lost)} while ranks {list(members)} connected for a group"
                raise RankFailed(text, lost)

        return lambda connect: run_watched(connect, check)

    def stop(self, reason: str) -> None:
        """See `CallState.stop`. Closes the connections."""
        self.refuse_calls(reason)
        self._hang_up()

    def abort(self, exit_code: int = 1) -> None:
        """Close all connections, those of subgroups included, so that waiting peers fail at once.

        This ends no process; but torchrun ends all processes when one ends with an error.
        """
        self.refuse_calls("aborted")
        for child in self._children:
            child.abort(exit_code)
        self._hang_up()

    def leave(self, reason: str | None = None) -> bool:
        """See `Transport.leave`. With a reason, it closes all connections, those of subgroups included."""
        if reason is None:
            return True
        if self.size > 1 and self._gloo is not None:
            self._close_with(CommAborted(f"rank {self.rank} left: {reason}"))
        for child in self._children:
            child.leave(reason)
        return False

    def close(self) -> None:
        """Close the connections, once short messages have been received and the other ranks close as well.

        Collective. The process group stays. Subgroups that were not closed are closed here.
        """
        try:
            if self.broken is None:
                for peer, tag in tuple(self._sent):
                    self._reclaim(peer, tag, 0)
                self._say_goodbye()
        except (RankFailed, CommMismatch):
            pass  # the peer left without receiving everything, or calls differ
        finally:
            self.refuse_calls("closed")
            self.end_readers()
            self.drop()
            self._children.clear()

    def _say_goodbye(self) -> None:
        """Exchange a last frame with each rank, after which nothing is sent.

        A connection that is closed before all its data was read is reset, and the peer loses what it has not
        read.
        """
        self._leaving, self._timeout = True, min(self._timeout, timedelta(seconds=LEAVE_S))
        frames = {}
        for peer in self.others():
            with contextlib.suppress(CommError):
                frames[peer] = self._next_frame(peer, COLLECTIVE)
                self._send_frame(peer, COLLECTIVE, _NOTHING, 0, LEAVING)
        for peer, frame in frames.items():
            with contextlib.suppress(CommError):
                self._wait_for_frame(peer, frame)  # also one of another call, which this rank does not make
                self._reclaim(peer, COLLECTIVE, 0)
        left = sum(frame.work is None and frame.head[2] == LEAVING for frame in frames.values())
        if left < self.size - 1 and self.on_slow_leave is not None:
            self.on_slow_leave()
