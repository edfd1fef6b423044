"""Objects between ranks, by pickle, over the transport of host arrays.

If one rank cannot pickle its object, the error travels in the object's place, and all ranks raise it.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from ..arrays import Array
from ..errors import ArrayError, BaguaError, UnsupportedError
from ..transports.base import COLLECTIVE, OBJECT, Transport


class Parcel(NamedTuple):
    """A pickled object, or the error to raise in its place."""

    size: int
    """How many bytes; negative for an error."""
    data: Array

    @property
    def head(self) -> Array:
        """The size as an array, which goes ahead so that the receiver knows how much to expect."""
        return np.array([self.size], np.int64)

    def open(self) -> Any:
        """Return the object, or raise the error."""
        value = pickle.loads(self.data.tobytes())
        if self.size < 0:
            raise value
        return value


NOTHING = Parcel(0, np.empty(0, np.uint8))


def pack(call: str, obj: Any) -> Parcel:
    """Pickle an object; if that fails, pack an error in its place."""
    try:
        data = pickle.dumps(obj)
    except Exception as exc:
        what = f"{call}: this {type(obj).__qualname__} cannot be pickled: {type(exc).__name__}: {exc}"
        return _pack_error(UnsupportedError(what))
    return Parcel(len(data), np.frombuffer(data, np.uint8))


def pack_each(call: str, objs: Iterable[Any] | None, count: int) -> list[Parcel]:
    """Pickle `count` objects, one for each rank; if that fails, every parcel is the error."""
    try:
        found = None if objs is None else list(objs)
        what = "None" if found is None else f"{len(found)} objects"
    except Exception as exc:
        found, what = None, f"not a list: {type(exc).__name__}: {exc}"
    if found is None or len(found) != count:
        wrong = ArrayError(f"{call}: objs is {what}; expected {count} objects, one for each rank")
        return [_pack_error(wrong)] * count
    parcels = [pack(call, obj) for obj in found]
    failed = [parcel for parcel in parcels if parcel.size < 0]
    return failed[:1] * count if failed else parcels


def broadcast(host: Transport, parcel: Parcel, root: int) -> Parcel:
    """Give every rank the parcel of `root`.

    Collective.
    """
    head = parcel.head
    host.broadcast(head, root)
    if host.rank != root:
        parcel = _room(head[0])
    host.broadcast(parcel.data, root)
    return parcel


def allgather(host: Transport, parcel: Parcel) -> list[Parcel]:
    """Collect the parcels of all ranks.

    Collective.
    """
    parcels = [parcel if r == host.rank else _room(size) for r, size in enumerate(_sizes(host, parcel))]
    others = host.others()
    host.exchange([(r, parcel.data) for r in others], [(r, parcels[r].data) for r in others], tag=COLLECTIVE)
    return parcels


def gather(host: Transport, parcel: Parcel, root: int) -> list[Parcel]:
    """Collect the parcels of all ranks on `root`, and none elsewhere; if any is an error, the first on all ranks.

    Collective.
    """
    sizes = _sizes(host, parcel)
    failed = next((r for r, size in enumerate(sizes) if size < 0), None)
    if failed is not None:
        error = parcel if host.rank == failed else _room(sizes[failed])
        host.broadcast(error.data, failed)
        return [error]
    if host.rank != root:
        host.exchange([(root, parcel.data)], [], tag=COLLECTIVE)
        return []
    parcels = [parcel if r == root else _room(size) for r, size in enumerate(sizes)]
    host.exchange([], [(r, parcels[r].data) for r in host.others()], tag=COLLECTIVE)
    return parcels


def scatter(host: Transport, parcels: list[Parcel], root: int) -> Parcel:
    """Give each rank its parcel of those on `root`, which has one for each.

    Collective.
    """
    if host.rank == root:
        others = host.others()
        host.exchange([(r, parcels[r].head) for r in others], [], tag=COLLECTIVE)
        host.exchange([(r, parcels[r].data) for r in others], [], tag=COLLECTIVE)
        return parcels[root]
    return receive(host, root, tag=COLLECTIVE)


def send(host: Transport, parcel: Parcel, dest: int) -> None:
    """Send a parcel, which `receive` takes."""
    host.exchange([(dest, parcel.head), (dest, parcel.data)], [], tag=OBJECT)


def receive(host: Transport, source: int, *, tag: int = OBJECT) -> Parcel:
    """The next parcel from `source`."""
    head = np.zeros(1, np.int64)
    host.exchange([], [(source, head)], tag=tag)
    parcel = _room(head[0])
    host.exchange([], [(source, parcel.data)], tag=tag)
    return parcel


def _pack_error(error: BaguaError) -> Parcel:
    data = pickle.dumps(error)
    return Parcel(-len(data), np.frombuffer(data, np.uint8))


def _room(size: int) -> Parcel:
    """An empty parcel of this size, to receive into."""
    return Parcel(int(size), np.empty(abs(int(size)), np.uint8))


def _sizes(host: Transport, parcel: Parcel) -> list[int]:
    sizes = np.empty(host.size, np.int64)
    host.allgather(parcel.head, sizes)
    found: list[int] = sizes.tolist()
    return found
