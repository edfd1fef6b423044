"""One pipeline for every reduction of arrays: exact, quantized or error-fed, in one piece or in many.

    encode    the part for each rank, and send it                 (scatter)
    combine   the parts from all ranks, and send the result       (gather)
    decode    the results of all ranks

The pieces of an array pass through these stages in turn, so that one piece is processed while others are on their
way. `Stages` define the work on a piece; a `Flow` sends, once the ranks have agreed on the call.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Protocol

from .. import kernels
from ..arrays import Array, DType, Scratch
from .flow import Flow, Rows, Wait, ended

LAG = 4
"""How many pieces a stage is behind the one before it, and so how many pieces are on their way at a time."""


class Stages(ABC):
    """The work on each of `count` pieces of a reduction, and the buffers of its messages."""

    count: int

    @abstractmethod
    def encode(self, i: int) -> tuple[Rows, Rows]:
        """Prepare piece i; returns the arrays to send to each rank, and the arrays to receive from each rank."""

    @abstractmethod
    def combine(self, i: int) -> tuple[Array, Rows]:
        """Reduce the parts of piece i; returns this rank's result, and the arrays for all ranks' results."""

    def decode(self, i: int) -> None:  # noqa: B027 - exact results need no decoding
        """Decode the results of all ranks for piece i."""


class Encoding(Protocol):
    """The encoded elements that `Transport.allreduce_encoded` adds; any piece may be requested alone."""

    dtype: DType
    """The dtype of encoded elements: integers, whose sum depends on no order. No narrower than the results."""

    def encode(self, piece: slice, out: Array) -> None:
        """Write this rank's encoding of these elements."""

    def decode(self, total: Array, piece: slice, out: Array) -> None:
        """Write the results for these elements, of which `total` is the sum over all ranks."""


def reduce_through(flow: Flow, stages: Stages, *, scatter: bool = True, gather: bool = True) -> None:
    """Encode, scatter, combine, gather, decode.

    Without `gather`, each rank keeps the result that it combined. Without `scatter`, `combine` makes this rank's
    result alone.

    Collective.
    """
    waits: list[Wait] = [ended] * stages.count

    def send(i: int) -> None:
        waits[i] = flow.alltoall(*stages.encode(i))

    def combine(i: int) -> None:
        waits[i]()
        mine, everyones = stages.combine(i)
        if gather:
            waits[i] = flow.allgather(mine, everyones)

    def decode(i: int) -> None:
        waits[i]()
        stages.decode(i)

    pipeline(stages.count, *([send] if scatter else []), combine, *([decode] if gather else []))


class Exact(Stages):
    """The elements themselves, added in rank order, in float32 where the dtype is narrower.

    Args:
        flow: The exchanges of the call; its `piece_bytes` is the size of a message.
        chunks: The chunks of this rank's array, which may differ in size; rank r reduces chunk r of all ranks.
        mine: The array for the chunk that this rank reduces.
        results: The arrays for the reduced chunks of all ranks, `mine` among them; empty if each rank keeps only
            its own.
        op: The reduction; see `Communicator.allreduce`.
        scratch: Memory for the parts of other ranks.
    """

    def __init__(
        self,
        flow: Flow,
        chunks: Sequence[Array],
        mine: Array,
        op: str,
        scratch: Scratch,
        results: Sequence[Array] = (),
    ) -> None:
        self._chunks, self._mine, self._op, self._results = chunks, mine, op, results
        self._size = flow.size
        like = max(chunks, key=lambda chunk: chunk.size)
        self._pieces = cut(like.size, like.nbytes, flow.piece_bytes)
        self.count = len(self._pieces)
        shape = (min(LAG + 1, self.count), self._size * self._pieces[0].stop)
        self._tables = scratch.take("parts", shape, like.dtype, like=like)

    def _parts(self, i: int) -> Array:
        """The buffer for all ranks' parts of piece i, (p, m)."""
        length = self._mine[self._pieces[i]].size
        table: Array = self._tables[i % len(self._tables), : self._size * length]
        return table.reshape(self._size, length)

    def encode(self, i: int) -> tuple[Rows, Rows]:
        """See `Stages.encode`."""
        piece = self._pieces[i]
        return [chunk[piece] for chunk in self._chunks], list(self._parts(i))

    def combine(self, i: int) -> tuple[Array, Rows]:
        """See `Stages.combine`."""
        piece = self._pieces[i]
        total = self._mine[piece]
        kernels.of(total).reduce_rows(self._parts(i), total, self._op)
        return total, [result[piece] for result in self._results]


def exchange_rows(flow: Flow, rows: Rows, into: Rows) -> None:
    """Send rows[r] to rank r, and receive into[r] from rank r, all of one size, piece by piece.

    Collective.
    """
    mine = rows[flow.rank]
    pieces = cut(mine.size, mine.nbytes, flow.piece_bytes)
    waits: list[Wait] = []

    def begin(i: int) -> None:
        waits.append(flow.alltoall([row[pieces[i]] for row in rows], [row[pieces[i]] for row in into]))

    pipeline(len(pieces), begin, lambda i: waits[i]())


def cut(count: int, nbytes: int, piece_bytes: int | None, granule: int = 1) -> list[slice]:
    """Cut `count` elements in `nbytes` into equal pieces of about `piece_bytes`, at multiples of `granule`.

    >>> cut(10, 40, 16)
    [slice(0, 4, None), slice(4, 8, None), slice(8, 10, None)]
    """
    parts = max(1, -(-nbytes // piece_bytes)) if piece_bytes is not None else 1
    length = max(1, -(-count // (parts * granule)) * granule)
    return [slice(start, min(start + length, count)) for start in range(0, max(count, 1), length)]


def pipeline(count: int, *stages: Callable[[int], None]) -> None:
    """Run all stages on pieces 0 to `count` - 1 in turn, each stage `LAG` pieces behind the one before it.

    >>> order = []
    >>> pipeline(6, lambda i: order.append(f"send {i}"), lambda i: order.append(f"receive {i}"))
    >>> order[3:8]
    ['send 3', 'send 4', 'receive 0', 'send 5', 'receive 1']
    """
    if count == 1:
        for stage in stages:
            stage(0)
        return
    for i in range(count + LAG * (len(stages) - 1)):
        for behind, stage in enumerate(stages):
            if 0 <= i - LAG * behind < count:
                stage(i - LAG * behind)


def chunk_bounds(count: int, chunks: int) -> list[slice]:
    """Cut `count` elements into chunks of ceil(count / chunks); the last may be short or empty.

    >>> chunk_bounds(5, 3)
    [slice(0, 2, None), slice(2, 4, None), slice(4, 5, None)]
    """
    length = -(-count // chunks)
    return [slice(min(i * length, count), min((i + 1) * length, count)) for i in range(chunks)]
