"""Messages between the ranks of an MPI communicator, as bytes, so that every dtype can be sent."""

from __future__ import annotations

import functools
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress

import numpy as np
from mpi4py import MPI

from ...arrays import Array, DType, as_buffer, as_bytes
from ...errors import WHICH_CALLS, CommMismatch, CommTimeout
from ..flow import FEW_RANKS, LABELLED, POINT_TO_POINT, Message, Wait
from ..labels import LABEL_BYTES, Ended, Labelled, Mailbox, Receive, empty_for, finish, taken
from . import tuning
from .endpoint import Endpoint
from .paced_messages import PacedMessages

NOTHING: Array = np.empty(0, np.uint8)

_PIECES = LABELLED + 1
"""The kind of the pieces of a long array, which its label follows."""

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
        self._mailbox, self._taking = Mailbox(), threading.Lock()
        """The lock is held while a labelled message is taken from MPI: its array follows its label."""
        self._request: MPI.Request | None = None
        """That of the message being taken; kept after an error, since it may be lost: then no more are taken."""
        self._frames: dict[int, MPI.Prequest] = {}
        """Receive the next label of a rank into the frame, one at a time; to begin them anew takes longer."""
        self._deadline_s: float | None = None
        """Until when it may take; until that of the call if None."""
        self._frame = frame = bytearray(LABEL_BYTES + tuning.FRAME_BYTES)
        self._payload: Callable[[DType, tuple[int, ...]], Array] = functools.lru_cache(256)(
            lambda dtype, shape: np.frombuffer(frame, dtype, math.prod(shape), LABEL_BYTES).reshape(shape)
        )
        """The array behind the label in the frame."""

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
        started: list[MPI.Request] = []
        receive = None
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
                if nbytes != out.nbytes:
                    raise self._unexpected(source, out, nbytes)
            for (dest, _), send in zip(sends, started, strict=True):
                if not send.Test():
                    endpoint.poll(send.Test, peers=(dest,))
            for source, out in recvs:
                if out.nbytes > tuning.EAGER_BYTES and endpoint.window is not None:
                    endpoint.window.check((source,))  # a shorter message holds a copy
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
        except BaseException as exc:
            raise endpoint.abort_after(exc, (requests, sends, recvs), statuses) from exc

    # Messages with labels ---------------------------------------------------------------------------

    def exchange_labelled(self, sends: Sequence[Labelled], receives: Sequence[Receive]) -> None:
        """See `Transport.exchange_labelled`. A short array goes behind its label; a longer one goes before it."""
        endpoint = self._endpoint
        requests: list[MPI.Request] = []
        if self._calls.broken is not None or endpoint.begun:
            endpoint.check_idle()
        try:
            self._begin_sends(sends, requests)
            if len(receives) <= _FEW:
                while receives and (rest := self._after_next(receives, requests)) is not None:
                    receives = rest
            for receive in receives:
                if receive.message is None:
                    self._mailbox.begin(receive)
            if not receives:
                for request in requests:
                    if not request.Test():
                        break
                else:
                    return
            if not self._have_ended(requests, receives):
                peers = self._peers(sends, receives)
                endpoint.poll(lambda: self._have_ended(requests, receives), peers=peers)
        except BaseException as exc:
            raise self._failed(exc, sends, receives, requests) from exc
        finish(receives, self.rank)

    def _after_next(self, receives: Sequence[Receive], requests: list[MPI.Request]) -> Sequence[Receive] | None:
        """Wait for the next message of the first source, if no receive is before these.

        Returns the receives that it does not end; None if it ends none. In most calls it ends one: it fits.
        """
        receive, rest, frame = receives[0], receives[1:], self._frame
        if len(receive.sources) > 1:
            return None
        (peer,) = receive.sources
        with self._taking:
            if not self._mailbox.is_idle or self._request is not None:
                return None
            self._receive_frame(peer, None)
            if not frame.startswith(receive.expected):
                receive = next((each for each in receives if each.takes(peer, frame)), receive)
                rest = [each for each in receives if each is not receive]
            out = receive.out
            if out is None or not frame.startswith(receive.expected):
                self._deliver(peer, requests, receive)
                return None
            if out.nbytes > tuning.FRAME_BYTES:
                self._receive_pieces(out, peer, requests)
            elif out.nbytes:
                out[...] = self._payload(out.dtype, out.shape)
            self._request = None
        receive.source, receive.found = peer, receive.expected
        return rest

    def begin_labelled(self, sends: Sequence[Labelled], receives: Sequence[Receive]) -> Ended:
        """See `Transport.begin_labelled`."""
        endpoint, requests, peers = self._endpoint, list[MPI.Request](), self._peers(sends, receives)
        late = endpoint.detector.timeout()  # of this call: another one may be in progress later
        self._calls.check_usable()
        try:
            self._begin_sends(sends, requests)
            for receive in receives:
                self._mailbox.begin(receive)
        except BaseException as exc:
            raise self._failed(exc, sends, receives, requests) from exc

        def ended(deadline_s: float) -> bool:
            try:
                if not self._have_ended(requests, receives, deadline_s):
                    endpoint.listen(peers)
                    if time.monotonic() > deadline_s:
                        raise endpoint.overdue(peers, late)
                    return False
            except BaseException as exc:
                raise self._failed(exc, sends, receives, requests) from exc
            finish(receives, self.rank)
            return True

        return ended

    def _peers(self, sends: Sequence[Labelled], receives: Sequence[Receive]) -> set[int]:
        return {peer for peer, *_ in sends}.union(*(each.sources for each in receives)) - {self.rank}

    def _begin_sends(self, sends: Sequence[Labelled], requests: list[MPI.Request]) -> None:
        for peer, x, of in sends:
            if x.nbytes <= tuning.FRAME_BYTES:
                requests.append(self._comm.Isend([of + x.tobytes(), MPI.BYTE], peer, LABELLED))
            else:  # the label last: a rank that has it need not wait for the rest
                requests += [self._comm.Isend([piece, MPI.BYTE], peer, _PIECES) for piece in _pieces(x)]
                requests.append(self._comm.Isend([of, MPI.BYTE], peer, LABELLED))
            if peer != self.rank:
                self._calls.sent_bytes += x.nbytes

    def _have_ended(
        self, requests: list[MPI.Request], receives: Sequence[Receive], deadline_s: float | None = None
    ) -> bool:
        """Take the messages that have come; returns whether there is nothing to wait for any more.

        A message that comes in part is waited for until `deadline_s`; until that of the call if None.
        """
        for receive in receives:
            if receive.message is None and not self._taking.locked():
                with self._taking:
                    for peer in receive.sources:
                        if self._request is None and self._comm.Iprobe(peer, LABELLED):
                            self._receive_frame(peer, deadline_s)
                            self._deliver(peer, requests)
        return all(each.message is not None for each in receives) and MPI.Request.Testall(requests)

    def _receive_frame(self, peer: int, deadline_s: float | None) -> None:
        """Receive a label, and the array behind it, into the frame, which is as long as any."""
        self._deadline_s, request = deadline_s, self._frames.get(peer)
        if request is None:
            request = self._frames[peer] = self._comm.Recv_init([self._frame, MPI.BYTE], peer, LABELLED)
        self._request = request
        request.Start()
        if not request.Test():
            self._endpoint.poll(request.Test, peers=(peer,), deadline_s=deadline_s)

    def _deliver(self, peer: int, requests: list[MPI.Request], expecting: Receive | None = None) -> None:
        """Give the message in the frame to the receive that takes it; receive a long array first."""
        of = bytes(self._frame[:LABEL_BYTES])
        if expecting is None or not expecting.takes(peer, of):
            expecting = self._mailbox.claim(peer, of)
        array = empty_for(of) if expecting is None else expecting.target(of)
        if array.nbytes > tuning.FRAME_BYTES:
            self._receive_pieces(array, peer, requests)
        elif array.nbytes:
            array[...] = self._payload(array.dtype, array.shape)
        self._mailbox.put(peer, of, array, expecting)
        self._request = None

    def _receive_pieces(self, array: Array, peer: int, requests: list[MPI.Request]) -> None:
        """Receive a long array, whose label has come; `requests` get those of its pieces, should this fail."""
        pieces = [self._comm.Irecv([piece, MPI.BYTE], peer, _PIECES) for piece in _pieces(array)]
        requests += pieces
        if not all(map(MPI.Request.Test, pieces)):
            ended = functools.partial(MPI.Request.Testall, pieces)
            self._endpoint.poll(ended, peers=(peer,), deadline_s=self._deadline_s)
        if self._endpoint.window is not None and peer != self.rank:
            self._endpoint.window.check((peer,))

    def drop(self) -> bool:
        """Drop the messages that have come and that nobody has received; returns whether none is on its way.

        Open MPI gives those of a communicator that is freed to the next one.
        """
        status = MPI.Status()
        with suppress(MPI.Exception):  # a rank has died
            for inactive in self._frames.values():
                inactive.Free()
            for tag in LABELLED, _PIECES:
                while (message := self._comm.Improbe(MPI.ANY_SOURCE, tag, status)) is not None:
                    unused = np.empty(status.Get_count(MPI.BYTE), np.uint8)
                    request = message.Irecv([unused, MPI.BYTE])
                    if not request.Test():
                        self._endpoint.keep_for_ever((unused, request))
                        return False
        return True

    def _failed(
        self,
        error: BaseException,
        sends: Sequence[Labelled],
        receives: Sequence[Receive],
        requests: list[MPI.Request],
    ) -> BaseException:
        """Abort this communicator; returns the error to raise."""
        if isinstance(error, CommTimeout):
            waiting = next((each for each in receives if each.message is None), None)
            if waiting is not None:
                error.args = (f"{error}; it waited for {waiting}{self._mailbox.missing(waiting)}",)
            else:
                error.args = (f"{error}; it waited until {' and '.join(map(taken, sends))}",)
        return self._endpoint.abort_after(error, (sends, receives, requests, self._request, self._frame))

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


def copy(x: Array, out: Array) -> None:
    """Copy `x` to `out`, as every collective of one rank does."""
    if out is not x:
        flat(out)[...] = flat(x)


def flat(x: Array) -> Array:
    """View contiguous `x` as a row; `x` itself if it is one."""
    return x if x.ndim == 1 else x.reshape(-1)


def _pieces(x: Array) -> list[Array]:
    """View `x` as messages that MPI can count; the last is shorter than `MESSAGE_BYTES`, or empty.

    So no array is taken for the beginning of a larger one.
    """
    if x.nbytes < tuning.MESSAGE_BYTES:
        return [as_buffer(x)]
    whole = as_bytes(x)
    starts = range(0, whole.size + 1, tuning.MESSAGE_BYTES)
    return [whole[start : start + tuning.MESSAGE_BYTES] for start in starts]
