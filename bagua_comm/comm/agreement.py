"""Comparison of calls among ranks, which `connect(check=True)` makes before a call moves a byte.

All comparisons go over the transport of host arrays: each rank sends a description of its call to all others.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from ..arrays import Array, text_row, texts_of
from ..errors import ArrayError, CommError, CommMismatch
from ..topology import split_group
from ..transports.base import Transport

TEXT_BYTES = 256
"""Size of the description of a call."""

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


def _packed(text: str) -> Array:
    """Return `text` as bytes; a long text is cut and gets a digest of the whole."""
    data = text.encode()
    if len(data) > TEXT_BYTES:
        digest = hashlib.blake2b(data, digest_size=_DIGEST // 2).hexdigest()
        text = data[: TEXT_BYTES - _DIGEST - 4].decode(errors="ignore") + "... " + digest
    return text_row(text, TEXT_BYTES)
