"""Device arrays by way of pinned host memory, over any transport that moves host arrays.

For ranks that share a GPU, and wherever NCCL cannot be used. Arrays go in pieces: while one piece is copied to
the host, the host transport moves the piece before it, and the one before that is copied to the device. Copies to
the host have a stream of their own. Copies to the device are enqueued on the caller's current stream, so that
they precede the caller's next work. The host waits for each piece to arrive, since the host transport needs its
bytes. It also waits for the copies to the device of the previous call, whose memory it reuses.

Results are those of the host transport. If that chooses its algorithm by size, sums of floats may be rounded
differently than in an array sent whole, but identically on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import NamedTuple

import cupy
import cupyx
import numpy as np

from ..arrays import Array, OpOrder, address
from ..execution.cuda import Event, record_event
from .base import Transport
from .flow import COLLECTIVE, POINT_TO_POINT, Message
from .labels import Labelled, Receive

PIECE_BYTES = 1 << 20

_ALIGNMENT = 256


class StagedTransport(Transport):
    """One rank, on the device that is current at construction.

    Args:
        host: The transport of host arrays. This one owns it, so pass a duplicate.
    """

    name = "staged"

    def __init__(self, host: Transport) -> None:
        super().__init__()
        self.rank, self.size, self.timeout_s = host.rank, host.size, host.timeout_s
        self.concurrent = host.concurrent
        self.adds_in_rank_order = host.adds_in_rank_order
        self._host = host
        self._down = cupy.cuda.Stream(non_blocking=True)
        self._pinned: Array = np.empty(0, np.uint8)
        self._last_up: Event | None = None
        """An event after the latest copies from pinned memory."""

    def set_order(self, order: OpOrder) -> None:
        """See `Transport.set_order`. The host transport adds."""
        self._host.set_order(order)
        self.adds_in_rank_order = self._host.adds_in_rank_order

    def set_timeout(self, timeout_s: float) -> None:
        """See `Transport.set_timeout`."""
        self.timeout_s = timeout_s
        self._host.set_timeout(timeout_s)

    def interrupted(self, error: BaseException, arrays: object) -> None:
        """See `Transport.interrupted`."""
        self._host.interrupted(error, arrays)

    @property
    def sent_bytes(self) -> int:  # type: ignore[override]
        """The bytes that the host transport has sent."""
        return self._host.sent_bytes

    def begin_call(self, name: str, *, collective: bool, describe: Callable[[], str] | None = None) -> None:
        """See `Transport.begin_call`. The host transport does the waiting."""
        self._host.begin_call(name, collective=collective, describe=describe)

    def end_call(self) -> None:
        """See `Transport.end_call`."""
        self._host.end_call()

    def cancel_call(self) -> None:
        """See `Transport.cancel_call`."""
        self._host.cancel_call()

    def limit_call(self, timeout_s: float | None) -> None:
        """See `Transport.limit_call`."""
        self._host.limit_call(timeout_s)

    def moves(self, x: Array) -> bool:
        """Device arrays."""
        return not isinstance(x, np.ndarray)

    def exchange(self, sends: Sequence[Message], recvs: Sequence[Message], *, tag: int = POINT_TO_POINT) -> None:
        """See `Transport.exchange`.

        In a collective, both ends of a message cut it into the same pieces, in the same rounds. Other messages
        are sent whole.
        """
        sources = {_key(x): x for _, x in sends}  # an array for several ranks is copied down once
        piece_bytes = PIECE_BYTES if tag == COLLECTIVE else None
        staged = self._stage([*sources.values(), *(out for _, out in recvs)], piece_bytes)
        outgoing, incoming = dict(zip(sources, staged, strict=False)), staged[len(sources) :]
        for k in self._arrivals(outgoing.values(), max((len(s.pieces) for s in staged), default=0)):
            self._host.exchange(
                [(peer, piece) for peer, x in sends for piece in outgoing[_key(x)].pieces[k : k + 1]],
                [(p, piece) for (p, _), s in zip(recvs, incoming, strict=True) for piece in s.pieces[k : k + 1]],
                tag=tag,
            )
            self._copy_up(incoming, k)

    def exchange_labelled(self, sends: Sequence[Labelled], receives: Sequence[Receive]) -> None:
        """See `Transport.exchange_labelled`. Arrays are sent whole."""
        staged = self._stage([*(x for _, x, _ in sends), *(each.out for each in receives)], None)
        outgoing, incoming = staged[: len(sends)], staged[len(sends) :]
        on_host = [Receive(r.sources, s.pieces[0], r.expected) for r, s in zip(receives, incoming, strict=True)]
        for k in self._arrivals(outgoing, min(len(staged), 1)):
            messages = [(peer, s.pieces[0], of) for (peer, _, of), s in zip(sends, outgoing, strict=True)]
            try:
                self._host.exchange_labelled(messages, on_host)
            finally:
                fits = zip(incoming, on_host, strict=True)
                self._copy_up([s for s, each in fits if each.found == each.expected], k)
        for receive, each in zip(receives, on_host, strict=True):
            receive.source = each.source

    def allreduce(self, x: Array, out: Array, op: str) -> None:
        """The host transport's, piece by piece; see `Transport`."""
        (staged,) = self._stage([x], PIECE_BYTES)
        for k in self._arrivals([staged], len(staged.pieces)):
            piece = staged.pieces[k].view(x.dtype)
            self._host.allreduce(piece, piece, op)
            self._copy_up([staged._replace(x=out)], k)

    def reduce(self, x: Array, out: Array | None, root: int, op: str) -> None:
        """The host transport's, piece by piece; see `Transport`."""
        (staged,) = self._stage([x], PIECE_BYTES)
        for k in self._arrivals([staged], len(staged.pieces)):
            piece = staged.pieces[k].view(x.dtype)
            self._host.reduce(piece, None if out is None else piece, root, op)
            if out is not None:
                self._copy_up([staged._replace(x=out)], k)

    def broadcast(self, x: Array, root: int) -> None:
        """The host transport's, piece by piece; see `Transport`."""
        (staged,) = self._stage([x], PIECE_BYTES)
        down, up = ([staged], []) if self.rank == root else ([], [staged])
        for k in self._arrivals(down, len(staged.pieces)):
            self._host.broadcast(staged.pieces[k], root)
            self._copy_up(up, k)

    def barrier(self) -> None:
        """The host transport's barrier; it does not wait for streams."""
        self._host.barrier()

    def agree(self, flag: bool) -> bool:
        """The host transport's agreement."""
        return self._host.agree(flag)

    def split(self, color: int, key: int) -> Transport:
        """See `Transport.split`."""
        return StagedTransport(self._host.split(color, key))

    def dup(self) -> Transport:
        """See `Transport.dup`."""
        return StagedTransport(self._host.dup())

    def subgroup(self, ranks: Sequence[int], name: str, host: Transport | None = None) -> Transport:
        """See `Transport.subgroup`."""
        return StagedTransport(self._host.subgroup(ranks, f"{name}-staged"))

    def shrink(self, host: Transport | None = None) -> Transport:
        """A new transport over the survivors of its own host transport."""
        return StagedTransport(self._host.shrink())

    def abort(self, exit_code: int = 1) -> None:
        """Abort the host transport."""
        self._host.abort(exit_code)

    def close(self) -> None:
        """Close the host transport. Collective."""
        if self._last_up is not None:
            self._last_up.synchronize()
        super().close()
        self._host.close()

    # Pinned memory, and copies ----------------------------------------------------------------------

    def _stage(self, xs: Sequence[Array], piece_bytes: int | None) -> list[_Staged]:
        """Pinned memory for each array, in pieces of `piece_bytes`, or in one piece if None."""
        if self._last_up is not None:
            self._last_up.synchronize()
        ends = np.cumsum([-(-x.nbytes // _ALIGNMENT) * _ALIGNMENT for x in xs], dtype=int).tolist()
        if ends and ends[-1] > self._pinned.nbytes:
            self._pinned = cupyx.empty_pinned(ends[-1], np.uint8)
        staged = []
        for x, start in zip(xs, [0, *ends], strict=False):
            step = piece_bytes or x.nbytes or 1
            part = self._pinned[start : start + x.nbytes]
            staged.append(_Staged(x, [part[i : i + step] for i in range(0, max(x.nbytes, 1), step)]))
        return staged

    def _arrivals(self, staged: Iterable[_Staged], rounds: int) -> Iterator[int]:
        """Enqueue all copies to the host; yields the number of each round once its pieces have arrived."""
        self._down.wait_event(record_event())
        try:
            arrivals = [self._copy_down(staged, k) for k in range(rounds)]
            for k, arrival in enumerate(arrivals):
                if arrival is not None:
                    arrival.synchronize()
                yield k
        except BaseException:  # GeneratorExit if a round has failed
            with suppress(cupy.cuda.runtime.CUDARuntimeError):  # after an error of CUDA nothing is copied
                self._last_up = record_event()
                self._down.synchronize()  # others may get the pinned memory after an error
            raise
        self._last_up = record_event()

    def _copy_down(self, staged: Iterable[_Staged], k: int) -> Event | None:
        """Enqueue the copies to the host of round `k`; returns an event after them, or None if there are none."""
        runtime, copied = cupy.cuda.runtime, False
        for pointer, piece in _round(staged, k):
            kind = runtime.memcpyDeviceToHost
            runtime.memcpyAsync(address(piece), pointer, piece.nbytes, kind, self._down.ptr)
            copied = True
        return record_event(self._down) if copied else None

    def _copy_up(self, staged: Iterable[_Staged], k: int) -> None:
        runtime, stream = cupy.cuda.runtime, cupy.cuda.get_current_stream().ptr
        for pointer, piece in _round(staged, k):
            kind = runtime.memcpyHostToDevice
            runtime.memcpyAsync(pointer, address(piece), piece.nbytes, kind, stream)


class _Staged(NamedTuple):
    """A device array, and its pieces in pinned memory, as bytes."""

    x: Array
    pieces: list[Array]


def _round(staged: Iterable[_Staged], k: int) -> Iterator[tuple[int, Array]]:
    """The device address and the pinned memory of piece `k` of each array that has one."""
    for x, pieces in staged:
        if k < len(pieces) and pieces[k].nbytes:
            yield address(x) + k * pieces[0].nbytes, pieces[k]


def _key(x: Array) -> tuple[int, int]:
    return address(x), x.nbytes
