"""Slabs of sharded tensors, PyTorch's DTensor: which indices a rank has, and how it gets those that it needs.

slab_of        the slab of a tensor that `fully_shard` has sharded
even           the slabs of ranks, as `fully_shard` makes them
redistribute   give each rank the slabs that it needs, of those that all ranks have
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Protocol, TypeGuard

import numpy as np

from ... import arrays
from ...arrays import Array
from ...checkpoint.slices import cover
from ...checkpoint.trees import Slab
from ...comm import Communicator
from ...errors import CommAborted, UnsupportedError
from .slot import checksum

Interval = tuple[int, int]
"""The first index of a slab, and the index after its last."""


class Placement(Protocol):
    """Of PyTorch's placements what is used here; `dim` is that of Shard."""

    dim: int

    def is_replicate(self) -> bool:
        """Whether all ranks along an axis of the mesh have the same."""


class Mesh(Protocol):
    """Of PyTorch's DeviceMesh what is used here."""

    def size(self, axis: int) -> int:
        """The number of ranks along an axis."""

    def get_local_rank(self, axis: int) -> int:
        """The index of this rank along an axis."""


class DTensor(Protocol):
    """Of PyTorch's DTensor what is used here."""

    ndim: int
    shape: Sequence[int]
    placements: Sequence[Placement]
    device_mesh: Mesh

    def to_local(self) -> Array:
        """The tensor of this rank."""

    def stride(self) -> tuple[int, ...]:
        """The strides of the whole tensor."""

    @staticmethod
    def from_local(local: Array, mesh: Mesh, placements: Sequence[Placement], **settings: object) -> DTensor:
        """Make a DTensor of the tensors of all ranks."""


Held = tuple[Slab, "int | None"]
"""A slab that a rank holds, and its checksum; None if it is not checked."""


class LostStateError(Exception):
    """State that no process holds any more; raised on all processes."""


def is_sharded(value: object) -> TypeGuard[DTensor]:
    """Whether a value is a DTensor."""
    return arrays.is_tensor(value) and hasattr(value, "placements") and hasattr(value, "device_mesh")


def slab_of(tensor: DTensor) -> Slab:
    """The slab of this rank of a tensor that is sharded along one axis, over all ranks or those of a replica.

    Raises:
        UnsupportedError: It is sharded in another way.
    """
    found = [(n, each) for n, each in enumerate(tensor.placements) if not each.is_replicate()]
    if len(found) != 1 or type(found[0][1]).__name__ != "Shard":
        raise UnsupportedError(
            f"a tensor is placed by {tuple(tensor.placements)}, expected one Shard, and Replicate beside it, as "
            "fully_shard places parameters"
        )
    mesh_axis, axis = found[0][0], found[0][1].dim % tensor.ndim
    total, local = int(tensor.shape[axis]), arrays.as_array(tensor.to_local().detach())
    begin, end = even(total, tensor.device_mesh.size(mesh_axis))[tensor.device_mesh.get_local_rank(mesh_axis)]
    if local.shape[axis] != end - begin:
        raise UnsupportedError(
            f"a tensor has {local.shape[axis]} of {total} rows, expected {end - begin}: of each rank as many"
        )
    return Slab("", local, axis, begin, total)


def as_sharded(slab: Slab, like: DTensor) -> DTensor:
    """A DTensor with the placement of `like`, which shares memory with a slab on the host.

    On other devices it is a copy.
    """
    local = arrays.as_tensor(slab.array, sys.modules["torch"]).to(like.to_local().device)
    return like.from_local(
        local, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def even(total: int, ranks: int) -> list[Interval]:
    """The slabs of ranks that are equal but for the last ones, which may be empty.

    >>> even(7, 3), even(4, 3)
    ([(0, 3), (3, 6), (6, 7)], [(0, 2), (2, 4), (4, 4)])
    """
    length = -(-total // ranks)
    return [(min(total, rank * length), min(total, (rank + 1) * length)) for rank in range(ranks)]


def interval_of(slab: Slab) -> Interval:
    """The indices of a slab."""
    assert slab.begin is not None
    return slab.begin, slab.begin + slab.length


def redistribute(
    comm: Communicator,
    kinds: Sequence[Slab],
    held: Sequence[Sequence[Held]],
    wanted: Sequence[Interval] | None,
) -> list[Slab]:
    """Give each rank the slabs that it needs, of those that all ranks hold: its own where it has them.

    Collective.

    Args:
        comm: The ranks.
        kinds: A slab of each sharded array, for the dtypes and the shapes.
        held: For each array the slabs that this rank holds, on the host. Damaged ones are not used.
        wanted: The indices that this rank needs of each array; None if it needs nothing.

    Returns:
        The slabs, in `wanted`'s order; empty without it.

    Raises:
        LostStateError: No rank holds some indices that a rank needs. Raised on all ranks.
        CommAborted: A piece arrived damaged. Raised on all ranks.
        CommError: A rank died.
    """
    rank, size = comm.rank, comm.size
    table = comm.allgather_object([[interval_of(each) for each, _ in slabs] for slabs in held])
    found = [] if wanted is None else [_empty(kind, *each) for kind, each in zip(kinds, wanted, strict=True)]
    asked: list[list[tuple[int, int, int, int]]] = [[] for _ in table]
    """By rank the pieces that this one needs: array, number among the slabs that the rank holds, begin, end."""
    lost = []
    for n, kind in enumerate(kinds):
        ranks = ((rank + step) % size for step in range(size))  # this one first
        places = [(each, i, interval) for each in ranks for i, interval in enumerate(table[each][n])]
        intervals = [interval for _, _, interval in places]
        if gap := _first_gap(kind.total, intervals):
            lost.append(f"indices {gap[0]} to {gap[1] - 1} of {kind.total} along axis {kind.axis} of {kind.path}")
        for part, low, high in cover(*wanted[n], intervals) if wanted is not None else ():
            source, i, _ = places[part]
            asked[source].append((n, i, low, high))
    if lost:
        raise LostStateError(", ".join(lost[:3]) + f", and {len(lost) - 3} others" * (len(lost) > 3))
    given = [row[rank] for row in comm.allgather_object(asked)]
    used = {(n, i) for pieces in given for n, i, _, _ in pieces}
    damaged = {(n, i) for n, i in used if not _is_intact(held[n][i])}
    if any(comm.allgather_object(len(damaged))):
        left = [[each for i, each in enumerate(slabs) if (n, i) not in damaged] for n, slabs in enumerate(held)]
        return redistribute(comm, kinds, left, wanted)
    sends = [[_rows(held[n][i][0], low, high) for n, i, low, high in pieces] for pieces in given]
    recvs = [[_rows(found[n], low, high) for n, _, low, high in pieces] for pieces in asked]
    for mine, out in zip(sends[rank], recvs[rank], strict=True):
        out[...] = mine
    sends[rank] = recvs[rank] = []
    bad = _exchange(comm, [[*map(np.ascontiguousarray, pieces)] for pieces in sends], recvs)
    _raise_if_damaged(comm, [f"slabs of sharded arrays from rank {each}" for each in bad])
    return found


def _raise_if_damaged(comm: Communicator, damaged: Sequence[str]) -> None:
    """Raise `CommAborted` on all ranks if anything has arrived damaged on any, named as given. Collective."""
    rows = comm.allgather_object([*damaged])
    texts = [f"{each} arrived damaged on rank {rank}" for rank, row in enumerate(rows) for each in row]
    if texts:
        raise CommAborted("; ".join(texts[:3]) + f"; and {len(texts) - 3} others" * (len(texts) > 3))


def _is_intact(held: Held) -> bool:
    slab, expected = held
    return expected is None or checksum(slab.array) == expected


def _first_gap(total: int, parts: Sequence[Interval]) -> Interval | None:
    """The first of all indices that no part has."""
    reached = 0
    for begin, end in sorted(parts):
        if begin > reached:
            return reached, begin
        reached = max(reached, end)
    return (reached, total) if reached < total else None


def _exchange(
    comm: Communicator, sends: Sequence[Sequence[Array]], recvs: Sequence[Sequence[Array]]
) -> list[int]:
    """Exchange pieces, by rank, with their checksums; returns from whom damaged ones came. Collective."""
    into = [[np.empty(piece.shape, piece.dtype) for piece in pieces] for pieces in recvs]
    given = [np.array([checksum(piece) for piece in pieces], np.uint64) for pieces in sends]
    sums = [np.empty(len(pieces), np.uint64) for pieces in recvs]
    comm.exchange([*_messages(sends, given)], [*_messages(into, sums)])
    for pieces, arrived in zip(recvs, into, strict=True):
        for piece, x in zip(pieces, arrived, strict=True):
            piece[...] = x
    return [n for n, each in enumerate(into) if [*map(checksum, each)] != sums[n].tolist()]


def _messages(pieces: Sequence[Sequence[Array]], sums: Sequence[Array]) -> Iterator[tuple[int, Array, str]]:
    for rank, (each, of_each) in enumerate(zip(pieces, sums, strict=True)):
        if each:
            yield from ((rank, arrays.as_bytes(x), str(n)) for n, x in enumerate(each))
            yield rank, of_each, "checksums"


def _rows(slab: Slab, low: int, high: int) -> Array:
    """A view of the indices `low` to `high` of a slab."""
    begin, _ = interval_of(slab)
    return slab.array[(slice(None),) * slab.axis + (slice(low - begin, high - begin),)]


def _empty(kind: Slab, begin: int, end: int) -> Slab:
    """Memory for a slab of the same array with these indices."""
    shape = list(kind.array.shape)
    shape[kind.axis] = end - begin
    return kind._replace(array=np.empty(shape, kind.array.dtype), begin=begin)
