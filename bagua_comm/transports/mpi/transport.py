"""Host arrays over MPI, through mpi4py. Importing this module starts MPI.

Messages travel as bytes, so every dtype can be sent. Small arrays are gathered, each with a number for its call,
dtype and size, and are reduced here: among ranks on one host through memory that all of them map (`window`), else
by MPI, whose latency is low. Of larger ones on one host each rank reads what it needs (`memory`); where it may
not, reductions go through the memory that all map. On several hosts, integers of middle size are reduced by MPI,
if it computes as NumPy does. All other large collectives are derived from `Flow.begin`. Floats are added in rank
order, however many there are, so a sum does not depend on what else was in its bucket. In any order (`set_order`)
MPI reduces all that it computes as NumPy does, floats as well, once the ranks have agreed on the call; only small
arrays are gathered, since that takes one round.

Every wait polls, with a deadline: a rank that waits long sleeps between polls, and leaves its core to the
backward pass. It listens as well to what other ranks say beside their calls (`notices`): a rank that leaves, or
gives up, says so, and those that wait for it learn of it at once. Calls of MPI that block are made through
`in_time`, which limits them. If MPI can go on after a rank has died (ULFM), the first rank that notices the death
revokes all communicators that the dead rank was part of, so that all ranks notice it.
"""

from __future__ import annotations

import ctypes
import functools
import os
import socket
import time
import zlib
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from typing import TypeVar

import numpy as np
from mpi4py import MPI

from ... import kernels
from ...arrays import Array, DType, OpOrder, as_buffer, as_bytes, dtype_name, parts, rows, same_memory
from ...errors import (
    WHICH_CALLS,
    CommAborted,
    CommError,
    CommMismatch,
    CommTimeout,
    RankFailed,
    UnsupportedError,
)
from ...processes import namespace_number
from ..base import COLLECTIVE, POINT_TO_POINT, Flow, Move, Transport
from ..notices import GAVE_UP, LEFT, Notice, given_up
from ..pipeline import Encoding, Message, Wait
from .blocking import in_time
from .memory import UNREADABLE, DirectCalls, open_memory
from .reductions import OPS, REDUCTIONS, is_sound
from .table import Table
from .turns import Turns
from .window import GivenUpError, Rows, SharedWindow, open_window
from .world import Place, World

NATIVE_BYTES = 1 << 16
"""If each rank receives at most this many bytes, MPI's own collectives are used; above it, the derived ones."""

MAX_COMMUNICATORS = 65_000
"""About how many communicators Open MPI can have at a time."""

PIECE_BYTES = 1 << 17
FAST_PIECE_BYTES = 1 << 20
"""Bytes that the derived collectives send to a peer at a time, on one host and on fast networks. A larger piece
is copied less often, but waits until its receiver says that it is there."""

FAST_CODED_PIECE_BYTES = 1 << 18
"""The same for encoded elements on fast networks; on one host it is `PIECE_BYTES`."""

TURN_BYTES = 3 << 14
AHEAD = 12
"""On slow networks: bytes of a message, and how many more of them a rank may have sent than received (`turns`).
The table has bus bandwidths as shares of the link's, in float32, with 4 emulated hosts at 1 Gbit/s whose links
let 128 KiB pass at once, medians of one run of five rounds:

                                      allreduce                alltoall
                                      512 KiB  1 MiB  8 MiB    512 KiB  1 MiB  8 MiB
    128 KiB to all others at once     0.79     0.91   0.94     0.79     0.86   0.94
    48 KiB, 9 ahead                   0.91     0.95   0.98     0.86     0.91   0.98
    48 KiB, 12 ahead                  0.91     0.95   0.98     0.90     0.93   0.98
    32 KiB, 9 ahead                   0.93     0.96   0.99     0.92     0.93   0.99

Quantized averages do not notice that a network is fast. At 10 Gbit/s they take a third longer in messages of 32
KiB than in pieces of 128 KiB, and 4 % longer in messages of 48 KiB.
"""

LONG_BYTES = 8 << 20
LONG_PIECE_BYTES = 1 << 18
"""In calls on arrays larger than the first, messages have the second, and waits sleep at once, and longer, in
place of polling first. Ranks that compute meanwhile, as in a backward pass, come to each message late and need
their cores: fewer messages cost less, and so do fewer polls. A step of ResNet-50 on 4 emulated hosts of half a
core each, at 1 Gbit/s, took 2.41 s in messages of `TURN_BYTES`, 2.34 s in messages of 128 KiB, and 2.16 s like
this, in one run. A message must be shorter than what Open MPI sends without asking the receiver first
(`MPI_SETTINGS`). On smaller arrays the naps cost more than they save: an allgather of 1 MiB loses 5 % of its
bandwidth."""

FEW = 64
"""Up to this number of ranks, what they agree on between hosts goes from each to each at once, not along a tree:
along a tree, data of ranks that know the result would come in before what others still wait for."""

FAST_BYTES_S = 0.28e9
FAST_CALLS = 16
"""A network is fast if a rank has sent more bytes than the first in a second, in one of so many large calls. The
latest call alone says little: ranks that compute meanwhile make it slow on any network. Steps of ResNet-50 on 4
emulated hosts of half a core each, at 10 Gbit/s, took 5 % longer if it decided."""

SHOWN_BYTES = 1 << 18
"""Ranks of one host show each other whole arrays if these have at most this many bytes together."""

READ_BYTES = 1 << 15
"""Ranks that may read each other's memory show each other arrays of at most this size; larger ones they read
where they are. So one copy passes between cores, and not two, which take up to four times as long where cores
share no cache. Not so in sums for all ranks (`_SUMS`): shown, they take less time than MPI's."""

_SUMS = "allreduce", "reduce_scatter"

SHARED_BYTES = 1 << 20
"""From this size on, ranks of one host add what they encode through memory that they share."""

QUANTIZE_BYTES = 1 << 17
"""Below this size, averaging in eight bits takes longer than exact averaging, between four emulated hosts at 1
Gbit/s, because the cost of a call dominates. Between ranks that share memory it always takes longer; there the
user decides what to send."""

EAGER_BYTES = 2048
"""Without shared memory, collectives on larger arrays begin only after all ranks have agreed on the size: Open
MPI 5.0 writes a message that is longer than expected beyond the end of the receiver's array, unless it is short
enough to go eagerly."""

MESSAGE_BYTES = 1 << 30
"""Larger messages are split; MPI counts with 32 bits."""

_BUSY_S = 0.00003
"""How long a wait polls without offering its core to others."""

_PROBES = 20
"""How often a rank looks for a message before it waits by the clock: about ten microseconds."""

_SPIN_S = 0.0005
"""How long a wait polls without sleeping."""

_NAPS_S = 0.00005, 0.0003
"""How long a wait then sleeps between polls, at least and at most: a tenth of the time that it has waited."""

_PATIENT_NAP_S = 0.001
"""How long a wait of a call on a large array on a slow network sleeps between polls, from its beginning on."""

_LISTEN_S = 0.02
"""How often a rank that waits listens to notices."""

_GRACE_S = 0.5
"""How long a rank still waits after it heard that another one has left, whose last messages may be on their
way."""

_ROLL_CALL_S = 1.0
"""How long a rank that has timed out waits, at most, for others to say that they wait as well."""

_OBITUARY_S = 3.0
"""How long a rank waits, at most, after an error of MPI, to learn whether a rank has died, and which one."""

_LEAVE_QUIETLY_S = 1.0
"""How long a rank that leaves waits for the others before it says so."""

NOTHING: Array = np.empty(0, np.uint8)

_NONE: Message = -1, NOTHING
"""No message."""

T = TypeVar("T")

_TABLES = 64
"""The largest number of kinds of small calls for which tables are kept."""

_MEMBERS_TOLD = 8
"""How many ranks a message names one by one."""


class MPITransport(Transport):
    """One rank of an MPI communicator, which it owns: pass a duplicate.

    Collective.

    Args:
        comm: The communicator, or something that has the calls of one that are made here.
        timeout_s: How long a call may wait for its peers.
        world: What all transports of a world share; None to find that out.
        group: A name for these ranks, the same on all of them, and no other group's.
        members: Their ranks in the world; None if this is the world.
        with_window: Whether ranks of one host share memory for large reductions.
    """

    name = "mpi"
    piece_bytes = PIECE_BYTES
    _coded_piece_bytes: int | None = PIECE_BYTES
    """None on slow networks, where the array decides; see `turn_bytes`."""

    def __init__(
        self,
        comm: MPI.Comm,
        *,
        timeout_s: float = 300.0,
        world: World | None = None,
        group: str = "world",
        members: Sequence[int] | None = None,
        with_window: bool = True,
    ) -> None:
        super().__init__()
        self._comm = comm
        self._comm.Set_errhandler(MPI.ERRORS_RETURN)
        self.rank, self.size, self.timeout_s = comm.Get_rank(), comm.Get_size(), timeout_s
        self.concurrent = MPI.Query_thread() == MPI.THREAD_MULTIPLE
        self._speeds: deque[float] = deque([0.0], maxlen=FAST_CALLS)
        """Bytes that this rank sent in a second, in its latest large calls."""
        self._by_mpi: frozenset[tuple[DType, str]] = frozenset()
        """The reductions, (dtype, op), that are MPI's own; none of floats where they are added in rank order."""
        self._begun: dict[int, object] = {}
        """The arrays and requests of exchanges that were begun and not yet waited for."""
        self._tables: dict[tuple[str, int, DType], Table] = {}
        self._group = group
        self.members = list(range(self.size)) if members is None else list(members)
        """The members' ranks in the world."""
        self._completed = [0]
        self._history: deque[str] = deque(maxlen=64)
        """Names of the latest collective calls."""
        self._groups_made = 0
        self._making: list[str] = []
        """The name of the group that the call in progress makes, if it makes one."""
        self._told = False
        self._window: SharedWindow | None = None
        self._shown_bytes = 0
        """The size of an array up to which ranks that share memory show each other all of it."""
        self._direct: DirectCalls | None = None
        """Calls by reading memory; None unless all ranks share a window, and each may read that of all others."""
        self._shortcuts: dict[tuple[str, tuple[int, ...], DType], Move] = {}
        self._calls: memoryview | None = None
        """How many collective calls each rank has begun; None unless all share memory."""
        self._world = world if world is not None else self._new_world()
        self._world.transports.add(self)
        self._world.open += 1
        self._world.completed[group] = self._completed
        self._window = open_window(self, self._wait) if with_window and self.size > 1 else None
        if self._window is not None:
            self._forget()  # those so far are without a window
            self._calls = self._window.calls
            self._shown_bytes = min(SHOWN_BYTES // self.size, self._window.slot_bytes)
            memory = open_memory(self)
            self._direct = DirectCalls(self._window, memory) if memory is not None else None
        self.quantize_bytes = QUANTIZE_BYTES if self._window is None else 0
        if self._window is None:
            self._coded_piece_bytes = None

    def _new_world(self) -> World:
        """Find out where the ranks are, and which reductions all their MPIs compute as NumPy does. Collective."""
        facts = np.zeros((self.size, 11), np.int64)
        facts[self.rank, 0] = os.getpid()
        facts[self.rank, 1] = sum(1 << i for i, reduction in enumerate(REDUCTIONS) if is_sound(*reduction))
        facts[self.rank, 2] = namespace_number()
        host = socket.gethostname().encode()[:64]
        facts[self.rank, 3:].view(np.uint8)[: len(host)] = np.frombuffer(host, np.uint8)
        self._complete(lambda: self._comm.Iallgather(MPI.IN_PLACE, [facts, MPI.BYTE]), facts)
        hosts = [row.tobytes().rstrip(b"\0").decode(errors="replace") for row in facts[:, 3:]]
        visible = facts[:, 2] == facts[self.rank, 2]
        places = [Place(*each) for each in zip(hosts, facts[:, 0].tolist(), visible.tolist(), strict=True)]
        everywhere = int(np.bitwise_and.reduce(facts[:, 1]))
        sound = frozenset(reduction for i, reduction in enumerate(REDUCTIONS) if everywhere >> i & 1)
        comm = self._duplicate()
        comm.Set_errhandler(MPI.ERRORS_RETURN)
        return World(comm, places, sound)

    def set_order(self, order: OpOrder) -> None:
        """See `Transport.set_order`. In any order MPI reduces all that it computes as NumPy does."""
        sound = self._world.sound if order == "any" else frozenset[tuple[str, str]]()
        averages = {(dtype, "avg") for dtype, op in sound if op == "sum" and dtype.startswith("float")}
        self._by_mpi = frozenset((np.dtype(dtype), op) for dtype, op in sound | averages)
        self.adds_in_rank_order = not averages

    def begin_call(self, name: str, *, collective: bool, describe: Callable[[], str] | None = None) -> None:
        """See `Transport.begin_call`."""
        self._call, self._in_collective, self._deadline_s = name, collective, None
        if collective:
            self._history.append(name)
            if self._calls is not None:
                self._calls[self.rank] = self._completed[0] + 1

    def end_call(self) -> None:
        """See `Transport.end_call`."""
        if self._in_collective and self._broken is None:
            self._completed[0] += 1
        self._call, self._in_collective = None, False
        if self._making:
            self._making = []

    def cancel_call(self) -> None:
        """See `Transport.cancel_call`."""
        if self._in_collective:
            self._history.pop()
        super().cancel_call()

    def moves(self, x: Array) -> bool:
        """Host arrays."""
        return isinstance(x, np.ndarray)

    def exchange(self, sends: Sequence[Message], recvs: Sequence[Message], *, tag: int = POINT_TO_POINT) -> None:
        """All messages at once, non-blocking; see `Transport.exchange`."""
        if self._broken is not None or self._begun:
            self._check_idle()
        if len(sends) <= 1 and len(recvs) <= 1:
            (dest, x), (source, out) = sends[0] if sends else _NONE, recvs[0] if recvs else _NONE
            if x.nbytes < MESSAGE_BYTES and out.nbytes < MESSAGE_BYTES:
                self._exchange_one(dest, x, source, out, tag)
                return
        requests: list[MPI.Request] = []
        statuses: list[MPI.Status] = []
        incoming: dict[int, deque[Array]] = {}  # by peer, in order
        for peer, out in recvs:
            incoming.setdefault(peer, deque()).extend(_pieces(out))

        def wait(done: Callable[[], bool]) -> None:
            if not done():
                self._poll(done, peers={peer for peer, _ in (*sends, *recvs)} - {self.rank})

        try:
            for peer, x in sends:
                for piece in _pieces(x):
                    requests.append(self._comm.Isend([piece, MPI.BYTE], peer, tag))
                self.sent_bytes += x.nbytes if peer != self.rank else 0
            wait(lambda: self._receive(incoming, requests, tag))
            statuses += [MPI.Status() for _ in requests]
            wait(lambda: MPI.Request.Testall(requests, statuses))
            if self._window is not None:
                self._window.check(peer for peer, _ in recvs if peer != self.rank)
        except CommMismatch as exc:
            if tag != POINT_TO_POINT or incoming or not MPI.Request.Testall(requests):
                self._give_up(exc, (requests, sends, recvs))
            raise
        except BaseException as exc:
            raise self._give_up(exc, (requests, sends, recvs), statuses) from exc

    def _exchange_one(self, dest: int, x: Array, source: int, out: Array, tag: int) -> None:
        """`exchange` of at most one message each way, none of which is split; rank -1 is nobody."""
        is_copy = self.size == 1 and dest == source and (x.dtype, x.size) == (out.dtype, out.size)
        if is_copy and not self._comm.Iprobe(0, tag):
            _copy(x, out)
            return
        send = receive = None
        try:
            if dest >= 0:
                send = self._comm.Isend([as_buffer(x), MPI.BYTE], dest, tag)
                self.sent_bytes += x.nbytes if dest != self.rank else 0
            if source >= 0:
                message, nbytes = self._next_message(source, tag)
                into = as_buffer(out) if nbytes == out.nbytes else np.empty(nbytes, np.uint8)
                receive = message.Irecv([into, MPI.BYTE])
                if not receive.Test():
                    self._poll(receive.Test, peers=(source,))
                if nbytes != out.nbytes:
                    raise self._unexpected(source, out, nbytes)
            if send is not None and not send.Test():
                self._poll(send.Test, peers=(dest,))
            if out.nbytes > EAGER_BYTES and self._window is not None:
                self._window.check((source,))  # a shorter message holds a copy
        except CommMismatch as exc:
            if tag != POINT_TO_POINT or (send is not None and not send.Test()):
                self._give_up(exc, (send, x))
            raise
        except BaseException as exc:
            raise self._give_up(exc, (send, receive, x, out)) from exc

    def _next_message(self, peer: int, tag: int) -> tuple[MPI.Message, int]:
        """Wait for a message, and match it; returns its size in bytes as well."""
        probe, status = self._comm.Improbe, MPI.Status()
        for _ in range(_PROBES):
            message = probe(peer, tag, status)
            if message is not None:
                return message, status.Get_count(MPI.BYTE)
        found: list[MPI.Message] = []

        def has_come() -> bool:
            message = probe(peer, tag, status)
            if message is not None:
                found.append(message)
            return message is not None

        self._poll(has_come, peers=(peer,))
        return found[0], status.Get_count(MPI.BYTE)

    def _unexpected(self, peer: int, out: Array, nbytes: int) -> CommMismatch:
        """The error to raise if `peer` has sent `nbytes` in place of what `out` holds."""
        return CommMismatch(
            f"rank {self.rank} expected {out.nbytes} bytes from rank {peer}, which sent {nbytes}; {WHICH_CALLS}"
        )

    def _receive(self, incoming: dict[int, deque[Array]], requests: list[MPI.Request], tag: int) -> bool:
        """Start to receive what has arrived and is of the right size; True if nothing is left to come."""
        status = MPI.Status()
        for peer in list(incoming):
            message = self._comm.Improbe(peer, tag, status)
            if message is None:
                continue
            out, nbytes = incoming[peer].popleft(), status.Get_count(MPI.BYTE)
            if not incoming[peer]:
                del incoming[peer]
            if nbytes != out.nbytes:
                # Receive it anyway, so that the next receive gets the next message.
                self._poll(message.Irecv([np.empty(nbytes, np.uint8), MPI.BYTE]).Test)
                raise self._unexpected(peer, out, nbytes)
            requests.append(message.Irecv([out, MPI.BYTE]))
        return not incoming

    def start(self, turns: Turns, sends: Sequence[Message], recvs: Sequence[Message]) -> Wait:
        """Begin an exchange of a call that the ranks have agreed on; see `Flow.begin`."""
        if self._broken is not None:
            self._check_usable()
        self._begun[id(turns)] = turns
        try:
            ended = turns.add(sends, recvs)
        except BaseException as exc:
            raise self._give_up(exc, (sends, recvs)) from exc
        self.sent_bytes += sum(x.nbytes for _, x in sends)

        def wait() -> None:
            try:
                self._poll(ended, is_patient=turns.is_patient)
                if self._window is not None:
                    self._window.check()
            except BaseException as exc:
                raise self._give_up(exc, (turns, sends, recvs)) from exc
            if turns.is_idle():
                self._begun.pop(id(turns), None)

        return wait

    def agree_on_call(self, call: str, x: Array) -> Flow:
        """See `Transport.agree_on_call`. The ranks also agree on how large pieces are, from this call on."""
        if self._window is not None:
            number = zlib.crc32(f"{call} {dtype_name(x.dtype)} {x.nbytes}".encode())
            if not self._share(0, self._window.agree, number):
                raise self._mismatch(call, x)
            return self._at_once(FAST_PIECE_BYTES)
        number = zlib.crc32(f"{call} {dtype_name(x.dtype)}".encode())
        is_fast = max(self._speeds) > FAST_BYTES_S
        smallest, largest = self._bounds(np.array([number, x.nbytes, is_fast], np.int64))
        if (smallest[:2] != largest[:2]).any():
            raise self._mismatch(call, x)
        if smallest[2]:
            self._coded_piece_bytes = FAST_CODED_PIECE_BYTES
            return _MPIFlow(self, FAST_PIECE_BYTES, Turns(self._comm, None))
        self._coded_piece_bytes = None
        turns = Turns(self._comm, AHEAD, is_patient=x.nbytes > LONG_BYTES)
        return _MPIFlow(self, turn_bytes(x.nbytes), turns)

    def coded_piece_bytes(self, nbytes: int) -> int:
        """See `Transport.coded_piece_bytes`."""
        return self._coded_piece_bytes or turn_bytes(nbytes)

    def _at_once(self, piece_bytes: int) -> Flow:
        """The exchanges of a call among ranks that share memory."""
        return _MPIFlow(self, piece_bytes, Turns(self._comm, None))

    def _bounds(self, values: Array) -> tuple[Array, Array]:
        """The smallest and the largest of all ranks' values, one by one. Collective.

        The first value is the number of the call: a rank may take the small array of another one for values.
        """
        if self.size <= FEW:
            return self._bounds_of_few(values)
        both = np.concatenate([values, -values])
        self._complete(lambda: self._comm.Iallreduce(MPI.IN_PLACE, both, MPI.MIN), both)
        return both[: values.size], -both[values.size :]

    def _bounds_of_few(self, values: Array) -> tuple[Array, Array]:
        table = np.zeros((self.size, values.size), values.dtype)
        table[self.rank] = values
        self._complete(lambda: self._comm.Iallgather(MPI.IN_PLACE, [table, MPI.BYTE]), table)
        return table.min(axis=0), table.max(axis=0)

    def _mismatch(self, call: str, x: Array) -> CommMismatch:
        """The error to raise when all ranks know that their calls differ. Collective."""
        table = np.zeros((self.size, 256), np.uint8)
        text = f"{call} of {x.size} x {dtype_name(x.dtype)} ({x.nbytes} bytes)".encode()[:256]
        table[self.rank, : len(text)] = np.frombuffer(text, np.uint8)
        self._complete(lambda: self._comm.Iallgather(MPI.IN_PLACE, [table, MPI.BYTE]), table)
        calls = [row.tobytes().rstrip(b"\0").decode(errors="replace") for row in table]
        other = next((rank for rank in range(self.size) if calls[rank] != calls[0]), 0)
        return CommMismatch(
            f"ranks made different calls: rank 0 called {calls[0]}, but rank {other} called {calls[other]}"
        )

    # Collectives ------------------------------------------------------------------------------------

    def shortcut(self, name: str, x: Array, op: str = "", root: int | None = None) -> Move | None:
        """See `Transport.shortcut`. Calls on small arrays and among ranks that share memory have one."""
        is_own = getattr(type(self), name) is getattr(MPITransport, name)
        return self._way(name, x, op, root) if is_own else None

    def _way(self, name: str, x: Array, op: str = "", root: int | None = None) -> Move | None:
        """How calls on small arrays and among ranks that share memory are made; None for others."""
        if self.size == 1:
            return _copy
        is_read = self._direct is not None and x.nbytes > READ_BYTES and name not in _SUMS
        small = not is_read and self._is_small(x)
        if self._is_by_mpi(name, x, op) or (self._window is None and not small):
            return None
        call = _named(name, op, root)
        key = call, x.shape, x.dtype
        move = self._shortcuts.get(key)
        if move is None:
            if len(self._shortcuts) >= _TABLES:
                self._shortcuts.clear()
            make = self._on_small_arrays if small else self._on_one_host
            move = self._shortcuts[key] = make(name, call, x, op, -1 if root is None else root)
        return move

    def _on_small_arrays(self, name: str, call: str, x: Array, op: str, root: int) -> Move:
        """A call on small arrays: all ranks' go to all ranks, each with the number of its call."""
        table = self._table(call, x, op or "sum")
        gather, add, at_root = functools.partial(self._gather, table, call), table.reduce, self.rank == root

        def broadcast(x: Array, _: Array) -> None:
            # This has the latency of MPI's own, which would not notice that ranks give different roots.
            gathered = gather(x, shown=at_root)
            if not at_root:
                _flat(x)[...] = gathered.all[root]

        moves: dict[str, Move] = {
            "barrier": lambda x, _: gather(x),
            "broadcast": broadcast,
            "allgather": lambda x, out: _fill_rows(out, gather(x).all),
            "alltoall": lambda x, out: _fill_rows(out, gather(x).chunks),
            "allreduce": lambda x, out: add(gather(x).all, _flat(out)),
            "reduce_scatter": lambda x, out: add(gather(x).chunks, _flat(out)),
            "reduce": lambda x, out: add(gather(x).all, _flat(out)) if at_root else gather(x),
        }
        return moves[name]

    def _on_one_host(self, name: str, call: str, x: Array, op: str, root: int) -> Move:
        """A call on larger arrays among ranks that share memory.

        They read each other's arrays. Where that cannot be, reductions go through the window, and MPI carries the
        rest.
        """
        window, direct, at_root = self._window, self._direct, self.rank == root
        flow = self._at_once(MESSAGE_BYTES)
        assert window is not None
        number = zlib.crc32(f"{call} {dtype_name(x.dtype)} {x.nbytes}".encode())
        others = self.size - 1
        sent = {
            "broadcast": x.nbytes if at_root else 0,
            "allgather": x.nbytes * others,
            "allreduce": 2 * x.nbytes * others // self.size,
            "reduce": 0 if at_root else x.nbytes,
        }.get(name, x.nbytes * others // self.size)
        through: dict[str, Move] = {
            "broadcast": lambda x, _: self._broadcast_over(flow, x, root),
            "allgather": lambda x, out: self.allgather_over(flow, x, out),
            "alltoall": lambda x, out: self.alltoall_over(flow, x, out),
            "allreduce": lambda x, out: self._share(sent, window.allreduce, x, out, op),
            "reduce_scatter": lambda x, out: self._share(sent, window.reduce_scatter, x, out, op),
            "reduce": lambda x, out: self._share(sent, window.reduce, x, out if at_root else None, root, op),
        }
        indirectly = through[name]
        directly = direct.of(name, x.dtype, op, root) if direct is not None else None

        def place(x: Array, out: Array) -> int:
            if direct is None or not (out is x or out.nbytes == 0 or direct.memory.place(out)):
                return UNREADABLE
            return direct.memory.place(x)

        def move(x: Array, out: Array) -> None:
            if name == "alltoall":
                x = self._apart(x, out)
            places = self._share(0, window.places, number, place(x, out))
            if places is None:
                raise self._mismatch(call, x)
            if directly is None or UNREADABLE in places:
                indirectly(x, out)
            else:
                self._share(sent, directly, places, x, out)

        return move

    def allreduce(self, x: Array, out: Array, op: str) -> None:
        """Small arrays are gathered and reduced here, integers of middle size reduced by MPI; see `Transport`."""
        if self._agree_on_any_order("allreduce", x, op):
            self._allreduce_natively(x, out, op)
            return
        if move := self._way("allreduce", x, op):
            move(x, out)
            return
        flow = self.agree_on_call(_named("allreduce", op), x)
        if self._are_sound(x, op):
            self._allreduce_natively(x, out, op)
        elif self.size * x.nbytes <= NATIVE_BYTES:
            table = self._scratch.take("table", (self.size, x.size), x.dtype, like=x)
            self._allgather_natively(x, table)
            kernels.on_host().reduce_rows(table, out.reshape(-1), op)
        else:
            self._watched(self.allreduce_over, flow, x, out, op)

    def allreduce_encoded(self, code: Encoding, out: Array) -> None:
        """Large arrays go through shared memory, if there is any; see `Transport`."""
        nbytes = out.size * code.dtype.itemsize
        if self._window is None or nbytes < SHARED_BYTES:
            super().allreduce_encoded(code, out)
            return
        self.agree_on_call(f"allreduce of encoded {dtype_name(code.dtype)}", out)
        sent = (nbytes + out.nbytes) * (self.size - 1) // self.size
        self._share(sent, self._window.allreduce_encoded, code, out)

    def reduce(self, x: Array, out: Array | None, root: int, op: str) -> None:
        """Small arrays are gathered and reduced here, integers of middle size reduced by MPI; see `Transport`."""
        if self._agree_on_any_order("reduce", x, op, root):
            self._reduce_natively(x, out, root, op)
            return
        if move := self._way("reduce", x, op, root):
            move(x, NOTHING if out is None else out)
            return
        flow = self.agree_on_call(_named("reduce", op, root), x)
        if self._are_sound(x, op):
            self._reduce_natively(x, out, root, op)
        else:
            self.reduce_over(flow, x, out, root, op)

    def reduce_scatter(self, x: Array, out: Array, op: str) -> None:
        """Small arrays are gathered and reduced here, integers of middle size reduced by MPI; see `Transport`."""
        if self._agree_on_any_order("reduce_scatter", x, op):
            self._reduce_scatter_natively(x, out, op)
            return
        if move := self._way("reduce_scatter", x, op):
            move(x, out)
            return
        flow = self.agree_on_call(_named("reduce_scatter", op), x)
        if self._are_sound(x, op):
            self._reduce_scatter_natively(x, out, op)
        elif x.nbytes <= NATIVE_BYTES:
            table = self._scratch.take("table", (self.size, out.size), x.dtype, like=x)
            self._alltoall_natively(x, table)
            kernels.on_host().reduce_rows(table, out.reshape(-1), op)
        else:
            self._watched(self.reduce_scatter_over, flow, list(rows(x, self.size)), out, op)

    def reduce_scatterv(self, x: Array, out: Array, counts: Sequence[int], op: str) -> None:
        """Small arrays are gathered and reduced here; see `Transport`."""
        call = f"reduce_scatter {op} by {list(counts)}"
        if self._is_small(x):
            shown = self._gather(self._table(call, x), call, x)
            chunks = [parts(row, counts)[self.rank] for row in shown.all]
            kernels.on_host().reduce_rows(chunks, out.reshape(-1), op)
            return
        flow = self.agree_on_call(call, x)
        self._watched(self.reduce_scatter_over, flow, parts(x, counts), out, op)

    def scan(self, x: Array, out: Array, op: str, *, exclusive: bool = False) -> None:
        """Small arrays are gathered and reduced here; see `Transport`."""
        call = f"{'exscan' if exclusive else 'scan'} {op}"
        if self._is_small(x):
            before = self._gather(self._table(call, x), call, x).all[: self.rank + (not exclusive)]
            if len(before):
                kernels.on_host().reduce_rows(before, out.reshape(-1), op)
            return
        self.agree_on_call(call, x)
        super().scan(x, out, op, exclusive=exclusive)

    def allgather(self, x: Array, out: Array) -> None:
        """Small arrays travel with the number of their call, others by MPI up to a size; see `Transport`."""
        if move := self._way("allgather", x):
            move(x, out)
            return
        flow = self.agree_on_call("allgather", x)
        if out.nbytes <= NATIVE_BYTES:
            self._allgather_natively(x, out)
        else:
            self._watched(self.allgather_over, flow, x, out)

    def alltoall(self, x: Array, out: Array) -> None:
        """Small arrays travel with the number of their call, others by MPI up to a size; see `Transport`."""
        if move := self._way("alltoall", x):
            move(x, out)
            return
        flow = self.agree_on_call("alltoall", x)
        if out.nbytes <= NATIVE_BYTES:
            self._alltoall_natively(self._apart(x, out), out)
        else:
            self._watched(self.alltoall_over, flow, x, out)

    def _forget(self) -> None:
        """Forget what was worked out for calls."""
        self._tables.clear()
        self._shortcuts.clear()

    def _is_small(self, x: Array) -> bool:
        """Whether `x` is so small that all ranks' arrays go to all ranks, each with the number of its call."""
        if self._window is not None:
            return bool(x.nbytes <= self._shown_bytes)
        return bool(x.nbytes <= EAGER_BYTES and x.nbytes * self.size <= NATIVE_BYTES)

    def _table(self, call: str, x: Array, op: str = "sum") -> Table:
        """What small calls on arrays such as `x` use, made once; `op` reduces the arrays."""
        key = call, x.size, x.dtype
        table = self._tables.get(key)
        if table is None:
            if len(self._tables) >= _TABLES:
                self._tables.clear()
            table = self._tables[key] = Table(self.size, self.rank, self._window, call, x, op)
        return table

    def _gather(self, table: Table, call: str, x: Array, *, shown: bool = True) -> Rows:
        """The arrays of all ranks, valid until the next call; raises on all ranks if calls differ.

        Collective. A rank need not show its array where nobody looks at it.
        """
        window = self._window
        if self._broken is not None or self._begun:
            self._check_idle()
        if window is None:
            return self._gather_over_mpi(table, call, x)
        try:
            gathered = window.gather(table.rows, _flat(x) if shown else None, table.number)
        except BaseException as exc:
            raise self._give_up(exc, None) from exc
        if gathered is None:
            raise self._mismatch(call, x)
        if shown:
            self.sent_bytes += x.nbytes * (self.size - 1)
        return gathered

    def _gather_over_mpi(self, table: Table, call: str, x: Array) -> Rows:
        gathered = table.rows[0]
        gathered.mine[...] = x.reshape(-1)
        self._complete(lambda: self._comm.Iallgather(MPI.IN_PLACE, table.wire), table)
        self.sent_bytes += x.nbytes * (self.size - 1)
        if not table.is_of_one_call():
            table.renew()  # it holds the numbers of other calls
            raise self._mismatch(call, x)
        return gathered

    def _watched(self, call: Callable[..., None], *arguments: object) -> None:
        """Make a call, and note how fast the network was."""
        sent, start = self.sent_bytes, time.monotonic()
        call(*arguments)
        sent, elapsed_s = self.sent_bytes - sent, time.monotonic() - start
        if sent >= PIECE_BYTES:
            self._speeds.append(sent / max(elapsed_s, 1e-9))

    def _are_sound(self, x: Array, op: str) -> bool:
        """Whether MPI reduces arrays such as `x` between hosts: integers of middle size, which have no order."""
        return x.nbytes <= NATIVE_BYTES and x.dtype.kind in "iu" and (x.dtype.name, op) in self._world.sound

    def _agree_on_any_order(self, name: str, x: Array, op: str, root: int | None = None) -> bool:
        """Whether MPI is to reduce `x` in an order of its own, and all ranks make this call. Collective if so."""
        if self.size == 1 or not self._is_by_mpi(name, x, op):
            return False
        self.agree_on_call(f"{_named(name, op, root)} in any order", x)
        return True

    def _is_by_mpi(self, name: str, x: Array, op: str) -> bool:
        """Whether MPI reduces arrays such as `x` in its own order.

        Small ones are gathered, which takes less time. Large ones it does not `reduce`: Open MPI begins the next
        8 KiB only when it is asked again.
        """
        largest = NATIVE_BYTES if name == "reduce" else MESSAGE_BYTES
        return (x.dtype, op) in self._by_mpi and x.nbytes <= largest and not self._is_small(x)

    # MPI wants IN_PLACE on all ranks or on none, but only some of our ranks may pass `x` as `out`.

    def _allreduce_natively(self, x: Array, out: Array, op: str) -> None:
        source = self._apart(x, out)
        self._complete(lambda: self._comm.Iallreduce(source, out, OPS[op]), (source, out))
        self.sent_bytes += 2 * x.nbytes * (self.size - 1) // self.size
        self._end_average(out, op)

    def _reduce_natively(self, x: Array, out: Array | None, root: int, op: str) -> None:
        source = x if out is None else self._apart(x, out)
        self._complete(lambda: self._comm.Ireduce(source, out, OPS[op], root), (source, out))
        self.sent_bytes += x.nbytes * (self.size - 1) // self.size
        if out is not None:
            self._end_average(out, op)

    def _reduce_scatter_natively(self, x: Array, out: Array, op: str) -> None:
        source = self._apart(x, out)
        self._complete(lambda: self._comm.Ireduce_scatter_block(source, out, OPS[op]), (source, out))
        self.sent_bytes += x.nbytes * (self.size - 1) // self.size
        self._end_average(out, op)

    def _end_average(self, total: Array, op: str) -> None:
        """Make an average of a sum of floats, if `op` asks for one."""
        if op == "avg":
            with np.errstate(all="ignore"):
                kernels.host.divide(total, self.size)

    def _allgather_natively(self, x: Array, out: Array) -> None:
        mine = rows(out, self.size)[self.rank]
        if not same_memory(x, mine):
            mine[...] = x.reshape(-1)
        self._complete(lambda: self._comm.Iallgather(MPI.IN_PLACE, [as_bytes(out), MPI.BYTE]), out)
        self.sent_bytes += x.nbytes * (self.size - 1)

    def _alltoall_natively(self, x: Array, out: Array) -> None:
        self._complete(lambda: self._comm.Ialltoall([as_bytes(x), MPI.BYTE], [as_bytes(out), MPI.BYTE]), (x, out))
        self.sent_bytes += x.nbytes * (self.size - 1) // self.size

    def broadcast(self, x: Array, root: int) -> None:
        """MPI's own up to its count limit, but for small arrays and on one host; see `Transport`."""
        if move := self._way("broadcast", x, root=root):
            move(x, x)
            return
        self._broadcast_over(self.agree_on_call(_named("broadcast", root=root), x), x, root)

    def _broadcast_over(self, flow: Flow, x: Array, root: int) -> None:
        """`broadcast`, once the ranks have agreed. Collective."""
        if x.nbytes > MESSAGE_BYTES:
            super().broadcast(x, root)
            return
        self._complete(lambda: self._comm.Ibcast([as_bytes(x), MPI.BYTE], root), x)
        self.sent_bytes += x.nbytes if self.rank == root else 0

    def barrier(self) -> None:
        """Small arrays of all ranks, without elements; see `Transport`."""
        if move := self._way("barrier", NOTHING):
            move(NOTHING, NOTHING)

    def split(self, color: int, key: int) -> Transport:
        """See `Transport.split`."""
        group = self._begin_group(f":{color}")
        self.barrier()  # if a rank is missing, it is named here
        left_s = max(self.deadline_s() - time.monotonic(), 0.0)
        comm = self._make(lambda: in_time(lambda: self._comm.Split(color, key), left_s, "MPI_Comm_split"))
        members = comm.Get_group()
        return self._derived(comm, group, [self.members[rank] for rank in self._ranks_of(members)])

    def dup(self) -> Transport:
        """See `Transport.dup`."""
        group = self._begin_group()
        self.barrier()
        return self._derived(self._make(self._duplicate), group, self.members)

    def _begin_group(self, end: str = "") -> str:
        """The name of a group that this call makes. To give up this communicator is to give it up as well."""
        self._groups_made += 1
        group = f"{self._group}.{self._groups_made}{end}"
        self._making = [group]
        return group

    def _duplicate(self) -> MPI.Comm:
        comm, request = self._comm.Idup()
        try:
            self._poll(request.Test)
        except BaseException:
            # MPI may still write the new communicator into this memory: never free it.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object((comm, request)))
            raise
        return comm

    def _make(self, make: Callable[[], MPI.Comm]) -> MPI.Comm:
        """A new communicator of MPI. Collective."""
        try:
            return make()
        except MPI.Exception as exc:
            error = self._give_up(exc, None)
            count = self._world.open
            if not isinstance(error, RankFailed) and count > MAX_COMMUNICATORS // 2:
                raise CommError(
                    f"rank {self.rank}: MPI could not make one more communicator beside {count}, and has room "
                    f"for about {MAX_COMMUNICATORS} at a time; close those that are no longer used ({error})"
                ) from exc
            raise error from exc
        except BaseException as exc:
            raise self._give_up(exc, None) from exc

    def _derived(self, comm: MPI.Comm, group: str, members: Sequence[int]) -> MPITransport:
        return MPITransport(comm, timeout_s=self.timeout_s, world=self._world, group=group, members=members)

    def shrink(self, host: Transport | None = None) -> Transport:
        """A transport over the survivors, with ULFM (`mpirun --with-ft ulfm`)."""
        if self._broken is None:
            self._break("shrunk")
        try:
            self._world.revoke(self.members)
            self.revoke()
            survivors = in_time(self._comm.Shrink, self.timeout_s, "MPI_Comm_shrink")
            return MPITransport(survivors, timeout_s=self.timeout_s)
        except (MPI.Exception, NotImplementedError) as exc:
            raise UnsupportedError(
                "mpi: this MPI cannot go on without the ranks that died; Open MPI 5 can: mpirun --with-ft ulfm"
            ) from exc

    def revoke(self) -> None:
        """Wake the ranks that are in a call, where MPI can do that."""
        with suppress(MPI.Exception, NotImplementedError):
            if not self._is_revoked():
                self._comm.Revoke()

    def abort(self, exit_code: int = 1) -> None:
        """End all processes of the MPI job with `exit_code`."""
        self._comm.Abort(exit_code)

    def leave(self, reason: str | None = None) -> bool:
        """See `Transport.leave`. Only the world can be left, not a group of it."""
        world = self._world
        if self._group != "world" or world.orderly is not None:
            return world.orderly is not False
        world.orderly = self.size == 1
        if self.size == 1:
            return True
        error = CommAborted(reason) if reason is not None else None
        if reason is not None or self._broken is not None:
            world.tell(self.others(), LEFT, error, world.latest_groups())
            return False
        start, spoke = time.monotonic(), np.array([not world.is_quiet], np.uint8)

        def ended(request: MPI.Request, *, may_speak: bool) -> bool:
            while not request.Test():
                waited = time.monotonic() - start
                world.notices.listen()
                if waited > self.timeout_s or self._somebody_failed():
                    ctypes.pythonapi.Py_IncRef(ctypes.py_object((request, spoke)))
                    failure = CommAborted("it did not wait any longer for the other ranks to leave")
                    world.tell(self.others(), LEFT, failure, world.latest_groups())
                    return False
                if waited > _LEAVE_QUIETLY_S and may_speak:
                    may_speak, spoke[0] = False, 1
                    world.tell(self.others(), LEFT, None, world.latest_groups())
                time.sleep(min(max(_NAPS_S[0], waited / 10), _NAPS_S[1]) if waited > _SPIN_S else 0)
            return True

        try:
            if not ended(world.comm.Ibarrier(), may_speak=True):
                return False
            # Whether any rank has spoken: then its notice may still be under way.
            if not ended(world.comm.Iallreduce(MPI.IN_PLACE, spoke, MPI.MAX), may_speak=False):
                return False
        except MPI.Exception:
            return False  # a rank has died
        world.orderly, world.is_quiet = True, not spoke[0]
        return True

    def tell(self, group: str, error: CommError) -> None:
        """See `Transport.tell`. If MPI cannot be called by several threads, nothing is told or heard."""
        if self.concurrent and not MPI.Is_finalized():
            self._world.is_quiet = False
            self._world.tell([self.members[rank] for rank in self.others()], GAVE_UP, error, [group])

    def heard(self, groups: Collection[str]) -> CommError | None:
        """See `Transport.heard`."""
        if not self.concurrent or MPI.Is_finalized():
            return None
        notices = self._world.notices
        notices.listen()
        for rank in self.others():
            for notice, _ in notices.from_rank(self.members[rank]):
                if notice.kind == GAVE_UP and not notice.completed.keys().isdisjoint(groups):
                    who = f"rank {self.rank} of {self.size}: {self._name_rank(rank)}"
                    return given_up(who, notice.error, notice.reason)
        dead = self._failed()
        return self._rank_failed(dead) if dead else None

    def _somebody_failed(self) -> bool:
        """Whether a rank has said that it leaves because of an error, or has given up this communicator."""
        return any(
            notice.error and (notice.kind == LEFT or self._group in notice.completed)
            for rank in self.others()
            for notice, _ in self._world.notices.from_rank(rank)
        )

    def close(self) -> None:
        """Free the MPI communicator, unless unfinished calls still use it, and unmap the window."""
        self._window = self._calls = self._direct = None
        self._forget()
        if self._begun:
            self._break("a call was interrupted")
        if self._broken is None and not MPI.Is_finalized():
            self._break("closed")
            self._world.open -= 1
            in_time(self._comm.Free, self.timeout_s, "MPI_Comm_free")
            if self._group == "world" and self._world.orderly and self._world.is_quiet:
                in_time(self._world.comm.Free, self.timeout_s, "MPI_Comm_free")

    def _complete(self, start: Callable[[], MPI.Request], buffers: object) -> None:
        """Start a non-blocking call of MPI and wait for it."""
        if self._broken is not None or self._begun:
            self._check_idle()
        request = None
        try:
            request = start()
            if not request.Test():
                self._poll(request.Test)
            if self._window is not None:
                self._window.check()  # MPI reads other processes' memory, too
        except BaseException as exc:
            raise self._give_up(exc, (request, buffers)) from exc

    def _share(self, sent: int, call: Callable[..., T], *arguments: object) -> T:
        """Make a call through the window, by which `sent` bytes go to other ranks."""
        if self._broken is not None or self._begun:
            self._check_idle()
        try:
            result = call(*arguments)
        except BaseException as exc:
            raise self._give_up(exc, (call, arguments)) from exc
        self.sent_bytes += sent
        return result

    def _poll(
        self,
        done: Callable[[], bool],
        between: Callable[[], object] | None = None,
        peers: Collection[int] | None = None,
        *,
        is_patient: bool = False,
    ) -> None:
        """Wait until `done`. It polls first without sleeping, since most answers come at once.

        Args:
            done: Asks MPI whether the wait is over.
            between: Called after naps.
            peers: The ranks that this one waits for; None if all others.
            is_patient: The answer is far off: sleep at once, and longer.
        """
        start = listened = time.monotonic()
        spin_s, (shortest, longest) = _SPIN_S, _NAPS_S
        if is_patient:
            spin_s, shortest, longest = 0.0, _PATIENT_NAP_S, _PATIENT_NAP_S
        deadline_s: float | None = None
        while not done():
            now = time.monotonic()
            waited = now - start
            if waited > spin_s:
                if deadline_s is None:
                    deadline_s = self.deadline_s()
                if now > deadline_s:
                    raise self._overdue(peers, None)
                time.sleep(min(max(shortest, waited / 10), longest))
                if between is not None:
                    between()
                if now - listened > _LISTEN_S:
                    listened = now
                    self._listen(peers)
            elif waited > _BUSY_S:
                os.sched_yield()

    def _listen(self, peers: Collection[int] | None) -> None:
        """Raise if a rank that this one waits for will not come."""
        if self._world_is_new():
            return
        notices = self._world.notices
        notices.listen()
        number = self._completed[0] + 1
        for rank in self.others() if peers is None else peers:
            for notice, heard_s in notices.from_rank(self.members[rank]):
                if self._in_collective:
                    ends = notice.ends(self._group, number)
                else:
                    ends = notice.kind == LEFT or self._group in notice.completed
                if not ends or (self._world.orderly and not notice.error):
                    continue  # all ranks have left the world in order, and go on with groups of it
                if notice.error == CommTimeout.__name__:
                    raise self._overdue(peers, rank)
                if time.monotonic() - heard_s > _GRACE_S:
                    raise self._deserted(rank, notice)

    def _why_given_up(self, rank: int) -> CommError:
        """The error to raise because `rank` has given up: it says why, just after it has marked the window."""
        until = time.monotonic() + _OBITUARY_S + 2 * _GRACE_S
        try:
            while time.monotonic() < until:
                MPITransport._listen(self, (rank,))
                time.sleep(_NAPS_S[0])
        except CommError as exc:
            return exc
        return CommAborted(f"rank {self.rank} of {self.size}: rank {rank} gave up while its array was read")

    def _world_is_new(self) -> bool:
        """Whether the world is still being set up by this transport."""
        return not hasattr(self, "_world")

    def _deserted(self, rank: int, notice: Notice) -> CommError:
        """The error to raise if `rank` will not come."""
        who = f"rank {rank} ({self._world.places[self.members[rank]]})"
        if notice.error:
            doing = "left" if notice.kind == LEFT else f"gave up, by {notice.error}"
            return CommAborted(f"rank {self.rank} of {self.size}: {who} {doing}: {notice.reason}")
        return CommMismatch(
            f"rank {self.rank} of {self.size} waits for {who}, which has left: its program ended, or it closed "
            "its communicator"
        )

    def _overdue(self, peers: Collection[int] | None, first: int | None) -> CommError:
        """The error to raise if a wait took too long, here or on rank `first`; names missing ranks, if known."""
        dead = self._failed()
        if dead:
            return self._rank_failed(dead)
        began = f"rank {self.rank} of {self.size} waited {self.limit_s:g} s for its peers"
        if first is not None:
            began = (
                f"rank {first} of {self.size} waited {self.timeout_s:g} s for its peers, rank {self.rank} with it"
            )
        error = CommTimeout(began)
        if self._world_is_new():
            return error
        self._tell(error)
        awaited = [rank for rank in self.others() if peers is None or rank in peers]
        missing = self._absent(awaited)
        present = [rank for rank in awaited if rank not in missing]
        texts = [f"{self._name_rank(rank)}{self._last_call_of(rank)}" for rank in missing[:_MEMBERS_TOLD]]
        if len(missing) > _MEMBERS_TOLD:
            texts.append(f"and {len(missing) - _MEMBERS_TOLD} more")
        if missing:
            began += f"; missing: {'; '.join(texts)}"
        if present:
            began += f"; waiting like this one: {_listed(present)}"
        return CommTimeout(began)

    def _name_rank(self, rank: int) -> str:
        return f"rank {rank} ({self._world.places[self.members[rank]]})"

    def _absent(self, awaited: Sequence[int]) -> list[int]:
        """Which of these ranks are not in the call that this one is in, as far as that can be known."""
        if self._calls is not None and self._in_collective:
            return [rank for rank in awaited if self._calls[rank] <= self._completed[0]]
        # Ranks that wait as well hear that this rank gives up, and say that they give up, too.
        notices, until = self._world.notices, time.monotonic() + min(_ROLL_CALL_S, self.timeout_s / 2)
        absent = list(awaited)
        while absent and time.monotonic() < until:
            notices.listen()
            absent = [
                rank
                for rank in absent
                if not any(self._group in n.completed for n, _ in notices.from_rank(self.members[rank]))
            ]
            time.sleep(0.001)
        return absent

    def _last_call_of(self, rank: int) -> str:
        """Words about the last collective call that a rank has begun; none unless all ranks share memory."""
        if self._calls is None:
            return ""
        begun = self._calls[rank]
        number = self._completed[0] + self._in_collective  # of the last call in the history
        behind = number - begun
        if begun == 0:
            return ", which has made no collective call yet"
        if not 0 <= behind < len(self._history):
            return f", whose last call was its collective number {begun}"
        return f", whose last call was {self._history[-1 - behind]}, its collective number {begun}"

    def _tell(self, error: BaseException) -> None:
        """Tell the other ranks, once, that this one gives up this communicator."""
        if self._told or self._world_is_new():
            return
        self._told = True
        self._world.tell(
            [self.members[rank] for rank in self.others()], GAVE_UP, error, [self._group, *self._making]
        )

    def _wait(self, done: Callable[[], bool]) -> None:
        """Wait for something that MPI does not see; asks MPI meanwhile, to raise if a rank died or gave up."""
        self._poll(done, lambda: self._comm.Iprobe(MPI.ANY_SOURCE, COLLECTIVE))

    def _check_idle(self) -> None:
        """Raise unless this communicator can be used, and nothing that was begun is still under way."""
        if self._begun and self._broken is None:
            self._give_up(CommAborted("a call was interrupted"), None)
        self._check_usable()

    def _give_up(
        self, exc: BaseException, in_flight: object, statuses: Sequence[MPI.Status] = ()
    ) -> BaseException:
        """Give up this communicator after `exc`, raised in the middle of a call; returns the error to raise."""
        # Ranks may still be at the end of the collective before a message that does not fit: its bytes are right.
        if self._window is not None and (self._in_collective or not isinstance(exc, CommMismatch)):
            self._window.give_up()
        # MPI may write to the arrays of an unfinished call, and peers read them, until the process ends: never
        # free them.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object((in_flight, self._begun, self._direct)))
        self._break(f"a call failed earlier ({type(exc).__name__})")
        error = exc
        if isinstance(exc, MPI.Exception):
            if exc.Get_error_class() == MPI.ERR_IN_STATUS:
                codes = [code for code in map(MPI.Status.Get_error, statuses) if code != MPI.SUCCESS]
                exc = MPI.Exception(next(iter(codes), MPI.ERR_OTHER))
            error = self._translate(exc)
        elif isinstance(exc, OSError):  # the memory of a rank cannot be read
            dead = self._obituary()
            error = self._rank_failed(dead) if dead else CommError(f"rank {self.rank}: {exc}")
        elif isinstance(exc, GivenUpError):
            error = self._why_given_up(exc.rank)
        if isinstance(error, RankFailed):
            if not self._world_is_new():
                self._world.revoke([self.members[rank] for rank in error.ranks])
            self.revoke()
        else:
            self._tell(error)
        return error

    def interrupted(self, error: BaseException, arrays: object) -> None:
        """See `Transport.interrupted`. Tells the others."""
        if self.size > 1 and self._broken is None:
            self._give_up(error, arrays)

    def _translate(self, exc: MPI.Exception) -> CommError:
        code, text = exc.Get_error_class(), exc.Get_error_string()
        if code == MPI.ERR_TRUNCATE:
            return CommMismatch(f"rank {self.rank}: a peer sent more than was expected ({text}); {WHICH_CALLS}")
        dead = self._obituary()
        by_death = code in (MPI.ERR_PROC_FAILED, MPI.ERR_PROC_FAILED_PENDING, MPI.ERR_REVOKED)
        if dead or by_death or self._is_revoked():
            return self._rank_failed(dead)
        return CommError(f"rank {self.rank}: MPI failed: {text}")

    def _obituary(self) -> list[int]:
        """The ranks known to be dead, once there are some, or after `_OBITUARY_S`.

        Ranks that notice a death revoke the communicator; this may become known before the name of the dead rank.
        And if a rank dies in the middle of a collective, Open MPI sometimes gives an unspecific error.
        """
        until = time.monotonic() + _OBITUARY_S
        while not (dead := self._failed()) and time.monotonic() < until:
            MPI.COMM_SELF.Iprobe()  # MPI learns of deaths in those of its calls that look for messages
            time.sleep(0.01)
        return dead

    def _rank_failed(self, dead: Sequence[int]) -> RankFailed:
        if self._world_is_new():
            names = _listed(dead)
        else:
            names = ", ".join(self._name_rank(rank) for rank in dead[:_MEMBERS_TOLD])
            if len(dead) > _MEMBERS_TOLD:
                names += f" and {len(dead) - _MEMBERS_TOLD} more"
        who = f"{names} died" if dead else "another rank noticed that a rank died or is missing"
        return RankFailed(f"rank {self.rank} of {self.size}: {who}", dead)

    def _is_revoked(self) -> bool:
        try:
            return self._comm.Is_revoked()
        except (MPI.Exception, NotImplementedError):
            return False

    def _failed(self) -> list[int]:
        """The ranks known to be dead."""
        try:
            dead = self._comm.Get_failed()
        except (MPI.Exception, NotImplementedError):
            return []  # this MPI ends the job when a rank dies
        return self._ranks_of(dead)

    def _ranks_of(self, members: MPI.Group) -> list[int]:
        """The ranks that the members of an MPI group have here; frees the group."""
        everyone = self._comm.Get_group()
        try:
            return list(members.Translate_ranks(range(members.Get_size()), everyone))
        finally:
            everyone.Free()
            members.Free()


class _MPIFlow(Flow):
    """Exchanges whose sizes are agreed on: receivers wait for them without asking for the sizes."""

    transport: MPITransport

    def __init__(self, transport: MPITransport, piece_bytes: int, turns: Turns) -> None:
        super().__init__(transport, piece_bytes)
        self._turns = turns

    def begin(self, sends: Sequence[Message], recvs: Sequence[Message]) -> Wait:
        """See `Flow.begin`."""
        return self.transport.start(self._turns, sends, recvs)

    # The calls of the transport would have the ranks agree once more.

    def alltoall_at_once(self, table: Array, into: Array) -> None:
        """See `Flow.alltoall_at_once`."""
        self.transport.alltoall_over(self, table, into)

    def allgather_at_once(self, mine: Array, into: Array) -> None:
        """See `Flow.allgather_at_once`."""
        self.transport.allgather_over(self, mine, into)


def _flat(x: Array) -> Array:
    """View contiguous `x` as a row; `x` itself if it is one."""
    return x if x.ndim == 1 else x.reshape(-1)


def _fill_rows(out: Array, values: Sequence[Array]) -> None:
    """Copy arrays, (m,) each, to the rows of `out`; NumPy takes longer to copy all of them in one go."""
    table = rows(out, len(values))
    for i, row in enumerate(values):
        table[i] = row


def _copy(x: Array, out: Array) -> None:
    """What all collectives among one rank do."""
    if out is not x:
        _flat(out)[...] = _flat(x)


def _named(name: str, op: str = "", root: int | None = None) -> str:
    """A call, by all that must be the same on all ranks, but for dtype and size."""
    words = [name, op] if op else [name]
    if root is not None:
        words += ["from" if name == "broadcast" else "to", str(root)]
    return " ".join(words)


def _listed(ranks: Sequence[int]) -> str:
    text = ", ".join(map(str, ranks[:_MEMBERS_TOLD]))
    more = f" and {len(ranks) - _MEMBERS_TOLD} more" if len(ranks) > _MEMBERS_TOLD else ""
    return f"{'ranks' if len(ranks) > 1 else 'rank'} {text}{more}"


def turn_bytes(nbytes: int) -> int:
    """Bytes of a message on slow networks, in a call on an array of `nbytes`."""
    return LONG_PIECE_BYTES if nbytes > LONG_BYTES else TURN_BYTES


def _pieces(x: Array) -> Iterator[Array]:
    """View `x` as bytes, in messages that MPI can count; the last is shorter than `MESSAGE_BYTES`, or empty.

    So no array is taken for the beginning of a larger one.
    """
    flat = as_bytes(x)
    for start in range(0, flat.size + 1, MESSAGE_BYTES):
        yield flat[start : start + MESSAGE_BYTES]
