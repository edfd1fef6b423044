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
from collections.abc import Collection, Hashable, Sequence
from typing import Any, TypeAlias
from weakref import WeakSet

import numpy as np

from ..arrays import Array
from ..errors import WHICH_CALLS, CommAborted, CommError, CommMismatch, CommTimeout
from ..execution.cuda import after, mark, passed
from .base import Transport
from .flow import POINT_TO_POINT, Message, Move
from .notices import aborted

Mail: TypeAlias = tuple[Array, Any, str]
"""A copy of an array, the event after the copying if it is a device array, and the sender's call."""


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
        self._read: deque[tuple[Array, Any]] = deque()
        """Device copies that this rank's stream may still be reading, and the event after the reading."""

    def moves(self, x: Array) -> bool:
        """Host and device arrays."""
        return True

    def exchange(self, sends: Sequence[Message], recvs: Sequence[Message], *, tag: int = POINT_TO_POINT) -> None:
        """Leave copies for the peers, then take theirs; see `Transport.exchange`."""
        hub = self._hub
        while self._read and passed(self._read[0][1]):
            self._read.popleft()
        if self.size == len(sends) == len(recvs) == 1 and not hub.mail.get((0, 0, tag)):
            x, out = sends[0][1], recvs[0][1]
            if x.nbytes == out.nbytes:
                self._check_alive()
                _copy(x, out)
                return
        copies = [x.copy() for _, x in sends]
        signature = self.signature() if tag != POINT_TO_POINT else ""
        with hub.changed:
            self._check_alive()
            for (peer, x), copy in zip(sends, copies, strict=True):
                hub.post(self.rank, peer, tag, (copy, mark(copy), signature))
                self.sent_bytes += x.nbytes if peer != self.rank else 0
            hub.changed.notify_all()
        deadline_s = self.deadline_s()
        for i, (peer, out) in enumerate(recvs):
            try:
                self._receive(peer, out, tag, signature, deadline_s)
            except CommMismatch as exc:
                if tag != POINT_TO_POINT or i + 1 < len(recvs):
                    self._abort_after(exc, peer)  # the next messages would be mistaken for messages of this call
                raise
            except (CommTimeout, CommAborted) as exc:
                self._abort_after(exc, peer)
                raise

    def _abort_after(self, error: CommError, peer: int) -> None:
        """Refuse more calls, and wake the others with `error`, or with that of `peer` if it came from there."""
        self.broken = str(error)
        self._hub.fail(self.rank, self._hub.broken.get(peer, type(error)(str(error))))

    def _receive(self, peer: int, out: Array, tag: int, signature: str, deadline_s: float) -> None:
        hub = self._hub
        with hub.changed:
            box = hub.mail.setdefault((peer, self.rank, tag), deque())
            while not box:
                self._check_alive()
                if peer in hub.broken:
                    raise self._departure(peer, hub.broken[peer])
                remaining = deadline_s - time.monotonic()
                if remaining <= 0:
                    raise CommTimeout(
                        f"rank {self.rank} waited {self.limit_s:g} s for {out.nbytes} bytes from rank {peer}"
                    )
                hub.changed.wait(remaining)
            message, copied, other = box.popleft()
        if signature != other:
            raise CommMismatch(f"rank {self.rank} called {signature}, but rank {peer} called {other}")
        if message.nbytes != out.nbytes:
            raise CommMismatch(
                f"rank {self.rank} expected {out.nbytes} bytes from rank {peer}, which sent {message.nbytes}; "
                f"{WHICH_CALLS}"
            )
        after(copied)
        _copy(message, out)
        if copied is not None:
            # Freed now, its memory could be reused in the sender's stream, which may be ahead of this one.
            self._read.append((message, mark(message)))

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

    def channel(self) -> LocalTransport:
        """See `Transport.channel`."""
        return LocalTransport(self._hub, self.rank, timeout_s=self.timeout_s)

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
        reason = self._hub.aborted or self.broken
        if reason is not None:
            raise CommAborted(f"this communicator cannot be used: {reason}")


def _copy(x: Array, out: Array) -> None:
    """Copy the bytes of `x` to `out`, which has the same number of bytes."""
    if x.dtype == out.dtype and x.shape == out.shape:
        out[...] = x
    else:
        out.reshape(-1).view(np.uint8)[...] = x.reshape(-1).view(np.uint8)
