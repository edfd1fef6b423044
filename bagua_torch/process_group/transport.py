"""Host arrays over torch.distributed, through gloo; `connect()` under torchrun.

A transport takes its ranks and its store from a process group, and opens connections of its own. So neither its
messages nor its failures reach other users of the group, and groups split off have the order that was asked
for. (`torch.distributed.new_group` sorts ranks, and meets under keys that a closed group may have left.)

Gloo ends the process when a message is longer than the array posted for it, and says nothing when it is
shorter. So every message begins with a frame of a fixed size, which holds the message's number of bytes and the
first of them. The receiver posts the frame of the next message ahead, so a short message leaves at once, whatever
the receiver is doing. The rest of a long message follows once both ends are known to mean the same number of
bytes:

    one way    sender   -- frame --> receiver     which then posts the array for the rest
                        -- rest -->
    swap       both post their arrays; frames cross, and tell what their sender expects in return;
               each then sends its rest at once. Used in collectives, between ranks that send one message each.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import time
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from bagua_comm import (
    BootstrapError,
    CommAborted,
    CommError,
    CommMismatch,
    CommTimeout,
    RankFailed,
    UnsupportedError,
    arrays,
    kernels,
)
from bagua_comm.arrays import Array, as_bytes
from bagua_comm.errors import WHICH_CALLS
from bagua_comm.transports import Transport
from bagua_comm.transports.base import COLLECTIVE, POINT_TO_POINT, Message

from ..arrays import as_tensor

FRAME_BYTES = 4096
"""The size of a frame, which holds all of a short message. Sending it takes no longer than 256 bytes would."""

HEADER_BYTES = 32
"""The head of a frame: four numbers. The bytes of its message; the bytes expected in return in a swap, else -1;
the bytes of the array that the call is about, 0 if none is named; and the number of the collective call."""

BODY_BYTES = FRAME_BYTES - HEADER_BYTES

AT_ONCE_BYTES = 1 << 20
"""If each rank then receives no more than this, an allreduce sends whole arrays to all ranks, in one round."""

RING_CHUNK_BYTES = 1 << 15
"""For chunks of at least this size, gloo's own ring allreduce sums float32 and float64."""

UNSENT_FRAMES = 64
"""How many short messages one rank may leave unreceived before `send` waits."""

LEAVE_S = 10.0
"""How long `close` waits for the other ranks to close."""

_REST_TAG, _SWAP_TAG, _ABORT_TAG = 4, 8, 9
"""Frames have our tags, 0 to 3; the rest of a message that goes one way has its tag plus 4."""

_NOTHING: Array = np.empty(0, np.uint8)


@dataclass(frozen=True)
class Meeting:
    """Where the ranks of a transport find each other: in a store, under a key that nobody used before."""

    store: Any
    key: str
    rank: int
    size: int

    @classmethod
    def of(cls, group: dist.ProcessGroup | None) -> Meeting:
        """A meeting of the ranks of a process group, in its order. Collective."""
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
        return cls(store, f"{key}/{count(store, key, rank)}", rank, len(ranks))

    def open(self, name: str) -> Any:
        """The part of the store under `name`, through a connection of its own.

        On one connection, two threads that wait would wait for each other.
        """
        store = self.store.clone() if hasattr(self.store, "clone") else self.store
        return dist.distributed_c10d.PrefixStore(f"{self.key}/{name}", store)


def count(store: Any, key: str, rank: int) -> int:
    """Count that this rank has come to `key`; the same number on all ranks, if all come."""
    return int(store.add(f"{key}/of-{rank}", 1))


class _Frame:
    """The head and the beginning of a message, as arrays and as a tensor over the same memory."""

    __slots__ = ("body", "head", "tensor", "work")

    def __init__(self) -> None:
        memory = np.zeros(FRAME_BYTES, np.uint8)
        self.head, self.body = memory[:HEADER_BYTES].view(np.int64), memory[HEADER_BYTES:]
        self.tensor = as_tensor(memory)
        self.work: Any = None


class ProcessGroupTransport(Transport):
    """One rank of a torch.distributed process group.

    Collective. Nothing that happens here changes the group, not even an error. A transport for CUDA arrays is set
    up beside this one by `bagua_comm.connect(transport=...)`.

    When `exchange` returns, a short message is on its way: `close` waits for it, but the end of the process does
    not. A long message is received by then. After an error the transport cannot be used. A timeout closes its
    connections, and so does `abort`: peers that wait for this rank fail at once. They also fail at once when its
    process ends.

    Args:
        group: The process group; the default one if None.
        timeout_s: How long a call may wait for a peer.
        meeting: Where the ranks meet; a new meeting of `group` if None.
        guard: Calls the function that it gets, which connects, here and for groups split off, and returns its
            result; it may give up sooner, by a `CommError`. None to wait for all ranks as long as a call may.

    Raises:
        BootstrapError: torch.distributed is not initialised, or this process is not in the group.
        CommTimeout: The other ranks cannot be reached, or do not come.
        UnsupportedError: This PyTorch was built without gloo.
    """

    name = "torch"
    adds_in_rank_order = False  # gloo does not, from `RING_CHUNK_BYTES` on

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        *,
        timeout_s: float = 300.0,
        meeting: Meeting | None = None,
        guard: Callable[[Callable[[], Any]], Any] | None = None,
    ) -> None:
        super().__init__()
        self._guard = guard
        self._meeting = meeting if meeting is not None else Meeting.of(group)
        self.rank, self.size, self.timeout_s = self._meeting.rank, self._meeting.size, timeout_s
        self._timeout = timedelta(seconds=timeout_s)
        self._gloo: Any = None
        self._leaving = False
        self._splits = 0
        self._children: list[ProcessGroupTransport] = []  # kept: one dropped may have messages underway
        self._about = 0  # bytes of the array that the current call is about
        self._number = 0  # a number that all ranks must share in a collective call
        self._posted: dict[tuple[int, int], _Frame] = {}  # by (peer, tag): posted for the next message
        self._sent: dict[tuple[int, int], deque[_Frame]] = {}  # by (peer, tag): may still be on their way
        self._free: list[_Frame] = []
        self._own: dict[int, deque[Array]] = {}  # by tag: messages to oneself
        if self.size > 1:
            self._connect()

    def _connect(self) -> None:
        where = self._meeting

        def connect() -> Any:
            return dist.ProcessGroupGloo(where.open("gloo"), self.rank, self.size, self._timeout)

        try:
            self._gloo = connect() if self._guard is None else self._guard(connect)
        except RuntimeError as exc:
            raise self._translate(exc, None) from exc

    def moves(self, x: Array) -> bool:
        """Host arrays."""
        return isinstance(x, np.ndarray)

    def exchange(self, sends: Sequence[Message], recvs: Sequence[Message], *, tag: int = POINT_TO_POINT) -> None:
        """All messages at once; see `Transport.exchange`."""
        if self._broken is not None:
            self._check_usable()
        self._number = zlib.crc32(self.signature().encode()) if tag == COLLECTIVE else 0
        try:
            self._exchange(sends, recvs, tag)
        except CommError:
            raise
        except BaseException as exc:
            self._break(f"a call was interrupted ({type(exc).__name__})")
            raise

    def _exchange(self, sends: Sequence[Message], recvs: Sequence[Message], tag: int) -> None:
        swaps = _swaps(sends, recvs) if tag == COLLECTIVE else {}
        swaps.pop(self.rank, None)
        works: list[tuple[int, Any]] = []  # (peer, what to wait for)
        frames = []
        for peer, out in recvs:
            frames.append(None if peer == self.rank else self._next_frame(peer, tag))
            if peer in swaps and out.nbytes > BODY_BYTES:
                works.append((peer, self._receive_rest(peer, _SWAP_TAG, out)))
        for peer, x in sends:
            if peer == self.rank:
                self._own.setdefault(tag, deque()).append(x.copy())
                continue
            self._send_frame(peer, tag, x, swaps[peer][1].nbytes if peer in swaps else -1)
            if x.nbytes > BODY_BYTES and peer not in swaps:
                works.append((peer, self._send_rest(peer, _REST_TAG + tag, x)))
            self.sent_bytes += x.nbytes

        for i, ((peer, out), frame) in enumerate(zip(recvs, frames, strict=True)):
            if frame is None:
                self._receive_own(out, tag)
                continue
            self._wait(peer, frame.work)
            x = swaps[peer][0] if peer in swaps else None
            head = [out.nbytes, -1 if x is None else x.nbytes, self._about, self._number]
            if frame.head.tolist() != head:
                last = tag == POINT_TO_POINT and i + 1 == len(recvs) and not works
                raise self._mismatch(peer, tag, frame, head, last)
            if x is not None and x.nbytes > BODY_BYTES:
                works.append((peer, self._send_rest(peer, _SWAP_TAG, x)))
            if x is None and out.nbytes > BODY_BYTES:
                works.append((peer, self._receive_rest(peer, _REST_TAG + tag, out)))
            if out.nbytes:
                begin = frame.body[: out.nbytes]
                as_bytes(out)[: begin.size] = begin

        for peer, work in works:
            self._wait(peer, work)
        for peer, _ in sends:
            # In a collective the receiver is about to receive it.
            self._reclaim(peer, tag, 0 if tag == COLLECTIVE else UNSENT_FRAMES)
        # Not earlier: if the peer has left meanwhile, its last message would be lost.
        for (peer, _), frame in zip(recvs, frames, strict=True):
            if frame is not None:
                self._post_ahead(peer, tag, frame)

    def _next_frame(self, peer: int, tag: int) -> _Frame:
        """The frame for the next message from `peer`: posted ahead, or else now."""
        frame = self._posted.pop((peer, tag), None)
        if frame is None:
            frame = self._take_frame()
            frame.work = self._start(peer, self._gloo.recv, [frame.tensor], peer, tag)
        return frame

    def _post_ahead(self, peer: int, tag: int, frame: _Frame) -> None:
        if (peer, tag) in self._posted or self._leaving:
            self._free.append(frame)
            return
        try:
            frame.work = self._gloo.recv([frame.tensor], peer, tag)
        except RuntimeError:
            return  # the peer has left; that only matters if another message is expected
        self._posted[peer, tag] = frame

    def _take_frame(self) -> _Frame:
        return self._free.pop() if self._free else _Frame()

    def _send_frame(self, peer: int, tag: int, x: Array, in_return: int) -> None:
        frame = self._take_frame()
        frame.head[:] = x.nbytes, in_return, self._about, self._number
        if x.nbytes:
            begin = as_bytes(x)[:BODY_BYTES]
            frame.body[: begin.size] = begin
        frame.work = self._start(peer, self._gloo.send, [frame.tensor], peer, tag)
        self._sent.setdefault((peer, tag), deque()).append(frame)

    def _send_rest(self, peer: int, wire_tag: int, x: Array) -> Any:
        return self._start(peer, self._gloo.send, [_rest(x)], peer, wire_tag)

    def _receive_rest(self, peer: int, wire_tag: int, out: Array) -> Any:
        return self._start(peer, self._gloo.recv, [_rest(out)], peer, wire_tag)

    def _reclaim(self, peer: int, tag: int, keep: int) -> None:
        """Wait until all but the latest `keep` frames to `peer` have left."""
        frames = self._sent.get((peer, tag))
        while frames and len(frames) > keep:
            frame = frames.popleft()
            self._wait(peer, frame.work)
            self._free.append(frame)

    def _receive_own(self, out: Array, tag: int) -> None:
        messages = self._own.get(tag)
        if not messages:
            self._break("it waited for a message from itself")
            raise CommTimeout(f"rank {self.rank} would wait for ever for {out.nbytes} bytes from itself")
        x = messages.popleft()
        if x.nbytes != out.nbytes:
            raise CommMismatch(
                f"rank {self.rank} expected {out.nbytes} bytes from itself, but sent {x.nbytes}; {WHICH_CALLS}"
            )
        as_bytes(out)[...] = as_bytes(x)

    def _mismatch(self, peer: int, tag: int, frame: _Frame, expected: list[int], last: bool) -> CommMismatch:
        """The error for a frame with an unexpected head; receives its message if nothing else is in flight."""
        nbytes, in_return, about, number = frame.head.tolist()
        if last:
            if nbytes > BODY_BYTES:
                self._wait(peer, self._receive_rest(peer, _REST_TAG + tag, np.empty(nbytes, np.uint8)))
            self._post_ahead(peer, tag, frame)
        else:
            self._break("a call failed earlier (CommMismatch)")
        text = f"rank {self.rank} expected {expected[0]} bytes from rank {peer}, which sent {nbytes}"
        if about != self._about and about and self._about:
            text = f"rank {self.rank} gave {self._about} bytes, but rank {peer} {about}"
        elif nbytes == expected[0] and in_return >= 0 and expected[1] >= 0:
            text = f"rank {self.rank} sent {expected[1]} bytes to rank {peer}, which expected {in_return}"
        elif nbytes == expected[0]:
            text += " in another call"
            if number != self._number:
                text = (
                    f"rank {self.rank} called {self.signature()}, but rank {peer} another call, dtype, op or root"
                )
        return CommMismatch(f"{text}; {WHICH_CALLS}")

    # Collectives that are faster than those derived from `exchange` ---------------------------------

    def allreduce(self, x: Array, out: Array, op: str) -> None:
        """See `Transport`. Small arrays go in one round; large sums are gloo's own."""
        if self.size == 1:
            super().allreduce(x, out, op)
            return
        self._about = x.nbytes
        try:
            if x.nbytes * (self.size - 1) <= AT_ONCE_BYTES:
                self._allreduce_at_once(x, out, op)
            elif x.nbytes >= self.size * RING_CHUNK_BYTES and op in ("sum", "avg") and x.dtype.char in "fd":
                self._allreduce_natively(x, out, op)
            else:
                super().allreduce(x, out, op)
        finally:
            self._about = 0

    def _allreduce_at_once(self, x: Array, out: Array, op: str) -> None:
        rows = self._scratch.take("rows", (self.size, x.size), x.dtype, like=x)
        rows[self.rank] = x.reshape(-1)
        self.exchange(
            [(peer, x) for peer in self.others()],
            [(peer, rows[peer]) for peer in self.others()],
            tag=COLLECTIVE,
        )
        kernels.on_host().reduce_rows(rows, out.reshape(-1), op)

    def _allreduce_natively(self, x: Array, out: Array, op: str) -> None:
        # Frames alone, which tell whether all ranks are about to reduce arrays of one size.
        nothing = [(peer, _NOTHING) for peer in self.others()]
        self.exchange(nothing, nothing, tag=COLLECTIVE)
        if x is not out:
            out[...] = x
        options: Any = dist.AllreduceOptions()
        options.reduceOp, options.timeout = dist.ReduceOp.SUM, timedelta(seconds=self.limit_s)
        self._wait(None, self._start(None, self._gloo.allreduce, [as_tensor(out.reshape(-1))], options))
        if op == "avg":
            kernels.host.divide(out, self.size)
        self.sent_bytes += 2 * x.nbytes * (self.size - 1) // self.size

    # Groups, failure and end ------------------------------------------------------------------------

    def split(self, color: int, key: int) -> Transport:
        """See `Transport.split`."""
        members = self._members(color, key)
        where = replace(
            self._meeting,
            key=f"{self._meeting.key}/{self._splits}.{color}",
            rank=members.index(self.rank),
            size=len(members),
        )
        self._splits += 1
        child = ProcessGroupTransport(timeout_s=self.timeout_s, meeting=where, guard=self._guard)
        self._children = [each for each in self._children if each._gloo is not None] + [child]
        return child

    def abort(self, exit_code: int = 1) -> None:
        """Close all connections, also those of groups split off: peers that wait fail at once.

        This ends no process; but torchrun ends all processes when one ends with an error.
        """
        self._break("aborted")
        for child in self._children:
            child.abort(exit_code)
        gloo = self._gloo
        for peer in self.others() if gloo is not None else ():
            with contextlib.suppress(RuntimeError):  # this transport's is closed already
                # Gloo closes all connections at once only after a wait in vain.
                tensor = torch.empty(1, dtype=torch.uint8)
                gloo.recv([tensor], peer, _ABORT_TAG).wait(timedelta(milliseconds=1))

    def close(self) -> None:
        """Close the connections, once short messages have been received and the other ranks close as well.

        Collective. The process group stays. A group split off that was dropped without being closed ends here.
        """
        try:
            if self._broken is None:
                for peer, tag in self._sent:
                    self._reclaim(peer, tag, 0)
                self._take_leave()
        except RankFailed:
            pass  # the peer left without receiving everything
        finally:
            self._break("closed")
            self._posted.clear()
            self._sent.clear()
            self._children.clear()
            self._gloo = None

    def _take_leave(self) -> None:
        """Exchange a last frame with each rank.

        If a connection is closed before everything on it was read, it is reset, and its peer loses what it has
        not read. After this frame nothing is sent.
        """
        self._leaving, self._timeout = True, min(self._timeout, timedelta(seconds=LEAVE_S))
        nothing = [(peer, _NOTHING) for peer in self.others()]
        with contextlib.suppress(CommError):
            self._exchange(nothing, nothing, COLLECTIVE)

    def _start(self, peer: int | None, call: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return call(*arguments)
        except RuntimeError as exc:
            raise self._translate(exc, peer) from exc

    def _wait(self, peer: int | None, work: Any) -> None:
        left_s = max(self.deadline_s() - time.monotonic(), 0.001)
        try:
            wait = timedelta(seconds=left_s)
            work.wait(min(self._timeout, wait) if self._leaving else wait)
        except RuntimeError as exc:
            raise self._translate(exc, peer) from exc

    def _translate(self, exc: RuntimeError, peer: int | None) -> CommError:
        """Translate an error of torch.distributed to ours; nothing can be sent after it."""
        who = "its peers" if peer is None else f"rank {peer}"
        reason = str(exc).split(". This is typically caused")[0]
        error: CommError
        if "pair closure" in reason:
            error = CommAborted(f"rank {self.rank}: this communicator was aborted while it waited for {who}")
        elif "timed out" in reason.lower() or "timeout" in reason.lower():
            error = CommTimeout(f"rank {self.rank} of {self.size} waited {self.limit_s:g} s for {who}")
        elif "onnection" in reason or "closed" in reason or "Broken pipe" in reason:
            error = RankFailed(
                f"rank {self.rank} lost {who}: it died, left, or gave up after an error of its own ({reason})",
                () if peer is None else (peer,),
            )
        else:
            error = CommError(f"rank {self.rank}: torch.distributed failed: {reason}")
        self._break(f"a call failed earlier ({type(error).__name__})")
        return error


def _swaps(sends: Sequence[Message], recvs: Sequence[Message]) -> dict[int, tuple[Array, Array]]:
    """For each peer with one message each way: what goes to it, and what comes from it."""
    outgoing, incoming = dict(sends), dict(recvs)
    several: set[int] = set()
    for messages, by_peer in ((sends, outgoing), (recvs, incoming)):
        if len(by_peer) < len(messages):
            peers = [peer for peer, _ in messages]
            several.update(peer for peer in by_peer if peers.count(peer) > 1)
    return {peer: (x, incoming[peer]) for peer, x in outgoing.items() if peer in incoming and peer not in several}


def _rest(x: Array) -> torch.Tensor:
    """The bytes of `x` that do not fit in its frame. Shares memory with `x`; never copies."""
    rest = as_bytes(x)[BODY_BYTES:]
    if not rest.flags.writeable:  # PyTorch has no read-only tensors; a sent array is only read
        memory = (ctypes.c_uint8 * rest.nbytes).from_address(arrays.address(rest))
        rest = np.frombuffer(memory, np.uint8)
    return as_tensor(rest)
