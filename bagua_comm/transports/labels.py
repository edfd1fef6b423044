"""Labelled messages between two ranks: tag, dtype and size, and which receive takes which message.

A receive takes the first message of its tag from its source. Messages that come before their receive wait in a
`Mailbox`, and so do receives that have begun before their message has come.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from ..arrays import Array, DType, as_bytes, dtype_name, dtype_named, empty
from ..errors import ArrayError, CommMismatch, shown

Tag: TypeAlias = int | str

MAX_TAG, MAX_TAG_LENGTH = 32767, 24
"""The largest integer, and the longest text, that is a tag."""

UNLABELLED: Tag = "\0unlabelled"
"""In place of a tag: the messages of a call have no labels, and match in order, since both of their ends are one
algorithm of this library. Unless the ranks compare all calls: then their tag is `COMPARED`."""

COMPARED: Tag = -1
"""A tag that no user can give."""

Labelled: TypeAlias = tuple[int, Array, bytes]
"""A peer, the contiguous array sent to it, and its label."""

Ended: TypeAlias = Callable[[float], bool]
"""Whether an exchange that was begun has ended; raises its error, a `CommTimeout` after the given time."""

_HOST: Array = np.empty(0)

LABEL_BYTES, _TAG_BYTES = 64, 34
"""The length of a label, and of the tag in front; dtype and size follow."""


@functools.lru_cache(1024)
def label(tag: Tag, dtype: DType, size: int, *, of_object: bool = False) -> bytes:
    """The label of an array of `size` elements. Those of pickled objects have tags of their own."""
    if tag is UNLABELLED:
        return b""
    front = f"'{tag}'" if isinstance(tag, str) else str(tag)  # as repr, which would lengthen some texts
    front = f"object {front}" if of_object else front
    return front.encode().ljust(_TAG_BYTES) + f"{dtype_name(dtype)} {size}".encode().ljust(
        LABEL_BYTES - _TAG_BYTES
    )


def check_tag(call: str, tag: object) -> Tag:
    """Return `tag` if it is one."""
    if tag is UNLABELLED:
        return UNLABELLED
    if isinstance(tag, (int, np.integer)) and not isinstance(tag, bool) and 0 <= tag <= MAX_TAG:
        return int(tag)
    if isinstance(tag, str) and tag.isascii() and tag.isprintable() and 0 < len(tag) <= MAX_TAG_LENGTH:
        return str(tag)
    hint = "; there is no MPI.ANY_TAG" if tag == -1 else ""
    raise ArrayError(
        f"{call}: tag is {shown(tag)}, expected an integer from 0 to {MAX_TAG}, or a text of 1 to "
        f"{MAX_TAG_LENGTH} ASCII characters{hint}"
    )


def tag_of(of: bytes) -> str:
    """The tag of a label, as errors show it."""
    return of[:_TAG_BYTES].rstrip().decode()


def mismatch(rank: int, source: int, expected: bytes, found: bytes) -> CommMismatch:
    """The error of `rank`, which got another message from `source` than it expects."""
    (dtype, size), (its_dtype, its_size) = _content(expected), _content(found)
    return CommMismatch(
        f"rank {rank} expected {dtype}[{size}]{_with_tag(expected)} from rank {source}, which sent "
        f"{its_dtype}[{its_size}]"
    )


def empty_for(found: bytes, like: Array | None = None) -> Array:
    """An array for a message with this label, of the library of `like`; a host array if it is None."""
    dtype, size = _content(found)
    return empty((size,), dtype_named(dtype), like=_HOST if like is None else like)


def _content(of: bytes) -> tuple[str, int]:
    dtype, size = of[_TAG_BYTES:].decode().split()
    return dtype, int(size)


def _with_tag(of: bytes) -> str:
    return "" if tag_of(of) in ("0", "object 0", str(COMPARED)) else f" with tag {tag_of(of)}"


class Receive:
    """A receive that has begun.

    Args:
        sources: The ranks from one of which it takes a message.
        out: The contiguous array to fill; None for an object.
        expected: The label of the message.
    """

    __slots__ = ("expected", "found", "message", "out", "source", "sources")

    def __init__(self, sources: Sequence[int], out: Array | None, expected: bytes) -> None:
        self.sources, self.out, self.expected = sources, out, expected
        self.source, self.found = -1, b""
        self.message: Any = None
        """The message, once it has come: as a rule an array, which is `out` if it was received into it."""

    def takes(self, peer: int, found: bytes | bytearray) -> bool:
        """Whether a message is from one of the sources, and has the tag."""
        return peer in self.sources and found[:_TAG_BYTES] == self.expected[:_TAG_BYTES]

    def target(self, found: bytes) -> Array:
        """The array to receive a message with this label into: `out` if it fits."""
        return self.out if self.out is not None and found == self.expected else empty_for(found, self.out)

    def deliver(self, peer: int, found: bytes, message: object) -> None:
        """Take a message, which has come."""
        self.source, self.found, self.message = peer, found, message

    def mismatch(self, rank: int) -> CommMismatch | None:
        """The error of `rank` if the message has another dtype or size than the array to fill."""
        if self.out is None or self.found == self.expected:
            return None
        return mismatch(rank, self.source, self.expected, self.found)

    def __str__(self) -> str:
        of = "an object" if self.out is None else f"{self.out.nbytes} bytes"
        return f"{of} from rank {' or '.join(map(str, self.sources))}"


def fill(receives: Mapping[Receive, CommMismatch | None], copy: Callable[[Receive], None]) -> None:
    """Fill the arrays by `copy`, since their messages have come; then raise if one of them does not fit."""
    for receive, wrong in receives.items():
        if wrong is None:
            copy(receive)
    for wrong in receives.values():
        if wrong is not None:
            raise wrong


def finish(receives: Sequence[Receive], rank: int) -> None:
    """Fill the arrays of `rank` with their messages, which are host arrays."""
    fill({each: each.mismatch(rank) for each in receives}, _copy_message)


def _copy_message(receive: Receive) -> None:
    """Copy the message of a receive, a host array, to its array."""
    if receive.out is not None and receive.message is not receive.out:
        as_bytes(receive.out)[...] = as_bytes(receive.message)


def taken(send: Labelled) -> str:
    """What a send waits for, in errors."""
    peer, x, of = send
    return f"rank {peer} receives {x.nbytes} bytes{_with_tag(of)}"


def missing(receive: Receive, arrived: Sequence[bytes]) -> str:
    """What an error says of a receive that waits: its tag, and those that have come from its sources."""
    tags = ", ".join(sorted(set(map(tag_of, arrived))))
    if not tags:
        return f"{_with_tag(receive.expected)}; nothing else came from there"
    return f" with tag {tag_of(receive.expected)}; from there came messages with other tags: {tags}"


class Mailbox:
    """The messages that have come to a rank before their receives, and the receives that wait for messages.

    Several threads may use it at once.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()  # unlike the condition, released wherever a signal handler raises
        self._changed = threading.Condition(self._lock)
        self._arrived: list[tuple[int, bytes, object]] = []
        self._begun: list[Receive] = []

    @property
    def is_idle(self) -> bool:
        """Whether the next message that comes is for the next receive, if their tags are the same."""
        return not self._arrived and not self._begun

    def begin(self, receive: Receive) -> None:
        """Give a receive the first message that it takes, now or once one has come."""
        with self._lock:
            for i, message in enumerate(self._arrived):
                if receive.takes(*message[:2]):
                    receive.deliver(*self._arrived.pop(i))
                    return
            self._begun.append(receive)

    def claim(self, peer: int, found: bytes) -> Receive | None:
        """Return the receive that takes the next message of `peer`, which is about to come; None if none does."""
        with self._lock:
            for i, receive in enumerate(self._begun):
                if receive.takes(peer, found):
                    return self._begun.pop(i)
        return None

    def put(self, peer: int, found: bytes, message: object, receive: Receive | None = None) -> None:
        """Give a message that has come to `receive`, or to the first receive that takes it, or keep it."""
        with self._lock:
            receive = receive or self.claim(peer, found)
            if receive is None:
                self._arrived.append((peer, found, message))
            else:
                receive.deliver(peer, found, message)
            self._changed.notify_all()

    def wait(self, receives: Sequence[Receive], limit_s: float) -> None:
        """Wait for a change, for at most `limit_s`, if the message of a receive has not come."""
        with self._lock:
            if any(each.message is None for each in receives):
                self._changed.wait(max(limit_s, 0.0))

    def wake(self) -> None:
        """End the waits."""
        with self._lock:
            self._changed.notify_all()

    def missing(self, receive: Receive) -> str:
        """See `missing`."""
        return missing(receive, [of for peer, of, _ in self._arrived if peer in receive.sources])
