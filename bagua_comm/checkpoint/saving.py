"""Saving of one checkpoint: a copy of this rank's part on the host, then the file."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from .. import arrays
from ..arrays import Array
from . import slabs, tensorfile
from .folders import file_name
from .slices import slices_of
from .trees import Json, Leaf, Packed, shortened

_ALIGNED = 64


class Staging:
    """Reusable host memory that grows, so that only the first save pays for new pages."""

    def __init__(self) -> None:
        self._memory = np.empty(0, np.uint8)
        self._used = 0

    def begin(self, nbytes: int) -> None:
        """Make room for arrays of this many bytes in all, and discard the former contents."""
        if self._memory.size < nbytes:
            self._memory = np.empty(0, np.uint8)  # free the old before the new
            self._memory = np.empty(nbytes, np.uint8)
        self._used = 0

    def copy(self, x: Array, begin: int, end: int) -> Array:
        """A copy of elements `begin` to `end` of the flat array."""
        count = end - begin
        nbytes = count * x.itemsize
        out = self._memory[self._used : self._used + nbytes].view(x.dtype)
        self._used += room(nbytes)
        if count:
            part = arrays.contiguous(x).reshape(-1)[begin:end]
            if isinstance(part, np.ndarray):
                out[...] = part
            else:
                part.get(out=out)
        return out


def room(nbytes: int) -> int:
    """`nbytes`, rounded up."""
    return -(-nbytes // _ALIGNED) * _ALIGNED


class Piece(NamedTuple):
    """One array of the file."""

    name: str
    array: Array
    place: list[int]
    """[number, begin, end] of a slice of a shared array, or [number] of a per-rank one."""


class SaveJob(NamedTuple):
    """The data of this rank's part."""

    step: int
    tree: Json
    shared: list[list[object]]
    """The dtype and the shape of every shared array."""
    own: dict[str, Json]
    """The per-rank trees, and the dtypes and shapes of their arrays."""
    pieces: list[Piece]
    previous: list[Array]
    """This rank's copy of the shared slices that the previous rank writes, for comparison."""
    own_slabs: list[Array]
    """This rank's slabs of distributed arrays."""
    wholes: list[slabs.Whole]
    """The distributed arrays; known when all ranks have told the lengths of their slabs."""


def digest(packed: Packed) -> str:
    """A hash of everything that must be equal on all ranks, except the contents of arrays."""
    text = json.dumps([packed.tree, _kinds(packed.shared), [slab.kind for slab in packed.slabs]])
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def stage(step: int, packed: Packed, staging: Staging, rank: int, ranks: int) -> SaveJob:
    """Copy this rank's part, and the slices that it checks for another rank, to the host."""
    slices = slices_of([(leaf.array.size, leaf.array.itemsize) for leaf in packed.shared], ranks)
    mine = [(packed.shared[each.array], each) for each in slices[rank]]
    previous = [(packed.shared[each.array], each) for each in slices[rank - 1]] if ranks > 1 else []
    shared = [room((s.end - s.begin) * leaf.array.itemsize) for leaf, s in [*mine, *previous]]
    own = [each.array for leaves in (packed.own, packed.slabs) for each in leaves]
    staging.begin(sum(shared) + sum(room(x.nbytes) for x in own))
    pieces = []
    for (path, x, _), (number, begin, end) in mine:
        copied, name = staging.copy(x, begin, end), path
        if end - begin == x.size:
            copied = copied.reshape(x.shape)
        else:
            name += f"[{begin}:{end}]"
        pieces.append(Piece(name, copied, [number, begin, end]))
    for number, (path, x, _) in enumerate(packed.own):
        pieces.append(Piece(f"own {path}", staging.copy(x, 0, x.size).reshape(x.shape), [number]))
    return SaveJob(
        step,
        packed.tree,
        _kinds(packed.shared),
        {"trees": packed.own_trees, "arrays": _kinds(packed.own)},
        pieces,
        [staging.copy(leaf.array, each.begin, each.end) for leaf, each in previous],
        [staging.copy(slab.array, 0, slab.array.size) for slab in packed.slabs],
        [],
    )


def _kinds(leaves: list[Leaf]) -> list[list[object]]:
    return [[arrays.dtype_name(leaf.array.dtype), list(leaf.array.shape)] for leaf in leaves]


class RankFile(NamedTuple):
    """A rank's report on its file."""

    file: dict[str, Json]
    """Its entry in the manifest."""
    own: dict[str, Json]
    crcs: list[int]
    """The CRCs of its slices of shared arrays."""
    previous_crcs: list[int]
    """The CRCs of its copies of the previous rank's slices."""
    names: list[str]
    joined: tensorfile.WrittenFile | None
    """The file of distributed arrays, as this rank knows it, if there are any."""


def write(folder: Path, job: SaveJob, rank: int, note: Callable[[], None]) -> RankFile:
    """Write this rank's file, and its slabs to the file of distributed arrays.

    Raises:
        OSError: It cannot be written.
    """
    named = [tensorfile.whole(piece.name, piece.array) for piece in job.pieces]
    written = tensorfile.write(folder / file_name(rank), named, note)
    shared: list[Json] = []
    own: list[Json] = []
    for piece, (offset, crc) in zip(job.pieces, written.places, strict=True):
        (own if len(piece.place) == 1 else shared).append([*piece.place, offset, crc])
    previous_crcs = []
    for x in job.previous:
        previous_crcs.append(tensorfile.checksum(x))
        note()
    file = {"bytes": written.nbytes, "head": [written.head, written.head_crc], "shared": shared, "own": own}
    names = [piece.name for piece in job.pieces if len(piece.place) == 3]
    joined = None
    if job.wholes:
        pairs = zip(job.wholes, job.own_slabs, strict=True)
        entries = [slabs.entry(*pair, rank) for pair in pairs]
        joined = tensorfile.write(folder / slabs.FILE, entries, note, is_shared=True)
    return RankFile(file, job.own, [row[-1] for row in shared], previous_crcs, names, joined)


def first_mismatch(parts: list[RankFile]) -> str | None:
    """The first difference between two ranks' shared arrays, by the CRCs of each rank's copies; None if none."""
    for rank, part in enumerate(parts):
        previous = parts[rank - 1]
        for name, crc, theirs in zip(previous.names, part.previous_crcs, previous.crcs, strict=False):
            if crc != theirs:
                return (
                    f"{shortened(name)} differs between rank {(rank - 1) % len(parts)} and rank {rank}; put what "
                    "belongs to a rank in Own(...), or make the ranks equal first"
                )
    return None
