"""Packets: pickled objects on their way between ranks, over the transport of host arrays.

If a rank cannot pickle its object, an error is sent in its place, and all ranks raise it.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from ..arrays import Array
from ..errors import ArrayError, BaguaError, UnsupportedError
from ..transports import rounds
from ..transports.base import Transport
from ..transports.flow import COLLECTIVE, Flow


class Packet(NamedTuple):
    """A pickled object, or the error to raise in its place."""

    size: int
    """Number of bytes; negative for an error."""
    data: Array

    @property
    def head(self) -> Array:
        """The size as an array; it is sent first, so that the receiver can allocate."""
        return np.array([self.size], np.int64)

    def open(self) -> Any:
        """Return the object, or raise the error."""
        value = pickle.loads(self.data.tobytes())
        if self.size < 0:
            raise value
        return value


EMPTY = Packet(0, np.empty(0, np.uint8))


def pack(call: str, obj: Any) -> Packet:
    """Pickle an object; if that fails, pack an error in its place."""
    try:
        data = pickle.dumps(obj)
    except Exception as exc:
        what = f"{call}: this {type(obj).__qualname__} cannot be pickled: {type(exc).__name__}: {exc}"
        return _pack_error(UnsupportedError(what))
    return Packet(len(data), np.frombuffer(data, np.uint8))


def pack_each(call: str, objs: Iterable[Any] | None, count: int) -> list[Packet]:
    """Pickle `count` objects, one for each rank; if that fails, every packet is the error."""
    try:
        found = None if objs is None else list(objs)
        what = "None" if found is None else f"{len(found)} objects"
    except Exception as exc:
        found, what = None, f"not a list: {type(exc).__name__}: {exc}"
    if found is None or len(found) != count:
        wrong = ArrayError(f"{call}: objs is {what}; expected {count} objects, one for each rank")
        return [_pack_error(wrong)] * count
    packets = [pack(call, obj) for obj in found]
    failed = [packet for packet in packets if packet.size < 0]
    return failed[:1] * count if failed else packets


def broadcast(host: Transport, packet: Packet, root: int) -> Packet:
    """Send the packet of `root` to every rank, and return it.

    Collective.
    """
    head = packet.head
    host.broadcast(head, root)
    if host.rank != root:
        packet = empty_packet(head[0])
    host.broadcast(packet.data, root)
    return packet


def allgather(host: Transport, packet: Packet) -> list[Packet]:
    """Return the packets of all ranks.

    Collective.
    """
    sizes = _sizes(host, packet)
    packets = [packet if r == host.rank else empty_packet(size) for r, size in enumerate(sizes)]
    if rounds.are_fewer(host, sum(map(abs, sizes))):
        rounds.allgather(Flow(host, None), packet.data, [each.data for each in packets])
        return packets
    others = host.others()
    host.exchange([(r, packet.data) for r in others], [(r, packets[r].data) for r in others], tag=COLLECTIVE)
    return packets


def gather(host: Transport, packet: Packet, root: int) -> list[Packet]:
    """Return the packets of all ranks on `root`, and none elsewhere; if any is an error, the first on all ranks.

    Collective.
    """
    sizes = _sizes(host, packet)
    failed = next((r for r, size in enumerate(sizes) if size < 0), None)
    if failed is not None:
        error = packet if host.rank == failed else empty_packet(sizes[failed])
        host.broadcast(error.data, failed)
        return [error]
    if host.rank != root:
        host.exchange([(root, packet.data)], [], tag=COLLECTIVE)
        return []
    packets = [packet if r == root else empty_packet(size) for r, size in enumerate(sizes)]
    host.exchange([], [(r, packets[r].data) for r in host.others()], tag=COLLECTIVE)
    return packets


def scatter(host: Transport, packets: list[Packet], root: int) -> Packet:
    """Send packet r of `root` to rank r; return that of this rank.

    Collective.
    """
    if host.rank == root:
        others = host.others()
        host.exchange([(r, packets[r].head) for r in others], [], tag=COLLECTIVE)
        host.exchange([(r, packets[r].data) for r in others], [], tag=COLLECTIVE)
        return packets[root]
    return _receive(host, root)


def _receive(host: Transport, source: int) -> Packet:
    """Return the next packet from `source`."""
    head = np.zeros(1, np.int64)
    host.exchange([], [(source, head)], tag=COLLECTIVE)
    packet = empty_packet(head[0])
    host.exchange([], [(source, packet.data)], tag=COLLECTIVE)
    return packet


def _pack_error(error: BaguaError) -> Packet:
    data = pickle.dumps(error)
    return Packet(-len(data), np.frombuffer(data, np.uint8))


def empty_packet(size: int) -> Packet:
    """Return a packet of this size to receive into."""
    return Packet(int(size), np.empty(abs(int(size)), np.uint8))


def _sizes(host: Transport, packet: Packet) -> list[int]:
    sizes = np.empty(host.size, np.int64)
    host.allgather(packet.head, sizes)
    found: list[int] = sizes.tolist()
    return found
