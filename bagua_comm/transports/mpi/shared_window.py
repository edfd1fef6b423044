"""Collectives among ranks on one host, through memory that all of them map.

A window holds two slots and a counter of rounds for each rank. In a round every rank fills one of its slots,
raises its counter, waits until all counters are as high (`SharedWindow.barrier`), and reads what it needs from
the others' slots. In the next round it fills its other slot. By then all ranks have read that one, since none
enters a round before it has finished the previous one. Large arrays pass in pieces, one piece a round. An
allreduce publishes the sums of piece i in the round of piece i + 1, so it needs one barrier per piece, not two.

Small arrays take one round: each rank writes its own array, with the id of its call, and reads all others'. The
ids are the same on all ranks if all make the same call, so no call is mistaken for another one.

Rows are reduced in rank order: all ranks hold the same bytes, those of `kernels.host.reduce_rows`. Each element
of a large array has one owner, which reduces it. Calls that only move large arrays are left to MPI, which copies
them once, from process to process.

A rank that aborts, for instance after a timeout, sets its mark. Where ranks read each other's own memory
(`peer_memory`), its program may change an array while another rank still reads it. So each reader checks the
marks after the last byte.

The window needs Linux. Its memory is allocated when it is first written to. Each window keeps one file open.
"""

from __future__ import annotations

import mmap
import os
import platform
import secrets
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack

import numpy as np

from ... import kernels
from ...arrays import Array, DType, Scratch, rows
from ...system.processes import this_host
from ..base import Transport
from ..pipeline import Encoding, chunk_bounds

SLOT_BYTES = 1 << 20
"""Bytes that a rank writes in a round; a window has twice as many for each rank. A smaller slot is as fast on
idle cores, but up to twice as slow on busy ones, where a wait may cost a time slice. A larger one is no
faster."""

PIECE_BYTES = 1 << 18
"""Bytes of an array that pass in a round on their way to one rank."""

FEW_RANKS = 3
"""Up to this number of ranks, the root of a reduction adds all arrays itself."""

_LINE = 64
"""Bytes of a cache line. Each rank's numbers have a line, and each part of a slot begins at one."""

_SPINS = 200
"""How often a rank checks the others' counters before it looks at the clock: about ten microseconds."""

_NAME = "bagua-{}"
"""The name of the memory, with a random number."""

ORDERS_STORES = "x86_64", "AMD64", "i686", "i386"
"""Machines that execute loads in order, and stores in order, by `platform.machine`."""

WaitUntil = Callable[[Callable[[], bool]], None]
"""Returns when a condition holds; raises if it takes too long."""


class PeerAbortedError(Exception):
    """A rank has aborted while others may have read its memory.

    Args:
        rank: That rank.
    """

    def __init__(self, rank: int) -> None:
        super().__init__(f"rank {rank} aborted while its array was read")
        self.rank = rank


class UnreadableError(OSError):
    """The memory of a rank cannot be read: its process has ended, or has freed it.

    Args:
        rank: The rank.
        code: The error number.
        text: Says what could not be read.
    """

    def __init__(self, rank: int, code: int, text: str) -> None:
        super().__init__(code, text)
        self.rank = rank


class Barrier:
    """A full memory barrier when it is called, on machines that reorder loads and stores.

    Taking a lock orders the accesses after it, and freeing a lock those before it. With one of each, accesses
    before and after may still be reordered between them; accesses before the first release and after the second
    acquisition cannot.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def __call__(self) -> None:
        """Order the accesses before this and after it."""
        with self._lock:
            pass
        with self._lock:
            pass


def memory_barrier() -> Barrier | None:
    """A memory barrier; None on machines that need none: they reorder neither two loads nor two stores."""
    return None if platform.machine() in ORDERS_STORES else Barrier()


class Rows:
    """The arrays of all ranks in a round of small arrays.

    Attributes:
        all: p rows of m elements, (m,) each.
        mine: The row of this rank.
        chunks: This rank's chunk of each row, (m // p,) each.
    """

    __slots__ = ("all", "chunks", "mine")

    def __init__(self, table: Array, rank: int) -> None:
        size, count = table.shape
        self.all = tuple(table)
        self.mine, length = self.all[rank], count // size
        self.chunks = tuple(table[:, rank * length : (rank + 1) * length])


class SharedWindow:
    """Memory that all ranks of one host map, and collectives through it; this is rank `rank` of `size`.

    Arrays are C-contiguous host arrays; see `Transport` for the calls.
    """

    def __init__(self, memory: mmap.mmap, rank: int, size: int, wait: WaitUntil) -> None:
        self.rank, self.size, self._wait = rank, size, wait
        self._others = [(rank + i) % size for i in range(1, size)]
        numbers = memoryview(memory)[: size * _LINE].cast("q")
        self._counters = numbers[:: _LINE // 8]
        self.calls = numbers[1 :: _LINE // 8]
        """How many collective calls each rank has begun; each rank writes its own count."""
        self._call_ids = numbers[2 :: _LINE // 8], numbers[3 :: _LINE // 8]
        """The id of the call that each rank makes, by parity of the round."""
        self._addresses = numbers[4 :: _LINE // 8], numbers[5 :: _LINE // 8]
        """The address of each rank's array, by parity of the round."""
        self._marks = numbers[6 :: _LINE // 8]
        """Whether each rank has aborted."""
        self._data = np.frombuffer(memory, np.uint8, offset=size * _LINE).reshape(2, size, SLOT_BYTES)
        self.slot_bytes = SLOT_BYTES
        """Bytes that a rank can write in a round."""
        self._round = 0
        self._scratch = Scratch()
        self._fence = memory_barrier()

    def rows(self, count: int, dtype: DType) -> tuple[Rows, Rows]:
        """The slots of all ranks for arrays of `count` elements, which fit, by parity of the round."""
        nbytes = count * dtype.itemsize
        even, odd = (Rows(slots[:, :nbytes].view(dtype), self.rank) for slots in self._data)
        return even, odd

    def gather(self, rows: tuple[Rows, Rows], x: Array | None, call: int) -> Rows | None:
        """Write `x`, unless None, to this rank's slot and return all slots; None everywhere if call ids differ.

        Collective. The result is valid until the next call.
        """
        parity = self._round & 1
        shown, call_ids = rows[parity], self._call_ids[parity]
        if x is not None:
            shown.mine[...] = x
        call_ids[self.rank] = call
        self.barrier()
        for peer in self._others:
            if call_ids[peer] != call:
                return None
        return shown

    def agree(self, call: int) -> bool:
        """Whether the call ids of all ranks are the same.

        Collective.
        """
        call_ids = self._call_ids[self._round & 1]
        call_ids[self.rank] = call
        self.barrier()
        for peer in self._others:  # noqa: SIM110 - this is faster
            if call_ids[peer] != call:
                return False
        return True

    def addresses(self, call: int, address: int) -> Sequence[int] | None:
        """The `address` of every rank; None on every rank if the call ids differ.

        Collective. The result is valid until the next call but one.
        """
        addresses = self._addresses[self._round & 1]
        addresses[self.rank] = address
        return addresses if self.agree(call) else None

    def reduce(self, x: Array, out: Array | None, root: int, op: str) -> None:
        """Reduce `x` over all ranks into `out` of `root`, which may be `x`.

        Collective. The root adds all rows of up to `FEW_RANKS` ranks; otherwise each rank reduces a chunk.
        """
        x = x.reshape(-1)
        if self.size > FEW_RANKS:
            nothing, bounds = np.empty(0, x.dtype), chunk_bounds(x.size, self.size)
            results = [nothing] * self.size if out is None else [out.reshape(-1)[chunk] for chunk in bounds]
            chunks, mine = [x[chunk] for chunk in bounds], results[self.rank]
            if out is None:
                mine = self._scratch.take("mine", chunks[self.rank].shape, x.dtype, like=x)
            self._reduce(chunks, mine, op, results)
            return
        length = min(PIECE_BYTES, self.slot_bytes) // x.itemsize
        for piece in _pieces(x.size, length):
            slots, part = self._data[self._round % 2, :, : length * x.itemsize].view(x.dtype), x[piece]
            if out is None:
                _write(slots[self.rank], part)
            self.barrier()
            if out is not None:
                rows = [part if r == root else slots[r, : part.size] for r in range(self.size)]
                kernels.on_host().reduce_rows(rows, out.reshape(-1)[piece], op)

    def allreduce(self, x: Array, out: Array, op: str) -> None:
        """Reduce `x` over all ranks into `out` on all ranks. `out` may be `x`.

        Collective.
        """
        bounds = chunk_bounds(x.size, self.size)
        results = [out.reshape(-1)[chunk] for chunk in bounds]
        self._reduce([x.reshape(-1)[chunk] for chunk in bounds], results[self.rank], op, results)

    def allreduce_encoded(self, code: Encoding, out: Array) -> None:
        """Sum the encoded elements of all ranks, and decode the sum into `out` on all ranks.

        Collective. Each rank decodes the chunk that it reduces; a piece is encoded, added and decoded while it is
        in a cache.
        """
        out, rank = out.reshape(-1), self.rank
        bounds = chunk_bounds(out.size, self.size)
        results = [out[chunk] for chunk in bounds]
        slots = self._slots(code.dtype)
        shape = 2, min(slots.shape[-1], results[0].size)
        room = self._scratch.take("encoded", shape, code.dtype, like=out)

        def fill(peer: int, piece: slice, slot: Array) -> None:
            part = _within(bounds[peer], piece)
            code.encode(part, slot[: part.stop - part.start])

        def combine(piece: slice, now: Array) -> Array:
            part = _within(bounds[rank], piece)
            mine, total = room[:, : part.stop - part.start]
            code.encode(part, mine)
            rows = [mine if r == rank else now[r, : mine.size] for r in range(self.size)]
            kernels.on_host().reduce_rows(rows, total, "sum")
            code.decode(total, part, out[part])
            return out[part]

        self._pass(results[0].size, slots, fill, combine, results)

    def reduce_scatter(self, x: Array, out: Array, op: str) -> None:
        """Reduce `x`, (p, m), over all ranks and keep chunk `rank` in `out`, which may lie in `x`.

        Collective.
        """
        self._reduce(rows(x, self.size), out.reshape(-1), op)

    def _reduce(self, chunks: Sequence[Array], mine: Array, op: str, results: Sequence[Array] = ()) -> None:
        """Reduce chunk `rank` of all ranks to `mine`; collect all reduced chunks in `results`, if given."""

        def fill(peer: int, piece: slice, slot: Array) -> None:
            _write(slot, chunks[peer][piece])

        def combine(piece: slice, now: Array) -> Array:
            total = mine[piece]
            parts = [chunks[r][piece] if r == self.rank else now[r, : total.size] for r in range(self.size)]
            kernels.on_host().reduce_rows(parts, total, op)
            return total

        self._pass(len(chunks[0]), self._slots(mine.dtype), fill, combine, results)

    def _pass(
        self,
        count: int,
        slots: Array,
        fill: Callable[[int, slice, Array], None],
        combine: Callable[[slice, Array], Array],
        results: Sequence[Array],
    ) -> None:
        """Pass chunks of at most `count` elements through `slots`, piece by piece.

        Args:
            count: How many elements the longest chunk has.
            slots: See `_slots`.
            fill: Writes a piece of a rank's chunk to a slot.
            combine: Reduces a piece of this rank's chunk; takes the slots for this rank, a row for each rank.
            results: Where to collect the reduced chunks of all ranks; empty if each rank keeps only its own.
        """
        rank, length = self.rank, slots.shape[-1]
        # The sums of a piece pass one round after its parts, so the last round passes only sums.
        for piece in _pieces(count + length if results else count, length):
            now, later = slots[self._round % 2], slots[1 - self._round % 2]
            for peer in self._others:
                fill(peer, piece, now[rank, peer])
            self.barrier()
            total = combine(piece, now[:, rank])
            if results:
                _write(later[rank, rank].view(total.dtype), total)
                last = slice(max(piece.start - length, 0), piece.start)
                for peer in self._others:
                    _read(now[peer, peer].view(total.dtype), results[peer][last])

    def _slots(self, dtype: DType) -> Array:
        """View the slots as (2, p, p, elements): by parity of the round, by writing rank, by reading rank."""
        nbytes = self._data.shape[-1] // self.size // _LINE * _LINE
        view: Array = self._data[..., : self.size * nbytes].reshape(2, self.size, self.size, nbytes).view(dtype)
        return view

    def barrier(self) -> None:
        """End this rank's writes of a round, and wait until all others have ended theirs.

        Collective.
        """
        this_round, counters, others = self._round + 1, self._counters, self._others
        self._round = this_round
        fence = self._fence
        if fence is not None:
            fence()
        counters[self.rank] = this_round
        for peer in others:
            spins = _SPINS
            while counters[peer] < this_round:
                spins -= 1
                if not spins:
                    self._wait(lambda: counters[peer] >= this_round)  # noqa: B023 - within this turn of the loop
                    break
        if fence is not None:
            fence()

    def abort(self) -> None:
        """Mark this rank as aborted; from then on its program may change its arrays."""
        self._marks[self.rank] = 1
        if self._fence is not None:
            self._fence()

    def check(self, peers: Iterable[int] | None = None) -> None:
        """Raise `PeerAbortedError` if one of these ranks has aborted: bytes read from its memory may be wrong.

        Args:
            peers: The ranks; all others if None.
        """
        if self._fence is not None:
            self._fence()
        marks = self._marks
        for peer in self._others if peers is None else peers:
            if marks[peer]:
                raise PeerAbortedError(peer)


def open_window(transport: Transport, wait: WaitUntil) -> SharedWindow | None:
    """A window over the ranks of `transport`; None on all ranks unless they run on one host that allows it.

    Collective. The memory has no name in any file system; it is freed when the last process that maps it ends.
    """
    nbytes = transport.size * (_LINE + 2 * SLOT_BYTES)
    location = np.zeros(4, np.int64)
    with ExitStack() as files:  # the file stays open until all ranks have mapped it
        if transport.rank == 0:
            location[:] = _host(), *_create(nbytes, files)
        transport.broadcast(location, 0)
        host, process, file, number = location.tolist()
        memory = _map(process, file, number, nbytes) if host == _host() else None
        shared = transport.agree(memory is not None)
    return SharedWindow(memory, transport.rank, transport.size, wait) if memory and shared else None


def _host() -> int:
    """A number that identifies this host."""
    return zlib.crc32(this_host().encode())


def _create(nbytes: int, files: ExitStack) -> tuple[int, int, int]:
    """Create memory for others to map; returns its process, file descriptor and number; zeros after a failure."""
    number = secrets.randbits(63)
    try:
        file = os.memfd_create(_NAME.format(number))
        files.callback(os.close, file)
        os.fchmod(file, 0o600)  # of a new one it is 0o777
        os.ftruncate(file, nbytes)
    except (AttributeError, OSError):  # AttributeError: only Linux has memfd_create
        return 0, 0, 0
    return os.getpid(), file, number


def _map(process: int, file: int, number: int, nbytes: int) -> mmap.mmap | None:
    """Map the memory of this process and file; None if it cannot be reached from here, as on another host."""
    path = f"/proc/{process}/fd/{file}"
    try:
        # On another host, or in another container, the path may lead to something else.
        if os.readlink(path) != f"/memfd:{_NAME.format(number)} (deleted)":
            return None
        with open(path, "r+b", buffering=0) as opened:
            return mmap.mmap(opened.fileno(), nbytes)
    except (OSError, ValueError):
        return None


def _pieces(count: int, length: int) -> Iterator[slice]:
    """Cut `count` elements into slices of `length`; the last may reach beyond the end."""
    return (slice(start, start + length) for start in range(0, count, length))


def _within(chunk: slice, piece: slice) -> slice:
    """The part of an array that is this piece of its chunk."""
    return slice(min(chunk.start + piece.start, chunk.stop), min(chunk.start + piece.stop, chunk.stop))


def _write(slot: Array, values: Array) -> None:
    slot[: values.size] = values


def _read(slot: Array, out: Array) -> None:
    out[...] = slot[: out.size]
