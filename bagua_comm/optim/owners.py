"""Functions of whole matrices whose rows are spread over the ranks: each is computed once, by the matrix's owner.

Rows go to the owners by one alltoall for a group of matrices, and what the owners compute comes back by another:
2 (p - 1) / p of a shard for each matrix and rank, where an allgather on all ranks would take p - 1 shards and p
times the computing. Matrices that every rank has need the way back alone, an allgather. While a group is
computed, the next one travels to its owners, and the one before comes back.

Owners follow from the shapes alone, and may change at any time: without a codec they hold nothing between calls.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from itertools import chain, zip_longest
from typing import NamedTuple
from zlib import crc32

from .. import arrays
from ..arrays import Array
from ..codecs import Codec
from ..comm import Communicator
from ..comm.call import Call
from ..comm.outcomes import on_all_ranks
from ..errors import ArrayError
from ..execution.lane import Lane
from ..objects.caching import BoundedCache
from ..objects.closing import Closing
from ..trace import Counters
from .row_codec import RowCodec, check_row_codec

GROUP = 2**21
"""Elements of a group of matrices, at least, unless they are the last ones."""

_KEPT = 8
"""How many plans are kept, of different lists of matrices."""


class Matrix(NamedTuple):
    """The shape of a matrix, and which of its rows the ranks have."""

    shape: tuple[int, int]
    rows: tuple[int, ...] | None = None
    """How many each rank has, in the order of ranks, (p,); None if every rank has the whole matrix."""

    @property
    def cost(self) -> int:
        """The multiplications of a Newton-Schulz step, cubic in the sides."""
        short, long = sorted(self.shape)
        return short * short * (2 * long + short)

    def size(self, rank: int) -> int:
        """The number of elements that a rank has."""
        return self.shape[1] * (self.shape[0] if self.rows is None else self.rows[rank])


class Owners(Closing):
    """The ranks that own matrices, and the exchange of rows with them, on a lane.

    Collective. Can be used as a context manager.

    Args:
        comm: A communicator; all its ranks make the same calls. None for this process alone.
        codec: Encodes what the owners compute, as float32, with error feedback; None to send it as it is. An
            owner keeps the errors of its matrices, which no checkpoint holds; a matrix whose owner changes, as
            when another one is left out, begins without. Call `reset` when states are loaded or made anew.

    Raises:
        ArrayError: `codec` is not a Codec, or rounds stochastically. On all ranks.
        UnsupportedError: `codec` does not take float32. On all ranks.

    Attributes:
        comm: The communicator.
        codec: The codec.
        counters: Calls and bytes of the exchanges.

    >>> import numpy as np
    >>> from bagua_comm.testing import run_ranks
    >>> matrices = [Matrix((3, 2), (1, 2))]   # the second rank has two of three rows
    >>> def body(comm):
    ...     mine = np.full((1 + comm.rank, 2), 1.0 + comm.rank)
    ...     with Owners(comm) as owners:
    ...         return [rows.tolist() for _, rows in owners.map(lambda x: x / x.sum(), matrices, lambda _: mine)]
    >>> run_ranks(2, body)
    [[[[0.1, 0.1]]], [[[0.2, 0.2], [0.2, 0.2]]]]
    """

    def __init__(self, comm: Communicator | None = None, codec: Codec | None = None) -> None:
        if comm is None:
            check_row_codec("Owners", codec)
        else:
            on_all_ranks(comm, "Owners", partial(check_row_codec, "Owners", codec), ArrayError)
        self.comm, self.codec, self._rows = comm, codec, RowCodec(codec)
        self._lane = None if comm is None or comm.size == 1 else comm.lane()
        self.counters = Counters() if self._lane is None else self._lane.comm.counters
        self._plans: BoundedCache[tuple[Matrix, ...], list[_Group]] = BoundedCache(_KEPT)

    def reset(self) -> None:
        """Forget the errors of a codec, as after weights have been loaded."""
        self._rows.residuals.clear()

    def agree(self, call: str, settings: object, make: Callable[[], Iterable[Matrix]]) -> list[Matrix]:
        """Return the matrices that `make` returns, after a comparison between the ranks.

        Collective.

        Args:
            call: The call that steps the matrices, for errors.
            settings: What must be equal on all ranks besides, as text.
            make: May raise.

        Raises:
            CommMismatch: Ranks have other settings or matrices, or `make` raises on some. Raised on all ranks.
        """
        error, matrices = None, list[Matrix]()
        try:
            matrices = [*make()]
        except Exception as exc:
            error = exc
        if self.comm is not None:  # not on the lane, which an error would end
            digest = f"{len(matrices)} with checksum {crc32(repr(matrices).encode()):x}"
            own = settings if self.codec is None else f"{self.codec}, {settings}"
            details: dict[str, object] = {"settings": own, "matrices": digest}
            compared = Call(self.comm, call, **(details if error is None else {"error": error}))
            compared.run(lambda *_: compared.compare())
        if error is not None:
            raise error
        return matrices

    def map(
        self,
        function: Callable[[Array], Array],
        matrices: Sequence[Matrix],
        shard: Callable[[int], Array],
        name: Callable[[int], Hashable] | None = None,
    ) -> Iterator[tuple[int, Array]]:
        """Yield the index of each matrix, and this rank's rows of `function(matrix)`.

        Collective. The order is the same on all ranks; iterate to the end.

        Args:
            function: From the whole matrix, (m, n), to one of the same shape, without changing it; called by the
                owner. Of the same dtype; with a codec and several ranks of any, and rows are float32.
            matrices: The same list on every rank; see `Matrix`.
            shard: This rank's rows of the matrix of an index, (rows, n), all of one dtype; called once for each.
            name: The name of the matrix of an index, the same in each call: with a codec, that of its errors. By
                default its index, with its shape.
        """
        if self._lane is None:
            yield from ((index, function(shard(index))) for index in range(len(matrices)))
            return
        groups = self._plan(tuple(matrices), self._lane.comm)
        name = name or (lambda index: (index, matrices[index]))
        transits = [_Transit(self._lane, group, shard, name, self._rows) for group in groups]
        for now in range(len(transits) + 2):
            for coming in transits[now : now + 1]:
                coming.begin()
            for arriving in transits[max(now - 1, 0) : now]:
                arriving.compute(function)
            for returning in transits[max(now - 2, 0) : max(now - 1, 0)]:
                yield from returning.end()

    def _plan(self, matrices: tuple[Matrix, ...], comm: Communicator) -> list[_Group]:
        """Return the groups, in each of which the owners have about equally much to compute."""
        if matrices not in self._plans:
            groups = list[_Group]()
            for spread in (True, False):
                alike = {n: each.cost for n, each in enumerate(matrices) if (each.rows is not None) is spread}
                owners, chosen = balanced(alike, comm.size), dict[int, int]()
                queues = [[n for n, owner in owners.items() if owner == rank] for rank in range(comm.size)]
                for layer in zip_longest(*queues):
                    chosen |= {n: owners[n] for n in layer if n is not None}
                    if sum(math.prod(matrices[n].shape) for n in chosen) >= GROUP:
                        groups.append(_Group(chosen, matrices, comm, self._rows.size))
                        chosen = {}
                if chosen:
                    groups.append(_Group(chosen, matrices, comm, self._rows.size))
            self._plans[matrices] = groups
        return self._plans[matrices]

    def close(self) -> None:
        """Free the lane. Collective."""
        if self._lane is not None:
            self._lane.close()

    def _leave(self, error: BaseException) -> None:
        if self._lane is not None:
            self._lane.abort()


def balanced(costs: Mapping[int, int], ranks: int) -> dict[int, int]:
    """The owners of matrices: the costliest first, each to the rank with the least work so far.

    The largest work of a rank is at most 4/3 of the smallest possible (Graham, Bounds on multiprocessing timing
    anomalies, 1969).

    Args:
        costs: By matrix.
        ranks: The number of ranks.

    Returns:
        The ranks by matrix, the costliest matrix first.

    >>> balanced({0: 3, 1: 3, 2: 4, 3: 5, 4: 5}, 2)
    {3: 0, 4: 1, 2: 0, 0: 1, 1: 1}
    """
    work, owners = [0] * ranks, dict[int, int]()
    for matrix in sorted(costs, key=lambda matrix: -costs[matrix]):
        owners[matrix] = work.index(min(work))
        work[owners[matrix]] += costs[matrix]
    return owners


class _Group:
    """Which elements of some matrices travel together: those held here, and those of the matrices owned here.

    Held ones are in the order of owners, and then of matrices; owned ones in the order of the ranks that hold
    them, and then of matrices.

    Args:
        owners: The owner of each matrix of the group, by index.
        matrices: All matrices.
        comm: All ranks.
        size: From the elements of a result to the elements that travel back.
    """

    def __init__(
        self,
        owners: dict[int, int],
        matrices: Sequence[Matrix],
        comm: Communicator,
        size: Callable[[int], int],
    ) -> None:
        self.indices = sorted(owners, key=lambda index: (owners[index], index))
        self.shapes = {index: matrices[index].shape for index in self.indices}
        self.is_spread = matrices[self.indices[0]].rows is not None
        holders = range(comm.size) if self.is_spread else [comm.rank]
        self.held = {index: matrices[index].size(comm.rank) for index in self.indices}
        self.parts = {
            index: [matrices[index].size(rank) for rank in holders]
            for index in self.indices
            if owners[index] == comm.rank
        }
        """For each matrix that is owned here, the elements of each rank that holds some."""
        self.by_holder = [[parts[n] for parts in self.parts.values()] for n in range(len(holders))]
        """For each rank that holds some, its elements of each matrix that is owned here."""

        def to_owners(size: Callable[[int], int]) -> list[int]:
            sizes = [0] * comm.size
            for index, owner in owners.items():
                sizes[owner] += size(self.held[index])
            return sizes

        def from_holders(size: Callable[[int], int]) -> list[int]:
            return [sum(map(size, counts)) for counts in self.by_holder]

        self.there = to_owners(int), from_holders(int)
        """On the way to the owners: elements that go to each rank, and that come from each holder."""
        self.back = from_holders(size), to_owners(size)
        """On the way back: what goes to each holder, and what comes from each rank."""


class _Transit:
    """A group on its way to the owners and back."""

    _arriving: Future[Array] | None = None
    _returning: Future[Array]
    _held: Array
    _owned: Array

    def __init__(
        self,
        lane: Lane[Communicator],
        group: _Group,
        shard: Callable[[int], Array],
        name: Callable[[int], Hashable],
        rows: RowCodec,
    ) -> None:
        self._lane, self._group, self._shard, self._name, self._rows = lane, group, shard, name, rows

    def begin(self) -> None:
        """Send what this rank holds to the owners."""
        group, lane = self._group, self._lane
        shards = {index: self._shard(index).reshape(-1) for index in group.indices}
        like = shards[group.indices[0]]
        library = arrays.namespace(like)
        if group.is_spread:
            sent, received = group.there
            self._held = library.concatenate([*shards.values()])
            self._owned = library.empty(sum(received), like.dtype)
            call = lane.comm.alltoall
            self._arriving = lane.submit(call, self._held, out=self._owned, counts=sent, out_counts=received)
        else:
            self._owned = library.concatenate([like[:0], *(shards[index] for index in group.parts)])

    def compute(self, function: Callable[[Array], Array]) -> None:
        """Compute the function of the matrices that this rank owns, and send the rows back."""
        group, lane, codec = self._group, self._lane, self._rows
        if self._arriving is not None:
            lane.result(self._arriving)
        library, dtype = arrays.namespace(self._owned), codec.dtype(self._owned.dtype)
        pieces = arrays.parts(self._owned, list(chain(*group.by_holder)))
        del self._owned
        for n, (index, counts) in enumerate(group.parts.items()):
            mine = slice(n, None, len(group.parts))
            result = function(library.concatenate(pieces[mine]).reshape(group.shapes[index]))
            pieces[mine] = codec.encode(self._name(index), arrays.contiguous(result).reshape(-1), counts)
        for index in group.held.keys() - group.parts.keys():
            codec.residuals.pop(self._name(index), None)
        sent, received = group.back
        self._owned = library.concatenate([library.empty(0, dtype), *pieces])
        self._held = library.empty(sum(received), dtype)
        if group.is_spread:
            call = lane.comm.alltoall
            self._returning = lane.submit(call, self._owned, out=self._held, counts=sent, out_counts=received)
        else:
            self._returning = lane.submit(lane.comm.allgather, self._owned, out=self._held, counts=received)

    def end(self) -> Iterator[tuple[int, Array]]:
        """Yield the index and this rank's rows of each matrix."""
        self._lane.result(self._returning)
        held, codec = self._group.held, self._rows
        pieces = arrays.parts(self._held, [codec.size(count) for count in held.values()])
        del self._held, self._owned
        for (index, count), piece in zip(held.items(), pieces, strict=True):
            yield index, codec.decode(piece, count).reshape(-1, self._group.shapes[index][1])
