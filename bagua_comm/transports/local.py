"""Ranks as threads of one process; messages are copies left in a mailbox.

For tests, notebooks and single-rank runs: deterministic results, no MPI, no processes. Every wait has a timeout,
and an error on one rank wakes all others.

Device arrays are copied in stream order: a rank waits until its peer has enqueued the copy, but not for the
device.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Hashable, Sequence
from typing import TypeAlias
from weakref import WeakSet

import numpy as np

from ..arrays import Array
from ..errors import WHICH_CALLS, CommAborted, CommError, CommMismatch, CommTimeout
from ..execution.cuda import Event, after, mark, passed, record_event
from .base import Transport
from .flow import LABELLED, POINT_TO_POINT, Flow, Message, Move
from .labels import Ended, Labelled, Receive, fill, missing
from .notices import aborted

Mail: TypeAlias = "tuple[tuple[Array, Event | None], bytes]"
"""A copy of an array, with the event after the copying of a device array; and the sender's call, or a label."""


class Hub:
    """The state that the ranks of a local world share: mailboxes, and whether the world was aborted."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.changed = threading.Condition()
        self.mail: dict[tuple[int, int, int], deque[Mail]] = {}
        """By (source, dest, tag)."""
        self.forming: dict[Hashable, tuple[Hub, int]] = {}
        """By (splits before, color), or by name: a group that is being formed, and how many have joined."""
        self.groups: WeakSet[Hub] = WeakSet()
        """Groups split off from this one, as long as one of their ranks holds them."""
        self.aborted: str | None = None
        self.aborted_groups: dict[str, tuple[int, CommError]] = {}
        """By the name of a group (see `Transport.notify_failure`): the rank that has aborted it, and why."""
        self.broken: dict[int, CommError] = {}
        """By rank: the error after which it makes no more calls in this group."""

    def post(self, source: int, dest: int, tag: int, message: Mail) -> None:
        """Leave a message for `dest`. The caller holds `changed`."""
        self.mail.setdefault((source, dest, tag), deque()).append(message)

    def fail(self, rank: int, error: CommError) -> None:
        """Wake the ranks that wait for `rank`, which makes no more calls after `error`."""
        with self.changed:
            self.broken.setdefault(rank, error)
            self.changed.notify_all()

    def abort(self, reason: str) -> None:
        """Wake all ranks that wait, here and in groups split off; they raise `CommAborted`."""
        with self.changed:
            self.aborted = self.aborted or reason
            self.changed.notify_all()
            groups = list(self.groups)
        for group in groups:
            group.abort(reason)

    def join(self, key: Hashable, size: int) -> Hub:
        """Join the group of `size` ranks that forms under `key`, and return it."""
        with self.changed:
            group, joined = self.forming.get(key) or (Hub(size), 0)
            self.forming[key] = group, joined + 1
            if joined + 1 == size:
                del self.forming[key]
            self.groups.add(group)
            if self.aborted:
                group.aborted = self.aborted
        return group


class LocalTransport(Transport):
    """One rank of a local world."""

    name = "local"

    def __init__(self, hub: Hub | None = None, rank: int = 0, *, timeout_s: float = 60.0) -> None:
        super().__init__()
        self._hub = hub or Hub(1)
        self.rank, self.size, self.timeout_s = rank, self._hub.size, timeout_s
        self._splits = 0
        self._size = ""
        """That of the array of the collective call, as errors show it."""
        self._read: deque[tuple[Array, Event]] = deque()
        """Device copies that this rank's stream may still be reading, and the event after the reading."""
        self._begun: list[tuple[int, Receive]] = []
        """The receives that wait for a message, and their tags, in the order in which they began."""

    def moves(self, x: Array) -> bool:
        """Host and device arrays."""
        return True

    def begin_call(self, name: str, *, collective: bool, describe: Callable[[], str] | None = None) -> None:
        """See `Transport.begin_call`."""
        super().begin_call(name, collective=collective, describe=describe)
        self._size = ""

    def agree_on_call(self, call: str, x: Array, *, by_messages: bool = False) -> Flow:
        """See `Transport.agree_on_call`. The messages of the call carry its text, which receivers compare."""
        self._size = self._size or f" of {x.size} elements"
        return super().agree_on_call(call, x, by_messages=by_messages)

    def broadcast(self, x: Array, root: int) -> None:
        """See `Transport.broadcast`."""
        self.agree_on_call("broadcast", x)
        super().broadcast(x, root)

    def exchange(self, sends: Sequence[Message], recvs: Sequence[Message], *, tag: int = POINT_TO_POINT) -> None:
        """Leave copies for the peers, then take theirs; see `Transport.exchange`."""
        made = self.signature() if tag != POINT_TO_POINT else ""
        call = f"{made}{self._size}".encode() if made else b""
        receives = [Receive((peer,), out, call) for peer, out in recvs]
        self._wait(self.leave_and_take([(peer, x, call) for peer, x in sends], receives, tag), receives)

    def exchange_labelled(self, sends: Sequence[Labelled], receives: Sequence[Receive]) -> None:
        """See `Transport.exchange_labelled`."""
        self._wait(self.begin_labelled(sends, receives), receives)

    def begin_labelled(self, sends: Sequence[Labelled], receives: Sequence[Receive]) -> Ended:
        """See `Transport.begin_labelled`."""
        return self.leave_and_take(sends, receives, LABELLED)

    def _wait(self, ended: Ended, receives: Sequence[Receive]) -> None:
        deadline_s, changed = self.deadline_s(), self._hub.changed
        with changed:
            try:
                while not ended(deadline_s):
                    changed.wait(deadline_s - time.monotonic())
            except BaseException:  # an interrupted call takes no later message
                self._begun = [(tag, each) for tag, each in self._begun if each not in receives]
                raise

    def leave_and_take(self, sends: Sequence[Labelled], receives: Sequence[Receive], tag: int) -> Ended:
        """Leave copies for the peers; the result takes theirs."""
        hub, limit_s = self._hub, self.limit_s
        copies = [x.copy() for _, x, _ in sends]
        with hub.changed:
            self._check_alive()
            for (peer, x, note), copy in zip(sends, copies, strict=True):
                hub.post(self.rank, peer, tag, ((copy, mark(copy)), note))
                self.sent_bytes += x.nbytes if peer != self.rank else 0
            self._begun += [(tag, receive) for receive in receives]
            hub.changed.notify_all()

        def ended(deadline_s: float) -> bool:
            with hub.changed:
                self._match()
                waiting = next((each for each in receives if each.message is None), None)
                try:
                    come = {each: self._mismatch(each, tag) for each in receives if each.message is not None}
                    if waiting is None or any(come.values()):
                        fill(come, self._fill)
                    else:
                        self._check_coming(waiting, tag, deadline_s, limit_s)
                except CommMismatch as exc:
                    if tag != LABELLED or waiting is not None:
                        self._abort_after(exc, receives[0])  # the next messages would be mistaken for this call's
                    raise
                except (CommTimeout, CommAborted) as exc:
                    self._abort_after(exc, receives[0])
                    raise
                return waiting is None

        return ended

    def _match(self) -> None:
        """Give each receive that has begun the first message that it takes. The caller holds the lock."""
        for tag, receive in tuple(self._begun):
            for peer in receive.sources:
                box = self._hub.mail.get((peer, self.rank, tag), deque())
                for i, (message, note) in enumerate(box):
                    if receive.message is None and (tag != LABELLED or receive.takes(peer, note)):
                        receive.deliver(peer, note, message)
                        self._begun.remove((tag, receive))
                        del box[i]
                        break

    def _check_coming(self, receive: Receive, tag: int, deadline_s: float, limit_s: float) -> None:
        """Raise if the message of a receive does not come any more."""
        self._check_alive()
        for peer in receive.sources:
            if peer in self._hub.broken:
                raise self._departure(peer, self._hub.broken[peer])
        if time.monotonic() > deadline_s:
            boxes = [self._hub.mail.get((peer, self.rank, tag), ()) for peer in receive.sources]
            others = missing(receive, [note for box in boxes for _, note in box]) if tag == LABELLED else ""
            raise CommTimeout(f"rank {self.rank} waited {limit_s:g} s for {receive}{others}")

    def _mismatch(self, receive: Receive, tag: int) -> CommMismatch | None:
        """The error for a message that differs from what this rank expects."""
        (message, _), out, found = receive.message, receive.out, receive.found
        if tag == LABELLED:
            return receive.mismatch(self.rank)
        if receive.expected != found:
            calls = f"rank {self.rank} called {receive.expected.decode()}, but rank {receive.source} called"
            return CommMismatch(f"{calls} {found.decode()}")
        if out is not None and message.nbytes == out.nbytes:
            return None
        return CommMismatch(f"rank {self.rank} expected {receive}, which sent {message.nbytes}; {WHICH_CALLS}")

    def _fill(self, receive: Receive) -> None:
        while self._read and passed(self._read[0][1]):
            self._read.popleft()
        (message, copied), out = receive.message, receive.out
        receive.message = message
        if out is not None:
            after(copied)
            _copy(message, out)
        if copied is not None:
            # Freed now, its memory could be reused in the sender's stream, which may be ahead of this one.
            self._read.append((message, record_event()))

    def _abort_after(self, error: CommError, receive: Receive) -> None:
        """Refuse more calls, and wake the others with `error`, or with that of the source if that has one."""
        self.broken = str(error)
        self._hub.fail(self.rank, self._hub.broken.get(receive.sources[0], type(error)(str(error))))

    def _departure(self, peer: int, error: CommError) -> CommError:
        """The error to raise because `peer` sends nothing more after its `error`."""
        if isinstance(error, CommMismatch):
            return CommMismatch(str(error))
        return aborted(f"rank {self.rank} of {self.size}: rank {peer}", type(error).__name__, str(error))

    def fast_path(self, name: str, x: Array, op: str = "", root: int | None = None) -> Move | None:
        """See `Transport.fast_path`. Among one rank every collective is a copy."""
        is_own = getattr(type(self), name) is getattr(LocalTransport, name)
        return self._copy_alone if self.size == 1 and is_own else None

    def _copy_alone(self, x: Array, out: Array) -> None:
        self._check_alive()
        if out is not x:
            _copy(x, out)

    def split(self, color: int, key: int) -> Transport:
        """See `Transport.split`."""
        members = self._members(color, key)
        self._splits += 1
        group = self._hub.join((self._splits, color), len(members))
        return LocalTransport(group, members.index(self.rank), timeout_s=self.timeout_s)

    def subgroup(self, ranks: Sequence[int], name: str, host: Transport | None = None) -> Transport:
        """See `Transport.subgroup`."""
        return LocalTransport(self._hub.join(name, len(ranks)), ranks.index(self.rank), timeout_s=self.timeout_s)

    def stop(self, reason: str) -> None:
        """See `CallState.stop`."""
        with self._hub.changed:
            super().stop(reason)
            self._hub.changed.notify_all()

    def interrupted(self, error: BaseException, arrays: object) -> None:
        """See `Transport.interrupted`. Wakes all ranks; they raise `CommAborted`."""
        if self.size > 1:
            self._hub.abort(f"a call of rank {self.rank} was interrupted by {type(error).__name__}")

    def abort(self, exit_code: int = 1) -> None:
        """Wake all ranks; they raise `CommAborted`."""
        self._hub.abort(f"rank {self.rank} aborted")

    def notify_failure(self, group: str, error: CommError) -> None:
        """See `Transport.notify_failure`."""
        self._hub.aborted_groups.setdefault(group, (self.rank, error))

    def poll_failures(self, groups: Collection[str]) -> CommError | None:
        """See `Transport.poll_failures`."""
        for group in groups:
            rank, error = self._hub.aborted_groups.get(group, (self.rank, None))
            if error is not None and rank != self.rank:
                return aborted(f"rank {self.rank} of {self.size}: rank {rank}", type(error).__name__, str(error))
        return None

    def _check_alive(self) -> None:
        self.broken = self.broken or self._hub.aborted
        self.check_usable()


def _copy(x: Array, out: Array) -> None:
    """Copy the bytes of `x` to `out`, which has the same number of bytes."""
    if x.dtype == out.dtype and x.shape == out.shape:
        out[...] = x
    else:
        out.reshape(-1).view(np.uint8)[...] = x.reshape(-1).view(np.uint8)
