"""The message protocol over gloo: frames, mismatches, and failures.

Gloo ends the process when a message is longer than the posted array, and reports nothing when it is shorter. So
every message begins with a frame, which holds the size of the message and its first bytes. The receiver posts
memory for the largest frame ahead, so that a short message is sent at once, whatever the receiver is doing. The
rest of a long message follows once both ends are known to expect the same size:

    one way    sender   -- frame --> receiver     which then posts the array for the rest
                        -- rest -->
    swap       both post their arrays; frames cross, and hold the size that their sender expects;
               each then sends its rest at once. Used in collectives, between ranks that send one message each.

A labelled message has its label in the frame. A thread for each rank that this one has received such a message
from takes them all, since gloo cannot be asked whether one has come; the first receive of its tag gets it.

In a collective call, ranks first compare the call: its name, dtype, size, op and root. A number derived from
these is in the frames of a round among all ranks. The first messages of most calls are such a round, so that the
comparison is free. If numbers differ, all ranks detect it, and exchange the descriptions of their calls for the
error that all of them raise. Other mismatched messages, and the end of a peer, are detected by one rank only. It
posts its error in the store and closes its connections, so that ranks that wait for it raise the same error.

A call that follows a plan (`bagua_comm.transports.plan`) is a collective of gloo that begins without a round: no
rank finishes it without all others. A rank whose call differs does not begin it, but compares its own call. The
others look for a frame of that round while they wait, and then compare theirs. Several may have begun: a rank
waits for them in order, and so compares the first one that another rank does not make.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from datetime import timedelta
from typing import Any, ParamSpec, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch._C._autograd import _enable_record_function

from bagua_comm import CommAborted, CommError, CommMismatch, CommTimeout, RankFailed
from bagua_comm.arrays import Array, as_bytes, text_row, texts_of
from bagua_comm.errors import WHICH_CALLS
from bagua_comm.flight.batches import named
from bagua_comm.transports import Transport
from bagua_comm.transports.call_state import MAX_TIMEOUT_S
from bagua_comm.transports.flow import COLLECTIVE, LABELLED, Message
from bagua_comm.transports.labels import Ended, Labelled, Mailbox, Receive, empty_for, finish, label
from bagua_comm.transports.notices import different_calls
from bagua_comm.transports.plan import Plan

from .children import kept_in_children
from .frames import BODY_BYTES, HEADER_BYTES, Frame, rest_of, swaps_of
from .verdicts import SharedError, Verdict, of_same_kind
from .waiter import BUFFERED_BYTES, CHECK_S, Pending, in_background, wait_for_collective, wait_watched

TEXT_BYTES = 256
"""The size of the description of a call, which ranks exchange when their calls differ."""

UNSENT_FRAMES, BEGUN_FRAMES = 64, 1024
"""How many short messages to one rank may be unreceived before `send` waits, and before `isend` does."""

_HANG_UP_S = 2.0
"""How long to try to close connections."""

_POST_S = 0.3
"""How long a rank may take to store why it has given up after a timeout."""

_REST_TAG, _SWAP_TAG, _ABORT_TAG = 4, 8, 9
"""Frames have the tags of messages, 0 to 3; the rest of a one-way message has its tag plus 4."""

_TEXTS, LEAVING, _NOT_YET = -1, -2, -3
"""Numbers that belong to no call: of descriptions of calls that differ, of the last frames before closing, and of
frames that have not come."""

_FIRST = 1 << 32
"""Flag in the number of a call, in the round in which ranks compare it. Its lower bits are made of the call."""

SERIAL_SHIFT, SERIALS = 33, 1 << 30
"""Its upper bits count the calls, so that a frame for a later call is not taken for one of this call."""


P = ParamSpec("P")
T = TypeVar("T")
_Error = TypeVar("_Error", bound=SharedError)


def unrecorded(start: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
    """Start an operation of gloo that PyTorch's profiler does not record.

    The profiler keeps its record of an operation until the profile ends. An operation that ends later writes into
    the freed memory; here, the messages that are posted ahead do. Whether a profile of another thread records
    this one as well cannot be asked.
    """
    try:
        _enable_record_function(False)
        return start(*arguments, **named)
    finally:
        _enable_record_function(True)


class FramedTransport(Transport):
    """Abstract base of a transport over gloo: it sends and receives messages.

    Args:
        rank: This rank.
        size: Number of ranks.
        timeout_s: How long a call may wait for a peer.
    """

    def __init__(self, rank: int, size: int, timeout_s: float) -> None:
        super().__init__()
        self.rank, self.size, self.timeout_s = rank, size, timeout_s
        self._timeout = timedelta(seconds=self.timeout_s)
        self._gloo: Any = None
        self._verdict: Verdict | None = None
        self._leaving = False
        self._number = 0  # of the collective call, the same on all ranks
        self._serial = 0  # of the collective call, as they are compared
        self._text = ""  # of the collective call
        self.plan: Plan = Plan()
        self._posted: dict[tuple[int, int], Frame] = {}  # by (peer, tag): posted for the next message
        self._sent: dict[tuple[int, int], deque[Frame]] = {}  # by (peer, tag): may still be pending
        self._free: list[Frame] = []
        self._mailbox = Mailbox()  # labelled messages, those of this rank to itself, too
        self._readers: dict[int, Future[RuntimeError]] = {}  # by peer: take its labelled messages
        self._interrupted: object = None  # arrays that gloo may use for as long as a connection is open

    def _round(self, send: Callable[[int], Array], receive: Callable[[int], Array], *, first: bool) -> None:
        """Send an array to each of the other ranks, and receive one from each.

        Collective. Sizes match if all ranks make the same call.
        """
        sends, recvs = [[(peer, of(peer)) for peer in self.others()] for of in (send, receive)]
        self._exchange(sends, recvs, COLLECTIVE, swaps_of(sends, recvs), first)

    def _exchange(
        self,
        sends: Sequence[Message],
        recvs: Sequence[Message],
        tag: int,
        swaps: dict[int, tuple[Array, Array]],
        first: bool = False,
    ) -> None:
        """Implementation of `exchange`; if `first`, the frames compare the call between all ranks."""
        number = self._number if tag == COLLECTIVE else 0
        if first:
            number |= _FIRST
        works: list[Pending] = []
        frames = []
        for peer, out in recvs:
            frames.append(None if peer == self.rank else self._next_frame(peer, tag))
            if peer in swaps and out.nbytes > BODY_BYTES:
                works.append((peer, self._receive_rest(peer, _SWAP_TAG, out)))
        for peer, x in sends:
            if peer == self.rank:
                self._mailbox.put(peer, _own(tag, x), x.copy())
                continue
            self._send_frame(peer, tag, x, swaps[peer][1].nbytes if peer in swaps else -1, number)
            if x.nbytes > BODY_BYTES and peer not in swaps:
                works.append((peer, self._send_rest(peer, _REST_TAG + tag, x)))
            self.sent_bytes += x.nbytes

        if first:
            self._compare_numbers([(peer, frame) for (peer, _), frame in zip(recvs, frames, strict=True)], number)
        for (peer, out), frame in zip(recvs, frames, strict=True):
            if frame is None:
                self._receive_own(out, tag)
                continue
            if not first:
                self._wait_for_frame(peer, frame)
            x = swaps[peer][0] if peer in swaps else None
            head = [out.nbytes, -1 if x is None else x.nbytes, number]
            if frame.head[:3].tolist() != head:
                raise self._mismatch(peer, frame, head)
            if x is not None and x.nbytes > BODY_BYTES:
                works.append((peer, self._send_rest(peer, _SWAP_TAG, x)))
            if x is None and out.nbytes > BODY_BYTES:
                works.append((peer, self._receive_rest(peer, _REST_TAG + tag, out)))
            if out.nbytes:
                begin = frame.body[: out.nbytes]
                as_bytes(out)[: begin.size] = begin

        longest = max((x.nbytes for _, x in (*sends, *recvs)), default=0)
        self._wait_for_rests(works, longest)
        for peer, _ in sends:
            # In a collective the receiver is about to receive it.
            self._reclaim(peer, tag, 0 if tag == COLLECTIVE else UNSENT_FRAMES)
        # Not earlier: if the peer has left meanwhile, its last message would be lost.
        for (peer, _), frame in zip(recvs, frames, strict=True):
            if frame is not None:
                self._post_ahead(peer, tag, frame)

    # Messages with labels ---------------------------------------------------------------------------

    def _exchange_labelled(self, sends: Sequence[Labelled], receives: Sequence[Receive]) -> None:
        """Implementation of `exchange_labelled`."""
        works, ended = self._begin_sends(sends), self._begin_receives(receives, alone=False)
        wrong: CommMismatch | None = None
        try:
            while not ended(self.deadline_s()):
                self._mailbox.wait(receives, min(CHECK_S, self.deadline_s() - time.monotonic()))
        except CommMismatch as exc:  # the peers still wait for what this rank sends
            wrong = exc
        self._wait_for_rests(works, max((x.nbytes for _, x, _ in sends), default=0))
        for peer in {peer for peer, *_ in sends}:
            self._reclaim(peer, LABELLED, UNSENT_FRAMES)
        if wrong is not None:
            raise wrong

    def _begin_labelled(self, sends: Sequence[Labelled], receives: Sequence[Receive]) -> Ended:
        """Implementation of `begin_labelled`: a thread waits until long messages are sent."""
        works = self._begin_sends(sends)
        received = self._begin_receives(receives, alone=True)
        for peer in {peer for peer, *_ in sends}:
            self._reclaim(peer, LABELLED, BEGUN_FRAMES)
        if not works:
            return received
        # Its limit is that of the request, and not of another call that is in progress.
        forever_s = time.monotonic() + MAX_TIMEOUT_S
        sent = in_background(lambda: wait_watched(works, forever_s, self._check_connection))

        def ended(deadline_s: float) -> bool:
            if sent.done() and (failure := sent.result()) is not None:
                raise self._translate(failure[1], failure[0], alone=True)
            if not sent.done() and time.monotonic() > deadline_s:
                peers = sorted({peer for peer, _ in works})
                text = f"rank {self.rank} waited for {named(peers)} to receive its message, until its time limit"
                raise self._close_with(CommTimeout(text))
            return received(deadline_s) and sent.done()

        return ended

    def _begin_sends(self, sends: Sequence[Labelled]) -> list[Pending]:
        """Send frames, and begin to send the rests of long messages."""
        works: list[Pending] = []
        for peer, x, of in sends:
            if peer == self.rank:
                self._mailbox.put(peer, of, x.copy())
                continue
            self._send_frame(peer, LABELLED, x, -1, 0, of)
            if x.nbytes > BODY_BYTES:
                works.append((peer, self._send_rest(peer, _REST_TAG + LABELLED, x)))
            self.sent_bytes += x.nbytes
        return works

    def _begin_receives(self, receives: Sequence[Receive], *, alone: bool) -> Ended:
        """Begin to receive, by a thread for each source that takes its messages from now on."""
        limit_s = self.limit_s
        for receive in receives:
            self._mailbox.begin(receive)
            for peer in receive.sources:
                if peer != self.rank and peer not in self._readers:
                    self._readers[peer] = in_background(functools.partial(self._read, peer))
                    _end_readers_at_exit(self)

        def ended(deadline_s: float) -> bool:
            waiting = next((each for each in receives if each.message is None), None)
            if waiting is None:
                finish(receives, self.rank)
                return True
            self.check_usable()
            for peer in waiting.sources:
                if (reader := self._readers.get(peer)) is not None and reader.done():
                    raise self._translate(reader.result(), peer, alone=alone)
            if time.monotonic() > deadline_s:
                text = f"rank {self.rank} waited {limit_s:g} s for {waiting}{self._mailbox.missing(waiting)}"
                raise self._close_with(CommTimeout(text))
            return False

        return ended

    def _read(self, peer: int) -> RuntimeError:
        """Take the labelled messages of `peer` until there are no more; return why.

        It waits without a limit, since gloo closes all connections after one.
        """
        forever = timedelta(seconds=MAX_TIMEOUT_S)
        frame = self._take_frame()
        try:
            while True:
                unrecorded(self._gloo.recv, [frame.tensor], peer, LABELLED).wait(forever)
                of = bytes(frame.label)
                receive = self._mailbox.claim(peer, of)
                message = empty_for(of) if receive is None else receive.target(of)
                if message.nbytes > BODY_BYTES:
                    rest = unrecorded(self._gloo.recv, [rest_of(message)], peer, _REST_TAG + LABELLED)
                    if failure := wait_watched(
                        [(peer, rest)], time.monotonic() + MAX_TIMEOUT_S, self._check_connection
                    ):
                        raise failure[1]
                if message.nbytes:
                    begin = frame.body[: message.nbytes]
                    as_bytes(message)[: begin.size] = begin
                self._mailbox.put(peer, of, message, receive)
        except RuntimeError as exc:  # it has left, or died, or this rank has closed the connections
            self._mailbox.wake()
            return exc

    def end_readers(self) -> None:
        """End the threads that take labelled messages, by closing the connections."""
        if self._readers:
            self._hang_up()
            wait(self._readers.values(), _HANG_UP_S)

    def _compare_numbers(self, frames: Sequence[tuple[int, Frame | None]], number: int) -> None:
        """Wait for the frames of all other ranks; raise on all ranks unless all have this number."""
        unlike: dict[int, int] = {}
        offers = []
        for peer, frame in frames:
            if frame is not None:
                self._wait_for_frame(peer, frame)
                offers.append(int(frame.head[3]))
                if frame.head[2] != number:
                    unlike[peer] = int(frame.head[2])
        if unlike:
            raise self._calls_differ(unlike)
        self.plan.settle(offers)

    def _others_call(self) -> bool:
        """Whether a frame has come that another rank sends only if it does not follow the plan in this call."""
        for peer in self.others():
            frame = self._posted.get((peer, COLLECTIVE))
            if frame is None or frame.head[2] == _NOT_YET:
                continue
            self._wait_for_frame(peer, frame)  # the rest of it
            _, _, number, last = frame.head.tolist()
            serial = number >> SERIAL_SHIFT if number >= 0 else last
            if not 0 < (serial - self._serial) % SERIALS < SERIALS // 2:
                return True
        return False

    def _calls_differ(self, unlike: dict[int, int]) -> CommMismatch:
        """The error to raise on all ranks when frames of peers have the numbers of other calls. Collective."""
        mine = f"rank {self.rank} called {self._text}"
        for peer, number in unlike.items():
            if number < 0 or not number & _FIRST:
                left = peer if number == LEAVING else None
                other = "is within another call" if left is None else "has closed this communicator"
                return self._close_with(CommMismatch(f"{mine}, but rank {peer} {other}", left))
        rows = np.zeros((self.size, TEXT_BYTES), np.uint8)
        rows[self.rank] = text_row(self._text, TEXT_BYTES)
        self._number = _TEXTS
        try:
            self._round(lambda _: rows[self.rank], lambda peer: rows[peer], first=False)
        except CommError:
            return self._close_with(CommMismatch(f"{mine}, but rank {next(iter(unlike))} another call"))
        return self._end_together(rows, CommMismatch(different_calls(texts_of(rows))))

    def _end_together(self, rows: Array, error: CommMismatch) -> CommMismatch:
        """Refuse later calls, after an error of all ranks.

        Collective. Ranks exchange their `rows` again: those that follow a plan then close their connections.
        """
        with contextlib.suppress(CommError):
            self._round(lambda _: rows[self.rank], lambda peer: rows[peer], first=False)
        self.refuse_calls(f"a call failed earlier ({type(error).__name__})")
        return error

    def _next_frame(self, peer: int, tag: int) -> Frame:
        """The frame for the next message from `peer`, posted ahead or now."""
        frame = self._posted.pop((peer, tag), None)
        if frame is None:
            frame = self._take_frame()
            frame.work = self._start(peer, self._gloo.recv, [frame.tensor], peer, tag)
        return frame

    def _wait_for_frame(self, peer: int, frame: Frame) -> None:
        """Wait for a frame; gloo would not return from a second wait."""
        if frame.work is not None:
            self._wait(peer, frame.work)
            frame.work = None

    def _post_ahead(self, peer: int, tag: int, frame: Frame) -> None:
        if (peer, tag) in self._posted:
            self._free.append(frame)
            return
        frame.head[2] = _NOT_YET
        try:
            frame.work = unrecorded(self._gloo.recv, [frame.tensor], peer, tag)
        except RuntimeError:
            return  # the peer has left; that only matters if another message is expected
        self._posted[peer, tag] = frame

    def _take_frame(self) -> Frame:
        with contextlib.suppress(IndexError):  # readers take frames, too
            return self._free.pop()
        return kept_in_children(Frame())

    def _send_frame(
        self, peer: int, tag: int, x: Array, in_return: int, number: int, of: bytes | None = None
    ) -> None:
        frame = self._take_frame()
        offer = self.plan.offer() if number >= 0 else self._serial + 1
        frame.head[:] = x.nbytes, in_return, number, offer
        if of is not None:
            frame.label[:] = of
        if x.nbytes:
            begin = as_bytes(x)[:BODY_BYTES]
            frame.body[: begin.size] = begin
        written = frame.tensor[: HEADER_BYTES + min(x.nbytes, BODY_BYTES)]
        frame.work = self._start(peer, self._gloo.send, [written], peer, tag)
        self._sent.setdefault((peer, tag), deque()).append(frame)

    def _send_rest(self, peer: int, wire_tag: int, x: Array) -> dist.Work:
        return kept_in_children(self._start(peer, self._gloo.send, [rest_of(x)], peer, wire_tag))

    def _receive_rest(self, peer: int, wire_tag: int, out: Array) -> dist.Work:
        return kept_in_children(self._start(peer, self._gloo.recv, [rest_of(out)], peer, wire_tag))

    def _reclaim(self, peer: int, tag: int, keep: int) -> None:
        """Wait until all but the latest `keep` frames to `peer` have left."""
        frames = self._sent.get((peer, tag))
        while frames and len(frames) > keep:
            frame = frames.popleft()
            self._wait_for_frame(peer, frame)
            self._free.append(frame)
        if not frames:
            self._sent.pop((peer, tag), None)

    def _receive_own(self, out: Array, tag: int) -> None:
        receive = Receive((self.rank,), out, _own(tag, out))
        self._mailbox.begin(receive)
        if receive.message is None:
            self.refuse_calls("it waited for a message from itself")
            raise CommTimeout(f"rank {self.rank} would wait forever for {receive}")
        finish([receive], self.rank)

    def _mismatch(self, peer: int, frame: Frame, expected: list[int]) -> CommMismatch:
        """The error for a frame with an unexpected head."""
        nbytes, in_return, number = frame.head[:3].tolist()
        text = f"rank {self.rank} expected {expected[0]} bytes from rank {peer}, which sent {nbytes}"
        if number == LEAVING:
            text = f"rank {self.rank} waited for rank {peer}, which has closed this communicator"
        elif number != expected[2]:
            text = f"{text} in another call"
        elif nbytes == expected[0]:
            text = f"rank {self.rank} sent {expected[1]} bytes to rank {peer}, which expected {in_return}"
        return self._close_with(CommMismatch(f"{text}; {WHICH_CALLS}", peer if number == LEAVING else None))

    def _close_with(self, error: _Error) -> _Error:
        """Close the connections, so that peers that wait for this rank raise the same error."""
        self.refuse_calls(f"a call failed earlier ({type(error).__name__})")
        if not self._leaving and self._verdict is not None:
            self._verdict.own = self._verdict.own or error
            self._verdict.post(error)
            self._hang_up()
        return error

    def interrupted(self, error: BaseException, arrays: object) -> None:
        """See `Transport.interrupted`. Closes the connections, since gloo would continue to use `arrays`."""
        super().interrupted(error, arrays)
        self._interrupted = arrays
        self._hang_up()

    def _hang_up(self) -> None:
        """Close all connections."""
        gloo, until = self._gloo, time.monotonic() + _HANG_UP_S
        for peer in self.others() if gloo is not None else ():
            # Gloo closes all connections only when a wait times out, and then none on which it is sending.
            while time.monotonic() < until:
                try:
                    work = unrecorded(gloo.recv, [_byte()], peer, _ABORT_TAG)
                except RuntimeError:  # this connection is closed
                    break
                with contextlib.suppress(RuntimeError):
                    work.wait(timedelta(milliseconds=1))

    def drop(self) -> None:
        """Free the connections and their threads, which end when nothing refers to them any more.

        A thread of gloo that still runs when Python ends may end the process by a signal.
        """
        self.plan.end()
        self._posted.clear()
        self._sent.clear()
        self._free.clear()
        self._gloo = None

    def _start(
        self, peer: int | None, call: Callable[P, dist.Work], *arguments: P.args, **named: P.kwargs
    ) -> dist.Work:
        try:
            return unrecorded(call, *arguments, **named)
        except RuntimeError as exc:
            raise self._translate(exc, peer) from exc

    def _wait(self, peer: int | None, work: dist.Work) -> None:
        if self.limit_s == MAX_TIMEOUT_S and not self._leaving:
            self._wait_watched([(peer, work)])  # type: ignore[list-item] # a signal does not end gloo's own waits
            return
        left_s = max(self.deadline_s() - time.monotonic(), 0.001)
        try:
            wait = timedelta(seconds=left_s)
            work.wait(min(self._timeout, wait) if self._leaving else wait)
        except RuntimeError as exc:
            raise self._translate(exc, peer) from exc

    def _wait_for_rests(self, works: Sequence[Pending], longest: int) -> None:
        """Wait for the rests of messages of at most `longest` bytes."""
        if longest > BUFFERED_BYTES:
            self._wait_watched(works)
        else:
            for peer, work in works:
                self._wait(peer, work)

    def _wait_for_all(self, work: dist.Work, check: Callable[[], None], every_s: float = CHECK_S) -> None:
        """Wait for a collective of gloo, and check every `every_s` seconds."""
        try:
            wait_for_collective(work, self.deadline_s(), check, every_s)
        except RuntimeError as exc:
            raise self._translate(exc, None) from exc

    def _wait_watched(self, works: Sequence[Pending]) -> None:
        """Wait for operations that may last, while connections are checked."""
        failure = wait_watched(works, self.deadline_s(), self._check_connection)
        if failure is not None:
            peer, exc = failure
            raise self._translate(exc, peer) from exc

    def _check_connection(self, peer: int | None = None) -> None:
        """Raise RuntimeError if the connection to a peer is closed; to any peer if it is None."""
        if self._gloo is None:
            raise RuntimeError("connection closed")
        for each in self.others() if peer is None else (peer,):
            unrecorded(self._gloo.recv, [_byte()], each, _ABORT_TAG)

    def _translate(self, exc: RuntimeError, peer: int | None, *, alone: bool = False) -> CommError:
        """Translate an error of torch.distributed to a `CommError`.

        The transport cannot be used after it, unless a peer is lost, and the message that waits for it is to fail
        `alone`.
        """
        peers = "its peers" if peer is None else f"rank {peer}"
        reason = str(exc).split(". This is typically caused")[0]
        error: CommError
        if "pair closure" in reason:
            error = self._closed_here(peers)
        elif "timed out" in reason.lower() or "timeout" in reason.lower():
            # Gloo has closed the connections already, except in a collective of its own.
            text = f"rank {self.rank} of {self.size} waited {self.limit_s:g} s for {peers}"
            return self._close_with(CommTimeout(text))
        elif "onnection" in reason or "closed" in reason or "Broken pipe" in reason:
            return self._lost(peer, peers, reason, alone=alone)
        else:
            error = CommError(f"rank {self.rank}: torch.distributed failed: {reason}")
        self.refuse_calls(f"a call failed earlier ({type(error).__name__})")
        return error

    def _closed_here(self, peers: str) -> CommError:
        """The error for connections that this rank has closed: that of the call that did."""
        own = None if self._verdict is None else self._verdict.own
        if own is None:
            return CommAborted(f"rank {self.rank}: this communicator was aborted while it waited for {peers}")
        text = f"rank {self.rank} gave up while it waited for {peers}, after another call had failed: {own}"
        return of_same_kind(type(own).__name__, text, getattr(own, "ranks", ()))

    def _lost(self, peer: int | None, peers: str, reason: str, *, alone: bool) -> CommError:
        """The error for a closed connection: that of the first rank that closed its own, if it has stored one."""
        lost = [each for each in self.others() if self._is_closed(each)] if peer is None else [peer]
        if peer is None and lost:  # a collective of gloo does not say which
            peers = named(lost)
        text = f"rank {self.rank} lost {peers}: it died, left, or gave up after an error of its own ({reason})"
        error: SharedError = RankFailed(text, lost)
        first = None
        try:
            first = self._first_error()
        except ConnectionError:
            server = self._verdict.server if self._verdict is not None else None
            if server not in (None, self.rank, peer) and self._is_closed(server):
                text = f"rank {server}, whose process serves the store, died or left"
                error = RankFailed(f"rank {self.rank} lost {peers}, which gave up: {text}", (server,))
        if isinstance(first, CommMismatch):
            error = first
        elif first is not None and self.rank not in getattr(first, "ranks", ()):
            text = f"rank {self.rank} lost {peers}, which gave up: {first}"
            error = of_same_kind(type(first).__name__, text, getattr(first, "ranks", ()))
        return error if alone else self._close_with(error)

    def _first_error(self) -> SharedError | None:
        """The error that a rank has stored for its peers before it closed its connections, if one has.

        Raises:
            ConnectionError: The store does not answer.
        """
        if self._leaving or self._verdict is None:
            return None
        found = self._verdict.read()
        if found is None:  # after a timeout, gloo closes the connections before this library stores the reason
            time.sleep(_POST_S)
            found = self._verdict.read()
        return found

    def _is_closed(self, peer: int) -> bool:
        """Whether the connection to a peer is closed."""
        try:
            self._check_connection(peer)
        except RuntimeError:
            return True
        return False


def _end_readers_at_exit(transport: FramedTransport) -> None:
    """End the readers before Python ends: a thread that returns from gloo then ends the process by a signal."""
    found = weakref.ref(transport)

    def end() -> None:
        if (each := found()) is not None:
            each.end_readers()

    atexit.register(end)


def _own(kind: int, x: Array) -> bytes:
    """The label of a message of this rank to itself that has none."""
    return label(f"#{kind}", np.dtype(np.uint8), x.nbytes)


def _byte() -> torch.Tensor:
    return torch.empty(1, dtype=torch.uint8, device="cpu")  # whatever the default device is
