"""Messages between the ranks of an MPI communicator, as bytes, so that every dtype can be sent."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from mpi4py import MPI

from ...arrays import Array, as_buffer, as_bytes
from ...errors import WHICH_CALLS, CommMismatch
from ..counted_calls import CountedCalls
from ..flow import FEW_RANKS, POINT_TO_POINT, Message, Wait
from . import tuning
from .endpoint import Endpoint
from .paced_messages import PacedMessages

NOTHING: Array = np.empty(0, np.uint8)

_FEW = 2
"""The largest number of messages each way that are received in the order of their list, which takes less time."""


class Messages:
    """Exchanges of one rank of a communicator.

    Args:
        endpoint: Waits for MPI.
    """

    few_ranks, at_once_bytes = FEW_RANKS, 0

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint, self._comm, self._calls = endpoint, endpoint.comm, endpoint.calls
        self.rank, self.size = endpoint.rank, endpoint.size
        self.others = endpoint.calls.others

    def exchange(self, sends: Sequence[Message], recvs: Sequence[Message], *, tag: int = POINT_TO_POINT) -> None:
        """All messages at once, non-blocking; see `Transport.exchange`."""
        endpoint = self._endpoint
        if self._calls.broken is not None or endpoint.begun:
            endpoint.check_idle()
        in_turn = len(sends) <= _FEW >= len(recvs)
        for _, x in (*sends, *recvs):
            in_turn = in_turn and x.nbytes < tuning.MESSAGE_BYTES
        if not in_turn:
            self._exchange_many(sends, recvs, tag)
            return
        if self.size == len(sends) == len(recvs) == 1:
            x, out = sends[0][1], recvs[0][1]
            if (x.dtype, x.size) == (out.dtype, out.size) and not self._comm.Iprobe(0, tag):
                copy(x, out)
                return
        started: list[MPI.Request] = []
        receive, missing = None, len(recvs)
        try:
            for dest, x in sends:
                started.append(self._comm.Isend([as_buffer(x), MPI.BYTE], dest, tag))
                self._calls.sent_bytes += x.nbytes if dest != self.rank else 0
            for source, out in recvs:
                message, nbytes = self._next_message(source, tag)
                into = as_buffer(out) if nbytes == out.nbytes else np.empty(nbytes, np.uint8)
                receive = message.Irecv([into, MPI.BYTE])
                if not receive.Test():
                    endpoint.poll(receive.Test, peers=(source,))
                missing -= 1
                if nbytes != out.nbytes:
                    raise self._unexpected(source, out, nbytes)
            for (dest, _), send in zip(sends, started, strict=True):
                if not send.Test():
                    endpoint.poll(send.Test, peers=(dest,))
            for source, out in recvs:
                if out.nbytes > tuning.EAGER_BYTES and endpoint.window is not None:
                    endpoint.window.check((source,))  # a shorter message holds a copy
        except CommMismatch as exc:
            if tag != POINT_TO_POINT or missing or not all(send.Test() for send in started):
                endpoint.abort_after(exc, (started, sends))
            raise
        except BaseException as exc:
            raise endpoint.abort_after(exc, (started, receive, sends, recvs)) from exc

    def _exchange_many(self, sends: Sequence[Message], recvs: Sequence[Message], tag: int) -> None:
        """`exchange` of many messages, in the order in which they arrive, or of messages that are split."""
        endpoint = self._endpoint
        requests: list[MPI.Request] = []
        statuses: list[MPI.Status] = []
        incoming: dict[int, deque[Array]] = {}  # by peer, in order
        for peer, out in recvs:
            incoming.setdefault(peer, deque()).extend(_pieces(out))

        def wait(done: Callable[[], bool]) -> None:
            if not done():
                endpoint.poll(done, peers={peer for peer, _ in (*sends, *recvs)} - {self.rank})

        try:
            for peer, x in sends:
                for piece in _pieces(x):
                    requests.append(self._comm.Isend([piece, MPI.BYTE], peer, tag))
                self._calls.sent_bytes += x.nbytes if peer != self.rank else 0
            wait(lambda: self._receive(incoming, requests, tag))
            statuses += [MPI.Status() for _ in requests]
            wait(lambda: MPI.Request.Testall(requests, statuses))
            if endpoint.window is not None:
                endpoint.window.check(peer for peer, _ in recvs if peer != self.rank)
        except CommMismatch as exc:
            if tag != POINT_TO_POINT or incoming or not MPI.Request.Testall(requests):
                endpoint.abort_after(exc, (requests, sends, recvs))
            raise
        except BaseException as exc:
            raise endpoint.abort_after(exc, (requests, sends, recvs), statuses) from exc

    def _next_message(self, peer: int, tag: int) -> tuple[MPI.Message, int]:
        """Wait for a message, and match it; returns its size in bytes as well."""
        probe, status = self._comm.Improbe, MPI.Status()
        for _ in range(tuning.PROBES):
            message = probe(peer, tag, status)
            if message is not None:
                return message, status.Get_count(MPI.BYTE)
        found: list[MPI.Message] = []

        def has_come() -> bool:
            message = probe(peer, tag, status)
            if message is not None:
                found.append(message)
            return message is not None

        self._endpoint.poll(has_come, peers=(peer,))
        return found[0], status.Get_count(MPI.BYTE)

    def _unexpected(self, peer: int, out: Array, nbytes: int) -> CommMismatch:
        """The error to raise if `peer` has sent `nbytes` and not the size of `out`."""
        return CommMismatch(
            f"rank {self.rank} expected {out.nbytes} bytes from rank {peer}, which sent {nbytes}; {WHICH_CALLS}"
        )

    def _receive(self, incoming: dict[int, deque[Array]], requests: list[MPI.Request], tag: int) -> bool:
        """Start to receive the messages that have arrived; returns whether no more are to come."""
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
                self._endpoint.poll(message.Irecv([np.empty(nbytes, np.uint8), MPI.BYTE]).Test)
                raise self._unexpected(peer, out, nbytes)
            requests.append(message.Irecv([out, MPI.BYTE]))
        return not incoming

    def start(self, paced: PacedMessages, sends: Sequence[Message], recvs: Sequence[Message]) -> Wait:
        """Begin an exchange of a call that the ranks have agreed on; see `Flow.begin`."""
        endpoint = self._endpoint
        if self._calls.broken is not None:
            self._calls.check_usable()
        endpoint.begun[id(paced)] = paced
        try:
            ended = paced.add(sends, recvs)
        except BaseException as exc:
            raise endpoint.abort_after(exc, (sends, recvs)) from exc
        self._calls.sent_bytes += sum(x.nbytes for _, x in sends)

        def wait() -> None:
            try:
                endpoint.poll(ended, sleeping=paced.sleeping_wait)
                if endpoint.window is not None:
                    endpoint.window.check()
            except BaseException as exc:
                raise endpoint.abort_after(exc, (paced, sends, recvs)) from exc
            if paced.is_idle():
                endpoint.begun.pop(id(paced), None)

        return wait


class MPIChannel(CountedCalls):
    """A channel over the MPI communicator of a transport, for another thread; see `Transport.channel`.

    Args:
        comm: The communicator.
        timeout_s: How long a call may wait for its peers.
        endpoint: Makes the endpoint of these calls.
    """

    name = "mpi"

    def __init__(self, comm: MPI.Comm, timeout_s: float, endpoint: Callable[[CountedCalls], Endpoint]) -> None:
        super().__init__()
        self.rank, self.size, self.timeout_s = comm.Get_rank(), comm.Get_size(), timeout_s
        self.exchange = Messages(endpoint(self)).exchange
        """See `Transport.exchange`."""


def copy(x: Array, out: Array) -> None:
    """Copy `x` to `out`, as every collective of one rank does."""
    if out is not x:
        flat(out)[...] = flat(x)


def flat(x: Array) -> Array:
    """View contiguous `x` as a row; `x` itself if it is one."""
    return x if x.ndim == 1 else x.reshape(-1)


def _pieces(x: Array) -> Iterator[Array]:
    """View `x` as bytes, in messages that MPI can count; the last is shorter than `MESSAGE_BYTES`, or empty.

    So no array is taken for the beginning of a larger one.
    """
    whole = as_bytes(x)
    for start in range(0, whole.size + 1, tuning.MESSAGE_BYTES):
        yield whole[start : start + tuning.MESSAGE_BYTES]
