"""Messages of a process group between two ranks: `send` and `recv` that run beside each other.

Messages between two ranks, in one direction and with one tag, are in order; others do not wait for them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from weakref import WeakKeyDictionary

import numpy as np

from bagua_comm import ArrayError, CommError, Communicator, arrays
from bagua_comm.arrays import Array
from bagua_comm.execution.requests import Buffer, Requests
from bagua_comm.flight import FlightRecorder
from bagua_comm.transports.labels import Receive, label

LARGEST_TAG = 2**31 - 1
"""The largest tag of a message."""

observers: WeakKeyDictionary[FlightRecorder, Callable[[Communicator, str, Sequence[int], int, str], object]]
observers = WeakKeyDictionary()
"""By world: called before a message begins, with the communicator of its group, "send" or "recv", the peers, the
tag, and dtype and size as text."""


class Messages:
    """The messages between this rank and others.

    Args:
        comm: The communicator of the group.
    """

    def __init__(self, comm: Communicator) -> None:
        self._comm, self._requests, self._lock = comm, Requests(comm), threading.Lock()

    def submit(
        self, call: str, peers: Sequence[int], tag: int, array: Array, then: Callable[[], object] | None = None
    ) -> tuple[Future[object], Receive]:
        """Send or receive a contiguous array, after the messages of the same peer and tag; returns at once.

        It is sent to one peer, or received from one of them: the `source` of the `Receive`, once it has come.
        `then` is called when it has been sent or received, before the future is done.

        Raises:
            ArrayError: `peers` or `tag` cannot be such.
            UnsupportedError: The transport has no messages beside its calls.
        """
        host = self._comm.host
        named = " or ".join(map(str, peers))
        if not peers or not all(0 <= peer < host.size for peer in peers):
            raise ArrayError(
                f"{call}: the peer is rank {named or None} of the group, expected one from 0 to {host.size - 1}"
            )
        if not 0 <= tag <= LARGEST_TAG:
            raise ArrayError(f"{call}: tag is {tag}, expected a number from 0 to {LARGEST_TAG}")
        if (observer := observers.get(self._comm.flight)) is not None:
            observer(self._comm, call, peers, tag, f"{arrays.dtype_name(array.dtype)}[{array.size}]")
        x = arrays.as_bytes(array)
        of = label(tag, np.dtype(np.uint8), x.size)
        receive = Receive(tuple(peers), x, of)
        with self._lock:
            if call == "send":
                ended = host.begin_labelled([(peers[0], x, of)], [])
            else:
                ended = host.begin_labelled([], [receive])
        name, buffer = f"{call} with rank {named}", Buffer.of(x, is_written=call != "send")
        limit_s = self._comm.timeout_s
        return self._requests.add(name, buffer, ended, then or (lambda: None), limit_s, polled=True), receive

    def drain(self, timeout_s: float) -> None:
        """Wait until all messages have been sent and received.

        Raises:
            CommError: Some have not, within `timeout_s`.
        """
        if left := self._requests.wait(timeout_s):
            raise CommError(f"the process group is destroyed while messages are under way: {', '.join(left)}")

    def stop(self) -> None:
        """Let messages that are under way fail."""
        self._requests.stop("the process group has ended")
