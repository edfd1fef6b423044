"""Device arrays over NCCL, through CuPy: one GPU a rank, in the order of CuPy's current stream.

A call returns once its work is enqueued. The host waits only where NCCL itself does: when ranks use a connection
for the first time, and when communicators are made.

NCCL's own reductions are used where they keep the contract: the same bytes on all ranks, in an order of NCCL's
choice. NCCL reduces float16 and bfloat16 hop by hop, in its own way; the derived collectives add them in float32
and round once. For "avg" NCCL scales each contribution before it adds. Some reductions are derived from
`exchange` instead: min and max of floats, since NCCL's hide NaN; averages of integers; bitwise operations; and
dtypes that NCCL lacks.

NCCL compares nothing: ranks whose calls or sizes differ wait for each other, or get wrong bytes
(`connect(check=True)` finds such calls). A send waits, on the stream, for its receive; they match in the order of
all calls between the two ranks, collectives included. A message to oneself needs both ends in one `exchange`.

A watchdog watches the calls in flight. It aborts NCCL's communicator after an error of NCCL or of CUDA, and when
a call has not ended `timeout_s` after it was made, including the time that its stream spends on earlier work.
Then streams continue, the data in flight is lost, and all later calls raise, or else `close` does. This rank
notifies the others, over the host transport if that can (`Transport.notify_failure`), and those that wait raise
as well. A rank whose program catches an error and continues without the call has not aborted: the others notice
only by their own timeout.

A replayed CUDA graph is not watched. NCCL frees no communicator that a graph still uses: delete graphs before
`close`, which waits for them at most `LEAVE_S`.

Two communicators of one rank may be in flight together, for instance a lane's and the caller's. If a setting
orders them (NCCL_LAUNCH_ORDER_IMPLICIT, CUDA_DEVICE_MAX_CONNECTIONS=1), the order must be the same on all ranks,
which lanes on threads do not guarantee.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import cupy
import numpy as np
from cupy.cuda import nccl

from ...arrays import FLOATS, Array, address, dtype_name, text_row, texts_of
from ...errors import CommAborted, CommError, CommTimeout, RankFailed, UnsupportedError
from ...execution.cuda import explained
from ...execution.recording import current
from ..base import Transport
from ..call_state import check_timeout
from ..flow import POINT_TO_POINT, Message
from .watchdog import Watch, Watchdog

if not nccl.available:
    raise ImportError("CuPy cannot load NCCL; pip install 'bagua-comm[cuda13]' or 'bagua-comm[cuda12]' brings it")

UNIQUE_ID_BYTES = 128

_BYTE = nccl.NCCL_UINT8
_DTYPES = {
    "int8": nccl.NCCL_INT8,
    "uint8": nccl.NCCL_UINT8,
    "int32": nccl.NCCL_INT32,
    "uint32": nccl.NCCL_UINT32,
    "int64": nccl.NCCL_INT64,
    "uint64": nccl.NCCL_UINT64,
    "float16": nccl.NCCL_FLOAT16,
    "bfloat16": nccl.NCCL_BFLOAT16,
    "float32": nccl.NCCL_FLOAT32,
    "float64": nccl.NCCL_FLOAT64,
}
_FLOAT_OPS = {"sum": nccl.NCCL_SUM, "prod": nccl.NCCL_PROD, "avg": nccl.NCCL_AVG}
_INTEGER_OPS = {"sum": nccl.NCCL_SUM, "prod": nccl.NCCL_PROD, "min": nccl.NCCL_MIN, "max": nccl.NCCL_MAX}

_TOKEN_BYTES = 16
"""The length of a communicator's name, which is random and so unique."""

_REMOTE_ERROR, _IN_PROGRESS, _TIMEOUT = 6, 7, 8
_LIBRARY_ERRORS = (nccl.NcclError, KeyError)
"""CuPy's table of NCCL's errors ends at 6: for 7 and 8 it raises a KeyError that holds the number."""
_ERRORS = (*_LIBRARY_ERRORS, cupy.cuda.runtime.CUDARuntimeError)


class Names(NamedTuple):
    """The names of a communicator in the notices of ranks that have aborted it."""

    name: str
    family: str
    """The name of all communicators split off one another with the same ranks."""
    joined: list[str]
    """The families of all communicators that this rank is in; a rank that leaves aborts all of them."""


class NcclTransport(Transport):
    """One rank of an NCCL communicator, made by `connect`, on the device that is current then."""

    name = "nccl"
    enqueues = is_recorded = True
    adds_in_rank_order = False

    def __init__(
        self, comm: Any, rank: int, size: int, *, watchdog: Watchdog, host: Transport, names: Names
    ) -> None:
        super().__init__()
        self.rank, self.size, self.timeout_s = rank, size, watchdog.timeout_s
        self._comm, self._watchdog, self._host, self._names = comm, watchdog, host, names
        self._splits = 0
        self._others_know = False  # that this communicator has failed
        self.watch = Watch(
            _who(self),
            watchdog,
            check=self._check,
            destroy=comm.destroy,
            abort=comm.abort,
            notify=self._notify,
            listen=self._listen,
        )
        """The calls in flight, and the error that has ended the communicator."""

    @classmethod
    def connect(cls, host: Transport, *, timeout_s: float | None = None) -> NcclTransport:
        """Make an NCCL communicator over the ranks of `host`, each on its current device.

        Collective. Each rank needs its own device. If it fails on one rank, it fails on all.

        Args:
            host: Carries NCCL's address to all ranks, and later the notices of ranks that have aborted.
            timeout_s: How long a call may take; that of `host` if None.

        Raises:
            BootstrapError: `timeout_s` is not a positive number.
            CommError: NCCL cannot be set up, here or on another rank.
        """
        limit_s = host.timeout_s if timeout_s is None else check_timeout(cls.name, timeout_s)

        def prepare() -> tuple[Watchdog, bytes]:
            """Find out first whether this rank can use its device, so that no rank waits for it in NCCL."""
            watchdog = Watchdog(cupy.cuda.Device().id, limit_s)
            make_id = nccl.get_unique_id if host.rank == 0 else lambda: bytes(UNIQUE_ID_BYTES)
            return watchdog, watchdog.limited(make_id, host.timeout_s / 2, f"{_who(host)}: NCCL")

        watchdog, mine = _together(host, prepare)
        token = secrets.token_bytes(_TOKEN_BYTES)  # after a shrink, NCCL's address may be the same again
        id_and_name = np.frombuffer(mine + token, np.uint8).copy()
        host.broadcast(id_and_name, 0)
        unique_id, name = id_and_name[:-_TOKEN_BYTES].tobytes(), id_and_name[-_TOKEN_BYTES:].tobytes().hex()

        def make() -> Any:
            return nccl.NcclCommunicator(host.size, unique_id, host.rank)

        # Half of the time limit: a rank that waits here for a failed one must still join it in `_together`.
        comm = _together(
            host,
            lambda: watchdog.limited(make, host.timeout_s / 2, f"{_who(host)}: NCCL"),
            undo=lambda comm: watchdog.start(comm.abort),
        )
        family = f"{name}*"
        names = Names(name, family, [family])
        return cls(comm, host.rank, host.size, watchdog=watchdog, host=host, names=names)

    def moves(self, x: Array) -> bool:
        """Device arrays."""
        return not isinstance(x, np.ndarray)

    # Messages ---------------------------------------------------------------------------------------

    def exchange(self, sends: Sequence[Message], recvs: Sequence[Message], *, tag: int = POINT_TO_POINT) -> None:
        """One group of sends and receives; see `Transport.exchange`. NCCL does not compare sizes; see above."""
        self._group(
            "exchange",
            [(peer, address(x), x.nbytes) for peer, x in sends if x.nbytes],
            [(peer, address(x), x.nbytes) for peer, x in recvs if x.nbytes],
        )

    def label_carrier(self) -> Transport | None:
        """See `Transport.label_carrier`. Labels would keep a call from returning before its message has come."""
        return self._host if self.is_checked else None

    def alltoall(self, x: Array, out: Array) -> None:
        """One group of sends and receives, to oneself as well; see `Transport`."""
        source, target = address(x), address(out)
        if source == target:
            source = address(self._without_overlap(x, out))
        nbytes = x.nbytes // self.size
        peers = range(self.size) if nbytes else ()
        self._group(
            "alltoall",
            [(peer, source + peer * nbytes, nbytes) for peer in peers],
            [(peer, target + peer * nbytes, nbytes) for peer in peers],
        )

    def _group(self, name: str, sends: list[tuple[int, int, int]], recvs: list[tuple[int, int, int]]) -> None:
        """Enqueue messages at once: lists of (peer, address, bytes)."""

        def start(stream: int) -> None:
            nccl.groupStart()
            try:
                for peer, pointer, nbytes in sends:
                    self._comm.send(pointer, nbytes, _BYTE, peer, stream)
                for peer, pointer, nbytes in recvs:
                    self._comm.recv(pointer, nbytes, _BYTE, peer, stream)
            finally:
                nccl.groupEnd()

        sent = sum([nbytes for peer, _, nbytes in sends if peer != self.rank])
        self._enqueue(name, sum([nbytes for *_, nbytes in sends + recvs]), sent, start)

    # NCCL's own collectives -------------------------------------------------------------------------

    def allreduce(self, x: Array, out: Array, op: str) -> None:
        """NCCL's own where it reduces as the contract says; see `Transport`."""
        native = self._native(x, op)
        if native is None:
            super().allreduce(x, out, op)
            return
        self._enqueue(
            "allreduce",
            x.nbytes,
            2 * x.nbytes * (self.size - 1) // self.size,
            lambda stream: self._comm.allReduce(address(x), address(out), x.size, *native, stream),
        )

    def reduce(self, x: Array, out: Array | None, root: int, op: str) -> None:
        """NCCL's own where it reduces as the contract says; see `Transport`."""
        native = self._native(x, op)
        if native is None:
            super().reduce(x, out, root, op)
            return
        target = 0 if out is None else address(out)
        self._enqueue(
            "reduce",
            x.nbytes,
            x.nbytes * (self.size - 1) // self.size,
            lambda stream: self._comm.reduce(address(x), target, x.size, *native, root, stream),
        )

    def reduce_scatter(self, x: Array, out: Array, op: str) -> None:
        """NCCL's own where it reduces as the contract says; see `Transport`."""
        native = self._native(x, op)
        if native is None:
            super().reduce_scatter(x, out, op)
            return
        self._enqueue(
            "reduce_scatter",
            x.nbytes,
            x.nbytes * (self.size - 1) // self.size,
            lambda stream: self._comm.reduceScatter(address(x), address(out), out.size, *native, stream),
        )

    def broadcast(self, x: Array, root: int) -> None:
        """NCCL's own; see `Transport`."""
        self._enqueue(
            "broadcast",
            x.nbytes,
            x.nbytes if self.rank == root and self.size > 1 else 0,
            lambda stream: self._comm.broadcast(address(x), address(x), x.nbytes, _BYTE, root, stream),
        )

    def allgather(self, x: Array, out: Array) -> None:
        """NCCL's own; see `Transport`."""
        source, target, nbytes = address(x), address(out), x.nbytes
        self._enqueue(
            "allgather",
            out.nbytes,
            nbytes * (self.size - 1),
            lambda stream: self._comm.allGather(source, target, nbytes, _BYTE, stream),
        )

    def barrier(self) -> None:
        """Return when the streams of all ranks have reached this point. Waits for the device."""
        self.agree(True)

    def agree(self, flag: bool) -> bool:
        """Whether every rank gave True. Waits for the device."""
        flags = cupy.empty(1, np.uint8)
        flags.set(np.array([flag], np.uint8))
        self.allreduce(flags, flags, "min")
        self.watch.drain(math.inf)
        self.watch.check_usable()
        return bool(flags.get()[0])

    def _native(self, x: Array, op: str) -> tuple[int, int] | None:
        """NCCL's dtype and operation for `x` and `op`; None where NCCL's result would break the contract."""
        name = dtype_name(x.dtype)
        ops = _FLOAT_OPS if name in FLOATS else _INTEGER_OPS
        if name not in _DTYPES or op not in ops:
            return None
        # When one rank alone averages an array, NCCL before 2.29.7 does not write the end of it.
        return _DTYPES[name], ops["sum" if self.size == 1 and op == "avg" else op]

    # Enqueuing, and watching ------------------------------------------------------------------------

    def _enqueue(self, name: str, nbytes: int, sent: int, start: Callable[[int], None]) -> None:
        """Let `start` enqueue NCCL's work on the current stream, and watch it.

        Args:
            name: The call, for messages.
            nbytes: The bytes that it moves; for 0, nothing is enqueued.
            sent: The bytes to count as sent.
            start: Enqueues on the stream that it is given.
        """
        if nbytes == 0:
            self.watch.check_usable()
            return
        recording = current()
        if recording is not None:
            recording.steps.append(partial(self._enqueue, name, nbytes, sent, start))
        stream = cupy.cuda.get_current_stream()
        try:
            call = None
            if not stream.is_capturing():  # in a CUDA graph, the call is not made now
                call = self.watch.begin(name, nbytes, self._limit_s or self._timeout_s)
            try:
                self.watch.inside = True
                self.watch.check_usable()
                start(stream.ptr)
            finally:
                self.watch.inside = False
            if call is not None:
                events = self.watch.spare_events
                event = events.pop() if events else cupy.cuda.Event(disable_timing=True)
                event.record(stream)
                call.event = event
        except BaseException as exc:
            self._abort_after(name, exc)
            raise
        self.sent_bytes += sent

    def _abort_after(self, name: str, exc: BaseException) -> None:
        """Abort, since this rank has not made a call that the others make; raises the error of that."""
        who = f"{_who(self)}: {name}"
        if isinstance(exc, CommError):  # it was aborted before
            return
        if isinstance(exc, _ERRORS):
            self.watch.fail(*_translated(exc, who))
            self.watch.check_usable(exc)
        self.watch.fail(CommError, f"{who}: {type(exc).__name__}: {exc}", is_reported=True)

    def interrupted(self, error: BaseException, arrays: object) -> None:
        """See `Transport.interrupted`. Aborts, and notifies the other ranks."""
        if self.size > 1:
            super().interrupted(error, arrays)
            reason = f"a call was interrupted by {type(error).__name__}: {error}"
            self.watch.fail(CommError, f"{_who(self)}: {reason}", is_reported=True)

    def _notify(self, error: CommError) -> None:
        """Notify the other ranks, unless they know, that this one has aborted."""
        if not self._others_know:
            self._others_know = True
            self._host.notify_failure(self._names.name, error)

    def _listen(self) -> None:
        """Raise if another rank has aborted."""
        error = self._host.poll_failures((self._names.name, self._names.family))
        if error is not None:
            self._others_know = True
            raise error

    def _check(self) -> None:
        """Raise if NCCL has found an error."""
        try:
            self._comm.check_async_error()
        except _LIBRARY_ERRORS as exc:
            if _code(exc) != _IN_PROGRESS:
                kind, reason = _translated(exc, _who(self))
                raise kind(reason) from exc

    # Groups, failure and end ------------------------------------------------------------------------

    def split(self, color: int, key: int) -> Transport:
        """See `Transport.split`. Waits for the device: NCCL splits no communicator with calls in flight."""
        self.watch.drain(math.inf)
        self.watch.check_usable()
        try:
            comm = self._watchdog.limited(
                lambda: self._comm.commSplit(color, key), self.timeout_s, f"{_who(self)}: split: NCCL"
            )
        except CommTimeout as exc:
            self.watch.stuck = True
            self.watch.fail(CommTimeout, str(exc))
            raise
        except BaseException as exc:
            self._abort_after("split", exc)
            raise
        self._splits += 1
        name = f"{self._names.name}.{self._splits}:{color}"
        family, joined = self._names.family, self._names.joined
        if comm.size() != self.size:
            family = f"{name}*"
            joined.append(family)
        return NcclTransport(
            comm,
            comm.rank_id(),
            comm.size(),
            watchdog=self._watchdog,
            host=self._host,
            names=Names(name, family, joined),
        )

    def subgroup(self, ranks: Sequence[int], name: str, host: Transport | None = None) -> Transport:
        """See `Transport.subgroup`. A new communicator, set up over `host`."""
        if host is None:
            return super().subgroup(ranks, name, host)
        return NcclTransport.connect(host, timeout_s=self.timeout_s)

    def shrink(self, host: Transport | None = None) -> Transport:
        """A new communicator over the survivors, set up over `host`."""
        if host is None:
            raise UnsupportedError("nccl: the survivors need a host transport to set it up again; pass host=")
        self.abort()
        return NcclTransport.connect(host, timeout_s=self.timeout_s)

    def abort(self, exit_code: int = 1) -> None:
        """End the calls in flight on this rank, and notify its peers if possible. No process ends."""
        self.watch.abort()

    def leave(self, reason: str | None = None) -> bool:
        """See `Transport.leave`; with a `reason`, the calls in flight on this rank end at once.

        This includes all communicators split off from this one, also those of lanes.
        """
        if reason is not None:
            self._others_know = True
            for family in self._names.joined:
                self._host.notify_failure(family, CommAborted(reason))
            self._watchdog.abandon(reason)
        return True

    def close(self) -> None:
        """Free NCCL's communicator, once the calls in flight have ended.

        Collective.

        Raises:
            CommError: An error that no call has raised yet.
        """
        super().close()
        self.watch.close(self.timeout_s)


def version() -> int:
    """NCCL's version as a number: 23203 for 2.32.3.

    Raises:
        CommError: NCCL does not answer.
    """
    try:
        return int(nccl.get_version())
    except _LIBRARY_ERRORS as exc:
        raise CommError(f"NCCL failed: {exc}") from exc


def _together(host: Transport, make: Callable[[], Any], undo: Callable[[Any], object] = lambda made: None) -> Any:
    """Call `make`; if it fails on any rank, undo it and raise on all ranks. Collective."""
    made, failure = None, None
    try:
        made = make()
    except CommError as exc:
        failure = exc
    except Exception as exc:
        kind, reason = _translated(exc, _who(host))
        failure = kind(reason)
        failure.__cause__ = exc
    text = "" if failure is None else f"{'late' if isinstance(failure, CommTimeout) else 'here'}{failure}"
    everyones = np.empty((host.size, _REASON_BYTES), np.uint8)
    host.allgather(text_row(text, _REASON_BYTES), everyones)
    reasons = texts_of(everyones)
    failed = [rank for rank, reason in enumerate(reasons) if reason]
    if not failed:
        return made
    if failure is None:
        undo(made)
    # A rank that waited for a failed one was late because of it.
    first = next((rank for rank in failed if reasons[rank].startswith("here")), failed[0])
    reason = reasons[first][len("here") :]
    if failure is None:
        raise CommError(f"{_who(host)}: NCCL could not be set up on rank {first}: {reason}")
    if isinstance(failure, CommTimeout) and reasons[first].startswith("here"):
        raise CommTimeout(f"{failure}; on rank {first}: {reason}")
    raise failure


_REASON_BYTES = 1024
"""Bytes of the reason of a failure that the other ranks receive."""


def _who(transport: Transport) -> str:
    return f"rank {transport.rank} of {transport.size}"


def _code(exc: BaseException) -> int:
    """The number of an error of NCCL; see `_LIBRARY_ERRORS`."""
    return int(exc.args[0] if isinstance(exc, KeyError) else exc.status)  # type: ignore[attr-defined]


def _translated(exc: BaseException, who: str) -> tuple[type[CommError], str]:
    """Translate an error of CUDA, NCCL or others: our exception class and its message."""
    if isinstance(exc, cupy.cuda.runtime.CUDARuntimeError):
        return CommError, f"{who}: CUDA failed: {explained(exc)}"
    if not isinstance(exc, _LIBRARY_ERRORS):
        return CommError, f"{who}: {type(exc).__name__}: {exc}"
    code = _code(exc)
    if code == _REMOTE_ERROR:
        return RankFailed, f"{who}: a peer died or cannot be reached ({exc})"
    if code == _TIMEOUT:
        return CommTimeout, f"{who}: NCCL gave up waiting for a peer"
    if code == _IN_PROGRESS:
        return CommError, f"{who}: NCCL works without blocking, which is not supported: unset NCCL_COMM_BLOCKING"
    return CommError, f"{who}: NCCL failed: {exc}"
