"""Host arrays over MPI, through mpi4py. Importing this module starts MPI.

Messages travel as bytes, so every dtype does. Small arrays go to MPI's own non-blocking collectives, whose
latency is lower; large reductions among ranks on one host through memory that all of them map (`shared`); other
large ones to those derived from `begin`. Floats are added in rank order whatever their number, so a sum does not
depend on what else was in its bucket. Every wait polls, with a timeout: a rank that waits long sleeps between
polls, and leaves its core to the backward pass.
"""

from __future__ import annotations

import ctypes
import os
import time
import zlib
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence

import numpy as np
from mpi4py import MPI

from ..arrays import INTEGERS, Array, DType, overlap, rows, same_memory
from ..errors import (
    CommAborted,
    CommError,
    CommMismatch,
    CommTimeout,
    RankFailed,
    UnsupportedError,
)
from ..kernels import host
from .base import COLLECTIVE, POINT_TO_POINT, Message, Transport, Wait
from .shared import open_window

NATIVE_BYTES = 1 << 16
"""Up to this size of what each rank receives MPI's own collectives are used, beyond it the derived ones."""

PIECE_BYTES = 1 << 17
FAST_PIECE_BYTES = 1 << 20
"""What the derived ones send to a peer at a time, on slow and on fast networks."""

FAST_BYTES_S = 0.28e9
"""A network on which a rank sends more in a second is fast. Bus bandwidth of allreduce over that of the link (of
the faster at 10 Gbit/s, where two cores are the limit), float32 of 64 MiB (32 at 1 Gbit/s), 4 emulated hosts:

                            1 Gbit/s   2 Gbit/s   5 Gbit/s   10 Gbit/s
    pieces of 256 KiB       0.99       0.98       0.57       0.84
    pieces of 1 MiB         0.85       0.86       0.63       1

Pieces of 128 KiB, five at a time, were as fast as those of 256 at 1 Gbit/s, and faster for 8 MiB. A larger piece
waits until its receiver says that it is there, and on a busy link this answer waits behind the data; but it is
copied less often.
"""

SHARED_BYTES = 1 << 20
"""From this size on, ranks of one host reduce through memory that they share. How many times as long MPI's own
allreduce takes, in place, in float32, on two cores:

               4 MiB   8 MiB   16 MiB   32 MiB
    2 ranks    0.8     1.0     1.1      2.7
    4 ranks    0.8                      1.8

Below 4 MiB, MPI's own is faster, but adds in an order of its own.
"""

QUANTIZE_BYTES = 1 << 17
"""Below, eight bits an element take longer than all of them, between four emulated hosts at 1 Gbit/s: the cost of
a call is what counts there. Between ranks that share memory they always do; what to send is left to the user."""

EAGER_BYTES = 2048
"""Collectives on larger arrays begin only after all ranks have agreed on the size: Open MPI 5.0 writes a message
that is longer than expected beyond the end of the receiver's array, unless it is short enough to go eagerly."""

MESSAGE_BYTES = 1 << 30
"""Larger messages are split; MPI counts with 32 bits."""

_BUSY_S = 0.00003
"""How long a wait polls without offering its core to others."""

_SPIN_S = 0.0005
"""How long it polls without sleeping."""

_NAPS_S = 0.00005, 0.0003
"""How long it sleeps between polls then, at least and at most: a tenth of what it has waited."""

_OPS = {
    "sum": MPI.SUM,
    "prod": MPI.PROD,
    "min": MPI.MIN,
    "max": MPI.MAX,
    "band": MPI.BAND,
    "bor": MPI.BOR,
    "bxor": MPI.BXOR,
}


class MPITransport(Transport):
    """One rank of an MPI communicator, which it owns: pass a duplicate."""

    name = "mpi"
    piece_bytes = PIECE_BYTES

    def __init__(self, comm: MPI.Comm, *, timeout_s: float = 300.0) -> None:
        super().__init__()
        self._comm = comm
        self._comm.Set_errhandler(MPI.ERRORS_RETURN)
        self.rank, self.size, self.timeout_s = comm.Get_rank(), comm.Get_size(), timeout_s
        self.concurrent = MPI.Query_thread() == MPI.THREAD_MULTIPLE
        self._broken: str | None = None
        self._is_fast = False
        self._begun: dict[int, object] = {}
        """What the exchanges that were begun, and not yet waited for, read and write."""
        self._window = None
        self._window = open_window(self, self._wait) if self.size > 1 else None
        self.quantize_bytes = QUANTIZE_BYTES if self._window is None else 0

    def moves(self, x: Array) -> bool:
        """Host arrays."""
        return isinstance(x, np.ndarray)

    def exchange(self, sends: Sequence[Message], recvs: Sequence[Message], *, tag: int = POINT_TO_POINT) -> None:
        """All messages at once, non-blocking; see `Transport.exchange`."""
        self._check_idle()
        requests: list[MPI.Request] = []
        statuses: list[MPI.Status] = []
        incoming: dict[int, deque[Array]] = {}  # by peer, in order
        for peer, out in recvs:
            incoming.setdefault(peer, deque()).extend(_pieces(out))
        try:
            for peer, x in sends:
                for piece in _pieces(x):
                    requests.append(self._comm.Isend([piece, MPI.BYTE], peer, tag))
                self.sent_bytes += x.nbytes if peer != self.rank else 0
            self._poll(lambda: self._receive(incoming, requests, tag))
            statuses += [MPI.Status() for _ in requests]
            self._poll(lambda: MPI.Request.Testall(requests, statuses))
        except CommMismatch as exc:
            if tag != POINT_TO_POINT or incoming or not MPI.Request.Testall(requests):
                self._give_up(exc, (requests, sends, recvs))
            raise
        except BaseException as exc:
            raise self._give_up(exc, (requests, sends, recvs), statuses) from exc

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
                # Take it all the same, so that the next message is the next.
                self._poll(message.Irecv([np.empty(nbytes, np.uint8), MPI.BYTE]).Test)
                raise CommMismatch(
                    f"rank {self.rank} expected {out.nbytes} bytes from rank {peer}, which sent {nbytes}"
                )
            requests.append(message.Irecv([out, MPI.BYTE]))
        return not incoming

    def begin(self, sends: Sequence[Message], recvs: Sequence[Message]) -> Wait:
        """See `Transport.begin`."""
        self._check_usable()
        requests: list[MPI.Request] = []
        statuses = [MPI.Status() for _ in (*recvs, *sends)]
        try:
            for peer, out in recvs:
                requests.append(self._comm.Irecv([_bytes(out), MPI.BYTE], peer, COLLECTIVE))
            for peer, x in sends:
                requests.append(self._comm.Isend([_bytes(x), MPI.BYTE], peer, COLLECTIVE))
                self.sent_bytes += x.nbytes
        except BaseException as exc:
            raise self._give_up(exc, (requests, sends, recvs)) from exc
        self._begun[id(requests)] = requests, sends, recvs

        def wait() -> None:
            try:
                self._poll(lambda: MPI.Request.Testall(requests, statuses))
            except BaseException as exc:
                raise self._give_up(exc, None, statuses) from exc
            del self._begun[id(requests)]

        return wait

    def agree_on_call(self, call: str, x: Array) -> None:
        """Raise `CommMismatch` on all ranks unless all make this call on arrays of one size. Collective.

        What `begin` does relies on it. The ranks come to the same size of pieces as well.
        """
        number = zlib.crc32(call.encode())
        bounds = np.array([x.nbytes, -x.nbytes, number, -number, self._is_fast], np.int64)
        self._complete(lambda: self._comm.Iallreduce(MPI.IN_PLACE, bounds, MPI.MIN), bounds)
        low, high = int(bounds[0]), -int(bounds[1])
        if low != high:
            raise CommMismatch(f"rank {self.rank} gave {x.nbytes} bytes, where ranks give {low} to {high}")
        if bounds[2] != -bounds[3]:
            raise CommMismatch(f"rank {self.rank} called {call}, where another rank made another call")
        self.piece_bytes = FAST_PIECE_BYTES if bounds[4] else PIECE_BYTES

    # Collectives ------------------------------------------------------------------------------------

    def allreduce(self, x: Array, out: Array, op: str) -> None:
        """Small integers by MPI, small floats gathered and added in rank order; see `Transport`."""
        native = op in _natively_reduced(x.dtype)
        small = self._agree_and_choose(f"allreduce {op}", x, x.nbytes if native else self.size * x.nbytes)
        if small and native:
            # MPI wants IN_PLACE on all ranks or on none, whatever each of ours passes as `out`.
            if x is not out:
                out[...] = x
            self._complete(lambda: self._comm.Iallreduce(MPI.IN_PLACE, out, _OPS[op]), out)
            self.sent_bytes += 2 * x.nbytes * (self.size - 1) // self.size
        elif small:
            table = self._scratch.take("table", (self.size, x.size), x.dtype, like=x)
            self._allgather_natively(x, table)
            host.reduce_rows(table, out.reshape(-1), op)
        elif self._window is not None and x.nbytes >= SHARED_BYTES:
            sent_bytes = 2 * x.nbytes * (self.size - 1) // self.size
            self._share(self._window.allreduce, x, out, op, sent_bytes=sent_bytes)
        else:
            self._watched(super().allreduce, x, out, op)

    def reduce(self, x: Array, out: Array | None, root: int, op: str) -> None:
        """Small integers by MPI; see `Transport`."""
        native = op in _natively_reduced(x.dtype)
        # Not even small floats go to MPI, so their size must be agreed on.
        if self._agree_and_choose(f"reduce {op}", x, x.nbytes if native else NATIVE_BYTES + 1):
            send = MPI.IN_PLACE if x is out else x
            self._complete(lambda: self._comm.Ireduce(send, out, _OPS[op], root), (x, out))
            self.sent_bytes += x.nbytes * (self.size - 1) // self.size
        else:
            super().reduce(x, out, root, op)

    def reduce_scatter(self, x: Array, out: Array, op: str) -> None:
        """Small integers by MPI, small floats exchanged and added in rank order; see `Transport`."""
        if self._agree_and_choose(f"reduce_scatter {op}", x, x.nbytes):
            if op in _natively_reduced(x.dtype):
                x = self._apart(x, out)
                self._complete(lambda: self._comm.Ireduce_scatter_block(x, out, _OPS[op]), (x, out))
                self.sent_bytes += x.nbytes * (self.size - 1) // self.size
            else:
                table = self._scratch.take("table", (self.size, out.size), x.dtype, like=x)
                self._alltoall_natively(x, table)
                host.reduce_rows(table, out.reshape(-1), op)
        elif self._window is not None and x.nbytes >= SHARED_BYTES:
            sent_bytes = x.nbytes * (self.size - 1) // self.size
            self._share(self._window.reduce_scatter, x, out, op, sent_bytes=sent_bytes)
        else:
            self._watched(super().reduce_scatter, x, out, op)

    def reduce_scatterv(self, x: Array, out: Array, counts: Sequence[int], op: str) -> None:
        """See `Transport`."""
        if x.nbytes > EAGER_BYTES:
            self.agree_on_call(f"reduce_scatter {op} {counts}", x)
        self._watched(super().reduce_scatterv, x, out, counts, op)

    def allgather(self, x: Array, out: Array) -> None:
        """MPI's own for small arrays; see `Transport`."""
        if self._agree_and_choose("allgather", x, out.nbytes):
            self._allgather_natively(x, out)
        else:
            self._watched(super().allgather, x, out)

    def alltoall(self, x: Array, out: Array) -> None:
        """MPI's own for small arrays; see `Transport`."""
        if self._agree_and_choose("alltoall", x, out.nbytes):
            self._alltoall_natively(self._apart(x, out), out)
        else:
            self._watched(super().alltoall, x, out)

    def _watched(self, call: Callable[..., None], *arguments: object) -> None:
        """Make a call, and see how fast the network is."""
        sent, start = self.sent_bytes, time.monotonic()
        call(*arguments)
        sent, elapsed_s = self.sent_bytes - sent, time.monotonic() - start
        if sent >= PIECE_BYTES:
            self._is_fast = sent > FAST_BYTES_S * elapsed_s

    def _allgather_natively(self, x: Array, out: Array) -> None:
        mine = rows(out, self.size)[self.rank]
        if not same_memory(x, mine):
            mine[...] = x.reshape(-1)
        self._complete(lambda: self._comm.Iallgather(MPI.IN_PLACE, [_bytes(out), MPI.BYTE]), out)
        self.sent_bytes += x.nbytes * (self.size - 1)

    def _alltoall_natively(self, x: Array, out: Array) -> None:
        self._complete(lambda: self._comm.Ialltoall([_bytes(x), MPI.BYTE], [_bytes(out), MPI.BYTE]), (x, out))
        self.sent_bytes += x.nbytes * (self.size - 1) // self.size

    def _agree_and_choose(self, call: str, x: Array, nbytes: int) -> bool:
        """Whether a call that moves `nbytes` goes to MPI; raises where ranks differ, if it can. Collective."""
        if x.nbytes > EAGER_BYTES or nbytes > NATIVE_BYTES:
            self.agree_on_call(call, x)
        return nbytes <= NATIVE_BYTES

    def broadcast(self, x: Array, root: int) -> None:
        """MPI's own up to its count limit; see `Transport`."""
        if x.nbytes > EAGER_BYTES:
            self.agree_on_call("broadcast", x)
        if x.nbytes > MESSAGE_BYTES:
            super().broadcast(x, root)
            return
        self._complete(lambda: self._comm.Ibcast([_bytes(x), MPI.BYTE], root), x)
        self.sent_bytes += x.nbytes if self.rank == root and self.size > 1 else 0

    def barrier(self) -> None:
        """MPI's own."""
        self._complete(self._comm.Ibarrier, None)

    def split(self, color: int, key: int) -> Transport:
        """See `Transport.split`."""
        return self._made(lambda: self._comm.Split(color, key))

    def dup(self) -> Transport:
        """See `Transport.dup`."""
        return self._made(self._comm.Dup)

    def shrink(self, host: Transport | None = None) -> Transport:
        """A transport over the survivors, with ULFM (`mpirun --with-ft ulfm`)."""
        if self._broken is None:
            self._break("shrunk")
        try:
            if not self._comm.Is_revoked():
                self._comm.Revoke()
            return MPITransport(self._comm.Shrink(), timeout_s=self.timeout_s)
        except (MPI.Exception, NotImplementedError) as exc:
            raise UnsupportedError(
                "mpi: this MPI cannot go on without the ranks that died; Open MPI 5 can: mpirun --with-ft ulfm"
            ) from exc

    def abort(self, exit_code: int = 1) -> None:
        """End all processes of the MPI job with `exit_code`."""
        self._comm.Abort(exit_code)

    def close(self) -> None:
        """Free the MPI communicator, unless unfinished calls still use it, and unmap the window."""
        self._window = None
        if self._begun:
            self._break("a call was interrupted")
        if self._broken is None and not MPI.Is_finalized():
            self._break("closed")
            self._comm.Free()

    def _made(self, make: Callable[[], MPI.Comm]) -> MPITransport:
        # These calls of MPI have no timeout; once all ranks have arrived they don't wait long.
        self.barrier()
        try:
            return MPITransport(make(), timeout_s=self.timeout_s)
        except MPI.Exception as exc:
            raise self._give_up(exc, None) from exc

    def _complete(self, start: Callable[[], MPI.Request], buffers: object) -> None:
        """Start a non-blocking call of MPI and wait for it."""
        if self._broken is not None or self._begun:
            self._check_idle()
        request = None
        try:
            request = start()
            if not request.Test():
                self._poll(request.Test)
        except BaseException as exc:
            raise self._give_up(exc, (request, buffers)) from exc

    def _share(self, call: Callable[..., None], x: Array, *arguments: object, sent_bytes: int) -> None:
        """Make a call of the window."""
        self._check_usable()
        try:
            call(x, *arguments)
        except BaseException as exc:
            raise self._give_up(exc, None) from exc
        self.sent_bytes += sent_bytes

    def _poll(self, done: Callable[[], bool], between: Callable[[], object] | None = None) -> None:
        """Wait until `done`, calling `between` after naps; first without sleeping: most answers come at once."""
        start = time.monotonic()
        while not done():
            waited = time.monotonic() - start
            if waited > self.timeout_s:
                raise CommTimeout(f"rank {self.rank} of {self.size} waited {self.timeout_s:g} s for its peers")
            if waited > _SPIN_S:
                shortest, longest = _NAPS_S
                time.sleep(min(max(shortest, waited / 10), longest))
                if between is not None:
                    between()
            elif waited > _BUSY_S:
                os.sched_yield()

    def _wait(self, done: Callable[[], bool]) -> None:
        """Wait for what MPI does not see; asked meanwhile, it raises if a rank died or gave up."""
        self._poll(done, lambda: self._comm.Iprobe(MPI.ANY_SOURCE, COLLECTIVE))

    def _apart(self, x: Array, out: Array) -> Array:
        """`x`, or a copy if it overlaps `out`: which call of MPI is made must not depend on it."""
        if not overlap(x, out):
            return x
        copy = self._scratch.take("apart", x.shape, x.dtype, like=x)
        copy[...] = x
        return copy

    def _check_idle(self) -> None:
        """Raise unless this communicator can be used, and nothing that was begun is still under way."""
        if self._begun and self._broken is None:
            self._give_up(CommAborted("a call was interrupted"), None)
        self._check_usable()

    def _check_usable(self) -> None:
        if self._broken is not None:
            raise CommAborted(f"rank {self.rank}: this communicator cannot be used: {self._broken}")

    def _break(self, reason: str) -> None:
        self._broken = self._broken or reason

    def _give_up(
        self, exc: BaseException, in_flight: object, statuses: Sequence[MPI.Status] = ()
    ) -> BaseException:
        """What to raise for `exc`, in the middle of a call: nothing can be sent after it."""
        # MPI may write to the arrays of an unfinished call until the process ends: never free them.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object((in_flight, self._begun)))
        self._break(f"a call failed earlier ({type(exc).__name__})")
        if not isinstance(exc, MPI.Exception):
            return exc
        if exc.Get_error_class() == MPI.ERR_IN_STATUS:
            codes = [code for code in map(MPI.Status.Get_error, statuses) if code != MPI.SUCCESS]
            exc = MPI.Exception(next(iter(codes), MPI.ERR_OTHER))
        return self._translate(exc)

    def _translate(self, exc: MPI.Exception) -> CommError:
        code, text = exc.Get_error_class(), exc.Get_error_string()
        if code == MPI.ERR_TRUNCATE:
            return CommMismatch(f"rank {self.rank}: a peer sent more than was expected ({text})")
        if code == MPI.ERR_REVOKED:
            return CommAborted(f"rank {self.rank}: a peer gave this communicator up ({text})")
        if code in (MPI.ERR_PROC_FAILED, MPI.ERR_PROC_FAILED_PENDING):
            return RankFailed(f"rank {self.rank}: a peer died ({text})", self._failed())
        return CommError(f"rank {self.rank}: MPI failed: {text}")

    def _failed(self) -> list[int]:
        """The ranks known to be dead."""
        dead = self._comm.Get_failed()
        try:
            return list(dead.Translate_ranks(range(dead.Get_size()), self._comm.Get_group()))
        finally:
            dead.Free()


def _natively_reduced(dtype: DType) -> Collection[str]:
    """What MPI reduces as we do: all but averages, whose sums it may overflow, of integers, in any order."""
    return _OPS if dtype.name in INTEGERS else ()


def _bytes(x: Array) -> Array:
    return x.reshape(-1).view(np.uint8)


def _pieces(x: Array) -> Iterator[Array]:
    """View `x` as bytes, in messages that MPI can count."""
    flat = _bytes(x)
    for start in range(0, max(flat.size, 1), MESSAGE_BYTES):
        yield flat[start : start + MESSAGE_BYTES]
