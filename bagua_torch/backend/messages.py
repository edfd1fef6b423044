"""Messages of a process group between two ranks: `send` and `recv` that run beside each other.

Messages between two ranks, in one direction and with one tag, are in order; others do not wait for them. So each
such queue has a thread and a channel of the transport while it has messages. A queue whose message has failed
keeps its channel, which refuses the next ones.
"""

from __future__ import annotations

import atexit
import functools
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import NamedTuple
from weakref import WeakSet

from bagua_comm import ArrayError, CommError, CommMismatch, arrays
from bagua_comm.arrays import Array
from bagua_comm.transports.base import Transport
from bagua_comm.transports.flow import FIRST_CHANNEL_TAG, Channel

_POLL_S = 0.001

_STOP_S = 3.0
"""How long the end of the program waits for the threads of messages that are under way."""

LARGEST_TAG = (2**31 - 1) // FIRST_CHANNEL_TAG - 2
"""The largest tag of a message: tags of the connections are integers of 32 bits."""


class _Queue(NamedTuple):
    """The key of a queue of messages."""

    call: str
    """ "send" or "recv"."""
    peer: int
    tag: int


class _Message(NamedTuple):
    """A message to send, or to receive into `array`."""

    array: Array
    then: Callable[[], object] | None
    future: Future[None]


class Messages:
    """The messages between this rank and others.

    Args:
        transport: Makes the channels.
    """

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._lock = threading.Lock()
        self._idle: list[Channel] = []
        self._failed: dict[_Queue, Channel] = {}
        self._waiting: dict[_Queue, deque[_Message]] = {}
        """By queue: the messages to come. A queue that has a thread is in it."""
        self._threads: dict[_Queue, tuple[threading.Thread, Channel]] = {}
        self._sent: defaultdict[int, deque[Array]] = defaultdict(deque)
        self._expected: defaultdict[int, deque[_Message]] = defaultdict(deque)
        """By tag: messages of this rank to itself that it has sent, and that it expects."""
        _all.add(self)
        _stop_at_exit()  # after MPI's own function was registered, so that it runs before that

    def submit(
        self, call: str, peer: int, tag: int, array: Array, then: Callable[[], object] | None = None
    ) -> Future[None]:
        """Send or receive a contiguous array, after the messages of the same queue; returns at once.

        `then` is called when it has been sent or received, before the future is done.

        Raises:
            ArrayError: `peer` or `tag` cannot be one.
            UnsupportedError: The transport has no channels.
        """
        ranks = self._transport.size
        if not 0 <= peer < ranks:
            raise ArrayError(f"{call}: the peer is rank {peer} of the group, expected one from 0 to {ranks - 1}")
        if not 0 <= tag <= LARGEST_TAG:
            raise ArrayError(f"{call}: tag is {tag}, expected a number from 0 to {LARGEST_TAG}")
        queue, message = _Queue(call, peer, tag), _Message(array, then, Future())
        if peer == self._transport.rank:
            self._pass_on(call, tag, message)
            return message.future
        with self._lock:
            if queue in self._waiting:
                self._waiting[queue].append(message)
                return message.future
            channel = self._failed.pop(queue, None)
            if channel is None:
                channel = self._idle.pop() if self._idle else self._transport.channel()
            thread = threading.Thread(target=self._run, args=(queue, channel), name=f"{call} {peer}", daemon=True)
            self._waiting[queue], self._threads[queue] = deque([message]), (thread, channel)
            try:
                thread.start()  # it waits for the lock
            except RuntimeError:  # Python ends, or there are too many threads
                del self._waiting[queue], self._threads[queue]
                self._idle.append(channel)
                raise
        return message.future

    def _pass_on(self, call: str, tag: int, message: _Message) -> None:
        """Send a message to this rank itself, or receive one from it."""
        sent, expected = self._sent[tag], self._expected[tag]
        with self._lock:
            if call == "send":
                sent.append(message.array.copy())
                message.future.set_result(None)
            else:
                expected.append(message)
            while sent and expected:
                x, receive = sent.popleft(), expected.popleft()
                if x.nbytes != receive.array.nbytes:
                    error = f"recv: expected {receive.array.nbytes} bytes from itself, but sent {x.nbytes}"
                    receive.future.set_exception(CommMismatch(error))
                    continue
                arrays.as_bytes(receive.array)[...] = arrays.as_bytes(x)
                if receive.then is not None:
                    receive.then()
                receive.future.set_result(None)

    def _run(self, queue: _Queue, channel: Channel) -> None:
        """Send or receive the messages of a queue until it is empty."""
        failed = False
        while True:
            with self._lock:
                if not self._waiting[queue]:
                    if failed:
                        self._failed[queue] = channel
                    else:
                        self._idle.append(channel)
                    del self._waiting[queue], self._threads[queue]
                    return
                message = self._waiting[queue].popleft()
            try:
                channel.timeout_s = self._transport.timeout_s  # it may have been set since
                _exchange(channel, queue, message)
            except BaseException as exc:
                failed = True
                message.future.set_exception(exc)
            else:
                message.future.set_result(None)

    def drain(self, timeout_s: float) -> None:
        """Wait until all messages have been sent and received.

        Raises:
            CommError: Some have not, within `timeout_s`.
        """
        until = time.monotonic() + timeout_s
        while self._waiting:
            if time.monotonic() > until:
                left = ", ".join(f"{queue.call} with rank {queue.peer}" for queue in tuple(self._waiting))
                raise CommError(f"the process group is destroyed while messages are under way: {left}")
            time.sleep(_POLL_S)

    def stop(self) -> None:
        """Let messages that are under way fail, and wait for their threads for a moment."""
        with self._lock:
            threads = list(self._threads.values())
        for _, channel in threads:
            channel.stop("the process group has ended")
        until = time.monotonic() + _STOP_S
        for thread, _ in threads:
            thread.join(max(until - time.monotonic(), 0.0))


_all: WeakSet[Messages] = WeakSet()


@functools.cache
def _stop_at_exit() -> None:
    """Have messages that nobody has waited for stop when the program ends, before MPI does.

    A thread that returns from gloo or MPI while Python or MPI ends would end the process by a signal.
    """

    def stop_all() -> None:
        for messages in tuple(_all):
            messages.stop()

    atexit.register(stop_all)


def _exchange(channel: Channel, queue: _Queue, message: _Message) -> None:
    messages = [(queue.peer, message.array)]
    sends, recvs = (messages, []) if queue.call == "send" else ([], messages)
    channel.begin_call(queue.call, collective=False)
    try:
        channel.exchange(sends, recvs, tag=(queue.tag + 1) * FIRST_CHANNEL_TAG)
    finally:
        channel.end_call()
    if message.then is not None:
        message.then()
