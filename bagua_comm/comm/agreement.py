"""Comparison of calls among ranks, which `connect(check=True)` makes before a call moves a byte.

All comparisons go over the transport of host arrays. Before a collective call, each rank sends a description of
its call to all others. A message between two ranks is preceded by its description, which the receiver compares
with what it expects.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ..arrays import Array, dtype_name, dtype_named, library, text_row, texts_of
from ..errors import ArrayError, CommError, CommMismatch
from ..topology import split_group
from ..transports.base import Transport
from ..transports.flow import DESCRIPTION

TEXT_BYTES = 256
"""Size of the description of a call or a message."""

_DIGEST = 16


def equality_terms(data: bytes) -> Array:
    """An array whose maximum over all ranks shows whether they all give the same `data`; see `are_equal`.

    It has a 128-bit hash and its complement, whose maximum is the complement of the smallest hash.
    """
    hashed = np.frombuffer(hashlib.blake2b(data, digest_size=_DIGEST).digest(), np.uint64)
    return np.concatenate([hashed, ~hashed])


def are_equal(largest: Array) -> bool:
    """Whether all ranks gave the same data, by the maximum of their `equality_terms`."""
    return bool((largest[:2] == ~largest[2:4]).all())


def compare_calls(host: Transport, call: str) -> None:
    """Raise `CommMismatch` on all ranks unless `call` is the same on all of them.

    Collective. The calls themselves are exchanged only if they differ.
    """
    terms = equality_terms(call.encode())
    try:
        host.allreduce(terms, terms, "max")
    except CommError as exc:
        exc.args = (f"{call}: ranks were comparing their calls: {exc}",)
        raise
    if are_equal(terms):
        return
    table = np.empty((host.size, TEXT_BYTES), np.uint8)
    try:
        host.allgather(_packed(call), table)
    except CommError as exc:
        exc.args = (f"{call}: ranks were comparing their calls: {exc}",)
        raise
    calls = texts_of(table)
    for rank, other in enumerate(calls):
        if other != calls[0]:
            raise CommMismatch(f"rank 0 called {calls[0]}, but rank {rank} called {other}")


def compare_counts(host: Transport, sends: Sequence[int], recvs: Sequence[int]) -> None:
    """Raise `CommMismatch` on all ranks unless each rank sends as many elements as its receiver expects.

    Collective.

    Args:
        host: Moves host arrays.
        sends: Numbers of elements that this rank sends to each rank, (p,).
        recvs: Numbers of elements that it expects from each rank, (p,).
    """
    size, sent, expected = host.size, np.empty(host.size, np.int64), np.array(recvs, np.int64)
    host.alltoall(np.array(sends, np.int64), sent)
    wrong = np.flatnonzero(sent != expected)
    first = np.array([wrong[0] * size + host.rank if wrong.size else size * size], np.int64)
    host.allreduce(first, first, "min")
    source, dest = divmod(int(first[0]), size)
    if source < size:
        found = np.array([sent[source], expected[source]])
        host.broadcast(found, dest)
        raise CommMismatch(f"rank {source} sends {found[0]} elements to rank {dest}, which expects {found[1]}")


def agree_on_split(host: Transport, color: object, key: object) -> int:
    """Return the position of this rank among the ranks of the same `color`, ordered by (`key`, rank).

    Collective. Positions replace the keys, of 64 bits, since libraries have keys of 32 bits.

    Raises:
        ArrayError: The color or the key of a rank is not an integer in its range. Raised on all ranks.
    """
    host.agree_on_call("split", np.empty(0, np.uint8))  # the allgather may also be one of another rank
    problem = _not_in("color", color, 0, 2**31) or _not_in("key", key, -(2**63), 2**63)
    table = np.empty((host.size, 3), np.int64)
    host.allgather(np.array([1, 0, 0] if problem else [0, color, key], np.int64), table)
    wrong = np.flatnonzero(table[:, 0])
    if wrong.size:
        texts = np.empty((host.size, TEXT_BYTES), np.uint8)
        host.allgather(_packed(problem), texts)
        text = texts_of(texts)[wrong[0]]
        hint = "; ranks that no group needs give a color of their own" if text.startswith("color") else ""
        raise ArrayError(f"split: {text}, on rank {wrong[0]}{hint}")
    _, colors, keys = table.T.tolist()
    return split_group(host.rank, colors, keys).index(host.rank)


def _not_in(name: str, value: object, first: int, end: int) -> str:
    """Return what is wrong with an argument that must be an integer from `first` to `end` - 1, or ""."""
    if isinstance(value, (int, np.integer)) and first <= value < end:
        return ""
    return f"{name} is {value!r}, expected an integer from {first} to {end - 1}"


class Mismatch(NamedTuple):
    """A message that differs from what its receiver expects."""

    error: CommMismatch
    library: str
    """The library of its array, or "object"."""
    nbytes: int


class MessageChecker:
    """Numbers, describes and compares the messages between this rank and each other one."""

    def __init__(self) -> None:
        self._sent: Counter[int] = Counter()
        self._received: Counter[int] = Counter()

    def compare(
        self,
        host: Transport,
        call: str,
        sends: Sequence[tuple[int, Array | None]],
        recvs: Sequence[tuple[int, Array | None]],
    ) -> list[Mismatch | None]:
        """Send descriptions of outgoing messages, and compare the incoming ones with what this rank expects.

        Args:
            host: Moves host arrays.
            call: The call that this rank makes.
            sends: Peers, and the arrays that go to them; None in place of an object.
            recvs: Peers, and the arrays to fill; None in place of an object.

        Returns:
            A mismatch for each of `recvs`; None if its message fits.
        """
        outgoing = [(peer, _packed(self._describe(call, self._sent, peer, x))) for peer, x in sends]
        incoming = [(peer, np.empty(TEXT_BYTES, np.uint8)) for peer, _ in recvs]
        host.exchange(outgoing, incoming, tag=DESCRIPTION)
        return [
            _mismatch(host.rank, peer, self._describe(call, self._received, peer, x), *texts_of(text[None]))
            for (peer, x), (_, text) in zip(recvs, incoming, strict=True)
        ]

    def _describe(self, call: str, count: Counter[int], peer: int, x: Array | None) -> str:
        """Return number, library, dtype, size, and call with shape, as text; all but the call must match."""
        count[peer] += 1
        if x is None:
            return f"{count[peer]} object object 0 {call}"
        name = dtype_name(x.dtype)
        return f"{count[peer]} {library(x)} {name} {x.size} {call} of {name}{list(x.shape)}"


def _mismatch(rank: int, peer: int, expected: str, found: str) -> Mismatch | None:
    """Compare two descriptions of a message; return how they differ, or None."""
    *wanted, my_call = expected.split(" ", 4)
    *received, its_call = found.split(" ", 4)
    if wanted == received:
        return None
    number, library, dtype, count = received
    reason = "" if wanted[1] == library else f" ({library}, where {wanted[1]} is expected)"
    numbers = f"message {number}" if number == wanted[0] else f"message {number}, instead of message {wanted[0]},"
    return Mismatch(
        CommMismatch(f"{numbers} from rank {peer} is its {its_call}, but rank {rank} called {my_call}{reason}"),
        library,
        0 if library == "object" else int(count) * dtype_named(dtype).itemsize,
    )


def _packed(text: str) -> Array:
    """Return `text` as bytes; a long text is cut and gets a digest of the whole."""
    data = text.encode()
    if len(data) > TEXT_BYTES:
        digest = hashlib.blake2b(data, digest_size=_DIGEST // 2).hexdigest()
        text = data[: TEXT_BYTES - _DIGEST - 4].decode(errors="ignore") + "... " + digest
    return text_row(text, TEXT_BYTES)
