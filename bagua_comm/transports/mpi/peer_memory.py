"""Large arrays among ranks of one host: each rank reads the parts that it needs from the memory of the others.

So bytes are copied once, whereas a window has them copied twice, and MPI divides them into messages. A call has
two or three rounds of the window. In the first every rank publishes the address of its array. Then each reads,
and reduces the bytes while they are in a cache. The last round is a barrier, after which each rank may change its
array again. A rank that aborts may change it before; so each rank checks for aborted ranks when it has read.

This needs Linux, and ranks that may read each other's memory, as debuggers do (`process_vm_readv`). Open MPI
carries its own messages between processes by the same call. `open_memory` tries it. `largest_copied` finds out up
to which size two copies take less time. Memory of some devices cannot be read like this, even if it is mapped: an
array in such memory has the address `UNREADABLE`.
"""

from __future__ import annotations

import ctypes
import math
import os
import secrets
import time
import weakref
from collections.abc import Callable, Sequence

import numpy as np
from mpi4py import MPI

from ...arrays import Array, Scratch, as_buffer, rows
from ...kernels import Reducer
from ...objects.caching import BoundedCache
from ..base import Transport
from ..pipeline import chunk_bounds
from . import tuning
from .shared_window import SharedWindow, UnreadableError
from .world import World

UNREADABLE = 0
"""The address of an array that other processes cannot read."""

ALONE_BYTES = 1 << 20
"""Up to this many bytes of all other ranks together, the root of a reduction reads and adds all arrays itself."""

PIECE_BYTES = 1 << 18
"""Bytes that are read from a rank before they are reduced, so that they are still in a cache."""

_ADDRESSES = 256
"""The largest number of arrays that are remembered as readable."""

Read = Callable[[int, int, int, int, int, int], int]


class PeerMemory:
    """Reads the memory of the processes of a host.

    Args:
        processes: The process of each rank.
    """

    def __init__(self, processes: Sequence[int]) -> None:
        self._processes, self._own = list(processes), os.getpid()
        self._read = _system_call()
        self._segments = (ctypes.c_size_t * 6)()  # pairs of address and length: one here, and up to two there
        self._here = ctypes.addressof(self._segments)
        self._there = self._here + 2 * ctypes.sizeof(ctypes.c_size_t)
        self._readable: BoundedCache[tuple[int, int], weakref.ref[Array]] = BoundedCache(_ADDRESSES)
        """By address and size, the array that owns readable memory, as long as it lives."""

    def read(self, rank: int, address: int, to: int, nbytes: int) -> None:
        """Copy `nbytes` from this address of a rank to an address of this process.

        Raises:
            UnreadableError: The process has ended, or its memory cannot be read.
        """
        process, segments, left = self._processes[rank], self._segments, nbytes
        while left:
            segments[0], segments[1], segments[2], segments[3] = to, left, address, left
            count = self._read(process, self._here, 1, self._there, 1, 0)
            if count <= 0:
                code = ctypes.get_errno()
                where = f"rank {rank}, process {process}"
                raise UnreadableError(rank, code, f"{os.strerror(code)}: cannot read {left} bytes of {where}")
            to, address, left = to + count, address + count, left - count

    def address(self, x: Array) -> int:
        """The address of contiguous `x` for others to read; `UNREADABLE` if they cannot."""
        address, nbytes = address_of(x), x.nbytes
        known = self._readable.get((address, nbytes))
        if not nbytes or (known is not None and known() is not None):
            return address
        ends = (ctypes.c_uint8 * 2)()
        self._segments[:6] = [ctypes.addressof(ends), 2, address, 1, address + nbytes - 1, 1]
        if self._read(self._own, self._here, 1, self._there, 2, 0) != 2:
            return UNREADABLE
        owner = x if x.base is None else x.base
        if isinstance(owner, np.ndarray) and owner.flags.owndata:
            self._readable[address, nbytes] = weakref.ref(owner)
        return address


class DirectCalls:
    """Collectives of rank `window.rank` that read from arrays of all ranks, whose addresses are known.

    Arrays are C-contiguous host arrays; see `Transport` for the calls.

    Attributes:
        copied_bytes: Ranks copy arrays of at most this size to the window in place of a call from here.
    """

    def __init__(self, window: SharedWindow, memory: PeerMemory, copied_bytes: int = tuning.READ_BYTES) -> None:
        self.rank, self.size, self.copied_bytes = window.rank, window.size, copied_bytes
        self._others = [(self.rank + i) % self.size for i in range(1, self.size)]
        self._window, self.memory = window, memory
        self._scratch = Scratch()

    def broadcast(self, addresses: Sequence[int], x: Array, root: int) -> None:
        """Read `x` of `root`.

        Collective.
        """
        if self.rank != root:
            self.memory.read(root, addresses[root], address_of(x), x.nbytes)
        self._end()

    def allgather(self, addresses: Sequence[int], x: Array, out: Array) -> None:
        """Read `x` of all ranks to the rows of `out`.

        Collective.
        """
        start, nbytes = address_of(out), x.nbytes
        for peer in self._others:
            self.memory.read(peer, addresses[peer], start + peer * nbytes, nbytes)
        if address_of(x) != start + self.rank * nbytes:
            rows(out, self.size)[self.rank] = x.reshape(-1)
        self._end()

    def alltoall(self, addresses: Sequence[int], x: Array, out: Array) -> None:
        """Read row `rank` of `x` of all ranks to the rows of `out`, which does not overlap `x`.

        Collective.
        """
        start, nbytes = address_of(out), out.nbytes // self.size
        for peer in self._others:
            self.memory.read(peer, addresses[peer] + self.rank * nbytes, start + peer * nbytes, nbytes)
        rows(out, self.size)[self.rank] = rows(x, self.size)[self.rank]
        self._end()

    def reduce_scatter(self, addresses: Sequence[int], x: Array, out: Array, add: Reducer) -> None:
        """Reduce chunk `rank` of `x` of all ranks to `out`, which may be that chunk.

        Collective.
        """
        mine = rows(x, self.size)[self.rank]
        self._reduce(addresses, self.rank * mine.nbytes, mine, out.reshape(-1), add)
        self._end()

    def allreduce(self, addresses: Sequence[int], x: Array, out: Array, add: Reducer) -> None:
        """Reduce `x` of all ranks to `out`, which may be `x`: each rank one chunk, which the others read.

        Collective.
        """
        x, out = x.reshape(-1), out.reshape(-1)
        bounds = chunk_bounds(x.size, self.size)
        chunk, start = bounds[self.rank], address_of(out)
        self._reduce(addresses, chunk.start * x.itemsize, x[chunk], out[chunk], add)
        self._collect(start, start, x.itemsize, bounds)

    def reduce(self, addresses: Sequence[int], x: Array, out: Array | None, root: int, add: Reducer) -> None:
        """Reduce `x` of all ranks to `out` of `root`, which may be `x`; `out` is None elsewhere.

        Collective. The root adds all arrays itself if they are small; otherwise each rank reduces a chunk.
        """
        x = x.reshape(-1)
        if len(self._others) * x.nbytes <= ALONE_BYTES:
            if out is not None:
                self._reduce(addresses, 0, x, out.reshape(-1), add)
            self._end()
            return
        bounds = chunk_bounds(x.size, self.size)
        chunk = bounds[self.rank]
        total = x if out is None else out.reshape(-1)
        mine = total[chunk]
        if out is None:
            mine = self._scratch.take("mine", mine.shape, x.dtype, like=x)
        self._reduce(addresses, chunk.start * x.itemsize, x[chunk], mine, add)
        # The address that an array of all chunks would have with this rank's in it.
        start = address_of(mine) - chunk.start * x.itemsize
        self._collect(start, None if out is None else address_of(total), x.itemsize, bounds)

    def _collect(self, start: int, out: int | None, itemsize: int, bounds: Sequence[slice]) -> None:
        """Read the chunk that each rank has reduced to the array at address `out`, if that is not None.

        Collective. `start` is the address of an array in which this rank's chunk lies at its offset.
        """
        addresses = self._window.addresses(0, start)
        assert addresses is not None  # calls that differ were found before
        if out is not None:
            for peer in self._others:
                first, end = bounds[peer].start * itemsize, bounds[peer].stop * itemsize
                self.memory.read(peer, addresses[peer] + first, out + first, end - first)
        self._end()

    def _end(self) -> None:
        """Raise if a rank has aborted, whose array may have changed before it was read; otherwise wait for all.

        Collective.
        """
        self._window.check()
        self._window.barrier()

    def _reduce(self, addresses: Sequence[int], start: int, mine: Array, out: Array, add: Reducer) -> None:
        """Reduce the elements from byte `start` of all ranks' arrays, piece by piece; `out` may be `mine`."""
        length = max(1, min(PIECE_BYTES // mine.itemsize, mine.size))
        room = self._scratch.take("piece", (self.size, length), mine.dtype, like=mine)
        buffer = address_of(room)
        # The sum accumulates in `out`, which may not be a row that is still to be added.
        copied = self.rank > 1 and address_of(mine) == address_of(out)
        for first in range(0, mine.size, length):
            parts = list(room[:, : min(length, mine.size - first)])
            piece = slice(first, first + parts[0].size)
            for peer in self._others:
                to, nbytes = buffer + peer * length * mine.itemsize, parts[peer].nbytes
                self.memory.read(peer, addresses[peer] + start + first * mine.itemsize, to, nbytes)
            if copied:
                parts[self.rank][:] = mine[piece]
            else:
                parts[self.rank] = mine[piece]
            add(parts, out[piece])


def open_memory(transport: Transport) -> PeerMemory | None:
    """The memory of all ranks of `transport`; None on all ranks unless each can read that of all others.

    Collective.
    """
    secret = np.array([secrets.randbits(63)], np.int64)
    mine = np.array([os.getpid(), address_of(secret), secret[0]], np.int64)
    table = np.empty((transport.size, mine.size), np.int64)
    transport.allgather(mine, table)
    return _tried(transport, table) if transport.agree(_is_here()) else None


def _tried(transport: Transport, table: Array) -> PeerMemory | None:
    """Read the last column of the table from every rank, at the address in its second column. Collective."""
    memory, found = PeerMemory(table[:, 0].tolist()), np.zeros(transport.size, np.int64)
    try:
        for rank, address in enumerate(table[:, 1].tolist()):
            memory.read(rank, address, address_of(found[rank:]), found.itemsize)
    except OSError:
        found[:] = 0
    return memory if transport.agree(bool((found == table[:, 2]).all())) else None


def largest_copied(transport: Transport, window: SharedWindow, memory: PeerMemory, world: World) -> int:
    """The size in bytes up to which arrays pass through the window faster than they are read in place.

    Collective. Measured with arrays of `tuning.COPIED_BYTES`, once a world: groups whose ranks all know a result
    measure nothing. It is the same on all ranks.
    """
    nbytes = min(tuning.COPIED_BYTES, window.slot_bytes)
    if nbytes * window.size > tuning.SHOWN_BYTES:
        return tuning.READ_BYTES
    known = np.array([world.copied_bytes], np.int64)
    transport.allreduce(known, known, "min")
    if known[0]:
        return int(known[0])
    x, out = np.zeros((2, nbytes), np.uint8)
    rows, peer = window.rows(nbytes, x.dtype), (window.rank + 1) % window.size
    copied_s, read_s = [], []
    for i in range(tuning.PROBES_OF_COPIES):
        x[...] = i  # as a program that has computed `x`
        window.barrier()
        start = time.perf_counter()
        shown = window.gather(rows, x, 0)
        assert shown is not None
        out[...] = shown.all[peer]
        middle = time.perf_counter()
        x[...] = i
        window.barrier()
        second = time.perf_counter()
        addresses = window.addresses(0, address_of(x))
        assert addresses is not None
        try:
            memory.read(peer, addresses[peer], address_of(out), nbytes)
        except OSError:  # on this rank alone, perhaps: it stays in step with the others
            second = -math.inf
        window.barrier()
        copied_s.append(middle - start)
        read_s.append(time.perf_counter() - second)
    is_faster = transport.agree(min(copied_s) < min(read_s))
    world.copied_bytes = tuning.SHOWN_BYTES if is_faster else tuning.READ_BYTES
    return world.copied_bytes


def address_of(x: Array) -> int:
    """The address of contiguous `x`."""
    return MPI.Get_address(as_buffer(x))


def _is_here() -> bool:
    return hasattr(ctypes.CDLL(None), "process_vm_readv")


def _system_call() -> Read:
    call = ctypes.CDLL(None, use_errno=True).process_vm_readv
    vector = ctypes.c_void_p, ctypes.c_ulong
    call.restype, call.argtypes = ctypes.c_ssize_t, [ctypes.c_int, *vector, *vector, ctypes.c_ulong]
    return call
